# SPDX-License-Identifier: Apache-2.0
"""Faults that vLLM's tracker knows of block rows, and that other tests here do not show cured already.

vLLM's own configuration, layout resolution, planner, allocator and worker; no engine, no GPU, and no NIXL.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from vllm_blhnc_layout import _compat, _layout, _rows

OURS = {
    "kv_connector": "NixlConnector",
    "kv_connector_module_path": "vllm_blhnc_layout.pull",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"weights_identity": "any"},
}
#: Configurations of two models: one whose queries share heads, one with latents.
MODELS: dict[str, dict[str, Any]] = {
    "grouped": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 2},
    "latent": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
    },
}
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "dtype": "bfloat16",
}


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return vLLM's configuration for a model with this connector; VLLM_KV_CACHE_LAYOUT is not set."""
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # a worker would keep this process to one core

    def make(model: str) -> Any:
        folder = tmp_path / model
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**MODELS[model], **SIZES}))
        args = EngineArgs(
            str(folder),
            skip_tokenizer_init=True,
            max_model_len=2048,
            block_size=32,
            enforce_eager=True,
            kv_transfer_config=dict(OURS),
        )
        return args.create_engine_config()

    return make


def resolve(config: Any) -> str:
    """Resolve the layout as vLLM's worker and its engine core do."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout

    supported = [layout.name for layout in get_supported_kv_cache_layouts(get_current_attn_backends(config))]
    return str(resolve_kv_cache_layout(config, [supported]).name)


def test_a_layout_is_resolved_only_where_it_can_be_had_and_the_reason_is_told(
    configure: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#55431: BLHNC was resolved, and then the engine died of a bare assertion, again and again."""
    from vllm_blhnc_layout import _connector

    monkeypatch.setattr(_layout, "cpu_mla_reads_strides", lambda: True)
    told: list[str] = []
    monkeypatch.setattr(_connector.logger, "info_once", lambda text, *args: told.append(text % args))
    assert resolve(configure("latent")) == "BLHNC"
    assert resolve(configure("grouped")) == "LBHNC"
    assert told[0].startswith("KV cache layout: BLHNC (attention backend ")
    assert told[1] == "KV cache layout: as stock vLLM chooses (the model has no MLA cache)"
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    assert resolve(configure("latent")) == "BLHNC"
    with pytest.raises(ValueError, match=r"BLHNC does not satisfy every supported set; valid layouts: \['LBHNC'\]"):
        resolve(configure("grouped"))
    assert len(told) == 2, "asked for by the user, and asked all the same"


