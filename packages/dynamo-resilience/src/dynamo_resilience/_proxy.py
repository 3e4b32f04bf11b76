# SPDX-License-Identifier: Apache-2.0
"""The way of a request: who calls, which model, where, admission, relay, another try, the end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import io
import logging
import math
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, NoReturn
from urllib.parse import unquote

import msgspec
from aiohttp import HttpVersion11, web
from multidict import CIMultiDict, CIMultiDictProxy

from ._admission import Ask, Permit
from ._breakers import Outcome, Target
from ._errors import LeaseLost, Rejected
from ._runtime import Runtime
from ._sites import Part, Route, Worker, choose, soonest, take
from ._units import Units
from ._upstream import Answer, NotConnected
from ._wire import APIS, OVERLOADED, Api, BadBody, Head, Scanner, usage_of, worker_of

__all__ = ["Finished", "Proxy"]

_log = logging.getLogger(__name__)

#: Answer tokens that a request without a maximum is taken to need.
_ANSWER_TOKENS = 4096
#: What the mean time between tokens may be where no breaker policy says when a token is slow (seconds).
_TOKEN_S = 1.0
#: The wait at a pool that cannot say how long it will be (seconds).
_UNKNOWN_WAIT_S = 1.0
#: How long the client may take to read the end of an answer that was cut short (seconds).
_END_S = 2.0
#: Larger bodies are looked at with pauses.
_PIECES = 2**20
#: Retries that are allowed in each second, whatever the budget.
_RETRIES_A_SECOND = 10

_SESSIONS = ("x-dynamo-session-id", "x-claude-code-session-id", "session_id", "session-id")
_LEASE = "x-dynamo-gateway-lease"
_WORKER = "x-dynamo-worker-instance-id"
_PRIORITY = "x-dynamo-request-priority"
_TIMEOUT = "x-request-timeout-ms"
_REQUEST_ID = "x-request-id"

_SANE = re.compile(r"[\x21-\x7e]{1,128}")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_DIGITS = re.compile(r"[0-9]{1,12}")

_HOP_BY_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
# `accept-encoding`: events are read as they pass, so they must come uncompressed. `expect`: was answered here.
_NOT_SENT = _HOP_BY_HOP | {"host", "content-length", "accept-encoding", "expect", _LEASE, _REQUEST_ID}
_NOT_RETURNED = _HOP_BY_HOP | {"content-length", "date", "server", _REQUEST_ID}
_KEYS = frozenset(("authorization", "x-api-key"))
# What lets Dynamo's frontend take the worker that a header names. Where a gateway has tenants or picks workers itself,
# that is not the client's to say.
_STEERING = frozenset(
    (
        _WORKER,
        "x-worker-instance-id",
        "x-dynamo-prefill-instance-id",
        "x-prefill-instance-id",
        "x-dynamo-dp-rank",
        "x-dp-rank",
        "x-data-parallel-rank",
        "x-dynamo-prefill-dp-rank",
        "x-prefill-dp-rank",
    )
)
# Nor may a tenant pass others by in the frontend's own queues.
_NOT_A_TENANTS = _STEERING | _KEYS | {"x-dynamo-request-strict-priority", "x-dynamo-meta-policy-class"}
#: Faults of this process that look like the frontend's: no more open files, ports or memory.
_OURS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL))


class Finished(NamedTuple):
    """One request, when it is over; times in seconds.

    Attributes:
        site: the last one tried, "" where none was.
        model: the configured model, "" where the request named none.
        tenant: `default` where there are no tenants, "" where the key was not known.
        status: what the client got: the HTTP status, 499 where it went away first.
        broken: whether a stream ended with an error of ours.
        seconds: from the request's head to its end.
        queued_s: in pools' queues.
        first_s: from the request's head to the first piece of the answer's body; None without one.
        attempts: how often a frontend was asked.
    """

    site: str
    model: str
    tenant: str
    status: int
    broken: bool
    seconds: float
    queued_s: float
    first_s: float | None
    attempts: int


class _Refusal(Exception):
    """An answer of the gateway's own."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers
        self.close = close


class _Gone(Exception):
    """The client went away."""


class _Interrupted(Exception):
    """The gateway cut the request short; see `_Flight.reason`."""


class _Failed(Exception):
    """An attempt that may be made again elsewhere.

    Args:
        refusal: what the client gets when there is no other, unless the frontend answered: then it gets that.
        elsewhere: whether only another site can do better.
        hopeless: whether the same frontend would fail the same way.
        answer: what the frontend answered.
    """

    def __init__(
        self,
        refusal: _Refusal | None,
        *,
        elsewhere: bool = False,
        hopeless: bool = False,
        answer: web.Response | None = None,
    ) -> None:
        super().__init__(str(refusal or ""))
        self.refusal = refusal
        self.elsewhere = elsewhere
        self.hopeless = hopeless
        self.answer = answer


