# SPDX-License-Identifier: Apache-2.0
"""The suite tests itself: a right server passes every case, and each fault makes exactly its own case fail.

A fault meets the whole suite, in each API that has a form for it. A case is not judged a second time where every byte
that its requests would be answered with is the one of the faultless run, whose verdict is known then: the requests of
the faultless run are sent to the faulty server first, and what comes back is compared. A fault for which that tells too
little, as it keeps state, looks at the requests beside one, or minds streams that were left, has every case judged.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from dynamo_structural_tags.conformance._case import APIS, Case, load_cases, load_profile
from dynamo_structural_tags.conformance._endpoint import Endpoint
from dynamo_structural_tags.conformance._results import CaseResult
from dynamo_structural_tags.conformance._runner import run
from support.case_player import CasePlayer
from support.faulty_tool_server import FAULTS, MODEL, Cache, Fault, FaultyToolServer, load_faults

#: Where the package `support` lies.
TESTS = Path(__file__).parents[3] / "tests"
#: Everything is required of the model that is played.
PROFILE = "reasoning"
load_faults()


@dataclass
class Faultless:
    """A run against a right server: the verdicts, and what each case sent."""

    results: Sequence[CaseResult]
    sent: Mapping[str, Sequence[tuple[str, bytes]]]
    cache: Cache


@dataclass
class Starts:
    """Takes down how many requests came before each case."""

    server: FaultyToolServer
    at: dict[str, int] = field(default_factory=dict)

    def started(self, case_id: str) -> None:
        self.at[case_id] = len(self.server.seen)

    def finished(self, result: CaseResult) -> None:
        pass


@cache
def cases() -> Mapping[str, Case]:
    return {case.id: case for case in load_cases()}


@cache
def player() -> CasePlayer:
    return CasePlayer(cases().values())


def judged(
    server: FaultyToolServer, api: str, chosen: Sequence[Case], starts: Starts | None = None
) -> list[CaseResult]:
    async def ask() -> list[CaseResult]:
        endpoint = Endpoint("http://fake", MODEL, api=api, transport=server.transport(), pauses=(0.0,))
        async with endpoint:
            ran = await run(endpoint, chosen, load_profile(PROFILE), attempts=1, concurrency=1, progress=starts)
        return ran.results

    return asyncio.run(ask())


@cache
def faultless(api: str) -> Faultless:
    chosen = [case for case in cases().values() if api in case.apis]
    answers: Cache = {}
    server = FaultyToolServer(player(), cache=answers)
    starts = Starts(server)
    results = judged(server, api, chosen, starts)
    spans = pairwise([*starts.at.values(), len(server.seen)])
    sent = {case_id: server.seen[begin:end] for case_id, (begin, end) in zip(starts.at, spans, strict=True)}
    return Faultless(results, sent, answers)


def touched(fault: type[Fault], api: str) -> list[Case]:
    """The cases that have to be judged: all but those that get the bytes of the faultless run."""
    right = faultless(api)
    server = FaultyToolServer(player(), broken := fault(), cache=right.cache)
    different = set()
    for case_id, requests in right.sent.items():
        for path, content in requests:
            flight = server.arrive(path, content)
            if server.answer(flight) != flight.faultless.reply:
                different.add(case_id)
            server.land(flight, left=False)
    alone = not vars(broken) and not server.looked_beside and fault.left is Fault.left
    return [cases()[case_id] for case_id in right.sent if case_id in different or not alone]


@pytest.mark.parametrize("api", APIS)
def test_a_right_server_passes_every_case(api: str) -> None:
    results = faultless(api).results
    assert len(results) == sum(api in case.apis for case in cases().values())
    assert {result.case: (result.verdict, result.remark) for result in results if result.verdict != "pass"} == {}


def test_every_case_has_a_fault_and_every_fault_its_case() -> None:
    assert sorted(FAULTS) == sorted(cases())


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_exactly_its_case_fails(name: str) -> None:
    fault = FAULTS[name]
    apis = [api for api in cases()[name].apis if api in fault.apis]
    assert apis, f"no API of the case has a form for the fault: {fault.apis}"
    wrong = {}
    for api in apis:
        server = FaultyToolServer(player(), fault(), cache=faultless(api).cache)
        results = judged(server, api, touched(fault, api))
        verdicts = {result.case: result for result in results}
        if name not in verdicts:
            wrong[f"{api} {name}"] = "the fault changes no byte of its case's answers"
        for result in results:
            if result.verdict != ("fail" if result.case == name else "pass"):
                wrong[f"{api} {result.case}"] = f"{result.verdict}: {result.remark[:300]}"
        assert server.broken_hooks == []
    assert wrong == {}, fault.__doc__


def test_every_fault_says_in_a_line_what_it_does() -> None:
    lines = {name: (fault.__doc__ or "").partition("\n")[0] for name, fault in FAULTS.items()}
    assert [(name, line) for name, line in lines.items() if len(line) < 10 or not line.endswith(".")] == []


def test_no_fault_knows_a_case_by_its_prompt() -> None:
    prompts = [prompt for case in cases().values() for prompt in case.prompts()]
    told = []
    for module in {inspect.getmodule(fault) for fault in FAULTS.values()}:
        assert module is not None
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            # Three words and more: what is shorter may be the content that the fault is about.
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 2:
                told += [(node.value, prompt) for prompt in prompts if node.value in prompt]
    assert told == []


@pytest.mark.parametrize("api", APIS)
def test_over_a_socket_the_verdicts_are_the_same(api: str) -> None:
    chosen = [case for case in cases().values() if api in case.apis and case.area in ("streams", "cancelled", "usage")]
    server = FaultyToolServer(player(), api_key="sesame").serve()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        results = asked_at(f"http://127.0.0.1:{server.server_port}/v1", api, chosen, api_key="sesame")
        assert {result.case: result.remark for result in results if result.verdict != "pass"} == {}
        assert {result.verdict for result in asked_at(f"http://127.0.0.1:{server.server_port}", api, chosen[:3])} == {
            "fail"
        }
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_command_serves_a_fault() -> None:
    command = [sys.executable, "-m", "support.faulty_tool_server", "--fault", "literals/html-entity"]
    with subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[0]
            chosen = [case for case in cases().values() if case.id.startswith("literals/h")]
            failed = [result.case for result in asked_at(url, "chat", chosen) if result.verdict == "fail"]
            assert failed == ["literals/html-entity"]
        finally:
            process.kill()


def asked_at(url: str, api: str, chosen: Sequence[Case], api_key: str | None = None) -> list[CaseResult]:
    async def ask() -> list[CaseResult]:
        async with Endpoint(url, MODEL, api=api, api_key=api_key) as endpoint:
            return (await run(endpoint, chosen, load_profile(PROFILE), attempts=1)).results

    return asyncio.run(ask())
