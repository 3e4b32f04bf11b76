# SPDX-License-Identifier: Apache-2.0
"""Published wheels: fetch one, and say how our patches stand on it."""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import logging
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from ..errors import StackError
from ._carrier import find_installed, select
from ._diff import FileDiff, Hunk, Place, find, split
from ._series import Patch, load_all

_logger = logging.getLogger(__name__)


class Verdict(enum.Enum):
    """How a patch stands on an upstream."""

    NEEDED = "still needed"  #: every hunk stands at its own line
    OFFSET = "applies with offset"  #: every hunk stands, some at another line
    CONFLICTS = "conflicts"  #: a hunk finds no place, or a file is gone
    UPSTREAM = "already upstream"  #: the changed lines are there, those to be changed are not


@dataclass(frozen=True)
class Finding:
    """One patch on one upstream."""

    patch: Patch
    verdict: Verdict
    notes: tuple[str, ...]  #: where hunks stand, and the hunks that do not, as diffs; several lines each


@dataclass(frozen=True)
class Check:
    """The patches of one package on one upstream."""

    package: str
    distribution: str
    version: str
    wheel: str  #: the file name of what was looked at
    findings: tuple[Finding, ...]
    left_out: tuple[Patch, ...]  #: patches for other versions only


@dataclass(frozen=True)
class Wheel:
    """A wheel on this machine."""

    path: Path
    version: str

    def read(self, name: str) -> bytes | None:
        """Return the file that is installed as `name`, or None; raise `StackError` where the wheel is damaged."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                for member in archive.namelist():
                    folder, _, rest = member.partition(".data/")
                    if member == name or ("/" not in folder and rest in (f"purelib/{name}", f"platlib/{name}")):
                        return archive.read(member)
        except (OSError, zipfile.BadZipFile) as error:
            raise StackError(f"{self.path.name}: not a wheel that can be read: {error}") from error
        return None


@contextlib.contextmanager
def download(distribution: str, version: str | None = None) -> Iterator[Wheel]:
    """Fetch a wheel for this interpreter by pip, from where the user's pip looks; it is gone in the end.

    Without `version` it is the newest release that pip finds a wheel of.

    Raises:
        StackError: pip is not in this environment, or does not get it.
    """
    wanted = distribution if version is None else f"{distribution}=={version}"
    if importlib.util.find_spec("pip") is None:
        raise StackError(f"{wanted}: no pip in this environment to fetch it. Cure: {sys.executable} -m ensurepip")
    with tempfile.TemporaryDirectory() as folder:
        options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "download", *options, "--progress-bar=off", "--dest", folder, wanted]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
        files = list(Path(folder).glob("*.whl"))
        if done.returncode or len(files) != 1:
            said = (done.stderr.strip() or done.stdout.strip())[-2000:]
            raise StackError(f"{wanted}: pip could not download it:\n{said}")
        try:
            found = parse_wheel_filename(files[0].name)[1]
        except (InvalidWheelFilename, InvalidVersion) as error:
            raise StackError(f"{files[0].name}: not the name of a wheel: {error}") from error
        yield Wheel(files[0], str(found))


def check_upstream(
    version: str | None = None,
    package: str | None = None,
    *,
    folder: Path | None = None,
    path: Sequence[str] | None = None,
    say: Callable[[str], None] = _logger.info,
) -> list[Check]:
    """Say of each patch how it stands on an upstream that pip fetches; nothing in the environment changes.

    The distribution is `package` where that names one, else the one that is installed, else the first of
    `patches.yaml`. Patches of the same file are tried one on top of the other; those for other versions only are left
    out.

    Parameters:
        version: of that distribution, by default its newest.
        package: an import package or a distribution to look at alone; all by default.
        folder: the folder of patches, by default the one shipped.
        path: where installed distributions are looked for, by default `sys.path`.
        say: called with a line before each download.

    Raises:
        StackError: `package` has no patches, `version` is given and there are several packages, or pip does not get it.
    """
    series = select(load_all(folder), package)
    packages = list(dict.fromkeys(patch.package for patch in series))
    if version is not None:
        if len(packages) > 1:
            raise StackError(f"version {version!r}: of which package? Choose one by --package: {', '.join(packages)}")
        try:
            Version(version)
        except InvalidVersion:
            raise StackError(f"version {version!r}: not a version") from None
    result = []
    for name in packages:
        patches = [patch for patch in series if patch.package == name]
        distribution = _distribution(patches[0], package, path)
        say(f"fetching {distribution} {version or '(newest)'}")
        with download(distribution, version) as wheel:
            meant = _meant_for(patches, distribution, wheel.version)
            left_out = tuple(patch for patch in patches if patch not in meant)
            findings = tuple(_judge(meant, wheel))
            result.append(Check(name, distribution, wheel.version, wheel.path.name, findings, left_out))
    return result


def _distribution(patch: Patch, asked: str | None, path: Sequence[str] | None) -> str:
    known = list(patch.published)
    named = [name for name in known if asked is not None and canonicalize_name(name) == canonicalize_name(asked)]
    installed = [found.name for found in find_installed(known, path)]
    return next(iter([*named, *installed, *known]))


def _meant_for(patches: list[Patch], distribution: str, version: str) -> list[Patch]:
    """Return the patches for `version`, or where there are none, for the newest version that there are some for."""
    known = sorted(patches[0].published[distribution], key=Version, reverse=True)
    for one in (version, *known):
        if fitting := [patch for patch in patches if not patch.unfit(distribution, one)]:
            return fitting
    return patches


def _judge(patches: list[Patch], wheel: Wheel) -> Iterator[Finding]:
    """Yield a finding for each of `patches`; one that finds its places lies below those that follow."""
    contents = {name: wheel.read(name) for patch in patches for name in patch.files}
    for patch in patches:
        before = {diff.path: _places(diff, contents[diff.path], after=False) for diff in patch.diffs}
        after = {diff.path: _places(diff, contents[diff.path], after=True) for diff in patch.diffs}
        stands = [place for places in before.values() for place in places]
        there = [place for places in after.values() for place in places]
        if all(stands):
            moved = any(place.offset for place in stands if place)
            verdict = Verdict.OFFSET if moved else Verdict.NEEDED
            for diff in patch.diffs:
                contents[diff.path] = _moved(diff, before[diff.path]).apply(contents[diff.path] or b"")
        elif all(there) and not any(stands):
            verdict = Verdict.UPSTREAM
        else:
            verdict = Verdict.CONFLICTS
        notes = []
        for diff in patch.diffs:
            if contents[diff.path] is None:
                notes.append(f"{diff.path}: no such file")
            for number, hunk in enumerate(diff.hunks):
                label = f"{diff.path}: hunk {number + 1} of {len(diff.hunks)}"
                notes += _notes(label, hunk, before[diff.path][number], after[diff.path][number], verdict)
        yield Finding(patch, verdict, tuple(notes))


def _places(diff: FileDiff, content: bytes | None, *, after: bool) -> list[Place | None]:
    return [None] * len(diff.hunks) if content is None else find(diff.hunks, split(content), after=after)


def _moved(diff: FileDiff, places: list[Place | None]) -> FileDiff:
    hunks = [replace(hunk, index=place.index) for hunk, place in zip(diff.hunks, places, strict=True) if place]
    return replace(diff, hunks=tuple(hunks))


def _notes(label: str, hunk: Hunk, before: Place | None, after: Place | None, verdict: Verdict) -> Iterator[str]:
    if before is None and verdict is not Verdict.UPSTREAM:
        text = hunk.text().decode("utf-8", "backslashreplace").rstrip("\n")
        yield f"{label}, meant for line {hunk.index + 1}, finds no place:\n{text}"
    if before is not None and verdict is not Verdict.NEEDED:
        lines, side = abs(before.offset), "below" if before.offset > 0 else "above"
        distance = f"{lines} line{'s' * (lines > 1)} {side} " if lines else ""
        yield f"{label}: at line {before.index + 1}, {distance}its own"
    if before is not None and before.matches > 1:
        yield f"{label}: {before.matches} places hold its lines; line {before.index + 1} is the nearest to its own"
    if after is not None:
        yield f"{label}: its change is there already, at line {after.index + 1}"
