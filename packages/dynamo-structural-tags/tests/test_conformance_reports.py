# SPDX-License-Identifier: Apache-2.0
"""The reports of a run: what a reader sees in the page, the JUnit file, the terminal and the comparison."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import random
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from dynamo_structural_tags.conformance._answer import Call
from dynamo_structural_tags.conformance._compare import compare
from dynamo_structural_tags.conformance._html import html
from dynamo_structural_tags.conformance._junit import junit
from dynamo_structural_tags.conformance._results import (
    ABSENT,
    CaseResult,
    Difference,
    Exchange,
    Run,
    Target,
    Verdict,
)
from dynamo_structural_tags.conformance._table import Progress, console, table

HOSTILE = '</pre></script><script>alert(1)</script><img src=x onerror="alert(2)">\x1b[2J\x00\ud800\u202e'


def exchange(
    label: str = "plain", response: str = "{}", differences: Sequence[Difference] = (), **more: Any
) -> Exchange:
    return Exchange(label, more.pop("request", {"model": "m"}), 200, response, differences=list(differences), **more)


def differing(expected: Any, got: Any, path: str = "calls[0].arguments.text") -> Difference:
    return Difference(path, f"{path}: expected {expected!r}, got {got!r}", expected, got)


def case(
    name: str, verdict: Verdict = "pass", *exchanges: Exchange, required: bool = True, remark: str = ""
) -> CaseResult:
    return CaseResult(
        name, name.partition("/")[0], f"The fault of {name}.", required, verdict, remark, 1, 0.25, list(exchanges)
    )


def run(*results: CaseResult, **more: Any) -> Run:
    target = Target("http://localhost:8000/v1", "my/model", "chat")
    return Run("0.1.0", "2026-12-01T11:00:00Z", 12.3, target, "agent", list(results), **more)


class Element:
    def __init__(self, tag: str, attributes: dict[str, str | None]) -> None:
        self.tag, self.attributes, self.text = tag, attributes, ""

    @property
    def classes(self) -> list[str]:
        return (self.attributes.get("class") or "").split()


class Page(HTMLParser):
    """The elements of a page with their text, as a browser has them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {[element.tag for element in self._open]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self._open.append(self.elements[-1])

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def all(self, tag: str, name: str | None = None) -> list[Element]:
        return [each for each in self.elements if each.tag == tag and (name is None or name in each.classes)]

    def texts(self, tag: str, name: str | None = None) -> list[str]:
        return [element.text for element in self.all(tag, name)]


def page(*results: CaseResult) -> Page:
    return Page(html(run(*results)))


def marks(expected: Any, got: Any) -> tuple[list[str], list[str]]:
    """The marked parts, and the two lines."""
    shown = page(case("literals/x", "fail", exchange(differences=[differing(expected, got)])))
    return [text for text in shown.texts("mark") if text], shown.texts("dd")[-2:]


@pytest.mark.parametrize(
    ("expected", "got", "marked", "lines"),
    [
        ("a &lt; b", "a < b", ["&lt;", "<"], ["a·&lt;·b", "a·<·b"]),
        ("two\nlines\n", "two\nlines", ["↵\n"], ["two↵\nlines↵\n", "two↵\nlines"]),
        ("a\tb", "a  b", ["→\t", "··"], ["a→\tb", "a··b"]),
        ("1\u00a0km", "1 km", ["[U+00A0]", "·"], ["1[U+00A0]km", "1·km"]),
        ("a\r\n", "a\n", ["[CR]"], ["a[CR]↵\n", "a↵\n"]),
        ("cafe\u0301", "caf\u00e9", ["e◌\u0301[U+0301]", "é[U+00E9]"], ["cafe◌\u0301[U+0301]", "café[U+00E9]"]),
        ("x", "x\u200b", ["[U+200B]"], ["x", "x[U+200B]"]),
        ("", "x", ["x"], ["", "x"]),
        (1, "1", ['"', '"'], ["1", '"1"']),
        (1, 1.0, [".0"], ["1", "1.0"]),
        ({"a": None}, {"a": "null"}, ['"', '"'], ['{"a":·null}', '{"a":·"null"}']),
    ],
)
def test_just_the_characters_that_differ_are_marked_and_seen(
    expected: Any, got: Any, marked: list[str], lines: list[str]
) -> None:
    assert marks(expected, got) == (marked, lines)


def test_each_of_several_changes_in_a_file_is_marked() -> None:
    source = "".join(f"if (a{number} &lt; b) {{\n  return {number};\n}}\n" for number in range(300))
    marked, lines = marks(source, source.replace("&lt;", "<"))
    assert marked == ["&lt;"] * 300 + ["<"] * 300
    assert "return·299;" in lines[0]


def test_of_a_long_text_the_reader_sees_the_place_that_differs() -> None:
    text = "".join(random.Random(1).choices("abcdefgh \n", k=65536))
    marked, lines = marks(text[:40000] + "<" + text[40000:], text[:40000] + ">" + text[40000:])
    assert marked == ["<", ">"]
    assert all(len(line) < 400 for line in lines)
    assert re.search(r"\[39,\d+ equal characters\]", lines[0])


def test_two_long_texts_with_nothing_in_common_are_shown_in_part() -> None:
    one, other = (
        "".join(random.Random(seed).choices(letters, k=65536)) for seed, letters in enumerate(["ab ", "cd\n"])
    )
    _, lines = marks(one, other)
    assert all(len(line) < 6000 and "more characters]" in line for line in lines)


def test_a_difference_without_two_values_is_told_in_words() -> None:
    shown = page(case("usage/x", "fail", exchange(differences=[Difference("usage", "usage: none came", got=None)])))
    assert shown.texts("p", "where") == ["usage: none came"]
    assert shown.texts("dd")[-1] == "null"
    assert not shown.all("mark")


def test_what_a_hostile_server_sends_is_text_on_the_page() -> None:
    text = html(
        run(
            case(
                "literals/x",
                "fail",
                exchange(
                    "plain", HOSTILE, [differing("x", HOSTILE)], calls=[Call(HOSTILE, HOSTILE, HOSTILE)], text=HOSTILE
                ),
                exchange("stream", f"data: {HOSTILE}\n\n", finish=HOSTILE, request=HOSTILE),
                exchange("third", json.dumps({"a": HOSTILE}, ensure_ascii=False), request={HOSTILE: HOSTILE}),
                remark=HOSTILE,
            )
        )
    )
    shown = Page(text.encode("utf-8").decode())
    assert [script.text for script in shown.all("script")] == [shown.texts("script")[-1]], "only the page's own script"
    assert not shown.all("img")
    assert not [name for element in shown.elements for name in element.attributes if name.startswith("on")]
    assert "<script>alert(1)</script>" in shown.texts("p", "remark")[0]
    assert r"\u001b[2J\u0000\ud800\u202e" in shown.texts("p", "remark")[0]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", text)


def test_only_the_pages_own_script_may_run_and_nothing_is_loaded() -> None:
    text = html(run(case("literals/x", "fail", exchange()), case("types/y")))
    shown = Page(text)
    script = base64.b64encode(hashlib.sha256(shown.texts("script")[0].encode()).digest()).decode()
    policy = next(meta.attributes["content"] for meta in shown.all("meta") if "http-equiv" in meta.attributes)
    assert policy is not None
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{script}'" in policy
    links = [element.attributes.get(name) for element in shown.elements for name in ("src", "href", "srcset", "action")]
    assert {link for link in links if link} == {"#literals/x", "#types/y"}
    assert not re.search(r"url\(|@import", text)


def test_failures_stand_first_and_open_then_what_is_inconclusive() -> None:
    shown = page(
        case("a/passed", "pass"),
        case("b/unsure", "inconclusive", required=False),
        case("b/wanted", "inconclusive"),
        case("c/failed", "fail"),
    )
    cases = [(each.attributes["id"], "open" in each.attributes) for each in shown.all("details", "case")]
    assert cases == [("c/failed", True), ("b/wanted", False), ("b/unsure", False), ("a/passed", False)]
    assert shown.texts("h2") == ["Areas", "Failed (1)", "Inconclusive (2)", "Passed (1)"]
    assert [" ".join(row.text.split()) for row in shown.all("tr")][1:] == [
        "c 1 failed of 1 ✕",
        "b 2 inconclusive of 2 ? ?",
        "a none of 1 ✓",
    ]


def test_a_fault_that_shows_twice_is_opened_once() -> None:
    fault = [differing("a", "b")]
    shown = page(
        case(
            "literals/x",
            "fail",
            exchange("turn 1"),
            exchange("plain", differences=fault),
            exchange("stream", differences=fault),
            exchange("other", differences=[differing("a", "b", "calls[0].name")]),
        )
    )
    assert ["open" in each.attributes for each in shown.all("details", "exchange")] == [False, True, False, True]


@pytest.mark.parametrize(
    ("results", "sentence"),
    [
        ([case("a/b", "fail"), case("a/c")], "1 of 2 cases failed"),
        ([case("a/b", "inconclusive"), case("a/c")], "No case failed, but 1 of 2 required ones are inconclusive"),
        ([case("a/b", "inconclusive", required=False), case("a/c")], "All 1 required cases passed"),
        ([], "No case failed, and none was required"),
    ],
)
def test_the_page_begins_with_what_the_run_comes_to(results: list[CaseResult], sentence: str) -> None:
    assert page(*results).texts("h1") == [sentence]


def test_an_interrupted_run_says_so() -> None:
    stopped = run(case("a/b"), interrupted=True)
    assert Page(html(stopped)).texts("h1") == ["Interrupted. All 1 required cases passed"]
    output = io.StringIO()
    table(stopped, console(output))
    assert "interrupted after 1 cases: 1 passed" in output.getvalue()


def test_json_is_indented_and_its_tokens_stay_as_they_came() -> None:
    shown = page(
        case("types/x", "fail", exchange(response='{"n":1.00,"n":1e3,"s":"\\u00e9, {","o":[],"l":[1,{"a":null}]}'))
    )
    assert shown.texts("pre")[1].split("\n") == [
        "{",
        '  "n": 1.00,',
        '  "n": 1e3,',
        '  "s": "\\u00e9, {",',
        '  "o": [],',
        '  "l": [',
        "    1,",
        "    {",
        '      "a": null',
        "    }",
        "  ]",
        "}",
    ]


@pytest.mark.parametrize("text", ["<h1>502 Bad Gateway</h1>\n", "{'a': 1}", '{"a": 1} trailing', "plain words"])
def test_what_is_no_json_is_shown_as_it_came(text: str) -> None:
    assert page(case("types/x", "fail", exchange(response=text))).texts("pre")[1] == text


def test_json_that_was_cut_is_readable_to_its_end() -> None:
    shown = page(case("long/x", "fail", exchange(response='{"a": {"b": "some te')))
    assert shown.texts("pre")[1] == '{\n  "a": {\n    "b": "some te'


def test_a_body_that_was_sent_as_it_stands_is_shown_so() -> None:
    assert page(case("malformed/x", "fail", exchange(request='{"model":"m",'))).texts("pre")[0] == '{"model":"m",'


def test_brackets_without_end_do_not_blow_up_the_page() -> None:
    assert len(html(run(case("long/x", "fail", exchange(response="[" * 65536))))) < 8_000_000


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_stream_is_shown_as_its_events_with_what_is_new_in_each(end: str) -> None:
    events = [
        ': ping\nevent: part\ndata: {"id":"c1","text":"a"}',
        'event: part\ndata: {"id":"c1","text":"b"}',
        "data: [DONE]",
        "data: cut of",
    ]
    shown = page(case("streams/x", "fail", exchange(response=end.join("\n\n".join(events).split("\n")))))
    assert shown.texts("li")[-4:] == events
    assert shown.texts("s") == ['{"id":"c1"']


@pytest.fixture
def tree() -> ElementTree.Element:
    found = [
        case(
            "literals/fails",
            "fail",
            exchange(differences=[differing("a\n", HOSTILE), Difference("usage", "usage: missing")]),
            remark=f"plain: {HOSTILE}\r\nx",
        ),
        case("literals/passes"),
        case("choice/wanted", "inconclusive", remark="no call"),
        case("choice/unsure", "inconclusive", required=False, remark="no call"),
    ]
    return ElementTree.fromstring(junit(run(*found)).encode("utf-8"))


def test_junit_has_a_suite_for_each_area_that_counts_its_cases(tree: ElementTree.Element) -> None:
    counts = [[suite.get(name) for name in ("name", "tests", "failures", "errors", "skipped")] for suite in tree]
    assert counts == [["literals", "2", "1", "0", "0"], ["choice", "2", "0", "1", "1"]]
    assert [
        [case.get("classname"), case.get("name"), *(child.tag for child in case)] for case in tree.iter("testcase")
    ] == [
        ["tool-conformance.literals", "fails", "failure"],
        ["tool-conformance.literals", "passes"],
        ["tool-conformance.choice", "wanted", "error"],
        ["tool-conformance.choice", "unsure", "skipped"],
    ]
    assert {each.get("name"): each.get("value") for each in tree[0].iter("property")} == {
        "base_url": "http://localhost:8000/v1",
        "model": "my/model",
        "api": "chat",
        "profile": "agent",
        "version": "0.1.0",
    }


def test_junit_keeps_to_the_order_and_the_attributes_of_its_schema(tree: ElementTree.Element) -> None:
    assert tree.tag == "testsuites"
    for number, suite in enumerate(tree):
        tags = [child.tag for child in suite]
        assert tags == ["properties", "testcase", "testcase", "system-out", "system-err"]
        assert suite.get("id") == str(number)
        assert {"package", "hostname", "time"} <= set(suite.keys())
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", suite.get("timestamp", ""))
    for tag in ("failure", "error"):
        assert all(outcome.get("type") and outcome.get("message") for outcome in tree.iter(tag))


def test_junit_shows_what_xml_forbids(tree: ElementTree.Element) -> None:
    failure = next(tree.iter("failure"))
    assert failure.get("message", "").endswith(r"\u001b[2J\u0000\ud800\u202e\r\nx")
    assert failure.text is not None
    assert '\n  expected: "a\\n"\n  got: "</pre>' in failure.text
    assert failure.text.endswith("\nplain: usage: missing")
    assert r"<script>alert(1)</script>" in failure.text
    assert r"\u001b[2J\u0000\ud800\u202e" in failure.text


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


FAILED = case("literals/fails", "fail", remark=f"plain: {'very ' * 40}long [bold]remark[/bold] {HOSTILE}")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return FakeTerminal()


def visible(text: str) -> list[str]:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).split("\n")


