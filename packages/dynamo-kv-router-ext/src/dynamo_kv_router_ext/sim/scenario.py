# SPDX-License-Identifier: Apache-2.0
"""What a simulation is made of, by name: a fleet from a file, a timing, policies, speeds that drift.

A fleet file is JSON. Fields that are left out have the values of `Fleet` and `Pool`; an unknown field is a fault::

    {
      "block_size": 64,
      "pools": [
        {"role": "prefill", "count": 4, "capacity_tokens": 768000},
        {"role": "decode", "count": 2, "capacity_tokens": 768000, "speed": [[0, 1.0], [120, 0.7]]}
      ],
      "transfer": {"latency_s": 0.002, "token_s": 2e-7},
      "faults": [{"worker": "prefill-0", "kind": "slow", "start_s": 60, "stop_s": 90}]
    }

The workers of a pool are called by its name, or its role, and a number from 0: ``prefill-0``, ``prefill-1``.

A timing is ``profile:NAME_OR_FILE``, ``table:FILE``, ``ais:model=…,system=…`` or ``polynomial``; a policy is ``ours``,
``round-robin``, ``least-loaded`` or ``dynamo``, with settings after a colon: ``dynamo:overlap_credit=1.5``.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from .._placement import Placer, Settings
from .._profile import Profile, TierCost, load_profile
from .._types import Role, Worker
from .fleet import Fault, FleetSpec, Policy, WorkerSpec
from .policies import DynamoKv, LeastLoaded, RoundRobin
from .timing import AisTiming, PolynomialTiming, ProfileTiming, TableTiming, Timing, fit_profile

__all__ = [
    "LIKE",
    "POLICIES",
    "TIMINGS",
    "Fleet",
    "Pool",
    "ScenarioError",
    "drifting_speed",
    "fitted_profile",
    "links_of",
    "make_policy",
    "make_timing",
    "read_fleet",
    "timing_profile",
]

#: The policies by name, in the order in which a comparison shows them.
POLICIES = ("round-robin", "least-loaded", "dynamo", "ours")
#: The kinds of timing.
TIMINGS = ("profile", "table", "ais", "polynomial")
#: The profile whose transfer and tiers a fitted one takes.
LIKE = "mocker"
#: The most workers of a pool: a slip of the finger shall not fill the memory.
_MOST_WORKERS = 10_000


class ScenarioError(ValueError):
    """A fleet, timing or policy that cannot be; the message names the value."""


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Workers that are alike; the words are those of `dynamo_kv_router_ext.Worker`."""

    #: What they do.
    role: Role
    #: How many there are.
    count: int = 1
    #: What their names begin with; empty: the role.
    name: str = ""
    #: Data-parallel ranks of each, in lockstep.
    ranks: int = 1
    #: Tokens of KV that one rank holds.
    capacity_tokens: int = 1_000_000
    #: The most sequences one rank runs at a time.
    max_sequences: int = 256
    #: The most new tokens one rank reads in a step.
    chunk_tokens: int = 8192
    #: Workers exchange KV within a group only.
    transfer_group: str | None = None
    #: Tokens of KV that one rank's host tier holds; 0: none.
    host_tokens: int = 0
    #: When they join, in seconds.
    starts_s: float = 0.0
    #: How fast they are: a factor, or pairs of a time in seconds and the factor from then on.
    speed: float | tuple[tuple[float, float], ...] = 1.0


class FaultOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault of one worker, in the words of `dynamo_kv_router_ext.sim.fleet.Fault`."""

    worker: str
    kind: Literal["raise", "hang", "die", "slow"]
    start_s: float
    stop_s: float = math.inf
    factor: float = 0.5


class Fleet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fleet as its file has it."""

    #: Its workers.
    pools: tuple[Pool, ...]
    #: Tokens in a block of KV.
    block_size: int = 64
    #: Pulling KV from a prefill worker to a decoder; left out: as the timing's profile has it, or else `LIKE`.
    transfer: TierCost | None = None
    #: Fetching KV from the host tier; left out: likewise.
    host: TierCost | None = None
    #: Fetching KV from the shared store; left out: likewise.
    store: TierCost | None = None
    #: Tokens of KV that the shared store holds; 0: there is none.
    store_tokens: int = 0
    #: How much later than they happen the policy hears of cache events, in seconds.
    event_lag_s: float = 0.0
    #: Seconds without a first token after which a request is placed anew; 0: never.
    timeout_s: float = 0.0
    #: What goes wrong.
    faults: tuple[FaultOf, ...] = ()

    def spec(self, timing: Timing, links: Profile, *, speed_spread: float = 0.0, seed: int = 0) -> FleetSpec:
        """Return what the simulator takes.

        Args:
            timing: how long the workers' steps last.
            links: has the costs of transfers and tiers that the file leaves out.
            speed_spread: each worker's speed drifts between 1 - spread and 1 + spread, times its own.
            seed: of the drift.

        Raises ScenarioError.
        """
        try:
            return self._spec(timing, links, speed_spread, seed)
        except ValueError as error:
            raise ScenarioError(str(error)) from error

    def _spec(self, timing: Timing, links: Profile, speed_spread: float, seed: int) -> FleetSpec:
        workers: list[WorkerSpec] = []
        for pool in self.pools:
            if not 1 <= pool.count <= _MOST_WORKERS:
                raise ScenarioError(
                    f"count of the pool {pool.name or pool.role!r} must be at least 1, not {pool.count}, "
                    f"and at most {_MOST_WORKERS}"
                )
            for number in range(pool.count):
                name = f"{pool.name or pool.role}-{number}"
                speed: tuple[tuple[float, float], ...] = (
                    ((0.0, pool.speed),) if isinstance(pool.speed, float) else pool.speed
                )
                if speed_spread:
                    if len(speed) > 1:
                        raise ScenarioError(f"{name} has a speed that changes; a spread would change it twice")
                    drift = drifting_speed(f"{seed} {name}", speed_spread)
                    speed = tuple((at, factor * (speed[0][1] if speed else 1.0)) for at, factor in drift)
                worker = Worker(
                    id=name,
                    role=pool.role,
                    ranks=pool.ranks,
                    capacity_tokens=pool.capacity_tokens,
                    max_sequences=pool.max_sequences,
                    chunk_tokens=pool.chunk_tokens,
                    transfer_group=pool.transfer_group,
                )
                workers.append(WorkerSpec(worker, speed, pool.host_tokens, pool.starts_s))
        names: set[str] = set()
        for one in workers:
            name = str(one.worker.id)
            if name in names:
                raise ScenarioError(f"two workers are called {name!r}; give their pools different names")
            names.add(name)
        return FleetSpec(
            workers=tuple(workers),
            timing=timing,
            block_size=self.block_size,
            transfer=self.transfer or links.transfer,
            host=self.host or links.tiers.get("host"),
            store=self.store or links.tiers.get("store"),
            store_tokens=self.store_tokens,
            event_lag_s=self.event_lag_s,
            timeout_s=self.timeout_s,
            faults=tuple(Fault(one.worker, one.kind, one.start_s, one.stop_s, one.factor) for one in self.faults),
        )


