# SPDX-License-Identifier: Apache-2.0
"""`vllm/cpu-mla-prefix-caching`: needs vLLM's CPU build, on any processor."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from serving_stack.model import write_model

PATCH = "vllm/cpu-mla-prefix-caching"

Python = Callable[..., "subprocess.CompletedProcess[str]"]

#: What vLLM makes of a configuration on a processor with neither AMX nor AVX-512 BF16, for given block sizes.
SETTLE = """
import copy, json
import torch
torch.cpu._is_amx_tile_supported = lambda: True
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import CpuArchEnum

given = EngineArgs(MODEL, skip_tokenizer_init=True, max_model_len=2048, block_size=32, enforce_eager=True)
given = given.create_engine_config()
torch.cpu._is_amx_tile_supported = torch.cpu._is_avx512_bf16_supported = lambda: False
found = []
for architecture in (CpuArchEnum.X86, CpuArchEnum.ARM):
    CpuPlatform.get_cpu_architecture = classmethod(lambda cls: architecture)
    for size, dtype in ((32, torch.bfloat16), (64, torch.float16), (40, torch.float32), (None, torch.bfloat16)):
        config = copy.deepcopy(given)
        config.model_config.dtype = dtype
        config.cache_config.block_size = size or 128
        config.cache_config.user_specified_block_size = size is not None
        CpuPlatform.check_and_update_config(config)
        cache, scheduler = config.cache_config, config.scheduler_config
        found.append([cache.block_size, cache.enable_prefix_caching, scheduler.enable_chunked_prefill])
print(json.dumps(found))
"""

#: The backend's own decode and its reader of a cached context, over blocks of `size` tokens `step` rows apart, against
#: attention in float32 over the same rows; and a cache whose blocks are no whole number of small blocks apart.
RESULTS = """
import json
from types import SimpleNamespace
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

current_platform.import_kernels()
torch.manual_seed(0)
width, latent, heads, scale = 576, 512, 8, 0.05
impl = object.__new__(CPUMLAImpl)          # its constructor wants a model's layer
impl.kv_lora_rank, impl.scale = latent, scale
found = {}
for name, size, step, dtype in (
    ("alone", 32, 32, torch.bfloat16), ("outer", 32, 96, torch.bfloat16), ("three", 48, 96, torch.float32),
    ("odd", 32, 75, torch.bfloat16), ("small", 16, 16, torch.float16), ("small outer", 16, 40, torch.float16),
):
    pool = (torch.randn(9 * step, width) * 0.5).to(dtype)
    cache = pool.as_strided((9, size, width), (step * width, width, 1))
    table = torch.tensor([[3, 8, 1, 6], [7, 0, 0, 0], [5, 2, 0, 0]], dtype=torch.int32)
    lengths = [3 * size + 5, 1, 2 * size]
    rows = [cache[table[one].long()].flatten(0, 1)[: lengths[one]].float() for one in range(3)]
    query = torch.randn(3, heads, width).to(dtype)
    metadata = SimpleNamespace(decode=SimpleNamespace(block_table=table, seq_lens=torch.tensor(lengths)))
    read = impl.forward_mqa(query, cache, metadata, None)[0].float()
    wanted = torch.stack([
        torch.softmax(query[i].float() @ rows[i].T * scale, -1) @ rows[i][:, :latent] for i in range(3)
    ])
    starts, counts = torch.tensor([size + 3, 0, size]), torch.tensor([size, 1, 7])
    context = torch.empty(int(counts.sum()), width, dtype=dtype)
    ops.gather_mla_context_cache_cpu(
        src_cache=cache, dst=context, block_table=table, starts=starts,
        cu_seq_lens=torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
    )
    part = torch.cat([rows[i][starts[i] : starts[i] + counts[i]] for i in range(3)])
    error = float((read - wanted).abs().max() / wanted.abs().max())
    found[name] = [error, torch.equal(context.float(), part), CPUMLABackend.supports_block_size(size)]
print(json.dumps(found))
"""


def ran(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def settle(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"MODEL = {str(write_model(tmp_path_factory.mktemp('model') / 'glm-tiny'))!r}\n{SETTLE}"


def test_published_vllm_caches_no_prefix_for_mla_without_amx(python: Python, published: str, settle: str) -> None:
    """When this fails, upstream has been cured and the patch can go."""
    assert ran(python(published + settle)) == [[16, False, False]] * 8


@pytest.mark.installed
def test_installed_vllm_caches_prefixes_and_prefills_in_chunks_on_any_processor(python: Python, settle: str) -> None:
    """Blocks of a multiple of 16 tokens stay as they were asked for."""
    assert ran(python(settle)) == [[size, True, True] for size in (32, 64, 16, 16)] * 2


@pytest.mark.installed
def test_installed_backend_reads_blocks_of_any_size_and_step(python: Python) -> None:
    found = ran(python(RESULTS))
    assert set(found) == {"alone", "outer", "three", "odd", "small", "small outer"}
    for name, (error, context, supported) in found.items():
        assert error < 0.02, name
        assert context, name
        assert supported, name
