# SPDX-License-Identifier: Apache-2.0
"""What is learned from measurements, and what is not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dynamo_kv_router_ext._learning import Estimator
from dynamo_kv_router_ext._profile import DecodeCost, Profile, StepCost, TierCost

CHUNK = 8192


def profile(scale: float = 1.0, *, base: float = 1.0, token: float = 1.0, pair: float = 1.0) -> Profile:
    return Profile(
        name="test",
        source="made up",
        prefill=StepCost(base_s=0.01 * base * scale, token_s=5e-5 * token * scale, pair_s=1.5e-9 * pair * scale),
        decode=DecodeCost(base_s=0.01 * scale, sequence_s=1e-4 * scale, token_s=3e-8 * scale),
        transfer=TierCost(latency_s=0.002 * scale, token_s=1e-6 * scale),
        tiers={"host": TierCost(latency_s=0.001 * scale, token_s=5e-7 * scale)},
    )


TRUTH = profile()


def prompts(rng: random.Random) -> tuple[int, int]:
    """Return new and cached tokens, as conversations have them."""
    return min(int(2 ** rng.uniform(7, 16)), 60_000), rng.choice([0, int(2 ** rng.uniform(9, 17))])


def prefill_error(
    start: Profile,
    *,
    seconds: float,
    slowness: Callable[[int, float], float] = lambda worker, now: 1.0,
    noise: float = 0.05,
    stalls: float = 0.0,
    seed: int = 0,
) -> float:
    """Return the mean relative error of estimates in the last third, with two measurements a second of 8 workers."""
    rng, estimator, errors, now = random.Random(seed), Estimator(start), [], 0.0
    while now < seconds:
        now += rng.expovariate(2.0)
        worker = rng.randrange(8)
        new, cached = prompts(rng)
        true_s = slowness(worker, now) * TRUTH.prefill_s(new, cached, CHUNK)
        if now > seconds * 2 / 3:
            errors.append(abs(estimator.prefill_s(worker, new, cached, CHUNK) / true_s - 1.0))
        measured_s = true_s * math.exp(rng.gauss(0.0, noise)) * (10.0 if rng.random() < stalls else 1.0)
        estimator.saw_prefill(worker, new, cached, CHUNK, measured_s, now)
    return sum(errors) / len(errors)


def drifting(worker: int, now: float) -> float:
    """Return a slowness that differs by worker and drifts by 30 % over minutes."""
    return 1.0 + 0.15 * math.sin(worker) + 0.15 * math.sin(worker * 2.0 + now * 2.0 * math.pi / 240.0)


def test_before_any_measurement_it_is_the_profile() -> None:
    estimator = Estimator(TRUTH)
    for new, cached in ((1, 0), (100, 5000), (20_000, 0), (20_000, 100_000)):
        assert estimator.prefill_s("w", new, cached, CHUNK) == pytest.approx(TRUTH.prefill_s(new, cached, CHUNK))
    assert estimator.decode_step_s("w", 7, 9000) == pytest.approx(TRUTH.decode_step_s(7, 9000))
    assert estimator.fetch_s("w", "host", 500) == pytest.approx(TRUTH.fetch_s("host", 500))
    assert estimator.transfer_s("w", 500) == pytest.approx(TRUTH.transfer_s(500))
    assert estimator.prefill_s("w", 0, 10, CHUNK) == 0.0
    assert estimator.decode_step_s("w", 0, 0) == 0.0
    assert estimator.fetch_s("w", "host", 0) == 0.0
    assert estimator.transfer_s("w", 0) == 0.0
    assert estimator.fetch_s("w", "disk", 10) == math.inf


@pytest.mark.parametrize(
    "start",
    [profile(3.0), profile(1 / 3), profile(base=4.0, token=0.4), profile(token=1.6, pair=0.2)],
    ids=["slow", "fast", "base", "linear"],
)
def test_a_wrong_profile_is_corrected(start: Profile) -> None:
    assert prefill_error(start, seconds=300) < 0.04


def test_drift_is_followed() -> None:
    assert prefill_error(profile(1.5), seconds=600, slowness=drifting) < 0.06


def test_stalls_and_noise_do_little() -> None:
    assert prefill_error(profile(1.5), seconds=600, slowness=drifting, noise=0.15, stalls=0.02) < 0.10


def test_a_slow_worker_is_told_from_the_others() -> None:
    estimator, rng = Estimator(TRUTH), random.Random(1)
    for step in range(400):
        worker = step % 4
        new, cached = prompts(rng)
        factor = 2.0 if worker == 3 else 1.0
        estimator.saw_prefill(worker, new, cached, CHUNK, factor * TRUTH.prefill_s(new, cached, CHUNK), step * 0.5)
    usual = estimator.prefill_s(0, 8000, 0, CHUNK)
    assert usual == pytest.approx(TRUTH.prefill_s(8000, 0, CHUNK), rel=0.1)
    assert estimator.prefill_s(3, 8000, 0, CHUNK) == pytest.approx(2 * usual, rel=0.1)
    # A new one is like most of them, and so is the slow one once it is forgotten.
    assert estimator.prefill_s("new", 8000, 0, CHUNK) == pytest.approx(usual, rel=0.05)
    estimator.forget(3)
    estimator.forget("never seen")
    assert estimator.prefill_s(3, 8000, 0, CHUNK) == pytest.approx(usual, rel=0.05)


def test_a_worker_that_is_not_measured_any_more_comes_back_to_the_median() -> None:
    estimator = Estimator(TRUTH)
    for now in range(60):
        for worker, slowness in (("slow", 3.0), ("a", 1.0), ("b", 1.0)):
            seconds = slowness * TRUTH.prefill_s(4000, 0, CHUNK)
            estimator.saw_prefill(worker, 4000, 0, CHUNK, seconds, float(now))
        estimator.settle(float(now))
    before = estimator.prefill_s("slow", 4000, 0, CHUNK)
    assert before > 2 * estimator.prefill_s("a", 4000, 0, CHUNK)
    for now in range(60, 100):
        estimator.settle(float(now))
    assert estimator.prefill_s("slow", 4000, 0, CHUNK) == before
    for now in range(100, 700):
        estimator.saw_prefill("a", 4000, 0, CHUNK, TRUTH.prefill_s(4000, 0, CHUNK), float(now))
        estimator.settle(float(now))
    assert estimator.prefill_s("slow", 4000, 0, CHUNK) == pytest.approx(
        estimator.prefill_s("a", 4000, 0, CHUNK), rel=0.05
    )


def test_what_one_kind_of_step_shows_of_a_worker_counts_for_the_other() -> None:
    estimator = Estimator(TRUTH)
    for step in range(400):
        worker = step % 4
        factor = 1.5 if worker == 3 else 1.0
        estimator.saw_decode(worker, 16, 100_000, factor * TRUTH.decode_step_s(16, 100_000), step * 0.5)
    slow, usual = (estimator.prefill_s(worker, 8000, 0, CHUNK) for worker in (3, 0))
    assert slow / usual == pytest.approx(1.5, rel=0.1)


def test_decode_and_links_are_learned() -> None:
    estimator, rng = Estimator(profile(2.5)), random.Random(2)
    for step in range(600):
        worker, now = step % 3, step * 0.5
        batch = rng.randrange(1, 64)
        resident, tokens = batch * rng.randrange(500, 30_000), rng.randrange(64, 60_000)
        estimator.saw_decode(worker, batch, resident, TRUTH.decode_step_s(batch, resident), now)
        estimator.saw_fetch(worker, "host", tokens, TRUTH.fetch_s("host", tokens), now)
    for batch, resident in ((1, 1000), (8, 100_000), (64, 1_000_000)):
        assert estimator.decode_step_s(0, batch, resident) == pytest.approx(
            TRUTH.decode_step_s(batch, resident), rel=0.1
        )
    for tokens in (500, 50_000):
        assert estimator.fetch_s(0, "host", tokens) == pytest.approx(TRUTH.fetch_s("host", tokens), rel=0.1)


def test_one_stall_moves_little() -> None:
    estimator = Estimator(TRUTH)
    usual = TRUTH.prefill_s(8000, 0, CHUNK)
    for step in range(100):
        estimator.saw_prefill("w", 8000, 0, CHUNK, usual, step * 0.5)
    estimator.saw_prefill("w", 8000, 0, CHUNK, 10 * usual, 50.0)
    assert estimator.prefill_s("w", 8000, 0, CHUNK) < 1.1 * usual


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_is_ignored_and_counted(seconds: float) -> None:
    estimator = Estimator(TRUTH)
    before = estimator.coefficients("w")
    estimator.saw_prefill("w", 100, 0, CHUNK, seconds, 1.0)
    estimator.saw_decode("w", 1, 100, seconds, 1.0)
    estimator.saw_fetch("w", "host", 100, seconds, 1.0)
    assert estimator.ignored == 3
    assert estimator.coefficients("w") == before


def test_measurements_of_nothing_are_ignored_and_counted() -> None:
    estimator = Estimator(TRUTH)
    estimator.saw_prefill("w", 0, 100, CHUNK, 0.1, 1.0)
    estimator.saw_decode("w", 0, 0, 0.1, 1.0)
    estimator.saw_fetch("w", "host", 0, 0.1, 1.0)
    estimator.saw_fetch("w", "disk", 10, 0.1, 1.0)
    assert estimator.ignored == 4


def test_the_coefficients_are_named() -> None:
    coefficients = Estimator(TRUTH).coefficients("w")
    assert coefficients["step_factor"] == coefficients["link_factor"] == 1.0
    assert coefficients["prefill.pair_s"] == TRUTH.prefill.pair_s
    assert coefficients["decode.sequence_s"] == TRUTH.decode.sequence_s
    assert coefficients["transfer.latency_s"] == TRUTH.transfer.latency_s
    assert coefficients["fetch.host.token_s"] == TRUTH.tiers["host"].token_s


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["prefill", "decode", "fetch"]),
            st.integers(0, 3),
            st.integers(0, 300_000),
            st.integers(0, 1_000_000),
            st.floats(allow_nan=True, allow_infinity=True),
            st.floats(0.0, 1e6),
        ),
        max_size=60,
    )
)
@example([("prefill", 0, 27695, 0, 5e-324, 0.0)])
def test_whatever_is_seen_estimates_stay_within_bounds(
    events: list[tuple[str, int, int, int, float, float]],
) -> None:
    estimator = Estimator(TRUTH)
    for kind, worker, amount, more, seconds, now in events:
        if kind == "prefill":
            estimator.saw_prefill(worker, amount, more, CHUNK, seconds, now)
        elif kind == "decode":
            estimator.saw_decode(worker, amount, more, seconds, now)
        else:
            estimator.saw_fetch(worker, "host", amount, seconds, now)
    for worker in range(5):
        for estimate, start in (
            (estimator.prefill_s(worker, 9000, 100, CHUNK), TRUTH.prefill_s(9000, 100, CHUNK)),
            (estimator.decode_step_s(worker, 9, 9000), TRUTH.decode_step_s(9, 9000)),
            (estimator.fetch_s(worker, "host", 500), TRUTH.fetch_s("host", 500)),
            (estimator.transfer_s(worker, 500), TRUTH.transfer_s(500)),
        ):
            assert start / 33.0 < estimate < start * 33.0
