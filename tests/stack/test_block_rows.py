# SPDX-License-Identifier: Apache-2.0
"""vllm-blhnc-layout on the real stack: one descriptor for a run of blocks, the answers of the stock layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from importlib import resources
from typing import Any

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


def test_a_stock_peer_is_refused_by_what_differs(rows: Stack, stack: Stack) -> None:
    """The handshake of a real stock worker, answered over the wire, compared with that of a real worker of ours."""
    import msgspec
    import zmq
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload

    from vllm_blhnc_layout._identity import differences

    def handshake(one: Stack) -> str:
        port = one.state.components["prefill"].ports["nixl_port"]
        with zmq.Context() as context, context.socket(zmq.REQ) as socket:
            socket.setsockopt(zmq.RCVTIMEO, 20_000)
            socket.connect(f"tcp://127.0.0.1:{port}")
            socket.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 0)))
            frames = socket.recv_multipart()
        payload = msgspec.msgpack.decode(frames[0], type=NixlHandshakePayload)
        return str(payload.compatibility_hash)

    ours, theirs = handshake(rows), handshake(stack)
    assert differences(ours, ours) == []
    assert differences(ours, theirs) == ["the peer moves pages of layers, the other moves rows of blocks"]
