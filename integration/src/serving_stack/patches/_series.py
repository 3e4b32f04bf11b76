# SPDX-License-Identifier: Apache-2.0
"""The patches we carry, read from their folders and checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_version
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import StackError
from ._diff import FileDiff, parse

#: The folder that holds one folder per import package; a link into the repository in a checkout, real files in a wheel.
FOLDER = Path(__file__).parent.parent / "_patches"

#: The DEP-3 fields that every patch fills.
HEADERS = ("Description", "Origin", "Bug", "Forwarded", "Author", "Last-Update", "Applied-Upstream")

#: distribution -> version -> file -> SHA-256
Hashes = Mapping[str, Mapping[str, Mapping[str, str]]]


@dataclass(frozen=True, eq=False)
class Patch:
    """One patch: what it says of itself, the versions it fits, and its diffs."""

    name: str  #: `<import package>/<file name without .patch>`
    package: str  #: the import package it changes
    text: bytes  #: its file, headers and diff
    headers: Mapping[str, str]  #: its DEP-3 fields
    versions: SpecifierSet  #: of the distribution that provides the package
    diffs: tuple[FileDiff, ...]  #: one per touched file
    published: Hashes  #: of the files as their distributions published them
    patched: Hashes  #: of the same files with every patch of the package that fits the version

    @property
    def description(self) -> str:
        """The first line of its description."""
        return self.headers["Description"].splitlines()[0]

    @property
    def files(self) -> tuple[str, ...]:
        """The files it touches, relative to the folder that packages are installed in."""
        return tuple(diff.path for diff in self.diffs)

    def diff(self, path: str) -> FileDiff:
        """Return its diff of the file `path`; raise `KeyError` where it does not touch that file."""
        return {diff.path: diff for diff in self.diffs}[path]

    def known_as(self, distribution: str, version: str) -> str | None:
        """Return the version that the hashes of `version` are kept under, or None.

        A build with a local label (`1.0+cu130`) that has no hashes of its own is looked up without it: whether its
        files are the same, their hashes tell.
        """
        known = self.published.get(distribution, {})
        wanted = canonicalize_version(version)
        keys = {canonicalize_version(key): key for key in known} | {key: key for key in known}
        found = (keys.get(name) for name in (version, wanted, wanted.partition("+")[0]))
        return next((key for key in found if key is not None), None)

    def unfit(self, distribution: str, version: str) -> str:
        """Return why the patch does not fit a version of a distribution, or an empty string."""
        try:
            inside = self.versions.contains(version, prereleases=True)
        except InvalidVersion:
            inside = False
        if not inside:
            return f"{distribution} {self.versions} expected, {version} found"
        key = self.known_as(distribution, version)
        known = self.published.get(distribution, {})
        if key is None:
            return f"{distribution} {', '.join(known) or 'no version'} expected by hash, {version} found"
        unknown = [name for name in self.files if name not in known[key]]
        return f"{distribution} {key}: no hash of {unknown[0]} is recorded" if unknown else ""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")
    versions: str


class _Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    patches: dict[str, _Entry]
    published: dict[str, dict[str, dict[str, str]]]
    patched: dict[str, dict[str, dict[str, str]]]


def load_all(folder: Path | None = None) -> list[Patch]:
    """Return every patch carried, in the order of application; raise `StackError` naming what is wrong in a folder.

    `folder` holds one folder per import package; by default the one shipped with serving-stack.
    """
    hint = "; this installation of serving-stack is incomplete" if folder is None else ""
    folder = FOLDER if folder is None else folder
    found = sorted(folder.glob("*/series"))
    if not found:
        raise StackError(f"{folder}: no patches there: no PACKAGE/series{hint}")
    return [patch for series in found for patch in _load(series.parent)]


def _load(folder: Path) -> list[Patch]:
    lines = (folder / "series").read_text("utf-8").splitlines()
    order = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    try:
        manifest = _Manifest.model_validate(yaml.safe_load((folder / "patches.yaml").read_text("utf-8")))
    except (OSError, ValidationError, yaml.YAMLError) as error:
        raise StackError(f"{folder / 'patches.yaml'}: {error}") from error
    for what, names in (
        ("patches.yaml", sorted(manifest.patches)),
        ("the folder", sorted(file.name for file in folder.glob("*.patch"))),
    ):
        if names != sorted(order):
            raise StackError(f"{folder / 'series'}: lists {sorted(order)}, but {what} holds {names}")
    for versions in (*manifest.published.values(), *manifest.patched.values()):
        for version in versions:
            try:
                Version(version)
            except InvalidVersion as error:
                raise StackError(f"{folder / 'patches.yaml'}: version {version!r} is not valid") from error
    patches = [_read(folder / name, manifest.patches[name].versions, manifest) for name in order]
    try:
        _check_patched(patches, manifest)
    except StackError as error:
        raise StackError(f"{folder / 'patches.yaml'}: {error}") from error
    return patches


def _check_patched(patches: list[Patch], manifest: _Manifest) -> None:
    """Raise `StackError` unless `patched` holds exactly the files that patches change, for each version they fit."""
    for distribution in {**manifest.published, **manifest.patched}:
        published = manifest.published.get(distribution, {})
        patched = manifest.patched.get(distribution, {})
        for version in {**published, **patched}:
            changed = {name for patch in patches if not patch.unfit(distribution, version) for name in patch.files}
            found = set(patched.get(version, {}))
            if changed - found:
                raise StackError(f"patched: {distribution} {version}: no hash of {min(changed - found)}")
            if found - changed or version not in published:
                surplus = min(found - changed, default="nothing")
                raise StackError(f"patched: {distribution} {version}: {surplus}: no patch of that version changes it")


def _read(file: Path, versions: str, manifest: _Manifest) -> Patch:
    package = file.parent.name
    name = f"{package}/{file.stem}"
    text = file.read_bytes()
    head = HeaderParser().parsestr(text.partition(b"\n\n")[0].decode("utf-8"))
    lacking = [field for field in HEADERS if not head.get(field, "").strip()]
    if lacking:
        raise StackError(f"patch {name}: DEP-3 header {lacking[0]} is missing")
    try:
        specifier = SpecifierSet(versions)
    except InvalidSpecifier as error:
        raise StackError(f"patch {name}: version range {versions!r} is not valid: {error}") from error
    diffs = parse(text, name)
    for diff in diffs:
        path = PurePosixPath(diff.path)
        if path.is_absolute() or ".." in path.parts or path.parts[0] != package:
            raise StackError(f"patch {name}: {diff.path}: not a file of the package {package}")
    headers = {field: head[field] for field in HEADERS}
    patch = Patch(name, package, text, headers, specifier, diffs, manifest.published, manifest.patched)
    known = [(distribution, version) for distribution in patch.published for version in patch.published[distribution]]
    if all(patch.unfit(*one) for one in known):
        reasons = "; ".join(patch.unfit(*one) for one in known) or "no hashes at all"
        raise StackError(f"patch {name}: it fits no version in patches.yaml: {reasons}")
    return patch
