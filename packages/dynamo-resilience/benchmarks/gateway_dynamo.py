# SPDX-License-Identifier: Apache-2.0
"""Dynamo's own frontends and workers: what clients see of a broken worker, with the gateway before them and without."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from gateway_parts import body, replicas, until

from support import dynamo
from support.bench import Bench
from support.http_load import Sample, client, open_loop
from support.processes import Process, free_ports

__all__ = ["broken_workers"]

#: Requests a second each way, of which each takes a worker a few tens of milliseconds.
_RATE = 25.0
_DIRECT = ("--router-mode", "direct")
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def _python() -> str | None:
    """Return an interpreter that has Dynamo."""
    if importlib.util.find_spec("dynamo") is not None:
        return sys.executable
    stack = Path(".nox/stack/bin/python").absolute()
    return str(stack) if stack.exists() else None


def broken_workers(bench: Bench) -> None:
    """Run both faults, and record their rows."""
    python = _python()
    if python is None:
        bench.note("dynamo: not run, no interpreter here has ai-dynamo (nox -s bench makes one)")
        return
    seconds = 8.0 if bench.quick else 30.0
    with tempfile.TemporaryDirectory(prefix="dynamo-bench-") as folder:
        home = Path(folder)
        code = "import pathlib, sys; from support.saying_worker import write_model\n"
        code += "write_model(pathlib.Path(sys.argv[1]), sys.argv[2])"
        subprocess.run([python, "-c", code, str(home / "model"), _TEMPLATE], check=True)
        _killed(bench, python, home, seconds)
        if not bench.quick:
            _raising(bench, python, home, seconds)


def _killed(bench: Bench, python: str, home: Path, seconds: float) -> None:
    command = [python, "-m", "dynamo.mocker", "--model-path", str(home / "model"), "--model-name", "m"]
    command += ["--block-size", "16", "--num-workers", "1"]
    with _fleet(python, home / "kill", [command, command]) as (frontends, workers, chosen):
        found = asyncio.run(_both(frontends, chosen, seconds, lambda: workers[0].send_signal(signal.SIGKILL)))
    _row(bench, "one of two mockers killed", *found)


def _raising(bench: Bench, python: str, home: Path, seconds: float) -> None:
    commands = []
    for number in range(3):
        folder = home / f"worker-{number}"
        folder.mkdir()
        said: dict[str, Any] = {"answers": ["a few words of an answer"], "chunk": 1, "pause": 0.05}
        if number == 0:
            said["error"] = "the engine failed"
        (folder / "say.json").write_text(json.dumps(said), "utf-8")
        model = json.dumps({"name": "m", "folder": str(home / "model")})
        commands.append([python, "-m", "support.saying_worker", "--folder", str(folder), "--model", model])
    with _fleet(python, home / "raise", commands, "--router-mode", "least-loaded") as (frontends, _, chosen):
        found = asyncio.run(_both(frontends, chosen, seconds, lambda: None))
    _row(bench, "one of three workers raising", *found)


@contextlib.contextmanager
def _fleet(
    python: str, home: Path, workers: Sequence[Sequence[str]], *mode: str
) -> Iterator[tuple[list[str], list[Process], list[str]]]:
    """Run workers, two frontends that route as Dynamo does, and two that send a request where they are told.

    Yields the first two's URLs, the workers, and the other two's URLs.
    """
    home.mkdir()
    env = dynamo.environment(home / "kv")
    with contextlib.ExitStack() as running:
        urls = []
        for port, options in zip(free_ports(4), (mode, mode, _DIRECT, _DIRECT), strict=True):
            command = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
            running.enter_context(Process([*command, *options], name="frontend", env=env))
            urls.append(f"http://127.0.0.1:{port}")
        started = [running.enter_context(Process(command, name="worker", env=env)) for command in workers]
        until(lambda: all(_serves(url, len(workers)) for url in urls), 60, "frontends that know their workers")
        yield urls[:2], started, urls[2:]


def _serves(url: str, workers: int) -> bool:
    try:
        listed = httpx.get(f"{url}/v1/models", timeout=2, trust_env=False).json()["data"]
        health = httpx.get(f"{url}/health", timeout=2, trust_env=False).json()
    except (httpx.HTTPError, ValueError):
        return False
    return bool(listed) and sum(one["endpoint"] == "generate" for one in health["instances"]) == workers


async def _both(
    frontends: Sequence[str], chosen: Sequence[str], seconds: float, fault: Any
) -> tuple[list[Sample], list[Sample]]:
    """Send the same load to the frontends themselves and through a gateway, at the same time, over a fault."""
    site = {"frontends": list(chosen), "route": "worker", "models": {"m": {}}}
    config = {"sites": {"one": site}}
    with replicas(1, config) as (gateway,):
        async with client(30) as session:

            async def break_it() -> None:
                await asyncio.sleep(seconds / 4)
                fault()

            paths = [f"{url}/v1/chat/completions" for url in frontends]
            direct, through, _ = await asyncio.gather(
                open_loop(session, paths, body(), who="direct", rate=_RATE, seconds=seconds, seed=1),
                open_loop(session, [gateway.chat], body(), who="gateway", rate=_RATE, seconds=seconds, seed=1),
                break_it(),
            )
    return direct, through


def _row(bench: Bench, what: str, direct: Sequence[Sample], through: Sequence[Sample]) -> None:
    ours, theirs = (100 * sum(not one.sound for one in found) / len(found) for found in (through, direct))
    if theirs:
        bench.row(
            f"dynamo, {what}: failed requests, through the gateway",
            "%",
            ours=[ours],
            reference=[theirs],
            reference_name="Dynamo's frontends alone",
            aim="<= 0.1",
        )
    else:
        bench.row(f"dynamo, {what}: failed requests, through the gateway", "%", ours=[ours])
    bench.note(f"dynamo, {what}: {len(direct)} requests each way at the same time, to two frontends")
