# SPDX-License-Identifier: Apache-2.0
"""Load on one core: the gateway beside its peers, what each feature costs, and memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from gateway_parts import (
    BODY,
    CORES,
    Fake,
    body,
    cpu_seconds,
    fake,
    key,
    paused,
    pinned,
    replicas,
    rss_mib,
    store,
    tenants,
)
from gateway_peers import PEERS

from support.bench import Bench
from support.http_load import OpenStreams, WrkResult, client, post, wrk
from support.processes import Process, free_port

__all__ = ["load", "memory"]

_TENANT = "gold"
_KEY = {"authorization": f"Bearer {key(_TENANT)}"}
#: Enough for every connection of the load: what is measured is the accounting, not the waiting.
_CAPACITY = {"sequences": 8192, "prefill_tokens": 8192 * 64, "kv_tokens": 8192 * 8192}
_NO_BREAKERS: dict[str, Any] = {"breaker": None}


def _config(backend: str, store_url: str, *features: str) -> dict[str, Any]:
    """Return a configuration with some of `breakers`, `leases`, `tenants`; the store is shared where one needs it."""
    model: dict[str, Any] = {"capacity": _CAPACITY} if "leases" in features else {}
    if {"leases", "tenants"} <= set(features):
        model["reserved"] = {_TENANT: 0.75}
    return {
        "store": {"url": store_url if {"breakers", "leases"} & set(features) else "memory:"},
        "sites": {"one": {"frontends": [backend], "models": {"m": model}}},
        **({} if "breakers" in features else _NO_BREAKERS),
        **({"tenants": tenants({_TENANT: 1.0, "other": 1.0})} if "tenants" in features else {}),
    }


#: What is switched on in which gateway.
_FEATURES: dict[str, tuple[str, ...]] = {
    "bare": (),
    "all on": ("breakers", "leases", "tenants"),
    "breakers": ("breakers",),
    "leases": ("leases",),
    "tenants": ("tenants",),
}


@dataclass
class _System:
    """Something that answers, and what was measured of it by cell."""

    name: str
    url: str
    #: Its processes, none where the frontend itself is asked.
    pids: Sequence[int] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    results: dict[str, list[WrkResult]] = field(default_factory=dict)
    #: Microseconds of CPU for one request.
    cpu: dict[str, list[float]] = field(default_factory=dict)
    #: Milliseconds to the first byte of a stream, one at a time.
    first_ms: list[float] = field(default_factory=list)
    #: Requests without a sound answer, in all cells.
    failed: int = 0

    def rates(self, cell: str) -> list[float]:
        return [result.rate for result in self.results[cell]]

    def p50(self, cell: str) -> list[float]:
        return [result.p50_ms for result in self.results[cell]]


@contextlib.contextmanager
def _systems(backend: Fake, store_url: str) -> Iterator[dict[str, _System]]:
    """Run everything that is compared, all of it on the measured core."""
    core = CORES[0]
    with contextlib.ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="gateway-bench-")))
        chat = f"{backend.url}/v1/chat/completions"
        found = {"direct": _System("direct", chat)}
        port = free_port()
        relay = pinned(
            core, [sys.executable, str(Path(__file__).with_name("gateway_relay.py")), str(port), backend.url]
        )
        process = running.enter_context(Process(relay, name="relay", ready=f"http://127.0.0.1:{port}/v1/models"))
        found["relay"] = _System("bare aiohttp relay", f"http://127.0.0.1:{port}/v1/chat/completions", [process.pid])
        for name, features in _FEATURES.items():
            config = _config(backend.url, store_url, *features)
            (one,) = running.enter_context(replicas(1, config, core=core))
            headers = _KEY if "tenants" in features else {}
            found[name] = _System(f"gateway, {name}", one.chat, [one.process.pid], headers)
        peers = [peer.process(backend.url, core, folder) for peer in PEERS]
        for process, _ in peers:
            running.callback(_stop, process)
        with ThreadPoolExecutor() as pool:
            list(pool.map(Process.start, (process for process, _ in peers)))
        for peer, (process, url) in zip(PEERS, peers, strict=True):
            found[peer.name] = _System(peer.title, url, process.members())
        yield found


def _stop(process: Process) -> None:
    with contextlib.suppress(ValueError):  # it was never started
        process.stop()


def load(bench: Bench) -> None:
    """Measure throughput, latency and CPU."""
    seconds, rounds = (1, 1) if bench.quick else (3, 3)
    counts = (1, 64) if bench.quick else (1, 8, 64, 512)
    compared = ("direct", "relay", "bare", "all on", *(peer.name for peer in PEERS))
    with fake(core=CORES[1]) as backend, store() as shared:
        _pin(shared.pid)
        with _systems(backend, shared.url) as systems:
            for name in compared:  # a first time for everybody
                _first_byte(systems, name, 10)
            for turn in range(rounds):
                for streamed in (False, True):
                    for count in counts:
                        for name in _turned(compared, turn):
                            if name != "litellm":
                                longer = 2 if streamed and count > 64 else 1  # several rounds of all connections
                                _run(systems, name, _cell(streamed, count), streamed, count, seconds * longer)
                            elif not streamed:
                                _run(systems, name, _cell(False, count), False, count, max(seconds, 8 * count // 512))
                for count in (1, 8):  # more at once take it a minute
                    _run(systems, "litellm", _cell(True, count), True, count, 2 * seconds + 1)
            # With pauses, or the frontend would be busy with the second token while the first is on its way.
            backend.control.set(pace=0.003, tokens=3)
            for name in compared:
                _first_byte(systems, name, 50 if bench.quick else 200)
            for turn in range(rounds):
                for name in _turned(tuple(_FEATURES), turn):
                    _run(systems, name, "cpu", False, 64, seconds)
            backend.control.set(pace=0.01, tokens=200)
            paced = ("bare", "all on", "sglang-router") if bench.quick else compared[1:]
            for turn in range(rounds):
                for name in _turned(paced, turn):
                    _paced(systems, name, 64)
            _rows(bench, systems, counts)


def _cell(streamed: bool, count: int) -> str:
    return f"{'200-token streams' if streamed else 'plain'}, c = {count}"


def _turned(names: Sequence[str], by: int) -> Sequence[str]:
    by %= len(names)
    return [*names[by:], *names[:by]]


def _pin(pid: int) -> None:
    """Put a process that runs already on the load's core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {CORES[1]})


