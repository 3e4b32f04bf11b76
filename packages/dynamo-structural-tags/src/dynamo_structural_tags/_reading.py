# SPDX-License-Identifier: Apache-2.0
"""How the text of an argument is read in formats that write strings as they are.

One rule, the same in grammar, parser and renderer:

1. The schema admits strings only: the text is the string.
2. The schema admits no string: the text is JSON.
3. It admits both. A text that begins with `{` where objects are admitted, or with `[` where arrays are, is JSON. A text
   that is exactly one JSON number, true, false or null, and valid against the schema, is that value. Any other text is
   the string.

Where no schema is known (an additional property without one, an undeclared tool) everything is admitted and every
scalar is valid: rule 3. Where the request says `strict: false` a property admits strings beside its declared types.
Where several alternatives of the arguments' schema (`anyOf` at its top) declare a property, it admits what any of them
admits. Formats that mark a value's type in its tag (DSML) read by rule 1 or 2 and need no schema.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ._cache import ContentCache
from ._errors import RequestError
from ._request import Tool
from ._schema import Kinds, Schema

__all__ = [
    "ANYTHING",
    "Mode",
    "Reading",
    "ToolReading",
    "arguments_schema",
    "begins_json",
    "content_of",
    "mode",
    "read_scalar",
    "scalar",
    "tool_reading",
]

#: `text`: rule 1. `json`: rule 2. `union`: rule 3.
Mode = Literal["text", "json", "union"]

#: The longest text that may be a scalar: a longer one is a string under rule 3.
MAX_SCALAR = 400

_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")


def mode(kinds: Kinds) -> Mode:
    """Return by which rule the text of a value of these JSON types is read."""
    if not kinds.string:
        return "json"
    return "union" if kinds.object or kinds.array or kinds.scalar else "text"


def begins_json(first: str, kinds: Kinds) -> bool:
    """Say whether a text of the mode `union` is JSON to be read to its end, by its first character."""
    return (first == "{" and kinds.object) or (first == "[" and kinds.array)


def scalar(text: str) -> tuple[Any] | None:
    """Return the value of a text that is exactly one JSON number, true, false or null, as a 1-tuple; else None.

    A number that overflows to infinity is none.
    """
    if len(text) > MAX_SCALAR or _SCALAR.fullmatch(text) is None:
        return None
    value = json.loads(text)
    return None if isinstance(value, float) and not math.isfinite(value) else (value,)


def read_scalar(text: str, kinds: Kinds, schema: Schema | None) -> bool:
    """Say whether a text of the mode `union` is a scalar: its JSON text is then the text itself.

    `schema` is None where no schema is known: then every scalar is valid.
    """
    if not kinds.scalar:
        return False
    value = scalar(text)
    return value is not None and (schema is None or schema.problem(value[0]) is None)


@dataclass(frozen=True)
class Reading:
    """How the text of one argument is read."""

    kinds: Kinds
    #: A scalar is valid if it is valid against one of them; empty where no schema is known.
    schemas: tuple[Schema, ...] = ()

    @property
    def mode(self) -> Mode:
        """By which rule."""
        return mode(self.kinds)

    def begins_json(self, first: str) -> bool:
        """Say whether a text of the mode `union` is JSON, by its first character."""
        return begins_json(first, self.kinds)

    def is_scalar(self, text: str) -> bool:
        """Say whether a text of the mode `union` is a scalar."""
        if not self.schemas:
            return read_scalar(text, self.kinds, None)
        return any(read_scalar(text, self.kinds, schema) for schema in self.schemas)


#: The reading where no schema is known.
ANYTHING = Reading(Kinds(string=True, object=True, array=True, scalar=True))


class ToolReading:
    """How the arguments of one tool are read; made by :func:`tool_reading`."""

    def __init__(self, schema: Schema | None, strict: bool) -> None:
        #: The schema of the arguments; None where the tool is not known.
        self.schema = schema
        #: False where the request says `strict: false`.
        self.strict = strict
        self._shapes = () if schema is None else schema.objects()
        self._keys: dict[str, Reading] = {}

    def of(self, key: str) -> Reading:
        """Return how the argument of that key is read."""
        found = self._keys.get(key)
        if found is None:
            found = self._of(key)
            # Bounded: a model may invent any number of keys.
            if len(self._keys) < 256:
                self._keys[key] = found
        return found

    def _of(self, key: str) -> Reading:
        schemas: list[Schema] = []
        for shape in self._shapes:
            declared = [item.schema for item in shape.properties if item.key == key]
            if declared:
                schemas += declared
            elif shape.additional is not None:
                schemas.append(shape.additional)
        if not schemas:
            return ANYTHING
        each = [schema.kinds for schema in schemas]
        kinds = Kinds(
            string=not self.strict or any(kinds.string for kinds in each),
            object=any(kinds.object for kinds in each),
            array=any(kinds.array for kinds in each),
            scalar=any(kinds.scalar for kinds in each),
        )
        return Reading(kinds, tuple(schemas))


def _schema(text: str, path: str) -> Schema:
    node = json.loads(text)
    # Arguments are an object, whether the schema says so or not. A type that excludes objects is kept: check_schema and
    # the grammar refuse it.
    node.pop("nullable", None)
    types = node.get("type")
    if types is None or (isinstance(types, list) and "object" in types):
        node = {"type": "object", **{key: value for key, value in node.items() if key != "type"}}
    return Schema(node, path=path)


#: By the schema's text, its place and whether it is strict. The size counts the text's characters, of which a schema
#: that is read takes about 50 bytes each.
_READINGS: ContentCache[ToolReading] = ContentCache(entries=2048, size=4 << 20)


def content_of(schema: Mapping[str, Any] | bool, path: str) -> str:
    """Return a schema as text. Object keys are not sorted: the order of the properties is that of the arguments.

    Raises:
        RequestError: it is not JSON, or nests too deeply.
    """
    try:
        return json.dumps(schema, ensure_ascii=False, default=_plain)
    except RecursionError:
        raise RequestError(path, "nests too deeply") from None
    except (TypeError, ValueError) as error:
        raise RequestError(path, f"is not JSON: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def arguments_schema(tool: Tool) -> Schema:
    """Return the schema of a tool's arguments: its parameters, restricted to objects. Cached by content."""
    schema = tool_reading(tool).schema
    assert schema is not None
    return schema


def tool_reading(tool: Tool | None) -> ToolReading:
    """Return how a tool's arguments are read; None stands for a tool that is not declared. Cached by content."""
    if tool is None:
        return _UNKNOWN
    path, strict = f"{tool.path}.parameters", tool.strict
    text = content_of(tool.parameters, path)
    return _READINGS.get((text, path, strict), lambda: ToolReading(_schema(text, path), strict), lambda _: len(text))


_UNKNOWN = ToolReading(None, True)
