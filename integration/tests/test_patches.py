# SPDX-License-Identifier: Apache-2.0
"""The patch carrier, on throw-away distributions: no upstream is needed."""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import io
import os
import py_compile
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import pytest
import uv

from serving_stack import cli
from serving_stack.errors import StackError
from serving_stack.patches import Patch, State, apply_all, contents, load_all, missing, revert_all, state, statuses
from serving_stack.patches import _carrier as carrier
from serving_stack.patches import _journal as journal
from serving_stack.patches import _series as series

NUMBERS = b"".join(b"N%d = %d\n" % (n, n) for n in range(1, 21))
EXTRA = b"A = 1\nB = 2\n"
HEADERS = """\
Description: {name} changes a number
 and says so on two lines.
Origin: vendor
Bug: none known
Forwarded: no
Author: The serving-stack authors
Last-Update: 2026-01-01
Applied-Upstream: no

"""


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def diff(path: str, before: bytes, after: bytes) -> bytes:
    lines = difflib.diff_bytes(
        difflib.unified_diff,
        io.BytesIO(before).readlines(),
        io.BytesIO(after).readlines(),
        f"a/{path}".encode(),
        f"b/{path}".encode(),
    )
    marker = b"\n\\ No newline at end of file\n"
    return b"".join(line if line.endswith(b"\n") else line + marker for line in lines)


def install(site: Path, name: str, version: str, files: dict[str, bytes]) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{path},sha256=published,\n" for path in files))
    for path, content in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)


def tree(root: Path) -> dict[str, bytes]:
    return {str(file.relative_to(root)): file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file()}


@dataclass
class World:
    """A folder of patches for the package `demo`, and a folder of installed packages."""

    folder: Path
    site: Path
    said: list[str] = field(default_factory=list)

    @property
    def kwargs(self) -> dict[str, object]:
        return {"folder": self.folder, "path": [str(self.site)]}

    def write(
        self,
        patches: dict[str, bytes],
        published: dict[str, dict[str, dict[str, bytes]]],
        *,
        versions: str = ">=1,<2",
        package: str = "demo",
    ) -> None:
        home = self.folder / package
        home.mkdir(parents=True, exist_ok=True)
        for name, text in patches.items():
            (home / name).write_bytes(HEADERS.format(name=name).encode() + text)
        (home / "series").write_text("# the order\n" + "".join(f"{name}\n" for name in patches))
        lines = ["patches:"] + [f"  {name}: {{versions: '{versions}'}}" for name in patches] + ["published:"]
        for distribution, by_version in published.items():
            lines.append(f"  {distribution}:")
            for version, files in by_version.items():
                lines.append(f"    '{version}':")
                lines += [f"      {path}: {sha(content)}" for path, content in files.items()]
        (home / "patches.yaml").write_text("\n".join(lines) + "\n")

    def apply(self, package: str | None = None) -> list[str]:
        return [patch.name for patch in apply_all(package, **self.kwargs, say=self.said.append)]  # type: ignore[arg-type]

    def revert(self, package: str | None = None) -> list[str]:
        return [patch.name for patch in revert_all(package, **self.kwargs, say=self.said.append)]  # type: ignore[arg-type]

    def states(self) -> list[State]:
        return [status.state for status in statuses(**self.kwargs, say=self.said.append)]  # type: ignore[arg-type]

    def patch(self, name: str) -> Patch:
        return next(patch for patch in load_all(self.folder) if patch.name == name)

    def read(self, path: str) -> bytes:
        return (self.site / path).read_bytes()


FILES = {"demo/numbers.py": NUMBERS, "demo/extra.py": EXTRA}
ONE = NUMBERS.replace(b"N3 = 3\n", b"N3 = 33\n# new\n")
BOTH = ONE.replace(b"N15 = 15\n", b"")
EXTRA_AFTER = EXTRA.replace(b"B = 2", b"B = 3")


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


# --- apply, revert, states ------------------------------------------------------------------------------------------


