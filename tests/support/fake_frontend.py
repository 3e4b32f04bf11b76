# SPDX-License-Identifier: Apache-2.0
"""A fake Dynamo frontend for tests and benches of what stands before it: cheap answers, faults, exact counts.

    python -m support.fake_frontend --port 9001 --model m [--workers 4] [--delay S] [--tokens 200] [--pace S]

Nothing is generated: an answer is the same bytes every time. What is real is HTTP/1.1 with keep-alive, a stream whose
tokens leave in pieces of their own, and the end of a sequence when its client goes away. Besides the API's POSTs and
`/v1/models` it answers `/health` as Dynamo 1.6.1 does, and what the routers of vLLM and SGLang ask a worker for.

`PUT /fake/settings` with some of the fields of `Settings` changes it while it runs. `GET /fake/counts` returns
`{"requests", "running", "peak"}`; `GET /fake/records` one record for each request since the last such call, running
ones included, while `record` is on (`Record`). Times are `time.monotonic()`, which all processes of a machine share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, NamedTuple, cast, get_args

import httpx

__all__ = ["FAULTS", "Control", "Fault", "Record", "Settings", "overlap"]

Fault = Literal["none", "error", "reset", "hang", "cut"]
#: What may go wrong: an answer of 500, a reset instead of an answer, none at all, a reset in the middle of the answer.
FAULTS: tuple[Fault, ...] = get_args(Fault)

#: The instance id of the first worker; the others count on from it.
FIRST_WORKER = 7_000_000_000_000_001


@dataclass(frozen=True)
class Settings:
    """How it behaves.

    Attributes:
        delay: seconds from a request to its first byte.
        tokens: tokens of a streamed answer.
        pace: seconds between two tokens; 0 sends each in the next turn of the loop.
        fault: what goes wrong, for requests to `faulty` (worker numbers from 0) or, where that is None, for all.
        fault_delay: seconds until an error or a reset; for `slow` answers set `delay`.
        record: whether requests are recorded.
    """

    delay: float = 0.0
    tokens: int = 200
    pace: float = 0.0
    fault: Fault = "none"
    faulty: tuple[int, ...] | None = None
    fault_delay: float = 0.0
    record: bool = False

    def changed(self, fields_: dict[str, Any]) -> Settings:
        """Return these with some fields changed; raise ValueError for an unknown field or fault."""
        known = {field.name for field in fields(self)}
        if not known.issuperset(fields_):
            raise ValueError(f"no such setting: {', '.join(sorted(set(fields_) - known))}")
        if fields_.get("fault", "none") not in FAULTS:
            raise ValueError(f"fault {fields_['fault']!r} is none of {', '.join(FAULTS)}")
        faulty = fields_.get("faulty", self.faulty)
        return replace(self, **{**fields_, "faulty": None if faulty is None else tuple(faulty)})


class Record(NamedTuple):
    """One request: when it was here whole, when its answer ended (inf while it runs), and what it came with."""

    start: float
    end: float
    request_id: str
    #: `x-dynamo-gateway-lease`: POOL ACCOUNT TOKEN.
    lease: str
    #: The worker it was for, or -1.
    worker: int


class Control:
    """A client of a fake frontend's own endpoints, for the test that runs it."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, trust_env=False, timeout=30.0)

    def set(self, **settings: Any) -> None:
        """Change some of its `Settings`."""
        answer = self._client.put("/fake/settings", json=settings)
        if answer.status_code != 200:
            raise ValueError(answer.text)

    def counts(self) -> dict[str, int]:
        """Return how many requests came, how many run, and the most that ran at once since the last call."""
        counts: dict[str, int] = self._client.get("/fake/counts").json()
        return counts

    def records(self) -> list[Record]:
        """Return the requests since the last call; what still runs is returned again by the next."""
        return [Record(*fields_) for fields_ in self._client.get("/fake/records").json()]

    def close(self) -> None:
        """Disconnect."""
        self._client.close()


def overlap(records: Iterable[Record]) -> list[tuple[float, int]]:
    """Return how many requests ran, as (time, count) at every change; at equal times ends come first."""
    changes = sorted(
        change for record in records for change in ((record.start, 1), (record.end, -1)) if change[0] < float("inf")
    )
    running, steps = 0, []
    for at, change in changes:
        running += change
        steps.append((at, running))
    return steps


