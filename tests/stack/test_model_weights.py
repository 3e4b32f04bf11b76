# SPDX-License-Identifier: Apache-2.0
"""The tiny model's answers, computed by transformers: clear winners, no circles, and every cached block matters.

The equality tests of this folder compare tokens. They show something only if a rounding error cannot change a token
and a wrong block of the cache does, which is asserted here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from serving_stack.model import prompt_tokens, text_tokenizer, write_model

#: Tokens per answer.
ANSWER = 24
#: The least distance of the two best logits in any step. Measured between runs of vLLM 0.31 on AMX that read these
#: prompts in pieces of 96, 512 and 8,192 tokens, with blocks of 32 and 128: margins move by 0.08 at most, 0.03 mostly.
MARGIN = 0.15
#: The prompts that the stack's equality tests send: B is the block size, 32 or 128.
SHORT = (1, 31, 32, 33, 127, 128, 129, 1000)
#: Tokens per block, and the blocks that are exchanged: all of 1,000 tokens with the stack's block size, and of 6,000
#: tokens a sample with vLLM's own for AMX. (There a single block of 32 mostly goes unnoticed.)
BLOCKS = (32, range(1000 // 32))
LONG_BLOCKS = (128, (0, 18, 28, 37, 45))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "glm-tiny")


@pytest.fixture(scope="module")
def model(directory: Path) -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    with torch.inference_mode():
        # Where the processor multiplies no bfloat16, float32 is faster, and closer still.
        dtype = torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
        yield transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    torch.set_num_threads(threads)


class Conversation:
    """A cache that holds all of a prompt but its last token, and greedy answers from there.

    Args:
        model: The model.
        prompt: At least one token.
        chunk: The prompt is read in pieces of so many tokens.
    """

    def __init__(self, model: Any, prompt: Sequence[int], chunk: int = 2048) -> None:
        self._model, self._last = model, prompt[-1]
        self.cache = transformers.DynamicCache(config=model.config)
        for start in range(0, len(prompt) - 1, chunk):
            self._step(prompt[start : min(start + chunk, len(prompt) - 1)])

    def _step(self, tokens: Sequence[int]) -> Any:
        found = self._model(input_ids=torch.tensor([tokens]), past_key_values=self.cache, logits_to_keep=1)
        return found.logits[0, -1].float()

    def answer(self, expected: Sequence[int] = (), force: bool = False) -> tuple[list[int], list[float]]:
        """Return the answer's tokens and the margin of each: first logit less second.

        With `expected`, stop at the first token that differs from it. With `force`, continue with the expected token
        instead, and measure the distance of the two logits that were the best then: the margins are comparable.
        """
        tokens: list[int] = []
        margins: list[float] = []
        logits = self._step([self._last])
        for step in range(ANSWER):
            best = logits.topk(2)
            token = int(best.indices[0])
            margins.append(float(best.values[0] - best.values[1]) * (-1 if force and token != expected[step] else 1))
            tokens.append(expected[step] if force else token)
            if not force and expected and tokens[-1] != expected[step]:
                break
            if step < ANSWER - 1:
                logits = self._step([tokens[-1]])
        if len(margins) > 1:
            self.cache.crop(1 - len(margins))
        self.cache.crop(-1)
        return tokens, margins

    def swap(self, other: Conversation, block: slice, layers: slice = slice(None)) -> None:
        """Exchange a piece of the cache with another conversation's: keys, values and positions of a wrong prompt."""
        for mine, theirs in zip(self.cache.layers[layers], other.cache.layers[layers], strict=True):
            for name in ("keys", "values"):
                one, two = getattr(mine, name), getattr(theirs, name)
                kept = one[:, :, block].clone()
                one[:, :, block] = two[:, :, block]
                two[:, :, block] = kept


def _wrong(length: int) -> list[int]:
    """A prompt of the same length and the same world, with other tokens at every place."""
    return prompt_tokens(length + 5)[:length]


@pytest.fixture(scope="module")
def thousand(model: Any) -> tuple[Conversation, Conversation]:
    return Conversation(model, prompt_tokens(1000)), Conversation(model, _wrong(1000))


@pytest.fixture(scope="module")
def six_thousand(model: Any) -> tuple[Conversation, Conversation]:
    return Conversation(model, prompt_tokens(6000)), Conversation(model, _wrong(6000))


