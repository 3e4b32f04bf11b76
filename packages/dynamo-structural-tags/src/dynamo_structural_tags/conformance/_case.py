# SPDX-License-Identifier: Apache-2.0
"""A case: a request in the form of chat completions, and what its answer has to be. Its files: `case.schema.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import jsonschema

from ._text import shortened

__all__ = ["APIS", "MODES", "NEEDS", "Cancel", "Case", "CaseError", "Profile", "Turn", "load_cases", "load_profile"]

#: The three APIs, by the name of the flag.
APIS = ("chat", "responses", "messages")
#: How an answer is asked for.
MODES = ("plain", "stream")
#: What a model (or the server's grammar in its stead) must be able to do for a case to tell anything.
NEEDS: Mapping[str, str] = {
    "forced": "calls the tool that the request names or requires, with the arguments that a schema fixes",
    "auto": "decides by itself to call a tool",
    "text": "answers in words, and ends by itself",
    "follow": "does what a message asks, to the letter",
    "parallel": "writes several calls in one answer",
    "reasoning": "reasons before it answers, and its server shows that (Responses, where asked for a summary)",
}

_HERE = Path(__file__).parent
_NUMBER = "${n}"


class CaseError(ValueError):
    """A file of cases or a profile that cannot be used: the message names the file, the path in it and the value."""


@dataclass(frozen=True)
class Turn:
    """A further turn: tool results for the calls of the answer before, in their order, a message, changed fields."""

    results: tuple[str, ...] = ()
    user: str | None = None
    request: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cancel:
    """Streams of the same request that are left before the one that is judged: how many, after how many events."""

    times: int
    after_events: int


@dataclass(frozen=True)
class Case:
    """One fault that an agent would suffer, and how it shows."""

    id: str
    fault: str
    request: Mapping[str, Any]
    expect: Mapping[str, Any]
    #: What a well-behaved model answers, one mapping a turn: `text`, `reasoning`, `calls` (`name`, `arguments`), and
    #: `if_seen`, words that it must have been shown.
    reference: tuple[Mapping[str, Any], ...] = ()
    needs: frozenset[str] = frozenset()
    apis: tuple[str, ...] = APIS
    modes: tuple[str, ...] = MODES
    then: tuple[Turn, ...] = ()
    copies: int = 1
    cancel: Cancel | None = None
    #: Sent as it stands instead of JSON made from `request`.
    body: str | None = None
    #: Fields laid over the translated body of an API, by its name; null removes one.
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def area(self) -> str:
        """The part of the id before the slash."""
        return self.id.partition("/")[0]

    def numbered(self, n: int) -> Case:
        """The copy of that number, from 1: `${n}` is replaced in every string."""
        return replace(
            self,
            request=_numbered(self.request, n),
            expect=_numbered(self.expect, n),
            reference=_numbered(self.reference, n),
            body=_numbered(self.body, n),
            overrides=_numbered(self.overrides, n),
            then=tuple(Turn(_numbered(t.results, n), _numbered(t.user, n), _numbered(t.request, n)) for t in self.then),
        )

    def prompts(self) -> Iterator[str]:
        """The last user message of each turn that brings one."""
        messages = self.request.get("messages")
        for message in reversed(messages if isinstance(messages, list) else []):
            if isinstance(message, dict) and message.get("role") == "user":
                content = message.get("content")
                parts = content if isinstance(content, list) else [{"text": content}]
                texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
                if any(texts):
                    yield "".join(texts)
                break
        yield from (turn.user for turn in self.then if turn.user is not None)


@dataclass(frozen=True)
class Profile:
    """What a model must be able to do: the cases that need no more are required of it."""

    name: str
    description: str
    needs: frozenset[str]
    #: What a request gets that has none.
    max_tokens: int
    #: Ids of further cases that are required.
    also: frozenset[str] = frozenset()
    #: Ids of cases that are not, and why.
    excluded: Mapping[str, str] = field(default_factory=dict)

    def requires(self, case: Case) -> bool:
        """Whether a case has to pass."""
        return case.id not in self.excluded and (case.id in self.also or case.needs <= self.needs)


def load_cases(folder: Path | str | None = None) -> tuple[Case, ...]:
    """The cases of every `*.yaml` in a folder, in the order of the files' names; without a folder, the cases shipped.

    Raises `CaseError` where a file is no YAML or breaks `case.schema.json`, or two cases share an id.
    """
    folder = _HERE / "cases" if folder is None else Path(folder)
    files = sorted(folder.glob("*.yaml"))
    if not files:
        why = "no file *.yaml in it" if folder.is_dir() else "not a folder" if folder.exists() else "no such folder"
        raise CaseError(f"{folder}: {why}")
    cases: dict[str, Case] = {}
    for path in files:
        document = _read(path, "case.schema.json")
        for name, entry in document["cases"].items():
            case = _case(f"{document['area']}/{name}", entry, f"{path}: cases.{name}")
            if case.id in cases:
                raise CaseError(f"{path}: cases.{name}: the id {case.id!r} is taken by another file")
            cases[case.id] = case
    return tuple(cases.values())


def load_profile(name: str) -> Profile:
    """A profile that is shipped, by its name, or one's own, by the path of its file.

    Raises `CaseError` where there is none of that name, or the file is malformed.
    """
    shipped = {path.stem: path for path in sorted((_HERE / "profiles").glob("*.yaml"))}
    path = shipped.get(name, Path(name))
    if not path.is_file():
        raise CaseError(f"no profile {name!r}: it is one of {', '.join(shipped)}, or the path of a file")
    document = _read(path, "profile.schema.json")
    return Profile(
        name=path.stem,
        description=document.get("description", ""),
        needs=frozenset(document["needs"]),
        max_tokens=document["max_tokens"],
        also=frozenset(document.get("also", ())),
        excluded=document.get("except", {}),
    )


def _case(case_id: str, entry: dict[str, Any], where: str) -> Case:
    expect, then = entry["expect"], entry.get("then", [])
    if "request" not in entry and "body" not in entry:
        raise CaseError(f"{where}: neither `request` nor `body` says what is sent")
    reference = entry.get("reference")
    if reference is None:
        reference = [] if then else _default_reference(expect)
    elif len(reference) != len(then) + 1:
        raise CaseError(f"{where}.reference: {len(reference)} turns of the model, but the case has {len(then) + 1}")
    modes = tuple(entry.get("modes", MODES))
    if "same" in expect and set(modes) != set(MODES):
        raise CaseError(f"{where}.expect.same: compares both modes, but the case has only {modes[0]!r}")
    cancel = entry.get("cancel")
    return Case(
        id=case_id,
        fault=" ".join(entry["fault"].split()),
        request=entry.get("request", {}),
        expect=expect,
        reference=tuple(reference),
        needs=frozenset(entry.get("needs", ())),
        apis=tuple(entry.get("apis", APIS)),
        modes=modes,
        then=tuple(Turn(tuple(t.get("results", ())), t.get("user"), t.get("request", {})) for t in then),
        copies=entry.get("copies", 1),
        cancel=Cancel(**cancel) if cancel else None,
        body=entry.get("body"),
        overrides=entry.get("overrides", {}),
    )


def _default_reference(expect: Mapping[str, Any]) -> list[dict[str, Any]]:
    turn: dict[str, Any] = {}
    if "calls" in expect:
        turn["calls"] = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in expect["calls"]]
    for key in ("text", "reasoning"):
        wanted = expect.get(key, {})
        if "equals" in wanted or "contains" in wanted:
            turn[key] = wanted.get("equals", " ".join(wanted.get("contains", ())))
    return [turn] if turn else []


def _numbered(value: Any, n: int) -> Any:
    if isinstance(value, str):
        return value.replace(_NUMBER, str(n))
    if isinstance(value, dict):
        return {_numbered(key, n): _numbered(item, n) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_numbered(item, n) for item in value)
    return value


def _read(path: Path, schema: str) -> Any:
    """A YAML file, checked. JSON's values only: no dates, `no` is a word and `1e5` a number."""
    import yaml  # of the extra `conformance`

    try:
        document = yaml.load(path.read_text("utf-8"), Loader=_loader())
    except (OSError, UnicodeDecodeError) as error:
        raise CaseError(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        words = " ".join(str(error).replace('"<unicode string>", ', "").split())
        raise CaseError(f"{path}: {words}") from None
    try:
        json.dumps(document)
    except ValueError as error:  # an anchor within itself
        raise CaseError(f"{path}: {error}") from None
    fault = jsonschema.exceptions.best_match(_validator(schema).iter_errors(document))
    if fault is not None:
        where = re.sub(r"^\$\.?", "", fault.json_path) or "the document"
        # The schema says `not` of fields that the suite itself sends.
        message = f"{fault.instance!r} may not stand here" if fault.validator == "not" else fault.message
        raise CaseError(f"{path}: {where}: {shortened(message, 400)}")
    return document


@cache
def _validator(name: str) -> Any:
    return jsonschema.Draft202012Validator(json.loads((_HERE / name).read_text("utf-8")))


@cache
def _loader() -> Any:
    """PyYAML's safe loader, cut down to the values that JSON has."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
            seen = set()
            for key, _ in node.value:
                if key.tag == "tag:yaml.org,2002:merge":
                    continue
                if key.tag != "tag:yaml.org,2002:str":
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is no string", key.start_mark
                    )
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} stands twice", key.start_mark
                    )
                seen.add(key.value)
            return super().construct_mapping(node, deep)  # type: ignore[no-any-return]

    prefix = "tag:yaml.org,2002:"
    number = r"-?(?:0|[1-9][0-9]*)"
    for tag, pattern, first in (
        ("merge", r"^<<$", "<"),
        ("null", r"^(?:null|)$", ["n", ""]),
        ("bool", r"^(?:true|false)$", "tf"),
        ("int", rf"^{number}$", "-0123456789"),
        ("float", rf"^{number}(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?$", "-0123456789"),
    ):
        Loader.add_implicit_resolver(prefix + tag, re.compile(pattern), list(first))
    Loader.add_constructor(prefix + "int", lambda _, node: int(node.value))
    Loader.add_constructor(prefix + "float", lambda _, node: float(node.value))
    return Loader
