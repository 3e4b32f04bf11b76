# SPDX-License-Identifier: Apache-2.0
"""The order of pairs: nothing is lost, and what NIXL makes of it is as few descriptors as there are runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_blhnc_layout._pairs import ordered

Pairs = list[tuple[int, int]]


def merged(pairs: Pairs) -> list[int]:
    """Merge neighbours as NIXL does; return the length of each descriptor."""
    lengths: list[int] = []
    last: tuple[int, int] | None = None
    for local, remote in pairs:
        if last is not None and (local, remote) == (last[0] + 1, last[1] + 1):
            lengths[-1] += 1
        else:
            lengths.append(1)
        last = local, remote
    return lengths


def runs(pairs: Pairs) -> int:
    """Count, from the pairs alone, those that no other pair comes before."""
    known = set(pairs)
    return sum((local - 1, remote - 1) not in known for local, remote in known)


def order(pairs: Pairs, longest: int | None = None) -> tuple[Pairs, int]:
    local, remote, found = ordered(
        np.array([pair[0] for pair in pairs], dtype=np.int64),
        np.array([pair[1] for pair in pairs], dtype=np.int64),
        longest,
    )
    return list(zip(local.tolist(), remote.tolist(), strict=True)), found


#: Blocks are allocated once on each side, so no id stands twice on one.
PAIRS = st.integers(0, 60).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(0, 90), min_size=count, max_size=count, unique=True),
        st.lists(st.integers(0, 90), min_size=count, max_size=count, unique=True),
    ).map(lambda sides: list(zip(*sides, strict=True)))
)


@given(PAIRS)
def test_every_pair_is_posted_once_in_as_few_descriptors_as_there_are_runs(pairs: Pairs) -> None:
    posted, found = order(pairs)
    assert sorted(posted) == sorted(pairs)
    assert len(merged(posted)) == found == runs(pairs)


@given(PAIRS, st.integers(1, 7))
def test_no_descriptor_is_longer_than_the_limit(pairs: Pairs, longest: int) -> None:
    posted, found = order(pairs, longest)
    assert sorted(posted) == sorted(pairs)
    assert found == runs(pairs)
    # As few as the limit allows: each run in the least number of pieces.
    whole = merged(order(pairs)[0])
    lengths = merged(posted)
    assert all(length <= longest for length in lengths)
    assert len(lengths) == sum(-(-length // longest) for length in whole)


@pytest.mark.parametrize("turned", [False, True])
def test_blocks_that_come_back_in_descending_order_are_one_run(turned: bool) -> None:
    """vllm#31371: the free list hands recycled blocks out backwards, and as they stand none of them would merge."""
    pairs = [(40 + block, 7 + block) for block in range(32)]
    given_order = pairs[::-1] if turned else pairs
    assert len(merged(given_order)) == (32 if turned else 1)
    assert order(given_order) == (pairs, 1)


def test_shuffled_blocks_merge_where_they_can() -> None:
    rng = np.random.default_rng(0)
    pairs = [(block, 100 + block) for block in range(64)]
    shuffled = [pairs[index] for index in rng.permutation(64)]
    assert len(merged(shuffled)) > 50
    assert order(shuffled) == (pairs, 1)


def test_a_limit_cuts_evenly_from_the_front() -> None:
    posted, found = order([(block, block) for block in range(10)], 4)
    assert merged(posted) == [2, 4, 4]
    assert found == 1


def test_nothing_is_nothing() -> None:
    assert order([]) == ([], 0)
