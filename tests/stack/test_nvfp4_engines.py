# SPDX-License-Identifier: Apache-2.0
"""flashinfer-nvfp4-mla in plain vLLM engines: prefill, NIXL and decode on rows of 352 bytes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving_stack.model import prompt_tokens, write_model
from support.engines import Engine, running
from support.rescaled import rescaled

pytestmark = pytest.mark.engines

LAYERS, BLOCK, ROW = 4, 32, 352
PAGE = BLOCK * ROW
#: How far other kernels' rounding may move the distance between the two best tokens' log-probabilities; it differs with
#: the processor. The test prints how far it was.
ROUNDING = 0.75
#: The most tokens of a step: longer prompts are read in pieces.
STEP = 512
PROMPTS = [1, 31, 33, 128, 500, 1000]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose latents are about 1 in each layer, and one that computes the same with latents as real ones are."""
    folder = tmp_path_factory.mktemp("nvfp4")
    even = write_model(folder / "glm-tiny")
    return even, rescaled(even, folder / "varied")


@pytest.fixture(scope="module")
def fleet(models: tuple[Path, Path]) -> Iterator[Any]:
    """A stock pair by layer on any processor's kernels; a pair on block rows, folded; an end that is not folded; one
    whose cache is exact."""
    even, varied = models

    def engine(model: Path, name: str, role: str, **given: Any) -> Engine:
        given = {"cache_dtype": "nvfp4_ds_mla", "step": STEP, **given}
        return Engine(model, even.parent / f"{name}.log", role, **given)

    layers: dict[str, Any] = {
        "layout": "LBNHC",
        "plain": True,
        "environment": {"FLASHINFER_NVFP4_MLA_ISA": "avx2"},
    }
    rows: dict[str, Any] = {"layout": "BLHNC", "module": "vllm_blhnc_layout.pull"}
    engines = SimpleNamespace(
        stock=engine(even, "stock", "prefill", **layers),
        stock_decode=engine(even, "stock-decode", "decode", **layers),
        prefill=engine(varied, "prefill", "prefill", **rows),
        decode=engine(varied, "decode", "decode", **rows),
        unfolded=engine(varied, "unfolded", "decode", **rows, environment={"FLASHINFER_NVFP4_MLA_FOLDING": "0"}),
    )
    engines.exact = engine(even, "exact", "prefill", cache_dtype="auto")
    with running(*vars(engines).values()):
        yield engines


def hand_over(prefill: Engine, decode: Engine, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    begun = prefill.generate(prompts, 1)
    return decode.generate(prompts, tokens, [one["transfer"] for one in begun])


def test_folded_block_rows_answer_as_layers_that_need_no_folding(fleet: Any) -> None:
    """Other weights, layout, connector and, where the processor has them, other kernels: the same model and answers."""
    assert "a power of two is folded into 3 of 4 layers" in fleet.prefill.log.read_text()
    assert "a power of two is folded into 0 of 4 layers" in fleet.stock.log.read_text()
    prompts = [prompt_tokens(length) for length in PROMPTS]
    stock = hand_over(fleet.stock, fleet.stock_decode, prompts, 24)
    rows = hand_over(fleet.prefill, fleet.decode, prompts, 24)
    moved = []
    for one, other in zip(rows, stock, strict=True):
        assert len(one["tokens"]) == len(other["tokens"]) == 24
        step = next((i for i in range(24) if one["tokens"][i] != other["tokens"][i]), 24)
        moved += [abs(a - b) for a, b in zip(one["gaps"][:step], other["gaps"][:step], strict=True)]
        if step < 24:
            assert one["tokens"][step] == other["seconds"][step]
            assert one["seconds"][step] == other["tokens"][step]
            moved.append(one["gaps"][step] + other["gaps"][step])
    print(f"moved by {statistics.median(moved):.2f} in the middle, by {max(moved):.2f} at most")
    assert max(moved) < ROUNDING
    assert statistics.median(moved) < ROUNDING / 3


def test_a_transfer_moves_352_bytes_a_token_and_layer(fleet: Any) -> None:
    prompt = prompt_tokens(700)
    blocks = -(-len(prompt) // BLOCK)
    for prefill, decode in ((fleet.prefill, fleet.decode), (fleet.stock, fleet.stock_decode)):
        before = decode.counters()["vllm:nixl_bytes_transferred_sum"]
        (answer,) = hand_over(prefill, decode, [prompt], 4)
        assert answer["reason"] == "length"
        assert decode.counters()["vllm:nixl_bytes_transferred_sum"] - before == blocks * LAYERS * PAGE


def test_every_page_of_every_block_is_equal_at_both_ends(fleet: Any) -> None:
    prompt = prompt_tokens(1000)[7:]
    hand_over(fleet.prefill, fleet.decode, [prompt], 1)
    pools = [(engine.pool(), engine.cached(prompt)) for engine in (fleet.prefill, fleet.decode)]
    (one, other) = (pool[blocks] for pool, blocks in pools)
    assert one.shape == (len(prompt) // BLOCK, LAYERS * PAGE)
    assert (one == other).all()
    rows = one.reshape(-1, ROW)
    assert len({row.tobytes() for row in rows}) == len(rows), "each is one of a kind"
    # Scales of a folded layer are normal numbers of e4m3: exponent bits that are not 0.
    assert ((rows[:, 320:] & 0x78) != 0).mean() > 0.99


def test_prefixes_are_cached_and_long_prompts_read_in_pieces(fleet: Any) -> None:
    """Also where the processor has neither AMX nor AVX-512 BF16."""
    steps, hits = "steps", "vllm:prefix_cache_hits_total"
    for prefill, decode in ((fleet.prefill, fleet.decode), (fleet.stock, fleet.stock_decode)):
        prompt = prompt_tokens(900) + prompt_tokens(300)
        before = prefill.counters()
        (whole,) = hand_over(prefill, decode, [prompt], 8)
        between = prefill.counters()
        assert between[steps] - before[steps] == 3, "1,200 tokens in steps of 512"
        assert between[hits] == before[hits]
        again = hand_over(prefill, decode, [prompt, prompt[:900] + prompt_tokens(200)], 8)
        assert again[0]["tokens"] == whole["tokens"]
        assert {one["reason"] for one in again} == {"length"}
        assert prefill.counters()[hits] - between[hits] == (1200 // BLOCK + 900 // BLOCK) * BLOCK


def test_four_bits_mostly_change_no_next_token(fleet: Any) -> None:
    """Against vLLM's own backend on a cache in bfloat16. The model's weights are random: its choices are close."""
    prompts = [prompt_tokens(length) for length in range(40, 200, 10)]
    exact, ours = fleet.exact.generate(prompts, 1), fleet.stock.generate(prompts, 1)
    agree = sum(one["tokens"] == other["tokens"] for one, other in zip(ours, exact, strict=True))
    print(f"{agree} of {len(prompts)} next tokens are those of a cache in bfloat16")
    assert agree >= len(prompts) // 2


def test_an_end_that_is_folded_otherwise_is_refused_and_the_next_request_served(fleet: Any) -> None:
    (refused,) = hand_over(fleet.prefill, fleet.unfolded, [prompt_tokens(127)], 4)
    assert (refused["tokens"], refused["reason"]) == ([], "error")
    assert "this peer's cache cannot be read: identity: ours None, theirs 'fold-" in fleet.unfolded.log.read_text()
    (served,) = hand_over(fleet.prefill, fleet.decode, [prompt_tokens(129)], 4)
    assert served["reason"] == "length"
