# SPDX-License-Identifier: Apache-2.0
"""A state machine over the placer: bookings, sessions and workers come and go in any order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dynamo_kv_router_ext._placement import Load, Placer
from dynamo_kv_router_ext._profile import DecodeCost, Profile, StepCost, TierCost
from dynamo_kv_router_ext._types import EXTERNAL_TIERS, NoWorkerError, Request, Role, Seat, Worker

PROFILE = Profile(
    name="test",
    source="made up",
    prefill=StepCost(base_s=0.01, token_s=1e-5, pair_s=1e-10),
    decode=DecodeCost(base_s=0.01, sequence_s=1e-4, token_s=1e-8),
    transfer=TierCost(latency_s=0.001, token_s=1e-6),
    tiers={tier: TierCost(latency_s=0.001, token_s=2e-6 * (k + 1)) for k, tier in enumerate(EXTERNAL_TIERS)},
)
SIZE = 16
ROLES = st.sampled_from(["prefill", "decode", "both"])
TIERS = st.sampled_from(["device", "host", "disk", "store"])
#: Prefixes of four families of prompts.
BLOCKS = st.tuples(st.integers(0, 3), st.integers(0, 120)).map(lambda t: [1000 * t[0] + i for i in range(t[1])])
NOTHING = Load(0, 0.0, 0, 0)


class Machine(RuleBasedStateMachine):
    """The placer beside a model of who is booked where."""

    @initialize()
    def start(self) -> None:
        self.placer = Placer(PROFILE, block_size=SIZE)
        self.now = 0.0
        self.workers: dict[int, Worker] = {}
        self.booked: dict[tuple[str, Role], int] = {}
        self.bound: dict[str, Any] = {}
        self.count = 0

    @rule(seconds=st.floats(0.001, 40.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.placer.tick(self.now)

    @rule(
        role=ROLES,
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
        with pytest.raises(ValueError, match=str(self.count)):
            self.placer.add_worker(worker, self.now)

    @precondition(lambda self: len(self.workers) > 1)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.workers)))
        lost = self.placer.remove_worker(name, self.now)
        assert sorted(lost) == sorted(request for (request, _), worker in self.booked.items() if worker == name)
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
        role=ROLES,
        blocks=BLOCKS,
        more=st.integers(1, 5000),
        session=st.sampled_from([None, "x", "y", "z"]),
        output=st.sampled_from([None, 1, 500]),
    )
    def place(
        self, data: st.DataObject, role: Role, blocks: list[int], more: int, session: str | None, output: int | None
    ) -> None:
        names = [request for request, booked in self.booked if booked == "prefill"]
        name = data.draw(st.sampled_from(names)) if role == "decode" and names else f"r{self.count}"
        self.count += 1
        if (name, role) in self.booked:
            return
        source = self.booked.get((name, "prefill")) if role == "decode" else None
        request = Request(name, len(blocks) * SIZE + more, blocks, session, output, source)
        living = [w for w in self.workers.values() if w.role == role]
        if source is not None:
            living = [w for w in living if w.transfer_group == self.workers[source].transfer_group]
        if not living:
            with pytest.raises(NoWorkerError, match=name):
                self.placer.place(request, role, self.now)
            with pytest.raises(NoWorkerError, match=name):
                self.placer.explain(request, role, self.now)
            return
        states = {w.id: self.placer.health.state(w.id, self.now) for w in self.workers.values() if w.role == role}
        explanation = self.placer.explain(request, role, self.now)
        decision = self.placer.place(request, role, self.now)
        first = explanation.candidates[0]
        assert first.refused is None
        assert (first.worker, first.rank, first.terms) == (decision.worker, decision.rank, decision.terms)
        costs = [c.terms.cost_s for c in explanation.candidates if c.terms is not None]
        assert costs == sorted(costs)
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

    @precondition(lambda self: self.booked)
    @rule(data=st.data(), fetch=st.sampled_from([None, 0.0, 0.01]))
    def prefilled(self, data: st.DataObject, fetch: float | None) -> None:
        name, _ = data.draw(st.sampled_from(sorted(self.booked)))
        known = self.placer.prefilled(name, self.now, fetch)
        if (name, "prefill") in self.booked:
            assert known
            del self.booked[name, "prefill"]
            assert not self.placer.prefilled(name, self.now) or (name, "both") in self.booked

    @precondition(lambda self: self.booked)
    @rule(data=st.data(), tokens=st.integers(1, 2000))
    def progress(self, data: st.DataObject, tokens: int) -> None:
        name, _ = data.draw(st.sampled_from(sorted(self.booked)))
        known = self.placer.progress(name, tokens, self.now)
        assert known == ((name, "decode") in self.booked or (name, "both") in self.booked)

    @precondition(lambda self: self.booked)
    @rule(data=st.data(), cancel=st.booleans())
    def end(self, data: st.DataObject, cancel: bool) -> None:
        name, _ = data.draw(st.sampled_from(sorted(self.booked)))
        assert (self.placer.cancelled if cancel else self.placer.finished)(name, self.now)
        assert not self.placer.finished(name, self.now)
        self.booked = {key: worker for key, worker in self.booked.items() if key[0] != name}

    @precondition(lambda self: self.booked)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        name, role = data.draw(st.sampled_from(sorted(self.booked)))
        assert self.placer.failed(name, role, self.now, "it broke")
        assert not self.placer.failed(name, role, self.now, "it broke")
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

    @invariant()
    def sessions_are_bound_where_they_were_placed_last(self) -> None:
        if not hasattr(self, "placer"):
            return
        for session in ("x", "y", "z"):
            assert self.placer.sessions.bound(session, self.now) in (self.bound.get(session), None)

    def teardown(self) -> None:
        if not hasattr(self, "placer"):
            return
        for name, _ in list(self.booked):
            self.placer.finished(name, self.now)
        assert all(self.placer.load(name) == NOTHING for name in self.workers)
        assert not any(self.placer._soon.match(list(range(64)), self.now).device)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
