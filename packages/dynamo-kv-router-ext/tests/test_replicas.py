# SPDX-License-Identifier: Apache-2.0
"""Replicas of the router in one process: what each carries is known to all, and goes with it.

`FakeNetwork` stands for Dynamo's discovery and its request plane: streams of frames through JSON, which break as
Dynamo's do when a process dies, and hang when it is stopped. `tests/stack/test_router_replicas.py` has real processes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import msgspec
import pytest

from dynamo_kv_router_ext import _replicas
from dynamo_kv_router_ext._placement import Placer
from dynamo_kv_router_ext._profile import TierCost, load_profile
from dynamo_kv_router_ext._records import Records
from dynamo_kv_router_ext._replicas import Replicas, owner
from dynamo_kv_router_ext._router import Router
from dynamo_kv_router_ext._types import ROLES, NoWorkerError, Request, Role, Seat, Worker

#: Moving a session's KV costs more than sharing its decoder.
PROFILE = msgspec.structs.replace(load_profile("gb200-qwen3-32b-tp1"), transfer=TierCost(latency_s=1.0, token_s=1e-6))
WORKERS = [Worker(1, "prefill"), Worker(2, "prefill"), Worker(2**63 + 3, "decode"), Worker(4, "decode")]


class FakeContext:
    """A request's context."""

    def __init__(self) -> None:
        self.stopped = False

    def is_stopped(self) -> bool:
        return self.stopped


class FakeStream:
    """A stream of frames from one process to another; like Dynamo's it holds a few of them."""

    def __init__(self, network: FakeNetwork, source: int, frames: AsyncIterator[Any], context: FakeContext) -> None:
        self.network = network
        self.source = source
        self.context = context
        self.frames: asyncio.Queue[Any] = asyncio.Queue(4)
        self.pump = asyncio.ensure_future(self._pump(frames))

    async def _pump(self, frames: AsyncIterator[Any]) -> None:
        try:
            async for frame in frames:
                await self.network.reach(self.source)
                await self.frames.put(json.dumps(frame, allow_nan=False))
            await self.frames.put(None)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await self.frames.put(error)

    def fail(self) -> None:
        """Its source is no more."""
        self.pump.cancel()
        while not self.frames.empty():
            self.frames.get_nowait()
        self.frames.put_nowait(ValueError("Unavailable: Stream ended before generation completed"))

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Any:
        try:
            frame = await self.frames.get()
        except asyncio.CancelledError:
            self.context.stopped = True
            self.pump.cancel()
            raise
        if frame is None:
            raise StopAsyncIteration
        if isinstance(frame, Exception):
            raise frame
        return json.loads(frame)


