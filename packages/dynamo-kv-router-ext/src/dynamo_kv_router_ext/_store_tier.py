# SPDX-License-Identifier: Apache-2.0
"""What is known of the second tier, the store that all workers share: Mooncake's, with the keys vLLM gives its blocks.

Knowledge comes from events (`StoreTier.stored`, `removed`) or from queries: ask the store for the keys of
`StoreTier.to_ask` and hand back the reply with `answered`. Nothing here talks to a store.

The key of a block holds its whole hash, an event of vLLM perhaps only the last 64 bits of it (`block_id`). Who queries
needs the whole: have the workers publish it (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0) and keep it beside the number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["StoreTier", "block_id", "mooncake_key"]

#: Every so many-th block of a long prompt is looked up; of prompts of so many blocks and fewer, every one.
STRIDE = 8
SHORT = 256
#: Times are kept in whole microseconds, shifted by one bit: the last bit says whether the block was there.
_TICKS = 1_000_000
#: In place of a time: nothing is known. Older than any time.
_UNKNOWN = -(2**62)


def block_id(block_hash: int | bytes) -> int:
    """Return the number an event of vLLM names a block by: the last 64 bits of its hash; a number stays as it is.

    vLLM's `maybe_convert_block_hash` makes the same number where it publishes numbers.
    """
    return block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash, "big") & (2**64 - 1)


def mooncake_key(
    model: str,
    block_hash: bytes,
    *,
    tp_rank: int = 0,
    pcp_rank: int = 0,
    dcp_rank: int = 0,
    pp_rank: int = 0,
    group: int = 0,
    cache_prefix: str = "",
    store_namespace: str = "",
) -> str:
    """Return the key under which vLLM's MooncakeStoreConnector keeps one rank's part of a block.

    A block can be loaded where the keys of all ranks and of all cache groups are there; usually one stands for all.

    Args:
        model: the model as vLLM was given it; its last path component is in the key.
        block_hash: the whole hash; where cache blocks are larger than hash blocks, that of the block's last part.
        tp_rank, pcp_rank, dcp_rank, pp_rank: the rank that saved it.
        group: the cache group.
        cache_prefix: the connector's `cache_prefix`, such as the identity of the cached bytes.
        store_namespace: what a layout other than vLLM's usual one adds, such as that of keys shared between TP sizes.

    Source: `PoolKey` in vLLM 0.31's mooncake/store/data.py.
    """
    prefix = f"{cache_prefix}@" if cache_prefix else ""
    name = model.rstrip("/").rsplit("/", 1)[-1]
    ranks = f"@tp_rank:{tp_rank}@pcp{pcp_rank}@dcp{dcp_rank}@pp_rank:{pp_rank}"
    return f"{prefix}{name}{store_namespace}{ranks}@group:{group}@{block_hash.hex()}"


def look_up(known: Mapping[int, int], blocks: Sequence[int], missing: int) -> npt.NDArray[np.int64]:
    """Return what is known of each block of a prompt, `missing` where there is nothing; shape (blocks,).

    Of more than `SHORT` blocks, every `STRIDE`-th is looked up, and the last one; those between two of which the same
    is known are taken to be like them, the others are looked up too. A gap of fewer than `STRIDE` blocks can so be
    missed, but caches have none: a block is evicted before the one it builds on. Each block that nobody asked for
    lately costs a miss of the processor's caches.
    """
    count, get = len(blocks), known.get
    stride = _stride(count)
    if stride == 1:
        return np.fromiter(map(get, blocks, itertools.repeat(missing)), dtype=np.int64, count=count)
    looked = itertools.chain(blocks[::stride], blocks[-1:])
    marks = np.fromiter(map(get, looked, itertools.repeat(missing)), dtype=np.int64)
    found = np.repeat(marks[:-1], stride)[:count]
    found[-1] = marks[-1]
    for gap in np.flatnonzero(marks[1:] != marks[:-1]).tolist():
        begin, end = gap * stride + 1, min((gap + 1) * stride, count - 1)
        found[begin:end] = list(map(get, blocks[begin:end], itertools.repeat(missing)))
    return found


def _stride(count: int) -> int:
    return STRIDE if count > SHORT else 1


class StoreTier:
    """Which blocks the shared store holds, as far as it is known, and which are worth a query.

    Args:
        fresh_s: seconds for which an event or an answer counts; after that the block is unknown again. Without end
            where nothing is queried; with queries, seconds: the store evicts, and tells nobody.
        max_blocks: the most blocks that are remembered; those heard of longest ago are forgotten first.
    """

    def __init__(self, *, fresh_s: float = math.inf, max_blocks: int = 4_000_000) -> None:
        if not fresh_s > 0:
            raise ValueError(f"fresh_s must be more than 0 seconds, not {fresh_s!r}")
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, not {max_blocks!r}")
        self.fresh_s = fresh_s
        self.max_blocks = max_blocks
        #: Block -> when it was heard of and whether it was there, in order of hearing.
        self._heard: dict[int, int] = {}

    def __len__(self) -> int:
        """Return how many blocks are remembered, there or not."""
        return len(self._heard)

    def stored(self, blocks: Iterable[int], now: float) -> None:
        """Note that blocks were saved in the store."""
        self._hear(blocks, itertools.repeat(True), now)

    def removed(self, blocks: Iterable[int], now: float) -> None:
        """Note that blocks are not in the store any more."""
        self._hear(blocks, itertools.repeat(False), now)

    def cleared(self) -> None:
        """Forget everything: the store was emptied, or its master started anew."""
        self._heard.clear()

    def answered(self, blocks: Sequence[int], present: Sequence[bool], now: float) -> None:
        """Note what the store said of the blocks of a query. Raises ValueError where the two differ in length."""
        if len(blocks) != len(present):
            raise ValueError(f"{len(blocks)} blocks were asked for and {len(present)} answered")
        self._hear(blocks, present, now)

    def present(self, block: int, now: float) -> bool | None:
        """Return whether the store holds the block; None where that is not known, or not any more."""
        heard = self._heard.get(block)
        if heard is None or heard >> 1 < self._oldest(now):
            return None
        return bool(heard & 1)

    def run(self, blocks: Sequence[int], now: float) -> npt.NDArray[np.bool_]:
        """Return for each block of a prompt, from its first on, whether the store is taken to hold it; shape (blocks,).

        An unknown block is taken for what the next known one after it is: whoever saves a block has saved those before
        it. After the last known one, nothing is taken for granted.
        """
        known, there = self._look(blocks, now)
        count = len(known)
        if known.all():
            return there
        # The index of the next known block, from the right; `count` where there is none.
        following = np.minimum.accumulate(np.where(known, np.arange(count), count)[::-1])[::-1]
        return np.append(there, False)[following]

    def to_ask(self, blocks: Sequence[int], now: float, limit: int) -> list[int]:
        """Return at most `limit` blocks of a prompt that are worth a query, in its order.

        They lie between the blocks known to be there and the first known not to be; if those are more than `limit`,
        evenly spaced, so that each round of asking leaves 1 / (limit + 1) of them, and a few rounds find the end.
        Nothing is left to ask where the end is known. Raises ValueError for a limit below 1.
        """
        if limit < 1:
            raise ValueError(f"limit must be at least 1, not {limit!r}")
        known, there = self._look(blocks, now)
        absent = np.flatnonzero(known & ~there)
        end = int(absent[0]) if len(absent) else len(known)
        found = np.flatnonzero(there[:end])
        begin = int(found[-1]) + 1 if len(found) else 0
        places: Sequence[int] = range(begin, end)
        # First the blocks that are looked up, then those between the last of them that is there and the next.
        stride = _stride(len(blocks))
        places = places[-begin % stride :: stride] or places
        unknown = len(places)
        if unknown > limit:
            places = [places[unknown * turn // (limit + 1)] for turn in range(1, limit + 1)]
        return [blocks[place] for place in places]

    def _hear(self, blocks: Iterable[int], present: Iterable[bool], now: float) -> None:
        """Remember blocks as heard of now, the latest last."""
        heard = self._heard
        gone = int(now * _TICKS) << 1
        here = gone | 1  # one object for all blocks of a call
        for block, there in zip(blocks, present, strict=False):
            heard.pop(block, None)
            heard[block] = here if there else gone
        if len(heard) > self.max_blocks:
            # An eighth at a time: the front of a dict is slow to find when entries are taken from it one by one.
            surplus = len(heard) - self.max_blocks + self.max_blocks // 8
            for block in list(itertools.islice(heard, surplus)):
                del heard[block]

    def _look(self, blocks: Sequence[int], now: float) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return for each block whether something is known of it, and whether it is known to be there."""
        heard = look_up(self._heard, blocks, _UNKNOWN)
        known = heard >> 1 >= self._oldest(now)
        return known, known & (heard & 1).astype(np.bool_)

    def _oldest(self, now: float) -> int:
        """Return the earliest time, in ticks, that still counts."""
        return _UNKNOWN // 2 + 1 if self.fresh_s == math.inf else int((now - self.fresh_s) * _TICKS)
