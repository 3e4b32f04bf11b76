# SPDX-License-Identifier: Apache-2.0
"""Requests to a frontend over kept connections, before servers that do what servers do."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import trustme
import uvloop
from multidict import CIMultiDict

from dynamo_resilience._upstream import Answer, Broken, NotConnected, Upstream, _Connection
from support.processes import free_port

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello"


LOOPS = [uvloop.new_event_loop, asyncio.new_event_loop]


def run(
    work: Callable[[], Awaitable[None]],
    new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work(), 30)

    loop = new_loop()
    try:
        loop.run_until_complete(bounded())
    finally:
        loop.close()


class Server:
    """A server whose connections are handled by the test."""

    def __init__(self, handler: Handler) -> None:
        self.connections = 0
        self.requests: list[bytes] = []
        self._handler = handler

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._handler(reader, writer)
        writer.close()

    async def request(self, reader: asyncio.StreamReader) -> bytes:
        """Read one request; return its body."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        body = await reader.readexactly(length)
        self.requests.append(head + body)
        return body


@contextlib.asynccontextmanager
async def serving(
    answer: Callable[[Server, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[tuple[Server, Upstream]]:
    server = Server(lambda reader, writer: answer(server, reader, writer))
    listener = await asyncio.start_server(server._handle, "127.0.0.1", 0, ssl=tls)
    port = listener.sockets[0].getsockname()[1]
    upstream = Upstream(f"{'https' if tls else 'http'}://localhost:{port}")
    try:
        yield server, upstream
    finally:
        upstream.close()
        listener.close()


async def post(upstream: Upstream, body: bytes = b"{}", target: str = "/v1/x") -> Answer:
    return await upstream.post(target, CIMultiDict({"Content-Type": "application/json", "X-A": "ü"}), body, 2.0)


async def _plain(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await server.request(reader)
        writer.write(PLAIN)


def test_a_connection_is_kept_and_the_request_is_what_was_asked_for() -> None:
    async def work() -> None:
        async with serving(_plain) as (server, upstream):
            for _ in range(3):
                answer = await post(upstream, b'{"a":1}', "/v1/x?y=%20")
                assert (answer.status, answer.reason) == (200, "OK")
                assert answer.headers["content-type"] == "text/plain"
                assert await answer.read() == b"hello"
            assert server.connections == 1
            head, _, body = server.requests[-1].partition(b"\r\n\r\n")
            lines = head.split(b"\r\n")
            assert lines[0] == b"POST /v1/x?y=%20 HTTP/1.1"
            assert lines[1].startswith(b"Host: localhost:")
            assert lines[2:] == [b"Content-Type: application/json", "X-A: ü".encode(), b"Content-Length: 7"]
            assert body == b'{"a":1}'

    run(work)


def test_requests_at_once_have_a_connection_each() -> None:
    async def work() -> None:
        async with serving(_plain) as (server, upstream):
            answers = await asyncio.gather(*(post(upstream) for _ in range(5)))
            assert [await one.read() for one in answers] == [b"hello"] * 5
            assert server.connections == 5
            await (await post(upstream)).read()
            assert server.connections == 5

    run(work)


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nTrailer: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\n\r\nhello",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + PLAIN,
    ],
    ids=["chunked", "until the end", "HTTP/1.0", "after others"],
)
@pytest.mark.parametrize("step", [1, 1000])
def test_answers_in_every_form(sent: bytes, step: int) -> None:
    async def answer(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        for start in range(0, len(sent), step):
            writer.write(sent[start : start + step])
            await writer.drain()
            await asyncio.sleep(0)

    async def work() -> None:
        async with serving(answer) as (_, upstream):
            for _ in range(2):
                got = await post(upstream)
                assert (got.status, got.reason) == (200, "OK")
                assert "link" not in got.headers
                assert await got.read() == b"hello"

    run(work)


def test_a_stream_comes_piece_by_piece() -> None:
    async def work() -> None:
        go = asyncio.Event()

        async def answer(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
            await go.wait()
            writer.write(b"3\r\ntwo\r\n0\r\n\r\n")

        async with serving(answer) as (_, upstream):
            got = await post(upstream)
            assert await got.some() == b"one"
            go.set()
            assert await got.some() == b"two"
            assert await got.some() == b""
            assert await got.some() == b""

    run(work)


@pytest.mark.parametrize(
    ("sent", "untouched"),
    [
        (b"", True),
        (b"HTTP/1.1 20", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello", False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n", False),
        (b"SSH-2.0-OpenSSH\r\n", False),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 300_000, False),
    ],
    ids=["nothing", "half a head", "half a body", "half a chunked body", "no HTTP", "upgrade", "endless head"],
)
def test_an_answer_that_breaks_off_is_an_error(sent: bytes, untouched: bool) -> None:
    async def answer(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(sent)

    async def work() -> None:
        async with serving(answer) as (server, upstream):
            with pytest.raises(Broken) as caught:
                await (await post(upstream)).read()
            assert caught.value.untouched == untouched
            assert server.connections == 1
            assert not upstream.idle

    run(work)


def test_a_kept_connection_that_was_closed_is_replaced() -> None:
    async def work() -> None:
        close = asyncio.Event()

        async def answer(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.request(reader)
            writer.write(PLAIN)
            if server.connections == 1:
                await reader.readexactly(1)  # closes on the next request, of which it reads nothing more
                return
            await close.wait()

        async with serving(answer) as (server, upstream):
            assert await (await post(upstream)).read() == b"hello"
            assert await (await post(upstream)).read() == b"hello"
            assert server.connections == 2
            close.set()

    run(work)


def test_an_unasked_answer_ends_the_connection() -> None:
    async def answer(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(PLAIN + PLAIN)
        await reader.read()

    async def work() -> None:
        async with serving(answer) as (server, upstream):
            for _ in range(2):
                assert await (await post(upstream)).read() == b"hello"
            assert server.connections == 2

    run(work)


def test_closing_an_answer_closes_the_connection() -> None:
    async def work() -> None:
        gone = asyncio.Event()

        async def answer(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            gone.set()

        async with serving(answer) as (_, upstream):
            got = await post(upstream)
            got.close()
            await gone.wait()
            assert not upstream.idle

    run(work)


def test_giving_up_before_the_head_closes_the_connection() -> None:
    async def work() -> None:
        asked, gone = asyncio.Event(), asyncio.Event()

        async def answer(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.request(reader)
            asked.set()
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            gone.set()

        async with serving(answer) as (_, upstream):
            task = asyncio.ensure_future(post(upstream))
            await asked.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await gone.wait()

    run(work)


def test_a_large_body_arrives_whole_and_is_cut_short_by_an_early_answer() -> None:
    body = bytes(range(256)) * 2**16  # 16 MiB

    async def early(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if server.connections == 1:
            assert await server.request(reader) == body
            writer.write(PLAIN)
            await reader.read()
            return
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        await reader.read(2**20)

    async def work() -> None:
        async with serving(early) as (_, upstream):
            assert await (await post(upstream, body)).read() == b"hello"
            upstream.close()
            assert (await post(upstream, body)).status == 413
            assert not upstream.idle

    run(work)


def test_what_is_not_taken_is_not_read() -> None:
    async def work() -> None:
        written = 0

        async def answer(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal written
            await server.request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 67108864\r\n\r\n")
            for _ in range(1024):
                writer.write(b"x" * 65536)
                await writer.drain()
                written += 65536

        async with serving(answer) as (_, upstream):
            got = await post(upstream)
            before = -1
            while before != written:  # until the server stands still
                before = written
                await asyncio.sleep(0.2)
            assert written < 32 * 2**20
            assert got.ahead < 2**20
            size = 0
            while piece := await got.some():
                size += len(piece)
            assert size == 64 * 2**20

    run(work)


def test_no_connection_is_said_with_the_cause() -> None:
    async def work() -> None:
        port = free_port()
        with pytest.raises(NotConnected, match=str(port)) as caught:
            await post(Upstream(f"http://127.0.0.1:{port}"))
        assert caught.value.errno == 111
        with pytest.raises(NotConnected, match=r"nowhere\.invalid"):
            await post(Upstream("http://nowhere.invalid:80"))

    run(work)


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\nb: c", "a\rb"])
def test_a_line_break_in_a_header_is_refused(value: str) -> None:
    async def work() -> None:
        upstream = Upstream("http://127.0.0.1:1")
        with pytest.raises(ValueError, match="line break"):
            await upstream.post("/", CIMultiDict({"X": value}), b"", 1.0)

    run(work)


def _certified(folder: Path) -> ssl.SSLContext:
    """Return what a server needs to be `localhost`; who trusts `certificate.pem` in the folder believes it."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "certificate.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    return context


def test_over_tls_the_name_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = _certified(tmp_path)

    async def work() -> None:
        async with serving(_plain, tls=context) as (server, upstream):
            with pytest.raises(NotConnected, match=r"(?i)certificate"):
                await post(upstream)
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
            trusting = Upstream(f"https://localhost:{upstream._port}")
            for _ in range(2):
                assert await (await post(trusting)).read() == b"hello"
            assert server.connections <= 2
            trusting.close()

    run(work)


@pytest.mark.parametrize("sent", [b"", b"SSH-2.0-OpenSSH\r\n"], ids=["nothing", "a banner"])
@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_connection_that_ends_before_the_request_is_none(
    sent: bytes, new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    connected = Upstream._connected

    async def late(self: Upstream, made: list[_Connection]) -> _Connection:
        connection = await connected(self, made)
        while not connection.lost:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        return connection

    async def answer(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)

    async def work() -> None:
        monkeypatch.setattr(Upstream, "_connected", late)
        async with serving(answer) as (_, upstream):
            with pytest.raises(NotConnected, match="at once"):
                await asyncio.wait_for(post(upstream), 5)

    run(work, new_loop)


def test_a_request_that_a_kept_connection_had_for_long_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(PLAIN)
        await server.request(reader)
        await asyncio.sleep(0.3)

    async def work() -> None:
        monkeypatch.setattr("dynamo_resilience._upstream._STALE_S", 0.1)
        async with serving(answer) as (server, upstream):
            assert await (await post(upstream)).read() == b"hello"
            with pytest.raises(Broken):
                await post(upstream)
            assert (server.connections, len(server.requests)) == (1, 2)

    run(work)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_an_error_ends_a_body_that_nobody_takes(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    body = bytes(2**25)

    async def work() -> None:
        go, over = asyncio.Event(), asyncio.Event()

        async def answer(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 413 Too Large\r\nConnection: close\r\n\r\ntoo large")
            await go.wait()
            writer.write_eof()
            await over.wait()
            writer.transport.abort()

        async with serving(answer) as (_, upstream):
            got = await asyncio.wait_for(post(upstream, body), 5)
            assert got.status == 413
            assert got._connection._transport.get_write_buffer_size() < 2**20
            go.set()
            assert await asyncio.wait_for(got.read(), 5) == b"too large"
            assert got._connection.lost
            over.set()

    run(work, new_loop)


def test_a_connection_whose_end_was_announced_is_not_used() -> None:
    async def work() -> None:
        async with serving(_plain) as (server, upstream):
            await (await post(upstream)).read()
            (kept,) = upstream.idle
            kept.eof_received()
            assert not upstream.idle
            await (await post(upstream)).read()
            assert server.connections == 2

    run(work)


def test_a_trailer_is_no_header() -> None:
    async def answer(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: 1\r\n\r\n0\r\nX-A: 2\r\nX-B: 3\r\n\r\n")
        await reader.read()

    async def work() -> None:
        async with serving(answer) as (_, upstream):
            got = await post(upstream)
            assert await got.read() == b""
            assert got.headers.getall("X-A") == ["1"]
            assert "X-B" not in got.headers

    run(work)


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 000 None\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ],
    ids=["no status", "two lengths", "length and chunks", "chunks and length"],
)
def test_an_answer_without_a_clear_end_is_an_error(sent: bytes) -> None:
    async def answer(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(sent)
        await reader.read()

    async def work() -> None:
        async with serving(answer) as (_, upstream):
            with pytest.raises(Broken, match="no HTTP"):
                await asyncio.wait_for(post(upstream), 5)
            assert not upstream.idle

    run(work)


@pytest.mark.parametrize("head", [b"100 Continue\r\nContent-Length: 4", b"204 No\r\nContent-Length: 4"])
def test_a_body_where_there_is_none_is_nobodys(head: bytes) -> None:
    async def answer(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await server.request(reader)
            writer.write(b"HTTP/1.1 " + head + b"\r\n\r\noops" + PLAIN)

    async def work() -> None:
        async with serving(answer) as (_, upstream):
            for _ in range(2):
                with contextlib.suppress(Broken):  # what follows may be read as no HTTP, never as the next answer
                    got = await post(upstream)
                    assert await got.read() in ((b"", b"oops") if got.status == 204 else (b"hello",))

    run(work)


def test_bytes_that_are_no_text_are_sent_as_they_came() -> None:
    async def work() -> None:
        async with serving(_plain) as (server, upstream):
            await (await post(upstream, target="/v1/x?" + b"\xff".decode(errors="surrogateescape"))).read()
            assert server.requests[0].startswith(b"POST /v1/x?\xff HTTP/1.1\r\n")

    run(work)


@pytest.mark.parametrize("case", ["answered", "broken", "refused"])
def test_what_is_over_leaves_no_cycles(case: str) -> None:
    async def answer(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        if case == "answered":
            writer.write(PLAIN)

    async def once(upstream: Upstream) -> None:
        try:
            await (await post(upstream)).read()
        except (Broken, NotConnected):
            assert case != "answered"

    async def work() -> None:
        async with serving(answer) as (_, upstream):
            target = Upstream(f"http://127.0.0.1:{free_port()}") if case == "refused" else upstream
            gc.collect()
            gc.disable()
            try:
                await once(target)
                await asyncio.sleep(0.1)
                kinds = (_Connection, Answer, Broken, NotConnected)
                assert not [one for one in gc.get_objects() if type(one) in kinds]
            finally:
                gc.enable()

    run(work)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_body_over_tls_ends_with_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    body = b"x" * 2**20

    async def answer(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + body)

    async def work() -> None:
        async with serving(answer, tls=_certified(tmp_path)) as (_, upstream):
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
            trusting = Upstream(f"https://localhost:{upstream._port}")
            assert await (await post(trusting)).read() == body
            assert not trusting.idle

    run(work, new_loop)