class FakeNetwork:
    """Who is listed, who is dead, who is stopped, and the streams between them."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.replicas: dict[int, Replicas] = {}
        self.routers: dict[int, Router] = {}
        self.listed: list[int] = []
        self.dead: set[int] = set()
        self.running: dict[int, asyncio.Event] = {}
        self.streams: list[FakeStream] = []
        self.calls: list[tuple[str, int]] = []
        #: Changes what a process answers.
        self.change: Callable[[str, int, Any], Any] = lambda endpoint, replica, frame: frame

    def start(self, replica: int, workers: Iterable[Worker] = WORKERS) -> Router:
        """Start a replica with these workers."""
        placer = Placer(PROFILE)
        router = Router(placer, Records(), clock=lambda: self.now)
        for worker in workers:
            router.add_worker(worker)
        replicas = Replicas(replica, router, FakeClient(self, "sync"), FakeClient(self, "decide"))
        router.attach(replicas)
        self.replicas[replica], self.routers[replica] = replicas, router
        self.running[replica] = asyncio.Event()
        self.running[replica].set()
        self.listed.append(replica)
        return router

    def kill(self, replica: int, *, listed: bool = True) -> None:
        """End a process: its streams break at once, while discovery may still list it."""
        self.dead.add(replica)
        del self.routers[replica]
        if not listed:
            self.listed.remove(replica)
        for stream in self.streams:
            if stream.source == replica:
                stream.fail()

    async def reach(self, replica: int) -> None:
        if replica in self.dead:
            raise Exception("Unavailable: TCP connection failed")  # as Dynamo raises it
        await self.running[replica].wait()

    def tick(self, seconds: float = 0.0) -> None:
        """Let time pass in all that run."""
        self.now += seconds
        for replica, router in self.routers.items():
            if self.running[replica].is_set():
                router.tick()

    async def until(self, what: Callable[[], bool], seconds: float = 0.02) -> None:
        """Let time pass until something holds."""
        for _ in range(500):
            if what():
                return
            self.tick(seconds)
            await asyncio.sleep(0.01)
        raise AssertionError("that never came to be")

    async def together(self, *names: int) -> None:
        """Wait until these replicas are in step, all if none is named."""
        wanted = sorted(names or self.routers)
        await self.until(lambda: all(sorted(self.replicas[name].live()) == wanted for name in wanted))

    def close(self) -> None:
        for replica in self.replicas.values():
            replica.close()
        for stream in self.streams:
            stream.pump.cancel()


class FakeClient:
    """Dynamo's client of an endpoint."""

    def __init__(self, network: FakeNetwork, endpoint: str) -> None:
        self.network = network
        self.endpoint = endpoint

    def instance_ids(self) -> list[int]:
        return list(self.network.listed)

    async def direct(self, request: Any, instance_id: int, *, annotated: bool) -> AsyncIterator[Any]:
        assert not annotated
        network = self.network
        network.calls.append((self.endpoint, instance_id))
        await network.reach(instance_id)
        context = FakeContext()
        serve = getattr(network.replicas[instance_id], f"serve_{self.endpoint}")

        async def changed() -> AsyncIterator[Any]:
            async for frame in serve(json.loads(json.dumps(request, allow_nan=False)), context):
                yield network.change(self.endpoint, instance_id, frame)

        stream = FakeStream(network, instance_id, changed(), context)
        network.streams.append(stream)
        return stream


def run(test: Callable[[FakeNetwork], Awaitable[None]]) -> None:
    """Run a test in an event loop, with a network of its own."""

    async def main() -> None:
        network = FakeNetwork()
        try:
            await test(network)
        finally:
            network.close()

    asyncio.run(main())


def bookings(router: Router) -> dict[tuple[str, Role], tuple[int | str, int]]:
    """What a replica has booked: by id and role the seat."""
    found = {}
    for id, role in itertools.product(router.placer.requests(), ROLES):
        booked = router.placer.booking(id, role)
        if booked is not None:
            found[id, role] = booked.worker, booked.rank
    return found


def loads(router: Router) -> list[Any]:
    return [router.placer.load(worker.id) for worker in router.placer.workers()]


def session_of(replica: int, replicas: Iterable[int]) -> str:
    """A session that this one of the replicas owns."""
    names = list(replicas)
    return next(name for i in itertools.count() if owner(name := f"session-{i}", names) == replica)


async def decode(router: Router, name: str, session: str | None = None, tokens: int = 1000) -> Seat:
    decision = await router.place(Request(router.key(name), tokens, session=session), "decode")
    return Seat(decision.worker, decision.rank)


def test_when_a_replica_dies_only_its_sessions_move() -> None:
    draw = random.Random(7)
    replicas = [draw.getrandbits(64) for _ in range(5)]
    sessions = [f"session-{i}" for i in range(2000)]
    before = {session: owner(session, replicas) for session in sessions}
    assert all(before[session] == owner(session, reversed(replicas)) for session in sessions)
    counts = [sum(one == replica for one in before.values()) for replica in replicas]
    assert min(counts) > 300
    gone = replicas[2]
    after = {session: owner(session, [one for one in replicas if one != gone]) for session in sessions}
    assert all(after[session] == before[session] for session in sessions if before[session] != gone)
    moved = [after[session] for session in sessions if before[session] == gone]
    assert all(moved.count(one) > len(moved) / 8 for one in replicas if one != gone)
    assert owner("\ud800", replicas) in replicas


