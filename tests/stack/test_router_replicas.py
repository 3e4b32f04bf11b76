# SPDX-License-Identifier: Apache-2.0
"""Replicas of the router as processes, over Dynamo's discovery and streams: one is killed, stopped, started again."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dynamo_kv_router_ext._replicas import owner
from support.dynamo import environment
from support.live_fleet import until
from support.router_replica import RouterReplica

#: Until when a dead replica's bookings have to be gone, seconds.
LEASE_S = 5.0


class Group:
    """Three replicas; more may be started."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.running = [self.start() for _ in range(3)]
        self.in_step()

    def start(self) -> RouterReplica:
        one = RouterReplica(environment(self.folder))
        return self.stack.enter_context(one)

    def in_step(self) -> None:
        """Wait until each has all the others for peers."""
        names = {one.replica for one in self.running}
        until(
            lambda: all({one.replica, *one.ask("state")["peers"]} == names for one in self.running),
            30.0,
            "all replicas know each other",
        )

    def agree(self, seconds: float = 10.0) -> list[list[Any]]:
        """Wait until all have the same booked, and return it."""

        def booked() -> list[list[list[Any]]]:
            return [one.ask("state")["booked"] for one in self.running]

        until(
            lambda: all(each == found[0] for each in found) if (found := booked()) else False,
            seconds,
            "all replicas have the same bookings",
        )
        return booked()[0]

    def session(self, of: RouterReplica) -> str:
        """A session that this one owns."""
        names = [one.replica for one in self.running]
        return next(name for i in itertools.count() if owner(name := f"session-{i}", names) == of.replica)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with ExitStack() as stack:
        yield Group(tmp_path, stack)


def carried(booked: list[list[Any]], by: RouterReplica) -> list[list[Any]]:
    return [one for one in booked if one[0].startswith(f"{by.replica:x}/")]


def test_a_killed_replicas_bookings_go_and_a_new_one_hears_of_everything(group: Group) -> None:
    first, second, third = group.running
    for i, one in enumerate(group.running * 4):
        one.ask("place", name=f"{i}", role="prefill")
        one.ask("place", name=f"{i}", role="decode", session=f"s{i}")
    third.ask("prefilled", name="2")
    second.ask("finished", name="1")
    booked = group.agree()
    assert len(booked) == 24 - 1 - 2
    lost = carried(booked, first)
    assert len(lost) == 8

    first.signal(signal.SIGKILL)
    group.running.remove(first)
    kept = [one for one in booked if one not in lost]
    seconds = until(
        lambda: all(one.ask("state")["booked"] == kept for one in group.running), LEASE_S, "its bookings are gone"
    )
    print(f"gone {seconds:.2f} s after the kill")
    assert {one.ask("state")["workers"][1]["state"] for one in group.running} == {"in"}

    new = group.start()
    group.running.append(new)
    group.in_step()
    assert group.agree() == kept
    bound = second.ask("state")["bound"]
    assert len(bound) == 12
    until(lambda: new.ask("state")["bound"] == bound, 10.0, "the new one has the sessions")
    # A turn of an old session, owned by the new replica or not, lands where its KV is.
    for session, worker in bound.items():
        for one in group.running:
            assert one.ask("place", name=f"again {session}", role="decode", session=session)["worker"] == worker


def test_a_stopped_replicas_bookings_go_and_come_back_with_it(group: Group) -> None:
    first, second, third = group.running
    for one in group.running:
        one.ask("place", name="x", role="decode")
    booked = group.agree()
    mine = carried(booked, first)
    session = group.session(first)

    first.signal(signal.SIGSTOP)
    # Its sessions are not held up: the first turn waits for an answer in vain, the next one asks nobody.
    waits = [second.ask("place", name=f"w{i}", role="decode", session=session)["seconds"] for i in range(8)]
    print("turns of a session whose owner stands still:", [f"{wait * 1e3:.1f} ms" for wait in waits])
    assert sorted(waits)[4] < 0.2
    seconds = until(
        lambda: not any(carried(one.ask("state")["booked"], first) for one in (second, third)),
        LEASE_S,
        "the stopped one's bookings are gone",
    )
    print(f"gone {seconds:.2f} s after it stopped")
    second.ask("finished", name="x")

    first.signal(signal.SIGCONT)
    group.in_step()
    booked = group.agree()
    assert carried(booked, first) == mine
    assert len(carried(booked, second)) == 8
    assert len({worker for _, _, worker in carried(booked, second)}) == 1
    turn = first.ask("place", name="turn", role="decode", session=session)
    assert turn["worker"] == carried(booked, second)[0][2]


def test_replicas_that_are_asked_at_once_agree_on_a_sessions_decoder(group: Group) -> None:
    workers = set()
    seconds = []
    for i in range(30):
        for one in group.running:
            one.send("place", name=f"{i}", role="decode", session=f"s{i}", tokens=20_000)
        answers = [one.answer() for one in group.running]
        assert len({answer["worker"] for answer in answers}) == 1
        workers.add(answers[0]["worker"])
        seconds += [answer["seconds"] for answer in answers]
    assert len(workers) == 2
    assert len(group.agree()) == 90
    print(f"a decision took {sorted(seconds)[45] * 1e3:.1f} ms (median), {max(seconds) * 1e3:.1f} ms at most")
