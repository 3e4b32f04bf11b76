# SPDX-License-Identifier: Apache-2.0
"""A server of the three APIs whose model is played, and which commits one fault on request (`FaultyToolServer`).

    python -m support.faulty_tool_server --port 8000 [--fault literals/html-entity] [--api-key KEY]

Without a fault it does everything right on every conformance case. What is made up is the model: it looks its answer up
by the prompt (`CasePlayer`), and counts four characters as a token. Everything else is done as a good server does it:
requests are checked, streams come in fragments of any length, answers end at `max_tokens`. It shares no code with the
conformance suite's own translation, so that errors of the two do not cancel.

A fault is a subclass of `Fault`, registered by the id of the case that has to find it. It is decided by the content of
requests and answers: its hooks get no case.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import importlib
import json
import re
import select
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from typing import Any, ClassVar, Literal

import httpx

from dynamo_structural_tags._errors import RequestError
from dynamo_structural_tags._json import shown as quoted
from dynamo_structural_tags._request import read_request
from dynamo_structural_tags.conformance._case import APIS, Case, load_cases
from dynamo_structural_tags.formats import get_format

from .case_player import CasePlayer, shown

__all__ = [
    "FAULTS",
    "MODEL",
    "Asked",
    "Delta",
    "Event",
    "Fault",
    "FaultyToolServer",
    "Refusal",
    "Reply",
    "Said",
    "SaidCall",
    "fault",
    "load_faults",
]

#: The one model that is served.
MODEL = "reference"
_CREATED = 1764547200
_CHARS_A_TOKEN = 4
_PATHS = {"/v1/chat/completions": "chat", "/v1/responses": "responses", "/v1/messages": "messages"}
#: Lengths of the pieces that texts and bytes are cut into, over and over.
_FRAGMENTS = (3, 1, 8, 2, 13, 5)
_READS = (7, 211, 64, 500, 1, 333)
#: The first byte of a character of several, and the first of an escape's characters.
_LEADING, _ESCAPE = re.compile(rb"[\xc0-\xff]"), re.compile(r"\\")


@dataclass(frozen=True)
class Refusal:
    """An error instead of an answer: where in the request, and what is wrong there."""

    path: str
    reason: str
    status: int = 400

    @property
    def message(self) -> str:
        """The text that the caller sees."""
        return f"{self.path}: {self.reason}" if self.path else self.reason


@dataclass(frozen=True)
class Asked:
    """A request, translated into the form of chat completions."""

    api: str
    #: The JSON as it came; {} where it was none.
    body: Mapping[str, Any]
    stream: bool = False
    messages: tuple[Any, ...] = ()
    tools: tuple[Any, ...] = ()
    choice: Any = None
    parallel: bool = True
    max_tokens: int | None = None
    wants_usage: bool = True
    beside: Callable[[], tuple[Asked, ...]] = field(default=tuple, repr=False, compare=False)

    @property
    def others(self) -> tuple[Asked, ...]:
        """The requests that are in flight beside this one."""
        return self.beside()

    def schema(self, name: str) -> Mapping[str, Any]:
        """Return the parameters of the declared tool of that name; {} where there is none."""
        for tool in self.tools:
            function = tool.get("function") if isinstance(tool, Mapping) else None
            if isinstance(function, Mapping) and function.get("name") == name:
                parameters = function.get("parameters")
                return parameters if isinstance(parameters, Mapping) else {}
        return {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the declared tools."""
        functions = [tool.get("function") for tool in self.tools if isinstance(tool, Mapping)]
        return tuple(str(function.get("name")) for function in functions if isinstance(function, Mapping))

    @property
    def user(self) -> str:
        """The text of the last user message."""
        for message in reversed(self.messages):
            if isinstance(message, Mapping) and message.get("role") == "user":
                return _text_of(message.get("content"))
        return ""


@dataclass(frozen=True)
class SaidCall:
    """A call: the arguments as JSON text, which the token limit may have cut (`whole` is False)."""

    id: str
    name: str
    arguments: str
    whole: bool = True

    @property
    def value(self) -> Any:
        """The arguments as a JSON value; the text itself where it is no JSON."""
        try:
            return json.loads(self.arguments)
        except ValueError:
            return self.arguments


@dataclass(frozen=True)
class Said:
    """What was read from the model."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[SaidCall, ...] = ()
    #: In the words of chat completions.
    finish: str = "stop"
    #: The answer is an error: 4xx plain, an error event in a stream.
    error: Refusal | None = None
    prompt_tokens: int = 1
    completion_tokens: int = 1

    def map_calls(self, change: Callable[[SaidCall], SaidCall | None]) -> Said:
        """Return the answer with each call changed, or dropped where the change is None."""
        changed = tuple(new for new in map(change, self.calls) if new is not None)
        return self if changed == self.calls else replace(self, calls=changed)

    def map_values(self, change: Callable[[Any], Any]) -> Said:
        """Return the answer with each scalar in the arguments changed; arguments that are no JSON stay."""

        def changed(call: SaidCall) -> SaidCall:
            value = call.value
            new = _mapped(value, change)
            # What no change touched stays as the model wrote it. 1 and 1.0 are equal, but not the same.
            if isinstance(value, str) or _dumps(new) == _dumps(value):
                return call
            return replace(call, arguments=json.dumps(new, ensure_ascii=False))

        return self.map_calls(changed)

    def map_strings(self, change: Callable[[str], str]) -> Said:
        """Return the answer with each string in the arguments changed; keys stay."""
        return self.map_values(lambda value: change(value) if isinstance(value, str) else value)


@dataclass(frozen=True)
class Delta:
    """A piece of a streamed answer, before it takes an API's form.

    Kinds: `start`, `reasoning`, `text`, `begin` (of a call: `id`, `name`), `arguments`, `end` (of a call; `value` False
    where it was cut), `error` (`value` a `Refusal`), `finish` (`text` in the words of chat completions), `usage`
    (`value` prompt and completion tokens), `done` (`[DONE]`, `response.completed`, `message_stop`).
    """

    kind: str
    text: str = ""
    call: int = 0
    id: str = ""
    name: str = ""
    value: Any = None


@dataclass
class Event:
    """A server-sent event: data that is a string is sent as it stands, any other as JSON."""

    name: str | None
    data: Any

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The choices of a chunk of chat completions; [] for any other event."""
        return self.data.get("choices", []) if isinstance(self.data, dict) else []

    def encode(self) -> bytes:
        """Return its bytes."""
        data = self.data if isinstance(self.data, str) else _dumps(self.data)
        return (f"event: {self.name}\n" if self.name else "").encode() + f"data: {data}\n\n".encode("utf-8", "replace")


