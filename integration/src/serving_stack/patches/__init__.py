# SPDX-License-Identifier: Apache-2.0
"""Carry our patches on the installed upstreams: `serving-stack patches list|apply|revert|verify`.

The patches lie in `patches/<import package>/`: unified diffs with DEP-3 headers, their order in `series`, and
`patches.yaml` with each patch's version range and the SHA-256 of every touched file as its distribution published it.
A wheel carries the same folder. Nothing here imports an upstream: distributions are found by their metadata.

What a command promises:

- **All checks come before the first write.** A version outside a patch's range, or a file that is neither the published
  one nor exactly our patched one, is refused with the expected and the found value, and nothing at all changes.
- **All or nothing.** Files are written beside and renamed under a journal. After a `kill -9` half way, the next command
  first rolls every file back, byte for byte, and says so.
- **No write through a link.** An installer's cache that shares a file by a hard or symbolic link keeps its bytes.
- **No stale bytecode.** Cached `.pyc` files of a changed module go, and its time stamp moves by at least a second.
- **Revert is byte for byte**: each diff is taken back and the result's hash must be the published one. Revert before a
  newer serving-stack is installed when it changes a patch; otherwise the file counts as modified, and reinstalling its
  distribution cures that.

A distribution's `RECORD` is left alone, so a tool that audits it reports each patched file; use `verify`.

Exit status: 0 done (`verify`: every patch of an installed package is applied, every hash right); 1 refused or failed
with a message, nothing changed (`verify`: something is missing, outside its range or modified); 2 wrong usage.
"""

from ._carrier import Contents, State, Status, apply_all, contents, missing, revert_all, state, statuses
from ._command import configure, run
from ._export import Export, export
from ._new import New, new
from ._series import Patch, load_all
from ._upstream import Check, Finding, Verdict, check_upstream

__all__ = [
    "Check",
    "Contents",
    "Export",
    "Finding",
    "New",
    "Patch",
    "State",
    "Status",
    "Verdict",
    "apply_all",
    "check_upstream",
    "configure",
    "contents",
    "export",
    "load_all",
    "missing",
    "new",
    "revert_all",
    "run",
    "state",
    "statuses",
]
