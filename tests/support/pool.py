# SPDX-License-Identifier: Apache-2.0
"""The blocks that a prefill/decode pair hands out under agent load: vLLM's own block managers, without an engine.

    moved = transfers(AgentWorkload(sessions=12).scaled(1 / 25), prefill=1024, decode=512)

Prefix caching is on at both ends, and each turn is admitted, computed, pulled, decoded and freed as vLLM's scheduler
and its pull connector do it, though a prompt is computed in one piece. Turns overlap in the workload's nominal times.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from support.sessions import AgentWorkload, Request

__all__ = ["transfers"]


def transfers(workload: AgentWorkload, *, prefill: int, decode: int) -> list[tuple[list[int], list[int]]]:
    """Replay a workload and return the block ids of each transfer, of decode and of prefill, in the prompt's order.

    What decode still has cached is not transferred.

    Args:
        workload: The requests; a block is one of its own.
        prefill, decode: Blocks of the two pools, vLLM's null block included. A request waits until its prompt fits.

    Raises ValueError for a prompt that never fits, and RuntimeError where answers outgrow the pool of decode: vLLM
    would preempt, which is not replayed.
    """
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
    from vllm.v1.request import Request as Scheduled

    size = workload.block_size
    init_none_hash(sha256)
    hasher = get_request_block_hasher(size, sha256)
    spec = MLAAttentionSpec(block_size=size, num_kv_heads=1, head_size=576, dtype=torch.uint8)

    def pool(blocks: int) -> Any:
        config = KVCacheConfig(blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        return KVCacheManager(config, max_model_len=blocks * size, scheduler_block_size=size, hash_block_size=size)

    here, there = pool(decode), pool(prefill)
    moved = []

    def admitted(manager: Any, request: Any) -> bool:
        cached, known, _ = manager.get_computed_blocks(request)
        rest = request.num_tokens - known
        if manager is there:
            return manager.allocate_slots(request, rest, known, cached) is not None
        pulled = {"num_external_computed_tokens": rest, "delay_cache_blocks": True}
        return manager.allocate_slots(request, 0, known, cached, **pulled) is not None

    def serve(turn: Request) -> Iterator[float]:
        """Take a turn through both pools; yields the seconds until it goes on."""
        name, sampling = f"{turn.session_id} {turn.turn}", SamplingParams(max_tokens=turn.output_length)
        if turn.input_length > (min(prefill, decode) - 1) * size:
            raise ValueError(f"{name}: a prompt of {turn.input_length} tokens does not fit")
        source, target = (Scheduled(name, turn.tokens(), sampling, None, block_hasher=hasher) for _ in range(2))
        while not admitted(there, source):
            yield workload.per_token_s
        yield workload.first_token_s
        while not admitted(here, target):
            yield workload.per_token_s
        local = here.get_blocks(name).get_unhashed_block_ids()
        moved.append((local, there.get_block_ids(name)[0][-len(local) :]))
        yield workload.per_token_s
        there.free(source)
        here.cache_blocks(target, turn.input_length)
        target.num_computed_tokens = turn.input_length
        answer = turn.answer_tokens()[:-1]  # the last token is never computed
        for start in range(0, len(answer), size):
            new = answer[start : start + size]
            target.append_output_token_ids(new)
            if here.allocate_slots(target, len(new)) is None:
                raise RuntimeError(f"{name}: {decode} blocks do not hold the answers")
            target.num_computed_tokens += len(new)
            yield len(new) * workload.per_token_s
        here.free(target)

    running = [(turn.arrival_s, number, serve(turn)) for number, turn in enumerate(workload.requests())]
    while running:  # a heap from the start: requests come in order of arrival
        now, number, steps = running[0]
        wait = next(steps, None)
        if wait is None:
            heapq.heappop(running)
        else:
            heapq.heapreplace(running, (now + wait, number, steps))
    return moved
