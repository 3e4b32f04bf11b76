# SPDX-License-Identifier: Apache-2.0
"""The op: its call, what it refuses, and its numbers against the oracle, on every backend that works here."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer_nvfp4_mla import _op
from flashinfer_nvfp4_mla._format import quantize
from flashinfer_nvfp4_mla._op import nvfp4_sparse_mla_decode

SCALE = 576**-0.5


def tokens_of(rows: int, seed: int = 0, deviation: float = 1.0) -> Any:
    drawn = torch.Generator().manual_seed(seed)
    latent = torch.randn(rows, 512, generator=drawn) * deviation
    return quantize(latent, 2 * torch.randn(rows, 64, generator=drawn))


def queries(tokens: int, heads: int, dtype: Any = torch.bfloat16, seed: int = 1) -> Any:
    return torch.randn(tokens, heads, 576, generator=torch.Generator().manual_seed(seed)).to(dtype)


def picks(tokens: int, width: int, rows: int, seed: int = 2) -> Any:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(0, rows, (tokens, width), generator=drawn, dtype=torch.int32)


# --- numbers ----------------------------------------------------------------------------------------------------------


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Draw arguments of a call, with caches that have gaps, and ids in and out of them."""
    seed = draw(st.integers(0, 2**32 - 1))
    drawn = torch.Generator().manual_seed(seed)
    blocks, size = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    flat = draw(st.booleans())
    row_step = 352 + draw(st.sampled_from([0, 0, 16, 4, 1]))
    block_step = row_step * size + draw(st.sampled_from([0, 352, 704, 8, 3]))
    offset = draw(st.sampled_from([0, 352, 8, 5]))
    memory = torch.full((offset + blocks * block_step + 352,), 0x7F, dtype=torch.uint8)
    shape, strides = ((blocks * size, 352), (row_step, 1)) if flat else ((blocks, size, 352), (block_step, row_step, 1))
    cache = memory.as_strided(shape, strides, offset)
    cache.copy_(tokens_of(blocks * size, seed, draw(st.sampled_from([0.02, 1.0, 5.0]))).view(shape))
    tokens, heads = draw(st.integers(0, 4)), draw(st.sampled_from([1, 3, 8, 16, 24, 40]))
    width = draw(st.sampled_from([0, 1, 7, 32, 33, 64, 130]))
    indices = torch.randint(-3, blocks * size + 3, (tokens, width + 2), generator=drawn, dtype=torch.int32)[:, :width]
    if draw(st.booleans()):
        indices[torch.rand(indices.shape, generator=drawn) < 0.7] = -1
    query = torch.randn(tokens, heads, 640, generator=drawn)[..., 30:606] * draw(st.sampled_from([0.1, 1.0, 8.0]))
    lengths = torch.randint(0, width + 2, (tokens,), generator=drawn, dtype=torch.int32)
    return {
        "query": query.to(draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float8_e4m3fn]))),
        "cache": cache,
        "indices": indices,
        "lengths": draw(st.sampled_from([None, lengths])),
        "bmm1_scale": draw(st.sampled_from([SCALE, 0.3, 0.0])),
        "bmm2_scale": draw(st.sampled_from([1.0, -2.5])),
        "base": draw(st.sampled_from(["basee", "base2"])),
        "out": torch.full((tokens, heads + 1, 520), torch.nan, dtype=draw(st.sampled_from(_op._OUT_TYPES))),
    }


@settings(max_examples=60)
@given(call=calls())
def test_any_call_is_as_the_oracle_says(
    backend: str, oracle: Callable[..., Any], close: Callable[..., None], call: dict[str, Any]
) -> None:
    tokens, heads, _ = call["query"].shape
    out, lse = call["out"][:, :heads, :512], torch.full((tokens, heads), torch.nan)
    scales, lengths = (call["bmm1_scale"], call["bmm2_scale"]), call["lengths"]
    got = nvfp4_sparse_mla_decode(
        call["query"],
        call["cache"],
        call["indices"],
        *scales,
        out=out,
        lse=lse,
        return_lse_base=call["base"],
        sparse_mla_top_k_lens=lengths,
        backend=backend,
    )
    assert got is out
    expected = oracle(call["query"], call["cache"], call["indices"], lengths, *scales, call["base"] == "base2")
    close(out, expected[0], lse, expected[1])
    assert call["out"][:, heads:].isnan().all()
    assert call["out"][..., 512:].isnan().all()


