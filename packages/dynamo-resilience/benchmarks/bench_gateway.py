# SPDX-License-Identifier: Apache-2.0
"""The gateway's breakers, leases, load beside its peers, and tenants, with real processes and a real store.

It needs `wrk` and a `redis-server` (or Valkey), and two cores for itself. The peers' environments are made under
`.nox/peers` the first time; `GATEWAY_BENCH_PEERS` names a folder that has them. `GATEWAY_BENCH_PARTS` runs only some
parts, names with commas between them.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable

import gateway_breakers
import gateway_dynamo
import gateway_leases
import gateway_load
import gateway_tenants
from gateway_parts import store_name

from support.bench import Bench
from support.http_load import wrk_program

#: Each part by name, in the order in which they run.
PARTS: dict[str, Callable[[Bench], None]] = {
    "breakers": gateway_breakers.breakers,
    "leases": gateway_leases.leases,
    "load": gateway_load.load,
    "memory": gateway_load.memory,
    "tenants": gateway_tenants.overload,
    "dynamo": gateway_dynamo.broken_workers,
}


def run(bench: Bench) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    wanted = os.environ.get("GATEWAY_BENCH_PARTS", "")
    wrk_program()  # said before the run, not in the middle
    store_name()
    for name in wanted.split(",") if wanted else PARTS:
        start = time.monotonic()
        PARTS[name](bench)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    bench.note(f"store: {store_name()}; frontends are fakes with fixed answers, except where Dynamo is named")
