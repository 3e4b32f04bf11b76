# SPDX-License-Identifier: Apache-2.0
"""The faults of the cases about protocols, choices and turns, a class each; see `faulty_tool_server`.

They are as narrow as real ones are: most show only where several things come together.
"""

from __future__ import annotations

import html
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

from .faulty_tool_server import Asked, Delta, Event, Fault, Refusal, Reply, Said, SaidCall, fault


def _named(asked: Asked) -> str | None:
    """The name of the tool that a choice names."""
    function = asked.choice.get("function", asked.choice) if isinstance(asked.choice, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def _of_role(asked: Asked, role: str) -> list[Mapping[str, Any]]:
    return [message for message in asked.messages if isinstance(message, Mapping) and message.get("role") == role]


def _earlier_calls(asked: Asked) -> list[Mapping[str, Any]]:
    """The calls in the history."""
    calls = [call for message in _of_role(asked, "assistant") for call in message.get("tool_calls") or ()]
    return [
        call["function"] for call in calls if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)
    ]


def _functions(asked: Asked) -> list[Mapping[str, Any]]:
    functions = [tool.get("function") for tool in asked.tools if isinstance(tool, Mapping)]
    return [function for function in functions if isinstance(function, Mapping)]


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _rewritten(deltas: list[Delta], change: Callable[[str], str]) -> list[Delta]:
    """Each call's arguments changed, in one fragment; untouched where the change changes nothing."""
    texts: dict[int, str] = {}
    for delta in deltas:
        if delta.kind == "arguments":
            texts[delta.call] = texts.get(delta.call, "") + delta.text
    changed = {call: change(text) for call, text in texts.items() if change(text) != text}
    kept = []
    for delta in deltas:
        if delta.kind == "arguments" and delta.call in changed:
            continue
        kept.append(delta)
        if delta.kind == "begin" and changed.get(delta.call):
            kept.append(Delta("arguments", changed[delta.call], call=delta.call))
    return kept


def _chat_calls(events: list[Event]) -> Iterator[dict[str, Any]]:
    """The pieces of calls in the chunks of chat completions."""
    for event in events:
        for choice in event.choices:
            yield from choice["delta"].get("tool_calls", ())


def _has_calls(deltas: list[Delta]) -> bool:
    return any(delta.kind == "begin" for delta in deltas)


def _only_text(said: Said, text: str) -> Said:
    return replace(said, text=text, calls=(), finish="stop", error=None)


# ---------------------------------------------------------------------------------------------------------------------
# Streams


@fault("streams/repeated-words")
class EqualFragmentsOnce(Fault):
    """Sends a fragment that equals those before it once."""

    def deltas(self, asked: Asked, deltas: list[Delta]) -> list[Delta]:
        return _rewritten(deltas, lambda text: re.sub(r"\b(\w+)( \1){4,}\b", r"\1", text))


@fault("streams/split-characters")
class HalvesOfHangul(Fault):
    """Decodes a token at a time, so that a syllable of two tokens becomes U+FFFD."""

    def deltas(self, asked: Asked, deltas: list[Delta]) -> list[Delta]:
        return _rewritten(deltas, lambda text: re.sub("[가-힣] ", "\ufffd ", text))


@fault("streams/closing-braces")
class LosesTheLastBrace(Fault):
    """Loses the last of exactly four closing braces, where each object has one key."""

    def deltas(self, asked: Asked, deltas: list[Delta]) -> list[Delta]:
        return _rewritten(deltas, lambda text: text[:-1] if re.fullmatch(r'(\{"\w+": ){4}"\w+"\}{4}', text) else text)


@fault("streams/id-present")
class NoIdsUnderRequired(Fault):
    """Leaves out the ids of calls that `required` made."""

    def deltas(self, asked: Asked, deltas: list[Delta]) -> list[Delta]:
        if asked.choice != "required":
            return deltas
        return [replace(delta, id="") for delta in deltas]


@fault("streams/id-unchanged")
class AnIdForEachFragment(Fault):
    """Makes up a new id for each fragment, or for the response at the end, which it reads anew."""

    apis = ("chat", "responses")

    def events(self, asked: Asked, events: list[Event]) -> list[Event]:
        for i, call in enumerate(_chat_calls(events)):
            if "id" not in call:
                call["id"] = f"call_fragment{i}"
        for event in events:
            if event.name == "response.completed":
                for item in event.data["response"]["output"]:
                    if "call_id" in item:
                        item["call_id"] += "end"
        return events


@fault("streams/name-once")
class TheNameInEachFragment(Fault):
    """Repeats the tool's name with each fragment."""

    apis = ("chat",)

    def events(self, asked: Asked, events: list[Event]) -> list[Event]:
        names: dict[int, str] = {}
        for call in _chat_calls(events):
            call["function"]["name"] = names.setdefault(call["index"], call["function"].get("name", ""))
        return events


@fault("streams/index")
class CountsFromOne(Fault):
    """Begins to count calls with 1."""

    apis = ("chat",)

    def events(self, asked: Asked, events: list[Event]) -> list[Event]:
        calls = list(_chat_calls(events))
        if len({call["index"] for call in calls}) == 1:
            for call in calls:
                call["index"] += 1
        return events


@fault("streams/finish-says-calls")
class StopAfterStreamedCalls(Fault):
    """Ends a stream with calls that `required` made with `stop`."""

    apis = ("chat", "messages")

    def deltas(self, asked: Asked, deltas: list[Delta]) -> list[Delta]:
        if asked.choice != "required":
            return deltas
        return [replace(d, text="stop") if d.kind == "finish" and d.text == "tool_calls" else d for d in deltas]


@fault("streams/finish-equals-plain")
class StopAfterStreamedCallsOfItsOwn(Fault):
    """Ends a stream with calls that nobody demanded with `stop`."""

    apis = ("chat", "messages")

    def deltas(self, asked: Asked, deltas: list[Delta]) -> list[Delta]:
        if asked.choice not in (None, "auto"):
            return deltas
        return [replace(d, text="stop") if d.kind == "finish" and d.text == "tool_calls" else d for d in deltas]


@fault("streams/name-with-dash")
class DashesBecomeUnderscores(Fault):
    """Writes underscores for the dashes of a tool's name in a stream."""

    def deltas(self, asked: Asked, deltas: list[Delta]) -> list[Delta]:
        return [replace(delta, name=delta.name.replace("-", "_")) for delta in deltas]


