# SPDX-License-Identifier: Apache-2.0
"""The three APIs as their clients see them: requests (from `_requests`), and answers read into one form.

Reading is lenient where a caller could go on, and says as `Problem`s what it met. What is wrong is judged by what
clients do with it: the order of events and the fields that the SDKs of OpenAI and Anthropic rely on
(`openai.lib.streaming`, `anthropic.lib.streaming`), the APIs' references, and for the framing WHATWG's HTML, section
9.2.6 (server-sent events). What vLLM 0.31 and Dynamo 1.6.1 add to that, such as `[DONE]` behind the last event of every
API, is no problem.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from ._answer import Answer, Call, Problem, Usage
from ._requests import body, follow_up, history

__all__ = ["PATHS", "RAW_LIMIT", "StreamReader", "body", "follow_up", "history", "read_plain"]

#: The path of each API below `/v1`.
PATHS: Mapping[str, str] = {"chat": "/chat/completions", "responses": "/responses", "messages": "/messages"}
#: How many bytes of an answer `Answer.raw` keeps.
RAW_LIMIT = 64 * 1024
#: How many problems of an answer are kept: the first ones tell.
_PROBLEMS = 50


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
        value = _json(data)
    except ValueError as error:
        reader.problem("not_json", f"the body is no JSON: {error}")
        value = None
        if status < 300:
            answer.broken = f"the body is no JSON: {error}"
        else:
            answer.error = _clean(data.decode("utf-8", "replace")).strip() or "(an empty body)"
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
                value = _json(data)
            except ValueError as error:
                self._reader.problem("not_json", f"event {self.events} is no JSON: {error}")
                return
            if isinstance(value, dict):
                self._reader.event(self._name, value)
            else:
                self._reader.problem("shape", f"event {self.events} is {_kind(value)}, not an object")
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


@dataclass
class _Text:
    """A text that comes in pieces."""

    pieces: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "".join(self.pieces)


@dataclass
class _Call:
    """A call that is being read."""

    id: str = ""
    name: str = ""
    arguments: _Text = field(default_factory=_Text)

    @property
    def whole(self) -> Call:
        return Call(self.id, self.name, str(self.arguments))


class _Reader:
    """What the readers of the three APIs have in common."""

    #: The field that holds the answer in a plain body.
    payload = ""
    #: The names of the counts in `usage`: prompt, completion, total.
    counts = ("input_tokens", "output_tokens", "total_tokens")

    def __init__(self) -> None:
        self.answer = Answer(status=0)
        self.ended = False

    def calls(self) -> list[Call]:
        raise NotImplementedError

    def text(self) -> str:
        raise NotImplementedError

    def reasoning(self) -> str:
        raise NotImplementedError

    def plain(self, value: dict[str, Any]) -> None:
        """Read a plain body, which has the field `payload`."""
        raise NotImplementedError

    def event(self, name: str, value: dict[str, Any]) -> None:
        """Read an event of a stream."""
        raise NotImplementedError

    def finish(self) -> None:
        """Look at a stream that ended by itself."""
        raise NotImplementedError

    def done(self) -> None:
        """Read `[DONE]`; where it is not the end of an API, servers send it behind the end all the same."""
        if not self.ended and self.answer.error is None:
            self.problem("order", "[DONE] before the end of the answer")

    def whole(self, value: Any) -> None:
        """Read a plain body, an answer or an error."""
        status, answer = self.answer.status, self.answer
        has_payload = isinstance(value, dict) and isinstance(value.get(self.payload), list)
        if status < 300 and has_payload:
            try:
                self.plain(value)
            except Exception as error:  # see `StreamReader`
                answer.broken = f"the body could not be read: {type(error).__name__}: {error}"
        elif (
            status < 300 and isinstance(value, dict) and (_has_error(value) or "message" in value or "detail" in value)
        ):
            answer.error = _error(value)
            self.problem("status", f"an error under the status {status}: {_short(answer.error)}")
        elif status < 300:
            self.problem("shape", f"the body has no list {self.payload!r}: {_short(_dump(value))}")
            answer.broken = f"no answer in the body: it has no list {self.payload!r}"
        else:
            answer.error = _error(value)
            if has_payload and not _has_error(value):
                self.problem("status", f"an answer under the status {status}")

    def problem(self, kind: str, message: str) -> None:
        """Note a problem, once."""
        problem = Problem(kind, _clean(message))
        if len(self.answer.problems) < _PROBLEMS and problem not in self.answer.problems:
            self.answer.problems.append(problem)

    def failed(self, value: Any) -> None:
        """Take an error out of a stream: the first one counts."""
        if self.answer.error is None:
            self.answer.error = _error(value)

    def string(self, value: Any, where: str, optional: bool = True) -> str:
        """Return a string; empty where there is none, with a problem where there is something else."""
        if isinstance(value, str):
            clean = _clean(value)
            if clean != value:
                self.problem("shape", f"{where} has half of a surrogate pair")
            return clean
        if value is None:
            if not optional:
                self.problem("shape", f"{where} is missing")
            return ""
        self.problem("shape", f"{where} is {_kind(value)}, not a string")
        return _clean(_dump(value))

    def object(self, value: Any, where: str) -> dict[str, Any]:
        """Return an object; empty, with a problem, where there is none."""
        if isinstance(value, dict):
            return value
        self.problem("shape", f"{where} is {_kind(value)}, not an object")
        return {}

    def list(self, value: Any, where: str) -> list[Any]:
        """Return a list; empty where there is none, with a problem where there is something else."""
        if isinstance(value, list):
            return value
        if value is not None:
            self.problem("shape", f"{where} is {_kind(value)}, not a list")
        return []

    def expect(self, value: Mapping[str, Any], where: str, **wanted: Any) -> None:
        """Note fields that are not what they have to be: a value, or a type."""
        for key, want in wanted.items():
            got = value.get(key)
            if isinstance(want, type):
                if not isinstance(got, want) or isinstance(got, bool):
                    self.problem("shape", f"{where}.{key} is {_kind(got)}, not {_TYPES[want]}")
            elif got != want:
                self.problem("shape", f"{where}.{key} is {_short(_dump(got))}, not {_dump(want)}")

    def identity(self, call: _Call, identifier: str, name: str, where: str) -> None:
        """Compare a call with the id and the name that came for it again; none may come, or empty ones."""
        for kind, was, new in (("id_changed", call.id, identifier), ("name_changed", call.name, name)):
            if new and new != was:
                self.problem(kind, f"{where}: {was!r} became {new!r}")

    def begin(self, identifier: str, name: str, where: str) -> _Call:
        """Begin a call."""
        if not identifier:
            self.problem("no_id", f"{where} has no id")
        if not name:
            self.problem("shape", f"{where} has no name")
        return _Call(identifier, name)

    def usage(self, value: Any, where: str) -> None:
        """Take the counts; later ones replace earlier ones, where they are there."""
        if value is None:
            return
        usage = self.object(value, where)
        counts = [usage.get(name) for name in self.counts]
        for name, count in zip(self.counts[:2], counts, strict=False):
            if count is not None and not _is_count(count):
                self.problem("shape", f"{where}.{name} is {_short(_dump(count))}, not a count")
        prompt, completion, total = (count if _is_count(count) else None for count in counts)
        old = self.answer.usage
        if old is None and (prompt is None or completion is None):
            self.problem("shape", f"{where} has not both {self.counts[0]} and {self.counts[1]}")
            return
        # In messages what the cache held is counted beside the rest of the prompt.
        cached = [usage.get(f"cache_{what}_input_tokens") for what in ("read", "creation")]
        if prompt is not None:
            prompt += sum(count for count in cached if _is_count(count))
        self.answer.usage = Usage(
            prompt=old.prompt if prompt is None and old else prompt or 0,
            completion=old.completion if completion is None and old else completion or 0,
            total=total,
        )


class _Chat(_Reader):
    """`/v1/chat/completions`."""

    payload = "choices"
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[int, _Call] = {}
        self._text = _Text()
        self._reasoning = _Text()
        self._last = -1
        self._begun = False

    def calls(self) -> list[Call]:
        return [call.whole for _, call in sorted(self._calls.items())]

    def text(self) -> str:
        return str(self._text)

    def reasoning(self) -> str:
        return str(self._reasoning)

    def plain(self, value: dict[str, Any]) -> None:
        self.expect(value, "body", id=str, object="chat.completion", created=int, model=str)
        self.usage(value.get("usage"), "usage")
        if not value["choices"]:
            self.problem("shape", "choices is empty")
            self.answer.broken = "no answer in the body: choices is empty"
            return
        choice = self.object(value["choices"][0], "choices[0]")
        self._finish(choice.get("finish_reason"), "choices[0].finish_reason")
        if self.answer.finish is None:
            self.problem("shape", "choices[0].finish_reason is missing")
        message = self.object(choice.get("message"), "choices[0].message")
        self.expect(message, "choices[0].message", role="assistant")
        self._words(message, "choices[0].message")
        for number, call in enumerate(self.list(message.get("tool_calls"), "choices[0].message.tool_calls")):
            self._fragment(self.object(call, f"tool_calls[{number}]"), f"tool_calls[{number}]", number)

    def event(self, name: str, value: dict[str, Any]) -> None:
        if self.ended:
            self.problem("after_end", f"an event after [DONE]: {_short(_dump(value))}")
            return
        if _has_error(value):
            self.failed(value)
            return
        if value.get("choices") != []:  # Azure's first chunk, of its content filter, has empty ones
            self.expect(value, "chunk", id=str, object="chat.completion.chunk", created=int, model=str)
        self.usage(value.get("usage"), "usage")
        if not isinstance(value.get("choices"), list):
            self.problem("shape", f"chunk.choices is {_kind(value.get('choices'))}, not a list")
        for choice in self.list(value.get("choices"), "chunk.choices"):
            self._choice(self.object(choice, "choices[0]"))

    def done(self) -> None:
        if self.ended:
            self.problem("after_end", "a second [DONE]")
        self.ended = True

    def finish(self) -> None:
        if self.answer.error is not None:
            return
        if not self.ended:
            self.problem("no_end", "the stream ended without data: [DONE]")
        if self.answer.finish is None:
            self.problem("shape", "no chunk has a finish_reason")
            if not self.ended:
                self.answer.broken = "the stream ended without a finish reason and without [DONE]"

    def _choice(self, choice: dict[str, Any]) -> None:
        if choice.get("index") not in (0, None):  # one choice is asked for
            self.problem("index", f"a choice with the index {choice.get('index')}")
            return
        delta = self.object(choice.get("delta"), "delta")
        late = self.answer.finish is not None
        if delta.get("role") != "assistant" and (not self._begun or delta.get("role") is not None):
            self.problem("shape", f'delta.role is {_short(_dump(delta.get("role")))}, not "assistant"')
        self._begun = True
        came = self._words(delta, "delta")
        for number, fragment in enumerate(self.list(delta.get("tool_calls"), "delta.tool_calls")):
            came = True
            self._numbered(self.object(fragment, f"delta.tool_calls[{number}]"))
        if late and came:
            self.problem("after_end", "content after the finish reason")
        reason = choice.get("finish_reason")
        if reason is not None and late:
            self.problem("finish_repeated", f"the finish reason {self.answer.finish!r}, and then {reason!r}")
        self._finish(reason, "finish_reason")

    def _finish(self, reason: Any, where: str) -> None:
        if reason is not None:
            self.answer.finish = self.string(reason, where)

    def _words(self, message: dict[str, Any], where: str) -> bool:
        """Take content and reasoning; say whether there was any."""
        content = message.get("content")
        if isinstance(content, list):
            self.problem("shape", f"{where}.content is a list, not a string")
            texts = [part.get("text") for part in content if isinstance(part, dict)]
            content = "".join(text for text in texts if isinstance(text, str))
        text = self.string(content, f"{where}.content")
        key = "reasoning" if message.get("reasoning_content") is None else "reasoning_content"
        reasoning = self.string(message.get(key), f"{where}.{key}")
        self._text.pieces.append(text)
        self._reasoning.pieces.append(reasoning)
        return bool(text or reasoning)

    def _numbered(self, fragment: dict[str, Any]) -> None:
        """Take a fragment of a call out of a chunk."""
        index = fragment.get("index")
        identifier = fragment.get("id")
        if not _is_count(index):
            self.problem("index", f"a fragment of a call has the index {_short(_dump(index))}")
            new = self._last < 0 or (identifier and identifier != self._calls[self._last].id)
            index = len(self._calls) if new else self._last
        if index not in self._calls and index != len(self._calls):
            self.problem("index", f"call {index} begins as number {len(self._calls)}")
        self._last = index
        self._fragment(fragment, f"call {index}", index)

    def _fragment(self, fragment: dict[str, Any], where: str, index: int) -> None:
        function = self.object(fragment.get("function", {}), f"{where}.function")
        identifier = self.string(fragment.get("id"), f"{where}.id")
        name = self.string(function.get("name"), f"{where}.function.name")
        call = self._calls.get(index)
        if call is None:
            if not identifier and not name:
                self.problem("index", f"a fragment for {where}, which was not begun")
                call = _Call()
            else:
                call = self.begin(identifier, name, where)
            if fragment.get("type") != "function":
                self.problem("shape", f'{where}.type is {_short(_dump(fragment.get("type")))}, not "function"')
            self._calls[index] = call
        else:
            self.identity(call, identifier, name, where)
            again = [("id_changed", identifier, call.id), ("name_changed", name, call.name)]
            for kind, new, was in again:
                if new and new == was:
                    self.problem(kind, f"{where}: {new!r} came again; OpenAI's SDK joins them to {was + new!r}")
        call.arguments.pieces.append(self.string(function.get("arguments"), f"{where}.function.arguments"))


class _Messages(_Reader):
    """`/v1/messages`."""

    payload = "content"
    _finishes: Mapping[str, str] = {
        "end_turn": "stop",
        "stop_sequence": "stop",
        "max_tokens": "length",
        "tool_use": "tool_calls",
        "refusal": "content_filter",
    }
    #: Which field of which delta continues which block.
    _deltas: Mapping[str, tuple[str, str]] = {
        "text_delta": ("text", "text"),
        "thinking_delta": ("thinking", "thinking"),
        "signature_delta": ("thinking", "signature"),
        "input_json_delta": ("tool_use", "partial_json"),
    }

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[int, tuple[str, _Call]] = {}
        self._open: set[int] = set()
        self._started = False

    def calls(self) -> list[Call]:
        return [
            # `{}` is what the API's streams mean where a call has no deltas at all.
            Call(call.id, call.name, str(call.arguments) or "{}")
            for kind, call in self._blocks.values()
            if kind == "tool_use"
        ]

    def text(self) -> str:
        return "".join(str(block.arguments) for kind, block in self._blocks.values() if kind == "text")

    def reasoning(self) -> str:
        return "".join(str(block.arguments) for kind, block in self._blocks.values() if kind == "thinking")

    def plain(self, value: dict[str, Any]) -> None:
        self.expect(value, "body", id=str, type="message", role="assistant", model=str)
        self._stop(value.get("stop_reason"), "stop_reason")
        if self.answer.finish is None:
            self.problem("shape", "stop_reason is missing")
        self.usage(value.get("usage"), "usage")
        for number, block in enumerate(value["content"]):
            where = f"content[{number}]"
            self._block(number, self.object(block, where), where)

    def event(self, name: str, value: dict[str, Any]) -> None:
        kind = value.get("type")
        if kind == "ping":
            return
        if kind == "error" or name == "error" or _has_error(value):
            self.failed(value)
            return
        if name != kind:
            self.problem("shape", f"the event {name!r} carries the type {_short(_dump(kind))}")
        kind = kind or name
        if self.ended:
            self.problem("after_end", f"{kind} after message_stop")
            return
        if kind == "message_start":
            if self._started:
                self.problem("order", "a second message_start")
            self._started = True
            message = self.object(value.get("message"), "message")
            self.expect(message, "message", id=str, type="message", role="assistant", model=str, content=[])
            self.usage(message.get("usage"), "message.usage")
            return
        if not self._started:
            self.problem("order", f"{kind} before message_start")
            self._started = True
        if kind == "content_block_start":
            self._start(value)
        elif kind == "content_block_delta":
            self._delta(value)
        elif kind == "content_block_stop":
            index = value.get("index")
            if _is_count(index) and index in self._open:
                self._open.discard(index)
            else:
                self.problem("order", f"content_block_stop of block {_short(_dump(index))}, which is not open")
        elif kind == "message_delta":
            self._message_delta(value)
        elif kind == "message_stop":
            if self._open:
                self.problem("order", f"message_stop while block {min(self._open)} is open")
            self.ended = True

    def finish(self) -> None:
        if self.answer.error is not None:
            return
        if not self.ended:
            self.problem("no_end", "the stream ended without message_stop")
        if self.answer.finish is None:
            self.problem("shape", "no message_delta has a stop_reason")
            if not self.ended:
                self.answer.broken = "the stream ended without a stop reason and without message_stop"

    def _message_delta(self, value: dict[str, Any]) -> None:
        if self._open:
            self.problem("order", f"message_delta while block {min(self._open)} is open")
        reason = self.object(value.get("delta"), "delta").get("stop_reason")
        if reason is not None and self.answer.finish is not None:
            self.problem("finish_repeated", f"the stop reason came twice, the second time as {reason!r}")
        self._stop(reason, "delta.stop_reason")
        self.usage(value.get("usage"), "usage")

    def _stop(self, reason: Any, where: str) -> None:
        if reason is not None:
            word = self.string(reason, where)
            self.answer.finish = self._finishes.get(word, word)

    def _start(self, value: dict[str, Any]) -> None:
        if self.answer.finish is not None:
            self.problem("after_end", "a block after the stop reason")
        index = value.get("index")
        if not _is_count(index) or index != len(self._blocks):
            self.problem("index", f"block {_short(_dump(index))} begins as number {len(self._blocks)}")
        if self._open:
            self.problem("order", f"a block begins while block {min(self._open)} is open")
        if not _is_count(index) or index in self._blocks:
            index = max(self._blocks, default=-1) + 1
        self._block(index, self.object(value.get("content_block"), "content_block"), f"block {index}", streamed=True)
        self._open.add(index)

    def _delta(self, value: dict[str, Any]) -> None:
        if self.answer.finish is not None:
            self.problem("after_end", "content after the stop reason")
        index = value.get("index")
        delta = self.object(value.get("delta"), "delta")
        kind, key = self._deltas.get(str(delta.get("type")), ("", ""))
        if not _is_count(index) or index not in self._blocks:
            self.problem("index", f"a delta for block {_short(_dump(index))}, which was not begun")
            if not kind or not _is_count(index):
                return
            self._blocks[index] = (kind, _Call())
        elif index not in self._open:
            self.problem("order", f"a delta for block {index} after its end")
        was, block = self._blocks[index]
        if kind and kind != was and not (kind == "tool_use" and was.endswith("_tool_use")):  # server_tool_use
            self.problem("shape", f"a {delta['type']} for block {index}, which is of the type {was!r}")
        elif kind and key != "signature":
            block.arguments.pieces.append(self.string(delta.get(key), f"delta.{key}", optional=False))

    def _block(self, index: int, block: dict[str, Any], where: str, streamed: bool = False) -> None:
        kind = self.string(block.get("type"), f"{where}.type", optional=False)
        one = _Call()
        if kind == "tool_use":
            identifier = self.string(block.get("id"), f"{where}.id")
            one = self.begin(identifier, self.string(block.get("name"), f"{where}.name"), where)
            given = self.object(block.get("input"), f"{where}.input")
            if given or not streamed:
                one.arguments.pieces.append(_clean(_dump(block.get("input"))))
        elif kind in ("text", "thinking"):
            one.arguments.pieces.append(self.string(block.get(kind), f"{where}.{kind}", optional=False))
        self._blocks[index] = (kind, one)


@dataclass
class _Item:
    """An output item of a Responses stream."""

    kind: str
    call: _Call = field(default_factory=_Call)
    item_id: str = ""
    #: The joined deltas, by content part.
    deltas: dict[int, _Text] = field(default_factory=dict)
    #: The text of the events that end the parts.
    parts: dict[int, str] = field(default_factory=dict)
    #: The text of the item when it was done, and in the response at the end.
    done: str | None = None
    final: str | None = None
    summary: _Text = field(default_factory=_Text)

    def texts(self) -> Iterator[tuple[str, str]]:
        """Its text, from each place that has one, the one that counts last."""
        yield "the deltas", "".join(str(text) for text in self.deltas.values())
        if self.parts:
            yield "the events that end it", "".join(self.parts.values())
        if self.done is not None:
            yield "response.output_item.done", self.done
        if self.final is not None:
            yield "the response at the end", self.final

    def text(self) -> str:
        return list(self.texts())[-1][1] or str(self.summary)


class _Responses(_Reader):
    """`/v1/responses`.

    Of a call that is told of several times (deltas, the event that ends them, the item when it is done, the response at
    the end) the last one counts, as in OpenAI's SDK.
    """

    payload = "output"
    #: The last events, and the status that the response in them has.
    _ends: Mapping[str, str] = {
        "response.completed": "completed",
        "response.incomplete": "incomplete",
        "response.failed": "failed",
    }
    _texts: Mapping[str, str] = {
        "response.output_text": "message",
        "response.refusal": "refusal",
        "response.reasoning_text": "reasoning",
        "response.reasoning_summary_text": "summary",
        "response.function_call_arguments": "function_call",
    }

    def __init__(self) -> None:
        super().__init__()
        self._items: dict[int, _Item] = {}
        self._id: str | None = None
        self._number = -1

    def calls(self) -> list[Call]:
        return [Call(one.call.id, one.call.name, one.text()) for one in self._sorted() if one.kind == "function_call"]

    def text(self) -> str:
        return "".join(one.text() for one in self._sorted() if one.kind == "message")

    def reasoning(self) -> str:
        return "".join(one.text() for one in self._sorted() if one.kind == "reasoning")

    def _sorted(self) -> list[_Item]:
        return [item for _, item in sorted(self._items.items())]

    def plain(self, value: dict[str, Any]) -> None:
        self.expect(value, "body", id=str, object="response", model=str)
        for number, item in enumerate(value["output"]):
            self._items[number] = self._item(self.object(item, f"output[{number}]"), f"output[{number}]")
        self._status(value)
        if value.get("status") not in self._ends.values():
            self.problem("shape", f"status is {_short(_dump(value.get('status')))} in a plain answer")

    def event(self, name: str, value: dict[str, Any]) -> None:
        kind = value.get("type")
        if kind == "error" or name == "error" or (kind is None and _has_error(value)):
            self.failed(value)
            return
        if name != kind:
            self.problem("shape", f"the event {name!r} carries the type {_short(_dump(kind))}")
        kind = self.string(kind, "type") or name
        if self.ended:
            self.problem("after_end", f"{kind} after the end of the response")
            return
        number = value.get("sequence_number")
        if _is_count(number):
            if number <= self._number:
                self.problem("order", f"sequence_number {number} after {self._number}")
            self._number = number
        if self._id is None and kind != "response.created":
            self.problem("order", f"{kind} before response.created")
            self._id = ""
        stem, _, what = kind.rpartition(".")
        if kind in ("response.created", "response.queued", "response.in_progress") or kind in self._ends:
            self._lifecycle(kind, self.object(value.get("response"), "response"))
        elif kind == "response.output_item.added":
            self._added(value)
        elif kind == "response.output_item.done":
            self._done(value)
        elif kind == "response.content_part.added":
            item = self._of(value, kind)
            if item is not None:
                item.deltas.setdefault(_part(value), _Text())
        elif stem in self._texts and what in ("delta", "done"):
            self._piece(kind, self._texts[stem], what, value)

    def finish(self) -> None:
        if self.answer.error is not None:
            return
        if not self.ended:
            self.problem("no_end", "the stream ended without response.completed")
            if not self._items or any(item.done is None for item in self._items.values()):
                self.answer.broken = "the stream ended without response.completed and inside its output"
        for index, item in sorted(self._items.items()):
            if item.kind not in ("function_call", "message"):
                continue
            (came, text), *others = item.texts()
            for where, other in others:
                if other != text:
                    self.problem("shape", f"output {index}: {came} say {_short(text)}, {where} says {_short(other)}")
                    break

    def _lifecycle(self, kind: str, response: dict[str, Any]) -> None:
        identifier = self.string(response.get("id"), "response.id", optional=False)
        if kind == "response.created" and self._id:
            self.problem("order", "a second response.created")
        elif self._id and identifier and identifier != self._id:
            self.problem("id_changed", f"the response's id {self._id!r} became {identifier!r}")
        self._id = self._id or identifier
        if kind not in self._ends:
            return
        self.ended = True
        self.expect(response, "response", object="response", status=self._ends[kind])
        self._status(response)
        if kind == "response.failed":
            return
        output = response.get("output")
        if not isinstance(output, list):
            self.problem("shape", f"response.output is {_kind(output)}, not a list")
            return
        self._compare([self._item(self.object(one, "output"), "output") for one in output])
        for index, item in sorted(self._items.items()):
            if kind == "response.completed" and item.done is None and item.final is None:
                self.problem("order", f"response.completed before the end of output {index}")

    def _compare(self, final: list[_Item]) -> None:
        """Lay the output at the end over what the stream told of it."""
        for kind in ("function_call", "message", "reasoning"):
            streamed = [item for item in self._sorted() if item.kind == kind]
            whole = [item for item in final if item.kind == kind]
            if kind != "reasoning" and len(streamed) != len(whole):
                self.problem(
                    "shape", f"the response at the end has {len(whole)} outputs of {kind}, the stream {len(streamed)}"
                )
            for old, new in zip(streamed, whole, strict=False):
                old.final = new.done
                self.identity(old.call, new.call.id, new.call.name, f"a {kind} in the response at the end")
            for new in whole[len(streamed) :]:
                new.deltas[0] = _Text([new.text()])  # it was said above that no event told of it
                self._items[max(self._items, default=-1) + 1] = new

    def _status(self, response: dict[str, Any]) -> None:
        self.usage(response.get("usage"), "usage")
        status = response.get("status")
        if status == "completed":
            called = any(item.kind == "function_call" for item in self._items.values())
            output = self.list(response.get("output"), "output")
            called = called or any(isinstance(one, dict) and one.get("type") == "function_call" for one in output)
            self.answer.finish = "tool_calls" if called else "stop"
        elif status == "incomplete":
            details = response.get("incomplete_details")
            reason = details.get("reason") if isinstance(details, dict) else None
            if not isinstance(reason, str):
                self.problem("shape", "an incomplete response without incomplete_details.reason")
                reason = "incomplete"
            self.answer.finish = {"max_output_tokens": "length", "max_tokens": "length"}.get(reason, reason)
        elif status == "failed":
            self.failed(response.get("error") or response)
        if status != "failed" and response.get("error") is not None:
            self.failed(response["error"])

    def _item(self, item: dict[str, Any], where: str) -> _Item:
        """Read an item that is whole."""
        kind = self.string(item.get("type"), f"{where}.type", optional=False)
        one = _Item(kind, item_id=item["id"] if isinstance(item.get("id"), str) else "")
        if kind == "function_call":
            one.call = self.begin(
                self.string(item.get("call_id"), f"{where}.call_id"),
                self.string(item.get("name"), f"{where}.name"),
                where,
            )
            one.done = self.string(item.get("arguments"), f"{where}.arguments", optional=False)
        elif kind == "message":
            self.expect(item, where, role="assistant")
            one.done = self._joined(item.get("content"), "output_text", f"{where}.content")
        elif kind == "reasoning":
            one.done = self._joined(item.get("content"), "reasoning_text", f"{where}.content")
            one.summary.pieces.append(self._joined(item.get("summary"), "summary_text", f"{where}.summary"))
        else:
            one.done = ""
        return one

    def _joined(self, parts: Any, kind: str, where: str) -> str:
        found = [part for part in self.list(parts, where) if isinstance(part, dict) and part.get("type") == kind]
        return "".join(self.string(part.get("text"), f"{where}.text", optional=False) for part in found)

    def _added(self, value: dict[str, Any]) -> None:
        index, item = value.get("output_index"), self.object(value.get("item"), "item")
        if not _is_count(index) or index in self._items or index != len(self._items):
            self.problem("index", f"output {_short(_dump(index))} begins as number {len(self._items)}")
        if not _is_count(index) or index in self._items:
            index = max(self._items, default=-1) + 1
        kind = self.string(item.get("type"), "item.type", optional=False)
        one = _Item(kind, item_id=item["id"] if isinstance(item.get("id"), str) else "")
        if kind == "function_call":
            identifier = self.string(item.get("call_id"), "item.call_id")
            one.call = self.begin(identifier, self.string(item.get("name"), "item.name"), f"output {index}")
            begun = self.string(item.get("arguments"), "item.arguments")
            if begun:
                one.deltas[0] = _Text([begun])
        self._items[index] = one

    def _done(self, value: dict[str, Any]) -> None:
        index, item = value.get("output_index"), self.object(value.get("item"), "item")
        whole = self._item(item, f"output {_short(_dump(index))}")
        if not _is_count(index) or index not in self._items:
            self.problem("index", f"output {_short(_dump(index))} is done, and was not begun")
            self._items[index if _is_count(index) else max(self._items, default=-1) + 1] = whole
            return
        one = self._items[index]
        if one.done is not None:
            self.problem("order", f"output {index} is done twice")
        if one.kind != whole.kind:
            self.problem("shape", f"output {index} begins as {one.kind!r} and is done as {whole.kind!r}")
            return
        if one.item_id and whole.item_id and one.item_id != whole.item_id:
            self.problem("id_changed", f"output {index}: {one.item_id!r} became {whole.item_id!r}")
        if one.call == _Call():  # it was not begun
            one.call = whole.call
        self.identity(one.call, whole.call.id, whole.call.name, f"output {index}")
        one.done, one.summary = whole.done, whole.summary if str(whole.summary) else one.summary

    def _of(self, value: dict[str, Any], kind: str) -> _Item | None:
        """Return the item that an event is about."""
        index = value.get("output_index")
        item = self._items.get(index) if _is_count(index) else None
        if item is None:
            self.problem("index", f"{kind} for output {_short(_dump(index))}, which was not begun")
        elif item.done is not None:
            self.problem("order", f"{kind} for output {index} after its end")
        elif item.item_id and isinstance(value.get("item_id"), str) and value["item_id"] != item.item_id:
            self.problem(
                "index", f"{kind} for output {index} names the item {value['item_id']!r}, not {item.item_id!r}"
            )
        return item

    def _piece(self, kind: str, about: str, what: str, value: dict[str, Any]) -> None:
        item = self._of(value, kind)
        if item is None:
            index = value.get("output_index")
            if not _is_count(index):
                return
            item = self._items[index] = _Item({"refusal": "message", "summary": "reasoning"}.get(about, about))
        wanted = {"refusal": "message", "summary": "reasoning"}.get(about, about)
        if item.kind != wanted:
            self.problem("shape", f"{kind} for output {value.get('output_index')}, which is of the type {item.kind!r}")
            return
        key = "delta" if what == "delta" else "arguments" if about == "function_call" else "text"
        if about == "refusal":
            return
        text = self.string(value.get(key), f"{kind}.{key}", optional=False)
        part = _part(value)
        if about == "summary":
            if what == "delta":
                item.summary.pieces.append(text)
        elif what == "done":
            item.parts[part] = text
        else:
            if about == "message" and part not in item.deltas:
                self.problem("order", f"{kind} for a part of output {value.get('output_index')} that was not begun")
            if part in item.parts:
                self.problem("order", f"{kind} for output {value.get('output_index')} after its text was done")
            item.deltas.setdefault(part, _Text()).pieces.append(text)


_READERS: Mapping[str, type[_Reader]] = {"chat": _Chat, "responses": _Responses, "messages": _Messages}
_TYPES: Mapping[type, str] = {str: "a string", int: "an integer"}
_SURROGATE = re.compile("[\ud800-\udfff]")


def _json(data: bytes) -> Any:
    """Parse JSON as RFC 8259 has it, in UTF-8. Raises ValueError."""
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _clean(text: str) -> str:
    """Return a text that can be encoded: halves of surrogate pairs replaced."""
    return _SURROGATE.sub("\ufffd", text)


def _raw(data: bytes) -> str:
    text = data[:RAW_LIMIT].decode("utf-8", "ignore" if len(data) >= RAW_LIMIT else "replace")
    return text + "…" if len(data) > RAW_LIMIT else text


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:60]}…{text[-15:]}"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "missing"}
    return names.get(type(value), "a number")


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _part(value: dict[str, Any]) -> int:
    """Return the number of the part that an event of Responses is about; calls have one part and no numbers."""
    part = value.get("content_index")
    return part if _is_count(part) else 0


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _has_error(value: dict[str, Any]) -> bool:
    return value.get("error") is not None


def _error(value: Any) -> str:
    """Return the message of an error, and what stands beside it as JSON.

    Forms: `{"error": {"message": ...}}` (OpenAI, Anthropic, vLLM), `{"error": "..."}`, `{"message": ...}` (Dynamo, and
    the event `error` of Responses), `{"detail": ...}` (FastAPI).
    """
    if isinstance(value, dict) and isinstance(value.get("error"), (dict, str)):
        value = value["error"]
    if isinstance(value, str):
        return _clean(value)
    if not isinstance(value, dict):
        return _clean(_dump(value))
    message = value.get("message")
    if not isinstance(message, str):
        return _clean(_dump(value))
    beside = {key: one for key, one in value.items() if key != "message" and one is not None}
    return _clean(f"{message} {_dump(beside)}" if beside else message)
