# SPDX-License-Identifier: Apache-2.0
"""A state machine over two placers: bookings, sessions and workers come and go in any order, and both know of all."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dynamo_kv_router_ext._placement import Load, Placer
from dynamo_kv_router_ext._profile import DecodeCost, Profile, StepCost, TierCost
from dynamo_kv_router_ext._types import (
    EXTERNAL_TIERS,
    ROLES,
    Booked,
    Decision,
    NoWorkerError,
    Request,
    Role,
    Seat,
    Worker,
)

PROFILE = Profile(
    name="test",
    source="made up",
    prefill=StepCost(base_s=0.01, token_s=1e-5, pair_s=1e-10),
    decode=DecodeCost(base_s=0.01, sequence_s=1e-4, token_s=1e-8),
    transfer=TierCost(latency_s=0.001, token_s=1e-6),
    tiers={tier: TierCost(latency_s=0.001, token_s=2e-6 * (k + 1)) for k, tier in enumerate(EXTERNAL_TIERS)},
)
SIZE = 16
ROLE = st.sampled_from(ROLES)
TIERS = st.sampled_from(["device", "host", "disk", "store"])
#: Prefixes of four families of prompts.
BLOCKS = st.tuples(st.integers(0, 3), st.integers(0, 120)).map(lambda t: [1000 * t[0] + i for i in range(t[1])])
NOTHING = Load(0, 0.0, 0, 0)


def sent(booked: Booked | None) -> Booked:
    """What arrives of a booking."""
    assert booked is not None
    return msgspec.msgpack.decode(msgspec.msgpack.encode(booked), type=Booked)


class Machine(RuleBasedStateMachine):
    """Two placers, which tell each other what they book, beside a model of who is booked where."""

    @initialize()
    def start(self) -> None:
        self.placer = Placer(PROFILE, block_size=SIZE)
        self.peer = Placer(PROFILE, block_size=SIZE)
        self.now = 0.0
        self.workers: dict[int, Worker] = {}
        self.booked: dict[tuple[str, Role], int] = {}
        self.bound: dict[str, Any] = {}
        #: What the peer had booked at the right place by its own estimate, which may be another one.
        self.own: set[tuple[str, Role]] = set()
        self.count = 0

    @rule(seconds=st.floats(0.001, 40.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        stalled = self.placer.tick(self.now)
        names = {self.booked[key] for key in stalled}
        assert sorted(stalled) == sorted(key for key, worker in self.booked.items() if worker in names)
        placed = list(self.booked)
        assert [placed.index(key) for key in stalled] == sorted(placed.index(key) for key in stalled)
        assert set(self.peer.tick(self.now)) <= set(self.booked)

    @rule(
        role=ROLE,
        ranks=st.sampled_from([1, 1, 3]),
        capacity=st.sampled_from([3000, 1_000_000]),
        sequences=st.sampled_from([2, 256]),
        group=st.sampled_from([None, None, "a"]),
    )
    def add(self, role: Role, ranks: int, capacity: int, sequences: int, group: str | None) -> None:
        self.count += 1
        worker = Worker(self.count, role, ranks, capacity, sequences, 512, group)
        self.workers[self.count] = worker
        self.placer.add_worker(worker, self.now)
        self.peer.add_worker(worker, self.now)
        with pytest.raises(ValueError, match=str(self.count)):
            self.placer.add_worker(worker, self.now)

    @precondition(lambda self: len(self.workers) > 1)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.workers)))
        lost = self.placer.remove_worker(name, self.now)
        assert sorted(lost) == sorted(request for (request, _), worker in self.booked.items() if worker == name)
        assert sorted(self.peer.remove_worker(name, self.now)) == sorted(lost)
        self.booked = {key: worker for key, worker in self.booked.items() if worker != name}
        self.bound = {session: seat for session, seat in self.bound.items() if seat.worker != name}
        del self.workers[name]

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), tier=TIERS, blocks=BLOCKS, gone=st.booleans())
    def event(self, data: st.DataObject, tier: Any, blocks: list[int], gone: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.workers)))
        rank = data.draw(st.integers(0, self.workers[name].ranks - 1))
        (self.placer.removed if gone else self.placer.stored)(name, rank, tier, blocks)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        self.placer.cleared(data.draw(st.sampled_from(sorted(self.workers))), 0)

    @rule(
        data=st.data(),
        role=ROLE,
        blocks=BLOCKS,
        more=st.integers(1, 5000),
        session=st.sampled_from([None, "x", "y", "z"]),
        output=st.sampled_from([None, 1, 500]),
        avoid=st.frozensets(st.integers(1, 12), max_size=3),
        live=st.booleans(),
        elsewhere=st.booleans(),
    )
    def place(
        self,
        data: st.DataObject,
        role: Role,
        blocks: list[int],
        more: int,
        session: str | None,
        output: int | None,
        avoid: frozenset[int],
        live: bool,
        elsewhere: bool,
    ) -> None:
        names = [request for request, booked in self.booked if booked == "prefill"]
        name = data.draw(st.sampled_from(names)) if role == "decode" and names else f"r{self.count}"
        self.count += 1
        if (name, role) in self.booked:
            return
        source = self.booked.get((name, "prefill")) if role == "decode" else None
        request = Request(name, len(blocks) * SIZE + more, blocks, session, output, source, avoid=frozenset(avoid))
        living = [w for w in self.workers.values() if w.role == role]
        if source is not None:
            living = [w for w in living if w.transfer_group == self.workers[source].transfer_group]
        groups = {w.transfer_group for w in self.workers.values() if w.role == "decode"}
        if role == "prefill" and groups:
            living = [w for w in living if w.transfer_group in groups]
        if not living:
            with pytest.raises(NoWorkerError, match=name):
                self.placer.place(request, role, self.now)
            with pytest.raises(NoWorkerError, match=name):
                self.placer.explain(request, role, self.now)
            return
        states = {w.id: self.placer.health.state(w.id, self.now) for w in self.workers.values() if w.role == role}
        explanation = self.placer.explain(request, role, self.now)
        if elsewhere:  # the peer decides first, on its own
            self.peer.place(dataclasses.replace(request, avoid=frozenset()), role, self.now)
        asked = self.placer._asked
        decision = self.placer.place(self.told(request) if live else request, role, self.now, explain=True)
        assert self.placer._asked == asked + 1
        assert decision.candidates == explanation.candidates
        self.tell(decision)
        first = explanation.candidates[0]
        assert first.refused is None
        assert (first.worker, first.rank, first.terms) == (decision.worker, decision.rank, decision.terms)
        costs = [c.terms.cost_s for c in explanation.candidates if c.terms is not None]
        assert costs == sorted(costs)
        assert decision.runner_up_s == (costs[1] if len(costs) > 1 else float("inf"))
        if decision.worker in avoid:
            assert all(c.worker in avoid or c.refused for c in explanation.candidates)
        assert all(cost == cost and 0.0 < cost < float("inf") for cost in costs)
        assert all((c.terms is None) == bool(c.refused) for c in explanation.candidates)
        assert len(explanation.candidates) == sum(w.ranks for w in self.workers.values() if w.role == role)
        assert decision.worker in {w.id for w in living}
        fetched = sum(decision.terms.fetch_tokens.values())
        assert fetched <= decision.fetch_tokens <= request.tokens
        assert 0 <= decision.terms.device_tokens + fetched <= request.tokens
        # At most a third, but one at least, is out.
        out = sum(state == "out" for state in states.values())
        assert out <= max(1, len(states) // 3)
        if states[decision.worker] == "out":
            assert decision.note == "last"
        self.booked[name, role] = decision.worker  # type: ignore[assignment]
        if session is not None and role != "prefill":
            self.bound[session] = Seat(decision.worker, decision.rank)
        with pytest.raises(ValueError, match=name):
            self.placer.place(request, role, self.now)

    def told(self, request: Request) -> Request:
        """The request with what the placer knows of its blocks, as another index might say it."""
        found = self.placer.index.match(request.blocks, self.now)
        rows = zip(found.seats, found.device, found.host, found.disk, found.store, strict=True)
        cached = {row[0]: row[1:] for row in rows if any(row[1:])}
        return dataclasses.replace(request, cached=cached)

    def tell(self, decision: Decision) -> None:
        """The other placer books it too, once, and where it is booked there already it is moved."""
        before = self.peer.booking(decision.request, decision.role)
        booked = sent(self.placer.booking(decision.request, decision.role))
        stays = before is not None and (before.worker, before.rank) == (decision.worker, decision.rank)
        assert self.peer.adopt(booked, self.now) != stays
        if stays:
            self.own.add((decision.request, decision.role))
        assert not self.peer.adopt(booked, self.now)
        assert not self.peer.adopt(msgspec.structs.replace(booked, rank=3), self.now)
        assert not self.peer.adopt(msgspec.structs.replace(booked, worker="nobody"), self.now)

    @rule()
    def start_anew(self) -> None:
        """Another placer takes the peer's place, and hears of what there is."""
        self.peer = Placer(PROFILE, block_size=SIZE)
        self.own.clear()
        for worker in self.workers.values():
            self.peer.add_worker(worker, self.now)
        for session, seat, tokens, age_s in self.placer.sessions.bindings(1000, self.now):
            self.peer.sessions.bind(session, seat, tokens, self.now, self.now - age_s)
        for name in self.placer.requests():
            for role in ROLES:
                booked = self.placer.booking(name, role)
                assert (booked is not None) == ((name, role) in self.booked)
                if booked is not None:
                    assert self.peer.adopt(sent(booked), self.now, arrived=False)
                    assert self.peer.booking(name, role) is not None

    @precondition(lambda self: self.booked)
    @rule(data=st.data(), fetch=st.sampled_from([None, 0.0, 0.01]))
    def prefilled(self, data: st.DataObject, fetch: float | None) -> None:
        name, _ = data.draw(st.sampled_from(sorted(self.booked)))
        known = self.placer.prefilled(name, self.now, fetch)
        assert known == self.peer.prefilled(name, self.now)
        if (name, "prefill") in self.booked:
            assert known
            del self.booked[name, "prefill"]
            again = self.placer.prefilled(name, self.now)
            assert not again or (name, "both") in self.booked
            assert self.peer.prefilled(name, self.now) == again

    @precondition(lambda self: self.booked)
    @rule(data=st.data(), tokens=st.integers(1, 2000))
    def progress(self, data: st.DataObject, tokens: int) -> None:
        name, _ = data.draw(st.sampled_from(sorted(self.booked)))
        known = self.placer.progress(name, tokens, self.now)
        assert known == self.peer.progress(name, tokens, self.now)
        assert known == ((name, "decode") in self.booked or (name, "both") in self.booked)

    @precondition(lambda self: self.booked)
    @rule(data=st.data(), cancel=st.booleans())
    def end(self, data: st.DataObject, cancel: bool) -> None:
        name, _ = data.draw(st.sampled_from(sorted(self.booked)))
        assert (self.placer.cancelled if cancel else self.placer.finished)(name, self.now)
        assert not self.placer.finished(name, self.now)
        assert (self.peer.cancelled if cancel else self.peer.finished)(name, self.now)
        self.booked = {key: worker for key, worker in self.booked.items() if key[0] != name}

    @precondition(lambda self: self.booked)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        name, role = data.draw(st.sampled_from(sorted(self.booked)))
        for placer in (self.placer, self.peer):
            assert placer.cancelled(name, self.now, role)
            assert not placer.cancelled(name, self.now, role)
        del self.booked[name, role]

    @precondition(lambda self: self.booked)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        name, role = data.draw(st.sampled_from(sorted(self.booked)))
        assert self.placer.failed(name, role, self.now, "it broke")
        assert not self.placer.failed(name, role, self.now, "it broke")
        assert self.peer.failed(name, role, self.now, "it broke")
        del self.booked[name, role]

    @rule()
    def unknown(self) -> None:
        assert not self.placer.prefilled("nobody", self.now)
        assert not self.placer.progress("nobody", 3, self.now)
        assert not self.placer.finished("nobody", self.now)
        assert not self.placer.cancelled("nobody", self.now)
        assert not self.placer.failed("nobody", "both", self.now, "why")
        self.placer.stored("nobody", 0, "device", [1])

    @invariant()
    def loads_are_those_of_the_bookings(self) -> None:
        if not hasattr(self, "placer"):
            return
        for name in self.workers:
            load = self.placer.load(name)
            booked = sum(worker == name for worker in self.booked.values())
            assert load.prompts + load.sequences == booked
            assert load.prompt_s >= 0.0
            if not booked:
                assert load == NOTHING
            other = self.peer.load(name)
            assert (other.prompts, other.sequences) == (load.prompts, load.sequences)
            if not any(self.booked.get(key) == name for key in self.own):
                assert other.prompt_s == pytest.approx(load.prompt_s)
                assert other.resident_tokens == load.resident_tokens
        assert set(self.placer.requests()) == set(self.peer.requests()) == {name for name, _ in self.booked}

    @invariant()
    def sessions_are_bound_where_they_were_placed_last(self) -> None:
        if not hasattr(self, "placer"):
            return
        for session in ("x", "y", "z"):
            bound = self.placer.sessions.bound(session, self.now)
            assert bound in (self.bound.get(session), None)
            assert bound in (None, self.peer.sessions.bound(session, self.now))

    def teardown(self) -> None:
        if not hasattr(self, "placer"):
            return
        for placer in (self.placer, self.peer):
            for name in placer.requests():
                assert (placer.cancelled if placer is self.peer else placer.finished)(name, self.now)
            assert all(placer.load(name) == NOTHING for name in self.workers)
            assert not any(state.held for state in placer._workers.values())
            assert not any(placer._soon.match(list(range(64)), self.now).device)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=40)
