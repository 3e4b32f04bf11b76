# SPDX-License-Identifier: Apache-2.0
"""`vllm/cpu-mla-block-outer`: needs vLLM's CPU build, and AMX or AVX-512 BF16 for AMX_MLA.

Each backend writes to, and reads from, one layer of a cache whose blocks hold all layers side by side (BLHNC), and of a
cache that holds that layer alone; both have to come to the same bytes and the same attention.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

PATCH = "vllm/cpu-mla-block-outer"

CACHES = """
import json, sys
from types import SimpleNamespace
import torch
from vllm.platforms import current_platform

current_platform.import_kernels()
torch.manual_seed(0)
torch.set_num_threads(1)
layers, blocks, width, latent, heads = 3, 12, 576, 512, 16

def draw(*shape):
    return torch.randn(*shape).to(torch.bfloat16)

def caches(size):
    whole = draw(blocks, layers, size, width)
    outer = whole[:, 1]                    # one layer of a block-outer cache
    assert not outer.is_contiguous()
    return whole, outer, outer.clone(memory_format=torch.contiguous_format)

table = torch.tensor([[1, 3, 5], [2, 4, 6], [7, 0, 11]], dtype=torch.int32)
"""

#: What both leave behind: is the layer the same as alone, are the others untouched, was there anything to see.
COMPARE = """
equal = [torch.equal(a, b) for a, b in zip(found["outer"], found["alone"])]
print(json.dumps({"equal": equal, "others": torch.equal(whole[:, [0, 2]], others[:, [0, 2]]),
                  "written": not torch.equal(whole, others), "moving": bool(found["alone"][1].abs().sum() > 0)}))
"""

AMX = (
    CACHES
    + """
from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl, _expand_block_table

size, nope, value = 32, 64, 64
impl = object.__new__(AMXMLAImpl)          # its constructor wants a model's layer
impl.head_size, impl.kv_lora_rank, impl.num_heads, impl.scale = width, latent, heads, 0.1
impl.qk_nope_head_dim, impl.qk_rope_head_dim, impl.v_head_dim, impl._w_scale = nope, width - latent, value, None
impl._w_uk_packed = torch.ops._C.convert_weight_packed(draw(heads, latent, nope))
impl._w_uv_packed = torch.ops._C.convert_weight_packed(draw(heads, value, latent))
slots = torch.tensor([0, 33, -1, 40, 95, 383])
latents, rope = draw(6, latent), draw(6, 1, width - latent)
query, wide = draw(3, heads, width), draw(28, heads, nope + 64)
fresh, fresh_rope = draw(28, latent), draw(28, 1, width - latent)
whole, outer, alone = caches(size)
others = whole.clone()
found = {}
for name, cache in (("outer", outer), ("alone", alone)):
    impl.do_kv_cache_update(latents, rope, cache, slots, "auto", torch.ones(1))
    decode = SimpleNamespace(
        seq_lens_i64=torch.tensor([40, 90, 70]), req_to_token=_expand_block_table(table, size),
        req_pool_indices=torch.arange(3), num_kv_splits=1,
    )
    prefill = SimpleNamespace(
        req_to_token=_expand_block_table(table, size).to(torch.int64), req_pool_indices=torch.arange(3),
        cpu_seq_lens=torch.tensor([40, 90, 70]), extend_seq_lens=torch.tensor([8, 16, 4]),
        extend_start_loc=torch.tensor([0, 8, 24]), max_len_extend=16,
    )
    metadata = SimpleNamespace(decode=decode, prefill=prefill)
    read = impl.forward_mqa(query, cache, metadata, None)[0]
    again = impl.forward_mqa(query, cache, metadata, None)[0]
    prefilled = torch.zeros(28, heads * value, dtype=torch.bfloat16)
    impl.forward_mha(wide, fresh, fresh_rope, cache, metadata, torch.ones(1), prefilled)
    found[name] = cache.clone(), read, again, prefilled
"""
    + COMPARE
)

PLAIN = (
    CACHES
    + """
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

size = 16
impl = object.__new__(CPUMLAImpl)
impl.kv_lora_rank, impl.scale = latent, 0.1
slots = torch.tensor([0, 17, -1, 40, 95, 191])
latents, rope, query = draw(6, latent), draw(6, 1, width - latent), draw(3, heads, width)
whole, outer, alone = caches(size)
others = whole.clone()
found = {}
for name, cache in (("outer", outer), ("alone", alone)):
    impl.do_kv_cache_update(latents, rope, cache, slots, "auto", torch.ones(1))
    decode = SimpleNamespace(block_table=table, seq_lens=torch.tensor([40, 20, 33]))
    found[name] = cache.clone(), impl.forward_mqa(query, cache, SimpleNamespace(decode=decode), None)[0]
"""
    + COMPARE
)

ODD = (
    CACHES
    + """
from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl

impl = object.__new__(AMXMLAImpl)
row = torch.zeros(blocks, 3 * 32 * width + 132, dtype=torch.bfloat16)       # an indexer's page at the end
cache = row.as_strided((blocks, 32, width), (row.stride(0), width, 1), 32 * width)
impl.do_kv_cache_update(draw(1, latent), draw(1, 1, 64), cache, torch.tensor([0]), "auto", torch.ones(1))
"""
)

Python = Callable[..., "subprocess.CompletedProcess[str]"]


def fast_backend() -> bool:
    with open("/proc/cpuinfo", encoding="ascii") as cpu:
        return {"amx_bf16", "avx512_bf16"} & set(cpu.read().split()) != set()


def ran(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(not fast_backend(), reason="no AMX and no AVX-512 BF16: the kernels of AMX_MLA do not run here")
def test_published_amx_backend_dies_on_a_block_outer_cache(python: Python, published: str) -> None:
    """When this fails, upstream has been cured and the patch can go."""
    done = python(published + AMX)
    assert done.returncode == 1
    assert "view size is not compatible" in done.stderr, done.stderr


def test_published_plain_backend_dies_on_a_block_outer_cache(python: Python, published: str) -> None:
    """When this fails, upstream has been cured and the patch can go."""
    done = python(published + PLAIN)
    assert done.returncode == 1
    assert "view size is not compatible" in done.stderr, done.stderr


@pytest.mark.installed
@pytest.mark.skipif(not fast_backend(), reason="no AMX and no AVX-512 BF16: the kernels of AMX_MLA do not run here")
def test_installed_amx_backend_reads_and_writes_a_layer_among_others(python: Python) -> None:
    assert ran(python(AMX)) == {"equal": [True] * 4, "others": True, "written": True, "moving": True}


@pytest.mark.installed
def test_installed_plain_backend_reads_and_writes_a_layer_among_others(python: Python) -> None:
    assert ran(python(PLAIN)) == {"equal": [True] * 2, "others": True, "written": True, "moving": True}


def test_installed_amx_backend_names_a_stride_it_cannot_address(python: Python) -> None:
    done = python(ODD)
    assert done.returncode == 1
    assert "a whole number of rows apart: row of 576 elements, block stride 55428" in done.stderr, done.stderr
