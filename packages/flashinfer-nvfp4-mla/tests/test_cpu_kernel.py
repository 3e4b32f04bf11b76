# SPDX-License-Identifier: Apache-2.0
"""The C++ kernel, each of its paths, against float64.

The paths this processor has run as they are. Those for AVX512-BF16 and AMX run everywhere once more with their
intrinsics emulated (`emulated_intrinsics.h`): what they compute is tested on every x86 machine, how fast they are not.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer_nvfp4_mla import _build, _cpu

EMULATED = ("avx512_bf16", "amx") if platform.machine() == "x86_64" else ()
BFLOAT16, FLOAT16, FLOAT32, FLOAT8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


@functools.cache
def emulated() -> tuple[Any, tuple[str, ...]]:
    import tvm_ffi

    library = _build.compiled(("-DNVFP4_MLA_EMULATE", "-O1"), Path(__file__).parent)
    return tvm_ffi.load_module(str(library)), EMULATED


def take(path: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Take one of the paths until the patches are undone."""
    isa, _, how = path.partition("-")
    if how:
        monkeypatch.setattr(_cpu, "_load", emulated)
    monkeypatch.setenv(_cpu.ISA_VARIABLE, isa)
    assert _cpu.isa() == isa
    return isa


REAL, STAND_INS = _cpu.isas(), tuple(f"{isa}-emulated" for isa in EMULATED)


@pytest.fixture(params=[*REAL, *STAND_INS])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Take one of the paths."""
    return take(request.param, monkeypatch)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def some_rows(count: int, seed: int = 0) -> Any:
    """Make rows of every kind of number, none of them NaN."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 256, (count, 352), dtype=torch.uint8, generator=random)
    small = torch.randint(0, 0x40, (count, 96), dtype=torch.uint8, generator=random)  # e4m3 up to 1.875
    rows[:, 256:] = small | (rows[:, 256:] & 0x80)
    return rows


def some_query(tokens: int, heads: int, kind: Any = BFLOAT16, seed: int = 0) -> Any:
    return torch.randn(tokens, heads, 576, generator=torch.Generator().manual_seed(seed)).to(kind)


