# SPDX-License-Identifier: Apache-2.0
"""The laws of the formats under the real xgrammar: what a grammar lets through is what is rendered and read back."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import xgrammar
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from xgrammar.testing import _is_grammar_accept_string

from dynamo_structural_tags._errors import RequestError, UnrepresentableError
from dynamo_structural_tags._events import CallEnd, CallFailed, Content, Reasoning
from dynamo_structural_tags._format import Format
from dynamo_structural_tags._parser import parse
from dynamo_structural_tags._request import Tool, ToolPolicy
from dynamo_structural_tags.formats import FORMATS

NAMES = list(FORMATS)
RAW = [name for name in NAMES if FORMATS[name].style == "raw"]
#: One format of each style and end of a value: the others write values in the same way.
ONE_OF_EACH = list({(fmt.style, fmt.value_end): name for name, fmt in FORMATS.items()}.values())
TAGGED = [name for name in NAMES if FORMATS[name].style != "json"]

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
)
#: Its name begins with another one's.
WEATHER_2 = Tool("get_weather_2", {"type": "object", "properties": {}, "additionalProperties": False})
POLICY = ToolPolicy((WEATHER, WEATHER_2))
ARGUMENTS = {"city": "Oslo\n<b>", "days": 3, "unit": "C"}


@functools.lru_cache(maxsize=512)
def _compiled(tag: str) -> Any:
    return xgrammar.Grammar.from_structural_tag(tag)


def accepts(fmt: Format, policy: ToolPolicy, text: str, **options: Any) -> bool:
    """Whether the whole text is one that the request's grammar lets through."""
    grammar = _compiled(json.dumps(fmt.structural_tag(policy, **options)))
    return bool(_is_grammar_accept_string(grammar, text))


def reads(fmt: Format, policy: ToolPolicy, text: str, reasoning: Any = "closed") -> list[tuple[str, str]]:
    """The calls of an answer without any error."""
    events = parse(fmt, text, policy, reasoning=reasoning)
    failed = [event for event in events if isinstance(event, CallFailed)]
    assert not failed, failed
    return [(event.name, event.arguments) for event in events if isinstance(event, CallEnd)]


def required(*tools: Tool, parallel: bool = True) -> ToolPolicy:
    return ToolPolicy(tools, "required", parallel)


def lead(fmt: Format) -> str:
    """What stands before a first call without content and without reasoning."""
    return fmt.content_separator if fmt.separator_always else ""


def one(schema: Any, *, is_required: bool = True, strict: bool = True) -> Tool:
    """A tool with the argument `v`."""
    properties = {"v": schema}
    parameters = {"type": "object", "properties": properties, "required": ["v"] if is_required else []}
    return Tool("f", {**parameters, "additionalProperties": False}, strict)


