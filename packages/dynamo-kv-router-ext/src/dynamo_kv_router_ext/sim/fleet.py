# SPDX-License-Identifier: Apache-2.0
"""A simulated fleet: arrivals, a policy that places them, workers that serve them, faults; and what became of each.

A fleet has workers of role `both`, or of the roles `prefill` and `decode`. With the latter a request is placed twice:
its prompt is read on a prefill worker, then a decoder is chosen, which takes blocks for the prompt, pulls the KV that
it lacks and generates every token of the answer; the first token is the decoder's. The prompt's blocks stay on the
prefill worker until they have been pulled. A decoder takes a sequence in between two of its passes. That is how
`dynamo.replay` hands over (vLLM, source first), with one difference: a decoder pulls one sequence at a time.

Open loop: a request arrives at its time. Closed loop: `after` and `think_s` make it wait for the answer before it.
The same input gives the same result, byte for byte, if the policy is deterministic.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from .._types import Decision, ExternalTier, NoWorkerError, Request, Role, Seat, Tier, Worker, WorkerId
from .engine import FASTEST, SLOWEST, CacheEvent, Engine, Job, Speed, Store

if TYPE_CHECKING:
    from .._profile import TierCost
    from .timing import Timing

__all__ = [
    "Arrival",
    "Fault",
    "FaultKind",
    "FleetSpec",
    "Policy",
    "RequestResult",
    "Result",
    "WorkerResult",
    "WorkerSpec",
    "simulate",
    "split_blocks",
]

#: What may happen to a worker. `raise`: it fails each new request at once. `hang`: it stands still, and takes requests.
#: `die`: its requests and caches are lost and it leaves the fleet, until the fault ends. `slow`: its speed is less.
FaultKind = Literal["raise", "hang", "die", "slow"]

#: The latest that anything may come, in seconds: 30 years.
_LATEST_S = 1e9
#: A fleet with nothing to do for more ticks than these hears of none of them.
_IDLE_TICKS = 1000


class Policy(Protocol):
    """What decides where requests go. `Placer` is one."""

    def add_worker(self, worker: Worker, now: float) -> object:
        """A worker joins."""
        ...

    def remove_worker(self, id: WorkerId, now: float) -> object:
        """A worker has left; its bookings are void."""
        ...

    def stored(self, worker: WorkerId, rank: int, tier: Tier, blocks: Sequence[int]) -> object:
        """Blocks came to a tier of a rank; for `store`, the rank is the one that wrote them."""
        ...

    def removed(self, worker: WorkerId, rank: int, tier: Tier, blocks: Sequence[int]) -> object:
        """Blocks left a tier of a rank."""
        ...

    def place(self, request: Request, role: Role, now: float) -> Decision:
        """Choose a rank and book the request there; raises NoWorkerError where there is none."""
        ...

    def prefilled(self, request_id: str, now: float, fetch_s: float | None = None) -> object:
        """The prompt has been read; fetching from other tiers took `fetch_s`."""
        ...

    def progress(self, request_id: str, tokens: int, now: float) -> object:
        """So many tokens have been generated."""
        ...

    def finished(self, request_id: str, now: float) -> object:
        """The request is done."""
        ...

    def failed(self, request_id: str, role: Role, now: float, reason: str) -> object:
        """The worker of that role failed the request."""
        ...

    def cancelled(self, request_id: str, now: float) -> object:
        """The request is not wanted any more, for no fault of the worker."""
        ...

    def tick(self, now: float) -> object:
        """Time passes."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker of the fleet."""

    worker: Worker
    #: Its speed: (from t, factor), in order of time; a step that starts at t lasts its time / factor. 1 at first.
    speed: tuple[tuple[float, float], ...] = ()
    #: Tokens of KV that each rank keeps in host memory of what had to leave the device.
    host_tokens: int = 0
    #: When it joins.
    starts_s: float = 0.0

    def __post_init__(self) -> None:
        name = f"worker {self.worker.id!r}"
        try:
            Speed(self.speed)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if self.host_tokens < 0:
            raise ValueError(f"{name}: host_tokens must be at least 0, not {self.host_tokens!r}")
        if not 0 <= self.starts_s <= _LATEST_S:
            raise ValueError(f"{name}: starts_s must be at least 0 and at most {_LATEST_S:g}, not {self.starts_s!r}")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something happens to a worker from `start_s` to `stop_s`."""

    worker: WorkerId
    kind: FaultKind
    start_s: float
    stop_s: float = math.inf
    #: What its speed is multiplied by (`slow`).
    factor: float = 0.5

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise ValueError(f"fault of {self.worker!r}: kind must be one of {get_args(FaultKind)}, not {self.kind!r}")
        if not 0 <= self.start_s < self.stop_s:
            raise ValueError(f"fault of {self.worker!r}: it lasts from {self.start_s!r} to {self.stop_s!r}")
        if not SLOWEST <= self.factor <= FASTEST:
            message = f"factor must be from {SLOWEST} to {FASTEST}, not {self.factor!r}"
            raise ValueError(f"fault of {self.worker!r}: {message}")


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """A fleet and its timing."""

    workers: tuple[WorkerSpec, ...]
    timing: Timing
    #: The timing of workers of role `decode`; None: `timing`.
    decode_timing: Timing | None = None
    #: Tokens in a block.
    block_size: int = 64
    #: Pulling KV from a prefill worker; None takes no time.
    transfer: TierCost | None = None
    #: Fetching from a rank's host tier, and from the shared store; None: never.
    host: TierCost | None = None
    store: TierCost | None = None
    #: Tokens of KV in the store that all workers share.
    store_tokens: int = 0
    #: Cache events reach the policy so much later.
    event_lag_s: float = 0.0
    faults: tuple[Fault, ...] = ()
    #: How often the policy hears of the progress of running requests, and that time passes.
    tick_s: float = 1.0
    #: A request without its first token so long after a placement is taken back and placed anew; 0: never.
    timeout_s: float = 0.0
    #: The most placements of a request after failures, beyond the first.
    retries: int = 3

    def __post_init__(self) -> None:
        if not self.workers:
            raise ValueError("a fleet needs workers")
        roles = {spec.worker.role for spec in self.workers}
        if roles != {"both"} and roles != {"prefill", "decode"}:
            raise ValueError(f"roles must be `both`, or `prefill` and `decode`, not {', '.join(sorted(roles))}")
        ids = [spec.worker.id for spec in self.workers]
        if len(set(ids)) < len(ids):
            raise ValueError(f"worker ids must differ: {ids!r}")
        for fault in self.faults:
            if fault.worker not in ids:
                raise ValueError(f"a fault names the worker {fault.worker!r}, which the fleet does not have")
        for name in ("event_lag_s", "timeout_s", "retries", "store_tokens"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)!r}")
        for name in ("block_size", "tick_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)!r}")
        for spec in self.workers:
            if spec.worker.capacity_tokens < self.block_size:
                raise ValueError(
                    f"worker {spec.worker.id!r}: {spec.worker.capacity_tokens} tokens hold no block of "
                    f"{self.block_size}"
                )


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that will come."""

    id: str
    #: When, in seconds.
    at_s: float
    #: Tokens of the prompt, and of the answer.
    tokens: int
    output_tokens: int
    #: Ids, of at least 0, of all the prompt's full blocks; () if it shares none with others.
    blocks: tuple[int, ...] = ()
    session: str | None = None
    #: The arrival, earlier in the list, whose end it waits for; it comes `think_s` after that, not before `at_s`.
    after: str | None = None
    think_s: float = 0.0
    #: Ids of the blocks that the answer fills, after those of the prompt; the next turn's prompt begins with them.
    answer: tuple[int, ...] = ()
    #: Whether the policy is told `output_tokens`.
    hint: bool = False


