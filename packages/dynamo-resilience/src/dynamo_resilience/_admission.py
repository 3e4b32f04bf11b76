# SPDX-License-Identifier: Apache-2.0
"""A pool admits requests on the capacity this replica has leased.

A `Pool` is one model at one site. It has an account of its own for each tenant with a reserved share, and the account
`serverless` for everybody else. What an account holds is leased in blocks; a request is admitted at once where there is
room and nobody waits, else it queues until there is, until its deadline, or until its client is gone.

Admission is local: the store is asked for blocks, never about a request.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from ._config import Model, Tenant
from ._errors import ConfigError, LeaseLost, Rejected
from ._leases import Lease
from ._store import Store
from ._units import UNLIMITED, Units

__all__ = ["SERVERLESS", "Ask", "Permit", "Pool", "PoolStats", "reserved_ranges"]

#: The account of everybody who has none of their own.
SERVERLESS = "serverless"

_NOTHING = Units()

#: Numbers of this process's leases.
_LEASES = itertools.count(1)

#: Over how long the drain rate looks back, in seconds.
_DRAIN_WINDOW_S = 10.0

#: How long a queue has to stand before its wait is estimated (seconds): a shorter one may only wait for the store to
#: grow the lease.
_STANDING_S = 0.25

#: After how long the lease is not expected to grow any more (seconds): the store has answered, and so have replicas
#: with idle blocks.
_GROWTH_S = 0.05

#: Releases that a drain rate needs before it counts as known.
_DRAIN_RELEASES = 4.0

#: The longest time that a client is told to stay away, in seconds.
_LONGEST_RETRY_S = 300.0


def _cut(settings: Model) -> tuple[Units, int]:
    """Return the whole capacity and the number of blocks: no more than the smallest limit, so that none is empty."""
    if settings.capacity is None:
        raise ValueError("a model without a capacity needs no pool")
    whole = settings.capacity.units
    return whole, min(settings.blocks, *whole)


def reserved_ranges(settings: Model) -> dict[str, tuple[int, int]]:
    """Return each reserved tenant's blocks, first and one past the last.

    A share is rounded down to whole blocks, and is one block at least. What remains is `serverless`'.

    Raises:
        ConfigError: where the shares do not fit, or a tenant has the name `serverless`.
    """
    if settings.capacity is None or not settings.reserved:
        return {}
    if SERVERLESS in settings.reserved:
        raise ConfigError(f"reserved: no tenant can be called {SERVERLESS!r}, it is the account of all others")
    _, blocks = _cut(settings)
    ranges: dict[str, tuple[int, int]] = {}
    first = 0
    for tenant, share in settings.reserved.items():
        # 0.29 * 100 is 28.999999999999996
        past = first + max(1, int(share * blocks + 1e-9))
        ranges[tenant] = (first, past)
        first = past
    if first > blocks:
        parts = ", ".join(f"{tenant} {past - start}" for tenant, (start, past) in ranges.items())
        raise ConfigError(f"reserved: the shares take {first} blocks of {blocks}: {parts}")
    return ranges


class Ask:
    """A request as admission sees it. One that lost its permit is asked for again with the same object: it goes to the
    front of its tenant.

    Args:
        tenant: who asks.
        need: what the request takes while it runs (an estimate: more than an account has counts as all of it).
        arrived: when it came, by the pool's clock (seconds).
        deadline: when it must be admitted, by the same clock: the earlier of arrival + `queue_s` and its own deadline.
            It may be set anew before the request is asked for again.
        priority: higher is served first.
    """

    __slots__ = ("_admitted", "arrived", "deadline", "need", "priority", "tenant")

    def __init__(self, tenant: str, need: Units, arrived: float, deadline: float, priority: int = 0) -> None:
        self.tenant = tenant
        self.need = need
        self.arrived = arrived
        self.deadline = deadline
        self.priority = priority
        self._admitted = False


class Permit:
    """Capacity that one request holds, until `release`.

    Attributes:
        account: the account that pays: `serverless` or the tenant's own.
        pool: the pool's name in the store, for the fencing header.
    """

    __slots__ = ("_account", "_callback", "_kv", "_prefill", "_reclaimed", "_sent", "_sequences", "account", "pool")

    def __init__(self, account: _Account, need: Units) -> None:
        self.account = account.name
        self.pool = account.pool.name
        self._account: _Account | None = account
        self._sequences, self._prefill, self._kv = need
        self._callback: Callable[[], None] | None = None
        self._reclaimed = False
        self._sent = False

    @property
    def _need(self) -> Units:
        return Units(self._sequences, self._prefill, self._kv)

    @property
    def token(self) -> str:
        """The account's newest fencing token, `EPOCH.COUNTER`; "" once released."""
        return "" if self._account is None else self._account.lease.token

    def check(self) -> None:
        """Raise LeaseLost when the capacity is no longer held; call directly before sending, then admit again.

        The permit still has to be released.
        """
        account = self._account
        if account is None:
            raise LeaseLost(f"{self.pool}: the permit is already released")
        if self._reclaimed:
            raise LeaseLost(f"{self.pool}: a reserved tenant has taken the capacity back")
        if account.debt or not account.lease.valid(account.pool.clock()):
            account.pool.stats.lost += 1
            raise LeaseLost(f"{self.pool}: the lease of account {self.account} is no longer held")

    def prefill_done(self) -> None:
        """Give back the prefill tokens: the first token is there."""
        account = self._account
        if account is not None and self._prefill:
            before = self._need
            account.room1 += self._prefill
            self._prefill = 0
            if account.watched:
                if account.waiting:
                    account.drained(before, self._need)
                account.freed()
            elif account.room0 > account.high0 and account.room1 > account.high1 and account.room2 > account.high2:
                account.mark()

    def sent_byte(self) -> None:
        """Say that the client has had a byte: `reclaim: unsent` leaves this request alone from now on."""
        self._sent = True

    def on_reclaim(self, callback: Callable[[], None]) -> None:
        """Call back, once, when a reserved tenant takes this capacity back (at once if it already has).

        The callback must not raise, and has to see to it that the request is cancelled at the backend and the permit
        released. It may come from within any call of the pool or of a permit.
        """
        if self._reclaimed:
            callback()
        else:
            self._callback = callback

    def release(self) -> None:
        """Give everything back; a second call does nothing."""
        account = self._account
        if account is None:
            return
        self._account = None
        self._callback = None
        del account.permits[self]
        account.room0 += self._sequences
        account.room1 += self._prefill
        account.room2 += self._kv
        if account.watched:
            if account.waiting:
                account.drained(self._need, _NOTHING)
            account.freed()
        elif account.room0 > account.high0 and account.room1 > account.high1 and account.room2 > account.high2:
            account.mark()

    def _reclaim(self) -> None:
        self._reclaimed = True
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class PoolStats:
    """Counters since the start; only ever growing.

    Attributes:
        admitted: account -> tenant -> requests.
        rejected: reason -> tenant -> requests.
        reclaimed: permits that were taken back for a reserved tenant.
        lost: permits that `check` refused because the lease was gone.
    """

    __slots__ = ("admitted", "lost", "reclaimed", "rejected")

    def __init__(self) -> None:
        self.admitted: dict[str, dict[str, int]] = {}
        self.rejected: dict[str, dict[str, int]] = {}
        self.reclaimed = 0
        self.lost = 0


