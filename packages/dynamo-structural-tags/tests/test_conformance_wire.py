# SPDX-License-Identifier: Apache-2.0
"""tool-conformance on the wire: requests in the three APIs' forms, answers and streams out of them, HTTP.

The streams have the shapes that OpenAI, Anthropic, vLLM 0.31 and Dynamo 1.6.1 send.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_structural_tags.conformance._answer import Answer, Call, Problem, Usage
from dynamo_structural_tags.conformance._apis import RAW_LIMIT, StreamReader, read_plain
from dynamo_structural_tags.conformance._endpoint import Endpoint
from dynamo_structural_tags.conformance._requests import body, follow_up, history

Json = dict[str, Any]
Event = tuple[str, Any]

APIS = ("chat", "responses", "messages")
EACH = pytest.mark.parametrize("api", APIS)
PARAMETERS: Json = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOL: Json = {"type": "function", "function": {"name": "write", "description": "Writes.", "parameters": PARAMETERS}}
ASKED: Json = {"role": "user", "content": "Write."}


# Requests


def test_a_request_of_chat_completions_is_sent_as_it_is_and_streams_are_asked_for_their_usage() -> None:
    request = {"messages": [ASKED], "tools": [TOOL], "tool_choice": "required", "seed": 3, "max_tokens": 9}
    assert body("chat", request, "m", False) == {"model": "m", **request}
    assert body("chat", request, "m", True) == {
        "model": "m",
        **request,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    own = {**request, "stream_options": {"include_usage": False}}
    assert body("chat", own, "m", True)["stream_options"] == {"include_usage": False}


def test_a_tool_has_the_form_of_each_api() -> None:
    tools = [TOOL, {"type": "function", "function": {"name": "now", "strict": True}}]
    request = {"messages": [ASKED], "tools": tools}
    assert body("responses", request, "m", False)["tools"] == [
        {"type": "function", "name": "write", "description": "Writes.", "parameters": PARAMETERS},
        {"type": "function", "name": "now", "strict": True},
    ]
    assert body("messages", request, "m", False)["tools"] == [
        {"name": "write", "description": "Writes.", "input_schema": PARAMETERS},
        {"name": "now", "strict": True, "input_schema": {"type": "object", "properties": {}}},
    ]


NAMED = {"type": "function", "function": {"name": "write"}}


@pytest.mark.parametrize(
    ("fields", "responses", "messages"),
    [
        ({"tool_choice": "auto"}, "auto", {"type": "auto"}),
        ({"tool_choice": "required"}, "required", {"type": "any"}),
        ({"tool_choice": "none"}, "none", {"type": "none"}),
        ({"tool_choice": NAMED}, {"type": "function", "name": "write"}, {"type": "tool", "name": "write"}),
        ({"tool_choice": "sometimes"}, "sometimes", "sometimes"),
        ({"tool_choice": 7}, 7, 7),
        ({"tool_choice": {"type": "function"}}, {"type": "function"}, {"type": "function"}),
        ({"parallel_tool_calls": False}, None, {"type": "auto", "disable_parallel_tool_use": True}),
        (
            {"parallel_tool_calls": False, "tool_choice": NAMED},
            {"type": "function", "name": "write"},
            {"type": "tool", "name": "write", "disable_parallel_tool_use": True},
        ),
        ({"parallel_tool_calls": False, "tool_choice": "none"}, "none", {"type": "none"}),
        ({"parallel_tool_calls": True}, None, None),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}},
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "write"}]},
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
        ),
    ],
    ids=str,
)
def test_tool_choice_and_parallel_calls(fields: Json, responses: Any, messages: Any) -> None:
    request = {"messages": [ASKED], "tools": [TOOL], **fields}
    sent = body("responses", request, "m", False)
    assert (sent.get("tool_choice"), sent.get("parallel_tool_calls")) == (responses, fields.get("parallel_tool_calls"))
    sent = body("messages", request, "m", False)
    assert sent.get("tool_choice") == messages
    assert "parallel_tool_calls" not in sent


HISTORY: list[Json] = [
    {"role": "system", "content": "Be brief."},
    {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
    {"role": "user", "content": [{"type": "text", "text": "Write."}]},
    {
        "role": "assistant",
        "content": "Now.",
        "reasoning_content": "Hm.",
        "refusal": None,
        "annotations": [],
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "write", "arguments": '{"text": "a"}'}},
            {"id": "c2", "type": "function", "function": {"name": "write", "arguments": '{"text":"b"}'}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "one"},
    {"role": "tool", "tool_call_id": "c2", "content": "two"},
    {"role": "user", "content": "Go on."},
    {"role": "assistant", "content": "Done."},
]


def test_a_history_has_the_form_of_responses() -> None:
    assert body("responses", {"messages": HISTORY}, "m", False)["input"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Write."}]},
        {"type": "reasoning", "id": "rs_3", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "Now."},
        {"type": "function_call", "call_id": "c1", "name": "write", "arguments": '{"text": "a"}'},
        {"type": "function_call", "call_id": "c2", "name": "write", "arguments": '{"text":"b"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": "two"},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "Done."},
    ]


def test_parts_of_a_result_are_parts_of_an_input_in_responses() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    sent = body("responses", {"messages": [{"role": "tool", "tool_call_id": "c1", "content": parts}]}, "m", False)
    output = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    assert sent["input"] == [{"type": "function_call_output", "call_id": "c1", "output": output}]


def test_a_history_has_the_form_of_messages() -> None:
    sent = body("messages", {"messages": HISTORY}, "m", False)
    assert sent["system"] == "Be brief.\n\nBe kind."
    assert sent["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "Write."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Now."},
                {"type": "tool_use", "id": "c1", "name": "write", "input": {"text": "a"}},
                {"type": "tool_use", "id": "c2", "name": "write", "input": {"text": "b"}},
            ],
        },
        {
            "role": "user",  # results and what the user says are one turn
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "one"},
                {"type": "tool_result", "tool_use_id": "c2", "content": "two"},
                {"type": "text", "text": "Go on."},
            ],
        },
        {"role": "assistant", "content": "Done."},
    ]


def test_limits_formats_and_efforts_have_the_names_of_their_api() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS, "strict": True}}
    request = {
        "messages": [ASKED],
        "max_completion_tokens": 9,
        "response_format": wanted,
        "reasoning_effort": "low",
        "stop": "END",
        "seed": 3,
        "temperature": 0,
    }
    responses = body("responses", request, "m", True)
    assert responses["max_output_tokens"] == 9
    assert responses["text"] == {
        "format": {"type": "json_schema", "name": "x", "schema": PARAMETERS, "strict": True},
    }
    assert responses["reasoning"] == {"effort": "low"}
    messages = body("messages", request, "m", True)
    assert messages["max_tokens"] == 9
    assert messages["output_config"] == {"format": {"type": "json_schema", "schema": PARAMETERS}, "effort": "low"}
    assert messages["stop_sequences"] == ["END"]
    for sent in (responses, messages):
        assert sent["stream"] is True
        assert sent["temperature"] == 0
        assert not {"seed", "stream_options", "max_completion_tokens", "response_format"} & set(sent)
    assert body("messages", {"messages": [ASKED]}, "m", False)["max_tokens"] > 0  # the API demands one


@EACH
def test_overrides_are_laid_over_and_null_removes(api: str) -> None:
    sent = body(
        api, {"messages": [ASKED]}, "m", True, {"model": None, "stream": "yes", "tools": ["x"], "max_tokens": None}
    )
    assert "model" not in sent
    assert "max_tokens" not in sent
    assert (sent["stream"], sent["tools"]) == ("yes", ["x"])


ODD: list[Any] = [None, 7, "x", True, [], {}, [7], ["x"], {"x": 1}, [[]], [{}], 1.5]


@EACH
@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_malformed_parts_pass_through(api: str, odd: Any) -> None:
    """A server has to see the fault that a case is about, in whichever API."""
    where = {"chat": "messages", "responses": "input", "messages": "messages"}[api]
    assert body(api, {"messages": odd}, "m", False)[where] == odd
    assert body(api, {"tools": odd}, "m", False)["tools"] == odd
    assert body(api, {"messages": [odd, ASKED]}, "m", False)[where][0] == odd
    tool = {"type": "function", "function": {"name": odd, "parameters": odd}}
    (sent,) = body(api, {"tools": [tool]}, "m", False)["tools"]
    sent = sent["function"] if api == "chat" else sent
    assert sent["name"] == odd
    assert sent["input_schema" if api == "messages" else "parameters"] == odd
    if not isinstance(odd, dict):
        assert body(api, {"tools": [{"type": "function", "function": odd}]}, "m", False)["tools"][0]["function"] == odd


@EACH
@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_no_request_is_too_odd_to_be_sent(api: str, odd: Any) -> None:
    whole = {
        "messages": HISTORY,
        "tools": [TOOL],
        "tool_choice": NAMED,
        "response_format": {"type": "json_schema", "json_schema": {"schema": PARAMETERS}},
        "parallel_tool_calls": False,
        "max_tokens": 9,
        "stop": ["x"],
        "reasoning_effort": "low",
    }

    def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [path, *(place for key, one in items for place in places(one, (*path, key)))]

    for place in places(whole)[1:]:
        request = copy.deepcopy(whole)
        at: Any = request
        for key in place[:-1]:
            at = at[key]
        at[place[-1]] = odd
        before = copy.deepcopy(request)
        json.dumps(body(api, request, "m", True))
        assert request == before


def test_the_next_turn_holds_the_answer_and_the_results() -> None:
    answer = Answer(200, [Call("c1", "write", '{"text": "a"}'), Call("c2", "write", "{}")], "Now.", "Hm.", "tool_calls")
    first = {"messages": [ASKED], "tools": [TOOL], "tool_choice": "required"}
    request = follow_up(first, answer, ["one", "two"], "Go on.", {"tool_choice": None, "max_tokens": 5})
    assert request == {
        "messages": [
            ASKED,
            {
                "role": "assistant",
                "content": "Now.",
                "reasoning_content": "Hm.",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "write", "arguments": '{"text": "a"}'}},
                    {"id": "c2", "type": "function", "function": {"name": "write", "arguments": "{}"}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "one"},
            {"role": "tool", "tool_call_id": "c2", "content": "two"},
            {"role": "user", "content": "Go on."},
        ],
        "tools": [TOOL],
        "max_tokens": 5,
    }
    assert first["messages"] == [ASKED]


def test_reasoning_goes_back_under_the_name_that_it_came_by() -> None:
    """Dynamo refuses a message that has both names, vLLM reads only its own."""
    for name in ("reasoning", "reasoning_content"):
        raw = json.dumps({"choices": [{"message": {"role": "assistant", "content": "A.", name: "Hm."}}]})
        answer = read_plain("chat", 200, raw)
        assert history(answer) == {"role": "assistant", "content": "A.", name: "Hm."}


# Answers

ARGUMENTS = '{"text": "a &lt; b\\n", "n": 日本🦀}'
CHUNK: Json = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def chunk(delta: Json | None = None, finish: str | None = None, **more: Any) -> Event:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]
    return "", {**CHUNK, "choices": choices, **more}


def fragment(arguments: str, index: int = 0, identifier: str | None = None, name: str | None = None) -> Event:
    call: Json = {"index": index, "function": {"arguments": arguments}}
    if identifier is not None:
        call |= {"id": identifier, "type": "function"}
        call["function"]["name"] = name
    return chunk({"tool_calls": [call]})


#: vLLM's; Dynamo's has the role beside the first words, and calls in one piece.
CHAT: list[Event] = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning": "H"}),
    chunk({"reasoning": "m."}),
    chunk({"content": "No"}),
    chunk({"content": "w 日本."}),
    fragment("", 0, "c1", "write"),
    fragment('{"text": '),
    fragment('"🦀 &lt;"}'),
    fragment("{}", 1, "c2", "now"),
    chunk({}, "tool_calls"),
    chunk(usage={"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}),
    ("", "[DONE]"),
]


def response(status: str, output: list[Json] | None = None, **more: Any) -> Json:
    return {"id": "resp_1", "object": "response", "model": "m", "status": status, "output": output or [], **more}


REASONING_ITEM: Json = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}
MESSAGE_ITEM: Json = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Now 日本.", "annotations": []}],
}
CALL_ITEM: Json = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "c1",
    "name": "write",
    "arguments": '{"text": "🦀 &lt;"}',
    "status": "completed",
}
CALL_ITEM_2: Json = {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "now", "arguments": "{}"}
OUTPUT = [REASONING_ITEM, MESSAGE_ITEM, CALL_ITEM, CALL_ITEM_2]
USAGE = {"input_tokens": 7, "output_tokens": 5, "total_tokens": 12}


def _responses() -> list[Event]:
    def at(index: int, item: Json, **more: Any) -> Json:
        return {"output_index": index, "item_id": item["id"], **more}

    told: list[tuple[str, Json]] = [
        ("response.created", {"response": response("in_progress")}),
        ("response.in_progress", {"response": response("in_progress")}),
        ("response.output_item.added", {"output_index": 0, "item": {**REASONING_ITEM, "content": []}}),
        ("response.reasoning_part.added", at(0, REASONING_ITEM, content_index=0)),  # vLLM's own
        ("response.reasoning_text.delta", at(0, REASONING_ITEM, content_index=0, delta="Hm")),
        ("response.reasoning_text.delta", at(0, REASONING_ITEM, content_index=0, delta=".")),
        ("response.reasoning_text.done", at(0, REASONING_ITEM, content_index=0, text="Hm.")),
        ("response.output_item.done", {"output_index": 0, "item": REASONING_ITEM}),
        ("response.output_item.added", {"output_index": 1, "item": {**MESSAGE_ITEM, "content": []}}),
        ("response.content_part.added", at(1, MESSAGE_ITEM, content_index=0, part={"type": "output_text", "text": ""})),
        ("response.output_text.delta", at(1, MESSAGE_ITEM, content_index=0, delta="Now ")),
        ("response.output_text.delta", at(1, MESSAGE_ITEM, content_index=0, delta="日本.")),
        ("response.output_item.added", {"output_index": 2, "item": {**CALL_ITEM, "arguments": ""}}),
        ("response.function_call_arguments.delta", at(2, CALL_ITEM, delta='{"text": ')),
        ("response.function_call_arguments.delta", at(2, CALL_ITEM, delta='"🦀 &lt;"}')),
        ("response.function_call_arguments.done", at(2, CALL_ITEM, arguments=CALL_ITEM["arguments"])),
        ("response.output_item.done", {"output_index": 2, "item": CALL_ITEM}),
        ("response.output_item.added", {"output_index": 3, "item": {**CALL_ITEM_2, "arguments": ""}}),
        ("response.function_call_arguments.delta", at(3, CALL_ITEM_2, delta="{}")),
        ("response.output_item.done", {"output_index": 3, "item": CALL_ITEM_2}),
        # Dynamo ends the message behind the calls.
        ("response.output_text.done", at(1, MESSAGE_ITEM, content_index=0, text="Now 日本.")),
        ("response.content_part.done", at(1, MESSAGE_ITEM, content_index=0, part=MESSAGE_ITEM["content"][0])),
        ("response.output_item.done", {"output_index": 1, "item": MESSAGE_ITEM}),
        ("response.completed", {"response": response("completed", OUTPUT, usage=USAGE)}),
    ]
    return [(name, {"type": name, "sequence_number": i, **value}) for i, (name, value) in enumerate(told)]


RESPONSES = _responses()


def event(kind: str, **more: Any) -> Event:
    return kind, {"type": kind, **more}


def delta(index: int, kind: str, **more: str) -> Event:
    return event("content_block_delta", index=index, delta={"type": kind, **more})


def begin(index: int, **block: Any) -> Event:
    return event("content_block_start", index=index, content_block=block)


def end(index: int) -> Event:
    return event("content_block_stop", index=index)


STARTED: Json = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "content": [],
    "model": "m",
    "stop_reason": None,
}
MESSAGES: list[Event] = [
    event(
        "message_start",
        message={**STARTED, "usage": {"input_tokens": 4, "cache_read_input_tokens": 3, "output_tokens": 0}},
    ),
    begin(0, type="thinking", thinking="", signature=""),
    event("ping"),
    delta(0, "thinking_delta", thinking="Hm"),
    delta(0, "thinking_delta", thinking="."),
    delta(0, "signature_delta", signature="abc"),
    end(0),
    begin(1, type="text", text=""),
    delta(1, "text_delta", text="Now "),
    delta(1, "text_delta", text="日本."),
    end(1),
    begin(2, type="tool_use", id="c1", name="write", input={}),
    delta(2, "input_json_delta", partial_json=""),
    delta(2, "input_json_delta", partial_json='{"text": '),
    delta(2, "input_json_delta", partial_json='"🦀 &lt;"}'),
    end(2),
    begin(3, type="tool_use", id="c2", name="now", input={}),
    end(3),
    event("message_delta", delta={"stop_reason": "tool_use", "stop_sequence": None}, usage={"output_tokens": 5}),
    event("message_stop"),
]

STREAMS = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
PLAIN: dict[str, Json] = {
    "chat": {
        **CHUNK,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Now 日本.",
                    "reasoning_content": "Hm.",
                    "refusal": None,
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "write", "arguments": '{"text": "🦀 &lt;"}'},
                        },
                        {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
                    ],
                },
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12},
    },
    "responses": response("completed", OUTPUT, usage=USAGE, error=None),
    "messages": {
        **STARTED,
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "text", "text": "Now 日本."},
            {"type": "tool_use", "id": "c1", "name": "write", "input": {"text": "🦀 &lt;"}},
            {"type": "tool_use", "id": "c2", "name": "now", "input": {}},
        ],
        "stop_reason": "tool_use",
        "usage": {"input_tokens": 4, "cache_read_input_tokens": 3, "output_tokens": 5},
    },
}


def wire(events: list[Event], newline: str = "\n") -> bytes:
    lines = []
    for name, data in events:
        lines += [f"event: {name}"] * bool(name)
        lines += [f"data: {data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)}", ""]
    return "".join(line + newline for line in lines).encode()


def read(api: str, data: bytes, cut: int = 1 << 30, **closing: Any) -> Answer:
    reader = StreamReader(api)
    for at in range(0, len(data), cut):
        reader.feed(data[at : at + cut])
    return reader.close(**closing)


def kinds(answer: Answer) -> set[str]:
    return {problem.kind for problem in answer.problems}


def check_whole(answer: Answer, api: str) -> None:
    assert answer.problems == []
    assert (answer.status, answer.error, answer.broken) == (200, None, None)
    assert (answer.text, answer.reasoning, answer.finish) == ("Now 日本.", "Hm.", "tool_calls")
    assert answer.calls == [Call("c1", "write", '{"text": "🦀 &lt;"}'), Call("c2", "now", "{}")]
    assert answer.usage == Usage(7, 5, None if api == "messages" else 12)


@EACH
def test_a_plain_answer_is_read(api: str) -> None:
    text = json.dumps(PLAIN[api], ensure_ascii=False)
    answer = read_plain(api, 200, text, "application/json; charset=utf-8")
    check_whole(answer, api)
    assert answer.raw == text
    assert read_plain(api, 200, text.encode()) == answer


@EACH
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"], ids=["lf", "crlf", "cr"])
@pytest.mark.parametrize("cut", [1, 2, 3, 7, 1000, 1 << 30])
def test_a_stream_is_read_however_it_is_cut(api: str, newline: str, cut: int) -> None:
    answer = read(api, wire(STREAMS[api], newline), cut, content_type="text/event-stream; charset=utf-8")
    check_whole(answer, api)
    assert answer.events == len(STREAMS[api])


def test_a_summary_is_the_reasoning_of_a_response_that_has_no_other() -> None:
    summary = {"type": "summary_text", "text": "Hm,\n\nyes."}
    item: Json = {"type": "reasoning", "id": "rs_1", "summary": [summary]}
    place = {"item_id": "rs_1", "output_index": 0, "summary_index": 0}
    told: list[tuple[str, Json]] = [
        ("response.created", {"response": response("in_progress")}),
        ("response.output_item.added", {"output_index": 0, "item": {**item, "summary": []}}),
        ("response.reasoning_summary_part.added", {**place, "part": {**summary, "text": ""}}),
        ("response.reasoning_summary_text.delta", {**place, "delta": "Hm,\n"}),
        ("response.reasoning_summary_text.delta", {**place, "delta": "\nyes."}),
        ("response.reasoning_summary_text.done", {**place, "text": summary["text"]}),
        ("response.reasoning_summary_part.done", {**place, "part": summary}),
        ("response.output_item.done", {"output_index": 0, "item": item}),
        ("response.completed", {"response": response("completed", [item], usage=USAGE)}),
    ]
    events: list[Event] = [(name, {"type": name, "sequence_number": i, **one}) for i, (name, one) in enumerate(told)]
    plain = json.dumps(response("completed", [item], usage=USAGE))
    for answer in (read("responses", wire(events)), read_plain("responses", 200, plain)):
        assert (answer.reasoning, answer.text, answer.problems) == ("Hm,\n\nyes.", "", [])
    # What was told of it before a stream broke off.
    assert read("responses", wire(events[:5])).reasoning == "Hm,\n\nyes."
    # What the response at the end says of it counts, as in OpenAI's SDK.
    last = {**item, "summary": [{**summary, "text": "Hm, yes."}]}
    end = ("response.completed", {**events[-1][1], "response": response("completed", [last], usage=USAGE)})
    assert read("responses", wire([*events[:-1], end])).reasoning == "Hm, yes."
    empty = ("response.output_item.done", {**events[7][1], "item": {**item, "summary": []}})
    assert read("responses", wire([*events[:2], empty, end])).reasoning == "Hm, yes."


@EACH
def test_comments_other_fields_and_several_data_lines_are_part_of_the_protocol(api: str) -> None:
    lines = ["\ufeff: comment", ":", "retry: 3", "id: 7", ""]
    for name, data in STREAMS[api]:
        text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, indent=1)
        lines += [": keep-alive", "", f"event:{name}"] if name else [": keep-alive"]
        lines += [f"data:{line}" for line in text.splitlines()] + ["", ""]
    for cut in (1, 1 << 30):
        check_whole(read(api, "\n".join(lines).encode(), cut), api)


@EACH
def test_what_dynamo_sends_behind_the_end_is_no_problem(api: str) -> None:
    check_whole(read(api, wire([*STREAMS[api], *([("", "[DONE]")] if api != "chat" else [])])), api)


FILTERED: Event = ("", {"choices": [], "created": 0, "id": "", "model": "", "object": "", "prompt_filter_results": []})
WHOLE_CALLS = chunk(
    {
        "tool_calls": [
            {
                "index": 0,
                "id": "c1",
                "type": "function",
                "function": {"name": "write", "arguments": '{"text": "🦀 &lt;"}'},
            },
            {"index": 1, "id": "c2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ]
    }
)
SEARCH = [
    begin(4, type="server_tool_use", id="s1", name="web_search", input={}),
    delta(4, "input_json_delta", partial_json='{"q": 1}'),
    end(4),
    begin(5, type="text", text=""),
    event("content_block_delta", index=5, delta={"type": "citations_delta", "citation": {}}),
    end(5),
]
FINE: dict[str, tuple[str, list[Event]]] = {
    "Dynamo: the role beside the first words, calls in one piece": (
        "chat",
        [
            chunk({"role": "assistant", "reasoning_content": "Hm."}),
            chunk({"content": "Now 日本."}),
            WHOLE_CALLS,
            *CHAT[9:],
        ],
    ),
    "OpenAI: null for what is not there": (
        "chat",
        [
            chunk({"role": "assistant", "content": None, "refusal": None, "tool_calls": None}, usage=None),
            *CHAT[1:6],
            chunk(
                {
                    "tool_calls": [
                        {"index": 0, "id": None, "function": {"name": None, "arguments": CALL_ITEM["arguments"]}}
                    ]
                }
            ),
            *CHAT[8:],
        ],
    ),
    "Azure: a first chunk of the content filter": ("chat", [FILTERED, *CHAT]),
    "Anthropic: its own tools": ("messages", [*MESSAGES[:18], *SEARCH, *MESSAGES[18:]]),
    "OpenAI: deltas and the end of other events": (
        "responses",
        [
            *RESPONSES[:9],
            event("response.queued", response=response("queued")),
            *RESPONSES[9:12],
            event("response.output_text.annotation.added", output_index=1, content_index=0, annotation={}),
            *RESPONSES[12:],
        ],
    ),
}


@pytest.mark.parametrize(("api", "events"), FINE.values(), ids=list(FINE))
def test_what_servers_may_send_is_no_problem(api: str, events: list[Event]) -> None:
    check_whole(read(api, wire(events), 5), api)


FINISHES = [
    ("responses", "incomplete", {"incomplete_details": {"reason": "max_output_tokens"}}, "length"),
    ("responses", "incomplete", {"incomplete_details": {"reason": "content_filter"}}, "content_filter"),
    ("responses", "completed", {}, "stop"),
    ("messages", "end_turn", {}, "stop"),
    ("messages", "stop_sequence", {}, "stop"),
    ("messages", "max_tokens", {}, "length"),
    ("messages", "refusal", {}, "content_filter"),
    ("messages", "pause_turn", {}, "pause_turn"),
    ("chat", "length", {}, "length"),
    ("chat", "stop", {}, "stop"),
]


@pytest.mark.parametrize(("api", "word", "more", "finish"), FINISHES)
def test_finish_reasons_have_the_words_of_chat_completions(api: str, word: str, more: Json, finish: str) -> None:
    if api == "chat":
        events = [chunk({"role": "assistant", "content": "A"}), chunk({}, word), ("", "[DONE]")]
        choice = {"index": 0, "message": {"role": "assistant", "content": "A"}, "finish_reason": word}
        plain: Json = {**CHUNK, "object": "chat.completion", "choices": [choice]}
    elif api == "messages":
        stop = event("message_delta", delta={"stop_reason": word}, usage={"output_tokens": 1})
        events = [*MESSAGES[:1], stop, event("message_stop")]
        plain = {**STARTED, "content": [], "stop_reason": word}
    else:
        plain = response(word, **more)
        events = [*RESPONSES[:1], event(f"response.{word}", sequence_number=1, response=plain)]
    for answer in (read_plain(api, 200, json.dumps(plain)), read(api, wire(events))):
        assert (answer.finish, answer.problems, answer.broken) == (finish, [], None)


ERRORS: dict[str, list[list[Event]]] = {
    "chat": [
        [("", {"error": {"message": "no tool 'rm'", "type": "Bad", "code": 400}})],
        [*CHAT[:3], ("", {"error": {"message": "no tool 'rm'", "type": "Bad", "code": 400}}), ("", "[DONE]")],
        [*CHAT[:-1], ("", {"error": {"message": "no tool 'rm'", "type": "Bad", "code": 400}}), ("", "[DONE]")],
    ],
    "responses": [
        [event("error", code=400, message="no tool 'rm'", type="error", param=None)],
        [*RESPONSES[:2], event("error", message="no tool 'rm'", code=400, sequence_number=9)],
        [
            *RESPONSES[:2],
            event(
                "response.failed",
                sequence_number=9,
                response=response("failed", error={"code": 400, "message": "no tool 'rm'"}),
            ),
            ("", "[DONE]"),
        ],
    ],
    "messages": [
        [event("error", error={"type": "invalid_request_error", "message": "no tool 'rm'", "code": 400})],
        [*MESSAGES[:4], event("error", error={"message": "no tool 'rm'", "code": 400})],
    ],
}


@pytest.mark.parametrize(("api", "events"), [(api, one) for api, several in ERRORS.items() for one in several])
def test_an_error_in_a_stream_is_an_error_and_no_problem(api: str, events: list[Event]) -> None:
    answer = read(api, wire(events), 3)
    assert answer.error is not None
    assert answer.error.startswith("no tool 'rm' {")
    assert "400" in answer.error
    assert (answer.problems, answer.broken) == ([], None)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"error": {"message": "Bad ü", "param": "tools[0]", "code": null}}', 'Bad ü {"param": "tools[0]"}'),
        ('{"type": "error", "error": {"type": "x", "message": "Bad"}}', 'Bad {"type": "x"}'),
        ('{"message": "Bad", "type": "T", "code": 400}', 'Bad {"type": "T", "code": 400}'),
        ('{"error": "Bad"}', "Bad"),
        ('{"detail": [{"loc": ["body"], "msg": "Bad"}]}', '{"detail": [{"loc": ["body"], "msg": "Bad"}]}'),
        ('["Bad"]', '["Bad"]'),
        ("null", "null"),
    ],
)
def test_the_text_of_an_error_is_found_in_every_servers_form(text: str, error: str) -> None:
    for api in APIS:
        answer = read_plain(api, 400, text, "application/json")
        assert (answer.status, answer.error, answer.problems, answer.broken) == (400, error, [], None)


def test_an_error_that_is_no_json_is_an_error_all_the_same() -> None:
    answer = read_plain("chat", 502, b"<html>Bad \xff Gateway</html>\n")
    assert (answer.error, kinds(answer), answer.broken) == ("<html>Bad \ufffd Gateway</html>", {"not_json"}, None)
    assert read_plain("chat", 500, "").error == "(an empty body)"


@EACH
@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "7", '"x"', "{}", "\xff", "[" * 100_000, '{"x": NaN}'], ids=repr
)
def test_a_body_without_an_answer_is_broken(api: str, text: str) -> None:
    data = text.encode("latin-1")
    answer = read_plain(api, 200, data)
    assert answer.broken is not None
    assert kinds(answer) <= {"not_json", "shape"}
    assert len(answer.problems) == 1
    assert read(api, data).broken is not None


@EACH
def test_an_error_under_status_200_and_an_answer_under_another_are_problems(api: str) -> None:
    for text in ('{"error": {"message": "Bad"}}', '{"message": "Bad"}'):
        answer = read_plain(api, 200, text)
        assert (kinds(answer), answer.error, answer.broken) == ({"status"}, "Bad", None)
    answer = read_plain(api, 400, json.dumps(PLAIN[api]))
    assert kinds(answer) == {"status"}
    assert answer.error is not None


@EACH
def test_a_stream_that_is_none_is_read_as_what_it_is(api: str) -> None:
    text = json.dumps(PLAIN[api], ensure_ascii=False)
    answer = read(api, text.encode(), 5, content_type="application/json")
    assert answer.calls == [Call("c1", "write", '{"text": "🦀 &lt;"}'), Call("c2", "now", "{}")]
    assert kinds(answer) == {"content_type"}
    assert kinds(read_plain(api, 200, text, "text/plain")) == {"content_type"}
    assert kinds(read(api, wire(STREAMS[api]), content_type="application/json")) == {"content_type"}


# Problems


def without(*places: int) -> Callable[[list[Event]], list[Event]]:
    return lambda events: [one for i, one in enumerate(events) if i - len(events) not in places and i not in places]


def put(place: int, *new: Event) -> Callable[[list[Event]], list[Event]]:
    def change(events: list[Event]) -> list[Event]:
        at = place if place >= 0 else len(events) + place
        return [*events[:at], *new, *events[at:]]

    return change


def altered(place: int, *path: Any, to: Any = None) -> Callable[[list[Event]], list[Event]]:
    """Set a field of an event."""

    def change(events: list[Event]) -> list[Event]:
        at: Any = events[place][1]
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = to
        return events

    return change


def moved(place: int, to: int) -> Callable[[list[Event]], list[Event]]:
    def change(events: list[Event]) -> list[Event]:
        one = events.pop(place)
        return [*events[:to], one, *events[to:]]

    return change


CALLS = ("choices", 0, "delta", "tool_calls", 0)
PROBLEMS: list[tuple[str, str, str, Callable[[list[Event]], list[Event]]]] = [
    ("chat", "not_json", "an event that is no JSON", put(3, ("", "{"))),
    ("chat", "shape", "an event that is no object", put(3, ("", "[]"))),
    ("chat", "shape", "no choices", altered(3, "choices")),
    ("chat", "shape", "a chunk without an id", altered(3, "id")),
    ("chat", "shape", "a chunk of another type", altered(3, "object", to="chat.completion")),
    ("chat", "shape", "no role at the beginning", altered(0, "choices", 0, "delta", "role")),
    ("chat", "shape", "content that is no string", altered(3, "choices", 0, "delta", "content", to=7)),
    ("chat", "shape", "arguments that are an object", altered(8, *CALLS, "function", "arguments", to={})),
    ("chat", "shape", "a call without a name", altered(5, *CALLS, "function", "name")),
    ("chat", "shape", "a call without a type", altered(5, *CALLS, "type")),
    ("chat", "shape", "no finish reason", altered(9, "choices", 0, "finish_reason")),
    ("chat", "shape", "usage without counts", altered(10, "usage", to={})),
    ("chat", "shape", "half of a surrogate pair", put(3, ("", json.dumps(chunk({"content": "\ud83e"})[1])))),
    ("chat", "no_id", "a call without an id", altered(5, *CALLS, "id")),
    ("chat", "id_changed", "another id", altered(6, *CALLS, "id", to="c9")),
    ("chat", "id_changed", "the id once more", altered(6, *CALLS, "id", to="c1")),
    ("chat", "name_changed", "another name", altered(6, *CALLS, "function", "name", to="read")),
    ("chat", "index", "a call that was not begun", without(5)),
    ("chat", "index", "a number left out", altered(8, *CALLS, "index", to=2)),
    ("chat", "index", "no number", altered(6, *CALLS, "index")),
    ("chat", "no_end", "no [DONE]", without(-1)),
    ("chat", "after_end", "content after the finish reason", moved(4, 10)),
    ("chat", "after_end", "arguments after the finish reason", moved(7, 9)),
    ("chat", "after_end", "a chunk after [DONE]", put(12, chunk({"content": "x"}))),
    ("chat", "after_end", "[DONE] twice", put(12, ("", "[DONE]"))),
    ("chat", "finish_repeated", "the finish reason twice", put(10, chunk({}, "tool_calls"))),
    ("messages", "not_json", "an event that is no JSON", put(9, ("content_block_delta", "{"))),
    ("messages", "shape", "an event without a name", lambda events: [*events[:8], ("", events[8][1]), *events[9:]]),
    ("messages", "shape", "a delta without its text", altered(8, "delta", "text")),
    ("messages", "shape", "a delta for another type of block", altered(8, "delta", "type", to="input_json_delta")),
    ("messages", "shape", "a call without a name", altered(11, "content_block", "name")),
    ("messages", "shape", "a message that is none", altered(0, "message", "role")),
    ("messages", "shape", "no stop reason", altered(18, "delta", "stop_reason")),
    ("messages", "no_id", "a call without an id", altered(11, "content_block", "id")),
    (
        "messages",
        "index",
        "a number left out",
        lambda events: [altered(i, "index", to=4)(events) for i in (16, 17)][-1],
    ),
    ("messages", "no_end", "no message_stop", without(-1)),
    ("messages", "order", "no message_start", without(0)),
    ("messages", "order", "two message_start", put(1, MESSAGES[0])),
    ("messages", "order", "a block that does not end", without(17)),
    ("messages", "order", "a block in a block", moved(10, 11)),
    ("messages", "order", "a delta after the end of its block", moved(14, 15)),
    ("messages", "after_end", "anything after message_stop", put(20, delta(1, "text_delta", text=""))),
    ("messages", "finish_repeated", "the stop reason twice", put(19, MESSAGES[18])),
    ("responses", "not_json", "an event that is no JSON", put(9, ("response.in_progress", "{"))),
    ("responses", "shape", "an event without a name", lambda events: [*events[:8], ("", events[8][1]), *events[9:]]),
    ("responses", "shape", "deltas that say something else", altered(13, "delta", to='{"text":')),
    ("responses", "shape", "no deltas", without(18)),
    ("responses", "shape", "arguments that are done otherwise", altered(15, "arguments", to="{}")),
    ("responses", "shape", "words that are done otherwise", altered(20, "text", to="Now")),
    (
        "responses",
        "shape",
        "a call that the response at the end lacks",
        altered(23, "response", "output", to=OUTPUT[:3]),
    ),
    ("responses", "shape", "a response of another status", altered(23, "response", "status", to="in_progress")),
    ("responses", "no_id", "a call without an id", lambda e: [altered(i, "item", "call_id")(e) for i in (12, 16)][-1]),
    ("responses", "id_changed", "an item with another call id", altered(16, "item", "call_id", to="c9")),
    ("responses", "id_changed", "a response with another id", altered(23, "response", "id", to="resp_2")),
    ("responses", "name_changed", "an item with another name", altered(16, "item", "name", to="read")),
    ("responses", "index", "an item that was not begun", without(12)),
    ("responses", "index", "a delta with the id of another item", altered(13, "item_id", to="fc_2")),
    ("responses", "no_end", "no response.completed", without(-1)),
    ("responses", "order", "no response.created", without(0)),
    ("responses", "order", "a delta after the end of its item", moved(14, 16)),
    ("responses", "order", "a part that was not begun", without(9)),
    ("responses", "order", "numbers that go back", altered(9, "sequence_number", to=3)),
    ("responses", "after_end", "an event after the end", put(24, RESPONSES[10])),
]


@pytest.mark.parametrize(("api", "kind", "what", "change"), PROBLEMS, ids=[" ".join(one[:3]) for one in PROBLEMS])
def test_a_stream_that_breaks_the_protocol_has_that_problem_and_no_other(
    api: str, kind: str, what: str, change: Callable[[list[Event]], list[Event]]
) -> None:
    data = wire(change(copy.deepcopy(STREAMS[api])))
    answer = read(api, data)
    assert kinds(answer) >= {kind}, what
    # Events that are put elsewhere carry their number along.
    rest = kinds(answer) - {kind}
    assert rest <= ({"order"} if api == "responses" else set()) | (
        {"shape"} if kind in ("index", "order", "no_end") else set()
    )
    assert (answer.error, answer.broken) == (None, None)
    assert read(api, data, 1) == answer


@EACH
def test_a_call_without_an_id_or_a_name_in_a_plain_answer(api: str) -> None:
    def call(answer: Json) -> Any:
        if api == "chat":
            return answer["choices"][0]["message"]["tool_calls"][0]
        return answer["output" if api == "responses" else "content"][2]

    identifier = "call_id" if api == "responses" else "id"
    for key, kind in ((identifier, "no_id"), ("name", "shape"), ("arguments", "shape"), ("type", "shape")):
        plain = copy.deepcopy(PLAIN[api])
        made = call(plain)
        at = made["function"] if api == "chat" and key in ("name", "arguments") else made
        key = "input" if api == "messages" and key == "arguments" else key
        at[key] = [] if key in ("arguments", "input") else None
        answer = read_plain(api, 200, json.dumps(plain))
        assert kinds(answer) == {kind}, key
        assert answer.broken is None


def test_what_a_responses_stream_ends_with_counts() -> None:
    """As in OpenAI's SDK, which hands out the response at the end."""
    events = altered(14, "delta", to='"🦀 <"}')(copy.deepcopy(RESPONSES))
    answer = read("responses", wire(events))
    assert answer.calls[0].arguments == '{"text": "🦀 &lt;"}'
    (problem,) = answer.problems
    assert "🦀 <" in problem.message
    without_end = read("responses", wire(events[:-1]))
    assert without_end.calls == answer.calls
    assert kinds(without_end) == {"shape", "no_end"}


