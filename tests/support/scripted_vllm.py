# SPDX-License-Identifier: Apache-2.0
"""vLLM's own HTTP server over an engine that says what it is told: what a caller sees of any answer, without a model.

Everything but the engine is vLLM's: validation, rendering, parsers, the three APIs, their errors. Needs no port.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient  # type: ignore[import-not-found, unused-ignore]
from tokenizers.decoders import DecodeStream
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.sampling_params import RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["ScriptedServer", "events"]


class _Engine:
    """The part of vLLM's `EngineClient` that the servers use."""

    errored = False
    is_running = True
    is_stopped = False
    dead_error = RuntimeError("dead")

    def __init__(self, config: Any) -> None:
        self.vllm_config = config
        self.model_config = config.model_config
        self.renderer = renderer_from_config(config)
        self.input_processor = None
        self.texts: Sequence[str] = ("",)
        self.reason = "stop"
        self.piece = 1
        self.params: Any = None

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Take every request."""

    async def is_tracing_enabled(self) -> bool:
        return False

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        self.params = params
        streamed = params.output_kind == RequestOutputKind.DELTA
        whole = []
        for index, text in enumerate(self.texts):
            steps = list(self._steps(text, self.piece if streamed else len(text) + 2))
            for at, (tokens, piece) in enumerate(steps):
                reason = self.reason if at == len(steps) - 1 else None
                output = CompletionOutput(index, piece, tokens, None, None, finish_reason=reason)
                if streamed:
                    done = reason is not None and index == len(self.texts) - 1
                    yield RequestOutput(request_id, None, prompt["prompt_token_ids"], None, [output], done)
                else:
                    whole.append(output)
        if not streamed:
            yield RequestOutput(request_id, None, prompt["prompt_token_ids"], None, whole, True)

    def _steps(self, text: str, size: int) -> Iterator[tuple[list[int], str]]:
        """Yield the tokens of a text, so many at once, each with the text that they add; at least one step."""
        tokenizer = self.renderer.tokenizer
        tokens = tokenizer.encode(text, add_special_tokens=False)
        decoder = DecodeStream(skip_special_tokens=False)
        pieces = [decoder.step(tokenizer._tokenizer, token) or "" for token in tokens]
        assert "".join(pieces) == text
        if self.reason == "stop":
            tokens, pieces = [*tokens, tokenizer.eos_token_id], [*pieces, ""]
        for at in range(0, max(len(tokens), 1), size):
            yield tokens[at : at + size], "".join(pieces[at : at + size])


class ScriptedServer:
    """A server of vLLM whose next answers are set on it."""

    _config: tuple[Path, Any] | None = None

    def __init__(self, model: Path, *words: str) -> None:
        """Make one for a model's folder (its tokenizer and template are used) and further words of the command line."""
        parser = make_arg_parser(FlexibleArgumentParser())
        given = ["--model", str(model), "--served-model-name", "tiny", "--max-model-len", "2048", "--enforce-eager"]
        args = parser.parse_args([*given, *words])
        if ScriptedServer._config is None or ScriptedServer._config[0] != model:
            ScriptedServer._config = (model, AsyncEngineArgs.from_cli_args(args).create_engine_config())
        # The engine's configuration is shared, so this is not done on the way to it.
        args.structured_outputs_config.reasoning_parser = args.reasoning_parser or ""
        self.engine = _Engine(ScriptedServer._config[1])
        app = build_app(args, ("generate",), self.engine.model_config)
        asyncio.run(init_app_state(self.engine, app.state, args, ("generate",)))
        self.client = TestClient(app, raise_server_exceptions=False)

    def say(self, *texts: str, reason: str = "stop", piece: int = 1) -> None:
        """Set the next answers, one for each choice, streamed so many tokens at once."""
        self.engine.texts, self.engine.reason, self.engine.piece = texts, reason, piece

    @property
    def tag(self) -> Any:
        """The structural tag that reached the engine with the last request, or None."""
        wanted = self.engine.params.structured_outputs
        return None if wanted is None or wanted.structural_tag is None else json.loads(wanted.structural_tag)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send a request."""
        return self.client.post(path, json={"model": "tiny", **body})


def events(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and the data of every server-sent event; `[DONE]` as text."""
    for block in filter(None, text.split("\n\n")):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        data = fields["data"]
        yield fields.get("event", ""), data if data == "[DONE]" else json.loads(data)
