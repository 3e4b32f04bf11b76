# SPDX-License-Identifier: Apache-2.0
"""The workers, as Dynamo's discovery tells of them: who lives, what each can do, what its cache holds."""

from __future__ import annotations

import array
import logging
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ._errors import Refused
from ._types import ROLES, Role, Seat, Worker, WorkerId

__all__ = ["Card", "Fleet", "read_card"]

_log = logging.getLogger(__name__)

#: `worker_type` of a card -> what the worker does here. Encoders take no tokens.
_ROLES: Mapping[str, Role] = {"prefill": "prefill", "decode": "decode", "aggregated": "both"}
#: What a router can offer to clients, of all that a card may name.
_OFFERED = ("Chat", "Completions")


class _Bootstrap(msgspec.Struct):
    """Where a prefill worker is asked for KV while it still reads the prompt."""

    bootstrap_host: str | None = None
    bootstrap_port: int | None = None


class _Runtime(msgspec.Struct):
    """`runtime_config` of a card, as far as placement needs it."""

    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    data_parallel_size: int = 1
    data_parallel_start_rank: int = 0
    kv_event_publishing_enabled: bool | None = None
    topology_domains: dict[str, str] = {}
    kv_transfer_domain: str | None = None
    kv_transfer_enforcement: str | None = None
    disaggregated_endpoint: _Bootstrap | None = None


class Card(msgspec.Struct):
    """A worker's model card, as far as it is used here."""

    display_name: str
    kv_cache_block_size: int
    worker_type: str
    source_path: str = ""
    model_type: str = ""
    runtime_config: _Runtime = msgspec.field(default_factory=_Runtime)
    #: Set in the card of an adapter, which stands beside its base model's.
    lora: Any = None

    @property
    def surface(self) -> tuple[str, ...]:
        """What a frontend may offer: "Chat", "Completions" or both; a worker that only reads prompts has none."""
        told = {part.strip() for part in self.model_type.split("|")}
        return tuple(name for name in _OFFERED if name in told)

    @property
    def transfer_group(self) -> str | None:
        """Where Dynamo requires that KV stays within a domain, as "DOMAIN=VALUE"; else None."""
        runtime = self.runtime_config
        domain = runtime.kv_transfer_domain
        if not domain or (runtime.kv_transfer_enforcement or "required") != "required":
            return None
        return f"{domain}={runtime.topology_domains.get(domain, '')}"

    def worker(self, instance: int) -> Worker:
        """Return the worker that the card describes; ValueError names what cannot be."""
        runtime = self.runtime_config
        role = _ROLES.get(self.worker_type)
        if role is None:
            raise ValueError(f"worker_type {self.worker_type!r} is none of {', '.join(_ROLES)}")
        if self.kv_cache_block_size < 1:
            raise ValueError(f"kv_cache_block_size is {self.kv_cache_block_size}")
        told: dict[str, int] = {}
        if runtime.total_kv_blocks:
            told["capacity_tokens"] = runtime.total_kv_blocks * self.kv_cache_block_size
        if runtime.max_num_seqs:
            told["max_sequences"] = runtime.max_num_seqs
        if runtime.max_num_batched_tokens:
            told["chunk_tokens"] = runtime.max_num_batched_tokens
        return Worker(instance, role, ranks=runtime.data_parallel_size, transfer_group=self.transfer_group, **told)


def read_card(text: str) -> Card:
    """Return the card in a JSON text; ValueError names the field that is wrong."""
    return msgspec.json.decode(text, type=Card)


@dataclass(slots=True)
class _Endpoint:
    """One of the endpoints that workers serve."""

    path: str
    handle: Any
    client: Any
    cards: Any
    #: The newest text of each worker's card, read or refused.
    texts: dict[int, str] = field(default_factory=dict)
    #: Its live index of what its workers have cached; made when the first worker is there that tells of its cache.
    index: Any = None


@dataclass(slots=True)
class _Member:
    """A worker of the fleet."""

    worker: Worker
    endpoint: _Endpoint
    card: Card
    #: The card's text.
    text: str


