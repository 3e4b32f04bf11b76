# SPDX-License-Identifier: Apache-2.0
"""Make a patch of installed files that were edited in place."""

from __future__ import annotations

import base64
import contextlib
import datetime
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from ..errors import StackError
from . import _series
from ._carrier import State, forward, take_survey
from ._diff import find, parse, split, unified
from ._journal import interrupted, sha256
from ._series import Patch, load_all
from ._upstream import download

SERIES = """\
# SPDX-License-Identifier: Apache-2.0
# Applied from the top down.
"""

MANIFEST = """\
# SPDX-License-Identifier: Apache-2.0
# Which versions each patch fits, and the files it touches as their distributions published them.
# `serving-stack patches` refuses any other version and any other content.
patches:
  {patch}:
    versions: {versions} # PEP 440
published: # distribution -> version -> file -> sha256
{published}
patched: # the same files with every patch above that fits the version
{patched}
"""


@dataclass(frozen=True)
class New:
    """A patch that was written."""

    file: Path
    distribution: str
    version: str
    without_hashes: tuple[str, ...]  #: other distributions of the package, with version: the patch is refused there


@dataclass(frozen=True)
class _Source:
    """An installed file."""

    name: str  #: relative to `root`, with `/`
    root: Path  #: the folder that packages are installed in
    distribution: str
    version: str
    published: str  #: its SHA-256 as published


def new(
    name: str,
    files: Sequence[Path],
    description: str,
    *,
    folder: Path | None = None,
    path: Sequence[str] | None = None,
) -> New:
    """Write a patch that holds what was changed in installed files, and add it to its series; all or nothing.

    What was published comes from the wheel of the installed version, which pip fetches. Patches of the folder that
    touch the same files have to be applied in them, and stay out of the new one.

    Parameters:
        name: `<import package>/<short-name>`.
        files: edited files of one installed distribution.
        description: the patch's first line, and further lines as needed.
        folder: the folder of patches, by default the one of the checkout that serving-stack is installed from.
        path: where installed distributions are looked for, by default `sys.path`.

    Raises:
        StackError: the name is taken or not one; a file is not changed, not text, not of one distribution or not as a
            wheel published it before; there is no folder to write to. Nothing was written then.
    """
    folder = _folder(folder)
    package, _, short = name.partition("/")
    if not package.isidentifier() or not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", short):
        raise StackError(f"patch {name!r}: not a name, which is <import package>/<short-name>, such as vllm/some-fix")
    home = folder / package
    series = [patch for patch in _load(folder) if patch.package == package]
    if (home / f"{short}.patch").exists():
        raise StackError(f"patch {name!r}: the name is taken: {home / f'{short}.patch'}")
    text = _headers(description)
    where = list(sys.path if path is None else path)
    sources = _sources(package, files, where)
    _refuse_shipped(folder, sources)

    first = sources[0]
    keys = [key for patch in series for key in patch.published if canonicalize_name(key) == first.distribution]
    distribution = next(iter(keys), first.distribution)
    known = [patch.known_as(distribution, first.version) for patch in series]
    version = next((key for key in known if key), first.version)
    fitting = [patch for patch in series if not patch.unfit(distribution, first.version)]
    chains = {source.name: [patch for patch in fitting if source.name in patch.files] for source in sources}
    patched = {}
    with download(distribution, first.version) as wheel:
        for source in sources:
            content = wheel.read(source.name)
            if content is None or sha256(content) != source.published:
                found = "no such file" if content is None else f"sha256 {sha256(content)}"
                raise StackError(
                    f"{source.name}: sha256 {source.published} was installed, but {wheel.path.name} holds {found}: "
                    "another build of the version"
                )
            after = (source.root / source.name).read_bytes()
            chain = chains[source.name]
            text += _diff(source.name, forward(content, source.name, chain, chain), after, chain)
            patched[source.name] = sha256(after)

    published = {source.name: source.published for source in sources}
    written = {f"{short}.patch": text}
    if series:
        old = (home / "series").read_bytes()
        written["series"] = old + b"\n" * (not old.endswith(b"\n")) + f"{short}.patch\n".encode()
        same = _same_elsewhere(series, distribution, version, published, chains)
        hashes = [("published", distribution, version, published)]
        hashes += [("patched", *one, patched) for one in [(distribution, version), *same]]
        written["patches.yaml"] = _extended(home / "patches.yaml", short, version, hashes)
    else:
        written["series"] = f"{SERIES}{short}.patch\n".encode()
        written["patches.yaml"] = _manifest(short, distribution, version, published, patched)
    patch = _checked(home, written, name, where)
    _write(home, written)
    others = [(other, key) for other, versions in patch.published.items() for key in versions]
    unknown = [
        f"{other} {key}"
        for other, key in others
        if patch.versions.contains(key, prereleases=True) and patch.unfit(other, key)
    ]
    return New(home / f"{short}.patch", distribution, version, tuple(unknown))


