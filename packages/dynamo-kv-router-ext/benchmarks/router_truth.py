# SPDX-License-Identifier: Apache-2.0
"""How long steps really last in the benchmarks: grids of AISimulate's times, which no policy gets to see.

`truth_*.json` hold the times and say where they come from. Where AISimulate is installed, ``python router_truth.py``
writes them anew.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["GridTiming"]

#: The engines by name, as AISimulate is asked for them.
_ENGINES: dict[str, dict[str, Any]] = {
    "qwen": {"model": "Qwen/Qwen3-32B", "tp": 1},
    "glm": {"model": "nvidia/GLM-5.2-NVFP4", "tp": 4, "moe_tp_size": 1, "moe_ep_size": 4},
}
_NEW = (1, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 7168, 8192)
_CACHED = (0, 1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
_SEQUENCES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_CONTEXT = (1, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)


class GridTiming:
    """Times of steps, read off a grid and interpolated; satisfies `dynamo_kv_router_ext.sim.timing.Timing`.

    A step of several chunks lasts as long as one of all their tokens after nothing, and for each chunk what the tokens
    before it add to a step of that chunk alone. Decode is added to prefill, as in Dynamo's mocker.

    Args:
        engine: ``qwen`` or ``glm``.
    """

    def __init__(self, engine: str) -> None:
        grid = json.loads(_file(engine).read_text(encoding="utf-8"))
        #: Where the times come from.
        self.source: str = grid["source"]
        self._prefill: list[list[float]] = grid["prefill_s"]
        self._decode: list[list[float]] = grid["decode_s"]
        self._steps: dict[tuple[int, int], float] = {}

    def step_s(self, prefills: Sequence[tuple[int, int]], decodes: int, resident: int) -> float:
        seconds = self._decode_s(decodes, resident / decodes) if decodes else 0.0
        if prefills:
            seconds += self._prefill_s(sum(new for new, _ in prefills), 0)
            for new, cached in prefills:
                if cached:
                    seconds += self._prefill_s(new, cached) - self._prefill_s(new, 0)
        return seconds

    def decode_run_s(self, decodes: int, resident: int, steps: int) -> float:
        """The sum over pieces of at most 64 steps, each as its middle: what a grid this coarse is worth."""
        seconds, done = 0.0, 0
        while decodes > 0 and done < steps:
            piece = min(64, steps - done)
            seconds += piece * self._decode_s(decodes, resident / decodes + done + (piece - 1) / 2)
            done += piece
        return seconds

    def _prefill_s(self, new: int, cached: int) -> float:
        known = self._steps.get((new, cached))
        if known is None:
            known = self._steps[new, cached] = _between(self._prefill, _NEW, _CACHED, new, cached)
        return known

    def _decode_s(self, decodes: int, context: float) -> float:
        return _between(self._decode, _SEQUENCES, _CONTEXT, decodes, context)


def _between(grid: list[list[float]], rows: Sequence[int], columns: Sequence[int], row: float, column: float) -> float:
    """Interpolate on both axes; beyond the last row or column go on as in the last cell."""
    across = min(max(bisect_right(rows, row) - 1, 0), len(rows) - 2)
    along = min(max(bisect_right(columns, column) - 1, 0), len(columns) - 2)
    x = (row - rows[across]) / (rows[across + 1] - rows[across])
    y = (column - columns[along]) / (columns[along + 1] - columns[along])
    low, high = grid[across], grid[across + 1]
    first = low[along] + y * (low[along + 1] - low[along])
    return first + x * (high[along] + y * (high[along + 1] - high[along]) - first)


def _file(engine: str) -> Path:
    return Path(__file__).with_name(f"truth_{engine}.json")


def _write(engine: str) -> None:
    from dynamo_kv_router_ext.sim.timing import AisTiming

    timing = AisTiming(system="gb200", backend="vllm", **_ENGINES[engine])
    asked = ", ".join(f"{name} {value}" for name, value in _ENGINES[engine].items())
    grid = {
        "source": f"AISimulate 0.13.0, gb200, vllm {timing.config['backend_version']}, {asked}",
        "prefill_s": [[round(timing.step_s([(new, cached)], 0, 0), 6) for cached in _CACHED] for new in _NEW],
        "decode_s": [[round(timing.step_s([], one, one * length), 6) for length in _CONTEXT] for one in _SEQUENCES],
    }
    _file(engine).write_text(json.dumps(grid) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for name in _ENGINES:
        _write(name)