@dataclass(frozen=True)
class Reply:
    """What goes out: `parts` are the reads that a client sees. `ends` is `whole`, `cut` or `hang`.

    Without parts, `cut` and `hang` mean that not even a status comes.
    """

    status: int
    headers: Mapping[str, str]
    parts: tuple[bytes, ...]
    ends: Literal["whole", "cut", "hang"] = "whole"


class Fault:
    """What goes wrong. Each hook returns what it is given, or something else; they are called in this order.

    `asked` and `said` are frozen; bodies, lists and events are the hook's own to change. One instance serves one
    server, so a fault that is about what came before may keep state.
    """

    #: The case that has to find it; set by the registry.
    name: ClassVar[str] = ""
    #: The APIs whose form can express it.
    apis: ClassVar[tuple[str, ...]] = APIS

    def request(self, asked: Asked) -> Asked:
        """Change what the server takes from a request."""
        return asked

    def refusal(self, asked: Asked, refusal: Refusal | None) -> Refusal | None:
        """Change whether and how a request is refused; None: it is not."""
        return refusal

    def prompt(self, asked: Asked, messages: tuple[Any, ...]) -> tuple[Any, ...]:
        """Change what the model reads."""
        return messages

    def answer(self, asked: Asked, said: Said) -> Said:
        """Change what was read from the model, for plain answers and streams alike."""
        return said

    def whole(self, asked: Asked, body: dict[str, Any]) -> dict[str, Any]:
        """Change the body of a plain answer."""
        return body

    def deltas(self, asked: Asked, deltas: list[Delta]) -> list[Delta]:
        """Change a stream before it takes the API's form."""
        return deltas

    def events(self, asked: Asked, events: list[Event]) -> list[Event]:
        """Change the events of a stream."""
        return events

    def reply(self, asked: Asked, reply: Reply) -> Reply:
        """Change status, headers and bytes."""
        return reply

    def left(self, asked: Asked) -> None:
        """Take note that a client left a stream before its end."""


#: Every fault, by the id of its case.
FAULTS: dict[str, type[Fault]] = {}


def fault(name: str) -> Callable[[type[Fault]], type[Fault]]:
    """Register a fault by the id of the case that has to find it. Raises ValueError where the name is taken."""

    def register(kind: type[Fault]) -> type[Fault]:
        if name in FAULTS:
            raise ValueError(f"two faults are called {name!r}: {FAULTS[name].__qualname__} and {kind.__qualname__}")
        # A class of its own, so that one class may stand for several faults.
        FAULTS[name] = type(
            kind.__name__, (kind,), {"name": name, "__doc__": kind.__doc__, "__module__": kind.__module__}
        )
        return kind

    return register


def load_faults() -> Mapping[str, type[Fault]]:
    """Return all faults, by the ids of their cases."""
    for module in ("faults_values", "faults_protocol"):
        importlib.import_module(f"{__package__}.{module}")
    return FAULTS


# ---------------------------------------------------------------------------------------------------------------------
# Requests


@dataclass
class _Read:
    """A request's parts in the form of chat completions, and where in the body each message stands."""

    messages: list[Any] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    #: What `read_request` reads.
    policy: dict[str, Any] = field(default_factory=dict)
    max_tokens_key: str = "max_tokens"

    def add(self, place: str, message: Any) -> None:
        self.messages.append(message)
        self.places.append(place)


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _read_chat(body: Mapping[str, Any]) -> _Read:
    read = _Read(policy=dict(body))
    for i, message in enumerate(_items(body.get("messages"))):
        read.add(f"messages[{i}]", message)
    if "max_completion_tokens" in body:
        read.max_tokens_key = "max_completion_tokens"
    return read


