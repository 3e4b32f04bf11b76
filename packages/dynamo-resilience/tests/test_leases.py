# SPDX-License-Identifier: Apache-2.0
"""The replica's side of leases: several replicas on one store, which goes away, forgets, and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import signal
import sys
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dynamo_resilience._config import StoreSettings
from dynamo_resilience._errors import StoreUnavailable
from dynamo_resilience._leases import Lease
from dynamo_resilience._store import LeaseReply, LeaseRequest, MemoryStore, Store, open_store
from support.lease_history import Recorder, check
from support.processes import Process
from support.store_server import StoreServer

TTL = 0.6
WHOLE = (0, 8)
_LIMIT_S = 20.0


@pytest.fixture(scope="module")
def shared() -> Iterator[StoreServer]:
    with StoreServer() as server:
        yield server


@pytest.fixture
def server(shared: StoreServer) -> StoreServer:
    """A server whose epoch is older than a TTL, and that holds no lease."""
    with shared.client() as client:
        client.flushall()
        now = int(time.time() * 1000) - 60_000
        run_id = client.info("server")["run_id"]
        client.hset("{dynamo-gateway}:epoch", mapping={"number": now, "run_id": run_id, "born_ms": now})
    return shared


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not come to pass")
        await asyncio.sleep(0.002)


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@contextlib.asynccontextmanager
async def store_of(server: StoreServer, timeout_s: float = 0.25) -> AsyncIterator[Store]:
    store = open_store(StoreSettings(url=server.url, timeout_s=timeout_s), now)
    await store.start()
    try:
        yield store
    finally:
        await store.close()


def answering(lease: Lease) -> Lease:
    """Give back what is asked for at once, as a replica does on which all is idle."""

    def changed() -> None:
        lease.shrink(lease.surplus + lease.recalled)

    lease.on_change(changed)
    return lease


def hold(leases: Sequence[Lease], blocks: int) -> bool:
    return sum(lease.held(now()) for lease in leases) == blocks


def lease_of(store: Store, holder: str, clock: Callable[[], float] = now, **settings: Any) -> Lease:
    return Lease(store, "pool", "serverless", holder, clock, **{"own": WHOLE, "ttl_s": TTL, **settings})


def test_replicas_share_a_pool_and_what_one_gives_back_another_has() -> None:
    async def work() -> None:
        store = MemoryStore(now)
        leases = [answering(lease_of(store, f"r{i}")) for i in range(4)]
        for lease in leases:
            await lease.start()
        leases[0].want(8)
        await until(lambda: leases[0].held(now()) == 8)
        for lease in leases[1:]:
            lease.want(8, head=1)
        await until(lambda: [lease.held(now()) for lease in leases] == [2, 2, 2, 2])
        assert sorted(block for lease in leases for block in lease.blocks(now())) == list(range(8))
        await leases[0].close()
        assert leases[0].held(now()) == 0
        await until(lambda: sum(lease.held(now()) for lease in leases) == 8)
        for lease in leases:
            await lease.close()

    run(work())


def test_a_borrower_gives_back_what_its_owner_wants_and_keeps_the_rest() -> None:
    async def work() -> None:
        store = MemoryStore(now)
        borrower = answering(lease_of(store, "r1", own=(4, 8), lent=((0, 4),)))
        owner = Lease(store, "pool", "tenant", "r2", now, own=(0, 4), lender=True, ttl_s=TTL)
        await borrower.start()
        await owner.start()
        borrower.want(8)
        await until(lambda: borrower.held(now()) == 8)
        assert borrower.borrowed(now()) == 4
        assert borrower.blocks(now()) == (3, 2, 1, 0, 7, 6, 5, 4)
        owner.want(3)
        await until(lambda: owner.held(now()) == 3)
        assert borrower.held(now()) == 5
        assert borrower.borrowed(now()) == 1
        assert borrower.recalled == 0
        await owner.close()
        await until(lambda: borrower.held(now()) == 8)
        await borrower.close()

    run(work())


def test_what_was_given_back_is_gone_at_once_and_stays_gone() -> None:
    async def work() -> None:
        lease = lease_of(MemoryStore(now), "r1")
        await lease.start()
        lease.want(6)
        await until(lambda: lease.held(now()) == 6)
        lease.want(4)
        assert lease.shrink(2) == (5, 4)
        assert lease.held(now()) == 4
        operations = lease.stats.operations
        await until(lambda: lease.stats.operations >= operations + 2)
        assert sorted(lease.blocks(now())) == [0, 1, 2, 3]
        assert lease.shrink(0) == ()
        assert lease.stats.released == 2
        await lease.close()

    run(work())


def test_a_listener_that_fails_does_not_end_the_lease() -> None:
    async def work() -> None:
        lease = lease_of(MemoryStore(now), "r1")
        lease.on_change(lambda: 1 / 0)  # type: ignore[arg-type]
        await lease.start()
        lease.want(1)
        await until(lambda: lease.stats.operations >= 3)
        assert lease.held(now()) == 1
        await lease.close()

    run(work())


class FakeClock:
    """The uptime, and the time that the test lets pass at once."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return now() + self.ahead


