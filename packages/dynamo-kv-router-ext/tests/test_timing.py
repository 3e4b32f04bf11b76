# SPDX-License-Identifier: Apache-2.0
"""Timings of the simulator: their formulas, their agreement with `dynamo.replay`, and the fit of a profile to them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_kv_router_ext._profile import DecodeCost, Profile, StepCost, TierCost, load_profile
from dynamo_kv_router_ext.sim.timing import (
    AisTiming,
    PolynomialTiming,
    ProfileTiming,
    TableTiming,
    Timing,
    TimingError,
    fit_profile,
    profile_errors,
)

BLOCK, TRACE_BLOCK, GPU_BLOCKS = 64, 512, 4000
PROFILE = Profile(
    name="test",
    source="made up",
    prefill=StepCost(base_s=0.01, token_s=5e-5, pair_s=1e-9),
    decode=DecodeCost(base_s=0.008, sequence_s=1e-4, token_s=2e-8),
    transfer=TierCost(latency_s=0.002, token_s=1e-6),
    tiers={"host": TierCost(latency_s=0.001, token_s=5e-7)},
)


def table(path: Path, **changes: Any) -> Path:
    arrays: dict[str, Any] = {
        "prefill_isl": np.array([100.0, 1000.0, 4000.0]),
        "prefill_ttft_ms": np.array([20.0, 60.0, 300.0]),
        "decode_active_kv_tokens": np.array([1000.0, 10_000.0, 100_000.0]),
        "decode_context_length": np.array([500.0, 2000.0]),
        "decode_itl": np.array([[5.0, 6.0], [8.0, 10.0], [30.0, 50.0]]),
    }
    arrays |= changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


@pytest.fixture(scope="module")
def timings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Timing]:
    return {
        "profile": ProfileTiming(PROFILE),
        "polynomial": PolynomialTiming(100_000),
        "table": TableTiming(table(tmp_path_factory.mktemp("tables") / "table.npz")),
    }


@pytest.mark.parametrize("name", ["profile", "polynomial", "table"])
@given(batch=st.integers(1, 64), context=st.integers(0, 3000), rest=st.integers(0, 63), steps=st.integers(0, 300))
def test_a_run_is_the_sum_of_its_steps(
    timings: dict[str, Timing], name: str, batch: int, context: int, rest: int, steps: int
) -> None:
    timing, resident = timings[name], batch * context + min(rest, batch - 1)
    total = sum(timing.step_s([], batch, resident + batch * step) for step in range(steps))
    assert timing.decode_run_s(batch, resident, steps) == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("name", ["profile", "polynomial", "table"])
def test_a_step_is_its_prefill_and_its_decode(timings: dict[str, Timing], name: str) -> None:
    timing, chunks = timings[name], [(500, 0), (300, 1024)]
    both = timing.step_s(chunks, 5, 4000)
    assert both == pytest.approx(timing.step_s(chunks, 0, 0) + timing.step_s([], 5, 4000))
    assert timing.step_s([], 0, 0) == 0.0
    assert timing.decode_run_s(0, 0, 5) == 0.0


def test_the_chunks_of_a_step_share_the_base_of_a_profile() -> None:
    timing = ProfileTiming(PROFILE)
    assert timing.step_s([(500, 100)], 0, 0) == pytest.approx(PROFILE.prefill_s(500, 100, 8192))
    apart = timing.step_s([(500, 0)], 0, 0) + timing.step_s([(300, 64)], 0, 0)
    assert timing.step_s([(500, 0), (300, 64)], 0, 0) == pytest.approx(apart - PROFILE.prefill.base_s)


def test_the_polynomials() -> None:
    timing = PolynomialTiming(1000 * BLOCK)
    assert timing.step_s([(1000, 0)], 0, 0) == pytest.approx(0.032105849)
    assert timing.step_s([(1000, 5000)], 0, 0) == timing.step_s([(1000, 0)], 0, 0)
    assert timing.step_s([], 4, 32_000) == pytest.approx((-25.74 / 4 + 54.01 / 2 + 5.74) * 1e-3)
    assert timing.step_s([], 4, 640_000) == timing.step_s([], 4, 64_000)
    with pytest.raises(ValueError, match="capacity_tokens must be at least 1, not 0"):
        PolynomialTiming(0)


def test_chunks_count_by_their_mean_in_whole_tokens() -> None:
    timing = PolynomialTiming(1000 * BLOCK)
    # Ends 512 and 512 and starts 0 and 513: the mean length is 512, the mean prefix 256.
    assert timing.step_s([(488, 24), (25, 488)], 0, 0) == timing.step_s([(2 * 256, 0)], 0, 0)


def test_a_table_is_interpolated_and_goes_on_beyond_its_rim(tmp_path: Path) -> None:
    timing = TableTiming(table(tmp_path / "table.npz"))
    for tokens, milliseconds in ((100, 20.0), (550, 40.0), (4000, 300.0), (7000, 540.0), (50, 17.7778)):
        assert timing.step_s([(tokens, 640)], 0, 0) == pytest.approx(milliseconds * 1e-3, rel=1e-4)
    # (sequences, tokens): at a point, between points of both axes, beyond the last of an axis, and at the floor.
    assert timing.step_s([], 20, 10_000) == pytest.approx(0.008)
    assert timing.step_s([], 44, 55_000) == pytest.approx((8 + 10 + 30 + 50) / 4e3)
    assert timing.step_s([], 100, 200_000) == pytest.approx((50 + 40 / 90_000 * 100_000) * 1e-3)
    flat = TableTiming(table(tmp_path / "flat.npz", decode_itl=np.full((3, 2), 0.25)))
    assert flat.step_s([], 1, 1000) == 0.001


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decode_itl": None}, "there is no array decode_itl"),
        ({"prefill_isl": np.array([[1.0, 2.0, 3.0]])}, r"prefill_isl must be finite and of 1 dimensions: \(1, 3\)"),
        ({"prefill_ttft_ms": np.array([1.0, np.nan, 3.0])}, "prefill_ttft_ms must be finite"),
        ({"prefill_isl": np.array([100.0, 100.0, 200.0])}, "prefill_isl must hold at least two values that rise"),
        ({"decode_context_length": np.array([500.0])}, "decode_context_length must hold at least two"),
        ({"prefill_ttft_ms": np.array([1.0, 2.0])}, "prefill_ttft_ms has 2 values for 3 lengths"),
        ({"decode_itl": np.ones((2, 3))}, r"decode_itl must be \(3, 2\), not \(2, 3\)"),
        ({"decode_itl": np.array(["a", "b"])}, "not an NPZ file of numbers"),
    ],
)
def test_a_bad_table_names_the_array(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TimingError, match=words) as raised:
        TableTiming(table(tmp_path / "table.npz", **changes))
    assert "table.npz" in str(raised.value)


def test_what_is_no_table_says_so(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no table")
    for name, said in (("text.npz", "not an NPZ file"), ("absent.npz", "No such file")):
        with pytest.raises(TimingError, match=f"{name}: {said}"):
            TableTiming(tmp_path / name)
    np.save(tmp_path / "array.npy", np.ones(3))
    with pytest.raises(TimingError, match=r"array\.npy: not an NPZ file"):
        TableTiming(tmp_path / "array.npy")


#: A step of decode that does not rise from 0.
DECODE: dict[str, Any] = {
    "decode_active_kv_tokens": [0, 100_000],
    "decode_context_length": [0, 8192],
    "decode_itl": [[5.0, 6.0], [10.0, 12.0]],
}


def test_a_table_that_is_extrapolated_to_no_time_is_fitted_where_it_takes_some(tmp_path: Path) -> None:
    steep = TableTiming(table(tmp_path / "steep.npz", prefill_isl=[1000, 2000], prefill_ttft_ms=[10.0, 30.0], **DECODE))
    assert steep.step_s([(128, 0)], 0, 0) == 0.0
    given: dict[str, Any] = {"name": "n", "source": "s.", "transfer": PROFILE.transfer, "tiers": PROFILE.tiers}
    fitted = fit_profile(steep, **given)
    assert 0.05 < fitted.prefill_s(8192, 0, 8192) < steep.step_s([(8192, 0)], 0, 0)
    none = TableTiming(table(tmp_path / "none.npz", prefill_isl=[1000, 2000], prefill_ttft_ms=[0.0, 0.0], **DECODE))
    with pytest.raises(TimingError, match="take no time"):
        fit_profile(none, **given)
    with pytest.raises(TimingError, match="no profile fits this timing: base_s and sequence_s"):
        fit_profile(TableTiming(table(tmp_path / "table.npz")), **given)


def test_a_fit_finds_the_coefficients_of_a_profile() -> None:
    fitted = fit_profile(
        ProfileTiming(PROFILE), name="again", source="a profile.", transfer=PROFILE.transfer, tiers=PROFILE.tiers
    )
    for cost, true in ((fitted.prefill, PROFILE.prefill), (fitted.decode, PROFILE.decode)):
        for field in true.__struct_fields__:
            assert getattr(cost, field) == pytest.approx(getattr(true, field), rel=1e-4)
    assert (fitted.name, fitted.transfer, fitted.tiers) == ("again", PROFILE.transfer, PROFILE.tiers)
    assert fitted.source.startswith("a profile. Fit: prefill steps off by 0.0%")
    assert max(profile_errors(fitted, ProfileTiming(PROFILE))) < 1e-4


def test_a_fit_has_no_coefficient_below_zero() -> None:
    class Shrinking:
        def step_s(self, prefills: Any, decodes: int, resident: int) -> float:
            return float(sum(new**0.5 * 1e6 / (1e6 + cached) for new, cached in prefills) + decodes / (1 + resident))

        def decode_run_s(self, decodes: int, resident: int, steps: int) -> float:
            raise NotImplementedError

    fitted = fit_profile(Shrinking(), name="x", source="x", transfer=PROFILE.transfer, tiers={})
    assert fitted.prefill.base_s > 0.0
    assert fitted.prefill.pair_s == 0.0


def test_a_fit_needs_something_to_fit_to() -> None:
    with pytest.raises(ValueError, match=r"chunk_tokens of at least 128.*not \(64,"):
        fit_profile(ProfileTiming(PROFILE), name="x", source="x", transfer=PROFILE.transfer, tiers={}, chunk_tokens=64)


def test_the_profile_of_the_mocker_is_near_its_polynomials() -> None:
    errors = profile_errors(load_profile("mocker"), PolynomialTiming(1_000_000))
    assert max(errors) < 0.1


def test_without_aisimulate_one_is_told_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aisimulate_core", None)
    monkeypatch.setitem(sys.modules, "aisimulate_core.sdk", None)
    with pytest.raises(TimingError, match=r"pip install --no-deps aisimulate==0\.13"):
        AisTiming("Qwen/Qwen3-32B")


def replay(tmp_path: Path, rows: list[tuple[int, int, int, range]], **engine: Any) -> dict[str, Any]:
    """Replay (arrival in ms, prompt, output, trace blocks) on one worker of the mocker; return the report's summary."""
    replay_module = pytest.importorskip("dynamo.replay")
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": length, "output_length": output, "hash_ids": list(blocks)})
            + "\n"
            for at, length, output, blocks in rows
        )
    )
    args = {
        "backend": "vllm",
        "worker_type": "aggregated",
        "block_size": BLOCK,
        "num_gpu_blocks": GPU_BLOCKS,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 64,
        "enable_prefix_caching": True,
        **engine,
    }
    report = replay_module.run_trace_replay(
        str(trace),
        extra_engine_args={"engine": args},
        num_workers=1,
        router_mode="round_robin",
        trace_block_size=TRACE_BLOCK,
    )
    return dict(report.summary)


