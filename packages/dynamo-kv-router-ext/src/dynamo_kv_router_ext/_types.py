# SPDX-License-Identifier: Apache-2.0
"""What the parts of the policy tell each other: workers, requests, decisions and the terms they were made from."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec

__all__ = [
    "EXTERNAL_TIERS",
    "ROLES",
    "TIERS",
    "Booked",
    "Candidate",
    "Decision",
    "Explanation",
    "ExternalTier",
    "NoWorkerError",
    "Request",
    "Role",
    "Seat",
    "Terms",
    "Tier",
    "Worker",
    "WorkerId",
]

#: What a worker does: `prefill` reads prompts for others, `decode` generates from KV it pulls, `both` does the two.
Role = Literal["prefill", "decode", "both"]
ROLES: tuple[Role, ...] = get_args(Role)
#: Where a block of KV may lie. `device`, `host` and `disk` are a worker's own; all share `store`, the second tier.
Tier = Literal["device", "host", "disk", "store"]
TIERS: tuple[Tier, ...] = get_args(Tier)
#: The tiers from which a block has to be fetched.
ExternalTier = Literal["host", "disk", "store"]
EXTERNAL_TIERS: tuple[ExternalTier, ...] = get_args(ExternalTier)
#: A worker's name: Dynamo's instance id, or any other value that can be a key.
WorkerId = Hashable
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]


class NoWorkerError(LookupError):
    """No worker of the role lives, or none may take the request; the message says why for each."""


class Seat(NamedTuple):
    """One data-parallel rank of a worker: what has a scheduler and a cache of its own."""

    worker: WorkerId
    rank: int


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as it announces itself."""

    #: Its name, unique in the fleet.
    id: WorkerId
    #: What it does.
    role: Role
    #: Data-parallel ranks that step in lockstep; each has its own scheduler and cache.
    ranks: int = 1
    #: Tokens of KV that one rank holds.
    capacity_tokens: int = 1_000_000
    #: The most sequences one rank runs at a time.
    max_sequences: int = 256
    #: The most new tokens one rank reads in a step.
    chunk_tokens: int = 8192
    #: Workers exchange KV within a group only; None pairs with None.
    transfer_group: str | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"worker {self.id!r}: role must be one of {', '.join(ROLES)}, not {self.role!r}")
        for name in ("ranks", "capacity_tokens", "max_sequences", "chunk_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"worker {self.id!r}: {name} must be a whole number of at least 1, not {value!r}")


@dataclass(frozen=True, slots=True)
class Request:
    """A request to place."""

    #: Its id, unique among those that are booked.
    id: str
    #: Tokens of the prompt.
    tokens: int
    #: Hashes of the prompt's full blocks, from the first token on; equal hashes stand for equal prefixes.
    blocks: Sequence[int] = ()
    #: The session it belongs to.
    session: str | None = None
    #: Tokens the client expects or allows to be generated; None: as this session's, or the fleet's, so far.
    output_tokens: int | None = None
    #: Where its prompt was read, for the choice of its decoder: only workers of the same transfer group are asked.
    prefill_worker: WorkerId | None = None
    #: What a live index says of the prompt: blocks on a rank's device, then, beyond those, in its host memory, on its
    #: disk, in the store. A rank that is absent has none. None: what the placer itself was told counts.
    cached: Mapping[Seat, tuple[int, int, int, int]] | None = None
    #: Workers that failed it already: asked only where no other one may be.
    avoid: frozenset[WorkerId] = frozenset()

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, int) or self.tokens < 1:
            raise ValueError(f"request {self.id!r}: tokens must be a whole number of at least 1, not {self.tokens!r}")
        output = self.output_tokens
        if output is not None and (not isinstance(output, int) or output < 1):
            raise ValueError(f"request {self.id!r}: output_tokens must be a whole number of at least 1, not {output!r}")


@dataclass(slots=True)
class Terms:
    """What a candidate is expected to cost, in seconds; `cost` is what candidates are compared by."""

    #: Until the rank is free of what was booked before.
    wait_s: float = 0.0
    #: Fetching cached blocks from their tier; it runs beside the wait.
    fetch_s: float = 0.0
    #: Reading what is not cached, with the attention's quadratic term; for `decode`, pulling the KV that is missing.
    work_s: float = 0.0
    #: Expected time to the first token: max(wait, fetch) + work.
    first_token_s: float = 0.0
    #: Expected inter-token latency once it runs there.
    token_s: float = 0.0
    #: What it takes from others: requests behind it, sequences beside it.
    others_s: float = 0.0
    #: What the worker's recent failures make likely to be lost.
    risk_s: float = 0.0
    #: What candidates are compared by.
    cost_s: float = 0.0
    #: Tokens of the prompt that are on the device there.
    device_tokens: int = 0
    #: Tokens that would be fetched, by tier.
    fetch_tokens: Mapping[ExternalTier, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rank that was asked, with its terms, or the reason for which it was passed over."""

    worker: WorkerId
    rank: int
    #: What it would cost; None where it was passed over.
    terms: Terms | None
    #: Why it was passed over; None where it was asked.
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes; it is booked there until `finished`, `failed` or `cancelled`."""

    request: str
    role: Role
    worker: WorkerId
    rank: int
    terms: Terms
    #: The most tokens that should be fetched from outside the device: 0 where reading them anew is faster.
    fetch_tokens: int = 0
    #: Why a session left its decoder; `probe`: a half-open worker; `last`: every worker was out; else empty.
    note: str = ""
    #: `cost_s` of the second cheapest rank; infinite where there was no other one.
    runner_up_s: float = math.inf
    #: Every rank, the cheapest first, those that were passed over last; empty unless `place` was asked to explain.
    candidates: Sequence[Candidate] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """Every candidate of a request, the cheapest first, those that were passed over last. Nothing is booked."""

    request: str
    role: Role
    candidates: tuple[Candidate, ...]


class Booked(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What another placer needs to book the same request at the same rank: `Placer.booking` makes it, `adopt` takes it.

    An array on the wire, as msgspec encodes it; a later version may append fields.
    """

    id: str
    role: Role
    worker: int | str
    rank: int
    #: Tokens of the prompt; of these, those to read, and those that are cached or fetched there.
    tokens: Annotated[int, msgspec.Meta(ge=1)]
    new: _Count
    cached: _Count
    #: Expected length of the answer, tokens.
    output: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
    #: KV that it is booked with, tokens.
    resident: _Count
    #: Expected seconds of the rank, of fetching, and until the first token, as of when it was placed.
    service_s: _Seconds
    fetch_s: _Seconds
    first_token_s: _Seconds
    session: str | None = None
    #: Hashes of some of the prompt's blocks, which it will leave in the cache.
    marks: list[int] = []
    #: The worker that still holds the prompt's KV.
    prefill_worker: int | str | None = None
    #: Tokens generated so far, as far as was reported.
    generated: _Count = 0
