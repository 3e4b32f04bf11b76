# SPDX-License-Identifier: Apache-2.0
"""How tool-conformance asks: modes, turns, copies, cancelled streams, attempts; and what a run leaves behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo_structural_tags.conformance import (
    ABSENT,
    Answer,
    Call,
    Cancel,
    Case,
    CaseResult,
    Difference,
    Problem,
    Profile,
    Run,
    Turn,
    read_run,
    run,
)

ALL = frozenset({"forced", "auto", "text", "follow", "parallel", "reasoning"})
PROFILE = Profile("all", "", ALL, max_tokens=77)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def case(name: str = "one", expect: Mapping[str, Any] | None = None, **more: Any) -> Case:
    request = {"messages": [{"role": "user", "content": f"{name} ${{n}}"}], "tools": TOOLS}
    return Case(f"a/{name}", "F.", request, expect or {"calls": [{"name": "f", "arguments": {}}]}, **more)


def called(arguments: str = "{}", *, calls: int = 1, **more: Any) -> Answer:
    return Answer(200, [Call(f"id{i}", "f", arguments) for i in range(calls)], finish="tool_calls", **more)


SILENT = Answer(200, text="No.", finish="stop")


class FakeAsker:
    """Answers out of a script: the bodies in their order get its answers, the last one for all that follow."""

    base_url = "http://fake"
    model = "m"

    def __init__(self, *answers: Answer | Exception | Callable[[Any], Answer], api: str = "chat") -> None:
        self.api = api
        self.answers = list(answers)
        self.asked: list[tuple[Any, bool, int | None]] = []
        self.at_once = self.most_at_once = 0

    async def ask(self, body: Mapping[str, Any] | str, stream: bool, *, cancel_after: int | None = None) -> Answer:
        self.asked.append((body, stream, cancel_after))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        for _ in range(3):
            await asyncio.sleep(0)
        self.at_once -= 1
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Answer) else answer(body)


def ran(asker: FakeAsker, *cases: Case, profile: Profile = PROFILE, **more: Any) -> list[CaseResult]:
    return asyncio.run(run(asker, cases, profile, **more)).results


def test_a_case_is_asked_in_both_modes_and_fails_if_one_does() -> None:
    asker = FakeAsker(called(), called('{"x": 1}'))
    (result,) = ran(asker, case())
    assert [(body.get("stream", False), stream) for body, stream, _ in asker.asked] == [(False, False), (True, True)]
    assert (result.verdict, result.remark) == ("fail", "stream: calls[0].arguments.x: not expected, got 1")
    assert [exchange.label for exchange in result.exchanges] == ["plain", "stream"]
    assert [len(exchange.differences) for exchange in result.exchanges] == [0, 1]


def test_the_same_reason_is_given_once_for_all_modes() -> None:
    (result,) = ran(FakeAsker(called('{"x": 1}')), case())
    assert result.remark == "plain, stream: calls[0].arguments.x: not expected, got 1"


def test_inconclusive_is_asked_again_with_other_seeds_and_may_pass_then() -> None:
    asker = FakeAsker(SILENT, SILENT, called())
    (result,) = ran(asker, case(modes=("plain",)))
    assert (result.verdict, result.attempts, result.remark) == ("pass", 3, "")
    assert [body.get("seed") for body, _, _ in asker.asked] == [None, 1, 2]


def test_inconclusive_stays_so_after_the_last_attempt_and_says_why() -> None:
    asker = FakeAsker(SILENT)
    (result,) = ran(asker, case(modes=("plain",)), attempts=2)
    assert (result.verdict, result.attempts, len(asker.asked)) == ("inconclusive", 2, 2)
    assert result.remark == "plain: the model did not call: no call, text \"No.\", finish reason 'stop'"


def test_a_failure_is_not_asked_again() -> None:
    asker = FakeAsker(called('{"x": 1}'))
    (result,) = ran(asker, case(modes=("plain",)))
    assert (result.attempts, len(asker.asked)) == (1, 1)


def test_a_failure_in_one_mode_outweighs_an_inconclusive_other() -> None:
    (result,) = ran(FakeAsker(SILENT, Answer(500, error="boom")), case())
    assert (result.verdict, result.remark) == ("fail", "stream: expected an answer, got an error: status 500: boom")


def test_a_busy_server_was_asked_again_by_the_endpoint_and_is_not_here() -> None:
    asker = FakeAsker(Answer(503, error="busy"))
    (result,) = ran(asker, case(modes=("plain",)))
    assert (result.verdict, result.attempts) == ("inconclusive", 1)
    assert result.remark == "plain: the server was busy: status 503: busy"
    half = FakeAsker(Answer(503, error="busy"), SILENT, called())
    (result,) = ran(half, case())
    assert (result.verdict, result.attempts) == ("pass", 2)


def test_only_requests_without_a_limit_get_the_profiles() -> None:
    asker = FakeAsker(called())
    limited = Case("a/b", "F.", {"messages": [], "max_completion_tokens": 5}, {"answers": True}, modes=("plain",))
    ran(asker, case(modes=("plain",)), limited, concurrency=1)
    assert [body.get("max_tokens") for body, _, _ in asker.asked] == [77, None]


def test_overrides_are_laid_over_the_body_of_their_api_alone() -> None:
    over = case(modes=("plain",), overrides={"chat": {"stop": "x", "tools": None}})
    for api, stop in (("chat", "x"), ("responses", None)):
        asker = FakeAsker(called(), api=api)
        ran(asker, over)
        (body, _, _) = asker.asked[0]
        assert (body.get("stop"), "tools" in body) == (stop, api != "chat")


def test_a_body_is_sent_as_it_stands() -> None:
    asker = FakeAsker(Answer(400, error="no JSON"))
    refused = Case("a/b", "F.", {}, {"refused": {"names": [["json"]]}}, modes=("plain",), body="{,")
    (result,) = ran(asker, refused)
    assert (asker.asked, result.verdict) == ([("{,", False, None)], "pass")
    assert result.exchanges[0].request == "{,"


def test_cases_of_another_api_are_left_out() -> None:
    asker = FakeAsker(called())
    assert [result.case for result in ran(asker, case(), case("two", apis=("messages",)))] == ["a/one"]


TWO_TURNS = case(
    then=(Turn(("cold",), "And now?", {"tool_choice": "none"}),), expect={"text": {"equals": "Dress warm."}}
)


def test_a_further_turn_sends_the_answer_back_with_the_results() -> None:
    asker = FakeAsker(called(), Answer(200, text="Dress warm.", finish="stop"), called())
    (result,) = ran(asker, case("two", modes=("plain",), then=TWO_TURNS.then, expect=TWO_TURNS.expect))
    assert result.verdict == "pass"
    assert [exchange.label for exchange in result.exchanges] == ["plain, turn 1", "plain, turn 2"]
    body = asker.asked[1][0]
    _, assistant, tool, user = body["messages"]
    assert assistant["tool_calls"][0]["id"] == tool["tool_call_id"] == "id0"
    assert (tool["content"], user["content"], body["tool_choice"]) == ("cold", "And now?", "none")


@pytest.mark.parametrize(
    ("first", "verdict", "remark"),
    [
        (SILENT, "inconclusive", "turn 1: the model was to make 1 calls, it made 0: none"),
        (called(calls=2), "inconclusive", "turn 1: the model was to make 1 calls, it made 2: f, f"),
        (Answer(500, error="boom"), "fail", "turn 1: expected an answer, got an error: status 500: boom"),
    ],
)
def test_a_conversation_ends_where_a_turn_goes_wrong(first: Answer, verdict: str, remark: str) -> None:
    asker = FakeAsker(first)
    (result,) = ran(asker, TWO_TURNS, attempts=1)
    assert (result.verdict, result.remark) == (verdict, f"plain, stream: {remark}")
    assert len(asker.asked) == 2


def test_copies_are_sent_at_once_and_judged_each_by_its_own_number() -> None:
    def answer(body: Any) -> Answer:
        number = body["messages"][0]["content"][-1]
        return called(json.dumps({"x": "3" if number == "2" else number}))

    asker = FakeAsker(answer)
    expect = {"calls": [{"name": "f", "arguments": {"x": "${n}"}}]}
    (result,) = ran(asker, case(copies=3, expect=expect), concurrency=1)
    assert (asker.most_at_once, len(asker.asked)) == (3, 6)
    assert result.remark == 'plain of copy 2, stream of copy 2: calls[0].arguments.x: expected "2", got "3"'


def test_streams_are_left_before_the_answer_that_is_judged() -> None:
    asker = FakeAsker(Answer(200, broken="left"), Answer(200, broken="left"), called())
    (result,) = ran(asker, case(modes=("plain",), cancel=Cancel(2, 5)))
    assert [(stream, left) for _, stream, left in asker.asked] == [(True, 5), (True, 5), (False, None)]
    assert result.verdict == "pass"
    asker = FakeAsker(called(), Answer(200, broken="left"), Answer(200, text="Dress warm.", finish="stop"))
    ran(asker, replace(TWO_TURNS, modes=("plain",), cancel=Cancel(1, 5)))
    assert [left for _, _, left in asker.asked] == [None, 5, None]


def test_a_stream_is_compared_with_the_plain_answer() -> None:
    expect = {"same": ["arguments"], "answers": True}
    spaced = [called("{}"), called("{ }")]
    (result,) = ran(FakeAsker(*spaced, *spaced), case(expect=expect))
    assert result.verdict == "fail"
    assert result.remark == 'stream against plain: calls[0].arguments: expected "{}", got "{ }"'
    assert [len(exchange.differences) for exchange in result.exchanges] == [0, 1, 0, 0]
    assert [exchange.label for exchange in result.exchanges] == ["plain", "stream", "plain, again", "stream, again"]
    (result,) = ran(FakeAsker(called("{}"), Answer(500, error="boom")), case(expect=expect))
    assert result.remark == "stream: expected an answer, got an error: status 500: boom"


@pytest.mark.parametrize(
    ("again", "remark"),
    [
        ([called("{  }"), called("{ }")], "another plain answer to the same request differs as well"),
        ([called("{}"), called("{}")], "another stream of the same request does not"),
    ],
)
def test_a_model_that_never_answers_twice_alike_says_nothing_about_streams(again: list[Answer], remark: str) -> None:
    asker = FakeAsker(called("{}"), called("{ }"), *again)
    (result,) = ran(asker, case(expect={"same": ["arguments"], "answers": True}), attempts=1)
    assert result.verdict == "inconclusive"
    assert result.remark.startswith(f"stream against plain: the stream differs, but {remark}; calls[0].arguments")


def test_a_field_that_the_model_does_not_have_is_left_out() -> None:
    """As OpenAI's reasoning models refuse them."""
    limit = Answer(400, error="'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.")
    warm = Answer(400, error="'temperature' does not support 0 with this model.")
    asked = case(modes=("plain",), cancel=Cancel(1, 5))
    asked = replace(asked, request={**asked.request, "temperature": 0})
    asker = FakeAsker(limit, warm, Answer(200, broken="left"), called())
    (result,) = ran(asker, asked)
    assert result.verdict == "pass"
    limits = [(body.get("max_tokens"), body.get("max_completion_tokens")) for body, _, _ in asker.asked]
    assert limits == [(77, None), (None, 77), (None, 77), (None, 77)]
    assert ["temperature" in body for body, _, _ in asker.asked] == [True, True, False, False]
    assert [left for _, _, left in asker.asked] == [5, 5, 5, None]
    assert result.exchanges[0].request == asker.asked[-1][0]
    refused = replace(asked, expect={"refused": {"names": [["temperature"]]}}, cancel=None)
    asker = FakeAsker(warm)
    assert [result.verdict for result in ran(asker, refused)] == ["pass"]
    assert len(asker.asked) == 1
    assert [result.verdict for result in ran(FakeAsker(Answer(400, error="max_completion_tokens")), asked)] == ["fail"]