def test_apply_makes_the_chain_and_revert_restores_every_byte(world: World) -> None:
    before = tree(world.site)
    assert world.states() == [State.NOT_APPLIED, State.NOT_APPLIED]
    assert world.apply() == ["demo/one", "demo/two"]
    assert world.read("demo/numbers.py") == BOTH
    assert world.read("demo/extra.py") == EXTRA_AFTER
    assert world.states() == [State.APPLIED, State.APPLIED]
    assert {name for name, content in tree(world.site).items() if before.get(name) != content} == set(FILES)
    assert world.revert() == ["demo/one", "demo/two"]
    assert tree(world.site) == before
    assert not (world.site / journal.STATE_FOLDER).exists()


def test_applying_twice_says_already_applied_and_writes_nothing(world: World) -> None:
    world.apply()
    inode = (world.site / "demo/numbers.py").stat().st_ino
    world.said.clear()
    assert world.apply() == []
    assert world.said == ["demo/one: already applied (demo 1.0)", "demo/two: already applied (demo 1.0)"]
    assert (world.site / "demo/numbers.py").stat().st_ino == inode


def test_reverting_twice_says_not_applied(world: World) -> None:
    assert world.revert() == []
    assert world.said == ["demo/one: not applied (demo 1.0)", "demo/two: not applied (demo 1.0)"]


def test_a_series_that_grew_is_completed(world: World) -> None:
    (world.site / "demo/numbers.py").write_bytes(ONE)  # as an older release with the first patch alone left it
    assert world.states() == [State.APPLIED, State.NOT_APPLIED]
    assert world.apply() == ["demo/two"]
    assert world.read("demo/numbers.py") == BOTH


def test_a_patch_applied_in_one_of_its_files_is_completed_and_reverted(world: World) -> None:
    (world.site / "demo/extra.py").write_bytes(EXTRA_AFTER)
    assert state(world.patch("demo/two"), **world.kwargs) is State.NOT_APPLIED  # type: ignore[arg-type]
    assert [s.detail for s in missing(**world.kwargs)] == ["", "applied in demo/extra.py only"]  # type: ignore[arg-type]
    assert world.revert() == ["demo/two"]
    assert world.read("demo/extra.py") == EXTRA


def test_contents_are_the_same_whether_or_not_the_patch_is_applied(world: World) -> None:
    for _ in range(2):
        found = contents(world.patch("demo/two"), **world.kwargs)  # type: ignore[arg-type]
        assert {name: (c.before, c.after) for name, c in found.items()} == {
            "demo/numbers.py": (ONE, BOTH),
            "demo/extra.py": (EXTRA, EXTRA_AFTER),
        }
        world.apply()


def test_missing_names_what_a_launcher_must_know(world: World) -> None:
    assert [s.patch.name for s in missing(**world.kwargs)] == ["demo/one", "demo/two"]  # type: ignore[arg-type]
    world.apply()
    assert missing(**world.kwargs) == []  # type: ignore[arg-type]


def test_mode_bits_stay(world: World) -> None:
    (world.site / "demo/numbers.py").chmod(0o754)
    world.apply()
    assert stat.S_IMODE((world.site / "demo/numbers.py").stat().st_mode) == 0o754
    world.revert()
    assert stat.S_IMODE((world.site / "demo/numbers.py").stat().st_mode) == 0o754


