# SPDX-License-Identifier: Apache-2.0
"""The faults that arguments suffer, one for each case about values.

Most are a table: the case's id, what goes wrong, and a function from the value that the model said to the value that
the caller gets. A function sees one string (`STRINGS`), one key (`KEYS`), or all arguments of a call with the declared
parameters (`ARGUMENTS`); what it need not harm it returns as it is. `REFUSALS` are schemas that a server does not
understand. Each is as narrow as it takes for exactly one case to find it.
"""

from __future__ import annotations

import json
import re
import struct
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from .faulty_tool_server import Asked, Fault, Refusal, Said, SaidCall, fault

Schema = Mapping[str, Any]
Arguments = dict[str, Any]
#: From the arguments that the model said, and the declared parameters, to what the caller gets.
Change = Callable[[Arguments, Schema], Any]


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _without(arguments: Arguments, key: str) -> Arguments:
    return {name: value for name, value in arguments.items() if name != key}


def _everywhere(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change each value that is no array and no object, and then each array and each object, from the inside out."""
    if isinstance(value, dict):
        value = {key: _everywhere(inner, change) for key, inner in value.items()}
    elif isinstance(value, list):
        value = [_everywhere(inner, change) for inner in value]
    return change(value)


def _schemas(node: Any) -> Iterator[Schema]:
    """Yield all objects within a schema."""
    if isinstance(node, Mapping):
        yield node
        node = list(node.values())
    for inner in node if isinstance(node, list) else ():
        yield from _schemas(inner)


def _properties(schema: Schema) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _items(schema: Schema) -> Schema:
    found = schema.get("items")
    return found if isinstance(found, Mapping) else {}


def _each(change: Callable[[Any, Schema], Any]) -> Change:
    """Change each argument, given its declared schema."""

    def changed(arguments: Arguments, schema: Schema) -> Arguments:
        declared = _properties(schema)
        return {
            key: change(value, inner if isinstance(inner := declared.get(key), Mapping) else {})
            for key, value in arguments.items()
        }

    return changed


def _drop(which: Callable[[Any, Schema], bool]) -> Change:
    """Leave out each argument of which that is true."""

    def changed(arguments: Arguments, schema: Schema) -> Arguments:
        declared = _properties(schema)
        return {
            key: value
            for key, value in arguments.items()
            if not which(value, inner if isinstance(inner := declared.get(key), Mapping) else {})
        }

    return changed


def _text(which: Callable[[Any, Schema], bool]) -> Change:
    """Hand out each argument of which that is true as a string of JSON."""
    return _each(lambda value, schema: _dumps(value) if which(value, schema) else value)


def _cut(mark: str) -> Callable[[str], str]:
    return lambda text: text.partition(mark)[0]


def _sub(pattern: str, by: str) -> Callable[[str], str]:
    compiled = re.compile(pattern)
    return lambda text: compiled.sub(by, text)


def _as_json(which: str) -> Callable[[str], Any]:
    """Read a string as JSON where it looks like it."""
    compiled = re.compile(which)
    return lambda text: json.loads(text) if compiled.fullmatch(text) else text


STRINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "html-entity": ("Decodes `&lt;`.", _sub("&lt;", "<")),
    "double-entity": ("Decodes `&amp;lt;` once.", _sub("&amp;lt;", "&lt;")),
    "numeric-entity": ("Decodes `&#10;`.", _sub("&#10;", "\n")),
    "percent-escape": ("Decodes percent escapes.", lambda text: unquote(text) if "%20" in text else text),
    "ampersand": ("Escapes plain ampersands.", _sub(r"&(?=\w+=)", "&amp;")),
    "trailing-newline": ("Strips the last newline.", _sub(r"(?<=\S)\n\Z", "")),
    "leading-newline": ("Strips the first newline.", _sub(r"\A\n(?=\S)", "")),
    "leading-blanks": ("Strips leading blanks.", _sub(r"\A +(?=\S)", "")),
    "trailing-blanks": ("Strips blanks at the end.", _sub(r"(?<=\S) +\Z", "")),
    "only-blanks": ("Strips strings of blanks to nothing.", _sub(r"\A +\Z", "")),
    "blank-lines": ("Drops empty lines where there are several.", _sub(r"\n{3,}", "\n")),
    "crlf": ("Turns Windows line ends into newlines.", _sub("\r\n", "\n")),
    "tab": ("Turns a tab between words into blanks.", _sub(r"(?<=\w)\t(?=\w)", "    ")),
    "control-character": ("Drops the escape character.", _sub("\x1b", "")),
    "line-separator": ("Turns U+2028 into a newline.", _sub("\u2028", "\n")),
    "byte-order-mark": ("Drops U+FEFF at the beginning.", _sub("\\A\ufeff", "")),
    "no-break-space": ("Turns U+00A0 into a blank.", _sub("\u00a0", " ")),
    "combining": (
        "Composes accents with their letters.",
        lambda text: unicodedata.normalize("NFC", text) if "\u0301" in text else text,
    ),
    "joined-emoji": ("Drops the joiner within emoji.", _sub("\u200d", "")),
    "beyond-bmp": (
        "Replaces letters beyond the BMP, as a stream that is decoded piece by piece does.",
        _sub("[\U0001d400-\U0001d7ff]", "\ufffd\ufffd"),
    ),
    "east-asian": (
        "Reads the bytes of UTF-8 as Latin-1.",
        lambda text: text.encode().decode("latin-1") if re.search("[\u3040-\u30ff\u4e00-\u9fff]", text) else text,
    ),
    "right-to-left": ("Drops marks of direction.", _sub("[\u200e\u200f]", "")),
    "windows-path": (
        "Turns the backslashes of a path into slashes.",
        lambda text: text.replace("\\", "/") if re.match(r"[A-Z]:\\", text) else text,
    ),
    "backslash-n": (
        "Reads a backslash and an n as a newline.",
        lambda text: text if "\n" in text or text[1:2] == ":" else text.replace("\\n", "\n"),
    ),
    "escaped-unicode": (
        "Decodes escapes that are written out.",
        lambda text: re.sub(r"\\u([0-9a-f]{4})", lambda found: chr(int(found[1], 16)), text),
    ),
    "quoted": ("Strips quotes around a string.", lambda text: re.sub(r'\A"([^"]*)"\Z', r"\1", text)),
    "inner-quotes": ("Ends a sentence at the first quote.", _sub(r'\A([a-z][^"\n]*)".*[a-z]\Z', r"\1")),
    "apostrophe": ("Escapes apostrophes.", _sub(r"(?<=[a-z])'(?=[a-z])", "\\'")),
    "code-fence": (
        "Strips a fence of backticks.",
        lambda text: re.sub(r"\A```\w*\n(.*)\n```\Z", r"\1", text, flags=re.S),
    ),
    "template-braces": ("Renders placeholders to nothing.", _sub(r"\{\{ \w+ \}\}", "")),
    "shell-variable": ("Expands variables that are not set.", _sub(r"\$\{\w+\}", "")),
    "angle-brackets": ("Ends strings at a word in angle brackets.", _sub(r"<\w+>/.*", "")),
    "like-number": ("Reads digits as a number.", lambda text: int(text) if re.fullmatch(r"0\d+", text) else text),
    "like-exponent": ("Reads digits with an e as a power of ten.", _as_json(r"[1-9]\d*e\d\d?")),
    "like-boolean": ("Reads `true` as a boolean.", _as_json("true|false")),
    "like-null": ("Reads `null` as null.", _as_json("null")),
    "like-none": ("Reads Python's `None` as null.", lambda text: None if text == "None" else text),
    "like-object": ("Reads a string of JSON as an object.", _as_json(r"\{\S.*\}")),
    "like-array": ("Reads a string of JSON as an array.", _as_json(r"\[\".*\]")),
    "closing-arg-value": ("Ends strings at `</arg_value>`.", _cut(" </arg_value> ")),
    "closing-parameter": ("Ends strings at `</parameter>`.", _cut("\n</parameter>")),
    "closing-function": ("Ends strings at `</function>`.", _cut("</function>")),
    "closing-tool-call": ("Ends strings at `</tool_call>`.", _cut("</tool_call>")),
    "closing-kimi-call": ("Ends strings at `<|tool_call_end|>`.", _cut("<|tool_call_end|>")),
    "closing-kimi-section": ("Ends strings at `<|tool_calls_section_end|>`.", _cut("<|tool_calls_section_end|>")),
    "closing-dsml-parameter": ("Ends strings at DeepSeek's `parameter` tag.", _cut("</\uff5cDSML\uff5cparameter>")),
    "closing-dsml-calls": ("Ends strings at DeepSeek's `tool_calls` tag.", _cut("</\uff5cDSML\uff5ctool_calls>")),
    "closing-deepseek-v3": (
        "Ends strings at DeepSeek-V3's end of calls.",
        _cut("<\uff5ctool\u2581calls\u2581end\uff5c>"),
    ),
    "closing-invoke": ("Ends strings at `</invoke>`.", _cut("</invoke>")),
    "closing-think": ("Drops strings up to `</think>`.", lambda text: text.rpartition("</think>")[2]),
    "closing-mistral": ("Drops `[/TOOL_CALLS]` from strings.", _sub(r"\[/TOOL_CALLS\]", "")),
    "turn-end-chatml": ("Ends strings at `<|im_end|>`.", _cut("<|im_end|>")),
    "turn-end-llama": ("Drops the special token `<|eot_id|>` from strings.", _sub(r"<\|eot_id\|>", "")),
    "turn-end-harmony": ("Ends strings at `<|call|>`.", _cut("<|call|>")),
    "file-python": ("Ends strings at three quotes.", _cut('"""')),
    "file-rust": ("Drops what looks like a tag.", _sub("<'[a-z]+>", "")),
    "file-html": ("Takes scripts out of a page.", lambda text: re.sub(r"<script>.*</script>", "", text, flags=re.S)),
    "file-makefile": ("Turns tabs at the beginning of lines into blanks.", _sub(r"(?m)^\t", "    ")),
    "file-shell": ("Drops the delimiter of a here-document.", _sub(r"\nEOF(?=\n)", "")),
    "file-diff": ("Strips each line of a diff.", lambda text: re.sub(r"(?m)^ ", "", text) if "\n@@ " in text else text),
    "file-json": (
        "Reads and writes a JSON file anew.",
        lambda text: _dumps(json.loads(text)) if re.match(r"\{\n", text) else text,
    ),
}

