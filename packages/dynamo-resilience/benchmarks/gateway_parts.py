# SPDX-License-Identifier: Apache-2.0
"""The processes of the gateway's bench: replicas, fake frontends, a store; pinned to cores, measured from /proc."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from support.bench import Unavailable
from support.fake_frontend import Control
from support.processes import Process, free_port, free_ports
from support.store_server import StoreServer, store_program

__all__ = [
    "BODY",
    "CORES",
    "Fake",
    "Replica",
    "body",
    "cpu_seconds",
    "fake",
    "key",
    "paused",
    "percentile",
    "pinned",
    "replicas",
    "rss_mib",
    "store",
    "store_binary",
    "store_name",
    "tenants",
    "until",
]

_CORES = sorted(os.sched_getaffinity(0))
#: The core of what is measured, and that of the load and the fake frontend. The same one twice where there is only one.
CORES = (_CORES[0], _CORES[1 % len(_CORES)])

#: A request, plain and streamed.
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 16}


def body(*, stream: bool = False) -> bytes:
    """Return the request's bytes."""
    return json.dumps({**BODY, "stream": True} if stream else BODY).encode()


def pinned(core: int, command: Sequence[str]) -> list[str]:
    """Return the command that runs this one on one core, with all its threads."""
    return ["taskset", "-c", str(core), *command]


def store_binary() -> str:
    """Return redis-server where it is on PATH, else what `support.store_server` finds; else raise Unavailable."""
    found = shutil.which("redis-server")
    if found is not None:
        return found
    try:
        return store_program()
    except FileNotFoundError as error:
        raise Unavailable(f"{error}, or apt-get install redis-server") from error


def store_name() -> str:
    """Return which server that is, with its version."""
    said = subprocess.run([store_binary(), "--version"], capture_output=True, text=True, check=True).stdout.split()
    version = next((word[2:] for word in said if word.startswith("v=")), "?")
    return f"{Path(store_binary()).name} {version}"


def store(**options: Any) -> StoreServer:
    """Return a real server, not started, with nothing written to disk."""
    return StoreServer(program=store_binary(), **options)


class Fake:
    """A running fake frontend."""

    def __init__(self, process: Process, port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.control = Control(self.url)


@contextlib.contextmanager
def fake(*, core: int | None = None, **options: Any) -> Iterator[Fake]:
    """Run a fake frontend; `options` are those of its command line."""
    port = free_port()
    command = [sys.executable, "-m", "support.fake_frontend", "--port", str(port)]
    for name, value in options.items():
        command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    if core is not None:
        command = pinned(core, command)
    with Process(command, name="fake-frontend", ready=f"http://127.0.0.1:{port}/v1/models") as process:
        one = Fake(process, port)
        try:
            yield one
        finally:
            one.control.close()


class Replica:
    """A gateway process."""

    def __init__(
        self,
        name: str,
        folder: Path,
        config: Mapping[str, Any],
        *,
        core: int | None,
        watched: bool,
        env: Mapping[str, str | None],
    ) -> None:
        self.name = name
        self._env = env
        listen, admin = free_ports(2)
        self.url = f"http://127.0.0.1:{listen}"
        self.admin = f"http://127.0.0.1:{admin}"
        #: The breakers' transitions it has seen, where it is watched.
        self.events = folder / f"{name}.events"
        self._config = folder / f"{name}.yaml"
        addresses = {"listen": f"127.0.0.1:{listen}", "admin": f"127.0.0.1:{admin}"}
        self._config.write_text(json.dumps({**config, **addresses}), "utf-8")  # JSON is YAML
        options = ["--config", str(self._config), "--replica", name]
        if watched:
            watcher = Path(__file__).with_name("gateway_watched.py")
            self._command = [sys.executable, str(watcher), *options, "--events", str(self.events)]
        else:
            self._command = [sys.executable, "-m", "dynamo_resilience.cli", *options, "--log-level", "warning"]
        if core is not None:
            self._command = pinned(core, self._command)
        self.process = self._process()

    def _process(self) -> Process:
        return Process(self._command, name=self.name, ready=f"{self.admin}/readyz", env=self._env)

    @property
    def chat(self) -> str:
        """Where to POST."""
        return f"{self.url}/v1/chat/completions"

    def state(self) -> dict[str, Any]:
        """Read `/state`."""
        state: dict[str, Any] = httpx.get(f"{self.admin}/state", timeout=10, trust_env=False).json()
        return state

    def restart(self) -> None:
        """Start it again after it was killed; to the store it is another replica."""
        self.process.stop()
        self.process = self._process()
        self.process.start()


@contextlib.contextmanager
def replicas(
    count: int,
    config: Mapping[str, Any],
    *,
    core: int | None = None,
    watched: bool = False,
    env: Callable[[int], Mapping[str, str | None]] = lambda _: {},
) -> Iterator[list[Replica]]:
    """Run so many gateways of one configuration, each with its own addresses and the name `gw0`, `gw1`, ...

    Args:
        core: the core that all of them run on.
        watched: whether they note transitions of breakers, see `gateway_watched`.
        env: variables for the n-th.
    """
    with tempfile.TemporaryDirectory(prefix="gateway-bench-") as folder, contextlib.ExitStack() as running:
        found = [Replica(f"gw{n}", Path(folder), config, core=core, watched=watched, env=env(n)) for n in range(count)]
        for one in found:
            running.callback(_stop, one)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda one: one.process.start(), found))
        yield found


def _stop(replica: Replica) -> None:
    with contextlib.suppress(ValueError):  # it was never started
        replica.process.send_signal(signal.SIGCONT)
        replica.process.stop()


@contextlib.contextmanager
def paused(pids: Sequence[int]) -> Iterator[None]:
    """Stop these processes, and let them go on afterwards."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the CPU time of these processes so far, from the scheduler's nanoseconds."""
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that ended meanwhile
                total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def rss_mib(pid: int) -> float:
    """Return a process's resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def key(tenant: str) -> str:
    """Return a tenant's API key."""
    return f"key-of-{tenant}"


def tenants(weights: Mapping[str, float]) -> dict[str, Any]:
    """Return the section `tenants` for these names and weights."""
    return {
        name: {"keys_sha256": [hashlib.sha256(key(name).encode()).hexdigest()], "weight": weight}
        for name, weight in weights.items()
    }


def until(condition: Callable[[], Any], seconds: float, what: str) -> None:
    """Wait until a condition holds; raise RuntimeError after so long, naming what was awaited."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {seconds:g} s: {what}")
        time.sleep(0.01)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that so large a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]
