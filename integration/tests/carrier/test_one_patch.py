# SPDX-License-Identifier: Apache-2.0
"""One patch alone, while others of the same files stay as they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_stack.errors import StackError
from serving_stack.patches import State
from serving_stack.patches._diff import Entangled, FileDiff, parse, rebase, unified

from .world import BOTH, EXTRA_AFTER, NUMBERS, ONE, World, diff, install, tree

TWO_ONLY = NUMBERS.replace(b"N15 = 15\n", b"")


def test_the_first_of_two_goes_and_the_second_stays(world: World) -> None:
    world.apply()
    patched = tree(world.site)
    assert world.revert(patch="demo/one") == ["demo/one"]
    assert world.said[-1] == "demo/one: reverted (demo 1.0)"
    # The first adds a line, so the second now stands a line higher than its diff says.
    assert world.read("demo/numbers.py") == TWO_ONLY
    assert world.read("demo/extra.py") == EXTRA_AFTER
    assert world.states() == [State.NOT_APPLIED, State.APPLIED]
    assert world.revert(patch="demo/one") == []
    assert world.apply(patch="demo/one") == ["demo/one"]
    assert tree(world.site) == patched


def test_the_second_alone_is_applied_and_reverted(world: World) -> None:
    published = tree(world.site)
    assert world.apply(patch="demo/two") == ["demo/two"]
    assert world.read("demo/numbers.py") == TWO_ONLY
    assert world.states() == [State.NOT_APPLIED, State.APPLIED]
    assert world.apply(patch="demo/two") == []
    world.apply()
    assert world.read("demo/numbers.py") == BOTH
    world.revert(patch="demo/two")
    assert world.read("demo/numbers.py") == ONE
    world.revert()
    assert tree(world.site) == published


def test_a_patch_that_stands_on_another_cannot_be_alone(tmp_path: Path) -> None:
    world = World(tmp_path / "patches", tmp_path / "site")
    after = ONE.replace(b"# new\n", b"# newer\n")
    world.write(
        {"one.patch": diff("demo/n.py", NUMBERS, ONE), "two.patch": diff("demo/n.py", ONE, after)},
        {"demo": {"1.0": {"demo/n.py": NUMBERS}}},
    )
    install(world.site, "demo", "1.0", {"demo/n.py": NUMBERS})
    message = r"demo/two stands on lines of demo/one in demo/n\.py"
    with pytest.raises(StackError, match=message):
        world.apply(patch="demo/two")
    assert world.read("demo/n.py") == NUMBERS
    world.apply()
    with pytest.raises(StackError, match=message):
        world.revert(patch="demo/one")
    assert world.read("demo/n.py") == after
    assert world.revert(patch="demo/two") == ["demo/two"]
    assert world.revert(patch="demo/one") == ["demo/one"]
    assert world.read("demo/n.py") == NUMBERS


def test_a_patch_of_other_files_is_not_held_up_by_a_modified_one(world: World) -> None:
    (world.site / "demo/extra.py").write_bytes(b"mine\n")
    assert world.apply(patch="demo/one") == ["demo/one"]
    assert world.read("demo/extra.py") == b"mine\n"
    with pytest.raises(StackError, match="demo/two: file modified"):
        world.apply(patch="demo/two")


def test_an_unknown_patch_is_named(world: World) -> None:
    for act in (world.apply, world.revert):
        with pytest.raises(StackError, match="patch 'demo/three': no such patch; there are demo/one, demo/two"):
            act(patch="demo/three")


def test_the_command_line_takes_one_patch_or_one_package(world: World, command: Callable[..., int]) -> None:
    assert command("apply") == 0
    assert command("revert", "--patch", "demo/one") == 0
    assert world.read("demo/numbers.py") == TWO_ONLY
    assert command("apply", "--patch", "demo/one") == 0
    assert world.read("demo/numbers.py") == BOTH
    with pytest.raises(SystemExit, match="2"):
        command("apply", "--patch", "demo/one", "--package", "demo")


@st.composite
def chains(draw: st.DrawFn) -> list[list[bytes]]:
    """Three or four contents, each line different from any other, each content made from the one before it."""
    fresh = map(b"%d\n".__mod__, itertools.count())
    contents = [[next(fresh) for _ in range(draw(st.integers(1, 30)))]]
    for _ in range(draw(st.integers(2, 3))):
        lines = list(contents[-1])
        for _ in range(draw(st.integers(1, 3))):
            start = draw(st.integers(0, len(lines)))
            lines[start : start + draw(st.integers(0, 3))] = [next(fresh) for _ in range(draw(st.integers(0, 3)))]
        contents.append(lines)
    return contents


@given(chains(), st.data())
def test_any_of_a_chain_go_where_the_whole_chain_puts_them(contents: list[list[bytes]], data: st.DataObject) -> None:
    joined = [b"".join(lines) for lines in contents]
    pairs = [(before, after) for before, after in itertools.pairwise(joined) if before != after]
    diffs: list[FileDiff] = [parse(unified("demo/f.py", *pair), "demo/p")[0] for pair in pairs]
    wanted = data.draw(st.lists(st.booleans(), min_size=len(diffs), max_size=len(diffs)))
    number = None
    try:
        chosen = rebase(diffs, wanted)
    except Entangled as error:
        number = error.number
    if number is not None:
        assert wanted[number]
        assert not all(wanted[:number])
        return
    content = joined[0]
    for change in chosen:
        content = change.apply(content)
    lines = content.splitlines(keepends=True)
    expected = set(contents[0])
    for (before, after), keep in zip(pairs, wanted, strict=True):
        old, new = set(before.splitlines(keepends=True)), set(after.splitlines(keepends=True))
        expected = (expected - (old - new)) | (new - old) if keep else expected
    assert sorted(lines) == sorted(expected)
    shared = set(lines) & set(contents[-1])
    assert [line for line in lines if line in shared] == [line for line in contents[-1] if line in shared]
    for change in reversed(chosen):
        content = change.reverse(content)
    assert content == joined[0]