def _folder(folder: Path | None) -> Path:
    if folder is None:
        if not _series.FOLDER.is_symlink():
            raise StackError("the shipped patches are no checkout that can be added to: name a folder by --folder")
        folder = _series.FOLDER.resolve()
    if not folder.is_dir():
        raise StackError(f"{folder}: no such folder")
    return folder


def _load(folder: Path) -> list[Patch]:
    return load_all(folder) if any(folder.glob("*/series")) else []


def _sources(package: str, files: Sequence[Path], path: Sequence[str]) -> list[_Source]:
    """Return the files, which have to be of one distribution and of `package`."""
    sources = list({source.name: source for source in (_source(file, path) for file in files)}.values())
    owners = sorted({f"{source.distribution} {source.version}" for source in sources})
    if len(owners) > 1:
        raise StackError(f"files of {' and of '.join(owners)}: one patch changes one distribution")
    for source in sources:
        if source.name.partition("/")[0] != package:
            raise StackError(f"{source.name}: not a file of the package {package}")
    if interrupted(source.root for source in sources):
        raise StackError(f"{sources[0].root}: an interrupted change stands; `serving-stack patches list` rolls it back")
    return sources


def _source(file: Path, path: Sequence[str]) -> _Source:
    # The last part stays as it is: an installer may have made a link into its cache of it.
    absolute = file.parent.resolve() / file.name
    if not absolute.is_file():
        raise StackError(f"{file}: no such file")
    for root in dict.fromkeys(Path(entry).resolve() for entry in path):
        if not absolute.is_relative_to(root):
            continue
        name = absolute.relative_to(root).as_posix()
        for distribution in importlib.metadata.distributions(path=[str(root)]):
            if absolute.name.replace('"', '""') not in (distribution.read_text("RECORD") or ""):
                continue  # reading all of every RECORD takes seconds
            for entry in distribution.files or []:
                if entry.as_posix() == name:
                    owner = canonicalize_name(distribution.metadata["Name"])
                    if entry.hash is None or entry.hash.mode != "sha256":
                        raise StackError(f"{file}: the RECORD of {owner} holds no sha256 of it")
                    digest = base64.urlsafe_b64decode(entry.hash.value + "=" * (-len(entry.hash.value) % 4)).hex()
                    return _Source(name, root, owner, distribution.version, digest)
    raise StackError(f"{file}: not a file of an installed distribution")


def _refuse_shipped(folder: Path, sources: Collection[_Source]) -> None:
    """Raise `StackError` where a shipped patch changes one of the files too, unless `folder` is the shipped one."""
    if folder.resolve() == _series.FOLDER.resolve():
        return
    shipped: list[Patch] = []
    with contextlib.suppress(StackError):
        shipped = load_all()
    for source in sources:
        for patch in shipped:
            if source.name in patch.files and not patch.unfit(source.distribution, source.version):
                raise StackError(f"{source.name}: the shipped {patch.name} changes it; one folder holds all of a file")