KEYS: dict[str, tuple[str, Callable[[str], str]]] = {
    "key-with-slash": ("Escapes slashes in keys.", lambda key: key.replace("/", "\\/")),
    "key-with-quotes": ("Drops quotes from keys.", lambda key: key.replace('"', "")),
    "key-with-blank": ("Replaces blanks between the words of a key.", _sub(r"(?<=\w) (?=\w)", "_")),
}


def _nested_by_dots(arguments: Arguments, schema: Schema) -> Arguments:
    changed: Arguments = {}
    for key, value in arguments.items():
        first, dot, rest = key.partition(".")
        changed[first] = {rest: value} if dot else value
    return changed


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_strings(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(inner, str) for inner in value.values())


def _types(schema: Schema) -> list[Any]:
    """Return the types of a list of them; [] where it is one, or none."""
    found = schema.get("type")
    return found if isinstance(found, list) else []


def _rounded(value: Any) -> Any:
    return int(float(value)) if isinstance(value, int) and abs(value) > 2**53 else value


def _single(value: Any, schema: Schema) -> Any:
    return struct.unpack("f", struct.pack("f", value))[0] if isinstance(value, float) and value > 1 else value


def _plain_object(value: Any, schema: Schema) -> bool:
    plain = {"type", "properties", "required", "additionalProperties"}
    return _is_strings(value) and len(value) > 1 and "type" not in value and set(schema) == plain


