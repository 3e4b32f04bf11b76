# SPDX-License-Identifier: Apache-2.0
"""The three counters of `vllm_blhnc_layout`, from NIXL's handles to `/metrics`: vLLM's own classes, no engine.

On their way: a worker's connector, alone or within a MultiConnector, which rebuilds a child's statistics by the name of
its class; pickle to the engine core; the sum over workers; msgpack to the API server; its log and its metrics.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from vllm_blhnc_layout import pull, push
from vllm_blhnc_layout._connector import Poster
from vllm_blhnc_layout._stats import COUNTS, RowStats

OURS = {"kv_connector": "NixlConnector", "kv_connector_module_path": "vllm_blhnc_layout.pull", "kv_role": "kv_both"}
PUSH = {**OURS, "kv_connector_module_path": "vllm_blhnc_layout.push"}
TIER = {
    "kv_connector": "MooncakeStoreConnector",
    "kv_connector_module_path": "serving_stack.mooncake_store",
    "kv_role": "kv_both",
}


class Agent:
    """NIXL's agent as far as a transfer's life goes: its state is the one given when it was made."""

    def __init__(self) -> None:
        self.held: dict[Any, str] = {}
        self.released = True

    def make_prepped_xfer(self, operation: str, *sides: Any, notif_msg: str) -> Any:
        handle = object()
        self.held[handle] = notif_msg
        return handle

    def check_xfer_state(self, handle: Any) -> str:
        return self.held[handle]

    def get_xfer_telemetry(self, handle: Any) -> Any:
        return SimpleNamespace(xferDuration=4, postDuration=2, totalBytes=1000, descCount=1)

    def release_xfer_handle(self, handle: Any) -> None:
        if not self.released:
            raise RuntimeError("still moving")
        del self.held[handle]


def worker(kind: Any = pull.RowPullWorker, padding: int = 7) -> Any:
    """Make a worker without its constructor, which wants an engine."""
    made = object.__new__(kind)
    made.nixl_wrapper = Poster(Agent())
    made.nixl_wrapper.padding = padding
    made.xfer_stats = made.nixl_wrapper.stats
    made._log_failure = lambda **_: None
    made._recving_metadata = {}
    return made


def post(one: Any, local: list[int], remote: list[int], state: str = "DONE") -> dict[str, list[Any]]:
    """Post a transfer; return it as vLLM's worker holds it."""
    return {"request": [one.nixl_wrapper.make_prepped_xfer("READ", 1, local, 2, remote, notif_msg=state)]}


def connector(config: dict[str, Any], one: Any) -> Any:
    """Make a connector of the class that vLLM finds, in the worker's role, without its constructor."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.metrics import MooncakeStoreConnectorStats

    made = object.__new__(KVConnectorFactory.get_connector_class(KVTransferConfig(**config)))
    if config["kv_connector"] == "MultiConnector":
        children = config["kv_connector_extra_config"]["connectors"]
        made._connectors = [connector(child, one) for child in children]
    elif config["kv_connector"] == "MooncakeStoreConnector":
        stats = MooncakeStoreConnectorStats()
        stats.record_operation("save_put", 0.1, 3, num_bytes=5)
        made.connector_worker = MagicMock(get_kv_connector_stats=lambda: stats)
    else:
        made.connector_worker = one
    return made


def collected(workers: list[Any]) -> dict[str, Any] | None:
    """Return what the API server is told of a step of these workers' connectors."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    outputs = []
    for one in workers:
        output = KVConnectorOutput(kv_connector_stats=one.get_kv_connector_stats())
        made = ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=output)
        outputs.append(pickle.loads(pickle.dumps(made)))
    summed = KVOutputAggregator(len(workers)).aggregate(outputs).kv_connector_output.kv_connector_stats
    scheduler = MagicMock(get_request_counts=lambda: (0, 0))
    payload = Scheduler.make_stats(scheduler, kv_connector_stats=summed).kv_connector_stats
    sent = EngineCoreOutputs(scheduler_stats=SchedulerStats(kv_connector_stats=payload))
    got = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent))
    found: dict[str, Any] | None = got.scheduler_stats.kv_connector_stats
    return found


