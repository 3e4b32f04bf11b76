# SPDX-License-Identifier: Apache-2.0
"""How patches stand on a newer upstream, which the real pip fetches from a folder of wheels."""

from __future__ import annotations

import importlib.util
import subprocess
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from serving_stack.errors import StackError
from serving_stack.patches import Verdict, check_upstream
from serving_stack.patches._diff import find, parse, split, unified

from .world import BOTH, EXTRA, EXTRA_AFTER, FILES, NUMBERS, ONE, World, diff, edit, sha, tree, wheel

TOP = b"# one\n# two\n# three\n# four\n"
LONGER = b"N8 = 8\n" + TOP


@pytest.mark.parametrize(
    ("numbers", "extra", "status", "expected"),
    [
        pytest.param(
            NUMBERS.replace(b"N20 = 20\n", b""),
            EXTRA,
            0,
            """\
            demo/one: still needed
            demo/two: still needed
            """,
            id="needed",
        ),
        pytest.param(
            NUMBERS.replace(b"N8 = 8\n", LONGER).replace(b"N10 = 10\n", b""),
            EXTRA,
            0,
            # The first patch adds a line, which the second counts with.
            """\
            demo/one: still needed
            demo/two: applies with offset
                demo/numbers.py: hunk 1 of 1: at line 16, 3 lines below its own
                demo/extra.py: hunk 1 of 1: at line 1, its own
            """,
            id="offset",
        ),
        pytest.param(
            NUMBERS.replace(b"N14 = 14\n", b"N14 = 15\n"),
            EXTRA,
            1,
            """\
            demo/one: still needed
            demo/two: conflicts
                demo/numbers.py: hunk 1 of 1, meant for line 13, finds no place:
                 N12 = 12
                 N13 = 13
                 N14 = 14
                -N15 = 15
                 N16 = 16
                 N17 = 17
                 N18 = 18
                demo/extra.py: hunk 1 of 1: at line 1, its own
            """,
            id="conflict",
        ),
        pytest.param(
            NUMBERS,
            None,
            1,
            """\
            demo/one: still needed
            demo/two: conflicts
                demo/numbers.py: hunk 1 of 1: at line 13, its own
                demo/extra.py: no such file
                demo/extra.py: hunk 1 of 1, meant for line 1, finds no place:
                 A = 1
                -B = 2
                +B = 3
            """,
            id="file-gone",
        ),
        pytest.param(
            BOTH.replace(b"N8 = 8\n", LONGER),
            EXTRA_AFTER,
            1,
            """\
            demo/one: already upstream
                demo/numbers.py: hunk 1 of 1: its change is there already, at line 1
            demo/two: already upstream
                demo/numbers.py: hunk 1 of 1: its change is there already, at line 17
                demo/extra.py: hunk 1 of 1: its change is there already, at line 1
            """,
            id="upstream",
        ),
        pytest.param(
            ONE,
            EXTRA_AFTER,
            1,
            """\
            demo/one: already upstream
                demo/numbers.py: hunk 1 of 1: its change is there already, at line 1
            demo/two: conflicts
                demo/numbers.py: hunk 1 of 1: at line 13, its own
                demo/extra.py: hunk 1 of 1, meant for line 1, finds no place:
                 A = 1
                -B = 2
                +B = 3
                demo/extra.py: hunk 1 of 1: its change is there already, at line 1
            """,
            id="half-upstream",
        ),
    ],
)
def test_each_patch_is_judged(
    world: World,
    command: Callable[..., int],
    index: Path,
    capsys: pytest.CaptureFixture[str],
    numbers: bytes,
    extra: bytes | None,
    status: int,
    expected: str,
) -> None:
    world.apply()
    before = tree(world.site)
    files = {"demo/numbers.py": numbers, **({} if extra is None else {"demo/extra.py": extra})}
    wheel(index, "demo", "1.1", files)
    assert command("check-upstream") == status
    head = "fetching demo (newest)\ndemo 1.1 (demo-1.1-py3-none-any.whl)\n"
    assert capsys.readouterr().out == head + textwrap.indent(textwrap.dedent(expected), "  ")
    assert tree(world.site) == before


