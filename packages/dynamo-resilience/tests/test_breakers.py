# SPDX-License-Identifier: Apache-2.0
"""Breakers as a replica sees them: alone, in a fleet over one real store, and while that store is away."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dynamo_resilience._breakers import Breakers, Outcome, Target
from dynamo_resilience._config import BreakerPolicy, StoreSettings
from dynamo_resilience._errors import StoreUnavailable
from dynamo_resilience._store import BreakerState, Claim, MemoryStore, Report, open_store
from support.store_server import Cut, StoreServer

BAD = Target("eu", "model", "worker=1")
GOOD = Target("eu", "model", "worker=2")
POLICY = BreakerPolicy(min_requests=8, open_s=5.0, probe_s=60.0)
#: Short enough that a probe is soon due.
SOON = POLICY.model_copy(update={"open_s": 0.2})


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on an event loop of its own, which in the end has nothing left to do."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        async def alone() -> None:
            before = asyncio.all_tasks()
            await test(*arguments, **named)
            assert asyncio.all_tasks() <= before

        asyncio.run(asyncio.wait_for(alone(), 120))

    return run


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class WatchedStore(MemoryStore):
    """The in-process store; keeps what it was told, and can hold back its answers."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.batches: list[list[Report]] = []
        self.failing = False
        self.let = asyncio.Event()
        self.let.set()

    async def report(self, reports: Sequence[Report], policy: BreakerPolicy) -> list[BreakerState]:
        self.batches.append(list(reports))
        if self.failing:
            raise StoreUnavailable("no answer")
        await self.let.wait()
        return await super().report(reports, policy)

    async def claim(self, claim: Claim, policy: BreakerPolicy) -> BreakerState:
        await self.let.wait()
        return await super().claim(claim, policy)

    async def breakers(self) -> list[BreakerState]:
        await self.let.wait()
        return await super().breakers()


async def until(true: Callable[[], object], what: str = "") -> None:
    """Wait for it; the limit is for when it never comes."""
    for _ in range(20_000):
        if true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"never came: {what or true}")


class Lab:
    """Some replicas over one in-process store, and a clock."""

    def __init__(self, replicas: int = 1, policy: BreakerPolicy | None = POLICY) -> None:
        self.clock = Clock()
        self.store = WatchedStore(self.clock)
        self.all = [Breakers(self.store, policy, self.clock) for _ in range(replicas)]

    async def __aenter__(self) -> Lab:
        for one in self.all:
            await one.start()
            one.members(BAD.group, 4)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.store.let.set()
        for one in self.all:
            await one.close()

    def record(self, outcome: Outcome, count: int = 1, target: Target = BAD, replica: int = 0, probe: int = 0) -> None:
        for _ in range(count):
            self.all[replica].record(target, outcome, self.clock.now, probe)

    def states(self, target: Target = BAD) -> list[str]:
        return [one.state(target) for one in self.all]

    async def all_are(self, state: str, target: Target = BAD) -> None:
        await until(lambda: self.states(target) == [state] * len(self.all), f"{state} instead of {self.states(target)}")

    async def open(self) -> None:
        self.record(Outcome.ERROR, 8)
        await self.all_are("open")
        self.clock.now += 5
        assert self.states() == ["due"] * len(self.all)


def test_keys_and_groups_tell_everything_apart() -> None:
    targets = [
        Target(site, model, part)
        for site in ("eu", "us", "site")
        for model in ("m", "m x", "eu m")
        for part in ("", "frontend=http://h:1", "frontend=http://h:2", "worker=1")
    ]
    assert len({one.key for one in targets}) == len(targets)
    groups: dict[tuple[str, str, str], set[str]] = {}
    for one in targets:
        kind = one.part.partition("=")[0]
        groups.setdefault((one.model, kind, one.site if kind else ""), set()).add(one.group)
    assert all(len(names) == 1 for names in groups.values())
    assert len({name for names in groups.values() for name in names}) == len(groups)


