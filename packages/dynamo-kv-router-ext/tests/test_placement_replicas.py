# SPDX-License-Identifier: Apache-2.0
"""Several placers for one fleet: each books what another one has placed, and they decide as one alone would."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import pytest

from dynamo_kv_router_ext import (
    Booked,
    Health,
    HealthSettings,
    Load,
    Placer,
    Request,
    Role,
    Seat,
    Worker,
    WorkerId,
    load_profile,
)

SIZE = 64
PROFILE = load_profile("gb200-qwen3-32b-tp1")
NOTHING = Load(0, 0.0, 0, 0)


def replicas(count: int, *workers: Worker) -> list[Placer]:
    """So many placers of the same fleet."""
    found = []
    for _ in range(count):
        placer = Placer(PROFILE, block_size=SIZE, health=Health(HealthSettings(prior_failures=0.0)))
        for worker in workers:
            placer.add_worker(worker, 0.0)
        found.append(placer)
    return found


def prompt(name: str, tokens: int, family: int = 0, **fields: Any) -> Request:
    """A prompt whose blocks are the family's first."""
    return Request(name, tokens, [family * 100_000 + i for i in range(tokens // SIZE)], **fields)


def told(placer: Placer, name: str, role: Role) -> Booked:
    """What another replica hears of a booking."""
    found = placer.booking(name, role)
    assert found is not None
    return msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Booked)


@pytest.mark.parametrize("ranks", [1, 4])
def test_replicas_that_tell_each_other_everything_decide_as_one_alone(ranks: int) -> None:
    fleet = [Worker(f"p{i}", "prefill", ranks) for i in range(3)] + [Worker(f"d{i}", "decode") for i in range(3)]
    *placers, alone = replicas(3, *fleet)
    everyone = (*placers, alone)
    happens: list[tuple[float, int, str]] = [(0.4 * i, i, "prefill") for i in range(60)]
    readers: dict[str, WorkerId] = {}
    while happens:
        now, i, what = happens.pop(0)
        name, mine, other = f"r{i}", placers[i % 2], placers[1 - i % 2]
        request = prompt(name, 3000 + 7000 * (i % 4), i % 9, session=f"s{i % 7}")
        if what in ("prefill", "decode"):
            role: Role = "prefill" if what == "prefill" else "decode"
            if what == "decode":
                assert all(placer.prefilled(name, now) for placer in everyone)
                request = dataclasses.replace(request, prefill_worker=readers[name])
            expected = alone.place(request, role, now, explain=True)
            decision = mine.place(request, role, now, explain=True)
            assert decision == expected
            assert other.adopt(told(mine, name, role), now)
            readers.setdefault(name, decision.worker)
            happens.append((now + decision.terms.first_token_s * 1.1, i, "decode" if role == "prefill" else "token"))
        elif what == "token":
            assert all(placer.progress(name, 1, now) for placer in everyone)
            happens.append((now + 3.0, i, "end"))
        else:
            assert all(placer.progress(name, 200, now) and placer.finished(name, now) for placer in everyone)
        assert all(placer.load(worker.id) == alone.load(worker.id) for placer in placers for worker in fleet)
        happens.sort()
    assert all(placer.load(worker.id) == NOTHING for placer in everyone for worker in fleet)


def test_one_that_comes_late_is_told_what_is_booked_and_goes_on_with_it() -> None:
    fleet = [Worker("p", "prefill"), Worker("d", "decode"), Worker("b", "both")]
    old, new = replicas(2, *fleet)
    for name, role in (("a", "prefill"), ("b", "prefill"), ("c", "decode"), ("d", "both"), ("e", "both")):
        old.place(prompt(name, 20_000, ord(name), session=name, prefill_worker="p"), role, 0.0)  # type: ignore[arg-type]
    old.place(prompt("a", 20_000, ord("a"), prefill_worker="p"), "decode", 0.0)
    old.prefilled("d", 1.0)
    old.progress("d", 900, 8.0)
    assert list(old.requests()) == ["a", "b", "c", "d", "e"]
    for name in old.requests():
        for role in ("prefill", "decode", "both"):
            if old.booking(name, role) is not None:  # type: ignore[arg-type]
                assert new.adopt(told(old, name, role), 10.0, arrived=False)  # type: ignore[arg-type]
    assert sorted(new.requests()) == ["a", "b", "c", "d", "e"]
    assert new.sessions.bound("c", 10.0) == Seat("d", 0)
    assert [new.load(worker.id) for worker in fleet] == [old.load(worker.id) for worker in fleet]
    for placer in (old, new):
        assert placer.prefilled("a", 11.0)
        assert placer.progress("a", 3, 12.0)
        assert placer.progress("d", 2000, 12.0)
        assert placer.prefilled("e", 12.0)
    assert [new.load(worker.id) for worker in fleet] == [old.load(worker.id) for worker in fleet]
    for name in new.requests():
        assert new.cancelled(name, 13.0)
    assert [new.load(worker.id) for worker in fleet] == [NOTHING] * 3
    assert new.booking("a", "prefill") is None


def test_what_is_learnt_of_late_is_no_arrival_and_moves_no_session() -> None:
    old, new, fresh = replicas(3, Worker(0, "decode"), Worker(1, "decode"))
    for i in range(200):
        old.place(Request(f"r{i}", 9000, session="s"), "decode", 0.0)
    late = told(old, "r0", "decode")
    new.sessions.bind("s", Seat(1 - int(late.worker), 0), 7000, 0.0)
    for name in old.requests():
        assert new.adopt(told(old, name, "decode"), 0.0, arrived=False)
        assert fresh.adopt(told(old, name, "decode"), 0.0)
    assert (new.sessions.bound("s", 0.0), new.sessions.resident("s", 0.0)) == (Seat(1 - int(late.worker), 0), 7000)
    assert fresh.sessions.bound("s", 0.0) == old.sessions.bound("s", 0.0)
    rates = [placer._pools["decode"].fresh.rates(0.0)[0] for placer in (old, new, fresh)]
    assert rates[0] == rates[2] > rates[1] == 0.0


def test_what_is_booked_elsewhere_is_moved_and_what_is_booked_there_stays() -> None:
    mine, other = replicas(2, Worker(0, "both"), Worker(1, "both"), Worker(2, "both"))
    here = mine.place(prompt("a", 9000, session="s"), "both", 0.0).worker
    there = other.place(prompt("a", 9000, session="s", avoid=frozenset({here})), "both", 0.0).worker
    assert there != here
    assert other.adopt(told(mine, "a", "both"), 0.1)
    assert not other.adopt(told(mine, "a", "both"), 0.1)
    assert other.load(there) == NOTHING
    assert other.load(here) == mine.load(here)
    assert other.sessions.bound("s", 0.1) == Seat(here, 0)
    assert list(other.requests()) == ["a"]
    assert other.finished("a", 1.0)
    assert other.load(here) == NOTHING


@pytest.mark.parametrize("change", [{"worker": "x"}, {"rank": 1}, {"rank": -1}])
def test_a_booking_at_a_worker_that_is_not_there_is_ignored(change: dict[str, Any]) -> None:
    mine, other = replicas(2, Worker("p", "prefill"))
    mine.place(prompt("a", 9000), "prefill", 0.0)
    assert not other.adopt(msgspec.structs.replace(told(mine, "a", "prefill"), **change), 0.0)
    assert other.load("p") == NOTHING
    assert not list(other.requests())


def test_a_half_open_worker_gets_one_probe_from_all_replicas_together() -> None:
    placers = replicas(2, Worker(0, "prefill"), Worker(1, "prefill"))
    for placer in placers:
        for second in range(3):
            placer.health.failed(0, float(second), "it broke")
    one, other = placers
    first = one.place(prompt("a", 9000, avoid=frozenset({1})), "prefill", 9.0)
    assert (first.worker, first.note) == (0, "probe")
    assert other.adopt(told(one, "a", "prefill"), 9.0)
    assert other.place(prompt("b", 9000, avoid=frozenset({1})), "prefill", 9.0).worker == 1
    # It was placed elsewhere after all: the worker may be probed again.
    assert other.adopt(msgspec.structs.replace(told(one, "a", "prefill"), worker=1), 9.0)
    assert other.place(prompt("c", 9000, avoid=frozenset({1})), "prefill", 9.0).note == "probe"


def test_what_was_begun_before_it_is_learnt_of_is_not_measured() -> None:
    old, new = replicas(2, Worker("p", "prefill"))
    first = old.place(prompt("a", 100_000), "prefill", 0.0).terms.first_token_s
    old.place(prompt("b", 100_000, 1), "prefill", 0.0)
    for name in old.requests():
        assert new.adopt(told(old, name, "prefill"), first - 0.1, arrived=False)
    before = new.estimator.coefficients("p")
    assert new.prefilled("a", first)
    assert new.estimator.coefficients("p") == before
    assert new.prefilled("b", 3.0 * first)
    assert new.estimator.coefficients("p")["step_factor"] > before["step_factor"]


def test_a_stall_that_another_replica_finds_first_is_found_here_as_soon() -> None:
    one, other = replicas(2, Worker(0, "prefill"), Worker(1, "prefill"))
    for i in range(20):
        for placer in (one, other):
            placer.place(prompt(f"w{i}", 2000, i, avoid=frozenset({i % 2})), "prefill", float(i))
            placer.prefilled(f"w{i}", i + 0.3)
    one.place(prompt("a", 2000, 50, avoid=frozenset({1})), "prefill", 30.0)
    assert other.adopt(told(one, "a", "prefill"), 30.0)
    other.place(prompt("b", 2000, 51, avoid=frozenset({1})), "prefill", 30.1)
    assert one.adopt(told(other, "b", "prefill"), 30.1)
    found: dict[str, float] = {}
    for i in range(1, 40):
        at = 30.0 + 0.5 * i
        if ("a", "prefill") in one.tick(at):
            found["a"] = at
            # The replica that carries it gives it up, and says so before the other one has looked.
            for placer in (one, other):
                assert placer.failed("a", "prefill", at, "worker 0 stands still")
        if ("b", "prefill") in other.tick(at + 0.25):
            found["b"] = at + 0.25
            break
    assert found["b"] - found["a"] < 1.5
    assert other.health.state(0, found["b"]) == "out"


def test_a_prefix_that_another_replica_has_read_counts_already() -> None:
    one, other = replicas(2, Worker(0, "prefill"), Worker(1, "prefill"))
    first = one.place(prompt("a", 64_000), "prefill", 0.0)
    assert other.adopt(told(one, "a", "prefill"), 0.0)
    found = {c.worker: c.terms for c in other.explain(prompt("b", 64_640), "prefill", 0.0).candidates}
    tokens = {worker: terms.device_tokens for worker, terms in found.items() if terms is not None}
    assert tokens == {first.worker: 64_000 // (16 * SIZE) * 16 * SIZE, 1 - int(str(first.worker)): 0}


def test_a_booking_of_a_later_version_is_read_and_one_that_makes_no_sense_is_refused_by_name() -> None:
    placer = replicas(1, Worker("p", "prefill"))[0]
    placer.place(prompt("a", 9000), "prefill", 0.0)
    raw: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(told(placer, "a", "prefill")))
    assert msgspec.convert([*raw, "more"], Booked) == placer.booking("a", "prefill")
    for field, value in (("role", "writer"), ("tokens", 0), ("new", -1), ("service_s", math.inf), ("worker", [1])):
        place = Booked.__struct_fields__.index(field)
        with pytest.raises(msgspec.ValidationError, match=rf"\$\[{place}\]"):
            msgspec.convert([*raw[:place], value, *raw[place + 1 :]], Booked)
    with pytest.raises(ValueError, match="not 'writer'"):
        placer.booking("a", "writer")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="now must be a finite number of seconds, not nan"):
        placer.adopt(told(placer, "a", "prefill"), math.nan)
