# SPDX-License-Identifier: Apache-2.0
"""Who holds which block of a pool: the rules of leasing, without I/O and without a clock.

`lua/lease.lua` does the same, step by step and in the same order, on the same records in Redis; a test runs both with
the same operations and compares. A change here is a change there.
"""

from __future__ import annotations

from math import inf

from ._store import Held, LeaseReply, LeaseRequest

__all__ = ["LeaseTable"]


class _Block:
    """A block's record. It stays after it has expired: its holder may renew it until somebody else has taken it.

    Attributes:
        extended: whether it was extended over a gap since its holder renewed it.
    """

    __slots__ = ("account", "expires", "extended", "holder", "token")

    def __init__(self, account: str, holder: str, token: str, expires: int) -> None:
        self.account, self.holder, self.token, self.expires = account, holder, token, expires
        self.extended = False

    def renew(self, expires: int) -> None:
        self.expires, self.extended = expires, False


class _Want:
    """What one holder of an account would like to hold in all.

    Attributes:
        order: from the pool's counter, at the first want: settles ties.
        want: blocks in all, `head` included.
        head: blocks in all for the request at the head of its queue.
        since: when the head became unmet; -1 while it is met.
        first, last: the range that it may call back from borrowers; empty (0, 0) where it lends nothing.
    """

    __slots__ = ("expires", "first", "head", "last", "order", "since", "want")

    def __init__(self, order: int) -> None:
        self.order = order
        self.want = self.head = self.expires = self.first = self.last = 0
        self.since = -1


class _Pool:
    __slots__ = ("blocks", "counter", "last", "wants")

    def __init__(self, counter: int, now: int) -> None:
        self.counter = counter
        self.last = now  # when the last operation was
        self.blocks: dict[int, _Block] = {}
        self.wants: dict[tuple[str, str], _Want] = {}


