# SPDX-License-Identifier: Apache-2.0
"""Placement, one lever at a time."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import pytest

from dynamo_kv_router_ext._health import Health, HealthSettings
from dynamo_kv_router_ext._index import PrefixIndex
from dynamo_kv_router_ext._placement import Load, Placer, Settings
from dynamo_kv_router_ext._profile import DecodeCost, Profile, StepCost, TierCost
from dynamo_kv_router_ext._store_tier import StoreTier
from dynamo_kv_router_ext._types import ROLES, NoWorkerError, Request, Role, Seat, Worker

SIZE = 64
PROFILE = Profile(
    name="test",
    source="made up",
    prefill=StepCost(base_s=0.01, token_s=1e-4, pair_s=1e-9),
    decode=DecodeCost(base_s=0.01, sequence_s=1e-4, token_s=1e-8),
    transfer=TierCost(latency_s=0.001, token_s=1e-6),
    tiers={"host": TierCost(latency_s=0.001, token_s=1e-6), "store": TierCost(latency_s=0.5, token_s=1e-4)},
)


def fleet(count: int, role: Role = "prefill", settings: Settings | None = None, **worker: Any) -> Placer:
    """A placer with workers 0, 1, ..."""
    placer = Placer(PROFILE, settings, block_size=SIZE, health=Health(HealthSettings(prior_failures=0.0)))
    for name in range(count):
        placer.add_worker(Worker(name, role, **worker), 0.0)
    return placer


def prompt(name: str, tokens: int, family: int = 0, **fields: Any) -> Request:
    """A prompt whose blocks are the family's first."""
    return Request(name, tokens, [family * 100_000 + i for i in range(tokens // SIZE)], **fields)


def terms(placer: Placer, request: Request, role: Role, now: float, worker: Any, rank: int = 0) -> Any:
    """What `explain` says of one seat."""
    found = [c for c in placer.explain(request, role, now).candidates if (c.worker, c.rank) == (worker, rank)]
    assert len(found) == 1
    return found[0].terms


def test_equal_workers_take_turns() -> None:
    placer = fleet(4)
    chosen: list[Any] = []
    for i in range(8):
        chosen.append(placer.place(prompt(f"r{i}", 1000, family=i), "prefill", 0.0).worker)
        placer.prefilled(f"r{i}", 0.0)
    assert sorted(chosen) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_booking_is_waited_for_and_runs_off() -> None:
    placer = fleet(1)
    first = placer.place(prompt("a", 8000), "prefill", 0.0).terms
    assert first.wait_s == 0.0
    assert first.work_s == pytest.approx(PROFILE.prefill_s(8000, 0, 8192))
    assert first.first_token_s == first.work_s
    other = prompt("b", 8000, family=1)
    assert terms(placer, other, "prefill", 0.0, 0).wait_s == pytest.approx(first.work_s)
    assert terms(placer, other, "prefill", 0.5, 0).wait_s == pytest.approx(first.work_s - 0.5)
    assert placer.load(0).prompts == 1
    placer.prefilled("a", 0.6)
    assert placer.load(0) == Load(0, 0.0, 0, 0)
    assert terms(placer, other, "prefill", 0.6, 0).wait_s == 0.0


def test_a_worker_that_is_late_never_looks_idle() -> None:
    placer = fleet(1)
    placer.place(prompt("a", 8000), "prefill", 0.0)
    waits = [terms(placer, prompt("b", 100), "prefill", now, 0).wait_s for now in (0.8, 2.0, 5.0, 50.0)]
    assert 0.0 < waits[0] < waits[1] < waits[2] < waits[3]
    assert waits[3] > 20.0


def test_a_cached_prefix_counts_but_its_last_token_never_does() -> None:
    placer = fleet(2)
    request = prompt("a", 640)
    placer.stored(1, 0, "device", request.blocks)
    decision = placer.place(request, "prefill", 0.0)
    assert decision.worker == 1
    assert decision.terms.device_tokens == 640 - SIZE
    assert decision.terms.work_s == pytest.approx(PROFILE.prefill_s(SIZE, 640 - SIZE, 8192))


def test_a_removed_or_cleared_prefix_counts_no_more() -> None:
    placer = fleet(1)
    request = prompt("a", 6400)
    placer.stored(0, 0, "device", request.blocks)
    placer.removed(0, 0, "device", request.blocks[50:])
    assert terms(placer, request, "prefill", 0.0, 0).device_tokens == 50 * SIZE
    placer.cleared(0, 0)
    assert terms(placer, request, "prefill", 0.0, 0).device_tokens == 0


def test_a_prefix_that_is_being_read_counts_already() -> None:
    placer = fleet(4, settings=Settings(others_weight=0.0))
    first = placer.place(prompt("a", 64_000), "prefill", 0.0)
    now = first.terms.work_s - 0.1
    second = placer.place(prompt("b", 64_640), "prefill", now)
    assert second.worker == first.worker
    assert second.terms.device_tokens >= 64_000 - 16 * SIZE
    placer.cancelled("a", now)
    placer.cancelled("b", now)
    assert terms(placer, prompt("c", 64_640), "prefill", now, first.worker).device_tokens == 0


def test_blocks_are_fetched_where_that_is_faster_than_reading() -> None:
    placer = fleet(1)
    request = prompt("a", 6400)
    placer.stored(0, 0, "host", request.blocks[:60])
    placer.stored(0, 0, "store", request.blocks[60:90])
    decision = placer.place(request, "prefill", 0.0)
    assert decision.fetch_tokens == 60 * SIZE
    assert decision.terms.fetch_tokens == {"host": 60 * SIZE}
    assert decision.terms.fetch_s == pytest.approx(PROFILE.fetch_s("host", 60 * SIZE))
    assert decision.terms.first_token_s == pytest.approx(decision.terms.fetch_s + decision.terms.work_s)


def test_fetching_runs_beside_the_wait_and_the_link_serves_one_at_a_time() -> None:
    placer = fleet(1)
    placer.stored(0, 0, "store", prompt("x", 64_000).blocks)
    assert terms(placer, prompt("b", 6400), "prefill", 0.0, 0).fetch_tokens == {}
    placer.place(prompt("a", 80_000, family=1), "prefill", 0.0)
    waiting = placer.place(prompt("b", 6400), "prefill", 0.0).terms
    assert waiting.fetch_tokens == {"store": 6400 - SIZE}
    assert waiting.fetch_s < waiting.wait_s
    assert waiting.first_token_s == pytest.approx(waiting.wait_s + waiting.work_s)
    behind = terms(placer, prompt("c", 12_800), "prefill", 0.0, 0)
    assert behind.fetch_s > waiting.fetch_s + 0.5


def test_long_prompts_cost_more_than_their_length_says() -> None:
    placer = fleet(1)
    short = terms(placer, prompt("a", 10_000), "prefill", 0.0, 0).work_s
    assert terms(placer, prompt("a", 100_000), "prefill", 0.0, 0).work_s > 12 * short


def test_a_slow_worker_is_found_out() -> None:
    placer = fleet(2)
    now = 0.0
    share: Any = [0, 0]
    for i in range(60):
        chosen = placer.place(prompt(f"r{i}", 8000, family=i), "prefill", now)
        now += PROFILE.prefill_s(8000, 0, 8192) * (3.0 if chosen.worker == 1 else 1.0)
        placer.prefilled(f"r{i}", now)
        share[chosen.worker] += 1
    assert share[1] < 10


def test_prompts_that_share_steps_are_measured_together() -> None:
    placer = fleet(1)
    # Two prompts in one step: each alone would look twice as slow, or infinitely fast.
    now = 0.0
    for i in range(40):
        for name in "ab":
            placer.place(prompt(f"{name}{i}", 4000, family=2 * i + (name == "b")), "prefill", now)
        now += PROFILE.prefill_s(4000, 0, 8192) * 2
        placer.prefilled(f"a{i}", now)
        placer.prefilled(f"b{i}", now)
    measured = terms(placer, prompt("x", 4000, family=999), "prefill", now, 0).work_s
    assert measured == pytest.approx(PROFILE.prefill_s(4000, 0, 8192), rel=0.02)


def test_under_load_work_costs_more_than_the_wait_alone() -> None:
    placer = fleet(2, settings=Settings(others_weight=1.0))
    now = 0.0
    for i in range(100):
        chosen = placer.place(prompt(f"r{i}", 8000, family=i), "prefill", now)
        now += 0.5
        placer.prefilled(f"r{i}", now)
        assert chosen.terms.others_s >= 0.0
    busy = terms(placer, prompt("x", 8000, family=999), "prefill", now, 0)
    assert busy.others_s > 0.1 * busy.work_s
    assert terms(placer, prompt("x", 8000, family=999), "prefill", now + 600.0, 0).others_s < 0.01 * busy.others_s


def test_lockstep_ranks_share_their_step_time() -> None:
    placer = Placer(PROFILE, block_size=SIZE)
    placer.add_worker(Worker(0, "prefill", ranks=2), 0.0)
    long = placer.place(prompt("a", 80_000), "prefill", 0.0)
    short = terms(placer, prompt("b", 800, family=1), "prefill", 0.0, 0, 1 - long.rank)
    # Its one step lasts as long as one of the other rank's, and half of the present one is left.
    step = long.terms.work_s / (80_000 / 8192)
    assert short.work_s == pytest.approx(step)
    assert short.wait_s == pytest.approx(step / 2)
    assert placer.place(prompt("b", 800, family=1), "prefill", 0.0).rank == 1 - long.rank


def test_decode_goes_where_its_kv_is_unless_that_costs_more() -> None:
    placer = fleet(2, "decode")
    first = placer.place(prompt("a", 100_000, session="s"), "decode", 0.0)
    placer.progress("a", 100, 1.0)
    placer.finished("a", 1.0)
    second = placer.place(prompt("b", 106_000, session="s"), "decode", 2.0)
    assert second.worker == first.worker
    assert second.terms.device_tokens >= 100_000
    assert second.terms.work_s < 0.01
    placer.finished("b", 3.0)
    # No room: other requests fill both, but its own decoder is the fuller one.
    on: Any = [0, 0]
    for i in range(19):
        on[placer.place(Request(f"o{i}", 105_000), "decode", 3.0).worker] += 1
    kept = 8
    for i in range(19):
        booking = placer._booked["decode"][f"o{i}"]
        if booking.seat.name.worker != first.worker and kept:
            kept -= 1
            placer.finished(f"o{i}", 3.0)
    moved = placer.place(prompt("c", 112_000, session="s"), "decode", 3.0)
    assert moved.worker != first.worker
    assert moved.note == f"moved from {first.worker!r}"
    assert moved.terms.device_tokens == 0


def test_a_session_stays_at_a_worker_of_both_roles_that_tells_nothing_of_its_cache() -> None:
    placer = fleet(3, "both")
    first = placer.place(Request("a", 50_000, session="s"), "both", 0.0).worker
    placer.prefilled("a", 6.0)
    placer.finished("a", 7.0)
    placer.place(Request("b", 1000), "both", 8.0)
    again = placer.place(Request("c", 52_000, session="s"), "both", 9.0)
    assert (again.worker, again.note) == (first, "")
    assert again.terms.device_tokens >= 50_000
    # It is left where the wait is longer than reading all of it anew.
    busy = {placer.place(Request(f"o{i}", 300_000), "both", 9.0).worker: f"o{i}" for i in range(3)}
    for worker, name in busy.items():
        if worker != first:
            placer.cancelled(name, 9.0)
    moved = placer.place(Request("d", 54_000, session="s"), "both", 9.0)
    assert (moved.worker != first, moved.note) == (True, f"moved from {first!r}")
    assert moved.terms.device_tokens == 0


def test_decode_trusts_events_more_than_the_session_table() -> None:
    placer = fleet(2, "decode")
    first = placer.place(prompt("a", 6400, session="s"), "decode", 0.0).worker
    placer.finished("a", 0.0)
    assert terms(placer, prompt("b", 6400, session="s"), "decode", 0.0, first).device_tokens == 6400
    placer.stored(first, 0, "device", [5])
    assert terms(placer, prompt("b", 6400, session="s"), "decode", 0.0, first).device_tokens == 0


def test_decode_asks_the_transfer_group_of_the_prefill_worker_only() -> None:
    placer = Placer(PROFILE, block_size=SIZE)
    placer.add_worker(Worker("p", "prefill", transfer_group="a"), 0.0)
    placer.add_worker(Worker("d", "decode", transfer_group="b"), 0.0)
    with pytest.raises(NoWorkerError, match=r"'a'.*'d'"):
        placer.place(prompt("r", 100, prefill_worker="p"), "decode", 0.0)
    placer.add_worker(Worker("e", "decode", transfer_group="a"), 0.0)
    assert placer.place(prompt("r", 100, prefill_worker="p"), "decode", 0.0).worker == "e"
    refused = placer.explain(prompt("s", 100, prefill_worker="p"), "decode", 0.0).candidates[-1]
    assert refused.worker == "d"
    assert refused.terms is None
    assert refused.refused == "transfer group 'b', not 'a'"


def test_a_prompt_is_read_only_where_a_decoder_can_pull_it() -> None:
    placer = Placer(PROFILE, block_size=SIZE)
    for name in "abc":
        placer.add_worker(Worker(f"p{name}", "prefill", transfer_group=name), 0.0)
    assert {placer.place(prompt(f"r{i}", 6400, i), "prefill", 0.0).worker for i in range(3)} == {"pa", "pb", "pc"}
    placer.add_worker(Worker("db", "decode", transfer_group="b"), 0.0)
    decision = placer.place(prompt("x", 6400), "prefill", 0.0, explain=True)
    assert decision.worker == "pb"
    assert {c.worker: c.refused for c in decision.candidates} == {
        "pb": None,
        "pa": "no decoder of transfer group 'a' lives",
        "pc": "no decoder of transfer group 'c' lives",
    }
    placer.remove_worker("pb", 0.0)
    for ask in (placer.place, placer.explain):
        with pytest.raises(NoWorkerError, match=r"'y': no decoder of transfer group 'a' or 'c' lives.*decoders: 'b'"):
            ask(prompt("y", 6400), "prefill", 0.0)
    placer.remove_worker("db", 0.0)
    placer.place(prompt("y", 6400), "prefill", 0.0)


def test_a_prompt_is_read_again_where_another_decoder_can_pull_it() -> None:
    placer = Placer(PROFILE, block_size=SIZE)
    for name in "ab":
        placer.add_worker(Worker(f"p{name}", "prefill", transfer_group=name), 0.0)
        placer.add_worker(Worker(f"d{name}", "decode", transfer_group=name), 0.0)
    placer.stored("pa", 0, "device", prompt("r", 64_000).blocks)
    assert placer.place(prompt("r0", 64_000), "prefill", 0.0).worker == "pa"
    again = placer.place(prompt("r1", 64_000, avoid=frozenset({"da"})), "prefill", 0.0, explain=True)
    assert again.worker == "pb"
    assert again.candidates[1].refused == "no decoder of transfer group 'a' may be asked"
    both = frozenset({"da", "db"})
    assert placer.place(prompt("r2", 64_000, avoid=both), "prefill", 0.0).worker == "pa"
    for second in range(3):
        placer.health.failed("da", float(second), "it broke")
    assert placer.place(prompt("r3", 64_000), "prefill", 3.0).worker == "pb"


def test_a_worker_that_failed_a_request_is_asked_again_only_where_no_other_may_be() -> None:
    placer = fleet(4)
    placer.stored(0, 0, "device", prompt("a", 64_000).blocks)
    placer.health.verdict(3, True, 0.0, 60.0)
    tried: list[Any] = []
    for i in range(4):
        request = prompt(f"a{i}", 64_000, avoid=frozenset(tried))
        decision = placer.place(request, "prefill", 0.0, explain=True)
        passed = {c.worker: c.refused for c in decision.candidates if c.refused}
        if i < 3:
            why = dict.fromkeys(tried, "it failed this request before")
            assert passed == {**why, 3: "out for 60.0 s more (verdict from outside)"}
        tried.append(decision.worker)
    assert tried[0] == tried[3] == 0
    assert sorted(tried[:3]) == [0, 1, 2]


def test_a_full_decoder_costs_its_completions() -> None:
    placer = fleet(1, "decode", max_sequences=2)
    waits = []
    for i in range(5):
        waits.append(placer.place(prompt(f"r{i}", 1000, family=i), "decode", 0.0).terms.wait_s)
    assert waits[:2] == [0.0, 0.0]
    assert 0.0 < waits[2] < waits[3] < waits[4] < 100.0


def test_both_turns_to_generation_when_its_prompt_is_read() -> None:
    placer = fleet(1, "both")
    placer.place(prompt("a", 8000), "both", 0.0)
    assert (placer.load(0).prompts, placer.load(0).sequences) == (1, 0)
    assert placer.prefilled("a", 1.0)
    assert not placer.prefilled("a", 1.0)
    assert (placer.load(0).prompts, placer.load(0).sequences) == (0, 1)
    assert placer.load(0).prompt_s == 0.0
    # A sequence beside it is slowed down by the prompt to read.
    assert terms(placer, prompt("b", 8000, family=1), "both", 1.0, 0).others_s > 0.1
    assert placer.finished("a", 2.0)
    assert placer.load(0) == Load(0, 0.0, 0, 0)


def test_a_slow_decoder_is_found_out() -> None:
    placer = fleet(2, "decode")
    placer.place(prompt("a", 1000), "decode", 0.0)
    slow: Any = placer.place(prompt("b", 1000, family=1), "decode", 0.0).worker
    for i in range(1, 60):
        placer.progress("a", 90 * i, float(i))
        placer.progress("b", 45 * i, float(i))
    placer.finished("a", 60.0)
    placer.finished("b", 60.0)
    both = [terms(placer, prompt("c", 1000, family=2), "decode", 60.0, worker).token_s for worker in (slow, 1 - slow)]
    assert both[0] > 1.7 * both[1]


def test_answers_are_expected_to_be_as_long_as_before() -> None:
    placer = fleet(1, "decode")
    placer.place(prompt("a", 1000, session="s"), "decode", 0.0)
    for i in range(1, 11):
        placer.progress("a", 100 * i, float(i))
    placer.finished("a", 10.0)
    assert placer.sessions.expected_output("s") == pytest.approx(1000.0)


def test_a_worker_that_fails_at_once_gets_no_crowd() -> None:
    placer = fleet(3)
    share: Any = [0, 0, 0]
    now = 0.0
    for i in range(300):
        now += 0.4
        worker = placer.place(prompt(f"r{i}", 8000, family=i), "prefill", now).worker
        share[worker] += 1
        if worker == 1:
            placer.failed(f"r{i}", "prefill", now, "it broke")
        else:
            placer.prefilled(f"r{i}", now + 0.8)
        placer.tick(now)
    assert share[1] < 15
    assert placer.load(1) == Load(0, 0.0, 0, 0)


def test_a_worker_that_hangs_is_put_out_and_probed() -> None:
    placer = fleet(3)
    placer.place(prompt("a", 8000), "prefill", 0.0)
    now = 0.0
    while now < 30.0:
        now += 1.0
        placer.tick(now)
    assert placer.health.state(0, now) != "in"
    placer.cancelled("a", now)
    notes = set()
    for i in range(100):
        now += 2.0
        names = [f"{name}{i}" for name in "rst"]
        for name in names:
            decision = placer.place(prompt(name, 8000, family=3 * i + names.index(name) + 1), "prefill", now)
            if decision.worker == 0:
                notes.add(decision.note)
        for name in names:
            placer.prefilled(name, now + 0.9)
    assert "probe" in notes
    assert placer.health.state(0, now) == "in"
    assert placer.health.risk(0, now) == 0.0


def test_the_last_one_is_asked_anyway() -> None:
    placer = fleet(1)
    for i in range(10):
        placer.place(prompt(f"r{i}", 800), "prefill", float(i))
        placer.failed(f"r{i}", "prefill", float(i), "it broke")
    assert placer.place(prompt("x", 800), "prefill", 10.0).worker == 0


def test_removing_a_worker_returns_what_was_booked_there() -> None:
    placer = fleet(2, "both")
    placer.place(prompt("a", 800, session="s"), "both", 0.0)
    placer.place(prompt("b", 800, family=1), "both", 0.0)
    placer.place(prompt("c", 80, family=2), "both", 0.0)
    placer.prefilled("a", 0.1)
    assert placer.remove_worker(0, 0.2) == ["c", "a"]
    assert placer.sessions.bound("s", 0.2) is None
    assert not placer.finished("a", 0.3)
    assert placer.place(prompt("a", 800), "both", 0.3).worker == 1
    with pytest.raises(KeyError, match="0"):
        placer.remove_worker(0, 0.3)
    with pytest.raises(KeyError, match="0"):
        placer.load(0)


def test_what_is_not_there_is_said() -> None:
    placer = fleet(2, "decode")
    with pytest.raises(NoWorkerError, match=r"no worker of role prefill lives.*2 decode"):
        placer.place(prompt("a", 10), "prefill", 0.0)
    with pytest.raises(NoWorkerError, match="none at all"):
        Placer(PROFILE).place(prompt("a", 10), "both", 0.0)


@pytest.mark.parametrize("name", Settings.__struct_fields__)
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_settings_that_make_no_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Settings(**{name: value})


def test_settings_are_read_strictly() -> None:
    assert msgspec.json.decode(b'{"others_weight": 0.5}', type=Settings).others_weight == 0.5
    with pytest.raises(msgspec.ValidationError, match="other"):
        msgspec.json.decode(b'{"other": 0.5}', type=Settings)
    with pytest.raises(ValueError, match="block_size must be at least 1, not 0"):
        Placer(PROFILE, block_size=0)


def test_what_leaves_the_device_meanwhile_may_be_fetched() -> None:
    placer = fleet(1)
    request = prompt("a", 6400)
    placer.stored(0, 0, "device", request.blocks)
    decision = placer.place(request, "prefill", 0.0)
    assert decision.terms.fetch_tokens == {}
    assert decision.fetch_tokens == 6400


def test_blocks_that_the_store_is_said_to_hold_are_fetched_while_that_is_fresh() -> None:
    store = StoreTier(fresh_s=30.0)
    placer = Placer(PROFILE, block_size=SIZE, index=PrefixIndex(SIZE, store))
    placer.add_worker(Worker(0, "prefill"), 0.0)
    request = prompt("a", 64_000)
    found: list[int] = []
    while found := store.to_ask(request.blocks, 0.0, 8):
        store.answered(found, [block < 900 for block in found], 0.0)
    placer.place(prompt("b", 100_000, family=1), "prefill", 0.0)  # to wait for, which is when fetching costs nothing
    assert terms(placer, request, "prefill", 29.0, 0).fetch_tokens == {"store": 900 * SIZE}
    decision = placer.place(request, "prefill", 1.0)
    assert decision.fetch_tokens >= 900 * SIZE
    assert decision.terms.work_s == pytest.approx(PROFILE.prefill_s(100 * SIZE, 900 * SIZE, 8192))
    assert terms(placer, prompt("c", 64_000), "prefill", 31.0, 0).fetch_tokens == {}


def test_what_a_live_index_says_counts_instead_of_what_the_placer_was_told() -> None:
    placer = fleet(3, ranks=2)
    placer.stored(0, 0, "device", prompt("x", 6400).blocks)
    cached = {Seat(1, 1): (50, 20, 0, 10), Seat(2, 0): (0, 0, 0, 0), Seat("gone", 0): (99, 0, 0, 0)}
    decision = placer.place(prompt("a", 6400, cached=cached), "prefill", 0.0, explain=True)
    assert (decision.worker, decision.rank) == (1, 1)
    assert decision.terms.device_tokens == 50 * SIZE
    assert decision.terms.fetch_tokens == {"host": 20 * SIZE}
    found = {(c.worker, c.rank): c.terms.device_tokens for c in decision.candidates if c.terms}
    assert len(found) == 6
    assert sum(found.values()) == 50 * SIZE
    nothing = placer.explain(prompt("b", 6400, 7, cached={}), "prefill", 0.0)
    assert not any(c.terms.device_tokens for c in nothing.candidates if c.terms)
    assert terms(placer, prompt("c", 6400), "prefill", 0.0, 0).device_tokens == 6400 - SIZE


def test_a_prefix_that_is_being_read_counts_whatever_a_live_index_says() -> None:
    placer = fleet(2)
    first = placer.place(prompt("a", 64_000, cached={}), "prefill", 0.0).worker
    second = prompt("b", 64_640, cached={Seat(first, 0): (10, 500, 0, 400)})
    found = terms(placer, second, "prefill", 0.0, first)
    assert found.device_tokens == 64_000 // 16 // SIZE * 16 * SIZE
    assert terms(placer, second, "prefill", 0.0, 1 - int(str(first))).device_tokens == 0


def test_a_session_counts_at_a_decoder_of_which_a_live_index_never_knew_a_block() -> None:
    placer = fleet(2, "decode")
    first = placer.place(prompt("a", 6400, session="s", cached={}), "decode", 0.0).worker
    placer.finished("a", 0.0)
    again = prompt("b", 7000, session="s", cached={})
    assert terms(placer, again, "decode", 0.0, first).device_tokens == 6400
    seat = Seat(first, 0)
    known = dataclasses.replace(again, cached={seat: (90, 0, 0, 0)})
    assert terms(placer, known, "decode", 0.0, first).device_tokens == 90 * SIZE
    assert terms(placer, again, "decode", 0.0, first).device_tokens == 0


@pytest.mark.parametrize("counts", [(1, 2, 3), (1, 0, -2, 0)])
def test_counts_of_a_live_index_that_make_no_sense_are_refused(counts: Any) -> None:
    placer = fleet(1)
    with pytest.raises(ValueError, match=r"cached at Seat\(worker=0, rank=0\) must be four .* not \(1, "):
        placer.place(prompt("a", 800, cached={Seat(0, 0): counts}), "prefill", 0.0)
    assert placer.load(0) == Load(0, 0.0, 0, 0)


def test_an_index_of_other_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size is 64, but the index has blocks of 16 tokens"):
        Placer(PROFILE, block_size=64, index=PrefixIndex(16))


def test_a_worker_that_health_knows_already_is_not_half_added() -> None:
    health = Health()
    health.add(Worker(0, "prefill"))
    placer = Placer(PROFILE, health=health)
    with pytest.raises(ValueError, match="0"):
        placer.add_worker(Worker(0, "prefill"), 0.0)
    with pytest.raises(NoWorkerError):
        placer.place(prompt("a", 10), "prefill", 0.0)


@pytest.mark.parametrize("role", ROLES)
def test_a_prompt_goes_where_it_fits_if_it_fits_anywhere(role: Role) -> None:
    placer = fleet(1, role, capacity_tokens=10_000)
    assert placer.place(prompt("a", 20_000), role, 0.0).worker == 0
    placer.add_worker(Worker(1, role, capacity_tokens=20_000), 0.0)
    for i in range(5):
        assert placer.place(prompt(f"r{i}", 20_000), role, 0.0).worker == 1
    refused = placer.explain(prompt("b", 20_000), role, 0.0).candidates[-1]
    assert (refused.worker, refused.refused) == (0, "a rank holds 10000 tokens, the prompt has 20000")
    assert placer.place(prompt("c", 10_000, family=1), role, 0.0).worker == 0


def test_events_of_the_store_say_nothing_of_a_decoder_s_device() -> None:
    placer = fleet(2, "decode")
    first = placer.place(prompt("a", 6400, session="s"), "decode", 0.0).worker
    placer.finished("a", 0.0)
    placer.stored(first, 0, "store", [5])
    assert terms(placer, prompt("b", 6400, session="s"), "decode", 0.0, first).device_tokens == 6400


def test_a_session_s_kv_is_not_counted_on_where_its_request_failed() -> None:
    placer = fleet(2, "decode")
    first = placer.place(prompt("a", 6400, session="s"), "decode", 0.0).worker
    placer.failed("a", "decode", 0.0, "it broke")
    assert terms(placer, prompt("b", 6400, session="s"), "decode", 0.0, first).device_tokens == 0


@pytest.mark.parametrize("extra", [-30, 50])
def test_more_or_fewer_blocks_than_the_prompt_has_do_no_harm(extra: int) -> None:
    for role in ROLES:
        placer = fleet(1, role)
        blocks = list(range(100 + extra))
        placer.stored(0, 0, "device", blocks[:90])
        placer.stored(0, 0, "host", blocks)
        request = Request("a", 6400, blocks)
        found = placer.place(request, role, 0.0).terms
        assert 0 <= found.device_tokens + sum(found.fetch_tokens.values()) <= 6400
        assert found.device_tokens == min(90, len(blocks)) * SIZE
        assert placer.finished("a", 1.0)
        assert placer.load(0) == Load(0, 0.0, 0, 0)


def test_time_may_jump_and_even_go_back() -> None:
    placer = fleet(3, "both")
    now = 1e6
    for i, step in enumerate([0.0, 1.0, -5e5, 3.0, 1e6, -1.5e6, 1.0, 1e-9, 40.0] * 4):
        now += step
        placer.tick(now)
        decision = placer.place(prompt(f"r{i}", 6400, session=f"s{i % 3}"), "both", now)
        assert 0.0 < decision.terms.cost_s < float("inf")
        if i % 4 == 0:
            placer.failed(f"r{i}", "both", now, "it broke")
            continue
        placer.prefilled(f"r{i}", now + 1.0)
        placer.progress(f"r{i}", 10, now - 1.0)
        placer.progress(f"r{i}", 20, now + 2.0)
        placer.finished(f"r{i}", now + 1.0)
    assert all(placer.load(name) == Load(0, 0.0, 0, 0) for name in range(3))


@pytest.mark.parametrize("role", ROLES)
def test_a_decision_that_is_explained_is_the_same_decision(role: Role) -> None:
    plain, explained = fleet(4, role, ranks=2), fleet(4, role, ranks=2)
    for i in range(40):
        now, request = 0.2 * i, prompt(f"r{i}", 2000 * (i % 5 + 1), i % 7, session=f"s{i % 6}")
        before = explained.explain(request, role, now).candidates if i % 3 == 0 else None
        decision = explained.place(request, role, now, explain=True)
        bare = plain.place(request, role, now)
        assert bare == dataclasses.replace(decision, candidates=())
        assert before in (None, decision.candidates)
        chosen, second = decision.candidates[:2]
        assert (chosen.worker, chosen.rank, chosen.terms) == (decision.worker, decision.rank, decision.terms)
        assert second.terms is not None
        assert decision.runner_up_s == second.terms.cost_s >= decision.terms.cost_s
        if i % 4 == 0:
            assert plain.prefilled(f"r{i}", now) == explained.prefilled(f"r{i}", now)
    assert fleet(1, role).place(prompt("x", 800), role, 0.0).runner_up_s == math.inf


# Sick workers


def test_explain_says_why_a_worker_is_not_asked() -> None:
    placer = fleet(3)
    for i in range(3):
        placer.health.failed(1, float(i), "it broke")
    placer.health.verdict(2, True, 2.0, 60.0)
    passed = placer.explain(prompt("a", 100), "prefill", 2.5).candidates[-1]
    assert passed.refused == placer.health.why(passed.worker, 2.5)
    assert passed.refused == "out for 4.5 s more (3 failures in a row: it broke)"


def test_what_others_tell_health_counts() -> None:
    placer = fleet(6)
    placer.health.failed(0, 0.0, "seen elsewhere")
    placer.health.verdict(1, True, 0.0, 60.0)
    found = {c.worker: c for c in placer.explain(prompt("a", 8000), "prefill", 0.0).candidates}
    assert found[0].terms is not None
    assert found[0].terms.risk_s > 0.5
    assert found[1].refused == "out for 60.0 s more (verdict from outside)"


def test_a_newcomer_starts_slowly_but_starts() -> None:
    placer = Placer(PROFILE, block_size=SIZE)
    placer.add_worker(Worker(0, "prefill"), 0.0)
    for i in range(40):
        placer.place(prompt(f"r{i}", 8000, family=i), "prefill", float(i))
        placer.prefilled(f"r{i}", i + PROFILE.prefill_s(8000, 0, 8192))
    placer.add_worker(Worker(1, "prefill"), 40.0)
    risks = [terms(placer, prompt("a", 8000), "prefill", now, 1).risk_s for now in (40.0, 60.0, 200.0)]
    assert risks[0] > risks[1] > risks[2] == 0.0
    placer.place(prompt("b", 8000), "prefill", 40.0)
    assert placer.place(prompt("c", 8000, family=99), "prefill", 40.0).worker == 1


def test_the_first_token_ends_a_decoder_s_probe() -> None:
    placer = fleet(2, "decode")
    for i in range(3):
        placer.health.failed(0, float(i), "it broke")
    decision = placer.place(prompt("a", 1000), "decode", 8.0)
    while decision.worker != 0:
        decision = placer.place(prompt(f"b{decision.worker}{placer.load(1).sequences}", 1000), "decode", 8.0)
    assert decision.note == "probe"
    assert placer.health.state(0, 8.5) == "probing"
    placer.progress(decision.request, 1, 9.0)
    assert placer.health.state(0, 9.0) == "in"


def test_a_probe_may_last_as_long_as_a_long_prompt_does() -> None:
    placer = fleet(1)
    placer.add_worker(Worker(1, "prefill"), 0.0)
    for i in range(3):
        placer.health.failed(1, float(i), "it broke")
    placer.place(prompt("a", 200_000), "prefill", 8.0)
    decision = placer.place(prompt("b", 200_000, family=1), "prefill", 8.0)
    assert (decision.worker, decision.note) == (1, "probe")
    for second in range(9, 60):
        placer.tick(float(second))
    assert placer.health.state(1, 60.0) == "probing"
    placer.prefilled("b", 60.0)
    assert placer.health.state(1, 60.0) == "in"


def test_a_lost_booking_puts_its_worker_out_once() -> None:
    placer = fleet(3)
    lost = placer.place(prompt("lost", 800), "prefill", 0.0).worker
    states = []
    for second in range(1, 400):
        placer.tick(float(second))
        states.append(placer.health.state(lost, float(second)))
    assert states.count("out") == 5


def test_what_is_booked_at_a_worker_that_stands_still_is_named_the_oldest_first() -> None:
    placer = Placer(PROFILE, block_size=SIZE)
    for worker in range(2):
        placer.add_worker(Worker(worker, "both", ranks=2), 0.0)
    on: dict[Any, list[tuple[str, Role]]] = {0: [], 1: []}
    for i in range(8):
        request = prompt(f"r{i}", 800, i, avoid=frozenset({1 - i % 2}))
        on[placer.place(request, "both", 0.1 * i).worker].append((request.id, "both"))
    assert len(on[0]) == len(on[1]) == 4
    for name, _ in on[1]:
        placer.prefilled(name, 1.0)
    placer.prefilled(on[0][1][0], 1.0)
    found = {}
    for second in range(1, 40):
        for name, _ in on[1]:
            placer.progress(name, 10 * second, float(second))
        placer.progress(on[0][1][0], 10, 1.0 + 0.1 * min(second, 3))
        if stalled := placer.tick(float(second)):
            found[second] = stalled
            assert placer.health.state(0, float(second)) == "out"
            break
    assert list(found.values()) == [on[0]]
    for name, _ in on[0]:
        assert placer.failed(name, "both", 40.0, "stalled")
    assert placer.load(0) == Load(0, 0.0, 0, 0)
    assert not any(placer.tick(float(second)) for second in range(40, 43))


def test_who_does_not_tick_sees_no_stalls() -> None:
    placer = fleet(3)
    placer.place(prompt("a", 800), "prefill", 0.0)
    placer.tick(1.0)
    placer.tick(500.0)
    assert placer.health.state(0, 500.0) == "in"
    for second in range(501, 530):
        placer.tick(float(second))
    assert placer.health.state(0, 530.0) != "in"


def test_impatient_settings_find_a_stall_with_the_next_ticks() -> None:
    placer = Placer(PROFILE, health=Health(HealthSettings(stall_min_s=0.0, stall_factor=1.0)))
    for name in range(3):
        placer.add_worker(Worker(name, "prefill"), 0.0)
    worker = placer.place(prompt("a", 800), "prefill", 0.0).worker
    for second in range(4):
        placer.tick(float(second))
    assert placer.health.state(worker, 3.0) == "out"


@pytest.mark.parametrize("role", ["decode", "both"])
def test_a_worker_whose_answers_are_not_reported_does_not_stall(role: Role) -> None:
    placer = fleet(2, role)
    placer.place(prompt("a", 800), role, 0.0)
    placer.prefilled("a", 0.1)
    for second in range(1, 600):
        placer.tick(float(second))
    assert [placer.health.state(name, 600.0) for name in range(2)] == ["in", "in"]


def test_a_decoder_that_falls_silent_has_stalled_and_one_that_reports_seldom_has_not() -> None:
    for every in (1.0, 20.0):
        placer = fleet(3, "decode")
        names = {placer.place(prompt(name, 800), "decode", 0.0).worker: name for name in "abc"}
        silent = 0
        for second in range(1, 400):
            for worker, name in names.items():
                if second % every == 0 and (worker != silent or second <= 100):
                    placer.progress(name, second * 10, float(second))
            placer.tick(float(second))
            if second == 105:
                assert placer.health.state(silent, 105.0) == "in"
        assert [placer.health.state(worker, 400.0) == "in" for worker in range(3)] == [False, True, True]


def test_a_decoder_that_waits_for_a_prompt_that_is_being_read_does_not_stall() -> None:
    """Where decoders fetch from the reader itself, both are asked at once; the decoder owes something from then on."""
    placer = Placer(PROFILE, block_size=SIZE, health=Health(HealthSettings(stall_factor=100.0)))
    placer.add_worker(Worker("p", "prefill"), 0.0)
    for name in ("d", "e"):
        placer.add_worker(Worker(name, "decode"), 0.0)
    placer.place(prompt("a", 800), "decode", 0.0)
    for second in range(1, 4):  # what is known of a pool of decoders whose answers are reported
        placer.progress("a", second, float(second))
    placer.finished("a", 4.0)
    placer.place(prompt("b", 120_000), "prefill", 5.0)
    decoder = placer.place(prompt("b", 120_000, prefill_worker="p"), "decode", 5.0).worker
    for second in range(6, 600):
        placer.tick(float(second))
    assert placer.health.state(decoder, 600.0) == "in"
    placer.prefilled("b", 600.0)
    for second in range(600, 3000):
        placer.tick(float(second))
    assert placer.health.state(decoder, 3000.0) != "in"


def test_a_prefill_worker_whose_prompts_nobody_pulls_does_not_stall() -> None:
    placer = Placer(PROFILE, block_size=SIZE)
    for name in ("p", "q"):
        placer.add_worker(Worker(name, "prefill", capacity_tokens=30_000), 0.0)
    placer.add_worker(Worker("d", "decode"), 0.0)
    for i in range(8):
        source = placer.place(prompt(f"r{i}", 7000, family=i), "prefill", 1.0).worker
        placer.prefilled(f"r{i}", 2.0)
        placer.place(prompt(f"r{i}", 7000, family=i, prefill_worker=source), "decode", 2.0)
    waiting = placer.place(prompt("x", 7000, family=100), "prefill", 2.0).worker
    for second in range(3, 100):
        placer.tick(float(second))
    assert placer.health.state(waiting, 100.0) == "in"
    for i in range(8):
        placer.progress(f"r{i}", 1, 100.0)
    for second in range(100, 200):
        placer.tick(float(second))
    assert placer.health.state(waiting, 200.0) != "in"


def warm(placer: Placer, names: str = "abcdefgh") -> None:
    """Some requests through worker `p` and a decoder, so that it is known how often decoders report."""
    for i, name in enumerate(names):
        placer.place(prompt(name, 800, family=i), "prefill", float(i))
        placer.prefilled(name, i + 0.1)
        placer.place(prompt(name, 800, family=i, prefill_worker="p"), "decode", i + 0.1)
        placer.progress(name, 1, i + 0.2)
        placer.progress(name, 10, i + 0.7)
        placer.finished(name, i + 0.8)


def test_a_decoder_s_probe_lasts_until_its_prompt_can_have_been_read() -> None:
    placer = Placer(PROFILE, block_size=SIZE)
    for name, role in (("p", "prefill"), ("d", "decode"), ("e", "decode")):
        placer.add_worker(Worker(name, role), 0.0)  # type: ignore[arg-type]
    warm(placer)
    for _ in range(3):
        placer.health.failed("d", 8.0)
    long = prompt("long", 400_000, family=50, avoid=frozenset({"e"}))
    expected = placer.place(long, "prefill", 14.0).terms.first_token_s
    assert expected > 40.0
    assert placer.place(dataclasses.replace(long, prefill_worker="p"), "decode", 14.0).note == "probe"
    placer.prefilled("long", 14.0 + expected)
    placer.progress("long", 1, 15.0 + expected)
    assert placer.health.state("d", 15.0 + expected) == "in"


def test_a_decoder_that_reads_its_prompts_itself_has_the_time_to() -> None:
    placer = Placer(PROFILE, block_size=SIZE)
    placer.add_worker(Worker("p", "prefill"), 0.0)
    placer.add_worker(Worker("d", "decode"), 0.0)
    warm(placer)
    placer.remove_worker("p", 10.0)
    placer.place(prompt("long", 300_000, family=50), "decode", 10.0)
    for second in range(11, 11 + int(PROFILE.prefill_s(300_000, 0, 8192))):
        assert not placer.tick(float(second))
    assert any(placer.tick(float(second)) for second in range(100, 2000))


def test_a_prefill_worker_whose_prompts_wait_at_decoders_unread_may_stall() -> None:
    placer = Placer(PROFILE, block_size=SIZE)
    placer.add_worker(Worker("p", "prefill", capacity_tokens=30_000), 0.0)
    placer.add_worker(Worker("d", "decode"), 0.0)
    for i in range(8):
        placer.place(prompt(f"r{i}", 7000, family=i), "prefill", 1.0)
        placer.place(prompt(f"r{i}", 7000, family=i, prefill_worker="p"), "decode", 1.0)
    assert any(placer.tick(float(second)) for second in range(2, 100))


def test_giving_up_at_a_silent_worker_does_not_wake_it() -> None:
    placer = fleet(1)
    for i in range(8):
        placer.place(prompt(f"w{i}", 800, family=i), "prefill", float(i))
        placer.prefilled(f"w{i}", i + 0.1)
    for i in range(30):
        placer.place(prompt(f"r{i}", 800, family=100 + i), "prefill", 10.0)
    # Clients that wait for four seconds and go, one after the other.
    found = []
    for second in range(11, 40):
        if second % 4 == 0:
            assert placer.cancelled(f"r{second // 4 - 3}", float(second))
        if placer.tick(float(second)):
            found.append(second)
    assert found
    assert found[0] < 25


def test_a_decoder_is_of_the_transfer_group_of_a_prefill_worker_that_has_left() -> None:
    placer = Placer(PROFILE, block_size=SIZE)
    for group in ("old", "new"):
        placer.add_worker(Worker(f"p-{group}", "prefill", transfer_group=group), 0.0)
        placer.add_worker(Worker(f"d-{group}", "decode", transfer_group=group), 0.0)
    for i in range(4):
        reader = placer.place(prompt(f"r{i}", 800, family=i, avoid=frozenset({"p-new"})), "prefill", 0.0)
        assert reader.worker == "p-old"
        placer.prefilled(f"r{i}", 0.1)
    assert placer.remove_worker("p-old", 0.2) == []
    for i in range(4):
        request = prompt(f"r{i}", 800, family=i, prefill_worker="p-old")
        assert placer.place(request, "decode", 0.3).worker == "d-old"
    placer.remove_worker("d-old", 0.4)
    with pytest.raises(NoWorkerError, match="of transfer group 'old', as its prefill worker 'p-old' is"):
        placer.place(prompt("late", 800, prefill_worker="p-old"), "decode", 0.5)


# Ranks in lockstep


def test_what_was_true_of_a_group_at_the_last_question_is_not_taken_for_true_now() -> None:
    placer = Placer(PROFILE, block_size=SIZE)
    placer.add_worker(Worker(0, "prefill", ranks=2), 0.0)
    placer.place(prompt("a", 80_000), "prefill", 0.0)
    assert terms(placer, prompt("b", 800, family=1), "prefill", 0.0, 0, 1).work_s > 0.5
    placer.prefilled("a", 9.0)
    found = terms(placer, prompt("b", 800, family=1), "prefill", 9.0, 0, 1)
    assert (found.wait_s, found.work_s) == (0.0, placer.estimator.prefill_s(0, 800, 0, 8192))


@pytest.mark.parametrize("tokens", [500, 6000, 30_000])
def test_prompts_at_once_are_shared_evenly_among_ranks(tokens: int) -> None:
    placer = Placer(PROFILE, block_size=SIZE)
    placer.add_worker(Worker(0, "prefill", ranks=8), 0.0)
    on = [0] * 8
    for i in range(64):
        decision = placer.place(prompt(f"r{i}", tokens, family=i), "prefill", 0.0)
        on[decision.rank] += 1
        # No rank has to do more than its share, and a prompt at the group's head is no longer than alone.
        assert decision.terms.first_token_s < 1.51 * PROFILE.prefill_s(tokens, 0, 8192) * (i // 8 + 1)
    assert max(on) - min(on) <= 2


def test_a_request_is_cancelled_in_one_role_or_in_all() -> None:
    placer = Placer(PROFILE, block_size=SIZE)
    fleet = [Worker("p", "prefill"), Worker("d", "decode")]
    for worker in fleet:
        placer.add_worker(worker, 0.0)
    assert placer.workers() == fleet
    for name in "ab":
        placer.place(prompt(name, 800), "prefill", 0.0)
        placer.place(prompt(name, 800, prefill_worker="p"), "decode", 0.0)
    assert not placer.cancelled("a", 0.1, "both")
    assert placer.cancelled("a", 0.1, "decode")
    assert not placer.cancelled("a", 0.1, "decode")
    assert (placer.load("p").prompts, placer.load("d").sequences) == (2, 1)
    assert placer.cancelled("a", 0.2)
    assert placer.cancelled("b", 0.2)
    assert [placer.load(worker.id) for worker in fleet] == [Load(0, 0.0, 0, 0)] * 2
    placer.remove_worker("p", 0.3)
    assert placer.workers() == fleet[1:]


def test_what_cannot_be_asked_is_named() -> None:
    placer = fleet(1)
    role: Any = "writer"
    for ask in (placer.place, placer.explain):
        with pytest.raises(ValueError, match="role must be one of prefill, decode, both, not 'writer'"):
            ask(prompt("a", 800), role, 0.0)
        with pytest.raises(ValueError, match="now must be a finite number of seconds, not nan"):
            ask(prompt("a", 800), "prefill", math.nan)
    with pytest.raises(ValueError, match="not 'writer'"):
        placer.failed("a", role, 0.0, "it broke")
    with pytest.raises(ValueError, match="not 'writer'"):
        placer.cancelled("a", 0.0, role)
    assert placer.load(0).prompts == 0
    for tokens in (0, 1.5, "7"):
        with pytest.raises(ValueError, match=f"tokens must be a whole number of at least 1, not {tokens!r}"):
            Request("a", tokens=tokens)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="output_tokens must be a whole number of at least 1, not 0"):
        Request("a", tokens=1, output_tokens=0)
