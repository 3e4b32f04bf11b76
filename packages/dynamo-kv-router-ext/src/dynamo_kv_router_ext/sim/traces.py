# SPDX-License-Identifier: Apache-2.0
"""Read and write request traces: Mooncake's JSON lines and Weka's conversations.

Both give, instead of a prompt's text, the hash ids of its blocks: equal ids stand for equal prefixes. `expand` makes
token ids of them. A name ending in ``.gz`` is compressed. Files are written beside and renamed. Every fault in a file
is a `TraceError` that names the file, the line on which the record starts, and the field.

Mooncake (FAST'25 release): one request a line, ``timestamp`` in milliseconds, ``input_length`` and ``output_length`` in
tokens, ``hash_ids`` of 512-token blocks, the last of which may be partly filled.

Weka (kv-cache-tester; the corpora of AgentX): one conversation a document, ``requests`` of type ``n`` (plain), ``s``
(streamed) and ``subagent`` (a nested conversation that the next request of the parent waits for), times in seconds,
``hash_ids`` of ``block_size``-token blocks. A ``.json`` file holds one conversation, a ``.jsonl`` file one a line.

`arrivals` makes of either what `dynamo_kv_router_ext.sim.fleet.simulate` takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, get_args

from .fleet import Arrival, split_blocks

__all__ = [
    "FORMATS",
    "MOONCAKE_BLOCK",
    "WEKA_BLOCK",
    "Format",
    "MooncakeRequest",
    "TraceError",
    "WekaConversation",
    "WekaRequest",
    "WekaSubagent",
    "arrivals",
    "expand",
    "read_mooncake",
    "read_weka",
    "spell",
    "write_mooncake",
    "write_weka",
]

#: What a trace may be written in.
Format = Literal["mooncake", "weka"]
FORMATS: tuple[Format, ...] = get_args(Format)
#: Tokens in a block of a Mooncake trace.
MOONCAKE_BLOCK = 512
#: Tokens in a block of a Weka trace, unless it says otherwise.
WEKA_BLOCK = 64

_ONSETS = "bcdfghjklmnpqrstvwxz"
_VOWELS = "aeiou"
_SYLLABLES = [onset + vowel for onset in _ONSETS for vowel in _VOWELS]


class TraceError(ValueError):
    """A trace file is not what its format says."""

    def __init__(self, path: Path, line: int, field: str, fault: str) -> None:
        super().__init__(f"{path}:{line}: {field}: {fault}" if field else f"{path}:{line}: {fault}")
        #: The file.
        self.path = path
        #: The line on which the record starts, from 1.
        self.line = line
        #: The field, such as ``requests[3].hash_ids[0]``; empty for a fault of the whole record.
        self.field = field


@dataclass(frozen=True)
class MooncakeRequest:
    """One line of a Mooncake trace."""

    #: Arrival in milliseconds from the start of the trace.
    timestamp: float
    #: Tokens of the prompt.
    input_length: int
    #: Tokens of the answer.
    output_length: int
    #: Ids of the prompt's blocks, from the first token on.
    hash_ids: tuple[int, ...]


@dataclass(frozen=True)
class WekaRequest:
    """One request of a Weka conversation: ``n`` plain or ``s`` streamed. ``None`` stands for a field left out."""

    #: Seconds from the start of the conversation.
    t: float
    #: ``n`` or ``s``.
    type: str
    #: The model that was asked.
    model: str
    #: Tokens of the prompt (``in`` in the file).
    input_length: int
    #: Tokens of the answer (``out`` in the file).
    output_length: int
    #: Ids of the prompt's blocks.
    hash_ids: tuple[int, ...] = ()
    #: What the prompt added: ``text``, ``tool_result``.
    input_types: tuple[str, ...] = ()
    #: What the answer holds: ``text``, ``thinking``, ``tool_use``.
    output_types: tuple[str, ...] = ()
    #: Why the answer ended: empty, ``tool_use``, ``end_turn``.
    stop: str = ""
    #: Seconds the server took.
    api_time: float | None = None
    #: Seconds the client waited before it.
    think_time: float | None = None
    #: Seconds to the first token; streamed requests only.
    ttft: float | None = None


@dataclass(frozen=True)
class WekaSubagent:
    """A nested conversation; the parent's next request waits for it unless it was launched asynchronously."""

    #: Seconds from the start of the conversation to the launch.
    t: float
    #: The subagent's name within the conversation.
    agent_id: str
    #: Its requests; may hold further subagents.
    requests: tuple[WekaRequest | WekaSubagent, ...]
    #: Its kind, such as ``Explore``.
    subagent_type: str = ""
    #: ``completed``, ``async_launched`` or another word.
    status: str = "completed"
    #: The models it asked.
    models: tuple[str, ...] = ()
    #: Milliseconds from launch to end.
    duration_ms: int | None = None
    #: Tokens of all its requests.
    total_tokens: int | None = None
    #: Tool calls it made.
    tool_use_count: int | None = None
    #: Tokens of its tool definitions.
    tool_tokens: int = 0
    #: Tokens of its system prompt.
    system_tokens: int = 0


