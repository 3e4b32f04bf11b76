# SPDX-License-Identifier: Apache-2.0
"""What the plugin registers in vLLM and overrides there, and its attention by itself; engines are in tests/stack."""

from __future__ import annotations

import inspect
import json
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

class Theirs(CPUMLABackend):
    @staticmethod
    def get_impl_cls():
        return lambda **given: ("theirs", given["kv_cache_dtype"])

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
    import vllm_blhnc_layout
register_backend(Registry.CPU_MLA, "other.Theirs")
begun = time.perf_counter()
_plugin.register()
found["ms"] = (time.perf_counter() - begun) * 1000
found["imported"] = [name for name in ("flashinfer_nvfp4_mla._vllm", "flashinfer_nvfp4_mla._op") if name in sys.modules]
once = {name: Registry[name].get_path() for name in _plugin.MEMBERS}
_plugin.register()
found["twice"] = once == {name: Registry[name].get_path() for name in _plugin.MEMBERS}
found["ours"] = all(path == f"flashinfer_nvfp4_mla._vllm.{name}" for name, path in once.items())
import vllm_blhnc_layout.pull
from vllm_blhnc_layout import _layout
ours = Registry.CPU_MLA.get_class()
found["same"] = [ours.get_name() == Theirs.get_name(), ours.get_builder_cls() is Theirs.get_builder_cls(),
                 issubclass(ours, Theirs), _layout.known(ours.get_name()) is not None]
found["theirs"] = ours.get_impl_cls()(kv_cache_dtype="auto")
found["dtypes"] = ours.supported_kv_cache_dtypes
from flashinfer_nvfp4_mla import _vllm
_vllm.Impl.__init__ = lambda self, **given: None
found["rows"] = isinstance(ours.get_impl_cls()(kv_cache_dtype="nvfp4_ds_mla"), _vllm.Impl)
found["amx"] = Registry.AMX_MLA.get_class().__mro__[1].__name__
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
    """Before and after vllm-blhnc-layout, and over another plugin's backend."""
    found = json.loads(run(f"FIRST = {first}\n{ORDERS}"))
    print(f"registering took {found.pop('ms'):.1f} ms")
    assert found == {
        "imported": [],
        "twice": True,
        "ours": True,
        "same": [True] * 4,
        "theirs": ["theirs", "auto"],
        "dtypes": ["auto", "nvfp4_ds_mla"],
        "rows": True,
        "amx": "AMXMLABackend",
    }


def test_one_variable_switches_it_off() -> None:
    assert "FLASHINFER_NVFP4_MLA='no'" in run(OFF)


def test_what_is_overridden_is_what_vllm_calls() -> None:
    """When this fails, look at the ledger: an override may be unnecessary, or void."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker, metadata
    from vllm.model_executor.model_loader import base_loader, utils

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


def test_the_hash_that_peers_compare_follows_what_was_folded() -> None:
    from flashinfer_nvfp4_mla import _compat

    told = _compat._tells(lambda vllm_config, name, transfer_mode="pull": f"{name} {transfer_mode}")

    def compute(exponents: dict[str, int] | None) -> str:
        given: dict[str, Any] = {} if exponents is None else {_compat._FOLDED: exponents}
        found: str = told(SimpleNamespace(cache_config=SimpleNamespace(**given)), "CPU_MLA", transfer_mode="push")
        return found

    stock = "CPU_MLA push"
    assert compute(None) == compute({}) == compute({"layers.0": 0}) == stock
    folded = {str(exponents): compute(exponents) for exponents in ({"a": 1}, {"a": 2}, {"b": 1}, {"a": 1, "b": 1})}
    assert len({stock, *folded.values()}) == 5
    assert compute({"a": 1, "b": 0}) == folded["{'a': 1}"]


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
        with set_current_vllm_config(VllmConfig()), pytest.raises((ValueError, NotImplementedError), match=said):
            _vllm.Impl(**options)
    finally:
        torch.set_default_dtype(before)