class _Waiter:
    """A request that waits, in the queue of one account or of two."""

    __slots__ = ("again", "ask", "future", "places", "share")

    def __init__(self, ask: Ask, future: asyncio.Future[Permit], share: float) -> None:
        self.ask = ask
        self.future = future
        self.share = share
        self.again = ask._admitted  # its tenant has paid for it
        self.places: list[tuple[_Account, _Flow, Units]] = []


class _Flow:
    """One tenant's requests of one priority in one account's queue."""

    __slots__ = ("finish", "level", "listed", "queue", "start", "weight", "work")

    def __init__(self, level: _Level, weight: float) -> None:
        self.level = level
        self.weight = weight
        self.queue: OrderedDict[_Waiter, Units] = OrderedDict()
        self.work = 0.0
        self.start = 0.0
        self.finish = 0.0
        self.listed = False


class _Level:
    """The requests of one priority in one account's queue: start-time fair queueing over tenants.

    A tenant's start tag is fixed when it begins to wait, max(virtual time, its last finish tag), and moves by
    cost / weight with each of its requests that is served; the smallest is next (Goyal, Vin, Cheng: "Start-time Fair
    Queuing", 1996). Tags are the tenant's, not the request's, so that a request can go to its tenant's front.
    """

    __slots__ = ("_number", "_order", "_virtual", "flows", "priority", "waiting", "weight", "work")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.flows: dict[str, _Flow] = {}
        self.waiting = 0
        self.work = 0.0
        self.weight = 0.0  # of the tenants that wait
        self._order: list[tuple[float, int, _Flow]] = []
        self._virtual = 0.0
        self._number = 0

    def join(self, waiter: _Waiter, need: Units, weight: float) -> _Flow:
        flow = self.flows.get(waiter.ask.tenant)
        if flow is None:
            flow = self.flows[waiter.ask.tenant] = _Flow(self, weight)
        if not flow.queue:
            self.weight += flow.weight
            if not flow.listed:
                flow.start = max(self._virtual, flow.finish)
                self._list(flow)
        flow.queue[waiter] = need
        if waiter.again:
            flow.queue.move_to_end(waiter, last=False)
        flow.work += waiter.share
        self.work += waiter.share
        self.waiting += 1
        return flow

    def leave(self, waiter: _Waiter, flow: _Flow) -> None:
        del flow.queue[waiter]
        flow.work -= waiter.share
        self.work -= waiter.share
        self.waiting -= 1
        if not flow.queue:
            flow.work = 0.0
            self.weight -= flow.weight

    def next(self) -> _Flow:
        """Return the tenant whose turn it is; there must be one that waits."""
        while not self._order[0][2].queue:
            heapq.heappop(self._order)[2].listed = False
        return self._order[0][2]

    def served(self, flow: _Flow, cost: float) -> None:
        """Charge the tenant that `next` has returned, before its request leaves."""
        heapq.heappop(self._order)
        self._virtual = max(self._virtual, flow.start)
        flow.start = flow.finish = flow.start + cost / flow.weight
        self._list(flow)

    def _list(self, flow: _Flow) -> None:
        self._number += 1  # equal tags take turns
        heapq.heappush(self._order, (flow.start, self._number, flow))
        flow.listed = True


