# SPDX-License-Identifier: Apache-2.0
"""The identity of cached bytes: equal where the bytes are, different where anything differs."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serving_stack import StackError, identity
from serving_stack.identity import Identity, weights_identity


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVING_STACK_HOME", str(tmp_path / "home"))


def _model(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / f"{name}.safetensors").write_bytes(content)
    (folder / "config.json").write_text(f'{{"folder": "{folder}"}}')
    return folder


def test_equal_weights_in_two_folders_are_one(tmp_path: Path) -> None:
    first, second = (_model(tmp_path / name / "m", a=b"one", b=b"two") for name in ("x", "y"))
    assert weights_identity(first) == weights_identity(second)
    assert re.fullmatch("sha256:[0-9a-f]{64}", weights_identity(first))


@pytest.mark.parametrize("files", [{"a": b"onf", "b": b"two"}, {"a": b"one"}, {"a": b"one", "c": b"two"}])
def test_other_contents_or_names_are_another(tmp_path: Path, files: dict[str, bytes]) -> None:
    first = _model(tmp_path / "x" / "m", a=b"one", b=b"two")
    assert weights_identity(first) != weights_identity(_model(tmp_path / "y" / "m", **files))


def test_a_file_replaced_by_one_of_the_same_size_and_time_is_noticed(tmp_path: Path) -> None:
    model = _model(tmp_path / "m", a=b"one")
    file = model / "a.safetensors"
    before, stat = weights_identity(model), file.stat()
    other = tmp_path / "other"
    other.write_bytes(b"onf")
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(file)
    assert weights_identity(model) != before


def test_contents_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(tmp_path / "m", a=b"one")
    first = weights_identity(model)
    monkeypatch.setattr(identity, "_digest", lambda file: pytest.fail(f"{file} was read again"))
    assert weights_identity(model) == first


def test_what_takes_a_while_is_told_to_the_callers_logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    log = logging.Logger("engine")
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    model = _model(tmp_path / "m", a=b"one")
    for _ in range(2):
        weights_identity(model, log)
    assert told == [f"{model}: reading 0.0 GiB of weights for their identity"]
    monkeypatch.setenv("SERVING_STACK_HOME", str(model / "config.json"))
    weights_identity(model, log)
    assert told[1].startswith(f"nothing is remembered of {model}")


def test_a_damaged_record_or_no_disk_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(tmp_path / "m", a=b"one")
    first = weights_identity(model)
    (record,) = (tmp_path / "home" / "weights").iterdir()
    record.write_text(record.read_text()[:20])
    assert weights_identity(model) == first
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SERVING_STACK_HOME", str(tmp_path / "file"))
    assert weights_identity(model) == first


def test_a_disk_without_locks_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*args: object) -> None:
        raise OSError(37, "No locks available")

    model = _model(tmp_path / "m", a=b"one")
    first = weights_identity(model)
    monkeypatch.setattr("fcntl.flock", no_locks)
    assert weights_identity(model) == first


def test_processes_at_once_agree(tmp_path: Path) -> None:
    model = _model(tmp_path / "m", a=os.urandom(1 << 20), b=os.urandom(1 << 20))
    script = (
        f"from pathlib import Path; from serving_stack.identity import *; print(weights_identity(Path({str(model)!r})))"
    )
    running = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert {process.communicate()[0].strip() for process in running} == {weights_identity(model)}


def test_a_revision_of_the_hub_names_itself(tmp_path: Path) -> None:
    revision = hashlib.sha1(b"x").hexdigest()
    folder = _model(tmp_path / "models--a--b" / "snapshots" / revision, a=b"one")
    (tmp_path / "link").symlink_to(folder)
    assert weights_identity(folder) == weights_identity(tmp_path / "link") == f"hub:{revision}"


def test_no_weights_and_no_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"/m: no weights there \(\*\.safetensors"):
        weights_identity(_model(tmp_path / "m"))
    with pytest.raises(StackError, match="nowhere: no such folder"):
        weights_identity(tmp_path / "nowhere")


def test_what_an_engine_does_not_load_makes_no_difference(tmp_path: Path) -> None:
    first, second, third = (_model(tmp_path / name / "m", a=b"one") for name in "xyz")
    (second / "training_args.bin").write_bytes(b"t")
    (second / "pytorch_model.bin").write_bytes(b"the same weights in another form")
    assert weights_identity(first) == weights_identity(second)
    (third / "a.safetensors").rename(third / "pytorch_model.bin")
    (third / "optimizer.pt").write_bytes(b"o")
    other = weights_identity(third)
    (third / "optimizer.pt").unlink()
    assert weights_identity(third) == other != weights_identity(first)


BASE = Identity("sha256:" + "ab" * 32, "bfloat16", "LBNHC", {"vllm": "0.31.0", "groups": [["l.0"], "spec"]})


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "sha256:" + "ab" * 31 + "ac"},
        {"cache_dtype": "fp8_e4m3"},
        {"layout": "BLHNC"},
        {"facts": {"vllm": "0.32.0", "groups": [["l.0"], "spec"]}},
        {"facts": {"vllm": "0.31.0", "groups": [["l.0"], "spec"], "folding": [1, 0]}},
        {"facts": {"vllm": "0.31.0", "groups": [["l.1"], "spec"]}},
    ],
)
def test_any_difference_is_another_prefix(change: dict[str, Any]) -> None:
    assert dataclasses.replace(BASE, **change).prefix != BASE.prefix


def test_the_prefix_says_what_the_bytes_are_and_splits_no_key() -> None:
    odd = dataclasses.replace(BASE, cache_dtype="fp8 e4m3/x@y")
    assert re.fullmatch(r"abababababab-bfloat16-LBNHC-[0-9a-f]{24}", BASE.prefix)
    assert re.fullmatch(r"[\w.-]+", odd.prefix)
    # The order of facts is no difference.
    assert dataclasses.replace(BASE, facts=dict(reversed(list(BASE.facts.items())))).prefix == BASE.prefix
