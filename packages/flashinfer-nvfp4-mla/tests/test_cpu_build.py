# SPDX-License-Identifier: Apache-2.0
"""Compiling the kernel: on first use into a cache, ahead of time into a wheel, for aarch64, and not at all."""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
import sys
import textwrap
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer_nvfp4_mla import _build, _cpu, nvfp4_sparse_mla_decode

PACKAGE = Path(__file__).parents[1]
ONE_KEY = """
    import torch
    from flashinfer_nvfp4_mla import _cpu, nvfp4_sparse_mla_decode
    rows = torch.zeros(3, 352, dtype=torch.uint8)
    rows[:, 320:], rows[1, :256] = 0x38, 0x22
    query, indices = torch.ones(1, 16, 576).bfloat16(), torch.ones(1, 1, dtype=torch.int32)
    out = nvfp4_sparse_mla_decode(query, rows, indices, 1.0, backend="cpu")
    assert (out == 1).all()
    print(_cpu.__file__)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a cache of one's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(_build.CACHE_VARIABLE, str(folder))
    return folder


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put something in the kernel's place that takes no time to compile."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "answer.cc").write_text('extern "C" __attribute__((visibility("default"))) int answer() { return 1; }\n')
    monkeypatch.setattr(_build, "SOURCES", folder)
    return folder


def answer(library: Path) -> Any:
    import ctypes

    return ctypes.CDLL(str(library)).answer()


def test_what_is_compiled_is_kept_and_compiled_again_after_a_change(cache: Path, sources: Path) -> None:
    first = _build.compiled()
    assert [first] == list(cache.iterdir())
    before = first.stat().st_mtime_ns
    assert _build.compiled() == first
    assert first.stat().st_mtime_ns == before
    (sources / "answer.cc").write_text((sources / "answer.cc").read_text().replace("1", "2"))
    second = _build.compiled()
    assert (answer(first), answer(second)) == (1, 2)
    assert _build.compiled(("-DFURTHER",)) not in (first, second)
    assert len(list(cache.iterdir())) == 3


def test_another_compiler_compiles_again(cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _build.compiled()
    wrapper = sources.parent / "other++"
    wrapper.write_text('#!/bin/sh\n[ "$1" = --version ] && echo other 1.0 && exit\nexec c++ "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    second = _build.compiled()
    assert second.name.rpartition("-")[0] != first.name.rpartition("-")[0]
    assert len(list(cache.iterdir())) == 2


def test_without_a_compiler_what_is_there_is_taken(cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _build.compiled()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert _build.compiled() == first
    with pytest.raises(_build.BuildError, match=r"'no-such-compiler' is not on PATH"):
        _build.compiled(("-DFURTHER",))
    assert list(cache.iterdir()) == [first]


@pytest.mark.parametrize("which", ["folder", "library"])
@pytest.mark.parametrize("how", ["writable by the group", "writable by others", "someone else's"])
def test_code_that_others_may_have_written_is_not_loaded(
    cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, which: str, how: str
) -> None:
    library = _build.compiled()
    assert cache.stat().st_mode & 0o7777 == 0o700
    path = cache if which == "folder" else library
    if how != "someone else's":
        path.chmod(0o770 if how == "writable by the group" else 0o702)
    elif os.geteuid() == 0:
        os.chown(path, 4321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
        path = cache  # all of it is another's now
    with pytest.raises(_build.BuildError, match=rf"other users may write to {path} \("):
        _build.compiled()
    assert library.exists()


def test_a_folder_that_others_may_write_to_is_not_compiled_in(cache: Path, sources: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(_build.BuildError, match=rf"other users may write to {cache} \("):
        _build.compiled()
    assert not list(cache.iterdir())


def test_what_is_compiled_is_taken_again_whatever_the_umask(cache: Path, sources: Path) -> None:
    before = os.umask(0)
    try:
        assert _build.compiled() == _build.compiled()
    finally:
        os.umask(before)


def test_a_broken_file_is_replaced(cache: Path, sources: Path) -> None:
    whole = _build.compiled()
    whole.write_bytes(whole.read_bytes()[:2000])
    left = cache / "build-of-a-process-that-was-killed"
    left.mkdir()
    again = _build.compiled()
    assert answer(again) == 1
    assert [again] == list(cache.iterdir())


def test_processes_that_ask_at_once_compile_once(cache: Path, sources: Path, tmp_path: Path) -> None:
    wrapper, log = tmp_path / "slow++", tmp_path / "log"
    wrapper.write_text(f'#!/bin/sh\n[ "$1" = --version ] || {{ echo run >> {log}; sleep 0.3; }}\nexec c++ "$@"\n')
    wrapper.chmod(0o755)
    script = f"""
        import importlib.util, pathlib
        spec = importlib.util.spec_from_file_location("_build", {str(PACKAGE / "src/flashinfer_nvfp4_mla/_build.py")!r})
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        build.SOURCES = pathlib.Path({str(sources)!r})
        print(build.compiled())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    environment = {**os.environ, "CXX": str(wrapper)}
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = {process.communicate(timeout=60)[0].strip() for process in running}
    assert said == {str(path) for path in cache.iterdir()}
    assert len(said) == 1
    assert log.read_text().split() == ["run", "run"]  # once to compile, once to link


