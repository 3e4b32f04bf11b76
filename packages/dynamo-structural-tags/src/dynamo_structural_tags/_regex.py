# SPDX-License-Identifier: Apache-2.0
"""The regular expressions of `pattern`, as far as a grammar can hold them.

A pattern is read as ECMA-262 reads it, `\\d`, `\\w` and `\\s` in ASCII. What is read here means the same to Python's
`re` under `re.ASCII`, which checks the finished value; what a grammar cannot hold (look-around, back references, `\\b`,
flags, anchors in the middle) gives None, and then the check alone decides.

`re` tries one way after another, and a client's pattern may have it try without end. :func:`search` bounds the work: it
asks `re` where that cannot take long, and else follows all ways at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

__all__ = [
    "Alt",
    "Chars",
    "Node",
    "Ranges",
    "Repeat",
    "Seq",
    "TooCostlyError",
    "bounded",
    "compiled",
    "complement",
    "holds",
    "language",
    "lengths",
    "raw_text",
    "repeats_a_group",
    "search",
    "size",
    "union",
]

_LAST = 0x10FFFF
#: Lone surrogates are no characters of a text.
_SURROGATES = (0xD800, 0xDFFF)
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Chars:
    """One character out of these inclusive ranges of code points, sorted and apart from each other."""

    ranges: Ranges


@dataclass(frozen=True)
class Seq:
    """One after the other."""

    items: tuple[Node, ...]


@dataclass(frozen=True)
class Alt:
    """Either of them."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """The item, `least` to `most` times; None: without end."""

    item: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class _Anchor:
    #: `^`, `$`, `b` or `B`.
    char: str


@dataclass(frozen=True)
class _Look:
    """Look-ahead or look-behind."""

    item: Node
    behind: bool
    negative: bool


Node: TypeAlias = "Chars | Seq | Alt | Repeat | _Anchor | _Look"


class _Unheld(Exception):
    """Nothing a grammar can hold."""


def union(ranges: list[tuple[int, int]]) -> Ranges:
    """Return the ranges sorted and apart from each other."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def complement(ranges: Ranges) -> Ranges:
    """Return every character outside the ranges, surrogates never."""
    found = []
    start = 0
    for low, high in union([*ranges, _SURROGATES]):
        if start < low:
            found.append((start, low - 1))
        start = high + 1
    if start <= _LAST:
        found.append((start, _LAST))
    return tuple(found)


def _ranges(text: str) -> Ranges:
    return union([(ord(low), ord(high)) for low, high in zip(text[::2], text[1::2], strict=True)])


_DIGIT = _ranges("09")
_WORD = _ranges("09AZaz__")
_SPACE = _ranges("\t\r  ")
_CLASSES = {
    "d": _DIGIT,
    "w": _WORD,
    "s": _SPACE,
    "D": complement(_DIGIT),
    "W": complement(_WORD),
    # ECMA's white space is wider than ASCII's: in neither \s nor \S.
    "S": complement(
        union(
            [
                *_SPACE,
                *_ranges(
                    "\x1c\x1f\x85\x85\xa0\xa0\u1680\u1680\u2000\u200a\u2028\u2029\u202f\u202f\u205f\u205f"
                    "\u3000\u3000\ufeff\ufeff"
                ),
            ]
        )
    ),
}
#: As Python reads them, for the check.
_PYTHON = {**_CLASSES, "S": complement(_SPACE)}
_DOT = Chars(complement(_ranges("\n\n\r\r\u2028\u2029")))
_ANY = Repeat(Chars(complement(())), 0, None)
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_COUNT = re.compile(r"\{([0-9]+)(,([0-9]*))?\}")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})")
#: An escape or a class, which stay, or the end's anchor.
_DOLLAR = re.compile(r"(\\.|\[\^?\]?(?:\\.|[^\]\\])*\])|\$", re.DOTALL)
_NAME = re.compile(r"<[A-Za-z_][A-Za-z0-9_]*>")
_NAMED = re.compile(r"\(\?<([A-Za-z_][A-Za-z0-9_]*)>")