@pytest.fixture
def registry() -> Iterator[Any]:
    """Prometheus's registry, without metrics of vLLM."""
    from vllm.v1.metrics.prometheus import REGISTRY, unregister_vllm_metrics

    unregister_vllm_metrics()
    yield REGISTRY
    unregister_vllm_metrics()


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    extra = {"connectors": list(children)}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.mark.parametrize(
    "config",
    [
        *(OURS, PUSH),
        *(multi(OURS), multi(PUSH, TIER), multi(TIER, OURS), multi(multi(OURS), TIER)),
    ],
    ids=["alone", "push alone", "a child", "push beside a tier", "behind a tier", "a child of a child"],
)
def test_counters_come_from_several_workers_to_the_metrics_of_their_engine(
    config: dict[str, Any], registry: Any
) -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

    transfer = KVTransferConfig(**config)
    metrics = KVConnectorProm(
        SimpleNamespace(kv_transfer_config=transfer), ["engine"], {index: [str(index)] for index in (0, 1)}
    )
    log = KVConnectorLogging(transfer)
    kind = push.RowPushWorker if "push" in repr(config) else pull.RowPullWorker
    workers = [worker(kind), worker(kind)]
    connectors = [connector(config, one) for one in workers]
    steps = [
        # Blocks of each worker, their partners: one run, none, and two runs and one.
        ([3, 4, 5], [13, 14, 15]),
        ([], []),
        ([9, 8, 1], [19, 18, 7]),
    ]
    for blocks in steps:
        for number, one in enumerate(workers):
            if blocks[0]:
                one._pop_done_transfers(post(one, blocks[0][number:], blocks[1][number:]))
        payload = collected(connectors)
        if payload is None:
            assert not blocks[0]
            continue
        log.observe(payload)
        metrics.observe(payload, engine_idx=1)

    def sample(name: str, engine: int = 1, **labels: str) -> Any:
        return registry.get_sample_value(f"vllm:{name}", {"engine": str(engine), **labels})

    # Both workers, both steps: 3 + 2 and 3 + 2 pairs, 1 + 1 and 2 + 2 runs.
    assert [sample(f"nixl_{key}_total") for key in COUNTS] == [10, 6, 70]
    assert [sample(f"nixl_{key}_total", 0) for key in COUNTS] == [0, 0, 0]
    # vLLM's own, and the sibling's, beside them.
    assert (sample("nixl_num_descriptors_count"), sample("nixl_bytes_transferred_sum")) == (4, 4000)
    keys = sample("mooncake_store_operation_keys_total", operation="save_put", status="ok")
    assert (keys is not None) == (TIER in _flat(config))
    told: list[str] = []
    log.log(lambda text, *args: told.append(text % args))
    assert len(told) == 1
    assert "Num successful transfers" in told[0]


def _flat(config: dict[str, Any]) -> list[dict[str, Any]]:
    children = config.get("kv_connector_extra_config", {}).get("connectors", ())
    return [config, *(inner for child in children for inner in _flat(child))]


def test_a_transfer_counts_once_it_has_succeeded_and_a_failed_one_not_at_all() -> None:
    one = worker()
    under_way, failed = post(one, [1, 2], [1, 2], "PROC"), post(one, [3], [3], "ERR")
    for transfers in (under_way, failed):
        one._pop_done_transfers(transfers)
    stats = one.get_kv_connector_stats()
    assert (stats.num_successful_transfers, stats.data["num_failed_transfers"]) == (0, [1])
    assert not any(stats.data[key] for key in COUNTS)
    (handle,) = under_way["request"]
    one.nixl_wrapper.held[handle] = "DONE"
    # A handle that NIXL keeps is asked for again, and counts no second time.
    one.nixl_wrapper._agent.released = False
    one._pop_done_transfers(under_way)
    one.nixl_wrapper._agent.released = True
    one._pop_done_transfers(under_way)
    data = one.get_kv_connector_stats().data
    assert [data[key] for key in COUNTS] == [[2], [1], [14]]
    assert not one.nixl_wrapper._posted
    assert one.get_kv_connector_stats() is None


def test_pairs_alone_are_something_to_report() -> None:
    stats = RowStats()
    assert stats.is_empty()
    stats.record_pairs(3, 2, 1)
    assert not stats.is_empty()
    assert RowStats().aggregate(stats).data == stats.data
