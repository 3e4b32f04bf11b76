# SPDX-License-Identifier: Apache-2.0
"""Real Dynamo frontends, routers and workers of one way of routing, and requests whose tokens are timed.

    workers = [mocker(model, "prefill"), mocker(model, "decode")]
    with LiveFleet(home, "ours", workers) as fleet:
        answer = asyncio.run(ask_once(fleet.urls[0], range(10, 500), 16))

Modes other than `ours` are Dynamo's own: the frontend's `--router-mode`, with workers in its namespace. In mode `ours`
the frontend knows only `python -m dynamo_kv_router_ext`, which stands before the same workers.

Every process is one of Dynamo's own or of this repository's, with a port of its own on the loopback. Several models may
share a fleet; each has its own workers, and in mode `ours` its own routers.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import aiohttp
import httpx

from support import dynamo
from support.bench import Unavailable
from support.faulty_worker import FaultName
from support.processes import Process, free_port, free_ports
from support.saying_worker import write_model

__all__ = [
    "MODEL",
    "Answer",
    "Etcd",
    "Launch",
    "LiveFleet",
    "Mode",
    "Paced",
    "ask",
    "ask_once",
    "client",
    "live_model",
    "mocker",
    "paced",
    "steady",
    "until",
]

Mode = Literal["round-robin", "least-loaded", "kv", "kv+affinity", "ours"]
Role = Literal["prefill", "decode", "both"]

#: The name of the model, where there is one.
MODEL = "tiny"
#: Tokens in a KV block of every worker here.
BLOCK = 64
_MODES: dict[Mode, tuple[str, ...]] = {
    "round-robin": ("--router-mode", "round-robin"),
    "least-loaded": ("--router-mode", "least-loaded"),
    "kv": ("--router-mode", "kv"),
    "kv+affinity": ("--router-mode", "kv", "--router-session-affinity-ttl-secs", "600"),
    "ours": ("--router-mode", "round-robin", "--namespace", "routed"),
}
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
_READY_S = 90.0


def live_model(folder: Path) -> Path:
    """Write a model directory for workers without weights; raise Unavailable where there is no Dynamo."""
    if importlib.util.find_spec("dynamo.frontend") is None:
        raise Unavailable("it needs ai-dynamo in this interpreter: serving-stack install")
    write_model(folder, _TEMPLATE)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["max_position_embeddings"] = 1 << 18  # the longest prompts of the benchmarks
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    settings["model_max_length"] = 1 << 18
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return folder


@dataclass(frozen=True)
class Launch:
    """A worker to be started: `command` of an endpoint, as a function of the endpoint."""

    role: Role
    command: Callable[[str], Sequence[str]]
    name: str = MODEL
    #: Where it keeps its files, if it is `paced`.
    folder: Path | None = None
    #: Variables of its process alone.
    env: Mapping[str, str] = field(default_factory=dict)


def mocker(
    model: Path,
    role: Role = "both",
    *,
    name: str = MODEL,
    blocks: int = 16384,
    speed: float = 1.0,
    more: Sequence[str] = (),
) -> Launch:
    """Return one of Dynamo's mock engines.

    Args:
        model: the model's folder.
        role: what it does.
        name: the model's name.
        blocks: of KV that it holds.
        speed: how many times as fast as its timing; 0: it takes no time at all.
        more: options of `python -m dynamo.mocker`.
    """
    options = ["--model-path", str(model), "--model-name", name, "--block-size", str(BLOCK), "--num-workers", "1"]
    options += ["--num-gpu-blocks-override", str(blocks), "--speedup-ratio", f"{speed:g}", *more]
    if role != "both":
        options += ["--disaggregation-mode", role]

    def command(endpoint: str) -> list[str]:
        return ["-m", "dynamo.mocker", "--endpoint", f"dyn://{endpoint}", *options]

    return Launch(role, command, name)


def paced(model: Path, folder: Path, *, name: str = MODEL, first_s: float = 0.04, token_s: float = 0.02) -> Launch:
    """Return a `support.faulty_worker`, which keeps its files in a folder of its own."""
    options = ["--model", str(model), "--name", name, "--folder", str(folder)]
    options += ["--first-s", f"{first_s:g}", "--token-s", f"{token_s:g}"]

    def command(endpoint: str) -> list[str]:
        return ["-m", "support.faulty_worker", "--endpoint", endpoint, *options]

    return Launch("both", command, name, folder)


@dataclass(frozen=True)
class Paced:
    """A `paced` worker, and the way to break it."""

    folder: Path
    #: The URL of its system port.
    url: str

    @property
    def instance(self) -> int:
        """Its instance id in Dynamo."""
        return int((self.folder / "instance").read_text("utf-8"))

    def break_by(self, fault: FaultName | Literal[""]) -> None:
        """Say what is wrong with it from now on; "" for nothing."""
        partial = self.folder / "fault.new"
        partial.write_text(fault, "utf-8")
        partial.replace(self.folder / "fault")

    def served(self) -> list[float]:
        """Return when requests came to it, in seconds of `time.monotonic`."""
        with contextlib.suppress(FileNotFoundError):
            return [float(line.split()[0]) for line in (self.folder / "served").read_text("utf-8").splitlines()]
        return []


class Etcd:
    """An etcd of one node, which can be killed and started again with what it knew; a context manager."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("etcd") is None:
            raise Unavailable("it needs etcd: apt-get install etcd-server")
        client_port, peer_port = free_ports(2)
        self.url = f"http://127.0.0.1:{client_port}"
        peer = f"http://127.0.0.1:{peer_port}"
        self._command = ["etcd", "--name", "one", "--data-dir", str(folder / "etcd")]
        self._command += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        self._command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        self._command += ["--initial-cluster", f"one={peer}"]
        self._process: Process | None = None

    def __enter__(self) -> Etcd:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it and wait until it answers."""
        self._process = Process(
            self._command, name="etcd", ready=f"{self.url}/health", env={"ETCD_UNSUPPORTED_ARCH": None}
        )
        self._process.start()

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.stop()
            self._process = None

    @property
    def environment(self) -> dict[str, str]:
        """What Dynamo's processes need to find it."""
        return {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": self.url}


class LiveFleet:
    """Workers, what routes to them, and frontends; a context manager, and ready once it is entered.

    Args:
        home: a folder for what they keep; created.
        mode: who routes.
        workers: what to start.
        frontends: how many.
        routers: how many of each model, in mode `ours`.
        frontend_options: more options of `python -m dynamo.frontend`.
        router_options: more options of `python -m dynamo_kv_router_ext`.
        env: more variables for every process, such as an etcd's.
        count_reads: whether the tokens that prefill workers compute are to be counted, for `read_tokens`.
    """

    def __init__(
        self,
        home: Path,
        mode: Mode,
        workers: Sequence[Launch],
        *,
        frontends: int = 1,
        routers: int = 1,
        frontend_options: Sequence[str] = (),
        router_options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        count_reads: bool = False,
    ) -> None:
        self.home = home
        self._count_reads = count_reads
        self.mode = mode
        self.models = list(dict.fromkeys(launch.name for launch in workers))
        self._env = {**dynamo.environment(home / "kv"), "DYN_LOG": "warn", "PYTHONPATH": _python_path(), **(env or {})}
        self._launches = list(workers)
        self._make: dict[str, Callable[[], Process]] = {}
        self._running: dict[str, Process] = {}
        #: The base URL of each frontend.
        self.urls = [f"http://127.0.0.1:{port}" for port in free_ports(frontends)]
        #: The URL of the system port of each router, by model.
        self.router_urls: dict[str, list[str]] = {}
        self._frontend_options = (*_MODES[mode], *frontend_options)
        self._router_options = tuple(router_options)
        self._routers = routers if mode == "ours" else 0
        self._namespace = "pool" if mode == "ours" else "dynamo"
        self._worker_ports: list[int] = []

    def __enter__(self) -> LiveFleet:
        self.home.mkdir(parents=True, exist_ok=True)
        try:
            for launch in self._launches:
                self._add_worker(launch)
            for model in self.models:
                self.router_urls[model] = [f"http://127.0.0.1:{port}" for port in free_ports(self._routers)]
                endpoints = {self._endpoint(launch): None for launch in self._launches if launch.name == model}
                options = [word for endpoint in endpoints for word in ("--endpoint", endpoint)]
                options += ["--serve", f"routed.router{self._suffix(model)}", *self._router_options]
                for index, url in enumerate(self.router_urls[model]):
                    name, port = f"router{self._suffix(model)}-{index}", url.rsplit(":", 1)[1]
                    self._add(name, ["-m", "dynamo_kv_router_ext", *options], DYN_SYSTEM_PORT=port)
            for index, url in enumerate(self.urls):
                address = ["--http-host", "127.0.0.1", "--http-port", url.rsplit(":", 1)[1]]
                self._add(f"frontend-{index}", ["-m", "dynamo.frontend", *address, *self._frontend_options])
            if self._count_reads:
                self._add("counter", ["-m", "support.live_fleet", f"{self._namespace}.prefill.generate"])
            for name in self._make:
                self.start(name)
            until(self._ready, _READY_S, f"a fleet of mode {self.mode}", self.check)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            for name, process in self._running.items():
                print(f"--- end of the log of {name} ---\n{process.log_tail(15)}", file=sys.stderr)
        self._stop()

    def start(self, name: str) -> None:
        """Start `worker-N`, `router-N` or `frontend-N` (again)."""
        self._running[name] = self._make[name]()
        self._running[name].start()

    def add(self, launch: Launch) -> str:
        """Start one more worker, and return its name, `worker-N`."""
        self._launches.append(launch)
        name = self._add_worker(launch)
        self.start(name)
        return name

    def kill(self, name: str) -> None:
        """End one of them at once, without a word."""
        process = self._running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.stop()

    def process(self, name: str) -> Process:
        """Return the running `worker-N`, `router-N` or `frontend-N`."""
        return self._running[name]

    def worker(self, index: int) -> Paced:
        """Return a worker that is `paced`."""
        folder = self._launches[index].folder
        if folder is None:
            raise ValueError(f"worker {index} is not paced")
        return Paced(folder, f"http://127.0.0.1:{self._worker_ports[index]}")

    def check(self) -> None:
        """Raise ProcessExited if one has ended by itself."""
        for process in self._running.values():
            process.check()

    def log(self, name: str) -> str:
        """Return the output of one of them so far."""
        return self._running[name].log_text()

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds that each process has used."""
        import psutil

        found = {}
        for name, process in self._running.items():
            times = psutil.Process(process.pid).cpu_times()
            found[name] = times.user + times.system
        return found

    def read_tokens(self) -> int:
        """Return how many tokens of prompts the prefill workers have computed, by their own reports of each step."""
        lines = self.log("counter").split()
        return int(lines[-1]) if lines and lines[-1].isdecimal() else 0

    def state(self, router: int = 0, model: str = MODEL) -> dict[str, Any]:
        """Return what a router of mode `ours` says of itself; raises httpx.HTTPError where it does not answer."""
        return self.route(self.router_urls[model][router], "state", {})

    @staticmethod
    def route(url: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of a router's `POST /engine/route/NAME`."""
        answer = httpx.post(f"{url}/engine/route/{name}", json=body, timeout=5, trust_env=False)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def listed(self, frontend: int = 0) -> set[str]:
        """Return the models that a frontend has; none while it does not answer."""
        try:
            answer = httpx.get(f"{self.urls[frontend]}/v1/models", timeout=2, trust_env=False)
            return {one["id"] for one in answer.json()["data"]}
        except (httpx.HTTPError, ValueError, KeyError):
            return set()

    def _ready(self) -> bool:
        known = len(self.models) * self._routers if self.mode == "ours" else len(self._launches)
        for index, url in enumerate(self.urls):
            if self.listed(index) != set(self.models):
                return False
            health = httpx.get(f"{url}/health", timeout=2, trust_env=False).json()
            here = "routed" if self.mode == "ours" else "dynamo"
            if sum(one["endpoint"] == "generate" and one["namespace"] == here for one in health["instances"]) != known:
                return False
        for model, urls in self.router_urls.items():
            workers = sum(launch.name == model for launch in self._launches)
            for url in urls:
                state = self.route(url, "state", {})
                if len(state["workers"]) != workers or len(state["peers"]) != len(urls) - 1:
                    return False
        for model in self.models:
            for url in self.urls:
                if asyncio.run(ask_once(url, range(10, 20), 2, model=model)).error:
                    return False
        return not self._count_reads or self.read_tokens() > 0

    def _endpoint(self, launch: Launch) -> str:
        component = "prefill" if launch.role == "prefill" else "backend"
        return f"{self._namespace}.{component}{self._suffix(launch.name)}.generate"

    @staticmethod
    def _suffix(model: str) -> str:
        return "" if model == MODEL else f"-{model}"

    def _add_worker(self, launch: Launch) -> str:
        name = f"worker-{len(self._worker_ports)}"
        self._worker_ports.append(free_port())
        self._add(
            name, launch.command(self._endpoint(launch)), **launch.env, DYN_SYSTEM_PORT=str(self._worker_ports[-1])
        )
        return name

    def _add(self, name: str, command: Sequence[str], **env: str) -> None:
        self._make[name] = lambda: Process([sys.executable, *command], name=name, env={**self._env, **env}, grace_s=2.0)

    def _stop(self) -> None:
        # All at once: each waits for its own grace otherwise.
        for process in self._running.values():
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        for process in reversed(self._running.values()):
            process.stop()
        self._running.clear()


def _python_path() -> str:
    """Return a path on which the workers of these tests are found."""
    here = str(Path(__file__).resolve().parent.parent)
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])


