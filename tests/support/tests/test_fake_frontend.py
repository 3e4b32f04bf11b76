# SPDX-License-Identifier: Apache-2.0
"""The fake frontend: what it answers, what it counts, and how it fails."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from support.fake_frontend import FIRST_WORKER, Control, Record, Settings, overlap
from support.http_load import OpenStreams, client, closed_loop, open_loop, post
from support.processes import Process, free_port

BODY = b'{"model":"m","messages":[]}'
STREAM = b'{"model":"m","messages":[],"stream":true}'


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A running one, with two workers."""
    port = free_port()
    command = [sys.executable, "-m", "support.fake_frontend", "--port", str(port), "--workers", "2"]
    with Process(command, env={"PYTHONPATH": "tests"}, ready=f"http://127.0.0.1:{port}/v1/models"):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def control(url: str) -> Iterator[Control]:
    """Its settings, as they were at its start, and no records."""
    one = Control(url)
    one.set(delay=0.0, tokens=200, pace=0.0, fault="none", faulty=None, fault_delay=0.0, record=False)
    one.records()
    yield one
    one.close()


def ask(url: str, body: bytes = BODY, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"{url}/v1/chat/completions", content=body, headers=named, trust_env=False, timeout=10)


def test_answers_plain_and_streamed(url: str, control: Control) -> None:
    control.set(tokens=7)
    assert ask(url).json()["choices"][0]["message"]["content"] == "hello there"
    text = ask(url, STREAM).text
    assert text.count('"delta": {"content"') == 7
    assert text.endswith("data: [DONE]\n\n")


def test_workers_are_listed_as_dynamo_does(url: str) -> None:
    health = httpx.get(f"{url}/health", trust_env=False).json()
    assert [one["instance_id"] for one in health["instances"]] == [FIRST_WORKER, FIRST_WORKER + 1]


def test_a_fault_of_one_worker_leaves_the_other(url: str, control: Control) -> None:
    control.set(fault="error", faulty=[1])
    status = {n: ask(url, x_dynamo_worker_instance_id=str(FIRST_WORKER + n)).status_code for n in (0, 1)}
    assert status == {0: 200, 1: 500}


@pytest.mark.parametrize("fault", ["reset", "cut"])
@pytest.mark.parametrize("body", [BODY, STREAM])
def test_an_answer_that_never_comes_whole(url: str, control: Control, fault: str, body: bytes) -> None:
    control.set(fault=fault)
    with pytest.raises(httpx.TransportError):
        ask(url, body)
    assert control.counts()["running"] == 0


def test_records_say_who_ran_when(url: str, control: Control) -> None:
    control.set(record=True, delay=0.2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda n: ask(url, x_request_id=f"r{n}", x_dynamo_gateway_lease="p a 1.2"), range(2)))
    records = control.records()
    assert {one.request_id for one in records} == {"r0", "r1"}
    assert {one.lease for one in records} == {"p a 1.2"}
    assert all(one.end - one.start > 0.1 for one in records)
    assert max(running for _, running in overlap(records)) == 2
    assert control.records() == []


def test_a_client_that_goes_ends_its_sequence(url: str, control: Control) -> None:
    control.set(record=True, fault="hang")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/chat/completions", content=BODY, trust_env=False, timeout=0.2)
    deadline = time.monotonic() + 10
    while control.counts()["running"] and time.monotonic() < deadline:
        time.sleep(0.01)
    (record,) = control.records()
    assert record.end < float("inf")


def test_a_setting_that_does_not_exist_is_refused(url: str, control: Control) -> None:
    with pytest.raises(ValueError, match="colour"):
        control.set(colour="red")
    with pytest.raises(ValueError, match="flood"):
        Settings().changed({"fault": "flood"})


def test_overlap_counts_ends_before_starts() -> None:
    ends_at_once = [Record(0.0, 1.0, "", "", -1), Record(1.0, float("inf"), "", "", -1)]
    assert overlap(ends_at_once) == [(0.0, 1), (1.0, 0), (1.0, 1)]


def test_generators_say_what_became_of_each_request(url: str, control: Control) -> None:
    chat = f"{url}/v1/chat/completions"

    async def run() -> None:
        async with client(10) as session:
            paced = await open_loop(session, [chat], BODY, who="a", rate=100, seconds=0.3)
            assert paced
            assert all(one.sound and one.who == "a" for one in paced)
            turns = iter((False, False, True))
            assert len(await closed_loop(session, chat, BODY, who="b", until=lambda: next(turns))) == 2
            await asyncio.to_thread(control.set, fault="error")
            assert (await post(session, chat, BODY, "c"))[3:5] == (500, False)
            await asyncio.to_thread(control.set, fault="cut")
            assert (await post(session, chat, STREAM, "c"))[3:5] == (200, False)
            await asyncio.to_thread(control.set, fault="none", pace=0.01, tokens=5)
            streams = OpenStreams()
            await streams.open(session, chat, STREAM, 8)
            assert streams.opened == 8
            await streams.finish()
            assert (streams.finished, streams.failed) == (8, 0)

    asyncio.run(run())
