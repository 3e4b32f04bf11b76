# SPDX-License-Identifier: Apache-2.0
"""No text raises, however it is cut: arbitrary characters, arbitrary bytes, markers in any order, damaged answers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dynamo_structural_tags._errors import CallError
from dynamo_structural_tags._events import Arguments, CallBegin, CallEnd, CallFailed, Content, Event, Reasoning
from dynamo_structural_tags._parser import Parser
from dynamo_structural_tags._reading import arguments_schema
from dynamo_structural_tags._request import Tool, ToolPolicy
from dynamo_structural_tags.formats import FORMATS

ANYTHING: dict[str, Any] = {}
TOOLS = (
    Tool(
        "write",
        {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "number": {"type": "integer"},
                "either": {"type": ["string", "integer", "null"], "maximum": 100},
                "object": {"type": "object", "properties": {"a": {"type": "string"}}},
                "list": {"type": ["array", "string"], "items": {"type": "number"}},
                "any": ANYTHING,
            },
            "required": ["text"],
        },
    ),
    Tool("loose", {"type": "object", "properties": {"number": {"type": "integer"}}}, strict=False),
    Tool("ping", {"type": "object", "properties": {}, "additionalProperties": False}),
)
POLICIES: tuple[ToolPolicy | None, ...] = (
    ToolPolicy(TOOLS),
    ToolPolicy(TOOLS, parallel=False),
    ToolPolicy(TOOLS, "required"),
    ToolPolicy(TOOLS[:1], "named", parallel=False),
    ToolPolicy((), "none"),
    ToolPolicy(TOOLS, content_schema={"type": "object"}),
    None,
)
KEYS = ("text", "number", "either", "object", "list", "any", "other")
MARKERS = sorted(
    {
        piece
        for fmt in FORMATS.values()
        for piece in (
            *fmt.think,
            *fmt.stray,
            fmt.trigger,
            fmt.section_begin,
            fmt.section_end,
            fmt.call_begin,
            fmt.call_begin + "write" + fmt.name_end.replace("{index}", "0"),
            fmt.name_end.replace("{index}", "12"),
            fmt.arg_begin.replace("{key}", "text").replace("{string}", "true"),
            fmt.arg_begin.replace("{key}", "either").replace("{string}", "false"),
            fmt.arg_end,
            fmt.value_end,
            fmt.call_end,
            fmt.content_separator,
            fmt.reasoning_separator,
        )
    }
    - {""}
)
SCRAPS = (
    *("write", "loose", "ping", "rm", "{", "}", "[", "]", '"', "\\", ":", ",", " ", "\n", "\n\n", "<", ">", "</"),
    *("7", "-1", "1e999", "NaN", "null", "true", '{"text": "a"}', '"\\ud800"', '"\\ud83d\\ude00"', "é", "\x00", "😀"),
)

characters = st.text(max_size=60)
octets = st.binary(max_size=60).map(lambda data: data.decode(errors="replace"))
soup = st.lists(st.one_of(st.sampled_from(MARKERS), st.sampled_from(SCRAPS), characters), max_size=30).map("".join)
values = st.one_of(
    characters,
    octets,
    soup,
    st.integers().map(str),
    st.sampled_from(("null", "true", "1.5", "1e999", "007", "{", "[1, 2]", '{"a": "</arg_value>"}', "[")),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), characters),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(characters, inner, max_size=3)),
        max_leaves=6,
    ).map(json.dumps),
)


@st.composite
def answers(draw: st.DrawFn, name: str) -> str:
    """Draw an answer in the format's layout: reasoning or not, content or not, calls with texts of any kind."""
    fmt = FORMATS[name]
    text = ""
    if draw(st.booleans()):
        text += fmt.think[0] + draw(characters) + fmt.think[1] + fmt.reasoning_separator
    if draw(st.booleans()):
        text += draw(characters) + fmt.content_separator
    count = draw(st.integers(0, 3))
    if count:
        text += fmt.section_begin
    for index in range(count):
        text += fmt.call_separator if index else ""
        text += fmt.call_begin + draw(st.sampled_from(("write", "write", "write", "loose", "ping", "rm")))
        text += fmt.name_end.replace("{index}", str(index))
        keys = draw(st.lists(st.sampled_from(KEYS), max_size=4))
        if draw(st.booleans()):
            keys = ["text", *(key for key in dict.fromkeys(keys) if key != "text")]
        if fmt.style == "json":
            pairs = [(key, draw(st.one_of(characters.map(json.dumps), values))) for key in keys]
            text += "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in pairs) + "}"
        else:
            parts = []
            for key in keys:
                string = draw(st.sampled_from(("true", "false")))
                parts.append(fmt.arg_begin.replace("{key}", key).replace("{string}", string) + draw(values))
            text += fmt.arg_separator.join(part + fmt.arg_end for part in parts)
        text += fmt.call_end
    return text + (fmt.section_end if count else "") + draw(st.one_of(st.just(""), characters))