def test_what_one_replica_carries_is_booked_at_all() -> None:
    async def test(network: FakeNetwork) -> None:
        a, b, c = (network.start(i) for i in (1, 2, 2**64 - 1))
        await network.together()
        await a.place(Request(a.key("x"), 5000, blocks=list(range(78)), session="s"), "prefill")
        decision = await c.place(Request(c.key("y"), 3000), "prefill")
        await network.until(lambda: bookings(a) == bookings(b) == bookings(c) and len(bookings(a)) == 2)
        assert loads(a) == loads(b) == loads(c)
        assert a.state()["bookings"] == b.state()["bookings"] == {"1": 1, "f" * 16: 1}
        a.prefilled(a.key("x"))
        await a.place(Request(a.key("x"), 5000, session="s", prefill_worker=1), "decode")
        a.progress(a.key("x"), 1)
        await network.until(lambda: bookings(a) == bookings(b) == bookings(c) and (a.key("x"), "decode") in bookings(b))
        c.failed(c.key("y"), "prefill", "it broke")
        a.finished(a.key("x"))
        await network.until(lambda: not bookings(a) and not bookings(b) and not bookings(c))
        for router in (a, b, c):
            assert router.placer.sessions.bound("s", network.now) is not None
            assert router.placer.health.risk(decision.worker, network.now) > 0.4

    run(test)


def test_two_replicas_asked_at_once_agree_on_one_decoder() -> None:
    async def test(network: FakeNetwork) -> None:
        a, b, c = (network.start(i) for i in (1, 2, 3))
        await network.together()
        for i in range(20):
            first, second, third = await asyncio.gather(*(decode(r, f"{i}", f"s{i}", 50_000) for r in (a, b, c)))
            assert first == second == third
        assert {name for endpoint, name in network.calls if endpoint == "decide"} == {1, 2, 3}
        await network.until(lambda: bookings(a) == bookings(b) == bookings(c) and len(bookings(a)) == 60)
        record = a.records.find("0")
        assert record is not None
        assert len(record["legs"][0]["candidates"]) == 2

    run(test)


def test_an_owner_that_stands_still_is_not_waited_for_twice() -> None:
    async def test(network: FakeNetwork) -> None:
        a, b = network.start(1), network.start(2)
        await network.together()
        session = session_of(2, (1, 2))
        network.running[2].clear()
        for i in range(5):
            await decode(a, f"{i}", session)
        assert len([call for call in network.calls if call == ("decide", 2)]) == 1
        assert len(bookings(a)) == 5
        network.running[2].set()
        # It hears of what was decided without it; its late answer to the question counts for nothing.
        await network.until(lambda: bookings(a) == bookings(b) and not network.replicas[2]._peers[1].unconfirmed)
        network.tick(0.5)
        await network.until(lambda: not network.replicas[1]._peers[2].link.mute)  # type: ignore[union-attr]
        await decode(a, "again", session)
        assert len([call for call in network.calls if call == ("decide", 2)]) == 2

    run(test)


@pytest.mark.parametrize("listed", [True, False])
def test_a_dead_replicas_bookings_go_at_once_and_once(listed: bool) -> None:
    async def test(network: FakeNetwork) -> None:
        a, b, c = (network.start(i) for i in (1, 2, 3))
        await network.together()
        await decode(a, "x", "s")
        for i in range(3):
            await b.place(Request(b.key(f"{i}"), 5000), "prefill")
        await network.until(lambda: bookings(a) == bookings(c) and len(bookings(a)) == 4)
        network.kill(2, listed=listed)
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert bookings(a) == bookings(c) == {("1/x", "decode"): bookings(a)["1/x", "decode"]}
        assert a.state()["peers"] == [3]
        # Whoever was about to say something for it is not heard.
        peer = network.replicas[1]._peers.get(2)
        assert peer is None or peer.link is None
        a.cancelled("1/x")
        assert all(load.resident_tokens == 0 for load in loads(a))
        # The failed requests say nothing of their workers.
        for worker in WORKERS:
            assert a.placer.health.state(worker.id, network.now) == "in"

    run(test)


def test_a_silent_replica_is_dropped_and_comes_back_by_its_snapshot() -> None:
    async def test(network: FakeNetwork) -> None:
        a, b = network.start(1), network.start(2)
        await network.together()
        await decode(a, "x", session_of(1, (1, 2)))
        await decode(b, "y", session_of(2, (1, 2)))
        await network.until(lambda: bookings(a) == bookings(b) and len(bookings(a)) == 2)
        network.running[2].clear()
        await network.until(lambda: network.replicas[1].live() == [1], 0.2)
        assert [id for id, _ in bookings(a)] == ["1/x"]
        a.finished("1/x")
        await decode(a, "z", session_of(2, (1, 2)))
        network.running[2].set()
        await network.until(lambda: bookings(a) == bookings(b), 0.2)
        assert {id for id, _ in bookings(a)} == {"1/z", "2/y"}
        await network.together()

    run(test)


