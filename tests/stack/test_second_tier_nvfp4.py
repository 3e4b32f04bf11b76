# SPDX-License-Identifier: Apache-2.0
"""The whole stack on rows of 352 bytes: Dynamo, two prefill workers, NIXL, Mooncake's store, decode."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from serving_stack.model import prompt_tokens
from serving_stack.state import free_ports
from support.stack import Stack, until

LAYERS, BLOCK, ROW, BF16, FP8 = 4, 32, 352, 576 * 2, 576
#: What the profile gives a worker's cache.
POOL = 1 << 30


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory, running: list[Stack]) -> Iterator[Stack]:
    """The profile `cpu-nvfp4` with two prefill workers; the stack of the tests before is ended first."""
    for other in running:
        other.command("down")
    one = Stack(tmp_path_factory.mktemp("nvfp4"), free_ports(1, above=21000)[0], "cpu-nvfp4")
    try:
        one.up("--prefill", "2")
        yield one
    finally:
        one.command("down", check=False)


def ask(tier: Stack, worker: str, tokens: list[int]) -> tuple[list[int], dict[str, float]]:
    """Ask, prefilled by `worker`; return the answer's tokens, and where the worker took the prompt's from."""
    before = tier.sources(worker)
    answer = tier.complete(tokens, prefill=worker)["nvext"]["completion_token_ids"]
    return answer, tier.gained(worker, before, len(tokens))


def test_what_one_worker_saved_another_loads_and_the_answer_is_the_same(tier: Stack) -> None:
    prompt = prompt_tokens(1000)
    keys, stored = tier.store("master_key_count"), tier.store("master_allocated_bytes")
    computed, gained = ask(tier, "prefill-0", prompt)
    assert gained["local_compute"] == 1000
    until(lambda: tier.store("master_key_count") == keys + 1000 // BLOCK, 20, "the prompt's blocks are saved")
    assert tier.store("master_allocated_bytes") - stored == (1000 // BLOCK) * BLOCK * LAYERS * ROW
    loaded, gained = ask(tier, "prefill-1", prompt)
    assert gained == {"local_compute": 8, "local_cache_hit": 0, "external_kv_transfer": 992}
    cached, gained = ask(tier, "prefill-1", prompt)
    assert gained == {"local_compute": 8, "local_cache_hit": 992, "external_kv_transfer": 0}
    assert computed == loaded == cached


def test_keys_name_the_type_of_the_cache(tier: Stack) -> None:
    for worker in ("prefill-0", "prefill-1"):
        log = (tier.run.logs / f"{worker}.log").read_text()
        assert re.search(r"Mooncake keys begin with \S+-nvfp4_ds_mla-LBNHC-", log)


def test_a_transfer_moves_352_bytes_a_token_and_layer(tier: Stack) -> None:
    name = "vllm:nixl_bytes_transferred_sum"
    before = tier.metric("decode", name)
    tier.complete(prompt_tokens(6000), prefill="prefill-0")
    moved = until(lambda: tier.metric("decode", name) - before, 20, "the transfer is counted")
    blocks = -(-6000 // BLOCK)
    assert moved == blocks * BLOCK * LAYERS * ROW
    assert blocks * BLOCK * LAYERS * BF16 / moved > 3.2  # what test_block_rows finds for bfloat16


def test_as_many_bytes_hold_3_2_times_the_tokens_of_bfloat16_and_1_6_times_those_of_fp8(tier: Stack) -> None:
    """What the worker says it has, against vLLM's own planner for the other types, which no CPU serves."""
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    def tokens(dtype: torch.dtype) -> int:
        page: int = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=dtype).page_size_bytes
        return POOL // (LAYERS * page) * BLOCK

    (blocks,) = re.findall(r'^vllm:cache_config_info\{.*num_gpu_blocks="(\d+)"', tier.metrics("decode"), re.MULTILINE)
    held = int(blocks) * BLOCK
    assert held / tokens(torch.bfloat16) > 3.2
    assert held / tokens(torch.float8_e4m3fn) > 1.6