def test_a_narrow_terminal_has_every_line_whole(terminal: FakeTerminal) -> None:
    table(run(FAILED, case("a-very-long-name-of-an-area-for-sixty-columns/x"), case("types/y")), console(terminal))
    lines = visible(terminal.getvalue())
    assert max(map(len, lines)) <= 60
    words = " ".join(" ".join(lines).split())
    assert "FAIL literals/fails The fault of literals/fails. plain: very very" in words
    assert "long [bold]remark[/bold]" in words
    assert "3 cases: 2 passed, 1 failed, 0 inconclusive" in words
    assert [line.split() for line in lines if line.startswith("types")] == [["types", "1", "1", "-", "-"]]


def test_what_a_server_sends_moves_no_cursor(terminal: FakeTerminal) -> None:
    table(run(FAILED), console(terminal))
    assert "\x1b[2J" not in terminal.getvalue()
    assert "\\u001b[2J" in terminal.getvalue()


@pytest.mark.parametrize("no_color", [False, True])
def test_colour_is_for_terminals_whose_user_wants_it(
    terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch, no_color: bool
) -> None:
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    table(run(FAILED), console(terminal))
    assert bool(re.search(r"\x1b\[[0-9;]*\b3[0-7]m", terminal.getvalue())) is not no_color


