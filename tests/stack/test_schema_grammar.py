# SPDX-License-Identifier: Apache-2.0
"""The grammar of a schema under the real xgrammar: what it accepts is valid, and what is valid it accepts."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from typing import Any

import pytest
import xgrammar as xgr
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from transformers import PreTrainedTokenizerFast

from dynamo_structural_tags._errors import RequestError
from dynamo_structural_tags._schema import JsonGrammar, Rules, Schema, check_schema
from serving_stack.model import text_tokenizer

SLOW = settings(max_examples=40, suppress_health_check=list(HealthCheck))


@lru_cache(maxsize=1)
def compiler() -> Any:
    info = xgr.TokenizerInfo([b"a", b"<end>"], stop_token_ids=[1])
    return xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False)


class Accepts:
    """Whether the grammar of a schema accepts a text as a whole."""

    def __init__(self, schema: Any, order: Any = "declared", *, strings: bool = True) -> None:
        check_schema(schema, "schema")
        rules = Rules()
        grammar = rules.text(JsonGrammar(rules, order).value(Schema(schema, path="schema"), strings=strings))
        tag = {"type": "structural_tag", "format": {"type": "grammar", "grammar": grammar}}
        self.compiled = compiler().compile_structural_tag(json.dumps(tag))

    def __call__(self, text: str) -> bool:
        matcher = xgr.GrammarMatcher(self.compiled, terminate_without_stop_token=True)
        return bool(text) and matcher.accept_string(text) and matcher.is_terminated()


NODE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["v", "next"],
        }
    },
}
THREE = {"type": "object", "properties": {k: {"type": "integer"} for k in "abc"}, "required": ["b"]}
OPEN = {
    "type": "object",
    "properties": {"ab": {"type": "integer"}, "a": {"type": "integer"}, "é\n": {"type": "integer"}},
    "additionalProperties": {"type": "string"},
}
CASES: list[tuple[str, Any, list[str], list[str]]] = [
    ("integer", {"type": "integer"}, ["0", "-1", "12", "9" * 20], ["-0", "01", "1.0", "1e3", "9" * 21, "+1"]),
    (
        "number",
        {"type": "number"},
        ["0", "-0.0", "1e-07", "1e+16", "5e-324", "1.5E10", "-3.25", "1e277", "0.30000000000000004", "7"],
        ["-0", "01", ".5", "1.", "1e", "1e278", "1e999", "NaN", "Infinity"],
    ),
    (
        "string",
        {"type": "string"},
        ['""', '"a"', r'"\n"', r'"\u00e9"', r'"\ud83d\ude00"', '"é😀\u2028"', '"\x7f"', r'"\/"'],
        [r'"\ud83d"', r'"\ude00"', '"a', '"\n"', r'"\x"', r'"\ud83dx"', '"a"b'],
    ),
    ("boolean", {"type": "boolean"}, ["true", "false"], ["null", "True", "0"]),
    ("null", {"type": "null"}, ["null"], ["false", "0", '""']),
    ("types", {"type": ["string", "null"]}, ['"x"', "null"], ["1"]),
    ("nullable", {"type": "string", "nullable": True}, ['"x"', "null"], ["1"]),
    ("nullable enum", {"enum": ["a"], "nullable": True}, ['"a"', "null"], ['"b"']),
    ("not nullable", {"type": "string", "nullable": False}, ['"x"'], ["null"]),
    (
        "enum",
        {"enum": ["a", 'é"', 1, 1.5, None, True, {"a": [1, 2]}, []]},
        ['"a"', r'"é\""', "1", "1.5", "null", "true", '{"a": [1, 2]}', '{"a":[1,2]}', "[]"],
        ['"b"', "2", "false", "{}", "[ ]", '{"a":  [1, 2]}'],
    ),
    ("enum and type", {"enum": ["a", 1], "type": "string"}, ['"a"'], ["1"]),
    ("enum and length", {"enum": ["a", "abc"], "minLength": 2}, ['"abc"'], ['"a"']),
    ("const", {"const": {"a": 1}}, ['{"a":1}', '{"a": 1}'], ['{"a":2}', "{}"]),
    ("lengths", {"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', r'"é😀\n"', r'"\ud83d\ude00a"'],
     ['"a"', '"abcd"', r'"\ud83d\ude00"', '""']),
    ("longest", {"type": "string", "maxLength": 128}, ['""', f'"{"x" * 128}"'], [f'"{"x" * 129}"']),
    ("shortest", {"type": "string", "minLength": 3}, ['"abc"', r'"\n\n\nabc"'], ['"ab"', '""']),
    ("minimum", {"type": "integer", "minimum": 0}, ["0", "7", "100"], ["-1"]),
    ("maximum", {"type": "integer", "maximum": -5}, ["-5", "-10", "-123456"], ["-4", "0", "5"]),
    ("fractions as bounds", {"type": "integer", "exclusiveMinimum": -1.5, "maximum": 2.5}, ["-1", "0", "2"],
     ["-2", "3"]),
    ("decimals", {"type": "number", "minimum": -1.5, "exclusiveMaximum": 10}, ["-1.5", "-1.50", "9.999", "0", "0.0"],
     ["-1.51", "10", "10.0", "1e0", "-2"]),
    ("above zero", {"type": "number", "exclusiveMinimum": 0}, ["0.001", "1", "12.5"], ["0", "0.0", "-1"]),
    ("items", {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}, ["[1,2]", "[1, 2, 3]"],
     ["[1]", "[]", "[1,2,3,4]", "[1,  2]", "[1 ,2]", "[1,2,]", '["a",1]']),
    ("one item", {"type": "array", "items": {"type": "null"}, "maxItems": 1}, ["[]", "[null]"], ["[null,null]"]),
    ("no item", {"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    ("prefix", {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}],
                "items": {"type": "boolean"}, "minItems": 1},
     ["[1]", '[1, "a"]', '[1,"a",true,false]'], ["[]", '["a"]', "[1,true]"]),
    ("prefix only", {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
     ["[]", "[1]", '[1, "a"]'], ['[1,"a",true]']),
    ("Draft 7's prefix", {"type": "array", "items": [{"type": "integer"}], "additionalItems": False}, ["[]", "[1]"],
     ['["a"]', "[1,1]"]),
    ("properties", THREE, ['{"b":1}', '{"a": 1, "b": 2}', '{"a":1,"b":1,"c":1}', '{"b":1, "c":1}'],
     ["{}", '{"a":1}', '{"b":1,"a":1}', '{"b":1,"d":1}', '{"b":1,"b":1}', '{ "b":1}']),
    ("all optional", {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}},
     ["{}", '{"a":null}', '{"b":null}', '{"a":null,"b":null}'], ['{"b":null,"a":null}']),
    ("no properties", {"type": "object", "properties": {}, "additionalProperties": False}, ["{}"], ['{"a":1}']),
    ("required, not declared", {"type": "object", "required": ["k"], "additionalProperties": {"type": "integer"}},
     ['{"k":1}', '{"k":1, "j":2}'], ["{}", '{"j":1}', '{"k":"a"}']),
    ("other keys", OPEN,
     ["{}", '{"ab":1}', '{"ab":1, "x":"y"}', '{"abc":"x"}', '{"b":"x"}', '{"":"x"}', r'{"é\nx":"x"}', '{"é":"x"}'],
     ['{"ab":"x"}', '{"a":"x"}', r'{"é\n":"x"}', r'{"\u0061":"x"}', r'{"é\u000a":"x"}', '{"x":1}']),
    ("map", {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
     ['{"a":1}', '{"a":1,"b":2}'], ["{}", '{"a":1,"b":2,"c":3}']),
    ("required keys use it up", {"type": "object", "required": ["k"], "additionalProperties": {"type": "integer"},
                                 "maxProperties": 1}, ['{"k":1}'], ["{}", '{"j":1}', '{"k":1, "j":2}']),
    ("any object", {"type": "object"}, ["{}", '{"a":{"b":[1,null]}}'], ["[]", '{"a"}', '{"a":1,}']),
    ("anything", {}, ["1", "[]", "{}", "null", '"x"', '["x"]', '{"a":"b"}', "true"], ["x", "nul", "[1,]"]),
    ("recursion", NODE, ['{"v":1,"next":null}', '{"v":1,"next":{"v":2,"next":null}}'],
     ['{"v":1}', '{"v":1,"next":{}}']),
    ("pattern", {"type": "string", "pattern": r"^[a-z]{2,3}-\d+$"}, ['"ab-1"', '"abc-12345"'],
     ['"a-1"', '"ab-"', '"ab-1x"', '"abcd-1"']),
    ("pattern with escapes", {"type": "string", "pattern": '["\\\\\n]x'}, [r'"\"x"', r'"aa\nxbb"', r'"\\x"'],
     ['"x"', '"ax"']),
    ("anchored options", {"type": "string", "pattern": "^a|b$"}, ['"axx"', '"xxb"', '"ab"'], ['"xa"', '"bx"', '""']),
    ("anyOf", {"anyOf": [{"type": "integer", "minimum": 5}, {"type": "string", "maxLength": 1}]}, ["5", '"a"'],
     ["4", '"ab"']),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "null"}]}, ["5", "null"], ['"a"']),
    ("allOf", {"allOf": [{"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]},
                         {"properties": {"a": {"maximum": 5}, "b": {"type": "string"}}}]},
     ['{"a":3}', '{"a":5,"b":"x"}'], ['{"a":2}', '{"a":6}', '{"b":"x"}']),
    ("options beside properties",
     {"type": "object", "properties": {"k": {"enum": ["a", "b"]}}, "required": ["k"],
      "anyOf": [{"properties": {"k": {"const": "a"}, "x": {"type": "integer"}}, "required": ["x"]},
                {"properties": {"k": {"const": "b"}}}]},
     ['{"k":"a","x":1}', '{"k":"b"}'], ['{"k":"a"}', '{"k":"c"}', '{"k":"b","x":1}']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_keyword_is_enforced(schema: Any, good: list[str], bad: list[str]) -> None:
    accepts = Accepts(schema)
    assert [text for text in good if not accepts(text)] == []
    assert [text for text in bad if accepts(text)] == []
    for text in good:
        assert Schema(schema).problem(json.loads(text)) is None


def test_any_order_takes_each_item_once() -> None:
    accepts = Accepts(THREE, "any")
    assert accepts('{"c":1,"b":1,"a":1}')
    assert accepts('{"b":1,"a":1}')
    assert not accepts('{"c":1,"a":1}')
    assert not accepts('{"b":1,"b":1}')
    mixed = Accepts(OPEN, "any")
    assert mixed('{"x":"y","a":1,"y":"z","ab":2}')
    assert not mixed('{"x":"y","a":1,"a":2}')


@pytest.mark.parametrize("schema", [{}, {"type": ["string", "integer", "array", "object"]}])
def test_strings_can_be_left_out_of_the_value_itself(schema: Any) -> None:
    accepts = Accepts(schema, strings=False)
    assert accepts("1")
    assert accepts('["a"]')
    assert accepts('{"a":"b"}')
    assert not accepts('"a"')


def test_what_is_not_text_is_not_accepted() -> None:
    compiled = Accepts({"type": "string"}).compiled
    for raw in (b"\xed\xa0\x80", b"\xc0\x80", b"\xff"):
        assert not xgr.GrammarMatcher(compiled).accept_string(b'"' + raw + b'"')


@pytest.mark.parametrize("seed", range(8))
def test_bounds_of_decimals_are_exact(seed: int) -> None:
    rnd = random.Random(seed)
    for _ in range(12):
        low = round(rnd.uniform(-30, 30), rnd.randrange(4))
        high = round(low + rnd.choice([0, 0.01, 0.5, 3, 50]) * rnd.random(), rnd.randrange(4))
        schema: dict[str, Any] = {"type": rnd.choice(["number", "integer"])}
        if rnd.random() < 0.8:
            schema[rnd.choice(["minimum", "exclusiveMinimum"])] = low
        if rnd.random() < 0.8:
            schema[rnd.choice(["maximum", "exclusiveMaximum"])] = high
        try:
            accepts = Accepts(schema)
        except RequestError:
            continue
        for _ in range(50):
            step = rnd.choice([0, 0.001, -0.001, 0.1, -0.1, 1, -1, 10, rnd.uniform(-3, 3)])
            value = rnd.choice([low, high, 0]) + step
            text = f"{value:.{rnd.choice([0, 1, 2, 3, 5]) if schema['type'] == 'number' else 0}f}"
            if float(text) == 0 and text[0] == "-":
                continue
            assert accepts(text) == (Schema(schema).problem(json.loads(text)) is None), (schema, text)


# Masks over a real vocabulary ------------------------------------------------------------------------------------

TOOL = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "short": {"type": "string", "minLength": 1, "maxLength": 6},
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"},
        "count": {"type": "integer", "minimum": -3, "maximum": 120},
        "ratio": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
        "kind": {"enum": ["one", "two", None, 3]},
        "tags": {"type": "array", "items": {"type": ["string", "null"]}, "maxItems": 3},
        "more": {
            "type": "object",
            "properties": {"a": {"type": "boolean"}},
            "additionalProperties": {"type": "integer"},
        },
    },
    "required": ["short", "count", "kind"],
    "additionalProperties": False,
}
WALKED: list[tuple[Any, Any]] = [
    (TOOL, {"text": "a\n\"é😀 b", "short": "x y", "code": "AB123", "count": 42, "ratio": 0.25, "kind": "two",
            "tags": ["a", None], "more": {"a": True, "b": 1}}),
    (NODE, {"v": 1, "next": {"v": -20, "next": None}}),
    ({"type": "string"}, "text at the top"),
    ({"type": "string", "maxLength": 9}, "as long !"),
    ({"type": "number"}, -1.5e-07),
    ({"type": "array", "items": {}}, [1, "a", None, {"b": []}]),
]  # fmt: skip


@lru_cache(maxsize=1)
def vocabulary() -> tuple[Any, Any, list[bytes]]:
    tokenizer = text_tokenizer()
    stop = tokenizer.token_to_id("<|endoftext|>")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    info = xgr.TokenizerInfo.from_huggingface(wrapped, stop_token_ids=[stop])
    return tokenizer, xgr.GrammarCompiler(info, max_threads=1), info.decoded_vocab


def _allowed(matcher: Any, mask: Any) -> list[int]:
    matcher.fill_next_token_bitmask(mask)
    words = mask[0].tolist()
    return [32 * at + bit for at, word in enumerate(words) for bit in range(32) if word >> bit & 1]


def _matcher(schema: Any) -> tuple[Any, Any]:
    _, compiler, known = vocabulary()
    rules = Rules()
    grammar = rules.text(JsonGrammar(rules).value(Schema(schema)))
    tag = {"type": "structural_tag", "format": {"type": "grammar", "grammar": grammar}}
    matcher = xgr.GrammarMatcher(compiler.compile_structural_tag(json.dumps(tag)))
    return matcher, xgr.allocate_token_bitmask(1, len(known))


@pytest.mark.parametrize(("schema", "value"), WALKED)
def test_the_mask_lets_every_token_of_a_valid_text_through(schema: Any, value: Any) -> None:
    tokenizer, _, _ = vocabulary()
    for separators in ((", ", ": "), (",", ":")):
        matcher, mask = _matcher(schema)
        for token in tokenizer.encode(json.dumps(value, ensure_ascii=False, separators=separators)).ids:
            assert token in _allowed(matcher, mask)
            assert matcher.accept_token(token)
        assert matcher.stop_token_ids[0] in _allowed(matcher, mask)


@pytest.mark.parametrize("schema", [schema for schema, _ in WALKED])
def test_a_walk_under_the_mask_ends_in_a_valid_value(schema: Any) -> None:
    _, _, known = vocabulary()
    closing = {token for token, text in enumerate(known) if text and text[:1] in b'"}],'}
    read, ended = Schema(schema), 0
    for seed in range(12):
        rnd = random.Random(seed)
        matcher, mask = _matcher(schema)
        written = b""
        for _ in range(400):
            allowed = _allowed(matcher, mask)
            if matcher.stop_token_ids[0] in allowed:
                ended += 1
                assert read.problem(json.loads(written.decode())) is None
                break
            wanted = sorted(closing.intersection(allowed)) if rnd.random() < 0.3 else []
            token = rnd.choice(wanted or allowed)
            written += known[token]
            assert matcher.accept_token(token)
    assert ended >= 6


# Drawn schemas ---------------------------------------------------------------------------------------------------

KEYS = ("a", "b", "ab", "é", 'q"')
PATTERNS = ("^a*b$", "^[ab]{1,2}$", "a", "^(a|é)+", "b$")
numbers = st.integers(-20, 20) | st.decimals(-20, 20, places=2, allow_nan=False).map(float)
texts = st.text(alphabet='ab"\\\né😀 ', max_size=4)
scalars = st.none() | st.booleans() | st.integers(-25, 25) | numbers | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from((*KEYS, "z")), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def _numeric(draw: st.DrawFn) -> dict[str, Any]:
    node: dict[str, Any] = {"type": draw(st.sampled_from(["integer", "number"]))}
    if draw(st.booleans()):
        node[draw(st.sampled_from(["minimum", "exclusiveMinimum"]))] = draw(numbers)
    if draw(st.booleans()):
        node[draw(st.sampled_from(["maximum", "exclusiveMaximum"]))] = draw(numbers)
    return node


@st.composite
def _stringy(draw: st.DrawFn) -> dict[str, Any]:
    node: dict[str, Any] = {"type": "string"}
    if draw(st.booleans()):
        node["pattern"] = draw(st.sampled_from(PATTERNS))
    else:
        least = draw(st.integers(0, 3))
        node.update(minLength=least, maxLength=least + draw(st.integers(0, 3)))
    return node


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    keys = draw(st.lists(st.sampled_from(KEYS), unique=True, max_size=4))
    node: dict[str, Any] = {"type": "object", "properties": {key: draw(inner) for key in keys}}
    node["required"] = [key for key in keys if draw(st.booleans())]
    node["additionalProperties"] = draw(st.just(False) | st.just(True) | inner)
    return node


@st.composite
def _arrays(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    node: dict[str, Any] = {"type": "array", "items": draw(st.just(True) | inner)}
    if draw(st.booleans()):
        node["prefixItems"] = draw(st.lists(inner, min_size=1, max_size=2))
    if draw(st.booleans()):
        node["minItems"] = draw(st.integers(0, 2))
    if draw(st.booleans()):
        node["maxItems"] = node.get("minItems", 0) + draw(st.integers(0, 2))
    return node


leaves = (
    _numeric()
    | _stringy()
    | st.sampled_from([True, {}, {"type": "boolean"}, {"type": ["integer", "null"]}, {"$ref": "#/$defs/pair"}])
    | st.lists(scalars | st.just({"a": [1]}), min_size=1, max_size=3).map(lambda found: {"enum": found})
    | scalars.map(lambda found: {"const": found})
)
nodes = st.recursive(
    leaves,
    lambda inner: st.one_of(
        _objects(inner),
        _arrays(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda found: {"anyOf": found}),
        st.lists(inner, min_size=1, max_size=2).map(lambda found: {"allOf": found}),
        inner.map(lambda found: {"anyOf": [found], "nullable": True}),
    ),
    max_leaves=6,
)
#: A recursive definition that every schema may refer to.
PAIR = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/pair"}},
    "required": ["a"],
    "additionalProperties": False,
}
schemas = nodes.map(lambda node: {"allOf": [_whole(node)], "$defs": {"pair": PAIR}})


def _plain(node: Any) -> Any:
    """Return the schema for a validator that has never heard of `nullable`, and reads patterns as Python does."""
    if isinstance(node, dict):
        made = {key: _plain(value) for key, value in node.items()}
        if isinstance(made.get("pattern"), str):
            made["pattern"] = made["pattern"].replace("$", r"\Z")
        if made.pop("nullable", False):
            made = {"anyOf": [made, {"type": "null"}]}
        return made
    return [_plain(item) for item in node] if isinstance(node, list) else node


def _whole(value: Any) -> Any:
    """Return the value with 1.0 as 1: a whole number has one spelling here."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return {key: _whole(item) for key, item in value.items()} if isinstance(value, dict) else value


