# SPDX-License-Identifier: Apache-2.0
"""Results as one HTML page that needs nothing beside itself, and no script to be read."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator
from difflib import SequenceMatcher
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape

from ._results import ABSENT, CaseResult, Difference, Exchange, Run
from ._text import printable, shortened

__all__ = ["html"]


def html(run: Run) -> str:
    """The page; to be written as UTF-8.

    On top what broke: the counts, and for each area a row with a mark for each case. Then the cases: those that failed
    first and open, the inconclusive ones next. In a case, what was expected over what came, the characters that differ
    marked and the invisible ones made visible; and each request beside its response (JSON is indented and otherwise as
    it came; of a stream each event has a line). What came from the server is escaped, and a content security policy
    forbids every script but the page's own, which filters the cases.
    """
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(printable=printable, sha256=_sha256, size=_size)
    template = (files(__package__) / "report.html.jinja").read_text(encoding="utf-8")
    areas: dict[str, list[CaseResult]] = {}
    for result in run.results:
        areas.setdefault(result.area, []).append(result)
    rank = {"fail": 0, "inconclusive": 1, "pass": 2}
    cases = sorted(run.results, key=lambda result: (rank[result.verdict], not result.required))
    return environment.from_string(template).render(
        run=run,
        verdict=_verdict(run),
        areas=sorted(areas.items(), key=lambda area: min(rank[result.verdict] for result in area[1])),
        groups=[(name, [case for case in cases if case.verdict == name]) for name in rank],
        exchanges=_exchanges,
        sides=_sides,
        request=lambda exchange: _request(exchange.request),
        response=lambda exchange: _response(exchange.response),
        printable_call=lambda text: printable(shortened(text, 4000), keep="\n"),
    )


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(str(text).encode()).digest()).decode()


def _size(text: str) -> str:
    size = len(text.encode("utf-8", "surrogatepass"))
    return f"{size / 1024:.0f} KiB" if size >= 10_000 else f"{size:,} bytes"


def _verdict(run: Run) -> str:
    """What a run comes to, in a sentence."""
    total, summary = len(run.results), run.summary
    unsure = sum(result.required and result.verdict == "inconclusive" for result in run.results)
    if summary["fail"]:
        text = f"{summary['fail']} of {total} cases failed"
    elif unsure:
        text = f"No case failed, but {unsure} of {summary['required']} required ones are inconclusive"
    elif summary["required"]:
        text = f"All {summary['required']} required cases passed"
    else:
        text = "No case failed, and none was required"
    return f"Interrupted. {text}" if run.interrupted else text


def _exchanges(result: CaseResult) -> Iterator[tuple[Exchange, bool]]:
    """The exchanges of a case, and of each whether it stands open: those at fault, but of several that differ in the
    same places the first alone; all where none is marked."""
    seen: list[list[str]] = [[]]
    marked = any(exchange.differences for exchange in result.exchanges)
    for exchange in result.exchanges:
        places = [difference.path for difference in exchange.differences]
        yield exchange, not marked or places not in seen
        seen.append(places)


# Differences --------------------------------------------------------------------------------------------------------

#: Ways to cut a text for a comparison, the coarser first: lines, words, characters.
_CUTS = (re.compile(r"[^\n]*\n|[^\n]+"), re.compile(r"\w+|\W"), re.compile(r"(?s)."))
#: Two lists of parts whose lengths multiply to more are not compared: it would take seconds. By the cut.
_MOST_COMPARED = (25_000_000, 25_000_000, 250_000)
#: Characters of an equal stretch that are shown on either side of a difference, and of a difference itself.
_CONTEXT, _MARKED = 60, 2000
#: Signs of characters that are often met; every usual font has them (few have the control pictures of U+2400).
_SIGNS = {"\n": "↵\n", "\r": "[CR]", "\t": "→\t", " ": "·"}


def _sides(difference: Difference) -> list[tuple[str, Markup]]:
    """What was expected and what came, as far as the difference has them: lines of marked HTML with their names."""
    values = [("expected", difference.expected), ("got", difference.got)]
    values = [(name, value) for name, value in values if value is not ABSENT]
    plain = all(isinstance(value, str) for _, value in values)  # else a string keeps its quotes, so that "1" is not 1
    texts = [value if plain else json.dumps(value, ensure_ascii=False) for _, value in values]
    if len(texts) < 2 or texts[0] == texts[1]:
        return [(name, _shown(text)) for (name, _), text in zip(values, texts, strict=True)]
    sides = [Markup(), Markup()]
    edits = _edits(*texts)
    for place, (equal, *parts) in enumerate(edits):
        for side, part in enumerate(parts):
            if equal:
                sides[side] += _context(part, first=place == 0, last=place == len(edits) - 1)
            elif part:
                sides[side] += Markup("<mark>{}</mark>").format(_shown(part, mark=True))
            else:  # what the other side has is missing just here
                sides[side] += Markup('<mark class="none"></mark>')
    return [(name, side or _EMPTY) for (name, _), side in zip(values, sides, strict=True)]


_EMPTY = Markup("<i>(empty)</i>")


def _edits(one: str, other: str) -> list[tuple[bool, str, str]]:
    """The two texts cut into parts, each `(equal, of one, of the other)`; neighbours that differ are joined."""
    start = _common(one, other)
    end = _common(one[start:][::-1], other[start:][::-1])
    head, tail = one[:start], one[len(one) - end :]
    middle = _compared(one[start : len(one) - end], other[start : len(other) - end], 0)
    joined: list[tuple[bool, str, str]] = []
    for equal, left, right in ((True, head, head), *middle, (True, tail, tail)):
        if joined and joined[-1][0] == equal:
            joined[-1] = (equal, joined[-1][1] + left, joined[-1][2] + right)
        elif left or right:
            joined.append((equal, left, right))
    return joined


def _common(one: str, other: str) -> int:
    """How many characters the two begin with in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _compared(one: str, other: str, cut: int) -> Iterator[tuple[bool, str, str]]:
    parts, others = _CUTS[cut].findall(one), _CUTS[cut].findall(other)
    if not parts or not others or len(parts) * len(others) > _MOST_COMPARED[cut]:
        yield False, one, other
        return
    finest = cut == len(_CUTS) - 1
    matcher = SequenceMatcher(None, parts, others, autojunk=not finest)
    if finest and matcher.ratio() < 0.5:  # single letters that happen to be in both explain nothing
        yield False, one, other
        return
    for tag, begin, end, other_begin, other_end in matcher.get_opcodes():
        left, right = "".join(parts[begin:end]), "".join(others[other_begin:other_end])
        if tag == "replace" and not finest:
            yield from _compared(left, right, cut + 1)
        else:
            yield tag == "equal", left, right


