# SPDX-License-Identifier: Apache-2.0
"""What the readers of the three APIs have in common: what is odd is noted, and reading goes on where a caller could."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from ._answer import Answer, Call, Problem, Usage

__all__ = [
    "OpenCall",
    "Reader",
    "Text",
    "clean",
    "dump",
    "error_text",
    "has_error",
    "is_count",
    "kind_of",
    "parse_json",
    "short",
]

#: How many problems of an answer are kept: the first ones tell.
_PROBLEMS = 50
_TYPES: Mapping[type, str] = {str: "a string", int: "an integer"}
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass
class Text:
    """A text that comes in pieces."""

    pieces: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "".join(self.pieces)


@dataclass
class OpenCall:
    """A call that is being read."""

    id: str = ""
    name: str = ""
    arguments: Text = field(default_factory=Text)

    @property
    def whole(self) -> Call:
        return Call(self.id, self.name, str(self.arguments))


class Reader:
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
        elif status < 300 and isinstance(value, dict) and (has_error(value) or "message" in value or "detail" in value):
            answer.error = error_text(value)
            self.problem("status", f"an error under the status {status}: {short(answer.error)}")
        elif status < 300:
            self.problem("shape", f"the body has no list {self.payload!r}: {short(dump(value))}")
            answer.broken = f"no answer in the body: it has no list {self.payload!r}"
        else:
            answer.error = error_text(value)
            if has_payload and not has_error(value):
                self.problem("status", f"an answer under the status {status}")

    def problem(self, kind: str, message: str) -> None:
        """Note a problem, once."""
        problem = Problem(kind, clean(message))
        if len(self.answer.problems) < _PROBLEMS and problem not in self.answer.problems:
            self.answer.problems.append(problem)

    def failed(self, value: Any) -> None:
        """Take an error out of a stream: the first one counts."""
        if self.answer.error is None:
            self.answer.error = error_text(value)

    def string(self, value: Any, where: str, optional: bool = True) -> str:
        """Return a string; empty where there is none, with a problem where there is something else."""
        if isinstance(value, str):
            sound = clean(value)
            if sound != value:
                self.problem("shape", f"{where} has half of a surrogate pair")
            return sound
        if value is None:
            if not optional:
                self.problem("shape", f"{where} is missing")
            return ""
        self.problem("shape", f"{where} is {kind_of(value)}, not a string")
        return clean(dump(value))

    def object(self, value: Any, where: str) -> dict[str, Any]:
        """Return an object; empty, with a problem, where there is none."""
        if isinstance(value, dict):
            return value
        self.problem("shape", f"{where} is {kind_of(value)}, not an object")
        return {}

    def list(self, value: Any, where: str) -> list[Any]:
        """Return a list; empty where there is none, with a problem where there is something else."""
        if isinstance(value, list):
            return value
        if value is not None:
            self.problem("shape", f"{where} is {kind_of(value)}, not a list")
        return []

    def expect(self, value: Mapping[str, Any], where: str, **wanted: Any) -> None:
        """Note fields that are not what they have to be: a value, or a type."""
        for key, want in wanted.items():
            got = value.get(key)
            if isinstance(want, type):
                if not isinstance(got, want) or isinstance(got, bool):
                    self.problem("shape", f"{where}.{key} is {kind_of(got)}, not {_TYPES[want]}")
            elif got != want:
                self.problem("shape", f"{where}.{key} is {short(dump(got))}, not {dump(want)}")

    def identity(self, call: OpenCall, identifier: str, name: str, where: str) -> None:
        """Compare a call with the id and the name that came for it again; none may come, or empty ones."""
        for kind, was, new in (("id_changed", call.id, identifier), ("name_changed", call.name, name)):
            if new and new != was:
                self.problem(kind, f"{where}: {was!r} became {new!r}")

    def begin(self, identifier: str, name: str, where: str) -> OpenCall:
        """Begin a call."""
        if not identifier:
            self.problem("no_id", f"{where} has no id")
        if not name:
            self.problem("shape", f"{where} has no name")
        return OpenCall(identifier, name)

    def usage(self, value: Any, where: str) -> None:
        """Take the counts; later ones replace earlier ones, where they are there."""
        if value is None:
            return
        usage = self.object(value, where)
        counts = [usage.get(name) for name in self.counts]
        for name, count in zip(self.counts[:2], counts, strict=False):
            if count is not None and not is_count(count):
                self.problem("shape", f"{where}.{name} is {short(dump(count))}, not a count")
        prompt, completion, total = (count if is_count(count) else None for count in counts)
        old = self.answer.usage
        if old is None and (prompt is None or completion is None):
            self.problem("shape", f"{where} has not both {self.counts[0]} and {self.counts[1]}")
            return
        # In messages what the cache held is counted beside the rest of the prompt.
        cached = [usage.get(f"cache_{what}_input_tokens") for what in ("read", "creation")]
        if prompt is not None:
            prompt += sum(count for count in cached if is_count(count))
        self.answer.usage = Usage(
            prompt=old.prompt if prompt is None and old else prompt or 0,
            completion=old.completion if completion is None and old else completion or 0,
            total=total,
        )


def parse_json(data: bytes) -> Any:
    """Parse JSON as RFC 8259 has it, in UTF-8. Raises ValueError."""
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def clean(text: str) -> str:
    """Return a text that can be encoded: halves of surrogate pairs replaced."""
    return _SURROGATE.sub("\ufffd", text)


def short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:60]}…{text[-15:]}"


def kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "missing"}
    return names.get(type(value), "a number")


def is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def has_error(value: dict[str, Any]) -> bool:
    return value.get("error") is not None


def error_text(value: Any) -> str:
    """Return the message of an error, and what stands beside it as JSON.

    Forms: `{"error": {"message": ...}}` (OpenAI, Anthropic, vLLM), `{"error": "..."}`, `{"message": ...}` (Dynamo, and
    the event `error` of Responses), `{"detail": ...}` (FastAPI).
    """
    if isinstance(value, dict) and isinstance(value.get("error"), (dict, str)):
        value = value["error"]
    if isinstance(value, str):
        return clean(value)
    if not isinstance(value, dict):
        return clean(dump(value))
    message = value.get("message")
    if not isinstance(message, str):
        return clean(dump(value))
    beside = {key: one for key, one in value.items() if key != "message" and one is not None}
    return clean(f"{message} {dump(beside)}" if beside else message)
