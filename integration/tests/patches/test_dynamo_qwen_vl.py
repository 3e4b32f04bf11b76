# SPDX-License-Identifier: Apache-2.0
"""`dynamo/qwen-vl-late-import`, in the environment of the engines: needs ai-dynamo, vLLM and no torchvision.

The environment is only read. The one module under test is imported from a copy, as published or as patched.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serving_stack.patches import Contents, contents, load_all

MODULE = "dynamo.vllm.multimodal_utils.models.qwen"

#: Imports MODULE from the file argv[1], whoever asks for it.
OVERLAY = f"""
import importlib.abc, importlib.util, sys

class Overlay(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, sys.argv[1]) if name == {MODULE!r} else None

assert importlib.util.find_spec("torchvision") is None, "this test is about an environment without torchvision"
sys.meta_path.insert(0, Overlay())
"""

START = OVERLAY + "import dynamo.vllm.main\nprint('started')\n"

#: A stand-in for the transformers module that needs torchvision, so that the call itself can be looked at.
GRID = (
    OVERLAY
    + f"""
import sys, types
from PIL import Image

name = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
calls = []
def smart_resize(height, width, *, factor, min_pixels, max_pixels):
    calls.append((height, width, factor, min_pixels, max_pixels))
    return 56, 84
sys.modules[name] = types.ModuleType(name)
sys.modules[name].smart_resize = smart_resize
import {MODULE} as qwen

params = qwen.QwenGridParams(14, 2, 28, 100, 9000, 8, 8)
found = qwen.build_qwen_embedding_params({{"image": Image.new("RGB", (90, 60))}}, params)
print(found, calls)
"""
)


@pytest.fixture(scope="module")
def module() -> Contents:
    (patch,) = (patch for patch in load_all() if patch.name == "dynamo/qwen-vl-late-import")
    return contents(patch)[MODULE.replace(".", "/") + ".py"]


def run(script: str, content: bytes, folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "qwen.py"
    file.write_bytes(content)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return subprocess.run(
        [sys.executable, "-c", script, str(file)], env=environment, capture_output=True, text=True, check=False
    )


def test_published_dynamo_vllm_does_not_start(module: Contents, tmp_path: Path) -> None:
    """When this fails, upstream has been cured and the patch can go."""
    done = run(START, module.before, tmp_path)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("No module named 'torchvision'"), done.stderr


def test_patched_dynamo_vllm_starts(module: Contents, tmp_path: Path) -> None:
    done = run(START, module.after, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("started\n")


def test_patched_grid_equals_the_published_one(module: Contents, tmp_path: Path) -> None:
    outputs = {}
    for name, content in (("published", module.before), ("patched", module.after)):
        done = run(GRID, content, tmp_path)
        assert done.returncode == 0, done.stderr
        outputs[name] = done.stdout.splitlines()[-1]
    assert outputs["patched"] == outputs["published"]
    assert outputs["patched"] == (
        "{'image_grid_thw': [[1, 4, 6]], 'embeddings_shape': [6, 8]} [(60, 90, 28, 100, 9000)]"
    )
