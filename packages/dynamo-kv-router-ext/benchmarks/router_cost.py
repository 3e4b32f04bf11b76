# SPDX-License-Identifier: Apache-2.0
"""What a decision costs at 64 workers and prompts of 200,000 tokens, beside Dynamo's own, and what is kept for it.

Both routers are told of the same blocks: every worker holds 1,000,000 tokens. All of them hold the first 20,000 tokens
that the prompts share; one holds most of a prompt, and three others a part of it. Both have the same requests booked.
Decisions of all kinds alternate, each on another prompt than the one before, so that none finds its data in the
processor's caches; each books its request; the garbage collector runs as ever. Dynamo's `KvRouter` gets its workers'
events over its own event plane, from 64 runtimes in this process.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dynamo_kv_router_ext._index import PrefixIndex, hash_blocks
from dynamo_kv_router_ext._placement import Placer
from dynamo_kv_router_ext._profile import load_profile
from dynamo_kv_router_ext._sessions import Sessions
from dynamo_kv_router_ext._types import Request, Seat, Worker
from support.bench import Bench, Unavailable
from support.dynamo import environment

__all__ = ["memory", "run"]

WORKERS = 64
BLOCK = 64
TOKENS = 200_000
SHARED = 20_032
CACHE = 1_000_000 // BLOCK
#: Different prompts, so that none stays in the processor's caches.
PROMPTS = 16
#: Requests booked on either side while decisions are measured.
BOOKED = 128


def run(bench: Bench) -> None:
    """Record what decisions cost. Raises Unavailable where Dynamo is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        # Before Dynamo is imported: it reads what it logs then.
        os.environ.update(environment(Path(folder) / "discovery"), DYN_LOG="error", DYN_SELF_HOST_METADATA="0")
        try:
            import dynamo.llm  # noqa: F401  # only whether it is there
        except ImportError as error:
            raise Unavailable("Dynamo's router needs ai-dynamo") from error
        asyncio.run(_decisions(bench))
    memory(bench)