def naive(fmt: Format, name: str, arguments: dict[str, Any]) -> str:
    """A call as a template writes it that asks nothing."""
    if fmt.style == "json":
        body = json.dumps(arguments, ensure_ascii=False)
    else:
        body = fmt.arg_separator.join(
            fmt.arg_begin.replace("{key}", key).replace("{string}", "true" if isinstance(value, str) else "false")
            + (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            + fmt.arg_end
            for key, value in arguments.items()
        )
    call = f"{fmt.call_begin}{name}{fmt.name_end.replace('{index}', '0')}{body}{fmt.call_end}"
    return f"{lead(fmt)}{fmt.section_begin}{call}{fmt.section_end}"


def same(a: Any, b: Any) -> bool:
    """Equal as JSON: true is not 1, and keys are in the same order."""
    return json.dumps(a) == json.dumps(b)


@pytest.fixture(params=NAMES)
def fmt(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


# Acceptance.


@pytest.mark.parametrize("reasoning", ["closed", "open", "auto"])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_what_is_rendered_is_let_through_and_read_back(
    fmt: Format, choice: Any, parallel: bool, reasoning: Any
) -> None:
    tools = (WEATHER,) if choice == "named" else (WEATHER, WEATHER_2)
    policy = ToolPolicy(tools, choice, parallel)
    first: tuple[str, Any] = ("get_weather", ARGUMENTS)
    second: tuple[str, Any] = ("get_weather", {"city": "", "days": 14})
    third: tuple[str, Any] = ("get_weather_2", {})
    sets = [[first], [second]]
    if choice != "named":
        sets += [[third]]
    if parallel:
        sets += [[first, second], [first, second, first]] + ([[third, first, third]] if choice != "named" else [])
    thought = "let me <b>think</b>\n"
    before = {"closed": [""], "open": [thought + fmt.think[1]], "auto": ["", fmt.think[0] + thought + fmt.think[1]]}
    for begin in before[reasoning]:
        separator = fmt.content_separator if fmt.separator_always else fmt.reasoning_separator if begin else ""
        for calls in sets:
            text = begin + separator + fmt.render_calls(calls, policy=policy)
            assert accepts(fmt, policy, text, reasoning=reasoning), text
            assert reads(fmt, policy, text, reasoning) == [(name, json.dumps(args)) for name, args in calls]
            events = parse(fmt, text, policy, reasoning=reasoning)
            assert "".join(event.text for event in events if isinstance(event, Content)) == ""
            assert "".join(event.text for event in events if isinstance(event, Reasoning)) == (thought if begin else "")
            with_content = begin + "Sure." + fmt.content_separator + fmt.render_calls(calls, policy=policy)
            assert accepts(fmt, policy, with_content, reasoning=reasoning) is (choice == "auto")
            if choice == "auto":
                events = parse(fmt, with_content, policy, reasoning=reasoning)
                assert "".join(event.text for event in events if isinstance(event, Content)) == "Sure."
        assert accepts(fmt, policy, begin + "Just text.", reasoning=reasoning) is (choice == "auto")
    assert accepts(fmt, policy, "", reasoning=reasoning) is (choice == "auto" and reasoning != "open")


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_second_call_waits_for_permission(fmt: Format, choice: Any) -> None:
    calls: list[tuple[str, Any]] = [("get_weather_2", {})] * 2
    text = lead(fmt) + fmt.render_calls(calls, policy=POLICY)
    assert accepts(fmt, ToolPolicy(POLICY.tools, choice, True), text)
    assert not accepts(fmt, ToolPolicy(POLICY.tools, choice, False), text)


def test_none_bans_every_marker(fmt: Format) -> None:
    policy = ToolPolicy((), "none")
    assert accepts(fmt, policy, "plain <text> {} \n")
    for marker in (fmt.trigger, *fmt.stray):
        assert not accepts(fmt, policy, f"a {marker}")


def test_free_text_holds_no_stray_marker(fmt: Format) -> None:
    for marker in (*fmt.stray, *fmt.think):
        assert not accepts(fmt, POLICY, f"a {marker} b")
        assert accepts(fmt, POLICY, f"a {marker[:-1]}")


@pytest.mark.parametrize("name", ["glm45", "glm47"])
def test_prose_may_speak_of_argument_tags(name: str) -> None:
    # Upstream's tag for GLM admits no text with <arg_key> in it.
    fmt, text = FORMATS[name], "Each <arg_key>k</arg_key> has an <arg_value>v</arg_value>."
    assert accepts(fmt, POLICY, text)
    assert parse(fmt, text, POLICY) == [Content(text)]


def test_reasoning_is_closed_before_a_call(fmt: Format) -> None:
    call = fmt.render_calls([("get_weather_2", {})])
    assert not accepts(fmt, POLICY, call, reasoning="open")
    assert not accepts(fmt, POLICY, f"{fmt.think[0]}{call}", reasoning="auto")
    assert not accepts(fmt, POLICY, fmt.think[0] + "a" + fmt.think[1], reasoning="closed")
    assert not accepts(fmt, POLICY, f"a{fmt.think[1]}b{fmt.think[1]}", reasoning="open")


def test_json_content_or_calls(fmt: Format) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    content = json.dumps({"a": f"{fmt.trigger} is no call"}, ensure_ascii=False)
    call = lead(fmt) + fmt.render_calls([("get_weather", ARGUMENTS)], policy=POLICY)
    for choice in ("auto", "required", "none"):
        policy = ToolPolicy(POLICY.tools if choice != "none" else (), choice, True, schema)
        assert accepts(fmt, policy, content) is (choice != "required")
        assert accepts(fmt, policy, call) is (choice != "none")
        assert not accepts(fmt, policy, "text")
        assert not accepts(fmt, policy, '{"a": 1}')
        assert not accepts(fmt, policy, content + call)
        if choice == "auto":
            assert reads(fmt, policy, content) == []
            events = parse(fmt, content, policy)
            assert "".join(event.text for event in events if isinstance(event, Content)) == content
            assert reads(fmt, policy, call) == [("get_weather", json.dumps(ARGUMENTS))]
        with_reasoning = f"x{fmt.think[1]}{fmt.reasoning_separator}{content}"
        assert accepts(fmt, policy, with_reasoning, reasoning="open") is (choice != "required")


def test_any_order_lets_every_order_through(fmt: Format) -> None:
    policy = required(WEATHER)
    orders: list[dict[str, Any]] = [
        {"days": 1, "city": "x"},
        {"unit": "F", "days": 1, "city": "x"},
        {"city": "x", "unit": "F", "days": 1},
    ]
    for arguments in orders:
        text = lead(fmt) + fmt.render_calls([("get_weather", arguments)], policy=policy)
        assert accepts(fmt, policy, text, argument_order="any")
        assert not accepts(fmt, policy, text)
        assert reads(fmt, policy, text) == [("get_weather", json.dumps(arguments))]
    for wrong in ({"days": 1}, {"unit": "F", "city": "x"}, {}):
        assert not accepts(fmt, policy, naive(fmt, "get_weather", wrong), argument_order="any")


# Refusal.


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("get", {"city": "x", "days": 1}),  # undeclared
        ("get_weather_3", {}),
        ("get_weather", {"city": "x"}),  # required and missing
        ("get_weather", {"days": 1}),
        ("get_weather", {}),
        ("get_weather", {"city": "x", "days": "1 day"}),  # of another type
        ("get_weather", {"city": "x", "days": 1.5}),
        ("get_weather", {"city": "x", "days": None}),
        ("get_weather", {"city": "x", "days": [1]}),
        ("get_weather", {"city": "x", "days": 0}),  # out of bounds
        ("get_weather", {"city": "x", "days": 15}),
        ("get_weather", {"city": "x", "days": 1, "unit": "K"}),
        ("get_weather", {"city": "x", "days": 1, "unit": ""}),
        ("get_weather", {"city": "x", "days": 1, "more": 1}),  # not declared
        ("get_weather_2", {"city": "x"}),
    ],
)
def test_what_breaks_the_declaration_is_kept_out(fmt: Format, name: str, arguments: dict[str, Any]) -> None:
    for policy in (POLICY, required(*POLICY.tools)):
        assert not accepts(fmt, policy, naive(fmt, name, arguments))


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_key_stands_once(fmt: Format, choice: Any) -> None:
    policy = ToolPolicy((one({"type": "integer"}),), choice)
    text = naive(fmt, "f", {"v": 1})
    assert accepts(fmt, policy, text)
    if fmt.style == "json":
        twice = text.replace('"v": 1', '"v": 1, "v": 1')
    else:
        argument = fmt.arg_begin.replace("{key}", "v").replace("{string}", "false") + "1" + fmt.arg_end
        twice = text.replace(argument, argument + fmt.arg_separator + argument)
    assert twice != text
    assert not accepts(fmt, policy, twice)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_no_space_is_added_and_no_prose_follows(fmt: Format, choice: Any) -> None:
    policy = ToolPolicy(POLICY.tools, choice, parallel=False)
    whole = fmt.render_calls([("get_weather", {"city": "x", "days": 1})], policy=POLICY)
    text = lead(fmt) + whole
    assert accepts(fmt, policy, text)
    for more in (" ", "\n", "\n\n\n", "Done.", "\nDone.", fmt.trigger, fmt.call_separator + fmt.trigger, text):
        assert not accepts(fmt, policy, text + more), more
    for end in range(1, len(whole)):
        assert not accepts(fmt, policy, text[:-end]) or (choice == "auto" and end > len(whole) - len(fmt.trigger))
    if fmt.style == "json":
        spread = [
            text.replace(": ", ":  "),
            text.replace(", ", ",\n"),
            text.replace("}", " }"),
            text.replace("1", "1 "),
        ]
    else:
        begin, end_ = fmt.arg_begin.replace("{key}", "days").replace("{string}", "false"), fmt.arg_end
        spread = [
            text.replace(begin, " " + begin),
            text.replace(begin, begin + " "),
            text.replace(f"1{end_}", f"1 {end_}"),
            text.replace(f"1{end_}", f"1{end_} "),
            text.replace(f"1{end_}", f"1{end_}\n"),
            text.replace("get_weather", "get_weather "),
            text.replace("get_weather", " get_weather"),
            text.replace('days"', 'days" ').replace("days<", "days <").replace("days>", "days >"),
        ]
    for other in spread:
        assert other != text
        assert not accepts(fmt, policy, other), other