def test_a_package_that_is_absent_is_skipped_with_a_line(world: World) -> None:
    shutil.rmtree(world.site)
    world.site.mkdir()
    assert world.apply() == []
    assert world.said == [f"demo/{name}: not installed (demo or demo-cpu), skipped" for name in ("one", "two")]
    assert world.states() == [State.NOT_INSTALLED, State.NOT_INSTALLED]
    assert missing(**world.kwargs) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(NUMBERS.replace(b"\n", b"\r\n"), ONE.replace(b"\n", b"\r\n"), id="crlf"),
        pytest.param(NUMBERS.replace(b"N2 = 2\n", b"N2 = 2\r\n"), ONE.replace(b"N2 = 2\n", b"N2 = 2\r\n"), id="mixed"),
        pytest.param(NUMBERS.rstrip(b"\n"), ONE.rstrip(b"\n"), id="no-newline-far"),
        pytest.param(NUMBERS.rstrip(b"\n"), NUMBERS.rstrip(b"\n") + b"0", id="no-newline-changed-line"),
        pytest.param(NUMBERS.rstrip(b"\n"), NUMBERS.replace(b"N18", b"M18").rstrip(b"\n"), id="no-newline-context"),
        pytest.param(NUMBERS.rstrip(b"\n"), NUMBERS, id="newline-added"),
        pytest.param(NUMBERS, NUMBERS.rstrip(b"\n"), id="newline-removed"),
        pytest.param(NUMBERS.replace(b"N2", b"\xe9\x0c\x85"), ONE.replace(b"N2", b"\xe9\x0c\x85"), id="odd-bytes"),
        pytest.param(b"", b"X = 1\n", id="empty-before"),
        pytest.param(b"X = 1\n", b"", id="empty-after"),
        pytest.param(b"-- x\n", b"++ y\n", id="like-a-header"),
    ],
)
def test_line_ends_and_odd_bytes_survive_both_ways(tmp_path: Path, before: bytes, after: bytes) -> None:
    world = World(tmp_path / "patches", tmp_path / "site")
    world.write({"p.patch": diff("demo/f.py", before, after)}, {"demo": {"1.0": {"demo/f.py": before}}})
    install(world.site, "demo", "1.0", {"demo/f.py": before})
    world.apply()
    assert world.read("demo/f.py") == after
    world.revert()
    assert world.read("demo/f.py") == before


# --- refusals: nothing changes --------------------------------------------------------------------------------------


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
        (lambda home: _edit(home / "one.patch", b"Forwarded: no\n", b""), "DEP-3 header Forwarded is missing"),
        (lambda home: _edit(home / "one.patch", b"/demo/", b"/other/"), "not a file of the package demo"),
        (lambda home: _edit(home / "one.patch", b"/demo/", b"/demo/../"), "not a file of the package demo"),
        (
            lambda home: _edit(home / "one.patch", b"--- a/demo/numbers.py", b"--- /dev/null"),
            "only changes of existing",
        ),
        (lambda home: _edit(home / "patches.yaml", b">=1,<2", b"one"), "version range 'one' is not valid"),
        (
            lambda home: _edit(home / "patches.yaml", b"demo/extra.py", b"demo/spare.py"),
            "no published hash of demo/extra",
        ),
    ],
)
def test_a_damaged_folder_of_patches_is_named(world: World, damage: Callable[[Path], object], message: str) -> None:
    damage(world.folder / "demo")
    with pytest.raises(StackError, match=message):
        world.apply()
    assert world.read("demo/numbers.py") == NUMBERS


def _edit(file: Path, old: bytes, new: bytes) -> None:
    text = file.read_bytes()
    assert old in text
    file.write_bytes(text.replace(old, new))


# --- several distributions ------------------------------------------------------------------------------------------


def test_another_distribution_of_the_same_files_is_patched_by_its_own_hashes(tmp_path: Path) -> None:
    cpu = b"# cpu\n" + NUMBERS
    world = World(tmp_path / "patches", tmp_path / "site")
    published = {"demo": {"1.0": {"demo/n.py": NUMBERS}}, "demo-cpu": {"1.0": {"demo/n.py": cpu}}}
    # One diff fits both only where line numbers agree: this one changes the last line of a file without line 1.
    world.write({"p.patch": diff("demo/n.py", cpu, cpu + b"X = 1\n")}, published)
    install(world.site, "demo-cpu", "1.0", {"demo/n.py": cpu})
    assert [(s.distribution, s.state) for s in statuses(**world.kwargs)] == [("demo-cpu", State.NOT_APPLIED)]  # type: ignore[arg-type]
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
    assert [(s.distribution, s.state) for s in statuses(**world.kwargs)] == [("demo-cpu", State.APPLIED)]  # type: ignore[arg-type]


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


