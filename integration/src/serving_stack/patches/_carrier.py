# SPDX-License-Identifier: Apache-2.0
"""What state each patch is in here, and how to change that."""

from __future__ import annotations

import enum
import importlib.metadata
import itertools
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from ..errors import StackError
from ._diff import DiffMismatch, Entangled, FileDiff, rebase
from ._journal import Change, commit, interrupted, locked, roll_back, sha256
from ._series import Patch, load_all

_logger = logging.getLogger(__name__)


class State(enum.Enum):
    """Where a patch stands in an environment."""

    APPLIED = "applied"
    NOT_APPLIED = "not applied"  #: and it can be: the files are the published ones, or hold other patches of ours only
    NOT_INSTALLED = "not installed"  #: no distribution that it knows provides its package
    OUTSIDE_RANGE = "version outside range"
    MODIFIED = "file modified"  #: neither as published nor as our patches leave it


@dataclass(frozen=True)
class Status:
    """A patch's state in an environment."""

    patch: Patch
    state: State
    distribution: str = ""  #: what provides the package here
    version: str = ""  #: its version
    detail: str = ""  #: the expected and the found value, where something is wrong; what could provide the package
    hashes: tuple[tuple[str, str], ...] = ()  #: (file, SHA-256 found), where the state follows from the files


@dataclass(frozen=True)
class Contents:
    """One file's content below and with a patch."""

    before: bytes  #: as published, with those patches that come earlier in the series
    after: bytes  #: the same with the patch


@dataclass(frozen=True)
class _Installed:
    name: str
    version: str
    root: Path


@dataclass
class _File:
    """A file that patches touch, as found."""

    name: str  #: as diffs name it
    path: Path
    found: bytes
    published: bytes
    chain: list[Patch]  #: every patch that touches it and fits the version, in order
    applied: tuple[Patch, ...]

    def with_patches(self, wanted: Collection[Patch]) -> bytes:
        return forward(self.published, self.name, self.chain, wanted)


@dataclass
class Survey:
    """One package, as found."""

    statuses: list[Status]
    files: dict[str, _File]
    root: Path | None = None


def statuses(
    package: str | None = None,
    *,
    folder: Path | None = None,
    path: Sequence[str] | None = None,
    say: Callable[[str], None] = _logger.warning,
) -> list[Status]:
    """Return every patch with its state, in order of application, after rolling back an interrupted change if any.

    Parameters:
        package: an import package or a distribution to look at alone; all by default.
        folder: the folder of patches, by default the one shipped.
        path: where installed distributions are looked for, by default `sys.path`.
        say: called with a line for each file that is rolled back.

    Raises:
        StackError: `package` has no patches, a folder of patches is not valid, or an interrupted change stands and
            cannot be rolled back.
    """
    patches = load_all(folder)
    _settle(patches, path, say)
    return [status for survey in take_survey(select(patches, package), path) for status in survey.statuses]


def state(patch: Patch, *, folder: Path | None = None, path: Sequence[str] | None = None) -> State:
    """Return the state of one patch of `load_all(folder)`; parameters and errors as for `statuses`."""
    return next(s.state for s in statuses(patch.package, folder=folder, path=path) if s.patch.name == patch.name)


def missing(
    package: str | None = None, *, folder: Path | None = None, path: Sequence[str] | None = None
) -> list[Status]:
    """Return the patches of installed packages that are not in place, whatever the reason.

    A launcher asks this before it starts an engine. Parameters and errors as for `statuses`.
    """
    found = statuses(package, folder=folder, path=path)
    return [status for status in found if status.state not in (State.APPLIED, State.NOT_INSTALLED)]


def contents(patch: Patch, *, folder: Path | None = None, path: Sequence[str] | None = None) -> dict[str, Contents]:
    """Return each file that `patch` touches, without and with it, whether or not it is applied; nothing is written.

    A patch's test compares the two. Parameters as for `statuses`.

    Raises:
        StackError: the package is not installed, its version is outside the range, or a file is modified.
    """
    series = load_all(folder)
    _settle(series, path, _logger.warning)
    (survey,) = take_survey([other for other in series if other.package == patch.package], path)
    status = next(status for status in survey.statuses if status.patch.name == patch.name)
    if status.state not in (State.APPLIED, State.NOT_APPLIED):
        raise StackError(f"patch {patch.name}: {status.state.value}: {status.detail}")
    result = {}
    for name in patch.files:
        file = survey.files[name]
        place = [other.name for other in file.chain].index(patch.name)
        result[name] = Contents(file.with_patches(file.chain[:place]), file.with_patches(file.chain[: place + 1]))
    return result


def apply_all(
    package: str | None = None,
    *,
    patch: str | None = None,
    folder: Path | None = None,
    path: Sequence[str] | None = None,
    say: Callable[[str], None] = _logger.info,
) -> list[Patch]:
    """Apply every patch of the installed packages, all or none; return those that were not applied before.

    `say` is called with a line for each patch; `patch` is the name of one to apply alone. Other parameters as for
    `statuses`.

    Raises:
        StackError: a version is outside a patch's range, a file is neither as published nor as we patch it, a file
            cannot be written, or `patch` is no patch or stands on one that is not applied. Nothing was changed then.
    """
    return _change(package, patch, folder, path, say, apply=True)


