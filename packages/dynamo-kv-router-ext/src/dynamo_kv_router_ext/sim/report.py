# SPDX-License-Identifier: Apache-2.0
"""What came of a simulation: figures, a table of them, and one HTML file with plots.

The plots are drawn by matplotlib, which the extra ``sim`` brings; figures and tables need nothing.
"""

from __future__ import annotations

import html
import io
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._types import EXTERNAL_TIERS, ROLES, Decision, Explanation, Request, Role, Seat, Tier, Worker, WorkerId
from .fleet import Policy, RequestResult, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "Recorder",
    "Run",
    "Summary",
    "cumulative",
    "explanation_table",
    "percentile",
    "summarise",
    "table",
    "write_html",
]

#: Why there are no plots.
MISSING = "a report needs matplotlib: pip install 'dynamo-kv-router-ext[sim]'"

#: Points of a line in a plot, less one.
_POINTS = 300


def percentile(values: Iterable[float], share: float) -> float:
    """Return the least value that at least ``share`` of the values do not exceed; NaN where there is none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def cumulative(values: Iterable[float]) -> list[tuple[float, float]]:
    """Return points of the cumulative distribution: a value, and the share of values that do not exceed it.

    Values that are not above 0, and NaN, are left out: the axis is logarithmic. At most `_POINTS` + 1 points are given.
    """
    found = sorted(value for value in values if value > 0)
    places = {round(place * (len(found) - 1) / _POINTS) for place in range(_POINTS + 1)} if found else set()
    return [(found[place], (place + 1) / len(found)) for place in sorted(places)]


@dataclass(frozen=True)
class Summary:
    """The figures of one simulation; times in seconds, shares from 0 to 1, NaN where nothing was seen."""

    #: Requests that were answered, and those that were not.
    answered: int
    failed: int
    #: Time to the first token.
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    #: Time between two tokens: the mean over requests of each one's mean, and the 99th percentile of that.
    itl_mean_s: float
    itl_p99_s: float
    #: Time to the last token.
    e2e_mean_s: float
    #: Which share of all prompt tokens came from the device's cache, the host tier, the shared store.
    hit_device: float
    hit_host: float
    hit_store: float
    #: Tokens generated per second, and requests answered per second.
    tokens_per_s: float
    requests_per_s: float
    #: The share of the time in which a worker of a role was busy, by role.
    utilisation: Mapping[str, float]
    #: Sequences that were preempted, and placements beyond each request's first.
    preemptions: int
    retries: int

    def as_json(self) -> dict[str, Any]:
        """Return the figures for a JSON file; NaN becomes None."""
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in asdict(self).items()
        }


def summarise(result: Result) -> Summary:
    """Return the figures of a simulation."""
    done = [request for request in result.requests if not request.error]
    ttft = [request.ttft_s for request in done]
    itl = [request.itl_s for request in done if not math.isnan(request.itl_s)]
    prompt = sum(request.tokens for request in done)
    busy: dict[str, list[float]] = {}
    for worker in result.workers:
        busy.setdefault(worker.role, []).append(worker.utilisation)
    return Summary(
        answered=len(done),
        failed=len(result.requests) - len(done),
        ttft_mean_s=_mean(ttft),
        ttft_p50_s=percentile(ttft, 0.5),
        ttft_p99_s=percentile(ttft, 0.99),
        itl_mean_s=_mean(itl),
        itl_p99_s=percentile(itl, 0.99),
        e2e_mean_s=_mean([request.e2e_s for request in done]),
        hit_device=_share(sum(request.device_tokens for request in done), prompt),
        hit_host=_share(sum(request.host_tokens for request in done), prompt),
        hit_store=_share(sum(request.store_tokens for request in done), prompt),
        tokens_per_s=_share(sum(request.output_tokens for request in done), result.duration_s),
        requests_per_s=_share(len(done), result.duration_s),
        utilisation={role: _mean(shares) for role, shares in busy.items()},
        preemptions=sum(request.preemptions for request in result.requests),
        retries=sum(max(0, request.attempts - 1) for request in result.requests),
    )


class Recorder:
    """A policy that keeps what another one decided.

    Args:
        policy: what decides.
        watch: the id of a request whose candidates are kept too; the policy must have `explain` for it.
    """

    def __init__(self, policy: Policy, watch: str | None = None) -> None:
        self._policy, self._watch = policy, watch
        #: Every decision with its time.
        self.decisions: list[tuple[float, Decision]] = []
        #: What was known at each placement of the watched request.
        self.explanations: list[tuple[float, Explanation]] = []

    def add_worker(self, worker: Worker, now: float) -> None:
        """See `Policy`."""
        self._policy.add_worker(worker, now)

    def remove_worker(self, id: WorkerId, now: float) -> object:
        """See `Policy`."""
        return self._policy.remove_worker(id, now)

    def stored(self, worker: WorkerId, rank: int, tier: Tier, blocks: Sequence[int]) -> None:
        """See `Policy`."""
        self._policy.stored(worker, rank, tier, blocks)

    def removed(self, worker: WorkerId, rank: int, tier: Tier, blocks: Sequence[int]) -> None:
        """See `Policy`."""
        self._policy.removed(worker, rank, tier, blocks)

    def place(self, request: Request, role: Role, now: float) -> Decision:
        """See `Policy`; keeps the decision."""
        if request.id == self._watch:
            self.explanations.append((now, self._policy.explain(request, role, now)))  # type: ignore[attr-defined]
        decision = self._policy.place(request, role, now)
        self.decisions.append((now, decision))
        return decision

    def prefilled(self, request_id: str, now: float, fetch_s: float | None = None) -> object:
        """See `Policy`."""
        return self._policy.prefilled(request_id, now, fetch_s)

    def progress(self, request_id: str, tokens: int, now: float) -> object:
        """See `Policy`."""
        return self._policy.progress(request_id, tokens, now)

    def finished(self, request_id: str, now: float) -> object:
        """See `Policy`."""
        return self._policy.finished(request_id, now)

    def cancelled(self, request_id: str, now: float) -> object:
        """See `Policy`."""
        return self._policy.cancelled(request_id, now)

    def failed(self, request_id: str, role: Role, now: float, reason: str) -> object:
        """See `Policy`."""
        return self._policy.failed(request_id, role, now, reason)

    def tick(self, now: float) -> object:
        """See `Policy`."""
        return self._policy.tick(now)


@dataclass(frozen=True)
class Run:
    """One policy's simulation."""

    #: The policy, as the reader knows it.
    label: str
    #: What came of it.
    result: Result
    #: What it decided, with times; may be left out.
    decisions: Sequence[tuple[float, Decision]] = ()
    #: Its figures.
    summary: Summary = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "summary", summarise(self.result))


