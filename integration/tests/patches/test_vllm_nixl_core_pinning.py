# SPDX-License-Identifier: Apache-2.0
"""`vllm/nixl-cpu-respect-nobind`, in the environment of the engines: needs vLLM's CPU build.

The environment is only read. The module is imported from a copy, as published or as patched, and the connector's own
constructor runs up to the line below the pinning; then the kernel is asked which cores the process may use.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from serving_stack.patches import contents, load_all

MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"

CONSTRUCT = f"""
import importlib, importlib.abc, importlib.util, json, os, sys
from unittest import mock

class Overlay(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, sys.argv[1]) if name == {MODULE!r} else None

sys.meta_path.insert(0, Overlay())
module = importlib.import_module({MODULE!r})
assert module.__file__ == sys.argv[1]
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
    return {{"allowed": allowed, "pinned": [list(call.args[1]) for call in set_affinity.mock_calls]}}

found = {{bind: construct(bind) for bind in ("nobind", "unset", "auto", "0")}}
print(json.dumps({{"cores": cores, **found}}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the published and the patched module do, by value of VLLM_CPU_OMP_THREADS_BIND."""
    (patch,) = (patch for patch in load_all() if patch.name == "vllm/nixl-cpu-respect-nobind")
    module = contents(patch)[MODULE.replace(".", "/") + ".py"]
    result = {}
    for name, content in (("published", module.before), ("patched", module.after)):
        file = tmp_path_factory.mktemp(name) / "base_worker.py"
        file.write_bytes(content)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        done = subprocess.run(
            [sys.executable, "-c", CONSTRUCT, str(file)], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        result[name] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_published_connector_pins_under_nobind(found: dict[str, Any]) -> None:
    """When this fails, upstream has been cured and the patch can go."""
    last = found["published"]["cores"][-1:]
    assert found["published"]["nobind"] == {"allowed": last, "pinned": [last]}


def test_patched_connector_leaves_the_affinity_alone_under_nobind(found: dict[str, Any]) -> None:
    assert found["patched"]["nobind"] == {"allowed": found["patched"]["cores"], "pinned": []}


@pytest.mark.parametrize("bind", ["unset", "auto", "0"])
def test_patched_connector_pins_as_published_otherwise(found: dict[str, Any], bind: str) -> None:
    last = found["patched"]["cores"][-1:]
    assert found["patched"][bind] == found["published"][bind] == {"allowed": last, "pinned": [last]}