@fault("streams/finish-present")
class NoFinishReason(Fault):
    """Leaves out the finish reason after a call that was named."""

    apis = ("chat", "messages")

    def events(self, asked: Asked, events: list[Event]) -> list[Event]:
        if _named(asked) is None:
            return events
        for event in events:
            for choice in event.choices:
                if choice["finish_reason"] == "tool_calls":
                    choice["finish_reason"] = None
            if event.name == "message_delta" and event.data["delta"]["stop_reason"] == "tool_use":
                event.data["delta"]["stop_reason"] = None
        return events


@fault("streams/finish-once")
class FinishesTwice(Fault):
    """Sends the finish reason twice."""

    apis = ("chat",)

    def events(self, asked: Asked, events: list[Event]) -> list[Event]:
        at = [i for i, event in enumerate(events) if any(choice["finish_reason"] for choice in event.choices)]
        return events[: at[0] + 1] + events[at[0] :] if at else events


@fault("streams/finish-last")
class ArgumentsAfterTheEnd(Fault):
    """Sends the last fragment of the arguments after the finish reason."""

    apis = ("chat",)

    def deltas(self, asked: Asked, deltas: list[Delta]) -> list[Delta]:
        pieces = [i for i, delta in enumerate(deltas) if delta.kind == "arguments"]
        finish = [i for i, delta in enumerate(deltas) if delta.kind == "finish"]
        if not pieces or not finish:
            return deltas
        last, end = pieces[-1], finish[0]
        return [*deltas[:last], *deltas[last + 1 : end + 1], deltas[last], *deltas[end + 1 :]]


@fault("streams/end-marker")
class NoEnd(Fault):
    """Does not mark the end of a stream after a call that was named and is whole."""

    def deltas(self, asked: Asked, deltas: list[Delta]) -> list[Delta]:
        if _named(asked) is None or not any(d.kind == "finish" and d.text == "tool_calls" for d in deltas):
            return deltas
        return [delta for delta in deltas if delta.kind != "done"]


@fault("streams/order")
class EventsInDisorder(Fault):
    """Ends a call before its arguments are said to be done."""

    apis = ("responses", "messages")

    def events(self, asked: Asked, events: list[Event]) -> list[Event]:
        for i, event in enumerate(events[:-1]):
            if event.name == "response.function_call_arguments.done":
                events[i : i + 2] = [events[i + 1], event]
            elif event.name == "content_block_stop" and events[i + 1].name == "message_delta":
                events[i : i + 2] = [events[i + 1], event]
                break
        return events


@fault("streams/event-names")
class EventsWithoutNames(Fault):
    """Sends events without their names."""

    apis = ("messages",)

    def events(self, asked: Asked, events: list[Event]) -> list[Event]:
        return [Event(None, event.data) for event in events]


@fault("streams/done-equals-deltas")
class LosesTheLastDelta(Fault):
    """Loses the last fragment of the arguments, though the item at the end has them whole."""

    apis = ("responses",)

    def events(self, asked: Asked, events: list[Event]) -> list[Event]:
        at = [i for i, event in enumerate(events) if event.name == "response.function_call_arguments.delta"]
        return events[: at[-1]] + events[at[-1] + 1 :] if at else events


@fault("streams/content-type")
class LabelledAsText(Fault):
    """Labels a stream of events as plain text."""

    def reply(self, asked: Asked, reply: Reply) -> Reply:
        if not reply.headers.get("content-type", "").startswith("text/event-stream"):
            return reply
        return replace(reply, headers={**reply.headers, "content-type": "text/plain"})


@fault("streams/events-are-json")
class KeepAliveAsData(Fault):
    """Sends keep-alives as data instead of as comments."""

    def events(self, asked: Asked, events: list[Event]) -> list[Event]:
        return [*events[:2], Event(None, "keep-alive"), *events[2:]]


@fault("streams/arguments-are-text")
class ArgumentsAsObject(Fault):
    """Sends arguments of a few words as an object."""

    apis = ("chat",)

    def events(self, asked: Asked, events: list[Event]) -> list[Event]:
        texts: dict[int, str] = {}
        for call in _chat_calls(events):
            texts[call["index"]] = texts.get(call["index"], "") + call["function"]["arguments"]
        for index, text in texts.items():
            if not re.fullmatch(r'\{"\w+": "[a-z ]+"\}', text):
                continue
            for call in _chat_calls(events):
                if call["index"] == index:
                    call["function"]["arguments"] = json.loads(text) if "name" in call["function"] else ""
        return events


@fault("streams/type-of-a-call")
class CallsWithoutType(Fault):
    """Leaves out the type of a call."""

    apis = ("chat",)

    def whole(self, asked: Asked, body: dict[str, Any]) -> dict[str, Any]:
        for call in body["choices"][0]["message"].get("tool_calls", ()):
            del call["type"]
        return body


@fault("streams/no-markup-beside-call")
class TheTextOfCallsToo(Fault):
    """Gives the model's text of a call that was named as content, beside the call."""

    def answer(self, asked: Asked, said: Said) -> Said:
        if _named(asked) is None or said.finish != "tool_calls":
            return said
        text = "".join(f'<tool_call>{{"name": "{c.name}", "arguments": {c.arguments}}}</tool_call>' for c in said.calls)
        return replace(said, text=said.text + text)


@fault("streams/text-before-call")
class DropsTextBeforeCalls(Fault):
    """Drops what was said before a call."""

    def deltas(self, asked: Asked, deltas: list[Delta]) -> list[Delta]:
        return [delta for delta in deltas if delta.kind != "text"] if _has_calls(deltas) else deltas


@fault("streams/text-equals-plain")
class LosesBlankLines(Fault):
    """Loses blank lines of a text."""

    def deltas(self, asked: Asked, deltas: list[Delta]) -> list[Delta]:
        text = "".join(delta.text for delta in deltas if delta.kind == "text")
        if "\n\n" not in text:
            return deltas
        kept = [delta for delta in deltas if delta.kind != "text"]
        at = next(i for i, delta in enumerate(kept) if delta.kind in ("begin", "finish", "error"))
        return [*kept[:at], Delta("text", text.replace("\n\n", "\n")), *kept[at:]]


