# SPDX-License-Identifier: Apache-2.0
"""Grammar text in xgrammar's EBNF, and the grammar of the JSON text of values that are valid against a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

from . import _regex
from ._errors import RequestError

if TYPE_CHECKING:
    from ._schema import ArrayShape, NumberRule, ObjectShape, Schema, StringRule

__all__ = ["ANY_ORDER_LIMIT", "JsonGrammar", "Rules", "counts", "held_language", "literal", "pattern_rule"]

#: Up to this many items, any order is exact; beyond it a grammar would need too many states, and the order is the
#: declared one.
ANY_ORDER_LIMIT = 6
#: Lengths up to this are exact: each character costs a state, and a state costs a pass over the vocabulary when the
#: grammar is compiled. Longer bounds are checked afterwards. (xgrammar's own counter, `max_chars`, has no states, but
#: one rule with it makes every mask of the grammar about six times as slow.)
EXACT_LENGTH = 128
#: Of a count inside a pattern, this much is enforced: more states cost more than the check.
COUNT_LIMIT = 64
#: Of a minimum number of items or properties, this much is enforced, because a matcher's time grows with its square; a
#: maximum above the second is checked, because xgrammar counts in 32 bits.
MIN_COUNT, MAX_COUNT = 1000, 1_000_000
#: The most schemas that one grammar is made of.
MAX_SCHEMAS = 50_000
#: Digits before the point, and after it, of a number that no bound limits.
DIGITS = 20
#: A bound of more digits is checked, not enforced.
_LONGEST_BOUND = 40

_UNSAFE = re.compile(r"[^ !#-\[\]-~]")
_quoted_text = json.encoder.encode_basestring  # json.dumps(text, ensure_ascii=False), without its set-up


def _escaped(match: re.Match[str]) -> str:
    char = match.group()
    if char in '"\\':
        return "\\" + char
    code = ord(char)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def literal(text: str) -> str:
    """Return the EBNF literal of a text, quotes included; all but printable ASCII is written as escapes."""
    if text.isascii() and text.isprintable():
        text = text.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{text}"'
    return f'"{_UNSAFE.sub(_escaped, text)}"'


class Rules:
    """The rules of one grammar. Equal bodies share one rule, so that a grammar of many tools stays small."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._names: dict[str, int] = {"root": 1}
        self._shared: dict[tuple[str, str], str] = {}

    def reserve(self, hint: str) -> str:
        """Return a name that no other rule has, for a rule that is defined later (recursion)."""
        count = self._names.get(hint)
        if count is None:
            base = re.sub(r"[^A-Za-z0-9_]", "_", hint)
            if not base or base[0].isdigit():
                base = f"r_{base}"
            if base != hint:
                return self.reserve(base)
            self._names[hint] = 1
            return hint
        self._names[hint] = count + 1
        return self.reserve(f"{hint}_{count}")

    def define(self, name: str, body: str, attributes: str = "") -> None:
        """Give a reserved name its body. `attributes` is the text in brackets after the name, as in `max_chars=20`."""
        self._lines.append(f"{name}[{attributes}] ::= {body}" if attributes else f"{name} ::= {body}")

    def add(self, hint: str, body: str, attributes: str = "") -> str:
        """Return the name of the rule with this body; the hint only makes a new name readable."""
        name = self._shared.get((body, attributes))
        if name is None:
            name = self._shared[body, attributes] = self.reserve(hint)
            self.define(name, body, attributes)
        return name

    def shared(self, key: str, body: Callable[[str], str]) -> str:
        """Return the name of the one recursive rule known by this key; `body` writes it, given its name."""
        name = self._shared.get((key, "recursive"))
        if name is None:
            name = self._shared[key, "recursive"] = self.reserve(key)
            self.define(name, body(name))
        return name

    def text(self, root: str) -> str:
        """Return the whole grammar; its root rule refers to the rule named."""
        return "\n".join([f"root ::= {root}", *self._lines, ""])


# Characters ------------------------------------------------------------------------------------------------------

