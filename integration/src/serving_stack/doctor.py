# SPDX-License-Identifier: Apache-2.0
"""`serving-stack doctor`: what this machine lacks for a profile, each with the command that cures it."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from . import profile as profiles
from .install import absent_plugins, differences, lock
from .state import Run, check_port, free_ports, home, listener

#: Resident memory set aside for one vLLM CPU worker, bytes: three processes, the tiny model, a cache of 1 GiB.
WORKER_BYTES = 4 << 30
#: The same for a frontend or a mock engine.
LIGHT_BYTES = 300 << 20
#: Disk set aside for the pinned engines, bytes; docs/install.md has what they take.
ENGINE_BYTES = 5 << 30


class Finding(NamedTuple):
    """One thing looked at. `cure` is a command, or a sentence where no command helps."""

    verdict: Literal["ok", "warn", "FAIL"]
    what: str
    cure: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--profile", default="cpu", metavar="FILE", help="a profile's name or a YAML file")
    parser.add_argument("--port", type=int, default=8000, metavar="P", help="port `up` would use (default: 8000)")


def _processor_flags() -> set[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("flags", "features")):
                return set(line.split(":", 1)[1].split())
    except OSError:
        pass
    return set()


def _packages(profile: profiles.Profile, name: str) -> Iterator[Finding]:
    wrong = differences(profile.engines)
    cure = f"serving-stack install --profile {name}"
    for package, (wanted, installed) in wrong.items():
        found = "missing" if installed is None else f"{installed} is installed"
        yield Finding("FAIL", f"package {package} {wanted}: {found}", cure)
    if not wrong:
        yield Finding("ok", f"packages: {len(lock(profile.engines))} as locked")
    if profile.requires_patches and not wrong:
        from .patches import missing

        absent = missing()
        if absent:
            yield Finding(
                "FAIL",
                f"patches not applied: {', '.join(one.patch.name for one in absent)}",
                "serving-stack patches apply",
            )
        else:
            yield Finding("ok", "patches applied")
    for what, cure in absent_plugins(profile):
        yield Finding("FAIL", what, cure)


def _vllm(profile: profiles.Profile) -> bool:
    return any(component.module == "dynamo.vllm" for component in profile.components.values())


def _processor(profile: profiles.Profile) -> Iterator[Finding]:
    if not _vllm(profile):
        return
    flags = _processor_flags()
    if platform.machine() == "x86_64":
        if {"avx512f", "avx512_bf16"} - flags and "avx2" not in flags:
            yield Finding("FAIL", "processor: neither AVX-512 nor AVX2", "use another machine")
        fast = [flag for flag in ("amx_bf16", "avx512_bf16") if flag in flags]
        if fast:
            yield Finding("ok", f"processor: {fast[0]}")
        else:
            yield Finding(
                "warn",
                "processor: no AMX or AVX-512 BF16, so vLLM runs MLA on its slow backend",
                "use a Xeon of 2023 or later, or an AMD EPYC of 2022 or later",
            )
    else:
        yield Finding("warn", f"processor: {platform.machine()} is not tested", "")


def _size(count: float) -> str:
    return f"{count / (1 << 30):.1f} GiB"


def _limits() -> tuple[float, float]:
    """Return the cores and bytes of memory that this process may use: the machine's, or its control group's if less."""
    cores: float = len(os.sched_getaffinity(0))
    free: float = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        cores = min(cores, float(quota) / float(period))
    with contextlib.suppress(OSError, ValueError):
        limit = float((group / "memory.max").read_text())
        free = min(free, limit - float((group / "memory.current").read_text()))
    return cores, free


def _machine(profile: profiles.Profile) -> Iterator[Finding]:
    cores, free = _limits()
    yield Finding(
        "ok" if cores >= 2 else "FAIL", f"cores: {cores:g} usable", "" if cores >= 2 else "give the process 2 cores"
    )
    engines = sum(one.count for one in profile.components.values() if one.module == "dynamo.vllm")
    others = sum(one.count for one in profile.components.values() if one.module != "dynamo.vllm")
    need = engines * WORKER_BYTES + others * LIGHT_BYTES
    place = Run()
    state = place.read()
    for process in place.members(state) if state else []:
        with contextlib.suppress(psutil.Error):
            free += process.memory_info().rss
    yield Finding(
        "ok" if free >= need else "FAIL",
        f"memory: {_size(free)} available, {_size(need)} needed",
        "" if free >= need else "end other processes, or start fewer workers (--prefill, --decode)",
    )
    if engines:
        try:
            shared = shutil.disk_usage("/dev/shm").free
        except OSError:
            yield Finding("FAIL", "/dev/shm: not there", "mount -t tmpfs tmpfs /dev/shm")
        else:
            enough = shared >= engines * (128 << 20)
            yield Finding(
                "ok" if enough else "FAIL",
                f"/dev/shm: {_size(shared)} free",
                "" if enough else "mount -o remount,size=2g /dev/shm (in a container: --shm-size=2g)",
            )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < 4096:
        yield Finding("warn", f"open files: limit {files}", "ulimit -n 65536")
    folder = home()
    while not folder.exists():
        folder = folder.parent
    yield Finding("ok" if os.access(folder, os.W_OK) else "FAIL", f"state directory: {home()}", f"chmod u+w {folder}")
    room = shutil.disk_usage(sys.prefix).free
    if differences(profile.engines) and room < ENGINE_BYTES:
        yield Finding("FAIL", f"disk: {_size(room)} free, {_size(ENGINE_BYTES)} needed for the engines", "free some")


def _loads(soname: str) -> bool:
    try:
        ctypes.CDLL(soname)
    except OSError:
        return False
    return True


def _libraries(profile: profiles.Profile, lacking: list[tuple[str, str]]) -> Iterator[Finding]:
    if _vllm(profile):
        # vLLM's CPU kernels link it, and no wheel brings it.
        if _loads("libnuma.so.1"):
            yield Finding("ok", "library libnuma")
        else:
            yield Finding("FAIL", "library libnuma: not found", "apt-get install libnuma1")
    if profile.mooncake is not None:
        for what, cure in lacking:
            yield Finding("warn", f"second cache tier (Mooncake) stays off: {what}", cure)
        if not lacking:
            yield Finding("ok", "second cache tier: Mooncake's package and libraries")


def tier_lacks(profile: profiles.Profile, name: str) -> list[tuple[str, str]]:
    """Return what the profile's Mooncake tier lacks on this machine, each with the command that cures it."""
    if profile.mooncake is None:
        return []
    lacking = []
    modules = {changes["module"] for changes in profile.mooncake.components.values() if "module" in changes}
    for module in sorted(modules):
        if importlib.util.find_spec(module.split(".")[0]) is None:
            lacking.append(
                (f"Python package {module.split('.')[0]} not found", f"serving-stack install --profile {name}")
            )
    absent = {soname: package for soname, package in profile.mooncake.libraries.items() if not _loads(soname)}
    if absent:
        lacking.append((f"{', '.join(absent)} not found", f"apt-get install {' '.join(sorted(set(absent.values())))}"))
    return lacking


