# SPDX-License-Identifier: Apache-2.0
"""What the store's connector makes of an engine's configuration: vLLM's own configuration classes, no engine."""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving_stack import StackError
from serving_stack.model import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("identity") / "glm-tiny")


@pytest.fixture(scope="module")
def engine(model: Path) -> Callable[..., tuple[Any, Any]]:
    """Make the configuration that a worker gets, and its cache's: options are those of the command line."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

    def make(
        folder: Path = model, layers: tuple[str, ...] = ("model.layers.0", "model.layers.1"), **options: Any
    ) -> Any:
        transfer = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", **options.pop("transfer", {})}
        vllm_config = EngineArgs(
            str(folder), block_size=32, max_model_len=2048, enforce_eager=True, kv_transfer_config=transfer
        ).create_engine_config()
        vllm_config.cache_config.kv_cache_layout = "LBNHC"
        spec = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
        groups = [KVCacheGroupSpec(list(layers), spec)]
        return vllm_config, KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)

    return make


def prefix(engine: tuple[Any, Any], weights: Any = None) -> str:
    from serving_stack.mooncake_store import cache_identity

    return cache_identity(*engine, weights).prefix


def test_equal_engines_are_equal_wherever_the_model_lies(
    engine: Callable[..., Any], model: Path, tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(model, tmp_path / "elsewhere"))
    assert prefix(engine()) == prefix(engine(copied))


def set_to(part: str, name: str, value: Any) -> Callable[[Any, Any], None]:
    return lambda vllm_config, caches: setattr(getattr(vllm_config, part), name, value)


def respec(**changes: Any) -> Callable[[Any, Any], None]:
    import dataclasses

    def change(vllm_config: Any, caches: Any) -> None:
        group = caches.kv_cache_groups[0]
        group.kv_cache_spec = dataclasses.replace(group.kv_cache_spec, **changes)

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_to("cache_config", "cache_dtype", "fp8"),
        set_to("cache_config", "kv_cache_layout", "BLHNC"),
        set_to("cache_config", "block_size", 64),
        set_to("model_config", "dtype", "float16"),
        set_to("model_config", "max_model_len", 4096),
        set_to("model_config", "quantization", "fp8"),
        set_to("model_config", "quantization_config", {"bits": 4}),
        set_to("parallel_config", "cp_kv_cache_interleave_size", 16),
        set_to("parallel_config", "decode_context_parallel_size", 2),
        set_to("parallel_config", "prefill_context_parallel_size", 2),
        set_to("parallel_config", "pipeline_parallel_size", 2),
        lambda vllm_config, caches: vllm_config.model_config.hf_config.update({"rope_theta": 5.0}),
        lambda vllm_config, caches: caches.kv_cache_groups[0].layer_names.append("model.layers.2"),
        respec(head_size=352),
        respec(cache_dtype_str="nvfp4_ds_mla"),
        set_to("cache_config", "kv_cache_identity", "fold-0123456789abcdef"),
    ],
)
def test_whatever_decides_the_bytes_is_in_it(engine: Callable[..., Any], change: Callable[[Any, Any], None]) -> None:
    vllm_config, caches = engine()
    before = prefix((vllm_config, caches))
    vllm_config, caches = copy.deepcopy((vllm_config, caches))
    assert prefix((vllm_config, caches)) == before
    change(vllm_config, caches)
    assert prefix((vllm_config, caches)) != before


def test_a_draft_model_is_in_it(engine: Callable[..., Any], tmp_path: Path) -> None:
    vllm_config, caches = engine()
    found = {prefix((vllm_config, caches))}
    for name, seed in (("a", 1), ("b", 2)):
        draft, _ = engine(write_model(tmp_path / name / "draft", seed=seed))
        vllm_config.speculative_config = SimpleNamespace(
            method="eagle", draft_model_config=draft.model_config, enable_adaptive_verification=False
        )
        found.add(prefix((vllm_config, caches)))
    assert len(found) == 3


def test_the_stages_of_a_pipeline_agree(engine: Callable[..., Any]) -> None:
    """The first stage looks for the keys of all, under its own prefix."""
    stages = [engine(layers=layers) for layers in (("model.layers.0",), ("model.layers.1", "model.layers.2"))]
    for vllm_config, _ in stages:
        vllm_config.parallel_config.pipeline_parallel_size = 2
    assert len({prefix(stage) for stage in stages}) == 1


def test_reading_weights_is_told_where_vllm_shows_it(
    engine: Callable[..., Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a worker, vLLM shows what its own loggers say; others are silent below a warning."""
    monkeypatch.setenv("SERVING_STACK_HOME", str(tmp_path / "home"))
    shown: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm").addHandler(handler)
    try:
        prefix(engine())
    finally:
        logging.getLogger("vllm").removeHandler(handler)
    assert any(re.fullmatch(f"{model}: reading .* GiB of weights for their identity", line) for line in shown)


