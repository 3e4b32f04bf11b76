# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode placement in units of time: cached prefix in every tier, queued work, sticky sessions, sick
workers avoided.

A library without Dynamo inside. Importing it changes nothing, starts nothing, and does not load the simulator. It knows
no clock: every call is told the time in seconds.

    placer = Placer(load_profile("mocker"))
    placer.add_worker(Worker("prefill-0", role="prefill"), now=0.0)
    placer.add_worker(Worker("decode-0", role="decode"), now=0.0)
    request = Request("a", tokens=12_000, blocks=hash_blocks(token_ids, 64), session="s")

    decision = placer.place(request, "prefill", now=1.0)  # books the prompt
    placer.prefilled("a", now=1.4)  # it has been read: its worker is measured
    decision = placer.place(dataclasses.replace(request, prefill_worker=decision.worker), "decode", now=1.4)
    placer.progress("a", 100, now=3.0)
    placer.finished("a", now=6.5)

Time to the first token is expected to be the work ahead or the fetch of cached blocks, whichever lasts longer, and then
the prompt's rest, with attention's quadratic term. Fetching a prefix from its tier is weighed against reading it anew.
For decode, the expected time between tokens counts, with the session's resident KV, the transfer that it saves, and the
capacity that is left. What a placement takes from other requests is part of its cost. `Placer.explain` lists every
candidate with these terms.

* `Placer`, `Settings`: the policy. Each request that is placed is booked until it is finished, cancelled or failed.
* `Profile`, `load_profile`: where the estimates start; `Estimator` learns them online, within bounds.
* `PrefixIndex`, `StoreTier`, `hash_blocks`: which prefix is cached where, in each worker's tiers and in a shared store.
* `Health`, `Sessions`: whom to avoid, and who stays where.
* `check`, `SUPPORTED`: refuse an installed Dynamo that the package does not know.

The command ``kv-router-sim`` and `dynamo_kv_router_ext.sim` run the same code over traces in simulated time.
"""

from ._compat import SUPPORTED, UnsupportedUpstreamError, check
from ._health import Health, HealthSettings
from ._index import Matches, PrefixIndex, hash_blocks
from ._learning import Estimator
from ._placement import Load, Placer, Settings
from ._profile import DecodeCost, Profile, ProfileError, StepCost, TierCost, load_profile, shipped_profiles
from ._sessions import Sessions
from ._store_tier import StoreTier, block_id, mooncake_key
from ._types import (
    Booked,
    Candidate,
    Decision,
    Explanation,
    ExternalTier,
    NoWorkerError,
    Request,
    Role,
    Seat,
    Terms,
    Tier,
    Worker,
    WorkerId,
)
from .version import __version__

__all__ = [
    "SUPPORTED",
    "Booked",
    "Candidate",
    "Decision",
    "DecodeCost",
    "Estimator",
    "Explanation",
    "ExternalTier",
    "Health",
    "HealthSettings",
    "Load",
    "Matches",
    "NoWorkerError",
    "Placer",
    "PrefixIndex",
    "Profile",
    "ProfileError",
    "Request",
    "Role",
    "Seat",
    "Sessions",
    "Settings",
    "StepCost",
    "StoreTier",
    "Terms",
    "Tier",
    "TierCost",
    "UnsupportedUpstreamError",
    "Worker",
    "WorkerId",
    "__version__",
    "block_id",
    "check",
    "hash_blocks",
    "load_profile",
    "mooncake_key",
    "shipped_profiles",
]
