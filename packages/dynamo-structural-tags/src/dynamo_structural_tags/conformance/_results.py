# SPDX-License-Identifier: Apache-2.0
"""What a run found, and its JSON (schema 1)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from ._answer import Call

__all__ = ["ABSENT", "CaseResult", "Difference", "Exchange", "Run", "Target", "Verdict", "read_run"]

Verdict = Literal["pass", "fail", "inconclusive"]
_T = TypeVar("_T")


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
    """Read what `Run.write` wrote, by this version or a later one of the same schema: fields unknown here are left out.

    Raises ValueError, with the file's name, for anything else, and OSError.
    """
    try:
        document = json.loads(Path(path).read_text("utf-8"))
        if not isinstance(document, dict) or "schema" not in document:
            raise ValueError("no results of tool-conformance")
        if document["schema"] != 1:
            raise ValueError(f"results of schema {document['schema']!r}; this version reads schema 1")
        entries = [_result(entry) for entry in document["results"]]
        return _made(Run, document, endpoint=_made(Target, document["endpoint"]), results=entries)
    except KeyError as error:
        raise ValueError(f"{path}: no results of tool-conformance: {error} is missing") from None
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: no results of tool-conformance: {error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: no JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _result(entry: dict[str, Any]) -> CaseResult:
    exchanges = [
        _made(
            Exchange,
            exchange,
            calls=[_made(Call, call) for call in exchange["calls"]],
            differences=[_made(Difference, difference) for difference in exchange["differences"]],
        )
        for exchange in entry["exchanges"]
    ]
    result = _made(CaseResult, entry, exchanges=exchanges)
    if result.verdict not in ("pass", "fail", "inconclusive"):
        raise ValueError(f"{result.case}: no verdict {result.verdict!r}")
    return result


def _made(kind: type[_T], entry: dict[str, Any], **known: Any) -> _T:
    """A dataclass from a JSON object; `known` are the fields that are made already."""
    names = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in entry.items() if name in names} | known)
