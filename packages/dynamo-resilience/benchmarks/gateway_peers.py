# SPDX-License-Identifier: Apache-2.0
"""The peers: LiteLLM's proxy, sglang-router and vllm-router, each in an environment of its own, before one backend."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gateway_parts import pinned

from support.bench import Unavailable
from support.processes import Process, free_ports

__all__ = ["PEERS", "Peer"]

#: Where environments are kept; the variable names a folder that has them already.
HOME = Path(os.environ.get("GATEWAY_BENCH_PEERS", ".nox/peers"))


@dataclass(frozen=True)
class Peer:
    """A peer, pinned.

    Attributes:
        name, version: the distribution and its version.
        requirement: what to install.
        command: the program and its arguments, from (environment's bin, port, second port, backend, folder).
        env: variables it needs.
    """

    name: str
    version: str
    requirement: str
    command: Callable[[Path, int, int, str, Path], list[str]]
    env: tuple[tuple[str, str], ...] = ()

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}"

    def process(self, backend: str, core: int, folder: Path) -> tuple[Process, str]:
        """Return its process on one core before `backend`, not started, and where to POST."""
        port, other = free_ports(2)
        command = pinned(core, self.command(self._environment(), port, other, backend, folder))
        url = f"http://127.0.0.1:{port}"
        process = Process(command, name=self.name, ready=f"{url}/v1/models", deadline_s=120, env=dict(self.env))
        return process, f"{url}/v1/chat/completions"

    def _environment(self) -> Path:
        home = (HOME / self.name).absolute()
        if not any(
            (home / "lib").glob(f"python*/site-packages/{self.name.replace('-', '_')}-{self.version}.dist-info")
        ):
            home.parent.mkdir(parents=True, exist_ok=True)
            quiet = ("-q", "--disable-pip-version-check")
            try:
                subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
                subprocess.run([str(home / "bin" / "pip"), "install", *quiet, self.requirement], check=True)
            except subprocess.CalledProcessError as error:
                raise Unavailable(f"{self.requirement} cannot be installed into {home}: {error}") from error
        return home / "bin"


def _litellm(bin_: Path, port: int, _: int, backend: str, folder: Path) -> list[str]:
    config = folder / "litellm.yaml"
    config.write_text(
        "model_list:\n  - model_name: m\n    litellm_params:\n      model: openai/m\n"
        f"      api_base: {backend}/v1\n      api_key: none\nlitellm_settings:\n  num_retries: 0\n",
        "utf-8",
    )
    return [str(bin_ / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]


def _router(command: list[str], port: int, other: int, backend: str) -> list[str]:
    words = [*command, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(other)]
    words += ["--worker-urls", backend, "--policy", "round_robin", "--log-level", "error"]
    return [*words, "--max-concurrent-requests", "100000"]


#: Each as it comes: no retries and no breakers switched off, one worker, round robin.
PEERS = (
    Peer(
        "sglang-router",
        "0.3.2",
        "sglang-router==0.3.2",
        lambda b, p, o, u, _: _router([f"{b}/sglang-router", "launch"], p, o, u),
    ),
    Peer("vllm-router", "0.1.17", "vllm-router==0.1.17", lambda b, p, o, u, _: _router([f"{b}/vllm-router"], p, o, u)),
    Peer(
        "litellm",
        "1.108.7",
        "litellm[proxy]==1.108.7",
        _litellm,
        env=(("LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY", "true"), ("LITELLM_LOG", "ERROR")),
    ),
)
