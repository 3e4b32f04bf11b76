# SPDX-License-Identifier: Apache-2.0
"""Move a power of two per layer from the latent norm into the up-projection, so that 4-bit scales are normal numbers.

A row has one e4m3 scale per 16 latent values and nothing that multiplies all of them. Real layers have latents of a
largest magnitude between 0.02 and 5; below about 0.1 a scale, amax / 6, is subnormal in e4m3 (less than 2**-6) and
keeps three bits, two, one. But a latent is read by the up-projection alone, and before that it went through a norm
with a weight of its own::

    kv_b_proj(kv_a_layernorm(x))  ==  (kv_b_proj * 2**k)((kv_a_layernorm * 2**-k)(x))

Both sides are the same function, and the same bits wherever nothing leaves the range of the number format: multiplying
by a power of two changes no mantissa. What is stored in between, the latent, is 2**-k times as large.

The exponent follows from the norm's weight alone, which every tensor-parallel rank and every worker holds whole, by
comparisons and an exponent's bits: no sum whose order could matter. Rows of one exponent are garbage to a reader of
another, so the exponents belong to the cache's identity: `identity`.

An adapter (LoRA) on the up-projection reads the latent beside it and is not folded: do not combine the two.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ._format import GROUP

__all__ = ["choose_exponent", "fold", "fold_model", "identity"]

logger = logging.getLogger(__name__)

#: No exponent is larger, so that both factors are exact in float32 with room for any weight that means something.
LARGEST = 64
#: The largest scale and the largest value that it multiplies: e4m3 and e2m1.
_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
#: Where a module remembers what was done to it.
_MARK = "_nvfp4_mla_folded"
#: Values of a projection that are remembered, evenly taken. Any that is not 0 tells folded from freshly loaded.
_SAMPLE = 4096
#: A linear layer's tensors that a fold knows what to do with, beside the weight.
_SCALES = ("weight_scale", "weight_scale_inv")
_KNOWN = {"weight", "bias", "input_scale", *_SCALES}


def choose_exponent(norm_weight: torch.Tensor) -> int:
    """Return the `k` for which latents under `norm_weight * 2**-k` are about 1.

    The median over the groups of 16 of a group's largest weight comes to lie in [1, 2). Scales are then around 2**-1:
    about 5 binades above e4m3's subnormal range and 9 below its end, in the middle of the range where the error of a
    latent does not depend on `k` at all. More would be easy for the scales but takes from a query that is stored in
    e4m3, which shrinks as latents grow. Where a few weights are so much larger that a scale could overflow, `k` is
    raised until it cannot: after an RMS norm no value exceeds sqrt(n) times its weight.

    Args:
        norm_weight: `[n]`, n a multiple of 16, any floating type; what the RMS-normed value is multiplied by.

    Returns:
        An integer in [-64, 64]; 0 for a weight of zeros.

    Raises:
        TypeError: norm_weight is not floating.
        ValueError: norm_weight has another shape, or holds an infinity or a NaN.
    """
    _check_norm("norm_weight", norm_weight)
    magnitudes = norm_weight.detach().to("cpu", torch.float64).abs()
    if not bool(magnitudes.isfinite().all()):
        raise ValueError("norm_weight holds an infinity or a NaN")
    groups = magnitudes.view(-1, GROUP).amax(dim=1).sort().values.tolist()
    median, largest = groups[(len(groups) - 1) // 2], groups[-1]
    if largest == 0:
        return 0
    exponent = math.frexp(median or largest)[1] - 1
    bound = _E4M3_MAX * _E2M1_MAX / math.sqrt(len(magnitudes))
    while math.ldexp(largest, -exponent) > bound:
        exponent += 1
    return max(-LARGEST, min(LARGEST, exponent))


def fold(norm_weight: torch.Tensor, up_proj_weight: torch.Tensor, exponent: int) -> None:
    """Multiply `norm_weight` by 2**-exponent and `up_proj_weight` by 2**exponent, in place and exactly.

    Args:
        norm_weight: `[n]`, n a multiple of 16, any floating type.
        up_proj_weight: `[rows, n]` or any part of its rows; of a quantized weight its scales, of any shape.
        exponent: in [-64, 64].

    Raises:
        TypeError: a tensor is not floating, or the exponent is not an integer.
        ValueError: the exponent is out of range, or a product is not exact in its tensor's type; nothing was written.
    """
    if not isinstance(exponent, int) or isinstance(exponent, bool):
        raise TypeError(f"exponent is to be an int, not {exponent!r}")
    if not -LARGEST <= exponent <= LARGEST:
        raise ValueError(f"exponent {exponent} is outside [-{LARGEST}, {LARGEST}]")
    _check_norm("norm_weight", norm_weight)
    products = [
        (tensor, _product(name, tensor, power))
        for name, tensor, power in (
            ("norm_weight", norm_weight, -exponent),
            ("up_proj_weight", up_proj_weight, exponent),
        )
    ]
    _write(products)


def fold_model(model: torch.nn.Module, *, agree: Callable[[dict[str, int]], dict[str, int]] = dict) -> dict[str, int]:
    """Fold every pair of `kv_a_layernorm` and `kv_b_proj` in a model, each once; return layer -> exponent.

    To be called when weights are loaded and before they are repacked, and again after every reload. A pair that is
    folded already keeps its exponent; one that was loaded anew is folded anew; a layer on the meta device is passed
    over. A quantized projection is folded in its `weight_scale` or `weight_scale_inv`, and in `input_scale` where
    there is one. All layers are checked before the first is written.

    Where a projection cannot take an exponent exactly (a float16 weight that would become subnormal), the nearest
    towards 0 that it can take is used, with a warning.

    Args:
        model: Any module tree. Pairs are found by those two attributes on one module; the first name of a pair counts.
        agree: Called once with what this rank's part of each projection can take, and returns what is used. Where the
            rows of projections are spread over ranks: of each layer, the value nearest 0 of all ranks.

    Returns:
        The name of the module that holds a pair, such as `model.layers.3.self_attn`, and its exponent, for every
        layer, also those that were folded before.

    Raises:
        TypeError, ValueError: a layer cannot be folded; the message names it and the tensor that is in the way.
            Nothing was written.
    """
    done: dict[str, int] = {}
    fresh: dict[str, _Pair] = {}
    for name, pair in _pairs(model).items():
        mark = pair.mark()
        if mark is None:
            fresh[name] = pair
        else:
            done[name] = mark
    takes = {name: pair.takes() for name, pair in fresh.items()}
    agreed = agree(dict(takes))
    for name, most in takes.items():
        # What is nearer to 0 than an exponent that is exact is exact.
        if not min(0, most) <= agreed[name] <= max(0, most):
            raise ValueError(f"{name}: agreed on exponent {agreed[name]}, which is not between 0 and {most}")
    for name, pair in fresh.items():
        _write(pair.products(agreed[name]))
        pair.remember(agreed[name])
        done[name] = agreed[name]
    return done


def identity(exponents: Mapping[str, int]) -> str:
    """Return a short text that is equal for equal caches: `fold-` and 16 hexadecimal digits, or `fold-none`.

    Layers with exponent 0 do not count: their rows are those of a model that was not folded. In a model whose layers
    are spread over workers, give the exponents of all of them.
    """
    moved = {name: exponent for name, exponent in exponents.items() if exponent}
    if not moved:
        return "fold-none"
    text = json.dumps(moved, sort_keys=True, separators=(",", ":"))
    return f"fold-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class _Mark:
    """What a folded norm remembers: its exponent, its own weight, which tensor of the projection, a sample of that."""

    exponent: int
    norm: torch.Tensor
    key: str
    sample: torch.Tensor


class _Pair:
    """A latent norm and the up-projection that reads it."""

    def __init__(self, name: str, norm: torch.nn.Module, proj: torch.nn.Module) -> None:
        self.name, self.norm, self.proj = name, norm, proj

    def mark(self) -> int | None:
        """Return the exponent of a pair that is folded, None of one that is not; refuse one that is so by half."""
        mark: _Mark | None = getattr(self.norm, _MARK, None)
        if mark is None:
            return None
        # A norm that was loaded again differs from its folded self by 2**exponent at least.
        norm_is_folded = torch.equal(self.norm.weight.data, mark.norm)
        if mark.exponent == 0:
            return 0 if norm_is_folded else None
        tensor = _tensors(self.proj).get(mark.key)
        sample = None if tensor is None else _sample(tensor.data)
        repacked = sample is None or sample.shape != mark.sample.shape or sample.dtype != mark.sample.dtype
        projection_is_folded = not repacked and torch.equal(sample, mark.sample)
        if norm_is_folded and (projection_is_folded or repacked):
            return mark.exponent
        if norm_is_folded or projection_is_folded or repacked:
            raise ValueError(
                f"{self.name}: of a folded pair only {'kv_b_proj' if norm_is_folded else 'kv_a_layernorm'} was loaded "
                "anew, or what was loaded is repacked already; load both"
            )
        return None

    def key(self) -> str:
        """Return the name of the projection's tensor that takes the exponent; refuse a pair that cannot be folded."""
        name, norm = self.name, self.norm
        _check_norm(f"{name}.kv_a_layernorm.weight", norm.weight)
        if type(norm).__name__.startswith("Gemma") or getattr(norm, "bias", None) is not None:
            raise ValueError(
                f"{name}.kv_a_layernorm is a {type(norm).__name__}, with a bias or a weight that is added to 1: only a "
                "norm that multiplies by its weight can be folded"
            )
        found = _tensors(self.proj)
        scales = [key for key in _SCALES if key in found]
        if found.keys() - _KNOWN or len(scales) > 1 or "weight" not in found:
            names = ", ".join(sorted(found)) or "none"
            raise ValueError(f"{name}.kv_b_proj cannot be folded: its tensors are {names}; known are {sorted(_KNOWN)}")
        if scales:
            return scales[0]
        shape = tuple(found["weight"].shape)
        if len(shape) != 2 or shape[1] != norm.weight.numel():
            raise ValueError(f"{name}.kv_b_proj.weight {shape} is not [rows, {norm.weight.numel()}]: repacked already?")
        return "weight"

    def takes(self) -> int:
        """Return the exponent that the norm asks for, or the nearest towards 0 that is exact here."""
        self.key()
        try:
            wanted = choose_exponent(self.norm.weight)
        except ValueError as error:
            raise ValueError(f"{self.name}.kv_a_layernorm: {error}") from error
        exponent = wanted
        while True:
            try:
                self.products(exponent)
                break
            except ValueError as error:
                if exponent == 0:
                    raise
                if exponent == wanted:
                    logger.warning("%s: exponent %d cannot be used: %s", self.name, wanted, error)
                exponent -= 1 if exponent > 0 else -1
        if exponent != wanted:
            logger.warning("%s: folded by 2**%d instead of 2**%d", self.name, exponent, wanted)
        return exponent

    def products(self, exponent: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each tensor with what is to stand in it; ValueError where that is not exact."""
        key, tensors = self.key(), _tensors(self.proj)
        signs = [("kv_a_layernorm.weight", self.norm.weight, -1), (f"kv_b_proj.{key}", tensors[key], 1)]
        if "input_scale" in tensors:
            signs.append(("kv_b_proj.input_scale", tensors["input_scale"], -1))
        return [
            (tensor.data, _product(f"{self.name}.{name}", tensor.data, sign * exponent)) for name, tensor, sign in signs
        ]

    def remember(self, exponent: int) -> None:
        """Mark the norm, so that a second call leaves the pair alone."""
        key = self.key()
        mark = _Mark(exponent, self.norm.weight.data.clone(), key, _sample(_tensors(self.proj)[key].data))
        object.__setattr__(self.norm, _MARK, mark)  # a plain attribute: no buffer that a state dict or a reload sees


def _pairs(model: torch.nn.Module) -> dict[str, _Pair]:
    found: dict[str, _Pair] = {}
    seen: dict[int, tuple[str, tuple[int, int]]] = {}
    for name, module in model.named_modules():
        norm, proj = getattr(module, "kv_a_layernorm", None), getattr(module, "kv_b_proj", None)
        if not isinstance(norm, torch.nn.Module) or not isinstance(proj, torch.nn.Module):
            continue
        ids = id(norm), id(proj)
        known = {seen[one] for one in ids if one in seen}
        if known - {(first, ids) for first, _ in known}:
            other = min(first for first, _ in known)
            raise ValueError(f"{name} shares only one of kv_a_layernorm and kv_b_proj with {other}: neither is folded")
        if known:
            continue
        seen.update(dict.fromkeys(ids, (name, ids)))
        meta = [any(tensor.is_meta for tensor in _tensors(one).values()) for one in (norm, proj)]
        if any(meta) and not all(meta):
            raise ValueError(f"{name}: only one of kv_a_layernorm and kv_b_proj is loaded")
        if not any(meta):
            found[name] = _Pair(name, norm, proj)
    return found


def _tensors(module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's own parameters and buffers."""
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)].clone()


