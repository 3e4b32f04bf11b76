# SPDX-License-Identifier: Apache-2.0
"""A running stack as its user sees it: the `serving-stack` command, the OpenAI SDK, raw requests, workers' counters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from serving_stack.launcher import metric
from serving_stack.state import Run, RunState

__all__ = ["Stack", "until"]


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

    #: Where its run and its model live.
    home: Path
    #: The API's port.
    port: int
    #: A profile's name or file.
    profile: str = "cpu"

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

    def up(self, *options: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Start it; returns when a request went through."""
        return self.command("up", "--port", str(self.port), "--profile", self.profile, *options, check=check)

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
    def client(self) -> Any:
        """The OpenAI SDK, pointed at it, with no retries of its own."""
        import openai

        plain = openai.DefaultHttpxClient(trust_env=False)
        return openai.OpenAI(
            base_url=self.state.base_url, api_key="none", max_retries=0, timeout=120, http_client=plain
        )

    def post(
        self, path: str, body: dict[str, Any] | str, timeout: float = 120, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """Send a raw request to the API."""
        content = body if isinstance(body, str) else json.dumps(body)
        return httpx.post(
            f"{self.state.base_url}{path}",
            content=content,
            headers={"content-type": "application/json", **(headers or {})},
            timeout=timeout,
            trust_env=False,
        )

    def complete(self, tokens: list[int], max_tokens: int = 24, prefill: str | None = None) -> dict[str, Any]:
        """Complete a prompt of token ids greedily, past any end-of-text token; `prefill` names a worker."""
        body = {
            "model": self.model,
            "prompt": tokens,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "nvext": {"extra_fields": ["completion_token_ids", "worker_id"]},
        }
        answer = self.post("/completions", body, headers=self.to(prefill))
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        if prefill is not None:
            served = result["nvext"]["worker_id"]["prefill_worker_id"]
            assert str(served) == self.state.components[prefill].instance, f"{served:x} served it, not {prefill}"
        return result

    def to(self, prefill: str | None) -> dict[str, str]:
        """Return the headers that make Dynamo's router send a request to one prefill worker."""
        if prefill is None:
            return {}
        return {"x-dynamo-prefill-instance-id": str(self.state.components[prefill].instance)}

    def metrics(self, component: str) -> str:
        """Read a worker's own metrics, in Prometheus' text form."""
        port = self.state.components[component].ports["system_port"]
        return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10, trust_env=False).text

    def metric(self, component: str, name: str) -> float:
        """Read one of a worker's own counters."""
        return metric(self.metrics(component), name)

    def sources(self, component: str) -> dict[str, float]:
        """Read where a worker took its prompt tokens from: computed, found in its own cache, loaded from elsewhere."""
        found = {}
        for line in self.metrics(component).splitlines():
            if line.startswith("vllm:prompt_tokens_by_source_total{"):
                found[line.split('source="', 1)[1].split('"', 1)[0]] = float(line.rsplit(None, 1)[1])
        return found

    def gained(self, component: str, before: dict[str, float], tokens: int) -> dict[str, float]:
        """Wait until a worker's `sources` have grown by `tokens` since `before`; return by how much each has."""

        def settled() -> dict[str, float] | None:
            grown = {source: count - before.get(source, 0) for source, count in self.sources(component).items()}
            return grown if sum(grown.values()) >= tokens else None

        grown: dict[str, float] = until(settled, 20, f"{component} counts {tokens} prompt tokens")
        return grown

    def store(self, name: str) -> float:
        """Read one of the counters of Mooncake's master."""
        port = self.state.components["mooncake"].ports["metrics_port"]
        return metric(httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10, trust_env=False).text, name)

    def listed(self) -> set[str]:
        """Return the instance ids that the frontend lists for `generate`."""
        answer = httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=10, trust_env=False).json()
        return {str(one["instance_id"]) for one in answer["instances"] if one["endpoint"] == "generate"}

    def ready(self) -> bool:
        """Return whether every component is ready.

        The command is asked last: each call is a process, and one after the other takes a core from what is starting.
        """
        state = self.run.read()
        if state is None or any(one.state != "ready" for one in state.components.values()):
            return False
        return self.command("status", check=False).returncode == 0
