# SPDX-License-Identifier: Apache-2.0
"""One configuration at work: sites, routes, pools and tenants. A reload builds a new one beside it and swaps.

What two configurations have in common is carried over: connections, frontends by site and URL, pools by site and model.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import ClientSession, DummyCookieJar, TCPConnector

from ._admission import Pool, reserved_ranges
from ._breakers import Breakers, Target
from ._config import Config
from ._errors import ConfigError
from ._sites import Fleet, Part, Route
from ._store import Store
from ._wire import Usage

__all__ = ["Estimate", "Runtime", "build"]

#: How much one answer moves an estimate.
_WEIGHT = 0.1
#: What one answer may say of tokens per byte: neither a body that is padded nor one that only names what it means
#: (an image's address, an earlier answer) shall say much for all others.
_LEAST_RATE, _MOST_RATE = 0.01, 4.0


class Estimate:
    """What a prompt of a model costs, learnt from the usage in its answers.

    Attributes:
        tokens_per_byte: prompt tokens for each byte of a request's body.
        uncached: the share of prompt tokens that no cache had.
    """

    __slots__ = ("tokens_per_byte", "uncached")

    def __init__(self) -> None:
        self.tokens_per_byte = 0.25
        self.uncached = 1.0

    def learn(self, body_bytes: int, usage: Usage) -> None:
        """Take an answer's usage into account."""
        if usage.prompt > 0:
            rate = min(max(usage.prompt / body_bytes, _LEAST_RATE), _MOST_RATE)
            self.tokens_per_byte += _WEIGHT * (rate - self.tokens_per_byte)
            self.uncached += _WEIGHT * (1 - min(1.0, usage.cached / usage.prompt) - self.uncached)


class Runtime:
    """What a request sees from its first byte to its last, whatever is reloaded meanwhile.

    Attributes:
        config: what it was built from.
        sites: name -> its frontends, with what discovery knows of them.
        routes: model -> where it can be had, sites with a lower `prefer` first.
        pools: (site, model) -> its pool; models without a capacity have none.
        tenants_by_key: SHA-256 of a key, in hexadecimal -> tenant; empty when everybody may call.
        estimates: model -> what its prompts cost.
        breakers: None where the configuration switches them off.
        session: asks frontends what they have; there once it was started.
        running: requests that use it now.
    """

    session: ClientSession

    def __init__(
        self,
        config: Config,
        sites: Mapping[str, Fleet],
        pools: Mapping[tuple[str, str], Pool],
        previous: Runtime | None,
        breakers: Breakers,
    ) -> None:
        self.config = config
        self.sites = sites
        self.pools = pools
        self.breakers = None if config.breaker is None else breakers
        self.running = 0
        self.tenants_by_key = {key: name for name, one in config.tenants.items() for key in one.keys_sha256}
        routes: dict[str, list[Route]] = {}
        for name, fleet in sorted(sites.items(), key=lambda one: one[1].settings.prefer):
            for model, settings in fleet.settings.models.items():
                parts = tuple(Part(one, Target(name, model, f"frontend={one.url}")) for one in fleet.frontends)
                route = Route(fleet, model, settings, pools.get((name, model)), Target(name, model), parts)
                routes.setdefault(model, []).append(route)
        self.routes: Mapping[str, tuple[Route, ...]] = {model: tuple(found) for model, found in routes.items()}
        known: Mapping[str, Estimate] = previous.estimates if previous else {}
        self.estimates: dict[str, Estimate] = {model: known.get(model) or Estimate() for model in routes}
        self._previous = previous
        self._shared = breakers
        self._watching: list[asyncio.Task[None]] = []
        self._idle = asyncio.Event()
        # Its last request has ended, and those of all before it: they may use the same pools.
        self._over = asyncio.Event()
        self._before = previous._over if previous else None

    @property
    def ready(self) -> bool:
        """Whether some site has a frontend that has answered."""
        return any(one.answered for one in self.sites.values())

    def enter(self) -> None:
        """Count a request that uses it."""
        self.running += 1

    def leave(self) -> None:
        """Count its end."""
        self.running -= 1
        if not self.running:
            self._idle.set()

    async def start(self) -> None:
        """Start what is new in it (connections, discovery, pools), and bring what it took over up to its settings."""
        previous, self._previous = self._previous, None
        if previous is None:
            self.session = ClientSession(connector=TCPConnector(limit=0), cookie_jar=DummyCookieJar())
        else:
            self.session = previous.session
        limit, ttl_s = self.config.limits.queued_requests, self.config.lease.ttl_s
        for key, pool in self.pools.items():
            if previous is not None and previous.pools.get(key) is pool:
                site, model = key
                pool.update(self.config.sites[site].models[model], self.config.tenants, limit, ttl_s)
            else:
                await pool.start()
        if previous is not None:
            previous._unwatch()  # it would tell the breakers of its own frontends
        self._count()
        for fleet in self.sites.values():
            for one in fleet.frontends:
                self._watching.append(asyncio.create_task(fleet.watch(one, self.session, self._count)))

    async def retire(self, successor: Runtime | None) -> None:
        """Wait for its last request, then stop what `successor` did not take over; all of it without one."""
        self._unwatch()
        if self._watching:
            await asyncio.wait(self._watching)
        if self._before is not None:
            await self._before.wait()
        while self.running:
            self._idle.clear()
            await self._idle.wait()
        self._over.set()
        kept = set(map(id, successor.pools.values())) if successor is not None else set()
        closing = [pool.close() for pool in self.pools.values() if id(pool) not in kept]
        await asyncio.gather(*closing)
        frontends = {one for fleet in self.sites.values() for one in fleet.frontends}
        if successor is not None:
            frontends -= {one for fleet in successor.sites.values() for one in fleet.frontends}
        for one in frontends:
            one.connections.close()
        if successor is None:
            with contextlib.suppress(AttributeError):  # never started
                await self.session.close()

    def snapshot(self) -> dict[str, Any]:
        """Return frontends and pools for `/state`: `{"sites": {...}, "pools": [...]}`, ready for JSON."""
        return {
            "sites": {name: fleet.snapshot() for name, fleet in self.sites.items()},
            "pools": [pool.snapshot() for pool in self.pools.values()],
            "estimates": {
                model: {"tokens_per_byte": round(one.tokens_per_byte, 4), "uncached": round(one.uncached, 4)}
                for model, one in self.estimates.items()
            },
        }

    def _unwatch(self) -> None:
        for task in self._watching:
            task.cancel()

    def _count(self) -> None:
        """Tell the breakers how many there are of each kind: the last one is never opened."""
        for model, routes in self.routes.items():
            for route in routes:
                fleet = route.fleet
                self._shared.members(route.target.group, len(routes))
                self._shared.members(route.parts[0].target.group, len(route.parts))
                self._shared.members(Target(fleet.name, model, "worker=").group, max(1, len(fleet.workers)))


