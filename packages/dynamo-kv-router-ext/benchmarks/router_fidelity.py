# SPDX-License-Identifier: Apache-2.0
"""The simulator beside `dynamo.replay`: the same fleet, timing, policy and arrivals, and how far the figures are apart.

Both sides get the first requests of a Mooncake trace, each moved by up to 10 ms, anew for each run. Round robin has no
choices left then, and a replay of one input is always the same: the means have to agree within 5 %. Dynamo's KV router
draws between workers that cost the same, with no seed, so replays of one input differ: the means have to agree within
that spread or 5 %, whichever is more.

`ROUTER_BENCH_TRACES` names the folder of the traces.
"""

from __future__ import annotations

import functools
import gzip
import importlib.util
import json
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_kv_router_ext import Worker
from dynamo_kv_router_ext.sim.fleet import Arrival, FleetSpec, Policy, Result, WorkerSpec, simulate, split_blocks
from dynamo_kv_router_ext.sim.policies import DynamoKv, RoundRobin
from dynamo_kv_router_ext.sim.timing import AisTiming, PolynomialTiming, Timing
from support.bench import Bench, Unavailable

__all__ = ["run", "trace_file"]

_BLOCK, _TRACE_BLOCK = 64, 512
_GPU_BLOCKS, _CHUNK, _SEQUENCES = 12_000, 8192, 256
_REQUESTS, _RUNS = 1000, 10
_JITTER_MS = 10.0
#: The model and machine of AISimulate's timing.
_AIS = {"model": "Qwen/Qwen3-32B", "system": "gb200", "backend": "vllm", "tp": 1}


@dataclass(frozen=True)
class _Case:
    """A fleet and how fast the trace is played."""

    trace: str
    prefills: int
    decodes: int
    speedup: float
    ais: bool = False

    @property
    def name(self) -> str:
        fleet = f"{self.prefills}P{self.decodes}D" if self.decodes else f"{self.prefills} aggregated"
        return f"{self.trace}, {fleet}, {'AIS' if self.ais else 'polynomial'} timing"


#: At most 70 % of what prefill can do is used.
_CASES = (
    _Case("conversation", 4, 0, 2.5),
    _Case("conversation", 3, 3, 2.5),
    _Case("synthetic", 4, 0, 3.0),
    _Case("synthetic", 3, 2, 2.0),
    _Case("conversation", 8, 0, 0.7, ais=True),
    _Case("conversation", 4, 2, 0.6, ais=True),
)


def trace_file(name: str) -> Path:
    """Return the file of the Mooncake trace `conversation` or `synthetic`. Raises Unavailable where it is not there."""
    beside = Path(__file__).resolve().parents[3].parent / "shared" / "traces"
    folder = Path(os.environ.get("ROUTER_BENCH_TRACES", beside))
    path = folder / f"mooncake_{name}.jsonl.gz"
    if not path.is_file():
        raise Unavailable(
            f"it needs {path.name} (Mooncake's traces); ROUTER_BENCH_TRACES names its folder, now {folder}"
        )
    return path


def run(bench: Bench) -> None:
    """Record, for each fleet and policy, the means of both sides and how far they are apart."""
    if importlib.util.find_spec("dynamo.replay") is None:
        raise Unavailable("it needs ai-dynamo")
    os.environ.setdefault("DYN_LOG", "error")  # a line for each request otherwise
    wanted = [case for case in _CASES if not case.ais or importlib.util.find_spec("aisimulate") is not None]
    if len(wanted) < len(_CASES):
        bench.note("aisimulate is not installed: polynomial timing only")
    for case in wanted:
        rows = _rows(case.trace, 300 if bench.quick else _REQUESTS)
        for policy in ("round robin", "kv"):
            _compare(bench, case, policy, rows, 3 if bench.quick else _RUNS)


def _compare(bench: Bench, case: _Case, policy: str, rows: Sequence[dict[str, Any]], runs: int) -> None:
    ours: list[tuple[float, float, float]] = []
    theirs: list[tuple[float, float, float]] = []
    apart: list[float] = []
    busy: list[float] = []
    for seed in range(runs):
        moved = _jittered(rows, seed)
        result = _simulate(case, policy, moved, seed)
        replayed = _replay(case, policy, moved)
        mine = [1e3 * request.ttft_s for request in result.requests]
        ours.append((statistics.mean(mine), _p99(mine), _mean_itl(result)))
        summary = replayed.summary
        theirs.append((summary["mean_ttft_ms"], summary["p99_ttft_ms"], summary["mean_itl_ms"]))
        records = sorted(replayed.per_request, key=lambda record: (record["arrival_time_ms"], record["input_length"]))
        for request, record in zip(_in_order(result), records, strict=True):
            apart.append(abs(1e3 * request.ttft_s / record["ttft_ms"] - 1))
        busy.append(_prefill_share(case, result))
    figures = [[statistics.mean(run[which] for run in side) for which in range(3)] for side in (ours, theirs)]
    varied = statistics.stdev(run[0] for run in theirs)
    spread = 0.0
    if policy == "kv":
        # What the draw alone does: the same arrivals again and again.
        moved = _jittered(rows, 0)
        again = [_replay(case, policy, moved).summary["mean_ttft_ms"] for _ in range(runs)]
        spread = statistics.stdev(again)
    where = f"{case.name}, {policy}"
    bench.row(
        f"mean TTFT: {where}",
        "ms",
        ours=[run[0] for run in ours],
        reference=[run[0] for run in theirs],
        reference_name="dynamo.replay",
    )
    allowed = max(spread, 0.05 * figures[1][0])
    bench.row(
        f"difference of the means / what is allowed: {where}",
        "",
        ours=[abs(figures[0][0] - figures[1][0]) / allowed],
        aim="<= 1",
    )
    bench.note(
        f"{where}: prefill used by {statistics.mean(busy):.0%}; p99 TTFT {figures[0][1]:.0f} / {figures[1][1]:.0f} ms, "
        f"mean ITL {figures[0][2]:.2f} / {figures[1][2]:.2f} ms (ours / replay); replays of all inputs: "
        f"+- {varied / figures[1][0]:.1%}"
        + (
            f"; replays of one input: +- {spread / figures[1][0]:.1%}"
            if policy == "kv"
            else f"; {sum(share > 0.01 for share in apart) / len(apart):.1%} of the requests are more than 1 % apart"
        )
    )


