# SPDX-License-Identifier: Apache-2.0
"""`tool-conformance` against our frontend on the embedded stack, by the command, through real SDKs and by an agent.

`nox -s conformance` asks every case, and the peers too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_structural_tags.conformance import load_cases, load_profile
from support.conformance_columns import ask
from support.real_clients import KNOWN, LANGUAGES, agent_loop, ask_all
from support.three_servers import play, serve

pytestmark = pytest.mark.engines

#: Where `nox -s stack_tests` installs them.
CLIENTS = Path(".nox/clients").absolute()

#: One per area that a fault of our own would show in; those of the forced profile are answered by random weights.
TELLING = (
    "choice/required-calls",
    "concurrent/tools",
    "enums/with-null",
    "literals/closing-tool-call",
    "literals/html-entity",
    "literals/trailing-newline",
    "malformed/unknown-type",
    "parallel/two-tools",
    "references/beside-others",
    "streams/text-before-call",
    "truncated/in-arguments",
    "turns/ids-round-trip",
    "types/big-integer",
    "undeclared/passed-on",
    "unions/digits-of-string",
    "usage/stream-equals-plain",
)
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
        pytest.skip(f"no clients: PYTHONPATH=tests python -m support.real_clients {CLIENTS} installs them")
    return CLIENTS


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The base URL of our frontend before the playing model, and the model's folder, whose name is the model's."""
    with serve("ours", tmp_path_factory.mktemp("conformance"), "glm47") as served:
        yield served


def test_our_frontend_passes_a_telling_selection_in_every_api(ours: tuple[str, Path], tmp_path: Path) -> None:
    url, model = ours
    play(model, "glm47", forced=False)
    for api in ("chat", "responses", "messages"):
        found = ask(url, model.name, api, tmp_path / f"{api}.json", only=TELLING)
        assert {one.case for one in found.results} <= set(TELLING)
        assert len(found.results) >= 15
        missed = {one.case: (one.verdict, one.remark) for one in found.results if one.verdict != "pass"}
        assert not missed, api


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize("language", LANGUAGES)
def test_an_sdk_hands_over_what_our_frontend_sent(
    ours: tuple[str, Path], clients: Path, language: str, api: str
) -> None:
    url, model = ours
    play(model, "glm47", forced=True)
    cases = [case for case in load_cases() if case.id in TOLD]
    assert len(cases) == len(TOLD)
    got = asyncio.run(ask_all(language, clients, url, api, model.name, cases, load_profile("agent")))
    unlike = {result.case: result.remark for result in got.results if result.verdict != "pass"}
    assert unlike.keys() == KNOWN.get((language, api), {}).keys() & {case.id for case in cases}, unlike
    assert len(got.results) > len(TOLD) / 2


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_an_agent_calls_its_tools_until_it_knows(
    ours: tuple[str, Path], clients: Path, api: str, streamed: bool
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
    url, model = ours
    play(model, "glm47", forced=True)
    agent = agent_loop(clients, url, model.name, api, told)
    called = [(name, json.loads(arguments)) for name, arguments in agent["called"]]
    assert called == [(call["name"], call["arguments"]) for call in calls]
    assert agent["output"] == last["text"]