@on_a_loop
async def test_one_replica_errors_open_the_breaker_for_all_and_a_probe_closes_it() -> None:
    async with Lab(3) as lab:
        assert lab.states() == ["closed"] * 3
        await lab.open()
        assert [one.remaining(BAD) for one in lab.all] == [0.0] * 3
        probes = await asyncio.gather(*(one.claim(BAD) for one in lab.all for _ in range(4)))
        assert sum(probe > 0 for probe in probes) == 1
        await lab.all_are("open")  # until the probe's end
        assert lab.states(GOOD) == ["closed"] * 3
        lab.record(Outcome.OK, probe=max(probes))
        await lab.all_are("closed")


@pytest.mark.parametrize("outcome", [Outcome.ERROR, Outcome.TIMEOUT, Outcome.SLOW_FIRST, Outcome.SLOW_TOKENS])
@on_a_loop
async def test_a_probe_that_is_not_good_opens_for_longer(outcome: Outcome) -> None:
    async with Lab() as lab:
        await lab.open()
        lab.record(outcome, probe=await lab.all[0].claim(BAD))
        await until(lambda: lab.all[0].remaining(BAD) == 10.0)
        (shown,) = (one for one in lab.all[0].snapshot() if one["target"] == BAD.key)
        assert (shown["state"], shown["reason"], shown["opens"]) == ("open", "probe", 2)


@on_a_loop
async def test_a_probe_that_says_nothing_is_given_back() -> None:
    async with Lab(2) as lab:
        await lab.open()
        lab.record(Outcome.IGNORED, probe=await lab.all[0].claim(BAD))
        await lab.all_are("due")
        assert await lab.all[1].claim(BAD)


@on_a_loop
async def test_a_request_that_is_cancelled_while_it_claims_leaves_no_probe_behind() -> None:
    async with Lab(2) as lab:
        await lab.open()
        lab.store.let.clear()
        asking = asyncio.create_task(lab.all[0].claim(BAD))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        lab.store.let.set()
        await until(lambda: lab.all[0].stats.probes == 1)
        await until(lambda: len(lab.store.batches) == 2)
        await lab.all_are("due")
        assert await lab.all[1].claim(BAD)


@on_a_loop
async def test_clients_faults_and_limits_do_not_count() -> None:
    async with Lab() as lab:
        lab.record(Outcome.IGNORED, 1000)
        lab.record(Outcome.ERROR, 7)
        await until(lambda: lab.store.batches)
        assert [report[3:8] for report in lab.store.batches[0]] == [(0, 7, 0, 0, 0)]
        assert lab.states() == ["closed"]


@on_a_loop
async def test_requests_sent_before_the_last_transition_say_nothing() -> None:
    async with Lab() as lab:
        old = lab.clock.now
        lab.clock.now += 1
        await lab.open()
        lab.record(Outcome.OK, probe=await lab.all[0].claim(BAD))
        await lab.all_are("closed")
        for _ in range(100):
            lab.all[0].record(BAD, Outcome.ERROR, old)  # streams that broke when it was bad
        lab.record(Outcome.OK)
        await until(lambda: lab.store.batches[-1][0].ok)
        assert lab.all[0].stats.stale == 100
        assert lab.states() == ["closed"]


@on_a_loop
async def test_a_group_that_nothing_is_known_of_never_opens() -> None:
    async with Lab() as lab:
        unknown = Target("us", "other")
        lab.record(Outcome.ERROR, 100, unknown)
        await until(lambda: lab.store.batches)
        await lab.all[0].close()
        assert lab.states(unknown) == ["closed"]
        assert lab.store.batches[0][0].members == 1


