# SPDX-License-Identifier: Apache-2.0
"""What tool-conformance says of an answer: the verdict, and what exactly differs."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_structural_tags.conformance import Answer, Call, Problem, Usage
from dynamo_structural_tags.conformance._judge import Judgement, judge, judge_same

WRITE = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 3}, "lines": {"type": "integer"}},
    "required": ["text"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "write", "parameters": WRITE}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]
REQUEST = {"tools": TOOLS, "max_tokens": 50}
SPENT = Usage(9, 50, 59)


def call(arguments: str = '{"text": "abc"}', name: str = "write", call_id: str = "call_1") -> Call:
    return Call(call_id, name, arguments)


def answer(*calls: Call, finish: str | None = "tool_calls", **more: Any) -> Answer:
    return Answer(200, list(calls), finish=finish, **more)


def error(status: int, words: str, **more: Any) -> Answer:
    return Answer(status, error=words, **more)


def says(expect: dict[str, Any], got: Answer, **more: Any) -> Judgement:
    return judge(expect, REQUEST, got, **more)


def verdict(expect: dict[str, Any], got: Answer, **more: Any) -> str:
    return says(expect, got, **more).verdict


def reason(expect: dict[str, Any], got: Answer, **more: Any) -> str:
    """The one reason of a failure."""
    judgement = says(expect, got, **more)
    assert judgement.verdict == "fail"
    (only,) = judgement.reasons
    return only


def wants(arguments: Any, name: str = "write") -> dict[str, Any]:
    return {"calls": [{"name": name, "arguments": arguments}]}


# Arguments


def test_a_body_that_is_no_json_is_shown() -> None:
    page = Answer(200, broken="the body is no JSON: Expecting value", raw="<html>Log in")
    assert reason({"answers": True}, page).endswith('; the body: "<html>Log in"')


def test_equal_arguments_pass_however_their_json_is_laid_out() -> None:
    expect = wants({"text": "a &lt; b", "lines": 2})
    assert verdict(expect, answer(call('{"lines":2,\n "text":"a \\u0026lt; b"}'))) == "pass"


@pytest.mark.parametrize(
    ("expected", "got", "message"),
    [
        ({"text": "a &lt; b"}, '{"text": "a < b"}', 'calls[0].arguments.text: expected "a &lt; b", got "a < b"'),
        ({"text": "a\n"}, '{"text": "a"}', 'calls[0].arguments.text: expected "a\\n", got "a"'),
        ({"text": "a b"}, '{"text": "a\\u00a0b"}', 'calls[0].arguments.text: expected "a b", got "a\\u00a0b"'),
        ({"text": "ab"}, '{"text": "a\\u200bb"}', 'calls[0].arguments.text: expected "ab", got "a\\u200bb"'),
        ({"text": "é"}, '{"text": "e\\u0301"}', 'calls[0].arguments.text: expected "\\u00e9", got "e\\u0301"'),
        ({"text": "鸢尾"}, '{"text": "鸢"}', 'calls[0].arguments.text: expected "鸢尾", got "鸢"'),
        ({"lines": 1}, '{"lines": 1.0}', "calls[0].arguments.lines: expected 1, got 1.0"),
        ({"lines": 1}, '{"lines": true}', "calls[0].arguments.lines: expected 1, got true"),
        ({"lines": 1}, '{"lines": "1"}', 'calls[0].arguments.lines: expected 1, got "1"'),
        ({"lines": 9007199254740993}, '{"lines": 9007199254740992}',
         "calls[0].arguments.lines: expected 9007199254740993, got 9007199254740992"),
        ({"text": None}, "{}", "calls[0].arguments.text: missing, expected null"),
        ({}, '{"text": ""}', 'calls[0].arguments.text: not expected, got ""'),
        ({"a b": [1, [2]]}, '{"a b": [1, [3]]}', 'calls[0].arguments["a b"][1][0]: expected 2, got 3'),
        ([1], "[1, 2]", "calls[0].arguments[1]: not expected, got 2"),
        ([1, 2], "[1]", "calls[0].arguments[1]: missing, expected 2"),
        ({"text": "x"}, '{"text": "x", "text": "x"}',
         'calls[0].arguments: the key "text" stands twice: "{\\"text\\": \\"x\\", \\"text\\": \\"x\\"}"'),
        ({"text": "x"}, "{text: 1}", "calls[0].arguments: no JSON (Expecting property name enclosed in double quotes: "
         'line 1 column 2 (char 1)): "{text: 1}"'),
        ({"lines": 1}, '{"lines": NaN}', 'calls[0].arguments: no JSON (NaN is no JSON): "{\\"lines\\": NaN}"'),
    ],
)  # fmt: skip
def test_a_difference_is_named_by_its_path_with_both_values(expected: Any, got: str, message: str) -> None:
    assert reason(wants(expected), answer(call(got))) == message


def test_a_difference_carries_both_values_as_they_are() -> None:
    (difference,) = says(wants({"text": "a &lt; b"}), answer(call('{"text": "a < b"}'))).differences
    assert (difference.path, difference.expected, difference.got) == ("calls[0].arguments.text", "a &lt; b", "a < b")


def test_long_strings_are_shown_around_the_first_difference() -> None:
    long = "x" * 5000
    message = reason(wants({"text": long + "A" + long}), answer(call(f'{{"text": "{long}B{long}"}}')))
    assert len(message) < 500
    assert 'xxA' in message  # fmt: skip
    assert 'xxB' in message  # fmt: skip
    assert message.endswith("(from character 5000 on; 10001 characters against 10001)")


def test_arguments_nested_too_deep_are_a_failure_of_the_answer_not_of_the_suite() -> None:
    assert verdict(wants({}), answer(call("[" * 200_000))) == "fail"


def test_no_text_is_no_object_of_no_arguments() -> None:
    assert verdict(wants({}, "stop"), answer(call("{}", "stop"))) == "pass"
    assert reason(wants({}, "stop"), answer(call("", "stop"))).startswith("calls[0].arguments: no JSON")


def test_the_names_and_the_order_of_calls_count() -> None:
    expect = {"calls": [{"name": "write"}, {"name": "stop"}]}
    assert verdict(expect, answer(call(), call("{}", "stop"))) == "pass"
    assert says(expect, answer(call("{}", "stop"), call())).reasons == [
        'calls[0].name: expected "write", got "stop"',
        'calls[1].name: expected "stop", got "write"',
    ]
    assert reason(expect, answer(call())) == "calls: expected 2 (write, stop), got 1 (write)"


# What says nothing


def test_a_model_that_does_not_call_proves_nothing() -> None:
    wanting: list[dict[str, Any]] = [
        {"valid": True},
        wants({}),
        {"ids": True},
        {"count": 1},
        {"finish": ["tool_calls"]},
    ]
    for expect in wanting:
        judgement = says(expect, answer(finish="stop", text="No."))
        assert judgement.verdict == "inconclusive"
        assert judgement.remark == "the model did not call: no call, text \"No.\", finish reason 'stop'"


def test_no_call_fails_where_the_choice_demands_one_or_the_finish_reason_announces_it() -> None:
    got = answer(finish="stop", text="No.")
    assert reason({"must_call": True, "valid": True}, got).startswith("calls: expected a call, got no call")
    assert verdict({"valid": True}, answer(finish="tool_calls")) == "fail"


def test_the_token_limit_excuses_what_it_cut_and_nothing_else() -> None:
    cut = answer(call('{"text": "ab'), finish="length")
    assert verdict(wants({"text": "abc"}), cut) == "inconclusive"
    for status in (200, 400, 500):  # or so
        told = error(status, "truncated_call: the answer ended inside the call of 'write'")
        assert verdict(wants({"text": "abc"}), told) == "inconclusive"
    assert verdict(wants({"text": "abc"}), error(500, "the connection was lost")) == "fail"
    assert verdict({"must_call": True, "valid": True}, answer(finish="length", text="I th")) == "inconclusive"
    assert verdict({"text": {"equals": "abc"}}, answer(finish="length", text="ab")) == "inconclusive"
    assert verdict({"text": {"lacks": ["<tool"]}}, answer(finish="length", text="<tool")) == "fail"
    assert verdict({"no_calls": True}, answer(call(), finish="length")) == "fail"
    assert verdict({"ids": True, "valid": True}, answer(call('{"te', call_id=""), finish="length")) == "fail"
    both = {"text": {"equals": "<t>!", "lacks": ["<t>"]}}
    assert verdict(both, answer(finish="length", text="<t>")) == "fail"


def test_the_finish_reason_length_is_believed_where_something_is_missing_or_the_limit_is_spent() -> None:
    whole = {"finish": ["tool_calls"], **wants({"text": "abc"})}
    assert verdict(whole, answer(call(), finish="length", usage=Usage(9, 49, 58))) == "fail"
    assert verdict(whole, answer(call(), finish="length")) == "fail"
    assert verdict(whole, answer(call('{"te'), finish="length")) == "inconclusive"
    assert verdict({"finish": ["stop"]}, answer(finish="length", text="And so", usage=SPENT)) == "inconclusive"


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_server_proves_nothing(status: int) -> None:
    either: list[dict[str, Any]] = [{"valid": True}, {"refused": {"names": []}}]
    for expect in either:
        judgement = says(expect, error(status, "come back later"))
        assert (judgement.verdict, judgement.remark) == (
            "inconclusive",
            f"the server was busy: status {status}: come back later",
        )


@pytest.mark.parametrize(
    ("got", "words"),
    [
        (error(400, "tools: bad"), "got an error: status 400: tools: bad"),
        (error(500, "boom"), "got an error: status 500: boom"),
        (Answer(500), "got an error: status 500: no error text"),
        (error(200, "boom", text="so f"), "got an error in the stream: status 200: boom"),
        (answer(call(), broken="the connection was cut"), "no whole answer: the connection was cut"),
        (Answer(0, broken="no answer within 120 s"), "no whole answer: no answer within 120 s"),
        (Answer(200, problems=[Problem("not_json", "the body is no JSON")], raw="<html>"), 'the body: "<html>"'),
    ],
)
def test_an_error_a_broken_and_an_unreadable_answer_fail_whatever_is_expected(got: Answer, words: str) -> None:
    for expect in ({"valid": True}, {"no_calls": True}, {"answers": True}, {"text": {"empty": True}}):
        assert words in reason(expect, got)


# The other checks


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (call("{}", "rm"), 'calls[0].name: "rm" is not declared: write, stop'),
        (call('{"text": "ab"}'), 'calls[0].arguments.text: breaks {"minLength": 3}: got "ab"'),
        (call("{}"), 'calls[0].arguments: breaks {"required": ["text"]}: got {}'),
        (call('"abc"'), 'calls[0].arguments: expected an object, got "abc"'),
    ],
)
def test_a_call_is_valid_where_its_tool_is_declared_and_the_schema_holds(got: Call, message: str) -> None:
    assert verdict({"valid": True}, answer(call())) == "pass"
    assert reason({"valid": True}, answer(call(), got)) == message.replace("calls[0]", "calls[1]")


def test_the_number_of_calls_may_be_exact_or_bounded() -> None:
    two = answer(call(), call())
    assert verdict({"count": 2}, two) == "pass"
    assert verdict({"count": {"min": 1}}, two) == "pass"
    assert reason({"count": 1}, two).startswith("calls: expected 1, got 2 calls: write, write")
    assert reason({"count": {"max": 1}}, two).startswith("calls: expected 0 to 1, got 2 calls")
    assert reason({"count": {"min": 3}}, two).startswith("calls: expected 3 or more, got 2 calls")


def test_no_calls_names_the_call_that_came() -> None:
    assert verdict({"no_calls": True}, answer(finish="stop", text="Hi.")) == "pass"
    assert reason({"no_calls": True}, answer(call())) == 'calls: expected none, got write({"text": "abc"})'


def test_the_finish_reason_is_one_of_those_listed() -> None:
    assert verdict({"finish": ["tool_calls", "stop"]}, answer(call(), finish="stop")) == "pass"
    assert reason({"finish": ["tool_calls"]}, answer(call(), finish="stop")).startswith(
        "finish: expected tool_calls, got stop beside a call: write"
    )
    assert reason({"finish": ["tool_calls"]}, answer(call(), finish=None)).startswith(
        "finish: expected tool_calls, got none"
    )


def test_ids_are_there_and_differ() -> None:
    assert verdict({"ids": True}, answer(call(call_id="a"), call(call_id="functions.write:1"))) == "pass"
    assert reason({"ids": True}, answer(call(call_id=""))) == "calls[0].id: the call 'write' has no id"
    assert reason({"ids": True}, answer(call(), call())) == 'calls[1].id: "call_1" is the id of calls[0] as well'


def test_usage_is_there_and_adds_up() -> None:
    assert verdict({"usage": True}, answer(call(), usage=Usage(3, 4, 7))) == "pass"
    assert verdict({"usage": True}, answer(call(), usage=Usage(3, 4, None))) == "pass"
    assert reason({"usage": True}, answer(call())) == "usage: missing"
    assert (
        reason({"usage": True}, answer(call(), usage=Usage(3, 0, 3))) == "usage.completion: expected more than 0, got 0"
    )
    assert reason({"usage": True}, answer(call(), usage=Usage(3, 4, 8))) == "usage.total: expected 3 + 4 = 7, got 8"


@pytest.mark.parametrize(
    ("wanted", "good", "bad", "message"),
    [
        ({"equals": "a"}, "a", "a ", 'expected "a", got "a "'),
        ({"contains": ["a", "b"]}, "b a", "a", 'expected it to hold "b", got "a"'),
        ({"contains": ["heron"]}, "Heron.", "hero", 'expected it to hold "heron", got "hero"'),
        ({"lacks": ["<t>"]}, "t", "x<t>", '"<t>" may not stand in it, got "x<t>"'),
        ({"empty": True}, "", "\n", 'expected none, got "\\n"'),
        ({"empty": False}, "a", "", "expected some, got none"),
    ],
)
@pytest.mark.parametrize("field", ["text", "reasoning"])
def test_text_and_reasoning(field: str, wanted: Any, good: str, bad: str, message: str) -> None:
    assert verdict({field: wanted}, answer(finish="stop", **{field: good})) == "pass"
    assert reason({field: wanted}, answer(finish="stop", **{field: bad})) == f"{field}: {message}"


def test_protocol_looks_for_the_kinds_that_are_listed_or_for_all() -> None:
    got = answer(call(), problems=[Problem("index", "calls 0 and 2, but no 1")])
    assert reason({"protocol": True}, got) == "protocol: index: calls 0 and 2, but no 1"
    assert verdict({"protocol": ["index"]}, got) == "fail"
    assert verdict({"protocol": ["no_end"]}, got) == "pass"
    assert verdict({"valid": True}, got) == "pass"
    lost = answer(finish="stop", problems=got.problems)
    assert verdict({"protocol": True, "valid": True}, lost) == "fail"


REFUSED = {"refused": {"names": [["minimum", "bound"], ["lines"]]}}


@pytest.mark.parametrize("wrapped", ['no {"type": "bad", "param": null}', "[{'type': 'bad', 'loc': ['body']}]"])
def test_the_keys_that_every_error_is_wrapped_in_name_nothing(wrapped: str) -> None:
    expect = {"refused": {"names": [["type", "param"]]}}
    assert verdict(expect, error(400, wrapped)) == "fail"
    assert verdict(expect, error(400, f"the type text is unknown {wrapped}")) == "pass"
    assert verdict(expect, error(400, 'no {"param": "tools[0].type"}')) == "pass"


def test_a_refusal_is_a_4xx_or_an_error_event_that_names_the_fault() -> None:
    assert verdict(REFUSED, error(400, "tools[0]...LINES: the Bounds contradict")) == "pass"
    assert verdict(REFUSED, error(200, "lines: minimum above maximum")) == "pass"
    assert reason(REFUSED, error(422, "lines are wrong")) == (
        'error: expected it to name "minimum" or "bound", got status 422: lines are wrong'
    )


@pytest.mark.parametrize(
    ("got", "words"),
    [
        (error(500, "minimum of lines"), "expected a 4xx, got status 500: minimum of lines"),
        (answer(call()), "expected a 4xx, got status 200 with a call: write, no text, finish reason 'tool_calls'"),
        (Answer(0, broken="no answer within 2 s"), "expected a 4xx, got no whole answer: no answer within 2 s"),
        (Answer(400, raw=""), "status 400 has no error text"),
        (
            error(200, "minimum of lines", problems=[Problem("status", "an error body under 200")]),
            "expected a 4xx, got an error under status 200: minimum of lines",
        ),
    ],
)
def test_what_is_no_refusal_says_what_came(got: Answer, words: str) -> None:
    assert reason(REFUSED, got) == words


def test_a_format_may_refuse_a_literal_that_it_cannot_write_by_naming_it() -> None:
    expect = {**wants({"text": "</tool_call>"}), "or_refused": ["</tool_call>", "text"]}
    judgement = says(expect, error(400, "tools[0].text: cannot be written"))
    assert (judgement.verdict, judgement.remark) == ("pass", "refused: status 400: tools[0].text: cannot be written")
    assert verdict(expect, error(400, "no")) == "fail"
    assert verdict(expect, error(500, "text")) == "fail"
    assert verdict(expect, error(200, "text")) == "pass"
    assert verdict(expect, error(200, "text", problems=[Problem("status", "an error body under 200")])) == "fail"
    assert verdict(expect, answer(call('{"text": ""}'))) == "fail"


CUT = {"cut": True}
REFERENCE = {"calls": [{"name": "write", "arguments": {"text": "abcdef"}}]}


@pytest.mark.parametrize(
    "got",
    [
        answer(finish="length", usage=SPENT),
        answer(call('{"text": "abc'), finish="length", usage=SPENT),
        answer(call('{"text": "abcd"}'), call('{"te', call_id="b"), finish="length", usage=SPENT),
        error(500, "truncated_call: the answer ended in a call"),
        error(400, "truncated_call: the answer ended in a call"),
        error(200, "the token limit ended the call", text=""),
    ],
)
def test_a_call_that_was_cut_is_reported(got: Answer) -> None:
    assert verdict(CUT, got, reference=REFERENCE) == "pass"


@pytest.mark.parametrize(
    ("got", "words"),
    [
        (answer(call('{"text": "abcd"}'), usage=SPENT), "what was cut passes for a whole call"),
        (answer(call('{"text": "abcd'), usage=None), "what was cut passes for a whole call"),
        (answer(call('{"text": "abcd'), usage=SPENT), "calls[0].arguments: no JSON"),
        (answer(call('{"text": ""}'), usage=None), "closed as if it were whole"),
        (answer(call('{"text": ""}'), finish="length", usage=SPENT), "closed as if it were whole"),
        (answer(finish="stop", usage=SPENT), "finish: expected length, got stop: the call is gone"),
        (answer(finish="stop", usage=None), "finish: expected length, got stop: the call is gone"),
        (error(500, "internal error"), "got an error: status 500: internal error"),
        (error(400, "max_tokens: too low"), "got an error: status 400: max_tokens: too low"),
    ],
)
def test_a_call_that_was_cut_may_neither_pass_for_whole_nor_vanish(got: Answer, words: str) -> None:
    judgement = says(CUT, got, reference=REFERENCE)
    assert judgement.verdict == "fail"
    assert words in "; ".join(judgement.reasons)


@pytest.mark.parametrize(
    "got",
    [
        answer(call('{"text": "abc"}'), usage=Usage(9, 12, 21)),
        answer(call('{"text": ""}'), usage=Usage(9, 3, 12)),
        answer(call('{"text": "abcdef"}'), usage=SPENT),
        answer(call('{"text": "abc"}')),
        answer(finish="stop", text="No.", usage=Usage(9, 2, 11)),
        answer(finish="stop", text="No."),
    ],
)
def test_a_limit_that_was_not_hit_proves_nothing(got: Answer) -> None:
    assert verdict(CUT, got, reference=REFERENCE) == "inconclusive"


def test_an_object_that_the_api_demands_is_not_taken_for_a_repaired_call() -> None:
    got = answer(call("{}"), finish="length", usage=SPENT)
    assert verdict(CUT, got, rewritten=True) == "pass"
    assert verdict(CUT, got) == "fail"


def test_an_undeclared_tool_is_neither_passed_on_nor_dropped() -> None:
    reference = {"calls": [{"name": "rm", "arguments": {}}]}
    for good in (
        error(500, "undeclared_tool: no tool 'rm'"),
        error(400, "'rm' may not be called"),
        error(200, "unknown function"),
        answer(finish="stop", text="[tool_call_error] rm"),
        answer(call()),
    ):
        assert verdict({"reported": True}, good, reference=reference) == "pass"
    assert reason({"reported": True}, answer(call("{}", "rm"))) == 'calls: "rm": not declared: write, stop'
    assert reason({"reported": True}, answer(finish="stop", text=" ")).startswith("the call vanished: no call")
    assert verdict({"reported": True}, error(500, "internal error"), reference=reference) == "fail"
    assert verdict({"reported": True}, error(400, "a tool is bad"), reference=reference) == "fail"
    assert verdict({"reported": True}, answer(finish="length")) == "inconclusive"


def test_answers_asks_for_any_whole_answer() -> None:
    assert verdict({"answers": True}, answer(call())) == "pass"
    assert verdict({"answers": True}, answer(finish="length", text="Hm")) == "pass"
    assert verdict({"answers": True}, answer(finish="length")) == "pass"  # it reasoned, and does not show it
    assert verdict({"answers": True}, answer(finish="stop")) == "inconclusive"
    assert verdict({"answers": True}, Answer(200)) == "fail"


# The stream against the plain answer


def same(fields: list[str], plain: Answer, stream: Answer, api: str = "chat") -> Judgement:
    return judge_same(fields, api, plain, stream)


ALL = ["names", "arguments", "ids_present", "finish", "usage", "text", "reasoning", "count"]


def test_a_stream_that_is_the_same_passes_though_its_ids_are_others() -> None:
    one = answer(call(call_id="a"), text="x", reasoning="y", usage=Usage(1, 2, 3))
    other = answer(call(call_id="b"), text="x", reasoning="y", usage=Usage(1, 2, 3))
    assert same(ALL, one, other).verdict == "pass"


@pytest.mark.parametrize(
    ("field", "stream", "message"),
    [
        ("names", answer(call(name="stop")), 'calls[*].name[0]: expected "write", got "stop"'),
        ("ids_present", answer(call(call_id="")), "calls[*].id present[0]: expected true, got false"),
        ("arguments", answer(call('{"text":"abc"}')),
         'calls[0].arguments: expected "{\\"text\\": \\"abc\\"}", got "{\\"text\\":\\"abc\\"}"'),
        ("arguments", answer(), "len(calls): expected 1, got 0"),
        ("count", answer(call(), call()), "len(calls): expected 1, got 2"),
        ("finish", answer(call(), finish="stop"), 'finish: expected "tool_calls", got "stop"'),
        ("text", answer(call(), text="x"), 'text: expected "", got "x"'),
        ("reasoning", answer(call(), reasoning="x"), 'reasoning: expected "", got "x"'),
        ("usage", answer(call(), usage=Usage(1, 2, 3)),
         'usage: expected null, got {"prompt": 1, "completion": 2, "total": 3}'),
    ],
)  # fmt: skip
def test_a_stream_that_differs_is_named_in_the_field_that_is_compared(field: str, stream: Answer, message: str) -> None:
    judgement = same([field], answer(call()), stream)
    assert (judgement.verdict, judgement.reasons) == ("fail", [message])


def test_bytes_of_arguments_are_compared_only_where_both_answers_have_them() -> None:
    plain, stream = answer(call('{"text": "abc"}')), answer(call('{"text":"abc"}'))
    assert same(["arguments"], plain, stream, api="messages").verdict == "pass"
    for other in ('{"text":"abd"}', '{"text":"ab'):
        assert same(["arguments"], plain, answer(call(other)), api="messages").verdict == "fail"
    assert same(["arguments"], answer(call("{}", "stop")), answer(call("", "stop"))).verdict == "fail"


def test_two_answers_without_calls_say_nothing_about_calls_nor_without_reasoning_about_that() -> None:
    silent = answer(finish="stop", text="No.")
    assert same(["names", "arguments"], silent, silent).verdict == "inconclusive"
    assert same(["reasoning"], silent, silent).verdict == "inconclusive"
    assert same(["reasoning", "text"], silent, silent).verdict == "pass"
    assert same(["reasoning"], silent, answer(finish="stop", text="No.", reasoning="Hm.")).verdict == "fail"
