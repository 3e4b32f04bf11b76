# SPDX-License-Identifier: Apache-2.0
r"""A second reading of the tool-call formats: slow, obvious, and sharing no code with the package.

Every function below says what its format looks like and reads just that, from the left, with `str.find` and
`json.JSONDecoder`. White space between two markers means nothing; everything else that does not belong there raises
:class:`NotThisFormat`.

How a raw text is read where strings stand as they are (GLM, Qwen), by what the argument's schema admits:

1. only strings: the text up to the closing marker is the string, verbatim;
2. no string: the text is one JSON value, which ends where the JSON ends, and the closing marker follows;
3. strings and something else: if it begins with `{` and an object is admitted, or with `[` and an array is admitted, as
   2. Otherwise the text up to the closing marker counts: if it is exactly one JSON number, `true`, `false` or `null`
   (at most 400 characters, no infinity) and the schema admits that value, it is that value; if not, it is the string.

An argument of which no schema is known is read by 3, as if everything were admitted. In a tool with `strict: false`,
a declared property admits strings beside what its schema says.

DeepSeek marks each argument itself: `string="true"` is read by 1 and `string="false"` by 2.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jsonschema
import referencing
from referencing.jsonschema import DRAFT202012

__all__ = ["DuplicateKey", "NotThisFormat", "fault", "read", "same", "split_reasoning"]

Call = tuple[str, Any]
KINDS = frozenset({"string", "object", "array", "number", "boolean", "null"})


class NotThisFormat(ValueError):
    """A text that is not an answer in the format it was read as."""


# --- JSON -------------------------------------------------------------------------------------------------------------


class DuplicateKey(NotThisFormat):
    """An object, or the arguments of a call, with a key twice: of the format, but of no one meaning."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise DuplicateKey(f"an object with a key twice: {[key for key, _ in pairs]}")
    return dict(pairs)


