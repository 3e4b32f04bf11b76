# SPDX-License-Identifier: Apache-2.0
"""The whole stack on rows of 352 bytes: Dynamo, two prefill workers, NIXL, Mooncake's store, decode."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
import yaml

from serving_stack import profile as profiles
from serving_stack.model import prompt_tokens, write_model
from serving_stack.state import free_ports
from support.rescaled import rescaled
from support.stack import Stack, until

pytestmark = pytest.mark.engines

LAYERS, BLOCK, ROW = 4, 32, 352
#: What the profile gives a worker's cache.
POOL = 1 << 30


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory, running: list[Stack]) -> Iterator[Stack]:
    """The profile `cpu-nvfp4` on a model that is folded: two prefill workers, and one that does not fold.

    The stack of the tests before is ended first.
    """
    for other in running:
        other.command("down")
    folder = tmp_path_factory.mktemp("nvfp4")
    model = rescaled(write_model(folder / "glm-tiny"), folder / "varied")
    profile = profiles.load("cpu-nvfp4")
    prefill = profile.components["prefill"].model_dump(exclude_unset=True)
    assert profile.mooncake is not None
    stored = profile.mooncake.components["prefill"]
    (folder / "varied.yaml").write_text(
        yaml.safe_dump(
            {
                "extends": "cpu-nvfp4",
                "components": {"unfolded": prefill},
                "mooncake": {
                    "components": {
                        "unfolded": {
                            **stored,
                            "environment": {**stored["environment"], "FLASHINFER_NVFP4_MLA_FOLDING": "0"},
                        },
                    },
                },
            }
        )
    )
    one = Stack(folder, free_ports(1, above=21000)[0], str(folder / "varied.yaml"))
    try:
        one.up("--prefill", "2", "--model", str(model))
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


def test_a_worker_that_does_not_fold_finds_nothing_of_what_the_others_saved(tier: Stack) -> None:
    prompt = prompt_tokens(1001)
    keys = tier.store("master_key_count")
    ask(tier, "prefill-0", prompt)
    until(lambda: tier.store("master_key_count") == keys + 1001 // BLOCK, 20, "the prompt's blocks are saved")
    before = tier.sources("unfolded")
    body = {"model": tier.model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    # Decode folds, so it refuses this worker's rows: there is no answer, and no wrong one.
    assert tier.post("/completions", body, headers=tier.to("unfolded")).status_code != 200
    assert tier.gained("unfolded", before, 1001) == {
        "local_compute": 1001,
        "local_cache_hit": 0,
        "external_kv_transfer": 0,
    }
    answer, gained = ask(tier, "prefill-1", prompt)
    assert gained["external_kv_transfer"] == 992
    assert len(answer) == 24


def test_keys_name_the_type_of_the_cache_and_what_is_folded(tier: Stack) -> None:
    logs = {name: (tier.run.logs / f"{name}.log").read_text() for name in ("prefill-0", "prefill-1", "unfolded")}
    keys = {name: set(re.findall(r"Mooncake keys begin with (\S+)", log)) for name, log in logs.items()}
    assert keys["prefill-0"] == keys["prefill-1"] != keys["unfolded"]
    layout = os.environ.get("VLLM_KV_CACHE_LAYOUT", "LBNHC")  # by hand also with BLHNC
    assert all(f"-nvfp4_ds_mla-{layout}-" in key for found in keys.values() for key in found)
    assert "a power of two is folded into 3 of 4 layers" in logs["prefill-0"]


def test_a_transfer_moves_352_bytes_a_token_and_layer(tier: Stack) -> None:
    name = "vllm:nixl_bytes_transferred_sum"
    before = tier.metric("decode", name)
    tier.complete(prompt_tokens(2000), prefill="prefill-0")
    moved = until(lambda: tier.metric("decode", name) - before, 20, "the transfer is counted")
    assert moved == -(-2000 // BLOCK) * BLOCK * LAYERS * ROW  # of bfloat16 test_block_rows finds 1,152 bytes


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
