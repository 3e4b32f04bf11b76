# SPDX-License-Identifier: Apache-2.0
"""Workers of vllm-blhnc-layout without an engine or a model, on pools that vLLM's planner lays out, over real NIXL.

    prefill = Rank("pull", plan(caches, 64, 40), nixl_agent, "prefill")
    decode = Rank("pull", plan(caches, 64, 24), nixl_agent, "decode")
    with Exchange([prefill], [decode]) as exchange:
        exchange.move(local=[1, 2, 3], remote=[30, 31, 32])

The workers are made by their own constructor, register by their own `register_kv_caches`, meet in vLLM's own handshake,
over its own listener, and are driven as vLLM's model runner drives them. Standing in for an engine are a configuration
whose model is a name, layers that know their attention backend, and the rank within the tensor-parallel group.

To be imported where vLLM and NIXL are, in a process that leaves by `leave`: NIXL 1.4.1 crashes when an interpreter
with an agent ends.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace, TracebackType
from typing import Any, NoReturn
from unittest import mock

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import vllm.v1.core.kv_cache_utils as planner
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, NixlConnectorMetadata
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from support.processes import free_port
from vllm_blhnc_layout.pull import RowPullWorker
from vllm_blhnc_layout.push import RowPushWorker

__all__ = ["ENVIRONMENT", "Cache", "Exchange", "Plan", "Rank", "Refused", "Stuck", "leave", "plan"]

#: To be set before NIXL makes an agent: transfers over TCP, on this machine.
ENVIRONMENT = {
    "UCX_TLS": "tcp",
    "UCX_NET_DEVICES": "lo",
    "NIXL_PROGRESS_THREAD_DELAY_US": "10000",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
LAYOUT = KVCacheLayout.BLHNC
WORKERS = {"pull": RowPullWorker, "push": RowPushWorker}
HOST = "127.0.0.1"
#: Of requests: what a peer says of one may still come when its exchange is over.
_NUMBERS = itertools.count(1)
#: A transfer between two agents of one process takes milliseconds.
PATIENCE = 10

Bytes = npt.NDArray[np.uint8]


def leave() -> NoReturn:
    """End this process without a farewell."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@dataclass(frozen=True)
class Cache:
    """One layer's cache, of a latent or of an indexer's keys."""

    name: str
    width: int  #: of a token, bytes
    align: int | None = None  #: blocks have to be a multiple of so many bytes apart
    halves: bool = False  #: of 16-bit elements
    indexer: bool = False

    def specification(self, block_size: int) -> Any:
        """Return it as vLLM's planner wants it."""
        role = {"cache_role": SparseCacheRole.INDEXER} if self.indexer else {}
        return MLAAttentionSpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=self.width // (2 if self.halves else 1),
            dtype=torch.bfloat16 if self.halves else torch.uint8,
            block_stride_alignment=self.align,
            **role,
        )


class _Layer(AttentionLayerBase):  # type: ignore[misc]  # no vLLM where types are checked
    """A layer, as far as vLLM asks one about its cache."""

    def __init__(self, specification: Any) -> None:
        self.specification = specification

    def get_attn_backend(self) -> Any:
        """Return a backend of any block size from 16 up, and any step between blocks."""
        return TritonMLABackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """Return the layer's own."""
        return self.specification


@cache
def _bare() -> Any:
    return VllmConfig()


@dataclass(frozen=True)
class Plan:
    """What vLLM's planner makes of the caches."""

    config: Any
    cache_config: Any
    block_size: int

    @property
    def stride(self) -> int:
        """From one block to the next, bytes."""
        (stride,) = {tensor.block_stride for tensor in self.cache_config.kv_cache_tensors}
        return int(stride)