def _alone(systems: Mapping[str, _System], one: _System) -> contextlib.AbstractContextManager[None]:
    """Stop all the other systems."""
    return paused([pid for other in systems.values() if other is not one for pid in other.pids])


def _run(systems: Mapping[str, _System], name: str, cell: str, streamed: bool, count: int, seconds: float) -> None:
    """Load one system while the others stand still, and note what came of it."""
    one = systems[name]
    request = {**BODY, "stream": True} if streamed else BODY
    with _alone(systems, one):
        before = cpu_seconds(one.pids)
        result = wrk(one.url, request, connections=count, seconds=seconds, headers=one.headers, core=CORES[1])
        if one.pids:
            used = (cpu_seconds(one.pids) - before) / result.requests * 1e6
            _settle(one.pids)
            one.cpu.setdefault(cell, []).append(used)
    one.failed += result.failed
    one.results.setdefault(cell, []).append(result)


def _paced(systems: Mapping[str, _System], name: str, count: int) -> None:
    """Measure the CPU that a stream takes whose tokens come one by one, so many streams at once."""
    one = systems[name]

    async def read() -> int:
        streams = OpenStreams()
        async with client(120) as session:
            await streams.open(session, one.url, body(stream=True), count, one.headers, together=count)
            await streams.finish()
        return streams.finished

    with _alone(systems, one), _on_load_core():
        before = cpu_seconds(one.pids)
        finished = uvloop.run(read())
        used = cpu_seconds(one.pids) - before
    if finished != count:
        raise RuntimeError(f"{one.name}: {count - finished} of {count} streams failed")
    one.cpu.setdefault("paced", []).append(used / count * 1e6)


