# SPDX-License-Identifier: Apache-2.0
"""The order in which pairs of descriptors are posted.

NIXL merges neighbours in the list where both the local and the remote block follow the one before, and nothing else
(nixl_agent.cpp, `createXferReq`). Which pair stands where makes no other difference, so the list is sorted; blocks that
were recycled come back in descending order, and as they stand none of them would merge.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


def ordered(local: Ids, remote: Ids, longest: int | None = None) -> tuple[Ids, Ids, int]:
    """Return the pairs in the order to post them, and how many runs they form.

    Args:
        local, remote: Descriptor ids, one-dimensional, of one length; pair `i` moves `remote[i]` to or from `local[i]`.
        longest: The most pairs that may merge into one descriptor; no limit by default.

    A run is a stretch in which both ids rise by one. Longer runs are cut, and the pieces posted in an order in which
    they do not merge again.
    """
    if local.size == 0:
        return local, remote, 0
    order = np.lexsort((local, remote))
    local, remote = local[order], remote[order]
    starts = np.flatnonzero((np.diff(local) != 1) | (np.diff(remote) != 1)) + 1
    bounds = np.concatenate(([0], starts, [local.size]))
    lengths = np.diff(bounds)
    runs = int(lengths.size)
    if longest is None or int(lengths.max()) <= longest:
        return local, remote, runs
    # Position within the run -> piece of the run; later pieces first, so that no piece follows the one before it.
    within = np.arange(local.size) - np.repeat(bounds[:-1], lengths)
    run = np.repeat(np.arange(runs), lengths)
    piece = within // longest
    order = np.lexsort((within, -piece, run))
    return local[order], remote[order], runs