@on_a_loop
async def test_outcomes_go_in_batches_one_at_a_time_and_all_of_them_arrive() -> None:
    async with Lab() as lab:
        lab.record(Outcome.OK, 1000)
        lab.record(Outcome.OK, 500, GOOD)
        await until(lambda: lab.store.batches)
        assert [(one.target, one.ok) for one in lab.store.batches[0]] == [(BAD.key, 1000), (GOOD.key, 500)]
        lab.store.let.clear()
        lab.record(Outcome.ERROR)
        await until(lambda: len(lab.store.batches) == 2)
        lab.record(Outcome.ERROR, 3)
        lab.record(Outcome.TIMEOUT, 2)
        for _ in range(10):
            await asyncio.sleep(0.005)
        assert len(lab.store.batches) == 2  # its answer is awaited
        lab.store.let.set()
        await until(lambda: len(lab.store.batches) == 3)
        assert lab.store.batches[2][0][3:8] == (0, 3, 2, 0, 0)


@on_a_loop
async def test_what_the_store_did_not_take_is_judged_here_until_it_is_asked_again() -> None:
    async with Lab(2) as lab:
        lab.store.failing = True
        lab.store.let.clear()
        lab.record(Outcome.ERROR, 8)
        await until(lambda: lab.states() == ["open", "closed"])
        assert lab.all[0].stats.dropped == 1
        # The store was never away, so nothing says that it is back.
        lab.store.let.set()
        await until(lambda: not lab.all[0].local)
        assert lab.states() == ["closed", "closed"]


@on_a_loop
async def test_closing_sends_what_is_left() -> None:
    async with Lab() as lab:
        lab.record(Outcome.OK, 3)
    assert [one.ok for batch in lab.store.batches for one in batch] == [3]


@on_a_loop
async def test_many_targets_are_no_single_long_operation_of_the_store() -> None:
    async with Lab() as lab:
        targets = [Target("eu", "model", f"worker={i}") for i in range(1000)]
        for target in targets:
            lab.record(Outcome.OK, 1, target)
        await until(lambda: sum(map(len, lab.store.batches)) == 1000)
        assert max(map(len, lab.store.batches)) <= 200
        assert {one.target for batch in lab.store.batches for one in batch} == {one.key for one in targets}


@on_a_loop
async def test_without_a_policy_everything_is_closed_and_a_reload_switches_both_ways() -> None:
    async with Lab(policy=None) as lab:
        lab.record(Outcome.ERROR, 100)
        assert lab.states() == ["closed"]
        assert await lab.all[0].claim(BAD) == 0
        lab.all[0].update(POLICY)
        await until(lambda: not lab.all[0].local)
        await lab.open()
        lab.all[0].update(None)
        assert lab.states() == ["closed"]
        lab.all[0].update(POLICY)
        await lab.all_are("due")  # the store still knows


@on_a_loop
async def test_an_answer_to_a_policy_that_is_gone_opens_nothing() -> None:
    async with Lab() as lab:
        lab.store.let.clear()
        lab.record(Outcome.ERROR, 8)
        await until(lambda: lab.store.batches)
        lab.all[0].update(None)
        lab.store.let.set()
        await until(lambda: lab.all[0].stats.reports)
        await asyncio.sleep(0)
        assert lab.states() == ["closed"]


@on_a_loop
async def test_a_closed_replica_is_not_called_back() -> None:
    async with Lab(2) as lab:
        await lab.all[0].close()
        lab.record(Outcome.ERROR, 8, replica=1)
        await until(lambda: lab.states() == ["closed", "open"])
        assert len(lab.store._callbacks) == 1


@asynccontextmanager
async def fleet(urls: Sequence[str], policy: BreakerPolicy) -> AsyncIterator[list[Breakers]]:
    """One replica for each URL, each with its own connections."""
    stores = [open_store(StoreSettings(url=url, timeout_s=1.0), time.monotonic) for url in urls]
    replicas = [Breakers(store, policy, time.monotonic) for store in stores]
    try:
        for store, one in zip(stores, replicas, strict=True):
            await store.start()
            await one.start()
            one.members(BAD.group, 4)
        yield replicas
    finally:
        for store, one in zip(stores, replicas, strict=True):
            await one.close()
            await store.close()


def fail(one: Breakers, target: Target = BAD, count: int = 8) -> None:
    for _ in range(count):
        one.record(target, Outcome.ERROR, time.monotonic())


