# SPDX-License-Identifier: Apache-2.0
"""Random walks under xgrammar's token mask, and what has to hold for every text that comes of them.

A walk draws each token evenly from those that the mask allows. Left at that, a string would go on for ever: with a
given probability a token that closes something is taken instead, and then what is left of the closing text, spelled in
whatever tokens the mask allows. The tokenizer is the embedded model's: byte-level, 2,048 tokens, with GLM's markers as
tokens; the markers of the other formats are ordinary text in it.
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xgrammar as xgr
from transformers import PreTrainedTokenizerFast

from dynamo_structural_tags import RequestError, ToolPolicy, read_request
from dynamo_structural_tags._events import Arguments, CallBegin, CallEnd, CallFailed, Content, Reasoning
from dynamo_structural_tags._format import Format, Order, ReasoningMode
from serving_stack.model import text_tokenizer
from support import tool_reference, tool_schemas

__all__ = [
    "LIMIT",
    "Case",
    "Closers",
    "Tally",
    "Vocabulary",
    "Walk",
    "cases",
    "closers",
    "examine",
    "tally",
    "vocabulary",
    "walk",
]

#: The most tokens of a walk.
LIMIT = 2000
#: After so many tokens four of five begin to close something.
PATIENCE = 250
#: How many walks share one compiled grammar.
WALKS = 24


class Vocabulary:
    """The tokenizer as xgrammar knows it: the bytes of each token, and which tokens begin a text."""

    def __init__(self) -> None:
        tokenizer = text_tokenizer()
        #: The token that ends an answer.
        self.end: int = tokenizer.encode("<|endoftext|>", add_special_tokens=False).ids[0]
        wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        self.info = xgr.TokenizerInfo.from_huggingface(wrapped, stop_token_ids=[self.end])
        self.compiler = xgr.GrammarCompiler(self.info, cache_enabled=False)
        #: Token -> its bytes.
        self.bytes: list[bytes] = [bytes(token) for token in self.info.decoded_vocab]
        self._tokens: dict[bytes, int] = {token: number for number, token in enumerate(self.bytes)}
        self._longest = max(map(len, self.bytes))

    def beginnings(self, text: bytes) -> list[int]:
        """Return the tokens with which `text` begins, shortest first."""
        lengths = range(1, min(len(text), self._longest) + 1)
        return [self._tokens[text[:length]] for length in lengths if text[:length] in self._tokens]

    def compile(self, tag: Mapping[str, Any]) -> xgr.CompiledGrammar:
        """Compile a structural tag."""
        return self.compiler.compile_structural_tag(json.dumps(tag, ensure_ascii=False))


@functools.lru_cache(maxsize=1)
def vocabulary() -> Vocabulary:
    """Return the one vocabulary of this process."""
    return Vocabulary()


@dataclass(frozen=True)
class Closers:
    """Texts that close something, each with its weight among them; the empty text is the end of the answer."""

    #: The marker that opens the calls.
    trigger: bytes
    #: Before it: what ends reasoning and free text.
    before: tuple[tuple[bytes, float], ...]
    #: After it, where most tokens are allowed: what ends strings.
    text: tuple[tuple[bytes, float], ...]
    #: After it, where few are: what ends arrays, objects, arguments, calls and the answer.
    structure: tuple[tuple[bytes, float], ...]


@dataclass(frozen=True)
class Walk:
    """What came of one walk."""

    #: The text as a detokenizer hands it over: bytes that are no UTF-8 are replaced.
    text: str
    tokens: int
    #: Whether the grammar let the answer end within the limit.
    finished: bool


def walk(
    compiled: xgr.CompiledGrammar,
    closers: Closers,
    rng: random.Random,
    *,
    closing: float = 0.1,
    limit: int = LIMIT,
) -> Walk:
    """Walk until the answer ends, or for `limit` tokens.

    Args:
        compiled: The grammar, compiled for the `vocabulary`.
        closers: Texts that close something.
        rng: Where chance comes from.
        closing: How likely a closing text is begun at each token (where the mask allows its beginning).
        limit: The most tokens.
    """
    known = vocabulary()
    size = known.info.vocab_size
    matcher = xgr.GrammarMatcher(compiled)
    row = xgr.allocate_token_bitmask(1, size)
    words = row.numpy()[0]
    #: Text, weight and the longest token that begins it; the end of the answer is a token of its own.
    choices = {
        name: [
            (text, weight, known.beginnings(text)[-1] if text else known.end) for text, weight in getattr(closers, name)
        ]
        for name in ("before", "text", "structure")
    }
    opened = False
    written: list[bytes] = []
    pending = b""
    while len(written) < limit:
        everything = not matcher.fill_next_token_bitmask(row)
        mask = (1 << size) - 1 if everything else int.from_bytes(words.tobytes(), "little")
        if not pending and rng.random() < (closing if len(written) < PATIENCE else max(closing, 0.8)):
            place = "before" if not opened else "text" if mask.bit_count() > size // 2 else "structure"
            fitting = [(text, weight) for text, weight, token in choices[place] if mask >> token & 1]
            if fitting:
                pending = rng.choices([text for text, _ in fitting], [weight for _, weight in fitting])[0]
                if not pending:
                    return Walk(_text(written), len(written), True)
        token = -1
        if pending:
            begins = [number for number in known.beginnings(pending) if mask >> number & 1]
            if begins:
                token = rng.choice(begins)
                pending = pending[len(known.bytes[token]) :]
            else:
                pending = b""
        if token < 0:
            if not mask:
                raise AssertionError(f"the mask allows no token after {b''.join(written)[-60:]!r}")
            token = _even(mask, size, rng)
        if not matcher.accept_token(token):
            raise AssertionError(f"the mask allowed {known.bytes[token]!r}, the matcher does not: {written[-20:]}")
        if token == known.end:
            return Walk(_text(written), len(written), True)
        written.append(known.bytes[token])
        if not opened:
            opened = closers.trigger in b"".join(written[-len(closers.trigger) :])
    return Walk(_text(written), len(written), False)


def _text(written: Sequence[bytes]) -> str:
    return b"".join(written).decode("utf-8", "replace")


def _even(mask: int, size: int, rng: random.Random) -> int:
    """Draw a token evenly among those whose bit is set."""
    for _ in range(12):
        token = rng.randrange(size)
        if mask >> token & 1:
            return token
    allowed = [number for number, bit in enumerate(reversed(f"{mask:b}")) if bit == "1"]
    return rng.choice(allowed)


# --- what is walked -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One request, its grammar's reasoning mode, and the texts that close something in it."""

    format: Format
    body: dict[str, Any]
    policy: ToolPolicy
    reasoning: ReasoningMode
    order: Order
    closers: Closers

    def compiled(self) -> xgr.CompiledGrammar:
        """Build and compile the grammar.

        Raises:
            RequestError: the format has no text for what the request demands.
        """
        tag = self.format.structural_tag(self.policy, reasoning=self.reasoning, argument_order=self.order)
        return vocabulary().compile(tag)


