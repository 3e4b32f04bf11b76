# SPDX-License-Identifier: Apache-2.0
"""The `serving-stack` command: one sub-command per module, imported only when it is the one asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from .errors import StackError
from .version import __version__

#: Sub-command -> (module, one-line help). A module offers `configure(parser)` and `run(args) -> int`.
COMMANDS = {
    "up": ("up", "start the stack, return when a real request went through it"),
    "down": ("down", "end every process of the stack"),
    "status": ("status", "show components, workers and ports"),
    "logs": ("logs", "print or follow the components' logs"),
    "chat": ("chat", "send one chat message to any OpenAI-compatible endpoint"),
    "doctor": ("doctor", "say what this machine lacks, with the command that cures it"),
    "install": ("install", "install a profile's pinned engines into this environment"),
    "model": ("model", "write the tiny GLM-architecture model used on a CPU"),
    "route": ("route", "explain why the router sent a request where it went"),
    "patches": ("patches", "apply and verify our patches, export them for an image, check a newer upstream, start one"),
}


def _parser(only: str | None = None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="serving-stack", description="Dynamo, vLLM and NIXL assembled into one serving stack."
    )
    parser.add_argument("--version", action="version", version=f"serving-stack {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module_name, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if only in (None, name):
            module = importlib.import_module(f".{module_name}", __package__)
            module.configure(sub)
            sub.set_defaults(run=module.run)
    return parser


def parser() -> argparse.ArgumentParser:
    """Return the whole command line, every sub-command configured (documentation checks parse with it)."""
    return _parser()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status: 0 done, 1 failed with a message, 2 usage, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    asked = next((word for word in words if not word.startswith("-")), None)
    args = _parser(asked if asked in COMMANDS else "").parse_args(words)
    try:
        return int(args.run(args))
    except StackError as error:
        print(f"serving-stack: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("serving-stack: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:
        print(f"serving-stack: {error}", file=sys.stderr)
        return 1
