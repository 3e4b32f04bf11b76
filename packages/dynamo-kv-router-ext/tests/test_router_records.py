# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import json
import math
import random
from typing import Any

import pytest

from dynamo_kv_router_ext import Candidate, Decision, Placer, Request, Role, Seat, Terms, Worker, load_profile
from dynamo_kv_router_ext import _records as records_module
from dynamo_kv_router_ext._candidates import Candidates
from dynamo_kv_router_ext._records import Records
from dynamo_kv_router_ext._routes import Routes


def request(name: str = "a", tokens: int = 640, session: str | None = "s") -> Request:
    return Request(f"1f/{name}", tokens=tokens, session=session)


def decision(
    role: Role = "prefill", worker: int = 7, cost: float = 0.5, first: float = 0.25, runner_up: float = 0.75
) -> Decision:
    terms = Terms(wait_s=0.125, work_s=0.125, first_token_s=first, cost_s=cost, device_tokens=64)
    return Decision("1f/a", role, worker, 0, terms, 640, "", runner_up)


def found(records: Records, name: str) -> dict[str, Any]:
    one = records.find(name)
    assert one is not None
    return json.loads(json.dumps(one, allow_nan=False))  # type: ignore[no-any-return]


def test_a_request_is_found_by_every_id_that_a_client_has() -> None:
    records = Records()
    records.placed("cmpl-odd", request(), decision(), 1.0, 1e9)
    records.placed("0c8e", request(), decision(), 1.0, 1e9)
    for name in ("0c8e", "cmpl-0c8e", "chatcmpl-0c8e"):
        assert found(records, name)["request"] == "0c8e"
    # A name that a client chose may itself look like one of these.
    assert found(records, "cmpl-odd")["request"] == "cmpl-odd"
    assert found(records, "chatcmpl-cmpl-odd")["request"] == "cmpl-odd"
    for name in ("0c8", "0c8e0", "cmpl-", "", "odd", "xcmpl-0c8e", "resp_0c8e"):
        assert records.find(name) is None


def test_both_legs_are_kept_with_what_was_measured() -> None:
    records = Records()
    records.placed("a", request(), decision("prefill", 7), 10.0, 1e9)
    records.first_token("a", "prefill", 10.5)
    records.placed("a", request(), decision("decode", 8, cost=0.5, first=0.25, runner_up=2.0), 10.5, 1e9 + 0.5)
    records.first_token("a", "decode", 10.625)
    records.first_token("a", "decode", 99.0)  # every chunk may say so
    records.ended("a", "finished", 12.0)
    one = found(records, "a")
    assert (one["tokens"], one["session"], one["at"], one["ended"], one["ended_s"]) == (640, "s", 1e9, "finished", 2.0)
    prefill, decode = one["legs"]
    assert (prefill["role"], prefill["worker"], prefill["after_s"]) == ("prefill", 7, 0.0)
    assert prefill["terms"]["first_token_s"] == 0.25
    assert prefill["terms"]["device_tokens"] == 64
    # Expected after 0.25 s and measured after 0.5 s: at 0.75 in all it was as dear as the next one.
    assert (prefill["first_token_s"], prefill["runner_up_s"], prefill["regret_s"]) == (0.5, 0.75, 0.0)
    assert (decode["after_s"], decode["first_token_s"], decode["regret_s"]) == (0.5, 0.125, 0.0)


@pytest.mark.parametrize(
    ("measured", "runner_up", "regret"),
    [
        (0.25, 0.75, 0.0),  # as expected
        (0.75, 0.75, 0.25),  # half a second late: it cost 1.0, the next one would have cost 0.75
        (0.0, 0.5, 0.0),  # earlier than expected is no negative regret
        (5.0, math.inf, 0.0),  # nothing else there was
    ],
)
def test_regret_is_what_the_measured_cost_is_above_the_next_best(
    measured: float, runner_up: float, regret: float
) -> None:
    records = Records()
    records.placed("a", request(), decision(runner_up=runner_up), 1.0, 1e9)
    assert found(records, "a")["legs"][0]["regret_s"] is None
    records.first_token("a", "prefill", 1.0 + measured)
    leg = found(records, "a")["legs"][0]
    assert leg["regret_s"] == regret
    assert leg["runner_up_s"] == (None if math.isinf(runner_up) else runner_up)


