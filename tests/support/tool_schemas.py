# SPDX-License-Identifier: Apache-2.0
"""Tool definitions and valid arguments, drawn from a seed: what the walks, the forced calls and the speed runs call.

Only keywords that a grammar can enforce are drawn; what is checked after generation (`format`, `uniqueItems`, ...) has
tests of its own, where a walk could not know what to write. With ``bounded=True`` every string, array and recursion has
an upper bound, so that a model of random weights comes to an end of each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import jsonschema

__all__ = ["CODE", "arguments", "schemas", "tools"]

JsonSchema = dict[str, Any]

#: Keys of properties: identifiers, and what MCP servers and people beside them write.
KEYS = (
    *(
        "path",
        "content",
        "query",
        "limit",
        "user_id",
        "cwd",
        "mode",
        "items",
        "filter",
        "enabled",
        "ratio",
        "old_string",
    ),
    *("file-name", "user.id", "$filter", "größe", "ключ", "with space", "x" * 40, "__proto__", "name", "arguments"),
)
#: A pattern and a function that writes a text of it.
PATTERNS: tuple[tuple[str, Callable[[random.Random], str]], ...] = (
    ("^[a-z]{1,8}$", lambda rng: _word(rng)),
    ("^[A-Z]{2}-[0-9]{3}$", lambda rng: f"{rng.choice(['AB', 'ZZ'])}-{rng.randrange(1000):03}"),
    ("^(red|green|blue)$", lambda rng: rng.choice(["red", "green", "blue"])),
    ("^(/[a-z0-9_]{1,6}){1,3}$", lambda rng: "/" + _word(rng)[:6]),
    ("^v[0-9]\\.[0-9]{1,2}$", lambda rng: f"v{rng.randrange(10)}.{rng.randrange(100)}"),
    ("^#?[0-9a-fA-F]{6}$", lambda rng: f"#{rng.randrange(1 << 24):06x}"),
)
#: Strings that formats and parsers have broken on: files, markup, entities, JSON in a string, line breaks at the ends.
CODE = (
    "",
    "\n",
    " leading and trailing \n\n",
    "def f(x):\n\tif x < 3 and x > 1:\n\t\treturn \"a\\n\" + 'b'\n",
    "<html>&lt;b&gt; &amp; &quot;</html>\n",
    "a </tool_call> in the text",
    "</function>\n</tool_call>",
    "<parameter=x>\ny\n</parameter >",
    "<arg_key>k</arg_key>",
    "<|tool_calls_section_end|> and </｜DSML｜tool_calls>",
    '{"json": [1, 2.0, "in a string"]}',
    "[not json",
    "true",
    "-0.5e3",
    "007",
    "null ",
    "naïve 日本語 😀 \u2028 \x7f",
    "C:\\new\\table\r\n",
    "```python\nprint(1)\n```",
    "<think>no</think>",
)
#: Values that read as scalars beside those that do not, for unions.
MIXED: tuple[Any, ...] = ("auto", "1", 2, None, True, "false", "on", -7, 0.5, "null", "2.0")


def _word(rng: random.Random) -> str:
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(1, 8)))


class _Draw:
    """One schema being drawn."""

    def __init__(self, rng: random.Random, *, bounded: bool, recursion: bool) -> None:
        self.rng = rng
        self.bounded = bounded
        self.recursion = recursion
        self.definitions: dict[str, JsonSchema] = {}

    def string(self) -> JsonSchema:
        rng = self.rng
        kind = rng.randrange(8)
        if kind == 0:
            return {"type": "string", "enum": rng.sample(["r", "w", "rw", "true", "12", "a b", "é", "it's", "x<y"], 3)}
        if kind == 1:
            return {"type": "string", "pattern": rng.choice(PATTERNS)[0]}
        if kind == 2 or self.bounded:
            low = rng.randrange(3)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(1, 12)}
        if kind == 3:
            return {"type": "string", "minLength": rng.randrange(1, 4)}
        if kind == 4:
            return {"const": rng.choice(["fixed", "1", "", "two\nlines", "<b>"])}
        return {"type": "string", "description": "The whole text of a file."}

    def integer(self) -> JsonSchema:
        rng = self.rng
        kind = rng.randrange(5)
        low = rng.randrange(-120, 120)
        if kind == 0:
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(0, 300)}
        if kind == 1:
            return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + rng.randrange(2, 90)}
        if kind == 2:
            return {"type": "integer", rng.choice(["minimum", "maximum"]): low}
        if kind == 3:
            return {"type": "integer", "enum": rng.sample(range(-3, 40), 3)}
        return {"type": "integer"}

    def number(self) -> JsonSchema:
        rng = self.rng
        kind = rng.randrange(4)
        low = round(rng.uniform(-20, 20), rng.randrange(3))
        if kind == 0:
            return {"type": "number", "minimum": low, "maximum": round(low + rng.uniform(1, 40), 2)}
        if kind == 1:
            return {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": round(low + rng.uniform(1, 9), 1)}
        if kind == 2:
            return {"type": "number", rng.choice(["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"]): low}
        return {"type": "number"}

    def scalar(self) -> JsonSchema:
        rng = self.rng
        kind = rng.randrange(9)
        if kind < 3:
            return self.integer()
        if kind < 5:
            return self.number()
        if kind < 7:
            return {"type": "boolean"}
        if kind == 7:
            return {"type": ["integer", "null"], "minimum": 0}
        return {"type": "boolean", "nullable": True}

    def union(self, depth: int) -> JsonSchema:
        """Draw a string beside something else, in the spellings that occur."""
        rng = self.rng
        kind = rng.randrange(9)
        if kind == 0:
            return {"type": ["string", "null"]} | ({"maxLength": 9} if self.bounded else {})
        if kind == 1:
            return {**self.string_plain(), "nullable": True}
        if kind == 2:
            return {"enum": rng.sample(MIXED, 4)}
        if kind == 3:
            return {"type": ["string", "integer"]} | ({"maxLength": 9} if self.bounded else {})
        if kind == 4:
            return {"anyOf": [self.string(), {"type": "array", "items": self.leaf(), "maxItems": 3}]}
        if kind == 5:
            return {"anyOf": [self.string_plain(), self.object(depth + 1)]}
        if kind == 6:
            return {"oneOf": [{"type": "boolean"}, self.string_plain()]}
        if kind == 7:
            return {"anyOf": [self.string(), self.number(), {"type": "null"}]}
        return {"type": ["string", "number", "boolean", "null"]} | ({"maxLength": 6} if self.bounded else {})

    def string_plain(self) -> JsonSchema:
        return {"type": "string", "maxLength": self.rng.randrange(1, 10)} if self.bounded else {"type": "string"}

    def leaf(self) -> JsonSchema:
        return self.string() if self.rng.random() < 0.5 else self.scalar()

    def array(self, depth: int) -> JsonSchema:
        rng = self.rng
        kind = rng.randrange(4)
        if kind == 0:
            low = rng.randrange(3)
            return {"type": "array", "items": self.node(depth + 1), "minItems": low, "maxItems": low + rng.randrange(3)}
        if kind == 1:
            return {"type": "array", "prefixItems": [self.leaf(), self.leaf()], "items": False, "minItems": 2}
        if kind == 2 and not self.bounded:
            return {"type": "array", "items": self.leaf()}
        return {"type": "array", "items": self.leaf(), "maxItems": 3}

    def definition(self, depth: int) -> JsonSchema:
        """Draw a reference: to something plain, to a tree or to a list that links on."""
        rng = self.rng
        place = rng.choice(["#/$defs/", "#/definitions/"])
        kind = rng.randrange(3)
        if kind == 0 or not self.recursion:
            name = f"part{len(self.definitions)}"
            reference = {"$ref": place + name}
            self.definitions[place + name] = {}  # takes the name before what stands inside takes one
            self.definitions[place + name] = self.node(depth + 1)
        elif kind == 1:
            name = "tree"
            reference = {"$ref": place + name}
            self.definitions[place + name] = {
                "type": "object",
                "properties": {
                    "label": {"type": "string", "maxLength": 8},
                    "children": {"type": "array", "items": reference, "maxItems": 2},
                },
                "required": ["label"],
                "additionalProperties": False,
            }
        else:
            name = "link"
            reference = {"$ref": place + name}
            self.definitions[place + name] = {
                "type": "object",
                "properties": {"n": {"type": "integer"}, "next": {"anyOf": [{"type": "null"}, reference]}},
                "required": ["n", "next"],
                "additionalProperties": False,
            }
        return dict(reference)

    def node(self, depth: int) -> JsonSchema:
        rng = self.rng
        kind = rng.randrange(20)
        if depth >= 3 or kind < 9:
            return self.leaf()
        if kind < 13:
            return self.union(depth)
        if kind < 15:
            return self.array(depth)
        if kind < 17:
            return self.object(depth + 1)
        if kind < 19:
            return self.definition(depth)
        return {"allOf": [{"type": "integer", "minimum": -5}, {"maximum": rng.randrange(60)}]}

    def object(self, depth: int) -> JsonSchema:
        rng = self.rng
        keys = rng.sample(KEYS, rng.choice([1, 1, 2, 2, 3, 4] if depth else [0, 1, 2, 2, 3, 3, 4, 6]))
        properties = {key: self.node(depth) for key in keys}
        required = [key for key in keys if rng.random() < 0.6]
        schema: JsonSchema = {"type": "object", "properties": properties, "required": required}
        extra = 0 if self.bounded else rng.randrange(8)
        if extra == 7:
            schema["additionalProperties"] = self.leaf()
        elif extra == 6:
            schema["additionalProperties"] = True
        elif extra < 5 or depth:
            schema["additionalProperties"] = False
        return schema

    def parameters(self) -> JsonSchema:
        schema = self.object(0)
        for reference, definition in self.definitions.items():
            _, place, name = reference.split("/")
            schema.setdefault(place, {})[name] = definition
        return schema


def schemas(seed: int, count: int, *, bounded: bool = True, recursion: bool = True) -> list[JsonSchema]:
    """Draw `count` schemas of arguments; the same for the same seed.

    With `bounded` and without `recursion`, whose depth no keyword bounds, a value of any of them has a few hundred
    characters at most.
    """
    return [
        _Draw(random.Random(f"{seed} {number}"), bounded=bounded, recursion=recursion).parameters()
        for number in range(count)
    ]


def tools(seed: int, count: int, *, bounded: bool = False) -> list[dict[str, Any]]:
    """Draw the `tools` of a request: `count` functions of distinct names, each as OpenAI's API writes it.

    The names hold pairs of which one begins another, and names that differ by a character.
    """
    rng = random.Random(f"{seed} names")
    names = rng.sample(
        ["read", "read_file", "read_file_2", "mcp__github__create_issue", "a.b-c", "Bash", "bash", "x" * 64, "t0", "t"],
        min(count, 10),
    )
    names += [f"tool_{number}" for number in range(count - len(names))]
    drawn = schemas(seed, count, bounded=bounded)
    return [
        {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}
        for name, parameters in zip(names, drawn, strict=True)
    ]


def arguments(schema: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Write arguments that are valid against a schema drawn here, strings of `CODE` among them.

    Raises:
        ValueError: when no attempt gave a valid value: a schema of keywords that are not drawn here.
    """
    rng = random.Random(f"{seed} arguments")
    # Draft 2020-12 does not know `nullable`; null is written where `type` lists it, so the plain validator will do.
    validator = jsonschema.Draft202012Validator(schema)
    for _ in range(20):
        value = _value(schema, schema, rng, 0)
        if isinstance(value, dict) and validator.is_valid(value):
            return value
    raise ValueError(f"no valid arguments found for {schema}")


