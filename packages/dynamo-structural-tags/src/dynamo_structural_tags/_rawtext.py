# SPDX-License-Identifier: Apache-2.0
"""Grammar rules for raw strings: any text that does not hold the marker which ends it, within further bounds.

A state in which nearly every token may follow costs xgrammar a pass over the vocabulary when the grammar is compiled,
except in its `TagDispatch`, which has a short cut for excluded texts. So a bounded text is counted in few states and
goes on as free text; where the marker might have begun in what was counted, that free text excludes the marker's end
alone.
"""

from __future__ import annotations

import string
from collections.abc import Collection

from . import _regex
from ._grammar import MAX_COUNT, Rules, held_language, literal, pattern_rule
from ._regex import Alt, Chars, Node, Ranges, Repeat, Seq

__all__ = ["RawText", "free_text", "other_keys"]

#: The most states of a pattern that are looked at; a larger one is left to the check of the finished value.
MAX_STATES = 20_000

#: Of a minimum length, this much is enforced; the rest is left to the check.
COUNTED = 16

#: While more characters than this are missing, the marker's first two characters may not stand together.
EXACT = 5

#: Where a pattern lets every text through, texts that hold so much of the marker's beginning are left out.
PREFIX = 6

#: What an additional key may be made of: characters that no layout gives a meaning.
KEY_CHARS = string.ascii_letters + string.digits + "$-._"


def free_text(rules: Rules, excludes: Collection[str], *, max_length: int | None = None) -> str:
    """Return the name of the rule for texts that hold none of these, of at most so many characters."""
    listed = ", ".join(literal(text) for text in excludes)
    body = f"TagDispatch(loop_after_dispatch=false, excludes=({listed}))"
    return rules.add("free", body, "" if max_length is None else f"max_chars={max_length}")


