# SPDX-License-Identifier: Apache-2.0
"""How long a step of a simulated engine takes: from a profile, a table, or the models of Dynamo's own mocker.

All of them price a step as Dynamo's mocker does: the prefill part of a step and its decode part are priced apart and
added. `PolynomialTiming`, `TableTiming` and `AisTiming` also reduce the chunks of a step as the mocker does, to their
number and the mean of their lengths and prefixes in whole tokens, so that a simulation agrees with `dynamo.replay`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import combinations
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .._profile import DecodeCost, Profile, ProfileError, StepCost, TierCost
from .._types import ExternalTier

__all__ = [
    "AisTiming",
    "PolynomialTiming",
    "ProfileErrors",
    "ProfileTiming",
    "TableTiming",
    "Timing",
    "TimingError",
    "fit_profile",
    "profile_errors",
]

_Floats = npt.NDArray[np.float64]

#: The build of AISimulate that carries the data of the shipped profiles and speaks the schema of Dynamo 1.6.1. It needs
#: Python 3.11; of what it requires, timing needs nothing.
AIS_BUILD = "0.13.0.dev202610130000000070"
#: The mocker lets no step that yields tokens take less (milliseconds).
_LEAST_DECODE_MS = 1.0


class TimingError(ValueError):
    """A timing that cannot be used; the message names the file, the array or the setting, and what to do."""


class Timing(Protocol):
    """How long one step takes."""

    def step_s(self, prefills: Sequence[tuple[int, int]], decodes: int, resident: int) -> float:
        """Return the seconds of one step.

        Args:
            prefills: For each chunk of a prompt that is read: its new tokens, and those before it.
            decodes: Sequences that get a token.
            resident: Tokens of KV of these sequences in all, before the step.
        """
        ...

    def decode_run_s(self, decodes: int, resident: int, steps: int) -> float:
        """Return the seconds of `steps` steps of `decodes` sequences alone; each step adds a token to each of them."""
        ...


class ProfileTiming:
    """Exactly what a profile says."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def step_s(self, prefills: Sequence[tuple[int, int]], decodes: int, resident: int) -> float:
        """See `Timing`. The chunks of a step share its base."""
        seconds = self.profile.decode_step_s(decodes, resident)
        if prefills:
            cost = self.profile.prefill
            seconds += cost.base_s
            for new, cached in prefills:
                seconds += new * (cost.token_s + cost.pair_s * (cached + 0.5 * new))
        return seconds

    def decode_run_s(self, decodes: int, resident: int, steps: int) -> float:
        """See `Timing`; in closed form."""
        if decodes <= 0 or steps <= 0:
            return 0.0
        cost = self.profile.decode
        tokens = steps * resident + decodes * (steps * (steps - 1) // 2)
        return steps * (cost.base_s + cost.sequence_s * decodes) + cost.token_s * tokens


class PolynomialTiming:
    """The default of Dynamo's mocker, two polynomials in milliseconds (`perf_model.rs` of ai-dynamo 1.6.1's engine).

    Prefill of t new tokens: 4.209989e-07 t^2 + 1.518344e-02 t + 16.50142, whatever was cached before them. Decode at a
    share u <= 1 of the capacity in use: -25.74 u^2 + 54.01 u + 5.74.

    Args:
        capacity_tokens: Tokens of KV that the rank holds.
    """

    def __init__(self, capacity_tokens: int) -> None:
        if capacity_tokens < 1:
            raise ValueError(f"capacity_tokens must be at least 1, not {capacity_tokens!r}")
        self.capacity_tokens = capacity_tokens

    def step_s(self, prefills: Sequence[tuple[int, int]], decodes: int, resident: int) -> float:
        """See `Timing`."""
        seconds = 0.0
        if prefills:
            count, length, prefix = _reduce(prefills)
            tokens = count * (length - prefix)
            if tokens > 0:
                seconds = (4.209989e-07 * tokens * tokens + 1.518344e-02 * tokens + 16.50142) * 1e-3
        if decodes > 0:
            used = min(resident / self.capacity_tokens, 1.0)
            seconds += (-25.74 * used * used + 54.01 * used + 5.74) * 1e-3
        return seconds

    def decode_run_s(self, decodes: int, resident: int, steps: int) -> float:
        """See `Timing`; in closed form."""
        if decodes <= 0 or steps <= 0:
            return 0.0
        # Steps before the capacity is full; in the others all of it counts as used.
        rising = min(max(-(-(self.capacity_tokens - resident) // decodes), 0), steps)
        first, each = resident / self.capacity_tokens, decodes / self.capacity_tokens
        ones, twos = rising * (rising - 1) / 2, rising * (rising - 1) * (2 * rising - 1) / 6
        used = rising * first + each * ones
        squares = rising * first * first + 2 * first * each * ones + each * each * twos
        full = steps - rising
        return (5.74 * steps + 54.01 * (used + full) - 25.74 * (squares + full)) * 1e-3


class TableTiming:
    """Measured times, in the format of the mocker's `planner_profile_data` (an NPZ file).

    Prefill is interpolated over the new tokens of a step, decode bilinearly over its tokens of KV and their mean per
    sequence in whole tokens. Outside the table both go on as at its rim. A step that yields tokens takes at least 1 ms.

    Args:
        path: A file with the arrays `prefill_isl` and `prefill_ttft_ms` (n), `decode_active_kv_tokens` (a),
            `decode_context_length` (c) and `decode_itl` (a, c; milliseconds). Axes rise and hold at least two points.

    Raises:
        TimingError: the file cannot be read, or an array is missing, of the wrong shape or order, or not finite.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        name = os.fspath(path)
        shapes = {
            "prefill_isl": 1,
            "prefill_ttft_ms": 1,
            "decode_active_kv_tokens": 1,
            "decode_context_length": 1,
            "decode_itl": 2,
        }
        arrays: dict[str, _Floats] = {}
        try:
            with np.load(name, allow_pickle=False) as found:
                for key, dimensions in shapes.items():
                    if key not in found:
                        raise TimingError(f"{name}: there is no array {key}")
                    array = np.asarray(found[key], dtype=np.float64)
                    if array.ndim != dimensions or not np.isfinite(array).all():
                        raise TimingError(f"{name}: {key} must be finite and of {dimensions} dimensions: {array.shape}")
                    arrays[key] = array
        except TimingError:
            raise
        except OSError as error:
            raise TimingError(f"{name}: {error.strerror or error}") from None
        except Exception:
            raise TimingError(f"{name}: not an NPZ file of numbers") from None
        for key in ("prefill_isl", "decode_active_kv_tokens", "decode_context_length"):
            if len(arrays[key]) < 2 or not (np.diff(arrays[key]) > 0).all():
                raise TimingError(f"{name}: {key} must hold at least two values that rise")
        lengths, self._prefill_ms = arrays["prefill_isl"], arrays["prefill_ttft_ms"]
        active, context, self._decode_ms = (
            arrays["decode_active_kv_tokens"],
            arrays["decode_context_length"],
            arrays["decode_itl"],
        )
        if lengths.shape != self._prefill_ms.shape:
            raise TimingError(f"{name}: prefill_ttft_ms has {len(self._prefill_ms)} values for {len(lengths)} lengths")
        if self._decode_ms.shape != (len(active), len(context)):
            raise TimingError(f"{name}: decode_itl must be {(len(active), len(context))}, not {self._decode_ms.shape}")
        self._lengths, self._active, self._context = lengths, active, context

    def step_s(self, prefills: Sequence[tuple[int, int]], decodes: int, resident: int) -> float:
        """See `Timing`."""
        seconds = 0.0
        if prefills:
            count, length, prefix = _reduce(prefills)
            tokens = count * (length - prefix)
            if tokens > 0:
                cell, part = _cell(self._lengths, np.float64(tokens))
                low, high = self._prefill_ms[cell], self._prefill_ms[cell + 1]
                seconds = max(float(low + part * (high - low)), 0.0) * 1e-3
        if decodes > 0:
            seconds += float(self._itl_ms(np.float64(resident), np.float64(resident // decodes))) * 1e-3
        return seconds

    def decode_run_s(self, decodes: int, resident: int, steps: int) -> float:
        """See `Timing`."""
        if decodes <= 0 or steps <= 0:
            return 0.0
        grown = np.arange(steps)
        return float(self._itl_ms(resident + decodes * grown, resident // decodes + grown).sum()) * 1e-3

    def _itl_ms(self, active: Any, context: Any) -> Any:
        row, across = _cell(self._active, active)
        column, along = _cell(self._context, context)
        table = self._decode_ms
        low = table[row, column] * (1 - along) + table[row, column + 1] * along
        high = table[row + 1, column] * (1 - along) + table[row + 1, column + 1] * along
        return np.maximum(low * (1 - across) + high * across, _LEAST_DECODE_MS)


class AisTiming:
    """AISimulate's model of an engine, as Dynamo's mocker asks it (`timing_model: {type: external, provider: ais}`).

    Prefill is asked for as it is. Decode of each batch size is asked for at every 64th length and interpolated between
    (on GB200 within 0.2 %, 0.01 % in the mean), so that long runs are cheap. What was asked once is remembered.

    Args:
        model: The model's name on Hugging Face; its configuration comes with AISimulate.
        system: The machine, such as `gb200`.
        backend: `vllm`, `sglang` or `trtllm`.
        config: Other fields of AISimulate's `ForwardPassPerfModelConfig`: `tp`, `attention_dp`, `moe_ep_size`,
            `moe_tp_size`, `backend_version` and so on. With `attention_dp`, times are those of one rank among equally
            busy ones.

    Raises:
        TimingError: AISimulate is not installed, or has no data for the combination.
    """

    _GRID = 64

    def __init__(self, model: str, system: str = "gb200", backend: str = "vllm", **config: Any) -> None:
        try:
            sdk = import_module("aisimulate_core.sdk")
        except ImportError as error:
            raise TimingError(
                f"timing from AISimulate needs its package ({error}), of the build that carries data (Python "
                f"3.11 or later): pip install --no-deps aisimulate=={AIS_BUILD}"
            ) from error
        asked = {"model": model, "system": system, "backend": backend, "worker_type": "aggregated", **config}
        try:
            self._model: Any = sdk.RustForwardPassPerfModel.best_available(asked)
            found = self._model.diagnostics()
        except Exception as error:
            raise TimingError(f"AISimulate has no timing for {asked}: {error}") from error
        if found["readiness"] != "ready":
            raise TimingError(f"AISimulate has no data for {asked}: {found.get('last_warning') or found['readiness']}")
        resolved = (found.get("provenance") or {}).get("config", asked)
        #: What it was asked for, with the version of the backend that was measured.
        self.config: dict[str, Any] = asked | {"backend_version": resolved.get("backend_version")}
        self._prefills: dict[tuple[int, int, int], float] = {}
        self._decodes: dict[tuple[int, int], float] = {}

    def step_s(self, prefills: Sequence[tuple[int, int]], decodes: int, resident: int) -> float:
        """See `Timing`."""
        seconds = 0.0
        if prefills:
            reduced = _reduce(prefills)
            if reduced[1] > reduced[2]:
                known = self._prefills.get(reduced)
                if known is None:
                    known = max(self._ask(self._model.predict_prefill_latency, *reduced), 0.0) * 1e-3
                    self._prefills[reduced] = known
                seconds = known
        if decodes > 0:
            seconds += self._decode_s(decodes, resident // decodes)
        return seconds

    def decode_run_s(self, decodes: int, resident: int, steps: int) -> float:
        """See `Timing`; in closed form between the lengths that are asked for."""
        if decodes <= 0 or steps <= 0:
            return 0.0
        context, end, seconds = resident // decodes, resident // decodes + steps, 0.0
        while context < end:
            stop = min(end, context - context % self._GRID + self._GRID)
            # The times within a cell lie on a line: their sum is their number times the mean of the first and last.
            ends = self._decode_s(decodes, context) + self._decode_s(decodes, stop - 1)
            seconds += 0.5 * (stop - context) * ends
            context = stop
        return seconds

    def _decode_s(self, decodes: int, context: int) -> float:
        cell, beyond = divmod(context, self._GRID)
        low = self._grid_s(decodes, cell)
        return low + (self._grid_s(decodes, cell + 1) - low) * (beyond / self._GRID) if beyond else low

    def _grid_s(self, decodes: int, cell: int) -> float:
        known = self._decodes.get((decodes, cell))
        if known is None:
            asked = {"batch_size": decodes, "input_tokens": cell * self._GRID, "output_tokens": 2, "prefill": False}
            known = max(self._ask(self._model.static_phase_latency, **asked), _LEAST_DECODE_MS) * 1e-3
            self._decodes[decodes, cell] = known
        return known

    def _ask(self, what: Callable[..., float], *args: int, **kwargs: Any) -> float:
        try:
            milliseconds = what(*args, **kwargs)
        except Exception as error:
            raise TimingError(f"AISimulate has no time for {args or kwargs} of {self.config}: {error}") from error
        if not math.isfinite(milliseconds):
            raise TimingError(f"AISimulate says {milliseconds} for {args or kwargs} of {self.config}")
        return milliseconds


class ProfileErrors(NamedTuple):
    """How far a profile is from a timing: the errors' sum as a share of the time's, and the largest relative error."""

    prefill: float
    prefill_most: float
    decode: float
    decode_most: float

    def __str__(self) -> str:
        return (
            f"prefill steps off by {self.prefill:.1%} of their time, one by {self.prefill_most:.1%} at most; "
            f"decode steps by {self.decode:.1%}, one by {self.decode_most:.1%}"
        )


def fit_profile(
    timing: Timing,
    *,
    name: str,
    source: str,
    transfer: TierCost,
    tiers: Mapping[ExternalTier, TierCost],
    chunk_tokens: int = 8192,
    context_tokens: int = 131_072,
    capacity_tokens: int = 1_000_000,
    sequences: int = 256,
) -> Profile:
    """Fit the coefficients of a profile to a timing: least squares of error over time, no coefficient below 0.

    Prefill is fitted to steps of 128 to `chunk_tokens` new tokens after 0 to `context_tokens` others, decode to steps
    of 1 to `sequences` sequences of 512 to `context_tokens` tokens that fit into `capacity_tokens`. `source` is
    completed by the errors that remain (`profile_errors`). Raises TimingError where no profile fits.
    """
    prefill_points, decode_points = _points(chunk_tokens, context_tokens, capacity_tokens, sequences)
    prefill_s = [timing.step_s([point], 0, 0) for point in prefill_points]
    decode_s = [timing.step_s([], *point) for point in decode_points]
    if not (any(prefill_s) and any(decode_s)):
        raise TimingError("a timing whose steps take no time has no profile")
    prefill = _fit([(1.0, new, new * (cached + 0.5 * new)) for new, cached in prefill_points], prefill_s)
    decode = _fit([(1.0, batch, resident) for batch, resident in decode_points], decode_s)
    try:
        fitted = Profile(name, "", StepCost(*prefill), DecodeCost(*decode), transfer, dict(tiers))
    except ProfileError as error:
        raise TimingError(f"no profile fits this timing: {error}") from error
    errors = profile_errors(
        fitted,
        timing,
        chunk_tokens=chunk_tokens,
        context_tokens=context_tokens,
        capacity_tokens=capacity_tokens,
        sequences=sequences,
    )
    return Profile(name, f"{source} Fit: {errors}.", fitted.prefill, fitted.decode, transfer, dict(tiers))


def profile_errors(
    profile: Profile,
    timing: Timing,
    *,
    chunk_tokens: int = 8192,
    context_tokens: int = 131_072,
    capacity_tokens: int = 1_000_000,
    sequences: int = 256,
) -> ProfileErrors:
    """Return how far `profile` is from `timing` at the points that `fit_profile` asks for."""
    prefill_points, decode_points = _points(chunk_tokens, context_tokens, capacity_tokens, sequences)
    prefill = [
        (profile.prefill_s(new, cached, chunk_tokens), timing.step_s([(new, cached)], 0, 0))
        for new, cached in prefill_points
    ]
    decode = [(profile.decode_step_s(*point), timing.step_s([], *point)) for point in decode_points]
    return ProfileErrors(*_errors(prefill), *_errors(decode))


def _errors(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return, of (estimate, truth), the errors' sum over the truths', and the largest relative error.

    Points that take no time, as beyond the rim of a table, count in neither: nothing is relative to 0.
    """
    pairs = [pair for pair in pairs if pair[1] > 0.0]
    errors = [abs(estimate - truth) for estimate, truth in pairs]
    whole = sum(truth for _, truth in pairs)
    return sum(errors) / whole, max(error / truth for error, (_, truth) in zip(errors, pairs, strict=True))


def _points(
    chunk_tokens: int, context_tokens: int, capacity_tokens: int, sequences: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return prefill steps (new, cached) and decode steps (sequences, resident), each about evenly on a log scale."""
    if chunk_tokens < 128 or context_tokens < 512 or capacity_tokens < 512 or sequences < 1:
        raise ValueError(
            "a fit needs chunk_tokens of at least 128, context_tokens and capacity_tokens of at least 512 and "
            f"sequences of at least 1, not {(chunk_tokens, context_tokens, capacity_tokens, sequences)}"
        )
    lengths = _doubling(128, chunk_tokens)
    contexts = _doubling(512, context_tokens)
    prefill = [(new, cached) for new in lengths for cached in (0, *contexts)]
    decode = [
        (batch, batch * context)
        for batch in _doubling(1, sequences)
        for context in contexts
        if batch * context <= capacity_tokens
    ]
    return prefill, decode


def _doubling(first: int, last: int) -> list[int]:
    """Return `first` times powers of two below `last`, and `last`."""
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return [*found, last]


def _fit(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the coefficients of at least 0 with the least sum of squared errors over the time: long steps count more.

    The best of the fits of each subset of the features whose coefficients all came out right: there are few features.
    """
    target = np.sqrt(np.asarray(seconds, dtype=np.float64))
    weighted = np.asarray(features, dtype=np.float64)[target > 0.0]
    target = target[target > 0.0]
    weighted /= target[:, None]
    scale = weighted.max(axis=0)
    weighted /= scale
    best, least = np.zeros(len(scale)), math.inf
    for size in range(1, len(scale) + 1):
        for chosen in combinations(range(len(scale)), size):
            columns = list(chosen)
            found = np.linalg.lstsq(weighted[:, columns], target, rcond=None)[0]
            error = float(((weighted[:, columns] @ found - target) ** 2).sum())
            if (found >= 0.0).all() and error < least:
                least, best = error, np.zeros(len(scale))
                best[columns] = found / scale[columns]
    return [float(f"{value:.6g}") for value in best]


def _cell(axis: _Floats, value: Any) -> tuple[Any, Any]:
    """Return the interval of `axis` that is used for each value, and how far along it lies (beyond 0..1 outside)."""
    cell = np.clip(np.searchsorted(axis, value, side="right") - 1, 0, len(axis) - 2)
    return cell, (value - axis[cell]) / (axis[cell + 1] - axis[cell])


def _reduce(prefills: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    """Return the chunks' number and the means of their ends and of their starts, in whole tokens like the mocker's."""
    count = len(prefills)
    prefix = sum(cached for _, cached in prefills)
    return count, (prefix + sum(new for new, _ in prefills)) // count, prefix // count