def check_against_replay(tmp_path: Path, timing: Timing, tolerance: float, **engine: Any) -> None:
    """A lone prompt of two steps with four tokens after it; then two prompts that share a step."""
    summary = replay(tmp_path, [(0, 3000, 5, range(6))], **engine)
    first = timing.step_s([(2048, 0)], 0, 0) + timing.step_s([(952, 2048)], 0, 0)
    assert summary["mean_ttft_ms"] * 1e-3 == pytest.approx(first, rel=tolerance)
    assert summary["mean_itl_ms"] * 1e-3 == pytest.approx(timing.decode_run_s(1, 3001, 4) / 4, rel=tolerance)

    summary = replay(tmp_path, [(0, 700, 3, range(2)), (0, 1201, 3, range(10, 13))], **engine)
    assert summary["mean_ttft_ms"] * 1e-3 == pytest.approx(timing.step_s([(700, 0), (1201, 0)], 0, 0), rel=tolerance)
    assert summary["mean_itl_ms"] * 1e-3 == pytest.approx(timing.decode_run_s(2, 1903, 2) / 2, rel=tolerance)


def test_the_polynomials_are_those_of_replay(tmp_path: Path) -> None:
    check_against_replay(tmp_path, PolynomialTiming(GPU_BLOCKS * BLOCK), 1e-6)