def test_a_replica_that_was_held_up_itself_does_not_take_its_peers_for_dead() -> None:
    async def test(network: FakeNetwork) -> None:
        a, b = network.start(1), network.start(2)
        await network.together()
        await decode(b, "y")
        await network.until(lambda: len(bookings(a)) == 1)
        network.now += 60.0
        a.tick()
        assert network.replicas[1].live() == [1, 2]
        assert len(bookings(a)) == 1

    run(test)


def test_a_restarted_replica_hears_of_sessions_bookings_and_verdicts_before_it_knows_workers() -> None:
    async def test(network: FakeNetwork) -> None:
        a, b = network.start(1), network.start(2)
        await network.together()
        seats = {}
        for i in range(2500):
            seats[f"s{i}"] = await decode(a, f"{i}", f"s{i}", 100)
            network.now += 0.001
            if i > 4:
                a.finished(a.key(f"{i}"))
        a.verdict(4, True, 100.0, "loses packets", "fabric")
        await decode(b, "b")
        await network.until(lambda: bookings(a) == bookings(b) and len(bookings(a)) == 6)
        network.kill(2, listed=False)
        c = network.start(3, [])
        await network.together()
        assert c.placer.requests() == []
        await network.until(lambda: len(c.placer.sessions) == 2500)
        a.finished("1/4")
        for worker in WORKERS:
            c.add_worker(worker)
        await network.until(lambda: bookings(c) == bookings(a))
        assert {id for id, _ in bookings(c)} == {"1/0", "1/1", "1/2", "1/3"}
        assert loads(c) == loads(a)
        assert all(c.placer.sessions.bound(session, network.now) == seat for session, seat in seats.items())
        assert "fabric: loses packets" in c.placer.health.why(4, network.now)

    run(test)


def test_sessions_of_a_snapshot_do_not_replace_younger_ones() -> None:
    async def test(network: FakeNetwork) -> None:
        a = network.start(1)
        a.placer.sessions.bind("s", Seat(4, 0), 100, network.now)
        network.now += 10.0
        b = network.start(2)
        b.placer.sessions.bind("s", Seat(2**63 + 3, 0), 200, network.now)
        await network.together()
        await network.until(lambda: a.placer.sessions.resident("s", network.now) == 200)
        assert b.placer.sessions.bound("s", network.now) == Seat(2**63 + 3, 0)

    run(test)


def test_what_a_newer_release_says_is_ignored_where_it_is_not_known() -> None:
    def newer(endpoint: str, replica: int, frame: Any) -> Any:
        if endpoint == "sync" and replica == 2:
            body = json.loads(frame["body"])
            body["mood"] = "good"
            for name in ("events", "placed"):
                events = body.get(name, body.get("snapshot", {}).get(name))
                if events is not None:
                    events[:] = [[*event, "more"] for event in events]
                    events.insert(0, ["dreamt", "2/x", 7])
                    events.append(["finished", None])
            frame = {**frame, "body": json.dumps(body), "mood": "good"}
        return frame

    async def test(network: FakeNetwork) -> None:
        network.change = newer
        a, b = network.start(1), network.start(2)
        await decode(b, "x")
        await network.together()
        await decode(b, "y")
        await network.until(lambda: bookings(a) == bookings(b) and len(bookings(a)) == 2)
        b.finished(b.key("x"))
        await network.until(lambda: bookings(a) == bookings(b) and len(bookings(a)) == 1)

    run(test)


def test_a_replica_of_another_version_is_no_peer_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test(network: FakeNetwork) -> None:
        network.change = lambda endpoint, replica, frame: {**frame, "version": 2} if replica == 2 else frame
        a = network.start(1)
        network.start(2)
        with caplog.at_level(logging.INFO):
            for _ in range(20):
                network.tick(0.5)
                await asyncio.sleep(0.01)
        assert network.replicas[1].live() == [1]
        assert len([r for r in caplog.records if "version 2" in r.getMessage()]) == 1
        assert network.calls.count(("sync", 2)) == 1
        await decode(a, "x", session_of(2, (1, 2)))
        assert ("decide", 2) not in network.calls

    run(test)


