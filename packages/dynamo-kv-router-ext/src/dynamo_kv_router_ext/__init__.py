# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode placement in units of time: cached prefix in every tier, queued work, sticky sessions, sick
workers avoided.

Status: planned. Nothing is registered yet: importing this package changes nothing, and it has no entry point.

It will:

- estimate time to first token as work ahead, plus fetching or recomputing the cached prefix (whichever is faster),
  plus prefill of the rest;
- estimate inter-token latency for decode, with the session's resident KV and the transfer it saves;
- learn the coefficients online per worker, within bounds, and explain each decision by its terms;
- keep a session on its decoder, and eject a sick worker, but never the last one;
- ship `kv-router-sim`, a deterministic simulation that runs the same policy code over public traces.

Until then the package offers its version, the upstream versions it is written for (`SUPPORTED`), and `check()`, which
refuses an installed upstream outside them.
"""

from ._compat import SUPPORTED, UnsupportedUpstreamError, check
from .version import __version__

__all__ = ["SUPPORTED", "UnsupportedUpstreamError", "__version__", "check"]