@lru_cache(maxsize=256)
def compiled(pattern: str) -> re.Pattern[str]:
    """Return the pattern for Python's `search`.

    Raises:
        re.error: when it is no regular expression, or one that Python has no word for (`\\p{...}`).
    """
    # Python's `$` also matches before a line break at the end, ECMA's does not.
    pattern = _DOLLAR.sub(lambda found: found[1] or r"\Z", _NAMED.sub(r"(?P<\1>", pattern))
    return re.compile(pattern, re.ASCII)


class _Reader:
    """Reads a pattern; `python`: by Python's classes, else by what both dialects agree on."""

    def __init__(self, text: str, *, python: bool = False) -> None:
        self.text = text
        self.at = 0
        self.classes = _PYTHON if python else _CLASSES
        self.dot = Chars(complement(_ranges("\n\n"))) if python else _DOT

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def take(self, text: str) -> bool:
        if self.text.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def options(self) -> Node:
        found = [self.sequence()]
        while self.take("|"):
            found.append(self.sequence())
        return found[0] if len(found) == 1 else Alt(tuple(found))

    def sequence(self) -> Node:
        items: list[Node] = []
        while self.peek() not in ("", "|", ")"):
            items.append(self.quantified(self.atom()))
        return items[0] if len(items) == 1 else Seq(tuple(items))

    def quantified(self, item: Node) -> Node:
        if self.take("*"):
            bounds: tuple[int, int | None] = (0, None)
        elif self.take("+"):
            bounds = (1, None)
        elif self.take("?"):
            bounds = (0, 1)
        elif count := _COUNT.match(self.text, self.at):
            self.at = count.end()
            least = int(count[1])
            bounds = (least, least if count[2] is None else int(count[3]) if count[3] else None)
        else:
            return item
        if isinstance(item, (_Anchor, _Look)) or self.peek() == "+":
            raise _Unheld
        self.take("?")  # a lazy quantifier admits the same texts
        return Repeat(item, *bounds)

    def atom(self) -> Node:
        if self.take("("):
            if self.take("?") and not self.take(":"):
                for sign in ("=", "!", "<=", "<!"):
                    if self.take(sign):
                        inner = self.options()
                        self.take(")")
                        return _Look(inner, "<" in sign, "!" in sign)
                self.take("P")
                named = _NAME.match(self.text, self.at)
                if named is None:
                    raise _Unheld
                self.at = named.end()
            inner = self.options()
            self.take(")")
            return inner
        if self.take("["):
            return self.bracket()
        if self.take("."):
            return self.dot
        if self.take("\\"):
            for sign in "bB":
                if self.take(sign):
                    return _Anchor(sign)
            return Chars(self.escape())
        char = self.peek()
        self.at += 1
        if char in "^$":
            return _Anchor(char)
        if char == "{" and self.peek() == ",":
            raise _Unheld  # Python reads a count, ECMA the characters
        return Chars(_ranges(char * 2))

    def escape(self) -> Ranges:
        char = self.peek()
        if char in self.classes:
            self.at += 1
            return self.classes[char]
        if char in _ESCAPES:
            self.at += 1
            return _ranges(_ESCAPES[char] * 2)
        if code := _HEX.match(self.text, self.at):
            self.at = code.end()
            value = int(code[1] or code[2], 16)
            if _SURROGATES[0] <= value <= _SURROGATES[1]:
                raise _Unheld
            return ((value, value),)
        if not char or char.isalnum() or ord(char) > 127:
            raise _Unheld  # \b, back references, \0 and what only one of the two dialects knows
        self.at += 1
        return _ranges(char * 2)

    def bracket(self) -> Node:
        negated = self.take("^")
        if self.peek() == "]":
            raise _Unheld  # empty to ECMA, a literal bracket to Python
        found: list[tuple[int, int]] = []
        while not self.take("]"):
            low = self.member()
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self.member()
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or high[0][0] != high[0][1]:
                    raise _Unheld
                found.append((low[0][0], high[0][0]))
            else:
                found.extend(low)
        return Chars(complement(union(found)) if negated else _within(union(found)))

    def member(self) -> Ranges:
        if self.take("\\"):
            if self.take("b"):
                return _ranges("\b\b")
            return self.escape()
        char = self.peek()
        if not char:
            raise _Unheld
        self.at += 1
        return _ranges(char * 2)