@dataclass(frozen=True)
class WekaConversation:
    """One recorded conversation with its subagents."""

    #: The conversation's name.
    id: str
    #: Its requests and subagents in order.
    requests: tuple[WekaRequest | WekaSubagent, ...]
    #: The models it asked.
    models: tuple[str, ...] = ()
    #: Tokens in a block.
    block_size: int = WEKA_BLOCK
    #: ``local``: ids mean something within this conversation only; ``global``: in the whole corpus.
    hash_id_scope: str = "local"
    #: Tokens of the tool definitions.
    tool_tokens: int = 0
    #: Tokens of the system prompt.
    system_tokens: int = 0


def expand(
    hash_ids: Iterable[int],
    length: int,
    *,
    block_size: int = MOONCAKE_BLOCK,
    vocab_size: int = 32_000,
    first_token: int = 0,
    namespace: str = "",
) -> list[int]:
    """Return ``length`` token ids for the blocks ``hash_ids``: equal ids give equal tokens, always and everywhere.

    Args:
        hash_ids: ids of the blocks, from the first token on.
        length: tokens of the prompt; the last block is cut there.
        block_size: tokens in a block.
        vocab_size: token ids are below it.
        first_token: token ids are at least this, to keep clear of special tokens.
        namespace: separates ids that are equal by chance, such as those of conversations with local scope.

    Raises ValueError where the blocks are too few or too many for the length.
    """
    ids = list(hash_ids)
    if len(ids) != -(-length // block_size):
        raise ValueError(f"{len(ids)} blocks of {block_size} tokens do not make a prompt of {length} tokens")
    if not 0 <= first_token < vocab_size:
        raise ValueError(f"first_token {first_token} is not below vocab_size {vocab_size}")
    span = vocab_size - first_token
    unpack = struct.Struct(f"<{block_size}I").unpack
    tokens: list[int] = []
    for hash_id in ids:
        # SHAKE is stable across Python versions and machines, which the random module's draws need not be.
        digest = hashlib.shake_128(f"{namespace}\0{hash_id}".encode()).digest(4 * block_size)
        tokens.extend([first_token + word % span for word in unpack(digest)])
    del tokens[length:]
    return tokens


def spell(tokens: Iterable[int]) -> str:
    """Return a made-up word for each token id, joined by spaces.

    Different ids give different words, and a prefix of the tokens gives a prefix of the text, cut between words. How
    many tokens a model's tokenizer makes of it depends on the tokenizer. Raises ValueError for a negative id.
    """
    return " ".join(map(_word, tokens))


def read_mooncake(path: str | os.PathLike[str], *, block_size: int = MOONCAKE_BLOCK) -> Iterator[MooncakeRequest]:
    """Yield the requests of a Mooncake trace, one line in memory at a time.

    Fields that the format does not have are passed over: derived formats add some. Raises TraceError.
    """
    for line, record in _records(Path(path)):
        fields = _Fields(record, Path(path), line)
        request = MooncakeRequest(
            timestamp=fields.number("timestamp"),
            input_length=fields.count("input_length"),
            output_length=fields.count("output_length"),
            hash_ids=fields.ids("hash_ids"),
        )
        blocks = -(-request.input_length // block_size)
        if len(request.hash_ids) != blocks:
            fault = f"{len(request.hash_ids)} ids, but input_length {request.input_length} takes {blocks}"
            raise fields.error("hash_ids", f"{fault} of {block_size} tokens")
        yield request


def write_mooncake(path: str | os.PathLike[str], requests: Iterable[MooncakeRequest]) -> int:
    """Write a Mooncake trace and return how many requests it holds."""
    return _write_lines(
        Path(path),
        (
            {
                "timestamp": _whole(request.timestamp),
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": request.hash_ids,
            }
            for request in requests
        ),
    )


def read_weka(path: str | os.PathLike[str]) -> Iterator[WekaConversation]:
    """Yield the conversations of a file (``.json`` or ``.jsonl``, also ``.gz``), or of a folder's files by name.

    The opaque summary ``totals`` is passed over; any other unknown field is a fault. Raises TraceError, and
    FileNotFoundError for a folder without such a file.
    """
    source = Path(path)
    if source.is_dir():
        files = sorted(file for file in source.iterdir() if _is_weka(file))
        if not files:
            raise FileNotFoundError(f"{source}: no .json or .jsonl file")
    else:
        files = [source]
    for file in files:
        for line, record in _records(file) if _suffix(file) == ".jsonl" else _document(file):
            yield _conversation(_Fields(record, file, line))


def write_weka(path: str | os.PathLike[str], conversations: Iterable[WekaConversation]) -> int:
    """Write conversations to a ``.jsonl`` file, or one to a ``.json`` file, and return how many there were."""
    target = Path(path)
    documents: Iterable[Mapping[str, Any]] = map(_conversation_document, conversations)
    if _suffix(target) == ".json":
        held = list(documents)
        if len(held) != 1:
            raise ValueError(f"{target}: a .json file holds one conversation, not {len(held)}; name it .jsonl")
        documents = held
    elif _suffix(target) != ".jsonl":
        raise ValueError(f"{target}: not a .json or .jsonl file")
    return _write_lines(target, documents)


def arrivals(
    path: str | os.PathLike[str],
    format: Format = "mooncake",
    *,
    block_size: int = WEKA_BLOCK,
    speedup: float = 1.0,
    every_s: float = 10.0,
    limit: int | None = None,
) -> list[Arrival]:
    """Return a trace's requests as the simulator's arrivals.

    Mooncake's requests arrive at their timestamps, the earliest at 0 (open loop). Of a Weka trace, one conversation
    begins every ``every_s`` seconds, and each of its requests waits for the answer before it (closed loop). A subagent
    begins when the request before it has been answered, and the request after it waits for it, unless it was launched
    asynchronously. Where a request waits for several, it waits for the one that ended last when it was recorded. The
    wait after that end is the recorded ``think_time``, or else the gap that the record shows. Requests for other
    models go to the same fleet.

    Args:
        path: the file; for Weka, also a folder.
        format: what it is written in.
        block_size: tokens in a block of the fleet; it must divide that of the trace.
        speedup: divides timestamps, think times and ``every_s``.
        every_s: seconds between the beginnings of two Weka conversations.
        limit: take this many requests, or Weka conversations, from the beginning.

    Raises TraceError, ValueError for a format, block size or number that cannot be, and OSError.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, not {format!r}")
    if not 0 < speedup < math.inf:
        raise ValueError(f"speedup must be above 0, not {speedup}")
    if not 0 <= every_s < math.inf:
        raise ValueError(f"every_s must be at least 0, not {every_s}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    if format == "mooncake":
        requests = list(itertools.islice(read_mooncake(path), limit))
        start = min((request.timestamp for request in requests), default=0.0)
        return [
            Arrival(
                id=f"request-{number}",
                at_s=(request.timestamp - start) / 1000 / speedup,
                tokens=request.input_length,
                output_tokens=request.output_length,
                blocks=split_blocks(request.hash_ids, MOONCAKE_BLOCK, block_size, request.input_length),
            )
            for number, request in enumerate(requests)
            if request.input_length and request.output_length  # nothing to read or to say: nothing to place
        ]
    found: list[Arrival] = []
    names: dict[tuple[int, int], int] = {}
    for number, conversation in enumerate(itertools.islice(read_weka(path), limit)):
        scope = number if conversation.hash_id_scope == "local" else -1
        _Conversation(conversation, scope, names, block_size, speedup).arrive(number * every_s / speedup, found)
    return found


class _Conversation:
    """Turns one Weka conversation into arrivals."""

    def __init__(
        self,
        conversation: WekaConversation,
        scope: int,
        names: dict[tuple[int, int], int],
        block_size: int,
        speedup: float,
    ) -> None:
        self._conversation, self._scope, self._names = conversation, scope, names
        self._block_size, self._speedup = block_size, speedup
        self._count = 0

    def arrive(self, start_s: float, found: list[Arrival]) -> None:
        """Append the conversation's arrivals to ``found``; it begins at ``start_s``."""
        self._walk(self._conversation.requests, self._conversation.id, None, 0.0, start_s, found)

    def _walk(
        self,
        requests: Sequence[WekaRequest | WekaSubagent],
        session: str,
        before: str | None,
        ended: float,
        start_s: float,
        found: list[Arrival],
    ) -> tuple[str | None, float]:
        """Return whom the next request waits for, and when that one ended in the record.

        Args:
            requests: one level of the conversation.
            session: the session they belong to: the conversation's, or the subagent's own.
            before: the request that the first of them waits for.
            ended: when it ended in the record.
            start_s: when the conversation begins.
            found: where the arrivals go.
        """
        said, said_at = before, ended  # the last request of this level
        last, last_at = before, ended  # whoever ended last, of those that are waited for
        turns: list[int] = []
        for request in requests:
            if isinstance(request, WekaSubagent):
                name = f"{session}/{request.agent_id}"
                inner, inner_at = self._walk(request.requests, name, said, said_at, start_s, found)
                if request.status != "async_launched" and inner_at > last_at:
                    last, last_at = inner, inner_at
                continue
            if not (request.input_length and request.output_length):
                continue
            think_s = request.think_time if request.think_time is not None else max(0.0, request.t - last_at)
            turns.append(len(found))
            found.append(
                Arrival(
                    id=f"{self._conversation.id}:{self._count}",
                    at_s=start_s + request.t / self._speedup if last is None else start_s,
                    tokens=request.input_length,
                    output_tokens=request.output_length,
                    blocks=self._blocks(request),
                    session=session,
                    after=last,
                    think_s=0.0 if last is None else think_s / self._speedup,
                )
            )
            self._count += 1
            said, said_at = found[-1].id, max(request.t + (request.api_time or 0.0), last_at)
            last, last_at = said, said_at
        for turn, following in itertools.pairwise(turns):
            found[turn] = dataclasses.replace(found[turn], answer=self._answer(found[turn], found[following]))
        return last, last_at

    def _blocks(self, request: WekaRequest) -> tuple[int, ...]:
        names, scope = self._names, self._scope
        ids = [names.setdefault((scope, one), len(names)) for one in request.hash_ids]
        return split_blocks(ids, self._conversation.block_size, self._block_size, request.input_length)

    def _answer(self, turn: Arrival, following: Arrival) -> tuple[int, ...]:
        """Return the blocks that the answer fills, as far as the next prompt tells them."""
        held = len(turn.blocks)
        if following.blocks[:held] != turn.blocks:
            return ()
        return following.blocks[held : (turn.tokens + turn.output_tokens) // self._block_size]


class _Fields:
    """The fields of one JSON object, with their place in the file for messages."""

    def __init__(self, record: object, path: Path, line: int, prefix: str = "") -> None:
        self.path, self.line, self.prefix = path, line, prefix
        if not isinstance(record, dict):
            raise TraceError(path, line, prefix.rstrip("."), f"an object was expected, not {_kind(record)}")
        self.record: dict[str, Any] = record

    def error(self, field: str, fault: str) -> TraceError:
        return TraceError(self.path, self.line, self.prefix + field, fault)

    def nested(self, record: object, field: str) -> _Fields:
        return _Fields(record, self.path, self.line, f"{self.prefix}{field}.")

    def known(self, names: Iterable[str]) -> None:
        for name in self.record.keys() - set(names):
            raise self.error(name, "unknown field")

    def value(self, field: str) -> Any:
        if field not in self.record:
            raise self.error(field, "missing")
        return self.record[field]

    def number(self, field: str) -> float:
        value = self.value(field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(field, f"a number was expected, not {_kind(value)}")
        if not 0 <= value < math.inf:
            raise self.error(field, f"{value} is not a finite number of at least 0")
        return float(value)

    def maybe_number(self, field: str) -> float | None:
        return None if self.record.get(field) is None else self.number(field)

    def count(self, field: str, default: int | None = None) -> int:
        if default is not None and field not in self.record:
            return default
        return self._count(field, self.value(field))

    def maybe_count(self, field: str) -> int | None:
        return None if self.record.get(field) is None else self.count(field)

    def ids(self, field: str) -> tuple[int, ...]:
        return tuple(self._count(f"{field}[{index}]", value) for index, value in enumerate(self.items(field)))

    def items(self, field: str) -> list[Any]:
        value = self.value(field)
        if not isinstance(value, list):
            raise self.error(field, f"a list was expected, not {_kind(value)}")
        return value

    def text(self, field: str, default: str | None = None) -> str:
        if default is not None and field not in self.record:
            return default
        return self._text(field, self.value(field))

    def texts(self, field: str) -> tuple[str, ...]:
        if field not in self.record:
            return ()
        return tuple(self._text(f"{field}[{index}]", value) for index, value in enumerate(self.items(field)))

    def _count(self, field: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(field, f"a whole number was expected, not {_kind(value)}")
        if value < 0:
            raise self.error(field, f"{value} is negative")
        return value

    def _text(self, field: str, value: object) -> str:
        if not isinstance(value, str):
            raise self.error(field, f"a string was expected, not {_kind(value)}")
        return value


_REQUEST_FIELDS = (
    "t",
    "type",
    "model",
    "in",
    "out",
    "hash_ids",
    "input_types",
    "output_types",
    "stop",
    "api_time",
    "think_time",
)
_SUBAGENT_FIELDS = (
    "t",
    "type",
    "agent_id",
    "subagent_type",
    "duration_ms",
    "total_tokens",
    "tool_use_count",
    "status",
    "requests",
    "models",
    "tool_tokens",
    "system_tokens",
)
_CONVERSATION_FIELDS = (
    "id",
    "models",
    "block_size",
    "hash_id_scope",
    "tool_tokens",
    "system_tokens",
    "requests",
    "totals",
)


def _conversation(fields: _Fields) -> WekaConversation:
    fields.known(_CONVERSATION_FIELDS)
    block_size = fields.count("block_size")
    if block_size == 0:
        raise fields.error("block_size", "0 tokens make no block")
    scope = fields.text("hash_id_scope", "local")
    if scope not in ("local", "global"):
        raise fields.error("hash_id_scope", f"{scope!r} is neither 'local' nor 'global'")
    return WekaConversation(
        id=fields.text("id"),
        requests=_requests(fields),
        models=fields.texts("models"),
        block_size=block_size,
        hash_id_scope=scope,
        tool_tokens=fields.count("tool_tokens", 0),
        system_tokens=fields.count("system_tokens", 0),
    )


def _requests(fields: _Fields) -> tuple[WekaRequest | WekaSubagent, ...]:
    found = enumerate(fields.items("requests"))
    return tuple(_request(fields.nested(record, f"requests[{index}]")) for index, record in found)


def _request(fields: _Fields) -> WekaRequest | WekaSubagent:
    kind = fields.text("type")
    if kind == "subagent":
        fields.known(_SUBAGENT_FIELDS)
        return WekaSubagent(
            t=fields.number("t"),
            agent_id=fields.text("agent_id"),
            requests=_requests(fields),
            subagent_type=fields.text("subagent_type", ""),
            status=fields.text("status", "completed"),
            models=fields.texts("models"),
            duration_ms=fields.maybe_count("duration_ms"),
            total_tokens=fields.maybe_count("total_tokens"),
            tool_use_count=fields.maybe_count("tool_use_count"),
            tool_tokens=fields.count("tool_tokens", 0),
            system_tokens=fields.count("system_tokens", 0),
        )
    if kind not in ("n", "s"):
        raise fields.error("type", f"{kind!r} is none of 'n', 's', 'subagent'")
    fields.known((*_REQUEST_FIELDS, "ttft") if kind == "s" else _REQUEST_FIELDS)
    return WekaRequest(
        t=fields.number("t"),
        type=kind,
        model=fields.text("model"),
        input_length=fields.count("in"),
        output_length=fields.count("out"),
        hash_ids=fields.ids("hash_ids") if "hash_ids" in fields.record else (),
        input_types=fields.texts("input_types"),
        output_types=fields.texts("output_types"),
        stop=fields.text("stop", ""),
        api_time=fields.maybe_number("api_time"),
        think_time=fields.maybe_number("think_time"),
        ttft=fields.maybe_number("ttft"),
    )


def _conversation_document(conversation: WekaConversation) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "models": conversation.models,
        "block_size": conversation.block_size,
        "hash_id_scope": conversation.hash_id_scope,
        "tool_tokens": conversation.tool_tokens,
        "system_tokens": conversation.system_tokens,
        "requests": [_request_document(request) for request in conversation.requests],
    }


def _request_document(request: WekaRequest | WekaSubagent) -> dict[str, Any]:
    if isinstance(request, WekaSubagent):
        return {
            "t": request.t,
            "type": "subagent",
            "agent_id": request.agent_id,
            "subagent_type": request.subagent_type,
            "duration_ms": request.duration_ms,
            "total_tokens": request.total_tokens,
            "tool_use_count": request.tool_use_count,
            "status": request.status,
            "requests": [_request_document(inner) for inner in request.requests],
            "models": request.models,
            "tool_tokens": request.tool_tokens,
            "system_tokens": request.system_tokens,
        }
    document: dict[str, Any] = {
        "t": request.t,
        "type": request.type,
        "model": request.model,
        "in": request.input_length,
        "out": request.output_length,
        "hash_ids": request.hash_ids,
        "input_types": request.input_types,
        "output_types": request.output_types,
        "stop": request.stop,
    }
    timings = {"api_time": request.api_time, "think_time": request.think_time, "ttft": request.ttft}
    document.update({field: value for field, value in timings.items() if value is not None})
    return document


def _records(path: Path) -> Iterator[tuple[int, object]]:
    """Yield each line's number and JSON value; empty lines are passed over."""
    line = 0
    try:
        with _open(path) as file:
            for line, text in enumerate(file, start=1):
                if text.strip():
                    yield line, _parse(text, path, line)
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise TraceError(path, line + 1, "", f"cannot be read: {error}") from error


def _document(path: Path) -> Iterator[tuple[int, object]]:
    try:
        with _open(path) as file:
            text = file.read()
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise TraceError(path, 1, "", f"cannot be read: {error}") from error
    yield 1, _parse(text, path, 1)


def _parse(text: str, path: Path, line: int) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(path, line + error.lineno - 1, "", f"not JSON: {error.msg} at column {error.colno}") from error
    except (RecursionError, ValueError) as error:  # too deep, or a number of thousands of digits
        raise TraceError(path, line, "", f"cannot be read: {error}") from error


def _open(path: Path) -> IO[str]:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _write_lines(path: Path, documents: Iterable[Mapping[str, Any]]) -> int:
    """Write one JSON object a line, beside the file and then in its place; return how many."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    written = 0
    try:
        with contextlib.ExitStack() as files:
            raw = files.enter_context(partial.open("wb"))
            buffer: IO[bytes] | gzip.GzipFile = raw
            if path.suffix == ".gz":  # without name and time: the same trace gives the same bytes
                buffer = files.enter_context(gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0))
            file = files.enter_context(io.TextIOWrapper(buffer, encoding="utf-8", newline="\n"))
            for document in documents:
                file.write(json.dumps(document, allow_nan=False) + "\n")
                written += 1
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return written


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _is_weka(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".") and _suffix(path) in (".json", ".jsonl")


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def _word(token: int) -> str:
    if token < 0:
        raise ValueError(f"token id {token} is negative")
    syllables: Sequence[str] = _SYLLABLES
    word = ""
    while True:
        token, digit = divmod(token, len(syllables))
        word = syllables[digit] + word
        if token == 0:
            return word


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), f"{value!r}")
