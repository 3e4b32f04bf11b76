# SPDX-License-Identifier: Apache-2.0
"""From `serving-stack up` on installed engines to the first answer through prefill, NIXL and decode; where it goes."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from serving_stack.state import free_ports
from support.bench import Bench
from support.stack import Stack


def _phases(stack: Stack) -> dict[str, float]:
    """Return seconds of each phase of the slower worker, from its processes' birth times, and the CPU time of all."""
    state = stack.state
    members = stack.run.members(state)
    found: dict[str, float] = {}
    slowest = max(
        (one for one in state.components.values() if one.worker is not None), key=lambda one: one.ready_after or 0
    )
    assert slowest.pid is not None
    assert slowest.ready_after is not None
    mine = [process for process in members if os.getpgid(process.pid) == slowest.pid]
    births = {_role(process): process.create_time() for process in mine}
    main, core, worker = births["main"], births["EngineCore"], births["Worker"]
    found["slower worker: main process, imports and configuration"] = core - main
    found["slower worker: engine core, imports"] = worker - core
    found["slower worker: worker, imports, weights, cache, NIXL; registration"] = main + slowest.ready_after - worker
    found["processor time of every process"] = sum(sum(process.cpu_times()[:2]) for process in members)
    return found


def _role(process: psutil.Process) -> str:
    title = " ".join(process.cmdline())
    return next((role for role in ("EngineCore", "Worker", "resource_tracker") if role in title), "main")


def run(bench: Bench) -> None:
    """Start and stop the stack a few times, each in a home of its own."""
    samples: dict[str, list[float]] = {}
    for _ in range(1 if bench.quick else 3):
        with tempfile.TemporaryDirectory() as folder:
            stack = Stack(Path(folder), free_ports(1, above=23000)[0])
            begun = time.monotonic()
            stack.up()
            total = time.monotonic() - begun
            taken: dict[str, Any] = {"up, from nothing to the first answer": total}
            try:
                taken |= {
                    f"{name} ready": one.ready_after for name, one in sorted(stack.state.components.items())
                } | _phases(stack)
            finally:
                stack.command("down")
            for name, seconds in taken.items():
                samples.setdefault(name, []).append(seconds)
    for name, values in samples.items():
        bench.row(name, "s", ours=values, aim="<= 60" if name.startswith("up,") else None)
    bench.note("The phases of one worker overlap with those of the other: both start at once and share the cores.")