def _context(text: str, *, first: bool, last: bool) -> Markup:
    """An equal stretch: what is near a difference, and how much was left out."""
    head, tail = 0 if first else _CONTEXT, 0 if last else _CONTEXT
    left_out = len(text) - head - tail
    if left_out <= _CONTEXT:
        return _shown(text)
    gap = Markup("<i>[{:,} equal characters]</i>").format(left_out)
    return _shown(text[:head]) + gap + _shown(text[len(text) - tail :])


def _shown(text: str, *, mark: bool = False) -> Markup:
    """The text with signs for what is invisible; in a mark each character beyond ASCII has its code point beside it.

    Two texts that look the same (an accent in one character or in two) differ in their code points alone.
    """
    if not text:
        return Markup() if mark else _EMPTY
    rest = len(text) - _MARKED
    parts: list[Markup] = []
    for run in re.findall(r"[!-~]+| +|[^ -~]", text[:_MARKED]):
        char, code = run[0], ord(run[0])
        if char in _SIGNS:
            parts.append(Markup("<i>{}</i>").format("".join(_SIGNS[each] for each in run)))
        elif not char.isprintable():
            parts.append(Markup("<i>[U+{:04X}]</i>").format(code))
        elif mark and code > 0x7F:
            parts.append(Markup("{}<i>[U+{:04X}]</i>").format("◌" * bool(unicodedata.combining(char)) + char, code))
        else:
            parts.append(escape(run))
    if rest > 0:
        parts.append(Markup("<i>[{:,} more characters]</i>").format(rest))
    return Markup().join(parts)


