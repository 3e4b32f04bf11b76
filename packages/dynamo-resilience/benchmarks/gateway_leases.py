# SPDX-License-Identifier: Apache-2.0
"""Leases: four gateways over one pool, loaded beyond it, while gateways and the store die, pause and come back."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import statistics
import struct
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gateway_parts import Fake, Replica, body, fake, percentile, replicas, store, store_binary

from support.bench import Bench
from support.fake_frontend import Record, overlap
from support.http_load import Sample, client, closed_loop
from support.lease_history import Recorder, check
from support.store_server import StoreServer

__all__ = ["leases"]

_REPLICAS = 4
_TTL_S = 1.0
_CAPACITY, _BLOCKS = 32, 16
#: Twice what the pool carries is always there.
_CLIENTS = 2 * _CAPACITY // _REPLICAS
_ANSWER_S = 0.2
#: Answers that outlive the lease of a replica that stands still.
_LONG_S = 3.0 * _TTL_S


def _config(store_url: str, frontend: str) -> dict[str, Any]:
    model = {"capacity": {"sequences": _CAPACITY}, "blocks": _BLOCKS}
    return {
        "store": {"url": store_url},
        "sites": {"one": {"frontends": [frontend], "models": {"m": model}}},
        "lease": {"ttl_s": _TTL_S},
    }


class _Pause(NamedTuple):
    """A replica stood still, from when to when, and held so many units."""

    name: str
    begin: float
    end: float
    held: int

    def sent(self, record: Record) -> bool:
        """Whether the replica had sent this before, and it still ran."""
        return record.request_id.startswith(f"{self.name}.") and record.start <= self.begin < record.end


@dataclass
class _Run:
    """A pool under load, and what was seen of it.

    Attributes:
        samples: what the clients saw.
        records: what the frontend saw.
        pauses: replicas that stood still.
    """

    gateways: list[Replica]
    backend: Fake
    samples: list[Sample] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    pauses: list[_Pause] = field(default_factory=list)

    def look(self) -> list[Record]:
        """Fetch the frontend's records so far, those that run included."""
        now = self.backend.control.records()
        self.records += [one for one in now if one.end < float("inf")]
        return [*self.records, *(one for one in now if one.end == float("inf"))]

    def over(self, records: Sequence[Record]) -> int:
        """Return the most that ran above the capacity, without what paused replicas had sent before they paused."""
        live = [one for one in records if not any(pause.sent(one) for pause in self.pauses)]
        return max(0, max(running for _, running in overlap(live)) - _CAPACITY)

    def pauses_over(self, records: Sequence[Record]) -> list[tuple[int, int]]:
        """Return, for each pause, the most that ran above the capacity in all, and the units the paused one held."""
        found = []
        for pause in self.pauses:
            then = [n for at, n in overlap(records) if pause.begin <= at <= pause.end + _LONG_S]
            found.append((max(0, max(then) - _CAPACITY), pause.held))
        return found


@contextlib.asynccontextmanager
async def _loaded(gateways: list[Replica], backend: Fake) -> AsyncIterator[_Run]:
    """Keep every replica loaded."""
    run = _Run(gateways, backend)
    stopped = False
    async with client(30) as session:
        tasks = [
            asyncio.create_task(
                closed_loop(session, gateway.chat, body(), who=gateway.name, until=lambda: stopped, pause_s=0.05)
            )
            for gateway in gateways
            for _ in range(_CLIENTS)
        ]
        await _full(run, 20)
        try:
            yield run
        finally:
            stopped = True
            for samples in await asyncio.gather(*tasks):
                run.samples += samples
            run.records = run.look()


async def _full(run: _Run, seconds: float) -> None:
    """Wait until the frontend runs as many requests as the pool carries."""
    deadline = time.monotonic() + seconds
    while run.backend.control.counts()["running"] < _CAPACITY:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not {_CAPACITY} requests at the frontend within {seconds:g} s")
        await asyncio.sleep(0.02)


def leases(bench: Bench) -> None:
    """Run each fault, and record its rows."""
    bench.note(
        f"leases: {_REPLICAS} gateways, {_CAPACITY} sequences in {_BLOCKS} blocks, TTL {_TTL_S:g} s, answers of "
        f"{_ANSWER_S:g} s, {_REPLICAS * _CLIENTS} clients; over-admission is the most requests above {_CAPACITY} that "
        "ran at the frontend at once"
    )
    asyncio.run(_faults(bench))
    asyncio.run(_failover(bench))
    asyncio.run(_skew(bench))


