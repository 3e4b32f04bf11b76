# SPDX-License-Identifier: Apache-2.0
"""vllm-blhnc-layout on the real stack: one descriptor for a run of blocks, the answers of the stock layout."""

from __future__ import annotations

import copy
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from serving_stack.model import prompt_tokens
from serving_stack.state import free_ports
from support.engines import handshake
from support.stack import Stack, until
from vllm_blhnc_layout import _rows

ROOT = Path(__file__).parents[2]
LAYERS = ("layers.0", "layers.1", "layers.2")


def pool(blocks: int, pages: list[int], padding: int = 0) -> dict[str, torch.Tensor]:
    """Lay out a pool of block rows: layer -> its view, pages of these many bytes."""
    stride = sum(pages) + padding
    raw = torch.zeros(blocks * stride, dtype=torch.int8)
    offsets = itertools.accumulate([0, *pages[:-1]])
    return {
        layer: raw.as_strided((blocks, page), (stride, 1), offset)
        for layer, page, offset in zip(LAYERS, pages, offsets, strict=False)
    }


@pytest.mark.parametrize(("pages", "padding"), [([64, 64, 64], 0), ([64, 132, 64], 12)])
def test_rows_are_found_and_seen_without_a_copy(pages: list[int], padding: int) -> None:
    caches = pool(5, pages, padding)
    rows = _rows.find(dict(reversed(list(caches.items()))), 5)
    assert (rows.blocks, rows.stride, rows.payload) == (5, sum(pages) + padding, sum(pages))
    assert [page[0] for page in rows.pages] == list(LAYERS)
    assert [page[2] for page in rows.pages] == pages
    view = _rows.view(caches, rows)
    assert (tuple(view.shape), view.element_size()) == ((5, 1, 1, rows.stride), 1)
    for number, (layer, offset, page) in enumerate(rows.pages, 1):
        caches[layer].fill_(number)
        assert view[:, 0, 0, offset : offset + page].unique().tolist() == [number]


def _separate() -> dict[str, torch.Tensor]:
    return {layer: torch.zeros(5, 64, dtype=torch.int8) for layer in LAYERS}


def _overlapping() -> dict[str, torch.Tensor]:
    caches = pool(5, [64, 64, 64])
    return {**caches, "layers.1": caches["layers.0"][:, :]}


def _by_layer() -> dict[str, torch.Tensor]:
    raw = torch.zeros(3, 5, 64, dtype=torch.int8)
    return dict(zip(LAYERS, raw, strict=True))


@pytest.mark.parametrize(
    ("caches", "blocks", "said"),
    [
        (_separate(), 5, "in 3 allocations"),
        (_overlapping(), 5, "layers.1 begins at byte 0 of the row"),
        (_by_layer(), 5, "bytes apart"),
        (pool(5, [64, 64, 64]), 6, "layers.0 has 5 blocks, the pool 6"),
        ({}, 5, "no caches"),
        ({layer: cache[:, ::2] for layer, cache in pool(5, [64, 64, 64]).items()}, 5, "not contiguous"),
    ],
)
def test_what_forms_no_rows_is_named(caches: dict[str, torch.Tensor], blocks: int, said: str) -> None:
    with pytest.raises(_rows.NoRows, match=said):
        _rows.find(caches, blocks)


