# SPDX-License-Identifier: Apache-2.0
"""What a step of the engine costs, as a handful of coefficients: where estimates start, before anything is measured.

A profile is a JSON file:

    {
      "name": "example", "source": "where the figures come from",
      "prefill": {"base_s": 0.016, "token_s": 1.5e-5, "pair_s": 8e-10},
      "decode": {"base_s": 0.006, "sequence_s": 1e-5, "token_s": 1e-8},
      "transfer": {"latency_s": 0.002, "token_s": 1e-6},
      "tiers": {"host": {"latency_s": 0.001, "token_s": 5e-7}}
    }

All times are seconds, all lengths tokens. `load_profile` also takes the name of a shipped one (`shipped_profiles`).
"""

from __future__ import annotations

import math
import os
from importlib.resources import files
from pathlib import Path

import msgspec

from ._types import ExternalTier

__all__ = ["DecodeCost", "Profile", "ProfileError", "StepCost", "TierCost", "load_profile", "shipped_profiles"]


class ProfileError(ValueError):
    """A profile that cannot be used; the message names the file, the field and the value."""


class _Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients: each is finite and at least 0."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0.0):
                raise ProfileError(f"{field} must be a finite number of at least 0, not {value!r}")


class StepCost(_Cost, frozen=True, forbid_unknown_fields=True):
    """A prefill step: reading n tokens after c earlier ones takes `base_s + token_s * n + pair_s * n * (c + n / 2)`.

    The last factor is the number of pairs of tokens that causal attention visits: each new token sees all before it.
    """

    #: Any step, however short (seconds).
    base_s: float
    #: Each new token (seconds).
    token_s: float
    #: Each pair of a new token and one before it (seconds).
    pair_s: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base_s + self.token_s <= 0.0:
            raise ProfileError("base_s and token_s must not both be 0: no step would take time")


class DecodeCost(_Cost, frozen=True, forbid_unknown_fields=True):
    """A decode step of b sequences with t tokens of KV: `base_s + sequence_s * b + token_s * t`."""

    #: Any step (seconds).
    base_s: float
    #: Each sequence (seconds).
    sequence_s: float
    #: Each token of KV that is read (seconds).
    token_s: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base_s + self.sequence_s <= 0.0:
            raise ProfileError("base_s and sequence_s must not both be 0: no step would take time")


class TierCost(_Cost, frozen=True, forbid_unknown_fields=True):
    """Moving t tokens of KV: `latency_s + token_s * t`."""

    #: Any fetch (seconds).
    latency_s: float
    #: Each token (seconds): its bytes of KV over the bandwidth.
    token_s: float


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank of one kind of worker needs, in seconds."""

    #: Its name, for reports.
    name: str
    #: Where the figures come from: what was measured or simulated, with which software, and what is assumed.
    source: str
    #: Reading prompts.
    prefill: StepCost
    #: Generating.
    decode: DecodeCost
    #: Pulling KV from another worker.
    transfer: TierCost
    #: Fetching KV from outside the device. From a tier that is absent nothing is ever fetched.
    tiers: dict[ExternalTier, TierCost]

    def prefill_s(self, new: int, cached: int, chunk: int) -> float:
        """Return the seconds to read `new` tokens after `cached` ones, at most `chunk` a step; 0 for no new tokens.

        The exact sum over the steps: their pairs telescope, since n * (c + n / 2) = ((c + n)^2 - c^2) / 2.
        """
        if new <= 0:
            return 0.0
        cost = self.prefill
        return cost.base_s * -(-new // chunk) + new * (cost.token_s + cost.pair_s * (cached + 0.5 * new))

    def decode_step_s(self, sequences: int, resident: int) -> float:
        """Return the seconds of a step that gives a token to `sequences` with `resident` tokens of KV in all."""
        if sequences <= 0:
            return 0.0
        cost = self.decode
        return cost.base_s + cost.sequence_s * sequences + cost.token_s * resident

    def fetch_s(self, tier: ExternalTier, tokens: int) -> float:
        """Return the seconds to fetch `tokens` from a tier: 0 for none, infinity from a tier the profile lacks."""
        if tokens <= 0:
            return 0.0
        cost = self.tiers.get(tier)
        return math.inf if cost is None else cost.latency_s + cost.token_s * tokens

    def transfer_s(self, tokens: int) -> float:
        """Return the seconds to pull `tokens` from another worker; 0 for none."""
        return self.transfer.latency_s + self.transfer.token_s * tokens if tokens > 0 else 0.0


def shipped_profiles() -> list[str]:
    """Return the names of the profiles that come with the package."""
    return sorted(
        entry.name.removesuffix(".json")
        for entry in files(__package__).joinpath("profiles").iterdir()
        if entry.name.endswith(".json")
    )


def load_profile(path_or_name: str | os.PathLike[str]) -> Profile:
    """Read a profile: from a file, or by the name of a shipped one.

    Raises:
        ProfileError: no such file or name, or a field is missing, unknown or of no use.
    """
    what = os.fspath(path_or_name)
    if what in shipped_profiles():
        text = files(__package__).joinpath("profiles").joinpath(f"{what}.json").read_bytes()
    else:
        try:
            text = Path(what).read_bytes()
        except OSError as error:
            raise ProfileError(
                f"profile {what!r}: {error.strerror or error}; the shipped ones are {', '.join(shipped_profiles())}"
            ) from None
    try:
        return msgspec.json.decode(text, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"profile {what!r}: {error}") from None
