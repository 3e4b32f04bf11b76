# SPDX-License-Identifier: Apache-2.0
"""What is refused, with what was found; nothing changes then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from serving_stack.errors import StackError
from serving_stack.patches import State

from .world import BOTH, EXTRA, EXTRA_AFTER, NUMBERS, ONE, World, as_root, diff, edit, install, sha, tree


def test_a_version_outside_the_range_is_refused_and_nothing_changes(world: World) -> None:
    install(world.site, "other", "3.0", {"other/a.py": b"A = 1\n"})
    world.write(
        {"p.patch": diff("other/a.py", b"A = 1\n", b"A = 2\n")},
        {"other": {"1.5": {"other/a.py": b"A = 1\n"}}},
        package="other",
    )
    before = tree(world.site)
    with pytest.raises(StackError, match=r"other/p: version outside range: other <2,>=1 expected, 3\.0 found"):
        world.apply()
    assert tree(world.site) == before, "the patches of demo come first and fit, and must not have been applied"
    assert world.revert() == []
    assert "other/p: other <2,>=1 expected, 3.0 found, nothing to revert" in world.said


def test_a_version_in_range_without_published_hashes_is_refused(world: World) -> None:
    (world.site / "demo-1.0.dist-info").rename(world.site / "demo-1.1.dist-info")
    (world.site / "demo-1.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: demo\nVersion: 1.1\n")
    before = tree(world.site)
    with pytest.raises(StackError, match=r"demo 1\.0 expected by hash, 1\.1 found"):
        world.apply()
    assert tree(world.site) == before


def test_a_modified_file_is_refused_by_both_hashes_and_nothing_changes(world: World) -> None:
    changed = EXTRA + b"# mine\n"
    (world.site / "demo/extra.py").write_bytes(changed)
    before = tree(world.site)
    for act in (world.apply, world.revert):
        with pytest.raises(StackError) as caught:
            act()
        assert sha(EXTRA) in str(caught.value)
        assert sha(changed) in str(caught.value)
        assert "reinstall demo==1.0" in str(caught.value)
        assert tree(world.site) == before, "demo/one does not touch the modified file, and must not be applied either"
    assert world.states() == [State.NOT_APPLIED, State.MODIFIED]


def test_our_patched_file_with_one_byte_more_is_not_ours(world: World) -> None:
    world.apply()
    (world.site / "demo/numbers.py").write_bytes(BOTH + b"\n")
    with pytest.raises(StackError, match="file modified"):
        world.revert()
    assert world.read("demo/numbers.py") == BOTH + b"\n"


def test_a_missing_file_is_refused(world: World) -> None:
    (world.site / "demo/extra.py").unlink()
    with pytest.raises(StackError, match=r"extra\.py: no such file"):
        world.apply()
    assert world.read("demo/numbers.py") == NUMBERS


def test_a_patch_that_does_not_fit_its_published_file_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path / "patches", tmp_path / "site")
    other = b"# a line more\n" + NUMBERS
    world.write({"p.patch": diff("demo/n.py", NUMBERS, ONE)}, {"demo": {"1.0": {"demo/n.py": other}}})
    install(world.site, "demo", "1.0", {"demo/n.py": other})
    with pytest.raises(StackError, match="demo/p: does not apply to the published file"):
        world.apply()
    assert world.read("demo/n.py") == other


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda home: (home / "series").write_text("one.patch\n"), "series: lists"),
        (lambda home: (home / "stray.patch").write_text(""), "but the folder holds"),
        (lambda home: (home / "patches.yaml").write_text("patches: {}\nsurprise: 1\n"), "surprise"),
        (lambda home: edit(home / "one.patch", b"Forwarded: no\n", b""), "DEP-3 header Forwarded is missing"),
        (lambda home: edit(home / "one.patch", b"/demo/", b"/other/"), "not a file of the package demo"),
        (lambda home: edit(home / "one.patch", b"/demo/", b"/demo/../"), "not a file of the package demo"),
        (
            lambda home: edit(home / "one.patch", b"--- a/demo/numbers.py", b"--- /dev/null"),
            "only changes of existing",
        ),
        (lambda home: edit(home / "patches.yaml", b">=1,<2", b"one"), "version range 'one' is not valid"),
        (
            lambda home: edit(home / "patches.yaml", b"demo/extra.py", b"demo/spare.py"),
            r"patch demo/two: it fits no version .*no hash of demo/extra\.py is recorded",
        ),
        (
            lambda home: edit(home / "patches.yaml", b"patched:", b"repatched:"),
            "patched\n.*Field required",
        ),
        (
            lambda home: edit(home / "patches.yaml", f"      demo/extra.py: {sha(EXTRA_AFTER)}\n".encode(), b""),
            r"patches\.yaml: patched: demo 1\.0: no hash of demo/extra\.py",
        ),
        (
            lambda home: edit(
                home / "patches.yaml", sha(BOTH).encode(), b"0\n      demo/more.py: 0".replace(b"0", b"x")
            ),
            r"patched: demo 1\.0: demo/more\.py: no patch of that version changes it",
        ),
        (
            lambda home: edit(home / "patches.yaml", b"patched:", b"patched:\n  demo-gpu: {'2.0': {}}"),
            r"patched: demo-gpu 2\.0: .*no patch of that version changes it",
        ),
        (
            lambda home: edit(home / "patches.yaml", sha(BOTH).encode(), sha(ONE).encode()),
            f"demo/numbers.py of demo 1.0: the patches make sha256 {sha(BOTH)} .* but {sha(ONE)} is recorded",
        ),
    ],
)
def test_a_damaged_folder_of_patches_is_named(world: World, damage: Callable[[Path], object], message: str) -> None:
    damage(world.folder / "demo")
    with pytest.raises(StackError, match=message):
        world.apply()
    assert world.read("demo/numbers.py") == NUMBERS


@pytest.mark.parametrize("closed", ["site", "site/demo", "site/demo/sub"])
def test_a_read_only_installation_is_refused_and_nothing_changes(unprivileged: Path, closed: str) -> None:
    world = World(unprivileged / "patches", unprivileged / "site")
    files = {"demo/numbers.py": NUMBERS, "demo/sub/extra.py": EXTRA}
    patch = diff("demo/numbers.py", NUMBERS, ONE) + diff("demo/sub/extra.py", EXTRA, EXTRA_AFTER)
    with as_root():
        world.write({"p.patch": patch}, {"demo": {"1.0": files}})
        install(world.site, "demo", "1.0", files)
        for folder in (world.site, world.site / "demo", world.site / "demo/sub"):
            folder.chmod(0o777)
        # The last case closes the second file's folder alone, after the first file's could be written.
        (unprivileged / closed).chmod(0o555)
    before = tree(world.site)
    with pytest.raises(StackError, match=r"cannot be written \(Permission denied\); nothing was changed"):
        world.apply()
    assert tree(world.site) == before
    assert world.states() == [State.NOT_APPLIED], "reading needs no permission to write"


def test_a_patched_read_only_installation_needs_no_permission(unprivileged: Path) -> None:
    world = World(unprivileged / "patches", unprivileged / "site")
    with as_root():
        world.write({"p.patch": diff("demo/n.py", NUMBERS, ONE)}, {"demo": {"1.0": {"demo/n.py": NUMBERS}}})
        install(world.site, "demo", "1.0", {"demo/n.py": NUMBERS})
        world.apply()
        world.site.chmod(0o555)
    assert world.apply() == []
