# SPDX-License-Identifier: Apache-2.0
"""Tool calls through Dynamo's real frontend, HTTP to HTTP: what the model writes is chosen here, what comes out is not.

Faults reported against Dynamo 1.6.1 stand here by their right behaviour, with the issue's number where there is one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import xgrammar
from tokenizers import Tokenizer
from xgrammar.testing import _is_grammar_accept_string

from dynamo_structural_tags import read_request
from dynamo_structural_tags.formats import FORMATS, get_format
from support.dynamo_tools import BARE, MODELS, Answer, Frontend, Worker, events, worker
from support.stack import until

BOTH = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
EACH = pytest.mark.parametrize("model", list(FORMATS))


def function(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties)[:1],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TEXT = {"type": "string"}
WRITE = function("write", path=TEXT, content=TEXT, mode={"type": "integer"})
TOOLS = [WRITE, function("look", where=TEXT)]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with worker(tmp_path_factory.mktemp("tools")) as one:
        yield one


@pytest.fixture(scope="module")
def frontend(said: Worker) -> Frontend:
    return said.frontend()


def answer(model: str, body: str) -> str:
    """Return what a model writes: after its reasoning, where its prompt opens one."""
    return f"</think>{body}" if model in ("glm47", "glm45", "deepseek_v4") else body


def accepts(request: dict[str, Any], text: str) -> bool:
    """Say whether xgrammar lets a text through the grammar that reached the worker, to its end."""
    grammar = xgrammar.Grammar.from_structural_tag(request["sampling_options"]["guided_decoding"]["structural_tag"])
    accepted: bool = _is_grammar_accept_string(grammar, text)
    return accepted


def calls(model: str, *made: tuple[str, Any]) -> str:
    texts = [(name, one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)) for name, one in made]
    return answer(model, get_format(model).render_calls(texts, policy=read_request({"tools": TOOLS})))


def both(frontend: Frontend, model: str, **body: Any) -> Answer:
    """Ask plain and as a stream; return the answer if they agree."""
    plain = frontend.chat(model, **body)
    stream = frontend.chat(model, stream=True, stream_options={"include_usage": True}, **body)
    for one in ("content", "reasoning", "calls", "finish", "usage", "flags", "logprobs"):
        assert getattr(plain, one) == getattr(stream, one), one
    assert (plain.error is None) == (stream.error is None)
    return plain


@EACH
def test_calls_arrive_byte_for_byte_and_the_grammar_reached_the_worker(
    said: Worker, frontend: Frontend, model: str
) -> None:
    made = [("write", '{"path": "a b.txt", "content": "x\\n", "mode": 420}'), ("look", '{"where": "ü"}')]
    said.say(calls(model, *made))
    got = both(frontend, model, tools=TOOLS)
    assert (got.status, got.finish, got.content) == (200, "tool_calls", "")
    assert got.calls == made
    assert len(set(got.ids)) == 2
    (request, _) = said.requests
    assert set(request["sampling_options"]["guided_decoding"]) == {"structural_tag"}
    assert request["sampling_options"]["guided_decoding"]["structural_tag"]["format"]["type"] == "grammar"
    assert got.usage is not None
    assert got.usage["prompt_tokens"] == len(request["token_ids"])
    written = _tokenizer(said, model).encode(calls(model, *made), add_special_tokens=False).ids
    assert got.usage["completion_tokens"] == len(written) + 1  # and the token that ends it


def _tokenizer(said: Worker, model: str) -> Tokenizer:
    return Tokenizer.from_file(str(said.folder / "models" / model / "tokenizer.json"))


@EACH
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "write"}}], ids=str)
def test_a_forced_call_has_the_models_own_format(said: Worker, frontend: Frontend, model: str, choice: Any) -> None:
    """Dynamo 12910, 13231: a JSON array with unbounded white space was forced on models that write no such thing."""
    body = get_format(model).render_calls([("write", '{"path": "a"}')])
    said.say(answer(model, body))
    assert both(frontend, model, tools=TOOLS, tool_choice=choice).calls == [("write", '{"path": "a"}')]
    request = said.requests[0]
    prompt = _tokenizer(said, model).decode(request["token_ids"], skip_special_tokens=False)
    lead = "So.</think>" if prompt.rstrip().endswith("<think>") else ""
    fmt = get_format(model)
    separator = fmt.content_separator if fmt.separator_always else fmt.reasoning_separator if lead else ""
    assert accepts(request, lead + separator + body)
    for other in ("", "Text.", '[{"name": "write", "parameters": {"path": "a"}}]', "[" + " " * 50, " " * 50):
        assert not accepts(request, lead + separator + other), other


#: What a value of the argument `content` may hold: in Dynamo 1.6.1 each of these is cut, changed or loses its call.
HARD = {
    "entities": "if (a &lt; b &amp;&amp; c) &quot;",
    "last line break": "a file\n",
    "line breaks": "\n\na\n\n",
    "end of a call": "a </tool_call> b",
    "end of a function": "a </function> b",
    "end of a section": "a <|tool_calls_section_end|> b",
    "end of a block": "a </｜DSML｜tool_calls> </｜DSML｜function_calls> b",
    "calls": '<tool_call>\n{"name": "write", "arguments": {}}\n</tool_call>',
    "quotes": '"a" \\ \'b\' {"c": [1]}',
    "beyond latin": "日本 🦀 \U0001f468‍\U0001f469‍\U0001f467",
}


@EACH
def test_a_value_is_not_touched(said: Worker, frontend: Frontend, model: str) -> None:
    """frontend-crates 249 (entities), and our own findings: lost line breaks, closers inside strings."""
    made = [("write", json.dumps({"path": what, "content": text}, ensure_ascii=False)) for what, text in HARD.items()]
    said.say(calls(model, *made), chunk=1)
    got = both(frontend, model, tools=TOOLS)
    assert got.calls == made
    assert got.finish == "tool_calls"


def test_line_breaks_between_tags_are_layout(said: Worker, frontend: Frontend) -> None:
    """Dynamo 5512: `</arg_key>` and `<arg_value>` on two lines came back as the arguments `{}`."""
    said.say("</think><tool_call>look\n<arg_key>where</arg_key>\n<arg_value>here</arg_value>\n</tool_call>")
    assert both(frontend, "glm47", tools=TOOLS).calls == [("look", '{"where": "here"}')]


def fault(said: Worker, frontend: Frontend, model: str, text: str, **body: Any) -> dict[str, Any]:
    """Return the typed error of an answer, the same plain and as a stream."""
    finish = body.pop("finish", "stop")
    body = {"tools": TOOLS, **body}
    said.say(text, finish=finish)
    plain = frontend.chat(model, **body)
    assert plain.status == 400
    stream = frontend.chat(model, stream=True, **body)
    assert stream.status == 200
    assert stream.message == plain.message
    assert stream.finish == ("length" if finish == "length" else None)
    assert stream.calls == [], "a call that broke was handed out"
    found = plain.fault
    assert plain.message.startswith(f"{found['kind']}: {found['message']} ")
    return found


@EACH
def test_an_undeclared_tool_is_an_error(said: Worker, frontend: Frontend, model: str) -> None:
    """Renderers 114: such a call vanished and read as a voluntary stop; Dynamo's own parsers hand it out."""
    text = calls(model, ("delete", {"path": "/"}))
    found = fault(said, frontend, model, text)
    assert (found["kind"], found["tool"]) == ("undeclared_tool", "delete")