def revert_all(
    package: str | None = None,
    *,
    patch: str | None = None,
    folder: Path | None = None,
    path: Sequence[str] | None = None,
    say: Callable[[str], None] = _logger.info,
) -> list[Patch]:
    """Bring every touched file back to its published bytes, all or none; return the patches that were applied.

    A package outside a patch's range holds nothing of it, and is skipped. With `patch`, that one goes alone and the
    others stay. Parameters and errors as for `apply_all`.
    """
    return _change(package, patch, folder, path, say, apply=False)


def _change(
    package: str | None,
    name: str | None,
    folder: Path | None,
    path: Sequence[str] | None,
    say: Callable[[str], None],
    *,
    apply: bool,
) -> list[Patch]:
    series = load_all(folder)
    chosen = select(series, package, name)
    _settle(series, path, say)
    whole = [patch for patch in series if patch.package in {one.package for one in chosen}]
    # Without the lock first: where nothing is to be done, a read-only environment is as good as any.
    surveys = take_survey(whole, path)
    root, changes = _plan(surveys, chosen, apply=apply)
    if root is not None:
        roots = _roots(series, path)
        with locked(roots):
            for other in roots:
                roll_back(other, say)
            surveys = take_survey(whole, path)
            root, changes = _plan(surveys, chosen, apply=apply)
            if root is not None:
                commit(root, changes)
    wanted = State.NOT_APPLIED if apply else State.APPLIED
    changed = []
    for status in (status for survey in surveys for status in survey.statuses if status.patch in chosen):
        label = status.patch.name
        partly = not apply and any(status.patch in file.applied for survey in surveys for file in survey.files.values())
        if status.state is State.NOT_INSTALLED:
            say(f"{label}: not installed ({status.detail}), skipped")
        elif status.state is State.OUTSIDE_RANGE:
            say(f"{label}: {status.detail}, nothing to revert")
        elif status.state is wanted or partly:
            changed.append(status.patch)
            say(f"{label}: {'applied' if apply else 'reverted'} ({status.distribution} {status.version})")
        else:
            say(f"{label}: {'already applied' if apply else 'not applied'} ({status.distribution} {status.version})")
    return changed


def _plan(surveys: Iterable[Survey], chosen: Sequence[Patch], *, apply: bool) -> tuple[Path | None, list[Change]]:
    """Return what to write and whose journal to use, or (None, []); raise `StackError` with every reason not to."""
    refused = [State.MODIFIED, State.OUTSIDE_RANGE] if apply else [State.MODIFIED]
    surveys = list(surveys)
    reasons = [
        f"{status.patch.name}: {status.state.value}: {status.detail}"
        for survey in surveys
        for status in survey.statuses
        if status.state in refused and status.patch in chosen
    ]
    if reasons:
        raise StackError("\n  ".join(["patches refused, nothing was changed:", *reasons]))
    root = None
    changes = []
    for survey in surveys:
        for file in survey.files.values():
            target = file.with_patches(
                [patch for patch in file.chain if (apply if patch in chosen else patch in file.applied)]
            )
            if file.found != target:
                root = root or survey.root
                changes.append(Change(file.path, file.found, target))
    return root, changes


def select(patches: list[Patch], package: str | None, name: str | None = None) -> list[Patch]:
    if package is not None:
        wanted = canonicalize_name(package)
        known = sorted({name for patch in patches for name in (patch.package, *patch.published)})
        patches = [patch for patch in patches if wanted in map(canonicalize_name, (patch.package, *patch.published))]
        if not patches:
            raise StackError(
                f"package {package!r}: no patches are carried for it; there are some for {', '.join(known)}"
            )
    if name is not None:
        known = [patch.name for patch in patches]
        patches = [patch for patch in patches if patch.name == name]
        if not patches:
            raise StackError(f"patch {name!r}: no such patch; there are {', '.join(known)}")
    return patches


def _settle(patches: list[Patch], path: Sequence[str] | None, say: Callable[[str], None]) -> None:
    roots = _roots(patches, path)
    if interrupted(roots):
        with locked(roots):  # waits where the change is another process's, still under way
            for root in roots:
                roll_back(root, say)


def _roots(patches: list[Patch], path: Sequence[str] | None) -> list[Path]:
    names = dict.fromkeys(name for patch in patches for name in patch.published)
    return list(dict.fromkeys(installed.root for installed in find_installed(names, path)))


def find_installed(names: Iterable[str], path: Sequence[str] | None) -> list[_Installed]:
    where = list(sys.path if path is None else path)
    result = []
    for name in names:
        # The first one found is the one that Python imports.
        for distribution in itertools.islice(importlib.metadata.distributions(name=name, path=where), 1):
            # Resolved: a folder known by two names (lib64 is often a link) has one lock.
            root = Path(str(distribution.locate_file(""))).resolve()
            result.append(_Installed(name, distribution.version, root))
    return result


