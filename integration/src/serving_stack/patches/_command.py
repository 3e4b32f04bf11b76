# SPDX-License-Identifier: Apache-2.0
"""The command line `serving-stack patches`."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from ._carrier import State, apply_all, revert_all, statuses
from ._export import export
from ._new import new
from ._upstream import Verdict, check_upstream

_ACTIONS = {
    "list": "show every patch and its state",
    "apply": "apply every patch of the installed packages, all or none",
    "revert": "bring every patched file back to its published bytes, all or none",
    "verify": "fail unless every patch of an installed package is applied and every hash is right",
    "check-upstream": "fetch a newer upstream by pip and say of each patch whether it is still needed and applies",
    "new": "make a patch of installed files that were edited in place, and add it to its series",
    "export": "write the patches for one production image, with what applies and checks them there",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their options to `parser`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in _ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        action.add_argument("--folder", type=Path, metavar="DIR", help="a folder of patches (default: the shipped one)")
        if name == "new":
            action.add_argument("name", metavar="NAME", help="<import package>/<short-name>")
            action.add_argument(
                "files", metavar="FILE", type=Path, nargs="+", help="an edited file of one distribution"
            )
            action.add_argument("--description", metavar="TEXT", required=True, help="what it changes and why")
            continue
        scope = action.add_mutually_exclusive_group()
        scope.add_argument("--package", metavar="NAME", help="an import package or distribution to act on alone")
        if name in ("apply", "revert"):
            scope.add_argument("--patch", metavar="NAME", help="a patch to act on alone; others of its files stay")
        if name == "export":
            action.add_argument("--output", type=Path, metavar="DIR", required=True, help="a folder, new or empty")
            source = action.add_mutually_exclusive_group()
            source.add_argument(
                "--image-root",
                type=Path,
                metavar="DIR",
                help="the image, unpacked or mounted, or its site-packages folder (default: this environment)",
            )
            source.add_argument(
                "--version",
                dest="versions",
                action="append",
                default=[],
                metavar="NAME==X",
                help="a distribution and its version in the image; once for each",
            )
        if name == "check-upstream":
            action.add_argument("version", nargs="?", metavar="VERSION", help="of one package (default: the newest)")


def run(args: argparse.Namespace) -> int:
    """Carry out the action; return 0, or 1 where the action is to say so: the docstring of the package has when.

    Raises:
        StackError: what the library function raised; nothing was changed.
    """
    if args.action == "apply":
        apply_all(args.package, patch=args.patch, folder=args.folder, say=print)
        return 0
    if args.action == "revert":
        revert_all(args.package, patch=args.patch, folder=args.folder, say=print)
        return 0
    if args.action == "check-upstream":
        return _check_upstream(args)
    if args.action == "export":
        return _export(args)
    if args.action == "new":
        return _new(args)
    return _list(args) if args.action == "list" else _verify(args)


def _check_upstream(args: argparse.Namespace) -> int:
    good = True
    for check in check_upstream(args.version, args.package, folder=args.folder, say=print):
        print(f"{check.distribution} {check.version} ({check.wheel})")
        for finding in check.findings:
            good = good and finding.verdict in (Verdict.NEEDED, Verdict.OFFSET)
            print(f"  {finding.patch.name}: {finding.verdict.value}")
            for note in finding.notes:
                print(textwrap.indent(note, "      ", lambda line: True))
        for patch in check.left_out:
            print(f"  {patch.name}: for {check.distribution} {patch.versions} only, not checked")
    return 0 if good else 1


def _export(args: argparse.Namespace) -> int:
    sources = {"versions": args.versions, "image_root": args.image_root}
    for one in export(args.output, package=args.package, folder=args.folder, say=print, **sources):
        print(f"{one.package}: for {one.distribution} {one.version}: {', '.join(patch.name for patch in one.patches)}")
    print(f"written to {args.output}; what to do with it is in {args.output / 'README.md'}")
    return 0


def _new(args: argparse.Namespace) -> int:
    made = new(args.name, args.files, args.description, folder=args.folder)
    print(f"{made.file}: written, for {made.distribution} {made.version}")
    print("left to do:")
    print(f"- its section '## {args.name}' in {made.file.parents[1] / 'LEDGER.md'}")
    print(f'- a test that fails without it; in the repository: integration/tests/patches, with PATCH = "{args.name}"')
    print("- its headers Bug and Forwarded, once it is reported upstream")
    for other in made.without_hashes:
        print(f"- hashes for {other} in patches.yaml: until then the patch is refused there")
    return 0


def _list(args: argparse.Namespace) -> int:
    rows = [("PATCH", "PACKAGE", "INSTALLED", "STATE", "DESCRIPTION")]
    for status in statuses(args.package, folder=args.folder, say=print):
        installed = f"{status.distribution} {status.version}".strip() or "-"
        rows.append((status.patch.name, status.patch.package, installed, status.state.value, status.patch.description))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _verify(args: argparse.Namespace) -> int:
    found = statuses(args.package, folder=args.folder, say=print)
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
