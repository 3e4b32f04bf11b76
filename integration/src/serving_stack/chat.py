# SPDX-License-Identifier: Apache-2.0
"""`serving-stack chat`: one message to any OpenAI-compatible endpoint, the answer streamed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .errors import StackError
from .state import Run


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.usage = '%(prog)s [options] [MODEL] "TEXT"'
    parser.add_argument("words", nargs="+", metavar="MODEL TEXT", help="model (default: the only one served), message")
    parser.add_argument("--json", action="store_true", help="print the whole answer as JSON instead of streaming text")
    parser.add_argument("--tools", metavar="FILE", help="JSON file: a list of tools in OpenAI's form")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="end the answer after N tokens")
    parser.add_argument(
        "--base-url", metavar="URL", help="address ending in /v1 (default: the running stack, or $OPENAI_BASE_URL)"
    )
    parser.add_argument("--api-key", metavar="K", help="key (default: $OPENAI_API_KEY)")


def _base_url(given: str | None) -> str:
    if given:
        return given
    place = Run()
    state = place.read()
    if state is not None and place.members(state):
        return state.base_url
    from_environment = os.environ.get("OPENAI_BASE_URL")
    if from_environment:
        return from_environment
    raise StackError("no stack is running and neither --base-url nor OPENAI_BASE_URL is given")


def _tools(file: str | None) -> list[Any] | None:
    if file is None:
        return None
    try:
        tools = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StackError(f"--tools {file}: {error}") from error
    if not isinstance(tools, list):
        raise StackError(f"--tools {file}: a list of tools is wanted, not {type(tools).__name__}")
    return tools


def run(args: argparse.Namespace) -> int:
    """Send the message and print the answer: text as it comes, each tool call as a line of JSON."""
    import openai  # slow to import, and only this command needs it

    if len(args.words) > 2:
        raise StackError(f"{len(args.words)} words given: a model and one message, the message in quotes")
    model, text = args.words if len(args.words) == 2 else (None, args.words[0])
    url = _base_url(args.base_url)
    # A proxy does not know this machine's own addresses.
    local = urlsplit(url).hostname in {"127.0.0.1", "localhost", "::1"}
    client = openai.OpenAI(
        base_url=url,
        api_key=args.api_key or os.environ.get("OPENAI_API_KEY") or "none",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=not local),
    )
    request: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    tools = _tools(args.tools)
    if tools is not None:
        request["tools"] = tools
    if args.max_tokens is not None:
        request["max_tokens"] = args.max_tokens
    try:
        if model is None:
            served = [entry.id for entry in client.models.list()]
            if len(served) != 1:
                raise StackError(f"{url} serves {', '.join(served) or 'no model'}: name the model to ask")
            model = served[0]
        request["model"] = model
        if args.json:
            answer = client.chat.completions.create(**request)
            print(answer.model_dump_json(indent=2, exclude_unset=True))
            return 0
        return _stream(client.chat.completions.create(**request, stream=True))
    except openai.APIStatusError as error:
        raise StackError(f"{url} answered {error.status_code}: {error.message}") from error
    except openai.APIError as error:
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        raise StackError(f"{url}: {error.message}{cause}") from error
    except (ValueError, AttributeError, TypeError) as error:  # an answer of another form, or a key no header can hold
        raise StackError(f"{url} does not answer as an OpenAI-compatible endpoint: {error}") from error


def _stream(chunks: Any) -> int:
    calls: dict[int, dict[str, str]] = {}
    finish = None
    for chunk in chunks:
        for choice in chunk.choices[:1]:
            thought = getattr(choice.delta, "reasoning_content", None)
            if thought:
                print(thought, end="", flush=True, file=sys.stderr)
            if choice.delta.content:
                print(choice.delta.content, end="", flush=True)
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
                call["id"] = part.id or call["id"]
                if part.function is not None:
                    call["name"] += part.function.name or ""
                    call["arguments"] += part.function.arguments or ""
            finish = choice.finish_reason or finish
    print()
    for _, call in sorted(calls.items()):
        print(json.dumps(call, ensure_ascii=False))
    if finish is None:
        raise StackError("the stream ended without a finish reason: the answer above is not whole")
    return 0