def _within(ranges: Ranges) -> Ranges:
    return complement(complement(ranges))


def _anchored(node: Node) -> Node:
    """Return what a whole text is when the node is searched for in it."""
    if isinstance(node, Alt):
        return Alt(tuple(_anchored(option) for option in node.options))
    items: list[Node] = list(node.items) if isinstance(node, Seq) else [node]
    if len(items) == 1 and isinstance(items[0], Alt):
        return _anchored(items[0])
    begins = ends = False
    while items and items[0] == _Anchor("^"):
        begins = True
        del items[0]
    while items and items[-1] == _Anchor("$"):
        ends = True
        del items[-1]
    if not begins:
        items.insert(0, _ANY)
    if not ends:
        items.append(_ANY)
    if not begins and not ends and len(items) == 2:
        items = [_ANY]
    return Seq(tuple(items))


def holds(node: Node) -> bool:
    """Whether a grammar can hold the node: no anchor or look-around is left in it, and no empty class."""
    if isinstance(node, (_Anchor, _Look)):
        return False
    if isinstance(node, Seq):
        return all(map(holds, node.items))
    if isinstance(node, Alt):
        return all(map(holds, node.options))
    if isinstance(node, Repeat):
        return holds(node.item)
    return bool(node.ranges)


@lru_cache(maxsize=256)
def language(pattern: str) -> Node | None:
    """Return the texts in which the pattern is found, or None where a grammar cannot hold them."""
    try:
        compiled(pattern)
        reader = _Reader(pattern)
        node = reader.options()
        if reader.at != len(pattern):
            return None
        node = _anchored(node)
    except (_Unheld, re.error, RecursionError):
        return None
    return node if holds(node) else None


def lengths(node: Node) -> tuple[int, int | None]:
    """Return how many characters the shortest and the longest text has; None: without end."""
    if isinstance(node, Seq):
        parts = [lengths(item) for item in node.items]
        most = [high for _, high in parts]
        return sum(low for low, _ in parts), None if None in most else sum(high for high in most if high is not None)
    if isinstance(node, Alt):
        parts = [lengths(option) for option in node.options]
        most = [high for _, high in parts]
        return min(low for low, _ in parts), None if None in most else max(high for high in most if high is not None)
    if isinstance(node, Repeat):
        low, high = lengths(node.item)
        if high == 0 or node.most == 0:
            return 0, 0
        return low * node.least, None if high is None or node.most is None else high * node.most
    return 1, 1


def size(node: Node) -> int:
    """Return about how many states an automaton for the node has: what it costs to compile."""
    if isinstance(node, Seq):
        return sum(map(size, node.items))
    if isinstance(node, Alt):
        return sum(map(size, node.options))
    if isinstance(node, Repeat):
        return size(node.item) * max(1, node.least, node.most or 0)
    return 1


