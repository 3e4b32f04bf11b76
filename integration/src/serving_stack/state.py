# SPDX-License-Identifier: Apache-2.0
"""A run's directory: who owns it, what it says of itself, and which processes belong to it.

The launcher is the leader of a Unix session of its own, and nothing below it starts another: so its session id names
every process of the run, however many generations down, also after the launcher was killed. Session ids are given out
again, so a process counts only if the rest fits too: same boot, born after the launcher (in the kernel's ticks, which
no clock change moves), no other living leader, and our mark in its environment where that can still be read.

A lock that the kernel drops with its owner says whether a launcher is alive. The state file is replaced, never written
in place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
from pydantic import BaseModel, ValidationError

from .errors import StackError

#: Overrides where runs and generated models live.
HOME_VARIABLE = "SERVING_STACK_HOME"
#: Holds the run's id in the environment of each of its processes.
MARK = "SERVING_STACK_RUN"


def home() -> Path:
    """Return the directory for runs and models: $SERVING_STACK_HOME, or `serving-stack` in the XDG state directory."""
    chosen = os.environ.get(HOME_VARIABLE)
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base).absolute() / "serving-stack"


class ComponentState(BaseModel):
    """What the launcher knows of one process."""

    state: Literal["waiting", "starting", "ready", "restarting", "stopped", "failed"] = "waiting"
    pid: int | None = None
    ports: dict[str, int] = {}
    worker: str | None = None
    #: Dynamo's instance id, once the frontend lists it.
    instance: str | None = None
    restarts: int = 0
    #: Seconds from its start to its being ready.
    ready_after: float | None = None
    #: Why it was restarted last.
    reason: str | None = None


class RunState(BaseModel):
    """The state file `state.json`, written by the launcher alone."""

    run_id: str
    #: The launcher's process id, which is its session's id.
    session: int
    #: The boot it runs in, and the launcher's birth in ticks since that boot.
    boot: str
    born: int
    profile: str
    model: str
    served_model_name: str
    port: int
    phase: Literal["starting", "ready", "failed", "stopped"] = "starting"
    #: Why the phase is `failed`.
    reason: str | None = None
    #: Seconds from the launcher's start to the warm-up's answer.
    ready_after: float | None = None
    #: The warm-up's workers and transfer, for people.
    warm_up: str | None = None
    components: dict[str, ComponentState] = {}

    @property
    def base_url(self) -> str:
        """Address of the OpenAI-compatible API."""
        return f"http://127.0.0.1:{self.port}/v1"


class Run:
    """The directory of the one run that a home directory can hold."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory if directory is not None else home() / "run"
        self.logs = self.directory / "logs"
        self._state = self.directory / "state.json"
        self._lock = self.directory / "launcher.lock"

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Hold the launcher's lock.

        Raises:
            StackError: another launcher holds it.
        """
        # `launcher_alive` holds it for an instant, hence the patience.
        with _locked(self._lock, f"a stack already runs from {self.directory}: serving-stack down", patience=1.0):
            self.logs.mkdir(parents=True, exist_ok=True)
            yield

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Hold the lock of `serving-stack up`, from its first look to its last.

        Raises:
            StackError: another one is at work.
        """
        with _locked(self.directory / "up.lock", f"another `serving-stack up` is at work in {self.directory}"):
            yield

    def launcher_alive(self) -> bool:
        """Return whether a launcher holds this run."""
        try:
            with self._lock.open("r") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def read(self) -> RunState | None:
        """Return the state, or `None` if nothing ever ran here.

        Raises:
            StackError: the state file is not one of ours.
        """
        try:
            return RunState.model_validate_json(self._state.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValidationError, UnicodeDecodeError) as error:
            if not self.launcher_alive():  # what a power failure left
                return None
            raise StackError(f"{self._state} is not a state file of this version: remove it") from error

    def write(self, state: RunState) -> None:
        """Replace the state file."""
        fresh = self._state.with_suffix(".new")
        with fresh.open("w", encoding="utf-8") as file:
            file.write(state.model_dump_json(indent=1))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._state)

    def members(self, state: RunState) -> list[psutil.Process]:
        """Return every living process of the run, in no order, the launcher included."""
        if state.boot != boot():
            return []
        leader = stat(state.session)
        if leader is not None and leader.born != state.born:
            return []  # the launcher is dead and gone, and another session has its id
        found = []
        for pid in psutil.pids():
            one = stat(pid)
            if (
                one is None
                or one.session != state.session
                or one.born < state.born
                or _marked(pid)
                not in {
                    None,
                    state.run_id,
                }
            ):
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found


class Stat(NamedTuple):
    """What the kernel says of a living process: its group, its session, its birth in ticks since boot."""

    group: int
    session: int
    born: int


def stat(pid: int) -> Stat | None:
    """Read /proc/PID/stat; `None` for a process that is gone, or dead and not yet reaped by its parent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] in {"Z", "X"}:
        return None
    return Stat(group=int(fields[2]), session=int(fields[3]), born=int(fields[19]))


def boot() -> str:
    """Return the id of the system's present boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _marked(pid: int) -> str | None:
    """Return the run a process says it belongs to, "" if it names none, `None` if its environment cannot be read.

    vLLM's processes set a title, and that overwrites the memory /proc/PID/environ shows, from its beginning.
    """
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    if b"=" not in entries[0]:
        return None
    mark = f"{MARK}=".encode()
    return next((entry[len(mark) :].decode() for entry in entries if entry.startswith(mark)), "")


@contextlib.contextmanager
def _locked(path: Path, refusal: str, patience: float = 0.0) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + patience
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise StackError(refusal) from error
                time.sleep(0.1)
        yield


def gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait until processes are gone, or dead and left unreaped by a parent; return those that live after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        alive = [process for process in processes if process.is_running() and stat(process.pid) is not None]
        if not alive or time.monotonic() >= deadline:
            return alive
        time.sleep(0.05)


def end(processes: list[psutil.Process], grace: float) -> None:
    """End processes: ask, wait `grace` seconds, then kill. Returns when none of them lives."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    alive = gone(processes, grace)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    gone(alive, 10)


def listener(port: int) -> str | None:
    """Say who listens on a TCP port of this machine, or return `None` if it can be taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except PermissionError:
            return "nobody, but this user may not bind it"
        except OSError:
            pass
        else:
            return None
    for connection in psutil.net_connections("tcp"):
        here = connection.laddr
        if connection.status == psutil.CONN_LISTEN and here and here.port == port and connection.pid:
            with contextlib.suppress(psutil.Error):
                return f"process {connection.pid} ({' '.join(psutil.Process(connection.pid).cmdline())[:80]})"
    return "another user's process"


def check_port(port: int) -> None:
    """Refuse a port the API cannot take: privileged, or with no room above it for the workers' own."""
    if not 1024 <= port <= 65000:
        raise StackError(f"--port {port}: between 1024 and 65000")


def free_ports(count: int, above: int) -> list[int]:
    """Return `count` TCP ports above `above` that nothing listens on.

    They are counted up, not asked of the kernel: a worker that is restarted takes its port again, and a port from the
    kernel's ephemeral range may by then be some client's.

    Raises:
        StackError: fewer than `count` are free.
    """
    found: list[int] = []
    for port in range(above + 1, 65536):
        if len(found) == count:
            return found
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                found.append(port)
    raise StackError(f"only {len(found)} of {count} TCP ports above {above} are free")
