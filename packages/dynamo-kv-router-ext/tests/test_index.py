# SPDX-License-Identifier: Apache-2.0
"""Hashes of blocks, and the index of who holds them, against a model that keeps one set per seat and tier."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo_kv_router_ext import _store_tier
from dynamo_kv_router_ext._index import Matches, PrefixIndex, hash_blocks
from dynamo_kv_router_ext._store_tier import StoreTier
from dynamo_kv_router_ext._types import Seat, Tier

TOKENS = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 3), max_size=40)
SEATS = [Seat(worker, rank) for worker in ("a", "b", "c") for rank in (0, 1)]
#: Prompts of the index's tests are stretches of these blocks; few, so that they meet.
BLOCKS = [7, 2**63 + 1, 3, 5, 2**40, 11, 13, 17]
OWN: tuple[Tier, ...] = ("device", "host", "disk")


class TestHashes:
    @given(TOKENS, TOKENS, st.integers(1, 5))
    def test_hashes_are_equal_as_far_as_the_prefixes_are(self, one: list[int], two: list[int], size: int) -> None:
        common = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
        first, second = hash_blocks(one, size), hash_blocks(two, size)
        assert len(first) == len(one) // size
        assert len(set(first)) == len(first)
        for place, (a, b) in enumerate(zip(first, second, strict=False)):
            assert (a == b) == ((place + 1) * size <= common)

    @given(TOKENS, st.integers(1, 5), st.integers(-(2**70), 2**70))
    def test_how_the_tokens_are_held_does_not_matter(self, tokens: list[int], size: int, salt: int) -> None:
        expected = hash_blocks(tokens, size, salt)
        words = array.array("I", tokens)
        held: list[Any] = [tuple(tokens), words, words.tobytes(), memoryview(words), np.array(tokens, dtype=np.uint64)]
        held += [np.array(tokens, dtype=np.uint32), np.repeat(np.array(tokens, dtype=np.int64), 2)[::2]]
        for one in held:
            assert hash_blocks(one, size, salt) == expected
        assert all(type(value) is int and 0 <= value < 2**60 for value in expected)

    def test_a_salt_parts_equal_prompts(self) -> None:
        assert not set(hash_blocks(range(64), 4)) & set(hash_blocks(range(64), 4, salt=1))

    def test_a_swap_of_blocks_or_tokens_is_seen(self) -> None:
        assert (
            len({hash_blocks(order, 2)[-1] for order in ([1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 3, 4], [1, 2, 4, 3])}) == 4
        )

    def test_many_similar_blocks_have_different_hashes(self) -> None:
        tokens = np.zeros((4_000, 16), dtype=np.uint32)
        tokens[np.arange(4_000), np.arange(4_000) % 16] = np.arange(4_000) // 16 << 18
        assert len({hash_blocks(row, 16)[0] for row in tokens}) == len({row.tobytes() for row in tokens})
        assert len(set(hash_blocks(np.zeros(100_000, dtype=np.uint32), 1))) == 100_000

    def test_hashes_do_not_change_between_releases(self) -> None:
        # Routers of different versions may share what they know.
        assert hash_blocks(range(8), 4) == GOLDEN

    @pytest.mark.parametrize(
        ("tokens", "fault"),
        [
            ([1, -1], "from 0 to 2\\*\\*32 - 1"),
            ([2**32], "from 0 to 2\\*\\*32 - 1"),
            (["a"], "whole numbers"),
            ([1.5], "whole numbers"),
            (b"12345", "5 bytes are no whole tokens"),
            (np.array([1.0]), "integers, not float64"),
            (np.array([-1, 4]), "not from -1 to 4"),
        ],
    )
    def test_what_is_no_token_is_refused(self, tokens: Any, fault: str) -> None:
        with pytest.raises(ValueError, match=fault):
            hash_blocks(tokens, 4)

    def test_a_block_size_below_1_is_refused(self) -> None:
        with pytest.raises(ValueError, match="block_size must be at least 1, not 0"):
            hash_blocks([1], 0)


GOLDEN = [893778168367823096, 804461298587095068]


class Model:
    """What the index has to say, in the slowest way."""

    def __init__(self) -> None:
        self.own: dict[Seat, dict[str, set[int]]] = {}
        self.shared: dict[int, bool] = {}

    def match(self, seat: Seat, blocks: Sequence[int]) -> tuple[int, int, int, int]:
        held = self.own[seat]
        counts = {"device": 0, "host": 0, "disk": 0, "store": 0}
        whole = True
        for place, block in enumerate(blocks):
            whole = whole and block in held["device"]
            if whole:
                counts["device"] += 1
                continue
            tier = next((tier for tier in ("host", "disk") if block in held[tier]), None)
            if tier is None and self.in_store(blocks[place:]):
                tier = "store"
            if tier is None:
                break
            counts[tier] += 1
        return counts["device"], counts["host"], counts["disk"], counts["store"]

    def in_store(self, rest: Sequence[int]) -> bool:
        return next((self.shared[block] for block in rest if block in self.shared), False)


class IndexMachine(RuleBasedStateMachine):
    """Events in any order, lost and repeated ones too; matches are those of the model after each."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(16)
        self.model = Model()

    @precondition(lambda self: len(self.model.own) < len(SEATS))
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        seat = data.draw(st.sampled_from([seat for seat in SEATS if seat not in self.model.own]))
        self.index.add_seat(seat)
        self.model.own[seat] = {tier: set() for tier in OWN}

    @precondition(lambda self: self.model.own)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        seat = data.draw(st.sampled_from(list(self.model.own)))
        self.index.drop_seat(seat)
        del self.model.own[seat]

    @precondition(lambda self: self.model.own)
    @rule(data=st.data(), tier=st.sampled_from(OWN), blocks=st.lists(st.sampled_from(BLOCKS)))
    def store(self, data: st.DataObject, tier: Tier, blocks: list[int]) -> None:
        seat = data.draw(st.sampled_from(list(self.model.own)))
        self.index.stored(seat, tier, blocks)
        self.model.own[seat][tier].update(blocks)

    @precondition(lambda self: self.model.own)
    @rule(data=st.data(), tier=st.sampled_from(OWN), begin=st.integers(0, 3), end=st.integers(1, len(BLOCKS)))
    def store_prefix(self, data: st.DataObject, tier: Tier, begin: int, end: int) -> None:
        seat = data.draw(st.sampled_from(list(self.model.own)))
        self.index.stored(seat, tier, BLOCKS[begin:end])
        self.model.own[seat][tier].update(BLOCKS[begin:end])

    @precondition(lambda self: self.model.own)
    @rule(data=st.data(), tier=st.sampled_from(OWN), blocks=st.lists(st.sampled_from(BLOCKS), max_size=3))
    def remove(self, data: st.DataObject, tier: Tier, blocks: list[int]) -> None:
        seat = data.draw(st.sampled_from(list(self.model.own)))
        self.index.removed(seat, tier, blocks)
        self.model.own[seat][tier].difference_update(blocks)

    @precondition(lambda self: self.model.own)
    @rule(data=st.data(), tier=st.sampled_from((*OWN, None)))
    def clear(self, data: st.DataObject, tier: Tier | None) -> None:
        seat = data.draw(st.sampled_from(list(self.model.own)))
        self.index.cleared(seat, tier)
        for one in OWN if tier is None else (tier,):
            self.model.own[seat][one].clear()

    @precondition(lambda self: self.model.own)
    @rule(data=st.data(), there=st.booleans(), blocks=st.lists(st.sampled_from(BLOCKS), max_size=3))
    def share(self, data: st.DataObject, there: bool, blocks: list[int]) -> None:
        seat = data.draw(st.sampled_from(list(self.model.own)))
        (self.index.stored if there else self.index.removed)(seat, "store", blocks)
        self.model.shared.update(dict.fromkeys(blocks, there))

    @invariant()
    def matches_are_the_models(self) -> None:
        for blocks in (BLOCKS, BLOCKS[1:4], BLOCKS[:5], BLOCKS[4:], BLOCKS[::-1], [99, *BLOCKS], []):
            found = self.index.match(blocks, 0.0)
            assert list(found.seats) == list(self.model.own)
            assert rows(found) == {seat: self.model.match(seat, blocks) for seat in self.model.own}

    @invariant()
    def nothing_is_kept_for_blocks_that_are_gone(self) -> None:
        held = set().union(*(blocks for tiers in self.model.own.values() for blocks in tiers.values()))
        assert len(self.index) == len(held)


