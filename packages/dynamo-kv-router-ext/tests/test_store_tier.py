# SPDX-License-Identifier: Apache-2.0
"""What is known of the shared store, how its end is found with few queries, and vLLM's keys."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_kv_router_ext import _store_tier
from dynamo_kv_router_ext._store_tier import StoreTier, block_id, mooncake_key

HASH = bytes(range(32))


class TestKnowledge:
    def test_what_was_heard_last_counts(self) -> None:
        tier = StoreTier()
        assert tier.present(1, 0.0) is None
        tier.stored([1, 2], 0.0)
        assert tier.present(1, 1e9) is True
        tier.removed([1, 3], 1.0)
        assert [tier.present(block, 2.0) for block in (1, 2, 3)] == [False, True, False]
        tier.answered([1, 2], [True, False], 3.0)
        assert [tier.present(block, 3.0) for block in (1, 2)] == [True, False]
        tier.cleared()
        assert tier.present(2, 3.0) is None

    def test_knowledge_ages(self) -> None:
        tier = StoreTier(fresh_s=5.0)
        tier.answered([1, 2], [True, False], 10.0)
        assert [tier.present(1, now) for now in (10.0, 15.0, 15.1)] == [True, True, None]
        assert [tier.present(2, now) for now in (10.0, 15.0, 15.1)] == [False, False, None]
        tier.stored([1], 15.1)
        assert tier.present(1, 20.0) is True

    def test_memory_is_bounded_and_the_oldest_is_forgotten(self) -> None:
        tier = StoreTier(max_blocks=100)
        tier.stored([0], 0.0)
        for block in range(1, 1000):
            tier.stored([block], 0.0)
            tier.stored([0], 0.0)
            assert len(tier) <= 100
        assert tier.present(0, 0.0) is True
        assert tier.present(999, 0.0) is True
        assert tier.present(800, 0.0) is None
        tier.stored(range(10_000), 0.0)
        assert len(tier) <= 100

    @pytest.mark.parametrize("fresh_s", [0.0, -1.0, math.nan])
    def test_a_bound_that_is_none_is_refused(self, fresh_s: float) -> None:
        with pytest.raises(ValueError, match="fresh_s must be more than 0"):
            StoreTier(fresh_s=fresh_s)

    def test_other_faults_are_named(self) -> None:
        with pytest.raises(ValueError, match="max_blocks must be at least 1, not 0"):
            StoreTier(max_blocks=0)
        with pytest.raises(ValueError, match="limit must be at least 1, not 0"):
            StoreTier().to_ask([1], 0.0, 0)
        with pytest.raises(ValueError, match="2 blocks were asked for and 1 answered"):
            StoreTier().answered([1, 2], [True], 0.0)


class TestRun:
    @given(st.lists(st.sampled_from([True, False, None])))
    def test_an_unknown_block_is_what_the_next_known_one_is(self, known: list[bool | None]) -> None:
        tier = StoreTier()
        for block, there in enumerate(known):
            if there is not None:
                (tier.stored if there else tier.removed)([block], 0.0)
        expected = [next((later for later in known[place:] if later is not None), False) for place in range(len(known))]
        assert tier.run(range(len(known)), 0.0).tolist() == expected

    def test_what_is_too_old_is_unknown(self) -> None:
        tier = StoreTier(fresh_s=5.0)
        tier.stored([0, 1, 2], 0.0)
        tier.stored([1], 3.0)
        assert tier.run([0, 1, 2], 6.0).tolist() == [True, True, False]


class TestQueries:
    @given(st.integers(0, 4000), st.data(), st.integers(1, 64))
    def test_the_end_is_found_in_few_rounds(self, length: int, data: st.DataObject, limit: int) -> None:
        end = data.draw(st.integers(0, length))
        tier, blocks = StoreTier(fresh_s=60.0), list(range(1000, 1000 + length))
        rounds = 0
        while asked := tier.to_ask(blocks, 1.0, limit):
            assert len(asked) <= limit
            assert len(set(asked)) == len(asked)
            assert asked == sorted(asked)
            tier.answered(asked, [block < 1000 + end for block in asked], 1.0)
            rounds += 1
        assert int(tier.run(blocks, 1.0).sum()) == end
        assert rounds <= math.log(length + 1, limit + 1) + 2

    def test_only_what_is_stale_is_asked_again(self) -> None:
        tier, blocks = StoreTier(fresh_s=10.0), list(range(8))
        tier.answered([3, 4], [True, False], 0.0)
        assert tier.to_ask(blocks, 5.0, 8) == []
        assert tier.to_ask(blocks, 11.0, 8) == blocks
        tier.answered([3], [True], 11.0)
        assert tier.to_ask(blocks, 12.0, 8) == [4, 5, 6, 7]
        assert tier.to_ask(blocks, 12.0, 1) == [6]

    def test_of_a_long_prompt_the_blocks_that_are_looked_up_are_asked_for_first(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_store_tier, "SHORT", 0)
        tier, blocks = StoreTier(fresh_s=10.0), list(range(32))
        tier.answered([8, 16], [True, False], 0.0)
        assert tier.to_ask(blocks, 5.0, 32) == list(range(9, 16))
        assert tier.to_ask(blocks, 11.0, 32) == [0, 8, 16, 24]
        tier.answered([8], [True], 11.0)
        assert tier.to_ask(blocks, 12.0, 32) == [16, 24]
        assert tier.to_ask(blocks, 12.0, 1) == [24]
        tier.answered([16, 24], [True, False], 12.0)
        tier.answered([19, 20], [True, False], 12.0)
        assert tier.to_ask(blocks, 12.0, 32) == []

    def test_nothing_is_asked_of_nothing(self) -> None:
        assert StoreTier().to_ask([], 0.0, 4) == []


class TestKeys:
    def test_the_key_is_as_documented(self) -> None:
        assert mooncake_key("/models/glm-tiny/", HASH, tp_rank=3, cache_prefix="site") == (
            f"site@glm-tiny@tp_rank:3@pcp0@dcp0@pp_rank:0@group:0@{HASH.hex()}"
        )

    def test_a_namespace_follows_the_model(self) -> None:
        assert mooncake_key("m", HASH, group=2, store_namespace="@store_tp:8").startswith("m@store_tp:8@tp_rank:0@")

    def test_a_block_is_named_by_the_end_of_its_hash(self) -> None:
        assert block_id(HASH) == 0x18191A1B1C1D1E1F == block_id(block_id(HASH))
