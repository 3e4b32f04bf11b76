# SPDX-License-Identifier: Apache-2.0
"""The way of a request, before frontends that do what they are told: real connections, made-up answers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest
from aiohttp import ClientResponse, ClientSession, web
from yarl import URL

from dynamo_resilience._admission import Ask
from dynamo_resilience._breakers import Breakers
from dynamo_resilience._config import Config
from dynamo_resilience._errors import ConfigError, Rejected
from dynamo_resilience._proxy import Finished, Proxy
from dynamo_resilience._runtime import Runtime, build
from dynamo_resilience._store import open_store
from dynamo_resilience._units import Units
from dynamo_resilience._upstream import Answer, Upstream
from support.processes import free_port

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"]
EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"

Script = Callable[["FakeFrontend", web.BaseRequest, bytes], Awaitable[web.StreamResponse]]


async def plain(fake: FakeFrontend, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
    usage = {"prompt_tokens": 10, "completion_tokens": 3}
    return web.json_response({"by": fake.name, "usage": usage}, headers={"x-own": "1"})


def status(code: int, body: bytes = b'{"message":"no","code":0}') -> Script:
    async def script(fake: FakeFrontend, request: web.BaseRequest, _: bytes) -> web.StreamResponse:
        return web.Response(status=code, body=io.BytesIO(body), content_type="application/json")

    return script


def events(*pieces: bytes | asyncio.Event | float, cut: bool = False) -> Script:
    """Send pieces, waiting where told; `cut` closes the connection in the middle of the body."""

    async def script(fake: FakeFrontend, request: web.BaseRequest, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            if isinstance(piece, asyncio.Event):
                await piece.wait()
            elif isinstance(piece, float):
                await asyncio.sleep(piece)
            else:
                await response.write(piece)
        if cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return script


async def hang(fake: FakeFrontend, request: web.BaseRequest, _: bytes) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def half(fake: FakeFrontend, request: web.BaseRequest, _: bytes) -> web.StreamResponse:
    """Promise more of a plain answer than is sent."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "100"})
    await response.prepare(request)
    await response.write(b'{"choices":')
    assert request.transport is not None
    request.transport.close()
    return response


class FakeFrontend:
    """A Dynamo frontend as the gateway sees one, that answers by script."""

    def __init__(self, name: str = "f", models: tuple[str, ...] = ("m",), workers: tuple[int, ...] = ()) -> None:
        self.name = name
        self.models = models
        self.workers = workers
        self.script: Script = plain
        self.seen: list[tuple[web.BaseRequest, bytes]] = []
        self.running = 0
        self.left = asyncio.Event()
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/v1/models":
            listed = [{"id": one, "object": "model", "owned_by": "nvidia"} for one in self.models]
            return web.json_response({"object": "list", "data": listed})
        if request.path == "/health":
            instances = [{"endpoint": "generate", "instance_id": one} for one in self.workers]
            return web.json_response({"status": "healthy", "instances": instances})
        body = await request.content.read()  # without aiohttp's own limit
        self.seen.append((request, body))
        self.running += 1
        try:
            return await self.script(self, request, body)
        except asyncio.CancelledError:
            self.left.set()
            raise
        finally:
            self.running -= 1

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeFrontend]:
        runner = web.ServerRunner(
            web.Server(self.handle, handler_cancellation=True, access_log=None), shutdown_timeout=0.1
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        try:
            yield self
        finally:
            await runner.cleanup()


class Gate:
    """A gateway in this process, without its command."""

    def __init__(self, config: Config) -> None:
        loop = asyncio.get_running_loop()
        self.config = config
        self.clock = loop.time
        self.store = open_store(config.store, self.clock)
        self.breakers = Breakers(self.store, config.breaker, self.clock)
        self.finished: list[Finished] = []
        self.runtime = self.build(config, None)
        self.proxy = Proxy(lambda: self.runtime, clock=self.clock, observe=self.finished.append)

    def build(self, config: Config, previous: Runtime | None) -> Runtime:
        return build(config, previous, store=self.store, breakers=self.breakers, replica="test.1", clock=self.clock)

    async def post(self, path: str = PATHS[0], body: Any = CHAT, **headers: str) -> ClientResponse:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.session.post(URL(self.url + path, encoded=True), data=data, headers=named)

    async def __aenter__(self) -> Gate:
        await self.store.start()
        await self.breakers.start()
        await self.runtime.start()
        server = web.Server(self.proxy.handle, handler_cancellation=True, access_log=None, auto_decompress=False)
        self.runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await self.runner.setup()
        self.port = free_port()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        self.url = f"http://127.0.0.1:{self.port}"
        self.session = ClientSession()
        known = [one for fleet in self.runtime.sites.values() for one in fleet.frontends]
        await until(lambda: all(one.error != "not asked yet" for one in known))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        await self.runner.cleanup()
        await self.runtime.retire(None)
        await self.breakers.close()
        await self.store.close()


async def until(condition: Callable[[], object], what: str = "it happens") -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"waited in vain until {what}")


def config(*fakes: FakeFrontend | str, model: dict[str, Any] | None = None, **more: Any) -> Config:
    """One site `a` with those frontends, no breakers; `sites` are given whole.

    Gateway and frontends share a loop that a busy machine may stop for a second: no connection fails by that.
    """
    urls = [one if isinstance(one, str) else one.url for one in fakes]
    site = {"frontends": urls, "models": {"m": model or {}}, **more.pop("site", {})}
    timeouts = {"connect_s": 20, **more.pop("timeouts", {})}
    return Config.model_validate({"sites": {"a": site}, "breaker": None, "timeouts": timeouts, **more})


@contextlib.asynccontextmanager
async def frontends(*fakes: FakeFrontend) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for one in fakes:
            await stack.enter_async_context(one.serving())
        yield


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def test_runs() -> None:
        asyncio.run(asyncio.wait_for(test(), 30))

    test_runs.__name__ = test.__name__
    return test_runs


@run
async def test_bodies_and_headers_pass_untouched() -> None:
    fake = FakeFrontend()
    async with frontends(fake), Gate(config(fake)) as gate:
        body = b'{ "model":"m",\n "messages": [{"role":"user","content":"\\u00e9 \xc3\xa9"}] }'
        answer = await gate.post(
            "/v1/chat/completions?beta=1%2F2",
            body,
            x_custom="kept",
            traceparent="00-1-2-3",
            authorization="Bearer theirs",
            x_dynamo_gateway_lease="forged",
            connection="keep-alive, x-gone",
            x_gone="1",
            x_request_id="mine-1",
        )
        assert answer.status == 200
        assert await answer.read() == b'{"by": "f", "usage": {"prompt_tokens": 10, "completion_tokens": 3}}'
        assert answer.headers["x-own"] == "1"
        assert answer.headers["x-request-id"] == "mine-1"
        request, got = fake.seen[0]
        assert got == body
        assert request.rel_url.raw_path_qs == "/v1/chat/completions?beta=1%2F2"
        assert request.headers["host"] == f"127.0.0.1:{fake.port}"
        assert request.headers["x-custom"] == "kept"
        assert request.headers["traceparent"] == "00-1-2-3"
        assert request.headers["authorization"] == "Bearer theirs"
        assert request.headers["x-request-id"] == "mine-1"
        assert "x-dynamo-gateway-lease" not in request.headers
        assert "x-gone" not in request.headers
        made = (await gate.post(x_request_id="not sane")).headers["x-request-id"]
        assert made not in ("", "not sane")
        assert fake.seen[1][0].headers["x-request-id"] == made
        assert gate.finished[0].status == 200
        assert gate.finished[0].tenant == "default"