def test_new_ids_in_the_response_at_the_end_are_seen() -> None:
    """vLLM 0.31 reads the answer a second time for its last event."""
    events = altered(23, "response", "output", 2, "call_id", to="c9")(copy.deepcopy(RESPONSES))
    answer = read("responses", wire(events))
    assert kinds(answer) == {"id_changed"}
    assert [call.id for call in answer.calls] == ["c1", "c2"]


@EACH
def test_a_stream_that_stops_in_the_middle_is_broken(api: str) -> None:
    half = STREAMS[api][: len(STREAMS[api]) * 2 // 3]
    answer = read(api, wire(half))
    assert answer.broken is not None
    assert "no_end" in kinds(answer)
    assert answer.text == "Now 日本."
    told = read(api, wire(half), broken="the connection broke: x")
    assert (told.broken, told.problems) == ("the connection broke: x", [])
    assert read(api, b"").broken is not None


@EACH
def test_no_stream_is_too_odd_to_be_read(api: str) -> None:
    """Each field of each event is replaced in turn by odd values: nothing in the reader gives way."""

    def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [path, *(place for key, one in items for place in places(one, (*path, key)))]

    values: list[Any] = [None, -1, [7], "x", True, {"x": 1}]
    told = [wire([one]) for one in STREAMS[api]]
    for number, (name, data) in enumerate(STREAMS[api]):
        for turn, place in enumerate(places(data)[1:] if isinstance(data, dict) else []):
            for odd in (values[turn % 3], values[3 + turn % 3]):
                ((_, changed),) = altered(0, *place, to=odd)([("", copy.deepcopy(data))])
                answer = read(api, b"".join([*told[:number], wire([(name, changed)]), *told[number + 1 :]]))
                assert not any("could not be read" in one.message for one in answer.problems), (number, place, odd)
    for place in places(PLAIN[api])[1:]:
        for odd in values:
            ((_, changed),) = altered(0, *place, to=odd)([("", copy.deepcopy(PLAIN[api]))])
            answer = read_plain(api, 200, json.dumps(changed))
            assert not (answer.broken or "").startswith("the body could not be read"), (place, odd)


def test_bytes_that_are_no_utf8_are_a_problem_and_not_the_end() -> None:
    data = wire(CHAT).replace("日".encode(), "日".encode()[:2])
    answer = read("chat", data)
    assert kinds(answer) == {"not_json"}
    assert answer.finish == "tool_calls"


def test_the_raw_text_is_cut_and_the_answer_is_not() -> None:
    long = "ü" * RAW_LIMIT
    events = [chunk({"role": "assistant", "content": long}), chunk({}, "stop"), ("", "[DONE]")]
    plain = copy.deepcopy(PLAIN["chat"])
    plain["choices"][0]["message"]["content"] = long
    for answer in (
        read("chat", wire(events), 4096),
        read_plain("chat", 200, json.dumps(plain, ensure_ascii=False)),
    ):
        assert answer.text == long
        assert answer.raw.endswith("ü…")
        assert RAW_LIMIT - 4 < len(answer.raw.encode()) < RAW_LIMIT + 4


# HTTP


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


Handler = Callable[[httpx.Request], Any]


def endpoint(handler: Handler, api: str = "chat", base_url: str = "http://host", **more: Any) -> Endpoint:
    return Endpoint(base_url, "m", api=api, transport=httpx.MockTransport(handler), **{"pauses": (0, 0), **more})


def answering(api: str, stream: bool = False, status: int = 200) -> Handler:
    def handle(_: httpx.Request) -> httpx.Response:
        if stream:
            return httpx.Response(status, content=wire(STREAMS[api]), headers={"content-type": "text/event-stream"})
        return httpx.Response(status, json=PLAIN[api])

    return handle


@EACH
@pytest.mark.parametrize(
    "base_url", ["http://host:8000", "http://host:8000/", "http://host:8000/v1", "http://host:8000/v1/"]
)
def test_a_base_url_is_taken_with_and_without_v1(api: str, base_url: str) -> None:
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> Any:
        seen.append(request)
        return answering(api)(request)

    async def go() -> None:
        async with endpoint(handle, api, base_url, api_key="secret-key") as one:
            check_whole(await one.ask({"model": "m", "text": "日本"}, False), api)

    run(go())
    (request,) = seen
    paths = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
    assert str(request.url) == f"http://host:8000{paths[api]}"
    assert request.headers["authorization"] == "Bearer secret-key"
    assert request.headers["content-type"] == "application/json"
    assert request.headers.get("x-api-key") == ("secret-key" if api == "messages" else None)
    assert ("anthropic-version" in request.headers) == (api == "messages")
    assert json.loads(request.content) == {"model": "m", "text": "日本"}


@EACH
def test_a_stream_is_asked_for_and_read(api: str) -> None:
    async def go() -> Answer:
        async with endpoint(answering(api, stream=True), api) as one:
            return await one.ask({}, True)

    answer = run(go())
    check_whole(answer, api)
    assert answer.seconds > 0


def test_a_string_is_sent_as_it_stands() -> None:
    seen = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request.content)
        return httpx.Response(400, json={"error": {"message": "no JSON"}})

    async def go() -> list[Answer]:
        async with endpoint(handle) as one:
            return [await one.ask('{"model": ü', stream) for stream in (False, True)]

    for answer in run(go()):
        assert (answer.status, answer.error, answer.problems) == (400, "no JSON", [])
    assert seen == ['{"model": ü'.encode()] * 2


