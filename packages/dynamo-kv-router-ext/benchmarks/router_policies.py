# SPDX-License-Identifier: Apache-2.0
"""Round robin, least loaded, Dynamo's formula and ours on the same fleet, the same requests and the same weather.

What keeps it fair:

* The steps' true times come from a grid (`router_truth`) that no policy sees. Ours starts from the profile of another
  engine: the wrong model on the wrong number of GPUs. No policy is told how long an answer will be.
* Each worker's true speed begins anywhere within 30 % of that, and drifts at random. No policy is told.
* The settings of Dynamo's formula and of ours are chosen on one trace and judged on another; for agent sessions, on
  sessions drawn from another seed. The measure of the choice is the same: the geometric mean, over loads, of mean and
  99th percentile of the time to first token. Ours has one setting in its sweep, with three values.
* Dynamo's prefill load model, which AISimulate feeds, is in its sweep. It gets a profile that is fitted to the right
  engine: what ours does not get.
* Where Dynamo's formula as it comes does better on the judged requests than the settings that were chosen, it is the
  reference there: by hindsight, which ours does not get.
* A load is the prefill workers' busy time, as a share of the time in which requests or sessions arrive, under Dynamo's
  formula with the settings that were chosen for it. The speed of the requests is searched for until it is that.
* The judged seeds were not looked at while policy and benchmark were written; lower ones were. A seed draws the
  workers' speeds, their drift, and the sessions. The traces are what they are: each seed gets the next of five
  stretches of one.

The 99th percentile of the first token is largely the longest prompts' own time. So the same requests are also run on a
nearly idle fleet: no placement does much better than that.
"""

from __future__ import annotations

import functools
import itertools
import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from router_fidelity import trace_file
from router_truth import GridTiming

from dynamo_kv_router_ext import Placer, Profile, Request, Role, Seat, Settings, Terms, TierCost, Worker, load_profile
from dynamo_kv_router_ext.sim.fleet import Arrival, FleetSpec, Policy, WorkerSpec, simulate
from dynamo_kv_router_ext.sim.policies import DynamoKv, LeastLoaded, RoundRobin
from dynamo_kv_router_ext.sim.report import Summary, summarise
from dynamo_kv_router_ext.sim.scenario import drifting_speed
from dynamo_kv_router_ext.sim.traces import arrivals
from support.bench import Bench
from support.sessions import AgentWorkload

__all__ = ["run"]

LOADS = (0.5, 0.7, 0.85)
#: The load at which next to nothing waits.
IDLE = 0.05
#: Each judged figure is the median over these: another stretch of the trace, other speeds, another drift.
SEEDS = range(200, 205)
#: Those of a quick run, which is to leave the others unseen.
QUICK_SEEDS = range(2)
#: How many stretches of a trace are taken, evenly over it; each seed gets the next one.
STRETCHES = 5
#: The seed by which settings are chosen.
CHOICE_SEED = 1000
BLOCK = 64
#: The most new tokens of a step.
CHUNK = 8192


class Fleet(NamedTuple):
    """Who serves."""

    #: The name of its true times (`router_truth`); the profile that is fitted to that engine, for Dynamo's load model;
    #: and the one that ours starts from: of another engine, its coefficients off by factors between a tenth and ten.
    engine: str
    fitted: str
    profile: str
    prefill: int
    decode: int
    #: Tokens of KV of each worker, and in the host memory of each prefill worker.
    capacity_tokens: int
    host_tokens: int
    #: Seconds to move a token's KV between workers, and from the host's memory.
    transfer_s: float
    host_s: float


#: 128 KiB of KV a token (8 bits), moved at 100 GB/s.
QWEN = Fleet("qwen", "gb200-qwen3-32b-tp1", "gb200-glm-5.2-nvfp4-tp4", 4, 2, 12_000 * BLOCK, 2_000_000, 1.3e-6, 1.3e-6)
#: 54 kB of KV a token, at 400 and 100 GB/s.
GLM = Fleet("glm", "gb200-glm-5.2-nvfp4-tp4", "gb200-qwen3-32b-tp1", 4, 4, 20_000 * BLOCK, 4_000_000, 1.3e-7, 5.4e-7)


class Workload(NamedTuple):
    """What is asked of the fleet."""

    #: The name in the table.
    name: str
    #: The workload on which its settings are chosen.
    chosen_on: str
    #: Requests, or sessions, of a run that is judged, and of one by which settings are chosen.
    size: int
    choice_size: int
    #: The speed of the trace, or sessions per second, at a load of about 0.6.
    speed: float
    fleet: Fleet


