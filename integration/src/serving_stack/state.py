# SPDX-License-Identifier: Apache-2.0
"""A run's directory: who owns it, what it says of itself, and which processes belong to it.

The launcher is the leader of a Unix session of its own, and nothing below it starts another: so its session id names
every process of the run, however many generations down, also after the launcher was killed. A lock that the kernel
drops with its owner says whether a launcher is alive. The state file is replaced, never written in place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import psutil
from pydantic import BaseModel, ValidationError

from .errors import StackError

#: Overrides where runs and generated models live.
HOME_VARIABLE = "SERVING_STACK_HOME"


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
    session: int
    started: float
    profile: str
    model: str
    served_model_name: str
    port: int
    phase: Literal["starting", "warming up", "ready", "failed", "stopped"] = "starting"
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
        self.logs.mkdir(parents=True, exist_ok=True)
        with self._lock.open("w") as file:
            for left in wait_until(time.monotonic() + 1.0):  # `launcher_alive` holds it for an instant
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if left < 0.3:
                        raise StackError(f"a stack already runs from {self.directory}: serving-stack down") from error
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
            raise StackError(f"{self._state} is not a state file of this version: remove it") from error

    def write(self, state: RunState) -> None:
        """Replace the state file."""
        fresh = self._state.with_suffix(".new")
        fresh.write_text(state.model_dump_json(indent=1), encoding="utf-8")
        fresh.replace(self._state)

    def members(self, state: RunState) -> list[psutil.Process]:
        """Return every living process of the run, in no order, the launcher included.

        A session id cannot be given out again while one process holds it; when all are gone it can, so only processes
        born after the run started count.
        """
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
                if (
                    os.getsid(process.pid) == state.session
                    and process.status() != psutil.STATUS_ZOMBIE
                    and process.create_time() >= state.started - 2
                ):
                    found.append(process)
        return found


def end(processes: list[psutil.Process], grace: float) -> None:
    """End processes: ask, wait `grace` seconds, then kill. Returns when all are gone (or are zombies of others)."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=grace)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=10)


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


def wait_until(deadline: float, pause: float = 0.2) -> Iterator[float]:
    """Yield the time left until a `time.monotonic()` deadline, pausing in between; stops when it is over."""
    while (left := deadline - time.monotonic()) > 0:
        yield left
        time.sleep(pause)
