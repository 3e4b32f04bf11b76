# SPDX-License-Identifier: Apache-2.0
"""Locks and what `serving-stack install` and `doctor` make of an environment."""

from __future__ import annotations

import argparse
import re
from importlib import metadata, resources

import pytest
from packaging.requirements import Requirement

from serving_stack import StackError, doctor, install
from serving_stack import profile as profiles


def _source(name: str) -> list[Requirement]:
    text = (resources.files("serving_stack") / "locks" / name).read_text("utf-8")
    lines = [line.split(" #")[0].strip() for line in text.splitlines() if not line.startswith("#")]
    return [Requirement(line) for line in lines if line]


@pytest.mark.parametrize("name", profiles.shipped())
def test_every_profile_has_a_lock(name: str) -> None:
    assert install.lock(profiles.load(name).engines)["ai-dynamo"] == "1.6.1"


def test_lock_holds_what_it_was_asked_for_and_nothing_overridden() -> None:
    pins = install.lock("cpu")
    for requirement in _source("stack.in"):
        if requirement.marker is None or requirement.marker.evaluate():
            assert requirement.specifier.contains(pins[requirement.name]) if requirement.specifier else True
    dropped = {one.name for one in _source("overrides.txt") if one.marker is not None}
    assert dropped >= {"torchvision", "aisimulate", "nixl-cu12"}
    assert not dropped & set(pins)
    assert not [name for name in pins if name.startswith(("nvidia-", "cuda-"))], "the lock is of torch's CPU build"


def test_both_locks_agree() -> None:
    cpu, mocker = install.lock("cpu"), install.lock("mocker")
    assert {name: pin for name, pin in mocker.items() if cpu.get(name) != pin} == {}
    assert "torch" not in mocker


@pytest.mark.mocker
def test_this_environment_is_as_locked() -> None:
    assert install.differences("mocker") == {}


@pytest.mark.mocker
def test_differences_name_wanted_and_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "msgspec":
            return "0.1"
        if name == "redis":
            raise metadata.PackageNotFoundError(name)
        return real(name) + "+local"

    monkeypatch.setattr(metadata, "version", version)
    pins = install.lock("mocker")
    assert install.differences("mocker") == {"msgspec": (pins["msgspec"], "0.1"), "redis": (pins["redis"], None)}


def test_dry_run_installs_nothing_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "differences", lambda engines: {"redis": ("8.1.0", None), "pyzmq": ("27.0", "26.0")})
    monkeypatch.setattr(install, "_installer", lambda: pytest.fail("something would be installed"))
    assert install.run(argparse.Namespace(profile="mocker", dry_run=True)) == 1
    said = capsys.readouterr().out
    assert "redis 8.1.0 (missing)" in said
    assert "pyzmq 27.0 (26.0 is installed)" in said


def test_unknown_lock_is_named() -> None:
    with pytest.raises(StackError, match="'gpu'"):
        install.lock("gpu")


def _findings(profile: str, port: int = 8000) -> dict[str, doctor.Finding]:
    return {finding.what: finding for finding in doctor.examine(profiles.load(profile), profile, port)}


def _only(profile: str, sign: str) -> doctor.Finding:
    (found,) = (finding for what, finding in _findings(profile).items() if what.startswith(sign))
    return found


@pytest.mark.mocker
def test_doctor_finds_this_environment_fit_for_the_mocker() -> None:
    assert [one for one in _findings("mocker", 22999).values() if one.verdict == "FAIL"] == []


def test_doctor_names_each_missing_package_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "differences", lambda engines: {"nixl": ("1.4.1", None)})
    found = _only("cpu", "package nixl 1.4.1")
    assert found.verdict == "FAIL"
    assert found.cure == "serving-stack install --profile cpu"


def test_doctor_says_what_is_slow_without_amx_and_avx512_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(doctor, "_processor_flags", lambda: {"avx2", "avx512f"})
    found = _only("cpu", "processor")
    assert found.verdict == "warn"
    assert "slow backend" in found.what
    for fast in ({"avx512_bf16"}, {"avx512_bf16", "amx_tile", "amx_bf16"}):
        monkeypatch.setattr(doctor, "_processor_flags", lambda fast=fast: {"avx2", "avx512f", *fast})
        assert _only("cpu", "processor").verdict == "ok"


def test_doctor_counts_memory_by_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = profiles.load("cpu")
    need = {
        count: float(re.search(r"([\d.]+) GiB needed", " ".join(one.what for one in _of(profile, count)))[1])  # type: ignore[index]
        for count in (1, 3)
    }
    assert need[3] == pytest.approx(need[1] + 2 * doctor.WORKER_BYTES / (1 << 30), abs=0.11)


def _of(profile: profiles.Profile, prefill: int) -> list[doctor.Finding]:
    return list(doctor.examine(profiles.with_counts(profile, {"prefill": prefill}), "cpu", 8000))


def test_doctor_names_a_missing_system_library_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_loads", lambda soname: soname not in {"libnuma.so.1", "libibverbs.so.1"})
    found = _only("cpu", "library libnuma")
    assert (found.verdict, found.cure) == ("FAIL", "apt-get install libnuma1")


def test_doctor_says_what_the_second_tier_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(doctor, "_loads", lambda soname: soname != "libibverbs.so.1")
    found = _only("cpu", "second cache tier")
    assert (found.verdict, found.cure) == ("warn", "apt-get install libibverbs1")
    assert "libibverbs.so.1 not found" in found.what
    monkeypatch.setattr(doctor, "_loads", lambda soname: True)
    assert _only("cpu", "second cache tier").verdict == "ok"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = _only("cpu", "second cache tier")
    assert (found.verdict, found.cure) == ("warn", "serving-stack install --profile cpu")
    assert not [what for what in _findings("cpu-agg") if what.startswith("second cache tier")]


def test_doctor_names_who_holds_the_port() -> None:
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        (found,) = (one for what, one in _findings("mocker", port).items() if what.startswith(f"port {port}"))
    assert found.verdict == "FAIL"
    assert "process" in found.what
    assert "--port" in found.cure


def test_a_plugin_that_a_profile_wants_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "flashinfer-nvfp4-mla":
            raise metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(metadata, "version", version)
    (found,) = [one for one in _of(profiles.load("cpu-nvfp4"), 1) if one.what.startswith("plugin")]
    assert (found.verdict, found.what) == ("FAIL", "plugin flashinfer-nvfp4-mla: not installed")
    assert found.cure.startswith("pip install ./packages/flashinfer-nvfp4-mla")
    assert not [one for one in _of(profiles.load("cpu"), 1) if one.what.startswith("plugin")]
