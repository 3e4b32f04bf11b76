# SPDX-License-Identifier: Apache-2.0
"""Sessions stay bound to one seat, for their time and within a bound; what they generate is learnt."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dynamo_kv_router_ext._sessions import Sessions
from dynamo_kv_router_ext._types import Seat


def test_a_session_is_bound_to_one_seat() -> None:
    sessions = Sessions()
    assert sessions.bound("a", 0.0) is None
    assert sessions.resident("a", 0.0) == 0
    sessions.bind("a", Seat("w1", 0), 100, 0.0)
    assert (sessions.bound("a", 1.0), sessions.resident("a", 1.0)) == (Seat("w1", 0), 100)
    sessions.bind("a", Seat("w2", 3), 250, 2.0)
    assert (sessions.bound("a", 3.0), sessions.resident("a", 3.0)) == (Seat("w2", 3), 250)
    assert len(sessions) == 1


def test_a_request_without_a_session_has_no_seat() -> None:
    sessions = Sessions()
    sessions.bind("a", Seat("w1", 0), 100, 0.0)
    assert sessions.bound(None, 0.0) is None
    assert sessions.resident(None, 0.0) == 0


def test_a_session_that_is_not_used_is_forgotten_and_asking_is_no_use() -> None:
    sessions = Sessions(ttl_s=10.0)
    sessions.bind("a", Seat("w1", 0), 100, 0.0)
    sessions.bind("b", Seat("w1", 0), 100, 0.0)
    sessions.bind("a", Seat("w1", 0), 200, 5.0)
    assert sessions.bound("b", 9.9) == Seat("w1", 0)
    assert sessions.bound("b", 10.0) is None
    assert sessions.expire(10.0) == 1
    assert len(sessions) == 1
    assert sessions.bound("a", 14.9) == Seat("w1", 0)
    assert sessions.expire(15.0) == 1
    assert len(sessions) == 0


def test_the_least_recently_used_go_beyond_the_limit() -> None:
    sessions = Sessions(limit=2)
    sessions.bind("a", Seat("w", 0), 1, 0.0)
    sessions.bind("b", Seat("w", 0), 1, 1.0)
    sessions.bind("a", Seat("w", 0), 1, 2.0)
    sessions.bind("c", Seat("w", 0), 1, 3.0)
    assert [sessions.bound(name, 3.0) is not None for name in "abc"] == [True, False, True]


def test_bindings_are_told_the_latest_first_and_restored_with_their_age() -> None:
    sessions = Sessions(ttl_s=100.0)
    for number in range(6):
        sessions.bind(f"s{number}", Seat(number % 2, 0), 100 * number, 10.0 * number)
    sessions.bind("s2", Seat(0, 1), 7, 60.0)
    sessions.drop_worker(1)
    told = sessions.bindings(2, 70.0)
    assert told == [("s2", Seat(0, 1), 7, 10.0), ("s4", Seat(0, 0), 400, 30.0)]
    assert len(sessions.bindings(1000, 70.0)) == 3
    assert sessions.bindings(1000, 150.0) == [("s2", Seat(0, 1), 7, 90.0)]
    assert sessions.bindings(0, 70.0) == []

    other = Sessions(ttl_s=100.0)
    other.bind("s4", Seat("own", 0), 5, 1041.0)
    other.bind("s2", Seat("own", 0), 5, 1049.0)
    for session, seat, tokens, age_s in sessions.bindings(1000, 70.0):
        other.bind(session, seat, tokens, 1070.0, used_at=1070.0 - age_s)
    assert other.bindings(1000, 1070.0) == [
        ("s2", Seat(0, 1), 7, 10.0),
        ("s4", Seat("own", 0), 5, 29.0),
        ("s0", Seat(0, 0), 0, 70.0),
    ]
    assert other.bound("s0", 1100.0) is None
    assert other.expire(1100.0) == 1


def test_a_restored_binding_that_has_expired_or_finds_no_room_is_none() -> None:
    sessions = Sessions(ttl_s=10.0, limit=3)
    sessions.bind("old", Seat("w", 0), 1, 20.0, used_at=10.0)
    assert (len(sessions), sessions.bound("old", 20.0)) == (0, None)
    for number in range(5):
        sessions.bind(f"s{number}", Seat("w", 0), 1, 20.0, used_at=19.0 - number)
    assert len(sessions) == 3
    assert [name for name, *_ in sessions.bindings(10, 20.0)] == ["s0", "s1", "s2"]
    sessions.bind("new", Seat("w", 0), 1, 20.0)
    assert [name for name, *_ in sessions.bindings(10, 20.0)] == ["new", "s0", "s1"]


def test_a_worker_that_is_gone_holds_no_session_but_what_they_generate_is_remembered() -> None:
    sessions = Sessions()
    for name, seat in (("a", Seat("w1", 0)), ("b", Seat("w2", 0)), ("c", Seat("w1", 1))):
        sessions.bind(name, seat, 10, 0.0)
    sessions.saw_output("a", 700)
    sessions.saw_output("b", 100)
    assert sessions.drop_worker("w1") == 2
    assert sessions.drop_worker("w1") == 0
    assert [sessions.bound(name, 1.0) for name in "abc"] == [None, Seat("w2", 0), None]
    assert sessions.resident("a", 1.0) == 0
    assert sessions.expected_output("a") == 700.0


def test_expected_output_is_the_sessions_own_mean_else_that_of_all_else_the_default() -> None:
    sessions = Sessions(default_output=64.0)
    assert sessions.expected_output(None) == 64.0
    sessions.bind("a", Seat("w", 0), 1, 0.0)
    sessions.bind("b", Seat("w", 0), 1, 0.0)
    for tokens in (100, 300):
        sessions.saw_output("a", tokens)
    sessions.saw_output("stranger", 800)
    sessions.saw_output(None, 800)
    assert sessions.expected_output("a") == 200.0
    assert sessions.expected_output("b") == sessions.expected_output("stranger") == 500.0
    assert len(sessions) == 2


def test_expected_output_follows_a_session_that_changes() -> None:
    sessions = Sessions()
    sessions.bind("a", Seat("w", 0), 1, 0.0)
    for _ in range(200):
        sessions.saw_output("a", 100)
    for _ in range(30):
        sessions.saw_output("a", 2000)
    assert sessions.expected_output("a") > 1900


def test_an_answer_without_tokens_teaches_nothing() -> None:
    sessions = Sessions(default_output=64.0)
    sessions.saw_output(None, 0)
    assert sessions.expected_output(None) == 64.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ttl_s": 0.0}, "ttl_s must be above 0, not 0.0"),
        ({"ttl_s": math.nan}, "ttl_s must be above 0, not nan"),
        ({"limit": 0}, "limit must be at least 1, not 0"),
        ({"default_output": 0.0}, "default_output must be a number of at least 1, not 0.0"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sessions(**values)  # type: ignore[arg-type]


NAMES = st.sampled_from("abcdefgh")
WORKERS = st.integers(0, 3)
TTL_S = 10.0
LIMIT = 5


class Bindings(RuleBasedStateMachine):
    """Against a list of (session, seat, tokens, time), the last used one at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions = Sessions(ttl_s=TTL_S, limit=LIMIT)
        self.model: list[tuple[str, Seat | None, int, float]] = []
        self.now = 0.0

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, TTL_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.model = [entry for entry in self.model if self.now - entry[3] < TTL_S]

    @rule(session=NAMES, worker=WORKERS, rank=st.integers(0, 1), tokens=st.integers(0, 1000))
    def bind(self, session: str, worker: int, rank: int, tokens: int) -> None:
        self.sessions.bind(session, Seat(worker, rank), tokens, self.now)
        kept = [entry for entry in self.model if entry[0] != session]
        self.model = [*kept, (session, Seat(worker, rank), tokens, self.now)][-LIMIT:]

    @rule(session=NAMES, worker=WORKERS, tokens=st.integers(0, 1000), age_s=st.sampled_from([0.25, 1.0, 3.5, TTL_S]))
    def restore(self, session: str, worker: int, tokens: int, age_s: float) -> None:
        used_at = self.now - age_s
        self.sessions.bind(session, Seat(worker, 0), tokens, self.now, used_at)
        known = [entry for entry in self.model if entry[0] == session]
        if age_s < TTL_S and not any(entry[3] >= used_at for entry in known):
            kept = [entry for entry in self.model if entry[0] != session]
            self.model = sorted([*kept, (session, Seat(worker, 0), tokens, used_at)], key=lambda entry: entry[3])[
                -LIMIT:
            ]

    @rule(worker=WORKERS)
    def lose(self, worker: int) -> None:
        self.sessions.expire(self.now)
        hit = [entry for entry in self.model if entry[1] is not None and entry[1].worker == worker]
        assert self.sessions.drop_worker(worker) == len(hit)
        self.model = [(entry[0], None, 0, entry[3]) if entry in hit else entry for entry in self.model]

    @rule(session=NAMES | st.none(), tokens=st.integers(0, 10_000))
    def generate(self, session: str | None, tokens: int) -> None:
        self.sessions.saw_output(session, tokens)
        assert 1 <= self.sessions.expected_output(session) <= 10_000

    @invariant()
    def each_is_bound_to_what_it_was_bound_to_last(self) -> None:
        assert len(self.sessions) <= LIMIT
        expected = {session: (seat, tokens) for session, seat, tokens, _ in self.model}
        for session in "abcdefgh":
            found = self.sessions.bound(session, self.now), self.sessions.resident(session, self.now)
            assert found == expected.get(session, (None, 0))
        bound = [
            (name, seat, tokens, self.now - at) for name, seat, tokens, at in reversed(self.model) if seat is not None
        ]
        assert self.sessions.bindings(LIMIT, self.now) == bound

    @invariant()
    def none_is_kept_beyond_its_time(self) -> None:
        self.sessions.expire(self.now)
        assert len(self.sessions) == len(self.model)


Bindings.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestBindings = Bindings.TestCase