class _Drain:
    """What an account's running requests give back in a second while others wait, as a share of the pool's capacity.

    Only time with a queue counts: an idle pool drains slowly because nobody asks. Both sums fade with the same window,
    so their quotient is sound from the first second.
    """

    __slots__ = ("_at", "_released", "_releases", "_time", "since")

    def __init__(self) -> None:
        self.since: float | None = None  # when the queue began
        self._at = 0.0
        self._time = 0.0
        self._released = 0.0
        self._releases = 0.0

    def begin(self, now: float) -> None:
        self.since = self._at = now

    def end(self, now: float) -> None:
        self._fade(now)
        self.since = None

    def released(self, share: float, now: float) -> None:
        self._fade(now)
        self._released += share
        self._releases += 1

    def rate(self, now: float) -> float | None:
        if self.since is None or now - self.since < _STANDING_S:
            return None
        self._fade(now)
        if self._releases < _DRAIN_RELEASES or self._time <= 0 or self._released <= 0:
            return None
        return self._released / self._time

    def _fade(self, now: float) -> None:
        passed = now - self._at
        if passed > 0 and self.since is not None:
            factor = math.exp(-passed / _DRAIN_WINDOW_S)
            self._time = self._time * factor + _DRAIN_WINDOW_S * (1 - factor)
            self._released *= factor
            self._releases *= factor
            self._at = now


