# SPDX-License-Identifier: Apache-2.0
"""What the router in between costs: tokens a second, and time to first token of long prompts.

Two fleets of the same two mock engines: one behind Dynamo's frontend alone, one with the router between. They are
loaded in turn, on the same cores as the client; the one that waits takes next to nothing. With few streams the engines'
own pace bounds the rate, as on a fleet with cores to spare; with many the cores do, and the router takes its share of
them.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from support import http_load
from support.bench import Bench
from support.live_fleet import Etcd, LiveFleet, ask_once, body, live_model, mocker

__all__ = ["run"]

#: Streams at a time, and what the rate with the router is to be at least of that without.
_STREAMS = ((16, ">= 0.95"), (32, ">= 0.95"), (64, ">= 0.95"), (192, None))
#: Tokens of each prompt and answer.
_PROMPT, _TOKENS = 1000, 200
_LONG = 140_000


def run(bench: Bench) -> None:
    """Record the rows of the hop."""
    with tempfile.TemporaryDirectory(prefix="router-live-") as folder:
        home = Path(folder)
        model = live_model(home / "model")
        workers = [mocker(model, speed=1, blocks=32768) for _ in range(2)]
        with (
            Etcd(home / "etcd-direct") as one,
            Etcd(home / "etcd-ours") as other,
            LiveFleet(home / "direct", "round-robin", workers, env=one.environment) as direct,
            LiveFleet(home / "ours", "ours", workers, env=other.environment) as ours,
        ):
            seeds = itertools.count()

            for streams, aim in _STREAMS:
                _throughput(bench, direct, ours, streams, (1 if bench.quick else 3) * streams, seeds, aim)
            for length in (_PROMPT, _LONG):

                def first(fleet: LiveFleet, length: int = length) -> Callable[[], float]:
                    return lambda: asyncio.run(_first_ms(fleet.urls[0], length, next(seeds)))

                row = bench.compare(
                    f"hop: time to first token, prompt of {length}, the engines' time included",
                    "ms",
                    ours=first(ours),
                    reference=first(direct),
                    reference_name="frontend alone",
                    repeats=11,
                )
                bench.note(
                    f"hop: the router adds {median(row.ours) - median(row.reference or [0.0]):.1f} ms at {length}"
                )


def _throughput(
    bench: Bench,
    direct: LiveFleet,
    ours: LiveFleet,
    streams: int,
    requests: int,
    seeds: Iterator[int],
    aim: str | None,
) -> None:
    """Record tokens per second at so many streams, and the CPU time that a token takes of all processes together."""
    spent: dict[LiveFleet, list[float]] = {direct: [], ours: []}

    def rate(fleet: LiveFleet) -> Callable[[], float]:
        def once() -> float:
            before = sum(fleet.cpu_s().values()) + time.process_time()
            found = asyncio.run(_rate(fleet.urls[0], streams, requests, next(seeds)))
            used = sum(fleet.cpu_s().values()) + time.process_time() - before
            spent[fleet].append(used / (requests * _TOKENS) * 1e6)
            return found

        return once

    bench.compare(
        f"hop: tokens a second, {streams} streams",
        "1/s",
        ours=rate(ours),
        reference=rate(direct),
        reference_name="frontend alone",
        repeats=5,
        aim=aim,
    )
    bench.row(
        f"hop: CPU of a token, of all processes and the client, {streams} streams",
        "us",
        ours=spent[ours][1:],
        reference=spent[direct][1:],
        reference_name="frontend alone",
    )


async def _rate(url: str, streams: int, requests: int, seed: int) -> float:
    """Return tokens per second; raises RuntimeError where one was not answered."""
    draw = random.Random(seed)
    sent = [body((draw.randrange(10, 1900) for _ in range(_PROMPT)), _TOKENS) for _ in range(requests)]
    waiting = iter(sent)
    samples = []
    async with http_load.client(300) as session:

        async def lane() -> None:
            for one in waiting:
                samples.append(await http_load.post(session, f"{url}/v1/completions", one, "hop"))

        start = time.monotonic()
        await asyncio.gather(*(lane() for _ in range(streams)))
        seconds = time.monotonic() - start
    if not all(sample.sound for sample in samples):
        raise RuntimeError(f"{url}: {sum(not sample.sound for sample in samples)} of {requests} were not answered")
    return requests * _TOKENS / seconds


async def _first_ms(url: str, length: int, seed: int) -> float:
    draw = random.Random(seed)
    answer = await ask_once(url, (draw.randrange(10, 1900) for _ in range(length)), 4)
    if answer.error:
        raise RuntimeError(f"{url}: {length} tokens: {answer.error}")
    return answer.ttft_s * 1e3