async def _faults(bench: Bench) -> None:
    kills, pauses, restarts = (3, 1, 1) if bench.quick else (30, 6, 4)
    with store() as shared, fake(delay=_ANSWER_S, record=True) as backend, Recorder(shared) as recorder:
        with replicas(_REPLICAS, _config(shared.url, backend.url)) as gateways:
            async with _loaded(gateways, backend) as run:
                await asyncio.sleep(2 * _TTL_S)
                calm = run.look()
                back = [await _kill(run, turn) for turn in range(kills)]
                killed = run.look()
                backend.control.set(delay=_LONG_S)
                for turn in range(pauses):
                    await _pause(run, turn)
                backend.control.set(delay=_ANSWER_S)
                await asyncio.sleep(_LONG_S)
                paused = run.look()
                away = [await _restart(run, shared) for _ in range(restarts)]
        recorder.catch_up()
    _over(bench, run, "nothing wrong", calm)
    _over(bench, run, f"{kills} x kill -9", _since(killed, calm))
    for what, value in (("median", statistics.median(back)), ("p90", percentile(back, 0.9)), ("max", max(back))):
        name = f"leases: capacity back after kill -9, {what} of {kills}"
        bench.row(name, "s", ours=[value], reference=[_TTL_S], reference_name="one TTL", aim="<= 1")
    _over(bench, run, f"{pauses} x SIGSTOP past the TTL, live replicas", _since(paused, killed))
    for total, held in [max(run.pauses_over(paused), key=lambda one: one[0] / one[1])]:
        bench.row(
            f"leases: over-admission, {pauses} x SIGSTOP past the TTL, in all",
            "sequences",
            ours=[total],
            reference=[held],
            reference_name="units the paused one held",
            aim="<= 1",
        )
    _over(bench, run, f"{restarts} x store killed, away 1.5 TTL, back empty", _since(run.records, paused))
    lost = sum(not one.sound for one in run.samples if any(begin <= one.start <= end for begin, end in away))
    bench.row(f"leases: failed requests, {restarts} x store killed", "", ours=[lost], aim="== 0")
    _history(bench, "kill -9, SIGSTOP, store restart", recorder.lines)


def _over(bench: Bench, run: _Run, what: str, records: Sequence[Record]) -> None:
    bench.row(f"leases: over-admission, {what}", "sequences", ours=[run.over(records)], aim="== 0")


def _history(bench: Bench, what: str, lines: Sequence[str]) -> None:
    faults = check(lines)
    writes = sum('"HSET"' in line for line in lines)
    bench.row(f"leases: faults in the store's history, {what} ({writes} writes)", "", ours=[len(faults)], aim="== 0")
    for fault in faults[:3]:
        bench.note(f"leases, history: {fault[:300]}")


def _since(records: Sequence[Record], before: Sequence[Record]) -> list[Record]:
    """Return what ran after `before` was fetched; what ran then already is in both."""
    last = max(one.start for one in before)
    return [one for one in records if one.end > last]


async def _kill(run: _Run, turn: int) -> float:
    """Kill a replica, start it again; return after how many seconds the others had its capacity (at most 1.5 TTL)."""
    victim = run.gateways[turn % len(run.gateways)]
    await _full(run, 10)
    await asyncio.sleep(_TTL_S * random.uniform(0.5, 1.0))  # any time between two renewals
    begin = time.monotonic()
    victim.process.send_signal(signal.SIGKILL)
    await asyncio.sleep(1.5 * _TTL_S)
    records = run.look()
    # Its requests end when the frontend sees its connections go; from there on a share of the capacity is missing.
    its = [one.end for one in records if one.request_id.startswith(f"{victim.name}.") and one.start <= begin < one.end]
    if not its:
        raise RuntimeError(f"{victim.name} had no request at the frontend when it was killed")
    back = next((at for at, running in overlap(records) if at > max(its) and running >= _CAPACITY), None)
    await asyncio.to_thread(victim.restart)
    return 1.5 * _TTL_S if back is None else back - begin


