# SPDX-License-Identifier: Apache-2.0
"""Prefill on one worker and decode on another answers token for token as one aggregated worker does."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from serving_stack.model import prompt_tokens
from serving_stack.state import free_ports
from support.stack import Stack

pytestmark = pytest.mark.engines

#: Tokens per answer.
ANSWER = 24


@pytest.fixture(scope="module")
def block(stack: Stack) -> int:
    """The block size, read from the prefill worker."""
    found = re.search(r'cache_config_info\{[^}]*\bblock_size="(\d+)"', stack.metrics("prefill"))
    assert found is not None
    return int(found[1])


@pytest.fixture(scope="module")
def aggregated(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The profile with one worker that prefills and decodes, the same model and block size."""
    one = Stack(tmp_path_factory.mktemp("aggregated"), free_ports(1, above=stack.port + 100)[0], "cpu-agg")
    try:
        one.up()
        yield one
    finally:
        one.command("down", check=False)


@pytest.mark.parametrize("length", ["1", "B-1", "B", "B+1", "1000", "6000"])
def test_disaggregated_equals_aggregated(stack: Stack, aggregated: Stack, block: int, length: str) -> None:
    count = {"B-1": block - 1, "B": block, "B+1": block + 1}.get(length) or int(length)
    prompt = prompt_tokens(count)
    assert len(prompt) == count
    alone = aggregated.complete(prompt, max_tokens=ANSWER)
    expected = alone["nvext"]["completion_token_ids"]
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
