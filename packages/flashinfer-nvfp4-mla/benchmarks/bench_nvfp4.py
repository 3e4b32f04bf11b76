# SPDX-License-Identifier: Apache-2.0
"""Sparse-MLA decode over 352-byte rows on a CPU core: against memory, a tuned reference and a staged path."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from support.bench import Bench, Unavailable

#: Rows of a token, values of a row, of its latent part, and the softmax's scale.
TOPK, WIDTH, LATENT, SCALE = 2048, 576, 512, 0.05
#: Query tokens of a call.
TOKENS = 8
#: Rows that are picked from, at least; more where they are not four times what the last-level cache holds.
ROWS = 1 << 20
#: Bytes of rows that are taken at most: four times a cache of 512 MB.
MOST = 2 << 30
#: Tokens of a block in vLLM's kernel.
BLOCK = 16


def run(bench: Bench) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # one core: whatever of these is imported first
    import torch

    from flashinfer_nvfp4_mla import Device, _cpu, limits, nvfp4_sparse_mla_decode, quantize

    if platform.machine() != "x86_64" or (reason := _cpu.available()) is not None:
        raise Unavailable("x86-64 with AVX2" if platform.machine() != "x86_64" else f"the CPU kernel: {reason}")
    torch.set_num_threads(1)
    peers = _peers()
    torch.manual_seed(0)
    # Calls take sets of rows in turn that together are four times the cache: none is in it when it is asked for again.
    moved, held = TOKENS * TOPK * 352, _last_level_cache()
    far = min(4 * held, MOST)
    count = max(ROWS // 4 if bench.quick else ROWS, -(-far // 352 // 4096) * 4096)
    some = quantize(torch.randn(4096, LATENT), torch.randn(4096, WIDTH - LATENT))
    cache = some.repeat(count // 4096, 1)
    sets = [torch.randint(0, count, (TOKENS, TOPK), dtype=torch.int32) for _ in range(-(-far // moved))]

    def query(heads: int) -> Any:
        return torch.randn(TOKENS, heads, WIDTH).to(torch.bfloat16)

    def decode(heads: int, backend: str = "cpu") -> Callable[[], object]:
        ask, ids = query(heads), cycle(sets)
        return lambda: nvfp4_sparse_mla_decode(ask, cache, next(ids), SCALE, backend=backend)

    touched = cycle(sets)
    touch = _rate(lambda: peers.touch(cache, next(touched)), moved / 1e9)
    ours = _rate(decode(16), moved / 1e9)
    bandwidth = bench.compare(
        f"16 heads x {TOPK} rows, bytes of rows a second",
        "GB/s",
        ours=ours,
        reference=touch,
        reference_name="the rows touched, random",
    )
    against = {"reference": decode(16, "reference"), "staged": _staged(peers, cache, sets, query(16))}
    for name, peer, aim in (
        ("the tuned reference in torch", against["reference"], None),
        ("staged: unpacked to bfloat16, then vLLM's kernel", against["staged"], ">= 1.3"),
    ):
        bench.compare(
            f"16 heads x {TOPK} rows, tokens a second",
            "1/s",
            ours=_rate(decode(16), TOKENS),
            reference=_rate(peer, TOKENS),
            reference_name=name,
            repeats=5,
            aim=aim,
        )
    core = Device("this core", _median(bandwidth.reference) * 1e9, _flops(bench))
    for heads in (8, 16, 32, 64, 128):
        limit = limits(1, heads, TOPK, core)
        samples = [one / TOKENS for one in bench.measure(decode(heads), unit="us", repeats=5)]
        bench.row(
            f"{heads} heads x {TOPK} rows, a token on one core",
            "us",
            ours=samples,
            reference=[limit.seconds * 1e6],
            reference_name=f"roofline of this core ({limit.bound})",
        )
        if heads == 16:
            bench.row(f"{heads} heads x {TOPK} rows, a token on one core (aim)", "us", ours=samples, aim="<= 400")
    bench.note(f"path {_cpu.isa()}, one thread; {count} rows ({count * 352 / 1e6:.0f} MB), others in each call")
    bench.note(f"last-level cache of {held / 1e6:.0f} MB; rows come again after {len(sets) * moved / 1e6:.0f} MB")
    bench.note(f"the roofline: rows touched, and products in float32 by torch, {core.flops_per_s / 1e9:.0f} GFLOP/s")


def _last_level_cache() -> int:
    """Return how many bytes this core's last-level cache holds; 64 MiB where Linux does not say."""
    try:
        said = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text("utf-8").strip()
        return int(said.removesuffix("K")) << 10
    except (OSError, ValueError):
        return 64 << 20


def _peers() -> Any:
    import tvm_ffi.cpp

    from flashinfer_nvfp4_mla._build import _ninja

    source = Path(__file__).with_name("peers.cc")
    with tempfile.TemporaryDirectory() as folder, _ninja():
        return tvm_ffi.load_module(
            tvm_ffi.cpp.build("peers", cpp_files=[str(source)], extra_cflags=["-O3", "-mavx2"], build_directory=folder)
        )


def _rate(function: Callable[[], object], amount: float) -> Callable[[], float]:
    """Return what calls a function and returns `amount` by the seconds it took."""

    def call() -> float:
        begun = time.perf_counter()
        function()
        return amount / (time.perf_counter() - begun)

    return call


def _median(samples: Any) -> float:
    return float(sorted(samples)[len(samples) // 2])


def _flops(bench: Bench) -> float:
    """Return how many operations a second one core reaches in a product of two float32 matrices."""
    import torch

    size = 1024
    one, other = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    return 2 * size**3 / _median(bench.measure(lambda: torch.matmul(one, other, out=out), repeats=9))


def _staged(peers: Any, cache: Any, sets: list[Any], query: Any) -> Callable[[], object]:
    """Return what unpacks a call's rows to bfloat16 in memory, and attends to them with vLLM's own kernel."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    rows = torch.empty(TOKENS * TOPK // BLOCK, BLOCK, WIDTH, dtype=torch.bfloat16)
    table = torch.arange(TOKENS * TOPK // BLOCK, dtype=torch.int32).view(TOKENS, -1)
    lengths = torch.full((TOKENS,), TOPK, dtype=torch.int32)
    out = torch.empty(*query.shape[:2], LATENT, dtype=torch.bfloat16)
    ids: Iterator[Any] = cycle(sets)

    def attend() -> object:
        peers.unpack(cache, next(ids), rows)
        ops.mla_decode_kvcache_cpu(out, query, rows, SCALE, table, lengths)
        return out

    _agrees(attend, cache, sets[0], query)
    return attend


def _agrees(attend: Callable[[], object], cache: Any, ids: Any, query: Any) -> None:
    """Fail unless the staged path gives what ours does: a peer that is wrong is none."""
    import torch

    from flashinfer_nvfp4_mla import nvfp4_sparse_mla_decode

    ours = nvfp4_sparse_mla_decode(query, cache, ids, SCALE).float()
    theirs = attend()
    assert isinstance(theirs, torch.Tensor)
    error = float((theirs.float() - ours).norm() / ours.norm())
    assert error < 0.02, f"the staged path differs by {error:.3f}"
