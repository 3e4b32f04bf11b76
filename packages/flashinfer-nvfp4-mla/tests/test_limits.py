# SPDX-License-Identifier: Apache-2.0
"""The limits are those of the arithmetic on paper."""

from __future__ import annotations

from typing import Any

import pytest

from flashinfer_nvfp4_mla._limits import Device, limits


@pytest.mark.parametrize(
    ("tokens", "megabytes", "h200_us", "gb200_granule_us"),
    [(1, 0.72, 0.15, 0.10), (35, 25.2, 5.26, 3.44), (128, 92.3, 19.2, 12.6)],
)
def test_memory_limits(tokens: int, megabytes: float, h200_us: float, gb200_granule_us: float) -> None:
    on_h200, on_gb200 = limits(tokens, 16, 2048, "h200"), limits(tokens, 16, 2048, "gb200")
    assert on_h200.bytes == tokens * 720_896
    assert on_h200.bytes / 1e6 == pytest.approx(megabytes, rel=0.01)
    assert on_h200.memory_s * 1e6 == pytest.approx(h200_us, rel=0.02)
    assert on_gb200.granule_s * 1e6 == pytest.approx(gb200_granule_us, rel=0.02)
    assert on_h200.granule_bytes == pytest.approx(1.09 * on_h200.bytes, rel=0.01)
    assert limits(tokens, 16, 2048, "b300") == on_gb200


def test_compute_limits_and_which_bound_holds() -> None:
    by_heads = {heads: limits(35, heads, 2048, "h200") for heads in (16, 32, 64, 128)}
    assert by_heads[16].flops == pytest.approx(2.50e9, rel=0.01)
    assert by_heads[16].flops / by_heads[16].bytes == pytest.approx(99, rel=0.01)
    assert [limit.compute_s * 1e6 for limit in by_heads.values()] == pytest.approx([3.2, 6.3, 12.6, 25], rel=0.02)
    assert [limit.bound for limit in by_heads.values()] == ["memory", "compute", "compute", "compute"]
    assert by_heads[16].seconds == by_heads[16].memory_s
    assert by_heads[32].seconds == by_heads[32].compute_s


def test_a_measured_machine() -> None:
    core = Device("cpu", bytes_per_s=4.5e9, flops_per_s=1e12)
    assert limits(1, 16, 2048, core).seconds * 1e6 == pytest.approx(160, rel=0.01)
    assert limits(1, 16, 2048, core).compute_s * 1e6 == pytest.approx(71, rel=0.01)
    assert limits(0, 16, 2048, core).seconds == 0


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        ((1, 16, 2048, "cpu"), ValueError, "device must be one of h200, gb200, b300, or a Device, got 'cpu'"),
        ((1, 16, 2048, None), TypeError, "device must be one of h200, gb200, b300, or a Device, got None"),
        ((-5, 16, 2048, "h200"), ValueError, "tokens must not be negative, got -5"),
        ((5.5, 16, 2048, "h200"), TypeError, "tokens must be an int, got 5.5"),
        ((1, "16", 2048, "h200"), TypeError, "heads must be an int, got '16'"),
        ((1, 16, -1, "h200"), ValueError, "topk must not be negative, got -1"),
    ],
)
def test_what_no_launch_has_is_refused_by_name(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        limits(*call)
