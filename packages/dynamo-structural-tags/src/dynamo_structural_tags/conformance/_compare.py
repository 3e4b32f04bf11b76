# SPDX-License-Identifier: Apache-2.0
"""Two runs beside each other: of two servers, or of one before and after a change."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from ._results import CaseResult, Run
from ._table import STYLES, counted, heading, indented, remark_of
from ._text import printable

__all__ = ["Change", "Comparison", "compare"]


@dataclass(frozen=True)
class Change:
    """A case of two runs, with its result in each; None where a run does not have it."""

    case: str
    before: CaseResult | None
    after: CaseResult | None

    @property
    def kind(self) -> str:
        """What became of the case.

        `worse`: it fails and did not before (a new case too), or it passed and is now inconclusive although required.
        `better`: it passes and did not before. `other`: another change, as from failed to inconclusive. `new`: it was
        not asked before and does not fail. `gone`: it was not asked now. `same`: the same verdict.
        """
        before, after = (result.verdict if result else None for result in (self.before, self.after))
        if before == after:
            return "same"
        if self.after is None:
            return "gone"
        if after == "fail" or (before == "pass" and self.after.required):
            return "worse"
        if before is None:
            return "new"
        return "better" if after == "pass" else "other"


@dataclass(frozen=True)
class Comparison:
    """The cases of two runs, in the order of the later run, then those that it no longer has."""

    before: Run
    after: Run
    changes: tuple[Change, ...]

    @property
    def worse(self) -> bool:
        """Whether any case is worse. One that is gone is not: a run of a part may be compared with one of the whole."""
        return any(change.kind == "worse" for change in self.changes)

    def render(self, console: Console) -> None:
        """Print both runs' heads, then what changed, the worse first, with the remarks of what is not passed now."""
        for name, run in (("before", self.before), ("after", self.after)):
            console.print(Text(f"{name}: ", "bold") + heading(run) + Text(f": {counted(run)}"))
        for kind, title in _TITLES.items():
            changes = [change for change in self.changes if change.kind == kind]
            if not changes:
                continue
            console.print()
            console.print(Text(f"{title} ({len(changes)})", "bold"))
            for change in changes:
                _print_change(console, change)
        same = sum(change.kind == "same" for change in self.changes)
        console.print()
        console.print(f"{same} of {len(self.changes)} cases have the verdict they had.")


_TITLES = {
    "worse": "Worse",
    "better": "Better",
    "other": "Changed, not for the better",
    "new": "New",
    "gone": "Gone",
}


def compare(before: Run, after: Run) -> Comparison:
    """Match the cases of two runs by their ids."""
    earlier = {result.case: result for result in before.results}
    later = {result.case: result for result in after.results}
    return Comparison(
        before, after, tuple(Change(case, earlier.get(case), later.get(case)) for case in {**later, **earlier})
    )


def _print_change(console: Console, change: Change) -> None:
    line = Text(f"  {printable(change.case)}: ")
    verdicts = [result.verdict for result in (change.before, change.after) if result]
    for place, verdict in enumerate(verdicts):
        line += Text(" -> " if place else "") + Text(verdict, STYLES[verdict])
    console.print(line)
    if change.after and change.after.verdict != "pass":
        indented(console, remark_of(change.after), 6)
