# SPDX-License-Identifier: Apache-2.0
"""Tool-call parsers side by side: vLLM's own behind one interface, texts to read, and how long each takes.

vLLM is imported when a parser of it is made, so this module imports without it.
"""

from __future__ import annotations

import gc
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_structural_tags._format import Format
from dynamo_structural_tags._parser import Parser
from dynamo_structural_tags._request import ToolPolicy, read_request
from dynamo_structural_tags.formats import get_format

__all__ = [
    "VLLM_NAMES",
    "VllmParser",
    "answer",
    "file_text",
    "microseconds_per_piece",
    "ours_plain",
    "ours_stream",
    "pieces",
    "policy_of",
    "seconds_per_run",
    "vllm_parser",
    "write_tool",
]

#: Our format -> the name that vLLM's `--tool-call-parser` has for it.
VLLM_NAMES: Mapping[str, str] = {
    "glm47": "glm47",
    "glm45": "glm45",
    "qwen3_coder": "qwen3_coder",
    "hermes": "hermes",
    "kimi_k2": "kimi_k2",
    "deepseek_v3_2": "deepseek_v32",
    "deepseek_v4": "deepseek_v4",
}

#: The markers that tokenizers of these models have as one token each.
_SINGLE = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "｜DSML｜",
)
_SPLIT = re.compile("(" + "|".join(re.escape(marker) for marker in _SINGLE) + ")")


def pieces(text: str, size: int = 4) -> list[str]:
    """Cut a text as a detokenizer hands it out: markers whole, everything else `size` characters at a time."""
    found: list[str] = []
    for part in _SPLIT.split(text):
        if part in _SINGLE:
            found.append(part)
        else:
            found += [part[start : start + size] for start in range(0, len(part), size)]
    return found


def write_tool() -> dict[str, Any]:
    """Return the tool whose calls are measured: it writes a file."""
    properties = {"path": {"type": "string"}, "content": {"type": "string"}, "mode": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["path", "content"]}
    return {"type": "function", "function": {"name": "write_file", "parameters": parameters}}


def policy_of(tools: Sequence[Mapping[str, Any]], **request: Any) -> ToolPolicy:
    """Return the policy of a request with these tools."""
    policy = read_request({"tools": list(tools), **request})
    assert policy is not None
    return policy