#: What a JSON string holds unescaped: no control character, quote or backslash; and no surrogate, because a negated
#: class of xgrammar takes bytes that are not UTF-8 for a character.
_PLAIN = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF))
_HEX = "[0-9A-Fa-f]"
#: Any escape; that of a surrogate only as one of a pair, which is one character.
_ANY_ESCAPE = (
    rf'\\(["\\/bfnrt]|u([0-9A-CEFa-cef]{_HEX}{_HEX}{_HEX}|[dD][0-7]{_HEX}{_HEX}'
    rf"|[dD][89ABab]{_HEX}{_HEX}\\u[dD][C-Fc-f]{_HEX}{_HEX}))"
)
_EBNF_ESCAPE = (
    r'[\"\\/bfnrt] | "u" ([0-9A-CEFa-cef] [0-9A-Fa-f]{3,3} | [dD] [0-7] [0-9A-Fa-f]{2,2}'
    r' | [dD] [89ABab] [0-9A-Fa-f]{2,2} "\\u" [dD] [C-Fc-f] [0-9A-Fa-f]{2,2})'
)
_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}


def _point(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\u{{{code:x}}}"


#: UTF-8's lengths: first and last code point, and how many bits stand below the first byte.
_LENGTHS = ((0, 0x7F, 0), (0x80, 0x7FF, 6), (0x800, 0xFFFF, 12), (0x10000, 0x10FFFF, 18))


def _cut(low: int, high: int, bits: int) -> list[tuple[int, int]]:
    """Cut a range of code points of one length so that the bytes of each part form a rectangle."""
    size = 1 << bits
    if low % size == 0 and high % size == size - 1:
        return [(low, high)]
    if low // size == high // size:
        return _cut(low, high, bits - 6)
    parts = []
    if low % size:
        parts += _cut(low, low | (size - 1), bits)
        low = (low | (size - 1)) + 1
    rest = []
    if high % size != size - 1:
        rest = _cut(high - high % size, high, bits)
        high -= high % size + 1
    return parts + ([(low, high)] if low < high else []) + rest


def _rectangles(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Cut ranges of characters so that xgrammar 0.2.7 reads each as it stands: the bytes of each form a rectangle."""
    return [
        part
        for low, high in ranges
        for first, last, bits in _LENGTHS
        if max(low, first) <= min(high, last)
        for part in _cut(max(low, first), min(high, last), bits)
    ]


def _bracket(ranges: Iterable[tuple[int, int]]) -> str:
    """Return a class of characters, or two side by side: in one class of a `Regex`, neighbours would be joined."""
    classes: tuple[list[tuple[int, int]], ...] = ([], [])
    for part in _rectangles(ranges):
        joined = bool(classes[0]) and classes[0][-1][1] + 1 == part[0]
        classes[1 if joined else 0].append(part)
    texts = [
        f"[{''.join(_point(low) if low == high else f'{_point(low)}-{_point(high)}' for low, high in some)}]"
        for some in classes
        if some
    ]
    return texts[0] if len(texts) == 1 else f"({'|'.join(texts)})"


def _clipped(ranges: _regex.Ranges, within: _regex.Ranges) -> list[tuple[int, int]]:
    return [
        (max(low, first), min(high, last))
        for low, high in ranges
        for first, last in within
        if max(low, first) <= min(high, last)
    ]


_STRING_CHAR = f"({_bracket(_PLAIN)}|{_ANY_ESCAPE})"


def _raw_char(ranges: _regex.Ranges) -> str:
    return _bracket(ranges)


def _json_char(ranges: _regex.Ranges) -> str:
    """Return the regular expression for one of these characters as `json.dumps(..., ensure_ascii=False)` writes it."""
    if ranges[0][0] == 0 and ranges == ((0, 0xD7FF), (0xE000, 0x10FFFF)):
        return _STRING_CHAR
    parts = []
    plain = _clipped(ranges, _PLAIN)
    if plain:
        parts.append(_bracket(plain))
    for code, letter in _SHORT.items():
        if any(low <= code <= high for low, high in ranges):
            parts.append(r"\\" + (letter if letter.isalnum() else "\\" + letter))
    for code in range(0x20):
        if code not in _SHORT and any(low <= code <= high for low, high in ranges):
            parts.append(rf"\\u00{code:02x}")
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"


def _loosened(node: _regex.Node) -> _regex.Node:
    """Return the node with counts above `COUNT_LIMIT` widened: their states would cost more than the check does."""
    if isinstance(node, _regex.Seq):
        return _regex.Seq(tuple(map(_loosened, node.items)))
    if isinstance(node, _regex.Alt):
        return _regex.Alt(tuple(map(_loosened, node.options)))
    if isinstance(node, _regex.Repeat):
        item = _loosened(node.item)
        room = max(1, COUNT_LIMIT // _regex.size(item))
        most = node.most if node.most is not None and node.most <= room else None
        if node.most == 0:
            most = 0
        return _regex.Repeat(item, min(node.least, room), most)
    return node


def held_language(pattern: str) -> _regex.Node | None:
    """Return the texts in which the pattern is found, its counts widened; None where a grammar cannot hold them."""
    node = _regex.language(pattern)
    if node is None:
        return None
    node = _loosened(node)
    return node if _regex.size(node) <= 1024 else None


def _excluded(node: _regex.Node, char: str) -> bool:
    """Whether no text of the node holds the character."""
    if isinstance(node, _regex.Chars):
        return not any(low <= ord(char) <= high for low, high in node.ranges)
    if isinstance(node, _regex.Seq):
        return all(_excluded(item, char) for item in node.items)
    if isinstance(node, _regex.Alt):
        return all(_excluded(option, char) for option in node.options)
    return not isinstance(node, _regex.Repeat) or _excluded(node.item, char)


def pattern_rule(rules: Rules, pattern: str, closer: str) -> str | None:
    """Return the name of the rule for raw texts in which the pattern is found, none of which holds the closer.

    None where a grammar cannot hold the pattern, or where its texts might hold the closer: then the text is free and
    the pattern is checked afterwards. A text cannot hold the closer when one of the closer's characters occurs in none.
    """
    node = held_language(pattern)
    if node is None or not any(_excluded(node, char) for char in closer):
        return None
    return rules.add("pattern", f"Regex({literal(_regex.raw_text(node, _raw_char))})")


# Numbers ---------------------------------------------------------------------------------------------------------


def _digits(least: int, most: int) -> str:
    return f"[0-9]{{{least},{most}}}" if most else '""'


def _digit(low: int, high: int) -> str:
    return f"[{low}-{high}]" if low < high else f'"{low}"'


def _same_length(low: str, high: str) -> list[str]:
    """Return EBNF alternatives for the numbers from low to high, which have equally many digits."""
    if low == high:
        return [literal(low)]
    count = len(low)
    if low == "0" * count and high == "9" * count:
        return [f"[0-9]{{{count},{count}}}"]
    if low[0] == high[0]:
        prefix = 1
        while low[prefix] == high[prefix]:
            prefix += 1
        inner = _same_length(low[prefix:], high[prefix:])
        return [f"{literal(low[:prefix])} {part}" for part in inner]
    first, last = int(low[0]), int(high[0])
    found = []
    rest = count - 1
    if rest and low[1:] != "0" * rest:
        found += [f"{literal(low[0])} {part}" for part in _same_length(low[1:], "9" * rest)]
        first += 1
    top = None
    if rest and high[1:] != "9" * rest:
        top = [f"{literal(high[0])} {part}" for part in _same_length("0" * rest, high[1:])]
        last -= 1
    if first <= last:
        found.append(_digit(first, last) + (f" [0-9]{{{rest},{rest}}}" if rest else ""))
    return found + (top or [])


def _naturals(low: int, high: int | None) -> list[str]:
    """Return EBNF alternatives for the decimal integers from low (at least 0) to high; None: of up to 20 digits."""
    most = max(DIGITS, len(str(low))) if high is None else len(str(high))
    top = 10**most - 1 if high is None else high
    if low > top:
        return []
    found: list[str] = []
    if low == 0:
        found.append('"0"')
        low = 1
    full_from = full_to = 0
    for count in range(len(str(low)), most + 1):
        first, last = max(low, 10 ** (count - 1)), min(top, 10**count - 1)
        if first > last:
            continue
        if first == 10 ** (count - 1) and last == 10**count - 1:
            full_from, full_to = full_from or count, count
            continue
        found += _same_length(str(first), str(last))
    if full_from:
        tail = "" if full_to == 1 else f" {_digits(full_from - 1, full_to - 1)}"
        found.append(f"[1-9]{tail}")
    return found


def _fraction(low: str, above: bool, high: str | None, below: bool, most: int, start: bool) -> list[str]:
    """Return EBNF alternatives for the digits after the point of a fraction between two fractions.

    Args:
        low: Digits of the lower bound, without zeros at the end; "" is 0.
        above: Whether the fraction has to be more than the lower bound.
        high: Those of the upper bound; None: 1, which no fraction reaches.
        below: Whether the fraction has to be less than the upper bound.
        most: How many digits there may be.
        start: Whether a digit has to follow, because the point was just written.
    """
    if high == "" and (below or low or above):
        return []
    if most == 0:
        return [] if start or low or above else ['""']
    if high == "":
        return [f'"0"{{{int(start)},{most}}}']
    if not low and high is None:
        if not above:
            return [_digits(int(start), most)]
        return [f'"{"0" * count}" [1-9] {_digits(0, most - count - 1)}' for count in range(most)]
    found = []
    if not start and not low and not above:
        found.append('""')
    first = int(low[0]) if low else 0
    last = int(high[0]) if high else 9
    exact_low = bool(low) or above
    if high is not None and first == last:
        inner = _fraction(low[1:], above, high[1:].rstrip("0"), below, most - 1, False)
        return found + [f'"{first}" {part}' for part in inner]
    if exact_low:
        found += [f'"{first}" {part}' for part in _fraction(low[1:], above, None, False, most - 1, False)]
        first += 1
    tops = []
    if high is not None:
        tops = [f'"{last}" {part}' for part in _fraction("", False, high[1:].rstrip("0"), below, most - 1, False)]
        last -= 1
    if first <= last:
        found.append(f"{_digit(first, last)} {_digits(0, most - 1)}")
    return found + tops


def _magnitudes(
    low: Decimal, above: bool, high: Decimal | None, below: bool, most: int, whole: bool = True
) -> list[str]:
    """Return EBNF alternatives for decimals from low (at least 0) to high, without sign and exponent."""
    if high is not None and (high < low or (high == low and (above or below))):
        return []
    low_int, low_frac = int(low), _fraction_digits(low)
    high_int = None if high is None else int(high)
    high_frac = "" if high is None else _fraction_digits(high)
    found: list[str] = []

    def with_fraction(integer: str, parts: list[str]) -> None:
        if parts:
            found.append(f'{integer} "." {parts[0]}' if len(parts) == 1 else f'{integer} "." ({" | ".join(parts)})')

    def edge(integer: int, low_digits: str, over: bool, high_digits: str | None, under: bool) -> None:
        bare = not low_digits and not over and (high_digits is None or high_digits != "" or not under)
        if bare:
            found.append(literal(str(integer)))
        with_fraction(literal(str(integer)), _fraction(low_digits, over, high_digits, under, most, True))

    if high_int is not None and high_int == low_int:
        edge(low_int, low_frac, above, high_frac, below)
        return found
    first = low_int
    if low_frac or above:
        edge(low_int, low_frac, above, None, False)
        first += 1
    last = None if high_int is None else high_int - 1
    middle = _naturals(first, last) if last is None or first <= last else []
    if middle:
        found.append(f'({" | ".join(middle)}) ("." {_digits(1, most)})?')
    if high_int is not None:
        edge(high_int, "", False, high_frac, below)
    return found


def _fraction_digits(value: Decimal) -> str:
    return f"{value % 1:f}".partition(".")[2].rstrip("0")


def _integer_rule(rule: NumberRule) -> list[str]:
    low, high = rule.integers()
    found = []
    if low is None or low < 0:
        # -1 down to low.
        nearest = 1 if high is None or high >= -1 else -high
        parts = _naturals(nearest, None if low is None else -low)
        if parts:
            found.append(f'"-" ({" | ".join(parts)})')
    if high is None or high >= 0:
        found += _naturals(max(low or 0, 0), high)
    return found


def _number_rule(rule: NumberRule) -> list[str]:
    low, high = rule.minimum, rule.maximum
    # A fraction so long that it rounds to the excluded bound would break it.
    excluded = [bound for bound, out in ((low, rule.above), (high, rule.below)) if out and bound]
    most = DIGITS if not excluded else max(1, 15 - max(len(str(abs(int(bound)))) for bound in excluded))
    zero = Decimal(0)
    found = []
    if low is None or low < 0:
        nearest, past = (zero, True) if high is None or high >= 0 else (-high, rule.below)
        parts = _magnitudes(nearest, past, None if low is None else -low, rule.above, most)
        if parts:
            found.append(f'"-" ({" | ".join(parts)})')
    if high is None or high >= 0:
        bottom, past = (low, rule.above) if low is not None and low >= 0 else (zero, False)
        found += _magnitudes(bottom, past, high, rule.below, most)
    return found


# Values ----------------------------------------------------------------------------------------------------------


class JsonGrammar:
    """Rules for JSON text of values that are valid against a schema.

    The text has at most one space after `,` and after `:`, and no other white space. Strings and keys that a schema
    names are written as `json.dumps(..., ensure_ascii=False)` writes them.

    Args:
        rules: Where the rules go; several grammars may share it.
        order: `declared`: properties come in the order in which the schema declares them, others after them. `any`: in
            any order, for objects of up to `ANY_ORDER_LIMIT` declared properties.
    """

    def __init__(self, rules: Rules, order: Literal["declared", "any"] = "declared") -> None:
        self.rules = rules
        self.order = order
        # The schema stands beside its rule: a key holds identities, which are unique while the node lives.
        self._done: dict[Any, tuple[str | None, Schema]] = {}
        self._open: dict[Any, str] = {}
        self._needs: dict[Any, list[list[Any]]] = {}
        self._recursive = False
        self._any_name = self._string_name = self._number_name = ""
        self._bounded_names: dict[tuple[int, int | None], str] = {}
        self.comma = '"," " "?'
        self.colon = '":" " "?'

    def value(self, schema: Schema, *, strings: bool = True) -> str:
        """Return the name of the rule for JSON text of a value that is valid against the schema.

        Args:
            schema: What the value is valid against.
            strings: False: leaves the schema's own string alternatives out, not those inside arrays and objects.

        Raises:
            RequestError: when no finite value is valid, or none is once strings are left out.
        """
        try:
            name = self._value(schema, strings)
        except RecursionError:
            raise RequestError(schema.path, "refers to its definitions in too deep a chain") from None
        if name is None:
            raise RequestError(schema.path, "admits no value" if strings else "admits no value but strings")
        if self._recursive:
            self._finite(schema, strings)
        return name

    def order_of(self, items: Sequence[tuple[str, bool]], separator: str, *, extra: str | None = None) -> str:
        """Return the name of the rule for a sequence of items in the grammar's order, each at most once.

        The rule matches the empty text where no item is required.

        Args:
            items: Each (EBNF of the item, whether it is required), in declared order.
            separator: EBNF of what stands between two items; "" for nothing.
            extra: EBNF of one further item, of which any number may follow; in any order, may stand anywhere.
        """
        return self.rules.add("items", self._ordered(items, separator, extra))

    def _ordered(self, items: Sequence[tuple[str, bool]], separator: str, extra: str | None) -> str:
        if self.order == "any" and 0 < len(items) <= ANY_ORDER_LIMIT:
            return self._any_order(items, separator, extra)
        add = self.rules.add
        tail = add("more", f"({separator} {extra})*") if extra is not None else ""
        tails = [tail]
        for item, required in reversed(items):
            if required:
                tail = f"{separator} {item} {tail}"
            else:
                if tail and " " in tail:
                    tail = add("part", tail)
                tail = add("part", f"{tail} | {separator} {item} {tail}" if tail else f'"" | {separator} {item}')
            tails.append(tail)
        tails.reverse()
        found = []
        for (item, required), after in zip(items, tails[1:], strict=True):
            found.append(f"{item} {after}")
            if required:
                break
        else:
            if extra is not None:
                found.append(f"{extra} {tails[-1]}")
            found.append('""')
        return " | ".join(found)

    def _any_order(self, items: Sequence[tuple[str, bool]], separator: str, extra: str | None) -> str:
        """Return a rule body whose states are the sets of items that were written."""
        needed = sum(1 << index for index, (_, required) in enumerate(items) if required)
        everything = (1 << len(items)) - 1
        names: dict[int, str] = {}
        for state in range(everything, -1, -1):
            # With every bit that a next state adds, the number grows: its rule is there already.
            between = f"{separator} "
            own = self.rules.reserve("order") if extra is not None else ""
            parts = [] if needed & ~state else ['""']
            parts += [
                f"{between}{item} {names[state | 1 << index]}"
                for index, (item, _) in enumerate(items)
                if not state >> index & 1
            ]
            if extra is not None:
                parts.append(f"{between}{extra} {own}")
                self.rules.define(own, " | ".join(parts))
                names[state] = own
            else:
                names[state] = self.rules.add("order", " | ".join(parts))
        first = [f"{item} {names[1 << index]}" for index, (item, _) in enumerate(items)]
        if extra is not None:
            first.append(f"{extra} {names[0]}")
        if not needed:
            first.append('""')
        return " | ".join(first)

    # One schema ---------------------------------------------------------------------------------------------------

    def _value(self, schema: Schema, strings: bool = True) -> str | None:
        key = (schema.key, strings)
        done = self._done.get(key)
        if done is not None:
            return done[0]
        if not schema.key[1]:
            name: str | None = self._any() if strings else self._any_but_strings()
            self._done[key] = (name, schema)
            self._needs[key] = [[]]
            return name
        if key in self._open:
            self._recursive = True
            if not self._open[key]:
                self._open[key] = self.rules.reserve("value")
            return self._open[key]
        if len(self._done) > MAX_SCHEMAS:
            raise RequestError(schema.path, f"the schemas multiply to more than {MAX_SCHEMAS}")
        self._open[key] = ""
        bodies: list[str] = []
        needs: list[list[Any]] = []
        hint = "value"
        for alternative in schema.alternatives():
            needed: list[Any] = []
            if alternative.kind == "string":
                found = self._string(alternative) if strings else None
            elif alternative.kind == "number":
                found = self._number(alternative)
            elif alternative.kind == "constant":
                found = self._constant(alternative.value)
            else:
                hint = alternative.kind
                if alternative.kind == "object":
                    found = self._object(alternative, needed)
                else:
                    found = self._array(alternative, needed)
            if found is not None:
                needs.append(needed)
                if found not in bodies:
                    bodies.append(found)
        reserved = self._open.pop(key)
        name = None
        if bodies:
            body = " | ".join(bodies)
            if reserved:
                self.rules.define(reserved, body)
                name = reserved
            elif len(bodies) == 1 and body.isidentifier():
                name = body
            else:
                name = self.rules.add(hint, body)
        elif reserved:
            self.rules.define(reserved, '""')  # only dropped alternatives refer to it
        self._done[key] = (name, schema)
        self._needs[key] = needs
        return name

    def _finite(self, schema: Schema, strings: bool) -> None:
        """Refuse a schema of which a part asks for itself again without end."""
        finite: set[Any] = set()
        grew = True
        while grew:
            found = {key for key, needs in self._needs.items() if any(all(n in finite for n in part) for part in needs)}
            grew = len(found) > len(finite)
            finite = found
        for key, (name, inner) in self._done.items():
            if name is not None and key not in finite:
                raise RequestError(inner.path or schema.path, "requires itself without end: no finite value is valid")

    def _any(self) -> str:
        """Return the name of the rule for any value."""
        if not self._any_name:
            self._any_name = self.rules.shared("any", self._define_any)
        return self._any_name

    def _define_any(self, name: str) -> str:
        return f"{self._free_string()} | {self._any_but_strings(name)}"

    def _any_but_strings(self, name: str = "") -> str:
        name = name or self._any()
        array = self.rules.add("array", f'"[" {name} ({self.comma} {name})* "]" | "[]"')
        entry = f"{self._free_string()} {self.colon} {name}"
        object_ = self.rules.add("object", f'"{{" {entry} ({self.comma} {entry})* "}}" | "{{}}"')
        return self.rules.add("other", f'{self._free_number()} | "true" | "false" | "null" | {array} | {object_}')

    def _free_number(self) -> str:
        if not self._number_name:
            self._number_name = self._define_number()
        return self._number_name

    def _define_number(self) -> str:
        # 20 digits and an exponent of at most 277 stay under 1.8e308; a negative exponent cannot overflow.
        digits, fraction = _digits(0, DIGITS - 1), f'"." {_digits(1, DIGITS + 4)}'
        positive = '"+"? ([0-9]{1,2} | [01] [0-9]{2,2} | "2" [0-6] [0-9] | "27" [0-7])'
        exponent = self.rules.add("exponent", f'[eE] ({positive} | "-" [0-9]{{1,3}})')
        return self.rules.add(
            "number", f'("0" | "-0" {fraction} | "-"? [1-9] {digits} ({fraction})? | "0" {fraction}) ({exponent})?'
        )

    def _string(self, rule: StringRule) -> str | None:
        if rule.values is not None:
            return " | ".join(literal(_quoted_text(value)) for value in rule.values) or None
        least, most = rule.min_length, rule.max_length
        if rule.pattern is not None:
            exact = _regex.language(rule.pattern)
            node = held_language(rule.pattern)
            if node is not None and exact is not None:
                low, high = _regex.lengths(exact)
                if (most is not None and low > most) or (high is not None and high < least):
                    return None
                return self._text(_regex.raw_text(node, _json_char))
        return self._bounded(min(least, EXACT_LENGTH), most if most is None or most <= EXACT_LENGTH else None)

    def _text(self, text: str) -> str:
        """Return the name of the rule for a quoted string, given the regular expression of its inside."""
        # The look-ahead settles most tokens that go past the closing quote when the grammar is compiled.
        quoted = literal(f'"{text}"')
        return self.rules.add("string", f"Regex({quoted}) (= [,}}\\]:])")

    def _free_string(self) -> str:
        if not self._string_name:
            self._string_name = self._text(f"{_STRING_CHAR}*")
        return self._string_name

    def _bounded(self, least: int, most: int | None) -> str:
        """Return the name of the rule for a string of so many characters, an escape counted as the one it stands for.

        One rule for each number of characters that may still come, which all strings of a grammar share. A repetition
        of a rule would leave every token of several characters to be tried while generating.
        """
        name = self._bounded_names.get((least, most))
        if name is None:
            name = self._bounded_names[least, most] = self._count(least, most)
        return name

    def _count(self, least: int, most: int | None) -> str:
        if least == 0 and most is None:
            return self._free_string()
        if least == 1 and most is None:
            return self._text(f"{_STRING_CHAR}+")
        add, plain, end = self.rules.add, _ebnf_class(_PLAIN), "(= [,}\\]:])"
        escape = add("escape", _EBNF_ESCAPE)
        if most is None:
            after = add("text_end", f"Regex({literal(_STRING_CHAR + '*' + chr(34))}) {end}")
        else:
            after = add("text", f'("\\"") {end}')
            for _ in range(most - least):
                after = add("text", f'("\\"" | {plain} {after} | "\\\\" {escape} {after}) {end}')
        for _ in range(least):
            after = add("text", f'({plain} {after} | "\\\\" {escape} {after}) {end}')
        return add("string", f'"\\"" {after}')

    def _number(self, rule: NumberRule) -> str | None:
        bounds = [bound for bound in (rule.minimum, rule.maximum) if bound is not None]
        if any(
            not -_LONGEST_BOUND < bound.adjusted() < _LONGEST_BOUND or len(bound.as_tuple().digits) > _LONGEST_BOUND
            for bound in bounds
            if bound
        ):
            rule = rule.unbounded()
            bounds = []
        if rule.integer:
            parts = _integer_rule(rule)
            return self.rules.add("integer", " | ".join(parts)) if parts else None
        if not bounds:
            return self._free_number()
        parts = _number_rule(rule)
        return self.rules.add("number", " | ".join(parts)) if parts else None

    def _constant(self, value: Any) -> str:
        if isinstance(value, Mapping):
            parts = [
                f"{literal(_quoted_text(key))} {self.colon} {self._constant(inner)}" for key, inner in value.items()
            ]
            return f'"{{" {f" {self.comma} ".join(parts)} "}}"' if parts else '"{}"'
        if isinstance(value, (list, tuple)):
            parts = [self._constant(inner) for inner in value]
            return f'"[" {f" {self.comma} ".join(parts)} "]"' if parts else '"[]"'
        return literal(json.dumps(value, ensure_ascii=False))

    def _array(self, shape: ArrayShape, needed: list[Any]) -> str | None:
        least, most = counts(shape.min_items, shape.max_items)
        names: list[str] = []
        for index, inner in enumerate(shape.prefix):
            name = self._value(inner)
            if name is None:
                if index < least:
                    return None
                most = index if most is None else min(most, index)
                break
            if index < least:
                needed.append((inner.key, True))
            names.append(name)
        if most is not None:
            names = names[:most]
        item = None
        if shape.items is not None and (most is None or most > len(names)):
            item = self._value(shape.items)
            if item is not None and least > len(names):
                needed.append((shape.items.key, True))
        count = len(names)
        if item is None:
            most = count if most is None else min(most, count)
        if most is not None and most < least:
            return None
        comma = self.comma
        if most == 0:
            return '"[]"'
        tail = ""
        if item is not None:
            low = max(least - max(count, 1), 0)
            high = "" if most is None else str(most - max(count, 1))
            more = f"({comma} {item})*" if (low, high) == (0, "") else f"({comma} {item}){{{low},{high}}}"
            if high == "0":
                more = ""
            if not count:
                return f'"[" {item} {more} "]"' + (' | "[]"' if least == 0 else "")
            tail = more
        for index in range(count - 1, 0, -1):
            tail = f"{comma} {names[index]} {tail}"
            if index >= least:
                tail = f"({tail})?"
        return f'"[" {names[0]} {tail} "]"' + (' | "[]"' if least == 0 else "")

    def _object(self, shape: ObjectShape, needed: list[Any]) -> str | None:
        items: list[tuple[str, bool]] = []
        for known in shape.properties:
            name = self._value(known.schema)
            if name is None:
                if known.required:
                    return None
                continue
            if known.required:
                needed.append((known.schema.key, True))
            items.append((f'{literal(_quoted_text(known.key) + ":")} " "? {name}', known.required))
        extra = None
        if shape.additional is not None:
            name = self._value(shape.additional)
            if name is not None:
                extra = f"{self._key([known.key for known in shape.properties])} {self.colon} {name}"
                if shape.min_properties > len(items):
                    needed.append((shape.additional.key, True))
        if items:
            if shape.max_properties is not None and sum(required for _, required in items) > shape.max_properties:
                return None
            if extra is None and len(items) < shape.min_properties:
                return None
            body = self._ordered(items, self.comma, extra)
            return f'"{{" {body} "}}"' if " | " not in body else f'"{{" ({body}) "}}"'
        least, most = counts(shape.min_properties, shape.max_properties)
        if extra is None or most == 0:
            return '"{}"' if least == 0 else None
        if most is not None and most < least:
            return None
        more = f"({self.comma} {extra})" + (
            "*" if least <= 1 and most is None else f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        )
        return f'"{{" {extra} {more} "}}"' + (' | "{}"' if least == 0 else "")

    def _key(self, known: Sequence[str]) -> str:
        """Return the name of the rule for a key, quotes included, that is none of the declared ones."""
        if not known:
            return self._free_string()
        # One spelling per character, or an escape would write a declared key in another way.
        escape = r"\\([\u{22}\u{5c}bfnrt]|u00[01][0-9a-f])"
        rest = self.rules.add("key_end", f'Regex({literal(f"({_bracket(_PLAIN)}|{escape})*" + chr(34))}) (= ":")')
        tree: dict[str, Any] = {}
        for name in known:
            node = tree
            for char in name:
                node = node.setdefault(char, {})
            node[""] = {}
        return self.rules.add("key", f'"\\"" {self._key_after(tree, rest)}')

    def _key_after(self, node: Mapping[str, Any], rest: str) -> str:
        chars = sorted(char for char in node if char)
        taken = tuple((ord(char), ord(char)) for char in chars)
        parts = [] if "" in node else ['"\\""']
        plain = _clipped(_regex.complement(taken), _PLAIN)
        parts.append(f"{_ebnf_class(plain)} {rest}")
        escapes = [json.dumps(chr(code)) for code in (*range(0x20), 0x22, 0x5C)]
        left = [escape[1:-1] for escape in escapes if json.loads(escape) not in node]
        if len(left) == len(escapes):
            parts.append(f'"\\\\" ([\\"\\\\bfnrt] | "u00" [01] [0-9a-f]) {rest}')
        else:
            parts.append(f"({' | '.join(map(literal, left))}) {rest}")
        for char in chars:
            inner = self._key_after(node[char], rest)
            parts.append(f"{literal(_quoted_text(char)[1:-1])} {inner}")
        return self.rules.add("key_rest", " | ".join(parts))


def counts(least: int, most: int | None) -> tuple[int, int | None]:
    """Return how much of these bounds of a number of items a grammar enforces."""
    return min(least, MIN_COUNT), None if most is None or most > MAX_COUNT else most


def _ebnf_class(ranges: Iterable[tuple[int, int]]) -> str:
    def point(code: int) -> str:
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

    parts = _rectangles(ranges)
    return f"[{''.join(point(low) if low == high else f'{point(low)}-{point(high)}' for low, high in parts)}]"
