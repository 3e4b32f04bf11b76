# SPDX-License-Identifier: Apache-2.0
"""Ranks in lockstep, in the simulator: steps are fuller than where ranks take turns or the least loaded is asked."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest

from dynamo_kv_router_ext import Placer, Worker, load_profile
from dynamo_kv_router_ext.sim.fleet import Arrival, FleetSpec, Policy, WorkerSpec, simulate
from dynamo_kv_router_ext.sim.policies import DynamoKv, LeastLoaded, RoundRobin
from dynamo_kv_router_ext.sim.timing import ProfileTiming

TRUTH = load_profile("gb200-glm-5.2-nvfp4-dep8")
#: What the policy starts from: another engine.
PROFILE = load_profile("gb200-glm-5.2-nvfp4-tp4")


def measured(policy: Policy, rate: float, seed: int, *roles: str) -> tuple[float, float]:
    """The mean time to first token, and the tokens of prompts that the group reads in a second in which it works."""
    draw = random.Random(seed)
    arrivals, now = [], 0.0
    for number in range(600):
        now += draw.expovariate(rate)
        tokens = int(min(120_000, max(200, draw.lognormvariate(math.log(6000), 1.1))))
        arrivals.append(Arrival(f"r{number}", now, tokens, max(2, int(draw.expovariate(1 / 200)))))
    workers = tuple(WorkerSpec(Worker(role, role, ranks=8)) for role in roles)  # type: ignore[arg-type]
    result = simulate(FleetSpec(workers, ProfileTiming(TRUTH), transfer=TRUTH.transfer), arrivals, policy)
    assert not any(one.error for one in result.requests)
    first = result.workers[0]
    return statistics.fmean(one.ttft_s for one in result.requests), first.prompt_tokens / first.busy_s


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("both",)])
@pytest.mark.parametrize("rate", [4.0, 7.0])
def test_steps_are_fuller_and_first_tokens_sooner(roles: tuple[str, ...], rate: float) -> None:
    policies: dict[str, Callable[[], Policy]] = {
        "turns": RoundRobin,
        "least": LeastLoaded,
        "ours": lambda: Placer(PROFILE),
    }
    means = {}
    for name, policy in policies.items():
        runs = [measured(policy(), rate, seed, *roles) for seed in (1, 2, 3)]
        means[name] = [statistics.fmean(column) for column in zip(*runs, strict=True)]
    for other in ("turns", "least"):
        assert means["ours"][0] < 0.97 * means[other][0], means
        assert means["ours"][1] > 0.99 * means[other][1], means


def conversations(count: int, every_s: float) -> list[Arrival]:
    """Sessions of 40,000 tokens and 3,000 more a turn, each turn 3 s after the answer before."""
    draw = random.Random(1)
    found: list[Arrival] = []
    block = 0
    for number in range(count):
        blocks: list[int] = []
        tokens, last = 40_000, None
        for turn in range(6):
            tokens += int(draw.expovariate(1 / 3000)) + 64 if turn else 0
            more = tokens // 64 - len(blocks)
            blocks += range(block, block + more)
            block += more
            name = f"s{number}t{turn}"
            output = max(2, int(draw.expovariate(1 / 150)))
            found.append(
                Arrival(name, number * every_s, tokens, output, tuple(blocks), f"s{number}", last, 3.0 if last else 0.0)
            )
            last = name
    return found


def test_sessions_keep_to_their_rank_of_two_groups() -> None:
    workers = [Worker(name, "prefill", ranks=8, capacity_tokens=600_000) for name in ("p0", "p1")]
    workers.append(Worker("d", "decode", ranks=8))
    spec = FleetSpec(tuple(map(WorkerSpec, workers)), ProfileTiming(TRUTH), transfer=TRUTH.transfer, event_lag_s=0.05)
    means = {}
    policies: dict[str, Callable[[], Policy]] = {
        "least": LeastLoaded,
        "dynamo": DynamoKv,
        "ours": lambda: Placer(PROFILE),
    }
    for name, policy in policies.items():
        result = simulate(spec, conversations(120, 0.5), policy())
        assert not any(one.error for one in result.requests)
        means[name] = result.mean_ttft_s()
    assert means["ours"] < 0.8 * means["dynamo"], means
    assert means["ours"] < 0.3 * means["least"], means
