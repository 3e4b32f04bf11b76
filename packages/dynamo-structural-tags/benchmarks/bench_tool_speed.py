# SPDX-License-Identifier: Apache-2.0
"""Grammars and parsers: build, compile and mask against xgrammar's own tags and llguidance; parsing against vLLM's."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llguidance
import llguidance.hf
import llguidance.numpy
import xgrammar as xgr
from transformers import PreTrainedTokenizerFast

from dynamo_structural_tags import _tags
from dynamo_structural_tags._engine import Model, Settings, _Answer, prepare
from dynamo_structural_tags._format import Format
from dynamo_structural_tags._request import ToolPolicy
from dynamo_structural_tags.formats import FORMATS
from serving_stack.model import text_tokenizer, write_model
from support import tool_parsers
from support.bench import Bench
from support.tool_walks import vocabulary

#: Our format -> xgrammar's name for its own tag; it has none for GLM-4.5.
BUILT_IN = {
    "glm47": "glm_4_7",
    "qwen3_coder": "qwen_3_coder",
    "hermes": "qwen_3",
    "kimi_k2": "kimi",
    "deepseek_v3_2": "deepseek_v3_2",
    "deepseek_v4": "deepseek_v4",
}
#: Texts of a call's longest argument that parsers are measured with, characters.
SMALL, MIDDLE, LARGE = 1_000, 20_000, 100_000


def _tool(name: str, required: Sequence[str], **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


_TEXT = {"type": "string"}
_FLAG = {"type": "boolean"}
_COUNT = {"type": "integer", "minimum": 0}
#: The tools of a coding agent, in the shapes such agents declare.
TOOLS = [
    _tool("read_file", ["path"], path=_TEXT, offset=_COUNT, limit=_COUNT),
    _tool("write_file", ["path", "content"], path=_TEXT, content=_TEXT),
    _tool("bash", ["command"], command=_TEXT, timeout={"type": "integer"}, background=_FLAG, description=_TEXT),
    _tool("glob", ["pattern"], pattern=_TEXT, path=_TEXT),
    _tool(
        "grep",
        ["pattern"],
        pattern=_TEXT,
        path=_TEXT,
        output={"type": "string", "enum": ["content", "files", "count"]},
        context=_COUNT,
        ignore_case=_FLAG,
    ),
    _tool(
        "edit",
        ["path", "edits"],
        path=_TEXT,
        edits={
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"old": _TEXT, "new": _TEXT, "all": _FLAG},
                "required": ["old", "new"],
                "additionalProperties": False,
            },
        },
    ),
    _tool(
        "todo",
        ["items"],
        items={
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "id": _TEXT,
                    "text": _TEXT,
                    "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                },
                "required": ["id", "text", "status"],
                "additionalProperties": False,
            },
        },
    ),
    _tool("fetch", ["url"], url=_TEXT, prompt=_TEXT, retries={"type": "integer"}),
]
#: What is called: a file, numbers and flags, an array of objects.
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("write_file", {"path": "src/a.py", "content": tool_parsers.file_text(2_000).replace("</", "<\\/")}),
    ("grep", {"pattern": "def \\w+", "path": "src", "output": "content", "context": 3, "ignore_case": True}),
    ("edit", {"path": "src/a.py", "edits": [{"old": "x = 1\n", "new": "x = 2\n", "all": False}] * 4}),
]


class _Masks:
    """One answer, stepped through under a compiled grammar."""

    def __init__(self, text: str) -> None:
        self.tokens: list[int] = text_tokenizer().encode(text, add_special_tokens=False).ids
        self.row = xgr.allocate_token_bitmask(1, vocabulary().info.vocab_size)

    def microseconds(self, compiled: xgr.CompiledGrammar) -> float:
        """Return the time per token: the mask, and the token accepted."""
        matcher = xgr.GrammarMatcher(compiled)
        begin = time.perf_counter()
        for token in self.tokens:
            matcher.fill_next_token_bitmask(self.row)
            if not matcher.accept_token(token):
                raise AssertionError(f"{vocabulary().bytes[token]!r} refused")
        return (time.perf_counter() - begin) * 1e6 / len(self.tokens)


def _fresh(fmt: Format, policy: ToolPolicy) -> dict[str, Any]:
    _tags._CACHE.clear()
    return fmt.structural_tag(policy)


def _grammars(bench: Bench, fmt: Format) -> None:
    policy = tool_parsers.policy_of(TOOLS, tool_choice="auto")
    known = vocabulary()
    masks = _Masks("I look.\n\n" + fmt.render_calls(CALLS, policy=policy))

    def ours() -> xgr.CompiledGrammar:
        return known.compile(_fresh(fmt, policy))

    def theirs() -> xgr.CompiledGrammar:
        tag = xgr.get_model_structural_tag(BUILT_IN[fmt.name], TOOLS, "auto", reasoning="disabled")
        return known.compiler.compile_structural_tag(tag)

    reference = f"xgrammar {version('xgrammar')} {BUILT_IN[fmt.name]}"
    compiled, peer = ours(), theirs()

    def whole(make: Callable[[], xgr.CompiledGrammar]) -> float:
        begin = time.perf_counter()
        made = make()
        building = (time.perf_counter() - begin) * 1e6
        return building / len(masks.tokens) + masks.microseconds(made)

    bench.compare(
        f"{fmt.name}: build + compile + mask, per token",
        "us",
        ours=lambda: whole(ours),
        reference=lambda: whole(theirs),
        reference_name=reference,
        aim="<= 1.1",
        repeats=9,
    )
    bench.compare_time(
        f"{fmt.name}: build + compile", "ms", ours=ours, reference=theirs, reference_name=reference, repeats=9
    )
    bench.compare(
        f"{fmt.name}: mask, per token",
        "us",
        ours=lambda: masks.microseconds(compiled),
        reference=lambda: masks.microseconds(peer),
        reference_name=reference,
        repeats=9,
    )


def _guidance_grammar(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return llguidance's grammar of Hermes calls; the markers are tokens of the vocabulary."""
    spacing = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    names = " | ".join(f"call_{number}" for number in range(len(tools)))
    lines = ['start: one ("\\n" one)*', f'one: <tool_call> "\\n{{\\"name\\": \\"" ({names}) "}}\\n" </tool_call>']
    for number, tool in enumerate(tools):
        function = tool["function"]
        lines.append(f'call_{number}: "{function["name"]}\\", \\"arguments\\": " value_{number}')
        lines.append(f"value_{number}: %json {json.dumps({**function['parameters'], 'x-guidance': spacing})}")
    return "\n".join(lines)