#: Other spellings of a call, which a grammar must not let through as content.
SPELLINGS = {
    "glm47": [
        "<tool_call>\nget_weather_2</tool_call>",
        "<tool_call> get_weather_2</tool_call>",
        "<tool_call>get_weather_2\n</tool_call>",
        '<tool_call>{"name": "get_weather_2", "arguments": {}}</tool_call>',
        "get_weather_2</tool_call>",
    ],
    "glm45": [
        "\n<tool_call>get_weather_2</tool_call>",
        "\n<tool_call>\nget_weather_2\n</tool_call>",
        "\n<tool_call>get_weather_2\n\n</tool_call>",
    ],
    "qwen3_coder": [
        "<tool_call><function=get_weather_2></function></tool_call>",
        "<tool_call><function=x>\n</function>\n</tool_call>",
        "<tool_call>\n<function=x>\n</function>\n</tool_call>",
        "<function=get_weather_2>\n</function>",
        "<tool_call>\n<function=get_weather_2></function>\n</tool_call>",
        '<tool_call>\n{"name": "get_weather_2", "arguments": {}}\n</tool_call>',
    ],
    "hermes": [
        '<tool_call>{"name": "get_weather_2", "arguments": {}}</tool_call>',
        '<tool_call>\n{"name":"get_weather_2","arguments":{}}\n</tool_call>',
        '<tool_call>\n{"arguments": {}, "name": "get_weather_2"}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather_2", "parameters": {}}\n</tool_call>',
        '<tool_call>\n{"name": "x", "arguments": {}}\n</tool_call>',
    ],
    "kimi_k2": [
        "<|tool_call_begin|>functions.get_weather_2:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<|tool_call_begin|>functions.x:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<|tool_calls_section_begin|><|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>get_weather_2:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather_2<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather_2:12345<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>",
    ],
    "deepseek_v3_2": [
        '\n\n<｜DSML｜invoke name="get_weather_2">\n\n</｜DSML｜invoke>',
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather_2">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather_2">\n</｜DSML｜invoke>'
        "\n</｜DSML｜function_calls>",
        "\n\n<｜DSML｜function_calls>\n</｜DSML｜function_calls>",
    ],
    "deepseek_v4": [
        '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather_2">\n\n</｜DSML｜invoke>'
        "\n</｜DSML｜function_calls>",
        '\n\n<｜DSML｜tool_calls><｜DSML｜invoke name="get_weather_2">\n\n</｜DSML｜invoke></｜DSML｜tool_calls>',
    ],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in SPELLINGS.items() for text in texts])