def test_another_program_gets_plain_lines_that_nothing_cuts() -> None:
    output = io.StringIO()
    screen = console(output)
    with Progress(2, screen) as progress:
        for result in (case("types/x"), FAILED):
            progress.started(result.case)
            progress.finished(result)
    table(run(case("types/x"), FAILED), screen)
    lines = output.getvalue().split("\n")
    assert lines[0] == "pass types/x (0.2 s)"
    assert lines[1].startswith("FAIL literals/fails (0.2 s): plain: very very")
    assert lines[1].endswith("\\u202e")
    assert "\x1b" not in output.getvalue()
    assert f"  {lines[1].partition(': ')[2]}" in lines


def test_a_terminal_shows_how_far_the_run_is_in_one_line(terminal: FakeTerminal) -> None:
    with Progress(3, console(terminal)) as progress:
        for name in ("literals/fails", "types/x", "types/y"):
            progress.started(name)
        progress.finished(FAILED)
    lines = visible(terminal.getvalue())
    assert any(
        "1/3" in line and "1 failed, types/x and 1 more" in line for line in re.split(r"[\r\n]", "\n".join(lines))
    )
    assert max(len(line) for line in re.split(r"[\r\n]", "\n".join(lines))) <= 60


def test_required_cases_that_are_inconclusive_are_explained_and_counted() -> None:
    output = io.StringIO()
    found = run(
        case("choice/wanted", "inconclusive", remark="the model answered in words"),
        case("choice/unsure", "inconclusive", required=False, remark="it was cut"),
    )
    table(found, console(output))
    assert "INCONCLUSIVE choice/wanted" in output.getvalue()
    assert "the model answered in words" in output.getvalue()
    assert "choice/unsure" not in output.getvalue()
    assert "2 inconclusive (1 of them required)" in output.getvalue()


