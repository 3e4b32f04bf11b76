# SPDX-License-Identifier: Apache-2.0
"""Folding moves a power of two and changes nothing else."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flashinfer_nvfp4_mla._folding import choose_exponent, fold, fold_model, identity
from flashinfer_nvfp4_mla._format import dequantize, quantize

LATENT, ROPE, HEADS, NOPE, VALUE = 512, 64, 4, 16, 16
DTYPES = [torch.float32, torch.bfloat16]


class Attention(nn.Module):  # type: ignore[misc]  # no torch where types are checked
    """A latent norm and an up-projection under the names that models give them."""

    def __init__(self, scale: float, dtype: Any, seed: int = 0, weight: float = 0.05) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(seed)
        self.kv_a_layernorm = nn.RMSNorm(LATENT, eps=1e-5, dtype=dtype)
        self.kv_b_proj = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False, dtype=dtype)
        with torch.no_grad():
            self.kv_a_layernorm.weight.copy_(scale * (1 + 0.3 * torch.randn(LATENT, generator=drawn)))
            self.kv_b_proj.weight.copy_(weight * torch.randn(self.kv_b_proj.weight.shape, generator=drawn))

    def forward(self, x: Any) -> Any:
        return self.kv_b_proj(self.kv_a_layernorm(x))


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self, scales: tuple[float, ...] = (0.004, 0.05, 1.0), dtype: Any = torch.bfloat16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(scale, dtype, seed) for seed, scale in enumerate(scales))


def absorbed(attention: Attention, query: Any, latent: Any) -> Any:
    """Attend in the space of latents: `[heads, nope]` against `[tokens, 512]`."""
    up = attention.kv_b_proj.weight.view(HEADS, NOPE + VALUE, LATENT)
    inner = torch.einsum("hn,hnl->hl", query, up[:, :NOPE])
    weights = (inner @ latent.T).float().softmax(-1).to(latent.dtype)
    return torch.einsum("hl,hvl->hv", weights @ latent, up[:, NOPE:])


def bits(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0005, 0.004, 0.03, 0.3, 1.0, 5.0, 40.0])
def test_a_folded_pair_computes_the_same_bits(scale: float, dtype: Any) -> None:
    attention = Attention(scale, dtype)
    x = torch.randn(64, LATENT, dtype=dtype)
    query = torch.randn(HEADS, NOPE, dtype=dtype)
    with torch.no_grad():
        before, latent = attention(x), attention.kv_a_layernorm(x)
        attended = absorbed(attention, query, latent)
        exponent = choose_exponent(attention.kv_a_layernorm.weight)
        fold(attention.kv_a_layernorm.weight, attention.kv_b_proj.weight, exponent)
        assert torch.equal(attention.kv_a_layernorm(x), latent * 2.0**-exponent)
        assert torch.equal(attention(x), before)
        assert torch.equal(absorbed(attention, query, attention.kv_a_layernorm(x)), attended)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_unfolding_gives_back_the_same_bits(dtype: Any) -> None:
    attention = Attention(0.05, dtype, weight=1.0)
    with torch.no_grad():
        attention.kv_b_proj.weight[attention.kv_b_proj.weight.abs() < 0.01] = 0.0
    before = bits(attention)
    fold(attention.kv_a_layernorm.weight, attention.kv_b_proj.weight, -5)
    assert not same(bits(attention), before)
    fold(attention.kv_a_layernorm.weight, attention.kv_b_proj.weight, 5)
    assert same(bits(attention), before)


@settings(max_examples=200)
@given(scale=st.integers(-40, 40), spread=st.floats(0, 3), peak=st.floats(1, 1e4), seed=st.integers(0, 9))
def test_the_exponent_leaves_no_typical_scale_subnormal_and_none_that_overflows(
    scale: int, spread: float, peak: float, seed: int
) -> None:
    drawn = torch.Generator().manual_seed(seed)
    weight = 2.0**scale * torch.exp(spread * torch.randn(LATENT, generator=drawn, dtype=torch.float64))
    weight[17] *= peak
    folded = weight * 2.0 ** -choose_exponent(weight)
    # What an RMS norm can give at most, in one channel: all of the sum of squares.
    assert folded.max() * math.sqrt(LATENT) / 6 <= 448
    typical = folded.view(-1, 16).amax(1).sort().values[15]
    assert typical < 2
    assert typical >= 1 or 2 * folded.max() * math.sqrt(LATENT) / 6 > 448


def test_one_power_of_two_more_in_the_norm_is_one_more_in_the_exponent() -> None:
    weight = torch.rand(LATENT) + 0.1
    assert [choose_exponent(weight * 2.0**shift) for shift in (-9, -1, 0, 3)] == [
        choose_exponent(weight) + shift for shift in (-9, -1, 0, 3)
    ]


def test_the_exponent_of_a_norm_does_not_depend_on_its_type_or_its_order_of_groups() -> None:
    weight = (0.01 * torch.randn(LATENT)).bfloat16()
    shuffled = weight.view(-1, 16)[torch.randperm(32)].reshape(-1)
    assert choose_exponent(weight) == choose_exponent(weight.double()) == choose_exponent(shuffled)


def test_a_norm_of_zeros_stays_where_it_is() -> None:
    assert choose_exponent(torch.zeros(LATENT)) == 0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_refused(bad: float) -> None:
    weight = torch.ones(LATENT)
    weight[3] = bad
    with pytest.raises(ValueError, match="norm_weight"):
        choose_exponent(weight)


@pytest.mark.parametrize(
    ("weight", "error"),
    [(torch.ones(500), ValueError), (torch.ones(2, 512), ValueError), (torch.ones(512, dtype=torch.int32), TypeError)],
)
def test_what_is_no_norm_weight_is_refused(weight: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="norm_weight"):
        choose_exponent(weight)
    with pytest.raises(error, match="norm_weight"):
        fold(weight, torch.ones(4, 512), 1)


@pytest.mark.parametrize(
    ("dtype", "value", "exponent"),
    [
        (torch.float16, 3 * 2.0**-24, -1),  # subnormal: the last bit is lost
        (torch.float16, 2.0**-24, -1),  # becomes 0
        (torch.float16, 60000.0, 1),  # becomes infinite
        (torch.bfloat16, 1.5 * 2.0**-126, -8),
        (torch.bfloat16, 2.0**127, 1),
        (torch.float32, 2.0**-149, -1),
        (torch.float32, 2.0**127, 1),
        (torch.float32, math.nan, 1),
    ],
)
def test_a_weight_that_would_lose_bits_is_refused_and_nothing_is_written(
    dtype: Any, value: float, exponent: int
) -> None:
    attention = Attention(1.0, dtype)
    with torch.no_grad():
        attention.kv_b_proj.weight.fill_(1.0)
        attention.kv_b_proj.weight[5, 7] = value
    before = bits(attention)
    with pytest.raises(ValueError, match=r"up_proj_weight times 2\*\*.* is not exact") as refused:
        fold(attention.kv_a_layernorm.weight, attention.kv_b_proj.weight, exponent)
    assert f"1 of {attention.kv_b_proj.weight.numel()}" in str(refused.value)
    assert all(torch.equal(before[name].nan_to_num(), now.nan_to_num()) for name, now in bits(attention).items())


@pytest.mark.parametrize(("exponent", "error"), [(65, ValueError), (-65, ValueError), (1.0, TypeError)])
def test_an_exponent_that_is_none_is_refused(exponent: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="exponent"):
        fold(torch.ones(512), torch.ones(4, 512), exponent)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_folded_model_computes_the_same_bits_and_has_latents_of_one_size(dtype: Any) -> None:
    model = Model(dtype=dtype)
    x = torch.randn(32, LATENT, dtype=dtype)
    with torch.no_grad():
        before = [layer(x) for layer in model.layers]
        exponents = fold_model(model)
        assert all(torch.equal(layer(x), was) for layer, was in zip(model.layers, before, strict=True))
        sizes = [layer.kv_a_layernorm(x).float().pow(2).mean().sqrt().item() for layer in model.layers]
    assert list(exponents) == ["layers.0", "layers.1", "layers.2"]
    assert exponents["layers.0"] < exponents["layers.1"] < exponents["layers.2"] <= 0
    assert all(0.4 < size < 2 for size in sizes)


def test_a_shallow_layers_rows_are_nearer_to_its_latents() -> None:
    model = Model((0.004,))
    x, rope = torch.randn(256, LATENT, dtype=torch.bfloat16), torch.zeros(256, ROPE)

    def error() -> float:
        with torch.no_grad():
            latent = model.layers[0].kv_a_layernorm(x).float()
        return float((dequantize(quantize(latent, rope))[:, :LATENT] - latent).norm() / latent.norm())

    plain = error()
    fold_model(model)
    assert plain > 0.11
    assert error() < 0.1


def test_every_rank_chooses_what_one_process_would() -> None:
    whole = Model()
    exponents = fold_model(whole)
    for rank in range(4):
        shard = Model()
        for layer in shard.layers:
            rows = layer.kv_b_proj.weight.data.chunk(4)[rank].clone()
            layer.kv_b_proj = nn.Linear(LATENT, len(rows), bias=False, dtype=rows.dtype)
            layer.kv_b_proj.weight.data = rows
        assert fold_model(shard) == exponents
        for layer, other in zip(shard.layers, whole.layers, strict=True):
            assert torch.equal(layer.kv_a_layernorm.weight, other.kv_a_layernorm.weight)
            assert torch.equal(layer.kv_b_proj.weight, other.kv_b_proj.weight.chunk(4)[rank])


def test_a_pair_is_folded_once_also_where_two_modules_hold_it() -> None:
    model = Model()
    for layer in model.layers:  # as vLLM does: the attention and the wrapper in it have the same norm
        layer.mla_attn = nn.Module()
        layer.mla_attn.kv_a_layernorm, layer.mla_attn.kv_b_proj = layer.kv_a_layernorm, layer.kv_b_proj
    exponents = fold_model(model)
    once = bits(model)
    assert fold_model(model) == exponents == fold_model(Model())
    assert same(bits(model), once)
    assert fold_model(nn.ModuleList([nn.Linear(2, 2)])) == {}


@pytest.mark.parametrize("part", ["kv_a_layernorm", "kv_b_proj"])
def test_half_a_pair_that_two_layers_share_is_refused_by_name(part: str) -> None:
    model = Model()
    setattr(model.layers[2], part, getattr(model.layers[0], part))
    with pytest.raises(ValueError, match=r"layers\.2 shares only one of .* with layers\.0"):
        fold_model(model)


def test_weights_that_were_loaded_anew_are_folded_anew() -> None:
    model = Model((0.004, 0.004))
    loaded = bits(model)
    exponents = fold_model(model)
    folded = bits(model)
    model.load_state_dict(loaded)
    assert fold_model(model) == exponents
    assert same(bits(model), folded)
    other = Model((0.05, 1.0))
    model.load_state_dict(bits(other))
    assert fold_model(model) == fold_model(other) != exponents
    assert same(bits(model), bits(other))


def test_half_a_pair_that_was_loaded_anew_is_refused_by_name() -> None:
    for part in ("kv_a_layernorm", "kv_b_proj"):
        model = Model()
        loaded = bits(model)
        fold_model(model)
        folded = bits(model)
        model.load_state_dict({f"layers.1.{part}.weight": loaded[f"layers.1.{part}.weight"]}, strict=False)
        before = bits(model)
        with pytest.raises(ValueError, match=rf"layers\.1: of a folded pair only {part} was loaded anew"):
            fold_model(model)
        assert same(bits(model), before)
        model.load_state_dict(folded)


def test_a_projection_that_was_repacked_after_the_fold_stays_folded() -> None:
    model = Model()
    exponents = fold_model(model)
    model.layers[0].kv_b_proj.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    model.layers[1].kv_b_proj.weight = nn.Parameter(model.layers[1].kv_b_proj.weight.t().contiguous()[:, :-1])
    norms = [layer.kv_a_layernorm.weight.clone() for layer in model.layers]
    assert fold_model(model) == exponents
    assert all(torch.equal(norm, layer.kv_a_layernorm.weight) for norm, layer in zip(norms, model.layers, strict=True))


def test_layers_that_are_not_there_yet_are_passed_over() -> None:
    model = Model()
    model.layers[1].to("meta")
    assert list(fold_model(model)) == ["layers.0", "layers.2"]
    model.layers[0].kv_b_proj.to("meta")
    with pytest.raises(ValueError, match=r"layers\.0: only one of kv_a_layernorm and kv_b_proj is loaded"):
        fold_model(model)


def quantized(layer: Attention, name: str, **tensors: Any) -> None:
    """Make a layer's projection one of FP8, with a scale of each block of 16 rows and 128 columns."""
    weight = layer.kv_b_proj.weight.data
    layer.kv_b_proj = nn.Module()
    layer.kv_b_proj.weight = nn.Parameter((weight * 64).to(torch.float8_e4m3fn), requires_grad=False)
    scales = 2.0**-6 * (1 + torch.rand(weight.shape[0] // 16, LATENT // 128))
    for key, tensor in {name: scales, **tensors}.items():
        layer.kv_b_proj.register_parameter(key, nn.Parameter(tensor, requires_grad=False))


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_a_quantized_projection_is_folded_in_its_scales(name: str) -> None:
    model = Model()
    for layer in model.layers:
        quantized(layer, name, input_scale=torch.tensor([0.75]))
    before = bits(model)
    exponents = fold_model(model)
    assert exponents == fold_model(Model())
    after = bits(model)
    for layer, exponent in exponents.items():
        part = f"{layer}.kv_b_proj"
        assert torch.equal(after[f"{part}.weight"].float(), before[f"{part}.weight"].float())
        assert torch.equal(after[f"{part}.{name}"], before[f"{part}.{name}"] * 2.0**exponent)
        # Quantized statically, the latent meets a scale that moved with it: the same FP8 values are multiplied.
        assert torch.equal(after[f"{part}.input_scale"], before[f"{part}.input_scale"] * 2.0**-exponent)
    assert fold_model(model) == exponents
    assert torch.equal(model.layers[0].kv_b_proj.input_scale, after["layers.0.kv_b_proj.input_scale"])


def test_a_scale_that_is_a_power_of_two_by_its_type_is_folded_or_refused_by_name() -> None:
    model = Model((0.004,))
    quantized(model.layers[0], "weight_scale_inv")
    proj = model.layers[0].kv_b_proj
    scale = torch.full_like(proj.weight_scale_inv, 2.0**-6)
    proj.weight_scale_inv = nn.Parameter(scale.to(torch.float8_e8m0fnu), requires_grad=False)
    (exponent,) = fold_model(model).values()
    assert torch.equal(proj.weight_scale_inv.float(), scale * 2.0**exponent)
    packed = Model((0.004,))
    quantized(packed.layers[0], "weight_scale_inv")
    packed.layers[0].kv_b_proj.weight_scale_inv = nn.Parameter(scale.to(torch.int32), requires_grad=False)
    with pytest.raises(TypeError, match=r"layers\.0\.kv_b_proj\.weight_scale_inv is torch\.int32"):
        fold_model(packed)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"weight_scale_2": torch.ones(1)}, "weight_scale_2"),
        ({"weight_scale_inv": torch.ones(1)}, "weight_scale_inv"),
        ({"qweight": torch.ones(1)}, "qweight"),
    ],
)
def test_a_quantized_projection_of_another_kind_is_refused_by_name(tensors: dict[str, Any], named: str) -> None:
    model = Model()
    quantized(model.layers[2], "weight_scale", **tensors)
    before = bits(model.layers[0])
    with pytest.raises(ValueError, match=rf"layers\.2\.kv_b_proj cannot be folded.*{named}"):
        fold_model(model)
    assert same(bits(model.layers[0]), before)


