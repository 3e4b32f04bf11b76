# SPDX-License-Identifier: Apache-2.0
"""Real frontends and routers before workers that break while they serve: what clients get is whole all the same.

The workers are processes of their own that keep a pace (`support.faulty_worker`). The n-th token of a prompt and its
answer depends on n alone, so an answer that was carried on by another worker is known to be the right one.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.live_fleet import MODEL, Answer, Etcd, LiveFleet, ask_once, live_model, paced, steady, until

#: Seconds that anything may take here; none of it is a measurement.
LIMIT_S = 90.0
ROUTER = (
    "--health",
    json.dumps({"stall_min_s": 1.0, "ejection_s": 1.0, "window_s": 5.0, "probe_s": 2.0, "max_ejection_s": 4.0}),
)
MIGRATION = ("--migration-limit", "3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that all workers say to have."""
    return live_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[LiveFleet]:
    """Three workers, two routers, two frontends."""
    home = tmp_path_factory.mktemp("faults")
    workers = [paced(model, home / f"worker-{number}") for number in range(3)]
    with LiveFleet(
        home / "fleet", "ours", workers, frontends=2, routers=2, frontend_options=MIGRATION, router_options=ROUTER
    ) as running:
        yield running


@pytest.fixture
def sound(fleet: LiveFleet) -> Iterator[LiveFleet]:
    """The fleet, with nothing wrong with any worker, which every router knows by the next test."""
    yield fleet
    for number in range(3):
        fleet.worker(number).break_by("")
    until(lambda: _all_in(fleet), LIMIT_S, "routers that take every worker for sound", lambda: _load(fleet, 1.0))


def _all_in(fleet: LiveFleet) -> bool:
    states = [fleet.state(router)["workers"] for router in range(2)]
    return all(len(each) == 3 and all(one["state"] == "in" for one in each) for each in states)


def _load(fleet: LiveFleet, seconds: float, *, tokens: int = 8, rate: float = 20.0) -> list[Answer]:
    return asyncio.run(steady(fleet.urls, rate=rate, seconds=seconds, tokens=tokens, timeout_s=LIMIT_S))


def _during(fleet: LiveFleet, then: Callable[[], None], *, tokens: int) -> list[Answer]:
    """Send answers that take long, do something while they run, and return them."""
    with ThreadPoolExecutor(1) as aside:
        running = aside.submit(_load, fleet, 0.5, tokens=tokens, rate=24.0)
        until(lambda: sum(len(fleet.worker(number).served()) for number in range(3)) > 6, LIMIT_S, "requests that run")
        time.sleep(0.5)
        then()
        return running.result()


def _assert_whole(answers: list[Answer], tokens: int) -> None:
    for answer in answers:
        assert answer.error == ""
        assert answer.text == "".join(chr(ord("b") + (128 + place) % 20) for place in range(tokens))


def test_no_request_fails_by_a_worker_that_raises_and_it_comes_back(sound: LiveFleet) -> None:
    worker = sound.worker(0)
    worker.break_by("raise")
    answers = _load(sound, 4.0)
    _assert_whole(answers, 8)
    served = worker.served()
    assert served, "nothing was ever sent to it"
    assert len(served) < len(answers) / 2
    worker.break_by("")
    time.sleep(0.1)
    mended = time.monotonic()

    def answers_again() -> bool:
        _assert_whole(_load(sound, 1.0), 8)
        return any(at > mended for at in worker.served())

    until(answers_again, LIMIT_S, "a request to a worker that is sound again")


def test_answers_that_break_in_the_middle_are_carried_on(sound: LiveFleet) -> None:
    sound.worker(0).break_by("break")
    _assert_whole(_load(sound, 2.0, tokens=12), 12)


def test_answers_of_a_worker_that_hangs_are_carried_on(sound: LiveFleet) -> None:
    answers = _during(sound, lambda: sound.worker(1).break_by("hang"), tokens=80)
    _assert_whole(answers, 80)


def test_a_verdict_from_outside_keeps_a_worker_out_until_it_is_lifted(sound: LiveFleet) -> None:
    worker = sound.worker(2)
    said = {"worker": str(worker.instance), "out": True, "ttl_s": 60, "reason": "test", "source": "test"}
    sound.route(sound.router_urls[MODEL][0], "verdict", said)

    def is_out() -> bool:
        found = [one for router in range(2) for one in sound.state(router)["workers"] if one["state"] == "out"]
        return [one["id"] for one in found] == [worker.instance] * 2

    until(is_out, LIMIT_S, "a verdict that both routers know")
    before = len(worker.served())
    _assert_whole(_load(sound, 1.0), 8)
    assert len(worker.served()) == before
    sound.route(sound.router_urls[MODEL][1], "verdict", {**said, "out": False})
    until(lambda: _all_in(sound), LIMIT_S, "a verdict that was lifted")


def test_a_frontend_that_was_killed_knows_the_model_again(sound: LiveFleet) -> None:
    sound.kill("frontend-0")
    sound.start("frontend-0")
    until(lambda: sound.listed() == {MODEL}, LIMIT_S, "the model")
    until(lambda: not asyncio.run(ask_once(sound.urls[0], range(10, 138), 4)).error, LIMIT_S, "an answer")


def test_answers_of_a_router_that_is_killed_are_carried_on_and_its_bookings_go(sound: LiveFleet) -> None:
    answers = _during(sound, lambda: sound.kill("router-0"), tokens=80)
    _assert_whole(answers, 80)
    until(lambda: not sound.state(1)["peers"], LIMIT_S, "a router without its peer")
    assert not any(sound.state(1)["bookings"].values())
    sound.start("router-0")
    until(lambda: len(sound.state(0)["workers"]) == 3 and len(sound.state(0)["peers"]) == 1, LIMIT_S, "both routers")


def test_answers_of_a_worker_that_is_killed_are_carried_on(sound: LiveFleet) -> None:
    answers = _during(sound, lambda: sound.kill("worker-2"), tokens=80)
    _assert_whole(answers, 80)
    sound.start("worker-2")


@pytest.mark.skipif(shutil.which("etcd") is None, reason="it needs etcd: apt-get install etcd-server")
def test_a_router_that_ends_while_etcd_is_away_lets_its_answers_end(tmp_path: Path, model: Path) -> None:
    workers = [paced(model, tmp_path / "worker")]
    with Etcd(tmp_path) as etcd, LiveFleet(tmp_path / "fleet", "ours", workers, env=etcd.environment) as running:
        with ThreadPoolExecutor(1) as aside:
            answer = aside.submit(asyncio.run, ask_once(running.urls[0], range(10, 138), 160))
            until(lambda: any(running.state()["bookings"].values()), LIMIT_S, "an answer that runs")
            etcd.kill()
            running.process("router-0").send_signal(signal.SIGTERM)
            _assert_whole([answer.result()], 160)
        assert running.process("router-0").wait(LIMIT_S) == 0


@pytest.mark.skipif(shutil.which("etcd") is None, reason="it needs etcd: apt-get install etcd-server")
def test_requests_are_answered_while_etcd_is_away(tmp_path: Path, model: Path) -> None:
    workers = [paced(model, tmp_path / f"worker-{number}") for number in range(2)]
    with Etcd(tmp_path) as etcd, LiveFleet(tmp_path / "fleet", "ours", workers, env=etcd.environment) as running:
        with ThreadPoolExecutor(1) as aside:
            load = aside.submit(_load, running, 9.0, rate=5.0)
            time.sleep(1)
            etcd.kill()
            time.sleep(5)
            etcd.start()
            _assert_whole(load.result(), 8)
        running.check()
        assert running.listed() == {MODEL}