@EACH
def test_arguments_against_the_schema_are_an_error(said: Worker, frontend: Frontend, model: str) -> None:
    found = fault(said, frontend, model, calls(model, ("write", {"path": "a", "mode": 1.5})))
    assert (found["kind"], found["tool"], found["path"]) == ("invalid_arguments", "write", "mode")
    found = fault(said, frontend, model, calls(model, ("write", {"content": "a"})))
    assert found["kind"] == "invalid_arguments"
    assert "path" in found["message"]


@EACH
@pytest.mark.parametrize("finish", ["length", "stop"])
def test_a_cut_call_is_an_error_and_never_a_call(said: Worker, frontend: Frontend, model: str, finish: str) -> None:
    """Dynamo 13986, 13791: cut arguments were handed out, repaired, or became an empty answer with the reason stop."""
    whole = calls(model, ("write", {"path": "a", "content": "one two three"}))
    found = fault(said, frontend, model, whole[: whole.index("three")], finish=finish)
    assert (found["kind"], found["tool"]) == ("truncated_call", "write")


@pytest.mark.parametrize(
    ("model", "text", "called"),
    [
        ("qwen3_coder", "<tool_call><function=delete>\n</function>\n</tool_call>", True),
        ("qwen3_coder", "<tool_call>\n\n<function=delete>\n</function>\n</tool_call>", True),
        ("qwen3_coder", "<function=delete>\n</function>", True),
        ("kimi_k2", "<|tool_call_begin|>functions.delete:0<|tool_call_argument_begin|>{}<|tool_call_end|>", True),
        ("glm47", "a key stands in <arg_key>, its value in <arg_value>", False),
    ],
)
def test_no_other_spelling_of_a_call_gets_past_the_grammar_or_out(
    said: Worker, frontend: Frontend, model: str, text: str, called: bool
) -> None:
    """Dynamo 1.6.1: grammars let the first four through and parsers called them; prose like the last was banned."""
    if called:
        fault(said, frontend, model, answer(model, text))
    else:
        said.say(answer(model, text))
        got = both(frontend, model, tools=TOOLS)
        assert (got.content, got.calls) == (text, [])
    assert accepts(said.requests[0], answer(model, text)) is not called


