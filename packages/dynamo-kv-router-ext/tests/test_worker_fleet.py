# SPDX-License-Identifier: Apache-2.0
"""Workers as discovery tells of them: when one joins, changes and leaves, which ranks it has, what its cache holds.

Discovery is made up here (`FakeDynamo`), so that each moment can be looked at; `tests/stack/test_router_live.py` has a
real one.
"""

from __future__ import annotations

import array
import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

import pytest

from dynamo_kv_router_ext import Seat, Worker
from dynamo_kv_router_ext._errors import Refused
from dynamo_kv_router_ext._pool import Fleet


class FakeEndpoint:
    """An endpoint whose workers and cards the test writes down."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.living: list[int] = []
        self.cards: dict[str, str] = {}
        self.sent: list[tuple[int, dict[str, Any]]] = []
        #: (worker, rank, device, host, disk) as its live index has them, and the prompts that it was asked for.
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.prompts: list[Any] = []
        self.indexed_in: int | None = None
        self.index_error: Exception | None = None

    async def client(self) -> FakeEndpoint:
        return self

    def instance_ids(self) -> list[int]:
        return list(self.living)

    async def direct(self, request: dict[str, Any], worker: int, annotated: bool, context: Any) -> AsyncIterator[Any]:
        self.sent.append((worker, request))

        async def stream() -> AsyncIterator[Any]:
            yield context

        return stream()

    def join(self, worker: int, **fields: Any) -> None:
        self.living.append(worker)
        self.tell(worker, **fields)

    def tell(self, worker: int, **fields: Any) -> None:
        names = {"display_name", "kv_cache_block_size", "worker_type", "model_type", "lora"}
        told = {"display_name": "m", "kv_cache_block_size": 16, "worker_type": "aggregated", "model_type": "Chat"}
        told |= {name: value for name, value in fields.items() if name in names}
        runtime = {name: value for name, value in fields.items() if name not in names}
        self.cards[str(worker)] = json.dumps({**told, "runtime_config": runtime})


class FakeDynamo:
    """Stands for `dynamo.llm` and the runtime."""

    def __init__(self) -> None:
        self.endpoints: dict[str, FakeEndpoint] = {}

    def endpoint(self, path: str) -> FakeEndpoint:
        return self.endpoints.setdefault(path, FakeEndpoint(path))


class FakeCards:
    def __init__(self, endpoint: FakeEndpoint) -> None:
        self._endpoint = endpoint

    def start_tracking(self) -> None:
        pass

    def get_model_cards(self) -> dict[str, str]:
        return dict(self._endpoint.cards)

    def shutdown(self) -> None:
        pass


class FakeIndex:
    def __init__(self, endpoint: FakeEndpoint, block_size: int, kv_router_config: object) -> None:
        if endpoint.index_error is not None:
            raise endpoint.index_error
        self._endpoint = endpoint
        endpoint.indexed_in = block_size

    async def get_overlap_scores(self, tokens: Any, lora_name: str | None, include_shared: bool) -> dict[str, Any]:
        self._endpoint.prompts.append((tokens, lora_name))
        names = ("worker_id", "dp_rank", "device_blocks", "host_pinned_extension_blocks", "disk_extension_blocks")
        return {"workers": [dict(zip(names, row, strict=True)) for row in self._endpoint.rows]}


class FakeRouter:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.workers: dict[Any, Worker] = {}
        self.said: list[str] = []

    def add_worker(self, worker: Worker) -> None:
        assert worker.id not in self.workers
        self.workers[worker.id] = worker
        self.said.append(f"+{worker.id}")

    def remove_worker(self, worker: Any) -> None:
        del self.workers[worker]
        self.said.append(f"-{worker}")


@pytest.fixture
def dynamo(monkeypatch: pytest.MonkeyPatch) -> FakeDynamo:
    llm = ModuleType("dynamo.llm")
    llm.__dict__.update(FpmEventSubscriber=FakeCards, KvRouter=FakeIndex, KvRouterConfig=dict)
    package = ModuleType("dynamo")
    package.__dict__.update(llm=llm)
    monkeypatch.setitem(sys.modules, "dynamo", package)
    monkeypatch.setitem(sys.modules, "dynamo.llm", llm)
    return FakeDynamo()


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


def opened(dynamo: FakeDynamo, router: FakeRouter, *paths: str) -> tuple[Fleet, list[FakeEndpoint]]:
    fleet = Fleet(dynamo, paths or ("pool.backend.generate",))
    asyncio.run(fleet.open())
    fleet.attach(router)
    return fleet, [dynamo.endpoint(path) for path in paths or ("pool.backend.generate",)]


def test_a_worker_is_used_from_its_card_on_and_until_it_leaves(dynamo: FakeDynamo, router: FakeRouter) -> None:
    fleet, (endpoint,) = opened(dynamo, router)
    endpoint.living = [7, 8]
    fleet.poll()
    assert (router.said, fleet.first) == ([], None)
    endpoint.tell(7)
    fleet.poll()
    assert router.said == ["+7"]
    endpoint.tell(8)
    fleet.poll()
    endpoint.living.remove(7)
    fleet.poll()
    assert router.said == ["+7", "+8", "-7"]
    # Its card may stay a while, and it may come back.
    fleet.poll()
    endpoint.living.append(7)
    fleet.poll()
    assert router.said == ["+7", "+8", "-7", "+7"]


def test_workers_that_were_there_before_the_router_are_told_to_it(dynamo: FakeDynamo, router: FakeRouter) -> None:
    fleet, (endpoint,) = opened(dynamo, FakeRouter())
    endpoint.join(7)
    fleet.poll()
    assert fleet.block_size == 16
    fleet.attach(router)
    assert router.said == ["+7"]


def test_a_card_that_changes(dynamo: FakeDynamo, router: FakeRouter, caplog: pytest.LogCaptureFixture) -> None:
    fleet, (endpoint,) = opened(dynamo, router)
    endpoint.join(7, max_num_seqs=8)
    fleet.poll()
    endpoint.tell(7, max_num_seqs=8, taints=["a"])  # nothing that matters here
    fleet.poll()
    assert router.said == ["+7"]
    endpoint.tell(7, max_num_seqs=4)
    fleet.poll()
    assert router.said == ["+7", "-7", "+7"]
    assert router.workers[7].max_sequences == 4
    endpoint.tell(7, lora={"name": "x"}, display_name="x")  # an adapter's card hides its worker's
    fleet.poll()
    assert router.workers[7].max_sequences == 4
    endpoint.tell(7, display_name="other")
    for _ in range(3):
        fleet.poll()
    assert router.workers == {}
    assert caplog.text.count("worker 7 of pool.backend.generate is not used: its display_name is 'other'") == 1
    endpoint.tell(7)
    fleet.poll()
    assert 7 in router.workers


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"display_name": "n"}, "its display_name is 'n', the fleet's 'm'"),
        ({"kv_cache_block_size": 64}, "its kv_cache_block_size is 64, the fleet's 16"),
        ({"worker_type": "encode"}, "worker_type 'encode' is none of"),
        ({"data_parallel_size": 0}, "ranks must be"),
    ],
)
def test_a_worker_that_does_not_fit_is_refused_and_said_once(
    dynamo: FakeDynamo, router: FakeRouter, fields: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    fleet, (endpoint,) = opened(dynamo, router)
    endpoint.join(1)
    fleet.poll()
    endpoint.join(2, **fields)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            fleet.poll()
    assert list(router.workers) == [1]
    assert [record.getMessage() for record in caplog.records if why in record.getMessage()] == [
        caplog.records[0].getMessage()
    ]


def test_what_a_fleet_can_do(dynamo: FakeDynamo, router: FakeRouter) -> None:
    fleet, (prefill, backend) = opened(dynamo, router, "pool.prefill.generate", "pool.backend.generate")
    assert (fleet.complete, fleet.generates, fleet.offer()) == (False, False, None)
    prefill.join(1, worker_type="prefill", model_type="")
    fleet.poll()
    assert (fleet.complete, fleet.generates, fleet.offer()) == (False, False, None)
    backend.join(2, worker_type="decode")
    fleet.poll()
    assert (fleet.split, fleet.complete, fleet.generates) == (True, True, True)
    offered = fleet.offer()
    assert offered is not None
    assert (offered[0].surface, json.loads(offered[1])["worker_type"]) == (("Chat",), "decode")
    prefill.living.clear()
    fleet.poll()
    assert (fleet.split, fleet.complete, fleet.generates) == (True, False, True)
    backend.living.clear()
    backend.join(3)
    fleet.poll()
    assert (fleet.split, fleet.complete, fleet.generates) == (False, True, True)


def test_ranks_are_counted_from_the_workers_own_first(dynamo: FakeDynamo, router: FakeRouter) -> None:
    fleet, (endpoint,) = opened(dynamo, router)
    ranks = {"data_parallel_start_rank": 2, "data_parallel_size": 2, "kv_event_publishing_enabled": True}
    endpoint.join(7, **ranks)
    endpoint.join(8)
    fleet.poll()
    assert (router.workers[7].ranks, router.workers[8].ranks, endpoint.indexed_in) == (2, 1, 16)
    endpoint.rows = [(7, 2, 4, 0, 0), (7, 3, 1, 2, 3), (8, 0, 0, 0, 0), (9, 0, 5, 0, 0)]

    async def ask() -> dict[Seat, tuple[int, int, int, int]]:
        for worker, rank, routing in ((7, 1, {"lora_name": "x"}), (8, 0, None)):
            stream = await fleet.send(worker, rank, {"routing": routing}, "context")
            assert [chunk async for chunk in stream] == ["context"]
        with pytest.raises(Refused, match="worker 9 has left"):
            await fleet.send(9, 0, {}, None)
        return await fleet.cached(array.array("i", [1, 2, 300_000]).tobytes(), "x", "both")

    assert asyncio.run(ask()) == {Seat(7, 0): (4, 0, 0, 0), Seat(7, 1): (1, 2, 3, 0)}
    assert endpoint.sent == [(7, {"routing": {"lora_name": "x", "dp_rank": 3}}), (8, {"routing": {"dp_rank": 0}})]
    assert endpoint.prompts == [([1, 2, 300_000], "x")]


def test_only_caches_that_are_told_of_are_asked(dynamo: FakeDynamo, router: FakeRouter) -> None:
    fleet, (prefill, backend) = opened(dynamo, router, "pool.prefill.generate", "pool.backend.generate")
    prefill.join(1, worker_type="prefill", kv_event_publishing_enabled=True)
    backend.join(2, worker_type="decode", kv_event_publishing_enabled=False)
    fleet.poll()
    assert (prefill.indexed_in, backend.indexed_in) == (16, None)
    prefill.rows = [(1, 0, 3, 0, 0)]
    assert asyncio.run(fleet.cached([1, 2], None, "prefill")) == {Seat(1, 0): (3, 0, 0, 0)}
    assert asyncio.run(fleet.cached([1, 2], None, "decode")) == {}
    assert prefill.prompts == [([1, 2], None)]


def test_a_bootstrap_server_is_known_where_there_is_one(dynamo: FakeDynamo, router: FakeRouter) -> None:
    fleet, (endpoint,) = opened(dynamo, router)
    endpoint.join(1, disaggregated_endpoint={"bootstrap_host": "h", "bootstrap_port": 5})
    endpoint.join(2, disaggregated_endpoint={"bootstrap_host": None, "bootstrap_port": None})
    endpoint.join(3)
    fleet.poll()
    assert [fleet.bootstrap(worker) for worker in (1, 2, 3, 4)] == [("h", 5), None, None, None]


def test_a_worker_is_used_also_where_its_cache_cannot_be_followed(
    dynamo: FakeDynamo, router: FakeRouter, caplog: pytest.LogCaptureFixture
) -> None:
    fleet, (endpoint,) = opened(dynamo, router)
    endpoint.index_error = RuntimeError("Too many open files")
    endpoint.join(1, kv_event_publishing_enabled=True)
    for _ in range(3):
        fleet.poll()
    assert list(router.workers) == [1]
    assert caplog.text.count("Too many open files") == 1
    assert asyncio.run(fleet.cached([1, 2], None, "both")) == {}
    endpoint.index_error = None
    endpoint.join(2, kv_event_publishing_enabled=True)
    fleet.poll()
    assert endpoint.indexed_in == 16