def test_a_busy_server_is_asked_again_and_then_believed() -> None:
    statuses = [503, 429, 200]

    def handle(_: httpx.Request) -> httpx.Response:
        return httpx.Response(statuses.pop(0), json=PLAIN["chat"], headers={"retry-after": "0"})

    async def go(one: Endpoint) -> Answer:
        async with one:
            return await one.ask({}, False)

    assert run(go(endpoint(handle, pauses=(60, 60)))).status == 200  # Retry-After counts before the pauses
    statuses[:] = [502, 503, 504, 200]
    assert run(go(endpoint(handle))).status == 504
    statuses[:] = [500, 200]
    assert run(go(endpoint(handle))).status == 500
    assert statuses == [200]


def test_a_server_that_wants_to_be_left_alone_for_long_is() -> None:
    tried = []

    def handle(request: httpx.Request) -> httpx.Response:
        tried.append(request)
        return httpx.Response(429, json={"error": {"message": "quota"}}, headers={"retry-after": "3600"})

    async def go() -> Answer:
        async with endpoint(handle, pauses=(60, 60)) as one:
            return await one.ask({}, False)

    answer = run(go())
    assert (answer.status, answer.error, len(tried)) == (429, "quota", 1)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_leads_elsewhere_says_where(stream: bool) -> None:
    headers = {"location": "https://elsewhere/v1?key=sk-very-secret"}

    async def go() -> Answer:
        async with endpoint(lambda _: httpx.Response(308, headers=headers), api_key="sk-very-secret") as one:
            return await one.ask({}, stream)

    answer = run(go())
    assert (answer.status, answer.broken) == (308, "it leads elsewhere, to https://elsewhere/v1?key=***")