@pytest.mark.parametrize("padded", [True, False])
def test_the_reported_pool_is_bound_or_refused_by_its_numbers(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#55431: FLASHINFER_MLA_SPARSE, FP8, blocks of 64, 79 latents and 22 indexers.

    vLLM's planner pads it since; a pool as it was then dies in `bind_kv_cache`, or, without the warm-up that asserts
    there, is refused here.
    """
    import vllm.v1.core.kv_cache_utils as planner
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.v1.attention.backends.mla import sparse_utils
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker import utils

    backend = AttentionBackendEnum.FLASHINFER_MLA_SPARSE.get_class()
    layout = KVCacheLayout.BLHNC
    cache = SimpleNamespace(block_size=64, num_gpu_blocks_override=2, prefix_cache_retention_interval=None)
    cache.get_resolved_kv_cache_layout = lambda: layout
    config = SimpleNamespace(
        cache_config=cache,
        attention_config=SimpleNamespace(hisparse_config=None),
        kernel_config=SimpleNamespace(enable_jit_warmup=True),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )
    layer = SimpleNamespace(
        _vllm_config=config,
        attn_backend=backend,
        kv_cache_dtype="fp8",
        head_size=576,
        sliding_window=None,
        indexer=object(),
        non_causal_multi_token_decode=False,
    )
    layer._uses_flat_kv_cache = lambda: MLAAttention._uses_flat_kv_cache(layer)
    latent = MLAAttention.get_kv_cache_spec(layer, config)
    if not padded:
        latent = dataclasses.replace(latent, block_stride_alignment=None)
    elif not _compat.vllm_in("<0.32"):
        latent = utils.customize_attention_spec(backend, latent)
    keys = MLAAttentionSpec(head_size=132, block_size=64, num_kv_heads=1, dtype=torch.uint8)
    specs = {f"layers.{number}.attn": latent for number in range(79)}
    specs.update({f"layers.{number}.indexer": keys for number in range(22)})
    groups = [KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=specs))]
    plan = planner.get_kv_cache_config_from_groups(config, groups, 1 << 30)
    caches = utils.allocate_kv_cache(plan, torch.device("cpu"), layout, [64])
    rows = _rows.find(caches, 2)
    readers = dict.fromkeys([name for name in specs if "attn" in name], "FLASHINFER_MLA_SPARSE")
    monkeypatch.setattr(sparse_utils, "_CONVERT_REQ_INDEX_TO_GLOBAL_INDEX_KERNEL", MagicMock())
    if padded:
        for name in readers:
            MLAAttention.bind_kv_cache(layer, caches[name])
        _layout.check_step(rows, 64, readers)
        return
    assert rows.stride == 3098112
    with pytest.raises(AssertionError):
        MLAAttention.bind_kv_cache(layer, caches["layers.1.attn"])
    with pytest.raises(_layout.InvalidLayout, match="3098112 bytes apart: take another block size, or VLLM_KV_CACHE"):
        _layout.check_step(rows, 64, readers)


class Layer:
    """What is asked of a layer for its backend; registered as one of vLLM's below."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def get_attn_backend(self) -> Any:
        return self.backend


@pytest.fixture
def packed(configure: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Make a worker by its constructor, NIXL aside, and register a pool of two groups, blocks of 256 and 4 tokens."""
    import vllm.v1.core.kv_cache_utils as planner
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.models.deepseek_v4.compressor import CompressorBackend
    from vllm.v1.attention.backends.mla.indexer import DeepseekV4IndexerBackend
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MLAAttentionSpec, SlidingWindowMLASpec
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    AttentionLayerBase.register(Layer)
    agent = MagicMock(return_value=MagicMock(get_agent_metadata=lambda: b""))
    monkeypatch.setattr(base_worker, "NixlWrapper", agent)
    monkeypatch.setattr(base_worker, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(base_worker, "get_tensor_model_parallel_world_size", lambda: 1)
    config = configure("latent")
    config.cache_config.kv_cache_layout = "BLHNC"
    config.cache_config.num_gpu_blocks_override = 4
    page: dict[str, Any] = {"num_kv_heads": 1, "dtype": torch.float32}
    specs = [
        (("layers.0.keys", "layers.1.keys"), MLAAttentionSpec(block_size=256, head_size=64, **page)),
        (("layers.0.state",), SlidingWindowMLASpec(block_size=4, head_size=4096, sliding_window=8, **page)),
    ]
    groups = [KVCacheGroupSpec(list(layers), spec) for layers, spec in specs]
    # As vLLM's engine core leaves it.
    config.cache_config.block_size = min(spec.block_size for _, spec in specs)
    plan = planner.get_kv_cache_config_from_groups(config, groups, 1 << 30)
    caches = allocate_kv_cache(plan, torch.device("cpu"), KVCacheLayout.BLHNC, [256, 4])
    layers = config.compilation_config.static_forward_context
    layers.update({name: Layer(CompressorBackend if "state" in name else DeepseekV4IndexerBackend) for name in caches})
    made = []

    def make(kind: Any, **extra: Any) -> Any:
        config.kv_transfer_config.kv_connector_extra_config = extra
        made.append(kind(config, "engine", plan))
        made[-1].register_kv_caches(caches)
        return made[-1]

    yield make
    for worker in made:
        worker.shutdown()


def test_a_pool_of_several_groups_moves_as_in_stock_vllm_and_the_reason_is_told(
    packed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#50714: "No common block size for 4", the smallest block of a group, which is none that all kernels take."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
    from vllm.v1.worker.utils import select_common_block_size

    from vllm_blhnc_layout import _connector
    from vllm_blhnc_layout.pull import RowPullWorker

    told: list[str] = []
    monkeypatch.setattr(_connector.logger, "warning", lambda text, *args: told.append(text % args))
    ours, stock = packed(RowPullWorker), packed(NixlPullConnectorWorker)
    assert ours.vllm_config.cache_config.block_size == 4
    with pytest.raises(ValueError, match="No common block size for 4"):
        select_common_block_size(4, ours.attn_backends)
    assert told == [
        "KV moves as in stock vLLM: not with several groups of layers; "
        "VLLM_KV_CACHE_LAYOUT=LBNHC would take fewer descriptors"
    ]
    # Whole blocks of the scheduler, and what a stock peer registers and compares.
    assert (ours.block_size, ours._physical_blocks_per_logical_kv_block) == (256, 1)
    assert set(ours.block_len_per_layer) == {65536}
    for name in ("block_len_per_layer", "block_stride_per_layer", "region_names", "region_group_ids", "compat_hash"):
        assert getattr(ours, name) == getattr(stock, name), name
    assert ours.xfer_handshake_metadata == stock.xfer_handshake_metadata


def test_a_worker_that_is_to_move_rows_and_cannot_does_not_start(packed: Callable[..., Any]) -> None:
    from vllm_blhnc_layout.pull import RowPullWorker

    with pytest.raises(_layout.InvalidLayout, match="would not move by block rows: not with several groups of layers"):
        packed(RowPullWorker, fallback="refuse")
    with pytest.raises(ValueError, match="fallback 'layers' in kv_connector_extra_config"):
        packed(RowPullWorker, fallback="layers")


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_stock_vllm_pushes_block_rows_and_pulls_pages_of_layers(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#55434. When this fails for a pull, vLLM's pull connector registers rows: ours can become like the push."""
    from support import rows

    (stock,) = (kind for kind in rows.WORKERS[mode].__mro__ if kind.__name__ == f"Nixl{mode.title()}ConnectorWorker")
    monkeypatch.setitem(rows.WORKERS, mode, stock)
    planned = rows.plan([rows.Cache(f"layers.{number}", 576) for number in range(3)], 16, 4)
    agent = MagicMock(get_agent_metadata=lambda: b"")
    rank = rows.Rank(mode, planned, lambda *_: agent, "engine")
    regions = rank.worker.block_len_per_layer
    assert len(regions) == {"pull": 3, "push": 1}[mode]
    assert sum(regions) == planned.stride
    rank.worker.shutdown()


def test_of_a_backend_that_nothing_is_known_of_the_log_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    from support import rows
    from vllm_blhnc_layout import _connector

    told: list[str] = []
    monkeypatch.setattr(_connector.logger, "warning", lambda text, *args: told.append(text % args))
    planned = rows.plan([rows.Cache("layers.0", 576)], 16, 4)
    expected = []
    for missing in (False, True):
        if missing:
            monkeypatch.delitem(_layout.TABLE, "TRITON_MLA")
            expected.append("nothing is known of TRITON_MLA: it may not find blocks that lie apart")
        rank = rows.Rank("pull", planned, lambda *_: MagicMock(get_agent_metadata=lambda: b""), "engine")
        rank.worker.shutdown()
        assert told == expected
