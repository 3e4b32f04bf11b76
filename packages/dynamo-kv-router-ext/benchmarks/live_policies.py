# SPDX-License-Identifier: Apache-2.0
"""Agent sessions before real frontends and mock engines: who routes how well, and whether the simulator said so.

Lengths are a sixteenth of `support.sessions`' agents and times a half, so that two cores have little to do; a token
therefore takes eight times as long as it would. How long steps last is a table that mockers and simulator both read:
the polynomials of Dynamo's mocker, scaled. Workers differ in speed by up to 20 %, which no policy is told. Ours starts
from a profile that takes prompts for twice as slow and answers for twice as fast as they are.

The next turn of a session comes its think time after the answer before it, so every way of routing has the same
requests, though not at the same instants. Each run has a fleet of its own, with nothing in its caches. The modes of a
seed run at the same time: all their processes together take a fraction of one core, which is printed.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from dynamo_kv_router_ext import Placer, Profile, Role, Worker
from dynamo_kv_router_ext.sim.fleet import Arrival, FleetSpec, Policy, WorkerSpec, simulate
from dynamo_kv_router_ext.sim.policies import DynamoKv, LeastLoaded
from dynamo_kv_router_ext.sim.report import summarise
from dynamo_kv_router_ext.sim.scenario import fitted_profile
from dynamo_kv_router_ext.sim.timing import TableTiming
from support.bench import Bench
from support.live_fleet import Answer, Etcd, LiveFleet, Mode, ask, body, client, live_model, mocker
from support.sessions import AgentWorkload, Request

__all__ = ["run"]

#: Tokens, and seconds, of a run by those of the agents.
LENGTH, TIME = 1 / 16, 1 / 2
BLOCK = 64
CHUNK = 512
#: Blocks of KV that a decoder holds, and a prefill worker: all that generates, and about 16 sessions.
DECODE_BLOCKS, PREFILL_BLOCKS = 4096, 2400
VOCABULARY = (10, 1900)
SEEDS = range(300, 305)
QUICK_SEEDS = range(10, 11)


class Fleet(NamedTuple):
    """Who serves, and what is asked."""

    name: str
    #: The speed of each worker.
    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    sessions: int
    #: Seconds over which they begin: their first turns alone give the prefill workers a load of 0.8.
    ramp_s: float
    modes: tuple[Mode, ...]


FLEETS = (
    Fleet("2P2D", (1.2, 0.8), (1.1, 0.9), 16, 14.0, ("least-loaded", "kv", "kv+affinity", "ours")),
    Fleet("4P2D", (1.2, 1.0, 1.0, 0.8), (1.1, 0.9), 26, 11.5, ("least-loaded", "kv", "ours")),
)


class Figures(NamedTuple):
    """What one run comes to: seconds, and the share of the prompts' tokens that was cached."""

    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    itl: float
    hits: float


#: Name in the table, unit, factor to that unit, of each of the figures.
_SHOWN = (
    ("mean TTFT", "ms", 1e3),
    ("p50 TTFT", "ms", 1e3),
    ("p99 TTFT", "ms", 1e3),
    ("mean ITL", "ms", 1e3),
    ("prompt tokens cached", "%", 100.0),
)


class Turn(NamedTuple):
    """A request, and the place in the list of the one whose answer it follows."""

    request: Request
    after: int | None


def run(bench: Bench) -> None:
    """Run every fleet in every mode, seed by seed, and the simulator beside them."""
    seeds = QUICK_SEEDS if bench.quick else SEEDS
    with tempfile.TemporaryDirectory(prefix="router-live-") as folder:
        home = Path(folder)
        model = live_model(home / "model")
        table = _write_table(home / "times.npz")
        timing = TableTiming(table)
        profile = _wrong(fitted_profile(timing, "the mockers' table", "live", "mocker"))
        (home / "profile.json").write_bytes(msgspec.json.encode(profile))
        held: list[bool] = []
        for fleet in FLEETS[:1] if bench.quick else FLEETS:
            live: dict[Mode, list[Figures]] = {mode: [] for mode in fleet.modes}
            told: dict[Mode, list[Figures]] = {mode: [] for mode in fleet.modes}
            for seed in seeds:
                turns = _turns(fleet, seed, bench.quick)
                for mode in fleet.modes:
                    told[mode].append(_simulated(fleet, mode, turns, timing, profile))
                places = {mode: home / f"{fleet.name}-{seed}-{mode}" for mode in fleet.modes}
                with ThreadPoolExecutor(len(places)) as at_once:
                    runs = {
                        mode: at_once.submit(_live, fleet, mode, turns, model, table, place, home / "profile.json")
                        for mode, place in places.items()
                    }
                    for mode, one in runs.items():
                        live[mode].append(one.result())
            held += _record(bench, fleet, live, told)
        bench.row(
            "what the simulator says of ours beside the others, true live",
            "share",
            ours=[statistics.fmean(held)],
            aim="== 1",
        )
    bench.note(
        f"policies: seeds {seeds[0]} to {seeds[-1]}; lengths by {LENGTH:g}, times by {TIME:g}; claims are mean TTFT "
        "and ITL, ours beside each other mode, where the simulator has them more than 5 % apart"
    )