def test_other_spellings_are_kept_out(name: str, text: str) -> None:
    for choice in ("auto", "required", "none"):
        policy = ToolPolicy(POLICY.tools if choice != "none" else (), choice)
        assert not accepts(FORMATS[name], policy, text)


@pytest.mark.parametrize("name", ["deepseek_v3_2", "deepseek_v4"])
def test_the_type_in_the_tag_is_the_values(name: str) -> None:
    fmt = FORMATS[name]
    policy = required(one({"type": "integer"}))
    text = naive(fmt, "f", {"v": 5})
    assert accepts(fmt, policy, text)
    assert not accepts(fmt, policy, text.replace('string="false"', 'string="true"'))
    policy = required(one({"type": "string"}))
    text = naive(fmt, "f", {"v": "5"})
    assert accepts(fmt, policy, text)
    assert not accepts(fmt, policy, text.replace('string="true"', 'string="false"'))
    assert not accepts(fmt, policy, text.replace('string="true">5', 'string="false">"5"'))


@pytest.mark.parametrize("name", TAGGED)
def test_a_string_never_holds_the_text_which_ends_it(name: str) -> None:
    fmt = FORMATS[name]
    text = f"a{fmt.value_end}b"
    for schema in ({"type": "string"}, {"type": ["string", "object"]}, {"type": "string", "minLength": 3}, {}):
        policy = required(one(schema))
        assert not accepts(fmt, policy, naive(fmt, "f", {"v": text}))
        with pytest.raises(UnrepresentableError):
            fmt.render("f", {"v": text}, tool=policy.tools[0])
    policy = required(one({"type": "object"}))
    inside = naive(fmt, "f", {"v": {"k": text}})
    assert accepts(fmt, policy, inside)
    assert reads(fmt, policy, inside) == [("f", json.dumps({"v": {"k": text}}, ensure_ascii=False))]
    for forced in ({"const": text}, {"enum": [text, text + "c"]}):
        with pytest.raises(RequestError, match=r"^tools\[0\]\.function\.parameters\.properties\.v"):
            fmt.structural_tag(required(one(forced)))
    left = required(one({"enum": [text, "b"]}))
    assert accepts(fmt, left, naive(fmt, "f", {"v": "b"}))
    assert not accepts(fmt, left, naive(fmt, "f", {"v": text}))