def until(true: Callable[[], bool], seconds: float, what: str, check: Callable[[], object] | None = None) -> float:
    """Wait until something is true, and return how long it took; what cannot be asked yet is not true.

    Raises TimeoutError that names what was waited for, and whatever `check` raises.
    """
    start = time.monotonic()
    fault: Exception | None = None
    while True:
        if check is not None:
            check()
        try:
            if true():
                return time.monotonic() - start
            fault = None
        except (httpx.HTTPError, ValueError, KeyError) as error:
            fault = error
        if time.monotonic() - start >= seconds:
            raise TimeoutError(f"{what}: not within {seconds:g} s" + (f": {fault!r}" if fault else ""))
        time.sleep(0.1)


@dataclass
class Answer:
    """One request and what came of it; times are of `time.monotonic`."""

    start: float
    #: The status of the answer; 0 where there was none.
    status: int = 0
    #: When its first token came, and when it ended; NaN where it did not.
    first: float = math.nan
    end: float = math.nan
    #: Tokens of the answer, and of the prompt those that were cached.
    tokens: int = 0
    cached: int = 0
    prompt: int = 0
    #: Its text.
    text: str = ""
    #: Why it is not sound; "" if it is.
    error: str = ""
    #: What `who` asked.
    who: str = ""
    #: What the frontend and the router say of where it was.
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.first - self.start

    @property
    def itl_s(self) -> float:
        """The mean seconds between two tokens; NaN for an answer of one."""
        return (self.end - self.first) / (self.tokens - 1) if self.tokens > 1 else math.nan


