# SPDX-License-Identifier: Apache-2.0
"""What bytes a token becomes, where they go, and what other layouts' bytes become."""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer_nvfp4_mla import _format
from flashinfer_nvfp4_mla._format import SCALE_CHOICES, append, convert, dequantize, quantize

pytestmark = pytest.mark.usefixtures("one_thread")

# --- a writer of its own, in exact fractions -------------------------------------------------------------------------


def power(exponent: int) -> Fraction:
    """Return 2 to an integer."""
    return Fraction(2**exponent) if exponent >= 0 else Fraction(1, 2**-exponent)


E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
E4M3 = [Fraction(m, 512) if e == 0 else (8 + m) * power(e - 10) for e in range(16) for m in range(8)]
del E4M3[127]  # NaN


def nearest(value: Fraction, numbers: list[Fraction]) -> int:
    """Return which number is nearest: of two as near, the one of even place; beyond the last, the last."""
    above = bisect_left(numbers, value)
    places = (above - 1, above) if 0 < above < len(numbers) else (min(above, len(numbers) - 1),)
    return min(places, key=lambda place: (abs(value - numbers[place]), place % 2))


def single(value: Fraction) -> Fraction:
    """Round to float32, to nearest and ties to even."""
    if value == 0:
        return value
    exponent = max(math.frexp(float(abs(value)))[1] - 24, -149)
    return round(value / power(exponent)) * power(exponent)


