# SPDX-License-Identifier: Apache-2.0
"""The gateway, as its command starts it, before Dynamo's real frontend and mock engines."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import yaml

from support import dynamo
from support.processes import Process, free_port, free_ports
from support.saying_worker import write_model
from support.stack import until

pytestmark = pytest.mark.mocker

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "tiny", "prompt": "hi", "max_tokens": 6},
    "/v1/responses": {"model": "tiny", "input": "hi", "max_output_tokens": 6},
    "/v1/messages": CHAT,
}


@dataclass
class Fleet:
    """One frontend, mock workers, and two gateways: the frontend picks the worker, or the gateway does."""

    frontend: httpx.Client
    gateways: dict[str, httpx.Client]
    workers: list[Process]
    start_worker: Callable[[], Process]

    def instances(self) -> set[int]:
        listed = self.frontend.get("/health").json()["instances"]
        return {one["instance_id"] for one in listed if one["endpoint"] == "generate"}

    def running(self) -> float:
        found = re.findall(
            r"^dynamo_frontend_inflight_requests\{[^}]*\} (\S+)$", self.frontend.get("/metrics").text, re.M
        )
        return sum(map(float, found))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    model = write_model(folder / "model", "{% for one in messages %}{{ one.content }}\n{% endfor %}")
    environment = dynamo.environment(folder / "discovery")
    port = free_port()
    mocker = [sys.executable, "-m", "dynamo.mocker", "--model-path", str(model), "--model-name", "tiny"]
    frontend = [sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    with ExitStack() as stack:

        def start_worker() -> Process:
            return stack.enter_context(Process([*mocker, "--block-size", "16"], env=environment))

        def client(at: int) -> httpx.Client:
            return stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{at}", timeout=60, trust_env=False))

        workers = [start_worker(), start_worker()]
        stack.enter_context(
            Process(
                [*frontend, "--router-mode", "kv", "--enable-anthropic-api"],
                env=environment,
                ready=f"http://127.0.0.1:{port}/v1/models",
                deadline_s=120,
            )
        )
        fleet = Fleet(client(port), {}, workers, start_worker)
        until(lambda: len(fleet.instances()) == 2, 60, "both workers are there")
        until(lambda: fleet.frontend.post("/v1/chat/completions", json=CHAT).status_code == 200, 60, "it answers")
        for route in ("frontend", "worker"):
            listen, admin = free_ports(2)
            settings = {
                "listen": f"127.0.0.1:{listen}",
                "admin": f"127.0.0.1:{admin}",
                "sites": {
                    "here": {
                        "frontends": [f"http://127.0.0.1:{port}"],
                        "route": route,
                        "models": {"tiny": {"capacity": {"sequences": 64}}},
                    }
                },
            }
            file = folder / f"{route}.yaml"
            file.write_text(yaml.safe_dump(settings), "utf-8")
            command = [sys.executable, "-m", "dynamo_resilience.cli", "--config", str(file)]
            stack.enter_context(Process(command, ready=f"http://127.0.0.1:{admin}/readyz", deadline_s=60))
            fleet.gateways[route] = client(listen)
        yield fleet


def _form(value: Any) -> Any:
    """Return what kind of JSON it is, without what differs from one answer to the next."""
    if isinstance(value, dict):
        return {key: _form(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_form(one) for one in value]
    return type(value).__name__


def _leaves(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _leaves(one, f"{path}.{key}")
    elif isinstance(value, list):
        for one in value:
            yield from _leaves(one, f"{path}[]")
    else:
        yield f"{path} {type(value).__name__}"


def _events(text: str) -> set[str]:
    """Return what a stream's events hold, each field by its place and type: which token comes last is chance."""
    found: set[str] = set()
    for event in text.strip().split("\n\n"):
        *name, data = event.split("\n")
        data = data.removeprefix("data: ")
        found.update([data] if data == "[DONE]" else _leaves(json.loads(data), "".join(name)))
    return found