def test_a_retry_is_a_leg_of_its_own_and_the_failure_stays_with_the_first() -> None:
    records = Records()
    records.placed("a", request(), decision(worker=7), 1.0, 1e9)
    records.aborted("a", "prefill", "worker 7 stands still", 2.0)
    records.failed("a", "prefill", "it stood still", 2.0)
    records.first_token("a", "prefill", 2.0)  # what a worker says after it was given up is no measurement
    records.placed("a", request(), decision(worker=8), 2.0, 1e9 + 1)
    records.first_token("a", "prefill", 2.5)
    first, second = found(records, "a")["legs"]
    assert (first["worker"], first["failed"], first["aborted"]) == (7, "it stood still", "worker 7 stands still")
    assert first["first_token_s"] is None
    assert (second["worker"], second["failed"], second["first_token_s"]) == (8, None, 0.5)


def test_of_two_legs_at_once_the_one_that_was_given_up_is_named() -> None:
    records = Records()
    records.placed("a", request(), decision("prefill", worker=7), 1.0, 1e9)
    records.placed("a", request(), decision("decode", worker=9), 1.0, 1e9)
    records.aborted("a", "prefill", "worker 7 stands still", 12.0)
    assert [leg["aborted"] for leg in found(records, "a")["legs"]] == ["worker 7 stands still", None]


def test_a_request_whose_last_leg_failed_did_not_end_because_the_client_left() -> None:
    records = Records()
    records.placed("a", request(), decision(), 1.0, 1e9)
    records.failed("a", "prefill", "no answer", 2.0)
    records.ended("a", "cancelled", 2.0)
    assert found(records, "a")["ended"] == "failed"
    # The frontend takes it up again under the same name.
    records.placed("a", request(tokens=700), decision(worker=8), 3.0, 1e9)
    one = found(records, "a")
    assert (one["ended"], len(one["legs"])) == (None, 2)
    records.ended("a", "finished", 4.0)
    records.placed("a", request(tokens=800), decision(worker=9), 5.0, 1e9)
    one = found(records, "a")
    assert (one["tokens"], len(one["legs"])) == (800, 1)  # another request that a client calls the same


def test_what_is_not_known_is_ignored() -> None:
    records = Records()
    records.first_token("a", "prefill", 1.0)
    records.failed("a", "decode", "x", 1.0)
    records.aborted("a", "prefill", "x", 1.0)
    records.ended("a", "finished", 1.0)
    assert records.find("a") is None
    records.placed("a", request(), decision(), 1.0, 1e9)
    records.first_token("a", "decode", 2.0)
    assert found(records, "a")["legs"][0]["first_token_s"] is None


def fleet(count: int = 3) -> Placer:
    placer = Placer(load_profile("mocker"))
    for number in range(count):
        placer.add_worker(Worker(2**63 + number, role="prefill"), now=0.0)
    return placer


def test_the_candidates_of_a_decision_are_those_that_explain_tells() -> None:
    placer, records = fleet(), Records()
    placer.health.verdict(2**63 + 1, True, 0.5, 60.0)
    one = request(session=None)
    expected = placer.explain(one, "prefill", 1.0).candidates
    chosen = placer.place(one, "prefill", 1.0, explain=True)
    records.placed("a", one, chosen, 1.0, 1e9)
    told = found(records, "a")["legs"][0]["candidates"]
    assert [c["worker"] for c in told] == [c.worker for c in expected]
    assert told[0]["worker"] == chosen.worker
    assert told[-1] == {"worker": 2**63 + 1, "rank": 0, "terms": None, "refused": expected[-1].refused}
    for heard, known in zip(told[:-1], expected, strict=False):
        assert known.terms is not None
        assert heard["terms"]["cost_s"] == known.terms.cost_s
        assert heard["terms"]["work_s"] == known.terms.work_s