def written(latent: list[float], rope: list[float]) -> bytes:
    """Make one row as vLLM's fused writer does: e4m3(max(amax * f32(1/6), 2^-9)), e2m1(f32(x * f32(1 / scale)))."""
    row = bytearray(352)
    for group in range(32):
        values = [Fraction(value) for value in latent[16 * group : 16 * group + 16]]
        sixth = single(Fraction(1, 6))
        scale = nearest(max(single(max(map(abs, values)) * sixth), Fraction(1, 512)), E4M3)
        row[320 + 8 * (group % 4) + group // 4] = scale
        inverse = single(1 / E4M3[scale])
        for at, value in enumerate(values):
            negative = math.copysign(1.0, latent[16 * group + at]) < 0
            code = nearest(single(abs(value) * inverse), E2M1) | (8 if negative else 0)
            row[(16 * group + at) // 2] |= code << 4 * (at % 2)
    for at, number in enumerate(rope):
        row[256 + at] = nearest(abs(Fraction(number)), E4M3) | (128 if math.copysign(1.0, number) < 0 else 0)
    return bytes(row)


def one(latent: list[float], rope: list[float] | None = None, **choice: str) -> bytes:
    row = quantize(torch.tensor(latent), torch.tensor(rope or [0.0] * 64), **choice)
    return bytes(row.tolist())


#: Latent i is (37 i mod 101 - 50) / 16, rope value i is (29 i mod 67 - 33) / 4, both times a power of two. Computed by
#: `written` alone, and kept so that no change of both writers goes unseen.
GOLDEN = {
    0: (
        "bfe5692ec7f45a0ed6724cafe6613dc7f5692ed7f45b8ee6724cafe6603dc7f5691ed7f45b8ee6724cafe6603dc7f56a"
        "1ed7f45b9ee6724cafe5602dc7f46a1ed6735c9fe6724dbff5682ec7f56a1ed7735c9fe6714dbfe5682ec7f46a0ed673"
        "5cafe6714dbfe5692ec7f45a0ed6724cafe6613dc7f5692ed7f45b8ee6724cafe6603dc7f5691ed7f45b8ee6724cafe6"
        "603dc7f56a1ed7f45b9ee6724cafe5602dc7f46a1ed6735c9fe6724dbfe5682ec7f46a0ed6735c9fe6714dbfe5682ec7"
        "f46a0ed6735cafe6714dbfe5692ec7f45a0ed6724cafe6613dc7f5692ed7f45b8fe6725cafe6713dc7f5691ed7f45b8e"
        "e6724cafe6603dc7f56a1ed7f45b9ee6d0b84cc548cb3ed0b04ec349ca41ce004ec14ac943ce3050be4bc845cc3850ba"
        "4cc647cc3cd0b44dc448ca40cfa84ec24aca42ce284fc04ac844cd3450bc4cc7303030303030302f30302f3030303030"
        "30303030303030303030303030303030"
    ),
    -9: (
        "adc3481ca5d2390cb4512a9dc4402ba5d3481cb5d2398cc4512a9dc4402ba5d3491cb5d23a8cc4512a9dc4401ba5d349"
        "0cb5d23a8cc4512a9dc3401ba5d2490cb4523a8dc4512b9dc3481ca5d2490cb4523a9dc4512badc3481ca5d2490cb451"
        "3a9dc4502badc3481ca5d2390cb4512a9dc4402ba5d3481cb5d2398cc4512a9dc4402ba5d3491cb5d23a8cc4512a9dc4"
        "401ba5d3490cb5d23a8cc4512a9dc3401ba5d2490cb4523a8dc4512b9dc3481ca5d2490cb4523a9dc4512badc3481ca5"
        "d2490cb4513a9dc4502badc3481ca5d2390cb4512a9dc4402ba5d3481cb5d2398cc4512a9dc4402ba5d3491cb5d23a8c"
        "c4512a9dc4401ba5d3490cb5d23a8cc48881068304860288800783048502870007820584038700088206840386010881"
        "068404860288810683048502888007820585028700088205840386010882068401010101010101010101010101010101"
        "01010101010101010101010101010101"
    ),
    6: (
        "bfe5692ec7f45a0ed6724cafe6613dc7f5692ed7f45b8ee6724cafe6603dc7f5691ed7f45b8ee6724cafe6603dc7f56a"
        "1ed7f45b9ee6724cafe5602dc7f46a1ed6735c9fe6724dbff5682ec7f56a1ed7735c9fe6714dbfe5682ec7f46a0ed673"
        "5cafe6714dbfe5692ec7f45a0ed6724cafe6613dc7f5692ed7f45b8ee6724cafe6603dc7f5691ed7f45b8ee6724cafe6"
        "603dc7f56a1ed7f45b9ee6724cafe5602dc7f46a1ed6735c9fe6724dbfe5682ec7f46a0ed6735c9fe6714dbfe5682ec7"
        "f46a0ed6735cafe6714dbfe5692ec7f45a0ed6724cafe6613dc7f5692ed7f45b8fe6725cafe6713dc7f5691ed7f45b8e"
        "e6724cafe6603dc7f56a1ed7f45b9ee6fee87cf578fb6efee07ef379fa71fe007ef17af973fe607eee7bf875fc687eea"
        "7cf677fc6cfee47df478fa70fed87ef27afa72fe587ef07af874fd647eec7cf7606060606060605f60605f6060606060"
        "60606060606060606060606060606060"
    ),
}


def golden_input(exponent: int) -> tuple[list[float], list[float]]:
    latent = [(37 * i % 101 - 50) / 16 * 2.0**exponent for i in range(512)]
    return latent, [(29 * i % 67 - 33) / 4 * 2.0**exponent for i in range(64)]


@pytest.mark.parametrize("exponent", GOLDEN)
def test_rows_are_these_bytes(exponent: int) -> None:
    latent, rope = golden_input(exponent)
    assert one(latent, rope).hex() == GOLDEN[exponent]
    assert written(latent, rope).hex() == GOLDEN[exponent]


def test_each_value_has_its_place() -> None:
    for i in (0, 1, 15, 16, 17, 63, 64, 250, 511):
        latent, group = [0.0] * 512, i // 16
        latent[i] = -6.0
        expected = bytearray(b"\0" * 320 + b"\1" * 32)  # a group of zeros has the smallest scale, 2^-9
        expected[i // 2] = 0xF0 if i % 2 else 0x0F
        expected[320 + 8 * (group % 4) + group // 4] = 0x38  # 1.0
        assert one(latent) == bytes(expected), i
    rope = [0.0] * 64
    rope[5] = 1.5
    assert one([0.0] * 512, rope)[256:320] == b"\0" * 5 + b"\x3c" + b"\0" * 58


floats = (
    st.floats(-3000, 3000, width=32)
    | st.floats(-(2.0**-7), 2.0**-7, width=32)
    | st.integers(-48, 48).map(lambda n: n / 8)
)


@settings(max_examples=60)
@given(st.lists(st.lists(floats, min_size=16, max_size=16), min_size=1, max_size=4), st.lists(floats, max_size=64))
def test_bytes_are_those_of_vllms_arithmetic(groups: list[list[float]], rope: list[float]) -> None:
    latent = [value for group in groups for value in group] + [0.0] * (512 - 16 * len(groups))
    rope = rope + [0.0] * (64 - len(rope))
    assert one(latent, rope) == written(latent, rope)


def test_a_tie_goes_to_the_even_code_and_a_value_beside_it_does_not() -> None:
    up, down = (float(np.nextafter(np.float32(1), np.float32(to), dtype=np.float32)) for to in (2, 0))
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    latent = [6.0, *ties, *(tie * down for tie in ties), 0.0]
    latent += [6.0, *ties, *(tie * up for tie in ties), -0.0] + [0.0] * 480
    nibbles = [nibble for byte in one(latent)[:16] for nibble in (byte & 15, byte >> 4)]
    assert nibbles == [7, 0, 2, 2, 4, 4, 6, 6, 0, 1, 2, 3, 4, 5, 6, 0, 7, 0, 2, 2, 4, 4, 6, 6, 1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_scale_and_value_is_read_exactly(dtype: Any) -> None:
    rows = torch.zeros(8, 352, dtype=torch.uint8)
    rows[:, :256] = torch.tensor([low | low + 1 << 4 for low in range(0, 16, 2)] * 32, dtype=torch.uint8)
    places = torch.arange(256).reshape(8, 32)
    order = [320 + 8 * (group % 4) + group // 4 for group in range(32)]
    rows[:, order] = places.to(torch.uint8)
    rows[:, 256:320] = torch.arange(512).reshape(8, 64).remainder(256).to(torch.uint8)
    got = dequantize(rows, dtype).double()
    e4m3 = [float(number) for number in E4M3] + [math.nan]
    e4m3 += [-number for number in e4m3]
    e2m1 = [float(number) for number in E2M1]
    e2m1 += [-number for number in e2m1]
    expected = torch.tensor([[e4m3[int(p)] * v for p in row for v in e2m1] for row in places], dtype=torch.float64)
    assert torch.equal(got[:, :512].nan_to_num(9e9), expected.nan_to_num(9e9))
    rope = torch.tensor([e4m3[at % 256] for at in range(512)], dtype=torch.float64).view(8, 64)
    assert torch.equal(got[:, 512:].nan_to_num(9e9), rope.nan_to_num(9e9))


@pytest.mark.parametrize("choice", SCALE_CHOICES)
def test_what_is_out_of_range_saturates_and_no_scale_is_nan(choice: str) -> None:
    latent = [0.0] * 512
    latent[0], latent[1] = math.inf, 100.0
    latent[16], latent[17] = -1e30, 3000.0
    latent[32], latent[33] = math.nan, 3.0
    latent[34] = -math.nan
    latent[48:64] = [math.nan] * 16
    rope = [math.inf, -math.inf, 1e9, -460.0, math.nan, -math.nan, 449.0, -0.0] + [0.0] * 56
    row = one(latent, rope, scales=choice)
    assert not {0x7F, 0xFF} & set(row[320:])
    values = dequantize(torch.tensor(list(row), dtype=torch.uint8)).tolist()
    assert values[:2] == [2688.0, 0.0]
    assert values[16:18] == [-2688.0, 2688.0]
    assert row[16] == 0x77, "a NaN is +6 times the scale, whatever its sign"
    assert row[17] & 15 == 7
    assert values[33] == pytest.approx(3.0, rel=0.1)
    assert set(row[24:32]) == {0x77}
    assert values[48] == 6 * 2**-9
    assert row[256:264].hex() == "7efe7efe7f7f7e80"


def test_a_better_choice_of_scales_has_less_error_and_vllms_is_the_default() -> None:
    generator = torch.Generator().manual_seed(0)
    rope = torch.zeros(256, 64)
    for deviation in (0.004, 0.01, 0.1, 1.0):
        latent = torch.randn(256, 512, generator=generator) * deviation
        rows = {choice: quantize(latent, rope, scales=choice) for choice in SCALE_CHOICES}
        assert torch.equal(rows["amax"], quantize(latent, rope))
        groups = latent.view(-1, 32, 16)
        square = {
            choice: (dequantize(rows[choice])[:, :512].view_as(groups) - groups).square().sum(-1) for choice in rows
        }
        tiny = 1 + 1e-5
        assert bool((square["4over6"] <= square["amax"] * tiny).all())
        assert bool((square["mse"] <= square["4over6"] * tiny).all())
        if deviation >= 0.1:
            error = {choice: float((square[choice].sum() / latent.square().sum()).sqrt()) for choice in square}
            assert error == pytest.approx({"amax": 0.095, "4over6": 0.087, "mse": 0.0815}, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_types_and_strides_of_what_is_quantized_do_not_matter(dtype: Any) -> None:
    both = torch.randn(2, 300, 3, 577).to(dtype)
    latent, rope = both[..., 1:513], both[..., 513:]
    rows = quantize(latent, rope)
    assert rows.shape == (2, 300, 3, 352)
    assert rows.is_contiguous()
    assert torch.equal(rows, quantize(latent.float().contiguous(), rope.float().contiguous()))
    assert quantize(latent[:0], rope[:0]).shape == (0, 300, 3, 352)
    odd = torch.zeros(rows.numel() + 1, dtype=torch.uint8)[1:].view_as(rows).copy_(rows)
    assert torch.equal(dequantize(odd[:, ::2]), dequantize(rows)[:, ::2])


# --- writing to slots -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot_type", [torch.int32, torch.int64])
@pytest.mark.parametrize(("step", "at"), [(352 * 7, 352 * 2), (352 * 7 + 4, 352 + 1)])
def test_append_writes_slots_of_a_layer_between_others_and_no_other_byte(slot_type: Any, step: int, at: int) -> None:
    """A block of BLHNC holds all layers: a layer's blocks, here of 4 rows, are further apart than they are long."""
    memory = torch.full((5 * 4 * step,), 0xA5, dtype=torch.uint8)
    cache = memory.as_strided((5, 4, 352), (4 * step, 352, 1), at)
    before = memory.clone()
    latent, rope = torch.randn(6, 512), torch.randn(6, 64)
    slots = torch.tensor([19, -1, 0, 6, -7, 5], dtype=slot_type)
    append(cache, latent, rope, slots)
    rows = quantize(latent, rope)
    for slot, row in zip(slots.tolist(), rows, strict=True):
        if slot >= 0:
            start = at + slot // 4 * 4 * step + slot % 4 * 352
            before[start : start + 352] = row
    assert torch.equal(memory, before)


def test_append_takes_flat_rows_further_apart_than_they_are_long() -> None:
    memory = torch.zeros(9, 500, dtype=torch.uint8)
    latent, rope = torch.randn(2, 512), torch.randn(2, 64)
    append(memory[:, 100:452], latent, rope, torch.tensor([8, 3]), scales="mse")
    assert torch.equal(memory[[8, 3], 100:452], quantize(latent, rope, scales="mse"))
    assert memory[:, :100].sum() == memory[:, 452:].sum() == memory[:3].sum() == 0


@pytest.mark.parametrize(
    ("slots", "error", "said"),
    [
        ([0, 20], ValueError, "20 is outside the cache, which has 20 rows"),
        ([0], ValueError, r"slots must be \[2\], one per token, got \(1,\)"),
        ([0.0, 1.0], TypeError, "slots must be a tensor of int32 or int64, got torch.float32"),
        ((0, 1), TypeError, "slots must be a tensor of int32 or int64, got tuple"),
    ],
)
def test_append_refuses_slots_before_it_writes(slots: Any, error: type[Exception], said: str) -> None:
    cache = torch.zeros(5, 4, 352, dtype=torch.uint8)
    if isinstance(slots, list):
        slots = torch.tensor(slots)
    with pytest.raises(error, match=said):
        append(cache, torch.ones(2, 512), torch.ones(2, 64), slots)
    assert not cache.any()


def test_append_reaches_rows_past_two_and_four_gibibytes(tmp_path: Path) -> None:
    rows = 2**32 // 352 + 3
    cache = torch.from_file(str(tmp_path / "cache"), shared=True, size=rows * 352, dtype=torch.uint8).view(-1, 352)
    latent, rope = torch.randn(3, 512), torch.randn(3, 64)
    append(cache, latent, rope, torch.tensor([6_100_806, rows - 1, 2**31 // 352], dtype=torch.int32))
    assert torch.equal(cache[[6_100_806, rows - 1, 2**31 // 352]], quantize(latent, rope))
    assert not cache[:3].any()


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "whose"),
    [
        (368, r"b12x, e4m3 rope with a factor; convert\(rows, 'b12x_368'\)"),
        (432, r"b12x, bfloat16 rope; convert\(rows, 'b12x_432'\)"),
        (416, r"SGLang; convert\(rows, 'sglang_416'\)"),
        (656, r"fp8_ds_mla; convert\(rows, 'fp8_ds_mla'\)"),
        (1152, "576 values of 16 bits"),
        (576, "FP8, a byte per value"),
        (304, "GLM-5.3 Flash"),
        (528, "GLM-5.3 Flash, 512 e4m3 latents"),
        (288, "DeepSeek V4.1"),
        (384, "DeepSeek V4 on SM120"),
        (353, "must have rows of 352 bytes, got 353$"),
    ],
)
def test_rows_of_another_width_are_refused_by_name(width: int, whose: str) -> None:
    with pytest.raises(ValueError, match=f"got {width}.*{whose}" if width != 353 else whose):
        dequantize(torch.zeros(2, width, dtype=torch.uint8))


def test_other_bad_input_is_refused_by_name() -> None:
    latent, rope = torch.zeros(2, 512), torch.zeros(2, 64)
    with pytest.raises(ValueError, match="scales must be one of amax, 4over6, mse, got 'best'"):
        quantize(latent, rope, scales="best")
    with pytest.raises(ValueError, match=r"latent must be \[..., 512\], got \(2, 448\)"):
        quantize(latent[:, :448], rope)
    with pytest.raises(ValueError, match="are not of as many tokens"):
        quantize(latent, rope[:1])
    with pytest.raises(TypeError, match=r"rope must be a tensor of a floating-point type, got torch\.int64"):
        quantize(latent, rope.long())
    with pytest.raises(TypeError, match=r"rows must be a uint8 tensor, got torch\.int8"):
        dequantize(torch.zeros(2, 352, dtype=torch.int8))
    for dtype in (torch.float64, torch.float8_e4m3fn, torch.int32, "float32", None):
        with pytest.raises(TypeError, match=f"dtype must be torch.float32 or .*, got {dtype!r}"):
            dequantize(torch.zeros(2, 352, dtype=torch.uint8), dtype)
    with pytest.raises(ValueError, match="side by side"):
        dequantize(torch.zeros(2, 704, dtype=torch.uint8)[:, ::2])
    with pytest.raises(ValueError, match=r"cache must be \[blocks, block_size, 352\]"):
        append(torch.zeros(1, 1, 1, 352, dtype=torch.uint8), latent, rope, torch.tensor([0, 0]))


# --- other layouts ----------------------------------------------------------------------------------------------------


@pytest.fixture
def rows() -> Any:
    """Return rows of every scale and code that can be written, NaN aside."""
    generator = torch.Generator().manual_seed(1)
    made = torch.randint(0, 256, (2, 50, 352), dtype=torch.uint8, generator=generator)
    made[..., 320:] = made[..., 320:].remainder(0x7E) + 1
    made[..., 256:320] = torch.where(made[..., 256:320] & 0x7F == 0x7F, 0x7E, made[..., 256:320])
    return made


@pytest.mark.parametrize("name", ["b12x_368", "b12x_432", "sglang_416", "flashinfer"])
def test_there_and_back_moves_every_bit(name: str, rows: Any) -> None:
    there = convert(rows, "nvfp4_ds_mla", name)
    assert torch.equal(convert(there, name), rows)
    elsewhere = convert(there, name, "b12x_432")
    assert torch.equal(elsewhere, convert(rows, "nvfp4_ds_mla", "b12x_432"))


def test_other_layouts_are_what_their_owners_read(rows: Any, decoded_row: Callable[[Any], Any]) -> None:
    """Each layout's bytes are taken apart by hand; the values are those of the row."""
    row = rows[1, 7]
    expected = decoded_row(row)
    in_order = [int(row[320 + 8 * (b % 4) + b // 4]) for b in range(32)]

    b12x = bytes(convert(row, "nvfp4_ds_mla", "b12x_368").tolist())
    assert len(b12x) == 368
    assert b12x[:256] == bytes(row[:256].tolist())
    assert list(b12x[256:288]) == in_order
    # Factors of the rope and of the latents: b12x reads the second where it has one per token, and it may not be 0.
    assert struct.unpack("<ffII", b12x[288:304]) == (1.0, 1.0, 0, 0)
    assert b12x[304:] == bytes(row[256:320].tolist())

    for name, width, rope_at in (("b12x_432", 432, 304), ("sglang_416", 416, 288)):
        other = bytes(convert(row, "nvfp4_ds_mla", name).tolist())
        assert len(other) == width
        assert list(other[256:288]) == in_order
        assert not any(other[288:rope_at])
        rope = [struct.unpack("<f", b"\0\0" + other[at : at + 2])[0] for at in range(rope_at, width, 2)]
        assert rope == expected[512:].tolist()

    ckv, scales, kpe = convert(rows, "nvfp4_ds_mla", "flashinfer")
    assert (ckv.dtype, scales.dtype, kpe.dtype) == (torch.uint8, torch.float8_e4m3fn, torch.float8_e4m3fn)
    assert torch.equal(ckv, rows[..., :256])
    assert scales.view(torch.uint8)[1, 7].tolist() == in_order
    assert torch.equal(kpe.view(torch.uint8), rows[..., 256:320])


def test_factors_go_into_the_values_and_a_token_without_one_is_moved(rows: Any) -> None:
    there = convert(rows, "nvfp4_ds_mla", "b12x_368").contiguous()
    there[:, 40:, 292:296] = 0  # as b12x writes it where factors are per layer
    there[0, :, 288:292] = torch.tensor([0.5]).view(torch.uint8)  # rope's factor
    there[0, 0, 292:296] = torch.tensor([0.3]).view(torch.uint8)  # one token's
    back = convert(there, "b12x_368", scales="mse")
    assert torch.equal(back[1], rows[1])
    assert torch.equal(back[0, 1:, :256], rows[0, 1:, :256])
    assert torch.equal(back[0, 1:, 320:], rows[0, 1:, 320:])
    values = dequantize(rows)
    assert torch.equal(back[0, 0], quantize(values[0, 0, :512] * 0.3, values[0, 0, 512:] * 0.5, scales="mse"))
    per_layer = convert(convert(rows, "nvfp4_ds_mla", "sglang_416"), "sglang_416", latent_factor=0.3, rope_factor=2.0)
    assert torch.equal(per_layer, quantize(values[..., :512] * 0.3, values[..., 512:] * 2.0))


def test_fp8_and_plain_rows_are_quantized() -> None:
    latent, rope = torch.randn(3, 512), torch.randn(3, 64).bfloat16()
    e4m3, factors = latent.to(torch.float8_e4m3fn), torch.tensor([1.0, 0.5, 2.0, 3.0])
    fp8 = torch.cat([e4m3.view(torch.uint8), factors.repeat(3, 1).view(torch.uint8), rope.view(torch.uint8)], -1)
    values = (e4m3.float().view(3, 4, 128) * factors[:, None]).view(3, 512)
    assert torch.equal(convert(fp8, "fp8_ds_mla"), quantize(values, rope))
    plain = torch.cat([latent.bfloat16(), rope], -1)
    assert torch.equal(convert(plain, "plain", scales="4over6"), quantize(plain[:, :512], rope, scales="4over6"))
    kept = convert(plain, "plain", "sglang_416")[:, 288:]
    assert torch.equal(kept, rope.view(torch.uint8)), "a bfloat16 rope does not pass through e4m3"


def as_fp8(latent: list[float]) -> tuple[bytes, list[float]]:
    """Write 512 latents as vLLM's fused writer does: per 128, e4m3(x / f), f = 2^ceil(log2(max(amax / 448, 1e-4)))."""
    written, factors = b"", []
    for at in range(0, 512, 128):
        part = [Fraction(value) for value in latent[at : at + 128]]
        least = max(max(map(abs, part)) / 448, Fraction(1, 10_000))
        factors.append(next(power(k) for k in range(-14, 20) if power(k) >= least))
        written += bytes(nearest(abs(v) / factors[-1], E4M3) | (128 if v < 0 else 0) for v in part)
    return written, [float(factor) for factor in factors]


def test_to_fp8_every_value_is_rounded_once_with_a_power_of_two(rows: Any, decoded_row: Callable[[Any], Any]) -> None:
    latent, rope = torch.randn(4, 512), torch.randn(4, 64)
    latent[0, 3], latent[1] = 448.0, 1e-6  # exactly a power of two; and less than any factor is made for
    latent[2, 130], latent[3] = -448.01, latent[3] * 100
    got = convert(torch.cat([latent, rope], -1), "plain", "fp8_ds_mla")
    assert got.shape == (4, 656)
    for row, values in zip(got, latent.tolist(), strict=True):
        e4m3, factors = as_fp8(values)
        code = bytes(row.tolist())
        assert [byte & 0x7F for byte in code[:512]] == [byte & 0x7F for byte in e4m3]
        assert list(struct.unpack("<4f", code[512:528])) == factors
    assert torch.equal(got[:, 528:].contiguous(), rope.bfloat16().view(torch.uint8))

    fp8 = bytes(convert(rows, "nvfp4_ds_mla", "fp8_ds_mla")[1, 7].tolist())
    expected = decoded_row(rows[1, 7]).tolist()
    e4m3, factors = as_fp8(expected[:512])
    assert [byte & 0x7F for byte in fp8[:512]] == [byte & 0x7F for byte in e4m3]
    assert list(struct.unpack("<4f", fp8[512:528])) == factors
    assert [struct.unpack("<f", b"\0\0" + fp8[at : at + 2])[0] for at in range(528, 656, 2)] == expected[512:]
    again = convert(got, "fp8_ds_mla", "fp8_ds_mla")
    assert torch.equal(convert(again, "fp8_ds_mla", "plain"), convert(got, "fp8_ds_mla", "plain"))


def test_what_is_not_finite_makes_nothing_else_so() -> None:
    plain = torch.ones(1, 576)
    plain[0, 0], plain[0, 128], plain[0, 512] = math.nan, math.inf, math.nan
    back = convert(convert(plain, "plain", "fp8_ds_mla"), "fp8_ds_mla", "plain")
    assert back[0, [0, 512]].isnan().all()
    assert (back[0, 1:128] == 1).all()
    assert back[0, 128] == math.inf
    assert (back[0, 129:256] == 0).all(), "beside what is infinite all else is nothing"
    assert (back[0, 256:512] == 1).all()


def test_plain_is_what_a_row_holds_with_its_factors(rows: Any) -> None:
    values = dequantize(rows)
    assert torch.equal(convert(rows, "nvfp4_ds_mla", "plain"), values)
    for name in ("b12x_368", "flashinfer"):
        there = convert(rows, "nvfp4_ds_mla", name)
        assert torch.equal(convert(there, name, "plain"), values)
        got = convert(there, name, "plain", latent_factor=0.25, rope_factor=2.0)
        assert torch.equal(got, torch.cat([values[..., :512] / 4, values[..., 512:] * 2], -1))


@pytest.mark.parametrize(
    ("width", "source", "target", "said"),
    [
        (368, "b12x_432", "nvfp4_ds_mla", "must have rows of 432 bytes, got 368 .b12x, e4m3"),
        (656, "fp9", "nvfp4_ds_mla", "source must be one of nvfp4_ds_mla, b12x_368, .*, plain, got 'fp9'"),
        (352, "nvfp4_ds_mla", "fp9", "target must be one of nvfp4_ds_mla, .*, plain, got 'fp9'"),
    ],
)
def test_convert_refuses(width: int, source: str, target: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        convert(torch.zeros(1, width, dtype=torch.uint8), source, target)
    with pytest.raises(TypeError, match="latent must be a tensor of a floating-point type"):
        convert(torch.zeros(1, 576, dtype=torch.uint8), "plain")


@pytest.mark.parametrize(
    ("given", "source", "more", "error", "said"),
    [
        (torch.zeros(1, 352).byte(), "nvfp4_ds_mla", {"scales": "best"}, ValueError, "scales must be one of .* 'best'"),
        ([1.0], "plain", {}, TypeError, "rows must be a tensor, got list"),
        (None, "b12x_368", {}, TypeError, "rows must be a uint8 tensor, got NoneType"),
        ((1, 2), "flashinfer", {}, TypeError, "a tuple of three tensors, ckv, ckv_sf and kpe, got 2 of them"),
        (torch.zeros(3, 352).byte(), "flashinfer", {}, TypeError, "three tensors, ckv, ckv_sf and kpe, got Tensor"),
        ((1, 2, 3), "flashinfer", {}, TypeError, "ckv must be a uint8 tensor, got int"),
        (
            (torch.zeros(2, 256).byte(), torch.zeros(1, 32).byte(), torch.zeros(2, 64).byte()),
            *("flashinfer", {}, ValueError, r"ckv \(2, 256\) and ckv_sf \(1, 32\) are not of as many tokens"),
        ),
    ],
)
def test_convert_refuses_by_name(
    given: Any, source: str, more: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        convert(given, source, **more)


def test_nothing_is_read_past_a_chunk() -> None:
    """Rows are quantized so many at a time: one more or one less makes no difference."""
    count = _format._CHUNK + 1
    latent, rope = torch.randn(count, 512), torch.randn(count, 64)
    rows = quantize(latent, rope, scales="mse")
    for at in (0, count - 2, count - 1):
        assert torch.equal(rows[at], quantize(latent[at], rope[at], scales="mse"))