@pytest.mark.parametrize("route", ["frontend", "worker"])
@pytest.mark.parametrize("path", BODIES)
def test_answers_have_the_form_of_a_direct_call(fleet: Fleet, path: str, route: str) -> None:
    gateway = fleet.gateways[route]
    direct, through = (client.post(path, json=BODIES[path]) for client in (fleet.frontend, gateway))
    assert direct.status_code == through.status_code == 200
    assert _form(through.json()) == _form(direct.json())
    assert through.headers["content-type"] == direct.headers["content-type"]
    body = {**BODIES[path], "stream": True}
    direct, through = (client.post(path, json=body) for client in (fleet.frontend, gateway))
    assert through.headers["content-type"] == direct.headers["content-type"] == "text/event-stream"
    assert _events(through.text) == _events(direct.text)
    assert through.text.endswith("data: [DONE]\n\n")


def test_refusals_of_the_frontend_pass_byte_for_byte(fleet: Fleet) -> None:
    for path, body in (
        ("/v1/chat/completions", {"model": "tiny", "messages": "no list"}),
        ("/v1/messages", {"model": "tiny", "messages": "no list", "max_tokens": 3}),
        ("/v1/embeddings", {"model": "tiny", "input": "hi"}),
    ):
        direct, through = (client.post(path, json=body) for client in (fleet.frontend, fleet.gateways["frontend"]))
        assert (through.status_code, through.content) == (direct.status_code, direct.content)
        assert through.status_code in (400, 404)


def test_models_are_listed_as_the_frontend_lists_them(fleet: Fleet) -> None:
    direct, through = (client.get("/v1/models").json() for client in (fleet.frontend, fleet.gateways["frontend"]))
    assert [{**one, "created": 0} for one in through["data"]] == [{**one, "created": 0} for one in direct["data"]]


def test_tokens_arrive_while_the_request_runs(fleet: Fleet) -> None:
    body = {**CHAT, "stream": True, "max_tokens": 200, "ignore_eos": True}
    with fleet.gateways["frontend"].stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        assert fleet.running() == 1
        assert list(lines)[-2] == "data: [DONE]"


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_frees_the_worker(fleet: Fleet, stream: bool) -> None:
    body = {**CHAT, "stream": stream, "max_tokens": 20_000, "ignore_eos": True}
    with httpx.Client(base_url=fleet.gateways["frontend"].base_url, timeout=60, trust_env=False) as client:
        if stream:
            with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = answer.iter_lines()  # which, when nobody keeps it, closes the connection
                next(lines)
                until(lambda: fleet.running() == 1, 10, "the request runs")
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=body, timeout=1)
    until(lambda: fleet.running() == 0, 10, "the request is cancelled at the frontend")


@pytest.mark.parametrize("route", ["frontend", "worker"])
def test_killed_worker_loses_no_plain_request(fleet: Fleet, route: str) -> None:
    until(lambda: len(fleet.instances()) == 2, 60, "both workers are there")
    gateway = fleet.gateways[route]
    done = threading.Event()

    def load() -> list[tuple[int, str]]:
        answers = []
        while not done.is_set():
            answer = gateway.post("/v1/chat/completions", json=CHAT)
            answers.append((answer.status_code, answer.text))
        return answers

    with ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(load) for _ in range(4)]
        try:
            done.wait(1)
            victim = fleet.workers.pop()
            os.killpg(victim.pid, signal.SIGKILL)
            done.wait(2.5)
        finally:
            done.set()
    answers = [answer for one in loads for answer in one.result()]
    fleet.workers.append(fleet.start_worker())
    assert len(answers) > 40
    assert [answer for answer in answers if answer[0] != 200] == []


def test_stream_on_a_killed_worker_ends_with_its_error(fleet: Fleet) -> None:
    until(lambda: len(fleet.instances()) == 2, 60, "both workers are there")
    body = {**CHAT, "stream": True, "max_tokens": 20_000, "ignore_eos": True}
    with fleet.gateways["frontend"].stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        for worker in fleet.workers:
            os.killpg(worker.pid, signal.SIGKILL)
        rest = [line for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == 503
