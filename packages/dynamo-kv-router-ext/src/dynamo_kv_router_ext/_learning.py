# SPDX-License-Identifier: Apache-2.0
"""Estimates of what workers need, learned while they work.

An estimate is a shape times a slowness:

- the shape is the fleet's: a multiplier for each coefficient of the profile, learned from all workers;
- the slowness is the worker's own: one factor for its steps and one for its links.

Both are learned on a log scale by a Kalman filter: the innovation is the log of measured over expected, cut to a bound,
so that one stall of ten times moves an estimate by little, while what lasts is followed. The shape's filter linearises
in the log multipliers: the derivative of the log of a sum by the log of one term is that term's share. A measurement
first moves the shape, which soon settles, then the worker by what remains, so that the two do not both answer for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from ._profile import Profile
from ._types import ExternalTier, WorkerId

__all__ = ["Estimator"]

#: The log of the most that one measurement may differ from what is expected; the rest of it is disregarded.
_CUT = math.log(1.5)
#: Standard deviation of a measurement around its expectation, on a log scale.
_NOISE = 0.15
#: A multiplier of the shape stays within this factor of the profile, a slowness within this factor of 1.
_SHAPE_BOUND = math.log(8.0)
_SPEED_BOUND = math.log(4.0)
#: How uncertain a multiplier of the profile is at first (standard deviation on a log scale), and the variance by which
#: it wanders in a second: 5 % in five minutes.
_SHAPE_START = 0.7
_SHAPE_WANDER = 0.05**2 / 300.0
#: The same for a worker's slowness: 30 % in five minutes.
_SPEED_START = 0.35
_SPEED_WANDER = 0.3**2 / 300.0
#: A worker that was not measured for so many seconds comes back to the fleet's median, with this time constant.
_STALE_S = 60.0


class _Shape:
    """Log multipliers of the coefficients of one sum of products, learned from the logs of its values.

    Args:
        coefficients: The profile's, in order. One that is 0 stays 0.
    """

    __slots__ = ("_log", "_now", "_profile", "_var", "values")

    def __init__(self, coefficients: Sequence[float]) -> None:
        size = len(coefficients)
        self._profile = tuple(coefficients)
        self._log = [0.0] * size
        self._now = math.inf
        self._var = [[_SHAPE_START**2 if row == column else 0.0 for column in range(size)] for row in range(size)]
        #: The coefficients as they are believed to be now.
        self.values = list(coefficients)

    def expected(self, features: Sequence[float]) -> float:
        """Return the sum of coefficients times features."""
        return sum(value * feature for value, feature in zip(self.values, features, strict=True))

    def learn(self, features: Sequence[float], expected: float, innovation: float, now: float) -> float:
        """Move towards a measurement whose log is `innovation` above that of `expected(features)`.

        Return by how much the log of what is expected has moved.
        """
        shares = [value * feature / expected for value, feature in zip(self.values, features, strict=True)]
        size = range(len(shares))
        wander = max(now - self._now, 0.0) * _SHAPE_WANDER
        self._now = now
        variances = self._var
        for index in size:
            variances[index][index] = min(variances[index][index] + wander, _SHAPE_START**2)
        seen = [sum(variances[row][column] * shares[column] for column in size) for row in size]
        spread = _NOISE**2 + sum(shares[index] * seen[index] for index in size)
        for row in size:
            gain = seen[row] / spread
            log = self._log[row] + gain * innovation
            self._log[row] = min(max(log, -_SHAPE_BOUND), _SHAPE_BOUND)
            self.values[row] = self._profile[row] * math.exp(self._log[row])
            for column in size:
                variances[row][column] -= gain * seen[column]
        return math.log(self.expected(features) / expected)


class _Speed:
    """A worker's slowness: the log of it, how uncertain that is, and when it was last measured."""

    __slots__ = ("log", "now", "var")

    def __init__(self, log: float, now: float) -> None:
        self.log = log
        self.var = _SPEED_START**2
        self.now = now

    def learn(self, innovation: float, now: float) -> None:
        """Move towards a measurement whose log is `innovation` above what is expected."""
        if now > self.now:
            self.var = min(self.var + _SPEED_WANDER * (now - self.now), _SPEED_START**2)
            self.now = now
        gain = self.var / (self.var + _NOISE**2)
        self.var -= gain * self.var
        self.log = min(max(self.log + gain * innovation, -_SPEED_BOUND), _SPEED_BOUND)


