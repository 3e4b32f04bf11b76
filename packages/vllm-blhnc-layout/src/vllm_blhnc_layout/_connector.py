# SPDX-License-Identifier: Apache-2.0
"""What the pull and the push connector share: one region per block row, pairs in order, and an agreement on the row."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, NixlHandshakePayload
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import KVCacheConfig, MLAAttentionSpec, UniformTypeKVCacheSpecs

from . import _layout, _rows
from ._compat import siblings
from ._identity import Agreement, IncompatiblePeer, differences
from ._pairs import ordered
from ._stats import RowPromMetrics, RowStats
from ._weights import sample

logger = init_logger(f"vllm.{__name__}")  # under vLLM's own root, which has the handlers


class Poster:
    """NIXL's agent, to whom pairs of descriptors are handed in order."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        #: The most pairs in one descriptor, if there is a limit.
        self.longest: int | None = None
        #: Padding of a pair, bytes.
        self.padding = 0
        self.stats = RowStats()
        #: Transfers that have not ended: pairs, runs, bytes of padding.
        self._posted: dict[Any, tuple[int, int, int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def make_prepped_xfer(
        self, operation: str, local_side: int, local: Any, remote_side: int, remote: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """As the agent's."""
        local, remote, runs = ordered(np.asarray(local), np.asarray(remote), self.longest)
        handle = self._agent.make_prepped_xfer(operation, local_side, local, remote_side, remote, *args, **kwargs)
        self._posted[handle] = len(local), runs, self.padding * len(local)
        return handle

    def get_xfer_telemetry(self, handle: Any) -> Any:
        """As the agent's; vLLM asks for it where a transfer has succeeded, and counts it."""
        told = self._agent.get_xfer_telemetry(handle)
        if (counts := self._posted.pop(handle, None)) is not None:
            self.stats.record_pairs(*counts)
        return told

    def release_xfer_handle(self, handle: Any) -> None:
        """As the agent's."""
        self._agent.release_xfer_handle(handle)
        self._posted.pop(handle, None)


class RowWorker:
    """Mixed into vLLM's worker: registers the pool's block rows where it has some."""

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)  # type: ignore[call-arg]
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._limit: int | None = extra.get("max_descriptor_bytes")
        if self._limit is not None and (type(self._limit) is not int or self._limit < 1):
            raise ValueError(f"max_descriptor_bytes {self._limit!r} in kv_connector_extra_config: bytes, above 0")
        named = extra.get("weights_identity")
        if named is not None and not (isinstance(named, str) and named):
            raise ValueError(f"weights_identity {named!r} in kv_connector_extra_config: a text that is not empty")
        self._weights: str | None = named
        self._fallback = _layout.fallback(vllm_config)
        self.nixl_wrapper = Poster(self.nixl_wrapper)  # type: ignore[has-type]
        self.xfer_stats = self.nixl_wrapper.stats
        self._facts: list[list[str]] = []

    def _find_rows(self, caches: dict[str, torch.Tensor]) -> _rows.Rows:
        """Return the pool's rows; raise `NoRows` where a page is not what moves, whatever the layout."""
        if self._fallback == _layout.PER_LAYER:
            raise _rows.NoRows("fallback per-layer")
        layout = self.kv_cache_layout  # type: ignore[attr-defined]
        if not self._has_packed_cache:  # type: ignore[attr-defined]
            raise _rows.NoRows(f"layout {layout} puts no layers side by side (VLLM_KV_CACHE_LAYOUT=BLHNC does)")
        reasons = {
            "caches other than MLA": not self.use_mla or self._has_mamba,  # type: ignore[attr-defined]
            "a host buffer": self.use_host_buffer,  # type: ignore[attr-defined]
            "several groups of layers": len(self.kv_cache_config.transfer_groups) != 1,  # type: ignore[attr-defined]
            "pipeline parallelism": self.pp_size > 1,  # type: ignore[attr-defined]
            "context parallelism": self.dcp_size > 1 or self.pcp_size > 1,  # type: ignore[attr-defined]
            "blocks that the kernel splits": self._physical_blocks_per_logical_kv_block != 1,  # type: ignore[attr-defined]
        }
        found = [reason for reason, given in reasons.items() if given]
        if found:
            raise _rows.NoRows(f"not with {' and '.join(found)}")
        specs = {}
        for layer, spec in self._layer_specs.items():  # type: ignore[attr-defined]
            specs[layer] = spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        other = sorted(layer for layer, spec in specs.items() if not isinstance(spec, MLAAttentionSpec))
        if other:
            raise _rows.NoRows(f"{other[0]} has no MLA cache")
        # A layer that shares another's cache has no specification, and no page of its own.
        own = {layer: cache for layer, cache in caches.items() if layer in specs}
        rows = _rows.find(own, self.num_blocks)  # type: ignore[attr-defined]
        readers = {}
        config, sm100 = self.vllm_config, current_platform.is_device_capability_family(100)  # type: ignore[attr-defined]
        for layer, module in get_layers_from_vllm_config(config, AttentionLayerBase, list(own)).items():
            backend = module.get_attn_backend().get_name()
            readers[layer] = _layout.reader(backend, specs[layer].cache_dtype_str, sm100)
        _layout.check_step(rows, self.block_size, readers)  # type: ignore[attr-defined]
        if unknown := sorted({name for name in readers.values() if _layout.known(name) is None}):
            logger.warning("nothing is known of %s: it may not find blocks that lie apart", " and ".join(unknown))
        return rows

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the block rows of the pool, or, where it has none, what vLLM registers.

        Raises:
            InvalidLayout: an attention backend cannot address these rows, or there are none and `fallback` is "refuse".
            ValueError: `max_descriptor_bytes` is less than a row.
            RuntimeError: vLLM registered something else than the rows.
        """
        register = super().register_kv_caches  # type: ignore[misc]
        try:
            rows = self._find_rows(kv_caches)
        except _rows.NoRows as reason:
            if self._fallback == _layout.REFUSE:
                raise _layout.InvalidLayout(f"KV would not move by block rows: {reason}") from None
            register(kv_caches)
            if self._limit is not None:
                self.nixl_wrapper.longest = max(1, self._limit // max(self.block_len_per_layer))  # type: ignore[attr-defined]
            # Pages of layers that lie a row apart never merge: worse than pages that lie together.
            loud = self._has_packed_cache and not self._registers_rows  # type: ignore[attr-defined]
            advice = "; VLLM_KV_CACHE_LAYOUT=LBNHC would take fewer descriptors" if loud else ""
            (logger.warning if loud else logger.info)("KV moves as in stock vLLM: %s%s", reason, advice)
            return
        if self._limit is not None and self._limit < rows.stride:
            raise ValueError(f"max_descriptor_bytes {self._limit} is less than a block row of {rows.stride} bytes")
        if self._registers_rows:
            register(kv_caches)
            logger.info("stock vLLM registers block rows for this transfer mode: nothing to do but agree on them")
        else:
            register({rows.pages[0][0]: _rows.view(kv_caches, rows)})
            self.device_kv_caches = kv_caches
        registered = list(zip(self.block_len_per_layer, self.block_stride_per_layer, strict=True))  # type: ignore[attr-defined]
        if registered != [(rows.stride, rows.stride)]:
            raise RuntimeError(f"one region of rows of {rows.stride} bytes was meant, vLLM registered {registered}")
        self.nixl_wrapper.padding = rows.stride - rows.payload
        if self._limit is not None:
            self.nixl_wrapper.longest = self._limit // rows.stride
        self._agree(rows)
        logger.info(
            "KV moves by block rows: %d rows of %d bytes, %d of them padding, %d layers",
            *(rows.blocks, rows.stride, rows.stride - rows.payload, len(rows.pages)),
        )

    #: Whether vLLM's own worker registers block rows.
    _registers_rows: ClassVar[bool] = False

    def _tell_weights(self) -> str | None:
        """Return what tells the weights: a name that was given, a sample of the files, or at least the revision."""
        if self._weights is not None:
            return self._weights
        model, cache = self.model_config, self.vllm_config.load_config.download_dir  # type: ignore[attr-defined]
        found = sample(model.model, model.revision, cache)
        if found is None:
            logger.warning("no weights found at %s: peers compare no more than its name", model.model)
        revision: str | None = model.revision
        return found or revision

    def _agree(self, rows: _rows.Rows) -> None:
        cache = self.vllm_config.cache_config  # type: ignore[attr-defined]
        facts = {
            "form": "rows",
            "stride": rows.stride,
            "pages": [list(page) for page in rows.pages],
            "block size": self.block_size,  # type: ignore[attr-defined]
            "cache dtype": str(self.model_config.dtype if cache.cache_dtype == "auto" else cache.cache_dtype),  # type: ignore[attr-defined]
            "layout": self.kv_cache_layout,  # type: ignore[attr-defined]
            "weights": self._tell_weights(),
        }
        # Left there by whatever changes what cached values mean, such as flashinfer-nvfp4-mla. Where there is nothing,
        # nothing is said: peers of an older version of this package say nothing either.
        if (identity := getattr(cache, "kv_cache_identity", None)) is not None:
            facts["identity"] = identity
        agreement = Agreement.of(str(self.compat_hash), facts)  # type: ignore[has-type]
        self.compat_hash = agreement
        # Beside it in what a peer decodes: `enforce_handshake_compat: false` waives vLLM's comparison, not this one.
        self._facts = [[agreement.facts]]
        told = self.xfer_handshake_metadata.agent_metadata_bytes  # type: ignore[has-type]
        metadata = msgspec.msgpack.decode(told, type=NixlAgentMetadata)
        metadata.region_members = self._facts
        self.xfer_handshake_metadata = NixlHandshakePayload(
            compatibility_hash=str.__str__(agreement), agent_metadata_bytes=msgspec.msgpack.encode(metadata)
        )

    def _refuse_another(self, theirs: NixlAgentMetadata) -> None:
        if self._facts and theirs.region_members != self._facts:
            (ours,), told = self._facts[0], theirs.region_members
            text = told[0][0] if told and told[0] else ""
            said = differences(f" {ours}", f" {text}" if text.startswith("{") else "")
            raise IncompatiblePeer(f"this peer's cache cannot be read: {'; '.join(said)}")

    def _validate_remote_agent_handshake(self, nixl_agent_meta: NixlAgentMetadata, *args: Any, **kwargs: Any) -> None:
        self._refuse_another(nixl_agent_meta)
        super()._validate_remote_agent_handshake(nixl_agent_meta, *args, **kwargs)  # type: ignore[misc]

    def _add_notif_only_remote_agent(self, metadata: NixlAgentMetadata, *args: Any, **kwargs: Any) -> str:
        # The decode end of a push, which vLLM does not let look at its peer: it would wait for blocks that never come.
        self._refuse_another(metadata)
        name: str = super()._add_notif_only_remote_agent(metadata, *args, **kwargs)  # type: ignore[misc]
        return name


def backend_names(vllm_config: VllmConfig) -> list[str]:
    """Return the names of the attention backends, the indexer's included.

    An engine core whose workers are other processes has no layers to ask: vLLM's own answer is then what a dense model
    would get. So the selection is asked as the layers have asked it.
    """
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    if layers:
        return sorted({layer.get_attn_backend().get_name() for layer in layers.values()})
    model = vllm_config.model_config
    sparse = hasattr(model.hf_text_config, "index_topk")
    with set_current_vllm_config(vllm_config):
        backend = get_attn_backend(
            head_size=model.get_head_size(),
            dtype=model.dtype,
            kv_cache_dtype=vllm_config.cache_config.cache_dtype,
            use_mla=model.use_mla,
            use_sparse=sparse,
            num_heads=model.get_num_attention_heads(vllm_config.parallel_config),
        )
    return [backend.get_name(), *(["DEEPSEEK_V32_INDEXER"] if sparse else [])]


class RowConnector(NixlBaseConnector):  # type: ignore[misc]
    """Mixed into vLLM's connector: its worker is ours."""

    #: The worker to make.
    worker_class: ClassVar[type[Any]]

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        if role != KVConnectorRole.WORKER:
            super().__init__(vllm_config, role, kv_cache_config)
            return
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        self.connector_worker = self.worker_class(vllm_config, self.engine_id, kv_cache_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Ask for block rows where they are valid; vLLM does not ask where VLLM_KV_CACHE_LAYOUT is set."""
        if vllm_config.model_config is None:
            return None
        layout, reason = _layout.preferred(
            vllm_config, lambda: backend_names(vllm_config), lambda: siblings(RowConnector)
        )
        logger.info_once("KV cache layout: %s (%s)", layout or "as stock vLLM chooses", reason)
        if layout is not None:
            return layout
        stock: str | None = super().get_required_kvcache_layout(vllm_config)
        return stock

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Return statistics of our kind."""
        return RowStats(data=data) if data is not None else RowStats()

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> KVConnectorPromMetrics:
        """Return metrics of our kind."""
        return RowPromMetrics(*args, **kwargs)