def test_a_server_that_does_not_answer_at_all() -> None:
    tried = []

    def handle(request: httpx.Request) -> httpx.Response:
        tried.append(request)
        raise httpx.ConnectError("All connection attempts failed")

    async def go() -> Answer:
        async with endpoint(handle) as one:
            return await one.ask({}, True)

    answer = run(go())
    assert (answer.status, len(tried)) == (0, 3)
    assert answer.broken == "no answer: ConnectError: All connection attempts failed"


class Slowly(httpx.AsyncByteStream):
    """Bytes that come in pieces, and then no more, or a connection that breaks."""

    def __init__(self, pieces: list[bytes], then: Exception | None = None) -> None:
        self.pieces, self.then, self.closed = pieces, then, False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece
        if self.then is not None:
            raise self.then
        await asyncio.sleep(60)

    async def aclose(self) -> None:
        self.closed = True


def slowly(body: Slowly) -> Handler:
    return lambda _: httpx.Response(200, stream=body, headers={"content-type": "text/event-stream"})


def ask(handler: Handler, stream: bool, cancel_after: int | None = None, **more: Any) -> Answer:
    async def go() -> Answer:
        async with endpoint(handler, **more) as one:
            return await one.ask({}, stream, cancel_after=cancel_after)

    answer: Answer = run(go())
    return answer


