# SPDX-License-Identifier: Apache-2.0
"""A cache that is bounded by entries and by the size of what it holds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["ContentCache"]

T = TypeVar("T")


class ContentCache(Generic[T]):
    """Values by key, the least recently used ones dropped first. Safe to use from several threads.

    Args:
        entries: at most so many values.
        size: at most so much of what `size` says of the values, together.
    """

    def __init__(self, entries: int, size: int) -> None:
        self._entries = entries
        self._limit = size
        self._size = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()

    def get(self, key: Hashable, build: Callable[[], T], size: Callable[[T], int]) -> T:
        """Return the value of that key; it is built where it is not there, outside the lock, and kept unless it raises.

        Args:
            key: What the value is made from.
            build: Makes it.
            size: Says how large it and its key are.
        """
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found[0]
        value = build()
        space = size(value)
        with self._lock:
            if key not in self._kept and space <= self._limit:
                self._kept[key] = value, space
                self._size += space
                while len(self._kept) > self._entries or self._size > self._limit:
                    _, (_, dropped) = self._kept.popitem(last=False)
                    self._size -= dropped
        return value

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._kept.clear()
            self._size = 0

    def __len__(self) -> int:
        return len(self._kept)
