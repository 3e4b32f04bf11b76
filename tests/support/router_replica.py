# SPDX-License-Identifier: Apache-2.0
"""A replica of the router without workers: real discovery and streams, and a placer that is told what to do.

    python -m support.router_replica --component routed.router

Each line on stdin is a JSON object, each answer a line on stdout:

* `{"do": "place", "name": NAME, "role": ROLE, "session": SESSION, "tokens": N}` → `{"worker": ID, "seconds": S}`
* `{"do": "finished", "name": NAME}`, also `prefilled` → `{}`
* `{"do": "state"}` → the router's state, with `booked` ([id, role, worker] of each) and `bound` ({session: worker})

The fleet is made up: two prefill workers, two decoders, between which moving a session costs a lot.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from queue import Queue
from types import TracebackType
from typing import Any

import msgspec

from dynamo_kv_router_ext import Placer, Request, TierCost, Worker, load_profile
from dynamo_kv_router_ext._records import Records
from dynamo_kv_router_ext._replicas import join
from dynamo_kv_router_ext._router import Router
from dynamo_kv_router_ext._types import ROLES

__all__ = ["RouterReplica"]


class RouterReplica:
    """The other side of such a process; a context manager."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "support.router_replica", "--component", "routed.router"]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment, "PYTHONPATH": str(Path(__file__).parents[1])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.pid = self._process.pid
        self._lines: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._replica: int | None = None

    @property
    def replica(self) -> int:
        """Its name among the replicas; it waits until the process is there."""
        if self._replica is None:
            self._replica = self.answer()["replica"]
        return self._replica

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # Dynamo's log goes there as well
                self._lines.put(line)
        self._lines.put("")

    def ask(self, do: str, **more: Any) -> Any:
        """Have it do something, and return its answer."""
        self.send(do, **more)
        return self.answer()

    def send(self, do: str, **more: Any) -> None:
        """Have it do something, whose `answer` is to be read later."""
        assert self.replica
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Return the next answer. EOFError if it has ended."""
        line = self._lines.get(timeout=60.0)
        if not line:
            raise EOFError(f"replica {self.pid} has ended, with status {self._process.wait(10.0)}")
        return json.loads(line)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def __enter__(self) -> RouterReplica:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()


def _serve(router: Router, told: dict[str, Any]) -> dict[str, Any]:
    """Do what needs no waiting."""
    placer = router.placer
    if told["do"] == "state":
        booked = [
            [id, role, one.worker]
            for id, role in itertools.product(placer.requests(), ROLES)
            if (one := placer.booking(id, role)) is not None
        ]
        bound = {session: seat.worker for session, seat, _, _ in placer.sessions.bindings(10_000, router.now())}
        return {**router.state(), "booked": sorted(booked), "bound": bound}
    getattr(router, told["do"])(router.key(told["name"]))
    return {}


async def _run(component: str) -> None:
    from dynamo.runtime import DistributedRuntime

    runtime = DistributedRuntime(asyncio.get_running_loop(), os.environ["DYN_DISCOVERY_BACKEND"], "tcp")
    profile = load_profile("gb200-qwen3-32b-tp1")
    router = Router(Placer(msgspec.structs.replace(profile, transfer=TierCost(latency_s=1.0, token_s=1e-6))), Records())
    await join(runtime, component, router)
    for id in (1, 2):
        router.add_worker(Worker(id, "prefill"))
        router.add_worker(Worker(2**63 + id, "decode"))

    async def tick() -> None:
        while True:
            router.tick()
            await asyncio.sleep(0.5)

    ticking = asyncio.create_task(tick())
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print(json.dumps({"replica": router.replica}), flush=True)
    while line := await lines.readline():
        told = json.loads(line)
        if told["do"] == "place":
            request = Request(router.key(told["name"]), told.get("tokens", 1000), session=told.get("session"))
            began = time.perf_counter()
            decision = await router.place(request, told["role"])
            answer = {"worker": decision.worker, "seconds": time.perf_counter() - began}
        else:
            answer = _serve(router, told)
        print(json.dumps(answer), flush=True)
    ticking.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--component", required=True)
    asyncio.run(_run(parser.parse_args().component))