def _rows(trace: str, count: int) -> list[dict[str, Any]]:
    with gzip.open(trace_file(trace), "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]


def _jittered(rows: Sequence[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Return the rows in order of their arrival, each later by up to `_JITTER_MS`, the first at 0."""
    draw = random.Random(seed)
    moved = sorted(
        ({**row, "timestamp": row["timestamp"] + draw.uniform(0, _JITTER_MS)} for row in rows),
        key=lambda row: float(row["timestamp"]),
    )
    first = moved[0]["timestamp"]
    return [{**row, "timestamp": row["timestamp"] - first} for row in moved]


@functools.cache
def _timing(ais: bool) -> Timing:
    return AisTiming(**_AIS) if ais else PolynomialTiming(_GPU_BLOCKS * _BLOCK)  # type: ignore[arg-type]


def _simulate(case: _Case, policy: str, rows: Sequence[dict[str, Any]], seed: int) -> Result:
    capacity = _GPU_BLOCKS * _BLOCK
    roles = ["prefill"] * case.prefills + ["decode"] * case.decodes if case.decodes else ["both"] * case.prefills
    workers = tuple(
        WorkerSpec(Worker(number, role, 1, capacity, _SEQUENCES, _CHUNK))  # type: ignore[arg-type]
        for number, role in enumerate(roles)
    )
    arrivals = [
        Arrival(
            id=f"{number:06}",
            at_s=row["timestamp"] / 1e3 / case.speedup,
            tokens=row["input_length"],
            output_tokens=row["output_length"],
            blocks=split_blocks(row["hash_ids"], _TRACE_BLOCK, _BLOCK, row["input_length"]),
        )
        for number, row in enumerate(rows)
    ]
    makers: dict[str, Callable[[], Policy]] = {
        "round robin": RoundRobin,
        "kv": lambda: DynamoKv(block_size=_BLOCK, seed=seed),
    }
    return simulate(FleetSpec(workers, _timing(case.ais), block_size=_BLOCK), arrivals, makers[policy]())


def _replay(case: _Case, policy: str, rows: Sequence[dict[str, Any]]) -> Any:
    from dynamo.llm import KvRouterConfig
    from dynamo.replay import run_trace_replay

    def engine(role: str) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "backend": "vllm",
            "worker_type": role,
            "block_size": _BLOCK,
            "num_gpu_blocks": _GPU_BLOCKS,
            "max_num_batched_tokens": _CHUNK,
            "max_num_seqs": _SEQUENCES,
            "enable_prefix_caching": True,
        }
        if case.ais:
            config = {**_AIS, "worker_type": role}
            fields["timing_model"] = {"type": "external", "provider": "ais", "config": config}
        return {"engine": fields}

    fleet: dict[str, Any] = {"extra_engine_args": engine("aggregated"), "num_workers": case.prefills}
    if case.decodes:
        fleet = {
            "prefill_engine_args": engine("prefill"),
            "decode_engine_args": engine("decode"),
            "num_prefill_workers": case.prefills,
            "num_decode_workers": case.decodes,
        }
    kv = policy == "kv"
    with _written(rows) as path:
        return run_trace_replay(
            path,
            router_mode="kv_router" if kv else "round_robin",
            router_config=KvRouterConfig() if kv else None,
            trace_block_size=_TRACE_BLOCK,
            arrival_speedup_ratio=case.speedup,
            capture_per_request=True,
            **fleet,
        )


class _written:
    """A trace file for as long as it is needed."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._rows = rows

    def __enter__(self) -> Path:
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl", delete=False, encoding="utf-8") as file:
            self.path = Path(file.name)
            file.writelines(json.dumps(row) + "\n" for row in self._rows)
        return self.path

    def __exit__(self, *error: object) -> None:
        self.path.unlink()


def _in_order(result: Result) -> Iterator[Any]:
    return iter(sorted(result.requests, key=lambda request: (request.arrival_s, request.tokens)))


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[-1]


def _mean_itl(result: Result) -> float:
    """Return the mean over all gaps between tokens, in ms, as `dynamo.replay` has it."""
    gaps = sum(request.output_tokens - 1 for request in result.requests)
    return 1e3 * sum(request.end_s - request.first_token_s for request in result.requests) / gaps


def _prefill_share(case: _Case, result: Result) -> float:
    """Return how much of the time the workers that read prompts were busy with it."""
    if case.decodes:
        return statistics.mean(worker.utilisation for worker in result.workers if worker.role == "prefill")
    timing = _timing(case.ais)
    spent = 0.0
    for request in result.requests:
        done = request.device_tokens
        while done < request.tokens:
            new = min(_CHUNK, request.tokens - done)
            spent += timing.step_s([(new, done)], 0, 0)
            done += new
    return spent / (result.duration_s * case.prefills)