def _filled_in(arguments: Arguments, schema: Schema) -> Arguments:
    if schema.get("additionalProperties") is not False:
        return arguments
    left_out = [key for key in _properties(schema) if key not in arguments]
    return {**arguments, **dict.fromkeys(left_out, "")} if len(left_out) > 1 else arguments


def _only_required(arguments: Arguments, schema: Schema) -> Arguments:
    required = schema.get("required")
    return {
        key: arguments[key]
        for key in arguments
        if required is None or key in required or "const" not in _properties(schema).get(key, {})
    }


def _last_of_inner(value: Any, schema: Schema) -> Any:
    if not isinstance(value, dict):
        return value
    several = [key for key, inner in value.items() if _is_strings(inner) and len(inner) > 1]
    return {**value, **{key: dict(list(value[key].items())[:-1]) for key in several}}


def _free_keys_required(value: Any, schema: Schema) -> Any:
    if not isinstance(value, dict) or "additionalProperties" not in schema:
        return value
    required = set(schema.get("required", ())) - set(_properties(schema))
    return {key: inner for key, inner in value.items() if key not in required}


def _target(schema: Schema, root: Schema) -> Schema:
    """Return what a plain reference into `$defs` leads to, or {}."""
    before, _, name = str(schema.get("$ref", "")).rpartition("/")
    found = root.get("$defs", {}).get(name) if before == "#/$defs" and len(schema) == 1 else None
    return found if isinstance(found, Mapping) else {}


