# SPDX-License-Identifier: Apache-2.0
"""What dies comes back, and no request hangs. Runs last: it kills the parts of the stack the other tests use.

The bound for a request in flight is the profile's DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS (60 s without a token) and what
a busy machine adds; the bound for a worker is its start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from typing import Any

import openai
import psutil
import pytest

from serving_stack.model import prompt_tokens
from support.stack import Stack, until

pytestmark = pytest.mark.engines

#: Within this a request in flight has ended, seconds.
REQUEST_BOUND = 90
#: Within this a worker is back, seconds: it starts anew while the rest of the stack runs.
WORKER_BOUND = 240


class InFlight:
    """A streamed request in a thread, and how it ended."""

    def __init__(self, stack: Stack, prompt: list[int], max_tokens: int) -> None:
        self.tokens = 0
        self.finish: str | None = None
        self.error: Exception | None = None
        self._stack, self._prompt, self._max_tokens = stack, prompt, max_tokens
        self.thread = threading.Thread(target=self._ask, daemon=True)
        self.thread.start()

    def _ask(self) -> None:
        try:
            stream: Any = self._stack.client.completions.create(
                model=self._stack.model,
                prompt=self._prompt,
                max_tokens=self._max_tokens,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for chunk in stream:
                for choice in chunk.choices:
                    self.tokens += 1
                    self.finish = choice.finish_reason or self.finish
        except Exception as error:
            self.error = error

    def ended(self) -> None:
        """Assert that it ended within the bound, in a whole answer or in an error that says something."""
        self.thread.join(REQUEST_BOUND)
        assert not self.thread.is_alive(), f"still hanging after {REQUEST_BOUND} s and {self.tokens} tokens"
        if self.error is None:
            assert self.finish == "length", f"the stream just stopped after {self.tokens} tokens"
        else:
            assert isinstance(self.error, openai.APIError), repr(self.error)
            assert str(self.error)


def _answer(stack: Stack) -> list[int]:
    found: list[int] = stack.complete(prompt_tokens(200), max_tokens=16)["nvext"]["completion_token_ids"]
    return found


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_killed_worker_comes_back(stack: Stack, victim: str) -> None:
    expected = _answer(stack)
    before = stack.state.components[victim]
    assert before.pid is not None
    if victim == "prefill":
        unseen = prompt_tokens(6000)[::-1]  # nothing of it is cached, so that it takes a while
        request = InFlight(stack, unseen, max_tokens=400)
        time.sleep(0.5)
        assert request.thread.is_alive()
        assert request.tokens == 0, "the prompt is no longer being computed"
    else:
        request = InFlight(stack, prompt_tokens(300), max_tokens=2000)
        until(lambda: request.tokens > 3 or not request.thread.is_alive(), 60, "the answer begins")
        assert request.thread.is_alive()
    os.kill(before.pid, signal.SIGKILL)
    request.ended()
    until(lambda: stack.state.components[victim].restarts == before.restarts + 1, 30, "the launcher notices")
    until(stack.ready, WORKER_BOUND, f"{victim} is back")
    assert "signal 9" in (stack.state.components[victim].reason or "")
    assert stack.state.components[victim].pid != before.pid
    assert _answer(stack) == expected


def test_worker_that_lost_its_registration_is_healed(stack: Stack) -> None:
    """Dynamo's file discovery deletes a worker that was starved for 10 s, and it never registers again by itself."""
    expected = _answer(stack)
    before = stack.state.components["decode"]
    assert before.pid is not None
    group = [process.pid for process in stack.run.members(stack.state) if os.getpgid(process.pid) == before.pid]
    for pid in group:
        os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: before.instance not in stack.listed(), 60, "the frontend drops the starved worker")
    finally:
        for pid in group:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    until(lambda: stack.state.components["decode"].restarts == before.restarts + 1, 60, "the launcher notices")
    assert "registration" in (stack.state.components["decode"].reason or "")
    until(stack.ready, WORKER_BOUND, "decode is registered again")
    assert _answer(stack) == expected


def test_killed_launcher_leaves_a_serving_stack_that_down_cleans_up(stack: Stack) -> None:
    expected = _answer(stack)
    state = stack.state
    members = stack.run.members(state)
    assert len(members) >= 8  # launcher, frontend, two workers of three processes
    request = InFlight(stack, prompt_tokens(300), max_tokens=200)
    os.kill(state.session, signal.SIGKILL)
    request.ended()
    assert request.error is None, "the launcher is no part of serving"
    assert _answer(stack) == expected
    said = stack.command("status", check=False)
    assert said.returncode == 3
    assert "the launcher is dead" in said.stdout
    assert "ended" in stack.command("down").stdout
    until(lambda: not any(process.is_running() for process in members), 10, "no process is left")
    assert stack.run.members(state) == []
    ports = [stack.port, *(port for one in state.components.values() for port in one.ports.values())]
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, f"port {port} is still open"
    mine = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(stack.home) in " ".join(process.info["cmdline"] or [])
    ]
    assert mine == []
    assert stack.command("down").stdout.strip() == "nothing is running"
