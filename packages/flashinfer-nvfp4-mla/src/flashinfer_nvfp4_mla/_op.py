# SPDX-License-Identifier: Apache-2.0
"""The op `nvfp4_sparse_mla_decode`: FlashInfer's call, checked, and handed to a backend.

Behind the checks it is the torch op `flashinfer_nvfp4_mla::nvfp4_sparse_mla_decode`, which `torch.compile` takes whole.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any, SupportsFloat

import torch

from . import _reference
from ._format import LATENT, ROPE, ROW_BYTES, check_rows

#: Backends by name. `auto` is `cpu` where that works and `reference` elsewhere.
BACKENDS = ("auto", "reference", "cpu")
#: Set to 1, ids outside the cache are an error in every call.
CHECK_VARIABLE = "FLASHINFER_NVFP4_MLA_CHECK_INDICES"

_MAX_HEADS = 128
_QUERY_TYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
_OUT_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_BASES = ("basee", "base2")


def nvfp4_sparse_mla_decode(
    query: Any,
    kv_cache: Any,
    indices: Any,
    bmm1_scale: float,
    bmm2_scale: float = 1.0,
    out: Any = None,
    num_ctas_per_token: int | None = None,
    backend: str = "auto",
    *,
    lse: Any = None,
    return_lse_base: str = "basee",
    sparse_mla_top_k_lens: Any = None,
    check_indices: bool = False,
) -> Any:
    """Attend from each query token to the rows of 352 bytes that a sparse indexer picked for it.

    ```text
    out[t, h] = bmm2_scale * sum_k softmax_k(bmm1_scale * query[t, h] . row[indices[t, k]]) * latent[indices[t, k]]
    ```

    A row is 576 values, 512 latents and 64 of rope; the output is made of its latents. Up to `backend` the parameters
    are those of FlashInfer 0.7.4's op of this name, in their order, and its calls do here what they do there, unless
    they name a backend: its `cuda` and `cake` are kernels of its own, and refused here. More is allowed here: other
    numbers of heads, any of indices and of tokens, other types, caches with gaps. Nothing is recorded for a backward
    pass, on any backend: `out` is a constant to autograd, whatever the query requires.

    Args:
        query: `[tokens, heads, 576]`, 1 to 128 heads, bfloat16, float16 or float8_e4m3fn.
        kv_cache: uint8 `[rows, 352]` or `[blocks, block_size, ..., 352]`. Blocks and rows may lie further apart than
            they are long, as where the blocks of all layers are interleaved.
        indices: int32 `[tokens, k]`: rows, counted over the leading dimensions of the cache (`block * block_size +
            offset`). -1 is an empty slot, and so is whatever else lies outside the cache. Rows that are not named here
            are never read.
        bmm1_scale: The softmax's scale, times the query's own where it is quantized.
        bmm2_scale: The output's scale.
        out: `[tokens, heads, 512]`, bfloat16, float16 or float32, written in place; made if None, in the query's type,
            for a float8 query in bfloat16. Its elements must not share memory.
        num_ctas_per_token: What a GPU kernel is to split a token into; of no effect on a CPU.
        backend: One of `BACKENDS`. Where `auto` takes `reference` it warns, once for each reason.
        lse: float32 `[tokens, heads]`, written in place: the logarithm of the sum of the exponentials of the scores.
        return_lse_base: The logarithm's base: "basee" or "base2".
        sparse_mla_top_k_lens: int32 `[tokens]`: how many of a token's indices count, from the first; None: all.
        check_indices: Whether an index outside the cache other than -1 is an error: for debugging, as it has to look
            at every one. FLASHINFER_NVFP4_MLA_CHECK_INDICES=1 in the environment does the same for every call.

    Returns:
        `out`. A token without rows gets 0, and its LSE is -inf.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a shape, stride, device or name does not fit, or `check_indices` found an index; nothing was
            written.
        RuntimeError: `backend` is `cpu`, which does not work here; the message says why.
    """
    tokens, heads = _check_query(query)
    kv_cache = _check_cache(kv_cache)
    device = query.device
    _check("indices", indices, (torch.int32,), (tokens, None), device)
    _check("kv_cache", kv_cache, (torch.uint8,), tuple(kv_cache.shape), device)
    if out is None:
        kind = torch.bfloat16 if query.dtype == torch.float8_e4m3fn else query.dtype
        out = torch.empty(tokens, heads, LATENT, dtype=kind, device=device)
    _check("out", out, _OUT_TYPES, (tokens, heads, LATENT), device)
    _check_apart(out)
    if lse is not None:
        _check("lse", lse, (torch.float32,), (tokens, heads), device)
        if not lse.is_contiguous():
            raise ValueError(f"lse must be contiguous, got strides {tuple(lse.stride())}")
    lengths = sparse_mla_top_k_lens
    if lengths is not None:
        _check("sparse_mla_top_k_lens", lengths, (torch.int32,), (tokens,), device)
        lengths = lengths.contiguous()
    if return_lse_base not in _BASES:
        raise ValueError(f"return_lse_base must be one of {', '.join(_BASES)}, got {return_lse_base!r}")
    if num_ctas_per_token is not None:
        if not isinstance(num_ctas_per_token, int):
            raise TypeError(f"num_ctas_per_token must be an int or None, got {num_ctas_per_token!r}")
        if num_ctas_per_token < 1:
            raise ValueError(f"num_ctas_per_token must be at least 1, got {num_ctas_per_token}")
    for name, scale in (("bmm1_scale", bmm1_scale), ("bmm2_scale", bmm2_scale)):
        if not isinstance(scale, SupportsFloat):
            raise TypeError(f"{name} must be a number, got {scale!r}")
    if backend not in BACKENDS:
        theirs = ": that is a kernel of FlashInfer's" if backend in ("cuda", "cake") else ""
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}{theirs}")
    base2 = return_lse_base == "base2"
    torch.ops.flashinfer_nvfp4_mla.nvfp4_sparse_mla_decode(
        *(query, kv_cache, indices, lengths, float(bmm1_scale), float(bmm2_scale)),
        *(out, lse, base2, backend, check_indices),
    )
    return out


def _check(name: str, tensor: Any, types: tuple[Any, ...], shape: tuple[int | None, ...], device: Any) -> None:
    """Refuse a tensor of another type, shape (None: any size) or device, or whose last dimension has gaps."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in types:
        raise TypeError(f"{name} must be of {' or '.join(map(str, types))}, got {tensor.dtype}")
    got = tuple(tensor.shape)
    if len(got) != len(shape) or any(want not in (None, size) for want, size in zip(shape, got, strict=True)):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must be [{wanted}], got {list(got)}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, query on {device}")
    if got[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: its last dimension must be contiguous, got strides {tuple(tensor.stride())}")


def _check_apart(out: Any) -> None:
    """Refuse an output whose elements share memory, as those of `expand` do."""
    (tokens, heads, width), (token_step, head_step, _) = out.shape, out.stride()
    heads_in_token = (heads < 2 or head_step >= width) and (tokens < 2 or token_step >= head_step * (heads - 1) + width)
    tokens_in_head = (tokens < 2 or token_step >= width) and (
        heads < 2 or head_step >= token_step * (tokens - 1) + width
    )
    if not heads_in_token and not tokens_in_head:
        raise ValueError(f"out overlaps itself: {list(out.shape)} with strides {tuple(out.stride())}")


def _check_query(query: Any) -> tuple[int, int]:
    """Return a query's tokens and heads."""
    device = getattr(query, "device", None)
    _check("query", query, _QUERY_TYPES, (None, None, LATENT + ROPE), device)
    tokens, heads = query.shape[:2]
    if not 1 <= heads <= _MAX_HEADS:
        raise ValueError(f"query must have 1 to {_MAX_HEADS} heads, got {heads}")
    return tokens, heads


def _check_cache(cache: Any) -> Any:
    """Return a cache as `[rows, 352]` or `[blocks, rows of a block, 352]`, the same memory."""
    check_rows("kv_cache", cache)
    if cache.ndim < 2:
        raise ValueError(f"kv_cache must be [..., rows, {ROW_BYTES}], got {list(cache.shape)}")
    if cache.ndim <= 3:
        return cache
    try:
        return cache.view(cache.shape[0], cache.shape[1:-1].numel(), ROW_BYTES)
    except RuntimeError:
        shape, strides = list(cache.shape), tuple(cache.stride())
        raise ValueError(f"kv_cache {shape} with strides {strides} is not blocks of equally spaced rows") from None


def _run(
    query: Any,
    kv_cache: Any,
    indices: Any,
    lengths: Any,
    bmm1_scale: float,
    bmm2_scale: float,
    out: Any,
    lse: Any,
    base2: bool,
    backend: str,
    check_indices: bool,
) -> None:
    """Run a backend on arguments that were checked."""
    always = os.environ.get(CHECK_VARIABLE, "0")
    if always not in ("0", "1"):
        raise ValueError(f"{CHECK_VARIABLE}={always!r}: 1 checks the indices of every call, 0 or nothing does not")
    if check_indices or always == "1":
        _check_indices(indices, lengths, kv_cache.shape[:-1].numel())
    decode = _backend(backend, query.device.type)
    with torch.no_grad():
        decode(query, kv_cache, indices, lengths, bmm1_scale, bmm2_scale, out, lse, base2)


def _check_indices(indices: Any, lengths: Any, rows: int) -> None:
    """Refuse an index outside the cache that is not -1, and a length that is none."""
    width = indices.shape[1]
    bad = (indices < -1) | (indices >= rows)
    if lengths is not None:
        wrong = ((lengths < 0) | (lengths > width)).nonzero()
        if wrong.numel():
            token = int(wrong[0])
            raise ValueError(f"sparse_mla_top_k_lens[{token}] is {int(lengths[token])}, of {width} indices")
        bad &= torch.arange(width, device=indices.device) < lengths[:, None]
    found = bad.nonzero()
    if found.numel():
        token, at = found[0].tolist()
        raise ValueError(f"indices[{token}, {at}] is {int(indices[token, at])}, outside a cache of {rows} rows")


def _backend(name: str, device: str) -> Callable[..., None]:
    """Return what decodes on a device.

    Raises:
        ValueError: the backend is none of this device.
        RuntimeError: it does not work here.
    """
    if name != "reference":
        from . import _cpu

        reason = _cpu.available() if device == "cpu" else f"the tensors are on {device}"
        if reason is None:
            return _cpu.decode
        if name == "cpu":
            raise RuntimeError(f"backend 'cpu' does not work here: {reason}")
        _warn_of_reference(reason)
    return _reference.decode


@functools.cache
def _warn_of_reference(reason: str) -> None:
    """Say once why a kernel is not used."""
    warnings.warn(f"nvfp4_sparse_mla_decode takes the backend 'reference', which is slower: {reason}", stacklevel=2)


def _fake(*_: Any) -> None:
    """Stand for the op where only shapes are looked at: it returns nothing."""


# Not torch.library.custom_op: its way into Python takes ten times as long as this one's 8 us.
_library = torch.library.Library(__package__, "FRAGMENT")
_library.define(
    "nvfp4_sparse_mla_decode(Tensor query, Tensor kv_cache, Tensor indices, Tensor? lengths, float bmm1_scale, "
    "float bmm2_scale, Tensor(a!) out, Tensor(b!)? lse, bool base2, str backend, bool check_indices) -> ()"
)
_library.impl("nvfp4_sparse_mla_decode", _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"{__package__}::nvfp4_sparse_mla_decode", _fake, lib=_library)
