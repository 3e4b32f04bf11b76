# SPDX-License-Identifier: Apache-2.0
"""One simulated worker: pools of blocks, a scheduler per rank as vLLM V1's, ranks in lockstep, tiers behind the device.

A pass (one engine step) is planned at its start and takes effect at its end. Running sequences come first, in order of
admission, then waiting ones first come first served, until the step's token budget is spent. A prompt that gets
complete yields its first token at the end of that pass, without decode time of its own. These rules, the rounding to
blocks and the order of eviction are those of Dynamo's mocker (`lib/mocker`, scheduler `vllm`), so that results can be
compared with `dynamo.replay`. Known differences: what a preempted sequence recomputes costs time on a decode worker too
and includes what it had generated, a second copy of a block does not stay in the cache, and generated blocks become
visible when their sequence ends.

Stretches of passes that only decode are taken in one jump, as many passes as no sequence ends in, no block runs short
in, and the worker's speed stays the same in; `cut` ends a jump early at the pass that runs at that moment.

Nothing here is random and nothing reads a clock: times are parameters, in seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from .._types import ExternalTier, Role, Tier, Worker

if TYPE_CHECKING:
    from .._profile import TierCost
    from .timing import Timing

__all__ = ["CacheEvent", "Engine", "Job", "Pool", "Speed", "Store"]


class CacheEvent(NamedTuple):
    """Blocks that came to a tier of a rank, or left it."""

    rank: int
    stored: bool
    tier: Tier
    blocks: list[int]


#: The bounds of a speed factor: slower, and a simulation would hardly end.
SLOWEST, FASTEST = 0.001, 1000.0


class Speed:
    """A worker's speed as a function of time: constant between changes, 1 before the first one."""

    __slots__ = ("_factors", "_times")

    def __init__(self, changes: Sequence[tuple[float, float]] = (), slow: Sequence[tuple[float, float, float]] = ()):
        """`changes` are (from t, factor) in order of time; `slow` are (from, to, factor) that multiply it.

        Raises ValueError for times out of order and for factors that are not above 0.
        """
        for (before, _), (after, _) in pairwise(changes):
            if not before < after:
                raise ValueError(f"speed changes must be in order of time, but {after!r} follows {before!r}")
        for factor in [factor for _, factor in changes] + [factor for _, _, factor in slow]:
            if not SLOWEST <= factor <= FASTEST:
                raise ValueError(f"a speed factor must be from {SLOWEST} to {FASTEST}, not {factor!r}")
        times = sorted({t for t, _ in changes} | {t for start, stop, _ in slow for t in (start, stop)} - {math.inf})
        self._times = times
        self._factors = [1.0]
        starts = [t for t, _ in changes]
        for t in times:
            index = bisect_right(starts, t)
            factor = changes[index - 1][1] if index else 1.0
            for start, stop, slower in slow:
                if start <= t < stop:
                    factor *= slower
            self._factors.append(factor)

    def at(self, now: float) -> float:
        """The factor at `now`."""
        return self._factors[bisect_right(self._times, now)] if self._times else 1.0

    def until(self, now: float) -> float:
        """When it changes next."""
        index = bisect_right(self._times, now)
        return self._times[index] if index < len(self._times) else math.inf


