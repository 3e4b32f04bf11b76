# SPDX-License-Identifier: Apache-2.0
"""What the gateway reads and writes of the API forms it passes through: the head of a body, errors, event streams.

Forms: OpenAI chat completions, completions, responses and embeddings; Anthropic messages. Error events are those that
Dynamo 1.6 sends: `data: {"error": ...}` (completions), `event: error` (messages), `event: response.failed` (responses).
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any, NamedTuple

import msgspec

__all__ = ["APIS", "OVERLOADED", "Api", "BadBody", "Head", "Scanner", "Usage", "usage_of", "worker_of"]


#: Larger JSON is only skimmed: what becomes objects holds the event loop up.
_SMALL = 2**16
#: More of anything is taken for this many: every pool is smaller.
_MOST = 2**40


class BadBody(ValueError):
    """A body that cannot be served; `param` is the field at fault, None where it is the whole."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Head(NamedTuple):
    """What the gateway needs of a body.

    Attributes:
        model: which model.
        stream: whether the answer is to come as events.
        sequences: answers asked for, over all prompts.
        answer_tokens: the most tokens each may have; None where the body does not say.
    """

    model: str
    stream: bool
    sequences: int
    answer_tokens: int | None


class _Chat(msgspec.Struct):
    model: str
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None


class _Completion(msgspec.Struct):
    model: str
    stream: bool | None = None
    max_tokens: int | None = None
    n: int | None = None
    prompt: msgspec.Raw = msgspec.Raw(b'""')


class _Responses(msgspec.Struct):
    model: str
    stream: bool | None = None
    max_output_tokens: int | None = None


class _Messages(msgspec.Struct):
    model: str
    stream: bool | None = None
    max_tokens: int | None = None


class _Embeddings(msgspec.Struct):
    model: str
    input: msgspec.Raw = msgspec.Raw(b'""')


_PARTS = msgspec.json.Decoder(list[msgspec.Raw])
_LIST = re.compile(rb'\[\s*(["\[])')
_AT = re.compile(r" - at `\$\.?([^`]*)`$")
_FIELD = re.compile(r"field `([^`]*)`")


def _prompts(raw: msgspec.Raw) -> int:
    """Count the prompts of a body: a list of strings or of token lists holds several; a list of numbers is one."""
    found = _LIST.match(memoryview(raw))
    if found is None:
        return 1
    if len(memoryview(raw)) <= _SMALL:
        return len(_PARTS.decode(raw))
    # An object for each would hold the event loop up. A backslash at the end of a text miscounts it, which is fine.
    text = bytes(raw)
    if found[1] == b"[":
        return max(1, text.count(b"[") - 1)
    return max(1, (text.count(b'"') - text.count(b'\\"')) // 2)


class Api:
    """One API form.

    Args:
        path: its endpoint.
        body: the struct of the fields that are read.
        delta: the bytes that show the first token in a stream.
        anthropic: whether errors have Anthropic's form.
    """

    __slots__ = ("_decoder", "anthropic", "delta", "path")

    def __init__(self, path: str, body: type[msgspec.Struct], delta: bytes, anthropic: bool = False) -> None:
        self.path = path
        self.delta = delta
        self.anthropic = anthropic
        self._decoder = msgspec.json.Decoder(body)

    def read(self, body: bytes | bytearray) -> Head:
        """Return the head of a body; raise BadBody, which names the field and its value."""
        try:
            fields: Any = self._decoder.decode(body)
            kind = type(fields)
            sequences, tokens = 1, None
            if kind is _Chat:
                sequences = fields.n or 1
                both = [one for one in (fields.max_tokens, fields.max_completion_tokens) if one is not None]
                tokens = max(both, default=None)  # which of the two counts is the backend's affair
            elif kind is _Completion:
                sequences = (fields.n or 1) * _prompts(fields.prompt)
                tokens = fields.max_tokens
            elif kind is _Responses:
                tokens = fields.max_output_tokens
            elif kind is _Messages:
                tokens = fields.max_tokens
            else:
                return Head(fields.model, False, min(_prompts(fields.input), _MOST), 0)
        except msgspec.ValidationError as error:
            raise _named(error, body) from None
        except msgspec.DecodeError as error:
            raise BadBody(f"The body is not JSON: {error}") from None
        except UnicodeDecodeError as error:
            raise BadBody(f"The body is not UTF-8: {error.reason} at byte {error.start}") from None
        except RecursionError:
            raise BadBody("The body is nested too deeply") from None
        if tokens is not None:
            tokens = min(max(0, tokens), _MOST)
        return Head(fields.model, bool(fields.stream), min(max(1, sequences), _MOST), tokens)

    def error(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> bytes:
        """Return the body of an error answer."""
        kind = _kind(status, self.anthropic)
        if self.anthropic:
            return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})
        return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})

    def error_event(self, status: int, message: str, *, code: str | None = None, number: int = 0) -> bytes:
        """Return the same as the last event of a stream; `number` is how many events came before it."""
        if self.path == "/v1/responses":
            event = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": number}
            return b"event: error\ndata: %b\n\n" % msgspec.json.encode(event)
        name = b"event: error\n" if self.anthropic else b""
        return b"%bdata: %b\n\n" % (name, self.error(status, message, code=code))


