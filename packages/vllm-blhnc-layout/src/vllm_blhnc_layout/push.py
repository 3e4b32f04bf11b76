# SPDX-License-Identifier: Apache-2.0
"""vLLM's push connector, with pairs in order and an agreement on the row. Select it as `vllm_blhnc_layout.pull`.

Stock vLLM registers block rows for a push under a block-outermost layout. It compares nothing but the length of a row,
so two ends whose layers lie in another order would fill each other with nonsense; here they refuse each other.
"""

from __future__ import annotations

from ._compat import check

check()  # before an import that another vLLM may not have

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPushConnector  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker  # noqa: E402

from ._connector import RowConnector, RowWorker  # noqa: E402

__all__ = ["NixlConnector"]


class RowPushWorker(RowWorker, NixlPushConnectorWorker):  # type: ignore[misc]  # no vLLM where types are checked
    """vLLM's push worker, on block rows."""

    _registers_rows = True


class NixlConnector(RowConnector, NixlPushConnector):  # type: ignore[misc]
    """vLLM's push connector, on block rows."""

    worker_class = RowPushWorker
