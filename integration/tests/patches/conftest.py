# SPDX-License-Identifier: Apache-2.0
"""What the patches' own tests share. They need the environment of the engines, with every patch applied.

One file tests one patch, and names it in `PATCH = "<import package>/<patch>"`. Its scripts run in processes of their
own, by the fixture `python`:

- *as installed*: `python(SCRIPT)` sees what the environment holds. Such a test carries the mark `installed`
  (`@pytest.mark.installed`), passes with every patch applied and fails where its own is reverted, whatever the others
  are; `test_reverted.py` tries that with each. A file has at least one.
- *as published*: `python(published + SCRIPT)` sees the touched modules as they are without `PATCH`. Such a test shows
  the fault, so that it fails on the day upstream has none any more, and carries no mark.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from serving_stack.patches import contents, load_all

#: What takes the time when an engine is imported. No patch touches these modules, or what they import.
COMMON = ("vllm.config", "vllm.distributed.kv_transfer.kv_connector.v1.base")

#: Where a session that this one started finds the server of forks.
ADDRESS = "SERVING_STACK_TEST_FORKS"

OVERLAY = """
import importlib.abc, importlib.util, sys

class Overlay(importlib.abc.MetaPathFinder):
    files = {files!r}

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, self.files[name]) if name in self.files else None

assert not set(Overlay.files) & set(sys.modules), "imported before the overlay could take hold"
sys.meta_path.insert(0, Overlay())
"""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "installed: runs the installed modules, and fails where PATCH is reverted")
    config.addinivalue_line("markers", "newest: fetches the newest upstreams")


@pytest.fixture(scope="session")
def forks() -> Iterator[str]:
    """Serve forks of a process that has imported `COMMON` already; yields the address."""
    if address := os.environ.get(ADDRESS):
        yield address
        return
    # Not in pytest's folder: a socket's path may have 107 bytes.
    with tempfile.TemporaryDirectory() as folder:
        address = str(Path(folder, "socket"))
        command = [sys.executable, str(Path(__file__).with_name("forks.py")), address, *COMMON]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            line = server.stdout.readline()  # when all is imported
            assert line, f"exit status {server.wait()}"
            touched = {name for patch in load_all() for name in patch.files}
            early = {name for file in json.loads(line) for name in touched if file.endswith(f"/{name}")}
            assert not early, f"a fork would not import these anew: {early}"
            yield address
            server.stdin.close()  # ends it


@pytest.fixture(scope="session")
def python(forks: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script as `python -c` would, in a fork of a process that has imported `COMMON`.

    A second argument is a mapping of environment variables to set, or to remove where the value is None.
    """

    def run(script: str, variables: Mapping[str, str | None] | None = None) -> subprocess.CompletedProcess[str]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(forks)
            connection.sendall(json.dumps([script, dict(variables or {})]).encode())
            connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as reply:
                status, out, err = json.load(reply)
        return subprocess.CompletedProcess([sys.executable, "-c", script], status, out, err)

    return run


@pytest.fixture(scope="module")
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Lines to begin a script with: it imports what `PATCH` touches as it is without `PATCH`, applied or not."""
    (patch,) = (patch for patch in load_all() if patch.name == request.module.PATCH)
    folder = tmp_path_factory.mktemp("published")
    files = {}
    for number, (name, content) in enumerate(contents(patch).items()):
        file = folder / f"{number}.py"
        file.write_bytes(content.before)
        files[name.removesuffix(".py").replace("/", ".")] = str(file)
    return OVERLAY.format(files=files)
