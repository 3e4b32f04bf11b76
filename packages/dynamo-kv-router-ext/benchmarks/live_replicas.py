# SPDX-License-Identifier: Apache-2.0
"""What becomes of the fleet when a router, a frontend or the discovery goes, ours beside Dynamo's own.

Workers only keep a pace (`support.faulty_worker`). Dynamo's replicas are its frontends, with `--router-replica-sync`;
ours are routers behind two frontends. Requests may migrate three times in every mode.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
from live_faults import MIGRATION, TWO_EACH

from support.bench import Bench
from support.live_fleet import (
    MODEL,
    Answer,
    Etcd,
    LiveFleet,
    Mode,
    ask,
    ask_once,
    body,
    client,
    live_model,
    paced,
    steady,
    until,
)

__all__ = ["run"]

_T = TypeVar("_T")

#: Tokens of a long answer, 20 ms each, and how many of them there are.
LONG, COUNT = 500, 12
#: The longest that a stock frontend's bookings are watched.
WATCHED_S, QUICK_WATCHED_S = 60.0, 8.0
OUTAGE_S = 5.0
MODES: tuple[Mode, ...] = ("kv", "ours")


def run(bench: Bench) -> None:
    """Record the rows of every case."""
    with tempfile.TemporaryDirectory(prefix="router-live-") as folder:
        home = Path(folder)
        model = live_model(home / "model")
        for case in (_killed, _stopped, _frontend, _etcd):
            start = time.monotonic()
            case(bench, home / case.__name__, model)
            print(f"replicas, {case.__name__}: {time.monotonic() - start:.0f} s", flush=True)


def _say(bench: Bench, text: str) -> None:
    bench.note(text)
    print(text, flush=True)


def _meanwhile(work: Callable[[], Coroutine[Any, Any, _T]], then: Callable[[], None]) -> _T:
    """Run a load in a thread of its own, do something meanwhile, and return what the load found."""
    with ThreadPoolExecutor(1) as aside:
        running = aside.submit(lambda: asyncio.run(work()))
        then()
        return running.result()


async def _long(urls: list[str], prompt: int) -> list[Answer]:
    """Send long answers to each frontend in turn, all at once."""
    async with client(120) as session:
        sent = [
            body([10 + (number * 977 + place * 7) % 1800 for place in range(prompt)], LONG) for number in range(COUNT)
        ]
        return list(
            await asyncio.gather(*(ask(session, urls[number % len(urls)], one) for number, one in enumerate(sent)))
        )


def _bookings(fleet: LiveFleet, router: int, of: str) -> int:
    """Return how many bookings of a replica a router knows."""
    found: dict[str, int] = fleet.state(router)["bookings"]
    return found.get(of, 0)


def _name(fleet: LiveFleet, router: int) -> str:
    replica = fleet.state(router)["replica"]
    return replica if isinstance(replica, str) else f"{replica:x}"


def _killed(bench: Bench, home: Path, model: Path) -> None:
    """A router with work booked is killed; beside it one of two stock frontends."""
    watched_s = QUICK_WATCHED_S if bench.quick else WATCHED_S

    def ours() -> tuple[float, int, list[Answer]]:
        workers = [paced(model, home / f"ours-{number}") for number in range(3)]
        with (
            Etcd(home / "etcd-ours") as etcd,
            LiveFleet(home / "ours", "ours", workers, env=etcd.environment, **TWO_EACH) as fleet,
        ):
            took = [0.0, 0.0]

            def kill() -> None:
                gone = _name(fleet, 0)
                until(lambda: _bookings(fleet, 1, gone) >= COUNT // 4, 10, "bookings of both routers")
                took[1] = _bookings(fleet, 1, gone)
                fleet.kill("router-0")
                took[0] = until(lambda: not _bookings(fleet, 1, gone), 120, "a router without those of a dead one")

            answers = _meanwhile(lambda: _long(fleet.urls, 128), kill)
        return took[0], int(took[1]), answers

    def stock() -> tuple[float | None, float]:
        workers = [paced(model, home / f"stock-{number}") for number in range(3)]
        options = ("--router-replica-sync", *MIGRATION)
        with (
            Etcd(home / "etcd-stock") as etcd,
            LiveFleet(
                home / "stock", "kv", workers, frontends=2, frontend_options=options, env=etcd.environment
            ) as fleet,
        ):
            booked = [0.0]
            took: list[float] = []

            def blocks() -> float:
                text = httpx.get(f"{fleet.urls[1]}/metrics", timeout=5, trust_env=False).text
                lines = [
                    line
                    for line in text.splitlines()
                    if line.startswith("dynamo_frontend_worker_active_decode_blocks{")
                ]
                return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

            def kill() -> None:
                until(lambda: blocks() > COUNT, 10, "a frontend that knows of the other's requests")
                booked[0] = blocks()
                fleet.kill("frontend-0")
                with contextlib.suppress(TimeoutError):
                    took.append(until(lambda: blocks() < booked[0] / 10, watched_s, "no ghosts"))

            _meanwhile(lambda: _long(fleet.urls[:1], 2000), kill)
        return (took[0] if took else None), booked[0]

    with ThreadPoolExecutor(2) as at_once:
        running, beside = at_once.submit(ours), at_once.submit(stock)
        seconds, booked, answers = running.result()
        theirs, blocks = beside.result()
    lost = [answer for answer in answers if answer.error]
    bench.row("router killed: until the other has no booking of it", "s", ours=[seconds], aim="<= 5")
    bench.row("router killed: requests lost", "", ours=[len(lost)], aim="== 0")
    bench.row(
        "router killed: until the other has no booking of it",
        "s",
        ours=[seconds],
        reference=[watched_s if theirs is None else theirs],
        reference_name=f"kv, a frontend killed{f'; watched for {watched_s:g} s only' if theirs is None else ''}",
    )
    _say(
        bench,
        f"router killed with {booked} of {COUNT} answers booked: {seconds:.1f} s, {len(lost)} lost"
        f"{': ' + lost[0].error if lost else ''}; stock: {blocks:g} blocks of a dead frontend, "
        f"{f'gone after {theirs:.1f} s' if theirs is not None else f'still there after {watched_s:g} s'}",
    )


def _stopped(bench: Bench, home: Path, model: Path) -> None:
    """A router stands still for 8 s, and goes on."""
    workers = [paced(model, home / f"worker-{number}") for number in range(3)]
    with (
        Etcd(home / "etcd") as etcd,
        LiveFleet(home / "fleet", "ours", workers, env=etcd.environment, **TWO_EACH) as fleet,
    ):
        took = [0.0, 0.0]

        def stop() -> None:
            gone = _name(fleet, 0)
            until(lambda: _bookings(fleet, 1, gone) > 0, 10, "bookings of both routers")
            fleet.process("router-0").send_signal(signal.SIGSTOP)
            start = time.monotonic()
            took[0] = until(lambda: not _bookings(fleet, 1, gone), 60, "a router without those of a stopped one")
            time.sleep(max(0.0, 8.0 - (time.monotonic() - start)))
            fleet.process("router-0").send_signal(signal.SIGCONT)
            took[1] = until(
                lambda: len(fleet.state(1)["peers"]) == 1 and len(fleet.state(0)["peers"]) == 1, 30, "peers"
            )

        answers = _meanwhile(lambda: steady(fleet.urls, rate=10, seconds=16, tokens=16, timeout_s=30), stop)
    failed = [answer for answer in answers if answer.error]
    share = 100 * len(failed) / len(answers)
    bench.row("router stopped for 8 s: until the other has no booking of it", "s", ours=[took[0]], aim="<= 5")
    bench.row("router stopped for 8 s: failed requests", "%", ours=[share])
    slowest = max(answer.end - answer.start for answer in answers)
    _say(
        bench,
        f"router stopped for 8 s: {len(failed)} of {len(answers)} failed{': ' + failed[0].error if failed else ''}, "
        f"the slowest took {slowest:.1f} s, peers again {took[1]:.1f} s after it went on",
    )


def _frontend(bench: Bench, home: Path, model: Path) -> None:
    """A frontend of two models is killed and started again."""

    def restarted(mode: Mode) -> float:
        names = (MODEL, "other")
        workers = [paced(model, home / f"{mode}-{name}-{n}", name=name) for name in names for n in range(2)]
        with Etcd(home / f"etcd-{mode}") as etcd, LiveFleet(home / mode, mode, workers, env=etcd.environment) as fleet:
            fleet.kill("frontend-0")
            fleet.start("frontend-0")
            took = until(lambda: fleet.listed() == set(names), 60, "every model")
            for name in names:
                answer = asyncio.run(ask_once(fleet.urls[0], range(10, 100), 4, model=name))
                if answer.error:
                    raise RuntimeError(f"{mode}, {name}: {answer.error}")
        return took

    found = {mode: restarted(mode) for mode in MODES}
    bench.row(
        "frontend restarted: until it lists both models, and both answer",
        "s",
        ours=[found["ours"]],
        reference=[found["kv"]],
        reference_name="kv",
    )


def _etcd(bench: Bench, home: Path, model: Path) -> None:
    """The discovery is killed, and started again 5 s later."""
    after_s = 5.0 if bench.quick else 20.0

    def without(mode: Mode) -> tuple[list[Answer], set[str]]:
        workers = [paced(model, home / f"{mode}-{number}") for number in range(3)]
        with (
            Etcd(home / f"etcd-{mode}") as etcd,
            LiveFleet(home / mode, mode, workers, env=etcd.environment, **TWO_EACH) as fleet,
        ):

            def outage() -> None:
                time.sleep(2)
                etcd.kill()
                time.sleep(OUTAGE_S)
                etcd.start()

            seconds = 2 + OUTAGE_S + after_s
            answers = _meanwhile(lambda: steady(fleet.urls, rate=20, seconds=seconds, tokens=16), outage)
            fleet.check()
            return answers, fleet.listed()

    with ThreadPoolExecutor(len(MODES)) as at_once:
        runs = {mode: at_once.submit(without, mode) for mode in MODES}
        found = {mode: one.result() for mode, one in runs.items()}
    for mode, (answers, listed) in found.items():
        failed = [answer for answer in answers if answer.error]
        _say(
            bench,
            f"etcd away for {OUTAGE_S:g} s, {mode}: {len(failed)} of {len(answers)} failed over "
            f"{2 + OUTAGE_S + after_s:g} s{': ' + failed[0].error if failed else ''}; "
            f"models afterwards: {', '.join(sorted(listed))}",
        )
        if mode == "ours":
            share = 100 * len(failed) / len(answers)
            bench.row(f"etcd away for {OUTAGE_S:g} s: failed requests", "%", ours=[share], aim="== 0")