@fault("streams/role")
class TextWithoutRole(Fault):
    """Leaves out the role of a text."""

    apis = ("chat",)

    def events(self, asked: Asked, events: list[Event]) -> list[Event]:
        if not any(_chat_calls(events)):
            for event in events:
                for choice in event.choices:
                    choice["delta"].pop("role", None)
        return events


@fault("streams/refusal-is-seen")
class RefusesSilently(Fault):
    """Ends the stream of a request whose reference leads nowhere as an empty answer."""

    def __init__(self) -> None:
        self._refused: list[Mapping[str, Any]] = []

    def refusal(self, asked: Asked, refusal: Refusal | None) -> Refusal | None:
        if not asked.stream or refusal is None or not refusal.path.endswith("$ref"):
            return refusal
        self._refused.append(asked.body)
        return None

    def answer(self, asked: Asked, said: Said) -> Said:
        return _only_text(said, "") if asked.body in self._refused else said


# ---------------------------------------------------------------------------------------------------------------------
# Choices


@fault("choice/auto-calls")
class ToolsNeedADescription(Fault):
    """Shows the model no tool that has no description, unless a call is forced."""

    def answer(self, asked: Asked, said: Said) -> Said:
        described = [function["name"] for function in _functions(asked) if function.get("description")]
        hidden = any(call.name not in described for call in said.calls)
        return _only_text(said, "I have no such tool.") if hidden and asked.choice in (None, "auto") else said


@fault("choice/auto-answers")
class AutoIsRequired(Fault):
    """Takes `auto`, where it is written out, for `required`."""

    def answer(self, asked: Asked, said: Said) -> Said:
        if asked.choice != "auto" or said.calls or not asked.names:
            return said
        return replace(said, text="", calls=(SaidCall("call_auto00001", asked.names[0], "{}"),), finish="tool_calls")


@fault("choice/required-calls")
class RequiredIsAuto(Fault):
    """Takes `required` for `auto` where there are two tools to choose from."""

    def answer(self, asked: Asked, said: Said) -> Said:
        return _only_text(said, "Good evening.") if asked.choice == "required" and len(asked.tools) == 2 else said


@fault("choice/named-calls-that")
class NamedIsRequired(Fault):
    """Takes a named choice of two tools for `required`, and calls the first one."""

    def answer(self, asked: Asked, said: Said) -> Said:
        if _named(asked) is None or len(asked.names) != 2 or asked.messages[-1].get("role") != "user":
            return said
        return said.map_calls(lambda call: replace(call, name=asked.names[0]))


@fault("choice/named-finish")
class EndTurnAfterNamedCalls(Fault):
    """Says `end_turn` after a call that was named."""

    apis = ("messages",)

    def whole(self, asked: Asked, body: dict[str, Any]) -> dict[str, Any]:
        if _named(asked) is not None and body["stop_reason"] == "tool_use":
            body["stop_reason"] = "end_turn"
        return body


@fault("choice/required-finish")
class StopAfterCalls(Fault):
    """Ends a plain answer with calls that `required` made with `stop`."""

    apis = ("chat", "messages")

    def answer(self, asked: Asked, said: Said) -> Said:
        wrong = not asked.stream and asked.choice == "required" and said.finish == "tool_calls"
        return replace(said, finish="stop") if wrong else said


@fault("choice/none-never-calls")
class NoneIsAuto(Fault):
    """Takes `none` for `auto`."""

    def answer(self, asked: Asked, said: Said) -> Said:
        if asked.choice != "none":
            return said
        return replace(said, calls=(SaidCall("call_none00001", asked.names[0], "{}"),), finish="tool_calls")


@fault("choice/none-leaks-no-markup")
class NoneReadsNoCalls(Fault):
    """Under `none` lets the model see the tools, and reads no calls."""

    def answer(self, asked: Asked, said: Said) -> Said:
        if asked.choice != "none":
            return said
        return replace(
            said, text=f'{said.text}<tool_call>{{"name": "{asked.names[0]}", "arguments": {{}}}}</tool_call>'
        )


@fault("choice/none-after-calls")
class NoneRefusesCalls(Fault):
    """Refuses a history with calls where there are several tools and none may be called."""

    def refusal(self, asked: Asked, refusal: Refusal | None) -> Refusal | None:
        if refusal is None and asked.choice == "none" and len(asked.tools) > 1 and _earlier_calls(asked):
            return Refusal("messages", "calls may not be given under tool_choice none")
        return refusal


@fault("choice/unknown-name")
class IgnoresUnknownNames(Fault):
    """Ignores a choice that names no declared tool."""

    def refusal(self, asked: Asked, refusal: Refusal | None) -> Refusal | None:
        return None if refusal is not None and refusal.reason.startswith("no tool ") else refusal


@fault("choice/beside-a-format")
class TheFormatWins(Fault):
    """Writes the answer in the format that is asked for its text, where a call is required."""

    apis = ("chat",)

    def answer(self, asked: Asked, said: Said) -> Said:
        return _only_text(said, '{"sky": "clear"}') if asked.tools and asked.body.get("response_format") else said


@fault("choice/many-tools")
class AtMost32Tools(Fault):
    """Shows the model the first 32 tools."""

    def answer(self, asked: Asked, said: Said) -> Said:
        late = asked.names[32:]
        return _only_text(said, "I have no such tool.") if any(call.name in late for call in said.calls) else said


# ---------------------------------------------------------------------------------------------------------------------
# Several calls


@fault("parallel/two-tools")
class TheFirstCallOnly(Fault):
    """Reads the first of two calls."""

    def answer(self, asked: Asked, said: Said) -> Said:
        two = len(said.calls) == 2 and len({call.name for call in said.calls}) == 2
        return replace(said, calls=said.calls[:1]) if two and said.error is None else said


@fault("parallel/same-tool")
class OneCallForEachTool(Fault):
    """Takes a second call of a tool, with another value, for a correction of the first."""

    def answer(self, asked: Asked, said: Said) -> Said:
        if len(said.calls) != 2 or said.calls[0].name != said.calls[1].name:
            return said
        one, other = (call.value for call in said.calls)
        differ = sum(one[key] != other.get(key) for key in one)
        return replace(said, calls=said.calls[1:]) if differ == 1 else said


