# SPDX-License-Identifier: Apache-2.0
"""`vllm/nixl-cpu-respect-nobind`: needs vLLM's CPU build.

The connector's own constructor runs up to the line below the pinning; then the kernel is asked which cores the process
may use.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

PATCH = "vllm/nixl-cpu-respect-nobind"

CONSTRUCT = """
import json, os
from unittest import mock
import vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker as module

platform = module.current_platform
assert platform.device_type == "cpu", platform

class Done(Exception):
    pass

config = mock.MagicMock()
config.kv_transfer_config.get_from_extra_config.side_effect = lambda key, default: default
config.kv_transfer_config.kv_buffer_device = "cpu"
config.parallel_config.prefill_context_parallel_size = 1
config.parallel_config.decode_context_parallel_size = 1
caches = mock.MagicMock(transfer_groups=[], kv_cache_groups=[])
cores = sorted(os.sched_getaffinity(0))

def construct(bind):
    os.environ.pop("VLLM_CPU_OMP_THREADS_BIND", None)
    if bind != "unset":
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = bind
    set_affinity = mock.Mock(side_effect=os.sched_setaffinity)
    with (
        # No NIXL agent and no process group: neither has to do with the pinning.
        mock.patch.object(module, "NixlWrapper", mock.MagicMock()),
        mock.patch.object(module, "nixl_agent_config", None),
        mock.patch.object(module, "get_tensor_model_parallel_rank", return_value=0),
        mock.patch.object(module, "get_tensor_model_parallel_world_size", return_value=1),
        # The cores this process may use, as one NUMA node: a container's host can have others.
        mock.patch.object(type(platform), "discover_numa_topology", return_value=[cores]),
        mock.patch.object(type(platform), "get_nixl_memory_type", side_effect=Done),
        mock.patch.object(os, "sched_setaffinity", set_affinity),
    ):
        try:
            module.NixlBaseConnectorWorker(config, "engine", caches)
        except Done:
            pass
        else:
            raise AssertionError("the constructor no longer asks for the memory type below the pinning")
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores)
    return {"allowed": allowed, "pinned": [list(call.args[1]) for call in set_affinity.mock_calls]}

found = {bind: construct(bind) for bind in ("nobind", "unset", "auto", "0")}
print(json.dumps({"cores": cores, **found}))
"""


def construct(python: Callable[..., subprocess.CompletedProcess[str]], script: str) -> dict[str, Any]:
    """Return what the connector does, by value of VLLM_CPU_OMP_THREADS_BIND, and the cores that there are."""
    done = python(script)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def as_published(python: Callable[..., subprocess.CompletedProcess[str]], published: str) -> dict[str, Any]:
    return construct(python, published + CONSTRUCT)


@pytest.fixture(scope="module")
def as_installed(python: Callable[..., subprocess.CompletedProcess[str]]) -> dict[str, Any]:
    return construct(python, CONSTRUCT)


def test_published_connector_pins_under_nobind(as_published: dict[str, Any]) -> None:
    """When this fails, upstream has been cured and the patch can go."""
    last = as_published["cores"][-1:]
    assert as_published["nobind"] == {"allowed": last, "pinned": [last]}


@pytest.mark.installed
def test_installed_connector_leaves_the_affinity_alone_under_nobind(as_installed: dict[str, Any]) -> None:
    assert as_installed["nobind"] == {"allowed": as_installed["cores"], "pinned": []}


@pytest.mark.parametrize("bind", ["unset", "auto", "0"])
def test_installed_connector_pins_as_published_otherwise(
    as_installed: dict[str, Any], as_published: dict[str, Any], bind: str
) -> None:
    last = as_installed["cores"][-1:]
    assert as_installed[bind] == as_published[bind] == {"allowed": last, "pinned": [last]}