def file_text(size: int) -> str:
    """Return `size` characters of source text, with quotes, backslashes, tags and line breaks."""
    line = 'if a < b and name != "x":\n    print(f"<b>{name}</b>\\n", items[%d])  # naïve\n'
    text = "".join(line % number for number in range(size // 60 + 1))
    return text[:size]


def answer(fmt: Format, size: int, *, content: str = "I write the file.", calls: int = 1) -> str:
    """Return an answer of that format with calls of :func:`write_tool`, each with a file of `size` characters."""
    text = content + fmt.content_separator + fmt.section_begin
    for index in range(calls):
        if index:
            text += fmt.call_separator
        text += fmt.call_begin + "write_file" + fmt.name_end.replace("{index}", str(index))
        arguments = {"path": f"src/file_{index}.py", "content": file_text(size), "mode": 420}
        if fmt.style == "json":
            text += json.dumps(arguments, ensure_ascii=False)
        else:
            written = []
            for key, value in arguments.items():
                string = isinstance(value, str)
                begin = fmt.arg_begin.replace("{key}", key).replace("{string}", "true" if string else "false")
                written.append(begin + (value if isinstance(value, str) else json.dumps(value)) + fmt.arg_end)
            text += fmt.arg_separator.join(written)
        text += fmt.call_end
    return text + fmt.section_end


class _Tokenizer:
    """As much of a tokenizer as vLLM's parsers ask for: the markers are tokens, all other text is token 0."""

    all_special_tokens: tuple[str, ...] = ()
    all_special_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.ids = {marker: number for number, marker in enumerate(_SINGLE, 1)}

    def get_vocab(self) -> dict[str, int]:
        return dict(self.ids)

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return "".join(_SINGLE[number - 1] if number else "" for number in token_ids)


@dataclass
class VllmParser:
    """One answer read by vLLM's parser. A parser of vLLM keeps state: make a new one for each answer."""

    parser: Any
    request: Any
    ids: Mapping[str, int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    #: Name and arguments of each call, as streamed.
    calls: list[tuple[str, list[str]]] = field(default_factory=list)

    def feed(self, piece: str) -> None:
        """Read the next piece."""
        token = self.ids.get(piece, 0)
        before, self.text = self.text, self.text + piece
        self.token_ids.append(token)
        self._take(
            self.parser.extract_tool_calls_streaming(
                before, self.text, piece, self.token_ids, self.token_ids, [token], self.request
            )
        )

    def finish(self) -> None:
        """Say that the answer has ended."""
        finish = getattr(self.parser, "finish_streaming", None)
        if finish is not None:
            self._take(finish())

    def stream(self, parts: Sequence[str]) -> None:
        """Read a whole answer, piece by piece."""
        for part in parts:
            self.feed(part)
        self.finish()

    def plain(self, text: str) -> None:
        """Read a whole answer at once."""
        found = self.parser.extract_tool_calls(text, self.request)
        self.content = [found.content or ""]
        self.calls = [(call.function.name, [call.function.arguments]) for call in found.tool_calls]

    def _take(self, delta: Any) -> None:
        if delta is None:
            return
        if delta.content:
            self.content.append(delta.content)
        for call in delta.tool_calls or ():
            while len(self.calls) <= call.index:
                self.calls.append(("", []))
            function = call.function
            if function is None:
                continue
            # Some parsers hand out dicts, some objects.
            given = function if isinstance(function, dict) else {"name": function.name, "arguments": function.arguments}
            name, arguments = self.calls[call.index]
            if given.get("arguments"):
                arguments.append(given["arguments"])
            self.calls[call.index] = (given.get("name") or name, arguments)


def vllm_parser(format_name: str, tools: Sequence[Mapping[str, Any]]) -> Callable[[], VllmParser]:
    """Return what makes vLLM's parser of a format, for requests with these tools.

    Raises:
        ImportError: vLLM is not installed.
        KeyError: vLLM has no parser of that format.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    kind = ToolParserManager.get_tool_parser(VLLM_NAMES[format_name])
    request = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "x"}], tools=[dict(tool) for tool in tools], tool_choice="auto"
    )
    tokenizer = _Tokenizer()
    return lambda: VllmParser(kind(tokenizer, request.tools), request, tokenizer.ids)


def ours_stream(format_name: str, policy: ToolPolicy, parts: Sequence[str]) -> Parser:
    """Read a whole answer with our parser, piece by piece."""
    parser = Parser(get_format(format_name), policy)
    feed = parser.feed
    for part in parts:
        feed(part)
    parser.finish()
    return parser


def ours_plain(format_name: str, policy: ToolPolicy, text: str) -> Parser:
    """Read a whole answer with our parser at once."""
    parser = Parser(get_format(format_name), policy)
    parser.feed(text)
    parser.finish()
    return parser


def seconds_per_run(run: Callable[[], object], *, repeats: int = 5, at_least: float = 0.05) -> float:
    """Return the least processor seconds that one run takes, over repeats of at least `at_least` seconds each.

    The least, not the median: what disturbs a run only ever lengthens it.
    """
    run()
    return min(_sample(run, at_least) for _ in range(repeats))


def microseconds_per_piece(
    format_name: str, policy: ToolPolicy, sizes: Sequence[int], *, repeats: int = 7, at_least: float = 0.05
) -> list[float]:
    """Return what one piece of about four characters costs our parser, in microseconds, by the argument's size.

    Samples of all sizes take turns and last about as long, so that what else the machine does meets them alike.
    """
    fmt = get_format(format_name)
    answers = [pieces(answer(fmt, size)) for size in sizes]
    best = [float("inf")] * len(sizes)
    for _ in range(repeats):
        for number, parts in enumerate(answers):
            spent = _sample(lambda parts=parts: ours_stream(format_name, policy, parts), at_least)  # type: ignore[misc]
            best[number] = min(best[number], spent / len(parts) * 1e6)
    return best


def _sample(run: Callable[[], object], at_least: float) -> float:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        count = 0
        begin = time.thread_time()
        while True:
            run()
            count += 1
            spent = time.thread_time() - begin
            if spent >= at_least:
                return spent / count
    finally:
        if enabled:
            gc.enable()
