# SPDX-License-Identifier: Apache-2.0
"""The candidates of a decision, as plain numbers until somebody looks at them.

Every decision may be asked about, and hardly any is. Objects for each candidate would cost more than what is decided
by them, and those that are kept would be a part of every garbage collection.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, overload

import msgspec

from ._types import EXTERNAL_TIERS, Candidate, ExternalTier, Seat, Terms

__all__ = ["Candidates", "Row", "terms_of"]

#: (cost, wait, fetch, work, first token, token, others, risk, device tokens, host, disk, store tokens fetched, whether
#: others are better read anew)
Row = tuple[float, float, float, float, float, float, float, float, int, int, int, int, bool]

# A worker's name may be any value that can be a key.
_encode = msgspec.msgpack.Encoder(enc_hook=str).encode


class Seated(Protocol):
    """What has a seat's name."""

    @property
    def name(self) -> Seat:
        """The seat."""


class _Named(NamedTuple):
    name: Seat


class Candidates(Sequence[Candidate]):
    """Every rank of a decision, the cheapest first, those that were passed over last.

    Args:
        rows: those that were asked, in any order.
        refused: those that were not, with the reason.
    """

    __slots__ = ("_built", "_packed", "_refused", "_rows")

    def __init__(self, rows: Iterable[tuple[Row, Seated]] = (), refused: Iterable[tuple[Seated, str]] = ()) -> None:
        self._rows = rows
        self._refused = refused
        self._packed: bytes | None = None
        self._built: tuple[Candidate, ...] | None = None

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Candidates:
        """Return the same candidates in this form."""
        if isinstance(candidates, cls):
            return candidates
        named = [(one, _Named(Seat(one.worker, one.rank))) for one in candidates]
        rows = [(_row(one.terms), seat) for one, seat in named if one.terms is not None]
        return cls(rows, [(seat, one.refused or "") for one, seat in named if one.terms is None])

    @classmethod
    def unpack(cls, packed: bytes) -> Candidates:
        """Return what `pack` made bytes of. They are read when it is looked at; then ValueError for any others."""
        found = cls()
        found._packed = packed
        return found

    def pack(self) -> bytes:
        """Return it as bytes, in some 10 us for 64 candidates. Names other than int and str become str."""
        if self._packed is None:
            self._packed = _encode(self._lists())
        return self._packed

    def _lists(self) -> tuple[list[tuple[Seat, Row]], list[tuple[Seat, str]]]:
        return [(seat.name, row) for row, seat in self._rows], [(seat.name, why) for seat, why in self._refused]

    def _all(self) -> tuple[Candidate, ...]:
        if self._built is None:
            rows, refused = self._lists() if self._packed is None else msgspec.msgpack.decode(self._packed)
            rows.sort(key=lambda pair: pair[1][0])
            asked = [Candidate(worker, rank, terms_of(row)) for (worker, rank), row in rows]
            passed = [Candidate(worker, rank, None, why) for (worker, rank), why in refused]
            self._built = (*asked, *passed)
        return self._built

    def __len__(self) -> int:
        return len(self._all())

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Candidate, ...]: ...
    def __getitem__(self, index: int | slice) -> Candidate | tuple[Candidate, ...]:
        return self._all()[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all() == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Candidates{self._all()!r}"


def terms_of(row: Row) -> Terms:
    """A row in the words that others read."""
    cost, wait, fetch, work, first, token, others, risk, device, host, disk, store, _ = row
    fetched: dict[ExternalTier, int] = {}
    if host or disk or store:
        fetched = {tier: count for tier, count in zip(EXTERNAL_TIERS, (host, disk, store), strict=True) if count}
    return Terms(wait, fetch, work, first, token, others, risk, cost, device, fetched)


def _row(terms: Terms) -> Row:
    """The row of such words; whether others are better read anew they do not say."""
    host, disk, store = (terms.fetch_tokens.get(tier, 0) for tier in EXTERNAL_TIERS)
    return (
        *(terms.cost_s, terms.wait_s, terms.fetch_s, terms.work_s, terms.first_token_s, terms.token_s),
        *(terms.others_s, terms.risk_s, terms.device_tokens, host, disk, store, False),
    )
