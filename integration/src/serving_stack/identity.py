# SPDX-License-Identifier: Apache-2.0
"""The identity of cached bytes: what must be equal before a block saved by one worker may be loaded by another.

A shared store finds blocks by key, and an engine's own keys say little: vLLM's hold the last part of the model's path,
ranks, and a hash of tokens. `Identity` says what the bytes are; its `prefix` goes before every key, so that two that
differ never share one. It is made of

- the weights: the Hub's revision where the files lie in the Hub's cache, else SHA-256 over the files' contents;
- whatever else decides the bytes (`facts`): dtypes, layout, geometry, configuration, versions. Any difference counts,
  also one that would have been harmless: a miss costs a prefill, a false hit a wrong answer.

Nothing here imports an engine.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import StackError
from .state import home

#: Files that hold weights, in the order engines look for them: what comes first is taken, the rest left alone.
WEIGHTS = (("*.safetensors",), ("*.bin", "*.pt", "*.pth"), ("*.gguf",))
#: What a trainer leaves beside them.
NO_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|rng_state).*\.(bin|pt|pth)")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """What cached bytes are."""

    weights: str  #: from `weights_identity`, or whatever else names the weights
    cache_dtype: str  #: of one element in the cache
    layout: str  #: order of the cache's dimensions, in the engine's words
    facts: Mapping[str, Any]  #: everything else that decides the bytes; values as JSON, others by `repr`

    @property
    def digest(self) -> str:
        """SHA-256 over all of it, hexadecimal."""
        everything = [self.weights, self.cache_dtype, self.layout, dict(self.facts)]
        return hashlib.sha256(json.dumps(everything, sort_keys=True, default=repr).encode()).hexdigest()

    @property
    def prefix(self) -> str:
        """What keys begin with: `WEIGHTS-DTYPE-LAYOUT-DIGEST`, readable in a store; the last part alone decides."""
        parts = (self.weights.rsplit(":", 1)[-1][:12], self.cache_dtype, self.layout, self.digest[:24])
        return "-".join(re.sub(r"[^\w.]", "_", part) for part in parts)


def weights_identity(folder: Path, log: logging.Logger = _logger) -> str:
    """Return `hub:REVISION` or `sha256:DIGEST` of the weights in `folder`.

    Contents are read in parallel, and once where the state directory can be written: the result is kept there until a
    file's inode, size or time of change differs. Processes that ask at the same time wait for the first.

    Args:
        folder: The model's.
        log: Is told what takes a while; an engine shows its own loggers alone.

    Raises:
        StackError: no weights there, or a file cannot be read.
    """
    try:
        folder = folder.resolve()
        # The Hub's cache holds one folder per revision, of links to files named by their content.
        if re.fullmatch(r"[0-9a-f]{40}", folder.name) and folder.parent.name == "snapshots":
            return f"hub:{folder.name}"
        files = _files(folder)
        stats = [os.stat(file) for file in files]
        state = [
            [file.name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
            for file, stat in zip(files, stats, strict=True)
        ]
        with _record(folder, log) as record:
            if record.get("state") != state:
                size = sum(stat.st_size for stat in stats)
                log.info("%s: reading %.1f GiB of weights for their identity", folder, size / (1 << 30))
                with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                    digests = list(pool.map(_digest, files))
                content = [[file.name, digest] for file, digest in zip(files, digests, strict=True)]
                record.update(state=state, digest=hashlib.sha256(json.dumps(content).encode()).hexdigest())
            return f"sha256:{record['digest']}"
    except OSError as error:
        raise StackError(f"{folder}: the weights cannot be read: {error}") from error


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise StackError(f"{folder}: no such folder, so no weights to tell apart")
    for patterns in WEIGHTS:
        found = [file for pattern in patterns for file in folder.glob(pattern) if not NO_WEIGHTS.fullmatch(file.name)]
        if found:
            return sorted(found)
    raise StackError(f"{folder}: no weights there ({', '.join(one for patterns in WEIGHTS for one in patterns)})")


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as content:
        while block := content.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def _record(folder: Path, log: logging.Logger) -> Iterator[dict[str, Any]]:
    """Lend what is remembered of a folder, locked, and write back what was made of it; where that cannot be, forget."""
    record: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        try:
            (home() / "weights").mkdir(parents=True, exist_ok=True)
            name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]
            file = stack.enter_context((home() / "weights" / f"{name}.json").open("a+", encoding="utf-8"))
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            with contextlib.suppress(ValueError):  # a write that was killed half way
                record.update(json.load(file))
        except (OSError, RuntimeError, StackError) as error:  # no disk, no locks on it, no home
            log.info("nothing is remembered of %s: %s", folder, error)
            yield record
            return
        known = dict(record)
        yield record
        if record != known:
            with contextlib.suppress(OSError):
                file.truncate(0)
                json.dump(record, file)
                file.flush()
