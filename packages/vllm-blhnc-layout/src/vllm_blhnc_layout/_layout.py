# SPDX-License-Identifier: Apache-2.0
"""Where a block-outermost layout is valid, and where it is not, by attention backend.

vLLM's backends mostly declare no layout, which its planner reads as any. Their kernels then find a block by a step from
the one before: some by any step, some by a whole number of rows of their page, and some not at all, because they take
their cache for one without gaps. `TABLE` says which. A backend that is not in it, or was not tried, is never chosen by
itself. An explicit VLLM_KV_CACHE_LAYOUT wins over all of it, and the step is looked at once the cache is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ._compat import cpu_mla_reads_strides, vllm_in
from ._rows import Rows

#: The layout that is asked for.
BLOCK_ROWS = "BLHNC"


@dataclass(frozen=True)
class Entry:
    """What is known of one backend: the step from block to block that its kernels need, or why there is none."""

    #: The step must be a whole number of this many rows, a row being what one token takes in a page; 0: any step.
    rows: int = 0
    #: The step must be a multiple of this many bytes.
    align: int = 1
    #: Why the layout is not chosen by itself, though it is valid by what was read.
    untried: str = ""
    #: Why the layout is not valid: blocks of this backend must follow one another without a gap.
    refused: str = ""


_GPU = "not tried on a GPU"
#: Bytes that TMA and loads of 128 bits are aligned to.
_TMA = 16
_GAPS = "takes its cache for one without gaps"
_CPU = ("AMX_MLA", "CPU_MLA")

#: Attention backend, by its name in vLLM -> versions of vLLM (PEP 440; empty: all that are supported) -> what is known.
#: vLLM's planner rounds the step up to what a backend declares; those that need more than they declare are marked.
TABLE: Mapping[str, Mapping[str, Entry]] = {
    "AMX_MLA": {"": Entry(rows=1)},  # declares nothing
    "CPU_MLA": {"": Entry()},
    # Dense, on a GPU: the step is read off the cache.
    "FLASHINFER_MLA": {"": Entry(align=_TMA, untried=_GPU)},
    "FLASHMLA": {"": Entry(align=_TMA, untried=_GPU)},
    "FLASH_ATTN_MLA": {"": Entry(align=_TMA, untried=_GPU)},
    "TOKENSPEED_MLA": {"": Entry(align=_TMA, untried=_GPU)},
    "TRITON_MLA": {"": Entry(untried=_GPU)},
    # Dense, and the step is computed from the size of a block.
    "AITER_TRITON_MLA": {"": Entry(refused=_GAPS)},
    "CUTLASS_MLA": {"": Entry(refused=_GAPS)},
    "ROCM_AITER_MLA": {"": Entry(refused=_GAPS)},
    # Sparse: top-k picks rows of the whole pool, or, with `_PAGES`, of a page that is found by the step.
    "FLASHINFER_MLA_SPARSE": {"<0.32": Entry(rows=1, untried=_GPU), ">=0.32": Entry(rows=32, untried=_GPU)},
    "FLASHINFER_MLA_SPARSE_SM120": {"<0.32": Entry(align=_TMA, untried=_GPU), ">=0.32": Entry(rows=64, untried=_GPU)},
    "FLASHINFER_MLA_SPARSE_SM90": {
        "<0.32": Entry(refused="declares LBHNC alone"),
        ">=0.32": Entry(rows=1, untried=_GPU),
    },
    "FLASHMLA_SPARSE": {"": Entry(rows=1, untried=_GPU)},
    "FLASHMLA_SPARSE_PAGES": {"": Entry(align=_TMA, untried=_GPU)},
    "FLASH_ATTN_MLA_SPARSE": {"": Entry(rows=1, untried=_GPU)},  # before 0.32: declares nothing
    "ROCM_AITER_MLA_SPARSE": {
        "<0.32": Entry(refused="declares LBNHC and LBHNC alone"),
        ">=0.32": Entry(rows=1, untried=_GPU),
    },
    "XPU_MLA_SPARSE": {"": Entry(rows=1, untried=_GPU)},  # before 0.32: declares nothing
    # Keys of the top-k, beside the latent. Values of a block, then its scales: found by the step, never by rows.
    "DEEPSEEK_V32_INDEXER": {"": Entry(align=_TMA, untried=_GPU)},
}


class InvalidLayout(RuntimeError):
    """The cache's layout is one that an attention backend cannot address; the message has the numbers."""