def read_fleet(path: str | Path) -> Fleet:
    """Read a fleet file; raises ScenarioError with the file, the field and the value, and OSError."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Fleet)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: {error}") from error


def drifting_speed(
    seed: str | int, spread: float = 0.3, *, until_s: float = 7200.0, every_s: float = 15.0, step: float = 0.03
) -> tuple[tuple[float, float], ...]:
    """Return a speed that walks at random: pairs of a time in seconds and the factor from then on.

    It begins anywhere between 1 - spread and 1 + spread, moves by at most ``step`` every ``every_s`` seconds, and turns
    back at the bounds. Raises ScenarioError for a spread that is not at least 0 and below 1.
    """
    if not 0 <= spread < 1:
        raise ScenarioError(f"a spread of speeds must be at least 0 and below 1, not {spread}")
    draw = random.Random(f"speed {seed}").random  # the one method whose sequence Python promises to keep
    low, high = 1 - spread, 1 + spread
    factor = low + (high - low) * draw()
    walk: list[tuple[float, float]] = []
    for number in range(math.ceil(until_s / every_s)):
        walk.append((number * every_s, factor))
        factor += min(step, spread) * (2 * draw() - 1)
        factor = 2 * low - factor if factor < low else 2 * high - factor if factor > high else factor
    return tuple(walk)


def make_timing(text: str, capacity_tokens: int = 1_000_000) -> Timing:
    """Return the timing that ``text`` names; raises ScenarioError, and what the timing raises for its data.

    Args:
        text: as the module's docstring has it.
        capacity_tokens: tokens of KV of a rank, on which the polynomials depend.
    """
    kind, _, rest = text.partition(":")
    if kind == "polynomial" and not rest:
        return PolynomialTiming(capacity_tokens)
    if kind == "profile" and rest:
        return ProfileTiming(load_profile(rest))
    if kind == "table" and rest:
        return TableTiming(rest)
    if kind == "ais" and rest:
        timing: Timing = _call(AisTiming, _words(rest))
        return timing
    raise ScenarioError(f"{text!r} is no timing: profile:NAME, table:FILE, ais:model=…,system=… or polynomial")


def fitted_profile(timing: Timing, timing_text: str, name: str, like: str = LIKE) -> Profile:
    """Return a profile fitted to a timing, with the transfer and the tiers of the profile ``like``."""
    other = load_profile(like)
    source = f"Fitted to {timing_text}; transfer and tiers of {other.name}."
    return fit_profile(timing, name=name, source=source, transfer=other.transfer, tiers=other.tiers)


def timing_profile(timing_text: str, timing: Timing) -> Profile:
    """Return the profile that a timing is of, or else one fitted to it; raises TimingError where none can be."""
    kind, _, rest = timing_text.partition(":")
    return load_profile(rest) if kind == "profile" else fitted_profile(timing, timing_text, "fitted")


def links_of(timing_text: str) -> Profile:
    """Return the profile that has the links and tiers of a simulation: the timing's, or `LIKE`."""
    kind, _, rest = timing_text.partition(":")
    return load_profile(rest if kind == "profile" else LIKE)


def make_policy(text: str, profile: Profile, block_size: int) -> Callable[[], Policy]:
    """Return what makes the policy that ``text`` names, afresh for each simulation.

    Raises ScenarioError for an unknown name or setting.
    """
    name, colon, rest = text.partition(":")
    words = _words(rest) if colon else {}
    makers: Mapping[str, Callable[[], Policy]] = {
        "round-robin": lambda: _call(RoundRobin, words),
        "least-loaded": lambda: _call(LeastLoaded, words),
        "dynamo": lambda: _call(DynamoKv, words, block_size=block_size),
        "ours": lambda: Placer(profile, _settings(words), block_size=block_size),
    }
    if name not in makers:
        raise ScenarioError(f"{text!r} is no policy: {', '.join(makers)}")
    makers[name]()  # a fault in its settings is told at once
    return makers[name]


def _settings(words: Mapping[str, Any]) -> Settings:
    try:
        return msgspec.convert(words, Settings)
    except (msgspec.ValidationError, ValueError) as error:
        raise ScenarioError(str(error)) from error


def _words(rest: str) -> dict[str, Any]:
    """Return ``a=1,b=x`` as a mapping; numbers and truth values are read as such."""
    words: dict[str, Any] = {}
    for word in rest.split(","):
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise ScenarioError(f"NAME=VALUE was expected, not {word!r}")
        if name in words:
            raise ScenarioError(f"{name} is given twice")
        try:
            words[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            words[name] = value
    return words


def _call(make: Callable[..., Any], words: Mapping[str, Any], **fixed: Any) -> Any:
    """Return what ``make`` makes of the settings; each has to be a parameter of it, of its type."""
    known = inspect.signature(make, eval_str=True).parameters
    named = {name: one for name, one in known.items() if name not in fixed and one.kind is not one.VAR_KEYWORD}
    given: dict[str, Any] = {}
    for name, value in words.items():
        if name in named:
            try:
                given[name] = msgspec.convert(value, named[name].annotation)
            except msgspec.ValidationError as error:
                raise ScenarioError(f"{name}: {error}, {value!r}") from error
        elif len(named) + len(fixed) < len(known):
            given[name] = value
        else:
            raise ScenarioError(f"unknown setting {name!r}; there are {', '.join(named) or 'none'}")
    for name, one in named.items():
        if one.default is one.empty and name not in given:
            raise ScenarioError(f"{name} is missing")
    try:
        return make(**given, **fixed)
    except (TypeError, ValueError) as error:
        raise ScenarioError(str(error)) from error
