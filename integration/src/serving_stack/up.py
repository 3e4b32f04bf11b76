# SPDX-License-Identifier: Apache-2.0
"""`serving-stack up`: start a profile, return when a real request went through it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

from . import profile as profiles
from .doctor import tier_lacks
from .down import take_down
from .errors import StackError
from .install import absent_plugins
from .launcher import LONGEST_END, Plan
from .state import HOME_VARIABLE, MARK, ComponentState, Run, RunState, check_port, free_ports, home, listener


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model", metavar="DIR", help="model directory (default: the tiny model, made if missing)")
    parser.add_argument("--prefill", type=int, metavar="N", help="number of prefill workers")
    parser.add_argument("--decode", type=int, metavar="N", help="number of decode workers")
    parser.add_argument("--router", type=int, metavar="N", help="number of routers, where the profile has one")
    parser.add_argument("--no-mooncake", action="store_true", help="leave the second cache tier out")
    parser.add_argument("--port", type=int, default=8000, metavar="P", help="port of the API (default: 8000)")
    parser.add_argument(
        "--profile", default="cpu", metavar="FILE", help="a profile's name or a YAML file (default: cpu)"
    )


def _model(given: str | None) -> Path:
    if given is None:
        from .model import write_model

        return write_model(home() / "models" / "glm-tiny")
    path = Path(os.path.abspath(given))  # its last part names the model, so ".." must go
    if not (path / "config.json").is_file():
        raise StackError(f"--model {given}: no config.json there")
    return path


def _profile(args: argparse.Namespace) -> tuple[profiles.Profile, list[str]]:
    """Return the profile as the command line wants it, and the components of its second tier.

    The tier is left out if it is unwanted or cannot be.
    """
    profile = profiles.load(args.profile)
    tier: list[str] = []
    if args.no_mooncake:
        if profile.mooncake is None:
            raise StackError(f"--no-mooncake: profile {args.profile} has no Mooncake tier")
    elif lacking := tier_lacks(profile, args.profile):
        for what, cure in lacking:
            print(f"no second cache tier (Mooncake): {what}. Cure: {cure}", flush=True)
    elif profile.mooncake is not None:
        tier = [name for name in profile.mooncake.components if name not in profile.components]
        profile = profiles.with_mooncake(profile)
    counts = {"prefill": args.prefill, "decode": args.decode, "router": args.router}
    return profiles.with_counts(profile, counts), tier


def _plan(args: argparse.Namespace, run: Run) -> Plan:
    check_port(args.port)
    profile, tier = _profile(args)
    for what, cure in absent_plugins(profile):
        raise StackError(f"{what}. Cure: {cure}")
    if profile.requires_patches:
        from .patches import missing

        absent = missing()
        if absent:
            raise StackError(
                f"patches not applied: {', '.join(one.patch.name for one in absent)}. Cure: serving-stack patches apply"
            )
    busy = listener(args.port)
    if busy is not None:
        raise StackError(f"--port {args.port} is taken by {busy}")
    model = _model(args.model)
    name = profile.served_model_name if args.model is None else model.name
    names = {
        "port": str(args.port),
        "model": str(model),
        "served_model_name": name,
        "run_dir": str(run.directory),
    }
    rendered = profiles.render(profile, names, free_ports(profiles.port_count(profile), above=args.port))
    return Plan(
        run_id=uuid.uuid4().hex,
        profile=args.profile,
        model=str(model),
        served_model_name=name,
        port=args.port,
        ready_seconds=profile.ready_seconds,
        transfers_kv=profile.transfers_kv,
        processes=rendered.processes,
        files=rendered.files,
        tier=tier,
    )


def _launch(run: Run, plan: Plan) -> subprocess.Popen[bytes]:
    for name in ("discovery", "files"):
        shutil.rmtree(run.directory / name, ignore_errors=True)
        (run.directory / name).mkdir(parents=True)
    for name, content in plan.files.items():
        (run.directory / "files" / name).write_text(content, encoding="utf-8")
    run.logs.mkdir(exist_ok=True)
    with (run.logs / "launcher.log").open("wb") as log:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "serving_stack.launcher"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=run.directory,  # `python -m` puts it first on the path: no file of the user's shadows a module
            env={**os.environ, HOME_VARIABLE: str(run.directory.parent), MARK: plan.run_id},
        )
    assert launcher.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once: whoever follows it says why
        launcher.stdin.write(json.dumps(plan.model_dump()).encode())
        launcher.stdin.close()
    return launcher


def _follow(run: Run, plan: Plan, launcher: subprocess.Popen[bytes]) -> RunState:
    """Print progress until the run is ready or has failed."""
    begun = time.monotonic()
    shown: dict[str, str] = {}

    def show(name: str, text: str) -> None:
        if shown.get(name) != text:
            shown[name] = text
            print(f"[{time.monotonic() - begun:5.1f} s] {name:12} {text}", flush=True)

    def describe(component: ComponentState) -> str:
        seconds = f" after {component.ready_after} s" if component.state == "ready" else ""
        pid = f", process {component.pid}" if component.state == "starting" else ""
        return component.state + seconds + pid

    while True:
        state = run.read()
        if state is not None and state.run_id == plan.run_id:
            for name, component in state.components.items():
                if component.state != "waiting":
                    show(name, describe(component))
            if state.phase == "ready":
                show("warm-up", state.warm_up or "answered")
                return state
            if state.phase == "failed":
                tier = any(
                    component.state == "failed" and name in plan.tier for name, component in state.components.items()
                )
                hint = "\nserving-stack up --no-mooncake leaves the second cache tier out" if tier else ""
                raise StackError((state.reason or "the launcher failed") + hint)
            if state.phase == "starting" and all(one.state == "ready" for one in state.components.values()):
                show("warm-up", "sending a request")
        if launcher.poll() is not None:
            text = (run.logs / "launcher.log").read_text(errors="replace")
            raise StackError(f"the launcher ended with status {launcher.returncode}:\n{text[-2000:]}".rstrip())
        time.sleep(0.2)


def _start(args: argparse.Namespace, place: Run) -> RunState:
    if place.launcher_alive():
        state = place.read()
        at = f" at {state.base_url}" if state else ""
        raise StackError(f"a stack is already running{at}. To end it: serving-stack down")
    plan = _plan(args, place)
    ended = take_down(place)
    if ended:
        print(f"ended {ended} processes that a launcher left behind when it was killed")
    launcher = _launch(place, plan)
    try:
        return _follow(place, plan, launcher)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            print("interrupted: ending every process", file=sys.stderr)
        launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(LONGEST_END)
        state = place.read()
        if state is not None and state.run_id == plan.run_id:
            take_down(place, ask=False)
        raise


def run(args: argparse.Namespace) -> int:
    """Start the stack; print the base URL and a curl to paste."""
    place = Run()
    with place.starting():
        state = _start(args, place)
    body = json.dumps(
        {"model": state.served_model_name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}
    )
    print(f"\nready after {state.ready_after} s: {state.base_url} serves {state.served_model_name!r}\n")
    print(f"curl {state.base_url}/chat/completions -H 'content-type: application/json' -d {shlex.quote(body)}")
    print('\nserving-stack chat "Hello" | status | logs -f | down')
    return 0
