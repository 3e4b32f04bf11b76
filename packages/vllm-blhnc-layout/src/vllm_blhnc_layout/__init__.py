# SPDX-License-Identifier: Apache-2.0
"""One descriptor per KV block instead of one per layer when prefill hands KV to decode.

Select it by `kv_connector_module_path`: `vllm_blhnc_layout.pull` or `vllm_blhnc_layout.push`, both of which offer a
class called `NixlConnector`. Importing this package changes nothing, and it has no entry point. Modules:

- `pull`, `push`: vLLM's connectors, moving block rows where the pool has some;
- `_connector`: what both share; `_rows`: the geometry of a pool; `_pairs`: the order of what is posted;
- `_identity`: what two ends must agree on; `_weights`: which weights they hold; `_layout`: where the layout is valid;
  `_stats`: counters.

The package itself offers its version, the upstream versions it is written for (`SUPPORTED`), and `check()`, which
refuses an installed upstream outside them.
"""

from ._compat import SUPPORTED, UnsupportedUpstreamError, check
from .version import __version__

__all__ = ["SUPPORTED", "UnsupportedUpstreamError", "__version__", "check"]
