# SPDX-License-Identifier: Apache-2.0
"""Placement in units of time: what a request waits, fetches and works at each candidate, and takes from others.

A seat's queue is first come, first served: it is busy for the expected seconds of the prompts booked there, less what
has run since the last one was through. An engine lets several prompts share a step; `prefilled` sets that right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ._health import Health
from ._index import PrefixIndex
from ._learning import Estimator
from ._profile import Profile
from ._sessions import Sessions
from ._types import (
    EXTERNAL_TIERS,
    ROLES,
    Candidate,
    Decision,
    Explanation,
    ExternalTier,
    NoWorkerError,
    Request,
    Role,
    Seat,
    Terms,
    Tier,
    Worker,
    WorkerId,
)

__all__ = ["Load", "Placer", "Settings"]

#: The least share of a prompt's work that is taken to remain, however long it has run.
_LEAST_SHARE = 0.05
#: Late work is expected to last on for this share of its lateness, so a stalled worker never looks idle.
_LATE_SHARE = 0.5
#: The pool's utilisation is bounded here, since rho / (1 - rho) has a pole at 1.
_UTILISATION_CAP = 0.9
#: What booked prompts will leave in the cache is known by every so manieth of their blocks.
_STRIDE = 16
#: A measurement of prefill ends with an idle seat or after so many chunks of prompts, whichever comes first.
_SAMPLE_CHUNKS = 4
#: The least seconds between two measurements of decode at one seat.
_DECODE_SAMPLE_S = 0.25


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What can be set about the placement."""

    #: How much the time that a placement takes from other requests counts; 1 is the price in an M/G/1 queue.
    others_weight: float = 1.0
    #: Seconds of time to first token that one second of generation time is worth.
    token_weight: float = 0.2
    #: Seconds of memory of the arrival rate and the load.
    load_window_s: float = 60.0
    #: Seconds that a session stays bound to its decoder without a request.
    session_ttl_s: float = 3600.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            least = 0.0 if name.endswith("weight") else 1e-3
            if not math.isfinite(value) or value < least:
                raise ValueError(f"{name} must be a finite number of at least {least}, not {value!r}")


@dataclass(frozen=True, slots=True)
class Load:
    """What is booked at a worker, over all its ranks."""

    #: Prompts that are waiting or being read.
    prompts: int
    #: Seconds of prompt work booked, as estimated when it was booked.
    prompt_s: float
    #: Sequences that generate, or are about to.
    sequences: int
    #: Tokens of KV that the booked requests hold or will hold.
    resident_tokens: int


class _Flow:
    """How much comes per second, remembered for a window."""

    __slots__ = ("at", "count", "since", "window_s", "work_s")

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self.count = 0.0
        self.work_s = 0.0
        self.at = 0.0
        self.since: float | None = None

    def arrived(self, count: float, work_s: float, now: float) -> None:
        """One more request, or a part of one, that takes `work_s` of a seat."""
        if self.since is None:
            self.since = now
        keep = math.exp((self.at - now) / self.window_s) if now > self.at else 1.0
        self.count = self.count * keep + count
        self.work_s = self.work_s * keep + work_s
        self.at = now

    def rates(self, now: float) -> tuple[float, float]:
        """Requests a second, and seconds of work a second."""
        if self.since is None:
            return 0.0, 0.0
        window = self.window_s
        seen = window * (1.0 - math.exp(-max((now - self.since) / window, 0.1)))
        scale = math.exp((self.at - now) / window) / seen if now > self.at else 1.0 / seen
        return self.count * scale, self.work_s * scale


@dataclass(slots=True, eq=False)
class _Booking:
    """One request at one seat."""

    request: str
    role: Role
    seat: _Seat
    tokens: int
    session: str | None
    booked_at: float
    #: Expected length of the answer, tokens.
    output: float
    #: Prompt tokens to compute, and those that are cached or fetched before them.
    new: int = 0
    cached: int = 0
    #: Expected seconds of the seat that reading the prompt takes.
    service_s: float = 0.0
    #: The tier and the tokens that it fetches, if from one tier and by an idle link.
    fetched: tuple[ExternalTier, int] | None = None
    #: When its fetched blocks are there.
    ready_at: float = 0.0
    #: The seat was idle when it was booked.
    alone: bool = False
    #: Every `_STRIDE`-th block of the prompt: what it will leave in the cache.
    marks: Sequence[int] = ()
    #: KV that it holds, tokens.
    resident: int = 0
    #: Tokens generated at the last report, when that was, and the seat's areas then.
    generated: int = 0
    reported_at: float = -1.0
    area_sequences: float = 0.0
    area_tokens: float = 0.0