@dataclass(slots=True)
class RequestResult:
    """What became of a request; seconds from the start of the simulation, NaN where something did not happen."""

    id: str
    session: str | None
    tokens: int
    output_tokens: int
    arrival_s: float = math.nan
    #: Where its prompt was read, and where it was generated: the same for a worker of role `both`.
    prefill: Seat | None = None
    decode: Seat | None = None
    #: When it was placed (the first role), and when its prompt had been read.
    placed_s: float = math.nan
    prefilled_s: float = math.nan
    #: Tokens of the prompt that were not computed, by tier.
    device_tokens: int = 0
    host_tokens: int = 0
    store_tokens: int = 0
    #: Tokens that the decoder pulled.
    pulled_tokens: int = 0
    first_token_s: float = math.nan
    end_s: float = math.nan
    preemptions: int = 0
    #: Times that it was placed (the first role).
    attempts: int = 0
    #: Why it was not answered; "" if it was.
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """From the arrival to the first token."""
        return self.first_token_s - self.arrival_s

    @property
    def itl_s(self) -> float:
        """The mean time between two tokens; NaN for an answer of one."""
        return (self.end_s - self.first_token_s) / (self.output_tokens - 1) if self.output_tokens > 1 else math.nan

    @property
    def e2e_s(self) -> float:
        """From the arrival to the last token."""
        return self.end_s - self.arrival_s


