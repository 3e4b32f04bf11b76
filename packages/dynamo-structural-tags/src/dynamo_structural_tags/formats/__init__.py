# SPDX-License-Identifier: Apache-2.0
"""The formats, by name. A module holds one descriptor and says what the format looks like."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .._format import Format
from . import deepseek_v3_2, deepseek_v4, glm45, glm47, hermes, kimi_k2, qwen3_coder

__all__ = ["FORMATS", "get_format"]

#: Every format, by its name.
FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        module.FORMAT.name: module.FORMAT
        for module in (glm47, glm45, qwen3_coder, hermes, kimi_k2, deepseek_v3_2, deepseek_v4)
    }
)


def get_format(name: str) -> Format:
    """Return the format of that name.

    Raises:
        ValueError: there is none; the message names those that are.
    """
    try:
        return FORMATS[name]
    except KeyError:
        raise ValueError(f"no tool-call format {name!r}; known: {', '.join(FORMATS)}") from None
