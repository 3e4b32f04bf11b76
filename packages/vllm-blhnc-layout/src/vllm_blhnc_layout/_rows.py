# SPDX-License-Identifier: Apache-2.0
"""The geometry of a block row: which layer's page lies where, as a cache that vLLM has made says itself.

Under a block-outermost layout (BLHNC and its kin) one block of the pool is one row of memory: the pages of all layers,
one after the other, and padding up to the next row where a backend wants it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Rows:
    """A pool of block rows."""

    blocks: int  #: number of rows
    stride: int  #: from one row to the next, bytes
    pages: tuple[tuple[str, int, int], ...]  #: (layer, offset in the row, page) in bytes, by offset

    @property
    def payload(self) -> int:
        """Bytes of a row that hold pages; the rest is padding, and moves with it."""
        return sum(page for _, _, page in self.pages)


class NoRows(Exception):
    """These caches do not form rows of one pool; the message says why."""


def find(caches: Mapping[str, torch.Tensor], blocks: int) -> Rows:
    """Return the rows that the layers' caches form.

    Args:
        caches: Layer -> its view of the pool, the first dimension being the block.
        blocks: Number of blocks of the pool.

    Raises:
        NoRows: the caches lie in several allocations, or not block by block, or overlap.
    """
    if not caches:
        raise NoRows("no caches")
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in caches.values()}
    if len(storages) != 1:
        raise NoRows(f"the caches lie in {len(storages)} allocations")
    ((base, size),) = storages.items()
    strides = {cache.stride(0) * cache.element_size() for cache in caches.values()}
    if len(strides) != 1:
        raise NoRows(f"blocks are {', '.join(map(str, sorted(strides)))} bytes apart, by layer")
    (stride,) = strides
    pages = []
    for layer, cache in caches.items():
        if cache.shape[0] != blocks:
            raise NoRows(f"{layer} has {cache.shape[0]} blocks, the pool {blocks}")
        if not cache[0].is_contiguous():
            raise NoRows(f"a block of {layer} is not contiguous: shape {tuple(cache.shape)}, strides {cache.stride()}")
        pages.append((layer, cache.data_ptr() - base, cache[0].nbytes))
    pages.sort(key=lambda page: page[1])
    end = 0
    for layer, offset, page in pages:
        if offset < end:
            raise NoRows(f"{layer} begins at byte {offset} of the row, within the page before it")
        end = offset + page
    if end > stride:
        raise NoRows(f"the pages of one block take {end} bytes, blocks are {stride} bytes apart")
    # An allocation may be longer by less than a row: the allocator rounds up.
    if not 0 <= size - blocks * stride < stride:
        raise NoRows(f"{blocks} rows of {stride} bytes do not fill an allocation of {size} bytes")
    return Rows(blocks, stride, tuple(pages))


def view(caches: Mapping[str, torch.Tensor], rows: Rows) -> torch.Tensor:
    """Return the pool as `[blocks, 1, 1, stride]` of bytes, without a copy."""
    import torch

    storage = next(iter(caches.values())).untyped_storage()
    shape, stride = (rows.blocks, 1, 1, rows.stride), (rows.stride, rows.stride, rows.stride, 1)
    return torch.empty(0, dtype=torch.int8, device=storage.device).set_(storage, 0, shape, stride)