@pytest.fixture
def fresh(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str | None]:
    """Return what asks whether the kernel is available, as in a process that has not asked yet."""
    monkeypatch.setattr(_cpu, "_load", _cpu._load.__wrapped__)
    return _cpu.available


def test_no_compiler_says_so_and_the_reference_is_taken(
    fresh: Callable[[], str | None], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert fresh() == "no C++ compiler: 'c++' is not on PATH. Install g++, or name a compiler in CXX"
    assert not cache.exists()
    query, rows = torch.ones(1, 1, 576).bfloat16(), torch.zeros(1, 352, dtype=torch.uint8)
    indices = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.warns(UserWarning, match=r"takes the backend 'reference'.*no C\+\+ compiler"):
        assert (nvfp4_sparse_mla_decode(query, rows, indices, 1.0) == 0).all()
    with pytest.raises(RuntimeError, match=r"backend 'cpu' does not work here: no C\+\+ compiler"):
        nvfp4_sparse_mla_decode(query, rows, indices, 1.0, backend="cpu")


def test_a_compiler_that_fails_says_so_and_leaves_nothing(
    fresh: Callable[[], str | None], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "false")
    assert str(fresh()).startswith("false cannot compile ")
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_says_so(fresh: Callable[[], str | None], cache: Path) -> None:
    cache.write_text("a file")
    assert str(fresh()).startswith("cannot write to the cache of compiled code (FLASHINFER_NVFP4_MLA_CACHE): ")


def test_a_library_of_the_wheel_that_does_not_load_is_compiled_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / _build.LIBRARY).write_bytes(b"for another machine")
    monkeypatch.setattr(_cpu, "__file__", str(tmp_path / "_cpu.py"))
    monkeypatch.setattr(_cpu, "_load", _cpu._load.__wrapped__)
    assert _cpu.available() is None
    monkeypatch.setenv(_build.CACHE_VARIABLE, str(tmp_path / "empty"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    said = str(_cpu.available())
    assert str(tmp_path / _build.LIBRARY) in said
    assert "no C++ compiler: 'no-such-compiler' is not on PATH" in said


def test_the_cache_lies_where_the_user_keeps_such_things(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_build.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert _build._cache() == Path("/somewhere/flashinfer-nvfp4-mla")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert _build._cache() == Path("/home/someone/.cache/flashinfer-nvfp4-mla")


@pytest.mark.parametrize(("compiler", "said"), [("false", "false cannot compile"), ("no-such", "no C++ compiler")])
def test_a_wheel_is_built_without_the_kernel_where_no_compiler_works(
    monkeypatch: pytest.MonkeyPatch, compiler: str, said: str
) -> None:
    interface = types.ModuleType("hatchling.builders.hooks.plugin.interface")  # a wheel's build brings the real one
    monkeypatch.setattr(interface, "BuildHookInterface", object, raising=False)
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    hook = runpy.run_path(str(PACKAGE / "hatch_build.py"))["CompiledKernel"]()
    warnings: list[str] = []
    hook.root, hook.target_name, hook.app = PACKAGE, "wheel", types.SimpleNamespace(display_warning=warnings.append)
    monkeypatch.setenv("CXX", compiler)
    data: dict[str, Any] = {"force_include": {}}
    hook.initialize("standard", data)
    hook.finalize("standard", data, "")
    assert data == {"force_include": {}}
    (warning,) = warnings
    assert warning.startswith(said)
    assert warning.endswith("This wheel compiles its kernel on first use")


def test_a_wheel_brings_the_kernel_and_needs_no_compiler(tmp_path: Path) -> None:
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*wheel, "-w", str(tmp_path), str(PACKAGE)], check=True)
    (made,) = tmp_path.glob("*.whl")
    assert made.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(made) as files:
        files.extractall(installed)
    environment = {**os.environ, "PYTHONPATH": str(installed), "PATH": "", _build.CACHE_VARIABLE: str(tmp_path / "no")}
    command = [sys.executable, "-c", textwrap.dedent(ONE_KEY)]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert said.strip() == str(installed / "flashinfer_nvfp4_mla" / "_cpu.py")
    assert not (tmp_path / "no").exists()


def test_the_kernel_compiles_and_computes_the_right_thing_on_aarch64(tmp_path: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("apt-get install g++-aarch64-linux-gnu qemu-user")
    from tvm_ffi.libinfo import include_paths

    binding = _build.SOURCES / "binding.cc"
    sources = [path for path in _build.SOURCES.glob("*.cc") if path != binding]
    program = tmp_path / "selftest"
    command = [compiler, "-std=c++17", *_build._FLAGS, f"-I{_build.SOURCES}"]
    headers = [f"-I{path}" for path in include_paths()]
    for what in (
        ["-fPIC", *headers, "-c", str(binding), "-o", str(tmp_path / "binding.o")],  # there is no tvm-ffi to link with
        ["-static", *map(str, sources), str(PACKAGE / "tests" / "selftest.cc"), "-o", str(program)],
    ):
        subprocess.run([*command, *what], check=True, capture_output=True)
    said = subprocess.run([emulator, str(program)], check=True, capture_output=True, text=True).stdout
    assert said.count("path 0") == 10
    assert "path 1" not in said
