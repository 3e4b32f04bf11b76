# SPDX-License-Identifier: Apache-2.0
"""Where block rows are asked for, where not and why, and which step between blocks is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_blhnc_layout import _layout
from vllm_blhnc_layout._rows import Rows


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    return lambda found: monkeypatch.setattr(_layout, "cpu_mla_reads_strides", lambda: found)


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
    assert _layout.preferred(config(), lambda: ["AMX_MLA"]) == ("BLHNC", "attention backend AMX_MLA")
    patched(False)
    layout, reason = _layout.preferred(config(), lambda: ["AMX_MLA"])
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
        ({"kv_buffer_device": "cuda"}, "SOME_MLA", "SOME_MLA is not in the table"),
        ({"kv_connector_extra_config": {"fallback": "per-layer"}}, "AMX_MLA", "fallback per-layer"),
    ],
)
def test_not_asked_for_and_the_reason(
    patched: Callable[[bool], None], changes: dict[str, Any], backend: str, said: str
) -> None:
    patched(True)
    layout, reason = _layout.preferred(config(**changes), lambda: [backend])
    assert layout is None
    assert said in reason


@pytest.mark.parametrize("given", ["layer", True, 1, ""])
def test_another_fallback_is_refused_by_its_value(given: Any) -> None:
    with pytest.raises(ValueError, match="fallback"):
        _layout.fallback(config(kv_connector_extra_config={"fallback": given}))


def rows(stride: int) -> Rows:
    return Rows(8, stride, (("layers.0", 0, 64 * 576), ("layers.1", 64 * 576, 64 * 132)))


def test_a_step_that_a_kernel_cannot_address_is_refused_with_the_numbers() -> None:
    _layout.check_step(rows(96 * 576), 576, ["FLASHINFER_MLA_SPARSE"])
    _layout.check_step(rows(64 * 576 + 64 * 132), 576, ["CPU_MLA"])
    said = r"multiple of 36864 bytes apart \(64 rows of 576\), they are 55296"
    with pytest.raises(_layout.InvalidLayout, match=said):
        _layout.check_step(rows(96 * 576), 576, ["FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120"])
    with pytest.raises(_layout.InvalidLayout, match="AMX_MLA needs blocks a multiple of 576"):
        _layout.check_step(rows(64 * 576 + 64 * 132), 576, ["AMX_MLA"])


def test_backends_that_cannot_be_told_are_no_fault() -> None:
    """In an engine core whose layers live in other processes vLLM picks by dtype alone, and can fail."""

    def unknown() -> list[str]:
        raise ValueError("no valid attention backend")

    layout, reason = _layout.preferred(config(), unknown)
    assert layout is None
    assert "no valid attention backend" in reason
    # What speaks against it without them is said without asking.
    assert _layout.preferred(config(use_mla=False), unknown) == (None, "the model has no MLA cache")
