# SPDX-License-Identifier: Apache-2.0
"""Requests: the form of chat completions, written as a body of each of the three APIs.

Sources of the forms: OpenAI's references of `POST /v1/chat/completions` and `POST /v1/responses`, and Anthropic's of
`POST /v1/messages`. What is malformed passes through as it is, so that a server sees it in each of them: a tool that is
a string stays a string, parameters of the wrong type stay what they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ._answer import Answer

__all__ = ["body", "follow_up", "history", "laid_over"]

#: What `/v1/messages` is asked for where a request has no limit: the API demands one.
_MESSAGES_MAX_TOKENS = 4096


def body(
    api: str, request: Mapping[str, Any], model: str, stream: bool, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the body to send: `request` in chat completions' form, without `model` and `stream`, in the form of `api`.

    `overrides` are laid over the finished body, field by field; null removes one, also `model` or `messages`. A stream
    of chat completions is asked for its usage, as the other two APIs always send it. Fields that only chat completions
    has (`seed`, `stream_options`) are left out elsewhere; fields that are not known pass through. A request of any
    shape is translated without an error.
    """
    fields = {key: value for key, value in request.items() if key not in ("model", "stream")}
    translated: dict[str, Any] = {"model": model, **_TRANSLATIONS[api](fields)}
    if stream:
        translated["stream"] = True
        if api == "chat":
            translated.setdefault("stream_options", {"include_usage": True})
    return laid_over(translated, overrides)


