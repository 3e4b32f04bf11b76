# SPDX-License-Identifier: Apache-2.0
"""`serving-stack route explain`, against servers that answer as a router's system port does."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dynamo_kv_router_ext import Placer, Request, Role, Worker, load_profile
from dynamo_kv_router_ext._records import Records
from dynamo_kv_router_ext._routes import Routes
from serving_stack import cli
from serving_stack.state import MARK, ComponentState, Run, RunState, boot, stat
from support.processes import free_port

_WORKERS = {"prefill-0": 0xA0, "prefill-1": 0xA1, "prefill-2": 0xA2, "decode": 0xB0}


class FakeRouter:
    """A replica's real records and routes, behind an HTTP server that stands for Dynamo's."""

    def __init__(self, replica: int) -> None:
        self.replica = replica
        self.records = Records()
        self.placer = Placer(load_profile("mocker"))
        for name, worker in _WORKERS.items():
            self.placer.add_worker(Worker(worker, role="decode" if name == "decode" else "prefill"), now=0.0)
        self.routes: dict[str, Any] = {}
        Routes(self).register(self)
        #: Instead of the route's own answer: status and body.
        self.says: tuple[int, bytes] | None = None

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                """Keep quiet."""

            def do_POST(handler) -> None:
                """Answer `explain`."""
                body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
                route = self.routes[handler.path.removeprefix("/engine/")]
                status, text = self.says or (200, json.dumps(asyncio.run(route(body))).encode())
                handler.send_response(status)
                handler.send_header("content-length", str(len(text)))
                handler.end_headers()
                handler.wfile.write(text)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def register_engine_route(self, name: str, answer: Any) -> None:
        """Be the runtime that routes are registered with."""
        self.routes[name] = answer

    def verdict(self, worker: Any, out: bool, ttl_s: float, reason: str = "", source: str = "") -> bool:
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        raise NotImplementedError

    def place(self, name: str, role: Role, now: float, session: str | None = None) -> None:
        request = Request(f"{self.replica:x}/{name}", tokens=6400, session=session)
        decision = self.placer.place(request, role, now, explain=True)
        self.records.placed(name, request, decision, now, 1.7e9 + now)


@pytest.fixture
def start() -> Iterator[Callable[[], FakeRouter]]:
    started: list[FakeRouter] = []

    def one() -> FakeRouter:
        started.append(FakeRouter(0x1F + len(started)))
        return started[-1]

    yield one
    for router in started:
        router.server.shutdown()
        router.server.server_close()


class Said(NamedTuple):
    status: int
    out: str
    error: str


Explain = Callable[..., Said]


@pytest.fixture
def explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Explain:
    """The command, with a home of its own."""
    monkeypatch.setenv("SERVING_STACK_HOME", str(tmp_path))

    def command(*words: str) -> Said:
        status = cli.main(["route", "explain", *words])
        return Said(status, *capsys.readouterr())

    return command


def test_a_request_is_explained_by_the_replica_that_carried_it(
    start: Callable[[], FakeRouter], explain: Explain
) -> None:
    other, router = start(), start()
    router.placer.health.verdict(0xA1, True, 0.0, 600.0)
    router.place("abc", "prefill", 1.0, session="s 1")
    router.records.first_token("abc", "prefill", 1.5)
    router.place("abc", "decode", 1.5, session="s 1")
    router.records.ended("abc", "finished", 3.0)
    urls = ("--router", other.url, "--router", router.url + "/")
    said = explain("chatcmpl-abc", *urls)
    assert (said.status, said.error) == (0, "")
    lines = said.out.splitlines()
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1.7e9 + 1))
    assert lines[0] == f"request abc: 6400 tokens, session 's 1', {at}"
    assert lines[1] == f"carried by replica 20 at {router.url}: finished after 2.000 s"
    prefill, decode = said.out.split("\n\n")[1:]
    # Each candidate with its terms, the chosen one marked, the passed over one with the reason.
    heading, *rows = prefill.splitlines()[2:6]
    assert heading.split() == [
        *("worker", "rank", "cost", "wait", "fetch", "work", "first", "token", "others", "risk"),
        *("device", "host", "disk", "store"),
    ]
    chosen = next(row for row in rows if row.split()[0] == "*")
    assert prefill.startswith(f"prefill: {chosen.split()[1]}, rank 0, 0.000 s after the first\n")
    assert len(chosen.split()) == len(heading.split()) + 1
    assert {row.replace("*", "").split()[0] for row in rows} == {"a0", "a1", "a2"}
    assert re.fullmatch(r"    a1 +0 passed over: out for 5\d\d\.\d s more \(.*\)", rows[-1])
    expected = float(re.findall(r"first token expected after ([\d.]+) ms, measured 500.0 \(", prefill)[0])
    assert f"({500.0 - expected:+.1f})" in prefill
    assert re.search(r"cost [\d.]+, the next best was [\d.]+; regret [\d.]+\n?$", prefill)
    assert decode.startswith("decode: b0, rank 0, 0.500 s after the first\n")
    assert decode.rstrip().endswith(" ms, none measured")

    told = json.loads(explain("abc", "--json", *urls).out)
    assert told == [{"router": router.url, "replica": 0x20, "request": router.records.find("abc")}]


def test_a_request_that_was_placed_again_shows_why(start: Callable[[], FakeRouter], explain: Explain) -> None:
    router = start()
    router.place("abc", "decode", 1.0)
    router.records.aborted("abc", "decode", "worker 176 stands still", 5.0)
    router.records.failed("abc", "decode", "it stands still", 5.0)
    router.placer.failed("1f/abc", "decode", 5.0, "it stands still")
    router.place("abc", "decode", 5.0)
    router.records.first_token("abc", "decode", 6.0)
    said = explain("abc", "--router", router.url)
    assert "still running" in said.out
    first, second = said.out.split("\n\n")[1:]
    assert "  failed: it stands still\n  aborted: worker 176 stands still" in first
    assert "4.000 s after the first" in second
    assert "there was no other; regret 0.0" in second


def test_a_request_that_nobody_knows_is_named(start: Callable[[], FakeRouter], explain: Explain) -> None:
    one, two = start(), start()
    said = explain("chatcmpl-x", "--router", one.url, "--router", two.url)
    assert said.status == 1
    assert said.error == (
        f"serving-stack: request 'chatcmpl-x': no replica carried it, or not lately ({one.url}, {two.url})\n"
    )
    gone = f"http://127.0.0.1:{free_port()}"
    said = explain("chatcmpl-x", "--router", one.url, "--router", gone)
    assert (said.status, f"({one.url}, {gone}); no answer from {gone} (" in said.error) == (1, True)
    assert "request must be the id of a request, not ''" in explain("", "--router", one.url).error


def test_a_router_that_is_silent_or_none_is_named(start: Callable[[], FakeRouter], explain: Explain) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    said = explain("x", "--router", gone)
    assert said.status == 1
    assert said.error.startswith(f"serving-stack: no router answers: {gone} (")
    router = start()
    answers = [(404, b'{"error":"Route not found"}'), (200, b"<html>"), (200, b"[1]"), (200, b'{"replica": 1}')]
    for answer in answers:
        router.says = answer
        said = explain("x", "--router", router.url)
        assert said.status == 1
        assert f"{router.url} (does not answer as a router: status {answer[0]})" in said.error
    # One that is silent does not hide what the other one knows.
    other = start()
    other.place("x", "decode", 1.0)
    assert explain("x", "--router", gone, "--router", other.url).status == 0


@pytest.mark.parametrize(
    "url", ["127.0.0.1:80", "ftp://x:1", "http://", "http://x:0", "http://x:99999", "http://[x", "http://a b"]
)
def test_a_router_flag_that_is_no_address_is_named(url: str, explain: Explain) -> None:
    said = explain("x", "--router", url)
    assert said.status == 1
    assert said.error.startswith(f"serving-stack: --router {url}: http://HOST:PORT is wanted")


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Callable[[dict[str, ComponentState]], None]]:
    """Has a stack run in the home `tmp_path`, as far as its state file and one process say so."""
    environment = {**os.environ, MARK: "run-1"}
    with subprocess.Popen(["sleep", "600"], start_new_session=True, env=environment) as process:
        one = stat(process.pid)
        assert one is not None

        def write(components: dict[str, ComponentState]) -> None:
            run = Run(tmp_path / "run")
            run.directory.mkdir(exist_ok=True)
            state = RunState(
                run_id="run-1",
                session=process.pid,
                boot=boot(),
                born=one.born,
                profile="cpu-router",
                model="m",
                served_model_name="m",
                port=8000,
                phase="ready",
                components=components,
            )
            run.write(state)

        yield write
        process.kill()


def test_the_running_stacks_routers_are_asked_and_its_workers_named(
    start: Callable[[], FakeRouter], stack: Callable[[dict[str, ComponentState]], None], explain: Explain
) -> None:
    routers = [start(), start()]
    routers[1].place("abc", "prefill", 1.0)
    components = {
        name: ComponentState(worker=name.partition("-")[0], instance=str(worker), ports={"system_port": free_port()})
        for name, worker in _WORKERS.items()
    }
    stack({"frontend": ComponentState(), **components})
    said = explain("abc")
    assert said.error == "serving-stack: the running stack (profile cpu-router) has no router\n"
    for number, router in enumerate(routers):
        ports = {"system_port": router.server.server_address[1]}
        components[f"router-{number}"] = ComponentState(worker="router", ports=ports, instance=str(number))
    stack({"frontend": ComponentState(), **components})
    said = explain("cmpl-abc")
    assert (said.status, said.error) == (0, "")
    assert f"carried by replica 20 at {routers[1].url}" in said.out
    assert {"prefill-0 a0", "prefill-1 a1", "prefill-2 a2"} <= set(re.findall(r"prefill-\d a\d", said.out))


def test_without_a_stack_and_a_router_there_is_nobody_to_ask(explain: Explain) -> None:
    said = explain("abc")
    assert (said.status, said.error) == (1, "serving-stack: no stack is running and no --router is given\n")
