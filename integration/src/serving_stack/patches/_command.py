# SPDX-License-Identifier: Apache-2.0
"""The command line `serving-stack patches`."""

from __future__ import annotations

import argparse

from ._carrier import State, apply_all, revert_all, statuses

_ACTIONS = {
    "list": "show every patch and its state",
    "apply": "apply every patch of the installed packages, all or none",
    "revert": "bring every patched file back to its published bytes, all or none",
    "verify": "fail unless every patch of an installed package is applied and every hash is right",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their options to `parser`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in _ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        scope = action.add_mutually_exclusive_group()
        scope.add_argument("--package", metavar="NAME", help="an import package or distribution to act on alone")
        if name in ("apply", "revert"):
            scope.add_argument("--patch", metavar="NAME", help="a patch to act on alone; others of its files stay")


def run(args: argparse.Namespace) -> int:
    """Carry out the action; return 0, or 1 from `verify` where something is not in place.

    Raises:
        StackError: what the library function raised; nothing was changed.
    """
    if args.action == "apply":
        apply_all(args.package, patch=args.patch, say=print)
        return 0
    if args.action == "revert":
        revert_all(args.package, patch=args.patch, say=print)
        return 0
    return _list(args.package) if args.action == "list" else _verify(args.package)


def _list(package: str | None) -> int:
    rows = [("PATCH", "PACKAGE", "INSTALLED", "STATE", "DESCRIPTION")]
    for status in statuses(package, say=print):
        installed = f"{status.distribution} {status.version}".strip() or "-"
        rows.append((status.patch.name, status.patch.package, installed, status.state.value, status.patch.description))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _verify(package: str | None) -> int:
    found = statuses(package, say=print)
    for status in found:
        good = status.state in (State.APPLIED, State.NOT_INSTALLED)
        installed = f" ({status.distribution} {status.version})" if status.distribution else ""
        detail = f": {status.detail}" if status.detail else ""
        print(f"{'ok  ' if good else 'FAIL'}  {status.patch.name}: {status.state.value}{installed}{detail}")
        for name, digest in status.hashes:
            print(f"        {name}: sha256 {digest}")
    patched = sorted({status.distribution for status in found if status.state is State.APPLIED})
    if patched:
        print(
            f"RECORD of {', '.join(patched)} still holds the published hashes: a tool that audits it reports the files "
            "above as changed, which is meant."
        )
    return 0 if all(status.state in (State.APPLIED, State.NOT_INSTALLED) for status in found) else 1
