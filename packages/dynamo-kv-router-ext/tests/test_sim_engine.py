# SPDX-License-Identifier: Apache-2.0
"""One worker of the simulator: its cache, its scheduler, its jumps, its ranks, its tiers."""

from __future__ import annotations

import math

import pytest

from dynamo_kv_router_ext import Role, Worker
from dynamo_kv_router_ext._profile import TierCost
from dynamo_kv_router_ext.sim.engine import Engine, Job, Pool, Speed, Store
from support.linear_timing import Linear, near

SIZE = 10


def make(
    role: Role = "both",
    *,
    ranks: int = 1,
    capacity: int = 1000,
    sequences: int = 256,
    chunk: int = 100,
    speed: Speed | None = None,
    host: int = 0,
    store: Store | None = None,
) -> Engine:
    costs = {"host": TierCost(latency_s=0.1, token_s=0.001), "store": TierCost(latency_s=0.2, token_s=0.002)}
    return Engine(
        Worker("w", role, ranks, capacity, sequences, chunk),
        Linear(),
        SIZE,
        speed=speed,
        host_tokens=host,
        store=store,
        costs=costs,  # type: ignore[arg-type]  # the keys are literals
    )


def job(name: str, tokens: int, output: int = 1, first: int = 0, *, rank: int = 0, fetch: int = 0) -> Job:
    """A request whose blocks are numbered from `first` on."""
    return Job(name, tokens, output, tuple(range(first, first + (tokens + output) // SIZE)), rank, fetch)


def run(engine: Engine, now: float = 0.0, passes: int = 100_000) -> list[tuple[float, dict[str, int]]]:
    """Pass after pass: when each ended, and the tokens it gave."""
    ends = []
    for _ in range(passes):
        end = engine.start(now)
        if end is None:
            break
        now = end
        ends.append((now, {job.id: tokens for job, tokens in engine.finish()}))
    return ends


def events(engine: Engine, tier: str) -> list[tuple[bool, list[int]]]:
    found = [(event.stored, event.blocks) for event in engine.log if event.tier == tier]
    engine.log.clear()
    return found


# The cache ----------------------------------------------------------------------------------------------------------


def test_the_tail_of_what_is_idle_longest_leaves_first() -> None:
    pool = Pool(0, 4, 0, [])
    pool.take(4)
    pool.release(pool.cache([1, 2, 3]), 1)
    assert (pool.used, pool.available) == (0, 4)
    assert pool.hits([1, 2, 3, 4], 9) == 3
    assert pool.hits([1, 2, 3, 4], 2) == 2
    pool.pin([1])
    assert (pool.used, pool.available) == (1, 3)
    pool.take(2)  # one is free; of the idle ones, 3 was released first
    assert sorted(pool.cached) == [1, 2]
    assert [event for event in pool.log if not event.stored] == [(0, False, "device", [3])]


def test_a_second_copy_stays_private() -> None:
    pool = Pool(0, 4, 0, [])
    pool.take(2)
    assert pool.cache([1]) == [1]
    assert pool.cache([1]) == []
    assert (pool.private, pool.used) == (1, 2)


def test_ids_below_zero_are_not_told_of() -> None:
    pool = Pool(0, 4, 0, [])
    pool.take(2)
    pool.cache([-1, 5])
    assert pool.log == [(0, True, "device", [5])]


def test_the_store_keeps_what_was_used_last() -> None:
    store = Store(2)
    assert store.put([1, 2]) == ([1, 2], [])
    assert store.put([1]) == ([], [])
    assert store.put([3]) == ([3], [2])


def test_a_speed_is_piecewise() -> None:
    speed = Speed([(1.0, 2.0), (3.0, 0.5)], [(2.0, 4.0, 0.5)])
    assert [speed.at(t) for t in (0, 1, 2, 3, 4)] == [1.0, 2.0, 1.0, 0.25, 0.5]
    assert [speed.until(t) for t in (0, 1, 3.5, 4)] == [1.0, 2.0, 4.0, math.inf]
    with pytest.raises(ValueError, match=r"order of time, but 1\.0 follows 2\.0"):
        Speed([(2.0, 1.0), (1.0, 1.0)])
    with pytest.raises(ValueError, match=r"from 0.001 to 1000.0, not 0"):
        Speed([(0.0, 0)])


def test_a_capacity_below_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="9 tokens hold no block of 10"):
        make(capacity=9)


# The scheduler ------------------------------------------------------------------------------------------------------


def test_a_prompt_is_read_in_chunks_and_gives_its_first_token_without_decode_time() -> None:
    engine = make()
    engine.submit(job("a", 250, 3), 0.0)
    ends = run(engine)
    assert [tokens for _, tokens in ends] == [{}, {}, {"a": 1}, {"a": 2}]
    # 100 + 100 + 50 ms; then two steps with 251 and 252 resident tokens.
    assert [end for end, _ in ends] == near([0.1, 0.2, 0.25, 0.25 + 2 * 0.011 + 503e-6])
    assert engine.busy_s == near(ends[-1][0])
    assert (engine.prompt_tokens, engine.output_tokens) == (250, 3)
    assert engine.ranks[0].pool.used == 0


def test_what_is_left_of_a_chunk_goes_to_the_next_prompt() -> None:
    engine = make()
    engine.submit(job("a", 150), 0.0)
    engine.submit(job("b", 120, first=100), 0.0)
    assert run(engine) == [
        (near(0.1), {}),
        (near(0.2), {"a": 1}),  # 50 of a, 50 of b
        (near(0.27), {"b": 1}),
    ]


def test_running_ones_go_first_and_a_chunk_shares_the_step() -> None:
    engine = make()
    engine.submit(job("a", 20, 5), 0.0)
    assert engine.start(0.0) == near(0.02)
    engine.finish()
    engine.submit(job("b", 300, 1, first=100), 0.02)
    end = engine.start(0.02)
    # 1 token of a, then 99 of b: 99 ms, and a decode part of one sequence of 21 tokens.
    assert end == near(0.02 + 0.099 + 0.011 + 21e-6)
    assert [(job.id, tokens) for job, tokens in engine.finish()] == [("a", 1)]


def test_no_more_sequences_than_allowed() -> None:
    engine = make(sequences=1)
    engine.submit(job("a", 10, 3), 0.0)
    engine.submit(job("b", 10, 1, first=100), 0.0)
    assert [tokens for _, tokens in run(engine)] == [{"a": 1}, {"a": 2}, {"b": 1}]


def test_a_hit_is_whole_blocks_and_never_the_last_token() -> None:
    for tokens, hit in ((50, 40), (51, 50), (45, 40), (9, 0)):
        engine = make()
        engine.submit(job("a", 60), 0.0)
        run(engine)
        again = job("b", tokens)
        engine.submit(again, 1.0)
        ends = run(engine, 1.0)
        assert again.hit == hit
        assert ends[0][0] == near(1.0 + 0.001 * (tokens - hit))


def test_blocks_of_a_pass_are_hits_for_later_ones_of_the_same_pass() -> None:
    engine = make()
    engine.submit(job("a", 50), 0.0)
    twin = job("b", 50)
    engine.submit(twin, 0.0)
    assert run(engine)[0] == (near(0.06), {"a": 1, "b": 1})
    assert twin.hit == 40


def test_an_answer_stays_in_the_cache() -> None:
    engine = make()
    engine.submit(job("a", 15, 16), 0.0)  # 30 tokens are computed: the last one is not
    run(engine)
    nxt = job("b", 45)
    engine.submit(nxt, 9.0)
    run(engine, 9.0)
    assert nxt.hit == 30


def test_the_head_waits_for_room_and_nobody_passes_it() -> None:
    engine = make(capacity=100)
    engine.submit(job("a", 60, 5), 0.0)
    engine.submit(job("b", 60, 1, first=100), 0.0)
    engine.submit(job("c", 10, 1, first=200), 0.0)
    # b starts when a has ended; c comes after it though it would have had room.
    assert [tokens for _, tokens in run(engine)] == [{"a": 1}, {"a": 4}, {"b": 1, "c": 1}]


def test_the_last_one_is_preempted_and_starts_again_from_what_is_cached() -> None:
    engine = make(capacity=100)
    first, last = job("a", 40, 30), job("b", 40, 30, first=100)
    engine.submit(first, 0.0)
    engine.submit(last, 0.0)
    tokens = {"a": 0, "b": 0}
    for _, given in run(engine):
        for name, count in given.items():
            tokens[name] += count
    assert tokens == {"a": 30, "b": 30}
    assert (first.preemptions, last.preemptions) == (0, 1)
    assert engine.preemptions == 1
    # b had computed 50 tokens when a needed a sixth block, and later a seventh: these were b's last two. Of its 51
    # tokens b read 21 anew.
    assert engine.prompt_tokens == 80 + 21
    assert engine.ranks[0].pool.used == 0


def test_what_can_never_fit() -> None:
    engine = make(capacity=100)
    assert engine.fits(90, 10)
    assert not engine.fits(91, 10)


# Jumps --------------------------------------------------------------------------------------------------------------


def test_a_jump_ends_with_the_pass_that_runs_when_something_comes() -> None:
    engine = make()
    engine.submit(job("a", 10, 101), 0.0)
    run(engine, passes=1)
    end = engine.start(0.01)
    assert end is not None
    assert end == near(0.01 + Linear().decode_run_s(1, 11, 100))
    third = 0.01 + Linear().decode_run_s(1, 11, 3)
    assert engine.done_by(third - 0.005) == 2
    assert engine.cut(third - 0.005) == near(third)
    assert engine.cut(third - 0.001) == near(third)
    assert engine.done_by(third - 0.001) == 2
    assert [(job.id, tokens) for job, tokens in engine.finish()] == [("a", 3)]
    assert engine.cut(1.0) is None


def test_jumps_are_the_sum_of_their_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome() -> tuple[list[float], int]:
        engine = make(capacity=300, speed=Speed([(0.3, 1.3), (0.9, 0.7)]))
        jobs = [job(str(n), 30 + 7 * n, 20 + 3 * n, first=100 * n) for n in range(6)]
        for one in jobs:
            engine.submit(one, 0.0)
        last: dict[str, float] = {}
        passes = 0
        for end, tokens in run(engine):
            passes += 1
            last.update(dict.fromkeys(tokens, end))
        return list(last.values()), passes

    jumped, fewer = outcome()
    monkeypatch.setattr("dynamo_kv_router_ext.sim.engine._Rank.room", lambda self, jobs, passes: 1)
    stepped, more = outcome()
    assert jumped == near(stepped, rel=1e-12)
    assert fewer < more / 3


def test_a_step_has_the_speed_of_its_start() -> None:
    engine = make(speed=Speed([(0.05, 2.0)]))
    engine.submit(job("a", 300), 0.0)
    assert [end for end, _ in run(engine)] == near([0.1, 0.15, 0.2])


# Ranks in lockstep --------------------------------------------------------------------------------------------------


def test_a_step_lasts_as_long_as_the_slowest_ranks() -> None:
    engine = make(ranks=2)
    engine.submit(job("a", 100, 2), 0.0)
    engine.submit(job("b", 20, 2, rank=1), 0.0)
    ends = run(engine)
    # Both first tokens come when the longer chunk is done; then both decode, 101 tokens against 21.
    assert ends == [
        (near(0.1), {"a": 1, "b": 1}),
        (near(0.1 + 0.011 + 101e-6), {"a": 1, "b": 1}),
    ]


def test_ranks_have_caches_of_their_own() -> None:
    engine = make(ranks=2)
    engine.submit(job("a", 50), 0.0)
    run(engine)
    there, here = job("b", 50, rank=1), job("c", 50)
    engine.submit(there, 1.0)
    engine.submit(here, 1.0)
    run(engine, 1.0)
    assert (there.hit, here.hit) == (0, 40)
    assert {event.rank for event in engine.log} == {0, 1}


def test_a_jump_of_ranks_changes_its_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome() -> list[tuple[float, dict[str, int]]]:
        engine = make(ranks=2, capacity=10_000, chunk=8000)
        # One long sequence leads at first; 30 ones that grow overtake it in resident tokens, and lead by their number.
        engine.submit(job("long", 5000, 300), 0.0)
        for n in range(3):
            engine.submit(job(str(n), 10, 300, first=1000 * (n + 1), rank=1), 0.0)
        return run(engine)

    jumped = outcome()
    monkeypatch.setattr("dynamo_kv_router_ext.sim.engine._Rank.room", lambda self, jobs, passes: 1)
    stepped = outcome()
    assert jumped[-1][0] == near(stepped[-1][0], rel=1e-12)
    assert len(jumped) < 30 < len(stepped)


# Tiers --------------------------------------------------------------------------------------------------------------


def fetched(engine: Engine) -> float:
    """Let the fetches that were started end; return when the last one did."""
    done = 0.0
    for at, one in engine.fetches:
        engine.fetched(one)
        done = max(done, at)
    engine.fetches.clear()
    return done


def test_what_leaves_the_device_goes_to_host_memory_and_comes_back() -> None:
    engine = make(capacity=100, host=200)
    engine.submit(job("a", 90), 0.0)
    run(engine)
    engine.submit(job("b", 90, first=100), 1.0)
    run(engine, 1.0)
    # b took 9 of 10 blocks: 8 of a's 9, from the tail.
    assert events(engine, "host") == [(True, [8, 7, 6, 5, 4, 3, 2, 1])]
    again = job("c", 90, fetch=90)
    engine.submit(again, 2.0)
    # Block 0 is on the device; 1 to 7 come from the host, never the last token's: 0.1 s + 70 ms.
    assert engine.start(2.0) is None
    assert engine.fetches == [(near(2.17), again)]
    assert fetched(engine) == near(2.17)
    assert run(engine, 2.17) == [(near(2.18), {"c": 1})]
    assert (again.hit, again.fetched, again.fetch_s) == (10, {"host": 70}, near(0.17))


def test_host_memory_keeps_what_left_the_device_last() -> None:
    engine = make(capacity=100, host=30)
    engine.submit(job("a", 90), 0.0)
    engine.submit(job("b", 90, first=100), 0.0)
    run(engine)
    assert events(engine, "host") == [(True, [8, 7, 6, 5, 4, 3, 2, 1]), (False, [8, 7, 6, 5, 4])]


def test_what_left_the_device_while_a_request_waited_is_fetched() -> None:
    engine = make(capacity=200, host=500)
    engine.submit(job("first", 100, first=0), 0.0)
    run(engine)
    engine.submit(job("second", 150, first=50), 1.0)
    engine.start(1.0)
    again = job("again", 105, first=0, fetch=105)
    engine.submit(again, 1.0)  # half of it is still on the device, and nothing of it anywhere else
    engine.finish()
    assert run(engine, 2.0) == [(near(2.05), {"second": 1})]
    assert (again.hit, again.fetched) == (50, {"host": 50})
    fetched(engine)
    assert [given for _, given in run(engine, 3.0)] == [{"again": 1}]


def test_no_more_is_fetched_than_was_decided() -> None:
    for limit, want in ((0, 0), (9, 0), (35, 30), (1000, 80)):
        store = Store(100)
        store.put(range(9))
        engine = make(store=store)
        one = job("a", 90, fetch=limit)
        engine.submit(one, 0.0)
        fetched(engine)
        run(engine)
        assert sum(one.fetched.values()) == want
        assert engine.prompt_tokens == 90 - want


def test_the_store_is_written_when_a_prompt_has_been_read_and_all_read_it() -> None:
    store = Store(100)
    writer, reader = make("prefill", store=store), make("prefill", store=store)
    writer.submit(job("a", 55), 0.0)
    assert not store.blocks
    run(writer)
    assert events(writer, "store") == [(True, [0, 1, 2, 3, 4])]
    one = job("b", 55, fetch=55)
    reader.submit(one, 1.0)
    assert fetched(reader) == near(1.0 + 0.2 + 0.1)
    assert run(reader, 1.3) == [(near(1.305), {"b": 1})]
    assert one.fetched == {"store": 50}


def test_a_link_carries_one_fetch_at_a_time_and_others_run_meanwhile() -> None:
    store = Store(100)
    store.put(range(5))
    store.put(range(50, 55))
    engine = make(store=store)
    engine.submit(job("a", 55, fetch=55), 0.0)
    engine.submit(job("b", 55, first=50, fetch=55), 0.0)
    engine.submit(job("c", 30, first=90), 0.0)
    assert [at for at, _ in engine.fetches] == [near(0.3), near(0.6)]
    assert run(engine) == [(near(0.03), {"c": 1})]


def test_fetched_blocks_do_not_block_the_head_for_ever() -> None:
    store = Store(100)
    store.put(range(5))
    engine = make(capacity=100, store=store)
    engine.submit(job("a", 60, 1, first=100), 0.0)
    one = job("b", 60, fetch=60)
    engine.submit(one, 0.0)
    engine.submit(job("c", 90, 1, first=200), 0.0)
    fetched(engine)
    given = [name for _, tokens in run(engine, 1.0) for name in tokens]
    assert sorted(given) == ["a", "b", "c"]


# Hand-over ----------------------------------------------------------------------------------------------------------


def test_a_prefill_worker_keeps_the_blocks_until_they_are_released() -> None:
    engine = make("prefill", capacity=100)
    one = job("a", 60)
    engine.submit(one, 0.0)
    engine.submit(job("b", 60, first=100), 0.0)
    assert run(engine) == [(near(0.06), {"a": 1})]
    engine.release(one)
    assert run(engine, 1.0) == [(near(1.06), {"b": 1})]


def test_a_decoder_takes_blocks_in_order_and_pulls_what_it_lacks() -> None:
    engine = make("decode", capacity=100)
    first, second = job("a", 55, 2), job("b", 65, 2, first=100)
    assert engine.arrive(first) == [(first, 55)]
    assert engine.arrive(second) == []
    engine.pulled(first)
    # The first step counts the prompt's tokens alone, and gives the first token.
    assert run(engine, passes=1) == [(near(0.011 + 55e-6), {"a": 1})]
    run(engine)
    assert engine.reserve(0) == [(second, 65)]
    engine.pulled(second)
    run(engine)
    again = job("c", 55, 2)
    assert engine.arrive(again) == [(again, 25)]  # three of the five full blocks are still there
    engine.cancel(again)
    assert engine.ranks[0].pool.used == 0


def test_a_cancelled_request_leaves_wherever_it_is() -> None:
    engine = make(capacity=1000)
    running, waiting = job("a", 150, 5), job("b", 150, 5, first=100)
    engine.submit(running, 0.0)
    engine.submit(waiting, 0.0)
    engine.start(0.0)
    engine.cancel(running)
    engine.cancel(waiting)
    assert engine.finish() == []
    assert engine.start(0.1) is None
    assert engine.ranks[0].pool.used == 0
