# SPDX-License-Identifier: Apache-2.0
"""A simulated fleet: known answers, conservation, closed loops, tiers, faults, and the same bytes again."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_kv_router_ext import Decision, NoWorkerError, Request, Role, Terms, Tier, Worker, WorkerId
from dynamo_kv_router_ext._profile import TierCost
from dynamo_kv_router_ext.sim.fleet import (
    Arrival,
    Fault,
    FleetSpec,
    RequestResult,
    Result,
    WorkerSpec,
    simulate,
    split_blocks,
)
from dynamo_kv_router_ext.sim.policies import RoundRobin
from dynamo_kv_router_ext.sim.timing import PolynomialTiming
from support.linear_timing import Linear, near

SIZE = 10


class Turns:
    """A policy that asks each rank of a role in turn, fetches all there is, and keeps what it was told."""

    def __init__(self) -> None:
        self.workers: dict[WorkerId, Worker] = {}
        self.turn: Counter[str] = Counter()
        self.told: list[tuple[Any, ...]] = []
        self.blocks: list[tuple[float | None, bool, WorkerId, Tier, tuple[int, ...]]] = []
        self.now: float | None = None

    def add_worker(self, worker: Worker, now: float) -> None:
        self.workers[worker.id] = worker
        self.told.append(("add", worker.id, now))

    def remove_worker(self, id: WorkerId, now: float) -> None:
        del self.workers[id]
        self.told.append(("remove", id, now))

    def stored(self, worker: WorkerId, rank: int, tier: Tier, blocks: Sequence[int]) -> None:
        self.blocks.append((self.now, True, worker, tier, tuple(blocks)))

    def removed(self, worker: WorkerId, rank: int, tier: Tier, blocks: Sequence[int]) -> None:
        self.blocks.append((self.now, False, worker, tier, tuple(blocks)))

    def place(self, request: Request, role: Role, now: float) -> Decision:
        seats = [(one.id, rank) for one in self.workers.values() if one.role == role for rank in range(one.ranks)]
        if not seats:
            raise NoWorkerError(f"no worker for {role}")
        worker, rank = seats[self.turn[role] % len(seats)]
        self.turn[role] += 1
        self.told.append(("place", request.id, role, worker, now, request.prefill_worker))
        return Decision(request.id, role, worker, rank, Terms(), fetch_tokens=request.tokens)

    def prefilled(self, request_id: str, now: float, fetch_s: float | None = None) -> None:
        self.told.append(("prefilled", request_id, now, fetch_s))

    def progress(self, request_id: str, tokens: int, now: float) -> None:
        self.told.append(("progress", request_id, tokens, now))

    def finished(self, request_id: str, now: float) -> None:
        self.told.append(("finished", request_id, now))

    def failed(self, request_id: str, role: Role, now: float, reason: str) -> None:
        self.told.append(("failed", request_id, role, now, reason))

    def cancelled(self, request_id: str, now: float) -> None:
        self.told.append(("cancelled", request_id, now))

    def tick(self, now: float) -> None:
        self.now = now

    def kinds(self, *kinds: str) -> list[tuple[Any, ...]]:
        return [one for one in self.told if one[0] in kinds]


def worker(id: str, role: Role = "both", *, ranks: int = 1, capacity: int = 1000, **more: Any) -> WorkerSpec:
    return WorkerSpec(Worker(id, role, ranks, capacity, 256, 100), **more)


def fleet(*workers: WorkerSpec, **more: Any) -> FleetSpec:
    return FleetSpec(workers, Linear(), block_size=SIZE, **more)


def arrival(id: str, at_s: float, tokens: int, output: int = 1, first: int | None = None, **more: Any) -> Arrival:
    blocks = () if first is None else tuple(range(first, first + tokens // SIZE))
    return Arrival(id, at_s, tokens, output, blocks, **more)


def run(spec: FleetSpec, *arrivals: Arrival, policy: Turns | None = None) -> dict[str, RequestResult]:
    return {one.id: one for one in simulate(spec, arrivals, policy or Turns()).requests}


PD = (worker("p", "prefill"), worker("d", "decode"))


# Known answers ------------------------------------------------------------------------------------------------------


def test_one_request_on_one_worker() -> None:
    policy = Turns()
    result = simulate(fleet(worker("w")), [arrival("a", 2.0, 150, 3)], policy)
    (one,) = result.requests
    assert (one.prefill, one.decode) == (("w", 0), ("w", 0))
    assert one.ttft_s == near(0.15)
    assert one.itl_s == near(0.011 + 151.5e-6)
    assert one.e2e_s == near(one.ttft_s + 2 * one.itl_s)
    assert (one.placed_s, one.prefilled_s) == (2.0, one.first_token_s)
    assert (one.attempts, one.error, one.preemptions) == (1, "", 0)
    (row,) = result.workers
    assert (row.worker, row.requests, row.prompt_tokens, row.output_tokens) == ("w", 1, 150, 3)
    assert row.busy_s == near(one.e2e_s)
    assert row.utilisation == near(row.busy_s / result.duration_s)
    assert result.mean_ttft_s() == near(0.15)
    assert [one[0] for one in policy.told] == ["add", "place", "prefilled", "progress", "progress", "finished"]
    assert [one[2] for one in policy.kinds("progress")] == [1, 3]


def test_a_second_request_joins_at_the_end_of_the_pass() -> None:
    got = run(fleet(worker("w")), arrival("a", 0.0, 50, 11), arrival("b", 0.075, 30))
    step = [0.011 + (51 + n) * 1e-6 for n in range(10)]
    # a decodes from 0.05 on; b comes during the third step, is read beside the fourth.
    start = 0.05 + sum(step[:3])
    assert got["b"].first_token_s == near(start + 0.03 + step[3])
    assert got["a"].end_s == near(0.05 + sum(step) + 0.03)


def test_a_prompt_is_read_here_and_generated_there() -> None:
    policy = Turns()
    spec = fleet(*PD, transfer=TierCost(latency_s=0.05, token_s=0.001))
    result = simulate(spec, [arrival("a", 0.0, 50, 2, 0), arrival("b", 1.0, 65, 2, 0)], policy)
    one, two = result.requests
    assert (one.prefill, one.decode) == (("p", 0), ("d", 0))
    assert one.prefilled_s == near(0.05)
    assert one.first_token_s == near(0.05 + 0.05 + 0.05 + 0.011 + 50e-6)
    assert one.end_s == near(one.first_token_s + 0.011 + 51e-6)
    # All five blocks of the first prompt are on both: 15 tokens are read, 15 pulled.
    assert (two.device_tokens, two.pulled_tokens) == (50, 15)
    assert two.ttft_s == near(0.015 + 0.05 + 0.015 + 0.011 + 65e-6)
    assert policy.kinds("place")[:2] == [
        ("place", "a", "prefill", "p", 0.0, None),
        ("place", "a", "decode", "d", one.prefilled_s, "p"),
    ]
    assert [row.requests for row in result.workers] == [2, 2]
    assert [row.output_tokens for row in result.workers] == [2, 4]


def test_a_busy_decoder_takes_a_sequence_between_two_steps() -> None:
    got = run(fleet(*PD), arrival("a", 0.0, 50, 50, 0), arrival("b", 0.01, 30, 2, 100))
    # b is ready at 0.08, amid the third step of a (50, 51, 52 resident tokens).
    joins = 0.05 + 3 * 0.011 + 153e-6
    assert got["b"].prefilled_s == near(0.08)
    assert got["b"].first_token_s == near(joins + 0.012 + (53 + 30) * 1e-6)


def test_a_decoder_pulls_one_sequence_at_a_time() -> None:
    prefills = [worker("p0", "prefill"), worker("p1", "prefill")]
    spec = fleet(*prefills, worker("d", "decode"), transfer=TierCost(latency_s=0.0, token_s=0.01))
    got = run(spec, arrival("a", 0.0, 50), arrival("b", 0.0, 50))
    assert got["a"].first_token_s == near(0.55 + 0.011 + 50e-6)
    assert got["b"].first_token_s == near(1.05 + 0.011 + 50e-6)


def test_a_decoder_without_room_holds_the_prompt_back_on_the_prefill_worker() -> None:
    spec = fleet(worker("p", "prefill", capacity=120), worker("d", "decode", capacity=80))
    firsts = {"a": 0, "b": 100, "c": 200, "d": 300}
    got = run(spec, *[arrival(name, 0.0, 60, 10, first) for name, first in firsts.items()])
    assert got["b"].first_token_s > got["a"].end_s
    # b and c fill the prefill worker until a has ended and b has been pulled.
    assert got["c"].prefilled_s < got["a"].end_s
    assert got["d"].prefilled_s == near(got["a"].end_s + 0.06)
    assert got["c"].first_token_s > got["b"].end_s
    assert not any(one.error for one in got.values())


def test_speeds_of_workers() -> None:
    got = run(fleet(worker("w", speed=((0.0, 0.5), (1.0, 2.0)))), arrival("a", 0.0, 50), arrival("b", 1.0, 50))
    assert [one.ttft_s for one in got.values()] == [near(0.1), near(0.025)]


def test_decoders_may_have_a_timing_of_their_own() -> None:
    class Slow(Linear):
        def step_s(self, prefills: Sequence[tuple[int, int]], decodes: int, resident: int) -> float:
            return 5.0

        def decode_run_s(self, decodes: int, resident: int, steps: int) -> float:
            return 5.0 * steps

    got = run(fleet(*PD, decode_timing=Slow()), arrival("a", 0.0, 50, 3))
    assert (got["a"].ttft_s, got["a"].itl_s) == (near(5.05), near(5.0))


def test_ranks_in_lockstep() -> None:
    got = run(fleet(worker("w", ranks=2)), arrival("a", 0.0, 100), arrival("b", 0.0, 10))
    assert got["b"].decode == ("w", 1)
    assert got["b"].ttft_s == near(0.1)


# Beside dynamo.replay -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_round_robin_agrees_with_dynamo_replay(
    split: bool, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = 600  # too few to keep all prompts, enough not to preempt
    replay = pytest.importorskip("dynamo.replay")
    monkeypatch.setenv("DYN_LOG", "error")
    draw = random.Random(7)
    rows: list[dict[str, Any]] = []
    at = 0.0
    for number in range(120):
        at += draw.expovariate(1 / 150)
        tokens, shared = draw.randrange(1, 3000), draw.randrange(4)
        # Every other prompt begins as others do.
        ids = [100 * shared + n if number % 2 else 1000 * (number + 1) + n for n in range(-(-tokens // 512))]
        rows.append({"timestamp": at, "input_length": tokens, "output_length": draw.randrange(1, 120), "hash_ids": ids})
    start = rows[0]["timestamp"]
    for row in rows:
        row["timestamp"] -= start
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def engine(role: str) -> dict[str, Any]:
        fields = {"backend": "vllm", "worker_type": role, "block_size": 64, "num_gpu_blocks": blocks}
        fields |= {"max_num_batched_tokens": 2048, "max_num_seqs": 16, "enable_prefix_caching": True}
        return {"engine": fields, "dp_size": ranks}

    sides: dict[str, Any] = {"extra_engine_args": engine("aggregated"), "num_workers": 2}
    roles: list[Role] = ["both", "both"]
    if split:
        sides = {"prefill_engine_args": engine("prefill"), "decode_engine_args": engine("decode")}
        sides |= {"num_prefill_workers": 2, "num_decode_workers": 2}
        roles = ["prefill", "prefill", "decode", "decode"]
    report = replay.run_trace_replay(
        trace, router_mode="round_robin", trace_block_size=512, capture_per_request=True, **sides
    )
    theirs = sorted(report.per_request, key=lambda record: record["arrival_time_ms"])

    workers = [WorkerSpec(Worker(n, role, ranks, 64 * blocks, 16, 2048)) for n, role in enumerate(roles)]
    arrivals = [
        Arrival(
            f"{number:03}",
            row["timestamp"] / 1e3,
            row["input_length"],
            row["output_length"],
            split_blocks(row["hash_ids"], 512, 64, row["input_length"]),
        )
        for number, row in enumerate(rows)
    ]
    evicted: list[int] = []

    class Watched(RoundRobin):
        def removed(self, worker: WorkerId, rank: int, tier: Tier, blocks: Sequence[int]) -> None:
            evicted.extend(blocks)

    ours = simulate(FleetSpec(tuple(workers), PolynomialTiming(64 * blocks)), arrivals, Watched()).requests
    assert not any(one.preemptions for one in ours)
    assert evicted
    assert any(one.device_tokens for one in ours)
    for one, other in zip(ours, theirs, strict=True):
        assert 1e3 * one.first_token_s == near(other["first_token_ms"], 1e-5)
        assert 1e3 * one.end_s == near(other["last_token_ms"], 1e-5)


# Closed loop --------------------------------------------------------------------------------------------------------


def test_a_turn_waits_for_the_answer_before_it() -> None:
    got = run(
        fleet(worker("w")),
        arrival("a", 1.0, 50, 2),
        arrival("b", 0.0, 50, 2, after="a", think_s=3.0),
        arrival("c", 99.0, 50, 2, after="a"),
    )
    assert got["b"].arrival_s == near(got["a"].end_s + 3.0)
    assert got["c"].arrival_s == 99.0


def test_the_next_turn_finds_the_answer_where_it_was_generated() -> None:
    first = arrival("a", 0.0, 55, 20, 0, answer=(5, 6))
    nxt = Arrival("b", 0.0, 90, 2, tuple(range(9)), after="a")
    assert run(fleet(worker("w")), first, nxt)["b"].device_tokens == 70
    split = run(fleet(*PD), first, nxt)["b"]
    assert (split.device_tokens, split.pulled_tokens) == (50, 20)


def test_a_turn_after_one_that_failed_comes_too() -> None:
    got = run(fleet(worker("w", capacity=60)), arrival("a", 1.0, 90), arrival("b", 0.0, 20, after="a", think_s=1.0))
    assert got["a"].error == "90 + 1 tokens do not fit on w"
    assert (got["b"].arrival_s, got["b"].error) == (2.0, "")


# Conservation and determinism ---------------------------------------------------------------------------------------


@st.composite
def loads(draw: st.DrawFn) -> list[Arrival]:
    found: list[Arrival] = []
    for number in range(draw(st.integers(1, 25))):
        tokens, output = draw(st.integers(1, 250)), draw(st.integers(1, 60))
        after = draw(st.sampled_from([None, *(one.id for one in found)]))
        shared = draw(st.sampled_from([0, 1000, 2000, None]))
        first = 100_000 * (number + 1) if shared is None else shared
        # No two arrivals at one time but for a rounding, which would decide who goes first.
        at_s = draw(st.integers(0, 2000)) / 1000 + number * 1.41421e-7
        think_s = draw(st.integers(0, 1000)) / 1000 + number * 1.73205e-7
        found.append(arrival(f"r{number}", at_s, tokens, output, first, after=after, think_s=think_s))
    return found


FLEETS = {
    "aggregated": fleet(worker("a", capacity=400), worker("b", ranks=2, capacity=350)),
    "split": fleet(
        worker("p", "prefill", capacity=300),
        worker("d", "decode", capacity=330),
        worker("e", "decode", ranks=2, capacity=400),
        transfer=TierCost(latency_s=0.01, token_s=1e-4),
    ),
    "tiers": fleet(
        worker("a", capacity=350, host_tokens=200),
        worker("b", capacity=350, host_tokens=100, speed=((0.5, 0.7), (1.5, 1.2))),
        host=TierCost(latency_s=0.01, token_s=1e-4),
        store=TierCost(latency_s=0.02, token_s=2e-4),
        store_tokens=500,
        event_lag_s=0.1,
    ),
}


def check(result: Result, policy: Turns) -> None:
    for one in result.requests:
        assert one.error == ""
        assert one.arrival_s <= one.placed_s < one.prefilled_s <= one.first_token_s <= one.end_s
        assert one.device_tokens + one.host_tokens + one.store_tokens < one.tokens
    names = [one.id for one in result.requests]
    for kind in ("prefilled", "finished"):
        assert Counter(one[1] for one in policy.kinds(kind)) == Counter(names)
    told: dict[str, int] = {}
    for _, name, tokens, _ in policy.kinds("progress"):
        assert told.get(name, 0) <= tokens
        told[name] = tokens
    assert told == {one.id: one.output_tokens for one in result.requests}
    # Each token was generated once; each prompt token was computed or found, and once unless one was preempted.
    generating = [row for row in result.workers if row.role != "prefill"]
    assert sum(row.output_tokens for row in generating) == sum(one.output_tokens for one in result.requests)
    reading = sum(row.prompt_tokens for row in result.workers if row.role != "decode")
    found = sum(one.device_tokens + one.host_tokens + one.store_tokens for one in result.requests)
    prompts = sum(one.tokens for one in result.requests)
    preemptions = sum(one.preemptions for one in result.requests)
    assert preemptions == sum(row.preemptions for row in result.workers)
    if not preemptions:
        assert reading + found == prompts


@pytest.mark.parametrize("name", FLEETS)
@settings(max_examples=60)
@given(arrivals=loads())
def test_each_request_ends_once_and_tokens_add_up(name: str, arrivals: list[Arrival]) -> None:
    policy = Turns()
    result = simulate(FLEETS[name], arrivals, policy)
    check(result, policy)
    assert simulate(FLEETS[name], arrivals, Turns()).to_bytes() == result.to_bytes()


@settings(max_examples=60)
@given(arrivals=loads())
def test_jumps_change_nothing(arrivals: list[Arrival]) -> None:
    # Of different speed from the start: where steps of both end at one time, a rounding would decide who joins which.
    speed = ((0.0, 1.0137), (0.7, 1.3))
    spec = fleet(worker("a", capacity=100_000), worker("b", capacity=100_000, ranks=2, speed=speed))
    jumped = simulate(spec, arrivals, Turns())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dynamo_kv_router_ext.sim.engine._Rank.room", lambda self, jobs, passes: 1)
        stepped = simulate(spec, arrivals, Turns())
    for one, other in zip(jumped.requests, stepped.requests, strict=True):
        assert one.first_token_s == near(other.first_token_s, rel=1e-9)
        assert one.end_s == near(other.end_s, rel=1e-9)


@settings(max_examples=60)
@given(
    arrivals=loads(),
    faults=st.lists(
        st.builds(
            lambda worker, kind, start, length: Fault(worker, kind, start, start + length),
            st.sampled_from(["p", "d", "e"]),
            st.sampled_from(["raise", "hang", "die", "slow"]),
            st.floats(0, 3),
            st.floats(0.01, 2),
        ),
        max_size=4,
    ),
    timeout_s=st.sampled_from([0.0, 1.0]),
)
def test_faults_lose_no_request(arrivals: list[Arrival], faults: list[Fault], timeout_s: float) -> None:
    workers = (
        worker("p", "prefill", capacity=500),
        worker("d", "decode", capacity=330),
        worker("e", "decode", capacity=400),
    )
    spec = fleet(*workers, faults=tuple(faults), timeout_s=timeout_s, retries=2)
    policy = Turns()
    result = simulate(spec, arrivals, policy)
    assert result.to_bytes() == simulate(spec, arrivals, Turns()).to_bytes()
    ended = Counter(one[1] for one in policy.kinds("finished"))
    for one in result.requests:
        assert ended[one.id] == (0 if one.error else 1)
        assert one.attempts <= 3
        assert not math.isnan(one.end_s)


# Cache events and tiers ---------------------------------------------------------------------------------------------


def test_events_reach_the_policy_late() -> None:
    for lag in (0.0, 2.5):
        policy = Turns()
        spec = fleet(worker("w"), event_lag_s=lag)
        simulate(spec, [arrival("a", 0.5, 30, 1, 7), arrival("b", 5.5, 10)], policy)
        assert [one[1:] for one in policy.blocks] == [(True, "w", "device", (7, 8, 9))]
        # The pass ends at 0.53: at the tick before, or 2.5 s later.
        assert policy.blocks[0][0] == (None if not lag else 3.0)


def test_a_fleet_that_idles_for_years_is_simulated_at_once() -> None:
    policy = Turns()
    result = run(fleet(worker("w")), arrival("a", 0.5, 30), arrival("b", 9e8, 30), policy=policy)
    assert result["b"].ttft_s == near(result["a"].ttft_s, 1e-3)
    with pytest.raises(ValueError, match=r"arrival 'a': at_s 1e\+17 .* at most 1e\+09"):
        run(fleet(worker("w")), arrival("a", 1e17, 30))


def test_tiers_serve_what_the_device_lost() -> None:
    slow = TierCost(latency_s=0.1, token_s=0.0)
    arrivals = (arrival("a", 0.0, 90, 1, 0), arrival("b", 1.0, 90, 1, 100), arrival("c", 2.0, 90, 1, 0))
    policy = Turns()
    got = run(fleet(worker("w", capacity=100, host_tokens=100), host=slow), *arrivals, policy=policy)
    # One block of a is left on the device; the last token's is never fetched.
    assert (got["c"].device_tokens, got["c"].host_tokens) == (10, 70)
    assert got["c"].ttft_s == near(0.11)
    assert [one[3] for one in policy.kinds("prefilled")] == [None, None, near(0.1)]
    policy = Turns()
    got = run(fleet(worker("v"), worker("w"), store=slow, store_tokens=1000), *arrivals[::2], policy=policy)
    assert (got["c"].prefill, got["c"].store_tokens) == (("w", 0), 80)
    assert [one[1:] for one in policy.blocks][:2] == [
        (True, "v", "device", tuple(range(9))),
        (True, "v", "store", tuple(range(9))),
    ]


# Faults -------------------------------------------------------------------------------------------------------------


def test_a_worker_that_raises_fails_requests_at_once() -> None:
    policy = Turns()
    spec = fleet(worker("v"), worker("w"), faults=(Fault("v", "raise", 0.0, 10.0),))
    got = run(spec, arrival("a", 1.0, 50), arrival("b", 20.0, 50), policy=policy)
    assert policy.kinds("failed") == [("failed", "a", "both", 1.0, "raised")]
    assert (got["a"].attempts, got["a"].decode, got["a"].ttft_s) == (2, ("w", 0), near(0.05))
    assert got["b"].decode == ("v", 0)


def test_retries_are_bounded() -> None:
    spec = fleet(worker("w"), faults=(Fault("w", "raise", 0.0),), retries=2)
    got = run(spec, arrival("a", 1.0, 50))
    assert (got["a"].attempts, got["a"].error, got["a"].end_s) == (3, "raised", 1.0)
    assert math.isnan(got["a"].ttft_s)


def test_a_hanging_worker_goes_on_where_it_was() -> None:
    spec = fleet(worker("w"), faults=(Fault("w", "hang", 0.02, 5.0),))
    got = run(spec, arrival("a", 0.0, 50), arrival("b", 1.0, 50))
    assert got["a"].first_token_s == near(5.0 + 0.03)
    assert got["b"].first_token_s == near(5.0 + 0.08)


def test_requests_leave_a_worker_that_hangs_for_good() -> None:
    policy = Turns()
    spec = fleet(worker("v"), worker("w"), faults=(Fault("v", "hang", 0.02),), timeout_s=3.0)
    got = run(spec, arrival("a", 0.0, 50), policy=policy)
    assert policy.kinds("failed") == [("failed", "a", "both", 3.0, "timeout")]
    assert (got["a"].decode, got["a"].ttft_s) == (("w", 0), near(3.05))
    got = run(fleet(worker("v"), faults=(Fault("v", "hang", 0.02),)), arrival("a", 0.0, 50))
    assert got["a"].error == "never answered"


def test_a_dead_worker_loses_its_requests_and_its_cache() -> None:
    policy = Turns()
    spec = fleet(worker("w"), faults=(Fault("w", "die", 1.0, 4.0),))
    got = run(
        spec, arrival("a", 0.0, 50, 1, 0), arrival("b", 0.98, 50, 1, 0), arrival("c", 2.0, 50, 1, 0), policy=policy
    )
    assert [one[:3] for one in policy.kinds("failed", "remove", "add")] == [
        ("add", "w", 0.0),
        ("remove", "w", 1.0),
        ("add", "w", 4.0),
    ]
    assert not got["b"].error  # it had 40 tokens cached: done at 0.99
    assert (got["c"].device_tokens, got["c"].first_token_s) == (0, near(4.05))


def test_a_decoder_that_dies_sends_its_requests_back() -> None:
    policy = Turns()
    spec = fleet(worker("p", "prefill"), worker("d", "decode"), worker("e", "decode"), faults=(Fault("d", "die", 0.1),))
    got = run(spec, arrival("a", 0.0, 50, 20, 0), policy=policy)
    assert policy.kinds("failed") == [("failed", "a", "decode", 0.1, "died")]
    assert (got["a"].decode, got["a"].attempts, got["a"].device_tokens) == (("e", 0), 2, 40)
    assert got["a"].first_token_s == near(0.1 + 0.01 + 0.011 + 50e-6)


def test_a_prefill_worker_that_dies_takes_along_what_was_not_pulled() -> None:
    policy = Turns()
    spec = fleet(
        worker("p", "prefill"),
        worker("q", "prefill"),
        worker("d", "decode"),
        transfer=TierCost(latency_s=1.0, token_s=0.0),
        faults=(Fault("p", "die", 0.5),),
    )
    got = run(spec, arrival("a", 0.0, 50, 2, 0), policy=policy)
    assert policy.kinds("failed") == []  # the decoder has done nothing wrong
    assert policy.kinds("cancelled") == [("cancelled", "a", 0.5)]
    assert (got["a"].prefill, got["a"].attempts) == (("q", 0), 2)
    assert got["a"].first_token_s > 1.55


def test_half_speed_for_a_while() -> None:
    spec = fleet(worker("w"), faults=(Fault("w", "slow", 1.0, 2.0),))
    got = run(spec, *[arrival(str(t), float(t), 50) for t in range(3)])
    assert [one.ttft_s for one in got.values()] == near([0.05, 0.1, 0.05])


def test_a_worker_may_join_later() -> None:
    got = run(fleet(worker("w", starts_s=3.0)), arrival("a", 1.0, 50))
    assert (got["a"].placed_s, got["a"].ttft_s) == (3.0, near(2.05))


# Faults of the caller -----------------------------------------------------------------------------------------------


def test_what_a_fleet_cannot_be() -> None:
    with pytest.raises(ValueError, match="roles must be `both`, or `prefill` and `decode`, not both, decode"):
        fleet(worker("a"), worker("b", "decode"))
    with pytest.raises(ValueError, match="worker ids must differ"):
        fleet(worker("a"), worker("a"))
    with pytest.raises(ValueError, match="names the worker 'z'"):
        fleet(worker("a"), faults=(Fault("z", "die", 0.0),))
    with pytest.raises(ValueError, match="tick_s must be above 0, not 0"):
        fleet(worker("a"), tick_s=0)
    with pytest.raises(ValueError, match="kind must be one of"):
        Fault("a", "explode", 0.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"lasts from 2\.0 to 1\.0"):
        Fault("a", "die", 2.0, 1.0)


@pytest.mark.parametrize(
    ("arrivals", "message"),
    [
        ([arrival("a", 0.0, 5), arrival("a", 0.0, 5)], "comes twice"),
        ([arrival("a", 0.0, 5, after="b"), arrival("b", 0.0, 5)], "after names 'b'"),
        ([arrival("a", 0.0, 0)], "0 tokens and 1 of output"),
        ([arrival("a", -1.0, 5)], r"at_s -1\.0"),
        ([Arrival("a", 0.0, 35, 1, (1, 2))], "2 blocks, but 35 tokens fill 3 of 10"),
        ([Arrival("a", 0.0, 10, 1, (-1,))], "at least 0"),
    ],
)
def test_what_an_arrival_cannot_be(arrivals: list[Arrival], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(fleet(worker("w")), arrivals, Turns())


def test_a_policy_that_names_no_worker_is_told() -> None:
    class Lost(Turns):
        def place(self, request: Request, role: Role, now: float) -> Decision:
            return Decision(request.id, role, "z", 0, Terms())

    with pytest.raises(ValueError, match="the policy chose 'z', no living worker for both"):
        simulate(fleet(worker("w")), [arrival("a", 0.0, 5)], Lost())


def test_blocks_are_split() -> None:
    assert split_blocks([3, 5], 20, 5, 33) == (12, 13, 14, 15, 20, 21)
    with pytest.raises(ValueError, match="20 tokens cannot be split into blocks of 7"):
        split_blocks([3], 20, 7, 20)
    with pytest.raises(ValueError, match="1 blocks of 20 tokens are too few for 21"):
        split_blocks([3], 20, 5, 21)