def _keys(node: Any) -> set[str]:
    """Return the keys that a schema declares anywhere."""
    if isinstance(node, list):
        return set().union(*map(_keys, node))
    if not isinstance(node, dict):
        return set()
    return set(node.get("properties", ())).union(*map(_keys, node.values()))


#: How often each is drawn.
REASONING: tuple[ReasoningMode, ...] = ("closed", "closed", "closed", "closed", "closed", "closed", "open", "auto")
ORDERS: tuple[Order, ...] = ("declared", "declared", "any")


def closers(fmt: Format, tools: Sequence[Mapping[str, Any]], reasoning: str = "closed") -> Closers:
    """Return what closes something in a format.

    An object whose required keys may come late does not end before they do: declared keys are among what ends it.
    """
    keys = sorted(set().union(*(_keys(tool["function"]["parameters"]) for tool in tools)))
    before = {
        fmt.content_separator + fmt.section_begin + fmt.call_begin: 2.0,
        fmt.trigger: 1.0,
        '"': 0.5,
        "}": 0.5,
        "": 0.2,
    }
    if reasoning != "closed":
        before |= {fmt.think[1] + fmt.reasoning_separator: 2.0, fmt.think[1]: 1.0}
    if reasoning == "auto":
        before |= {fmt.think[0]: 1.0}
    text = {'"': 2.0} | ({fmt.value_end: 3.0, fmt.key_end: 1.0} if fmt.value_end else {})
    structure = {"}": 6.0, "]": 6.0, fmt.call_end: 9.0, fmt.section_end: 6.0, "": 6.0}
    if fmt.value_end:
        structure |= {fmt.key_end: 2.0, fmt.value_end: 1.0}
        for string in (True, False):
            structure |= {fmt.argument_begin(key, string=string): 2.0 / len(keys) for key in keys}
    for lead in ("", ",", ", "):
        structure |= {f"{lead}{json.dumps(key, ensure_ascii=False)}:": 2.0 / len(keys) for key in keys}
    return Closers(
        fmt.trigger.encode(),
        *(tuple((text.encode(), weight) for text, weight in texts.items()) for texts in (before, text, structure)),
    )


