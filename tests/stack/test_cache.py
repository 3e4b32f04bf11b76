# SPDX-License-Identifier: Apache-2.0
"""The cache does its work: a second turn computes only what is new."""

from __future__ import annotations

from typing import Any

import pytest

from support.stack import Stack

pytestmark = pytest.mark.engines


def _ask(stack: Stack, messages: list[dict[str, Any]]) -> tuple[Any, dict[str, float]]:
    """Ask, and return the answer with the tokens that the prefill worker computed and found cached for it."""
    before = stack.sources("prefill")
    answer = stack.client.chat.completions.create(
        model=stack.model,
        messages=messages,
        temperature=0,
        max_tokens=16,
    )
    assert answer.usage is not None
    total = answer.usage.prompt_tokens
    gained = stack.gained("prefill", before, total)
    assert sum(gained.values()) == total
    return answer, gained


def test_second_turn_reuses_its_history(stack: Stack) -> None:
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "Explain this function.\n" + "def lookup(key):\n    return table[key]\n" * 60}
    ]
    first, first_gained = _ask(stack, history)
    assert first.usage.prompt_tokens > 500
    assert first_gained["local_compute"] == first.usage.prompt_tokens
    history += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And what if the key is missing?"},
    ]
    second, gained = _ask(stack, history)
    cached = second.usage.prompt_tokens_details.cached_tokens
    # Whole blocks of the first prompt come from the cache.
    assert cached >= first.usage.prompt_tokens // 32 * 32 - 32
    assert cached % 32 == 0
    assert gained["local_cache_hit"] == cached
    assert gained["local_compute"] == second.usage.prompt_tokens - cached
