# SPDX-License-Identifier: Apache-2.0
"""Two workers of `vllm_blhnc_layout.pull` on pools that vLLM's own planner lays out, with two page widths; real NIXL.

Run as a script: prints one JSON object, and leaves as `support.rows` says.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from nixl._api import nixl_agent

from support.rows import ENVIRONMENT, Cache, Exchange, Rank, leave, plan
from vllm_blhnc_layout._identity import IncompatiblePeer

#: Tokens of a block; bytes of a token's latent (FP8 with scales) and of its indexer key.
SIZE, LATENT, INDEXER = 64, 656, 132


def caches(step: int) -> list[Cache]:
    """Return the layers of a sparse model, fewer than real ones; blocks have to be `step` latents apart."""
    return [
        *(Cache(f"layers.{layer}.attn", LATENT, align=step * LATENT) for layer in range(7)),
        *(Cache(f"layers.{layer}.indexer", INDEXER, indexer=True) for layer in range(3)),
    ]


def main() -> None:
    """Move blocks in several orders, by step of the rows; say what is equal."""
    found: dict[str, Any] = {}
    peers = {}
    draw = np.random.default_rng(0)
    for step in (1, 32):
        prefill = Rank("pull", plan(caches(step), SIZE, 40), nixl_agent, f"prefill-{step}")
        decode = Rank("pull", plan(caches(step), SIZE, 24), nixl_agent, f"decode-{step}")
        prefill.raw[:] = draw.integers(1, 256, len(prefill.raw), dtype=np.uint8)
        exchange = Exchange([prefill], [decode])
        for name, local, remote in (
            ("run", list(range(2, 12)), list(range(20, 30))),
            ("descending", list(range(11, 1, -1)), list(range(29, 19, -1))),
            ("shuffled", draw.permutation(24)[:10].tolist(), draw.permutation(40)[:10].tolist()),
        ):
            decode.raw.fill(0)
            exchange.move(local, remote)
            known = set(zip(local, remote, strict=True))
            others = [block for block in range(24) if block not in local]
            pages = [(decode.read(layer), prefill.read(layer)) for layer in prefill.pool]
            found[f"{name}, {step}"] = {
                "moved": all(np.array_equal(here[local], there[remote]) for here, there in pages),
                "others": not any(here[others].any() for here, _ in pages),
                "descriptors": sum(decode.worker.get_kv_connector_stats().data["num_descriptors"]),
                "runs": sum((one - 1, other - 1) not in known for one, other in known),
            }
        peers[step] = metadata = prefill.metadata
        (length,), (stride,) = metadata.block_lens, metadata.block_strides
        payload = SIZE * (7 * LATENT + 3 * INDEXER)
        found[f"row, {step}"] = [
            *(length == stride, stride % (step * LATENT), stride - payload, decode.worker.num_regions)
        ]
    try:
        decode.worker._validate_remote_agent_handshake(peers[1], 1)
    except IncompatiblePeer as refused:
        found["refused"] = str(refused)
    print(json.dumps(found))


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main()
    leave()