class FakeStore(MemoryStore):
    """A store that can be away, and during whose operations time can pass."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.away = False
        self.passes_s = 0.0
        self.asked: Callable[[], None] = lambda: None
        self._fake_clock = clock

    def forget(self) -> None:
        """Do what a restart does."""
        self._leases.new_epoch(int(self._fake_clock() * 1000))

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        self.asked()
        self._fake_clock.ahead, self.passes_s = self._fake_clock.ahead + self.passes_s, 0.0
        if self.away:
            raise StoreUnavailable("store: away")
        return await super().lease(request)


def test_nothing_is_held_after_the_end_until_the_store_was_asked() -> None:
    async def work() -> None:
        clock = FakeClock()
        store = FakeStore(clock)
        lease = lease_of(store, "r1", clock)
        changes: list[int] = []
        lease.on_change(lambda: changes.append(lease.held(clock())))
        await lease.start()
        lease.want(2)
        await until(lambda: changes == [2])
        clock.ahead += TTL
        assert not lease.valid(clock())
        assert lease.held(clock()) == 0
        assert lease.blocks(clock()) == ()
        lease.want(3)
        await until(lambda: len(changes) == 2)
        assert changes[1] == 3
        assert lease.stats.lost == 0
        await lease.close()

    run(work())


def test_a_lease_that_had_ended_is_not_claimed_from_a_store_that_forgot() -> None:
    async def work() -> None:
        clock = FakeClock()
        store = FakeStore(clock)
        sleeper, awake = lease_of(store, "r1", clock), lease_of(store, "r2", clock)
        await sleeper.start()
        sleeper.want(2)
        await until(lambda: sleeper.held(clock()) == 2)
        clock.ahead += TTL  # it is paused, then the store is restarted
        store.forget()
        await until(lambda: sleeper.snapshot()["epoch"] == 2)
        assert sleeper.held(clock()) == 0
        assert sleeper.stats.lost == 2
        await awake.start()
        awake.want(8)
        await until(lambda: awake.held(clock()) + sleeper.held(clock()) == 8)
        await sleeper.close()
        await awake.close()

    run(work())


def test_through_an_outage_it_holds_on_but_a_pause_is_no_outage() -> None:
    async def work() -> None:
        clock = FakeClock()
        store = FakeStore(clock)
        lease = lease_of(store, "r1", clock)
        await lease.start()
        lease.want(2)
        await until(lambda: lease.held(clock()) == 2)
        # The process was paused while an operation ran, which then failed: that says nothing of the store.
        seen: list[tuple[int, bool]] = []
        store.asked = lambda: seen.append((lease.held(clock()), lease.outage))
        store.away, store.passes_s = True, 2 * TTL
        lease.want(3)
        await until(lambda: lease.outage)
        assert seen == [(2, False), (0, False)]
        assert lease.held(clock()) == 2
        assert lease.shrink(1) == ()
        assert lease.snapshot()["outage"]
        failures = lease.stats.failures
        await until(lambda: lease.stats.failures > failures + 2)
        assert lease.held(clock()) == 2
        # A pause in the outage: it asks again first.
        clock.ahead += TTL
        assert lease.held(clock()) == 0
        await until(lambda: lease.held(clock()) == 2)
        store.away = False
        await until(lambda: lease.held(clock()) == 3)
        assert not lease.outage
        assert lease.stats.outages == 1
        await lease.close()

    run(work())


def test_what_may_be_used_again_is_told_though_the_blocks_are_the_same() -> None:
    async def work() -> None:
        clock = FakeClock()
        store = FakeStore(clock)
        lease = lease_of(store, "r1", clock)
        await lease.start()
        lease.want(2)
        await until(lambda: lease.held(clock()) == 2)
        for away in (False, True, True):  # the last one in the midst of the outage
            store.away = away
            if away:
                await until(lambda: lease.outage)
            told: list[int] = []
            lease.on_change(lambda told=told: told.append(lease.held(clock())))  # type: ignore[misc]
            clock.ahead += TTL
            assert lease.held(clock()) == 0
            await until(lambda told=told: told == [2])  # type: ignore[misc]
        await lease.close()

    run(work())


def test_a_fault_that_nobody_foresaw_does_not_end_the_lease(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        clock = FakeClock()
        store = FakeStore(clock)
        lease = lease_of(store, "r1", clock)
        await lease.start()
        lease.want(2)
        await until(lambda: lease.held(clock()) == 2)
        faults: list[int] = []

        def fail() -> None:
            faults.append(1)
            raise RuntimeError("unforeseen")

        store.asked = fail
        await until(lambda: len(faults) > 2)
        assert lease.held(clock()) == 2
        store.asked = lambda: None
        lease.want(3)
        await until(lambda: lease.held(clock()) == 3)
        await lease.close()

    run(work())
    assert "unforeseen" in caplog.text


def test_a_store_that_takes_longer_than_a_lease_lasts_is_an_outage() -> None:
    class FakeHangingStore(MemoryStore):
        hangs = False

        async def lease(self, request: LeaseRequest) -> LeaseReply:
            if self.hangs:
                await asyncio.sleep(_LIMIT_S)  # what its own time-out would allow
            return await super().lease(request)

    async def work() -> None:
        store = FakeHangingStore(now)
        lease = lease_of(store, "r1")
        await lease.start()
        lease.want(2)
        await until(lambda: lease.held(now()) == 2)
        store.hangs = True
        await until(lambda: lease.outage)
        assert lease.held(now()) == 2
        store.hangs = False
        await until(lambda: not lease.outage)
        assert lease.held(now()) == 2
        await lease.close()

    run(work())


def test_nothing_keeps_a_lease_that_was_closed() -> None:
    async def work() -> None:
        store = MemoryStore(now)
        for number in range(3):
            lease = lease_of(store, f"r{number}")
            await lease.start()
            gone = weakref.ref(lease)
            await lease.close()
            await lease.close()
            del lease
            gc.collect()
            assert gone() is None
        late = lease_of(store, "r")
        await late.close()
        await late.start()  # a reload that was overtaken by the next one
        assert store._callbacks == ()

    run(work())


def test_grants_of_an_operation_whose_answer_was_lost_are_used() -> None:
    async def work() -> None:
        store = MemoryStore(now)
        lost = LeaseRequest("pool", "serverless", "r1", 5000, WHOLE, (), False, (), (), 5, 0, 0)
        await store.lease(lost)
        lease = lease_of(store, "r1")
        await lease.start()
        lease.want(5)
        await until(lambda: lease.held(now()) == 5)
        assert lease.token == "1.6"
        await lease.close()
        assert (await store.lease(lost._replace(holder="r2", want=8))).held[0].block == 0

    run(work())


# On a real server.


def test_many_replicas_that_come_and_go_never_hold_a_block_twice(server: StoreServer) -> None:
    async def work() -> None:
        async with contextlib.AsyncExitStack() as stack:
            stores = [await stack.enter_async_context(store_of(server)) for _ in range(3)]
            for round_ in range(3):
                leases = [answering(lease_of(store, f"r{round_}-{i}")) for i, store in enumerate(stores)]
                owner = Lease(stores[0], "pool", "t", f"t{round_}", now, own=(0, 3), lender=True, ttl_s=TTL)
                for lease in leases:
                    lease.update((3, 8), ((0, 3),), False, TTL)
                    await lease.start()
                    lease.want(8, head=2)
                await until(functools.partial(hold, leases, 8))
                await owner.start()
                owner.want(3)
                await until(functools.partial(hold, [owner], 3))
                blocks = [block for lease in (*leases, owner) for block in lease.blocks(now())]
                assert len(blocks) == len(set(blocks))
                for lease in (*leases, owner):
                    await lease.close()

    with Recorder(server) as recorder:
        run(work())
    assert sum('"b:' in line for line in recorder.lines) > 20
    assert check(recorder.lines) == []


def test_a_stores_clock_that_is_set_forward_ends_no_lease(server: StoreServer) -> None:
    async def work() -> None:
        async with store_of(server) as store:
            leases = [lease_of(store, f"r{i}") for i in range(4)]
            for lease in leases:
                await lease.start()
                lease.want(2)
            await until(functools.partial(hold, leases, 8))
            held = [lease.blocks(now()) for lease in leases]
            hungry = lease_of(store, "hungry")
            await hungry.start()
            hungry.want(8)
            await until(lambda: hungry.stats.operations > 0)
            with server.client() as client:
                client.hset("{dynamo-gateway}:epoch", "ahead_ms", 20_000)
            after = [lease.stats.operations + 3 for lease in (*leases, hungry)]
            await until(
                lambda: all(lease.stats.operations >= n for lease, n in zip((*leases, hungry), after, strict=True))
            )
            assert [lease.blocks(now()) for lease in leases] == held
            assert [lease.stats.lost for lease in leases] == [0, 0, 0, 0]
            assert hungry.held(now()) == 0
            for lease in (*leases, hungry):
                await lease.close()

    with Recorder(server) as recorder:
        run(work())
    assert check(recorder.lines) == []


#: A replica: `python -c ... URL HOLDER TTL`. It says what it holds when that changes, and what it sees right after a
#: gap in its own time.
_REPLICA = """
import asyncio, json, sys, time
from dynamo_resilience._config import StoreSettings
from dynamo_resilience._leases import Lease
from dynamo_resilience._store import open_store