def _guidance(bench: Bench) -> None:
    """Measure Hermes beside llguidance: the same calls, the same tokens."""
    fmt = FORMATS["hermes"]
    policy = tool_parsers.policy_of(TOOLS, tool_choice="required")
    masks = _Masks(fmt.render_calls(CALLS, policy=policy))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=text_tokenizer(), eos_token="<|endoftext|>")
    tokenizer = llguidance.hf.from_tokenizer(wrapped, n_vocab=vocabulary().info.vocab_size)
    row = llguidance.numpy.allocate_token_bitmask(1, tokenizer.vocab_size)

    def theirs() -> llguidance.LLMatcher:
        return llguidance.LLMatcher(tokenizer, _guidance_grammar(TOOLS))

    def stepped() -> float:
        matcher = theirs()
        begin = time.perf_counter()
        for token in masks.tokens:
            llguidance.numpy.fill_next_token_bitmask(matcher, row, 0)
            if not matcher.consume_token(token):
                raise AssertionError(f"{vocabulary().bytes[token]!r} refused: {matcher.get_error()}")
        return (time.perf_counter() - begin) * 1e6 / len(masks.tokens)

    reference = f"llguidance {version('llguidance')}"
    compiled = vocabulary().compile(fmt.structural_tag(policy))
    bench.compare_time(
        "hermes: build + compile",
        "ms",
        ours=lambda: vocabulary().compile(_fresh(fmt, policy)),
        reference=theirs,
        reference_name=reference,
    )
    bench.compare(
        "hermes: mask, per token",
        "us",
        ours=lambda: masks.microseconds(compiled),
        reference=stepped,
        reference_name=reference,
    )


