# SPDX-License-Identifier: Apache-2.0
"""One of three workers breaks under load, before two frontends: what clients see, and when its share comes back.

Each way of routing has the same requests, and a fleet of its own for each fault. Those of one fault run at the same
time, on workers that only keep a pace; where the time of an answer is compared, one after the other. Frontends have a
migration limit of 3 in every mode; ours has two routers, whose least time of a stall is 2 s, so that it fits into the
ten seconds that the clients wait.

After the fault the worker is sound again. Its share is back when, over the last 3 s, it is at least 80 % of a third.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from support.bench import Bench
from support.live_fleet import Answer, Etcd, LiveFleet, Mode, live_model, paced, steady
from support.processes import Process

__all__ = ["MIGRATION", "TWO_EACH", "run"]

Fault = Literal["raise", "break", "hang", "slow", "killed", "sick"]

#: What happens to one of the workers, and what is looked at.
FAULTS: dict[Fault, str] = {
    "raise": "it raises on every request",
    "break": "it raises in the middle of every answer",
    "hang": "it takes requests and says nothing",
    "slow": "it takes twice as long",
    "killed": "it is killed",
    "sick": "its own health endpoint says 503",
}
MODES: tuple[Mode, ...] = ("kv", "least-loaded", "ours")
MIGRATION = ("--migration-limit", "3")
#: Two frontends, and two routers that soon find a worker that stands still.
TWO_EACH: dict[str, Any] = {
    "frontends": 2,
    "routers": 2,
    "frontend_options": MIGRATION,
    "router_options": ("--health", json.dumps({"stall_min_s": 2.0})),
}
#: Requests a second, tokens of an answer: about ten at a time, half of the prompts that three workers can read.
RATE, TOKENS = 25.0, 8
#: Seconds before the fault, and the most after it until the share is back.
BEFORE_S, BACK_S = 4.0, 120.0
WAIT_S = 10.0


@dataclass
class Seen:
    """What became of the requests."""

    #: Requests from the fault to its end, and of those the ones that failed.
    sent: int
    failed: int
    #: Seconds of a sound answer, on the mean: before, and during the fault.
    before_s: float
    during_s: float
    #: The share of the requests that came to the worker, from 2 s after the fault on.
    share: float
    #: Seconds from the end of the fault until its share was back; None: not within `BACK_S`.
    back_s: float | None
    #: The first failure.
    error: str


def run(bench: Bench) -> None:
    """Run each fault in each mode, and record their rows."""
    faults: list[Fault] = ["raise", "hang", "sick"] if bench.quick else list(FAULTS)
    seconds = 8.0 if bench.quick else 15.0
    with tempfile.TemporaryDirectory(prefix="router-live-") as folder:
        home = Path(folder)
        model = live_model(home / "model")
        for fault in faults:
            with ThreadPoolExecutor(1 if fault == "slow" else len(MODES)) as at_once:
                runs = {
                    mode: at_once.submit(_one, home / f"{fault}-{mode}", model, mode, fault, seconds) for mode in MODES
                }
                found = {mode: one.result() for mode, one in runs.items()}
            _record(bench, fault, found)
    bench.note(
        f"faults: 3 workers, 2 frontends, {RATE:g} requests a second of {TOKENS} tokens, {seconds:g} s each; a client "
        f"waits {WAIT_S:g} s; migration limit 3 in every mode; a router's stall_min_s is 2"
    )


def _one(home: Path, model: Path, mode: Mode, fault: Fault, seconds: float) -> Seen:
    workers = [paced(model, home / f"worker-{number}", first_s=0.06, token_s=0.05) for number in range(3)]
    with (
        Etcd(home / "etcd") as etcd,
        LiveFleet(home / "fleet", mode, workers, env=etcd.environment, **TWO_EACH) as fleet,
        _verdicts(fleet) if fault == "sick" and mode == "ours" else contextlib.nullcontext(),
    ):
        before = asyncio.run(steady(fleet.urls, rate=RATE, seconds=BEFORE_S, tokens=TOKENS, timeout_s=WAIT_S, seed=1))
        begin = time.monotonic()
        if fault == "killed":
            fleet.kill("worker-0")
        else:
            fleet.worker(0).break_by(fault)
        during = asyncio.run(steady(fleet.urls, rate=RATE, seconds=seconds, tokens=TOKENS, timeout_s=WAIT_S, seed=2))
        if fault == "killed":
            fleet.start("worker-0")
        else:
            fleet.worker(0).break_by("")
        end = time.monotonic()
        share = _share(fleet, begin + 2.0, begin + seconds)
        back = _back(fleet, end)
    failed = [answer for answer in during if answer.error]
    return Seen(
        sent=len(during),
        failed=len(failed),
        before_s=_mean_s(before),
        during_s=_mean_s(during),
        share=share,
        back_s=back,
        error=failed[0].error[:200] if failed else "",
    )


def _share(fleet: LiveFleet, start: float, end: float) -> float:
    """Return the first worker's share of the requests that came to any in that time."""
    counts = [sum(start <= at < end for at in fleet.worker(number).served()) for number in range(3)]
    return counts[0] / sum(counts) if sum(counts) else 0.0