TestIndexMachine = IndexMachine.TestCase


def rows(found: Matches) -> dict[Seat, tuple[int, int, int, int]]:
    """Return the matches by seat."""
    counts = zip(found.device, found.host, found.disk, found.store, strict=True)
    return dict(zip(found.seats, counts, strict=True))


def index_with(*seats: Seat) -> PrefixIndex:
    index = PrefixIndex(16)
    for seat in seats:
        index.add_seat(seat)
    return index


#: Where what a seat has of a prompt in its tiers begins and ends.
STRETCHES = st.lists(st.integers(0, 70), min_size=7, max_size=7)


@given(st.lists(STRETCHES, min_size=1, max_size=6), st.integers(0, 60))
def test_blocks_that_are_not_looked_up_are_as_those_around_them(ends: list[list[int]], length: int) -> None:
    """As engines evict: what a seat has in a tier is one stretch, and none begins before that of a faster tier ends."""
    index, model = PrefixIndex(16), Model()
    for seat, (device, one, host, two, disk, three, store) in zip(SEATS, ends, strict=False):
        index.add_seat(seat)
        model.own[seat] = {tier: set() for tier in OWN}
        # Of a stretch that lies between two blocks that are looked up, nothing is known: there are none so short.
        host_begin = max(one, device)
        host_end = host if host >= host_begin + _store_tier.STRIDE else host_begin
        disk_begin = max(two, host_end)
        disk_end = disk if disk >= disk_begin + _store_tier.STRIDE else disk_begin
        begins, stops = (0, host_begin, disk_begin), (device, host_end, disk_end)
        for tier, begin, end in zip(OWN, begins, stops, strict=True):
            blocks = list(range(begin, end))
            index.stored(seat, tier, blocks)
            model.own[seat][tier].update(blocks)
        index.stored(seat, "store", list(range(min(store, three))))
        model.shared.update(dict.fromkeys(range(min(store, three)), True))
    blocks = list(range(length))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_store_tier, "SHORT", 0)
        assert rows(index.match(blocks, 0.0)) == {seat: model.match(seat, blocks) for seat in model.own}