def _read_responses(body: Mapping[str, Any]) -> _Read:
    read = _Read(max_tokens_key="max_output_tokens")
    if body.get("instructions") is not None:
        read.add("instructions", {"role": "system", "content": body["instructions"]})
    asked = body.get("input")
    if isinstance(asked, str):
        read.add("input", {"role": "user", "content": asked})
    for i, item in enumerate(_items(asked)):
        place = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "function_call":
            function = {key: item[key] for key in ("name", "arguments") if key in item}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            last = read.messages[-1] if read.messages else None
            if isinstance(last, dict) and last.get("role") == "assistant":
                last["tool_calls"] = [*last.get("tool_calls", ()), call]
            else:
                read.add(place, {"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            message = {"role": "tool", "content": item.get("output")}
            read.add(place, {**message, "tool_call_id": item["call_id"]} if "call_id" in item else message)
        elif kind == "reasoning":
            continue
        else:
            read.add(place, dict(item) if isinstance(item, Mapping) else item)
    read.policy = {key: body[key] for key in ("tools", "parallel_tool_calls") if key in body}
    if isinstance(body.get("tools"), list):
        read.policy["tools"] = [_nested(tool) for tool in body["tools"]]
    if "tool_choice" in body:
        read.policy["tool_choice"] = _nested_choice(body["tool_choice"])
    form = body.get("text")
    if isinstance(form, Mapping) and isinstance(form.get("format"), Mapping):
        asked_format = form["format"]
        read.policy["response_format"] = {"type": asked_format.get("type"), "json_schema": asked_format}
    return read


def _nested(tool: Any) -> Any:
    """Return a flat tool of the Responses API, or what names one, in the form of chat completions."""
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _read_messages(body: Mapping[str, Any]) -> _Read:
    read = _Read()
    if body.get("system") is not None:
        read.add("system", {"role": "system", "content": body["system"]})
    for i, message in enumerate(_items(body.get("messages"))):
        place = f"messages[{i}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
            read.add(place, message)
            continue
        calls, rest = [], []
        for j, block in enumerate(message["content"]):
            kind = block.get("type") if isinstance(block, Mapping) else None
            if kind == "tool_use":
                arguments = json.dumps(block.get("input"), ensure_ascii=False)
                function = {"name": block.get("name"), "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            elif kind == "tool_result":
                result = {"role": "tool", "content": block.get("content", "")}
                known = {"tool_call_id": block["tool_use_id"]} if "tool_use_id" in block else {}
                read.add(f"{place}.content[{j}]", {**result, **known})
            elif kind != "thinking":
                rest.append(block)
        if calls:
            read.add(place, {"role": message.get("role"), "content": rest, "tool_calls": calls})
        elif rest or not message["content"]:
            read.add(place, {"role": message.get("role"), "content": rest})
    tools = body.get("tools")
    if tools is not None:
        read.policy["tools"] = [_of_messages(tool) for tool in tools] if isinstance(tools, list) else tools
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping):
        kinds = {"auto": "auto", "any": "required", "none": "none"}
        kind = choice.get("type")
        if isinstance(kind, str) and kind in kinds:
            read.policy["tool_choice"] = kinds[kind]
        elif kind == "tool":
            name = {"name": choice["name"]} if "name" in choice else {}
            read.policy["tool_choice"] = {"type": "function", "function": name}
        else:
            read.policy["tool_choice"] = choice
        if choice.get("disable_parallel_tool_use") is not None:
            value = choice["disable_parallel_tool_use"]
            read.policy["parallel_tool_calls"] = not value if isinstance(value, bool) else value
    elif choice is not None:
        read.policy["tool_choice"] = choice
    return read


def _nested_choice(choice: Any) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "allowed_tools":
        allowed = {key: value for key, value in choice.items() if key != "type"}
        if isinstance(allowed.get("tools"), list):
            allowed["tools"] = [_nested(tool) for tool in allowed["tools"]]
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return _nested(choice)


def _of_messages(tool: Any) -> Any:
    """Return a tool of the Messages API in the form of chat completions."""
    if not isinstance(tool, Mapping) or tool.get("type", "custom") not in ("custom", "function"):
        return tool
    if isinstance(tool.get("function"), Mapping):
        return tool
    known = {"input_schema": "parameters", "name": "name", "description": "description", "strict": "strict"}
    return {"type": "function", "function": {known[key]: value for key, value in tool.items() if key in known}}


_READERS: Mapping[str, Callable[[Mapping[str, Any]], _Read]] = {
    "chat": _read_chat,
    "responses": _read_responses,
    "messages": _read_messages,
}


def _read(api: str, content: bytes) -> tuple[Asked, Refusal | None]:
    """Translate a body, and say why it is refused; what can be read is read in any case."""
    try:
        body = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return Asked(api, {}), Refusal("body", f"is no JSON: {error}")
    if not isinstance(body, dict):
        return Asked(api, {}), Refusal("body", f"must be a JSON object, not {quoted(body)}")
    read = _READERS[api](body)
    refusal: Refusal | None = None
    try:
        _check(api, body, read)
    except RequestError as error:
        unknown = error.path == "model" and isinstance(body.get("model"), str)
        refusal = Refusal(error.path, error.reason, 404 if unknown else 400)
    limit = body.get(read.max_tokens_key)
    options = body.get("stream_options")
    asked = Asked(
        api=api,
        body=body,
        stream=body.get("stream") is True,
        messages=tuple(read.messages),
        tools=tuple(_items(read.policy.get("tools"))),
        choice=read.policy.get("tool_choice"),
        parallel=read.policy.get("parallel_tool_calls") is not False,
        max_tokens=limit if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0 else None,
        wants_usage=api != "chat" or (isinstance(options, Mapping) and options.get("include_usage") is True),
    )
    return asked, refusal


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _number(body: Mapping[str, Any], key: str, low: float, high: float, *, whole: bool = False) -> None:
    value = body.get(key)
    if value is None:
        return
    fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not fits:
        what = "an integer" if whole else "a number"
        span = f" from {low:g}" + (f" to {high:g}" if high < 1e18 else "")
        raise RequestError(key, f"must be {what}{span}, not {quoted(value)}")


def _kind(value: Any, kind: type | tuple[type, ...], path: str, what: str) -> Any:
    if not isinstance(value, kind):
        raise RequestError(path, f"must be {what}, not {quoted(value)}")
    return value


def _check(api: str, body: Mapping[str, Any], read: _Read) -> None:
    """Raise RequestError for the first fault of a request; its path is the API's own."""
    if "model" not in body:
        raise RequestError("model", "is missing")
    if _kind(body["model"], str, "model", "a string") != MODEL:
        raise RequestError("model", f"{quoted(body['model'])} is not served; served: {MODEL}")
    where = "input" if api == "responses" else "messages"
    if body.get(where) is None:
        raise RequestError(where, "is missing")
    if not (api == "responses" and isinstance(body[where], str)):
        _kind(body[where], list, where, "an array")
    if not body[where]:
        raise RequestError(where, "must not be empty")
    _check_messages(api, read)
    if api == "messages" and body.get("max_tokens") is None:
        raise RequestError("max_tokens", "is missing")
    _number(body, read.max_tokens_key, 1, 1e18, whole=True)
    _number(body, "temperature", 0, 1 if api == "messages" else 2)
    _number(body, "top_p", 0, 1)
    _number(body, "seed", -(2**63), 2**63, whole=True)
    _number(body, "n", 1, 1, whole=True)
    for key in ("stream", "parallel_tool_calls", "store"):
        if body.get(key) is not None:
            _kind(body[key], bool, key, "true or false")
    if body.get("stream_options") is not None:
        _kind(body["stream_options"], Mapping, "stream_options", "an object")
        if body.get("stream") is not True:
            raise RequestError("stream_options", "is given, but `stream` is not true")
    stop = body.get("stop")
    if stop is not None and not isinstance(stop, str):
        for i, word in enumerate(_kind(stop, list, "stop", "a string or an array")):
            _kind(word, str, f"stop[{i}]", "a string")
    try:
        read_request(read.policy)
        # Whatever may be called here, each tool has to be one whose calls can be written.
        policy = read_request({"tools": read.policy.get("tools")})
        if policy is not None:
            get_format("hermes").structural_tag(policy)
            for tool in policy.tools:
                if "object" not in (types := tool.parameters.get("type", "object")):
                    raise RequestError(f"{tool.path}.parameters.type", f"is {quoted(types)}: arguments are an object")
    except RequestError as error:
        raise RequestError(_own_path(api, error.path), error.reason) from None


def _own_path(api: str, path: str) -> str:
    """Return the path of chat completions as the API's own."""
    if api == "responses":
        path = path.replace("].function", "]", 1).replace("tool_choice.function", "tool_choice", 1)
        return path.replace("tool_choice.allowed_tools", "tool_choice", 1)
    if api == "messages":
        path = path.replace("].function.parameters", "].input_schema", 1).replace("].function", "]", 1)
        path = path.replace("parallel_tool_calls", "tool_choice.disable_parallel_tool_use", 1)
        return path.replace("tool_choice.function", "tool_choice", 1)
    return path


def _check_messages(api: str, read: _Read) -> None:
    called: set[Any] = set()
    for place, message in zip(read.places, read.messages, strict=True):
        _kind(message, Mapping, place, "an object")
        if "role" not in message:
            raise RequestError(f"{place}.role", "is missing")
        roles = ("user", "assistant", "system", "developer", "tool")
        if message["role"] not in roles:
            raise RequestError(f"{place}.role", f"must be one of {', '.join(roles)}, not {quoted(message['role'])}")
        calls = message.get("tool_calls")
        content = message.get("content")
        output = ".output" if api == "responses" and message["role"] == "tool" else ".content"
        if content is None and not (message["role"] == "assistant" and calls):
            raise RequestError(place + output, "is missing")
        if content is not None and not isinstance(content, str):
            for i, part in enumerate(_kind(content, list, place + output, "a string or an array")):
                _kind(part, Mapping, f"{place}{output}[{i}]", "an object")
                if part.get("type") not in ("text", "input_text", "output_text"):
                    raise RequestError(f"{place}{output}[{i}].type", f"must be text, not {quoted(part.get('type'))}")
                _kind(part.get("text"), str, f"{place}{output}[{i}].text", "a string")
        if calls is not None:
            if message["role"] != "assistant":
                raise RequestError(f"{place}.tool_calls", f"stands in a message of role {message['role']!r}")
            for i, call in enumerate(_kind(calls, list, f"{place}.tool_calls", "an array")):
                _check_call(f"{place}.tool_calls[{i}]", call)
                called.add(call["id"])
        if message["role"] == "tool":
            key = {"chat": "tool_call_id", "responses": "call_id", "messages": "tool_use_id"}[api]
            if "tool_call_id" not in message:
                raise RequestError(f"{place}.{key}", "is missing")
            answered = _kind(message["tool_call_id"], str, f"{place}.{key}", "a string")
            if answered not in called:
                raise RequestError(f"{place}.{key}", f"no call {quoted(answered)} stands before this result")


def _check_call(place: str, call: Any) -> None:
    _kind(call, Mapping, place, "an object")
    _kind(call.get("id"), str, f"{place}.id", "a string")
    function = _kind(call.get("function"), Mapping, f"{place}.function", "an object")
    _kind(function.get("name"), str, f"{place}.function.name", "a string")
    arguments = _kind(function.get("arguments"), str, f"{place}.function.arguments", "a string")
    try:
        value = json.loads(arguments)
    except ValueError as error:
        raise RequestError(f"{place}.function.arguments", f"{quoted(arguments)} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"{place}.function.arguments", f"must be JSON of an object, not {quoted(value)}")


# ---------------------------------------------------------------------------------------------------------------------
# Answers


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    return change(value)


def _key(asked: Asked) -> str:
    """Return what ids are made of: the request's content."""
    return f"{zlib.crc32(shown([m for m in asked.messages if isinstance(m, Mapping)]).encode('utf-8', 'replace')):08x}"


def _tokens(characters: int) -> int:
    return max(1, -(-characters // _CHARS_A_TOKEN))


def _say(player: CasePlayer, asked: Asked, messages: Sequence[Any]) -> Said:
    """Let the played model answer what it was shown."""
    read = [message for message in messages if isinstance(message, Mapping)]
    prompt = shown(read) + "".join(_dumps(tool) for tool in asked.tools)
    speech = player.from_messages(read)
    reasoning, text = (speech.reasoning, speech.text) if speech else ("", "I do not know.")
    earlier = sum(len(_items(message.get("tool_calls"))) for message in read)
    key = _key(asked)
    left = (asked.max_tokens or 1 << 40) * _CHARS_A_TOKEN
    wanted = len(reasoning) + len(text) + sum(len(a) + len(b) for a, b in (speech.calls if speech else ()))
    used = min(wanted, left)
    reasoning, left = reasoning[:left], left - len(reasoning)
    text, left = text[: max(0, left)], left - len(text)
    calls: list[SaidCall] = []
    for i, (name, arguments) in enumerate(speech.calls if speech else ()):
        left -= len(name)
        if left <= 0:
            break
        calls.append(SaidCall(f"call_{key}_{earlier + i}", name, arguments[:left], len(arguments) <= left))
        left -= len(arguments)
    finish = "length" if left < 0 else "tool_calls" if calls else "stop"
    said = Said(text, reasoning, tuple(calls), finish, None, _tokens(len(prompt)), _tokens(used))
    undeclared = [call.name for call in calls if call.name not in asked.names]
    if undeclared:
        callable_ = ", ".join(asked.names) or "none"
        reason = f"undeclared_tool: no tool {quoted(undeclared[0])} may be called here; callable: {callable_}"
        return replace(said, error=Refusal("", reason))
    return said


def _cuts(length: int, sizes: Sequence[int], most: int) -> Iterator[int]:
    """Yield where to cut: pieces of these sizes, larger ones where there would be too many."""
    factor = max(1, length * len(sizes) // (sum(sizes) * most))
    at, i = 0, 0
    while (at := at + sizes[i % len(sizes)] * factor) < length:
        yield at
        i += 1


def _fragments(text: str) -> list[str]:
    """Cut a text into fragments; the first few escapes in it are cut in two."""
    escapes = [match.end() for match in islice(_ESCAPE.finditer(text), 4)]
    cuts = sorted({*_cuts(len(text), _FRAGMENTS, 24), *escapes})
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) if b > a]


def _parts(content: bytes) -> tuple[bytes, ...]:
    """Cut bytes as they may come over a wire; the first few characters of several bytes are cut in two."""
    several = [match.end() for match in islice(_LEADING.finditer(content), 8)]
    cuts = sorted({*_cuts(len(content), _READS, 24), *several})
    return tuple(content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True) if b > a)


def _deltas(asked: Asked, said: Said) -> list[Delta]:
    deltas = [Delta("start")]
    deltas += [Delta("reasoning", piece) for piece in _fragments(said.reasoning)]
    deltas += [Delta("text", piece) for piece in _fragments(said.text)]
    if said.error is not None:
        return [*deltas, Delta("error", value=said.error), Delta("done")]
    for i, call in enumerate(said.calls):
        deltas.append(Delta("begin", call=i, id=call.id, name=call.name))
        deltas += [Delta("arguments", piece, call=i) for piece in _fragments(call.arguments)]
        deltas.append(Delta("end", call=i, value=call.whole))
    deltas.append(Delta("finish", said.finish))
    if asked.wants_usage:
        deltas.append(Delta("usage", value=(said.prompt_tokens, said.completion_tokens)))
    return [*deltas, Delta("done")]


def _error_body(api: str, refusal: Refusal) -> dict[str, Any]:
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    if api == "messages":
        return {"type": "error", "error": {"type": kind, "message": refusal.message}}
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.path or None, "code": refusal.status}}


class _Chat:
    """`/v1/chat/completions`."""

    @staticmethod
    def usage(prompt: int, completion: int) -> dict[str, Any]:
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    @classmethod
    def whole(cls, asked: Asked, said: Said) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": said.text or (None if said.calls else "")}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in said.calls
            ]
        return {
            "id": f"chatcmpl-{_key(asked)}",
            "object": "chat.completion",
            "created": _CREATED,
            "model": MODEL,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": said.finish}],
            "usage": cls.usage(said.prompt_tokens, said.completion_tokens),
        }

    @classmethod
    def events(cls, asked: Asked, deltas: Sequence[Delta]) -> list[Event]:
        head = {
            "id": f"chatcmpl-{_key(asked)}",
            "object": "chat.completion.chunk",
            "created": _CREATED,
            "model": MODEL,
        }
        usage = {"usage": None} if asked.wants_usage else {}

        def chunk(delta: dict[str, Any], finish: str | None = None) -> Event:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
            return Event(None, {**head, "choices": [choice], **usage})

        events = []
        for delta in deltas:
            if delta.kind == "start":
                events.append(chunk({"role": "assistant", "content": None}))
            elif delta.kind == "reasoning":
                events.append(chunk({"reasoning_content": delta.text}))
            elif delta.kind == "text":
                events.append(chunk({"content": delta.text}))
            elif delta.kind == "begin":
                function = {"name": delta.name, "arguments": ""}
                call = {"index": delta.call, "id": delta.id, "type": "function", "function": function}
                events.append(chunk({"tool_calls": [call]}))
            elif delta.kind == "arguments":
                events.append(chunk({"tool_calls": [{"index": delta.call, "function": {"arguments": delta.text}}]}))
            elif delta.kind == "finish":
                events.append(chunk({}, delta.text))
            elif delta.kind == "usage":
                events.append(Event(None, {**head, "choices": [], "usage": cls.usage(*delta.value)}))
            elif delta.kind == "error":
                events.append(Event(None, _error_body("chat", delta.value)))
            elif delta.kind == "done":
                events.append(Event(None, "[DONE]"))
        return events


