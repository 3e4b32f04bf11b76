# SPDX-License-Identifier: Apache-2.0
"""Which workers may be asked, and how likely each is to fail: by the outcomes of the requests they were given."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal, TypeVar

import msgspec

from ._types import Role, Worker, WorkerId

__all__ = ["Health", "HealthSettings", "HealthState"]

#: `in`: asked like any other; `out`: not asked; `probing`: half-open, asked for one request at a time.
HealthState = Literal["in", "out", "probing"]
#: Less risk than this is none: any worker has it, and a worker that was sick for a while should be used again.
_NO_RISK = 0.01
_Id = TypeVar("_Id", bound=Hashable)


class HealthSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a worker is put out, and for how long. Times in seconds.

    Raises:
        ValueError: a value is out of its range; the message names both.
    """

    #: So many failures with no success between them put a worker out.
    failures_in_row: int = 3
    #: So does this share of failures among recent outcomes, ...
    failure_share: float = 0.5
    #: ... if there are at least so many. Outcomes count e^(-age / window_s), so this is a decayed count.
    min_samples: float = 10.0
    #: The time constant with which outcomes are forgotten, for the share and for `risk`.
    window_s: float = 30.0
    #: A request stalls when it says nothing for this many times as long as expected, ...
    stall_factor: float = 4.0
    #: ... but not before this.
    stall_min_s: float = 10.0
    #: How long a worker is out at first; doubled at each repeat, ...
    ejection_s: float = 5.0
    #: ... up to this.
    max_ejection_s: float = 120.0
    #: Repeats are forgotten after this long without being out.
    forget_s: float = 600.0
    #: A half-open worker's one request that says nothing for this long counts as failed.
    probe_s: float = 30.0
    #: At most this share of the workers of a role is out at a time, rounded down, but one may be, and never the last. 0
    #: puts none out.
    max_ejected_share: float = 1 / 3
    #: A new worker starts as if it had failed so many requests.
    prior_failures: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.failures_in_row, int) or self.failures_in_row < 1:
            raise ValueError(f"failures_in_row must be a whole number of at least 1, not {self.failures_in_row!r}")
        for name in ("min_samples", "window_s", "ejection_s", "probe_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number above 0, not {getattr(self, name)!r}")
        for name in ("stall_min_s", "forget_s", "prior_failures"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, not {getattr(self, name)!r}")
        if not 1 <= self.stall_factor < math.inf:
            raise ValueError(f"stall_factor must be a number of at least 1, not {self.stall_factor!r}")
        if not 0 < self.failure_share <= 1:
            raise ValueError(f"failure_share must be above 0 and at most 1, not {self.failure_share!r}")
        if not 0 <= self.max_ejected_share <= 1:
            raise ValueError(f"max_ejected_share must be between 0 and 1, not {self.max_ejected_share!r}")
        if not self.ejection_s <= self.max_ejection_s < math.inf:
            raise ValueError(
                f"max_ejection_s must be at least ejection_s ({self.ejection_s!r}), not {self.max_ejection_s!r}"
            )


class _Record:
    """What is known of one worker."""

    __slots__ = (
        "ejected_at",
        "ejections",
        "failures",
        "order",
        "outcomes",
        "outcomes_at",
        "probe_at",
        "probe_until",
        "reason",
        "returned_at",
        "role",
        "row",
        "row_at",
        "until",
        "verdict",
        "verdict_until",
    )

    def __init__(self, role: Role, order: int, prior_failures: float, now: float) -> None:
        self.role = role
        #: When it was added, for a lasting order among equals.
        self.order = order
        #: Failures since the last success, and when the last of them was.
        self.row = 0
        self.row_at = -math.inf
        #: Failures and all outcomes, decayed to `outcomes_at`.
        self.failures = prior_failures
        self.outcomes = 0.0
        self.outcomes_at = now
        #: How often in succession it was put out, when last, until when (None: it is not out), since when it is back.
        self.ejections = 0
        self.ejected_at = -math.inf
        self.until: float | None = None
        self.returned_at = -math.inf
        #: When the half-open request was placed, and when it has failed; None where there is none.
        self.probe_at: float | None = None
        self.probe_until = math.inf
        #: Until when somebody else wants it out; None where nobody does.
        self.verdict_until: float | None = None
        self.verdict = ""
        #: Why it was put out.
        self.reason = ""


class Health:
    """The state of every worker, from the outcomes of its requests.

    A worker is put out by failures in a row, by their share among recent outcomes, or by a stall. After a while it is
    half-open: one request at a time is let through as a probe. Its success brings the worker back, its failure puts it
    out for twice as long. At most a share of the workers of a role is out, half-open ones included: the worst are (most
    repeats, then most risk), the others go on as if nothing was.

    Outcomes of workers that are not known are ignored: they may have left before their requests ended. `now` is in
    seconds and does not go back.
    """

    def __init__(self, settings: HealthSettings | None = None) -> None:
        self.settings = HealthSettings() if settings is None else settings
        self._records: dict[WorkerId, _Record] = {}
        self._living: dict[Role, int] = {}
        self._added = 0
        #: Records that should be out or half-open by themselves or by a verdict, by role.
        self._wanted: dict[Role, list[_Record]] = {}

    def add(self, worker: Worker, now: float = -math.inf) -> None:
        """Take up a worker: clean, but with the prior's risk, which fades from `now` on, or from its first outcome.

        Raises:
            ValueError: there is one of that name.
        """
        if worker.id in self._records:
            raise ValueError(f"worker {worker.id!r} is known already")
        self._added += 1
        self._records[worker.id] = _Record(worker.role, self._added, self.settings.prior_failures, now)
        self._living[worker.role] = self._living.get(worker.role, 0) + 1

    def drop(self, worker: WorkerId) -> bool:
        """Forget a worker; return whether it was known."""
        record = self._records.pop(worker, None)
        if record is None:
            return False
        self._living[record.role] -= 1
        self._unwant(record)
        return True

    def succeeded(self, worker: WorkerId, now: float, placed: float | None = None) -> None:
        """Count a success: a request that ended well, or gave its first sign of life.

        Parameters:
            worker: where.
            now: the time.
            placed: when the request was placed there. What was placed before the worker was last put out says nothing
                of how it is now and is ignored. None stands for now.
        """
        record = self._heard(worker, now, placed)
        if record is None:
            return
        self._count(record, now, 0.0)
        record.row = 0
        if record.until is not None and now >= record.until:
            record.until = None
            record.probe_at = None
            record.returned_at = now
            if record.verdict_until is None:
                self._unwant(record)

    def failed(self, worker: WorkerId, now: float, reason: str = "", placed: float | None = None) -> None:
        """Count a failure, which may put the worker out; `placed` as for `succeeded`.

        What the client did (an invalid request, a cancellation) is no failure.
        """
        record = self._heard(worker, now, placed)
        if record is None:
            return
        self._count(record, now, 1.0)
        record.row += 1
        record.row_at = now
        if record.until is not None:
            if now >= record.until:
                self._eject(record, now, reason or "its probe failed")
            return
        if record.row >= self.settings.failures_in_row:
            self._eject(record, now, f"{record.row} failures in a row{': ' if reason else ''}{reason}")
        elif (
            record.outcomes >= self.settings.min_samples
            and record.failures >= self.settings.failure_share * record.outcomes
        ):
            share = min(1.0, record.failures / record.outcomes)
            self._eject(record, now, f"{share:.0%} failures{': ' if reason else ''}{reason}")

    def stalled(self, worker: WorkerId, now: float, placed: float | None = None) -> None:
        """Put a worker out of which a request has had no sign of life for `patience`; may be said again and again.

        `placed` as for `succeeded`.
        """
        record = self._heard(worker, now, placed)
        if record is None:
            return
        record.row = max(record.row, self.settings.failures_in_row)
        record.row_at = now
        if record.until is None or now >= record.until:
            self._count(record, now, 1.0)
            self._eject(record, now, "stalled")

    def cancelled(self, worker: WorkerId, now: float, placed: float | None = None) -> None:
        """Note that a request ended with nothing said about the worker: if it was the probe, another may be sent.

        `placed` is when that request was placed: the probe is known by it. None stands for the probe.
        """
        record = self._records.get(worker)
        if record is not None:
            self._settle(record, now)
            if placed is None or placed == record.probe_at:
                record.probe_at = None

    def patience(self, expected_s: float) -> float:
        """Return how long a request that is expected to say something within `expected_s` may be silent (seconds)."""
        return max(self.settings.stall_min_s, self.settings.stall_factor * expected_s)

    def verdict(self, worker: WorkerId, out: bool, now: float, ttl_s: float, reason: str = "") -> None:
        """Take in what somebody else says of a worker: it shall be out for `ttl_s`, or not any more.

        This only adds: it brings back no worker that is out by its own outcomes. The bound on how many are out holds.

        Raises:
            ValueError: `ttl_s` is not above 0, or not finite, where `out` is true.
        """
        if out and not 0 < ttl_s < math.inf:
            raise ValueError(f"ttl_s must be a number above 0, not {ttl_s!r}")
        record = self._records.get(worker)
        if record is None:
            return
        record.verdict_until = now + ttl_s if out else None
        record.verdict = reason
        if out:
            self._want(record)
        elif record.until is None:
            self._unwant(record)

    def state(self, worker: WorkerId, now: float) -> HealthState:
        """Return a worker's state.

        Raises:
            KeyError: it is not known.
        """
        record = self._record(worker)
        if record.role not in self._wanted:
            return "in"
        if record not in self._held(record.role, now):
            return "in"
        if record.verdict_until is not None or (record.until is not None and now < record.until):
            return "out"
        return "probing"

    def why(self, worker: WorkerId, now: float) -> str:
        """Return why a worker is not `in`, in words, or "".

        Raises:
            KeyError: it is not known.
        """
        state = self.state(worker, now)
        record = self._records[worker]
        if state == "in":
            return ""
        if state == "probing":
            return f"half-open{', its probe runs' if record.probe_at is not None else ''} ({record.reason})"
        if record.until is not None and now < record.until:
            return f"out for {record.until - now:.1f} s more ({record.reason})"
        assert record.verdict_until is not None
        said = f": {record.verdict}" if record.verdict else ""
        return f"out for {record.verdict_until - now:.1f} s more (verdict from outside{said})"

    def probe(self, worker: WorkerId, now: float, expected_s: float = 0.0) -> bool:
        """Claim a half-open worker's probe for a request that is placed now; false where there is none to claim.

        The request is expected to give its first sign of life within `expected_s`, and may take several times as long.

        Raises:
            KeyError: the worker is not known.
        """
        if self.state(worker, now) != "probing":
            return False
        record = self._records[worker]
        if record.probe_at is not None:
            return False
        record.probe_at = now
        record.probe_until = now + max(self.settings.probe_s, self.settings.stall_factor * expected_s)
        return True

    def admitted(self, workers: Sequence[_Id], now: float) -> list[_Id]:
        """Return those of `workers` that may be asked, in the same order: `in`, or half-open with no probe under way.

        Where that would be none it is all of them: something that may fail is better than nothing.

        Raises:
            KeyError: one of them is not known.
        """
        if not self._wanted:
            return list(workers)
        held = {role: self._held(role, now) for role in tuple(self._wanted)}
        records = self._records
        found = []
        for worker in workers:
            record = records.get(worker) or self._record(worker)
            if record in held.get(record.role, ()) and (
                record.verdict_until is not None
                or record.probe_at is not None
                or (record.until is not None and now < record.until)
            ):
                continue
            found.append(worker)
        return found or list(workers)

    def risk(self, worker: WorkerId, now: float) -> float:
        """Return the probability that a worker fails the next request, 0 to 1; below 0.01 it is 0.

        The larger one of two estimates: r / (r + 1) * e^(-t / window_s), of r failures since the last success, the last
        one t ago; and F / (N + 1), of F failures among N outcomes, each of which counts e^(-age / window_s). F starts
        at `prior_failures`. So it falls with time and with successes, and rises with failures at once.

        Raises:
            KeyError: the worker is not known.
        """
        return self._risk(self._records.get(worker) or self._record(worker), now)

    def limit(self, role: Role) -> int:
        """Return how many workers of a role may be out or half-open at a time, as many as there are of it now."""
        living, share = self._living.get(role, 0), self.settings.max_ejected_share
        return min(living - 1, max(1, int(share * living + 1e-9))) if share and living else 0

    def _risk(self, record: _Record, now: float) -> float:
        decay = self._decay(record.outcomes_at, now)
        risk = min(1.0, record.failures * decay / (record.outcomes * decay + 1.0))
        if record.row:
            risk = max(risk, record.row / (record.row + 1.0) * self._decay(record.row_at, now))
        return risk if risk >= _NO_RISK else 0.0

    def _record(self, worker: WorkerId) -> _Record:
        try:
            return self._records[worker]
        except KeyError:
            raise KeyError(f"worker {worker!r} is not known") from None

    def _decay(self, since: float, now: float) -> float:
        return math.exp(min(since - now, 0.0) / self.settings.window_s) if since > -math.inf else 1.0

    def _heard(self, worker: WorkerId, now: float, placed: float | None) -> _Record | None:
        """Return the record that an outcome counts for, or None where it counts for none."""
        record = self._records.get(worker)
        if record is None:
            return None
        self._settle(record, now)
        return None if placed is not None and placed < record.ejected_at else record

    def _settle(self, record: _Record, now: float) -> None:
        """Let a probe without an answer and a verdict past its time be over."""
        if record.probe_at is not None and now >= record.probe_until:
            # As of when it was due, so that the state does not depend on when somebody looks.
            self._eject(record, record.probe_until, "its probe was not answered")
        if record.verdict_until is not None and now >= record.verdict_until:
            record.verdict_until = None
            if record.until is None:
                self._unwant(record)

    def _count(self, record: _Record, now: float, failures: float) -> None:
        decay = self._decay(record.outcomes_at, now)
        record.failures = record.failures * decay + failures
        record.outcomes = record.outcomes * decay + 1.0
        record.outcomes_at = now

    def _eject(self, record: _Record, now: float, reason: str) -> None:
        if record.until is None and now - record.returned_at >= self.settings.forget_s:
            record.ejections = 0
        for_s = min(self.settings.max_ejection_s, math.ldexp(self.settings.ejection_s, min(record.ejections, 64)))
        record.ejections += 1
        record.ejected_at = now
        record.until = now + for_s
        record.probe_at = None
        record.reason = reason
        self._want(record)

    def _want(self, record: _Record) -> None:
        wanted = self._wanted.setdefault(record.role, [])
        if record not in wanted:
            wanted.append(record)

    def _unwant(self, record: _Record) -> None:
        wanted = self._wanted.get(record.role, [])
        if record in wanted:
            wanted.remove(record)
            if not wanted:
                del self._wanted[record.role]

    def _held(self, role: Role, now: float) -> list[_Record]:
        """Return those of a role that are out or half-open: of those that should be, the worst, as many as may be."""
        for record in tuple(self._wanted.get(role, ())):
            self._settle(record, now)
        wanted = self._wanted.get(role, [])
        most = self.limit(role)
        if len(wanted) <= most:
            return wanted
        return sorted(wanted, key=lambda record: self._badness(record, now), reverse=True)[:most]

    def _badness(self, record: _Record, now: float) -> tuple[bool, int, float, int]:
        """Order those that should be out: own outcomes before a verdict, then repeats, then the risk, then age."""
        return record.until is not None, record.ejections, self._risk(record, now), -record.order
