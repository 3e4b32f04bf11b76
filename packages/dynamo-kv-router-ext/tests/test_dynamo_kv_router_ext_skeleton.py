# SPDX-License-Identifier: Apache-2.0
"""What a planned plugin owes: it installs, imports, changes nothing, and refuses an upstream it was not written for."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from dynamo_kv_router_ext import SUPPORTED, UnsupportedUpstreamError, __version__, check

DIST = "dynamo-kv-router-ext"
IMPORT = "dynamo_kv_router_ext"
UPSTREAMS = ("dynamo", "flashinfer", "mooncake", "nixl", "torch", "transformers", "vllm", "xgrammar")


def _pretend_installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout


def test_imports_where_no_upstream_is_installed() -> None:
    # None in sys.modules makes the import system raise, as if the module were not there.
    assert _run(f"import sys; sys.modules.update(dict.fromkeys({UPSTREAMS!r})); import {IMPORT}; print('ok')") == "ok\n"


def test_import_loads_no_upstream() -> None:
    code = f"import sys; before = set(sys.modules); import {IMPORT}; print(*(set(sys.modules) - before))"
    loaded = {name.partition(".")[0] for name in _run(code).split()}
    assert IMPORT in loaded
    assert loaded.isdisjoint(UPSTREAMS)


def test_registers_no_entry_point() -> None:
    assert list(importlib.metadata.distribution(DIST).entry_points) == []


def test_version_is_the_one_in_the_metadata() -> None:
    assert importlib.metadata.version(DIST) == __version__


def test_readme_says_planned() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert "**Status: planned.**" in readme


def test_extras_and_supported_ranges_agree() -> None:
    requirements = [Requirement(text) for text in importlib.metadata.requires(DIST) or []]
    extras = {r.name: r.specifier for r in requirements if r.marker is not None and "extra" in str(r.marker)}
    assert extras == {name: SpecifierSet(supported) for name, supported in SUPPORTED.items()}


@pytest.mark.parametrize("name", sorted(SUPPORTED))
@pytest.mark.parametrize("installed", ["0.0.1", "999.0"])
def test_check_refuses_a_version_outside_the_range(monkeypatch: pytest.MonkeyPatch, name: str, installed: str) -> None:
    _pretend_installed(monkeypatch, {name: installed})
    with pytest.raises(UnsupportedUpstreamError) as caught:
        check()
    assert f"{name} {installed}" in str(caught.value)
    assert f"{name} {SUPPORTED[name]}" in str(caught.value)


def test_check_is_silent_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_installed(monkeypatch, {})
    check()


def test_check_is_silent_at_the_lowest_supported_version(monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = {
        name: next(s.version for s in SpecifierSet(supported) if s.operator == ">=")
        for name, supported in SUPPORTED.items()
    }
    _pretend_installed(monkeypatch, lowest)
    check()