def _parsers(bench: Bench, fmt: Format) -> None:
    tools = [tool_parsers.write_tool()]
    policy = tool_parsers.policy_of(tools)
    texts = {size: tool_parsers.answer(fmt, size) for size in (SMALL, MIDDLE, LARGE)}
    parts = {size: tool_parsers.pieces(text) for size, text in texts.items()}
    peer = tool_parsers.vllm_parser(fmt.name, tools)
    name = f"vLLM's {tool_parsers.VLLM_NAMES[fmt.name]}"

    def streamed(size: int) -> float:
        run = lambda: tool_parsers.ours_stream(fmt.name, policy, parts[size])  # noqa: E731
        return tool_parsers.seconds_per_run(run, repeats=1) * 1e6 / len(parts[size])

    bench.compare(
        f"{fmt.name}: streamed, per piece of 4 characters, {LARGE // 1000} kB",
        "us",
        ours=lambda: streamed(LARGE),
        reference=lambda: streamed(SMALL),
        reference_name=f"the same at {SMALL // 1000} kB",
        aim="<= 1.2",
    )
    bench.compare_time(
        f"{fmt.name}: streamed, {MIDDLE // 1000} kB",
        "ms",
        ours=lambda: tool_parsers.ours_stream(fmt.name, policy, parts[MIDDLE]),
        reference=lambda: peer().stream(parts[MIDDLE]),
        reference_name=name,
        aim="<= 0.2",
        repeats=3,
        warmup=0,
    )
    bench.compare_time(
        f"{fmt.name}: at once, {MIDDLE // 1000} kB",
        "ms",
        ours=lambda: tool_parsers.ours_plain(fmt.name, policy, texts[MIDDLE]),
        reference=lambda: peer().plain(texts[MIDDLE]),
        reference_name=name,
        aim="<= 1.0",
    )


def _chunks(bench: Bench) -> None:
    """Measure what the frontend does between an output of the engine (one token) and the chunks that it sends on."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        tokenizer = text_tokenizer()
        model = Model("glm", Path(folder), FORMATS["glm47"], {"structural_tag": {"scope": "always"}}, tokenizer)
        tools = [tool_parsers.write_tool()]
        asked = {"messages": [{"role": "user", "content": "Go."}], "tools": tools, "tool_choice": "required"}
        prepared = replace(prepare(model, asked), mode="closed")
    text = tool_parsers.answer(model.format, MIDDLE, content="")
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    spent: list[float] = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(3):
            answer = _Answer(model, prepared, Settings(stream_arguments=True), "chatcmpl-1", 0)
            for token in tokens:
                begin = time.perf_counter()
                answer.read({"token_ids": [token]})
                spent.append((time.perf_counter() - begin) * 1e6)
    finally:
        if collecting:
            gc.enable()
    spent.sort()
    for percent in (50, 99):
        bench.row(f"frontend, per streamed chunk, p{percent}", "us", ours=[spent[len(spent) * percent // 100]])
    bench.note(
        f"Chunks: GLM-4.7, {len(tokens)} outputs of one token each, arguments streamed: detokenizing, parsing and the "
        "chunk, without its JSON text and the transport."
    )


def run(bench: Bench) -> None:
    for fmt in FORMATS.values():
        if fmt.name in BUILT_IN:
            _grammars(bench, fmt)
    _guidance(bench)
    _chunks(bench)
    for fmt in FORMATS.values():
        _parsers(bench, fmt)
    bench.note(
        f"Grammars: {len(TOOLS)} tools of a coding agent, tool_choice auto, nothing cached, one answer with "
        f"{len(CALLS)} calls in tokens of the embedded model's vocabulary of {vocabulary().info.vocab_size}."
    )
    bench.note("Parsers: one call that writes a file; vLLM's own parsers get markers as one piece and one token each.")