class TestIndex:
    def test_the_run_goes_on_outside_the_device_and_ends_with_the_first_gap(self) -> None:
        index = index_with(*SEATS[:2])
        blocks = list(range(100, 110))
        index.stored(SEATS[0], "device", blocks[:3])
        index.stored(SEATS[0], "host", blocks[2:6])
        index.stored(SEATS[0], "disk", blocks[5:7])
        index.stored(SEATS[0], "device", blocks[8:])
        assert rows(index.match(blocks, 0.0)) == {SEATS[0]: (3, 3, 1, 0), SEATS[1]: (0, 0, 0, 0)}
        index.stored(SEATS[0], "store", blocks[7:8])
        assert rows(index.match(blocks, 0.0)) == {SEATS[0]: (3, 3, 1, 1), SEATS[1]: (0, 0, 0, 8)}

    def test_what_the_store_is_known_to_hold_counts_only_while_it_is_fresh(self) -> None:
        index = PrefixIndex(16, StoreTier(fresh_s=10.0))
        index.add_seat(SEATS[0])
        index.match([], 100.0)
        index.stored(SEATS[0], "store", [1, 2])
        assert index.match([1, 2, 3], 105.0).store == [2]
        assert index.match([1, 2, 3], 111.0).store == [0]

    @given(st.integers(300, 400), st.integers(0, 300), st.integers(8, 20), st.integers(1, 20))
    def test_a_gap_as_long_as_the_stride_ends_a_run_of_a_long_prompt(
        self, length: int, begin: int, gap: int, tail: int
    ) -> None:
        index = index_with(SEATS[0])
        blocks = list(range(length))
        index.stored(SEATS[0], "device", blocks)
        index.removed(SEATS[0], "device", [*blocks[begin : begin + gap], *blocks[-tail:]])
        assert index.match(blocks, 0.0).device == [min(begin, length - tail)]

    def test_as_many_seats_as_there_are(self) -> None:
        seats = [Seat(worker, rank) for worker in range(40) for rank in range(8)]
        index = index_with(*seats)
        blocks = list(range(500))
        for place, seat in enumerate(seats):
            index.stored(seat, "device", blocks[:place])
            index.stored(seat, "host", blocks[: place + 100])
        found = index.match(blocks, 0.0)
        assert found.device == list(range(320))
        assert found.host == [100] * 320
        for seat in seats[:300]:
            index.drop_seat(seat)
        assert rows(index.match(blocks, 0.0)) == {
            seat: (place, 100, 0, 0) for place, seat in enumerate(seats) if place >= 300
        }
        assert len(index) == 419

    def test_a_seat_that_comes_back_has_nothing(self) -> None:
        index = index_with(*SEATS[:3])
        for seat in SEATS[:3]:
            index.stored(seat, "device", [1, 2])
        index.drop_seat(SEATS[1])
        index.add_seat(SEATS[1])
        assert rows(index.match([1, 2], 0.0)) == {
            SEATS[0]: (2, 0, 0, 0),
            SEATS[2]: (2, 0, 0, 0),
            SEATS[1]: (0, 0, 0, 0),
        }

    def test_states_do_not_pile_up(self) -> None:
        index = index_with(*SEATS)
        for turn in range(200):
            seat = SEATS[turn % len(SEATS)]
            blocks = list(range(turn, turn + 20))
            index.stored(seat, OWN[turn % 3], blocks)
            index.removed(seat, OWN[turn % 3], blocks[:: turn % 3 + 1])
        for seat in SEATS:
            for tier in OWN:
                index.removed(seat, tier, list(range(300)))
        assert len(index) == 0
        assert all(state is None for state in index._states)
        assert len(index._states) < 300

    def test_what_is_not_there_is_refused(self) -> None:
        index = index_with(SEATS[0])
        with pytest.raises(ValueError, match="is there already"):
            index.add_seat(SEATS[0])
        with pytest.raises(KeyError, match="no seat"):
            index.drop_seat(SEATS[1])
        with pytest.raises(KeyError, match="no seat"):
            index.stored(SEATS[1], "device", [1])
        tier: Any = "tape"
        with pytest.raises(ValueError, match="device, host, disk, store, not 'tape'"):
            index.stored(SEATS[0], tier, [1])
        with pytest.raises(ValueError, match="block_size must be at least 1, not 0"):
            PrefixIndex(0)

    def test_the_store_is_emptied_for_all(self) -> None:
        index = index_with(*SEATS[:2])
        index.stored(SEATS[0], "store", [1])
        index.stored(SEATS[0], "device", [1])
        index.cleared(SEATS[1], "store")
        assert rows(index.match([1], 0.0)) == {SEATS[0]: (1, 0, 0, 0), SEATS[1]: (0, 0, 0, 0)}
