# SPDX-License-Identifier: Apache-2.0
"""Ejection, half-open probes, how many may be out, verdicts from outside, risk; and a state machine of it all."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo_kv_router_ext._health import Health, HealthSettings
from dynamo_kv_router_ext._placement import Placer
from dynamo_kv_router_ext._profile import DecodeCost, Profile, StepCost, load_profile
from dynamo_kv_router_ext._types import Role, Worker, WorkerId
from dynamo_kv_router_ext.sim.fleet import Arrival, Fault, FaultKind, FleetSpec, Result, WorkerSpec, simulate
from dynamo_kv_router_ext.sim.timing import ProfileTiming

SETTINGS = HealthSettings()
ROLE: tuple[Role, Role] = ("prefill", "decode")


def fleet(size: int, role: Role = "decode", **changes: Any) -> Health:
    """Return the health of workers 0, 1, ... of one role."""
    health = Health(HealthSettings(**changes))
    for name in range(size):
        health.add(Worker(name, role))
    return health


def break_down(health: Health, worker: WorkerId, now: float) -> None:
    for _ in range(health.settings.failures_in_row):
        health.failed(worker, now, "refused")


def states(health: Health, size: int, now: float) -> list[str]:
    return [health.state(name, now) for name in range(size)]


# What puts a worker out


def test_failures_in_a_row_put_a_worker_out() -> None:
    health = fleet(3)
    health.failed(0, 1.0, "refused")
    health.failed(0, 2.0, "refused")
    assert health.state(0, 2.0) == "in"
    health.failed(0, 3.0, "refused")
    assert states(health, 3, 3.0) == ["out", "in", "in"]
    assert health.why(0, 4.0) == "out for 4.0 s more (3 failures in a row: refused)"
    assert health.why(1, 4.0) == ""


def test_a_success_ends_a_row() -> None:
    health = fleet(3)
    for now in range(20):
        (health.succeeded if now % 3 == 2 else health.failed)(0, float(100 * now))
    assert health.state(0, 2000.0) == "in"


def test_a_share_of_failures_puts_a_worker_out_once_there_are_enough_outcomes() -> None:
    health = fleet(3)
    for number in range(4):
        health.succeeded(0, 0.0)
        health.failed(0, 0.0)
        assert health.state(0, 0.0) == "in", number
    health.succeeded(0, 0.0)
    health.failed(0, 0.0, "timeout")
    assert health.state(0, 0.0) == "out"
    assert "51% failures: timeout" in health.why(0, 0.0)


def test_outcomes_that_are_long_past_do_not_count_for_the_share() -> None:
    health = fleet(3)
    for number in range(200):
        now = number * SETTINGS.window_s / 2
        (health.failed if number % 2 else health.succeeded)(0, now)
        assert health.state(0, now) == "in"


def test_a_share_below_the_limit_puts_no_worker_out() -> None:
    health = fleet(3)
    for number in range(300):
        (health.failed if number % 3 == 0 else health.succeeded)(0, number / 10)
    assert health.state(0, 30.0) == "in"


def test_a_stall_puts_a_worker_out_at_once_and_repeating_it_changes_nothing() -> None:
    health, once = fleet(3), fleet(3)
    for one in (health, once):
        one.stalled(0, 10.0, placed=0.0)
    for now in (10.0, 11.0, 14.9):
        health.stalled(0, now, placed=0.0)
    assert health.state(0, 14.9) == "out"
    assert "stalled" in health.why(0, 14.9)
    assert [health.state(0, now) for now in (15.0, 16.0)] == [once.state(0, now) for now in (15.0, 16.0)]
    assert health.state(0, 15.0) == "probing"


def test_patience_is_a_multiple_of_what_is_expected_and_not_too_short() -> None:
    health = fleet(1, stall_factor=3.0, stall_min_s=6.0)
    assert (health.patience(0.5), health.patience(5.0)) == (6.0, 15.0)


# Out, half-open, and back


def test_one_probe_at_a_time_and_its_success_brings_the_worker_back() -> None:
    health = fleet(3)
    break_down(health, 0, 0.0)
    assert not health.probe(0, 4.9)
    assert health.state(0, 5.0) == "probing"
    assert health.admitted([0, 1, 2], 5.0) == [0, 1, 2]
    assert health.probe(0, 5.0)
    assert not health.probe(0, 5.0)
    assert health.admitted([0, 1, 2], 5.0) == [1, 2]
    health.succeeded(0, 6.0, placed=5.0)
    assert health.state(0, 6.0) == "in"
    assert health.admitted([0, 1, 2], 6.0) == [0, 1, 2]
    assert not health.probe(0, 6.0)


def test_each_failed_probe_doubles_the_time_up_to_the_limit() -> None:
    health = fleet(3, ejection_s=5.0, max_ejection_s=30.0)
    break_down(health, 0, 0.0)
    now, times = 0.0, []
    for _ in range(5):
        until = next(later for later in range(int(now), 1000) if health.state(0, float(later)) == "probing")
        times.append(until - now)
        now = float(until)
        assert health.probe(0, now)
        health.failed(0, now, placed=now)
        assert health.state(0, now) == "out"
    assert times == [5, 10, 20, 30, 30]


def test_the_limit_holds_after_any_number_of_repeats() -> None:
    health = fleet(2, ejection_s=5.0, max_ejection_s=60.0)
    break_down(health, 0, 0.0)
    for number in range(1, 3000):
        assert health.probe(0, 60.0 * number)
        health.failed(0, 60.0 * number)
    assert health.state(0, 60.0 * 2999 + 59.0) == "out"


@pytest.mark.parametrize(("good_s", "out_s"), [(599.0, 10.0), (600.0, 5.0)])
def test_repeats_are_forgotten_after_a_long_good_time(good_s: float, out_s: float) -> None:
    health = fleet(3, forget_s=600.0)
    break_down(health, 0, 0.0)
    health.probe(0, 5.0)
    health.succeeded(0, 5.0)
    break_down(health, 0, 5.0 + good_s)
    assert health.state(0, 5.0 + good_s + out_s - 0.1) == "out"
    assert health.state(0, 5.0 + good_s + out_s) == "probing"


def test_a_probe_has_its_own_time_whatever_the_least_of_a_stall_is() -> None:
    health = fleet(3, probe_s=6.0)  # less than stall_min_s
    break_down(health, 0, 0.0)
    assert health.probe(0, 5.0)
    assert [health.state(0, now) for now in (10.9, 11.0)] == ["probing", "out"]


def test_a_probe_without_an_answer_counts_as_failed_when_its_time_is_over() -> None:
    looked, asked = fleet(3, probe_s=30.0), fleet(3, probe_s=30.0)
    for health in (looked, asked):
        break_down(health, 0, 0.0)
        assert health.probe(0, 5.0)
    # Out since 35, for 10 s; somebody who looks later sees the same.
    assert looked.state(0, 35.0) == "out"
    assert [looked.state(0, now) for now in (44.9, 45.0)] == [asked.state(0, now) for now in (44.9, 45.0)]
    assert asked.state(0, 45.0) == "probing"
    assert asked.probe(0, 45.0)


def test_a_cancelled_probe_leaves_room_for_another_one() -> None:
    health = fleet(3)
    break_down(health, 0, 0.0)
    health.probe(0, 5.0)
    health.cancelled(0, 6.0, placed=-3.0)  # another request of that worker
    assert not health.probe(0, 6.0)
    health.cancelled(0, 6.0, placed=5.0)
    assert health.state(0, 6.0) == "probing"
    assert health.probe(0, 6.0)


def test_what_was_placed_before_a_worker_was_put_out_says_nothing_afterwards() -> None:
    health = fleet(3)
    break_down(health, 0, 10.0)
    for _ in range(20):
        health.failed(0, 10.5, placed=9.0)  # the rest of the burst
    assert health.state(0, 15.0) == "probing"
    health.failed(0, 15.0, placed=9.0)
    health.succeeded(0, 15.0, placed=9.0)
    health.stalled(0, 15.0, placed=9.0)
    assert health.state(0, 15.0) == "probing"
    assert health.probe(0, 15.0)
    health.succeeded(0, 15.5, placed=15.0)
    assert health.state(0, 15.5) == "in"


def test_nothing_lengthens_or_shortens_the_time_that_a_worker_is_out() -> None:
    """Some request may be placed there all the same, as it is one of the last."""
    health = fleet(3, ejection_s=5.0)
    break_down(health, 0, 0.0)
    health.succeeded(0, 1.0, placed=0.5)
    assert health.state(0, 1.0) == "out"
    health.failed(0, 2.0, placed=0.5)
    health.stalled(0, 3.0, placed=0.5)
    assert [health.state(0, now) for now in (4.9, 5.0)] == ["out", "probing"]
    health.probe(0, 5.0)
    health.failed(0, 5.0)
    assert [health.state(0, now) for now in (14.9, 15.0)] == ["out", "probing"]


# How many may be out


@pytest.mark.parametrize(
    ("size", "share", "most"),
    [(1, 1.0, 0), (2, 0.1, 1), (3, 1 / 3, 1), (6, 1 / 3, 2), (7, 0.5, 3), (5, 1.0, 4), (64, 1 / 3, 21), (5, 0.0, 0)],
)
def test_the_share_that_may_be_out(size: int, share: float, most: int) -> None:
    health = fleet(size, max_ejected_share=share)
    for name in range(size):
        break_down(health, name, 0.0)
    assert health.limit("decode") == most
    assert states(health, size, 1.0).count("out") == most
    assert len(health.admitted(range(size), 1.0)) == size - most


def test_the_worst_stay_out() -> None:
    health = fleet(3)
    break_down(health, 0, 0.0)
    assert states(health, 3, 0.0) == ["out", "in", "in"]
    for _ in range(9):
        health.failed(1, 1.0)
    assert states(health, 3, 1.0) == ["in", "out", "in"]


def test_repeats_count_before_the_latest_failures() -> None:
    """A worker whose probes fail stays out when another one starts to fail."""
    health = fleet(3, ejection_s=5.0, max_ejection_s=500.0)
    break_down(health, 0, 0.0)
    health.probe(0, 5.0)
    health.failed(0, 5.0)
    health.probe(0, 15.0)
    health.failed(0, 15.0)
    break_down(health, 1, 34.0)
    assert health.risk(1, 34.0) > health.risk(0, 34.0)
    assert states(health, 3, 34.0) == ["out", "in", "in"]


def test_a_worker_that_is_not_out_only_for_lack_of_room_is_back_by_one_success_after_its_time() -> None:
    health = fleet(2, ejection_s=5.0)
    break_down(health, 1, 0.0)
    for _ in range(9):
        health.failed(0, 0.0)
    assert states(health, 2, 0.0) == ["out", "in"]
    health.succeeded(1, 5.0, placed=1.0)
    health.probe(0, 5.0)
    health.succeeded(0, 5.0, placed=5.0)
    break_down(health, 0, 6.0)
    assert states(health, 2, 6.0) == ["out", "in"]
    assert health.why(1, 6.0) == ""


def test_roles_are_bounded_one_by_one() -> None:
    health = Health()
    roles: tuple[Role, ...] = ("prefill", "decode", "both")
    for role in roles:
        for name in range(3):
            health.add(Worker(f"{role}-{name}", role))
        for name in range(3):
            break_down(health, f"{role}-{name}", 0.0)
    for role in roles:
        assert [health.state(f"{role}-{name}", 0.0) for name in range(3)].count("out") == 1


def test_all_are_asked_where_none_may_be() -> None:
    health = fleet(6)
    break_down(health, 0, 0.0)
    break_down(health, 1, 0.0)
    assert health.admitted([1, 0], 1.0) == [1, 0]
    assert health.admitted([1, 5, 0], 1.0) == [5]
    assert health.admitted([], 1.0) == []


# Workers come and go


def test_a_dropped_worker_is_forgotten_and_comes_back_clean_but_with_the_priors_risk() -> None:
    health = fleet(3)
    break_down(health, 0, 0.0)
    assert health.drop(0)
    assert not health.drop(0)
    health.failed(0, 0.0)  # its last requests
    health.succeeded(0, 0.0)
    health.stalled(0, 0.0)
    health.verdict(0, True, 0.0, 5.0)
    with pytest.raises(KeyError, match="worker 0 is not known"):
        health.state(0, 0.0)
    health.add(Worker(0, "prefill"))
    assert health.state(0, 0.0) == "in"
    assert health.risk(0, 0.0) == SETTINGS.prior_failures
    break_down(health, 1, 0.0)
    assert health.state(1, 0.0) == "out"


def test_the_last_worker_is_back_in_when_the_others_leave() -> None:
    health = fleet(2)
    break_down(health, 0, 0.0)
    assert health.state(0, 1.0) == "out"
    health.drop(1)
    assert health.state(0, 1.0) == "in"
    assert health.admitted([0], 1.0) == [0]


def test_a_worker_is_added_once() -> None:
    health = fleet(1)
    with pytest.raises(ValueError, match="worker 0 is known already"):
        health.add(Worker(0, "decode"))


# Verdicts from outside


def test_a_verdict_lasts_for_its_time() -> None:
    health = fleet(3)
    health.verdict(0, True, 0.0, ttl_s=20.0)
    assert health.state(0, 19.9) == "out"
    assert health.why(0, 5.0) == "out for 15.0 s more (verdict from outside)"
    assert not health.probe(0, 19.9)
    assert health.state(0, 20.0) == "in"
    assert health.admitted([0], 20.0) == [0]
    health.verdict(0, True, 30.0, 20.0, "breaker open")
    assert health.why(0, 31.0) == "out for 19.0 s more (verdict from outside: breaker open)"


def test_a_verdict_can_be_renewed_and_taken_back() -> None:
    health = fleet(3)
    health.verdict(0, True, 0.0, ttl_s=20.0)
    health.verdict(0, True, 10.0, ttl_s=20.0)
    assert health.state(0, 25.0) == "out"
    health.verdict(0, False, 25.0, ttl_s=0.0)
    assert health.state(0, 25.0) == "in"


def test_a_verdict_brings_back_no_worker_that_is_out_by_itself() -> None:
    health = fleet(3)
    break_down(health, 0, 0.0)
    health.verdict(0, False, 1.0, ttl_s=100.0)
    assert health.state(0, 1.0) == "out"
    health.verdict(0, True, 1.0, ttl_s=1.0)
    assert health.state(0, 2.0) == "out"
    assert health.state(0, 5.0) == "probing"


def test_a_worker_that_is_well_again_stays_out_while_a_verdict_says_so() -> None:
    health = fleet(3)
    break_down(health, 0, 0.0)
    health.verdict(0, True, 0.0, ttl_s=20.0)
    assert health.state(0, 6.0) == "out"
    health.succeeded(0, 6.0, placed=5.5)
    assert [health.state(0, now) for now in (19.9, 20.0)] == ["out", "in"]


def test_the_own_outcomes_count_before_a_verdict() -> None:
    health = fleet(3, ejection_s=100.0, max_ejection_s=100.0)
    for now in (-300.0, -200.0):
        break_down(health, 0, now)
    health.succeeded(0, -100.0)  # well again, but it was out twice
    break_down(health, 1, 0.0)
    health.verdict(0, True, 80.0, ttl_s=100.0)
    health.failed(0, 80.0)
    health.failed(0, 80.0)
    assert health.risk(0, 80.0) > health.risk(1, 80.0)
    assert states(health, 3, 80.0) == ["in", "out", "in"]
    health.probe(1, 100.0)
    health.succeeded(1, 100.0)
    assert states(health, 3, 100.0) == ["out", "in", "in"]


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, math.inf, math.nan])
def test_a_verdict_needs_an_end(ttl_s: float) -> None:
    with pytest.raises(ValueError, match="ttl_s must be a number above 0, not"):
        fleet(3).verdict(0, True, 0.0, ttl_s=ttl_s)


# Risk


def test_risk_rises_with_failures_and_falls_with_successes_and_with_time() -> None:
    health = fleet(3)
    seen = [health.risk(0, 0.0)]
    for _ in range(5):
        health.failed(0, 0.0)
        seen.append(health.risk(0, 0.0))
    assert seen == sorted(seen)
    assert seen[0] == 0.1
    assert seen[-1] > 0.8
    later = [health.risk(0, 10.0 * step) for step in range(30)]
    assert later == sorted(later, reverse=True)
    assert later[6] < 0.5
    assert later[-1] == 0.0  # no more than any worker's
    health.succeeded(0, 0.0)
    assert health.risk(0, 0.0) < seen[-1]


def test_a_stall_is_as_risky_as_the_failures_that_put_a_worker_out() -> None:
    stalled, failed = fleet(2), fleet(2)
    for number in range(100):
        stalled.succeeded(0, float(number))
        failed.succeeded(0, float(number))
    stalled.stalled(0, 100.0)
    break_down(failed, 0, 100.0)
    assert stalled.risk(0, 100.0) == failed.risk(0, 100.0) == 0.75


def test_a_worker_that_fails_everything_never_looks_as_good_as_one_that_works() -> None:
    """Also where it cannot be put out."""
    health = fleet(2, max_ejected_share=0.0)
    for number in range(100):
        health.succeeded(0, number * 1.0)
        health.failed(1, number * 1.0)
        assert health.risk(1, number * 1.0) >= 0.5 > health.risk(0, number * 1.0)


@given(
    st.lists(st.tuples(st.sampled_from(["succeeded", "failed", "stalled"]), st.floats(0.0, 50.0)), max_size=40),
    st.floats(0.0, 200.0),
)
def test_risk_is_a_probability_that_moves_the_right_way(events: list[tuple[str, float]], wait: float) -> None:
    health = fleet(2)
    now = 0.0
    for kind, after in events:
        before = health.risk(0, now)
        now += after
        waited = health.risk(0, now)
        assert waited <= before + 1e-12
        getattr(health, kind)(0, now)
        risk = health.risk(0, now)
        assert 0.0 <= risk <= 1.0
        assert risk <= waited + 1e-12 if kind == "succeeded" else risk >= waited - 1e-12
        assert risk == 0.0 or risk >= 0.01
    assert health.risk(0, now + wait) <= health.risk(0, now)


# Settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"failures_in_row": 0}, "failures_in_row must be a whole number of at least 1, not 0"),
        ({"failure_share": 1.5}, "failure_share must be above 0 and at most 1, not 1.5"),
        ({"window_s": 0.0}, "window_s must be a number above 0, not 0.0"),
        ({"window_s": math.nan}, "window_s must be a number above 0, not nan"),
        ({"forget_s": -1.0}, "forget_s must be a number of at least 0, not -1.0"),
        ({"stall_factor": 0.5}, "stall_factor must be a number of at least 1, not 0.5"),
        ({"max_ejected_share": 1.1}, "max_ejected_share must be between 0 and 1, not 1.1"),
        ({"ejection_s": 9.0, "max_ejection_s": 8.0}, r"max_ejection_s must be at least ejection_s \(9.0\), not 8.0"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HealthSettings(**values)
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(values, HealthSettings)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `failures`"):
        msgspec.json.decode(b'{"failures": 3}', type=HealthSettings)


# In a simulated fleet, through the placer


def served(kind: FaultKind, role: Role, start_s: float, stop_s: float) -> tuple[Placer, Result, int]:
    """Run 100 s of requests past two pools of three workers, the first one of a role with a fault; two can bear it."""
    profile = load_profile("mocker")
    names = [(f"{its}-{number}", its) for its in ROLE for number in range(3)]
    spec = FleetSpec(
        tuple(WorkerSpec(Worker(name, its)) for name, its in names),
        ProfileTiming(profile),
        faults=(Fault(f"{role}-0", kind, start_s, stop_s),),
        timeout_s=20.0,
        retries=5,
    )
    draw = random.Random(0).random
    arrivals = [Arrival(f"r{number}", (number + 3 * draw()) * 0.05, 4000, 50) for number in range(2000)]
    placer = Placer(profile, block_size=64)
    result = simulate(spec, arrivals, placer)
    during = [one for one in result.requests if start_s <= one.arrival_s < stop_s]
    return placer, result, sum(one.attempts - 1 for one in during)


@pytest.mark.parametrize("role", ROLE)
def test_a_worker_that_refuses_everything_costs_few_attempts_and_is_used_again_when_it_is_well(role: Role) -> None:
    """Of the 400 requests that come meanwhile it would be sent all that find it idle, which it always is."""
    placer, result, repeats = served("raise", role, 10.0, 30.0)
    assert [one.error for one in result.requests if one.error] == []
    assert repeats <= 10
    worker = f"{role}-0"
    assert placer.health.state(worker, result.duration_s) == "in"
    last = [one.prefill if role == "prefill" else one.decode for one in result.requests if one.arrival_s > 80.0]
    assert sum(seat is not None and seat.worker == worker for seat in last) > len(last) / 6


@pytest.mark.parametrize("role", ROLE)
def test_a_worker_that_stands_still_is_found_and_comes_back(role: Role) -> None:
    placer, result, _ = served("hang", role, 10.0, 30.0)
    assert [one.error for one in result.requests if one.error] == []
    assert placer.health.state(f"{role}-0", result.duration_s) == "in"
    caught = [one for one in result.requests if 10.0 <= one.arrival_s < 30.0 and one.ttft_s > 10.0]
    assert len(caught) < 40


def off(profile: Profile, factor: float) -> Profile:
    """The profile with all steps so many times as long."""
    return msgspec.structs.replace(
        profile,
        prefill=StepCost(**{name: value * factor for name, value in msgspec.structs.asdict(profile.prefill).items()}),
        decode=DecodeCost(**{name: value * factor for name, value in msgspec.structs.asdict(profile.decode).items()}),
    )


@pytest.mark.parametrize("factor", [1 / 8, 1.0, 8.0])
@pytest.mark.parametrize(
    ("pools", "capacity", "tokens", "output", "every_s"),
    [
        ({"prefill": 4, "decode": 4}, 400_000, 200_000, 300, 5.0),
        ({"both": 4}, 400_000, 200_000, 300, 8.0),
        # Decoders are the bottleneck, so that prompts that were read fill the prefill workers.
        ({"prefill": 6, "decode": 1}, 70_000, 30_000, 1500, 0.5),
    ],
)
def test_nobody_is_put_out_of_a_fleet_that_is_well_but_overloaded(
    pools: dict[Role, int], capacity: int, tokens: int, output: int, every_s: float, factor: float
) -> None:
    """Whatever the profile that the policy starts from."""
    truth = load_profile("gb200-qwen3-32b-tp1")
    spec = FleetSpec(
        tuple(
            WorkerSpec(Worker(f"{role}-{number}", role, capacity_tokens=capacity), ((0.0, 0.7 + 0.15 * number),))
            for role, count in pools.items()
            for number in range(count)
        ),
        ProfileTiming(truth),
        transfer=truth.transfer,
    )
    draw = random.Random(0).random
    arrivals = [Arrival(f"r{n}", (n + draw()) * every_s, tokens, int(2 * output * draw()) + 1) for n in range(60)]
    placer = Placer(off(truth, factor))
    result = simulate(spec, arrivals, placer)
    assert not any(one.error for one in result.requests)
    assert max(one.ttft_s for one in result.requests) > 60.0  # it was overloaded
    assert [worker for worker, record in placer.health._records.items() if record.ejections] == []


@pytest.mark.parametrize("role", ROLE)
def test_a_worker_of_long_prompts_comes_back(role: Role) -> None:
    """Its probe lasts for longer than `probe_s`."""
    truth = load_profile("gb200-qwen3-32b-tp1")
    workers = tuple(WorkerSpec(Worker(f"{its}-{number}", its)) for its in ROLE for number in range(4))
    fault = Fault(f"{role}-0", "raise", 100.0, 300.0)
    spec = FleetSpec(workers, ProfileTiming(truth), transfer=truth.transfer, faults=(fault,), retries=5)
    placer = Placer(truth)
    result = simulate(spec, [Arrival(f"r{n}", 9.0 * n, 200_000, 400) for n in range(100)], placer)
    assert not any(one.error for one in result.requests)
    assert sum(one.attempts - 1 for one in result.requests) <= 10
    assert placer.health.state(f"{role}-0", result.duration_s) == "in"


# A fleet under everything at once

NAMES = st.integers(0, 7)


class Fleet(RuleBasedStateMachine):
    """Two roles; any order of outcomes, probes, verdicts, comings and goings. `probes` models the claimed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = HealthSettings(
            min_samples=4.0, ejection_s=2.0, max_ejection_s=9.0, probe_s=6.0, forget_s=50.0, max_ejected_share=0.5
        )
        self.health = Health(self.settings)
        self.now = 0.0
        self.roles: dict[int, Role] = {}
        #: When each worker's probe that has no answer was placed.
        self.probes: dict[int, float] = {}
        #: Until when a verdict lasts.
        self.verdicts: dict[int, float] = {}

    @rule(name=NAMES)
    def come(self, name: int) -> None:
        if name not in self.roles:
            self.roles[name] = ROLE[name % 2]
            self.health.add(Worker(name, ROLE[name % 2]))
            assert self.health.risk(name, self.now) == self.settings.prior_failures

    @precondition(lambda self: len(self.roles) > 2)
    @rule(name=NAMES)
    def go(self, name: int) -> None:
        assert self.health.drop(name) == (name in self.roles)
        for known in (self.roles, self.probes, self.verdicts):
            known.pop(name, None)

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 5.0, 20.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=NAMES, times=st.integers(1, 12))
    def succeed(self, name: int, times: int) -> None:
        for _ in range(times):
            self.health.succeeded(name, self.now)
        self.probes.pop(name, None)

    @rule(name=NAMES, times=st.integers(1, 12))
    def fail(self, name: int, times: int) -> None:
        for _ in range(times):
            self.health.failed(name, self.now, "refused")
        self.probes.pop(name, None)

    @rule(name=NAMES)
    def stall(self, name: int) -> None:
        self.health.stalled(name, self.now)
        self.probes.pop(name, None)

    @rule(name=NAMES)
    def cancel(self, name: int) -> None:
        self.health.cancelled(name, self.now)
        self.probes.pop(name, None)

    @rule(name=NAMES, seconds=st.sampled_from([0.5, 5.0, 50.0]))
    def condemn(self, name: int, seconds: float) -> None:
        self.health.verdict(name, True, self.now, seconds)
        if name in self.roles:
            self.verdicts[name] = self.now + seconds

    @rule(name=NAMES)
    def acquit(self, name: int) -> None:
        self.health.verdict(name, False, self.now, 0.0)
        self.verdicts.pop(name, None)

    @rule()
    def place(self) -> None:
        """Ask those that are admitted, the half-open ones first."""
        for role in ROLE:
            workers = [name for name, its in self.roles.items() if its == role]
            for name in self.health.admitted(workers, self.now):
                probing = self.health.state(name, self.now) == "probing"
                free = self.probes.get(name, -math.inf) + self.settings.probe_s <= self.now
                assert self.health.probe(name, self.now) == (probing and free)
                if probing:
                    self.probes.setdefault(name, self.now)
                    self.probes[name] = self.now if free else self.probes[name]
                    assert not self.health.probe(name, self.now)

    @rule()
    def look(self) -> None:
        """Looking changes nothing."""
        before = [(name, self.health.state(name, self.now), self.health.risk(name, self.now)) for name in self.roles]
        self.health.admitted(list(self.roles), self.now)
        assert before == [
            (name, self.health.state(name, self.now), self.health.risk(name, self.now)) for name in self.roles
        ]

    @invariant()
    def no_more_are_out_than_may_be(self) -> None:
        for role in ROLE:
            workers = [name for name, its in self.roles.items() if its == role]
            away = [name for name in workers if self.health.state(name, self.now) != "in"]
            assert len(away) <= self.health.limit(role)
            assert len(away) <= max(1, len(workers) // 2)
            assert len(away) < len(workers) or not workers

    @invariant()
    def something_is_asked_while_something_lives(self) -> None:
        everyone = list(self.roles)
        admitted = self.health.admitted(everyone, self.now)
        assert admitted == [name for name in everyone if name in set(admitted)]
        assert bool(admitted) == bool(everyone)
        for role in ROLE:
            workers = [name for name in everyone if self.roles[name] == role]
            assert all(self.health.state(name, self.now) != "out" for name in self.health.admitted(workers, self.now))
        for name in everyone:
            assert self.health.admitted([name], self.now) == [name]

    @invariant()
    def each_state_has_its_reason(self) -> None:
        for name in self.roles:
            assert bool(self.health.why(name, self.now)) == (self.health.state(name, self.now) != "in")
            assert 0.0 <= self.health.risk(name, self.now) <= 1.0

    def teardown(self) -> None:
        """With no more news nobody is out once the longest time is over, and one success each brings all back."""
        bound = self.settings.probe_s + self.settings.max_ejection_s
        self.now = max([self.now + bound, *self.verdicts.values()])
        for name in self.roles:
            assert self.health.state(name, self.now) != "out"
        for name in self.roles:
            self.health.succeeded(name, self.now)
        for name in self.roles:
            assert self.health.state(name, self.now) == "in"
        assert not self.health._wanted


Fleet.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestFleet = Fleet.TestCase
