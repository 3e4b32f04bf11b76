# SPDX-License-Identifier: Apache-2.0
"""Several distributions of one package, several packages, several folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving_stack.errors import StackError
from serving_stack.patches import State, apply_all, revert_all, statuses

from .world import NUMBERS, World, diff, install


def test_another_distribution_of_the_same_files_is_patched_by_its_own_hashes(tmp_path: Path) -> None:
    cpu = b"# cpu\n" + NUMBERS
    world = World(tmp_path / "patches", tmp_path / "site")
    published = {"demo": {"1.0": {"demo/n.py": NUMBERS}}, "demo-cpu": {"1.0": {"demo/n.py": cpu}}}
    # One diff fits both only where line numbers agree: this one changes the last line of a file without line 1.
    world.write({"p.patch": diff("demo/n.py", cpu, cpu + b"X = 1\n")}, published)
    install(world.site, "demo-cpu", "1.0", {"demo/n.py": cpu})
    assert [(s.distribution, s.state) for s in statuses(**world.where)] == [("demo-cpu", State.NOT_APPLIED)]
    world.apply()
    assert world.read("demo/n.py") == cpu + b"X = 1\n"
    world.revert()
    assert world.read("demo/n.py") == cpu


def test_of_two_installed_claimants_the_one_whose_hashes_fit_counts(tmp_path: Path) -> None:
    cpu = b"# cpu\n" + NUMBERS
    world = World(tmp_path / "patches", tmp_path / "site")
    published = {"demo": {"1.0": {"demo/n.py": NUMBERS}}, "demo-cpu": {"1.0": {"demo/n.py": cpu}}}
    world.write({"p.patch": diff("demo/n.py", cpu, cpu + b"X = 1\n")}, published)
    install(world.site, "demo", "1.0", {"demo/n.py": NUMBERS})
    install(world.site, "demo-cpu", "1.0", {"demo/n.py": cpu})
    world.apply()
    assert [(s.distribution, s.state) for s in statuses(**world.where)] == [("demo-cpu", State.APPLIED)]


def test_package_filters_by_import_package_and_by_distribution(world: World) -> None:
    install(world.site, "other", "1.0", {"other/a.py": b"A = 1\n"})
    world.write(
        {"p.patch": diff("other/a.py", b"A = 1\n", b"A = 2\n")},
        {"other": {"1.0": {"other/a.py": b"A = 1\n"}}},
        package="other",
    )
    assert world.apply("Demo_CPU") == ["demo/one", "demo/two"]
    assert world.read("other/a.py") == b"A = 1\n"
    assert world.apply("other") == ["other/p"]
    with pytest.raises(StackError, match="package 'nothing': no patches are carried for it; there are some for demo"):
        world.apply("nothing")


def test_packages_in_two_folders_change_together(world: World, tmp_path: Path) -> None:
    second = tmp_path / "second"
    install(second, "other", "1.0", {"other/a.py": b"A = 1\n"})
    world.write(
        {"p.patch": diff("other/a.py", b"A = 1\n", b"A = 2\n")},
        {"other": {"1.0": {"other/a.py": b"A = 1\n"}}},
        package="other",
    )
    path = [str(world.site), str(second)]
    assert len(apply_all(folder=world.folder, path=path)) == 3
    assert (second / "other/a.py").read_bytes() == b"A = 2\n"
    revert_all(folder=world.folder, path=path)
    assert (second / "other/a.py").read_bytes() == b"A = 1\n"
    assert world.read("demo/numbers.py") == NUMBERS
