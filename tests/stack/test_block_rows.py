# SPDX-License-Identifier: Apache-2.0
"""vllm-blhnc-layout on the real stack: one descriptor for a run of blocks, the answers of the stock layout."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml

from serving_stack.model import prompt_tokens
from serving_stack.state import free_ports
from support.stack import Stack, until
from vllm_blhnc_layout import _rows

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


def test_counters_survive_an_interval_that_ends_while_another_thread_counts() -> None:
    from vllm_blhnc_layout._stats import COUNTS, RowStats

    stats, collected, stop = RowStats(), RowStats(), threading.Event()

    def end_intervals() -> None:
        while not stop.is_set():
            collected.aggregate(stats.clone_and_reset())

    thread = threading.Thread(target=end_intervals)
    thread.start()
    for _ in range(20_000):
        stats.record_posted(3, 2, 1)
    stop.set()
    thread.join()
    assert set(COUNTS) <= set(stats.data)
    # What was posted counts though no transfer has ended; an entry in the moment of the change may be lost, not more.
    told = collected.aggregate(stats).data
    assert set(told["pairs"]) == {3}
    assert set(told["padding_bytes"]) == {1}
    assert len(told["pairs"]) > 15_000


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


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, stack: Stack) -> Iterator[Stack]:
    """The CPU profile, NIXL beside Mooncake and all, with this connector on both ends; the layout is its own choice."""
    folder = tmp_path_factory.mktemp("rows")
    profile = yaml.safe_load((resources.files("serving_stack") / "profiles" / "cpu.yaml").read_text())
    tier = profile["mooncake"]["components"]["prefill"]["args"]["kv-transfer-config"]
    nixl: list[dict[str, Any]] = [
        profile["components"]["decode"]["args"]["kv-transfer-config"],
        tier["kv_connector_extra_config"]["connectors"][0],
    ]
    for connector in nixl:
        connector["kv_connector_module_path"] = "vllm_blhnc_layout.pull"
    # Small pools, so that blocks are recycled.
    profile["components"]["decode"]["args"]["num-gpu-blocks-override"] = 288
    profile["mooncake"]["components"]["prefill"]["args"]["num-gpu-blocks-override"] = 320
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


@pytest.mark.parametrize("length", [1, 33, 129, 1000, 6000])
def test_a_transfer_takes_as_many_descriptors_as_runs_and_answers_the_same(
    rows: Stack, stack: Stack, length: int
) -> None:
    prompt = prompt_tokens(length)
    before = moved(rows)
    answer = rows.complete(prompt)["nvext"]["completion_token_ids"]
    until(lambda: moved(rows)[0] > before[0] and moved(rows)[3] > before[3], 20, "the transfer is counted")
    transfers, descriptors, size, pairs, runs, padding = (
        after - was for after, was in zip(moved(rows), before, strict=True)
    )
    blocks = -(-length // 32)
    assert (transfers, pairs, padding) == (1, blocks, 0)
    assert descriptors == runs <= blocks
    assert size == blocks * 32 * 576 * 2 * 4
    assert answer == stack.complete(prompt)["nvext"]["completion_token_ids"]


def test_the_layout_is_chosen_and_the_rows_are_named_in_the_log(rows: Stack) -> None:
    for worker in ("prefill", "decode"):
        text = (rows.run.logs / f"{worker}.log").read_text()
        assert "KV cache layout: BLHNC (attention backend AMX_MLA)" in text
        assert "KV moves by block rows" in text


def handshake(one: Stack, component: str) -> Any:
    """Ask a worker what it answers to a peer's handshake."""
    import msgspec
    import zmq
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG, NixlHandshakePayload

    port = one.state.components[component].ports["nixl_port"]
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
        frames = socket.recv_multipart()
    return msgspec.msgpack.decode(frames[0], type=NixlHandshakePayload)


def test_a_stock_peer_is_refused_by_what_differs(rows: Stack, stack: Stack) -> None:
    """The handshake of a real stock worker, over the wire, compared with that of a real worker of ours."""
    from vllm_blhnc_layout._identity import differences

    ours, theirs = (str(handshake(one, "prefill").compatibility_hash) for one in (rows, stack))
    assert differences(ours, ours) == []
    assert differences(ours, theirs) == ["the peer moves pages of layers, the other moves rows of blocks"]
    assert str(handshake(rows, "decode").compatibility_hash) == ours


def pool_of(one: Stack, component: str) -> Any:
    """Read a worker's whole pool out of its memory, as `[blocks, stride]` of bytes: the connector has no part in it."""
    import msgspec
    import numpy as np
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata

    told = msgspec.msgpack.decode(handshake(one, component).agent_metadata_bytes, type=NixlAgentMetadata)
    (base,), (stride,) = told.kv_caches_base_addr, told.block_strides
    leader = psutil.Process(one.state.components[component].pid)
    (worker,) = (child for child in leader.children(recursive=True) if "Worker" in " ".join(child.cmdline()))
    with open(f"/proc/{worker.pid}/mem", "rb", buffering=0) as memory:
        memory.seek(base)
        content = memory.read(told.num_blocks * stride)
    return np.frombuffer(content, dtype=np.uint8).reshape(told.num_blocks, stride)


def test_every_layer_of_every_block_is_equal_at_both_ends(rows: Stack) -> None:
    prompt = prompt_tokens(1000)[5:]
    before = {component: pool_of(rows, component) for component in ("prefill", "decode")}
    rows.complete(prompt, max_tokens=1)
    written = {}
    for component, old in before.items():
        new = pool_of(rows, component)
        changed = (new != old).any(axis=1).nonzero()[0]
        written[component] = {new[block].tobytes() for block in changed}
    full = len(prompt) // 32
    assert full <= len(written["prefill"]) <= full + 1
    # The last block is not full, and the decode worker goes on in it.
    both = written["prefill"] & written["decode"]
    assert len(both) >= full
    pages = 4
    for row in both:
        quarter = len(row) // pages
        assert len({row[at : at + quarter] for at in range(0, len(row), quarter)}) == pages, "layers hold the same"


def test_fifty_prompts_of_mixed_length_and_shared_prefixes_answer_the_same(rows: Stack, stack: Stack) -> None:
    draw = random.Random(4)
    prompts: list[list[int]] = []
    for number in range(50):
        if prompts and number % 2:
            prompts.append(draw.choice(prompts) + prompt_tokens(draw.randrange(1, 90)))
        else:
            prompts.append(prompt_tokens(draw.randrange(1, 500)))
    cached = rows.sources("prefill")["local_cache_hit"]
    with ThreadPoolExecutor(2) as both:
        for prompt in prompts:
            asked = [both.submit(one.complete, prompt, 8) for one in (rows, stack)]
            ours, theirs = (answer.result()["nvext"]["completion_token_ids"] for answer in asked)
            assert ours == theirs, f"{len(prompt)} tokens"
    assert rows.sources("prefill")["local_cache_hit"] > cached
