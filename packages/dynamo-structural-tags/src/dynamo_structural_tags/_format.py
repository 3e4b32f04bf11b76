# SPDX-License-Identifier: Apache-2.0
"""One tool-call format: a descriptor from which grammar, parser, renderer and `representable` are all derived."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ._errors import UnrepresentableError
from ._json import DECODER, unique
from ._reading import Reading, tool_reading
from ._request import Tool, ToolPolicy

if TYPE_CHECKING:
    from ._parser import Parser

__all__ = ["Format", "Order", "ReasoningMode", "Style"]

Style = Literal["raw", "json", "dsml"]
ReasoningMode = Literal["open", "closed", "auto"]
Order = Literal["declared", "any"]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True)
class Format:
    r"""The layout of one format.

    An answer is, in the order of the text::

        [think_lead] think[0] REASONING think[1] [reasoning_separator]      (by the reasoning mode)
        CONTENT content_separator
        section_begin CALL (call_separator CALL)* section_end

    and a call is `call_begin NAME name_end ARGUMENTS call_end`. In the styles `raw` and `dsml` the arguments are
    `ARG (arg_separator ARG)*` or nothing at all, an ARG is `arg_begin VALUE arg_end`; in the style `json` they are one
    JSON object.

    With no content, what stands before the first call is `content_separator` where `separator_always` is set (then in
    the place of `reasoning_separator`), else `reasoning_separator` after reasoning, else nothing. Text before the first
    call that is nothing but white space and no longer than the two separators together is layout, not content.

    Where the request sets a schema for the content (`ToolPolicy.content_schema`), an answer is either calls from its
    beginning or content to its end: a marker inside the content's JSON strings opens no call.
    """

    #: The name under which :func:`get_format` knows it.
    name: str
    #: Models that write it.
    models: tuple[str, ...]
    #: How arguments are written: `raw` (strings as they are), `json` (one object), `dsml` (raw, with the type marked).
    style: Style
    #: The one marker that opens the calls.
    trigger: str
    #: What encloses all calls together; it begins with the trigger. Empty where there is none.
    section_begin: str
    section_end: str
    #: Up to the tool's name. Begins with the trigger where there is no section.
    call_begin: str
    #: From the name to the first argument; `{index}` stands for the number of the call in the conversation.
    name_end: str
    #: From `call_begin` to the value; `{key}` is the key, `{string}` (dsml) `true` for a string and `false` otherwise.
    arg_begin: str
    #: After the value; begins with `value_end`.
    arg_end: str
    #: After the last argument (or after `name_end`, where there is none).
    call_end: str
    #: Ends a raw string: no raw string may hold it. Empty in the style `json`.
    value_end: str = ""
    #: Between two arguments.
    arg_separator: str = ""
    #: Between two calls.
    call_separator: str = ""
    #: Between content and the first call. Not part of the content: a parser removes exactly it, once, if it is there.
    content_separator: str = ""
    #: True: `content_separator` stands before the first call even where there is no content.
    separator_always: bool = False
    #: The reasoning's markers.
    think: tuple[str, str] = ("<think>", "</think>")
    #: What the model may write before `think[0]` (reasoning mode `auto`). A parser skips it there.
    think_lead: str = ""
    #: After `think[1]`; a parser removes exactly it, once, if it is there.
    reasoning_separator: str = ""
    #: Markers that free text must not hold: excluded by the grammar, `malformed_call` in the parser.
    stray: tuple[str, ...] = ()

    #: Ends a key in `arg_begin`: no key may hold it. Empty in the style `json`.
    key_end: str = ""

    def structural_tag(
        self, policy: ToolPolicy, *, reasoning: ReasoningMode = "closed", argument_order: Order = "declared"
    ) -> dict[str, Any]:
        """Return the structural tag that lets through the answers which the request allows, and no others.

        It is what xgrammar's `StructuralTag` takes and what vLLM and Dynamo take as `structural_tag`, as a plain dict.
        The grammar is compiled once per content and kept in a bounded cache; building one takes a few milliseconds.

        Args:
            policy: What the request allows.
            reasoning: `open`: the prompt ends inside the reasoning. `closed`: no reasoning is written, or the engine
                holds the grammar back until it is over. `auto`: one reasoning block may stand first.
            argument_order: `declared`: arguments come in the order of the schema's properties. `any`: in any order.

        Raises:
            RequestError: a tool's schema is not one, or admits nothing that this format can write.
        """
        from ._tags import structural_tag

        return structural_tag(self, policy, reasoning, argument_order)

    def parser(
        self, policy: ToolPolicy | None, *, reasoning: ReasoningMode = "closed", used_ids: Collection[str] = ()
    ) -> Parser:
        """Return a parser for one answer.

        Args:
            policy: What the request allows; None where it has no tools: then everything is content.
            reasoning: As in :meth:`structural_tag`.
            used_ids: Identifiers of earlier calls of the conversation, which new calls must not repeat.
        """
        from ._parser import Parser

        return Parser(self, policy, reasoning=reasoning, used_ids=used_ids)

    def why_not(self, arguments: Mapping[str, Any] | str, tool: Tool | None = None) -> tuple[str, str] | None:
        """Return where and why the format cannot write these arguments so that they are read back, or None."""
        try:
            self._arguments(arguments, tool)
        except UnrepresentableError as error:
            return error.path, error.reason
        return None

    def representable(self, tool: Tool | None, arguments: Mapping[str, Any] | str) -> bool:
        """Say whether the format can write these arguments so that a parser reads them back."""
        return self.why_not(arguments, tool) is None

    def render(self, name: str, arguments: Mapping[str, Any] | str, *, tool: Tool | None = None, index: int = 0) -> str:
        """Return the text of one call, without what encloses all calls.

        Args:
            name: The tool's name.
            arguments: An object, or its JSON text, which is kept verbatim where the format allows.
            tool: The tool's declaration, which decides how raw strings are read; None where there is none.
            index: The number of the call in the conversation, for formats that write it.

        Raises:
            UnrepresentableError: no text of the format is read back as these arguments.
        """
        if _NAME.fullmatch(name) is None:
            raise UnrepresentableError("name", f"{name!r} is not 1 to 128 of A-Z a-z 0-9 _ . -")
        name_end = self.name_end.replace("{index}", str(index))
        return f"{self.call_begin}{name}{name_end}{self._arguments(arguments, tool)}{self.call_end}"

    def render_calls(
        self,
        calls: Sequence[tuple[str, Mapping[str, Any] | str]],
        *,
        policy: ToolPolicy | None = None,
        first_index: int = 0,
    ) -> str:
        """Return the text of all calls of an answer, from the trigger to the end; empty where there are none.

        Args:
            calls: The name and the arguments of each.
            policy: The request's, for the tools' declarations.
            first_index: The number of the first call in the conversation.

        Raises:
            UnrepresentableError: as for :meth:`render`.
        """
        if not calls:
            return ""
        texts = [
            self.render(name, arguments, tool=policy.tool(name) if policy else None, index=first_index + at)
            for at, (name, arguments) in enumerate(calls)
        ]
        return f"{self.section_begin}{self.call_separator.join(texts)}{self.section_end}"

    def argument_begin(self, key: str, *, string: bool = False) -> str:
        """Return what precedes the value of that argument; `string` is read by the style `dsml` only.

        Raises:
            UnrepresentableError: the layout cannot hold the key.
        """
        if not key or key != key.strip() or self.key_end in key or "\n" in key or _SURROGATE.search(key):
            reason = f"the format {self.name} has no text for the key {key!r}"
            raise UnrepresentableError(key, reason)
        return self.arg_begin.replace("{string}", "true" if string else "false").replace("{key}", key)

    def string_problem(self, text: str, reading: Reading) -> str | None:
        """Return why a raw string is not read back as itself, or None."""
        if _SURROGATE.search(text):
            return "holds a lone surrogate"
        if (text + self.value_end).find(self.value_end) != len(text):
            return f"holds {self.value_end!r}, which ends a value"
        if self.style == "dsml" or reading.mode == "text":
            return None
        if reading.mode == "json":
            return "is a string, which its schema does not admit"
        if reading.begins_json(text[:1]):
            return f"begins with {text[0]!r}, as JSON does, which its schema admits too"
        if reading.is_scalar(text):
            return f"is {text}, which is read as the JSON value"
        return None

    def _json_problem(self, text: str, reading: Reading) -> str | None:
        """Return why the JSON text of something that is no string is not read back as itself, or None."""
        if self.style == "dsml" or reading.mode == "json":
            return None
        if text[0] in "{[":
            read = reading.mode == "union" and reading.begins_json(text[0])
        else:
            read = reading.mode == "union" and reading.is_scalar(text)
        return None if read else "would be read as a string"

    def _arguments(self, arguments: Mapping[str, Any] | str, tool: Tool | None) -> str:
        members = _members(arguments)
        if self.style == "json":
            if isinstance(arguments, str):
                return arguments.strip(" \t\n\r")
            return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {text}" for key, _, text in members) + "}"
        reading = tool_reading(tool)
        parts = []
        for key, value, text in members:
            string = isinstance(value, str)
            begin = self.argument_begin(key, string=string)
            if string:
                problem = self.string_problem(value, reading.of(key))
            else:
                problem = self._json_problem(text, reading.of(key))
            if problem is not None:
                raise UnrepresentableError(key, f"{_shown(text)} {problem}")
            parts.append(f"{begin}{value if string else text}{self.arg_end}")
        return self.arg_separator.join(parts)


def _shown(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _members(arguments: Mapping[str, Any] | str) -> list[tuple[str, Any, str]]:
    """Return the key, the value and the value's JSON text of each argument.

    Raises:
        UnrepresentableError: these are not a JSON object, or hold what no JSON text has.
    """
    try:
        if isinstance(arguments, str):
            members = _split(arguments)
        else:
            members = [
                (key, value, json.dumps(value, ensure_ascii=False, allow_nan=False)) for key, value in arguments.items()
            ]
        for key, value, _ in members:
            if not isinstance(key, str):
                raise UnrepresentableError("", f"the key {key!r} is not a string")
            _check_text(key, key)
            _check_text(value, key)
    except UnrepresentableError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise UnrepresentableError("", f"the arguments are not a JSON object: {error}") from None
    return members


def _split(text: str) -> list[tuple[str, Any, str]]:
    members: list[tuple[str, Any, str]] = []

    def skip(at: int, expected: str) -> tuple[int, str]:
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        char = text[at : at + 1]
        if char not in expected or not char:
            raise ValueError(f"expected {' or '.join(expected)} at character {at}")
        return at, char

    at, _ = skip(0, "{")
    at, char = skip(at + 1, '"}')
    while char != "}":
        key, at = DECODER.raw_decode(text, at)
        at, _ = skip(at, ":")
        begin = _SPACE.match(text, at + 1).end()  # type: ignore[union-attr]
        value, at = DECODER.raw_decode(text, begin)
        members.append((key, value, text[begin:at]))
        at, char = skip(at, ",}")
        if char == ",":
            at, char = skip(at + 1, '"')
    if text[at + 1 :].strip(" \t\n\r"):
        raise ValueError(f"text after the object at character {at + 1}")
    unique([(key, None) for key, _, _ in members])
    return members


def _check_text(value: Any, path: str) -> None:
    """Refuse what no grammar lets through: lone surrogates, infinite numbers, and what is Python but not JSON."""
    if isinstance(value, str):
        if _SURROGATE.search(value):
            raise UnrepresentableError(path, "holds a lone surrogate")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UnrepresentableError(path, f"the key {key!r} is not a string")
            _check_text(key, f"{path}.{key}")
            _check_text(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_text(item, f"{path}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise UnrepresentableError(path, "holds a number that is too large")
