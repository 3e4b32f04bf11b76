# SPDX-License-Identifier: Apache-2.0
"""Answers of the three APIs, read into one form.

Reading is lenient where a caller could go on, and says as `Problem`s what it met. What is wrong is judged by what
clients do with it: the order of events and the fields that the SDKs of OpenAI and Anthropic rely on
(`openai.lib.streaming`, `anthropic.lib.streaming`), the APIs' references, and for the framing WHATWG's HTML, section
9.2.6 (server-sent events). What vLLM 0.31 and Dynamo 1.6.1 add to that, such as `[DONE]` behind the last event of every
API, is no problem.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ._answer import Answer, Problem
from ._chat import ChatReader
from ._messages import MessagesReader
from ._reader import Reader, clean, kind_of, parse_json
from ._responses import ResponsesReader

__all__ = ["PATHS", "RAW_LIMIT", "StreamReader", "read_plain"]

#: The path of each API below `/v1`.
PATHS: Mapping[str, str] = {"chat": "/chat/completions", "responses": "/responses", "messages": "/messages"}
#: How many bytes of an answer `Answer.raw` keeps.
RAW_LIMIT = 64 * 1024


def read_plain(api: str, status: int, text: str | bytes, content_type: str | None = None) -> Answer:
    """Read a whole body: an answer of `api`, or an error.

    Raises nothing: a body that has no answer in it is an answer that is `broken`, one under a status of 300 and more is
    an `error`. `content_type` is the header's value; without it nothing is said of it.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    reader = _READERS[api]()
    answer = reader.answer
    answer.status, answer.events, answer.raw = status, 0, _raw(data)
    try:
        value = parse_json(data)
    except ValueError as error:
        reader.problem("not_json", f"the body is no JSON: {error}")
        value = None
        if status < 300:
            answer.broken = f"the body is no JSON: {error}"
        else:
            answer.error = clean(data.decode("utf-8", "replace")).strip() or "(an empty body)"
    else:
        if status < 300 and content_type is not None and _media_type(content_type) != "application/json":
            reader.problem("content_type", f"the body is JSON, its Content-Type {content_type!r}")
        reader.whole(value)
    answer.calls, answer.text, answer.reasoning = reader.calls(), reader.text(), reader.reasoning()
    return answer


class StreamReader:
    """Reads a stream of an API, in pieces that may be cut anywhere. Nothing raises."""

    def __init__(self, api: str) -> None:
        self._api = api
        self._reader = _READERS[api]()
        self._lines = _Lines()
        self._raw = bytearray()
        #: All bytes, for as long as no event came: what came may be no stream.
        self._unread: list[bytes] | None = []
        self._name = ""
        self._data: list[bytes] = []
        #: How many events came so far.
        self.events = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self._raw += data[: RAW_LIMIT + 1 - len(self._raw)]
        if self._unread is not None:
            self._unread.append(data)
        for line in self._lines.feed(data):
            self._line(line)

    def close(self, status: int = 200, broken: str | None = None, content_type: str | None = None) -> Answer:
        """Return the answer, as far as it came.

        `broken` says why no more will come, where the stream did not end by itself: then its missing end is no problem.
        """
        if self._unread is not None and broken is None and b"".join(self._unread).strip():
            return self._plain(status, b"".join(self._unread), content_type)
        reader, answer = self._reader, self._reader.answer
        answer.status, answer.events, answer.raw = status, self.events, _raw(bytes(self._raw))
        if content_type is not None and _media_type(content_type) != "text/event-stream":
            reader.problem("content_type", f"a stream of events has the Content-Type {content_type!r}")
        if broken is None:
            reader.finish()
        answer.calls, answer.text, answer.reasoning = reader.calls(), reader.text(), reader.reasoning()
        answer.broken = broken or answer.broken
        return answer

    def _plain(self, status: int, data: bytes, content_type: str | None) -> Answer:
        answer = read_plain(self._api, status, data, content_type)
        if status < 300:
            answer.problems.insert(0, Problem("content_type", "a stream was asked for, and a plain body came"))
        return answer

    def _line(self, line: bytes) -> None:
        name, colon, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if not line:
            if self._data:
                self._dispatch()
            self._name, self._data = "", []
        elif name == b"data":
            self._data.append(value)
        elif name == b"event" and colon:
            self._name = value.decode("utf-8", "replace")

    def _dispatch(self) -> None:
        self.events += 1
        self._unread = None
        data = b"\n".join(self._data)
        try:
            if data.startswith(b"[DONE]"):
                self._reader.done()
                return
            try:
                value = parse_json(data)
            except ValueError as error:
                self._reader.problem("not_json", f"event {self.events} is no JSON: {error}")
                return
            if isinstance(value, dict):
                self._reader.event(self._name, value)
            else:
                self._reader.problem("shape", f"event {self.events} is {kind_of(value)}, not an object")
        except Exception as error:  # a fault of this reader must not end a run of hundreds of cases
            self._reader.problem("shape", f"event {self.events} could not be read: {type(error).__name__}: {error}")


class _Lines:
    """Lines out of bytes, ended by any of CRLF, LF and CR, after a byte order mark."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._after_cr = False
        self._first = True

    def feed(self, data: bytes) -> Iterator[bytes]:
        if not data:
            return
        if self._after_cr:
            data = data.removeprefix(b"\n")
        self._after_cr = data.endswith(b"\r")
        self._rest.append(data)
        if b"\n" not in data and b"\r" not in data:
            return
        *lines, rest = re.split(rb"\r\n|\r|\n", b"".join(self._rest))
        self._rest = [rest]
        for line in lines:
            yield line.removeprefix(b"\xef\xbb\xbf") if self._first else line
            self._first = False


_READERS: Mapping[str, type[Reader]] = {"chat": ChatReader, "responses": ResponsesReader, "messages": MessagesReader}


def _raw(data: bytes) -> str:
    text = data[:RAW_LIMIT].decode("utf-8", "ignore" if len(data) >= RAW_LIMIT else "replace")
    return text + "…" if len(data) > RAW_LIMIT else text


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()