def take_survey(patches: list[Patch], path: Sequence[str] | None) -> list[Survey]:
    result = []
    for _, group in itertools.groupby(patches, key=lambda patch: patch.package):
        series = list(group)
        found = find_installed(series[0].published, path)
        if not found:
            detail = " or ".join(series[0].published)
            result.append(Survey([Status(patch, State.NOT_INSTALLED, detail=detail) for patch in series], {}))
            continue
        # Two distributions may both claim the package; the files are those of the one whose hashes fit.
        surveys = [_examine(installed, series) for installed in found]
        fits = [s for s in surveys if all(t.state in (State.APPLIED, State.NOT_APPLIED) for t in s.statuses)]
        result.append((fits or surveys)[0])
    return result


def _examine(installed: _Installed, series: list[Patch]) -> Survey:
    outside = {patch: reason for patch in series if (reason := patch.unfit(installed.name, installed.version))}
    fitting = [patch for patch in series if patch not in outside]
    files: dict[str, _File] = {}
    hashes: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for name in dict.fromkeys(name for patch in fitting for name in patch.files):
        chain = [patch for patch in fitting if name in patch.files]
        path = installed.root / name
        key = chain[0].known_as(installed.name, installed.version)
        assert key is not None
        expected = chain[0].published[installed.name][key][name]
        try:
            found = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            wrong[name] = f"{path}: no such file (an editable installation?), sha256 {expected} expected"
            continue
        except OSError as error:
            wrong[name] = f"{path}: cannot be read ({error.strerror}), sha256 {expected} expected"
            continue
        hashes[name] = sha256(found)
        explained = _explain(found, name, chain, expected)
        if explained is None:
            wrong[name] = (
                f"{path}: expected sha256 {expected} as {installed.name} {key} was published (or exactly "
                f"our patched file), found {hashes[name]}; reinstall {installed.name}=={installed.version}"
            )
        else:
            files[name] = _File(name, path, found, explained[0], chain, explained[1])
            patched, recorded = sha256(files[name].with_patches(chain)), chain[0].patched[installed.name][key][name]
            if patched != recorded:
                raise StackError(
                    f"{name} of {installed.name} {key}: the patches make sha256 {patched} of the published file, but "
                    f"{recorded} is recorded under 'patched'; correct patches.yaml"
                )
    result = []
    for patch in series:
        if patch in outside:
            result.append(Status(patch, State.OUTSIDE_RANGE, installed.name, installed.version, outside[patch]))
            continue
        bad = [wrong[name] for name in patch.files if name in wrong]
        held = [name for name in patch.files if name in files and patch in files[name].applied]
        if bad:
            state, detail = State.MODIFIED, "; ".join(bad)
        elif len(held) == len(patch.files):
            state, detail = State.APPLIED, ""
        else:
            state = State.NOT_APPLIED
            detail = f"applied in {', '.join(held)} only" if held else ""
        found_hashes = tuple((name, hashes[name]) for name in patch.files if name in hashes)
        result.append(Status(patch, state, installed.name, installed.version, detail, found_hashes))
    return Survey(result, files, installed.root)


def _explain(found: bytes, name: str, chain: list[Patch], expected: str) -> tuple[bytes, tuple[Patch, ...]] | None:
    """Return the published content and the patches that made `found` of it, or None where they did not."""
    # The whole chain is the usual case; fewer when one was reverted, or the series has grown since.
    for size in (0, *range(len(chain), 0, -1)):
        for applied in itertools.combinations(chain, size):
            content = found
            try:
                for diff in reversed(_diffs(name, chain, applied)):
                    content = diff.reverse(content)
            except (DiffMismatch, Entangled):
                continue
            if sha256(content) == expected:
                return content, applied
    return None


def forward(content: bytes, name: str, chain: list[Patch], wanted: Collection[Patch]) -> bytes:
    """Return the published `content` with those patches of its `chain` that are `wanted`."""
    kept = [patch for patch in chain if patch in wanted]
    try:
        diffs = _diffs(name, chain, kept)
    except Entangled as error:
        patch = chain[error.number]
        others = ", ".join(other.name for other in chain[: error.number] if other not in kept)
        raise StackError(
            f"patch {patch.name} stands on lines of {others} in {name}: it cannot be applied alone, nor can what it "
            "stands on be reverted alone; nothing was changed"
        ) from error
    for patch, diff in zip(kept, diffs, strict=True):
        try:
            content = diff.apply(content)
        except DiffMismatch as error:
            raise StackError(f"patch {patch.name}: does not apply to the published file: {error}") from error
    return content


def _diffs(name: str, chain: list[Patch], wanted: Collection[Patch]) -> list[FileDiff]:
    return rebase([patch.diff(name) for patch in chain], [patch in wanted for patch in chain])