@pytest.mark.parametrize("heads", [1, 8, 13, 16, 32, 64, 128])
@pytest.mark.parametrize("dtype", _op._QUERY_TYPES)
def test_every_head_count_and_type_at_full_width(
    backend: str, oracle: Callable[..., Any], close: Callable[..., None], heads: int, dtype: Any
) -> None:
    cache, indices, lse = tokens_of(300), picks(1, 2048, 300), torch.empty(1, heads)
    query = queries(1, heads, dtype)
    expected = oracle(query, cache, indices, None, SCALE, 1.0, False)
    for kind in (torch.float32, torch.bfloat16):
        out = torch.empty(1, heads, 512, dtype=kind)
        nvfp4_sparse_mla_decode(query, cache, indices, SCALE, out=out, lse=lse, backend=backend)
        close(out, expected[0], lse, expected[1])


def test_more_keys_than_one_chunk(backend: str, oracle: Callable[..., Any], close: Callable[..., None]) -> None:
    cache, indices, lse = tokens_of(200), picks(2, 5000, 200), torch.empty(2, 8)
    indices[0, :4500] = -1
    query, out = queries(2, 8), torch.empty(2, 8, 512)
    nvfp4_sparse_mla_decode(query, cache, indices, SCALE, out=out, lse=lse, backend=backend)
    expected = oracle(query, cache, indices, None, SCALE, 1.0, False)
    close(out, expected[0], lse, expected[1])


def memory(kind: str) -> int:
    """Return this process's memory in bytes: VmRSS, as it is, or VmHWM, the most it was."""
    found = re.search(rf"{kind}:\s*(\d+) kB", Path("/proc/self/status").read_text("ascii"))
    assert found
    return int(found[1]) * 1024


