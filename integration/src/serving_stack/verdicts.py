# SPDX-License-Identifier: Apache-2.0
"""What others know of workers, told to the router: a gateway's open breakers, and workers' own health endpoints.

    python -m serving_stack.verdicts --router URL... [--redis URL [--prefix P]] [--health WORKER=URL ...]

`--router`: the system port of each `dynamo_kv_router_ext`, `http://HOST:PORT`. `--redis`: the store of a gateway
(dynamo-resilience); while a breaker of a worker is open there, or half-open, the worker shall be out. `--health`:
a worker's instance id and what to GET, such as the `/health` of its system port with Dynamo's canary; while it answers
5xx, the worker shall be out. No answer says nothing: the router sees by itself that a worker is silent.

A verdict holds for ten seconds, is renewed while its cause lasts, and withdrawn when that is over. A store or a router
that is away is tried again and again. Needs the extra `verdicts` for `--redis`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from .route import http_url

__all__ = ["main"]

_log = logging.getLogger("serving_stack.verdicts")

#: How long a verdict holds, and how often it is renewed, in seconds.
TTL_S, RENEW_S = 10.0, 3.0
#: How often the store is read, or tried again, and workers asked, in seconds; how long an answer may take.
EVERY_S, PATIENCE_S = 1.0, 2.0
#: The least seconds between two readings of the store that events bring about.
HURRY_S = 0.05
#: The gateway's default for `store.prefix`.
PREFIX = "{dynamo-gateway}:"


class Source(NamedTuple):
    """Who says something of which worker."""

    worker: int
    name: str


class Cause(NamedTuple):
    """Why a worker shall be out, and until when on this process' clock, if it is not put up again."""

    reason: str
    until: float


class _Log:
    """Says what is new, once."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._last = ""

    def bad(self, text: str) -> None:
        if text != self._last:
            _log.warning("%s: %s", self._what, text)
        self._last = text

    def good(self) -> None:
        if self._last:
            _log.info("%s: is back", self._what)
        self._last = ""


class Board:
    """What is to be told at present; whoever tells it waits for changes."""

    def __init__(self) -> None:
        self._causes: dict[Source, Cause] = {}
        self._changed: set[asyncio.Event] = set()

    def watch(self) -> asyncio.Event:
        """Return an event that is set at each change."""
        event = asyncio.Event()
        self._changed.add(event)
        return event

    def put(self, source: Source, cause: Cause | None) -> None:
        """Say why a worker shall be out; None: not any more."""
        before = self._causes.get(source)
        if cause is None:
            self._causes.pop(source, None)
        else:
            self._causes[source] = cause
        if (before and before.reason) != (cause and cause.reason):
            _log.info("worker %d, %s: %s", *source, "in again" if cause is None else f"out: {cause.reason}")
            for event in self._changed:
                event.set()

    def causes(self, now: float) -> dict[Source, Cause]:
        """Return what holds now, and forget what is over."""
        for source in [source for source, cause in self._causes.items() if cause.until <= now]:
            self.put(source, None)
        return dict(self._causes)


async def tell(url: str, board: Board, http: httpx.AsyncClient) -> None:
    """Keep one router informed, for ever."""
    log = _Log(f"router {url}")
    changed = board.watch()
    # What the router was told, and until when that holds there; what it did not take.
    told: dict[Source, tuple[str, float]] = {}
    refused: set[str] = set()
    while True:
        changed.clear()
        now = time.monotonic()
        causes = board.causes(now)
        try:
            for source, cause in causes.items():
                before = told.get(source)
                ttl_s = min(TTL_S, cause.until - now)
                if before and before[0] == cause.reason and before[1] - now > min(TTL_S - RENEW_S, ttl_s - 0.1):
                    continue
                body = {"out": True, "ttl_s": ttl_s, "reason": cause.reason[:500]}
                fault = await _post(url, source, body, http)
                if fault and fault not in refused:
                    refused.add(fault)
                    _log.warning("router %s does not take that %s is out: %s", url, source, fault)
                told[source] = (cause.reason, now + ttl_s)
            for source in [source for source in told if source not in causes]:
                if told[source][1] > now:
                    await _post(url, source, {"out": False}, http)
                del told[source]
            log.good()
        except httpx.HTTPError as error:
            log.bad(f"no answer: {str(error) or repr(error)}")
            await asyncio.sleep(HURRY_S)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(changed.wait(), EVERY_S)


async def _post(url: str, source: Source, body: dict[str, Any], http: httpx.AsyncClient) -> str:
    """Post a verdict; return why the router does not take it, or "". A worker that it does not know is no fault."""
    whole = {"worker": source.worker, "source": source.name[:100], **body}
    answer = await http.post(f"{url}/engine/route/verdict", json=whole)
    with contextlib.suppress(ValueError):
        said = answer.json()
        if isinstance(said, dict) and isinstance(said.get("known"), bool):
            return ""
    return f"status {answer.status_code}, {answer.text[:200]!r}"


async def watch_health(worker: int, url: str, board: Board, http: httpx.AsyncClient) -> None:
    """Ask one worker's health endpoint, for ever."""
    log = _Log(f"worker {worker}, {url}")
    source = Source(worker, "health")
    while True:
        try:
            answer = await http.get(url)
            if answer.status_code >= 500:
                board.put(source, Cause(f"its health endpoint says {answer.status_code}", time.monotonic() + TTL_S))
            elif answer.is_success:
                board.put(source, None)
                log.good()
            else:
                log.bad(f"status {answer.status_code} says nothing of its health")
        except httpx.HTTPError as error:
            log.bad(f"no answer: {str(error) or repr(error)}")
        await asyncio.sleep(EVERY_S)


