# SPDX-License-Identifier: Apache-2.0
"""What Prometheus reads. The request path counts in plain integers; everything else is read when it is asked for."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from ._breakers import Breakers
from ._proxy import Finished, Proxy
from ._runtime import Runtime
from ._store import Store
from ._units import UNLIMITED
from .version import __version__

__all__ = ["CONTENT_TYPE", "Metrics", "View"]

#: The content type of `Metrics.text`.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_CLASSES = {1: "1xx", 2: "2xx", 3: "3xx", 4: "4xx", 5: "5xx"}
_KINDS = ("site", "frontend", "worker")


class View(NamedTuple):
    """What a scrape looks at."""

    runtime: Runtime
    proxy: Proxy
    store: Store
    breakers: Breakers
    ready: bool
    draining: bool
    loaded: float
    refused: bool


class _Histogram:
    """Counts of seconds by bucket."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(_SECONDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(_SECONDS, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, int]]:
        below, buckets = 0, []
        for bound, count in zip((*map(str, _SECONDS), "+Inf"), self.counts, strict=True):
            below += count
            buckets.append((bound, below))
        return buckets


class _Served:
    """What was seen of one model at one site."""

    __slots__ = ("first", "queue", "requests", "seconds")

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.seconds = _Histogram()
        self.first = _Histogram()
        self.queue = _Histogram()


class Metrics:
    """A replica's metrics.

    Args:
        view: returns what to look at, when asked.

    Attributes:
        reloads: how reloads went, `ok` or `refused`.
    """

    def __init__(self, view: Callable[[], View]) -> None:
        self.reloads = {"ok": 0, "refused": 0}
        self._view = view
        self._served: dict[tuple[str, str], _Served] = {}
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def observe(self, done: Finished) -> None:
        """Count a request that is over."""
        served = self._served.get((done.site, done.model))
        if served is None:
            served = self._served[done.site, done.model] = _Served()
        served.requests[_status(done)] += 1
        served.seconds.add(done.seconds)
        if done.first_s is not None:
            served.first.add(done.first_s)
        if done.queued_s > 0:
            served.queue.add(done.queued_s)

    def text(self) -> bytes:
        """Return all of it in Prometheus's text format."""
        text: bytes = generate_latest(self._registry)
        return text

    def describe(self) -> list[Any]:
        """Name nothing in advance: the registry would otherwise collect to find out."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield every metric (the registry's protocol)."""
        view = self._view()
        yield from self._replica(view)
        yield from self._requests(view)
        yield from _frontends(view)
        yield from _breakers(view)
        yield from _pools(view)

    def _replica(self, view: View) -> Iterator[Any]:
        yield _gauge("info", "The version that runs.", ("version",), [((__version__,), 1)])
        yield _gauge("ready", "1 while it should be sent requests.", value=view.ready)
        yield _gauge("draining", "1 once it takes no more requests.", value=view.draining)
        yield _gauge("config_ok", "0 while the file is one that could not be put to work.", value=not view.refused)
        yield _gauge("config_loaded_timestamp_seconds", "When the configuration was put to work.", value=view.loaded)
        reloads = [((result,), count) for result, count in self.reloads.items()]
        yield _counter("config_reloads", "Reloads by result, ok or refused.", ("result",), reloads)
        yield _gauge("store_up", "Whether the store answers.", value=view.store.up)

    def _requests(self, view: View) -> Iterator[Any]:
        labels = ("site", "model")
        yield _gauge("open_requests", "Requests that run now, queued ones included.", value=view.proxy.open)
        requests = [
            ((*where, status), count)
            for where, served in self._served.items()
            for status, count in served.requests.items()
        ]
        text = "Requests that are over: status class, 429, 499 (the client went away), broken (a stream that was cut)."
        yield _counter("requests", text, (*labels, "status"), requests)
        for name, text, attribute in (
            ("request_seconds", "From a request's head to its end.", "seconds"),
            ("first_piece_seconds", "From a request's head to the first piece of the answer's body.", "first"),
            ("queue_seconds", "In pools' queues; only requests that waited.", "queue"),
        ):
            family = HistogramMetricFamily(f"dynamo_gateway_{name}", text, labels=labels)
            for where, served in self._served.items():
                histogram: _Histogram = getattr(served, attribute)
                family.add_metric(where, histogram.buckets(), histogram.total)
            yield family
        yield _counter("retries", "Tries of a request after its first.", value=view.proxy.retries)
        attempts = [(where, count) for where, count in view.proxy.outcomes.items()]
        yield _counter("attempts", "Tries at a frontend by outcome.", (*labels, "outcome"), attempts)


