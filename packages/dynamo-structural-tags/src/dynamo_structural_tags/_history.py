# SPDX-License-Identifier: Apache-2.0
"""From the messages of a request to the prompt, so that a call in the history stands there as it was generated.

A chat template gets the arguments of a call as a mapping, and writes what is no string by `tojson` or `string`. Both
give back the very text that the client sent, not another spelling of its value: `1.0` stays `1.0`, `{"a":1}` gets no
space. What is malformed, or has no text in the model's format, is a `RequestError` that names its place.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from ._errors import RequestError
from ._format import Format
from ._json import DECODER, shown, unique
from ._request import Tool

__all__ = ["ChatTemplate", "History", "Spellings", "read_arguments", "read_messages"]

_SPACE = re.compile(r"[ \t\r\n]*")
_SPACED = re.compile(r"[ \t\r\n]")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
#: The identifiers of formats that number their calls (Kimi).
_NUMBERED = re.compile(r"functions\.(.+):([0-9]{1,4})", re.DOTALL)


class _Object(dict[str, Any]):
    """A JSON object that carries its text."""

    source: str

    def __str__(self) -> str:
        return self.source


class _Array(list[Any]):
    """A JSON array that carries its text."""

    source: str

    def __str__(self) -> str:
        return self.source


class _Integer(int):
    """A JSON number without fraction and exponent that carries its text."""

    source: str

    def __str__(self) -> str:
        return self.source


class _Float(float):
    """A JSON number that carries its text."""

    source: str

    def __str__(self) -> str:
        return self.source


class _Constant:
    """`true`, `false` or `null`: prints as JSON writes it, where Python's own would print `True` or `None`."""

    def __init__(self, value: bool | None) -> None:
        self.value = value
        self.source = json.dumps(value)

    def __str__(self) -> str:
        return self.source

    def __bool__(self) -> bool:
        return bool(self.value)

    def __eq__(self, other: object) -> bool:
        return other.value is self.value if isinstance(other, _Constant) else other is self.value

    def __hash__(self) -> int:
        return hash(self.value)


_SOURCED = (_Object, _Array, _Integer, _Float, _Constant)


