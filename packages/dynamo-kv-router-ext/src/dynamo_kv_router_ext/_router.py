# SPDX-License-Identifier: Apache-2.0
"""Everything that changes a `Placer` in a running router, with its peers told and its decisions recorded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ._placement import Placer
from ._replicas import Cancelled, Event, Failed, Finished, Placed, Prefilled, Progress, Replicas, Verdict
from ._types import ROLES, Decision, Request, Role, Worker, WorkerId

if TYPE_CHECKING:
    from ._records import Records

__all__ = ["Router"]

#: A worker that has left discovery may still finish what it has begun, for so many seconds; then it is aborted.
_LEAVE_S = 30.0
#: What was said of a worker is remembered for so long after it ceased to hold, so that no older word comes back.
_REMEMBER_S = 600.0


class _Leg(NamedTuple):
    """A request that this replica carries, in one role."""

    worker: WorkerId
    #: Which of the replica's placements it was.
    turn: int


class Router:
    """One replica of the router: places requests, keeps the bookings of those it carries, tells its peers of them.

    It is used in one event loop. Ids are those that `key` makes: the placer also holds what other replicas carry, under
    ids of theirs. One id may be booked in two roles, and placed again in a role in which it failed.

    Parameters:
        placer: what decides. From now on only the router may change it.
        records: where decisions are kept.
        clock: seconds, monotone.
    """

    def __init__(self, placer: Placer, records: Records, clock: Callable[[], float] = time.monotonic) -> None:
        self.placer = placer
        self.records = records
        #: This replica's name: its instance id, or 0 where it has no peers.
        self.replica = 0
        self._clock = clock
        self._replicas: Replicas | None = None
        self._turn = 0
        #: What this replica carries, until `finished` or `cancelled`.
        self._carried: dict[str, dict[Role, _Leg]] = {}
        self._aborts: dict[str, Callable[[Role, str], None]] = {}
        #: What ran on workers that have left: until when that may go on, the id, the role, the turn, the worker.
        self._leaving: list[tuple[float, str, Role, int, WorkerId]] = []
        #: What each source outside last said of a worker, and until when it holds.
        self._verdicts: dict[WorkerId, dict[str, tuple[Verdict, float]]] = {}

    def attach(self, replicas: Replicas) -> None:
        """Have peers, and the name by which they know this replica; to be called before the first `place`."""
        self._replicas = replicas
        self.replica = replicas.replica

    def now(self) -> float:
        """Return the time on the router's clock, seconds."""
        return self._clock()

    def key(self, context_id: str) -> str:
        """Return the id of a request that this replica carries, by the id of its context."""
        return f"{self.replica:x}/{context_id}"

    # Requests

    async def place(self, request: Request, role: Role) -> Decision:
        """Decide where a request goes, book it there, tell the peers, record it.

        Where it generates is decided by the owner replica of its session, so that one replica has all the session's
        turns before it; by this one if that does not answer in time, or there is no session. Where this is cancelled or
        raises, `cancelled` is to be called all the same.

        Raises:
            NoWorkerError: no worker of the role lives, or none may take the request.
            ValueError: the request is booked in this role already, or the role is unknown.
        """
        self._turn += 1
        turn = self._turn
        decision = None
        if self._replicas is not None and role != "prefill" and self.placer.booking(request.id, role) is None:
            decision = await self._replicas.ask(request, role, turn)
        now = self.now()
        if decision is None:
            decision = self.placer.place(request, role, now, explain=True)
        self._carried.setdefault(request.id, {})[role] = _Leg(decision.worker, turn)
        for event in self._placed(request.id, (role,)):
            self._tell(event)
        self.records.placed(_context(request.id), request, decision, now, time.time())
        return decision

    def prefilled(self, id: str) -> None:
        """The prompt has been read."""
        now = self.now()
        legs = self._carried.get(id, {})
        for role in legs:
            if role != "decode":
                self.records.first_token(_context(id), role, now)
        legs.pop("prefill", None)  # that worker may go now
        self.placer.prefilled(id, now)
        self._tell(Prefilled(id))

    def progress(self, id: str, tokens: int) -> None:
        """So many tokens have been generated so far; to be told at the first one, and about once a second."""
        now = self.now()
        for role in self._carried.get(id, ()):
            if role != "prefill":
                self.records.first_token(_context(id), role, now)
        self.placer.progress(id, tokens, now)
        self._tell(Progress(id, tokens))

    def finished(self, id: str) -> None:
        """The request is through."""
        self.placer.finished(id, self.now())
        self._ended(id, "finished", Finished(id))

    def cancelled(self, id: str, role: Role | None = None) -> None:
        """It is over and says nothing about its workers, as when the client goes away. Unknown ids are no error.

        With a role, only what is booked in that role is, and the request may be placed again.
        """
        self.placer.cancelled(id, self.now(), role)
        if role is None:
            self._ended(id, "cancelled", Cancelled(id))
        else:
            self._leave(id, role)
            self._tell(Cancelled(id, role))

    def failed(self, id: str, role: Role, reason: str) -> None:
        """The worker that has the request in this role failed it; it may be placed again under the same id.

        Where it is not, `cancelled` is to be called.
        """
        now = self.now()
        leg = self._leave(id, role)
        if leg is None:
            return
        self.placer.failed(id, role, now, reason)
        self._tell(Failed(id, role, leg.worker, reason))  # type: ignore[arg-type]  # Dynamo's are numbers
        self.records.failed(_context(id), role, reason, now)

    def on_abort(self, id: str, callback: Callable[[Role, str], None]) -> None:
        """Have a callback called, once, with the role and the reason, when a worker of it stands still or has left."""
        self._aborts[id] = callback

    def off_abort(self, id: str) -> None:
        """Forget the callback, if there is one."""
        self._aborts.pop(id, None)

    # Workers

    def add_worker(self, worker: Worker) -> None:
        """Let a worker take part; ValueError if one of its name does already."""
        self.placer.add_worker(worker, self.now())
        self._judge(worker.id)
        if self._replicas is not None:
            self._replicas.added(worker.id)

    def remove_worker(self, worker: WorkerId) -> None:
        """Place nothing there any more. KeyError if it is not in the fleet.

        It may be draining, so what runs there may go on, for 30 s; then it is aborted, unless the worker is back.
        """
        now = self.now()
        for id in self.placer.remove_worker(worker, now):
            for role, leg in self._carried.get(id, {}).items():
                if leg.worker == worker:
                    self._leaving.append((now + _LEAVE_S, id, role, leg.turn, worker))

    def verdict(self, worker: WorkerId, out: bool, ttl_s: float, reason: str = "", source: str = "") -> bool:
        """Take in what a source outside says of a worker: out for `ttl_s` seconds, or not any more. Peers are told.

        Each source speaks for itself: the worker is out while any of them wants it out. This only adds to the worker's
        own ejection. False for an unknown worker.

        Raises:
            ValueError: `ttl_s` is not above 0, or not finite, where `out` is true.
        """
        if out and not 0.0 < ttl_s < float("inf"):
            raise ValueError(f"ttl_s must be a number above 0, not {ttl_s!r}")
        if not self._known(worker):
            return False
        at = time.time()
        before = self._verdicts.get(worker, {}).get(source)
        if before is not None:
            at = max(at, before[0].at + 1e-3)  # another replica's clock may be ahead
        said = Verdict(worker, source, out, ttl_s if out else 0.0, at, reason)  # type: ignore[arg-type]
        self.heard_verdict(said)
        self._tell(said)
        return True

    def tick(self) -> None:
        """To be called every 0.5 s: finds workers that stand still, and peers that came or went."""
        now = self.now()
        if self._replicas is not None:
            self._replicas.check()
        for id, role in self.placer.tick(now):
            if role in self._carried.get(id, {}):
                self._abort(id, role, f"worker {self._carried[id][role].worker} stands still")
        leaving, self._leaving = self._leaving, []
        for one in leaving:
            until, id, role, turn, worker = one
            leg = self._carried.get(id, {}).get(role)
            if leg is not None and leg.turn == turn:
                if now < until:
                    self._leaving.append(one)
                elif not self._known(worker):
                    self._abort(id, role, f"worker {worker} has left")
        for worker, said in [*self._verdicts.items()]:
            self._verdicts[worker] = {k: v for k, v in said.items() if now < v[1] + _REMEMBER_S}
            if not self._verdicts[worker]:
                del self._verdicts[worker]

    def state(self) -> dict[str, Any]:
        """What the router knows, as JSON: its workers, its peers, how many sessions, and bookings by replica."""
        now = self.now()
        placer = self.placer
        workers = []
        for worker in placer.workers():
            load = placer.load(worker.id)
            workers.append(
                {
                    "id": worker.id,
                    "role": worker.role,
                    "group": worker.transfer_group,
                    "state": placer.health.state(worker.id, now),
                    "why": placer.health.why(worker.id, now),
                    "risk": placer.health.risk(worker.id, now),
                    "slowness": placer.estimator.coefficients(worker.id)["step_factor"],
                    "load": {
                        "prompts": load.prompts,
                        "prompt_s": load.prompt_s,
                        "sequences": load.sequences,
                        "resident_tokens": load.resident_tokens,
                    },
                }
            )
        live = [self.replica] if self._replicas is None else self._replicas.live()
        return {
            "replica": self.replica,
            "peers": [replica for replica in live if replica != self.replica],
            "workers": workers,
            "sessions": len(placer.sessions),
            "bookings": dict(Counter(id.partition("/")[0] for id in placer.requests())),
        }

    # What the peers are told, and say

    def carried(self) -> Iterator[Placed]:
        """Return what this replica carries, in the order in which it was booked."""
        for id in self.placer.requests():
            yield from self._placed(id, ROLES)

    def verdicts(self) -> Iterator[Verdict]:
        """Return what was said of workers from outside."""
        now = self.now()
        for said in self._verdicts.values():
            for verdict, until in said.values():
                yield msgspec.structs.replace(verdict, left_s=max(until - now, 0.0))

    def heard_verdict(self, said: Verdict) -> None:
        """Take in a verdict, if its source has said nothing since; the worker need not be known yet."""
        known = self._verdicts.setdefault(said.worker, {})
        before = known.get(said.source)
        if before is None or said.at > before[0].at:
            known[said.source] = said, self.now() + said.left_s
            self._judge(said.worker)

    def _judge(self, worker: WorkerId) -> None:
        """Let the health know how long anyone outside wants a worker out."""
        said = self._verdicts.get(worker)
        if said is None or not self._known(worker):
            return
        now = self.now()
        wanted = [(until, verdict) for verdict, until in said.values() if verdict.out and until > now]
        if wanted:
            until, verdict = max(wanted, key=lambda one: one[0])
            reason = ": ".join(word for word in (verdict.source, verdict.reason) if word)
            self.placer.health.verdict(worker, True, now, until - now, reason)
        else:
            self.placer.health.verdict(worker, False, now, 0.0)

    def _known(self, worker: WorkerId) -> bool:
        try:
            self.placer.load(worker)
        except KeyError:
            return False
        return True

    def _placed(self, id: str, roles: Iterable[Role]) -> Iterator[Placed]:
        """The events that tell of what is booked under an id that this replica carries."""
        legs = self._carried.get(id, {})
        for role in roles:
            booked = self.placer.booking(id, role) if role in legs else None
            if booked is not None:
                yield Placed(booked, legs[role].turn)

    def _tell(self, event: Event) -> None:
        if self._replicas is not None:
            self._replicas.tell(event)

    def _abort(self, id: str, role: Role, reason: str) -> None:
        callback = self._aborts.pop(id, None)
        if callback is not None:
            self.records.aborted(_context(id), role, reason, self.now())
            callback(role, reason)

    def _leave(self, id: str, role: Role) -> _Leg | None:
        """Carry it in that role no longer."""
        return self._carried.get(id, {}).pop(role, None)

    def _ended(self, id: str, how: str, event: Event) -> None:
        self._aborts.pop(id, None)
        # Also where nothing is booked here: a session's owner may have been asked.
        self._tell(event)
        if self._carried.pop(id, None) is not None:
            self.records.ended(_context(id), how, self.now())


def _context(id: str) -> str:
    """The id of a request's context, by that of its booking."""
    return id.partition("/")[2]
