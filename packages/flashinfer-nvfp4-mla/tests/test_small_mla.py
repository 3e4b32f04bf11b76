# SPDX-License-Identifier: Apache-2.0
"""The small model of the accuracy table is one that rows can be read in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flashinfer_nvfp4_mla._folding import fold_model
from support.small_mla import Settings, held_out, largest, spread_latents, trained

TINY = Settings(layers=2, hidden=64, width=64, batch=2, context=32, steps=2)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with torch.no_grad():
        yield


def test_it_is_trained_once_and_the_weights_lie_in_the_cache(tmp_path: Path) -> None:
    said: list[str] = []
    with torch.enable_grad():
        first = trained(TINY, said.append)
    (kept,) = tmp_path.rglob("*.pt")
    again = trained(TINY, said.append)
    assert said == [said[0], said[1], f"weights of an earlier run: {kept}"]
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in again.parameters())


def test_reading_from_a_cache_is_the_same_function_and_depends_on_all_of_it() -> None:
    with torch.enable_grad():
        model = trained(TINY)
    texts = held_out(2, 32)
    logits = model(texts)
    assert torch.allclose(model(texts, lambda layer, latent, rope: (latent, rope)), logits, atol=1e-4)
    assert not torch.allclose(model(texts, lambda layer, latent, rope: (latent * 0, rope)), logits, atol=1e-2)
    assert not torch.allclose(model(texts, lambda layer, latent, rope: (latent, rope.flip(1))), logits, atol=1e-4)


def test_layers_can_be_spread_and_folded_without_a_bit_of_the_logits_changing() -> None:
    with torch.enable_grad():
        model = trained(TINY)
    texts = held_out(2, 32)

    def read() -> torch.Tensor:
        return model(texts, lambda layer, latent, rope: (latent.bfloat16().float(), rope))

    logits = read()
    spread_latents(model, texts, 0.02, 5.2)
    sizes = largest(model, texts)
    assert 0.014 < sizes[0] < 0.029
    assert 3.6 < sizes[1] < 7.4
    assert torch.equal(read(), logits)
    first, last = fold_model(model).values()
    assert first < -6
    assert last in (0, 1)
    assert torch.equal(read(), logits)