class RawText:
    """Rules for texts that do not hold a marker."""

    def __init__(self, rules: Rules, marker: str) -> None:
        self._rules = rules
        self._marker = marker

    def rule(
        self, *, not_first: str = "", min_length: int = 0, max_length: int | None = None, pattern: str | None = None
    ) -> str | None:
        """Return the name of the rule, None where there is no such text.

        Args:
            not_first: Characters with which the text may not begin.
            min_length: At least so many characters (Unicode code points), of which `COUNTED` are enforced.
            max_length: At most so many; None: any number.
            pattern: A regular expression that is found in the text. One that a grammar cannot hold is passed over;
                beside one that it holds, the lengths are left to the check.
        """
        if max_length is not None and max_length > MAX_COUNT:
            max_length = None  # xgrammar counts in 32 bits; the check goes on
        if pattern is not None:
            found = self._pattern(pattern, not_first, min_length, max_length)
            if found != _PASSED:
                return found
        if not not_first and not min_length:
            return free_text(self._rules, (self._marker,), max_length=max_length)
        add, first = self._rules.add, self._marker[0]
        count = min(min_length, COUNTED)
        exact = max(1, min(count, EXACT))
        # Each rule ends with the rest of the text, so that a token of several characters is settled when the grammar is
        # compiled; the end of a repetition would leave it to be tried while generating. `begun`: the marker's first
        # character is among those counted.
        rest, begun = free_text(self._rules, (self._marker,)), free_text(self._rules, (self._marker[exact:],))
        for missing in range(1, count):
            after = add("counted", f"{_all_but(first)} {rest} | {literal(first)} {begun}")
            if missing < EXACT:
                begun = add("begun", f"{_all_but('')} {begun}")
            else:
                begun = add("begun", f"{_all_but(self._marker[:2])} {rest} | {literal(first)} {begun}")
            rest = after
        body = f"{_all_but(first + not_first)} {rest} | {literal(first)} {begun}"
        if not min_length:
            body += ' | ""'
        return add("raw", body, "" if max_length is None else f"max_chars={max_length}")

    def _pattern(self, pattern: str, not_first: str, min_length: int, max_length: int | None) -> str | None:
        """Return the rule for the texts of a pattern, `_PASSED` where a grammar cannot hold it."""
        exact, node = _regex.language(pattern), held_language(pattern)
        if exact is None or node is None:
            return _PASSED
        least, most = _regex.lengths(exact)
        if (most is not None and most < min_length) or (max_length is not None and least > max_length):
            return None
        if not not_first:
            plain = pattern_rule(self._rules, pattern, self._marker)
            if plain is not None:
                return plain
        node = self._kept_apart(node)
        if not _regex.holds(node):
            return _PASSED
        try:
            positions = _Positions(node)
        except _TooLargeError:
            return _PASSED
        begun = [char for at in positions.first for char in not_first if _has(positions.chars[at].ranges, char)]
        if begun or self._found_in(positions):
            return _PASSED
        return self._rules.add("pattern", f"Regex({literal(_regex.raw_text(node, _class))})")

    def _kept_apart(self, node: Node) -> Node:
        """Return the node without the texts in which a class without end writes the marker's beginning."""
        if isinstance(node, Seq):
            return Seq(tuple(map(self._kept_apart, node.items)))
        if isinstance(node, Alt):
            return Alt(tuple(map(self._kept_apart, node.options)))
        if not isinstance(node, Repeat):
            return node
        beginning = self._marker[:PREFIX]
        item = node.item
        if (
            node.most is not None
            or not isinstance(item, Chars)
            or not all(_has(item.ranges, char) for char in beginning)
        ):
            return Repeat(self._kept_apart(item), node.least, node.most)
        # A unit is a text after which nothing of the marker stands: one other character, or the marker's first one, any
        # number of beginnings that break off with that character again, and one that breaks off with another.
        first = _one(beginning[0])
        again: Node = Seq(())
        broken: Node = Chars(_without(item.ranges, beginning[0] + beginning[-1]))
        for at in range(len(beginning) - 2, 0, -1):
            char = _one(beginning[at])
            again = Repeat(Seq((char, again)), 0, 1)
            broken = Alt((Chars(_without(item.ranges, beginning[0] + beginning[at])), Seq((char, broken))))
        begun = Seq((first, Repeat(Seq((again, first)), 0, None), broken))
        return Repeat(Alt((Chars(_without(item.ranges, beginning[0])), begun)), node.least, None)

    def _found_in(self, positions: _Positions) -> bool:
        """Say whether a text of the pattern holds the marker, or may: the automaton is too large to look at."""
        marker = self._marker
        steps = [
            {
                char: next(size for size in range(matched + 1, -1, -1) if text.endswith(marker[:size]))
                for char in set(marker)
                for text in [marker[:matched] + char]
            }
            for matched in range(len(marker))
        ]
        seen = {(-1, 0)}
        todo = [(-1, 0)]
        while todo:
            at, matched = todo.pop()
            for following in positions.first if at < 0 else positions.follow[at]:
                ranges = positions.chars[following].ranges
                reached = {size for char, size in steps[matched].items() if _has(ranges, char)}
                if len(marker) in reached or len(seen) > MAX_STATES:
                    return True
                if _without(ranges, marker):
                    reached.add(0)
                fresh = {(following, size) for size in reached} - seen
                seen |= fresh
                todo += fresh
        return False


#: Stands for a pattern that is passed over.
_PASSED = ""


class _TooLargeError(Exception):
    """The pattern has too many states."""