#: The columns of the table: heading, and how a summary fills it.
_COLUMNS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("TTFT mean", lambda one: _seconds(one.ttft_mean_s)),
    ("p50", lambda one: _seconds(one.ttft_p50_s)),
    ("p99", lambda one: _seconds(one.ttft_p99_s)),
    ("ITL mean", lambda one: _seconds(one.itl_mean_s)),
    ("p99", lambda one: _seconds(one.itl_p99_s)),
    ("device hits", lambda one: _percent(one.hit_device)),
    ("host", lambda one: _percent(one.hit_host)),
    ("store", lambda one: _percent(one.hit_store)),
    ("tokens/s", lambda one: f"{one.tokens_per_s:.0f}"),
    ("busy", lambda one: " ".join(f"{role} {_percent(share)}" for role, share in one.utilisation.items())),
    ("failed", lambda one: str(one.failed)),
)


def table(runs: Sequence[tuple[str, Summary]]) -> str:
    """Return the figures as text, one line a policy."""
    rows = [["policy", *(heading for heading, _ in _COLUMNS)]]
    rows += [[label, *(show(summary) for _, show in _COLUMNS)] for label, summary in runs]
    return _aligned(rows)


def explanation_table(explanation: Explanation) -> str:
    """Return the candidates of a request and their terms as text, the cheapest first."""
    rows = [
        ["worker", "rank", "cost", "wait", "fetch", "work", "first token", "ITL", "others", "risk", "device", "fetched"]
    ]
    for one in explanation.candidates:
        if one.terms is None:
            rows.append([str(one.worker), str(one.rank), one.refused or "passed over"])
            continue
        terms = one.terms
        times = (terms.cost_s, terms.wait_s, terms.fetch_s, terms.work_s, terms.first_token_s, terms.token_s)
        fetched = " ".join(
            f"{tier} {terms.fetch_tokens[tier]}" for tier in EXTERNAL_TIERS if terms.fetch_tokens.get(tier)
        )
        shown = [*map(_seconds, (*times, terms.others_s, terms.risk_s)), str(terms.device_tokens), fetched or "-"]
        rows.append([str(one.worker), str(one.rank), *shown])
    return _aligned(rows)


