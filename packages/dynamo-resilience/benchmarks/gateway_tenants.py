# SPDX-License-Identifier: Apache-2.0
"""Tenants: one with a reserved share and three without, together five times what the pool can serve."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

from gateway_parts import body, fake, key, percentile, replicas, store, tenants

from support.bench import Bench
from support.http_load import Sample, client, open_loop

__all__ = ["overload"]

_REPLICAS = 2
_CAPACITY, _BLOCKS, _ANSWER_S = 40, 20, 0.4
_RATE = _CAPACITY / _ANSWER_S
_RESERVED, _SHARE = "gold", 0.5
#: What the reserved tenant asks for, of what its share can serve: at 1 any queue would grow without an end.
_OFFERED = 0.85
_OVERLOAD = 5.0
_WEIGHTS = {_RESERVED: 1.0, "silver": 2.0, "bronze": 1.0, "tin": 1.0}
_QUEUE_S = 2.0
#: The first seconds, in which queues and leases find their level, are not counted.
_WARM_S = 2.0


def _config(store_url: str, frontend: str) -> dict[str, Any]:
    model = {"capacity": {"sequences": _CAPACITY}, "blocks": _BLOCKS, "reserved": {_RESERVED: _SHARE}}
    return {
        "store": {"url": store_url},
        "sites": {"one": {"frontends": [frontend], "models": {"m": model}}},
        "tenants": tenants(_WEIGHTS),
        "timeouts": {"queue_s": _QUEUE_S},
        "lease": {"ttl_s": 1.0},
    }


def overload(bench: Bench) -> None:
    """Run it, and record its rows."""
    seconds = 5.0 if bench.quick else 30.0
    rates = {_RESERVED: _RATE * _SHARE * _OFFERED}
    with (
        store() as shared,
        fake(delay=_ANSWER_S) as backend,
        replicas(_REPLICAS, _config(shared.url, backend.url)) as gateways,
    ):
        urls = [gateway.chat for gateway in gateways]
        alone = asyncio.run(_run(urls, seconds / 2, rates))
        others = _OVERLOAD * _RATE - rates[_RESERVED]
        rates |= {name: others / (len(_WEIGHTS) - 1) for name in _WEIGHTS if name != _RESERVED}
        samples = asyncio.run(_run(urls, seconds, rates))
    gold = samples[_RESERVED]
    kept = sum(one.sound for one in gold) / len(gold)
    bench.row(f"tenants: reserved, share of its rate kept at {_OVERLOAD:g}x overload", "", ours=[kept], aim=">= 0.99")
    for share in (0.5, 0.99):
        bench.row(
            f"tenants: reserved, p{share * 100:.0f} of a request of {_ANSWER_S:g} s",
            "s",
            ours=[percentile([one.seconds for one in gold if one.sound], share)],
            reference=[percentile([one.seconds for one in alone[_RESERVED] if one.sound], share)],
            reference_name="the same tenant alone",
        )
    served = {name: sum(one.sound for one in samples[name]) / seconds for name in rates}
    shares = {name: served[name] / _WEIGHTS[name] for name in rates if name != _RESERVED}
    bench.row(
        "tenants: the others' least rate by weight",
        "requests/s",
        ours=[min(shares.values())],
        reference=[max(shares.values())],
        reference_name="their largest rate by weight",
        aim=">= 0.9",
    )
    bench.row(
        "tenants: served in all",
        "requests/s",
        ours=[sum(served.values())],
        reference=[_RATE],
        reference_name="what the pool can serve",
        aim=">= 0.9",
    )
    everyone = [one for found in samples.values() for one in found]
    refused = [one for one in everyone if one.status == 429]
    waits = [one.seconds - _ANSWER_S for one in everyone if one.sound]
    bench.row(
        "tenants: longest wait of a refused request",
        "s",
        ours=[max(one.seconds for one in refused)],
        reference=[_QUEUE_S],
        reference_name="queue deadline",
        aim="<= 1.05",
    )
    # One that was sent on borrowed capacity and called back in time for its owner has lost what it had run.
    bench.row(
        "tenants: longest wait of a served request, a lost run included",
        "s",
        ours=[max(waits)],
        reference=[_QUEUE_S + _ANSWER_S],
        reference_name="queue deadline and one run",
        aim="<= 1.05",
    )
    late = sum(wait > 1.05 * _QUEUE_S for wait in waits)
    bench.row(f"tenants: served after the queue deadline, of {len(waits)} served", "", ours=[late])
    unsaid = sum(one.retry_after is None for one in refused)
    bench.row(f"tenants: without Retry-After, of {len(refused)} refused", "", ours=[unsaid], aim="== 0")
    broken = sum(one.status not in (200, 429) or (one.status == 200 and not one.sound) for one in everyone)
    bench.row(f"tenants: neither served nor refused, of {len(everyone)}", "", ours=[broken], aim="== 0")
    told = ", ".join(f"{name} {served[name]:.1f} of {rates[name]:.0f}/s" for name in rates)
    after = percentile([one.retry_after for one in refused if one.retry_after is not None] or [math.nan], 0.5)
    at_once = sum(one.seconds < 0.1 for one in refused) / max(1, len(refused))
    bench.note(
        f"tenants: {_REPLICAS} gateways, {_CAPACITY} sequences, half of them reserved; served {told}; weights "
        f"{_WEIGHTS}; of the refused {at_once:.0%} within 0.1 s, Retry-After {after:g} s in the median"
    )


async def _run(urls: list[str], seconds: float, rates: dict[str, float]) -> dict[str, list[Sample]]:
    """Send everybody's requests; return those that began after the first seconds."""
    async with client(30) as session:
        begin = time.monotonic()
        found = await asyncio.gather(
            *(
                open_loop(
                    session,
                    urls,
                    body(),
                    who=name,
                    rate=rate,
                    seconds=_WARM_S + seconds,
                    headers={"authorization": f"Bearer {key(name)}"},
                    seed=seed,
                )
                for seed, (name, rate) in enumerate(rates.items())
            )
        )
    return {
        name: [one for one in samples if one.start >= begin + _WARM_S]
        for name, samples in zip(rates, found, strict=True)
    }