@pytest.fixture(scope="module")
def ais() -> AisTiming:
    pytest.importorskip("aisimulate_core.sdk")
    return AisTiming("Qwen/Qwen3-32B", "gb200", "vllm", tp=1)


def test_aisimulate_is_asked_as_replay_asks_it(tmp_path: Path, ais: AisTiming) -> None:
    config = {"model": "Qwen/Qwen3-32B", "backend": "vllm", "system": "gb200", "tp": 1, "worker_type": "aggregated"}
    external = {"type": "external", "provider": "ais", "config": config}
    check_against_replay(tmp_path, ais, 1e-3, timing_model=external)


def test_a_run_of_aisimulate_is_the_sum_of_its_steps(ais: AisTiming) -> None:
    total = sum(ais.step_s([], 7, 70_001 + 7 * step) for step in range(500))
    assert ais.decode_run_s(7, 70_001, 500) == pytest.approx(total, rel=1e-9)
    assert ais.step_s([(500, 64)], 7, 70_001) == pytest.approx(
        ais.step_s([(500, 64)], 0, 0) + ais.step_s([], 7, 70_001)
    )


def test_the_shipped_profile_fits_aisimulate(ais: AisTiming) -> None:
    errors = profile_errors(load_profile("gb200-qwen3-32b-tp1"), ais)
    assert errors.prefill < 0.1
    assert errors.decode < 0.05


@pytest.mark.usefixtures("ais")
def test_what_aisimulate_does_not_know_is_named() -> None:
    with pytest.raises(TimingError, match="gb9000"):
        AisTiming("Qwen/Qwen3-32B", "gb9000", "vllm")
