# SPDX-License-Identifier: Apache-2.0
"""The benchmark harness behind ``nox -s bench``.

``python -m support.bench`` lists the benches; ``python -m support.bench NAME [--json FILE] [--quick]`` runs one. Both
are started in the root of the repository, with ``tests`` on the path.

A bench is a file ``packages/*/benchmarks/bench_*.py`` or ``integration/benchmarks/bench_*.py``. Its name is the file's
without ``bench_``, with dashes for underscores; the first line of its docstring describes it; it defines one function::

    def run(bench: Bench) -> None:
        bench.compare_time("pack", "us", ours=pack, reference=peer_pack, reference_name="peer 1.2", aim="<= 0.5")

What a figure means:

* ``ours`` and ``reference`` are medians of samples taken in the same run. The reference is a peer or a limit.
* ``ratio`` is median(ours) / median(reference). Whether more or less is better is for the ``aim`` to say.
* An aim (``>= 2.0``, ``<= 60``, ``== 1``) is applied to the ratio or, where there is no reference, to ours.
* Spread is the median absolute deviation. One sample has none, so none is shown.

Exit status: 0 the bench ran, whatever its aims say; 1 it failed; 2 it was called wrongly; 130 it was interrupted.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib.util
import json
import math
import operator
import os
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from support.machine import describe_machine, installed_versions

__all__ = ["Bench", "BenchError", "Row", "Unavailable", "discover", "main"]

#: Where benches are looked for, from the root of the repository.
PATTERNS = ("packages/*/benchmarks/bench_*.py", "integration/benchmarks/bench_*.py")

#: Time units that the harness can measure in, and how many of each make one second.
TIME_UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}

#: The most repeats of a ``--quick`` run.
QUICK_REPEATS = 3

_AIM = re.compile(r"\s*(>=|<=|==|>|<)\s*([+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*")
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}


class BenchError(Exception):
    """A bench that cannot be found or told from another; the message names the files."""


class Unavailable(Exception):
    """Raised by a bench that cannot run here; the message says what it needs, such as a GPU."""


@dataclass(frozen=True)
class Row:
    """One measured figure: the samples of ours and, where there is one, of the peer or limit."""

    #: What was measured, such as ``descriptors per request``.
    metric: str
    #: The unit of both columns; empty for a plain number.
    unit: str
    #: The samples of ours, in the order they were taken.
    ours: tuple[float, ...]
    #: The samples of the peer or limit, or None where there is none.
    reference: tuple[float, ...] | None
    #: The peer or limit, with its version where it has one.
    reference_name: str | None
    #: What the ratio (or ours, without a reference) should be, such as ``>= 2.0``.
    aim: str | None

    @property
    def ratio(self) -> float | None:
        """Median of ours by the median of the reference; None without a reference."""
        if self.reference is None:
            return None
        return statistics.median(self.ours) / statistics.median(self.reference)

    @property
    def met(self) -> bool | None:
        """Whether the aim is met; None without an aim."""
        if self.aim is None:
            return None
        compare, bound = _parse_aim(self.aim)
        return compare(statistics.median(self.ours) if self.ratio is None else self.ratio, bound)

    def as_json(self) -> dict[str, Any]:
        """Return the row as it stands in the JSON file: medians, ratio, aim."""
        return {
            "metric": self.metric,
            "unit": self.unit,
            "ours": statistics.median(self.ours),
            "reference": None if self.reference is None else statistics.median(self.reference),
            "reference_name": self.reference_name,
            "ratio": self.ratio,
            "aim": self.aim,
            "met": self.met,
        }


class Bench:
    """What a bench's ``run`` gets: it measures, and records each figure as a row."""

    def __init__(self, name: str, *, quick: bool = False) -> None:
        #: The bench's name on the command line.
        self.name = name
        #: Whether a short run was asked for: fewer repeats, and smaller inputs where the bench has a choice.
        self.quick = quick
        #: The rows recorded so far.
        self.rows: list[Row] = []
        #: Remarks printed under the table.
        self.notes: list[str] = []

    def row(
        self,
        metric: str,
        unit: str,
        *,
        ours: Sequence[float],
        reference: Sequence[float] | None = None,
        reference_name: str | None = None,
        aim: str | None = None,
    ) -> Row:
        """Record a figure from samples that the bench took itself, and return it.

        Raises ValueError for an empty or non-finite sample list, an aim that cannot be read, a reference without a
        name or a name without a reference, and a reference whose median is 0, to which there is no ratio.
        """
        if (reference is None) != (reference_name is None):
            raise ValueError(f"{metric}: reference and reference_name go together")
        if aim is not None:
            _parse_aim(aim)
        row = Row(
            metric=metric,
            unit=unit,
            ours=_samples(f"{metric}: ours", ours),
            reference=None if reference is None else _samples(f"{metric}: {reference_name}", reference),
            reference_name=reference_name,
            aim=aim,
        )
        if row.reference is not None and statistics.median(row.reference) == 0:
            raise ValueError(f"{metric}: the median of {reference_name} is 0, so there is no ratio; give ours alone")
        self.rows.append(row)
        return row

    def measure(
        self, function: Callable[[], object], *, unit: str = "s", repeats: int = 7, warmup: int = 1
    ) -> list[float]:
        """Time ``repeats`` calls of ``function`` after ``warmup`` calls, and return the samples in ``unit``.

        The clock is `time.perf_counter`; the garbage collector is paused. For work queued on a GPU the function has
        to wait until it is done. Raises ValueError for a unit that is none of `TIME_UNITS`.
        """
        scale = _time_scale(unit)
        for _ in range(warmup):
            function()
        return [_timed(function) * scale for _ in range(self._repeats(repeats))]

    def compare(
        self,
        metric: str,
        unit: str,
        *,
        ours: Callable[[], float],
        reference: Callable[[], float],
        reference_name: str,
        repeats: int = 7,
        warmup: int = 1,
        aim: str | None = None,
    ) -> Row:
        """Record a figure from two functions that return one sample each, called in turn.

        Alternating puts a drift of the machine (clock, temperature, neighbours) into both columns alike; which of the
        two goes first alternates too.
        """
        samples = self._alternate(ours, reference, self._repeats(repeats), warmup)
        return self.row(metric, unit, ours=samples[0], reference=samples[1], reference_name=reference_name, aim=aim)

    def compare_time(
        self,
        metric: str,
        unit: str,
        *,
        ours: Callable[[], object],
        reference: Callable[[], object],
        reference_name: str,
        repeats: int = 7,
        warmup: int = 1,
        aim: str | None = None,
    ) -> Row:
        """Record how long two functions take, as `compare` does; what they return is not looked at."""
        scale = _time_scale(unit)
        return self.compare(
            metric,
            unit,
            ours=lambda: _timed(ours) * scale,
            reference=lambda: _timed(reference) * scale,
            reference_name=reference_name,
            repeats=repeats,
            warmup=warmup,
            aim=aim,
        )

    def note(self, text: str) -> None:
        """Print ``text`` under the table: the input, a setting, what was left out."""
        self.notes.append(text)

    def _repeats(self, repeats: int) -> int:
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, not {repeats}")
        return min(repeats, QUICK_REPEATS) if self.quick else repeats

    @staticmethod
    def _alternate(
        ours: Callable[[], float], reference: Callable[[], float], repeats: int, warmup: int
    ) -> tuple[list[float], list[float]]:
        samples: tuple[list[float], list[float]] = ([], [])
        functions = (ours, reference)
        for turn in range(-warmup, repeats):
            for which in (0, 1) if turn % 2 == 0 else (1, 0):
                value = functions[which]()
                if turn >= 0:
                    samples[which].append(value)
        return samples


