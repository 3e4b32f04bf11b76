# SPDX-License-Identifier: Apache-2.0
"""What Prometheus reads. Decisions count in plain integers; everything else is read when it is asked for.

Series with a worker's name are there while the worker is, those of a replica while the replica is.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from ._types import EXTERNAL_TIERS, Decision, Role, WorkerId

__all__ = ["Metrics"]

_log = logging.getLogger(__name__)

_PREFIX = "dynamo_router_ext_"
#: Upper bounds of the buckets, in seconds; terms of decode are milliseconds, those of prefill up to minutes.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_BOUNDS = (*map(str, _SECONDS), "+Inf")
_TERMS = ("wait", "fetch", "work", "first_token", "token", "others", "risk", "cost")
_STATES = ("in", "out", "probing")
#: The longest that a scrape waits for the event loop, in seconds.
_PATIENCE_S = 5.0


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
        for bound, count in zip(_BOUNDS, self.counts, strict=True):
            below += count
            buckets.append((bound, below))
        return buckets


class _Counts:
    """What was counted of the decisions in one role."""

    __slots__ = ("aborts", "early", "late", "regret", "retries", "terms")

    def __init__(self) -> None:
        self.terms = tuple(_Histogram() for _ in _TERMS)
        self.late = _Histogram()
        self.early = _Histogram()
        self.regret = _Histogram()
        self.retries = 0
        self.aborts = 0


class Metrics:
    """A replica's metrics.

    What counts is called on the router's event loop; `expfmt` may be called from any thread.
    """

    def __init__(self) -> None:
        self._roles: dict[Role, _Counts] = {}
        self._decisions: dict[tuple[Role, WorkerId, str], int] = {}
        self._tokens = dict.fromkeys(("device", *EXTERNAL_TIERS, "computed"), 0)
        self._state: Callable[[], Mapping[str, Any]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.get_ident()

    def watch(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """Read `Router.state` at each scrape, on the event loop that runs here."""
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def decided(self, tokens: int, decision: Decision, again: bool) -> None:
        """Count a decision over a prompt of `tokens`; `again`: its request was placed in this role before."""
        role, terms = decision.role, decision.terms
        key = (role, decision.worker, decision.note.partition(" ")[0])
        self._decisions[key] = self._decisions.get(key, 0) + 1
        counts = self._counts(role)
        wait, fetch, work, first_token, token, others, risk, cost = counts.terms
        wait.add(terms.wait_s)
        fetch.add(terms.fetch_s)
        work.add(terms.work_s)
        first_token.add(terms.first_token_s)
        token.add(terms.token_s)
        others.add(terms.others_s)
        risk.add(terms.risk_s)
        cost.add(terms.cost_s)
        if again:
            counts.retries += 1
        if role != "decode":
            rest = tokens - terms.device_tokens
            self._tokens["device"] += terms.device_tokens
            for tier, fetched in terms.fetch_tokens.items():
                self._tokens[tier] += fetched
                rest -= fetched
            self._tokens["computed"] += rest

    def measured(self, role: Role, late_s: float, regret_s: float) -> None:
        """Count a first token that came `late_s` after it was expected (or before: negative), and the regret."""
        counts = self._counts(role)
        (counts.late if late_s > 0.0 else counts.early).add(abs(late_s))
        counts.regret.add(regret_s)

    def aborted(self, role: Role) -> None:
        """Count a leg that was given up because its worker stood still or left."""
        self._counts(role).aborts += 1

    def _counts(self, role: Role) -> _Counts:
        counts = self._roles.get(role)
        if counts is None:
            counts = self._roles[role] = _Counts()
        return counts

    def expfmt(self) -> str:
        """Return all of it in Prometheus's text format; nothing, and a line in the log, where the loop is silent."""
        if self._loop is None or threading.get_ident() == self._thread:
            families = self.families()
        else:
            asked: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()
            try:
                self._loop.call_soon_threadsafe(self._answer, asked)
                families = asked.result(_PATIENCE_S)
            except Exception as error:  # also a loop that is closed: nobody may see an exception of ours here
                asked.cancel()
                _log.warning("no metrics of the router: %r", error)
                return ""
        return str(generate_latest(_Collected(families)), "utf-8")

    def _answer(self, asked: concurrent.futures.Future[list[Any]]) -> None:
        if asked.set_running_or_notify_cancel():
            try:
                asked.set_result(self.families())
            except Exception as error:
                asked.set_exception(error)

    def families(self) -> list[Any]:
        """Return all of it as prometheus_client's metric families; only on the event loop."""
        state = None if self._state is None else self._state()
        families = list(self._counted(state))
        if state is not None:
            families += self._seen(state)
        return families

    def _counted(self, state: Mapping[str, Any] | None) -> Iterator[Any]:
        if state is not None:
            there = {worker["id"] for worker in state["workers"]}
            for key in [key for key in self._decisions if key[1] not in there]:
                del self._decisions[key]
        yield _counter(
            "decisions",
            "Placements, by what was special about them: moved, probe, last, or nothing",
            ("role", "worker", "note"),
            (((role, str(worker), note), count) for (role, worker, note), count in self._decisions.items()),
        )
        roles = list(self._roles.items())
        yield _histogram(
            "term_seconds",
            "The terms of the chosen candidates",
            ("role", "term"),
            (((role, term), one) for role, c in roles for term, one in zip(_TERMS, c.terms, strict=True)),
        )
        yield _histogram(
            "first_token_error_seconds",
            "By how much first tokens came later or earlier than expected",
            ("role", "side"),
            (((role, side), one) for role, c in roles for side, one in (("late", c.late), ("early", c.early))),
        )
        yield _histogram(
            "regret_seconds",
            "By how much the chosen candidate's cost, with its measured first token, was above the next one's",
            ("role",),
            (((role,), c.regret) for role, c in roles),
        )
        yield _counter(
            "retries",
            "Placements of a request in a role that it was placed in before",
            ("role",),
            (((role,), c.retries) for role, c in roles),
        )
        yield _counter(
            "aborts",
            "Placements that were given up because the worker stood still or left",
            ("role",),
            (((role,), c.aborts) for role, c in roles),
        )
        yield _counter(
            "prompt_tokens",
            "Tokens of placed prompts, by where they were expected to come from",
            ("source",),
            (((source,), count) for source, count in self._tokens.items()),
        )

    def _seen(self, state: Mapping[str, Any]) -> Iterator[Any]:
        workers = [((worker["role"], str(worker["id"])), worker) for worker in state["workers"]]
        yield _gauge(
            "worker_state",
            "1 for the state that a worker is in",
            ("role", "worker", "state"),
            (((*name, one), float(worker["state"] == one)) for name, worker in workers for one in _STATES),
        )
        for key, text in (
            ("slowness", "How many times as long as the fleet's estimates say a worker takes"),
            ("risk", "The probability that a worker fails the next request"),
        ):
            yield _gauge(f"worker_{key}", text, ("role", "worker"), ((name, worker[key]) for name, worker in workers))
        for key, text in (
            ("prompts", "Prompts that are booked at a worker, over all replicas"),
            ("prompt_s", "Seconds of prompt work that are booked at a worker, as estimated"),
            ("sequences", "Sequences that generate at a worker, over all replicas"),
            ("resident_tokens", "Tokens of KV that booked requests hold at a worker or will"),
        ):
            yield _gauge(
                f"worker_{key.replace('prompt_s', 'prompt_seconds')}",
                text,
                ("role", "worker"),
                ((name, worker["load"][key]) for name, worker in workers),
            )
        yield _gauge(
            "bookings",
            "Requests that are booked, by the replica that carries them",
            ("replica",),
            (((replica,), count) for replica, count in state["bookings"].items()),
        )
        yield _gauge("sessions", "Sessions that are bound to a decoder", (), [((), state["sessions"])])
        yield _gauge("peers", "Other replicas that this one is in step with", (), [((), len(state["peers"]))])


class _Collected:
    """What prometheus_client takes for a registry."""

    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> list[Any]:
        return self._families


_Sample = tuple[tuple[str, ...], float]


def _counter(name: str, text: str, labels: tuple[str, ...], samples: Iterable[_Sample]) -> Any:
    family = CounterMetricFamily(_PREFIX + name, text, labels=labels)
    for values, count in samples:
        family.add_metric(values, count)
    return family


def _gauge(name: str, text: str, labels: tuple[str, ...], samples: Iterable[_Sample]) -> Any:
    family = GaugeMetricFamily(_PREFIX + name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _histogram(
    name: str, text: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], _Histogram]]
) -> Any:
    family = HistogramMetricFamily(_PREFIX + name, text, labels=labels)
    for values, one in samples:
        family.add_metric(values, one.buckets(), one.total)
    return family
