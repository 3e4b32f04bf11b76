# SPDX-License-Identifier: Apache-2.0
"""The 352-byte row of a 4-bit latent KV cache: write it, read it, turn it from and into its relatives.

A row is what one token keeps for one layer: 512 latent values and 64 positional (rope) values. vLLM calls it
`nvfp4_ds_mla`, FlashMLA `nvfp4.fp8rope`; FlashInfer's sparse-MLA op reads the same bytes.

| bytes | content |
|---|---|
| 0-255 | 512 latent values, e2m1, two per byte, element `2i` in the low nibble |
| 256-319 | 64 rope values, e4m3, no scale |
| 320-351 | 32 e4m3 scales, one per 16 latent values; that of group `b` at byte `320 + 8 * (b % 4) + b // 4` |

A latent value is its e2m1 times its scale. That product is exact in float16, bfloat16 and float32.

The arithmetic is that of vLLM's fused writer (vllm/models/deepseek_v32/common/kernels.py), in float32 with every step
rounded to nearest: the scale is e4m3(max(amax * (1/6), 2^-9)), a value e2m1(x * (1 / scale)), ties to even. What
leaves a type's range takes its largest value, as the GPU's `cvt.rn.satfinite` does, so that a scale byte is never NaN:

- a latent beyond 2688 = 6 * 448, infinity included, becomes 2688 with its sign;
- a latent that is NaN does not count for its group's scale, and becomes +6 times that scale: e2m1 has no NaN;
- a rope value beyond 448, infinity included, becomes 448 with its sign; NaN stays NaN, as byte 0x7F.

vLLM's other writer, `concat_and_cache_mla`, rounds the scale up instead. Its rows read the same.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

#: Bytes of a row; its latent values, its rope values, and how many latents share a scale.
ROW_BYTES, LATENT, ROPE, GROUP = 352, 512, 64, 16
#: How the scale of a group is chosen. `amax`: as vLLM does, amax / 6. `4over6`: that or amax / 4, whichever has less
#: squared error. `mse`: the least squared error among the e4m3 numbers around amax / 6.
SCALE_CHOICES = ("amax", "4over6", "mse")

_ROPE_AT, _SCALES_AT = 256, 320
_GROUPS = LATENT // GROUP
#: Types that hold every value of a row.
_EXACT = (torch.float32, torch.bfloat16, torch.float16)
_SMALLEST, _LARGEST = 2.0**-9, 448.0
#: The e4m3 numbers that `mse` tries beside amax / 6, counted from it: eight steps double a scale. More change nothing.
_SWEEP = (-1, 1, 2, 3, 4, 5, 6)
#: Rows that are quantized at a time: work memory is 10 MB, whatever their number.
_CHUNK = 1024
#: Added to a float32 from 0 to 2^22, it rounds that to an integer, ties to even, and leaves it in the lowest bits.
_ROUND = 1.5 * 2.0**23

if sys.byteorder != "little":
    raise ImportError(f"{__package__} reads groups of bytes as little-endian words: this machine is big-endian")


@dataclass(frozen=True)
class Layout:
    """One way of laying out 256 bytes of e2m1, 32 e4m3 scales and 64 rope values in a row; offsets are in bytes."""

    #: Bytes of a row.
    width: int
    #: Whose it is.
    about: str
    #: Where the scales begin, and whether they stand in the order of `nvfp4_ds_mla` or one after the other.
    scales_at: int
    permuted: bool
    #: Where the rope values begin, and whether they are bfloat16 or e4m3.
    rope_at: int
    rope_bf16: bool
    #: Where a float32 factor of the rope stands, if any.
    rope_factor_at: int | None = None
    #: Where a float32 factor of the token's latents may stand, if anywhere; 0 says that it does not. 1 is written,
    #: which b12x multiplies with where its factors are per token, and does not look at where they are per layer.
    latent_factor_at: int | None = None


#: The layouts that `convert` reads and writes. `flashinfer` is three tensors, not one.
LAYOUTS: Mapping[str, Layout] = {
    "nvfp4_ds_mla": Layout(352, "vLLM, FlashMLA and FlashInfer", 320, True, 256, False),
    "b12x_368": Layout(368, "b12x, e4m3 rope with a factor", 256, False, 304, False, 288, 292),
    "b12x_432": Layout(432, "b12x, bfloat16 rope", 256, False, 304, True),
    "sglang_416": Layout(416, "SGLang", 256, False, 288, True),
    "flashinfer": Layout(352, "FlashInfer's paged MLA cache", 256, False, 288, False),
}
#: What else `convert` reads and writes: values of other types, which are rounded on the way from or to e2m1.
_ROUNDED = ("fp8_ds_mla", "plain")
_WIDTHS: Mapping[int, str] = {
    288: "DeepSeek V4.1's compressed rows, without rope",
    304: "b12x for GLM-5.3 Flash, without rope",
    384: "DeepSeek V4 on SM120, 448 latents",
    528: "b12x for GLM-5.3 Flash, 512 e4m3 latents, without rope",
    576: "FP8, a byte per value",
    656: "fp8_ds_mla; convert(rows, 'fp8_ds_mla') makes rows of 352",
    1152: "576 values of 16 bits; convert(rows.view(torch.bfloat16), 'plain') makes rows of 352",
} | {
    layout.width: f"{layout.about}; convert(rows, {name!r}) makes rows of 352"
    for name, layout in LAYOUTS.items()
    if layout.width != ROW_BYTES
}


def check_rows(name: str, rows: Any, width: int = ROW_BYTES) -> None:
    """Refuse what is not rows of `width` bytes.

    Raises:
        TypeError: `rows` is no uint8 tensor.
        ValueError: its rows have another width, and the message says whose that is; or their bytes have gaps.
    """
    if not isinstance(rows, torch.Tensor) or rows.dtype != torch.uint8:
        raise TypeError(f"{name} must be a uint8 tensor, got {getattr(rows, 'dtype', type(rows).__name__)}")
    got = rows.shape[-1] if rows.ndim else 0
    if got != width:
        whose = f" ({_WIDTHS[got]})" if got in _WIDTHS else ""
        raise ValueError(f"{name} must have rows of {width} bytes, got {got}{whose}")
    if rows.stride(-1) != 1:
        raise ValueError(f"{name}: the bytes of a row must lie side by side, got strides {tuple(rows.stride())}")


def quantize(latent: Any, rope: Any, *, scales: str = "amax") -> Any:
    """Make rows of 352 bytes.

    Args:
        latent: `[..., 512]` of a floating-point type: the normed latents.
        rope: `[..., 64]`, the same leading dimensions: the rotated positional part.
        scales: One of `SCALE_CHOICES`. Readers cannot tell and need not know.

    Returns:
        uint8 `[..., 352]`, contiguous.

    Raises:
        TypeError: a tensor is not of a floating-point type.
        ValueError: a shape does not fit, or `scales` is unknown.
    """
    _check_values(latent, rope, scales)
    lead = latent.shape[:-1]
    latent, rope = latent.reshape(-1, LATENT), rope.reshape(-1, ROPE)
    rows = torch.empty(latent.shape[0], ROW_BYTES, dtype=torch.uint8, device=latent.device)
    for at in range(0, rows.shape[0], _CHUNK):
        _quantize(latent[at : at + _CHUNK].float(), rope[at : at + _CHUNK].float(), scales, rows[at : at + _CHUNK])
    return rows.view(*lead, ROW_BYTES)


def dequantize(rows: Any, dtype: Any = torch.float32) -> Any:
    """Return what rows hold: `[..., 576]`, 512 latents and then 64 rope values, exact in `dtype`.

    Args:
        rows: uint8 `[..., 352]`; only the last dimension must be contiguous.
        dtype: torch.float32, torch.bfloat16 or torch.float16.

    Raises:
        TypeError: `dtype` is none of these.
        TypeError, ValueError: these are no rows of 352 bytes (see `check_rows`).
    """
    check_rows("rows", rows)
    if dtype not in _EXACT:
        raise TypeError(f"dtype must be {' or '.join(map(str, _EXACT))}, got {dtype!r}")
    latent, rope = unpack(rows.clone(memory_format=torch.contiguous_format).view(-1, ROW_BYTES))
    return torch.cat((latent, rope), -1).to(dtype).view(*rows.shape[:-1], LATENT + ROPE)


def append(cache: Any, latent: Any, rope: Any, slots: Any, *, scales: str = "amax") -> None:
    """Quantize tokens and write each to its slot.

    Args:
        cache: uint8 `[blocks, block_size, 352]` or `[rows, 352]`; only the last dimension must be contiguous, so that
            the cache of one layer may be a view into blocks that hold all layers.
        latent: `[tokens, 512]` of a floating-point type.
        rope: `[tokens, 64]` of a floating-point type.
        slots: int32 or int64 `[tokens]`: `block * block_size + offset`. A negative slot is skipped; of tokens that
            share a slot, any one is written.
        scales: One of `SCALE_CHOICES`.

    Raises:
        TypeError: a tensor's type is none of these.
        ValueError: a shape does not fit, `scales` is unknown, or a slot is outside the cache. Nothing was written.
    """
    check_rows("cache", cache)
    if cache.ndim not in (2, 3):
        raise ValueError(f"cache must be [blocks, block_size, {ROW_BYTES}] or [rows, {ROW_BYTES}], got {cache.shape}")
    _check_values(latent, rope, scales)
    if latent.ndim != 2:
        raise ValueError(f"latent must be [tokens, {LATENT}], got {tuple(latent.shape)}")
    if not isinstance(slots, torch.Tensor) or slots.dtype not in (torch.int32, torch.int64):
        got = getattr(slots, "dtype", type(slots).__name__)
        raise TypeError(f"slots must be a tensor of int32 or int64, got {got}")
    if slots.shape != latent.shape[:1]:
        raise ValueError(f"slots must be [{latent.shape[0]}], one per token, got {tuple(slots.shape)}")
    if slots.numel() == 0:
        return
    lowest, highest = (int(bound) for bound in slots.aminmax())
    count = cache.shape[:-1].numel()
    if highest >= count:
        raise ValueError(f"slots: {highest} is outside the cache, which has {count} rows")
    if lowest < 0:
        kept = slots >= 0
        latent, rope, slots = latent[kept], rope[kept], slots[kept]
    slots, rows, into = slots.long(), quantize(latent, rope, scales=scales), words(cache)
    rows = rows.view(into.dtype)
    if cache.ndim == 2:
        into[slots] = rows
    else:
        into[slots // cache.shape[1], slots % cache.shape[1]] = rows


def convert(
    rows: Any,
    source: str,
    target: str = "nvfp4_ds_mla",
    *,
    latent_factor: float = 1.0,
    rope_factor: float = 1.0,
    scales: str = "amax",
) -> Any:
    """Turn rows of one layout into rows of another.

    Between two of `LAYOUTS` latents are moved as they are, unless they have a factor that is not 1, and e4m3 rope
    values too. Rounded, once, are: latents with a factor, and those of `fp8_ds_mla` and `plain`, as `quantize` does;
    rope values of bfloat16, or with a factor, where e4m3 is written. What is written has no factors, or factors of 1.

    To `plain`, in float32, nothing is rounded but what a factor makes of a value. To `fp8_ds_mla` every latent is, as
    vLLM's fused writer does: the factor of 128 latents is the least power of two that is not less than their largest
    magnitude / 448 nor than 1e-4, and a latent becomes e4m3(latent / factor), ties to even. Its rope is bfloat16.

    Args:
        rows: uint8 `[..., width]` of the source's width. For `flashinfer` the tuple of its tensors: `[..., 256]` e2m1,
            `[..., 32]` scales and `[..., 64]` rope. For `plain` `[..., 576]` of a floating-point type.
        source: A name from `LAYOUTS`, `fp8_ds_mla` (656 bytes: 512 e4m3 values, 4 float32 factors, 64 bfloat16
            values) or `plain`.
        target: The same.
        latent_factor: What the latents are to be multiplied with after reading, where that is not in the row: SGLang's
            and b12x's number per layer, FlashInfer's `ckv_scale`.
        rope_factor: The same for the rope: FlashInfer's `kpe_scale`.
        scales: How new scales are chosen, where there have to be any: one of `SCALE_CHOICES`.

    Returns:
        uint8 `[..., width]` of the target's width, contiguous; for `flashinfer` the tuple of its three tensors, scales
        and rope as torch.float8_e4m3fn; for `plain` float32 `[..., 576]`.

    Raises:
        TypeError: rows are of another type.
        ValueError: a layout or `scales` is unknown, or rows have another width than the source's.
    """
    for name, layout in (("source", source), ("target", target)):
        if layout not in (*LAYOUTS, *_ROUNDED):
            raise ValueError(f"{name} must be one of {', '.join((*LAYOUTS, *_ROUNDED))}, got {layout!r}")
    _check_scales(scales)
    if source in LAYOUTS:
        result, rope, factor = _read(rows, source)
        rope, factor = rope * rope_factor, factor * latent_factor
        if target in _ROUNDED:
            return _write_rounded(dequantize(result)[..., :LATENT] * factor, rope, target)
        if bool((factor != 1).any()):
            rounded = quantize(dequantize(result)[..., :LATENT] * factor, rope, scales=scales)
            result = torch.where(factor == 1, result, rounded)
        result[..., _ROPE_AT:_SCALES_AT] = _e4m3(rope)
    else:
        latent, rope = _read_rounded(rows, source)
        latent, rope = latent * latent_factor, rope * rope_factor
        if target in _ROUNDED:
            return _write_rounded(latent, rope, target)
        result = quantize(latent, rope, scales=scales)
    return result if target == "nvfp4_ds_mla" else _write(result, rope, target)


def unpack(rows: Any) -> tuple[Any, Any]:
    """Return the latents `[n, 512]` and the rope values `[n, 64]` of contiguous rows uint8 `[n, 352]`, in float32."""
    fours, pairs = _tables(rows.device)
    halves = rows.view(torch.uint16)
    # A gather of single elements is fast where one of short rows is not: complex128 stands for four float32 here.
    latent = fours.index_select(0, halves[:, : _ROPE_AT // 2].int().view(-1)).view(torch.float32)
    rest = pairs.index_select(0, halves[:, _ROPE_AT // 2 :].int().view(-1)).view(torch.float32).view(-1, ROPE + _GROUPS)
    latent = latent.view(-1, _GROUPS, GROUP).mul_(_in_order(rest[:, ROPE:])[..., None])
    return latent.view(-1, LATENT), rest[:, :ROPE]


@functools.cache
def _tables(device: Any) -> tuple[Any, Any]:
    """Return what 16 bits mean: four e2m1 as four float32, and two e4m3 as two float32."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    e2m1 = torch.cat((positive, -positive))
    fours = torch.stack([e2m1[bits >> shift & 15] for shift in (0, 4, 8, 12)], -1)
    e4m3 = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
    pairs = torch.stack([e4m3[bits & 255], e4m3[bits >> 8]], -1)
    return fours.view(torch.complex128).view(-1).to(device), pairs.view(torch.int64).view(-1).to(device)


