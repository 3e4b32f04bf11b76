# SPDX-License-Identifier: Apache-2.0
"""Each format's text byte for byte, what it cannot write and why, refused definitions, and the grammars' cache."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from dynamo_structural_tags import _tags
from dynamo_structural_tags._errors import RequestError, UnrepresentableError
from dynamo_structural_tags._format import Format
from dynamo_structural_tags._request import Tool, ToolPolicy
from dynamo_structural_tags._tags import TagCache
from dynamo_structural_tags.formats import FORMATS, get_format

RAW = ("glm47", "glm45", "qwen3_coder")
DSML = ("deepseek_v3_2", "deepseek_v4")
JSON = ("hermes", "kimi_k2")

WRITE = Tool(
    "write_file",
    {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "mode": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "force": {"type": ["boolean", "null"]},
        },
        "required": ["path"],
    },
)
NOW = Tool("now", {"type": "object", "properties": {}})
POLICY = ToolPolicy((WRITE, NOW))
ARGUMENTS = {"path": "a.txt", "text": 'é "q"\n<b>&lt;</b>\n', "mode": 420, "tags": ["x", "y z"], "force": None}

#: What each format writes for a call with all arguments and one without any, the conversation's calls 3 and 4.
TEXTS = {
    "glm47": (
        "<tool_call>write_file<arg_key>path</arg_key><arg_value>a.txt</arg_value>"
        '<arg_key>text</arg_key><arg_value>é "q"\n<b>&lt;</b>\n</arg_value>'
        "<arg_key>mode</arg_key><arg_value>420</arg_value>"
        '<arg_key>tags</arg_key><arg_value>["x", "y z"]</arg_value>'
        "<arg_key>force</arg_key><arg_value>null</arg_value></tool_call>"
        "<tool_call>now</tool_call>"
    ),
    "glm45": (
        "<tool_call>write_file\n<arg_key>path</arg_key>\n<arg_value>a.txt</arg_value>\n"
        '<arg_key>text</arg_key>\n<arg_value>é "q"\n<b>&lt;</b>\n</arg_value>\n'
        "<arg_key>mode</arg_key>\n<arg_value>420</arg_value>\n"
        '<arg_key>tags</arg_key>\n<arg_value>["x", "y z"]</arg_value>\n'
        "<arg_key>force</arg_key>\n<arg_value>null</arg_value>\n</tool_call>"
        "\n<tool_call>now\n</tool_call>"
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=write_file>\n<parameter=path>\na.txt\n</parameter>\n"
        '<parameter=text>\né "q"\n<b>&lt;</b>\n\n</parameter>\n'
        "<parameter=mode>\n420\n</parameter>\n"
        '<parameter=tags>\n["x", "y z"]\n</parameter>\n'
        "<parameter=force>\nnull\n</parameter>\n</function>\n</tool_call>"
        "\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
    "hermes": (
        '<tool_call>\n{"name": "write_file", "arguments": {"path": "a.txt", '
        '"text": "é \\"q\\"\\n<b>&lt;</b>\\n", "mode": 420, "tags": ["x", "y z"], "force": null}}\n</tool_call>'
        '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.write_file:3<|tool_call_argument_begin|>"
        '{"path": "a.txt", "text": "é \\"q\\"\\n<b>&lt;</b>\\n", "mode": 420, "tags": ["x", "y z"], "force": null}'
        "<|tool_call_end|><|tool_call_begin|>functions.now:4<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "deepseek_v3_2": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="write_file">\n'
        '<｜DSML｜parameter name="path" string="true">a.txt</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="text" string="true">é "q"\n<b>&lt;</b>\n</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="mode" string="false">420</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="tags" string="false">["x", "y z"]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="force" string="false">null</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    ),
    "deepseek_v4": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="write_file">\n'
        '<｜DSML｜parameter name="path" string="true">a.txt</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="text" string="true">é "q"\n<b>&lt;</b>\n</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="mode" string="false">420</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="tags" string="false">["x", "y z"]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="force" string="false">null</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    ),
}


def one(schema: Any, *, required: bool = False, strict: bool = True) -> Tool:
    """A tool with the argument `v`."""
    parameters = {"type": "object", "properties": {"v": schema}, "required": ["v"] if required else []}
    return Tool("f", parameters, strict)


@pytest.fixture(params=list(FORMATS))
def fmt(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


def test_the_formats_are_the_seven_of_the_readme() -> None:
    assert list(FORMATS) == [*RAW, *JSON, *DSML]
    assert all(name == fmt.name and fmt.models for name, fmt in FORMATS.items())


def test_an_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'hermes3'.*glm47, glm45, qwen3_coder, hermes, kimi_k2, deepseek_v3_2"):
        get_format("hermes3")


def test_a_descriptor_is_consistent(fmt: Format) -> None:
    assert (fmt.section_begin or fmt.call_begin).startswith(fmt.trigger)
    assert bool(fmt.section_begin) == bool(fmt.section_end)
    assert fmt.arg_end.startswith(fmt.value_end)
    assert not any(marker in fmt.trigger for marker in fmt.stray)
    if fmt.style == "json":
        assert {fmt.arg_begin, fmt.arg_end, fmt.value_end, fmt.key_end} == {""}
    else:
        assert fmt.key_end in fmt.arg_begin.partition("{key}")[2]
        assert ("{string}" in fmt.arg_begin) == (fmt.style == "dsml")


def test_calls_are_written_as_the_models_template_writes_them(fmt: Format) -> None:
    calls: list[tuple[str, Any]] = [("write_file", ARGUMENTS), ("now", {})]
    assert fmt.render_calls(calls, policy=POLICY, first_index=3) == TEXTS[fmt.name]
    as_text = [("write_file", json.dumps(ARGUMENTS)), ("now", " {} ")]
    if fmt.style != "json":
        assert fmt.render_calls(as_text, policy=POLICY, first_index=3) == TEXTS[fmt.name]


def test_no_calls_are_no_text(fmt: Format) -> None:
    assert fmt.render_calls([]) == ""


@pytest.mark.parametrize("name", JSON)
def test_the_json_text_of_arguments_is_kept(name: str) -> None:
    text = '{"a":1.0,  "b" : [1e2, "\\u00e9"]}'
    assert text in FORMATS[name].render("f", f" {text}\n")


@pytest.mark.parametrize("name", RAW + DSML)
def test_the_json_text_of_a_value_is_kept(name: str) -> None:
    rendered = FORMATS[name].render("f", '{"a":1.0,  "b" : [1e2,  "\\u00e9"], "s": "\\u00e9"}')
    assert "1.0" in rendered
    assert '[1e2,  "\\u00e9"]' in rendered
    assert "é" in rendered


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "1",
        "null",
        "{",
        '{"a"}',
        '{"a": 1,}',
        "{} {}",
        '{"a": NaN}',
        '{"a": 1, "a": 2}',
        '{"a": {"b": 1, "b": 2}}',
    ],
)
def test_what_is_no_json_object_is_not_written(fmt: Format, text: str) -> None:
    problem = fmt.why_not(text)
    assert problem is not None
    assert "not a JSON object" in problem[1]
    with pytest.raises(UnrepresentableError):
        fmt.render("f", text)


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"a": "\ud800"}, "a"),
        ({"a": [1, {"b": "x\udfff"}]}, "a[1].b"),
        ({"a": {"\ud800": 1}}, "a.\ud800"),
        ('{"a": ["\\ud800"]}', "a[0]"),
        ('{"a": [1e999]}', "a[0]"),
    ],
)
def test_what_no_utf8_and_no_number_holds_is_not_written(fmt: Format, arguments: Any, path: str) -> None:
    problem = fmt.why_not(arguments)
    assert problem is not None
    assert problem[0] == path


@pytest.mark.parametrize("arguments", [{"a": float("nan")}, {"a": float("inf")}, {"a": {1}}, {1: 2}, {"a": {1: 2}}])
def test_what_is_python_but_not_json_is_not_written(fmt: Format, arguments: Any) -> None:
    assert not fmt.representable(None, arguments)


@pytest.mark.parametrize("name", ["", "a b", "a:1", "f>", "x" * 129])
def test_a_name_that_no_request_can_declare_is_not_written(fmt: Format, name: str) -> None:
    with pytest.raises(UnrepresentableError, match="name"):
        fmt.render(name, {})


@pytest.mark.parametrize("name", JSON)
def test_json_formats_write_every_string(name: str) -> None:
    fmt = FORMATS[name]
    for text in (fmt.call_end, fmt.trigger, "</tool_call>", "{", "null", "\n\n", "\x00", '"', "\\", "🦀"):
        arguments = {"v": text, text or "k": [text]}
        assert fmt.representable(one({"type": "string"}), arguments)
        rendered = fmt.render("f", arguments)
        assert json.dumps(arguments, ensure_ascii=False) in rendered


@pytest.mark.parametrize("name", RAW + DSML)
@pytest.mark.parametrize("strict", [True, False])
def test_a_string_that_holds_the_text_which_ends_it_is_not_written(name: str, strict: bool) -> None:
    fmt = FORMATS[name]
    tool = one({"type": "string"}, strict=strict)
    problem = fmt.why_not({"v": f"a{fmt.value_end}b"}, tool)
    assert problem is not None
    assert problem[0] == "v"
    assert repr(fmt.value_end) in problem[1]
    assert fmt.representable(tool, {"v": f"a{fmt.value_end[:-1]}b"})
    assert fmt.representable(tool, {"v": fmt.value_end[1:]})
    assert fmt.representable(tool, {"v": ""})
    # Inside JSON it ends nothing.
    assert fmt.representable(one({"type": "array"}), {"v": [f"a{fmt.value_end}b"]})


#: Schema of `v`, a value, and whether formats with raw strings can write it.
READINGS: list[tuple[Any, Any, bool]] = [
    # Rule 1: strings only.
    ({"type": "string"}, "5", True),
    ({"type": "string"}, "null", True),
    ({"type": "string"}, "{}", True),
    ({"type": "string"}, " [1", True),
    ({"enum": ["1", "{"]}, "{", True),
    ({"type": "string"}, 5, False),
    ({"type": "string"}, None, False),
    ({"type": "string"}, {}, False),
    # Rule 2: no string.
    ({"type": "integer"}, 5, True),
    ({"type": ["object", "null"]}, {"a": "</arg_value>\n</parameter>"}, True),
    ({"type": "integer"}, "5", False),
    ({"type": "object"}, "x", False),
    # Rule 3: both.
    ({"type": ["string", "object"]}, "{", False),
    ({"type": ["string", "object"]}, "{}x", False),
    ({"type": ["string", "object"]}, "[", True),
    ({"type": ["string", "object"]}, " {", True),
    ({"type": ["string", "object"]}, {"a": 1}, True),
    ({"type": ["string", "object"]}, [1], False),
    ({"type": ["string", "object"]}, "5", True),
    ({"type": ["string", "object"]}, 5, False),
    ({"type": ["string", "array"]}, "[x", False),
    ({"type": ["string", "array"]}, "{x", True),
    ({"type": ["string", "array"]}, [1], True),
    ({"type": ["string", "null"]}, "null", False),
    ({"type": ["string", "null"]}, "nul", True),
    ({"type": ["string", "null"]}, "null ", True),
    ({"type": ["string", "null"]}, "true", True),
    ({"type": ["string", "null"]}, None, True),
    ({"type": ["string", "null"]}, True, False),
    ({"type": "string", "nullable": True}, None, True),
    ({"type": "string", "nullable": True}, "null", False),
    ({"type": ["string", "integer"]}, "5", False),
    ({"type": ["string", "integer"]}, "-5", False),
    ({"type": ["string", "integer"]}, "05", True),
    ({"type": ["string", "integer"]}, "5.5", True),
    ({"type": ["string", "integer"]}, 5.5, False),
    ({"type": ["string", "number"]}, "5.5e3", False),
    ({"type": ["string", "number"]}, "1e999", True),
    ({"type": ["string", "number"]}, "NaN", True),
    ({"type": ["string", "number"]}, "9" * 401, True),
    ({"type": ["string", "boolean"]}, "true", False),
    ({"type": ["string", "boolean"]}, "True", True),
    ({"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 9}]}, "10", True),
    ({"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 9}]}, "9", False),
    ({"enum": ["a", 1]}, "1", False),
    ({"enum": ["a", 1]}, 1, True),
    ({"enum": ["a", 1]}, "a", True),
    # No schema known.
    ({}, "5", False),
    ({}, "true", False),
    ({}, "{", False),
    ({}, "[", False),
    ({}, "5 apples", True),
    ({}, 5, True),
    ({}, None, True),
    ({}, [], True),
]


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize(("schema", "value", "can"), READINGS)
def test_the_rule_for_raw_texts(name: str, schema: Any, value: Any, can: bool) -> None:
    problem = FORMATS[name].why_not({"v": value}, one(schema))
    assert (problem is None) is can, problem
    if problem is not None:
        assert problem[0] == "v"


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize("value", ["5", "true", "{", "[", 5, None, {}])
def test_without_a_declaration_everything_is_admitted(name: str, value: Any) -> None:
    fmt = FORMATS[name]
    assert fmt.representable(None, {"v": value}) is fmt.representable(one({}), {"v": value})
    assert fmt.representable(NOW, {"v": value}) is fmt.representable(one({}), {"v": value})


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize(
    ("schema", "value", "can"),
    [
        ({"type": "integer"}, "five", True),
        ({"type": "integer"}, "5", False),
        ({"type": "integer"}, "{", True),
        ({"type": "integer"}, {}, False),
        ({"type": "object"}, "{", False),
        ({"type": "object"}, "5", True),
        ({"type": "string"}, "5", True),
        ({"type": "string"}, 5, False),
    ],
)
def test_not_strict_adds_strings_to_the_declared_types(name: str, schema: Any, value: Any, can: bool) -> None:
    assert FORMATS[name].representable(one(schema, strict=False), {"v": value}) is can


@pytest.mark.parametrize("name", RAW)
def test_alternatives_of_all_arguments_are_read_together(name: str) -> None:
    branches = [{"properties": {"v": {"type": kind}}} for kind in ("string", "integer")]
    tool = Tool("f", {"type": "object", "anyOf": branches})
    assert FORMATS[name].representable(tool, {"v": 5})
    assert FORMATS[name].representable(tool, {"v": "five"})
    assert not FORMATS[name].representable(tool, {"v": "5"})


@pytest.mark.parametrize("name", DSML)
@pytest.mark.parametrize(("schema", "value", "can"), READINGS)
def test_dsml_marks_the_type(name: str, schema: Any, value: Any, can: bool) -> None:
    fmt = FORMATS[name]
    assert fmt.representable(one(schema), {"v": value})
    kind = "true" if isinstance(value, str) else "false"
    assert f'name="v" string="{kind}">' in fmt.render("f", {"v": value}, tool=one(schema))


KEYS = {
    "glm47": ["a</arg_key>b", "", " a", "a\n", "a\nb"],
    "glm45": ["a</arg_key>b", "", "a "],
    "qwen3_coder": ["a>b", "", "a\nb", "\ta"],
    "deepseek_v3_2": ['a"b', "", "a\nb"],
    "deepseek_v4": ['a"b', "", " "],
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in KEYS.items() for key in keys])
def test_a_key_that_the_layout_cannot_hold(name: str, key: str) -> None:
    fmt = FORMATS[name]
    assert fmt.why_not({key: 1}) is not None
    tool = Tool("f", {"type": "object", "properties": {"ok": {}, key: {"type": "string"}}}, path="tools[4].function")
    with pytest.raises(RequestError) as refused:
        fmt.structural_tag(ToolPolicy((tool,)))
    assert refused.value.path == f"tools[4].function.parameters.properties.{key}"


@pytest.mark.parametrize(
    ("name", "keys"),
    [("glm47", ["a>b", 'a"b', "a b", "<x>", "é"]), ("qwen3_coder", ['a"b', "a b"]), ("deepseek_v4", ["a>b", "a b"])],
)
def test_a_key_that_the_layout_can_hold(name: str, keys: list[str]) -> None:
    fmt = FORMATS[name]
    for key in keys:
        assert fmt.representable(None, {key: 1})
        fmt.structural_tag(ToolPolicy((Tool("f", {"type": "object", "properties": {key: {}}}),)))


@pytest.mark.parametrize("name", RAW + DSML)
@pytest.mark.parametrize("keyword", ["const", "enum"])
@pytest.mark.parametrize("required", [True, False])
def test_a_definition_that_forces_what_cannot_be_written_is_refused(name: str, keyword: str, required: bool) -> None:
    fmt = FORMATS[name]
    value = f"x{fmt.value_end}"
    tool = one({keyword: value if keyword == "const" else [value]}, required=required)
    with pytest.raises(RequestError) as refused:
        fmt.structural_tag(ToolPolicy((tool,)))
    assert refused.value.path.startswith("tools[0].function.parameters.properties.v")
    # With another value beside it, that one is left.
    fmt.structural_tag(ToolPolicy((one({"enum": [value, "y"]}, required=required),)))
    fmt.structural_tag(ToolPolicy((one({"enum": [value, 1]}, required=required),)))


def grammar(fmt: Format, policy: ToolPolicy, **options: Any) -> str:
    tag = fmt.structural_tag(policy, **options)
    assert tag["type"] == "structural_tag"
    assert tag["format"]["type"] == "grammar"
    text = tag["format"]["grammar"]
    assert isinstance(text, str)
    return text


def test_a_tag_is_plain_json_and_never_shared(fmt: Format) -> None:
    tag = fmt.structural_tag(POLICY)
    json.dumps(tag)
    tag["format"]["grammar"] = "root ::= "
    assert grammar(fmt, POLICY) != "root ::= "


def test_the_same_content_is_built_once(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    first = grammar(fmt, POLICY)
    monkeypatch.setattr(_tags, "_Builder", None)
    again = ToolPolicy(tuple(Tool(tool.name, json.loads(json.dumps(tool.parameters))) for tool in (WRITE, NOW)))
    assert grammar(fmt, again) == first


def test_everything_that_decides_a_grammar_is_told_apart() -> None:
    fmt = FORMATS["glm47"]
    a, b = {"type": "string"}, {"type": "integer"}
    tools = {
        "ab": Tool("f", {"type": "object", "properties": {"a": a, "b": b}}),
        "ba": Tool("f", {"type": "object", "properties": {"b": b, "a": a}}),
        "named": Tool("g", {"type": "object", "properties": {"a": a, "b": b}}),
        "loose": Tool("f", {"type": "object", "properties": {"a": a, "b": b}}, False),
    }
    texts = [grammar(fmt, ToolPolicy((tool,))) for tool in tools.values()]
    texts += [
        grammar(fmt, ToolPolicy((tools["ab"],), "required")),
        grammar(fmt, ToolPolicy((tools["ab"],), parallel=False)),
        grammar(fmt, ToolPolicy((tools["ab"],), content_schema={"type": "object"})),
        grammar(fmt, ToolPolicy((tools["ab"],)), reasoning="open"),
        grammar(fmt, ToolPolicy((tools["ab"],)), reasoning="auto"),
        grammar(fmt, ToolPolicy((tools["ab"],)), argument_order="any"),
        grammar(fmt, ToolPolicy((), "none")),
        grammar(FORMATS["glm45"], ToolPolicy((tools["ab"],))),
    ]
    assert len(set(texts)) == len(texts)


def test_the_cache_is_bounded_by_entries_and_by_size() -> None:
    fmt = FORMATS["hermes"]
    policies = [ToolPolicy((Tool(f"f{i}", {"type": "object", "properties": {}}),)) for i in range(10)]
    cache = TagCache(entries=3)
    texts = [cache.get(fmt, policy, "closed", "declared") for policy in policies]
    assert len(cache) == 3
    one_size = len(texts[0]) + 200
    small = TagCache(size=2 * one_size)
    for policy in policies:
        small.get(fmt, policy, "closed", "declared")
        assert small._texts._size <= 2 * one_size
    assert 1 <= len(small) <= 3
    none = TagCache(size=10)
    assert none.get(fmt, policies[0], "closed", "declared") == texts[0]
    assert len(none) == 0
    cache.clear()
    assert len(cache) == 0


def test_the_least_recently_used_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = FORMATS["hermes"]
    first, second, third = (ToolPolicy((Tool(f"f{i}", {"type": "object", "properties": {}}),)) for i in range(3))
    cache = TagCache(entries=2)
    for policy in (first, second, first, third):
        cache.get(fmt, policy, "closed", "declared")
    monkeypatch.setattr(_tags, "_Builder", None)
    cache.get(fmt, first, "closed", "declared")
    with pytest.raises(TypeError):
        cache.get(fmt, second, "closed", "declared")


def test_the_cache_is_safe_to_use_from_threads() -> None:
    cache = TagCache(entries=4)
    fmt = FORMATS["glm47"]
    policies = [ToolPolicy((Tool(f"f{i}", {"type": "object", "properties": {"a": {}}}),)) for i in range(8)]
    wanted = [cache.get(fmt, policy, "closed", "declared") for policy in policies]
    wrong: list[int] = []

    def use() -> None:
        for round_ in range(50):
            at = round_ % 8
            if cache.get(fmt, policies[at], "closed", "declared") != wanted[at]:
                wrong.append(at)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(cache) <= 4


def test_a_refused_request_is_refused_again() -> None:
    fmt = FORMATS["glm47"]
    for _ in range(2):
        with pytest.raises(RequestError):
            fmt.structural_tag(ToolPolicy((one({"const": "x</arg_value>"}),)))


@pytest.mark.parametrize("parameters", [{"type": "array"}, {"type": "string"}, {"enum": ["a"]}])
def test_parameters_that_are_no_object_are_refused(fmt: Format, parameters: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"^tools\[0\]\.function\.parameters: admits no object$"):
        fmt.structural_tag(ToolPolicy((Tool("f", parameters),)))


def test_schemas_that_nest_too_deeply_are_refused(fmt: Format) -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(5000):
        deep = {"type": "object", "properties": {"a": deep}}
    for policy in (ToolPolicy((Tool("f", deep),)), ToolPolicy((one({}),), "auto", True, deep)):
        with pytest.raises(RequestError, match="too deeply"):
            fmt.structural_tag(policy)


def test_arguments_that_may_be_null_are_an_object_all_the_same(fmt: Format) -> None:
    plain = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert grammar(fmt, ToolPolicy((Tool("f", {**plain, "nullable": True}),))) == grammar(
        fmt, ToolPolicy((Tool("f", plain),))
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 1 << 31},
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1 << 31},
        {"type": "object", "properties": {"a": {"type": "string", "maxLength": 1 << 31}}},
        {"type": "object", "properties": {"a": {"type": ["string", "object"], "minLength": 2, "maxLength": 1 << 31}}},
    ],
)
def test_no_count_is_more_than_xgrammar_reads(fmt: Format, schema: Any) -> None:
    text = grammar(fmt, ToolPolicy((Tool("f", schema),)))
    assert str(1 << 31) not in text
    assert str((1 << 31) - 1) not in text


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1, "a": 2}', '{"a": {"b": 1, "b": 2}}'])
@pytest.mark.parametrize("name", list(FORMATS))
def test_what_no_parser_reads_back_is_not_written(name: str, text: str) -> None:
    fmt = get_format(name)
    assert not fmt.representable(None, text)
    with pytest.raises(UnrepresentableError):
        fmt.render("f", text)
