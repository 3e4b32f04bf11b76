# SPDX-License-Identifier: Apache-2.0
"""vLLM's MooncakeStoreConnector, with the cache's identity before every key, and made safe to lean on.

Select it by naming this module beside the connector, alone or within a MultiConnector:

    {"kv_connector": "MooncakeStoreConnector", "kv_connector_module_path": "serving_stack.mooncake_store",
     "kv_role": "kv_both", "kv_connector_extra_config": {"lookup_async": true}}

All else is vLLM's connector and its configuration. What differs:

- Keys begin with the identity of the cached bytes (`cache_identity`). A `cache_prefix` in `kv_connector_extra_config`
  is kept, before it. Weights that do not lie in a local folder need a name, `weights_identity` there: any string that
  changes with them; without it such a model is refused.
- A request is looked up once: a load that failed is computed. vLLM's connector, with `kv_load_failure_policy`
  "recompute", loads and fails in a circle while the master lists the blocks of a dead worker (its `client_ttl`, 10 s).
- Once the master did not answer, all that is asked of it is a miss, at once, until it answers again; a thread of its
  own finds that out. vLLM's connector waits out the RPC's time limit for each request and each save, one after the
  other, and pins the blocks to be saved meanwhile.
- Each engine has a lookup socket of its own. vLLM's path is the same for every engine of a host unless
  `lookup_rpc_port` is set, and an engine that starts takes the others' socket away.
- It publishes no KV events. MultiConnector never fetches them, and vLLM's worker keeps them all.
"""

from __future__ import annotations

import copy
import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vllm
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import connector
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from .errors import StackError
from .identity import Identity, weights_identity

__all__ = ["MooncakeStoreConnector", "cache_identity"]

logger = init_logger(f"vllm.{__name__}")  # under vLLM's own root, which has the handlers

#: Seconds between two attempts to reach a master that did not answer.
PAUSE = 1.0
#: What Mooncake's calls return where the master could not be reached: RPC_FAIL and RPC_TIMEOUT of its error codes.
UNREACHABLE = (-900, -901)


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
        super().__init__(_adapted(vllm_config, role, kv_cache_config), role, kv_cache_config)
        if self.connector_worker is not None:
            self.connector_worker.store = PausingStore(self.connector_worker.store)

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


