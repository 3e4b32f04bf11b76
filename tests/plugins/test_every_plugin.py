# SPDX-License-Identifier: Apache-2.0
"""What every plugin owes: it imports without its upstream, changes nothing by that, and refuses one it does not know.

A plugin whose README says *planned* also registers nothing. A plugin's own tests stand in its own folder.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

PACKAGES = Path(__file__).parents[2] / "packages"
DISTRIBUTIONS = sorted(path.parent.name for path in PACKAGES.glob("[!_]*/pyproject.toml"))
#: What an extra may bring that is no upstream.
TOOLS = {"httpx", "matplotlib", "pyyaml", "rich"}
UPSTREAMS = ("dynamo", "flashinfer", "mooncake", "nixl", "torch", "transformers", "vllm", "xgrammar")


@pytest.fixture(params=DISTRIBUTIONS)
def name(request: pytest.FixtureRequest) -> str:
    """The distribution's name."""
    return str(request.param)


@pytest.fixture
def plugin(name: str) -> ModuleType:
    """The plugin, imported."""
    return importlib.import_module(name.replace("-", "_"))


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout


def _pretend_installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_imports_where_no_upstream_is_installed(name: str) -> None:
    module = name.replace("-", "_")
    # None in sys.modules makes the import system raise, as if the module were not there.
    assert _run(f"import sys; sys.modules.update(dict.fromkeys({UPSTREAMS!r})); import {module}; print('ok')") == "ok\n"


def test_import_loads_no_upstream_and_no_other_plugin(name: str) -> None:
    module = name.replace("-", "_")
    code = f"import sys; before = set(sys.modules); import {module}; print(*(set(sys.modules) - before))"
    loaded = {one.partition(".")[0] for one in _run(code).split()}
    assert module in loaded
    others = {one.replace("-", "_") for one in DISTRIBUTIONS if one != name} | {"serving_stack", "support"}
    assert loaded.isdisjoint({*UPSTREAMS, *others})


def test_version_is_the_one_in_the_metadata(name: str, plugin: ModuleType) -> None:
    assert importlib.metadata.version(name) == plugin.__version__


def test_planned_means_that_nothing_is_registered(name: str) -> None:
    if "**Status: planned.**" in (PACKAGES / name / "README.md").read_text(encoding="utf-8"):
        assert not list(importlib.metadata.distribution(name).entry_points)


def test_extras_and_supported_ranges_agree(name: str, plugin: ModuleType) -> None:
    requirements = [Requirement(text) for text in importlib.metadata.requires(name) or []]
    extras = {r.name: r.specifier for r in requirements if r.marker is not None and "extra" in str(r.marker)}
    extras = {name: specifier for name, specifier in extras.items() if name not in TOOLS}
    assert extras == {upstream: SpecifierSet(supported) for upstream, supported in plugin.SUPPORTED.items()}


@pytest.mark.parametrize("installed", ["0.0.1", "999.0"])
def test_check_refuses_a_version_outside_the_range(
    monkeypatch: pytest.MonkeyPatch, plugin: ModuleType, installed: str
) -> None:
    for upstream, supported in plugin.SUPPORTED.items():
        _pretend_installed(monkeypatch, {upstream: installed})
        with pytest.raises(plugin.UnsupportedUpstreamError) as caught:
            plugin.check()
        assert f"{upstream} {installed}" in str(caught.value)
        assert f"{upstream} {supported}" in str(caught.value)


def test_check_is_silent_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch, plugin: ModuleType) -> None:
    _pretend_installed(monkeypatch, {})
    assert plugin.check() is None


def test_check_accepts_the_lowest_supported_version(monkeypatch: pytest.MonkeyPatch, plugin: ModuleType) -> None:
    lowest = {
        upstream: next(s.version for s in SpecifierSet(supported) if s.operator == ">=")
        for upstream, supported in plugin.SUPPORTED.items()
    }
    _pretend_installed(monkeypatch, lowest)
    assert plugin.check() is None
