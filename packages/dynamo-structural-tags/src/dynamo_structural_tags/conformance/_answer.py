# SPDX-License-Identifier: Apache-2.0
"""What a caller has of an answer, whichever of the three APIs it came by."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["BUSY", "Answer", "Call", "Problem", "Usage"]

#: Status codes by which a server says "not now": asked again, and no judgement on it.
BUSY = frozenset({429, 502, 503, 504})


@dataclass(frozen=True)
class Call:
    """A tool call: the server's id, the tool's name, and the arguments as JSON text.

    The text is the server's own, byte for byte, except in a plain answer of `/v1/messages`, which carries an object:
    there it is written anew.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Usage:
    """Token counts; `total` is None where the API has none."""

    prompt: int
    completion: int
    total: int | None


@dataclass(frozen=True)
class Problem:
    """An answer, mostly a stream, that breaks its API's protocol.

    Kinds: `not_json` (an event or a body that is no JSON), `shape` (a field of the wrong type, or missing), `no_id` (a
    call without an id), `id_changed`, `name_changed`, `index` (a fragment for a call that was not begun, or a number
    left out), `no_end` (no `[DONE]`, no `response.completed`, no `message_stop`), `after_end` (content after the finish
    reason, or anything after the end), `order` (events in an order that the API does not have), `finish_repeated`,
    `status` (an error body under status 200, or an answer under another), `content_type`.
    """

    kind: str
    message: str


@dataclass
class Answer:
    """One answer, plain or put together from a stream.

    `finish` is the reason in the words of chat completions (`stop`, `tool_calls`, `length`, `content_filter`), or the
    server's own word where it has no counterpart; None where none came. `error` is the text of an error, with
    everything that stands beside its message (`param`, `type`, ...), or None. `broken` says why the answer never
    arrived whole (the connection was cut, no answer within the time), or is None. `raw` is what came over the wire, cut
    where it is long.
    """

    status: int
    calls: list[Call] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    finish: str | None = None
    usage: Usage | None = None
    error: str | None = None
    broken: str | None = None
    problems: list[Problem] = field(default_factory=list)
    events: int = 0
    raw: str = ""
    seconds: float = 0.0