class LeaseTable:
    """The leases of all pools.

    The store's clock may be set forward while replicas, whose clocks did not move, use what they hold. Holders renew
    after 0.32 TTL (of the store's), so a gap of more than half a TTL between two operations of a pool is such a step,
    or every replica was silent. The records that were live before the gap are extended once, as if renewed after it.
    Half, as a smaller step leaves each of them 0.18 TTL or more until it is renewed, and as a renewal has to be as late
    as that to look like a step. The cost: when all replicas of a pool are silent for so long, a dead one's blocks are
    back a TTL after the next operation, so after at most two TTL where others ask within one. And a second step before
    a record was renewed does end it. Wants are not extended: a live replica says them again after 0.32 TTL at most.

    Args:
        epoch: its number; every token begins with it.
        born_ms: when the epoch began. In its first TTL (and an eighth of it, for replicas that have yet to notice that
            the store is back) nothing is granted but what a replica says it held before.
    """

    def __init__(self, epoch: int = 1, born_ms: float = -inf) -> None:
        self.epoch = epoch
        self._born_ms = born_ms
        self._pools: dict[str, _Pool] = {}

    def new_epoch(self, now_ms: int) -> None:
        """Forget everything, as a store that was restarted does."""
        self.epoch += 1
        self._born_ms = now_ms
        self._pools.clear()

    def lease(self, now_ms: int, request: LeaseRequest) -> tuple[LeaseReply, bool]:
        """Bring an account's leases up to date; also return whether others should be told (`LeaseNotice`).

        `now_ms` never goes back from call to call.
        """
        account, holder, ttl = request.account, request.holder, request.ttl_ms
        expires = now_ms + ttl
        age = now_ms - self._born_ms
        grace = max(0, int(ttl + ttl // 8 - age)) if age != inf else 0
        pool = self._pools.get(request.pool)
        if pool is None:
            # A pool that was long forgotten within the epoch begins above every counter it can have had.
            pool = _Pool(int(age) if age != inf else 0, now_ms)
        first_counter = pool.counter
        blocks, wants = pool.blocks, pool.wants
        if 2 * (now_ms - pool.last) > ttl:
            for live in blocks.values():
                if live.expires > pool.last and not live.extended:
                    live.expires = now_ms + max(ttl, live.expires - pool.last)  # another TTL may be in use
                    live.extended = True
        pool.last = now_ms
        for owner in [owner for owner, want in wants.items() if want.expires <= now_ms]:
            del wants[owner]
        called_before = len(_recalled(pool, now_ms, account)) if request.lender else 0

        # Give back, keep, claim again.
        freed = 0
        for block, token in request.release:
            record = blocks.get(block)
            if record and record.token == token and record.account == account and record.holder == holder:
                del blocks[block]
                freed += 1
        usable = _usable(request)
        for block, token in request.keep:
            record = blocks.get(block)
            if record is None:
                # Without its token it is not claimed: its holder's lease had ended, and in the epoch before another
                # one may have had the block since.
                if token and block in usable:
                    self._grant(pool, block, account, holder, expires)
            elif record.account == account and record.holder == holder:
                record.renew(expires)
        for record in blocks.values():  # granted by an operation whose answer was lost
            if record.account == account and record.holder == holder and record.expires > now_ms:
                record.renew(expires)

        # What it wants.
        mine = wants.get((account, holder))
        if request.want > 0 or request.head > 0:
            if mine is None:
                pool.counter += 1
                mine = wants[account, holder] = _Want(pool.counter)
            mine.want, mine.head, mine.expires = max(request.want, request.head), request.head, expires
            mine.first, mine.last = request.own if request.lender else (0, 0)
        elif mine is not None:
            del wants[account, holder]
            mine = None

        # What it should give back whatever others need: recalled blocks, and those outside its ranges. The rest counts.
        gone = _recalled(pool, now_ms, None)
        counts: dict[str, int] = {holder: 0}
        for block, record in blocks.items():
            if record.account == account and record.expires > now_ms:
                if block not in usable:
                    gone.add(block)
                counts.setdefault(record.holder, 0)
                if block not in gone:
                    counts[record.holder] += 1
        started = False
        if mine is not None:
            if mine.head <= counts[holder]:
                mine.since = -1
            elif mine.since < 0:
                mine.since, started = now_ms, True

        # Grants, up to a fair share.
        surplus, over = 0, 0
        if grace == 0:
            free = _free(pool, now_ms, request)
            shares = _shares(pool, account, counts, sum(counts.values()) + len(free))
            share = shares.get(holder, 0)
            grants = max(0, min(len(free), share - counts[holder]))
            for block in free[:grants]:
                self._grant(pool, block, account, holder, expires)
            counts[holder] += grants
            if mine is not None and mine.head <= counts[holder]:
                mine.since = -1
            short = sum(max(0, theirs - counts.get(other, 0)) for other, theirs in shares.items() if other != holder)
            surplus = max(0, min(counts[holder] - share, short - (len(free) - grants)))
            if started and mine is not None and mine.since >= 0:
                over = sum(max(0, held - shares.get(other, 0)) for other, held in counts.items() if other != holder)

        if pool.counter > first_counter:
            self._pools[request.pool] = pool
        called = len(_recalled(pool, now_ms, account)) if request.lender else 0
        notify = called > called_before or over > 0 or (freed > 0 and _others_short(pool, now_ms, account, holder))
        held = tuple(
            Held(block, record.token)
            for block, record in sorted(blocks.items())
            if record.account == account and record.holder == holder and record.expires > now_ms
        )
        recalled = tuple(block for block, _ in held if block in gone)
        return LeaseReply(held, self.epoch, grace, surplus, recalled), notify

    def _grant(self, pool: _Pool, block: int, account: str, holder: str, expires: int) -> None:
        pool.counter += 1
        pool.blocks[block] = _Block(account, holder, f"{self.epoch}.{pool.counter}", expires)


def _usable(request: LeaseRequest) -> set[int]:
    blocks = set(range(*request.own))
    for one in request.lent:
        blocks.update(range(*one))
    return blocks


def _is_free(pool: _Pool, block: int, now: int) -> bool:
    record = pool.blocks.get(block)
    return record is None or record.expires <= now


def _unmet(pool: _Pool, now: int) -> dict[tuple[str, int, int], int]:
    """Return how many blocks each lender is short of, by account and range."""
    held = _held(pool, now)
    unmet: dict[tuple[str, int, int], int] = {}
    for owner, want in pool.wants.items():
        if want.last > want.first and want.want > held.get(owner, 0):
            lender = (owner[0], want.first, want.last)
            unmet[lender] = unmet.get(lender, 0) + want.want - held.get(owner, 0)
    return unmet


def _recalled(pool: _Pool, now: int, only: str | None) -> set[int]:
    """Return the blocks that lenders (or that one) want back: what free blocks do not cover, the highest first."""
    recalled: set[int] = set()
    for (lender, first, last), unmet in _unmet(pool, now).items():
        if only is not None and lender != only:
            continue
        free = sum(_is_free(pool, block, now) for block in range(first, last))
        for block in range(last - 1, first - 1, -1):
            if unmet <= free:
                break
            if not _is_free(pool, block, now) and pool.blocks[block].account != lender:
                recalled.add(block)
                unmet -= 1
    return recalled


def _free(pool: _Pool, now: int, request: LeaseRequest) -> list[int]:
    """Return the free blocks that the account may have: its own, then those that lenders leave it."""
    free = [block for block in range(*request.own) if _is_free(pool, block, now)]
    reserved = set(free)
    for (lender, first, last), unmet in _unmet(pool, now).items():
        if lender == request.account:
            continue
        for block in range(first, last):
            if unmet == 0:
                break
            if _is_free(pool, block, now):
                reserved.add(block)
                unmet -= 1
    for one in request.lent:
        for block in range(*one):
            if block not in reserved and _is_free(pool, block, now):
                free.append(block)
                reserved.add(block)
    return free


def _shares(pool: _Pool, account: str, counts: dict[str, int], total: int) -> dict[str, int]:
    """Return each holder's fair share of `total` blocks.

    The head that has waited longest is served in full: two large requests never wait for each other. The rest is shared
    max-min; what does not divide goes to those who hold more, so that nothing moves for it.
    """
    wants = [(holder, want) for (name, holder), want in pool.wants.items() if name == account]
    wants.sort(key=lambda one: (-counts.get(one[0], 0), one[1].order))
    waiting = [one for one in wants if one[1].since >= 0 and one[1].head > counts.get(one[0], 0)]
    shares = {holder: 0 for holder, _ in wants}
    if waiting:
        holder, want = min(waiting, key=lambda one: (one[1].since, one[1].order))
        shares[holder] = min(want.head, total)
    left = total - sum(shares.values())
    level = 0
    while left > 0:
        rising = [holder for holder, want in wants if shares[holder] == level and want.want > level]
        if not rising and level >= max((want.want for _, want in wants), default=0):
            break
        for holder in rising[:left]:
            shares[holder] += 1
        left -= min(left, len(rising))
        level += 1
    return shares


def _others_short(pool: _Pool, now: int, account: str, holder: str) -> bool:
    held = _held(pool, now)
    return any(want.want > held.get(owner, 0) for owner, want in pool.wants.items() if owner != (account, holder))


def _held(pool: _Pool, now: int) -> dict[tuple[str, str], int]:
    """Return how many blocks each holder of each account has."""
    held: dict[tuple[str, str], int] = {}
    for record in pool.blocks.values():
        if record.expires > now:
            owner = (record.account, record.holder)
            held[owner] = held.get(owner, 0) + 1
    return held