@pytest.mark.parametrize("name", RAW)
def test_an_enum_of_strings_and_others_is_read_as_one(name: str) -> None:
    fmt = FORMATS[name]
    policy = required(one({"enum": ["1", 1, "null", None, "a"]}))
    for value, text in ((1, "1"), (None, "null"), ("a", "a")):
        written = naive(fmt, "f", {"v": value})
        assert written == naive(fmt, "f", {"v": text})
        assert accepts(fmt, policy, written)
        assert reads(fmt, policy, written) == [("f", json.dumps({"v": value}))]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_not_strict_is_any_well_formed_call(fmt: Format, choice: Any) -> None:
    tool = one({"type": "integer"}, strict=False)
    policy = ToolPolicy((tool, WEATHER), choice)
    accepted: list[dict[str, Any]] = [
        {},
        {"v": 5},
        {"v": "five"},
        {"w": [1], "x.y-z": {"a": None}},
        {"v": 1, "w": "a\nb"},
    ]
    for arguments in accepted:
        assert fmt.representable(tool, arguments)
        text = lead(fmt) + fmt.render_calls([("f", arguments)], policy=policy)
        assert accepts(fmt, policy, text), text
        [(_, read)] = reads(fmt, policy, text)
        assert same(json.loads(read), arguments)
    assert not accepts(fmt, policy, naive(fmt, "f", {"v": 5})[:-1])
    assert not accepts(fmt, policy, naive(fmt, "get_weather", {}))


def test_additional_keys_follow_their_schema(fmt: Format) -> None:
    parameters = {
        "type": "object",
        "properties": {"v": {"type": "string"}, "vw": {"type": "string"}},
        "required": ["v"],
        "additionalProperties": {"type": "integer"},
    }
    policy = required(Tool("f", parameters))
    for arguments in ({"v": "x"}, {"v": "x", "w": 1}, {"v": "x", "vw": "y", "vwx": 2, "a-b.c$_9": 3}):
        text = naive(fmt, "f", arguments)
        assert accepts(fmt, policy, text), text
        assert reads(fmt, policy, text) == [("f", json.dumps(arguments))]
    wrongs: list[dict[str, Any]] = [{"w": 1}, {"v": "x", "w": "y"}, {"v": "x", "w": None}]
    if fmt.style != "raw":  # where 1 is the string "1"
        wrongs.append({"v": "x", "vw": 1})
    for wrong in wrongs:
        assert not accepts(fmt, policy, naive(fmt, "f", wrong))


def test_a_number_of_keys(fmt: Format) -> None:
    parameters = {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2}
    policy = required(Tool("f", parameters))
    for count in range(4):
        arguments = {f"k{at}": at for at in range(count)}
        assert accepts(fmt, policy, naive(fmt, "f", arguments)) is (1 <= count <= 2)
    assert accepts(fmt, required(Tool("f", {"type": "object"})), naive(fmt, "f", {}))


def test_alternatives_of_all_arguments(fmt: Format) -> None:
    def branch(kind: str, key: str) -> dict[str, Any]:
        properties = {"v": {"type": kind}, key: {"type": "boolean"}}
        return {"type": "object", "properties": properties, "required": ["v", key], "additionalProperties": False}

    tool = Tool("f", {"type": "object", "anyOf": [branch("string", "s"), branch("integer", "i")]})
    policy = required(tool)
    for arguments in ({"v": "x", "s": True}, {"v": 5, "i": False}, {"v": "5 ", "s": False}):
        text = naive(fmt, "f", arguments)
        assert accepts(fmt, policy, text)
        assert reads(fmt, policy, text) == [("f", json.dumps(arguments))]
    for wrong in ({"v": "x", "i": True}, {"v": "x"}, {"s": True}, {}):
        assert not accepts(fmt, policy, naive(fmt, "f", wrong))


