# SPDX-License-Identifier: Apache-2.0
"""What vLLM's NIXL statistics do not say: how many pairs of blocks a transfer had, in how many runs, and its padding.

Beside vLLM's own `vllm:nixl_num_descriptors`, `nixl_bytes_transferred`, `nixl_post_time_seconds` and
`nixl_xfer_time_seconds`, counted by the end that posts, and with them: once a transfer has succeeded, so that a failed
one counts in neither:

- `vllm:nixl_pairs_total`: pairs of descriptors before any were merged (a pair is a block row, or a layer's page);
- `vllm:nixl_runs_total`: stretches of pairs that follow each other on both sides;
- `vllm:nixl_padding_bytes_total`: bytes moved that belong to no layer.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics
from vllm.v1.metrics.utils import create_metric_per_engine

#: Key in the statistics -> what it counts.
COUNTS = {
    "pairs": "Pairs of descriptors of NIXL KV cache transfers, before neighbours were merged.",
    "runs": "Runs of pairs of NIXL KV cache transfers that follow each other on both sides.",
    "padding_bytes": "Bytes moved in NIXL KV cache transfers that belong to no layer.",
}


class RowStats(NixlKVConnectorStats):  # type: ignore[misc]  # no vLLM where types are checked
    """vLLM's statistics of one interval, and `COUNTS`."""

    def reset(self) -> None:
        """Begin anew."""
        super().reset()
        self.data.update({key: [] for key in COUNTS})

    def is_empty(self) -> bool:
        """Return whether nothing was counted: since 0.32 vLLM counts no transfer whose telemetry is missing."""
        return bool(super().is_empty()) and not any(self.data.get(key) for key in COUNTS)

    def record_pairs(self, pairs: int, runs: int, padding_bytes: int) -> None:
        """Count one transfer that has succeeded."""
        for key, value in (("pairs", pairs), ("runs", runs), ("padding_bytes", padding_bytes)):
            self.data[key].append(value)


class RowPromMetrics(NixlPromMetrics):  # type: ignore[misc]
    """vLLM's metrics, and a counter for each of `COUNTS`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        labels = kwargs.get("labelnames", args[2] if len(args) > 2 else [])
        self._counters = {
            key: create_metric_per_engine(
                self._counter_cls(name=f"vllm:nixl_{key}", documentation=text, labelnames=labels),
                self.per_engine_labelvalues,
            )
            for key, text in COUNTS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what one interval brought."""
        super().observe(transfer_stats_data, engine_idx)
        for key, counter in self._counters.items():
            counter[engine_idx].inc(sum(transfer_stats_data.get(key, ())))
