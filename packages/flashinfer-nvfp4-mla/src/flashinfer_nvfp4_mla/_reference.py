# SPDX-License-Identifier: Apache-2.0
"""Sparse-MLA decode over 352-byte rows in plain torch: the backend `reference`, on any device.

Rows are gathered as words of 64 bits, unpacked exactly to float32, and multiplied in float32. On a CPU bfloat16 is no
way to be faster: torch rounds a bfloat16 product's result to bfloat16, and a score rounded so is off by more than the
result may be. Tokens and keys go in chunks, merged as in flash attention, so that work memory does not grow with them.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ._format import LATENT, ROPE, ROW_BYTES, unpack, words

#: Rows that are unpacked at a time, and heads of all tokens together: 2048 * 576 values of float32 are 4.7 MB.
_CHUNK = 2048


def decode(
    query: Any,
    cache: Any,
    indices: Any,
    lengths: Any,
    bmm1_scale: float,
    bmm2_scale: float,
    out: Any,
    lse: Any,
    base2: bool,
) -> None:
    """Attend from each query token to the rows that were picked for it.

    The score of row r is `bmm1_scale * query . r` over 576 values; the output is `bmm2_scale` times the softmax's mean
    of the rows' 512 latents; LSE is the logarithm of the sum of the scores' exponentials. A token without rows gets
    output 0 and LSE -inf.

    Args:
        query: bfloat16, float16 or float8_e4m3fn `[T, H, 576]`.
        cache: uint8 `[rows, 352]` or `[blocks, block_size, 352]`; only the last dimension must be contiguous.
        indices: int32 `[T, K]`: rows, or `block * block_size + offset`. What is outside the cache is empty.
        lengths: int32 `[T]`, how many of a token's indices count, or None: all.
        bmm1_scale: The softmax's scale, and the query's own where it is quantized.
        bmm2_scale: The output's scale.
        out: `[T, H, 512]` of a floating-point type, overwritten.
        lse: float32 `[T, H]`, overwritten, or None.
        base2: Whether LSE is to base 2, not e.
    """
    tokens, width = indices.shape
    batch = max(1, _CHUNK // max(1, width, query.shape[1]))
    flat, rows, row_of = _flat(cache)
    for at in range(0, tokens, batch):
        chosen = slice(at, at + batch)
        ids, counts = _compact(indices[chosen], None if lengths is None else lengths[chosen], rows)
        q = query[chosen].float() * bmm1_scale
        peak = torch.full(q.shape[:2], torch.finfo(torch.float32).min, device=q.device)
        total, mean = torch.zeros_like(peak), torch.zeros(*q.shape[:2], LATENT, device=q.device)
        for start in range(0, ids.shape[1], _CHUNK):
            part = ids[:, start : start + _CHUNK]
            empty = torch.arange(start, start + part.shape[1], device=part.device) >= counts[:, None]
            if not bool(empty[:, -1].any()):
                empty = None  # all of them are there: nothing to mask
            latent, rope = _gather(flat, row_of(part), empty)
            score = torch.baddbmm(q[..., :LATENT] @ latent.mT, q[..., LATENT:], rope.mT)
            if empty is not None:
                score.masked_fill_(empty[:, None], -torch.inf)
            # `peak` is finite from the start: a chunk without a row leaves weights of 0, not exp(-inf + inf).
            highest = torch.maximum(peak, score.amax(-1))
            kept = torch.exp(peak - highest)
            weight = score.sub_(highest[..., None]).exp_()
            total = total * kept + weight.sum(-1)
            mean = torch.baddbmm(mean.mul_(kept[..., None]), weight, latent)
            peak = highest
        out[chosen] = mean.mul_(bmm2_scale / torch.where(total == 0, 1.0, total)[..., None])
        if lse is not None:
            lse[chosen] = (peak + total.log()) * (math.log2(math.e) if base2 else 1.0)


def _compact(indices: Any, lengths: Any, rows: int) -> tuple[Any, Any]:
    """Return each token's ids that are in the cache, those first and sorted, `[T, most]`, and how many `[T]`.

    The result does not depend on their order, and memory is read in theirs. Past a token's count, ids are 0.
    """
    ids = indices.long()
    valid = (ids >= 0) & (ids < rows)
    if lengths is not None:
        valid &= torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    counts = valid.sum(1)
    ids = torch.where(valid, ids, rows).sort(1).values[:, : int(counts.max()) if counts.numel() else 0]
    return torch.where(ids == rows, 0, ids), counts


def _flat(cache: Any) -> tuple[Any, int, Any]:
    """Return a two-dimensional view that holds every row of a cache, their number, and the way from an id to its row.

    The view's rows overlap where rows of the cache are not a multiple of each other apart.
    """
    view = words(cache)
    rows = view.shape[:-1].numel()
    if view.ndim == 2:
        return view, rows, lambda ids: ids
    blocks, size, _ = view.shape
    block_step, step = (view.stride(dim) if view.shape[dim] > 1 else 0 for dim in (0, 1))
    unit = math.gcd(block_step, step) or 1
    block_step, step = block_step // unit, step // unit
    count = (blocks - 1) * block_step + (size - 1) * step + 1 if rows else 0
    flat = view.as_strided((count, view.shape[2]), (unit, 1))
    return flat, rows, lambda ids: ids // size * block_step + ids % size * step


def _gather(flat: Any, rows: Any, empty: Any) -> tuple[Any, Any]:
    """Unpack rows `[T, n]` of a view; where `empty`, all values are 0, whatever the bytes there."""
    gathered = flat.index_select(0, rows.reshape(-1))
    if empty is not None:
        gathered.masked_fill_(empty.reshape(-1, 1), 0)
    latent, rope = unpack(gathered.view(torch.uint8).view(-1, ROW_BYTES))
    return latent.view(*rows.shape, LATENT), rope.reshape(*rows.shape, ROPE)
