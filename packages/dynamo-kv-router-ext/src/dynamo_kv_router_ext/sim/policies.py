# SPDX-License-Identifier: Apache-2.0
"""The placements to compare with: round robin, least loaded, and the formula of Dynamo's KV router.

They are what ai-dynamo 1.6.1 does, in its words: a request that is placed is booked until it ends; equal candidates are
drawn from at random, here with a seed. None of them decides whether a cached block is worth fetching: all that are
found are fetched, as vLLM's connectors do.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from .._index import PrefixIndex
from .._types import Decision, NoWorkerError, Request, Role, Seat, Terms, Tier, Worker, WorkerId

__all__ = ["DynamoKv", "LeastLoaded", "RoundRobin"]

_T = TypeVar("_T")


@dataclass(slots=True)
class _Booking:
    request: Request
    role: Role
    seat: Seat


class _Peer:
    """Workers and bookings; a subclass chooses the seat."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, Worker] = {}
        #: Seats by role, in the order in which their workers came.
        self._seats: dict[Role, list[Seat]] = {"prefill": [], "decode": [], "both": []}
        self._bookings: dict[tuple[str, Role], _Booking] = {}

    def add_worker(self, worker: Worker, now: float) -> None:
        """Add a worker. Raises ValueError where one of that name is there already."""
        if worker.id in self._workers:
            raise ValueError(f"worker {worker.id!r} is there already")
        self._workers[worker.id] = worker
        self._seats[worker.role].extend(Seat(worker.id, rank) for rank in range(worker.ranks))

    def remove_worker(self, worker: WorkerId, now: float) -> list[str]:
        """Remove a worker; return the requests that were booked there. Raises KeyError for one that is not there."""
        if worker not in self._workers:
            raise KeyError(f"no worker {worker!r}")
        lost = [booking for booking in self._bookings.values() if booking.seat.worker == worker]
        for booking in lost:
            self._end(booking.request.id, booking.role, now)
        role = self._workers.pop(worker).role
        self._seats[role] = [seat for seat in self._seats[role] if seat.worker != worker]
        return [booking.request.id for booking in lost]

    def stored(self, worker: WorkerId, rank: int, tier: Tier, blocks: Sequence[int]) -> None:
        """Hear of blocks that a seat has cached; only `DynamoKv` makes use of it."""

    def removed(self, worker: WorkerId, rank: int, tier: Tier, blocks: Sequence[int]) -> None:
        """Hear of blocks that a seat no longer has; only `DynamoKv` makes use of it."""

    def place(self, request: Request, role: Role, now: float) -> Decision:
        """Choose a seat and book it.

        Raises NoWorkerError where no worker of the role is there, ValueError where the request is booked already.
        """
        if (request.id, role) in self._bookings:
            raise ValueError(f"request {request.id!r} is booked for {role} already")
        if not self._seats[role]:
            raise NoWorkerError(f"no worker of role {role} for request {request.id!r}")
        seat, terms = self._choose(request, role, now)
        booking = _Booking(request, role, seat)
        self._bookings[request.id, role] = booking
        self._begun(booking, now)
        return Decision(request.id, role, seat.worker, seat.rank, terms, fetch_tokens=request.tokens)

    def prefilled(self, request_id: str, now: float, fetch_s: float | None = None) -> None:
        """The prompt has been read: a prefill worker is done with it."""
        self._end(request_id, "prefill", now)

    def progress(self, request_id: str, tokens: int, now: float) -> None:
        """Tokens were generated; none of the peers makes use of it."""

    def finished(self, request_id: str, now: float) -> None:
        """The request has ended."""
        for role in self._seats:
            self._end(request_id, role, now)

    def cancelled(self, request_id: str, now: float) -> None:
        """The client has gone."""
        self.finished(request_id, now)

    def failed(self, request_id: str, role: Role, now: float, reason: str) -> None:
        """The worker has failed the request: to these policies it is simply free again."""
        self._end(request_id, role, now)

    def tick(self, now: float) -> None:
        """Time has passed."""

    def booked(self, seat: Seat) -> int:
        """Return how many requests are booked at a seat."""
        return sum(booking.seat == seat for booking in self._bookings.values())

    def _end(self, request_id: str, role: Role, now: float) -> None:
        booking = self._bookings.pop((request_id, role), None)
        if booking is not None:
            self._ended(booking, now)

    def _choose(self, request: Request, role: Role, now: float) -> tuple[Seat, Terms]:
        raise NotImplementedError

    def _begun(self, booking: _Booking, now: float) -> None:
        """Note a new booking."""

    def _ended(self, booking: _Booking, now: float) -> None:
        """Note the end of a booking."""


