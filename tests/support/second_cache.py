# SPDX-License-Identifier: Apache-2.0
"""The tiny model with a second cache in every other layer, of another width: what a sparse model's indexer has.

vLLM runs no sparse attention on a CPU. This cache stands where an indexer's would: pages of a width of its own in the
same blocks, written at the same slots. What is read from it is simple but real: every token gets a weighted mean of
the keys of all tokens before it, so that a wrong byte in any block changes the answer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import CacheConfig, VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.glm4_moe_lite import Glm4MoeLiteForCausalLM
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec

__all__ = ["register"]

#: Values of a key; a latent has 576. Blocks have to be whole latents apart (AMX_MLA), so that a block row ends in
#: padding. It is asked for under that layout alone: vLLM 0.32's own NIXL connector takes no padded pages of a layer.
WIDTH, LATENT = 64, 576
#: What of the mean goes into the residual stream.
SHARE = 0.5


@dataclass
class KeyMetadata:
    """Where the step's tokens are: `[tokens]` slots, `[requests, blocks]`, `[requests]`, `[requests + 1]`."""

    slots: torch.Tensor
    blocks: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor


class KeyBuilder(AttentionMetadataBuilder[KeyMetadata]):  # type: ignore[misc]  # no vLLM where types are checked
    """Makes it."""

    def __init__(self, spec: KVCacheSpec, layers: list[str], config: VllmConfig, device: torch.device) -> None:
        super().__init__(spec, layers, config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> KeyMetadata:
        """Take what every backend is given."""
        told = common_attn_metadata
        return KeyMetadata(told.slot_mapping, told.block_table_tensor, told.seq_lens, told.query_start_loc)


class KeyBackend(AttentionBackend):  # type: ignore[misc]
    """Names the builder; there is no kernel."""

    @staticmethod
    def get_name() -> str:
        """No name of vLLM's: nothing is known of it."""
        return "TEST_KEYS"

    @staticmethod
    def get_impl_cls() -> Any:
        """There is none, and nobody asks."""
        return None

    @staticmethod
    def get_builder_cls() -> type[KeyBuilder]:
        """As said."""
        return KeyBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Those of AMX_MLA."""
        return [MultipleOf(32)]

    @classmethod
    def is_mla(cls) -> bool:
        """One vector a token."""
        return True


class KeyCache(nn.Module, AttentionLayerBase):  # type: ignore[misc]
    """A cache of `[blocks, block size, WIDTH]`."""

    def __init__(self, prefix: str, cache: CacheConfig) -> None:
        super().__init__()
        self.prefix, self.block_size = prefix, cache.block_size
        self.kv_cache = torch.tensor([])
        get_current_vllm_config().compilation_config.static_forward_context[prefix] = self

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take the pool's view."""
        self.kv_cache = kv_cache.squeeze(1)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """A page's geometry."""
        return MLAAttentionSpec(
            block_size=self.block_size,
            num_kv_heads=1,
            head_size=WIDTH,
            dtype=torch.bfloat16,
            block_stride_alignment=2 * LATENT if os.environ.get("VLLM_KV_CACHE_LAYOUT") == "BLHNC" else None,
        )

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Its backend."""
        return KeyBackend

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Keep the keys of these tokens, `[tokens, hidden]`, and return what they see of those before them."""
        told = get_forward_context().attn_metadata
        if not isinstance(told, dict) or self.kv_cache.numel() == 0:
            return hidden
        at = told[self.prefix]
        count = int(at.starts[-1])
        slots = at.slots[:count]
        self.kv_cache[slots // self.block_size, slots % self.block_size] = hidden[:count, :WIDTH].to(torch.bfloat16)
        seen = torch.zeros_like(hidden)
        for number, (begin, end) in enumerate(zip(at.starts.tolist(), at.starts.tolist()[1:], strict=False)):
            length = int(at.lengths[number])
            used = at.blocks[number, : -(-length // self.block_size)].long()
            keys = self.kv_cache[used].flatten(0, 1)[:length].float()
            weights = 1.0 + torch.arange(length) % 7
            means = (keys * weights[:, None]).cumsum(0) / weights.cumsum(0)[:, None]
            seen[begin:end, :WIDTH] = means[length - (end - begin) :].to(hidden.dtype)
        return hidden + SHARE * seen


class SecondCacheForCausalLM(Glm4MoeLiteForCausalLM):  # type: ignore[misc]
    """The tiny model, every other layer of which keeps keys as well."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for number, layer in enumerate(self.model.layers):
            if number % 2:
                layer.keys = KeyCache(f"{prefix}model.layers.{number}.keys", vllm_config.cache_config)
                layer.mlp.register_forward_pre_hook(lambda _, given, keys=layer.keys: (keys(given[0]), *given[1:]))


def register() -> None:
    """Put it in the place of the tiny model's class, in this process."""
    ModelRegistry.register_model("Glm4MoeLiteForCausalLM", f"{__name__}:SecondCacheForCausalLM")