def _named(error: msgspec.ValidationError, body: bytes | bytearray) -> BadBody:
    """Turn the reader's fault into one that names the field and shows its value."""
    text = str(error)
    at = _AT.search(text)
    field = at or _FIELD.search(text)
    param = field.group(1) if field else None
    message = text[: at.start()] if at else text
    message = message.replace("Object missing", "the body misses the").replace("`", "")
    if at and param:
        try:
            # Only of a small one: all of it becomes objects.
            value = repr(msgspec.json.decode(body)[param]) if len(body) <= _SMALL else ""
        except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError, RecursionError):
            value = ""
        message = f"{param}: {message[:1].lower()}{message[1:]}" + (f" ({value[:80]})" if value else "")
    return BadBody(message, param or None)


_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


def _kind(status: int, anthropic: bool) -> str:
    found = _KINDS.get(status)
    if found is None:
        found = ("overloaded_error" if status in (503, 529) else "api_error") if anthropic else "server_error"
    return found


_DATA = b"data:"
APIS = {
    api.path: api
    for api in (
        Api("/v1/chat/completions", _Chat, _DATA),
        Api("/v1/completions", _Completion, _DATA),
        Api("/v1/responses", _Responses, b".delta"),
        Api("/v1/messages", _Messages, b"content_block_delta", anthropic=True),
        Api("/v1/embeddings", _Embeddings, _DATA),
    )
}

#: Dynamo's rejection, where `DYN_HTTP_OVERLOAD_STATUS_CODES` gives it another status than 529.
OVERLOADED = b"temporarily overloaded"

# Quotes and line breaks inside JSON strings are escaped: none of these can be text that a model wrote.
_MARK = rb"(?:event: ?(?:error|response\.(?:failed|completed|incomplete)|message_stop)" + (
    rb'|data: ?(?:\{"error": ?[{"]|\[DONE\]))'
)
_FIRST_MARK = re.compile(_MARK)
_LATER_MARK = re.compile(rb"\n" + _MARK)
_WORKER = re.compile(rb'"decode_worker_id": ?(\d{1,20})\b')
_USAGE = re.compile(rb'"usage": ?\{')
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens": ?(\d{1,12})\b')
_ANSWER = re.compile(rb'"(?:completion|output)_tokens": ?(\d{1,12})\b')
_CACHED = re.compile(rb'"cached_tokens": ?(\d{1,12})\b')
_CACHE_READ = re.compile(rb'"cache_read_input_tokens": ?(\d{1,12})\b')
_CODE = re.compile(rb'"code": ?"?(\d{3})\b')
#: An unfinished event that is longer than this is passed on unfinished.
_LONGEST_EVENT = 2**20
#: What is kept of a piece for its usage: thousands of streams keep six each.
_KEPT = 2**13