def _settle(pids: Sequence[int]) -> None:
    """Wait until they are done with what the load left behind."""
    deadline = time.monotonic() + 20
    used = cpu_seconds(pids)
    while time.monotonic() < deadline:
        time.sleep(0.1)
        before, used = used, cpu_seconds(pids)
        if used - before < 0.01:
            return


def _first_byte(systems: Mapping[str, _System], name: str, count: int) -> None:
    """Measure the time to the first byte of streams that come one at a time."""
    one = systems[name]

    async def measure() -> list[float]:
        times = []
        async with client() as session:
            for _ in range(count):
                start = time.perf_counter()
                headers = {"content-type": "application/json", **one.headers}
                async with session.post(one.url, data=body(stream=True), headers=headers) as got:
                    await got.content.readany()
                    times.append(1e3 * (time.perf_counter() - start))
                    await got.read()
        return times

    with _alone(systems, one), _on_load_core():
        one.first_ms = uvloop.run(measure())


@contextlib.contextmanager
def _on_load_core() -> Iterator[None]:
    """Run this process on the load's core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {CORES[1]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _rows(bench: Bench, systems: Mapping[str, _System], counts: Sequence[int]) -> None:
    bare, all_on, direct = systems["bare"], systems["all on"], systems["direct"]
    sglang, vllm, litellm = systems["sglang-router"], systems["vllm-router"], systems["litellm"]
    for streamed in (False, True):
        for count in counts:
            cell = _cell(streamed, count)
            for ours, peer, aim in (
                (bare, sglang, ">= 0.5"),
                (bare, vllm, None),
                (all_on, sglang, ">= 0.25"),
                (all_on, litellm, ">= 15"),
            ):
                theirs = _cell(True, 8) if peer is litellm and streamed and count > 8 else cell
                bench.row(
                    f"{ours.name}: {cell}",
                    "requests/s",
                    ours=ours.rates(cell),
                    reference=peer.rates(theirs),
                    reference_name=peer.name if theirs == cell else f"{peer.name}, c = 8",
                    aim=aim,
                )
    for one in (bare, all_on):
        bench.row(f"{one.name}: failed requests", "", ours=[one.failed], aim="== 0")
    for one in systems.values():
        if one.failed and one not in (bare, all_on):
            bench.note(f"{one.name}: {one.failed} requests failed; they are not in its rate")
    plain, stream = _cell(False, 1), _cell(True, 1)
    floor, floor_stream = statistics.median(direct.p50(plain)), statistics.median(direct.p50(stream))
    floor_first = statistics.median(direct.first_ms)
    relay = systems["relay"]
    for one, aim in (
        (bare, "<= 0.5"),
        (all_on, "<= 1"),
        (relay, None),
        (sglang, None),
        (vllm, None),
        (litellm, None),
    ):
        added = [value - floor for value in one.p50(plain)]
        bench.row(f"{one.name}: added p50, {plain}", "ms", ours=added, aim=aim)
        first = [value - floor_first for value in one.first_ms]
        bench.row(f"{one.name}: added p50 to a stream's first byte, c = 1", "ms", ours=first, aim=aim)
        whole = [value - floor_stream for value in one.p50(stream)]
        bench.row(f"{one.name}: added p50 of a whole stream, c = 1", "ms", ours=whole)
    for name in ("all on", "breakers", "leases", "tenants"):
        bench.row(
            f"gateway, {name}: CPU per request, plain, c = 64",
            "us",
            ours=systems[name].cpu["cpu"],
            reference=bare.cpu["cpu"],
            reference_name="gateway, bare",
        )
    bench.row(
        "gateway, bare: CPU per request, plain, c = 64",
        "us",
        ours=bare.cpu[_cell(False, 64)],
        reference=relay.cpu[_cell(False, 64)],
        reference_name=relay.name,
    )
    for ours in (bare, all_on):
        for peer in (relay, sglang, vllm, litellm):
            if "paced" not in peer.cpu:
                continue
            bench.row(
                f"{ours.name}: CPU per stream of 200 tokens 10 ms apart, c = 64",
                "us",
                ours=ours.cpu["paced"],
                reference=peer.cpu["paced"],
                reference_name=peer.name,
            )
    bench.note("requests/s, p50 / p99 in ms, CPU in us per request on the measured core:")
    for streamed in (False, True):
        for count in counts:
            cell = _cell(streamed, count)
            bench.note(f"  {cell}: " + "; ".join(_told(one, cell) for one in systems.values() if cell in one.results))
    bench.note(
        f"Each system on core {CORES[0]} alone, while the others are stopped; wrk, the fake frontend and the store on "
        f"core {CORES[1]}. Where a system is as fast as `direct`, that core is the limit, and CPU tells them apart."
    )


def _told(one: _System, cell: str) -> str:
    results = one.results[cell]
    rate, p50, p99 = (
        statistics.median(values)
        for values in zip(*((result.rate, result.p50_ms, result.p99_ms) for result in results), strict=True)
    )
    cpu = f", {statistics.median(one.cpu[cell]):.0f} us" if cell in one.cpu else ""
    return f"{one.name} {rate:.0f}/s, {p50:.3g} / {p99:.3g}{cpu}"


def memory(bench: Bench) -> None:
    """Measure resident memory over many requests and many open streams, everything on."""
    requests, streams = (20_000, 500) if bench.quick else (100_000, 2_000)
    with fake(core=CORES[1]) as backend, store() as shared:
        config = _config(backend.url, shared.url, *_FEATURES["all on"])
        with replicas(1, config, core=CORES[0]) as (one,):
            asyncio.run(_first_answer(one.chat))
            sizes: dict[int, float] = {}
            done = 0
            while done < requests:
                done += wrk(one.chat, BODY, connections=64, seconds=1, headers=_KEY, core=CORES[1]).requests
                sizes[done] = rss_mib(one.process.pid)
            warm = min(done for done in sizes if done >= requests / 5)
            bench.row(
                f"memory after {requests} requests, by that after {requests // 5}",
                "MiB",
                ours=[sizes[done]],
                reference=[sizes[warm]],
                reference_name=f"after {warm}",
                aim="<= 1.05",
            )
            before = rss_mib(one.process.pid)
            backend.control.set(pace=0.25, tokens=16 if bench.quick else 40)
            with _on_load_core():
                hold_s = 2.0 if bench.quick else 5.0
                peaks = [uvloop.run(_open(one.chat, streams, one.process.pid, hold_s)) for _ in range(2)]
            (early, late), (_, again) = peaks
            bench.row("memory of an open stream", "KiB", ours=[(late - before) * 1024 / streams])
            bench.row(
                f"memory with {streams} open streams, {hold_s:g} s later",
                "MiB",
                ours=[late],
                reference=[early],
                reference_name="all just opened",
                aim="<= 1.05",
            )
            bench.row(
                f"memory with {streams} open streams, the second time",
                "MiB",
                ours=[again],
                reference=[late],
                reference_name="the first time",
                aim="<= 1.05",
            )
    bench.note(f"memory: resident, everything on; streams with a token every 250 ms; {before:.0f} MiB without streams")


async def _first_answer(url: str) -> None:
    """Wait until a gateway whose store is new, and grants nothing for one TTL, has answered."""
    async with client(30) as session:
        if not (await post(session, url, body(), "first", _KEY)).sound:
            raise RuntimeError(f"{url} does not answer")


async def _open(url: str, count: int, pid: int, hold_s: float) -> tuple[float, float]:
    """Hold so many streams open; return the memory when all are, and later."""
    streams = OpenStreams()
    async with client(120) as session:
        await streams.open(session, url, body(stream=True), count, _KEY)
        early = rss_mib(pid)
        await asyncio.sleep(hold_s)
        late = rss_mib(pid)
        still = count - streams.finished - streams.failed
        await streams.finish()
    if streams.failed or still < count * 0.99:
        raise RuntimeError(f"of {count} streams {streams.failed} failed, {still} were open at the end")
    return early, late
