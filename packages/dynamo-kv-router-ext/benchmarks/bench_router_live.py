# SPDX-License-Identifier: Apache-2.0
"""The router before real Dynamo frontends and workers: policies, what the hop costs, faults, and its own replicas.

It needs ai-dynamo in its interpreter and, for one part, `etcd`. `ROUTER_LIVE_PARTS` runs only some parts, names with
commas between them. Frontends, routers and mock engines are processes of their own; the workers that break are
`support.faulty_worker`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import live_faults
import live_hop
import live_policies
import live_replicas

from support.bench import Bench

#: Each part by name, in the order in which they run.
PARTS: dict[str, Callable[[Bench], None]] = {
    "policies": live_policies.run,
    "hop": live_hop.run,
    "faults": live_faults.run,
    "replicas": live_replicas.run,
}


def run(bench: Bench) -> None:
    wanted = os.environ.get("ROUTER_LIVE_PARTS", "")
    names = wanted.split(",") if wanted else list(PARTS)
    for name in names:
        if name not in PARTS:
            raise ValueError(f"ROUTER_LIVE_PARTS: {name!r} is none of {', '.join(PARTS)}")
    for name in names:
        start = time.monotonic()
        PARTS[name](bench)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
