# SPDX-License-Identifier: Apache-2.0
"""Plain vLLM engines without Dynamo, each in a process of its own: a prefill engine and a decode engine make a pair.

An engine is driven over two pipes by lines of JSON. Its core and its worker live in that one process
(`VLLM_ENABLE_V1_MULTIPROCESSING=0`), which starts in half the time; the parts that move KV are those of production.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from serving_stack import profile as profiles
from serving_stack.state import free_ports

__all__ = ["Engine", "handshake", "running"]

#: An engine that says nothing for so long is given up, seconds.
PATIENCE = 300


def _environment() -> dict[str, str]:
    """What the profile `cpu` sets for its workers, Dynamo's part aside, and one process for all of an engine."""
    given = profiles.load("cpu").environment
    found = {name: str(value) for name, value in given.items() if not name.startswith("DYN_")}
    return {**found, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@dataclass
class Engine:
    """One engine."""

    model: Path  #: the model's folder
    log: Path  #: where its output goes
    role: str  #: "prefill" or "decode"
    module: str | None = None  #: for `kv_connector_module_path`; stock vLLM without
    layout: str | None = None  #: for VLLM_KV_CACHE_LAYOUT
    blocks: int = 256  #: of 32 tokens each, in its pool
    extra: dict[str, Any] = field(default_factory=dict)  #: for `kv_connector_extra_config`
    second_cache: bool = False  #: give every other layer a second cache, with pages of another width
    cache_dtype: str = "auto"  #: for `kv_cache_dtype`
    environment: dict[str, str] = field(default_factory=dict)  #: on top of everything
    step: int | None = None  #: the most tokens of one step, where vLLM's own number is not wanted
    plain: bool = False  #: run as where the processor has neither AMX nor AVX-512 BF16

    def start(self) -> None:
        """Start it, without waiting."""
        options = {
            "model": str(self.model),
            "max_model_len": 2048,
            "block_size": 32,
            "enforce_eager": True,
            "disable_log_stats": False,
            "num_gpu_blocks_override": self.blocks,
            "kv_cache_dtype": self.cache_dtype,
            **({} if self.step is None else {"max_num_batched_tokens": self.step}),
        }
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_producer" if self.role == "prefill" else "kv_consumer",
            "kv_buffer_device": "cpu",
            "kv_connector_module_path": self.module,
            "kv_connector_extra_config": self.extra,
        }
        reads, writes = os.pipe()
        environment = {**os.environ, **_environment(), "PYTHONPATH": os.pathsep.join(filter(None, _search_path()))}
        self._port = _port()
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self._port)
        environment.pop("VLLM_KV_CACHE_LAYOUT", None)
        if self.layout is not None:
            environment["VLLM_KV_CACHE_LAYOUT"] = self.layout
        environment.update(self.environment)
        told = json.dumps(
            {"options": options, "transfer": transfer, "second_cache": self.second_cache, "plain": self.plain}
        )
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.engines", told, str(writes)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(writes,),
                start_new_session=True,
            )
        os.close(writes)
        self._answers: IO[str] = os.fdopen(reads)

    def ready(self) -> None:
        """Wait until it is."""
        self._read()

    def ask(self, **request: Any) -> Any:
        """Send a request and return what it answers."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return self._read()

    def generate(
        self, prompts: Sequence[list[int]], tokens: int, transfers: Sequence[dict[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """Complete prompts greedily, all of them at once.

        Args:
            prompts: Token ids.
            tokens: How many to generate for each.
            transfers: `kv_transfer_params` of each, at the decode end; without, what asks for a prefill.

        Returns:
            For each prompt `tokens`, `seconds` (the next best token of each step), `gaps` (by how much the best one's
            log-probability exceeds that one's), `reason` (why it ended) and `transfer`, what a decode engine needs to
            have the prompt's KV.
        """
        answer: list[dict[str, Any]] = self.ask(prompts=prompts, tokens=tokens, transfers=transfers)
        return answer

    def cached(self, prompt: list[int]) -> list[int]:
        """Return the blocks in which its block manager finds the full blocks of a prompt, in the prompt's order.

        The last token does not count: it is always computed.
        """
        answer: list[int] = self.ask(cached=prompt)
        return answer

    def counters(self) -> dict[str, float]:
        """Return its metrics, histograms as NAME_count and NAME_sum, and `steps`: how many its requests have taken."""
        answer: dict[str, float] = self.ask(counters=True)
        return answer

    def _read(self) -> Any:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if select.select([self._answers], [], [], 1)[0]:
                line = self._answers.readline()
                if line:
                    return json.loads(line)
                break
            if self._process.poll() is not None:
                break
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
        raise AssertionError(f"{self.role} engine, {self.log}: {tail}")

    def pool(self) -> Any:
        """Read its pool of block rows out of its memory, as `[blocks, stride]` of bytes.

        Its handshake says where the pool lies, one region; beyond that the connector has no part in it.
        """
        import msgspec
        import numpy as np
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata

        told = msgspec.msgpack.decode(handshake(self._port).agent_metadata_bytes, type=NixlAgentMetadata)
        (base,), (stride,) = told.kv_caches_base_addr, told.block_strides
        with open(f"/proc/{self._process.pid}/mem", "rb", buffering=0) as memory:
            memory.seek(base)
            content = memory.read(told.num_blocks * stride)
        return np.frombuffer(content, dtype=np.uint8).reshape(told.num_blocks, stride)

    def stop(self) -> None:
        """End it at once: NIXL 1.4.1 crashes in an orderly end."""
        if not hasattr(self, "_process"):
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._answers.close()
        if self._process.stdin is not None:
            self._process.stdin.close()


@contextlib.contextmanager
def running(*engines: Engine) -> Iterator[None]:
    """Run engines, started together."""
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.ready()
        yield
    finally:
        for engine in engines:
            engine.stop()


def handshake(port: int) -> Any:
    """Ask a worker what it answers to a peer's handshake, a `NixlHandshakePayload`, at its side channel's port."""
    import msgspec
    import zmq
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG, NixlHandshakePayload

    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
        frames = socket.recv_multipart()
    return msgspec.msgpack.decode(frames[0], type=NixlHandshakePayload)


def _port() -> int:
    """Return a free port below those that the kernel hands out: it is bound only seconds later."""
    _ports[:] = free_ports(1, above=_ports[0])
    return _ports[0]


#: The last one that was given out.
_ports = [22000 + os.getpid() % 900 * 10]


def _search_path() -> list[str]:
    return [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]


def _idle(llm: Any) -> bool:
    """Let the engine finish what it does for its peers; return whether a request is there."""
    if select.select([0], [], [], 0.01)[0]:
        return True
    if llm.llm_engine.engine_core.engine_core.scheduler.has_requests():
        llm.llm_engine.step()
    return False


def _serve(told: dict[str, Any], answers: IO[str]) -> None:
    if told["plain"]:
        import torch

        torch.cpu._is_amx_tile_supported = torch.cpu._is_avx512_bf16_supported = lambda: False
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    if told["second_cache"]:
        from support import second_cache

        second_cache.register()
    llm = LLM(**told["options"], kv_transfer_config=KVTransferConfig(**told["transfer"]))

    def answer(content: Any) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    steps, step = 0, llm.llm_engine.step

    def counted() -> Any:
        nonlocal steps
        steps += 1
        return step()

    answer({})
    while True:
        while not _idle(llm):
            pass
        line = os.read(0, 1 << 20)
        if not line:
            return
        while not line.endswith(b"\n"):
            line += os.read(0, 1 << 20)
        request = json.loads(line)
        if request.get("counters"):
            answer({**_counters(llm), "steps": steps})
            continue
        if "cached" in request:
            answer(_cached(llm, request["cached"]))
            continue
        prompts = request["prompts"]
        transfers = request["transfers"] or [{"do_remote_decode": True, "do_remote_prefill": False}] * len(prompts)
        sampling = [
            SamplingParams(
                temperature=0,
                max_tokens=request["tokens"],
                ignore_eos=True,
                logprobs=2,
                detokenize=False,
                extra_args={"kv_transfer_params": transfer},
            )
            for transfer in transfers
        ]
        llm.llm_engine.step = counted
        done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        llm.llm_engine.step = step
        answer(
            [
                {
                    "tokens": list(one.outputs[0].token_ids),
                    **_others(one.outputs[0].logprobs or []),
                    "reason": one.outputs[0].finish_reason,
                    "transfer": one.kv_transfer_params,
                }
                for one in done
            ]
        )


def _others(steps: list[dict[int, Any]]) -> dict[str, Any]:
    seconds, gaps = [], []
    for step in steps:
        (_, best), (second, next_best) = sorted(step.items(), key=lambda told: -told[1].logprob)[:2]
        seconds.append(second)
        gaps.append(float(best.logprob - next_best.logprob))
    return {"seconds": seconds, "gaps": gaps}


def _cached(llm: Any, prompt: list[int]) -> list[int]:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    core = llm.llm_engine.engine_core.engine_core
    asked = Request("cached", prompt, SamplingParams(), None, block_hasher=core.request_block_hasher)
    blocks = core.scheduler.kv_cache_manager.get_computed_blocks(asked)[0]
    return [int(number) for number in blocks.get_block_ids()[0]]


def _counters(llm: Any) -> dict[str, float]:
    from prometheus_client import REGISTRY

    llm.llm_engine.do_log_stats()
    found: dict[str, float] = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


if __name__ == "__main__":
    # No farewell: NIXL 1.4.1 crashes in an orderly end.
    with os.fdopen(int(sys.argv[2]), "w") as pipe:
        try:
            _serve(json.loads(sys.argv[1]), pipe)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
