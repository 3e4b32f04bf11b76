# SPDX-License-Identifier: Apache-2.0
"""`serving-stack install`: the engines a profile needs, pinned, into the current environment.

A lock (`locks/NAME.lock`) lists every distribution with its version, and each is installed without looking at its own
requirements: some upstreams cannot be resolved by them. `locks/stack.in` and `locks/overrides.txt` say which and why;
`nox -s lock` resolves them anew.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from . import profile as profiles
from .errors import StackError

#: The one distribution whose build is chosen here: its CPU build is on no default index.
TORCH = "torch"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--profile", default="cpu", metavar="FILE", help="a profile's name or a YAML file")
    parser.add_argument("--dry-run", action="store_true", help="say what is missing or different, install nothing")


def lock(engines: str) -> dict[str, str]:
    """Return a lock's pins for this interpreter, distribution -> version.

    Raises:
        StackError: no such lock.
    """
    file = resources.files(__package__) / "locks" / f"{engines}.lock"
    if not file.is_file():
        raise StackError(f"engines {engines!r}: no such lock")
    pins: dict[str, str] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        text = line.split("#")[0].strip()
        if text:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate():
                pins[canonicalize_name(requirement.name)] = next(iter(requirement.specifier)).version
    return pins


def differences(engines: str) -> dict[str, tuple[str, str | None]]:
    """Return what the environment lacks of a lock: distribution -> (wanted version, installed one or `None`)."""
    wrong = {}
    for name, wanted in lock(engines).items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed = None
        if installed is None or installed.split("+")[0] != wanted:
            wrong[name] = (wanted, installed)
    return wrong


def absent_plugins(profile: profiles.Profile) -> list[tuple[str, str]]:
    """Return what a profile's plugins lack, each with the command that cures it."""
    found = []
    for name in profile.plugins:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            found.append((f"plugin {name}: not installed", f"pip install ./packages/{name}"))
    return found


def _installer() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    uv = shutil.which("uv")
    if uv:
        return [uv, "pip", "install", "--python", sys.executable]
    raise StackError(f"neither pip nor uv can install into this environment. Cure: {sys.executable} -m ensurepip")


def _install(arguments: list[str], total: int | None) -> tuple[int, str]:
    """Run the installer, print how far it is (`total` is unknown where it resolves), return its status and output."""
    command = [*_installer(), *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", bufsize=1
    )
    assert process.stdout is not None
    lines, collected = [], 0
    for line in process.stdout:
        lines.append(line)
        if command[0] != sys.executable:  # uv says little, and what it says is progress
            print(f"  {line}", end="", flush=True)
        if line.startswith(("Collecting ", "Processing ")):
            collected += 1
            if total is None or collected % 10 == 0 or collected == total:
                print(f"  {collected:3}{f' of {total}' if total else ''}: {Path(line.split()[1]).name}", flush=True)
        elif line.startswith("Installing collected packages"):
            print("  unpacking", flush=True)
    return process.wait(), "".join(lines)


def _install_torch(version: str) -> None:
    print(f"torch {version}, CPU build", flush=True)
    status, output = _install(["--no-deps", f"{TORCH}=={version}+cpu"], None)
    if status == 0:
        return
    nowhere = ("No matching distribution", "No solution found", "no version of torch")
    unreachable = ("Could not fetch URL", "Retrying (", "Connection", "timed out", "error sending request")
    if not any(sign in output for sign in nowhere) or any(sign in output for sign in unreachable):
        raise StackError(f"torch {version}+cpu could not be installed:\n{output[-2000:]}")
    print(
        f"torch {version}+cpu is on no index this installer sees: taking the default build, which on x86-64 brings\n"
        "3 GB of CUDA libraries. To avoid that, point pip at a folder with the CPU wheel (PIP_FIND_LINKS) or at\n"
        "PyTorch's CPU index (PIP_EXTRA_INDEX_URL), uninstall torch and run this again: docs, 'Install'.",
        flush=True,
    )
    status, output = _install([f"{TORCH}=={version}"], None)
    if status != 0:
        raise StackError(f"torch {version} could not be installed:\n{output[-2000:]}")


def run(args: argparse.Namespace) -> int:
    """Install what is missing or different, then apply our patches if the profile needs them."""
    profile = profiles.load(args.profile)
    wrong = differences(profile.engines)
    if args.dry_run:
        for name, (wanted, installed) in wrong.items():
            print(f"{name} {wanted} ({'missing' if installed is None else f'{installed} is installed'})")
        return 1 if wrong else 0
    if not wrong:
        print(f"{len(lock(profile.engines))} distributions are as locked")
    else:
        if TORCH in wrong:
            _install_torch(wrong.pop(TORCH)[0])
        if wrong:
            print(f"{len(wrong)} distributions", flush=True)
            status, output = _install(
                ["--no-deps", *(f"{name}=={pin}" for name, (pin, _) in wrong.items())], len(wrong)
            )
            if status != 0:
                raise StackError(f"the installer failed:\n{output[-3000:]}")
        left = differences(profile.engines)
        if left:
            raise StackError(f"after the install still not as locked: {', '.join(left)}")
    if profile.requires_patches:
        from .patches import apply_all

        apply_all()
    return 0