def _headers(description: str) -> bytes:
    lines = [line.strip() for line in description.strip().splitlines()]
    if not lines:
        raise StackError("the description is empty")
    name, email = _git("user.name"), _git("user.email")
    author = f"{name} <{email}>" if name and email else name or "unknown"
    head = [
        f"Description: {lines[0]}",
        *(f" {line or '.'}" for line in lines[1:]),
        "Origin: vendor",
        "Bug: none known",
        "Forwarded: no",
        f"Author: {author}",
        f"Last-Update: {datetime.date.today().isoformat()}",
        "Applied-Upstream: no",
    ]
    try:
        return "".join(f"{line}\n" for line in [*head, ""]).encode()
    except UnicodeEncodeError as error:
        raise StackError(f"description or author: not text: {error}") from error


def _git(key: str) -> str:
    try:
        done = subprocess.run(["git", "config", key], capture_output=True, text=True, errors="replace", check=False)
    except OSError:
        return ""
    return " ".join(done.stdout.split())


def _diff(name: str, before: bytes, after: bytes, chain: Sequence[Patch]) -> bytes:
    """Return the diff between two contents; raise `StackError` where there is none that can be carried."""
    if b"\0" in before + after:
        raise StackError(f"{name}: not a text file")
    if before == after:
        raise StackError(f"{name}: not changed")
    lines = split(after)
    for patch in chain:
        hunks = patch.diff(name).hunks
        if all(find(hunks, lines)) and not any(find(hunks, lines, after=True)):
            raise StackError(f"{name}: {patch.name} is not applied in it; apply it first, and make the change again")
    text = unified(name, before, after)
    diffs = parse(text, name)
    if [diff.path for diff in diffs] != [name] or diffs[0].apply(before) != after:
        raise StackError(f"{name}: its change cannot be carried as a diff")
    return text


def _same_elsewhere(
    series: Sequence[Patch],
    distribution: str,
    version: str,
    published: Mapping[str, str],
    chains: Mapping[str, list[Patch]],
) -> list[tuple[str, str]]:
    """Return the other distributions, with version, that the new patch fits too: their files are the same.

    Raises:
        StackError: it would fit one whose files, or whose patches of them, are others; what it makes there is unknown.
    """
    result = []
    for other, versions in series[0].published.items():
        for key, hashes in versions.items():
            within = SpecifierSet(f"=={version}").contains(key, prereleases=True)
            if (other, key) == (distribution, version) or not within or not published.keys() <= hashes.keys():
                continue
            for name, digest in published.items():
                chain = [patch for patch in series if name in patch.files and not patch.unfit(other, key)]
                if hashes[name] != digest or chain != chains[name]:
                    raise StackError(
                        f"{name}: {other} {key} has another one, or other patches of it: do this one by hand"
                    )
            result.append((other, key))
    return result


def _manifest(
    short: str, distribution: str, version: str, published: Mapping[str, str], patched: Mapping[str, str]
) -> bytes:
    def block(digests: Mapping[str, str]) -> str:
        lines = [f"  {_plain(distribution)}:", f"    {_plain(version)}:"]
        return "\n".join([*lines, *(f"      {_plain(name)}: {digest}" for name, digest in sorted(digests.items()))])

    versions = json.dumps(f"=={version}")
    words = {"patch": f"{short}.patch", "versions": versions}
    return MANIFEST.format(published=block(published), patched=block(patched), **words).encode()


