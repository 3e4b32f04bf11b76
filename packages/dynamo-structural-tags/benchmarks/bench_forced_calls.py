# SPDX-License-Identifier: Apache-2.0
"""Forced calls on the embedded stack with its random-weight model: how many finish, and that those are valid."""

from __future__ import annotations

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serving_stack.model import CHAT_TEMPLATE, write_model
from serving_stack.state import free_ports
from support import tool_reference
from support.bench import Bench
from support.dynamo_tools import Answer, Frontend
from support.stack import Stack
from support.tool_schemas import schemas

SCHEMAS, QUICK_SCHEMAS, SEED = 200, 20, 7
#: At a time; and the most tokens of an answer.
AT_ONCE, MAX_TOKENS = 8, 600
#: The prompt ends after the reasoning: a model of random weights would reason to the end of its tokens.
_ASKS = "{%- if enable_thinking is defined and not enable_thinking -%}"


def run(bench: Bench) -> None:
    count = QUICK_SCHEMAS if bench.quick else SCHEMAS
    drawn = schemas(SEED, count, recursion=False)
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": f"tool_{number}", "parameters": schema}}
        for number, schema in enumerate(drawn)
    ]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "glm-tools"
        write_model(model)
        (model / ".serving-stack-model").unlink(missing_ok=True)
        if CHAT_TEMPLATE.count(_ASKS) != 1:
            raise AssertionError("the model's chat template has changed")
        (model / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace(_ASKS, "{%- if true -%}"), "utf-8")
        stack = Stack(Path(folder), free_ports(1, above=24000)[0], "cpu-tools")
        try:
            stack.up("--model", str(model))
            frontend = Frontend(stack.port)
            with ThreadPoolExecutor(AT_ONCE) as pool:
                answers = list(pool.map(lambda tool: _call(frontend, tool), tools))
        finally:
            stack.command("down", check=False)
    finished, faults = 0, []
    cut = 0
    for tool, got in zip(tools, answers, strict=True):
        if got.error is not None:
            if got.message.startswith("truncated_call: "):
                cut += 1
            else:
                faults.append(f"{tool['function']['name']}: {got.message}")
            continue
        finished += 1
        wrong = [tool_reference.fault([tool], name, json.loads(arguments)) for name, arguments in got.calls]
        if len(wrong) != 1 or wrong[0] is not None or got.finish != "tool_calls":
            faults.append(f"{tool['function']['name']}: {got.calls} {got.finish} {wrong}")
    bench.row("forced calls that finish", "", ours=[finished], aim=f">= {count * 9 // 10}")
    bench.row("finished or refused calls with a fault", "", ours=[len(faults)], aim="== 0")
    bench.note(f"{count} schemas, {MAX_TOKENS} tokens at most; {cut} were cut there, each answered as truncated_call.")
    for fault in faults[:5]:
        bench.note(fault)


def _call(frontend: Frontend, tool: dict[str, Any]) -> Answer:
    return frontend.chat(
        "glm-tools",
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": tool["function"]["name"]}},
        parallel_tool_calls=False,
        max_tokens=MAX_TOKENS,
        temperature=1.0,
    )