def cases(fmt: Format, seed: int) -> Iterator[Case]:
    """Draw requests without end: tools, choices, one call or many, `strict: false`, reasoning, a content schema."""
    number = 0
    while True:
        number += 1
        rng = random.Random(f"{fmt.name} {seed} {number}")
        tools = tool_schemas.tools(rng.randrange(1 << 30), rng.choice([1, 1, 2, 3, 5]))
        if rng.random() < 0.15:
            rng.choice(tools)["function"]["strict"] = False
        body: dict[str, Any] = {"tools": tools, "tool_choice": rng.choice(["required", "required", "auto"])}
        if rng.random() < 0.15:
            name = rng.choice(tools)["function"]["name"]
            body["tool_choice"] = {"type": "function", "function": {"name": name}}
        if rng.random() < 0.25:
            body["parallel_tool_calls"] = False
        if rng.random() < 0.1:
            schema = tool_schemas.schemas(rng.randrange(1 << 30), 1)[0]
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        policy = read_request(body)
        assert policy is not None
        reasoning = rng.choice(REASONING)
        yield Case(fmt, body, policy, reasoning, rng.choice(ORDERS), closers(fmt, tools, reasoning))


# --- what has to hold ---------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What many walks gave."""

    walks: int = 0
    finished: int = 0
    tokens: int = 0
    #: Calls of finished walks.
    calls: int = 0
    undeclared: int = 0
    violations: int = 0
    disagreements: int = 0
    #: Answers that the grammar could not exclude and the parser refused, in agreement with the reference: with a
    #: duplicate key, and with more characters than allowed where bytes that are no UTF-8 became U+FFFD.
    duplicates: int = 0
    replaced: int = 0
    #: Requests that the format has no text for.
    unrepresentable: int = 0
    #: The first of each kind of fault, in full.
    examples: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    def fault(self, kind: str, what: str, text: str) -> None:
        """Count a fault."""
        if kind == "undeclared":
            self.undeclared += 1
        elif kind == "violation":
            self.violations += 1
        else:
            self.disagreements += 1
        self.kinds[kind] += 1
        if self.kinds[kind] <= 5:
            self.examples.append(f"{kind}: {what}\n    {text!r}")

    @property
    def finish_rate(self) -> float:
        """The part of the walks that ended within the limit."""
        return self.finished / self.walks if self.walks else 0.0


@dataclass
class _Answer:
    reasoning: str = ""
    content: str = ""
    ends: list[CallEnd] = field(default_factory=list)
    failed: list[CallFailed] = field(default_factory=list)
    begun: dict[int, str] = field(default_factory=dict)
    pieces: dict[int, str] = field(default_factory=dict)

    def take(self, events: Sequence[Any]) -> None:
        for event in events:
            if isinstance(event, Reasoning):
                self.reasoning += event.text
            elif isinstance(event, Content):
                self.content += event.text
            elif isinstance(event, CallBegin):
                self.begun[event.index] = event.name
            elif isinstance(event, Arguments):
                self.pieces[event.index] = self.pieces.get(event.index, "") + event.text
            elif isinstance(event, CallEnd):
                self.ends.append(event)
            elif isinstance(event, CallFailed):
                self.failed.append(event)


def _answer(case: Case, chunks: Sequence[str]) -> _Answer:
    parser = case.format.parser(case.policy, reasoning=case.reasoning)
    answer = _Answer()
    for chunk in chunks:
        answer.take(parser.feed(chunk))
    answer.take(parser.finish())
    return answer


def _chunks(text: str, rng: random.Random) -> list[str]:
    """Cut a text into pieces of 1 to 12 characters."""
    chunks = []
    at = 0
    while at < len(text):
        size = rng.randint(1, 12)
        chunks.append(text[at : at + size])
        at += size
    return chunks


