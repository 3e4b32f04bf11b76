# SPDX-License-Identifier: Apache-2.0
"""Text from a server as a report may carry it: nothing invisible, nothing that a terminal obeys or XML forbids."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["literal", "printable", "shortened"]


def printable(text: str, keep: str = "") -> str:
    r"""The text with every unprintable character but those in `keep` as JSON escapes it: ESC becomes `\u001b`.

    Unprintable is what `str.isprintable` says: controls, blanks other than the space, marks of direction, lone
    surrogates, what Unicode leaves unassigned. A terminal would obey some of them, XML and UTF-8 cannot carry others.
    """
    if text.isprintable():
        return text
    hidden = {char for char in set(text) if not char.isprintable() and char not in keep}
    return text.translate({ord(char): json.dumps(char)[1:-1] for char in hidden})


def shortened(text: str, most: int) -> str:
    """The text, or its beginning and end with what was left out counted between them."""
    if len(text) <= most:
        return text
    head = most * 2 // 3
    return f"{text[:head]} … {len(text) - most} more characters … {text[head - most :]}"


def literal(value: Any, most: int = 400) -> str:
    """A value as JSON on one printable line, shortened to about `most` characters."""
    return shortened(printable(json.dumps(value, ensure_ascii=False)), most)