@dataclass(slots=True, eq=False)
class _Seat:
    """One rank with what is booked at it."""

    name: Seat
    worker: _Worker
    #: What comes back to it for the sake of its cache.
    returning: _Flow
    #: Where it stands in the index's lists.
    place: int = 0
    #: Prompts to read, first come first; and their seconds and tokens.
    queue: dict[str, _Booking] = field(default_factory=dict)
    queue_s: float = 0.0
    queue_tokens: int = 0
    #: Since when the first of them is being read.
    head_at: float = 0.0
    #: Until when the link that fetches blocks is busy.
    link_until: float = 0.0
    #: Sequences that generate, and their KV.
    running: dict[str, _Booking] = field(default_factory=dict)
    running_tokens: int = 0
    #: KV of everything booked.
    resident: int = 0
    #: Integrals of running sequences and their KV over time, for the mean batch of an interval.
    area_sequences: float = 0.0
    area_tokens: float = 0.0
    area_at: float = 0.0
    #: The measurement of prefill under way: its start (None: none), the prompts it holds, the decode seconds in it.
    sample_at: float | None = None
    sample: list[_Booking] = field(default_factory=list)
    #: When a prompt was last in the queue, when decode was last measured, when the seat last gave a sign of life.
    prompt_at: float = -math.inf
    measured_at: float = -math.inf
    alive_at: float = 0.0
    #: It reports progress of generation, so silence means something.
    reports: bool = False
    #: Cache events came from it, so that the index knows better than the session table what it holds.
    events: bool = False


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker with its seats."""

    spec: Worker
    seats: list[_Seat] = field(default_factory=list)
    #: Failures or stalls were reported: its risk is worth asking for.
    doubted: bool = False
    #: Lockstep: the group's step time and the most steps any rank has booked, and in which decision that was computed.
    turn: int = -1
    step_s: float = 0.0
    steps: float = 0.0


class _Pool:
    """The workers of one role and the load that comes to them."""

    def __init__(self, window_s: float) -> None:
        self.workers: dict[WorkerId, _Worker] = {}
        self.seats: list[_Seat] = []
        #: What may come to any seat: the parts of prompts that no cache holds.
        self.fresh = _Flow(window_s)
        #: Running mean of the expected time to first token.
        self.first_token_s: float | None = None

    def arrived(self, seat: _Seat, cached: float, terms: Terms, now: float) -> None:
        """One more request was placed, the share `cached` of whose prompt need not be read."""
        if self.first_token_s is None:
            self.first_token_s = terms.first_token_s
        self.first_token_s += 0.05 * (terms.first_token_s - self.first_token_s)
        seat.returning.arrived(cached, cached * terms.work_s, now)
        self.fresh.arrived(1.0 - cached, (1.0 - cached) * terms.work_s, now)


#: (cost, wait, fetch, work, first token, token, others, risk, device tokens, host, disk, store tokens fetched, whether
#: others are better read anew)
_Row = tuple[float, float, float, float, float, float, float, float, int, int, int, int, bool]


class Placer:
    """Places requests on workers by the time they are expected to take, theirs and the others'.

    All state is in memory and every call is told the time, `now`, in seconds of one monotone clock. A placement is
    booked until `finished`, `failed` or `cancelled`.
    """

    def __init__(
        self,
        profile: Profile,
        settings: Settings | None = None,
        *,
        block_size: int = 64,
        index: PrefixIndex | None = None,
        health: Health | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size!r}")
        if index is not None and index.seats:
            raise ValueError(f"the index must be empty, but it knows {len(index.seats)} seats")
        self.settings = settings if settings is not None else Settings()
        self.block_size = block_size
        self.index = index if index is not None else PrefixIndex(block_size)
        self.estimator = Estimator(profile)
        self.health = health if health is not None else Health()
        self.sessions = Sessions(ttl_s=self.settings.session_ttl_s)
        self._tiers: tuple[ExternalTier, ...] = tuple(t for t in EXTERNAL_TIERS if t in profile.tiers)
        self._workers: dict[WorkerId, _Worker] = {}
        self._pools: dict[Role, _Pool] = {role: _Pool(self.settings.load_window_s) for role in ROLES}
        self._booked: dict[Role, dict[str, _Booking]] = {role: {} for role in ROLES}
        self._soon = PrefixIndex(block_size * _STRIDE)
        self._turn = 0

    # Workers and their caches

    def add_worker(self, worker: Worker, now: float) -> None:
        """Let a worker take part; ValueError if one of its name does already."""
        if worker.id in self._workers:
            raise ValueError(f"worker {worker.id!r} is in the fleet already")
        state = _Worker(worker)
        for rank in range(worker.ranks):
            seat = _Seat(Seat(worker.id, rank), state, _Flow(self.settings.load_window_s), area_at=now, alive_at=now)
            state.seats.append(seat)
            self.index.add_seat(seat.name)
            self._soon.add_seat(seat.name)
        self._workers[worker.id] = state
        pool = self._pools[worker.role]
        pool.workers[worker.id] = state
        pool.seats = [seat for other in pool.workers.values() for seat in other.seats]
        self._reorder()
        self.health.add(worker)

    def remove_worker(self, worker: WorkerId, now: float) -> list[str]:
        """Forget a worker; returns the requests that were booked there. KeyError if it is not in the fleet."""
        state = self._workers.pop(worker, None)
        if state is None:
            raise KeyError(f"worker {worker!r} is not in the fleet")
        lost: dict[str, None] = {}
        for seat in state.seats:
            for booking in [*seat.queue.values(), *seat.running.values()]:
                lost[booking.request] = None
                self._drop(booking, now)
            self.index.drop_seat(seat.name)
            self._soon.drop_seat(seat.name)
        pool = self._pools[state.spec.role]
        del pool.workers[worker]
        pool.seats = [seat for other in pool.workers.values() for seat in other.seats]
        self._reorder()
        self.sessions.drop_worker(worker)
        self.health.drop(worker)
        self.estimator.forget(worker)
        return list(lost)

    def stored(self, worker: WorkerId, rank: int, tier: Tier, blocks: Sequence[int]) -> None:
        """Blocks came into a tier of a rank. Events of workers that are not in the fleet are ignored."""
        seat = self._seat(worker, rank)
        if seat is not None:
            seat.events = True
            self.index.stored(seat.name, tier, blocks)

    def removed(self, worker: WorkerId, rank: int, tier: Tier, blocks: Sequence[int]) -> None:
        """Blocks left a tier of a rank."""
        seat = self._seat(worker, rank)
        if seat is not None:
            self.index.removed(seat.name, tier, blocks)

    def cleared(self, worker: WorkerId, rank: int, tier: Tier | None = None) -> None:
        """A tier of a rank is empty now; None: all of its own."""
        seat = self._seat(worker, rank)
        if seat is not None:
            self.index.cleared(seat.name, tier)

    def _reorder(self) -> None:
        """Note where each seat stands in the index's lists."""
        for i, name in enumerate(self.index.seats):
            if name.worker in self._workers:
                self._workers[name.worker].seats[name.rank].place = i

    def _seat(self, worker: WorkerId, rank: int) -> _Seat | None:
        state = self._workers.get(worker)
        return state.seats[rank] if state is not None and 0 <= rank < len(state.seats) else None

    # Decisions

    def place(self, request: Request, role: Role, now: float) -> Decision:
        """Choose a seat and book the request there.

        NoWorkerError if no worker of the role (and of the prefill worker's transfer group) lives; ValueError if the
        request is booked in this role already.
        """
        if request.id in self._booked[role]:
            raise ValueError(f"request {request.id!r} is booked as {role} already")
        seats = self._candidates(request, role, now)[0]
        row, seat, output = self._choose(request, role, seats, now, None)
        self._turn += 1
        booking = _Booking(request.id, role, seat, request.tokens, request.session, now, output)
        terms = _terms(row)
        fetched = sum(terms.fetch_tokens.values())
        if role != "decode":
            booking.cached = terms.device_tokens + fetched
            booking.new = request.tokens - booking.cached
            booking.service_s = terms.work_s
            booking.ready_at = now + terms.fetch_s
            booking.marks = request.blocks[_STRIDE - 1 :: _STRIDE]
            if fetched:
                if seat.link_until <= now and len(terms.fetch_tokens) == 1:
                    booking.fetched = next(iter(terms.fetch_tokens.items()))
                seat.link_until = booking.ready_at
        self._book(booking, now)
        self._pools[role].arrived(seat, (terms.device_tokens + fetched) / request.tokens, terms, now)
        note = ""
        if request.session is not None and role != "prefill":
            bound = self.sessions.bound(request.session, now)
            if bound is not None and bound != seat.name:
                note = f"moved from {bound.worker!r}"
            self.sessions.bind(request.session, seat.name, request.tokens, now)
        state = self.health.state(seat.name.worker, now)
        if state == "probing":
            self.health.probe(seat.name.worker, now)
            note = "probe"
        elif state == "out":
            note = "last"
        # What is on the device now may be in a slower tier when its turn comes, so the bound is only what was refused.
        most = fetched if role == "decode" or row[12] else request.tokens
        return Decision(request.id, role, seat.name.worker, seat.name.rank, terms, most, note)

    def explain(self, request: Request, role: Role, now: float) -> Explanation:
        """Every candidate with its terms, the cheapest first; nothing is booked. NoWorkerError as for `place`."""
        seats, refused = self._candidates(request, role, now)
        rows: list[tuple[_Row, _Seat]] = []
        self._choose(request, role, seats, now, rows)
        rows.sort(key=lambda pair: pair[0][0])
        asked = [Candidate(seat.name.worker, seat.name.rank, _terms(row)) for row, seat in rows]
        passed = [Candidate(seat.name.worker, seat.name.rank, None, why) for seat, why in refused]
        return Explanation(request.id, role, (*asked, *passed))

    def _candidates(self, request: Request, role: Role, now: float) -> tuple[list[_Seat], list[tuple[_Seat, str]]]:
        """The seats that may be asked, and those that may not with the reason."""
        pool = self._pools[role]
        if not pool.workers:
            roles = ", ".join(f"{len(p.workers)} {r}" for r, p in self._pools.items() if p.workers) or "none at all"
            raise NoWorkerError(f"request {request.id!r}: no worker of role {role} lives (workers: {roles})")
        states = pool.workers
        refused: list[tuple[_Seat, str]] = []
        source = self._workers.get(request.prefill_worker) if request.prefill_worker is not None else None
        if role == "decode" and source is not None:
            group = source.spec.transfer_group
            states = {name: state for name, state in states.items() if state.spec.transfer_group == group}
            if len(states) < len(pool.workers):
                refused = [
                    (seat, f"transfer group {seat.worker.spec.transfer_group!r}, not {group!r}")
                    for seat in pool.seats
                    if seat.name.worker not in states
                ]
            if not states:
                raise NoWorkerError(
                    f"request {request.id!r}: no worker of role {role} is of transfer group {group!r}, as its prefill "
                    f"worker {request.prefill_worker!r} is (others: {', '.join(repr(name) for name in pool.workers)})"
                )
        admitted = self.health.admitted(list(states), now)
        if len(admitted) == len(pool.workers):
            return pool.seats, refused
        allowed = set(admitted)
        refused += [
            (seat, "out after failures")
            for seat in pool.seats
            if seat.name.worker in states and seat.name.worker not in allowed
        ]
        return [seat for seat in pool.seats if seat.name.worker in allowed], refused

    def _choose(
        self, request: Request, role: Role, seats: list[_Seat], now: float, rows: list[tuple[_Row, _Seat]] | None
    ) -> tuple[_Row, _Seat, float]:
        """The cheapest seat, its row and the expected output; every row goes to `rows` if given.

        Ties go to the first seat in an order that moves on by one with each placement.
        """
        matches = self.index.match(request.blocks, now)
        soon = self._soon.match(request.blocks[_STRIDE - 1 :: _STRIDE], now).device
        pool = self._pools[role]
        rate, busy = pool.fresh.rates(now)
        fresh = (rate / len(pool.seats), busy / len(pool.seats))
        output = 1.0
        if role != "prefill":
            output = self.sessions.expected_output(request.session)
            if request.output_tokens is not None:
                output = min(output, float(request.output_tokens))
        bound = self.sessions.bound(request.session, now) if role != "prefill" and request.session is not None else None
        device, host, disk, store = matches.device, matches.host, matches.disk, matches.store
        size = self.block_size
        # The last token is always computed, so the block that holds it never counts.
        most = (request.tokens - 1) // size * size
        tokens = request.tokens
        best: _Row | None = None
        winner = seats[0]
        count = len(seats)
        first = self._turn % count
        for seat in seats[first:] + seats[:first] if first else seats:
            i = seat.place
            cached = device[i] * size
            if role == "decode":
                held = cached
                if bound is not None and not seat.events and bound == seat.name:
                    held = self.sessions.resident(request.session, now)
                row = self._decode_row(seat, tokens, min(held, tokens), output, now)
            else:
                external = (host[i], disk[i], store[i])
                ahead = soon[i] * _STRIDE - device[i]
                if ahead > 0:
                    cached, external = soon[i] * _STRIDE * size, _beyond(external, ahead)
                row = self._prefill_row(seat, tokens, most, min(cached, most), external, now, fresh)
                if role == "both":
                    row = self._both_row(seat, row, tokens, output, now)
            if seat.worker.doubted:
                row = self._with_risk(seat, row, pool, now)
            if rows is not None:
                rows.append((row, seat))
            if best is None or row[0] < best[0]:
                best, winner = row, seat
        assert best is not None
        return best, winner, output

    def _prefill_row(
        self,
        seat: _Seat,
        tokens: int,
        most: int,
        cached: int,
        external: tuple[int, int, int],
        now: float,
        fresh: tuple[float, float],
    ) -> _Row:
        """Reading the prompt at a seat: the cut between fetch and recompute that costs least."""
        spec = seat.worker.spec
        backlog = _backlog(seat, now) if seat.queue else 0.0
        # M/G/1, first come first served: work s behind a backlog u delays those to come by
        # lambda s (u + s/2) / (1 - rho), the growth of the value function lambda u^2 / (2 (1 - rho)). What comes is the
        # seat's own returning prompts, and its share of those that may go anywhere.
        rate, busy = seat.returning.rates(now)
        share = self.settings.others_weight * (rate + fresh[0]) / (1.0 - min(busy + fresh[1], _UTILISATION_CAP))
        best = self._cut(seat, tokens, cached, (0, 0, 0), backlog, 0.0, share)
        if external == (0, 0, 0) or not self._tiers or cached >= most:
            return best
        size = self.block_size
        fetch = max(seat.link_until - now, 0.0)
        taken, total = [0, 0, 0], 0
        for k, tier in enumerate(EXTERNAL_TIERS):
            more = min(external[k] * size, most - cached - total)
            if more <= 0 or tier not in self._tiers:
                if external[k]:
                    break
                continue
            taken[k] = more
            total += more
            fetch += self.estimator.fetch_s(spec.id, tier, more)
            row = self._cut(seat, tokens, cached, (taken[0], taken[1], taken[2]), backlog, fetch, share)
            if row[0] < best[0]:
                best = row
        return best if sum(best[9:12]) == total else (*best[:12], True)

    def _cut(
        self,
        seat: _Seat,
        tokens: int,
        cached: int,
        taken: tuple[int, int, int],
        wait: float,
        fetch: float,
        share: float,
    ) -> _Row:
        """The row in which so many tokens are fetched from each tier, and those behind them read."""
        spec = seat.worker.spec
        known = cached + taken[0] + taken[1] + taken[2]
        work, slower = self.estimator.prefill_s(spec.id, tokens - known, known, spec.chunk_tokens), 0.0
        if spec.ranks > 1:
            wait, work, slower = self._lockstep(seat, tokens - known, wait, work)
        others = share * work * (wait + 0.5 * work) + slower
        first = max(wait, fetch) + work
        return (first + others, wait, fetch, work, first, 0.0, others, 0.0, cached, *taken, False)

    def _lockstep(self, seat: _Seat, new: int, wait: float, work: float) -> tuple[float, float, float]:
        """Wait, work and what the other ranks lose, where the ranks' steps last as long as the slowest rank's."""
        worker = seat.worker
        chunk = worker.spec.chunk_tokens
        if worker.turn != self._turn:
            worker.turn = self._turn
            worker.step_s = worker.steps = 0.0
            for rank in worker.seats:
                if rank.queue:
                    steps = max(rank.queue_tokens / chunk, 1.0)
                    worker.steps = max(worker.steps, steps)
                    worker.step_s = max(worker.step_s, rank.queue_s / steps)
        if not worker.steps:
            return wait, work, 0.0
        own = max(seat.queue_tokens / chunk, 1.0) if seat.queue else 0.0
        # An idle rank joins the group's next step: half of the present one is left in the mean.
        wait = max(wait, own * worker.step_s) if seat.queue else 0.5 * worker.step_s
        steps = math.ceil(new / chunk)
        step = work / steps
        shared = min(max(worker.steps - own, 0.0), float(steps))
        longer = shared * max(step - worker.step_s, 0.0)
        work = shared * max(step, worker.step_s) + (steps - shared) * step
        behind = sum(len(rank.queue) for rank in worker.seats if rank is not seat) if longer else 0
        return wait, work, longer * behind

    def _decode_row(self, seat: _Seat, tokens: int, held: int, output: float, now: float) -> _Row:
        """Generating at a seat: pull what is missing, wait for room, then slow down those beside it."""
        spec = seat.worker.spec
        decode_s = self.estimator.decode_step_s
        weight = self.settings.token_weight
        batch = len(seat.running)
        size = tokens + int(output / 2)
        token = decode_s(spec.id, batch + 1, seat.running_tokens + size)
        before = decode_s(spec.id, batch, seat.running_tokens) if batch else 0.0
        beside = batch
        if spec.ranks > 1:
            group = 0.0
            beside = 0
            for rank in seat.worker.seats:
                if rank.running:
                    beside += len(rank.running)
                    group = max(group, decode_s(spec.id, len(rank.running), rank.running_tokens))
            token = max(token, group)
            before = group
        pull = self.estimator.transfer_s(spec.id, tokens - held) if tokens > held else 0.0
        wait = self._room(seat, tokens + int(output), token, output)
        others = weight * beside * output * max(token - before, 0.0)
        first = wait + pull + 0.5 * before + token
        cost = first + weight * output * token + others
        return (cost, wait, 0.0, pull, first, token, others, 0.0, held, 0, 0, 0, False)

    def _room(self, seat: _Seat, need: int, token: float, output: float) -> float:
        """Seconds until a seat has a slot and room for `need` tokens, by the completions to expect; 0 if it has."""
        spec = seat.worker.spec
        booked = len(seat.running) + len(seat.queue)
        short = seat.resident + need - spec.capacity_tokens
        slots = booked + 1 - spec.max_sequences
        if (short <= 0 and slots <= 0) or not booked:
            return 0.0
        # A booked sequence has half its answer left in the mean, so all of them are through in that time.
        half_s = 0.5 * output * token
        return half_s * max(short / max(seat.resident, 1), slots / booked, 1.0 / booked)

    def _both_row(self, seat: _Seat, row: _Row, tokens: int, output: float, now: float) -> _Row:
        """A row of prefill with generation at the same seat added to it."""
        weight = self.settings.token_weight
        spec = seat.worker.spec
        decode_s = self.estimator.decode_step_s
        batch = len(seat.running)
        wait, work = row[1], row[3]
        token = decode_s(spec.id, batch + 1, seat.running_tokens + tokens + int(output / 2))
        before = decode_s(spec.id, batch, seat.running_tokens) if batch else 0.0
        room = self._room(seat, tokens + int(output), token, output)
        # While the prompt is read, every sequence beside it waits for the longer steps.
        others = row[6] + weight * batch * (output * max(token - before, 0.0) + work)
        first = row[4] + room
        cost = first + weight * output * token + others
        return (cost, wait + room, row[2], work, first, token, others, 0.0, *row[8:])

    def _with_risk(self, seat: _Seat, row: _Row, pool: _Pool, now: float) -> _Row:
        """The row with what the seat's failures make likely to be lost: this attempt and a first token elsewhere.

        A half-open worker is asked for one request whatever its risk: else it might never come back.
        """
        if self.health.state(seat.name.worker, now) == "probing":
            return row
        risk = self.health.risk(seat.name.worker, now)
        if risk <= 0.0:
            seat.worker.doubted = False
            return row
        lost = risk * (row[4] + (pool.first_token_s or 0.0)) / max(1.0 - risk, 0.05)
        return (row[0] + lost, *row[1:7], lost, *row[8:])

    # Bookings

    def _book(self, booking: _Booking, now: float) -> None:
        seat = booking.seat
        self._booked[booking.role][booking.request] = booking
        if not seat.queue and not seat.running:
            seat.alive_at = now
        if booking.role != "decode":
            if not seat.queue:
                booking.alone = True
                seat.head_at = booking.ready_at
                seat.sample_at = booking.ready_at
                seat.sample = []
            seat.queue[booking.request] = booking
            seat.queue_s += booking.service_s
            seat.queue_tokens += booking.new
            self._soon.stored(seat.name, "device", booking.marks)
        booking.resident = booking.tokens + (int(booking.output / 2) if booking.role != "prefill" else 0)
        seat.resident += booking.resident
        if booking.role == "decode":
            self._start(booking, now)

    def _start(self, booking: _Booking, now: float) -> None:
        """It generates from now on."""
        seat = booking.seat
        _sum_areas(seat, now)
        seat.running[booking.request] = booking
        seat.running_tokens += booking.resident

    def _unqueue(self, booking: _Booking, now: float) -> bool:
        """Take a prompt out of the queue; False if it was not in it."""
        seat = booking.seat
        if seat.queue.pop(booking.request, None) is None:
            return False
        self._soon.removed(seat.name, "device", booking.marks)
        seat.queue_tokens -= booking.new
        seat.queue_s = seat.queue_s - booking.service_s if seat.queue else 0.0
        seat.prompt_at = now
        return True

    def _drop(self, booking: _Booking, now: float) -> None:
        """End a booking, wherever it stands."""
        seat = booking.seat
        del self._booked[booking.role][booking.request]
        head = next(iter(seat.queue), None)
        if self._unqueue(booking, now):
            seat.sample_at = None
            if head == booking.request:
                seat.head_at = now
        elif booking.request in seat.running:
            _sum_areas(seat, now)
            del seat.running[booking.request]
            seat.running_tokens -= booking.resident
        seat.resident -= booking.resident

    # What workers tell

    def prefilled(self, request_id: str, now: float, fetch_s: float | None = None) -> bool:
        """The prompt has been read: its first token is there. `fetch_s`: seconds that fetching its cached blocks took.

        The booking of role `prefill` ends; one of `both` turns to generation. False if there is none that waits for it.
        """
        booking = self._booked["prefill"].get(request_id) or self._booked["both"].get(request_id)
        if booking is None or request_id not in booking.seat.queue:
            return False
        seat = booking.seat
        self._signed(seat, now)
        if fetch_s is not None and booking.fetched is not None:
            if booking.alone and seat.sample_at is not None and not seat.sample:
                seat.sample_at = booking.booked_at + fetch_s
            self.estimator.saw_fetch(seat.name.worker, *booking.fetched, fetch_s, now)
        seat.head_at = now
        self._unqueue(booking, now)
        self._learn_prefill(booking, now)
        self.health.succeeded(seat.name.worker, now, booking.booked_at)
        if booking.role == "both":
            self._start(booking, now)
            booking.generated = 1
            booking.reported_at = now
            booking.area_sequences, booking.area_tokens = seat.area_sequences, seat.area_tokens
        else:
            del self._booked["prefill"][request_id]
            seat.resident -= booking.resident
        return True

    def _learn_prefill(self, booking: _Booking, now: float) -> None:
        """Measure service times over a run of prompts, since an engine's steps mix the end of one with the next.

        A run starts with an idle seat, or where the last one ended, and ends with an idle seat or after several chunks.
        What the bounds cut wrongly is a part of one chunk, of either sign. The run's seconds are shared as expected.
        """
        seat = booking.seat
        spec = seat.worker.spec
        if seat.sample_at is None:
            seat.sample_at, seat.sample = now, []
            return
        seat.sample.append(booking)
        if seat.queue and sum(b.new for b in seat.sample) < _SAMPLE_CHUNKS * spec.chunk_tokens:
            return
        seconds = now - seat.sample_at
        expected = [self.estimator.prefill_s(spec.id, b.new, b.cached, spec.chunk_tokens) for b in seat.sample]
        if seat.running:
            # Sequences beside the prompts lengthen each step by their decode.
            per_step = self.estimator.decode_step_s(spec.id, len(seat.running), seat.running_tokens)
            per_step -= self.estimator.decode_step_s(spec.id, 0, 0)
            seconds -= sum(math.ceil(b.new / spec.chunk_tokens) for b in seat.sample) * max(per_step, 0.0)
        # In lockstep a short chunk lasts as long as the longest beside it, and says nothing about itself.
        whole = spec.ranks == 1 or all(b.new >= spec.chunk_tokens for b in seat.sample)
        total = sum(expected)
        if seconds > 0.0 and total > 0.0 and whole:
            for b, share in zip(seat.sample, expected, strict=True):
                self.estimator.saw_prefill(spec.id, b.new, b.cached, spec.chunk_tokens, seconds * share / total, now)
        seat.sample_at, seat.sample = now, []

    def progress(self, request_id: str, tokens: int, now: float) -> bool:
        """So many tokens have been generated so far. False for an unknown request."""
        booking = self._booked["decode"].get(request_id) or self._booked["both"].get(request_id)
        if booking is None:
            return False
        if request_id in booking.seat.queue:
            self.prefilled(request_id, now)
        seat = booking.seat
        _sum_areas(seat, now)
        self._signed(seat, now)
        seat.reports = True
        elapsed = now - booking.reported_at
        # Only spans of pure decode count, and in lockstep only the rank with the longest steps speaks for its own.
        if (
            booking.reported_at >= 0.0
            and tokens > booking.generated
            and elapsed > 0.0
            and seat.prompt_at < booking.reported_at
            and not seat.queue
            and now - seat.measured_at >= _DECODE_SAMPLE_S
            and seat.running_tokens >= max(rank.running_tokens for rank in seat.worker.seats)
        ):
            sequences = round((seat.area_sequences - booking.area_sequences) / elapsed)
            resident = round((seat.area_tokens - booking.area_tokens) / elapsed)
            step_s = elapsed / (tokens - booking.generated)
            self.estimator.saw_decode(seat.name.worker, sequences, resident, step_s, now)
            seat.measured_at = now
        booking.generated = max(tokens, booking.generated)
        booking.reported_at = now
        booking.area_sequences, booking.area_tokens = seat.area_sequences, seat.area_tokens
        more = booking.tokens + max(int(booking.output / 2), tokens) - booking.resident
        if more > 0:
            booking.resident += more
            seat.resident += more
            seat.running_tokens += more
        return True

    def finished(self, request_id: str, now: float) -> bool:
        """The request is through: all its bookings end. False for an unknown request."""
        found = False
        for role in ROLES:
            booking = self._booked[role].get(request_id)
            if booking is None:
                continue
            found = True
            seat = booking.seat
            self._signed(seat, now)
            if booking.generated and booking.reported_at >= 0.0:
                step = self.estimator.decode_step_s(seat.name.worker, len(seat.running), seat.running_tokens)
                output = booking.generated + int(
                    min(max(now - booking.reported_at, 0.0) / step, booking.generated + 1e3)
                )
                self.sessions.saw_output(booking.session, output)
                if booking.session is not None and self.sessions.bound(booking.session, now) == seat.name:
                    self.sessions.bind(booking.session, seat.name, booking.tokens + output, now)
            self._drop(booking, now)
            self.health.succeeded(seat.name.worker, now, booking.booked_at)
        return found

    def cancelled(self, request_id: str, now: float) -> bool:
        """The client went away: all the request's bookings end. False for an unknown request."""
        found = False
        for role in ROLES:
            booking = self._booked[role].get(request_id)
            if booking is not None:
                found = True
                self._drop(booking, now)
                self.health.cancelled(booking.seat.name.worker, now, booking.booked_at)
        return found

    def failed(self, request_id: str, role: Role, now: float, reason: str) -> bool:
        """The worker failed the request: its booking in the role ends, at its cost. False for an unknown one."""
        booking = self._booked[role].get(request_id)
        if booking is None:
            return False
        self._drop(booking, now)
        booking.seat.worker.doubted = True
        self.health.failed(booking.seat.name.worker, now, reason, booking.booked_at)
        return True

    def _signed(self, seat: _Seat, now: float) -> None:
        """The worker gave a sign of life."""
        for rank in seat.worker.seats:
            rank.alive_at = now

    def tick(self, now: float) -> None:
        """Look for stalls: a seat that owes something and has been silent for far longer than expected. Call it often.

        What was learned of workers that nobody asks any more fades here too.
        """
        self.estimator.settle(now)
        for state in self._workers.values():
            for seat in state.seats:
                if seat.queue:
                    # What was thought to be cached may not be.
                    head = next(iter(seat.queue.values()))
                    whole = self.estimator.prefill_s(state.spec.id, head.tokens, 0, state.spec.chunk_tokens)
                    due = max(seat.head_at, seat.alive_at) + self.health.patience(whole)
                elif seat.running and seat.reports:
                    due = seat.alive_at + self.health.patience(1.0)
                elif seat.running:
                    longest = max(booking.output for booking in seat.running.values())
                    step = self.estimator.decode_step_s(state.spec.id, len(seat.running), seat.running_tokens)
                    due = seat.alive_at + self.health.patience(longest * step)
                else:
                    continue
                if now > due:
                    state.doubted = True
                    self.health.stalled(state.spec.id, now)
                    self._signed(seat, now)
                    break

    def load(self, worker: WorkerId) -> Load:
        """What is booked at a worker; KeyError if it is not in the fleet."""
        state = self._workers.get(worker)
        if state is None:
            raise KeyError(f"worker {worker!r} is not in the fleet")
        return Load(
            prompts=sum(len(seat.queue) for seat in state.seats),
            prompt_s=sum(seat.queue_s for seat in state.seats),
            sequences=sum(len(seat.running) for seat in state.seats),
            resident_tokens=sum(seat.resident for seat in state.seats),
        )


