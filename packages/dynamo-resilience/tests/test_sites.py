# SPDX-License-Identifier: Apache-2.0
"""What discovery knows of sites, and how one of several is chosen."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from aiohttp import ClientSession, web
from multidict import CIMultiDict

from dynamo_resilience._breakers import Breakers, Outcome, Target
from dynamo_resilience._config import BreakerPolicy, Config, Site, StoreSettings
from dynamo_resilience._runtime import Estimate, Runtime, build
from dynamo_resilience._sites import Fleet, Frontend, Part, Route, Worker, choose, take
from dynamo_resilience._store import open_store
from dynamo_resilience._wire import Usage
from support.processes import free_port

NO_HEADERS: CIMultiDict[str] = CIMultiDict()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def test_runs() -> None:
        asyncio.run(asyncio.wait_for(test(), 30))

    test_runs.__name__ = test.__name__
    return test_runs


class FakeFrontend:
    """The two endpoints that discovery asks."""

    def __init__(self) -> None:
        self.models: object = {"object": "list", "data": [{"id": "m", "created": 5}]}
        self.health: object = {"instances": [{"endpoint": "generate", "instance_id": 7}]}
        self.health_status = 200
        self.keys: list[str | None] = []
        self.url = f"http://127.0.0.1:{free_port()}"

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.keys.append(request.headers.get("authorization"))
        if request.path == "/health":
            return web.json_response(self.health, status=self.health_status)
        return web.json_response(self.models)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        runner = web.ServerRunner(web.Server(self.handle, access_log=None), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", int(self.url.rsplit(":", 1)[1])).start()
        try:
            yield
        finally:
            await runner.cleanup()


def _site(*urls: str, **more: Any) -> Site:
    return Site.model_validate({"frontends": list(urls), "models": {"m": {}}, **more})


async def until(condition: Callable[[], object], what: str) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"waited in vain until {what}")


@run
async def test_frontend_tells_its_models_and_generating_instances() -> None:
    fake = FakeFrontend()
    fake.health = {
        "instances": [
            {"endpoint": "generate", "instance_id": 2173892801109729341, "component": "backend"},
            {"endpoint": "worker_kv_query_source_1f", "instance_id": 2173892801109729341},
            {"endpoint": "generate", "instance_id": 22, "component": "backend"},
        ]
    }
    frontend = Frontend("a", fake.url)
    assert frontend.models is None
    async with fake.serving(), ClientSession() as session:
        assert await frontend.look(session, NO_HEADERS)
        assert frontend.models == {"m": {"id": "m", "created": 5}}
        assert frontend.workers == {2173892801109729341, 22}
        assert frontend.answered
        assert not await frontend.look(session, NO_HEADERS)  # nothing new
        # Without a worker Dynamo's health is 503, which is an answer.
        fake.health, fake.health_status = {"status": "unhealthy", "instances": []}, 503
        fake.models = {"object": "list", "data": []}
        assert await frontend.look(session, NO_HEADERS)
        assert not frontend.models
        assert not frontend.workers
        assert frontend.answered


@run
async def test_what_is_known_is_kept_when_the_frontend_does_not_answer() -> None:
    fake = FakeFrontend()
    frontend = Frontend("a", fake.url)
    async with ClientSession() as session:
        async with fake.serving():
            await frontend.look(session, NO_HEADERS)
            for models, health in (({"data": 1}, {}), ({"x": 1}, {}), ([], {}), ({"data": []}, [])):
                fake.models, fake.health = models, health
                assert not await frontend.look(session, NO_HEADERS)
                assert not frontend.answered
                assert "not a frontend's answer" in frontend.error
            fake.models, fake.health, fake.health_status = {"data": []}, {}, 500
            assert not await frontend.look(session, NO_HEADERS)
            assert "/health answered 500" in frontend.error
        assert not await frontend.look(session, NO_HEADERS)
        assert "ClientConnectorError" in frontend.error
        assert frontend.models is not None
        assert list(frontend.models) == ["m"]
        assert frontend.workers == {7}


@run
async def test_fleet_keeps_a_table_of_its_workers() -> None:
    one, two = FakeFrontend(), FakeFrontend()
    two.health = {"instances": [{"endpoint": "generate", "instance_id": 8}]}
    fleet = Fleet("a", _site(one.url, two.url), "secret")
    changes = asyncio.Event()
    async with one.serving(), two.serving(), ClientSession() as session:
        tasks = [asyncio.create_task(fleet.watch(each, session, changes.set)) for each in fleet.frontends]
        await until(lambda: set(fleet.workers) == {7, 8}, "both workers are known")
        assert changes.is_set()
        assert set(one.keys) == {"Bearer secret"}
        before = fleet.workers[7]
        two.health = {"instances": [{"endpoint": "generate", "instance_id": 9}]}
        await until(lambda: set(fleet.workers) == {7, 9}, "the change is seen")
        assert fleet.workers[7] is before
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _route(*workers: int, fakes: int = 2) -> Route:
    fleet = Fleet("a", _site(*(f"http://127.0.0.1:{port}" for port in range(1, fakes + 1))), None)
    parts = tuple(Part(one, Target("a", "m", f"frontend={one.url}")) for one in fleet.frontends)
    for one in fleet.frontends:
        one.models, one.answered, one.workers = {"m": {}}, True, frozenset(workers)
    for number in workers:
        fleet.worker(number, "m")
    return Route(fleet, "m", fleet.settings.models["m"], None, Target("a", "m"), parts)


def test_frontends_that_answer_and_have_the_model_come_first() -> None:
    route = _route(fakes=3)
    one, two, three = route.parts
    assert route.at_hand([]) == [one, two, three]
    assert route.at_hand([one]) == [two, three]
    two.frontend.answered = False
    assert route.at_hand([]) == [one, three]
    assert route.at_hand([one, three]) == [two]
    assert route.at_hand([one, two, three]) == [one, three]  # all were tried: again
    for part in route.parts:
        part.frontend.models = {}
    assert route.rank == 2
    one.frontend.models = None  # never answered: it may have it
    assert route.rank == 1
    assert route.at_hand([]) == [one]


def test_workers_that_failed_come_again_only_when_all_did() -> None:
    route = _route(1, 2)
    known = route.fleet.workers
    assert set(route.workers(route.parts[0], [])) == {known[1], known[2]}
    assert route.workers(route.parts[0], [known[1]]) == [known[2]]
    assert len(route.workers(route.parts[0], [known[1], known[2]])) == 2


@run
async def test_least_busy_is_chosen_and_equals_take_turns() -> None:
    route = _route(fakes=3)
    chosen = Counter([(await take(route.parts, None, None))[0].frontend.url for _ in range(30)])
    assert set(chosen.values()) == {10}
    route.parts[0].frontend.outstanding = 1
    route.parts[1].frontend.failed()  # what fails at once is not idle
    assert {(await take(route.parts, None, None))[0] for _ in range(9)} == {route.parts[2]}
    await until(lambda: route.parts[1].frontend.failing == 0, "a failure is forgotten")
    # However busy the others are, one that fails again and again takes none of their requests, until some time is over.
    route.parts[0].frontend.outstanding = route.parts[2].frontend.outstanding = 50
    for _ in range(2):
        route.parts[1].frontend.failed()
    assert route.parts[1] not in {(await take(route.parts, None, None))[0] for _ in range(9)}
    for part in (route.parts[0], route.parts[2]):
        part.frontend.failed()
        part.frontend.failed()
    assert (await take(route.parts, None, None))[0] == route.parts[1]  # all do
    await until(lambda: route.parts[1].frontend.failing == 0, "two failures are forgotten")
    assert (await take(route.parts, None, None))[0] == route.parts[1]


@run
async def test_session_moves_only_with_its_frontend() -> None:
    parts = _route(fakes=5).parts
    sessions = [f"s{number}".encode() for number in range(200)]
    before = {session: (await take(parts, None, session))[0] for session in sessions}
    assert len(set(before.values())) == 5
    gone = parts[2]
    left = [part for part in parts if part is not gone]
    for session in sessions:
        now = (await take(left, None, session))[0]
        assert now == before[session] or before[session] == gone
    # It leaves a frontend that fails, and comes back.
    home = before[sessions[0]]
    home.frontend.failed()
    assert (await take(parts, None, sessions[0]))[0] != home
    await until(lambda: home.frontend.failing == 0, "the failure is forgotten")
    assert (await take(parts, None, sessions[0]))[0] == home


@run
async def test_breakers_decide_who_may_be_chosen() -> None:
    now = [1000.0]
    policy = BreakerPolicy(min_requests=1, open_s=5.0, max_open_share=1.0)
    store = open_store(StoreSettings(), lambda: now[0])
    breakers = Breakers(store, policy, lambda: now[0])
    workers = [Worker(number, Target("a", "m", f"worker={number}")) for number in (1, 2, 3)]
    breakers.members(workers[0].target.group, 3)
    await store.start()
    await breakers.start()

    async def fail(worker: Worker) -> None:
        now[0] += 0.5
        breakers.record(worker.target, Outcome.ERROR, now[0])
        await until(lambda: breakers.state(worker.target) == "open", "it opens")

    await fail(workers[0])
    assert {(await take(workers, breakers, None))[0].id for _ in range(6)} == {2, 3}
    await fail(workers[1])
    # All that is left to choose from is open: the one that is due first, yet only where there is nothing else.
    assert await choose(workers[:2], breakers, None) is None
    assert (await take(workers[:2], breakers, None)) == (workers[0], 0)
    now[0] += 4.6
    worker, probe = await take(workers, breakers, None)
    assert worker is workers[0]
    assert probe > 0
    assert (await take(workers, breakers, None)) == (workers[2], 0)  # one probe at a time
    breakers.record(worker.target, Outcome.OK, now[0], probe)
    await until(lambda: breakers.state(worker.target) == "closed", "the probe closes it")
    await breakers.close()
    await store.close()


def _build(config: Config, previous: Runtime | None, breakers: Breakers, store: Any) -> Runtime:
    clock = asyncio.get_running_loop().time
    return build(config, previous, store=store, breakers=breakers, replica="r", clock=clock)


@run
async def test_reload_takes_over_what_stays() -> None:
    capacity = {"capacity": {"sequences": 4}}
    sites: dict[str, Any] = {
        "a": {"frontends": ["http://127.0.0.1:1", "http://127.0.0.1:2"], "models": {"m": capacity, "n": {}}},
        "b": {"frontends": ["http://127.0.0.1:3"], "prefer": -1, "models": {"m": capacity}},
    }
    clock = asyncio.get_running_loop().time
    store = open_store(StoreSettings(), clock)
    breakers = Breakers(store, None, clock)
    first = _build(Config.model_validate({"sites": sites, "breaker": None}), None, breakers, store)
    assert [route.fleet.name for route in first.routes["m"]] == ["b", "a"]
    await first.start()
    first.estimates["m"].learn(100, Usage(50, 0, 1))
    sites["a"]["frontends"] = ["http://127.0.0.1:2", "http://127.0.0.1:4"]
    sites["a"]["models"]["m"] = {"capacity": {"sequences": 9}}
    del sites["b"]
    second = _build(Config.model_validate({"sites": sites}), first, breakers, store)
    assert first.routes["m"][1].pool is second.routes["m"][0].pool
    kept, new = second.sites["a"].frontends
    assert kept is first.sites["a"].frontends[1]
    assert new.url == "http://127.0.0.1:4"
    assert second.estimates["m"] is first.estimates["m"]
    assert (first.breakers, second.breakers) == (None, breakers)
    await second.start()
    assert second.session is first.session
    first.enter()
    retired = asyncio.create_task(first.retire(second))
    await asyncio.sleep(0.05)
    assert not retired.done()  # a request still uses it
    first.leave()
    await retired
    assert not second.session.closed
    await second.retire(None)
    assert second.session.closed


def test_workers_of_another_model_or_of_a_frontend_that_left_do_not_stay() -> None:
    """Their breakers would be the other model's, and they would count as living where the last may not be opened."""
    before = Fleet("a", _site("http://x:1", "http://y:1"), None)
    for frontend, workers in zip(before.frontends, ({1, 2}, {2, 3}), strict=True):
        frontend.workers = frozenset(workers)
        for number in workers:
            before.worker(number, "m")
    fewer = Fleet("a", _site("http://x:1"), None, before)
    assert set(fewer.workers) == {1, 2}
    assert fewer.workers[1] is before.workers[1]
    other = Fleet("a", _site("http://x:1", models={"n": {}}), None, before)
    assert {one.target.model for one in other.workers.values()} == {"n"}


def test_one_answer_cannot_poison_the_estimates() -> None:
    estimate = Estimate()
    estimate.learn(100, Usage(10**12, 0, 0))
    assert estimate.tokens_per_byte < 1
    estimate = Estimate()
    for _ in range(1000):
        estimate.learn(32_000_000, Usage(1, 0, 0))  # a padded body
    assert estimate.tokens_per_byte > 0.005


def test_estimates_follow_the_answers() -> None:
    estimate = Estimate()
    for _ in range(100):
        estimate.learn(1000, Usage(500, 400, 1))
    assert abs(estimate.tokens_per_byte - 0.5) < 0.01
    assert abs(estimate.uncached - 0.2) < 0.01
    estimate.learn(1000, Usage(0, 0, 0))
    assert abs(estimate.tokens_per_byte - 0.5) < 0.01
