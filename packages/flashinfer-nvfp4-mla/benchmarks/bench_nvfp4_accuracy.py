# SPDX-License-Identifier: Apache-2.0
"""What 4-bit latents cost: errors and a small model's next tokens, by scale choice, folded and not."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable

import torch
from torch.nn import functional

from flashinfer_nvfp4_mla._folding import choose_exponent, fold_model
from flashinfer_nvfp4_mla._format import SCALE_CHOICES, dequantize, quantize
from support.bench import Bench
from support.small_mla import LATENT, ROPE, Cache, Settings, SmallModel, held_out, largest, spread_latents, trained

#: What the latents of a real model's layers span, by largest magnitude.
SMALLEST, LARGEST = 0.02, 5.2
#: The largest number of a row: e2m1's times e4m3's.
TOP = 6 * 448
#: Layers whose latents are drawn, tokens of each, queries that attend to all of them.
LAYERS, TOKENS, QUERIES = 12, 2048, 128
#: The natural logarithm's spread of a norm's weights over its channels.
SPREAD = 0.3
#: Held-out texts, and their length: what the model was trained on.
TEXTS = 32
#: How far a logit may move where powers of two moved between weights. They are exact; but products of tiny attention
#: weights and small latents underflow in float32, which a last bit shows here and there.
SAME = 1e-4
QUICK = Settings(batch=4, steps=20)

Through = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def run(bench: Bench) -> None:
    _drawn(bench)
    _next_tokens(bench)


def _row(choice: str, factor: float = 1.0) -> Through:
    """Return what a row gives back of latents that were multiplied by `factor` before."""

    def through(latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        read = dequantize(quantize(latent * factor, rope, scales=choice))
        read[..., :LATENT] /= factor
        return read

    return through


def _layer(kind: str, tokens: int, largest: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw a layer: RMS-normed values times a norm's weight, in bfloat16, rope values, and the weight."""
    x = torch.randn(tokens, LATENT)
    if kind == "laplace":
        x = torch.distributions.Laplace(0.0, 1.0).sample((tokens, LATENT))
    weight = torch.exp(SPREAD * torch.randn(LATENT))
    x = x * x.square().mean(-1, keepdim=True).rsqrt()
    weight = weight * (largest / (x * weight).abs().max())
    return (x * weight).bfloat16().float(), 2 * torch.randn(tokens, ROPE), weight


def _attended(query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return (query @ rows.T).softmax(-1) @ rows[:, :LATENT]


def _error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got - exact).norm() / exact.norm())