# Requests and responses ---------------------------------------------------------------------------------------------

_TOKEN = re.compile(r'\s+|[{}\[\],:]|"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null')
#: What may be left of a token where a text was cut.
_CUT_TOKEN = re.compile(r'(?s)"|[a-z-]*\Z')
_PALE, _END = Markup("<s>"), Markup("</s>")
_STREAM = re.compile(r"\ufeff?(?:data|event|id|retry)?:")
#: No deeper than this is JSON indented: a reader gains nothing, and a hostile body has 64 Ki brackets.
_DEEPEST = 30


def _request(request: Any) -> Markup:
    """A body as sent: JSON indented, or the text that was sent as it stands."""
    text = request if isinstance(request, str) else json.dumps(request, ensure_ascii=False, indent=2)
    return Markup('<pre tabindex="0">{}</pre>').format(printable(text, keep="\n\t"))


def _response(text: str) -> Markup:
    """A body as it came: JSON indented, a stream as its events, all else as it is."""
    if not text:
        return Markup('<p class="nothing">(empty)</p>')
    if _STREAM.match(text):
        return _events(text)
    return Markup('<pre tabindex="0">{}</pre>').format(printable(_indented(text) or text, keep="\n\t"))


def _tokens(text: str) -> tuple[list[str], str] | None:
    """The tokens of a JSON text without the blanks between them, and what a cut left at its end; None: no JSON.

    The tokens stay byte for byte: `json` would lose duplicate keys, and write 1.0 for 1.00.
    """
    tokens: list[str] = []
    depth = end = 0
    for match in _TOKEN.finditer(text):
        if match.start() != end:
            break
        end, token = match.end(), match[0]
        if token.isspace():
            continue
        depth += (token in ("{", "[")) - (token in ("}", "]"))
        if depth < 1 and (tokens == [] or text[end:].strip()):  # no object or array, or something behind it
            return None
        tokens.append(token)
    rest = text[end:]
    return (tokens, rest) if tokens and _CUT_TOKEN.match(rest) else None


def _indented(text: str) -> str | None:
    read = _tokens(text)
    if read is None:
        return None
    parts: list[str] = []
    depth, last = 0, ""
    for token in filter(None, (*read[0], read[1])):
        closing = token in ("}", "]")
        depth -= closing
        if (closing and last not in ("{", "[")) or (not closing and last in ("{", "[", ",")):
            parts.append("\n" + "  " * min(max(depth, 0), _DEEPEST))
        parts.append(": " if token == ":" else token)
        depth += token in ("{", "[")
        last = token
    return "".join(parts)


def _members(data: str) -> list[str]:
    """The members of a JSON object, each with the comma or brace before it, or the whole text where it is none."""
    read = _tokens(data)
    if read is None or read[0][0] != "{":
        return [data]
    members, depth = [""], 0
    for token in (*read[0], read[1]):
        if token == "," and depth == 1:
            members.append("")
        members[-1] += token
        depth += (token in ("{", "[")) - (token in ("}", "]"))
    return members


def _events(text: str) -> Markup:
    """A stream, a list item for each event; what an event has in common with the one before it is paler."""
    items: list[Markup] = []
    before: set[str] = set()
    for event in re.split(r"\n{2,}", re.sub(r"\r\n?", "\n", text).strip("\n")):
        lines: list[Markup] = []
        for line in event.split("\n"):
            name, _, data = line.partition(": ")
            members = _members(data) if name == "data" else [line]
            if len(members) < 2:
                lines.append(escape(printable(line)))
                continue
            common = {member.strip("{,}") for member in members}
            parts = [escape("data: ")]
            for member in members:
                same = member.strip("{,}") in before
                parts += (_PALE, escape(printable(member)), _END) if same else (escape(printable(member)),)
            lines.append(Markup().join(parts).replace("</s><s>", ""))
            before = common
        items.append(Markup("<li>{}</li>").format(Markup("\n").join(lines)))
    return Markup('<ol class="events" tabindex="0">{}</ol>').format(Markup().join(items))