def examine(case: Case, text: str, rng: random.Random, tally: Tally) -> None:
    """Read a finished walk's text with the parser and with the reference, and count what is not as it has to be."""
    tools = case.body["tools"]
    answer = _answer(case, [text])
    if _answer(case, _chunks(text, rng)) != answer:
        tally.fault("chunking", "another result in other chunks", text)
    name = case.format.name
    try:
        reasoning, rest = None, text
        if case.reasoning != "closed":
            reasoning, rest = tool_reference.split_reasoning(name, text, opened=case.reasoning == "open")
        content, calls = tool_reference.read(name, rest, tools, json_content=case.policy.content_schema is not None)
    except tool_reference.DuplicateKey as error:
        tally.calls += len(answer.ends) + len(answer.failed)
        tally.duplicates += 1
        if {failed.error.kind for failed in answer.failed} != {"invalid_arguments"}:
            tally.fault("parser", f"{error}, and the parser says {answer.failed}", text)
        return
    except tool_reference.NotThisFormat as error:
        tally.fault("reference", str(error), text)
        return
    tally.calls += len(calls)
    wrong = [found for called, value in calls if (found := tool_reference.fault(tools, called, value)) is not None]
    refused = [failed.error for failed in answer.failed]
    if (
        "\ufffd" in text
        and wrong
        and len(wrong) == len(refused)
        and all(error.kind == "invalid_arguments" and "too long" in error.message for error in refused)
        and all("too long" in found for found in wrong)
    ):
        tally.replaced += 1
        return
    for found in wrong:
        tally.fault("undeclared" if found.startswith("undeclared") else "violation", found, text)
    if answer.failed:
        tally.fault("parser", f"the parser refuses it: {answer.failed[0].error}", text)
        return
    read = [(end.name, json.loads(end.arguments)) for end in answer.ends]
    if len(read) != len(calls) or any(
        one[0] != other[0] or not tool_reference.same(one[1], other[1]) for one, other in zip(read, calls, strict=True)
    ):
        tally.fault("parser", f"the parser reads {read}, the reference {calls}", text)
    if answer.content != content or answer.reasoning != (reasoning or ""):
        tally.fault(
            "content",
            f"the parser reads {answer.reasoning!r} {answer.content!r}, the reference {reasoning!r} {content!r}",
            text,
        )
    if any(answer.pieces.get(end.index, "") != end.arguments for end in answer.ends):
        tally.fault("pieces", "the pieces of the arguments do not add up", text)
    if any(answer.begun.get(end.index) != end.name for end in answer.ends):
        tally.fault("pieces", "a call ended that had not begun", text)
    if not calls:
        schema = case.policy.content_schema
        if schema is not None and tool_reference.fault(_as_tool(schema), "content", json.loads(content)):
            tally.fault("violation", "the content is not what the response format says", text)
        if case.policy.choice in ("required", "named"):
            tally.fault("missing", "no call where one is required", text)
        return
    if not case.policy.parallel and len(calls) > 1:
        tally.fault("parallel", f"{len(calls)} calls where one is allowed", text)
    rendered = case.format.render_calls([(end.name, end.arguments) for end in answer.ends], policy=case.policy)
    if not _numbered(text).endswith(_numbered(rendered)):
        tally.fault("render", f"rendered again: {rendered!r}", text)


def _as_tool(schema: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "content", "parameters": schema}}]


def _numbered(text: str) -> str:
    """Put one number in the place of every number of a call: it counts the conversation's calls, not the answer's."""
    return re.sub(r":[0-9]+<\|tool_call_argument_begin\|>", ":N<|tool_call_argument_begin|>", text)


def tally(fmt: Format, seed: int, calls: int) -> Tally:
    """Walk until so many calls were finished, and examine every answer that ended."""
    total = Tally()
    for case in cases(fmt, seed):
        try:
            compiled = case.compiled()
        except RequestError:
            total.unrepresentable += 1
            continue
        rng = random.Random(f"{seed} {total.walks}")
        for _ in range(WALKS):
            one = walk(compiled, case.closers, rng, closing=rng.choice([0.02, 0.1, 0.1, 0.3]))
            total.walks += 1
            total.tokens += one.tokens
            if one.finished:
                total.finished += 1
                examine(case, one.text, rng, total)
            if total.calls >= calls:
                return total
    raise AssertionError("cases end")  # pragma: no cover