def _check_scales(scales: str) -> None:
    """Refuse an unknown way to choose scales."""
    if scales not in SCALE_CHOICES:
        raise ValueError(f"scales must be one of {', '.join(SCALE_CHOICES)}, got {scales!r}")


def _check_values(latent: Any, rope: Any, scales: str) -> None:
    """Refuse what `quantize` cannot take."""
    _check_scales(scales)
    for name, tensor, width in (("latent", latent, LATENT), ("rope", rope, ROPE)):
        if not isinstance(tensor, torch.Tensor) or not tensor.dtype.is_floating_point:
            got = getattr(tensor, "dtype", type(tensor).__name__)
            raise TypeError(f"{name} must be a tensor of a floating-point type, got {got}")
        if tensor.ndim == 0 or tensor.shape[-1] != width:
            raise ValueError(f"{name} must be [..., {width}], got {tuple(tensor.shape)}")
    if latent.shape[:-1] != rope.shape[:-1]:
        raise ValueError(f"latent {tuple(latent.shape)} and rope {tuple(rope.shape)} are not of as many tokens")


def _quantize(latent: Any, rope: Any, choice: str, rows: Any) -> None:
    """Write float32 latents `[n, 512]` and rope values `[n, 64]` into rows uint8 `[n, 352]`."""
    latent = latent.contiguous()
    groups = latent.abs().view(-1, _GROUPS, GROUP)
    amax = groups.amax(-1, keepdim=True)
    if bool(amax.isnan().any()):
        # The largest of what is not NaN; and NaN itself, infinite without a sign, ends as +6.
        nan = latent.isnan()
        latent = latent.masked_fill(nan, 0.0)
        groups = latent.abs().view_as(groups)
        amax = groups.amax(-1, keepdim=True)
        groups.masked_fill_(nan.view_as(groups), torch.inf)
    group_scales = _scale_bytes(amax * (1.0 / 6.0))
    if choice != "amax":
        group_scales = _least_error(groups, amax, group_scales, choice)
    code = _magnitude(groups, group_scales).view(torch.int32).view(-1, LATENT).bitwise_and_(7)
    code |= latent.view(torch.int32).bitwise_right_shift(28).bitwise_and_(8)
    pair = code.view(torch.int64)
    rows[:, :_ROPE_AT] = pair | (pair >> 28)
    rows[:, _ROPE_AT:_SCALES_AT] = _e4m3(rope)
    rows[:, _SCALES_AT:] = _permuted(group_scales.squeeze(-1))


