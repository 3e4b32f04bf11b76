# SPDX-License-Identifier: Apache-2.0
"""POST to a frontend over kept-alive connections: HTTP/1.1 as llhttp reads it (httptools).

This is the path of every request, on which an HTTP client for all purposes spends much of the processor time: the bench
`gateway` has a relay that uses aiohttp on both sides beside it. Discovery, which is not on that path, uses aiohttp.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections import deque
from typing import cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from multidict import CIMultiDict

from ._store import within

__all__ = ["Answer", "Broken", "NotConnected", "Upstream"]

#: A connection that was idle for longer is not used again: the other side may be about to close it (seconds).
_IDLE_S = 15.0
#: A kept connection that ends later than this after a request was sent had not been closed before (seconds).
_STALE_S = 1.0
#: More than this is not read ahead of the client (bytes).
_AHEAD = 2**18
#: Bodies above this are not joined with the head, and are handed over in pieces of this size (bytes).
_PIECE = 2**16
#: The largest head of an answer (bytes).
_HEAD = 2**18


class NotConnected(ConnectionError):
    """No connection could be made in time; nothing was sent."""


class Broken(ConnectionError):
    """The connection ended, or what came was no HTTP, before the answer was complete.

    Attributes:
        untouched: whether nothing at all had come.
    """

    def __init__(self, what: str, untouched: bool = False) -> None:
        super().__init__(what)
        self.untouched = untouched


class _Connection(asyncio.Protocol):
    """One connection, with at most one request on it."""

    _transport: asyncio.Transport
    _parser: HttpResponseParser

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._blocked: asyncio.Future[None] | None = None
        self._reading = True
        self._head = 0
        self._framed = False
        self.answer: Answer | None = None
        self.lost = False
        self.idle_since = 0.0

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not derived from it
        self._parser = HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        answer = self.answer
        if answer is None:  # nothing was asked
            self.abort()
            return
        if not answer.status:
            self._head += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._fail(answer, f"no HTTP: {error}")
            return
        if self.answer is answer:
            if not answer.status and self._head > _HEAD:
                self._fail(answer, f"the head is larger than {_HEAD} bytes")
            elif answer.ahead > _AHEAD and self._reading:
                self._reading = False
                self._transport.pause_reading()
        answer.wake()

    def eof_received(self) -> None:
        self._ended(None)
        self.abort()  # a transport that closes itself first sends what it has, to one that may not take it

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self._ended(error)
        del self._parser  # it refers to this

    def _ended(self, error: Exception | None) -> None:
        """Nothing more will come."""
        self._upstream.idle.pop(self, None)
        self._unblock()
        answer, self.answer = self.answer, None
        if answer is not None:
            if answer.status and not self._framed and error is None:
                answer.complete = True  # such a body ends with the connection
            else:
                what = f"connection lost: {error}" if error else "connection closed by the frontend"
                answer.error = Broken(what, not self._head)
            answer.wake()

    def pause_writing(self) -> None:
        self._blocked = self._blocked or asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        self._unblock()

    # What the parser calls

    def on_message_begin(self) -> None:
        self._framed = False
        answer = self.answer
        if answer is None or answer.complete:
            raise ValueError("an answer that nobody asked for")
        answer.headers = CIMultiDict()

    def on_status(self, reason: bytes) -> None:
        assert self.answer is not None
        self.answer.reason += reason.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self.answer is not None
        if self.answer.status:  # a trailer: no header of the answer
            return
        try:
            text = value.decode()
        except UnicodeDecodeError:
            text = value.decode("latin-1")
        key = name.decode("latin-1")
        self.answer.headers.add(key, text)
        if len(name) in (14, 17) and key.lower() in ("content-length", "transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        assert self.answer is not None
        if status < 100:
            raise ValueError("no status")
        if status < 200:  # not yet the answer
            self.answer.reason = ""
            return
        self._framed = self._framed or status in (204, 304)
        self.answer.status = status
        if status >= 400:
            self._unblock()  # see `send`

    def on_body(self, body: bytes) -> None:
        assert self.answer is not None
        if not self.answer.status:  # httptools 0.6 reads one where there is none
            return
        self.answer.pieces.append(body)
        self.answer.ahead += len(body)

    def on_message_complete(self) -> None:
        answer = self.answer
        assert answer is not None
        if not answer.status:
            return
        answer.complete = True
        self.answer = None
        if self._parser.should_keep_alive() and answer.sent:
            self.read_on()
            self._upstream.keep(self)
        else:
            self.abort()

    # What a request does

    async def send(self, answer: Answer, head: bytes, body: bytes) -> None:
        """Send a request whose answer is to be `answer`; stops midway where that has come, or is an error."""
        self.answer = answer
        self._head = 0
        if len(body) <= _PIECE:
            answer.sent = True
            self._transport.write(head + body)
            return
        self._transport.write(head)
        view = memoryview(body)
        for start in range(0, len(body), _PIECE):
            self._transport.write(view[start : start + _PIECE])
            if self._blocked is not None:
                await self._blocked
            if answer.error is not None or answer.complete or answer.status >= 400:
                return
        answer.sent = True

    def read_on(self) -> None:
        """Read again: what was ahead has been taken."""
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()

    def abort(self) -> None:
        """End it now."""
        if not self.lost:
            self.lost = True
            self._transport.abort()

    def _unblock(self) -> None:
        blocked, self._blocked = self._blocked, None
        if blocked is not None and not blocked.done():
            blocked.set_result(None)

    def _fail(self, answer: Answer, what: str) -> None:
        answer.error = Broken(what)
        self.answer = None
        self.abort()
        answer.wake()


class Answer:
    """What a frontend answers; usable as soon as its head is there.

    Attributes:
        status: 0 until the head is there.
        reason, headers: as they came; header values that are no UTF-8 are read as Latin-1.
    """

    __slots__ = (
        "_connection",
        "_waiter",
        "ahead",
        "complete",
        "error",
        "headers",
        "pieces",
        "reason",
        "sent",
        "status",
    )

    def __init__(self, connection: _Connection) -> None:
        self.status = 0
        self.reason = ""
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.pieces: deque[bytes] = deque()
        self.ahead = 0
        self.complete = False
        self.sent = False
        self.error: Broken | None = None
        self._connection = connection
        self._waiter: asyncio.Future[None] | None = None

    async def more(self) -> None:
        """Wait until something has changed; raise Broken where nothing can."""
        if self.error is not None:
            raise Broken(str(self.error), self.error.untouched)  # a raised one refers to frames that have this
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        await waiter

    async def read(self) -> bytes:
        """Return the whole body; raise Broken where it does not come whole."""
        while not self.complete:
            if self._connection.answer is self:
                self._connection.read_on()
            await self.more()
        return self._taken()

    async def some(self) -> bytes:
        """Return what there is of the body, as soon as there is something; b"" at its end; raise Broken."""
        while not self.pieces:
            if self.complete:
                return b""
            await self.more()
        return self._taken()

    def close(self) -> None:
        """Close the connection, unless all of the answer has come."""
        if not self.complete:
            self._connection.answer = None
            self._connection.abort()

    def wake(self) -> None:
        """Something has changed."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def _taken(self) -> bytes:
        pieces = self.pieces
        if not pieces:
            return b""
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self.ahead = 0
        if self._connection.answer is self:
            self._connection.read_on()
        return data


