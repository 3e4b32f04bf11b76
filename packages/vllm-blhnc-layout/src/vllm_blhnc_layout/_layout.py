# SPDX-License-Identifier: Apache-2.0
"""Where a block-outermost layout is valid, and where it is not, by attention backend.

vLLM's backends mostly declare no layout, which its planner reads as any; some then address their cache by one stride
from row to row. Such a kernel needs the step from block to block to be a whole number of `rows` of the MLA latent.
`TABLE` says what is known; what is not stands as unverified, and is never chosen by itself. An explicit
VLLM_KV_CACHE_LAYOUT wins over all of it, and the step is looked at once the cache is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ._compat import cpu_mla_reads_strides
from ._rows import Rows

#: The layout that is asked for.
BLOCK_ROWS = "BLHNC"


@dataclass(frozen=True)
class Entry:
    """What is known of one backend."""

    #: The step between blocks must be a whole number of this many rows of the latent; 0: any step.
    rows: int
    #: Why the layout is not chosen by itself; empty where it is.
    unverified: str = ""


_UNTRIED = "not tried on a GPU"

#: Attention backend, by its name in vLLM -> what is known of it on vLLM 0.31 and 0.32. A step is stated where a kernel
#: always needs it; some need more for some dtypes and devices, which 0.32's planner sees to by itself.
TABLE: Mapping[str, Entry] = {
    "AMX_MLA": Entry(1),
    "CPU_MLA": Entry(0),
    "FLASHMLA_SPARSE": Entry(1, _UNTRIED),
    "FLASHINFER_MLA_SPARSE": Entry(32, _UNTRIED),
    "FLASHINFER_MLA_SPARSE_SM120": Entry(64, _UNTRIED),
    "FLASHINFER_MLA_SPARSE_SM90": Entry(1, _UNTRIED),
    "FLASH_ATTN_MLA_SPARSE": Entry(1, _UNTRIED),
    "XPU_MLA_SPARSE": Entry(1, _UNTRIED),
    "ROCM_AITER_MLA_SPARSE": Entry(1, _UNTRIED),
}


class InvalidLayout(RuntimeError):
    """The cache's layout is one that an attention backend cannot address; the message has the numbers."""


def fallback(vllm_config: Any) -> bool:
    """Return whether KV is to move layer by layer, so that stock peers can take part: while a fleet is upgraded.

    Raises:
        ValueError: `fallback` in `kv_connector_extra_config` is neither absent nor "per-layer".
    """
    given = vllm_config.kv_transfer_config.kv_connector_extra_config.get("fallback")
    if given not in (None, "per-layer"):
        raise ValueError(f"fallback {given!r} in kv_connector_extra_config: 'per-layer' or nothing")
    return given is not None


def preferred(vllm_config: Any, backends: Callable[[], list[str]]) -> tuple[str | None, str]:
    """Return the layout to ask for, and in a few words why, or why none.

    Args:
        vllm_config: The engine's configuration.
        backends: Returns the names of its attention backends. It is asked last, and may fail: vLLM then knows them by
            its workers alone.
    """
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    if fallback(vllm_config):
        return None, "fallback per-layer"
    if not vllm_config.model_config.use_mla:
        return None, "the model has no MLA cache"
    if parallel.pipeline_parallel_size > 1:
        return None, "pipeline parallelism"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return None, "context parallelism"
    if vllm_config.model_config.is_hybrid:
        return None, "a hybrid model"
    try:
        names = backends()
    except Exception as error:
        return None, f"the attention backend is not known here: {error}"
    if transfer.kv_buffer_device == "cpu" and not {"AMX_MLA", "CPU_MLA"} & set(names):
        return None, "KV goes through a host buffer, which is laid out by layer"
    for name in names:
        if name not in TABLE:
            return None, f"attention backend {name} is not in the table"
        if TABLE[name].unverified:
            return None, f"attention backend {name}: {TABLE[name].unverified}"
        if name in ("AMX_MLA", "CPU_MLA") and not cpu_mla_reads_strides():
            return (
                None,
                f"attention backend {name} takes its cache for one without gaps (patch vllm/cpu-mla-block-outer)",
            )
    return BLOCK_ROWS, f"attention backend {' and '.join(names)}"


def check_step(rows: Rows, row_bytes: int, backends: list[str]) -> None:
    """Raise `InvalidLayout` where the step between blocks is none that a backend can address.

    Args:
        rows: The pool.
        row_bytes: Bytes of one token's latent in one layer.
        backends: Names of the attention backends.
    """
    for name in backends:
        step = TABLE[name].rows * row_bytes if name in TABLE else 0
        if step and rows.stride % step:
            raise InvalidLayout(
                f"{name} needs blocks a multiple of {step} bytes apart ({TABLE[name].rows} rows of {row_bytes}), they "
                f"are {rows.stride} bytes apart: take another block size, or VLLM_KV_CACHE_LAYOUT=LBNHC"
            )