class Fleet:
    """The workers of some endpoints: what `Carrier` sends to, and who tells the router who lives.

    Args:
        runtime: Dynamo's DistributedRuntime.
        paths: endpoints, as NAMESPACE.COMPONENT.ENDPOINT.
    """

    def __init__(self, runtime: Any, paths: Sequence[str]) -> None:
        self._runtime = runtime
        self._paths = tuple(paths)
        self._endpoints: list[_Endpoint] = []
        self._members: dict[WorkerId, _Member] = {}
        self._count: dict[Role, int] = dict.fromkeys(ROLES, 0)
        self._router: Any = None
        #: The card of the first worker; the others have to be of its model and its block size. None: none came yet.
        self.first: Card | None = None

    @property
    def split(self) -> bool:
        """Whether prompts are read and answers generated apart: unless only workers that do both can generate."""
        return self._count["decode"] > 0 or self._count["both"] == 0

    @property
    def block_size(self) -> int:
        """Tokens in a block; RuntimeError before the first worker came."""
        if self.first is None:
            raise RuntimeError("no worker has come yet")
        return self.first.kv_cache_block_size

    @property
    def generates(self) -> bool:
        """Whether a worker lives that generates; a decoder can read a prompt too, if there is nobody else."""
        return self._count["both"] > 0 or self._count["decode"] > 0

    @property
    def complete(self) -> bool:
        """Whether requests can be answered: a worker generates and, in a split fleet, another reads prompts."""
        count = self._count
        return count["both"] > 0 or (count["prefill"] > 0 and count["decode"] > 0)

    def offer(self) -> tuple[Card, str] | None:
        """A card that says what clients may be offered, and its text; None where no worker has one."""
        for member in self._members.values():
            if member.card.surface:
                return member.card, member.text
        return None

    async def open(self) -> None:
        """Begin to watch the endpoints."""
        from dynamo.llm import FpmEventSubscriber

        for path in self._paths:
            handle = self._runtime.endpoint(path)
            cards = FpmEventSubscriber(handle)
            cards.start_tracking()
            self._endpoints.append(_Endpoint(path, handle, await handle.client(), cards))

    def close(self) -> None:
        """Stop watching."""
        for endpoint in self._endpoints:
            endpoint.cards.shutdown()

    def attach(self, router: Any) -> None:
        """Tell a `Router` who lives, from now on."""
        self._router = router
        for member in self._members.values():
            router.add_worker(member.worker)

    def poll(self) -> None:
        """Look who lives.

        While discovery's store is away, Dynamo's clients keep the instances they know, so nobody leaves.
        """
        for endpoint in self._endpoints:
            living = set(endpoint.client.instance_ids())
            known = [name for name, member in self._members.items() if member.endpoint is endpoint]
            for name in known:
                if name not in living:
                    self._leave(name, "has left")
            texts: Mapping[str, str] = endpoint.cards.get_model_cards()
            for key, text in texts.items():
                instance = int(key)
                if instance in living and endpoint.texts.get(instance) != text:
                    self._read(endpoint, instance, text)
            for instance in [one for one in endpoint.texts if one not in living]:
                del endpoint.texts[instance]

    def _read(self, endpoint: _Endpoint, instance: int, text: str) -> None:
        """A worker's card came, or another one."""
        try:
            card = read_card(text)
            if card.lora is not None:
                return  # an adapter's card tells nothing new of its worker
            worker = card.worker(instance)
            first = self.first
            if first is not None:
                for name in ("display_name", "kv_cache_block_size"):
                    if getattr(card, name) != getattr(first, name):
                        raise ValueError(f"its {name} is {getattr(card, name)!r}, the fleet's {getattr(first, name)!r}")
        except ValueError as error:
            endpoint.texts[instance] = text
            _log.error("worker %d of %s is not used: %s", instance, endpoint.path, error)
            if instance in self._members:
                self._leave(instance, "has changed")
            return
        if self.first is None:
            self.first = card
        if card.runtime_config.kv_event_publishing_enabled and endpoint.index is None:
            try:
                endpoint.index = self._index(endpoint)
            except Exception as error:  # the next card tries again
                _log.error("caches of %s are not known: %r", endpoint.path, error)
        endpoint.texts[instance] = text
        member = self._members.get(instance)
        if member is not None and member.worker == worker:
            member.card, member.text = card, text
            return
        if member is not None:
            self._leave(instance, "has changed")
        self._members[instance] = _Member(worker, endpoint, card, text)
        self._count[worker.role] += 1
        if self._router is not None:
            self._router.add_worker(worker)
        _log.info(
            "worker %d of %s: %s, %d ranks of %d tokens, transfer group %s",
            instance, endpoint.path, worker.role, worker.ranks, worker.capacity_tokens, worker.transfer_group,
        )  # fmt: skip

    def _index(self, endpoint: _Endpoint) -> Any:
        """Return a live index of an endpoint's caches; it reads how blocks are hashed from the cards that are there."""
        from dynamo.llm import KvRouter, KvRouterConfig

        # Without that, the index of a decode pool hears of no event: Dynamo asks it for its prefixes only then.
        config = KvRouterConfig(conditional_disagg_enabled=True)
        return KvRouter(endpoint=endpoint.handle, block_size=self.block_size, kv_router_config=config)

    def _leave(self, name: WorkerId, why: str) -> None:
        member = self._members.pop(name)
        self._count[member.worker.role] -= 1
        _log.info("worker %s of %s %s", name, member.endpoint.path, why)
        if self._router is not None:
            self._router.remove_worker(name)

    # What `Carrier` asks for

    async def send(self, worker: WorkerId, rank: int, request: dict[str, Any], context: Any) -> AsyncIterator[Any]:
        """Send a request to a rank of a worker and return its stream; what Dynamo raises is passed on.

        `request` and its `routing` belong to the call. Refused if the worker has left.
        """
        member = self._members.get(worker)
        if member is None:
            raise Refused(f"worker {worker} has left")
        runtime = member.card.runtime_config
        routing = request.get("routing") or {}
        routing["dp_rank"] = runtime.data_parallel_start_rank + rank
        request["routing"] = routing
        stream: AsyncIterator[Any] = await member.endpoint.client.direct(
            request, worker, annotated=False, context=context
        )
        return stream

    async def cached(self, tokens: Any, lora: str | None, role: Role) -> dict[Seat, tuple[int, int, int, int]]:
        """Return the blocks of a prompt that each rank has: device, then beyond it host and disk; 0 in the store."""
        found: dict[Seat, tuple[int, int, int, int]] = {}
        for endpoint in self._endpoints:
            if endpoint.index is None:
                continue
            if not any(m.endpoint is endpoint and m.worker.role == role for m in self._members.values()):
                continue
            answer = await endpoint.index.get_overlap_scores(_listed(tokens), lora_name=lora, include_shared=False)
            for row in answer["workers"]:
                member = self._members.get(row["worker_id"])
                blocks = (
                    row["device_blocks"], row["host_pinned_extension_blocks"], row["disk_extension_blocks"], 0
                )  # fmt: skip
                if member is None or not any(blocks):
                    continue
                rank = row["dp_rank"] - member.card.runtime_config.data_parallel_start_rank
                found[Seat(row["worker_id"], rank)] = blocks
        return found

    def bootstrap(self, worker: WorkerId) -> tuple[str, int] | None:
        """Return host and port of a worker's bootstrap server; None where it has none."""
        member = self._members.get(worker)
        told = member.card.runtime_config.disaggregated_endpoint if member is not None else None
        if told is None or not told.bootstrap_host or not told.bootstrap_port:
            return None
        return told.bootstrap_host, told.bootstrap_port


def _listed(tokens: Any) -> list[int]:
    """Token ids as a list; the index takes a buffer's single bytes for tokens."""
    if isinstance(tokens, list):
        return tokens
    ids = array.array("i")
    ids.frombytes(memoryview(tokens).cast("B"))
    if sys.byteorder != "little":
        ids.byteswap()
    return ids.tolist()