@run
async def test_every_endpoint_is_passed_on() -> None:
    fake = FakeFrontend()
    async with frontends(fake), Gate(config(fake)) as gate:
        for path in PATHS:
            assert (await gate.post(path, {"model": "m", "input": "x"})).status == 200
            assert fake.seen[-1][0].path == path


@run
async def test_large_body_and_answer_pass() -> None:
    fake = FakeFrontend()
    big = b'{"x":"' + b"y" * 3_000_000 + b'"}'
    fake.script = status(200, big)
    async with frontends(fake), Gate(config(fake)) as gate:
        body = json.dumps({**CHAT, "user": "z" * 3_000_000}).encode()
        answer = await gate.session.post(gate.url + PATHS[0], data=io.BytesIO(body), headers={"Expect": "100-continue"})
        assert await answer.read() == big
        assert fake.seen[0][1] == body


@run
async def test_refusals_have_the_form_of_the_api() -> None:
    fake = FakeFrontend()
    settings = config(fake, limits={"body_bytes": 1000})
    async with frontends(fake), Gate(settings) as gate:
        cases = [
            (PATHS[0], b"{", 400, "not JSON"),
            (PATHS[0], {"model": "m", "max_tokens": "x"}, 400, "max_tokens"),
            (PATHS[0], {"model": "other"}, 404, "there is: m"),
            (PATHS[0], {"model": "m", "x": "y" * 1000}, 413, "1000 bytes"),
            ("/v1/nothing", {}, 404, "/v1/nothing"),
        ]
        for path, body, code, says in cases:
            answer = await gate.post(path, body)
            error = (await answer.json())["error"]
            assert answer.status == code
            assert says in error["message"]
            assert answer.headers["x-request-id"]
        for code, body in ((404, {"model": "other"}), (400, b"x"), (413, b"y" * 2000)):
            answer = await gate.post("/v1/messages", body)
            whole = await answer.json()
            assert (answer.status, whole["type"]) == (code, "error")
        wrong = await gate.session.get(gate.url + PATHS[0])
        assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
        wrong = await gate.post("/v1/models")
        assert (wrong.status, wrong.headers["allow"]) == (405, "GET")
        assert (await gate.post(content_encoding="gzip")).status == 415
        for value in ("0", "-1", "1.5", "soon"):
            answer = await gate.post(x_request_timeout_ms=value)
            assert answer.status == 400
            assert value in (await answer.json())["error"]["message"]
        assert fake.seen == []


