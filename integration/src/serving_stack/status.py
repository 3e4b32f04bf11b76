# SPDX-License-Identifier: Apache-2.0
"""`serving-stack status`: components, workers, ports."""

from __future__ import annotations

import argparse

from .state import Run


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--json", action="store_true", help="print the state file as it stands")


def run(args: argparse.Namespace) -> int:
    """Print the state; exit 0 if the stack is ready, 3 if it is not (as service managers do)."""
    place = Run()
    state = place.read()
    alive = place.launcher_alive()
    if state is None:
        print("{}" if args.json else "nothing has run yet: serving-stack up")
        return 3
    members = place.members(state)
    ready = alive and state.phase == "ready" and all(one.state == "ready" for one in state.components.values())
    if args.json:
        print(state.model_dump_json(indent=1))
        return 0 if ready else 3
    if alive:
        print(f"{state.phase}: {state.base_url} serves {state.served_model_name!r} (profile {state.profile})")
    elif members:
        print(f"the launcher is dead, {len(members)} processes live on unwatched: serving-stack down")
    else:
        print(f"not running ({state.phase}{': ' + state.reason if state.reason else ''})")
        return 3
    row = "{:12} {:10} {:>8} {:>8} {:20} {}"
    print(row.format("component", "state", "process", "restarts", "instance", "ports").rstrip())
    for name, one in state.components.items():
        ports = " ".join(f"{key}={port}" for key, port in one.ports.items())
        instance = f"{int(one.instance):x}" if one.instance else "-"
        print(row.format(name, one.state, one.pid or "-", one.restarts, instance, ports).rstrip())
        if one.reason:
            print(f"{'':12} last restart: {one.reason}")
    return 0 if ready else 3