@contextlib.asynccontextmanager
async def client(timeout_s: float = 120.0) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a client without limits of its own, and with lines as long as they come."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, trust_env=False, read_bufsize=1 << 20
    ) as session:
        yield session


def body(prompt: Iterable[int], tokens: int, *, model: str = MODEL) -> bytes:
    """Return the body of a request of `/v1/completions` that is answered in so many tokens."""
    words = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "nvext": {"extra_fields": ["worker_id", "engine_data"]},
    }
    return json.dumps(words, separators=(",", ":")).encode()


async def ask(
    session: aiohttp.ClientSession, url: str, sent: bytes, *, who: str = "", session_id: str | None = None
) -> Answer:
    """Send one request to a frontend and read the answer token by token; never raises for what the server does."""
    answer = Answer(time.monotonic(), who=who)
    headers = {"content-type": "application/json"}
    if session_id is not None:
        headers["x-dynamo-session-id"] = session_id
    done = False
    texts = []
    last = math.nan
    try:
        async with session.post(f"{url}/v1/completions", data=sent, headers=headers) as got:
            answer.status = got.status
            if got.status != 200:
                answer.error = f"{got.status}: {(await got.text())[:200]}"
            else:
                async for line in got.content:
                    if not line.startswith(b"data: "):
                        if line.startswith(b"event: error"):
                            answer.error = answer.error or "an error in the stream"
                        continue
                    if line.startswith(b"data: [DONE]"):
                        done = True
                        continue
                    said = json.loads(line[6:])
                    if "choices" not in said:
                        answer.error = line[6:200].decode(errors="replace")
                        continue
                    for choice in said["choices"]:
                        last = time.monotonic()
                        if math.isnan(answer.first):
                            answer.first = last
                        texts.append(choice.get("text") or "")
                    if usage := said.get("usage"):
                        answer.tokens = usage["completion_tokens"]
                        answer.prompt = usage["prompt_tokens"]
                        answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                    if said.get("nvext"):
                        answer.extra.update(said["nvext"])
                if not done and not answer.error:
                    answer.error = "the stream ended early"
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.end = last if done and not answer.error else time.monotonic()
    answer.text = "".join(texts)
    return answer