WORKLOADS = (
    Workload("conversation", "synthetic", 2400, 1500, 0.8, QWEN),
    Workload("synthetic", "conversation", 2000, 1500, 0.9, QWEN),
    Workload("sessions", "sessions", 100, 60, 0.16, GLM),
)


class Peer(NamedTuple):
    """A policy with its settings, as it travels to another process."""

    kind: str
    settings: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        if not self.settings:
            return "Dynamo as it comes" if self == DYNAMO else self.kind
        return f"{self.kind}({', '.join(f'{name}={value:g}' for name, value in self.settings)})"


def _peers(kind: str, *grids: dict[str, Sequence[float]]) -> list[Peer]:
    """Return a peer for each point of each grid."""
    return [
        Peer(kind, tuple(zip(grid, values, strict=True)))
        for grid in grids
        for values in itertools.product(*grid.values())
    ]


DYNAMO = Peer("dynamo")
#: Dynamo's formula as it comes, and the settings of the sweep. The scale of the prefill term does not change a prefill
#: worker's rank, except beside the weight of a request, which is swept; a decoder has no such term.
DYNAMO_SWEEP = [
    DYNAMO,
    *_peers(
        "dynamo",
        {"overlap_credit": (0.5, 1.5, 2.0), "credit_decay": (0.0, 0.3, 1.0)},
        {"credit_decay": (0.3, 1.0)},
        {"host_weight": (0.5, 1.0)},
        {"overlap_credit": (1.0, 1.5), "temperature": (0.1,)},
        {"overlap_credit": (1.0, 1.5), "active_request_weight": (10.0, 50.0)},
        {"load_model": (1.0,), "overlap_credit": (0.5, 1.0, 1.5, 2.0), "credit_decay": (0.0, 0.3)},
        {"load_model": (1.0,), "overlap_credit": (1.0, 1.5), "active_request_weight": (10.0, 50.0)},
    ),
]
#: Where there are sessions, also with affinity, which Dynamo has in both pools. The formula is left with the first turn
#: of a session and with cold arrivals.
AFFINITY_SWEEP = _peers(
    "dynamo",
    {"session_ttl_s": (600.0,), "active_request_weight": (0.0, 10.0, 50.0, 200.0)},
    {"session_ttl_s": (600.0,), "overlap_credit": (0.5, 1.5)},
    {"session_ttl_s": (600.0,), "temperature": (0.1,)},
    {"session_ttl_s": (600.0,), "load_model": (1.0,), "active_request_weight": (0.0, 200.0)},
)
OURS_SWEEP = _peers("ours", {"others_weight": (0.5, 1.0, 2.0)})
#: Who is judged beside the two whose settings are chosen.
PLAIN = (Peer("round robin"), Peer("least loaded"), DYNAMO)


class LoadModel(DynamoKv):
    """Dynamo's formula with `router_prefill_load_model`: of what is booked at a seat, the oldest prompt's tokens shrink
    with the time since it became the oldest, down to 0 when it should have been read.

    Args:
        profile: what the duration is predicted by, of one prompt alone.
        settings: those of `DynamoKv`.
    """

    def __init__(self, profile: Profile, **settings: Any) -> None:
        super().__init__(**settings)
        self._profile = profile
        #: By seat, the prompts that are being read or wait: tokens, and seconds they should take. The oldest first.
        self._reading: dict[Seat, dict[str, tuple[int, float]]] = {}
        #: By seat, when the oldest became that.
        self._since: dict[Seat, float] = {}

    def _begun(self, booking: Any, now: float) -> None:
        super()._begun(booking, now)
        request = booking.request
        unread = self._unread.get((request.id, "prefill"), 0) if booking.role == "prefill" else 0
        if unread:
            queue = self._reading.setdefault(booking.seat, {})
            if not queue:
                self._since[booking.seat] = now
            queue[request.id] = unread, self._profile.prefill_s(unread, request.tokens - unread, CHUNK)

    def _ended(self, booking: Any, now: float) -> None:
        super()._ended(booking, now)
        queue = self._reading.get(booking.seat, {})
        if booking.role == "prefill" and booking.request.id in queue:
            if next(iter(queue)) == booking.request.id:
                self._since[booking.seat] = now
            del queue[booking.request.id]

    def _costs(self, request: Request, role: Role, now: float) -> tuple[Sequence[Seat], list[float], list[Terms]]:
        done = {}
        for seat, queue in self._reading.items():
            for unread, seconds in itertools.islice(queue.values(), 1):
                done[seat] = int(unread * min(1.0, (now - self._since[seat]) / seconds))
        for seat, tokens in done.items():
            self._loads[seat].prefill_tokens -= tokens
        try:
            return super()._costs(request, role, now)
        finally:
            for seat, tokens in done.items():
                self._loads[seat].prefill_tokens += tokens