def _extended(file: Path, short: str, version: str, hashes: Sequence[tuple[str, str, str, Mapping[str, str]]]) -> bytes:
    """Return `patches.yaml` with a patch and `hashes` more, every comment and blank line as it was."""
    text = file.read_bytes().decode()
    expected = yaml.safe_load(text)
    expected["patches"][f"{short}.patch"] = {"versions": f"=={version}"}
    text = _put(file, text, ["patches", f"{short}.patch", "versions"], json.dumps(f"=={version}"))
    for what, distribution, key, digests in hashes:
        for name, digest in sorted(digests.items()):
            held = expected[what].setdefault(distribution, {}).setdefault(key, {})
            if what == "published" and held.get(name, digest) != digest:
                raise StackError(f"{file}: {name} of {distribution} {key}: published is {digest}, not {held[name]}")
            held[name] = digest
            text = _put(file, text, [what, distribution, key, name], digest)
    if yaml.safe_load(text) != expected:
        raise StackError(f"{file}: written in a way that cannot be added to; write its mappings as indented lines")
    return text.encode()


def _put(file: Path, text: str, keys: Sequence[str], value: str) -> str:
    """Return YAML with `value` under `keys`, every other character as it was."""
    node: Any = yaml.compose(text)
    for depth, key in enumerate(keys):
        if not isinstance(node, yaml.MappingNode) or node.flow_style or not node.value:
            place = ".".join(keys[:depth]) or "the whole"
            raise StackError(f"{file}: {place} has to be written as indented lines, so that it can be added to")
        found = [child for name, child in node.value if name.value == key]
        if not found:
            break
        node = found[0]
    else:
        return text[: node.start_mark.index] + value + text[node.end_mark.index :]
    indent = node.start_mark.column
    added = [" " * (indent + 2 * step) + f"{_plain(name)}:" for step, name in enumerate(keys[depth:])]
    added[-1] += f" {value}"
    while isinstance(node, yaml.MappingNode):
        node = node.value[-1][1]
    lines = text.splitlines(keepends=True)
    end = node.end_mark.line + 1
    lines[end - 1] = lines[end - 1].rstrip("\n") + "\n"
    return "".join([*lines[:end], *(f"{line}\n" for line in added), *lines[end:]])


def _plain(key: str) -> str:
    """Return a key as YAML: as it is where that says the same, else in quotes."""
    return key if re.fullmatch(r"[A-Za-z_][\w./-]*", key) and yaml.safe_load(key) == key else json.dumps(key)


def _checked(home: Path, written: Mapping[str, bytes], name: str, path: Sequence[str]) -> Patch:
    """Return the patch as it is read from a copy of its folder, where it has to be applied in the installed files."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary, home.name)
        if home.exists():
            shutil.copytree(home, copy)
        copy.mkdir(exist_ok=True)
        for file, content in written.items():
            (copy / file).write_bytes(content)
        (survey,) = take_survey(load_all(Path(temporary)), path)
    (status,) = (status for status in survey.statuses if status.patch.name == name)
    if status.state is not State.APPLIED:
        raise StackError(f"patch {name!r} would not count as applied: {status.state.value}: {status.detail}")
    return status.patch


def _write(home: Path, written: Mapping[str, bytes]) -> None:
    """Put every file into the folder, or leave it as it was."""
    new_folder = not home.exists()
    old = {file: (home / file).read_bytes() if (home / file).exists() else None for file in written}
    try:
        home.mkdir(exist_ok=True)
        for file, content in written.items():
            temporary = home / f".{file}.serving-stack"
            temporary.write_bytes(content)
            if old[file] is not None:
                shutil.copymode(home / file, temporary)
        for file in written:
            os.replace(home / f".{file}.serving-stack", home / file)
    except BaseException as error:
        with contextlib.suppress(OSError):
            for file, before in old.items():
                (home / f".{file}.serving-stack").unlink(missing_ok=True)
                if before is None:
                    (home / file).unlink(missing_ok=True)
                elif (home / file).read_bytes() != before:
                    (home / file).write_bytes(before)
            if new_folder:
                home.rmdir()
        if isinstance(error, OSError):
            where = error.filename or home
            raise StackError(f"{where}: cannot be written ({error.strerror}); nothing was changed") from error
        raise
