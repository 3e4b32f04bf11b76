# SPDX-License-Identifier: Apache-2.0
"""vLLM's MooncakeStoreConnector, with the cache's identity before every key.

Select it by naming this module beside the connector, alone or within a MultiConnector:

    {"kv_connector": "MooncakeStoreConnector", "kv_connector_module_path": "serving_stack.mooncake_store",
     "kv_role": "kv_both"}

Beyond that it asks the store once for a request: a load that failed is computed. The stock connector, with
`kv_load_failure_policy` "recompute", loads and fails in a loop for as long as the master lists blocks of a dead worker
(its `client_ttl`, 10 s).

All else is vLLM's connector and its configuration. A `cache_prefix` in `kv_connector_extra_config` is kept, before the
identity. Weights that do not lie in a local folder need a name: `weights_identity` there, any string that changes with
them; without it such a model is refused.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import connector
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from .errors import StackError
from .identity import Identity, weights_identity

__all__ = ["MooncakeStoreConnector"]

logger = init_logger(f"vllm.{__name__}")  # under vLLM's own root, which has the handlers


class MooncakeStoreConnector(connector.MooncakeStoreConnector):  # type: ignore[misc]  # no vLLM where types are checked
    """The connector whose keys begin with the identity of what it saves."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        #: Request id -> how often it had been preempted when a load was begun for it.
        self._begun: dict[str, int] = {}
        # Only the worker makes keys.
        if role == KVConnectorRole.WORKER and kv_cache_config is not None:
            vllm_config = _with_identity(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """As vLLM's, but nothing where a load for this request has failed."""
        # Asked again, and not because of a preemption: the load failed.
        if self._begun.get(request.request_id) == request.num_preemptions:
            return 0, False
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """As vLLM's; remembers that a load begins."""
        if num_external_tokens > 0:
            self._begun[request.request_id] = request.num_preemptions
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's; forgets the request."""
        self._begun.pop(request.request_id, None)
        found: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(request, block_ids)
        return found


def _with_identity(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> VllmConfig:
    transfer = copy.copy(vllm_config.kv_transfer_config)
    assert transfer is not None
    extra = dict(transfer.kv_connector_extra_config)
    own = str(extra.get("cache_prefix", ""))
    identity = cache_identity(vllm_config, kv_cache_config, extra.get("weights_identity"))
    extra["cache_prefix"] = f"{own}@{identity.prefix}" if own else identity.prefix
    transfer.kv_connector_extra_config = extra
    logger.info("Mooncake keys begin with %s (weights %s)", extra["cache_prefix"], identity.weights)
    changed = copy.copy(vllm_config)
    changed.kv_transfer_config = transfer
    return changed


def cache_identity(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, weights: str | None = None) -> Identity:
    """Return the identity of the blocks that an engine of this configuration writes.

    Args:
        vllm_config: With the cache's layout resolved, as workers get it.
        kv_cache_config: The cache's groups of layers.
        weights: Names the weights where they are not in a local folder.

    Raises:
        StackError: it cannot be told which weights these are.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    # A folder's place is not what is in it, and who wrote the file down does not matter.
    configuration = {
        key: value
        for key, value in model.hf_config.to_dict().items()
        if key not in {"_name_or_path", "transformers_version"}
    }
    return Identity(
        weights=weights or _weights(vllm_config),
        cache_dtype=str(model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype).removeprefix("torch."),
        layout=cache.get_resolved_kv_cache_layout().name,
        facts={
            "vllm": vllm.__version__,
            "configuration": configuration,
            "dtype": str(model.dtype),
            "quantization": model.quantization,
            "backends": sorted(backend.get_name() for backend in get_current_attn_backends(vllm_config)),
            "groups": [[group.layer_names, repr(group.kv_cache_spec)] for group in kv_cache_config.kv_cache_groups],
        },
    )


def _weights(vllm_config: VllmConfig) -> str:
    model = vllm_config.model_config
    if vllm_config.load_config.load_format == "dummy":
        return f"dummy:{model.seed}"  # the configuration is in the identity already
    folder = Path(model.model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
        except Exception as error:
            raise StackError(
                f"model {model.model!r} is neither a folder nor in the Hub's cache: name its weights by "
                "'weights_identity' in kv_connector_extra_config"
            ) from error
    return weights_identity(folder)
