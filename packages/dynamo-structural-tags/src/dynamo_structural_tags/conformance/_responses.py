# SPDX-License-Identifier: Apache-2.0
"""Answers of `/v1/responses`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ._answer import Call
from ._reader import OpenCall, Reader, Text, dump, has_error, is_count, kind_of, short

__all__ = ["ResponsesReader"]


@dataclass
class _Item:
    """An output item of a Responses stream."""

    kind: str
    call: OpenCall = field(default_factory=OpenCall)
    item_id: str = ""
    #: The joined deltas, by content part.
    deltas: dict[int, Text] = field(default_factory=dict)
    #: The text of the events that end the parts.
    parts: dict[int, str] = field(default_factory=dict)
    #: The text of the item when it was done, and in the response at the end.
    done: str | None = None
    final: str | None = None
    summary: Text = field(default_factory=Text)

    def texts(self) -> Iterator[tuple[str, str]]:
        """Its text, from each place that has one, the one that counts last."""
        yield "the deltas", "".join(str(text) for text in self.deltas.values())
        if self.parts:
            yield "the events that end it", "".join(self.parts.values())
        if self.done is not None:
            yield "response.output_item.done", self.done
        if self.final is not None:
            yield "the response at the end", self.final

    def text(self) -> str:
        return list(self.texts())[-1][1] or str(self.summary)


class ResponsesReader(Reader):
    """`/v1/responses`.

    Of a call that is told of several times (deltas, the event that ends them, the item when it is done, the response at
    the end) the last one counts, as in OpenAI's SDK.
    """

    payload = "output"
    #: The last events, and the status that the response in them has.
    _ends: Mapping[str, str] = {
        "response.completed": "completed",
        "response.incomplete": "incomplete",
        "response.failed": "failed",
    }
    _texts: Mapping[str, str] = {
        "response.output_text": "message",
        "response.refusal": "refusal",
        "response.reasoning_text": "reasoning",
        "response.reasoning_summary_text": "summary",
        "response.function_call_arguments": "function_call",
    }

    def __init__(self) -> None:
        super().__init__()
        self._items: dict[int, _Item] = {}
        self._id: str | None = None
        self._number = -1

    def calls(self) -> list[Call]:
        return [Call(one.call.id, one.call.name, one.text()) for one in self._sorted() if one.kind == "function_call"]

    def text(self) -> str:
        return "".join(one.text() for one in self._sorted() if one.kind == "message")

    def reasoning(self) -> str:
        return "".join(one.text() for one in self._sorted() if one.kind == "reasoning")

    def _sorted(self) -> list[_Item]:
        return [item for _, item in sorted(self._items.items())]

    def plain(self, value: dict[str, Any]) -> None:
        self.expect(value, "body", id=str, object="response", model=str)
        for number, item in enumerate(value["output"]):
            self._items[number] = self._item(self.object(item, f"output[{number}]"), f"output[{number}]")
        self._status(value)
        if value.get("status") not in self._ends.values():
            self.problem("shape", f"status is {short(dump(value.get('status')))} in a plain answer")

    def event(self, name: str, value: dict[str, Any]) -> None:
        kind = value.get("type")
        if kind == "error" or name == "error" or (kind is None and has_error(value)):
            self.failed(value)
            return
        if name != kind:
            self.problem("shape", f"the event {name!r} carries the type {short(dump(kind))}")
        kind = self.string(kind, "type") or name
        if self.ended:
            self.problem("after_end", f"{kind} after the end of the response")
            return
        number = value.get("sequence_number")
        if is_count(number):
            if number <= self._number:
                self.problem("order", f"sequence_number {number} after {self._number}")
            self._number = number
        if self._id is None and kind != "response.created":
            self.problem("order", f"{kind} before response.created")
            self._id = ""
        stem, _, what = kind.rpartition(".")
        if kind in ("response.created", "response.queued", "response.in_progress") or kind in self._ends:
            self._lifecycle(kind, self.object(value.get("response"), "response"))
        elif kind == "response.output_item.added":
            self._added(value)
        elif kind == "response.output_item.done":
            self._done(value)
        elif kind == "response.content_part.added":
            item = self._of(value, kind)
            if item is not None:
                item.deltas.setdefault(_part(value), Text())
        elif stem in self._texts and what in ("delta", "done"):
            self._piece(kind, self._texts[stem], what, value)

    def finish(self) -> None:
        if self.answer.error is not None:
            return
        if not self.ended:
            self.problem("no_end", "the stream ended without response.completed")
            if not self._items or any(item.done is None for item in self._items.values()):
                self.answer.broken = "the stream ended without response.completed and inside its output"
        for index, item in sorted(self._items.items()):
            if item.kind not in ("function_call", "message"):
                continue
            (came, text), *others = item.texts()
            for where, other in others:
                if other != text:
                    self.problem("shape", f"output {index}: {came} say {short(text)}, {where} says {short(other)}")
                    break

    def _lifecycle(self, kind: str, response: dict[str, Any]) -> None:
        identifier = self.string(response.get("id"), "response.id", optional=False)
        if kind == "response.created" and self._id:
            self.problem("order", "a second response.created")
        elif self._id and identifier and identifier != self._id:
            self.problem("id_changed", f"the response's id {self._id!r} became {identifier!r}")
        self._id = self._id or identifier
        if kind not in self._ends:
            return
        self.ended = True
        self.expect(response, "response", object="response", status=self._ends[kind])
        self._status(response)
        if kind == "response.failed":
            return
        output = response.get("output")
        if not isinstance(output, list):
            self.problem("shape", f"response.output is {kind_of(output)}, not a list")
            return
        self._compare([self._item(self.object(one, "output"), "output") for one in output])
        for index, item in sorted(self._items.items()):
            if kind == "response.completed" and item.done is None and item.final is None:
                self.problem("order", f"response.completed before the end of output {index}")

    def _compare(self, final: list[_Item]) -> None:
        """Lay the output at the end over what the stream told of it."""
        for kind in ("function_call", "message", "reasoning"):
            streamed = [item for item in self._sorted() if item.kind == kind]
            whole = [item for item in final if item.kind == kind]
            if kind != "reasoning" and len(streamed) != len(whole):
                self.problem(
                    "shape", f"the response at the end has {len(whole)} outputs of {kind}, the stream {len(streamed)}"
                )
            for old, new in zip(streamed, whole, strict=False):
                old.final = new.done
                old.summary = new.summary if str(new.summary) else old.summary
                self.identity(old.call, new.call.id, new.call.name, f"a {kind} in the response at the end")
            for new in whole[len(streamed) :]:
                new.deltas[0] = Text([new.text()])  # it was said above that no event told of it
                self._items[max(self._items, default=-1) + 1] = new

    def _status(self, response: dict[str, Any]) -> None:
        self.usage(response.get("usage"), "usage")
        status = response.get("status")
        if status == "completed":
            called = any(item.kind == "function_call" for item in self._items.values())
            output = self.list(response.get("output"), "output")
            called = called or any(isinstance(one, dict) and one.get("type") == "function_call" for one in output)
            self.answer.finish = "tool_calls" if called else "stop"
        elif status == "incomplete":
            details = response.get("incomplete_details")
            reason = details.get("reason") if isinstance(details, dict) else None
            if not isinstance(reason, str):
                self.problem("shape", "an incomplete response without incomplete_details.reason")
                reason = "incomplete"
            self.answer.finish = {"max_output_tokens": "length", "max_tokens": "length"}.get(reason, reason)
        elif status == "failed":
            self.failed(response.get("error") or response)
        if status != "failed" and response.get("error") is not None:
            self.failed(response["error"])

    def _item(self, item: dict[str, Any], where: str) -> _Item:
        """Read an item that is whole."""
        kind = self.string(item.get("type"), f"{where}.type", optional=False)
        one = _Item(kind, item_id=item["id"] if isinstance(item.get("id"), str) else "")
        if kind == "function_call":
            one.call = self.begin(
                self.string(item.get("call_id"), f"{where}.call_id"),
                self.string(item.get("name"), f"{where}.name"),
                where,
            )
            one.done = self.string(item.get("arguments"), f"{where}.arguments", optional=False)
        elif kind == "message":
            self.expect(item, where, role="assistant")
            one.done = self._joined(item.get("content"), "output_text", f"{where}.content")
        elif kind == "reasoning":
            one.done = self._joined(item.get("content"), "reasoning_text", f"{where}.content")
            one.summary.pieces.append(self._joined(item.get("summary"), "summary_text", f"{where}.summary"))
        else:
            one.done = ""
        return one

    def _joined(self, parts: Any, kind: str, where: str) -> str:
        found = [part for part in self.list(parts, where) if isinstance(part, dict) and part.get("type") == kind]
        return "".join(self.string(part.get("text"), f"{where}.text", optional=False) for part in found)

    def _added(self, value: dict[str, Any]) -> None:
        index, item = value.get("output_index"), self.object(value.get("item"), "item")
        if not is_count(index) or index in self._items or index != len(self._items):
            self.problem("index", f"output {short(dump(index))} begins as number {len(self._items)}")
        if not is_count(index) or index in self._items:
            index = max(self._items, default=-1) + 1
        kind = self.string(item.get("type"), "item.type", optional=False)
        one = _Item(kind, item_id=item["id"] if isinstance(item.get("id"), str) else "")
        if kind == "function_call":
            identifier = self.string(item.get("call_id"), "item.call_id")
            one.call = self.begin(identifier, self.string(item.get("name"), "item.name"), f"output {index}")
            begun = self.string(item.get("arguments"), "item.arguments")
            if begun:
                one.deltas[0] = Text([begun])
        self._items[index] = one

    def _done(self, value: dict[str, Any]) -> None:
        index, item = value.get("output_index"), self.object(value.get("item"), "item")
        whole = self._item(item, f"output {short(dump(index))}")
        if not is_count(index) or index not in self._items:
            self.problem("index", f"output {short(dump(index))} is done, and was not begun")
            self._items[index if is_count(index) else max(self._items, default=-1) + 1] = whole
            return
        one = self._items[index]
        if one.done is not None:
            self.problem("order", f"output {index} is done twice")
        if one.kind != whole.kind:
            self.problem("shape", f"output {index} begins as {one.kind!r} and is done as {whole.kind!r}")
            return
        if one.item_id and whole.item_id and one.item_id != whole.item_id:
            self.problem("id_changed", f"output {index}: {one.item_id!r} became {whole.item_id!r}")
        if one.call == OpenCall():  # it was not begun
            one.call = whole.call
        self.identity(one.call, whole.call.id, whole.call.name, f"output {index}")
        one.done, one.summary = whole.done, whole.summary if str(whole.summary) else one.summary

    def _of(self, value: dict[str, Any], kind: str) -> _Item | None:
        """Return the item that an event is about."""
        index = value.get("output_index")
        item = self._items.get(index) if is_count(index) else None
        if item is None:
            self.problem("index", f"{kind} for output {short(dump(index))}, which was not begun")
        elif item.done is not None:
            self.problem("order", f"{kind} for output {index} after its end")
        elif item.item_id and isinstance(value.get("item_id"), str) and value["item_id"] != item.item_id:
            self.problem(
                "index", f"{kind} for output {index} names the item {value['item_id']!r}, not {item.item_id!r}"
            )
        return item

    def _piece(self, kind: str, about: str, what: str, value: dict[str, Any]) -> None:
        item = self._of(value, kind)
        if item is None:
            index = value.get("output_index")
            if not is_count(index):
                return
            item = self._items[index] = _Item({"refusal": "message", "summary": "reasoning"}.get(about, about))
        wanted = {"refusal": "message", "summary": "reasoning"}.get(about, about)
        if item.kind != wanted:
            self.problem("shape", f"{kind} for output {value.get('output_index')}, which is of the type {item.kind!r}")
            return
        key = "delta" if what == "delta" else "arguments" if about == "function_call" else "text"
        if about == "refusal":
            return
        text = self.string(value.get(key), f"{kind}.{key}", optional=False)
        part = _part(value)
        if about == "summary":
            if what == "delta":
                item.summary.pieces.append(text)
        elif what == "done":
            item.parts[part] = text
        else:
            if about == "message" and part not in item.deltas:
                self.problem("order", f"{kind} for a part of output {value.get('output_index')} that was not begun")
            if part in item.parts:
                self.problem("order", f"{kind} for output {value.get('output_index')} after its text was done")
            item.deltas.setdefault(part, Text()).pieces.append(text)


def _part(value: dict[str, Any]) -> int:
    """Return the number of the part that an event of Responses is about; calls have one part and no numbers."""
    part = value.get("content_index")
    return part if is_count(part) else 0
