# SPDX-License-Identifier: Apache-2.0
"""Progress and results in a terminal, or as plain lines where stdout is none."""

from __future__ import annotations

import io
import sys
from collections import Counter
from types import TracebackType
from typing import TextIO

from rich import progress
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from ._results import CaseResult, Run
from ._text import printable, shortened

__all__ = ["STYLES", "Progress", "console", "counted", "heading", "indented", "remark_of", "table"]

#: The colour of a verdict.
STYLES = {"pass": "green", "fail": "bold red", "inconclusive": "yellow"}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the caller that nobody reads on; rich would end the process here, in the midst of a run."""
        raise BrokenPipeError


def console(file: TextIO | None = None) -> Console:
    """The console of a file, stdout by default.

    Without a terminal there is no colour, and lines are as long as they are: they are read by other programs. What the
    file's encoding cannot write is escaped.
    """
    stream = file or sys.stdout or io.StringIO()  # there may be no stdout at all
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return _Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=not stream.isatty())


class Progress:
    """What goes on while a run lasts; a context manager.

    A terminal has a line with a bar, the counts and the cases that wait for their answers. Elsewhere each case that
    ended has a line.
    """

    def __init__(self, total: int, console: Console) -> None:
        self._console = console
        self._waiting: dict[str, None] = {}
        self._ended: Counter[str] = Counter()
        self._bar: progress.Progress | None = None
        if console.file.isatty() and not console.is_dumb_terminal:
            self._bar = progress.Progress(
                progress.BarColumn(bar_width=12),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TextColumn(
                    "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
                ),
                console=console,
                transient=True,
                expand=True,
            )
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
        else:
            self._console.print()

    def started(self, case: str) -> None:
        """A case has been asked."""
        self._waiting[case] = None
        self._show(0)

    def finished(self, result: CaseResult) -> None:
        """A case has its verdict."""
        self._waiting.pop(result.case, None)
        self._ended[result.verdict] += 1
        if self._bar:
            self._show(1)
            return
        line = Text.assemble(_word(result.verdict), f" {printable(result.case)} ({result.seconds:.1f} s)")
        if result.verdict != "pass" and result.remark:
            line += Text(": ") + remark_of(result)
        self._console.print(line)

    def _show(self, ended: int) -> None:
        if not self._bar:
            return
        parts = [f"{self._ended['fail']} failed"] if self._ended["fail"] else []
        if self._waiting:
            first, more = next(iter(self._waiting)), len(self._waiting) - 1
            parts.append(printable(first) + (f" and {more} more" if more else ""))
        self._bar.update(self._task, advance=ended, description=", ".join(parts))


def table(run: Run, console: Console) -> None:
    """Print the run's head, the areas with their counts, what was not passed and why, and the counts of all."""
    console.print(heading(run))
    areas: dict[str, Counter[str]] = {}
    for result in run.results:
        areas.setdefault(result.area, Counter())[result.verdict] += 1
    rows = Table(box=None, pad_edge=False, header_style="bold")
    rows.add_column("area", overflow="fold")
    for name in ("cases", "pass", "fail", "inconclusive"):
        rows.add_column(name, justify="right", no_wrap=True)
    for area, counts in areas.items():
        rows.add_row(
            printable(area),
            str(counts.total()),
            *(Text(str(counts[verdict] or "-"), STYLES[verdict] if counts[verdict] else "dim") for verdict in STYLES),
        )
    console.print()
    console.print(rows)
    for result in sorted(run.results, key=lambda result: result.verdict != "fail"):
        if result.verdict == "fail" or (result.verdict == "inconclusive" and result.required):
            console.print()
            console.print(Text.assemble(_word(result.verdict), f" {printable(result.case)}"))
            indented(console, Text(printable(result.fault)), 2)
            indented(console, remark_of(result), 2)
    console.print()
    console.print(Text(f"{counted(run)}, in {run.seconds:.1f} s"))


def heading(run: Run) -> Text:
    """Whom the run asked, when, and by which version and profile."""
    endpoint = run.endpoint
    return Text(
        printable(
            f"{endpoint.model} at {endpoint.base_url} ({endpoint.api}), profile {run.profile}, "
            f"tool-conformance {run.version}, {run.started.replace('T', ' ').removesuffix('Z')} UTC"
        )
    )


def counted(run: Run) -> str:
    """The counts of a run in words: `160 cases: 150 passed, 3 failed, 7 inconclusive (2 of them required)`."""
    counts = Counter(result.verdict for result in run.results)
    required = sum(result.required for result in run.results if result.verdict == "inconclusive")
    return (
        ("interrupted after " if run.interrupted else "")
        + f"{len(run.results)} cases: {counts['pass']} passed, {counts['fail']} failed, "
        + f"{counts['inconclusive']} inconclusive"
        + (f" ({required} of them required)" if required else "")
    )


def remark_of(result: CaseResult) -> Text:
    """What there is to say about a verdict, on printable lines of bearable length."""
    return Text(printable(shortened(result.remark, 1000), keep="\n"))


def indented(console: Console, text: Text, by: int) -> None:
    """Print a text that begins further right, in a terminal on each line that it is wrapped to."""
    if console.soft_wrap:
        console.print(Text("\n").join(Text(" " * by) + line for line in text.split("\n")))
    else:
        console.print(Padding(text, (0, 0, 0, by), expand=False))


def _word(verdict: str) -> tuple[str, str]:
    return {"pass": "pass", "fail": "FAIL", "inconclusive": "INCONCLUSIVE"}.get(verdict, verdict), STYLES[verdict]