async def raw(gate: Gate, head: bytes, body: bytes = b'{"model":"m"}') -> bytes:
    """Send bytes as they are, and return all that comes until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
    writer.write(head.replace(b"\n", b"\r\n") + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


@run
async def test_header_tricks() -> None:
    fake = FakeFrontend()
    post = b"POST /v1/completions HTTP/1.1\nHost: x\n"
    async with frontends(fake), Gate(config(fake)) as gate:
        # Each of several Connection headers names what goes no further.
        answer = await raw(
            gate, post + b"Connection: keep-alive\nConnection: x-one, x-two\nX-One: 1\nX-Two: 2\nX-Three: 3\n"
        )
        assert answer.startswith(b"HTTP/1.1 200")
        (request, _) = fake.seen.pop()
        assert [name for name in request.headers if name.lower() in ("x-one", "x-two", "x-three")] == ["X-Three"]
        for trick, code in (
            (b"Content-Length: 5\n", 400),
            (b"Transfer-Encoding: chunked\n", 400),
            (b"Content-Encoding: identity\nContent-Encoding: gzip\n", 415),
        ):
            assert b" %d " % code in (await raw(gate, post + trick)).split(b"\r\n")[0]
        # Elsewhere under another spelling: nothing.
        for path in (b"//v1/completions", b"/v1/%63ompletions", b"/v1/x/../completions", b"/v1/completions/"):
            assert b" 404 " in (await raw(gate, post.replace(b"/v1/completions", path))).split(b"\r\n")[0]
        assert fake.seen == []

        # What a frontend says of its own connection goes no further either.
        async def hop(fake: FakeFrontend, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
            return web.Response(headers={"Connection": "keep-alive, X-Hop", "X-Hop": "1", "X-Stays": "1"})

        fake.script = hop
        response = await gate.post()
        assert "x-stays" in response.headers
        assert "x-hop" not in response.headers
        fake.script = plain
        # An HTTP/1.0 client knows no 100.
        answer = await raw(gate, post.replace(b"1.1", b"1.0") + b"Expect: 100-continue\n")
        assert answer.startswith(b"HTTP/1.0 200")


@run
async def test_tenants_steer_no_workers_and_pass_nobody_by() -> None:
    fake = FakeFrontend(workers=(7,))
    steering = dict.fromkeys(
        (
            *("x_dynamo_worker_instance_id", "x_worker_instance_id", "x_dynamo_prefill_instance_id"),
            *("x_prefill_instance_id", "x_dynamo_dp_rank", "x_dp_rank", "x_data_parallel_rank"),
            *("x_dynamo_prefill_dp_rank", "x_prefill_dp_rank"),
        ),
        "99",
    )
    tenants = {"one": {"keys_sha256": [hashlib.sha256(b"k").hexdigest()]}}

    def seen() -> dict[str, str]:
        headers = fake.seen.pop()[0].headers
        return {
            name: value for name, value in headers.items() if "instance" in name or "rank" in name or "prio" in name
        }

    async with frontends(fake):
        async with Gate(config(fake, tenants=tenants)) as gate:
            answer = await gate.post(
                x_api_key="k", x_dynamo_request_strict_priority="9", x_dynamo_request_priority="9", **steering
            )
            assert answer.status == 200
            assert seen() == {"x-dynamo-request-priority": "0"}
        async with Gate(config(fake, site={"route": "worker"})) as gate:
            assert (await gate.post(**steering)).status == 200
            assert seen() == {"x-dynamo-worker-instance-id": "7"}
        async with Gate(config(fake)) as gate:  # where there is nobody to protect they pass
            assert (await gate.post(**steering)).status == 200
            assert len(seen()) == len(steering)


@run
async def test_fault_of_the_gateway_is_an_answer_and_costs_no_capacity() -> None:
    fake = FakeFrontend()
    async with frontends(fake), Gate(config(fake, model={"capacity": {"sequences": 1}, "blocks": 1})) as gate:
        (part,) = gate.runtime.routes["m"][0].parts

        async def broken(*_: object) -> Answer:
            raise RuntimeError("a fault that nobody thought of")

        good, Upstream.post = Upstream.post, broken  # type: ignore[assignment, method-assign]
        try:
            for path in (PATHS[0], "/v1/messages"):
                answer = await gate.post(path)
                assert answer.status == 500
                assert "error" in await answer.json()
        finally:
            Upstream.post = good  # type: ignore[method-assign]
        assert part.frontend.outstanding == 0
        assert (await gate.post()).status == 200


@run
async def test_what_cannot_be_passed_on_unchanged_is_refused() -> None:
    fake = FakeFrontend()
    async with frontends(fake), Gate(config(fake)) as gate:
        for header, body, says in (
            (b"x-name: caf\xe9\r\nContent-Length: 13", b'{"model":"m"}', b"x-name"),
            (b"Expect: more\r\nContent-Length: 13", b'{"model":"m"}', b"more"),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%b\r\n\r\n" % header + body)
            answer = await asyncio.wait_for(reader.read(), 10)
            assert answer.startswith(b"HTTP/1.1 4")
            assert says in answer
            writer.close()
        assert fake.seen == []


@run
async def test_body_without_a_length_is_limited_too() -> None:
    fake = FakeFrontend()
    async with frontends(fake), Gate(config(fake, limits={"body_bytes": 1000})) as gate:

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(50):
                yield b"x" * 100

        answer = await gate.session.post(gate.url + PATHS[0], data=pieces())
        assert answer.status == 413


@run
async def test_body_that_does_not_come_is_given_up() -> None:
    fake = FakeFrontend()
    async with frontends(fake), Gate(config(fake, timeouts={"body_s": 0.1})) as gate:
        reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        head = await reader.readline()
        assert b"408" in head
        writer.close()


@run
async def test_models_are_those_configured_that_a_frontend_lists() -> None:
    one, two = FakeFrontend("one", ("m", "hidden")), FakeFrontend("two", ("org/n",))
    sites = {
        "a": {"frontends": [one.url], "models": {"m": {}, "absent": {}}},
        "b": {"frontends": [two.url], "models": {"org/n": {}}},
    }
    async with frontends(one, two):
        sites["a"]["frontends"], sites["b"]["frontends"] = [one.url], [two.url]
        async with Gate(config(sites=sites)) as gate:
            listed = await (await gate.session.get(gate.url + "/v1/models")).json()
            assert [entry["id"] for entry in listed["data"]] == ["m", "org/n"]
            found = await gate.session.get(gate.url + "/v1/models/org%2Fn")
            assert (await found.json()) == {"id": "org/n", "object": "model", "owned_by": "nvidia"}
            assert (await gate.session.get(gate.url + "/v1/models/org/n")).status == 200
            missing = await gate.session.get(gate.url + "/v1/models/absent")
            assert missing.status == 404
            assert "m, org/n" in (await missing.json())["error"]["message"]
            # Configured, but no frontend has a worker for it now.
            answer = await gate.post(body={"model": "absent"})
            assert answer.status == 503
            assert "absent" in (await answer.json())["error"]["message"]


@run
async def test_stream_arrives_piece_by_piece() -> None:
    fake = FakeFrontend()
    gates = [asyncio.Event() for _ in range(3)]
    fake.script = events(EVENT, gates[0], EVENT * 2, gates[1], b"data: {half", gates[2], b"}\n\n" + DONE)
    async with frontends(fake), Gate(config(fake)) as gate:
        answer = await gate.post(body={**CHAT, "stream": True})
        assert answer.headers["content-type"] == "text/event-stream"
        assert await answer.content.readany() == EVENT
        gates[0].set()
        assert await answer.content.readany() == EVENT * 2
        gates[1].set()
        gates[2].set()
        assert await answer.read() == b"data: {half}\n\n" + DONE
        assert gate.finished[0].first_s is not None


@run
async def test_client_that_leaves_is_gone_at_the_backend() -> None:
    fake = FakeFrontend()
    async with frontends(fake), Gate(config(fake, model={"capacity": {"sequences": 1}})) as gate:
        for script, streams in ((hang, False), (hang, True), (events(EVENT, asyncio.Event()), True)):
            fake.script = script
            fake.left.clear()
            task = asyncio.create_task(gate.post(body={**CHAT, "stream": streams}))
            await until(lambda: fake.running == 1)
            if task.done():
                task.result().close()
            else:
                task.cancel()
                await asyncio.wait([task])
                if not task.cancelled():
                    task.result().close()
            await asyncio.wait_for(fake.left.wait(), 10)
            await until(lambda: gate.proxy.open == 0)
        assert [one.status for one in gate.finished] == [499] * 3
        # Its capacity is free again.
        fake.script = plain
        assert (await gate.post()).status == 200


@run
async def test_faults_before_the_first_byte_are_tried_elsewhere() -> None:
    bad, good = FakeFrontend("bad"), FakeFrontend("good")
    faults = [
        (status(500), False),
        (status(503), False),
        (half, False),
        (events(cut=True), True),
        (events(b'data: {"error":{"message":"x","code":503}}\n\n', DONE), True),
        (events(b": nothing yet"), True),
    ]
    async with frontends(bad, good):
        for script, streams in faults:
            bad.script = script
            good.script = events(EVENT, DONE) if streams else plain
            async with Gate(config(bad, good)) as gate:
                for _ in range(4):  # equals take turns, so the bad one is asked
                    answer = await gate.post(body={**CHAT, "stream": streams})
                    assert answer.status == 200
                    assert (EVENT if streams else b"good") in await answer.read()
                assert gate.proxy.retries > 0
        # One that is not there at all is asked once, then left alone until it answers.
        async with Gate(config(f"http://127.0.0.1:{free_port()}", good)) as gate:
            good.script = plain
            for _ in range(4):
                assert (await gate.post()).status == 200
            assert gate.proxy.retries <= 1


@run
async def test_answers_that_are_nobodys_fault_are_passed_on_at_once() -> None:
    one, two = FakeFrontend("one"), FakeFrontend("two")
    async with frontends(one, two), Gate(config(one, two)) as gate:
        for code in (400, 404, 409, 422, 429, 501, 529):
            one.seen.clear()
            two.seen.clear()
            one.script = two.script = status(code)
            answer = await gate.post()
            assert answer.status == code
            assert await answer.read() == b'{"message":"no","code":0}'
            assert len(one.seen) + len(two.seen) == 1
        one.script = two.script = status(503, b'{"message":"Service temporarily overloaded"}')
        assert (await gate.post()).status == 503
        assert gate.proxy.retries == 0


@run
async def test_overloaded_site_passes_to_another_site() -> None:
    near, far = FakeFrontend("near"), FakeFrontend("far")
    async with frontends(near, far):
        sites = {
            "near": {"frontends": [near.url], "prefer": 0, "models": {"m": {}}},
            "far": {"frontends": [far.url], "prefer": 1, "models": {"m": {}}},
        }
        async with Gate(config(sites=sites)) as gate:
            assert (await (await gate.post()).json())["by"] == "near"
            near.script = status(529)
            assert (await (await gate.post()).json())["by"] == "far"
            far.script = status(529, b'{"message":"far"}')
            answer = await gate.post()
            assert (answer.status, await answer.read()) == (529, b'{"message":"far"}')


@run
async def test_when_all_fail_the_last_answer_is_passed_on() -> None:
    one, two = FakeFrontend("one"), FakeFrontend("two")
    async with frontends(one, two), Gate(config(one, two)) as gate:
        one.script = two.script = status(500, b'{"why":"engine"}')
        answer = await gate.post()
        assert (answer.status, await answer.read()) == (500, b'{"why":"engine"}')
        assert gate.finished[0].attempts == 3
        assert {len(one.seen), len(two.seen)} == {1, 2}
        one.script = two.script = half
        answer = await gate.post()
        assert answer.status == 502
        assert "site a" in (await answer.json())["error"]["message"]


def test_nothing_of_a_site_goes_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its key, its worker or its lease: neither after a failure nor when its capacity is taken back."""
    monkeypatch.setenv("NEAR_KEY", "near-secret")

    async def test() -> None:
        near, far = FakeFrontend("near", workers=(7,)), FakeFrontend("far")
        sites = {
            "near": {
                "frontends": [near.url],
                "prefer": 0,
                "route": "worker",
                "api_key_env": "NEAR_KEY",
                "models": {"m": {"capacity": {"sequences": 2}, "blocks": 2}},
            },
            "far": {"frontends": [far.url], "prefer": 1, "models": {"m": {}}},
        }
        async with frontends(near, far), Gate(config(sites=sites)) as gate:
            await until(lambda: gate.runtime.routes["m"][0].rank == 0, "the near site is known")
            for script in (status(500), hang):
                near.script = script
                asked = asyncio.ensure_future(gate.post(Authorization="Bearer mine"))
                if script is hang:
                    await until(lambda: near.running == 1, "it runs at the near site")
                    near.models = ()
                    await until(lambda: gate.runtime.routes["m"][0].rank == 2, "the near site has the model no more")
                    (flight,) = gate.proxy._flights
                    flight.interrupt("reclaimed")
                assert (await (await asked).json())["by"] == "far"
                (first, _), (second, _) = near.seen.pop(0), far.seen.pop(0)
                near.seen.clear()
                assert first.headers["Authorization"] == "Bearer near-secret"
                assert first.headers["x-dynamo-worker-instance-id"] == "7"
                assert first.headers["x-dynamo-gateway-lease"].startswith("near/m serverless ")
                assert second.headers["Authorization"] == "Bearer mine"
                for name in ("x-dynamo-worker-instance-id", "x-dynamo-gateway-lease"):
                    assert name not in second.headers

    asyncio.run(asyncio.wait_for(test(), 30))