async def all_of(replicas: Sequence[Breakers], *states: str, target: Target = BAD) -> None:
    await until(
        lambda: all(one.state(target) in states for one in replicas),
        f"{states} instead of {[one.state(target) for one in replicas]}",
    )


def all_opened(replicas: Sequence[Breakers], times: int) -> bool:
    return all(one.snapshot()[0]["opens"] == times for one in replicas)


async def claim_everywhere(replicas: Sequence[Breakers], target: Target = BAD) -> list[int]:
    """Ask for a probe in every replica, several times, as requests would; return the numbers that were granted."""
    await all_of(replicas, "due", target=target)
    granted = []
    for _ in range(3):
        granted += await asyncio.gather(*(one.claim(target) for one in replicas for _ in range(3)))
    return [number for number in granted if number]


@on_a_loop
async def test_eight_replicas_learn_probe_once_and_close() -> None:
    with StoreServer() as server:
        async with fleet([server.url] * 8, SOON) as replicas:
            for one in replicas:
                assert not one.local
                fail(one, count=1)  # none of them alone has seen enough
            await all_of(replicas, "open", "due")
            for failed in range(1, 3):
                (probe,) = await claim_everywhere(replicas)
                replicas[failed].record(BAD, Outcome.ERROR, time.monotonic(), probe)
                await until(functools.partial(all_opened, replicas, failed + 1))
            (probe,) = await claim_everywhere(replicas)
            assert {one.state(BAD) for one in replicas} == {"open"}
            replicas[5].record(BAD, Outcome.OK, time.monotonic(), probe)
            await all_of(replicas, "closed")


@on_a_loop
async def test_a_replica_that_starts_later_knows_what_is_open() -> None:
    with StoreServer() as server:
        async with fleet([server.url], POLICY) as first:
            fail(first[0])
            await all_of(first, "open")
            async with fleet([server.url], POLICY) as later:
                assert later[0].state(BAD) == "open"


@on_a_loop
async def test_while_the_store_is_away_each_goes_by_its_own_and_forgets_that_afterwards() -> None:
    with StoreServer() as server:
        async with fleet([server.url] * 8, SOON) as replicas:
            fail(replicas[0])
            await all_of(replicas, "open", "due")
            server.kill()
            await until(lambda: all(one.local for one in replicas))
            # What the store said last holds, and everyone may find out for itself.
            await all_of(replicas, "due")
            for one in replicas:
                probe = await one.claim(BAD)
                assert probe
                assert await one.claim(BAD) == 0
                one.record(BAD, Outcome.OK, time.monotonic(), probe)
            await all_of(replicas, "closed")
            fail(replicas[3], GOOD)
            await all_of(replicas[3:4], "open", "due", target=GOOD)
            assert [one.state(GOOD) for one in replicas if one is not replicas[3]] == ["closed"] * 7
            server.start()
            await until(lambda: not any(one.local for one in replicas))
            await all_of(replicas, "closed", target=GOOD)
            fail(replicas[6])
            await all_of(replicas, "open", "due")


@on_a_loop
async def test_a_replica_that_lost_the_store_learns_on_return_what_it_missed() -> None:
    with StoreServer() as server:
        async with Cut(server.port) as cut, fleet([server.url, cut.url], POLICY) as replicas:
            near, far = replicas
            cut.refuse = True
            cut.reset()
            await until(lambda: far.local)
            fail(near)
            await all_of([near], "open")
            fail(far, GOOD)
            await all_of([far], "open", target=GOOD)
            assert far.state(BAD) == "closed"
            cut.heal()
            await all_of(replicas, "open")
            await all_of(replicas, "closed", target=GOOD)
            assert not far.local


@on_a_loop
async def test_a_replica_starts_without_a_store() -> None:
    server = StoreServer()
    async with fleet([server.url], SOON) as (one,):
        assert one.local
        fail(one)
        await all_of([one], "due")
        with server:
            await until(lambda: not one.local)
            assert one.state(BAD) == "closed"
