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

def caches():
    whole = draw(blocks, layers, size, width)
    outer = whole[:, layer]                # one layer of a block-outer cache
    assert not outer.is_contiguous()
    return whole, outer, outer.clone(memory_format=torch.contiguous_format)

# The last request reads up to the last row of the pool.
table = torch.tensor([[1, 3, 5], [2, 4, 6], [7, 0, 11]], dtype=torch.int32)
lengths = torch.tensor([40, 90, 96]) * size // 32
slots = torch.tensor([0, size + 1, -1, 40, 3 * size - 1, blocks * size - 1])
latents, rope = draw(6, latent), draw(6, 1, width - latent)
query = draw(3, heads, width)
"""

#: What both leave behind: is the layer the same as alone, are the others untouched, was there anything to see.
COMPARE = """
equal = [torch.equal(a, b) for a, b in zip(found["outer"], found["alone"])]
rest = [number for number in range(layers) if number != layer]
print(json.dumps({"equal": equal, "others": torch.equal(whole[:, rest], others[:, rest]),
                  "written": not torch.equal(whole, others), "moving": bool(found["alone"][1].abs().sum() > 0)}))
"""

#: An `AMXMLAImpl` and what its metadata builder makes of a block table: 3 requests that decode, or prefill the end.
FAST = (
    CACHES
    + """
from vllm.v1.attention.backends.mla import amx_mla

impl = object.__new__(amx_mla.AMXMLAImpl)  # its constructor wants a model's layer
nope, value = 64, 64
impl.head_size, impl.kv_lora_rank, impl.num_heads, impl.scale = width, latent, heads, 0.1
impl.qk_nope_head_dim, impl.qk_rope_head_dim, impl.v_head_dim, impl._w_scale = nope, width - latent, value, None
impl._w_uk_packed = torch.ops._C.convert_weight_packed(draw(heads, latent, nope))
impl._w_uv_packed = torch.ops._C.convert_weight_packed(draw(heads, value, latent))
wide, fresh, fresh_rope = draw(28, heads, nope + 64), draw(28, latent), draw(28, 1, width - latent)

def common(self, common_prefix_len, given, fast_build):
    decode = SimpleNamespace(block_table=given.table, seq_lens=given.seq_lens)
    prefill = SimpleNamespace(block_table=given.table, query_start_loc=torch.tensor([0, 8, 24, 28]))
    return SimpleNamespace(decode=decode, prefill=prefill, max_seq_len=96, num_decodes=0, num_prefills=3)

amx_mla.MLACommonMetadataBuilder.build = common
builder = object.__new__(amx_mla.AMXMLAMetadataBuilder)
builder.kv_cache_spec = SimpleNamespace(block_size=size)

def step(table):
    return builder.build(0, SimpleNamespace(table=table, seq_lens=lengths))

def write(cache):
    impl.do_kv_cache_update(latents, rope, cache, slots, "auto", torch.ones(1))

def decode(cache, metadata):
    return impl.forward_mqa(query, cache, metadata, None)[0]

def prefill(cache, metadata):
    found = torch.zeros(28, heads * value, dtype=torch.bfloat16)
    impl.forward_mha(wide, fresh, fresh_rope, cache, metadata, torch.ones(1), found)
    return found
"""
)

AMX = (
    FAST
    + """
whole, outer, alone = caches()
others = whole.clone()
found = {}
for name, cache in (("outer", outer), ("alone", alone)):
    write(cache)
    metadata = step(table)
    found[name] = cache.clone(), decode(cache, metadata), decode(cache, metadata), prefill(cache, metadata)
"""
    + COMPARE
)

PLAIN = (
    CACHES
    + """
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

impl = object.__new__(CPUMLAImpl)
impl.kv_lora_rank, impl.scale = latent, 0.1
whole, outer, alone = caches()
others = whole.clone()
found = {}
for name, cache in (("outer", outer), ("alone", alone)):
    impl.do_kv_cache_update(latents, rope, cache, slots, "auto", torch.ones(1))
    decode = SimpleNamespace(block_table=table, seq_lens=lengths)
    found[name] = cache.clone(), impl.forward_mqa(query, cache, SimpleNamespace(decode=decode), None)[0]