@run
async def test_retries_are_a_share_of_requests_or_ten_a_second() -> None:
    fake = FakeFrontend()
    fake.script = status(500)
    now = [1000.0]
    gate = Gate(config(fake, breaker=None, retries={"attempts": 10, "budget": 0.2}))
    gate.proxy = Proxy(lambda: gate.runtime, clock=lambda: now[0], observe=gate.finished.append)
    async with frontends(fake), gate:
        for asked, most in ((1, 9), (20, 10), (20, 10), (200, 19), (400, 80)):
            before = gate.proxy.retries
            for _ in range(asked):
                assert (await gate.post()).status == 500
            assert gate.proxy.retries - before == most
            now[0] += 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_stream_that_breaks_ends_with_an_error_event(path: str) -> None:
    async def test() -> None:
        fake = FakeFrontend()
        delta = b'event: content_block_delta\ndata: {"type":"x.delta"}\n\n'
        async with frontends(fake), Gate(config(fake)) as gate:
            for script in (events(delta, 0.05, b'data: {"half', 0.05, cut=True), events(delta)):
                fake.script = script
                reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
                body = json.dumps({**CHAT, "input": "x", "stream": True}).encode()
                writer.write(
                    b"POST %b HTTP/1.1\r\nHost: x\r\n"
                    b"Connection: close\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body))
                )
                writer.write(body)
                whole = await asyncio.wait_for(reader.read(), 10)
                writer.close()
                assert delta in whole
                assert b"half" not in whole  # a cut event would be taken for a fault of the client's
                assert b"[DONE]" not in whole
                assert whole.endswith(b"\n\n\r\n0\r\n\r\n")
                last = whole.split(b"data: ")[-1].split(b"\n")[0]
                assert b"broke off at site a" in last
                assert "error" in json.loads(last).get("type", "") or "error" in json.loads(last)
                assert (b"event: error" in whole) == (path != "/v1/chat/completions")
            assert [one.broken for one in gate.finished] == [True, True]

    run(test)()


@run
async def test_error_event_of_the_backend_is_passed_on_as_it_is() -> None:
    fake = FakeFrontend()
    error = b'data: {"error":{"message":"Service temporarily unavailable","code":503}}\n\n'
    fake.script = events(EVENT, 0.02, error + DONE)
    async with frontends(fake), Gate(config(fake)) as gate:
        answer = await gate.post(body={**CHAT, "stream": True})
        assert await answer.read() == EVENT + error + DONE
        assert gate.proxy.outcomes == {("a", "m", "error"): 1}