def raw_text(node: Node, chars: Callable[[Ranges], str]) -> str:
    """Return the node as a regular expression of the plainest kind; `chars` writes one character's."""
    if isinstance(node, Chars):
        return chars(node.ranges)
    if isinstance(node, Seq):
        return "".join(raw_text(item, chars) for item in node.items)
    if isinstance(node, Alt):
        return f"({'|'.join(raw_text(option, chars) for option in node.options)})"
    assert isinstance(node, Repeat)
    item = raw_text(node.item, chars)
    if not isinstance(node.item, (Chars, Alt)):
        item = f"({item})"
    if (node.least, node.most) == (0, None):
        return item + "*"
    if isinstance(node.item, Chars):
        if (node.least, node.most) == (1, None):
            return item + "+"
        if node.least == node.most:
            return f"{item}{{{node.least}}}"
        return f"{item}{{{node.least},{'' if node.most is None else node.most}}}"
    # xgrammar 0.2.7 gets `(...)?`, `(...)+` and `(...){1,2}` wrong where repetitions stand inside: written out.
    if node.most is None:
        return item * node.least + item + "*"
    tail = ""
    for _ in range(node.most - node.least):
        tail = f"({item}{tail}|)"
    return item * node.least + tail


# The check -------------------------------------------------------------------------------------------------------

#: The most ways that `re` may try (it tries about 50 million a second); beyond it, all ways are followed at once.
_MOST_WAYS = 1e7
#: The most steps in which all ways are followed, about a second.
_MOST_STEPS = 1_000_000
#: The most states of a pattern whose ways are followed at once.
_MOST_STATES = 20_000
#: A group that is repeated, and what else lets `re` try several ways.
_GROUPS = re.compile(r"\)[*+{]")
_CHOICES = re.compile(r"[*+{?|]")


class TooCostlyError(Exception):
    """A text cannot be searched in bounded time."""


@lru_cache(maxsize=256)
def _python_node(pattern: str) -> Node | None:
    """Return the pattern as Python reads it; None where this module cannot."""
    try:
        reader = _Reader(pattern, python=True)
        node = reader.options()
    except (_Unheld, RecursionError):
        return None
    return node if reader.at == len(pattern) else None


def bounded(pattern: str) -> bool:
    """Whether a search for the pattern ends: False for a repeated group beside a back reference or flags."""
    return _python_node(pattern) is not None or not repeats_a_group(pattern)


def repeats_a_group(pattern: str) -> bool:
    """Whether a group is repeated, so that `re` may try more ways than any power of the text's length."""
    return _GROUPS.search(pattern) is not None


def _ways(node: Node, length: int) -> float:
    """Return in how many ways, at most, a text of that length can begin with the node."""
    if isinstance(node, Seq):
        found = 1.0
        looks = 0.0
        for item in node.items:
            ways = _ways(item, length)
            if isinstance(item, _Look):
                looks += ways
            else:
                found *= ways
        return found * (1 + looks)
    if isinstance(node, Alt):
        return sum(_ways(option, length) for option in node.options)
    if isinstance(node, _Look):
        return _ways(node.item, length)
    if not isinstance(node, Repeat):
        return 1
    most = length if node.most is None else min(node.most, length)
    ways = _ways(node.item, length)
    turns = max(most - node.least + 1, 1)
    if ways <= 1 or most <= 1:
        return turns * ways
    return math.inf if most * math.log(ways) > 50 else turns * ways**most


@lru_cache(maxsize=1024)
def _is_cheap(pattern: str, length: int) -> bool:
    """Whether `re` tries few enough ways in any text of that length."""
    node = _python_node(pattern)
    try:
        ways = _ways(node, length) if node is not None else float(length) ** len(_CHOICES.findall(pattern))
    except (OverflowError, RecursionError):
        return False
    return ways * length * (1 if pattern.startswith("^") and "|" not in pattern else length) <= _MOST_WAYS


def search(pattern: str, text: str) -> bool:
    """Whether the pattern is found in the text.

    Raises:
        TooCostlyError: when the work would be more than is reasonable.
    """
    if _is_cheap(pattern, 1 << len(text).bit_length()):
        return compiled(pattern).search(text) is not None
    machine = _machine(pattern)
    if machine is None:
        raise TooCostlyError
    return _Search(machine, text).found()