def _drawn(bench: Bench) -> None:
    """Latents drawn for layers of very different sizes: relative errors, as means over the layers."""
    tokens = TOKENS // 4 if bench.quick else TOKENS
    sizes = torch.logspace(math.log10(SMALLEST), math.log10(LARGEST), LAYERS).tolist()
    for kind in ("gauss", "laplace"):
        latents: dict[tuple[str, str], list[list[float]]] = {}
        outputs: dict[tuple[str, str], list[list[float]]] = {}
        for seed in range(2 if bench.quick else 5):
            torch.manual_seed(seed)
            errors: dict[tuple[str, str], list[tuple[float, float]]] = {}
            for size in sizes:
                latent, rope, weight = _layer(kind, tokens, size)
                exact = torch.cat([latent, rope], -1)
                # Scores of a spread of 2, as much by the latent as by the rope part: a query fits its layer's latents.
                query = torch.randn(QUERIES, LATENT + ROPE) * math.sqrt(2)
                query[:, :LATENT] /= latent.square().sum(-1).mean().sqrt()
                query[:, LATENT:] /= rope.square().sum(-1).mean().sqrt()
                factors = {
                    "plain": 1.0,
                    "folded": 2.0 ** -choose_exponent(weight),
                    "ideal": TOP / latent.abs().max().item(),
                }
                for choice in SCALE_CHOICES:
                    for how, factor in factors.items():
                        got = _row(choice, factor)(latent, rope)
                        pair = (
                            _error(got[:, :LATENT], latent),
                            _error(_attended(query, got), _attended(query, exact)),
                        )
                        errors.setdefault((choice, how), []).append(pair)
            for key, pairs in errors.items():
                latents.setdefault(key, []).append([one for one, _ in pairs])
                outputs.setdefault(key, []).append([other for _, other in pairs])
        for what, found in (("latent", latents), ("attention output", outputs)):
            means = {key: [statistics.fmean(layers) for layers in samples] for key, samples in found.items()}
            for choice in SCALE_CHOICES:
                for how in ("plain", "folded"):
                    bench.row(
                        f"{what} error, {kind}, {choice}, {how}",
                        "",
                        ours=means[choice, how],
                        reference=means[choice, "ideal"],
                        reference_name="fp32 outer scale",
                    )
            for choice in ("amax", "mse"):
                gap = [
                    100 * (plain - ours) / (plain - ideal)
                    for plain, ours, ideal in zip(
                        means["amax", "plain"], means[choice, "folded"], means[choice, "ideal"], strict=True
                    )
                ]
                aim = ">= 70" if choice == "mse" else None
                bench.row(f"{what} gap recovered, {kind}, folded, {choice}", "%", ours=gap, aim=aim)
        shown = [0, LAYERS // 3, 2 * LAYERS // 3, LAYERS - 1]
        for choice, how in (("amax", "plain"), ("amax", "folded"), ("mse", "folded")):
            layers = [statistics.median(sample[layer] for sample in latents[choice, how]) for layer in range(LAYERS)]
            text = ", ".join(f"{sizes[layer]:.2g}: {layers[layer]:.4f}" for layer in shown)
            bench.note(f"latent error by a layer's largest magnitude, {kind}, {choice}, {how}: {text}")
    bench.note(
        f"drawn latents: {LAYERS} layers whose largest magnitude runs from {SMALLEST} to {LARGEST}, {tokens} tokens, "
        f"{QUERIES} queries; errors are relative, means over layers, a sample per seed. The gap is that between amax "
        "without an outer scale and the same scale choice with an ideal one"
    )


def _cache(choice: str, outer: list[float] | None = None) -> Cache:
    """Return what puts a model's cache through rows; `outer` has the largest magnitude of each layer."""

    def cache(layer: int, latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        read = _row(choice, 1.0 if outer is None else TOP / outer[layer])(latent, rope)
        return read[..., :LATENT], read[..., LATENT:]

    return cache


def _bf16(layer: int, latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latent.bfloat16().float(), rope.bfloat16().float()


def _fp8(layer: int, latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Put both parts through e4m3 as they are: the row of 576 bytes, its scale 1."""
    one, other = (value.clamp(-448, 448).to(torch.float8_e4m3fn).float() for value in (latent, rope))
    return one, other


@torch.no_grad()  # type: ignore[untyped-decorator]  # no torch where types are checked
def _next_tokens(bench: Bench) -> None:
    """A small model's distributions of the next token, against its own with a bfloat16 cache."""
    settings = QUICK if bench.quick else Settings()
    with torch.enable_grad():
        model = trained(settings, lambda line: print(line, flush=True))
    texts = held_out(4 if bench.quick else TEXTS, settings.context)
    logits = model(texts, _bf16)
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), texts[:, 1:].flatten()).item()
    as_trained = largest(model, texts)
    spread_latents(model, texts, SMALLEST, LARGEST)
    folded = copy.deepcopy(model)
    exponents = fold_model(folded)
    moved = max((which(texts, _bf16) - logits).abs().max().item() for which in (model, folded))
    if moved > SAME:
        raise ArithmeticError(f"moving powers of two between weights moved a logit by {moved}")
    spans = largest(model, texts)

    def measured(model: SmallModel, cache: Cache) -> tuple[list[float], list[float]]:
        got = model(texts, cache)
        exact = logits.log_softmax(-1)
        divergence = (exact.exp() * (exact - got.log_softmax(-1))).sum(-1).mean(-1)
        agreement = (got.argmax(-1) == logits.argmax(-1)).float().mean(-1) * 100
        return divergence.tolist(), agreement.tolist()

    fp8 = {"plain": measured(model, _fp8), "folded": measured(folded, _fp8)}
    found = {
        (choice, how): measured(which, _cache(choice, outer))
        for choice in SCALE_CHOICES
        for how, which, outer in (("plain", model, None), ("folded", folded, None), ("ideal", model, spans))
    }
    for number, (what, unit) in enumerate((("KL", "1e-3 nats"), ("top-1 agreement", "%"))):
        scale = 1000 if number == 0 else 1
        for how, both in fp8.items():
            bench.row(f"{what}, FP8 row, {how}", unit, ours=[scale * value for value in both[number]])
        for choice in SCALE_CHOICES:
            for how in ("plain", "folded"):
                bench.row(
                    f"{what}, {choice}, {how}",
                    unit,
                    ours=[scale * value for value in found[choice, how][number]],
                    reference=[scale * value for value in found[choice, "ideal"][number]],
                    reference_name="fp32 outer scale",
                )
    plain, ours, ideal = (
        statistics.fmean(found[key][0]) for key in (("amax", "plain"), ("mse", "folded"), ("mse", "ideal"))
    )
    bench.row("KL gap recovered, folded, mse", "%", ours=[100 * (plain - ours) / (plain - ideal)])
    bench.note(
        f"small model: {settings.layers} layers, hidden {settings.hidden}, {settings.heads} heads, latent {LATENT} + "
        f"rope {ROPE}, {settings.steps * settings.batch * settings.context:,} tokens of the standard library's "
        f"sources; {loss:.2f} nats a token on {len(texts)} held-out texts of {settings.context} tokens. A sample per "
        "text, against the same model with a bfloat16 cache, computed in float32"
    )
    bench.note(
        f"its layers' largest latents were {_listed(as_trained)} as trained; exact powers of two were moved between "
        f"norm and up-projection to span what real layers do: {_listed(spans)}. Nothing else was changed; with a "
        f"bfloat16 cache the largest difference of a logit, spread or folded, is {moved:.1e}. Exponents of the fold: "
        + ", ".join(map(str, exponents.values()))
    )
    if bench.quick:
        bench.note("--quick: the model is barely trained; its divergences say little")


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.2g}" for value in values)
