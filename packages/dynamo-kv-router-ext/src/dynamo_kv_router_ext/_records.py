# SPDX-License-Identifier: Apache-2.0
"""The last decisions, each with its candidates, what was measured afterwards and what it cost to be wrong."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from ._candidates import Candidates
from ._metrics import Metrics
from ._types import Decision, Request, Role, Terms, WorkerId

__all__ = ["Records"]

#: What Dynamo's frontend puts before a context's id to make the `id` of an answer. Its Responses API makes one up.
_PREFIXES = ("chatcmpl-", "cmpl-")
#: A client may name its requests, and use one name again and again: so many of its last legs are kept.
_LEGS = 16
#: The most bytes of candidates that are kept: with a large fleet, less than `limit` requests.
_PACKED_BYTES = 64 << 20


class _Leg:
    """One decision and what came of it."""

    __slots__ = (
        "aborted",
        "at",
        "candidates",
        "failed",
        "fetch_tokens",
        "first_s",
        "note",
        "rank",
        "regret_s",
        "role",
        "runner_up_s",
        "terms",
        "worker",
    )

    def __init__(self, decision: Decision, now: float) -> None:
        self.role = decision.role
        self.worker = decision.worker
        self.rank = decision.rank
        self.note = decision.note
        self.fetch_tokens = decision.fetch_tokens
        self.terms = decision.terms
        self.runner_up_s = decision.runner_up_s
        self.candidates = Candidates.of(decision.candidates).pack()
        self.at = now
        self.first_s: float | None = None
        self.regret_s: float | None = None
        self.failed: str | None = None
        self.aborted: str | None = None


class _Record:
    """What is kept of one request."""

    __slots__ = ("at", "ended", "ended_at", "legs", "session", "tokens", "wall")

    def __init__(self, request: Request, now: float, wall: float) -> None:
        self.tokens = request.tokens
        self.session = request.session
        self.at = now
        self.wall = wall
        self.legs: list[_Leg] = []
        self.ended: str | None = None
        self.ended_at = now

    @property
    def size(self) -> int:
        """Bytes of its candidates."""
        return sum(len(leg.candidates) for leg in self.legs)


class Records:
    """The last requests that this replica carried, by the id of their context.

    `now` is in seconds of the router's clock. Calls for an id that is not known, or not any more, are ignored.

    Args:
        metrics: what counts along, if anything does.
        limit: how many requests are kept at most.
    """

    def __init__(self, metrics: Metrics | None = None, *, limit: int = 2000) -> None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1, not {limit!r}")
        self._metrics = metrics if metrics is not None else Metrics()
        self._limit = limit
        self._records: dict[str, _Record] = {}
        self._bytes = 0

    def placed(self, id: str, request: Request, decision: Decision, now: float, wall: float) -> None:
        """Keep a decision, with its candidates where it has them. `wall` is the time of day, in seconds since 1970."""
        record = self._records.get(id)
        if record is not None and record.ended in ("finished", "cancelled"):
            self._forget(id)  # another request of the same name
            record = None
        if record is None:
            record = self._records[id] = _Record(request, now, wall)
        again = any(leg.role == decision.role for leg in record.legs)
        leg = _Leg(decision, now)
        record.legs.append(leg)
        record.ended = None
        self._bytes += len(leg.candidates)
        if len(record.legs) > _LEGS:
            self._bytes -= len(record.legs.pop(0).candidates)
        while len(self._records) > self._limit or (self._bytes > _PACKED_BYTES and len(self._records) > 1):
            self._forget(next(iter(self._records)))
        self._metrics.decided(request.tokens, decision, again)

    def first_token(self, id: str, role: Role, now: float) -> None:
        """The leg's first token is there: of `prefill` the prompt's end, else what the client sees."""
        leg = self._leg(id, role)
        if leg is None or leg.first_s is not None or leg.failed is not None:
            return
        leg.first_s = now - leg.at
        terms = leg.terms
        late = leg.first_s - terms.first_token_s
        leg.regret_s = max(0.0, terms.cost_s + late - leg.runner_up_s)
        self._metrics.measured(role, late, leg.regret_s)

    def failed(self, id: str, role: Role, reason: str, now: float) -> None:
        """The worker of a leg failed it."""
        leg = self._leg(id, role)
        if leg is not None:
            leg.failed = reason

    def aborted(self, id: str, role: Role, reason: str, now: float) -> None:
        """The router gave up a leg by itself: its worker stands still, or has gone."""
        leg = self._leg(id, role)
        if leg is not None:
            leg.aborted = reason
            self._metrics.aborted(role)

    def ended(self, id: str, how: str, now: float) -> None:
        """The request is over: `finished`, `cancelled`, or in other words; what failed may be placed again."""
        record = self._records.get(id)
        if record is not None:
            failed = how == "cancelled" and record.legs[-1].failed is not None
            record.ended = "failed" if failed else how
            record.ended_at = now

    def find(self, request: str) -> dict[str, Any] | None:
        """Return what is kept of a request, for JSON; None where nothing is.

        `request` is the context's id, which is a UUID that the client sent as `x-dynamo-request-id` or one of Dynamo's;
        or the `id` of a completion or chat completion. Times are in seconds; `at` since 1970, `after_s` and `ended_s`
        since the request's first decision. What is not known is None.
        """
        names = [request, *(request[len(prefix) :] for prefix in _PREFIXES if request.startswith(prefix))]
        for name in names:
            record = self._records.get(name)
            if record is not None:
                return {
                    "request": name,
                    "session": record.session,
                    "tokens": record.tokens,
                    "at": record.wall,
                    "ended": record.ended,
                    "ended_s": None if record.ended is None else record.ended_at - record.at,
                    "legs": [_told(leg, record.at) for leg in record.legs],
                }
        return None

    def _leg(self, id: str, role: Role) -> _Leg | None:
        record = self._records.get(id)
        if record is None:
            return None
        return next((leg for leg in reversed(record.legs) if leg.role == role), None)

    def _forget(self, id: str) -> None:
        self._bytes -= self._records.pop(id).size


def _listed(packed: bytes) -> list[dict[str, Any]]:
    return [
        {
            "worker": plain(one.worker),
            "rank": one.rank,
            "refused": one.refused,
            "terms": None if one.terms is None else _figures(one.terms),
        }
        for one in Candidates.unpack(packed)
    ]


def _figures(terms: Terms) -> dict[str, Any]:
    """Return terms for JSON."""
    figures = {field.name: getattr(terms, field.name) for field in fields(terms)}
    return {name: finite(value) if isinstance(value, float) else value for name, value in figures.items()}


def _told(leg: _Leg, since: float) -> dict[str, Any]:
    """Return a leg for JSON."""
    return {
        "role": leg.role,
        "worker": plain(leg.worker),
        "rank": leg.rank,
        "note": leg.note,
        "after_s": leg.at - since,
        "fetch_tokens": leg.fetch_tokens,
        "terms": _figures(leg.terms),
        "runner_up_s": finite(leg.runner_up_s),
        "candidates": _listed(leg.candidates),
        "first_token_s": leg.first_s,
        "regret_s": leg.regret_s,
        "failed": leg.failed,
        "aborted": leg.aborted,
    }


def finite(value: float) -> float | None:
    """Return a number that JSON has, None where it has none."""
    return value if math.isfinite(value) else None


def plain(worker: WorkerId) -> int | str:
    """Return a worker's name as JSON has it."""
    return worker if isinstance(worker, int | str) else str(worker)
