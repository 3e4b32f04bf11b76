# SPDX-License-Identifier: Apache-2.0
"""Replace several files at once or not at all, also when killed half way.

Order of a transaction: copies of the old content, then the journal that names them, then the new files beside the old
ones, then the renames, then the removal of the journal, each on disk before the next begins. While the journal stands,
the transaction has not happened, and `roll_back` makes that true. One lock file beside the journal admits one process.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import importlib.util
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import StackError

#: Holds lock and journal, in the folder that packages are installed in; it exists during a change only.
STATE_FOLDER = ".serving-stack-patches"


@dataclass(frozen=True)
class Change:
    """One file's content, now and then."""

    path: Path
    before: bytes
    after: bytes


def sha256(content: bytes) -> str:
    """Return the SHA-256 of `content` in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def interrupted(roots: Iterable[Path]) -> bool:
    """Return whether a journal stands in one of `roots`: a transaction is under way, or was killed."""
    return any(_journal(root).exists() for root in roots)


@contextlib.contextmanager
def locked(roots: Iterable[Path]) -> Iterator[None]:
    """Hold the lock of each of `roots` (folders that packages are installed in); wait for another process's end.

    Raises:
        StackError: a folder cannot be written; nothing was changed.
    """
    with contextlib.ExitStack() as stack:
        for root in sorted(set(roots)):  # always in this order, so that two processes cannot wait for each other
            try:
                descriptor = _lock(root)
            except OSError as error:
                raise StackError(
                    f"{root}: cannot be written ({error.strerror}); nothing was changed. "
                    "Run as a user who may write there, or on a writable copy of this environment"
                ) from error
            stack.callback(_unlock, root, descriptor)
        yield


def roll_back(root: Path, say: Callable[[str], None]) -> None:
    """Undo a killed transaction in `root`, if there was one; the caller holds the lock.

    A file that is neither in its old nor in its new state was replaced by somebody since (a reinstallation, say): it
    is left alone. Calls `say` with a line per file and one at the end.

    Raises:
        StackError: the journal or a copy is damaged, or a file cannot be written; the journal stays.
    """
    journal = _journal(root)
    if not journal.exists():
        return
    try:
        entries = json.loads(journal.read_bytes())
        for number, entry in enumerate(entries):
            path = root / entry["path"]
            _temporary(path).unlink(missing_ok=True)
            found = sha256(path.read_bytes()) if path.exists() else "no file"
            if found == entry["before"]:
                continue
            if found != entry["after"]:
                say(f"{path}: replaced by somebody since, left alone (sha256 {found})")
                continue
            before = (root / STATE_FOLDER / f"before-{number}").read_bytes()
            if sha256(before) != entry["before"]:
                raise StackError(f"{root / STATE_FOLDER}: the copy of {path} is damaged; reinstall its distribution")
            _stage(path, before)
            _swap(path, forgiving=True)
            say(f"{path}: rolled back")
        journal.unlink()
        _sync_folder(journal.parent)
    except (OSError, ValueError, KeyError) as error:
        raise StackError(f"{journal}: an interrupted change cannot be rolled back: {error}") from error
    say("an interrupted change was rolled back: nothing of it is applied")


def commit(root: Path, changes: Sequence[Change]) -> None:
    """Make all `changes` or none; the journal lies in `root`, whose lock the caller holds.

    Raises:
        StackError: a file cannot be written; nothing was changed.
    """
    folder = root / STATE_FOLDER
    journal = _journal(root)
    try:
        entries = []
        for number, change in enumerate(changes):
            _write(folder / f"before-{number}", change.before)
            entries.append(
                {
                    # Relative, so that an environment that was moved meanwhile can still be rolled back.
                    "path": os.path.relpath(change.path, root),
                    "before": sha256(change.before),
                    "after": sha256(change.after),
                }
            )
        draft = folder / "journal.draft"
        _write(draft, json.dumps(entries, indent=1).encode())
        os.replace(draft, journal)
        _sync_folder(folder)
        _sync_folder(root)
        _checkpoint("journal written")
        for change in changes:
            _stage(change.path, change.after)
        _checkpoint("new files written")
        for change in changes:
            _swap(change.path)
            _checkpoint("file renamed")
        journal.unlink()  # from here on it has happened
    except BaseException as error:  # an interrupt from the keyboard too
        roll_back(root, lambda line: None)
        if isinstance(error, OSError):
            where = error.filename2 or error.filename or root
            raise StackError(f"{where}: cannot be written ({error.strerror}); nothing was changed") from error
        raise
    _sync_folder(folder)


def _checkpoint(step: str) -> None:
    """Do nothing: a test puts a function that kills the process here."""


def _journal(root: Path) -> Path:
    return root / STATE_FOLDER / "journal.json"


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.serving-stack")


def _lock(root: Path) -> int:
    folder = root / STATE_FOLDER
    while True:
        folder.mkdir(exist_ok=True)
        try:
            descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            continue  # its last holder took the folder away
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(descriptor), os.stat(folder / "lock")):
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # we waited for a file that its last holder removed


def _unlock(root: Path, descriptor: int) -> None:
    folder = root / STATE_FOLDER
    with contextlib.suppress(OSError):
        if not _journal(root).exists():
            for copy in folder.glob("before-*"):
                copy.unlink()
            (folder / "journal.draft").unlink(missing_ok=True)
            (folder / "lock").unlink()
            folder.rmdir()
    os.close(descriptor)


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stage(path: Path, content: bytes) -> None:
    """Write `content` beside `path`, with its mode and owner, and later than it by a whole second of its time stamp."""
    old = path.stat()
    temporary = _temporary(path)
    with open(temporary, "wb") as file:
        file.write(content)
        with contextlib.suppress(PermissionError):
            os.fchown(file.fileno(), old.st_uid, old.st_gid)
        os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))  # after the owner: a change of owner clears some bits
        file.flush()
        # Bytecode is valid for its source's size and whole second of modification, and both could be the same again.
        # A process that is compiling the old source this moment may still store it: the new second makes that stale.
        modified = max(time.time_ns(), (int(old.st_mtime) + 1) * 1_000_000_000)
        os.utime(file.fileno(), ns=(modified, modified))
        os.fsync(file.fileno())


def _swap(path: Path, *, forgiving: bool = False) -> None:
    """Rename the file written beside `path` over it, and drop the bytecode of the old one.

    The name gets a new inode: an installer's cache that shares the old one by a link is not touched.
    """
    os.replace(_temporary(path), path)
    _sync_folder(path.parent)
    if path.suffix != ".py":
        return
    # cache_from_source knows of PYTHONPYCACHEPREFIX; the folder beside the source may be in use without it.
    for folder in {path.parent / "__pycache__", Path(importlib.util.cache_from_source(str(path))).parent}:
        for cached in folder.glob(f"{glob.escape(path.stem)}.*.pyc"):
            try:
                cached.unlink(missing_ok=True)
            except OSError:
                if not forgiving:
                    raise
