# SPDX-License-Identifier: Apache-2.0
"""Where each session's KV is, and how much it is expected to generate."""

from __future__ import annotations

import math
from collections import OrderedDict

from ._types import Seat, WorkerId

__all__ = ["Sessions"]

#: A session's mean output follows its last answers: no answer weighs less than this.
_SESSION_WEIGHT = 1 / 8
#: The same for the mean of all.
_FLEET_WEIGHT = 1 / 512


class _Session:
    """What is known of one session."""

    __slots__ = ("answers", "mean_output", "seat", "tokens", "used_at")

    def __init__(self) -> None:
        self.seat: Seat | None = None
        #: Tokens of its KV there.
        self.tokens = 0
        self.used_at = -math.inf
        #: Answers seen, and their mean length.
        self.answers = 0
        self.mean_output = 0.0


class Sessions:
    """Session to decoder, for sessions that were used within `ttl_s`; the least recently used go beyond `limit`.

    Parameters:
        ttl_s: a session that is not bound anew for so long is forgotten (seconds).
        limit: the most sessions that are kept.
        default_output: tokens that an answer is expected to have before any was seen.

    Raises:
        ValueError: a parameter is out of its range; the message names it and its value.
    """

    def __init__(self, ttl_s: float = 900.0, limit: int = 100_000, default_output: float = 256.0) -> None:
        if not ttl_s > 0:
            raise ValueError(f"ttl_s must be above 0, not {ttl_s!r}")
        if limit < 1:
            raise ValueError(f"limit must be at least 1, not {limit!r}")
        if not 1 <= default_output < math.inf:
            raise ValueError(f"default_output must be a number of at least 1, not {default_output!r}")
        self.ttl_s = ttl_s
        self.limit = limit
        self._fleet_mean = default_output
        self._fleet_answers = 0
        #: The least recently used first.
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        #: Whether they are in that order, and within the limit.
        self._arranged = True

    def __len__(self) -> int:
        self._arrange()
        return len(self._sessions)

    def bound(self, session: str | None, now: float) -> Seat | None:
        """Return the seat that holds a session's KV, or None. Asking does not count as use."""
        known = self._known(session, now)
        return None if known is None else known.seat

    def resident(self, session: str | None, now: float) -> int:
        """Return the tokens of KV that the session's seat holds for it; 0 where it is not bound."""
        known = self._known(session, now)
        return 0 if known is None else known.tokens

    def bind(self, session: str, seat: Seat, tokens: int, now: float, used_at: float | None = None) -> None:
        """Bind a session to a seat, and to no other one, with so many tokens of its KV there; this counts as use.

        `used_at`: when it was used, where that is heard of late. A binding that is as young or younger stays then.
        """
        if used_at is not None:
            self._restore(session, seat, tokens, now, min(used_at, now))
            return
        self.expire(now)
        known = self._sessions.get(session)
        if known is None:
            known = self._sessions[session] = _Session()
            if len(self._sessions) > self.limit:
                self._sessions.popitem(last=False)
        else:
            self._sessions.move_to_end(session)
        known.seat = seat
        known.tokens = tokens
        known.used_at = now

    def bindings(self, limit: int, now: float) -> list[tuple[str, Seat, int, float]]:
        """Return the sessions that are bound, at most `limit`: each with its seat, its tokens of KV there and its age.

        The age is the seconds since its last use; the most recently used come first.
        """
        self._arrange()
        found: list[tuple[str, Seat, int, float]] = []
        for session, known in reversed(self._sessions.items()):
            if len(found) >= limit or now - known.used_at >= self.ttl_s:
                break
            if known.seat is not None:
                found.append((session, known.seat, known.tokens, max(now - known.used_at, 0.0)))
        return found

    def drop_worker(self, worker: WorkerId) -> int:
        """Unbind the sessions of a worker that is gone, and return how many; how much they generate is remembered."""
        dropped = 0
        for known in self._sessions.values():
            if known.seat is not None and known.seat.worker == worker:
                known.seat = None
                known.tokens = 0
                dropped += 1
        return dropped

    def expire(self, now: float) -> int:
        """Forget the sessions that were not used for `ttl_s`, and return how many. Every `bind` does so as well."""
        self._arrange()
        expired = 0
        while self._sessions:
            session, known = next(iter(self._sessions.items()))
            if now - known.used_at < self.ttl_s:
                break
            del self._sessions[session]
            expired += 1
        return expired

    def expected_output(self, session: str | None) -> float:
        """Return the tokens that the next answer is expected to have: the session's own mean, else that of all."""
        known = self._sessions.get(session) if session is not None else None
        return known.mean_output if known is not None and known.answers else self._fleet_mean

    def saw_output(self, session: str | None, tokens: int) -> None:
        """Learn from an answer of so many tokens; of a session that is not known it counts for all only."""
        if tokens < 1:
            return
        self._fleet_answers += 1
        self._fleet_mean += (tokens - self._fleet_mean) * max(1 / self._fleet_answers, _FLEET_WEIGHT)
        known = self._sessions.get(session) if session is not None else None
        if known is not None:
            known.answers += 1
            known.mean_output += (tokens - known.mean_output) * max(1 / known.answers, _SESSION_WEIGHT)

    def _restore(self, session: str, seat: Seat, tokens: int, now: float, used_at: float) -> None:
        """Bind a session as of an earlier time, unless what is known of it is younger."""
        known = self._sessions.get(session)
        if now - used_at >= self.ttl_s or (known is not None and known.used_at >= used_at):
            return
        if known is None:
            known = self._sessions[session] = _Session()
        self._sessions.move_to_end(session)
        known.seat, known.tokens, known.used_at = seat, tokens, used_at
        # Many are restored at once: they are put in order when somebody needs it.
        self._arranged = False

    def _arrange(self) -> None:
        """Put those that were restored where they belong, and forget those beyond the limit."""
        if not self._arranged:
            self._arranged = True
            self._sessions = OrderedDict(
                sorted(self._sessions.items(), key=lambda item: item[1].used_at)[-self.limit :]
            )

    def _known(self, session: str | None, now: float) -> _Session | None:
        known = self._sessions.get(session) if session is not None else None
        return known if known is not None and now - known.used_at < self.ttl_s else None
