# SPDX-License-Identifier: Apache-2.0
"""The shipped patches as a whole: each valid, in the ledger, and with a test file of its own."""

from __future__ import annotations

import datetime
import functools
import re
from collections import Counter
from pathlib import Path

import pytest
from packaging.version import Version

from serving_stack.install import lock
from serving_stack.patches import Check, Patch, State, Verdict, check_upstream, load_all, statuses
from serving_stack.patches import _series as series

PATCHES = load_all()
PARTS = ("Why", "How", "Related thread", "What makes it unnecessary", "Checked against")
#: A plugin's overrides at run time stand there as well, as `PLUGIN: WHAT`; their tests are the plugin's.
OVERRIDE = ": "
CHECKED = re.compile(r"^\*\*Checked against\.\*\* (\S+) (\S+) \((\d{4}-\d\d-\d\d)\): (.+)\.$", re.MULTILINE)


def sections() -> dict[str, str]:
    """Return the ledger's text by patch."""
    ledger = (series.FOLDER / "LEDGER.md").read_text("utf-8")
    return {text.splitlines()[0]: text for text in ledger.split("\n## ")[1:]}


def checked(patch: Patch) -> tuple[str, str, str, str]:
    """Return which distribution and version the ledger says a patch was checked against, when, and how it stood."""
    found = CHECKED.search(sections()[patch.name])
    assert found is not None, f"{patch.name}: **Checked against.** DISTRIBUTION VERSION (DATE): STATE."
    distribution, version, date, verdict = found.groups()
    return distribution, version, date, verdict


def test_every_patch_stands_in_the_ledger() -> None:
    assert PATCHES
    patches = [name for name in sections() if OVERRIDE not in name]
    assert patches == sorted(patch.name for patch in PATCHES)
    assert list(sections()) == [*patches, *sorted(name for name in sections() if OVERRIDE in name)]
    for name, text in sections().items():
        parts = PARTS[:-1] if OVERRIDE in name else PARTS
        assert re.findall(r"^\*\*(.+)\.\*\*", text, re.MULTILINE) == list(parts), name


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_the_ledger_is_not_older_than_what_is_pinned(patch: Patch) -> None:
    distribution, version, date, verdict = checked(patch)
    assert distribution in patch.published
    pins = [pin for name, pin in lock("cpu").items() if name in patch.published]
    assert pins
    assert all(Version(version) >= Version(pin) for pin in pins), pins
    assert verdict in [one.value for one in Verdict]
    assert datetime.date.fromisoformat(date) <= datetime.date.today() + datetime.timedelta(days=1)


@functools.cache
def newest(distribution: str) -> Check:
    (check,) = check_upstream(package=distribution, say=print)
    return check


@pytest.mark.newest
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_the_ledger_says_how_the_patch_stands_on_the_newest_upstream(patch: Patch) -> None:
    distribution, version, _, verdict = checked(patch)
    check = newest(distribution)
    (finding,) = (finding for finding in check.findings if finding.patch.name == patch.name)
    print(f"{patch.name}: {check.distribution} {check.version}: {finding.verdict.value}", *finding.notes, sep="\n  ")
    assert (version, verdict) == (check.version, finding.verdict.value), "LEDGER.md is out of date"
    assert finding.verdict in (Verdict.NEEDED, Verdict.OFFSET), "something is to be done"


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
