# SPDX-License-Identifier: Apache-2.0
"""Agent sessions: determinism, prefix sharing, lengths, arrivals; and their tokens."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from support import sessions
from support.sessions import MOONCAKE_BLOCK, AgentWorkload, Request, expand, spell

SMALL = AgentWorkload(seed=7, sessions=4, turns=5, cold_per_s=0.2).scaled(1 / 100)


def digest(workload: AgentWorkload) -> str:
    shown = [(request, request.tokens()) for request in workload.requests()]
    return hashlib.sha256(repr(shown).encode()).hexdigest()


def test_the_same_seed_gives_the_same_requests_in_another_process() -> None:
    code = f"from support.tests.test_sessions import SMALL, digest; assert {SMALL!r} == SMALL; print(digest(SMALL))"
    code = code.replace("AgentWorkload(", "__import__('support.sessions').sessions.AgentWorkload(")
    tests = Path(sessions.__file__).parents[1]
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tests)!r}); {code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == digest(SMALL)
    assert digest(replace(SMALL, seed=8)) != digest(SMALL)


def test_a_turn_begins_with_the_prompt_and_the_answer_of_the_turn_before() -> None:
    for index in range(SMALL.sessions):
        for before, after in itertools.pairwise(SMALL.session(index)):
            history = before.tokens() + before.answer_tokens()
            assert len(history) == before.input_length + before.output_length == after.reused_tokens
            assert len(after.tokens()) == after.input_length > after.reused_tokens
            assert after.tokens()[: len(history)] == history
            assert after.hash_ids[: len(before.hash_ids)] == before.hash_ids


def test_sessions_share_the_beginning_and_nothing_else() -> None:
    first, second = next(SMALL.session(0)), next(SMALL.session(1))
    shared = first.shared_blocks
    assert first.reused_tokens == SMALL.shared_tokens == shared * SMALL.block_size > 0
    assert first.hash_ids[:shared] == second.hash_ids[:shared]
    assert first.tokens()[: SMALL.shared_tokens] == second.tokens()[: SMALL.shared_tokens]
    assert not set(first.hash_ids[shared:]) & set(second.hash_ids[shared:])
    other_seed = next(replace(SMALL, seed=8).session(0))
    assert other_seed.tokens()[:64] != first.tokens()[:64]


def test_cold_arrivals_are_long_and_share_nothing() -> None:
    requests = list(SMALL.requests())
    cold = [request for request in requests if request.cold]
    assert len(cold) >= 3
    assert all(request.reused_tokens == 0 and request.turn == 0 for request in cold)
    assert all(0.8 <= request.input_length / SMALL.cold_tokens <= 1.2 for request in cold)
    blocks = [block for request in cold for block in request.hash_ids]
    blocks += {block for request in requests if not request.cold for block in request.hash_ids}
    assert len(blocks) == len(set(blocks))
    assert max(blocks) < 2**53
    assert not any(request.cold for request in replace(SMALL, cold_per_s=0).requests())


def test_requests_come_in_order_of_arrival_with_every_turn_once() -> None:
    requests = list(SMALL.requests())
    assert [request.arrival_s for request in requests] == sorted(request.arrival_s for request in requests)
    assert not requests[-1].cold
    turns = sorted((request.session_id, request.turn) for request in requests if not request.cold)
    assert turns == [(f"session-{index}", turn) for index in range(4) for turn in range(5)]


def test_the_default_lengths_are_those_of_the_workload_and_are_never_held() -> None:
    workload = AgentWorkload(sessions=200, turns=10)
    requests = [request for request in workload.requests() if not request.cold]  # 2,000 prompts, 350 million tokens
    first = [request.input_length for request in requests if request.turn == 0]
    assert 140_000 + 4_800 <= min(first) <= max(first) <= 140_000 + 7_200
    grown = [
        after.input_length - before.input_length
        for index in range(20)
        for before, after in itertools.pairwise(workload.session(index))
    ]
    assert 4_800 <= min(grown) <= max(grown) <= 7_200
    assert sum(grown) / len(grown) == pytest.approx(6_000, rel=0.05)
    outputs = [request.output_length for request in requests]
    assert 400 <= min(outputs) <= max(outputs) <= 600
    assert sum(map(sys.getsizeof, requests)) < 1_000_000


def test_arrivals_are_the_nominal_answer_and_the_think_time_apart() -> None:
    workload = replace(SMALL, think_s=20.0, max_think_s=30.0, turns=50)
    turns = list(workload.session(1))
    assert (turns[0].arrival_s, turns[0].think_s) == (workload.ramp_s / 4, 0)
    for before, after in itertools.pairwise(turns):
        answer_s = workload.first_token_s + before.output_length * workload.per_token_s
        assert after.arrival_s - before.arrival_s == pytest.approx(answer_s + after.think_s)
    waits = [turn.think_s for turn in turns[1:]]
    assert max(waits) == 30.0
    assert min(waits) < 10.0


def test_the_last_block_is_partly_filled() -> None:
    request = next(turn for turn in SMALL.session(0) if turn.input_length % turn.block_size)
    assert len(request.hash_ids) == request.full_blocks + 1


def test_requests_become_mooncake_lines() -> None:
    workload = replace(SMALL, block_size=MOONCAKE_BLOCK, shared_tokens=512)
    for request in workload.requests():
        line = request.mooncake()
        assert line.timestamp == round(request.arrival_s * 1000)
        assert len(line.hash_ids) == -(-line.input_length // MOONCAKE_BLOCK)


def test_sessions_become_weka_conversations() -> None:
    conversations = list(SMALL.conversations(model="m"))
    assert [conversation.id for conversation in conversations] == [f"session-{index}" for index in range(4)]
    for index, conversation in enumerate(conversations):
        for request, turn in zip(conversation.requests, SMALL.session(index), strict=True):
            assert isinstance(request, sessions.WekaRequest)
            assert list(request.hash_ids) == turn.hash_ids
            assert (request.input_length, request.output_length) == (turn.input_length, turn.output_length)
        assert conversation.requests[0].t == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sessions", 0),
        ("turn_tokens", 0),
        ("output_tokens", 7000),
        ("shared_tokens", 100),
        ("shared_tokens", 140_032),
        ("jitter", 1.0),
        ("think_s", float("nan")),
        ("cold_per_s", -1.0),
        ("cold_tokens", 2**30),
    ],
)
def test_a_workload_that_makes_no_sense_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field if field != "cold_tokens" else "blocks"):
        replace(AgentWorkload(), **{field: value})  # type: ignore[arg-type]


def test_equal_ids_give_equal_tokens_and_others_do_not() -> None:
    tokens = expand([5, 6, 7], 150, block_size=64)
    assert len(tokens) == 150
    assert expand([5, 6, 8], 150, block_size=64)[:128] == tokens[:128]
    assert expand([5, 6, 8], 150, block_size=64)[128:] != tokens[128:]
    assert expand([5, 6], 128, block_size=64, namespace="other")[:64] != tokens[:64]
    assert expand([], 0) == []
    # Pinned: a change of the tokens would silently change every figure that was measured with them.
    assert expand([5], 4, block_size=64) == PINNED


PINNED = [3260, 24827, 5793, 25944]


def test_tokens_stay_in_their_range() -> None:
    tokens = expand(range(20), 20 * 64, block_size=64, vocab_size=300, first_token=256)
    assert set(tokens) == set(range(256, 300))


@pytest.mark.parametrize(("blocks", "length"), [(2, 64), (2, 129), (0, 1), (1, 0)])
def test_blocks_that_do_not_make_the_length_are_refused(blocks: int, length: int) -> None:
    with pytest.raises(ValueError, match=f"{blocks} blocks of 64 tokens do not make a prompt of {length} tokens"):
        expand(range(blocks), length, block_size=64)


def test_a_prefix_of_the_tokens_is_a_prefix_of_the_text_and_no_two_words_are_equal() -> None:
    tokens = expand([1, 2], 128, block_size=64)
    words = spell(tokens).split(" ")
    assert len(words) == 128
    assert spell(tokens) == spell(tokens[:70]) + " " + spell(tokens[70:])
    assert len(set(spell(range(20_000)).split(" "))) == 20_000
    with pytest.raises(ValueError, match="-1 is negative"):
        spell([-1])


def test_a_request_shows_as_plain_data() -> None:
    request = next(SMALL.session(0))
    assert json.loads(json.dumps(vars(request)))["session_id"] == "session-0"
    assert isinstance(request, Request)