def build(
    config: Config,
    previous: Runtime | None,
    *,
    store: Store,
    breakers: Breakers,
    replica: str,
    clock: Callable[[], float],
) -> Runtime:
    """Return a runtime for `config`, not started; raise ConfigError (a reservation that does not fit, a key that is not
    in the environment) and leave `previous` as it was.

    Args:
        previous: the runtime at work, whose parts are taken over; None at first.
        store, breakers: shared by all runtimes of a process; the caller starts and closes them.
        replica: this process's name in the store.
        clock: seconds, monotonic.
    """
    faults: list[str] = []
    sites: dict[str, Fleet] = {}
    pools: dict[tuple[str, str], Pool] = {}
    for name, site in config.sites.items():
        key = None
        if site.api_key_env is not None:
            key = os.environ.get(site.api_key_env)
            if not key:
                faults.append(f"sites.{name}.api_key_env: {site.api_key_env} is not set in the environment")
        if site.route == "worker" and len(site.models) > 1:
            models = ", ".join(site.models)
            faults.append(
                f"sites.{name}.route: `worker` needs a site of one model, got {models}: a frontend does not say which "
                "of its workers serves which model; give each model a site of its own"
            )
        sites[name] = Fleet(name, site, key, previous.sites.get(name) if previous else None)
        for model, settings in site.models.items():
            if settings.capacity is None:
                continue
            try:
                reserved_ranges(settings)
            except ConfigError as error:
                faults.append(f"sites.{name}.models.{model}.reserved: {error}")
                continue
            pool = previous.pools.get((name, model)) if previous else None
            pools[name, model] = pool or Pool(
                name,
                model,
                settings,
                store,
                replica,
                clock,
                config.tenants,
                config.limits.queued_requests,
                config.lease.ttl_s,
            )
    if faults:
        raise ConfigError("\n".join(faults))
    return Runtime(config, sites, pools, previous, breakers)