@pytest.mark.parametrize(("tokens", "heads", "width"), [(65_536, 2, 5), (512, 128, 1)])
def test_many_tokens_and_heads_take_little_memory_beside_the_output(
    backend: str, tokens: int, heads: int, width: int
) -> None:
    """At once and in float32, all rows of the first would be 755 MB, all queries and sums of the second 400 MB."""
    query, cache, indices = queries(16, heads).repeat(tokens // 16, 1, 1), tokens_of(64), picks(tokens, width, 64)
    out = torch.zeros(tokens, heads, 512, dtype=torch.bfloat16)
    first = nvfp4_sparse_mla_decode(query[:64], cache, indices[:64], SCALE, backend=backend)
    Path("/proc/self/clear_refs").write_text("5", "ascii")  # the most so far is forgotten
    before = memory("VmRSS")
    nvfp4_sparse_mla_decode(query, cache, indices, SCALE, out=out, backend=backend)
    assert memory("VmHWM") - before < 128 << 20
    torch.testing.assert_close(out[:64], first, rtol=1e-2, atol=1e-3)
    last = nvfp4_sparse_mla_decode(query[-16:], cache, indices[-16:], SCALE, backend=backend)
    torch.testing.assert_close(out[-16:], last, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("given", [True, False])
def test_nothing_is_recorded_for_a_backward_pass(backend: str, given: bool) -> None:
    cache, indices = tokens_of(64), picks(2, 32, 64)
    query, out = queries(2, 8).requires_grad_(), torch.empty(2, 8, 512) if given else None
    got = nvfp4_sparse_mla_decode(query, cache, indices, SCALE, out=out, backend=backend)
    assert not got.requires_grad
    plain = nvfp4_sparse_mla_decode(query.detach(), cache, indices, SCALE, backend=backend)
    torch.testing.assert_close(got.to(plain.dtype), plain)
    (got.sum() * query.sum()).backward()  # what is around it has its gradient
    assert query.grad is not None


# --- the call ---------------------------------------------------------------------------------------------------------


def test_calls_of_flashinfers_op_work_unchanged(backend: str) -> None:
    """By position and by name, as in 0.7.4. The default backend is named otherwise."""
    theirs = ["query", "kv_cache", "indices", "bmm1_scale", "bmm2_scale", "out", "num_ctas_per_token", "backend"]
    parameters = inspect.signature(nvfp4_sparse_mla_decode).parameters
    assert list(parameters)[: len(theirs)] == theirs
    cache, query, indices = tokens_of(64).view(4, 16, 352), queries(3, 16, torch.float8_e4m3fn), picks(3, 32, 64)
    by_name = nvfp4_sparse_mla_decode(
        query=query, kv_cache=cache, indices=indices, bmm1_scale=SCALE, bmm2_scale=0.5, num_ctas_per_token=4
    )
    out = torch.empty(3, 16, 512, dtype=torch.bfloat16)
    assert nvfp4_sparse_mla_decode(query, cache, indices, SCALE, 0.5, out, 8, backend) is out
    assert by_name.dtype == torch.bfloat16
    torch.testing.assert_close(by_name, out, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("lead", [(64,), (4, 16), (4, 2, 8), (4, 16, 1), (1, 4, 2, 8)])
def test_a_cache_of_any_leading_shape(backend: str, lead: tuple[int, ...]) -> None:
    cache, query, indices = tokens_of(64), queries(2, 8), picks(2, 32, 64)
    expected = nvfp4_sparse_mla_decode(query, cache, indices, SCALE, backend=backend)
    got = nvfp4_sparse_mla_decode(query, cache.view(*lead, 352), indices, SCALE, backend=backend)
    assert torch.equal(got, expected)


def test_torch_compile_takes_it_whole(backend: str) -> None:
    def step(query: Any, cache: Any, indices: Any, lse: Any, scale: float) -> Any:
        out = nvfp4_sparse_mla_decode(query * 2, cache, indices, scale, lse=lse, backend=backend)
        return out + lse[..., None].to(out.dtype)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    cache = tokens_of(64)
    for tokens, scale in ((2, SCALE), (2, 0.1), (5, 0.2)):
        call = (queries(tokens, 8), cache, picks(tokens, 32, 64))
        lse, plain_lse = torch.empty(tokens, 8), torch.empty(tokens, 8)
        assert torch.equal(compiled(*call, lse, scale), step(*call, plain_lse, scale))
        assert torch.equal(lse, plain_lse)


@pytest.mark.parametrize("with_lse", [True, False])
def test_the_torch_op_keeps_torchs_rules(backend: str, with_lse: bool) -> None:
    lse = torch.empty(2, 8) if with_lse else None
    lengths = torch.tensor([3, 32], dtype=torch.int32) if with_lse else None
    call = (queries(2, 8), tokens_of(64), picks(2, 32, 64), lengths, SCALE, 1.0, torch.empty(2, 8, 512), lse)
    op = torch.ops.flashinfer_nvfp4_mla.nvfp4_sparse_mla_decode.default
    results = torch.library.opcheck(op, (*call, False, backend, False))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("heads", [1, 8])
def test_out_may_hold_tokens_within_heads(backend: str, tokens: int, heads: int) -> None:
    call = (queries(tokens, heads), tokens_of(64), picks(tokens, 32, 64), SCALE)
    out = torch.empty(heads, tokens, 512, dtype=torch.bfloat16).transpose(0, 1)
    assert torch.equal(nvfp4_sparse_mla_decode(*call, out=out, backend=backend), out)
    assert torch.equal(out, nvfp4_sparse_mla_decode(*call, backend=backend))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_out_is_made_in_the_querys_type(backend: str, kind: Any) -> None:
    got = nvfp4_sparse_mla_decode(queries(2, 8, kind), tokens_of(64), picks(2, 32, 64), SCALE, backend=backend)
    assert got.shape == (2, 8, 512)
    assert got.dtype == (torch.bfloat16 if kind == torch.float8_e4m3fn else kind)


# --- refusals ---------------------------------------------------------------------------------------------------------

QUERY, CACHE, INDICES = (
    torch.zeros(2, 8, 576, dtype=torch.bfloat16),
    torch.zeros(64, 352, dtype=torch.uint8),
    torch.zeros(2, 32, dtype=torch.int32),
)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"query": QUERY.float()}, TypeError, "query must be of torch.bfloat16 or .*, got torch.float32"),
        ({"query": QUERY[..., :512]}, ValueError, r"query must be \[any, any, 576\], got \[2, 8, 512\]"),
        ({"query": QUERY[:, :0]}, ValueError, "query must have 1 to 128 heads, got 0"),
        ({"query": QUERY.repeat(1, 17, 1)}, ValueError, "query must have 1 to 128 heads, got 136"),
        ({"query": QUERY.mT.contiguous().mT}, ValueError, "query: its last dimension must be contiguous"),
        ({"query": None}, TypeError, "query must be a tensor, got NoneType"),
        ({"kv_cache": CACHE.view(torch.int8)}, TypeError, "kv_cache must be a uint8 tensor, got torch.int8"),
        ({"kv_cache": CACHE.view(-1)}, ValueError, "kv_cache must have rows of 352 bytes, got 22528"),
        ({"kv_cache": CACHE[0]}, ValueError, r"kv_cache must be \[..., rows, 352\], got \[352\]"),
        ({"kv_cache": CACHE.view(2, 4, 8, 352)[:, ::2]}, ValueError, "is not blocks of equally spaced rows"),
        ({"indices": INDICES.long()}, TypeError, "indices must be of torch.int32, got torch.int64"),
        ({"indices": INDICES[:1]}, ValueError, r"indices must be \[2, any\], got \[1, 32\]"),
        ({"indices": INDICES.to("meta")}, ValueError, "indices is on meta, query on cpu"),
        ({"out": torch.zeros(2, 8, 576)}, ValueError, r"out must be \[2, 8, 512\], got \[2, 8, 576\]"),
        ({"out": torch.zeros(2, 8, 512).double()}, TypeError, "out must be of .* got torch.float64"),
        (
            {"out": torch.zeros(1, 8, 512).expand(2, 8, 512)},
            ValueError,
            r"out overlaps itself: \[2, 8, 512\] with strides \(0, 512, 1\)",
        ),
        ({"out": torch.zeros(2, 1, 512).expand(2, 8, 512)}, ValueError, "out overlaps itself"),
        ({"out": torch.zeros(8192).as_strided((2, 8, 512), (4096, 256, 1))}, ValueError, "out overlaps itself"),
        ({"lse": torch.zeros(2, 1).expand(2, 8)}, ValueError, "lse.* must be contiguous, got strides"),
        ({"lse": torch.zeros(2, 8).half()}, TypeError, "lse must be of torch.float32, got torch.float16"),
        ({"lse": torch.zeros(8, 2).T}, ValueError, "lse.* must be contiguous, got strides"),
        ({"sparse_mla_top_k_lens": torch.zeros(2)}, TypeError, "sparse_mla_top_k_lens must be of torch.int32"),
        ({"return_lse_base": "e"}, ValueError, "return_lse_base must be one of basee, base2, got 'e'"),
        ({"num_ctas_per_token": 0}, ValueError, "num_ctas_per_token must be at least 1, got 0"),
        ({"num_ctas_per_token": "a"}, TypeError, "num_ctas_per_token must be an int or None, got 'a'"),
        ({"bmm1_scale": "0.05"}, TypeError, "bmm1_scale must be a number, got '0.05'"),
        ({"bmm1_scale": None}, TypeError, "bmm1_scale must be a number, got None"),
        ({"bmm2_scale": [1.0]}, TypeError, r"bmm2_scale must be a number, got \[1.0\]"),
        ({"backend": "cuda"}, ValueError, "backend must be one of auto, reference, cpu, got 'cuda': that is a kernel"),
        ({"backend": "best"}, ValueError, "backend must be one of auto, reference, cpu, got 'best'$"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_before_anything_is_written(
    change: dict[str, Any], error: type[Exception], said: str
) -> None:
    out = torch.full((2, 8, 512), 7.0)
    call = {"query": QUERY, "kv_cache": CACHE, "indices": INDICES, "bmm1_scale": SCALE, "out": out, **change}
    with pytest.raises(error, match=said):
        nvfp4_sparse_mla_decode(**call)
    assert (out == 7).all()


def test_without_a_kernel_auto_takes_the_reference_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = SimpleNamespace(available=lambda: "no C++ compiler: set CXX")
    monkeypatch.setattr("flashinfer_nvfp4_mla._cpu", missing, raising=False)
    monkeypatch.setitem(__import__("sys").modules, "flashinfer_nvfp4_mla._cpu", missing)
    call = (queries(2, 8), tokens_of(64), picks(2, 32, 64), SCALE)
    expected = nvfp4_sparse_mla_decode(*call, backend="reference")
    with pytest.warns(UserWarning, match=r"takes the backend 'reference', which is slower: no C\+\+ compiler: set CXX"):
        assert torch.equal(nvfp4_sparse_mla_decode(*call), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nvfp4_sparse_mla_decode(*call)
    with pytest.raises(RuntimeError, match=r"backend 'cpu' does not work here: no C\+\+ compiler: set CXX"):
        nvfp4_sparse_mla_decode(*call, backend="cpu")