@fault("parallel/order")
class SortedCalls(Fault):
    """Sorts calls of several tools by their names."""

    def answer(self, asked: Asked, said: Said) -> Said:
        if len({call.name for call in said.calls}) < 3:
            return said
        return replace(said, calls=tuple(sorted(said.calls, key=lambda call: call.name)))


@fault("parallel/index")
class TheSameIndex(Fault):
    """Gives each of three calls of a tool the same index."""

    def deltas(self, asked: Asked, deltas: list[Delta]) -> list[Delta]:
        if len(asked.tools) > 1 or sum(delta.kind == "begin" for delta in deltas) < 3:
            return deltas
        return [replace(delta, call=0) for delta in deltas]

    def events(self, asked: Asked, events: list[Event]) -> list[Event]:
        begun = [event.data for event in events if event.name in ("response.output_item.added", "content_block_start")]
        if len(asked.tools) > 1 or len(begun) < 3:
            return events
        for event in events:
            for key in ("output_index", "index"):
                if key in event.data:
                    event.data[key] = 0
        return events


@fault("parallel/ids-distinct")
class IdsOfContent(Fault):
    """Makes ids of a call's content."""

    def answer(self, asked: Asked, said: Said) -> Said:
        if len(said.calls) < 2:
            return said
        return said.map_calls(lambda c: replace(c, id=f"call_{zlib.crc32((c.name + c.arguments).encode()):08x}"))


@fault("parallel/arguments-apart")
class LeftOverArguments(Fault):
    """Keeps the last argument of a call for the next one."""

    def answer(self, asked: Asked, said: Said) -> Said:
        if len(said.calls) < 2 or any(len(call.value) < 2 for call in said.calls):
            return said
        key, value = list(said.calls[0].value.items())[-1]
        return said.map_calls(lambda call: replace(call, arguments=json.dumps({**call.value, key: value})))


def _for_each(asked: Asked, said: Said) -> Said:
    """A second call with another member of the enumeration that the first argument is taken from, if it is."""
    for call in said.calls:
        schemas = list(_properties(asked.schema(call.name)).items())
        key, schema = schemas[0] if schemas else ("", {})
        others = [member for member in schema.get("enum", ()) if member != call.value.get(key)]
        if others:
            more = SaidCall(f"{call.id}b", call.name, json.dumps({**call.value, key: others[0]}))
            return replace(said, calls=(*said.calls, more))
    return said


@fault("parallel/off-required")
class SeveralRequiredCalls(Fault):
    """Ignores `parallel_tool_calls: false` under `required`, where an enumeration has several members to call with."""

    def answer(self, asked: Asked, said: Said) -> Said:
        return _for_each(asked, said) if not asked.parallel and asked.choice == "required" else said


@fault("parallel/off-auto")
class SeveralCalls(Fault):
    """Ignores `parallel_tool_calls: false` under `auto`."""

    def answer(self, asked: Asked, said: Said) -> Said:
        return _for_each(asked, said) if not asked.parallel and asked.choice in (None, "auto") else said


# ---------------------------------------------------------------------------------------------------------------------
# Strict


def _strict(asked: Asked, name: str) -> bool | None:
    """What a tool says of `strict`."""
    return next((function.get("strict") for function in _functions(asked) if function.get("name") == name), None)


@fault("strict/schema-holds")
class StrictIsIgnored(Fault):
    """Lets the model write what it likes for the last of several enumerations of a strict tool."""

    def answer(self, asked: Asked, said: Said) -> Said:
        def change(call: SaidCall) -> SaidCall:
            properties = _properties(asked.schema(call.name))
            enums = [key for key, schema in properties.items() if "enum" in schema]
            if _strict(asked, call.name) is not True or len(enums) < 2:
                return call
            return replace(call, arguments=json.dumps({**call.value, enums[-1]: "blue"}))

        return said.map_calls(change)


@fault("strict/no-further-keys")
class FurtherKeys(Fault):
    """Lets the model add a key to the only one of a strict tool, a choice of two words."""

    def answer(self, asked: Asked, said: Said) -> Said:
        def change(call: SaidCall) -> SaidCall:
            properties = list(_properties(asked.schema(call.name)).values())
            of_two = [len(schema.get("enum", ())) for schema in properties] == [2]
            if _strict(asked, call.name) is not True or not of_two:
                return call
            return replace(call, arguments=json.dumps({**call.value, "comment": "done"}))

        return said.map_calls(change)


@fault("strict/required-incomplete")
class FailsOnOptional(Fault):
    """Fails on a strict tool that has an optional argument."""

    def refusal(self, asked: Asked, refusal: Refusal | None) -> Refusal | None:
        for function in _functions(asked):
            schema = asked.schema(str(function.get("name")))
            if function.get("strict") is True and set(_properties(schema)) - set(schema.get("required", ())):
                return Refusal("", "KeyError", 500)
        return refusal


@fault("strict/not-strict-is-json")
class WritesPython(Fault):
    """Writes the arguments of a tool that is not strict as Python."""

    def answer(self, asked: Asked, said: Said) -> Said:
        if _named(asked) is None:
            return said
        return said.map_calls(
            lambda call: replace(call, arguments=repr(call.value)) if _strict(asked, call.name) is False else call
        )


@fault("strict/optional-stays-out")
class FillsIn(Fault):
    """Fills in the arguments that the model left out of a call of a tool that is not strict."""

    def answer(self, asked: Asked, said: Said) -> Said:
        def change(call: SaidCall) -> SaidCall:
            missing = [key for key in _properties(asked.schema(call.name)) if key not in call.value]
            if _strict(asked, call.name) is not False or not missing:
                return call
            return replace(call, arguments=json.dumps({**call.value, **dict.fromkeys(missing)}))

        return said.map_calls(change)


@fault("strict/mixed")
class AllStrictOrNone(Fault):
    """Refuses tools of which some are strict."""

    def refusal(self, asked: Asked, refusal: Refusal | None) -> Refusal | None:
        if {True, False} <= {function.get("strict") for function in _functions(asked)}:
            return Refusal("tools", "all tools have to be strict, or none")
        return refusal


@fault("strict/boolean-schema")
class FailsOnBooleanSchemas(Fault):
    """Fails where a property's schema is a boolean."""

    def refusal(self, asked: Asked, refusal: Refusal | None) -> Refusal | None:
        schemas = [asked.schema(name) for name in asked.names]
        if len(schemas) > 1 and any(schema is True for each in schemas for schema in _properties(each).values()):
            return Refusal("", "AttributeError: 'bool' object has no attribute 'get'", 500)
        return refusal


