# SPDX-License-Identifier: Apache-2.0
"""Write the patches for one production image, with all that applies and checks them there without serving-stack."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name, canonicalize_version
from packaging.version import InvalidVersion, Version

from ..errors import StackError
from ..version import __version__
from ._carrier import State, Status, select, take_survey
from ._journal import interrupted, sha256
from ._series import Patch, load_all

_logger = logging.getLogger(__name__)

#: Where an image keeps a set.
TARGET = "/usr/local/share/serving-stack-patches"

#: The script that applies a set.
SCRIPT = Path(__file__).with_name("apply.sh")

README = """\
# Patches for {versions}

Written by `serving-stack patches export`, serving-stack {version}.

| package | for | patches |
|---|---|---|
{table}

`Dockerfile.snippet` is for the image's Dockerfile; this folder, `{name}`, lies in the build context. The image has to
hold coreutils, GNU patch and python3 (the one that the packages are installed for, first in `PATH`), and the user of
that step needs permission to write there. The build ends with an error unless every file is exactly what was published
before, and what our patches make of it after.

Without Docker:

```bash
cd {name}
sha256sum --check --strict --quiet SHA256SUMS && sh apply.sh
```

| file | what it is |
|---|---|
| `packages` | import package, distribution and version, a line each |
| `*/series` | the patches of a package, in order |
| `*/published.sha256` | the touched files as published, for `sha256sum --check` in the folder they are installed in |
| `*/patched.sha256` | the same files with these patches |
| `apply.sh` | checks, applies and checks again |
| `SHA256SUMS` | every other file of this set |
"""

SNIPPET = """\
# Patches for {versions}, by serving-stack {version}. `{name}` is the set's folder in the build context.
COPY {name}/ {target}/{name}/
RUN cd {target}/{name} && sha256sum --check --strict --quiet SHA256SUMS && sh apply.sh
"""


@dataclass(frozen=True)
class Export:
    """What a set holds for one package."""

    package: str
    distribution: str
    version: str
    patches: tuple[Patch, ...]  #: in the order of application


def export(
    output: Path,
    *,
    versions: Sequence[str] = (),
    image_root: Path | None = None,
    package: str | None = None,
    folder: Path | None = None,
    path: Sequence[str] | None = None,
    say: Callable[[str], None] = _logger.info,
) -> list[Export]:
    """Write a set of patches to `output`, which must be empty or not exist; return what it holds.

    The versions are those given, or those installed below `image_root`, or those installed in `path`. Installed files
    have to be as published. A package that is not there is left out.

    Parameters:
        versions: `NAME==VERSION` each, of a distribution.
        image_root: an unpacked or mounted file system, or a folder that packages are installed in.
        package: an import package or a distribution to export alone; all by default.
        folder: the folder of patches, by default the one shipped.
        path: where installed distributions are looked for, by default `sys.path`.
        say: called with a line for each package that is left out, and for each patch that is for other versions.

    Raises:
        StackError: `output` is not empty or cannot be written; a version or a distribution is not one that patches are
            carried for; a file is modified, or patched already; nothing is left to export. Nothing was written then.
    """
    series = select(load_all(folder), package)
    name = output.resolve().name
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
        raise StackError(f"{output}: the folder's name goes into a Dockerfile: letters, digits, '.', '_' and '-' only")
    if output.exists() and not output.is_dir():
        raise StackError(f"{output}: not a folder")
    if output.exists() and any(output.iterdir()):
        raise StackError(f"{output}: not empty")
    found = _given(series, versions) if versions else _installed(series, image_root, path, say)
    exports = []
    for chosen, (distribution, version) in found.items():
        patches = [patch for patch in series if patch.package == chosen]
        fitting = [patch for patch in patches if not patch.unfit(distribution, version)]
        if not fitting:
            reasons = "; ".join(f"{patch.name}: {patch.unfit(distribution, version)}" for patch in patches)
            raise StackError(f"{distribution} {version}: no patch is for this version: {reasons}")
        for patch in patches:
            if patch not in fitting:
                say(f"{patch.name}: {patch.unfit(distribution, version)}, left out")
        exports.append(Export(chosen, distribution, version, tuple(fitting)))
    _write(output, _files(name, exports))
    return exports


def _given(series: list[Patch], versions: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return package -> (distribution, version), by what the user says."""
    result: dict[str, tuple[str, str]] = {}
    for text in versions:
        name, _, version = text.partition("==")
        try:
            plain = str(Version(version))
        except InvalidVersion:
            raise StackError(f"version {text!r}: NAME==VERSION expected, such as vllm==0.31.0") from None
        providers = [
            (patch, known)
            for patch in series
            for known in patch.published
            if canonicalize_name(known) == canonicalize_name(name)
        ]
        if not providers:
            known = ", ".join(sorted({known for patch in series for known in patch.published}))
            raise StackError(f"distribution {name!r}: no patches are carried for it; there are some for {known}")
        for patch, distribution in providers:
            key = patch.known_as(distribution, version)
            same = key is not None and canonicalize_version(key) == canonicalize_version(version)
            one = (distribution, key if same and key else plain)
            other = result.setdefault(patch.package, one)
            if other != one:
                both = f"{'=='.join(other)} and {'=='.join(one)}"
                raise StackError(f"version {text!r}: {both} both provide {patch.package}, and an image has one of them")
    return result