@pytest.mark.parametrize(
    "said",
    [
        "Unsupported parameter: 'reasoning.summary' is not supported with this model.",
        "Reasoning summaries are not supported.",
        "Unknown parameter: 'summary'.",
    ],
)
def test_a_model_that_does_not_reason_is_asked_without_a_summary(said: str) -> None:
    none = Answer(400, error=said)
    asked = case(modes=("plain",), overrides={"responses": {"reasoning": {"summary": "auto"}, "store": False}})
    asker = FakeAsker(none, called(), api="responses")
    assert [result.verdict for result in ran(asker, asked)] == ["pass"]
    assert ["reasoning" in body for body, _, _ in asker.asked] == [True, False]
    assert [body["store"] for body, _, _ in asker.asked] == [False, False]
    assert [result.verdict for result in ran(FakeAsker(none, api="responses"), asked)] == ["fail"]
    busy = FakeAsker(replace(none, status=429), api="responses")
    assert [result.verdict for result in ran(busy, asked)] == ["inconclusive"]
    assert all("reasoning" in body for body, _, _ in busy.asked)


def test_arguments_of_plain_messages_are_no_text_of_the_servers() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": ["x"]}}}]
    cut = Case("a/cut", "F.", {"messages": [], "tools": tools}, {"cut": True})
    answer = Answer(200, [Call("id", "f", "{}")], finish="length")
    for api, remark in (("messages", "stream: "), ("chat", "plain, stream: ")):
        (result,) = ran(FakeAsker(answer, api=api), cut)
        assert result.remark.startswith(f"{remark}calls[0].arguments: breaks")


