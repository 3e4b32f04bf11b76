# SPDX-License-Identifier: Apache-2.0
"""What any OpenAI client sees: answers, usage, the workers behind them, errors that name their fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from support.stack import Stack, until

pytestmark = pytest.mark.engines

QUESTION = [{"role": "user", "content": "Write a haiku about KV caches."}]


def _tokenizer(stack: Stack) -> Tokenizer:
    return Tokenizer.from_file(str(Path(stack.state.model) / "tokenizer.json"))


def test_plain_and_streamed_answers_are_equal_and_usage_is_right(stack: Stack) -> None:
    request: dict[str, Any] = {"model": stack.model, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    plain = stack.client.chat.completions.create(**request)
    text = plain.choices[0].message.content
    assert text
    pieces, finish, usage = [], None, None
    for chunk in stack.client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            finish = choice.finish_reason or finish
    assert "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) > 1, "the stream came in one piece"
    assert finish == plain.choices[0].finish_reason
    assert plain.usage is not None
    assert usage is not None
    counts = (plain.usage.prompt_tokens, plain.usage.completion_tokens, plain.usage.total_tokens)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == counts
    # The text's own tokens and the end-of-text token that ended it, or as many as were allowed.
    written = 32 if finish == "length" else len(_tokenizer(stack).encode(text, add_special_tokens=False).ids) + 1
    assert plain.usage.completion_tokens == written
    assert plain.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens
    assert plain.usage.prompt_tokens == _rendered(stack, QUESTION)


def _rendered(stack: Stack, messages: list[dict[str, str]]) -> int:
    """Count the tokens of the prompt that the model's own chat template makes of some messages."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(stack.state.model)
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    return len(rendered["input_ids"])


def test_usage_counts_a_prompt_of_token_ids_exactly(stack: Stack) -> None:
    answer = stack.complete(list(range(300, 377)), max_tokens=9)
    assert answer["usage"]["prompt_tokens"] == 77
    assert answer["usage"]["completion_tokens"] == 9 == len(answer["nvext"]["completion_token_ids"])


def test_answer_names_its_workers_and_kv_went_through_nixl(stack: Stack) -> None:
    names = ("vllm:nixl_bytes_transferred_count", "vllm:nixl_bytes_transferred_sum", "vllm:nixl_num_descriptors_sum")
    before = [stack.metric("decode", name) for name in names]
    workers = stack.complete(list(range(400, 464)), max_tokens=2)["nvext"]["worker_id"]
    state = stack.state
    assert str(workers["prefill_worker_id"]) == state.components["prefill"].instance
    assert str(workers["decode_worker_id"]) == state.components["decode"].instance
    until(lambda: stack.metric("decode", names[0]) == before[0] + 1, 20, "NIXL's counters count one transfer")
    moved, descriptors = (stack.metric("decode", name) - was for name, was in zip(names[1:], before[1:], strict=True))
    config = json.loads((Path(state.model) / "config.json").read_text())
    row = 2 * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    # Two blocks of 32 tokens in every layer, one run: a descriptor a layer.
    assert moved == 2 * 32 * row * config["num_hidden_layers"]
    assert descriptors == config["num_hidden_layers"]


def _post(stack: Stack, body: dict[str, Any] | str) -> tuple[int, str]:
    answer = stack.post("/chat/completions", body)
    return answer.status_code, answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_model_is_refused(stack: Stack, stream: bool) -> None:
    status, text = _post(stack, {"model": "nobody", "messages": QUESTION, "stream": stream})
    assert status == 404
    assert "Model not found" in text


def test_malformed_json_is_refused_with_its_place(stack: Stack) -> None:
    status, text = _post(stack, '{"model": "glm-tiny", "messages": [')
    assert status == 400
    assert "line 1 column" in text


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_over_the_limit_is_refused_with_both_lengths(stack: Stack, stream: bool) -> None:
    long = [{"role": "user", "content": "import os\n" * 9000}]
    status, text = _post(stack, {"model": stack.model, "messages": long, "stream": stream})
    assert status == 400
    details = json.loads(text)["details"]
    assert details["type"] == "context_length"
    assert details["limit"] == 8192 < details["actual"]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_negative_max_tokens_is_refused_with_its_value(stack: Stack, field: str) -> None:
    status, text = _post(stack, {"model": stack.model, "messages": QUESTION, field: -5})
    assert status == 400
    assert "-5" in text


def test_chat_command_streams_and_prints_json(stack: Stack) -> None:
    said = stack.command("chat", "--max-tokens", "12", "Hello")
    assert said.stdout.strip()
    whole = json.loads(stack.command("chat", "--json", "--max-tokens", "12", stack.model, "Hello").stdout)
    assert whole["model"] == stack.model
    assert whole["choices"][0]["message"]["content"].strip()
    assert whole["usage"]["completion_tokens"] <= 12
    refused = stack.command("chat", "nobody", "Hello", check=False)
    assert refused.returncode == 1
    assert "404" in refused.stderr
    assert "nobody" in refused.stderr or "not found" in refused.stderr.lower()
