# SPDX-License-Identifier: Apache-2.0
"""Run the router: `python -m dynamo_kv_router_ext --endpoint NAMESPACE.COMPONENT.ENDPOINT …`."""

from ._service import main

if __name__ == "__main__":
    raise SystemExit(main())
