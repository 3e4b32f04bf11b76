# SPDX-License-Identifier: Apache-2.0
"""Start a server, wait until it answers, and leave nothing of it behind.

    with Process(["redis-server", "--port", str(port)], ready=re.compile("Ready to accept connections")) as redis:
        ...

A process is started in its own session, with its output in a log. Leaving the block ends the session: TERM, then KILL
for what has not ended within the grace. What counts as part of it: every process of the session, and every process
that inherited a variable which names this launch, so that a daemon which opened a session of its own is ended as well.
On a failure the end of the log is shown.

Linux only: sessions and environments are read from /proc.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import httpx
import psutil

__all__ = ["Process", "ProcessError", "ProcessExited", "ProcessNotReady", "ProcessSurvived", "free_port", "free_ports"]

#: When a process counts as ready: a function that returns true (and not one that raises), a URL that answers 2xx, or a
#: pattern found in the log.
Readiness = Callable[[], bool] | str | re.Pattern[str]

_MARK = "SUPPORT_PROCESS_LAUNCH"
_POLL_S = 0.05
_KILL_S = 10.0
#: The first port to hand out, and how many each worker of pytest-xdist has.
_FIRST_PORT, _SHARE = 10_000, 2_000


class ProcessError(Exception):
    """A process did not do what was asked; the message ends with the end of its log."""

    def __init__(self, name: str, fault: str, log_tail: str = "") -> None:
        super().__init__(f"{name}: {fault}" + (f"\n--- end of the log of {name} ---\n{log_tail}" if log_tail else ""))
        #: The process's name.
        self.name = name
        #: The last lines of its log.
        self.log_tail = log_tail


class ProcessExited(ProcessError):
    """The process ended although it should run."""

    def __init__(self, name: str, returncode: int, log_tail: str) -> None:
        super().__init__(name, f"ended with {_status(returncode)}", log_tail)
        #: Its exit status; the negative number of the signal that ended it.
        self.returncode = returncode


class ProcessNotReady(ProcessError):
    """The process runs but was not ready before its deadline."""


class ProcessSurvived(ProcessError):
    """Processes were still there after KILL."""


class Process:
    """One launched process and everything it starts; a context manager.

    Args:
        command: the program and its arguments; no shell.
        name: what messages and logs call it; the program's name by default.
        ready: when the block may start; without it, as soon as the process is started.
        deadline_s: how long readiness may take.
        env: variables on top of this process's own; None removes one.
        cwd: the working directory.
        log: where the output goes, and stays; by default a temporary file that is removed at the end.
        grace_s: how long after TERM the session is killed.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        name: str | None = None,
        ready: Readiness | None = None,
        deadline_s: float = 30.0,
        env: Mapping[str, str | None] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        log: str | os.PathLike[str] | None = None,
        grace_s: float = 5.0,
    ) -> None:
        if not command:
            raise ValueError("command is empty")
        if isinstance(ready, str) and not ready.startswith(("http://", "https://")):
            raise ValueError(f"ready {ready!r} is no URL; a pattern for the log has to be compiled")
        self.command = tuple(os.fspath(part) for part in command)
        self.name = name if name is not None else Path(self.command[0]).name
        self.grace_s = grace_s
        self._ready = ready
        self._deadline_s = deadline_s
        self._env = dict(env or {})
        self._cwd = cwd
        self._keep_log = log is not None
        self._log_path: Path | None = None if log is None else Path(log)
        self._log_start = 0
        self._launch = ""
        self._popen: subprocess.Popen[bytes] | None = None
        self._returncode: int | None = None
        self._ended = False

    def __enter__(self) -> Process:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            state = "running" if self.returncode is None else f"ended with {_status(self.returncode)}"
            print(f"--- end of the log of {self.name} ({state}) ---\n{self.log_tail()}", file=sys.stderr)
        self.stop()

    @property
    def pid(self) -> int:
        """The process id of the program itself, which is also its session's."""
        return self._started().pid

    @property
    def log_path(self) -> Path:
        """The file that holds the output."""
        if self._log_path is None:
            raise ValueError(f"{self.name} was not started")
        return self._log_path

    @property
    def returncode(self) -> int | None:
        """The exit status of the program, the negative number of the signal that ended it, or None while it runs.

        The program stays a zombie until `stop`, so that no other process can get its id, and with it its session's.
        """
        popen = self._started()
        if self._returncode is None:
            state = os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if state is not None:
                self._returncode = state.si_status if state.si_code == os.CLD_EXITED else -state.si_status
        return self._returncode

    def start(self) -> None:
        """Start the process and wait until it is ready.

        Raises ProcessExited if it ends first, ProcessNotReady at the deadline, and ProcessError if the program cannot
        be started; in each case nothing is left running.
        """
        if self._popen is not None:
            raise ValueError(f"{self.name} was already started")
        self._launch = uuid.uuid4().hex
        environment = {key: value for key, value in {**os.environ, **self._env}.items() if value is not None}
        # Added to, not replaced: a launch from within a launch belongs to both.
        environment[_MARK] = f"{environment.get(_MARK, '')} {self._launch}".strip()
        with self._open_log() as log:
            try:
                self._popen = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self._cwd,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                self._remove_log()
                raise ProcessError(self.name, f"cannot start {self.command[0]}: {error}") from error
        try:
            self._await_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the whole session, and return when nothing of it runs any more. A second call does nothing.

        Raises ProcessSurvived if something does not even end on KILL (a process stuck in the kernel).
        """
        popen = self._started()
        if self._ended:
            return
        self._signal_all(signal.SIGTERM)
        left = self._wait_gone(self.grace_s)
        if left:
            left = self._wait_gone(_KILL_S, again=signal.SIGKILL)
        tail = self.log_tail()
        if left:
            raise ProcessSurvived(self.name, f"still there after KILL: {', '.join(map(str, left))}", tail)
        self._returncode = self.returncode  # read before it is reaped
        try:
            popen.wait(_KILL_S)
        except subprocess.TimeoutExpired as error:  # it runs as another user, and was neither seen nor signalled
            raise ProcessSurvived(self.name, f"still there after KILL: {popen.pid}", tail) from error
        self._ended = True
        self._remove_log()

    def send_signal(self, number: int) -> None:
        """Send a signal to the program alone, for tests that break it; its children are left as they are."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> int:
        """Wait until the program itself ends and return its exit status. Raises ProcessNotReady at the timeout."""
        deadline = time.monotonic() + timeout_s
        while self.returncode is None:
            if time.monotonic() >= deadline:
                raise ProcessNotReady(self.name, f"still runs after {timeout_s:g} s", self.log_tail())
            time.sleep(_POLL_S)
        return self.returncode

    def check(self) -> None:
        """Raise ProcessExited if the program has ended."""
        if self.returncode is not None:
            raise ProcessExited(self.name, self.returncode, self.log_tail())

    def log_text(self) -> str:
        """Return the output of this launch so far; empty once a temporary log was removed."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(self._log_start)
                return log.read().decode("utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def log_tail(self, lines: int = 40) -> str:
        """Return the last lines of the output of this launch."""
        return "\n".join(self.log_text().splitlines()[-lines:])

    def members(self) -> list[int]:
        """Return the ids of every process of this launch that still runs (zombies do not)."""
        return [process.pid for process in self._members()]

    def _members(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_member(process)]

    def _is_member(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            if not self._ended and os.getsid(process.pid) == self.pid:
                return True
            return self._launch in process.environ().get(_MARK, "")
        except (psutil.Error, OSError):  # gone meanwhile, or another user's
            return False

    def _await_ready(self) -> None:
        deadline = time.monotonic() + self._deadline_s
        while True:
            self.check()
            if self._ready is None:
                return
            fault = self._not_ready(self._ready)
            if not fault:
                self.check()  # what answered on its port may be another process, and this one gone
                return
            if time.monotonic() >= deadline:
                self.check()
                raise ProcessNotReady(self.name, f"not ready within {self._deadline_s:g} s: {fault}", self.log_tail())
            time.sleep(_POLL_S)

    def _not_ready(self, ready: Readiness) -> str:
        """Return why the process is not ready; empty when it is."""
        if isinstance(ready, re.Pattern):
            return "" if ready.search(self.log_text()) else f"{ready.pattern!r} is not in its log"
        if isinstance(ready, str):
            try:
                answer = httpx.get(ready, timeout=1.0, trust_env=False)  # a proxy has no business on the loopback
            except httpx.TransportError as error:
                return f"{ready}: {type(error).__name__}: {error}"
            return "" if answer.is_success else f"{ready} answered {answer.status_code}"
        name = getattr(ready, "__name__", repr(ready))
        try:
            return "" if ready() else f"{name} is not true"
        except Exception as error:  # a client that cannot connect yet
            return f"{name}: {type(error).__name__}: {error}"

    def _signal_all(self, number: int) -> None:
        for process in self._members():
            with contextlib.suppress(psutil.Error):  # gone meanwhile
                process.send_signal(number)

    def _wait_gone(self, timeout_s: float, *, again: int | None = None) -> list[int]:
        """Wait until no member runs, sending ``again`` in each round; return those left at the timeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            if again is not None:
                self._signal_all(again)
            left = self.members()
            if not left or time.monotonic() >= deadline:
                return left
            time.sleep(_POLL_S)

    def _open_log(self) -> IO[bytes]:
        if self._log_path is None:
            handle, path = tempfile.mkstemp(prefix=f"{self.name}-", suffix=".log")
            self._log_path = Path(path)
            return os.fdopen(handle, "wb")
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        log = self._log_path.open("ab")
        self._log_start = log.tell()
        return log

    def _remove_log(self) -> None:
        if not self._keep_log:
            self.log_path.unlink(missing_ok=True)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._popen is None:
            raise ValueError(f"{self.name} was not started")
        return self._popen


def free_port() -> int:
    """Return a TCP port of the loopback interface that nothing listens on, and that was not returned lately.

    Nothing holds it: whatever uses it should do so soon, and a test should use one only where a server cannot be told
    to choose its own. No client is given it meanwhile, for it lies below the ports that Linux hands out by itself, and
    no other worker of pytest-xdist, for each has ports of its own. Dynamo can read it as a system port: 16 bits with a
    sign.
    """
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return ``count`` different ports, as `free_port` does."""
    ports: list[int] = []
    while len(ports) < count:
        port = next(_ports)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


def _own_ports() -> Iterator[int]:
    """Go round and round through this process's ports, from any of them: another process may have the same."""
    first = _FIRST_PORT + _SHARE * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    start = random.SystemRandom().randrange(_SHARE)
    return itertools.cycle([*range(first + start, first + _SHARE), *range(first, first + start)])


_ports = _own_ports()


def _status(returncode: int) -> str:
    if returncode >= 0:
        return f"status {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"signal {-returncode}"