class _Budget:
    """Lets retries be a share of what was asked in the last ten seconds, or a few a second: the more of the two.

    The few are what a small fleet needs when one of two workers dies; a large one is not overloaded by them.
    """

    __slots__ = ("_asked", "_retried", "_second")

    def __init__(self, now: float) -> None:
        self._asked = deque([0] * 10, 10)
        self._retried = deque([0] * 10, 10)
        self._second = int(now)

    def asked(self, now: float) -> None:
        """Count a request."""
        if int(now) != self._second:
            self._turn(int(now))
        self._asked[-1] += 1

    def allows(self, now: float, share: float) -> bool:
        """Return whether one more retry may be made, and count it then."""
        if int(now) != self._second:
            self._turn(int(now))
        if self._retried[-1] >= _RETRIES_A_SECOND and sum(self._retried) + 1 > share * sum(self._asked):
            return False
        self._retried[-1] += 1
        return True

    def _turn(self, second: int) -> None:
        for _ in range(min(10, second - self._second)):
            self._asked.append(0)
            self._retried.append(0)
        self._second = second


class _Flight:
    """A request on its way."""

    # Defaults are the class's: most requests never set most of them.
    headers: CIMultiDict[str]
    request_id = ""
    body: bytes = b""  # until nobody can be asked again
    body_bytes = 0
    asks_worker = False  # the client wants the worker named in the answer
    head: Head | None = None
    model = ""
    tenant = ""
    priority = 0
    session: bytes | None = None
    deadline = 0.0
    site = ""
    status = 499
    broken = False
    attempts = 0
    queued_s = 0.0
    first_s: float | None = None
    sent_at = 0.0
    permit: Permit | None = None
    response: web.StreamResponse | None = None
    scanner: Scanner | None = None
    last_words = b""
    ended = False
    # Time limits, by the event loop's clock. One timer a request, set again only when it has run out.
    reason: str | None = None
    timer: asyncio.TimerHandle | None = None
    total_at = math.inf
    limit = ""
    limit_at = math.inf
    between_s = 0.0  # while a stream is relayed: what may lie between `last` and the next piece
    last = 0.0
    writing = False

    def __init__(self, request: web.BaseRequest, runtime: Runtime, api: Api, query: str, now: float) -> None:
        self.request = request
        self.runtime = runtime
        self.api = api
        self.query = query
        self.started = now
        self.loop = asyncio.get_running_loop()
        task: asyncio.Task[object] | None = asyncio.current_task()
        assert task is not None
        self.task = task
        self.probes: list[tuple[Target, int]] = []

    def interrupt(self, reason: str) -> None:
        """Cut it short. Called from the event loop, never by the request's own task."""
        if self.reason is None:
            self.reason = reason
            self.task.cancel()

    def interrupted(self) -> bool:
        """Return whether a cancellation that was just caught is `interrupt`'s and not the client's going away."""
        transport = self.request.transport
        if self.reason is None or transport is None or transport.is_closing():
            return False
        if sys.version_info >= (3, 11):
            self.task.uncancel()
        return True

    def within(self, limit: str, seconds: float) -> None:
        """Give what comes next that long."""
        self.limit = limit
        self.limit_at = self.loop.time() + seconds
        self.arm()

    def arm(self) -> None:
        at = min(self.limit_at, self.total_at)
        timer = self.timer
        if timer is None or at < timer.when():
            if timer is not None:
                timer.cancel()
            self.timer = self.loop.call_at(at, self.tick)

    def tick(self) -> None:
        self.timer = None
        now = self.loop.time()
        if now >= self.total_at:
            self.interrupt("deadline")
            return
        if self.between_s:
            self.limit_at = math.inf if self.writing else self.last + self.between_s
        if now >= self.limit_at:
            self.interrupt(self.limit)
            return
        at = min(self.limit_at, self.total_at, now + self.between_s if self.writing else math.inf)
        if at < math.inf:
            self.timer = self.loop.call_at(at, self.tick)

    def probe(self, target: Target) -> int:
        """Return the number of the probe that this request is for a target, 0 if none; it counts as over."""
        for one in self.probes:
            if one[0] is target:
                self.probes.remove(one)
                return one[1]
        return 0


