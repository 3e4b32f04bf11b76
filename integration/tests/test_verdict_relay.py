# SPDX-License-Identifier: Apache-2.0
"""`python -m serving_stack.verdicts`: between a real store with a gateway's real breakers and servers for routers."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import itertools
import json
import logging
import re
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from dynamo_resilience._breakers import Target
from dynamo_resilience._config import BreakerPolicy, StoreSettings
from dynamo_resilience._store import BreakerState, Claim, Report, open_store
from serving_stack import verdicts
from support.processes import Process, free_port
from support.store_server import StoreServer

_prefixes = (f"{{relay-{number}}}:" for number in itertools.count())


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a verdict hold for a second instead of ten."""
    monkeypatch.setattr(verdicts, "TTL_S", 1.0)
    monkeypatch.setattr(verdicts, "RENEW_S", 0.3)
    monkeypatch.setattr(verdicts, "EVERY_S", 0.1)


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    with StoreServer() as one:
        yield one


@pytest.fixture
def prefix() -> str:
    return next(_prefixes)


class _Server(http.server.ThreadingHTTPServer):
    """Shows no traceback when a client leaves."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep quiet."""


class FakeHttp:
    """An HTTP server on a port of its own that can be away, and answers with what its maker says."""

    def __init__(self, answer: Callable[[str, dict[str, Any]], tuple[int, Any]]) -> None:
        outer = self
        self.port = free_port()
        self._answer = answer
        self._server: _Server | None = None

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                """Keep quiet."""

            def do_GET(self) -> None:
                """Answer."""
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                status, said = outer._answer(self.path, json.loads(body or b"{}"))
                text = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_POST = do_GET

        self._handler = Handler

    def __enter__(self) -> Any:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._server = _Server(("127.0.0.1", self.port), self._handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class FakeRouter(FakeHttp):
    """Takes verdicts as a router's system port does."""

    def __init__(self) -> None:
        super().__init__(self._verdict)
        #: Every verdict, with the time.
        self.heard: list[tuple[float, dict[str, Any]]] = []
        self.refuse: set[int] = set()

    def _verdict(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        assert path == "/engine/route/verdict"
        if body["worker"] in self.refuse:
            return 200, {"error": f"worker {body['worker']}: no"}
        self.heard.append((time.monotonic(), body))
        return 200, {"known": body["worker"] < 100}

    def stop(self) -> None:
        """Forget, as a process does."""
        super().stop()
        self.heard.clear()

    def out(self) -> dict[int, set[str]]:
        """Who is out now, and who says so."""
        last: dict[tuple[int, str], float] = {}
        for at, body in list(self.heard):
            last[body["worker"], body["source"]] = at + body["ttl_s"] if body["out"] else 0.0
        found: dict[int, set[str]] = {}
        for (worker, source), until in last.items():
            if until > time.monotonic():
                found.setdefault(worker, set()).add(source)
        return found

    def told(self, worker: int) -> int:
        """How often it was told that a worker is out."""
        return sum(body["out"] for _, body in list(self.heard) if body["worker"] == worker)

    def reasons(self, worker: int) -> list[str]:
        """The reasons that were given, one after the other."""
        given = [body["reason"] for _, body in list(self.heard) if body["worker"] == worker and body["out"]]
        return [reason for reason, _ in itertools.groupby(given)]


class Gateway:
    """A replica of dynamo-resilience's gateway, as far as its breakers go."""

    def __init__(self, server: StoreServer, prefix: str) -> None:
        self._settings = StoreSettings(url=server.url, prefix=prefix, timeout_s=5.0)
        self._store = open_store(self._settings)

    async def __aenter__(self) -> Gateway:
        await self._store.start()
        await until(lambda: self._store.up)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._store.close()

    async def fail(self, target: Target, open_s: float = 60.0) -> BreakerState:
        """Open a breaker."""
        policy = BreakerPolicy(min_requests=2, open_s=open_s, max_open_s=open_s)
        (state,) = await self._store.report([Report(target.key, target.group, 9, errors=2)], policy)
        assert state.state == "open"
        return state

    async def probe(self, target: Target, meanwhile: Callable[[], Any]) -> None:
        """Close an open breaker by a probe, as soon as one is due."""
        policy = BreakerPolicy(min_requests=2)
        while not (state := await self._store.claim(Claim(target.key, target.group), policy)).probe:
            await asyncio.sleep(0.02)
        await meanwhile()
        report = Report(target.key, target.group, 9, probe=state.probe, probe_ok=True)
        (state,) = await self._store.report([report], policy)
        assert state.state == "closed"


async def until(condition: Callable[[], object], limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def relaying(*words: str) -> AsyncIterator[None]:
    """The relay with these flags, which must still run at the end."""
    task = asyncio.ensure_future(verdicts.relay(verdicts.flags(words)))
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def routers(*all_of_them: FakeRouter) -> list[str]:
    return [word for router in all_of_them for word in ("--router", router.url)]


def worker(number: int, model: str = "some model", site: str = "home") -> Target:
    return Target(site, model, f"worker={number}")


def test_an_open_breaker_is_told_to_every_router_until_it_closes(server: StoreServer, prefix: str) -> None:
    async def check(one: FakeRouter, two: FakeRouter) -> None:
        source = {"breaker of some model at home"}
        async with Gateway(server, prefix) as gateway:
            await gateway.fail(worker(3))  # before the relay is there
            async with relaying(*routers(one, two), "--redis", server.url, "--prefix", prefix):
                await until(lambda: one.out() == two.out() == {3: source})
                # What is no worker's is not told.
                await gateway.fail(Target("home", "some model", "frontend=http://127.0.0.1:1"))
                await gateway.fail(Target("home", "some model"))
                await gateway.fail(worker(4), open_s=4.0)
                await until(lambda: one.out() == two.out() == {3: source, 4: source})

                async def told_half_open() -> None:
                    await until(lambda: one.reasons(4) == ["breaker open: errors", "breaker half-open: errors"])
                    await until(lambda: one.out() == two.out() == {3: source, 4: source})

                await gateway.probe(worker(4), told_half_open)
                await until(lambda: one.out() == two.out() == {3: source})
                assert [body["out"] for _, body in one.heard if body["worker"] == 4][-1] is False
                await gateway.fail(worker(4, "other"))
                await until(lambda: one.out() == two.out() == {3: source, 4: {"breaker of other at home"}})
        for router in (one, two):
            assert {body["worker"] for _, body in router.heard} == {3, 4}
            assert router.reasons(3) == ["breaker open: errors"]
            assert all(0 < body["ttl_s"] <= verdicts.TTL_S for _, body in router.heard if body["out"])

    with FakeRouter() as one, FakeRouter() as two:
        asyncio.run(check(one, two))


def test_a_verdict_is_renewed_while_it_lasts_and_ends_when_the_breakers_time_is_up(
    server: StoreServer, prefix: str
) -> None:
    async def check(router: FakeRouter) -> None:
        async with (
            Gateway(server, prefix) as gateway,
            relaying(*routers(router), "--redis", server.url, "--prefix", prefix),
        ):
            await gateway.fail(worker(3))
            await gateway.fail(worker(4), open_s=4.0)
            await until(lambda: router.told(3) and router.told(4))
            # Nobody probes the one whose time is up: from then on the router decides.
            await until(lambda: router.out().keys() == {3})
            told = router.told(3)
            await until(lambda: router.told(3) > told + 3)
            await until(lambda: router.out().keys() == {3})

    with FakeRouter() as router:
        asyncio.run(check(router))


def test_a_store_that_is_away_is_tried_again(prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    async def check(server: StoreServer, router: FakeRouter) -> None:
        async with relaying(*routers(router), "--redis", server.url, "--prefix", prefix):
            await until(lambda: "no answer" in caplog.text)
            await asyncio.to_thread(server.start)
            async with Gateway(server, prefix) as gateway:
                await gateway.fail(worker(3))
                await gateway.fail(worker(4), open_s=4.0)
                await until(lambda: router.told(3) and router.told(4))
                await asyncio.to_thread(server.kill)
                # What was known holds on as long as the breaker would have been open at least.
                await until(lambda: caplog.text.count("no answer") >= 2)
                told = router.told(3)
                await until(lambda: router.told(3) > told + 1)
                await until(lambda: router.out().keys() == {3})
            await asyncio.to_thread(server.start)
            async with Gateway(server, prefix) as gateway:
                await gateway.fail(worker(5))
                await until(lambda: 5 in router.out())
            before = [caplog.text.count(words) for words in ("no answer", "is back")]
            await asyncio.to_thread(server.pause)
            await until(lambda: caplog.text.count("no answer") > before[0])
            await asyncio.to_thread(server.resume)
            await until(lambda: caplog.text.count("is back") > before[1])

    caplog.set_level(logging.INFO, "serving_stack.verdicts")
    server = StoreServer(password="secret")
    with FakeRouter() as router, server:
        server.kill()
        asyncio.run(check(server, router))
    assert "secret" not in caplog.text
    # Each absence is said once, or once for each thing that is wrong with it.
    assert caplog.text.count("no answer") < 30


def test_a_router_that_is_away_or_starts_anew_is_told_again(
    server: StoreServer, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def check(here: FakeRouter, away: FakeRouter) -> None:
        async with (
            Gateway(server, prefix) as gateway,
            relaying(*routers(away, here), "--redis", server.url, "--prefix", prefix),
        ):
            await gateway.fail(worker(3))
            await until(lambda: 3 in here.out())
            assert away.heard == []
            away.start()
            await until(lambda: 3 in away.out())
            away.stop()
            await until(lambda: caplog.text.count(f"router {away.url}: no answer") >= 2)
            away.start()
            await until(lambda: 3 in away.out() and 3 in here.out())

    caplog.set_level(logging.INFO, "serving_stack.verdicts")
    away = FakeRouter()
    try:
        with FakeRouter() as here:
            asyncio.run(check(here, away))
    finally:
        away.stop()


def test_what_a_router_refuses_or_does_not_know_holds_nothing_else_up(
    server: StoreServer, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def check(router: FakeRouter) -> None:
        router.refuse = {1}
        async with (
            Gateway(server, prefix) as gateway,
            relaying(*routers(router), "--redis", server.url, "--prefix", prefix),
        ):
            for number in (1, 500, 3):
                await gateway.fail(worker(number))
            await until(lambda: {3, 500} <= router.out().keys())
            await until(lambda: "worker 1: no" in caplog.text)

    with FakeRouter() as router:
        asyncio.run(check(router))


def test_what_the_store_holds_in_another_form_is_passed_over(server: StoreServer, prefix: str) -> None:
    async def check(router: FakeRouter) -> None:
        client = server.client()
        bad = {
            "home worker=1 m": "no json",
            "home worker=2 m": '{"state":"ajar","until":1e18,"reason":""}',
            "home worker=4 m": '{"state":"open","until":"soon","reason":""}',
            "home worker=5 m": "[1]",
            "home worker=x m": '{"state":"open","until":1e18,"reason":""}',
            "home worker= m": '{"state":"open","until":1e18,"reason":""}',
            "worker=6": '{"state":"open","until":1e18,"reason":""}',
            "": "",
        }
        async with Gateway(server, prefix) as gateway:
            await gateway.fail(worker(3))
        for target, text in bad.items():
            client.set(f"{prefix}b:{target}", text)
            client.hset(f"{prefix}open", target, "g")
        client.hset(f"{prefix}open", "home worker=7 m", "g")  # its record has expired
        async with relaying(*routers(router), "--redis", server.url, "--prefix", prefix):
            await until(lambda: 3 in router.out())
            for message in ("no json", "[1]", '{"v":2,"k":"b"}', '{"v":1,"k":"l","pool":"p"}'):
                client.publish(f"{prefix}events", message)
            told = len(router.heard)
            await until(lambda: len(router.heard) > told + 1)
        assert {body["worker"] for _, body in router.heard} == {3}

    with FakeRouter() as router:
        asyncio.run(check(router))


def test_a_workers_own_health_endpoint_is_a_verdict(caplog: pytest.LogCaptureFixture) -> None:
    health = {"/a": 200, "/b": 200}

    async def check(router: FakeRouter, sick: FakeHttp) -> None:
        words = [f"--health=7={sick.url}/a", f"--health=0x8={sick.url}/b", f"--health=9=http://127.0.0.1:{free_port()}"]
        async with relaying(*routers(router), *words):
            await until(lambda: "worker 9, " in caplog.text)
            health["/a"] = 503
            await until(lambda: router.out() == {7: {"health"}})
            assert router.reasons(7) == ["its health endpoint says 503"]
            health["/b"] = 503
            await until(lambda: router.out() == {7: {"health"}, 8: {"health"}})
            health["/a"] = 200
            await until(lambda: router.out() == {8: {"health"}})
            # An endpoint that is gone says nothing: what it said last ends with its time.
            sick.stop()
            await until(lambda: router.out() == {})
            sick.start()
            await until(lambda: router.out() == {8: {"health"}})
            health["/b"] = 404
            await until(lambda: "status 404 says nothing" in caplog.text)
            await until(lambda: router.out() == {})

    with FakeRouter() as router, FakeHttp(lambda path, body: (health[path], {})) as sick:
        asyncio.run(check(router, sick))
        assert {body["worker"] for _, body in router.heard} == {7, 8}


def test_the_command_ends_in_order_when_it_is_told_to() -> None:
    with FakeRouter() as router, FakeHttp(lambda path, body: (503, {})) as sick:
        command = [sys.executable, "-m", "serving_stack.verdicts", *routers(router), "--health", f"7={sick.url}/health"]
        with Process(command, name="verdicts", ready=re.compile("worker 7, health: out")) as process:
            asyncio.run(until(lambda: 7 in router.out()))
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            assert "Traceback" not in process.log_tail()


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--redis", "redis://x"], "required: --router"),
        (["--router", "http://x:1"], "nothing to relay: give --redis or --health"),
        (["--router", "x:1", "--redis", "redis://x"], "--router: 'x:1': http://HOST:PORT is wanted"),
        (["--router", "http://x:0", "--redis", "redis://x"], "--router: 'http://x:0': http://HOST:PORT is wanted"),
        (["--router", "http://x:1", "--redis", "http://u:secret@x"], "--redis: 'http://x' is not redis://"),
        (["--router", "http://x:1", "--redis", "redis://:secret@x:port"], "--redis: 'redis://x:port'"),
        (["--router", "http://x:1", "--redis", "redis://:secret@[x"], "--redis: 'redis://[x'"),
        (["--router", "http://x:1", "--redis", "redis://x/zero"], "--redis: 'redis://x/zero'"),
        (["--router", "http://x:1", "--health", "7=http://x", "--prefix", "p:"], "--prefix 'p:' needs --redis"),
        (["--router", "http://x:1", "--health", "http://x"], "--health: 'http://x' is not WORKER=URL"),
        (["--router", "http://x:1", "--health", "seven=http://x"], "'seven=http://x' is not WORKER=URL"),
        (["--router", "http://x:1", "--health", "7=x"], "--health: 'x': http://HOST:PORT is wanted"),
        (["--router", "http://x:1", "--health", "7=http://x", "--health", "0x7=http://y"], "worker 7 is there twice"),
    ],
)
def test_a_bad_flag_is_named_with_its_value(words: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        verdicts.flags(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert fault in said
    assert "secret" not in said


def test_without_the_redis_client_the_flag_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(SystemExit):
        verdicts.flags(["--router", "http://x:1", "--redis", "redis://x"])
    assert "pip install 'serving-stack[verdicts]'" in capsys.readouterr().err
