# SPDX-License-Identifier: Apache-2.0
"""A small MLA model in plain torch, trained for some minutes on the Python sources of the standard library.

What it is for: to see what a cache of fewer bits costs in the distribution of the next token, where no large model can
run. The cache has the real geometry (512 latent and 64 positional values a token and layer); everything else is small.
Read from a cache, attention is computed as engines compute it while they decode: `kv_b_proj` absorbed into the query
and the output, so that what is read of the cache is read as rows.

Modules carry the names that vLLM's models have, so that what finds a pair of latent norm and up-projection there finds
it here. Everything is drawn from one seed; another number of threads adds up in another order.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from serving_stack.model import FORMAT, VOCABULARY, text_tokenizer

__all__ = ["LATENT", "ROPE", "Cache", "Settings", "SmallModel", "held_out", "largest", "spread_latents", "trained"]

LATENT, ROPE = 512, 64
#: Every so many files of the standard library is kept out of the training.
HELD_OUT = 16

#: What attention reads instead of a layer's latents `[batch, tokens, 512]` and positional parts `[batch, tokens, 64]`.
Cache = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Settings:
    """The shape of the model and how long it is trained; together with this file's text they name the weights."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    nope: int = 32
    value: int = 32
    width: int = 384
    batch: int = 6
    context: int = 192
    steps: int = 1200
    rate: float = 4e-3
    seed: int = 0


class Attention(nn.Module):  # type: ignore[misc]  # no torch where types are checked
    """Multi-head latent attention, `kv_b_proj` absorbed where it reads from a cache."""

    def __init__(self, settings: Settings, layer: int) -> None:
        super().__init__()
        hidden, heads = settings.hidden, settings.heads
        self.layer, self.settings = layer, settings
        self.q_proj = nn.Linear(hidden, heads * (settings.nope + ROPE), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, LATENT + ROPE, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(LATENT, eps=1e-5)
        self.kv_b_proj = nn.Linear(LATENT, heads * (settings.nope + settings.value), bias=False)
        self.o_proj = nn.Linear(heads * settings.value, hidden, bias=False)

    def forward(self, x: torch.Tensor, cache: Cache | None) -> torch.Tensor:
        """Attend over `[batch, tokens, hidden]`, causally."""
        own, (batch, tokens, _) = self.settings, x.shape
        query = self.q_proj(x).view(batch, tokens, own.heads, own.nope + ROPE)
        latent, rope = self.kv_a_proj_with_mqa(x).split([LATENT, ROPE], dim=-1)
        latent, rope = self.kv_a_layernorm(latent), _rotated(rope)
        if cache is None:
            keys_values = self.kv_b_proj(latent).view(batch, tokens, own.heads, own.nope + own.value)
            keys, values = keys_values.split([own.nope, own.value], dim=-1)
            keys = torch.cat([keys, rope[:, :, None].expand(-1, -1, own.heads, -1)], dim=-1)
            queries = torch.cat([query[..., : own.nope], _rotated(query[..., own.nope :])], dim=-1)
            out = functional.scaled_dot_product_attention(
                queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), is_causal=True
            )
            return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))
        latent, rope = cache(self.layer, latent, rope)
        absorbed = self.kv_b_proj.weight.view(own.heads, own.nope + own.value, LATENT)
        inner = torch.einsum("bthn,hnl->bhtl", query[..., : own.nope], absorbed[:, : own.nope])
        outer = _rotated(query[..., own.nope :]).transpose(1, 2)
        scores = inner @ latent.transpose(1, 2)[:, None] + outer @ rope.transpose(1, 2)[:, None]
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        weights = (scores / math.sqrt(own.nope + ROPE)).masked_fill(hidden, -math.inf).softmax(-1)
        out = torch.einsum("bhtl,hvl->bthv", weights @ latent[:, None], absorbed[:, own.nope :])
        return self.o_proj(out.reshape(batch, tokens, -1))