def _scale_bytes(scales: Any) -> Any:
    """Round scales to e4m3 numbers above zero."""
    return scales.clamp(_SMALLEST, _LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def _e4m3(values: Any) -> Any:
    """Return the bytes of values in e4m3, saturated; NaN is 0x7F."""
    values = torch.where(values.isnan(), torch.nan, values.clamp(-_LARGEST, _LARGEST))
    return values.to(torch.float8_e4m3fn).view(torch.uint8)


def _magnitude(groups: Any, group_scales: Any) -> Any:
    """Return `_ROUND` plus the three low bits of e2m1(x / scale), for x >= 0 `[n, 32, 16]` and scales `[n, 32, 1]`."""
    x = groups * group_scales.view(torch.float8_e4m3fn).float().reciprocal_()
    # e2m1 counts in halves to 2, in ones to 4, in twos to 6: the code is the least of three roundings.
    base = torch.tensor(_ROUND, device=x.device)
    code = torch.add(base, x, alpha=2)
    code = torch.minimum(code, x + (_ROUND + 2), out=code)
    code = torch.minimum(code, torch.add(base + 4, x, alpha=0.5), out=code)
    return code.clamp_max_(_ROUND + 7)


def _least_error(groups: Any, amax: Any, first: Any, choice: str) -> Any:
    """Return the scales of least squared error, as bytes `[n, 32, 1]`; of equals, what `amax` chooses."""
    if choice == "4over6":
        candidates = [_scale_bytes(amax * 0.25)]
    else:
        candidates = [(first.int() + step).clamp(1, 0x7E).to(torch.uint8) for step in _SWEEP]
    best, least = first, _error(groups, first)
    for candidate in candidates:
        error = _error(groups, candidate)
        less = error < least
        best, least = torch.where(less, candidate, best), torch.where(less, error, least)
    return best


def _error(groups: Any, group_scales: Any) -> Any:
    """Return the squared error of groups at scales, `[n, 32, 1]`."""
    code = _magnitude(groups, group_scales) - _ROUND
    value = torch.maximum(torch.maximum(code * 0.5, code - 2), code * 2 - 8)
    return value.mul_(group_scales.view(torch.float8_e4m3fn).float()).sub_(groups).square_().sum(-1, keepdim=True)


def _permuted(group_scales: Any) -> Any:
    """Put scales `[..., 32]` that stand one after the other into the order of `nvfp4_ds_mla`."""
    return group_scales.unflatten(-1, (8, 4)).mT.flatten(-2)


def _in_order(group_scales: Any) -> Any:
    """Put scales `[..., 32]` that stand in the order of `nvfp4_ds_mla` one after the other."""
    return group_scales.unflatten(-1, (4, 8)).mT.flatten(-2)


def words(cache: Any) -> Any:
    """View rows of bytes as rows of the widest integers that their address and strides allow."""
    for dtype, size in ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2)):
        if all(step % size == 0 for step in (cache.storage_offset(), *cache.stride()[:-1])):
            return cache.view(dtype)
    return cache