def _backlog(seat: _Seat, now: float) -> float:
    """Seconds of work that a seat with a queue has left."""
    head = next(iter(seat.queue.values())).service_s
    ran = max(now - seat.head_at, 0.0)
    return max(head - ran, _LEAST_SHARE * head, _LATE_SHARE * (ran - head)) + max(seat.queue_s - head, 0.0)


def _beyond(external: tuple[int, int, int], ahead: int) -> tuple[int, int, int]:
    """Blocks per tier that are left when the first `ahead` of them need no fetching."""
    left = []
    for count in external:
        used = min(count, ahead)
        ahead -= used
        left.append(count - used)
    return left[0], left[1], left[2]


def _sum_areas(seat: _Seat, now: float) -> None:
    """Carry the integrals of the batch and its KV on to now."""
    elapsed = now - seat.area_at
    if elapsed > 0.0:
        seat.area_sequences += elapsed * len(seat.running)
        seat.area_tokens += elapsed * seat.running_tokens
        seat.area_at = now


def _terms(row: _Row) -> Terms:
    """A row in the words that others read."""
    fetched = {tier: count for tier, count in zip(EXTERNAL_TIERS, row[9:12], strict=True) if count}
    return Terms(
        wait_s=row[1],
        fetch_s=row[2],
        work_s=row[3],
        first_token_s=row[4],
        token_s=row[5],
        others_s=row[6],
        risk_s=row[7],
        cost_s=row[0],
        device_tokens=row[8],
        fetch_tokens=fetched,
    )