@pytest.mark.parametrize("weights", ["", 0, 7, ["x"]])
def test_a_name_for_weights_must_be_a_text(engine: Callable[..., Any], weights: Any) -> None:
    with pytest.raises(StackError, match="weights_identity"):
        prefix(engine(), weights)


def test_weights_that_cannot_be_read_ask_for_a_name(engine: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors")))
    with pytest.raises(StackError, match=r"bare'.*no weights there.*'weights_identity'"):
        prefix(engine(bare))
    assert prefix(engine(bare), "release 7").startswith("release_7-")


def test_what_the_connector_adds_to_the_configuration(engine: Callable[..., Any]) -> None:
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from serving_stack.mooncake_store import _adapted

    vllm_config, caches = engine(transfer={"kv_connector_extra_config": {"cache_prefix": "mine", "lookup_async": True}})
    vllm_config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    before = json.dumps(vllm_config.kv_transfer_config.kv_connector_extra_config)
    worker, scheduler = (
        _adapted(vllm_config, role, caches) for role in (KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER)
    )
    extra = worker.kv_transfer_config.kv_connector_extra_config
    assert extra["cache_prefix"] == f"mine@{prefix((vllm_config, caches))}"
    assert extra["lookup_async"] is True
    # Both ends of one engine meet at one socket, those of another elsewhere.
    assert extra["lookup_rpc_port"] == scheduler.kv_transfer_config.kv_connector_extra_config["lookup_rpc_port"]
    other, _ = engine()
    port = _adapted(other, KVConnectorRole.SCHEDULER, caches).kv_transfer_config.kv_connector_extra_config
    assert port["lookup_rpc_port"] != extra["lookup_rpc_port"]
    # Nobody would fetch its events.
    assert worker.kv_events_config is None
    # The engine's own configuration stays as it is.
    assert vllm_config.kv_events_config is not None
    assert json.dumps(vllm_config.kv_transfer_config.kv_connector_extra_config) == before


class FakeStore:
    """A store whose master is away for as many calls as it is told."""

    def __init__(self, away: int) -> None:
        self.away, self.asked = away, 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self.asked += 1
        self.away -= 1
        return [-901 if self.away >= 0 else 1] * len(keys)

    batch_put_from_multi_buffers = batch_get_into_multi_buffers = lambda self, keys, *args: self.batch_is_exist(keys)

    def close(self) -> None:
        self.asked = -1


def test_a_master_that_does_not_answer_is_left_alone_until_it_does() -> None:
    from serving_stack.mooncake_store import PausingStore
    from support.stack import until

    fake = FakeStore(away=3)
    store = PausingStore(fake, pause=0.2)
    assert store.batch_is_exist(["a", "b"]) == [-901, -901]
    for _ in range(50):  # nothing is asked, nothing is found
        assert max(store.batch_is_exist(["a", "b"])) < 0
        assert max(store.batch_put_from_multi_buffers(["a"], [[0]], [[1]], None)) < 0
        assert max(store.batch_get_into_multi_buffers(["a"], [[0]], [[1]])) < 0
    assert fake.asked <= 3
    until(lambda: store.batch_is_exist(["a"]) == [1], 20, "the master is asked again")
    store.close()
    assert fake.asked == -1
