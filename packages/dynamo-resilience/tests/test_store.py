# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from importlib.resources import files
from typing import Any

import pytest
import redis
import uvloop

from dynamo_resilience._config import BreakerPolicy, StoreSettings
from dynamo_resilience._errors import ConfigError, StoreUnavailable
from dynamo_resilience._store import (
    _CONNECTIONS,
    BreakerState,
    Claim,
    Event,
    LeaseNotice,
    LeaseReply,
    LeaseRequest,
    RedisStore,
    Report,
    Store,
    StoreStatus,
    open_store,
    within,
)
from support.processes import free_port
from support.store_server import Cut, StoreServer

# How long an operation may take where its time-out is not what is tested: the machine may be busy.
_PATIENT = 5.0
_POLICY = BreakerPolicy(min_requests=2, open_s=0.05, probe_s=30.0)
_prefixes = (f"{{test-{number}}}:" for number in range(10_000))


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    with StoreServer() as one:
        yield one


def settings(url: str, timeout_s: float = _PATIENT, prefix: str | None = None) -> StoreSettings:
    return StoreSettings(url=url, prefix=prefix or next(_prefixes), timeout_s=timeout_s)


@contextlib.asynccontextmanager
async def opened(config: StoreSettings) -> AsyncIterator[tuple[Store, list[Event]]]:
    """A started store and the events that it delivers."""
    store = open_store(config)
    events: list[Event] = []
    store.listen(events.append)
    await store.start()
    try:
        yield store, events
    finally:
        await store.close()


async def until(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.01)


def run(test: Coroutine[Any, Any, None]) -> None:
    uvloop.run(test)


def failing(target: str, group: str = "group", members: int = 4) -> Report:
    return Report(target, group, members, errors=2)


def request(holder: str, want: int, epoch: int = 0, **more: Any) -> LeaseRequest:
    base = LeaseRequest("pool", "serverless", holder, 200, (0, 8), (), False, (), (), want, 0, epoch)
    return base._replace(**more)


async def granted(store: Store, holder: str, want: int) -> LeaseReply:
    """Ask until the young store grants something."""
    while True:
        reply = await store.lease(request(holder, want, store.epoch))
        if reply.held:
            return reply
        await asyncio.sleep(0.02)