def _cut(rows: Any, at: int, size: int, dtype: Any) -> Any:
    """Return `size` bytes of each row, which are of a type, as float32."""
    return rows[..., at : at + size].clone(memory_format=torch.contiguous_format).view(dtype).float()


def _read(rows: Any, source: str) -> tuple[Any, Any, Any]:
    """Return rows of 352 bytes, their rope yet to be set, rope values, and the latents' factor `[..., 1]`."""
    layout = LAYOUTS[source]
    if source == "flashinfer":
        if not isinstance(rows, tuple | list) or len(rows) != 3:
            got = f"{len(rows)} of them" if isinstance(rows, tuple | list) else type(rows).__name__
            raise TypeError(f"rows of 'flashinfer' must be a tuple of three tensors, ckv, ckv_sf and kpe, got {got}")
        parts = []
        for name, part, width in zip(("ckv", "ckv_sf", "kpe"), rows, (256, 32, 64), strict=True):
            fp8 = isinstance(part, torch.Tensor) and part.dtype == torch.float8_e4m3fn
            parts.append(part.view(torch.uint8) if fp8 else part)
            check_rows(name, parts[-1], width)
            if parts[-1].shape[:-1] != parts[0].shape[:-1]:
                raise ValueError(f"ckv {tuple(rows[0].shape)} and {name} {tuple(part.shape)} are not of as many tokens")
        rows = torch.cat(parts, -1)
    check_rows("rows", rows, layout.width)
    result = rows.new_zeros(*rows.shape[:-1], ROW_BYTES)
    result[..., :_ROPE_AT] = rows[..., :_ROPE_AT]
    group_scales = rows[..., layout.scales_at : layout.scales_at + _GROUPS]
    result[..., _SCALES_AT:] = group_scales if layout.permuted else _permuted(group_scales)
    if layout.rope_bf16:
        rope = _cut(rows, layout.rope_at, 2 * ROPE, torch.bfloat16)
    else:
        rope = _cut(rows, layout.rope_at, ROPE, torch.float8_e4m3fn)
    if layout.rope_factor_at is not None:
        rope *= _cut(rows, layout.rope_factor_at, 4, torch.float32)
    factor = torch.ones_like(rope[..., :1])
    if layout.latent_factor_at is not None:
        inline = _cut(rows, layout.latent_factor_at, 4, torch.float32)
        factor = torch.where(inline == 0, factor, inline)
    return result, rope, factor