def _check_norm(name: str, weight: torch.Tensor) -> None:
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"{name} is to be a tensor, not {weight!r}")
    if not weight.is_floating_point():
        raise TypeError(f"{name} is {weight.dtype}, not floating")
    if weight.dim() != 1 or not weight.numel() or weight.numel() % GROUP:
        raise ValueError(f"{name} has shape {tuple(weight.shape)}, not [n] with n a multiple of {GROUP}")


def _product(name: str, tensor: torch.Tensor, exponent: int) -> torch.Tensor:
    """Return `tensor * 2**exponent` in its own type; refuse where float64, which holds it exactly, says otherwise."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is to be a tensor, not {tensor!r}")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} is {tensor.dtype}, not floating: it cannot be multiplied by a power of two")
    exact = tensor.detach().double() * 2.0**exponent
    rounded = exact.float().to(tensor.dtype) if tensor.dtype.itemsize < 4 else exact.to(tensor.dtype)
    wrong = rounded.double() != exact
    if bool(wrong.any()):
        value = tensor[wrong].reshape(-1)[0].item()
        raise ValueError(
            f"{name} times 2**{exponent} is not exact in {tensor.dtype}: {int(wrong.sum())} of {tensor.numel()} values,"
            f" such as {value}"
        )
    return rounded


@torch.no_grad()  # type: ignore[untyped-decorator]  # no torch where types are checked
def _write(products: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, product in products:
        tensor.copy_(product)
