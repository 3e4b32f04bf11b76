# SPDX-License-Identifier: Apache-2.0
"""Profiles: the sums they stand for, and what they refuse."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_kv_router_ext._profile import (
    DecodeCost,
    Profile,
    ProfileError,
    StepCost,
    TierCost,
    load_profile,
    shipped_profiles,
)

PROFILE = Profile(
    name="test",
    source="made up",
    prefill=StepCost(base_s=0.01, token_s=5e-5, pair_s=1e-9),
    decode=DecodeCost(base_s=0.008, sequence_s=1e-4, token_s=2e-8),
    transfer=TierCost(latency_s=0.002, token_s=1e-6),
    tiers={"host": TierCost(latency_s=0.001, token_s=5e-7), "store": TierCost(latency_s=0.003, token_s=4e-6)},
)


def as_json(**changes: Any) -> dict[str, Any]:
    profile: dict[str, Any] = {
        "name": "test",
        "source": "made up",
        "prefill": {"base_s": 0.01, "token_s": 5e-5, "pair_s": 1e-9},
        "decode": {"base_s": 0.008, "sequence_s": 1e-4, "token_s": 2e-8},
        "transfer": {"latency_s": 0.002, "token_s": 1e-6},
        "tiers": {"host": {"latency_s": 0.001, "token_s": 5e-7}},
    }
    return profile | changes


@given(new=st.integers(1, 200_000), cached=st.integers(0, 200_000), chunk=st.integers(1_000, 20_000))
def test_prefill_is_the_sum_of_its_steps(new: int, cached: int, chunk: int) -> None:
    cost, total, start = PROFILE.prefill, 0.0, cached
    while start < cached + new:
        step = min(chunk, cached + new - start)
        total += cost.base_s + cost.token_s * step + cost.pair_s * step * (start + step / 2)
        start += step
    assert PROFILE.prefill_s(new, cached, chunk) == pytest.approx(total, rel=1e-9)


def test_nothing_to_do_takes_no_time() -> None:
    assert PROFILE.prefill_s(0, 100, 8192) == 0.0
    assert PROFILE.decode_step_s(0, 0) == 0.0
    assert PROFILE.fetch_s("host", 0) == 0.0
    assert PROFILE.fetch_s("disk", 0) == 0.0
    assert PROFILE.transfer_s(0) == 0.0


def test_decode_and_links() -> None:
    assert PROFILE.decode_step_s(10, 100_000) == pytest.approx(0.008 + 0.001 + 0.002)
    assert PROFILE.fetch_s("store", 1000) == pytest.approx(0.007)
    assert PROFILE.transfer_s(1000) == pytest.approx(0.003)


def test_a_tier_the_profile_lacks_is_never_worth_a_fetch() -> None:
    assert PROFILE.fetch_s("disk", 1) == math.inf


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(as_json()))
    profile = load_profile(path)
    assert profile.prefill == PROFILE.prefill
    assert profile.tiers == {"host": PROFILE.tiers["host"]}
    assert load_profile(str(path)) == profile


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefill": {"base_s": 0.01, "token_s": -1e-5, "pair_s": 0.0}}, ["$.prefill", "token_s", "-1e-05"]),
        ({"prefill": {"base_s": 0.0, "token_s": 0.0, "pair_s": 1e-9}}, ["$.prefill", "base_s and token_s"]),
        ({"decode": {"base_s": 0.0, "sequence_s": 0.0, "token_s": 1e-9}}, ["$.decode", "base_s and sequence_s"]),
        ({"decode": {"base_s": 0.0, "sequence_s": "x", "token_s": 1e-9}}, ["$.decode.sequence_s", "str"]),
        ({"decode": {"base_s": 0.1, "sequence_s": 0.1}}, ["$.decode", "token_s"]),
        ({"tiers": {"tape": {"latency_s": 0.0, "token_s": 0.0}}}, ["$.tiers", "tape"]),
        ({"speed": 3}, ["speed"]),
    ],
)
def test_a_bad_profile_names_the_field(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(as_json(**changes)))
    with pytest.raises(ProfileError) as raised:
        load_profile(path)
    for word in [str(path), *words]:
        assert word in str(raised.value)


def test_what_is_no_profile_says_so(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(b"\xff{")
    with pytest.raises(ProfileError, match=r"profile\.json"):
        load_profile(path)
    with pytest.raises(ProfileError, match="gb300") as raised:
        load_profile("gb300")
    for name in shipped_profiles():
        assert name in str(raised.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, "1"])
def test_a_coefficient_must_be_a_finite_number(value: Any) -> None:
    with pytest.raises(ProfileError, match="token_s must be a finite number"):
        TierCost(latency_s=0.0, token_s=value)


def test_profiles_are_shipped() -> None:
    names = shipped_profiles()
    assert {"mocker", "gb200-qwen3-32b-tp1"} <= set(names)
    assert any(name.startswith("gb200-glm-5") for name in names)


@pytest.mark.parametrize("name", shipped_profiles())
def test_a_shipped_profile_is_plausible(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert "Fit:" in profile.source
    assert "ssumed" in profile.source
    # A token that is read costs more than one that is fetched from host memory, and nearer tiers are faster.
    assert profile.fetch_s("host", 8192) < profile.prefill_s(8192, 0, 8192)
    assert profile.fetch_s("host", 8192) < profile.fetch_s("store", 8192) < profile.fetch_s("disk", 8192)
    assert 0.001 < profile.decode_step_s(1, 1000) < 0.1