def test_tools_stand_beside_a_json_format(said: Worker, frontend: Frontend) -> None:
    """In Dynamo 1.6.1 only the JSON schema was sent, and no call could be made."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    body = {"tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}
    for text, content, made in (
        ('{"ok": true}', '{"ok": true}', []),
        (calls("hermes", ("look", {"where": "a"})), "", [("look", '{"where": "a"}')]),
    ):
        said.say(text)
        got = both(frontend, "hermes", **body)
        assert (got.content, got.calls) == (content, made)
        assert accepts(said.requests[0], text)
        assert not accepts(said.requests[0], "Text.")


def test_another_formats_call_is_an_error(said: Worker, frontend: Frontend) -> None:
    """Dynamo 13176: Hermes' JSON from a Qwen3-Coder model gave no call and the reason stop."""
    found = fault(said, frontend, "qwen3_coder", '<tool_call>\n{"name": "write", "arguments": {}}\n</tool_call>')
    assert found["kind"] == "malformed_call"


@EACH
def test_a_required_call_that_is_missing_is_an_error(said: Worker, frontend: Frontend, model: str) -> None:
    found = fault(said, frontend, model, answer(model, "No."), tool_choice="required")
    assert found["kind"] == "missing_call"


def test_without_calls_an_answer_is_an_answer(said: Worker, frontend: Frontend) -> None:
    said.say("Because.</think>\nYes 🦀, 1 < 2.\n", chunk=1)
    got = both(frontend, "glm47", tools=TOOLS)
    assert (got.reasoning, got.content, got.finish) == ("Because.", "\nYes 🦀, 1 < 2.\n", "stop")
    said.say("Yes.", finish="length")
    got = both(frontend, "hermes")
    assert (got.content, got.finish) == ("Yes.", "length")
    assert said.requests[0]["sampling_options"]["guided_decoding"] is None


@EACH
def test_none_bans_calls_and_hides_the_tools(said: Worker, frontend: Frontend, model: str) -> None:
    said.say(answer(model, "Fine."))
    got = both(frontend, model, tools=TOOLS, tool_choice="none")
    assert (got.content, got.finish) == ("Fine.", "stop")
    request = said.requests[0]
    assert "write" not in _tokenizer(said, model).decode(request["token_ids"], skip_special_tokens=False)
    assert accepts(request, answer(model, "Fine."))
    assert not accepts(request, calls(model, ("write", {"path": "a"})))
    found = fault(said, frontend, model, calls(model, ("write", {"path": "a"})), tool_choice="none")
    assert found["kind"] in ("unexpected_call", "undeclared_tool")


def test_a_second_call_is_an_error_where_one_is_allowed(said: Worker, frontend: Frontend) -> None:
    text = calls("hermes", ("look", {"where": "a"}), ("look", {"where": "b"}))
    said.say(text)
    stream = frontend.chat("hermes", stream=True, tools=TOOLS, parallel_tool_calls=False)
    assert stream.calls == [("look", '{"where": "a"}')]  # complete and valid when it was sent
    assert stream.fault["kind"] == "unexpected_call"
    assert frontend.chat("hermes", tools=TOOLS, parallel_tool_calls=False).fault["kind"] == "unexpected_call"