def _valid(draw: st.DataObject, node: Any, depth: int = 0) -> Any:
    """Draw a value that may well be valid."""
    if not isinstance(node, dict) or not node:
        return draw.draw(scalars)
    if "$ref" in node:
        node = PAIR
    for keyword in ("anyOf", "allOf"):
        if keyword in node:
            return _valid(draw, draw.draw(st.sampled_from(node[keyword])), depth)
    if "const" in node:
        return node["const"]
    if "enum" in node:
        return draw.draw(st.sampled_from(node["enum"]))
    kind = node["type"]
    if kind == "object":
        value = {
            key: _valid(draw, inner, depth + 1)
            for key, inner in node["properties"].items()
            if key in node["required"] or (depth < 3 and draw.draw(st.booleans()))
        }
        if node["additionalProperties"] is not False and draw.draw(st.booleans()):
            value[draw.draw(st.sampled_from([*KEYS, "z", ""]))] = _valid(draw, node["additionalProperties"], depth + 1)
        return value
    if kind == "array":
        count = draw.draw(st.integers(node.get("minItems", 0), min(3, node.get("maxItems", 3))))
        heads = node.get("prefixItems", [])
        return [_valid(draw, heads[i] if i < len(heads) else node["items"], depth + 1) for i in range(count)]
    if kind in ("integer", "number"):
        return draw.draw(numbers if kind == "number" else st.integers(-22, 22))
    if kind == "string":
        return draw.draw(st.from_regex(node["pattern"]) if "pattern" in node else st.text('ab\n"é', max_size=7))
    return draw.draw(scalars)