class Upstream:
    """The connections to one frontend.

    Args:
        url: its base, `http://HOST:PORT` or `https://HOST:PORT`.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None  # the configuration was checked
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._lines = f"HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n"
        #: Connections without a request, the longest idle first.
        self.idle: dict[_Connection, None] = {}

    async def post(self, target: str, headers: CIMultiDict[str], body: bytes, connect_s: float) -> Answer:
        """Send a request and return the answer once its head is there.

        A kept connection that ends at once, before it has given anything, was closed while it was idle: the request is
        then sent over a new one.

        Args:
            target: path and query, as they stand in the request line.
            headers: all but Host and Content-Length.
            body: what is sent.
            connect_s: how long it may take to connect.

        Raises:
            NotConnected: there is no connection; `errno` is the system's where it said one.
            Broken: the connection ended before the head, or what came is no HTTP.
            ValueError: a header or the target holds a line break.
        """
        lines = [f"POST {target} {self._lines}"]
        for name, value in headers.items():
            lines.append(f"{name}: {value}\r\n")
        lines.append(f"Content-Length: {len(body)}\r\n\r\n")
        text = "".join(lines)
        if text.count("\n") != len(lines) + 2 or text.count("\r") != len(lines) + 2:
            raise ValueError("a header or the target holds a line break")
        head = text.encode(errors="surrogateescape")  # as it came
        kept = self._kept()
        if kept is not None:
            loop = asyncio.get_running_loop()
            latest = loop.time() + _STALE_S
            try:
                return await self._ask(kept, head, body)
            except Broken as error:
                if not error.untouched or loop.time() > latest:
                    raise
        made = await self._connect(connect_s)
        if made.lost:
            raise NotConnected(f"{self._host}:{self._port}: closed the connection at once")
        return await self._ask(made, head, body)

    def keep(self, connection: _Connection) -> None:
        """Take back a connection whose answer is complete."""
        now = asyncio.get_running_loop().time()
        connection.idle_since = now
        self.idle[connection] = None
        while (oldest := next(iter(self.idle))).idle_since < now - _IDLE_S:
            del self.idle[oldest]
            oldest.abort()

    def close(self) -> None:
        """Close the connections that have no request."""
        while self.idle:
            self.idle.popitem()[0].abort()

    async def _ask(self, connection: _Connection, head: bytes, body: bytes) -> Answer:
        answer = Answer(connection)
        try:
            await connection.send(answer, head, body)
            while not answer.status:
                await answer.more()
        except BaseException:
            answer.close()
            raise
        return answer

    def _kept(self) -> _Connection | None:
        oldest = asyncio.get_running_loop().time() - _IDLE_S
        while self.idle:
            connection = self.idle.popitem()[0]
            if connection.idle_since >= oldest and not connection.lost:
                return connection
            connection.abort()
        return None

    async def _connect(self, seconds: float) -> _Connection:
        made: list[_Connection] = []
        try:
            return await within(seconds, self._connected(made))
        except asyncio.CancelledError:
            for one in made:
                one.abort()
            raise
        except asyncio.TimeoutError:
            raise NotConnected(f"no connection to {self._host}:{self._port} within {seconds:g} s") from None
        except OSError as error:
            raised = NotConnected(f"{self._host}:{self._port}: {error}")
            raised.errno = error.errno
            try:
                raise raised from error
            finally:
                del raised  # it refers to this frame

    async def _connected(self, made: list[_Connection]) -> _Connection:
        """Connect to one of the host's addresses; which one is drawn, so that all of a name's get their share."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys((family, where[0]) for family, _, _, _, where in found))
        families = list(dict.fromkeys(family for family, _ in addresses))
        random.shuffle(addresses)
        addresses.sort(key=lambda one: families.index(one[0]))  # the system's order of families stays
        last: OSError | None = None
        for _, address in addresses:
            try:
                _, connection = await loop.create_connection(
                    lambda: _Connection(self),
                    str(address),
                    self._port,
                    ssl=self._ssl,
                    server_hostname=self._host if self._ssl else None,
                )
            except OSError as error:
                last = error
            else:
                made.append(connection)
                return connection
        try:
            raise last or OSError(f"{self._host} has no address")
        finally:
            del last  # it refers to this frame
