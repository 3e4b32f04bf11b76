# SPDX-License-Identifier: Apache-2.0
"""`dynamo/qwen-vl-late-import`: needs ai-dynamo, vLLM and no torchvision."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

PATCH = "dynamo/qwen-vl-late-import"

START = """
import importlib.util
assert importlib.util.find_spec("torchvision") is None, "this test is about an environment without torchvision"
import dynamo.vllm.main
print("started")
"""

#: A stand-in for the transformers module that needs torchvision, so that the call itself can be looked at.
GRID = """
import sys, types
from PIL import Image

name = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
calls = []
def smart_resize(height, width, *, factor, min_pixels, max_pixels):
    calls.append((height, width, factor, min_pixels, max_pixels))
    return 56, 84
sys.modules[name] = types.ModuleType(name)
sys.modules[name].smart_resize = smart_resize
import dynamo.vllm.multimodal_utils.models.qwen as qwen

params = qwen.QwenGridParams(14, 2, 28, 100, 9000, 8, 8)
found = qwen.build_qwen_embedding_params({"image": Image.new("RGB", (90, 60))}, params)
print(found, calls)
"""


def test_published_dynamo_vllm_does_not_start(
    python: Callable[..., subprocess.CompletedProcess[str]], published: str
) -> None:
    """When this fails, upstream has been cured and the patch can go."""
    done = python(published + START)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("No module named 'torchvision'"), done.stderr


@pytest.mark.installed
def test_installed_dynamo_vllm_starts(python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = python(START)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("started\n")


def test_installed_grid_equals_the_published_one(
    python: Callable[..., subprocess.CompletedProcess[str]], published: str
) -> None:
    outputs = []
    for script in (GRID, published + GRID):
        done = python(script)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.splitlines()[-1])
    assert outputs == ["{'image_grid_thw': [[1, 4, 6]], 'embeddings_shape': [6, 8]} [(60, 90, 28, 100, 9000)]"] * 2
