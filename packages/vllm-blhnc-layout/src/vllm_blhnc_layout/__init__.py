# SPDX-License-Identifier: Apache-2.0
"""One descriptor per KV block instead of one per layer when prefill hands KV to decode.

Status: planned. Nothing is registered yet: importing this package changes nothing, and it has no entry point.

It will:

- register one region per block row under BLHNC, for pull and push, so that descriptors follow the runs of blocks
  whatever the number of layers;
- compare a digest of the cache's geometry in the handshake and refuse a different peer, naming the difference, before
  a byte moves;
- keep a fleet of old and new workers serving during a rolling upgrade;
- choose the layout where it is valid, and print the reason where it is not; an explicit `VLLM_KV_CACHE_LAYOUT` wins;
- report descriptors, runs, bytes, padding, post time and transfer time through vLLM's connector statistics.

Until then the package offers its version, the upstream versions it is written for (`SUPPORTED`), and `check()`, which
refuses an installed upstream outside them.
"""

from ._compat import SUPPORTED, UnsupportedUpstreamError, check
from .version import __version__

__all__ = ["SUPPORTED", "UnsupportedUpstreamError", "__version__", "check"]
