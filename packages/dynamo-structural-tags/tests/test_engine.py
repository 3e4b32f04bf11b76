# SPDX-License-Identifier: Apache-2.0
"""The chat engine without Dynamo: settings, what is read from a model, requests, and text from tokens."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dynamo_structural_tags import RequestError, ToolCallError, _engine
from dynamo_structural_tags._engine import (
    ChatEngine,
    Detokenizer,
    EngineError,
    Model,
    Prepared,
    Settings,
    StopStrings,
    choose_format,
    prepare,
)
from dynamo_structural_tags.dynamo import wrap
from dynamo_structural_tags.formats import FORMATS, get_format
from serving_stack.model import text_tokenizer
from support.chat_templates import TEMPLATES
from support.saying_worker import write_model

ASKED = [{"role": "user", "content": "Go."}]
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TOKENIZER = text_tokenizer()
CARD = {"structural_tag": {"scope": "always"}, "reasoning_parser": "glm45", "context_length": 4096}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "glm", TEMPLATES["glm47"])


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def model(folder: Path, tokenizer: Tokenizer, **card: Any) -> Model:
    return Model("glm", folder, get_format("glm47"), {**CARD, **card}, tokenizer)


def read(folder: Path, tokenizer: Tokenizer, card: dict[str, Any] | None = None, **request: Any) -> Prepared:
    return prepare(model(folder, tokenizer, **(card or {})), {"messages": ASKED, **request})


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.from_environment() == Settings()
    monkeypatch.setenv("DYN_STRUCTURAL_TAGS", "0")
    monkeypatch.setenv("DYN_STRUCTURAL_TAGS_FORMAT", "qwen3")
    monkeypatch.setenv("DYN_STRUCTURAL_TAGS_ON_CALL_ERROR", "retry_once")
    assert Settings.from_environment() == Settings(False, "qwen3", "retry_once")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DYN_STRUCTURAL_TAGS", "no"),
        ("DYN_STRUCTURAL_TAGS_FORMAT", "harmony"),
        ("DYN_STRUCTURAL_TAGS_ON_CALL_ERROR", "retry"),
        ("DYN_STRUCTURAL_TAGS_STREAM_ARGUMENTS", "true"),
    ],
)
def test_a_setting_that_cannot_be_ends_the_start_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        wrap(None)


def test_arguments_are_not_streamed_where_they_would_have_to_be_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_STRUCTURAL_TAGS_STREAM_ARGUMENTS", "1")
    assert Settings.from_environment().stream_arguments
    monkeypatch.setenv("DYN_STRUCTURAL_TAGS_ON_CALL_ERROR", "retry_once")
    with pytest.raises(ValueError, match="retry_once"):
        Settings.from_environment()


def test_wrap_stands_down_and_takes_no_other_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    async def factory(*_: Any) -> None:
        """Another processor's."""

    with pytest.raises(ValueError, match="takes the place of the chat processor"):
        wrap(factory)
    assert callable(wrap(None))
    monkeypatch.setenv("DYN_STRUCTURAL_TAGS", "0")
    assert wrap(None) is None
    assert wrap(factory) is factory


def test_a_format_is_chosen_by_the_workers_name_or_ours() -> None:
    for name in FORMATS:
        assert choose_format(name, None).name == name
    aliases = {"qwen3": "hermes", "qwen25": "hermes", "kimi_k25": "kimi_k2", "deepseek-v4": "deepseek_v4"}
    assert {alias: choose_format(alias, None).name for alias in aliases} == aliases
    assert choose_format("harmony", "glm45").name == "glm45"
    for worker, said in (
        (None, "the worker names no tool call parser"),
        ("harmony", "no tool-call format for 'harmony'"),
    ):
        with pytest.raises(ValueError, match=f"{said}; known: glm47, "):
            choose_format(worker, None)


@given(st.text(), st.lists(st.integers(1, 7)))
def test_tokens_become_text_wherever_they_are_cut(text: str, cuts: list[int]) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    whole = TOKENIZER.decode(ids, skip_special_tokens=False)
    decoder = Detokenizer(TOKENIZER, frozenset())
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(decoder.add(ids[at : at + cut]))
        at += cut
    pieces.append(decoder.add(ids[at:], last=True))
    assert "".join(pieces) == whole
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in whole


def test_bytes_that_are_no_text_do_not_hold_an_answer_back() -> None:
    lone = [TOKENIZER.get_vocab()[token] for token in ("Ã", "è")]  # lead bytes without what follows them
    decoder = Detokenizer(TOKENIZER, frozenset())
    text = "".join(decoder.add([token]) for token in lone * 100)
    assert len(text) > 150
    hidden = TOKENIZER.get_vocab()["<|user|>"]
    assert Detokenizer(TOKENIZER, frozenset([hidden])).add([hidden], last=True) == ""


