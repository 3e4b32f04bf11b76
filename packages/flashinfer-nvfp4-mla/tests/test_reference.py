# SPDX-License-Identifier: Apache-2.0
"""What of the reference its own code decides; its numbers are tested with those of the other backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashinfer_nvfp4_mla import _reference
from flashinfer_nvfp4_mla._format import quantize

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("chunk", [1, 5, 64, 10_000])
@pytest.mark.parametrize("width", [0, 1, 64, 200])
def test_how_work_is_cut_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, oracle: Callable[..., Any], close: Callable[..., None], chunk: int, width: int
) -> None:
    drawn = torch.Generator().manual_seed(0)
    cache = quantize(torch.randn(90, 512, generator=drawn), torch.randn(90, 64, generator=drawn)).view(9, 10, 352)
    query = torch.randn(4, 4, 576, generator=drawn).half()
    indices = torch.randint(-40, 95, (4, width), generator=drawn, dtype=torch.int32)
    lengths = torch.randint(0, width + 1, (4,), generator=drawn, dtype=torch.int32)
    lengths[2] = 0
    monkeypatch.setattr(_reference, "_CHUNK", chunk)
    out, lse = torch.full((4, 4, 512), torch.nan), torch.full((4, 4), torch.nan)
    _reference.decode(query, cache, indices, lengths, 0.05, 1.5, out, lse, True)
    expected = oracle(query, cache, indices, lengths, 0.05, 1.5, True)
    close(out, expected[0], lse, expected[1])


def test_scores_of_any_size_are_taken(oracle: Callable[..., Any], close: Callable[..., None]) -> None:
    """Scores of plus and minus some ten thousands: the exponentials of all but the highest vanish, none overflows."""
    drawn = torch.Generator().manual_seed(0)
    cache = quantize(torch.randn(40, 512, generator=drawn) * 100, torch.randn(40, 64, generator=drawn) * 100)
    query = (torch.randn(2, 4, 576, generator=drawn) * 20).bfloat16()
    indices = torch.arange(40, dtype=torch.int32).repeat(2, 1)
    out, lse = torch.empty(2, 4, 512), torch.empty(2, 4)
    _reference.decode(query, cache, indices, None, 1.0, 1.0, out, lse, False)
    expected, expected_lse = oracle(query, cache, indices, None, 1.0, 1.0, False)
    close(out, expected)
    torch.testing.assert_close(lse.double(), torch.from_numpy(expected_lse), rtol=1e-5, atol=0)
