# SPDX-License-Identifier: Apache-2.0
"""One real stack for all tests of this folder, started once."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from serving_stack.state import free_ports
from support.stack import Stack


@pytest.fixture(scope="session")
def running() -> list[Stack]:
    """What is up: two stacks at once are too much for two cores."""
    assert "PYTEST_XDIST_WORKER" not in os.environ, "a test that starts a stack runs alone: mark it `engines`"
    return []


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, running: list[Stack]) -> Iterator[Stack]:
    """The CPU profile's stack, up."""
    one = Stack(tmp_path_factory.mktemp("home"), free_ports(1, above=21000)[0])
    try:
        one.up()
        running.append(one)
        yield one
    finally:
        one.command("down", check=False)
