# SPDX-License-Identifier: Apache-2.0
"""A patch made of installed files that were edited in place; what was published comes from a wheel, by the real pip."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from serving_stack.errors import StackError
from serving_stack.patches import State, new
from serving_stack.patches import _new as module
from serving_stack.patches import _series as series
from serving_stack.patches import _upstream as upstream

from .world import (
    BOTH,
    EXTRA,
    EXTRA_AFTER,
    FILES,
    NUMBERS,
    ODD,
    ONE,
    World,
    as_root,
    diff,
    edit,
    killed,
    sha,
    tree,
    wheel,
)

MORE = BOTH.replace(b"N19 = 19\n", b"N19 = 20\n")
TEXT = "Count on\nSo that it is\n\nmore."


@pytest.fixture(autouse=True)
def someone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user of git with a name."""
    config = tmp_path / "gitconfig"
    config.write_text("[user]\n\tname = Some One\n\temail = some.one@example.org\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.chdir(tmp_path)
    return config


def installed(world: World, index: Path, name: str, version: str, files: dict[str, bytes]) -> None:
    """Install a wheel of the index as an installer does."""
    with zipfile.ZipFile(wheel(index, name, version, files)) as archive:
        archive.extractall(world.site)


@pytest.fixture
def edited(world: World, index: Path) -> World:
    """The distribution of `world` from a wheel, both patches applied, and one file edited."""
    shutil.rmtree(world.site)
    installed(world, index, "demo", "1.0", FILES)
    world.apply()
    edit(world.site / "demo/numbers.py", b"N19 = 19\n", b"N19 = 20\n")
    return world


def make(world: World, *files: str, name: str = "demo/three", text: str = TEXT) -> module.New:
    paths = [world.site / file for file in files or ("demo/numbers.py",)]
    return new(name, paths, text, **world.where)


def test_the_first_patch_of_a_package_makes_its_folder(tmp_path: Path, index: Path) -> None:
    world = World(tmp_path / "patches", tmp_path / "site")
    world.folder.mkdir()
    installed(world, index, "demo", "1.0", FILES)
    (world.site / "demo/numbers.py").write_bytes(ONE)
    (world.site / "demo/extra.py").write_bytes(EXTRA_AFTER)
    made = make(world, "demo/numbers.py", "demo/extra.py", name="demo/one")
    assert (made.file, made.distribution, made.version) == (world.folder / "demo/one.patch", "demo", "1.0")
    assert made.file.read_text() == (
        "Description: Count on\n So that it is\n .\n more.\nOrigin: vendor\nBug: none known\nForwarded: no\n"
        f"Author: Some One <some.one@example.org>\nLast-Update: {datetime.date.today()}\nApplied-Upstream: no\n\n"
        + diff("demo/numbers.py", NUMBERS, ONE).decode()
        + diff("demo/extra.py", EXTRA, EXTRA_AFTER).decode()
    )
    for name in ("series", "patches.yaml"):
        assert (world.folder / "demo" / name).read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert world.states() == [State.APPLIED]
    assert world.revert() == ["demo/one"]
    assert {name: world.read(name) for name in FILES} == FILES


def test_a_patch_on_top_of_others_holds_the_new_change_alone(edited: World) -> None:
    home = edited.folder / "demo"
    manifest = home / "patches.yaml"
    edit(manifest, b"published:\n", b"# what they were\n\npublished: # as wheels\n")
    before = manifest.read_text()
    make(edited)
    text = (home / "three.patch").read_bytes()
    assert text.partition(b"\n\n")[2] == diff("demo/numbers.py", BOTH, MORE)
    assert (home / "series").read_text() == "# the order\none.patch\ntwo.patch\nthree.patch\n"
    added = "  two.patch: {versions: '>=1,<2'}\n  three.patch:\n    versions: \"==1.0\"\n"
    assert manifest.read_text() == before.replace("  two.patch: {versions: '>=1,<2'}\n", added).replace(
        sha(BOTH), sha(MORE)
    )
    assert edited.states() == [State.APPLIED] * 3
    assert edited.revert(patch="demo/three") == ["demo/three"]
    assert edited.read("demo/numbers.py") == BOTH
    edited.revert()
    assert edited.read("demo/numbers.py") == NUMBERS


def test_hashes_of_a_file_that_no_patch_touched_are_added(world: World, index: Path) -> None:
    shutil.rmtree(world.site)
    installed(world, index, "demo", "1.0", {**FILES, "demo/sub/a b.py": EXTRA})
    (world.site / "demo/sub/a b.py").write_bytes(EXTRA_AFTER)
    made = make(world, "demo/sub/a b.py")
    held = yaml.safe_load((world.folder / "demo/patches.yaml").read_text())
    assert held["published"]["demo"]["1.0"]["demo/sub/a b.py"] == sha(EXTRA)
    assert held["patched"]["demo"]["1.0"]["demo/sub/a b.py"] == sha(EXTRA_AFTER)
    assert made.without_hashes == ("demo-cpu 1.0",), "its file is not known to be the same"
    assert world.states() == [State.NOT_APPLIED, State.NOT_APPLIED, State.APPLIED]


def test_a_distribution_with_the_same_file_is_patched_too(edited: World, index: Path) -> None:
    assert make(edited).without_hashes == ()
    shutil.rmtree(edited.site)
    installed(edited, index, "demo-cpu", "1.0", FILES)
    assert edited.apply() == ["demo/one", "demo/two", "demo/three"]
    assert edited.read("demo/numbers.py") == MORE


def test_a_distribution_with_another_such_file_is_not_guessed_at(edited: World) -> None:
    manifest = edited.folder / "demo/patches.yaml"
    head, name, tail = manifest.read_text().partition("  demo-cpu:\n")
    manifest.write_text(head + name + tail.replace(sha(NUMBERS), sha(ONE), 1))
    before = tree(edited.folder)
    with pytest.raises(StackError, match=r"demo/numbers\.py: demo-cpu 1\.0 has another one"):
        make(edited)
    assert tree(edited.folder) == before


def test_a_build_with_a_local_label_is_recorded_as_its_public_version(world: World, index: Path) -> None:
    shutil.rmtree(world.site)
    installed(world, index, "demo", "1.0+cu130", FILES)
    world.apply()
    edit(world.site / "demo/numbers.py", b"N19 = 19\n", b"N19 = 20\n")
    made = make(world)
    assert made.version == "1.0"
    assert world.states() == [State.APPLIED] * 3


def test_line_ends_and_odd_bytes_are_carried(tmp_path: Path, index: Path) -> None:
    world = World(tmp_path / "patches", tmp_path / "site")
    world.folder.mkdir()
    contents = {f"demo/{name}.py": pair for name, pair in ODD.items()}
    installed(world, index, "demo", "1.0", {name: before for name, (before, _) in contents.items()})
    for name, (_, after) in contents.items():
        (world.site / name).write_bytes(after)
    make(world, *contents, name="demo/odd")
    assert world.states() == [State.APPLIED]
    world.revert()
    assert {name: world.read(name) for name in contents} == {name: before for name, (before, _) in contents.items()}
    world.apply()
    assert {name: world.read(name) for name in contents} == {name: after for name, (_, after) in contents.items()}


def test_a_name_that_record_has_to_quote_is_found(tmp_path: Path, index: Path) -> None:
    world = World(tmp_path / "patches", tmp_path / "site")
    world.folder.mkdir()
    name = 'demo/a, "b".py'
    installed(world, index, "demo", "1.0", {name: EXTRA})
    assert '""b""' in (world.site / "demo-1.0.dist-info/RECORD").read_text()
    (world.site / name).write_bytes(EXTRA_AFTER)
    make(world, name, name="demo/odd")
    assert world.states() == [State.APPLIED]


def test_without_a_git_user_the_author_is_unknown(edited: World, someone: Path) -> None:
    someone.write_text("")
    assert "\nAuthor: unknown\n" in make(edited).file.read_text()


def _wheel_of_another_build(world: World) -> None:
    wheel(world.site.parent / "index", "demo", "1.0", {**FILES, "demo/numbers.py": ONE})


def _interrupt(world: World) -> None:
    edit(world.site / "demo/numbers.py", b"N19 = 20\n", b"N19 = 19\n")
    killed(world, "file renamed", 1, "revert")


def _flow(world: World) -> None:
    manifest = world.folder / "demo/patches.yaml"
    manifest.write_text(yaml.safe_dump(yaml.safe_load(manifest.read_text()), default_flow_style=True))


@pytest.mark.parametrize(
    ("arguments", "prepare", "message"),
    [
        ({"name": "demo"}, None, "patch 'demo': not a name"),
        ({"name": "demo/Three"}, None, "patch 'demo/Three': not a name"),
        ({"name": "demo/../three"}, None, "patch 'demo/../three': not a name"),
        ({"name": "demo/three.patch"}, None, r"patch 'demo/three\.patch': not a name"),
        ({"name": "demo/one"}, None, r"patch 'demo/one': the name is taken: .*/demo/one\.patch"),
        ({"name": "other/three"}, None, r"demo/numbers\.py: not a file of the package other"),
        ({"text": " \n"}, None, "the description is empty"),
        ({"text": "a \udcff"}, None, "description or author: not text"),
        ({"file": "demo/nothing.py"}, None, r"demo/nothing\.py: no such file"),
        ({"file": "demo"}, None, "demo: no such file"),
        ({"file": "../patches/demo/series"}, None, "series: not a file of an installed distribution"),
        ({"file": "demo/extra.py"}, None, r"demo/extra\.py: not changed"),
        ({"file": "demo/extra.py"}, lambda w: edit(w.site / "demo/extra.py", b"A", b"\0"), "extra.py: not a text file"),
        (
            {},
            lambda w: (w.site / "demo/numbers.py").write_bytes(NUMBERS.replace(b"N9 = 9", b"N9 = 8")),
            r"demo/numbers\.py: demo/one is not applied in it; apply it first",
        ),
        ({}, _wheel_of_another_build, rf"sha256 {sha(NUMBERS)} was installed, but .* holds sha256 {sha(ONE)}"),
        (
            {},
            lambda w: edit(w.site / "demo-1.0.dist-info/METADATA", b"1.0\n", b"1.7\n"),
            r"demo==1\.7: pip could not download it",
        ),
        (
            {},
            lambda w: edit(w.site / "demo-1.0.dist-info/RECORD", b"demo/numbers.py,sha256=", b"demo/numbers.py,md5="),
            "RECORD of demo holds no sha256 of it",
        ),
        ({}, _flow, r"patches\.yaml: .* has to be written as indented lines"),
        ({}, _interrupt, "an interrupted change stands"),
        ({"folder": "nowhere"}, None, "nowhere: no such folder"),
        ({"folder": None}, None, "name a folder by --folder"),
    ],
)
def test_what_cannot_be_a_patch_is_refused_and_nothing_changes(
    edited: World,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, str | None],
    prepare: Callable[[World], object] | None,
    message: str,
) -> None:
    if prepare is not None:
        prepare(edited)
    monkeypatch.setattr(series, "FOLDER", edited.folder)
    before = tree(edited.site), tree(edited.folder)
    file = edited.site / str(arguments.get("file", "demo/numbers.py"))
    folder = arguments.get("folder", edited.folder)
    with pytest.raises(StackError, match=message):
        new(
            str(arguments.get("name", "demo/three")),
            [file],
            str(arguments.get("text", TEXT)),
            folder=None if folder is None else Path(folder),
            path=[str(edited.site)],
        )
    assert (tree(edited.site), tree(edited.folder)) == before