@pytest.fixture(scope="module")
def long_answer(six_thousand: tuple[Conversation, Conversation]) -> tuple[list[int], list[float]]:
    """The right answer to the long prompt, once: each step goes through all of the cache."""
    return six_thousand[0].answer()


def _shows_a_clear_answer(tokens: list[int], margins: list[float]) -> None:
    assert len(tokens) == ANSWER
    assert min(margins) >= MARGIN, [round(margin, 3) for margin in margins]
    assert len(set(tokens)) >= 16, f"goes in circles: {tokens}"
    text = text_tokenizer().decode(tokens, skip_special_tokens=False)
    assert text.replace("\n", " ").isprintable()
    assert text.isascii()


@pytest.mark.parametrize("length", SHORT)
def test_every_step_has_a_clear_winner(model: Any, length: int) -> None:
    """Also when the prompt is read in pieces: other shapes round differently, and move no margin by half of itself."""
    whole = Conversation(model, prompt_tokens(length))
    tokens, margins = whole.answer()
    _shows_a_clear_answer(tokens, margins)
    _, others = Conversation(model, prompt_tokens(length), chunk=96).answer(tokens, force=True)
    moved = max(abs(one - other) for one, other in zip(margins, others, strict=True))
    assert moved < min(margins) / 2, f"margins moved by {moved:.3f}, the least is {min(margins):.3f}"


def test_a_long_prompt_has_clear_winners_too(long_answer: tuple[list[int], list[float]]) -> None:
    _shows_a_clear_answer(*long_answer)


def _unnoticed(
    right: Conversation, wrong: Conversation, expected: list[int], size: int, blocks: Sequence[int]
) -> list[int]:
    """Exchange one block after the other; return those whose exchange leaves the answer as expected."""
    found = []
    for block in blocks:
        place = slice(block * size, (block + 1) * size)
        right.swap(wrong, place)
        if right.answer(expected)[0] == expected:
            found.append(block)
        right.swap(wrong, place)
    return found


def test_every_block_of_a_prompt_matters(thousand: tuple[Conversation, Conversation]) -> None:
    right, wrong = thousand
    expected, _ = right.answer()
    assert _unnoticed(right, wrong, expected, *BLOCKS) == []
    assert right.answer()[0] == expected, "the blocks are back, so the answer should be"


def test_blocks_of_a_long_prompt_matter(
    six_thousand: tuple[Conversation, Conversation], long_answer: tuple[list[int], list[float]]
) -> None:
    assert _unnoticed(*six_thousand, long_answer[0], *LONG_BLOCKS) == []


def test_every_layer_matters(model: Any, thousand: tuple[Conversation, Conversation]) -> None:
    """A transfer that forgets one layer is seen."""
    right, wrong = thousand
    expected, _ = right.answer()
    for layer in range(model.config.num_hidden_layers):
        right.swap(wrong, slice(0, 999), slice(layer, layer + 1))
        changed = right.answer(expected)[0] != expected
        right.swap(wrong, slice(0, 999), slice(layer, layer + 1))
        assert changed, f"layer {layer}"


def test_a_chat_ends_by_itself(model: Any, directory: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    question = [{"role": "user", "content": "What is a lease?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, enable_thinking=False, return_dict=False
    )
    found = model.generate(torch.tensor([prompt]), max_new_tokens=600, do_sample=False)[0, len(prompt) :].tolist()
    assert tokenizer.decode(found[-1:]) == "<|endoftext|>"
    assert len(found) > 4
    assert tokenizer.decode(found, skip_special_tokens=True)


def test_transformers_reads_tokenizer_and_template(directory: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Größe <b>"},
        {"role": "user", "content": "Read it."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "read", "arguments": {"path": "a", "n": 2}}}],
        },
        {"role": "tool", "content": "done"},
    ]
    tools = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert text.endswith(
        "<|user|>Read it.<|assistant|><think></think><tool_call>read\n"
        "<arg_key>path</arg_key>\n<arg_value>a</arg_value>\n<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
        "<|observation|><tool_response>done</tool_response><|assistant|><think>"
    )
    ids = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert ids == text_tokenizer().encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    kept = tokenizer.decode(ids, skip_special_tokens=True)
    assert "<|" not in kept
    assert "<tool_call>read\n<arg_key>path</arg_key>" in kept
    assert tokenizer.eos_token == "<|endoftext|>"