@given(
    st.lists(st.text("abc", max_size=4)), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.booleans()
)
def test_a_stop_string_ends_the_text_wherever_it_is_cut(pieces: list[str], strings: list[str], keep: bool) -> None:
    text = "".join(pieces)
    places = [(text.find(one), strings.index(one), one) for one in strings if one in text]
    stop = StopStrings(strings, keep)
    found = ""
    for piece in pieces:
        found += stop.add(piece)
        if stop.found is not None:
            break
    else:
        found += stop.add("", last=True)
    if not places:
        assert (found, stop.found) == (text, None)
        return
    assert stop.found is not None
    end = text.index(stop.found)
    # Of strings that overlap, the one that is complete first wins.
    assert all(end < at + len(one) for at, _, one in places)
    assert found == (text[: end + len(stop.found)] if keep else text[:end])


@pytest.mark.parametrize(
    ("request_", "card", "mode"),
    [
        ({}, {}, "open"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {}, "closed"),
        ({"chat_template_args": {"enable_thinking": False}}, {}, "closed"),
        ({"reasoning_effort": "none"}, {}, "closed"),
        ({}, {"runtime_data": {"default_thinking_mode": "disabled"}}, "closed"),
        (
            {"chat_template_args": {"enable_thinking": True}},
            {"runtime_data": {"default_thinking_mode": "disabled"}},
            "open",
        ),
        ({"add_generation_prompt": False}, {}, "auto"),
        ({"add_generation_prompt": False}, {"reasoning_parser": None}, "closed"),
    ],
)
def test_where_the_generation_starts(
    folder: Path, tokenizer: Tokenizer, request_: dict[str, Any], card: dict[str, Any], mode: str
) -> None:
    assert read(folder, tokenizer, card, **request_).mode == mode


def test_the_grammar_leaves_reasoning_to_an_engine_that_waits_for_its_end(folder: Path, tokenizer: Tokenizer) -> None:
    def sent(**card: Any) -> dict[str, Any]:
        return read(folder, tokenizer, card, tools=[LOOK], tool_choice="required").engine_request

    own = sent()
    waiting = sent(runtime_data={"tool_call_structural_tag_excludes_reasoning": True})
    backend = sent(structural_tag={"reasoning_boundary": "backend"})
    assert "</think>" in own["sampling_options"]["guided_decoding"]["structural_tag"]["format"]["grammar"]
    assert "extra_args" not in own
    for one in (waiting, backend):
        grammar = one["sampling_options"]["guided_decoding"]["structural_tag"]["format"]["grammar"]
        assert "</think>" not in grammar
        assert one["extra_args"] == {"reasoning_ended": False}
        assert one["require_reasoning"] is True


def test_a_card_without_structural_tags_gets_none_and_schemas_are_checked_all_the_same(
    folder: Path, tokenizer: Tokenizer
) -> None:
    card = {"structural_tag": None}
    sent = read(folder, tokenizer, card, tools=[LOOK]).engine_request
    assert sent["sampling_options"]["guided_decoding"] is None
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "strnig"}}}
    with pytest.raises(RequestError, match=r"tools\[0\]\.function\.parameters\.type"):
        read(folder, tokenizer, card, tools=[bad])


def test_strict_cards_and_free_argument_order_reach_the_grammar(folder: Path, tokenizer: Tokenizer) -> None:
    function = {
        "name": "f",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    }
    tools = [{"type": "function", "function": function}]
    cards: list[dict[str, Any]] = [{}, {"schema": "strict"}, {"schema": "strict", "tool_arguments_any_order": True}]
    found = [read(folder, tokenizer, {"structural_tag": card}, tools=tools) for card in cards]
    grammars = {json.dumps(one.engine_request["sampling_options"]["guided_decoding"]) for one in found}
    assert len(grammars) == 3
    assert [one.policy.tools[0].strict for one in found if one.policy] == [False, True, True]


