# SPDX-License-Identifier: Apache-2.0
"""JSON as parser, renderer and history read it alike: no duplicate keys, no NaN."""

from __future__ import annotations

import json
import math
from typing import Any

__all__ = ["DECODER", "FINITE", "shown", "unique"]


def shown(value: object) -> str:
    """Return a value as an error message shows it: at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of an object; ValueError names a key that stands twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {shown(key)} stands twice in one object")
            seen.add(key)
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shown(text)} is too large for a number")
    return value


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


#: Raises ValueError for what is not such JSON. A number beyond a double becomes infinite: the renderer names its place.
DECODER = json.JSONDecoder(object_pairs_hook=unique, parse_constant=_constant)
#: The same, and a number beyond a double is refused.
FINITE = json.JSONDecoder(object_pairs_hook=unique, parse_float=_finite, parse_constant=_constant)
