# SPDX-License-Identifier: Apache-2.0
"""The router's keys and block numbers are those of the installed vLLM: MooncakeStoreConnector's, and its events'."""

from __future__ import annotations

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import KeyMetadata, PoolKey, RankLocalStoreLayout
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from dynamo_kv_router_ext._store_tier import block_id, mooncake_key

HASH = bytes(range(32))


@pytest.mark.parametrize("prefix", ["", "b431c7744367-bfloat16-LBNHC-4fd301d1c0beb07414ededd3"])
@pytest.mark.parametrize("namespace", ["", "@store_tp:8@store_pp:1@store_format:v1"])
def test_the_key_is_vllms(prefix: str, namespace: str) -> None:
    metadata = KeyMetadata("GLM-5", 1, 2, 3, 4, 5, prefix, namespace)
    ours = mooncake_key(
        "zai/GLM-5/",
        HASH,
        tp_rank=1,
        pcp_rank=2,
        dcp_rank=3,
        pp_rank=4,
        group=5,
        cache_prefix=prefix,
        store_namespace=namespace,
    )
    assert ours == PoolKey(metadata, HASH.hex()).to_string()
    assert ours == RankLocalStoreLayout(metadata, 16, 16).key_for(0, BlockHash(HASH))


def test_a_block_is_named_as_in_vllms_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    assert block_id(HASH) == maybe_convert_block_hash(BlockHash(HASH))
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    assert maybe_convert_block_hash(BlockHash(HASH)) == HASH
