# SPDX-License-Identifier: Apache-2.0
"""A Dynamo worker without an engine that keeps a pace, and breaks as it is told while it runs (`FakePacedEngine`).

    python -m support.faulty_worker --endpoint pool.backend.generate --model DIR --name NAME --folder DIR

It is a worker of its own process to Dynamo: it registers, is discovered, and streams over Dynamo's request plane. What
is made up is the engine. Prompts are read one after the other, each in `--first-s`; then a token comes every
`--token-s`, however many answers run beside it. The n-th token of a prompt and its answer depends on n alone, so an
answer that was carried on elsewhere is the same as one that was not.

`FOLDER/fault` names what is wrong with it now; where the file is absent or empty, nothing is:

* `raise`: each request fails before its first token;
* `break`: each request fails after its third token;
* `hang`: it takes requests and says nothing, also in those that run;
* `slow`: everything takes twice as long;
* `sick`: it answers as ever, and its own `/health` on the system port says 503.

`FOLDER/instance` holds its instance id once it serves. `FOLDER/served` gets a line for each request as it comes: the
seconds of `time.monotonic` and the fault of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal, get_args

__all__ = ["FakePacedEngine", "FaultName"]

FaultName = Literal["raise", "break", "hang", "slow", "sick"]

#: The answer's tokens run through these: letters, in the tiny model's tokenizer.
_FIRST_TOKEN, _TOKENS = 65, 20
_POLL_S = 0.02


class FakePacedEngine:
    """Answers at a pace, and breaks as `FOLDER/fault` says.

    Args:
        folder: where it is told what is wrong, and where it keeps its log.
        first_s: seconds to read a prompt.
        token_s: seconds between two tokens.
    """

    def __init__(self, folder: Path, *, first_s: float, token_s: float) -> None:
        self.folder = folder
        self.first_s = first_s
        self.token_s = token_s
        #: What is wrong with it now; "" for nothing.
        self.fault = ""
        self._reads = asyncio.Lock()

    def look(self) -> None:
        """Read what is wrong now. Raises ValueError for a fault that there is not."""
        told = ""
        with contextlib.suppress(FileNotFoundError):
            told = (self.folder / "fault").read_text("utf-8").strip()
        if told and told not in get_args(FaultName):
            raise ValueError(f"{self.folder / 'fault'}: {told!r} is none of {', '.join(get_args(FaultName))}")
        self.fault = told

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Yield an answer, a token a chunk."""
        with (self.folder / "served").open("a", encoding="utf-8") as log:
            log.write(f"{time.monotonic():.3f} {self.fault}\n")
        if self.fault == "raise":
            raise RuntimeError("the engine failed: raise")
        prompt = len(request["token_ids"])
        count = request["stop_conditions"].get("max_tokens") or 16
        async with self._reads:
            await self._work(self.first_s)
        for place in range(count):
            if place:
                await self._work(self.token_s)
            if context.is_stopped():
                return
            if self.fault == "break" and place == 3:
                raise RuntimeError("the engine failed: break")
            yield {"token_ids": [_FIRST_TOKEN + (prompt + place) % _TOKENS]}
        usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
        yield {"token_ids": [], "finish_reason": "length", "completion_usage": usage}

    async def _work(self, seconds: float) -> None:
        await asyncio.sleep(seconds * (2 if self.fault == "slow" else 1))
        while self.fault == "hang":
            await asyncio.sleep(_POLL_S)


def main() -> None:
    """Register the model and serve it until the process is ended."""
    from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
    from dynamo.runtime import DistributedRuntime, dynamo_worker

    parser = argparse.ArgumentParser(description="A worker that keeps a pace, and breaks as it is told.")
    parser.add_argument("--endpoint", required=True, help="NAMESPACE.COMPONENT.ENDPOINT")
    parser.add_argument("--model", type=Path, required=True, help="a folder as `write_model` writes")
    parser.add_argument("--name", required=True, help="the model's name")
    parser.add_argument("--folder", type=Path, required=True, help="where it is told what is wrong")
    parser.add_argument("--first-s", type=float, default=0.04, help="seconds to read a prompt")
    parser.add_argument("--token-s", type=float, default=0.02, help="seconds between two tokens")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)

    @dynamo_worker()  # type: ignore[untyped-decorator, unused-ignore]  # no dynamo where types are checked
    async def serve(runtime: DistributedRuntime) -> None:
        engine = FakePacedEngine(args.folder, first_s=args.first_s, token_s=args.token_s)
        endpoint = runtime.endpoint(args.endpoint)
        config = ModelRuntimeConfig()
        config.total_kv_blocks = 4096
        config.max_num_seqs = 64
        config.max_num_batched_tokens = 8192
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat | ModelType.Completions,
            endpoint,
            str(args.model),
            args.name,
            worker_type=WorkerType.Aggregated,
            kv_cache_block_size=64,
            runtime_config=config,
        )
        (args.folder / "instance").write_text(str(endpoint.connection_id()), "utf-8")

        async def watch() -> None:
            sound = None
            while True:
                engine.look()
                if sound is not (engine.fault != "sick"):
                    sound = engine.fault != "sick"
                    runtime.set_health_status(sound)
                await asyncio.sleep(_POLL_S)

        async def serve_it() -> None:
            await endpoint.serve_endpoint(engine.generate)

        serving, watching = asyncio.create_task(serve_it()), asyncio.create_task(watch())
        done, _ = await asyncio.wait((serving, watching), return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        for task in done:
            task.result()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
