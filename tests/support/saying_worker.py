# SPDX-License-Identifier: Apache-2.0
"""A Dynamo worker that says what it is told: it stands for a GPU model behind a real frontend (`FakeEngine`).

    python -m support.saying_worker --folder DIR --model '{"name": NAME, "folder": DIR, "tool_call_parser": NAME}' ...

A model may also have `reasoning_parser`, `structural_tag` and `runtime_data`, as the worker's card is to have them.
`FOLDER/say.json` holds `{"answers": [TEXT, ...], "finish": "stop", "chunk": 3}`: the n-th request since it was written
gets the n-th answer, later ones the last, in chunks of so many tokens. `FOLDER/requests.jsonl` collects what arrived,
`FOLDER/stopped` appears when a request was called off. `pause` is what precedes each chunk, in seconds; `error` fails
the second one.
The answer ends early, with the reason `length`, at the request's max_tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

__all__ = ["FakeEngine", "write_model"]

#: Ends every answer; the frontend has to drop it.
END = "<|endoftext|>"


def write_model(folder: Path, template: str | None) -> Path:
    """Write a model directory without weights: the tiny model's tokenizer, a configuration and a chat template."""
    from serving_stack.model import text_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = text_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": tokenizer.get_vocab_size(),
        "intermediate_size": 128,
        "max_position_embeddings": 32768,
        "eos_token_id": end,
        **shape,
    }
    settings = {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 32768}
    if template is not None:
        settings["chat_template"] = template
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return folder


class FakeEngine:
    """Answers each request with the next text of `say.json`, whatever the prompt."""

    def __init__(self, model: Path, folder: Path) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.folder = folder
        self.read = 0
        self.served = 0

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Yield the answer in chunks, as Dynamo's workers do."""
        with (self.folder / "requests.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(request) + "\n")
        told = self.folder / "say.json"
        changed = told.stat().st_mtime_ns
        if changed != self.read:
            self.read, self.served = changed, 0
        say = json.loads(told.read_text("utf-8"))
        text = say["answers"][min(self.served, len(say["answers"]) - 1)]
        self.served += 1
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        finish = say.get("finish", "stop")
        if finish == "stop":
            ids.append(self.tokenizer.encode(END, add_special_tokens=False).ids[0])
        most = request["stop_conditions"].get("max_tokens")
        if most is not None and len(ids) > most:
            ids, finish = ids[:most], "length"
        wanted = request["output_options"].get("logprobs")
        chunk = say.get("chunk", 3)
        for start in range(0, len(ids), chunk):
            if context.is_stopped():
                (self.folder / "stopped").write_text(f"{start} of {len(ids)}", "utf-8")
                return
            if say.get("pause"):
                await asyncio.sleep(say["pause"])
            part = ids[start : start + chunk]
            answer: dict[str, Any] = {"token_ids": part}
            if wanted is not None:
                answer["log_probs"] = [-0.5] * len(part)
                answer["top_logprobs"] = [
                    [{"rank": 1, "token_id": token, "token": None, "logprob": -0.5}][: wanted or 1] for token in part
                ]
            if say.get("error") and start:
                raise RuntimeError(say["error"])
            yield answer
        yield {
            "token_ids": [],
            "finish_reason": finish,
            "completion_usage": {
                "prompt_tokens": len(request["token_ids"]),
                "completion_tokens": len(ids),
                "total_tokens": len(request["token_ids"]) + len(ids),
            },
        }


def main() -> None:
    """Register the models and serve them until the process is ended."""
    from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
    from dynamo.runtime import DistributedRuntime, dynamo_worker

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", type=json.loads, action="append", required=True)
    args = parser.parse_args()

    @dynamo_worker()  # type: ignore[untyped-decorator, unused-ignore]  # no dynamo where types are checked
    async def serve(runtime: DistributedRuntime) -> None:
        serving = []
        for model in args.model:
            endpoint = runtime.endpoint(f"dynamo.{model['name']}.generate")
            config = ModelRuntimeConfig()
            config.tool_call_parser = model.get("tool_call_parser")
            config.reasoning_parser = model.get("reasoning_parser")
            config.context_length = 8192
            config.set_structural_tag(model.get("structural_tag", {"scope": "always"}))
            for key, value in model.get("runtime_data", {}).items():
                config.set_engine_specific(key, json.dumps(value))
            await register_model(
                ModelInput.Tokens,
                ModelType.Chat | ModelType.Completions,
                endpoint,
                model["folder"],
                model["name"],
                worker_type=WorkerType.Aggregated,
                runtime_config=config,
            )
            serving.append(endpoint.serve_endpoint(FakeEngine(Path(model["folder"]), args.folder).generate))
        await asyncio.gather(*serving)

    asyncio.run(serve())


if __name__ == "__main__":
    main()