@run
async def test_time_limits() -> None:
    slow, good = FakeFrontend("slow"), FakeFrontend("good")
    slow.script = hang
    stream = {**CHAT, "stream": True}
    limits = {"first_token_s": 0.15, "between_tokens_s": 0.2}
    async with frontends(slow, good):
        good.script = events(EVENT, DONE)
        async with Gate(config(slow, timeouts=limits, retries={"attempts": 1})) as gate:
            answer = await gate.post(body=stream)
            assert answer.status == 504
            assert "Site a gave no answer" in (await answer.json())["error"]["message"]
            await asyncio.wait_for(slow.left.wait(), 10)
            assert gate.proxy.outcomes == {("a", "m", "timeout"): 1}
            # The client's own limit holds for everything, and says nothing about the site.
            answer = await gate.post(x_request_timeout_ms="100")
            assert answer.status == 504
            assert "0.1 s" in (await answer.json())["error"]["message"]
            assert gate.proxy.outcomes[("a", "m", "ignored")] == 1
            slow.script = events(EVENT, asyncio.Event())
            answer = await gate.post(body=stream)
            whole = await answer.read()
            assert whole.startswith(EVENT)
            assert b"stalled for 0.2 s" in whole
            assert gate.proxy.outcomes[("a", "m", "timeout")] == 2
            answer = await gate.post(body=stream, x_request_timeout_ms="100")
            assert b"Not complete within 0.1 s" in await answer.read()
        slow.script = hang
        async with Gate(config(slow, good, timeouts=limits)) as gate:
            for _ in range(3):
                answer = await gate.post(body=stream)
                assert (answer.status, await answer.read()) == (200, EVENT + DONE)


@run
async def test_only_a_wait_for_the_first_byte_speaks_against_a_site() -> None:
    fake = FakeFrontend()
    async with frontends(fake):
        # A sound stream that outlives its client's patience: otherwise clients could open breakers.
        steady: list[bytes | asyncio.Event | float] = [EVENT, 0.02]
        fake.script = events(*steady * 1000)
        async with Gate(config(fake, timeouts={"first_token_s": 0.1})) as gate:
            answer = await gate.post(body={**CHAT, "stream": True}, x_request_timeout_ms="300")
            assert b"Not complete within 0.3 s" in await answer.read()
            assert gate.proxy.outcomes == {("a", "m", "ignored"): 1}
        # A plain answer may take long for its tokens, but not for ever.
        fake.script = hang
        async with Gate(config(fake, timeouts={"request_s": 0.3})) as gate:
            assert (await gate.post()).status == 504
            assert gate.proxy.outcomes == {("a", "m", "timeout"): 1}


@run
async def test_client_that_reads_slowly_is_no_stall() -> None:
    fake = FakeFrontend()
    piece = b'data: {"choices":[{"delta":{"content":"' + b"a" * 2**18 + b'"}}]}\n\n'
    fake.script = events(*[piece] * 160, DONE)
    async with frontends(fake), Gate(config(fake, timeouts={"between_tokens_s": 0.1})) as gate:
        answer = await gate.post(body={**CHAT, "stream": True})
        await asyncio.sleep(0.5)
        # What the client does not take is not taken from the backend either.
        assert fake.running == 1
        assert await answer.read() == piece * 160 + DONE


@run
async def test_client_that_reads_nothing_holds_nothing_beyond_its_time() -> None:
    fake = FakeFrontend()
    piece = b'data: {"choices":[{"delta":{"content":"' + b"a" * 2**18 + b'"}}]}\n\n'
    fake.script = events(*[piece] * 400, DONE)
    async with frontends(fake), Gate(config(fake, model={"capacity": {"sequences": 1}})) as gate:
        stream = await gate.post(body={**CHAT, "stream": True}, x_request_timeout_ms="300")
        await until(lambda: fake.running == 0, "the backend is let go")
        await until(lambda: gate.proxy.open == 0, "the request is over")
        fake.script = plain
        assert (await gate.post()).status == 200
        stream.close()


POLICY = {"min_requests": 4, "window_s": 60, "open_s": 0.2, "max_open_s": 0.4, "probe_s": 5}


@run
async def test_faulty_frontend_is_left_alone_until_a_probe_succeeds() -> None:
    bad, good = FakeFrontend("bad"), FakeFrontend("good")
    bad.script = status(500)
    async with frontends(bad, good), Gate(config(bad, good, breaker=POLICY, retries={"budget": 1})) as gate:
        (route,) = gate.runtime.routes["m"]
        target = route.parts[0].target
        while gate.breakers.state(target) == "closed":
            assert (await gate.post()).status == 200
            await asyncio.sleep(0.005)
        asked = len(bad.seen)
        if gate.breakers.state(target) == "open":
            assert (await gate.post()).status == 200
            assert len(bad.seen) == asked
        bad.script = plain

        async def closed() -> bool:
            assert (await gate.post()).status == 200
            return gate.breakers.state(target) == "closed"

        while not await closed():
            await asyncio.sleep(0.02)
        # The site's own breaker never opened: it is the only one.
        assert gate.breakers.state(route.target) == "closed"


@run
async def test_what_fails_at_once_does_not_look_idle() -> None:
    bad, good = FakeFrontend("bad"), FakeFrontend("good")
    bad.script = status(500)
    good.script = events(0.02, EVENT, DONE)
    # Without breakers: nothing else keeps it from taking all that comes.
    async with frontends(bad, good), Gate(config(bad, good, retries={"budget": 1})) as gate:
        for _ in range(5):
            answers = await asyncio.gather(*(gate.post(body={**CHAT, "stream": True}) for _ in range(8)))
            assert {one.status for one in answers} == {200}
            for one in answers:
                await one.read()
        assert len(bad.seen) < 20
        assert len(good.seen) == 40


@run
async def test_only_frontend_is_never_refused() -> None:
    fake = FakeFrontend()
    fake.script = status(500)
    async with frontends(fake), Gate(config(fake, breaker=POLICY, retries={"attempts": 1})) as gate:
        for _ in range(20):
            assert (await gate.post()).status == 500
            await asyncio.sleep(0.002)
        assert len(fake.seen) == 20
        fake.script = plain
        assert (await gate.post()).status == 200


