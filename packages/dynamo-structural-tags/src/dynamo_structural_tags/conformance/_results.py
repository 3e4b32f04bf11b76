# SPDX-License-Identifier: Apache-2.0
"""What a run found, and its JSON (schema 1)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from ._answer import Call

__all__ = ["ABSENT", "CaseResult", "Difference", "Exchange", "Run", "Target", "Verdict", "read_run"]

Verdict = Literal["pass", "fail", "inconclusive"]


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


#: No value at all, where null would be one. In the JSON the key is left out.
ABSENT: Final = _Absent()


@dataclass(frozen=True)
class Difference:
    """One thing that is not as it has to be, and where: `calls[0].arguments.text`, `finish`, `usage.total`, ...

    `message` says it in words, path included. `expected` and `got` are JSON values, or `ABSENT`.
    """

    path: str
    message: str
    expected: Any = ABSENT
    got: Any = ABSENT


@dataclass
class Exchange:
    """A request and its answer. `request` is the body as sent: JSON, or the string that a case sends as it stands."""

    label: str
    request: Any
    #: 0 where no answer came.
    status: int
    #: As it came over the wire, cut where it is long.
    response: str
    calls: list[Call] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    differences: list[Difference] = field(default_factory=list)


@dataclass
class CaseResult:
    """How a case ended. The exchanges are those of its last attempt."""

    case: str
    area: str
    fault: str
    required: bool
    verdict: Verdict
    remark: str = ""
    attempts: int = 1
    seconds: float = 0.0
    exchanges: list[Exchange] = field(default_factory=list)


@dataclass(frozen=True)
class Target:
    """Whom the run asked."""

    base_url: str
    model: str
    api: str


@dataclass
class Run:
    """A whole run; the results stand in the order of the cases."""

    version: str
    #: UTC, ISO 8601.
    started: str
    seconds: float
    endpoint: Target
    profile: str
    results: list[CaseResult] = field(default_factory=list)
    #: Whether it was stopped before the last case.
    interrupted: bool = False

    @property
    def summary(self) -> dict[str, int]:
        """How many cases ended in which way, and how many were required."""
        counts = {"pass": 0, "fail": 0, "inconclusive": 0, "required": 0}
        for result in self.results:
            counts[result.verdict] += 1
            counts["required"] += result.required
        return counts

    @property
    def exit_code(self) -> int:
        """1: a case failed. 3: none failed, but one that is required is inconclusive. 130: interrupted. 0: neither."""
        if self.interrupted:
            return 130
        if any(result.verdict == "fail" for result in self.results):
            return 1
        return 3 if any(result.required and result.verdict != "pass" for result in self.results) else 0

    def to_json(self) -> dict[str, Any]:
        """The document of schema 1."""
        return {
            "schema": 1,
            "version": self.version,
            "started": self.started,
            "seconds": self.seconds,
            "endpoint": vars(self.endpoint),
            "profile": self.profile,
            "interrupted": self.interrupted,
            "summary": self.summary,
            "results": [
                {
                    **vars(result),
                    "exchanges": [
                        {
                            **vars(exchange),
                            "calls": [vars(call) for call in exchange.calls],
                            "differences": [
                                {key: value for key, value in vars(difference).items() if value is not ABSENT}
                                for difference in exchange.differences
                            ],
                        }
                        for exchange in result.exchanges
                    ],
                }
                for result in self.results
            ],
        }

    def text(self) -> str:
        """The JSON's text. It is ASCII, so that half a surrogate pair in an answer can be written as well."""
        return json.dumps(self.to_json(), indent=1) + "\n"

    def write(self, path: Path | str) -> None:
        """Write the JSON."""
        Path(path).write_text(self.text(), "utf-8")


def read_run(path: Path | str) -> Run:
    """Read what `Run.write` wrote. Raises ValueError, with the file's name, for anything else, and OSError."""
    try:
        document = json.loads(Path(path).read_text("utf-8"))
        if not isinstance(document, Mapping) or document.get("schema") != 1:
            raise ValueError("no results of tool-conformance, schema 1")
        return Run(
            version=document["version"],
            started=document["started"],
            seconds=document["seconds"],
            endpoint=Target(**document["endpoint"]),
            profile=document["profile"],
            interrupted=document.get("interrupted", False),
            results=[_result(entry) for entry in document["results"]],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from None


def _result(entry: Mapping[str, Any]) -> CaseResult:
    exchanges = [
        Exchange(
            **{
                **exchange,
                "calls": [Call(**call) for call in exchange["calls"]],
                "differences": [Difference(**difference) for difference in exchange["differences"]],
            }
        )
        for exchange in entry["exchanges"]
    ]
    result = CaseResult(**{**entry, "exchanges": exchanges})
    if result.verdict not in ("pass", "fail", "inconclusive"):
        raise ValueError(f"{result.case}: no verdict {result.verdict!r}")
    return result
