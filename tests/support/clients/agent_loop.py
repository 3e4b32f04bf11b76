# SPDX-License-Identifier: Apache-2.0
"""An agent of OpenAI's Agents SDK: it calls its tools until the model answers in words.

    python agent_loop.py BASE_URL MODEL chat|responses

Standard input is one agent: `{"instructions": TEXT, "input": TEXT, "tools": [...], "results": {NAME: [TEXT, ...]},
"streamed": BOOL}`. Its tools are written as in chat completions; a tool's n-th call returns its n-th result. Standard
output is what became of it: `{"output": TEXT, "called": [[NAME, ARGUMENTS], ...]}`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any

from agents import (
    Agent,
    FunctionTool,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


async def _run(base_url: str, model: str, api: str, told: dict[str, Any]) -> dict[str, Any]:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key="no-key", max_retries=0, timeout=120.0)
    called: list[tuple[str, str]] = []
    results: dict[str, Iterator[str]] = {name: iter(texts) for name, texts in told["results"].items()}

    def tool(declared: dict[str, Any]) -> FunctionTool:
        async def call(_: Any, arguments: str) -> str:
            called.append((declared["name"], arguments))
            return next(results[declared["name"]])

        return FunctionTool(
            name=declared["name"],
            description=declared.get("description", ""),
            params_json_schema=declared["parameters"],
            on_invoke_tool=call,
            strict_json_schema=False,
        )

    kind = OpenAIResponsesModel if api == "responses" else OpenAIChatCompletionsModel
    agent = Agent(
        name="agent",
        instructions=told.get("instructions"),
        model=kind(model=model, openai_client=client),
        tools=[tool(one["function"]) for one in told["tools"]],
    )
    settings = RunConfig(tracing_disabled=True)
    if told["streamed"]:
        streamed = Runner.run_streamed(agent, told["input"], max_turns=6, run_config=settings)
        async for _ in streamed.stream_events():
            pass
        output = streamed.final_output
    else:
        output = (await Runner.run(agent, told["input"], max_turns=6, run_config=settings)).final_output
    return {"output": output, "called": called}


if __name__ == "__main__":
    url, served, which = sys.argv[1:]
    print(json.dumps(asyncio.run(_run(url, served, which, json.load(sys.stdin)))))
