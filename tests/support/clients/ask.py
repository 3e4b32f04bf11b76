# SPDX-License-Identifier: Apache-2.0
"""Sends requests through the Python SDKs of OpenAI and Anthropic, and gives back what they make of the answers.

    python ask.py BASE_URL TIMEOUT_S

A line of standard input is a request, `{"id": 1, "api": "chat", "stream": true, "body": {...}}`: `body` holds the
arguments of the SDK's `create`. A line of standard output is what its caller would hold, `{"id": 1, "status": 200,
"body": {...}}`: of a stream the object that the SDK itself puts together; of an error `{"id": 1, "status": 400,
"error": "..."}`, with status 200 where it came in a stream.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import anthropic
import openai
from openai.lib.streaming.chat import ChatCompletionStreamState

KEY = "no-key"


class FailedStream(Exception):
    """A stream of the Responses API that ended with `response.failed`; its argument is the error that came."""


class Clients:
    """An SDK's client for each API."""

    def __init__(self, base_url: str, timeout_s: float) -> None:
        options: dict[str, Any] = {"api_key": KEY, "max_retries": 0, "timeout": timeout_s}
        self.openai = openai.AsyncOpenAI(base_url=f"{base_url}/v1", **options)
        self.anthropic = anthropic.AsyncAnthropic(base_url=base_url, **options)

    async def ask(self, api: str, stream: bool, body: dict[str, Any]) -> Any:
        """Return the SDK's object of an answer."""
        body = {key: value for key, value in body.items() if key != "stream"}
        if api == "messages":
            sampling = {"temperature": body.pop("temperature")} if "temperature" in body else {}
            options: dict[str, Any] = {**body, "extra_body": sampling}  # this SDK's methods know no temperature
            if not stream:
                return await self.anthropic.messages.create(**options)
            async with self.anthropic.messages.stream(**options) as message:
                return await message.get_final_message()
        if api == "responses":
            if not stream:
                return await self.openai.responses.create(**body)
            # Not `responses.stream`: its final response is only had of an answer that was not cut off.
            async for event in await self.openai.responses.create(stream=True, **body):
                if event.type == "response.failed":
                    raise FailedStream(event.response.error)
                if event.type in ("response.completed", "response.incomplete"):
                    return event.response
            raise RuntimeError("a stream without a last response")
        if not stream:
            return await self.openai.chat.completions.create(**body)
        state = ChatCompletionStreamState()
        async for chunk in await self.openai.chat.completions.create(stream=True, **body):
            state.handle_chunk(chunk)
        return state.current_completion_snapshot


async def _answer(clients: Clients, request: dict[str, Any]) -> None:
    answer: dict[str, Any] = {"id": request["id"]}
    try:
        got = await clients.ask(request["api"], request["stream"], request["body"])
        answer |= {"status": 200, "body": got.to_dict(mode="json")}
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        answer |= {"status": error.status_code, "error": json.dumps(error.body, ensure_ascii=False)}
    except (openai.APIError, anthropic.APIError) as error:
        told = error.body if error.body is not None else error.message
        answer |= {"status": 200, "error": json.dumps(told, ensure_ascii=False)}
    except FailedStream as error:
        answer |= {"status": 200, "error": error.args[0].to_json(indent=None)}
    except Exception as error:
        answer |= {"status": 0, "error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def _main(base_url: str, timeout_s: float) -> None:
    clients = Clients(base_url, timeout_s)
    asked = set()
    while line := await asyncio.to_thread(sys.stdin.readline):
        task = asyncio.create_task(_answer(clients, json.loads(line)))
        asked.add(task)
        task.add_done_callback(asked.discard)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], float(sys.argv[2])))