async def ask_once(url: str, prompt: Iterable[int], tokens: int, *, model: str = MODEL) -> Answer:
    """Send one request, with a client of its own."""
    async with client() as session:
        return await ask(session, url, body(prompt, tokens, model=model))


async def steady(
    urls: Sequence[str],
    *,
    rate: float,
    seconds: float,
    tokens: int = 8,
    prompt: int = 128,
    timeout_s: float = 10.0,
    seed: int = 0,
    until: Callable[[], bool] | None = None,
) -> list[Answer]:
    """Send `rate` requests a second, evenly, to each frontend in turn, whatever becomes of them.

    Each prompt is another one. It ends after so many seconds, or when `until` is true, and all have been answered.
    """
    draw = random.Random(seed)
    tasks: list[asyncio.Task[Answer]] = []
    async with client(timeout_s) as session:
        begin = time.monotonic()
        for number in range(math.ceil(rate * seconds)):
            await asyncio.sleep(max(0.0, begin + number / rate - time.monotonic()))
            if until is not None and until():
                break
            sent = body((draw.randrange(10, 1900) for _ in range(prompt)), tokens)
            tasks.append(asyncio.create_task(ask(session, urls[number % len(urls)], sent)))
        return list(await asyncio.gather(*tasks))


def main() -> None:
    """Print the running total of the prompt tokens that the workers of an endpoint compute, until it is ended."""
    from dynamo.common import forward_pass_metrics
    from dynamo.llm import FpmEventSubscriber
    from dynamo.runtime import DistributedRuntime, dynamo_worker

    @dynamo_worker()  # type: ignore[untyped-decorator, unused-ignore]  # no dynamo where types are checked
    async def count(runtime: DistributedRuntime) -> None:
        steps = FpmEventSubscriber(runtime.endpoint(sys.argv[1]))
        total = 0
        while (message := await asyncio.to_thread(steps.recv)) is not None:
            step = forward_pass_metrics.decode(message)
            if step is not None and step.scheduled_requests.sum_prefill_tokens:
                total += step.scheduled_requests.sum_prefill_tokens
                print(total, flush=True)

    asyncio.run(count())


if __name__ == "__main__":
    main()