@pytest.mark.parametrize("given", [None, [1.0], 1.0])
def test_what_is_no_tensor_is_refused_by_name(given: Any) -> None:
    norm = torch.ones(16)
    with pytest.raises(TypeError, match=re.escape(f"norm_weight is to be a tensor, not {given!r}")):
        choose_exponent(given)
    with pytest.raises(TypeError, match=re.escape(f"up_proj_weight is to be a tensor, not {given!r}")):
        fold(norm, given, 1)
    assert (norm == 1).all()


def test_a_norm_that_adds_one_to_its_weight_is_refused_by_name() -> None:
    class GemmaRMSNorm(nn.RMSNorm):  # type: ignore[misc]
        pass

    model = Model()
    model.layers[0].kv_a_layernorm = GemmaRMSNorm(LATENT)
    with pytest.raises(ValueError, match=r"layers\.0\.kv_a_layernorm is a GemmaRMSNorm"):
        fold_model(model)


def test_a_projection_that_cannot_take_the_exponent_takes_the_nearest_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Model((0.0005,), torch.float16)
    with torch.no_grad():
        model.layers[0].kv_b_proj.weight.fill_(3 * 2.0**-16)  # 24 is the last power that float16 has
        wanted = choose_exponent(model.layers[0].kv_a_layernorm.weight)
    before = model.layers[0].kv_a_layernorm.weight.clone()
    with caplog.at_level(logging.WARNING):
        (taken,) = fold_model(model).values()
    assert wanted < taken < 0
    assert torch.equal(model.layers[0].kv_a_layernorm.weight, before * 2.0**-taken)
    assert model.layers[0].kv_b_proj.weight[0, 0] == 3 * 2.0 ** (taken - 16)
    (last,) = {record.getMessage() for record in caplog.records if "instead" in record.getMessage()}
    assert last == f"layers.0: folded by 2**{taken} instead of 2**{wanted}"


