# SPDX-License-Identifier: Apache-2.0
"""Placement, one lever at a time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynamo_kv_router_ext._health import Health, HealthSettings
from dynamo_kv_router_ext._placement import Load, Placer, Settings
from dynamo_kv_router_ext._profile import DecodeCost, Profile, StepCost, TierCost
from dynamo_kv_router_ext._types import NoWorkerError, Request, Role, Worker

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
    for i in range(200):
        now += 1.0
        decision = placer.place(prompt(f"r{i}", 8000, family=i + 1), "prefill", now)
        if decision.worker == 0:
            notes.add(decision.note)
        placer.prefilled(f"r{i}", now + 0.9)
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
