# SPDX-License-Identifier: Apache-2.0
"""Answers of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from ._answer import Call
from ._reader import OpenCall, Reader, Text, dump, has_error, is_count, kind_of, short

__all__ = ["ChatReader"]


class ChatReader(Reader):
    """`/v1/chat/completions`."""

    payload = "choices"
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[int, OpenCall] = {}
        self._text = Text()
        self._reasoning = Text()
        self._last = -1
        self._begun = False

    def calls(self) -> list[Call]:
        return [call.whole for _, call in sorted(self._calls.items())]

    def text(self) -> str:
        return str(self._text)

    def reasoning(self) -> str:
        return str(self._reasoning)

    def plain(self, value: dict[str, Any]) -> None:
        self.expect(value, "body", id=str, object="chat.completion", created=int, model=str)
        self.usage(value.get("usage"), "usage")
        if not value["choices"]:
            self.problem("shape", "choices is empty")
            self.answer.broken = "no answer in the body: choices is empty"
            return
        choice = self.object(value["choices"][0], "choices[0]")
        self._finish(choice.get("finish_reason"), "choices[0].finish_reason")
        if self.answer.finish is None:
            self.problem("shape", "choices[0].finish_reason is missing")
        message = self.object(choice.get("message"), "choices[0].message")
        self.expect(message, "choices[0].message", role="assistant")
        self._words(message, "choices[0].message")
        for number, call in enumerate(self.list(message.get("tool_calls"), "choices[0].message.tool_calls")):
            self._fragment(self.object(call, f"tool_calls[{number}]"), f"tool_calls[{number}]", number)

    def event(self, name: str, value: dict[str, Any]) -> None:
        if self.ended:
            self.problem("after_end", f"an event after [DONE]: {short(dump(value))}")
            return
        if has_error(value):
            self.failed(value)
            return
        if value.get("choices") != []:  # Azure's first chunk, of its content filter, has empty ones
            self.expect(value, "chunk", id=str, object="chat.completion.chunk", created=int, model=str)
        self.usage(value.get("usage"), "usage")
        if not isinstance(value.get("choices"), list):
            self.problem("shape", f"chunk.choices is {kind_of(value.get('choices'))}, not a list")
        for choice in self.list(value.get("choices"), "chunk.choices"):
            self._choice(self.object(choice, "choices[0]"))

    def done(self) -> None:
        if self.ended:
            self.problem("after_end", "a second [DONE]")
        self.ended = True

    def finish(self) -> None:
        if self.answer.error is not None:
            return
        if not self.ended:
            self.problem("no_end", "the stream ended without data: [DONE]")
        if self.answer.finish is None:
            self.problem("shape", "no chunk has a finish_reason")
            if not self.ended:
                self.answer.broken = "the stream ended without a finish reason and without [DONE]"

    def _choice(self, choice: dict[str, Any]) -> None:
        if choice.get("index") not in (0, None):  # one choice is asked for
            self.problem("index", f"a choice with the index {choice.get('index')}")
            return
        delta = self.object(choice.get("delta"), "delta")
        late = self.answer.finish is not None
        if delta.get("role") != "assistant" and (not self._begun or delta.get("role") is not None):
            self.problem("shape", f'delta.role is {short(dump(delta.get("role")))}, not "assistant"')
        self._begun = True
        came = self._words(delta, "delta")
        for number, fragment in enumerate(self.list(delta.get("tool_calls"), "delta.tool_calls")):
            came = True
            self._numbered(self.object(fragment, f"delta.tool_calls[{number}]"))
        if late and came:
            self.problem("after_end", "content after the finish reason")
        reason = choice.get("finish_reason")
        if reason is not None and late:
            self.problem("finish_repeated", f"the finish reason {self.answer.finish!r}, and then {reason!r}")
        self._finish(reason, "finish_reason")

    def _finish(self, reason: Any, where: str) -> None:
        if reason is not None:
            self.answer.finish = self.string(reason, where)

    def _words(self, message: dict[str, Any], where: str) -> bool:
        """Take content and reasoning; say whether there was any."""
        content = message.get("content")
        if isinstance(content, list):
            self.problem("shape", f"{where}.content is a list, not a string")
            texts = [part.get("text") for part in content if isinstance(part, dict)]
            content = "".join(text for text in texts if isinstance(text, str))
        text = self.string(content, f"{where}.content")
        key = "reasoning" if message.get("reasoning_content") is None else "reasoning_content"
        reasoning = self.string(message.get(key), f"{where}.{key}")
        self._text.pieces.append(text)
        self._reasoning.pieces.append(reasoning)
        return bool(text or reasoning)

    def _numbered(self, fragment: dict[str, Any]) -> None:
        """Take a fragment of a call out of a chunk."""
        index = fragment.get("index")
        identifier = fragment.get("id")
        if not is_count(index):
            self.problem("index", f"a fragment of a call has the index {short(dump(index))}")
            new = self._last < 0 or (identifier and identifier != self._calls[self._last].id)
            index = len(self._calls) if new else self._last
        if index not in self._calls and index != len(self._calls):
            self.problem("index", f"call {index} begins as number {len(self._calls)}")
        self._last = index
        self._fragment(fragment, f"call {index}", index)

    def _fragment(self, fragment: dict[str, Any], where: str, index: int) -> None:
        function = self.object(fragment.get("function", {}), f"{where}.function")
        identifier = self.string(fragment.get("id"), f"{where}.id")
        name = self.string(function.get("name"), f"{where}.function.name")
        call = self._calls.get(index)
        if call is None:
            if not identifier and not name:
                self.problem("index", f"a fragment for {where}, which was not begun")
                call = OpenCall()
            else:
                call = self.begin(identifier, name, where)
            if fragment.get("type") != "function":
                self.problem("shape", f'{where}.type is {short(dump(fragment.get("type")))}, not "function"')
            self._calls[index] = call
        else:
            self.identity(call, identifier, name, where)
            again = [("id_changed", identifier, call.id), ("name_changed", name, call.name)]
            for kind, new, was in again:
                if new and new == was:
                    self.problem(kind, f"{where}: {new!r} came again; OpenAI's SDK joins them to {was + new!r}")
        call.arguments.pieces.append(self.string(function.get("arguments"), f"{where}.function.arguments"))
