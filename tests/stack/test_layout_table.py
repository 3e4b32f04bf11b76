# SPDX-License-Identifier: Apache-2.0
"""The table of `vllm_blhnc_layout`, held against what vLLM's own classes declare, its planner plans and its code reads.

No engine, no model and no GPU: the specifications come from vLLM's own layers and backends, the pool from its planner
and allocator. It holds for the vLLM that is imported; for another one that is supported, put it before the installed
one in PYTHONPATH.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch

from vllm_blhnc_layout import _compat, _layout, _rows

#: MLA backends of vLLM that the table does not name, and why.
LEFT_OUT = {
    **dict.fromkeys(
        (
            *("FLASHMLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV4", "ROCM_FLASHMLA_SPARSE_DSV4"),
            *("FLASHMLA_SPARSE_DSV41", "FLASHINFER_MLA_SPARSE_DSV41", "FLASHMLA_MEGA_ATTN_DSV41"),
            *("DEEPSEEK_V4_INDEXER", "DEEPSEEK_V41_INDEXER"),
        ),
        "DeepSeek V4 has several groups of layers, and moves as in stock vLLM",
    ),
    "KPOOL_TAIL": "GLM-5.3-Flash has several groups of layers, and moves as in stock vLLM",
}

#: Backends whose module cannot be imported without a GPU's libraries, and what it misses. They are imported with a
#: substitute for that, which no declaration of theirs looks at.
SUBSTITUTED = {
    "CUTLASS_MLA": "allocates its workspace on a GPU",
    "FLASHINFER_MLA": "imports flashinfer",
    "FLASH_ATTN_MLA": "imports the extensions of FlashAttention",
    "FLASH_ATTN_MLA_SPARSE": "imports the extensions of FlashAttention",
}

#: Backends that need more than they declare, so that the planner's step may be none that they can address.
UNDECLARED = {
    "<0.32": {"AMX_MLA", "FLASH_ATTN_MLA_SPARSE", "XPU_MLA_SPARSE"},
    ">=0.32": {"AMX_MLA"},
}

#: Tokens of a block beside an indexer, whose kernels take no other.
BLOCK = 64
#: Blocks of a pool: one step between them, so that half a step does not pass for a whole one.
BLOCKS = 2

#: Layers with a latent, layers with an indexer's keys: GLM-5.x with shared and with own indexers, and smaller ones.
SPARSE = [(79, 22), (79, 79), (7, 3), (61, 61), (2, 1)]
DENSE = [(61, 0), (4, 0), (1, 0)]
#: Type of the cache -> bytes of a token's latent.
ROWS = {"bfloat16": 1152, "fp8_ds_mla": 656, "nvfp4_ds_mla": 352, "fp8": 576}


def old() -> bool:
    return _compat.vllm_in("<0.32")


def load(member: Any) -> Any:
    """Import a backend's class."""
    from vllm.utils import platform_utils

    if member.name not in SUBSTITUTED:
        return member.get_class()
    missing = (
        *("flashinfer", "flashinfer.decode", "flashinfer.utils", "vllm.v1.attention.backends.fa_utils"),
        *("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"),
    )
    with (
        patch.dict(sys.modules, {name: MagicMock() for name in missing}),
        patch.object(platform_utils, "num_compute_units"),
        patch.object(torch, "empty"),
    ):
        return member.get_class()


@cache
def members() -> dict[str, Any]:
    """Return vLLM's MLA backends by the name that they give themselves, and the indexers'."""
    from vllm.v1.attention.backends.mla import indexer
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    found: dict[str, Any] = {}
    for member in AttentionBackendEnum:
        if not member.value or not (".mla." in member.value or "MLA" in member.name):
            continue
        kind = None if member.name in LEFT_OUT else load(member)
        found[kind.get_name() if kind else member.name] = kind
    indexers: list[Any] = [kind for kind in vars(indexer).values() if isinstance(kind, type)]
    for kind in indexers:
        if issubclass(kind, indexer.DeepseekV32IndexerBackend):
            found.setdefault(kind.get_name(), kind)
    return found