class Store:
    """The tier that all workers share: blocks in order of their last use, the oldest leave first."""

    __slots__ = ("blocks", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def put(self, ids: Iterable[int]) -> tuple[list[int], list[int]]:
        """Write blocks; return those that are new and those that had to leave."""
        new: list[int] = []
        gone: list[int] = []
        blocks = self.blocks
        for block in ids:
            if block in blocks:
                blocks.move_to_end(block)
                continue
            blocks[block] = None
            new.append(block)
            if len(blocks) > self.capacity:
                gone.append(blocks.popitem(last=False)[0])
        return new, gone


class Pool:
    """A rank's blocks: cached ones by id with a count of users, those nobody uses in order of their last use."""

    __slots__ = ("cached", "capacity", "host", "host_capacity", "idle", "log", "private", "rank")

    def __init__(self, rank: int, capacity: int, host_capacity: int, log: list[CacheEvent]) -> None:
        self.rank = rank
        self.capacity = capacity
        self.host_capacity = host_capacity
        self.log = log
        #: Users of each cached block.
        self.cached: dict[int, int] = {}
        #: Cached blocks without a user, the longest idle first.
        self.idle: OrderedDict[int, None] = OrderedDict()
        #: Blocks of sequences that are not in the cache: partly filled, generated, or a second copy.
        self.private = 0
        self.host: OrderedDict[int, None] = OrderedDict()

    @property
    def used(self) -> int:
        """Blocks that sequences hold."""
        return len(self.cached) - len(self.idle) + self.private

    @property
    def available(self) -> int:
        """Blocks that could be taken: free ones and cached ones without a user."""
        return self.capacity - len(self.cached) + len(self.idle) - self.private

    def hits(self, blocks: Sequence[int], limit: int) -> int:
        """How many of the first `limit` blocks are cached without a gap."""
        cached = self.cached
        count = 0
        for block in blocks:
            if count == limit or block not in cached:
                break
            count += 1
        return count

    def idle_among(self, blocks: Sequence[int], count: int) -> int:
        """How many of the first `count` blocks, all cached, have no user."""
        idle = self.idle
        return sum(block in idle for block in blocks[:count])

    def pin(self, blocks: Iterable[int]) -> None:
        """Use cached blocks."""
        cached, idle = self.cached, self.idle
        for block in blocks:
            users = cached[block]
            if not users:
                del idle[block]
            cached[block] = users + 1

    def take(self, count: int) -> None:
        """Take blocks out of the free ones, and of the longest idle; the caller knows that they are available."""
        over = count - (self.capacity - len(self.cached) - self.private)
        self.private += count
        if over > 0:
            cached, pop = self.cached, self.idle.popitem
            gone = []
            for _ in range(over):
                block, _none = pop(last=False)
                del cached[block]
                gone.append(block)
            self.note(False, "device", gone)
            if self.host_capacity:
                self._write_back(gone)

    def cache(self, blocks: Iterable[int]) -> list[int]:
        """Make private blocks of one user cached ones; return those that were not cached yet."""
        cached = self.cached
        new = []
        for block in blocks:
            if block not in cached:
                cached[block] = 1
                new.append(block)
        self.private -= len(new)
        self.note(True, "device", new)
        return new

    def release(self, held: list[int], private: int) -> None:
        """Give back blocks; the last of `held` become the first to leave."""
        cached, idle = self.cached, self.idle
        for block in reversed(held):
            users = cached[block] - 1
            cached[block] = users
            if not users:
                idle[block] = None
        self.private -= private

    def note(self, stored: bool, tier: Tier, blocks: list[int]) -> None:
        """Log an event; ids below 0 are nobody else's and are left out."""
        shown = [block for block in blocks if block >= 0]
        if shown:
            self.log.append(CacheEvent(self.rank, stored, tier, shown))

    def _write_back(self, blocks: list[int]) -> None:
        host, new, gone = self.host, [], []
        for block in blocks:
            if block in host:
                host.move_to_end(block)
                continue
            host[block] = None
            new.append(block)
            if len(host) > self.host_capacity:
                gone.append(host.popitem(last=False)[0])
        self.note(True, "host", new)
        self.note(False, "host", gone)


class Job:
    """A request at one worker."""

    __slots__ = (
        "blocks",
        "cached",
        "computed",
        "dead",
        "fetch_limit",
        "fetch_s",
        "fetched",
        "fetching",
        "generated",
        "held",
        "hit",
        "id",
        "output",
        "preemptions",
        "private",
        "rank",
        "ready",
        "tokens",
    )

    def __init__(self, id: str, tokens: int, output: int, blocks: tuple[int, ...], rank: int, fetch_limit: int = 0):
        """`blocks`: ids of all full blocks of the prompt and the answer; at most `fetch_limit` tokens are fetched."""
        self.id = id
        self.tokens = tokens
        self.output = output
        self.blocks = blocks
        self.rank = rank
        self.fetch_limit = fetch_limit
        #: Tokens whose KV is on the device at the end of the pass that runs.
        self.computed = 0
        self.generated = 0
        #: Cached blocks that it uses, in order, and how many others it holds.
        self.held: list[int] = []
        self.private = 0
        #: How many of its blocks have been offered to the cache.
        self.cached = 0
        #: Whether its prompt's KV came from elsewhere (a decode worker's sequence that was not preempted).
        self.ready = False
        self.fetching = False
        #: Seconds that its fetch took, without waiting for the link; None without one.
        self.fetch_s: float | None = None
        #: Prompt tokens found on the device at first, and fetched by tier.
        self.hit = 0
        self.fetched: dict[ExternalTier, int] = {}
        self.preemptions = 0
        self.dead = False


class _Plan:
    """What one rank does in a pass: chunks, and the sequences that yield a token at its end."""

    __slots__ = ("decodes", "jump", "preempted", "prefills", "resident", "yields")

    def __init__(self) -> None:
        self.prefills: list[tuple[int, int]] = []
        self.yields: list[Job] = []
        self.decodes = 0
        self.resident = 0
        #: Whether further passes like it may follow at once.
        self.jump = False
        self.preempted = False


class _Rank:
    """One rank's scheduler."""

    def __init__(self, engine: Engine, index: int) -> None:
        worker = engine.worker
        self.engine = engine
        self.block_size = engine.block_size
        self.budget = worker.chunk_tokens
        self.max_sequences = worker.max_sequences
        self.pool = Pool(
            index, worker.capacity_tokens // engine.block_size, engine.host_tokens // engine.block_size, engine.log
        )
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        #: Sequences from a prefill worker that wait for blocks, first come first served.
        self.arriving: deque[Job] = deque()

    # Blocks -----------------------------------------------------------------------------------------------------

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def grow(self, job: Job, tokens: int) -> bool:
        """Give `job` blocks for its first `tokens` tokens; False if there are too few."""
        need = self.blocks_of(tokens) - len(job.held) - job.private
        if need > 0:
            if need > self.pool.available:
                return False
            self.pool.take(need)
            job.private += need
        return True

    def keep(self, job: Job, tokens: int) -> None:
        """Put its blocks that are full with `tokens` tokens in the cache."""
        full = min(tokens // self.block_size, len(job.blocks))
        if full > job.cached:
            new = self.pool.cache(job.blocks[job.cached : full])
            job.cached = full
            job.private -= len(new)
            job.held += new

    def drop(self, job: Job) -> None:
        """Give back all its blocks; the full ones stay in the cache until they are needed."""
        self.keep(job, job.computed)
        self.pool.release(job.held, job.private)
        job.held = []
        job.private = job.cached = job.computed = 0

    def use_prefix(self, job: Job, count: int) -> None:
        """Start `job` from the first `count` blocks, which are cached."""
        job.held = list(job.blocks[:count])
        self.pool.pin(job.held)
        job.cached = count
        job.computed = count * self.block_size

    # Tiers ------------------------------------------------------------------------------------------------------

    def fetch(self, job: Job, now: float) -> None:
        """Start to fetch what lies behind the device, if that is wanted and there is room for the prompt."""
        engine, pool, size = self.engine, self.pool, self.block_size
        store: OrderedDict[int, None] = engine.store.blocks if engine.store is not None else OrderedDict()
        most = (job.tokens - 1) // size
        device = pool.hits(job.blocks, most)
        if self.blocks_of(job.tokens) - device > pool.available - pool.idle_among(job.blocks, device):
            return
        runs: dict[ExternalTier, list[int]] = {"host": [], "store": []}
        for block in job.blocks[device : min(most, device + job.fetch_limit // size)]:
            if block in pool.host:
                runs["host"].append(block)
            elif block in store:
                runs["store"].append(block)
            else:
                break
        count = len(runs["host"]) + len(runs["store"])
        if not count:
            # It may be on the device now, and leave it for another tier before its turn.
            return
        job.fetch_limit = 0
        # They count as used now; making room may push something else out of the host, or even them, once read.
        for block in runs["host"]:
            pool.host.move_to_end(block)
        for block in runs["store"]:
            store.move_to_end(block)
        self.use_prefix(job, device)
        pool.take(count)
        job.private = count
        job.hit = device * size
        job.fetching = True
        job.fetch_s = 0.0
        done = now
        tiers: tuple[ExternalTier, ...] = ("host", "store")
        for tier in tiers:
            if not runs[tier]:
                continue
            tokens = len(runs[tier]) * size
            cost = engine.costs[tier]
            took = cost.latency_s + cost.token_s * tokens
            job.fetched[tier] = tokens
            job.fetch_s = max(job.fetch_s, took)
            engine.links[tier] = max(engine.links[tier], now) + took
            done = max(done, engine.links[tier])
        engine.fetches.append((done, job))

    def fetched(self, job: Job) -> None:
        """The fetch of `job` is complete."""
        job.fetching = False
        if not job.dead:
            job.computed += sum(job.fetched.values())
            self.keep(job, job.computed)

    # A pass -----------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> _Plan:
        plan = _Plan()
        budget = self.budget
        running = self.running
        index = 0
        while index < len(running) and budget > 0:
            job = running[index]
            take = min(job.tokens + job.generated - job.computed, budget)
            while not self.grow(job, job.computed + take):
                victim = running.pop()
                self.preempt(victim)
                plan.preempted = True
                if victim is job:
                    break
            else:
                budget -= take
                self.schedule(plan, job, take)
                index += 1
        passed: list[Job] = []
        blocked = False
        while self.waiting and not plan.preempted and len(running) < self.max_sequences and budget > 0:
            job = self.waiting.popleft()
            if job.fetch_limit >= self.block_size and not (job.fetching or blocked):
                self.fetch(job, now)
            if job.fetching or (blocked and not job.held and not job.private):
                passed.append(job)
                continue
            if not self.admit(job):
                passed.append(job)
                if running:
                    break
                # Those behind it that hold blocks have to go on, or it would wait for ever.
                blocked = True
                continue
            take = min(job.tokens + job.generated - job.computed, budget)
            self.grow(job, job.computed + take)
            budget -= take
            running.append(job)
            self.schedule(plan, job, take)
        self.waiting.extendleft(reversed(passed))
        if blocked and not running:
            self.unblock(plan)
        # A first token is seen at its time: no jump with one.
        plan.jump = (
            budget > 0
            and not (plan.prefills or plan.preempted or len(plan.yields) < len(running))
            and all(job.generated for job in plan.yields)
        )
        return plan

    def admit(self, job: Job) -> bool:
        """Whether there is room for all that is known of `job`; if so it starts from what is cached."""
        known = job.tokens + job.generated
        if job.ready:
            return True
        if job.held or job.private:  # what was fetched for it
            return self.blocks_of(known) - len(job.held) - job.private <= self.pool.available
        # The last token is always computed: its logits give the next one.
        count = self.pool.hits(job.blocks, (known - 1) // self.block_size)
        free = self.pool.available - self.pool.idle_among(job.blocks, count)
        if self.blocks_of(known) - count > free:
            return False
        self.use_prefix(job, count)
        if not job.generated and not job.preemptions:
            job.hit = job.computed
        return True

    def schedule(self, plan: _Plan, job: Job, take: int) -> None:
        before = job.computed
        after = job.computed = before + take
        if before < job.tokens or take > 1:
            plan.prefills.append((take, before))
            self.engine.prompt_tokens += take
            self.keep(job, after)
        else:
            plan.decodes += 1
            plan.resident += after
        if after == job.tokens + job.generated:
            plan.yields.append(job)

    def preempt(self, job: Job) -> None:
        self.drop(job)
        job.ready = False
        job.preemptions += 1
        self.engine.preemptions += 1
        self.waiting.appendleft(job)

    def unblock(self, plan: _Plan) -> None:
        """Nothing runs and nothing can: the last one that had blocks fetched gives them back."""
        for job in reversed(self.waiting):
            if (job.held or job.private) and not job.fetching:
                self.drop(job)
                job.hit, job.fetched, job.fetch_s = 0, {}, None
                plan.preempted = True
                return

    def room(self, jobs: list[Job], passes: int) -> int:
        """How many of `passes` passes there are blocks for, the first of which has them."""
        pool, size = self.pool, self.block_size
        if len(jobs) * (passes // size + 1) <= pool.available:
            return passes

        def fits(count: int) -> bool:
            need = 0
            for job in jobs:
                need += max(0, self.blocks_of(job.computed + count - 1) - len(job.held) - job.private)
            return need <= pool.available

        low, high = 1, passes
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low

    # Sequences from a prefill worker ----------------------------------------------------------------------------

    def reserve(self) -> list[tuple[Job, int]]:
        """Give blocks to sequences that wait for them, in order; return each with the tokens it has to pull."""
        started = []
        pool = self.pool
        while self.arriving and len(self.running) < self.max_sequences:
            job = self.arriving[0]
            count = pool.hits(job.blocks, job.tokens // self.block_size)
            need = self.blocks_of(job.tokens) - count
            if need > pool.available - pool.idle_among(job.blocks, count):
                break
            self.arriving.popleft()
            self.use_prefix(job, count)
            pool.take(need)
            job.private = need
            job.hit = job.computed
            started.append((job, job.tokens - job.hit))
        return started

    def pulled(self, job: Job) -> None:
        """The KV of `job` is here: it generates from the next pass on."""
        job.computed = job.tokens
        job.ready = True
        self.keep(job, job.tokens)
        self.waiting.append(job)


class Engine:
    """One worker. The caller starts passes, and finishes them at the time that it was told."""

    def __init__(
        self,
        worker: Worker,
        timing: Timing,
        block_size: int,
        *,
        speed: Speed | None = None,
        host_tokens: int = 0,
        store: Store | None = None,
        costs: dict[ExternalTier, TierCost] | None = None,
    ) -> None:
        """`costs`: what fetching from a tier takes; `host_tokens`: the size of each rank's host tier.

        Raises ValueError for a capacity below one block.
        """
        if worker.capacity_tokens < block_size:
            raise ValueError(f"worker {worker.id!r}: {worker.capacity_tokens} tokens hold no block of {block_size}")
        self.worker = worker
        self.role: Role = worker.role
        self.timing = timing
        self.block_size = block_size
        self.speed = Speed() if speed is None else speed
        self.host_tokens = host_tokens
        self.store = store
        self.costs = costs or {}
        #: When the link to each tier is free.
        self.links: dict[ExternalTier, float] = {"host": 0.0, "store": 0.0}
        #: What happened to the caches since the caller last emptied it.
        self.log: list[CacheEvent] = []
        #: Fetches that were started since the caller last emptied it: (time of the end, job).
        self.fetches: list[tuple[float, Job]] = []
        self.prompt_tokens = self.output_tokens = self.preemptions = 0
        self.busy_s = 0.0
        self.ranks = [_Rank(self, index) for index in range(worker.ranks)]
        self._plans: list[_Plan] = []
        self._passes = 0
        self._started = self._end = 0.0
        self._leader = 0
        self._grown = False

    @property
    def busy(self) -> bool:
        """Whether a pass runs."""
        return self._passes > 0

    def fits(self, tokens: int, output: int) -> bool:
        """Whether a request can run here at all."""
        rank = self.ranks[0]
        return rank.blocks_of(tokens + output) <= rank.pool.capacity

    def submit(self, job: Job, now: float) -> None:
        """A request comes in. What it wants from other tiers begins to come at once, if there is room."""
        rank = self.ranks[job.rank]
        rank.waiting.append(job)
        if job.fetch_limit >= self.block_size:
            rank.fetch(job, now)

    def fetched(self, job: Job) -> None:
        """A fetch that `fetches` told of is complete."""
        self.ranks[job.rank].fetched(job)

    def arrive(self, job: Job) -> list[tuple[Job, int]]:
        """A sequence whose prompt was read elsewhere; see `reserve`."""
        rank = self.ranks[job.rank]
        rank.arriving.append(job)
        return rank.reserve()

    def reserve(self, rank: int) -> list[tuple[Job, int]]:
        """Sequences that got their blocks, each with the tokens that it has to pull."""
        return self.ranks[rank].reserve()

    def pulled(self, job: Job) -> None:
        """The KV of a sequence has arrived."""
        self.ranks[job.rank].pulled(job)

    def release(self, job: Job) -> None:
        """A finished prompt of a prefill worker has been pulled, or is not wanted any more."""
        self.ranks[job.rank].drop(job)

    def cancel(self, job: Job) -> None:
        """Forget a request, wherever it is."""
        rank = self.ranks[job.rank]
        job.dead = True
        for queue in (rank.waiting, rank.running, rank.arriving):
            if job in queue:
                queue.remove(job)
        rank.drop(job)

    def start(self, now: float) -> float | None:
        """Start a pass, or a jump over several; return when it ends, None if there is nothing to do."""
        plans = [rank.plan(now) for rank in self.ranks]
        while not any(plan.yields or plan.prefills for plan in plans) and any(plan.preempted for plan in plans):
            plans = [rank.plan(now) for rank in self.ranks]
        steps = [
            self.timing.step_s(plan.prefills, plan.decodes, plan.resident) if plan.prefills or plan.yields else -1.0
            for plan in plans
        ]
        longest = max(steps)
        if longest < 0:
            return None
        self._plans = plans
        self._started = now
        self._leader = leader = steps.index(longest)
        self._passes = 1
        self._grown = True
        factor = self.speed.at(now)
        self._end = now + longest / factor
        if all(plan.jump for plan in plans):
            passes = min(job.output - job.generated for plan in plans for job in plan.yields)
            for rank, plan in zip(self.ranks, plans, strict=True):
                passes = rank.room(plan.yields, passes)
            if len(plans) > 1:
                passes = self._led(leader, passes)
            if passes > 1:
                change = self.speed.until(now)
                end = self._after(passes)
                if end > change:
                    passes = self._pass_at(change, passes)
                    end = self._after(passes)
                self._passes, self._end = passes, end
                self._grown = passes == 1
        return self._end

    def cut(self, now: float) -> float | None:
        """End a jump with the pass that runs at `now`; return when that ends, None if no jump runs."""
        if self._passes <= 1:
            return None
        passes = self._pass_at(now, self._passes)
        if passes < self._passes:
            self._passes = passes
            self._end = self._after(passes)
        self._grow()
        return self._end

    def hold(self, seconds: float) -> float:
        """The pass that runs ends later by so much; return when."""
        self._end += seconds
        return self._end

    def done_by(self, now: float) -> int:
        """Passes of the jump that have ended."""
        if now >= self._end or not self._passes:
            return self._passes
        passes = self._pass_at(now, self._passes)
        return min(passes if self._after(passes) <= now else passes - 1, self._passes - 1)

    def stop(self, now: float) -> None:
        """Forget the pass that runs: the worker died."""
        if self._passes:
            self.busy_s += max(0.0, now - self._started)
        self._passes, self._plans = 0, []

    def finish(self) -> list[tuple[Job, int]]:
        """The pass or jump ends. Return the sequences that got tokens, each with how many.

        A sequence that got its last one has left, except on a prefill worker: there its blocks stay until `release`.
        """
        passes = self._passes
        self._grow()
        self.busy_s += self._end - self._started
        yielded: list[tuple[Job, int]] = []
        for rank, plan in zip(self.ranks, self._plans, strict=True):
            ended = False
            for job in plan.yields:
                if job.dead:
                    continue
                first = not job.generated
                job.generated += passes
                job.computed += passes - 1
                self.output_tokens += passes
                yielded.append((job, passes))
                if first and self.store is not None and self.role != "decode":
                    full = job.tokens // self.block_size
                    new, gone = self.store.put(block for block in job.blocks[:full] if block >= 0)
                    rank.pool.note(True, "store", new)
                    rank.pool.note(False, "store", gone)
                if job.generated >= job.output:
                    ended = True
                    if self.role != "prefill":
                        rank.drop(job)
            if ended:
                rank.running = [job for job in rank.running if job.generated < job.output]
        self._passes, self._plans = 0, []
        return yielded

    def _grow(self) -> None:
        """Give the sequences of a jump the blocks that its passes fill."""
        if self._grown:
            return
        self._grown = True
        more = self._passes - 1
        for rank, plan in zip(self.ranks, self._plans, strict=True):
            size, pool = rank.block_size, rank.pool
            for job in plan.yields:
                if job.dead:
                    continue
                need = -(-(job.computed + more) // size) - len(job.held) - job.private
                if need > 0:
                    pool.take(need)
                    job.private += need

    def _led(self, leader: int, passes: int) -> int:
        """For how many passes, of `passes` at most, the rank `leader` stays the slowest.

        Exact for a step time that is affine in the resident tokens: who is slowest first and last is so in between.
        """
        plans = [plan for plan in self._plans if plan.yields]
        head = self._plans[leader]
        if all(plan.decodes <= head.decodes and plan.resident <= head.resident for plan in plans):
            return passes
        step = self.timing.step_s
        while passes > 1:
            more = passes - 1
            last = step((), head.decodes, head.resident + more * head.decodes)
            if all(step((), plan.decodes, plan.resident + more * plan.decodes) <= last for plan in plans):
                break
            passes = (passes + 1) // 2 if passes > 2 else 1
        return passes

    def _after(self, passes: int) -> float:
        plan = self._plans[self._leader]
        run = self.timing.decode_run_s(plan.decodes, plan.resident, passes)
        return self._started + run / self.speed.at(self._started)

    def _pass_at(self, now: float, passes: int) -> int:
        """The first of `passes` passes that ends at `now` or later."""
        low, high = 1, passes
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._after(middle) >= now else (middle + 1, high)
        return low