# --- URLs


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1:6379", "not memory:, redis://"),
        ("memory", "not memory:"),
        ("redis://127.0.0.1:port", "port"),
        ("redis://127.0.0.1:6379?colour=red", "colour"),
        ("redis+sentinel://127.0.0.1:26379", "no master is named"),
        ("redis+sentinel://127.0.0.1:26379/main?colour=red", "colour=red"),
        ("redis+sentinel://127.0.0.1:26379,/main", "'' is no HOST:PORT"),
        ("redis+sentinel://127.0.0.1:no/main", "no"),
    ],
)
def test_a_url_that_names_no_store_is_refused_by_name(url: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        open_store(settings(url))
    assert url in str(error.value)
    assert says in str(error.value)


def test_a_refused_url_does_not_show_its_password() -> None:
    with pytest.raises(ConfigError) as error:
        open_store(settings("redis://me:secret@127.0.0.1:6379?colour=red"))
    assert "secret" not in str(error.value)


# --- the same in process and in Redis


@pytest.fixture(params=["memory", "redis", "valkey", "unix"])
def config(request: pytest.FixtureRequest) -> StoreSettings:
    if request.param == "memory":
        return settings("memory:")
    server: StoreServer = request.getfixturevalue("server")
    urls = {"redis": server.url, "valkey": server.url.replace("redis", "valkey"), "unix": server.unix_url}
    return settings(urls[request.param])


def test_a_breaker_opens_is_listed_probed_once_and_closed(config: StoreSettings) -> None:
    async def test() -> None:
        async with opened(config) as (store, events):
            (state,) = await store.report([failing("a")], _POLICY)
            assert (state.target, state.state, state.reason, state.opens) == ("a", "open", "errors", 1)
            assert [one.target for one in await store.breakers()] == ["a"]
            await next_breaker(events, "open")
            claims: list[BreakerState] = []
            while not any(one.probe for one in claims):
                claims += await asyncio.gather(*(store.claim(Claim("a", "group"), _POLICY) for _ in range(8)))
            (number,) = (one.probe for one in claims if one.probe)
            report = Report("a", "group", 4, ok=1, probe=number, probe_ok=True)
            assert [one.state for one in await store.report([report], _POLICY)] == ["closed"]
            assert await store.breakers() == []
            await until(lambda: [one.state for one in breaker_events(events)][-1:] == ["closed"])
            assert list(dict.fromkeys(one.state for one in breaker_events(events))) == ["open", "half_open", "closed"]

    run(test())


def test_a_block_has_one_holder_and_freeing_it_is_made_known(config: StoreSettings) -> None:
    async def test() -> None:
        async with opened(config) as (store, events):
            first = await granted(store, "a", 8)
            assert len(first.held) == 8
            assert store.epoch == first.epoch
            second = await store.lease(request("b", 4, store.epoch))
            assert second.held == ()
            kept, freed = first.held[:4], first.held[4:]
            more = request("a", 4, store.epoch, keep=kept, release=freed)
            assert {one.block for one in (await store.lease(more)).held} == {one.block for one in kept}
            await until(lambda: LeaseNotice("pool") in events)
            second = await store.lease(request("b", 4, store.epoch))
            assert {one.block for one in second.held} == {one.block for one in freed}

    run(test())


_NAMES = ["a b", "m|n%7Co", 'say "no"\\', "line\nbreak\ttab", "zwölf 模型 🦙", "nul\0", "{}[]*?^", "%s%d", "x" * 20_000]


def test_any_name_comes_back_as_it_went(config: StoreSettings) -> None:
    async def test() -> None:
        policy = _POLICY.model_copy(update={"open_s": 60.0})
        async with opened(config) as (store, events):
            await granted(store, "r", 1)
            for name in _NAMES:
                (state,) = await store.report([failing(name, name)], policy)
                assert (state.target, state.group, state.state) == (name, name, "open")
                assert (name, name) in [one[:2] for one in await store.breakers()]
                assert (await store.claim(Claim(name, name), policy)).target == name
                odd = {"pool": name, "account": name}
                mine = await store.lease(request(name, 8, store.epoch, **odd))
                assert len(mine.held) == 8
                assert (await store.lease(request(name + "|", 8, store.epoch, **odd))).held == ()
                more = request(name, 8, store.epoch, keep=mine.held[:4], release=mine.held[4:], **odd)
                assert (await store.lease(more)).held[:4] == mine.held[:4]
                await until(lambda name=name: LeaseNotice(name) in events)  # type: ignore[misc]
            await until(lambda: {one.target for one in breaker_events(events)} == {*_NAMES})

    run(test())


def test_who_does_not_listen_any_more_is_not_called(config: StoreSettings) -> None:
    async def test() -> None:
        async with opened(config) as (store, events):
            others: list[Event] = []
            store.listen(others.append)
            store.unlisten(events.append)
            store.unlisten(events.append)
            before = len(events)
            await store.report([failing("a")], _POLICY)
            await next_breaker(others, "open")
            assert len(events) == before

    run(test())


def breaker_events(events: list[Event]) -> list[BreakerState]:
    return [one for one in events if isinstance(one, BreakerState)]


async def next_breaker(events: list[Event], state: str) -> BreakerState:
    """The first event that says of a breaker that it is in this state."""
    await until(lambda: any(one.state == state for one in breaker_events(events)))
    return next(one for one in breaker_events(events) if one.state == state)


def statuses(events: list[Event]) -> list[bool]:
    return [one.up for one in events if isinstance(one, StoreStatus)]


# --- several replicas


def test_every_replica_hears_of_what_one_reported(server: StoreServer) -> None:
    async def test() -> None:
        config = settings(server.url)
        async with contextlib.AsyncExitStack() as stack:
            replicas = [await stack.enter_async_context(opened(config)) for _ in range(4)]
            await replicas[0][0].report([failing("a")], _POLICY)
            for _, events in replicas:
                assert (await next_breaker(events, "open")).target == "a"

    run(test())


def test_a_replica_that_comes_late_is_told_what_is_open(server: StoreServer) -> None:
    async def test() -> None:
        config = settings(server.url)
        async with opened(config) as (first, _):
            await first.report([failing("a")], _POLICY)
            async with opened(config) as (_, events):
                assert [one.target for one in breaker_events(events)] == ["a"]
                assert statuses(events) == [True]

    run(test())


def test_what_events_missed_is_read_again_and_a_breaker_that_vanished_is_closed(server: StoreServer) -> None:
    async def test() -> None:
        config = settings(server.url)
        async with opened(config) as (store, events), opened(config) as (_, others):
            (state,) = await store.report([failing("a")], _POLICY.model_copy(update={"open_s": 60.0}))
            await until(lambda: breaker_events(events) and breaker_events(others))
            server.client().delete(f"{config.prefix}b:a", f"{config.prefix}open")  # no event says so
            for heard in (events, others):
                assert (await next_breaker(heard, "closed")).version == state.version

    run(test())


def test_prefixes_keep_fleets_apart_and_nothing_else_is_touched(server: StoreServer) -> None:
    async def test() -> None:
        one, other = settings(server.url), settings(server.url)
        client = server.client()
        client.flushall()
        async with opened(one) as (store, _):
            await store.report([failing("a")], _POLICY)
            await granted(store, "r", 2)
            keys = set(client.scan_iter())
            assert keys
            assert all(key.startswith(one.prefix) for key in keys)
            # What nobody renews is gone one day; the epoch stays, or a store at rest would look like a new one.
            assert {key for key in keys if client.pttl(key) < 0} == {f"{one.prefix}epoch"}
            async with opened(other) as (there, events):
                assert await there.breakers() == []
                assert breaker_events(events) == []
                assert len((await granted(there, "r", 8)).held) == 8

    run(test())


def test_messages_of_another_version_and_nonsense_are_passed_over(server: StoreServer) -> None:
    async def test() -> None:
        config = settings(server.url)
        async with opened(config) as (_, events):
            client = server.client()
            notice = json.dumps({"v": 1, "k": "l", "pool": "p", "new": [1]})
            await until(lambda: client.publish(f"{config.prefix}events", notice))
            before = len(events)
            for text in ("", "{", "[]", '{"v":1}', '{"v":1,"k":"b"}', '{"v":1,"k":"x"}', '{"v":2,"k":"l","pool":"q"}'):
                client.publish(f"{config.prefix}events", text)
            client.publish(f"{config.prefix}events", notice)
            await until(lambda: events.count(LeaseNotice("p")) == 2)
            assert len(events) - before <= 2
            assert LeaseNotice("q") not in events

    run(test())


def test_one_listeners_fault_is_not_the_others(server: StoreServer, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        store = open_store(settings(server.url))
        events: list[Event] = []
        store.listen(lambda event: setattr(event, "up", None))  # which a tuple refuses
        store.listen(events.append)
        await store.start()
        await store.close()
        assert events == [StoreStatus(True)]
        assert "AttributeError" in caplog.text

    run(test())


def test_many_operations_at_once_share_a_few_connections(server: StoreServer) -> None:
    async def test() -> None:
        before = len(server.client().client_list())
        async with opened(settings(server.url)) as (store, _):
            await asyncio.gather(*(store.lease(request(f"r{n}", 1)) for n in range(200)))
            assert len(server.client().client_list()) - before <= 10

    run(test())


def test_it_closes_whatever_it_is_just_doing(server: StoreServer) -> None:
    # asyncio.wait_for of Python 3.10 and 3.11 swallows a cancellation that comes together with what was waited for.
    async def test() -> None:
        for turns in range(8):
            store = open_store(settings(server.url))
            assert isinstance(store, RedisStore)
            await store.start()
            await asyncio.sleep(0.02)
            store._wake.set()
            for _ in range(turns):
                await asyncio.sleep(0)
            await asyncio.wait_for(store.close(), 20)

    run(test())


def test_an_operation_ends_although_a_library_swallows_its_cancellation() -> None:
    async def stubborn() -> None:
        for _ in range(2):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(4)
        await asyncio.sleep(4)

    async def test() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await within(0.01, stubborn())
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(test())


# --- faults


def test_an_absent_store_is_no_error_and_is_found_when_it_comes() -> None:
    async def test() -> None:
        port = free_port()
        async with opened(settings(f"redis://127.0.0.1:{port}")) as (store, events):
            assert not store.up
            assert str(port) in store.last_error
            with pytest.raises(StoreUnavailable, match=str(port)):
                await store.breakers()
            assert events == []
            with StoreServer(port):
                await until(lambda: store.up)
                assert await store.breakers() == []
                assert statuses(events) == [True]

    run(test())


def test_the_store_is_away_and_comes_back_with_a_later_epoch() -> None:
    async def test() -> None:
        with StoreServer() as server:
            async with opened(settings(server.url)) as (store, events):
                await store.report([failing("a")], _POLICY)
                held = (await granted(store, "r", 1)).held
                epoch = store.epoch
                server.kill()
                with pytest.raises(StoreUnavailable, match="store: lease"):
                    await store.lease(request("r", 1, epoch, keep=held))
                assert not store.up
                server.start()
                await until(lambda: store.up)
                assert statuses(events) == [True, False, True]
                # It was forgotten, so it is closed; and that is known before the store counts as back.
                closed = [one for one in breaker_events(events) if one.state == "closed"]
                assert [one.target for one in closed] == ["a"]
                assert events.index(closed[0]) < len(events) - 1 - events[::-1].index(StoreStatus(True))
                reply = await store.lease(request("other", 1, epoch))
                assert reply.epoch > epoch
                assert reply.epoch == store.epoch
                assert reply.grace_ms > 0
                assert reply.held == ()
                # Events come again.
                await store.report([failing("b")], _POLICY)
                await until(lambda: breaker_events(events)[-1].target == "b")

    run(test())


def test_an_absent_store_is_not_asked_again_at_once_but_by_whoever_was_paused() -> None:
    async def test() -> None:
        uptime = 1000.0
        store = open_store(settings(f"redis://127.0.0.1:{free_port()}"), lambda: uptime)
        await store.start()
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match="was not tried: connect"):
                await store.lease(request("r", 1))
        uptime += 0.2  # the shortest lease
        with pytest.raises(StoreUnavailable, match="store: lease: ConnectionError"):
            await store.lease(request("r", 1))
        await store.close()

    run(test())


def test_a_restart_that_lost_nothing_is_an_epoch_too() -> None:
    async def test() -> None:
        with StoreServer(persist=True) as server:
            async with opened(settings(server.url)) as (store, _):
                epoch = (await granted(store, "r", 1)).epoch
                server.restart()
                reply = await store.lease(request("other", 1, epoch))
                assert reply.epoch > epoch
                assert reply.held == ()

    run(test())


def test_a_flush_is_an_epoch_too(server: StoreServer) -> None:
    async def test() -> None:
        async with opened(settings(server.url)) as (store, events):
            epoch = (await granted(store, "r", 1)).epoch
            server.client().flushall()
            reply = await store.lease(request("other", 1, epoch))
            assert reply.epoch > epoch
            assert reply.held == ()
            assert statuses(events) == [True]

    run(test())


def test_scripts_that_the_server_forgot_are_loaded_again(server: StoreServer) -> None:
    async def test() -> None:
        async with opened(settings(server.url)) as (store, events):
            await store.report([failing("a")], _POLICY)
            server.client().script_flush()
            await asyncio.gather(*(store.report([failing(f"t{n}")], _POLICY) for n in range(8)))
            assert (await store.lease(request("r", 1))).epoch
            assert statuses(events) == [True]

    run(test())


def test_a_store_that_is_too_slow_or_silent_is_away_and_found_again(server: StoreServer) -> None:
    async def test() -> None:
        async with Cut(server.port) as cut, opened(settings(cut.url, timeout_s=0.25)) as (store, events):
            await until(lambda: store.up)
            for fault in ("slow", "silent", "half-closed"):
                if fault == "slow":
                    cut.delay_s = 0.6
                elif fault == "silent":
                    cut.stall()
                else:
                    cut.refuse = True
                    cut.half_close()
                with pytest.raises(StoreUnavailable):
                    await store.breakers()
                assert not store.up
                if fault != "half-closed":
                    assert "no answer within 0.25 s" in store.last_error
                cut.heal()
                await until(lambda: store.up)
            assert statuses(events)[-1]

    run(test())


def test_a_paused_server_is_away_until_it_goes_on() -> None:
    async def test() -> None:
        with StoreServer() as server:
            async with opened(settings(server.url, timeout_s=0.25)) as (store, _):
                await until(lambda: store.up)
                server.pause()
                with pytest.raises(StoreUnavailable, match=r"no answer within 0\.25 s"):
                    await store.breakers()
                server.resume()
                await until(lambda: store.up)

    run(test())


def test_a_lost_subscription_is_renewed(server: StoreServer) -> None:
    async def test() -> None:
        config = settings(server.url)
        async with opened(config) as (store, events):
            client = server.client()
            channel = f"{config.prefix}events"
            await until(lambda: dict(client.pubsub_numsub(channel))[channel] == 1)
            client.client_kill_filter(_type="pubsub")
            await until(lambda: dict(client.pubsub_numsub(channel))[channel] == 1)
            await store.report([failing("a")], _POLICY)
            await until(lambda: breaker_events(events))
            assert statuses(events) == [True]  # commands never failed

    run(test())


def test_a_wrong_password_is_said_and_none_is_shown() -> None:
    async def test() -> None:
        with StoreServer(password="right") as server:
            async with opened(settings(server.url.replace("right", "wrong"))) as (store, _):
                assert not store.up
                assert "WRONGPASS" in store.last_error or "invalid" in store.last_error
                assert "wrong@" not in store.last_error
            async with opened(settings(f"redis://127.0.0.1:{server.port}")) as (store, _):
                assert "uthentication" in store.last_error
            async with opened(settings(server.url)) as (store, _):
                assert store.up

    run(test())


def test_a_server_that_is_no_store_is_away(server: StoreServer) -> None:
    async def test() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await writer.drain()
            writer.close()

        web = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = web.sockets[0].getsockname()[1]
        async with web, opened(settings(f"redis://127.0.0.1:{port}")) as (store, _):
            assert not store.up
            assert store.last_error

    run(test())


_REDUCED: dict[str, tuple[str, str, str]] = {
    "without replicas": ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0", "replicas"),
    "full": ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0", "maxmemory"),
    "read-only": ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE", "READONLY|read only"),
    "without INFO": ("ACL SETUSER default -info", "ACL SETUSER default +info", "info"),
    "without its channel": ("ACL SETUSER default resetchannels", "ACL SETUSER default allchannels", "channel"),
}


@pytest.mark.parametrize("reduced", _REDUCED)
def test_a_store_that_does_not_do_all_that_it_has_to_is_away(reduced: str) -> None:
    worse, better, says = _REDUCED[reduced]

    async def test() -> None:
        with StoreServer() as server:
            async with opened(settings(server.url)) as (store, events):
                server.client().execute_command(worse)  # type: ignore[no-untyped-call]
                with pytest.raises(StoreUnavailable, match=says):
                    await store.report([failing("a")], _POLICY)
                await asyncio.sleep(0.3)  # it answers PING all the time
                assert statuses(events) == [True, False]
                assert re.search(says, store.last_error)
                server.client().execute_command(better)  # type: ignore[no-untyped-call]
                await until(lambda: store.up)
                assert (await store.report([failing("b")], _POLICY))[0].state == "open"

    run(test())


def test_a_store_that_fails_at_one_thing_only_is_not_taken_up_again_and_again(server: StoreServer) -> None:
    async def test() -> None:
        async with opened(settings(server.url)) as (store, events):
            epoch = (await granted(store, "r", 1)).epoch
            client = server.client()
            key = f"{store_prefix(store)}lease:{epoch}:pool"
            client.delete(key)
            client.set(key, "not a hash")
            tasks: set[asyncio.Task[LeaseReply]] = set()

            def heard(event: Event) -> None:
                if event == StoreStatus(True):  # as a replica does, which has waited for it
                    tasks.add(asyncio.ensure_future(store.lease(request("r", 1))))

            store.listen(heard)
            heard(StoreStatus(True))
            await until(lambda: statuses(events).count(True) > 2)
            before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
            await asyncio.sleep(0.5)
            assert client.info("commandstats")["cmdstat_evalsha"]["calls"] - before < 20
            client.delete(key)
            await until(lambda: store.up)
            await asyncio.gather(*tasks, return_exceptions=True)

    run(test())


def test_a_fault_that_nobody_foresaw_is_the_stores_and_does_not_last(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        config = settings(server.url)
        async with opened(config) as (store, events):
            client = server.client()
            channel = f"{config.prefix}events"
            await until(lambda: dict(client.pubsub_numsub(channel))[channel] == 1)

            async def unforeseen(*_: object) -> None:
                raise RuntimeError("unforeseen")

            with monkeypatch.context() as patched:
                patched.setattr(store, "_receive", unforeseen)
                client.client_kill_filter(_type="pubsub")
                await until(lambda: "unforeseen" in store.last_error)
            await until(lambda: dict(client.pubsub_numsub(channel))[channel] == 1)
            await store.report([failing("a")], _POLICY)
            await until(lambda: breaker_events(events))
            assert statuses(events) == [True]
            with monkeypatch.context() as patched:
                patched.setattr(store, "_run", unforeseen)
                with pytest.raises(StoreUnavailable, match="RuntimeError: unforeseen"):
                    await store.breakers()
            await until(lambda: store.up)

    run(test())


def test_a_store_that_went_away_while_nobody_asked_is_said_to_be_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        with StoreServer() as server:
            async with opened(settings(server.url)) as (_, events):
                server.kill()
                await until(lambda: statuses(events) == [True, False])
                await asyncio.sleep(0.1)

    run(test())
    said = [one for one in caplog.records if one.name == "dynamo_resilience._store" and one.levelno >= logging.WARNING]
    assert [one.exc_info for one in said] == [None]


def test_idle_connections_that_the_server_closed_are_no_outage(server: StoreServer) -> None:
    async def test() -> None:
        async with opened(settings(server.url)) as (store, events):
            assert isinstance(store, RedisStore)
            free, client = store._free, server.client()

            def connected() -> set[str]:
                return {one["id"] for one in client.client_list(_type="normal")} - {str(client.client_id())}

            for _ in range(3):
                await asyncio.gather(*(store.breakers() for _ in range(8)))
                await until(lambda: free._value == _CONNECTIONS)  # it reads by itself as well
                idle = connected()
                assert idle
                client.client_kill_filter(_type="normal", skipme=True)
                await until(functools.partial(lambda closed: closed.isdisjoint(connected()), idle))
                await asyncio.sleep(0.02)
            assert statuses(events) == [True]

    run(test())


def test_operations_that_got_no_answer_use_nothing_up(server: StoreServer) -> None:
    async def test() -> None:
        uptime = itertools.count(0.0, 10.0)  # so that each one is tried
        async with Cut(server.port) as cut:
            store = open_store(settings(cut.url, timeout_s=0.01), uptime.__next__)
            await store.start()
            cut.stall()
            for _ in range(15):
                fates = await asyncio.gather(*(store.breakers() for _ in range(16)), return_exceptions=True)
                assert all(isinstance(one, StoreUnavailable) for one in fates)
            cut.heal()
            cut.reset()
            await until(lambda: store.up)
            assert isinstance(store, RedisStore)
            assert len(store._client.connection_pool._in_use_connections) <= 10  # of a hundred that it allows
            await store.close()

    run(test())


def test_what_a_later_version_keeps_beside_the_leases_is_left_alone(server: StoreServer) -> None:
    async def test() -> None:
        async with opened(settings(server.url)) as (store, _):
            first = await granted(store, "r", 1)
            (key,) = server.client().scan_iter(f"{store_prefix(store).replace('{', '?').replace('}', '?')}lease:*")
            server.client().hset(key, "later", "something")
            reply = await store.lease(request("r", 8, store.epoch, keep=first.held))
            counters = [int(one.token.split(".")[1]) for one in reply.held]
            assert counters == sorted(set(counters))
            assert server.client().hget(key, "later") == "something"

    run(test())


def test_sentinel_hands_over_to_the_replica_which_is_a_new_epoch() -> None:
    async def test() -> None:
        with (
            StoreServer() as server,
            StoreServer.replica(of=server) as replica,
            StoreServer.sentinel(of=server) as sentinel,
        ):
            url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{sentinel.port}/main?db=0"
            async with opened(settings(url)) as (store, events):
                await until(lambda: store.up)
                await store.report([failing("a")], _POLICY.model_copy(update={"open_s": 60.0}))
                first = await granted(store, "r", 1)
                watcher = redis.Redis(port=sentinel.port, decode_responses=True)
                await until(lambda: watcher.sentinel_slaves("main"))
                await until(lambda: replica.client().exists(f"{store_prefix(store)}b:a"))
                server.kill()
                with pytest.raises(StoreUnavailable):
                    await store.breakers()
                await until(lambda: store.up)
                assert replica.client().role()[0] == "master"
                # What was replicated is there, but it may not be all: a new epoch.
                assert [one.target for one in await store.breakers()] == ["a"]
                reply = await store.lease(request("other", 1, first.epoch))
                assert reply.epoch > first.epoch
                assert reply.held == ()
                assert statuses(events) == [True, False, True]

    run(test())


def store_prefix(store: Store) -> str:
    assert isinstance(store, RedisStore)
    return store._prefix


# --- the store's clock


def clock_and_epoch(server: StoreServer, prefix: str, seen: int = 0) -> tuple[int, int, int]:
    prelude = (files("dynamo_resilience") / "lua" / "epoch.lua").read_text()
    script = f"{prelude}\nreturn cjson.encode({{epoch_now(KEYS[1], tonumber(ARGV[1]))}})"
    number, now_ms, age_ms = json.loads(server.client().eval(script, 1, prefix, seen))
    return number, now_ms, age_ms


def test_the_stores_now_neither_goes_back_nor_stands_still_when_its_clock_is_behind(server: StoreServer) -> None:
    prefix = next(_prefixes)
    epoch, before, _ = clock_and_epoch(server, prefix)
    server.client().hset(f"{prefix}epoch", "last_ms", before + 3_600_000)  # seen before the clock was set back an hour
    last = before + 3_600_000
    for _ in range(3):
        same, now, _ = clock_and_epoch(server, prefix)
        assert same == epoch
        assert last <= now < before + 3_700_000
        last = now
        time.sleep(0.01)
    assert last > before + 3_600_000


def test_an_epoch_is_later_than_any_that_a_caller_has_seen(server: StoreServer) -> None:
    prefix = next(_prefixes)
    epoch, _, _ = clock_and_epoch(server, prefix)
    assert clock_and_epoch(server, prefix, seen=epoch)[0] == epoch
    later, _, age = clock_and_epoch(server, prefix, seen=epoch + 10**9)
    assert later > epoch + 10**9
    assert age == 0
    assert clock_and_epoch(server, prefix, seen=0)[0] == later