def history(answer: Answer) -> dict[str, Any]:
    """Return the assistant's message that an agent puts into the history, in the form of chat completions.

    Reasoning goes back under the name that it came by, as a server may refuse the other: `reasoning` in vLLM's chat
    completions, else `reasoning_content`.
    """
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
    if answer.reasoning:
        vllm = '"reasoning":' in answer.raw and '"reasoning_content":' not in answer.raw
        message["reasoning" if vllm else "reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    elif not answer.text:
        message["content"] = ""
    return message


def follow_up(
    request: Mapping[str, Any],
    answer: Answer,
    results: Sequence[str] = (),
    user: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the request of the next turn, in the form of chat completions.

    Behind the messages of `request` stand the answer, a result for each of its calls, in their order (a result without
    a call is left out), and the user's message. `changes` are laid over the request's other fields; null removes one.
    """
    before = request.get("messages")
    messages = [*(before if isinstance(before, list) else []), history(answer)]
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": result}
        for call, result in zip(answer.calls, results, strict=False)
    ]
    if user is not None:
        messages.append({"role": "user", "content": user})
    return laid_over({**request, "messages": messages}, changes)


def laid_over(fields: Mapping[str, Any], changes: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields with the changes in their place; null removes one."""
    removed = [key for key, value in (changes or {}).items() if value is None]
    return {key: value for key, value in {**fields, **(changes or {})}.items() if key not in removed}


def _chat(request: dict[str, Any]) -> dict[str, Any]:
    return request


def _responses(request: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in request.items():
        if key == "messages":
            out["input"] = _responses_input(value)
        elif key == "tools":
            out["tools"] = [_responses_tool(tool) for tool in value] if isinstance(value, list) else value
        elif key == "tool_choice":
            out["tool_choice"] = _responses_choice(value)
        elif key in ("max_tokens", "max_completion_tokens"):
            out["max_output_tokens"] = value
        elif key == "response_format":
            out["text"] = {"format": _responses_format(value)}
        elif key == "reasoning_effort":
            out["reasoning"] = {"effort": value}
        elif key not in ("seed", "stream_options"):
            out[key] = value
    return out


def _messages(request: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"max_tokens": _MESSAGES_MAX_TOKENS}
    for key, value in request.items():
        if key == "messages":
            out.update(_messages_history(value))
        elif key == "tools":
            out["tools"] = [_messages_tool(tool) for tool in value] if isinstance(value, list) else value
        elif key == "tool_choice":
            out["tool_choice"] = _messages_choice(value)
        elif key in ("max_tokens", "max_completion_tokens"):
            out["max_tokens"] = value
        elif key == "stop":
            out["stop_sequences"] = [value] if isinstance(value, str) else value
        elif key == "response_format" and _named(value, "json_schema"):
            wanted = {"type": "json_schema", "schema": value["json_schema"].get("schema")}
            out["output_config"] = {**out.get("output_config", {}), "format": wanted}
        elif key == "reasoning_effort":
            out["output_config"] = {**out.get("output_config", {}), "effort": value}
        elif key == "parallel_tool_calls" and isinstance(value, bool):
            pass
        elif key not in ("seed", "stream_options"):
            out[key] = value
    if request.get("parallel_tool_calls") is False:
        choice = out.setdefault("tool_choice", {"type": "auto"})
        if isinstance(choice, dict) and choice.get("type") in ("auto", "any", "tool"):
            choice["disable_parallel_tool_use"] = True
    return out


_TRANSLATIONS = {"chat": _chat, "responses": _responses, "messages": _messages}


def _named(value: Any, key: str) -> bool:
    """Say whether it is an object of the type `key`, with an object under that name."""
    return isinstance(value, dict) and value.get("type") == key and isinstance(value.get(key), dict)


def _parts(content: Any, kind: str) -> Any:
    """Return a content, its parts of the type `text` renamed."""
    if not isinstance(content, list):
        return content
    return [
        {**part, "type": kind} if isinstance(part, dict) and part.get("type") == "text" else part for part in content
    ]


def _reasoning(message: Mapping[str, Any]) -> Any:
    return message.get("reasoning_content") or message.get("reasoning")


def _beside(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an assistant's message has beside content, calls and reasoning.

    Of the fields that a message of chat completions comes with, the empty ones say nothing and have no place elsewhere.
    """
    known = ("content", "tool_calls", "reasoning_content", "reasoning")
    empty = [key for key in ("refusal", "function_call", "audio", "annotations") if not message.get(key)]
    return {key: value for key, value in message.items() if key not in known and key not in empty}


def _responses_tool(tool: Any) -> Any:
    if not (isinstance(tool, dict) and isinstance(tool.get("function"), dict)):
        return tool
    return {key: value for key, value in tool.items() if key != "function"} | tool["function"]


def _responses_choice(choice: Any) -> Any:
    if _named(choice, "function"):
        return {"type": "function", **choice["function"]}
    if _named(choice, "allowed_tools"):
        allowed = dict(choice["allowed_tools"])
        if isinstance(allowed.get("tools"), list):
            allowed["tools"] = [_responses_choice(tool) for tool in allowed["tools"]]
        return {"type": "allowed_tools", **allowed}
    return choice


def _responses_format(wanted: Any) -> Any:
    return {"type": "json_schema", **wanted["json_schema"]} if _named(wanted, "json_schema") else wanted


def _responses_input(messages: Any) -> Any:
    if not isinstance(messages, list):
        return messages
    return [item for number, message in enumerate(messages) for item in _responses_items(number, message)]


def _responses_items(number: int, message: Any) -> list[Any]:
    if not isinstance(message, dict):
        return [message]
    role, content = message.get("role"), message.get("content")
    if role == "tool":
        result = {"type": "function_call_output"}
        if "tool_call_id" in message:
            result["call_id"] = message["tool_call_id"]
        return [result | {"output": _parts(content, "input_text")}]
    if role != "assistant":
        return [{**message, "content": _parts(content, "input_text")} if "content" in message else message]
    calls = message.get("tool_calls")
    if calls and not isinstance(calls, list):
        return [message]
    items: list[Any] = []
    if _reasoning(message):
        text = {"type": "reasoning_text", "text": _reasoning(message)}
        items.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": [text]})
    if content or not calls:
        rest = _beside(message)
        items.append({**rest, "content": _parts(content, "output_text")} if "content" in message else rest)
    for call in calls or []:
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            identifier = {"call_id": call["id"]} if "id" in call else {}
            items.append({"type": "function_call", **identifier, **call["function"]})
        else:
            items.append(call)
    return items


def _messages_tool(tool: Any) -> Any:
    if not (isinstance(tool, dict) and isinstance(tool.get("function"), dict)):
        return tool
    out = {key: value for key, value in tool.items() if key != "function" and (key, value) != ("type", "function")}
    for key, value in tool["function"].items():
        out["input_schema" if key == "parameters" else key] = value
    out.setdefault("input_schema", {"type": "object", "properties": {}})  # the API demands one
    return out


def _messages_choice(choice: Any) -> Any:
    if isinstance(choice, str):
        known = {"auto": "auto", "required": "any", "none": "none"}
        return {"type": known[choice]} if choice in known else choice
    return {"type": "tool", **choice["function"]} if _named(choice, "function") else choice


def _messages_history(messages: Any) -> dict[str, Any]:
    if not isinstance(messages, list):
        return {"messages": messages}
    system: list[str] = []
    out: list[Any] = []
    for message in messages:
        if not isinstance(message, dict):
            out.append(message)
            continue
        role, content = message.get("role"), message.get("content")
        texts = _texts(content)
        if role in ("system", "developer") and texts is not None:
            system += texts
        elif role == "tool":
            result = {"type": "tool_result"}
            if "tool_call_id" in message:
                result["tool_use_id"] = message["tool_call_id"]
            blocks = _results(out)
            if not blocks:
                out.append({"role": "user"})
            out[-1] = {**out[-1], "content": [*blocks, result | {"content": content}]}
        elif role == "user" and _results(out):  # results and the user's words are one turn of the user's
            words = content if isinstance(content, list) else [{"type": "text", "text": content}]
            out[-1] = {**out[-1], "content": [*_results(out), *words]}
        elif role == "assistant":
            out.append(_messages_assistant(message))
        else:
            out.append(message)
    return {"messages": out} | ({"system": "\n\n".join(system)} if system else {})


def _texts(content: Any) -> list[str] | None:
    """Return the texts of a message, or None where it is made of anything else."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        return None
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    return texts if all(isinstance(text, str) for text in texts) else None  # type: ignore[return-value]


def _results(messages: list[Any]) -> list[Any]:
    """Return the blocks of the last turn if they are results, and nothing else."""
    content = messages[-1].get("content") if messages and isinstance(messages[-1], dict) else None
    if not isinstance(content, list):
        return []
    return content if all(isinstance(one, dict) and one.get("type") == "tool_result" for one in content) else []


def _messages_assistant(message: dict[str, Any]) -> dict[str, Any]:
    calls, content = message.get("tool_calls"), message.get("content")
    if calls and not isinstance(calls, list):
        return message
    rest = _beside(message)
    if not _reasoning(message) and not calls:
        return {**rest, "content": content} if "content" in message else rest
    blocks: list[Any] = []
    if _reasoning(message):
        blocks.append({"type": "thinking", "thinking": _reasoning(message), "signature": ""})
    if content:
        blocks += content if isinstance(content, list) else [{"type": "text", "text": content}]
    for call in calls or []:
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            identifier = {"id": call["id"]} if "id" in call else {}
            function = {key: value for key, value in call["function"].items() if key != "arguments"}
            given = {"input": _value(call["function"]["arguments"])} if "arguments" in call["function"] else {}
            blocks.append({"type": "tool_use", **identifier, **function, **given})
        else:
            blocks.append(call)
    return {**rest, "content": blocks}


def _value(arguments: Any) -> Any:
    """Return the value of arguments that are JSON, as the API wants them; others as they are."""
    try:
        return json.loads(arguments)
    except (TypeError, ValueError, RecursionError):
        return arguments