@dataclass(frozen=True)
class Case:
    """One simulation; small, so that it travels to another process."""

    workload: str
    #: Where in the trace it begins, from 0 to 1; or the seed of the sessions.
    part: float
    size: int
    #: How many times as fast as the trace, or how many sessions begin per second.
    speed: float
    fleet: Fleet
    #: Of the workers' speeds.
    seed: int
    peer: Peer


@functools.lru_cache(maxsize=2)
def _trace(name: str) -> list[Arrival]:
    return arrivals(trace_file(name), block_size=BLOCK)


@functools.lru_cache(maxsize=2)
def _requests(workload: str, part: float, size: int, speed: float) -> list[Arrival]:
    """Return the requests of a run."""
    if workload == "sessions":
        return _sessions(int(part), size, speed)
    trace = _trace(workload)
    first = round(part * (len(trace) - size))
    found = trace[first : first + size]
    start = found[0].at_s
    return [replace(one, at_s=(one.at_s - start) / speed) for one in found]


def _sessions(seed: int, count: int, per_s: float) -> list[Arrival]:
    """Return agent sessions, the next turn of each after the answer of the one before it, and cold arrivals."""
    load = AgentWorkload(seed=seed, sessions=count, turns=10, ramp_s=count / per_s, cold_per_s=per_s / 3)
    last: dict[str, str] = {}
    found: list[Arrival] = []
    for one in load.requests():
        full, after = one.full_blocks, last.get(one.session_id)
        until = (one.input_length + one.output_length) // BLOCK
        ids = one.hash_ids
        first = one.stream << 24  # as a workload numbers its blocks
        id = f"{one.session_id}:{one.turn}"
        if one.cold and one.arrival_s > load.ramp_s:
            continue  # no cold arrivals beside the last sessions' ends
        found.append(
            Arrival(
                id=id,
                at_s=0.0 if after else one.arrival_s,
                tokens=one.input_length,
                output_tokens=one.output_length,
                blocks=tuple(ids[:full]),
                session=one.session_id,
                after=after,
                think_s=one.think_s,
                answer=() if one.cold else tuple(range(first + full, first + until)),
            )
        )
        last[one.session_id] = id
    return found


@functools.cache
def _truth(engine: str) -> GridTiming:
    return GridTiming(engine)


def _spec(fleet: Fleet, seed: int) -> FleetSpec:
    """Return the fleet for the simulator, with speeds that drift."""
    counts: tuple[tuple[Role, int], ...] = (("prefill", fleet.prefill), ("decode", fleet.decode))
    workers = [
        WorkerSpec(
            Worker(f"{role}-{number}", role=role, capacity_tokens=fleet.capacity_tokens, chunk_tokens=CHUNK),
            speed=drifting_speed(f"{seed} {role} {number}", 0.3),
            host_tokens=fleet.host_tokens if role == "prefill" else 0,
        )
        for role, count in counts
        for number in range(count)
    ]
    return FleetSpec(
        workers=tuple(workers),
        timing=_truth(fleet.engine),
        block_size=BLOCK,
        transfer=TierCost(0.005, fleet.transfer_s),
        host=TierCost(0.002, fleet.host_s),
        event_lag_s=0.02,
    )


def _policy(peer: Peer, fleet: Fleet, seed: int) -> Policy:
    settings: dict[str, Any] = dict(peer.settings)
    if peer.kind == "dynamo":
        if settings.pop("load_model", 0.0):
            return LoadModel(load_profile(fleet.fitted), block_size=BLOCK, seed=seed, **settings)
        return DynamoKv(block_size=BLOCK, seed=seed, **settings)
    if peer.kind == "ours":
        return Placer(load_profile(fleet.profile), Settings(**settings), block_size=BLOCK)
    return LeastLoaded(seed) if peer.kind == "least loaded" else RoundRobin()


def simulated(case: Case) -> Summary:
    """Run one simulation, in whichever process; the load is put beside the utilisation of the roles."""
    requests = _requests(case.workload, case.part, case.size, case.speed)
    result = simulate(_spec(case.fleet, case.seed), requests, _policy(case.peer, case.fleet, case.seed))
    found = summarise(result)
    if found.failed:
        raise RuntimeError(f"{found.failed} requests were not answered: {case}")
    # Sessions go on after the last one has begun, with ever fewer of them.
    arriving_s = case.size / case.speed if case.workload == "sessions" else requests[-1].at_s
    load = found.utilisation["prefill"] * result.duration_s / arriving_s
    return replace(found, utilisation={**found.utilisation, "load": load})


