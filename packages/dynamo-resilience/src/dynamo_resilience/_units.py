# SPDX-License-Identifier: Apache-2.0
"""Capacity in the units that hurt."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["UNLIMITED", "Units"]

#: A dimension that nobody limits.
UNLIMITED = 2**53


class Units(NamedTuple):
    """An amount of a pool's capacity, or of a request's need.

    Attributes:
        sequences: requests that generate at the same time.
        prefill_tokens: prompt tokens admitted whose first token is still awaited.
        kv_tokens: tokens whose KV is resident: prompt and answer.
    """

    sequences: int = 0
    prefill_tokens: int = 0
    kv_tokens: int = 0

    def plus(self, other: Units) -> Units:
        """Return the sum."""
        return Units(self[0] + other[0], self[1] + other[1], self[2] + other[2])

    def minus(self, other: Units) -> Units:
        """Return the difference."""
        return Units(self[0] - other[0], self[1] - other[1], self[2] - other[2])

    def fits(self, room: Units) -> bool:
        """Return whether this much fits into `room`."""
        return self[0] <= room[0] and self[1] <= room[1] and self[2] <= room[2]

    def share(self, whole: Units) -> float:
        """Return the dominant share of `whole` that this is: the largest of the three (0 where nothing is limited)."""
        return max((mine / all_ for mine, all_ in zip(self, whole, strict=True) if 0 < all_ < UNLIMITED), default=0.0)

    def capped(self, whole: Units) -> Units:
        """Return this, no dimension larger than that of `whole`."""
        return Units(min(self[0], whole[0]), min(self[1], whole[1]), min(self[2], whole[2]))
