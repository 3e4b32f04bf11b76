# SPDX-License-Identifier: Apache-2.0
"""Answers of `/v1/messages`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._answer import Call
from ._reader import OpenCall, Reader, clean, dump, has_error, is_count, short

__all__ = ["MessagesReader"]


class MessagesReader(Reader):
    """`/v1/messages`."""

    payload = "content"
    _finishes: Mapping[str, str] = {
        "end_turn": "stop",
        "stop_sequence": "stop",
        "max_tokens": "length",
        "tool_use": "tool_calls",
        "refusal": "content_filter",
    }
    #: Which field of which delta continues which block.
    _deltas: Mapping[str, tuple[str, str]] = {
        "text_delta": ("text", "text"),
        "thinking_delta": ("thinking", "thinking"),
        "signature_delta": ("thinking", "signature"),
        "input_json_delta": ("tool_use", "partial_json"),
    }

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[int, tuple[str, OpenCall]] = {}
        self._open: set[int] = set()
        self._started = False

    def calls(self) -> list[Call]:
        return [
            # `{}` is what the API's streams mean where a call has no deltas at all.
            Call(call.id, call.name, str(call.arguments) or "{}")
            for kind, call in self._blocks.values()
            if kind == "tool_use"
        ]

    def text(self) -> str:
        return "".join(str(block.arguments) for kind, block in self._blocks.values() if kind == "text")

    def reasoning(self) -> str:
        return "".join(str(block.arguments) for kind, block in self._blocks.values() if kind == "thinking")

    def plain(self, value: dict[str, Any]) -> None:
        self.expect(value, "body", id=str, type="message", role="assistant", model=str)
        self._stop(value.get("stop_reason"), "stop_reason")
        if self.answer.finish is None:
            self.problem("shape", "stop_reason is missing")
        self.usage(value.get("usage"), "usage")
        for number, block in enumerate(value["content"]):
            where = f"content[{number}]"
            self._block(number, self.object(block, where), where)

    def event(self, name: str, value: dict[str, Any]) -> None:
        kind = value.get("type")
        if kind == "ping":
            return
        if kind == "error" or name == "error" or has_error(value):
            self.failed(value)
            return
        if name != kind:
            self.problem("shape", f"the event {name!r} carries the type {short(dump(kind))}")
        kind = kind or name
        if self.ended:
            self.problem("after_end", f"{kind} after message_stop")
            return
        if kind == "message_start":
            if self._started:
                self.problem("order", "a second message_start")
            self._started = True
            message = self.object(value.get("message"), "message")
            self.expect(message, "message", id=str, type="message", role="assistant", model=str, content=[])
            self.usage(message.get("usage"), "message.usage")
            return
        if not self._started:
            self.problem("order", f"{kind} before message_start")
            self._started = True
        if kind == "content_block_start":
            self._start(value)
        elif kind == "content_block_delta":
            self._delta(value)
        elif kind == "content_block_stop":
            index = value.get("index")
            if is_count(index) and index in self._open:
                self._open.discard(index)
            else:
                self.problem("order", f"content_block_stop of block {short(dump(index))}, which is not open")
        elif kind == "message_delta":
            self._message_delta(value)
        elif kind == "message_stop":
            if self._open:
                self.problem("order", f"message_stop while block {min(self._open)} is open")
            self.ended = True

    def finish(self) -> None:
        if self.answer.error is not None:
            return
        if not self.ended:
            self.problem("no_end", "the stream ended without message_stop")
        if self.answer.finish is None:
            self.problem("shape", "no message_delta has a stop_reason")
            if not self.ended:
                self.answer.broken = "the stream ended without a stop reason and without message_stop"

    def _message_delta(self, value: dict[str, Any]) -> None:
        if self._open:
            self.problem("order", f"message_delta while block {min(self._open)} is open")
        reason = self.object(value.get("delta"), "delta").get("stop_reason")
        if reason is not None and self.answer.finish is not None:
            self.problem("finish_repeated", f"the stop reason came twice, the second time as {reason!r}")
        self._stop(reason, "delta.stop_reason")
        self.usage(value.get("usage"), "usage")

    def _stop(self, reason: Any, where: str) -> None:
        if reason is not None:
            word = self.string(reason, where)
            self.answer.finish = self._finishes.get(word, word)

    def _start(self, value: dict[str, Any]) -> None:
        if self.answer.finish is not None:
            self.problem("after_end", "a block after the stop reason")
        index = value.get("index")
        if not is_count(index) or index != len(self._blocks):
            self.problem("index", f"block {short(dump(index))} begins as number {len(self._blocks)}")
        if self._open:
            self.problem("order", f"a block begins while block {min(self._open)} is open")
        if not is_count(index) or index in self._blocks:
            index = max(self._blocks, default=-1) + 1
        self._block(index, self.object(value.get("content_block"), "content_block"), f"block {index}", streamed=True)
        self._open.add(index)

    def _delta(self, value: dict[str, Any]) -> None:
        if self.answer.finish is not None:
            self.problem("after_end", "content after the stop reason")
        index = value.get("index")
        delta = self.object(value.get("delta"), "delta")
        kind, key = self._deltas.get(str(delta.get("type")), ("", ""))
        if not is_count(index) or index not in self._blocks:
            self.problem("index", f"a delta for block {short(dump(index))}, which was not begun")
            if not kind or not is_count(index):
                return
            self._blocks[index] = (kind, OpenCall())
        elif index not in self._open:
            self.problem("order", f"a delta for block {index} after its end")
        was, block = self._blocks[index]
        if kind and kind != was and not (kind == "tool_use" and was.endswith("_tool_use")):  # server_tool_use
            self.problem("shape", f"a {delta['type']} for block {index}, which is of the type {was!r}")
        elif kind and key != "signature":
            block.arguments.pieces.append(self.string(delta.get(key), f"delta.{key}", optional=False))

    def _block(self, index: int, block: dict[str, Any], where: str, streamed: bool = False) -> None:
        kind = self.string(block.get("type"), f"{where}.type", optional=False)
        one = OpenCall()
        if kind == "tool_use":
            identifier = self.string(block.get("id"), f"{where}.id")
            one = self.begin(identifier, self.string(block.get("name"), f"{where}.name"), where)
            given = self.object(block.get("input"), f"{where}.input")
            if given or not streamed:
                one.arguments.pieces.append(clean(dump(block.get("input"))))
        elif kind in ("text", "thinking"):
            one.arguments.pieces.append(self.string(block.get(kind), f"{where}.{kind}", optional=False))
        self._blocks[index] = (kind, one)