@pytest.mark.parametrize(
    ("model", "why"),
    [("mystery", "no tool-call format for 'harmony'"), ("bare", "the worker names no tool call parser")],
)
def test_a_model_without_a_known_format_is_served_without_tools(
    said: Worker, frontend: Frontend, model: str, why: str
) -> None:
    """Dynamo 1.6.1 (glm45, qwen3, kimi_k25): a parser that does nothing let the calls' markup through as content."""
    assert frontend.models() == {*MODELS, *BARE}
    said.say("Yes 🦀.", chunk=1)
    got = both(frontend, model)
    assert (got.content, got.finish) == ("Yes 🦀.", "stop")
    for stream in (False, True):
        refused = frontend.chat(model, stream=stream, tools=TOOLS)
        assert refused.status == (200 if stream else 400)
        assert refused.message.startswith(f"tools: {why}; known: glm47, glm45, ")
        assert "--dyn-tool-call-parser" in refused.message
        assert "DYN_STRUCTURAL_TAGS_FORMAT" in refused.message
    assert len(said.requests) == 2
    assert said.log().count(f"{model}: requests with tools are refused") == 1


def test_switched_off_dynamos_own_processing_is_left(said: Worker, frontend: Frontend) -> None:
    own = said.frontend(enabled=False)
    text = calls("hermes", ("delete", {"path": "/"}))
    said.say(text)
    got = own.chat("hermes", tools=TOOLS)
    # Dynamo's parser of that name knows no such call, and asks for no grammar.
    assert (got.status, got.calls, got.finish) == (200, [], "stop")
    assert "delete" in got.content
    assert said.requests[0]["sampling_options"]["guided_decoding"] is None
    assert said.requests[0]["output_options"]["skip_special_tokens"] is not False
    assert frontend.chat("hermes", tools=TOOLS).fault["kind"] == "undeclared_tool"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"tools": [function("f", a={"type": "strnig"})]}, "tools[0].function.parameters.properties.a.type: "),
    "pattern": ({"tools": [function("f", a={"type": "string", "pattern": "("})]}, "tools[0].function.parameters."),
    "reference": ({"tools": [function("f", a={"$ref": "#/$defs/no"})]}, "tools[0].function.parameters."),
    "twice": ({"tools": [WRITE, WRITE]}, "tools[1].function.name: 'write' is declared twice"),
    "two answers": ({"n": 2}, "n: must be 1, not 2"),
    "top": ({"top_logprobs": 2}, "top_logprobs: needs logprobs: true"),
    "grammar": ({"tools": TOOLS, "guided_regex": "a"}, "guided_regex: cannot stand beside tools"),
    "long": ({"messages": [{"role": "user", "content": "a b " * 9000}]}, "messages: the prompt has "),
}


@BOTH
@pytest.mark.parametrize("what", list(REFUSED))
def test_a_refused_request_names_the_place(said: Worker, frontend: Frontend, what: str, stream: bool) -> None:
    body, place = REFUSED[what]
    said.say("Never.")
    got = frontend.chat("glm47", stream=stream, **body)
    assert got.status == (200 if stream else 400)
    assert got.message.startswith(place)
    assert got.error is not None
    assert got.error["code"] == 400
    assert said.requests == []


def made(arguments: str, **more: Any) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "write", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [{**call, **more}]}


ASKED = {"role": "user", "content": "Go."}
HISTORIES = {
    "twice": (
        [ASKED, made('{"path": "a", "path": "b"}')],
        "messages[1].tool_calls[0].function.arguments: must be the JSON text of an object: the key 'path' stands twice",
    ),
    "closer": (
        [ASKED, made('{"path": "a</arg_value>"}')],
        "messages[1].tool_calls[0].function.arguments.path: has no text in the format glm47: ",
    ),
    "stray result": (
        [ASKED, {"role": "tool", "tool_call_id": "call_9", "content": "x"}],
        "messages[1].tool_call_id: no call 'call_9' precedes",
    ),
    "image": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}],
        "messages[0].content[0].type: must be text, not 'image_url'",
    ),
}


