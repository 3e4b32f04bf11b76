# SPDX-License-Identifier: Apache-2.0
"""HTTP load: `wrk` for throughput and latency on a core of its own, asyncio for paced tenants and open streams."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from support.bench import Unavailable

__all__ = ["OpenStreams", "Sample", "WrkResult", "client", "closed_loop", "open_loop", "post", "wrk", "wrk_program"]

#: Prints what `wrk` itself rounds: microseconds, and errors by kind.
_REPORT = """
function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format(
    '\\nRESULT {"requests":%d,"us":%d,"p50":%d,"p90":%d,"p99":%d,"status":%d,"socket":%d,"timeout":%d}\\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(90), latency:percentile(99),
    e.status, e.connect + e.read + e.write, e.timeout))
end
"""


@dataclass(frozen=True)
class WrkResult:
    """What one run of `wrk` saw: answers, seconds, latencies in milliseconds, and what was no 2xx or 3xx."""

    requests: int
    seconds: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    bad_status: int
    socket_errors: int
    timeouts: int

    @property
    def rate(self) -> float:
        """Sound answers per second."""
        return (self.requests - self.bad_status) / self.seconds

    @property
    def failed(self) -> int:
        """Answers with an error status, and requests without an answer."""
        return self.bad_status + self.socket_errors + self.timeouts


def wrk_program() -> str:
    """Return the path of `wrk`; raise Unavailable where there is none."""
    program = shutil.which("wrk")
    if program is None:
        raise Unavailable("the load comes from wrk, which is not on PATH: apt-get install wrk")
    return program


def wrk(
    url: str,
    body: Mapping[str, Any],
    *,
    connections: int,
    seconds: float,
    headers: Mapping[str, str] | None = None,
    core: int | None = None,
) -> WrkResult:
    """POST `body` over so many connections, each with one request at a time, from one thread on one core.

    Raises Unavailable where there is no `wrk`, and RuntimeError where it fails or gets no answer at all.
    """
    program = wrk_program()
    lines = ['wrk.method = "POST"', f"wrk.body = {_lua(json.dumps(body))}"]
    lines += [
        f"wrk.headers[{_lua(name)}] = {_lua(value)}"
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items()
    ]
    with tempfile.TemporaryDirectory(prefix="wrk-") as folder:
        script = Path(folder) / "post.lua"
        script.write_text("\n".join(lines) + _REPORT, "utf-8")
        command = [program, "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "60s"]
        done = subprocess.run(
            [*command, "-s", str(script), url],
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
        )
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not found:
        raise RuntimeError(f"wrk {url}: status {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    read = json.loads(found[0][len("RESULT ") :])
    if not read["requests"]:
        raise RuntimeError(f"wrk {url}: not one answer in {seconds:g} s: {read}")
    return WrkResult(
        requests=read["requests"],
        seconds=read["us"] / 1e6,
        p50_ms=read["p50"] / 1e3,
        p90_ms=read["p90"] / 1e3,
        p99_ms=read["p99"] / 1e3,
        bad_status=read["status"],
        socket_errors=read["socket"],
        timeouts=read["timeout"],
    )


def _lua(text: str) -> str:
    """Return a Lua string of the same bytes."""
    return '"' + "".join(f"\\{byte:03d}" for byte in text.encode()) + '"'


class Sample(NamedTuple):
    """One request: who sent it, when it began and ended (`time.monotonic`), and how.

    `status` is 0 where there was no answer. `sound` says that the answer came whole and had no error in it.
    """

    who: str
    start: float
    end: float
    status: int
    sound: bool
    #: Seconds from `retry-after`, where there was one.
    retry_after: float | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@asynccontextmanager
async def client(timeout_s: float = 60.0) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a client without limits of its own."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session:
        yield session


async def post(
    session: aiohttp.ClientSession, url: str, body: bytes, who: str, headers: Mapping[str, str] | None = None
) -> Sample:
    """Send one request and read its answer to the end; never raises for what the server does."""
    start = time.monotonic()
    status, sound, retry_after = 0, False, None
    try:
        async with session.post(url, data=body, headers={"content-type": "application/json", **(headers or {})}) as got:
            status = got.status
            if said := got.headers.get("retry-after"):
                retry_after = float(said)
            text = await got.read()
            streamed = got.headers.get("content-type", "").startswith("text/event-stream")
            sound = status == 200 and (not streamed or (b"[DONE]" in text and b'"error"' not in text))
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
        pass
    return Sample(who, start, time.monotonic(), status, sound, retry_after)


async def open_loop(
    session: aiohttp.ClientSession,
    urls: Sequence[str],
    body: bytes,
    *,
    who: str,
    rate: float,
    seconds: float,
    headers: Mapping[str, str] | None = None,
    seed: int = 0,
) -> list[Sample]:
    """Send `rate` requests a second, with the gaps of a Poisson process, whatever becomes of them; each URL in turn."""
    rng = random.Random(seed)
    tasks: list[asyncio.Task[Sample]] = []
    begin = due = time.monotonic()
    while (due := due + rng.expovariate(rate)) < begin + seconds:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.create_task(post(session, urls[len(tasks) % len(urls)], body, who, headers)))
    return list(await asyncio.gather(*tasks))


async def closed_loop(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes,
    *,
    who: str,
    until: Callable[[], bool],
    headers: Mapping[str, str] | None = None,
    pause_s: float = 0.02,
) -> list[Sample]:
    """Send one request after another until told to stop; after a failure wait for `pause_s`.

    Each has an `x-request-id` that begins with `who` and a dot, so that the other end can tell where it came from.
    """
    samples: list[Sample] = []
    while not until():
        named = {"x-request-id": f"{who}.{len(samples)}", **(headers or {})}
        samples.append(await post(session, url, body, who, named))
        if not samples[-1].sound:
            await asyncio.sleep(pause_s)
    return samples


class OpenStreams:
    """Streams that are open at the same time, read as they come; `opened` have had their first byte."""

    def __init__(self) -> None:
        self.opened = 0
        self.finished = 0
        self.failed = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def open(
        self,
        session: aiohttp.ClientSession,
        url: str,
        body: bytes,
        count: int,
        headers: Mapping[str, str] | None = None,
        together: int = 50,
    ) -> None:
        """Open `count` streams, `together` at a time; return when each has had its first byte or has failed."""
        limit = asyncio.Semaphore(together)
        firsts = [asyncio.Event() for _ in range(count)]
        for first in firsts:
            await limit.acquire()
            first_done = asyncio.create_task(first.wait())
            first_done.add_done_callback(lambda _: limit.release())
            self._tasks.append(asyncio.create_task(self._read(session, url, body, headers, first)))
        await asyncio.gather(*(first.wait() for first in firsts))

    async def _read(
        self,
        session: aiohttp.ClientSession,
        url: str,
        body: bytes,
        headers: Mapping[str, str] | None,
        first: asyncio.Event,
    ) -> None:
        last = b""
        try:
            async with session.post(
                url, data=body, headers={"content-type": "application/json", **(headers or {})}
            ) as got:
                async for piece in got.content.iter_any():
                    if not first.is_set():
                        self.opened += 1
                        first.set()
                    last = piece
            if got.status == 200 and b"[DONE]" in last:
                self.finished += 1
            else:
                self.failed += 1
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
            self.failed += 1
        finally:
            first.set()

    async def finish(self) -> None:
        """Read every stream to its end."""
        await asyncio.gather(*self._tasks)

    async def abandon(self) -> None:
        """Close every stream that still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
