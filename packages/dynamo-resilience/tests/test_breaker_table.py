# SPDX-License-Identifier: Apache-2.0
"""The rules of breakers, in the table and in the store's script: the same operations give the same answers in both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from dynamo_resilience._breaker_table import BreakerTable
from dynamo_resilience._config import BreakerPolicy
from dynamo_resilience._store import BreakerState, Claim, Report
from support.store_server import StoreServer

# As large as the store's own: milliseconds since 1970.
START = 1_700_000_000_000
POLICY = BreakerPolicy(window_s=10.0, min_requests=10, open_s=5.0, max_open_s=20.0, probe_s=30.0, max_open_share=0.5)
PREFIX = "{test}:"


class Bench:
    """A table with its clock, and one group of targets `0`, `1`, ...; keeps what the table announced."""

    def __init__(self, members: int = 4, policy: BreakerPolicy = POLICY) -> None:
        self.announced: list[BreakerState] = []
        self.table = BreakerTable(self.announced.append)
        self.now = START
        self.members = members
        self.policy = policy

    def report(self, target: int = 0, **counts: Any) -> BreakerState:
        return self.table.report(self.now, Report(str(target), "group", self.members, **counts), self.policy)

    def claim(self, target: int = 0) -> BreakerState:
        return self.table.claim(self.now, Claim(str(target), "group"), self.policy)

    def wait(self, seconds: float) -> None:
        self.now += round(seconds * 1000)


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ({"errors": 5, "ok": 5}, "errors"),
        ({"timeouts": 3, "ok": 7}, "timeouts"),
        ({"slow_first": 7, "ok": 3}, "slow_first"),
        ({"slow_tokens": 7, "ok": 3}, "slow_tokens"),
        ({"errors": 5, "timeouts": 5}, "errors"),
    ],
)
def test_each_kind_opens_at_its_own_share(counts: dict[str, int], reason: str) -> None:
    state = Bench().report(**counts)
    assert (state.state, state.reason, state.remaining_ms, state.opens) == ("open", reason, 5_000, 1)


def test_targets_that_nothing_is_heard_of_any_more_are_forgotten() -> None:
    bench = Bench()
    for worker in range(100):
        bench.report(worker, errors=20)
    bench.wait(10 * POLICY.window_s + POLICY.max_open_s + POLICY.probe_s)
    bench.report(1000, ok=1)
    assert [one.target for one in bench.table.all()] == ["1000"]


@pytest.mark.parametrize(
    "counts",
    [
        {"errors": 4, "ok": 6},
        {"timeouts": 2, "ok": 8},
        {"slow_first": 6, "ok": 4},
        {"slow_tokens": 6, "ok": 4},
        {"errors": 9},
    ],
)
def test_less_than_its_share_or_too_few_outcomes_open_nothing(counts: dict[str, int]) -> None:
    assert Bench().report(**counts).state == "closed"


def test_what_is_older_than_the_window_does_not_count() -> None:
    bench = Bench()
    bench.report(errors=5)
    bench.wait(9)
    assert bench.report(ok=4).state == "closed"  # nine in all
    bench.wait(2)
    assert bench.report(errors=4).state == "closed"  # eight: the first five are gone
    assert bench.report(errors=2).state == "open"


def test_several_replicas_outcomes_add_up() -> None:
    bench = Bench()
    states = [bench.report(errors=1, ok=1).state for _ in range(5)]
    assert states == ["closed"] * 4 + ["open"]


def test_open_until_a_probe_succeeds_and_reports_move_nothing() -> None:
    bench = Bench()
    bench.report(errors=10)
    assert bench.claim().probe == 0
    bench.wait(4.999)
    assert bench.report(ok=1000).state == "open"
    assert bench.claim().probe == 0
    bench.wait(0.001)
    granted = bench.claim()
    assert (granted.state, granted.remaining_ms) == ("half_open", 30_000)
    assert granted.probe > 0
    assert bench.claim().probe == 0
    closed = bench.report(probe=granted.probe, probe_ok=True, ok=1)
    assert (closed.state, closed.reason) == ("closed", "")
    assert bench.report(errors=9).state == "closed"  # the window was emptied
    assert [one.state for one in bench.announced] == ["open", "half_open", "closed"]
    assert {one.probe for one in bench.announced} == {0}
    versions = [one.version for one in bench.announced]
    assert versions == sorted(set(versions))


def test_failed_probes_double_the_time_up_to_the_longest() -> None:
    bench = Bench()
    bench.report(errors=10)
    waits = []
    for _ in range(4):
        state = bench.report()
        waits.append(state.remaining_ms)
        bench.wait(state.remaining_ms / 1000)
        failed = bench.report(probe=bench.claim().probe, errors=1)
    assert waits == [5_000, 10_000, 20_000, 20_000]
    assert (failed.state, failed.reason, failed.opens) == ("open", "probe", 5)


@pytest.mark.parametrize(("closed_s", "open_ms"), [(19.0, 10_000), (20.0, 5_000)])
def test_staying_closed_for_the_longest_time_forgives_earlier_openings(closed_s: float, open_ms: int) -> None:
    bench = Bench()
    bench.report(errors=10)
    bench.wait(5)
    bench.report(probe=bench.claim().probe, probe_ok=True)
    bench.wait(closed_s)
    assert bench.report(errors=10).remaining_ms == open_ms


def test_a_lost_probe_is_replaced_and_its_late_end_says_nothing() -> None:
    bench = Bench()
    bench.report(errors=10)
    bench.wait(5)
    first = bench.claim().probe
    bench.wait(29.999)
    assert bench.claim().probe == 0
    bench.wait(0.001)
    second = bench.claim().probe
    assert second > first
    assert bench.report(probe=first, probe_ok=True).state == "half_open"
    assert bench.report(probe=first, errors=1).state == "half_open"
    assert bench.report(probe=second, probe_ok=True).state == "closed"


def test_a_probe_that_ends_late_counts_while_nobody_has_another() -> None:
    bench = Bench()
    bench.report(errors=10)
    bench.wait(5)
    probe = bench.claim().probe
    bench.wait(31)
    assert bench.report(probe=probe, probe_ok=True).state == "closed"


def test_a_probe_without_a_verdict_is_given_back() -> None:
    bench = Bench()
    bench.report(errors=10)
    bench.wait(5)
    first = bench.claim().probe
    back = bench.report(probe=-first)
    assert (back.state, back.remaining_ms, back.opens, back.reason) == ("open", 0, 1, "errors")
    assert bench.claim().probe > first


@pytest.mark.parametrize(
    ("members", "share", "most"), [(1, 1.0, 0), (2, 1.0, 1), (2, 0.0, 1), (10, 0.3, 3), (4, 1.0, 3)]
)
def test_no_more_than_the_share_of_a_group_opens_and_never_the_last(members: int, share: float, most: int) -> None:
    bench = Bench(members, POLICY.model_copy(update={"max_open_share": share}))
    states = [bench.report(target, errors=100).state for target in range(members)]
    assert states == ["open"] * most + ["closed"] * (members - most)


def test_a_guarded_breaker_opens_once_another_closes() -> None:
    bench = Bench(members=2)
    bench.report(0, errors=10)
    assert bench.report(1, errors=10).state == "closed"
    bench.wait(5)
    probe = bench.claim(0).probe
    assert bench.report(1, errors=10).state == "closed"  # half-open counts as open
    bench.report(0, probe=probe, probe_ok=True)
    assert bench.report(1, errors=1).state == "open"


def test_what_was_not_heard_of_for_long_is_forgotten_and_frees_its_place() -> None:
    bench = Bench(members=2)
    gone = bench.report(0, errors=10)
    bench.wait(10 * 10 + 20 + 30)
    assert bench.table.states(bench.now) == []
    assert bench.claim(0) == BreakerState("0", "group", "closed", 0, 0, "", 0)
    assert bench.report(1, errors=10).state == "open"
    assert bench.report(1).version > gone.version


def test_versions_rise_over_a_record_that_was_forgotten() -> None:
    bench = Bench()
    first = bench.report(errors=10)
    bench.wait(1000)
    assert bench.report(errors=10).version > first.version


def test_a_mirror_takes_over_what_is_newer_and_nothing_older() -> None:
    bench, mirror = Bench(), BreakerTable()
    opened = bench.report(errors=10)
    bench.wait(5)
    half = bench.claim()
    assert mirror.adopt(77_000, half._replace(probe=0), POLICY)
    assert not mirror.adopt(77_001, opened, POLICY)
    assert mirror.states(77_001) == [half._replace(probe=0, remaining_ms=29_999)]
    # A store that lost everything has smaller versions, or none.
    assert mirror.adopt(77_002, half._replace(state="closed", version=0), POLICY, force=True)
    assert mirror.states(77_002) == []


def test_a_mirror_goes_on_where_the_other_table_was() -> None:
    bench, mirror = Bench(), BreakerTable()
    bench.report(errors=10)
    bench.wait(5)
    half = bench.claim()
    mirror.adopt(1_000, half._replace(probe=0), POLICY)
    assert (
        mirror.report(2_000, Report("0", "group", 4, ok=1, probe=half.probe, probe_ok=True), POLICY).state == "closed"
    )


# The store's script. Its last two lines ask the store for the time; everything else is a function of the time, the
# operation and the keys, which the tests call with a time of their own.

ASKS_THE_CLOCK = """\
local _, now_ms = epoch_now(KEYS[1], 0)
return run(KEYS[1], now_ms, cjson.decode(ARGV[1]))
"""
TOLD_THE_TIME = "return run(KEYS[1], tonumber(ARGV[2]), cjson.decode(ARGV[1]))"


def script(name: str) -> str:
    return (files("dynamo_resilience") / "lua" / name).read_text()


@pytest.fixture(scope="module")
def client() -> Iterator[redis.Redis]:
    with StoreServer() as server, server.client() as client:
        yield client


NAMES = st.sampled_from(["t/0 \u00e9", "t/1", "t/2"])
GROUPS = st.sampled_from(["g", "g", "g", "h"])
COUNTS = st.one_of(
    st.just((0, 0, 0, 0, 0)), st.just((0, 10, 0, 0, 0)), st.tuples(*[st.sampled_from([0, 0, 1, 4, 10])] * 5)
)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("report"), NAMES, GROUPS, COUNTS, st.sampled_from(["", "", "stale", "failed"])),
        st.tuples(st.just("report"), NAMES, GROUPS, COUNTS, st.sampled_from(["ok", "failed", "back"])),
        st.tuples(st.just("claim"), NAMES, GROUPS),
        st.tuples(st.just("claim when due"), NAMES, GROUPS, st.sampled_from(["", "ok", "ok", "failed"])),
        st.tuples(st.just("states")),
        st.tuples(st.just("wait"), st.sampled_from([1, 4, 5, 49, 50, 100, 999, 1000, 2500, 30_000])),
        # To the edge of something, which is where two implementations differ.
        st.tuples(st.just("edge"), NAMES, st.sampled_from(["until", "expires", "changed"]), st.integers(-1, 1)),
    ),
    min_size=10,
    max_size=60,
)
POLICIES = st.builds(
    BreakerPolicy,
    window_s=st.sampled_from([0.05, 1.0, 2.5]),
    min_requests=st.sampled_from([1, 10]),
    error_rate=st.sampled_from([0.1, 0.3, 0.5]),
    timeout_rate=st.sampled_from([0.3, 1 / 3]),
    open_s=st.sampled_from([0.1, 1.0, 7.0]),
    max_open_s=st.sampled_from([0.1, 2.0, 2.0005]),
    probe_s=st.sampled_from([0.5, 7.0]),
    max_open_share=st.sampled_from([0.0, 0.3, 0.5, 0.75, 1.0]),
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(operations=OPERATIONS, policies=st.lists(POLICIES, min_size=1, max_size=2), members=st.integers(1, 4))
def test_the_script_does_what_the_table_does(
    client: redis.Redis, operations: list[Any], policies: list[BreakerPolicy], members: int
) -> None:
    body, clock, rest = script("breaker.lua").partition(ASKS_THE_CLOCK)
    assert (clock, rest) == (ASKS_THE_CLOCK, "")
    client.flushall()
    run = client.register_script(body + TOLD_THE_TIME)
    announced: list[BreakerState] = []
    table = BreakerTable(announced.append)
    granted: dict[str, int] = {}
    now = START
    said: list[list[BreakerState]] = []
    with client.pipeline(transaction=False) as pipeline, client.pubsub() as channel:  # type: ignore[no-untyped-call]
        channel.subscribe(PREFIX + "events")
        for number, (kind, *arguments) in enumerate(steps(operations)):
            policy = policies[number % len(policies)]  # as when two replicas were configured differently
            operation: dict[str, Any] = {"op": kind, "policy": policy.model_dump()}
            if kind == "wait":
                now += arguments[0]
                continue
            if kind == "edge":
                name, edge, delta = arguments
                breaker = table.get(name)
                if breaker is not None:
                    since = round(policy.max_open_s * 1000) if edge == "changed" else 0
                    now = max(now, getattr(breaker, edge) + since + delta)
                continue
            if kind == "states":
                said.append(sorted(table.states(now)))  # in no order
            elif kind.startswith("claim"):
                name, group = arguments[:2]
                if kind == "claim when due" and (breaker := table.get(name)) is not None:
                    now = max(now, breaker.until)
                operation |= {"op": "claim", "claim": Claim(name, group)}
                state = table.claim(now, operation["claim"], policy)
                granted[name] = state.probe or granted.get(name, 0)
                said.append([state])
            else:
                name, group, counts, end = arguments
                probe = granted.get(name, 0)
                probe = {"": 0, "back": -probe, "stale": probe - 1}.get(end, probe)
                report = Report(name, group, members, *counts)._replace(probe=probe, probe_ok=end == "ok")
                operation["reports"] = [report]
                said.append([table.report(now, report, policy)])
            run(keys=[PREFIX], args=[json.dumps(operation), now], client=pipeline)
        answers = [states_of(json.loads(answer)) for answer in pipeline.execute()]
        published = read_all(client, channel)
    assert answers == said
    assert published == [{"v": 1, "k": "b", "s": list(state)} for state in announced]
    # Nothing stays for ever.
    assert all(client.pttl(key) > 0 for key in client.scan_iter("*"))


def steps(operations: list[Any]) -> Iterator[Any]:
    """A claim may be followed at once by the end of its probe, or a breaker would hardly ever close."""
    for operation in operations:
        yield operation
        if operation[0] == "claim when due" and operation[3]:
            yield ("report", operation[1], operation[2], (0, 0, 0, 0, 0), operation[3])


def states_of(answer: list[Any]) -> list[BreakerState]:
    """One state or a list of them, as the script writes them."""
    if answer and not isinstance(answer[0], list):
        return [BreakerState(*answer)]
    return sorted(BreakerState(*one) for one in answer)


def read_all(client: redis.Redis, channel: Any) -> list[Any]:
    """Return what was published until now."""
    client.publish(PREFIX + "events", "null")
    found: list[Any] = []
    while True:
        message = channel.get_message(timeout=10)
        if message is not None and message["type"] == "message":
            if message["data"] == "null":
                return found
            found.append(json.loads(message["data"]))


def test_one_report_moves_many_breakers_of_a_group_by_the_same_guard(client: redis.Redis) -> None:
    client.flushall()
    run = client.register_script(script("epoch.lua") + "\n" + script("breaker.lua"))
    reports = [Report(str(target), "g", 4, errors=10) for target in range(4)]
    operation = {"op": "report", "reports": reports, "policy": POLICY.model_dump()}
    states = [BreakerState(*one) for one in json.loads(run(keys=[PREFIX], args=[json.dumps(operation)]))]
    assert [one.state for one in states] == ["open", "open", "closed", "closed"]
    assert [one.remaining_ms for one in states] == [5_000, 5_000, 0, 0]
    listed = [BreakerState(*one) for one in json.loads(run(keys=[PREFIX], args=['{"op":"states"}']))]
    assert sorted(one.target for one in listed) == ["0", "1"]
    assert {one.version for one in listed} == {one.version for one in states if one.state == "open"}
    assert all(key.startswith(PREFIX) for key in client.scan_iter("*"))


class Guard(RuleBasedStateMachine):
    """Two groups under any reports, claims and ends of probes."""

    probes = Bundle("probes")

    def __init__(self) -> None:
        super().__init__()
        self.table = BreakerTable()
        self.now = START
        self.live: dict[str, dict[int, int]] = {}  # target -> number -> deadline

    @initialize(members=st.integers(1, 6), share=st.floats(0, 1))
    def begin(self, members: int, share: float) -> None:
        self.members = members
        self.policy = BreakerPolicy(
            window_s=1.0, min_requests=2, open_s=0.5, max_open_s=2.0, probe_s=1.0, max_open_share=share
        )

    @rule(number=st.integers(0, 5), group=st.sampled_from("ab"), errors=st.integers(0, 4), ok=st.integers(0, 4))
    def report(self, number: int, group: str, errors: int, ok: int) -> None:
        name = f"{group}{number % self.members}"
        self.table.report(self.now, Report(name, group, self.members, ok=ok, errors=errors), self.policy)

    @rule(group=st.sampled_from("ab"))
    def all_fail(self, group: str) -> None:
        for target in range(self.members):
            report = Report(f"{group}{target}", group, self.members, errors=5)
            self.table.report(self.now, report, self.policy)

    @rule(ms=st.sampled_from([1, 250, 500, 1000, 5000, 20_000]))
    def wait(self, ms: int) -> None:
        self.now += ms

    @rule(target=probes, number=st.integers(0, 5), group=st.sampled_from("ab"))
    def claim(self, number: int, group: str) -> tuple[str, int]:
        name = f"{group}{number % self.members}"
        probe = self.table.claim(self.now, Claim(name, group), self.policy).probe
        if probe:
            running = self.live.setdefault(name, {})
            assert all(probe > other for other in running)
            running[probe] = self.now + 1000
        return name, probe

    @rule(claimed=consumes(probes), end=st.sampled_from(["ok", "failed", "back"]))
    def end(self, claimed: tuple[str, int], end: str) -> None:
        name, probe = claimed
        if probe:
            self.live[name].pop(probe, None)
            number = -probe if end == "back" else probe
            report = Report(name, name[0], self.members, probe=number, probe_ok=end == "ok")
            self.table.report(self.now, report, self.policy)

    @invariant()
    def some_stay(self) -> None:
        away = self.table.states(self.now)
        for group in "ab":
            open_ = sum(one.group == group for one in away)
            if open_:
                assert open_ <= self.members - 1
                assert open_ <= max(1, self.policy.max_open_share * self.members + 1e-6)

    @invariant()
    def one_probe(self) -> None:
        for running in self.live.values():
            assert sum(deadline > self.now for deadline in running.values()) <= 1


TestGuard = Guard.TestCase
TestGuard.settings = settings(max_examples=80, stateful_step_count=40)