async def watch_breakers(url: str, prefix: str, board: Board) -> None:
    """Read a gateway's store, for ever: every second, and when a breaker moves."""
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError

    log = _Log(f"store {_shown(url)}")
    # The client's own retries would take half a minute, and say nothing meanwhile.
    options: Any = {"decode_responses": True, "retry": Retry(NoBackoff(), 0)}
    options |= {"socket_timeout": PATIENCE_S, "socket_connect_timeout": PATIENCE_S}
    known: set[Source] = set()
    while True:
        try:
            async with (
                Redis.from_url(url, **options) as store,
                store.pubsub(ignore_subscribe_messages=True) as events,
            ):
                await events.subscribe(f"{prefix}events")
                while True:
                    found = await _open_breakers(store, prefix)
                    for source in known - found.keys():
                        board.put(source, None)
                    for source, cause in found.items():
                        board.put(source, cause)
                    known = set(found)
                    log.good()
                    await asyncio.sleep(HURRY_S)
                    end = time.monotonic() + EVERY_S
                    while (left := end - time.monotonic()) > 0:
                        message = await events.get_message(timeout=left)
                        if message is not None and _moved(message["data"]):
                            break
        except (RedisError, OSError, asyncio.TimeoutError) as error:
            log.bad(f"no answer: {str(error) or repr(error)}")
        await asyncio.sleep(EVERY_S)


async def _open_breakers(store: Any, prefix: str) -> dict[Source, Cause]:
    """Return the workers' breakers that are open or half-open, each until a next probe may be sent."""
    seconds, micros = await store.time()
    now, here = seconds * 1000 + micros / 1000, time.monotonic()
    found = {}
    for target in await store.hkeys(f"{prefix}open"):
        # SITE PART MODEL; only the model may hold a blank.
        site, part, model = (*target.split(" ", 2), "", "")[:3]
        worker = part.removeprefix("worker=")
        if worker == part or not worker.isdecimal():
            continue
        breaker = _breaker(await store.get(f"{prefix}b:{target}"))
        if breaker is not None and breaker["state"] != "closed" and breaker["until"] > now:
            cause = Cause(
                f"breaker {breaker['state'].replace('_', '-')}: {breaker['reason']}",
                here + (breaker["until"] - now) / 1000,
            )
            found[Source(int(worker), f"breaker of {model} at {site}")] = cause
    return found