def _back(fleet: LiveFleet, since: float) -> float | None:
    """Send requests until the first worker has its share again, and return how long that took."""
    back = threading.Event()
    found: list[float] = []

    def watch() -> None:
        while not back.wait(0.25):
            now = time.monotonic()
            if now - since > 3.0 and _share(fleet, now - 3.0, now) >= 0.8 / 3:
                found.append(now - since)
                back.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        asyncio.run(
            steady(fleet.urls, rate=RATE, seconds=BACK_S, tokens=TOKENS, timeout_s=WAIT_S, seed=3, until=back.is_set)
        )
    finally:
        back.set()
        watcher.join()
    return found[0] if found else None


@contextlib.contextmanager
def _verdicts(fleet: LiveFleet) -> Iterator[None]:
    """Run what tells the routers of the workers' own health."""
    command = [sys.executable, "-m", "serving_stack.verdicts"]
    for urls in fleet.router_urls.values():
        for url in urls:
            command += ["--router", url]
    for number in range(3):
        worker = fleet.worker(number)
        command += ["--health", f"{worker.instance}={worker.url}/health"]
    with Process(command, name="verdicts"):
        yield


def _mean_s(answers: list[Answer]) -> float:
    return statistics.fmean(answer.end - answer.start for answer in answers if not answer.error)


def _record(bench: Bench, fault: Fault, found: dict[Mode, Seen]) -> None:
    what, ours = FAULTS[fault], found["ours"]
    bench.row(f"{what}: failed requests", "%", ours=[100 * ours.failed / ours.sent], aim="<= 3")
    if fault == "slow":
        bench.row(
            f"{what}: mean time of an answer",
            "ms",
            ours=[1e3 * ours.during_s],
            reference=[1e3 * found["kv"].during_s],
            reference_name="kv",
            aim="<= 1",
        )
    if fault == "sick":
        bench.row(f"{what}: requests that still come to it", "%", ours=[100 * ours.share], aim="<= 3")
    if ours.back_s is not None:
        bench.row(f"{what}: until its share is back", "s", ours=[ours.back_s], aim="<= 30")
    else:
        bench.row(f"{what}: until its share is back (not while it was watched)", "s", ours=[BACK_S], aim="<= 30")
    for mode, seen in found.items():
        back = f"not within {BACK_S:g} s" if seen.back_s is None else f"after {seen.back_s:.1f} s"
        text = (
            f"{what}, {mode}: {seen.failed} of {seen.sent} failed ({100 * seen.failed / seen.sent:.1f} %), "
            f"{100 * seen.share:.0f} % came to it, an answer took {seen.before_s * 1e3:.0f} ms before and "
            f"{seen.during_s * 1e3:.0f} ms meanwhile, share back {back}"
        )
        bench.note(text)
        print(f"{text}; {seen.error}", flush=True)
