# SPDX-License-Identifier: Apache-2.0
"""Unified diffs, applied exactly: no fuzz, no offsets, no change of line ends. `find` alone looks for other lines.

`unidiff` parses; the replacement of lines is ours because a published file is known by its hash, so anything but an
exact match is a fault. (`patch-ng` and `whatthepatch` both apply, but the first loses a missing newline at the end of a
file, and the second splits lines at characters other than a line feed and drops the line ends.)
"""

from __future__ import annotations

import difflib
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchSet

from ..errors import StackError

_NO_NEWLINE = b"\\ No newline at end of file\n"


class DiffMismatch(Exception):
    """The content does not hold the lines a diff expects."""


class Entangled(Exception):
    """A diff of a sequence has to do with lines of one that is left out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number  #: which of the sequence, from 0


@dataclass(frozen=True)
class Hunk:
    """One run of replaced lines; a line keeps its line end."""

    index: int  #: where `before` stands in the old file, counted from 0
    lines: tuple[tuple[str, bytes], ...]  #: (" ", context), ("-", removed) or ("+", added)

    @property
    def before(self) -> tuple[bytes, ...]:
        """Context and removed lines."""
        return tuple(line for kind, line in self.lines if kind != "+")

    @property
    def after(self) -> tuple[bytes, ...]:
        """Context and added lines."""
        return tuple(line for kind, line in self.lines if kind != "-")

    @property
    def context(self) -> tuple[int, int]:
        """How many lines of context precede the first change and follow the last."""
        kinds = [kind for kind, _ in self.lines]
        leading, trailing = (len(list(itertools.takewhile(" ".__eq__, side))) for side in (kinds, kinds[::-1]))
        return leading, trailing

    def text(self) -> bytes:
        """The hunk as a diff shows it, without its `@@` line."""
        lines = [kind.encode() + line for kind, line in self.lines]
        return b"".join(line if line.endswith(b"\n") else line + b"\n" + _NO_NEWLINE for line in lines)


@dataclass(frozen=True)
class FileDiff:
    """The hunks of one file."""

    path: str  #: relative to the folder that packages are installed in, with `/`
    hunks: tuple[Hunk, ...]  #: from the top down

    def apply(self, content: bytes) -> bytes:
        """Return `content` with every hunk applied; raise `DiffMismatch` where a line is not the expected one."""
        return self._replace(content, [(hunk.index, hunk.before, hunk.after) for hunk in self.hunks])

    def reverse(self, content: bytes) -> bytes:
        """Return `content` with every hunk taken back; raise `DiffMismatch` where a line is not the expected one."""
        moved = 0
        hunks = []
        for hunk in self.hunks:
            hunks.append((hunk.index + moved, hunk.after, hunk.before))
            moved += len(hunk.after) - len(hunk.before)
        return self._replace(content, hunks)

    def _replace(self, content: bytes, hunks: list[tuple[int, tuple[bytes, ...], tuple[bytes, ...]]]) -> bytes:
        lines = split(content)
        result: list[bytes] = []
        done = 0
        for index, old, new in hunks:
            if index < done or tuple(lines[index : index + len(old)]) != old:
                raise DiffMismatch(f"{self.path}: line {index + 1} is not what the diff expects")
            result += [*lines[done:index], *new]
            done = index + len(old)
        return b"".join([*result, *lines[done:]])


def split(content: bytes) -> list[bytes]:
    """Return the lines of `content` with their line ends; only a line feed ends a line."""
    return io.BytesIO(content).readlines()


def parse(text: bytes, name: str) -> tuple[FileDiff, ...]:
    """Parse the diff in `text`, whatever precedes it; raise `StackError` naming patch `name` where it is not valid."""
    try:
        # latin-1 maps each byte to one character and back, so the content's own encoding does not matter.
        patch_set = PatchSet(text.decode("latin-1"))
    except UnidiffParseError as error:
        raise StackError(f"patch {name}: not a valid unified diff: {error}") from error
    diffs = []
    for file in patch_set:
        # Not `is_added_file`: that also holds for a change of an empty file.
        nowhere = "/dev/null" in (file.source_file, file.target_file)
        if nowhere or file.is_rename or file.is_binary_file:
            raise StackError(f"patch {name}: {file.path}: only changes of existing text files can be carried")
        hunks = []
        for hunk in file:
            lines: list[tuple[str, bytes]] = []
            for line in hunk:
                if line.line_type == "\\":  # "\ No newline at end of file" speaks of the line above it
                    kind, last = lines.pop()
                    lines.append((kind, last.removesuffix(b"\n")))
                else:
                    lines.append((line.line_type, line.value.encode("latin-1")))
            # An empty side is numbered by the line before it, any other side by its first line, from 1.
            empty = all(kind == "+" for kind, _ in lines)
            hunks.append(Hunk(hunk.source_start - (not empty), tuple(lines)))
        diffs.append(FileDiff(file.path, tuple(hunks)))
    if not diffs:
        raise StackError(f"patch {name}: holds no diff")
    return tuple(diffs)


def unified(path: str, before: bytes, after: bytes) -> bytes:
    """Return the unified diff of two contents of the file `path`."""
    names = (f"a/{path}".encode(), f"b/{path}".encode())
    lines = difflib.diff_bytes(difflib.unified_diff, split(before), split(after), *names)
    return b"".join(line if line.endswith(b"\n") else line + b"\n" + _NO_NEWLINE for line in lines)


def rebase(diffs: Sequence[FileDiff], wanted: Sequence[bool]) -> list[FileDiff]:
    """Return the `wanted` ones of `diffs`, which apply to one file one after another, as they apply without the others.

    Nothing is searched for: each line is followed from diff to diff, so a hunk goes where the whole sequence puts it.

    Raises:
        Entangled: a wanted diff changes, or has as context, lines that an unwanted one brought or removed.
    """
    if all(wanted):
        return list(diffs)
    # A line is known by its number in the first file, or by an object of its own where a diff brought it. The file is
    # taken to be longer than any diff reaches; how much longer makes no difference.
    hunks = [hunk for diff in diffs for hunk in diff.hunks]
    whole: list[object] = list(range(max(hunk.index for hunk in hunks) + sum(len(hunk.lines) for hunk in hunks)))
    part = list(whole)
    result = []
    for number, diff in enumerate(diffs):
        moved = []
        for hunk in reversed(diff.hunks):  # from the bottom up, so that the lines above keep their numbers
            end = hunk.index + len(hunk.before)
            old = whole[hunk.index : end]
            new: list[object] = []
            lines = iter(old)
            for kind, _ in hunk.lines:
                line = object() if kind == "+" else next(lines)
                if kind != "-":
                    new.append(line)
            if wanted[number]:
                try:
                    # An empty side stands behind the line before it.
                    at = part.index(old[0]) if old else part.index(whole[hunk.index - 1]) + 1 if hunk.index else 0
                except ValueError:
                    raise Entangled(number) from None
                if part[at : at + len(old)] != old:
                    raise Entangled(number)
                part[at : at + len(old)] = new
                moved.append(replace(hunk, index=at))
            whole[hunk.index : end] = new
        if wanted[number]:
            result.append(replace(diff, hunks=tuple(reversed(moved))))
    return result


@dataclass(frozen=True)
class Place:
    """Where the lines of a hunk stand in a file."""

    index: int  #: their first line, counted from 0
    offset: int  #: how far that is from the hunk's own
    matches: int  #: how many places there are for them; this is the nearest


def find(hunks: Sequence[Hunk], lines: list[bytes], *, after: bool = False) -> list[Place | None]:
    """Return where each of `hunks` stands in a file of these `lines`, or None, as GNU patch with `--fuzz=0` finds them.

    Lines have to be equal. A hunk stands below the one before it, and of several places the one counts that is nearest
    to its own line, moved as far as the one before it. Less context on one side than on the other says that the file
    begins or ends there, as does a last line without a line end. A side without any line stands only in an empty file.

    Parameters:
        after: look for the lines with the change made instead.
    """
    result: list[Place | None] = []
    floor = moved = 0
    grown = 0  # by how much the hunks above lengthen the file, where `after` is looked for
    for hunk in hunks:
        side = hunk.after if after else hunk.before
        expected = hunk.index + grown
        grown += (len(hunk.after) - len(hunk.before)) * after
        possible = _candidates(hunk, len(side), len(lines), floor)
        matches = [index for index in possible if tuple(lines[index : index + len(side)]) == side]
        if not matches:
            result.append(None)
            continue
        guess = expected + moved
        index = min(matches, key=lambda index: (abs(index - guess), index < guess))
        moved = index - expected
        floor = index + len(side)
        result.append(Place(index, moved, len(matches)))
    return result


def _candidates(hunk: Hunk, size: int, length: int, floor: int) -> range:
    """Return the lines, counted from 0, at which `size` lines can begin in a file of `length`, not before `floor`."""
    if not size:
        return range(1 - min(length, 1))
    leading, trailing = hunk.context
    first, last = floor, length - size
    if leading < trailing and hunk.index == 0:
        last = min(last, 0)
    unended = any(side and not side[-1].endswith(b"\n") for side in (hunk.before, hunk.after))
    if trailing < leading or unended:
        first = max(floor, last)
    return range(first, last + 1)
