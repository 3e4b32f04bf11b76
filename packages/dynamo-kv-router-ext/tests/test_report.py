# SPDX-License-Identifier: Apache-2.0
"""Figures of a simulation, and the report with its plots."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dynamo_kv_router_ext import Candidate, Explanation, Placer, Terms, TierCost, Worker, load_profile
from dynamo_kv_router_ext.sim.fleet import Arrival, FleetSpec, WorkerSpec, simulate
from dynamo_kv_router_ext.sim.policies import RoundRobin
from dynamo_kv_router_ext.sim.report import (
    Recorder,
    Run,
    cumulative,
    explanation_table,
    percentile,
    summarise,
    table,
    write_html,
)
from dynamo_kv_router_ext.sim.timing import ProfileTiming

PROFILE = load_profile("mocker")
SPEC = FleetSpec(
    workers=tuple(
        WorkerSpec(Worker(f"{role}-{number}", role=role)) for role in ("prefill", "decode") for number in range(2)
    ),
    timing=ProfileTiming(PROFILE),
    transfer=TierCost(0.001, 1e-6),
)
ARRIVALS = [
    Arrival(id=f"r{number}", at_s=0.2 * number, tokens=1000, output_tokens=1 + number % 3, blocks=tuple(range(15)))
    for number in range(12)
]


def run(label: str = "ours") -> Run:
    recorder = Recorder(Placer(PROFILE) if label == "ours" else RoundRobin())
    return Run(label, simulate(SPEC, ARRIVALS, recorder), recorder.decisions)


def test_figures_are_those_of_the_requests() -> None:
    result = simulate(SPEC, ARRIVALS, RoundRobin())
    summary = summarise(result)
    assert (summary.answered, summary.failed) == (12, 0)
    assert summary.ttft_mean_s == pytest.approx(sum(one.ttft_s for one in result.requests) / 12)
    assert summary.ttft_p99_s == max(one.ttft_s for one in result.requests)
    several = [one.itl_s for one in result.requests if one.output_tokens > 1]
    assert summary.itl_mean_s == pytest.approx(sum(several) / len(several))
    # Two workers read the same prompt anew once each: the other ten find its 15 full blocks.
    assert summary.hit_device == pytest.approx(10 * 15 * 64 / 12_000)
    assert summary.tokens_per_s == pytest.approx(24 / result.duration_s)
    assert set(summary.utilisation) == {"prefill", "decode"}
    assert all(0 < share < 1 for share in summary.utilisation.values())


def test_a_percentile_is_a_value_that_was_seen() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [percentile(values, share) for share in (0, 0.2, 0.21, 0.5, 0.99, 1)] == [1, 1, 2, 3, 5, 5]
    assert math.isnan(percentile([], 0.5))


def test_a_distribution_rises_and_leaves_out_what_was_not_seen() -> None:
    assert cumulative([3.0, math.nan, 1.0, math.nan, 2.0, 0.0]) == [(1.0, 1 / 3), (2.0, 2 / 3), (3.0, 1.0)]
    assert cumulative([]) == []
    many = cumulative(float(number % 997 + 1) for number in range(10_000))
    assert len(many) < 400
    assert many == sorted(many)
    assert (many[0][0], many[-1]) == (1.0, (997.0, 1.0))


def test_nothing_seen_is_shown_as_nothing() -> None:
    one = Arrival(id="a", at_s=0.0, tokens=100, output_tokens=1)
    summary = summarise(simulate(SPEC, [one], RoundRobin()))
    assert math.isnan(summary.itl_mean_s)
    assert summary.as_json()["itl_mean_s"] is None
    assert " - " in table([("one", summary)])


def test_the_table_has_a_line_for_each_policy() -> None:
    lines = table([(one.label, one.summary) for one in (run("ours"), run("round-robin"))]).splitlines()
    assert [line.split()[0] for line in lines] == ["policy", "ours", "round-robin"]
    assert len({len(line) for line in lines[1:]}) == 1


def test_a_recorder_changes_nothing() -> None:
    plain = simulate(SPEC, ARRIVALS, Placer(PROFILE))
    recorder = Recorder(Placer(PROFILE), watch="r3")
    assert simulate(SPEC, ARRIVALS, recorder).to_bytes() == plain.to_bytes()
    assert [decision.role for _, decision in recorder.decisions].count("prefill") == 12
    assert [explanation.role for _, explanation in recorder.explanations] == ["prefill", "decode"]
    for _, explanation in recorder.explanations:
        chosen = next(one for _, one in recorder.decisions if (one.request, one.role) == ("r3", explanation.role))
        assert explanation.candidates[0].worker == chosen.worker


def test_candidates_are_listed_with_their_terms_or_why_not() -> None:
    terms = Terms(wait_s=0.25, work_s=1.5, first_token_s=1.75, cost_s=1.8, device_tokens=640, fetch_tokens={"host": 64})
    explanation = Explanation("a", "prefill", (Candidate("w0", 0, terms), Candidate("w1", 1, None, "out for 3 s")))
    lines = explanation_table(explanation).splitlines()
    expected = "w0 0 1.80 s 250.0 ms 0.0 ms 1.50 s 1.75 s 0.0 ms 0.0 ms 0.0 ms 640 host 64"
    assert lines[1].split() == expected.split()
    assert "out for 3 s" in lines[2]


class _Page(HTMLParser):
    """The elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_a_report_is_one_file_with_plots(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    write_html(file, "A <fleet>", {"trace": "twelve & no more"}, [run("ours"), run("round-robin")])
    text = file.read_text(encoding="utf-8")
    page = _Page(text)
    assert page.tags.count("svg") == 5
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert all(link.startswith(("#", "data:")) for link in page.links)  # refers to nothing outside
    assert "A &lt;fleet&gt;" in text
    assert "twelve &amp; no more" in text
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        ElementTree.fromstring(svg)
    for heading in ("Time to the first token", "Load by worker", "The fleet over time", "Terms of the decisions"):
        assert heading in text
    write_html(tmp_path / "again.html", "A <fleet>", {"trace": "twelve & no more"}, [run("ours"), run("round-robin")])
    assert (tmp_path / "again.html").read_bytes() == file.read_bytes()


def test_a_report_of_many_workers_is_small_and_takes_names_as_they_are(tmp_path: Path) -> None:
    workers = tuple(WorkerSpec(Worker(f"$w^{number}", role="both")) for number in range(200))
    spec = FleetSpec(workers=workers, timing=SPEC.timing)
    write_html(tmp_path / "report.html", "many", {}, [Run("some", simulate(spec, ARRIVALS, RoundRobin()))])
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert len(text) < 300_000
    assert 10 <= len(re.findall(r">\$w\^\d+<", text)) < 50


def test_a_report_without_an_answer_is_written(tmp_path: Path) -> None:
    spec = FleetSpec(workers=(WorkerSpec(Worker("w", role="both", capacity_tokens=640)),), timing=SPEC.timing)
    write_html(tmp_path / "report.html", "none", {}, [Run("some", simulate(spec, ARRIVALS, RoundRobin()))])
    assert _Page((tmp_path / "report.html").read_text(encoding="utf-8")).tags.count("svg") == 4


def test_a_report_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a run"):
        write_html(tmp_path / "report.html", "none", {}, [])


def test_without_matplotlib_it_is_said_what_to_install() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from dynamo_kv_router_ext.sim import report\n"
        "try: report._svg(lambda axes: None)\n"
        "except RuntimeError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert "pip install 'dynamo-kv-router-ext[sim]'" in done.stdout
