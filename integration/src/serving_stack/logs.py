# SPDX-License-Identifier: Apache-2.0
"""`serving-stack logs`: the components' own output."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from .errors import StackError
from .state import Run


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("component", nargs="?", metavar="COMPONENT", help="one component, or `launcher` (default: all)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on printing until Ctrl-C")


class _Tail:
    """Yields the whole lines added to a file since it was asked last."""

    def __init__(self, path: Path) -> None:
        self.path, self.file, self.offset, self.rest = path, 0, 0, b""

    def lines(self, last: bool) -> list[str]:
        """Return the new lines; with `last` also one that has no end yet."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self.file or found.st_size < self.offset:  # a new run began
                    self.file, self.offset, self.rest = found.st_ino, 0, b""
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self.offset += len(data)
        *whole, self.rest = (self.rest + data).split(b"\n")
        if last and self.rest:
            whole.append(self.rest)
        return [line.decode(errors="replace") for line in whole]


def run(args: argparse.Namespace) -> int:
    """Print the logs, each line behind its component's name unless one was asked for."""
    place = Run()
    known = [path.stem for path in sorted(place.logs.glob("*.log"))]
    if not known:
        raise StackError("no logs yet: serving-stack up")
    if args.component is not None and args.component not in known:
        raise StackError(f"no component called {args.component!r}; there are: {', '.join(known)}")
    tails: dict[Path, _Tail] = {}
    while True:
        for path in sorted(place.logs.glob(f"{args.component or '*'}.log")):
            prefix = f"{path.stem:12} " if args.component is None else ""
            for line in tails.setdefault(path, _Tail(path)).lines(last=not args.follow):
                print(prefix + line, flush=args.follow)
        if not args.follow:
            return 0
        time.sleep(0.3)
