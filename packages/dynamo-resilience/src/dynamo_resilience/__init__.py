# SPDX-License-Identifier: Apache-2.0
"""`dynamo-gateway`: the public API in front of one or more sites of Dynamo frontends.

Run it:

    dynamo-gateway --config gateway.yaml --check    # say what it would serve
    dynamo-gateway --config gateway.yaml

The smallest file names a site and its models:

    sites:
      home:
        frontends: [http://127.0.0.1:8000]
        models:
          Qwen/Qwen3-0.6B: {}

- Clients call `listen`; `/healthz`, `/readyz`, `/metrics` and `/state` are at `admin`.
- With `store: {url: redis://HOST:PORT}` replicas share circuit breakers, with one half-open probe for all of them, and
  the capacity of each pool (`capacity` of a model), which they lease in blocks. Without, one replica works alone.
- `tenants` asks for keys, weighs who is served, and with `reserved` guarantees shares; idle ones are lent.
- A changed file is put to work without dropping a stream (SIGHUP: at once); one that cannot be used changes nothing.
- SIGTERM drains; a second one stops at once.

Every key, header, metric and answer is in the package's README. As a library: `dynamo_resilience.gateway.Gateway`.
Importing this package loads neither the gateway nor its upstream; `SUPPORTED` holds the versions of the upstream it is
written for, and `check()` refuses an installed one outside them.
"""

from ._compat import SUPPORTED, UnsupportedUpstreamError, check
from .version import __version__

__all__ = ["SUPPORTED", "UnsupportedUpstreamError", "__version__", "check"]
