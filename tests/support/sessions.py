# SPDX-License-Identifier: Apache-2.0
"""Agent sessions and cold arrivals, drawn from a seed.

    for request in AgentWorkload(seed=7, sessions=66).scaled(1 / 100).requests():
        prompt = request.tokens(vocab_size=4096)

The shape is that of coding agents: a turn adds about 6,000 tokens to a prompt of 140,000 and reuses the rest, while
cold arrivals bring long prompts that no cache holds. `AgentWorkload.scaled` keeps the shape and shrinks the lengths.

A session is one endless stream of tokens. The prompt of a turn is the stream's beginning; the recorded answer is what
follows it, then comes what the turn after it adds (a tool's result), and so on. So the prompt of turn n + 1 begins with
the prompt and the answer of turn n, token for token. The first ``shared_tokens`` (tools and system prompt) are the same
in every session. The streams are not stored: a block's id says which stream it belongs to and where, and `tokens`
makes the tokens of the ids.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from dynamo_kv_router_ext.sim.traces import (
    MOONCAKE_BLOCK,
    WEKA_BLOCK,
    MooncakeRequest,
    TraceError,
    WekaConversation,
    WekaRequest,
    WekaSubagent,
    expand,
    read_mooncake,
    read_weka,
    spell,
    write_mooncake,
    write_weka,
)

__all__ = [
    "MOONCAKE_BLOCK",
    "WEKA_BLOCK",
    "AgentWorkload",
    "MooncakeRequest",
    "Request",
    "TraceError",
    "WekaConversation",
    "WekaRequest",
    "WekaSubagent",
    "expand",
    "read_mooncake",
    "read_weka",
    "spell",
    "write_mooncake",
    "write_weka",
]

# A block's id is its stream's number and its place in it: 28 + 24 bits, which JSON readers keep exactly.
_PLACE_BITS = 24
_STREAM_BITS = 28
_SHARED_STREAM = 0


@dataclass(frozen=True)
class Request:
    """One request of a workload; small, whatever the length of its prompt."""

    #: Seconds from the start at which it arrives, if every earlier answer took its nominal time.
    arrival_s: float
    #: The session, or the name of the cold arrival.
    session_id: str
    #: The turn within the session, from 0.
    turn: int
    #: Whether it is a cold arrival: one long prompt that nothing else shares.
    cold: bool
    #: Seconds between the previous answer of the session and this request; for drivers that wait for answers.
    think_s: float
    #: Tokens of the prompt.
    input_length: int
    #: Tokens of the answer.
    output_length: int
    #: How many of the prompt's first tokens the session (or, in its first turn, any session) has had before.
    reused_tokens: int
    #: Tokens in a block.
    block_size: int
    #: The stream of which the prompt is the beginning.
    stream: int
    #: How many blocks at the beginning are shared by all sessions.
    shared_blocks: int
    #: The seed of the workload: equal ids of different seeds are different blocks.
    seed: int

    @property
    def hash_ids(self) -> list[int]:
        """The ids of the prompt's blocks.

        The last block is often partly filled. It carries the id of the block that it becomes in the next turn, so a
        consumer that counts cache hits by block should count `full_blocks` of them.
        """
        return self._ids(self.input_length)

    @property
    def full_blocks(self) -> int:
        """How many of the blocks are filled: those that a prefix cache can hold."""
        return self.input_length // self.block_size

    def tokens(self, *, vocab_size: int = 32_000, first_token: int = 0) -> list[int]:
        """Return the prompt's token ids, from ``first_token`` to ``vocab_size`` - 1, by `expand`."""
        return self._expand(self.input_length, vocab_size, first_token)

    def answer_tokens(self, *, vocab_size: int = 32_000, first_token: int = 0) -> list[int]:
        """Return the recorded answer's token ids: what the next turn's prompt holds after this one's."""
        return self._expand(self.input_length + self.output_length, vocab_size, first_token)[self.input_length :]

    def mooncake(self) -> MooncakeRequest:
        """Return the request as a line of a Mooncake trace; its readers expect blocks of `MOONCAKE_BLOCK` tokens."""
        return MooncakeRequest(
            timestamp=round(self.arrival_s * 1000),
            input_length=self.input_length,
            output_length=self.output_length,
            hash_ids=tuple(self.hash_ids),
        )

    def _ids(self, length: int) -> list[int]:
        blocks = -(-length // self.block_size)
        shared = min(blocks, self.shared_blocks)
        ids = list(range(_first_id(_SHARED_STREAM), _first_id(_SHARED_STREAM) + shared))
        own = _first_id(self.stream)
        ids.extend(range(own + shared, own + blocks))
        return ids

    def _expand(self, length: int, vocab_size: int, first_token: int) -> list[int]:
        return expand(
            self._ids(length),
            length,
            block_size=self.block_size,
            vocab_size=vocab_size,
            first_token=first_token,
            namespace=f"seed {self.seed}",
        )


@dataclass(frozen=True)
class AgentWorkload:
    """Agent sessions that share a fleet with cold arrivals; the same seed gives the same requests everywhere.

    Lengths vary evenly by ``jitter`` around their mean, think times exponentially, cold arrivals are a Poisson process.
    """

    #: The seed of every draw, and of the tokens.
    seed: int = 0
    #: How many sessions there are.
    sessions: int = 8
    #: Turns of each session.
    turns: int = 10
    #: Tokens before the first turn's own, ``shared_tokens`` included.
    history_tokens: int = 140_000
    #: Tokens by which the prompt grows from turn to turn, the answer in between included.
    turn_tokens: int = 6_000
    #: Tokens of an answer.
    output_tokens: int = 500
    #: Tokens at the beginning that are the same in every session; whole blocks.
    shared_tokens: int = 16_384
    #: Mean seconds a client waits between an answer and the next turn.
    think_s: float = 5.0
    #: The most it waits.
    max_think_s: float = 60.0
    #: Nominal seconds to an answer's first token, for arrival times.
    first_token_s: float = 2.0
    #: Nominal seconds per answer token, for arrival times: 100 tokens/s/user.
    per_token_s: float = 0.01
    #: Seconds over which the sessions start, evenly spread.
    ramp_s: float = 60.0
    #: Cold arrivals per second, until the last session request.
    cold_per_s: float = 0.02
    #: Tokens of a cold arrival's prompt.
    cold_tokens: int = 120_000
    #: How far a length may be from its mean, as a fraction.
    jitter: float = 0.2
    #: Tokens in a block.
    block_size: int = WEKA_BLOCK

    def __post_init__(self) -> None:
        positive = ("sessions", "turns", "turn_tokens", "output_tokens", "cold_tokens", "block_size")
        not_negative = ("history_tokens", "shared_tokens", "think_s", "max_think_s", "first_token_s", "per_token_s")
        for field in positive:
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, not {getattr(self, field)}")
        for field in (*not_negative, "ramp_s", "cold_per_s"):
            if not (getattr(self, field) >= 0 and math.isfinite(getattr(self, field))):
                raise ValueError(f"{field} must be at least 0, not {getattr(self, field)}")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter must be at least 0 and below 1, not {self.jitter}")
        if self.shared_tokens % self.block_size:
            raise ValueError(f"shared_tokens {self.shared_tokens} is not a multiple of block_size {self.block_size}")
        if self.shared_tokens > self.history_tokens:
            raise ValueError(f"shared_tokens {self.shared_tokens} exceeds history_tokens {self.history_tokens}")
        if self.output_tokens > self.turn_tokens:
            raise ValueError(f"output_tokens {self.output_tokens} exceeds turn_tokens {self.turn_tokens}")
        longest = self.history_tokens + 2 * self.turn_tokens * (self.turns + 1)
        if max(longest, 2 * self.cold_tokens) >= self.block_size << _PLACE_BITS:
            raise ValueError(f"a prompt would have more than 2**{_PLACE_BITS} blocks")
        if self.sessions >= 1 << (_STREAM_BITS - 1):
            raise ValueError(f"sessions must be below 2**{_STREAM_BITS - 1}, not {self.sessions}")

    def scaled(self, factor: float) -> AgentWorkload:
        """Return the workload with every length times ``factor`` (the shared one in whole blocks), times as before."""
        if not factor > 0:
            raise ValueError(f"factor must be above 0, not {factor}")
        lengths = ("history_tokens", "turn_tokens", "output_tokens", "cold_tokens")
        changed = {field: max(1, round(getattr(self, field) * factor)) for field in lengths}
        shared = round(self.shared_tokens * factor)
        changed["shared_tokens"] = shared - shared % self.block_size
        return dataclasses.replace(self, **changed)

    def requests(self) -> Iterator[Request]:
        """Yield the requests in order of arrival; holds one request of each session at a time."""
        cold = self._cold_arrivals()
        next_cold = next(cold, None)
        for request in heapq.merge(*map(self.session, range(self.sessions)), key=lambda request: request.arrival_s):
            while next_cold is not None and next_cold.arrival_s <= request.arrival_s:
                yield next_cold
                next_cold = next(cold, None)
            yield request

    def session(self, index: int) -> Iterator[Request]:
        """Yield the turns of one session, which do not depend on how many sessions there are but for their start."""
        draw = random.Random(f"{self.seed} session {index}")
        arrival_s = self.ramp_s * index / self.sessions
        length = self.history_tokens
        reused, think_s, output = self.shared_tokens, 0.0, 0
        for turn in range(self.turns):
            length = max(length + self._draw_length(draw, self.turn_tokens), length + output + 1)
            output = self._draw_length(draw, self.output_tokens)
            yield Request(
                arrival_s=arrival_s,
                session_id=f"session-{index}",
                turn=turn,
                cold=False,
                think_s=think_s,
                input_length=length,
                output_length=output,
                reused_tokens=reused,
                block_size=self.block_size,
                stream=1 + 2 * index,
                shared_blocks=self.shared_tokens // self.block_size,
                seed=self.seed,
            )
            reused = length + output
            think_s = min(_exponential(draw, self.think_s), self.max_think_s)
            arrival_s += self.first_token_s + output * self.per_token_s + think_s

    def conversations(self, *, model: str = "model") -> Iterator[WekaConversation]:
        """Yield each session as a Weka conversation, without subagents and cold arrivals."""
        for index in range(self.sessions):
            turns = list(self.session(index))
            yield WekaConversation(
                id=turns[0].session_id,
                models=(model,),
                block_size=self.block_size,
                hash_id_scope="global",  # the shared blocks have the same ids in every session
                system_tokens=self.shared_tokens,
                requests=tuple(
                    WekaRequest(
                        t=round(turn.arrival_s - turns[0].arrival_s, 6),
                        type="s",
                        model=model,
                        input_length=turn.input_length,
                        output_length=turn.output_length,
                        hash_ids=tuple(turn.hash_ids),
                        input_types=("text",) if turn.turn == 0 else ("tool_result",),
                        output_types=("text",) if turn is turns[-1] else ("tool_use",),
                        stop="end_turn" if turn is turns[-1] else "tool_use",
                        think_time=round(turn.think_s, 6),
                    )
                    for turn in turns
                ),
            )

    def _cold_arrivals(self) -> Iterator[Request]:
        draw = random.Random(f"{self.seed} cold")
        arrival_s, index = 0.0, 0
        while self.cold_per_s:
            arrival_s += _exponential(draw, 1 / self.cold_per_s)
            yield Request(
                arrival_s=arrival_s,
                session_id=f"cold-{index}",
                turn=0,
                cold=True,
                think_s=0.0,
                input_length=self._draw_length(draw, self.cold_tokens),
                output_length=self._draw_length(draw, self.output_tokens),
                reused_tokens=0,
                block_size=self.block_size,
                stream=2 + 2 * index,
                shared_blocks=0,
                seed=self.seed,
            )
            index += 1

    def _draw_length(self, draw: random.Random, mean: int) -> int:
        return max(1, round(mean * (1 + self.jitter * (2 * draw.random() - 1))))


def _exponential(draw: random.Random, mean: float) -> float:
    """Draw from `random.Random.random`, the one method whose sequence Python promises to keep."""
    return -math.log(1 - draw.random()) * mean


def _first_id(stream: int) -> int:
    return stream << _PLACE_BITS
