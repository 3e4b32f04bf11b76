# SPDX-License-Identifier: Apache-2.0
"""What a replay moves, in vLLM's own block managers; where vLLM is installed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.pool import transfers
from support.sessions import AgentWorkload

LOAD = AgentWorkload(seed=7, sessions=4, turns=5, cold_per_s=0, ramp_s=12).scaled(1 / 25)


def test_only_what_decode_lacks_is_moved() -> None:
    moved = transfers(LOAD, prefill=2048, decode=1024)
    held: dict[int, int] = {}
    for turn, (local, _) in zip(LOAD.requests(), moved, strict=True):
        # The last token of an answer was never computed; the shared beginning comes with the first session.
        cached = held.get(turn.stream, LOAD.shared_tokens if held else 0) // LOAD.block_size
        assert len(local) == -(-turn.input_length // LOAD.block_size) - cached
        held[turn.stream] = turn.input_length + turn.output_length - 1


def test_recycled_pools_move_more_and_in_other_orders() -> None:
    moved = transfers(LOAD, prefill=256, decode=192)
    assert sum(len(local) for local, _ in moved) > 2 * LOAD.sessions * max(len(local) for local, _ in moved)
    for local, remote in moved:
        assert len(set(local)) == len(local) == len(set(remote)) == len(remote)
        assert 0 < min(local) <= max(local) < 192  # 0 is vLLM's null block
        assert 0 < min(remote) <= max(remote) < 256
    for side in zip(*moved, strict=True):
        assert not all(ids == sorted(ids) for ids in side)
    assert transfers(LOAD, prefill=256, decode=192) == moved


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        transfers(LOAD, prefill=256, decode=64)
    with pytest.raises(RuntimeError, match="do not hold the answers"):
        transfers(replace(LOAD, turn_tokens=2000, output_tokens=2000, turns=1), prefill=512, decode=256)
