# SPDX-License-Identifier: Apache-2.0
"""A set of patches for an image: what is in it, and that its Dockerfile lines do what the carrier does."""

from __future__ import annotations

import os
import py_compile
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from serving_stack import __version__
from serving_stack.errors import StackError
from serving_stack.patches import export

from .world import (
    BOTH,
    EXTRA,
    EXTRA_AFTER,
    FILES,
    NUMBERS,
    ODD,
    ONE,
    World,
    diff,
    edit,
    install,
    killed,
    sha,
    tree,
)


def build(output: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Run what the snippet runs, where the set lies and for packages that are installed in `site`."""
    snippet = (output / "Dockerfile.snippet").read_text()
    found = re.search(r"^COPY (\S+) (\S+)\nRUN ((?:.*\\\n)*.*)\n\Z", snippet, re.MULTILINE)
    assert found is not None, snippet
    source, target, run = found.groups()
    assert source == f"{output.name}/"
    command = ["/bin/sh", "-c", run.replace(target.rstrip("/"), str(output))]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)


def sum_up(output: Path) -> None:
    """Make `SHA256SUMS` fit what was edited."""
    files = sorted(file for file in output.rglob("*") if file.is_file() and file.name != "SHA256SUMS")
    lines = [f"{sha(file.read_bytes())}  {file.relative_to(output)}\n" for file in files]
    (output / "SHA256SUMS").write_text("".join(lines))


def test_a_set_holds_what_fits_and_says_what_it_is(world: World, tmp_path: Path) -> None:
    output = tmp_path / "set"
    (one,) = export(output, **world.where)
    assert (one.package, one.distribution, one.version) == ("demo", "demo", "1.0")
    assert [patch.name for patch in one.patches] == ["demo/one", "demo/two"]
    files = tree(output)
    assert set(files) == {
        "README.md",
        "Dockerfile.snippet",
        "SHA256SUMS",
        "apply.sh",
        "packages",
        "demo/series",
        "demo/one.patch",
        "demo/two.patch",
        "demo/published.sha256",
        "demo/patched.sha256",
    }
    assert files["demo/series"] == b"one.patch\ntwo.patch\n"
    assert files["demo/one.patch"] == (world.folder / "demo/one.patch").read_bytes()
    assert files["demo/published.sha256"].decode().splitlines() == [
        f"{sha(EXTRA)}  demo/extra.py",
        f"{sha(NUMBERS)}  demo/numbers.py",
    ]
    assert files["demo/patched.sha256"].decode().splitlines() == [
        f"{sha(EXTRA_AFTER)}  demo/extra.py",
        f"{sha(BOTH)}  demo/numbers.py",
    ]
    assert b"demo 1.0" in files["README.md"]
    assert f"serving-stack {__version__}".encode() in files["README.md"]
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=output, check=True)


def test_the_lines_for_a_dockerfile_do_what_apply_does(world: World, tmp_path: Path) -> None:
    for name in FILES:
        py_compile.compile(str(world.site / name), doraise=True)
    other = "demo/__pycache__/numbers2.cpython-39.pyc"
    py_compile.compile(str(world.site / "demo/numbers.py"), str(world.site / other))
    image = tmp_path / "image"
    shutil.copytree(world.site, image)
    export(tmp_path / "set", **world.where)
    done = build(tmp_path / "set", image)
    assert done.returncode == 0, done.stderr
    world.apply()
    assert tree(image) == tree(world.site)
    assert other in tree(image), "another module's"
    done = build(tmp_path / "set", image)
    assert done.returncode != 0, "what is patched is not as published"
    assert tree(image) == tree(world.site)


def test_gnu_patch_makes_the_bytes_that_apply_makes(tmp_path: Path) -> None:
    world = World(tmp_path / "patches", tmp_path / "site")
    contents = {f"demo/{name}.py": pair for name, pair in ODD.items()}
    published = {name: before for name, (before, _) in contents.items()}
    text = b"".join(diff(name, before, after) for name, (before, after) in contents.items())
    world.write({"p.patch": text}, {"demo": {"1.0": published}})
    install(world.site, "demo", "1.0", published)
    export(tmp_path / "set", **world.where)
    done = build(tmp_path / "set", world.site)
    assert done.returncode == 0, done.stdout + done.stderr
    assert tree(world.site / "demo") == {Path(name).name: after for name, (_, after) in contents.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda site, output: edit(site / "demo/extra.py", b"A", b"C"), "demo/extra.py: FAILED"),
        (lambda site, output: (site / "demo/extra.py").unlink(), "demo/extra.py: FAILED open or read"),
        (
            lambda site, output: edit(site / "demo-1.0.dist-info/METADATA", b"1.0\n", b"1.1\n"),
            "demo: version 1.0 expected, 1.1 is installed",
        ),
        (lambda site, output: shutil.rmtree(site / "demo-1.0.dist-info"), "demo: not installed for "),
        (lambda site, output: edit(output / "demo/two.patch", b"+B = 3", b"+B = 4"), "demo/two.patch: FAILED"),
        (lambda site, output: edit(output / "apply.sh", b"set -eu", b"set -u"), "apply.sh: FAILED"),
    ],
)
def test_a_difference_ends_the_build_before_anything_changes(
    world: World, tmp_path: Path, change: Callable[[Path, Path], object], message: str
) -> None:
    output = tmp_path / "set"
    export(output, **world.where)
    change(world.site, output)
    before = tree(world.site)
    done = build(output, world.site)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
    assert tree(world.site) == before


def test_a_result_that_is_not_the_recorded_one_ends_the_build(world: World, tmp_path: Path) -> None:
    output = tmp_path / "set"
    export(output, **world.where)
    edit(output / "demo/two.patch", b"+B = 3", b"+B = 4")
    sum_up(output)
    done = build(output, world.site)
    assert done.returncode != 0
    assert "demo/extra.py: FAILED" in done.stdout


@pytest.mark.parametrize("tool", ["patch", "python3"])
def test_a_tool_that_the_image_lacks_is_named(world: World, tmp_path: Path, tool: str) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in {"patch", "python3", "sha256sum", "sh", "dirname"} - {tool}:
        (commands / name).symlink_to(shutil.which(name) or name)
    output = tmp_path / "set"
    export(output, **world.where)
    done = subprocess.run(
        ["sh", "apply.sh"], cwd=output, env={"PATH": str(commands)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == f"apply.sh: {tool} is not in this image\n"


@pytest.mark.parametrize("given", ["demo==1.0", "Demo==1"])
def test_a_given_version_makes_the_set_that_its_files_make(world: World, tmp_path: Path, given: str) -> None:
    for folder in ("found", "given"):
        (tmp_path / folder).mkdir()
    export(tmp_path / "found/set", **world.where)
    export(tmp_path / "given/set", versions=[given], folder=world.folder, path=[])
    assert tree(tmp_path / "given/set") == tree(tmp_path / "found/set")


def test_a_local_label_is_what_the_image_must_have(world: World, tmp_path: Path) -> None:
    export(tmp_path / "set", versions=["demo==1.0+cu130"], folder=world.folder, path=[])
    done = build(tmp_path / "set", world.site)
    assert "demo: version 1.0+cu130 expected, 1.0 is installed" in done.stderr
    (world.site / "demo-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: demo\nVersion: 1.0+cu130\n")
    assert build(tmp_path / "set", world.site).returncode == 0
    assert world.read("demo/numbers.py") == BOTH


@pytest.mark.parametrize("site", ["usr/lib/python3/dist-packages", "opt/venv/lib/python3.12/site-packages", "."])
def test_an_unpacked_image_is_searched_for_what_is_installed(world: World, tmp_path: Path, site: str) -> None:
    root = tmp_path / "root"
    shutil.copytree(world.site, root / site, dirs_exist_ok=True)
    (root / "usr/lib").mkdir(parents=True, exist_ok=True)
    (root / "lib").symlink_to("usr/lib")
    (root / "elsewhere").mkdir()
    (root / "elsewhere/site-packages").symlink_to(world.site)
    (one,) = export(tmp_path / "set", image_root=root, folder=world.folder)
    assert (one.distribution, one.version) == ("demo", "1.0")


def test_an_image_with_two_installations_is_refused_by_both_places(world: World, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for site in ("usr/lib/python3/dist-packages", "opt/venv/lib/python3.12/site-packages"):
        shutil.copytree(world.site, root / site)
    with pytest.raises(StackError, match=r"demo: installed several times, choose one: .*/site-packages, .*/dist"):
        export(tmp_path / "set", image_root=root, folder=world.folder)
    export(tmp_path / "set", image_root=root / "opt", folder=world.folder)


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        (["demo"], "version 'demo': NAME==VERSION expected"),
        (["demo==new"], "version 'demo==new': NAME==VERSION expected"),
        (["demmo==1.0"], "distribution 'demmo': no patches are carried for it; there are some for demo, demo-cpu"),
        (["demo==3.0"], r"demo 3\.0: no patch is for this version: demo/one: demo <2,>=1 expected, 3\.0 found"),
        (["demo==1.5"], r"demo 1\.5: no patch is for this version: .*demo 1\.0 expected by hash, 1\.5 found"),
        (["demo==1.0", "demo-cpu==1.0"], "demo==1.0 and demo-cpu==1.0 both provide demo"),
        (["demo==1.0", "demo==1.1"], "demo==1.0 and demo==1.1 both provide demo"),
    ],
)
def test_a_version_that_cannot_be_exported_is_named(
    world: World, tmp_path: Path, versions: list[str], message: str
) -> None:
    with pytest.raises(StackError, match=message):
        export(tmp_path / "set", versions=versions, folder=world.folder)
    assert not (tmp_path / "set").exists()


def _nothing(world: World) -> None:
    shutil.rmtree(world.site)
    world.site.mkdir()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda world: world.apply(), r"demo/one: already patched \(demo 1\.0\)"),
        (lambda world: world.apply(patch="demo/one"), r"demo/one: already patched \(demo 1\.0\)"),
        (
            lambda world: edit(world.site / "demo/extra.py", EXTRA, EXTRA_AFTER),
            r"demo/two: applied in demo/extra\.py only",
        ),
        (lambda world: edit(world.site / "demo/extra.py", b"A", b"C"), rf"demo/two: .* {sha(EXTRA)} .*, found "),
        (lambda world: (world.site / "demo/extra.py").unlink(), r"demo/two: .*extra\.py: no such file"),
        (lambda world: killed(world, "file renamed", 1, "apply"), "an interrupted change stands there"),
        (
            lambda world: edit(world.site / "demo-1.0.dist-info/METADATA", b"1.0\n", b"2.0\n"),
            r"demo 2\.0: no patch is for",
        ),
        (_nothing, "nothing to export, for none of demo, demo-cpu is installed there"),
    ],
)
def test_an_image_that_is_not_as_published_is_refused(
    world: World, tmp_path: Path, prepare: Callable[[World], object], message: str
) -> None:
    prepare(world)
    before = tree(world.site)
    for source in ({"image_root": world.site}, {"path": [str(world.site)]}):
        with pytest.raises(StackError, match=f"(?s){message}"):
            export(tmp_path / "set", folder=world.folder, **source)
    assert tree(world.site) == before
    assert not (tmp_path / "set").exists()


def test_an_image_root_that_is_not_there_is_named(world: World, tmp_path: Path) -> None:
    with pytest.raises(StackError, match="/nowhere: no such folder"):
        export(tmp_path / "set", image_root=tmp_path / "nowhere", folder=world.folder)


def test_what_is_for_other_versions_or_not_there_is_left_out_and_said(world: World, tmp_path: Path) -> None:
    world.write(
        {"p.patch": diff("other/a.py", EXTRA, EXTRA_AFTER)}, {"other": {"1.5": {"other/a.py": EXTRA}}}, package="other"
    )
    manifest = world.folder / "demo/patches.yaml"
    edit(manifest, b"two.patch: {versions: '>=1,<2'}", b"two.patch: {versions: '==2.0'}")
    text = manifest.read_text().split("published:")[0]
    manifest.write_text(
        f"{text}published:\n  demo:\n    '1.0': {{demo/numbers.py: {sha(NUMBERS)}}}\n"
        f"    '2.0': {{demo/numbers.py: {sha(ONE)}, demo/extra.py: {sha(EXTRA)}}}\n"
        f"patched:\n  demo:\n    '1.0': {{demo/numbers.py: {sha(ONE)}}}\n"
        f"    '2.0': {{demo/numbers.py: {sha(BOTH)}, demo/extra.py: {sha(EXTRA_AFTER)}}}\n"
    )
    said: list[str] = []
    (one,) = export(tmp_path / "set", **world.where, say=said.append)
    assert [patch.name for patch in one.patches] == ["demo/one"]
    assert said == ["other: other not installed, left out", "demo/two: demo ==2.0 expected, 1.0 found, left out"]
    assert build(tmp_path / "set", world.site).returncode == 0
    assert world.read("demo/numbers.py") == ONE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("full", "full: not empty"),
        ("file", "file: not a folder"),
        ("nowhere/set", "nowhere/set: cannot be written .No such file or directory"),
        ("a set", "a set: the folder's name goes into a Dockerfile"),
    ],
)
def test_a_place_that_a_set_cannot_be_written_to_is_named(
    world: World, tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(StackError, match=message):
        export(tmp_path / name, **world.where)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("exists", [True, False])
def test_nothing_stays_of_a_set_that_could_not_be_written(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    output = tmp_path / "set"
    if exists:
        output.mkdir()
    real = Path.write_bytes

    def write_bytes(path: Path, content: bytes) -> int:
        if path.name == "patched.sha256":
            raise OSError(28, "No space left on device", str(path))
        return real(path, content)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(StackError, match=r"patched\.sha256: cannot be written \(No space left on device\)"):
        export(output, **world.where)
    assert output.exists() == exists
    assert not exists or not any(output.iterdir())


def test_the_command_line_exports(
    world: World, command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "set"
    assert command("export", "--output", str(output)) == 0
    assert capsys.readouterr().out.splitlines() == [
        "demo: for demo 1.0: demo/one, demo/two",
        f"written to {output}; what to do with it is in {output}/README.md",
    ]
    assert command("export", "--output", str(output)) == 1
    assert command("export", "--output", str(tmp_path / "b"), "--version", "demo-cpu==1.0") == 0
    assert command("export", "--output", str(tmp_path / "c"), "--image-root", str(world.site)) == 0
    with pytest.raises(SystemExit, match="2"):
        command("export", "--output", str(tmp_path / "d"), "--version", "demo==1.0", "--image-root", str(world.site))