def test_what_a_weak_model_writes_wrong_is_no_failure_of_the_server() -> None:
    forced = Profile("forced", "", frozenset({"forced"}), 9)
    beyond = case(needs=frozenset({"forced", "follow"}))
    (result,) = ran(FakeAsker(called('{"x": 1}')), beyond, profile=forced, attempts=1)
    assert (result.verdict, result.required) == ("inconclusive", False)
    assert result.remark.startswith("plain, stream: the profile forced does not ask for follow; calls[0].arguments.x:")
    for fault in (Answer(500, error="boom"), called('{"x": 1}', calls=0)):
        (result,) = ran(FakeAsker(fault), beyond, profile=forced)
        assert result.verdict == "fail"
    broken = called(problems=[Problem("no_end", "no [DONE]")])
    (result,) = ran(FakeAsker(broken), replace(beyond, expect={"protocol": True}), profile=forced)
    assert result.verdict == "fail"
    named = replace(forced, also=frozenset({beyond.id}))
    (result,) = ran(FakeAsker(called('{"x": 1}')), beyond, profile=named)
    assert (result.verdict, result.required) == ("fail", True)
    (result,) = ran(FakeAsker(called('{"x": 1}')), case(needs=frozenset({"forced"})), profile=forced)
    assert (result.verdict, result.required) == ("fail", True)


