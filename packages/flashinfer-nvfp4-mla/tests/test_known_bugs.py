# SPDX-License-Identifier: Apache-2.0
"""What went wrong in other kernels over such rows, as tests of ours: the number is that of our list of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer_nvfp4_mla import _op
from flashinfer_nvfp4_mla._format import append, quantize
from flashinfer_nvfp4_mla._op import nvfp4_sparse_mla_decode

SCALE = 576**-0.5
HEADS = 8
NAN_ROW = 0x7F


@pytest.fixture
def cache() -> Any:
    drawn = torch.Generator().manual_seed(0)
    return quantize(torch.randn(128, 512, generator=drawn), torch.randn(128, 64, generator=drawn))


@pytest.fixture
def query() -> Any:
    return torch.randn(3, HEADS, 576, generator=torch.Generator().manual_seed(1)).bfloat16()


def run(backend: str, query: Any, cache: Any, indices: Any, **more: Any) -> tuple[Any, Any]:
    """Return output and LSE; both begin as NaN."""
    indices = torch.as_tensor(indices, dtype=torch.int32)
    out = torch.full((*query.shape[:2], 512), torch.nan)
    lse = torch.full(query.shape[:2], torch.nan)
    nvfp4_sparse_mla_decode(query, cache, indices, SCALE, out=out, lse=lse, backend=backend, **more)
    return out, lse


def test_1_keys_after_chunks_without_a_row_count(
    backend: str, cache: Any, query: Any, oracle: Callable[..., Any], close: Callable[..., None]
) -> None:
    """vLLM #48364: a first chunk that is masked as a whole made the running maximum -inf, and all that followed NaN."""
    indices = torch.full((3, 4096), -1, dtype=torch.int32)
    indices[0, 4090:] = torch.arange(6)
    indices[1, 2000] = 7
    out, lse = run(backend, query, cache, indices)
    expected = oracle(query, cache, indices, None, SCALE, 1.0, False)
    close(out, expected[0], lse, expected[1])


def test_2_a_token_without_rows_is_zero_and_minus_infinity(backend: str, cache: Any, query: Any) -> None:
    """miles #2079: -1 was read as the row before the first, and 0 * inf and 0 / 0 are NaN."""
    memory = torch.full((129, 352), NAN_ROW, dtype=torch.uint8)
    memory[1:] = cache
    indices = [[-1] * 64, [3] + [-1] * 63, [-1] * 64]
    out, lse = run(backend, query, memory[1:], indices)
    assert (out[[0, 2]] == 0).all()
    assert (lse[[0, 2]] == -torch.inf).all()
    assert out[1].isfinite().all()
    none, none_lse = run(backend, query, cache, torch.empty(3, 0))
    assert (none == 0).all()
    assert (none_lse == -torch.inf).all()
    empty, empty_lse = run(backend, query, cache[:0], [[0] * 32] * 3)
    assert (empty == 0).all()
    assert (empty_lse == -torch.inf).all()