class Runner:
    """Runs simulations in two processes, each once."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(min(2, os.cpu_count() or 1), multiprocessing.get_context("spawn"))
        self._known: dict[Case, Summary] = {}
        self.count = 0

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, cases: Iterable[Case]) -> None:
        """Make sure that the results of these cases are known."""
        missing = [case for case in dict.fromkeys(cases) if case not in self._known]
        self._known.update(zip(missing, self._pool.map(simulated, missing), strict=True))
        self.count += len(missing)

    def __getitem__(self, case: Case) -> Summary:
        if case not in self._known:
            self.run([case])
        return self._known[case]


def _case(workload: Workload, speed: float, seed: int, peer: Peer) -> Case:
    size = workload.choice_size if seed >= CHOICE_SEED else workload.size
    part = seed if workload.name == "sessions" else seed % STRETCHES / (STRETCHES - 1)
    return Case(workload.name, part, size, speed, workload.fleet, seed, peer)


def _cases(workload: Workload, speed: float, seeds: Iterable[int], peer: Peer) -> list[Case]:
    return [_case(workload, speed, seed, peer) for seed in seeds]


def _speeds(
    runner: Runner, workload: Workload, loads: Sequence[float], seeds: Sequence[int], peer: Peer
) -> list[float]:
    """Return the speeds at which a policy has these loads, on the mean over seeds."""
    speeds = [workload.speed * load / 0.6 for load in loads]
    found: list[list[tuple[float, float]]] = [[] for _ in loads]
    for _ in range(4):
        runner.run(case for speed in speeds for case in _cases(workload, speed, seeds, peer))
        for place, load in enumerate(loads):
            cases = _cases(workload, speeds[place], seeds, peer)
            reached = statistics.fmean(runner[case].utilisation["load"] for case in cases)
            found[place].append((abs(reached - load), speeds[place]))
            # Work grows with the speed, and faster than that where a cache turns over.
            if min(found[place])[0] > 0.02:
                speeds[place] *= min(1.6, max(0.6, (load / reached) ** 0.8))
    return [min(tried)[1] for tried in found]


def _score(summaries: Sequence[Summary], base: Sequence[Summary]) -> float:
    """Return how a policy does beside another: the geometric mean over mean and p99 of the first token, run by run."""
    logs = [
        math.log(one.ttft_mean_s / other.ttft_mean_s) + math.log(one.ttft_p99_s / other.ttft_p99_s)
        for one, other in zip(summaries, base, strict=True)
    ]
    return math.exp(statistics.fmean(logs) / 2)


def run(bench: Bench) -> None:
    for workload in WORKLOADS:
        if workload.name != "sessions":
            trace_file(workload.name)
    seeds = QUICK_SEEDS if bench.quick else SEEDS
    loads = LOADS[1:2] if bench.quick else LOADS
    workloads: Sequence[Workload] = WORKLOADS
    if bench.quick:
        workloads = [one._replace(size=one.size // 4, choice_size=one.choice_size // 4) for one in WORKLOADS]
    with Runner() as runner:
        chosen = {workload.name: _choose(runner, bench, workload, loads) for workload in workloads}
        for workload in workloads:
            _judge(runner, bench, workload, loads, seeds, *chosen[workload.chosen_on])
        bench.note(
            f"{runner.count} simulations; speeds within 30 %, drifting; judged on seeds {seeds[0]} to {seeds[-1]}: "
            f"median, and spread over them; settings were chosen on seed {CHOICE_SEED}"
        )
    for fleet in dict.fromkeys(workload.fleet for workload in WORKLOADS):
        served = ", ".join(workload.name for workload in WORKLOADS if workload.fleet is fleet)
        bench.note(
            f"{served}: {fleet.prefill} prefill and {fleet.decode} decode workers; true times: "
            f"{_truth(fleet.engine).source}; ours starts from the profile {fleet.profile}"
        )


#: The figures with aims: how ours is meant to be beside Dynamo's best. ITL may vary by 2 %.
FIGURES: tuple[tuple[str, str, Callable[[Summary], float], str], ...] = (
    ("mean TTFT", "s", lambda one: one.ttft_mean_s, "<= 0.8"),
    ("p99 TTFT", "s", lambda one: one.ttft_p99_s, "<= 0.7"),
    ("mean ITL", "ms", lambda one: one.itl_mean_s * 1e3, "<= 1.02"),
)


def _choose(runner: Runner, bench: Bench, workload: Workload, loads: Sequence[float]) -> tuple[Peer, Peer]:
    """Return the best settings of Dynamo's formula and of ours on a workload.

    First at one load, which Dynamo's formula as it comes has; then at all, which the best of those has.
    """
    sweep = DYNAMO_SWEEP + (AFFINITY_SWEEP if workload.name == "sessions" else [])
    if bench.quick:
        sweep = sweep[::6]

    def best(peers: Sequence[Peer], speeds: Sequence[float]) -> Peer:
        cases = {peer: [_case(workload, speed, CHOICE_SEED, peer) for speed in speeds] for peer in (DYNAMO, *peers)}
        runner.run(case for each in cases.values() for case in each)
        base = [runner[case] for case in cases[DYNAMO]]
        scores = {peer: _score([runner[case] for case in cases[peer]], base) for peer in peers}
        found = min(peers, key=lambda peer: scores[peer])
        bench.note(
            f"chosen on {workload.name} of {len(peers)} settings: {found}; they are at {scores[found]:.2f} to "
            f"{max(scores.values()):.2f} of Dynamo's formula as it comes, at {', '.join(f'{x:.3g}' for x in speeds)} "
            f"{'sessions/s' if workload.name == 'sessions' else 'of the speed of the trace'}"
        )
        print(bench.notes[-1], flush=True)
        return found

    first = best(sweep, _speeds(runner, workload, LOADS[1:2], [CHOICE_SEED], DYNAMO))
    speeds = _speeds(runner, workload, loads, [CHOICE_SEED], first)
    return best(sweep, speeds), best(OURS_SWEEP, speeds)


def _judge(
    runner: Runner,
    bench: Bench,
    workload: Workload,
    loads: Sequence[float],
    seeds: Sequence[int],
    dynamo: Peer,
    ours: Peer,
) -> None:
    """Record the rows of one workload."""
    speeds = _speeds(runner, workload, loads, seeds, dynamo)
    for load, speed in zip(loads, speeds, strict=True):
        where = f"{workload.name} at {load:g}"
        cases = {peer: _cases(workload, speed, seeds, peer) for peer in dict.fromkeys((*PLAIN, dynamo, ours))}
        runner.run(case for each in cases.values() for case in each)
        found = {peer: [runner[case] for case in each] for peer, each in cases.items()}
        best = DYNAMO if _score(found[DYNAMO], found[dynamo]) < 1 else dynamo
        others = {"Dynamo's best": best, **{str(peer): peer for peer in PLAIN if peer != best}}
        for name, peer in others.items():
            for metric, unit, value, aim in FIGURES:
                bench.row(
                    f"{where}: {metric}",
                    unit,
                    ours=[value(one) for one in found[ours]],
                    reference=[value(one) for one in found[peer]],
                    reference_name=name,
                    aim=aim if peer == best else None,
                )
        if best != dynamo:
            bench.note(f"{where}: Dynamo's formula as it comes does better than the settings chosen; it is its best")
        for peer, each in found.items():
            _tell(bench, f"{where}, {peer}", each)
    cases_idle = _cases(workload, speeds[0] * IDLE / loads[0], seeds, ours)
    runner.run(cases_idle)
    idle = [runner[case] for case in cases_idle]
    for metric, unit, value, _ in FIGURES:
        bench.row(f"{workload.name}, fleet nearly idle: {metric}", unit, ours=[value(one) for one in idle])
    _tell(bench, f"{workload.name}, fleet nearly idle, {ours}", idle)


def _tell(bench: Bench, what: str, each: Sequence[Summary]) -> None:
    """Note the medians over seeds, and how far the load varies among them."""

    def middle(value: Callable[[Summary], float]) -> float:
        return statistics.median(map(value, each))

    loads = [one.utilisation["load"] for one in each]
    ttft = ", ".join(
        f"{name} {middle(value):.2f} s"
        for name, value in {
            "mean": lambda one: one.ttft_mean_s,
            "p50": lambda one: one.ttft_p50_s,
            "p99": lambda one: one.ttft_p99_s,
        }.items()
    )
    bench.note(
        f"{what}: TTFT {ttft}, ITL {middle(lambda one: one.itl_mean_s) * 1e3:.1f} ms, "
        f"hits {middle(lambda one: one.hit_device):.0%} + host {middle(lambda one: one.hit_host):.0%}, "
        f"load {statistics.median(loads):.2f} ({min(loads):.2f} to {max(loads):.2f})"
    )
    print(bench.notes[-1], flush=True)
