# SPDX-License-Identifier: Apache-2.0
"""Compile the C++ in `csrc/`: on first use into the user's cache, ahead of time into a wheel (`hatch_build.py`).

Imports nothing of this package, so that the wheel's build can load it before there is a package.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).with_name("csrc")
#: The compiled library: in the package where the wheel brings it.
LIBRARY = "libnvfp4_mla.so"
#: Where libraries compiled on first use are kept; without it in XDG_CACHE_HOME, or ~/.cache.
CACHE_VARIABLE = "FLASHINFER_NVFP4_MLA_CACHE"

# A chosen instruction set is each source file's own business: none may be named here.
_FLAGS = (
    *("-O3", "-fopenmp", "-fvisibility=hidden", "-fno-exceptions", "-Wno-psabi"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
_LINK = ("-fopenmp", "-Wl,--as-needed")


class BuildError(RuntimeError):
    """The C++ cannot be compiled here; the message says why."""


def compiler() -> list[str]:
    """Return the C++ compiler's command: CXX, or `c++`.

    Raises:
        BuildError: it is not on PATH.
    """
    command = shlex.split(os.environ.get("CXX") or "c++")
    if shutil.which(command[0]) is None:
        raise BuildError(f"no C++ compiler: {command[0]!r} is not on PATH. Install g++, or name a compiler in CXX")
    return command


def compiled(flags: tuple[str, ...] = (), headers: Path | None = None) -> Path:
    """Return the library, compiled unless the cache has it for these sources, flags and compiler.

    Without a compiler what another one has made of these sources will do. Several processes may ask at once: one
    compiles, the others wait for it.

    Args:
        flags: Further flags of the compiler.
        headers: A further folder of headers.

    Raises:
        BuildError: there is no compiler, it fails, or the cache cannot be written or could be by another user.
    """
    key = _key(flags, headers)
    missing: BuildError | None = None
    try:
        key += f"-{_compiler_key()}"
    except BuildError as error:
        key, missing = f"{key}-*", error
    try:
        folder = _cache()
        if (found := _find(folder, key)) is not None:
            return found
        if missing is not None:
            raise missing
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _trust(folder)
        with _alone(folder):
            if (found := _find(folder, key)) is not None:
                return found
            with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as place:
                library = compile_in(Path(place), flags, headers)
                library.chmod(0o755)
                # Named after its contents, and put there in one step: a file that is broken is never taken for it.
                target = folder / f"{key}-{_digest(library)}.so"
                library.replace(target)
                return target
    except OSError as error:
        raise BuildError(f"cannot write to the cache of compiled code ({CACHE_VARIABLE}): {error}") from error


def compile_in(folder: Path, flags: tuple[str, ...] = (), headers: Path | None = None) -> Path:
    """Compile the library in a folder and return it.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    command = compiler()
    try:
        import tvm_ffi.cpp
    except ImportError as error:
        raise BuildError(f"apache-tvm-ffi is not installed: {error}") from error
    with _ninja():
        try:
            built = tvm_ffi.cpp.build(
                Path(LIBRARY).stem,
                cpp_files=[str(path) for path in sorted(SOURCES.glob("*.cc"))],
                extra_cflags=[*_FLAGS, *flags],
                extra_ldflags=_LINK,
                extra_include_paths=[str(headers)] if headers else [],
                build_directory=str(folder),
            )
        except RuntimeError as error:
            raise BuildError(f"{shlex.join(command)} cannot compile {SOURCES}: {error}") from error
    return Path(built)


def _key(flags: tuple[str, ...], headers: Path | None) -> str:
    """Digest what the library depends on, whoever compiles it: sources, flags, tvm-ffi and machine."""
    from importlib import metadata

    try:
        # Not `_compat.py`'s to say, as the version of every other upstream: a wheel's build loads this module alone.
        ffi = metadata.version("apache-tvm-ffi")
    except metadata.PackageNotFoundError as error:
        raise BuildError("apache-tvm-ffi is not installed") from error
    found = hashlib.sha256(repr((_FLAGS, _LINK, flags, ffi, platform.machine())).encode())
    for path in sorted([*SOURCES.iterdir(), *(headers.glob("*.h") if headers else ())]):
        found.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _compiler_key() -> str:
    """Digest which compiler there is. It isn't run: its file tells as well that it is another."""
    command = compiler()
    file = Path(shutil.which(command[0]) or command[0]).resolve()
    found = file.stat()
    return hashlib.sha256(repr((command, file, found.st_size, found.st_mtime_ns)).encode()).hexdigest()[:16]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _find(folder: Path, key: str) -> Path | None:
    """Return a cached library, if it is whole; remove what is not."""
    for path in sorted(folder.glob(f"{key}-*.so")):
        _trust(folder)
        _trust(path)
        if path.stem.rpartition("-")[2] == _digest(path):
            return path
        path.unlink(missing_ok=True)
    return None


def _trust(path: Path) -> None:
    """Refuse what another user may have written: code is loaded from it.

    Raises:
        BuildError: it is neither this user's nor root's, or group or others may write to it.
    """
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        raise BuildError(
            f"other users may write to {path} (owner {found.st_uid}, mode {found.st_mode & 0o7777:o}), where compiled "
            f"code is kept: make it this user's and writable by nobody else, or name another folder in {CACHE_VARIABLE}"
        )


def _cache() -> Path:
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).absolute()
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise BuildError(f"no home directory to keep compiled code in: set {CACHE_VARIABLE}") from error
    return base.absolute() / "flashinfer-nvfp4-mla"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes from compiling in this folder, and clear away what one that was killed has left."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Without locks on this file system several may compile: the last one's library stays, and is as good.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
            for left in folder.glob("build-*"):
                shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _ninja() -> Iterator[None]:
    """Put ninja on PATH: where this Python's scripts are, if the environment was not activated."""
    before = os.environ.get("PATH", "")
    if shutil.which("ninja") is None:
        scripts = sysconfig.get_path("scripts")
        if shutil.which("ninja", path=scripts) is None:
            raise BuildError("ninja is not installed, which tvm-ffi compiles with: pip install ninja")
        os.environ["PATH"] = os.pathsep.join([*filter(None, [before]), scripts])
    try:
        yield
    finally:
        os.environ["PATH"] = before
