# SPDX-License-Identifier: Apache-2.0
"""`vllm/cpu-amx-mla-avx512`: needs vLLM's CPU build; the kernels' results need AVX-512 BF16, with AMX or without."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

PATCH = "vllm/cpu-amx-mla-avx512"

Python = Callable[..., "subprocess.CompletedProcess[str]"]

#: What a processor offers, as vLLM asks for it, and what vLLM makes of it.
CHOOSE = """
import json
from types import SimpleNamespace
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import CpuArchEnum

def choose(amx, bf16, architecture=CpuArchEnum.X86, dtype=torch.bfloat16):
    torch.cpu._is_amx_tile_supported = lambda: amx
    torch.cpu._is_avx512_bf16_supported = lambda: bf16
    CpuPlatform.get_cpu_architecture = classmethod(lambda cls: architecture)
    wanted = SimpleNamespace(use_sparse=False, use_mla=True, dtype=dtype)
    return CpuPlatform.get_attn_backend_cls(None, wanted).rsplit(".", 1)[-1]

print(json.dumps([
    choose(True, True), choose(False, True), choose(False, False), choose(False, True, CpuArchEnum.ARM),
    choose(False, True, dtype=torch.float16),
]))
"""
AMX, PLAIN = "AMXMLABackend", "CPUMLABackend"

#: The backend's own methods over a paged cache, against attention in float32 over the same bytes.
RESULTS = """
import json
from types import SimpleNamespace
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl, _expand_block_table

current_platform.import_kernels()
torch.manual_seed(0)
latent, rope, heads, nope, value, size, scale = 512, 64, 8, 64, 64, 32, 0.05
lengths, fresh = [100, 5, 33], [40, 5, 1]
draw = lambda *shape: (torch.randn(*shape) * 0.5).to(torch.bfloat16)
up, down = draw(heads, latent, nope), draw(heads, value, latent)
impl = object.__new__(AMXMLAImpl)          # its constructor wants a model's layer
impl.head_size, impl.kv_lora_rank, impl.num_heads, impl.scale = latent + rope, latent, heads, scale
impl.qk_nope_head_dim, impl.qk_rope_head_dim, impl.v_head_dim, impl._w_scale = nope, rope, value, None
impl._w_uk_packed = torch.ops._C.convert_weight_packed(up)
impl._w_uv_packed = torch.ops._C.convert_weight_packed(down)
cache = draw(16, size, latent + rope)
table = torch.tensor([[3, 9, 1, 12], [7, 0, 0, 0], [5, 2, 0, 0]], dtype=torch.int32)

def rows(request):
    return cache[table[request].long()].flatten(0, 1)[: lengths[request]].float()

query = draw(3, heads, latent + rope)
decode = SimpleNamespace(
    seq_lens_i64=torch.tensor(lengths), req_to_token=_expand_block_table(table, size),
    req_pool_indices=torch.arange(3), num_kv_splits=2,
)
read = impl.forward_mqa(query, cache, SimpleNamespace(decode=decode), None)[0].float()
wanted = torch.stack([
    torch.softmax(query[i].float() @ rows(i).T * scale, -1) @ rows(i)[:, :latent] for i in range(3)
])
error = float((read - wanted).abs().max() / wanted.abs().max())

starts = [0, 40, 45]
wide = draw(sum(fresh), heads, nope + rope)
prefill = SimpleNamespace(
    req_to_token=_expand_block_table(table, size).to(torch.int64), req_pool_indices=torch.arange(3),
    cpu_seq_lens=torch.tensor(lengths), extend_seq_lens=torch.tensor(fresh), extend_start_loc=torch.tensor(starts),
    max_len_extend=max(fresh),
)
out = torch.zeros(sum(fresh), heads * value, dtype=torch.bfloat16)
new = torch.cat([rows(i)[lengths[i] - count :] for i, count in enumerate(fresh)]).to(torch.bfloat16)
impl.forward_mha(wide, new[:, :latent].contiguous(), new[:, None, latent:].contiguous(), cache,
                 SimpleNamespace(prefill=prefill), torch.ones(1), out)
errors = []
for i, (start, count) in enumerate(zip(starts, fresh)):
    absorbed = torch.einsum("thn,hln->thl", wide[start : start + count, :, :nope].float(), up.float())
    both = torch.cat([absorbed, wide[start : start + count, :, nope:].float()], -1)
    scores = torch.einsum("thd,sd->hts", both, rows(i)) * scale
    hidden = torch.arange(lengths[i])[None] > torch.arange(lengths[i] - count, lengths[i])[:, None]
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
    seen = torch.einsum("hts,sl->thl", weights, rows(i)[:, :latent])
    right = torch.einsum("thl,hvl->thv", seen, down.float()).flatten(1)
    errors.append(float((out[start : start + count].float() - right).abs().max() / right.abs().max()))
print(json.dumps([error, *errors]))
"""


def test_published_vllm_asks_for_amx(python: Python, published: str) -> None:
    """When this fails, upstream has been cured and the patch can go."""
    done = python(published + CHOOSE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [AMX, PLAIN, PLAIN, PLAIN, PLAIN]


@pytest.mark.installed
def test_installed_vllm_takes_its_fast_backend_on_avx512_bf16_as_well(python: Python) -> None:
    done = python(CHOOSE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [AMX, AMX, PLAIN, PLAIN, PLAIN]


@pytest.mark.skipif(
    not {"amx_bf16", "avx512_bf16"} & set(Path("/proc/cpuinfo").read_text("ascii").split()),
    reason="processor: neither AMX nor AVX-512 BF16, which the kernels of AMX_MLA want",
)
def test_the_kernels_agree_with_attention_in_float32(python: Python) -> None:
    done = python(RESULTS)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) == 4
    assert max(errors) < 0.02, errors
