# SPDX-License-Identifier: Apache-2.0
"""Killed half way, refused by the file system, two processes at once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
from pathlib import Path
from typing import TextIO

import pytest

from serving_stack.errors import StackError
from serving_stack.patches import State
from serving_stack.patches import _journal as journal

from .world import BOTH, EXTRA, EXTRA_AFTER, NUMBERS, World, killed, tree


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