class _Responses:
    """`/v1/responses`. Reasoning is shown where a summary of it is asked for, as OpenAI's own does."""

    @staticmethod
    def call(call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": call_id.replace("call_", "fc_", 1),
            "call_id": call_id,
            "name": name,
            "arguments": arguments,
            "status": status,
        }

    @staticmethod
    def part(kind: str, text: str) -> dict[str, Any]:
        if kind == "reasoning":
            return {"type": "summary_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    @classmethod
    def item(cls, kind: str, key: str, text: str | None, status: str) -> dict[str, Any]:
        parts = [] if text is None else [cls.part(kind, text)]
        if kind == "reasoning":
            return {"type": "reasoning", "id": f"rs_{key}", "summary": parts, "status": status}
        return {"type": "message", "id": f"msg_{key}", "role": "assistant", "content": parts, "status": status}

    @staticmethod
    def shows(asked: Asked, kind: str) -> bool:
        wanted = asked.body.get("reasoning")
        return kind != "reasoning" or (isinstance(wanted, dict) and wanted.get("summary") is not None)

    @staticmethod
    def usage(prompt: int, completion: int) -> dict[str, Any]:
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        }

    @staticmethod
    def response(asked: Asked, status: str, output: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": f"resp_{_key(asked)}",
            "object": "response",
            "created_at": _CREATED,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.body.get("instructions"),
            "metadata": {},
            "model": MODEL,
            "output": output,
            "parallel_tool_calls": asked.parallel,
            "temperature": 1.0,
            "tool_choice": asked.body.get("tool_choice", "auto"),
            "tools": asked.body.get("tools", []),
            "top_p": 1.0,
            "usage": usage,
        }

    @classmethod
    def whole(cls, asked: Asked, said: Said) -> dict[str, Any]:
        status = "incomplete" if said.finish == "length" else "completed"
        output = [
            cls.item(kind, _key(asked), text, status if kind == "text" and not said.calls else "completed")
            for kind, text in (("reasoning", said.reasoning), ("text", said.text))
            if text and cls.shows(asked, kind)
        ]
        output += [
            cls.call(call.id, call.name, call.arguments, "completed" if call.whole else "incomplete")
            for call in said.calls
        ]
        return cls.response(asked, status, output, cls.usage(said.prompt_tokens, said.completion_tokens))

    @classmethod
    def events(cls, asked: Asked, deltas: Sequence[Delta]) -> list[Event]:
        events: list[Event] = []
        output: list[dict[str, Any]] = []
        #: Of the text or reasoning that is being written: its kind, and its place in the output.
        running: tuple[str, int] | None = None
        calls: dict[int, int] = {}
        usage = next((cls.usage(*delta.value) for delta in deltas if delta.kind == "usage"), None)
        finish = next((delta.text for delta in deltas if delta.kind == "finish"), None)

        def send(name: str, /, **fields: Any) -> None:
            kind = f"response.{name}"
            events.append(Event(kind, {"type": kind, "sequence_number": len(events), **copy.deepcopy(fields)}))

        def tell(kind: str, at: int, what: str, **fields: Any) -> None:
            """Send an event about the part, or the text, of an item."""
            stem, index = ("reasoning_summary_", "summary_index") if kind == "reasoning" else ("", "content_index")
            part, text = ("part", "text") if kind == "reasoning" else ("content_part", "output_text")
            name = f"{stem}{part if 'part' in fields else text}.{what}"
            send(name, item_id=output[at]["id"], output_index=at, **{index: 0}, **fields)

        def end_text() -> None:
            nonlocal running
            if running is None:
                return
            (kind, at), running = running, None
            item = output[at]
            (part,) = item["summary" if kind == "reasoning" else "content"]
            tell(kind, at, "done", text=part["text"])
            tell(kind, at, "done", part=part)
            item["status"] = "completed"
            send("output_item.done", output_index=at, item=item)

        for delta in deltas:
            if delta.kind == "start":
                send("created", response=cls.response(asked, "in_progress", [], None))
                send("in_progress", response=cls.response(asked, "in_progress", [], None))
            elif delta.kind in ("reasoning", "text"):
                if not cls.shows(asked, delta.kind):
                    continue
                parts = "summary" if delta.kind == "reasoning" else "content"
                if running is None or running[0] != delta.kind:
                    end_text()
                    running = (delta.kind, len(output))
                    key = _key(asked) if not any(item["type"] == "message" for item in output) else f"{len(output)}"
                    output.append(cls.item(delta.kind, key, None, "in_progress"))
                    send("output_item.added", output_index=running[1], item=output[-1])
                    output[-1][parts] = [cls.part(delta.kind, "")]
                    tell(*running, "added", part=output[-1][parts][0])
                output[running[1]][parts][0]["text"] += delta.text
                tell(*running, "delta", delta=delta.text)
            elif delta.kind == "begin":
                end_text()
                calls[delta.call] = len(output)
                output.append(cls.call(delta.id, delta.name, "", "in_progress"))
                send("output_item.added", output_index=calls[delta.call], item=output[-1])
            elif delta.kind == "arguments":
                at = calls.get(delta.call, delta.call)
                item = output[at] if delta.call in calls else {"id": f"fc_{delta.call}", "arguments": ""}
                item["arguments"] += delta.text
                send("function_call_arguments.delta", item_id=item["id"], output_index=at, delta=delta.text)
            elif delta.kind == "end" and delta.call in calls:
                at = calls[delta.call]
                item = output[at]
                if delta.value is not False:
                    arguments = {"name": item["name"], "arguments": item["arguments"]}
                    send("function_call_arguments.done", item_id=item["id"], output_index=at, **arguments)
                item["status"] = "incomplete" if delta.value is False else "completed"
                send("output_item.done", output_index=at, item=item)
            elif delta.kind == "error":
                error = {"code": "invalid_request_error", "message": delta.value.message}
                send("failed", response={**cls.response(asked, "failed", output, None), "error": error})
            elif delta.kind == "done" and finish is not None:
                end_text()
                status = "incomplete" if finish == "length" else "completed"
                send(status, response=cls.response(asked, status, output, usage))
        return events


