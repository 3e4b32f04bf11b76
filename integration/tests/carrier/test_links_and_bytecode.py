# SPDX-License-Identifier: Apache-2.0
"""An installer's links and Python's cached bytecode."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import uv

from serving_stack.patches import State
from serving_stack.patches import _journal as journal

from .world import FILES, NUMBERS, ONE, World, diff, install, tree, wheel


@pytest.mark.parametrize("make", [os.link, os.symlink])
def test_a_linked_file_is_never_written_through(
    world: World, tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    for name, content in FILES.items():
        cached = tmp_path / "cache" / name
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.write_bytes(content)
        (world.site / name).unlink()
        make(cached, world.site / name)
    for act in (world.apply, world.revert):
        act()
        for name, content in FILES.items():
            assert (tmp_path / "cache" / name).read_bytes() == content
    assert world.read("demo/numbers.py") == NUMBERS


@pytest.mark.parametrize(
    "mode", [py_compile.PycInvalidationMode.TIMESTAMP, py_compile.PycInvalidationMode.UNCHECKED_HASH]
)
@pytest.mark.parametrize("prefix", [False, True])
def test_python_never_runs_stale_bytecode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: py_compile.PycInvalidationMode, prefix: bool
) -> None:
    before, after = b"N = 1\n", b"N = 2\n"  # the same size
    world = World(tmp_path / "patches", tmp_path / "site")
    world.write({"p.patch": diff("demo/f.py", before, after)}, {"demo": {"1.0": {"demo/f.py": before}}})
    install(world.site, "demo", "1.0", {"demo/f.py": before})
    environment = {**os.environ, "PYTHONPATH": str(world.site)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if prefix:
        monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "cache"))
        environment["PYTHONPYCACHEPREFIX"] = str(tmp_path / "cache")

    def run() -> bytes:
        command = [sys.executable, "-c", "import demo.f; print(demo.f.N)"]
        return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout

    py_compile.compile(str(world.site / "demo/f.py"), doraise=True, invalidation_mode=mode)
    for act, expected in ((world.apply, b"2\n"), (world.revert, b"1\n"), (world.apply, b"2\n")):
        act()  # in one second, most likely, so the second of modification alone tells nothing
        assert run() == expected


def test_the_time_stamp_moves_by_a_second_even_where_the_clock_stands(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = world.site / "demo/numbers.py"
    monkeypatch.setattr(journal.time, "time_ns", lambda: 1_700_000_000_500_000_000)  # type: ignore[attr-defined]
    os.utime(file, (1_700_000_000, 1_700_000_000))
    stamps = [int(file.stat().st_mtime)]
    for act in (world.apply, world.revert, world.apply):
        act()
        stamps.append(int(file.stat().st_mtime))
    assert stamps == sorted(set(stamps))


def test_uv_installs_by_hard_link_and_its_cache_keeps_its_bytes(tmp_path: Path) -> None:
    binary = uv.find_uv_bin()
    file = wheel(tmp_path, "demo", "1.0", FILES)
    cache = tmp_path / "cache"
    venv = tmp_path / "venv"
    environment = {**os.environ, "UV_CACHE_DIR": str(cache), "UV_LINK_MODE": "hardlink", "UV_OFFLINE": "1"}
    environment.pop("VIRTUAL_ENV", None)
    for command in (
        [binary, "venv", "--quiet", "--python", sys.executable, str(venv)],
        [binary, "pip", "install", "--quiet", "--no-deps", "--python", str(venv / "bin/python"), str(file)],
    ):
        subprocess.run(command, env=environment, check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    installed = site / "demo/numbers.py"
    (cached,) = (file for file in cache.rglob("numbers.py") if file.samefile(installed))
    assert installed.stat().st_nlink > 1
    before = tree(cache)

    world = World(tmp_path / "patches", site)
    world.write({"p.patch": diff("demo/numbers.py", NUMBERS, ONE)}, {"demo": {"1.0": FILES}})
    world.apply()
    assert world.read("demo/numbers.py") == ONE
    assert cached.read_bytes() == NUMBERS
    assert tree(cache) == before
    subprocess.run(
        [
            binary,
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--reinstall",
            "--python",
            str(venv / "bin/python"),
            str(file),
        ],
        env=environment,
        check=True,
    )
    assert world.states() == [State.NOT_APPLIED], "a reinstallation from the cache is the published file"
