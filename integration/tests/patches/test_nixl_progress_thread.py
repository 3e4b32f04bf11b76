# SPDX-License-Identifier: Apache-2.0
"""`nixl_cu13/progress-thread-delay`: real NIXL agents over UCX on a CPU.

What a spinning thread does is seen without a clock: the kernel counts how often a thread gave up the processor by
itself, and a thread that polls with a time-out of 0 never does.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

PATCH = "nixl_cu13/progress-thread-delay"

USE = """
import json, os, time
import nixl_cu13._api as module
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
    "ticks": max(used.values()), "slept": max(slept.values()), "state": state, "equal": bool((source == target).all()),
}), flush=True)
os._exit(0)
"""


def use(python: Callable[..., subprocess.CompletedProcess[str]], script: str, delay: str | None) -> dict[str, Any]:
    done = python(script, {"UCX_TLS": "tcp,self", "NIXL_PROGRESS_THREAD_DELAY_US": delay})
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def as_published(python: Callable[..., subprocess.CompletedProcess[str]], published: str) -> dict[str, Any]:
    return use(python, published + USE, "10000")


@pytest.fixture(scope="module")
def as_installed(python: Callable[..., subprocess.CompletedProcess[str]]) -> dict[str, Any]:
    return use(python, USE, "10000")


def test_published_progress_thread_never_sleeps(as_published: dict[str, Any]) -> None:
    """When this fails, upstream has been cured and the patch can go."""
    assert as_published["slept"] == 0
    assert as_published["ticks"] > 0


@pytest.mark.installed
def test_installed_progress_thread_sleeps(as_installed: dict[str, Any]) -> None:
    assert as_installed["slept"] > 0


def test_installed_progress_thread_leaves_the_core_to_others(
    as_installed: dict[str, Any], as_published: dict[str, Any]
) -> None:
    assert as_installed["ticks"] < as_published["ticks"] / 4


def test_unset_keeps_the_published_behaviour(python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    assert use(python, USE, None)["slept"] == 0


@pytest.mark.parametrize("variant", ["as_published", "as_installed"])
def test_a_transfer_arrives(request: pytest.FixtureRequest, variant: str) -> None:
    found = request.getfixturevalue(variant)
    assert found["state"] == "DONE"
    assert found["equal"]