def test_routing_is_what_the_agent_and_the_caller_say(folder: Path, tokenizer: Tokenizer) -> None:
    hints = {"priority": -3, "strict_priority": 2, "osl": 100, "latency_sensitivity": 1.5}
    nvext = {"agent_hints": hints, "dp_rank": 0, "backend_instance_id": 7, "extra_fields": ["stop_reason"]}
    sent = read(folder, tokenizer, nvext=nvext, routing={"dp_rank": 1}).engine_request
    assert sent["routing"] == {
        "priority": -3,
        "priority_jump": 0.0,
        "strict_priority": 2,
        "expected_output_tokens": 100,
        "backend_instance_id": 7,
        "dp_rank": 1,
    }
    assert sent["extra_args"] == {"nvext": {"extra_fields": ["stop_reason"]}}
    del hints["priority"]
    assert read(folder, tokenizer, nvext=nvext).engine_request["routing"]["priority_jump"] == 1.5
    assert read(folder, tokenizer).engine_request["routing"] is None


@pytest.mark.parametrize(
    ("body", "guided"),
    [
        ({"response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}}},
            {"json": {"type": "null"}},
        ),
        ({"response_format": {"type": "text"}}, None),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_regex": "a+", "guided_whitespace_pattern": " "}, {"regex": "a+", "whitespace_pattern": " "}),
    ],
)
def test_without_tools_the_requests_own_grammar_is_sent(
    folder: Path, tokenizer: Tokenizer, body: dict[str, Any], guided: Any
) -> None:
    assert read(folder, tokenizer, **body).engine_request["sampling_options"]["guided_decoding"] == guided


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"n": 2}, "n"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"guided_json": {"type": "null"}, "tools": [LOOK]}, "guided_json"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"messages": [{"role": "user", "content": "a b " * 4096}]}, "messages"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    folder: Path, tokenizer: Tokenizer, body: dict[str, Any], place: str
) -> None:
    with pytest.raises(RequestError) as caught:
        read(folder, tokenizer, **body)
    assert caught.value.path == place


class FakeResponse:
    """One response of a routed engine."""

    def __init__(self, data: Any, error: str | None = None) -> None:
        self._data, self._error = data, error

    def is_error(self) -> bool:
        return self._error is not None

    def comments(self) -> list[str]:
        return [self._error or ""]

    def data(self) -> Any:
        return self._data


class FakeRouted:
    """A routed engine that gives what it was made with."""

    def __init__(self, *responses: FakeResponse) -> None:
        self.responses = responses

    async def generate(self, request: Any, context: Any = None) -> AsyncIterator[FakeResponse]:
        async def stream() -> AsyncIterator[FakeResponse]:
            for response in self.responses:
                yield response

        return stream()


def said(tokenizer: Tokenizer, text: str, finish: str = "stop") -> FakeRouted:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return FakeRouted(
        *(FakeResponse({"token_ids": [token]}) for token in ids),
        FakeResponse({"token_ids": [], "finish_reason": finish}),
    )


def answer(one: Model, routed: FakeRouted, settings: Settings | None = None, **request: Any) -> list[dict[str, Any]]:
    async def collect() -> list[dict[str, Any]]:
        engine = ChatEngine(one, routed, settings or Settings())
        return [chunk async for chunk in engine.generate({"messages": ASKED, "stream": True, **request})]

    return asyncio.run(collect())


def test_a_special_token_inside_arguments_is_its_text(folder: Path, tokenizer: Tokenizer) -> None:
    # The grammar takes it for text. Dropped, the arguments would not be those that were generated.
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    text = "</think>" + get_format("glm47").render_calls([("f", '{"a": "a <|begin_of_image|> b"}')])
    chunks = answer(model(folder, tokenizer), said(tokenizer, text), tools=[{"type": "function", "function": function}])
    deltas = [chunk["data"]["choices"][0]["delta"] for chunk in chunks if chunk.get("data")]
    (call,) = (call for delta in deltas for call in delta.get("tool_calls", ()))
    assert call["function"]["arguments"] == '{"a": "a <|begin_of_image|> b"}'
    plain = answer(model(folder, tokenizer), said(tokenizer, "</think>a <|begin_of_image|> b"))
    assert text_of(plain, "content") == "a  b"


def test_arguments_are_held_back_unless_asked_for(folder: Path, tokenizer: Tokenizer) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    tools = [{"type": "function", "function": function}]
    text = "</think>" + get_format("glm47").render_calls([("f", '{"a": "one two three"}')])

    def pieces(settings: Settings) -> list[str]:
        chunks = answer(model(folder, tokenizer), said(tokenizer, text), settings, tools=tools)
        deltas = [chunk["data"]["choices"][0]["delta"] for chunk in chunks if chunk.get("data")]
        return [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas if "tool_calls" in delta]

    assert pieces(Settings()) == ['{"a": "one two three"}']
    streamed = pieces(Settings(stream_arguments=True))
    assert len(streamed) > 3
    assert "".join(streamed) == '{"a": "one two three"}'