def _answer(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def _framed(data: str) -> bytes:
    piece = f"data: {data}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(piece), piece)


class Server:
    """What all connections share: settings, counts, records, and the bytes of the answers."""

    def __init__(self, model: str, workers: int, settings: Settings) -> None:
        self.model = model
        self.workers = {str(FIRST_WORKER + number).encode(): number for number in range(workers)}
        self.settings = settings
        self.requests = self.running = self.peak = 0
        #: Ended requests; those that run are in `current`.
        self.records: list[Record] = []
        self.current: set[_Connection] = set()
        self.get = {path: _answer(json.dumps(body).encode()) for path, body in self._pages().items()}
        head = {"id": "chatcmpl-fake", "created": 1, "model": model}
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        message = {"role": "assistant", "content": "hello there"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self.plain = _answer(
            json.dumps({**head, "object": "chat.completion", "choices": [choice], "usage": usage}).encode()
        )
        self.error = _answer(
            b'{"message":"fake failure","type":"Internal Server Error","code":500}', "500 Internal Server Error"
        )
        self.stream_head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        chunk = {**head, "object": "chat.completion.chunk"}
        last = {"index": 0, "delta": {}, "finish_reason": "stop"}
        # Different words: LiteLLM fails a stream that repeats one.
        self.token_pieces = [
            _framed(json.dumps({**chunk, "choices": [{"index": 0, "delta": {"content": f" {word}"}}]}))
            for word in ("quick", "brown", "fox", "jumps", "over", "lazy", "dog", "sleeps")
        ]
        self.stream_end = (
            _framed(json.dumps({**chunk, "choices": [last], "usage": usage})) + _framed("[DONE]") + b"0\r\n\r\n"
        )

    def _pages(self) -> dict[str, Any]:
        endpoint = {"namespace": "dynamo", "component": "backend", "endpoint": "generate"}
        return {
            "/v1/models": {
                "object": "list",
                "data": [{"id": self.model, "object": "model", "created": 1, "owned_by": "nvidia"}],
            },
            "/health": {
                "status": "healthy",
                "endpoints": ["dyn://dynamo.backend.generate"],
                "instances": [{**endpoint, "instance_id": int(worker), "transport": {}} for worker in self.workers],
            },
            "/live": {"status": "live"},
            # What sglang-router asks a worker for.
            "/get_server_info": {"model_path": self.model, "served_model_name": self.model, "tp_size": 1},
            "/get_model_info": {"model_path": self.model, "is_generation": True},
        }

    def page(self, method: bytes, path: str, body: bytes) -> bytes:
        """Answer whatever is no request for tokens."""
        if path == "/fake/counts":
            counts = {"requests": self.requests, "running": self.running, "peak": self.peak}
            self.peak = self.running
            return _answer(json.dumps(counts).encode())
        if path == "/fake/records":
            ended, self.records = self.records, []
            running = [one.record(float("inf")) for one in self.current]
            return _answer(json.dumps([*ended, *running]).encode())
        if path == "/fake/settings" and method == b"PUT":
            try:
                self.settings = self.settings.changed(json.loads(body))
            except (TypeError, ValueError) as error:
                return _answer(json.dumps({"error": str(error)}).encode(), "400 Bad Request")
            return _answer(json.dumps(asdict(self.settings)).encode())
        return self.get.get(path) or _answer(json.dumps({"error": f"no {path}"}).encode(), "404 Not Found")


class _Connection(asyncio.Protocol):
    """One connection, one request at a time; bytes of the next one wait."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self.loop = loop
        self.buffer = b""
        self.busy = False
        self.paused = False
        self.timer: asyncio.Handle | None = None
        self.left = 0
        self.cut = False
        self.head = b""
        self.start = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by class

    def connection_lost(self, exc: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self.busy:
            self._ended()

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self.left and self.timer is None:
            self._tokens()

    def data_received(self, data: bytes) -> None:
        self.buffer = self.buffer + data if self.buffer else data
        while self.buffer and not self.busy and self._request():
            pass

    def _request(self) -> bool:
        """Take one whole request from the buffer; return whether there was one."""
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = self.buffer[:end]
        length = int(_header(head, b"content-length") or 0)
        stop = end + 4 + length
        if len(self.buffer) < stop:
            return False
        body, self.buffer = self.buffer[end + 4 : stop], self.buffer[stop:]
        method, _, target = head.partition(b"\r\n")[0].rpartition(b" ")[0].partition(b" ")
        if not target or method == b"PRI":  # sglang-router tries gRPC first
            self.transport.abort()
            return False
        if method == b"POST" and target.startswith(b"/v1/"):
            self._generate(head, body)
        elif _header(head, b"transfer-encoding"):
            self.transport.write(_answer(b"{}", "411 Length Required"))
        else:
            self.transport.write(self.server.page(method, target.decode().partition("?")[0], body))
        return True

    def _generate(self, head: bytes, body: bytes) -> None:
        server, settings = self.server, self.server.settings
        streamed = b'"stream":true' in body or b'"stream": true' in body
        server.requests += 1
        if not (settings.record or streamed or settings.delay or settings.fault != "none"):  # the fast way
            self.transport.write(server.plain)
            return
        self.busy = True
        server.running += 1
        server.peak = max(server.peak, server.running)
        if settings.record:
            self.head, self.start = head, time.monotonic()
            server.current.add(self)
        fault = settings.fault
        if fault != "none" and settings.faulty is not None and self._worker(head) not in settings.faulty:
            fault = "none"
        self.cut = fault == "cut"
        if fault == "hang":
            return
        if fault in ("error", "reset"):
            self._later(settings.fault_delay, self._fail if fault == "error" else self.transport.abort)
        else:
            self._later(settings.delay, self._stream if streamed else self._plain)

    def _later(self, seconds: float, call: Any) -> None:
        if seconds > 0:
            self.timer = self.loop.call_later(seconds, call)
        else:
            call()

    def _plain(self) -> None:
        if self.cut:
            self.transport.write(self.server.plain[:-10])
            self.transport.close()
        else:
            self._done(self.server.plain)

    def _fail(self) -> None:
        self._done(self.server.error)

    def _stream(self) -> None:
        self.transport.write(self.server.stream_head)
        self.left = self.server.settings.tokens
        self._tokens()

    def _tokens(self) -> None:
        """Send one token, and come again."""
        self.timer = None
        if self.left == 0:
            self._done(self.server.stream_end)
            return
        self.left -= 1
        pieces = self.server.token_pieces
        self.transport.write(pieces[self.left % len(pieces)])
        if self.cut and self.left <= self.server.settings.tokens // 2:
            self.transport.abort()
        elif not self.paused:
            pace = self.server.settings.pace
            self.timer = self.loop.call_later(pace, self._tokens) if pace else self.loop.call_soon(self._tokens)

    def _done(self, last: bytes) -> None:
        """End the answer: the sequence's end is counted before its last byte can be read."""
        self.timer = None
        self._ended()
        self.transport.write(last)
        while self.buffer and not self.busy and self._request():
            pass

    def _ended(self) -> None:
        self.busy, self.left = False, 0
        self.server.running -= 1
        if self in self.server.current:
            self.server.current.discard(self)
            self.server.records.append(self.record(time.monotonic()))

    def record(self, end: float) -> Record:
        identity = (_header(self.head, b"x-request-id") or b"").decode()
        lease = (_header(self.head, b"x-dynamo-gateway-lease") or b"").decode()
        return Record(self.start, end, identity, lease, self._worker(self.head))

    def _worker(self, head: bytes) -> int:
        return self.server.workers.get(_header(head, b"x-dynamo-worker-instance-id") or b"", -1)


def _header(head: bytes, name: bytes) -> bytes | None:
    """Return a header's value; the name is in lower case."""
    start = head.lower().find(b"\r\n" + name + b":")
    if start < 0:
        return None
    start += len(name) + 3
    end = head.find(b"\r\n", start)
    return head[start : end if end >= 0 else len(head)].strip()


async def serve(server: Server, port: int) -> None:
    """Serve until cancelled."""
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: _Connection(server, loop), "127.0.0.1", port, backlog=4096)
    print(f"listening on 127.0.0.1:{port}", flush=True)
    async with listener:
        await listener.serve_forever()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="fake_frontend", description="A fake Dynamo frontend.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="m")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    settings = Settings(delay=args.delay, tokens=args.tokens, pace=args.pace, record=args.record)
    import uvloop

    uvloop.run(serve(Server(args.model, args.workers, settings), args.port))


if __name__ == "__main__":
    main()