class _Messages:
    """`/v1/messages`."""

    REASONS: ClassVar[Mapping[str, str]] = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}

    @staticmethod
    def message(asked: Asked, content: list[Any], reason: str | None, usage: dict[str, Any] | None) -> dict[str, Any]:
        message = {
            "id": f"msg_{_key(asked)}",
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": None,
        }
        return message if usage is None else {**message, "usage": usage}

    @classmethod
    def whole(cls, asked: Asked, said: Said) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if said.reasoning:
            content.append({"type": "thinking", "thinking": said.reasoning, "signature": _key(asked)})
        if said.text:
            content.append({"type": "text", "text": said.text})
        content += [
            # An object cannot be cut: of a call that was, only its name is there.
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.value if call.whole else {}}
            for call in said.calls
        ]
        usage = {"input_tokens": said.prompt_tokens, "output_tokens": said.completion_tokens}
        return cls.message(asked, content, cls.REASONS.get(said.finish, said.finish), usage)

    @classmethod
    def events(cls, asked: Asked, deltas: Sequence[Delta]) -> list[Event]:
        events: list[Event] = []
        running: str | None = None
        blocks = 0
        calls: dict[int, int] = {}
        usage = next((delta.value for delta in deltas if delta.kind == "usage"), None)

        def send(kind: str, /, **fields: Any) -> None:
            events.append(Event(kind, {"type": kind, **fields}))

        def end_text() -> None:
            nonlocal running
            if running == "reasoning":
                signature = {"type": "signature_delta", "signature": _key(asked)}
                send("content_block_delta", index=blocks - 1, delta=signature)
            if running is not None:
                send("content_block_stop", index=blocks - 1)
            running = None

        for delta in deltas:
            if delta.kind == "start":
                begun = None if usage is None else {"input_tokens": usage[0], "output_tokens": 1}
                send("message_start", message=cls.message(asked, [], None, begun))
                send("ping")
            elif delta.kind in ("reasoning", "text"):
                if running != delta.kind:
                    end_text()
                    running = delta.kind
                    thinking = {"type": "thinking", "thinking": "", "signature": ""}
                    block = thinking if delta.kind == "reasoning" else {"type": "text", "text": ""}
                    send("content_block_start", index=blocks, content_block=block)
                    blocks += 1
                word = "thinking" if delta.kind == "reasoning" else "text"
                send("content_block_delta", index=blocks - 1, delta={"type": f"{word}_delta", word: delta.text})
            elif delta.kind == "begin":
                end_text()
                calls[delta.call] = blocks
                called = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
                send("content_block_start", index=blocks, content_block=called)
                blocks += 1
            elif delta.kind == "arguments":
                piece = {"type": "input_json_delta", "partial_json": delta.text}
                send("content_block_delta", index=calls.get(delta.call, delta.call), delta=piece)
            elif delta.kind == "end":
                send("content_block_stop", index=calls.get(delta.call, delta.call))
            elif delta.kind == "finish":
                end_text()
                reason = {"stop_reason": cls.REASONS.get(delta.text, delta.text), "stop_sequence": None}
                counted: dict[str, Any] = {} if usage is None else {"usage": {"output_tokens": usage[1]}}
                send("message_delta", delta=reason, **counted)
            elif delta.kind == "error":
                events.append(Event("error", _error_body("messages", delta.value)))
            elif delta.kind == "done" and not any(event.name == "error" for event in events):
                send("message_stop")
        return events