def test_pools_of_two_page_widths_move_byte_for_byte_by_their_runs() -> None:
    """vLLM's planner and allocator, two workers of ours, real NIXL: pools of a sparse model, which no CPU serves."""
    script = Path(__file__).with_name("rows_worker.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for step, padding in ((1, 240), (32, 16640)):
        # Whole rows in one region, a whole number of steps apart, with what the planner pads them by.
        assert found.pop(f"row, {step}") == [True, 0, padding, 1]
        for order, runs in (("run", 1), ("descending", 1), ("shuffled", 10)):
            told = found.pop(f"{order}, {step}")
            assert told == {"moved": True, "others": True, "descriptors": runs, "runs": runs}, order
    assert found.pop("refused") == "this peer's cache cannot be read: stride: ours 335872, theirs 319472"
    assert not found


def test_another_row_is_refused_though_vllms_own_comparison_is_off() -> None:
    """`enforce_handshake_compat: false` is what vLLM itself advises where two ends differ."""
    from vllm_blhnc_layout._identity import Agreement, IncompatiblePeer
    from vllm_blhnc_layout.pull import RowPullWorker

    def told(**changes: Any) -> list[list[str]]:
        facts = {"form": "rows", "stride": 192, "pages": [["layers.0", 0, 96], ["layers.1", 96, 96]]}
        return [[Agreement.of("hash", {**facts, **changes}).facts]]

    worker = object.__new__(RowPullWorker)
    worker._facts = told()
    for peer, said in (
        (told(pages=[["layers.1", 0, 96], ["layers.0", 96, 96]]), r"pages, from item 0: ours \['layers.0', 0, 96\]"),
        (told(stride=256), "stride: ours 192, theirs 256"),
        ([["layers.0"], ["layers.1"]], "the peer moves pages of layers"),
        ([], "the peer moves pages of layers"),
    ):
        with pytest.raises(IncompatiblePeer, match=said):
            worker._validate_remote_agent_handshake(SimpleNamespace(region_members=peer), 1)
    # An equal one goes on to vLLM's own checks, which want a worker that was made whole.
    with pytest.raises(AttributeError):
        worker._validate_remote_agent_handshake(SimpleNamespace(region_members=told(), engine_id="e"), 1)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"max_descriptor_bytes": 0}, "max_descriptor_bytes 0"),
        ({"max_descriptor_bytes": "1MB"}, "max_descriptor_bytes '1MB'"),
        ({"max_descriptor_bytes": True}, "max_descriptor_bytes True"),
        ({"weights_identity": ["x"]}, r"weights_identity \['x'\]"),
        ({"weights_identity": ""}, "weights_identity ''"),
    ],
)
def test_bad_options_are_named(monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], said: str) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

    from vllm_blhnc_layout import pull

    monkeypatch.setattr(NixlPullConnectorWorker, "__init__", lambda self, *args: None)
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
    with pytest.raises(ValueError, match=said):
        pull.RowPullWorker(config, "engine", None)


#: The domain of Dynamo's topology-aware KV transfer that says in which form a worker's KV moves.
DOMAIN = "kv-form"
OURS = "vllm_blhnc_layout.pull"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, stack: Stack) -> Iterator[Stack]:
    """Half an upgrade of the CPU profile: two workers on block rows, two that still move pages of layers.

    `prefill` and `decode` have this connector, beside Mooncake's at the prefill end, and choose their own layout.
    `old-prefill` is stock, `old-decode` has this connector with `fallback: per-layer`. Each two are a transfer group.
    """
    folder = tmp_path_factory.mktemp("rows")
    profile = yaml.safe_load((resources.files("serving_stack") / "profiles" / "cpu.yaml").read_text())
    workers = profile["components"]
    for role in ("prefill", "decode"):
        workers[f"old-{role}"] = copy.deepcopy(workers[role])
    old = workers["old-decode"]["args"]["kv-transfer-config"]
    old.update(kv_connector_module_path=OURS, kv_connector_extra_config={"fallback": "per-layer"})
    workers["decode"]["args"]["kv-transfer-config"]["kv_connector_module_path"] = OURS
    tier = profile["mooncake"]["components"]["prefill"]["args"]
    tier["kv-transfer-config"]["kv_connector_extra_config"]["connectors"][0]["kv_connector_module_path"] = OURS
    # Small pools, so that blocks are recycled.
    workers["decode"]["args"]["num-gpu-blocks-override"] = 288
    tier["num-gpu-blocks-override"] = 320
    for group, members in {"rows": ("prefill", "decode"), "layers": ("old-prefill", "old-decode")}.items():
        (folder / group).mkdir()
        (folder / group / DOMAIN).write_text(group)
        for member in members:
            workers[member]["environment"] = {
                **workers[member]["environment"],
                "DYN_TOPOLOGY_ENABLED": "true",
                "DYN_TOPOLOGY_MOUNT_PATH": str(folder / group),
                "DYN_KV_TRANSFER_DOMAIN": DOMAIN,
                "DYN_KV_TRANSFER_ENFORCEMENT": "required",
            }
    (folder / "rows.yaml").write_text(yaml.safe_dump(profile, sort_keys=False))
    one = Stack(folder, free_ports(1, above=stack.port + 200)[0], str(folder / "rows.yaml"))
    try:
        one.up()
        yield one
    finally:
        one.command("down", check=False)


