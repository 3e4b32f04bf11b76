# SPDX-License-Identifier: Apache-2.0
"""Breakers as a pure table: time comes in, nothing goes out.

The in-process store is one, and each replica keeps one as its mirror of the shared store, by which it goes on when that
is away. `lua/breaker.lua` does the same in Redis, line by line; a test runs both with the same operations.

A breaker is closed until, in the window, one kind of failure reaches its share of all outcomes; then it is open for a
time that doubles with each opening in a row. When that is up, one claim makes it half-open and gets the number of the
only probe; the probe's end closes it or opens it again. What was not heard of for long is forgotten, which is closed.

The guard: a group never has more than its share open or half-open, and never its last member.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from ._config import BreakerPolicy
from ._store import BreakerState, Claim, Report

__all__ = ["Breaker", "BreakerTable"]

_SLICES = 10
#: How often what was not heard of for long is dropped: workers come and go, each under a name of its own.
_SWEEP_MS = 10_000
_State = Literal["closed", "open", "half_open"]


class Breaker:
    """One target's breaker; for reading only, outside the table. Times are milliseconds of the table's clock.

    Attributes:
        target, group: as in `Report`.
        state: `closed`, `open` or `half_open`.
        until: when a probe may be claimed, or when the running one counts as lost.
        opens: openings in a row.
        reason: why it is not closed.
        version: grows with every transition; of a half-open one it is also the probe's number.
        changed: when the last transition was.
        expires: when it is forgotten unless something is heard of it.
        window: slices, oldest first: start, outcomes, errors, timeouts, slow first tokens, slow tokens.
    """

    __slots__ = ("changed", "expires", "group", "opens", "reason", "state", "target", "until", "version", "window")

    def __init__(self, target: str, group: str) -> None:
        self.target = target
        self.group = group
        self.state: _State = "closed"
        self.until = 0
        self.opens = 0
        self.reason = ""
        self.version = 0
        self.changed = 0
        self.expires = 0
        self.window: list[list[int]] = []

    def seen(self, now_ms: int, probe: int = 0) -> BreakerState:
        """Return it as others see it now."""
        remaining = 0 if self.state == "closed" else max(0, self.until - now_ms)
        return BreakerState(
            self.target, self.group, self.state, remaining, self.opens, self.reason, self.version, probe
        )


class BreakerTable:
    """The breakers of all targets. `now_ms` never goes back from one call to the next.

    Args:
        moved: called with each breaker that changes its state by a report or a claim (`adopt` calls nobody), before
            the call that changed it returns.
    """

    def __init__(self, moved: Callable[[BreakerState], None] | None = None) -> None:
        self._moved = moved
        self._all: dict[str, Breaker] = {}
        self._away: dict[str, Breaker] = {}  # those that are not closed
        self._sweep_at = 0

    def get(self, target: str) -> Breaker | None:
        """Return a target's breaker, None for one that nothing is known of (which is closed)."""
        return self._all.get(target)

    def all(self) -> list[Breaker]:
        """Return the breakers of all targets that something is known of."""
        return list(self._all.values())

    def report(self, now_ms: int, report: Report, policy: BreakerPolicy) -> BreakerState:
        """Count outcomes, move the breaker where they say so, and return it.

        A report that ends the running probe closes the breaker or opens it again; one with the negative of its number
        gives the probe back unused: the next claim gets one at once. Any other number of a probe says nothing.
        """
        breaker = self._count(now_ms, report, policy)
        if breaker.state == "half_open" and abs(report.probe) == breaker.version:
            if report.probe < 0:
                self._move(now_ms, breaker, "open", now_ms, breaker.reason)
            elif report.probe_ok:
                breaker.window = []
                self._move(now_ms, breaker, "closed", 0, "")
            else:
                self._open(now_ms, breaker, "probe", policy)
        elif breaker.state == "closed":
            reason = _verdict(breaker, policy)
            if reason and self._guard(now_ms, report, policy):
                if breaker.opens and now_ms - breaker.changed >= _ms(policy.max_open_s):
                    breaker.opens = 0
                self._open(now_ms, breaker, reason, policy)
        return breaker.seen(now_ms)

    def claim(self, now_ms: int, claim: Claim, policy: BreakerPolicy) -> BreakerState:
        """Grant the half-open probe, or say why not by the state; `probe` of the answer is above 0 where granted."""
        breaker = self._known(now_ms, claim.target)
        if breaker is None:
            return Breaker(claim.target, claim.group).seen(now_ms)
        if breaker.state == "closed" or now_ms < breaker.until:
            return breaker.seen(now_ms)
        breaker.expires = now_ms + _keep_ms(policy)
        self._move(now_ms, breaker, "half_open", now_ms + _ms(policy.probe_s), breaker.reason)
        return breaker.seen(now_ms, probe=breaker.version)

    def states(self, now_ms: int) -> list[BreakerState]:
        """Return what is not closed."""
        self._sweep(now_ms)
        return [breaker.seen(now_ms) for breaker in self._away.values()]

    def count(self, now_ms: int, report: Report, policy: BreakerPolicy) -> None:
        """Count outcomes and move nothing: another table judges them."""
        self._count(now_ms, report, policy)

    def adopt(self, now_ms: int, state: BreakerState, policy: BreakerPolicy, *, force: bool = False) -> bool:
        """Take over what another table says and return whether it is news. What is older changes nothing.

        With `force` versions do not matter: they may be another store's.
        """
        breaker = self._known(now_ms, state.target)
        if breaker is None:
            if state.version == 0:
                return False
            breaker = self._all[state.target] = Breaker(state.target, state.group)
        elif state.version < breaker.version and not force:
            return False
        news = breaker.state != state.state or (breaker.version != state.version and not force)
        if news:
            breaker.changed = now_ms
            if state.state == "closed" and breaker.state != "closed":
                breaker.window = []
        breaker.group = state.group
        breaker.state = state.state
        breaker.until = now_ms + state.remaining_ms
        breaker.opens = state.opens
        breaker.reason = state.reason
        breaker.version = state.version
        breaker.expires = now_ms + _keep_ms(policy)
        self._file(breaker)
        return news

    def postpone(self, target: str, until_ms: int) -> None:
        """Let no probe of a target be due before `until_ms`."""
        breaker = self._away.get(target)
        if breaker is not None:
            breaker.until = max(breaker.until, until_ms)

    def clear(self) -> None:
        """Forget everything."""
        self._all.clear()
        self._away.clear()

    def _sweep(self, now_ms: int) -> None:
        self._sweep_at = now_ms + _SWEEP_MS
        for breaker in [one for one in self._all.values() if now_ms >= one.expires]:
            self._drop(breaker)

    def _known(self, now_ms: int, target: str) -> Breaker | None:
        if now_ms >= self._sweep_at:
            self._sweep(now_ms)
        breaker = self._all.get(target)
        if breaker is not None and now_ms >= breaker.expires:
            self._drop(breaker)
            return None
        return breaker

    def _drop(self, breaker: Breaker) -> None:
        del self._all[breaker.target]
        self._away.pop(breaker.target, None)

    def _file(self, breaker: Breaker) -> None:
        if breaker.state == "closed":
            self._away.pop(breaker.target, None)
        else:
            self._away[breaker.target] = breaker

    def _count(self, now_ms: int, report: Report, policy: BreakerPolicy) -> Breaker:
        breaker = self._known(now_ms, report.target)
        if breaker is None:
            breaker = self._all[report.target] = Breaker(report.target, report.group)
        breaker.group = report.group
        breaker.expires = now_ms + _keep_ms(policy)
        length = _slice_ms(policy)
        start = now_ms - now_ms % length
        window = breaker.window
        while window and window[0][0] <= start - _SLICES * length:
            del window[0]
        bad = report.errors + report.timeouts + report.slow_first + report.slow_tokens
        if report.ok + bad:
            # Replicas may differ in policy for a while: a slice never begins before the one before it.
            if not window or window[-1][0] < start:
                window.append([start, 0, 0, 0, 0, 0])
            last = window[-1]
            last[1] += report.ok + bad
            last[2] += report.errors
            last[3] += report.timeouts
            last[4] += report.slow_first
            last[5] += report.slow_tokens
        return breaker

    def _guard(self, now_ms: int, report: Report, policy: BreakerPolicy) -> bool:
        """Return whether one more of the group may open."""
        away = sum(one.group == report.group and now_ms < one.expires for one in self._away.values())
        share = math.floor(policy.max_open_share * report.members)
        return away + 1 <= min(max(1, share), report.members - 1)

    def _open(self, now_ms: int, breaker: Breaker, reason: str, policy: BreakerPolicy) -> None:
        breaker.opens += 1
        doubled = _ms(policy.open_s) * 2 ** min(breaker.opens - 1, 30)
        self._move(now_ms, breaker, "open", now_ms + min(doubled, _ms(policy.max_open_s)), reason)

    def _move(self, now_ms: int, breaker: Breaker, state: _State, until: int, reason: str) -> None:
        breaker.state = state
        breaker.until = until
        breaker.reason = reason
        # From the clock, so that it rises even over a record that was forgotten, or a store that was.
        breaker.version = max(breaker.version + 1, now_ms)
        breaker.changed = now_ms
        self._file(breaker)
        if self._moved is not None:
            self._moved(breaker.seen(now_ms))


def _verdict(breaker: Breaker, policy: BreakerPolicy) -> str:
    """Return why the window opens it; "" where it does not."""
    total = sum(one[1] for one in breaker.window)
    if total < policy.min_requests:
        return ""
    for index, reason, rate in (
        (2, "errors", policy.error_rate),
        (3, "timeouts", policy.timeout_rate),
        (4, "slow_first", policy.slow_first_rate),
        (5, "slow_tokens", policy.slow_tokens_rate),
    ):
        if sum(one[index] for one in breaker.window) / total >= rate:
            return reason
    return ""


def _ms(seconds: float) -> int:
    return max(1, math.floor(seconds * 1000 + 0.5))


def _slice_ms(policy: BreakerPolicy) -> int:
    return max(1, math.floor(policy.window_s * 1000 / _SLICES + 0.5))


def _keep_ms(policy: BreakerPolicy) -> int:
    """How long nothing may be heard of a target before it is forgotten: longer than anything it waits for."""
    return 10 * _ms(policy.window_s) + _ms(policy.max_open_s) + _ms(policy.probe_s)