@st.composite
def damaged(draw: st.DrawFn, name: str) -> str:
    """Draw an answer with pieces removed, doubled, inserted, or its end cut off."""
    text = draw(answers(name))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 20)))
        what = draw(st.sampled_from(("remove", "double", "insert", "cut")))
        if what == "remove":
            text = text[:start] + text[end:]
        elif what == "double":
            text = text[:end] + text[start:]
        elif what == "insert":
            text = text[:start] + draw(st.one_of(soup, characters, octets)) + text[start:]
        else:
            text = text[:start]
    return text


@dataclass
class Outcome:
    content: str = ""
    reasoning: str = ""
    begun: list[CallBegin] = field(default_factory=list)
    arguments: dict[int, str] = field(default_factory=dict)
    ended: list[CallEnd | CallFailed] = field(default_factory=list)
    errors: list[CallError] = field(default_factory=list)


def outcome(parser: Parser, parts: Sequence[str], truncated: bool) -> Outcome:
    found = Outcome()
    events: list[Event] = []
    for part in parts:
        events += parser.feed(part)
    events += parser.finish(truncated=truncated)
    for event in events:
        if isinstance(event, Content):
            found.content += event.text
        elif isinstance(event, Reasoning):
            found.reasoning += event.text
        elif isinstance(event, CallBegin):
            found.begun.append(event)
        elif isinstance(event, Arguments):
            found.arguments[event.index] = found.arguments.get(event.index, "") + event.text
        else:
            found.ended.append(event)
    found.errors = list(parser.errors)
    assert parser.calls == [event for event in found.ended if isinstance(event, CallEnd)]
    return found


def cut(text: str, places: Sequence[int]) -> list[str]:
    marks = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in itertools.pairwise(marks)]


def check(name: str, text: str, policy: ToolPolicy | None, reasoning: Any, truncated: bool, places: list[int]) -> None:
    fmt = FORMATS[name]
    whole = outcome(Parser(fmt, policy, reasoning=reasoning), [text], truncated)
    for parts in (cut(text, places), list(text)):
        assert outcome(Parser(fmt, policy, reasoning=reasoning), parts, truncated) == whole
    # Each call ends once, in order; what is reported as valid is.
    assert [event.index for event in whole.ended] == list(range(len(whole.ended)))
    assert [event.error for event in whole.ended if isinstance(event, CallFailed)] == whole.errors
    for event in whole.ended:
        if isinstance(event, CallFailed):
            assert event.raw in text
            assert event.error.message
            event.error.message.encode()
            continue
        assert policy is not None
        tool = policy.tool(event.name)
        assert tool is not None
        value = json.loads(event.arguments)
        assert isinstance(value, dict)
        assert whole.arguments[event.index] == event.arguments
        assert CallBegin(event.index, event.name, event.call_id) in whole.begun
        assert not tool.strict or arguments_schema(tool).problem(value) is None
    if policy is None:
        assert whole.ended == []
    elif not policy.parallel:
        assert sum(isinstance(event, CallEnd) for event in whole.ended) <= 1


relaxed = settings(max_examples=35, suppress_health_check=list(HealthCheck))
setting = st.tuples(
    st.sampled_from(POLICIES), st.sampled_from(("open", "closed", "auto")), st.booleans(), st.lists(st.integers(0, 999))
)


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.one_of(characters, octets, soup), options=setting)
@example(text='<tool_call>\n{"name": "write", "arguments": {"text": "\\', options=(POLICIES[0], "closed", True, []))
@relaxed
def test_arbitrary_text(name: str, text: str, options: tuple[Any, Any, bool, list[int]]) -> None:
    check(name, text, *options)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data(), options=setting)
@relaxed
def test_answers_with_arbitrary_texts(
    name: str, data: st.DataObject, options: tuple[Any, Any, bool, list[int]]
) -> None:
    check(name, data.draw(answers(name)), *options)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data(), options=setting)
@relaxed
def test_damaged_answers(name: str, data: st.DataObject, options: tuple[Any, Any, bool, list[int]]) -> None:
    check(name, data.draw(damaged(name)), *options)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data(), places=st.lists(st.integers(0, 9999), max_size=40))
@relaxed
def test_bytes_cut_anywhere(name: str, data: st.DataObject, places: list[int]) -> None:
    """An engine's text is bytes, decoded with what is no UTF-8 replaced; the cuts fall inside characters too."""
    raw = bytearray(data.draw(damaged(name)).encode(errors="replace"))
    for place, octet in data.draw(st.lists(st.tuples(st.integers(0, 9999), st.integers(0, 255)), max_size=4)):
        if raw:
            raw[place % len(raw)] = octet
    check(name, bytes(raw).decode(errors="replace"), POLICIES[0], "closed", False, places)
    marks = sorted({0, len(raw), *(place % (len(raw) + 1) for place in places)})
    text = "".join(bytes(raw[start:end]).decode(errors="replace") for start, end in itertools.pairwise(marks))
    check(name, text, POLICIES[0], "closed", False, places)