def _turns(fleet: Fleet, seed: int, quick: bool) -> list[Turn]:
    """Return the requests of a run, in order of their nominal arrival."""
    load = AgentWorkload(
        seed=seed,
        sessions=fleet.sessions // 2 if quick else fleet.sessions,
        turns=3 if quick else 5,
        ramp_s=fleet.ramp_s / 2 if quick else fleet.ramp_s,
        think_s=5.0 * TIME,
        max_think_s=20.0 * TIME,
        first_token_s=2.0 * TIME,
        per_token_s=0.01 * TIME / LENGTH,
        cold_per_s=0.1 * len(fleet.prefill) / 2,
        block_size=BLOCK,
    ).scaled(LENGTH)
    found: list[Turn] = []
    last: dict[str, int] = {}
    for request in load.requests():
        if request.cold and request.arrival_s > load.ramp_s:
            continue  # no cold arrivals beside the last sessions' ends
        found.append(Turn(request, last.get(request.session_id)))
        last[request.session_id] = len(found) - 1
    return found


def _write_table(path: Path) -> Path:
    """Write the mocker's polynomials at our scale, for a decoder of our size."""
    lengths = np.array([1.0, CHUNK, 4.0 * CHUNK])
    held = DECODE_BLOCKS * BLOCK
    active = np.linspace(0.0, held, 33)
    used = active / held
    steps = (-25.74 * used**2 + 54.01 * used + 5.74) * TIME / LENGTH
    np.savez(
        path,
        prefill_isl=lengths,
        prefill_ttft_ms=(16.5 + 1.9e-2 * lengths / LENGTH) * TIME,
        decode_active_kv_tokens=active,
        decode_context_length=np.array([1.0, 1e5]),
        decode_itl=np.stack([steps, steps], axis=1),
    )
    return path


def _wrong(profile: Profile) -> Profile:
    """Return a profile that takes prompts for twice as slow and answers for twice as fast."""
    prefill, decode = profile.prefill, profile.decode
    slower = replace(prefill, base_s=2 * prefill.base_s, token_s=2 * prefill.token_s, pair_s=2 * prefill.pair_s)
    faster = replace(decode, base_s=decode.base_s / 2, sequence_s=decode.sequence_s / 2, token_s=decode.token_s / 2)
    return replace(profile, prefill=slower, decode=faster)


def _live(
    fleet: Fleet, mode: Mode, turns: Sequence[Turn], model: Path, table: Path, home: Path, profile: Path
) -> Figures:
    """Run one mode; raises RuntimeError where a request was not answered."""
    # The hand-over takes no time, in the simulation as well. A decoder takes in a prompt by steps of the batched
    # tokens, although it reads none of it: all of it in one, or its wait would grow with the answers beside it.
    more = ("--planner-profile-data", str(table), "--kv-transfer-bandwidth", "0", "--max-num-batched-tokens")
    workers = [
        mocker(model, "prefill", blocks=PREFILL_BLOCKS, speed=speed, more=(*more, str(CHUNK)))
        for speed in fleet.prefill
    ]
    workers += [
        mocker(model, "decode", blocks=DECODE_BLOCKS, speed=speed, more=(*more, "32768")) for speed in fleet.decode
    ]
    options = ("--profile", str(profile))
    with (
        Etcd(home / "etcd") as etcd,
        LiveFleet(home, mode, workers, router_options=options, env=etcd.environment, count_reads=True) as running,
    ):
        before, start, computed = running.cpu_s(), time.monotonic(), -running.read_tokens()
        answers = asyncio.run(_replay(running.urls[0], turns))
        spent = sum(running.cpu_s().values()) - sum(before.values())
        cores = spent / (time.monotonic() - start)
        computed += running.read_tokens()
    failed = [answer for answer in answers if answer.error]
    if failed:
        raise RuntimeError(
            f"{fleet.name}, {mode}: {len(failed)} of {len(answers)} not answered, one: {failed[0].error}"
        )
    found = _figures(
        [one.ttft_s for one in answers],
        [one.itl_s for one in answers],
        1 - computed / sum(one.prompt for one in answers),
    )
    print(f"{fleet.name}, {mode}: {_words(found)}; {len(answers)} requests, {cores:.2f} cores", flush=True)
    return found