def now():
    return time.clock_gettime(time.CLOCK_BOOTTIME)

async def main(url, holder, ttl_s):
    store = open_store(StoreSettings(url=url), now)
    await store.start()
    lease = Lease(store, "pool", "serverless", holder, now, own=(0, 8), ttl_s=ttl_s)
    await lease.start()
    lease.want(8)
    last, seen = now(), None
    while True:
        at = now()
        state = {"held": lease.held(at), "lost": lease.stats.lost, "outage": lease.outage}
        if at - last > ttl_s:
            print(json.dumps({"gap": True, **state}), flush=True)
        elif state != seen:
            print(json.dumps({"gap": False, **state}), flush=True)
        last, seen = at, state
        await asyncio.sleep(0.001)

asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
"""


class Replica(Process):
    """A replica in its own process that wants the whole pool."""

    def __init__(self, server: StoreServer, holder: str, log: Path) -> None:
        super().__init__([sys.executable, "-c", _REPLICA, server.url, holder, str(TTL)], name=holder, log=log)

    def __enter__(self) -> Replica:
        super().__enter__()
        return self

    def said(self) -> list[dict[str, Any]]:
        """Return what it has said so far."""
        return [json.loads(line) for line in self.log_path.read_text().splitlines() if line.endswith("}")]


def test_the_blocks_of_a_killed_replica_come_back(server: StoreServer, tmp_path: Path) -> None:
    async def work() -> None:
        with Replica(server, "victim", tmp_path / "log") as victim:
            await until(lambda: any(one["held"] == 8 for one in victim.said()))
            async with store_of(server) as store:
                heir = lease_of(store, "heir")
                await heir.start()
                heir.want(8)
                await until(lambda: heir.stats.operations > 3)
                assert heir.held(now()) == 0
                victim.send_signal(signal.SIGKILL)
                await until(lambda: heir.held(now()) == 8)
                await heir.close()

    with Recorder(server) as recorder:
        run(work())
    assert check(recorder.lines) == []


def test_a_replica_that_slept_past_its_lease_holds_nothing_when_it_wakes(server: StoreServer, tmp_path: Path) -> None:
    async def work() -> None:
        with Replica(server, "sleeper", tmp_path / "log") as sleeper:
            await until(lambda: any(one["held"] == 8 for one in sleeper.said()))
            async with store_of(server) as store:
                heir = lease_of(store, "heir")
                await heir.start()
                heir.want(6)
                sleeper.send_signal(signal.SIGSTOP)
                try:
                    await until(lambda: heir.held(now()) == 6)
                    await asyncio.sleep(TTL)
                finally:
                    sleeper.send_signal(signal.SIGCONT)
                await until(lambda: sleeper.said()[-1]["lost"] >= 6)
                said = sleeper.said()
                woken = next(i for i, one in enumerate(said) if one["gap"])
                assert said[woken]["held"] == 0
                assert not said[woken]["outage"]
                assert all(one["held"] <= 2 for one in said[woken:])
                assert heir.held(now()) == 6
                await heir.close()

    with Recorder(server) as recorder:
        run(work())
    assert check(recorder.lines) == []


def test_an_outage_of_the_store_is_none_of_the_service_and_a_restart_grants_nothing_new_for_a_ttl() -> None:
    async def work(server: StoreServer) -> None:
        async with store_of(server) as store, store_of(server) as other:
            lease, heir = lease_of(store, "r1"), lease_of(other, "r2")
            await lease.start()
            await heir.start()
            lease.want(5)
            await until(lambda: lease.held(now()) == 5)
            heir.want(3)
            await until(lambda: heir.held(now()) == 3)
            held, epoch = lease.blocks(now()), lease.snapshot()["epoch"]
            heir.want(2)
            assert len(heir.shrink(1)) == 1
            await until(lambda: not heir._releasing)
            server.kill()
            await until(lambda: lease.outage and heir.outage)
            heir.want(5)
            await asyncio.sleep(2 * TTL)
            assert lease.blocks(now()) == held
            assert heir.held(now()) == 2
            server.start()
            seen: list[tuple[int, int]] = []
            heir.on_change(lambda: seen.append((heir.snapshot()["grace_ms"], heir.held(now()))))
            await until(lambda: not lease.outage and not heir.outage)
            assert lease.blocks(now()) == held
            assert lease.snapshot()["epoch"] > epoch
            assert lease.token.startswith(f"{lease.snapshot()['epoch']}.")
            await until(lambda: heir.held(now()) == 3)
            assert all(count == 2 for grace, count in seen if grace)
            assert lease.stats.lost == heir.stats.lost == 0
            await lease.close()
            await until(lambda: heir.held(now()) == 5)
            await heir.close()

    with StoreServer() as server, Recorder(server) as recorder:
        run(work(server))
    assert check(recorder.lines) == []


def test_a_store_that_hangs_and_goes_on_finds_the_leases_where_they_were(server: StoreServer) -> None:
    async def work() -> None:
        async with store_of(server, timeout_s=0.05) as store:
            lease = lease_of(store, "r1")
            await lease.start()
            lease.want(5)
            await until(lambda: lease.held(now()) == 5)
            token = lease.token
            server.pause()
            try:
                await until(lambda: lease.outage)
                assert lease.held(now()) == 5
            finally:
                server.resume()
            await until(lambda: not lease.outage)
            assert lease.held(now()) == 5
            assert lease.token == token
            await lease.close()

    with Recorder(server) as recorder:
        run(work())
    assert check(recorder.lines) == []