def test_what_one_rank_cannot_take_no_rank_takes() -> None:
    told: list[dict[str, int]] = []

    def agree(mine: dict[str, int]) -> dict[str, int]:
        told.append(mine)
        return {name: max(exponent, -2) for name, exponent in mine.items()}

    model = Model()
    exponents = fold_model(model, agree=agree)
    assert told == [fold_model(Model())]
    assert exponents == {name: max(exponent, -2) for name, exponent in told[0].items()}
    assert fold_model(model, agree=agree) == exponents
    assert told[1] == {}


def test_an_agreement_on_more_than_a_rank_can_take_is_refused_and_nothing_is_written() -> None:
    model = Model()
    before = bits(model)
    with pytest.raises(ValueError, match=r"layers\.0: agreed on exponent -9, which is not between 0 and"):
        fold_model(model, agree=lambda mine: dict.fromkeys(mine, -9))
    assert same(bits(model), before)


def test_equal_exponents_have_one_name_and_others_another() -> None:
    one = {"model.layers.0.self_attn": -7, "model.layers.1.self_attn": 0, "model.layers.2.self_attn": -1}
    assert identity(one) == identity(dict(reversed(one.items())))
    assert identity(one) != identity({**one, "model.layers.2.self_attn": -2})
    assert identity(one) != identity({**one, "model.layers.1.self_attn": 1})
    assert identity(one).startswith("fold-")
    assert len(identity(one)) == 21


def test_a_model_whose_exponents_are_all_zero_has_the_cache_of_one_that_was_not_folded() -> None:
    assert identity({}) == identity({"model.layers.0.self_attn": 0}) == "fold-none"