def known(name: str) -> Entry | None:
    """Return what is known of a backend on the installed vLLM, if anything."""
    entry = next((entry for versions, entry in TABLE.get(name, {}).items() if vllm_in(versions)), None)
    if entry is not None and name in _CPU and not cpu_mla_reads_strides():
        return replace(entry, refused=f"{_GAPS} (patch vllm/cpu-mla-block-outer)")
    return entry


def reader(name: str, cache_dtype: str | None, sm100: bool) -> str:
    """Return the name in `TABLE` of what reads a layer's cache.

    Args:
        name: The backend's name in vLLM.
        cache_dtype: The type of the layer's cache, as vLLM calls it.
        sm100: Whether the device is of compute capability 10.
    """
    pages = name == "FLASHMLA_SPARSE" and cache_dtype in ("fp8_ds_mla", "nvfp4_ds_mla") and not sm100
    return "FLASHMLA_SPARSE_PAGES" if pages else name


#: What `fallback` says of an engine that cannot, or is not to, move block rows.
PER_LAYER, REFUSE = "per-layer", "refuse"


def fallback(vllm_config: Any) -> str | None:
    """Return what `fallback` in `kv_connector_extra_config` says, if anything.

    `per-layer`: KV is to move layer by layer, so that stock peers can take part, while a fleet is upgraded. `refuse`:
    an engine that cannot move block rows is not to start.

    Raises:
        ValueError: it says something else.
    """
    given: str | None = vllm_config.kv_transfer_config.kv_connector_extra_config.get("fallback")
    if given not in (None, PER_LAYER, REFUSE):
        raise ValueError(f"fallback {given!r} in kv_connector_extra_config: {PER_LAYER!r}, {REFUSE!r} or nothing")
    return given


def preferred(
    vllm_config: Any, backends: Callable[[], list[str]], siblings: Callable[[], list[tuple[str, str | None]]]
) -> tuple[str | None, str]:
    """Return the layout to ask for, and in a few words why, or why none.

    Args:
        vllm_config: The engine's configuration.
        backends: Returns the names of its attention backends. It is asked last, and may fail: vLLM then knows them by
            its workers alone.
        siblings: Returns the other connectors and the layouts that they ask for.
    """
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    if fallback(vllm_config) == PER_LAYER:
        return None, "fallback per-layer"
    if not vllm_config.model_config.use_mla:
        return None, "the model has no MLA cache"
    if parallel.pipeline_parallel_size > 1:
        return None, "pipeline parallelism"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return None, "context parallelism"
    if vllm_config.model_config.is_hybrid:
        return None, "a hybrid model"
    for connector, layout in siblings():
        if layout not in (None, BLOCK_ROWS):
            return None, f"{connector} asks for {layout}"
    try:
        names = backends()
    except Exception as error:
        return None, f"the attention backend is not known here: {error}"
    if transfer.kv_buffer_device == "cpu" and not set(_CPU) & set(names):
        return None, "KV goes through a host buffer, which is laid out by layer"
    for name in names:
        entry = known(name)
        if entry is None:
            return None, f"attention backend {name} is not in the table"
        if entry.refused or entry.untried:
            return None, f"attention backend {name}: {entry.refused or entry.untried}"
    return BLOCK_ROWS, f"attention backend {' and '.join(names)}"


def check_step(rows: Rows, block_size: int, readers: Mapping[str, str]) -> None:
    """Raise `InvalidLayout` where the step between blocks is none that a layer's backend can address.

    Args:
        rows: The pool.
        block_size: Tokens of a block.
        readers: Layer -> name in `TABLE` of what reads it; layers and names that are missing are not looked at.
    """
    entries = {name: known(name) for name in set(readers.values())}
    for layer, _, page in rows.pages:
        name = readers.get(layer, "")
        entry = entries.get(name)
        if entry is None:
            continue
        row = page // block_size
        step = math.lcm(entry.rows * row or 1, entry.align)
        need = ""
        if entry.refused and rows.stride != page:
            need = f"{entry.refused}, and blocks {page} bytes apart"
        elif rows.stride % step:
            need = f"needs blocks a multiple of {step} bytes apart"
            need += f" ({entry.rows} row{'s' * (entry.rows > 1)} of {row})" if entry.rows else ""
        if need:
            raise InvalidLayout(
                f"{layer}: {name} {need}, they are {rows.stride} bytes apart: take another block size, or "
                "VLLM_KV_CACHE_LAYOUT=LBNHC"
            )