@BOTH
@pytest.mark.parametrize("what", list(HISTORIES))
def test_a_malformed_history_is_refused(said: Worker, frontend: Frontend, what: str, stream: bool) -> None:
    messages, place = HISTORIES[what]
    said.say("Never.")
    got = frontend.chat("glm47", stream=stream, messages=messages, tools=TOOLS)
    assert got.message.startswith(place)
    assert said.requests == []


@EACH
def test_the_next_prompt_continues_what_was_generated(said: Worker, frontend: Frontend, model: str) -> None:
    """The engine's prefix cache holds prompt and answer: the next prompt has to begin with them, token by token."""
    tokenizer = _tokenizer(said, model)
    body = get_format(model).content_separator + get_format(model).render_calls(
        [("write", '{"path": "a\\nb", "content": "\\n", "mode": 7}'), ("look", '{"where":"x"}')]
    )
    text = f"Because.{answer(model, '')}Now.{body}" if answer(model, "") else f"Now.{body}"
    said.say(text)
    first = frontend.chat(model, tools=TOOLS)
    assert first.content == "Now."
    before = tokenizer.decode(said.requests[0]["token_ids"], skip_special_tokens=False)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": first.content,
        "reasoning_content": first.reasoning or None,
        "tool_calls": [
            {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}
            for identifier, (name, arguments) in zip(first.ids, first.calls, strict=True)
        ],
    }
    results = [{"role": "tool", "tool_call_id": one, "content": "done"} for one in first.ids]
    said.say("Done.")
    frontend.chat(model, tools=TOOLS, messages=[ASKED, message, *results])
    after = tokenizer.decode(said.requests[0]["token_ids"], skip_special_tokens=False)
    assert after.startswith(before + text)


def test_once_more_and_then_an_error(said: Worker) -> None:
    frontend = said.frontend("retry_once")
    bad, good = calls("hermes", ("delete", {})), calls("hermes", ("look", {"where": "a"}))
    for stream in (False, True):
        said.say(f"No.\n{bad}", f"Yes.\n{good}")
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        got = frontend.chat("hermes", stream=stream, tools=TOOLS, seed=5, **usage)
        assert (got.content, got.calls, got.finish) == ("Yes.", [("look", '{"where": "a"}')], "tool_calls")
        first, second = said.requests
        assert [one["sampling_options"]["seed"] for one in (first, second)] == [5, 6]
        assert {**first, "sampling_options": 0} == {**second, "sampling_options": 0}
        tokenizer = _tokenizer(said, "hermes")
        spent = sum(len(tokenizer.encode(text).ids) + 1 for text in (f"No.\n{bad}", f"Yes.\n{good}"))
        assert got.usage is not None
        assert spent - 3 <= got.usage["completion_tokens"] <= spent  # the first one was stopped at its fault
        said.say(bad, bad, good)
        got = frontend.chat("hermes", stream=stream, tools=TOOLS)
        assert got.fault["kind"] == "undeclared_tool"
        assert len(said.requests) == 2


def test_no_second_generation_for_a_client_that_left_during_the_first(said: Worker) -> None:
    bad = calls("hermes", ("delete", {}))
    (said.folder / "stopped").unlink(missing_ok=True)
    said.say("and so on " * 50 + bad, pause=0.02)
    said.frontend("retry_once").leave("hermes", False, after_s=0.3)
    until((said.folder / "stopped").exists, 5, "the worker is told to stop")
    assert len(said.requests) == 1


def test_dynamos_counters_see_every_token(said: Worker, frontend: Frontend) -> None:
    retrying = said.frontend("retry_once")
    for one, model in ((frontend, "hermes"), (retrying, "hermes"), (frontend, "bare")):
        names = [f"dynamo_frontend_{name}" for name in ("input_sequence_tokens_sum", "output_tokens_total")]
        before = [one.metric(name, model) for name in names]
        tools = {} if model == "bare" else {"tools": TOOLS}
        for stream in (False, True):
            said.say(calls("hermes", ("look", {})), calls("hermes", ("look", {"where": "a"})))
            if one is frontend:
                said.say("Some text <tool", chunk=1)  # held back at its end
            got = one.chat(model, stream=stream, stream_options={"include_usage": True} if stream else None, **tools)
            assert got.usage is not None
            sums = [got.usage["prompt_tokens"], got.usage["completion_tokens"]]
            after = [one.metric(name, model) for name in names]
            assert [new - old for new, old in zip(after, before, strict=True)] == sums
            before = after