def backend(name: str) -> Any:
    return members()[name]


#: The names of the table as vLLM's backends call themselves.
NAMES = sorted(set(_layout.TABLE) - {"FLASHMLA_SPARSE_PAGES"})
LATENTS = [name for name in NAMES if name != "DEEPSEEK_V32_INDEXER"]


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Pretend that the device is of a family of compute capabilities."""
    from vllm.platforms import current_platform

    def pretend(number: int) -> None:
        answer = classmethod(lambda _, asked: asked == number)
        monkeypatch.setattr(type(current_platform), "is_device_capability_family", answer)

    return pretend


def smallest(kind: Any, spec: Any) -> int:
    """Return the smallest size of a block, from 64 tokens down or else up, that a backend takes."""
    from vllm.v1.attention.backend import MultipleOf

    sizes = kind.get_supported_kernel_block_sizes(spec)
    if any(BLOCK % size.base == 0 if isinstance(size, MultipleOf) else size == BLOCK for size in sizes):
        return BLOCK
    return int(min(size.base if isinstance(size, MultipleOf) else size for size in sizes))


def customize(kind: Any, spec: Any) -> Any:
    """Let a backend change its layers' specification, as vLLM's worker does."""
    from vllm.v1.worker import utils

    if old():
        return kind.customize_spec(spec)
    return utils.customize_attention_spec(kind, spec)


def specifications(name: str, cache_dtype: str, latents: int, indexers: int) -> tuple[dict[str, Any], int]:
    """Return the layers' specifications as vLLM's own layers give them, and the size of a block."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

    kind = backend(name)
    block = BLOCK if indexers else smallest(kind, None)
    cache_config = SimpleNamespace(block_size=block)
    config = SimpleNamespace(cache_config=cache_config, model_config=SimpleNamespace(dtype=torch.bfloat16))
    layer = SimpleNamespace(
        kv_cache_dtype="auto" if cache_dtype == "bfloat16" else cache_dtype,
        head_size=576,
        attn_backend=kind,
        sliding_window=None,
        indexer=object(),
        non_causal_multi_token_decode=False,
    )
    layer._uses_flat_kv_cache = lambda: MLAAttention._uses_flat_kv_cache(layer)
    latent = customize(kind, MLAAttention.get_kv_cache_spec(layer, config))
    found = {f"layers.{number}.attn": latent for number in range(latents)}
    if indexers:
        keys = SimpleNamespace(cache_config=cache_config, head_dim=132, dtype=torch.uint8)
        spec = customize(backend("DEEPSEEK_V32_INDEXER"), DeepseekV32IndexerCache.get_kv_cache_spec(keys, config))
        found.update({f"layers.{number}.indexer": spec for number in range(indexers)})
    return found, block


def plan(specs: dict[str, Any], block: int) -> dict[str, torch.Tensor]:
    """Let vLLM's planner lay out a pool and its allocator make it."""
    import vllm.v1.core.kv_cache_utils as planner
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    layout = KVCacheLayout.BLHNC
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=BLOCKS,
            prefix_cache_retention_interval=None,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    groups = [KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=block, kv_cache_specs=specs))]
    planned = planner.get_kv_cache_config_from_groups(config, groups, 1 << 30)
    found: dict[str, torch.Tensor] = allocate_kv_cache(planned, torch.device("cpu"), layout, [block])
    return found


def declared(spec: Any) -> int:
    """Return the alignment in bytes that a specification asks the planner for."""
    return int(spec.block_stride_alignment or 1) if old() else int(spec.get_block_stride_alignment())


def _flat(cache: torch.Tensor) -> None:
    from vllm.v1.attention.backends.mla.sparse_utils import flat_kv_row_view

    flat_kv_row_view(cache, cache.shape[1])