def _accepts(schema: Any, order: Any = "declared") -> tuple[Accepts | None, str]:
    try:
        return Accepts(schema, order), ""
    except RequestError as error:
        return None, error.reason


@SLOW
@given(schema=schemas, draw=st.data())
def test_the_grammar_accepts_exactly_the_valid_values(schema: Any, draw: st.DataObject) -> None:
    check = Draft202012Validator(_plain(schema))
    accepts, refusal = _accepts(schema, "any")
    if accepts is None:
        # A contradiction inside is refused as well, though values without that part may be valid.
        assert "admits no value" not in refusal or not check.is_valid(_whole(_valid(draw, schema)))
        return
    read = Schema(schema)
    for _ in range(6):
        value = _whole(draw.draw(values) if draw.draw(st.booleans()) else _valid(draw, schema))
        text = json.dumps(value, ensure_ascii=False)
        valid = check.is_valid(value)
        assert (read.problem(value) is None) == valid
        assert accepts(text) == valid, text
        assert accepts(json.dumps(value, ensure_ascii=False, separators=(",", ":"))) == valid, text


@SLOW
@given(schema=schemas, draw=st.data())
def test_declared_order_accepts_only_valid_values(schema: Any, draw: st.DataObject) -> None:
    accepts, _ = _accepts(schema)
    assume(accepts is not None)
    assert accepts is not None
    check = Draft202012Validator(_plain(schema))
    for _ in range(6):
        value = _whole(_valid(draw, schema))
        if accepts(json.dumps(value, ensure_ascii=False)):
            assert check.is_valid(value)


@SLOW
@given(schema=_objects(leaves).map(_whole), draw=st.data())
def test_declared_order_accepts_every_valid_object_in_that_order(schema: Any, draw: st.DataObject) -> None:
    schema = {**schema, "$defs": {"pair": PAIR}}
    accepts, _ = _accepts(schema)
    assume(accepts is not None)
    assert accepts is not None
    check = Draft202012Validator(_plain(schema))
    for _ in range(6):
        value = {
            key: _whole(_valid(draw, node)) for key, node in schema["properties"].items() if draw.draw(st.booleans())
        }
        if draw.draw(st.booleans()):
            value["other"] = _whole(_valid(draw, schema["additionalProperties"]))
        for separators in ((", ", ": "), (",", ":")):
            assert accepts(json.dumps(value, ensure_ascii=False, separators=separators)) == check.is_valid(value)