def test_passed_through_with_a_flag(said: Worker) -> None:
    frontend = said.frontend("pass_through_flagged")
    bad = calls("hermes", ("delete", {"path": "/"}))
    said.say(f"Now.\n{bad}")
    got = both(frontend, "hermes", tools=TOOLS)
    assert (got.status, got.calls, got.finish) == (200, [], "stop")
    assert got.content.startswith("Now.")
    assert bad in got.content
    (flag,) = got.flags
    assert (flag["kind"], flag["tool"]) == ("undeclared_tool", "delete")
    cut = calls("hermes", ("write", {"path": "one two"}))[:-20]
    said.say(cut, finish="length")
    got = both(frontend, "hermes", tools=TOOLS)
    assert (got.content, got.calls, got.finish) == (cut, [], "length")
    assert [flag["kind"] for flag in got.flags] == ["truncated_call"]


def test_a_call_that_takes_long_to_write_is_not_taken_for_a_dead_stream(said: Worker) -> None:
    """Dynamo ends a stream that said nothing for twice that time, without an error: the file in it was lost."""
    frontend = said.frontend(DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS="1")
    parameters = {"type": "object", "properties": {"where": {"type": "string"}}}
    function = {"name": "look", "parameters": parameters}
    body = {
        "model": "hermes",
        "messages": [{"role": "user", "content": "Go."}],
        "stream": True,
        "max_tokens": 500,
    }
    for path, tool in (
        ("/v1/chat/completions", {"type": "function", "function": function}),
        ("/v1/messages", {"name": "look", "input_schema": parameters}),
    ):
        said.say(calls("hermes", ("look", {"where": "and so on " * 12})), chunk=1, pause=0.1)
        got = frontend.post(path, {**body, "tools": [tool]})
        assert "and so on and so on " in got.text, path


def test_stop_strings_end_an_answer(said: Worker, frontend: Frontend) -> None:
    said.say("One. Two. END Three.", chunk=1)
    got = frontend.chat("hermes", stop=["END", "Four"])
    assert (got.content, got.finish) == ("One. Two. ", "stop")
    streamed = frontend.chat("hermes", stream=True, stop=["END"])
    assert (streamed.content, streamed.finish) == ("One. Two. ", "stop")


@BOTH
def test_a_client_that_leaves_ends_its_generation_and_is_no_failure(
    said: Worker, frontend: Frontend, stream: bool
) -> None:
    (said.folder / "stopped").unlink(missing_ok=True)
    said.say("and so on " * 200, pause=0.02)
    frontend.leave("hermes", stream, after_s=0.5)
    until((said.folder / "stopped").exists, 5, "the worker is told to stop")
    said.say("Yes.")
    assert frontend.chat("hermes").content == "Yes."
    assert "without a finish reason" not in said.log()
    assert "request_type=" + ("stream" if stream else "unary") + " status=cancelled" in said.log()


def test_an_engine_that_gave_up_is_no_answers_end(said: Worker, frontend: Frontend) -> None:
    """vLLM's `abort`, which Dynamo's worker calls `cancelled`: it came back as an answer that stopped by itself."""
    said.say("One two three", finish="cancelled")
    assert frontend.chat("hermes").status == 500
    streamed = frontend.chat("hermes", stream=True)
    assert streamed.error is not None
    assert (streamed.error["code"], streamed.finish) == (500, None)


@BOTH
def test_an_answer_that_ended_early_is_called_off(said: Worker, frontend: Frontend, stream: bool) -> None:
    """By a stop string, or by a fault: the engine does not go on writing what nobody reads."""
    rest = "and so on " * 200
    for text, body in ((f"One. END {rest}", {"stop": ["END"]}), (f"{calls('hermes', ('delete', {}))}{rest}", {})):
        (said.folder / "stopped").unlink(missing_ok=True)
        said.say(text, pause=0.02)
        frontend.chat("hermes", stream=stream, tools=TOOLS, **body)
        until((said.folder / "stopped").exists, 5, "the worker is told to stop")