def test_a_slow_peer_loses_its_stream_instead_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_replicas, "_UNREAD_BYTES", 20_000)

    async def test(network: FakeNetwork) -> None:
        a, b = network.start(1), network.start(2)
        await network.together()
        feed = network.replicas[1]._feeds[2]
        for i in range(300):
            await decode(a, f"{i}")
            a.progress(a.key(f"{i}"), 1)
            assert feed.bytes <= 21_000
        assert feed.closed
        assert not feed.events
        await network.until(lambda: bookings(a) == bookings(b) and len(bookings(a)) == 300)
        assert network.calls.count(("sync", 1)) == 2

    run(test)


def test_an_owners_booking_goes_if_the_replica_that_asked_does_not_confirm_it() -> None:
    async def test(network: FakeNetwork) -> None:
        a, b = network.start(1), network.start(2)
        await network.together()
        session = session_of(2, (1, 2))
        asked = Request(a.key("x"), 1000, session=session)
        # It is told where to go, and its client is gone by then.
        decision = await network.replicas[1].ask(asked, "decode", 1)
        assert decision is not None
        await a.place(Request(a.key("y"), 1000, session=session), "decode")
        assert {id for id, _ in bookings(b)} == {"1/x", "1/y"}
        a.placer.cancelled("1/x", network.now)
        stream = network.replicas[2]._peers[1].link
        await network.until(lambda: bookings(b) == bookings(a))
        assert [id for id, _ in bookings(b)] == ["1/y"]
        assert network.replicas[2]._peers[1].link is stream
        # Or the replica that asked says so itself.
        await network.replicas[1].ask(asked, "decode", 3)
        a.cancelled("1/x")
        assert len(bookings(b)) == 2
        await network.until(lambda: bookings(b) == bookings(a), 0.0)

    run(test)


def test_a_question_that_comes_late_changes_nothing() -> None:
    async def test(network: FakeNetwork) -> None:
        a, b = network.start(1), network.start(2)
        await network.together()
        session = session_of(2, (1, 2))
        seat = await decode(a, "x", session)
        with pytest.raises(ValueError, match="booked as decode already"):
            await decode(a, "x", session)
        await network.until(lambda: not network.replicas[2]._peers[1].unconfirmed)
        assert await network.replicas[1].ask(Request(a.key("x"), 1000, session=session), "decode", 1) is None
        assert not network.replicas[2]._peers[1].unconfirmed
        assert bookings(b) == bookings(a) == {("1/x", "decode"): seat}

    run(test)


def test_a_failure_that_is_told_after_the_next_attempt_counts_for_the_worker_that_failed() -> None:
    async def test(network: FakeNetwork) -> None:
        a, b = network.start(1), network.start(2)
        await network.together()
        session = session_of(2, (1, 2))
        first = await decode(a, "x", session)
        await network.until(lambda: not network.replicas[2]._peers[1].unconfirmed)
        # The event waits for the next frame, the question goes at once.
        a.failed(a.key("x"), "decode", "it broke")
        again = Request(a.key("x"), 1000, session=session, avoid=frozenset([first.worker]))
        decision = await a.place(again, "decode")
        assert decision.worker != first.worker
        assert bookings(b) == bookings(a)
        await network.until(lambda: not network.replicas[2]._peers[1].unconfirmed)
        assert bookings(b) == bookings(a) == {("1/x", "decode"): (decision.worker, 0)}
        for router in (a, b):
            assert router.placer.health.risk(first.worker, network.now) > 0.4
            assert router.placer.health.risk(decision.worker, network.now) < 0.2

    run(test)


def test_what_was_decided_for_a_replica_goes_with_it_whatever_it_said_before() -> None:
    async def test(network: FakeNetwork) -> None:
        a, b = network.start(1), network.start(2)
        await network.together()
        session = session_of(2, (1, 2))
        seat = await decode(a, "x", session)
        await network.until(lambda: not network.replicas[2]._peers[1].unconfirmed)
        a.failed("1/x", "decode", "it broke")
        again = Request("1/x", 1000, session=session, avoid=frozenset([seat.worker]))
        assert await network.replicas[1].ask(again, "decode", 2) is not None
        await network.until(lambda: b.placer.health.risk(seat.worker, network.now) > 0.4, 0.0)
        assert len(bookings(b)) == 1
        network.kill(1)
        await network.until(lambda: network.replicas[2].live() == [2], 0.0)
        assert not bookings(b)

    run(test)