"""
    + COMPARE
)

#: Caches whose blocks lie differently far apart share the metadata of a step, and the next step has another table.
STEPS = (
    FAST
    + """
pools = [draw(blocks, count, size, width)[:, -1] for count in (3, 1, 2)]
tables = [table, table.flip(0), (table + 1) % blocks]
equal, answers = [], set()
for one in tables:
    shared = step(one)
    for pool in pools * 2:
        for read in (decode, prefill):
            found = read(pool, shared)
            equal.append(torch.equal(found, read(pool.contiguous(), step(one))))
            answers.add(str(found.tolist()))
print(json.dumps({"equal": equal, "answers": len(answers)}))
"""
)

#: A block of three layers ends in an indexer's page, so that the next one is no whole number of rows away.
ODD = (
    FAST
    + """
row = torch.zeros(blocks, 3 * size * width + 132, dtype=torch.bfloat16)
cache = row.as_strided((blocks, size, width), (row.stride(0), width, 1), layer * size * width)
said = {}
for name, call in (("write", lambda: write(cache)), ("decode", lambda: decode(cache, step(table))),
                   ("prefill", lambda: prefill(cache, step(table)))):
    try:
        call()
    except ValueError as error:
        said[name] = str(error)
print(json.dumps({**said, "written": bool(row.any())}))
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


needs_fast_backend = pytest.mark.skipif(
    not fast_backend(), reason="processor: neither AMX nor AVX-512 BF16, which the kernels of AMX_MLA want"
)


def of(script: str, size: int, layer: int) -> str:
    """Return a script for blocks of `size` tokens, and a layer of three."""
    return f"size, layer = {size}, {layer}\n{script}"


@needs_fast_backend
def test_published_amx_backend_dies_on_a_block_outer_cache(python: Python, published: str) -> None:
    """When this fails, upstream has been cured and the patch can go."""
    done = python(published + of(AMX, 32, 1))
    assert done.returncode == 1
    assert "view size is not compatible" in done.stderr, done.stderr


def test_published_plain_backend_dies_on_a_block_outer_cache(python: Python, published: str) -> None:
    """When this fails, upstream has been cured and the patch can go."""
    done = python(published + of(PLAIN, 16, 1))
    assert done.returncode == 1
    assert "view size is not compatible" in done.stderr, done.stderr


@pytest.mark.installed
@needs_fast_backend
@pytest.mark.parametrize(("size", "layer"), [(32, 0), (32, 1), (32, 2), (64, 2)])
def test_installed_amx_backend_reads_and_writes_a_layer_among_others(python: Python, size: int, layer: int) -> None:
    """vllm#54465, on a GPU: the step between blocks was taken for their size, so another layer's page was read."""
    found = ran(python(of(AMX, size, layer)))
    assert found == {"equal": [True] * 4, "others": True, "written": True, "moving": True}


@pytest.mark.installed
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_installed_plain_backend_reads_and_writes_a_layer_among_others(python: Python, layer: int) -> None:
    found = ran(python(of(PLAIN, 16, layer)))
    assert found == {"equal": [True] * 2, "others": True, "written": True, "moving": True}


@pytest.mark.installed
@needs_fast_backend
def test_installed_amx_backend_follows_the_stride_of_each_cache_and_the_table_of_each_step(python: Python) -> None:
    assert ran(python(of(STEPS, 32, 0))) == {"equal": [True] * 36, "answers": 18}


@pytest.mark.installed
@needs_fast_backend
def test_installed_amx_backend_names_a_stride_it_cannot_address(python: Python) -> None:
    found = ran(python(of(ODD, 32, 1)))
    assert found.pop("written") is False
    assert set(found) == {"write", "decode", "prefill"}
    for said in found.values():
        assert "a whole number of rows apart: row of 576 elements, block stride 55428" in said