def test_log_probabilities_come_with_the_tokens(said: Worker, frontend: Frontend) -> None:
    said.say("One two.")
    got = both(frontend, "hermes", logprobs=True, top_logprobs=1)
    assert "".join(one["token"] for one in got.logprobs) == "One two."
    assert {one["logprob"] for one in got.logprobs} == {-0.5}
    assert all(len(one["top_logprobs"]) == 1 for one in got.logprobs)
    assert both(frontend, "hermes").logprobs == []


def test_what_the_request_says_reaches_the_worker_and_nothing_else(said: Worker, frontend: Frontend) -> None:
    said.say("Yes.")
    settings: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "seed": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.5,
    }
    frontend.chat("hermes", max_tokens=9, min_tokens=2, ignore_eos=True, stop="END", **settings)
    (request,) = said.requests
    options = request["sampling_options"]
    assert {name: options[name] for name in settings} == pytest.approx(settings)
    conditions = request["stop_conditions"]
    assert (conditions["max_tokens"], conditions["min_tokens"], conditions["ignore_eos"]) == (9, 2, True)
    assert conditions["stop"] == ["END"]
    said.say("Yes.")
    frontend.chat("hermes")
    (request,) = said.requests
    # The worker knows the model's defaults: what is not asked for is not sent.
    assert {request["sampling_options"].get(name) for name in settings} == {None}
    assert request["eos_token_ids"] == [_tokenizer(said, "hermes").token_to_id("<|endoftext|>")]


def test_an_engine_that_fails_is_a_500(said: Worker, frontend: Frontend) -> None:
    said.say("One two three four five six.", error="out of memory")
    assert frontend.chat("hermes", tools=TOOLS).status == 500
    streamed = frontend.chat("hermes", stream=True, tools=TOOLS)
    assert streamed.error is not None
    assert streamed.error["code"] == 500
    assert streamed.finish is None


RESPONSES_TOOL = {"type": "function", "name": "look", "parameters": TOOLS[1]["function"]["parameters"]}
MESSAGES_TOOL = {"name": "look", "input_schema": TOOLS[1]["function"]["parameters"]}


def _responses(frontend: Frontend, stream: bool, given: Any = "Go.", **more: Any) -> httpx.Response:
    body = {"model": "glm47", "input": given, "stream": stream, "tools": [RESPONSES_TOOL], **more}
    return frontend.post("/v1/responses", body)


def _messages(frontend: Frontend, stream: bool, given: Any = None, **more: Any) -> httpx.Response:
    body = {"model": "glm47", "max_tokens": 500, "messages": given or [ASKED], "stream": stream, **more}
    return frontend.post("/v1/messages", {"tools": [MESSAGES_TOOL], **body})


LOOK = '{"where": "a &lt; </tool_call>\\n"}'


def test_responses_carry_calls(said: Worker, frontend: Frontend) -> None:
    """Codex' endpoint."""
    said.say("Because.</think>" + get_format("glm47").render_calls([("look", LOOK)]))
    got = _responses(frontend, False).json()
    (call,) = [one for one in got["output"] if one["type"] == "function_call"]
    assert (call["name"], call["arguments"], got["status"]) == ("look", LOOK, "completed")
    stream = events(_responses(frontend, True).text)
    (done,) = [one for one in stream if one["type"] == "response.function_call_arguments.done"]
    assert done["arguments"] == LOOK
    assert stream[-1]["type"] == "response.completed"
    assert all("structural_tag" in one["sampling_options"]["guided_decoding"] for one in said.requests)
    history = [
        {"role": "user", "content": "Go."},
        {"type": "function_call", "call_id": call["call_id"], "name": "look", "arguments": LOOK},
        {"type": "function_call_output", "call_id": call["call_id"], "output": "done"},
    ]
    said.say("</think>Done.")
    assert _responses(frontend, False, history).status_code == 200
    prompt = _tokenizer(said, "glm47").decode(said.requests[0]["token_ids"], skip_special_tokens=False)
    assert get_format("glm47").render_calls([("look", LOOK)]) in prompt