def examine(profile: profiles.Profile, name: str, port: int) -> Iterator[Finding]:
    """Yield every finding for a profile, in the order a person would cure them."""
    version = sys.version_info
    supported = (3, 10) <= version[:2] <= (3, 13)
    yield Finding(
        "ok" if supported else "FAIL",
        f"Python {version[0]}.{version[1]}",
        "" if supported else "make a virtual environment with Python 3.10 to 3.13",
    )
    yield from _packages(profile, name)
    lacking = tier_lacks(profile, name)
    yield from _libraries(profile, lacking)
    yield from _processor(profile)
    yield from _machine(profile if lacking else profiles.with_mooncake(profile))
    holder = listener(port)
    place = Run()
    state = place.read()
    if holder is None:
        yield Finding("ok", f"port {port}: free")
    elif state is not None and state.port == port and place.members(state):
        yield Finding("ok", f"port {port}: held by the running stack")
    else:
        yield Finding("FAIL", f"port {port}: taken by {holder}", f"serving-stack up --port {free_ports(1, port)[0]}")


def run(args: argparse.Namespace) -> int:
    """Print the findings; exit 1 if one of them keeps the stack from running."""
    check_port(args.port)
    failed = False
    for finding in examine(profiles.load(args.profile), args.profile, args.port):
        failed |= finding.verdict == "FAIL"
        cure = f"  -> {finding.cure}" if finding.cure and finding.verdict != "ok" else ""
        print(f"{finding.verdict:4}  {finding.what}{cure}")
    return 1 if failed else 0