def _status(done: Finished) -> str:
    if done.broken:
        return "broken"
    if done.status in (429, 499):
        return str(done.status)
    return _CLASSES.get(done.status // 100, "other")


def _frontends(view: View) -> Iterator[Any]:
    up, outstanding = [], []
    for site, fleet in view.runtime.sites.items():
        for frontend in fleet.frontends:
            up.append(((site, frontend.url), frontend.answered))
            outstanding.append(((site, frontend.url), frontend.outstanding))
    labels = ("site", "frontend")
    yield _gauge("frontend_up", "Whether discovery's last try was answered.", labels, up)
    yield _gauge("frontend_outstanding", "Requests of this replica that run there.", labels, outstanding)


def _breakers(view: View) -> Iterator[Any]:
    counts = {
        (route.fleet.name, model, kind): {"open": 0, "half_open": 0}
        for model, routes in view.runtime.routes.items()
        for route in routes
        for kind in _KINDS
    }
    for one in view.breakers.snapshot():
        site, part, model = one["target"].split(" ", 2)
        kind = "site" if part == "*" else part.partition("=")[0]
        if one["state"] != "closed" and (site, model, kind) in counts:
            counts[site, model, kind][one["state"]] += 1
    samples = [((*where, state), count) for where, states in counts.items() for state, count in states.items()]
    yield _gauge("breakers", "Breakers that are not closed.", ("site", "model", "part", "state"), samples)
    stats = view.breakers.stats
    text = "Changes of a breaker's state that this replica learnt of or made."
    yield _counter("breaker_transitions", text, value=stats.transitions)
    yield _counter("breaker_probes", "Half-open probes that were granted to this replica.", value=stats.probes)
    yield _gauge("breakers_local", "1 while breakers go by this replica's own outcomes.", value=view.breakers.local)


def _pools(view: View) -> Iterator[Any]:
    labels = ("site", "model")
    admitted: list[_Sample] = []
    rejected: list[_Sample] = []
    capacity: list[_Sample] = []
    reclaimed: list[_Sample] = []
    lost: list[_Sample] = []
    now: dict[str, list[_Sample]] = {"running": [], "waiting": [], "blocks": []}
    for where, pool in view.runtime.pools.items():
        stats = pool.stats
        for samples, counts in ((admitted, stats.admitted), (rejected, stats.rejected)):
            for by, tenants in counts.items():
                samples += [((*where, by, tenant), count) for tenant, count in tenants.items()]
        reclaimed.append((where, stats.reclaimed))
        lost.append((where, stats.lost))
        for name, account in pool.snapshot()["accounts"].items():
            values = {"running": account["running"], "waiting": account["waiting"], "blocks": account["lease"]["held"]}
            for kind, value in values.items():
                now[kind].append(((*where, name), value))
        settings = view.runtime.config.sites[where[0]].models[where[1]].capacity
        if settings is not None:
            limits = settings.units._asdict().items()
            capacity += [((*where, unit), limit) for unit, limit in limits if limit < UNLIMITED]
    for kind, text in (
        ("running", "Admitted requests of this replica that run."),
        ("waiting", "Requests of this replica that wait."),
        ("blocks", "Blocks that this replica holds."),
    ):
        yield _gauge(f"pool_{kind}", text, (*labels, "account"), now[kind])
    yield _counter("admitted", "Admitted requests.", (*labels, "account", "tenant"), admitted)
    yield _counter("rejected", "Refused requests.", (*labels, "reason", "tenant"), rejected)
    yield _counter("reclaimed", "Admissions taken back for a reserved tenant.", labels, reclaimed)
    yield _counter("leases_lost", "Admissions that were void because the lease was gone.", labels, lost)
    yield _gauge("capacity", "Capacity of a pool, as configured.", (*labels, "unit"), capacity)


_Sample = tuple[tuple[str, ...], float]


def _gauge(
    name: str, text: str, labels: tuple[str, ...] = (), samples: Iterable[_Sample] = (), *, value: float | None = None
) -> Any:
    family = GaugeMetricFamily(f"dynamo_gateway_{name}", text, labels=labels)
    for values, one in samples if value is None else (((), value),):
        family.add_metric(values, float(one))
    return family


def _counter(
    name: str, text: str, labels: tuple[str, ...] = (), samples: Iterable[_Sample] = (), *, value: float | None = None
) -> Any:
    family = CounterMetricFamily(f"dynamo_gateway_{name}", text, labels=labels)
    for values, one in samples if value is None else (((), value),):
        family.add_metric(values, float(one))
    return family