def _value(node: Any, root: Mapping[str, Any], rng: random.Random, depth: int) -> Any:
    if node is True or node == {}:
        return rng.choice([None, 1, "text", [1], {"k": "v"}])
    if "$ref" in node:
        target: Any = root
        for part in node["$ref"].split("/")[1:]:
            target = target[part]
        return _value(target, root, rng, depth + 1)
    for keyword in ("anyOf", "oneOf"):
        if keyword in node:
            # The first alternative ends a recursion.
            return _value(node[keyword][0] if depth > 4 else rng.choice(node[keyword]), root, rng, depth)
    if "allOf" in node:
        merged: dict[str, Any] = {}
        for part in node["allOf"]:
            merged.update(part)
        return _value(merged, root, rng, depth)
    if "const" in node:
        return node["const"]
    if "enum" in node:
        return rng.choice(node["enum"])
    kind = node.get("type", "object")
    if isinstance(kind, list):
        kind = rng.choice(kind)
    if kind == "string":
        return _string(node, rng)
    if kind in ("integer", "number"):
        return _number(node, kind, rng)
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "null":
        return None
    if kind == "array":
        prefix = [_value(item, root, rng, depth + 1) for item in node.get("prefixItems", [])]
        items = node.get("items", True)
        if items is False:
            return prefix
        low = node.get("minItems", 0)
        high = low if depth > 4 else min(node.get("maxItems", low + 3), low + 3)
        return prefix + [_value(items, root, rng, depth + 1) for _ in range(rng.randint(low, high))]
    value = {}
    for key, part in node.get("properties", {}).items():
        if key in node.get("required", ()) or (rng.random() < 0.6 and depth < 5):
            value[key] = _value(part, root, rng, depth + 1)
    additional = node.get("additionalProperties", True)
    if additional is not False and rng.random() < 0.3:
        value[f"extra_{rng.randrange(9)}"] = _value(additional, root, rng, depth + 1)
    return value


def _string(node: Mapping[str, Any], rng: random.Random) -> str:
    for pattern, write in PATTERNS:
        if node.get("pattern") == pattern:
            return write(rng)
    low, high = node.get("minLength", 0), node.get("maxLength")
    text: str = rng.choice(CODE)
    text += "x" * (low - len(text))
    return text if high is None else text[:high]


def _number(node: Mapping[str, Any], kind: str, rng: random.Random) -> int | float:
    whole = kind == "integer"
    # A small step inside an exclusive bound; bounds that leave no such number are not drawn.
    step = 1 if whole else 0.015625
    low = node.get("minimum")
    if "exclusiveMinimum" in node:
        low = node["exclusiveMinimum"] + step
    high = node.get("maximum")
    if "exclusiveMaximum" in node:
        high = node["exclusiveMaximum"] - step
    if low is None:
        low = (0 if high is None else high) - 1000
    if high is None:
        high = low + 2000
    return rng.randint(low, high) if whole else rng.uniform(low, high)
