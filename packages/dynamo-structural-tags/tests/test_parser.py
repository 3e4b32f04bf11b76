# SPDX-License-Identifier: Apache-2.0
"""What the parser makes of an answer, format by format, and what Dynamo 1.6.1 and vLLM made of it where that was wrong.

Every text is read whole and in pieces of one, two, three and seven characters: the outcome must be the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from dynamo_structural_tags._events import Arguments, CallBegin, CallEnd, CallFailed, Content, Event, Reasoning
from dynamo_structural_tags._parser import Parser, parse
from dynamo_structural_tags._request import Tool, ToolPolicy
from dynamo_structural_tags.formats import FORMATS, get_format

RAW = ("glm47", "glm45", "qwen3_coder")
JSON = ("hermes", "kimi_k2")
DSML = ("deepseek_v3_2", "deepseek_v4")
ALL = (*RAW, *JSON, *DSML)

WRITE = Tool(
    "write",
    {
        "type": "object",
        "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "mode": {"type": "integer"}},
        "required": ["path"],
        "additionalProperties": False,
    },
)
PING = Tool("ping", {"type": "object", "properties": {}, "additionalProperties": False})
AUTO = ToolPolicy((WRITE, PING))


@dataclass
class Answer:
    """What was read, with the pieces put together."""

    content: str = ""
    reasoning: str = ""
    begun: list[tuple[int, str, str | None]] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    #: Kind, tool and path of each error.
    errors: list[tuple[str, str | None, str]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    raw: list[str] = field(default_factory=list)
    pieces: dict[int, str] = field(default_factory=dict)
    #: Kinds of events in their order, repeated ones once.
    order: list[str] = field(default_factory=list)


def gather(events: list[Event]) -> Answer:
    found = Answer()
    for event in events:
        kind = type(event).__name__
        if not found.order or found.order[-1] != kind or kind in ("CallBegin", "CallEnd", "CallFailed"):
            found.order.append(kind)
        if isinstance(event, Content):
            found.content += event.text
        elif isinstance(event, Reasoning):
            found.reasoning += event.text
        elif isinstance(event, CallBegin):
            found.begun.append((event.index, event.name, event.call_id))
        elif isinstance(event, Arguments):
            assert event.text
            found.pieces[event.index] = found.pieces.get(event.index, "") + event.text
        elif isinstance(event, CallEnd):
            found.calls.append((event.name, event.arguments))
            # What was streamed is what is reported.
            assert found.pieces[event.index] == event.arguments
            assert (event.index, event.name, event.call_id) in found.begun
        else:
            assert isinstance(event, CallFailed)
            assert event.index == event.error.index
            found.errors.append((event.error.kind, event.error.tool, event.error.path))
            found.messages.append(event.error.message)
            found.raw.append(event.raw)
    return found


def read(name: str, text: str, policy: ToolPolicy | None = AUTO, *, truncated: bool = False, **options: Any) -> Answer:
    fmt = get_format(name)
    whole = gather(parse(fmt, text, policy, truncated=truncated, **options))
    for size in (1, 2, 3, 7):
        parser = Parser(fmt, policy, **options)
        events: list[Event] = []
        for start in range(0, len(text), size):
            events += parser.feed(text[start : start + size])
        events += parser.finish(truncated=truncated)
        pieces = gather(events)
        assert pieces == whole, size
        assert [(error.kind, error.tool, error.path) for error in parser.errors] == whole.errors
        assert [(call.name, call.arguments) for call in parser.calls] == whole.calls
    return whole


def tool(schema: Mapping[str, Any], *, strict: bool = True) -> ToolPolicy:
    """Return the policy of one tool `f` with one property `x`."""
    return ToolPolicy((Tool("f", {"type": "object", "properties": {"x": schema}}, strict),))


def written(name: str, function: str, arguments: Mapping[str, str], *, types: str = "") -> str:
    """Return a call with these texts as values, in the layout of the format, whatever the texts are.

    `types`: for DSML, one letter for each value, `s` for a string, anything else for JSON.
    """
    fmt = get_format(name)
    text = fmt.section_begin + fmt.call_begin + function + fmt.name_end.replace("{index}", "0")
    if fmt.style == "json":
        text += "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in arguments.items()) + "}"
    else:
        parts = []
        for number, (key, value) in enumerate(arguments.items()):
            string = "true" if types[number : number + 1] == "s" else "false"
            parts.append(fmt.arg_begin.replace("{key}", key).replace("{string}", string) + value + fmt.arg_end)
        text += fmt.arg_separator.join(parts)
    return text + fmt.call_end + fmt.section_end


def call_of_write(name: str, **arguments: Any) -> str:
    """Return a call of `write` as the format writes it."""
    if name in JSON:
        return written(name, "write", {key: json.dumps(value) for key, value in arguments.items()})
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    types = "".join("s" if isinstance(value, str) else "j" for value in arguments.values())
    return written(name, "write", texts, types=types)


# One call, content around it.


@pytest.mark.parametrize("name", ALL)
def test_a_call_is_read(name: str) -> None:
    answer = read(name, call_of_write(name, path="a/b.py", text='x = "é"\n', mode=420))
    assert answer.errors == []
    [(called, arguments)] = answer.calls
    assert called == "write"
    assert json.loads(arguments) == {"path": "a/b.py", "text": 'x = "é"\n', "mode": 420}
    assert answer.content == ""
    assert answer.order == ["CallBegin", "Arguments", "CallEnd"]


@pytest.mark.parametrize("name", [*RAW, *DSML])
def test_arguments_become_canonical_json(name: str) -> None:
    answer = read(name, call_of_write(name, path='"\\\t', text="", mode=7))
    assert answer.calls == [("write", '{"path": "\\"\\\\\\t", "text": "", "mode": 7}')]


@pytest.mark.parametrize("name", JSON)
def test_json_arguments_are_kept_verbatim(name: str) -> None:
    text = '{"mode":  7,\n "path": "\\u00e9\\/"}'
    assert read(name, call_of_write(name).replace("{}", text)).calls == [("write", text)]


@pytest.mark.parametrize("name", ALL)
def test_a_call_without_arguments(name: str) -> None:
    assert read(name, written(name, "ping", {})).calls == [("ping", "{}")]


@pytest.mark.parametrize("name", ALL)
def test_content_before_a_call_loses_the_separator_once(name: str) -> None:
    separator = get_format(name).content_separator
    call = call_of_write(name, path="p")
    for content in ("I write.", "a < b <tool <| <｜DSM", "line\n", "line\n\n\n", "x \n", " \t" * 3):
        answer = read(name, content + separator + call)
        assert answer.content == content
        assert len(answer.calls) == 1
    assert read(name, "no separator" + call).content == "no separator"


@pytest.mark.parametrize("name", ALL)
def test_white_space_before_a_call_is_layout(name: str) -> None:
    fmt = get_format(name)
    call = call_of_write(name, path="p")
    lead = fmt.reasoning_separator + fmt.content_separator
    assert read(name, lead + call).content == ""
    assert read(name, fmt.content_separator + call).content == ""
    # Longer, it is content like any other.
    longer = read(name, lead + "\n \n" + fmt.content_separator + call)
    assert longer.content == lead + "\n \n"
    assert len(longer.calls) == 1


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("text", ["", "Hello.", "\n\nHello.\n", " ", "1 < 2", "<", "<t", "<tool_cal", "｜", "a\n\n"])
def test_content_alone_is_verbatim(name: str, text: str) -> None:
    answer = read(name, text)
    assert answer == Answer(content=text, order=["Content"] if text else [])


@pytest.mark.parametrize("name", ALL)
def test_a_markers_beginning_is_content_when_the_answer_ends(name: str) -> None:
    trigger = get_format(name).trigger
    for end in range(1, len(trigger)):
        assert read(name, "x\n\n" + trigger[:end]).content == "x\n\n" + trigger[:end]
        assert read(name, trigger[:end], truncated=True).content == trigger[:end]
        assert read(name, trigger[:end] + "?").content == trigger[:end] + "?"


@pytest.mark.parametrize("name", ALL)
def test_text_after_a_call_is_content_without_the_space_before_it(name: str) -> None:
    call = call_of_write(name, path="p")
    answer = read(name, "A" + call + " \n\nDone. Bye.\n")
    assert answer.content == "ADone. Bye.\n"
    assert answer.order == ["Content", "CallBegin", "Arguments", "CallEnd", "Content"]
    assert read(name, call + "\n \t\r\n").content == ""


@pytest.mark.parametrize("name", ALL)
def test_a_call_after_text_after_a_call_is_read(name: str) -> None:
    call = call_of_write(name, path="p")
    answer = read(name, f"{call}\nand{get_format(name).content_separator}{call}")
    assert [called for called, _ in answer.calls] == ["write", "write"]
    assert answer.content == "and"


# Several calls.


@pytest.mark.parametrize("name", ALL)
def test_several_calls(name: str) -> None:
    fmt = get_format(name)
    first, second = call_of_write(name, path="p"), written(name, "ping", {})
    if fmt.section_begin:
        first = first.removesuffix(fmt.section_end)
        second = second.removeprefix(fmt.section_begin)
    for separator in (fmt.call_separator, "", "\n", "\n\n  "):
        answer = read(name, first + separator + second)
        assert [called for called, _ in answer.calls] == ["write", "ping"]
        assert [index for index, _, _ in answer.begun] == [0, 1]
        assert answer.content == ""


@pytest.mark.parametrize("name", ALL)
def test_without_parallel_calls_the_first_is_valid_and_the_second_refused(name: str) -> None:
    policy = ToolPolicy(AUTO.tools, parallel=False)
    call = call_of_write(name, path="</x>")
    answer = read(name, call + "\n" + call, policy)
    assert len(answer.calls) == 1
    assert answer.errors == [("unexpected_call", "write", "")]
    assert "parallel_tool_calls" in answer.messages[0]
    assert answer.raw == [call.removesuffix(get_format(name).section_end)]
    assert [index for index, _, _ in answer.begun] == [0]


# Names.


@pytest.mark.parametrize("name", ALL)
def test_an_undeclared_tool_is_an_error_and_reading_goes_on_after_it(name: str) -> None:
    fmt = get_format(name)
    for function in ("rm", "writ", "write2", "read.me", "Write", "天気"):
        bad = written(name, function, {"path": '"a"', "x": "1"}, types="sj")
        good = call_of_write(name, path="p")
        answer = read(name, f"{bad}\n{good}")
        assert answer.errors == [("undeclared_tool", function, "")]
        assert repr(function) in answer.messages[0]
        assert "write, ping" in answer.messages[0]
        assert answer.raw == [bad.removesuffix(fmt.section_end)]
        assert [called for called, _ in answer.calls] == ["write"]
        assert answer.begun[0][:2] == (1, "write")
        assert 0 not in answer.pieces


@pytest.mark.parametrize("name", ALL)
def test_the_error_is_known_as_soon_as_the_name_is(name: str) -> None:
    fmt = get_format(name)
    parser = Parser(fmt, AUTO)
    head = fmt.section_begin + fmt.call_begin + "rm" + fmt.name_end.replace("{index}", "0") + "<"
    assert parser.feed(head) == []
    assert [error.kind for error in parser.errors] == ["undeclared_tool"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("function", ["", " ", "two words", "{", "a[0]", "x" * 129, "x" * 1000])
def test_what_can_be_no_name_is_malformed(name: str, function: str) -> None:
    answer = read(name, written(name, function, {"path": '"a"'}, types="s") + "tail")
    assert [kind for kind, _, _ in answer.errors] == ["malformed_call"]
    assert answer.calls == []
    assert answer.begun == []
    assert answer.content == ""
    assert answer.raw[0].endswith("tail")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("filler", ["x", " "])
def test_a_name_that_does_not_end_is_known_to_be_none(name: str, filler: str) -> None:
    fmt = get_format(name)
    parser = Parser(fmt, AUTO)
    parser.feed(fmt.section_begin + fmt.call_begin)
    for _ in range(300):
        parser.feed(filler)
    assert [error.kind for error in parser.errors] == ["malformed_call"]


@pytest.mark.parametrize("name", ALL)
def test_a_named_choice_calls_no_other_tool(name: str) -> None:
    answer = read(name, call_of_write(name, path="p"), ToolPolicy((PING,), "named"))
    assert answer.errors == [("undeclared_tool", "write", "")]


# Arguments against the schema.


@pytest.mark.parametrize("name", ALL)
def test_missing_required_argument(name: str) -> None:
    answer = read(name, call_of_write(name, text="x") + "\n" + call_of_write(name, path="p"))
    assert [(kind, called) for kind, called, _ in answer.errors] == [("invalid_arguments", "write")]
    assert "path" in answer.messages[0]
    assert len(answer.calls) == 1
    # The pieces were streamed before the check; that they end in no CallEnd is what counts.
    assert json.loads(answer.pieces[0]) == {"text": "x"}


@pytest.mark.parametrize("name", ALL)
def test_an_argument_that_is_not_declared(name: str) -> None:
    answer = read(name, call_of_write(name, path="p", extra="1"))
    assert [kind for kind, _, _ in answer.errors] == ["invalid_arguments"]
    assert "extra" in answer.messages[0] + answer.errors[0][2]
    assert answer.calls == []


@pytest.mark.parametrize("name", ALL)
def test_an_argument_of_the_wrong_type(name: str) -> None:
    answer = read(name, call_of_write(name, path="p", mode=1.5))
    assert answer.errors == [("invalid_arguments", "write", "mode")]


@pytest.mark.parametrize("name", RAW)
def test_what_is_no_json_where_only_json_may_stand(name: str) -> None:
    for text in ("seven", "", " ", "07", "1 2", '1, "path": "x"', "NaN", "1e999", "[1}"):
        answer = read(name, written(name, "write", {"path": "p", "mode": text}) + "after")
        assert answer.errors == [("invalid_arguments", "write", "mode")], text
        assert answer.content == "after"


@pytest.mark.parametrize("name", ALL)
def test_an_argument_given_twice(name: str) -> None:
    once = written(name, "write", {"path": '"p"'}, types="s")
    if name in JSON:
        text = once.replace('"path": "p"', '"path": "p", "path": "p"')
    else:
        fmt = get_format(name)
        part = fmt.arg_begin.replace("{key}", "path").replace("{string}", "true") + '"p"' + fmt.arg_end
        text = once.replace(part, part + fmt.arg_separator + part)
    answer = read(name, text)
    assert [kind for kind, _, _ in answer.errors] == ["invalid_arguments"]
    assert "twice" in answer.messages[0]


@pytest.mark.parametrize("name", ALL)
def test_a_key_twice_inside_a_value(name: str) -> None:
    policy = tool({"type": "object"})
    answer = read(name, written(name, "f", {"x": '{"a": {"b": 1, "b": 2}}'}, types="j"), policy)
    assert [kind for kind, _, _ in answer.errors] == ["invalid_arguments"]
    assert "'b'" in answer.messages[0]


@pytest.mark.parametrize("name", ALL)
def test_not_strict_checks_the_form_only(name: str) -> None:
    loose = ToolPolicy((Tool("write", WRITE.parameters, strict=False),))
    answer = read(name, call_of_write(name, extra="x", mode="rw"), loose)
    assert [json.loads(arguments) for _, arguments in answer.calls] == [{"extra": "x", "mode": "rw"}]


def test_not_strict_admits_strings_beside_the_declared_type() -> None:
    policy = tool({"type": "integer"}, strict=False)
    for text, value in (("7", 7), ("seven", "seven"), ("7 ", "7 "), ("{", "{")):
        assert read("glm47", written("glm47", "f", {"x": text}), policy).calls == [("f", json.dumps({"x": value}))]


# The reading of raw texts.


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "7", "7"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, "", ""),
        ({"type": "integer"}, "-7", -7),
        ({"type": "object"}, '{"a": "</arg_value>\\n</parameter>"}', {"a": "</arg_value>\n</parameter>"}),
        ({"type": "array"}, '["\\"", "\\\\", "<"]', ['"', "\\", "<"]),
        ({"type": ["string", "integer"]}, "7", 7),
        ({"type": ["string", "integer"]}, "7x", "7x"),
        ({"type": ["string", "integer"]}, "07", "07"),
        ({"type": ["string", "integer"]}, " 7", " 7"),
        ({"type": ["string", "integer"]}, "-", "-"),
        ({"type": ["string", "integer"]}, "", ""),
        ({"type": ["string", "integer"]}, "1" * 401, "1" * 401),
        ({"type": ["string", "integer"]}, "{1", "{1"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "nullable", "nullable"),
        ({"type": ["string", "boolean"]}, "true", True),
        ({"type": ["string", "boolean"]}, "tru", "tru"),
        ({"type": ["string", "object"]}, '{"a": 1}', {"a": 1}),
        ({"type": ["string", "object"]}, "[1]", "[1]"),
        ({"type": ["string", "array"]}, "[1]", [1]),
        ({}, "false", False),
        ({}, "1.50", 1.5),
        ({}, "1.", "1."),
        ({}, "text", "text"),
    ],
)
def test_raw_texts(name: str, schema: Mapping[str, Any], text: str, value: Any) -> None:
    answer = read(name, written(name, "f", {"x": text}), tool(schema))
    assert answer.errors == []
    [(_, arguments)] = answer.calls
    assert json.loads(arguments) == {"x": value}
    assert type(json.loads(arguments)["x"]) is type(value)


@pytest.mark.parametrize("name", RAW)
def test_a_scalar_that_the_schema_refuses_is_the_string(name: str) -> None:
    policy = tool({"type": ["string", "integer"], "maximum": 9})
    assert read(name, written(name, "f", {"x": "12"}), policy).calls == [("f", '{"x": "12"}')]
    assert read(name, written(name, "f", {"x": "9"}), policy).calls == [("f", '{"x": 9}')]


@pytest.mark.parametrize("name", RAW)
def test_json_is_kept_as_written(name: str) -> None:
    text = '{"b":1,  "a": "\\u00e9", "c": 1.0}'
    assert read(name, written(name, "f", {"x": text}), tool({"type": "object"})).calls == [("f", f'{{"x": {text}}}')]


@pytest.mark.parametrize("name", RAW)
def test_long_json_is_read_alike(name: str) -> None:
    value = [{"n": number, "s": "</arg_value></parameter>\\ \"'"} for number in range(50)]
    text = json.dumps(value)
    assert read(name, written(name, "f", {"x": text}), tool({"type": "array"})).calls == [("f", f'{{"x": {text}}}')]


@pytest.mark.parametrize("name", DSML)
def test_dsml_reads_by_the_marked_type(name: str) -> None:
    policy = tool({})
    for text in ("7", "null", "{", '{"a": 1}', ""):
        assert read(name, written(name, "f", {"x": text}, types="s"), policy).calls == [("f", json.dumps({"x": text}))]
    assert read(name, written(name, "f", {"x": '["</｜DSML｜parameter>"]'}), policy).calls == [
        ("f", '{"x": ["</｜DSML｜parameter>"]}')
    ]
    wrong = written(name, "f", {"x": "7"}).replace('"false"', '"maybe"')
    assert [kind for kind, _, _ in read(name, wrong, policy).errors] == ["malformed_call"]
    untyped = written(name, "f", {"x": "7"}).replace(' string="false"', "")
    assert [kind for kind, _, _ in read(name, untyped, policy).errors] == ["malformed_call"]


def test_qwens_line_breaks() -> None:
    for inner, value in (
        ("\nx\n", "x"),
        ("\n\nx\n\n", "\nx\n"),
        ("\n\n", ""),
        ("x", "x"),
        ("", ""),
        ("x\n", "x\n"),
        ("\na</parameter>b\n", "a</parameter>b"),
        ("\n\r\n", "\r"),
    ):
        text = f"<tool_call>\n<function=write>\n<parameter=path>{inner}</parameter>\n</function>\n</tool_call>"
        assert read("qwen3_coder", text).calls == [("write", json.dumps({"path": value}))], inner


# White space between markers.


@pytest.mark.parametrize("name", ALL)
def test_white_space_between_markers_is_skipped(name: str) -> None:
    fmt = get_format(name)
    text = call_of_write(name, path="p", mode=1)
    expected = read(name, text).calls
    if name in JSON:
        loose = text.replace("{", "\n { ", 1) if name == "hermes" else text.replace("<|tool_call_end|>", "\n \0")
        loose = loose.replace("\0", "<|tool_call_end|>").replace(">functions", ">\nfunctions").replace("}\n<", "}<")
    elif name in DSML:
        loose = text.replace(">\n<", ">\r\n\t <")
    else:
        loose = text.replace("</arg_key><", "</arg_key>\n<").replace("</arg_value><", "</arg_value> \n<")
        loose = loose.replace("write\n<", "write<").replace("</parameter>\n", "</parameter>\n\n")
    assert loose != text
    answer = read(name, loose)
    assert answer.errors == []
    assert [json.loads(arguments) for _, arguments in answer.calls] == [json.loads(expected[0][1])]
    assert fmt.trigger not in answer.content


# Faults of Dynamo 1.6.1 and vLLM, by their right behaviour. `section 4` and `section 8` are those of the project's
# notes on Dynamo 1.6.1.


def test_glm_line_break_between_key_and_value() -> None:
    # Section 4: `{}` as arguments.
    text = "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a</arg_value>\n</tool_call>"
    for name in ("glm47", "glm45"):
        assert read(name, text).calls == [("write", '{"path": "a"}')]


@pytest.mark.parametrize("name", ALL)
def test_closers_of_the_call_inside_a_string(name: str) -> None:
    # Section 4: truncated values, lost calls, tails leaked as content.
    fmt = get_format(name)
    closers = {"</tool_call>", "</function>", "</invoke>", fmt.call_end.strip(), fmt.section_end.strip(), fmt.trigger}
    closers |= {"<tool_call>", "<|tool_calls_section_end|>", "<|tool_call_end|>", "</｜DSML｜tool_calls>", "<arg_key>"}
    for closer in closers - {""}:
        value = f"a {closer} b"
        answer = read(name, call_of_write(name, path="p", text=value))
        assert answer.errors == []
        assert [json.loads(arguments) for _, arguments in answer.calls] == [{"path": "p", "text": value}]
        assert answer.content == ""


@pytest.mark.parametrize("name", ALL)
def test_html_entities_are_kept(name: str) -> None:
    # frontend-crates 249; section 4.
    value = "&lt;b&gt; &amp;amp; &#39; <b>"
    [(_, arguments)] = read(name, call_of_write(name, path=value)).calls
    assert json.loads(arguments) == {"path": value}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", ["x\n", "\n", "\n\n", "\nx", " x ", "x\r\n", "\t"])
def test_white_space_around_a_string_is_kept(name: str, value: str) -> None:
    # Section 4: every written file lost its last line break.
    [(_, arguments)] = read(name, call_of_write(name, path="p", text=value)).calls
    assert json.loads(arguments)["text"] == value


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("truncated", [False, True])
def test_a_call_that_does_not_end_is_truncated_wherever_the_answer_ends(name: str, truncated: bool) -> None:
    # 13986, 13791; section 4: empty `stop`, or a repaired call.
    fmt = get_format(name)
    text = call_of_write(name, path="some/path", mode=12)
    end = len(text) - len(fmt.section_end)
    for cut in range(len(fmt.trigger), end):
        answer = read(name, "Hi." + text[:cut], truncated=truncated)
        assert [kind for kind, _, _ in answer.errors] == ["truncated_call"], text[:cut]
        assert answer.calls == []
        assert answer.content == "Hi."
        assert answer.raw == [text[:cut]]
    for cut in range(end, len(text) + 1):
        answer = read(name, text[:cut], truncated=truncated)
        assert answer.errors == []
        assert len(answer.calls) == 1


@pytest.mark.parametrize("name", ALL)
def test_the_calls_before_a_truncated_one_are_kept(name: str) -> None:
    fmt = get_format(name)
    call = call_of_write(name, path="p").removesuffix(fmt.section_end)
    again = call.removeprefix(fmt.section_begin)
    first = fmt.call_begin.split("\n")[0].removesuffix("functions.")
    for cut in range(len(first), len(again)):
        answer = read(name, call + fmt.call_separator + again[:cut], truncated=True)
        assert len(answer.calls) == 1
        assert [kind for kind, _, _ in answer.errors] == ["truncated_call"]
        assert answer.raw == [again[:cut]]


def test_hermes_json_inside_qwens_tags_is_an_explicit_mismatch() -> None:
    # 13176: no calls, finish reason stop.
    text = '<tool_call>\n{"name": "write", "arguments": {"path": "p"}}\n</tool_call>'
    answer = read("qwen3_coder", text)
    assert answer.errors == [("malformed_call", None, "")]
    assert answer.messages == ["'<function=' must follow, not '{'"]
    assert answer.raw == [text]
    assert [kind for kind, _, _ in read("glm47", text).errors] == ["malformed_call"]
    assert [kind for kind, _, _ in read("hermes", "<tool_call>\n<function=write>").errors] == ["malformed_call"]


def test_kimis_call_without_its_section_is_no_call() -> None:
    # Section 4: accepted and parsed.
    text = "Hi <|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    answer = read("kimi_k2", text)
    assert [kind for kind, _, _ in answer.errors] == ["malformed_call"]
    assert answer.content == "Hi "
    assert "outside a call" in answer.messages[0]


@pytest.mark.parametrize("name", ALL)
def test_stray_markers_are_an_error_before_and_after_a_call(name: str) -> None:
    fmt = get_format(name)
    for marker in fmt.stray:
        answer = read(name, f"see {marker} there")
        assert [kind for kind, _, _ in answer.errors] == ["malformed_call"]
        assert answer.content == "see "
        assert answer.raw == [f"{marker} there"]
        after = read(name, call_of_write(name, path="p") + marker)
        assert len(after.calls) == 1
        assert [kind for kind, _, _ in after.errors] == ["malformed_call"]


@pytest.mark.parametrize("name", ALL)
def test_other_spellings_of_a_call_are_never_a_silent_stop(name: str) -> None:
    # Section 4, hole 1: undeclared tools by another spelling.
    for text in (
        "<tool_call><function=rm>",
        "<tool_call>\n\n<function=rm>\n</function>\n</tool_call>",
        "<function=rm>",
    ):
        answer = read(name, text)
        if "<tool_call>" in text and get_format(name).trigger == "<tool_call>":
            assert answer.errors, text
        assert answer.calls == []


# Broken layouts.


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm47", "<tool_call>ping<arg_key>a</arg_key>x<arg_value>b</arg_value></tool_call>"),
        ("glm47", "<tool_call>ping<arg_value>b</arg_value></tool_call>"),
        ("glm47", "<tool_call>ping</arg_key></tool_call>"),
        ("glm47", "<tool_call></tool_call>"),
        ("glm45", "<tool_call>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=ping>\ntext\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=ping>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=ping>\n</function>\n<tool_call>"),
        ("hermes", '<tool_call>\n{"arguments": {}, "name": "ping"}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "ping", "arguments": "{}"}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "ping", "arguments": null}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "ping", "arguments": {}, "id": 1}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "ping"}\n</tool_call>'),
        ("hermes", '<tool_call>\n[{"name": "ping", "arguments": {}}]\n</tool_call>'),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        ("kimi_k2", "<|tool_calls_section_begin|>text<|tool_calls_section_end|>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>ping:0<|tool_call_argument_begin|>{}"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.ping<|tool_call_argument_begin|>{}"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.ping:x<|tool_call_argument_begin|>{}"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.ping:12345<|tool_call_argument_begin|>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|>[]"),
        ("deepseek_v4", "<｜DSML｜tool_calls>\n</｜DSML｜tool_calls>"),
        (
            "deepseek_v4",
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="ping">\nx</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        ),
        ("deepseek_v4", "<｜DSML｜function_calls>\n"),
    ],
)
def test_what_is_no_call_is_malformed_and_nothing_of_it_is_lost(name: str, text: str) -> None:
    answer = read(name, "Hi." + text + " and more")
    assert [kind for kind, _, _ in answer.errors] == ["malformed_call"]
    assert answer.calls == []
    assert answer.content == "Hi."
    assert answer.raw == [text + " and more"]


def test_text_between_kimis_calls_is_malformed() -> None:
    call = call_of_write("kimi_k2", path="p").removesuffix("<|tool_calls_section_end|>")
    answer = read("kimi_k2", call + " then")
    assert len(answer.calls) == 1
    assert [kind for kind, _, _ in answer.errors] == ["malformed_call"]
    assert answer.raw == ["then"]


def test_arguments_that_are_no_json_leave_the_next_call_readable() -> None:
    bad = '<tool_call>\n{"name": "write", "arguments": {"path": p}}\n</tool_call>'
    answer = read("hermes", bad + "\n" + call_of_write("hermes", path="p"))
    assert answer.errors == [("invalid_arguments", "write", "")]
    assert answer.raw == [bad]
    assert len(answer.calls) == 1


@pytest.mark.parametrize("name", ["hermes", "glm47"])
@pytest.mark.parametrize("depth", [200, 100_000])
def test_deep_nesting_never_raises(name: str, depth: int) -> None:
    value = "[" * depth + "]" * depth
    events = parse(get_format(name), written(name, "f", {"x": value}), tool({"type": "array"}))
    assert isinstance(events[-1], (CallEnd, CallFailed))
    if depth > 1000:
        assert isinstance(events[-1], CallFailed)
        assert events[-1].error.kind == "invalid_arguments"


# Kimi's identifiers.


def _kimi(*identifiers: str) -> str:
    calls = (f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{{}}<|tool_call_end|>" for name in identifiers)
    return "<|tool_calls_section_begin|>" + "".join(calls) + "<|tool_calls_section_end|>"


def test_kimi_identifiers_are_as_written_and_never_twice() -> None:
    answer = read("kimi_k2", _kimi("functions.ping:0", "functions.ping:7", "functions.ping:7", "functions.ping:8"))
    assert [call_id for _, _, call_id in answer.begun] == [f"functions.ping:{number}" for number in (0, 7, 8, 9)]
    answer = read("kimi_k2", _kimi("functions.ping:0"), used_ids=["functions.ping:0", "functions.ping:1"])
    assert [call_id for _, _, call_id in answer.begun] == ["functions.ping:2"]


def test_kimi_names_may_hold_dots() -> None:
    policy = ToolPolicy((Tool("a.b.c", {"type": "object"}),))
    answer = read("kimi_k2", _kimi("functions.a.b.c:3"), policy)
    assert answer.begun == [(0, "a.b.c", "functions.a.b.c:3")]


def test_other_formats_carry_no_identifier() -> None:
    for name in ALL:
        if name != "kimi_k2":
            assert read(name, call_of_write(name, path="p")).begun == [(0, "write", None)]


# Reasoning.


@pytest.mark.parametrize("name", ALL)
def test_reasoning_that_the_prompt_opened(name: str) -> None:
    fmt = get_format(name)
    call = call_of_write(name, path="p")
    thought = "\nI </think or <tool_call> not.\n"
    text = f"{thought}{fmt.think[1]}{fmt.reasoning_separator}Hello."
    answer = read(name, text, reasoning="open")
    assert (answer.reasoning, answer.content) == (thought, "Hello.")
    answer = read(name, f"{text}{fmt.content_separator}{call}", reasoning="open")
    assert (answer.reasoning, answer.content, len(answer.calls)) == (thought, "Hello.", 1)
    for separator in ("", fmt.reasoning_separator, fmt.content_separator):
        answer = read(name, f"{thought}{fmt.think[1]}{separator}{call}", reasoning="open")
        assert (answer.reasoning, answer.content, len(answer.calls)) == (thought, "", 1)


@pytest.mark.parametrize("name", ALL)
def test_a_call_inside_the_reasoning_is_reasoning(name: str) -> None:
    call = call_of_write(name, path="p")
    answer = read(name, call, reasoning="open")
    assert (answer.reasoning, answer.calls) == (call, [])
    required = read(name, call, ToolPolicy(AUTO.tools, "required"), reasoning="open")
    assert [kind for kind, _, _ in required.errors] == ["missing_call"]


@pytest.mark.parametrize("name", ALL)
def test_optional_reasoning(name: str) -> None:
    fmt = get_format(name)
    begin, end = fmt.think
    call = call_of_write(name, path="p")
    for lead in {"", fmt.think_lead}:
        text = f"{lead}{begin}why{end}{fmt.reasoning_separator}Hi{fmt.content_separator}{call}"
        answer = read(name, text, reasoning="auto")
        assert (answer.reasoning, answer.content, len(answer.calls)) == ("why", "Hi", 1)
        assert answer.order[0] == "Reasoning"
    answer = read(name, call, reasoning="auto")
    assert (answer.reasoning, answer.content, len(answer.calls)) == ("", "", 1)
    for text in ("Hi", "<thin", "<thing>", f"x{begin}why{end}"):
        assert read(name, text, reasoning="auto").content == text
    assert read(name, f"{begin}{end}x", reasoning="auto").content == "x"


@pytest.mark.parametrize("name", ALL)
def test_reasoning_that_does_not_end(name: str) -> None:
    begin, end = get_format(name).think
    answer = read(name, f"{begin}why{end[:-1]}", reasoning="auto", truncated=True)
    assert (answer.reasoning, answer.content, answer.errors) == ("why" + end[:-1], "", [])


@pytest.mark.parametrize("name", ALL)
def test_the_reasoning_separator_is_removed_once(name: str) -> None:
    fmt = get_format(name)
    separator = fmt.reasoning_separator
    answer = read(name, f"why{fmt.think[1]}{separator}\n\n\n\nHi", reasoning="open")
    assert answer.content == "\n\n\n\nHi"
    if separator:
        assert read(name, f"why{fmt.think[1]}{separator[:-1]}", reasoning="open").content == separator[:-1]


# Policy.


@pytest.mark.parametrize("name", ALL)
def test_without_tools_everything_is_content(name: str) -> None:
    text = f"Hi {call_of_write(name, path='p')}{''.join(get_format(name).stray)}"
    assert read(name, text, None) == Answer(content=text, order=["Content"])
    answer = read(name, f"why</think>{text}", None, reasoning="open")
    assert (answer.reasoning, answer.content) == ("why", text)


@pytest.mark.parametrize("name", ALL)
def test_a_call_where_the_choice_is_none(name: str) -> None:
    policy = ToolPolicy((), "none")
    answer = read(name, f"Hi.{call_of_write(name, path='</x>')}Bye.", policy)
    assert answer.errors == [("unexpected_call", "write", "")]
    assert answer.begun == []
    assert answer.content == "Hi.Bye."
    assert read(name, "Hi.", policy).errors == []


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_required_call_that_is_not_made(name: str, choice: Any) -> None:
    policy = ToolPolicy((WRITE,), choice)
    for text in ("", "I will not.", "\n"):
        answer = read(name, text, policy)
        assert answer.errors == [("missing_call", None, "")]
        assert answer.raw == [""]
        assert answer.content == text
        assert read(name, text, policy, truncated=True).errors == []
    assert read(name, call_of_write(name, path="p"), policy).errors == []
    # A call that failed is reported as what it is, not as a missing one besides.
    assert [kind for kind, _, _ in read(name, written(name, "rm", {}), policy).errors] == ["undeclared_tool"]
    trigger = get_format(name).trigger
    assert [kind for kind, _, _ in read(name, trigger, policy, truncated=True).errors] == ["truncated_call"]


@pytest.mark.parametrize("name", ALL)
def test_markers_inside_json_content_open_no_call(name: str) -> None:
    policy = ToolPolicy(AUTO.tools, content_schema={"type": "object"})
    call = call_of_write(name, path="p")
    text = json.dumps({"a": call}, ensure_ascii=False)
    for lead in ("", "\n", " " * 300):
        assert read(name, lead + text, policy).content == lead + text
    answer = read(name, call, policy)
    assert (answer.content, len(answer.calls)) == ("", 1)
    answer = read(name, get_format(name).content_separator + call, policy)
    assert (answer.content, len(answer.calls)) == ("", 1)
    # Prose that no grammar would have let through is not taken for JSON: its call is not lost.
    assert len(read(name, "Sure: " + call, policy).calls) == 1


# The interface.


@pytest.mark.parametrize("name", ALL)
def test_arguments_are_streamed(name: str) -> None:
    fmt = get_format(name)
    text = call_of_write(name, path="p", text="word " * 100)
    parser = Parser(fmt, AUTO)
    pieces = [piece for start in range(0, len(text), 5) for piece in parser.feed(text[start : start + 5])]
    streamed = [piece.text for piece in pieces if isinstance(piece, Arguments)]
    assert len(streamed) > 90
    assert max(map(len, streamed)) < 40


def test_a_string_that_may_still_be_a_number_is_held_and_no_longer() -> None:
    parser = Parser(get_format("glm47"), tool({"type": ["string", "integer"]}))
    parser.feed("<tool_call>f<arg_key>x</arg_key><arg_value>")
    assert parser.feed("-12") == []
    assert parser.feed("3") == []
    assert parser.feed("4 steps") == [Arguments(0, '"-1234 steps')]
    assert parser.feed(" more") == [Arguments(0, " more")]


def test_feeding_nothing_and_after_the_end() -> None:
    parser = Parser(get_format("glm47"), ToolPolicy((PING,), "required"))
    assert parser.feed("") == []
    assert len(parser.finish()) == 1
    assert parser.finish() == []
    assert parser.feed("<tool_call>ping</tool_call>") == []
    assert parser.calls == []
    assert len(parser.errors) == 1


@pytest.mark.parametrize("name", ALL)
def test_format_parser_is_the_same_machine(name: str) -> None:
    parser = get_format(name).parser(AUTO)
    events = parser.feed(call_of_write(name, path="p")) + parser.finish()
    assert events == parse(get_format(name), call_of_write(name, path="p"), AUTO)


@pytest.mark.parametrize("name", ALL)
def test_what_is_rendered_is_read_back(name: str) -> None:
    fmt = get_format(name)
    calls = [("write", '{"path": "a\\n", "text": "<b>&amp;</b>", "mode": 1}'), ("ping", "{}")]
    text = fmt.render_calls(calls, policy=AUTO)
    assert read(name, text).calls == calls
    assert read(name, "Hi" + fmt.content_separator + text).content == "Hi"


def test_every_format_is_tested_here() -> None:
    assert set(ALL) == set(FORMATS)
