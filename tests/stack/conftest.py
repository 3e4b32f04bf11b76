# SPDX-License-Identifier: Apache-2.0
"""One real stack for all tests of this folder, started once, and the few things a client needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from serving_stack.launcher import metric
from serving_stack.state import Run, RunState, free_ports


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Wait until a condition gives something true, and return that; fail after `seconds`, naming what was awaited."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.25)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


@dataclass
class Stack:
    """A running stack, as its user sees it."""

    home: Path
    port: int

    def command(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `serving-stack WORDS` against this stack."""
        done = subprocess.run(
            [sys.executable, "-m", "serving_stack", *words],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "SERVING_STACK_HOME": str(self.home)},
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
        return done

    def up(self) -> None:
        """Start it; returns when a request went through."""
        self.command("up", "--port", str(self.port))

    @property
    def run(self) -> Run:
        """Its run directory."""
        return Run(self.home / "run")

    @property
    def state(self) -> RunState:
        """Its state file."""
        state = self.run.read()
        assert state is not None
        return state

    @property
    def model(self) -> str:
        """The model's name."""
        return self.state.served_model_name

    @property
    def client(self) -> openai.OpenAI:
        """The OpenAI SDK, pointed at it."""
        return openai.OpenAI(base_url=self.state.base_url, api_key="none", max_retries=0, timeout=120)

    def post(self, path: str, body: dict[str, Any] | str, timeout: float = 120) -> httpx.Response:
        """Send a raw request to the API."""
        content = body if isinstance(body, str) else json.dumps(body)
        return httpx.post(
            f"{self.state.base_url}{path}",
            content=content,
            headers={"content-type": "application/json"},
            timeout=timeout,
        )

    def complete(self, tokens: list[int], max_tokens: int = 24) -> dict[str, Any]:
        """Complete a prompt of token ids greedily, past any end-of-text token."""
        body = {
            "model": self.model,
            "prompt": tokens,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "nvext": {"extra_fields": ["completion_token_ids", "worker_id"]},
        }
        answer = self.post("/completions", body)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def metric(self, component: str, name: str) -> float:
        """Read one of a worker's own counters."""
        port = self.state.components[component].ports["system_port"]
        return metric(httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text, name)

    def ready(self) -> bool:
        """Return whether every component is ready."""
        return self.command("status", check=False).returncode == 0


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The CPU profile's stack, up."""
    one = Stack(tmp_path_factory.mktemp("home"), free_ports(1, above=21000)[0])
    one.up()
    try:
        yield one
    finally:
        one.command("down", check=False)