def test_a_replica_that_asks_for_a_stream_again_has_one() -> None:
    async def test(network: FakeNetwork) -> None:
        a, _ = network.start(1), network.start(2)
        await network.together()
        client = FakeClient(network, "sync")
        first = await client.direct({"version": 1, "replica": 7}, 1, annotated=False)
        assert "snapshot" in (await anext(aiter(first)))["body"]
        await client.direct({"version": 1, "replica": 7}, 1, annotated=False)
        async for frame in first:
            assert frame["version"] == 1
        assert set(network.replicas[1]._feeds) == {2, 7}
        await decode(a, "x")
        assert len(network.replicas[1]._feeds[7].events) == 1
        with pytest.raises(ValueError, match="replica must be an instance id, not None"):
            await anext(aiter(await client.direct({"version": 1}, 1, annotated=False)))

    run(test)


def test_an_outcome_counts_once_at_each_replica() -> None:
    async def test(network: FakeNetwork) -> None:
        a, b, c = (network.start(i) for i in (1, 2, 3))
        await network.together()
        for i in range(2):
            decision = await a.place(Request(a.key(f"{i}"), 1000, avoid=frozenset([2])), "prefill")
            a.failed(a.key(f"{i}"), "prefill", "it broke")
            a.failed(a.key(f"{i}"), "prefill", "it broke")
            a.cancelled(a.key(f"{i}"))
        assert decision.worker == 1
        risk = a.placer.health.risk(1, network.now)
        await network.until(lambda: {r.placer.health.risk(1, network.now) for r in (b, c)} == {risk}, 0.0)
        for router in (a, b, c):
            assert router.placer.health.state(1, network.now) == "in"
        await a.place(Request(a.key("last"), 1000, avoid=frozenset([2])), "prefill")
        a.failed(a.key("last"), "prefill", "it broke")
        await network.until(lambda: all(r.placer.health.state(1, network.now) == "out" for r in (a, b, c)))

    run(test)


def test_a_replica_speaks_for_its_own_requests_only() -> None:
    async def test(network: FakeNetwork) -> None:
        a, b, c = (network.start(i) for i in (1, 2, 3))
        await network.together()
        await decode(a, "x")
        await decode(c, "z")
        await network.until(lambda: bookings(a) == bookings(b) == bookings(c) and len(bookings(a)) == 2)
        before = bookings(a)
        replicas = network.replicas[2]
        for id in ("1/x", "3/z"):
            booked = a.placer.booking(id, "decode")
            assert booked is not None
            elsewhere = 4 if booked.worker != 4 else 2**63 + 3
            replicas.tell(_replicas.Placed(msgspec.structs.replace(booked, worker=elsewhere), 9))
            replicas.tell(_replicas.Failed(id, "decode", booked.worker, "no"))
            replicas.tell(_replicas.Cancelled(id))
            replicas.tell(_replicas.Finished(id))
        await decode(b, "y")
        await network.until(lambda: len(bookings(a)) == len(bookings(c)) == 3)
        assert before.items() <= bookings(a).items()
        assert bookings(a) == bookings(c)

    run(test)


def test_verdicts_reach_all_replicas_and_each_source_speaks_for_itself() -> None:
    async def test(network: FakeNetwork) -> None:
        a, b = network.start(1), network.start(2, WORKERS[:3])
        await network.together()
        assert not a.verdict(77, True, 5.0, "", "fabric")
        assert not b.verdict(4, True, 5.0, "", "fabric")
        with pytest.raises(ValueError, match="ttl_s must be a number above 0, not 0"):
            a.verdict(4, True, 0.0)

        def out(router: Router) -> bool:
            return router.placer.health.state(4, network.now) == "out"

        assert a.verdict(4, True, 30.0, "errors", "gateway")
        assert a.verdict(4, True, 10.0, "canary", "probe")
        await network.until(lambda: 4 in b._verdicts and len(b._verdicts[4]) == 2, 0.0)
        b.add_worker(WORKERS[3])
        assert out(a)
        assert out(b)
        assert "gateway: errors" in b.placer.health.why(4, network.now)
        b.verdict(4, False, 0.0, "", "gateway")
        await network.until(lambda: not a._verdicts[4]["gateway"][0].out, 0.0)
        assert out(a)
        assert out(b)
        # An older word of the same source, out of a snapshot, does not come back.
        stale = _replicas.Verdict(4, "gateway", True, 30.0, 1.0, "errors")
        a.heard_verdict(stale)
        assert "probe: canary" in a.placer.health.why(4, network.now)
        network.tick(11.0)
        assert not out(a)
        assert not out(b)
        network.tick(700.0)
        assert not a._verdicts

    run(test)


