# SPDX-License-Identifier: Apache-2.0
"""What agents are written with, before our frontend on the embedded stack: SDKs and an agent over the suite's cases."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_structural_tags.conformance import load_cases, load_profile
from support.real_clients import KNOWN, LANGUAGES, agent_loop, ask_all
from support.three_servers import serve

CLIENTS = Path(os.environ.get("CONFORMANCE_CLIENTS", ".nox/clients")).absolute()

#: One case for each thing that a client library has its own code for.
TOLD = [
    "literals/html-entity",
    "parallel/ids-distinct",
    "streams/arguments-are-text",
    "truncated/in-arguments",
    "turns/ids-round-trip",
    "types/big-integer",
    "usage/plain",
]


@pytest.fixture(scope="module")
def clients() -> Path:
    if not (CLIENTS / "installed").is_file():
        pytest.skip(f"no clients in {CLIENTS}: `python -m support.real_clients {CLIENTS}` installs them")
    return CLIENTS


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The base URL of our frontend before the playing model, and the model's name."""
    with serve("ours", tmp_path_factory.mktemp("clients"), "glm47", forced=True) as served:
        yield served


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize("language", LANGUAGES)
def test_an_sdk_hands_over_what_our_frontend_sent(
    ours: tuple[str, str], clients: Path, language: str, api: str
) -> None:
    url, model = ours
    cases = [case for case in load_cases() if case.id in TOLD]
    assert len(cases) == len(TOLD)
    got = asyncio.run(ask_all(language, clients, url, api, model, cases, load_profile("agent")))
    unlike = {result.case: result.remark for result in got.results if result.verdict != "pass"}
    assert unlike.keys() == KNOWN.get((language, api), {}).keys() & {case.id for case in cases}, unlike
    assert len(got.results) > len(TOLD) / 2


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_an_agent_calls_its_tools_until_it_knows(
    ours: tuple[str, str], clients: Path, api: str, streamed: bool
) -> None:
    (case,) = [case for case in load_cases() if case.id == "turns/agent-loop"]
    *turns, last = case.reference
    calls = [call for turn in turns for call in turn["calls"]]
    results = [result for turn in case.then for result in turn.results]
    told = {
        "input": case.request["messages"][-1]["content"],
        "tools": case.request["tools"],
        "results": {call["name"]: [result] for call, result in zip(calls, results, strict=True)},
        "streamed": streamed,
    }
    agent = agent_loop(clients, *ours, api, told)
    called = [(name, json.loads(arguments)) for name, arguments in agent["called"]]
    assert called == [(call["name"], call["arguments"]) for call in calls]
    assert agent["output"] == last["text"]