def _trtllm(cache: torch.Tensor) -> None:
    from vllm.v1.attention.backends.mla.sparse_utils import flat_kv_row_view

    rows, step = flat_kv_row_view(cache, cache.shape[1])
    if not old():
        page = math.gcd(step, cache.shape[1], 64)
        rows.view(-1, page, rows.shape[-1])
        assert page in (32, 64), "the kernel has pages of 32 and of 64 rows"


def _sm120(cache: torch.Tensor) -> None:
    from vllm.v1.attention.backends.mla.sparse_utils import flat_kv_row_view

    if old():
        _by_step(cache)
    else:
        rows, _ = flat_kv_row_view(cache, cache.shape[1])
        rows.view(-1, 64, rows.shape[-1])


def _by_step(cache: torch.Tensor) -> None:
    """TMA takes a step of whole 16 bytes; so do loads of 128 bits."""
    assert cache.stride(0) * cache.element_size() % 16 == 0, "not aligned for TMA"


def _pages(cache: torch.Tensor) -> None:
    if not old():
        from vllm.v1.attention.backends.mla.flashmla_sparse import _fp8_kv_pages

        pages, _ = _fp8_kv_pages(cache, cache.shape[1])
        assert pages.stride(0) == cache.stride(0)
    _by_step(cache)


def _indexer(cache: torch.Tensor) -> None:
    from vllm.model_executor.layers.sparse_attn_indexer import kv_cache_as_quant_view

    view = kv_cache_as_quant_view(cache.view(torch.uint8), 128, False)
    assert view.stride(0) == cache.stride(0) * cache.element_size()
    _by_step(view)


def _triton(cache: torch.Tensor) -> None:
    from vllm.v1.attention.ops.triton_decode_attention import _page_stride

    assert _page_stride(cache.unsqueeze(2), cache.shape[1]) == cache.stride(0)


def _dense(cache: torch.Tensor) -> None:
    """AITER's backends view their cache so; CUTLASS's computes where a block begins as if it could be viewed so."""
    cache.view(-1, 1, 1, cache.shape[-1])


def _amx(cache: torch.Tensor) -> None:
    from vllm.v1.attention.backends.mla import amx_mla

    if hasattr(amx_mla, "_flat_rows"):
        amx_mla._flat_rows(cache)
    else:
        cache.view(-1, 1, cache.shape[-1])


def _cpu(cache: torch.Tensor) -> None:
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    latent, rope = torch.zeros(1, cache.shape[-1] - 64), torch.zeros(1, 1, 64)
    slot = torch.tensor([cache.shape[1]])
    CPUMLAImpl.do_kv_cache_update(SimpleNamespace(), latent, rope, cache, slot, "auto", torch.ones(1))