def test_files_of_two_distributions_are_refused(edited: World, index: Path) -> None:
    installed(edited, index, "demo-more", "2.0", {"demo/more.py": EXTRA})
    (edited.site / "demo/more.py").write_bytes(EXTRA_AFTER)
    with pytest.raises(
        StackError, match=r"files of demo 1\.0 and of demo-more 2\.0: one patch changes one distribution"
    ):
        make(edited, "demo/numbers.py", "demo/more.py")


def test_a_file_that_a_shipped_patch_changes_stays_in_the_shipped_folder(
    edited: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(series, "FOLDER", edited.folder)
    mine = tmp_path / "mine"
    mine.mkdir()
    with pytest.raises(StackError, match=r"demo/numbers\.py: the shipped demo/one changes it; one folder holds all"):
        new("demo/three", [edited.site / "demo/numbers.py"], TEXT, folder=mine, path=[str(edited.site)])
    assert not any(mine.iterdir())


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("failing", ["three.patch", "series", "patches.yaml"])
def test_nothing_stays_of_a_patch_that_could_not_be_written(
    edited: World, monkeypatch: pytest.MonkeyPatch, failing: str, first: bool
) -> None:
    if first:
        shutil.rmtree(edited.folder / "demo")
    before = tree(edited.folder)
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        if target.name == failing:
            raise OSError(28, "No space left on device", str(target))
        real(source, target)

    monkeypatch.setattr(module.os, "replace", replace)  # type: ignore[attr-defined]
    with pytest.raises(StackError, match=rf"{failing}: cannot be written \(No space left on device\); nothing was"):
        make(edited)
    assert tree(edited.folder) == before
    assert (edited.folder / "demo").exists() != first


def test_a_folder_without_permission_is_refused(unprivileged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(unprivileged / "patches", unprivileged / "site")
    index = unprivileged / "index"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    with as_root():
        world.folder.mkdir()
        installed(world, index, "demo", "1.0", FILES)
        (world.site / "demo/numbers.py").write_bytes(ONE)
    real = upstream.download

    @contextlib.contextmanager
    def download(*args: str) -> Iterator[upstream.Wheel]:
        with as_root(), real(*args) as found:  # this interpreter may lie where another user may not look
            yield found

    monkeypatch.setattr(module, "download", download)
    monkeypatch.chdir(unprivileged)
    with pytest.raises(StackError, match=r"patches/demo: cannot be written \(Permission denied\); nothing was changed"):
        make(world)


def test_the_command_line_adds_to_the_checkout_and_says_what_is_left(
    edited: World,
    command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    file = str(edited.site / "demo/numbers.py")
    assert command("new", "demo/three", file, "--description", TEXT) == 1
    assert "name a folder by --folder" in capsys.readouterr().err
    link = tmp_path / "link"
    link.symlink_to(edited.folder)
    monkeypatch.setattr(series, "FOLDER", link)
    assert command("new", "demo/three", file, "--description", TEXT) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{edited.folder}/demo/three.patch: written, for demo 1.0\nleft to do:\n")
    assert f"its section '## demo/three' in {edited.folder}/LEDGER.md" in out
    assert 'PATCH = "demo/three"' in out
    assert command("list") == 0
    assert re.search(r"^demo/three +demo +demo 1\.0 +applied +Count on$", capsys.readouterr().out, re.MULTILINE)