class FakeSeat:
    """Has a seat's name, as the placer's own state of a seat does."""

    def __init__(self, worker: Any, rank: int = 0) -> None:
        self.name = Seat(worker, rank)


def test_candidates_are_the_same_packed_and_not() -> None:
    draw = random.Random(5)
    rows: list[Any] = [
        ((*(draw.random() for _ in range(8)), 640, 64, 0, draw.randrange(2), True), FakeSeat(n, n % 2))
        for n in range(20)
    ]
    refused = [(FakeSeat("tired"), "out for 1.0 s more")]
    loose = Candidates(rows, refused)
    packed = Candidates.unpack(Candidates(rows, refused).pack())
    assert loose == packed
    assert packed == tuple(loose)
    assert tuple(loose) == packed
    assert loose != ()
    costs = [one.terms.cost_s for one in loose if one.terms is not None]
    assert costs == sorted(row[0] for row, _ in rows)
    assert loose[-1] == Candidate("tired", 0, None, "out for 1.0 s more")
    assert loose[:2] == (loose[0], loose[1])
    assert len(packed) == 21
    assert repr(packed) == repr(loose)
    cheapest = min(rows, key=lambda pair: pair[0][0])
    assert loose[0].terms is not None
    assert loose[0].worker == cheapest[1].name.worker
    store = cheapest[0][11]
    assert loose[0].terms.fetch_tokens == ({"host": 64, "store": store} if store else {"host": 64})
    assert list(Candidates()) == list(Candidates.of(())) == []
    assert Candidates.of(loose) is loose
    assert Candidates.unpack(Candidates.of(tuple(loose)).pack()) == loose


def test_the_oldest_requests_go_first() -> None:
    records = Records(limit=3)
    for number in range(5):
        records.placed(f"r{number}", request(), decision(), float(number), 1e9)
    assert [records.find(f"r{number}") is not None for number in range(5)] == [False, False, True, True, True]
    with pytest.raises(ValueError, match="limit must be at least 1, not 0"):
        Records(limit=0)


def test_a_large_fleet_and_a_name_that_comes_back_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "_PACKED_BYTES", 20_000)
    records, placer = Records(), fleet(40)
    for number in range(30):
        one = Request(f"1f/r{number}", tokens=640)
        records.placed(f"r{number}", one, placer.place(one, "prefill", float(number), explain=True), 1.0, 1e9)
    kept = [records.find(f"r{number}") is not None for number in range(30)]
    assert kept == sorted(kept)
    assert 2 <= sum(kept) < 10
    assert len(found(records, "r29")["legs"][0]["candidates"]) == 40
    for number in range(100):
        records.placed("again", request(), decision(worker=number), float(number), 1e9)
        records.failed("again", "prefill", "x", float(number))
    legs = found(records, "again")["legs"]
    assert [leg["worker"] for leg in legs] == list(range(84, 100))


def test_ids_and_reasons_of_any_kind_can_be_told() -> None:
    records = Records()
    odd = Decision("1f/a", "decode", ("a", 1), 3, Terms(), 0, "moved from ('a', 0)")
    records.placed("ü/ä b", request(session=None), odd, 1.0, 1e9)
    leg = found(records, "chatcmpl-ü/ä b")["legs"][0]
    assert (leg["worker"], leg["rank"], leg["note"], leg["candidates"]) == ("('a', 1)", 3, "moved from ('a', 0)", [])


class FakeRouter:
    """Keeps the verdicts; knows worker 7."""

    replica = 0x1F

    def __init__(self) -> None:
        self.records = Records()
        self.heard: list[tuple[Any, ...]] = []

    def verdict(self, worker: Any, out: bool, ttl_s: float, reason: str = "", source: str = "") -> bool:
        self.heard.append((worker, out, ttl_s, reason, source))
        return bool(worker == 7)

    def state(self) -> dict[str, Any]:
        return {"replica": self.replica}


