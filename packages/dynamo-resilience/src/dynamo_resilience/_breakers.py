# SPDX-License-Identifier: Apache-2.0
"""A replica's side of the breakers that all replicas share.

Outcomes go to the store in batches, which judges them; its verdicts come back as answers and as events into a mirror,
and requests ask only that. While the store is away the mirror judges by this replica's own outcomes, beginning with
what the store said last; when the store is back, its list replaces all that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import islice
from typing import Any, Literal, NamedTuple

from ._breaker_table import BreakerTable
from ._config import BreakerPolicy
from ._errors import StoreUnavailable
from ._store import BreakerState, Claim, Event, Report, Store, StoreStatus

__all__ = ["BreakerStats", "Breakers", "Outcome", "Target"]

_log = logging.getLogger(__name__)

#: Good outcomes wait this long for others: they only dilute, and nobody waits for them.
_BATCH_S = 0.02
#: The least time between two batches that a bad outcome hurries, so that a storm of errors is none for the store.
_HURRY_S = 0.005
#: Sending takes at most one part in this many of the time: a store with much to do hears from everybody more rarely.
_PACE = 20
#: Most targets in one batch: the store does nothing else meanwhile.
_TARGETS = 200
#: After a refused claim, for the difference of two clocks.
_REFUSED_MS = 50
#: Between two tries to read the list of a store that is up but did not give it.
_AGAIN_S = 0.1


class Outcome(IntEnum):
    """How a request ended, as far as it speaks for or against a target.

    Attributes:
        OK: a sound answer in time.
        ERROR: a fault of the target: 5xx, a reset, an error in the stream.
        TIMEOUT: no first byte in time, or a stall.
        SLOW_FIRST: sound, but its first token was slow.
        SLOW_TOKENS: sound, but its tokens were slow.
        IGNORED: a client's fault, a limit, a rejection, a cancellation: says nothing about the target.
    """

    OK = 0
    ERROR = 1
    TIMEOUT = 2
    SLOW_FIRST = 3
    SLOW_TOKENS = 4
    IGNORED = 5


class _Parts(NamedTuple):
    site: str
    model: str
    part: str = ""


class Target(_Parts):
    """What a breaker guards. Keep it: its strings are built once.

    Attributes:
        site: the site's name.
        model: the model's.
        part: "" for all of the site, `frontend=URL` or `worker=ID` for a part of it.
    """

    @cached_property
    def key(self) -> str:
        """Its name in the store. The model comes last, because only it may hold a blank."""
        return f"{self.site} {self.part or '*'} {self.model}"

    @cached_property
    def group(self) -> str:
        """What it is one of: all sites of the model, or all parts of that kind of the site and model."""
        kind = self.part.partition("=")[0]
        return f"{self.site} {kind} {self.model}" if kind else f"* site {self.model}"


@dataclass
class BreakerStats:
    """Counters since the start.

    Attributes:
        transitions: changes of state that this replica learnt of or made.
        reports: batches that the store took; `dropped` those that it did not.
        outcomes: outcomes counted; `stale` those left out because the breaker has moved since their request began.
        probes: half-open probes that it was granted.
    """

    transitions: int = 0
    reports: int = 0
    dropped: int = 0
    outcomes: int = 0
    stale: int = 0
    probes: int = 0


class _Counts:
    __slots__ = ("by_outcome", "target")

    def __init__(self, target: Target) -> None:
        self.target = target
        self.by_outcome = [0, 0, 0, 0, 0]


class Breakers:
    """The breakers as one replica sees them. All of it runs on one event loop.

    Args:
        store: where they are shared; its owner starts and closes it.
        policy: None switches breakers off: everything is closed.
        clock: seconds, monotonic; also that of `started` in `record`.
    """

    def __init__(self, store: Store, policy: BreakerPolicy | None, clock: Callable[[], float]) -> None:
        self.stats = BreakerStats()
        self._store = store
        self._policy = policy
        self._clock = clock
        self._table = BreakerTable(self._moved)
        self._members: dict[str, int] = {}
        self._pending: dict[str, _Counts] = {}
        self._probes: list[tuple[Target, Outcome, int]] = []
        self._hurry = False
        self._timer: asyncio.TimerHandle | None = None
        self._flight: asyncio.Task[None] | None = None
        self._flushed = 0.0  # when the last batch was sent, by the event loop's clock
        self._pace_s = _BATCH_S
        self._claims: dict[str, asyncio.Task[int]] = {}
        self._local = True  # until the store's list was read
        self._outages = 0
        self._syncing: asyncio.Task[None] | None = None
        self._held: list[BreakerState] = []  # events that came while the list was read
        self._running = False

    @property
    def local(self) -> bool:
        """Whether it goes by this replica's own outcomes, because the store is away."""
        return self._local

    async def start(self) -> None:
        """Listen to the store and read its list; without a store it begins on its own."""
        self._running = True
        self._store.listen(self._event)
        self._sync_soon()
        if self._syncing is not None:
            await asyncio.wait([self._syncing], timeout=1.0)

    async def close(self) -> None:
        """Send what is left, and stop."""
        if self._flight is not None:
            await asyncio.wait([self._flight])
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pending or self._probes:
            await self._flush()
        self._running = False
        self._store.unlisten(self._event)
        tasks: list[asyncio.Task[Any]] = list(self._claims.values())
        tasks += [one for one in (self._syncing, self._flight) if one is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._timer is not None:
            self._timer.cancel()

    def update(self, policy: BreakerPolicy | None) -> None:
        """Go by another policy from now on."""
        was, self._policy = self._policy, policy
        if policy is None:
            self._table.clear()
            self._pending.clear()
            self._probes.clear()
        elif was is None:
            self._local = True
            self._sync_soon()

    def members(self, group: str, count: int) -> None:
        """Say how many targets a group has; one that nothing was said of has one, which never opens."""
        self._members[group] = count

    def state(self, target: Target) -> Literal["closed", "open", "due"]:
        """Return whether requests may go there; `due`: only the one that `claim` grants."""
        breaker = self._table.get(target.key)
        if breaker is None or breaker.state == "closed":
            return "closed"
        return "due" if self._clock() * 1000 >= breaker.until else "open"

    def remaining(self, target: Target) -> float:
        """Return in how many seconds a probe may be claimed; 0 where it may now, and where it is closed."""
        breaker = self._table.get(target.key)
        if breaker is None or breaker.state == "closed":
            return 0.0
        return max(0.0, breaker.until / 1000 - self._clock())

    async def claim(self, target: Target) -> int:
        """Ask for the one probe of a target that is due; return its number, 0 where it is not granted.

        Whoever is granted a probe has to `record` its end, whatever it is: until then nobody gets another, up to the
        policy's `probe_s`.
        """
        if self._policy is None or target.key in self._claims or not self._running:
            return 0
        task = asyncio.ensure_future(self._claim(target, self._policy))
        self._claims[target.key] = task
        task.add_done_callback(lambda _: self._claims.pop(target.key, None))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda done: self._unclaimed(target, done))
            raise

    def record(self, target: Target, outcome: Outcome, started: float, probe: int = 0) -> None:
        """Count how a request ended.

        Args:
            target: where it went.
            outcome: how it ended.
            started: when it was sent. What was sent before the breaker's last transition says nothing about now.
            probe: its number, where it was the probe.
        """
        if self._policy is None:
            return
        if probe:
            self._probes.append((target, outcome, probe))
            self._arm(hurry=True)
            return
        if outcome == Outcome.IGNORED:
            return
        key = target.key
        breaker = self._table.get(key)
        if breaker is not None and started * 1000 < breaker.changed:
            self.stats.stale += 1
            return
        counts = self._pending.get(key)
        if counts is None:
            counts = self._pending[key] = _Counts(target)
        counts.by_outcome[outcome] += 1
        self.stats.outcomes += 1
        if outcome:
            if not self._hurry:
                self._arm(hurry=True)
        elif self._timer is None and self._flight is None:
            self._arm(hurry=False)

    def snapshot(self) -> list[dict[str, Any]]:
        """Return every breaker that something is known of, for `/state`; counts are this replica's own."""
        now_ms = self._now()
        shown = []
        for one in sorted(self._table.all(), key=lambda one: one.target):
            sums = [sum(column) for column in zip(*one.window, strict=True)] or [0] * 6
            shown.append(
                {
                    "target": one.target,
                    "group": one.group,
                    "state": one.state,
                    "remaining_s": one.seen(now_ms).remaining_ms / 1000,
                    "opens": one.opens,
                    "reason": one.reason,
                    "outcomes": sums[1],
                    "errors": sums[2],
                    "timeouts": sums[3],
                    "slow_first": sums[4],
                    "slow_tokens": sums[5],
                }
            )
        return shown

    def _now(self) -> int:
        return int(self._clock() * 1000)

    # Outcomes

    def _arm(self, *, hurry: bool) -> None:
        """Set the time of the next batch; while one is under way, the next follows it."""
        self._hurry = self._hurry or hurry
        if self._flight is not None or not self._running:
            return
        loop = asyncio.get_running_loop()
        at = loop.time()
        at = max(at, self._flushed + _HURRY_S) if self._hurry else at + self._pace_s
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(at, self._take_off)

    def _take_off(self) -> None:
        self._timer = None
        self._flight = asyncio.ensure_future(self._flush())
        self._flight.add_done_callback(self._landed)

    def _landed(self, flight: asyncio.Task[None]) -> None:
        self._flight = None
        if not flight.cancelled() and (fault := flight.exception()) is not None:
            _log.error("a batch of outcomes was lost", exc_info=fault)
        if self._pending or self._probes:
            self._arm(hurry=self._hurry)

    async def _flush(self) -> None:
        policy = self._policy
        if policy is None:
            return
        reports = self._batch()
        if self._local:
            self._judge(reports, policy)
            if self._store.up:
                self._sync_soon()
            return
        loop = asyncio.get_running_loop()
        self._flushed = loop.time()
        try:
            states = await self._store.report(reports, policy)
        except StoreUnavailable as error:
            self.stats.dropped += 1
            self._away(str(error))
            self._judge(reports, policy)
            return
        self.stats.reports += 1
        self._pace_s = min(1.0, max(_BATCH_S, _PACE * (loop.time() - self._flushed)))
        if self._local:  # the store went away meanwhile, or the policy
            self._judge(reports, policy)
            return
        now_ms = self._now()
        for report, state in zip(reports, states, strict=True):
            self._table.count(now_ms, report, policy)
            self._learn(now_ms, state)

    def _batch(self) -> list[Report]:
        """Take what waits, at most `_TARGETS` of them, and the probes first."""
        reports = [self._probed(*one) for one in self._probes[:_TARGETS]]
        del self._probes[:_TARGETS]
        for key in list(islice(self._pending, _TARGETS - len(reports))):
            waiting = self._pending.pop(key)
            group = waiting.target.group
            ok, errors, timeouts, slow_first, slow_tokens = waiting.by_outcome
            members = self._members.get(group, 1)
            reports.append(Report(key, group, members, ok, errors, timeouts, slow_first, slow_tokens))
        self._hurry = self._hurry and bool(self._pending or self._probes)
        return reports

    def _probed(self, target: Target, outcome: Outcome, probe: int) -> Report:
        members = self._members.get(target.group, 1)
        if outcome == Outcome.IGNORED:  # it ended without a verdict: given back
            return Report(target.key, target.group, members, probe=-probe)
        counts = [int(outcome == one) for one in range(Outcome.IGNORED)]
        ok, errors, timeouts, slow_first, slow_tokens = counts
        return Report(
            target.key,
            target.group,
            members,
            ok,
            errors,
            timeouts,
            slow_first,
            slow_tokens,
            probe,
            outcome == Outcome.OK,
        )

    def _judge(self, reports: list[Report], policy: BreakerPolicy) -> None:
        now_ms = self._now()
        for report in reports:
            self._table.report(now_ms, report, policy)

    # Probes

    async def _claim(self, target: Target, policy: BreakerPolicy) -> int:
        claim = Claim(target.key, target.group)
        state: BreakerState | None = None
        if not self._local:
            try:
                state = await self._store.claim(claim, policy)
            except StoreUnavailable as error:
                self._away(str(error))
        now_ms = self._now()
        if state is None:
            state = self._table.claim(now_ms, claim, policy)
        else:
            self._learn(now_ms, state)
            if not state.probe:
                self._table.postpone(target.key, now_ms + _REFUSED_MS)
        self.stats.probes += state.probe > 0
        return state.probe

    def _unclaimed(self, target: Target, task: asyncio.Task[int]) -> None:
        """Give back the probe of a request that was cancelled while it asked for one."""
        if not task.cancelled() and task.exception() is None and task.result():
            self.record(target, Outcome.IGNORED, self._clock(), task.result())

    # What the store says

    def _event(self, event: Event) -> None:
        if self._policy is None or not self._running:
            return
        if isinstance(event, BreakerState):
            if not self._local:
                self._learn(self._now(), event)
            elif self._syncing is not None:
                self._held.append(event)
        elif isinstance(event, StoreStatus):
            if event.up:
                self._sync_soon()
            else:
                self._outages += 1
                self._away("it was lost")

    def _learn(self, now_ms: int, state: BreakerState) -> None:
        """Mirror a state. It is dated from now: a probe that is claimed too late harms less than one refused."""
        if self._policy is not None and self._table.adopt(now_ms, state, self._policy):
            self._moved(state)

    def _moved(self, state: BreakerState) -> None:
        self.stats.transitions += 1
        if state.state == "open":
            _log.warning("breaker %s: open for %d ms (%s)", state.target, state.remaining_ms, state.reason)
        else:
            _log.info("breaker %s: %s", state.target, state.state)

    def _away(self, why: str) -> None:
        if not self._local:
            self._local = True
            _log.warning("breakers go by this replica's own outcomes, the store is away: %s", why)
            if self._store.up:  # it failed once only, and no event will tell that it is back
                self._sync_soon()

    def _sync_soon(self) -> None:
        if self._local and self._syncing is None and self._policy is not None and self._running:
            self._syncing = asyncio.ensure_future(self._sync())
            self._syncing.add_done_callback(self._synced)

    def _synced(self, task: asyncio.Task[None]) -> None:
        self._syncing = None
        if not task.cancelled() and (fault := task.exception()) is not None:
            _log.error("the store's list of breakers could not be read", exc_info=fault)

    async def _sync(self) -> None:
        """Read the store's list, and go by the store from then on."""
        while True:
            outages = self._outages
            self._held.clear()
            try:
                states = await self._store.breakers()
            except StoreUnavailable:
                states = None
            if states is not None and outages == self._outages:
                break
            if not self._store.up:
                return  # its return is an event
            await asyncio.sleep(_AGAIN_S)
        policy = self._policy
        if policy is None:
            return
        now_ms = self._now()
        listed = {state.target for state in states}
        for breaker in self._table.all():
            if breaker.target not in listed:
                closed = BreakerState(breaker.target, breaker.group, "closed", 0, breaker.opens, "", 0)
                states.append(closed)
        for state in states:
            if self._table.adopt(now_ms, state, policy, force=True):
                self._moved(state)
        self._local = False
        for event in self._held:
            self._learn(now_ms, event)
        self._held.clear()
        _log.info("breakers go by the store, %d not closed", len(listed))
