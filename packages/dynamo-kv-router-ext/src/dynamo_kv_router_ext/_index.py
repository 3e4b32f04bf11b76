# SPDX-License-Identifier: Apache-2.0
"""Which blocks of KV lie where: for a prompt's blocks, how many each data-parallel rank has, by tier.

A block is named by a chained hash, which stands for all tokens up to its end: Dynamo's, vLLM's, or that of
`hash_blocks`; whatever is used, events and prompts have to use the same.
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ._store_tier import StoreTier, look_up
from ._types import TIERS, Seat, Tier

__all__ = ["Matches", "PrefixIndex", "hash_blocks"]

#: The tiers of a seat, in the order of the masks in a state.
_OWN: dict[str, int] = {"device": 0, "host": 1, "disk": 2}
#: The state of a block that lies nowhere.
_NOWHERE = (0, 0, 0)

#: Where sums begin: the fraction of the golden ratio.
_OFFSET = np.uint64(0x9E3779B97F4A7C15)

_U64 = npt.NDArray[np.uint64]


def hash_blocks(tokens: Sequence[int] | npt.NDArray[Any] | bytes, block_size: int, salt: int = 0) -> list[int]:
    """Return a hash of 60 bits for each full block of a prompt, which stands for all tokens up to the block's end.

    A prompt that is a list of Python ints costs a conversion first, four times the hashing: give what holds the tokens
    in 32 bits each, if there is one.

    Args:
        tokens: token ids from 0 to 2**32 - 1: a sequence, an array of integers, or the bytes of an array of unsigned
            32-bit integers in the machine's byte order.
        block_size: tokens in a block; what is left of the prompt after its last full block has no hash.
        salt: what else has to be equal for prefixes to be equal, such as a number for the model or the adapter.

    Equal prefixes always have equal hashes. Different ones have different hashes up to chance, but the hash is not
    cryptographic: equal hashes may be made on purpose, and cost a wrong estimate.

    The hash is multilinear (Lemire and Kaser, Strongly universal string hashing is fast, 2014) over the tokens of a
    block, mixed, and multilinear over the blocks so far, mixed.

    Raises ValueError for a token outside that range, a block size below 1, and bytes that are no whole tokens.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, not {block_size!r}")
    words = _words(tokens)
    count = len(words) // block_size
    if count == 0:
        return []
    inner, outer = _weights(block_size, count)
    digests = np.einsum("ij,j->i", words[: count * block_size].reshape(count, block_size), inner)
    digests += _OFFSET  # or a block of zeros would add nothing to the chain
    digests = _mix(digests)
    digests *= outer
    chained = np.cumsum(digests, dtype=np.uint64)
    chained += np.uint64(salt & (2**64 - 1))
    hashes: list[int] = (_mix(chained) >> np.uint64(4)).tolist()
    return hashes


def _words(tokens: Sequence[int] | npt.NDArray[Any] | bytes) -> npt.NDArray[np.uint32]:
    """Return the tokens as unsigned 32-bit integers."""
    if isinstance(tokens, (bytes, bytearray, memoryview)):
        if memoryview(tokens).nbytes % 4:
            raise ValueError(f"{memoryview(tokens).nbytes} bytes are no whole tokens of 4 bytes")
        return np.frombuffer(tokens, dtype=np.uint32)
    if isinstance(tokens, np.ndarray):
        if tokens.dtype == np.uint32:
            return tokens.ravel()
        if tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens must be integers, not {tokens.dtype}")
        if tokens.size and (tokens.min() < 0 or tokens.max() >= 2**32):
            raise ValueError(f"tokens must be from 0 to 2**32 - 1, not from {tokens.min()} to {tokens.max()}")
        return tokens.ravel().astype(np.uint32)
    try:
        return np.frombuffer(array.array("I", tokens), dtype=np.uint32)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"tokens must be whole numbers from 0 to 2**32 - 1: {error}") from error