def write_html(path: str | Path, title: str, facts: Mapping[str, str], runs: Sequence[Run]) -> None:
    """Write a report: what was simulated, the table, and plots. The file refers to no other.

    Args:
        path: the HTML file.
        title: its heading.
        facts: what was simulated: pairs of a name and a value.
        runs: one per policy.

    Raises RuntimeError where matplotlib is missing, ValueError without a run, and OSError.
    """
    if not runs:
        raise ValueError("a report needs a run")
    figures = [
        ("Time to the first token", "The share of requests whose first token came within a time.", _ttft(runs)),
        ("Time between tokens", "The share of requests whose mean time between tokens was within a time.", _itl(runs)),
        ("Load by worker", "The share of the time in which each worker was busy.", _load(runs)),
        ("The fleet over time", "Requests that a worker had and had not finished: one row a worker.", _timeline(runs)),
    ]
    if any(run.decisions for run in runs):
        caption = "What the chosen candidates were expected to cost: the mean over decisions, by role."
        figures.append(("Terms of the decisions", caption, _terms(runs)))
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in ("policy", *(name for name, _ in _COLUMNS)))
    body = "".join(
        f"<tr><th>{html.escape(run.label)}</th>"
        + "".join(f"<td>{html.escape(show(run.summary))}</td>" for _, show in _COLUMNS)
        + "</tr>"
        for run in runs
    )
    described = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in facts.items())
    plots = "".join(
        f"<section><h2>{html.escape(heading)}</h2><p>{html.escape(caption)}</p>{svg}</section>"
        for heading, caption, svg in figures
    )
    Path(path).write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1><dl>{described}</dl>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{plots}</body></html>\n",
        encoding="utf-8",
    )


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:68rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}th,td{padding:.2rem .7rem;text-align:right;"
    "border-bottom:1px solid #ddd}tbody th{text-align:left}dl{display:grid;grid-template-columns:max-content auto;"
    "gap:.1rem 1rem}dt{color:#666}dd{margin:0}svg{max-width:100%;height:auto}"
)


def _ttft(runs: Sequence[Run]) -> str:
    return _cdf(runs, lambda request: request.ttft_s, "time to the first token (s)")


def _itl(runs: Sequence[Run]) -> str:
    return _cdf(runs, lambda request: request.itl_s, "mean time between tokens (s)")


def _cdf(runs: Sequence[Run], value: Callable[[RequestResult], float], label: str) -> str:
    def draw(axes: Axes) -> None:
        for run in runs:
            points = cumulative(value(request) for request in run.result.requests if not request.error)
            if points:
                axes.step(*zip(*points, strict=True), where="post", label=run.label)
        axes.set(xscale="log", xlabel=label, ylabel="share of requests", ylim=(0, 1.01))
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()

    return _svg(draw)


def _load(runs: Sequence[Run]) -> str:
    def draw(axes: Axes) -> None:
        width = 0.8 / len(runs)
        for place, run in enumerate(runs):
            at = [number + place * width for number in range(len(run.result.workers))]
            axes.bar(at, [worker.utilisation for worker in run.result.workers], width, label=run.label)
        names = [str(worker.worker) for worker in runs[0].result.workers]
        step = -(-len(names) // 24)
        places = [number + 0.4 - width / 2 for number in range(len(names))]
        axes.set_xticks(places[::step], names[::step], rotation=30, ha="right")
        axes.set(ylabel="share of the time", ylim=(0, 1))
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))

    return _svg(draw)


