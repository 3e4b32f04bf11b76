# SPDX-License-Identifier: Apache-2.0
"""Unified diffs, applied exactly: no fuzz, no offsets, no change of line ends.

`unidiff` parses; the replacement of lines is ours because a published file is known by its hash, so anything but an
exact match is a fault. (`patch-ng` and `whatthepatch` both apply, but the first loses a missing newline at the end of a
file, and the second splits lines at characters other than a line feed and drops the line ends.)
"""

from __future__ import annotations

import io
from dataclasses import dataclass

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchSet

from ..errors import StackError


class DiffMismatch(Exception):
    """The content does not hold the lines a diff expects."""


@dataclass(frozen=True)
class Hunk:
    """One run of replaced lines; an index counts lines from 0, a line keeps its line end."""

    before_index: int  #: where `before` stands in the old file
    before: tuple[bytes, ...]  #: context and removed lines
    after_index: int  #: where `after` stands in the new file
    after: tuple[bytes, ...]  #: context and added lines


@dataclass(frozen=True)
class FileDiff:
    """The hunks of one file."""

    path: str  #: relative to the folder that packages are installed in, with `/`
    hunks: tuple[Hunk, ...]  #: from the top down

    def apply(self, content: bytes) -> bytes:
        """Return `content` with every hunk applied; raise `DiffMismatch` where a line is not the expected one."""
        return self._replace(content, [(hunk.before_index, hunk.before, hunk.after) for hunk in self.hunks])

    def reverse(self, content: bytes) -> bytes:
        """Return `content` with every hunk taken back; raise `DiffMismatch` where a line is not the expected one."""
        return self._replace(content, [(hunk.after_index, hunk.after, hunk.before) for hunk in self.hunks])

    def _replace(self, content: bytes, hunks: list[tuple[int, tuple[bytes, ...], tuple[bytes, ...]]]) -> bytes:
        lines = io.BytesIO(content).readlines()  # splits at line feeds only
        result: list[bytes] = []
        done = 0
        for index, old, new in hunks:
            if index < done or tuple(lines[index : index + len(old)]) != old:
                raise DiffMismatch(f"{self.path}: line {index + 1} is not what the diff expects")
            result += [*lines[done:index], *new]
            done = index + len(old)
        return b"".join([*result, *lines[done:]])


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
            before: list[bytes] = []
            after: list[bytes] = []
            touched: list[list[bytes]] = []
            for line in hunk:
                if line.line_type == "\\":  # "\ No newline at end of file" speaks of the line above it
                    for lines in touched:
                        lines[-1] = lines[-1].removesuffix(b"\n")
                    continue
                touched = [before] * (line.is_context or line.is_removed) + [after] * (line.is_context or line.is_added)
                for lines in touched:
                    lines.append(line.value.encode("latin-1"))
            hunks.append(
                Hunk(
                    # An empty side is numbered by the line before it, any other side by its first line, from 1.
                    before_index=hunk.source_start - bool(before),
                    before=tuple(before),
                    after_index=hunk.target_start - bool(after),
                    after=tuple(after),
                )
            )
        diffs.append(FileDiff(file.path, tuple(hunks)))
    if not diffs:
        raise StackError(f"patch {name}: holds no diff")
    return tuple(diffs)