class PausingStore:
    """Mooncake's store, asked nothing from a call in which the master did not answer until it answers again.

    Meanwhile nothing is found, saved or loaded. Threads may share it.
    """

    def __init__(self, store: Any, pause: float = PAUSE) -> None:
        self._store, self._pause = store, pause
        self._lock = threading.Lock()
        self._away = self._closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _call(self, method: Callable[..., list[int]], keys: list[str], *args: Any) -> list[int]:
        if self._away:
            return [UNREACHABLE[0]] * len(keys)
        found = method(keys, *args)
        if any(code in UNREACHABLE for code in found):
            with self._lock:
                if not self._away:
                    self._away = True
                    logger.warning("Mooncake's master does not answer: the second cache tier is off until it does")
                    threading.Thread(target=self._wait, name="MooncakeMaster", daemon=True).start()
        return found

    def _wait(self) -> None:
        while True:
            time.sleep(self._pause)
            if self._closed:
                return
            try:
                there = not any(code in UNREACHABLE for code in self._store.batch_is_exist(["is the master there"]))
            except Exception as error:
                logger.warning("Mooncake's master: %s", error)
                continue
            if there:
                logger.info("Mooncake's master answers: the second cache tier is on again")
                self._away = False
                return

    def close(self) -> None:
        """Close the store."""
        self._closed = True
        self._store.close()

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Return 1 for each key that is there, 0 for one that is not, less where that is not known."""
        return self._call(self._store.batch_is_exist, keys)

    def batch_put_from_multi_buffers(self, keys: list[str], *args: Any) -> list[int]:
        """Save; return a negative number for each key that was not saved."""
        return self._call(self._store.batch_put_from_multi_buffers, keys, *args)

    def batch_get_into_multi_buffers(self, keys: list[str], *args: Any) -> list[int]:
        """Load; return a negative number for each key that was not loaded."""
        return self._call(self._store.batch_get_into_multi_buffers, keys, *args)


def _adapted(vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None) -> VllmConfig:
    """Return a copy of the configuration with what the connector adds to it."""
    changed = copy.copy(vllm_config)
    changed.kv_events_config = None
    transfer = changed.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    assert transfer is not None
    extra = transfer.kv_connector_extra_config = dict(transfer.kv_connector_extra_config)
    # Short: a socket's path may have 107 bytes, and the host's name is in it too.
    extra.setdefault("lookup_rpc_port", hashlib.sha256(str(transfer.engine_id).encode()).hexdigest()[:8])
    if role == KVConnectorRole.WORKER and kv_cache_config is not None:  # only the worker makes keys
        own = str(extra.get("cache_prefix", ""))
        identity = cache_identity(vllm_config, kv_cache_config, extra.get("weights_identity"))
        extra["cache_prefix"] = f"{own}@{identity.prefix}" if own else identity.prefix
        logger.info("Mooncake keys begin with %s (weights %s)", extra["cache_prefix"], identity.weights)
    return changed


def cache_identity(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, weights: str | None = None) -> Identity:
    """Return the identity of the blocks that an engine of this configuration writes; equal on all of its ranks.

    Args:
        vllm_config: With the cache's layout resolved, as workers get it.
        kv_cache_config: The cache's groups of layers.
        weights: Names the weights where they are not in a local folder.

    Raises:
        StackError: it cannot be told which weights these are, or `weights` is not a text.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    if weights is not None and not (isinstance(weights, str) and weights):
        raise StackError(f"weights_identity {weights!r} in kv_connector_extra_config: a text that is not empty")
    facts: dict[str, Any] = {
        "vllm": vllm.__version__,
        "model": _facts(model),
        "backends": sorted(backend.get_name() for backend in get_current_attn_backends(vllm_config)),
        "block": [cache.block_size, parallel.cp_kv_cache_interleave_size],
        "context parallel": [parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size],
    }
    if changed := getattr(cache, "kv_cache_identity", None):
        facts["identity"] = changed  # of whatever changes what cached values mean, such as flashinfer-nvfp4-mla
    if parallel.pipeline_parallel_size == 1:
        facts["groups"] = [[group.layer_names, repr(group.kv_cache_spec)] for group in kv_cache_config.kv_cache_groups]
    else:
        # A stage sees its own layers only, and every stage must come to the same identity: the first one looks for the
        # keys of all. What decides a stage's layers stands for them; vLLM's key has the stage's rank.
        stages = [parallel.pipeline_parallel_size, os.environ.get("VLLM_PP_LAYER_PARTITION")]
        facts["stages"] = [*stages, parallel.tensor_parallel_size]
    speculative = vllm_config.speculative_config
    if speculative is not None:  # a draft model's layers are in the cache too
        draft = speculative.draft_model_config
        facts["draft"] = [str(speculative.method), draft and [_facts(draft), _weights(draft, vllm_config)]]
    return Identity(
        weights=weights or _weights(model, vllm_config),
        cache_dtype=str(model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype).removeprefix("torch."),
        layout=cache.get_resolved_kv_cache_layout().name,
        facts=facts,
    )


def _facts(model: ModelConfig) -> dict[str, Any]:
    # A folder's place is not what is in it, and who wrote the file down does not matter.
    left_out = {"_name_or_path", "transformers_version"}
    return {
        "configuration": {key: value for key, value in model.hf_config.to_dict().items() if key not in left_out},
        "dtype": str(model.dtype),
        "quantization": [str(model.quantization), repr(getattr(model, "quantization_config", None))],
        "length": model.max_model_len,  # some rotary embeddings depend on it
    }


def _weights(model: ModelConfig, vllm_config: VllmConfig) -> str:
    if vllm_config.load_config.load_format == "dummy":
        return f"dummy:{model.seed}"  # the configuration is in the identity already
    folder = Path(model.model)
    try:
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
        return weights_identity(folder, logger)
    except Exception as error:
        raise StackError(
            f"model {model.model!r}: it cannot be told which weights these are ({error}). Name them: "
            "'weights_identity' in kv_connector_extra_config, any text that changes with them"
        ) from error