def _mix(values: _U64) -> _U64:
    """Spread every bit over all 64, in place: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _weights(block_size: int, count: int) -> tuple[_U64, _U64]:
    """Return odd weights, one for each token of a block, one for each of `count` blocks."""
    room = 1 << (count - 1).bit_length()  # few sizes, so that few are kept
    return _odd(block_size, 0x9E3779B97F4A7C15), _odd(room, 0xD1B54A32D192ED03)[:count]


@lru_cache(maxsize=64)
def _odd(count: int, step: int) -> _U64:
    values = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(step)
    values = _mix(values)
    values |= np.uint64(1)
    return values


@dataclass(slots=True)
class Matches:
    """How many blocks of a prompt each seat has; the lists are aligned, and count blocks."""

    #: The seats, in the order in which they were added.
    seats: Sequence[Seat]
    #: From the prompt's first block on, without a gap, on the device.
    device: list[int]
    #: After those, without a gap, in the seat's host memory, on its disk, or in the store: a block that lies in several
    #: is counted in the first of them.
    host: list[int]
    disk: list[int]
    store: list[int]


class PrefixIndex:
    """Where blocks lie, told by events, and how much of a prompt each seat has.

    Events may be lost or repeated: a block that is removed and was not known is no error, and neither is one that is
    stored again.

    A block has one entry, whatever the number of seats that hold it: the number of a state, which is a bit mask of
    seats for each tier, and which blocks share. A long prompt costs a look-up for every eighth of its blocks, and a
    few more for each change of the state (`look_up`).

    Args:
        block_size: tokens in a block, which whoever asks in tokens has to multiply with.
        store: what is known of the shared store; without it one that hears of events only.
    """

    def __init__(self, block_size: int, store: StoreTier | None = None) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size!r}")
        self.block_size = block_size
        self.store = StoreTier() if store is None else store
        self._seats: list[Seat] = []
        self._slots: dict[Seat, int] = {}
        #: Block -> the number of its state.
        self._blocks: dict[int, int] = {}
        #: Number of a state -> masks of the seats that hold it on the device, in host memory, on disk; None: free.
        self._states: list[tuple[int, int, int] | None] = []
        #: Number of a state -> how many blocks are in it.
        self._counts: list[int] = []
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._free: list[int] = []
        #: Blocks whose seats are all gone; swept when they are many.
        self._dead = 0
        self._now = 0.0

    def __len__(self) -> int:
        """Return how many blocks lie somewhere, the store's apart."""
        return len(self._blocks) - self._dead

    @property
    def seats(self) -> tuple[Seat, ...]:
        """The seats, in the order in which they were added."""
        return tuple(self._seats)

    def add_seat(self, seat: Seat) -> None:
        """Add a seat, with nothing cached. Raises ValueError where it is there already."""
        if seat in self._slots:
            raise ValueError(f"seat {seat!r} is there already")
        self._slots[seat] = len(self._seats)
        self._seats.append(seat)

    def drop_seat(self, seat: Seat) -> None:
        """Drop a seat and all that is known of it. Raises KeyError where it is not there."""
        slot = self._slot(seat)
        below = (1 << slot) - 1
        self._rewrite(lambda mask, _: (mask & below) | (mask >> (slot + 1) << slot))
        del self._seats[slot]
        self._slots = {seat: slot for slot, seat in enumerate(self._seats)}

    def stored(self, seat: Seat, tier: Tier, blocks: Sequence[int]) -> None:
        """Note that a seat holds blocks in a tier.

        For `store` the seat is only who said so; the event counts from the latest time that `match` was given.
        Raises KeyError for a seat that is not there, ValueError for an unknown tier.
        """
        slot = self._slot(seat)
        if tier == "store":
            self.store.stored(blocks, self._now)
        else:
            self._change(blocks, _own(tier), 1 << slot, True)

    def removed(self, seat: Seat, tier: Tier, blocks: Sequence[int]) -> None:
        """Note that a seat does not hold blocks in a tier any more. Errors as for `stored`."""
        slot = self._slot(seat)
        if tier == "store":
            self.store.removed(blocks, self._now)
        else:
            self._change(blocks, _own(tier), 1 << slot, False)

    def cleared(self, seat: Seat, tier: Tier | None = None) -> None:
        """Note that a seat holds nothing in a tier, or in none of its own; `store`: that the store was emptied.

        Errors as for `stored`.
        """
        slot = self._slot(seat)
        if tier == "store":
            self.store.cleared()
            return
        keep = ~(1 << slot)
        which = None if tier is None else _own(tier)
        self._rewrite(lambda mask, place: mask & keep if which in (None, place) else mask)

    def match(self, blocks: Sequence[int], now: float) -> Matches:
        """Return how many of a prompt's blocks, from its first on, each seat has in each tier."""
        self._now = max(self._now, now)
        count = len(self._seats)
        device, host, disk, store = [0] * count, [0] * count, [0] * count, [0] * count
        # Seats whose device has had every block so far, and those that have had them so far in some tier. A tier's
        # count is the sum of the places where it was left minus that of the places where it was entered.
        whole = going = (1 << count) - 1
        in_host = in_disk = in_store = 0
        place = 0
        for begin, number, shared in self._runs(blocks, now):
            place = begin
            on_device, on_host, on_disk = _NOWHERE if number < 0 else self._states[number] or _NOWHERE
            left = whole & ~on_device
            for slot in _bits(left) if begin else ():
                device[slot] = begin
            whole &= on_device
            going &= whole | (going if shared else on_host | on_disk)
            if not going:
                break
            outside = going & ~whole
            wanted = outside & on_host
            for slot in _bits(wanted ^ in_host):
                host[slot] += -begin if wanted >> slot & 1 else begin
            in_host = wanted
            wanted = outside & ~on_host & on_disk
            for slot in _bits(wanted ^ in_disk):
                disk[slot] += -begin if wanted >> slot & 1 else begin
            in_disk = wanted
            wanted = outside & ~on_host & ~on_disk
            for slot in _bits(wanted ^ in_store):
                store[slot] += -begin if wanted >> slot & 1 else begin
            in_store = wanted
        for tier, mask in ((device, whole), (host, in_host), (disk, in_disk), (store, in_store)):
            for slot in _bits(mask):
                tier[slot] += place
        return Matches(tuple(self._seats), device, host, disk, store)

    def told(self, cached: Mapping[Seat, tuple[int, int, int, int]]) -> Matches:
        """Return what another index counts, for the seats of this one; those that are absent there have nothing.

        Raises ValueError for counts that are not four numbers of at least 0.
        """
        rows = []
        for seat in self._seats:
            row = cached.get(seat, (0, 0, 0, 0))
            if len(row) != 4 or min(row) < 0:
                raise ValueError(f"cached at {seat!r} must be four numbers of blocks of at least 0, not {row!r}")
            rows.append(row)
        device, host, disk, store = map(list, zip(*rows, strict=True)) if rows else ([], [], [], [])
        return Matches(tuple(self._seats), device, host, disk, store)

    def _runs(self, blocks: Sequence[int], now: float) -> Iterator[tuple[int, int, bool]]:
        """Yield stretches of blocks in one state: where each begins, its state (-1: nowhere), whether the store has it.

        The last one is empty and has no state: it says where the blocks end.
        """
        numbers = look_up(self._blocks, blocks, -1)
        if len(self.store):
            shared = self.store.run(blocks, now)
            keys = numbers * 2 + shared
        else:
            keys = numbers * 2
        begins = np.flatnonzero(np.diff(keys, prepend=-3))
        for begin, key in zip(begins.tolist(), keys[begins].tolist(), strict=True):
            yield begin, key >> 1, bool(key & 1)
        yield len(blocks), -1, False

    def _slot(self, seat: Seat) -> int:
        slot = self._slots.get(seat)
        if slot is None:
            raise KeyError(f"no seat {seat!r}")
        return slot

    def _change(self, blocks: Sequence[int], which: int, bit: int, there: bool) -> None:
        """Set or clear a seat's bit for blocks in a tier."""
        known, states, counts = self._blocks, self._states, self._counts
        moves: dict[int, int] = {}  # number of the state before -> after, -1: nowhere
        for block in blocks:
            before = known.get(block, -1)
            after = moves.get(before, -2)
            if after == -2:
                masks = list((states[before] if before >= 0 else None) or _NOWHERE)
                masks[which] = masks[which] | bit if there else masks[which] & ~bit
                after = moves[before] = self._number((masks[0], masks[1], masks[2]))
            if after == before:
                continue
            if before >= 0:
                counts[before] -= 1
                if states[before] == _NOWHERE:
                    self._dead -= 1
            if after >= 0:
                counts[after] += 1
                known[block] = after
            else:
                del known[block]
        for number in itertools.chain(moves, moves.values()):
            self._release(number)

    def _number(self, masks: tuple[int, int, int]) -> int:
        """Return the number of the state with these masks, -1 for nowhere."""
        if masks == _NOWHERE:
            return -1
        number = self._numbers.get(masks)
        if number is None:
            if self._free:
                number = self._free.pop()
                self._states[number] = masks
            else:
                number = len(self._states)
                self._states.append(masks)
                self._counts.append(0)
            self._numbers[masks] = number
        return number

    def _release(self, number: int) -> None:
        """Free the number of a state in which no block is."""
        if number < 0 or self._counts[number]:
            return
        masks = self._states[number]
        if masks is None:
            return
        if self._numbers.get(masks) == number:
            del self._numbers[masks]
        self._states[number] = None
        self._free.append(number)

    def _rewrite(self, change: Callable[[int, int], int]) -> None:
        """Replace the masks of every state by what `change` makes of a mask and the place of its tier.

        Blocks that lie nowhere then are swept when they are many.
        """
        self._numbers.clear()
        self._dead = 0
        for number, masks in enumerate(self._states):
            if masks is None:
                continue
            after = (change(masks[0], 0), change(masks[1], 1), change(masks[2], 2))
            self._states[number] = after
            if after == _NOWHERE:
                self._dead += self._counts[number]
            else:
                self._numbers.setdefault(after, number)
        if self._dead * 4 > len(self._blocks):
            states = self._states
            self._blocks = {block: number for block, number in self._blocks.items() if states[number] != _NOWHERE}
            for number, masks in enumerate(states):
                if masks == _NOWHERE:
                    self._counts[number] = 0
                    self._release(number)
            self._dead = 0


def _own(tier: str) -> int:
    place = _OWN.get(tier)
    if place is None:
        raise ValueError(f"tier must be one of {', '.join(TIERS)}, not {tier!r}")
    return place


def _bits(mask: int) -> Iterator[int]:
    """Yield the places of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