class RoundRobin(_Peer):
    """Each in turn.

    As `dynamo.replay` has it: of aggregated workers each is asked in turn, and each gives the request to its ranks in
    turn; of the pools of a disaggregated fleet each rank is asked in turn.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next: dict[Role, int] = {"prefill": 0, "decode": 0, "both": 0}
        self._ranks: dict[WorkerId, int] = {}

    def remove_worker(self, worker: WorkerId, now: float) -> list[str]:
        """See the others' method."""
        self._ranks.pop(worker, None)
        return super().remove_worker(worker, now)

    def _choose(self, request: Request, role: Role, now: float) -> tuple[Seat, Terms]:
        if role != "both":
            seats = self._seats[role]
            index = self._next[role] % len(seats)
            self._next[role] = index + 1
            return seats[index], Terms()
        workers = [seat.worker for seat in self._seats[role] if seat.rank == 0]
        index = self._next[role] % len(workers)
        self._next[role] = index + 1
        worker = workers[index]
        rank = self._ranks.get(worker, 0) % self._workers[worker].ranks
        self._ranks[worker] = rank + 1
        return Seat(worker, rank), Terms()


class LeastLoaded(_Peer):
    """The worker with the fewest requests, whatever their lengths; then its rank with the fewest.

    Args:
        seed: of the draw between workers, and between ranks, that have equally many.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._loads: dict[Seat, int] = {}
        self._totals: dict[WorkerId, int] = {}

    def add_worker(self, worker: Worker, now: float) -> None:
        """See the others' method."""
        super().add_worker(worker, now)
        self._loads.update((Seat(worker.id, rank), 0) for rank in range(worker.ranks))
        self._totals[worker.id] = 0

    def remove_worker(self, worker: WorkerId, now: float) -> list[str]:
        """See the others' method."""
        lost = super().remove_worker(worker, now)
        del self._totals[worker]
        self._loads = {seat: load for seat, load in self._loads.items() if seat.worker != worker}
        return lost

    def _choose(self, request: Request, role: Role, now: float) -> tuple[Seat, Terms]:
        workers = [seat.worker for seat in self._seats[role] if seat.rank == 0]
        worker = _least(workers, [self._totals[worker] for worker in workers], self._random)
        seats = [Seat(worker, rank) for rank in range(self._workers[worker].ranks)]
        return _least(seats, [self._loads[seat] for seat in seats], self._random), Terms()

    def _begun(self, booking: _Booking, now: float) -> None:
        self._loads[booking.seat] += 1
        self._totals[booking.seat.worker] += 1

    def _ended(self, booking: _Booking, now: float) -> None:
        self._loads[booking.seat] -= 1
        self._totals[booking.seat.worker] -= 1


@dataclass(slots=True)
class _Load:
    """What is booked at a seat."""

    requests: int = 0
    #: Tokens of the prompts that were not cached when they were placed, in full until their first token.
    prefill_tokens: int = 0
    #: Full blocks of the prompts, by how many requests have them.
    shared: dict[int, int] = field(default_factory=dict)
    #: Full blocks of the prompts where each request counts its own.
    own: int = 0

    @property
    def blocks(self) -> int:
        return len(self.shared) + self.own

    def depth(self, blocks: Sequence[int]) -> int:
        """Return how many of a prompt's leading blocks are booked. A booked block's predecessors are booked as well."""
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high) // 2
            if blocks[middle] in self.shared:
                low = middle + 1
            else:
                high = middle
        return low


@dataclass(slots=True)
class _Binding:
    seat: Seat
    requests: int = 0
    until_s: float = 0.0


