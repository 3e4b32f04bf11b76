# SPDX-License-Identifier: Apache-2.0
"""Time to first token with the prompt's prefix in the worker's own cache, in Mooncake's store, and nowhere."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import httpx

from serving_stack.model import prompt_tokens
from serving_stack.state import free_ports
from support.bench import Bench
from support.stack import Stack, until


def _first_token(stack: Stack, prompt: list[int], prefill: str) -> float:
    """Return milliseconds from a request, prefilled by one worker, to the first token of its stream."""
    body = {"model": stack.model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    begun = time.perf_counter()
    with httpx.stream(
        "POST",
        f"{stack.state.base_url}/completions",
        json={**body, "stream": True},
        headers=stack.to(prefill),
        timeout=120,
        trust_env=False,
    ) as answer:
        taken = 0.0
        for line in answer.iter_lines():
            if not taken and line.startswith("data: {") and json.loads(line[6:])["choices"]:
                taken = time.perf_counter() - begun
    assert taken, f"no token: status {answer.status_code}"
    return taken * 1e3


def _measure(stack: Stack, prompt: list[int], prefill: str, source: str) -> float:
    before = stack.sources(prefill)
    taken = _first_token(stack, prompt, prefill)
    gained = stack.gained(prefill, before, len(prompt))
    reused = 0 if source == "local_compute" else (len(prompt) - 1) // 32 * 32
    assert gained.get(source, 0) == (reused or len(prompt)), f"{len(prompt)} tokens came from {gained}"
    return taken


def _saved(stack: Stack, keys: float) -> None:
    until(lambda: stack.store("master_key_count") >= keys, 30, f"{keys} keys in the store")


def run(bench: Bench) -> None:
    """Two prefill workers: one computes and saves, the other loads, then the first finds its own."""
    lengths = (1000, 4000) if bench.quick else (500, 1000, 2000, 4000, 8000)
    repeats = 2 if bench.quick else 7
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(Path(folder), free_ports(1, above=23000)[0])
        stack.up("--prefill", "2")
        try:
            for worker in ("prefill-0", "prefill-1"):  # the first transfer of each shakes hands
                stack.complete(prompt_tokens(64), prefill=worker)
            for length in lengths:
                nowhere, stored, own = [], [], []
                for repeat in range(repeats):
                    # Not a prefix of each other: prompts of different lengths start at different places.
                    prompt = prompt_tokens(length + 1 + repeat)[:length]
                    keys = stack.store("master_key_count")
                    nowhere.append(_measure(stack, prompt, "prefill-0", "local_compute"))
                    _saved(stack, keys + length // 32)
                    stored.append(_measure(stack, prompt, "prefill-1", "external_kv_transfer"))
                    own.append(_measure(stack, prompt, "prefill-0", "local_cache_hit"))
                name = "computed in the same run"
                bench.row(f"{length} tokens, from the store", "ms", ours=stored, reference=nowhere, reference_name=name)
                bench.row(f"{length} tokens, own cache", "ms", ours=own, reference=nowhere, reference_name=name)
        finally:
            stack.command("down")
    bench.note("A prompt's last 1 to 32 tokens are computed in each case. One request at a time; TCP, one machine.")
