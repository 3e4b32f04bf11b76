# SPDX-License-Identifier: Apache-2.0
"""What a request may ask of tools, and how a malformed one is refused: by its JSON path and the value."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_structural_tags import RequestError, read_request

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str = "get_weather", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **more}}


TOOLS = [tool(), tool("get_time"), tool("send")]


def names(body: dict[str, Any]) -> list[str]:
    policy = read_request(body)
    assert policy is not None
    return [one.name for one in policy.tools]


@pytest.mark.parametrize("body", [{}, {"tools": None}, {"tools": []}, {"tools": [], "tool_choice": "none"}])
def test_a_request_without_tools_is_left_alone(body: dict[str, Any]) -> None:
    assert read_request(body) is None


def test_auto_is_the_default_and_calls_may_be_parallel() -> None:
    policy = read_request({"tools": TOOLS})
    assert policy is not None
    assert (policy.choice, policy.parallel, policy.content_schema) == ("auto", True, None)
    assert policy.tool("send") is policy.tools[2]
    assert policy.tool("rm") is None


@pytest.mark.parametrize(
    ("choice", "mode", "callable_tools"),
    [
        ("auto", "auto", ["get_weather", "get_time", "send"]),
        ("required", "required", ["get_weather", "get_time", "send"]),
        ("none", "none", []),
        ({"type": "function", "function": {"name": "send"}}, "named", ["send"]),
        ({"type": "function", "name": "send"}, "named", ["send"]),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "send"}}]},
            },
            "required",
            ["send"],
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]},
            "auto",
            ["get_time"],
        ),
    ],
)
def test_tool_choice(choice: Any, mode: str, callable_tools: list[str]) -> None:
    policy = read_request({"tools": TOOLS, "tool_choice": choice})
    assert policy is not None
    assert policy.choice == mode
    assert [one.name for one in policy.tools] == callable_tools


def test_a_named_tool_is_called_once() -> None:
    choice = {"type": "function", "function": {"name": "send"}}
    policy = read_request({"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": True})
    assert policy is not None
    assert not policy.parallel


def test_one_call_where_parallel_calls_are_off() -> None:
    policy = read_request({"tools": TOOLS, "parallel_tool_calls": False})
    assert policy is not None
    assert not policy.parallel


def test_strict_false_is_the_only_way_out_of_the_schema() -> None:
    policy = read_request(
        {"tools": [tool("a"), tool("b", strict=True), tool("c", strict=False), tool("d", strict=None)]}
    )
    assert policy is not None
    assert [one.strict for one in policy.tools] == [True, True, False, True]


def test_a_function_without_parameters_takes_none() -> None:
    policy = read_request({"tools": [{"type": "function", "function": {"name": "now"}}]})
    assert policy is not None
    assert policy.tools[0].parameters == {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}, CITY),
    ],
)
def test_a_response_format_beside_tools_is_the_content(response_format: Any, schema: Any) -> None:
    policy = read_request({"tools": TOOLS, "response_format": response_format})
    assert policy is not None
    assert policy.content_schema == schema


@pytest.mark.parametrize(
    ("body", "path", "value"),
    [
        ({"tools": "x"}, "tools", "'x'"),
        ({"tools": {"a": 1}}, "tools", "{'a': 1}"),
        ({"tools": [1]}, "tools[0]", "1"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing"),
        ({"tools": [tool(), tool("no blanks")]}, "tools[1].function.name", "'no blanks'"),
        ({"tools": [tool("")]}, "tools[0].function.name", "''"),
        ({"tools": [tool("x" * 129)]}, "tools[0].function.name", "128"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name", "twice"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict", "'yes'"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "[]"),
        ({"tools": [tool(description=3)]}, "tools[0].function.description", "3"),
        ({"tools": [tool(f"t{i}") for i in range(513)]}, "tools", "513"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "'always'"),
        ({"tools": TOOLS, "tool_choice": 3}, "tool_choice", "3"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rm"}}},
            "tool_choice.function.name",
            "'rm'",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name", "missing"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "name": "send"}}, "tool_choice.type", "'custom'"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.tools", "no tool"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}},
            "tool_choice.mode",
            "'x'",
        ),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "'no'"),
        ({"tools": TOOLS, "response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        ({"tools": TOOLS, "response_format": {"type": "json_schema"}}, "response_format.json_schema", "None"),
        (
            {"tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
            "3",
        ),
    ],
)
def test_what_is_malformed_is_named(body: dict[str, Any], path: str, value: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_request(body)
    assert caught.value.path == path
    assert value in caught.value.reason
    assert str(caught.value).startswith(f"{path}: ")
