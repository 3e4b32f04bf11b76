# SPDX-License-Identifier: Apache-2.0
"""What a parser reports, in the order of the text. Concatenated, the texts of one kind are independent of chunking."""

from __future__ import annotations

from dataclasses import dataclass

from ._errors import CallError

__all__ = ["Arguments", "CallBegin", "CallEnd", "CallFailed", "Content", "Event", "Reasoning"]


@dataclass(frozen=True)
class Reasoning:
    """Text of the reasoning that precedes the answer, without its markers."""

    text: str


@dataclass(frozen=True)
class Content:
    """Text of the answer outside calls, verbatim."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call of a declared tool begins. Never reported for an undeclared name (that is a `CallFailed`)."""

    index: int
    name: str
    #: The identifier that the format itself carries (Kimi: `functions.NAME:N`), or None.
    call_id: str | None = None


@dataclass(frozen=True)
class Arguments:
    """The next piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """A call is complete and was checked: `arguments` is the whole JSON text and valid against the tool's schema."""

    index: int
    name: str
    arguments: str
    call_id: str | None = None


@dataclass(frozen=True)
class CallFailed:
    """A call that must not be run, with the text the model wrote for it, as far as it was read. Nothing is repaired.

    Pieces of its arguments may have been reported before, never a `CallEnd`. Where the call's end is known (an
    undeclared tool, invalid arguments) parsing goes on after it; otherwise (malformed, truncated) the rest of the
    answer belongs to it.
    """

    index: int
    error: CallError
    raw: str


Event = Reasoning | Content | CallBegin | Arguments | CallEnd | CallFailed
