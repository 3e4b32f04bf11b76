# SPDX-License-Identifier: Apache-2.0
"""`serving-stack down`: end every process of the stack, whether its launcher still lives or not."""

from __future__ import annotations

import argparse
import contextlib
import time

import psutil

from .errors import StackError
from .launcher import LONGEST_END
from .state import Run, end, gone, listener

#: How long sockets may outlive their processes, seconds.
SOCKETS_END = 10.0


def configure(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def take_down(run: Run, ask: bool = True) -> int:
    """End the run's processes and return how many there were.

    A living launcher is asked first, unless `ask` is false: it lets the frontend drain. Whatever is left is killed.
    """
    state = run.read()
    if state is None:
        return 0
    members = run.members(state)
    for launcher in members:
        if ask and launcher.pid == state.session:
            with contextlib.suppress(psutil.Error):
                launcher.terminate()
            gone([launcher], LONGEST_END)
    end(run.members(state), grace=2.0)
    return len(members)


def run(args: argparse.Namespace) -> int:
    """End everything; fail if a process or a port survives, naming it."""
    place = Run()
    state = place.read()
    ended = take_down(place)
    if state is None or not ended:
        print("nothing is running")
        return 0
    left = place.members(state)
    if left:
        raise StackError(f"processes left: {', '.join(str(process.pid) for process in left)}")
    ports = [state.port, *(port for component in state.components.values() for port in component.ports.values())]
    # A process counts as ended when its first thread has; its last one closes the sockets, on a busy machine later.
    deadline = time.monotonic() + SOCKETS_END
    while held := {port: holder for port in ports if (holder := listener(port)) is not None}:
        if time.monotonic() > deadline:
            raise StackError("ports left: " + "; ".join(f"{port}: {holder}" for port, holder in held.items()))
        time.sleep(0.2)
    print(f"ended {ended} processes")
    return 0
