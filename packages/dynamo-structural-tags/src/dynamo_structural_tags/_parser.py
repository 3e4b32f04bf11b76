# SPDX-License-Identifier: Apache-2.0
"""The incremental parser: one machine for every format, driven by its descriptor.

It reads what the grammar of the same descriptor writes, and is lenient in one thing only: white space between markers
is skipped wherever no value is open. Anything else unexpected inside a call is a `malformed_call`. Text is looked at
once: what is held back is a suffix that may begin a marker, or a value that may still be a number, true, false or null.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any

from ._errors import CallError, CallErrorKind
from ._events import Arguments, CallBegin, CallEnd, CallFailed, Content, Event, Reasoning
from ._format import Format, ReasoningMode
from ._json import FINITE, shown
from ._reading import ANYTHING, MAX_SCALAR, ToolReading, tool_reading
from ._request import ToolPolicy

__all__ = ["Parser", "parse"]

#: The longest text between a call's opening and the end of its name that is still read as a name.
_MAX_NAME = 256
#: From this much white space on, an answer that is to be JSON is read as free text.
_MAX_LEAD = 1024
#: What a tool's name may look like at all; a name of other characters is no name but another format's text.
_NAME = re.compile(r"[^\s<>{}\[\]\"]{1,128}")
#: `NAME:N`, what follows `functions.` in an identifier of Kimi.
_NUMBERED = re.compile(r"(.*):([0-9]{1,4})", re.DOTALL)
#: The parts of a layout between which a parser skips white space: a tag up to its `>`, a JSON string, a word, a sign.
_TOKEN = re.compile(r"<[^<>{}]*>?|\"\w+\"|[\w.]+|\S")
_SPACE = re.compile(r"[ \t\r\n]*")
#: The rest of a JSON string, up to its quote or a lone backslash at the text's end.
_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_JSON_STOP = re.compile(r'["{}\[\]]')
#: Half of a surrogate pair, written as an escape: to be looked at more closely.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
#: What may become a JSON number, true, false or null when more text comes.
_SCALAR_BEGINS = re.compile(
    r"-?(?:0|[1-9][0-9]*)?(?:(?<=[0-9])\.[0-9]*)?(?:(?<=[0-9])[eE][+-]?[0-9]*)?|t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?"
    r"|n(?:u(?:ll?)?)?"
)
_SCALAR_FIRST = frozenset("-0123456789tfn")
#: From this much text on, a JSON value is first tried in one go.
_AT_ONCE = 64

_quoted = json.JSONEncoder(ensure_ascii=False).encode


def _load(text: str) -> tuple[Any, str]:
    """Return a JSON text's value and "", or None and what is wrong with it."""
    try:
        value = FINITE.decode(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value, ""
    except UnicodeEncodeError:
        return None, f"{shown(text)} holds half of a surrogate pair"
    except json.JSONDecodeError as error:
        return None, f"{shown(text)} is no JSON: {error.msg} at character {error.pos}"
    except ValueError as error:
        return None, str(error)
    except RecursionError:
        return None, "is nested too deeply"


def _held(text: str, start: int, marker: str) -> int:
    """Return where the longest suffix of `text[start:]` that begins the marker starts; the text's length if none."""
    end = len(text)
    found = text.find(marker[0], max(start, end - len(marker) + 1))
    while found >= 0:
        if marker.startswith(text[found:]):
            return found
        found = text.find(marker[0], found + 1)
    return end


class _Layout:
    """A descriptor, taken apart for the parser."""

    __slots__ = (
        "after_key",
        "after_name",
        "arg_begin",
        "call_begin",
        "call_end",
        "firsts",
        "inline_end",
        "inline_stop",
        "key_end",
        "lead_limit",
        "markers",
        "name_end",
        "numbered",
        "partials",
        "section",
        "section_end",
        "separator",
        "style",
        "tail",
        "think_begin",
        "think_end",
        "think_separator",
        "trigger",
        "typed",
        "value_end",
        "value_lead",
        "value_stop",
    )

    def __init__(self, fmt: Format) -> None:
        self.style = fmt.style
        self.trigger = fmt.trigger
        self.section = bool(fmt.section_begin)
        self.section_end = fmt.section_end.strip()
        self.call_begin = tuple(_TOKEN.findall(fmt.call_begin))
        if not self.section:
            self.call_begin = self.call_begin[1:]  # its first part is the trigger
        self.call_end = tuple(_TOKEN.findall(fmt.call_end))
        self.numbered = "{index}" in fmt.name_end
        name_end = _TOKEN.findall(fmt.name_end.partition("{index}")[2] if self.numbered else fmt.name_end)
        #: Ends a name; where the format has nothing there, the next marker's `<` does, which is not consumed.
        self.name_end = name_end[0] if name_end else ""
        self.after_name = tuple(name_end[1:])
        before_key, _, after_key = fmt.arg_begin.partition("{key}")
        self.arg_begin = before_key
        #: dsml: the type stands as `string="true"` or `string="false"` between key and value.
        self.typed = "{string}" in after_key
        key_end = _TOKEN.findall(after_key.partition("{string}")[0])
        self.key_end = key_end[0] if key_end else ""
        self.after_key = tuple(key_end[1:])
        self.value_end = fmt.value_end
        #: One line break on each side of a value is layout (Qwen): without the first one the value is inline.
        self.value_lead = fmt.value_end.startswith("\n") and fmt.arg_begin.endswith("\n")
        self.inline_end = fmt.value_end.lstrip("\n")
        self.value_stop = re.compile('"|' + re.escape(self.value_end)) if self.value_end else _JSON_STOP
        self.inline_stop = re.compile('"|' + re.escape(self.inline_end)) if self.value_end else _JSON_STOP
        self.separator = fmt.content_separator
        self.lead_limit = len(fmt.reasoning_separator) + len(fmt.content_separator)
        self.markers = re.compile("|".join(re.escape(marker) for marker in (fmt.trigger, *fmt.stray)))
        self.partials = {fmt.trigger, fmt.content_separator + fmt.trigger, *fmt.stray}
        self.firsts = re.compile("[" + "".join(sorted({re.escape(marker[0]) for marker in self.partials})) + "]")
        self.tail = max(map(len, self.partials)) - 1
        begin, self.think_end = fmt.think
        self.think_begin = (begin, fmt.think_lead + begin) if fmt.think_lead else (begin,)
        self.think_separator = fmt.reasoning_separator

    def held(self, text: str, start: int) -> int:
        """Return where the longest suffix of `text[start:]` starts that may begin a marker or what precedes it."""
        end = len(text)
        for match in self.firsts.finditer(text, max(start, end - self.tail)):
            rest = text[match.start() :]
            if any(marker.startswith(rest) for marker in self.partials):
                return match.start()
        return end


@lru_cache(maxsize=64)
def _layout(fmt: Format) -> _Layout:
    return _Layout(fmt)


class Parser:
    """Reads one answer piece by piece and reports content, reasoning and checked calls.

    Args:
        fmt: the format.
        policy: what the answer may hold; None where the request has no tools: then everything is content.
        reasoning: `open` where the prompt ended inside the reasoning, `auto` where the answer may begin with a block of
            it, `closed` where it holds none.
        used_ids: identifiers of earlier calls of the conversation, which a call of this answer must not repeat (Kimi).

    No text raises. However the text is cut into pieces, the concatenated texts, the calls and the errors are the same.
    A `CallFailed` comes when its call's text is complete; :attr:`errors` has the error as soon as it is known, so that
    a caller may stop the generation there.
    """

    __slots__ = (
        "_args",
        "_bad",
        "_buf",
        "_call_id",
        "_called",
        "_closer",
        "_depth",
        "_done",
        "_error",
        "_events",
        "_in_section",
        "_index",
        "_key",
        "_layout",
        "_mark",
        "_name",
        "_new",
        "_numbers",
        "_open",
        "_parts",
        "_policy",
        "_pos",
        "_quoted",
        "_raw",
        "_reading",
        "_rest",
        "_size",
        "_step",
        "_stop",
        "_string",
        "_then",
        "_tokens",
        "_tools",
        "_used",
        "_values",
        "calls",
        "errors",
    )

    def __init__(
        self,
        fmt: Format,
        policy: ToolPolicy | None,
        *,
        reasoning: ReasoningMode = "closed",
        used_ids: Collection[str] = (),
    ) -> None:
        #: The calls that were completed and are valid.
        self.calls: list[CallEnd] = []
        #: What is wrong with the others, as soon as it is known.
        self.errors: list[CallError] = []
        self._layout = _layout(fmt)
        self._policy = policy
        self._used = set(used_ids)
        #: Number as written -> the first that may be free, so that no number is tried twice.
        self._numbers: dict[tuple[str, int], int] = {}
        self._tools: dict[str, ToolReading] = {}
        first = {"open": Parser._reasoning, "auto": Parser._before_reasoning, "closed": Parser._before_content}
        self._step: Callable[[Parser], bool] = first[reasoning]
        self._events: list[Event] = []
        self._done = False
        # The text being looked at, how far it is read, and what waits for more text.
        self._buf = ""
        self._pos = 0
        self._rest = ""
        # The parts of the layout that come next, and what comes after them.
        self._tokens: tuple[str, ...] = ()
        self._then: Callable[[Parser], bool] = Parser._name_read
        # The call being read.
        self._open = False  # its text is kept from `_mark` on
        self._in_section = False
        self._index = 0
        self._mark = 0
        self._raw: list[str] = []
        self._error: CallError | None = None
        self._name: str | None = None
        self._call_id: str | None = None
        self._called: ToolReading | None = None
        self._args: list[str] = []
        self._new: list[str] = []
        self._values: Any = None
        self._bad: tuple[str, str] | None = None
        # The argument being read.
        self._key = ""
        self._reading = ANYTHING
        self._closer = ""
        self._stop = _JSON_STOP
        self._string = ""
        self._parts: list[str] = []
        self._size = 0
        self._quoted = False
        self._depth = 0

    def feed(self, text: str) -> list[Event]:
        """Read the next piece of the answer and return what is known by it. After :meth:`finish`: nothing."""
        if not text or self._done:
            return []
        events = self._events = []
        buf = self._buf = self._rest + text if self._rest else text
        self._pos = 0
        while self._step(self):
            pass
        pos = self._pos
        self._rest = buf[pos:] if pos < len(buf) else ""
        if self._open:
            if self._mark < pos:
                self._raw.append(buf[self._mark : pos])
            self._mark = 0
            if self._new:
                self._flush()
        return events

    def finish(self, *, truncated: bool = False) -> list[Event]:
        """Say that the answer has ended and return what follows from it. `truncated`: the length limit ended it."""
        if self._done:
            return []
        self._done = True
        events = self._events = []
        rest, self._rest = self._rest, ""
        step = self._step
        if self._open:
            self._raw.append(rest)
            if self._error is None:
                what = f"the call of {self._name!r}" if self._name is not None else "a call before its tool was named"
                self._fail("truncated_call", f"the answer ended inside {what}")
            self._failed()
        elif step is Parser._between:
            # All that waits here begins the section's end or another call.
            if rest and not self._layout.section_end.startswith(rest):
                self._raw.append(rest)
                self._fail("truncated_call", "the answer ended inside a call before its tool was named")
                self._failed()
        elif rest:
            events.append(Reasoning(rest) if step is Parser._reasoning else Content(rest))
        policy = self._policy
        if policy is not None and policy.choice in ("required", "named") and not (self._index or truncated):
            what = f"a call of {policy.tools[0].name!r}" if policy.choice == "named" else "a call"
            self._fail("missing_call", f"tool_choice asks for {what}, and the answer makes none")
            self._failed()
        return events

    # Errors and calls.

    def _fail(self, kind: CallErrorKind, message: str, path: str = "") -> None:
        """Note what is wrong with the call being read."""
        self._error = CallError(kind, message, self._name, self._index, path)
        self.errors.append(self._error)

    def _failed(self) -> None:
        """Report the call that failed."""
        assert self._error is not None
        self._events.append(CallFailed(self._index, self._error, "".join(self._raw)))
        self._leave()

    def _broken(self, message: str) -> bool:
        """What stands at the position is not this format: the rest of the answer belongs to the broken call."""
        if self._error is None:
            if self._new:
                self._flush()
            what = "" if self._name is None else f"the call of {self._name!r}: "
            self._fail("malformed_call", what + message)
        self._new = []
        self._step = Parser._swallow
        return True

    def _unexpected(self, expected: tuple[str, ...], pos: int) -> bool:
        """Report text that is none of these markers, naming them and the text up to its first wrong character."""
        found, best = self._buf[pos : pos + 1], 0
        for marker in expected:
            same = 0
            while same < len(marker) and self._buf.startswith(marker[same], pos + same):
                same += 1
            if same > best:
                found, best = self._buf[pos : pos + same + 1], same
        names = " or ".join(repr(marker) for marker in expected)
        return self._broken(f"{names} must follow, not {found!r}")

    def _begin(self, start: int) -> None:
        """Keep the text from here on as a call's."""
        self._open = True
        self._mark = start
        self._raw = []
        self._error = None
        self._name = None
        self._call_id = None
        self._called = None
        self._args = []
        self._values = {}
        self._bad = None

    def _leave(self) -> None:
        """Forget the call that was read."""
        self._open = False
        self._raw = []
        self._args = []
        self._new = []
        self._values = None
        self._error = None
        self._name = None
        self._index += 1

    def _flush(self) -> None:
        """Report the pieces of arguments that are not yet reported."""
        new, self._new = self._new, []
        if self._error is None:
            text = new[0] if len(new) == 1 else "".join(new)
            self._args.append(text)
            self._events.append(Arguments(self._index, text))

    def _call(self, name: str) -> bool:
        """Begin the call of a tool whose name is complete; False where it can be no name."""
        policy = self._policy
        assert policy is not None  # without one no call is looked for
        self._name = name
        tool = policy.tool(name)
        if policy.choice == "none":
            self._fail("unexpected_call", f"a call of {shown(name)}, and tool_choice is none")
        elif tool is None:
            declared = ", ".join(entry.name for entry in policy.tools[:8]) + (", ..." if len(policy.tools) > 8 else "")
            self._fail("undeclared_tool", f"no tool {shown(name)} may be called here; callable: {declared}")
        elif self._index and not policy.parallel:
            self._fail("unexpected_call", f"another call, of {shown(name)}, and parallel_tool_calls is false")
        if tool is not None:
            self._called = self._tools.get(name)
            if self._called is None:
                self._called = self._tools[name] = tool_reading(tool)
        if self._error is None:
            self._events.append(CallBegin(self._index, name, self._call_id))
        return True

    def _end(self) -> bool:
        """Check the call whose text is complete and report it."""
        if self._layout.style != "json":
            self._new.append("}" if self._values else "{}")
        if self._new:
            self._flush()
        called = self._called
        if self._error is None and (called is None or called.strict or self._bad is not None):
            bad = self._bad
            if bad is None and called is not None:
                bad = self._problem(called)
            if bad is not None:
                path, message = bad
                where = f" at {path}" if path else ""
                self._fail("invalid_arguments", f"the arguments of {self._name!r}{where}: {message}", path)
        if self._error is None:
            assert self._name is not None
            call = CallEnd(self._index, self._name, "".join(self._args), self._call_id)
            self.calls.append(call)
            self._events.append(call)
            self._leave()
        else:
            if self._mark < self._pos:
                self._raw.append(self._buf[self._mark : self._pos])
            self._failed()
        self._step = Parser._between if self._in_section else Parser._after
        return True

    def _problem(self, called: ToolReading) -> tuple[str, str] | None:
        if called.schema is None:
            return None
        try:
            return called.schema.problem(self._values)
        except RecursionError:
            return "", "is nested too deeply"

    # Steps: each reads from `_pos` on and returns False where it needs more text.

    def _swallow(self) -> bool:
        self._pos = len(self._buf)
        return False

    def _plain(self) -> bool:
        if self._pos < len(self._buf):
            self._events.append(Content(self._buf[self._pos :] if self._pos else self._buf))
            self._pos = len(self._buf)
        return False

    def _before_reasoning(self) -> bool:
        rest = self._buf[self._pos :]
        for marker in self._layout.think_begin:
            if rest.startswith(marker):
                self._pos += len(marker)
                self._step = Parser._reasoning
                return True
        if any(marker.startswith(rest) for marker in self._layout.think_begin):
            return False
        self._step = Parser._before_content
        return True

    def _reasoning(self) -> bool:
        buf, pos, marker = self._buf, self._pos, self._layout.think_end
        end = buf.find(marker, pos)
        found = end >= 0
        if not found:
            end = _held(buf, pos, marker)
        if end > pos:
            self._events.append(Reasoning(buf[pos:end]))
        self._pos = end
        if found:
            self._pos += len(marker)
            self._step = Parser._after_reasoning
        return found

    def _after_reasoning(self) -> bool:
        separator = self._layout.think_separator
        if separator:
            rest = self._buf[self._pos : self._pos + len(separator)]
            if rest == separator:
                self._pos += len(separator)
            elif separator.startswith(rest):
                return False
        self._step = Parser._before_content
        return True

    def _before_content(self) -> bool:
        """Drop the white space that a template puts before the first call."""
        policy = self._policy
        if policy is None:
            self._step = Parser._plain
            return True
        buf, pos, layout = self._buf, self._pos, self._layout
        space = _SPACE.match(buf, pos)
        start = space.end() if space else pos
        if start - pos <= layout.lead_limit:
            if buf.startswith(layout.trigger, start):
                self._pos = start
            elif layout.trigger.startswith(buf[start:]):
                return False
        elif start == len(buf) and policy.content_schema is not None and start - pos < _MAX_LEAD:
            return False
        # Where content is JSON, a marker inside one of its strings is no marker.
        json_content = policy.content_schema is not None and start - pos < _MAX_LEAD and buf[start] in '{["'
        self._step = Parser._plain if json_content else Parser._content
        return True

    def _content(self) -> bool:
        buf, pos, layout = self._buf, self._pos, self._layout
        match = layout.markers.search(buf, pos)
        if match is None:
            end = layout.held(buf, pos)
            if end > pos:
                self._events.append(Content(buf[pos:end] if pos or end < len(buf) else buf))
            self._pos = end
            return False
        start = end = match.start()
        called = match.group() == layout.trigger
        if called and layout.separator and buf.endswith(layout.separator, pos, start):
            end -= len(layout.separator)
        if end > pos:
            self._events.append(Content(buf[pos:end]))
        self._begin(start)
        self._pos = match.end()
        if not called:
            return self._broken(f"{match.group()!r} stands outside a call")
        return self._opened()

    def _opened(self) -> bool:
        """Go on after the trigger."""
        self._in_section = self._layout.section
        return self._expect(self._layout.call_begin, Parser._name_read)

    def _after(self) -> bool:
        """After a call, outside a section: white space is dropped, then comes another call or text."""
        buf, trigger = self._buf, self._layout.trigger
        space = _SPACE.match(buf, self._pos)
        start = self._pos = space.end() if space else self._pos
        if buf.startswith(trigger, start):
            self._begin(start)
            self._pos = start + len(trigger)
            return self._opened()
        if trigger.startswith(buf[start:]):
            return False
        self._step = Parser._content
        return True

    def _between(self) -> bool:
        """After a call, inside a section: another call or the section's end."""
        buf, layout = self._buf, self._layout
        space = _SPACE.match(buf, self._pos)
        start = self._pos = space.end() if space else self._pos
        first = layout.call_begin[0]
        if buf.startswith(layout.section_end, start):
            self._pos += len(layout.section_end)
            self._in_section = False
            self._step = Parser._after
            return True
        if not buf.startswith(first, start):
            rest = buf[start:]
            if first.startswith(rest) or layout.section_end.startswith(rest):
                return False
            self._begin(start)
            return self._unexpected((first, layout.section_end), start)
        self._begin(start)
        self._pos = start + len(first)
        return self._expect(layout.call_begin[1:], Parser._name_read)

    def _expect(self, tokens: tuple[str, ...], then: Callable[[Parser], bool]) -> bool:
        self._parts = []
        self._size = 0
        if tokens:
            self._tokens = tokens
            self._then = then
            self._step = Parser._expected
        else:
            self._step = then
        return True

    def _expected(self) -> bool:
        """Read the next parts of the layout, white space between them skipped."""
        buf = self._buf
        for number, token in enumerate(self._tokens):
            space = _SPACE.match(buf, self._pos)
            start = self._pos = space.end() if space else self._pos
            if not buf.startswith(token, start):
                if token.startswith(buf[start:]):
                    self._tokens = self._tokens[number:]
                    return False
                return self._unexpected((token,), start)
            self._pos = start + len(token)
        self._step = self._then
        return True

    def _until(self, marker: str) -> str | None:
        """Return the text up to the marker, or None as long as that has not come."""
        buf, pos = self._buf, self._pos
        end = buf.find(marker, pos)
        if end < 0:
            end = _held(buf, pos, marker)
            if end > pos:
                self._parts.append(buf[pos:end])
                self._size += end - pos
                self._pos = end
            return None
        self._pos = end + len(marker)
        self._size += end - pos
        if not self._parts:
            return buf[pos:end]
        self._parts.append(buf[pos:end])
        text = "".join(self._parts)
        self._parts = []
        return text

    def _name_read(self) -> bool:
        layout = self._layout
        text = self._until(layout.name_end or "<")
        if self._size > _MAX_NAME:
            return self._broken(f"no tool's name follows within {_MAX_NAME} characters")
        if text is None:
            return False
        if not layout.name_end:
            self._pos -= 1
        name = text.strip(" \t\r\n")
        number = ""
        if layout.numbered:
            numbered = _NUMBERED.fullmatch(name)
            if numbered is None:
                return self._broken(f"{shown(name)} is no NAME:N with N a number")
            name, number = numbered.groups()
        if _NAME.fullmatch(name) is None:
            return self._broken(f"{shown(name)} is no tool's name")
        if layout.numbered:
            self._call_id = self._identifier(name, int(number))
        self._call(name)
        if layout.style == "json":
            return self._expect(layout.after_name, Parser._object)
        return self._expect(layout.after_name, Parser._argument)

    def _identifier(self, name: str, number: int) -> str:
        """Return Kimi's identifier of a call: as written, or with the next number that is not used yet."""
        written = (name, number)
        number = self._numbers.get(written, number)
        while (found := f"functions.{name}:{number}") in self._used:
            number += 1
        self._numbers[written] = number
        self._used.add(found)
        return found

    def _argument(self) -> bool:
        """Read the beginning of an argument, or of the call's end."""
        buf, layout = self._buf, self._layout
        space = _SPACE.match(buf, self._pos)
        start = self._pos = space.end() if space else self._pos
        if buf.startswith(layout.arg_begin, start):
            self._pos = start + len(layout.arg_begin)
            return self._expect((), Parser._key_read)
        last = layout.call_end[0]
        if buf.startswith(last, start):
            self._pos = start + len(last)
            return self._expect(layout.call_end[1:], Parser._end)
        rest = buf[start:]
        if layout.arg_begin.startswith(rest) or last.startswith(rest):
            return False
        return self._unexpected((layout.arg_begin, last), start)

    def _key_read(self) -> bool:
        layout = self._layout
        key = self._until(layout.key_end)
        if key is None:
            return False
        self._key = key
        if key in self._values and self._bad is None:
            self._bad = (key, "is given twice")
        self._new.append((", " if self._values else "{") + _quoted(key) + ": ")
        self._values.setdefault(key, None)
        if layout.typed:
            return self._expect(layout.after_key, Parser._type_read)
        return self._expect(layout.after_key, Parser._value)

    def _type_read(self) -> bool:
        text = self._until('"')
        if text is None:
            return False
        if text not in ("true", "false"):
            return self._broken(f'string must be "true" or "false", not {shown(text)}')
        self._string = text
        return self._expect((">",), Parser._value)

    def _value(self) -> bool:
        """Read what of a value's beginning is layout."""
        layout = self._layout
        self._closer, self._stop = layout.value_end, layout.value_stop
        if layout.value_lead:
            if self._pos >= len(self._buf):
                return False
            if self._buf[self._pos] == "\n":
                self._pos += 1
            else:
                self._closer, self._stop = layout.inline_end, layout.inline_stop
        if not layout.typed:
            self._reading = ANYTHING if self._called is None else self._called.of(self._key)
        self._step = Parser._value_kind
        return True

    def _value_kind(self) -> bool:
        """Say by its first character how a value is read."""
        if self._pos >= len(self._buf):
            return False
        if self._layout.typed:
            how = "text" if self._string == "true" else "json"
        else:
            how = self._reading.mode
            if how == "union":
                first = self._buf[self._pos]
                if self._reading.begins_json(first):
                    how = "json"
                elif not self._reading.kinds.scalar or first not in _SCALAR_FIRST:
                    how = "text"
        if how == "union":
            self._step = Parser._undecided
            return True
        if how == "text":
            self._new.append('"')
            self._step = Parser._text
            return True
        self._quoted = False
        self._step = Parser._json
        buf, pos = self._buf, self._pos
        if len(buf) - pos >= _AT_ONCE and buf.find(self._closer, pos) >= 0:
            try:
                value, end = FINITE.raw_decode(buf, pos)
            except (ValueError, RecursionError):
                return True
            if buf.startswith(self._closer, end) and not _SURROGATE.search(buf, pos, end):
                self._new.append(buf[pos:end])
                self._pos = end + len(self._closer)
                return self._valued(value)
        return True

    def _valued(self, value: Any) -> bool:
        """Keep the value of an argument that is complete."""
        self._values[self._key] = value
        self._parts = []
        self._step = Parser._argument
        return True

    def _text(self) -> bool:
        """Read a string, as it stands."""
        buf, pos, closer = self._buf, self._pos, self._closer
        end = buf.find(closer, pos)
        if end < 0:
            end = _held(buf, pos, closer)
            if end > pos:
                piece = buf[pos:end] if pos or end < len(buf) else buf
                self._parts.append(piece)
                self._new.append(_quoted(piece)[1:-1])
                self._pos = end
            return False
        if end > pos:
            piece = buf[pos:end]
            self._parts.append(piece)
            self._new.append(_quoted(piece)[1:])
        else:
            self._new.append('"')
        self._pos = end + len(closer)
        return self._valued("".join(self._parts))

    def _undecided(self) -> bool:
        """Hold a text that may be a scalar: it is one if all of it is."""
        text = self._until(self._closer)
        if text is None:
            so_far = "".join(self._parts)
            if self._size > MAX_SCALAR or not _SCALAR_BEGINS.fullmatch(so_far):
                self._parts = [so_far]
                self._new.append('"' + _quoted(so_far)[1:-1])
                self._step = Parser._text
                return True
            return False
        if self._reading.is_scalar(text):
            self._new.append(text)
            return self._valued(json.loads(text))
        self._new.append(_quoted(text))
        return self._valued(text)

    def _json(self) -> bool:
        """Read a JSON text up to the closer, which does not count inside a JSON string."""
        buf, start, closer, stop = self._buf, self._pos, self._closer, self._stop
        pos, size = start, len(buf)
        closed = False
        while True:
            if self._quoted:
                rest = _STRING.match(buf, pos)
                pos = rest.end() if rest else pos
                if pos >= size or buf[pos] != '"':
                    break
                self._quoted = False
                pos += 1
            match = stop.search(buf, pos)
            if match is None:
                pos = _held(buf, pos, closer)
                break
            pos = match.start()
            if buf[pos] != '"':
                closed = True
                break
            self._quoted = True
            pos += 1
        if pos > start:
            piece = buf[start:pos]
            self._parts.append(piece)
            self._new.append(piece)
        self._pos = pos
        if not closed:
            return False
        self._pos += len(closer)
        value, problem = _load("".join(self._parts))
        if problem and self._bad is None:
            self._bad = (self._key, problem)
        return self._valued(value)

    def _object(self) -> bool:
        """Read the beginning of the JSON object that holds all arguments."""
        buf = self._buf
        space = _SPACE.match(buf, self._pos)
        start = self._pos = space.end() if space else self._pos
        if start >= len(buf):
            return False
        if buf[start] != "{":
            return self._unexpected(("{",), start)
        self._quoted = False
        self._depth = 0
        self._step = Parser._in_object
        if len(buf) - start >= _AT_ONCE:
            try:
                self._values, end = FINITE.raw_decode(buf, start)
            except (ValueError, RecursionError):
                return True
            if _SURROGATE.search(buf, start, end):
                return True
            self._new.append(buf[start:end])
            self._pos = end
            return self._expect(self._layout.call_end, Parser._end)
        return True

    def _in_object(self) -> bool:
        """Read a JSON object up to the bracket that closes it."""
        buf, start = self._buf, self._pos
        pos, size = start, len(buf)
        depth = self._depth
        closed = False
        while True:
            if self._quoted:
                rest = _STRING.match(buf, pos)
                pos = rest.end() if rest else pos
                if pos >= size or buf[pos] != '"':
                    break
                self._quoted = False
                pos += 1
            match = _JSON_STOP.search(buf, pos)
            if match is None:
                pos = size
                break
            pos = match.end()
            sign = match.group()
            if sign == '"':
                self._quoted = True
            elif sign in "{[":
                depth += 1
            else:
                depth -= 1
                if depth == 0:
                    closed = True
                    break
        self._depth = depth
        if pos > start:
            piece = buf[start:pos]
            self._parts.append(piece)
            self._new.append(piece)
        self._pos = pos
        if not closed:
            return False
        self._values, problem = _load("".join(self._parts))
        if problem:
            self._bad = ("", problem)
        return self._expect(self._layout.call_end, Parser._end)


def parse(
    fmt: Format,
    text: str,
    policy: ToolPolicy | None,
    *,
    reasoning: ReasoningMode = "closed",
    used_ids: Collection[str] = (),
    truncated: bool = False,
) -> list[Event]:
    """Return what a whole answer says; arguments as in :class:`Parser` and :meth:`Parser.finish`."""
    parser = Parser(fmt, policy, reasoning=reasoning, used_ids=used_ids)
    return parser.feed(text) + parser.finish(truncated=truncated)