class Usage(NamedTuple):
    """Prompt tokens of an answer, how many of them came from a cache, and the answer's own tokens."""

    prompt: int
    cached: int
    answer: int


def usage_of(body: bytes) -> Usage | None:
    """Return the last usage in a whole answer or the end of a stream; None without one."""
    found = body.rfind(b'"usage"')
    while found >= 0:
        if _USAGE.match(body, found):
            prompt = _PROMPT.search(body, found)
            if prompt is None:
                return None
            answer, cached, read = (one.search(body, found) for one in (_ANSWER, _CACHED, _CACHE_READ))
            tokens = int(answer[1]) if answer else 0
            if read is not None:  # Anthropic's input tokens leave out what was read from the cache
                return Usage(int(prompt[1]) + int(read[1]), int(read[1]), tokens)
            return Usage(int(prompt[1]), int(cached[1]) if cached else 0, tokens)
        found = body.rfind(b'"usage"', 0, found)
    return None


def worker_of(body: bytes) -> int | None:
    """Return the worker that an answer names, where the client asked for that (`nvext.extra_fields`)."""
    found = _WORKER.search(body)
    return int(found[1]) if found else None


class Scanner:
    """Watches a stream of events go by, in pieces split anywhere, and hands on whole events.

    Attributes:
        first: whether a token has been seen.
        events: how many events with data have been seen.
        ended: whether the form's last event has been seen; a stream without one was cut.
        failed: the status in an error event, 500 where it has none; 0 without an error event.
        rest: what came of an event that is not complete yet.
        torn: whether a part of an incomplete event was handed on, because it was too long to wait for.
    """

    __slots__ = ("_delta", "_last", "ended", "events", "failed", "first", "rest", "torn")

    def __init__(self, api: Api) -> None:
        self._delta = api.delta
        # The final usage is not further from the end than this many pieces in any form.
        self._last: deque[bytes] = deque(maxlen=6)
        self.first = False
        self.events = 0
        self.ended = False
        self.failed = 0
        self.rest = b""
        self.torn = False

    def feed(self, piece: bytes) -> bytes:
        """Look at the next piece; return the events that are complete now.

        A stream that breaks off leaves no half event at the client then, which could not be told from a fault of its
        own; bytes and their order stay the same.
        """
        if self.rest:
            piece = self.rest + piece
            self.rest = b""
        if not piece.endswith(b"\n\n"):
            end = max(piece.rfind(b"\n\n") + 2, piece.rfind(b"\n\r\n") + 3)
            if end < 3 and len(piece) > _LONGEST_EVENT:
                end = len(piece)
                self.torn = True
            elif end < 3:
                self.rest = piece
                return b""
            else:
                self.rest = piece[end:]
                piece = piece[:end]
                self.torn = False
        else:
            self.torn = False
        self.events += piece.count(b"\ndata:") + piece.startswith(b"data:")
        if not self.first and self._delta in piece:
            self.first = True
        mark = _FIRST_MARK.match(piece) or _LATER_MARK.search(piece)
        while mark is not None:
            self.ended = True
            if not self.failed and (b"error" in mark[0] or b"failed" in mark[0]):
                code = _CODE.search(piece, mark.start())
                self.failed = int(code[1]) if code else 500
            mark = _LATER_MARK.search(piece, mark.end())
        self._last.append(piece if len(piece) <= _KEPT else piece[-_KEPT:])
        return piece

    def usage(self) -> Usage | None:
        """Return the final usage, once the stream is over."""
        return usage_of(b"".join(self._last))

    def worker(self) -> int | None:
        """Return the worker that the last events name."""
        return worker_of(b"".join(self._last))