@pytest.mark.parametrize("least", [0, 2, 5, 6])
@pytest.mark.parametrize("kinds", ["string", ["string", "object"]])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_lengths_are_counted_in_characters(name: str, least: int, kinds: Any) -> None:
    fmt, most = FORMATS[name], least + 2
    policy = required(one({"type": kinds, "minLength": least, "maxLength": most}))
    for char in ("a", "é", "🦀", "\n", ">", "/"):
        for length in range(least + 4):
            text = naive(fmt, "f", {"v": char * length})
            assert accepts(fmt, policy, text) is (least <= length <= most), (char, length)
    # More than so many characters from the end of what is counted, the marker's first two may not stand together.
    text = naive(fmt, "f", {"v": f"{fmt.value_end[:2]}d>"[:most].ljust(least, "a")})
    assert accepts(fmt, policy, text) is (least <= 5 or fmt.style == "json")
    if fmt.style != "json":
        for end in range(1, 4):
            text = naive(fmt, "f", {"v": ("a" * least + fmt.value_end)[: least + end]})
            assert accepts(fmt, policy, text) is (end < 3), text


@pytest.mark.parametrize("name", [name for name in NAMES if FORMATS[name].reasoning_separator])
def test_a_call_may_follow_reasoning_that_the_engine_held_back(name: str) -> None:
    fmt = FORMATS[name]
    policy = required(WEATHER_2)
    text = fmt.reasoning_separator + fmt.render_calls([("get_weather_2", {})])
    assert accepts(fmt, policy, text)
    events = parse(fmt, text, policy)
    assert not [event for event in events if isinstance(event, (Content, CallFailed))]
    assert reads(fmt, policy, text) == [("get_weather_2", "{}")]


# Laws (a) to (d), by search.

WORDS = [
    "",
    "a",
    "null",
    "true",
    "5",
    "-1.5",
    "1e3",
    "05",
    "{",
    "[",
    "{}",
    "[1]",
    " ",
    "\n",
    "\n\n",
    '"',
    "\\",
    "é",
    "🦀",
]
WORDS += [
    "<",
    "</",
    "</arg_value",
    "</arg_value>",
    "</arg_key>",
    "<tool_call>",
    "</tool_call>",
    "</parameter>",
    "\n</parameter",
]
WORDS += [
    "\n</parameter>",
    "</｜DSML｜parameter>",
    "<|tool_call_end|>",
    "\x00",
    "\x1f",
    "\x7f",
    "\u2028",
    "{a",
    "<think>",
]
STRINGS = st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=5).map("".join)
SCALARS = (
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.integers(-(10**6), 10**6).map(lambda n: n / 64)
)
VALUES = st.recursive(
    STRINGS | SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b c", 'q"']), inner, max_size=3),
    max_leaves=6,
)
BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "string": STRINGS,
    "null": st.none(),
    "boolean": st.booleans(),
    "integer": st.integers(-(10**12), 10**12),
    "number": st.integers(-(10**6), 10**6).map(lambda n: n / 64),
    "array": st.lists(VALUES, max_size=3),
    "object": st.dictionaries(st.sampled_from(["a", "b c", 'q"']), VALUES, max_size=3),
}


def _is_long(low: int, text: str) -> bool:
    return low <= len(text) <= low + 3