def _installed(
    series: list[Patch], image_root: Path | None, path: Sequence[str] | None, say: Callable[[str], None]
) -> dict[str, tuple[str, str]]:
    """Return package -> (distribution, version), as found; raise `StackError` unless every file is as published."""
    where = list(sys.path if path is None else path) if image_root is None else _folders(image_root)
    place = image_root or "this environment"
    roots: dict[str, set[Path]] = {}
    for name in dict.fromkeys(name for patch in series for name in patch.published):
        for distribution in importlib.metadata.distributions(name=name, path=where):
            roots.setdefault(name, set()).add(Path(str(distribution.locate_file(""))).resolve())
    for name, several in roots.items():
        if image_root is not None and len(several) > 1:
            raise StackError(f"{name}: installed several times, choose one: {', '.join(map(str, sorted(several)))}")
    if interrupted(root for several in roots.values() for root in several):
        raise StackError(f"{place}: an interrupted change stands there; `serving-stack patches list` rolls it back")
    result: dict[str, tuple[str, str]] = {}
    wrong = []
    for one in take_survey(series, where):
        fitting = [status for status in one.statuses if status.state is not State.OUTSIDE_RANGE]
        first = one.statuses[0]
        if first.state is State.NOT_INSTALLED:
            say(f"{first.patch.package}: {first.detail} not installed, left out")
            continue
        result[first.patch.package] = (first.distribution, first.version)
        wrong += [f"{status.patch.name}: {reason}" for status in fitting if (reason := _not_published(status))]
    if wrong:
        raise StackError("\n  ".join([f"{place}: not as published, nothing was exported:", *wrong]))
    if not result:
        names = ", ".join(dict.fromkeys(name for patch in series for name in patch.published))
        raise StackError(f"{place}: nothing to export, for none of {names} is installed there")
    return result


def _not_published(status: Status) -> str:
    """Return what is wrong with the files of a patch, or an empty string."""
    if status.state is State.APPLIED:
        return f"already patched ({status.distribution} {status.version})"
    return status.detail


def _folders(root: Path) -> list[str]:
    """Return `root` and every folder of installed distributions below it."""
    if not root.is_dir():
        raise StackError(f"{root}: no such folder")
    found = [str(root)]
    for folder, names, _ in os.walk(root):
        if Path(folder) == root:
            names[:] = [name for name in names if name not in ("proc", "sys", "dev")]
        sites = [name for name in names if name in ("site-packages", "dist-packages")]
        # A link may lead out of the image, and what it leads to inside is found by its own name.
        found += [site for name in sites if not os.path.islink(site := os.path.join(folder, name))]
        names[:] = sorted(name for name in names if name not in sites)
    return found


def _files(name: str, exports: list[Export]) -> dict[str, bytes]:
    """Return the content of each file of a set."""
    versions = ", ".join(f"{one.distribution} {one.version}" for one in exports)
    table = [
        f"| {one.package} | {one.distribution} {one.version} | {', '.join(patch.name for patch in one.patches)} |"
        for one in exports
    ]
    words = {"versions": versions, "version": __version__, "name": name, "target": TARGET}
    packages = "".join(f"{one.package} {one.distribution} {one.version}\n" for one in exports)
    files = {
        "README.md": README.format(table="\n".join(table), **words).encode(),
        "Dockerfile.snippet": SNIPPET.format(**words).encode(),
        "packages": packages.encode(),
        "apply.sh": SCRIPT.read_bytes(),
    }
    for one in exports:
        for patch in one.patches:
            files[f"{patch.name}.patch"] = patch.text
        files[f"{one.package}/series"] = "".join(f"{Path(patch.name).name}.patch\n" for patch in one.patches).encode()
        key = one.patches[0].known_as(one.distribution, one.version)
        assert key is not None
        touched = sorted({file for patch in one.patches for file in patch.files})
        for what in ("published", "patched"):
            hashes = getattr(one.patches[0], what)[one.distribution][key]
            files[f"{one.package}/{what}.sha256"] = "".join(f"{hashes[file]}  {file}\n" for file in touched).encode()
    files["SHA256SUMS"] = "".join(f"{sha256(text)}  {file}\n" for file, text in sorted(files.items())).encode()
    return files


def _write(output: Path, files: dict[str, bytes]) -> None:
    """Write every file or leave nothing; `SHA256SUMS`, which the others are checked by, comes last."""
    made: list[Path] = []
    try:
        for folder in [output, *sorted({(output / name).parent for name in files} - {output})]:
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
        for name, text in files.items():
            made.append(output / name)
            (output / name).write_bytes(text)
    except BaseException as error:
        for path in reversed(made):
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise StackError(f"{error.filename or output}: cannot be written ({error.strerror})") from error
        raise