_FORMS: Mapping[str, type[_Chat] | type[_Responses] | type[_Messages]] = {
    "chat": _Chat,
    "responses": _Responses,
    "messages": _Messages,
}


def _plain_reply(body: Any, status: int = 200) -> Reply:
    content = _dumps(body).encode("utf-8", "replace")
    return Reply(status, {"content-type": "application/json", "content-length": str(len(content))}, (content,))


def _refusal_reply(api: str, refusal: Refusal) -> Reply:
    return _plain_reply(_error_body(api, refusal), refusal.status)


def _stream_reply(events: Iterable[Event]) -> Reply:
    headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
    return Reply(200, headers, _parts(b"".join(event.encode() for event in events)))


@dataclass(frozen=True)
class _Faultless:
    """All stages of a right answer to a request: what a fault leaves alone need not be made again."""

    asked: Asked
    refusal: Refusal | None
    reply: Reply
    said: Said | None = None
    deltas: list[Delta] = field(default_factory=list)


@dataclass(eq=False)
class _Flight:
    """A request from its arrival to the end of its answer."""

    faultless: _Faultless
    asked: Asked


#: Right answers by path and body: servers of the same cases may share one.
Cache = MutableMapping[tuple[str, bytes], _Faultless]


class FaultyToolServer:
    """Answers the three APIs, in this process (`transport`) or over a socket (`serve`).

    Args:
        cases: what the model knows to answer; servers of the same cases may share a player.
        fault: what goes wrong; None: nothing.
        api_key: the key that requests must bring; None: none.
        cache: right answers, shared by servers of the same cases.
    """

    def __init__(
        self,
        cases: Iterable[Case] | CasePlayer,
        fault: Fault | None = None,
        *,
        api_key: str | None = None,
        cache: Cache | None = None,
    ) -> None:
        self.player = cases if isinstance(cases, CasePlayer) else CasePlayer(cases)
        self.fault = fault
        self.api_key = api_key
        #: Whether the fault has asked for the requests beside one.
        self.looked_beside = False
        #: What the fault's hooks raised: a fault that breaks down is none.
        self.broken_hooks: list[Exception] = []
        #: Path and body of each request that came.
        self.seen: list[tuple[str, bytes]] = []
        self._cache: Cache = {} if cache is None else cache
        self._flying: list[_Flight] = []
        self._lock = threading.Lock()

    def gate(self, method: str, path: str, headers: Mapping[str, str]) -> Reply | None:
        """Answer what needs no model: a wrong key, a wrong path, the list of models; else None."""
        keys = (headers.get("authorization", "").removeprefix("Bearer "), headers.get("x-api-key", ""))
        if self.api_key is not None and self.api_key not in keys:
            return _refusal_reply("chat", Refusal("", "the API key is missing or wrong", 401))
        if (method, path) == ("GET", "/v1/models"):
            card = {"id": MODEL, "object": "model", "created": _CREATED, "owned_by": "fake", "type": "model"}
            return _plain_reply({"object": "list", "data": [card]})
        if path not in _PATHS:
            return _refusal_reply("chat", Refusal("", f"there is no {path} here", 404))
        if method != "POST":
            return _refusal_reply(_PATHS[path], Refusal("", f"{path} takes POST, not {method}", 405))
        return None

    def arrive(self, path: str, content: bytes) -> _Flight:
        """Take a request in; every flight ends with `land`."""
        faultless = self._cache.get((path, content))
        if faultless is None:
            faultless = self._cache[path, content] = self._faultless(_PATHS[path], content)
        flight = _Flight(faultless, faultless.asked)
        with self._lock:
            self.seen.append((path, content))
            self._flying.append(flight)
        return flight

    def answer(self, flight: _Flight) -> Reply:
        """Return the answer to a request that arrived."""
        if self.fault is None:
            return flight.faultless.reply
        try:
            return self._answer(flight, self.fault)
        except Exception as error:
            self.broken_hooks.append(error)
            raise

    def _answer(self, flight: _Flight, broken: Fault) -> Reply:
        right = flight.faultless
        plain = asked = replace(right.asked, beside=lambda: self._beside(flight))
        if _has(broken, "request"):
            asked = broken.request(asked)
        # Whether anything differs from the right answer so far.
        changed = asked is not plain and asked != plain
        flight.asked = asked
        refusal = broken.refusal(asked, right.refusal)
        changed |= refusal is not right.refusal
        if refusal is not None:
            reply = _refusal_reply(asked.api, refusal) if changed else right.reply
        else:
            reply = self._answered(right, asked, broken, changed)
        return broken.reply(asked, reply)

    def _beside(self, flight: _Flight) -> tuple[Asked, ...]:
        self.looked_beside = True
        with self._lock:
            return tuple(other.asked for other in self._flying if other is not flight)

    def land(self, flight: _Flight, *, left: bool) -> None:
        """Note that an answer ended, or that its client left it before."""
        with self._lock:
            self._flying.remove(flight)
        if left and self.fault is not None:
            self.fault.left(flight.asked)

    def _faultless(self, api: str, content: bytes) -> _Faultless:
        asked, refusal = _read(api, content)
        if refusal is not None:
            return _Faultless(asked, refusal, _refusal_reply(api, refusal))
        said = _say(self.player, asked, asked.messages)
        if asked.stream:
            deltas = _deltas(asked, said)
            return _Faultless(asked, None, _stream_reply(_FORMS[api].events(asked, deltas)), said, deltas)
        if said.error is not None:
            return _Faultless(asked, None, _refusal_reply(api, said.error), said)
        return _Faultless(asked, None, _plain_reply(_FORMS[api].whole(asked, said)), said)

    def _answered(self, right: _Faultless, asked: Asked, broken: Fault, changed: bool) -> Reply:
        """Answer what was not refused; `changed`: the request is no longer the right one."""
        messages = broken.prompt(asked, asked.messages)
        changed |= messages != asked.messages
        said = right.said if not changed and right.said is not None else _say(self.player, asked, messages)
        answer = broken.answer(asked, said)
        changed |= answer is not said and answer != said
        form = _FORMS[asked.api]
        if not asked.stream:
            if answer.error is not None:
                return _refusal_reply(asked.api, answer.error) if changed else right.reply
            if not changed and not _has(broken, "whole"):
                return right.reply
            return _plain_reply(broken.whole(asked, form.whole(asked, answer)))
        deltas = _deltas(asked, answer) if changed else right.deltas
        if _has(broken, "deltas"):
            given = broken.deltas(asked, list(deltas))
            changed |= given != deltas
            deltas = given
        if not changed and not _has(broken, "events"):
            return right.reply
        return _stream_reply(broken.events(asked, form.events(asked, deltas)))

    def transport(self) -> httpx.AsyncBaseTransport:
        """Return a way in for httpx that needs no socket; a client that waits too long is told so at once."""
        return _Transport(self)

    def serve(self, port: int = 0) -> ThreadingHTTPServer:
        """Return an HTTP server on 127.0.0.1 that is yet to be run (`serve_forever`); port 0 takes a free one."""
        return _SocketServer(self, port)


