# SPDX-License-Identifier: Apache-2.0
"""Two workers of `vllm_blhnc_layout.pull` on pools that vLLM's own planner lays out, with two page widths; real NIXL.

Run as a script: prints one JSON object, and leaves without a farewell, because NIXL 1.4.1 crashes when an interpreter
with an agent ends. No engine and no model: the workers are made without their constructor, which wants both.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
import vllm.v1.core.kv_cache_utils as planner
from nixl._api import nixl_agent, nixl_agent_config
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MLAAttentionSpec, SparseCacheRole, UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from vllm_blhnc_layout._connector import Poster
from vllm_blhnc_layout._identity import IncompatiblePeer
from vllm_blhnc_layout.pull import RowPullWorker

#: Tokens of a block; bytes of a token's latent (FP8 with scales) and of its indexer key.
SIZE, LATENT, INDEXER = 64, 656, 132


def specifications(step: int) -> dict[str, Any]:
    """Return the layers of a sparse model, fewer than real ones; blocks have to be `step` latents apart."""
    mla: dict[str, Any] = {"block_size": SIZE, "num_kv_heads": 1, "dtype": torch.uint8}
    found = {
        f"layers.{layer}.attn": MLAAttentionSpec(head_size=LATENT, block_stride_alignment=step * LATENT, **mla)
        for layer in range(7)
    }
    for layer in range(3):
        role = SparseCacheRole.INDEXER
        found[f"layers.{layer}.indexer"] = MLAAttentionSpec(head_size=INDEXER, cache_role=role, **mla)
    return found


def worker(name: str, blocks: int, step: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Make a worker, let vLLM plan and allocate its pool, register that; return both."""
    layers, layout = specifications(step), KVCacheLayout.BLHNC
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout,
        kv_cache_layout=layout.name,
        num_gpu_blocks_override=blocks,
        prefix_cache_retention_interval=None,
        cache_dtype="fp8_ds_mla",
    )
    config = SimpleNamespace(
        cache_config=cache,
        attention_config=SimpleNamespace(hisparse_config=None),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
    )
    groups = [KVCacheGroupSpec(list(layers), UniformTypeKVCacheSpecs(block_size=SIZE, kv_cache_specs=layers))]
    plan = planner.get_kv_cache_config_from_groups(config, groups, 1 << 30)
    caches = allocate_kv_cache(plan, torch.device("cpu"), layout, [SIZE])
    made = object.__new__(RowPullWorker)
    empty: dict[str, Any] = {
        key: []
        for key in (
            *("block_len_per_layer", "block_stride_per_layer", "region_group_ids", "region_names", "region_num_blocks"),
            *(
                "_region_is_mla",
                "_registered_descs",
                "region_members",
                "_ssm_region_indices",
                "_scratch_region_indices",
            ),
        )
    }
    for key in ("dst_num_blocks", "dst_region_num_blocks", "dst_region_group_ids", "dst_uses_region_group_mapping"):
        empty[key] = {}
    made.__dict__.update(
        empty,
        vllm_config=config,
        kv_cache_config=plan,
        kv_cache_layout=layout.name,
        _has_packed_cache=True,
        pp_size=1,
        dcp_size=1,
        pcp_size=1,
        transfer_tp_rank=0,
        transfer_tp_size=1,
        tp_rank=0,
        use_mla=True,
        _is_hma_required=False,
        _has_mamba=False,
        _is_csa_linear=False,
        use_host_buffer=False,
        host_xfer_buffers={},
        kv_buffer_device="cpu",
        device_id=0,
        attn_backends=[],
        backend_name="none",
        _layer_specs=dict(layers),
        engine_id=name,
        block_size=SIZE,
        num_blocks=plan.num_blocks,
        _logical_num_blocks=plan.num_blocks,
        _physical_blocks_per_logical_kv_block=1,
        _group_spec_types=(MLAAttentionSpec,),
        nixl_wrapper=Poster(nixl_agent(name, nixl_agent_config(backends=["UCX"], capture_telemetry=True))),
        nixl_memory_type="DRAM",
        nixl_backends=["UCX"],
        dst_region_mem_types={},
        kv_caches_base_addr=defaultdict(dict),
        src_xfer_handles_by_block_size={},
        _mixed_mem_types=False,
        _mamba_ssm_size=(0, 0),
        _ple_region_index=None,
        _conv_decomp=None,
        _transfer_layer_names=(),
        _transfer_layer_region_indices=(),
        _transfer_layer_group_ids=(),
        _limit=None,
        _weights=None,
        _facts=[],
        model_config=SimpleNamespace(dtype=torch.bfloat16, revision=None),
    )
    made.register_kv_caches(caches)
    return made, caches


