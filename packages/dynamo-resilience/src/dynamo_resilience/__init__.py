# SPDX-License-Identifier: Apache-2.0
"""The gateway: breakers shared by all replicas, capacity leased, failover across sites, health down to NVLink and
InfiniBand.

Status: planned. Nothing is registered yet: importing this package changes nothing, and it has no entry point.

It will:

- run `dynamo-gateway`, which passes the OpenAI and Anthropic request forms through untouched to one or more sites;
- share circuit breakers between replicas, with one half-open probe for all of them;
- admit by lease with a time to live and a fencing token, in units that hurt: sequences, prefill tokens, KV tokens;
- guarantee reserved pools their share and lend what they leave idle;
- fail over between sites, and judge health down to NVLink and InfiniBand.

Until then the package offers its version, the upstream versions it is written for (`SUPPORTED`), and `check()`, which
refuses an installed upstream outside them.
"""

from ._compat import SUPPORTED, UnsupportedUpstreamError, check
from .version import __version__

__all__ = ["SUPPORTED", "UnsupportedUpstreamError", "__version__", "check"]