class Layer(nn.Module):  # type: ignore[misc]
    """Attention and a gated MLP."""

    def __init__(self, settings: Settings, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(settings.hidden, eps=1e-5)
        self.self_attn = Attention(settings, layer)
        self.post_attention_layernorm = nn.RMSNorm(settings.hidden, eps=1e-5)
        self.gate_proj = nn.Linear(settings.hidden, settings.width, bias=False)
        self.up_proj = nn.Linear(settings.hidden, settings.width, bias=False)
        self.down_proj = nn.Linear(settings.width, settings.hidden, bias=False)

    def forward(self, x: torch.Tensor, cache: Cache | None) -> torch.Tensor:
        """Add what both write to the residual stream."""
        x = x + self.self_attn(self.input_layernorm(x), cache)
        inner = self.post_attention_layernorm(x)
        return x + self.down_proj(functional.silu(self.gate_proj(inner)) * self.up_proj(inner))


class SmallModel(nn.Module):  # type: ignore[misc]
    """The whole model; the output matrix is the embedding."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, settings.hidden)
        self.layers = nn.ModuleList(Layer(settings, layer) for layer in range(settings.layers))
        self.norm = nn.RMSNorm(settings.hidden, eps=1e-5)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                gain = 1 / math.sqrt(2 * settings.layers) if writes else 1.0
                nn.init.normal_(weight, std=0.02 if "embed" in name else gain / math.sqrt(weight.shape[1]))

    def forward(self, tokens: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """Return the logits `[batch, tokens, vocabulary]`; with `cache`, as read from it."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cache)
        return functional.linear(self.norm(x), self.embed_tokens.weight)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Turn `[batch, tokens, ..., 64]` by its position."""
    tokens, half = x.shape[1], ROPE // 2
    angle = torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    shape = (1, tokens, *[1] * (x.dim() - 3), half)
    cosine, sine = angle.cos().view(shape), angle.sin().view(shape)
    one, other = x.split(half, dim=-1)
    return torch.cat([one * cosine - other * sine, one * sine + other * cosine], dim=-1)


def _sources() -> list[Path]:
    """List the standard library's own modules, in order of name; tests and installed packages are not among them."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = list(folder.glob("*.py"))
    for package in sorted(folder.glob("*/__init__.py")):
        if package.parent.name not in {"test", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "encodings"}:
            found += [path for path in package.parent.rglob("*.py") if "test" not in path.parts]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _tokens(paths: list[Path], most: int) -> torch.Tensor:
    """Read files until there are `most` tokens."""
    found: list[int] = []
    for path in paths:
        text = path.read_text("utf-8", errors="replace")
        found += text_tokenizer().encode(text, add_special_tokens=False).ids
        if len(found) >= most:
            break
    return torch.tensor(found[:most])


def held_out(texts: int, tokens: int) -> torch.Tensor:
    """Return `[texts, tokens]` of modules that no training saw, each from another place of them."""
    read = _tokens(_sources()[::HELD_OUT], 64 * texts * tokens)
    starts = torch.linspace(0, len(read) - tokens, texts).long()
    return torch.stack([read[start : start + tokens] for start in starts.tolist()])


def trained(settings: Settings, say: Callable[[str], None] = lambda line: None) -> SmallModel:
    """Return the trained model; the weights of the same text, settings, Python and torch are kept outside the checkout.

    They lie in `$XDG_CACHE_HOME/serving-stack/small-mla`. Weights are rounded to bfloat16, as checkpoints hold them.
    """
    key = json.dumps([asdict(settings), FORMAT, sys.version_info[:3], torch.__version__]).encode()
    name = hashlib.sha256(Path(__file__).read_bytes() + key).hexdigest()[:24]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "serving-stack" / "small-mla"
    kept = cache / f"{name}.pt"
    torch.manual_seed(settings.seed)
    model = SmallModel(settings)
    if kept.is_file():
        say(f"weights of an earlier run: {kept}")
        model.load_state_dict(torch.load(kept, weights_only=True))
        return model
    _train(model, settings, say)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=cache, delete=False) as half_written:
        torch.save(model.state_dict(), half_written)
    os.replace(half_written.name, kept)
    return model


@torch.no_grad()  # type: ignore[untyped-decorator]  # no torch where types are checked
def largest(model: SmallModel, texts: torch.Tensor) -> list[float]:
    """Return the largest magnitude of each layer's latents over `texts`."""
    found = [0.0] * len(model.layers)

    def watched(layer: int, latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found[layer] = latent.abs().max().item()
        return latent, rope

    model(texts, watched)
    return found


@torch.no_grad()  # type: ignore[untyped-decorator]
def spread_latents(model: SmallModel, texts: torch.Tensor, smallest: float, widest: float) -> None:
    """Move exact powers of two between latent norms and up-projections; the model stays the same function.

    The largest magnitudes of the layers' latents come to lie next to `smallest` to `widest`, in equal steps of their
    logarithm from the first layer to the last: what a real model's layers span, where training a small one leaves them
    all alike.
    """
    aims = torch.logspace(math.log10(smallest), math.log10(widest), len(model.layers)).tolist()
    for layer, size, aim in zip(model.layers, largest(model, texts), aims, strict=True):
        factor = 2.0 ** round(math.log2(aim / size))
        layer.self_attn.kv_a_layernorm.weight.mul_(factor)
        layer.self_attn.kv_b_proj.weight.div_(factor)


def _train(model: SmallModel, settings: Settings, say: Callable[[str], None]) -> None:
    paths = [path for number, path in enumerate(_sources()) if number % HELD_OUT]
    order = torch.randperm(len(paths)).tolist()
    read = _tokens([paths[number] for number in order], settings.steps * settings.batch * settings.context + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(settings.steps):
        share = step / settings.steps
        rate = settings.rate * min(1.0, (step + 1) / 50) * (1 - share)
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(0, len(read) - settings.context - 1, (settings.batch,)).tolist()
        texts = torch.stack([read[start : start + settings.context + 1] for start in starts])
        loss = functional.cross_entropy(model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == settings.steps - 1:
            say(f"step {step + 1} of {settings.steps}: {loss.item():.3f} nats a token")
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