class FakeRuntime:
    """Keeps the routes, and asks them as Dynamo's system server does."""

    def __init__(self, routes: Routes) -> None:
        self.routes: dict[str, Any] = {}
        routes.register(self)

    def register_engine_route(self, name: str, answer: Any) -> None:
        self.routes[name] = answer

    def ask(self, name: str, body: Any) -> dict[str, Any]:
        answer = asyncio.run(self.routes[name](json.loads(json.dumps(body))))
        return json.loads(json.dumps(answer, allow_nan=False))  # type: ignore[no-any-return]


def test_routes_answer_at_the_system_port() -> None:
    router = FakeRouter()
    runtime = FakeRuntime(Routes(router))
    assert sorted(runtime.routes) == ["route/explain", "route/state", "route/verdict"]
    router.records.placed("a", request(), decision(), 1.0, 1e9)
    answer = runtime.ask("route/explain", {"request": "chatcmpl-a"})
    assert (answer["replica"], answer["request"]) == (0x1F, found(router.records, "a"))
    assert runtime.ask("route/explain", {"request": "b"}) == {"replica": 0x1F, "request": None}
    assert runtime.ask("route/state", {}) == {"replica": 0x1F}


def test_verdicts_come_in_by_the_wire_format() -> None:
    router = FakeRouter()
    runtime = FakeRuntime(Routes(router))
    out = {"worker": 7, "out": True, "ttl_s": 10, "reason": "breaker open", "source": "gateway", "later": 1}
    assert runtime.ask("route/verdict", out) == {"known": True}
    assert runtime.ask("route/verdict", {"worker": "0x7", "out": False}) == {"known": True}
    assert runtime.ask("route/verdict", {"worker": str(2**63), "out": True, "ttl_s": 0.5}) == {"known": False}
    assert router.heard == [
        (7, True, 10.0, "breaker open", "gateway"),
        (7, False, 0.0, "", ""),
        (2**63, True, 0.5, "", ""),
    ]


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("explain", [1], "a JSON object is wanted, not '[1]'"),
        ("explain", {}, "request must be the id of a request, not None"),
        ("explain", {"request": 5}, "not 5"),
        ("explain", {"request": ""}, "not ''"),
        ("verdict", {"out": True, "ttl_s": 1}, "worker must be an instance id, not None"),
        ("verdict", {"worker": True, "out": True, "ttl_s": 1}, "worker must be an instance id, not True"),
        ("verdict", {"worker": "prefill-0", "out": True, "ttl_s": 1}, "not 'prefill-0'"),
        ("verdict", {"worker": 7.0, "out": True, "ttl_s": 1}, "not 7.0"),
        ("verdict", {"worker": 7}, "out must be true or false, not None"),
        ("verdict", {"worker": 7, "out": 1, "ttl_s": 1}, "out must be true or false, not 1"),
        ("verdict", {"worker": 7, "out": True}, "at most 3600, not None"),
        ("verdict", {"worker": 7, "out": True, "ttl_s": 0}, "not 0"),
        ("verdict", {"worker": 7, "out": True, "ttl_s": -1.5}, "not -1.5"),
        ("verdict", {"worker": 7, "out": True, "ttl_s": 3601}, "not 3601"),
        ("verdict", {"worker": 7, "out": True, "ttl_s": True}, "not True"),
        ("verdict", {"worker": 7, "out": True, "ttl_s": "10"}, "not '10'"),
        ("verdict", {"worker": 7, "out": True, "ttl_s": math.nan}, "not nan"),
        ("verdict", {"worker": 7, "out": True, "ttl_s": math.inf}, "not inf"),
        ("verdict", {"worker": 7, "out": False, "reason": 3}, "reason must be text of at most 500 characters, not '3'"),
        ("verdict", {"worker": 7, "out": False, "source": "x" * 101}, "source must be text of at most 100 characters"),
    ],
)
def test_a_bad_question_is_answered_with_what_is_wrong(name: str, body: Any, words: str) -> None:
    router = FakeRouter()
    answer = FakeRuntime(Routes(router)).ask(f"route/{name}", body)
    assert list(answer) == ["error"]
    assert words in answer["error"]
    assert router.heard == []