def memory(bench: Bench) -> None:
    """Record the bytes that the index keeps for a block, and the session table for a session."""
    count = 100_000 if bench.quick else 1_000_000
    random = np.random.default_rng(1)
    names = [Seat(f"worker-{number}", 0) for number in range(WORKERS)]
    batches = [random.integers(2**60, size=1000) for _ in range(count // 1000)]

    def index() -> PrefixIndex:
        kept = PrefixIndex(BLOCK)
        for seat in names:
            kept.add_seat(seat)
        for place, batch in enumerate(batches):
            blocks = batch.tolist()
            for tier, turn in (("device", 0), ("device", 7), ("host", 0)):
                kept.stored(names[(place + turn) % WORKERS], tier, blocks)  # type: ignore[arg-type]  # from a tuple
        return kept

    def sessions() -> Sessions:
        kept = Sessions(limit=count)
        for number in range(count // 10):
            kept.bind(f"session-{number:032x}", names[number % WORKERS], TOKENS, 0.0)
        return kept

    bench.row("memory of a block in the index, three places", "bytes", ours=[_bytes(index) / count])
    bench.row(
        "memory of a session, its name of 40 characters included", "bytes", ours=[_bytes(sessions) / (count // 10)]
    )


def _bytes(make: Callable[[], object]) -> float:
    """Return what Python allocated for what `make` returns."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kept = make()
        after = tracemalloc.get_traced_memory()[0]
        del kept
        return float(after - before)
    finally:
        tracemalloc.stop()


async def _decisions(bench: Bench) -> None:
    prompts = _prompts()
    peer = await _Dynamo.start()
    placer = Placer(load_profile("mocker"), block_size=BLOCK)
    for name in peer.workers:
        placer.add_worker(Worker(name, "prefill"), 0.0)
    for number, name in enumerate(peer.workers):
        for chain in _cache(number, prompts):
            for part in _parts(chain):
                placer.stored(name, 0, "device", part)
            await peer.stored(name, chain)
    blocks = [hash_blocks(prompt, BLOCK) for prompt in prompts]
    await peer.settle(prompts[0], placer.index.match(blocks[0], 0.0).device)
    for number in range(BOOKED):
        placer.place(Request(f"booked-{number}", TOKENS, blocks[number % PROMPTS]), "prefill", number / 10)
        await peer.best(prompts[number % PROMPTS], f"booked-{number}")

    buffers = [array.array("I", prompt) for prompt in prompts]
    now = BOOKED / 10

    def place(request: str, hashes: list[int]) -> None:
        placer.place(Request(request, TOKENS, hashes), "prefill", now)

    ways: dict[str, Callable[[int, str], object]] = {
        "block hashes, hashing not included": lambda turn, request: place(request, blocks[turn]),
        "a buffer of tokens, hashing included": lambda turn, request: place(request, hash_blocks(buffers[turn], BLOCK)),
        "a list of tokens, hashing included": lambda turn, request: place(request, hash_blocks(prompts[turn], BLOCK)),
    }
    samples: dict[str, list[float]] = {name: [] for name in (*ways, "Dynamo")}
    names = list(samples)
    orders = [names[first:] + names[:first] for first in range(len(names))]
    for turn in range(100 if bench.quick else 1000):
        request = f"turn-{turn}"
        for step, kind in enumerate(orders[turn % len(orders)]):
            prompt = (turn * len(orders) + step) % PROMPTS
            if kind == "Dynamo":
                start = time.perf_counter()
                await peer.best(prompts[prompt], request)
                samples[kind].append((time.perf_counter() - start) * 1e3)
                await peer.free(request)
            else:
                start = time.perf_counter()
                ways[kind](prompt, request)
                samples[kind].append((time.perf_counter() - start) * 1e3)
                placer.cancelled(request, now)
    peer_name = f"Dynamo {peer.version} KvRouter.best_worker"
    for kind in ways:
        bench.row(f"decision from {kind}: p50", "ms", ours=samples[kind], aim="<= 1")
        bench.row(f"decision from {kind}: p99", "ms", ours=[_p99(samples[kind])], aim="<= 3")
    ours, theirs = samples["a list of tokens, hashing included"], samples["Dynamo"]
    for figure, one, two in (("p50", ours, theirs), ("p99", [_p99(ours)], [_p99(theirs)])):
        bench.row(
            f"decision from a list of tokens, hashing included, beside Dynamo's: {figure}",
            "ms",
            ours=one,
            reference=two,
            reference_name=peer_name,
            aim="<= 1",
        )
    bench.compare_time(
        "hashes of blocks from a list of tokens",
        "ms",
        ours=lambda: hash_blocks(prompts[0], BLOCK),
        reference=lambda: peer.hashes(prompts[0]),
        reference_name=f"Dynamo {peer.version} compute_block_hash_for_seq",
        repeats=101,
    )
    alone: dict[str, Callable[[], object]] = {
        "hashes of blocks from a buffer": lambda: hash_blocks(buffers[0], BLOCK),
        "look-up of a prompt's blocks": lambda: placer.index.match(blocks[0], now),
    }
    for what, function in alone.items():
        bench.row(what, "ms", ours=bench.measure(function, unit="ms", repeats=101))
    for hashes in blocks:
        placer.index.store.stored(hashes, now)
    with_store = bench.measure(alone["look-up of a prompt's blocks"], unit="ms", repeats=101)
    bench.row("look-up of a prompt's blocks, all in the store as well", "ms", ours=with_store)
    bench.note(
        f"decisions: {WORKERS} workers, {TOKENS:,} tokens in blocks of {BLOCK}, {len(placer.index):,} blocks known, "
        f"{BOOKED} requests booked, {len(theirs)} decisions of each kind in turn; each includes the booking. Dynamo's "
        "takes a list of tokens, hashes them, and answers from threads of its own: the way there and back is included"
    )
    await peer.stop()


def _prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    shared = random.integers(1000, 150_000, SHARED)
    return [np.concatenate([shared, random.integers(1000, 150_000, TOKENS - SHARED)]).tolist() for _ in range(PROMPTS)]


def _cache(worker: int, prompts: list[list[int]]) -> Iterator[list[int]]:
    """Yield what a worker holds: chains of tokens, of whole blocks."""
    random = np.random.default_rng(1000 + worker)
    lengths = [SHARED]
    yield prompts[0][:SHARED]
    for number, prompt in enumerate(prompts):
        for part, length in enumerate((194_048, 140_032, 100_032, 40_000)):
            if (number * 4 + part) % WORKERS == worker:
                lengths.append(length)
                yield prompt[:length]
    left = CACHE - sum(lengths) // BLOCK
    while left > 0:
        yield random.integers(150_000, 200_000, min(left, 1000) * BLOCK).tolist()
        left -= 1000


def _parts(chain: list[int]) -> list[list[int]]:
    """Return the blocks of a chain as events tell of them, a thousand at a time."""
    blocks = hash_blocks(chain, BLOCK)
    return [blocks[begin : begin + 1000] for begin in range(0, len(blocks), 1000)]


def _p99(samples: list[float]) -> float:
    return float(np.percentile(samples, 99))


class _Dynamo:
    """Dynamo's own router, and 64 workers that say what they hold and never get a request."""

    def __init__(self) -> None:
        from importlib.metadata import version

        self.version = version("ai-dynamo")
        self.workers: list[int] = []
        self._publishers: dict[int, Any] = {}
        self._runtimes: list[Any] = []
        self._serving: list[asyncio.Future[Any]] = []
        self._router: Any = None

    @classmethod
    async def start(cls) -> _Dynamo:
        from dynamo import llm
        from dynamo.runtime import DistributedRuntime

        self = cls()
        loop = asyncio.get_running_loop()
        path = "router-cost.backend.generate"
        runtimes = [DistributedRuntime(loop, "file", "tcp") for _ in range(WORKERS + 1)]
        for runtime in runtimes[1:]:
            endpoint = runtime.endpoint(path)
            card = llm.ModelRuntimeConfig()
            card.context_length, card.total_kv_blocks, card.max_num_batched_tokens = 2 * TOKENS, CACHE, 8192
            await llm.register_model(
                llm.ModelInput.Tokens,
                llm.ModelType.Chat,
                endpoint,
                "none",
                "none",
                worker_type=llm.WorkerType.Aggregated,
                kv_cache_block_size=BLOCK,
                runtime_config=card,
                skip_model_assets=True,
            )
            self._serving.append(asyncio.ensure_future(endpoint.serve_endpoint(_never)))
            name = endpoint.connection_id()
            self._publishers[name] = llm.KvEventPublisher(endpoint, kv_block_size=BLOCK)
            self.workers.append(name)
        self._runtimes = runtimes
        endpoint = runtimes[0].endpoint(path)
        client = await endpoint.client()
        await _until(lambda: set(client.instance_ids()) == set(self.workers), "its workers to be found")
        self._router = llm.KvRouter(endpoint=endpoint, block_size=BLOCK, kv_router_config=llm.KvRouterConfig())
        await asyncio.sleep(2.0)  # events that are published before it listens are lost
        return self

    def hashes(self, tokens: list[int]) -> list[int]:
        from dynamo.llm import compute_block_hash_for_seq

        found: list[int] = compute_block_hash_for_seq(tokens, BLOCK)
        return found

    async def stored(self, worker: int, chain: list[int]) -> None:
        """Tell of a chain of blocks, a thousand at a time, each after the one before."""
        hashes = hash_blocks(
            chain, BLOCK
        )  # an engine's own names for its blocks; the router makes its own of the tokens
        parent = None
        for begin in range(0, len(hashes), 1000):
            part = hashes[begin : begin + 1000]
            tokens = chain[begin * BLOCK : (begin + len(part)) * BLOCK]
            self._publishers[worker].publish_stored(tokens, [BLOCK] * len(part), part, parent_hash=parent)
            parent = part[-1]
        await asyncio.sleep(0)

    async def settle(self, tokens: list[int], expected: list[int]) -> None:
        """Wait until the router knows all that it was told of a prompt, and has read the rest."""
        wanted = dict(zip(self.workers, expected, strict=True))
        found: dict[int, int] = {}
        for _ in range(300):
            rows = (await self._router.get_overlap_scores(tokens))["workers"]
            found = {row["worker_id"]: row["device_blocks"] for row in rows}
            if found == wanted:
                break
            await asyncio.sleep(0.1)
        else:
            raise RuntimeError(f"Dynamo's router knows {sum(found.values())} blocks of {sum(expected)}")
        known = -1
        while known < (known := len(json.loads(await self._router.dump_events()))):
            await asyncio.sleep(1.0)

    async def best(self, tokens: list[int], request: str) -> Any:
        return await self._router.best_worker(tokens, request_id=request)

    async def free(self, request: str) -> None:
        await self._router.free(request)

    async def stop(self) -> None:
        for publisher in self._publishers.values():
            publisher.shutdown()
        for runtime in self._runtimes:
            runtime.shutdown()
        await asyncio.wait(self._serving, timeout=10.0)


async def _never(request: Any, context: Any) -> Any:
    raise RuntimeError("nothing is generated here")
    yield


async def _until(met: Callable[[], bool], what: str) -> None:
    for _ in range(300):
        if met():
            return
        await asyncio.sleep(0.1)
    raise RuntimeError(f"Dynamo was waited for in vain: {what}")