def moved(stack: Stack) -> tuple[float, ...]:
    """Return what the decode worker has counted: transfers, descriptors, bytes, pairs, runs, padding."""
    names = ("num_descriptors_count", "num_descriptors_sum", "bytes_transferred_sum")
    ours = ("pairs_total", "runs_total", "padding_bytes_total")
    return tuple(stack.metric("decode", f"vllm:nixl_{name}") for name in (*names, *ours))


@pytest.mark.engines
@pytest.mark.parametrize("length", [1, 33, 129, 1000, 6000])
def test_a_transfer_takes_as_many_descriptors_as_runs_and_answers_the_same(
    rows: Stack, stack: Stack, length: int
) -> None:
    prompt = prompt_tokens(length)
    before = moved(rows)
    answer = rows.complete(prompt, prefill="prefill")["nvext"]["completion_token_ids"]
    until(lambda: moved(rows)[0] > before[0] and moved(rows)[3] > before[3], 20, "the transfer is counted")
    transfers, descriptors, size, pairs, runs, padding = (
        after - was for after, was in zip(moved(rows), before, strict=True)
    )
    blocks = -(-length // 32)
    assert (transfers, pairs, padding) == (1, blocks, 0)
    assert descriptors == runs <= blocks
    assert size == blocks * 32 * 576 * 2 * 4
    assert answer == stack.complete(prompt)["nvext"]["completion_token_ids"]


@pytest.mark.engines
def test_the_grafana_dashboard_asks_for_what_a_worker_counts(rows: Stack) -> None:
    board = json.loads((ROOT / "packages/vllm-blhnc-layout/grafana/block-rows.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = set(re.findall(r"vllm:\w+", " ".join(queries)))
    assert {"vllm:nixl_pairs_total", "vllm:nixl_runs_total", "vllm:nixl_padding_bytes_total"} < asked
    counted = set(re.findall(r"^(vllm:\w+)", rows.metrics("decode"), re.MULTILINE))
    assert asked <= counted


@pytest.mark.engines
def test_the_layout_is_chosen_and_the_rows_are_named_in_the_log(rows: Stack) -> None:
    for worker in ("prefill", "decode"):
        text = (rows.run.logs / f"{worker}.log").read_text()
        assert re.search(r"KV cache layout: BLHNC \(attention backend \w+_MLA\)", text)
        assert "KV moves by block rows" in text


@pytest.mark.engines
def test_a_stock_peer_is_refused_by_what_differs(rows: Stack) -> None:
    """The handshake of a real stock worker, over the wire, compared with that of a real worker of ours."""
    from vllm_blhnc_layout._identity import differences

    ours, beside, theirs, old = (
        str(handshake(rows.state.components[name].ports["nixl_port"]).compatibility_hash)
        for name in ("prefill", "decode", "old-prefill", "old-decode")
    )
    assert ours == beside
    assert old == theirs
    assert differences(ours, theirs) == ["the peer moves pages of layers, the other moves rows of blocks"]


@pytest.mark.engines
def test_half_an_upgrade_serves_and_pairs_only_workers_that_can_talk(rows: Stack, stack: Stack) -> None:
    names = {str(component.instance): name for name, component in rows.state.components.items()}
    pairs = set()
    for number in range(8):
        prompt = prompt_tokens(300 + number)
        answer = rows.complete(prompt, 4)["nvext"]
        pairs.add(tuple(names[str(answer["worker_id"][f"{role}_worker_id"])] for role in ("prefill", "decode")))
    assert pairs <= {("prefill", "decode"), ("old-prefill", "old-decode")}
    # Told where to begin, a request goes on in the group of that worker.
    for first, then in (("prefill", "decode"), ("old-prefill", "old-decode")):
        for length in (32, 128, 1000):
            answer = rows.complete(prompt_tokens(length), prefill=first)["nvext"]
            assert names[str(answer["worker_id"]["decode_worker_id"])] == then
            assert (
                answer["completion_token_ids"] == stack.complete(prompt_tokens(length))["nvext"]["completion_token_ids"]
            )
    assert rows.metric("old-decode", "vllm:nixl_padding_bytes_total") == 0