def _has(fault: Fault, hook: str) -> bool:
    """Say whether a fault has a hook of its own."""
    return getattr(type(fault), hook) is not getattr(Fault, hook)


class _Transport(httpx.AsyncBaseTransport):
    def __init__(self, server: FaultyToolServer) -> None:
        self._server = server

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        content = await request.aread()
        gate = self._server.gate(request.method, request.url.path, request.headers)
        if gate is not None:
            return httpx.Response(gate.status, headers=dict(gate.headers), content=b"".join(gate.parts))
        flight = self._server.arrive(request.url.path, content)
        try:
            # Requests that were sent together are to be here together.
            for _ in range(3):
                await asyncio.sleep(0)
            reply = self._server.answer(flight)
        except BaseException:
            self._server.land(flight, left=True)
            raise
        if not reply.parts and reply.ends != "whole":
            self._server.land(flight, left=False)
            raise _ended(reply, request)
        return httpx.Response(
            reply.status, headers=dict(reply.headers), stream=_Stream(self._server, flight, reply, request)
        )


def _ended(reply: Reply, request: httpx.Request) -> httpx.TransportError:
    """Return what httpx raises where a real answer is cut, or does not go on."""
    if reply.ends == "hang":
        return httpx.ReadTimeout("no answer within the time", request=request)
    return httpx.RemoteProtocolError("the peer closed the connection before the answer was complete", request=request)


