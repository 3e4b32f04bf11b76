# SPDX-License-Identifier: Apache-2.0
"""The rules of leasing: by example, as a state machine, and the same in Lua on a real server as in Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec
import pytest
import redis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dynamo_resilience._lease_table import LeaseTable
from dynamo_resilience._store import Held, LeaseReply, LeaseRequest
from support.lease_history import Recorder, check
from support.store_server import StoreServer

TTL = 1000
#: Blocks 0-1 are tenant a's, 2-4 tenant b's, the rest is serverless.
RANGES = {"a": (0, 2), "b": (2, 5), "serverless": (5, 9)}
BLOCKS = 9


def ask(
    account: str,
    holder: str,
    want: int = 0,
    *,
    head: int = 0,
    keep: tuple[Held, ...] = (),
    release: tuple[Held, ...] = (),
    epoch: int = 0,
    pool: str = "site/model",
    ttl_ms: int = TTL,
) -> LeaseRequest:
    serverless = account == "serverless"
    lent = tuple(one for name, one in RANGES.items() if name != "serverless") if serverless else ()
    return LeaseRequest(
        pool, account, holder, ttl_ms, RANGES[account], lent, not serverless, keep, release, want, head, epoch
    )


def numbers(reply: LeaseReply) -> list[int]:
    return [block for block, _ in reply.held]


def number(token: str) -> tuple[int, int]:
    epoch, _, counter = token.partition(".")
    return int(epoch), int(counter)


# By example.


def test_own_blocks_come_first_and_idle_ones_of_others_are_borrowed() -> None:
    table = LeaseTable()
    reply, notify = table.lease(0, ask("serverless", "r1", 6))
    assert numbers(reply) == [0, 1, 5, 6, 7, 8]
    assert reply.recalled == ()
    assert reply.surplus == 0
    assert not notify


def test_a_lender_that_wants_its_blocks_has_them_after_one_exchange() -> None:
    table = LeaseTable()
    borrower, _ = table.lease(0, ask("serverless", "r1", 9))
    assert numbers(borrower) == list(range(9))
    lender, notify = table.lease(10, ask("b", "r2", 2))
    assert lender.held == ()
    assert notify
    told, notify = table.lease(11, ask("serverless", "r1", 9, keep=borrower.held))
    assert told.recalled == (3, 4)
    assert not notify
    given = tuple(one for one in told.held if one.block in told.recalled)
    kept = tuple(one for one in told.held if one.block not in told.recalled)
    told, notify = table.lease(12, ask("serverless", "r1", 9, keep=kept, release=given))
    assert numbers(told) == [0, 1, 2, 5, 6, 7, 8]
    assert told.recalled == ()
    assert notify
    lender, _ = table.lease(13, ask("b", "r2", 2))
    assert numbers(lender) == [3, 4]


def test_a_recalled_block_that_is_kept_stays_recalled_until_nobody_wants_it() -> None:
    table = LeaseTable()
    borrower, _ = table.lease(0, ask("serverless", "r1", 9))
    table.lease(1, ask("a", "r2", 1))
    for now in (2, 300, 600):
        borrower, _ = table.lease(now, ask("serverless", "r1", 9, keep=borrower.held))
        assert borrower.recalled == (1,)
    table.lease(601, ask("a", "r2", 0))
    borrower, _ = table.lease(602, ask("serverless", "r1", 9, keep=borrower.held))
    assert borrower.recalled == ()


def test_a_lenders_free_blocks_are_not_lent_while_it_is_short() -> None:
    table = LeaseTable()
    first, _ = table.lease(0, ask("b", "r1", 3))
    table.lease(1, ask("b", "r2", 2))
    table.lease(2, ask("b", "r1", 1, keep=first.held[:1], release=first.held[1:]))
    borrower, _ = table.lease(3, ask("serverless", "r3", 9))
    assert numbers(borrower) == [0, 1, 5, 6, 7, 8]
    second, _ = table.lease(4, ask("b", "r2", 2))
    assert numbers(second) == [3, 4]


def test_blocks_are_shared_fairly_and_whoever_has_more_is_told_the_surplus() -> None:
    table = LeaseTable()
    first, _ = table.lease(0, ask("b", "r1", 3))
    second, notify = table.lease(1, ask("b", "r2", 3, head=1))
    assert second.held == ()
    assert notify
    first, _ = table.lease(2, ask("b", "r1", 3, keep=first.held))
    assert first.surplus == 1
    first, notify = table.lease(3, ask("b", "r1", 3, keep=first.held[:2], release=first.held[2:]))
    assert notify
    assert first.surplus == 0
    assert len(first.held) == 2
    second, _ = table.lease(4, ask("b", "r2", 3, head=1))
    assert numbers(second) == [4]


def test_the_head_that_waited_longest_is_served_in_full_before_others_grow() -> None:
    table = LeaseTable()
    first, _ = table.lease(0, ask("b", "r1", 3, head=2))
    second, _ = table.lease(1, ask("b", "r2", 3, head=3))
    assert len(first.held) == 3
    assert second.held == ()
    first, _ = table.lease(2, ask("b", "r1", 3, head=3, keep=first.held))
    assert first.surplus == 3  # r2's head is unmet, r1's is met
    first, _ = table.lease(3, ask("b", "r1", 3, head=3, keep=(), release=first.held))
    assert first.held == ()  # although there are free blocks
    second, _ = table.lease(4, ask("b", "r2", 3, head=3))
    assert len(second.held) == 3


def test_a_lease_ends_with_its_ttl_and_can_be_renewed_until_somebody_has_taken_it() -> None:
    table = LeaseTable()
    first, _ = table.lease(0, ask("a", "r1", 2))
    for now in (TTL // 2, TTL, TTL + 500):
        table.lease(now, ask("b", "r3"))
    again, _ = table.lease(TTL + 500, ask("a", "r1", 2, keep=first.held))
    assert again.held == first.held
    for now in (2 * TTL, 2 * TTL + 499):
        second, _ = table.lease(now, ask("a", "r2", 1))
        assert second.held == ()
    second, _ = table.lease(2 * TTL + 500, ask("a", "r2", 1))
    assert numbers(second) == [0]
    again, _ = table.lease(2 * TTL + 501, ask("a", "r1", 2, keep=first.held))
    assert again.held == first.held[1:]


def test_what_a_lost_answer_granted_is_in_the_next_answer() -> None:
    table = LeaseTable()
    lost, _ = table.lease(0, ask("a", "r1", 2))
    reply, _ = table.lease(500, ask("a", "r1", 2))
    assert reply.held == lost.held
    other, _ = table.lease(TTL + 1, ask("a", "r2", 2))
    assert other.held == ()  # they were renewed


def test_a_release_that_comes_late_frees_nothing_that_was_granted_since() -> None:
    table = LeaseTable()
    first, _ = table.lease(0, ask("a", "r1", 2))
    late = ask("a", "r1", 0, release=first.held)
    table.lease(1, late)
    again, _ = table.lease(2, ask("a", "r1", 2))
    table.lease(3, late)
    other, _ = table.lease(4, ask("a", "r2", 2))
    assert len(again.held) == 2
    assert other.held == ()


def test_a_new_epoch_gives_back_what_was_held_and_nothing_else_for_a_ttl() -> None:
    table = LeaseTable()
    first, _ = table.lease(0, ask("a", "r1", 1))
    table.new_epoch(100)
    other, _ = table.lease(101, ask("a", "r2", 2, epoch=1))
    assert other.held == ()
    assert other.grace_ms >= TTL - 1
    again, _ = table.lease(102, ask("a", "r1", 2, keep=first.held, epoch=1))
    assert numbers(again) == [0]
    assert again.held[0].token.startswith("2.")
    other, _ = table.lease(100 + TTL - 1, ask("a", "r2", 2, epoch=2))
    assert other.held == ()
    other, _ = table.lease(101 + other.grace_ms + TTL, ask("a", "r2", 1, epoch=2))
    assert len(other.held) == 1


def test_in_a_new_epoch_nobody_claims_what_another_may_have_had_since() -> None:
    table = LeaseTable()
    slept, _ = table.lease(0, ask("a", "r1", 2))
    table.lease(TTL // 2, ask("b", "r3"))
    taken, _ = table.lease(TTL, ask("a", "r2", 2))
    assert numbers(taken) == [0, 1]
    table.new_epoch(TTL + 1)
    lapsed = tuple(Held(block, "") for block, _ in slept.held)
    slept, _ = table.lease(TTL + 2, ask("a", "r1", 2, keep=lapsed, epoch=1))
    assert slept.held == ()
    taken, _ = table.lease(TTL + 3, ask("a", "r2", 2, keep=taken.held, epoch=1))
    assert numbers(taken) == [0, 1]


def test_after_a_change_of_ranges_a_block_outside_is_recalled_and_not_reclaimed() -> None:
    table = LeaseTable()
    first, _ = table.lease(0, ask("b", "r1", 3))
    smaller = ask("b", "r1", 3, keep=first.held)._replace(own=(2, 4))
    reply, _ = table.lease(1, smaller)
    assert numbers(reply) == [2, 3, 4]
    assert reply.recalled == (4,)
    table.new_epoch(2)
    reply, _ = table.lease(3, smaller)
    assert numbers(reply) == [2, 3]


def test_a_clock_set_forward_ends_no_lease_that_is_renewed_in_its_time() -> None:
    table = LeaseTable()
    first, _ = table.lease(0, ask("a", "r1", 1))
    table.lease(300, ask("b", "r3", 1))
    now = 301 + 20_000
    second, _ = table.lease(now, ask("a", "r2", 2))
    assert numbers(second) == [1]
    again, _ = table.lease(now + TTL - 1, ask("a", "r1", 1, keep=first.held))
    assert again.held == first.held


@pytest.mark.parametrize("poll", [40, 320])
def test_no_step_of_the_clock_of_whatever_size_ends_a_lease_that_is_renewed_in_its_time(poll: int) -> None:
    for step in (*range(50, 2 * TTL, 50), 24 * 3_600_000):
        for when in range(0, 320, 40):
            table = LeaseTable()
            table.lease(0, ask("b", "r1", 3))
            events = [(when + i * poll, "r2") for i in range(1000 // poll)] + [
                (renewal, "r1") for renewal in (320, 640)
            ]
            for now, holder in sorted(events):
                reply, _ = table.lease(now + (step if now >= when else 0), ask("b", holder, 3 if holder == "r1" else 1))
                assert len(reply.held) == (3 if holder == "r1" else 0), (step, when, now)


@pytest.mark.parametrize(("gap", "free"), [(TTL // 2, 300 + TTL), (TTL // 2 + 1, 301 + TTL // 2 + TTL)])
def test_a_gap_of_more_than_half_a_ttl_extends_what_was_live_before(gap: int, free: int) -> None:
    table = LeaseTable()
    table.lease(300, ask("b", "r1", 3))
    asked = 300 + gap
    for now in (*range(asked, free, 300), free - 1):
        assert table.lease(now, ask("b", "r2", 1))[0].held == ()
    assert numbers(table.lease(free, ask("b", "r2", 1))[0]) == [2]


def test_a_dead_replicas_lease_is_extended_only_once_however_seldom_others_ask() -> None:
    table = LeaseTable()
    table.lease(0, ask("b", "r1", 3))
    second, _ = table.lease(600, ask("b", "r2", 1))
    third, _ = table.lease(1200, ask("b", "r2", 1))
    fourth, _ = table.lease(1800, ask("b", "r2", 1))
    assert [len(one.held) for one in (second, third, fourth)] == [0, 0, 1]


def test_what_had_ended_before_the_gap_is_not_extended() -> None:
    table = LeaseTable()
    table.lease(0, ask("a", "r1", 2))
    for now in (400, 800, 1100):
        table.lease(now, ask("b", "r2", 1))
    heir, _ = table.lease(20_000, ask("a", "r3", 2))
    assert numbers(heir) == [0, 1]


# As a state machine.


class Replica:
    """What one account of one replica believes, and when it stops to."""

    def __init__(self, account: str, holder: str) -> None:
        self.account, self.holder = account, holder
        self.reply: LeaseReply | None = None
        self.until = 0
        self.want = self.head = 0
        self.dead = False
        self.busy = 0  # how many blocks cannot be given back

    def blocks(self, now: int) -> tuple[Held, ...]:
        return self.reply.held if self.reply is not None and now < self.until else ()


class LeaseMachine(RuleBasedStateMachine):
    """Replicas that come, grow, shrink, pause and die, over changes of epoch and of the store's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.ahead = 0  # the store's clock
        self.table = LeaseTable()
        self.tokens: list[tuple[int, int]] = [(0, 0)]
        self.replicas = [Replica(account, holder) for account in RANGES for holder in ("r1", "r2", "r3")]
        self.claims: dict[int, str] = {}
        self.born = -10 * TTL

    @initialize(old=st.booleans())
    def begin(self, old: bool) -> None:
        if not old:
            self.table.new_epoch(self.now)
            self.born = self.now

    def pass_time(self, ms: int) -> None:
        """Let time pass, in which somebody asks something."""
        until = self.now + ms
        while self.now < until:
            self.now = min(until, self.now + TTL // 2)
            self.table.lease(self.now + self.ahead, ask("serverless", "idle"))

    def operate(self, replica: Replica, release: int = 0) -> LeaseReply:
        known = replica.reply or LeaseReply((), 0, 0, 0, ())
        # Recalled ones are given back first, then the highest.
        held = tuple(sorted(known.held, key=lambda one: (one.block not in known.recalled, -one.block)))
        release = min(release, max(0, len(held) - replica.busy))
        before = {(one.block, one.token) for other in self.replicas if other.reply for one in other.reply.held}
        reply, _ = self.table.lease(
            self.now + self.ahead,
            ask(
                replica.account,
                replica.holder,
                replica.want,
                head=replica.head,
                keep=tuple(one if self.now < replica.until else Held(one.block, "") for one in held[release:]),
                release=held[:release],
                epoch=known.epoch,
            ),
        )
        new = sorted(number(one.token) for one in reply.held if tuple(one) not in before)
        if new:
            assert new[0] > self.tokens[-1], "a token did not rise"
            self.tokens.append(new[-1])
        if self.now + self.ahead - self.born < TTL:
            claimed = {one.block for one in held[release:]}
            assert all(one.block in claimed for one in reply.held), "a grant in the grace"
        replica.reply, replica.until = reply, self.now + TTL
        return reply

    @rule(index=st.integers(0, 8), want=st.integers(0, 9), head=st.integers(0, 5), release=st.integers(0, 3))
    def change(self, index: int, want: int, head: int, release: int) -> None:
        replica = self.replicas[index]
        if not replica.dead:
            first, last = (0, BLOCKS) if replica.account == "serverless" else RANGES[replica.account]
            replica.want, replica.head = want, min(head, last - first)
            reply = self.operate(replica, release)
            replica.busy = min(len(reply.held), want)

    @rule(index=st.integers(0, 8))
    def renew(self, index: int) -> None:
        if not self.replicas[index].dead:
            self.operate(self.replicas[index])

    @rule(ms=st.sampled_from([1, 100, TTL // 3, TTL - 100, TTL, 3 * TTL]))
    def wait(self, ms: int) -> None:
        self.now += ms

    @rule(index=st.integers(0, 8))
    def kill(self, index: int) -> None:
        """The process dies; what replaces it has another name."""
        old = self.replicas[index]
        self.replicas[index] = Replica(old.account, f"{old.holder}+")
        old.dead = True
        self.replicas.append(old)

    @rule()
    def restart_store(self) -> None:
        self.now += 1
        self.born = self.now + self.ahead
        self.table.new_epoch(self.born)

    @rule(ms=st.sampled_from([TTL // 2 + 1, TTL, 20 * TTL]))
    def set_the_stores_clock_forward(self, ms: int) -> None:
        for replica in self.replicas:
            if replica.dead:  # it may have been extended before; only a renewal makes it outlast the next step
                replica.until = min(replica.until, self.now)
            elif replica.blocks(self.now):
                self.operate(replica)
        self.ahead += ms

    @precondition(lambda self: self.now + self.ahead - self.born > 2 * TTL)
    @rule(account=st.sampled_from(["a", "b"]))
    def a_reserved_account_gets_its_range_within_one_exchange(self, account: str) -> None:
        first, last = RANGES[account]
        for _ in range(2):  # the dead are gone, the living still hold what they held
            for replica in self.replicas:
                if not replica.dead:
                    self.operate(replica)
            self.pass_time(TTL * 2 // 3)
        for replica in self.replicas:
            replica.busy = 0
            if replica.account == account and not replica.dead:
                replica.want = replica.head = 0
                self.operate(replica, 9)
        mine = next(replica for replica in self.replicas if replica.account == account)
        mine.want = last - first
        self.operate(mine)
        for replica in self.replicas:
            if replica.account == "serverless" and not replica.dead:
                self.operate(replica)
                assert replica.reply is not None
                self.operate(replica, len(replica.reply.recalled))
        reply = self.operate(mine)
        assert numbers(reply) == list(range(first, last))
        mine.busy = len(reply.held)

    @precondition(lambda self: self.now + self.ahead - self.born > 2 * TTL)
    @rule(account=st.sampled_from(list(RANGES)), heads=st.lists(st.integers(1, 9), min_size=3, max_size=3))
    def every_head_is_served_when_others_release(self, account: str, heads: list[int]) -> None:
        first, last = RANGES[account]
        room = BLOCKS if account == "serverless" else last - first
        for replica in self.replicas:  # other accounts are idle, the dead are gone
            if replica.account != account and not replica.dead:
                replica.want = replica.head = replica.busy = 0
                self.operate(replica, 9)
        self.pass_time(TTL + 1)
        waiting = [one for one in self.replicas if one.account == account and not one.dead]
        for replica, head in zip(waiting, heads, strict=True):
            replica.want, replica.head, replica.busy = 9, min(head, room), 0
        served: set[str] = set()
        for _ in range(8):
            for replica in waiting:
                reply = self.operate(replica)
                if replica.head and len(reply.held) - len(reply.recalled) >= replica.head:
                    served.add(replica.holder)  # it is admitted, and ends before the next turn
                    replica.head = 0
                    replica.want = 9
                if reply.surplus or reply.recalled:
                    self.operate(replica, reply.surplus + len(reply.recalled))
            self.now += 10
        assert len(served) == 3, f"{served} of {[(one.holder, one.head) for one in waiting]}"

    @invariant()
    def no_block_has_two_live_holders(self) -> None:
        holders: dict[int, str] = {}
        for replica in self.replicas:
            for block, _ in replica.blocks(self.now):
                name = f"{replica.account}/{replica.holder}"
                assert block not in holders, f"block {block}: {holders[block]} and {name}"
                assert 0 <= block < BLOCKS
                holders[block] = name
        assert len(holders) <= BLOCKS


LeaseMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, suppress_health_check=list(HealthCheck)
)
TestLeaseMachine = LeaseMachine.TestCase


# The same in Lua.


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    with StoreServer() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: StoreServer) -> redis.Redis:
    return server.client()


@pytest.fixture(scope="module")
def events(server: StoreServer) -> Any:
    client = redis.Redis(port=server.port, decode_responses=True, protocol=2)
    events: Any = client.pubsub()  # type: ignore[no-untyped-call]
    events.subscribe("{p}:events")
    return events


_LEASE_LUA = files("dynamo_resilience").joinpath("lua").joinpath("lease.lua").read_text()
#: The script with a clock and an epoch that the test chooses.
_CHOSEN = (
    "local function epoch_now(prefix, seen) return tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]) end\n"
    + _LEASE_LUA
)
_EPOCH = 1_796_077_375_562


class Step(NamedTuple):
    who: int
    want: int
    head: int
    keep: int
    release: int
    forget: bool
    later: int
    epoch: bool
    ttl_ms: int
    lapsed: bool


_WHO = [(account, holder) for account in ("a", "b", "serverless") for holder in ("r1", "r|2%7C", "ré 3")]
_STEP = st.builds(
    Step,
    who=st.integers(0, 8),
    want=st.integers(0, 9),
    head=st.sampled_from([0, 0, 1, 3, 9]),
    keep=st.integers(0, 2**9 - 1),
    release=st.integers(0, 2**9 - 1),
    forget=st.booleans(),
    later=st.sampled_from([0, 1, 1, 10, 300, 500, 501, 1000, 1200, 20_000]),
    epoch=st.sampled_from([False] * 12 + [True]),
    ttl_ms=st.sampled_from([TTL, TTL, 300]),
    lapsed=st.sampled_from([False, False, True]),
)


@settings(
    max_examples=120,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.reuse, Phase.generate, Phase.shrink],
)
@given(st.lists(_STEP, min_size=1, max_size=25), st.booleans())
def test_lua_and_python_answer_alike(client: redis.Redis, events: Any, steps: list[Step], young: bool) -> None:
    client.flushall()
    script = client.register_script(_CHOSEN)
    epoch, born, now = _EPOCH, 1_796_077_375_562 - (0 if young else 5000), 1_796_077_375_562
    table = LeaseTable(epoch, born)
    known: dict[int, dict[int, str]] = {}
    for step in steps:
        now += step.later
        if step.epoch:
            epoch, born = epoch + 1, now
            table.new_epoch(now)
        mine = known.setdefault(step.who, {})
        account, holder = _WHO[step.who]
        release = tuple(Held(block, token) for block, token in mine.items() if step.release >> block & 1)
        keep = tuple(
            Held(block, "" if step.lapsed else token)
            for block, token in mine.items()
            if step.keep >> block & 1 and not step.release >> block & 1
        )
        request = ask(
            account, holder, step.want, head=step.head, keep=keep, release=release, pool="s/ö", ttl_ms=step.ttl_ms
        )
        expected, notify = table.lease(now, request)
        text = script(keys=["{p}:"], args=[msgspec.json.encode({"lease": request}), epoch, now, now - born])
        reply = msgspec.json.decode(text, type=LeaseReply)
        assert reply == expected
        assert _notices(events) == ([{"v": 1, "k": "l", "pool": "s/ö"}] if notify else [])
        if not step.forget:
            known[step.who] = dict(reply.held)


def _notices(events: Any) -> list[Any]:
    """Return what was published so far: everything before the answer to a ping."""
    events.ping()
    found = []
    while (message := events.get_message(timeout=10))["type"] != "pong":
        if message["type"] == "message":
            found.append(msgspec.json.decode(message["data"]))
    return found


def test_the_script_leaves_no_key_without_an_end_and_keeps_to_its_prefix(server: StoreServer) -> None:
    client = server.client()
    client.flushall()
    script = client.register_script(_CHOSEN)
    script(keys=["{p}:"], args=[msgspec.json.encode({"lease": ask("a", "r1", 1)}), _EPOCH, _EPOCH + 9 * TTL, 9 * TTL])
    assert client.keys("*") == [f"{{p}}:lease:{_EPOCH}:site/model"]
    assert client.pttl(f"{{p}}:lease:{_EPOCH}:site/model") > 3_500_000


# The checker.


def _history(server: StoreServer, steps: list[tuple[int, int, LeaseRequest]], *commands: tuple[Any, ...]) -> list[str]:
    client: Any = server.client()
    client.flushall()
    with Recorder(server) as recorder:
        script = client.register_script(_CHOSEN)
        born = 0
        for epoch, now, request in steps:
            if born != epoch:
                born = epoch
                client.eval(
                    "return redis.call('HSET', KEYS[1], 'number', ARGV[1], 'run_id', 'x', 'born_ms', ARGV[1])",
                    1,
                    "{dynamo-gateway}:epoch",
                    epoch,
                )
            script(keys=["{dynamo-gateway}:"], args=[msgspec.json.encode({"lease": request}), epoch, now, now - epoch])
        for command in commands:
            client.execute_command(*command)
    return recorder.lines


def test_the_checker_has_no_complaint_about_a_sound_history(server: StoreServer) -> None:
    start = _EPOCH
    later = start + 2 * TTL
    steps = [
        (start, start + 1, ask("a", "r1", 1)),
        (start, later, ask("a", "r1", 1)),
        (start, later + 1, ask("a", "r2", 1)),
        (start, later + 2 * TTL, ask("a", "r3", 2)),  # r1's and r2's have ended
    ]
    lines = _history(server, steps)
    assert sum('"b:' in line for line in lines) >= 3
    assert check(lines) == []


_PLANT = """
redis.call('HSET', KEYS[1] .. 'lease:' .. ARGV[2] .. ':site/model', unpack(ARGV, 3)) return 1
"""


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        (("r2|a|{epoch}.9000|{taken}|0",), "went to r2|a"),
        (("r2|a|{epoch}.3|{ended}|0",), "has the token"),
        (("r1|a|{epoch}.9000|{ended}|0",), "by an operation of r2|a"),
        (("r2|a|7.9000|{ended}|0",), "in epoch"),
        (("r1|a|{epoch}.2002|{ended}|1",), "was extended to"),
    ],
)
def test_the_checker_finds_planted_grants(server: StoreServer, record: tuple[str], complaint: str) -> None:
    later = _EPOCH + 2 * TTL
    value = record[0].format(epoch=_EPOCH, taken=later + TTL + 5, ended=later + 5 * TTL)
    lines = _history(
        server,
        [(_EPOCH, later, ask("a", "r1", 1))],
        (
            "EVAL",
            _PLANT,
            1,
            "{dynamo-gateway}:",
            msgspec.json.encode({"lease": ask("a", "r2", 1)}),
            _EPOCH,
            "b:0",
            value,
        ),
    )
    faults = check(lines)
    assert len(faults) == 1, faults
    assert complaint in faults[0]


def test_the_checker_finds_a_grant_in_a_young_epoch_and_over_the_change_of_epoch(server: StoreServer) -> None:
    later = _EPOCH + 2 * TTL
    born = later + 10
    value = f"r2|a|{born}.9000|{born + 5 + TTL}|0"
    steps = [(_EPOCH, later, ask("a", "r1", 1)), (born, born, ask("a", "r2", 1))]
    plant = (
        "EVAL",
        _PLANT,
        1,
        "{dynamo-gateway}:",
        msgspec.json.encode({"lease": ask("a", "r2", 1)}),
        born,
        "b:0",
        value,
    )
    faults = check(_history(server, steps, plant))
    assert len(faults) == 2, faults
    assert "went to r2|a" in faults[0]
    assert "in an epoch that was 5 ms old" in faults[1]


def test_the_checker_knows_what_a_gap_extends(server: StoreServer) -> None:
    later, stepped = _EPOCH + 2 * TTL, _EPOCH + 22 * TTL
    steps = [
        (_EPOCH, later, ask("a", "r1", 1)),
        (_EPOCH, stepped, ask("a", "r2", 2)),
        (_EPOCH, stepped + TTL // 2, ask("a", "r2", 2)),
        (_EPOCH, stepped + TTL, ask("a", "r2", 2)),
    ]
    lines = _history(server, steps)
    assert check(lines) == []
    # Without the extension in what the store wrote.
    silent = [re.sub(r' "b:0" "r1\|[^"]*\|1"', "", line) for line in lines]
    assert silent != lines
    faults = check(silent)
    assert len(faults) == 1, faults
    assert "block 0 was live before a gap, and not extended" in faults[0]
    # A grant on top of it.
    plant = msgspec.json.encode({"lease": ask("a", "r2", 1)})
    value = f"r2|a|{_EPOCH}.9000|{stepped + 2 * TTL - 1}|0"
    taken = _history(server, steps[:2], ("EVAL", _PLANT, 1, "{dynamo-gateway}:", plant, _EPOCH, "b:0", value))
    assert check(taken) == [fault for fault in check(taken) if "block 0 went to r2|a 1 ms before r1|a" in fault]
    assert len(check(taken)) == 1


def test_the_checker_finds_a_block_that_somebody_else_freed(server: StoreServer) -> None:
    later = _EPOCH + 2 * TTL
    plant = "redis.call('HDEL', KEYS[1] .. 'lease:' .. ARGV[2] .. ':site/model', 'b:0') return 1"
    lines = _history(
        server,
        [(_EPOCH, later, ask("a", "r1", 1))],
        ("EVAL", plant, 1, "{dynamo-gateway}:", msgspec.json.encode({"lease": ask("a", "r2", 1)}), _EPOCH),
    )
    faults = check(lines)
    assert len(faults) == 1, faults
    assert "of r1|a was freed by r2|a" in faults[0]
