# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention on a CPU over 352-byte rows: what is registered over vLLM's own MLA backends.

`AMX_MLA` and `CPU_MLA` of this module are the classes that stood in vLLM's registry before, whatever they were, with
one thing changed: a layer whose cache is of the type `nvfp4_ds_mla` is served by `Impl`. Layers of every other type are
served as before.

Decode attends to packed rows through `nvfp4_sparse_mla_decode`, with all tokens of a request selected. Prefill reads
the rows of a request back, the new ones included, and attends with their values: a prompt that is read in pieces, or
whose beginning is cached, sees the same values as one that is read at once.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl, MLACommonMetadata
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionType

from . import _compat
from ._compat import CACHE_DTYPE
from ._format import LATENT, ROPE, SCALE_CHOICES, append, dequantize
from ._op import _backend, nvfp4_sparse_mla_decode
from ._plugin import PREVIOUS

#: How scales are chosen, see `quantize`; the bytes stay readable by every reader.
SCALES = "FLASHINFER_NVFP4_MLA_SCALES"
#: Queries that attend at once, and keys times heads: they bound the memory of scores, keys and values.
QUERIES, KEYS = 256, 1 << 17


def __getattr__(name: str) -> Any:
    if name in PREVIOUS:
        return _over(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _over(name: str) -> type:
    """Return the backend that stood in the registry as `name`, with `nvfp4_ds_mla` added."""
    previous = resolve_obj_by_qualname(PREVIOUS[name])
    others = previous.get_impl_cls()

    class Choice(others):  # type: ignore[misc, valid-type]
        """The implementation for a layer, by the type of its cache: what is made is never of this class."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("kv_cache_dtype") != CACHE_DTYPE:
                return others(*args, **kwargs)
            _compat.fold_at_load()
            return Impl(*args, **kwargs)

    class Backend(previous):  # type: ignore[misc, valid-type]
        """The backend that stood in the registry, with one more type of cache."""

        supported_kv_cache_dtypes = (*previous.supported_kv_cache_dtypes, CACHE_DTYPE)

        @staticmethod
        def get_impl_cls() -> type:
            """Return what makes the implementation for a layer."""
            return Choice

    Backend.__name__ = Backend.__qualname__ = name  # vLLM tells backends apart by it
    return Backend


class Impl(MLACommonImpl[MLACommonMetadata]):  # type: ignore[misc]
    """MLA attention of one layer over a cache of 352-byte rows."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        if (self.kv_lora_rank, self.qk_rope_head_dim) != (LATENT, ROPE):
            raise ValueError(
                f"{CACHE_DTYPE}: a latent of {self.kv_lora_rank} and {self.qk_rope_head_dim} positional values; "
                f"its row holds {LATENT} and {ROPE}"
            )
        given = {"alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
        if used := [name for name, value in given.items() if value]:
            raise ValueError(f"{CACHE_DTYPE} on a CPU does not serve {', '.join(used)}")
        if attn_type != AttentionType.DECODER:
            raise ValueError(f"{CACHE_DTYPE} on a CPU serves attention of type decoder, not {attn_type}")
        dtype = torch.get_default_dtype()
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"{CACHE_DTYPE} on a CPU: a model in {dtype}; take --dtype bfloat16 or float16")
        self.supports_quant_query_input = False
        self._scales = os.environ.get(SCALES, SCALE_CHOICES[0])
        if self._scales not in SCALE_CHOICES:
            raise ValueError(f"{SCALES}={self._scales!r}: one of {', '.join(SCALE_CHOICES)}")
        _backend("auto", "cpu")  # compiled now, if it has to be, and not while a request waits

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write a row a token: latents `[T, 512]`, positional values `[T, 1, 64]`, slots `[T]`, negative: none."""
        if kv_cache.numel() > 0:
            slots = slot_mapping.flatten()
            append(kv_cache, kv_c_normed[: len(slots)], k_pe[: len(slots)].squeeze(1), slots, scales=self._scales)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Decode: queries `[T, H, 576]`, or their two parts, one token a request; returns `[T, H, 512]`."""
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        slots, lengths = _slots(attn_metadata.decode, kv_c_and_k_pe_cache.shape[1], attn_metadata.max_seq_len)
        out = torch.empty(*q.shape[:2], LATENT, dtype=q.dtype)
        nvfp4_sparse_mla_decode(q, kv_c_and_k_pe_cache, slots, self.scale, out=out, sparse_mla_top_k_lens=lengths)
        return out, None

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Prefill: queries `[T, H, 192]` of all requests, written to `output` `[T, H * V]`; rows are in the cache."""
        assert output_scale is None, "a fused quantisation of the output is not asked of this backend"
        prefill = attn_metadata.prefill
        assert prefill is not None
        starts = prefill.query_start_loc.tolist()
        context = prefill.chunked_context
        contexts = [0] * (len(starts) - 1) if context is None else context.context_lens_list
        output = output.view(-1, self.num_heads, self.v_head_dim)
        for request, before in enumerate(contexts):
            mine = slice(starts[request], starts[request + 1])
            self._attend(q[mine], before, kv_c_and_k_pe_cache, prefill.block_table[request].long(), output[mine])

    def _attend(self, q: torch.Tensor, before: int, cache: torch.Tensor, table: torch.Tensor, output: Any) -> None:
        """Attend from the last tokens of a request to all of it: rows in pieces, merged by their LSE, in float32."""
        count, size = q.shape[0], cache.shape[1]
        total = before + count
        step = max(1, KEYS // self.num_heads // size) * size
        found = torch.zeros(self.num_heads, count, self.v_head_dim)
        lse = torch.full((self.num_heads, count, 1), float("-inf"))
        for begin in range(0, total, step):
            end = min(begin + step, total)
            row = dequantize(cache[table[begin // size : -(-end // size)]].flatten(0, 1)[: end - begin], q.dtype)
            up = self.kv_b_proj(row[:, :LATENT].contiguous())[0].view(end - begin, self.num_heads, -1)
            nope, value = up.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
            key = torch.cat([nope, row[:, None, LATENT:].expand(-1, self.num_heads, -1)], dim=-1)
            key, value = key.transpose(0, 1).float(), value.transpose(0, 1).float()
            # Queries before the first of these rows see none of them.
            for first in range(max(0, begin - before), count, QUERIES):
                last = min(first + QUERIES, count)
                seen = min(end, before + last) - begin
                scores = torch.matmul(q[first:last].transpose(0, 1).float(), key[:, :seen].transpose(1, 2))
                hidden = torch.ones(last - first, seen, dtype=torch.bool).triu_(before + first - begin + 1)
                scores.mul_(self.scale).masked_fill_(hidden, float("-inf"))
                part = scores.logsumexp(-1, keepdim=True)
                both = torch.logaddexp(lse[:, first:last], part)
                read = torch.matmul(scores.sub_(both).exp_(), value[:, :seen])
                found[:, first:last].mul_((lse[:, first:last] - both).exp()).add_(read)
                lse[:, first:last] = both
        output.copy_(found.transpose(0, 1))


def _slots(decode: Any, block_size: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots of each request's tokens, int32 `[T, K]`, and how many it has, `[T]`; made once per step."""
    made: tuple[torch.Tensor, torch.Tensor] | None = getattr(decode, "nvfp4_slots", None)
    if made is None:
        blocks = decode.block_table[:, : -(-longest // block_size)].to(torch.int32)
        slots = blocks[..., None] * block_size + torch.arange(block_size, dtype=torch.int32)
        made = decode.nvfp4_slots = slots.flatten(1), decode.seq_lens.to(torch.int32)
    return made
