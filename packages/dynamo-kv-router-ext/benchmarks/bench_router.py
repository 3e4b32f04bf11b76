# SPDX-License-Identifier: Apache-2.0
"""Placement: the simulator beside Dynamo's replay, four policies side by side, and what a decision costs.

The Mooncake traces are read from the folder `ROUTER_BENCH_TRACES` (`../shared/traces`, beside the checkout).
`ROUTER_BENCH_PARTS` runs only some parts, names with commas between them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import router_cost
import router_fidelity
import router_policies

from support.bench import Bench

#: Each part by name, in the order in which they run.
PARTS: dict[str, Callable[[Bench], None]] = {
    "fidelity": router_fidelity.run,
    "policies": router_policies.run,
    "cost": router_cost.run,
}


def run(bench: Bench) -> None:
    wanted = os.environ.get("ROUTER_BENCH_PARTS", "")
    names = wanted.split(",") if wanted else list(PARTS)
    for name in names:
        if name not in PARTS:
            raise ValueError(f"ROUTER_BENCH_PARTS: {name!r} is none of {', '.join(PARTS)}")
    for name in names:
        start = time.monotonic()
        PARTS[name](bench)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
