# SPDX-License-Identifier: Apache-2.0
"""Weights are told apart by what their files hold, wherever they lie."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from vllm_blhnc_layout import _weights
from vllm_blhnc_layout._weights import sample

SIZE = 3 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of two files, each larger than what is read of it."""
    place = tmp_path / "model"
    place.mkdir()
    for number in range(2):
        head = json.dumps({"layer": {"dtype": "BF16", "shape": [SIZE // 2], "data_offsets": [0, SIZE]}}).encode()
        body = bytes((7 * at + number) % 251 for at in range(4096)) * (SIZE // 4096)
        (place / f"model-{number}.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + body)
    (place / "training_args.bin").write_bytes(b"is not loaded beside safetensors")
    return place


def test_a_copy_is_the_same_and_so_is_a_second_look(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    (copy / "training_args.bin").unlink()
    (copy / "config.json").write_text("{}")
    assert sample(str(folder)) == sample(str(folder)) == sample(str(copy))
    assert str(sample(str(folder))).startswith("sample:")


@pytest.mark.parametrize("at", [8, 20, 60, SIZE // 5, SIZE // 2, SIZE - 1])
def test_a_piece_that_was_trained_on_makes_another(folder: Path, at: int) -> None:
    before = sample(str(folder))
    file = folder / "model-1.safetensors"
    content = bytearray(file.read_bytes())
    piece = SIZE // (_weights.SAMPLES - 1)  # a tensor as long as the distance of two samples is seen wherever it lies
    for index in range(at, min(at + piece, len(content))):
        content[index] ^= 1
    file.write_bytes(content)
    assert sample(str(folder)) != before


def test_another_name_another_size_another_number_of_files(folder: Path) -> None:
    seen = {sample(str(folder))}
    (folder / "model-1.safetensors").rename(folder / "model-2.safetensors")
    seen.add(sample(str(folder)))
    with (folder / "model-2.safetensors").open("ab") as file:
        file.write(b"\0")
    seen.add(sample(str(folder)))
    (folder / "model-2.safetensors").unlink()
    seen.add(sample(str(folder)))
    assert len(seen) == 4


def test_other_formats_a_single_file_and_files_shorter_than_a_piece(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"short")
    seen = {sample(str(tmp_path))}
    (tmp_path / "model.gguf").write_bytes(b"")
    assert sample(str(tmp_path)) in seen, "gguf is not loaded beside PyTorch's files"
    seen.add(sample(str(tmp_path / "model.gguf")))
    assert len(seen - {None}) == 2


def test_no_files_no_sample(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sample(str(tmp_path)) is None

    def refused(*args: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "open", refused)
    assert sample(str(folder)) is None
