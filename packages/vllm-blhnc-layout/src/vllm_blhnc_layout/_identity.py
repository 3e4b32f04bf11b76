# SPDX-License-Identifier: Apache-2.0
"""What two ends of a transfer must agree on, in vLLM's handshake, and what differs where they do not.

vLLM compares one text, its compatibility hash, before it looks at anything else a peer sends. That text becomes the
stock hash, a blank, and the facts below as JSON with sorted keys: equal facts, equal text. A stock peer finds it other
than its own and refuses, as does an end with this connector that meets a stock peer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class IncompatiblePeer(RuntimeError):
    """A peer's cache is not laid out as ours, or holds something else; the message names what differs."""


class Agreement(str):
    """The text that is compared. A comparison with another text raises, and names what differs."""

    __slots__ = ()

    @property
    def facts(self) -> str:
        """What follows vLLM's own hash."""
        return self.partition(" ")[2]

    @classmethod
    def of(cls, stock: str, facts: Mapping[str, Any]) -> Agreement:
        """Return the text for vLLM's own hash and our facts, which are JSON."""
        return cls(f"{stock} {json.dumps(facts, sort_keys=True, separators=(',', ':'))}")

    # vLLM writes `theirs != ours`; Python asks the right side first where its type is a subclass of the left's.
    def __ne__(self, other: object) -> bool:
        if str.__eq__(self, other) is True:
            return False
        raise IncompatiblePeer(f"this peer's cache cannot be read: {'; '.join(differences(self, str(other)))}")

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True

    __hash__ = str.__hash__


def differences(ours: str, theirs: str) -> list[str]:
    """Say what differs between two texts, a line each; none if they are equal."""
    (our_stock, our_facts), (their_stock, their_facts) = _split(ours), _split(theirs)
    if our_facts is None or their_facts is None:
        who = "this end" if our_facts is None else "the peer"
        return [] if ours == theirs else [f"{who} moves pages of layers, the other moves rows of blocks"]
    found = []
    for key in sorted({*our_facts, *their_facts}):
        mine, other = our_facts.get(key), their_facts.get(key)
        if isinstance(mine, list) and isinstance(other, list) and mine != other:
            at = next(
                (i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other))
            )
            one, another = (repr(side[at]) if at < len(side) else "nothing" for side in (mine, other))
            found.append(f"{key}, from item {at}: ours {one}, theirs {another}")
        elif mine != other:
            found.append(f"{key}: ours {mine!r}, theirs {other!r}")
    if our_stock != their_stock:
        found.append("vLLM's own hash (its version, the model's name or path, dtypes, attention backend)")
    return found


def _split(text: str) -> tuple[str, dict[str, Any] | None]:
    stock, _, facts = text.partition(" ")
    try:
        return stock, json.loads(facts) if facts else None
    except ValueError:
        return text, None
