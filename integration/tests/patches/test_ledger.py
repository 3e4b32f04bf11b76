# SPDX-License-Identifier: Apache-2.0
"""The shipped patches as a whole: each valid, in the ledger, and with a test file of its own."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from serving_stack.patches import State, load_all, statuses
from serving_stack.patches import _series as series

PATCHES = load_all()


def test_every_patch_stands_in_the_ledger() -> None:
    assert PATCHES
    ledger = (series.FOLDER / "LEDGER.md").read_text("utf-8")
    headings = [line.removeprefix("## ") for line in ledger.splitlines() if line.startswith("## ")]
    assert headings == sorted(patch.name for patch in PATCHES)
    for section in ledger.split("\n## ")[1:]:
        for part in ("**Why.**", "**How.**", "**Related thread.**", "**What makes it unnecessary.**"):
            assert part in section, section.splitlines()[0]


def test_every_patch_has_one_test_file() -> None:
    files = [file.read_text("utf-8") for file in Path(__file__).parent.glob("test_*.py")]
    named = Counter(name for text in files for name in re.findall(r'^PATCH = "(.+)"$', text, re.MULTILINE))
    assert named == Counter(patch.name for patch in PATCHES)


def test_every_patch_fits_every_distribution_in_its_range() -> None:
    for patch in PATCHES:
        for distribution, by_version in patch.published.items():
            within = [version for version in by_version if patch.versions.contains(version, prereleases=True)]
            assert within, (patch.name, distribution)
            assert [patch.unfit(distribution, version) for version in within] == [""] * len(within)


def test_the_recorded_hashes_are_those_of_the_installed_files() -> None:
    for status in statuses():
        assert status.state is State.APPLIED, status
        recorded = status.patch.patched[status.distribution][status.version]
        assert dict(status.hashes) == {name: recorded[name] for name in status.patch.files}
