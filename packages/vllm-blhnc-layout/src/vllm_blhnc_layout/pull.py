# SPDX-License-Identifier: Apache-2.0
"""vLLM's pull connector, moving block rows. Select it by naming this module beside the connector:

    {"kv_connector": "NixlConnector", "kv_connector_module_path": "vllm_blhnc_layout.pull", "kv_role": "kv_producer"}

vLLM and Dynamo go by the connector's name, so the class is called what theirs is. Both ends need it, and a
block-outermost layout: `VLLM_KV_CACHE_LAYOUT=BLHNC`. With another layout, or where rows cannot be had, it is vLLM's own
connector, and the log says why. `max_descriptor_bytes` in `kv_connector_extra_config` bounds one descriptor.
"""

from __future__ import annotations

from ._compat import check

check()  # before an import that another vLLM may not have

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker  # noqa: E402

from ._connector import RowConnector, RowWorker  # noqa: E402

__all__ = ["NixlConnector"]


class RowPullWorker(RowWorker, NixlPullConnectorWorker):  # type: ignore[misc]  # no vLLM where types are checked
    """vLLM's pull worker, on block rows."""


class NixlConnector(RowConnector, NixlPullConnector):  # type: ignore[misc]
    """vLLM's pull connector, on block rows."""

    worker_class = RowPullWorker