class Proxy:
    """The public endpoints: `web.Server(proxy.handle, handler_cancellation=True, access_log=None)`.

    Args:
        runtime: returns the runtime that new requests shall use.
        clock: seconds, monotonic; the runtime's.
        observe: called when a request is over; must be quick.

    Attributes:
        open: requests that run now, queued ones included.
        draining: after `drain()`.
        retries: how often a request was tried again.
        outcomes: (site, model, outcome in lower case) -> attempts that ended so.
    """

    def __init__(
        self,
        runtime: Callable[[], Runtime],
        *,
        clock: Callable[[], float],
        observe: Callable[[Finished], None] | None = None,
    ) -> None:
        self.open = 0
        self.draining = False
        self.retries = 0
        self.outcomes: dict[tuple[str, str, str], int] = {}
        self._runtime = runtime
        self._clock = clock
        self._observe = observe
        self._budget = _Budget(clock())
        self._flights: set[_Flight] = set()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        runtime = self._runtime()
        path, query = request.rel_url.raw_path, request.rel_url.raw_query_string
        api = APIS.get(path)
        if api is None or request.method != "POST":
            return self._other(request, runtime, path, api)
        flight = _Flight(request, runtime, api, query, self._clock())
        self.open += 1
        self._flights.add(flight)
        runtime.enter()
        try:
            return await self._answer(flight)
        finally:
            if flight.timer is not None:
                flight.timer.cancel()
            if flight.permit is not None:
                flight.permit.release()
                flight.permit = None  # holds the flight
            self._judge_probes(flight, Outcome.IGNORED)
            runtime.leave()
            self._flights.discard(flight)
            self.open -= 1
            if self._observe is not None:
                self._observe(
                    Finished(
                        flight.site,
                        flight.model,
                        flight.tenant,
                        flight.status,
                        flight.broken,
                        self._clock() - flight.started,
                        flight.queued_s,
                        flight.first_s,
                        flight.attempts,
                    )
                )

    def drain(self) -> None:
        """Refuse new requests with 503 from now on, and ask clients to close their connections."""
        self.draining = True

    def cancel(self) -> None:
        """Cut what still runs: streams end with an error event, the rest gets 503."""
        for flight in list(self._flights):
            flight.interrupt("draining")

    # Answers of the gateway's own

    def _other(self, request: web.BaseRequest, runtime: Runtime, path: str, api: Api | None) -> web.Response:
        """Answer what is not one of the endpoints that are passed on."""
        form = api or APIS["/v1/messages" if path.startswith("/v1/messages/") else "/v1/chat/completions"]
        request_id = _request_id(request.headers)
        allow = "POST" if api is not None else "GET" if path == "/v1/models" or path.startswith("/v1/models/") else ""
        try:
            if not allow:
                raise _Refusal(404, f"There is nothing at {request.method} {path[:200]}", code="not_found")
            if request.method != allow:
                message = f"{path[:200]} takes {allow}, got {request.method}"
                raise _Refusal(405, message, code="method_not_allowed", headers={"Allow": allow})
            self._tenant(request.headers, runtime)
            return self._models(runtime, path, request_id)
        except _Refusal as refusal:
            return self._refuse(form, request_id, refusal)

    def _models(self, runtime: Runtime, path: str, request_id: str) -> web.Response:
        """List the configured models that a frontend lists now, as it does."""
        listed = {}
        for model, routes in runtime.routes.items():
            for part in (part for route in routes for part in route.parts):
                if part.frontend.models is not None and model in part.frontend.models:
                    listed[model] = part.frontend.models[model]
                    break
        if path == "/v1/models":
            body = msgspec.json.encode({"object": "list", "data": list(listed.values())})
        else:
            model = unquote(path.removeprefix("/v1/models/"))
            if model not in listed:
                raise _no_model(model, listed)
            body = msgspec.json.encode(listed[model])
        headers = {"Content-Type": "application/json", _REQUEST_ID: request_id, "Server": "dynamo-gateway"}
        return web.Response(body=body, headers=headers)

    def _refuse(self, api: Api, request_id: str, refusal: _Refusal) -> web.Response:
        body = api.error(refusal.status, str(refusal), param=refusal.param, code=refusal.code)
        headers = {"Content-Type": "application/json", _REQUEST_ID: request_id, "Server": "dynamo-gateway"}
        response = web.Response(status=refusal.status, body=body, headers=headers)
        if refusal.headers:
            response.headers.update(refusal.headers)
        if refusal.close or self.draining:
            response.force_close()
        return response

    # From the head to the answer

    async def _answer(self, flight: _Flight) -> web.StreamResponse:
        """Serve it, and turn every way to fail into what the client shall see."""
        try:
            response = await self._serve(flight)
        except _Refusal as refusal:
            response = self._give_up(flight, refusal)
        except Rejected as rejected:
            response = self._give_up(flight, _rejection(rejected))
        except asyncio.CancelledError:
            if not flight.interrupted():
                raise
            response = self._give_up(flight, _cut(flight))
        except _Interrupted:
            response = self._give_up(flight, _cut(flight))
        except _Gone:
            # The connection is closed; what is returned here goes nowhere.
            return flight.response or web.Response(status=499)
        except Exception:
            _log.exception("%s: a fault of the gateway's own", flight.request_id)
            response = self._give_up(flight, _Refusal(500, "The gateway failed", code="internal_error", close=True))
        if flight.permit is not None:
            flight.permit.release()  # the backend is done with it, however slow the client is
        transport = flight.request.transport
        if flight.reason is not None and transport is not None:
            # It has had its time; the rest of the answer may not wait for the client for ever.
            flight.limit_at = flight.total_at = math.inf
            flight.loop.call_later(_END_S, _abort, flight, transport)
        try:
            # Sent now, so that a request counts as running until the client has its answer. A stream is already.
            if flight.last_words:
                with contextlib.suppress(RuntimeError):  # cut when it was at its end already
                    await response.write(flight.last_words)
            await response.prepare(flight.request)
            await response.write_eof()
            flight.status = response.status
        except ConnectionError:
            pass
        flight.ended = True
        return response

    def _give_up(self, flight: _Flight, refusal: _Refusal) -> web.StreamResponse:
        response = flight.response
        if response is None:
            return self._refuse(flight.api, flight.request_id or _request_id(flight.request.headers), refusal)
        # The client has had bytes: the stream ends with an error event. Its HTTP form stays whole: a connection that is
        # closed without notice would cost the client its next request on it.
        flight.broken = True
        scanner = flight.scanner
        assert scanner is not None
        event = flight.api.error_event(refusal.status, str(refusal), code=refusal.code, number=scanner.events)
        flight.last_words = b"\n\n" + event if scanner.torn else event
        return response

    async def _serve(self, flight: _Flight) -> web.StreamResponse:
        request, runtime = flight.request, flight.runtime
        given = request.headers
        limits, timeouts = runtime.config.limits, runtime.config.timeouts
        flight.request_id = _request_id(given)
        if self.draining:
            raise _Refusal(503, "The gateway is about to stop; try again", code="draining", close=True)
        if self.open > limits.open_requests:
            message = f"The gateway has its {limits.open_requests} open requests; try again"
            raise _Refusal(503, message, code="too_many_open_requests", headers={"Retry-After": "1"})
        total_s = timeouts.request_s
        asked = given.get(_TIMEOUT)
        if asked is not None:
            if _DIGITS.fullmatch(asked) is None or int(asked) == 0:
                raise _Refusal(400, f"{_TIMEOUT}: should be a whole number above 0 (got {asked[:80]!r})", code=_TIMEOUT)
            total_s = min(total_s, int(asked) / 1000)
        flight.deadline = flight.started + total_s
        flight.total_at = flight.loop.time() + total_s
        flight.tenant = self._tenant(given, runtime)
        flight.body = await self._body(flight, limits.body_bytes, timeouts.body_s)
        flight.body_bytes = len(flight.body)
        large = flight.body_bytes >= _PIECES
        if large:  # each look at it takes milliseconds, in which all others wait
            await asyncio.sleep(0)
        try:
            head = flight.api.read(flight.body)
        except BadBody as error:
            raise _Refusal(400, str(error), param=error.param) from None
        if large:
            await asyncio.sleep(0)
        flight.asks_worker = b"worker_id" in flight.body
        routes = runtime.routes.get(head.model)
        if routes is None:
            raise _no_model(head.model, runtime.routes)
        flight.head, flight.model = head, head.model
        for name in _SESSIONS:
            if name in given:
                flight.session = given[name].encode(errors="surrogateescape")
                break
        flight.headers = self._headers(flight, given)
        self._budget.asked(flight.started)
        return await self._try(flight, routes)

    def _tenant(self, given: CIMultiDictProxy[str], runtime: Runtime) -> str:
        """Return who calls; raise where nobody knows the key."""
        if not runtime.tenants_by_key:
            return "default"
        key = given.get("authorization", "")
        key = key[7:].strip() if key[:7].lower() == "bearer " else given.get("x-api-key", "")
        if not key:
            raise _Refusal(
                401, "An API key is needed: `Authorization: Bearer KEY` or `x-api-key`", code="missing_api_key"
            )
        found = runtime.tenants_by_key.get(hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest())
        if found is None:
            raise _Refusal(401, "The API key is not known", code="invalid_api_key")
        return found

    async def _body(self, flight: _Flight, limit: int, seconds: float) -> bytes:
        request = flight.request
        given = request.headers
        length = request.content_length
        if length is not None and length > limit:
            raise _too_large(limit, f"{length} bytes were announced")
        encoding = ", ".join(given.getall("content-encoding", ()))
        if encoding and encoding.lower() != "identity":
            message = f"The body must not be compressed (got content-encoding {encoding[:80]!r})"
            raise _Refusal(415, message, code="unsupported_encoding", close=True)
        if "expect" in given:
            # aiohttp leaves this to its router, which is not used here.
            if given["expect"].lower() != "100-continue":
                raise _Refusal(417, f"Expectation {given['expect'][:80]!r} is not known", close=True)
            if request.version >= HttpVersion11:
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                request.writer.output_size = 0
        content = request.content
        if content.is_eof():
            # All of a small body came with its head: no need to wait, so no timer.
            body = content.read_nowait()
        else:
            flight.within("body", seconds)
            whole = io.BytesIO()  # which hands over what it has without a copy
            try:
                while piece := await content.readany():
                    whole.write(piece)
                    if whole.tell() > limit:
                        raise _too_large(limit, "more came")
            except web.RequestPayloadError as error:
                raise _Refusal(400, f"The body cannot be read: {error}"[:200], close=True) from None
            except ConnectionError:
                raise _Gone from None
            body = whole.getvalue()
            flight.limit_at = math.inf
        if len(body) > limit:
            raise _too_large(limit, f"{len(body)} bytes came")
        return body

    def _headers(self, flight: _Flight, given: CIMultiDictProxy[str]) -> CIMultiDict[str]:
        """Return the headers that every frontend gets."""
        tenants = flight.runtime.config.tenants
        headers: CIMultiDict[str] = CIMultiDict()
        for name, value in given.items():
            low = name.lower()
            if low not in _NOT_SENT and not (tenants and low in _NOT_A_TENANTS):
                if not value.isascii() and _SURROGATE.search(value):
                    # It would not arrive as it is: heads are written in UTF-8.
                    raise _Refusal(400, f"The header {name[:80]!r} is not UTF-8", code="bad_header")
                headers.add(name, value)
        for named in given.getall("connection", ()):
            if named.lower() not in ("keep-alive", "close"):
                for one in named.split(","):
                    headers.popall(one.strip(), None)
        headers[_REQUEST_ID] = flight.request_id
        asked = given.get(_PRIORITY)
        if asked is not None:
            highest = tenants[flight.tenant].priority if tenants else 9
            flight.priority = min(int(asked), highest) if _DIGITS.fullmatch(asked) else 0
            if tenants:
                headers[_PRIORITY] = str(flight.priority)
        return headers

    async def _try(self, flight: _Flight, routes: tuple[Route, ...]) -> web.StreamResponse:
        """Try frontends until one answers, nobody is left, or the client has had a byte."""
        runtime = flight.runtime
        retries = runtime.config.retries
        ask: Ask | None = None
        spent: dict[str, bool] = {}  # sites that were tried in full -> whether they may be tried again
        tried: list[Part] = []
        tried_workers: list[Worker] = []
        paid: Route | None = None
        rejected: Rejected | None = None
        failed: _Failed | None = None
        while True:
            left = [one for one in routes if one.fleet.name not in spent] if spent else routes
            if not left and rejected is None:
                left = [one for one in routes if spent[one.fleet.name]]
            if not left:
                if failed is not None:
                    return self._last(flight, failed)
                assert rejected is not None
                raise rejected
            if paid is None or paid not in left:
                if flight.permit is not None:
                    flight.permit.release()
                    flight.permit = paid = None
                if ask is not None and failed is not None and rejected is None:
                    # Its time in the queue may have passed at the site that failed. Another one gives it as much again.
                    ask.deadline = self._queue_until(flight)
                if ask is None and any(one.pool is not None for one in left):
                    ask = self._ask(flight)
                route = await self._site(flight, left, ask)
                if route.pool is not None:
                    assert ask is not None
                    try:
                        flight.permit = await self._admit(flight, route, ask)
                    except Rejected as error:
                        self._judge_probes(flight, Outcome.IGNORED)
                        if len(routes) == 1 and failed is None:
                            raise
                        rejected = rejected or error
                        spent[route.fleet.name] = False
                        continue
                paid = route
            route = paid
            flight.site = route.fleet.name
            worker: Worker | None = None
            try:
                part, probe = await take(route.at_hand(tried), runtime.breakers, flight.session)
                if probe:
                    flight.probes.append((part.target, probe))
                if route.fleet.settings.route == "worker" and (workers := route.workers(part, tried_workers)):
                    worker, probe = await take(workers, runtime.breakers, flight.session)
                    if probe:
                        flight.probes.append((worker.target, probe))
                if flight.permit is not None:
                    flight.permit.check()
                return await self._attempt(flight, route, part, worker)
            except _Failed as error:
                failed = error
                failed.__traceback__ = None  # which holds this frame
            except (LeaseLost, _Interrupted, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and not flight.interrupted():
                    raise
                if not isinstance(error, LeaseLost):
                    if flight.reason != "reclaimed" or flight.response is not None:
                        raise _Interrupted from None
                    flight.reason = None
                # The capacity is gone before the client had a byte: asked for again, with the place in the queue that
                # its age gives it, and as much time there as a new one.
                assert flight.permit is not None
                assert ask is not None
                ask.deadline = self._queue_until(flight)
                flight.permit.release()
                flight.permit = paid = None
                self._judge_probes(flight, Outcome.IGNORED)
                continue
            self._judge_probes(flight, Outcome.IGNORED)
            if part not in tried:
                tried.append(part)
            if worker is not None:
                tried_workers.append(worker)
            if failed.elsewhere or (
                all(one in tried for one in route.parts)
                and (worker is None or all(one in tried_workers for one in route.workers(part, ())))
            ):
                # A frontend that failed because of a worker may know another one by now.
                spent[route.fleet.name] = not (failed.elsewhere or failed.hopeless)
            again = any(one.fleet.name not in spent or spent[one.fleet.name] for one in routes)
            if (
                not again
                or flight.attempts >= retries.attempts
                or not self._budget.allows(self._clock(), retries.budget)
            ):
                return self._last(flight, failed)
            self.retries += 1

    def _last(self, flight: _Flight, failed: _Failed) -> web.Response:
        """Return what the last attempt came to."""
        if failed.answer is not None:
            return failed.answer
        assert failed.refusal is not None
        raise failed.refusal

    def _ask(self, flight: _Flight) -> Ask:
        head = flight.head
        assert head is not None
        estimate = flight.runtime.estimates[flight.model]
        prompt = math.ceil(flight.body_bytes * estimate.tokens_per_byte)
        answer = _ANSWER_TOKENS if head.answer_tokens is None else head.answer_tokens
        need = Units(head.sequences, math.ceil(prompt * estimate.uncached), prompt + head.sequences * answer)
        return Ask(flight.tenant, need, flight.started, self._queue_until(flight), flight.priority)

    def _queue_until(self, flight: _Flight) -> float:
        return min(self._clock() + flight.runtime.config.timeouts.queue_s, flight.deadline)

    async def _site(self, flight: _Flight, routes: tuple[Route, ...] | list[Route], ask: Ask | None) -> Route:
        """Choose a site: one that has the model, whose breaker lets it, with room; preferred ones first."""
        ranks = [one.rank for one in routes]
        best = min(ranks)
        if best == 2:
            message = f"No frontend has a worker for the model {flight.model!r} at present; try again"
            raise _Refusal(503, message, code="no_worker", headers={"Retry-After": "2"})
        breakers = flight.runtime.breakers
        able = [one for one, rank in zip(routes, ranks, strict=True) if rank == best]
        options = able
        while options:
            equals = _preferred(options, ask)
            found = await choose(equals, breakers, flight.session)
            if found is not None:
                route, probe = found
                if probe:
                    flight.probes.append((route.target, probe))
                return route
            options = [one for one in options if one not in equals]
        return soonest(able, breakers)

    async def _admit(self, flight: _Flight, route: Route, ask: Ask) -> Permit:
        assert route.pool is not None
        before = self._clock()
        try:
            permit = await route.pool.admit(ask)
        finally:
            flight.queued_s += self._clock() - before
        permit.on_reclaim(lambda: flight.interrupt("reclaimed"))
        return permit

    # One frontend

    async def _attempt(self, flight: _Flight, route: Route, part: Part, worker: Worker | None) -> web.StreamResponse:
        """Ask a frontend, and relay its answer; raise _Failed where another may be asked."""
        runtime, frontend, headers = flight.runtime, part.frontend, flight.headers
        key, permit, steers = route.fleet.key, flight.permit, route.fleet.settings.route == "worker"
        if key is not None or permit is not None or steers:
            headers = headers.copy()  # the next attempt may be at another site
        if key is not None:
            headers.popall("x-api-key", None)
            headers["Authorization"] = f"Bearer {key}"
        if permit is not None:
            headers[_LEASE] = f"{permit.pool} {permit.account} {permit.token}"
        if steers:
            for name in _STEERING:
                headers.popall(name, None)
        if worker is not None:
            headers[_WORKER] = worker.header
            worker.outstanding += 1
        target = f"{flight.api.path}?{flight.query}" if flight.query else flight.api.path
        flight.attempts += 1
        frontend.outstanding += 1
        flight.sent_at = self._clock()
        flight.between_s = 0.0
        flight.within("first token", self._first_s(flight))
        answer: Answer | None = None
        try:
            answer = await frontend.connections.post(target, headers, flight.body, runtime.config.timeouts.connect_s)
            if answer.status == 200 and answer.headers.get("Content-Type", "").startswith("text/event-stream"):
                return await self._stream(flight, route, part, worker, answer)
            data = await answer.read()
        except ConnectionError as error:
            self._broken(flight, route, part, worker, error)
        except asyncio.CancelledError:
            if not flight.interrupted():
                self._record(flight, route, part, worker, Outcome.IGNORED)
                raise
            self._overdue(flight, route, part, worker)
        finally:
            flight.limit_at = math.inf
            flight.between_s = 0.0
            frontend.outstanding -= 1
            if worker is not None:
                worker.outstanding -= 1
            if answer is not None:
                answer.close()  # does nothing where all of it was read
        return await self._plain(flight, route, part, worker, answer, data)

    def _first_s(self, flight: _Flight) -> float:
        """Return how long the first byte of the answer may take.

        A plain answer comes whole, so its tokens count as well: as slow ones, each of them.
        """
        head, config = flight.head, flight.runtime.config
        assert head is not None
        if head.stream:
            return config.timeouts.first_token_s
        tokens = _ANSWER_TOKENS if head.answer_tokens is None else head.answer_tokens
        return config.timeouts.first_token_s + tokens * (config.breaker.slow_token_s if config.breaker else _TOKEN_S)

    def _broken(self, flight: _Flight, route: Route, part: Part, worker: Worker | None, error: Exception) -> NoReturn:
        """Deal with a connection that could not be made, or did not last."""
        site = route.fleet.name
        connecting = isinstance(error, NotConnected)
        _log.debug("%s: %s: %s: %s", flight.request_id, part.frontend.url, type(error).__name__, error)
        if isinstance(error, OSError) and error.errno in _OURS:
            self._record(flight, route, part, worker, Outcome.IGNORED)
            message = "The gateway has no open file or port left; try again"
            raise _Refusal(503, message, code="gateway_exhausted", headers={"Retry-After": "1"})
        if connecting:
            part.frontend.answered = False  # until discovery gets an answer
            part.frontend.error = f"{type(error).__name__}: {error}".rstrip(": ")
            worker = None  # it was never asked
        self._record(flight, route, part, worker, Outcome.ERROR)
        if flight.response is not None:
            raise _Refusal(502, f"The stream broke off at site {site}", code="stream_broken")
        what = "could not be connected to" if connecting else "broke off before its answer was complete"
        refusal = _Refusal(502, f"The frontend at site {site} {what}", code="bad_gateway")
        raise _Failed(refusal, hopeless=connecting)

    def _overdue(self, flight: _Flight, route: Route, part: Part, worker: Worker | None) -> NoReturn:
        """Deal with an attempt that was cut short."""
        reason, site = flight.reason, route.fleet.name
        if reason not in ("first token", "stall"):
            # A stream whose time is over says nothing about the site, nor does a client that will not wait. A wait for
            # the first byte that was long enough does, if only the whole request's limit ended it.
            enough = min(self._first_s(flight), flight.runtime.config.timeouts.request_s / 2)
            waited = 0.0 if flight.response is not None else self._clock() - flight.sent_at
            late = reason == "deadline" and waited >= enough
            self._record(flight, route, part, worker, Outcome.TIMEOUT if late else Outcome.IGNORED)
            raise _Interrupted
        flight.reason = None
        self._record(flight, route, part, worker, Outcome.TIMEOUT)
        if flight.response is not None:
            raise _Refusal(504, f"The stream stalled for {flight.between_s:g} s at site {site}", code="stream_stalled")
        message = f"Site {site} gave no answer within {self._clock() - flight.sent_at:.1f} s"
        raise _Failed(_Refusal(504, message, code="first_token_timeout"))

    async def _plain(
        self, flight: _Flight, route: Route, part: Part, worker: Worker | None, answer: Answer, data: bytes
    ) -> web.Response:
        """Judge an answer that came whole, and send it on."""
        status, runtime = answer.status, flight.runtime
        response = web.Response(status=status, reason=answer.reason, body=data, headers=self._returned(flight, answer))
        if self.draining:
            response.force_close()
        if status < 400:
            if worker is None and flight.asks_worker:
                worker = self._named(route, worker_of(data))
            outcome, policy, usage = Outcome.OK, runtime.config.breaker, None
            seconds = self._clock() - flight.sent_at
            slow = policy is not None and seconds > policy.slow_first_token_s
            if slow or route.pool is not None:
                usage = usage_of(data)
            if slow and policy is not None:
                # However its time was spent, it was too much for that many tokens.
                tokens = usage.answer if usage is not None else 0
                if seconds > policy.slow_first_token_s + tokens * policy.slow_token_s:
                    outcome = Outcome.SLOW_TOKENS
            self._record(flight, route, part, worker, outcome)
            if usage is not None:
                runtime.estimates[flight.model].learn(flight.body_bytes, usage)
        elif status in (429, 529) or (status == 503 and OVERLOADED in data):
            self._record(flight, route, part, worker, Outcome.IGNORED)
            raise _Failed(None, elsewhere=True, answer=response)
        elif status >= 500:
            self._record(flight, route, part, worker, Outcome.IGNORED if status == 501 else Outcome.ERROR)
            if status != 501:
                raise _Failed(None, answer=response)
        else:
            self._record(flight, route, part, worker, Outcome.IGNORED)
            if worker is not None and status == 400 and b'"Invalid request"' in data and len(data) < 256:
                # Dynamo says this of a worker that is not there any more; the client did not name it, we did.
                part.frontend.workers -= {worker.id}
                raise _Failed(None, answer=response)
        flight.first_s = self._clock() - flight.started
        return response

    async def _stream(
        self, flight: _Flight, route: Route, part: Part, worker: Worker | None, answer: Answer
    ) -> web.StreamResponse:
        """Relay events as they come, one piece at a time."""
        some, loop, permit, runtime = answer.some, flight.loop, flight.permit, flight.runtime
        scanner = flight.scanner = Scanner(flight.api)
        feed = scanner.feed
        ready = b""
        while not ready and (piece := await some()):
            ready = feed(piece)
        if not ready or scanner.failed >= 500:
            # Nothing has been sent on: as good as an answer with that status.
            overloaded = scanner.failed == 529
            self._record(flight, route, part, worker, Outcome.IGNORED if overloaded else Outcome.ERROR)
            message = f"The stream of site {route.fleet.name} ended before it began"
            refusal = _Refusal(scanner.failed or 502, message, code="bad_gateway")
            raise _Failed(refusal, elsewhere=overloaded)
        response = web.StreamResponse(status=200, reason=answer.reason, headers=self._returned(flight, answer))
        if self.draining:
            response.force_close()
        if worker is None and flight.asks_worker:
            worker = self._named(route, scanner.worker())
        now = self._clock()
        flight.first_s = now - flight.started
        began_s = now - flight.sent_at  # until the first token, once it is there
        first_at = last = loop.time()
        blocked, began = 0.0, False
        timeouts, policy = runtime.config.timeouts, runtime.config.breaker
        probes = flight.probes
        judged_at = last + policy.probe_s / 3 if policy is not None else math.inf

        def outcome() -> Outcome:
            """Judge it by what has come so far."""
            if policy is not None:
                if began_s > policy.slow_first_token_s:
                    return Outcome.SLOW_FIRST
                if last - first_at - blocked > policy.slow_token_s * max(1, scanner.events - 1):
                    return Outcome.SLOW_TOKENS
            return Outcome.OK

        flight.limit = "stall"
        flight.response = response
        flight.body = b""
        if permit is not None:
            permit.sent_byte()
        try:
            await response.prepare(flight.request)
            write = response.write
            while True:
                if not began:
                    flight.last = loop.time()
                    flight.between_s = timeouts.first_token_s
                    if scanner.first:
                        began = True
                        began_s += last - first_at
                        first_at = last
                        flight.between_s = timeouts.between_tokens_s
                        if permit is not None:
                            permit.prefill_done()
                    flight.limit_at = flight.last + flight.between_s
                    flight.arm()
                if ready:
                    flight.writing = True
                    await write(ready)
                    flight.writing = False
                    flight.last = loop.time()
                    blocked += flight.last - last
                if probes and began and last >= judged_at:
                    # Its end may come too late for the breaker, which waits for it.
                    self._judge_probes(flight, outcome())
                try:
                    piece = await some()
                except ConnectionError as error:
                    self._broken(flight, route, part, worker, error)
                if not piece:
                    break
                last = loop.time()
                ready = feed(piece)
            if not scanner.ended:
                self._broken(flight, route, part, worker, EOFError("the stream has no end mark"))
            if permit is not None:
                permit.release()
            if scanner.rest:
                await write(scanner.rest)
            await response.write_eof()
        except ConnectionError:
            self._record(flight, route, part, worker, Outcome.IGNORED)
            raise _Gone from None
        finally:
            flight.writing = False
        if scanner.failed:
            flight.broken = True
            fault = scanner.failed >= 500 and scanner.failed != 529
            self._record(flight, route, part, worker, Outcome.ERROR if fault else Outcome.IGNORED)
        else:
            self._record(flight, route, part, worker, outcome())
        if route.pool is not None and (usage := scanner.usage()) is not None:
            runtime.estimates[flight.model].learn(flight.body_bytes, usage)
        return response

    def _named(self, route: Route, number: int | None) -> Worker | None:
        """Return the worker that an answer names, if discovery knows it."""
        return None if number is None else route.fleet.workers.get(number)

    def _returned(self, flight: _Flight, answer: Answer) -> CIMultiDict[str]:
        """Return the headers that the client gets."""
        headers: CIMultiDict[str] = CIMultiDict()
        for name, value in answer.headers.items():
            if name.lower() not in _NOT_RETURNED:
                headers.add(name, value)
        for named in answer.headers.getall("connection", ()):
            for one in named.split(","):
                headers.popall(one.strip(), None)
        headers[_REQUEST_ID] = flight.request_id
        headers["Server"] = "dynamo-gateway"
        return headers

    def _record(self, flight: _Flight, route: Route, part: Part, worker: Worker | None, outcome: Outcome) -> None:
        """Tell all that an attempt's end speaks for or against."""
        breakers = flight.runtime.breakers
        if outcome in (Outcome.ERROR, Outcome.TIMEOUT):
            part.frontend.failed()
            if worker is not None:
                worker.failed()
        elif outcome != Outcome.IGNORED:
            part.frontend.streak = 0
            if worker is not None:
                worker.streak = 0
        if breakers is not None:
            sent_at, probes = flight.sent_at, flight.probes
            for target in (route.target, part.target) if worker is None else (route.target, part.target, worker.target):
                breakers.record(target, outcome, sent_at, flight.probe(target) if probes else 0)
        key = (route.fleet.name, route.model, _NAMES[outcome])
        self.outcomes[key] = self.outcomes.get(key, 0) + 1

    def _judge_probes(self, flight: _Flight, outcome: Outcome) -> None:
        """Tell how the probes that this request is went; IGNORED gives them back without a verdict."""
        breakers = flight.runtime.breakers
        if flight.probes and breakers is not None:
            for target, number in flight.probes:
                breakers.record(target, outcome, flight.sent_at, number)
            flight.probes.clear()


_NAMES = tuple(one.name.lower() for one in Outcome)


def _abort(flight: _Flight, transport: asyncio.Transport) -> None:
    """Cut off a client that does not take the end of its answer."""
    if not flight.ended:
        transport.abort()


def _request_id(given: CIMultiDictProxy[str]) -> str:
    """Return the client's own id if it is sane, else a new one."""
    own = given.get(_REQUEST_ID)
    return own if own is not None and _SANE.fullmatch(own) else os.urandom(16).hex()


def _no_model(model: str, there: Iterable[str]) -> _Refusal:
    names = ", ".join(sorted(there)) or "none at present"
    return _Refusal(
        404, f"There is no model {model[:200]!r} (there is: {names})", param="model", code="model_not_found"
    )


def _too_large(limit: int, what: str) -> _Refusal:
    return _Refusal(413, f"The body may have {limit} bytes, {what}", code="body_too_large", close=True)


def _preferred(routes: list[Route], ask: Ask | None) -> list[Route]:
    """Return those to choose from first: with room, and equally preferred; else the one with the shortest wait."""
    if len(routes) == 1:
        return routes
    roomy = [one for one in routes if one.pool is None or (ask is not None and one.pool.ready(ask))]
    if not roomy:
        assert ask is not None  # each has a pool
        return [min(routes, key=lambda one: _wait(one, ask))]
    first = roomy[0].fleet.settings.prefer  # they come in this order
    return [one for one in roomy if one.fleet.settings.prefer == first]


def _wait(route: Route, ask: Ask) -> tuple[float, int]:
    """Return what a site without room is compared by: how long it will take, and what runs there."""
    wait = None if route.pool is None else route.pool.wait_estimate(ask)
    # Nothing is known of a pool that little has come from: long requests, or it only has to lease its first block.
    return _UNKNOWN_WAIT_S if wait is None else wait, route.load


def _rejection(rejected: Rejected) -> _Refusal:
    headers = {}
    if rejected.retry_after_s is not None:
        milliseconds = math.ceil(rejected.retry_after_s * 1000)
        headers = {"Retry-After": str(math.ceil(milliseconds / 1000)), "retry-after-ms": str(milliseconds)}
    status = 503 if rejected.reason == "draining" else 429
    return _Refusal(status, str(rejected), code=rejected.reason, headers=headers)


def _cut(flight: _Flight) -> _Refusal:
    """Return why a request was cut short."""
    seconds = flight.loop.time() - flight.total_at + flight.deadline - flight.started
    if flight.reason == "body":
        message = f"The body was not here within {flight.runtime.config.timeouts.body_s:g} s"
        return _Refusal(408, message, code="body_timeout", close=True)
    if flight.reason == "reclaimed":
        message = "The capacity was taken back for a reserved tenant; try again"
        return _Refusal(503, message, code="reclaimed", headers={"Retry-After": "1"})
    if flight.reason == "draining":
        return _Refusal(503, "The gateway stops; try again", code="draining", close=True)
    return _Refusal(504, f"Not complete within {seconds:.1f} s", code="deadline")
