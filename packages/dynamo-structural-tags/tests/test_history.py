# SPDX-License-Identifier: Apache-2.0
"""Messages to prompt: a call in the history stands there as it was generated, or its place is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_structural_tags import RequestError, read_request
from dynamo_structural_tags._events import CallEnd
from dynamo_structural_tags._history import ChatTemplate, Spellings, read_arguments, read_messages
from dynamo_structural_tags.formats import FORMATS, get_format
from support.chat_templates import TEMPLATES

ASKED = {"role": "user", "content": "Go."}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "number": {"type": "number"},
                "flag": {"type": ["boolean", "null"]},
                "list": {"type": "array"},
                "object": {"type": "object"},
            },
        },
    },
}
POLICY = read_request({"tools": [TOOL]})
TOOLS = {tool.name: tool for tool in POLICY.tools} if POLICY else {}


def made(*arguments: str, ids: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    calls = [
        {
            "id": ids[number] if ids else f"call_{number}",
            "type": "function",
            "function": {"name": "f", "arguments": one},
        }
        for number, one in enumerate(arguments)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


def template(tmp_path: Path, name: str) -> ChatTemplate:
    settings = {} if TEMPLATES[name] is None else {"chat_template": TEMPLATES[name]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return ChatTemplate.of_model(tmp_path, get_format(name))(True)


#: Each is the only text of its value that comes back as it was written.
ARGUMENTS = [
    "{}",
    '{"text": "a\\n"}',
    '{"number": 1.0}',
    '{"number": 1e2}',
    '{"number": -0.50}',
    '{"flag": true}',
    '{"flag": false}',
    '{"flag": null}',
    '{"list":[1,2.50, "a"]}',
    '{"list": [true, null, {"a":1}]}',
    '{"object": {"b": 1, "a":"x"}}',
    '{"text": "ü 🦀 <b> & \\"q\\"", "number": 3, "list": []}',
    '{"number": 123456789012345678901234567890}',
]


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_a_call_is_rendered_as_it_was_generated(tmp_path: Path, name: str, arguments: str) -> None:
    fmt = get_format(name)
    chat = template(tmp_path, name)
    generated = f"Now.{fmt.content_separator}{fmt.render_calls([('f', arguments)] * 2, policy=POLICY)}"
    parser = fmt.parser(POLICY)
    events = [*parser.feed(generated), *parser.finish()]
    ends = [event for event in events if isinstance(event, CallEnd)]
    assert len(ends) == 2
    ids = tuple(end.call_id or f"call_{end.index}" for end in ends)
    message = made(*(end.arguments for end in ends), ids=ids, content="Now.")
    before = chat.render(read_messages([ASKED], fmt, TOOLS).messages, [TOOL], add_generation_prompt=True)
    history = read_messages([ASKED, message], fmt, TOOLS)
    after = chat.render(history.messages, [TOOL], add_generation_prompt=False)
    # The prompts of thinking models open a block that generation closes; without thinking they differ in nothing else.
    joined = before + generated
    if before.endswith("<think>"):
        joined = f"{before}</think>{generated}"
    assert after.startswith(joined)
    assert history.call_ids == set(ids)


@pytest.mark.parametrize("name", ["deepseek_v3_2", "deepseek_v4"])
def test_our_templates_have_deepseeks_layout(tmp_path: Path, name: str) -> None:
    fmt = get_format(name)
    chat = template(tmp_path, name)
    messages = [
        {"role": "system", "content": "Be brief."},
        ASKED,
        made('{"text": "a"}', reasoning_content="Because.", content="Now."),
        {"role": "tool", "tool_call_id": "call_0", "content": "done"},
    ]
    history = read_messages(messages, fmt, TOOLS).messages
    text = chat.render(history, [TOOL], add_generation_prompt=True, thinking=True)
    head, tail = text.split("<｜User｜>", 1)
    assert head.startswith("<｜begin▁of▁sentence｜>Be brief.\n\n## Tools")
    assert json.dumps(TOOL["function"]) in head
    call = f"Now.\n\n{fmt.render_calls([('f', json.dumps({'text': 'a'}))])}<｜end▁of▁sentence｜>"
    ends = {
        "deepseek_v3_2": "\n\n<function_results>\n<result>done</result>\n</function_results>\n\n<think>",
        "deepseek_v4": "<｜User｜><tool_result>done</tool_result><｜Assistant｜><think>",
    }
    assert tail == f"Go.<｜Assistant｜><think>Because.</think>{call}{ends[name]}"
    chatting = chat.render(history, [TOOL], add_generation_prompt=True, thinking=False)
    assert "<think>" not in chatting.split("<｜User｜>", 1)[1]
    assert chatting.endswith("</think>")


WHOLE = ChatTemplate("{{ messages[0].a | tojson }}")
NESTED = ChatTemplate("{{ {'x': [messages[0].a, 1]} | tojson }}")
SCALAR = ChatTemplate("{{ messages[0].a | string }}\n{{ messages[0].a | tojson }}")


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.text(max_size=8),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
            max_leaves=8,
        ),
        max_size=4,
    ),
    st.sampled_from([None, (",", ":"), (" , ", " : ")]),
    st.booleans(),
)
def test_arguments_print_as_they_were_sent(
    value: dict[str, Any], separators: tuple[str, str] | None, ascii_only: bool
) -> None:
    text = json.dumps(value, separators=separators, ensure_ascii=ascii_only)
    read = read_arguments(text, "a")
    assert str(read) == text
    assert dict(read) == value
    assert WHOLE.render([{"a": read}]) == text
    assert NESTED.render([{"a": read}]) == f'{{"x": [{text}, 1]}}'
    for one in read.values():
        if not isinstance(one, (str, list, dict)):  # scalars, which templates write by one filter or the other
            plain, dumped = SCALAR.render([{"a": one}]).split("\n")
            assert plain == dumped
            assert json.loads(plain) == one


REFUSED: dict[str, tuple[Any, str]] = {
    "none": (None, "messages: must be an array"),
    "empty": ([], "messages: must be an array with at least one message"),
    "text": (["a"], "messages[0]: must be an object, not 'a'"),
    "role": ([{"content": "a"}], "messages[0].role: must be a string, not None"),
    "content": ([{"role": "user", "content": 3}], "messages[0].content: must be a string or an array"),
    "part": (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}],
        "messages[0].content[1].type: must be text, not 'input_audio'",
    ),
    "cut": (
        [made('{"text": "a')],
        "messages[0].tool_calls[0].function.arguments: must be the JSON text of an object: ",
    ),
    "array": ([made("{}", "[1]")], "messages[0].tool_calls[1].function.arguments: must be the JSON text of an object"),
    "twice": ([made('{"a": 1, "a": 1}')], "messages[0].tool_calls[0].function.arguments: must be"),
    "twice inside": ([made('{"a": {"b": 1, "b": 1}}')], "messages[0].tool_calls[0].function.arguments: must be"),
    "not a number": ([made('{"a": NaN}')], "messages[0].tool_calls[0].function.arguments: must be"),
    "more": ([made("{} {}")], "messages[0].tool_calls[0].function.arguments: must be"),
    "deep": ([made('{"a": ' + "[" * 100000)], "messages[0].tool_calls[0].function.arguments: must be"),
    "no name": (
        [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"arguments": "{}"}}]}],
        "messages[0].tool_calls[0].function.name: is missing",
    ),
    "no id": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
        "messages[0].tool_calls[0].id: is missing",
    ),
    "no arguments": (
        [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}],
        "messages[0].tool_calls[0].function.arguments: is missing",
    ),
    "one id twice": ([made("{}", "{}", ids=("a", "a"))], "messages[0].tool_calls[1].id: 'a' stands twice"),
    "result without a call": (
        [{"role": "tool", "tool_call_id": "b", "content": "x"}],
        "messages[0].tool_call_id: no call 'b' precedes",
    ),
    "result without an id": ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id: is missing"),
    "closer": (
        [made('{"text": "a </arg_value> b"}')],
        "messages[0].tool_calls[0].function.arguments.text: has no text in the format glm47: ",
    ),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_a_malformed_history_is_refused_by_its_place(what: str) -> None:
    messages, place = REFUSED[what]
    with pytest.raises(RequestError) as caught:
        read_messages(messages, get_format("glm47"), TOOLS)
    assert str(caught.value).startswith(place)
    assert caught.value.path == place.split(": ")[0]


def test_an_empty_text_is_a_call_without_arguments() -> None:
    (message,) = read_messages([made("")], get_format("hermes"), TOOLS).messages
    assert str(message["tool_calls"][0]["function"]["arguments"]) == "{}"


def test_a_text_in_parts_is_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = read_messages([{"role": "user", "content": parts}], get_format("hermes"), {}).messages
    assert message["content"] == "a\nb"


def test_kimis_identifiers_are_restored_where_they_are_none() -> None:
    fmt = get_format("kimi_k2")
    messages = [
        made("{}", "{}", ids=("functions.f:0", "toolu_1")),
        {"role": "tool", "tool_call_id": "toolu_1", "content": "b"},
        {"role": "tool", "tool_call_id": "functions.f:0", "content": "a"},
        made("{}", ids=("toolu_2",)),
    ]
    history = read_messages(messages, fmt, TOOLS)
    assert [call["id"] for message in history.messages for call in message.get("tool_calls", ())] == [
        "functions.f:0",
        "functions.f:1",
        "functions.f:2",
    ]
    assert [one["tool_call_id"] for one in history.messages if one["role"] == "tool"] == [
        "functions.f:1",
        "functions.f:0",
    ]


def test_a_template_has_what_transformers_gives_it() -> None:
    text = (
        "{% for m in messages %}{% if m.role == 'x' %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ {'b': 'ü<', 'a': 1} | tojson(indent=1) }}"
    )
    rendered = ChatTemplate(text).render([{"role": "y", "content": "c"}, {"role": "x"}])
    assert rendered == 'c4{\n "b": "ü<",\n "a": 1\n}'
    with pytest.raises(RequestError, match=r"^messages: the model's chat template refuses them: no system"):
        ChatTemplate("{{ raise_exception('no system') }}").render([ASKED])
    with pytest.raises(RequestError, match=r"^messages: "):
        ChatTemplate("{{ messages[0].content.__class__.__mro__ }}").render([ASKED])


def test_a_developers_message_is_not_lost_in_a_template_that_knows_none() -> None:
    messages = [{"role": "developer", "content": "D"}, ASKED]
    knows_none = "{% for m in messages %}{% if m.role in ('system', 'user') %}{{ m.role }}:{{ m.content }};{% endif %}"
    assert ChatTemplate(knows_none + "{% endfor %}").render(messages) == "system:D;user:Go.;"
    knows = knows_none.replace("('system'", "('developer'")
    assert ChatTemplate(knows + "{% endfor %}").render(messages) == "developer:D;user:Go.;"
    assert messages[0]["role"] == "developer"


def test_where_a_template_is_found(tmp_path: Path) -> None:
    fmt = get_format("hermes")

    def found(tools: bool = True) -> str:
        return ChatTemplate.of_model(tmp_path, fmt)(tools).render([ASKED])

    with pytest.raises(ValueError, match="no chat template, and the format hermes has none of its own"):
        found()
    with pytest.raises(ValueError, match=r"no chat template$"):
        ChatTemplate.of_model(tmp_path, None)
    settings: dict[str, Any] = {"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}config"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert found() == "<s>config"
    settings["chat_template"] = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert (found(True), found(False)) == ("t", "d")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert found() == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert found() == "jinja"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match="the chat template is malformed"):
        found()


def test_a_value_is_spelled_as_it_was_generated() -> None:
    """What `/v1/messages` makes of arguments: no spaces, `1e2` as `100.0`, a long integer as a float."""
    spellings = Spellings(1200)
    text = '{"list": [1e2, 12345678901234567890123, "ü"], "text": "a"}'
    spellings.add("f", text)
    sent = '{"list":[100.0,1.2345678901234568e+22,"ü"],"text":"a"}'
    (message,) = read_messages([made(sent)], get_format("hermes"), TOOLS, spellings).messages
    assert str(message["tool_calls"][0]["function"]["arguments"]) == text
    for name, other in (("g", sent), ("f", '{"list":[100,1.2345678901234568e+22,"ü"],"text":"a"}'), ("f", "{")):
        assert spellings.get(name, other) == other
    # Both spellings were generated: a client that keeps texts has its own back, whatever came later.
    compact = text.replace(", ", ",").replace(": ", ":")
    spellings.add("f", compact)
    assert [spellings.get("f", one) for one in (text, compact, sent)] == [text, compact, compact]
    spellings.add("f", text)
    assert [spellings.get("f", one) for one in (text, compact, sent)] == [text, compact, text]
    for number in range(3):  # over the bound: the oldest goes
        spellings.add("f", f'{{"number": {number}}}')
    assert spellings.get("f", sent) == sent
    assert spellings.get("f", '{"number":2}') == '{"number": 2}'


def test_what_is_remembered_of_calls_is_bounded_however_small_they_are() -> None:
    spellings = Spellings(1 << 20)
    for number in range(20_000):
        spellings.add("f", f'{{"number": {number}}}')
    assert len(spellings._texts) < (1 << 20) / 400
    spellings.add("f", '{"text": "' + "日" * 400_000 + '"}')  # larger than all there is
    assert spellings._used == 0
    assert spellings.get("f", '{"number":19999}') == '{"number":19999}'
    spellings = Spellings()
    spellings.add("f", "not JSON")
    assert spellings.get("f", "not JSON") == "not JSON"
