# SPDX-License-Identifier: Apache-2.0
"""A package `demo`, patches for it, and a folder that it is installed in."""

from __future__ import annotations

import base64
import contextlib
import csv
import difflib
import hashlib
import io
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from packaging.specifiers import SpecifierSet

from serving_stack.patches import Patch, State, apply_all, load_all, revert_all, statuses
from serving_stack.patches._diff import DiffMismatch, parse

NUMBERS = b"".join(b"N%d = %d\n" % (n, n) for n in range(1, 21))
EXTRA = b"A = 1\nB = 2\n"
HEADERS = """\
Description: {name} changes a number
 and says so on two lines.
Origin: vendor
Bug: none known
Forwarded: no
Author: The serving-stack authors
Last-Update: 2026-01-01
Applied-Upstream: no

"""


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def diff(path: str, before: bytes, after: bytes) -> bytes:
    lines = difflib.diff_bytes(
        difflib.unified_diff,
        io.BytesIO(before).readlines(),
        io.BytesIO(after).readlines(),
        f"a/{path}".encode(),
        f"b/{path}".encode(),
    )
    marker = b"\n\\ No newline at end of file\n"
    return b"".join(line if line.endswith(b"\n") else line + marker for line in lines)


def install(site: Path, name: str, version: str, files: dict[str, bytes]) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{path},sha256=published,\n" for path in files))
    for path, content in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)


def wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    """Write a wheel of pure Python; a file's name may begin with `NAME-VERSION.data/`."""
    stem = f"{name.replace('-', '_')}-{version}"
    members = {
        **files,
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{stem}.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    for path, content in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.writerow([path, f"sha256={digest}", len(content)])
    rows.writerow([f"{stem}.dist-info/RECORD", "", ""])
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, content in members.items():
            archive.writestr(path, content)
        archive.writestr(f"{stem}.dist-info/RECORD", record.getvalue())
    return file


def patched(files: dict[str, bytes], patches: Iterable[bytes]) -> dict[str, bytes]:
    """Return those of `files` that one of `patches` changes, changed; unchanged where it does not apply."""
    result: dict[str, bytes] = {}
    for text in patches:
        for change in parse(text, "demo/p"):
            before = result.get(change.path, files[change.path])
            try:
                result[change.path] = change.apply(before)
            except DiffMismatch:
                result[change.path] = before
    return result


def tree(root: Path) -> dict[str, bytes]:
    return {str(file.relative_to(root)): file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file()}


class Where(TypedDict):
    folder: Path
    path: list[str]


@dataclass
class World:
    """A folder of patches for the package `demo`, and a folder of installed packages."""

    folder: Path
    site: Path
    said: list[str] = field(default_factory=list)

    @property
    def where(self) -> Where:
        return {"folder": self.folder, "path": [str(self.site)]}

    def write(
        self,
        patches: dict[str, bytes],
        published: dict[str, dict[str, dict[str, bytes]]],
        *,
        versions: str = ">=1,<2",
        package: str = "demo",
    ) -> None:
        home = self.folder / package
        home.mkdir(parents=True, exist_ok=True)
        for name, text in patches.items():
            (home / name).write_bytes(HEADERS.format(name=name).encode() + text)
        (home / "series").write_text("# the order\n" + "".join(f"{name}\n" for name in patches))
        lines = ["patches:"] + [f"  {name}: {{versions: '{versions}'}}" for name in patches]
        for what in ("published", "patched"):
            lines.append(f"{what}:")
            for distribution, by_version in published.items():
                lines.append(f"  {distribution}:")
                for version, files in by_version.items():
                    if what == "patched":
                        files = patched(files, patches.values()) if SpecifierSet(versions).contains(version) else {}
                    lines.append(f"    '{version}':" + " {}" * (not files))
                    lines += [f"      {path}: {sha(content)}" for path, content in files.items()]
        (home / "patches.yaml").write_text("\n".join(lines) + "\n")

    def apply(self, package: str | None = None, patch: str | None = None) -> list[str]:
        return [done.name for done in apply_all(package, patch=patch, **self.where, say=self.said.append)]

    def revert(self, package: str | None = None, patch: str | None = None) -> list[str]:
        return [done.name for done in revert_all(package, patch=patch, **self.where, say=self.said.append)]

    def states(self) -> list[State]:
        return [status.state for status in statuses(**self.where, say=self.said.append)]

    def patch(self, name: str) -> Patch:
        return next(patch for patch in load_all(self.folder) if patch.name == name)

    def read(self, path: str) -> bytes:
        return (self.site / path).read_bytes()


FILES = {"demo/numbers.py": NUMBERS, "demo/extra.py": EXTRA}
ONE = NUMBERS.replace(b"N3 = 3\n", b"N3 = 33\n# new\n")
BOTH = ONE.replace(b"N15 = 15\n", b"")
EXTRA_AFTER = EXTRA.replace(b"B = 2", b"B = 3")

#: Contents before and after a change that tools for text get wrong.
ODD: dict[str, tuple[bytes, bytes]] = {
    "crlf": (NUMBERS.replace(b"\n", b"\r\n"), ONE.replace(b"\n", b"\r\n")),
    "mixed": (NUMBERS.replace(b"N2 = 2\n", b"N2 = 2\r\n"), ONE.replace(b"N2 = 2\n", b"N2 = 2\r\n")),
    "no-newline-far": (NUMBERS.rstrip(b"\n"), ONE.rstrip(b"\n")),
    "no-newline-changed-line": (NUMBERS.rstrip(b"\n"), NUMBERS.rstrip(b"\n") + b"0"),
    "no-newline-context": (NUMBERS.rstrip(b"\n"), NUMBERS.replace(b"N18", b"M18").rstrip(b"\n")),
    "newline-added": (NUMBERS.rstrip(b"\n"), NUMBERS),
    "newline-removed": (NUMBERS, NUMBERS.rstrip(b"\n")),
    "odd-bytes": (NUMBERS.replace(b"N2", b"\xe9\x0c\x85"), ONE.replace(b"N2", b"\xe9\x0c\x85")),
    "empty-before": (b"", b"X = 1\n"),
    "empty-after": (b"X = 1\n", b""),
    "like-a-header": (b"-- x\n", b"++ y\n"),
}


KILLED = """
import os, signal, sys
from pathlib import Path
from serving_stack.patches import apply_all, revert_all, _journal

step, count, action, folder, site = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5]
seen = 0
def kill(name):
    global seen
    seen += name == step
    if name == step and seen == count:
        os.kill(os.getpid(), signal.SIGKILL)
_journal._checkpoint = kill
{"apply": apply_all, "revert": revert_all}[action](folder=folder, path=[site])
"""


def killed(world: World, step: str, count: int, action: str) -> None:
    command = [sys.executable, "-c", KILLED, step, str(count), action, str(world.folder), str(world.site)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL


def edit(file: Path, old: bytes, new: bytes) -> None:
    text = file.read_bytes()
    assert old in text
    file.write_bytes(text.replace(old, new))


@contextlib.contextmanager
def as_root() -> Iterator[None]:
    """Step out of `unprivileged` for the preparation."""
    user = os.geteuid()
    if os.getuid() == 0:
        os.seteuid(0)
    yield
    os.seteuid(user)
