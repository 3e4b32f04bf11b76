# SPDX-License-Identifier: Apache-2.0
"""Breakers: eight gateways and a real store, one frontend that fails; then a group of workers that all fail."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from gateway_parts import Fake, Replica, body, fake, percentile, replicas, store

from dynamo_resilience._config import StoreSettings
from dynamo_resilience._store import open_store
from support.bench import Bench
from support.fake_frontend import Record
from support.http_load import Sample, client, closed_loop

__all__ = ["breakers"]

_REPLICAS = 8
#: One request at a time from each of two clients of each replica, with this pause between them.
_CLIENTS, _PAUSE_S = 2, 0.025
_OPEN_S = 0.05
_POLICY = {
    "window_s": 1.0,
    "min_requests": 4,
    "error_rate": 0.2,
    "open_s": _OPEN_S,
    "max_open_s": _OPEN_S,
    "probe_s": 5.0,
}


class _Event(NamedTuple):
    at: float
    target: str
    version: int
    state: str


def _config(store_url: str, frontends: Sequence[str], route: str, policy: dict[str, Any]) -> dict[str, Any]:
    site = {"frontends": list(frontends), "route": route, "models": {"m": {}}}
    return {"store": {"url": store_url}, "sites": {"one": site}, "breaker": policy}


@contextlib.asynccontextmanager
async def _traffic(gateways: Sequence[Replica]) -> AsyncIterator[list[Sample]]:
    """Send light traffic to every replica; what came of it is in the list afterwards."""
    stopped = False
    samples: list[Sample] = []

    async def one(url: str) -> None:
        while not stopped:
            samples.extend(await closed_loop(session, url, body(), who="load", until=_once()))
            await asyncio.sleep(_PAUSE_S * random.uniform(0.5, 1.5))

    async with client(20) as session:
        tasks = [asyncio.create_task(one(gateway.chat)) for gateway in gateways for _ in range(_CLIENTS)]
        try:
            yield samples
        finally:
            stopped = True
            await asyncio.gather(*tasks)


def _once() -> Any:
    """Return a condition that holds from the second time on."""
    asked = iter((False,))
    return lambda: next(asked, True)


class _Watch:
    """What each replica has noted of one target."""

    def __init__(self, gateways: Sequence[Replica], target: str) -> None:
        self.seen: list[list[_Event]] = [[] for _ in gateways]
        self._files = [gateway.events.open(encoding="utf-8") for gateway in gateways]
        self._target = target

    def read(self) -> None:
        """Take what is new."""
        for events, file in zip(self.seen, self._files, strict=True):
            for line in file.read().splitlines():
                at, target, version, state = line.split("\t")
                if target == self._target:
                    events.append(_Event(float(at), target, int(version), state))

    async def until(self, closed: bool) -> None:
        """Wait until every replica knows that it is closed, or that it is not."""
        deadline = time.monotonic() + 30
        while True:
            self.read()
            if all((not events or events[-1].state == "closed") == closed for events in self.seen):
                return
            if time.monotonic() > deadline:
                known = [events[-1:] for events in self.seen]
                raise RuntimeError(f"not within 30 s: {self._target} closed={closed} everywhere; known: {known}")
            await asyncio.sleep(0.02)

    def first(self) -> dict[int, _Event]:
        """Return, for each version, where it was noted first."""
        first: dict[int, _Event] = {}
        for one in sorted(one for events in self.seen for one in events):
            first.setdefault(one.version, one)
        return first

    def grants(self) -> int:
        """Return how many probes were granted so far."""
        return sum(one.state == "half_open" for one in self.first().values())


def breakers(bench: Bench) -> None:
    """Run both, and record their rows."""
    asyncio.run(_probes_and_propagation(bench))
    asyncio.run(_never_the_last(bench))


async def _probes_and_propagation(bench: Bench) -> None:
    windows, openings = (100, 5) if bench.quick else (1_000, 100)
    with store() as shared, fake() as sound, fake(record=True) as faulty:
        config = _config(shared.url, (sound.url, faulty.url), "frontend", _POLICY)
        with replicas(_REPLICAS, config, watched=True) as gateways:
            watch = _Watch(gateways, f"one frontend={faulty.url} m")
            async with _traffic(gateways) as samples:
                for _ in range(openings):
                    faulty.control.set(fault="error")
                    await watch.until(closed=False)
                    await asyncio.sleep(random.uniform(0.0, 0.1))
                    faulty.control.set(fault="none")
                    await watch.until(closed=True)
                    await asyncio.sleep(random.uniform(0.0, 0.1))
                faulty.control.set(fault="error")
                await watch.until(closed=False)
                await asyncio.sleep(1.0)  # requests that were on their way have ended
                faulty.control.records()
                watch.read()
                begin, granted = time.monotonic(), watch.grants()
                while watch.grants() < granted + windows + 2:
                    await asyncio.sleep(1.0)
                    watch.read()
                end = time.monotonic()
                records = faulty.control.records()
    grants = [one.at for one in watch.first().values() if one.state == "half_open" and begin <= one.at <= end]
    _probe_rows(bench, windows, sorted(grants), records)
    _propagation_rows(bench, watch)
    failed = sum(not sample.sound for sample in samples)
    bench.row(f"breakers: failed of {len(samples)} requests, one of two frontends failing", "", ours=[failed])
    bench.note(
        f"breakers: {_REPLICAS} gateways with {_CLIENTS} clients each; a replica's time is when the store's answer or "
        f"message reaches its breakers; open for {_OPEN_S * 1e3:.0f} ms, so that is a window"
    )


def _probe_rows(bench: Bench, windows: int, grants: Sequence[float], records: Sequence[Record]) -> None:
    """Count the requests that reached the frontend from one grant of a probe to the next."""
    counts = [0] * (len(grants) - 1)
    for record in records:
        window = bisect_right(grants, record.start) - 1
        if 0 <= window < len(counts):
            counts[window] += 1
    bench.row("breakers: windows of an open breaker", "", ours=[len(counts)], aim=f">= {windows}")
    wrong = sum(count != 1 for count in counts)
    bench.row("breakers: windows in which not exactly one request reached the frontend", "", ours=[wrong], aim="== 0")


def _propagation_rows(bench: Bench, watch: _Watch) -> None:
    """Measure from the first replica that knows of a transition to each of the others."""
    opening: list[float] = []
    every: list[float] = []
    first = watch.first()
    was_closed = True
    for version, one in sorted(first.items()):
        opens, was_closed = one.state == "open" and was_closed, one.state == "closed"
        for events in watch.seen:
            # A version that a replica never heard of is known to it with the next one.
            known = next((other for other in events if other.version >= version), None)
            if known is not None and known is not one:
                every.append(1e3 * (known.at - one.at))
                if opens:
                    opening.append(every[-1])
    for what, delays in (("an opening", opening), ("any transition", every)):
        for share, aim in ((0.5, None), (0.99, "<= 100")):
            bench.row(
                f"breakers: p{share * 100:.0f} until another replica knows of {what} ({len(delays)})",
                "ms",
                ours=[percentile(delays, share)],
                aim=aim,
            )


async def _never_the_last(bench: Bench) -> None:
    """Let any of four workers fail, all of them at times, and look at the store's list of what is open."""
    workers, seconds = 4, 2 if bench.quick else 10
    for share, least in ((1.0, 1),) if bench.quick else ((1.0, 1), (0.5, 2)):
        with store() as shared, fake(workers=workers) as backend:
            policy = {**_POLICY, "max_open_share": share}
            with replicas(_REPLICAS, _config(shared.url, (backend.url,), "worker", policy)) as gateways:
                looks = await _fewest_closed(shared.url, backend, gateways, workers, seconds)
        bench.row(
            f"breakers: fewest closed of {workers} failing workers, max_open_share {share:g} ({len(looks)} looks)",
            "",
            ours=[min(looks)],
            aim=f">= {least}",
        )
        if min(looks) > least:
            bench.note(f"breakers: not more than {workers - min(looks)} of {workers} were ever open: a weak test")


async def _fewest_closed(
    url: str, backend: Fake, gateways: Sequence[Replica], workers: int, seconds: float
) -> list[int]:
    looks = []
    shared = open_store(StoreSettings(url=url, timeout_s=2.0))
    await shared.start()
    async with _traffic(gateways):
        end = time.monotonic() + seconds
        turn = 0
        while time.monotonic() < end:
            turn += 1
            faulty = random.sample(range(workers), random.randint(1, workers))
            backend.control.set(fault="error", faulty=None if turn % 2 else faulty)
            change = time.monotonic() + 0.5
            while time.monotonic() < change:
                away = [one for one in await shared.breakers() if " worker=" in one.target]
                looks.append(workers - len(away))
                await asyncio.sleep(0.005)
    await shared.close()
    return looks
