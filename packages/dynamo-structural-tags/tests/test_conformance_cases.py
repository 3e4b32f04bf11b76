# SPDX-License-Identifier: Apache-2.0
"""Case files and profiles: what is read from them, and how a faulty one is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dynamo_structural_tags.conformance import NEEDS, Cancel, Case, CaseError, Turn, _case, load_cases, load_profile
from dynamo_structural_tags.conformance._cli import _parser

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")

FULL = r"""
area: files
shared:
  tools: &tools [{type: function, function: {name: write, parameters: {type: object}}}]
cases:
  entity:
    fault: An entity arrives
      decoded.
    needs: [forced, follow]
    apis: [chat]
    copies: 2
    cancel: {times: 3, after_events: 1}
    overrides: {chat: {stop: null}}
    request:
      messages: [{role: user, content: "Write page ${n}."}]
      tools: *tools
    then:
      - {results: ["page ${n} is full"], user: "Again ${n}.", request: {temperature: 1e-1}}
    expect: {calls: [{name: write, arguments: {text: "${n} &lt;", on: no, none: null, date: 2026-12-01}}]}
    reference:
      - {calls: [{name: write, arguments: {}}]}
      - {calls: [{name: write}], if_seen: ["${n}"]}
"""


def load(folder: Path, **files: str) -> tuple[Case, ...]:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, "utf-8")
    return load_cases(folder)


def one(request: str = "{messages: [{role: user, content: Call it.}]}", more: str = "", name: str = "one") -> str:
    expect = "" if "expect:" in more else "expect: {calls: [{name: f}]}"
    return f"area: a\ncases:\n  {name}:\n    fault: F.\n    request: {request}\n    {expect}\n    {more}\n"


def test_a_case_is_read_with_all_that_it_says(tmp_path: Path) -> None:
    (case,) = load(tmp_path, files=FULL)
    assert (case.id, case.area, case.fault) == ("files/entity", "files", "An entity arrives decoded.")
    assert (set(case.needs), case.apis, case.modes) == ({"forced", "follow"}, ("chat",), ("plain", "stream"))
    assert (case.cancel, case.overrides) == (Cancel(3, 1), {"chat": {"stop": None}})
    assert case.request["tools"][0]["function"]["name"] == "write"
    second = case.numbered(2)
    assert second.then == (Turn(("page 2 is full",), "Again 2.", {"temperature": 0.1}),)
    assert list(second.prompts()) == ["Write page 2.", "Again 2."]
    assert second.reference[1]["if_seen"] == ["2"]
    # JSON's values and no others: YAML's own reading makes a boolean and a date of two of these.
    values = {"text": "2 &lt;", "on": "no", "none": None, "date": "2026-12-01"}
    assert second.expect["calls"][0]["arguments"] == values


def test_what_the_model_says_is_taken_from_what_is_expected(tmp_path: Path) -> None:
    more = "expect: {calls: [{name: f, arguments: {x: 1}}, {name: g}], text: {contains: [good, day]}}"
    (case,) = load(tmp_path, a=one(more=more))
    calls = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]
    assert case.reference == ({"calls": calls, "text": "good day"},)


def test_a_case_of_ones_own_needs_no_model_to_play_it(tmp_path: Path) -> None:
    """Only fake servers read `reference`, and only they need prompts that tell the cases apart."""
    first = one(more="expect: {valid: true}\n    then: [{results: [seven]}]")
    second = one("{messages: [{role: user, content: 'Call it. Please.'}]}", name="two")
    assert [(case.id, len(case.reference)) for case in load(tmp_path, a=first, b=second)] == [
        ("a/one", 0),
        ("a/two", 1),
    ]


def test_one_copy_is_number_one(tmp_path: Path) -> None:
    (case,) = load(tmp_path, a=one("{messages: [{role: user, content: 'Call ${n}.'}]}"))
    assert list(case.numbered(1).prompts()) == ["Call 1."]


def test_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    second = one("{messages: [{role: user, content: Other.}]}", name="two")
    assert [case.id for case in load(tmp_path, b=one(), a=second)] == ["a/two", "a/one"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("area: [", "a.yaml: while parsing a flow node"),
        (one() + "x: 1\n", "a.yaml: the document: Additional properties are not allowed ('x' was unexpected)"),
        (one(more="needs: [force]"), "a.yaml: cases.one.needs[0]: 'force' is not one of ['forced', "),
        (one(more="expect: {call: []}"), "a.yaml: cases.one.expect: Additional properties are not allowed ('call' was"),
        (one(more="expect: {calls: [{nam: f}]}"), "a.yaml: cases.one.expect.calls[0]: "),
        (one(more="copies: two"), "a.yaml: cases.one.copies: 'two' is not of type 'integer'"),
        (one(more="copies: 1\n    copies: 2"), "a.yaml: the key 'copies' stands twice"),
        (one("{messages: [], 1: x}"), "a.yaml: the key '1' is no string"),
        (one("{stream: true}"), "a.yaml: cases.one.request: 'stream' may not stand here"),
        (one("{messages: [a: b: c]}"), "did not find expected ',' or ']' in line 5, column 30"),
        (one("{messages: &it [*it]}"), "a.yaml: Circular reference"),
        (one(name="One"), "a.yaml: cases: 'One' does not match"),
        (one(more="reference: [{}, {}]"), "a.yaml: cases.one.reference: 2 turns of the model, but the case has 1"),
        (one(more="modes: [plain]\n    expect: {same: [names], calls: [{name: f}]}"), "one.expect.same: compares both"),
        ("area: a\ncases: {b: {fault: F., expect: {calls: [{name: f}]}}}", "neither `request` nor `body`"),
    ],
)  # fmt: skip
def test_a_faulty_file_is_named_with_the_path_and_the_value(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CaseError) as caught:
        load(tmp_path, a=text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_id_stands_once_in_all_files(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match=r"b\.yaml: cases\.one: the id 'a/one' is taken by another file"):
        load(tmp_path, a=one(), b=one("{messages: [{role: user, content: Other.}]}"))


def test_a_folder_without_cases_is_named(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match=r"no file \*\.yaml in it"):
        load_cases(tmp_path)
    with pytest.raises(CaseError, match="no such folder"):
        load_cases(tmp_path / "nowhere")
    (tmp_path / "one.yaml").write_text(one())
    with pytest.raises(CaseError, match=r"one\.yaml: not a folder"):
        load_cases(tmp_path / "one.yaml")


def test_a_profile_requires_the_cases_that_need_no_more_and_those_it_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("{needs: [forced], max_tokens: 9, also: [a/also], except: {a/not: Takes an hour.}}")
    profile = load_profile(str(path))
    assert (profile.name, profile.max_tokens) == ("mine", 9)

    def required(case_id: str, *needs: str) -> bool:
        return profile.requires(Case(case_id, "F.", {}, {}, needs=frozenset(needs)))

    assert required("a/b", "forced")
    assert required("a/b")
    assert not required("a/b", "forced", "text")
    assert required("a/also", "text")
    assert not required("a/not", "forced")


def test_shipped_profiles_ask_for_more_and_more() -> None:
    forced, agent, reasoning = (load_profile(name) for name in ("forced", "agent", "reasoning"))
    assert forced.needs == {"forced"}
    assert forced.needs < agent.needs < reasoning.needs
    assert reasoning.needs - agent.needs == {"reasoning"}


def test_shipped_profiles_name_cases_that_there_are() -> None:
    ids = {case.id for case in load_cases()}
    for name in ("forced", "agent", "reasoning"):
        profile = load_profile(name)
        assert {*profile.also, *profile.excluded} <= ids


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{needs: [forced]}", "the document: 'max_tokens' is a required property"),
        ("{needs: [all], max_tokens: 1}", r"needs\[0\]: 'all' is not one of"),
        ("{needs: [], max_tokens: 0}", "max_tokens: 0 is less than the minimum of 1"),
    ],
)
def test_a_faulty_profile_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(CaseError, match=message):
        load_profile(str(tmp_path / "mine.yaml"))


def test_an_unknown_profile_is_named_beside_those_that_there_are() -> None:
    with pytest.raises(CaseError, match="no profile 'none': it is one of agent, forced, reasoning, or the path"):
        load_profile("none")


def readme_table(head: str) -> list[str]:
    """The first column of a table of the README, without its quotes."""
    lines = README[README.index(head) :].splitlines()[2:]
    return [word.split()[0] for line in lines[: lines.index("")] for word in line.split("|")[1].split("`")[1::2]]


def test_the_readme_names_every_need() -> None:
    (row,) = [line for line in README.splitlines() if line.startswith("| `needs` |")]
    assert row.split("`")[3::2] == list(NEEDS)


def test_the_readme_shows_a_case_and_a_profile_that_load(tmp_path: Path) -> None:
    profile, cases = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (case,) = load(tmp_path, files=cases)
    assert case.id == "files/entity"
    (tmp_path / "mine.yml").write_text(profile)
    mine = load_profile(str(tmp_path / "mine.yml"))
    assert {*mine.also, *mine.excluded} <= {case.id for case in load_cases()}


def test_the_readme_names_every_field_and_every_check_there_is() -> None:
    schema = json.loads((Path(_case.__file__).parent / "case.schema.json").read_text("utf-8"))
    named = {"fault", "request", "expect", *readme_table("| beside these |")} - {"shared"}
    assert named == set(schema["$defs"]["case"]["properties"])
    assert set(readme_table("| `expect` |")) == set(schema["$defs"]["expect"]["properties"])


def test_the_readme_names_every_flag() -> None:
    flags = set(re.findall(r"--[a-z-]+", _parser().format_help())) - {"--help", "--version"}
    assert set(readme_table("| flag |")) == flags


def test_every_shipped_case_is_asked_of_some_api_and_says_its_fault() -> None:
    cases: Any = load_cases()
    assert all(case.apis and case.modes and case.fault.endswith(".") for case in cases)


def test_every_shipped_case_can_be_played() -> None:
    """A fake server finds the case of a request by its user message, and says what the case's model says."""
    cases = load_cases()
    for case in cases:
        assert len(case.reference) == len(case.then) + 1 or (not case.reference and "refused" in case.expect), case.id
    copies = [case.numbered(n) for case in cases for n in range(1, case.copies + 1)]
    prompts = sorted(((text, case.id) for case in copies for text in case.prompts()), key=lambda one: len(one[0]))
    within = [
        (text, case_id, other_id)
        for i, (text, case_id) in enumerate(prompts)
        for other, other_id in prompts[i + 1 :]
        if text in other
    ]
    assert within == []