def _breaker(text: str | None) -> dict[str, Any] | None:
    """Return a breaker of the format that is known; None for any other."""
    with contextlib.suppress(ValueError):
        said = json.loads(text or "")
        if (
            isinstance(said, dict)
            and said.get("state") in ("closed", "open", "half_open")
            and isinstance(said.get("until"), int | float)
            and isinstance(said.get("reason"), str)
        ):
            return said
    return None


def _moved(data: str) -> bool:
    """Return whether a message says that a breaker moved."""
    with contextlib.suppress(ValueError):
        said = json.loads(data)
        return isinstance(said, dict) and said.get("k") == "b"
    return False


def _shown(url: str) -> str:
    """Return a URL without the password."""
    scheme, mark, rest = url.partition("?")[0].partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"


def _http_url(text: str) -> str:
    try:
        return http_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def _redis_url(text: str) -> str:
    scheme = text.partition("://")[0]
    if scheme not in ("redis", "rediss", "unix", "valkey"):
        raise argparse.ArgumentTypeError(f"{_shown(text)!r} is not redis://, rediss://, unix:// or valkey://")
    try:
        from redis.asyncio import Redis
    except ImportError as error:
        raise argparse.ArgumentTypeError("needs redis: pip install 'serving-stack[verdicts]'") from error
    url = text.replace("valkey", "redis", 1) if scheme == "valkey" else text
    try:
        Redis.from_url(url)
        database = urlsplit(url).path.strip("/")
        if scheme != "unix" and database and not database.isdecimal():  # which the client takes for 0
            raise ValueError(f"no database {database!r}")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{_shown(text)!r}: {error}") from error
    return url


def _health(text: str) -> tuple[int, str]:
    name, equals, url = text.partition("=")
    try:
        if not equals:
            raise ValueError
        worker = int(name, 16 if name.startswith("0x") else 10)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not WORKER=URL, with the worker's instance id") from None
    return worker, _http_url(url)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m serving_stack.verdicts",
        description="Tell routers which workers others have found to be sick: a gateway's breakers, health endpoints.",
    )
    parser.add_argument(
        "--router",
        metavar="URL",
        type=_http_url,
        action="append",
        required=True,
        help="the system port of a dynamo_kv_router_ext, http://HOST:PORT; again for each replica",
    )
    parser.add_argument("--redis", metavar="URL", type=_redis_url, help="the store of a dynamo-gateway")
    parser.add_argument("--prefix", metavar="P", help=f"that gateway's store.prefix (default: {PREFIX})")
    parser.add_argument(
        "--health",
        metavar="WORKER=URL",
        type=_health,
        action="append",
        default=[],
        help="a worker's instance id, decimal or 0x..., and its health endpoint; again for each worker",
    )
    return parser


async def relay(args: argparse.Namespace) -> None:
    """Relay until it is cancelled."""
    board = Board()
    async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as http:
        jobs = [tell(url, board, http) for url in dict.fromkeys(args.router)]
        jobs += [watch_health(worker, url, board, http) for worker, url in args.health]
        if args.redis:
            jobs.append(watch_breakers(args.redis, args.prefix or PREFIX, board))
        tasks = [asyncio.ensure_future(job) for job in jobs]
        try:
            await asyncio.gather(*tasks)  # what none of them expects ends the process
        finally:
            while left := [task for task in tasks if not task.done()]:  # redis loses a cancellation now and then
                for task in left:
                    task.cancel()
                await asyncio.wait(left, timeout=0.1)


async def _run(args: argparse.Namespace) -> None:
    task = asyncio.ensure_future(relay(args))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return what the command line says; SystemExit with status 2 names what is wrong with it."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not args.redis and not args.health:
        parser.error("nothing to relay: give --redis or --health")
    if args.prefix is not None and not args.redis:
        parser.error(f"--prefix {args.prefix!r} needs --redis")
    workers = [worker for worker, _ in args.health]
    for worker in workers:
        if workers.count(worker) > 1:
            parser.error(f"--health: worker {worker} is there twice")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Relay until a signal ends it; exit status 0 then, 2 for flags that are no good."""
    args = flags(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    asyncio.run(_run(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
