# SPDX-License-Identifier: Apache-2.0
"""Schemas are read, refused and applied as documented; no grammar engine is needed for that."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from dynamo_structural_tags import _regex
from dynamo_structural_tags._errors import RequestError
from dynamo_structural_tags._schema import (
    CHECKED,
    ENFORCED,
    JsonGrammar,
    Rules,
    Schema,
    check_schema,
    literal,
    pattern_rule,
)

DEEP: dict[str, Any] = {"type": "string"}
for _ in range(70):
    DEEP = {"type": "array", "items": DEEP}

REFUSED: list[tuple[Any, str, str]] = [
    ("x", "s", "must be a JSON Schema"),
    (None, "s", "not None"),
    ({"type": "text"}, "s.type", "not 'text'"),
    ({"type": []}, "s.type", "not []"),
    ({"type": ["string", "int"]}, "s.type[1]", "not 'int'"),
    ({"type": ["string", "string"]}, "s.type", "different types"),
    ({"properties": {"city": {"type": 7}}}, "s.properties.city.type", "not 7"),
    ({"properties": {"a b": {"type": 7}}}, "s.properties['a b'].type", "not 7"),
    ({"properties": [1]}, "s.properties", "an object of schemas"),
    ({"properties": {"\ud800": {}}}, "s.properties['\\ud800']", "lone surrogate"),
    ({"items": 3}, "s.items", "must be a JSON Schema"),
    ({"prefixItems": {}}, "s.prefixItems", "an array of one schema or more"),
    ({"anyOf": []}, "s.anyOf", "an array of one schema or more"),
    ({"anyOf": [{}, {"oneOf": [1]}]}, "s.anyOf[1].oneOf[0]", "not 1"),
    ({"enum": []}, "s.enum", "not []"),
    ({"enum": ["\udfff"]}, "s.enum[0]", "lone surrogate"),
    ({"enum": [float("nan")]}, "s.enum[0]", "a finite number"),
    ({"enum": ["a"], "type": "integer"}, "s.enum", "no value is of type integer"),
    ({"const": 1, "type": "string"}, "s.const", "no value is of type string"),
    ({"required": ["a", "b"], "properties": {"a": {}}, "additionalProperties": False}, "s.required[1]", "'b'"),
    ({"required": ["a"], "properties": {"a": False}, "additionalProperties": False}, "s.required[0]", "cannot be"),
    ({"required": "a"}, "s.required", "an array of strings"),
    ({"required": ["a", "a"]}, "s.required", "different strings"),
    ({"minLength": -1}, "s.minLength", "at least 0"),
    ({"minLength": True}, "s.minLength", "at least 0"),
    ({"minItems": 1.5}, "s.minItems", "at least 0"),
    ({"minLength": 3, "maxLength": 2}, "s.minLength", "more than maxLength 2"),
    ({"minItems": 3, "maxItems": 2}, "s.minItems", "more than maxItems 2"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "s", "no integer is within minimum 3, maximum 2"),
    ({"type": "integer", "minimum": 0.5, "maximum": 0.9}, "s", "no integer is within"),
    ({"type": "number", "minimum": 2, "exclusiveMaximum": 2}, "s", "no number is within"),
    ({"minimum": "3"}, "s.minimum", "a number"),
    ({"exclusiveMinimum": True}, "s.exclusiveMinimum", "a number"),
    ({"multipleOf": 0}, "s.multipleOf", "more than 0"),
    ({"pattern": "("}, "s.pattern", "no regular expression"),
    ({"pattern": 1}, "s.pattern", "a string"),
    ({"patternProperties": {"(": {}}}, "s.patternProperties", "no regular expression"),
    ({"nullable": "yes"}, "s.nullable", "true or false"),
    ({"$ref": "https://example.com/a.json"}, "s.$ref", "points outside the schema"),
    ({"$ref": "other.json#/a"}, "s.$ref", "points outside the schema"),
    ({"$ref": "#/$defs/a", "$defs": {}}, "s.$ref", "points at nothing"),
    ({"$ref": "#a"}, "s.$ref", "points at nothing"),
    ({"$ref": "#/x", "x": 3}, "s.$ref", "which is no schema"),
    ({"$dynamicRef": "#a"}, "s.$dynamicRef", "not supported"),
    ({"properties": {"a": {"$id": "https://example.com/a"}}}, "s.properties.a.$id", "an address of its own"),
    (DEEP, f"s{'.items' * 65}", "nests deeper"),
    ({"enum": list(range(30_000))}, "s.enum", "more than 20000"),
    ({"dependencies": {"a": 3}}, "s.dependencies.a", "must be a JSON Schema"),
    ({"dependentRequired": {"a": "b"}}, "s.dependentRequired.a", "an array of strings"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "path", "said"), REFUSED)
def test_what_is_no_schema_is_refused_with_its_path(schema: Any, path: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_schema(schema, "s")
    assert caught.value.path == path
    assert said in caught.value.reason


def _rule(schema: Any) -> str:
    check_schema(schema, "s")
    rules = Rules()
    return rules.text(JsonGrammar(rules).value(Schema(schema, path="s")))


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"not": {}, "enum": []},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"anyOf": [False, {"enum": ["a"], "minLength": 2}]},
        {"type": "object", "properties": {"a": {"allOf": [{"const": 1}, {"const": 2}]}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}]},
        {"type": "object", "maxProperties": 0, "required": ["a"]},
    ],
)
def test_a_schema_that_no_finite_value_meets_is_refused(schema: Any) -> None:
    with pytest.raises(RequestError):
        _rule(schema)


def test_a_part_that_never_ends_is_refused_even_where_it_is_optional() -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#/$defs/e"}}, "required": ["a"]}
    with pytest.raises(RequestError, match="requires itself without end"):
        _rule({"type": "object", "properties": {"x": {"$ref": "#/$defs/e"}}, "$defs": {"e": endless}})


def test_a_chain_of_references_too_deep_to_follow_is_refused() -> None:
    def chain(link: Any) -> Any:
        return {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(3000)} | {"d3000": True},
        }

    for link in (lambda to: {"$ref": to}, lambda to: {"type": "object", "properties": {"x": {"$ref": to}}}):
        with pytest.raises(RequestError, match="too deep a chain"):
            _rule(chain(link))


def test_options_that_multiply_beyond_measure_are_left_to_the_check() -> None:
    pair = {"anyOf": [{"minimum": 1}, {"maximum": 9}]}
    assert len(Schema({"type": "integer", "allOf": [pair] * 40}).alternatives()) <= 1024
    many = Schema({"anyOf": [{"const": str(i)} for i in range(1000)]})
    assert len(many.strings()) == 1000


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from(["string", "#/$defs/a", "(", "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "type", "items"]), inner),
    max_leaves=4,
)
KEYWORDS = sorted({*ENFORCED, *CHECKED} - {"nullable", "additionalItems", "dependencies", "definitions"})


@given(node=st.dictionaries(st.sampled_from(KEYWORDS), ANY, max_size=3))
def test_what_the_metaschema_refuses_is_refused(node: dict[str, Any]) -> None:
    try:
        Draft202012Validator.check_schema(node)
    except SchemaError:
        # `items` may be an array, as in Draft 7, and an `anyOf` inside one is checked like any other.
        if isinstance(node.get("items"), list) or "items" in json.dumps(node):
            return
        # An annotation may be null.
        if node.get("format", "") is None:
            return
        with pytest.raises(RequestError):
            check_schema(node, "s")


def test_nothing_is_ever_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    schema = {
        "$schema": "https://example.com/s",
        "$id": "http://127.0.0.1:9/x",
        "properties": {"a": {"$ref": "#/$defs/b"}},
        "$defs": {"b": {"type": "integer"}},
    }
    check_schema(schema, "s")
    assert Schema(schema).problem({"a": "x"}) == ("a", "'x' is not of type 'integer'")
    from referencing.exceptions import Unresolvable

    with pytest.raises(Unresolvable):  # not reached: the check refuses it
        Schema({"$ref": "http://127.0.0.1:9/x"}).problem(1)


PROBLEMS: list[tuple[Any, Any, str, str]] = [
    ({"properties": {"items": {"items": {"properties": {"price": {"type": "number"}}}}}},
     {"items": [{}, {}, {"price": "1"}]}, "items[2].price", "'1' is not of type 'number'"),
    ({"required": ["a"]}, {}, "", "'a' is a required property"),
    ({"properties": {"a b": {"type": "null"}}}, {"a b": 1}, "['a b']", "1 is not of type 'null'"),
    ({"items": {"multipleOf": 3}}, [3, 4], "[1]", "4 is not a multiple of 3"),
    ({"format": "date"}, "2024-02-30", "", "is not a 'date'"),
    ({"format": "date-time"}, "2024-02-28 25:00", "", "is not a 'date-time'"),
    ({"format": "uuid"}, "x", "", "is not a 'uuid'"),
    ({"uniqueItems": True}, [1, 1], "", "non-unique"),
    ({"oneOf": [{}, {}]}, 1, "", "is valid under each of"),
    ({"pattern": r"^(?<year>\d+)$"}, "٣", "", "does not match"),
    ({"items": [{"type": "null"}], "additionalItems": {"type": "string"}}, [None, 1], "[1]", "not of type 'string'"),
    ({"dependencies": {"a": ["b"]}}, {"a": 1}, "", "'b' is a dependency of 'a'"),
    ({"dependencies": {"a": {"required": ["c"]}}}, {"a": 1}, "", "'c' is a required property"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "value", "path", "said"), PROBLEMS)
def test_a_problem_has_its_path_in_the_value(schema: Any, value: Any, path: str, said: str) -> None:
    check_schema(schema, "s")
    found = Schema(schema).problem(value)
    assert found is not None
    assert found[0] == path
    assert said in found[1]


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string", "nullable": True}, None),
        ({"$ref": "#/$defs/a", "nullable": True, "$defs": {"a": {"type": "integer"}}}, None),
        ({"properties": {"a": {"enum": ["x"], "nullable": True}}}, {"a": None}),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a",
          "definitions": {"a": {"prefixItems": [{"type": "null"}]}}}, [None]),
        ({"$ref": "#here", "$defs": {"a": {"$anchor": "here", "type": "integer"}}}, 1),
        ({"format": "date-time"}, "2024-02-29T23:59:60.5+01:00"),
        ({"format": "no such format"}, "x"),
        ({"type": "integer"}, 1.0),
    ],
)  # fmt: skip
def test_a_valid_value_has_no_problem(schema: Any, value: Any) -> None:
    check_schema(schema, "s")
    assert Schema(schema).problem(value) is None


def test_a_value_that_nests_too_deeply_is_a_problem_and_no_crash() -> None:
    value: Any = []
    for _ in range(5000):
        value = [value]
    found = Schema({"items": {"$ref": "#"}}).problem(value)
    assert found is not None
    assert "nested too deeply" in found[1]


def test_a_part_of_a_document_is_checked_with_the_documents_definitions() -> None:
    schema = Schema({"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}})
    part = schema.objects()[0].properties[0].schema
    assert part.problem(1) is None
    assert part.problem("x") == ("", "'x' is not of type 'integer'")
    assert part.path == "properties.a"


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({}, "string object array scalar"),
        ({"type": "string"}, "string"),
        ({"type": ["string", "null"]}, "string scalar"),
        ({"type": "string", "nullable": True}, "string scalar"),
        ({"enum": ["a", 1]}, "string scalar"),
        ({"enum": ["a", 1], "type": "string"}, "string"),
        ({"const": {"a": 1}}, "object"),
        ({"anyOf": [{"type": "array"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "object"}}}, "object array"),
        ({"allOf": [{"type": ["string", "array"]}, {"type": ["array", "null"]}]}, "array"),
        ({"type": "string", "minLength": 2, "enum": ["a", "ab"]}, "string"),
        (False, ""),
    ],
)
def test_kinds_are_those_that_are_left_when_everything_is_resolved(schema: Any, kinds: str) -> None:
    found = Schema(schema).kinds
    assert [name for name in ("string", "object", "array", "scalar") if getattr(found, name)] == kinds.split()


def test_strings_are_merged_from_every_part() -> None:
    schema = Schema({"allOf": [{"type": "string", "minLength": 1}, {"maxLength": 4, "pattern": "x"}]})
    (rule,) = schema.strings()
    assert (rule.values, rule.pattern, rule.min_length, rule.max_length) == (None, "x", 1, 4)
    assert [one.values for one in Schema({"enum": ["a", 1, "b"]}).strings()] == [("a", "b")]


def test_objects_are_closed_where_they_declare_properties_and_say_nothing() -> None:
    def additional(node: Any) -> Any:
        return Schema(node).objects()[0].additional

    some = {"type": "object", "properties": {"a": {}}}
    assert additional(some) is None
    assert additional({**some, "additionalProperties": True}) is not None
    assert additional({**some, "patternProperties": {"^x": {}}}) is not None
    assert additional({**some, "if": {}, "then": {"properties": {"b": {}}}}) is not None
    assert additional({**some, "if": {}, "then": {"required": ["a"]}}) is None
    assert additional({"type": "object"}) is not None
    assert additional({"type": "object", "additionalProperties": False}) is None
    assert additional({"type": "object", "unevaluatedProperties": False}) is None


def test_properties_keep_their_order_and_a_required_key_that_is_not_declared_comes_last() -> None:
    (shape,) = Schema({"type": "object", "properties": {"b": {}, "a": {}}, "required": ["z", "a"]}).objects()
    assert [(one.key, one.required) for one in shape.properties] == [("b", False), ("a", True), ("z", True)]


def test_no_other_key_where_the_required_ones_are_all_there_may_be() -> None:
    node = {"type": "object", "properties": {"b": {}}, "required": ["a"], "additionalProperties": {"type": "string"}}
    (shape,) = Schema({**node, "maxProperties": 1}).objects()
    assert ([one.key for one in shape.properties], shape.additional) == (["a"], None)
    (shape,) = Schema({**node, "maxProperties": 2}).objects()
    assert ([one.key for one in shape.properties], shape.additional is None) == (["b", "a"], False)


def test_a_schema_is_narrowed_to_objects() -> None:
    assert Schema({}).only("object").kinds == Schema({"type": "object"}).kinds
    assert Schema({"properties": {"a": {}}}).only("object").objects()[0].properties[0].key == "a"
    assert not Schema({"type": "string"}).only("object").alternatives()


def test_equal_rules_are_shared_between_schemas() -> None:
    rules = Rules()
    grammar = JsonGrammar(rules)
    one = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 20}}, "required": ["a"]}
    first = grammar.value(Schema(one))
    length = len(rules.text(first))
    assert grammar.value(Schema(json.loads(json.dumps(one)))) == first
    assert len(rules.text(first)) == length


def test_names_of_rules_are_unique_and_well_formed() -> None:
    rules = Rules()
    names = [rules.reserve(hint) for hint in ("a", "a", "a_1", "1", "", "é", "root", "a-b")]
    assert len(set(names)) == len(names)
    assert "root" not in names
    assert all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) for name in names)


def test_a_literal_escapes_everything_but_printable_ascii() -> None:
    assert literal('a"\\b') == r'"a\"\\b"'
    assert literal("é\n😀") == r'"\u00e9\u000a\U0001f600"'


def test_declared_order_is_used_beyond_the_limit_of_any_order() -> None:
    def body(count: int) -> str:
        rules = Rules()
        name = JsonGrammar(rules, "any").order_of([(f'"{i}"', True) for i in range(count)], '","')
        return rules.text(name)

    assert body(6).count("::=") == 1 + 1 + 64
    assert body(7).count("::=") == 2


TEXTS = ("", "a", "b", "ab", "aa", "aab", "abab", "x", "axb", "a.b", "-", "5", "5xa %b", "\n", "é", "a-b", "b\n", "$")
PATTERNS = [
    "^a*b$", "a|b", "^(a|b){1,3}$", "^(?:ab)+?$", "[^a]", r"^\d\D\w\W\s\S$", r"^[\d-]$", r"\.", "^a{2}$", "^a{2,}$",
    "^$", "", "^", "a$", "^(?<n>a)$", "^(?P<n>a)$", r"^\x61\u0062$", "^[a-c]{0,2}x?$", "(^a$)", "^.{2}$", "^a|^b$",
    "a-b", "[$]", r"\$",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_is_read_as_python_reads_it(pattern: str) -> None:
    node = _regex.language(pattern)
    assert node is not None

    def chars(ranges: _regex.Ranges) -> str:
        return "[" + "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges) + "]"

    read = re.compile(_regex.raw_text(node, chars))
    shortest, longest = _regex.lengths(node)
    for text in TEXTS:
        found = _regex.compiled(pattern).search(text) is not None
        assert (read.fullmatch(text) is not None) == found, text
        if found:
            assert shortest <= len(text) <= (len(text) if longest is None else longest)


@pytest.mark.parametrize(
    "pattern",
    [r"\bx", r"(a)\1", "(?=a)", "(?!a)", "(?i)a", "a^b", "[^]", "[]a]", "a{,2}", r"\p{L}", "(", "(?<=a)b", "a*+"],
)
def test_a_pattern_that_a_grammar_cannot_hold_is_left_to_the_check(pattern: str) -> None:
    assert _regex.language(pattern) is None


def test_a_raw_pattern_never_writes_the_closer() -> None:
    rules = Rules()
    assert pattern_rule(rules, "^[a-z]+$", "</arg_value>") is not None
    assert pattern_rule(rules, "^.+$", "</arg_value>") is None
    assert pattern_rule(rules, "^.+$", "\n</parameter>") is not None


def test_every_keyword_is_either_enforced_or_checked() -> None:
    assert not set(ENFORCED) & set(CHECKED)
    known = set(Draft202012Validator.VALIDATORS) - {"$dynamicRef"}
    assert known <= set(ENFORCED) | set(CHECKED)


# Bounds in time --------------------------------------------------------------------------------------------------

SEARCHED = [
    "^(a+)+$",
    "(a|ab)*c",
    "^(?=.*a)(?=.*b).+$",
    r"(?<=a)b+\b",
    "^(?!.*--)[a-c]+(?:[._-][a-c]+)*$",
    r"\Bab|^c$",
    "a{2,4}b?(c|a)*$",
    "(?<!a)[^ab]+",
    r"\s+$",
    r"^.*\S$",
    "(ab?){2,3}$",
    r"(?=a*$)b|a\b",
    "^$",
    "",
]


@pytest.mark.parametrize("pattern", SEARCHED)
@settings(max_examples=60)
@given(text=st.text("abc-_. \n\u00a0\u00e9", max_size=9))
def test_following_all_ways_at_once_finds_what_re_finds(pattern: str, text: str) -> None:
    machine = _regex._machine(pattern)
    assert machine is not None
    assert _regex._Search(machine, text).found() is (_regex.compiled(pattern).search(text) is not None)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("^(a+)+$", "a" * 40 + "b"),
        ("^(a+)+(?=c)", "a" * 5000 + "b"),
        (r"\s+$", " " * 50_000 + "x"),
        ("^(a|a)*$", "a" * 99 + "b"),
    ],
)
def test_a_pattern_is_searched_in_bounded_time(pattern: str, text: str) -> None:
    assert not _regex.search(pattern, text)
    assert Schema({"enum": [text, "c"], "pattern": f"{pattern}|c"}).strings()


def test_a_search_that_would_take_too_long_is_given_up() -> None:
    problem = Schema({"pattern": "^(?:(?=.*$).)*$"}).problem("a" * 3000)
    assert problem is not None
    assert problem[1].startswith("would take too long")


def _chained(keyword: str) -> dict[str, Any]:
    links = {f"d{at}": {keyword: [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(50)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, "d50": {"type": "string"}}}


@pytest.mark.parametrize(
    ("node", "path", "message"),
    [
        (_chained("allOf"), "s", "multiply"),
        (_chained("anyOf"), "s", "multiply"),
        ({"pattern": r"(a+)+\1"}, "s.pattern", "back references"),
        ({"pattern": "a" * 20_000}, "s.pattern", "characters"),
        ({"properties": {"a" * 3000: {}}}, "s.properties", "characters"),
        ({"required": ["a" * 3000]}, "s.required[0]", "characters"),
        ({"properties": {f"p{at}": {} for at in range(1001)}}, "s.properties", "more than 1000"),
        ({"enum": [1 << 20_000]}, "s.enum[0]", "bits"),
        ({"properties": {"a": {"$ref": "#/x"}}, "x": {"type": "text"}}, "s.properties.a.$ref.type", "not 'text'"),
        ({"anyOf": [{"$ref": "#/default"}], "default": {"pattern": "("}}, "s.anyOf[0].$ref.pattern", "no regular"),
        ({"unevaluatedProperties": False, "patternProperties": {"^(a+)+$": {}}}, "s", "repeated group"),
    ],
)
def test_what_would_take_forever_or_is_no_schema_is_refused(node: Any, path: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        check_schema(node, "s")
    assert caught.value.path == path


def test_the_work_of_a_check_is_bounded() -> None:
    arrays = [{"type": "array", "items": {"$ref": "#"}, "minItems": least} for least in (0, 1)]
    value: Any = 1
    for _ in range(25):
        value = [value]
    assert Schema({"anyOf": [*arrays, {"type": "integer", "multipleOf": 7}]}).problem(value) == (
        "",
        "would take too long to be checked",
    )
    members = [f"v{at}" for at in range(9000)]
    assert (
        len(Schema({"allOf": [{"enum": members}, {"enum": members[::-1]}], "minLength": 2}).strings()[0].values or ())
        == 9000
    )
    mixed = [at if at % 2 else str(at) for at in range(20_000)]
    assert Schema({"uniqueItems": True}).problem(mixed) is None


def test_values_that_are_equal_in_json() -> None:
    unique = Schema({"uniqueItems": True})
    assert unique.problem([1, True, "1", None, [1], {"a": 1}, ["a", 1]]) is None
    for twice in ([1, 1.0], [{"a": [1]}, {"a": [1.0]}], [True, True]):
        assert unique.problem(twice) is not None


@pytest.mark.parametrize(
    ("step", "value", "valid"),
    [
        (0.01, 19.99, True),
        (0.01, 19.995, False),
        (0.1, 10**400, True),
        (3, 10**400, False),
        (0.1, 1e308, True),
        (2, 7.0, False),
    ],
)
def test_a_multiple_is_exact_in_decimals(step: Any, value: Any, valid: bool) -> None:
    check_schema({"multipleOf": step, "enum": [value]}, "s")
    assert (Schema({"multipleOf": step}).problem(value) is None) is valid


def test_numbers_of_any_size_are_read() -> None:
    for node in ({"enum": [10**400]}, {"minimum": 10**400, "type": "integer"}, {"minLength": 10**400}):
        check_schema(node, "s")
        assert Schema(node).alternatives()


def test_an_annotation_may_be_null() -> None:
    check_schema({"type": "string", "description": None, "title": None, "format": None}, "s")


def test_keys_are_matched_as_patterns_are() -> None:
    schema = Schema({"patternProperties": {r"^\d+$": {"type": "string"}}, "additionalProperties": False})
    assert schema.problem({"1": "a"}) is None
    assert schema.problem({"1\n": "a"}) is not None
    assert schema.problem({"1": 1}) == ("1", "1 is not of type 'string'")
    assert (
        Schema({"patternProperties": {"^(a+)+$": {}}, "additionalProperties": {"type": "null"}}).problem(
            {"a" * 40 + "b": None}
        )
        is None
    )


PLAIN = {
    "type": "object",
    "properties": {name: {"type": name, "title": name} for name in ("string", "integer", "number", "boolean", "null")}
    | {"array": {"type": "array"}, "object": {"type": "object"}},
    "required": ["string"],
}
VALUES = ["a", 1, 1.0, 1.5, True, None, [], [1], {}, {"a": 1}]


@pytest.mark.parametrize("more", [{}, {"additionalProperties": False}])
def test_the_quick_check_of_plain_objects_says_what_the_full_one_does(more: dict[str, Any]) -> None:
    plain, full = Schema({**PLAIN, **more}), Schema({**PLAIN, **more, "minProperties": 0})
    assert plain._plain is not None
    assert full._plain is None
    for value in (*VALUES, *({"string": "a", key: one} for key in (*PLAIN["properties"], "other") for one in VALUES)):
        assert plain.problem(value) == full.problem(value), value
