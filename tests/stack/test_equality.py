# SPDX-License-Identifier: Apache-2.0
"""Prefill on one worker and decode on another answers token for token as one aggregated worker does."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

import httpx
import pytest

from serving_stack.model import prompt_tokens
from serving_stack.profile import load
from serving_stack.state import free_ports
from support.processes import Process
from support.stack import Stack

#: Tokens per answer.
ANSWER = 24


@pytest.fixture(scope="module")
def block(stack: Stack) -> int:
    """The block size, read from the prefill worker."""
    found = re.search(r'cache_config_info\{[^}]*\bblock_size="(\d+)"', stack.metrics("prefill"))
    assert found is not None
    return int(found[1])


@pytest.fixture(scope="module")
def aggregated(stack: Stack, block: int) -> Iterator[str]:
    """One vLLM worker alone, the same model, cache and block size; yields its address."""
    (port,) = free_ports(1, above=stack.port + 100)
    environment = {name: str(value) for name, value in load("cpu").environment.items() if "${" not in str(value)}
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
        *("--model", stack.state.model, "--served-model-name", "alone", "--max-model-len", "8192"),
        *("--block-size", str(block), "--enforce-eager"),
    ]
    url = f"http://127.0.0.1:{port}"
    with Process(command, name="aggregated", ready=f"{url}/health", deadline_s=240, env={**os.environ, **environment}):
        yield url


@pytest.mark.parametrize("length", ["1", "B-1", "B", "B+1", "1000", "6000"])
def test_disaggregated_equals_aggregated(stack: Stack, aggregated: str, block: int, length: str) -> None:
    count = {"B-1": block - 1, "B": block, "B+1": block + 1}.get(length) or int(length)
    prompt = prompt_tokens(count)
    assert len(prompt) == count
    body = {
        "model": "alone",
        "prompt": prompt,
        "max_tokens": ANSWER,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    alone = httpx.post(f"{aggregated}/v1/completions", json=body, timeout=120)
    assert alone.status_code == 200, alone.text
    expected = alone.json()["choices"][0]["token_ids"]
    assert len(expected) == ANSWER
    assert len(set(expected)) > ANSWER // 3, f"the answer loops, so equality shows little: {expected}"
    answer = stack.complete(prompt, max_tokens=ANSWER)
    assert answer["nvext"]["completion_token_ids"] == expected
    assert answer["usage"]["prompt_tokens"] == count


def test_another_history_gives_another_answer(stack: Stack) -> None:
    """The counter-proof: if the decoder did not read the history it was sent, these answers would be equal."""
    prompt = prompt_tokens(1000)
    changed = [*prompt[:320], *reversed(prompt[320:352]), *prompt[352:]]
    assert changed != prompt
    one, other = (stack.complete(tokens, max_tokens=ANSWER) for tokens in (prompt, changed))
    assert one["nvext"]["completion_token_ids"] != other["nvext"]["completion_token_ids"]
