# SPDX-License-Identifier: Apache-2.0
"""Carry our patches: `serving-stack patches list|apply|revert|verify|check-upstream|new|export`.

The patches lie in `patches/<import package>/`: unified diffs with DEP-3 headers, their order in `series`, and
`patches.yaml` with each patch's version range and, per distribution and version, the SHA-256 of every touched file as
`published` and as `patched` by all that fit. A wheel carries the same folder; `--folder` names another, for patches of
one's own. Nothing here imports an upstream: distributions are found by their metadata.

- `list`, `verify`: what state each patch is in; nothing is written.
- `apply`, `revert`: all patches, those of one `--package`, or one `--patch` while others of the same files stay.
- `check-upstream [VERSION]`: fetch a wheel by pip, by default the newest, and say of each patch whether it is still
  needed, applies with offset, conflicts (with the hunk that finds no place), or is already upstream.
- `new NAME FILE...`: make a patch of installed files that were edited in place. It holds the new change only.
- `export --output DIR`: write the patches for one image, with checksums and the Dockerfile lines that apply and check
  them there; its versions are given, found in the environment, or found below `--image-root`.

What `apply` and `revert` promise:

- **All checks come before the first write.** A version outside a patch's range, or a file that is neither the published
  one nor exactly our patched one, is refused with the expected and the found value, and nothing at all changes.
- **All or nothing.** Files are written beside and renamed under a journal. After a `kill -9` half way, the next command
  first rolls every file back, byte for byte, and says so.
- **No write through a link.** An installer's cache that shares a file by a hard or symbolic link keeps its bytes.
- **No stale bytecode.** Cached `.pyc` files of a changed module go, and its time stamp moves by at least a second.
- **Revert is byte for byte**: each diff is taken back and the result's hash must be the published one. Revert before a
  newer serving-stack is installed when it changes a patch; otherwise the file counts as modified, and reinstalling its
  distribution cures that.

The other actions change nothing in the environment. A distribution's `RECORD` is left alone, so a tool that audits it
reports each patched file; use `verify`.

Exit status: 0 done (`verify`: every patch of an installed package is applied, every hash right; `check-upstream`: every
patch is still needed or applies with offset); 1 refused or failed with a message, nothing changed (`verify`: something
is missing, outside its range or modified; `check-upstream`: a patch conflicts or is already upstream); 2 wrong usage.
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
