# SPDX-License-Identifier: Apache-2.0
"""What is booked at each rank, and what that comes to in seconds.

A seat's queue is first come, first served: it is busy for the expected seconds of the prompts booked there, less what
has run since the last one was through. An engine lets several prompts share a step; `Placer.prefilled` sets that right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ._types import ExternalTier, Role, Seat, Worker, WorkerId

__all__ = [
    "Booking",
    "Flow",
    "Pool",
    "SeatState",
    "WorkerState",
    "backlog",
    "lockstep_parts",
    "lockstep_span",
    "sum_areas",
]

#: The least share of a prompt's work that is taken to remain, however long it has run.
_LEAST_SHARE = 0.05
#: Late work is expected to last on for this share of its lateness, so a stalled worker never looks idle.
_LATE_SHARE = 0.5


class Flow:
    """How much comes per second, remembered for a window."""

    __slots__ = ("at", "count", "since", "window_s", "work_s")

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self.count = 0.0
        self.work_s = 0.0
        self.at = 0.0
        self.since: float | None = None

    def arrived(self, count: float, work_s: float, now: float) -> None:
        """One more request, or a part of one, that takes `work_s` of a seat."""
        if self.since is None:
            self.since = now
        keep = math.exp((self.at - now) / self.window_s) if now > self.at else 1.0
        self.count = self.count * keep + count
        self.work_s = self.work_s * keep + work_s
        self.at = now

    def rates(self, now: float) -> tuple[float, float]:
        """Requests a second, and seconds of work a second."""
        if self.since is None:
            return 0.0, 0.0
        window = self.window_s
        seen = window * (1.0 - math.exp(-max((now - self.since) / window, 0.1)))
        scale = math.exp((self.at - now) / window) / seen if now > self.at else 1.0 / seen
        return self.count * scale, self.work_s * scale


@dataclass(slots=True, eq=False)
class Booking:
    """One request at one seat."""

    request: str
    role: Role
    seat: SeatState
    tokens: int
    session: str | None
    booked_at: float
    #: Expected length of the answer, tokens.
    output: float
    #: Prompt tokens to compute, and those that are cached or fetched before them.
    new: int = 0
    cached: int = 0
    #: Expected seconds of the seat that reading the prompt takes; for `decode`, pulling its KV.
    service_s: float = 0.0
    #: The tier and the tokens that it fetches, if from one tier and by an idle link.
    fetched: tuple[ExternalTier, int] | None = None
    #: When its fetched blocks are there, and its first token, both as expected when it was booked.
    ready_at: float = 0.0
    first_token_s: float = 0.0
    #: The seat was idle when it was booked.
    alone: bool = False
    #: Some of the prompt's blocks: what it will leave in the cache.
    marks: Sequence[int] = ()
    #: KV that it holds, tokens.
    resident: int = 0
    #: For `decode`: the worker that holds the prompt's KV until it has been pulled; None from the first token on.
    source: WorkerState | None = None
    #: Tokens generated at the last report, when that was, and the seat's areas then.
    generated: int = 0
    reported_at: float = -1.0
    area_sequences: float = 0.0
    area_tokens: float = 0.0


@dataclass(slots=True, eq=False)
class SeatState:
    """One rank with what is booked at it."""

    name: Seat
    worker: WorkerState
    #: What comes back to it for the sake of its cache.
    returning: Flow
    #: Where it stands in the index's lists.
    place: int = 0
    #: Prompts to read, first come first; and their seconds and tokens.
    queue: dict[str, Booking] = field(default_factory=dict)
    queue_s: float = 0.0
    queue_tokens: int = 0
    #: Lockstep: those of these tokens that came after the group's present step began.
    fresh_tokens: int = 0
    #: Since when the first of them is being read.
    head_at: float = 0.0
    #: Since when its silence counts while one waits: `head_at`, less what those that were given up had waited.
    quiet_at: float = 0.0
    #: Until when the link that fetches blocks is busy.
    link_until: float = 0.0
    #: Sequences that generate, and their KV.
    running: dict[str, Booking] = field(default_factory=dict)
    running_tokens: int = 0
    #: KV of everything booked.
    resident: int = 0
    #: Integrals of running sequences and their KV over time, for the mean batch of an interval.
    area_sequences: float = 0.0
    area_tokens: float = 0.0
    area_at: float = 0.0
    #: The measurement of prefill under way: its start (None: none), and the prompts it holds.
    sample_at: float | None = None
    sample: list[Booking] = field(default_factory=list)
    #: When a prompt was last in the queue, when decode was last measured, when the seat last gave a sign of life.
    prompt_at: float = -math.inf
    measured_at: float = -math.inf
    alive_at: float = 0.0
    #: Events of its device's cache came, so that the index knows better than the session table what it holds.
    events: bool = False


@dataclass(slots=True, eq=False)
class WorkerState:
    """A worker with its seats."""

    spec: Worker
    seats: list[SeatState] = field(default_factory=list)
    #: Tokens of prompts that were read here and that no decoder has pulled yet.
    held: int = 0
    #: Lockstep: when the group was last seen to begin a step.
    step_at: float = 0.0
    #: Lockstep, for the question `asked`: what is left of the present step; after it, the ranks that read, the longest
    #: steps first, and by rank what `lockstep_parts` says.
    asked: int = -1
    present_s: float = 0.0
    reading: list[Part] = field(default_factory=list)
    parts: dict[int, tuple[float, float, float, float]] = field(default_factory=dict)


#: Seconds a step, steps, rank.
Part = tuple[float, float, int]


class Pool:
    """The workers of one role and the load that comes to them."""

    def __init__(self, window_s: float) -> None:
        self.workers: dict[WorkerId, WorkerState] = {}
        self.seats: list[SeatState] = []
        #: What may come to any seat: the parts of prompts that no cache holds.
        self.fresh = Flow(window_s)
        #: Running mean of the expected time to first token.
        self.first_token_s: float | None = None
        #: The least KV that a rank of it holds.
        self.capacity_tokens = 0
        #: Running mean of the time between two reports of a request's progress; None: there are none, so that silence
        #: means nothing.
        self.pace_s: float | None = None

    def changed(self) -> None:
        """A worker came or left."""
        self.seats = [seat for worker in self.workers.values() for seat in worker.seats]
        self.capacity_tokens = min((worker.spec.capacity_tokens for worker in self.workers.values()), default=0)

    def arrived(self, booking: Booking, now: float) -> None:
        """One more request was placed. The share of its prompt that need not be read is work that comes back."""
        if self.first_token_s is None:
            self.first_token_s = booking.first_token_s
        self.first_token_s += 0.05 * (booking.first_token_s - self.first_token_s)
        cached, work_s = booking.cached / booking.tokens, booking.service_s
        booking.seat.returning.arrived(cached, cached * work_s, now)
        self.fresh.arrived(1.0 - cached, (1.0 - cached) * work_s, now)


def backlog(seat: SeatState, now: float) -> float:
    """Seconds of work that a seat with a queue has left."""
    head = next(iter(seat.queue.values())).service_s
    ran = max(now - seat.head_at, 0.0)
    return max(head - ran, _LEAST_SHARE * head, _LATE_SHARE * (ran - head)) + max(seat.queue_s - head, 0.0)


def lockstep_parts(worker: WorkerState, now: float) -> tuple[float, dict[int, tuple[float, float, float, float]]]:
    """What is left of a lockstep group's present step; by rank that reads, what comes after it.

    That is the seconds of a step by itself, the steps, the steps' worth of tokens, and how late its first prompt is.
    """
    chunk = worker.spec.chunk_tokens
    reading = [(seat, next(iter(seat.queue.values()))) for seat in worker.seats if seat.queue_tokens]
    step_s = max((seat.queue_s / max(seat.queue_tokens / chunk, 1.0) for seat, _ in reading), default=0.0)
    # While a prompt that ends with the present step has not ended, that step goes on, however long it was to last.
    least = min((-(-head.new // chunk) for _, head in reading if head.booked_at <= worker.step_at), default=1)
    passed = min((now - worker.step_at) / step_s, least - 1) if step_s > 0.0 else 0.0
    present = 0.0
    parts = {}
    for seat, head in reading:
        total = seat.queue_tokens
        ran = max(now - seat.head_at, 0.0) / step_s
        done = min(int(ran) * chunk, int((1.0 - _LEAST_SHARE) * head.new))
        after = max(total - done - chunk, 0 if passed >= 1.0 else min(seat.fresh_tokens, total))
        present = max(present, seat.queue_s * max(min(total - done - after, chunk), 0) / total)
        steps = max(after / chunk, 1.0) if after else 0.0
        step = seat.queue_s * after / total / steps if steps else 0.0
        late = max(ran - max(head.new / chunk, 1.0), 0.0) * step_s
        parts[seat.name.rank] = step, steps, after / chunk, _LATE_SHARE * late
    return 0.5 * present, parts


def lockstep_span(parts: list[Part], steps: float) -> float:
    """Seconds of a group's first `steps`, each as long as the longest of the ranks that have so many."""
    total = reached = 0.0
    for step, has, _ in parts:
        if has > reached:
            if has >= steps:
                return total + (steps - reached) * step
            total += (has - reached) * step
            reached = has
    return total


def sum_areas(seat: SeatState, now: float) -> None:
    """Carry the integrals of the batch and its KV on to now."""
    elapsed = now - seat.area_at
    if elapsed > 0.0:
        seat.area_sequences += elapsed * len(seat.running)
        seat.area_tokens += elapsed * seat.running_tokens
        seat.area_at = now