def test_a_worker_that_only_the_owner_knows_is_not_taken() -> None:
    async def test(network: FakeNetwork) -> None:
        a, b = network.start(1, WORKERS[:3]), network.start(2, [*WORKERS[:2], WORKERS[3]])
        await network.together()
        seat = await decode(a, "x", session_of(2, (1, 2)))
        assert seat.worker == 2**63 + 3
        assert ("decide", 2) in network.calls
        await network.until(lambda: not bookings(b), 0.0)
        b.add_worker(WORKERS[2])
        assert bookings(b) == bookings(a)
        a.remove_worker(2**63 + 3)
        with pytest.raises(NoWorkerError):
            await a.place(Request(a.key("y"), 1000), "decode")

    run(test)


def test_an_owner_that_does_not_know_the_prefill_worker_is_not_followed() -> None:
    """It cannot know either which decoders can pull from it."""
    reader, fine = Worker(9, "prefill", transfer_group="new"), Worker(8, "decode", transfer_group="new")

    async def test(network: FakeNetwork) -> None:
        a, b = network.start(1, [*WORKERS, fine, reader]), network.start(2, [*WORKERS, fine])
        await network.together()
        for i in range(4):
            request = Request(a.key(f"r{i}"), 1000, session=session_of(2, (1, 2)), prefill_worker=9)
            assert (await a.place(request, "decode")).worker == 8
        assert network.calls.count(("decide", 2)) == 4
        await network.until(lambda: bookings(b) == bookings(a), 0.0)

    run(test)


def test_requests_are_aborted_where_their_worker_stands_still_or_has_left() -> None:
    async def test(network: FakeNetwork) -> None:
        a = network.start(1)
        aborted: list[tuple[Role, str]] = []

        def abort(role: Role, reason: str) -> None:
            aborted.append((role, reason))

        stays, goes = [await decode(a, name) for name in ("x", "y")]
        assert stays != goes
        for name in ("x", "y"):
            a.on_abort(a.key(name), abort)
        a.remove_worker(goes.worker)
        network.tick(1.0)
        assert not aborted
        # It was placed anew meanwhile, so what it left behind does not concern it.
        a.failed(a.key("y"), "decode", "gone")
        await decode(a, "y")
        for _ in range(40):
            network.tick(1.0)
        assert not aborted
        a.remove_worker(stays.worker)
        network.tick(1.0)
        assert not aborted
        for _ in range(31):
            network.tick(1.0)
        assert aborted == [("decode", f"worker {stays.worker} has left")] * 2
        a.add_worker(Worker(9, "decode"))
        await decode(a, "z")
        a.on_abort(a.key("z"), abort)
        a.progress(a.key("z"), 1)
        network.tick(1.0)
        a.progress(a.key("z"), 2)
        for _ in range(60):
            network.tick(1.0)
        assert aborted[2:] == [("decode", "worker 9 stands still")]

    run(test)


def test_a_reader_that_leaves_when_it_has_read_does_not_end_the_answer() -> None:
    """Nor does it take the place of the decoder's own abort."""

    async def test(network: FakeNetwork) -> None:
        a = network.start(1)
        aborted: list[tuple[Role, str]] = []
        key = a.key("x")
        read = await a.place(Request(key, 1000), "prefill")
        a.remove_worker(read.worker)
        a.prefilled(key)
        decision = await a.place(Request(key, 1000), "decode")
        a.on_abort(key, lambda role, reason: aborted.append((role, reason)))
        for count in range(40):
            network.tick(1.0)
            a.progress(key, 1 + count)
        assert not aborted
        for _ in range(60):
            network.tick(1.0)
        assert aborted == [("decode", f"worker {decision.worker} stands still")]

    run(test)