class _Positions:
    """A pattern as its characters, which of them may follow which, and which may stand first."""

    def __init__(self, node: Node) -> None:
        self.chars: list[Chars] = []
        self.follow: list[set[int]] = []
        self._links = 0
        self.first = self._of(node)[1]

    def _of(self, node: Node) -> tuple[bool, set[int], set[int]]:
        """Return whether the node's text may be empty, and what it may begin and end with."""
        if isinstance(node, Chars):
            self.chars.append(node)
            self.follow.append(set())
            here = {len(self.chars) - 1}
            return False, here, here
        if isinstance(node, Alt):
            parts = [self._of(option) for option in node.options]
            firsts, lasts = [part[1] for part in parts], [part[2] for part in parts]
            return any(part[0] for part in parts), set[int]().union(*firsts), set[int]().union(*lasts)
        found: tuple[bool, set[int], set[int]] = (True, set(), set())
        if isinstance(node, Seq):
            for item in node.items:
                found = self._join(found, self._of(item))
            return found
        assert isinstance(node, Repeat)
        for _ in range(node.least):
            found = self._join(found, self._of(node.item))
        for _ in range(1 if node.most is None else node.most - node.least):
            _, first, last = self._of(node.item)
            if node.most is None:
                self._link(last, first)
            found = self._join(found, (True, first, last))
        return found

    def _join(
        self, one: tuple[bool, set[int], set[int]], two: tuple[bool, set[int], set[int]]
    ) -> tuple[bool, set[int], set[int]]:
        self._link(one[2], two[1])
        return one[0] and two[0], one[1] | two[1] if one[0] else one[1], two[2] | one[2] if two[0] else two[2]

    def _link(self, lasts: set[int], firsts: set[int]) -> None:
        self._links += 1 + len(lasts) * len(firsts)
        if self._links > MAX_STATES:
            raise _TooLargeError
        for last in lasts:
            self.follow[last] |= firsts


def _one(char: str) -> Chars:
    return Chars(((ord(char), ord(char)),))


def _has(ranges: Ranges, char: str) -> bool:
    return any(low <= ord(char) <= high for low, high in ranges)


def _without(ranges: Ranges, chars: str) -> Ranges:
    for code in map(ord, chars):
        cut = [
            part
            for low, high in ranges
            for part in ([(low, code - 1), (code + 1, high)] if low <= code <= high else [(low, high)])
            if part[0] <= part[1]
        ]
        ranges = tuple(cut)
    return ranges


def _all_but(chars: str) -> str:
    """Return the EBNF class of all other characters."""
    if not chars:
        return "[\\U00000000-\\U0010ffff]"
    return f"[^{''.join(f'{chr(92)}U{ord(char):08x}' for char in sorted(set(chars)))}]"


def _class(ranges: Ranges) -> str:
    """Return the class of these characters in xgrammar's regular expressions."""

    def char(code: int) -> str:
        return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\u{{{code:x}}}"

    return f"[{''.join(char(low) if low == high else f'{char(low)}-{char(high)}' for low, high in ranges)}]"


def other_keys(rules: Rules, declared: Collection[str]) -> str:
    """Return the name of the rule for keys of an open object that are none of the declared ones."""
    every = _class(_ranges(KEY_CHARS))

    def after(prefix: str, keys: Collection[str]) -> str:
        """Return the regular expression of what may follow the prefix that all these declared keys share."""
        if not keys:
            return f"{every}*"
        followed = "".join(sorted({key[len(prefix)] for key in keys if len(key) > len(prefix)}))
        free = _without(_ranges(KEY_CHARS), followed)
        choices = [f"{_class(free)}{every}*"] if free else []
        for char in followed:
            below = [key for key in keys if key.startswith(prefix + char)]
            choices.append(f"{_class(_ranges(char))}{after(prefix + char, below)}")
        if prefix and prefix not in keys:
            choices.append("")  # not `(...)?`: xgrammar 0.2.7 gets that wrong where repetitions stand inside
        return f"({'|'.join(choices)})"

    relevant = [key for key in declared if key and set(key) <= set(KEY_CHARS)]
    text = after("", relevant) if relevant else f"{every}+"
    return rules.add("other_key", f"Regex({literal(text)})")


def _ranges(chars: str) -> Ranges:
    return _regex.union([(ord(char), ord(char)) for char in chars])