class _Stream(httpx.AsyncByteStream):
    def __init__(self, server: FaultyToolServer, flight: _Flight, reply: Reply, request: httpx.Request) -> None:
        self._server = server
        self._flight: _Flight | None = flight
        self._reply = reply
        self._request = request
        self._sent = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._reply.parts:
            self._sent += 1
            yield part
            await asyncio.sleep(0)
        if self._reply.ends != "whole":
            raise _ended(self._reply, self._request)

    async def aclose(self) -> None:
        if self._flight is not None:
            self._server.land(self._flight, left=self._sent < len(self._reply.parts))
            self._flight = None


class _SocketServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, tools: FaultyToolServer, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.tools = tools

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that leave."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _SocketServer

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of requests."""

    def do_GET(self) -> None:
        self._handle(b"")

    def do_POST(self) -> None:
        self._handle(self.rfile.read(int(self.headers.get("content-length", "0"))))

    def _handle(self, content: bytes) -> None:
        tools = self.server.tools
        path = self.path.partition("?")[0]
        gate = tools.gate(self.command, path, {key.lower(): value for key, value in self.headers.items()})
        if gate is not None:
            self._send(gate)
            return
        flight = tools.arrive(path, content)
        left = True
        try:
            # Requests that were sent together are to be here together.
            time.sleep(0.02)
            self._send(tools.answer(flight))
            left = False
        finally:
            tools.land(flight, left=left)

    def _send(self, reply: Reply) -> None:
        if reply.parts or reply.ends == "whole":
            whole = "content-length" in reply.headers and reply.ends == "whole"
            self.send_response(reply.status)
            for key, value in reply.headers.items():
                if whole or key != "content-length":
                    self.send_header(key, value)
            if not whole:
                self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for part in reply.parts:
                self._leave_with_the_client()
                self.wfile.write(part if whole else b"%x\r\n%b\r\n" % (len(part), part))
                self.wfile.flush()
            if reply.ends == "whole":
                self.wfile.write(b"" if whole else b"0\r\n\r\n")
                return
        if reply.ends == "hang":
            self.rfile.read(1)
        self.close_connection = True

    def _leave_with_the_client(self) -> None:
        """Raise ConnectionError where the client has closed its side."""
        if select.select([self.connection], [], [], 0)[0] and not self.rfile.peek(1):  # type: ignore[attr-defined]
            raise ConnectionResetError("the client left")


def main() -> None:
    """Serve until it is killed."""
    parser = argparse.ArgumentParser(prog="faulty_tool_server", description="A fake server whose model is played.")
    parser.add_argument("--port", type=int, default=0, help="0, the default: a free one, which the first line names")
    parser.add_argument("--fault", choices=sorted(load_faults()), metavar="NAME", help="what goes wrong")
    parser.add_argument("--api-key", help="the key that requests must bring")
    parser.add_argument("--list", action="store_true", help="print the faults and leave")
    args = parser.parse_args()
    if args.list:
        for name, kind in sorted(load_faults().items()):
            print(f"{name}: {kind.__doc__}")
        return
    fault = load_faults()[args.fault]() if args.fault else None
    server = FaultyToolServer(load_cases(), fault, api_key=args.api_key).serve(args.port)
    print(f"http://127.0.0.1:{server.server_port}/v1 model {MODEL}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    # Not this file's own: the faults register in the module of that name.
    from support import faulty_tool_server

    faulty_tool_server.main()
