# SPDX-License-Identifier: Apache-2.0
"""The command line of list, apply, revert and verify."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from .world import BOTH, NUMBERS, World, killed, sha


def test_the_command_line_end_to_end(
    world: World, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("verify") == 1
    assert "FAIL  demo/one: not applied" in capsys.readouterr().out
    assert command("apply") == 0
    assert capsys.readouterr().out.splitlines() == ["demo/one: applied (demo 1.0)", "demo/two: applied (demo 1.0)"]
    assert command("verify", "--package", "demo") == 0
    out = capsys.readouterr().out
    assert f"demo/numbers.py: sha256 {sha(BOTH)}" in out
    assert "RECORD of demo still holds the published hashes" in out
    assert command("list") == 0
    rows = [row.split("  ") for row in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells == [
        ["PATCH", "PACKAGE", "INSTALLED", "STATE", "DESCRIPTION"],
        ["demo/one", "demo", "demo 1.0", "applied", "one.patch changes a number"],
        ["demo/two", "demo", "demo 1.0", "applied", "two.patch changes a number"],
    ]
    assert command("revert") == 0
    assert world.read("demo/numbers.py") == NUMBERS


def test_the_command_line_says_what_it_rolled_back(
    world: World, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    killed(world, "file renamed", 1, "apply")
    assert command("list") == 0
    assert "numbers.py: rolled back" in capsys.readouterr().out


def test_the_command_line_refuses_with_status_1(
    world: World, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    (world.site / "demo/extra.py").write_bytes(b"mine\n")
    assert command("apply") == 1
    assert sha(b"mine\n") in capsys.readouterr().err
    assert command("verify") == 1
    assert command("apply", "--package", "nothing") == 1
    with pytest.raises(SystemExit, match="2"):
        command("unknown")


def test_verify_passes_where_nothing_is_installed(world: World, command: Callable[..., int]) -> None:
    shutil.rmtree(world.site)
    assert command("verify") == 0