def _with_source(value: Any, source: str) -> Any:
    """Return a JSON value that carries its text; a string, which is written as it is, as it is."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool):
        return _Constant(value)
    kinds = {dict: _Object, list: _Array, int: _Integer, float: _Float}
    sourced = kinds[type(value)](value)
    sourced.source = source
    return sourced


def read_arguments(text: str, path: str) -> Mapping[str, Any]:
    """Read the arguments of a call, a JSON object. Its values, and it as a whole, print as they stand in `text`.

    Raises:
        RequestError: at `path`: not JSON, not an object, or a key that stands twice.
    """
    text = text.strip(" \t\r\n") or "{}"  # some clients send an empty text for a call without arguments
    if not text.startswith("{"):
        raise RequestError(path, f"must be the JSON text of an object, not {shown(text)}")
    pairs: list[tuple[str, Any]] = []
    try:
        DECODER.decode(text)  # all of it, with the decoder's own messages; below, only the places are new
        at = _skip(text, 1)
        while text[at] != "}":
            key, at = DECODER.raw_decode(text, at)
            at = _skip(text, _skip(text, at) + 1)  # past the colon
            value, end = DECODER.raw_decode(text, at)
            pairs.append((key, _with_source(value, text[at:end])))
            at = _skip(text, end)
            if text[at] == ",":
                at = _skip(text, at + 1)
        found = _Object(unique(pairs))
    except (ValueError, RecursionError) as error:
        raise RequestError(path, f"must be the JSON text of an object: {error}") from error
    found.source = text
    return found


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


class History:
    """The messages of a request, ready for a chat template."""

    def __init__(self, messages: list[dict[str, Any]], call_ids: frozenset[str]) -> None:
        #: As the request has them, with plain contents and with arguments that print as they were sent.
        self.messages = messages
        #: The identifiers of all calls, as the template gets them.
        self.call_ids = call_ids


class Spellings:
    """How the calls of recent answers were spelled, by their value.

    `/v1/messages` keeps a call's arguments as a value, and Dynamo spells that anew: without spaces, `1e2` as `100.0`,
    an integer beyond 64 bits as a float. The prompt is to hold what the model wrote. Bounded, and thread-safe.
    """

    #: What an entry takes beside its text, in bytes; and how many spellings of one value are kept.
    _ENTRY, _EACH = 400, 4

    def __init__(self, size: int = 16 << 20) -> None:
        """Make an empty memory of `size` bytes."""
        self._size = size
        self._used = 0
        self._lock = threading.Lock()
        self._texts: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()

    @staticmethod
    def _key(name: str, text: str) -> bytes:
        def integer(digits: str) -> int | float:
            value = int(digits)
            return value if -(2**63) <= value < 2**64 else float(value)

        value = json.dumps([name, json.loads(text, parse_int=integer)])
        return hashlib.blake2b(value.encode(), digest_size=16).digest()

    def _takes(self, texts: tuple[bytes, ...]) -> int:
        return self._ENTRY + sum(map(len, texts)) if texts else 0

    def add(self, name: str, text: str) -> None:
        """Remember the arguments of a call."""
        try:
            key, new = self._key(name, text), text.encode()
        except (ValueError, OverflowError, RecursionError):
            return
        with self._lock:
            known = self._texts.pop(key, ())
            self._texts[key] = kept = (*(one for one in known if one != new), new)[-self._EACH :]
            self._used += self._takes(kept) - self._takes(known)
            while self._used > self._size:
                _, dropped = self._texts.popitem(last=False)
                self._used -= self._takes(dropped)

    def get(self, name: str, text: str) -> str:
        """Return the arguments of a call as they were generated, where that is known; else as they are.

        A text with spaces was not spelled by Dynamo, and one that was generated is as it was.
        """
        if _SPACED.search(_STRING.sub("", text)):
            return text
        try:
            key, given = self._key(name, text), text.encode()
        except (ValueError, OverflowError, RecursionError):
            return text
        with self._lock:
            known = self._texts.get(key, ())
            if known:
                self._texts.move_to_end(key)
            return text if not known or given in known else known[-1].decode()


def read_messages(messages: Any, fmt: Format, tools: Mapping[str, Tool], spellings: Spellings | None = None) -> History:
    """Check the messages of a request and make them ready for the template of a model that writes `fmt`.

    `tools` are those that the request declares, by name; a call of another one is read without a schema. `spellings`
    are those of this model's recent answers.

    Raises:
        RequestError: a message, call or tool result is malformed, a result belongs to no call, or the format has no
            text for a call's arguments.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise RequestError("messages", f"must be an array with at least one message, not {shown(messages)}")
    found: list[dict[str, Any]] = []
    ids: dict[str, str] = {}  # as the client knows a call -> as the template gets it
    count = 0
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(path, f"must be an object, not {shown(message)}")
        if not isinstance(message.get("role"), str):
            raise RequestError(f"{path}.role", f"must be a string, not {shown(message.get('role'))}")
        one = dict(message)
        one["content"] = _text(message.get("content"), f"{path}.content")
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning:
            if isinstance(reasoning, list):  # Anthropic's blocks
                reasoning = "".join(part for part in reasoning if isinstance(part, str))
            one["reasoning_content"] = one["reasoning"] = reasoning
        if message["role"] == "assistant" and message.get("tool_calls"):
            calls = message["tool_calls"]
            if not isinstance(calls, list):
                raise RequestError(f"{path}.tool_calls", f"must be an array, not {shown(calls)}")
            seen: set[str] = set()
            one["tool_calls"] = []
            for number, call in enumerate(calls):
                place = f"{path}.tool_calls[{number}]"
                read = _call(call, place, fmt, tools, spellings)
                if read["id"] in seen:
                    raise RequestError(f"{place}.id", f"{read['id']!r} stands twice")
                seen.add(read["id"])
                known = read["id"]
                if "{index}" in fmt.name_end:
                    read["id"] = _numbered(known, read["function"]["name"], count)
                ids[known] = read["id"]
                count += 1
                one["tool_calls"].append(read)
        elif "tool_calls" in one:
            del one["tool_calls"]
        if message["role"] == "tool":
            answered = message.get("tool_call_id")
            if not isinstance(answered, str) or answered not in ids:
                fault = "is missing" if answered is None else f"no call {shown(answered)} precedes"
                raise RequestError(f"{path}.tool_call_id", fault)
            one["tool_call_id"] = ids[answered]
        found.append(one)
    return History(found, frozenset(ids.values()))