def test_responses_report_faults_and_hand_out_no_cut_call(said: Worker, frontend: Frontend) -> None:
    said.say("</think><tool_call>delete</tool_call>")
    got = _responses(frontend, False)
    assert got.status_code == 400
    assert got.json()["message"].startswith("undeclared_tool: ")
    last = events(_responses(frontend, True).text)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["message"].startswith("undeclared_tool: ")
    said.say("</think>" + get_format("glm47").render_calls([("look", LOOK)])[:-30], finish="length")
    stream = events(_responses(frontend, True).text)
    # Dynamo marks every call that it was given a piece of as completed, cut or not.
    assert "function_call" not in json.dumps(stream)
    assert stream[-1]["response"]["error"]["message"].startswith("truncated_call: ")


def test_messages_carry_calls(said: Worker, frontend: Frontend) -> None:
    """Claude Code's endpoint."""
    said.say("Because.</think>" + get_format("glm47").render_calls([("look", LOOK)]))
    got = _messages(frontend, False).json()
    assert got["stop_reason"] == "tool_use"
    (call,) = [one for one in got["content"] if one["type"] == "tool_use"]
    assert (call["name"], call["input"]) == ("look", json.loads(LOOK))
    stream = events(_messages(frontend, True).text)
    pieces = [one["delta"] for one in stream if one["type"] == "content_block_delta"]
    assert "".join(one.get("partial_json", "") for one in pieces) == LOOK
    history = [
        ASKED,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "done"}]},
    ]
    said.say("</think>Done.")
    assert _messages(frontend, False, history).status_code == 200
    prompt = _tokenizer(said, "glm47").decode(said.requests[0]["token_ids"], skip_special_tokens=False)
    assert get_format("glm47").render_calls([("look", LOOK)]) in prompt


def test_messages_do_not_respell_what_was_generated(said: Worker, frontend: Frontend) -> None:
    """The endpoint hands arguments over as values, without their spaces: the next prompt has them again."""
    text = get_format("hermes").render_calls([("write", '{"path": "a", "mode": 7}')])
    said.say(text)
    body: dict[str, Any] = {
        "model": "hermes",
        "tools": [{"name": "write", "input_schema": WRITE["function"]["parameters"]}],
    }
    (call,) = _messages(frontend, False, **body).json()["content"]
    history = [
        ASKED,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "done"}]},
    ]
    said.say("Done.")
    assert _messages(frontend, False, history, **body).status_code == 200
    assert text in _tokenizer(said, "hermes").decode(said.requests[0]["token_ids"], skip_special_tokens=False)


def test_messages_report_faults(said: Worker, frontend: Frontend) -> None:
    said.say("</think><tool_call>delete</tool_call>")
    got = _messages(frontend, False)
    assert got.status_code == 400
    assert got.json()["error"]["message"].startswith("undeclared_tool: ")
    last = events(_messages(frontend, True).text)[-1]
    assert last["type"] == "error"
    assert last["error"]["message"].startswith("undeclared_tool: ")
    said.say("Never.")
    bad = {"name": "look", "input_schema": {"type": "object", "properties": {"a": {"type": "strnig"}}}}
    got = _messages(frontend, False, tools=[bad])
    assert got.status_code == 400
    assert got.json()["error"]["message"].startswith("tools[0].function.parameters.properties.a.type: ")


def test_messages_name_the_stop_string(said: Worker, frontend: Frontend) -> None:
    said.say("</think>One. END Two.")
    got = _messages(frontend, False, stop_sequences=["END"]).json()
    assert (got["stop_reason"], got["stop_sequence"]) == ("stop_sequence", "END")
    assert [one["text"] for one in got["content"] if one["type"] == "text"] == ["One. "]


def test_kimis_identifiers_come_back_where_an_endpoint_makes_its_own(said: Worker, frontend: Frontend) -> None:
    said.say(get_format("kimi_k2").render_calls([("look", '{"where": "a"}')]))
    first = _messages(frontend, False, model="kimi_k2").json()
    (call,) = first["content"]
    history = [
        ASKED,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "done"}]},
    ]
    said.say("Done.")
    assert _messages(frontend, False, history, model="kimi_k2").status_code == 200
    prompt = _tokenizer(said, "kimi_k2").decode(said.requests[0]["token_ids"], skip_special_tokens=False)
    assert "<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>" in prompt
    assert "## Return of functions.look:0\ndone" in prompt


def test_the_models_of_this_file_cover_every_format() -> None:
    assert set(MODELS) == set(FORMATS)