def test_a_worker_that_is_back_keeps_what_it_had_begun() -> None:
    async def test(network: FakeNetwork) -> None:
        a = network.start(1)
        aborted: list[str] = []
        seat = await decode(a, "x")
        a.on_abort(a.key("x"), lambda role, reason: aborted.append(reason))
        a.remove_worker(seat.worker)
        network.tick(1.0)
        a.add_worker(next(worker for worker in WORKERS if worker.id == seat.worker))
        for _ in range(40):
            network.tick(1.0)
        assert not aborted

    run(test)


@pytest.mark.parametrize("role", ["both", "prefill", "decode"])
def test_the_record_of_a_request_that_failed_says_so(role: Role) -> None:
    async def test(network: FakeNetwork) -> None:
        a = network.start(1, [Worker(9, role)])
        await a.place(Request(a.key("x"), 1000), role)
        a.failed(a.key("x"), role, "it broke")
        a.cancelled(a.key("x"))
        record = a.records.find("x")
        assert record is not None
        assert (record["ended"], record["legs"][0]["failed"]) == ("failed", "it broke")
        assert not a._carried

    run(test)


@pytest.mark.parametrize("seed", range(4))
def test_after_any_turn_of_events_all_replicas_have_the_same_booked(seed: int) -> None:
    async def test(network: FakeNetwork) -> None:
        draw = random.Random(seed)
        for name in (1, 2, 3):
            network.start(name)
        await network.together()
        running: dict[int, dict[str, Role]] = {1: {}, 2: {}, 3: {}}
        names = itertools.count()

        async def turn(router: Router) -> None:
            mine = running[router.replica]
            what = draw.random()
            if what < 0.5 or not mine:
                id = router.key(f"{next(names)}")
                role: Role = draw.choice(("prefill", "decode"))
                mine[id] = role
                await router.place(Request(id, draw.randint(100, 9000), session=f"s{draw.randint(0, 30)}"), role)
                return
            id = draw.choice(list(mine))
            role = mine[id]
            if what < 0.6:
                router.progress(id, draw.randint(1, 50))
                router.prefilled(id)
            elif what < 0.8:
                booked = router.placer.booking(id, role)
                if booked is not None:
                    router.failed(id, role, "it broke")
                    again = Request(id, 500, session="s1", avoid=frozenset([booked.worker]))
                    await router.place(again, role)
            else:
                del mine[id]
                draw.choice((router.finished, router.cancelled))(id)

        for _ in range(150):
            what = draw.random()
            name = draw.choice((1, 2, 3))
            if what < 0.06:
                for stream in network.streams:
                    if stream.source == name and not stream.pump.done():
                        stream.fail()
            elif what < 0.1:
                network.running[name].clear()
                await asyncio.sleep(0.02)
                network.tick(draw.choice((0.1, 1.0, 1.4)))
                network.running[name].set()
            else:
                await asyncio.gather(*(turn(r) for r in network.routers.values() if draw.random() < 0.7))
            if draw.random() < 0.3:
                network.tick(0.1)
                await asyncio.sleep(draw.choice((0.0, 0.03)))
        routers = list(network.routers.values())
        await network.until(lambda: all(len(one.live()) == 3 for one in network.replicas.values()), 0.2)
        for _ in range(30):
            network.tick(0.2)
            await asyncio.sleep(0.01)
        await network.until(lambda: bookings(routers[0]) == bookings(routers[1]) == bookings(routers[2]), 0.1)
        for router in routers:
            own = {id for id, _ in bookings(router) if id.startswith(f"{router.replica}/")}
            assert own <= running[router.replica].keys()
            for id in running[router.replica]:
                router.finished(id)
        await network.until(lambda: not any(bookings(router) for router in routers), 0.1)
        for router in routers:
            assert not router._carried
            assert all(load.resident_tokens == load.prompts == load.sequences == 0 for load in loads(router))
        for one in network.replicas.values():
            assert not any(peer.held or peer.waiting or peer.unconfirmed for peer in one._peers.values())

    run(test)
