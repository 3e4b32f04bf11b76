# SPDX-License-Identifier: Apache-2.0
"""An endpoint under test: sends bodies, and reads what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

from ._answer import BUSY, Answer, Problem
from ._apis import PATHS, StreamReader, read_plain

__all__ = ["Endpoint"]

#: The version of `/v1/messages` that is asked for, as by Anthropic's SDKs.
_ANTHROPIC_VERSION = "2023-06-01"
#: The longest pause that a server is granted by its Retry-After: limits per minute are met by waiting, others are not.
_LONGEST_PAUSE_S = 60.0
#: Keys shorter than this ("EMPTY", "none", "x") are no secrets, and are left where an answer has that word.
_SECRET = 8


class Endpoint:
    """A server's API at a URL, with a model and a key.

    `base_url` is given as to the SDKs, with or without `/v1` at its end. The key goes into headers and nowhere else:
    where a server repeats it in an answer's raw text or errors, it is replaced by `***`. `timeout_s` limits each answer
    as a whole. `pauses` are the seconds between attempts where the server has no time (429, 502, 503, 504) or the
    connection fails before an answer begins; a Retry-After header counts instead, and one of more than 60 s ends it.

    Raises ValueError where the URL, the API's name or the key cannot be used; the key does not stand in the message.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api: str = "chat",
        api_key: str | None = None,
        timeout_s: float = 120.0,
        transport: httpx.AsyncBaseTransport | None = None,
        pauses: Sequence[float] = (1.0, 4.0),
    ) -> None:
        if api not in PATHS:
            raise ValueError(f"no API {api!r}: it is one of {', '.join(PATHS)}")
        self.base_url = _checked(base_url)
        self.model = model
        self.api = api
        self._root = self.base_url if self.base_url.endswith("/v1") else f"{self.base_url}/v1"
        self._key = api_key
        self._timeout_s = timeout_s
        self._pauses = tuple(pauses)
        headers = {"content-type": "application/json"}
        if api == "messages":
            headers["anthropic-version"] = _ANTHROPIC_VERSION
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()) or " " in api_key:
                raise ValueError("the API key has characters that no header can carry (blanks, line ends, non-ASCII)")
            headers["authorization"] = f"Bearer {api_key}"
            if api == "messages":
                headers["x-api-key"] = api_key
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=timeout_s,
            transport=transport,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
        )

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def ask(self, body: Mapping[str, Any] | str, stream: bool, *, cancel_after: int | None = None) -> Answer:
        """Send a body, and return what came back; raises nothing.

        A mapping is sent as JSON, a string as it stands. `stream` says whether an answer is read as a stream; one with
        a status of 300 and more is read as a plain one. `cancel_after` leaves a stream after as many events: the
        answer is `broken` then, and holds what came. Where there was no answer at all its status is 0.
        """
        text = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
        content = text.encode("utf-8", "replace")
        for pause in (*self._pauses, None):
            started = time.monotonic()
            got = await self._once(content, stream, cancel_after)
            answer = got.answer(self.api)
            answer.seconds = time.monotonic() - started
            if pause is None or not (got.failed_to_connect or answer.status in BUSY):
                break
            if got.retry_after_s is not None:
                pause = got.retry_after_s
            if pause > _LONGEST_PAUSE_S:
                break
            await asyncio.sleep(pause)
        return self._without_key(answer)

    async def check(self) -> str | None:
        """Return in a line why nothing can be asked here, or None.

        Asks for `/v1/models`. A server without that route (or with an answer of its own making) passes: then the cases
        show what it can do.
        """
        url = f"{self._root}/models"
        try:
            got = await asyncio.wait_for(self._client.get(url), self._timeout_s)
        except (asyncio.TimeoutError, httpx.TimeoutException):
            return f"nobody answers at {url} within {self._timeout_s:g} s"
        except Exception as error:
            return self._masked(f"nobody answers at {url}: {_words(error)}")
        if got.status_code in (401, 403):
            what = "the API key is refused" if self._key else "an API key is wanted"
            return f"{what} at {url}: status {got.status_code}"
        if got.has_redirect_location:
            return self._masked(f"{url} leads elsewhere, to {got.headers['location']}: give that URL")
        served = None
        if got.status_code == 200:
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                listed = got.json()
                served = [] if listed.get("has_more") else [str(one["id"]) for one in listed["data"]]
        if served and self.model not in served:
            more = f", and {len(served) - 10} more" if len(served) > 10 else ""
            return f"the model {self.model!r} is not served at {self.base_url} (served: {', '.join(served[:10])}{more})"
        return None

    async def _once(self, content: bytes, stream: bool, cancel_after: int | None) -> _Got:
        got = _Got(StreamReader(self.api))
        try:
            await asyncio.wait_for(self._receive(got, content, stream, cancel_after), self._timeout_s)
        except (asyncio.TimeoutError, httpx.TimeoutException) as error:
            got.broken = f"more than {self._timeout_s:g} s passed"
            got.failed_to_connect = isinstance(error, (httpx.ConnectTimeout, httpx.PoolTimeout))
        except Exception as error:
            got.broken = f"the connection broke: {_words(error)}" if got.status else f"no answer: {_words(error)}"
            got.failed_to_connect = not got.status and isinstance(error, httpx.TransportError)
        return got

    async def _receive(self, got: _Got, content: bytes, stream: bool, cancel_after: int | None) -> None:
        async with self._client.stream("POST", f"{self._root}{PATHS[self.api]}", content=content) as response:
            got.status = response.status_code
            got.content_type = response.headers.get("content-type", "")
            got.retry_after_s = _seconds(response.headers.get("retry-after"))
            if response.has_redirect_location:
                got.broken = f"it leads elsewhere, to {response.headers['location']}"
            got.streamed = stream and got.status < 300
            async for data in response.aiter_bytes():
                if not got.streamed:
                    got.body += data
                    continue
                got.stream.feed(data)
                if cancel_after is not None and got.stream.events >= cancel_after:
                    got.broken = f"left by the caller after {got.stream.events} events"
                    return

    def _without_key(self, answer: Answer) -> Answer:
        answer.raw = self._masked(answer.raw)
        answer.error = None if answer.error is None else self._masked(answer.error)
        answer.broken = None if answer.broken is None else self._masked(answer.broken)
        answer.problems = [Problem(one.kind, self._masked(one.message)) for one in answer.problems]
        return answer

    def _masked(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key and len(self._key) >= _SECRET else text


@dataclass
class _Got:
    """What came back so far."""

    stream: StreamReader
    status: int = 0
    content_type: str = ""
    retry_after_s: float | None = None
    streamed: bool = False
    body: bytearray = field(default_factory=bytearray)
    broken: str | None = None
    failed_to_connect: bool = False

    def answer(self, api: str) -> Answer:
        if self.streamed:
            return self.stream.close(self.status, self.broken, self.content_type)
        if self.broken is None:
            return read_plain(api, self.status, bytes(self.body), self.content_type)
        return Answer(self.status, broken=self.broken, raw=self.body[:4096].decode("utf-8", "replace"))


def _checked(base_url: str) -> str:
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ValueError(f"{base_url!r} is no URL: {error}") from None
    if url.userinfo:
        raise ValueError("a base URL with a user's name or password would stand in every report: give an API key")
    if url.scheme not in ("http", "https") or not url.host or not 0 < (url.port or 80) < 65536:
        raise ValueError(f"{base_url!r} is no URL of the form http://HOST:PORT or https://HOST")
    if any(char.isspace() for char in base_url):
        raise ValueError(f"{base_url!r} is no URL: it has a blank or a line end")
    if url.query or url.fragment:
        raise ValueError(f"{base_url!r} has a query or a fragment; the paths of the API are added at its end")
    for path in PATHS.values():
        if url.path.rstrip("/").endswith(path):
            raise ValueError(f"{base_url!r} ends in {path}, which is added to a base URL: leave it out")
    return base_url.rstrip("/")


def _seconds(retry_after: str | None) -> float | None:
    """Read a Retry-After header: seconds, or a date (RFC 9110, 10.2.3)."""
    if retry_after is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(retry_after))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    return None


def _words(error: BaseException) -> str:
    """Return an error's text; some of a connection's have none."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
