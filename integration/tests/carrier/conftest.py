# SPDX-License-Identifier: Apache-2.0
"""What several files' tests start from."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serving_stack import cli
from serving_stack.patches import _series as series

from .world import BOTH, EXTRA, EXTRA_AFTER, FILES, NUMBERS, ONE, World, diff, install


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Two patches on `demo`: the first touches one file, the second the same file and another."""
    world = World(tmp_path / "patches", tmp_path / "site")
    world.write(
        {
            "one.patch": diff("demo/numbers.py", NUMBERS, ONE),
            "two.patch": diff("demo/numbers.py", ONE, BOTH) + diff("demo/extra.py", EXTRA, EXTRA_AFTER),
        },
        {"demo": {"1.0": FILES}, "demo-cpu": {"1.0": FILES}},
    )
    install(world.site, "demo", "1.0", FILES)
    return world


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder of its own, in which root acts as another user, so that permissions count."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            if root:
                os.seteuid(0)
            for path in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
                path.chmod(0o755)


@pytest.fixture
def command(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setattr(series, "FOLDER", world.folder)
    monkeypatch.syspath_prepend(str(world.site))
    return lambda *words: cli.main(["patches", *words])


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only place that pip looks in."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder
