# SPDX-License-Identifier: Apache-2.0
"""Apply and revert: what is in the files, what is said, which state is seen."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from serving_stack.patches import State, contents, missing, state
from serving_stack.patches import _journal as journal

from .world import BOTH, EXTRA, EXTRA_AFTER, FILES, ODD, ONE, World, diff, install, tree


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
    assert state(world.patch("demo/two"), **world.where) is State.NOT_APPLIED
    assert [s.detail for s in missing(**world.where)] == ["", "applied in demo/extra.py only"]
    assert world.revert() == ["demo/two"]
    assert world.read("demo/extra.py") == EXTRA


def test_contents_are_the_same_whether_or_not_the_patch_is_applied(world: World) -> None:
    for _ in range(2):
        found = contents(world.patch("demo/two"), **world.where)
        assert {name: (c.before, c.after) for name, c in found.items()} == {
            "demo/numbers.py": (ONE, BOTH),
            "demo/extra.py": (EXTRA, EXTRA_AFTER),
        }
        world.apply()


def test_missing_names_what_a_launcher_must_know(world: World) -> None:
    assert [s.patch.name for s in missing(**world.where)] == ["demo/one", "demo/two"]
    world.apply()
    assert missing(**world.where) == []


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
    assert missing(**world.where) == []


@pytest.mark.parametrize(("before", "after"), ODD.values(), ids=ODD)
def test_line_ends_and_odd_bytes_survive_both_ways(tmp_path: Path, before: bytes, after: bytes) -> None:
    world = World(tmp_path / "patches", tmp_path / "site")
    world.write({"p.patch": diff("demo/f.py", before, after)}, {"demo": {"1.0": {"demo/f.py": before}}})
    install(world.site, "demo", "1.0", {"demo/f.py": before})
    world.apply()
    assert world.read("demo/f.py") == after
    world.revert()
    assert world.read("demo/f.py") == before


def test_no_upstream_is_imported(world: World) -> None:
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from serving_stack.patches import apply_all
        assert apply_all(folder=Path(sys.argv[1]), path=[sys.argv[2]])
        assert "demo" not in sys.modules
    """)
    subprocess.run([sys.executable, "-c", script, str(world.folder), str(world.site)], check=True)
