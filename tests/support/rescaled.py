# SPDX-License-Identifier: Apache-2.0
"""A model that answers as the tiny one does, with latents of other sizes: as real models have, whose layers differ."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["EXPONENTS", "rescaled"]

#: By which power of two the latents of each layer are scaled.
EXPONENTS = (-6, 2, 0, -3)


def rescaled(model: Path, folder: Path) -> Path:
    """Copy a model into `folder`, with a power of two moved from each layer's up-projection into its latent norm."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for layer, exponent in enumerate(EXPONENTS):
        name = f"model.layers.{layer}.self_attn"
        tensors[f"{name}.kv_a_layernorm.weight"] *= 2.0**exponent
        tensors[f"{name}.kv_b_proj.weight"] *= 2.0**-exponent
    save_file(tensors, file, {"format": "pt"})
    return folder
