# SPDX-License-Identifier: Apache-2.0
"""The grammar of the answers that a request allows, derived from a format's descriptor, and its cache."""

from __future__ import annotations

from typing import Any

from ._cache import ContentCache
from ._errors import RequestError, UnrepresentableError
from ._format import Format, Order, ReasoningMode
from ._grammar import JsonGrammar, Rules, counts, literal
from ._rawtext import RawText, free_text, other_keys
from ._reading import ANYTHING, Reading, ToolReading, arguments_schema, content_of, tool_reading
from ._request import Tool, ToolPolicy
from ._schema import ObjectShape, Schema, StringRule, check_schema

__all__ = ["TagCache", "structural_tag"]

#: Kimi's number of a call: 0 to 9999.
_INDEX = '("0" | [1-9] [0-9]{0,3})'


class _Builder:
    """Builds one grammar."""

    def __init__(self, fmt: Format, policy: ToolPolicy, order: Order) -> None:
        self._format = fmt
        self._policy = policy
        self._rules = Rules()
        self._json = JsonGrammar(self._rules, order)
        self._raw = RawText(self._rules, fmt.value_end) if fmt.value_end else None
        self._others: dict[frozenset[str], str] = {}
        #: The rule for JSON content; None where content is free text.
        self._content: str | None = None
        #: The rule for what follows the trigger; None where no call is allowed.
        self._called: str | None = None
        if policy.content_schema is not None and policy.choice in ("auto", "none"):
            path = "response_format.json_schema.schema"
            check_schema(policy.content_schema, path)
            self._content = self._json.value(Schema(policy.content_schema, path=path))
        if policy.tools and policy.choice != "none":
            self._called = self._calls()

    def text(self, reasoning: ReasoningMode) -> str:
        """Return the grammar."""
        fmt, add = self._format, self._rules.add
        if reasoning == "closed":
            return self._rules.text(add("answer", self._answer(after_reasoning=None)))
        # A call inside the reasoning would be lost: the trigger has to wait for its end.
        inside = free_text(self._rules, (*fmt.think, fmt.trigger))
        thought = f"{inside} {literal(fmt.think[1])} {self._answer(after_reasoning=True)}"
        if reasoning == "open":
            return self._rules.text(add("answer", thought))
        lead = f"{literal(fmt.think_lead)}? " if fmt.think_lead else ""
        plain = self._answer(after_reasoning=False)
        return self._rules.text(add("answer", f"{lead}{literal(fmt.think[0])} {thought} | {plain}"))

    def _answer(self, *, after_reasoning: bool | None) -> str:
        """Return the name of the rule for content and calls; None: whether reasoning precedes them is not known."""
        fmt, add = self._format, self._rules.add
        excludes = (*fmt.stray, *fmt.think)
        if self._called is None and self._content is None:
            return free_text(self._rules, (fmt.trigger, *excludes))
        if self._policy.choice == "auto" and self._content is None:
            listed = ", ".join(map(literal, excludes))
            dispatch = f"({literal(fmt.trigger)}, {self._called})"
            return add("content", f"TagDispatch({dispatch}, loop_after_dispatch=false, excludes=({listed}))")
        # What the layout has between the reasoning, if there is any, and content or a first call without content.
        separator = ""
        if fmt.reasoning_separator and after_reasoning is not False:
            separator = literal(fmt.reasoning_separator) + (" " if after_reasoning else "? ")
        lead = literal(fmt.content_separator) + " " if fmt.separator_always else separator
        content = f"{separator}{self._content}" if self._content else ""
        calls = f"{lead}{literal(fmt.trigger)} {self._called}" if self._called else ""
        return add("json_or_calls", " | ".join(part for part in (content, calls) if part))

    def _calls(self) -> str:
        """Return the name of the rule for what follows the trigger."""
        fmt = self._format
        call = self._rules.add("call", " | ".join(self._call(tool) for tool in self._policy.tools))
        opening = (fmt.section_begin + fmt.call_begin)[len(fmt.trigger) :]
        body = f"{literal(opening)} {call}" if opening else call
        if self._policy.parallel:
            body += f" ({literal(fmt.call_separator + fmt.call_begin)} {call})*"
        if fmt.section_end:
            body += f" {literal(fmt.section_end)}"
        return self._rules.add("calls", body)

    def _call(self, tool: Tool) -> str:
        """Return EBNF of a call from the tool's name on."""
        fmt = self._format
        check_schema(tool.parameters, f"{tool.path}.parameters")
        before, numbered, after = fmt.name_end.partition("{index}")
        begin = literal(tool.name + before)
        if numbered:
            begin += f" {_INDEX} {literal(after)}"
        arguments = self._json_arguments(tool) if fmt.style == "json" else self._arguments(tool)
        return f"{begin} {arguments} {literal(fmt.call_end)}"

    def _json_arguments(self, tool: Tool) -> str:
        schema = arguments_schema(tool)
        if not schema.kinds.object:
            raise RequestError(f"{tool.path}.parameters", "admits no object")
        return self._json.value(schema if tool.strict else Schema({"type": "object"}))

    def _arguments(self, tool: Tool) -> str:
        """Return the name of the rule for the arguments of a call, in the styles `raw` and `dsml`."""
        reading = tool_reading(tool)
        path = f"{tool.path}.parameters"
        assert reading.schema is not None
        shapes = reading.schema.objects()
        declared = {item.key for shape in shapes for item in shape.properties}
        rules = [self._shape(shape, reading, declared, path) for shape in shapes]
        if not rules:
            raise RequestError(path, "admits no object")
        return rules[0] if len(rules) == 1 else self._rules.add("arguments", " | ".join(dict.fromkeys(rules)))

    def _shape(self, shape: ObjectShape, reading: ToolReading, declared: set[str], path: str) -> str:
        items = []
        for item in shape.properties:
            place = f"{path}.properties.{item.key}"
            kinds = item.schema.kinds
            if not (item.required or kinds.string or kinds.object or kinds.array or kinds.scalar):
                continue  # `false`: the property may not be there
            try:
                self._format.argument_begin(item.key)
            except UnrepresentableError as error:
                raise RequestError(place, error.reason) from None
            read = reading.of(item.key)
            if reading.strict:
                body = self._argument(item.key, item.schema, read, item.schema.path or place)
            else:
                body = self._loose_argument(item.key, read)
            items.append((self._rules.add("argument", body), item.required and reading.strict))
        extra = None
        if not reading.strict:
            extra = self._rules.add("other", self._loose_argument(None, ANYTHING, declared))
        elif shape.additional is not None:
            # A key that is declared nowhere is read by what the alternatives say of other keys.
            read = reading.of("")
            extra = self._rules.add("other", self._argument(None, shape.additional, read, path, declared))
        separator = literal(self._format.arg_separator) if self._format.arg_separator else ""
        if items or extra is None:
            return self._json.order_of(items, separator, extra=extra)
        least, most = counts(shape.min_properties, shape.max_properties)
        if most == 0:
            return self._rules.add("arguments", '""')
        more = f"({separator} {extra}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        return self._rules.add("arguments", f"{extra} {more}" + ("" if least else ' | ""'))

    def _argument(
        self, key: str | None, schema: Schema, reading: Reading, path: str, declared: set[str] | None = None
    ) -> str:
        """Return EBNF of an argument whose value is valid against the schema; key None: any that is not declared."""
        strings = [] if reading.mode == "json" else [self._string(rule, reading) for rule in schema.strings()]
        texts = [text for text in dict.fromkeys(strings) if text is not None]
        kinds = schema.kinds
        value = None
        if kinds.object or kinds.array or kinds.scalar:
            try:
                value = self._json.value(schema, strings=False)
            except RequestError:
                if not texts:
                    raise
        if not texts and value is None:
            raise RequestError(path, f"none of its values can be written in the format {self._format.name}")
        return self._tagged(key, " | ".join(texts), value, declared)

    def _loose_argument(self, key: str | None, reading: Reading, declared: set[str] | None = None) -> str:
        """Return EBNF of an argument under `strict: false`: any value of the types that the reading has."""
        kinds = reading.kinds
        if self._format.style == "dsml":
            value = self._json.value(Schema(True), strings=False)
        elif kinds.object or kinds.array:
            names = [name for name, admitted in (("object", kinds.object), ("array", kinds.array)) if admitted]
            value = self._json.value(Schema({"type": names}), strings=False)
        else:
            value = None  # a scalar is one of the texts
        text = self._string(StringRule(), reading)
        assert text is not None
        return self._tagged(key, text, value, declared)

    def _tagged(self, key: str | None, text: str, value: str | None, declared: set[str] | None) -> str:
        """Return EBNF of an argument from its texts (strings, may be empty) and the rule of its other values."""
        fmt = self._format
        if fmt.style != "dsml":
            both = " | ".join(part for part in (text, value) if part)
            return f"{self._begin(key, declared)} ({both}) {literal(fmt.arg_end)}"
        choices = []
        if text:
            choices.append(f"{self._begin(key, declared, string=True)} ({text})")
        if value:
            choices.append(f"{self._begin(key, declared)} {value}")
        return f"({' | '.join(choices)}) {literal(fmt.arg_end)}"

    def _begin(self, key: str | None, declared: set[str] | None, *, string: bool = False) -> str:
        fmt = self._format
        if key is not None:
            return literal(fmt.argument_begin(key, string=string))
        before, _, after = fmt.arg_begin.replace("{string}", "true" if string else "false").partition("{key}")
        return f"{literal(before)} {self._other_keys(declared or set())} {literal(after)}"

    def _other_keys(self, declared: set[str]) -> str:
        key = frozenset(declared)
        if key not in self._others:
            self._others[key] = other_keys(self._rules, key)
        return self._others[key]

    def _string(self, rule: StringRule, reading: Reading) -> str | None:
        """Return EBNF of the raw strings of one alternative, None where the format can write none of them."""
        fmt = self._format
        if rule.values is not None:
            values = [value for value in rule.values if fmt.string_problem(value, reading) is None]
            return " | ".join(literal(value) for value in values) or None
        not_first = ""
        if fmt.style == "raw":
            not_first = "".join(char for char in "{[" if reading.begins_json(char))
        assert self._raw is not None
        return self._raw.rule(
            not_first=not_first, min_length=rule.min_length, max_length=rule.max_length, pattern=rule.pattern
        )