def _no_constant(name: str) -> Any:
    raise NotThisFormat(f"{name} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def _sound(value: Any) -> Any:
    """Return the value; raise where it holds an infinity or half of a surrogate pair."""
    if isinstance(value, float) and not math.isfinite(value):
        raise NotThisFormat("a number beyond what a float holds")
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise NotThisFormat("half of a surrogate pair")
    if isinstance(value, list):
        for item in value:
            _sound(item)
    if isinstance(value, dict):
        for key, item in value.items():
            _sound(key)
            _sound(item)
    return value


def same(one: Any, other: Any) -> bool:
    """Compare two JSON values as JSON does: `1`, `1.0` and `true` are three values; the order of keys counts."""
    return json.dumps(one) == json.dumps(other)


# --- schemas ----------------------------------------------------------------------------------------------------------


def _with_null(node: Any) -> Any:
    """Rewrite OpenAPI's `nullable: true` in JSON Schema's own words."""
    if isinstance(node, list):
        return [_with_null(item) for item in node]
    if not isinstance(node, dict):
        return node
    done: dict[str, Any] = {}
    for keyword, value in node.items():
        if keyword in ("enum", "const", "default", "examples", "required"):
            done[keyword] = value
        elif keyword in ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas"):
            done[keyword] = {name: _with_null(part) for name, part in value.items()}
        else:
            done[keyword] = _with_null(value)
    if done.pop("nullable", False) is True:
        if "type" not in done:
            return {"anyOf": [done, {"type": "null"}]}
        kinds = done["type"] if isinstance(done["type"], list) else [done["type"]]
        done["type"] = [*kinds, "null"] if "null" not in kinds else kinds
    return done


class _Document:
    """The schema of one tool's arguments. A place in it is a JSON pointer, such as `#/properties/path`."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self.root = _with_null(dict(parameters))
        resource = referencing.Resource.from_contents(self.root, default_specification=DRAFT202012)
        self.registry: Any = referencing.Registry().with_resource("urn:tool", resource)

    def at(self, place: str) -> Any:
        node = self.root
        for step in place.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            node = node[int(step)] if isinstance(node, list) else node[step]
        return node

    def valid(self, place: str, value: Any) -> bool:
        schema = {"$ref": f"urn:tool{place}"}
        return jsonschema.Draft202012Validator(schema, registry=self.registry).is_valid(value)

    def first_error(self, value: Any) -> str | None:
        validator = jsonschema.Draft202012Validator({"$ref": "urn:tool#"}, registry=self.registry)
        error = jsonschema.exceptions.best_match(validator.iter_errors(value))
        return None if error is None else f"{error.json_path}: {error.message}"

    def kinds(self, place: str, inside: frozenset[str] = frozenset()) -> frozenset[str]:
        """Return the JSON types that a value of the schema at that place may have."""
        node = self.at(place)
        if node is True:
            return KINDS
        if node is False or place in inside:
            return frozenset()
        inside = inside | {place}
        found = KINDS
        if "type" in node:
            names = node["type"] if isinstance(node["type"], list) else [node["type"]]
            found &= {"number" if name == "integer" else name for name in names}
        if "const" in node:
            found &= {_kind(node["const"])}
        if "enum" in node:
            found &= {_kind(value) for value in node["enum"]}
        if "$ref" in node:
            found &= self.kinds(node["$ref"], inside)
        for number in range(len(node.get("allOf", ()))):
            found &= self.kinds(f"{place}/allOf/{number}", inside)
        for keyword in ("anyOf", "oneOf"):
            if keyword in node:
                parts = [self.kinds(f"{place}/{keyword}/{number}", inside) for number in range(len(node[keyword]))]
                found &= frozenset().union(*parts)
        return found

    def places(self, key: str, place: str = "#") -> list[str]:
        """Return where the schemas of an argument stand; none where nothing is said about it."""
        node = self.at(place)
        if not isinstance(node, dict):
            return []
        found = []
        if key in node.get("properties", {}):
            found.append(f"{place}/properties/{key.replace('~', '~0').replace('/', '~1')}")
        elif isinstance(node.get("additionalProperties"), dict):
            found.append(f"{place}/additionalProperties")
        if "$ref" in node:
            found += self.places(key, node["$ref"])
        for keyword in ("allOf", "anyOf", "oneOf"):
            for number in range(len(node.get(keyword, ()))):
                found += self.places(key, f"{place}/{keyword}/{number}")
        return found


@functools.lru_cache(maxsize=64)
def _document_of(parameters: str) -> _Document:
    return _Document(json.loads(parameters))


def _document(function: Mapping[str, Any]) -> _Document:
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "additionalProperties": False}
    return _document_of(json.dumps(parameters))


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _function(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    for tool in tools:
        if tool["function"]["name"] == name:
            function: Mapping[str, Any] = tool["function"]
            return function
    return None


def fault(tools: Sequence[Mapping[str, Any]], name: str, value: Any) -> str | None:
    """Say what is wrong with a call that was read: an undeclared name, arguments that break the schema; else None."""
    function = _function(tools, name)
    if function is None:
        return f"undeclared tool {name!r}"
    if not isinstance(value, dict):
        return f"{name}: the arguments are no object"
    if function.get("strict") is False:
        return None
    error = _document(function).first_error(value)
    return None if error is None else f"{name}: {error}"


# --- one text, read from the left -------------------------------------------------------------------------------------


class _Text:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def ended(self) -> bool:
        return self.at == len(self.text)

    def space(self) -> None:
        while not self.ended() and self.text[self.at] in " \t\r\n":
            self.at += 1

    def sees(self, literal: str) -> bool:
        return self.text.startswith(literal, self.at)

    def take(self, literal: str) -> None:
        if not self.sees(literal):
            raise NotThisFormat(f"{literal!r} expected, not {self.text[self.at : self.at + 40]!r}, at {self.at}")
        self.at += len(literal)

    def until(self, literal: str) -> str:
        """Return the text before the next `literal`, and go on after it."""
        end = self.text.find(literal, self.at)
        if end < 0:
            raise NotThisFormat(f"no {literal!r} after {self.at}")
        passed = self.text[self.at : end]
        self.at = end + len(literal)
        return passed

    def name(self) -> str:
        match = re.compile(r"[A-Za-z0-9_.-]+").match(self.text, self.at)
        if match is None:
            raise NotThisFormat(f"no tool's name at {self.at}")
        self.at = match.end()
        return match[0]

    def json(self) -> Any:
        try:
            value, self.at = _DECODER.raw_decode(self.text, self.at)
        except json.JSONDecodeError as error:
            raise NotThisFormat(f"no JSON at {self.at}: {error}") from None
        return _sound(value)


_SCALAR = re.compile(r"(-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null)\Z")


def _raw(text: _Text, closer: str, function: Mapping[str, Any] | None, key: str) -> Any:
    """Read the value of an argument in a format that writes strings as they are, and the marker that closes it."""
    document = None if function is None else _document(function)
    places = [] if document is None else document.places(key)
    admitted = KINDS
    if document is not None and places:
        # A key that several alternatives of a union declare admits what any of them does.
        admitted = frozenset().union(*(document.kinds(place) for place in places))
        if function is not None and function.get("strict") is False:
            admitted |= {"string"}
    if admitted == {"string"}:
        return text.until(closer)
    if (
        "string" not in admitted
        or (text.sees("{") and "object" in admitted)
        or (text.sees("[") and "array" in admitted)
    ):
        value = text.json()
        text.take(closer)
        return value
    string = text.until(closer)
    if len(string) <= 400 and _SCALAR.match(string):
        value = json.loads(string)
        valid = document is None or not places or any(document.valid(place, value) for place in places)
        if valid and math.isfinite(value or 0):
            return value
    return string


def _add(value: dict[str, Any], key: str, argument: Any) -> None:
    if key in value:
        raise DuplicateKey(f"argument {key!r} twice")
    value[key] = argument


# --- the formats ------------------------------------------------------------------------------------------------------


def _glm(text: _Text, tools: Sequence[Mapping[str, Any]]) -> list[Call]:
    """Read `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>`, any number of them.

    GLM-4.5 writes a line break after the name, the keys and the values; GLM-4.7 and later none.
    """
    calls: list[Call] = []
    while not text.ended():
        text.take("<tool_call>")
        name = text.name()
        value: dict[str, Any] = {}
        text.space()
        while text.sees("<arg_key>"):
            text.take("<arg_key>")
            key = text.until("</arg_key>")
            text.space()
            text.take("<arg_value>")
            _add(value, key, _raw(text, "</arg_value>", _function(tools, name), key))
            text.space()
        text.take("</tool_call>")
        text.space()
        calls.append((name, value))
    return calls


def _qwen(text: _Text, tools: Sequence[Mapping[str, Any]]) -> list[Call]:
    r"""Read `<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n...</function>\n</tool_call>`.

    One line break on each side of the value is layout. A value on the line of its marker ends at `</parameter>`.
    """
    calls: list[Call] = []
    while not text.ended():
        text.take("<tool_call>")
        text.space()
        text.take("<function=")
        name = text.name()
        text.take(">")
        value: dict[str, Any] = {}
        text.space()
        while text.sees("<parameter="):
            text.take("<parameter=")
            key = text.until(">")
            closer = "</parameter>"
            if text.sees("\n"):
                text.take("\n")
                closer = "\n</parameter>"
            _add(value, key, _raw(text, closer, _function(tools, name), key))
            text.space()
        text.take("</function>")
        text.space()
        text.take("</tool_call>")
        text.space()
        calls.append((name, value))
    return calls


def _hermes(text: _Text, tools: Sequence[Mapping[str, Any]]) -> list[Call]:
    r"""Read `<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>`, any number of them."""
    calls: list[Call] = []
    while not text.ended():
        text.take("<tool_call>")
        text.space()
        call = text.json()
        if not isinstance(call, dict) or list(call) != ["name", "arguments"] or not isinstance(call["name"], str):
            raise NotThisFormat(f"no call: {call!r}")
        text.space()
        text.take("</tool_call>")
        text.space()
        calls.append((call["name"], call["arguments"]))
    return calls


def _kimi(text: _Text, tools: Sequence[Mapping[str, Any]]) -> list[Call]:
    """Read one section of calls.

    A call is `<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{...}<|tool_call_end|>`.
    """
    calls: list[Call] = []
    text.take("<|tool_calls_section_begin|>")
    text.space()
    while not text.sees("<|tool_calls_section_end|>"):
        text.take("<|tool_call_begin|>")
        text.space()
        text.take("functions.")
        name = text.name()
        text.take(":")
        number = text.until("<|tool_call_argument_begin|>").strip(" \t\r\n")
        if not re.fullmatch("[0-9]+", number):
            raise NotThisFormat(f"no number of a call: {number!r}")
        text.space()
        calls.append((name, text.json()))
        text.space()
        text.take("<|tool_call_end|>")
        text.space()
    text.take("<|tool_calls_section_end|>")
    text.space()
    if not text.ended() or not calls:
        raise NotThisFormat("not exactly one section with calls")
    return calls


def _deepseek(section: str) -> Callable[[_Text, Sequence[Mapping[str, Any]]], list[Call]]:
    def read_section(text: _Text, tools: Sequence[Mapping[str, Any]]) -> list[Call]:
        """Read one section of `<｜DSML｜invoke name="NAME">`, each with parameters marked as strings or JSON."""
        calls: list[Call] = []
        text.take(f"<｜DSML｜{section}>")
        text.space()
        while not text.sees(f"</｜DSML｜{section}>"):
            text.take('<｜DSML｜invoke name="')
            name = text.name()
            text.take('">')
            value: dict[str, Any] = {}
            text.space()
            while text.sees("<｜DSML｜parameter"):
                text.take('<｜DSML｜parameter name="')
                key = text.until('" string="')
                marked = text.until('">')
                if marked == "true":
                    argument = text.until("</｜DSML｜parameter>")
                elif marked == "false":
                    argument = text.json()
                    text.take("</｜DSML｜parameter>")
                else:
                    raise NotThisFormat(f"string={marked!r}")
                _add(value, key, argument)
                text.space()
            text.take("</｜DSML｜invoke>")
            text.space()
            calls.append((name, value))
        text.take(f"</｜DSML｜{section}>")
        text.space()
        if not text.ended() or not calls:
            raise NotThisFormat("not exactly one section with calls")
        return calls

    return read_section


_Reader = Callable[[_Text, Sequence[Mapping[str, Any]]], list[Call]]
#: Format -> how its calls are read, the marker they begin with, what stands between content and the first call, and the
#: markers that never stand in content.
_FORMATS: dict[str, tuple[_Reader, str, str, tuple[str, ...]]] = {
    "glm47": (_glm, "<tool_call>", "", ("</tool_call>",)),
    "glm45": (_glm, "<tool_call>", "\n", ("</tool_call>",)),
    "qwen3_coder": (_qwen, "<tool_call>", "\n\n", ("</tool_call>", "<function=")),
    "hermes": (_hermes, "<tool_call>", "\n", ("</tool_call>",)),
    "kimi_k2": (
        *(_kimi, "<|tool_calls_section_begin|>", ""),
        ("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "deepseek_v3_2": (
        _deepseek("function_calls"),
        "<｜DSML｜function_calls>",
        "\n\n",
        ("</｜DSML｜", "<｜DSML｜invoke"),
    ),
    "deepseek_v4": (_deepseek("tool_calls"), "<｜DSML｜tool_calls>", "\n\n", ("</｜DSML｜", "<｜DSML｜invoke")),
}
#: What a template may write between the reasoning and the answer, by format; the others write nothing.
_AFTER_REASONING = {"glm45": "\n", "qwen3_coder": "\n\n", "hermes": "\n\n"}


def read(
    format_name: str, text: str, tools: Sequence[Mapping[str, Any]], *, json_content: bool = False
) -> tuple[str, list[Call]]:
    """Read an answer without reasoning: its content, and its calls with the values of their arguments.

    Args:
        format_name: One of the package's names of formats.
        text: The whole answer.
        tools: The request's `tools`; what they declare decides how raw texts are read. Whether a call is of a declared
            tool and its arguments valid is for `fault` to say.
        json_content: The request sets a schema for the content: the answer is calls from its beginning, or content.

    Raises:
        NotThisFormat: for a text that is not an answer in that format, and for duplicate keys.
    """
    reader, opener, separator, foreign = _FORMATS[format_name]
    if json_content and not text.lstrip(" \t\r\n").startswith(opener):
        return text, []
    content, found, _ = text.partition(opener)
    for marker in (*foreign, "<think>", "</think>"):
        if marker in content:
            raise NotThisFormat(f"{marker!r} in the content")
    if not found:
        return content, []
    start = len(content)
    if not content.strip(" \t\r\n") and len(content) <= len(separator) + len(_AFTER_REASONING.get(format_name, "")):
        content = ""
    elif separator:
        content = content.removesuffix(separator)
    rest = _Text(text[start:])
    return content, reader(rest, tools)


def split_reasoning(format_name: str, text: str, *, opened: bool) -> tuple[str | None, str]:
    """Split an answer into its reasoning (None where there is none) and what `read` reads.

    `opened` says that the prompt ended with `<think>`. Otherwise reasoning stands at the very start, or nowhere.

    Raises:
        NotThisFormat: for reasoning without an end.
    """
    if not opened:
        lead = "\n" if format_name == "glm45" else ""
        begun = text.removeprefix(lead)
        if not begun.startswith("<think>"):
            return None, text
        text = begun.removeprefix("<think>")
    reasoning, found, rest = text.partition("</think>")
    if not found:
        raise NotThisFormat("reasoning without an end")
    return reasoning, rest.removeprefix(_AFTER_REASONING.get(format_name, ""))
