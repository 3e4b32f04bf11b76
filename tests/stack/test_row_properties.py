# SPDX-License-Identifier: Apache-2.0
"""vllm-blhnc-layout over drawn rows, blocks and ranks: what arrives is what was sent, in as few descriptors as runs.

vLLM's planner, workers, handshake and rank mapping, Hypothesis, and real NIXL, in one process of its own.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What the script says, once for all tests."""
    script = Path(__file__).with_name("row_properties.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def proven(told: dict[str, Any], group: str, examples: int) -> None:
    if group not in told["groups"]:
        pytest.fail("not tried: an example of another group never came to an end", pytrace=False)
    if failed := told["groups"][group]["failed"]:
        pytest.fail(failed, pytrace=False)
    assert told["groups"][group]["tried"] >= examples


@pytest.mark.parametrize(("prefill", "decode"), list(itertools.product((1, 2, 4), repeat=2)))
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_what_arrives_is_what_was_sent_and_nothing_else(
    told: dict[str, Any], mode: str, prefill: int, decode: int
) -> None:
    """Page for page from the rank that vLLM names, no padding in a page, no descriptor over another, one for a run."""
    proven(told, f"{mode}, TP {prefill} to {decode}", 5)


@pytest.mark.parametrize(
    "what", ["block size", "block size alone", "width", "name", "step", "finer step", "one more", "one less", "order"]
)
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_peer_with_other_rows_is_refused_before_a_byte_moves(told: dict[str, Any], mode: str, what: str) -> None:
    """And one whose rows come to the same is not."""
    proven(told, f"{mode}, other {what}", 3)


@pytest.mark.parametrize(("prefill", "decode"), [(3, 2), (2, 3), (4, 3), (3, 4)])
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_ranks_that_vllm_does_not_pair_are_refused(told: dict[str, Any], mode: str, prefill: int, decode: int) -> None:
    """One size must divide the other."""
    proven(told, f"{mode}, TP {prefill} to {decode}", 1)


def test_the_examples_are_not_the_easy_ones_alone(told: dict[str, Any]) -> None:
    assert set(told["traits"]) == {
        *("one run", "several runs", "no run", "runs cut", "nothing to move", "part of it cached"),
        *("padding", "indexers", "odd widths", "16-bit elements", "larger prefill", "larger decode"),
        *("block size 16", "block size 32", "block size 64", "refused", "equal after all"),
    }