def test_an_exception_fails_its_case_and_no_other() -> None:
    first, second = ran(FakeAsker(KeyError("x"), called()), case(modes=("plain",)), case("two"), concurrency=1)
    assert (first.verdict, first.remark) == ("fail", "suite: the suite itself failed: KeyError: 'x'")
    assert second.verdict == "pass"


def test_as_many_cases_are_asked_at_once_as_is_said_and_results_keep_their_order() -> None:
    asker = FakeAsker(called())
    names = [f"case{i}" for i in range(9)]
    results = ran(asker, *(case(name) for name in names), concurrency=3)
    assert asker.most_at_once == 3
    assert [result.case for result in results] == [f"a/{name}" for name in names]


def test_a_run_that_is_stopped_keeps_what_was_judged() -> None:
    async def stopped() -> Run:
        stop = asyncio.Event()

        class Hanging(FakeAsker):
            async def ask(self, body: Any, stream: bool, *, cancel_after: int | None = None) -> Answer:
                if len(self.asked) == 2:
                    stop.set()
                    await asyncio.sleep(3600)
                return await super().ask(body, stream, cancel_after=cancel_after)

        return await run(Hanging(called()), [case(), case("two"), case("three")], PROFILE, concurrency=1, stop=stop)

    found = asyncio.run(stopped())
    assert [result.case for result in found.results] == ["a/one"]
    assert (found.interrupted, found.exit_code) == (True, 130)


def test_progress_hears_of_every_case() -> None:
    heard: list[str] = []

    class Listener:
        def started(self, case_id: str) -> None:
            heard.append(f"started {case_id}")

        def finished(self, result: CaseResult) -> None:
            heard.append(f"{result.verdict} {result.case}")

    ran(FakeAsker(called()), case(), case("two"), concurrency=1, progress=Listener())
    assert heard == ["started a/one", "pass a/one", "started a/two", "pass a/two"]


@pytest.mark.parametrize(
    ("answers", "required", "code"),
    [
        ([called()], True, 0),
        ([called(), called('{"x": 1}')], False, 1),
        ([called(), SILENT], True, 3),
        ([called(), SILENT], False, 0),
        ([SILENT, called('{"x": 1}')], True, 1),
    ],
)
def test_the_exit_status_tells_failures_from_what_is_open(answers: list[Answer], required: bool, code: int) -> None:
    profile = Profile("p", "", ALL, 9, excluded={} if required else {"a/one": "no", "a/two": "no"})
    cases = [case(modes=("plain",)), case("two", modes=("plain",))]
    found = asyncio.run(run(FakeAsker(*answers), cases, profile, attempts=1, concurrency=1))
    assert found.exit_code == code


def test_results_are_written_and_read_back(tmp_path: Path) -> None:
    answer = called('{"x": null}', raw="data: \ud83d\n", text="\u2028")
    found = asyncio.run(run(FakeAsker(answer), [case()], PROFILE))
    found.write(tmp_path / "run.json")
    assert read_run(tmp_path / "run.json") == found
    document = json.loads((tmp_path / "run.json").read_text("ascii"))
    assert document["schema"] == 1
    assert document["endpoint"] == {"base_url": "http://fake", "model": "m", "api": "chat"}
    assert document["summary"] == {"pass": 0, "fail": 1, "inconclusive": 0, "required": 1}
    (result,) = document["results"]
    assert (result["case"], result["area"], result["required"]) == ("a/one", "a", True)
    assert result["exchanges"][0]["request"]["messages"] == [{"role": "user", "content": "one 1"}]
    # A value that is null is told from one that is not there.
    (difference,) = result["exchanges"][0]["differences"]
    assert "expected" not in difference
    assert difference["got"] is None
    assert read_run(tmp_path / "run.json").results[0].exchanges[0].differences == [
        Difference("calls[0].arguments.x", "calls[0].arguments.x: not expected, got null", ABSENT, None)
    ]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": 2}', '{"schema": 1}', '{"schema": 1, "version": "1", "results": 5}']
)
def test_a_file_that_holds_no_results_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json: "):
        read_run(tmp_path / "run.json")
