# SPDX-License-Identifier: Apache-2.0
"""Placement in units of time: what a request waits, fetches and works at each candidate, and takes from others.

What is booked where, and what that comes to, is in `_seats`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ._candidates import Candidates, Row, terms_of
from ._health import Health
from ._index import Matches, PrefixIndex
from ._learning import Estimator
from ._profile import Profile
from ._seats import Booking, Flow, Pool, SeatState, WorkerState, backlog, lockstep_parts, lockstep_span, sum_areas
from ._sessions import Sessions
from ._types import (
    EXTERNAL_TIERS,
    ROLES,
    Booked,
    Decision,
    Explanation,
    ExternalTier,
    NoWorkerError,
    Request,
    Role,
    Seat,
    Tier,
    Worker,
    WorkerId,
)

__all__ = ["Load", "Placer", "Settings"]

#: The pool's utilisation is bounded here, since rho / (1 - rho) has a pole at 1.
_UTILISATION_CAP = 0.9
#: What booked prompts will leave in the cache is known by every so manieth of their blocks.
_STRIDE = 16
#: A measurement of prefill ends with an idle seat or after so many chunks of prompts, whichever comes first.
_SAMPLE_CHUNKS = 4
#: The least seconds between two measurements of decode at one seat.
_DECODE_SAMPLE_S = 0.25
#: What was never measured may take so many times as long as the profile says.
_UNSURE = 8.0
#: Silence over a gap between two ticks that is longer than this (seconds) is the caller's.
_GAP_S = 10.0
#: So many prefill workers that have left are remembered: what they have read last may still be on its way.
_LEFT = 1000
#: A prefill worker with more than this share of its KV waiting to be pulled may have no room for the next prompt.
_FULL_SHARE = 0.9


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
        if index is not None and index.block_size != block_size:
            raise ValueError(f"block_size is {block_size}, but the index has blocks of {index.block_size} tokens")
        self.settings = settings if settings is not None else Settings()
        self.block_size = block_size
        self.index = index if index is not None else PrefixIndex(block_size)
        self.estimator = Estimator(profile)
        self.health = health if health is not None else Health()
        self.sessions = Sessions(ttl_s=self.settings.session_ttl_s)
        self._tiers: tuple[ExternalTier, ...] = tuple(t for t in EXTERNAL_TIERS if t in profile.tiers)
        self._workers: dict[WorkerId, WorkerState] = {}
        self._pools: dict[Role, Pool] = {role: Pool(self.settings.load_window_s) for role in ROLES}
        self._booked: dict[Role, dict[str, Booking]] = {role: {} for role in ROLES}
        self._soon = PrefixIndex(block_size * _STRIDE)
        #: Placements, which ties take turns by, and questions, `explain`'s among them.
        self._turn = 0
        self._asked = 0
        #: Running mean of measured over expected time of prompts, at least 1: how far the estimates may be trusted.
        self._late = _UNSURE
        self._ticked = -math.inf
        #: Decoders live, and the workers of the two roles are not all of one transfer group.
        self._apart = False
        #: The transfer groups of prefill workers that have left.
        self._left: dict[WorkerId, str | None] = {}

    # Workers and their caches

    def add_worker(self, worker: Worker, now: float) -> None:
        """Let a worker take part; ValueError if one of its name does already."""
        if worker.id in self._workers:
            raise ValueError(f"worker {worker.id!r} is in the fleet already")
        self.health.add(worker, now)
        state = WorkerState(worker)
        for rank in range(worker.ranks):
            seat = SeatState(Seat(worker.id, rank), state, Flow(self.settings.load_window_s), area_at=now, alive_at=now)
            state.seats.append(seat)
            self.index.add_seat(seat.name)
            self._soon.add_seat(seat.name)
        self._workers[worker.id] = state
        self._left.pop(worker.id, None)
        pool = self._pools[worker.role]
        pool.workers[worker.id] = state
        self._changed(pool)

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
        self._changed(pool)
        if state.spec.role == "prefill":
            self._left[worker] = state.spec.transfer_group
            if len(self._left) > _LEFT:
                del self._left[next(iter(self._left))]
        self.sessions.drop_worker(worker)
        self.health.drop(worker)
        self.estimator.forget(worker)
        return list(lost)

    def workers(self) -> list[Worker]:
        """The workers of the fleet, in the order in which they came."""
        return [state.spec for state in self._workers.values()]

    def stored(self, worker: WorkerId, rank: int, tier: Tier, blocks: Sequence[int]) -> None:
        """Blocks came into a tier of a rank. Events of workers that are not in the fleet are ignored."""
        seat = self._seat(worker, rank)
        if seat is not None:
            seat.events |= tier == "device"
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

    def _changed(self, pool: Pool) -> None:
        """A worker came or left: note the transfer groups, and where each seat stands in the index's lists."""
        pool.changed()
        decoders, readers = self._pools["decode"].workers, self._pools["prefill"].workers
        groups = {state.spec.transfer_group for state in (*decoders.values(), *readers.values())}
        self._apart = bool(decoders) and len(groups) > 1
        for i, name in enumerate(self.index.seats):
            if name.worker in self._workers:
                self._workers[name.worker].seats[name.rank].place = i

    def _seat(self, worker: WorkerId, rank: int) -> SeatState | None:
        state = self._workers.get(worker)
        return state.seats[rank] if state is not None and 0 <= rank < len(state.seats) else None

    # Decisions

    def place(self, request: Request, role: Role, now: float, *, explain: bool = False) -> Decision:
        """Choose a seat and book the request there; `explain`: the decision lists every candidate.

        NoWorkerError if no worker of the role lives, or none that pairs with a worker of the other role: of the
        prefill worker's transfer group for `decode`, of any decoder's for `prefill`, where decoders live. ValueError if
        the request is booked in this role already, for an unknown role, and for a time that is no number.
        """
        _check(role, now)
        if request.id in self._booked[role]:
            raise ValueError(f"request {request.id!r} is booked as {role} already")
        seats, refused = self._candidates(request, role, now)
        rows: list[tuple[Row, SeatState]] | None = [] if explain else None
        row, seat, output, runner_up = self._choose(request, role, seats, now, rows)
        self._turn += 1
        booking = Booking(request.id, role, seat, request.tokens, request.session, now, output)
        terms = terms_of(row)
        fetched = sum(terms.fetch_tokens.values())
        booking.cached = terms.device_tokens + fetched
        booking.first_token_s = terms.first_token_s
        booking.ready_at = now + terms.fetch_s
        if role == "decode":
            booking.service_s = terms.work_s
            booking.source = self._workers.get(request.prefill_worker)
        else:
            booking.new = request.tokens - booking.cached
            spec = seat.worker.spec
            booking.service_s = self.estimator.prefill_s(spec.id, booking.new, booking.cached, spec.chunk_tokens)
            booking.marks = request.blocks[_STRIDE - 1 :: _STRIDE]
            if fetched:
                if seat.link_until <= now and len(terms.fetch_tokens) == 1:
                    booking.fetched = next(iter(terms.fetch_tokens.items()))
                seat.link_until = booking.ready_at
        booking.resident = request.tokens + (int(output / 2) if role != "prefill" else 0)
        self._book(booking, now)
        self._pools[role].arrived(booking, now)
        note = ""
        if request.session is not None and role != "prefill":
            bound = self.sessions.bound(request.session, now)
            if bound is not None and bound != seat.name:
                note = f"moved from {bound.worker!r}"
            self.sessions.bind(request.session, seat.name, request.tokens, now)
        if self.health.state(seat.name.worker, now) != "in":
            probe = self.health.probe(seat.name.worker, now, self._answer_s(booking))
            note = "probe" if probe else "last"
        # What is on the device now may be in a slower tier when its turn comes, so the bound is only what was refused.
        most = fetched if role == "decode" or row[12] else request.tokens
        listed = Candidates(rows, refused) if rows is not None else ()
        return Decision(request.id, role, seat.name.worker, seat.name.rank, terms, most, note, runner_up, listed)

    def explain(self, request: Request, role: Role, now: float) -> Explanation:
        """Every candidate with its terms, the cheapest first; nothing is booked. Errors as for `place`."""
        _check(role, now)
        seats, refused = self._candidates(request, role, now)
        rows: list[tuple[Row, SeatState]] = []
        self._choose(request, role, seats, now, rows)
        return Explanation(request.id, role, tuple(Candidates(rows, refused)))

    def _candidates(
        self, request: Request, role: Role, now: float
    ) -> tuple[list[SeatState], list[tuple[SeatState, str]]]:
        """The seats that may be asked, and those that may not with the reason."""
        pool = self._pools[role]
        if not pool.workers:
            roles = ", ".join(f"{len(p.workers)} {r}" for r, p in self._pools.items() if p.workers) or "none at all"
            raise NoWorkerError(f"request {request.id!r}: no worker of role {role} lives (workers: {roles})")
        states = pool.workers
        refused: list[tuple[SeatState, str]] = []
        source = request.prefill_worker
        if role == "decode" and source is not None and (source in self._workers or source in self._left):
            group = self._workers[source].spec.transfer_group if source in self._workers else self._left[source]
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
                    f"worker {source!r} is (others: {', '.join(repr(name) for name in pool.workers)})"
                )
        if role == "prefill" and self._apart:
            states = self._paired(request, states, refused, now)
        if request.tokens > pool.capacity_tokens:
            large = {name: state for name, state in states.items() if state.spec.capacity_tokens >= request.tokens}
            if large:  # else the engine may know better
                refused += [
                    (seat, f"a rank holds {state.spec.capacity_tokens} tokens, the prompt has {request.tokens}")
                    for name, state in states.items()
                    if name not in large
                    for seat in state.seats
                ]
                states = large
        admitted = self.health.admitted(list(states), now)
        if request.avoid:
            admitted = [name for name in admitted if name not in request.avoid] or admitted
        if len(admitted) == len(pool.workers):
            return pool.seats, refused
        allowed = set(admitted)
        refused += [
            (seat, self.health.why(seat.name.worker, now) or "it failed this request before")
            for seat in pool.seats
            if seat.name.worker in states and seat.name.worker not in allowed
        ]
        return [seat for seat in pool.seats if seat.name.worker in allowed], refused

    def _paired(
        self,
        request: Request,
        states: dict[WorkerId, WorkerState],
        refused: list[tuple[SeatState, str]],
        now: float,
    ) -> dict[WorkerId, WorkerState]:
        """The prefill workers whose KV a decoder can pull, if possible one that may be asked; others are refused."""
        decoders = self._pools["decode"].workers
        living = {state.spec.transfer_group for state in decoders.values()}
        readers = {state.spec.transfer_group for state in states.values()}
        if not living & readers:
            raise NoWorkerError(
                f"request {request.id!r}: no decoder of transfer group {_either(readers)} lives, as the prefill "
                f"workers are of (decoders: {_either(living)})"
            )
        admitted = self.health.admitted(list(decoders), now)
        asked = {decoders[name].spec.transfer_group for name in admitted if name not in request.avoid}
        for groups, why in ((living, "lives"), (asked, "may be asked")):
            kept = {name: state for name, state in states.items() if state.spec.transfer_group in groups}
            if kept and len(kept) < len(states):
                refused += [
                    (seat, f"no decoder of transfer group {state.spec.transfer_group!r} {why}")
                    for name, state in states.items()
                    if name not in kept
                    for seat in state.seats
                ]
                states = kept
        return states

    def _choose(
        self,
        request: Request,
        role: Role,
        seats: list[SeatState],
        now: float,
        rows: list[tuple[Row, SeatState]] | None,
    ) -> tuple[Row, SeatState, float, float]:
        """The cheapest seat and its row, the expected output, the second cheapest cost; rows go to `rows` if given.

        Ties go to the first seat in an order that moves on by one with each placement.
        """
        self._asked += 1
        told = request.cached
        matches = self.index.match(request.blocks, now) if told is None else self._told(told)
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
        best: Row | None = None
        second = math.inf
        winner = seats[0]
        count = len(seats)
        first = self._turn % count
        for seat in seats[first:] + seats[:first] if first else seats:
            i = seat.place
            cached = device[i] * size
            if bound is not None and not seat.events and bound == seat.name:
                cached = self.sessions.resident(request.session, now)
            if role == "decode":
                row = self._decode_row(seat, tokens, min(cached, tokens), output, now)
            else:
                external = (host[i], disk[i], store[i])
                ahead = soon[i] * _STRIDE - device[i]
                if ahead > 0:
                    cached, external = max(cached, soon[i] * _STRIDE * size), _beyond(external, ahead)
                row = self._prefill_row(seat, tokens, most, min(cached, most), external, now, fresh)
                if role == "both":
                    row = self._both_row(seat, row, tokens, output, now)
            risk = self.health.risk(seat.name.worker, now)
            if risk > 0.0:
                row = self._with_risk(seat, row, risk, pool, now)
            if rows is not None:
                rows.append((row, seat))
            if best is None:
                best, winner = row, seat
            elif row[0] < best[0]:
                second = best[0]
                best, winner = row, seat
            elif row[0] < second:
                second = row[0]
        assert best is not None
        return best, winner, output, second

    def _told(self, cached: Mapping[Seat, tuple[int, int, int, int]]) -> Matches:
        """What a live index says, in the order of our own; a rank that it knows blocks of tells of its cache."""
        matches = self.index.told(cached)
        for (worker, rank), counts in cached.items():
            if counts[0] and (seat := self._seat(worker, rank)) is not None:
                seat.events = True
        return matches

    def _prefill_row(
        self,
        seat: SeatState,
        tokens: int,
        most: int,
        cached: int,
        external: tuple[int, int, int],
        now: float,
        fresh: tuple[float, float],
    ) -> Row:
        """Reading the prompt at a seat: the cut between fetch and recompute that costs least."""
        spec = seat.worker.spec
        wait = backlog(seat, now) if seat.queue else 0.0
        # M/G/1, first come first served: work s behind a backlog u delays those to come by
        # lambda s (u + s/2) / (1 - rho), the growth of the value function lambda u^2 / (2 (1 - rho)). What comes is the
        # seat's own returning prompts, and its share of those that may go anywhere.
        rate, busy = seat.returning.rates(now)
        share = self.settings.others_weight * (rate + fresh[0]) / (1.0 - min(busy + fresh[1], _UTILISATION_CAP))
        best = self._cut(seat, tokens, cached, (0, 0, 0), wait, 0.0, share, now)
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
            row = self._cut(seat, tokens, cached, (taken[0], taken[1], taken[2]), wait, fetch, share, now)
            if row[0] < best[0]:
                best = row
        return best if sum(best[9:12]) == total else (*best[:12], True)

    def _cut(
        self,
        seat: SeatState,
        tokens: int,
        cached: int,
        taken: tuple[int, int, int],
        wait: float,
        fetch: float,
        share: float,
        now: float,
    ) -> Row:
        """The row in which so many tokens are fetched from each tier, and those behind them read."""
        spec = seat.worker.spec
        known = cached + taken[0] + taken[1] + taken[2]
        own = work = self.estimator.prefill_s(spec.id, tokens - known, known, spec.chunk_tokens)
        slower = 0.0
        if spec.ranks > 1:
            wait, work, slower = self._lockstep(seat, tokens - known, own, now)
        others = share * own * (wait + 0.5 * own) + slower
        first = max(wait, fetch) + work
        return (first + others, wait, fetch, work, first, 0.0, others, 0.0, cached, *taken, False)

    def _lockstep(self, seat: SeatState, new: int, work: float, now: float) -> tuple[float, float, float]:
        """Wait, work and what others lose, where each step of the ranks lasts as long as the slowest rank's.

        A prompt begins after the present step. From then on a rank has so many steps to go, each of so many seconds by
        itself; the group's k-th step lasts as long as the longest among the ranks that have k steps. So work that fits
        below what others do anyway takes no time.
        """
        worker = seat.worker
        rank = seat.name.rank
        if worker.asked != self._asked:
            worker.asked = self._asked
            worker.present_s, worker.parts = lockstep_parts(worker, now)
            worker.reading = sorted(
                ((step, steps, at) for at, (step, steps, _, _) in worker.parts.items() if steps), reverse=True
            )
        before = worker.reading
        step, steps, filled, late = worker.parts.get(rank, (0.0, 0.0, 0.0, 0.0))
        more = max(filled + new / worker.spec.chunk_tokens, 1.0)
        after = [part for part in before if part[2] != rank]
        longest = max((part[1] for part in after), default=0.0)
        bisect.insort(after, ((step * steps + work) / more, more, rank), key=lambda part: -part[0])
        wait = lockstep_span(before, steps)
        work = max(lockstep_span(after, more) - wait, 0.0)
        wait += worker.present_s + late
        longer = lockstep_span(after, longest) - lockstep_span(before, longest)
        lost = longer * sum(len(other.queue) for other in worker.seats if other is not seat) if longer > 0.0 else 0.0
        if worker.spec.role == "both":
            end = max(longest, more)
            running = sum(len(other.running) for other in worker.seats)
            lost += (
                self.settings.token_weight * running * max(lockstep_span(after, end) - lockstep_span(before, end), 0.0)
            )
        return wait, work, lost

    def _step(self, seat: SeatState, tokens: int) -> tuple[float, float, int]:
        """A decode step with one more sequence of so many tokens, one of now, and how many sequences run beside it."""
        spec = seat.worker.spec
        decode_s = self.estimator.decode_step_s
        batch = len(seat.running)
        token = decode_s(spec.id, batch + 1, seat.running_tokens + tokens)
        if spec.ranks == 1:
            return token, decode_s(spec.id, batch, seat.running_tokens) if batch else 0.0, batch
        before, beside = 0.0, 0
        for rank in seat.worker.seats:
            if rank.running:
                beside += len(rank.running)
                before = max(before, decode_s(spec.id, len(rank.running), rank.running_tokens))
        return max(token, before), before, beside

    def _decode_row(self, seat: SeatState, tokens: int, held: int, output: float, now: float) -> Row:
        """Generating at a seat: pull what is missing, wait for room, then slow down those beside it."""
        spec = seat.worker.spec
        weight = self.settings.token_weight
        token, before, beside = self._step(seat, tokens + int(output / 2))
        pull = self.estimator.transfer_s(spec.id, tokens - held) if tokens > held else 0.0
        wait = self._room(seat, tokens + int(output), token, output)
        others = weight * beside * output * max(token - before, 0.0)
        first = wait + pull + 0.5 * before + token
        cost = first + weight * output * token + others
        return (cost, wait, 0.0, pull, first, token, others, 0.0, held, 0, 0, 0, False)

    def _room(self, seat: SeatState, need: int, token: float, output: float) -> float:
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

    def _both_row(self, seat: SeatState, row: Row, tokens: int, output: float, now: float) -> Row:
        """A row of prefill with generation at the same seat added to it."""
        weight = self.settings.token_weight
        wait, work = row[1], row[3]
        token, before, beside = self._step(seat, tokens + int(output / 2))
        room = self._room(seat, tokens + int(output), token, output)
        # While the prompt is read, every sequence beside it waits for the longer steps; in lockstep that is counted.
        longer = work if seat.worker.spec.ranks == 1 else 0.0
        others = row[6] + weight * beside * (output * max(token - before, 0.0) + longer)
        first = row[4] + room
        cost = first + weight * output * token + others
        return (cost, wait + room, row[2], work, first, token, others, 0.0, *row[8:])

    def _with_risk(self, seat: SeatState, row: Row, risk: float, pool: Pool, now: float) -> Row:
        """The row with what the seat's failures make likely to be lost: this attempt and a first token elsewhere.

        A half-open worker is asked for one request whatever its risk: else it might never come back.
        """
        if self.health.state(seat.name.worker, now) == "probing":
            return row
        lost = risk * (row[4] + (pool.first_token_s or 0.0)) / max(1.0 - risk, 0.05)
        return (row[0] + lost, *row[1:7], lost, *row[8:])

    # Bookings

    def _book(self, booking: Booking, now: float) -> None:
        seat = booking.seat
        self._booked[booking.role][booking.request] = booking
        if not seat.queue and not seat.running:
            seat.alive_at = now
        waits = booking.role == "prefill" or (booking.role == "both" and not booking.generated)
        if waits:
            if not any(rank.queue for rank in seat.worker.seats):
                seat.worker.step_at = now
            else:
                seat.fresh_tokens += booking.new
            if not seat.queue:
                booking.alone = True
                seat.head_at = seat.quiet_at = seat.sample_at = booking.ready_at
                seat.sample = []
            seat.queue[booking.request] = booking
            seat.queue_s += booking.service_s
            seat.queue_tokens += booking.new
            self._soon.stored(seat.name, "device", booking.marks)
        seat.resident += booking.resident
        if booking.source is not None:
            booking.source.held += booking.tokens
        if not waits:
            self._start(booking, now)

    def booking(self, request_id: str, role: Role) -> Booked | None:
        """What another placer needs to book the same; None where the request is not booked in the role.

        ValueError for an unknown role.
        """
        _check(role, 0.0)
        booking = self._booked[role].get(request_id)
        if booking is None:
            return None
        seat = booking.seat.name
        source = booking.source
        return Booked(
            id=request_id,
            role=role,
            worker=seat.worker,  # type: ignore[arg-type]  # a fleet of several placers has names that can be sent
            rank=seat.rank,
            tokens=booking.tokens,
            new=booking.new,
            cached=booking.cached,
            output=booking.output,
            resident=booking.resident,
            service_s=booking.service_s,
            fetch_s=booking.ready_at - booking.booked_at,
            first_token_s=booking.first_token_s,
            session=booking.session,
            marks=list(booking.marks),
            prefill_worker=source.spec.id if source is not None else None,  # type: ignore[arg-type]
            generated=booking.generated,
        )

    def adopt(self, booked: Booked, now: float, *, arrived: bool = True) -> bool:
        """Book what another placer has booked; True if that changed anything.

        What is booked at another seat is moved; what is booked there already stays as it is, and what is booked at a
        worker or a rank that is not in the fleet is ignored. `arrived`: it was placed just now; else it is only learnt
        of late, and counts neither as an arrival nor as a probe, nor against a session's binding. ValueError for a time
        that is no number.
        """
        _check(booked.role, now)
        seat = self._seat(booked.worker, booked.rank)
        if seat is None:
            return False
        before = self._booked[booked.role].get(booked.id)
        if before is not None:
            if before.seat is seat:
                return False
            self._drop(before, now)
            self.health.cancelled(before.seat.name.worker, now, before.booked_at)
        booking = Booking(booked.id, booked.role, seat, booked.tokens, booked.session, now, booked.output)
        booking.new, booking.cached, booking.resident = booked.new, booked.cached, booked.resident
        booking.service_s, booking.first_token_s = booked.service_s, booked.first_token_s
        booking.ready_at = now + booked.fetch_s
        booking.marks, booking.generated = booked.marks, booked.generated
        if booked.role == "decode":
            if booked.prefill_worker is not None and not booked.generated:
                booking.source = self._workers.get(booked.prefill_worker)
        elif booked.fetch_s > 0.0:
            seat.link_until = max(seat.link_until, booking.ready_at)
        self._book(booking, now)
        if not arrived and booking.request in seat.queue:
            seat.sample_at = None  # it may have been read in part already
        if arrived and before is None:
            self._turn += 1
            self._pools[booked.role].arrived(booking, now)
        session = booked.session
        if session is not None and booked.role != "prefill" and (arrived or self.sessions.bound(session, now) is None):
            self.sessions.bind(session, seat.name, booked.tokens, now)
        if arrived and self.health.state(seat.name.worker, now) != "in":
            self.health.probe(seat.name.worker, now, self._answer_s(booking))
        return True

    def requests(self) -> list[str]:
        """The ids of all that is booked, in the order of booking within a role."""
        return list(dict.fromkeys(itertools.chain.from_iterable(self._booked.values())))

    def _start(self, booking: Booking, now: float) -> None:
        """It generates from now on."""
        seat = booking.seat
        sum_areas(seat, now)
        seat.running[booking.request] = booking
        seat.running_tokens += booking.resident

    def _answer_s(self, booking: Booking) -> float:
        """Seconds after which the first token of what was booked just now is expected, with the prompt unread yet."""
        expected = booking.first_token_s
        if booking.role == "decode":
            reading = self._booked["prefill"].get(booking.request)
            expected += self._reads_s(booking) if reading is None else reading.first_token_s
        return self._late * expected

    def _reads_s(self, booking: Booking) -> float:
        """Seconds that a decoder takes to read the prompt itself; 0 where there are others to do that."""
        if self._pools["prefill"].workers:
            return 0.0
        spec = booking.seat.worker.spec
        return self.estimator.prefill_s(spec.id, booking.tokens, 0, spec.chunk_tokens)

    def _pulled(self, booking: Booking) -> None:
        """The worker that read the prompt need not hold it any more."""
        if booking.source is not None:
            booking.source.held -= booking.tokens
            booking.source = None

    def _unqueue(self, booking: Booking, now: float) -> bool:
        """Take a prompt out of the queue; False if it was not in it."""
        seat = booking.seat
        if seat.queue.pop(booking.request, None) is None:
            return False
        self._soon.removed(seat.name, "device", booking.marks)
        seat.queue_tokens -= booking.new
        seat.fresh_tokens = min(seat.fresh_tokens, seat.queue_tokens)
        seat.queue_s = seat.queue_s - booking.service_s if seat.queue else 0.0
        seat.prompt_at = now
        return True

    def _drop(self, booking: Booking, now: float) -> None:
        """End a booking, wherever it stands."""
        seat = booking.seat
        del self._booked[booking.role][booking.request]
        self._pulled(booking)
        head = next(iter(seat.queue), None)
        spent = self._spent(seat, now) if head == booking.request else 0.0
        if self._unqueue(booking, now):
            seat.sample_at = None
            if head == booking.request:
                seat.head_at = seat.quiet_at = now
                # The next one is allowed the same share less: who gives up at a worker does not wake it.
                if spent > 0.0 and seat.queue:
                    seat.quiet_at -= spent * self._patience(seat)
        elif booking.request in seat.running:
            sum_areas(seat, now)
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
        seat.head_at = seat.quiet_at = now
        self._unqueue(booking, now)
        # One of the ranks' steps has ended, so another one begins, with all that is there.
        seat.worker.step_at = now
        for rank in seat.worker.seats:
            rank.fresh_tokens = 0
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

    def _learn_prefill(self, booking: Booking, now: float) -> None:
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
            seconds -= sum(math.ceil(b.new / spec.chunk_tokens) for b in seat.sample) * per_step
        # In lockstep a short chunk lasts as long as the longest beside it, and says nothing about itself.
        whole = spec.ranks == 1 or all(b.new >= spec.chunk_tokens for b in seat.sample)
        total = sum(expected)
        if seconds > 0.0 and total > 0.0:
            self._late += 0.2 * (min(max(seconds / total, 1.0), _UNSURE) - self._late)
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
        sum_areas(seat, now)
        self._signed(seat, now)
        if not booking.generated and tokens > 0:
            self._pulled(booking)
            self.health.succeeded(seat.name.worker, now, booking.booked_at)
        elapsed = now - booking.reported_at
        if booking.reported_at >= 0.0 and elapsed > 0.0:
            pool = self._pools[booking.role]
            pool.pace_s = elapsed if pool.pace_s is None else pool.pace_s + 0.05 * (elapsed - pool.pace_s)
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

    def cancelled(self, request_id: str, now: float, role: Role | None = None) -> bool:
        """The client went away: all the request's bookings end, or only that in `role`. False for an unknown request.

        ValueError for an unknown role.
        """
        _check(role or "both", now)
        found = False
        for ended in ROLES if role is None else (role,):
            booking = self._booked[ended].get(request_id)
            if booking is not None:
                found = True
                self._drop(booking, now)
                self.health.cancelled(booking.seat.name.worker, now, booking.booked_at)
        return found

    def failed(self, request_id: str, role: Role, now: float, reason: str) -> bool:
        """The worker failed the request: its booking in the role ends, at its cost. False for an unknown one.

        ValueError for an unknown role.
        """
        _check(role, now)
        booking = self._booked[role].get(request_id)
        if booking is None:
            return False
        self._drop(booking, now)
        if booking.session is not None and self.sessions.bound(booking.session, now) == booking.seat.name:
            self.sessions.bind(booking.session, booking.seat.name, 0, now)
        self.health.failed(booking.seat.name.worker, now, reason, booking.booked_at)
        return True

    def _signed(self, seat: SeatState, now: float) -> None:
        """The worker gave a sign of life."""
        for rank in seat.worker.seats:
            rank.alive_at = now

    def tick(self, now: float) -> list[tuple[str, Role]]:
        """Look for stalls: a seat that owes something and has been silent for far longer than expected.

        Returns what is booked at the workers that are found to stand still, with its role, the oldest first. It stays
        booked. Call it every second or so; after a gap of 10 s it is the caller who was silent, and nobody has stalled.
        What was learned of workers that nobody asks any more fades here too.
        """
        self.estimator.settle(now)
        gap = now - self._ticked > _GAP_S
        self._ticked = now
        silent: list[Booking] = []
        for state in self._workers.values():
            if gap:
                self._signed(state.seats[0], now)
            for seat in state.seats:
                due = self._due(seat)
                if due == math.inf:
                    seat.alive_at = now
                elif now > due:
                    # What was booked before the worker was last put out says nothing new.
                    booked = max(b.booked_at for b in (*seat.queue.values(), *seat.running.values()))
                    self.health.stalled(state.spec.id, now, booked)
                    self._signed(seat, now)
                    for rank in state.seats:
                        silent += (*rank.queue.values(), *rank.running.values())
                    break
        silent.sort(key=lambda booking: booking.booked_at)
        return [(booking.request, booking.role) for booking in silent]

    def _due(self, seat: SeatState) -> float:
        """Until when a seat that owes something may be silent; without end where silence says nothing of it."""
        return self._silent_since(seat) + self._patience(seat)

    def _silent_since(self, seat: SeatState) -> float:
        return max(seat.alive_at, seat.quiet_at) if seat.queue else seat.alive_at

    def _spent(self, seat: SeatState, now: float) -> float:
        """The share of a seat's patience that is used up, 0 to 1."""
        patience = self._patience(seat)
        silent = now - self._silent_since(seat)
        return min(silent / patience, 1.0) if silent > 0.0 and 0.0 < patience < math.inf else 0.0

    def _patience(self, seat: SeatState) -> float:
        """How long a seat may be silent; without end where it owes nothing, or its silence says nothing of it."""
        state = seat.worker
        spec = state.spec
        expected = 0.0
        owes = bool(seat.queue)
        if seat.running:
            pace = self._pools[spec.role].pace_s
            if pace is None:
                return math.inf
            expected = pace
            reading = self._booked["prefill"]
            for booking in seat.running.values():
                if booking.generated:
                    owes = True
                elif booking.request not in reading:  # else both legs were sent at once, and the prompt is not read yet
                    owes = True
                    expected += _UNSURE * booking.service_s + self._late * self._reads_s(booking)
        if not owes:
            return math.inf
        if seat.queue:
            head = next(iter(seat.queue.values()))
            # Where both legs are sent at once, what waits to be pulled may have yet to be read.
            sent = self._booked["decode"]
            unread = sum(b.tokens for rank in state.seats for b in rank.queue.values() if b.request in sent)
            if state.held - unread + head.tokens > _FULL_SHARE * spec.capacity_tokens * spec.ranks:
                return math.inf
            # What was thought to be cached may not be.
            expected += self._late * self.estimator.prefill_s(spec.id, head.tokens, 0, spec.chunk_tokens)
        return self.health.patience(expected)

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


def _check(role: str, now: float) -> None:
    if role not in ROLES:
        raise ValueError(f"role must be one of {', '.join(ROLES)}, not {role!r}")
    if not math.isfinite(now):
        raise ValueError(f"now must be a finite number of seconds, not {now!r}")


def _either(groups: set[str | None]) -> str:
    return " or ".join(sorted(repr(group) for group in groups))


def _beyond(external: tuple[int, int, int], ahead: int) -> tuple[int, int, int]:
    """Blocks per tier that are left when the first `ahead` of them need no fetching."""
    left = []
    for count in external:
        used = min(count, ahead)
        ahead -= used
        left.append(count - used)
    return left[0], left[1], left[2]