class _Machine:
    """A pattern as states: what each consumes or asks, and where it leads. State 0 is the end."""

    def __init__(self, node: Node) -> None:
        self.states: list[tuple[Chars | _Anchor | tuple[_Look, int] | None, tuple[int, ...]]] = [(None, ())]
        self.start = self._add(node, 0, backward=False)

    def _state(self, what: Chars | _Anchor | tuple[_Look, int] | None, *after: int) -> int:
        if len(self.states) > _MOST_STATES:
            raise _Unheld
        self.states.append((what, after))
        return len(self.states) - 1

    def _add(self, node: Node, after: int, *, backward: bool) -> int:
        """Return the state from which the node leads to the state after it; `backward`: read from right to left."""
        if isinstance(node, Seq):
            for item in node.items if backward else reversed(node.items):
                after = self._add(item, after, backward=backward)
            return after
        if isinstance(node, Alt):
            return self._state(None, *(self._add(option, after, backward=backward) for option in node.options))
        if isinstance(node, _Look):
            return self._state((node, self._add(node.item, 0, backward=node.behind)), after)
        if not isinstance(node, Repeat):
            return self._state(node, after)
        at = after
        if node.most is None:
            at = self._state(None)
            self.states[at] = (None, (self._add(node.item, at, backward=backward), after))
        else:
            for _ in range(node.most - node.least):
                at = self._state(None, self._add(node.item, at, backward=backward), after)
        for _ in range(node.least):
            at = self._add(node.item, at, backward=backward)
        return at


@lru_cache(maxsize=64)
def _machine(pattern: str) -> _Machine | None:
    node = _python_node(pattern)
    try:
        return None if node is None else _Machine(node)
    except (_Unheld, RecursionError):
        return None


class _Search:
    """One text in which a machine's ways are followed, all at once."""

    def __init__(self, machine: _Machine, text: str) -> None:
        self._machine = machine
        self._text = text
        self._left = _MOST_STEPS
        self._looks: dict[tuple[int, int], bool] = {}

    def found(self) -> bool:
        return self._run(self._machine.start, 0, backward=False, anywhere=True)

    def _run(self, start: int, at: int, *, backward: bool, anywhere: bool = False) -> bool:
        text, states = self._text, self._machine.states
        now = {start}
        while True:
            consuming = self._reached(now, at)
            if 0 in consuming:
                return True
            if at == (0 if backward else len(text)) or not (consuming or anywhere):
                return False
            code = ord(text[at - 1 if backward else at])
            now = {start} if anywhere else set()
            for state in consuming:
                what, after = states[state]
                if isinstance(what, Chars) and any(low <= code <= high for low, high in what.ranges):
                    now.add(after[0])
            at += -1 if backward else 1

    def _reached(self, begin: set[int], at: int) -> set[int]:
        """Return the states that are reached without consuming and that consume, and 0 if the end is."""
        states = self._machine.states
        seen, todo, found = set(begin), list(begin), set()
        while todo:
            state = todo.pop()
            self._left -= 1
            if self._left < 0:
                raise TooCostlyError
            what, after = states[state]
            if state == 0 or isinstance(what, Chars):
                found.add(state)
                continue
            if isinstance(what, _Anchor):
                if not self._is_at(what.char, at):
                    continue
            elif what is not None:
                look, start = what
                if (start, at) not in self._looks:
                    self._looks[start, at] = self._run(start, at, backward=look.behind)
                if self._looks[start, at] is look.negative:
                    continue
            fresh = [state for state in after if state not in seen]
            seen.update(fresh)
            todo += fresh
        return found

    def _is_at(self, anchor: str, at: int) -> bool:
        if anchor == "^":
            return at == 0
        if anchor == "$":
            return at == len(self._text)
        before, after = (
            bool(char) and (char == "_" or (char.isascii() and char.isalnum()))
            for char in (self._text[at - 1 : at] if at else "", self._text[at : at + 1])
        )
        return (before != after) is (anchor == "b")
