# SPDX-License-Identifier: Apache-2.0
"""Sparse-MLA decode over 352-byte rows in C++ (`csrc/`): the backend `cpu`.

One library holds a path for each instruction set, and the processor is asked at run time: AMX, AVX512-BF16 or AVX2,
elsewhere code that the compiler vectorises. A wheel brings the library; from a source tree it is compiled on first
use, which takes some seconds, and kept in the user's cache.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import _build

#: The paths, the slowest first.
ISAS = ("portable", "avx2", "avx512_bf16", "amx")
#: Names the path to take, for tests and comparisons; without it the fastest that the processor has.
ISA_VARIABLE = "FLASHINFER_NVFP4_MLA_ISA"


def available() -> str | None:
    """Return None if the kernel works here, else why not. The first call may compile it."""
    try:
        isa()
    except (ValueError, _build.BuildError) as error:
        return str(error)
    return None


def isas() -> tuple[str, ...]:
    """Return the paths that this processor has, the slowest first.

    Raises:
        BuildError: the library can be neither loaded nor compiled.
    """
    return _library()[1]


def isa() -> str:
    """Return the path that `decode` takes: the fastest, or the one that FLASHINFER_NVFP4_MLA_ISA names.

    Raises:
        ValueError: this variable names none, or one that the processor lacks.
        BuildError: the library can be neither loaded nor compiled.
    """
    wanted = os.environ.get(ISA_VARIABLE)
    if wanted and wanted not in ISAS:
        raise ValueError(f"{ISA_VARIABLE} is {wanted!r}, which is none of {', '.join(ISAS)}")
    found = isas()
    if wanted and wanted not in found:
        raise ValueError(f"{ISA_VARIABLE} is {wanted!r}, which this processor lacks: it has {', '.join(found)}")
    return wanted or found[-1]


def decode(
    query: Any,
    cache: Any,
    indices: Any,
    lengths: Any,
    bmm1_scale: float,
    bmm2_scale: float,
    out: Any,
    lse: Any,
    base2: bool,
) -> None:
    """Attend from each query token to the rows that were picked for it, on `torch.get_num_threads()` threads.

    What it computes, and from what, is what `_reference.decode` says; the caller has checked it. Tokens are shared out
    among threads, and a token's keys where there are fewer tokens than threads. In a process that was forked after the
    library was loaded all is done by one thread: the others do not live on in it.
    """
    threads = torch.get_num_threads()
    chosen = ISAS.index(isa())
    scales = float(bmm1_scale), float(bmm2_scale)
    _library()[0].decode(query, cache, indices, lengths, *scales, out, lse, base2, chosen, threads)


def _library() -> tuple[Any, tuple[str, ...]]:
    """Return the library and the paths that it and the processor have."""
    loaded = _load()
    if isinstance(loaded, str):
        raise _build.BuildError(loaded)
    return loaded


@functools.cache
def _load() -> tuple[Any, tuple[str, ...]] | str:
    """Do that, or return what is in the way: neither is tried twice. What a wheel brought may not load everywhere."""
    try:
        import tvm_ffi
    except ImportError as error:
        return f"apache-tvm-ffi is not installed: {error}"
    packaged = Path(__file__).with_name(_build.LIBRARY)
    failures = []
    ways: list[Callable[[], Path]] = [lambda: packaged, _build.compiled]
    for find in ways if packaged.exists() else ways[1:]:
        try:
            module = tvm_ffi.load_module(str(find()))
        except (OSError, RuntimeError) as error:  # a BuildError among them
            failures.append(str(error))
            continue
        found = int(module.supported())
        return module, tuple(name for bit, name in enumerate(ISAS) if found >> bit & 1)
    return "; ".join(failures)