@run
async def test_broken_site_gets_one_probe_and_the_other_all_the_rest() -> None:
    near, far = FakeFrontend("near"), FakeFrontend("far")
    near.script = status(500)
    async with frontends(near, far):
        sites = {
            "near": {"frontends": [near.url], "models": {"m": {}}},
            "far": {"frontends": [far.url], "prefer": 1, "models": {"m": {}}},
        }
        async with Gate(config(sites=sites, breaker=POLICY, retries={"budget": 1})) as gate:
            target = gate.runtime.routes["m"][0].target
            while gate.breakers.state(target) == "closed":
                assert (await gate.post()).status == 200
                await asyncio.sleep(0.005)
            go = asyncio.Event()

            async def wait(fake: FakeFrontend, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
                await go.wait()
                return await plain(fake, request, body)

            near.script = wait
            near.seen.clear()
            await until(lambda: gate.breakers.state(target) == "due", "a probe is due")
            answers = [asyncio.create_task(gate.post()) for _ in range(20)]
            await until(lambda: sum(one.done() for one in answers) == 19, "all but the probe are answered")
            assert len(near.seen) == 1
            go.set()
            by = [(await (await one).json())["by"] for one in answers]
            assert sorted(by) == ["far"] * 19 + ["near"]
            await until(lambda: gate.breakers.state(target) == "closed", "the probe closes it")
            assert (await (await gate.post()).json())["by"] == "near"


@run
async def test_probe_whose_client_leaves_while_it_waits_is_given_back() -> None:
    monkeypatch = pytest.MonkeyPatch()
    near, far = FakeFrontend("near"), FakeFrontend("far")
    capacity = {"m": {"capacity": {"sequences": 2}, "blocks": 1}}
    async with frontends(near, far):
        sites = {
            "near": {"frontends": [near.url], "models": capacity},
            "far": {"frontends": [far.url], "prefer": 1, "models": capacity},
        }
        # A lost probe would keep the breaker from closing. It shall not be due before both sites are full.
        policy = {**POLICY, "probe_s": 600, "open_s": 1.0, "max_open_s": 1.0}
        async with Gate(config(sites=sites, breaker=policy, retries={"budget": 1})) as gate:
            target = gate.runtime.routes["m"][0].target
            near.script = far.script = hang
            held = [asyncio.create_task(gate.post())]
            await until(lambda: near.running == 1)
            near.script = status(500)
            far.script = plain
            while gate.breakers.state(target) == "closed":
                assert (await gate.post()).status == 200
                await asyncio.sleep(0.005)
            far.script = hang
            held += [asyncio.create_task(gate.post()) for _ in range(2)]
            await until(lambda: far.running == 2)
            await until(lambda: gate.breakers.state(target) == "due", "a probe is due")
            # Neither site has room for two sequences; the one whose probe this is seems to have it sooner.
            for name, wait in (("near", 0.1), ("far", 1.0)):
                monkeypatch.setattr(gate.runtime.pools[name, "m"], "wait_estimate", lambda _, wait=wait: wait)
            waiting = asyncio.create_task(gate.post(body={**CHAT, "n": 2}))
            await until(lambda: gate.breakers.stats.probes == 1, "the probe is granted")
            for one in [waiting, *held]:
                one.cancel()
            await asyncio.wait([waiting, *held])
            await until(lambda: gate.proxy.open == 0)
            near.script = far.script = plain
            while gate.breakers.state(target) != "closed":
                assert (await gate.post()).status == 200
                await asyncio.sleep(0.01)


@run
async def test_probe_that_is_a_long_stream_is_judged_while_it_runs() -> None:
    bad, good = FakeFrontend("bad"), FakeFrontend("good")
    bad.script = status(500)
    policy = {**POLICY, "probe_s": 0.3, "open_s": 0.05, "max_open_s": 0.05}
    async with frontends(bad, good), Gate(config(bad, good, breaker=policy, retries={"budget": 1})) as gate:
        target = gate.runtime.routes["m"][0].parts[0].target
        while gate.breakers.state(target) == "closed":
            assert (await gate.post()).status == 200
            await asyncio.sleep(0.005)
        end = asyncio.Event()
        bad.script = events(EVENT, 0.15, EVENT, end, DONE)
        await until(lambda: gate.breakers.state(target) == "due", "a probe is due")
        stream = await gate.post(body={**CHAT, "stream": True})
        await until(lambda: gate.breakers.state(target) == "closed", "the breaker closes while the stream runs")
        assert bad.running == 1
        end.set()
        assert await stream.read() == EVENT * 2 + DONE


@run
async def test_slow_first_token_and_slow_tokens_are_told_apart() -> None:
    fake = FakeFrontend()
    policy = {**POLICY, "slow_first_token_s": 0.1, "slow_token_s": 0.05}
    async with frontends(fake), Gate(config(fake, breaker=policy)) as gate:
        stream = {**CHAT, "stream": True}
        for script in (events(0.2, EVENT, DONE), events(EVENT, 0.2, EVENT, DONE), events(EVENT, 0.01, EVENT, DONE)):
            fake.script = script
            await (await gate.post(body=stream)).read()
        expected = {("a", "m", "slow_first"): 1, ("a", "m", "slow_tokens"): 1, ("a", "m", "ok"): 1}
        assert gate.proxy.outcomes == expected


@run
async def test_full_pool_queues_and_then_refuses() -> None:
    fake = FakeFrontend()
    release = asyncio.Event()

    async def wait(fake: FakeFrontend, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        await release.wait()
        return await plain(fake, request, body)

    fake.script = wait
    settings = config(
        fake, model={"capacity": {"sequences": 2}}, limits={"queued_requests": 1}, timeouts={"queue_s": 5}
    )
    async with frontends(fake), Gate(settings) as gate:
        release.set()
        await gate.post()  # its first block is leased
        release.clear()
        running = [asyncio.create_task(gate.post()) for _ in range(2)]
        await until(lambda: fake.running == 2)
        queued = asyncio.create_task(gate.post())
        await until(lambda: gate.proxy.open == 3)
        refused = await gate.post()
        assert refused.status == 429
        assert (await refused.json())["error"]["code"] == "queue_full"
        refused = await gate.post("/v1/messages")
        assert (await refused.json())["error"]["type"] == "rate_limit_error"
        assert fake.running == 2
        release.set()
        assert [(await one).status for one in [*running, queued]] == [200] * 3
        pool, account, token = fake.seen[0][0].headers["x-dynamo-gateway-lease"].split()
        assert (pool, account) == ("a/m", "serverless")
        assert all(part.isdigit() for part in token.split("."))
        assert gate.finished[-1].queued_s > 0
        fake.script = hang
        running = [asyncio.create_task(gate.post()) for _ in range(2)]
        await until(lambda: fake.running == 2)
        late = await gate.post(x_request_timeout_ms="150")
        assert late.status == 429
        assert (await late.json())["error"]["code"] == "deadline"
        for one in running:
            one.cancel()
        await asyncio.wait(running)


@run
async def test_retry_at_another_site_has_time_to_queue_there() -> None:
    bad, good = FakeFrontend("bad"), FakeFrontend("good")
    bad.script = hang
    async with frontends(bad, good):
        models = {"m": {"capacity": {"sequences": 1}}}
        sites = {
            "bad": {"frontends": [bad.url], "models": models},
            "good": {"frontends": [good.url], "prefer": 1, "models": models},
        }
        # Its first try takes longer than it might have waited in a queue.
        limits = {"queue_s": 0.2, "first_token_s": 0.4}
        async with Gate(config(sites=sites, timeouts=limits)) as gate:
            good.script = events(EVENT, DONE)
            answer = await gate.post(body={**CHAT, "stream": True})
            assert (answer.status, await answer.read()) == (200, EVENT + DONE)


@run
async def test_nothing_is_kept_of_clients_that_leave_at_any_moment() -> None:
    one, two = FakeFrontend("one", workers=(1, 2)), FakeFrontend("two", workers=(2, 3))
    chance = random.Random(7)

    async def anything(fake: FakeFrontend, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        await asyncio.sleep(chance.random() * 0.02)
        script = chance.choice((plain, status(500), half, events(EVENT, 0.01, EVENT, DONE), events(EVENT, cut=True)))
        return await script(fake, request, body)

    one.script = two.script = anything
    policy = {**POLICY, "open_s": 0.02, "max_open_s": 0.05, "probe_s": 600}
    model = {"capacity": {"sequences": 8}, "blocks": 8}
    async with (
        frontends(one, two),
        Gate(
            config(one, two, model=model, breaker=policy, site={"route": "worker"}, timeouts={"queue_s": 0.1})
        ) as gate,
    ):

        async def client() -> None:
            for _ in range(25):
                stream = chance.random() < 0.5
                task = asyncio.create_task(gate.post(body={**CHAT, "stream": stream}))
                await asyncio.wait([task], timeout=chance.random() * 0.06)
                task.cancel()
                await asyncio.wait([task])
                if not task.cancelled() and task.exception() is None:
                    task.result().close()

        await asyncio.gather(*(client() for _ in range(16)))
        await until(lambda: gate.proxy.open == 0)
        fleet = gate.runtime.sites["a"]
        await until(lambda: fleet.load == 0, "failures are forgotten")
        assert [worker.outstanding for worker in fleet.workers.values()] == [0] * 3
        (pool,) = gate.runtime.pools.values()
        (account,) = pool.snapshot()["accounts"].values()
        assert (account["used"]["sequences"], account["running"], account["waiting"]) == (0, 0, 0)
        # No probe was lost with its client: `probe_s` would keep its breaker from closing.
        one.script = two.script = plain
        targets = [part.target for part in gate.runtime.routes["m"][0].parts]
        targets += [worker.target for worker in fleet.workers.values()]
        while any(gate.breakers.state(target) != "closed" for target in targets):
            assert (await gate.post()).status == 200
            await asyncio.sleep(0.01)


@run
async def test_full_site_overflows_to_another() -> None:
    near, far = FakeFrontend("near"), FakeFrontend("far")
    near.script = hang
    async with frontends(near, far):
        models = {"m": {"capacity": {"sequences": 1}}}
        sites = {
            "near": {"frontends": [near.url], "models": models},
            "far": {"frontends": [far.url], "prefer": 1, "models": models},
        }
        async with Gate(config(sites=sites)) as gate:
            task = asyncio.create_task(gate.post())
            await until(lambda: near.running == 1)
            assert (await (await gate.post()).json())["by"] == "far"
            task.cancel()
            await asyncio.wait([task])


@run
async def test_need_follows_the_usage_in_answers() -> None:
    fake = FakeFrontend()
    async with frontends(fake), Gate(config(fake, model={"capacity": {"kv_tokens": 100_000}})) as gate:
        estimate = gate.runtime.estimates["m"]
        for _ in range(60):
            await gate.post()
        assert estimate.tokens_per_byte == pytest.approx(10 / len(json.dumps(CHAT)), rel=0.05)


@run
async def test_tenants() -> None:
    fake = FakeFrontend()
    names = {"gold": ("k1", 5), "free": ("k2", 0)}
    tenants = {
        name: {"keys_sha256": [hashlib.sha256(key.encode()).hexdigest()], "priority": priority}
        for name, (key, priority) in names.items()
    }
    async with frontends(fake), Gate(config(fake, tenants=tenants)) as gate:
        assert (await gate.post()).status == 401
        answer = await gate.post("/v1/messages", x_api_key="wrong")
        assert answer.status == 401
        assert (await answer.json())["error"]["type"] == "authentication_error"
        assert "wrong" not in await answer.text()
        assert (await gate.session.get(gate.url + "/v1/models")).status == 401
        assert fake.seen == []
        assert (await gate.post(authorization="Bearer k1", x_dynamo_request_priority="9")).status == 200
        assert (await gate.post(x_api_key="k2", x_dynamo_request_priority="3")).status == 200
        assert [one.tenant for one in gate.finished[-2:]] == ["gold", "free"]
        for (request, _), priority in zip(fake.seen, "50", strict=True):
            assert "authorization" not in request.headers
            assert "x-api-key" not in request.headers
            assert request.headers["x-dynamo-request-priority"] == priority


def test_site_has_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        fake = FakeFrontend()
        async with frontends(fake):
            settings = config(fake, site={"api_key_env": "SITE_KEY"})
            with pytest.raises(ConfigError, match=r"sites\.a\.api_key_env: SITE_KEY"):
                Gate(settings)
            monkeypatch.setenv("SITE_KEY", "secret")
            async with Gate(settings) as gate:
                assert (await gate.post(authorization="Bearer theirs", x_api_key="theirs")).status == 200
                headers = fake.seen[0][0].headers
                assert headers.getall("authorization") == ["Bearer secret"]
                assert "x-api-key" not in headers

    run(test)()


@run
async def test_session_stays_at_its_frontend() -> None:
    fakes = [FakeFrontend(str(number)) for number in range(3)]
    async with frontends(*fakes), Gate(config(*fakes)) as gate:
        homes: dict[int, set[str]] = {}
        for session in range(12):
            for header in ("x_dynamo_session_id", "x_claude_code_session_id"):
                by = {(await (await gate.post(**{header: f"s{session}"})).json())["by"] for _ in range(3)}
                assert len(by) == 1
                assert homes.setdefault(session, by) == by
        assert len(set.union(*homes.values())) > 1


@run
async def test_one_request_after_another_reaches_all_frontends_and_workers() -> None:
    one, two = FakeFrontend("one", workers=(1, 2)), FakeFrontend("two", workers=(1, 2))
    async with frontends(one, two), Gate(config(one, two, site={"route": "worker"})) as gate:
        for _ in range(8):
            await (await gate.post()).read()
        assert (len(one.seen), len(two.seen)) == (4, 4)
        asked = [request.headers["x-dynamo-worker-instance-id"] for request, _ in one.seen + two.seen]
        assert sorted(asked) == ["1"] * 4 + ["2"] * 4


@run
async def test_gateway_names_the_worker() -> None:
    fake = FakeFrontend(workers=(11, 22))
    dead: set[str] = {"11"}

    async def pinned(fake: FakeFrontend, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        worker = request.headers["x-dynamo-worker-instance-id"]
        if worker in dead:
            return await status(503)(fake, request, body)
        if worker not in [str(one) for one in fake.workers]:
            return await status(400, b'{"message":"Invalid request","type":"Bad Request","code":400}')(
                fake, request, body
            )
        return web.json_response({"by": worker})

    fake.script = pinned
    async with frontends(fake), Gate(config(fake, site={"route": "worker"}, retries={"budget": 1})) as gate:
        for _ in range(4):
            answer = await gate.post(x_dynamo_worker_instance_id="99")
            assert (await answer.json())["by"] == "22"
        asked = {request.headers["x-dynamo-worker-instance-id"] for request, _ in fake.seen}
        assert asked == {"11", "22"}
        # One that is gone before discovery has noticed: Dynamo blames the request, which is not at fault.
        dead.clear()
        fake.workers = (22,)
        for _ in range(4):
            assert (await (await gate.post()).json())["by"] == "22"


@run
async def test_worker_route_needs_a_site_of_one_model() -> None:
    site = {"frontends": ["http://127.0.0.1:1"], "route": "worker", "models": {"m": {}, "n": {}}}
    with pytest.raises(ConfigError, match=r"sites\.a\.route: .* got m, n"):
        Gate(config(sites={"a": site}))


@run
async def test_drain_and_cut() -> None:
    fake = FakeFrontend()
    fake.script = events(EVENT, asyncio.Event())
    async with frontends(fake), Gate(config(fake)) as gate:
        stream = await gate.post(body={**CHAT, "stream": True})
        assert await stream.content.readany() == EVENT
        fake.script = hang
        waiting = asyncio.create_task(gate.post())
        await until(lambda: fake.running == 2)
        gate.proxy.drain()
        refused = await gate.post()
        assert refused.status == 503
        assert refused.headers["connection"] == "close"
        assert (await refused.json())["error"]["code"] == "draining"
        assert gate.proxy.open == 2
        gate.proxy.cancel()
        rest = await stream.read()
        assert b"The gateway stops" in rest
        assert DONE not in rest
        assert (await waiting).status == 503
        await until(lambda: gate.proxy.open == 0)
        await until(lambda: fake.running == 0)


@run
async def test_reload_drops_no_stream() -> None:
    fake, other = FakeFrontend("old"), FakeFrontend("new")
    go = asyncio.Event()
    fake.script = events(EVENT, go, EVENT, DONE)
    capacity = {"capacity": {"sequences": 4}}
    async with frontends(fake, other), Gate(config(fake, model=capacity)) as gate:
        stream = await gate.post(body={**CHAT, "stream": True})
        assert await stream.content.readany() == EVENT
        before = gate.runtime
        after = gate.build(config(other, model={"capacity": {"sequences": 8}}), before)
        assert after.pools == before.pools
        await after.start()
        gate.runtime = after
        retired = asyncio.create_task(before.retire(after))
        assert (await (await gate.post()).json())["by"] == "new"
        assert not retired.done()
        go.set()
        assert await stream.read() == EVENT + DONE
        await retired
        assert (await (await gate.post()).json())["by"] == "new"


@run
async def test_pool_stays_while_a_request_from_before_two_reloads_holds_its_capacity() -> None:
    fake = FakeFrontend()
    go = asyncio.Event()
    fake.script = events(EVENT, go, DONE)
    capacity = {"capacity": {"sequences": 1}, "blocks": 1}
    async with frontends(fake), Gate(config(fake, model=capacity)) as gate:
        stream = await gate.post(body={**CHAT, "stream": True})
        assert await stream.content.readany() == EVENT
        retired = []
        for model in (capacity, {}):  # the pool stays at first, then it goes
            before = gate.runtime
            gate.runtime = gate.build(config(fake, model=model), before)
            await gate.runtime.start()
            retired.append(asyncio.create_task(before.retire(gate.runtime)))
        await asyncio.sleep(0.05)
        # Another replica, on the same store: the one sequence is still taken.
        other = build(
            config(fake, model=capacity),
            None,
            store=gate.store,
            breakers=gate.breakers,
            replica="test.2",
            clock=gate.clock,
        )
        await other.start()
        (pool,) = other.pools.values()
        ask = Ask("default", Units(1, 0, 0), gate.clock(), gate.clock() + 0.2)
        with pytest.raises(Rejected):
            await pool.admit(ask)
        go.set()
        assert await stream.read() == DONE
        await asyncio.wait_for(asyncio.gather(*retired), 10)
        ask.deadline = gate.clock() + 10
        (await pool.admit(ask)).release()
        await other.retire(None)


@run
async def test_too_many_open_requests() -> None:
    fake = FakeFrontend()
    fake.script = hang
    async with frontends(fake), Gate(config(fake, limits={"open_requests": 1})) as gate:
        task = asyncio.create_task(gate.post())
        await until(lambda: fake.running == 1)
        assert (await gate.post()).status == 503
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: gate.proxy.open == 0)
        fake.script = plain
        assert (await gate.post()).status == 200


@run
async def test_reclaimed_request_is_queued_again_before_its_first_byte() -> None:
    fake = FakeFrontend()
    keys = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("owner", "guest")}
    tenants = {name: {"keys_sha256": [key]} for name, key in keys.items()}
    model = {"capacity": {"sequences": 2}, "blocks": 2, "reserved": {"owner": 0.5}}
    go = asyncio.Event()

    async def wait(fake: FakeFrontend, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        await go.wait()
        return await plain(fake, request, body)

    fake.script = wait
    settings = config(fake, model=model, tenants=tenants, lease={"ttl_s": 0.5})
    async with frontends(fake), Gate(settings) as gate:
        guests = [asyncio.create_task(gate.post(x_api_key="guest")) for _ in range(2)]
        await until(lambda: fake.running == 2, "the guests borrow the idle share")
        owner = asyncio.create_task(gate.post(x_api_key="owner"))
        await until(lambda: len(fake.seen) == 3, "the owner gets its share back")
        await until(lambda: fake.running == 2, "one guest is taken from the backend")
        go.set()
        assert [(await one).status for one in [*guests, owner]] == [200] * 3
        assert len(fake.seen) == 4


@run
async def test_reclaimed_stream_ends_with_an_error_that_can_be_tried_again() -> None:
    fake = FakeFrontend()
    keys = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("owner", "guest")}
    tenants = {name: {"keys_sha256": [key]} for name, key in keys.items()}
    model = {"capacity": {"sequences": 2}, "blocks": 2, "reserved": {"owner": 0.5}, "reclaim": "any"}
    fake.script = events(EVENT, asyncio.Event())
    settings = config(fake, model=model, tenants=tenants, lease={"ttl_s": 0.5})
    async with frontends(fake), Gate(settings) as gate:
        guests = [await gate.post(body={**CHAT, "stream": True}, x_api_key="guest") for _ in range(2)]
        fake.script = plain
        assert (await gate.post(x_api_key="owner")).status == 200
        await until(lambda: fake.running == 1, "one guest is taken from the backend")
        (cut,) = [one for one in gate.finished if one.broken]
        assert cut.tenant == "guest"
        texts = [asyncio.create_task(one.read()) for one in guests]
        done, rest = await asyncio.wait(texts, return_when=asyncio.FIRST_COMPLETED)
        assert b"reclaimed" in done.pop().result()
        for one in rest:
            one.cancel()
