# SPDX-License-Identifier: Apache-2.0
"""`serving-stack logs`: the components' own output."""

from __future__ import annotations

import argparse
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
        self.path, self.offset, self.rest = path, 0, b""

    def lines(self) -> list[str]:
        try:
            with self.path.open("rb") as file:
                if self.path.stat().st_size < self.offset:  # a new run began
                    self.offset, self.rest = 0, b""
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self.offset += len(data)
        *whole, self.rest = (self.rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in whole]


def run(args: argparse.Namespace) -> int:
    """Print the logs, each line behind its component's name when there are several."""
    place = Run()
    paths = sorted(place.logs.glob("*.log"))
    if args.component is not None:
        known = [path.stem for path in paths]
        if args.component not in known:
            raise StackError(f"no component called {args.component!r}; there are: {', '.join(known) or 'none yet'}")
        paths = [place.logs / f"{args.component}.log"]
    if not paths:
        raise StackError("no logs yet: serving-stack up")
    tails = [_Tail(path) for path in paths]
    while True:
        for tail in tails:
            prefix = f"{tail.path.stem:12} " if len(tails) > 1 else ""
            for line in tail.lines():
                print(prefix + line, flush=args.follow)
        if not args.follow:
            return 0
        time.sleep(0.3)
