# SPDX-License-Identifier: Apache-2.0
"""Forced calls on the real stack: the tiny model knows nothing, so what is right in them is the grammar's doing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from serving_stack.model import CHAT_TEMPLATE, write_model
from serving_stack.state import free_ports
from support.dynamo_tools import Answer, Frontend, events
from support.stack import Stack
from support.tool_schemas import schemas

pytestmark = pytest.mark.engines

LOOK = {
    "type": "object",
    "properties": {
        "where": {"type": "string", "minLength": 2, "maxLength": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["where", "count"],
    "additionalProperties": False,
}


def tool(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a prompt that ends after the reasoning: its own would reason to the end of its tokens."""
    folder = tmp_path_factory.mktemp("model") / "glm-tools"
    write_model(folder)
    (folder / ".serving-stack-model").unlink(missing_ok=True)
    asks = "{%- if enable_thinking is defined and not enable_thinking -%}"
    assert CHAT_TEMPLATE.count(asks) == 1
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace(asks, "{%- if true -%}"), "utf-8")
    return folder


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Frontend]:
    """The profile `cpu-tools`, up."""
    one = Stack(tmp_path_factory.mktemp("tools"), free_ports(1, above=24000)[0], "cpu-tools")
    try:
        one.up("--model", str(model))
        yield Frontend(one.port)
    finally:
        one.command("down", check=False)


def valid(arguments: Any, schema: Any) -> None:
    jsonschema.Draft202012Validator(schema).validate(arguments)


def test_a_forced_call_is_valid_and_the_same_plain_and_streamed(frontend: Frontend) -> None:
    body: dict[str, Any] = {
        "temperature": 0,
        "tools": [tool("look", LOOK)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
    }
    plain = frontend.chat("glm-tools", **body)
    assert plain.error is None
    ((name, arguments),) = plain.calls
    assert (name, plain.finish, plain.content) == ("look", "tool_calls", "")
    valid(json.loads(arguments), LOOK)
    stream = frontend.chat("glm-tools", stream=True, stream_options={"include_usage": True}, **body)
    assert (stream.calls, stream.finish) == (plain.calls, plain.finish)
    assert plain.usage is not None
    assert stream.usage is not None
    assert stream.usage["completion_tokens"] == plain.usage["completion_tokens"]


def test_responses_and_messages_carry_forced_calls(frontend: Frontend) -> None:
    body: dict[str, Any] = {"model": "glm-tools", "temperature": 1.0}
    responses = frontend.post(
        "/v1/responses",
        {
            **body,
            "stream": True,
            "input": "Go.",
            "tools": [{"type": "function", "name": "look", "parameters": LOOK}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_output_tokens": 200,
        },
    )
    done = [one for one in events(responses.text) if one["type"] == "response.function_call_arguments.done"]
    assert len(done) == 1, responses.text
    valid(json.loads(done[0]["arguments"]), LOOK)
    messages = frontend.post(
        "/v1/messages",
        {
            **body,
            "messages": [{"role": "user", "content": "Go."}],
            "tools": [{"name": "look", "input_schema": LOOK}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "max_tokens": 200,
        },
    )
    (call,) = [one for one in messages.json()["content"] if one["type"] == "tool_use"]
    valid(call["input"], LOOK)


def bounded(schema: Any) -> bool:
    """Say whether a schema has no recursion: nothing bounds its depth, and random weights may never end it."""
    text = json.dumps({**schema.get("$defs", {}), **schema.get("definitions", {})})
    return '"$ref"' not in text


def test_forced_calls_over_many_schemas_are_valid(frontend: Frontend) -> None:
    drawn = [schema for schema in schemas(20261130, 60) if bounded(schema)][:20]
    assert len(drawn) == 20

    def call(number: int) -> Answer:
        return frontend.chat(
            "glm-tools",
            tools=[tool(f"tool_{number}", drawn[number]), tool("look", LOOK)],
            tool_choice={"type": "function", "function": {"name": f"tool_{number}"}},
            parallel_tool_calls=False,
            max_tokens=400,
            # Without seeds: with ten seeded requests at once, vLLM 0.31 on a CPU was once seen to end with
            # "CPU Generator does not use offset".
            temperature=1.0,
        )

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(call, range(len(drawn))))
    finished = 0
    for number, (schema, got) in enumerate(zip(drawn, answers, strict=True)):
        if got.error is not None:  # what did not finish was cut at the limit, and says so
            assert got.message.startswith("truncated_call: "), got.message
            continue
        ((name, arguments),) = got.calls
        assert (name, got.finish) == (f"tool_{number}", "tool_calls")
        valid(json.loads(arguments), schema)
        finished += 1
    assert finished >= len(drawn) * 0.9