def test_of_several_places_the_nearest_counts_and_that_is_said(tmp_path: Path, index: Path) -> None:
    world = World(tmp_path / "patches", tmp_path / "site")
    block = b"".join(b"line %d\n" % n for n in range(7))
    before = NUMBERS + block + NUMBERS
    change = diff("demo/n.py", before, before.replace(b"line 3\n", b"line 4\n"))
    world.write({"p.patch": change}, {"demo": {"1.0": {"demo/n.py": before}}})
    wheel(index, "demo", "2.0", {"demo/n.py": block + TOP + before + block})
    ((finding,),) = [check.findings for check in check_upstream(**world.where)]
    assert finding.verdict is Verdict.OFFSET
    assert finding.notes == (
        "demo/n.py: hunk 1 of 1: at line 32, 11 lines below its own",
        "demo/n.py: hunk 1 of 1: 3 places hold its lines; line 32 is the nearest to its own",
    )


def test_the_newest_release_is_the_default_and_any_other_can_be_named(world: World, index: Path) -> None:
    for version in ("1.0", "1.9", "1.10", "2.0rc1", "1.9+cu130"):
        wheel(index, "demo", version, FILES)
    assert [check.wheel for check in check_upstream(**world.where)] == ["demo-1.10-py3-none-any.whl"]
    for version in ("2.0rc1", "1.9+cu130", "1.0"):
        assert [check.version for check in check_upstream(version, **world.where)] == [version]


def test_what_is_fetched_is_the_named_the_installed_or_the_first_distribution(world: World, index: Path) -> None:
    wheel(index, "demo", "1.1", FILES)
    wheel(index, "demo-cpu", "1.2", FILES)

    def fetched(package: str | None) -> list[tuple[str, str]]:
        return [(check.distribution, check.version) for check in check_upstream(None, package, **world.where)]

    assert fetched("Demo_CPU") == [("demo-cpu", "1.2")]
    (world.site / "demo-1.0.dist-info").rename(world.site / "demo_cpu-1.0.dist-info")
    edit(world.site / "demo_cpu-1.0.dist-info/METADATA", b"Name: demo", b"Name: demo-cpu")
    assert fetched(None) == [("demo-cpu", "1.2")]
    assert fetched("demo") == [("demo", "1.1")]
    (world.site / "demo_cpu-1.0.dist-info/METADATA").unlink()
    (world.site / "demo_cpu-1.0.dist-info/RECORD").unlink()
    (world.site / "demo_cpu-1.0.dist-info").rmdir()
    assert fetched(None) == [("demo", "1.1")]


def test_patches_for_other_versions_are_left_out(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path / "patches", tmp_path / "site")
    newer = TOP + NUMBERS
    world.write(
        {"new.patch": diff("demo/n.py", newer, TOP + ONE), "old.patch": diff("demo/n.py", NUMBERS, BOTH)},
        {"demo": {"1.0": {"demo/n.py": NUMBERS}, "2.0": {"demo/n.py": newer}}},
        versions="==1.0",
    )
    manifest = world.folder / "demo/patches.yaml"
    edit(manifest, b"new.patch: {versions: '==1.0'}", b"new.patch: {versions: '==2.0'}")
    edit(manifest, sha(BOTH).encode(), sha(BOTH).encode())
    text = manifest.read_text().split("patched:")[0]
    manifest.write_text(
        f"{text}patched:\n  demo:\n    '1.0':\n      demo/n.py: {sha(BOTH)}\n"
        f"    '2.0':\n      demo/n.py: {sha(TOP + ONE)}\n"
    )
    wheel(index, "demo", "1.0", {"demo/n.py": NUMBERS})
    wheel(index, "demo", "3.0", {"demo/n.py": newer})
    (check,) = check_upstream(**world.where)
    assert [(f.patch.name, f.verdict) for f in check.findings] == [("demo/new", Verdict.NEEDED)]
    assert [patch.name for patch in check.left_out] == ["demo/old"]
    (check,) = check_upstream("1.0", **world.where)
    assert [(f.patch.name, f.verdict) for f in check.findings] == [("demo/old", Verdict.NEEDED)]


def test_a_file_in_the_data_folder_of_a_wheel_is_found(world: World, index: Path) -> None:
    wheel(index, "demo", "1.1", {f"demo-1.1.data/purelib/{name}": content for name, content in FILES.items()})
    (check,) = check_upstream(**world.where)
    assert {finding.verdict for finding in check.findings} == {Verdict.NEEDED}


def test_what_cannot_be_fetched_is_named_with_what_pip_says(world: World, index: Path) -> None:
    wheel(index, "demo", "1.1", FILES)
    with pytest.raises(StackError, match=r"demo==7\.7: pip could not download it:\n(?s:.*)from versions: 1\.1"):
        check_upstream("7.7", **world.where)
    with pytest.raises(StackError, match="version 'seven': not a version"):
        check_upstream("seven", **world.where)
    (index / "demo-1.2-py3-none-any.whl").write_bytes(b"no zip")
    with pytest.raises(
        StackError, match=r"demo==1\.2: pip could not download it|demo-1\.2-py3-none-any\.whl: not a wheel"
    ):
        check_upstream("1.2", **world.where)