class _Account:
    """What one replica holds of one account, who uses it and who waits for it.

    Room and its marks are plain ints, one for each dimension: they are all that the fast path touches. What is on its
    way back (recalled, or more than this replica's fair part) is no room.
    """

    __slots__ = (
        "_before",
        "_blocks",
        "_cap",
        "_held",
        "_limits",
        "_low0",
        "_low1",
        "_low2",
        "_missed",
        "_peak",
        "_queued",
        "_sizes",
        "_whole",
        "admitted",
        "debt",
        "drain",
        "high0",
        "high1",
        "high2",
        "lease",
        "levels",
        "limit",
        "name",
        "own",
        "permits",
        "pool",
        "room0",
        "room1",
        "room2",
        "short",
        "waiting",
        "watched",
        "whole",
    )

    def __init__(self, pool: Pool, name: str, lease: Lease) -> None:
        self.pool = pool
        self.name = name
        self.lease = lease
        self.admitted = pool.stats.admitted.setdefault(name, {})
        self.permits: dict[Permit, None] = {}  # oldest first
        self.levels: dict[int, _Level] = {}
        self.waiting = 0
        self.drain = _Drain()
        self.room0 = self.room1 = self.room2 = 0
        self.debt = False  # more is used than is held
        self.watched = False  # whether a release concerns somebody
        self.short = False  # whether the lease did not grow as asked, in this tick
        self.own = (0, 0)
        self.limit = 0  # most blocks that it can hold
        self.whole = _NOTHING  # what it can count on: a request's need is capped to this
        self._cap = _NOTHING  # room + what is used
        self._held = _NOTHING  # the same with what is on its way back
        self._queued = _NOTHING
        self._sizes: list[Units] = []
        self._blocks = 1
        self._whole = _NOTHING
        self._limits: list[tuple[int, int]] = []
        # Room below `low` means that a block more is in use than when these were set; above `high`, two blocks fewer
        # (two, so that a request that comes and goes at the edge of a block costs nothing).
        self._low0 = self._low1 = self._low2 = 0
        self.high0 = self.high1 = self.high2 = 0
        self._peak = self._before = 0  # blocks in use at most, in this tick and in the one before
        self._missed = 0  # blocks that would have spared a request of this tick another account

    def configure(self, settings: Model, own: tuple[int, int], lent: tuple[tuple[int, int], ...]) -> None:
        """Take over sizes and ranges; what is used stays as it is."""
        self._whole, self._blocks = _cut(settings)
        whole, count = self._whole, self._blocks
        limited = [dimension for dimension in range(3) if whole[dimension] < UNLIMITED]
        self._limits = [(dimension, whole[dimension]) for dimension in limited]
        self._sizes = [
            Units(*(size * (i + 1) // count - size * i // count if size < UNLIMITED else 0 for size in whole))
            for i in range(count)
        ]
        self.own = own
        self.limit = own[1] - own[0] + sum(past - first for first, past in lent)
        counted = (own,) if own[1] > own[0] else lent
        self.whole = self._sum(block for first, past in counted for block in range(first, past))
        self.refresh()

    @property
    def back(self) -> int:
        """How many blocks are on their way back: recalled, or more than this replica's fair part."""
        # Without the store nothing can be given back, and nobody else could take it.
        return 0 if self.lease.outage else self.lease.recalled + self.lease.surplus

    @property
    def used(self) -> Units:
        """What the permits take."""
        return self._cap.minus(Units(self.room0, self.room1, self.room2))

    # What requests do.

    def take(self, ask: Ask, now: float) -> Permit | None:
        """Return a permit if nobody waits and there is room."""
        need = ask.need
        a, b, c = need
        if self.waiting:
            return None
        if a > self.room0 or b > self.room1 or c > self.room2:
            a, b, c = need = need.capped(self.whole)
            if a > self.room0 or b > self.room1 or c > self.room2:
                return None
        if not self.lease.valid(now):
            return None
        return self.grant(ask, need)

    def fits(self, ask: Ask, now: float) -> bool:
        """Return whether `take` would return a permit."""
        need = ask.need.capped(self.whole)
        return not self.waiting and need.fits(Units(self.room0, self.room1, self.room2)) and self.lease.valid(now)

    def grows(self, ask: Ask, now: float) -> bool:
        """Return whether the lease can be expected to grow for a request: nothing speaks against it."""
        if self.short or self.back or (self.waiting and now - (self.drain.since or now) >= _GROWTH_S):
            return False
        need = ask.need.capped(self.whole)
        return max(1, self._for(self.used.plus(self._queued).plus(need))) <= self.limit

    def grant(self, ask: Ask, need: Units) -> Permit:
        permit = Permit(self, need)
        self.permits[permit] = None
        self.room0 -= need[0]
        self.room1 -= need[1]
        self.room2 -= need[2]
        if self.room0 < self._low0 or self.room1 < self._low1 or self.room2 < self._low2:
            self.mark()
        ask._admitted = True
        try:
            self.admitted[ask.tenant] += 1
        except KeyError:
            self.admitted[ask.tenant] = 1
        return permit

    def missed(self, need: Units) -> None:
        """Grow for a request that had to go elsewhere."""
        blocks = self._for(self.used.plus(need.capped(self.whole)))
        if blocks > self._missed:
            self._missed = blocks
            self.plan()

    def freed(self) -> None:
        """Use what a request gave back: for whom it was recalled, then for who waits."""
        if self.debt:
            self.debt = not self.used.fits(self._held)
        if back := self.back:
            self.give(back)
        if self.waiting:
            self.pool._serve(self)
        if self.room0 > self.high0 and self.room1 > self.high1 and self.room2 > self.high2:
            self.mark()
        self.watch()

    def drained(self, before: Units, after: Units) -> None:
        """Count what a request gave back. Over its life that is its dominant share, as in the estimate of the queue."""
        share = before.share(self._whole) - after.share(self._whole)
        if share > 0:
            self.drain.released(share, self.pool.clock())

    # The queue.

    def join(self, waiter: _Waiter) -> None:
        ask = waiter.ask
        need = ask.need.capped(self.whole)
        level = self.levels.get(ask.priority)
        if level is None:
            level = self.levels[ask.priority] = _Level(ask.priority)
        waiter.places.append((self, level.join(waiter, need, self.pool._weight(ask.tenant)), need))
        self._queued = self._queued.plus(need)
        if not self.waiting:
            self.drain.begin(self.pool.clock())
        self.waiting += 1
        self.watched = True

    def leave(self, waiter: _Waiter, flow: _Flow, need: Units) -> None:
        level = flow.level
        level.leave(waiter, flow)
        if not level.waiting:
            del self.levels[level.priority]
        self._queued = self._queued.minus(need)
        self.waiting -= 1
        if not self.waiting:
            now = self.pool.clock()
            self.short = self.short or now - (self.drain.since or now) >= _GROWTH_S
            self.drain.end(now)

    def head(self) -> tuple[_Waiter, _Flow, Units] | None:
        """Return whose turn it is."""
        if not self.waiting:
            return None
        flow = self.levels[max(self.levels)].next()
        waiter, need = next(iter(flow.queue.items()))
        return waiter, flow, need

    def serve(self, now: float) -> list[_Account]:
        """Admit from the queue while its head fits; return the other accounts in whose queues these waited too."""
        others: list[_Account] = []
        if not self.lease.valid(now):
            return others
        while (head := self.head()) is not None:
            waiter, flow, need = head
            if waiter.future.done():  # cancelled; its task has yet to notice
                others.extend(self.pool._leave(waiter, self))
            elif waiter.ask.deadline < now:  # its timer is late
                others.extend(self.pool._expire(waiter, self))
            elif need.fits(Units(self.room0, self.room1, self.room2)):
                flow.level.served(flow, 0.0 if waiter.again else waiter.share)
                others.extend(self.pool._leave(waiter, self))
                waiter.future.set_result(self.grant(waiter.ask, need))
            else:
                break  # what is behind it waits too, or a large request would wait for ever
        return others

    def estimate(self, ask: Ask, share: float, now: float) -> float | None:
        """Return how long the work that would be served before this request, and room for it, take to drain."""
        rate = self.drain.rate(now)
        if rate is None:
            return None
        ahead = share
        for level in self.levels.values():
            if level.priority > ask.priority:
                ahead += level.work
            elif level.priority == ask.priority:
                flow = level.flows.get(ask.tenant)
                mine = 0.0 if flow is None else flow.work
                weight = self.pool._weight(ask.tenant)
                others = level.weight - (weight if mine else 0.0)
                ahead += min(level.work, mine * (1 + others / weight))
        return ahead / rate

    # The lease.

    def changed(self) -> None:
        """Act on what the lease says now."""
        self.refresh()
        if (back := self.back) and self.lease.valid(self.pool.clock()):
            self.give(back)
            self.reclaim()
        self.pool._serve(self)
        self.watch()

    def tick(self) -> None:
        """Give back what nobody has used since the last tick but one."""
        self._before, self._peak, self._missed = self._peak, 0, 0
        self.short = False
        self.mark()
        if not self.lease.valid(self.pool.clock()):
            return  # what is held is known again when the store has answered
        self.changed()
        # `serverless` keeps a block at all times: through an outage of the store it serves on what it holds. It is
        # surplus as soon as another replica is short.
        keep = max(self._want(), self._peak, self._before, int(self.name == SERVERLESS))
        if (idle := self.lease.held(self.pool.clock()) - keep) > 0:
            self.give(idle)

    def refresh(self) -> None:
        """Read again what is held."""
        used = self.used
        order = self.lease.blocks(self.pool.clock())
        back = self.back
        self._cap = self._sum(order[back:])
        self._held = self._cap.plus(self._sum(order[:back])).capped(self._whole)
        self.room0, self.room1, self.room2 = self._cap.minus(used)
        self.debt = not used.fits(self._held)
        self._settle_marks()
        self.watch()

    def give(self, most: int) -> None:
        """Give back up to so many blocks that nobody uses."""
        order = self.lease.blocks(self.pool.clock())
        most = min(most, len(order) - 1 if self.permits else len(order))
        used = self.used
        number = 0
        left = self._held
        for block in order[:most]:
            left = left.minus(self._size(block))
            if not used.fits(left):
                break
            number += 1
        if number:
            self.lease.shrink(number)
            self.refresh()

    def reclaim(self) -> None:
        """Take back what borrowed blocks carry that their owner wants now, the newest requests first."""
        order = self.lease.blocks(self.pool.clock())
        recalled = min(self.lease.recalled, self.back)
        if not recalled or self.name != SERVERLESS:  # others' blocks moved by a reload, they are not borrowed
            return
        over = self.used.minus(self._sum(order[recalled:]))
        for permit in self.permits:
            if permit._reclaimed:
                over = over.minus(permit._need)  # on its way
        victims: list[Permit] = []
        for permit in reversed(self.permits):
            if max(over) <= 0:
                break
            if permit._reclaimed or (permit._sent and self.pool.settings.reclaim == "unsent"):
                continue
            need = permit._need
            if any(mine > 0 and lack > 0 for mine, lack in zip(need, over, strict=True)):
                victims.append(permit)
                over = over.minus(need)
        self.pool.stats.reclaimed += len(victims)
        for permit in victims:
            permit._reclaim()

    def plan(self) -> None:
        """Tell the lease what there is use for."""
        need = 0
        head = self.head()
        if head is not None and not head[2].fits(Units(self.room0, self.room1, self.room2)):
            need = self._for(self.used.plus(head[2]))
            held = self.lease.held(self.pool.clock())
            need = min(max(need, held + 1), self.limit)  # blocks differ in size by a unit
        self.lease.want(max(self._want(), need), need)

    def watch(self) -> None:
        self.watched = bool(self.waiting or self.debt or self.back)

    def _want(self) -> int:
        """Return how many blocks there is use for: no more, so that others' fair parts are right."""
        want = max(self._for(self.used.plus(self._queued)), self._missed)
        if self.waiting or self.permits:
            want = max(want, 1)
        # One to go on, while there is traffic. A reserved tenant finds it in `serverless`: it would have to be taken
        # from borrowers.
        if self.name == SERVERLESS and not self.back and (want or self._peak or self._before):
            want += 1
        return min(want, self.limit)

    def _for(self, units: Units) -> int:
        """Return how many blocks carry this much."""
        return max((-(-units[dimension] * self._blocks // size) for dimension, size in self._limits), default=0)

    def mark(self) -> None:
        """Note how many blocks are in use."""
        self._settle_marks()
        self.plan()

    def _settle_marks(self) -> None:
        used = self._for(self.used)
        self._peak = max(self._peak, used)
        low, high = [-UNLIMITED] * 3, [-UNLIMITED] * 3
        for dimension, size in self._limits:
            low[dimension] = self._cap[dimension] - used * size // self._blocks
            fewer = (used - 2) * size // self._blocks
            high[dimension] = self._cap[dimension] - fewer - 1 if used > 1 else UNLIMITED
        self._low0, self._low1, self._low2 = low
        self.high0, self.high1, self.high2 = high

    def _size(self, block: int) -> Units:
        return self._sizes[block] if block < len(self._sizes) else _NOTHING

    def _sum(self, blocks: Iterable[int]) -> Units:
        """Return what blocks carry; a dimension without a limit has none without blocks either."""
        total = [0 if size < UNLIMITED else UNLIMITED for size in self._whole]
        for block in blocks:
            for dimension, size in enumerate(self._size(block)):
                total[dimension] += size
        return Units(*total)


class Pool:
    """One model at one site: admits, queues and refuses.

    Args:
        site, model: the pool's name is `SITE/MODEL`.
        settings: with a capacity (ValueError without one: such a model needs no pool).
        store, replica: where capacity is leased, and by whom; a restarted process is another replica.
        clock: seconds, never going back.
        tenants: for their weights; one that is not here weighs 1.
        queued_limit: most requests that wait in this pool. A reserved tenant always has its share of these places.
        ttl_s: of the leases.

    Attributes:
        name: as in the store and in the fencing header.
        settings: those in use.
        stats: counters.

    Raises:
        ConfigError: where reservations do not fit.
    """

    def __init__(
        self,
        site: str,
        model: str,
        settings: Model,
        store: Store,
        replica: str,
        clock: Callable[[], float],
        tenants: Mapping[str, Tenant],
        queued_limit: int,
        ttl_s: float,
    ) -> None:
        self.name = f"{site}/{model}"
        self.settings = settings
        self.stats = PoolStats()
        self.clock = clock
        self._store = store
        self._replica = replica
        self._tenants = tenants
        self._queued_limit = queued_limit
        self._ttl_s = ttl_s
        self._whole = _NOTHING
        self._reserved: dict[str, _Account] = {}
        self._retired: list[_Account] = []
        self._lines: dict[tuple[int, str], OrderedDict[_Waiter, None]] = {}
        self._waiting = 0
        self._draining = False
        self._started = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        ranges = reserved_ranges(settings)
        self._serverless = self._open(SERVERLESS, self._rest(settings, ranges))
        self._configure(settings, ranges)

    async def start(self) -> None:
        """Begin to lease; does not wait for the store."""
        self._started = True
        for account in self._accounts():
            await account.lease.start()
        self._timer = asyncio.get_running_loop().call_later(self._ttl_s / 3, self._tick)

    async def close(self) -> None:
        """Refuse whoever waits (`draining`) and give all leases back (within about half a second)."""
        self.drain()
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*(account.lease.close() for account in self._accounts()), *self._tasks)

    def ready(self, ask: Ask) -> bool:
        """Return whether `admit` would admit at once, or as soon as the store has let the lease grow."""
        if self._draining:
            return False
        now = self.clock()
        return any(account.fits(ask, now) or account.grows(ask, now) for account in self._for(ask))

    def wait_estimate(self, ask: Ask) -> float | None:
        """Return the wait that the queue and its drain rate suggest, in seconds; 0.0 when ready, None if unknown."""
        return 0.0 if self.ready(ask) else self._estimate(ask, self.clock())

    async def admit(self, ask: Ask) -> Permit:
        """Return a permit, without suspending where there is room and nobody waits.

        Cancelling leaves nothing behind.

        Raises:
            Rejected: `queue_full`, `deadline` (too near by the estimate, or reached), `draining`, or `no_capacity`
                (nothing is left for tenants without a reservation).
        """
        now = self.clock()
        if not self._draining:
            own = self._reserved.get(ask.tenant)
            if own is not None and (permit := own.take(ask, now)) is not None:
                return permit
            if (permit := self._serverless.take(ask, now)) is not None:
                if own is not None:
                    own.missed(ask.need)
                return permit
        return await self._queue(ask, now)

    def update(self, settings: Model, tenants: Mapping[str, Tenant], queued_limit: int, ttl_s: float) -> None:
        """Take over a new configuration; running requests and waiting ones stay.

        Raises:
            ConfigError: where reservations do not fit; nothing has changed then.
        """
        ranges = reserved_ranges(settings)
        _cut(settings)
        # Needs, weights and accounts may have changed: everybody queues again, in the same order within a tenant.
        waiters = [waiter for line in self._lines.values() for waiter in line]
        for waiter in waiters:
            self._leave(waiter)
        self.settings = settings
        self._tenants = tenants
        self._queued_limit = queued_limit
        self._ttl_s = ttl_s
        self._configure(settings, ranges)
        for waiter in waiters:
            if not self._join(waiter):
                self._refuse(waiter, self._rejection("no_capacity", waiter.ask))
        for account in self._accounts():
            account.changed()

    def drain(self) -> None:
        """Refuse whoever waits or comes (`draining`); what runs stays."""
        self._draining = True
        for waiter in [waiter for line in self._lines.values() for waiter in line]:
            self._leave(waiter)
            self._refuse(waiter, self._rejection("draining", waiter.ask))

    def snapshot(self) -> dict[str, Any]:
        """Return what `/state` shows: capacity, and for each account its lease, what is used and who waits."""
        now = self.clock()
        accounts = {}
        for account in self._accounts():
            rate = account.drain.rate(now)
            accounts[account.name] = {
                "own": list(account.own),
                "used": account.used._asdict(),
                "running": len(account.permits),
                "waiting": account.waiting,
                "debt": account.debt,
                "drain_share_per_s": None if rate is None else round(rate, 6),
                "lease": account.lease.snapshot(),
            }
        return {
            "name": self.name,
            "capacity": {name: None if size == UNLIMITED else size for name, size in self._whole._asdict().items()},
            "waiting": self._waiting,
            "draining": self._draining,
            "accounts": accounts,
        }

    # Waiting.

    async def _queue(self, ask: Ask, now: float) -> Permit:
        if self._draining:
            raise self._rejection("draining", ask)
        if not any(account.limit for account in self._for(ask)):
            raise self._rejection("no_capacity", ask)
        wait = self._estimate(ask, now)
        if ask.deadline <= now:
            raise self._rejection("deadline", ask, wait)
        if not ask._admitted:
            if wait is not None and now + wait > ask.deadline:
                raise self._rejection("deadline", ask, wait)
            if self._waiting >= self._queued_limit and not self._push_out(ask):
                raise self._rejection("queue_full", ask, wait)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Permit] = loop.create_future()
        waiter = _Waiter(ask, future, self._share(ask))
        self._join(waiter)
        timer = loop.call_later(ask.deadline - now, self._late, waiter)
        self._serve(*(place for place, _, _ in waiter.places))  # it may go before others, or they are gone
        try:
            return await future
        except asyncio.CancelledError:
            self._serve(*self._leave(waiter))
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().release()  # it was admitted in the instant in which it was cancelled
            raise
        finally:
            timer.cancel()

    def _for(self, ask: Ask) -> list[_Account]:
        """Return the accounts that may pay for a request."""
        own = self._reserved.get(ask.tenant)
        return [self._serverless] if own is None else [own, self._serverless]

    def _join(self, waiter: _Waiter) -> bool:
        for account in self._for(waiter.ask):
            if account.limit:
                account.join(waiter)
        if not waiter.places:
            return False
        line = self._lines.setdefault((waiter.ask.priority, waiter.ask.tenant), OrderedDict())
        line[waiter] = None
        if waiter.again:
            line.move_to_end(waiter, last=False)
        self._waiting += 1
        return True

    def _leave(self, waiter: _Waiter, account: _Account | None = None) -> list[_Account]:
        """Take a request out of all queues; return the accounts whose queues these were, but for the one given."""
        places, waiter.places = waiter.places, []
        if not places:
            return []
        for place, flow, need in places:
            place.leave(waiter, flow, need)
        key = (waiter.ask.priority, waiter.ask.tenant)
        line = self._lines[key]
        del line[waiter]
        if not line:
            del self._lines[key]
        self._waiting -= 1
        return [place for place, _, _ in places if place is not account]

    def _serve(self, *accounts: _Account) -> None:
        """Admit who can be, from these queues and from those that change by it; then tell the leases."""
        todo = list(accounts)
        for account in todo:
            todo.extend(account.serve(self.clock()))
        for account in dict.fromkeys(todo):
            account.plan()

    def _late(self, waiter: _Waiter) -> None:
        if waiter.places:
            self._serve(*self._expire(waiter))

    def _expire(self, waiter: _Waiter, account: _Account | None = None) -> list[_Account]:
        wait = self._estimate(waiter.ask, self.clock())
        others = self._leave(waiter, account)
        self._refuse(waiter, self._rejection("deadline", waiter.ask, wait))
        return others

    def _refuse(self, waiter: _Waiter, rejection: Rejected) -> None:
        if not waiter.future.done():
            waiter.future.set_exception(rejection)

    def _push_out(self, ask: Ask) -> bool:
        """Refuse somebody else, so that neither early nor many requests keep a full queue from those with more right.

        That is the last to come of the lowest priority, and in it of the tenant with the longest queue for its weight.
        """
        places = self._places(ask.tenant)
        victim: tuple[float, float, OrderedDict[_Waiter, None]] | None = None
        for (priority, tenant), line in self._lines.items():
            length = len(line) / self._weight(tenant)
            if victim is None or (priority, -length) < (victim[0], -victim[1]):
                guaranteed = self._places(tenant)
                if not guaranteed or self._waiting_of(tenant) > guaranteed:
                    victim = (priority, length, line)
        if victim is None:
            return False
        if not places or self._waiting_of(ask.tenant) >= places:
            mine = (len(self._lines.get((ask.priority, ask.tenant), ())) + 1) / self._weight(ask.tenant)
            if (victim[0], -victim[1]) >= (ask.priority, -mine):
                return False
        waiter = next(reversed(victim[2]))
        wait = self._estimate(waiter.ask, self.clock())
        self._leave(waiter)
        self._refuse(waiter, self._rejection("queue_full", waiter.ask, wait))
        return True

    def _places(self, tenant: str) -> int:
        """Return how many places in the queue are kept for a tenant: those with a reservation have its share."""
        account = self._reserved.get(tenant)
        if account is None:
            return 0
        return max(1, self._queued_limit * (account.own[1] - account.own[0]) // _cut(self.settings)[1])

    def _waiting_of(self, tenant: str) -> int:
        return sum(len(line) for (_, name), line in self._lines.items() if name == tenant)

    def _estimate(self, ask: Ask, now: float) -> float | None:
        share = self._share(ask)
        shortest: float | None = None
        for account in self._for(ask):
            if account.limit:
                wait = account.estimate(ask, share, now)
                if wait is None:
                    return None
                shortest = wait if shortest is None else min(shortest, wait)
        return shortest

    def _share(self, ask: Ask) -> float:
        # Never 0: fair queueing would let who costs nothing go first for ever.
        return max(ask.need.capped(self._whole).share(self._whole), 1e-9)

    def _weight(self, tenant: str) -> float:
        known = self._tenants.get(tenant)
        return 1.0 if known is None else known.weight

    def _rejection(self, reason: str, ask: Ask, wait: float | None = None) -> Rejected:
        counts = self.stats.rejected.setdefault(reason, {})
        counts[ask.tenant] = counts.get(ask.tenant, 0) + 1
        retry = None
        if wait is not None:
            # Spread, so that those who were refused together do not come back together.
            retry = min(max(1.0, wait), _LONGEST_RETRY_S / 1.5) * (1 + random.random() / 2)
        allowed = max(0.0, ask.deadline - ask.arrived)
        message = {
            "queue_full": f"{self.name}: {self._queued_limit} requests wait already",
            "deadline": f"{self.name}: no capacity for this request within {allowed:.3g} s",
            "draining": f"{self.name}: this gateway is about to stop",
            "no_capacity": f"{self.name}: all capacity is reserved, and nothing of it for tenant {ask.tenant!r}",
        }[reason]
        return Rejected(reason, message, retry)

    # Accounts.

    def _accounts(self) -> list[_Account]:
        return [*self._reserved.values(), self._serverless, *self._retired]

    @staticmethod
    def _rest(settings: Model, ranges: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
        return max((past for _, past in ranges.values()), default=0), _cut(settings)[1]

    def _open(self, name: str, own: tuple[int, int]) -> _Account:
        # No two leases share a holder: a model that a reload took away and the next one brought back has a new pool,
        # while requests of the old one still run on theirs.
        holder = f"{self._replica}/{next(_LEASES)}"
        lease = Lease(self._store, self.name, name, holder, self.clock, own=own, ttl_s=self._ttl_s)
        account = _Account(self, name, lease)
        lease.on_change(account.changed)
        if self._started:
            self._spawn(lease.start())
        return account

    def _configure(self, settings: Model, ranges: Mapping[str, tuple[int, int]]) -> None:
        self._whole, _ = _cut(settings)
        for tenant in self._reserved.keys() - ranges.keys():
            self._retired.append(self._reserved.pop(tenant))
        for tenant, own in ranges.items():
            account = self._reserved.get(tenant)
            if account is None:
                account = next((one for one in self._retired if one.name == tenant), None)
                if account is None:
                    account = self._open(tenant, own)
                else:
                    self._retired.remove(account)
                self._reserved[tenant] = account
            account.lease.update(own, (), settings.borrow, self._ttl_s)
            account.configure(settings, own, ())
        lent = tuple(ranges.values()) if settings.borrow else ()
        own = self._rest(settings, ranges)
        self._serverless.lease.update(own, lent, False, self._ttl_s)
        self._serverless.configure(settings, own, lent)
        for account in self._retired:
            # Its requests run on; its blocks are others' as they end.
            account.lease.update(account.own, (), False, self._ttl_s)
            account.configure(settings, account.own, ())
            account.limit = 0

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._ttl_s / 3, self._tick)
        for account in self._accounts():
            account.tick()
        for account in [one for one in self._retired if not one.permits]:
            self._retired.remove(account)
            self._spawn(account.lease.close())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