@dataclass(slots=True)
class WorkerResult:
    """What a worker did."""

    worker: WorkerId
    role: Role
    #: Seconds in which a pass ran, and their share of the simulation.
    busy_s: float
    utilisation: float
    #: Requests that it finished.
    requests: int
    #: Tokens of prompts that it computed, and tokens that it generated (a prefill worker: one for each prompt).
    prompt_tokens: int
    output_tokens: int
    preemptions: int


@dataclass(slots=True)
class Result:
    """The outcome of a simulation."""

    #: In order of the arrivals as they were given.
    requests: list[RequestResult]
    workers: list[WorkerResult]
    #: From the start to the last end of a request.
    duration_s: float

    def mean_ttft_s(self) -> float:
        """The mean time to the first token of the requests that were answered; NaN if none was."""
        values = [request.ttft_s for request in self.requests if not request.error]
        return math.fsum(values) / len(values) if values else math.nan

    def to_bytes(self) -> bytes:
        """All of it as JSON, the same for the same result."""
        return json.dumps(asdict(self), sort_keys=True, default=str).encode()


def split_blocks(ids: Sequence[int], from_size: int, to_size: int, tokens: int) -> tuple[int, ...]:
    """Ids of the full blocks of `to_size` tokens of a prompt whose blocks of `from_size` tokens have `ids`.

    Equal ids give equal ids. Raises ValueError where the sizes do not divide or the ids are too few.
    """
    if to_size < 1 or from_size % to_size:
        raise ValueError(f"blocks of {from_size} tokens cannot be split into blocks of {to_size}")
    if len(ids) * from_size < tokens:
        raise ValueError(f"{len(ids)} blocks of {from_size} tokens are too few for {tokens} tokens")
    parts = from_size // to_size
    return tuple(id * parts + part for id in ids for part in range(parts))[: tokens // to_size]


def simulate(spec: FleetSpec, arrivals: Iterable[Arrival], policy: Policy) -> Result:
    """Run `arrivals` through the fleet, placed by `policy`, which must be fresh, until all of them have ended.

    Raises ValueError for arrivals that cannot be and for decisions that name no living rank of the role.
    """
    return _Simulation(spec, list(arrivals), policy).run()


# What comes first of what happens at the same time: ends of passes, what has been fetched or pulled, cache events,
# faults and joining workers, arrivals, starts of passes, then ticks and timeouts.
_END, _MOVED, _CACHE, _WORKER, _ARRIVAL, _START, _TIMEOUT, _TICK = range(8)


@dataclass(eq=False, slots=True)
class _Flight:
    """A request on its way."""

    arrival: Arrival
    result: RequestResult
    blocks: tuple[int, ...]
    next: list[_Flight] = field(default_factory=list)
    #: Its sequence on the prefill worker (or the only one), and on the decoder.
    first: Job | None = None
    second: Job | None = None
    #: The role that it is booked in.
    role: Role | None = None
    ended: bool = False


class _Host:
    """A worker with its state in the fleet."""

    __slots__ = (
        "alive",
        "arrived",
        "engine",
        "finished",
        "flights",
        "link",
        "pulled",
        "raising",
        "spec",
        "stuck",
        "version",
    )

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.engine: Engine
        self.alive = False
        self.raising = 0
        #: Until when it hangs.
        self.stuck = -math.inf
        #: Counts what makes an event of an end of a pass void.
        self.version = 0
        #: When its link for pulling KV is free.
        self.link = 0.0
        #: Requests that have a sequence here, in order.
        self.flights: dict[str, _Flight] = {}
        #: Sequences that join at the end of the pass: to get blocks, and to run.
        self.arrived: list[Job] = []
        self.pulled: list[Job] = []
        self.finished = 0


class _Simulation:
    def __init__(self, spec: FleetSpec, arrivals: list[Arrival], policy: Policy) -> None:
        self.spec = spec
        self.policy = policy
        self.split = spec.workers[0].worker.role != "both"
        self.store = (
            Store(spec.store_tokens // spec.block_size) if spec.store_tokens and spec.store is not None else None
        )
        self.costs: dict[ExternalTier, TierCost] = {}
        if spec.host is not None:
            self.costs["host"] = spec.host
        if spec.store is not None:
            self.costs["store"] = spec.store
        self.hosts = {one.worker.id: _Host(one) for one in spec.workers}
        self.order = list(self.hosts.values())
        self.results: list[tuple[Engine, _Host]] = []
        self.events: list[tuple[float, int, int, Any]] = []
        self.count = 0
        #: Events that are not ticks.
        self.real = 0
        self.parked: list[_Flight] = []
        self.flights = self._take(arrivals)
        self.by_id = {flight.arrival.id: flight for flight in self.flights}

    # Input ------------------------------------------------------------------------------------------------------

    def _take(self, arrivals: list[Arrival]) -> list[_Flight]:
        size = self.spec.block_size
        flights: dict[str, _Flight] = {}
        nobodys = -1
        for arrival in arrivals:
            name = f"arrival {arrival.id!r}"
            if arrival.id in flights:
                raise ValueError(f"{name} comes twice")
            if arrival.tokens < 1 or arrival.output_tokens < 1:
                raise ValueError(
                    f"{name}: {arrival.tokens!r} tokens and {arrival.output_tokens!r} of output, not at least 1"
                )
            if not 0 <= arrival.at_s <= _LATEST_S or not 0 <= arrival.think_s <= _LATEST_S:
                raise ValueError(
                    f"{name}: at_s {arrival.at_s!r} and think_s {arrival.think_s!r} must be at least 0 and at most "
                    f"{_LATEST_S:g}"
                )
            full = arrival.tokens // size
            if arrival.blocks and len(arrival.blocks) != full:
                raise ValueError(
                    f"{name}: {len(arrival.blocks)} blocks, but {arrival.tokens} tokens fill {full} of {size}"
                )
            if min(arrival.blocks, default=0) < 0 or min(arrival.answer, default=0) < 0:
                raise ValueError(f"{name}: ids of blocks must be at least 0")
            blocks = list(arrival.blocks)
            more = (arrival.tokens + arrival.output_tokens) // size
            if not blocks:
                blocks += range(nobodys, nobodys - full, -1)
                nobodys -= full
            blocks += arrival.answer[: more - full]
            missing = more - len(blocks)
            blocks += range(nobodys, nobodys - missing, -1)
            nobodys -= missing
            result = RequestResult(arrival.id, arrival.session, arrival.tokens, arrival.output_tokens)
            flight = flights[arrival.id] = _Flight(arrival, result, tuple(blocks))
            if arrival.after is None:
                self._push(arrival.at_s, _ARRIVAL, flight)
            elif arrival.after not in flights or arrival.after == arrival.id:
                raise ValueError(f"{name}: after names {arrival.after!r}, which is no earlier arrival")
            else:
                flights[arrival.after].next.append(flight)
        return list(flights.values())

    # The loop ---------------------------------------------------------------------------------------------------

    def _push(self, at: float, kind: int, what: Any) -> None:
        self.count += 1
        self.real += kind != _TICK
        heapq.heappush(self.events, (at, kind, self.count, what))

    def run(self) -> Result:
        for host in self.order:
            self._push(host.spec.starts_s, _WORKER, ("join", host, None))
        for fault in self.spec.faults:
            host = self.hosts[fault.worker]
            if fault.kind != "slow":
                self._push(fault.start_s, _WORKER, (fault.kind, host, fault))
                if fault.stop_s < math.inf:
                    self._push(fault.stop_s, _WORKER, ("end", host, fault))
        self._push(self.spec.tick_s, _TICK, None)
        events = self.events
        handlers = (
            self._end, self._moved, self._cache, self._worker, self._arrive, self._start, self._timeout, self._tick,
        )  # fmt: skip
        while events:
            at, kind, _, what = heapq.heappop(events)
            self.real -= kind != _TICK
            handlers[kind](what, at)
        for flight in self.flights:
            if not flight.ended:
                flight.result.error = flight.result.error or "never answered"
        return self._result()

    def _result(self) -> Result:
        requests = [flight.result for flight in self.flights]
        ends = [request.end_s for request in requests if not math.isnan(request.end_s)]
        duration = max(ends, default=0.0)
        rows: dict[WorkerId, WorkerResult] = {}
        for host in self.order:
            worker = host.spec.worker
            rows[worker.id] = WorkerResult(worker.id, worker.role, 0.0, 0.0, host.finished, 0, 0, 0)
        for engine, host in self.results:
            row = rows[host.spec.worker.id]
            row.busy_s += engine.busy_s
            row.prompt_tokens += engine.prompt_tokens
            row.output_tokens += engine.output_tokens
            row.preemptions += engine.preemptions
        for row in rows.values():
            row.utilisation = row.busy_s / duration if duration else 0.0
        return Result(requests, list(rows.values()), duration)

    # Workers ----------------------------------------------------------------------------------------------------

    def _worker(self, what: tuple[str, _Host, Fault | None], now: float) -> None:
        kind, host, fault = what
        if kind == "join":
            self._join(host, now)
        elif kind == "raise":
            host.raising += 1
        elif kind == "hang":
            assert fault is not None
            host.stuck = max(host.stuck, fault.stop_s)
            self._cut(host, now)
            if host.alive and host.engine.busy:
                self._ends(host, host.engine.hold(fault.stop_s - now))
        elif kind == "die":
            self._die(host, now)
        elif fault is not None and fault.kind == "raise":
            host.raising -= 1
        elif fault is not None and fault.kind == "die":
            if now >= host.spec.starts_s:
                self._join(host, now)
        else:
            self._wake(host, now)

    def _join(self, host: _Host, now: float) -> None:
        if host.alive:
            return
        spec, worker = host.spec, host.spec.worker
        slow = [
            (fault.start_s, fault.stop_s, fault.factor)
            for fault in self.spec.faults
            if fault.worker == worker.id and fault.kind == "slow"
        ]
        timing = self.spec.timing
        if worker.role == "decode" and self.spec.decode_timing is not None:
            timing = self.spec.decode_timing
        host.engine = Engine(
            worker,
            timing,
            self.spec.block_size,
            speed=Speed(spec.speed, slow),
            host_tokens=spec.host_tokens if self.spec.host is not None else 0,
            store=self.store,
            costs=self.costs,
        )
        self.results.append((host.engine, host))
        host.alive = True
        host.link = now
        self.policy.add_worker(worker, now)
        parked, self.parked = self.parked, []
        for flight in parked:
            self._retry(flight, now)

    def _die(self, host: _Host, now: float) -> None:
        if not host.alive:
            return
        host.alive = False
        host.version += 1
        host.engine.stop(now)
        host.arrived, host.pulled = [], []
        lost = list(host.flights.values())
        host.flights = {}
        worker = host.spec.worker.id
        for flight in lost:
            if flight.role is None:
                continue
            if (flight.second is None) == (host.spec.worker.role != "decode"):
                self.policy.failed(flight.arrival.id, flight.role, now, "died")
            else:  # its prompt was waiting here to be pulled
                self.policy.cancelled(flight.arrival.id, now)
        self.policy.remove_worker(worker, now)
        for flight in lost:
            self._again(flight, now, "died")

    def _wake(self, host: _Host, now: float) -> None:
        """Have a pass started, once all that happens at this time has happened."""
        if host.alive and not host.engine.busy and now >= host.stuck:
            self._push(now, _START, host)

    def _start(self, host: _Host, now: float) -> None:
        if not host.alive or host.engine.busy or now < host.stuck:
            return
        end = host.engine.start(now)
        self._fetches(host)
        if end is None:
            self._report(host, now)
        else:
            self._ends(host, end)

    def _ends(self, host: _Host, end: float) -> None:
        host.version += 1
        if end < math.inf:
            self._push(end, _END, (host, host.version))

    def _cut(self, host: _Host, now: float) -> None:
        """Something waits for this worker: its jump ends with the pass that runs now."""
        if host.alive and host.engine.busy:
            end = host.engine.cut(now)
            if end is not None:
                self._ends(host, end)

    def _end(self, what: tuple[_Host, int], now: float) -> None:
        host, version = what
        if version != host.version or not host.alive:
            return
        engine = host.engine
        yielded = engine.finish()
        self._report(host, now)
        role = host.spec.worker.role
        for job, tokens in yielded:
            flight = self.by_id[job.id]
            if job.generated == tokens:  # its first ones
                self._first(flight, job, host, now)
            if job.generated >= job.output and not flight.ended and role != "prefill":
                self._finish(flight, job, host, now)
        for job in host.pulled:
            if not job.dead:
                engine.pulled(job)
        arrived, host.arrived, host.pulled = host.arrived, [], []
        for job in arrived:
            if not job.dead:
                self._pull(host, engine.arrive(job), now)
        if role == "decode":
            for rank in range(host.spec.worker.ranks):
                self._pull(host, engine.reserve(rank), now)
        self._report(host, now)
        self._push(now, _START, host)

    def _fetches(self, host: _Host) -> None:
        for done, job in host.engine.fetches:
            self._push(done, _MOVED, ("fetched", host, host.engine, job))
        host.engine.fetches.clear()

    def _report(self, host: _Host, now: float) -> None:
        """Tell the policy what happened to the worker's caches."""
        log = host.engine.log
        if not log:
            return
        events = list(log)
        log.clear()
        if self.spec.event_lag_s:
            self._push(now + self.spec.event_lag_s, _CACHE, (host, host.engine, events))
        else:
            self._cache((host, host.engine, events), now)

    def _cache(self, what: tuple[_Host, Engine, list[CacheEvent]], now: float) -> None:
        host, engine, events = what
        worker = host.spec.worker.id
        for event in events:
            if event.tier == "store" or (host.alive and host.engine is engine):
                tell = self.policy.stored if event.stored else self.policy.removed
                tell(worker, event.rank, event.tier, event.blocks)

    # Requests ---------------------------------------------------------------------------------------------------

    def _arrive(self, flight: _Flight, now: float) -> None:
        flight.result.arrival_s = now
        self._place(flight, now)

    def _place(self, flight: _Flight, now: float) -> None:
        """Place the request for the first time, or anew from the start."""
        role: Role = "prefill" if self.split else "both"
        chosen = self._choose(flight, role, now)
        if chosen is None:
            return
        decision, host = chosen
        result, arrival = flight.result, flight.arrival
        result.placed_s = now
        result.attempts += 1
        output = 1 if self.split else arrival.output_tokens
        # What it will need as a whole has to fit, or it could never end.
        if self._refused(flight, host, role, arrival.tokens, output, now):
            return
        result.prefill = Seat(decision.worker, decision.rank)
        result.decode = None if self.split else result.prefill
        job = Job(arrival.id, arrival.tokens, output, flight.blocks, decision.rank, decision.fetch_tokens)
        flight.first, flight.second = job, None
        host.flights[arrival.id] = flight
        self._cut(host, now)
        host.engine.submit(job, now)
        self._fetches(host)
        if not host.engine.busy:
            self._report(host, now)
        self._wake(host, now)
        if self.spec.timeout_s:
            self._push(now + self.spec.timeout_s, _TIMEOUT, (flight, result.attempts))

    def _choose(self, flight: _Flight, role: Role, now: float) -> tuple[Decision, _Host] | None:
        arrival = flight.arrival
        request = Request(
            arrival.id,
            arrival.tokens,
            arrival.blocks,
            arrival.session,
            arrival.output_tokens if arrival.hint else None,
            flight.result.prefill.worker if role == "decode" and flight.result.prefill is not None else None,
        )
        try:
            decision = self.policy.place(request, role, now)
        except NoWorkerError:
            flight.role = None
            self.parked.append(flight)
            return None
        host = self.hosts.get(decision.worker)
        if host is None or not host.alive or host.spec.worker.role != role:
            raise ValueError(
                f"request {arrival.id!r}: the policy chose {decision.worker!r}, no living worker for {role}"
            )
        if not 0 <= decision.rank < host.spec.worker.ranks:
            raise ValueError(f"request {arrival.id!r}: worker {decision.worker!r} has no rank {decision.rank!r}")
        flight.role = role
        return decision, host

    def _refused(self, flight: _Flight, host: _Host, role: Role, tokens: int, output: int, now: float) -> bool:
        """Whether the worker refuses the request: it is too large for it, or the worker raises."""
        if not host.engine.fits(tokens, output):
            self.policy.cancelled(flight.arrival.id, now)
            self._give_up(flight, now, f"{tokens} + {output} tokens do not fit on {host.spec.worker.id}")
            return True
        if host.raising:
            self.policy.failed(flight.arrival.id, role, now, "raised")
            self._again(flight, now, "raised")
            return True
        return False

    def _first(self, flight: _Flight, job: Job, host: _Host, now: float) -> None:
        """The first token of a sequence: the prompt has been read, or a decoder has begun."""
        result, name = flight.result, flight.arrival.id
        if job is flight.first:
            result.prefilled_s = now
            result.device_tokens = job.hit
            result.host_tokens = job.fetched.get("host", 0)
            result.store_tokens = job.fetched.get("store", 0)
            self.policy.prefilled(name, now, job.fetch_s)
        if host.spec.worker.role == "prefill":
            result.preemptions += job.preemptions
            host.finished += 1
            self._hand_over(flight, now)
        else:
            result.first_token_s = now
            self.policy.progress(name, job.generated, now)

    def _hand_over(self, flight: _Flight, now: float) -> None:
        """The prompt has been read: choose a decoder."""
        chosen = self._choose(flight, "decode", now)
        if chosen is None:
            return
        decision, host = chosen
        arrival = flight.arrival
        if self._refused(flight, host, "decode", arrival.tokens, arrival.output_tokens, now):
            return
        flight.result.decode = Seat(decision.worker, decision.rank)
        job = Job(arrival.id, arrival.tokens, arrival.output_tokens, flight.blocks, decision.rank)
        flight.second = job
        host.flights[arrival.id] = flight
        if host.engine.busy:
            self._cut(host, now)
            host.arrived.append(job)
        else:
            self._pull(host, host.engine.arrive(job), now)
            self._report(host, now)

    def _pull(self, host: _Host, started: list[tuple[Job, int]], now: float) -> None:
        cost = self.spec.transfer
        for job, tokens in started:
            self.by_id[job.id].result.pulled_tokens = tokens
            took = cost.latency_s + cost.token_s * tokens if cost is not None and tokens else 0.0
            if took:
                host.link = max(host.link, now) + took
                self._push(host.link, _MOVED, ("pulled", host, host.engine, job))
            else:
                self._moved(("pulled", host, host.engine, job), now)

    def _moved(self, what: tuple[str, _Host, Engine, Job], now: float) -> None:
        kind, host, engine, job = what
        if job.dead or not host.alive or host.engine is not engine:
            return
        self._cut(host, now)
        if kind == "fetched":
            engine.fetched(job)
        else:
            flight = self.by_id[job.id]
            self._release(flight, now)
            if engine.busy:
                host.pulled.append(job)
            else:
                engine.pulled(job)
        if not engine.busy:
            self._report(host, now)
        self._wake(host, now)

    def _release(self, flight: _Flight, now: float) -> None:
        """Give back the prompt's blocks on the prefill worker."""
        seat, job = flight.result.prefill, flight.first
        if not self.split or seat is None or job is None:
            return
        host = self.hosts[seat.worker]
        if host.flights.pop(flight.arrival.id, None) is None:
            return
        if job.generated:
            host.engine.release(job)
        else:
            host.engine.cancel(job)
        flight.first = None
        self._cut(host, now)
        self._wake(host, now)

    def _finish(self, flight: _Flight, job: Job, host: _Host, now: float) -> None:
        name, result = flight.arrival.id, flight.result
        result.end_s = now
        result.preemptions += job.preemptions
        del host.flights[name]
        host.finished += 1
        flight.ended = True
        if job.output > 1:
            self.policy.progress(name, job.generated, now)
        self.policy.finished(name, now)
        self._follow(flight, now)

    def _follow(self, flight: _Flight, now: float) -> None:
        for other in flight.next:
            self._push(max(other.arrival.at_s, now + other.arrival.think_s), _ARRIVAL, other)

    def _withdraw(self, flight: _Flight, now: float) -> None:
        """Take the request off all workers."""
        if flight in self.parked:
            self.parked.remove(flight)
        result, name = flight.result, flight.arrival.id
        self._release(flight, now)
        for seat, job in ((result.prefill, flight.first), (result.decode, flight.second)):
            if seat is None or job is None:
                continue
            host = self.hosts[seat.worker]
            if host.flights.pop(name, None) is not None:
                self._cut(host, now)
                host.engine.cancel(job)
                self._wake(host, now)
            result.preemptions += job.preemptions
        flight.first = flight.second = None

    def _again(self, flight: _Flight, now: float, reason: str) -> None:
        """Place the request anew after a failure, or give up."""
        self._withdraw(flight, now)
        if flight.result.attempts > self.spec.retries:
            self._give_up(flight, now, reason)
            return
        result = flight.result
        result.prefill = result.decode = None
        result.prefilled_s = result.first_token_s = math.nan
        result.pulled_tokens = 0
        self._place(flight, now)

    def _give_up(self, flight: _Flight, now: float, reason: str) -> None:
        self._withdraw(flight, now)
        flight.result.error = reason
        flight.result.end_s = now
        flight.ended = True
        self._follow(flight, now)

    def _timeout(self, what: tuple[_Flight, int], now: float) -> None:
        flight, attempt = what
        if flight.ended or flight.role is None or flight.result.attempts != attempt:
            return
        if math.isnan(flight.result.first_token_s):
            self.policy.failed(flight.arrival.id, flight.role, now, "timeout")
            self._again(flight, now, "timeout")

    def _tick(self, _: None, now: float) -> None:
        for host in self.order:
            if host.alive and now >= host.stuck and host.engine.role != "prefill":
                passed = host.engine.done_by(now)
                for flight in host.flights.values():
                    job = flight.second or flight.first
                    if job is not None and job.generated:
                        # One that was preempted waits, with nothing computed, beside those that a jump takes on.
                        self.policy.progress(flight.arrival.id, job.generated + (passed if job.computed else 0), now)
        self.policy.tick(now)
        parked, self.parked = self.parked, []
        for flight in parked:
            self._retry(flight, now)
        if self.real:
            ticks = math.ceil((self.events[0][0] - now) / self.spec.tick_s)
            if ticks <= _IDLE_TICKS or self.parked or any(host.flights for host in self.order):
                ticks = 1
            self._push(now + ticks * self.spec.tick_s, _TICK, None)

    def _retry(self, flight: _Flight, now: float) -> None:
        if flight.first is not None and self.split and flight.first.generated:
            self._hand_over(flight, now)
        else:
            self._place(flight, now)