def pull(here: Any, metadata: Any, local: list[int], remote: list[int]) -> int:
    """Pull blocks of a peer, and return how many descriptors NIXL made of them."""
    agent = here.nixl_wrapper
    peer = agent.add_remote_agent(metadata.agent_metadata)
    (base,), (length,), (stride,) = metadata.kv_caches_base_addr, metadata.block_lens, metadata.block_strides
    theirs = np.array([(base + block * stride, length, 0) for block in range(metadata.num_blocks)], dtype=np.uint64)
    remote_side = agent.prep_xfer_dlist(peer, agent.get_xfer_descs(theirs, "DRAM"))
    local_side = here.src_xfer_handles_by_block_size[SIZE]
    handle = agent.make_prepped_xfer("READ", local_side, np.array(local), remote_side, np.array(remote))
    agent.transfer(handle)
    while (state := agent.check_xfer_state(handle)) != "DONE":
        assert state == "PROC", state
    return int(agent.get_xfer_telemetry(handle).descCount)


def main() -> None:
    """Move blocks in several orders, by step of the rows; say what is equal."""
    base_worker.compute_nixl_compatibility_hash = lambda *args, **kwargs: "hash"
    base_worker.TransferTopology = lambda **kwargs: SimpleNamespace(**kwargs)
    found: dict[str, Any] = {}
    draw = np.random.default_rng(0)
    for step in (1, 32):
        prefill, saved = worker(f"prefill-{step}", 40, step)
        decode, loaded = worker(f"decode-{step}", 24, step)
        for cache in saved.values():
            cache.copy_(torch.from_numpy(draw.integers(1, 256, cache.shape, dtype=np.uint8)))
        payload = prefill.xfer_handshake_metadata.agent_metadata_bytes
        metadata = msgspec.msgpack.decode(payload, type=NixlAgentMetadata)
        for name, local, remote in (
            ("run", list(range(2, 12)), list(range(20, 30))),
            ("descending", list(range(11, 1, -1)), list(range(29, 19, -1))),
            ("shuffled", draw.permutation(24)[:10].tolist(), draw.permutation(40)[:10].tolist()),
        ):
            for cache in loaded.values():
                cache.zero_()
            count = pull(decode, metadata, local, remote)
            known = set(zip(local, remote, strict=True))
            others = [block for block in range(24) if block not in local]
            found[f"{name}, {step}"] = {
                "moved": all(torch.equal(loaded[layer][local], saved[layer][remote]) for layer in saved),
                "others": not any(loaded[layer][others].any() for layer in saved),
                "descriptors": count,
                "runs": sum((one - 1, other - 1) not in known for one, other in known),
            }
        (length,), (stride,) = metadata.block_lens, metadata.block_strides
        payload_bytes = SIZE * (7 * LATENT + 3 * INDEXER)
        found[f"row, {step}"] = [length == stride, stride % (step * LATENT), stride - payload_bytes, decode.num_regions]
        found[f"peer, {step}"] = metadata
    try:
        decode._validate_remote_agent_handshake(found["peer, 1"], 1)
    except IncompatiblePeer as refused:
        found["refused"] = str(refused)
    print(json.dumps({key: value for key, value in found.items() if not key.startswith("peer")}))


if __name__ == "__main__":
    os.environ.update(UCX_TLS="tcp", UCX_NET_DEVICES="lo", NIXL_PROGRESS_THREAD_DELAY_US="10000", HF_HUB_OFFLINE="1")
    main()
    sys.stdout.flush()
    os._exit(0)