@pytest.mark.parametrize("on_call_error", ["error", "retry_once"])
def test_a_call_that_takes_long_to_write_is_no_silence(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, on_call_error: Any
) -> None:
    # Dynamo ends an answer that says nothing for too long, and a call is said when it is whole.
    monkeypatch.setattr(_engine, "SILENCE_S", 0.0)
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    text = "</think>" + get_format("glm47").render_calls([("f", '{"a": "one two three"}')])
    routed = said(tokenizer, text)
    settings = Settings(on_call_error=on_call_error)
    chunks = answer(model(folder, tokenizer), routed, settings, tools=[{"type": "function", "function": function}])
    told = [chunk["data"]["choices"][0] for chunk in chunks if chunk.get("data")]
    empty = [choice for choice in told if not choice["delta"] and choice["finish_reason"] is None]
    assert len(empty) > len(routed.responses) / 2
    assert not any("logprobs" in choice for choice in empty)
    calls = [call for choice in told for call in choice["delta"].get("tool_calls", ())]
    assert [call["function"]["arguments"] for call in calls] == ['{"a": "one two three"}']
    assert told[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("routed", "message"),
    [
        (FakeRouted(FakeResponse(None, "worker gone")), "worker gone"),
        (FakeRouted(FakeResponse({"status": "error", "message": "no memory"})), "no memory"),
        (FakeRouted(FakeResponse({"token_ids": [5]})), "the engine's stream ended without a finish reason"),
        (FakeRouted(FakeResponse({"token_ids": [], "finish_reason": "error"})), "the engine ended with error"),
        (FakeRouted(FakeResponse({"token_ids": [], "finish_reason": "cancelled"})), "the engine ended with cancelled"),
    ],
)
def test_an_engine_that_fails_is_an_error(folder: Path, tokenizer: Tokenizer, routed: FakeRouted, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        answer(model(folder, tokenizer), routed)


def text_of(chunks: list[dict[str, Any]], key: str) -> str:
    deltas = [choice["delta"] for chunk in chunks for choice in (chunk.get("data") or {}).get("choices", ())]
    return "".join(delta.get(key) or "" for delta in deltas)


def test_a_json_answer_is_content_where_the_engine_does_not_wait_for_reasoning(
    folder: Path, tokenizer: Tokenizer
) -> None:
    """The prompt opens a reasoning block, but the grammar holds from the first token: all of it would be reasoning."""
    wanted: dict[str, Any] = {"response_format": {"type": "json_object"}}
    chunks = answer(model(folder, tokenizer), said(tokenizer, '{"a": 1}'), **wanted)
    assert (text_of(chunks, "content"), text_of(chunks, "reasoning_content")) == ('{"a": 1}', "")
    waiting = model(folder, tokenizer, runtime_data={"tool_call_structural_tag_excludes_reasoning": True})
    chunks = answer(waiting, said(tokenizer, 'So.</think>{"a": 1}'), **wanted)
    assert (text_of(chunks, "content"), text_of(chunks, "reasoning_content")) == ('{"a": 1}', "So.")


def test_a_name_given_to_the_template_is_never_one_of_ours(folder: Path, tokenizer: Tokenizer) -> None:
    names = {"self": 1, "messages": [], "tools": [], "enable_thinking": False}
    assert read(folder, tokenizer, chat_template_kwargs=names).mode == "closed"


def test_a_tokenizer_that_cuts_does_not_cut_prompts(folder: Path) -> None:
    cutting = Tokenizer.from_file(str(folder / "tokenizer.json"))
    cutting.enable_truncation(4)
    cutting.enable_padding(length=64)
    made = model(folder, cutting)
    sent = prepare(made, {"messages": [{"role": "user", "content": "one two three four"}]}).engine_request
    assert "one two three four" in made.tokenizer.decode(sent["token_ids"])
    assert len(sent["token_ids"]) < 64


def test_log_probabilities_stay_with_their_tokens_while_text_is_held_back(folder: Path, tokenizer: Tokenizer) -> None:
    text = "</think>One STO two 🦀 <tool STOP never"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    best = tokenizer.token_to_id("!")
    routed = FakeRouted(
        *(
            FakeResponse(
                {
                    "token_ids": [token],
                    "log_probs": [-2.0 - number],
                    "top_logprobs": [
                        # The engine's own order: the token that was drawn, then the best ones.
                        [
                            {"token_id": token, "logprob": -2.0 - number, "rank": 9},
                            {"token_id": best, "logprob": -0.5, "rank": 1},
                        ]
                    ],
                }
            )
            for number, token in enumerate(ids)
        ),
        FakeResponse({"token_ids": [], "finish_reason": "stop"}),
    )
    chunks = answer(model(folder, tokenizer), routed, stop=["STOP"], logprobs=True, top_logprobs=1)
    assert text_of(chunks, "content") == "One STO two 🦀 <tool "
    choices = [choice for chunk in chunks for choice in (chunk.get("data") or {}).get("choices", ())]
    found = [one for choice in choices for one in (choice.get("logprobs") or {}).get("content", ())]
    assert [one["logprob"] for one in found] == [-2.0 - number for number in range(len(found))]
    kept = tokenizer.decode(ids[: len(found)], skip_special_tokens=False)
    assert kept.startswith("</think>One STO two 🦀 <tool ")
    assert {top["token"] for one in found for top in one["top_logprobs"]} == {"!"}


def test_usage_counts_the_prompt_that_was_sent(folder: Path, tokenizer: Tokenizer) -> None:
    """A worker that takes over a request counts what was generated before into its prompt."""
    usage = {"prompt_tokens": 999, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 3}}
    last = {"token_ids": [], "finish_reason": "stop", "completion_usage": usage}
    routed = FakeRouted(FakeResponse({"token_ids": [5, 6]}), FakeResponse(last))
    chunks = answer(model(folder, tokenizer), routed, stream_options={"include_usage": True})
    (found,) = [chunk["data"]["usage"] for chunk in chunks if (chunk.get("data") or {}).get("usage")]
    sent = read(folder, tokenizer).prompt_tokens
    assert found == {
        "prompt_tokens": sent,
        "completion_tokens": 2,
        "total_tokens": sent + 2,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_a_long_prompt_does_not_hold_up_the_answers_beside_it(folder: Path, tokenizer: Tokenizer) -> None:
    made = model(folder, tokenizer, context_length=None)
    request = {"messages": [{"role": "user", "content": "words and (more) 12 words; " * 20_000}]}

    class Watched:
        """The tokenizer, which says when it is at work."""

        busy = False

        def __getattr__(self, name: str) -> Any:
            found = getattr(tokenizer, name)
            if not name.startswith("encode"):
                return found

            def encode(*args: Any, **kwargs: Any) -> Any:
                self.busy = True
                try:
                    return found(*args, **kwargs)
                finally:
                    self.busy = False

            return encode

    watched = made.tokenizer = Watched()

    async def turns() -> int:
        """Return how often the loop came round while the prompt was cut into tokens."""
        work = asyncio.create_task(asyncio.to_thread(prepare, made, request))
        count = 0
        while not work.done():
            await asyncio.sleep(0.001)
            count += watched.busy
        return count

    # A tokenizer that keeps Python's lock lets it round for as long as a thread waits for that, and no longer.
    assert asyncio.run(turns()) > 25


def test_the_first_call_imports_nothing(folder: Path) -> None:
    """What it imports would hold up every other answer: a call is checked between their chunks."""
    code = """
import sys
from pathlib import Path
from tokenizers import Tokenizer
from dynamo_structural_tags import get_format, read_request
from dynamo_structural_tags._engine import Model
folder = Path(sys.argv[1])
made = Model("glm", folder, get_format("glm47"), {}, Tokenizer.from_file(str(folder / "tokenizer.json")))
before = set(sys.modules)
parameters = {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}
policy = read_request({"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]})
made.format.structural_tag(policy)
parser = made.format.parser(policy)
parser.feed(made.format.render("f", {"a": "2026-11-30"}))
assert len(parser.calls) == 1
print(sorted(set(sys.modules) - before))
"""
    run = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_model_without_a_format_needs_a_template_and_refuses_tools_only(folder: Path, tokenizer: Tokenizer) -> None:
    bare = Model("bare", folder, None, CARD, tokenizer, "no format")
    chunks = answer(bare, said(tokenizer, "So.</think>Yes."), tools=[])
    assert (text_of(chunks, "content"), text_of(chunks, "reasoning_content")) == ("Yes.", "So.")
    for choice in ("auto", "none", "required"):
        with pytest.raises(RequestError, match=r"^tools: no format"):
            prepare(bare, {"messages": ASKED, "tools": [LOOK], "tool_choice": choice})


def test_a_broken_call_is_raised_with_its_place(folder: Path, tokenizer: Tokenizer) -> None:
    text = "</think><tool_call>delete</tool_call>"
    with pytest.raises(ToolCallError) as caught:
        answer(model(folder, tokenizer), said(tokenizer, text), tools=[LOOK])
    assert (caught.value.error.kind, caught.value.error.tool) == ("undeclared_tool", "delete")
