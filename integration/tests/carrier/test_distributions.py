# SPDX-License-Identifier: Apache-2.0
"""Several distributions of one package, several packages, several folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving_stack.errors import StackError
from serving_stack.patches import State, apply_all, revert_all, statuses

from .world import BOTH, EXTRA, EXTRA_AFTER, NUMBERS, ONE, World, diff, install, sha


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


@pytest.mark.parametrize("version", ["1.0+cu130", "1.0.0"])
def test_a_version_written_otherwise_or_with_a_local_label_is_looked_up_by_its_public_part(
    tmp_path: Path, version: str
) -> None:
    world = World(tmp_path / "patches", tmp_path / "site")
    after = NUMBERS + b"X = 1\n"
    world.write({"p.patch": diff("demo/n.py", NUMBERS, after)}, {"demo": {"1.0": {"demo/n.py": NUMBERS}}})
    install(world.site, "demo", version, {"demo/n.py": NUMBERS})
    assert world.apply() == ["demo/p"]
    assert world.said == [f"demo/p: applied (demo {version})"]
    (world.site / "demo/n.py").write_bytes(b"# another build\n")
    assert world.states() == [State.MODIFIED], "the hash decides"


def test_a_distribution_whose_hashes_are_not_recorded_is_refused_and_others_are_not(world: World) -> None:
    manifest = world.folder / "demo/patches.yaml"
    text = manifest.read_text()
    manifest.write_text(
        text.replace(f"      demo/extra.py: {sha(EXTRA)}\n", "", 1)
        .replace(f"      demo/extra.py: {sha(EXTRA_AFTER)}\n", "", 1)
        .replace(sha(BOTH), sha(ONE), 1)
    )
    with pytest.raises(StackError, match=r"demo/two: version outside range: demo 1\.0: no hash of demo/extra\.py"):
        world.apply()
    (world.site / "demo-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: demo-cpu\nVersion: 1.0\n")
    (world.site / "demo-1.0.dist-info").rename(world.site / "demo_cpu-1.0.dist-info")
    assert world.apply() == ["demo/one", "demo/two"]


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