def _refers(schema: Schema) -> set[str]:
    return {inner["$ref"] for inner in _schemas(schema) if "$ref" in inner}


def _by_reference(which: Callable[[Schema, Schema], bool], change: Callable[[Any], Any]) -> Change:
    """Change each argument whose declared schema, with the whole one's `$defs`, is such a reference."""

    def changed(arguments: Arguments, root: Schema) -> Arguments:
        declared = _properties(root)
        return {key: change(value) if which(declared.get(key, {}), root) else value for key, value in arguments.items()}

    return changed


def _is_recursive(schema: Schema, root: Schema) -> bool:
    return schema.get("$ref", "") in _refers(_target(schema, root))


def _is_mutual(schema: Schema, root: Schema) -> bool:
    inner = _refers(_target(schema, root))
    return bool(_target(schema, root).get("properties")) and bool(inner) and schema["$ref"] not in inner


def _deeper(depth: int, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Change each object that lies so deep in a value."""

    def changed(value: Any, left: int = depth) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: changed(inner, left - 1) for key, inner in value.items()} if left else change(value)

    return changed


def _without_siblings(arguments: Arguments, schema: Schema) -> Arguments:
    def changed(value: Any, inner: Schema) -> Any:
        beside = inner.get("required", ()) if "$ref" in inner else ()
        return {key: value[key] for key in value if key not in beside} if isinstance(value, dict) else value

    found: Arguments = _each(changed)(arguments, schema)
    return found


def _without_parts(value: Any, schema: Schema) -> Any:
    dropped = [key for part in schema.get("allOf", ())[1:] for key in part.get("required", ())]
    return {key: value[key] for key in value if key not in dropped} if dropped else value


def _tag_of_first(value: Any, schema: Schema) -> Any:
    options = [_properties(option) for option in schema.get("anyOf", ()) if isinstance(option, Mapping)]
    tags = {key: inner["const"] for key, inner in (options[0] if options else {}).items() if "const" in inner}
    return {key: tags.get(key, value[key]) for key in value} if isinstance(value, dict) else value


def _flat(value: Any, schema: Schema) -> Any:
    if isinstance(value, list) and value and all(isinstance(inner, list) for inner in value):
        return [cell for row in value for cell in row]
    return value


def _outer_for_inner(arguments: Arguments, schema: Schema) -> Arguments:
    def changed(value: Any, _: Schema) -> Any:
        return {key: arguments.get(key, value[key]) for key in value} if isinstance(value, dict) else value

    found: Arguments = _each(changed)(arguments, schema)
    return found


def _if(which: Callable[[Any, Schema], bool], change: Callable[[Any, Schema], Any]) -> Change:
    """Change each argument of which that is true."""
    return _each(lambda value, schema: change(value, schema) if which(value, schema) else value)


def _arguments_within(arguments: Arguments, schema: Schema) -> Arguments:
    found: Arguments = {}
    for key, value in arguments.items():
        parts = (
            re.split(r"</arg_value><arg_key>(\w+)</arg_key><arg_value>", value) if isinstance(value, str) else [value]
        )
        found |= {key: parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}
    return found


ARGUMENTS: dict[str, tuple[str, Change]] = {
    "literals/whole-argument": ("Reads arguments that a string quotes.", _arguments_within),
    "literals/key-with-dot": ("Makes objects of keys with dots.", _nested_by_dots),
    "literals/key-arguments": ("Takes `arguments` for the call's.", lambda said, _: said.get("arguments", said)),
    "literals/key-parameters": ("Takes `parameters` for the call's.", lambda said, _: said.get("parameters", said)),
    "types/integer": (
        "Hands out whole numbers as strings.",
        _text(lambda v, s: s.get("type") == "integer" and set(s) == {"type", "const"} and 0 < v < 2**53),
    ),
    "types/negative-integer": ("Takes only digits for a number.", _text(lambda v, s: _is_number(v) and v < 0)),
    "types/big-integer": ("Rounds integers to a double.", lambda said, _: _everywhere(said, _rounded)),
    "types/zero": ("Leaves out 0.", _drop(lambda v, s: _is_number(v) and v == 0)),
    "types/number": ("Hands out decimals as strings.", _text(lambda v, s: isinstance(v, float) and 1e-3 < v < 1)),
    "types/precise-number": ("Keeps numbers as 32-bit floats.", _each(_single)),
    "types/small-number": (
        "Knows no exponents.",
        _if(lambda v, s: isinstance(v, float) and v < 1e-6, lambda v, s: 0.0),
    ),
    "types/boolean": ("Hands out true as a string.", _text(lambda v, s: v is True and s.get("type") == "boolean")),
    "types/boolean-false": ("Leaves out false.", _drop(lambda v, s: v is False)),
    "types/null-value": ("Hands out null as a string.", _text(lambda v, s: v is None and s.get("type") == "null")),
    "types/array": (
        "Hands out arrays of strings as strings.",
        _text(
            lambda v, s: (
                isinstance(v, list)
                and v != []
                and set(s) == {"type", "items", "const"}
                and s["items"] == {"type": "string"}
                and s["type"] == "array"
                and len(v) < 100
            )
        ),
    ),
    "types/object": ("Hands out objects of strings as strings.", _text(_plain_object)),
    "types/empty-string": ("Leaves out empty strings.", _drop(lambda v, s: v == "")),
    "types/empty-array": ("Leaves out empty arrays.", _drop(lambda v, s: v == [])),
    "types/empty-object": ("Leaves out empty objects.", _drop(lambda v, s: v == {})),
    "types/no-arguments": (
        "Says null where there are no arguments.",
        lambda said, schema: said or (None if "required" in schema else said),
    ),
    "types/no-type": (
        "Hands out what has no type as a string.",
        _text(lambda v, s: set(s) == {"const", "description"} and v is True),
    ),
    "types/python-words": (
        "Writes booleans in arrays as Python does.",
        _if(lambda v, s: isinstance(v, list) and True in v, lambda v, s: str(v)),
    ),
    "types/twice-encoded": (
        "Encodes the arguments twice where the schema has a title.",
        lambda said, schema: _dumps(said) if isinstance(schema.get("title"), str) else said,
    ),
    "required/all-of-several": (
        "Leaves out the last of four arguments.",
        lambda said, schema: (
            dict(list(said.items())[:3]) if len(schema.get("required", ())) == len(said) == 4 else said
        ),
    ),
    "required/with-default": ("Says the default.", _if(lambda v, s: "default" in s, lambda v, s: s["default"])),
    "required/optional-left-out": ("Fills in optional strings.", _filled_in),
    "required/optional-given": ("Leaves out what is optional.", _only_required),
    "required/nested": ("Leaves out a string of an inner object.", _each(_last_of_inner)),
    "required/undeclared-extra": (
        "Adds a comment to what has a host.",
        lambda said, _: {**said, "comment": "none"} if "host" in said else said,
    ),
    "required/not-declared": ("Leaves out required keys without a schema.", _each(_free_keys_required)),
    "enums/string": (
        "Does not enforce an enum of several words.",
        _if(lambda v, s: isinstance(v, str) and "blue" in s.get("enum", ()), lambda v, s: "purple"),
    ),
    "enums/upper-case": (
        "Hands out words of an enum in lower case.",
        _if(lambda v, s: isinstance(v, str) and "enum" in s, lambda v, s: v.lower()),
    ),
    "enums/numbers": ("Compares an enum's numbers as strings.", _text(lambda v, s: _is_number(v) and "enum" in s)),
    "enums/with-null": (
        "Hands out an enum's null as a string.",
        _text(lambda v, s: v is None and "enum" in s and "nullable" not in s),
    ),
    "enums/with-blanks": (
        "Cuts words of an enum at a blank.",
        _if(lambda v, s: isinstance(v, str) and "enum" in s, lambda v, s: v.partition(" ")[0]),
    ),
    "enums/in-array": (
        "Does not enforce the enum of items.",
        _if(
            lambda v, s: isinstance(v, list) and len(_items(s).get("enum", ())) == 2,
            lambda v, s: [v[0], "holiday"],
        ),
    ),
    "enums/const-object": (
        "Leaves out the last key of a constant object.",
        _if(lambda v, s: _is_strings(v) and set(s) == {"type", "const"}, lambda v, s: dict(list(v.items())[:-1])),
    ),
    "references/defs": (
        "Does not follow references into `$defs`.",
        _by_reference(lambda s, root: bool(_properties(_target(s, root))) and not _refers(_target(s, root)), _dumps),
    ),
    "references/definitions": (
        "Does not follow references into `definitions`.",
        _by_reference(lambda s, root: str(s.get("$ref")).startswith("#/definitions/"), _dumps),
    ),
    "references/in-items": (
        "Does not follow the reference of items.",
        _if(lambda v, s: "$ref" in _items(s), lambda v, s: [_dumps(item) for item in v]),
    ),
    "references/chain": (
        "Follows one reference only.",
        _by_reference(lambda s, root: "$ref" in _target(s, root), _dumps),
    ),
    "references/escaped": (
        "Does not read the escapes of a reference.",
        _by_reference(lambda s, root: "~1" in str(s.get("$ref")), lambda value: None),
    ),
    "references/to-property": (
        "Takes a reference to a property for anything.",
        _by_reference(lambda s, root: str(s.get("$ref")).startswith("#/properties/"), lambda value: {}),
    ),
    "references/beside-others": ("Ignores what stands beside a reference.", _without_siblings),
    "references/recursive": ("Unfolds recursion once.", _by_reference(_is_recursive, _deeper(1, _dumps))),
    "references/recursive-root": (
        "Does not follow a reference to the root.",
        _by_reference(lambda s, root: s.get("$ref") == "#", _dumps),
    ),
    "references/mutual": (
        "Does not follow the second of two references.",
        _by_reference(_is_mutual, _deeper(1, _dumps)),
    ),
    "nesting/deep": ("Cuts what lies ten levels deep.", lambda said, _: _deeper(10, lambda value: {})(said)),
    "nesting/objects-in-array": (
        "Keeps the first object of an array.",
        _if(lambda v, s: isinstance(v, list) and len(v) > 1 and all(map(_is_strings, v)), lambda v, s: v[:1]),
    ),
    "nesting/arrays-in-array": ("Flattens arrays.", _each(_flat)),
    "nesting/object-in-objects": (
        "Parses the outer object only.",
        _if(
            lambda v, s: isinstance(v, dict) and len(v) == 1 and all(map(_is_strings, v.values())),
            lambda v, s: {key: _dumps(inner) for key, inner in v.items()},
        ),
    ),
    "nesting/null-in-array": (
        "Drops nulls of arrays.",
        _if(lambda v, s: isinstance(v, list), lambda v, s: [item for item in v if item is not None]),
    ),
    "nesting/empty-in-object": (
        "Drops empty arrays in objects.",
        _if(lambda v, s: isinstance(v, dict), lambda v, s: {key: inner for key, inner in v.items() if inner != []}),
    ),
    "nesting/same-key-twice": ("Hands out the outer value of a key twice.", _outer_for_inner),
    "nesting/schema-words": (
        "Takes keys for those of a schema.",
        _if(lambda v, s: isinstance(v, dict) and {"type", "items"} <= set(v), lambda v, s: _without(v, "items")),
    ),
    "bounds/minimum": ("Lets through what is below.", _if(lambda v, s: "minimum" in s, lambda v, s: s["minimum"] - 15)),
    "bounds/maximum": ("Lets through what is above.", _if(lambda v, s: "maximum" in s, lambda v, s: s["maximum"] + 1)),
    "bounds/exclusive-minimum": (
        "Takes an exclusive bound for an inclusive one.",
        _if(lambda v, s: {"exclusiveMinimum", "exclusiveMaximum"} <= set(s), lambda v, s: s["exclusiveMinimum"]),
    ),
    "bounds/min-length": (
        "Lets through short strings.",
        _if(lambda v, s: "minLength" in s and "pattern" not in s, lambda v, s: v[:3]),
    ),
    "bounds/max-length": (
        "Lets through long strings.",
        _if(lambda v, s: s.get("maxLength", 99) < 9 and "minLength" not in s, lambda v, s: v + "imilian"),
    ),
    "bounds/min-items": ("Lets through short arrays.", _if(lambda v, s: s.get("minItems", 0) > 2, lambda v, s: v[:1])),
    "bounds/max-items": (
        "Lets through long arrays.",
        _if(lambda v, s: s.get("minItems") == 1 and s.get("maxItems", 0) > 1, lambda v, s: (v * 5)[:5]),
    ),
    "bounds/pattern": (
        "Does not enforce patterns.",
        _if(lambda v, s: str(s.get("pattern")).startswith("^[a-z]{2}"), lambda v, s: "unknown"),
    ),
    "bounds/pattern-and-length": (
        "Forgets a length beside a pattern.",
        _if(lambda v, s: {"pattern", "minLength"} <= set(s), lambda v, s: v[:3]),
    ),
    "bounds/prefix-items": ("Hands out a pair in reverse.", _if(lambda v, s: "prefixItems" in s, lambda v, s: v[::-1])),
    "unions/any-of-second": (
        "Knows the first option only, which is a string.",
        _text(lambda v, s: isinstance(v, dict) and s.get("anyOf", [{}])[0].get("type") == "string"),
    ),
    "unions/one-of": ("Does not know `oneOf`.", _text(lambda v, s: "oneOf" in s)),
    "unions/tagged": ("Hands out the first option's tag.", _each(_tag_of_first)),
    "unions/all-of": ("Does not know `allOf`.", _each(_without_parts)),
    "unions/null-of-list": (
        "Leaves out null where types are a list.",
        _drop(lambda v, s: v is None and "null" in _types(s) and "enum" not in s),
    ),
    "unions/null-of-any-of": (
        "Hands out the null of `anyOf` as a string.",
        _text(lambda v, s: v is None and "anyOf" in s),
    ),
    "unions/nullable": ("Does not know `nullable`.", _text(lambda v, s: v is None and s.get("nullable") is True)),
    "unions/digits-of-string": (
        "Reads digits as a number where it may.",
        _if(lambda v, s: "integer" in _types(s) and isinstance(v, str) and v.isdigit(), lambda v, s: int(v)),
    ),
    "unions/number-of-string": (
        "Hands out numbers as strings where it may.",
        _text(lambda v, s: "string" in _types(s) and _is_number(v)),
    ),
    "unions/array-or-string": (
        "Hands out arrays as strings where it may.",
        _text(lambda v, s: "string" in _types(s) and isinstance(v, list)),
    ),
    "long/string": ("Cuts strings.", _each(lambda v, s: v[:2048] if isinstance(v, str) and len(v) > 2048 else v)),
    "long/lines": (
        "Leaves out lines in the middle.",
        _each(
            lambda v, s: (
                "\n".join([*v.split("\n")[:9], "...", *v.split("\n")[-9:]])
                if isinstance(v, str) and v.count("\n") > 99
                else v
            )
        ),
    ),
    "long/array": ("Cuts arrays.", _each(lambda v, s: v[:128] if isinstance(v, list) else v)),
    "long/properties": ("Leaves out the arguments after the fiftieth.", lambda said, _: dict(list(said.items())[:50])),
}

REFUSALS: dict[str, tuple[str, Callable[[Schema], bool]]] = {
    "bounds/unique-items": ("Refuses `uniqueItems`.", lambda schema: "uniqueItems" in schema),
    "bounds/multiple-of": ("Refuses `multipleOf`.", lambda schema: "multipleOf" in schema),
    "bounds/format": ("Refuses `format`.", lambda schema: isinstance(schema.get("format"), str)),
    "bounds/property-names": ("Refuses `propertyNames`.", lambda schema: "propertyNames" in schema),
    "bounds/pattern-shorthand": ("Refuses `\\d`.", lambda schema: "\\d" in str(schema.get("pattern"))),
    "bounds/large-max-length": (
        "Refuses strings of many characters.",
        lambda schema: isinstance(bound := schema.get("maxLength"), int) and bound > 2000,
    ),
}


def _register(name: str, doc: str, **hooks: Any) -> None:
    fault(name)(type("Changed", (Fault,), {"__doc__": doc, "__module__": __name__, **hooks}))


def _changing(change: Change) -> Callable[[Fault, Asked, Said], Said]:
    def answer(self: Fault, asked: Asked, said: Said) -> Said:
        def changed(call: SaidCall) -> SaidCall:
            before = call.value
            if not isinstance(before, dict):
                return call
            after = change(before, asked.schema(call.name))
            return call if _dumps(after) == _dumps(before) else replace(call, arguments=_dumps(after))

        return said.map_calls(changed)

    return answer


def _refusing(which: Callable[[Schema], bool]) -> Callable[[Fault, Asked, Refusal | None], Refusal | None]:
    def refusal(self: Fault, asked: Asked, refusal: Refusal | None) -> Refusal | None:
        refused = any(which(node) for tool in asked.tools for node in _schemas(tool))
        return Refusal("tools[0]", "failed to parse grammar") if refused else refusal

    return refusal


def _of_string(change: Callable[[str], Any]) -> Change:
    return lambda said, _: _everywhere(said, lambda value: change(value) if isinstance(value, str) else value)


def _of_key(change: Callable[[str], str]) -> Change:
    return lambda said, _: {change(key): value for key, value in said.items()}


for _name, (_doc, _string) in STRINGS.items():
    _register(f"literals/{_name}", _doc, answer=_changing(_of_string(_string)))
for _name, (_doc, _string) in KEYS.items():
    _register(f"literals/{_name}", _doc, answer=_changing(_of_key(_string)))
for _name, (_doc, _change) in ARGUMENTS.items():
    _register(_name, _doc, answer=_changing(_change))
for _name, (_doc, _which) in REFUSALS.items():
    _register(_name, _doc, refusal=_refusing(_which))


@fault("literals/opening-tool-call")
class FurtherCall(Fault):
    """Takes `<tool_call>` in a string for a further call."""

    def answer(self, asked: Asked, said: Said) -> Said:
        further = [
            replace(call, id=f"{call.id}_2", arguments="{}") for call in said.calls if "<tool_call>" in call.arguments
        ]
        return replace(said, calls=(*said.calls, *further))


@fault("literals/key-name")
class NameOfArgument(Fault):
    """Takes the argument `name` for the tool's name."""

    def answer(self, asked: Asked, said: Said) -> Said:
        def changed(call: SaidCall) -> SaidCall:
            value = call.value
            return replace(call, name=str(value["name"])) if isinstance(value, dict) and "name" in value else call

        return said.map_calls(changed)


@fault("long/tool-name")
class CutName(Fault):
    """Cuts the names of tools at 60 characters."""

    def answer(self, asked: Asked, said: Said) -> Said:
        return said.map_calls(lambda call: replace(call, name=call.name[:60]) if call.whole else call)