class _Speeds:
    """The slowness of each worker that was measured; of any other one, the median of these."""

    __slots__ = ("_median", "_settled", "_speeds", "factors")

    def __init__(self) -> None:
        self._speeds: dict[WorkerId, _Speed] = {}
        #: By worker: what the shape's value is multiplied by.
        self.factors: dict[WorkerId, float] = {}
        self._median: float | None = 1.0
        self._settled = 0.0

    def usual(self) -> float:
        """Return the factor of a worker that was not measured yet."""
        if self._median is None:
            self._median = median(self.factors.values()) if self.factors else 1.0
        return self._median

    def of(self, worker: WorkerId) -> float:
        """Return the factor of a worker."""
        return self.factors.get(worker) or self.usual()

    def learn(self, worker: WorkerId, innovation: float, now: float) -> None:
        """Learn that the log of what `worker` took is `innovation` above what was expected."""
        speed = self._speeds.get(worker)
        if speed is None:
            speed = self._speeds[worker] = _Speed(math.log(self.usual()), now)
        speed.learn(innovation, now)
        self.factors[worker] = math.exp(speed.log)
        self._median = None

    def settle(self, now: float) -> None:
        """Let workers that were not measured for long come back to the median, or a slow one might never be asked."""
        keep = math.exp(min(self._settled - now, 0.0) / _STALE_S)
        self._settled = max(now, self._settled)
        usual = math.log(self.usual())
        for worker, speed in self._speeds.items():
            if now - speed.now > _STALE_S:
                speed.log = usual + keep * (speed.log - usual)
                self.factors[worker] = math.exp(speed.log)
                self._median = None

    def forget(self, worker: WorkerId) -> None:
        """Drop what is known of a worker."""
        self._speeds.pop(worker, None)
        if self.factors.pop(worker, None) is not None:
            self._median = None