def plan(caches: Iterable[Cache], block_size: int, blocks: int) -> Plan:
    """Have vLLM lay out a pool of so many blocks, under BLHNC, for caches in this order."""
    specifications = {cache.name: cache.specification(block_size) for cache in caches}
    config = copy.copy(_bare())
    for part in ("cache_config", "compilation_config", "parallel_config"):
        setattr(config, part, copy.copy(getattr(config, part)))
    config.cache_config.block_size = block_size
    config.cache_config.kv_cache_layout = LAYOUT.name
    config.cache_config.num_gpu_blocks_override = blocks
    config.compilation_config.static_forward_context = {
        name: _Layer(specification) for name, specification in specifications.items()
    }
    config.model_config = SimpleNamespace(
        model="a-sparse-model",
        revision=None,
        dtype=torch.bfloat16,
        use_mla=True,
        get_total_num_kv_heads=lambda: 1,
        get_head_size=lambda: 576,
        get_total_num_hidden_layers=lambda: len(specifications),
    )
    groups = planner.get_kv_cache_groups(config, specifications)
    return Plan(config, planner.get_kv_cache_config_from_groups(config, groups, 1 << 30), block_size)


class Rank:
    """One rank of an engine: a pool as planned, and our worker, which has registered it.

    Args:
        mode: "pull" or "push".
        planned: The pool.
        make_agent: Makes the worker's NIXL agent of a name and a configuration.
        engine: The engine's id.
        rank, ranks: Of the tensor-parallel group.
        extra: `kv_connector_extra_config`.
    """

    def __init__(
        self,
        mode: str,
        planned: Plan,
        make_agent: Callable[[str, Any], Any],
        engine: str,
        rank: int = 0,
        ranks: int = 1,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.mode, self.engine, self.rank, self.ranks = mode, engine, rank, ranks
        self.agent: Any = None

        def agent(name: str, config: Any) -> Any:
            self.agent = make_agent(name, config)
            return self.agent

        self.pool = allocate_kv_cache(planned.cache_config, torch.device("cpu"), LAYOUT, [planned.block_size])
        config = copy.copy(planned.config)
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="NixlConnector",
            kv_role="kv_both",
            engine_id=engine,
            kv_buffer_device="cpu",
            kv_connector_extra_config={"weights_identity": "the same", "num_threads": 0, **(extra or {})},
        )
        cores = os.sched_getaffinity(0)
        with mock.patch.multiple(
            base_worker,
            NixlWrapper=agent,
            get_tensor_model_parallel_rank=lambda: rank,
            get_tensor_model_parallel_world_size=lambda: ranks,
        ):
            self.worker: Any = WORKERS[mode](config, engine, planned.cache_config)
        os.sched_setaffinity(0, cores)  # vLLM gives the worker's thread one core
        self.worker.register_kv_caches(self.pool)

    @property
    def address(self) -> int:
        """Where the pool begins."""
        return int(self._storage.data_ptr())

    @property
    def raw(self) -> Bytes:
        """The pool's memory."""
        return torch.empty(0, dtype=torch.uint8).set_(self._storage).numpy()  # type: ignore[no-any-return]

    @property
    def metadata(self) -> Any:
        """What a peer is told in the handshake."""
        payload = self.worker.xfer_handshake_metadata.agent_metadata_bytes
        return msgspec.msgpack.decode(payload, type=NixlAgentMetadata)

    @property
    def _storage(self) -> Any:
        return next(iter(self.pool.values())).untyped_storage()

    def read(self, layer: str) -> Bytes:
        """Return a layer's pages as the layer sees them, `[blocks, bytes]`."""
        seen = self.pool[layer].view(torch.uint8)
        return seen.reshape(seen.shape[0], -1).numpy()  # type: ignore[no-any-return]

    def write(self, layer: str, pages: Bytes) -> None:
        """Fill a layer's pages, through the layer's view."""
        seen = self.pool[layer].view(torch.uint8)
        seen.copy_(torch.from_numpy(pages).reshape(seen.shape))


class Refused(Exception):
    """Ranks of decode have reported that a transfer failed: which."""


class Stuck(Exception):
    """Ranks are not done with a request, and will not be."""


class _Desk:
    """An engine's place for handshakes: vLLM's own listener, which never ends."""

    def __init__(self) -> None:
        self.port = free_port()
        self._told: dict[tuple[int, int], bytes] = {}
        ready = threading.Event()
        listener = NixlBaseConnectorScheduler._nixl_handshake_listener
        threading.Thread(
            target=listener, args=(self._told, ready, threading.Event(), HOST, self.port), daemon=True
        ).start()
        ready.wait()

    def show(self, ranks: Sequence[Rank]) -> None:
        """Answer for these ranks from now on."""
        self._told.clear()
        for rank in ranks:
            self._told[0, rank.rank] = msgspec.msgpack.encode(rank.worker.xfer_handshake_metadata)