# --- killed, refused by the file system, two at once ----------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from serving_stack.patches import apply_all, revert_all, _journal

step, count, action, folder, site = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5]
seen = 0
def kill(name):
    global seen
    seen += name == step
    if name == step and seen == count:
        os.kill(os.getpid(), signal.SIGKILL)
_journal._checkpoint = kill
{"apply": apply_all, "revert": revert_all}[action](folder=folder, path=[site])
"""


def killed(world: World, step: str, count: int, action: str) -> None:
    command = [sys.executable, "-c", KILLED, step, str(count), action, str(world.folder), str(world.site)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("step", "count"),
    [("journal written", 1), ("new files written", 1), ("file renamed", 1), ("file renamed", 2)],
)
@pytest.mark.parametrize("action", ["apply", "revert"])
def test_killed_half_way_the_next_command_finds_nothing_of_it(world: World, step: str, count: int, action: str) -> None:
    if action == "revert":
        world.apply()
    before = tree(world.site)
    killed(world, step, count, action)
    assert tree(world.site) != before
    world.said.clear()
    assert world.states() == [State.NOT_APPLIED if action == "apply" else State.APPLIED] * 2
    assert world.said[-1] == "an interrupted change was rolled back: nothing of it is applied"
    assert sum(line.endswith(": rolled back") for line in world.said) == (count if step == "file renamed" else 0)
    assert tree(world.site) == before
    assert world.revert() == ([] if action == "apply" else ["demo/one", "demo/two"])


def test_between_two_renames_a_kill_really_leaves_one_file_of_two(world: World) -> None:
    killed(world, "file renamed", 1, "apply")
    assert (world.read("demo/numbers.py"), world.read("demo/extra.py")) == (BOTH, EXTRA)


def test_killed_between_renames_apply_starts_afresh(world: World) -> None:
    killed(world, "file renamed", 1, "apply")
    assert world.apply() == ["demo/one", "demo/two"]
    assert (world.read("demo/numbers.py"), world.read("demo/extra.py")) == (BOTH, EXTRA_AFTER)
    world.revert()
    assert (world.read("demo/numbers.py"), world.read("demo/extra.py")) == (NUMBERS, EXTRA)


def test_a_reinstallation_after_the_kill_is_left_alone(world: World) -> None:
    killed(world, "file renamed", 1, "apply")
    (world.site / "demo/numbers.py").write_bytes(b"# another release\n")
    assert world.states() == [State.MODIFIED, State.MODIFIED]
    assert any("replaced by somebody since, left alone" in line for line in world.said)
    assert world.read("demo/numbers.py") == b"# another release\n"


def test_a_damaged_copy_is_not_written_back(world: World) -> None:
    killed(world, "file renamed", 1, "apply")
    (world.site / journal.STATE_FOLDER / "before-0").write_bytes(b"garbage")
    with pytest.raises(StackError, match=r"the copy of .*numbers\.py is damaged"):
        world.states()
    assert world.read("demo/numbers.py") == BOTH


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failing_rename_undoes_the_earlier_one(
    world: World, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    before = tree(world.site)
    real = os.replace

    def replace(source: str | Path, target: str | Path) -> None:
        if str(target).endswith("extra.py"):
            raise failure
        real(source, target)

    monkeypatch.setattr(journal.os, "replace", replace)  # type: ignore[attr-defined]
    with pytest.raises((StackError, KeyboardInterrupt)) as caught:
        world.apply()
    if isinstance(failure, OSError):
        assert str(caught.value).endswith("cannot be written (No space left on device); nothing was changed")
    assert tree(world.site) == before


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


@contextlib.contextmanager
def as_root() -> Iterator[None]:
    """Step out of `unprivileged` for the preparation."""
    user = os.geteuid()
    if os.getuid() == 0:
        os.seteuid(0)
    yield
    os.seteuid(user)


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


def test_a_second_process_waits_for_the_first(world: World) -> None:
    held = world.site / journal.STATE_FOLDER
    held.mkdir()
    done = threading.Event()

    def second() -> None:
        world.apply()
        done.set()

    def wait_for_waiter(lock: TextIO) -> None:
        # The kernel lists who waits for a lock with an arrow; no time is taken for granted.
        waiter = re.compile(rf"-> FLOCK .*:{os.fstat(lock.fileno()).st_ino} ")
        while not waiter.search(Path("/proc/locks").read_text()) and not done.is_set():
            pass
        assert not done.is_set()
        assert world.read("demo/numbers.py") == NUMBERS

    thread = threading.Thread(target=second, daemon=True)
    with contextlib.ExitStack() as first, contextlib.ExitStack() as third:
        lock = first.enter_context(open(held / "lock", "w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread.start()
        wait_for_waiter(lock)
        # The first ends as a real one does, with its lock file gone, and a third comes before the second wakes: what
        # the second waited for admits nobody any more.
        (held / "lock").unlink()
        newer = third.enter_context(open(held / "lock", "w"))
        fcntl.flock(newer, fcntl.LOCK_EX)
        first.close()
        wait_for_waiter(newer)
    thread.join()
    assert world.read("demo/numbers.py") == BOTH


# --- links and bytecode ---------------------------------------------------------------------------------------------


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
    wheel = tmp_path / "demo-1.0-py3-none-any.whl"
    info = "demo-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        record = "".join(f"{name},,\n" for name in (*FILES, f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD"))
        archive.writestr(f"{info}/RECORD", record)
    cache = tmp_path / "cache"
    venv = tmp_path / "venv"
    environment = {**os.environ, "UV_CACHE_DIR": str(cache), "UV_LINK_MODE": "hardlink", "UV_OFFLINE": "1"}
    environment.pop("VIRTUAL_ENV", None)
    for command in (
        [binary, "venv", "--quiet", "--python", sys.executable, str(venv)],
        [binary, "pip", "install", "--quiet", "--no-deps", "--python", str(venv / "bin/python"), str(wheel)],
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
            str(wheel),
        ],
        env=environment,
        check=True,
    )
    assert world.states() == [State.NOT_APPLIED], "a reinstallation from the cache is the published file"


# --- the command line -----------------------------------------------------------------------------------------------


@pytest.fixture
def command(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setattr(series, "FOLDER", world.folder)
    monkeypatch.setattr(carrier.sys, "path", [str(world.site)])  # type: ignore[attr-defined]
    return lambda *words: cli.main(["patches", *words])


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


# --- the patches we ship --------------------------------------------------------------------------------------------


def test_the_shipped_patches_are_valid_and_stand_in_the_ledger() -> None:
    patches = load_all()
    assert patches
    ledger = (series.FOLDER / "LEDGER.md").read_text("utf-8")
    headings = [line.removeprefix("## ") for line in ledger.splitlines() if line.startswith("## ")]
    assert headings == sorted(patch.name for patch in patches)
    for section in ledger.split("\n## ")[1:]:
        for part in ("**Why.**", "**How.**", "**Related thread.**", "**What makes it unnecessary.**"):
            assert part in section, section.splitlines()[0]


def test_every_shipped_patch_names_known_versions() -> None:
    for patch in load_all():
        for distribution, by_version in patch.published.items():
            assert any(patch.versions.contains(version) for version in by_version), (patch.name, distribution)


def test_no_upstream_is_imported(world: World) -> None:
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from serving_stack.patches import apply_all
        assert apply_all(folder=Path(sys.argv[1]), path=[sys.argv[2]])
        assert "demo" not in sys.modules
    """)
    subprocess.run([sys.executable, "-c", script, str(world.folder), str(world.site)], check=True)