class Estimator:
    """What each worker needs, as far as is known by now: the profile at first, then what was measured.

    The estimates take the arguments of the same functions of `Profile`, after the worker. A worker that was never
    measured is taken for one of the fleet's median. Measurements that are not finite or not positive are ignored.

    Args:
        profile: Where the estimates start. A multiplier stays within a factor of 8 of it, a slowness within 4 of 1.
    """

    __slots__ = ("_decode", "_fetch", "_links", "_prefill", "_steps", "ignored", "profile")

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        #: Measurements that were of no use.
        self.ignored = 0
        self._prefill = _Shape((profile.prefill.base_s, profile.prefill.token_s, profile.prefill.pair_s))
        self._decode = _Shape((profile.decode.base_s, profile.decode.sequence_s, profile.decode.token_s))
        self._fetch = {tier: _Shape((cost.latency_s, cost.token_s)) for tier, cost in profile.tiers.items()}
        self._steps = _Speeds()
        self._links = _Speeds()

    def prefill_s(self, worker: WorkerId, new: int, cached: int, chunk: int) -> float:
        """Return the seconds `worker` needs to read `new` tokens after `cached` ones, at most `chunk` a step."""
        if new <= 0:
            return 0.0
        base_s, token_s, pair_s = self._prefill.values
        factor = self._steps.factors.get(worker) or self._steps.usual()
        return factor * (base_s * -(-new // chunk) + new * (token_s + pair_s * (cached + 0.5 * new)))

    def decode_step_s(self, worker: WorkerId, sequences: int, resident: int) -> float:
        """Return the seconds of a decode step of `worker` with `sequences` that hold `resident` tokens of KV in all."""
        if sequences <= 0:
            return 0.0
        base_s, sequence_s, token_s = self._decode.values
        factor = self._steps.factors.get(worker) or self._steps.usual()
        return factor * (base_s + sequence_s * sequences + token_s * resident)

    def fetch_s(self, worker: WorkerId, tier: ExternalTier, tokens: int) -> float:
        """Return the seconds `worker` needs to fetch `tokens` from a tier; infinity if the profile lacks the tier."""
        if tokens <= 0:
            return 0.0
        shape = self._fetch.get(tier)
        if shape is None:
            return math.inf
        latency_s, token_s = shape.values
        return self._links.of(worker) * (latency_s + token_s * tokens)

    def transfer_s(self, worker: WorkerId, tokens: int) -> float:
        """Return the seconds `worker` needs to pull `tokens` from another worker: the profile's, as its links are."""
        if tokens <= 0:
            return 0.0
        latency_s, token_s = self.profile.transfer.latency_s, self.profile.transfer.token_s
        return self._links.of(worker) * (latency_s + token_s * tokens)

    def saw_prefill(self, worker: WorkerId, new: int, cached: int, chunk: int, seconds: float, now: float) -> None:
        """Learn that `worker` took `seconds` to read `new` tokens after `cached` ones, at most `chunk` a step."""
        features = (-(-new // chunk), new, new * (cached + 0.5 * new))
        self._learn(self._prefill, self._steps, worker, features, seconds, now)

    def saw_decode(self, worker: WorkerId, sequences: int, resident: int, step_s: float, now: float) -> None:
        """Learn that a step of `worker` with `sequences` and `resident` tokens of KV took `step_s`."""
        self._learn(self._decode, self._steps, worker, (min(sequences, 1), sequences, resident), step_s, now)

    def saw_fetch(self, worker: WorkerId, tier: ExternalTier, tokens: int, seconds: float, now: float) -> None:
        """Learn that `worker` took `seconds` to fetch `tokens` from a tier; a tier the profile lacks is ignored."""
        shape = self._fetch.get(tier)
        if shape is None:
            self.ignored += 1
            return
        self._learn(shape, self._links, worker, (min(tokens, 1), tokens), seconds, now)

    def settle(self, now: float) -> None:
        """Let what was learned of a worker fade where nothing was measured for a minute; call it now and then."""
        self._steps.settle(now)
        self._links.settle(now)

    def forget(self, worker: WorkerId) -> None:
        """Forget a worker's own factors; what it taught about the fleet stays. Unknown ones are no error."""
        self._steps.forget(worker)
        self._links.forget(worker)

    def coefficients(self, worker: WorkerId) -> dict[str, float]:
        """Return what the estimates for `worker` are made of, in seconds, its factors multiplied in and named too.

        Keys are `step_factor`, `link_factor`, and `KIND.COEFFICIENT` as in the profile, `fetch.TIER.COEFFICIENT`.
        """
        step, link = self._steps.of(worker), self._links.of(worker)
        found = {"step_factor": step, "link_factor": link}
        transfer = [self.profile.transfer.latency_s, self.profile.transfer.token_s]
        for kind, factor, names, values in (
            ("prefill", step, ("base_s", "token_s", "pair_s"), self._prefill.values),
            ("decode", step, ("base_s", "sequence_s", "token_s"), self._decode.values),
            ("transfer", link, ("latency_s", "token_s"), transfer),
            *((f"fetch.{tier}", link, ("latency_s", "token_s"), shape.values) for tier, shape in self._fetch.items()),
        ):
            for name, value in zip(names, values, strict=True):
                found[f"{kind}.{name}"] = factor * value
        return found

    def _learn(
        self, shape: _Shape, speeds: _Speeds, worker: WorkerId, features: Sequence[float], seconds: float, now: float
    ) -> None:
        expected = shape.expected(features)
        if not (0.0 < seconds < math.inf and expected > 0.0 and features[1] > 0):
            self.ignored += 1
            return
        innovation = math.log(seconds) - math.log(speeds.of(worker) * expected)  # their quotient may be 0
        innovation = min(max(innovation, -_CUT), _CUT)
        speeds.learn(worker, innovation - shape.learn(features, expected, innovation, now), now)
