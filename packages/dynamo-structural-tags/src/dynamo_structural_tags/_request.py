# SPDX-License-Identifier: Apache-2.0
"""The part of a chat completion request that decides which calls an answer may hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ._errors import RequestError
from ._json import shown

__all__ = ["Choice", "Tool", "ToolPolicy", "read_request"]

Choice = Literal["auto", "required", "named", "none"]

#: A tool's name: OpenAI's characters, and the dot and the length that Model Context Protocol servers use.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
#: The most tools one request may declare.
MAX_TOOLS = 512


@dataclass(frozen=True)
class Tool:
    """A function that the request declares."""

    name: str
    #: JSON Schema of the arguments, an object.
    parameters: Mapping[str, Any]
    #: False only where the request says `strict: false`: then the call's form is enforced, not its schema.
    strict: bool = True
    description: str | None = None
    #: Where it stands in the request, as in `tools[0].function`.
    path: str = "tools[0].function"


@dataclass(frozen=True)
class ToolPolicy:
    """What an answer may hold, read from a request by :func:`read_request`."""

    #: The tools that may be called: none under `none`, one under a named choice.
    tools: tuple[Tool, ...]
    choice: Choice = "auto"
    #: False: at most one call.
    parallel: bool = True
    #: JSON Schema of the content where no call is made, from `response_format`; None where content is free text.
    content_schema: Mapping[str, Any] | bool | None = field(default=None)

    def tool(self, name: str) -> Tool | None:
        """Return the tool of that name that may be called, or None."""
        for tool in self.tools:
            if tool.name == name:
                return tool
        return None


def _of(value: Any, kind: type | tuple[type, ...], path: str, what: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RequestError(path, f"must be {what}, not {shown(value)}")
    return value


def _tool(entry: Any, path: str) -> Tool:
    _of(entry, Mapping, path, "an object")
    kind = entry.get("type", "function")
    if kind != "function":
        raise RequestError(f"{path}.type", f"must be 'function', not {shown(kind)}: only function tools are served")
    if "function" not in entry:
        raise RequestError(f"{path}.function", "is missing")
    path = f"{path}.function"
    function = _of(entry["function"], Mapping, path, "an object")
    if "name" not in function:
        raise RequestError(f"{path}.name", "is missing")
    name = _of(function["name"], str, f"{path}.name", "a string")
    if not _NAME.fullmatch(name):
        raise RequestError(f"{path}.name", f"must be 1 to 128 of A-Z a-z 0-9 _ . -, not {shown(name)}")
    description = function.get("description")
    if description is not None:
        _of(description, str, f"{path}.description", "a string")
    strict = function.get("strict")
    if strict is not None:
        _of(strict, bool, f"{path}.strict", "true or false")
    parameters = function.get("parameters")
    if parameters is None:
        # OpenAI: a function without parameters takes none.
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    _of(parameters, Mapping, f"{path}.parameters", "a JSON Schema of an object")
    return Tool(name, parameters, strict is not False, description, path)


def _referenced(entry: Any, path: str, declared: Mapping[str, Tool]) -> Tool:
    """Return the tool that `{"type": "function", "function": {"name": ...}}` or its flat form names."""
    _of(entry, Mapping, path, "an object")
    if entry.get("type", "function") != "function":
        raise RequestError(f"{path}.type", f"must be 'function', not {shown(entry.get('type'))}")
    place = f"{path}.function" if "function" in entry else path
    function = _of(entry.get("function", entry), Mapping, place, "an object")
    if "name" not in function:
        raise RequestError(f"{place}.name", "is missing")
    name = _of(function["name"], str, f"{place}.name", "a string")
    if name not in declared:
        known = ", ".join(sorted(declared)) or "none"
        raise RequestError(f"{place}.name", f"no tool {shown(name)} is declared; declared: {known}")
    return declared[name]


def _content_schema(body: Mapping[str, Any]) -> Mapping[str, Any] | bool | None:
    response_format = body.get("response_format")
    if response_format is None:
        return None
    path = "response_format"
    _of(response_format, Mapping, path, "an object")
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise RequestError(f"{path}.type", f"must be text, json_object or json_schema beside tools, not {shown(kind)}")
    inner = _of(response_format.get("json_schema"), Mapping, f"{path}.json_schema", "an object")
    schema = inner.get("schema")
    if schema is None:
        raise RequestError(f"{path}.json_schema.schema", "is missing")
    if not isinstance(schema, (Mapping, bool)):
        raise RequestError(f"{path}.json_schema.schema", f"must be a JSON Schema, not {shown(schema)}")
    return schema


def read_request(body: Mapping[str, Any]) -> ToolPolicy | None:
    """Return what the answer to a chat completion request may hold; None where the request has no tools.

    Reads `tools`, `tool_choice`, `parallel_tool_calls` and `response_format` as OpenAI's API defines them.

    Raises:
        RequestError: names the JSON path and the value of what is malformed, unknown, duplicate or contradictory. The
            schemas inside the tools are checked when their grammar is built.
    """
    entries = body.get("tools")
    choice = body.get("tool_choice")
    parallel = body.get("parallel_tool_calls")
    if parallel is not None:
        _of(parallel, bool, "parallel_tool_calls", "true or false")
    if entries is not None and (isinstance(entries, (str, bytes)) or not isinstance(entries, Sequence)):
        raise RequestError("tools", f"must be an array, not {shown(entries)}")
    if not entries:
        if choice in (None, "none", "auto"):
            return None
        raise RequestError("tool_choice", f"is {shown(choice)}, but the request declares no tools")
    if len(entries) > MAX_TOOLS:
        raise RequestError("tools", f"at most {MAX_TOOLS} tools, not {len(entries)}")
    declared: dict[str, Tool] = {}
    for index, entry in enumerate(entries):
        tool = _tool(entry, f"tools[{index}]")
        if tool.name in declared:
            raise RequestError(f"{tool.path}.name", f"{tool.name!r} is declared twice")
        declared[tool.name] = tool
    tools = tuple(declared.values())
    mode: Choice = "auto"
    if choice is None or choice == "auto":
        pass
    elif choice == "required":
        mode = "required"
    elif choice == "none":
        return ToolPolicy((), "none", parallel is not False, _content_schema(body))
    elif not isinstance(choice, Mapping):
        raise RequestError("tool_choice", f"must be auto, required, none or an object, not {shown(choice)}")
    elif choice.get("type") == "allowed_tools":
        place = "tool_choice.allowed_tools" if "allowed_tools" in choice else "tool_choice"
        allowed = _of(choice.get("allowed_tools", choice), Mapping, place, "an object")
        mode = allowed.get("mode", "auto")
        if mode not in ("auto", "required"):
            raise RequestError(f"{place}.mode", f"must be auto or required, not {shown(mode)}")
        listed = _of(allowed.get("tools"), list, f"{place}.tools", "an array")
        chosen = [_referenced(entry, f"{place}.tools[{i}]", declared) for i, entry in enumerate(listed)]
        if not chosen:
            raise RequestError(f"{place}.tools", "names no tool")
        tools = tuple(tool for tool in tools if tool in chosen)
    else:
        mode = "named"
        tools = (_referenced(choice, "tool_choice", declared),)
    # OpenAI: a named tool is called exactly once.
    return ToolPolicy(tools, mode, parallel is not False and mode != "named", _content_schema(body))
