# SPDX-License-Identifier: Apache-2.0
"""Admission by lease: pools of several replicas over one store, on a driven clock. Time passes only where all wait."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dynamo_resilience._admission import SERVERLESS, Ask, Permit, Pool, reserved_ranges
from dynamo_resilience._config import Capacity, Model, Tenant
from dynamo_resilience._errors import ConfigError, LeaseLost, Rejected, StoreUnavailable
from dynamo_resilience._store import LeaseReply, LeaseRequest, MemoryStore, Store
from dynamo_resilience._units import Units

TTL = 3.0
KEY = "0" * 64
ONE = Units(1)

T = TypeVar("T")


class _Jump(selectors.DefaultSelector):
    """Where nothing is ready the time goes on to the next timer."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise RuntimeError("everybody waits, and no timer is set")
            self.now += timeout
        return events


class DrivenLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only where all tasks wait."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now

    def jump(self, seconds: float) -> None:
        """Let time pass while nothing runs, as on a machine that was suspended."""
        self._jump.now += seconds


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    loop = DrivenLoop()
    try:
        return loop.run_until_complete(work())
    finally:
        loop.close()


def clock() -> float:
    return asyncio.get_running_loop().time()


def jump(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, DrivenLoop)
    loop.jump(seconds)


class FakeAwayStore:
    """A store that can be away, or slow: what no store in this process can be."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.away = False
        self.answers = asyncio.Event()  # cleared: it takes its time
        self.answers.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        if self.away:
            raise StoreUnavailable("lease: away")
        await self.answers.wait()
        return await self._store.lease(request)


def model(sequences: int = 8, blocks: int = 8, **more: Any) -> Model:
    capacity = Capacity(sequences=sequences, **{key: more.pop(key) for key in ("kv_tokens",) if key in more})
    return Model(capacity=capacity, blocks=blocks, **more)


def tenants(**weights: float) -> dict[str, Tenant]:
    return {name: Tenant(keys_sha256=[KEY], weight=weight) for name, weight in weights.items()}


def ask(tenant: str = "a", need: Units = ONE, patience: float = 60.0, priority: int = 0) -> Ask:
    now = clock()
    return Ask(tenant, need, now, now + patience, priority)


@asynccontextmanager
async def replicas(
    number: int,
    settings: Model,
    known: dict[str, Tenant] | None = None,
    limit: int = 1000,
    store: Store | None = None,
) -> AsyncIterator[list[Pool]]:
    store = store or MemoryStore(clock)
    pools = [Pool("east", "m", settings, store, f"replica-{i}", clock, known or {}, limit, TTL) for i in range(number)]
    for pool in pools:
        await pool.start()
    try:
        yield pools
    finally:
        for pool in pools:
            await pool.close()


def used(pools: list[Pool]) -> int:
    return sum(one["used"]["sequences"] for pool in pools for one in pool.snapshot()["accounts"].values())


async def fill(pool: Pool, number: int, **kinds: Any) -> list[Permit]:
    return [await pool.admit(ask(**kinds)) for _ in range(number)]


def queue(pool: Pool, wanted: Ask) -> asyncio.Task[Permit]:
    return asyncio.get_running_loop().create_task(pool.admit(wanted))


def admitted(task: asyncio.Task[Permit]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def serve(tasks: list[asyncio.Task[Permit]]) -> None:
    """Release each as soon as it is admitted."""
    for task in asyncio.as_completed(tasks):
        (await task).release()


async def settle() -> None:
    await asyncio.sleep(0.2)


# Ranges.


def test_a_reserved_share_is_rounded_down_to_whole_blocks_and_is_one_at_least() -> None:
    settings = model(64, 64, reserved={"a": 0.25, "b": 0.001, "c": 0.3})
    assert reserved_ranges(settings) == {"a": (0, 16), "b": (16, 17), "c": (17, 36)}


def test_a_share_of_29_percent_of_100_blocks_is_29_blocks() -> None:
    assert reserved_ranges(model(100, 100, reserved={"a": 0.29})) == {"a": (0, 29)}


def test_shares_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="3 blocks of 2: a 1, b 1, c 1"):
        reserved_ranges(model(8, 2, reserved={"a": 0.1, "b": 0.1, "c": 0.1}))


def test_a_tenant_called_serverless_is_refused() -> None:
    with pytest.raises(ConfigError, match="'serverless'"):
        reserved_ranges(model(8, 8, reserved={SERVERLESS: 0.5}))


def test_a_capacity_smaller_than_the_number_of_blocks_is_used_to_the_last_unit() -> None:
    async def work() -> None:
        async with replicas(2, model(sequences=5, blocks=64)) as pools:
            permits = await fill(pools[0], 2) + await fill(pools[1], 3)
            assert used(pools) == 5
            one_more = queue(pools[0], ask(patience=5))
            await asyncio.sleep(6)
            assert isinstance(one_more.exception(), Rejected)
            for permit in permits:
                permit.release()

    run(work)


# Admission.


def test_with_room_and_an_empty_queue_a_request_is_admitted_without_suspending() -> None:
    async def work() -> None:
        async with replicas(1, model()) as [pool]:
            (await pool.admit(ask())).release()
            assert pool.ready(ask())
            assert pool.wait_estimate(ask()) == 0.0
            with pytest.raises(StopIteration) as end:
                pool.admit(ask()).send(None)
            permit = end.value.value
            permit.check()
            epoch, counter = permit.token.split(".")
            assert (permit.pool, permit.account, int(epoch), int(counter) > 0) == ("east/m", SERVERLESS, 1, True)
            permit.release()
            permit.release()
            assert used([pool]) == 0
            with pytest.raises(LeaseLost, match="released"):
                permit.check()

    run(work)


def test_capacity_is_never_exceeded_and_what_one_replica_leaves_idle_another_uses() -> None:
    async def work() -> None:
        async with replicas(3, model()) as pools:
            first = await fill(pools[0], 8)
            waiting = [queue(pool, ask()) for pool in pools for _ in range(4)]
            await settle()
            assert used(pools) == 8
            assert not any(map(admitted, waiting))
            for permit in first:
                permit.release()
            await settle()
            assert used(pools) == 8
            assert sum(map(admitted, waiting)) == 8
            while waiting:
                done = [task for task in waiting if task.done()]
                waiting = [task for task in waiting if not task.done()]
                for task in done:
                    task.result().release()
                await settle()
                assert used(pools) <= 8
            # Everything is idle now; one replica can have it all.
            for permit in await fill(pools[2], 8):
                permit.release()

    run(work)


def test_a_pool_is_ready_while_its_lease_can_grow_and_not_when_other_replicas_have_it_all() -> None:
    async def work() -> None:
        async with replicas(2, model()) as pools:
            assert pools[0].ready(ask())  # it has nothing yet
            burst = [queue(pools[0], ask()) for _ in range(8)]
            await asyncio.sleep(0)
            assert not pools[0].ready(ask())  # more than there is
            await settle()
            permits = [task.result() for task in burst]
            assert pools[1].ready(ask())  # it cannot know
            waiting = queue(pools[1], ask())
            await settle()
            assert not pools[1].ready(ask())
            permits[0].release()
            (await waiting).release()
            for permit in permits[1:]:
                permit.release()
            await asyncio.sleep(TTL)
            assert pools[1].ready(ask())

    run(work)


def test_each_dimension_is_a_limit_and_the_first_token_gives_prefill_back() -> None:
    async def work() -> None:
        capacity = Capacity(sequences=100, prefill_tokens=1000, kv_tokens=4000)
        async with replicas(1, Model(capacity=capacity, blocks=4)) as [pool]:
            first = await pool.admit(ask(need=Units(1, 900, 1000)))
            second = queue(pool, ask(need=Units(1, 200, 1000)))
            await settle()
            assert not second.done()
            first.prefill_done()
            await settle()
            assert admitted(second)
            third = queue(pool, ask(need=Units(1, 0, 2001)))
            await settle()
            assert not third.done()
            first.release()
            (await third).release()
            second.result().release()

    run(work)


def test_a_request_larger_than_the_pool_is_admitted_alone() -> None:
    async def work() -> None:
        async with replicas(2, model(sequences=8, kv_tokens=8000)) as pools:
            small = [await pool.admit(ask(need=Units(1, 0, 1000))) for pool in pools for _ in range(3)]
            large = queue(pools[1], ask(need=Units(1, 0, 1_000_000)))
            for permit in small:
                assert not large.done()
                permit.release()
                await settle()
            assert admitted(large)
            large.result().release()

    run(work)


def test_a_large_request_is_not_starved_by_small_ones_of_any_replica() -> None:
    async def work() -> None:
        async with replicas(2, model()) as pools:
            running = await fill(pools[0], 4) + await fill(pools[1], 4)
            large = queue(pools[0], ask("large", Units(8), patience=600))
            served = 0

            async def small(pool: Pool) -> None:
                nonlocal served
                while not large.done():
                    permit = await pool.admit(ask("small", patience=600))
                    served += 1
                    await asyncio.sleep(0.5)
                    permit.release()

            crowd = [asyncio.create_task(small(pool)) for pool in pools for _ in range(8)]
            for permit in running:
                await asyncio.sleep(0.1)
                permit.release()
            started = clock()
            permit = await large
            assert clock() - started < 60
            permit.release()
            await asyncio.gather(*crowd)

    run(work)


def test_two_large_requests_on_two_replicas_do_not_wait_for_each_other() -> None:
    async def work() -> None:
        async with replicas(2, model()) as pools:
            running = await fill(pools[0], 4) + await fill(pools[1], 4)
            large = [queue(pool, ask(need=Units(8), patience=600)) for pool in pools]
            await settle()
            for permit in running:
                permit.release()
            done, _ = await asyncio.wait(large, return_when=asyncio.FIRST_COMPLETED)
            await settle()
            assert len(done) == 1
            assert used(pools) == 8
            done.pop().result().release()
            for task in large:
                (await task).release()

    run(work)


# Order.


async def _order(pool: Pool, asks: list[Ask], hold: list[Permit]) -> list[Ask]:
    """Return the order in which they are admitted, one at a time."""
    order: list[Ask] = []

    async def one(wanted: Ask) -> None:
        permit = await pool.admit(wanted)
        order.append(wanted)
        await asyncio.sleep(0.1)
        permit.release()

    tasks = []
    for wanted in asks:
        tasks.append(asyncio.create_task(one(wanted)))
        await asyncio.sleep(0)
    for permit in hold:
        permit.release()
    await asyncio.gather(*tasks)
    return order


def test_higher_priority_goes_first_and_within_a_tenant_the_order_is_kept() -> None:
    async def work() -> None:
        async with replicas(1, model(sequences=1, blocks=1)) as [pool]:
            asks = [ask(priority=priority) for priority in (0, 1, 0, 2, 1)]
            order = await _order(pool, asks, await fill(pool, 1))
            assert order == [asks[i] for i in (3, 1, 4, 0, 2)]

    run(work)


def test_a_higher_priority_with_room_passes_a_large_request_that_waits() -> None:
    async def work() -> None:
        async with replicas(1, model()) as [pool]:
            running = await fill(pool, 7)
            large = queue(pool, ask(need=Units(4)))
            await settle()
            equal = queue(pool, ask())
            await settle()
            assert not equal.done()
            higher = queue(pool, ask(priority=1))
            await settle()
            assert admitted(higher)
            assert not equal.done()
            large.cancel()
            await settle()
            assert not equal.done()
            running[0].release()
            await settle()
            assert admitted(equal)

    run(work)


def test_tenants_share_a_contended_pool_by_weight_not_by_how_many_they_send() -> None:
    async def work() -> None:
        known = tenants(gold=3, tin=1, flood=1)
        async with replicas(1, model(sequences=2, blocks=2), known) as [pool]:
            asks = [ask("flood") for _ in range(300)]
            asks += [ask(name) for _ in range(100) for name in ("gold", "tin")]
            order = [one.tenant for one in await _order(pool, asks, await fill(pool, 2))]
            first = order[:100]
            assert {name: first.count(name) for name in known} == {
                "gold": pytest.approx(60, abs=2),
                "tin": pytest.approx(20, abs=2),
                "flood": pytest.approx(20, abs=2),
            }

    run(work)


def test_cost_counts_a_tenant_of_large_requests_gets_fewer_of_them() -> None:
    async def work() -> None:
        async with replicas(1, model(sequences=4, blocks=4)) as [pool]:
            asks = [ask("large", Units(4)) for _ in range(40)] + [ask("small", Units(1)) for _ in range(160)]
            order = [one.tenant for one in await _order(pool, asks, await fill(pool, 4))]
            half = order[:100]
            assert half.count("large") == pytest.approx(20, abs=2)

    run(work)


# Deadlines and refusals.


def test_a_request_that_reaches_its_deadline_is_refused_then_and_not_later() -> None:
    async def work() -> None:
        async with replicas(1, model(sequences=1, blocks=1)) as [pool]:
            [running] = await fill(pool, 1)
            started = clock()
            with pytest.raises(Rejected, match=r"within 2 s") as refused:
                await pool.admit(ask(patience=2))
            assert clock() - started == pytest.approx(2, abs=0.01)
            assert (refused.value.reason, refused.value.retry_after_s) == ("deadline", None)
            assert pool.snapshot()["waiting"] == 0
            running.release()
            (await pool.admit(ask())).release()

    run(work)


def test_a_refused_head_lets_those_behind_it_go() -> None:
    async def work() -> None:
        async with replicas(1, model(sequences=2, blocks=2)) as [pool]:
            [running] = await fill(pool, 1)
            large = queue(pool, ask(need=Units(2), patience=1))
            await asyncio.sleep(0)
            small = queue(pool, ask())
            await asyncio.sleep(0.9)
            assert not small.done()
            await asyncio.sleep(0.2)
            assert isinstance(large.exception(), Rejected)
            assert admitted(small)
            running.release()

    run(work)


async def _busy(pool: Pool, seconds: float, tenant: str = "busy", crowd: int = 12) -> list[asyncio.Task[None]]:
    """Keep a queue standing: each request runs for a second."""

    async def one() -> None:
        end = clock() + seconds
        while clock() < end:
            permit = await pool.admit(ask(tenant, patience=600))
            await asyncio.sleep(1)
            permit.release()

    return [asyncio.create_task(one()) for _ in range(crowd)]


def test_a_request_that_cannot_make_its_deadline_is_refused_at_once_and_told_when_to_come_again() -> None:
    async def work() -> None:
        async with replicas(1, model(sequences=4, blocks=4)) as [pool]:
            crowd = await _busy(pool, 20, crowd=24)  # 20 of them wait, 4 are served each second
            await asyncio.sleep(10.5)
            assert pool.wait_estimate(ask("busy")) == pytest.approx(5, rel=0.2)
            # Another tenant is next in line, whatever the crowd's queue.
            wait = pool.wait_estimate(ask("other"))
            assert wait is not None
            assert wait < 1
            started = clock()
            with pytest.raises(Rejected) as refused:
                await pool.admit(ask("busy", patience=2))
            assert clock() == started
            assert refused.value.reason == "deadline"
            assert refused.value.retry_after_s is not None
            assert 4 <= refused.value.retry_after_s <= 1.5 * 6.5
            (await pool.admit(ask("other", patience=2))).release()
            (await pool.admit(ask("busy", patience=9))).release()
            await asyncio.gather(*crowd)

    run(work)


def test_those_who_are_told_to_stay_away_for_long_do_not_come_back_together() -> None:
    async def work() -> None:
        pool = Pool("east", "m", model(), MemoryStore(clock), "r", clock, {}, 10, TTL)
        times = [pool._rejection("deadline", ask(), wait_s).retry_after_s for wait_s in (0.01, 5.0, 1e6) for _ in "ab"]
        assert len(set(times)) == len(times)
        assert all(1 <= (time or 0) <= 300 for time in times)

    run(work)


def test_where_prefill_is_short_the_estimate_goes_by_first_tokens() -> None:
    async def work() -> None:
        capacity = Capacity(sequences=1000, prefill_tokens=1000)
        async with replicas(1, Model(capacity=capacity, blocks=10)) as [pool]:

            async def one() -> None:
                permit = await pool.admit(ask(need=Units(1, 500), patience=600))
                await asyncio.sleep(1)
                permit.prefill_done()
                await asyncio.sleep(20)
                permit.release()

            crowd = [asyncio.create_task(one()) for _ in range(40)]  # two each second
            await asyncio.sleep(9.5)
            assert pool.wait_estimate(ask(need=Units(1, 500))) == pytest.approx(11, rel=0.2)
            await asyncio.gather(*crowd)

    run(work)


def test_an_idle_pool_that_drained_slowly_refuses_nobody_of_a_burst() -> None:
    async def work() -> None:
        async with replicas(1, model()) as [pool]:
            for _ in range(20):
                permit = await pool.admit(ask())
                await asyncio.sleep(5)
                permit.release()
            tasks = [queue(pool, ask(patience=20)) for _ in range(16)]
            await settle()
            assert sum(map(admitted, tasks)) == 8
            assert not any(task.done() for task in tasks[8:])
            for task in tasks:
                (await task).release()

    run(work)


def test_a_full_queue_refuses_and_a_tenant_with_fewer_waiting_is_let_in_before_one_with_many() -> None:
    async def work() -> None:
        async with replicas(1, model(sequences=1, blocks=1), limit=4) as [pool]:
            [running] = await fill(pool, 1)
            many = [queue(pool, ask("many")) for _ in range(4)]
            await asyncio.sleep(0)
            with pytest.raises(Rejected, match="4 requests wait already") as refused:
                await pool.admit(ask("many"))
            assert refused.value.reason == "queue_full"
            few = queue(pool, ask("few"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert [task.done() for task in many] == [False, False, False, True]
            assert isinstance(many[3].exception(), Rejected)
            urgent = queue(pool, ask("many", priority=1))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert [task.done() for task in many] == [False, False, True, True]
            assert pool.snapshot()["waiting"] == 4
            assert pool.stats.rejected == {"queue_full": {"many": 3}}
            running.release()
            await serve([urgent, few, *many[:2]])

    run(work)


def test_a_reserved_tenant_keeps_its_places_in_a_full_queue() -> None:
    async def work() -> None:
        async with replicas(1, model(reserved={"gold": 0.25}), limit=8) as [pool]:
            running = await fill(pool, 2, tenant="gold") + await fill(pool, 6)
            crowd = [queue(pool, ask("crowd", priority=9)) for _ in range(8)]
            await asyncio.sleep(0)
            gold = [queue(pool, ask("gold")) for _ in range(2)]
            await settle()
            assert sum(task.done() for task in crowd) == 2
            assert not any(task.done() for task in gold)
            with pytest.raises(Rejected):
                await pool.admit(ask("gold"))
            for permit in running:
                permit.release()
            await serve([*gold, *crowd[:6]])

    run(work)


def test_where_everything_is_reserved_and_nothing_lent_others_are_refused() -> None:
    async def work() -> None:
        async with replicas(1, model(reserved={"gold": 1.0}, borrow=False)) as [pool]:
            (await pool.admit(ask("gold"))).release()
            with pytest.raises(Rejected, match="'a'") as refused:
                await pool.admit(ask("a"))
            assert refused.value.reason == "no_capacity"

    run(work)


def test_a_cancelled_request_leaves_nothing_behind() -> None:
    async def work() -> None:
        async with replicas(1, model(sequences=1, blocks=1)) as [pool]:
            [running] = await fill(pool, 1)
            waiting = queue(pool, ask())
            await asyncio.sleep(0)
            behind = queue(pool, ask())
            await asyncio.sleep(0)
            waiting.cancel()
            await settle()
            assert pool.snapshot()["waiting"] == 1
            # And one that is cancelled in the instant in which it is admitted.
            running.release()
            behind.cancel()
            await settle()
            assert behind.cancelled()
            assert used([pool]) == 0
            (await pool.admit(ask())).release()

    run(work)


def test_a_request_cancelled_in_the_instant_of_its_turn_passes_it_on() -> None:
    async def work() -> None:
        async with replicas(1, model(sequences=1, blocks=1)) as [pool]:
            [running] = await fill(pool, 1)
            first = queue(pool, ask())
            await asyncio.sleep(0)
            second = queue(pool, ask())
            await asyncio.sleep(0)
            first.cancel()
            running.release()
            await asyncio.sleep(0)
            assert admitted(second) or not second.done()
            (await second).release()
            assert used([pool]) == 0

    run(work)


def test_draining_refuses_who_waits_and_who_comes_and_leaves_alone_what_runs() -> None:
    async def work() -> None:
        async with replicas(1, model(sequences=1, blocks=1)) as [pool]:
            [running] = await fill(pool, 1)
            waiting = queue(pool, ask())
            await asyncio.sleep(0)
            pool.drain()
            with pytest.raises(Rejected) as refused:
                await waiting
            assert refused.value.reason == "draining"
            with pytest.raises(Rejected):
                await pool.admit(ask())
            assert not pool.ready(ask())
            running.check()
            running.release()

    run(work)


# Reservations.


def test_a_reserved_tenant_pays_from_its_own_account_first_and_then_competes_with_the_rest() -> None:
    async def work() -> None:
        async with replicas(1, model(reserved={"gold": 0.25})) as [pool]:
            await fill(pool, 2, tenant="gold")
            gold = await fill(pool, 6, tenant="gold")
            assert used([pool]) == 8
            assert pool.snapshot()["accounts"]["gold"]["running"] == 2
            for permit in gold:
                permit.check()

    run(work)


def test_without_borrowing_the_reserved_share_stays_free_for_its_tenant() -> None:
    async def work() -> None:
        async with replicas(2, model(reserved={"gold": 0.5}, borrow=False)) as pools:
            crowd = [queue(pool, ask("crowd")) for pool in pools for _ in range(8)]
            await settle()
            assert sum(map(admitted, crowd)) == 4
            started = clock()
            await fill(pools[0], 2, tenant="gold")
            await fill(pools[1], 2, tenant="gold")
            assert clock() - started < 0.5

    run(work)


async def _until_reclaimed(pool: Pool, wanted: Ask, log: list[str], name: str, sent: bool = False) -> Permit:
    """What the proxy does: cancel, release, ask again."""
    while True:
        permit = await pool.admit(wanted)
        taken = asyncio.Event()
        permit.on_reclaim(taken.set)
        if sent:
            permit.sent_byte()
        log.append(f"{name} runs")
        await taken.wait()
        with pytest.raises(LeaseLost, match="taken"):
            permit.check()
        log.append(f"{name} reclaimed")
        permit.release()


def test_idle_reserved_capacity_is_lent_and_taken_back_at_once_the_newest_first() -> None:
    async def work() -> None:
        async with replicas(2, model(reserved={"gold": 0.5})) as pools:
            log: list[str] = []
            crowd = []
            for i in range(8):
                crowd.append(asyncio.create_task(_until_reclaimed(pools[0], ask("crowd"), log, str(i))))
                await asyncio.sleep(0.05)
            assert log == [f"{i} runs" for i in range(8)]
            log.clear()
            started = clock()
            gold = await asyncio.gather(*(pools[1].admit(ask("gold")) for _ in range(3)))
            assert clock() - started < 0.5
            assert used(pools) <= 8
            assert log[:3] == ["7 reclaimed", "6 reclaimed", "5 reclaimed"]
            assert pools[0].stats.reclaimed >= 3
            # They wait now; as soon as the tenant has done they run again.
            log.clear()
            for permit in gold:
                permit.release()
            await asyncio.sleep(3 * TTL)
            assert sorted(log) == ["5 runs", "6 runs", "7 runs"] or sorted(log) == ["4 runs", *sorted(log)[1:]]
            for task in crowd:
                task.cancel()

    run(work)


def test_a_client_that_has_had_a_byte_keeps_borrowed_capacity_unless_any_may_be_taken() -> None:
    async def work(reclaim: str, taken: bool) -> None:
        async with replicas(1, model(reserved={"gold": 0.5}, reclaim=reclaim)) as [pool]:
            log: list[str] = []
            crowd = [
                asyncio.create_task(_until_reclaimed(pool, ask("crowd"), log, str(i), sent=True)) for i in range(8)
            ]
            await settle()
            assert used([pool]) == 8
            gold = queue(pool, ask("gold"))
            await settle()
            assert admitted(gold) == taken
            for task in crowd:
                task.cancel()

    run(lambda: work("unsent", False))
    run(lambda: work("any", True))


def test_no_new_borrower_gets_what_its_owner_has_called_back() -> None:
    async def work() -> None:
        async with replicas(1, model(reserved={"gold": 0.5})) as [pool]:
            crowd = await fill(pool, 8, tenant="crowd")
            for permit in crowd:
                permit.sent_byte()
            gold = queue(pool, ask("gold", patience=600))
            await settle()
            more = queue(pool, ask("crowd", patience=600))
            await settle()
            crowd[0].release()
            await settle()
            assert admitted(gold)
            assert not more.done()

    run(work)


def test_a_reclaim_before_the_callback_is_there_still_calls_it() -> None:
    async def work() -> None:
        async with replicas(1, model(sequences=2, blocks=2, reserved={"gold": 0.5})) as [pool]:
            crowd = await fill(pool, 2, tenant="crowd")
            gold = queue(pool, ask("gold"))
            await settle()
            called: list[Permit] = []
            for permit in crowd:
                permit.on_reclaim(lambda permit=permit: called.append(permit))  # type: ignore[misc]
            assert called == [crowd[1]]
            with pytest.raises(LeaseLost, match="taken"):
                crowd[1].check()
            crowd[0].check()
            crowd[1].release()
            (await gold).release()

    run(work)


def test_a_reclaimed_request_goes_to_the_front_of_its_tenant() -> None:
    async def work() -> None:
        async with replicas(1, model(sequences=1, blocks=1)) as [pool]:
            again = ask("a")
            permit = await pool.admit(again)
            others = [queue(pool, ask("a")) for _ in range(3)]
            await asyncio.sleep(0)
            back = queue(pool, again)
            await asyncio.sleep(0)
            permit.release()
            await settle()
            assert admitted(back)
            assert not any(task.done() for task in others)

    run(work)


def test_a_reserved_tenant_keeps_its_rate_under_overload_and_the_rest_share_what_is_left() -> None:
    async def work() -> None:
        known = tenants(gold=1, a=1, b=2)
        async with replicas(2, model(sequences=20, blocks=20, reserved={"gold": 0.3}), known) as pools:
            served = dict.fromkeys(known, 0)
            late = 0
            end = clock() + 60

            async def one(pool: Pool, tenant: str) -> None:
                nonlocal late
                wanted = ask(tenant, patience=5)
                while True:
                    try:
                        permit = await pool.admit(wanted)
                    except Rejected:
                        late += clock() > wanted.deadline + 0.01
                        return
                    taken = asyncio.Event()
                    permit.on_reclaim(taken.set)
                    try:
                        await asyncio.wait_for(taken.wait(), 1.0)
                    except asyncio.TimeoutError:
                        permit.release()
                        served[tenant] += 1
                        return
                    permit.release()

            async def source(pool: Pool, tenant: str, rate: float) -> None:
                while clock() < end:
                    tasks.append(asyncio.create_task(one(pool, tenant)))
                    await asyncio.sleep(1 / rate)

            tasks: list[asyncio.Task[None]] = []
            # 20 requests a second can be served; gold asks for 5.5 of the 6 that are its own.
            await asyncio.gather(
                *(source(pool, "gold", 2.75) for pool in pools),
                *(source(pool, "a", 25) for pool in pools),
                *(source(pool, "b", 25) for pool in pools),
            )
            await asyncio.gather(*tasks)
            assert served["gold"] >= 0.99 * 60 * 5.5
            assert sum(served.values()) > 0.85 * 60 * 20
            assert served["b"] / served["a"] == pytest.approx(2, rel=0.15)
            assert late == 0

    run(work)


# Leases that end.


def test_a_dead_replicas_capacity_is_back_within_a_ttl() -> None:
    async def work() -> None:
        store = MemoryStore(clock)
        cut = FakeAwayStore(store)
        async with replicas(1, model(), store=cut) as [dead]:
            await fill(dead, 7)
            cut.away = True  # from now on the store hears nothing of it
            alive = Pool("east", "m", model(), store, "alive", clock, {}, 100, TTL)
            await alive.start()
            started = clock()
            await fill(alive, 8)
            assert clock() - started <= TTL
            await alive.close()

    run(work)


def test_after_a_pause_nothing_is_sent_until_the_store_was_asked() -> None:
    async def work() -> None:
        async with replicas(1, model()) as [pool]:
            permits = await fill(pool, 3)
            jump(2 * TTL)
            with pytest.raises(LeaseLost, match="no longer held"):
                permits[0].check()
            assert pool.stats.lost == 1
            await settle()
            permits[0].check()  # nobody else had taken the blocks
            assert pool.ready(ask())
            one_more = queue(pool, ask())
            await settle()
            assert admitted(one_more)
            # One that comes in the instant of waking waits for the answer.
            jump(2 * TTL)
            late = queue(pool, ask())
            await asyncio.sleep(0)
            assert not late.done()
            await asyncio.sleep(TTL / 2)
            assert admitted(late)

    run(work)


def test_a_paused_replica_that_lost_its_blocks_admits_nothing_until_its_requests_fit_again() -> None:
    async def work() -> None:
        store = MemoryStore(clock)
        slow = FakeAwayStore(store)
        async with replicas(1, model(), store=slow) as [paused]:
            permits = await fill(paused, 8)
            slow.answers.clear()
            other = Pool("east", "m", model(), store, "other", clock, {}, 100, TTL)
            await other.start()
            theirs = await fill(other, 6)
            for permit in permits:
                with pytest.raises(LeaseLost):
                    permit.check()
            slow.answers.set()
            await settle()
            assert paused.snapshot()["accounts"][SERVERLESS]["debt"]
            with pytest.raises(LeaseLost):
                permits[0].check()  # two blocks are left for eight
            waiting = queue(paused, ask(patience=600))
            for permit in permits[:6]:
                await settle()
                assert not waiting.done()
                permit.release()
            permits[6].check()
            await settle()
            assert not waiting.done()
            assert used([paused, other]) == 8
            theirs[0].release()
            await settle()
            assert admitted(waiting)
            await other.close()

    run(work)


def test_through_an_outage_of_the_store_it_serves_on_what_it_holds_and_no_more() -> None:
    async def work() -> None:
        store = FakeAwayStore(MemoryStore(clock))
        async with replicas(1, model(), store=store) as [pool]:
            permits = await fill(pool, 4)
            held = pool.snapshot()["accounts"][SERVERLESS]["lease"]["held"]
            store.away = True
            await asyncio.sleep(10 * TTL)
            assert pool.snapshot()["accounts"][SERVERLESS]["lease"]["outage"]
            for permit in permits:
                permit.check()
                permit.release()
            await asyncio.sleep(2 * TTL)
            permits = await fill(pool, held)
            waiting = queue(pool, ask(patience=600))
            await settle()
            assert not waiting.done()
            store.away = False
            (await waiting).release()
            await fill(pool, 8 - held)

    run(work)


def test_closing_gives_everything_back_at_once() -> None:
    async def work() -> None:
        async with replicas(2, model()) as pools:
            permits = await fill(pools[0], 8)
            for permit in permits:
                permit.release()
            await pools[0].close()
            started = clock()
            await fill(pools[1], 8)
            assert clock() - started < 0.1

    run(work)


def test_idle_capacity_goes_back_to_the_store_but_for_a_block_to_serve_on_without_it() -> None:
    async def work() -> None:
        async with replicas(1, model()) as [pool]:
            for permit in await fill(pool, 8):
                permit.release()
            assert pool.snapshot()["accounts"][SERVERLESS]["lease"]["held"] == 8
            await asyncio.sleep(TTL)
            assert pool.snapshot()["accounts"][SERVERLESS]["lease"]["held"] == 1

    run(work)


# Reload.


def test_a_larger_capacity_lets_in_who_waits_and_a_smaller_one_waits_for_who_runs() -> None:
    async def work() -> None:
        async with replicas(1, model()) as [pool]:
            permits = await fill(pool, 8)
            waiting = [queue(pool, ask()) for _ in range(8)]
            await settle()
            pool.update(model(sequences=12), {}, 1000, TTL)
            await settle()
            assert [admitted(task) for task in waiting] == [True] * 4 + [False] * 4
            pool.update(model(sequences=8, blocks=4), {}, 1000, TTL)
            for permit in permits[:4]:
                await settle()
                permit.release()
            await settle()
            assert [admitted(task) for task in waiting] == [True] * 4 + [False] * 4
            permits[4].release()
            await settle()
            assert [admitted(task) for task in waiting] == [True] * 5 + [False] * 3
            for permit in permits[5:]:
                permit.release()
            await serve(waiting)
            assert used([pool]) == 0

    run(work)


def test_reservations_come_and_go_while_requests_run_and_wait() -> None:
    async def work() -> None:
        async with replicas(2, model()) as pools:
            crowd = await fill(pools[0], 4, tenant="crowd") + await fill(pools[1], 4, tenant="crowd")
            gold = [queue(pool, ask("gold", patience=600)) for pool in pools for _ in range(2)]
            more = [queue(pool, ask("crowd", patience=600)) for pool in pools]
            await settle()
            for pool in pools:
                pool.update(model(reserved={"gold": 0.5}), {}, 1000, TTL)
            await settle()
            assert used(pools) == 8
            for permit in crowd:
                permit.release()
                await settle()
                assert used(pools) <= 8
            assert all(map(admitted, gold))
            for pool in pools:
                pool.update(model(), {}, 1000, TTL)
            await settle()
            for task in gold + more:
                (await task).check()
                task.result().release()
            await asyncio.sleep(2 * TTL)
            assert list(pools[0].snapshot()["accounts"]) == [SERVERLESS]
            await fill(pools[1], 8)

    run(work)


def test_a_model_that_a_reload_brought_back_does_not_use_what_still_runs_in_the_pool_before() -> None:
    async def work() -> None:
        store = MemoryStore(clock)
        async with replicas(1, model(), store=store) as [before], replicas(1, model(), store=store) as [after]:
            assert before.name == after.name  # and it is the same replica
            running = await fill(before, 5)
            asked = [queue(after, ask()) for _ in range(8)]
            await settle()
            assert used([before, after]) == 8
            for permit in running:
                permit.release()
            await before.close()
            await serve(asked)

    run(work)


def test_a_bad_reservation_changes_nothing() -> None:
    async def work() -> None:
        async with replicas(1, model(reserved={"gold": 0.5})) as [pool]:
            with pytest.raises(ConfigError):
                pool.update(model(blocks=1, reserved={"gold": 0.5, "tin": 0.5}), {}, 1000, TTL)
            assert pool.snapshot()["accounts"]["gold"]["own"] == [0, 4]

    run(work)


# Everything at once.


class _Client:
    """A request as the proxy handles it."""

    def __init__(self, pool: Pool, wanted: Ask) -> None:
        self.pool = pool
        self.wanted = wanted
        self.permit: Permit | None = None
        self.sent = False
        self.queue()

    def queue(self) -> None:
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        permit = await self.pool.admit(self.wanted)
        self.permit = permit
        permit.on_reclaim(self.reclaimed)

    def reclaimed(self) -> None:
        assert self.permit is not None
        assert self.permit.account == SERVERLESS
        assert not (self.sent and self.pool.settings.reclaim == "unsent")
        self.end()
        self.sent = False
        self.queue()

    def end(self) -> None:
        assert self.permit is not None
        self.permit.release()
        self.permit = None


class Replicas(RuleBasedStateMachine):
    """Three replicas, a reserved tenant, and whatever clients do: never too much, never too little, never stuck."""

    CAPACITY = Units(10, 2**53, 100)

    def __init__(self) -> None:
        super().__init__()
        self.loop = DrivenLoop()
        asyncio.set_event_loop(None)
        self.clients: list[_Client] = []

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    @initialize(
        blocks=st.integers(2, 12), borrow=st.booleans(), reclaim=st.sampled_from(["unsent", "any"]), share=st.just(0.3)
    )
    def start(self, blocks: int, borrow: bool, reclaim: Any, share: float) -> None:
        async def work() -> None:
            store = MemoryStore(clock)
            settings = Model(
                capacity=Capacity(sequences=10, kv_tokens=100),
                blocks=blocks,
                reserved={"gold": share},
                borrow=borrow,
                reclaim=reclaim,
            )
            self.pools = [
                Pool("east", "m", settings, store, f"replica-{i}", clock, tenants(b=3.0), 1000, TTL) for i in range(3)
            ]
            for pool in self.pools:
                await pool.start()

        self.do(work())

    @rule(
        replica=st.integers(0, 2),
        tenant=st.sampled_from(["gold", "a", "b"]),
        need=st.tuples(st.sampled_from([1, 1, 1, 2, 12]), st.just(0), st.sampled_from([1, 10, 40, 200])),
        priority=st.sampled_from([0, 0, 1]),
        number=st.integers(1, 4),
    )
    def come(self, replica: int, tenant: str, need: tuple[int, int, int], priority: int, number: int) -> None:
        async def work() -> None:
            for _ in range(number):
                wanted = ask(tenant, Units(*need), 1e6, priority)
                self.clients.append(_Client(self.pools[replica], wanted))
            await asyncio.sleep(0)

        self.do(work())

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), what=st.sampled_from(["end", "end", "end", "send", "leave"]))
    def client(self, data: st.DataObject, what: str) -> None:
        one = data.draw(st.sampled_from(self.clients))

        async def work() -> None:
            if what == "leave":
                one.task.cancel()
                if one.permit is not None:
                    one.end()
                self.clients.remove(one)
            elif one.permit is None:
                return
            elif what == "send":
                one.permit.check()
                one.permit.sent_byte()
                one.sent = True
            else:
                one.end()
                self.clients.remove(one)
            await asyncio.sleep(0)

        self.do(work())

    @rule(seconds=st.sampled_from([0.001, 0.02, 0.2, 1.1, 4.0]))
    def time(self, seconds: float) -> None:
        self.do(asyncio.sleep(seconds))

    @precondition(lambda self: self.clients)
    @rule()
    def nobody_waits_beside_room(self) -> None:
        """What could run does, once the leases have settled."""
        self.do(asyncio.sleep(2 * TTL))
        waiting = [one for one in self.clients if one.permit is None]
        running = [one for one in self.clients if one.permit is not None]
        assert running or not waiting
        if any(one.wanted.tenant == "gold" for one in waiting) and not any(one.sent for one in running):
            own = [self.do(_snapshot(pool))["accounts"]["gold"]["running"] for pool in self.pools]
            assert any(own), "nothing of its own is in the tenant's use, and it waits"

    @invariant()
    def never_more_than_there_is(self) -> None:
        total = [0, 0, 0]
        for pool in getattr(self, "pools", []):
            for account in self.do(_snapshot(pool))["accounts"].values():
                total = [mine + more for mine, more in zip(total, account["used"].values(), strict=True)]
                assert not account["debt"]
        assert Units(*total).fits(self.CAPACITY), total

    def teardown(self) -> None:
        if hasattr(self, "pools"):
            self.do(self._finish())
        self.loop.close()

    async def _finish(self) -> None:
        # Everybody who waits is served once others end, one by one.
        for _ in range(3 * len(self.clients) + 3):
            running = [one for one in self.clients if one.permit is not None]
            if running:
                running[0].end()
                self.clients.remove(running[0])
            await asyncio.sleep(TTL / 2)
        assert not self.clients
        for pool in self.pools:
            assert pool.snapshot()["waiting"] == 0
            assert all(account["running"] == 0 for account in pool.snapshot()["accounts"].values())
        await asyncio.sleep(2 * TTL)
        for pool in self.pools:
            for name, account in pool.snapshot()["accounts"].items():
                assert account["lease"]["held"] <= (name == SERVERLESS)
        for pool in self.pools:
            await pool.close()


async def _snapshot(pool: Pool) -> dict[str, Any]:
    return pool.snapshot()


TestReplicas = Replicas.TestCase
TestReplicas.settings = hypothesis_settings(max_examples=15, stateful_step_count=40)