@dataclass(frozen=True)
class BenchFile:
    """A bench that was found: its name, its file and the first line of its docstring."""

    name: str
    path: Path
    description: str


def discover(root: Path) -> dict[str, BenchFile]:
    """Return the benches of the repository at ``root`` by name, in order of name.

    The files are parsed, not imported: listing them needs nothing installed. Raises BenchError where two share a
    name, or where one has no docstring or cannot be parsed.
    """
    found: dict[str, BenchFile] = {}
    for path in sorted(path for pattern in PATTERNS for path in root.glob(pattern)):
        shown = path.relative_to(root)
        name = path.stem.removeprefix("bench_").replace("_", "-")
        if name in found:
            raise BenchError(f"two benches are named {name}: {found[name].path.relative_to(root)} and {shown}")
        try:
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        except (SyntaxError, ValueError) as error:
            raise BenchError(f"{shown} cannot be parsed: {error}") from error
        if not docstring:
            raise BenchError(f"{shown} has no docstring: its first line describes the bench")
        found[name] = BenchFile(name, path, docstring.splitlines()[0].strip())
    return dict(sorted(found.items()))


def main(argv: Sequence[str] | None = None, *, root: Path | None = None) -> int:
    """Run the command line ``[NAME] [--json FILE] [--quick]`` in the repository at ``root``; return the exit status."""
    root = Path.cwd() if root is None else root
    parser = argparse.ArgumentParser(prog="bench", description="Run a benchmark; without a name, list them.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the bench to run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--quick", action="store_true", help="a short run: fewer repeats, smaller inputs")
    args = parser.parse_args(argv)
    try:
        benches = discover(root)
    except BenchError as error:
        return _fail(2, str(error))
    if args.name is None:
        if args.json is not None or args.quick:
            return _fail(2, f"--json and --quick need a NAME: {_names(benches)}")
        width = max(map(len, benches), default=0)
        for bench in benches.values():
            print(f"{bench.name:<{width}}  {bench.description}")
        if not benches:
            print("no benches")
        return 0
    if args.name not in benches:
        return _fail(2, f"no bench is named {args.name}: {_names(benches)}")
    json_path: Path | None = None if args.json is None else args.json.absolute()  # a bench may change the folder
    if json_path is not None and (json_path.is_dir() or not json_path.parent.is_dir()):
        return _fail(2, f"--json {args.json}: a folder, or in none that exists")  # said before the run, not after it
    return _run(benches[args.name], root, quick=args.quick, json_path=json_path)