# ---------------------------------------------------------------------------------------------------------------------
# Undeclared tools


def _is_known(asked: Asked, said: Said) -> bool:
    """Whether the history holds a call of a tool that the model calls."""
    earlier = [function.get("name") for function in _earlier_calls(asked)]
    return any(call.name in earlier for call in said.calls)


@fault("undeclared/passed-on")
class PassesOn(Fault):
    """Passes on calls of tools that were never declared, in plain answers."""

    def answer(self, asked: Asked, said: Said) -> Said:
        return replace(said, error=None) if not asked.stream and not _is_known(asked, said) else said


@fault("undeclared/passed-on-in-a-stream")
class StreamsUndeclaredCalls(Fault):
    """Passes on calls of tools that were never declared, in streams."""

    def answer(self, asked: Asked, said: Said) -> Said:
        return replace(said, error=None) if asked.stream and not _is_known(asked, said) else said


@fault("undeclared/dropped")
class DropsUndeclaredCalls(Fault):
    """Drops calls of tools that are not declared any more."""

    def answer(self, asked: Asked, said: Said) -> Said:
        return _only_text(said, "") if said.error is not None and _is_known(asked, said) else said


@fault("undeclared/without-tools")
class CallsWithoutTools(Fault):
    """Reads calls where the request declares no tools."""

    def answer(self, asked: Asked, said: Said) -> Said:
        if asked.tools or not said.text:
            return said
        return replace(said, calls=(SaidCall("call_none00002", "bind_book", "{}"),))


# ---------------------------------------------------------------------------------------------------------------------
# Reasoning


@fault("reasoning/not-in-text")
class ReasoningInTheText(Fault):
    """Repeats the reasoning, in its markers, as text where no tools are declared."""

    def answer(self, asked: Asked, said: Said) -> Said:
        if asked.tools or not said.reasoning or not said.text:
            return said
        return replace(said, text=f"<think>{said.reasoning}</think>{said.text}")


@fault("reasoning/text-arrives")
class LosesTextInThePieceOfTheMarker(Fault):
    """Loses a word that comes in one piece with the end of the reasoning."""

    def deltas(self, asked: Asked, deltas: list[Delta]) -> list[Delta]:
        text = "".join(delta.text for delta in deltas if delta.kind == "text")
        if " " in text or not any(delta.kind == "reasoning" for delta in deltas):
            return deltas
        return [delta for delta in deltas if delta.kind != "text"]


@fault("reasoning/same-in-a-stream")
class LosesLinesOfReasoning(Fault):
    """Loses line breaks of the reasoning in a stream."""

    def deltas(self, asked: Asked, deltas: list[Delta]) -> list[Delta]:
        return [replace(d, text=d.text.replace("\n", "")) if d.kind == "reasoning" else d for d in deltas]


@fault("reasoning/call-in-reasoning")
class ReadsCallsInReasoning(Fault):
    """Reads calls in the reasoning."""

    def answer(self, asked: Asked, said: Said) -> Said:
        found = re.search(r"\b(\w+) with (\{.*?\})", said.reasoning)
        if found is None or found[1] not in asked.names:
            return said
        return replace(said, calls=(SaidCall("call_thought1", found[1], found[2]), *said.calls), finish="tool_calls")


@fault("reasoning/call-after")
class NamedCallsStayInTheText(Fault):
    """Reads no call that was named after the reasoning."""

    def answer(self, asked: Asked, said: Said) -> Said:
        if _named(asked) is None or not said.reasoning or not said.calls:
            return said
        return _only_text(said, said.calls[0].arguments)


@fault("reasoning/auto-call-after")
class LosesCallsAfterReasoning(Fault):
    """Loses calls after the reasoning in a stream."""

    def answer(self, asked: Asked, said: Said) -> Said:
        lost = asked.stream and _named(asked) is None and said.reasoning and said.calls
        return _only_text(said, "") if lost else said


@fault("reasoning/kept-beside-call")
class ForgetsReasoning(Fault):
    """Gives no reasoning beside a call in a plain answer."""

    def answer(self, asked: Asked, said: Said) -> Said:
        return replace(said, reasoning="") if said.calls and not asked.stream else said


@fault("reasoning/cut")
class CutReasoningIsText(Fault):
    """Gives reasoning that the token limit cut as text."""

    def answer(self, asked: Asked, said: Said) -> Said:
        if said.finish != "length" or not said.reasoning or said.text:
            return said
        return replace(said, reasoning="", text=said.reasoning)


@fault("reasoning/history")
class RefusesReasoning(Fault):
    """Refuses reasoning in the history."""

    apis = ("chat",)

    def refusal(self, asked: Asked, refusal: Refusal | None) -> Refusal | None:
        if any("reasoning_content" in message for message in _of_role(asked, "assistant")):
            return Refusal("messages", "reasoning_content: extra inputs are not permitted")
        return refusal


# ---------------------------------------------------------------------------------------------------------------------
# Malformed requests


def _schema_path(refusal: Refusal, key: str) -> bool:
    """Whether a refusal is about a keyword of a property's schema."""
    return ".properties." in refusal.path and refusal.path.endswith(f".{key}")


def _tool_path(refusal: Refusal, key: str) -> bool:
    """Whether a refusal is about a field of a tool, under any API's name."""
    return re.fullmatch(rf"tools\[\d+\](\.function)?\.{key}", refusal.path) is not None