@cache
def _desks() -> tuple[_Desk, _Desk]:
    return _Desk(), _Desk()


class Exchange:
    """A prefill engine and a decode engine, by their ranks, and what the schedulers of the two would tell them."""

    def __init__(self, prefill: Sequence[Rank], decode: Sequence[Rank]) -> None:
        self.prefill, self.decode = prefill, decode
        for desk, ranks in zip(_desks(), (prefill, decode), strict=True):
            desk.show(ranks)

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ranks = (*self.decode, *self.prefill)
        for rank in ranks:
            rank.worker._handshake_initiation_executor.shutdown(wait=True)  # which vLLM does not wait for
        for rank in ranks:
            rank.worker.shutdown()

    def move(self, local: Sequence[int], remote: Sequence[int]) -> None:
        """Move a request's blocks, and return once every rank of both ends is done with it.

        Args:
            local: Blocks that decode has for it, in the prompt's order; without those whose tokens it has cached.
            remote: Blocks that prefill has for it.

        Raises Refused where a rank of decode reports that the transfer has failed, and Stuck where one is never done.
        """
        request = f"request-{next(_NUMBERS)}"
        there, here = self.prefill[0], self.decode[0]
        push = here.mode == "push"
        at, back = (desk.port for desk in _desks())
        if push:
            self._meet(there, at)
        for rank in self.prefill:
            told = NixlConnectorMetadata()
            told.reqs_in_batch = {request}
            told.reqs_to_send = {request: time.perf_counter() + 10 * PATIENCE}
            if push:
                told.push_finished_blocks = {request: (list(remote),)}
            rank.worker.start_load_kv(told)
        peer = {"remote_engine_id": there.engine, "remote_host": HOST, "remote_port": at}
        for rank in self.decode:
            told = NixlConnectorMetadata()
            blocks = () if push else (list(remote),)
            params = {**peer, "remote_block_ids": blocks, "remote_request_id": request, "tp_size": there.ranks}
            told.add_new_req_to_recv(request, (list(local),), params, awaiting_kvs=True)
            if push:
                told.push_registrations[request] = {
                    **peer,
                    "request_id": request,
                    "decode_engine_id": here.engine,
                    "decode_host": HOST,
                    "decode_port": back,
                    "decode_tp_size": here.ranks,
                    "local_block_ids": (list(local),),
                    "remote_tp_size": there.ranks,
                }
            rank.worker.start_load_kv(told)
        self._await(request)

    def _meet(self, there: Rank, port: int) -> None:
        """Have decode know prefill before it writes: vLLM's decode ranks fail where they are written to before.

        Prefill writes to all of them once the first has registered, and `get_transfer_results` of one that is still in
        its handshake then raises KeyError, on 0.31 and 0.32.
        """
        for rank in self.decode:
            rank.worker._ensure_handshake(there.engine, HOST, port, there.ranks, notif_agents_only=True)
        for rank in self.decode:
            while True:
                with rank.worker._handshake_lock:
                    if not rank.worker._handshake_futures:
                        break
                time.sleep(0.0005)

    def _await(self, request: str) -> None:
        receiving, sending = set(self.decode), set(self.prefill)
        failed: set[Rank] = set()
        until = time.monotonic() + PATIENCE
        while receiving or (sending and not failed):
            for rank in receiving | sending:
                rank.worker.start_load_kv(NixlConnectorMetadata())  # goes on with what has waited for a handshake
                results = rank.worker.get_transfer_results()
                if request in results.failed_recving:
                    failed.add(rank)
                if request in results.finished_recving:
                    receiving.remove(rank)
                if request in results.finished_sending:
                    sending.remove(rank)
            if time.monotonic() > until:
                late = sorted(f"{rank.engine} {rank.rank}" for rank in receiving | sending)
                raise Stuck(f"never done with {request}: {', '.join(late)}")
            time.sleep(0.0005)
        if failed:
            raise Refused(sorted(rank.rank for rank in failed))