async def _pause(run: _Run, turn: int) -> None:
    """Stop a replica, whose requests outlive its lease, until others have that; then let it go on."""
    victim = run.gateways[turn % len(run.gateways)]
    await asyncio.sleep(1.2 * _LONG_S)
    (pool,) = (await asyncio.to_thread(victim.state))["pools"]
    blocks = sum(account["lease"]["held"] for account in pool["accounts"].values())
    begin = time.monotonic()
    victim.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(1.5 * _TTL_S)
    victim.process.send_signal(signal.SIGCONT)
    run.pauses.append(_Pause(victim.name, begin, time.monotonic(), blocks * _CAPACITY // _BLOCKS))
    await asyncio.sleep(_LONG_S)


async def _restart(run: _Run, shared: StoreServer) -> tuple[float, float]:
    """Kill the store and start it empty; return from when to when that mattered."""
    begin = time.monotonic()
    await asyncio.to_thread(shared.kill)
    await asyncio.sleep(1.5 * _TTL_S)
    await asyncio.to_thread(shared.start)
    await asyncio.sleep(3 * _TTL_S)
    return begin, time.monotonic()


async def _failover(bench: Bench) -> None:
    """Kill the primary under load; a sentinel promotes its replica."""
    times = 1 if bench.quick else 3
    over, lost = [], 0
    for turn in range(times):
        with store() as primary, _replica(primary) as second, StoreServer.sentinel(primary) as sentinel:
            url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main"
            with fake(delay=_ANSWER_S, record=True) as backend, Recorder(primary) as first, Recorder(second) as then:
                with replicas(_REPLICAS, _config(url, backend.url)) as gateways:
                    async with _loaded(gateways, backend) as run:
                        await asyncio.sleep(_TTL_S)
                        await asyncio.to_thread(primary.kill)
                        await asyncio.sleep(4 * _TTL_S)
                primary.start()  # so that its recorder ends in order
            over.append(run.over(run.records))
            lost += sum(not one.sound for one in run.samples)
            promoted = second.client().info("replication")["role"]
            if promoted != "master":
                raise RuntimeError(f"the sentinel did not promote the replica: it is a {promoted}")
            if turn == 0:
                _history(bench, "failover", [*first.lines, *then.lines])
    bench.row(f"leases: over-admission, {times} x failover by a sentinel", "sequences", ours=[max(over)], aim="== 0")
    bench.row(f"leases: failed requests, {times} x failover by a sentinel", "", ours=[lost], aim="== 0")


def _replica(of: StoreServer) -> StoreServer:
    return StoreServer.replica(of=of)


async def _skew(bench: Bench) -> None:
    """Set wall clocks wrong: gateways an hour off, and the store's back and forth while it runs."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        bench.note("leases: wrong clocks were not run: they need a C compiler (apt-get install gcc)")
        return
    with tempfile.TemporaryDirectory(prefix="clocks-") as folder:
        library = Path(folder) / "clock.so"
        source = Path(__file__).with_name("gateway_clock.c")
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)

        def clock(name: str, seconds: float) -> dict[str, str]:
            offset = Path(folder) / name
            with offset.open("r+b" if offset.exists() else "wb") as file:
                file.write(struct.pack("=q", int(seconds * 1e9)))
            return {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(offset)}

        wrapped = Path(folder) / "store-server"
        exports = " ".join(f"{name}={value}" for name, value in clock("store", 0).items())
        wrapped.write_text(f'#!/bin/sh\nexport {exports}\nexec {store_binary()} "$@"\n')
        wrapped.chmod(0o755)
        with (
            StoreServer(program=str(wrapped)) as shared,
            fake(delay=_ANSWER_S, record=True) as backend,
            Recorder(shared) as recorder,
        ):
            config = _config(shared.url, backend.url)
            with replicas(_REPLICAS, config, env=lambda n: clock(f"gw{n}", 3600 * (n % 3 - 1))) as gateways:
                async with _loaded(gateways, backend) as run:
                    await asyncio.sleep(2 * _TTL_S)
                    calm = run.look()
                    clock("store", -10)
                    await asyncio.sleep(3 * _TTL_S)
                    back = run.look()
                    clock("store", 10)
                    await asyncio.sleep(3 * _TTL_S)
            seconds = float(shared.client().time()[0]) - time.time()
            recorder.catch_up()
    if abs(seconds - 10) > 2:
        raise RuntimeError(f"the store's clock should be 10 s ahead, and is {seconds:.1f} s")
    _over(bench, run, "gateways' wall clocks up to two hours apart", calm)
    _over(bench, run, "store's clock set back 10 s", _since(back, calm))
    _over(bench, run, "store's clock set forward 20 s", _since(run.records, back))
    lost = sum(not one.sound for one in run.samples)
    bench.row(f"leases: failed of {len(run.samples)} requests, wrong clocks", "", ours=[lost], aim="== 0")
    _history(bench, "wrong clocks", recorder.lines)