async def _replay(url: str, turns: Sequence[Turn]) -> list[Answer]:
    """Send each request at its time, or its think time after the answer before it."""
    low, high = VOCABULARY
    sent = [body(turn.request.tokens(vocab_size=high, first_token=low), turn.request.output_length) for turn in turns]
    ended = [asyncio.Event() for _ in turns]
    begin = time.monotonic() + 0.2

    async def one(session: object, place: int) -> Answer:
        turn = turns[place]
        if turn.after is None:
            await asyncio.sleep(begin + turn.request.arrival_s - time.monotonic())
        else:
            await ended[turn.after].wait()
            await asyncio.sleep(turn.request.think_s)
        try:
            return await ask(session, url, sent[place], session_id=turn.request.session_id)  # type: ignore[arg-type]
        finally:
            ended[place].set()

    async with client(300) as session:
        return list(await asyncio.gather(*(one(session, place) for place in range(len(turns)))))


def _simulated(fleet: Fleet, mode: Mode, turns: Sequence[Turn], timing: TableTiming, profile: Profile) -> Figures:
    """Run the same requests through the simulator."""
    pools: tuple[tuple[Role, tuple[float, ...], int], ...] = (
        ("prefill", fleet.prefill, PREFILL_BLOCKS),
        ("decode", fleet.decode, DECODE_BLOCKS),
    )
    workers = [
        WorkerSpec(
            Worker(f"{role}-{number}", role=role, capacity_tokens=blocks * BLOCK, chunk_tokens=CHUNK),
            speed=((0.0, speed),),
        )
        for role, speeds, blocks in pools
        for number, speed in enumerate(speeds)
    ]
    arrivals = [
        Arrival(
            id=str(place),
            at_s=0.0 if turn.after is not None else turn.request.arrival_s,
            tokens=turn.request.input_length,
            output_tokens=turn.request.output_length,
            blocks=tuple(turn.request.hash_ids[: turn.request.full_blocks]),
            session=turn.request.session_id,
            after=None if turn.after is None else str(turn.after),
            think_s=turn.request.think_s,
        )
        for place, turn in enumerate(turns)
    ]
    policies: dict[Mode, Callable[[], Policy]] = {
        "least-loaded": LeastLoaded,
        "kv": lambda: DynamoKv(block_size=BLOCK),
        "kv+affinity": lambda: DynamoKv(block_size=BLOCK, session_ttl_s=600.0),
        "ours": lambda: Placer(profile, block_size=BLOCK),
    }
    result = simulate(FleetSpec(tuple(workers), timing, block_size=BLOCK, event_lag_s=0.01), arrivals, policies[mode]())
    summary = summarise(result)
    found = _figures(
        [one.ttft_s for one in result.requests], [one.itl_s for one in result.requests], summary.hit_device
    )
    print(f"{fleet.name}, {mode}, simulated: {_words(found)}; {summary.utilisation}", flush=True)
    return found


def _figures(ttft: Sequence[float], itl: Sequence[float], hits: float) -> Figures:
    return Figures(
        statistics.fmean(ttft),
        statistics.median(ttft),
        float(np.percentile(ttft, 99)),
        statistics.fmean(one for one in itl if not math.isnan(one)),
        hits,
    )


def _words(found: Figures) -> str:
    return ", ".join(f"{name} {value * by:.4g} {unit}" for (name, unit, by), value in zip(_SHOWN, found, strict=True))


def _record(bench: Bench, fleet: Fleet, live: dict[Mode, list[Figures]], told: dict[Mode, list[Figures]]) -> list[bool]:
    """Record a fleet's rows, and return which of the simulator's claims are true."""
    held = []
    for mode in fleet.modes:
        if mode == "ours":
            continue
        for place, (name, unit, by) in enumerate(_SHOWN):
            bench.row(
                f"{fleet.name}: {name}",
                unit,
                ours=[by * one[place] for one in live["ours"]],
                reference=[by * one[place] for one in live[mode]],
                reference_name=mode,
            )
        for place in (0, 3):
            said, seen = (
                statistics.median(one[place] for one in found["ours"])
                / statistics.median(one[place] for one in found[mode])
                for found in (told, live)
            )
            if abs(said - 1) > 0.05:
                held.append((said < 1) == (seen < 1))
            bench.note(f"{fleet.name}: {_SHOWN[place][0]}, ours / {mode}: {said:.2f} in the simulator, {seen:.2f} live")
    for source, found in (("live", live), ("simulated", told)):
        order = sorted(fleet.modes, key=lambda mode: statistics.median(one.ttft_mean for one in found[mode]))
        bench.note(f"{fleet.name}, {source}, by mean TTFT: {', '.join(order)}")
    return held