#: What a backend does with a layer's cache [blocks, tokens, content] before its kernel: by vLLM's own code where that
#: runs without a GPU, else by what its kernel demands. It raises where the kernel could not find a block.
READ: dict[str, Callable[[torch.Tensor], None]] = {
    "AMX_MLA": _amx,
    "CPU_MLA": _cpu,
    **dict.fromkeys(("FLASHINFER_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "TOKENSPEED_MLA"), _by_step),
    "TRITON_MLA": _triton,
    **dict.fromkeys(("AITER_TRITON_MLA", "CUTLASS_MLA", "ROCM_AITER_MLA"), _dense),
    "FLASHINFER_MLA_SPARSE": _trtllm,
    "FLASHINFER_MLA_SPARSE_SM120": _sm120,
    **dict.fromkeys(("FLASHINFER_MLA_SPARSE_SM90", "FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE"), _flat),
    **dict.fromkeys(("ROCM_AITER_MLA_SPARSE", "XPU_MLA_SPARSE"), _flat),
    "FLASHMLA_SPARSE_PAGES": _pages,
    "DEEPSEEK_V32_INDEXER": _indexer,
}


def refusal(function: Callable[..., None], *args: Any) -> str:
    try:
        function(*args)
    except (AssertionError, RuntimeError, ValueError) as error:
        return str(error) or type(error).__name__
    return ""


def geometries(name: str) -> Iterator[tuple[str, int, int, int]]:
    """Yield the family of the device, the type of the cache, and how many layers of both kinds."""
    dense = not backend(name).is_sparse()
    types = ("bfloat16",) if dense else [kind for kind in ROWS if kind in backend(name).supported_kv_cache_dtypes]
    for cache_dtype in types:
        for number in (90, 100) if name == "FLASHMLA_SPARSE" else (100,):
            # An alias that this backend's layers turn into the type with scales.
            if name == "FLASHMLA_SPARSE" and cache_dtype == "fp8":
                continue
            for latents, indexers in DENSE if dense else SPARSE:
                yield cache_dtype, number, latents, indexers


def test_every_mla_backend_of_vllm_is_in_the_table_or_left_out_for_a_reason() -> None:
    found = set(members())
    assert found - set(LEFT_OUT) == set(NAMES)
    assert set(READ) == set(_layout.TABLE)
    assert set(SUBSTITUTED) <= set(NAMES)
    for name, entries in _layout.TABLE.items():
        if name not in ("AMX_MLA", "CPU_MLA"):
            assert all(entry.untried or entry.refused for entry in entries.values()), f"{name}: nobody has tried it"


@pytest.mark.parametrize("name", NAMES)
def test_a_layout_that_a_backend_does_not_declare_is_refused(name: str) -> None:
    layouts = backend(name).supported_kv_cache_layouts()
    entry = _layout.known(name)
    assert entry is not None
    valid = layouts is None or _layout.BLOCK_ROWS in {layout.name for layout in layouts}
    if not valid:
        assert entry.refused == f"declares {' and '.join(layout.name for layout in layouts)} alone"
    else:
        assert not entry.refused.startswith("declares")


@pytest.mark.parametrize("name", LATENTS)
def test_the_planners_step_is_one_that_the_backend_can_address_or_is_refused(
    name: str, family: Callable[[int], None]
) -> None:
    (undeclared,) = (names for versions, names in UNDECLARED.items() if _compat.vllm_in(versions))
    refused = set()
    for cache_dtype, number, latents, indexers in geometries(name):
        family(number)
        specs, block = specifications(name, cache_dtype, latents, indexers)
        caches = plan(specs, block)
        rows = _rows.find(caches, BLOCKS)
        sm100 = number == 100
        readers = {
            layer: "DEEPSEEK_V32_INDEXER" if "indexer" in layer else _layout.reader(name, spec.cache_dtype_str, sm100)
            for layer, spec in specs.items()
        }
        entry = _layout.known(readers["layers.0.attn"])
        assert entry is not None
        where = f"{name}, {cache_dtype}, family {number}, {latents} and {indexers} layers"
        latent = ROWS[cache_dtype]
        assert {page for layer, _, page in rows.pages if "attn" in layer} == {block * latent}, where
        step = math.lcm(entry.rows * latent or 1, entry.align)
        # What a backend declares is what the table says that it needs, but where it declares nothing.
        asked = declared(specs["layers.0.attn"])
        if not entry.refused and name not in undeclared:
            assert asked == (step if entry.rows else 1), where
        said = refusal(_layout.check_step, rows, block, readers)
        read = [refusal(READ[readers[layer]], cache.squeeze(1)) for layer, cache in caches.items()]
        if "declares" not in entry.refused:
            assert bool(said) == any(read), f"{where}: check_step {said!r}, read {set(read)}"
        if said:
            refused.add((latents, indexers))
            assert str(rows.stride) in said, where
            assert str(block * latent if entry.refused else step) in said, where
        else:
            assert rows.stride % step == 0, where
    if name in undeclared and backend(name).is_sparse():
        assert refused, "no geometry shows what the planner does not see to"
    elif (entry := _layout.known(name)) and entry.refused:
        assert refused >= set(SPARSE if backend(name).is_sparse() else DENSE[:2])
    else:
        assert not refused


@pytest.mark.parametrize("name", sorted(_layout.TABLE))
@pytest.mark.parametrize("width", [1152, 656])
def test_a_step_is_refused_exactly_where_the_backend_could_not_read(name: str, width: int) -> None:
    """Steps that no planner would return, so that a number of the table that is too small or too large is found."""
    entry = _layout.known(name)
    assert entry is not None
    accepted = set()
    for count in (0, 1, 2, 16, 31, 32, 33, 64, 96):
        for more in (0, 2, 8, 16, 48):
            stride = BLOCK * width + count * width + more
            raw = torch.empty(BLOCKS * stride, dtype=torch.int8)
            cache = raw.as_strided((BLOCKS, BLOCK, width), (stride, width, 1)).view(torch.bfloat16)
            rows = _rows.Rows(BLOCKS, stride, (("layers.0", 0, BLOCK * width),))
            said = refusal(_layout.check_step, rows, BLOCK, {"layers.0": name})
            if "declares" in entry.refused:
                assert bool(said) == (count + more > 0)
                continue
            read = refusal(READ[name], cache)
            assert bool(said) == bool(read), f"{stride} bytes: check_step {said!r}, read {read!r}"
            accepted.add(not said)
    assert "declares" in entry.refused or True in accepted


class Layer:
    """What is asked of a layer for its backend; registered as one of vLLM's below."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_attn_backend(self) -> Any:
        return backend(self.name)


@pytest.mark.parametrize(
    ("name", "cache_dtype", "number", "said"),
    [
        # Asked for by VLLM_KV_CACHE_LAYOUT, and a step that fits: accepted, though nobody has tried it.
        ("FLASHINFER_MLA_SPARSE", "bfloat16", 100, ""),
        ("FLASHMLA_SPARSE", "fp8_ds_mla", 90, ""),
        ("FLASHMLA_SPARSE", "fp8_ds_mla", 100, ""),
        ("FLASH_ATTN_MLA_SPARSE", "bfloat16", 90, "<0.32"),
        ("CUTLASS_MLA", "bfloat16", 100, "any"),
    ],
)
def test_a_worker_holds_its_pool_against_the_backends_of_its_layers(
    family: Callable[[int], None], name: str, cache_dtype: str, number: int, said: str
) -> None:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    from vllm_blhnc_layout.pull import RowPullWorker

    AttentionLayerBase.register(Layer)
    family(number)
    specs, block = specifications(name, cache_dtype, 7, 2 if backend(name).is_sparse() else 0)
    layers = {layer: Layer("DEEPSEEK_V32_INDEXER" if "indexer" in layer else name) for layer in specs}
    worker = object.__new__(RowPullWorker)
    worker.__dict__.update(
        vllm_config=SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=layers),
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
        ),
        kv_cache_config=SimpleNamespace(transfer_groups=[None]),
        kv_cache_layout="BLHNC",
        _fallback=None,
        block_size=block,
        num_blocks=BLOCKS,
        _layer_specs=specs,
        _has_packed_cache=True,
        _has_mamba=False,
        _physical_blocks_per_logical_kv_block=1,
        use_mla=True,
        use_host_buffer=False,
        **dict.fromkeys(("pp_size", "dcp_size", "pcp_size"), 1),
    )
    caches = plan(specs, block)
    if said and (said == "any" or _compat.vllm_in(said)):
        with pytest.raises(_layout.InvalidLayout, match=f"layers.0.attn: {name}"):
            worker._find_rows(caches)
    else:
        assert len(worker._find_rows(caches).pages) == len(specs)


def test_an_engine_core_without_layers_asks_for_a_sparse_models_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_blhnc_layout import _connector

    asked: dict[str, Any] = {}

    def select(**kwargs: Any) -> Any:
        asked.update(kwargs)
        return backend("FLASHMLA_SPARSE" if kwargs["use_sparse"] else "FLASHMLA")

    monkeypatch.setattr(_connector, "get_attn_backend", select)
    monkeypatch.setattr(_connector, "set_current_vllm_config", nullcontext)
    text = SimpleNamespace(index_topk=2048)
    model = SimpleNamespace(
        hf_text_config=text,
        dtype=torch.bfloat16,
        use_mla=True,
        get_head_size=lambda: 576,
        get_num_attention_heads=lambda _: 16,
    )
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="fp8"),
        parallel_config=None,
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    assert _connector.backend_names(config) == ["FLASHMLA_SPARSE", "DEEPSEEK_V32_INDEXER"]
    assert (asked["use_mla"], asked["num_heads"], asked["kv_cache_dtype"]) == (True, 16, "fp8")
    del text.index_topk
    assert _connector.backend_names(config) == ["FLASHMLA"]
    # With layers, they say it.
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    AttentionLayerBase.register(Layer)
    layers = config.compilation_config.static_forward_context
    for name in ("FLASH_ATTN_MLA_SPARSE", "DEEPSEEK_V32_INDEXER", "FLASH_ATTN_MLA_SPARSE"):
        layers[f"layers.{len(layers)}"] = Layer(name)
    assert _connector.backend_names(config) == ["DEEPSEEK_V32_INDEXER", "FLASH_ATTN_MLA_SPARSE"]


OURS = {"kv_connector": "NixlConnector", "kv_connector_module_path": "vllm_blhnc_layout.pull", "kv_role": "kv_both"}
OTHERS = {name: {"kv_connector": name, "kv_role": "kv_both"} for name in ("OffloadingConnector", "NixlConnector")}


@pytest.mark.parametrize(
    ("connectors", "layout", "said"),
    [
        ([OURS], "BLHNC", "BLHNC (attention backend AMX_MLA)"),
        ([OURS, OTHERS["NixlConnector"]], "BLHNC", "BLHNC (attention backend AMX_MLA)"),
        ([OURS, OURS], "BLHNC", "BLHNC (attention backend AMX_MLA)"),
        ([OURS, OTHERS["OffloadingConnector"]], "LBHNC", "as stock vLLM chooses (OffloadingConnector asks for LBHNC)"),
        ([OTHERS["OffloadingConnector"], OURS], "LBHNC", "as stock vLLM chooses (OffloadingConnector asks for LBHNC)"),
        (
            [OURS, {"connectors": [OURS, OTHERS["OffloadingConnector"]]}],
            "LBHNC",
            "as stock vLLM chooses (MultiConnector asks for LBHNC)",
        ),
    ],
)
def test_steps_aside_in_vllms_multi_connector_where_a_sibling_asks_for_another_layout(
    monkeypatch: pytest.MonkeyPatch, connectors: list[dict[str, Any]], layout: str, said: str
) -> None:
    """vLLM's MultiConnector hides its connectors from one another, and refuses to start where two ask for different."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout

    from vllm_blhnc_layout import _connector

    monkeypatch.setattr(_connector, "backend_names", lambda _: ["AMX_MLA"])
    monkeypatch.setattr(_layout, "cpu_mla_reads_strides", lambda: True)
    told: list[str] = []
    monkeypatch.setattr(_connector.logger, "info_once", lambda message, *args: told.append(message % args))

    def multi(connectors: list[dict[str, Any]]) -> dict[str, Any]:
        inner = [multi(one["connectors"]) if "connectors" in one else one for one in connectors]
        extra = {"connectors": inner}
        return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}

    parallel = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(**multi(connectors)),
        model_config=SimpleNamespace(use_mla=True, is_hybrid=False),
        parallel_config=SimpleNamespace(**parallel),
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    assert get_kv_connector_cache_layout(config) == layout
    assert f"KV cache layout: {said}" in told