class TagCache:
    """Grammars by content, the least recently used ones dropped first. Safe to use from several threads.

    Args:
        entries: at most so many grammars.
        size: at most so many characters of grammar text and keys together.
    """

    def __init__(self, entries: int = 256, size: int = 16 << 20) -> None:
        self._texts: ContentCache[str] = ContentCache(entries, size)

    def get(self, fmt: Format, policy: ToolPolicy, reasoning: ReasoningMode, order: Order) -> str:
        """Return the grammar; it is built where it is not there. A request that is refused is not kept."""
        content = _content(policy, reasoning, order)

        def build() -> str:
            try:
                return _Builder(fmt, policy, order).text(reasoning)
            except RecursionError:
                raise RequestError("tools", "the schemas nest or refer too deeply") from None

        return self._texts.get((fmt, content), build, lambda text: len(text) + len(content))

    def clear(self) -> None:
        """Drop everything."""
        self._texts.clear()

    def __len__(self) -> int:
        return len(self._texts)


def _content(policy: ToolPolicy, reasoning: ReasoningMode, order: Order) -> str:
    """Return what decides the grammar, as text. Object keys are not sorted: their order is the arguments' order."""
    tools = [(tool.name, tool.strict, content_of(tool.parameters, f"{tool.path}.parameters")) for tool in policy.tools]
    schema = policy.content_schema
    content = None if schema is None else content_of(schema, "response_format.json_schema.schema")
    return repr((policy.choice, policy.parallel, reasoning, order, content, tools))


_CACHE = TagCache()


def structural_tag(fmt: Format, policy: ToolPolicy, reasoning: ReasoningMode, order: Order) -> dict[str, Any]:
    """Return the structural tag of :meth:`Format.structural_tag`."""
    text = _CACHE.get(fmt, policy, reasoning, order)
    return {"type": "structural_tag", "format": {"type": "grammar", "grammar": text}}