def test_one_version_for_several_packages_is_refused_with_the_choice(world: World, index: Path) -> None:
    world.write(
        {"p.patch": diff("other/a.py", EXTRA, EXTRA_AFTER)},
        {"other": {"1.5": {"other/a.py": EXTRA}}},
        package="other",
    )
    with pytest.raises(StackError, match=r"version '1\.1': of which package\? Choose one by --package: demo, other"):
        check_upstream("1.1", **world.where)
    wheel(index, "other", "1.1", {"other/a.py": EXTRA})
    assert len(check_upstream("1.1", "other", **world.where)) == 1


def test_an_environment_without_pip_is_told_how_to_get_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else real(name, *rest))
    with pytest.raises(StackError, match=r"demo: no pip in this environment to fetch it\. Cure: .* -m ensurepip"):
        check_upstream(**world.where)


def agrees_with_gnu_patch(folder: Path, before: bytes, after: bytes, newer: bytes) -> bool:
    """Assert that the hunks from `before` to `after` go where GNU patch puts them in `newer`; return whether all do."""
    text = unified("f", before, after)
    (change,) = parse(text, "demo/p")
    places = find(change.hunks, split(newer))
    (folder / "f").write_bytes(newer)
    command = ["patch", "--force", "--fuzz=0", "--binary", "--silent", "--reject-file=-", "--output=out", "f"]
    done = subprocess.run(command, cwd=folder, input=text, capture_output=True, check=False)
    assert (done.returncode == 0) == all(places), done.stdout
    if all(places):
        hunks = [replace(hunk, index=place.index) for hunk, place in zip(change.hunks, places, strict=True) if place]
        assert replace(change, hunks=tuple(hunks)).apply(newer) == (folder / "out").read_bytes()
    return all(places)


#: Few, so that a hunk's lines are in several places.
LINE = st.sampled_from([b"a\n", b"b\n", b"\n", b"c\r\n", b"c\n"])


@st.composite
def edited(draw: st.DrawFn, lines: list[bytes]) -> list[bytes]:
    lines = list(lines)
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(lines)))
        lines[start : start + draw(st.integers(0, 2))] = draw(st.lists(LINE, max_size=4))
    return lines


@given(st.data())
def test_hunks_are_found_where_gnu_patch_finds_them(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lines = data.draw(st.lists(LINE, min_size=4, max_size=25))
    after, others = data.draw(edited(lines)), data.draw(edited(lines))
    before, newer = (b"".join(text).removesuffix(b"\n" * data.draw(st.integers(0, 1))) for text in (lines, others))
    # Not of `after`: GNU patch puts a last line without an end into the middle of a file, and an end to it.
    assume(before != b"".join(after) and before and after and newer)
    agrees_with_gnu_patch(tmp_path_factory.mktemp("gnu"), before, b"".join(after), newer)


def lines(name: str, count: int) -> bytes:
    return b"".join(f"{name}{number}\n".encode() for number in range(count))


A, B, P = lines("a", 7), lines("b", 7), lines("p", 10)
A_AFTER, B_AFTER = (block.replace(b"3\n", b"three\n") for block in (A, B))


@pytest.mark.parametrize(
    ("before", "after", "newer", "stands"),
    [
        pytest.param(
            lines("p", 10) + A, lines("p", 10) + A_AFTER, lines("q", 2) + A + lines("q", 9) + A, True, id="tie"
        ),
        pytest.param(
            P + A + lines("r", 23) + B,
            P + A_AFTER + lines("r", 23) + B_AFTER,
            lines("p", 30) + A + lines("q", 5) + B + lines("q", 13) + B,
            True,
            id="as-far-as-the-hunk-above",
        ),
        pytest.param(A, A.replace(b"a1\n", b"one\n"), b"top\n" + A, False, id="begins-the-file"),
        pytest.param(A, A.replace(b"a5\n", b"five\n"), A + b"end\n", False, id="ends-the-file"),
        pytest.param(A, A.replace(b"a5\n", b"five\n"), b"top\n" + A, True, id="still-ends-the-file"),
        pytest.param(A + P + B, A_AFTER + P + B_AFTER, B + P + A, False, id="in-another-order"),
    ],
)
def test_gnu_patch_and_we_agree(tmp_path: Path, before: bytes, after: bytes, newer: bytes, stands: bool) -> None:
    assert agrees_with_gnu_patch(tmp_path, before, after, newer) == stands
