# SPDX-License-Identifier: Apache-2.0
"""The cases ask for nothing that the APIs' own makers refuse, unless that is what a case is about or may come of it.

Sources: OpenAI's guides to function calling and structured outputs, and Anthropic's to tool use; what their servers are
known to answer where these say nothing (`array schema missing items`, `Property keys should match pattern ...`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from dynamo_structural_tags.conformance import Case, load_cases
from dynamo_structural_tags.conformance._requests import body

SERVED = [case for case in load_cases() if "refused" not in case.expect]


def functions(case: Case) -> Iterator[Mapping[str, Any]]:
    yield from (tool["function"] for tool in case.request.get("tools", ()))


def schemas(node: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and those within it; the values that it lists are none."""
    if isinstance(node, dict):
        yield node
        for key, value in node.items():
            if key in ("properties", "$defs", "definitions"):
                for inner in value.values():
                    yield from schemas(inner)
            elif key not in ("const", "enum", "default"):
                yield from schemas(value)
    elif isinstance(node, list):
        for value in node:
            yield from schemas(value)


def test_tools_have_names_that_all_apis_take() -> None:
    names = ((case.id, function["name"]) for case in SERVED for function in functions(case.numbered(1)))
    assert [one for one in names if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", one[1])] == []
    assert max(len(function["name"]) for case in SERVED for function in functions(case)) == 64


def test_arguments_have_keys_that_anthropic_takes_or_may_be_refused() -> None:
    keys = {
        case.id
        for case in SERVED
        for function in functions(case)
        for key in function["parameters"].get("properties", {})
        if not re.fullmatch(r"[a-zA-Z0-9_.-]{1,64}", key)
    }
    assert keys
    assert keys == {case.id for case in SERVED if case.id in keys and "or_refused" in case.expect}


def test_arrays_say_what_their_items_are() -> None:
    """OpenAI refuses an array without `items`."""
    bare = [
        (case.id, schema)
        for case in SERVED
        for function in functions(case)
        for schema in schemas(function["parameters"])
        if "array" in (kind := schema.get("type", ())) and isinstance(kind, (str, list)) and not schema.get("items")
    ]
    assert bare == []


def test_strict_tools_are_within_what_strict_means() -> None:
    """OpenAI: every key required, no others. What a strict schema may not have, a server may refuse by name."""
    common = {"type", "properties", "required", "additionalProperties", "enum", "const", "items", "description"}
    strict = [(case, one) for case in SERVED for one in functions(case) if one.get("strict") is True]
    assert len(strict) > 10
    for case, function in strict:
        for schema in schemas(function["parameters"]):
            beyond = set(schema) - common
            if set(schema.get("properties", ())) - set(schema.get("required", ())):
                beyond.add("required")
            if schema.get("type") == "object" and schema.get("additionalProperties") is not False:
                beyond.add("additionalProperties")
            assert beyond <= set(case.expect.get("or_refused", ())), case.id


def test_what_a_prompt_asks_against_the_schema_only_a_strict_tool_holds_off() -> None:
    """Without `strict` the schema is a hint to the model by both documentations, so nothing may depend on it there."""
    bounds = [
        case for case in SERVED if case.area == "bounds" and "valid" in case.expect and "follow" not in case.needs
    ]
    assert len(bounds) == 10
    assert [case.id for case in bounds for one in functions(case) if one.get("strict") is not True] == []


def test_responses_are_asked_for_the_reasoning() -> None:
    """OpenAI's API shows none where no summary of it is asked for, and Dynamo's does as it does."""
    asked = [case for case in SERVED if "reasoning" in case.needs and "responses" in case.apis]
    assert asked
    for case in asked:
        sent = body("responses", case.request, "m", False, case.overrides.get("responses"))
        assert sent.get("reasoning") == {"summary": "auto"}, case.id


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_fields_fit_together(api: str) -> None:
    for case in SERVED:
        if api not in case.apis or case.body is not None:
            continue
        sent = body(api, case.request, "m", False, case.overrides.get(api))
        if "tools" not in sent:
            assert {"tool_choice", "parallel_tool_calls"}.isdisjoint(sent), case.id
        if api == "responses":
            assert sent.get("max_output_tokens", 16) >= 16, case.id
        if api != "messages":
            continue
        assert sent["messages"][0]["role"] == "user", case.id
        for message in sent["messages"]:
            blocks = message["content"] if isinstance(message["content"], list) else []
            kinds = [block["type"] for block in blocks]
            assert kinds == sorted(kinds, key=lambda kind: kind != "tool_result") or message["role"] == "assistant"
            for block in blocks:
                identifier = block.get("id", block.get("tool_use_id", "a"))
                assert re.fullmatch(r"[a-zA-Z0-9_-]+", identifier), case.id
                assert block["type"] != "text" or block["text"].strip(), case.id