#: Columns of the timeline.
_BINS = 150


def _timeline(runs: Sequence[Run]) -> str:
    maps = [_in_flight(run.result) for run in runs]
    most = max(1.0, *(value for _, rows in maps for row in rows for value in row))
    longest = max(run.result.duration_s for run in runs)

    def draw(*every: Axes) -> None:
        for axes, run, (names, rows) in zip(every, runs, maps, strict=True):
            edges = [run.result.duration_s * number / _BINS for number in range(_BINS + 1)]
            # As an image: as shapes, it would be most of the file.
            ends = range(len(names) + 1)
            mesh = axes.pcolormesh(edges, ends, rows, vmin=0, vmax=most, cmap="viridis", rasterized=True)
            step = -(-len(names) // 10)
            axes.set_yticks([number + 0.5 for number in range(len(names))][::step], names[::step])
            axes.set(title=run.label, xlabel="time (s)", xlim=(0, longest or 1))
            axes.figure.colorbar(mesh, ax=axes, label="requests")

    return _svg(draw, panels=len(runs))


def _in_flight(result: Result) -> tuple[list[str], list[list[float]]]:
    """Return the workers' names, and for each the mean number of its requests in each of `_BINS` spans of time."""
    rows = {worker.worker: [0.0] * _BINS for worker in result.workers}
    span = result.duration_s / _BINS or 1.0

    def add(seat: Seat | None, start: float, stop: float) -> None:
        if seat is None or seat.worker not in rows:
            return
        for place in range(max(0, int(start / span)), min(_BINS, math.ceil(stop / span))):
            rows[seat.worker][place] += max(0.0, min(stop, (place + 1) * span) - max(start, place * span)) / span

    for request in result.requests:
        if request.error:
            continue
        if request.prefill == request.decode:
            add(request.decode, request.placed_s, request.end_s)
        else:
            add(request.prefill, request.placed_s, request.prefilled_s)
            add(request.decode, request.prefilled_s, request.end_s)
    return [str(name) for name in rows], list(rows.values())


_TERMS = ("wait_s", "fetch_s", "work_s", "others_s", "risk_s")


def _terms(runs: Sequence[Run]) -> str:
    bars: dict[str, list[tuple[str, list[float]]]] = {}
    for run in runs:
        for role in ROLES:
            chosen = [decision.terms for _, decision in run.decisions if decision.role == role]
            means = [_mean([getattr(terms, name) for terms in chosen]) for name in _TERMS] if chosen else []
            if any(means):  # a policy that estimates nothing has no terms
                bars.setdefault(role, []).append((run.label, means))

    def draw(*every: Axes) -> None:
        for axes, (role, rows) in zip(every, bars.items(), strict=False):
            left = [0.0] * len(rows)
            for place, name in enumerate(_TERMS):
                values = [means[place] for _, means in rows]
                axes.barh([label for label, _ in rows], values, left=left, label=name.removesuffix("_s"))
                left = [before + value for before, value in zip(left, values, strict=True)]
            axes.set(title=role, xlabel="mean of the chosen candidates (s)")
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1))

    return _svg(draw, panels=max(1, len(bars)))


def _svg(draw: Callable[..., None], panels: int = 1) -> str:
    """Return a plot as an SVG element; the same input gives the same text."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(MISSING) from error
    with matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "kv-router-sim",
            "font.family": "sans-serif",
            "text.parse_math": False,  # names are shown as they are
        }
    ):
        figure = Figure(figsize=(9, 3.4 if panels == 1 else 2.2 * panels), layout="constrained")
        draw(*figure.subplots(panels, 1, squeeze=False)[:, 0])
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL).strip()


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    count = max(map(len, rows))
    widths = [max(len(row[place]) for row in rows if place < len(row)) for place in range(count)]
    lines = []
    for row in rows:  # a row may be shorter than the heading
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=False))
        lines.append("  ".join([row[0].ljust(widths[0]), *rest]).rstrip())
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _seconds(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value * 1e3:.1f} ms" if abs(value) < 1 else f"{value:.2f} s"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.0%}"
