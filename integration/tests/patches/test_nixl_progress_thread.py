# SPDX-License-Identifier: Apache-2.0
"""`nixl_cu13/progress-thread-delay`, in the environment of the engines: real NIXL agents over UCX on a CPU.

The environment is only read. The module is imported from a copy, as published or as patched. What a spinning thread
does is seen without a clock: the kernel counts how often a thread gave up the processor by itself, and a thread that
polls with a time-out of 0 never does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serving_stack.patches import contents, load_all

USE = """
import importlib.abc, importlib.util, json, os, sys, time

class Overlay(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, sys.argv[1]) if name == "nixl_cu13._api" else None

sys.meta_path.insert(0, Overlay())
import nixl_cu13._api as module
assert module.__file__ == sys.argv[1]
import numpy

def threads():
    return set(os.listdir("/proc/self/task"))

def sleeps(thread):
    with open(f"/proc/self/task/{thread}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("voluntary_ctxt_switches"))

def ticks(thread):
    with open(f"/proc/self/task/{thread}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])

before = threads()
a, b = (module.nixl_agent(name, module.nixl_agent_config()) for name in ("a", "b"))
ours = threads() - before
time.sleep(0.5)
used = {thread: ticks(thread) for thread in ours}
slept = {thread: sleeps(thread) for thread in ours}
time.sleep(2)
used = {thread: ticks(thread) - count for thread, count in used.items()}
slept = {thread: sleeps(thread) - count for thread, count in slept.items()}
busiest = max(used, key=used.get)

source = numpy.arange(1 << 20, dtype=numpy.uint8)
target = numpy.zeros_like(source)
regions = []
for agent, array in ((a, target), (b, source)):
    region = [(array.ctypes.data, array.nbytes, 0, "")]
    agent.register_memory(region, "DRAM")
    regions.append([(array.ctypes.data, array.nbytes, 0)])
name = a.add_remote_agent(b.get_agent_metadata())
handle = a.initialize_xfer(
    "READ", a.get_xfer_descs(regions[0], "DRAM"), a.get_xfer_descs(regions[1], "DRAM"), name, b"done"
)
state = a.transfer(handle)
deadline = time.monotonic() + 60
while state == "PROC" and time.monotonic() < deadline:
    time.sleep(0.001)
    state = a.check_xfer_state(handle)
print(json.dumps({
    "ticks": used[busiest], "slept": slept[busiest], "state": state, "equal": bool((source == target).all()),
}))
os._exit(0)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the published and the patched agent do, with the variable set and without."""
    (patch,) = (patch for patch in load_all() if patch.name == "nixl_cu13/progress-thread-delay")
    module = contents(patch)["nixl_cu13/_api.py"]
    result = {}
    for name, content, delay in (
        ("published", module.before, "10000"),
        ("patched", module.after, "10000"),
        ("patched, unset", module.after, None),
    ):
        file: Path = tmp_path_factory.mktemp("nixl") / "_api.py"
        file.write_bytes(content)
        environment = {**os.environ, "UCX_TLS": "tcp,self"}
        environment.pop("NIXL_PROGRESS_THREAD_DELAY_US", None)
        if delay is not None:
            environment["NIXL_PROGRESS_THREAD_DELAY_US"] = delay
        done = subprocess.run(
            [sys.executable, "-c", USE, str(file)], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        result[name] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_published_progress_thread_never_sleeps(found: dict[str, Any]) -> None:
    """When this fails, upstream has been cured and the patch can go."""
    assert found["published"]["slept"] == 0
    assert found["published"]["ticks"] > 0


def test_patched_progress_thread_sleeps(found: dict[str, Any]) -> None:
    assert found["patched"]["slept"] > 0
    assert found["patched"]["ticks"] < found["published"]["ticks"] / 4


def test_unset_keeps_the_published_behaviour(found: dict[str, Any]) -> None:
    assert found["patched, unset"]["slept"] == 0


@pytest.mark.parametrize("variant", ["published", "patched"])
def test_a_transfer_arrives(found: dict[str, Any], variant: str) -> None:
    assert found[variant]["state"] == "DONE"
    assert found[variant]["equal"]