def _run(found: BenchFile, root: Path, *, quick: bool, json_path: Path | None) -> int:
    """Run one bench, print its table and write its JSON file."""
    bench = Bench(found.name, quick=quick)
    machine, versions = describe_machine(), installed_versions(root)
    status, fault = 0, ""
    try:
        module = _load(found)
        module.run(bench)
        if not bench.rows:
            status, fault = 1, "recorded no figure"
    except KeyboardInterrupt:
        status, fault = 130, "was interrupted"
    except Unavailable as error:
        status, fault = 1, f"cannot run here: {error}"
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        status, fault = 1, f"failed: {type(error).__name__}: {error}"
    if bench.rows or status == 0:
        print(_render(bench, machine, versions, incomplete=fault), flush=True)
    if status:
        return _fail(status, f"bench {found.name} {fault}")
    if json_path is not None:
        rows = [row.as_json() for row in bench.rows]
        _write_json(json_path, {"bench": found.name, "machine": machine, "versions": versions, "rows": rows})
    return 0


def _load(found: BenchFile) -> ModuleType:
    """Import a bench's file, with its folder on the path so that it may have helpers beside it."""
    name = f"bench_{found.name.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(name, found.path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{found.path.name} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(found.path.parent))
    spec.loader.exec_module(module)
    if not callable(getattr(module, "run", None)):
        raise TypeError(f"{found.path.name} defines no run(bench)")
    return module


def _render(bench: Bench, machine: str, versions: dict[str, str], *, incomplete: str = "") -> str:
    """Return the table as text. Its width follows its content, so that no column is cut in a pipe."""
    header = ("metric", "unit", "ours", "n", "peer or limit", "measured", "n", "ratio", "aim", "met")
    cells = [header]
    for row in bench.rows:
        reference = row.reference
        cells.append(
            (
                row.metric,
                row.unit or "-",
                _median_and_spread(row.ours),
                str(len(row.ours)),
                row.reference_name or "-",
                "-" if reference is None else _median_and_spread(reference),
                "-" if reference is None else str(len(reference)),
                "-" if row.ratio is None else _number(row.ratio),
                row.aim or "-",
                "-" if row.met is None else "yes" if row.met else "NO",
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    title = f"bench {bench.name}" + (" (quick run)" if bench.quick else "")
    if incomplete:
        title = f"{title}: INCOMPLETE, it {incomplete}"
    judged = [row.met for row in bench.rows if row.met is not None]
    footer = [
        "medians ± median absolute deviation of n samples; ratio = ours / peer or limit, both measured in this run",
        *bench.notes,
        f"aims met: {sum(judged)} of {len(judged)}" if judged else "no aims",
        f"machine: {machine}",
        "versions: " + (", ".join(f"{name} {version}" for name, version in versions.items()) or "none installed"),
    ]
    return "\n".join([title, "", *lines, "", *footer])


def _median_and_spread(samples: Sequence[float]) -> str:
    median = statistics.median(samples)
    if len(samples) == 1:
        return _number(median)
    return f"{_number(median)} ± {_number(statistics.median(abs(sample - median) for sample in samples))}"


def _number(value: float) -> str:
    """Return four significant digits, and every digit of a whole number's integer part."""
    if value == int(value) or abs(value) >= 1e4:
        return f"{value:.0f}"
    return f"{value:.4g}"


def _samples(what: str, values: Sequence[float]) -> tuple[float, ...]:
    samples: list[float] = []
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__float__"):
            raise ValueError(f"{what}: {value!r} is not a number")
        if not math.isfinite(value):
            raise ValueError(f"{what}: {value!r} is not finite")
        samples.append(float(value))
    if not samples:
        raise ValueError(f"{what}: no samples")
    return tuple(samples)


def _parse_aim(aim: str) -> tuple[Callable[[float, float], bool], float]:
    match = _AIM.fullmatch(aim)
    if match is None:
        raise ValueError(f"aim {aim!r} is not a comparison with a number, such as '>= 2.0'")
    return _COMPARISONS[match[1]], float(match[2])


def _time_scale(unit: str) -> float:
    if unit not in TIME_UNITS:
        raise ValueError(f"unit {unit!r} is no time unit: {', '.join(TIME_UNITS)}")
    return TIME_UNITS[unit]


def _timed(function: Callable[[], object]) -> float:
    """Return the seconds one call takes, with the garbage collector paused."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    finally:
        if collecting:
            gc.enable()


def _write_json(path: Path, document: dict[str, Any]) -> None:
    """Write beside and rename: the file is the old one or the whole new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _names(benches: dict[str, BenchFile]) -> str:
    return f"there are {', '.join(benches)}" if benches else "there are none"


def _fail(status: int, message: str) -> int:
    print(f"bench: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    # The benches import `support.bench`: run that module, not this second copy of it, or its types would differ.
    from support import bench as harness

    sys.exit(harness.main())