def test_a_connection_that_breaks_leaves_what_came() -> None:
    answer = ask(slowly(Slowly([wire(CHAT[:5])], httpx.ReadError("reset"))), True)
    assert answer.broken == "the connection broke: ReadError: reset"
    assert (answer.status, answer.text, answer.problems) == (200, "Now 日本.", [])
    answer = ask(slowly(Slowly([b'{"choices"'], httpx.ReadError("reset"))), False)
    assert (answer.status, answer.raw) == (200, '{"choices"')
    assert answer.broken is not None


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_hangs_ends_with_the_time(stream: bool) -> None:
    hanging = Slowly([wire(CHAT[:5])])
    answer = ask(slowly(hanging), stream, timeout_s=0.05)
    assert answer.broken == "more than 0.05 s passed"
    assert answer.text == ("Now 日本." if stream else "")
    assert hanging.closed


def test_a_stream_is_left_after_so_many_events() -> None:
    left = Slowly([wire([one]) for one in CHAT])
    answer = ask(slowly(left), True, cancel_after=4)
    assert (answer.events, answer.text, answer.broken) == (4, "No", "left by the caller after 4 events")
    assert left.closed
    whole = ask(answering("chat", stream=True), True, cancel_after=1000)
    check_whole(whole, "chat")


def test_a_real_connection_that_is_cut_is_broken() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        data = wire(CHAT[:5])
        writer.write(head + f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await writer.drain()
        writer.close()

    async def go() -> Answer:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server, Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m") as one:
            return await one.ask({}, True)

    answer: Answer = run(go())
    assert answer.text == "Now 日本."
    assert (answer.broken or "").startswith("the connection broke: RemoteProtocolError")


def test_the_key_is_not_shown() -> None:
    key = "sk-very-secret"

    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(401, json={"error": {"message": f"bad key {request.headers['authorization']}"}})

    answer = ask(handle, False, api_key=key)
    assert answer.error == "bad key Bearer ***"
    assert key not in repr(answer)
    assert key not in repr(endpoint(handle, api_key=key))
    for bad in ("sk-very-secret\n", "sk-very secret", "sk-very-secret-ü"):
        with pytest.raises(ValueError, match="API key") as raised:
            endpoint(handle, api_key=bad)
        assert "very" not in str(raised.value)


@pytest.mark.parametrize(
    ("base_url", "says"),
    [
        ("localhost:8000", "no URL"),
        ("", "no URL"),
        ("ftp://host", "no URL"),
        ("http://", "no URL"),
        ("http://host:x", "no URL"),
        ("http://me:hidden@host", "give an API key"),
        ("http://host?a=b", "a query"),
    ],
)
def test_a_base_url_that_cannot_be_used_is_refused(base_url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        Endpoint(base_url, "m")
    assert "hidden" not in str(raised.value)


def test_an_api_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="'completions': it is one of chat, responses, messages"):
        Endpoint("http://host", "m", api="completions")


def check(handler: Handler, **more: Any) -> str | None:
    async def go() -> str | None:
        async with endpoint(handler, **more) as one:
            return await one.check()

    said: str | None = run(go())
    return said


def test_what_cannot_be_asked_is_said_in_a_line() -> None:
    def dead(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    def models(*names: str, **more: Any) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            assert (request.method, request.url.path) == ("GET", "/v1/models")
            return httpx.Response(200, json={"object": "list", "data": [{"id": name} for name in names], **more})

        return handle

    assert check(dead) == "nobody answers at http://host/v1/models: ConnectError: refused"
    refused = check(lambda _: httpx.Response(401), api_key="sk-very-secret")
    assert refused == "the API key is refused at http://host/v1/models: status 401"
    assert (check(lambda _: httpx.Response(401)) or "").startswith("an API key is wanted at ")
    assert check(models("a", "b")) == "the model 'm' is not served at http://host (served: a, b)"
    assert (check(models(*map(str, range(12)))) or "").endswith("9, and 2 more)")
    elsewhere = check(lambda _: httpx.Response(307, headers={"location": "https://host/v1/models"}))
    assert elsewhere == "http://host/v1/models leads elsewhere, to https://host/v1/models: give that URL"
    key = "sk-very-secret"
    assert key not in (check(lambda _: httpx.Response(307, headers={"location": f"/{key}"}), api_key=key) or key)
    for fine in (
        models("a", "m"),
        models(),
        models("a", has_more=True),  # Anthropic's list comes in pages
        lambda _: httpx.Response(404),
        lambda _: httpx.Response(405, json={"detail": "Method Not Allowed"}),
        lambda _: httpx.Response(200, text="<html>"),
        lambda _: httpx.Response(200, json=[]),
        lambda _: httpx.Response(200, json={"data": {"a": 1}}),
        lambda _: httpx.Response(503),
    ):
        assert check(fine) is None


def test_problems_are_told_once_and_not_without_end() -> None:
    events = [chunk({"role": "assistant"}), *[chunk({"content": 7})] * 3, *[chunk({"content": [i]}) for i in range(3)]]
    answer = read("chat", wire([*events, chunk({}, "stop"), ("", "[DONE]")]))
    assert answer.problems == [
        Problem("shape", "delta.content is a number, not a string"),
        Problem("shape", "delta.content is a list, not a string"),
    ]
    many = [("", f"[{i}") for i in range(1000)]
    assert len(read("chat", wire(many)).problems) <= 50


def test_nothing_of_an_engine_is_imported() -> None:
    folder = Path(__file__).parents[1] / "src/dynamo_structural_tags/conformance"
    for path in folder.glob("*.py"):
        lines = path.read_text("utf-8").splitlines()
        imported = [line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))]
        assert not {"vllm", "dynamo", "torch", "xgrammar", "dynamo_structural_tags"} & set(imported), path.name
