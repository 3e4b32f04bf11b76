# SPDX-License-Identifier: Apache-2.0
"""The gateway as a process: what it answers, reload, drain, exit status, and that keys stay secret.

The frontend behind it is fake; test_proxy_dynamo.py has the real one.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml
from prometheus_client.parser import text_string_to_metric_families

from dynamo_resilience import __version__
from dynamo_resilience._config import Config, parse_address
from dynamo_resilience.cli import main
from dynamo_resilience.gateway import Gateway
from support.fake_frontend import Control
from support.processes import Process, free_port
from support.store_server import StoreServer

TESTS = Path(__file__).parents[3] / "tests"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


#: Closed when the module's tests are over.
CLIENTS: list[httpx.Client] = []


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    while CLIENTS:
        CLIENTS.pop().close()


class Running:
    """A gateway process, its file, and clients of its two listeners."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.file = folder / "gateway.yaml"
        self.listen, self.admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self.settings = {"listen": self.listen, "admin": self.admin, **settings}
        self.write(self.settings)
        self.api = httpx.Client(base_url=f"http://{self.listen}", trust_env=False, timeout=30)
        self.ops = httpx.Client(base_url=f"http://{self.admin}", trust_env=False, timeout=30)
        CLIENTS.extend((self.api, self.ops))

    def process(self, *options: str, ready: str = "/readyz", env: dict[str, str | None] | None = None) -> Process:
        command = [sys.executable, "-m", "dynamo_resilience.cli", "--config", str(self.file), *options]
        return Process(command, name="gateway", ready=f"http://{self.admin}{ready}", env=env)

    def write(self, settings: dict[str, Any]) -> None:
        """Put another file in its place, as editors and deployments do."""
        other = self.file.with_suffix(".new")
        other.write_text(yaml.safe_dump(settings), "utf-8")
        other.replace(self.file)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.ops.get("/state").json()
        return state

    def metrics(self) -> dict[str, float]:
        """Return each metric's value, by its name and labels as Prometheus writes them."""
        answer = self.ops.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        return {
            named(sample.name, **sample.labels): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics()[named(f"dynamo_gateway_{name}", **labels)]


def named(name: str, **labels: str) -> str:
    return name + "".join(f" {key}={value}" for key, value in sorted(labels.items()))


def frontend(port: int, *options: str) -> Process:
    command = [sys.executable, "-m", "support.fake_frontend", "--port", str(port), "--model", "m", *options]
    return Process(command, name="frontend", ready=f"http://127.0.0.1:{port}/health", env={"PYTHONPATH": str(TESTS)})


def site(*ports: int, **models: Any) -> dict[str, Any]:
    return {"frontends": [f"http://127.0.0.1:{port}" for port in ports], "models": models or {"m": {}}}


def until(true: Callable[[], object], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


class Stream:
    """A stream that is read in a thread: its pieces so far, and how it ended."""

    def __init__(self, client: httpx.Client) -> None:
        self.text = ""
        self.fault: Exception | None = None
        self._client = client
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        until(lambda: self.text)

    def _read(self) -> None:
        try:
            with self._client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
                for piece in answer.iter_text():
                    self.text += piece
        except httpx.HTTPError as error:
            self.fault = error

    def end(self) -> str:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.text


@pytest.fixture(scope="module")
def backend() -> Iterator[int]:
    port = free_port()
    with frontend(port):
        yield port


@pytest.fixture(scope="module")
def other() -> Iterator[int]:
    port = free_port()
    with frontend(port):
        yield port


@pytest.fixture(scope="module")
def slow() -> Iterator[int]:
    """A frontend whose streams take as many twentieths of a second as they have tokens."""
    port = free_port()
    with frontend(port, "--tokens", "20", "--pace", "0.05"):
        yield port


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, backend: int) -> Iterator[Running]:
    """A gateway that tests only ask."""
    settings = {"sites": {"home": site(backend, m={"capacity": {"sequences": 64}}, absent={})}}
    running = Running(tmp_path_factory.mktemp("shared"), settings)
    with running.process("--replica", "one"):
        yield running


def test_an_answer_is_the_backends_own(shared: Running, backend: int) -> None:
    through = shared.api.post("/v1/chat/completions", json=CHAT)
    direct = httpx.post(f"http://127.0.0.1:{backend}/v1/chat/completions", json=CHAT, trust_env=False)
    assert (through.status_code, through.content) == (200, direct.content)
    assert [one["id"] for one in shared.api.get("/v1/models").json()["data"]] == ["m"]


def test_state_says_what_it_serves_and_with_what(shared: Running) -> None:
    state = shared.state()
    assert state["replica"].startswith("one.")
    assert state["ready"] is True
    assert state["config"] == {"file": str(shared.file), "loaded": state["config"]["loaded"], "refused": None}
    assert state["store"]["url"] == "memory:"
    (seen,) = state["sites"]["home"]["frontends"]
    assert seen["models"] == ["m"]
    assert json.dumps(state["pools"]).count("serverless")


def test_metrics_count_what_was_served(shared: Running) -> None:
    before = shared.metrics()
    for _ in range(3):
        shared.api.post("/v1/chat/completions", json=CHAT)
    shared.api.post("/v1/chat/completions", json={**CHAT, "model": "nobody's"})
    shared.api.post("/v1/chat/completions", json={**CHAT, "stream": True})
    after = shared.metrics()

    def grown(name: str, **labels: str) -> float:
        key = named(f"dynamo_gateway_{name}", **labels)
        return after[key] - before.get(key, 0)

    pool = {"site": "home", "model": "m"}
    assert grown("requests_total", **pool, status="2xx") == 4
    assert grown("requests_total", site="", model="", status="4xx") == 1
    assert grown("request_seconds_count", **pool) == 4
    assert grown("request_seconds_bucket", **pool, le="+Inf") == 4
    assert grown("first_piece_seconds_count", **pool) == 4
    assert grown("attempts_total", **pool, outcome="ok") == 4
    assert grown("admitted_total", **pool, account="serverless", tenant="default") == 4
    assert after[named("dynamo_gateway_capacity", **pool, unit="sequences")] == 64
    account = {**pool, "account": "serverless"}
    assert after[named("dynamo_gateway_pool_blocks", **account)] >= 1
    assert after[named("dynamo_gateway_pool_running", **account)] == 0
    assert after[named("dynamo_gateway_pool_waiting", **account)] == 0
    assert after["dynamo_gateway_ready"] == 1
    assert after[f"dynamo_gateway_info version={__version__}"] == 1
    assert not [key for key in after if "nobody's" in key]


def test_the_admin_address_has_four_pages(shared: Running) -> None:
    assert shared.ops.get("/healthz").text == "ok\n"
    assert shared.ops.get("/readyz").text == "ready\n"
    assert shared.ops.get("/v1/models").status_code == 404
    refused = shared.ops.post("/state")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
    assert shared.api.get("/state").status_code == 404  # not for clients


def test_it_is_ready_once_a_frontend_has_answered(tmp_path: Path) -> None:
    port = free_port()
    running = Running(tmp_path, {"sites": {"home": site(port)}})
    with running.process(ready="/healthz"):
        refused = running.ops.get("/readyz")
        assert (refused.status_code, refused.text) == (503, "no frontend has answered\n")
        with frontend(port):
            until(lambda: running.ops.get("/readyz").status_code == 200)
            assert running.api.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_a_reload_drops_no_stream_and_a_bad_file_changes_nothing(tmp_path: Path, slow: int, other: int) -> None:
    running = Running(tmp_path, {"sites": {"home": site(slow)}})
    counts = Control(f"http://127.0.0.1:{other}")
    Control(f"http://127.0.0.1:{slow}").set(tokens=60)  # 3 s
    with running.process() as process:
        stream = Stream(running.api)

        # Another site; what runs stays where it is, and does not hold the reload up.
        running.write({**running.settings, "sites": {"away": site(other)}})
        until(lambda: list(running.state()["sites"]) == ["away"])
        before = counts.counts()["requests"]
        assert running.api.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert counts.counts()["requests"] == before + 1

        # A bad file: refused, with file, key and value, and nothing else happens.
        running.write({**running.settings, "sites": {"away": {**site(other), "prefer": "first"}}})
        process.send_signal(signal.SIGHUP)  # sooner than the next look at the file
        until(lambda: running.state()["config"]["refused"])
        (fault,) = running.state()["config"]["refused"]["faults"]
        assert fault == f"{running.file}: sites.away.prefer: should be a valid integer (got 'first')"
        assert fault in process.log_text()
        assert running.metric("config_ok") == 0
        assert running.metric("config_reloads_total", result="refused") == 1
        assert running.ops.get("/readyz").status_code == 200
        assert running.api.post("/v1/chat/completions", json=CHAT).status_code == 200

        # What only a restart can change.
        running.write({**running.settings, "listen": "127.0.0.1:1", "store": {"prefix": "x:"}})
        process.send_signal(signal.SIGHUP)  # sooner than the next look at the file
        until(lambda: len(running.state()["config"]["refused"]["faults"]) == 2)
        faults = running.state()["config"]["refused"]["faults"]
        assert [fault.split(": ")[1] for fault in faults] == ["listen", "store.prefix"]
        assert "restart it" in faults[0]

        # Mended.
        running.write({**running.settings, "sites": {"again": site(other)}})
        process.send_signal(signal.SIGHUP)  # sooner than the next look at the file
        until(lambda: list(running.state()["sites"]) == ["again"])
        assert running.state()["config"]["refused"] is None
        assert running.metric("config_ok") == 1

        text = stream.end()
        assert stream.fault is None
        assert text.count("data: {") == 61
        assert text.endswith("data: [DONE]\n\n")


def test_a_file_behind_swapped_links_is_seen_and_sighup_always_reads(tmp_path: Path, backend: int, other: int) -> None:
    running = Running(tmp_path, {"sites": {"old": site(backend)}})
    # As Kubernetes mounts a ConfigMap: gateway.yaml -> ..data/gateway.yaml, ..data -> a folder per version.
    for version, port in (("old", backend), ("new", other)):
        (tmp_path / version).mkdir()
        settings = {**running.settings, "sites": {version: site(port)}}
        (tmp_path / version / "gateway.yaml").write_text(yaml.safe_dump(settings))
        os.utime(tmp_path / version / "gateway.yaml", (1, 1))
    (tmp_path / "..data").symlink_to("old")
    running.file.unlink()
    running.file.symlink_to("..data/gateway.yaml")
    with running.process() as process:
        assert list(running.state()["sites"]) == ["old"]
        (tmp_path / "..swap").symlink_to("new")
        (tmp_path / "..swap").replace(tmp_path / "..data")
        until(lambda: list(running.state()["sites"]) == ["new"])
        # The same size, time and inode: only the signal tells.
        running.file.write_text(running.file.read_text().replace("new:", "now:"))
        os.utime(running.file, (1, 1))
        process.send_signal(signal.SIGHUP)
        until(lambda: list(running.state()["sites"]) == ["now"])


def test_a_drain_refuses_what_is_new_and_ends_what_runs(tmp_path: Path, slow: int) -> None:
    Control(f"http://127.0.0.1:{slow}").set(tokens=40)
    home = site(slow, m={"capacity": {"sequences": 1}, "blocks": 1})
    running = Running(tmp_path, {"sites": {"home": home}, "timeouts": {"drain_s": 600}})
    idle, new = httpx.Client(trust_env=False), httpx.Client(trust_env=False)
    CLIENTS.extend((idle, new))
    with running.process() as process, socket.create_connection(parse_address(running.listen)) as silent:
        assert idle.get(f"http://{running.listen}/v1/models").status_code == 200
        stream = Stream(running.api)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(running.api.post, "/v1/chat/completions", json=CHAT)
            until(lambda: running.state()["open_requests"] == 2)
            process.send_signal(signal.SIGTERM)
            refused = waiting.result(20)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["connection"] == "close"
        until(lambda: running.ops.get("/readyz").status_code == 503)
        assert running.ops.get("/readyz").text == "draining\n"
        assert running.ops.get("/healthz").status_code == 200
        assert running.metric("draining") == 1
        for client in (idle, new):  # on the connection that it has, and on a new one
            with pytest.raises(httpx.TransportError):
                client.get(f"http://{running.listen}/v1/models")
        assert silent.recv(1) == b""
        assert running.state()["open_requests"] == 1
        assert stream.end().endswith("data: [DONE]\n\n")
        assert process.wait(20) == 0
    with pytest.raises(httpx.TransportError):
        running.ops.get("/healthz")


def test_a_second_signal_cuts_what_runs(tmp_path: Path, slow: int) -> None:
    Control(f"http://127.0.0.1:{slow}").set(tokens=2000)
    running = Running(tmp_path, {"sites": {"home": site(slow)}, "timeouts": {"drain_s": 600}})
    with running.process() as process, socket.create_connection(parse_address(running.listen)) as sending:
        stream = Stream(running.api)
        body = json.dumps(CHAT).encode()
        sending.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body))
        until(lambda: running.state()["open_requests"] == 2)
        process.send_signal(signal.SIGINT)
        until(lambda: running.ops.get("/readyz").status_code == 503)
        sending.sendall(body)  # a request that was on its way is still read, answered, and the last of its connection
        answer = b"".join(iter(lambda: sending.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGTERM)
        text = stream.end()
        assert process.wait(20) == 0
    assert "[DONE]" not in text
    assert json.loads(text.rstrip().rpartition("data: ")[2])["error"]["message"]


def test_what_does_not_end_within_the_drain_is_cut(tmp_path: Path, slow: int) -> None:
    control = Control(f"http://127.0.0.1:{slow}")
    running = Running(tmp_path, {"sites": {"home": site(slow)}, "timeouts": {"drain_s": 0.2}})
    with running.process() as process, socket.create_connection(parse_address(running.listen)) as deaf:
        # A client that reads nothing, so that its stream stands still once all buffers are full.
        control.set(tokens=100_000, pace=0)
        body = json.dumps({**CHAT, "stream": True}).encode()
        deaf.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        until(lambda: deaf.recv(1, socket.MSG_PEEK))
        time.sleep(0.5)
        control.set(tokens=2000, pace=0.05)
        stream = Stream(running.api)
        process.send_signal(signal.SIGTERM)
        assert "[DONE]" not in stream.end()
        assert process.wait(20) == 0
        assert "Traceback" not in process.log_text()


def test_tenants_need_their_key_and_nobody_is_shown_one(tmp_path: Path, backend: int) -> None:
    keys = {"search": "sk-search-1234567890", "agents": "sk-agents-0987654321"}
    hashes = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in keys.items()}
    home = {**site(backend, m={"capacity": {"sequences": 64}, "reserved": {"search": 0.5}}), "api_key_env": "SITE_KEY"}
    tenants = {name: {"keys_sha256": [digest]} for name, digest in hashes.items()}
    running = Running(tmp_path, {"sites": {"home": home}, "tenants": tenants})
    secrets = [*keys.values(), *hashes.values(), "sk-site-1111", "sk-wrong-2222"]
    with running.process("--log-level", "debug", env={"SITE_KEY": "sk-site-1111"}) as process:

        def status(**headers: str) -> int:
            return running.api.post("/v1/chat/completions", json=CHAT, headers=headers).status_code

        assert status() == 401
        assert status(authorization="Bearer sk-wrong-2222") == 401
        assert status(authorization=f"Bearer {hashes['search']}") == 401
        assert status(authorization=f"Bearer {keys['search']}") == 200
        assert status(**{"x-api-key": keys["agents"]}) == 200
        assert running.api.get("/v1/models").status_code == 401
        # One that cannot be read is told so, and nobody else is.
        with socket.create_connection(parse_address(running.listen)) as client:
            client.sendall(b"GET /v1/models HTTP/1.1\r\nauthorization: Bearer %b\x01\r\n\r\n" % keys["search"].encode())
            assert b" 400 " in client.recv(65536)
        state, metrics = running.ops.get("/state").text, running.ops.get("/metrics").text
        assert running.state()["tenants"] == ["agents", "search"]
        pool = {"site": "home", "model": "m"}
        assert running.metric("admitted_total", **pool, account="search", tenant="search") == 1
        assert running.metric("admitted_total", **pool, account="serverless", tenant="agents") == 1
        # A tenant that is taken out is refused from the reload on.
        running.write({**running.settings, "tenants": {"search": tenants["search"]}})
        until(lambda: running.state()["tenants"] == ["search"])
        assert status(authorization=f"Bearer {keys['agents']}") == 401
        assert status(authorization=f"Bearer {keys['search']}") == 200
        log = process.log_text()
    assert "Traceback" not in log
    for secret in secrets:
        assert secret not in state
        assert secret not in metrics
        assert secret not in log