def _read_rounded(rows: Any, source: str) -> tuple[Any, Any]:
    """Return latents and rope values, in float32, of a source that holds no e2m1."""
    if source == "plain":
        if not isinstance(rows, torch.Tensor):
            raise TypeError(f"rows must be a tensor, got {type(rows).__name__}")
        rows = rows.contiguous()
        _check_values(rows[..., :LATENT], rows[..., LATENT:], "amax")
        return rows[..., :LATENT].float(), rows[..., LATENT:].float()
    check_rows("rows", rows, 656)
    latent = _cut(rows, 0, LATENT, torch.float8_e4m3fn).unflatten(-1, (4, 128))
    latent *= _cut(rows, LATENT, 16, torch.float32)[..., None]
    return latent.flatten(-2), _cut(rows, LATENT + 16, 2 * ROPE, torch.bfloat16)


def _write_rounded(latent: Any, rope: Any, target: str) -> Any:
    """Lay latents and rope values, in float32, out as a target that holds no e2m1."""
    if target == "plain":
        return torch.cat((latent, rope), -1)
    latent = latent.unflatten(-1, (4, 128))
    least = (latent.abs().nan_to_num().amax(-1, keepdim=True) * (1.0 / _LARGEST)).clamp_min(1e-4)
    fraction, exponent = torch.frexp(least)  # least = fraction * 2**exponent, 0.5 <= fraction < 1
    factor = torch.ldexp(torch.ones_like(least), exponent - (fraction == 0.5).int())
    parts = (_e4m3(latent / factor).flatten(-2), factor.squeeze(-1), rope.bfloat16())
    return torch.cat([part.view(torch.uint8) for part in parts], -1)


def _write(rows: Any, rope: Any, target: str) -> Any:
    """Lay rows of 352 bytes out as another layout; `rope` is what the rope was before it was rounded to e4m3."""
    layout = LAYOUTS[target]
    group_scales, rope_bytes = _in_order(rows[..., _SCALES_AT:]), rows[..., _ROPE_AT:_SCALES_AT]
    if target == "flashinfer":
        e4m3 = torch.float8_e4m3fn
        return rows[..., :_ROPE_AT].contiguous(), group_scales.view(e4m3), rope_bytes.contiguous().view(e4m3)
    if layout.rope_bf16:
        rope_bytes = rope.bfloat16().view(torch.uint8)
    result = rows.new_zeros(*rows.shape[:-1], layout.width)
    result[..., :_ROPE_AT] = rows[..., :_ROPE_AT]
    result[..., layout.scales_at : layout.scales_at + _GROUPS] = group_scales
    result[..., layout.rope_at : layout.rope_at + rope_bytes.shape[-1]] = rope_bytes
    for at in (layout.rope_factor_at, layout.latent_factor_at):
        if at is not None:
            result[..., at : at + 4] = torch.ones(1, device=rows.device).view(torch.uint8)
    return result