def _text(content: Any, path: str) -> str:
    """Return a content as one string; parts are joined by line breaks, as Dynamo and vLLM join them."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(path, f"must be a string or an array of parts, not {shown(content)}")
    parts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            parts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise RequestError(f"{path}[{index}].type", f"must be text, not {shown(kind)}: only text is served")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise RequestError(f"{path}[{index}].text", f"must be a string, not {shown(text)}")
        parts.append(text)
    return "\n".join(parts)


def _call(call: Any, path: str, fmt: Format, tools: Mapping[str, Tool], spellings: Spellings | None) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise RequestError(path, f"must be an object, not {shown(call)}")
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{path}.function", f"must be an object, not {shown(function)}")
    for place, value in ((f"{path}.id", call.get("id")), (f"{path}.function.name", function.get("name"))):
        if not isinstance(value, str) or not value:
            raise RequestError(place, "is missing" if value is None else f"must be a string, not {shown(value)}")
    place = f"{path}.function.arguments"
    text = function.get("arguments")
    if isinstance(text, Mapping):
        text = json.dumps(text, ensure_ascii=False)
    if not isinstance(text, str):
        raise RequestError(place, "is missing" if text is None else f"must be a string, not {shown(text)}")
    arguments = read_arguments(text, place)
    if spellings is not None:
        arguments = read_arguments(spellings.get(function["name"], str(arguments)), place)
    why = fmt.why_not(str(arguments), tools.get(function["name"]))
    if why is not None:
        inner, reason = why
        joint = "" if not inner or inner.startswith("[") else "."
        raise RequestError(f"{place}{joint}{inner}", f"has no text in the format {fmt.name}: {reason}")
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _numbered(known: str, name: str, count: int) -> str:
    """Return `functions.NAME:N` for a call: its own identifier if it is one, else its place in the conversation.

    `/v1/messages` gives calls identifiers of its own, which such a model has never seen.
    """
    match = _NUMBERED.fullmatch(known)
    return known if match and match[1] == name else f"functions.{name}:{count}"


class _Generation(jinja2.ext.Extension):
    """The tag `generation` of transformers' templates: its body as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers' filter of that name does, and what carries its text as that text."""
    sources: list[str] = []
    mark = uuid.uuid4().hex  # stands for a source until all is written: no text of a client holds it

    def marked(node: Any) -> Any:
        if isinstance(node, _SOURCED):
            sources.append(node.source)
            return f"{mark}{len(sources) - 1}"
        if isinstance(node, Mapping):
            return {key: marked(one) for key, one in node.items()}
        if isinstance(node, (list, tuple)):
            return [marked(one) for one in node]
        return node

    text = json.dumps(
        marked(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if sources:
        text = re.sub(f'"{mark}([0-9]+)"', lambda match: sources[int(match[1])], text)
    return text


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


class ChatTemplate:
    """A model's chat template, in the environment that transformers gives it."""

    def __init__(self, source: str, names: Mapping[str, Any] | None = None) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise, strftime_now=_now)
        self._template = environment.from_string(source)
        # Many templates have no such role, and leave out what they do not know.
        self._develops = "developer" in source
        self._names = dict(names or {})

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, /, **names: Any) -> str:
        """Return the prompt. A template that knows no developers gets their messages as the system's.

        Raises:
            RequestError: the template refuses the messages, or what it makes of them is no text.
        """
        if not self._develops:
            messages = [{**one, "role": "system"} if one.get("role") == "developer" else one for one in messages]
        try:
            text = self._template.render({**self._names, **names, "messages": messages, "tools": tools or None})
            text.encode()
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            raise RequestError("messages", f"the model's chat template refuses them: {error}") from error
        return text

    @classmethod
    def of_model(cls, folder: Path, fmt: Format | None) -> Callable[[bool], ChatTemplate]:
        """Return a model directory's template: a function of whether the request has tools.

        In the order: `chat_template.jinja`, `chat_template.json`, the one in `tokenizer_config.json`, ours for a format
        whose models ship none.

        Raises:
            ValueError: there is none, or one is malformed; the message names the directory.
        """
        settings = _json(folder / "tokenizer_config.json")
        names = {}
        for key, value in settings.items():
            text = value.get("content") if isinstance(value, Mapping) else value
            if key.endswith("_token") and isinstance(text, str):
                names[key] = text
        source: Any = settings.get("chat_template")
        if (folder / "chat_template.json").is_file():
            source = _json(folder / "chat_template.json").get("chat_template", source)
        if (folder / "chat_template.jinja").is_file():
            source = (folder / "chat_template.jinja").read_text("utf-8")
        if isinstance(source, list):
            source = {one["name"]: one["template"] for one in source}
        if not source:
            if fmt is None:
                raise ValueError(f"{folder}: no chat template")
            ours = resources.files(__package__) / "templates" / f"{fmt.name}.jinja"
            if not ours.is_file():
                raise ValueError(f"{folder}: no chat template, and the format {fmt.name} has none of its own")
            source = ours.read_text("utf-8")
        try:
            if isinstance(source, str):
                template = cls(source, names)
                return lambda tools: template
            templates = {name: cls(text, names) for name, text in source.items()}
            default = templates.get("default", next(iter(templates.values())))
        except (jinja2.TemplateError, AttributeError, StopIteration) as error:
            raise ValueError(f"{folder}: the chat template is malformed: {error}") from error
        return lambda tools: templates.get("tool_use", default) if tools else default


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    found = json.loads(file.read_text("utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{file}: must be a JSON object")
    return found
