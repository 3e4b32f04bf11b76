# SPDX-License-Identifier: Apache-2.0
"""Dynamo's real frontend with our chat engine, before a worker that says what it is told (`saying_worker`)."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from . import dynamo
from .chat_templates import TEMPLATES
from .processes import Process, free_port
from .saying_worker import write_model

__all__ = ["BARE", "MODELS", "Answer", "Frontend", "Worker", "events", "worker"]

#: Models by name: the worker's own name of the format, and whether it has a reasoning parser.
MODELS: Mapping[str, tuple[str, str | None]] = {
    "glm47": ("glm47", "glm45"),
    "glm45": ("glm45", None),
    "qwen3_coder": ("qwen3_coder", "qwen3"),
    "hermes": ("qwen3", None),
    "kimi_k2": ("kimi_k25", None),
    "deepseek_v3_2": ("deepseek_v3_2", None),
    "deepseek_v4": ("deepseek-v4", "deepseek_v4"),
}
#: Models whose worker names a parser that nobody here knows, and none at all.
BARE: Mapping[str, tuple[str | None, str | None]] = {"mystery": ("harmony", None), "bare": (None, "qwen3")}


def events(text: str) -> list[dict[str, Any]]:
    """Return the JSON of the data lines of a stream of server-sent events."""
    lines = (line[6:] for line in text.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


@dataclass
class Answer:
    """A chat completion as its client has it, plain or put together from a stream."""

    status: int
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    finish: str | None = None
    error: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    flags: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def message(self) -> str:
        """The text of its error."""
        assert self.error is not None, self
        return str(self.error["message"])

    @property
    def fault(self) -> dict[str, Any]:
        """The JSON object that the message of a broken call ends with."""
        found: dict[str, Any] = json.loads(self.message[self.message.index(" {") :])
        return found


class Frontend:
    """A frontend process of Dynamo's."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False)

    def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """Send a raw request."""
        return self._client.post(path, json=dict(body))

    def metric(self, name: str, model: str) -> float:
        """Return a counter of its own metrics, summed over all labels but the model."""
        lines = self._client.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(f"{name}{{") and f'model="{model}"' in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def leave(self, model: str, stream: bool, after_s: float) -> None:
        """Ask for a chat completion and close the connection before it is complete."""
        body = {"model": model, "messages": [{"role": "user", "content": "Go."}], "stream": stream}
        with contextlib.suppress(httpx.TimeoutException):
            options: dict[str, Any] = {"json": body, "timeout": after_s}
            with self._client.stream("POST", "/v1/chat/completions", **options) as answer:
                for line in answer.iter_lines():
                    if "content" in line:
                        break

    def models(self) -> set[str]:
        """Return the names of the models that it serves."""
        found = self._client.get("/v1/models").json()
        return {one["id"] for one in found["data"]}

    def chat(self, model: str, stream: bool = False, **body: Any) -> Answer:
        """Ask for a chat completion."""
        body = {"model": model, "messages": [{"role": "user", "content": "Go."}], "stream": stream, **body}
        got = self.post("/v1/chat/completions", body)
        if not stream:
            if got.status_code != 200:
                return Answer(got.status_code, error=got.json())
            whole = got.json()
            (choice,) = whole["choices"]
            answer = Answer(200, finish=choice["finish_reason"], usage=whole.get("usage"))
            _add(answer, choice["message"], whole.get("nvext"), choice.get("logprobs"))
            return answer
        answer = Answer(got.status_code)
        for chunk in events(got.text):
            if "error" in chunk:
                answer.error = chunk["error"]
                continue
            answer.usage = chunk.get("usage") or answer.usage
            for choice in chunk["choices"]:
                _add(answer, choice["delta"], chunk.get("nvext"), choice.get("logprobs"))
                answer.finish = choice["finish_reason"] or answer.finish
        return answer