def some_indices(tokens: int, keys: int, rows: int, seed: int = 0) -> Any:
    """Make lists with repetitions, of which a tenth is empty: -1, and past the end."""
    random = torch.Generator().manual_seed(seed)
    spread = max(1, rows // 20)
    return torch.randint(-spread, rows + spread, (tokens, keys), dtype=torch.int32, generator=random)


def decode(
    query: Any,
    cache: Any,
    indices: Any,
    lengths: Any = None,
    *,
    scale: float = 576**-0.5,
    scale2: float = 1.0,
    kind: Any = FLOAT32,
    base2: bool = False,
) -> tuple[Any, Any]:
    """Run the kernel into memory that holds something else."""
    tokens, heads, _ = query.shape
    out, lse = torch.full((tokens, heads, 512), 7, dtype=kind), torch.full((tokens, heads), 7.0)
    _cpu.decode(query, cache, indices, lengths, scale, scale2, out, lse, base2)
    return out, lse


@pytest.mark.parametrize("heads", [1, 8, 16, 17, 64, 128])
def test_heads_ragged_lists_and_empty_slots(path: str, heads: int, oracle: Any, close: Any) -> None:
    query, rows, indices = some_query(4, heads), some_rows(120), some_indices(4, 150, 120)
    indices[0, :110] = -1  # tiles without a key come first
    lengths = torch.tensor([150, 0, 1, 97], dtype=torch.int32)
    out, lse = decode(query, rows, indices, lengths, scale2=1.5)
    expected, expected_lse = oracle(query, rows, indices, lengths, 576**-0.5, 1.5, False)
    close(out, expected, lse, expected_lse)
    assert (out[1] == 0).all()
    assert torch.isneginf(lse[1]).all()


@pytest.mark.parametrize("kind", [BFLOAT16, FLOAT16, FLOAT8])
@pytest.mark.parametrize("out_kind", [BFLOAT16, FLOAT16, FLOAT32])
def test_types_of_query_and_output(path: str, kind: Any, out_kind: Any, oracle: Any, close: Any) -> None:
    query, rows, indices = some_query(2, 16, kind), some_rows(100), some_indices(2, 100, 100)
    out, lse = decode(query, rows, indices, kind=out_kind, base2=True)
    expected, expected_lse = oracle(query.float(), rows, indices, None, 576**-0.5, 1.0, True)
    close(out, expected, lse, expected_lse)


def test_float32_output_is_far_better_than_weights_in_bfloat16_would_be(path: str, oracle: Any) -> None:
    query, rows, indices = some_query(2, 16, FLOAT16), some_rows(100), some_indices(2, 100, 100)
    out, _ = decode(query, rows, indices, scale=0.2)
    expected = torch.from_numpy(oracle(query, rows, indices, None, 0.2, 1.0, False)[0])
    assert ((out - expected).norm(dim=-1) <= 3e-5 * expected.norm(dim=-1)).all()


def test_one_key_gives_the_latents_of_its_row_exactly_for_every_number_there_is(path: str, decoded_row: Any) -> None:
    rows = some_rows(256)
    rows[:, :256] = torch.arange(256, dtype=torch.uint8)  # every pair of e2m1
    rows[:, 320:] = torch.arange(256, dtype=torch.uint8)[:, None]  # every scale
    out, _ = decode(some_query(256, 1), rows, torch.arange(256, dtype=torch.int32)[:, None])
    for code in range(256):
        expected = torch.from_numpy(decoded_row(rows[code].numpy())[:512]).float()
        torch.testing.assert_close(out[code, 0], expected, rtol=0, atol=0, equal_nan=True)


def test_every_positional_value_counts_in_its_place(path: str) -> None:
    """Score by one dimension at a time: LSE of one key is the score."""
    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    rows = some_rows(254)
    rows[:, 256:320] = torch.tensor(codes, dtype=torch.uint8)[:, None]
    query = torch.zeros(254, 64, 576, dtype=BFLOAT16)
    query[:, torch.arange(64), 512 + torch.arange(64)] = 1
    _, lse = decode(query, rows, torch.arange(254, dtype=torch.int32)[:, None], scale=1.0)
    expected = torch.tensor(codes, dtype=torch.uint8).view(FLOAT8).float()[:, None].expand(254, 64)
    torch.testing.assert_close(lse, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("block_size", [1, 3, 16, 48])
def test_blocks_that_lie_apart(path: str, block_size: int, oracle: Any, close: Any) -> None:
    blocks = 96 // block_size
    pool = torch.full((blocks, block_size * 3 + 1, 352), 0xFF, dtype=torch.uint8)  # between them NaN
    cache = pool[:, 1 : 1 + 2 * block_size : 2]
    cache.copy_(some_rows(blocks * block_size).view(blocks, block_size, 352))
    query, indices = some_query(2, 8), some_indices(2, 70, blocks * block_size)
    out, lse = decode(query, cache, indices)
    close(out, *oracle(query, cache, indices, None, 576**-0.5, 1.0, False)[:1])
    same, same_lse = decode(query, cache.reshape(-1, 352), indices)
    assert torch.equal(out, same)
    assert torch.equal(lse, same_lse)


def test_strided_query_indices_output_and_rows(path: str) -> None:
    query, rows, indices = some_query(3, 20), some_rows(90), some_indices(3, 70, 90)
    lengths = torch.tensor([70, 30, 5], dtype=torch.int32)
    expected, _ = decode(query, rows, indices, lengths)
    wide_query = torch.full((20, 3, 600), math.nan, dtype=BFLOAT16)[..., 7:583].transpose(0, 1)
    wide_rows = torch.full((90, 400), 0xFF, dtype=torch.uint8)[:, 13:365]
    wide_indices = torch.full((3, 99), 0, dtype=torch.int32)[:, 9:79]
    for wide, narrow in ((wide_query, query), (wide_rows, rows), (wide_indices, indices)):
        wide.copy_(narrow)
    memory = torch.full((3, 30, 520), 7.0)
    _cpu.decode(wide_query, wide_rows, wide_indices, lengths, 576**-0.5, 1.0, memory[:, 4:24, 5:517], None, False)
    assert torch.equal(memory[:, 4:24, 5:517], expected)
    memory[:, 4:24, 5:517] = 7
    assert (memory == 7).all()


def test_nothing_to_attend_to(path: str) -> None:
    rows = some_rows(4)
    out, lse = decode(some_query(3, 16), rows, torch.empty(3, 0, dtype=torch.int32))
    assert (out == 0).all()
    assert torch.isneginf(lse).all()
    out, lse = decode(some_query(2, 16), rows[:0], torch.zeros(2, 5, dtype=torch.int32))
    assert (out == 0).all()
    assert torch.isneginf(lse).all()
    out, _ = decode(some_query(0, 16), rows, torch.empty(0, 5, dtype=torch.int32))
    assert out.shape == (0, 16, 512)


def test_rows_that_are_not_selected_do_not_count_whatever_their_bytes(path: str, oracle: Any, close: Any) -> None:
    rows = some_rows(100)
    rows[::2] = 0xFF
    rows[1::4] = 0x7F
    query = some_query(3, 17)
    indices = some_indices(3, 99, 100)
    indices[:2] = torch.where(indices[:2] % 4 == 3, indices[:2], -1)
    indices[2] = torch.where(indices[2] < 0, -1, indices[2])
    out, lse = decode(query, rows, indices)
    expected, expected_lse = oracle(query[:2], rows, indices[:2], None, 576**-0.5, 1.0, False)
    close(out[:2], expected, lse[:2], expected_lse)
    assert out[2].isnan().all()  # a selected NaN shows
    again, _ = decode(query.flip(0), rows, indices.flip(0))  # nor does it stay in memory for the next token
    assert torch.equal(again[1:], out[:2].flip(0))


@pytest.mark.parametrize("scale", [0.0, -0.05, 3.0, 100.0])
def test_scores_far_apart(path: str, scale: float, oracle: Any) -> None:
    query, rows, indices = some_query(2, 16), some_rows(150), some_indices(2, 150, 150)
    out, lse = decode(query, rows, indices, scale=scale)
    expected, expected_lse = (torch.from_numpy(x) for x in oracle(query, rows, indices, None, scale, 1.0, False))
    # A score of some thousand is exact to 1e-7 of it in float32, and the weight beside the largest as much less.
    error = max(2e-3, scale * 2e-3)
    assert ((out - expected).norm(dim=-1) <= error * expected.norm(dim=-1)).all()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-3)


def test_keys_that_count_more_and_more(path: str, oracle: Any, close: Any, decoded_row: Any) -> None:
    """Each tile's largest score is far above all before: what was summed up is rescaled again and again."""
    scale = 8 * 576**-0.5
    query, rows = some_query(1, 17), some_rows(200)
    rows[:, :256] = 0x22  # all 1
    rows[:, 320:] = torch.linspace(0, 0x38, 200).to(torch.uint8)[:, None]
    query[..., :512] = query[..., :512].abs()
    indices = torch.arange(200, dtype=torch.int32)[None]
    keys = torch.stack([torch.from_numpy(decoded_row(row.numpy())) for row in rows])
    for tile in (48, 64):  # of the paths in float32, and of those in bfloat16
        tops = torch.stack([part.amax(-1) for part in (scale * query[0].double() @ keys.T).split(tile, -1)])
        assert (tops.diff(dim=0) > 8 * math.log(2)).all(dim=1).sum() >= 2  # what rises by less than 2^8 can wait
    out, lse = decode(query, rows, indices, scale=scale)
    expected, expected_lse = oracle(query, rows, indices, None, scale, 1.0, False)
    close(out, expected, lse, expected_lse)


def test_rows_past_two_gigabytes(path: str) -> None:
    cache = torch.empty(6_200_000, 352, dtype=torch.uint8)  # pages that are not touched take no memory
    far = torch.tensor([6_199_999, 6_100_807, 12, 6_150_000], dtype=torch.int32)
    rows = some_rows(4)
    cache[far.long()] = rows
    query = some_query(1, 16)
    expected, _ = decode(query, rows, torch.arange(4, dtype=torch.int32)[None])
    for shaped in (cache, cache.view(-1, 16, 352)):
        out, _ = decode(query, shaped, far[None])
        assert torch.equal(out, expected)


@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_any_number_of_threads_gives_the_same(path: str, tokens: int, threads: Callable[[int], None]) -> None:
    query, rows, indices = some_query(tokens, 20), some_rows(300), some_indices(tokens, 700, 300)
    indices[-1, 100:] = -1  # parts of a token without a key
    threads(1)
    expected, expected_lse = decode(query, rows, indices)
    for count in (2, 7):
        threads(count)
        out, lse = decode(query, rows, indices)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads, from Python 3.12 on
def test_a_forked_process_does_not_wait_for_threads_that_it_lacks(threads: Callable[[int], None]) -> None:
    threads(2)
    query, rows, indices = some_query(2, 16), some_rows(50), some_indices(2, 400, 50)
    expected, _ = decode(query, rows, indices)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        out, _ = decode(query, rows, indices)
        os._exit(0 if torch.allclose(out, expected, atol=1e-4) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(decode(query, rows, indices)[0], expected)


def test_a_process_forked_before_the_first_decode_does_not_wait_either() -> None:
    """Other code has begun threads: they are missing in the child all the same."""
    script = """
        import os, signal, torch
        from flashinfer_nvfp4_mla import _cpu
        torch.set_num_threads(2)
        assert _cpu.available() is None
        torch.ones(1 << 22).add_(1)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            query, out = torch.ones(4, 1, 576).bfloat16(), torch.ones(4, 1, 512)
            rows = torch.zeros(1, 352, dtype=torch.uint8)
            _cpu.decode(query, rows, torch.zeros(4, 1, dtype=torch.int32), None, 1.0, 1.0, out, None, False)
            os._exit(0 if (out == 0).all() else 1)
        assert os.waitpid(child, 0)[1] == 0
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)], check=True, timeout=120)


def test_few_tokens_leave_the_threads_to_those_who_need_them_next(threads: Callable[[int], None]) -> None:
    threads(4)
    query, rows, indices = some_query(3, 1), some_rows(50), some_indices(3, 40, 50)
    decode(some_query(8, 1), rows, some_indices(8, 40, 50))
    torch.ones(1 << 22).add_(1)
    before = set(os.listdir("/proc/self/task"))
    decode(query, rows, indices)
    assert set(os.listdir("/proc/self/task")) == before


TENSORS = {
    "query": (torch.zeros(2, 3, 576), torch.zeros(2, 3, 512, dtype=BFLOAT16), torch.zeros(6, 576, dtype=BFLOAT16)),
    "cache": (torch.zeros(4, 352), torch.zeros(4, 576, dtype=torch.uint8)),
    "indices": (torch.zeros(2, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.int32)),
    "lengths": (torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), 5),
    "out": (torch.zeros(2, 3, 512, dtype=torch.float64), torch.zeros(2, 2, 512), torch.zeros(2, 512, 3).mT),
    "lse": (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3, 2).T, torch.zeros(2, 4)[:, :3]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_the_library_itself_writes_nowhere_else(name: str) -> None:
    """It is called by name, from where nothing has checked what it is given."""
    good = {
        "query": some_query(2, 3),
        "cache": some_rows(4),
        "indices": torch.zeros(2, 5, dtype=torch.int32),
        "lengths": torch.full((2,), 5, dtype=torch.int32),
        "out": torch.full((2, 3, 512), 7.0),
        "lse": torch.full((2, 3), 7.0),
    }

    def call(query: Any, cache: Any, indices: Any, lengths: Any, out: Any, lse: Any) -> None:
        _cpu._library()[0].decode(query, cache, indices, lengths, 1.0, 1.0, out, lse, False, 0, 1)

    for bad in TENSORS[name]:
        with pytest.raises(ValueError, match=f"^{name} must be "):
            call(**{**good, name: bad})
        assert (good["out"] == 7).all()
        assert (good["lse"] == 7).all()
    call(**good)
    assert (good["out"] != 7).all()


def test_amx_is_set_up_whatever_the_compiler_leaves_out(tmp_path: Path) -> None:
    """On its own, and optimised as far as it goes; what stands in for AMX ends the program if a value is missing."""
    compiler = shutil.which("g++")
    if not EMULATED or compiler is None:
        pytest.skip("g++ on x86-64")
    (tmp_path / "alone.cc").write_text('#include "amx.cc"\nint main() { nvfp4_mla::Amx::begin(); }\n')
    folders = [f"-I{_build.SOURCES}", f"-I{Path(__file__).parent}"]
    command = [compiler, "-std=c++17", *_build._FLAGS, "-DNVFP4_MLA_EMULATE", *folders]
    program = tmp_path / "alone"
    subprocess.run([*command, str(tmp_path / "alone.cc"), "-o", str(program)], check=True, capture_output=True)
    subprocess.run([str(program)], check=True)


@settings(max_examples=40)
@given(st.data())
def test_any_shape(oracle: Any, close: Any, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from([*REAL * 4, *STAND_INS]), "path")
    tokens, heads, keys, blocks, size, seed = (
        data.draw(st.integers(low, high), name)
        for name, low, high in (
            ("tokens", 0, 4),
            ("heads", 1, 40),
            ("keys", 0, 130),
            ("blocks", 1, 6),
            ("size", 1, 9),
            ("seed", 0, 99),
        )
    )
    cache = torch.full((blocks, size + 1, 352), 0xFF, dtype=torch.uint8)[:, 1:]
    cache.copy_(some_rows(blocks * size, seed).view(blocks, size, 352))
    lengths = torch.tensor(
        data.draw(st.lists(st.integers(-1, keys + 2), min_size=tokens, max_size=tokens)), dtype=torch.int32
    )
    query, indices = some_query(tokens, heads, seed=seed), some_indices(tokens, keys, blocks * size, seed)
    with pytest.MonkeyPatch.context() as patches:
        take(path, patches)
        out, lse = decode(query, cache, indices, lengths)
    expected, expected_lse = oracle(query, cache, indices, lengths, 576**-0.5, 1.0, False)
    close(out, expected, lse, expected_lse)


def test_the_fastest_path_is_taken_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_cpu.ISA_VARIABLE, raising=False)
    assert _cpu.isa() == _cpu.isas()[-1]
    monkeypatch.setenv(_cpu.ISA_VARIABLE, "portable")
    assert _cpu.isa() == "portable"


def test_a_path_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_cpu.ISA_VARIABLE, "sse9")
    with pytest.raises(ValueError, match=r"FLASHINFER_NVFP4_MLA_ISA is 'sse9', which is none of portable, avx2"):
        _cpu.isa()
    assert "sse9" in str(_cpu.available())
    module, _ = _cpu._library()
    monkeypatch.setattr(_cpu, "_load", lambda: (module, ("portable", "avx2")))
    monkeypatch.setenv(_cpu.ISA_VARIABLE, "amx")
    with pytest.raises(ValueError, match=r"'amx', which this processor lacks: it has portable, avx2"):
        decode(some_query(1, 1), some_rows(1), torch.zeros(1, 1, dtype=torch.int32))


def test_the_kernel_runs_where_the_processor_can() -> None:
    assert _cpu.available() is None
    if platform.machine() == "x86_64":
        flags = Path("/proc/cpuinfo").read_text("utf-8").split()
        assert ("avx2" in _cpu.isas()) == ("avx2" in flags)
        assert ("avx512_bf16" in _cpu.isas()) == ("avx512_bf16" in flags)
        assert ("amx" in _cpu.isas()) == ("amx_bf16" in flags)