def test_a_stopped_replica_gives_its_capacity_back(tmp_path: Path, slow: int) -> None:
    Control(f"http://127.0.0.1:{slow}").set(tokens=10)
    with StoreServer() as store, ExitStack() as stack:
        replicas = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            settings = {
                "sites": {"home": site(slow, m={"capacity": {"sequences": 2}, "blocks": 2})},
                "store": {"url": store.url},
                "lease": {"ttl_s": 600},  # no lease runs out in this test
                "timeouts": {"drain_s": 0.1},
            }
            running = Running(tmp_path / name, settings)
            replicas.append((running, stack.enter_context(running.process("--replica", name))))
        (first, process), (second, _) = replicas
        until(lambda: first.state()["store"]["up"] and second.state()["store"]["up"])
        with redis.Redis.from_url(store.url) as client:  # the store has been there for longer than a TTL
            client.hset("{dynamo-gateway}:epoch", "born_ms", 1)
        streams = [Stream(first.api), Stream(first.api)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        for stream in streams:
            stream.end()
        streams = [Stream(second.api), Stream(second.api)]
        assert all(stream.end().endswith("data: [DONE]\n\n") for stream in streams)


def test_a_bad_file_ends_with_2_and_all_its_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("listen: here\nsites: {home: {frontends: [], models: {m: {}}}}")
    for options in ([], ["--check"]):
        assert main(["--config", str(file), *options]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert [line.split(": ")[:2] for line in err.splitlines()] == [
            [str(file), "listen"],
            [str(file), "sites.home.frontends"],
        ]


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"sites": {"home": {**site(1), "api_key_env": "NOT_SET_HERE"}}}, "NOT_SET_HERE"),
        ({"store": {"url": "postgres://:word@host"}}, "store.url"),
    ],
)
def test_a_check_finds_what_a_start_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], fault: str
) -> None:
    running = Running(tmp_path, {"sites": {"home": site(1)}, **settings})
    assert main(["--config", str(running.file), "--check"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"{re.escape(str(running.file))}: .*{fault}.*\n", err)
    assert ":word" not in err


def test_an_address_in_use_ends_with_1(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = "{}:{}".format(*taken.getsockname())
        running = Running(tmp_path, {"sites": {"home": site(1)}})
        running.write({**running.settings, "listen": address})
        command = [sys.executable, "-m", "dynamo_resilience.cli", "--config", str(running.file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"dynamo-gateway: cannot listen on {address} (listen): ")


def test_the_command_names_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, status in ((["--version"], 0), ([], 2)):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == status
    assert capsys.readouterr().out == f"dynamo-gateway {__version__}\n"


def test_few_open_files_are_nobody_elses_fault(tmp_path: Path, slow: int) -> None:
    Control(f"http://127.0.0.1:{slow}").set(tokens=20, pace=0.05)
    settings = {"sites": {"home": site(slow, m={"capacity": {"sequences": 500}})}, "retries": {"attempts": 1}}
    running = Running(tmp_path, {**settings, "breaker": {"min_requests": 5, "window_s": 60}})
    script = f'ulimit -n 80; exec {sys.executable} -m dynamo_resilience.cli --config "{running.file}"'
    with Process(["bash", "-c", script], name="gateway", ready=f"http://{running.admin}/readyz") as process:
        assert running.ops.get("/readyz").status_code == 200  # on a connection that stays
        assert "open files" in process.log_text()

        def ask(_: int) -> int:
            try:
                return httpx.post(
                    f"http://{running.listen}/v1/chat/completions",
                    json={**CHAT, "stream": True},
                    trust_env=False,
                    timeout=30,
                ).status_code
            except httpx.TransportError:  # what it could not accept
                return 0

        with ThreadPoolExecutor(60) as pool:
            answers = set(pool.map(ask, range(60)))
        assert 200 in answers
        assert answers <= {200, 503, 0}
        assert [one for one in running.state()["breakers"] if one["state"] != "closed"] == []
        until(lambda: running.state()["open_requests"] == 0)
        assert ask(0) == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_two_hundred_reloads_leave_nothing_behind(tmp_path: Path, backend: int, other: int) -> None:
    file = tmp_path / "gateway.yaml"

    def write(number: int) -> None:
        names = {f"site{number}": site(backend, m={"capacity": {"sequences": 64 + number}}, n={}), "same": site(other)}
        tenants = {f"tenant{number}": {"keys_sha256": [hashlib.sha256(b"k").hexdigest()]}}
        addresses = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"}
        file.write_text(yaml.safe_dump({**addresses, "sites": names, "tenants": tenants}))

    def things() -> Counter[str]:
        gc.collect()
        return Counter(type(one).__name__ for one in gc.get_objects())

    async def main() -> None:
        write(0)
        gateway = Gateway(file)
        await gateway.start()
        try:
            url = "http://{}:{}/v1/chat/completions".format(*gateway.addresses["listen"])
            async with httpx.AsyncClient(trust_env=False, headers={"x-api-key": "k"}) as client:
                tasks, before = 0, Counter[str]()
                for number in range(1, 202):
                    write(number)
                    answer = asyncio.create_task(client.post(url, json=CHAT))
                    assert await gateway.reload()
                    assert (await answer).status_code == 200
                    if number == 1:
                        await asyncio.sleep(0.3)
                        tasks, before = len(asyncio.all_tasks()), things()
                await asyncio.sleep(0.3)
                after = things()
                assert len(asyncio.all_tasks()) <= tasks
                kinds = ("Runtime", "Fleet", "Frontend", "Pool", "Lease", "Task", "Event", "ClientSession")
                assert {kind: after[kind] for kind in kinds} == {kind: before[kind] for kind in kinds}
        finally:
            await gateway.stop()

    asyncio.run(main())


def test_it_can_be_embedded(backend: int) -> None:
    config = Config.model_validate(
        {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "sites": {"home": site(backend)}, "breaker": None}
    )

    async def main() -> None:
        gateway = Gateway(config, name="em bedded")
        assert gateway.replica.startswith("em-bedded.")
        await gateway.start()
        try:
            host, port = gateway.addresses["listen"]
            async with httpx.AsyncClient(base_url=f"http://{host}:{port}", trust_env=False) as client:
                assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        finally:
            await gateway.stop()

    asyncio.run(main())