@st.composite
def arguments_of_a_schema(draw: st.DrawFn) -> tuple[Tool, dict[str, Any]]:
    """A tool and arguments that are valid against its schema, its properties in order."""
    properties: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    needed = []
    for key in draw(st.lists(st.sampled_from(["a", "b", "c d", "é"]), unique=True, max_size=3)):
        kinds = draw(st.lists(st.sampled_from(sorted(BY_TYPE)), unique=True, min_size=1, max_size=3))
        how = draw(st.sampled_from(["types", "anyOf", "enum", "length", "pattern", "any"]))
        strategy: st.SearchStrategy[Any] = st.one_of([BY_TYPE[kind] for kind in kinds])
        schema: Any
        if how == "types":
            schema = {"type": kinds if len(kinds) > 1 else kinds[0]}
        elif how == "anyOf":
            schema = {"anyOf": [{"type": kind} for kind in kinds]}
        elif how == "enum":
            values = draw(st.lists(STRINGS | SCALARS, min_size=1, max_size=3, unique_by=json.dumps))
            schema, strategy = {"enum": values}, st.sampled_from(values)
        elif how == "length":
            low = draw(st.integers(0, 3))
            schema = {"type": ["string", "null"], "minLength": low, "maxLength": low + 3}
            strategy = st.none() | STRINGS.filter(functools.partial(_is_long, low))
        elif how == "pattern":
            schema = {"type": "string", "pattern": "^[^5]*</?[a-z]*$"}
            strategy = st.builds(
                "{}<{}{}".format, st.text("a<\n/>{", max_size=4), st.sampled_from(["", "/"]), st.just("arg")
            )
        else:
            schema, strategy = {}, VALUES
        properties[key] = schema
        is_needed = draw(st.booleans())
        if is_needed:
            needed.append(key)
        if is_needed or draw(st.booleans()):
            arguments[key] = draw(strategy)
    parameters = {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}
    return Tool("f", parameters), arguments


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(case=arguments_of_a_schema(), choice=st.sampled_from(["auto", "required"]))
def test_what_can_be_written_is_let_through_and_read_back(
    name: str, case: tuple[Tool, dict[str, Any]], choice: Any
) -> None:
    fmt = FORMATS[name]
    tool, arguments = case
    policy = ToolPolicy((tool,), choice)
    try:
        fmt.structural_tag(policy)
    except RequestError:
        # Only an enum all of whose values cannot be written forces this.
        enums = [value["enum"] for value in tool.parameters["properties"].values() if "enum" in value]
        assert any(all(not fmt.representable(_free(tool, e), {"v": v}) for v in e) for e in enums)
        return
    if fmt.representable(tool, arguments):
        text = lead(fmt) + fmt.render_calls([("f", arguments)], policy=policy)
        # A grammar leaves out some raw strings of a pattern or of a least length that hold what begins as the marker.
        bounded = [key for key, value in tool.parameters["properties"].items() if {"pattern", "minLength"} & set(value)]
        if fmt.style == "json" or not any(fmt.value_end[0] in str(arguments.get(key)) for key in bounded):
            assert accepts(fmt, policy, text), text
        [(_, read)] = reads(fmt, policy, text)
        assert read == json.dumps(arguments, ensure_ascii=False)
    else:
        assert fmt.style != "json"
        with pytest.raises(UnrepresentableError):
            fmt.render("f", arguments, tool=tool)
        text = naive(fmt, "f", arguments)
        if accepts(fmt, policy, text):
            [(_, read)] = reads(fmt, policy, text)
            assert not same(json.loads(read), arguments)
            assert lead(fmt) + fmt.render_calls([("f", read)], policy=policy) == text


def _free(tool: Tool, values: list[Any]) -> Tool:
    return one({"enum": values})


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(case=arguments_of_a_schema(), data=st.data())
def test_what_is_let_through_has_one_meaning(name: str, case: tuple[Tool, dict[str, Any]], data: st.DataObject) -> None:
    """Texts near a valid one: whichever the grammar lets through is read without error and written back the same."""
    fmt = FORMATS[name]
    tool, arguments = case
    policy = required(tool)
    try:
        fmt.structural_tag(policy)
    except RequestError:
        assume(False)
    text = naive(fmt, "f", arguments)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 4))
        text = text[:at] + data.draw(st.sampled_from([*WORDS, fmt.arg_end, fmt.call_end, "1"])) + text[at + cut :]
    if not accepts(fmt, policy, text):
        return
    calls = reads(fmt, policy, text)
    assert calls
    written = lead(fmt) + fmt.render_calls(calls, policy=policy)
    # Reasoning that the engine held back may leave its separator to the answer.
    assert text in (written, fmt.reasoning_separator + written)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(text=st.lists(st.sampled_from(WORDS) | st.text(max_size=6), max_size=6).map("".join))
def test_free_text_is_content(name: str, text: str) -> None:
    fmt = FORMATS[name]
    if fmt.trigger in text:
        return
    clean = not any(marker in text for marker in (*fmt.stray, *fmt.think))
    for policy in (POLICY, ToolPolicy((), "none")):
        assert accepts(fmt, policy, text) is clean
    if clean:
        events = parse(fmt, text, POLICY)
        assert all(isinstance(event, Content) for event in events)
        assert "".join(event.text for event in events if isinstance(event, Content)) == text