def _add(answer: Answer, part: Mapping[str, Any], nvext: Any, logprobs: Any) -> None:
    answer.content += part.get("content") or ""
    answer.reasoning += part.get("reasoning_content") or ""
    answer.flags = (nvext or {}).get("tool_call_errors") or answer.flags
    answer.logprobs += (logprobs or {}).get("content") or []
    for number, call in enumerate(part.get("tool_calls") or []):
        index = call.get("index", number)
        function = call["function"]
        if index == len(answer.calls):
            answer.calls.append((function["name"], function["arguments"]))
            answer.ids.append(call["id"])
        else:
            name, arguments = answer.calls[index]
            answer.calls[index] = name, arguments + function["arguments"]


class Worker:
    """A worker that serves a model per format, and the frontends before it."""

    def __init__(self, folder: Path, environment: Mapping[str, str], stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self._environment = environment
        self._stack = stack
        self._spare = stack.enter_context(contextlib.ExitStack())
        self._frontends: dict[str, Frontend] = {}
        self._written = 0

    def say(self, *answers: str, finish: str = "stop", chunk: int = 3, **more: Any) -> None:
        """Tell the worker what its next generations are."""
        self._written += 1
        told = {"answers": answers, "finish": finish, "chunk": chunk, "number": self._written, **more}
        new = self.folder / "say.new"
        new.write_text(json.dumps(told), "utf-8")
        new.rename(self.folder / "say.json")
        (self.folder / "requests.jsonl").write_text("", "utf-8")

    @property
    def requests(self) -> list[dict[str, Any]]:
        """What arrived since it was told."""
        return [json.loads(line) for line in (self.folder / "requests.jsonl").read_text("utf-8").splitlines()]

    def frontend(self, on_call_error: str = "error", enabled: bool = True, **variables: str) -> Frontend:
        """Return the frontend with that policy, or with Dynamo's own processing, and further variables; started where
        it is not up.

        One is up beside the one of the policy `error`: each watches all models by inotify, of which a system allows
        few.
        """
        name = " ".join([on_call_error if enabled else "own", *variables.values()])
        # Dynamo's own serves no model without a template of its own.
        served = {*MODELS, *BARE} if enabled else {"hermes"}
        if name not in self._frontends:
            if name != "error":
                self._spare.close()
                self._frontends = {kept: one for kept, one in self._frontends.items() if kept == "error"}
            port = free_port()
            frontend = Frontend(port)
            settings = {"DYN_STRUCTURAL_TAGS": str(int(enabled)), "DYN_STRUCTURAL_TAGS_ON_CALL_ERROR": on_call_error}
            (self._stack if name == "error" else self._spare).enter_context(
                Process(
                    [
                        *(sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1"),
                        *("--http-port", str(port), "--enable-anthropic-api"),
                        *("--chat-engine-factory", "dynamo_structural_tags.dynamo:wrap"),
                    ],
                    name=f"frontend {name}",
                    ready=lambda: frontend.models() >= served,
                    deadline_s=60,
                    env={**self._environment, **settings, **variables},
                    log=self.folder / f"{name}.log",
                )
            )
            self._frontends[name] = frontend
        return self._frontends[name]

    def log(self, frontend: str = "error") -> str:
        """Return what the frontend with that policy has logged."""
        return (self.folder / f"{frontend}.log").read_text("utf-8")


@contextlib.contextmanager
def worker(folder: Path) -> Iterator[Worker]:
    """Start a worker with the models of `MODELS` and `BARE`."""
    environment = {
        **dynamo.environment(folder / "discovery"),
        "HOME": str(folder),  # Dynamo keeps what it reads of a model there
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    models = []
    for name, (parser, reasoning) in {**MODELS, **BARE}.items():
        model = write_model(folder / "models" / name, TEMPLATES[name if name in MODELS else "hermes"])
        card = {"name": name, "folder": str(model), "tool_call_parser": parser, "reasoning_parser": reasoning}
        models += ["--model", json.dumps(card)]
    command = [sys.executable, "-m", "support.saying_worker", "--folder", str(folder), *models]
    with contextlib.ExitStack() as stack:
        stack.enter_context(Process(command, name="worker", env=environment, log=folder / "worker.log"))
        one = Worker(folder, environment, stack)
        one.say("Nothing.")
        yield one
