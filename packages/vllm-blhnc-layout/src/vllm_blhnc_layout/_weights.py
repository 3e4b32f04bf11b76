# SPDX-License-Identifier: Apache-2.0
"""Which weights an engine has loaded, as far as a sample of their files tells.

Two engines that were given one path or one name need not hold the same weights: a folder was trained on, a branch has
moved. What is read of each file is its name, its size, its head (in safetensors: names, types and shapes of all
tensors) and `SAMPLES` pieces from end to end, so that a large model takes no longer to look at than it has files.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

#: Files that hold weights, in the order in which engines look for them: what is found first is what is loaded.
KINDS = (("*.safetensors",), ("*.bin", "*.pt", "*.pth"), ("*.gguf",))
#: Pieces that are read of a file, and how long one is; the head may be longer.
SAMPLES, PIECE, HEAD = 16, 4096, 1 << 20


def sample(model: str, revision: str | None = None, cache: str | None = None) -> str | None:
    """Return `sample:DIGEST` of a model's weights; None where its files are not on this machine.

    Args:
        model: A folder, a file, or a name on the Hub, whose cache is then looked at.
        revision: Of a name on the Hub.
        cache: The Hub's cache, where it is not at its usual place.
    """
    try:
        files = _files(model, revision, cache)
        digest = hashlib.sha256()
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as content:
                digest.update(content.read(min(HEAD, int.from_bytes(content.read(8), "little"))))
                for number in range(SAMPLES):
                    content.seek((size - PIECE) * number // (SAMPLES - 1) if size > PIECE else 0)
                    digest.update(content.read(PIECE))
    except (OSError, ValueError):  # also what the Hub's client raises for a name that is none, such as a URL
        return None
    return f"sample:{digest.hexdigest()[:32]}" if files else None


def _files(model: str, revision: str | None, cache: str | None) -> list[Path]:
    place = Path(model)
    if place.is_file():
        return [place]
    if not place.is_dir():
        from huggingface_hub import snapshot_download

        place = Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    for patterns in KINDS:
        found = sorted({file for pattern in patterns for file in place.glob(pattern)}, key=lambda file: file.name)
        if found:
            return found
    return []
