# SPDX-License-Identifier: Apache-2.0
"""The replica's side of leased capacity: what one account of one pool holds here, kept alive and kept honest.

Times: a lease lasts `LEASE_SHARE` of `ttl_s` in the store, and a little less here, counted from before the request that
renewed it was sent. The rest of `ttl_s` is for the others to notice that it has ended, so that a dead replica's
capacity is back within `ttl_s`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from math import inf
from typing import Any

from ._errors import StoreUnavailable
from ._store import Event, Held, LeaseNotice, LeaseReply, LeaseRequest, Store, StoreStatus, within

__all__ = ["Lease", "LeaseStats"]

_log = logging.getLogger(__name__)

#: How long a lease lasts in the store, as a share of `ttl_s`.
LEASE_SHARE = 0.95
#: How much of that the replica believes in: clocks differ in speed.
_BELIEVED = 0.98
#: When a lease is renewed, and how often a replica that is short asks again, as shares of `ttl_s`.
_RENEW, _POLL = 0.3, 0.04
#: How long an operation may take at most, as a share of `ttl_s`: an answer that comes later is about the past.
_ANSWER = 0.5
#: The least of such a time (seconds).
_LEAST_S = 0.02
#: What a notice adds so that replicas do not all ask in the same instant; and the least time from one operation to
#: the next that a notice causes (seconds).
_JITTER_S, _PACE_S = 0.002, 0.01
#: How long a failed operation waits for the next one, at most (seconds).
_RETRY_S = 1.0
#: How long `close` may take (seconds).
_CLOSE_S = 0.5


class LeaseStats:
    """Counters since the start.

    Attributes:
        operations: answered by the store.
        failures: operations that the store did not answer.
        granted: blocks that were granted.
        released: blocks that were given back.
        lost: blocks that the store had given to somebody else, or had forgotten and could not grant again.
        outages: how often it held on without the store.
    """

    __slots__ = ("failures", "granted", "lost", "operations", "outages", "released")

    def __init__(self) -> None:
        self.operations = self.failures = self.granted = self.released = self.lost = self.outages = 0


class Lease:
    """The blocks that one account of a pool holds on this replica.

    Everything but `start` and `close` is synchronous; operations on the store happen in one task, one at a time. What
    `held`, `blocks` and `token` say may be used while `valid(now)`; capacity that was admitted on blocks which are no
    longer there is the caller's debt.

    Through an outage of the store the blocks stay usable: once an operation that was begun after the lease had ended
    (or in the same outage) finds no store, they are held for as long again. A replica that was merely paused has no
    such failed operation, so it asks before it uses anything.

    Args:
        store: where the leases are.
        pool: the pool's name.
        account: `serverless`, or a reserved tenant's name.
        holder: this process; no other one ever uses the same name.
        clock: seconds; it also counts while the machine is suspended.
        own: the account's own blocks, first and one past the last.
        lent: ranges of others that it may borrow from.
        lender: whether others may borrow from `own`.
        ttl_s: a dead replica's blocks are back after this long.
    """

    def __init__(
        self,
        store: Store,
        pool: str,
        account: str,
        holder: str,
        clock: Callable[[], float],
        *,
        own: tuple[int, int],
        lent: tuple[tuple[int, int], ...] = (),
        lender: bool = False,
        ttl_s: float = 5.0,
    ) -> None:
        self.pool = pool
        self.account = account
        self.holder = holder
        self.stats = LeaseStats()
        self._store = store
        self._clock = clock
        self._own = own
        self._lent = lent
        self._lender = lender
        self._ttl_s = ttl_s
        self._held: dict[int, str] = {}
        self._releasing: dict[int, str] = {}
        self._recalled: frozenset[int] = frozenset()
        self._surplus = 0
        self._order: tuple[int, ...] = ()
        self._borrowed = 0
        self._token = ""
        self._want = self._head = 0
        self._sent_want = self._sent_head = 0
        self._valid_until = -inf
        self._outage = False
        self._failing = False
        self._epoch = 0
        self._grace_until = -inf
        self._callbacks: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._busy = False
        self._closing = False
        self._sent_at = -inf
        self._asked = False
        self._next = inf

    # What admission asks, often.

    def valid(self, now: float) -> bool:
        """Return whether what is held may be used now; False from the end of the lease until an operation has ended."""
        return now < self._valid_until

    def held(self, now: float) -> int:
        """Return how many blocks may be used now, borrowed ones included."""
        return len(self._held) if now < self._valid_until else 0

    def borrowed(self, now: float) -> int:
        """Return how many of those are others' (outside `own`)."""
        return self._borrowed if now < self._valid_until else 0

    def blocks(self, now: float) -> tuple[int, ...]:
        """Return the blocks that may be used now, in the order in which `shrink` gives them back.

        The order: recalled ones, then borrowed ones, then the rest; the highest first in each.
        """
        return self._order if now < self._valid_until else ()

    @property
    def token(self) -> str:
        """The newest fencing token of what is held, `EPOCH.COUNTER`; empty when nothing is."""
        return self._token

    @property
    def surplus(self) -> int:
        """How many blocks to give back as soon as they are idle, although requests wait here: others are shorter."""
        return self._surplus

    @property
    def recalled(self) -> int:
        """How many blocks their owner wants back at once."""
        return len(self._recalled)

    @property
    def outage(self) -> bool:
        """Whether it goes on with what it held because the store does not answer."""
        return self._outage

    # What admission tells.

    def want(self, n: int, head: int = 0) -> None:
        """Say how many blocks there is use for in all, and how many the request at the head of the queue needs in all.

        Cheap. The store is asked at once when more is needed than is held, and soon for any other change.
        """
        if n == self._want and head == self._head:
            return
        self._want, self._head = n, head
        self._plan()

    def shrink(self, n: int) -> tuple[int, ...]:
        """Give back `n` idle blocks and return which: they count as gone at once, the store is told at once.

        While the store does not answer nothing is given back, as nothing could be had again.
        """
        if n <= 0 or self._failing or self._clock() >= self._valid_until:
            return ()
        given = self._order[:n]
        for block in given:
            self._releasing[block] = self._held.pop(block)
        self._surplus = max(0, self._surplus - sum(block not in self._recalled for block in given))
        self._index(self._recalled)
        self.stats.released += len(given)
        self._plan()
        return given

    def update(self, own: tuple[int, int], lent: tuple[tuple[int, int], ...], lender: bool, ttl_s: float) -> None:
        """Use other ranges and another TTL from the next operation on, which follows at once."""
        if (own, lent, lender, ttl_s) == (self._own, self._lent, self._lender, self._ttl_s):
            return
        self._own, self._lent, self._lender, self._ttl_s = own, lent, lender, ttl_s
        self._index(self._recalled)
        self._sync_at(self._clock())

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call back, on the event loop, when blocks came or went, when what should be given back changed, or when what
        is held may be used again.
        """
        self._callbacks.append(callback)

    async def start(self) -> None:
        """Begin to keep the lease; nothing is asked of the store before something is wanted."""
        if self._closing:
            return
        self._store.listen(self._heard)
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"lease {self.pool} {self.account}")

    async def close(self) -> None:
        """Give everything back, within half a second; what the store could not be told comes back with the TTL."""
        self._closing = True
        self._valid_until = -inf
        self._want = self._head = 0
        self._store.unlisten(self._heard)
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=_CLOSE_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def snapshot(self) -> dict[str, Any]:
        """Return its state for people; times in milliseconds from now."""
        now = self._clock()
        return {
            "pool": self.pool,
            "account": self.account,
            "held": self.held(now),
            "borrowed": self.borrowed(now),
            "want": self._want,
            "head": self._head,
            "surplus": self._surplus,
            "recalled": len(self._recalled),
            "token": self._token,
            "epoch": self._epoch,
            "grace_ms": max(0, int((self._grace_until - now) * 1000)) if self._grace_until > now else 0,
            "valid_ms": int((self._valid_until - now) * 1000) if self._valid_until > now else 0,
            "outage": self._outage,
            **{name: getattr(self.stats, name) for name in LeaseStats.__slots__},
        }

    # The task.

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._closing:
            wait = self._next - self._clock()
            if wait <= 0:
                await self._operate()
                continue
            self._wake.clear()
            timer = None if wait == inf else loop.call_later(wait, self._wake.set)
            await self._wake.wait()
            if timer is not None:
                timer.cancel()
        self._releasing.update(self._held)
        self._held.clear()
        self._index(frozenset())
        if self._asked:
            await self._operate()

    async def _operate(self) -> None:
        sent = self._clock()
        # After the end of the lease others may have had the blocks. Without tokens the store gives back what nobody
        # has taken, but after a change of epoch, when it cannot know, nothing.
        valid = sent < self._valid_until
        request = LeaseRequest(
            pool=self.pool,
            account=self.account,
            holder=self.holder,
            ttl_ms=max(1, int(self._ttl_s * LEASE_SHARE * 1000)),
            own=self._own,
            lent=self._lent,
            lender=self._lender,
            keep=tuple(Held(block, token if valid else "") for block, token in self._held.items()),
            release=tuple(Held(block, token) for block, token in self._releasing.items()),
            want=self._want,
            head=self._head,
            epoch=self._epoch,
        )
        self._next, self._sent_at, self._busy, self._asked = inf, sent, True, True
        try:
            reply = await within(self._ttl_s * _ANSWER, self._store.lease(request))
        except Exception as error:  # the lease goes on: without it nothing would be admitted ever again
            if not isinstance(error, (StoreUnavailable, asyncio.TimeoutError)):
                _log.exception("lease of %s, %s", self.pool, self.account)
            self._busy = False
            changed = self._failed(sent, request.ttl_ms)
        else:
            self._busy = False
            changed = self._answered(sent, request, reply)
        self._plan()
        if changed and not self._closing:
            for callback in self._callbacks:
                try:
                    callback()
                except Exception:  # the same
                    _log.exception("lease of %s, %s", self.pool, self.account)

    def _answered(self, sent: float, request: LeaseRequest, reply: LeaseReply) -> bool:
        before = (self._order, self._surplus, self._recalled, self._outage, self.valid(self._clock()))
        self.stats.operations += 1
        self._failing = self._outage = False
        self._epoch = reply.epoch
        self._grace_until = sent + reply.grace_ms / 1000
        self._sent_want, self._sent_head = request.want, request.head
        for block, token in request.release:
            if self._releasing.get(block) == token:
                del self._releasing[block]
        kept = self._held  # without what was given back while the store was asked
        self._held = {}
        for block, token in reply.held:
            if block in self._releasing or self._closing:
                self._releasing[block] = token
            else:
                self._held[block] = token
                self.stats.granted += kept.get(block) != token
        self.stats.lost += sum(block not in self._held for block in kept)
        self._surplus = reply.surplus
        self._valid_until = -inf if self._closing else sent + request.ttl_ms / 1000 * _BELIEVED
        self._index(frozenset(reply.recalled))
        return before != (self._order, self._surplus, self._recalled, self._outage, self.valid(self._clock()))

    def _failed(self, sent: float, ttl_ms: int) -> bool:
        self.stats.failures += 1
        self._failing = True
        believed = ttl_ms / 1000 * _BELIEVED
        # An operation during which this process was paused proves nothing about the store.
        if self._closing or self._clock() >= sent + believed or not self._held:
            return False
        if not self._outage and sent < self._valid_until:
            return False
        back = not self.valid(self._clock())
        self._valid_until = sent + believed
        began, self._outage = not self._outage, True
        self.stats.outages += began
        return began or back

    def _index(self, recalled: frozenset[int]) -> None:
        """Keep in step what is derived from the blocks."""
        first, last = self._own
        held = self._held
        self._recalled = recalled & held.keys()
        self._order = tuple(
            sorted(held, key=lambda block: (block in recalled, not first <= block < last, block), reverse=True)
        )
        self._borrowed = sum(not first <= block < last for block in held)
        self._token = max(held.values(), key=_as_numbers, default="")

    def _plan(self) -> None:
        """Settle when the next operation is due."""
        if self._busy or self._closing:
            return
        held, now = len(self._held), self._clock()
        if self._failing:
            due = self._sent_at + min(_RETRY_S, max(_LEAST_S, self._ttl_s * _POLL))
            if not self._outage and self._sent_at < self._valid_until:
                due = min(due, self._valid_until)  # no gap before it is known that the store is away
        elif (
            self._releasing
            or (self._want > held and self._sent_want <= held)
            or (self._head > held and self._sent_head <= held)
        ):
            due = now
        elif self._want > held or self._head > held:
            due = self._sent_at + max(_LEAST_S, self._ttl_s * _POLL)
        elif held or self._want or self._sent_want:
            due = self._sent_at + self._ttl_s * _RENEW
            if (self._want, self._head) != (self._sent_want, self._sent_head):
                due = self._sent_at + max(_LEAST_S, self._ttl_s * _POLL)
        else:
            due = inf
        self._sync_at(due)

    def _sync_at(self, due: float) -> None:
        if due < self._next:
            self._next = due
            self._wake.set()

    def _heard(self, event: Event) -> None:
        if self._closing:
            return
        if isinstance(event, LeaseNotice):
            if event.pool != self.pool or not (self._held or self._want):
                return
            self._sync_at(max(self._clock() + random.random() * _JITTER_S, self._sent_at + _PACE_S))
        elif isinstance(event, StoreStatus) and event.up and (self._held or self._want or self._releasing):
            self._sync_at(self._clock() + random.random() * _JITTER_S)


def _as_numbers(token: str) -> tuple[int, int]:
    epoch, _, counter = token.partition(".")
    return int(epoch), int(counter)
