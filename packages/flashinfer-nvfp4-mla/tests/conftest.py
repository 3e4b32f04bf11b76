# SPDX-License-Identifier: Apache-2.0
"""What the tests of the op share: the backends that work here, and a slow oracle that shares no code with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest


def _backends() -> list[str]:
    try:
        from flashinfer_nvfp4_mla import _cpu
    except ImportError:
        return ["reference"]
    return ["reference", "cpu"] if _cpu.available() is None else ["reference"]


@contextmanager
def _single() -> Iterator[None]:
    """Let torch work in one thread: on small tensors several mostly wait, on a busy machine for long."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let torch work in one thread."""
    with _single():
        yield


@pytest.fixture(scope="module", params=_backends())
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return each backend that works on this machine in turn."""
    with _single() if request.param == "reference" else nullcontext():
        yield request.param


def e4m3(code: int) -> float:
    """Decode one e4m3 number: sign, four bits of exponent, three of mantissa; all ones are NaN."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -value if code & 128 else value


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decoded(row: Any) -> Any:
    """Return the 576 values of one row's bytes, in float64."""
    import numpy as np

    numbers = [int(byte) for byte in row]
    nibbles = [nibble for byte in numbers[:256] for nibble in (byte & 15, byte >> 4)]
    latent = [
        (-1.0 if nibble & 8 else 1.0) * _E2M1[nibble & 7] * e4m3(numbers[320 + 8 * (group % 4) + group // 4])
        for group in range(32)
        for nibble in nibbles[16 * group : 16 * group + 16]
    ]
    return np.array(latent + [e4m3(byte) for byte in numbers[256:320]])


def attended(
    query: Any, cache: Any, indices: Any, lengths: Any, bmm1_scale: float, bmm2_scale: float, base2: bool
) -> tuple[Any, Any]:
    """Return output and LSE in float64, from tensors as the op takes them, row by row."""
    import numpy as np

    bytes_of, kept = cache.numpy(), {}
    leading = cache.shape[:-1]
    q = query.double().numpy()
    tokens, heads, _ = q.shape
    out, lse = np.zeros((tokens, heads, 512)), np.full((tokens, heads), -np.inf)
    for token in range(tokens):
        ids = indices[token].tolist()
        if lengths is not None:
            ids = ids[: max(0, int(lengths[token]))]
        ids = [id_ for id_ in ids if 0 <= id_ < leading.numel()]
        for id_ in ids:
            if id_ not in kept:
                kept[id_] = decoded(bytes_of[np.unravel_index(id_, leading)])
        if not ids:
            continue
        rows = np.stack([kept[id_] for id_ in ids])
        score = bmm1_scale * (q[token] @ rows.T)
        highest = score.max(-1, keepdims=True)
        weight = np.exp(score - highest)
        total = weight.sum(-1, keepdims=True)
        out[token] = bmm2_scale * (weight / total) @ rows[:, :512]
        lse[token] = (highest + np.log(total))[:, 0] / (math.log(2) if base2 else 1)
    return out, lse


@pytest.fixture(scope="session")
def oracle() -> Callable[..., tuple[Any, Any]]:
    """Return `attended`."""
    return attended


@pytest.fixture(scope="session")
def decoded_row() -> Callable[[Any], Any]:
    """Return `decoded`."""
    return decoded


@pytest.fixture(scope="session")
def close() -> Callable[..., None]:
    """Return what compares a result with the oracle's, by the bar per token and head."""

    def compare(out: Any, expected: Any, lse: Any = None, expected_lse: Any = None) -> None:
        import numpy as np
        import torch

        bar = 2e-3 if out.dtype == torch.float32 else 3e-3
        error = np.linalg.norm(out.double().numpy() - expected, axis=-1)
        assert (error <= bar * np.linalg.norm(expected, axis=-1) + 1e-30).all(), error.max()
        if lse is not None:
            got = lse.double().numpy()
            empty = np.isinf(expected_lse)
            assert (got[empty] == -np.inf).all()
            assert (np.abs(got[~empty] - expected_lse[~empty]) <= 1e-3).all()

    return compare
