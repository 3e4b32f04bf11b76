# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dynamo_kv_router_ext import Decision, Placer, Request, Role, Terms, Worker, load_profile
from dynamo_kv_router_ext import _metrics as metrics_module
from dynamo_kv_router_ext._metrics import Metrics
from dynamo_kv_router_ext._records import Records
from dynamo_kv_router_ext._router import Router

_BOARD = Path(__file__).parents[1] / "grafana" / "router.json"
_P = "dynamo_router_ext_"


def scraped(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The samples of a scrape by name, without our prefix, and labels."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(text):
        assert family.name.startswith(_P)
        assert family.documentation
        for sample in family.samples:
            key = (sample.name.removeprefix(_P), tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


class Scrape:
    """A scrape that is asked for single values."""

    def __init__(self, text: str) -> None:
        self.samples = scraped(text)
        self.names = {name for name, _ in self.samples}

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.samples.get((name, tuple(sorted(labels.items()))))

    def labels(self, name: str, label: str) -> set[str]:
        return {dict(labels)[label] for known, labels in self.samples if known == name}


def decision(role: Role = "prefill", worker: Any = 7, note: str = "", terms: Terms | None = None) -> Decision:
    return Decision("1f/a", role, worker, 0, terms if terms is not None else Terms(), 0, note)


def test_decisions_are_counted_by_what_was_special_about_them() -> None:
    metrics = Metrics()
    for note in ("", "", "probe", "last", "moved from 8", "moved from 9"):
        metrics.decided(100, decision(note=note), again=False)
    metrics.decided(100, decision(role="decode", worker=2**63), again=True)
    seen = Scrape(metrics.expfmt())
    counts = [seen("decisions_total", role="prefill", worker="7", note=note) for note in ("", "probe", "last", "moved")]
    assert counts == [2, 1, 1, 2]
    assert seen("decisions_total", role="decode", worker=str(2**63), note="") == 1
    assert (seen("retries_total", role="prefill"), seen("retries_total", role="decode")) == (0, 1)
    assert seen.labels("decisions_total", "note") == {"", "probe", "last", "moved"}


def test_terms_errors_and_regret_are_histograms_of_seconds() -> None:
    metrics = Metrics()
    terms = Terms(wait_s=0.0, fetch_s=0.004, work_s=0.5, first_token_s=0.504, token_s=0.02, others_s=1e9, cost_s=7.0)
    metrics.decided(1000, decision(terms=terms), again=False)
    metrics.measured("prefill", 0.25, 0.125)
    metrics.measured("prefill", -0.5, 0.0)
    seen = Scrape(metrics.expfmt())
    assert seen("term_seconds_count", role="prefill", term="work") == 1
    assert seen("term_seconds_sum", role="prefill", term="first_token") == 0.504
    assert seen("term_seconds_bucket", role="prefill", term="work", le="0.25") == 0
    assert seen("term_seconds_bucket", role="prefill", term="work", le="0.5") == 1
    assert seen("term_seconds_bucket", role="prefill", term="others", le="120.0") == 0
    assert seen("term_seconds_bucket", role="prefill", term="others", le="+Inf") == 1
    assert seen.labels("term_seconds_sum", "term") == {
        *("wait", "fetch", "work", "first_token", "token", "others", "risk", "cost")
    }
    assert seen("first_token_error_seconds_sum", role="prefill", side="late") == 0.25
    assert seen("first_token_error_seconds_sum", role="prefill", side="early") == 0.5
    assert seen("regret_seconds_sum", role="prefill") == 0.125
    assert seen("regret_seconds_count", role="prefill") == 2


def test_tokens_are_counted_once_by_where_they_come_from() -> None:
    metrics = Metrics()
    terms = Terms(device_tokens=100, fetch_tokens={"host": 20, "store": 300})
    metrics.decided(1000, decision(terms=terms), again=False)
    metrics.decided(1000, decision(role="decode", terms=Terms(device_tokens=1000)), again=False)
    metrics.decided(50, decision(role="both"), again=False)
    seen = Scrape(metrics.expfmt())
    tokens = {
        source: seen("prompt_tokens_total", source=source) for source in ("device", "host", "disk", "store", "computed")
    }
    assert tokens == {"device": 100, "host": 20, "disk": 0, "store": 300, "computed": 630}


def router(metrics: Metrics, workers: int = 3) -> Router:
    """A router of its own over prefill and decode workers."""
    made = Router(Placer(load_profile("mocker")), Records(metrics))
    for number in range(workers):
        made.add_worker(Worker(100 + number, role="prefill"))
        made.add_worker(Worker(200 + number, role="decode"))
    return made


async def carried(one: Router, name: str) -> None:
    """A request through both legs, its answer under way."""
    key = one.key(name)
    request = Request(key, tokens=640, session=name)
    await one.place(request, "prefill")
    one.prefilled(key)
    await one.place(request, "decode")
    one.progress(key, 1)


def test_a_scrape_shows_the_workers_the_bookings_and_what_was_decided() -> None:
    async def check() -> None:
        metrics = Metrics()
        one = router(metrics)
        metrics.watch(one.state)
        for number in range(6):
            await carried(one, f"r{number}")
        one.finished(one.key("r0"))
        assert one.verdict(101, True, 60.0, "test", "test")
        seen = Scrape(await asyncio.to_thread(metrics.expfmt))  # as Dynamo's system server does
        states = [seen("worker_state", role="prefill", worker="101", state=state) for state in ("in", "out", "probing")]
        assert states == [0, 1, 0]
        assert seen("worker_state", role="decode", worker="200", state="in") == 1
        assert seen("sessions") == 6
        assert seen("peers") == 0
        assert sum(value for (name, _), value in seen.samples.items() if name == "bookings") == 5
        assert sum(value for (name, _), value in seen.samples.items() if name == "decisions_total") == 12
        assert sum(seen("worker_sequences", role="decode", worker=str(200 + n)) or 0 for n in range(3)) == 5
        for name in ("slowness", "risk", "prompts", "prompt_seconds", "resident_tokens"):
            assert seen.labels(f"worker_{name}", "worker") == {"100", "101", "102", "200", "201", "202"}
        assert (seen("worker_slowness", role="prefill", worker="100") or 0) > 0
        assert seen("regret_seconds_count", role="prefill") == 6
        assert seen("first_token_error_seconds_count", role="decode", side="late") is not None
        # On the loop itself it does not wait for the loop.
        assert Scrape(metrics.expfmt()).names == seen.names

    asyncio.run(check())


def test_a_workers_series_go_with_it() -> None:
    async def check() -> None:
        metrics = Metrics()
        one = router(metrics)
        metrics.watch(one.state)
        for number in range(9):
            await carried(one, f"r{number}")
        before = Scrape(metrics.expfmt())
        assert "201" in before.labels("decisions_total", "worker")
        one.remove_worker(201)
        after = Scrape(metrics.expfmt())
        gone = {name for name, labels in after.samples if ("worker", "201") in labels}
        assert gone == set()
        assert "100" in after.labels("decisions_total", "worker")

        # Workers that come and go leave nothing behind, scraped or not between.
        size = len(after.samples)
        for number in range(300, 340):
            one.add_worker(Worker(number, role="prefill"))
            metrics.decided(100, decision(worker=number), again=False)
            one.remove_worker(number)
        assert len(Scrape(metrics.expfmt()).samples) == size
        assert len(metrics._decisions) < 20

    asyncio.run(check())


def test_a_loop_that_is_silent_or_gone_costs_a_scrape_and_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    texts: list[str] = []

    def scrape() -> None:
        texts.append(metrics.expfmt())

    def in_thread() -> None:
        thread = threading.Thread(target=scrape)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()

    async def silent() -> None:
        metrics.watch(dict)
        in_thread()  # joined on the loop, which so answers nothing

    async def broken() -> None:
        metrics.watch(lambda: {"workers": 5})
        await asyncio.to_thread(scrape)

    monkeypatch.setattr(metrics_module, "_PATIENCE_S", 0.1)
    asyncio.run(silent())
    in_thread()
    monkeypatch.setattr(metrics_module, "_PATIENCE_S", 30.0)
    asyncio.run(broken())
    assert texts == ["", "", ""]
    assert len([line for line in caplog.messages if "no metrics of the router" in line]) == 3


def test_the_grafana_dashboard_asks_for_what_there_is() -> None:
    async def scrape() -> Scrape:
        metrics = Metrics()
        one = router(metrics)
        metrics.watch(one.state)
        await carried(one, "a")
        return Scrape(metrics.expfmt())

    seen = asyncio.run(scrape())
    board = json.loads(_BOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(rf"{_P}(\w+)", query)}
    assert asked <= seen.names
    # And nothing that is counted is left out, but for what stands beside a histogram.
    assert {name for name in seen.names if not re.search("_(created|count|sum|bucket)$", name)} <= asked
    assert {"term_seconds_sum", "regret_seconds_bucket", "first_token_error_seconds_bucket"} <= asked
    labels = {label for _, pairs in seen.samples for label, _ in pairs} | {"instance"}
    used = {label for query in queries for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(", ")}
    assert used <= labels
    for panel in board["panels"]:
        for target in panel["targets"]:
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert all(label in target["expr"] for label in shown)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