def test_3_rows_past_two_and_four_gibibytes(backend: str, cache: Any, query: Any, tmp_path: Path) -> None:
    """flashinfer #3130, vLLM #56037, aiter #5765: id times row size in 32 bits. The file is sparse."""
    block, blocks = 64, 190_700  # 4.29e9 bytes and some
    shape = (blocks, block, 352)
    size = blocks * block * 352
    assert size > 2**32
    far = torch.from_file(str(tmp_path / "cache"), shared=True, size=size, dtype=torch.uint8).view(shape)
    ids = torch.tensor([6_100_806, 6_100_805, 9_000_000, 2**32 // 352 + 1, blocks * block - 1, 0])
    assert 6_100_806 * 352 > 2**31
    far[ids // block, ids % block] = cache[:6]
    expected, expected_lse = run(backend, query, cache, [[0, 1, 2, 3, 4, 5]] * 3)
    for view in (far, far.view(-1, 352)):
        out, lse = run(backend, query, view, ids.repeat(3, 1))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_4_nan_in_rows_that_are_not_picked_never_arrives(backend: str, cache: Any, query: Any, byte: int) -> None:
    """aiter #4245, flashinfer #942, sglang #16678: masked slots were read as row 0 and weighted with 0."""
    poisoned = torch.full_like(cache, byte)
    picked = [5, 17, 100, 31, 64]
    poisoned[picked] = cache[picked]
    indices = [[*picked, *[-1] * 27], [-1, 128, 5, *[-1] * 28, 2**31 - 1], [17] * 30 + [-5, -(2**31)]]
    out, lse = run(backend, query, poisoned, indices)
    clean, clean_lse = run(backend, query, cache, indices)
    assert torch.equal(out, clean)
    assert torch.equal(lse, clean_lse)
    ragged = torch.tensor([2, 3, 1], dtype=torch.int32)
    beyond = [[5, 17, 0, 1], [5, 17, 100, 2], [64, 3, 3, 3]]
    assert run(backend, query, poisoned, beyond, sparse_mla_top_k_lens=ragged)[0].isfinite().all()


def test_4_nan_in_a_row_that_is_picked_is_not_hidden(backend: str, cache: Any, query: Any) -> None:
    cache[9, 320] = NAN_ROW
    out, _ = run(backend, query, cache, [[9, 1], [1, 2], [2, 9]])
    assert out[[0, 2], :, :16].isnan().all()
    assert out[1].isfinite().all()


def test_5_the_bases_of_lse_differ_by_ln_2_and_parts_merge(backend: str, cache: Any, query: Any) -> None:
    """vLLM #47079, sglang #33926: LSE to base 2 was merged as if it were to base e."""
    indices = torch.arange(96, dtype=torch.int32).view(3, 32)
    whole, lse = run(backend, query, cache, indices)
    _, lse2 = run(backend, query, cache, indices, return_lse_base="base2")
    torch.testing.assert_close(lse2 * torch.log(torch.tensor(2.0)), lse, rtol=1e-5, atol=1e-5)
    parts = [run(backend, query, cache, part) for part in (indices[:, :7], indices[:, 7:])]
    weights = torch.stack([(part_lse - lse).exp() for _, part_lse in parts])
    merged = sum(weight[..., None] * out for weight, (out, _) in zip(weights, parts, strict=True))
    torch.testing.assert_close(merged, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gap", [352, 704, 8, 1])
def test_6_blocks_further_apart_than_they_are_long(backend: str, cache: Any, query: Any, gap: int) -> None:
    """vLLM #47779, #55528, #54465: the step from block to block was computed from the block's size."""
    step = 16 * 352 + gap
    memory = torch.full((8 * step,), NAN_ROW, dtype=torch.uint8)
    strided = memory.as_strided((8, 16, 352), (step, 352, 1))
    strided.copy_(cache.view(8, 16, 352))
    indices = torch.randint(0, 128, (3, 40), generator=torch.Generator().manual_seed(3))
    assert torch.equal(run(backend, query, strided, indices)[0], run(backend, query, cache, indices)[0])
    apart = torch.full((128, 352 + gap), NAN_ROW, dtype=torch.uint8)[:, :352].copy_(cache)
    assert torch.equal(run(backend, query, apart, indices)[0], run(backend, query, cache, indices)[0])


def test_7_padding_is_skipped_where_it_is_read_and_where_it_is_written(backend: str, cache: Any, query: Any) -> None:
    """flashinfer #5015: stale ids of a graph's padding hung the kernel. vLLM #38719: padding was written to slot 0."""
    stale = torch.full((3, 32), 2**31 - 1, dtype=torch.int32)
    stale[0] = torch.arange(32)
    out, lse = run(backend, query, cache, stale)
    assert (out[1:] == 0).all()
    assert (lse[1:] == -torch.inf).all()
    before = cache.clone()
    append(cache, torch.ones(3, 512), torch.ones(3, 64), torch.tensor([-1, -1, -1]))
    assert torch.equal(cache, before)


def test_8_ids_outside_the_cache_are_empty_slots(backend: str, cache: Any, query: Any) -> None:
    """sglang #30512, b12x #158, FlashMLA #184: slots that top-k left unwritten were taken for rows."""
    garbage = [[128, 2**31 - 1, -2, -(2**31), 4, 1_000_000, 9, -1]] * 3
    assert torch.equal(run(backend, query, cache, garbage)[0], run(backend, query, cache, [[4, 9]] * 3)[0])


def test_8_ids_outside_the_cache_are_an_error_when_debugging(
    backend: str, cache: Any, query: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = [[0, -1, 127]] * 3, [[0, -1, 127], [0, 128, -7], [999, 0, 0]]
    out = torch.full((3, HEADS, 512), 7.0)

    def check(indices: list[list[int]], **more: Any) -> None:
        ids = torch.tensor(indices, dtype=torch.int32)
        nvfp4_sparse_mla_decode(query, cache, ids, SCALE, out=out, backend=backend, **more)

    said = r"indices\[1, 1\] is 128, outside a cache of 128 rows"
    with pytest.raises(ValueError, match=said):
        check(bad, check_indices=True)
    assert (out == 7).all()
    with pytest.raises(ValueError, match=r"indices\[1, 2\] is -7"):
        check([[0, 0, 0], [0, 0, -7], [0, 0, 0]], check_indices=True)
    check(good, check_indices=True)
    check(bad, check_indices=True, sparse_mla_top_k_lens=torch.tensor([3, 1, 0], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"sparse_mla_top_k_lens\[2\] is 4, of 3 indices"):
        check(good, check_indices=True, sparse_mla_top_k_lens=torch.tensor([3, 1, 4], dtype=torch.int32))
    check(bad)
    monkeypatch.setenv(_op.CHECK_VARIABLE, "1")
    with pytest.raises(ValueError, match=said):
        check(bad)
    monkeypatch.setenv(_op.CHECK_VARIABLE, "yes")
    with pytest.raises(ValueError, match=r"FLASHINFER_NVFP4_MLA_CHECK_INDICES='yes'"):
        check(good)


@pytest.mark.parametrize("width", [1, 31, 33, 96, 100, 2049])
def test_9_any_number_of_indices_is_served(
    backend: str, cache: Any, query: Any, width: int, oracle: Callable[..., Any], close: Callable[..., None]
) -> None:
    """flashinfer #4541, #3828: an unsupported top-k went to another kernel, which blamed something else."""
    indices = torch.randint(-1, 128, (3, width), generator=torch.Generator().manual_seed(width), dtype=torch.int32)
    out, lse = run(backend, query, cache, indices)
    expected = oracle(query, cache, indices, None, SCALE, 1.0, False)
    close(out, expected[0], lse, expected[1])


def test_11_indices_past_a_tokens_length_and_heads_past_the_last_are_not_read(
    backend: str, cache: Any, query: Any
) -> None:
    """vLLM #36524, #36616, #44550: lengths were ignored, and padding of the heads was read before it was written."""
    indices = torch.randint(0, 128, (3, 64), generator=torch.Generator().manual_seed(5))
    lengths = torch.tensor([0, 5, 64], dtype=torch.int32)
    cut = indices.clone()
    for token, length in enumerate(lengths.tolist()):
        cut[token, length:] = -1
    out, lse = run(backend, query, cache, indices, sparse_mla_top_k_lens=lengths)
    expected, expected_lse = run(backend, query, cache, cut)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    padded = torch.full((3, 16, 576), torch.nan, dtype=torch.bfloat16)
    padded[:, :HEADS] = query
    assert torch.equal(run(backend, padded[:, :HEADS], cache, cut)[0], expected)


def test_13_every_scale_is_used_as_it_is(backend: str) -> None:
    """FlashMLA #184, #192: scales went through a narrower type. Here one row per e4m3 number, each picked alone."""
    rows = torch.zeros(126, 352, dtype=torch.uint8)
    rows[:, :256] = 0x97  # 6 and -0.5
    rows[:, 320:] = torch.arange(1, 127, dtype=torch.uint8)[:, None]
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    query = torch.zeros(126, HEADS, 576, dtype=torch.bfloat16)
    query[..., 0] = 2.0**-8
    out, lse = run(backend, query, rows, torch.arange(126)[:, None])
    expected = torch.tensor([6.0, -0.5]).repeat(256) * scales[:, None, None]
    assert torch.equal(out, expected.expand(126, HEADS, 512))
    torch.testing.assert_close(lse, (SCALE * 2.0**-8 * 6 * scales)[:, None].expand(126, HEADS), rtol=1e-5, atol=1e-7)


def test_15_scales_stand_where_the_layout_says(backend: str) -> None:
    """vLLM #46329: writer and test took the scales in order, and agreed. Here the bytes are set by hand."""
    row = torch.zeros(1, 352, dtype=torch.uint8)
    row[:, :256] = 0x22  # 1 and 1
    for group in range(32):
        row[0, 320 + 8 * (group % 4) + group // 4] = 0x38 + group  # 1 * 2^(group / 8), in eight steps
    query = torch.zeros(1, HEADS, 576, dtype=torch.bfloat16)
    out, _ = run(backend, query, row, [[0]])
    expected = [(8 + group % 8) / 8 * 2.0 ** (group // 8) for group in range(32)]
    assert out[0, 0].view(32, 16)[:, 3].tolist() == expected


@pytest.mark.parametrize(("width", "whose"), [(368, "b12x"), (432, "b12x"), (416, "SGLang"), (656, "fp8_ds_mla")])
def test_16_rows_of_the_same_name_and_another_width_are_refused(
    backend: str, query: Any, width: int, whose: str
) -> None:
    """local-inference-lab/vllm #549: `nvfp4_ds_mla` names rows of 352 bytes here and of 432 or 368 there."""
    with pytest.raises(ValueError, match=f"kv_cache must have rows of 352 bytes, got {width} .{whose}"):
        run(backend, query, torch.zeros(4, width, dtype=torch.uint8), [[0]] * 3)
