# SPDX-License-Identifier: Apache-2.0
"""Step times that are easily added up by hand, for tests of the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["Linear", "near"]


def near(value: Any, rel: float = 1e-6) -> Any:
    """`pytest.approx`, which may stand beside other things in a tuple."""
    return pytest.approx(value, rel=rel)


class Linear:
    """1 ms a new token; a decode part of 10 ms, 1 ms a sequence and 1 us a resident token."""

    def step_s(self, prefills: Sequence[tuple[int, int]], decodes: int, resident: int) -> float:
        part = 0.01 + 0.001 * decodes + 1e-6 * resident if decodes else 0.0
        return 0.001 * sum(new for new, _ in prefills) + part

    def decode_run_s(self, decodes: int, resident: int, steps: int) -> float:
        return steps * (0.01 + 0.001 * decodes) + 1e-6 * (steps * resident + decodes * steps * (steps - 1) / 2)
