# SPDX-License-Identifier: Apache-2.0
"""What is read and written of the API forms."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_resilience._wire import APIS, BadBody, Head, Scanner, Usage, usage_of, worker_of

CHAT, COMPLETIONS, RESPONSES = (APIS[f"/v1/{name}"] for name in ("chat/completions", "completions", "responses"))
MESSAGES, EMBEDDINGS = APIS["/v1/messages"], APIS["/v1/embeddings"]


@pytest.mark.parametrize(
    ("api", "body", "head"),
    [
        (CHAT, {"model": "m", "messages": []}, Head("m", False, 1, None)),
        (CHAT, {"model": "m", "stream": True, "max_tokens": 7, "n": 3}, Head("m", True, 3, 7)),
        (CHAT, {"model": "m", "max_completion_tokens": 9, "stream": None, "n": None}, Head("m", False, 1, 9)),
        (CHAT, {"model": "m", "max_tokens": 1, "max_completion_tokens": 9}, Head("m", False, 1, 9)),
        (CHAT, {"model": "m", "max_tokens": -5, "n": -5}, Head("m", False, 1, 0)),
        (CHAT, {"model": "m", "max_tokens": 10**18, "n": 10**400}, Head("m", False, 2**40, 2**40)),
        (COMPLETIONS, {"model": "m", "prompt": "one", "max_tokens": 2}, Head("m", False, 1, 2)),
        (COMPLETIONS, {"model": "m", "prompt": ['a "b" \n'] * 20_000}, Head("m", False, 20_000, None)),
        (COMPLETIONS, {"model": "m", "prompt": [[1, 2]] * 20_000}, Head("m", False, 20_000, None)),
        (COMPLETIONS, {"model": "m", "prompt": [1] * 100_000}, Head("m", False, 1, None)),
        (COMPLETIONS, {"model": "m", "prompt": ["one", "two"], "n": 2}, Head("m", False, 4, None)),
        (COMPLETIONS, {"model": "m", "prompt": [1, 2, 3]}, Head("m", False, 1, None)),
        (COMPLETIONS, {"model": "m", "prompt": [[1, 2], [3]]}, Head("m", False, 2, None)),
        (COMPLETIONS, {"model": "m", "prompt": []}, Head("m", False, 1, None)),
        (RESPONSES, {"model": "m", "input": "x", "max_output_tokens": 5}, Head("m", False, 1, 5)),
        (MESSAGES, {"model": "m", "max_tokens": 5, "stream": True}, Head("m", True, 1, 5)),
        (EMBEDDINGS, {"model": "m", "input": ["a", "b", "c"]}, Head("m", False, 3, 0)),
    ],
)
def test_head_of_a_body(api: object, body: dict[str, object], head: Head) -> None:
    assert api.read(json.dumps(body).encode()) == head  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (b'{"model": 7}', "model", "(7)"),
        (b'{"model": "m", "max_tokens": "many"}', "max_tokens", "('many')"),
        (b'{"model": "m", "stream": "yes"}', "stream", "('yes')"),
        (b'{"model": "m", "n": 1.5}', "n", "(1.5)"),
        (b'{"messages": []}', "model", "misses the required field model"),
        (b"[1]", None, "object"),
        (b"{", None, "not JSON"),
        (b"", None, "not JSON"),
        (b'{"model": "\xff"}', None, "UTF-8"),
        (b'{"model": "m", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None, "nested too deeply"),
        (b'{"model": 7, "x": [' + b"1," * 50_000 + b"1]}", "model", "expected str"),
    ],
)
def test_bad_body_names_the_field_and_the_value(body: bytes, param: str | None, says: str) -> None:
    with pytest.raises(BadBody) as caught:
        CHAT.read(body)
    assert caught.value.param == param
    assert says in str(caught.value)


def test_error_has_the_form_of_the_api() -> None:
    assert json.loads(CHAT.error(404, "no", param="model", code="model_not_found")) == {
        "error": {"message": "no", "type": "not_found_error", "param": "model", "code": "model_not_found"}
    }
    assert json.loads(MESSAGES.error(503, "no")) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "no"},
    }


def test_error_event_has_the_form_of_the_api() -> None:
    assert CHAT.error_event(502, "no").startswith(b'data: {"error":{"message":"no"')
    assert MESSAGES.error_event(502, "no").startswith(b'event: error\ndata: {"type":"error","error":')
    kind, data = RESPONSES.error_event(502, "no", code="c", number=12).strip().split(b"\n")
    assert kind == b"event: error"
    assert json.loads(data[6:]) == {
        "type": "error",
        "code": "c",
        "message": "no",
        "param": None,
        "sequence_number": 12,
    }
    for api in (CHAT, MESSAGES, RESPONSES):
        assert api.error_event(502, "no").endswith(b"}\n\n")
        scanner = Scanner(api)
        scanner.feed(api.error_event(502, "no"))
        assert scanner.failed


# As Dynamo 1.6.1 sent them.
CHAT_STREAM = (
    b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a","role":"assistant"},"finish_reason":null}],'
    b'"nvext":{"worker_id":{"prefill_worker_id":21,"decode_worker_id":2173892801109729341}}}\n\n'
    b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
    b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":12,"completion_tokens":3,"total_tokens":15,'
    b'"prompt_tokens_details":{"cached_tokens":8}}}\n\n'
    b"data: [DONE]\n\n"
)
BROKEN_CHAT = (
    b'data: {"id":"c","choices":[{"text":" :","index":0}],"usage":null}\n\n'
    b'data: {"error":{"message":"Service temporarily unavailable","type":"service_unavailable","code":503}}\n\n'
    b"data: [DONE]\n\n"
)
MESSAGES_STREAM = (
    b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":2}}}\n\n'
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"event: error\\n"}}\n\n'
    b'event: message_delta\ndata: {"type":"message_delta","usage":{"input_tokens":2,"output_tokens":3,'
    b'"cache_read_input_tokens":6}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    b"data: [DONE]\n\n"
)
BROKEN_MESSAGES = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0}\n\n'
    b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"x"}}\n\n'
    b"data: [DONE]\n\n"
)
BROKEN_RESPONSES = (
    b'event: response.created\ndata: {"type":"response.created","response":{"error":null}}\n\n'
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n'
    b'event: response.failed\ndata: {"type":"response.failed","response":{"error":{"code":"server_error"}}}\n\n'
    b"data: [DONE]\n\n"
)


def _scan(api: object, pieces: list[bytes]) -> tuple[Scanner, list[bytes]]:
    scanner = Scanner(api)  # type: ignore[arg-type]
    return scanner, [scanner.feed(piece) for piece in pieces]


@settings(max_examples=150)
@given(
    st.sampled_from(
        [
            (CHAT, CHAT_STREAM, 0, Usage(12, 8, 3), 4),
            (CHAT, CHAT_STREAM.replace(b"\n", b"\r\n"), 0, Usage(12, 8, 3), 4),
            (COMPLETIONS, BROKEN_CHAT, 503, None, 3),
            (MESSAGES, MESSAGES_STREAM, 0, Usage(8, 6, 3), 5),
            (MESSAGES, BROKEN_MESSAGES, 500, None, 3),
            (RESPONSES, BROKEN_RESPONSES, 500, None, 4),
        ]
    ),
    st.lists(st.integers(0, 1000), max_size=8),
)
def test_stream_reads_the_same_however_it_is_split(
    case: tuple[object, bytes, int, Usage | None, int], cuts: list[int]
) -> None:
    api, stream, failed, usage, events = case
    at = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    scanner, out = _scan(api, [stream[a:b] for a, b in itertools.pairwise(at) if a < b])
    assert b"".join(out) + scanner.rest == stream
    assert all(piece == b"" or piece.replace(b"\r", b"").endswith(b"\n\n") for piece in out)
    assert (scanner.failed, scanner.usage(), scanner.events, scanner.ended) == (failed, usage, events, True)
    assert scanner.first


def test_first_token_is_told_from_what_comes_before_it() -> None:
    scanner = Scanner(RESPONSES)
    scanner.feed(b'event: response.created\ndata: {"type":"response.created"}\n\n')
    assert not scanner.first
    scanner.feed(b'event: response.output_text.delta\ndata: {"delta":"a"}\n\n')
    assert scanner.first
    scanner = Scanner(CHAT)
    scanner.feed(b": keep-alive\n\n")
    assert not scanner.first


def test_stream_without_its_last_event_is_not_ended() -> None:
    scanner, _ = _scan(CHAT, [CHAT_STREAM.removesuffix(b"data: [DONE]\n\n")])
    assert not scanner.ended
    assert not scanner.failed


def test_event_that_never_ends_is_not_held_for_ever() -> None:
    scanner, out = _scan(CHAT, [b"data: " + b"x" * 2**19, b"x" * 2**20])
    assert out[0] == b""
    assert len(out[1]) == 6 + 2**19 + 2**20
    assert scanner.torn


def test_text_that_looks_like_an_event_is_text() -> None:
    text = json.dumps({"choices": [{"delta": {"content": '\nevent: error\ndata: {"error":{"code":503}}\n\n'}}]})
    scanner, _ = _scan(CHAT, [b"data: " + text.encode() + b"\n\n"])
    assert not scanner.failed
    assert scanner.usage() is None


def test_usage_and_worker_of_a_whole_answer() -> None:
    body = b'{"choices":[{"message":{"content":"\\"usage\\":{"}}],"usage":{"prompt_tokens":5,"completion_tokens":3}}'
    assert usage_of(body) == Usage(5, 0, 3)
    assert usage_of(b'{"usage":null}') is None
    assert usage_of(b"{}") is None
    assert worker_of(CHAT_STREAM) == 2173892801109729341
    assert worker_of(b"{}") is None


def test_absurd_usage_is_none() -> None:
    assert usage_of(b'{"usage": {"prompt_tokens": ' + b"9" * 5000 + b"}}") is None
    assert usage_of(b'{"usage": {"prompt_tokens": "many"}}') is None
    assert worker_of(b'{"decode_worker_id": ' + b"9" * 5000 + b"}") is None


def test_scanner_keeps_little_of_what_passes() -> None:
    scanner = Scanner(CHAT)
    for _ in range(10):
        scanner.feed(b'data: {"x":"' + b"a" * 500_000 + b'"}\n\n')
    scanner.feed(b'data: {"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\ndata: [DONE]\n\n')
    assert scanner.usage() == Usage(3, 0, 2)
    assert sum(map(len, scanner._last)) < 100_000