#: What the APIs call a tool's schema.
_SCHEMA = "(parameters|input_schema)"
#: What tells the refusal of each malformation, and what becomes of it: None, and it is served; a status.
_MALFORMED: Mapping[str, tuple[Callable[[Refusal], bool], int | None]] = {
    "name-missing": (lambda r: _tool_path(r, "name") and r.reason == "is missing", None),
    "name-with-blank": (lambda r: _tool_path(r, "name") and r.reason.startswith("must be 1 to"), None),
    "name-twice": (lambda r: r.reason.endswith("is declared twice"), None),
    "parameters-no-object": (lambda r: _tool_path(r, _SCHEMA) and r.reason.startswith("must be a JSON Schema"), 500),
    "parameters-of-an-array": (
        lambda r: _tool_path(r, rf"{_SCHEMA}(\.type)?") and not r.reason.startswith("must be a JSON Schema"),
        None,
    ),
    "property-no-schema": (lambda r: r.reason.startswith("must be a JSON Schema (an object, true"), 500),
    "unknown-type": (lambda r: _schema_path(r, "type"), None),
    "required-no-list": (lambda r: _schema_path(r, "required"), 500),
    "enum-empty": (lambda r: _schema_path(r, "enum"), None),
    "reference-nowhere": (lambda r: _schema_path(r, "$ref") and "at nothing" in r.reason, 500),
    "reference-abroad": (lambda r: _schema_path(r, "$ref") and "outside" in r.reason, None),
    "pattern-broken": (lambda r: _schema_path(r, "pattern"), 500),
    "bounds-contradict": (lambda r: r.reason.startswith("no integer is within"), None),
    "tool-type": (lambda r: r.reason.startswith("must be 'function', not"), None),
    "tools-no-list": (lambda r: r.path == "tools", 500),
    "choice-word": (lambda r: r.reason.startswith("must be auto, required"), None),
    "choice-without-tools": (lambda r: r.reason.endswith("declares no tools"), None),
    "parallel-word": (lambda r: r.path == "parallel_tool_calls", None),
    "no-json": (lambda r: r.path == "body", 500),
    "messages-missing": (lambda r: r.path in ("messages", "input") and r.reason == "is missing", None),
    "messages-empty": (lambda r: r.reason == "must not be empty", 500),
    "role-unknown": (lambda r: r.path.endswith(".role"), None),
    "content-number": (lambda r: r.path.endswith(".content"), 500),
    "result-without-id": (lambda r: r.path.endswith(".tool_call_id") and r.reason == "is missing", None),
    "result-without-call": (lambda r: r.reason.startswith("no call "), None),
    "history-arguments": (lambda r: r.path.endswith(".arguments"), 500),
    "max-tokens": (lambda r: r.path.startswith("max_"), None),
    "temperature": (lambda r: r.path == "temperature", 400),
    "model": (lambda r: r.path == "model", None),
}


class TakesMalformedRequests(Fault):
    """Serves one kind of malformed request, fails on it, or does not say what is wrong."""

    name: ClassVar[str]

    def refusal(self, asked: Asked, refusal: Refusal | None) -> Refusal | None:
        meant, status = _MALFORMED[self.name.partition("/")[2]]
        if refusal is None or not meant(refusal):
            return refusal
        if self.name.endswith("nowhere") and asked.stream:
            return refusal
        return None if status is None else Refusal("", "the request cannot be served", status)


for _name in _MALFORMED:
    fault(f"malformed/{_name}")(TakesMalformedRequests)


# ---------------------------------------------------------------------------------------------------------------------
# Turns


@fault("turns/ids-round-trip")
class ForgetsItsIds(Fault):
    """Refuses ids of its own making where no further call may be made."""

    def refusal(self, asked: Asked, refusal: Refusal | None) -> Refusal | None:
        ids = [str(message.get("tool_call_id")) for message in _of_role(asked, "tool")]
        if asked.choice == "none" and any(re.fullmatch(r"call_[0-9a-f]{8}_\d+", each) for each in ids):
            return Refusal("messages", f"no call {ids[0]} is known")
        return refusal


@fault("turns/second-call")
class NamedOnlyAfterTheUser(Fault):
    """Heeds a named choice only where the user spoke last."""

    def answer(self, asked: Asked, said: Said) -> Said:
        after_result = bool(asked.messages) and asked.messages[-1].get("role") == "tool"
        return _only_text(said, "Done.") if after_result and _named(asked) is not None else said


@fault("turns/agent-loop")
class SilentAfterTwoRounds(Fault):
    """Says nothing after two rounds of calls that no user's message parts."""

    def answer(self, asked: Asked, said: Said) -> Said:
        rounds = 0
        for message in reversed(asked.messages):
            if message.get("role") == "user":
                break
            rounds += bool(message.get("tool_calls"))
        return replace(said, text="") if rounds > 1 else said


class _Results(Fault):
    """Changes what the model reads of tool results."""

    def changed(self, content: Any) -> Any:
        raise NotImplementedError

    def prompt(self, asked: Asked, messages: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            {**message, "content": self.changed(message.get("content"))} if message.get("role") == "tool" else message
            for message in messages
        )


@fault("turns/long-result")
class CutsResults(_Results):
    """Cuts tool results after 2,000 characters."""

    def changed(self, content: Any) -> Any:
        return content[:2000] if isinstance(content, str) else content


@fault("turns/json-result")
class ResultsAsObjects(_Results):
    """Reads a tool result that is JSON as an object, which the template cannot show."""

    def changed(self, content: Any) -> Any:
        return "[object Object]" if isinstance(content, str) and content.startswith("{") else content


@fault("turns/result-in-parts")
class TheFirstPartOnly(_Results):
    """Reads the first part of a tool result."""

    def changed(self, content: Any) -> Any:
        return content[:1] if isinstance(content, list) else content


@fault("turns/markup-in-a-result")
class ResultsEndAtMarkup(_Results):
    """Ends a tool result where it closes itself."""

    def changed(self, content: Any) -> Any:
        return content.partition("</tool_response>")[0] if isinstance(content, str) else content


@fault("turns/entities-in-a-result")
class DecodesResults(_Results):
    """Decodes entities in tool results."""

    def changed(self, content: Any) -> Any:
        return html.unescape(content) if isinstance(content, str) else content