BEFORE = {
    "stays": "pass",
    "breaks": "pass",
    "doubts": "pass",
    "mends": "fail",
    "fails": "fail",
    "hides": "fail",
    "leaves": "pass",
}
AFTER = {
    "stays": "pass",
    "breaks": "fail",
    "doubts": "inconclusive",
    "mends": "pass",
    "fails": "fail",
    "hides": "inconclusive",
}


def cases(verdicts: dict[str, str]) -> list[CaseResult]:
    return [case(f"a/{name}", verdict, remark=f"why {name} {verdict}") for name, verdict in verdicts.items()]  # type: ignore[arg-type]  # words


def test_a_comparison_says_what_became_of_each_case() -> None:
    output = io.StringIO()
    compare(
        run(*cases(BEFORE)),
        run(*cases(AFTER), case("a/comes"), case("a/comes-broken", "fail", remark="new and broken")),
    ).render(console(output))
    text = output.getvalue()
    assert text.split("\n\n", 1)[1] == (
        "Worse (3)\n"
        "  a/breaks: pass -> fail\n      why breaks fail\n"
        "  a/doubts: pass -> inconclusive\n      why doubts inconclusive\n"
        "  a/comes-broken: fail\n      new and broken\n"
        "\nBetter (1)\n  a/mends: fail -> pass\n"
        "\nChanged, not for the better (1)\n  a/hides: fail -> inconclusive\n      why hides inconclusive\n"
        "\nNew (1)\n  a/comes: pass\n"
        "\nGone (1)\n  a/leaves: pass\n"
        "\n2 of 9 cases have the verdict they had.\n"
    )
    assert text.startswith(
        "before: my/model at http://localhost:8000/v1 (chat), profile agent, tool-conformance 0.1.0, "
    )
    assert "7 cases: 4 passed, 3 failed, 0 inconclusive" in text


@pytest.mark.parametrize(
    ("before", "after", "worse"),
    [
        ([case("a/b")], [case("a/b", "fail")], True),
        ([case("a/b", "inconclusive")], [case("a/b", "fail")], True),
        ([], [case("a/b", "fail")], True),
        ([case("a/b")], [case("a/b", "inconclusive")], True),
        ([case("a/b")], [case("a/b", "inconclusive", required=False)], False),
        ([case("a/b", "fail")], [case("a/b", "fail")], False),
        ([case("a/b", "fail")], [case("a/b", "inconclusive")], False),
        ([case("a/b")], [], False),
        ([], [case("a/b", "inconclusive")], False),
    ],
)
def test_a_run_is_worse_by_a_new_failure_or_a_lost_pass(
    before: list[CaseResult], after: list[CaseResult], worse: bool
) -> None:
    assert compare(run(*before), run(*after)).worse is worse


def test_absent_is_not_null_on_the_page() -> None:
    difference = Difference("calls[0].arguments.x", "calls[0].arguments.x: missing, expected null", None, ABSENT)
    shown = page(case("types/x", "fail", exchange(differences=[difference])))
    assert shown.texts("dt")[-1:] == ["expected"]
    assert shown.texts("dd")[-1:] == ["null"]