class DynamoKv(_Peer):
    """Dynamo's KV router with its default cost function (`router-plugins/builtin/src/default/scorer.rs`).

    In blocks, the least wins:

        scale * max(0, (backlog + prompt) / block_size - credit) + decode + weight * requests

    `backlog` is what is booked of prompts that were not cached, in full until the first token. `credit` is the sum of
    the blocks that are cached, times their tier's weight; that of the device shrinks by 1 / (1 + decay * excess), where
    excess is the backlog above the least of all, over the prompt's length. `decode` is the number of distinct full
    blocks of all booked prompts with this one; what is generated is not counted. For a prefill worker `decode` is left
    out. For a decode worker only it counts, with each prompt's blocks its own.

    The names and defaults of the settings are those of Dynamo's `KvRouterConfig`, shortened.

    Args:
        block_size: tokens in a block.
        overlap_credit: blocks that a cached block on the device takes off (`overlap_score_credit`).
        credit_decay: how fast that shrinks with the backlog above the least of all (`overlap_score_credit_decay`).
        prefill_load_scale: what the prefill term is multiplied with.
        host_weight: blocks that a cached block in host memory takes off (`host_cache_hit_weight`).
        disk_weight: blocks that a cached block on disk takes off (`disk_cache_hit_weight`).
        active_request_weight: blocks that each booked request adds (`decode_active_request_weight`).
        temperature: of a softmax over the costs, scaled to 0..1; 0: the cheapest is taken (`router_temperature`).
        session_ttl_s: seconds for which an idle session stays bound to its seat, whatever that costs; None: it is not.
        seed: of the draw between equal candidates, and of the temperature's.

    Raises ValueError for a setting that is negative or not finite, and a block size below 1.
    """

    def __init__(
        self,
        *,
        block_size: int = 64,
        overlap_credit: float = 1.0,
        credit_decay: float = 0.0,
        prefill_load_scale: float = 1.0,
        host_weight: float = 0.75,
        disk_weight: float = 0.25,
        active_request_weight: float = 0.0,
        temperature: float = 0.0,
        session_ttl_s: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (
            ("overlap_credit", overlap_credit),
            ("credit_decay", credit_decay),
            ("prefill_load_scale", prefill_load_scale),
            ("host_weight", host_weight),
            ("disk_weight", disk_weight),
            ("active_request_weight", active_request_weight),
            ("temperature", temperature),
            ("session_ttl_s", 0.0 if session_ttl_s is None else session_ttl_s),
        ):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number of at least 0, not {value!r}")
        self.block_size = block_size
        self.overlap_credit = overlap_credit
        self.credit_decay = credit_decay
        self.prefill_load_scale = prefill_load_scale
        self.host_weight = host_weight
        self.disk_weight = disk_weight
        self.active_request_weight = active_request_weight
        self.temperature = temperature
        self.session_ttl_s = session_ttl_s
        self._random = random.Random(seed)
        self._loads: dict[Seat, _Load] = {}
        self._indexes: dict[Role, PrefixIndex] = {"prefill": PrefixIndex(block_size), "both": PrefixIndex(block_size)}
        #: Tokens that each booking added to its seat's backlog and that have not been read.
        self._unread: dict[tuple[str, Role], int] = {}
        self._cached: dict[tuple[str, Role], int] = {}
        self._bound: dict[tuple[str, Role], _Binding] = {}

    def add_worker(self, worker: Worker, now: float) -> None:
        """See the others' method."""
        super().add_worker(worker, now)
        for rank in range(worker.ranks):
            self._loads[Seat(worker.id, rank)] = _Load()
            if worker.role in self._indexes:
                self._indexes[worker.role].add_seat(Seat(worker.id, rank))

    def remove_worker(self, worker: WorkerId, now: float) -> list[str]:
        """See the others' method; sessions that are bound to it are free."""
        lost = super().remove_worker(worker, now)
        for seat in [seat for seat in self._loads if seat.worker == worker]:
            del self._loads[seat]
            for index in self._indexes.values():
                if seat in index.seats:
                    index.drop_seat(seat)
        self._bound = {key: bound for key, bound in self._bound.items() if bound.seat.worker != worker}
        return lost

    def stored(self, worker: WorkerId, rank: int, tier: Tier, blocks: Sequence[int]) -> None:
        """Hear of blocks that a seat has cached. A store that workers share is not seen."""
        index = self._index_of(worker)
        if index is not None and tier != "store":
            index.stored(Seat(worker, rank), tier, blocks)

    def removed(self, worker: WorkerId, rank: int, tier: Tier, blocks: Sequence[int]) -> None:
        """Hear of blocks that a seat no longer has."""
        index = self._index_of(worker)
        if index is not None and tier != "store":
            index.removed(Seat(worker, rank), tier, blocks)

    def prefilled(self, request_id: str, now: float, fetch_s: float | None = None) -> None:
        """The prompt has been read: it is no backlog any more."""
        super().prefilled(request_id, now, fetch_s)
        booking = self._bookings.get((request_id, "both"))
        if booking is not None:
            self._loads[booking.seat].prefill_tokens -= self._unread.pop((request_id, "both"), 0)

    def tick(self, now: float) -> None:
        """Free the sessions that have been idle for too long."""
        self._bound = {key: bound for key, bound in self._bound.items() if bound.requests or bound.until_s > now}

    def load(self, seat: Seat) -> tuple[int, int, int]:
        """Return a seat's requests, its tokens of backlog, and its blocks."""
        load = self._loads[seat]
        return load.requests, load.prefill_tokens, load.blocks

    def costs(self, request: Request, role: Role, now: float) -> dict[Seat, float]:
        """Return what each seat of a role would cost, in blocks."""
        seats, costs, _ = self._costs(request, role, now)
        return dict(zip(seats, costs, strict=True))

    def _index_of(self, worker: WorkerId) -> PrefixIndex | None:
        known = self._workers.get(worker)
        return None if known is None else self._indexes.get(known.role)

    def _costs(self, request: Request, role: Role, now: float) -> tuple[Sequence[Seat], list[float], list[Terms]]:
        size = self.block_size
        if role == "decode":
            seats: Sequence[Seat] = self._seats[role]
            blocks = request.tokens // size
            costs = []
            for seat in seats:
                load = self._loads[seat]
                costs.append(load.blocks + blocks + self.active_request_weight * load.requests)
            return seats, costs, [Terms() for _ in seats]
        matches = self._indexes[role].match(request.blocks, now)
        seats = matches.seats
        least = min(self._loads[seat].prefill_tokens for seat in seats)
        length = max(-(-request.tokens // size), 1)
        costs, terms = [], []
        for seat, device, host, disk in zip(seats, matches.device, matches.host, matches.disk, strict=True):
            load = self._loads[seat]
            excess = (load.prefill_tokens - least) / size / length
            credit = self.overlap_credit / (1 + self.credit_decay * excess) * device
            credit += self.host_weight * host + self.disk_weight * disk
            cost = self.prefill_load_scale * max((load.prefill_tokens + request.tokens) / size - credit, 0.0)
            if role == "both":
                cost += load.blocks + len(request.blocks) - load.depth(request.blocks)
            costs.append(cost + self.active_request_weight * load.requests)
            fetch = {"host": host * size, "disk": disk * size}
            terms.append(Terms(device_tokens=device * size, fetch_tokens=fetch))  # type: ignore[arg-type]
        return seats, costs, terms

    def _choose(self, request: Request, role: Role, now: float) -> tuple[Seat, Terms]:
        seats, costs, terms = self._costs(request, role, now)
        seat = self._session_seat(request, role, now)
        if seat is None:
            seat = _least(seats, costs, self._random, self.temperature)
        chosen = terms[seats.index(seat)]
        cached = chosen.device_tokens
        if chosen.fetch_tokens:
            host, disk = chosen.fetch_tokens["host"], chosen.fetch_tokens["disk"]
            cached += round(self.host_weight * host + self.disk_weight * disk)
        self._cached[request.id, role] = min(cached, request.tokens)
        return seat, chosen

    def _session_seat(self, request: Request, role: Role, now: float) -> Seat | None:
        """Return the seat that the request's session is bound to."""
        if self.session_ttl_s is None or request.session is None:
            return None
        bound = self._bound.get((request.session, role))
        if bound is None or not (bound.requests or bound.until_s > now):
            return None
        return bound.seat

    def _begun(self, booking: _Booking, now: float) -> None:
        request, role, load = booking.request, booking.role, self._loads[booking.seat]
        load.requests += 1
        cached = self._cached.pop((request.id, role), 0)
        if role != "decode":
            unread = request.tokens - cached
            self._unread[request.id, role] = unread
            load.prefill_tokens += unread
        if role == "decode":
            load.own += request.tokens // self.block_size
        elif role == "both":
            for block in request.blocks:
                load.shared[block] = load.shared.get(block, 0) + 1
        if self.session_ttl_s is not None and request.session is not None:
            bound = self._bound.get((request.session, role))
            if bound is None or bound.seat != booking.seat:
                bound = self._bound[request.session, role] = _Binding(booking.seat)
            bound.requests += 1

    def _ended(self, booking: _Booking, now: float) -> None:
        request, role, load = booking.request, booking.role, self._loads[booking.seat]
        load.requests -= 1
        load.prefill_tokens -= self._unread.pop((request.id, role), 0)
        if role == "decode":
            load.own -= request.tokens // self.block_size
        elif role == "both":
            for block in request.blocks:
                if load.shared[block] == 1:
                    del load.shared[block]
                else:
                    load.shared[block] -= 1
        ttl = self.session_ttl_s
        if ttl is not None and request.session is not None:
            bound = self._bound.get((request.session, role))
            if bound is not None and bound.seat == booking.seat and bound.requests:
                bound.requests -= 1
                bound.until_s = now + ttl


def _least(things: Sequence[_T], costs: Sequence[float], draw: random.Random, temperature: float = 0.0) -> _T:
    """Return the thing of the least cost, one of the equals at random; or draw from the softmax of the costs."""
    least = min(costs)
    spread = max(costs) - least
    if temperature == 0 or spread == 0:
        equal = [thing for thing, cost in zip(things, costs, strict=True) if cost == least]
        return equal[0] if len(equal) == 1 else draw.choice(equal)
    weights = [math.exp((least - cost) / (spread * temperature)) for cost in costs]
    return draw.choices(things, weights)[0]