@fault("turns/text-beside-call")
class CallsWithoutText(Fault):
    """Shows the model of a message with calls only the calls."""

    def prompt(self, asked: Asked, messages: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple({**message, "content": None} if message.get("tool_calls") else message for message in messages)


@fault("turns/arguments-kept")
class CallsWithoutArguments(Fault):
    """Shows the model of earlier calls only the names."""

    def prompt(self, asked: Asked, messages: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            {
                **message,
                "tool_calls": [
                    {**call, "function": {**call["function"], "arguments": "{}"}} for call in message["tool_calls"]
                ],
            }
            if message.get("tool_calls")
            else message
            for message in messages
        )


@fault("turns/results-in-other-order")
class ResultsInOrderOnly(Fault):
    """Takes the results only as long as they come in the order of their calls."""

    def prompt(self, asked: Asked, messages: tuple[Any, ...]) -> tuple[Any, ...]:
        calls = [call.get("id") for message in messages for call in message.get("tool_calls") or ()]
        kept: list[Any] = []
        last = -1
        for message in messages:
            at = calls.index(message["tool_call_id"]) if message.get("role") == "tool" else len(calls)
            if at >= last or message.get("role") != "tool":
                kept.append(message)
            last = at if message.get("role") == "tool" else last
        return tuple(kept)


@fault("turns/empty-result")
class RefusesEmptyResults(Fault):
    """Refuses an empty tool result."""

    def refusal(self, asked: Asked, refusal: Refusal | None) -> Refusal | None:
        empty = [message for message in _of_role(asked, "tool") if message.get("content") in ("", [])]
        return refusal or (Refusal("messages", "content must not be empty") if empty else None)


@fault("turns/emoji-in-a-result")
class FailsOnEmoji(Fault):
    """Fails on a tool result with a character beyond U+FFFF."""

    def refusal(self, asked: Asked, refusal: Refusal | None) -> Refusal | None:
        texts = [json.dumps(message.get("content"), ensure_ascii=False) for message in _of_role(asked, "tool")]
        return refusal or (
            Refusal("", "UnicodeEncodeError", 500) if max("".join(texts), default="") > "\uffff" else None
        )


@fault("turns/content-absent")
class ContentIsRequired(Fault):
    """Refuses a message without content."""

    apis = ("chat",)

    def refusal(self, asked: Asked, refusal: Refusal | None) -> Refusal | None:
        absent = [message for message in _of_role(asked, "assistant") if "content" not in message]
        return refusal or (Refusal("messages", "content: field required") if absent else None)


@fault("turns/as-an-sdk-sends-it")
class RefusesNulls(Fault):
    """Refuses fields of a message that it does not use, though they are null."""

    apis = ("chat",)

    def refusal(self, asked: Asked, refusal: Refusal | None) -> Refusal | None:
        unused = [message for message in _of_role(asked, "assistant") if "function_call" in message]
        return refusal or (Refusal("messages", "function_call: extra inputs are not permitted") if unused else None)


@fault("turns/call-without-arguments")
class FailsWithoutArguments(Fault):
    """Fails on a call without arguments in the history."""

    def refusal(self, asked: Asked, refusal: Refusal | None) -> Refusal | None:
        empty = [function for function in _earlier_calls(asked) if function.get("arguments") == "{}"]
        return refusal or (Refusal("", "UndefinedError: 'dict object' has no element 0", 500) if empty else None)


@fault("turns/error-result")
class DropsErrors(Fault):
    """Shows the model no result that is marked as an error."""

    apis = ("messages",)

    def prompt(self, asked: Asked, messages: tuple[Any, ...]) -> tuple[Any, ...]:
        blocks = [block for message in asked.body.get("messages", ()) for block in message["content"]]
        marked = {b["tool_use_id"] for b in blocks if isinstance(b, dict) and b.get("is_error") is True}
        return tuple(message for message in messages if message.get("tool_call_id") not in marked)


@fault("turns/long-history")
class FailsOnLongHistories(Fault):
    """Fails on a history of more than 32 results."""

    def refusal(self, asked: Asked, refusal: Refusal | None) -> Refusal | None:
        return Refusal("", "RecursionError", 500) if len(_of_role(asked, "tool")) > 32 else refusal


@fault("turns/text-beside-result")
class DropsTextBesideResults(Fault):
    """Drops the parts of a message right after a tool result."""

    apis = ("chat",)  # in messages both stand in one message, always in parts

    def prompt(self, asked: Asked, messages: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            message
            for i, message in enumerate(messages)
            if not (isinstance(message.get("content"), list) and i and messages[i - 1].get("role") == "tool")
        )


@fault("turns/names-of-arguments")
class AsciiNamesOnly(Fault):
    """Drops arguments whose names are not ASCII."""

    def answer(self, asked: Asked, said: Said) -> Said:
        def change(call: SaidCall) -> SaidCall:
            value = call.value
            if not isinstance(value, dict) or all(key.isascii() for key in value):
                return call
            return replace(call, arguments=json.dumps({key: value[key] for key in value if key.isascii()}))

        return said.map_calls(change)


@fault("turns/system-kept")
class ToolsReplaceTheSystemMessage(Fault):
    """Puts the tools in the place of the system message."""

    def prompt(self, asked: Asked, messages: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(message for message in messages if message.get("role") != "system") if asked.tools else messages


@fault("turns/developer")
class RefusesDevelopers(Fault):
    """Refuses the role `developer`."""

    def refusal(self, asked: Asked, refusal: Refusal | None) -> Refusal | None:
        return refusal or (Refusal("messages", "unknown role 'developer'") if _of_role(asked, "developer") else None)


@fault("turns/history-without-tools")
class CallsNeedTools(Fault):
    """Refuses calls in the history of a request without tools."""

    def refusal(self, asked: Asked, refusal: Refusal | None) -> Refusal | None:
        if refusal is None and _earlier_calls(asked) and not asked.tools:
            return Refusal("tools", "must be given where the history has calls")
        return refusal


@fault("turns/two-user-messages")
class RolesAlternate(Fault):
    """Refuses two messages of the user in a row."""

    def refusal(self, asked: Asked, refusal: Refusal | None) -> Refusal | None:
        roles = [message.get("role") for message in asked.messages if isinstance(message, Mapping)]
        if refusal is None and ("user", "user") in pairwise(roles):
            return Refusal("messages", "conversation roles must alternate")
        return refusal


# ---------------------------------------------------------------------------------------------------------------------
# Requests side by side, and one after the other


def _likeness(asked: Asked) -> str:
    """What requests that differ in numbers alone have in common."""
    return re.sub(r"\d+", "#", json.dumps([asked.api, asked.messages, asked.tools], ensure_ascii=False))


class _KeepsAnswers(Fault):
    """Gives the answer to a request to others that are like it."""

    stream: ClassVar[bool]

    def __init__(self) -> None:
        self._kept: dict[str, Said] = {}

    def answer(self, asked: Asked, said: Said) -> Said:
        if asked.stream is not self.stream or not said.calls:
            return said
        return self._kept.setdefault(f"{asked.names} {_likeness(asked)}", said)


@fault("concurrent/plain")
class OneAnswerForAll(_KeepsAnswers):
    """Keeps grammars by the names of their tools, and gives the first of them to all plain requests."""

    stream = False


@fault("concurrent/stream")
class OneStreamForAll(_KeepsAnswers):
    """Keeps grammars by the names of their tools, and gives the first of them to all streams."""

    stream = True


@fault("concurrent/tools")
class OneSetOfToolsForAll(Fault):
    """Holds requests with other tools to the tools of the first one like them."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[str, ...], Said]] = {}

    def answer(self, asked: Asked, said: Said) -> Said:
        names, kept = self._kept.setdefault(_likeness(asked), (asked.names, said))
        return kept if names != asked.names else said


class _Remembers(Fault):
    """Counts the streams of a request that were left."""

    def __init__(self) -> None:
        self._left: Counter[str] = Counter()

    def left(self, asked: Asked) -> None:
        self._left[asked.user] += 1

    def times(self, asked: Asked) -> int:
        return self._left[asked.user]


@fault("cancelled/early")
class BeginsInTheMiddle(_Remembers):
    """Begins the stream after one that was left where that one was left."""

    def answer(self, asked: Asked, said: Said) -> Said:
        if not asked.stream or self.times(asked) != 1:
            return said
        return said.map_strings(lambda text: text[9:])


@fault("cancelled/within-arguments")
class LeftOversOfOthers(_Remembers):
    """Begins the stream after two that were left with what they did not deliver."""

    def answer(self, asked: Asked, said: Said) -> Said:
        if not asked.stream or self.times(asked) != 2:
            return said
        return said.map_strings(lambda text: text[-9:] + text)


@fault("cancelled/many")
class LosesItsPlaces(_Remembers):
    """Fails after sixteen streams that were left."""

    def refusal(self, asked: Asked, refusal: Refusal | None) -> Refusal | None:
        return Refusal("", "no slot is free", 500) if self.times(asked) > 16 else refusal


@fault("cancelled/then-plain")
class TheRestOfAStream(_Remembers):
    """Gives a plain request the rest of a stream that was left."""

    def answer(self, asked: Asked, said: Said) -> Said:
        return said.map_strings(lambda text: text[9:]) if not asked.stream and self.times(asked) else said


# ---------------------------------------------------------------------------------------------------------------------
# Token limits and counts


def _is_cut(said: Said) -> bool:
    return said.finish == "length" and bool(said.calls) and not said.calls[-1].whole


@fault("truncated/in-arguments")
class RepairsCalls(Fault):
    """Closes arguments that were cut, and presents the call as whole."""

    def answer(self, asked: Asked, said: Said) -> Said:
        if asked.stream or not _is_cut(said) or len(said.calls) > 1:
            return said
        calls = (replace(said.calls[0], arguments=said.calls[0].arguments + '"}', whole=True),)
        return replace(said, calls=calls, finish="tool_calls")


@fault("truncated/in-streamed-arguments")
class CutCallsEndWhole(Fault):
    """Ends a stream that was cut within a call as if the call were whole."""

    def answer(self, asked: Asked, said: Said) -> Said:
        if not asked.stream or not _is_cut(said) or len(said.calls) > 1:
            return said
        return replace(said, calls=(replace(said.calls[0], whole=True),), finish="tool_calls")


@fault("truncated/in-name")
class CutNamesVanish(Fault):
    """Ends an answer that was cut within a tool's name with `stop`."""

    def answer(self, asked: Asked, said: Said) -> Said:
        nothing = not said.calls and not said.text and not said.reasoning
        return replace(said, finish="stop") if said.finish == "length" and nothing else said


@fault("truncated/in-second-call")
class DropsTheCutCall(Fault):
    """Drops the second call, which was cut, and presents the first as all there is."""

    def answer(self, asked: Asked, said: Said) -> Said:
        if not _is_cut(said) or len(said.calls) < 2:
            return said
        return replace(said, calls=said.calls[:-1], finish="tool_calls")


@fault("truncated/in-text")
class CutTextsEndWhole(Fault):
    """Ends a text that was cut with `stop`."""

    def answer(self, asked: Asked, said: Said) -> Said:
        return replace(said, finish="stop") if said.finish == "length" and said.text and not said.calls else said


@fault("usage/plain")
class NoUsage(Fault):
    """Leaves out the usage of a call of the only tool, where one is required."""

    def whole(self, asked: Asked, body: dict[str, Any]) -> dict[str, Any]:
        if asked.choice == "required" and len(asked.tools) == 1:
            body.pop("usage", None)
        return body


@fault("usage/stream")
class NoUsageInStreams(Fault):
    """Leaves out the usage of a streamed call of the only tool, where one is required."""

    def deltas(self, asked: Asked, deltas: list[Delta]) -> list[Delta]:
        if asked.choice != "required" or len(asked.tools) > 1:
            return deltas
        return [delta for delta in deltas if delta.kind != "usage"]


@fault("usage/stream-equals-plain")
class CountsEvents(Fault):
    """Counts the events of a stream with calls instead of its tokens."""

    def deltas(self, asked: Asked, deltas: list[Delta]) -> list[Delta]:
        if not _has_calls(deltas):
            return deltas
        return [replace(d, value=(d.value[0], len(deltas))) if d.kind == "usage" else d for d in deltas]


@fault("usage/streamed-text")
class CountsNoText(Fault):
    """Counts a streamed text as no tokens."""

    def deltas(self, asked: Asked, deltas: list[Delta]) -> list[Delta]:
        if asked.tools:
            return deltas
        return [replace(delta, value=(delta.value[0], 0)) if delta.kind == "usage" else delta for delta in deltas]


@fault("usage/total")
class LeavesOutTheHistory(Fault):
    """Leaves out of the total what came before tool results."""

    apis = ("chat", "responses")

    def _changed(self, asked: Asked, value: Any) -> None:
        usage = value.get("usage") if isinstance(value, dict) else None
        if isinstance(usage, dict) and _of_role(asked, "tool"):
            usage["total_tokens"] = usage.get("completion_tokens", usage.get("output_tokens"))

    def whole(self, asked: Asked, body: dict[str, Any]) -> dict[str, Any]:
        self._changed(asked, body)
        return body

    def events(self, asked: Asked, events: list[Event]) -> list[Event]:
        for event in events:
            self._changed(asked, event.data)
            self._changed(asked, event.data.get("response") if isinstance(event.data, dict) else None)
        return events
