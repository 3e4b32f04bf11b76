# SPDX-License-Identifier: Apache-2.0
"""Whether an answer is what its case expects, and what exactly differs.

It sees what a caller sees, an `Answer`, and shares nothing with the parser or the request reader of this package.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn

import jsonschema

from ._answer import BUSY, Answer, Call
from ._results import ABSENT, Difference, Verdict
from ._text import literal, shortened

__all__ = ["Judgement", "differences", "judge", "judge_same", "read_arguments"]

#: How an error says that the token limit ended a call.
_CUT_WORDS = ("truncat", "incomplete", "cut off")
#: What tells it as well where the status is not that of a refused request, which may name the limit too.
_LIMIT_WORDS = ("length", "limit", "max_tokens", "max_completion_tokens", "max_output")
#: The keys that errors of all kinds are wrapped in: they name nothing.
_ENVELOPE = re.compile(r"""(["'])(?:code|ctx|error|input|loc|message|msg|object|param|status|type|url)\1\s*:""")
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")


@dataclass
class Judgement:
    """The verdict on an answer and, unless it passes, why. `remark` is for a verdict without differences."""

    verdict: Verdict
    remark: str = ""
    differences: list[Difference] = field(default_factory=list)
    #: Whether all that differs is what the model wrote: one that cannot do what the case needs explains it.
    by_model: bool = False

    @property
    def reasons(self) -> list[str]:
        """What led to the verdict, a sentence each."""
        return ([self.remark] if self.remark else []) + [difference.message for difference in self.differences]


def judge(
    expect: Mapping[str, Any],
    request: Mapping[str, Any],
    answer: Answer,
    reference: Mapping[str, Any] | None = None,
    *,
    rewritten: bool = False,
) -> Judgement:
    """Judge one answer.

    Args:
        expect: A case's `expect`; `same`, which is about two answers, is left to `judge_same`.
        request: The request of that turn in the form of chat completions: its tools, and its token limit.
        answer: What came.
        reference: What a well-behaved model answers in that turn, if it is known.
        rewritten: Whether the API carries arguments as an object, so that their text is not the server's.
    """
    if answer.status in BUSY:
        return Judgement("inconclusive", f"the server was busy: {_error(answer)}")
    if "refused" in expect:
        return _refused(expect["refused"], answer)
    if _is_refusal(answer) and _names(answer, expect.get("or_refused", ())):
        return Judgement("pass", f"refused: {_error(answer)}")
    if answer.broken is not None:
        shown = _raw(answer) if "no JSON" in answer.broken else ""  # a proxy's page, say
        return _failed(f"no whole answer: {answer.broken}{_beside(answer)}{shown}")
    if answer.error is not None or not 200 <= answer.status < 300:
        return _errors(expect, answer, reference)
    if not answer.calls and not answer.text and not answer.reasoning and answer.finish is None:
        problems = "; ".join(problem.message for problem in answer.problems)
        return _failed(f"nothing that can be read came{': ' + problems if problems else ''}{_raw(answer)}")
    declared = _tools(request)
    if "cut" in expect:
        return _cut(request, declared, answer, reference, rewritten)
    if "reported" in expect:
        return _reported(declared, answer)
    return _content(expect, request, declared, answer)


def judge_same(fields: Sequence[str], api: str, plain: Answer, stream: Answer) -> Judgement:
    """Compare a stream with the plain answer to the same request, in the fields of `expect.same`.

    Arguments are compared byte for byte, but in `messages`, whose plain answers carry no bytes, as JSON values.
    """
    about_calls = {"names", "arguments", "ids_present", "count"}
    if about_calls.issuperset(fields) and not plain.calls and not stream.calls:
        return Judgement("inconclusive", "no call came, so there is none to compare")
    if set(fields) == {"reasoning"} and not plain.reasoning and not stream.reasoning:
        return Judgement("inconclusive", "no reasoning came, so there is none to compare")
    found: list[Difference] = []
    for name in fields:
        if name == "count":
            found += differences("len(calls)", len(plain.calls), len(stream.calls))
        elif name == "names":
            found += differences("calls[*].name", [c.name for c in plain.calls], [c.name for c in stream.calls])
        elif name == "ids_present":
            found += differences(
                "calls[*].id present", [bool(c.id) for c in plain.calls], [bool(c.id) for c in stream.calls]
            )
        elif name == "arguments":
            if len(plain.calls) != len(stream.calls) and "count" not in fields:
                found += differences("len(calls)", len(plain.calls), len(stream.calls))
            for i, (one, other) in enumerate(zip(plain.calls, stream.calls, strict=False)):
                if one.arguments == other.arguments:
                    continue
                values = [_arguments(one), _arguments(other)]
                read = api == "messages" and not any(isinstance(value, ValueError) for value in values)
                if read and not any(differences("", *values)):
                    continue
                found += differences(f"calls[{i}].arguments", one.arguments, other.arguments)
        elif name == "usage":
            found += differences("usage", _usage(plain), _usage(stream))
        else:
            found += differences(name, getattr(plain, name), getattr(stream, name))
    return Judgement("fail" if found else "pass", "", found)


def differences(path: str, expected: Any, got: Any) -> Iterator[Difference]:
    """Where two JSON values differ. Types are strict: 1 is neither 1.0 nor true."""
    if type(expected) is not type(got):
        yield Difference(path, f"{path}: expected {literal(expected)}, got {literal(got)}", expected, got)
    elif isinstance(expected, dict):
        for key, value in expected.items():
            inner = f"{path}.{key}" if _PLAIN_KEY.match(key) else f"{path}[{literal(key, 80)}]"
            if key in got:
                yield from differences(inner, value, got[key])
            else:
                yield Difference(inner, f"{inner}: missing, expected {literal(value)}", expected=value)
        for key, value in got.items():
            if key not in expected:
                inner = f"{path}.{key}" if _PLAIN_KEY.match(key) else f"{path}[{literal(key, 80)}]"
                yield Difference(inner, f"{inner}: not expected, got {literal(value)}", got=value)
    elif isinstance(expected, list):
        for i, (one, other) in enumerate(zip(expected, got, strict=False)):
            yield from differences(f"{path}[{i}]", one, other)
        for i, value in enumerate(expected[len(got) :], len(got)):
            yield Difference(f"{path}[{i}]", f"{path}[{i}]: missing, expected {literal(value)}", expected=value)
        for i, value in enumerate(got[len(expected) :], len(expected)):
            yield Difference(f"{path}[{i}]", f"{path}[{i}]: not expected, got {literal(value)}", got=value)
    elif expected != got:
        words = (
            _strings(expected, got)
            if isinstance(expected, str)
            else f"expected {literal(expected)}, got {literal(got)}"
        )
        yield Difference(path, f"{path}: {words}", expected, got)


def read_arguments(text: str) -> Any:
    """The arguments' value. Raises ValueError for what is no JSON (RFC 8259), and for a key that stands twice."""
    try:
        return _decode(text)
    except RecursionError:
        raise ValueError("nested too deep to be read") from None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {literal(next(key for key in keys if keys.count(key) > 1), 80)} stands twice")
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_decode: Callable[[str], Any] = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant).decode


def _strings(expected: str, got: str) -> str:
    """Two strings that differ, around the first place where they do."""
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got)))
    shown = []
    # Texts that look alike are shown in ASCII alone; in others only what is invisible is escaped.
    ascii_only = unicodedata.normalize("NFKC", expected) == unicodedata.normalize("NFKC", got)
    for text in (expected, got):
        start, end = (0, len(text)) if max(len(expected), len(got)) <= 160 else (max(0, at - 40), at + 80)
        part = text[start:end]
        quoted = json.dumps(part) if ascii_only else literal(part, 2000)
        shown.append(f"{'…' if start else ''}{quoted}{'…' if end < len(text) else ''}")
    words = f"expected {shown[0]}, got {shown[1]}"
    if max(len(expected), len(got)) > 160:
        words += f" (from character {at} on; {len(expected)} characters against {len(got)})"
    return words


def _failed(message: str, path: str = "answer") -> Judgement:
    return Judgement("fail", "", [Difference(path, message)])


def _error(answer: Answer) -> str:
    return f"status {answer.status}: {shortened(answer.error or answer.broken or 'no error text', 400)}"


def _raw(answer: Answer) -> str:
    return f"; the body: {literal(answer.raw, 200)}" if answer.raw else ""


def _beside(answer: Answer) -> str:
    return f" (status {answer.status}, {_came(answer)})" if answer.status else ""


def _came(answer: Answer) -> str:
    """What an answer consists of, in few words."""
    names = ", ".join(call.name or "(no name)" for call in answer.calls)
    parts = [
        f"{len(answer.calls)} calls: {names}" if len(answer.calls) > 1 else f"a call: {names}" if names else "no call"
    ]
    parts.append(f"text {literal(answer.text, 120)}" if answer.text else "no text")
    parts.append(f"finish reason {answer.finish!r}" if answer.finish is not None else "no finish reason")
    return ", ".join(parts)


def _is_refusal(answer: Answer) -> bool:
    """Whether the request was refused: by a 4xx, or by an error event where the stream had begun."""
    in_stream = 200 <= answer.status < 300 and all(problem.kind != "status" for problem in answer.problems)
    return answer.error is not None and (in_stream or 400 <= answer.status < 500)


def _names(answer: Answer, words: Sequence[str]) -> bool:
    error = _ENVELOPE.sub("", (answer.error or "").lower())
    return any(word.lower() in error for word in words)


def _refused(refused: Mapping[str, Any], answer: Answer) -> Judgement:
    if answer.broken is not None and answer.error is None:
        return _failed(f"expected a 4xx, got no whole answer: {answer.broken}{_beside(answer)}", "status")
    if answer.status >= 500:
        return _failed(f"expected a 4xx, got {_error(answer)}", "status")
    if answer.error is None and 200 <= answer.status < 300:
        return _failed(f"expected a 4xx, got status {answer.status} with {_came(answer)}", "status")
    if 200 <= answer.status < 300 and any(problem.kind == "status" for problem in answer.problems):
        return _failed(f"expected a 4xx, got an error under {_error(answer)}", "status")
    if not (answer.error or "").strip():
        return _failed(f"status {answer.status} has no error text{_raw(answer)}", "error")
    missing = [words for words in refused["names"] if not _names(answer, words)]
    return Judgement(
        "fail" if missing else "pass",
        "",
        [
            Difference(
                "error",
                f"error: expected it to name {' or '.join(map(literal, words))}, got {_error(answer)}",
                got=answer.error,
            )
            for words in missing
        ],
    )


def _errors(expect: Mapping[str, Any], answer: Answer, reference: Mapping[str, Any] | None) -> Judgement:
    """An error where an answer was expected: right where the case is about a call that cannot be given."""
    names: Sequence[str] = _CUT_WORDS if "cut" in expect else ()
    if "reported" in expect:
        names = [call["name"] for call in (reference or {}).get("calls", ())]
    if not 400 <= answer.status < 500:
        names = [*names, *(("tool", "function") if "reported" in expect else _LIMIT_WORDS if "cut" in expect else ())]
    if _names(answer, names):
        return Judgement("pass", f"reported: {_error(answer)}")
    if _names(answer, ("truncat",)):  # of its own accord: nothing here was to be cut
        return Judgement("inconclusive", f"the token limit ended the answer: {_error(answer)}")
    where = " in the stream" if answer.error is not None and 200 <= answer.status < 300 else ""
    return _failed(f"expected an answer, got an error{where}: {_error(answer)}", "error" if where else "status")


def _tools(request: Mapping[str, Any]) -> dict[str, Any]:
    """The declared tools' parameters by name; what is malformed is left out."""
    declared = {}
    tools = request.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            declared[function["name"]] = function.get("parameters") or {}
    return declared


def _arguments(call: Call) -> Any:
    """A call's arguments, or the ValueError. No text at all is no JSON either: agents parse what comes."""
    try:
        return read_arguments(call.arguments)
    except ValueError as error:
        return error


def _unread(i: int, call: Call, error: ValueError, expected: Any = ABSENT) -> Difference:
    path = f"calls[{i}].arguments"
    message = f"{path}: {str(error) if 'twice' in str(error) else f'no JSON ({error})'}: {literal(call.arguments)}"
    if expected is not ABSENT:
        expected = json.dumps(expected, ensure_ascii=False)
    return Difference(path, message, expected=expected, got=call.arguments)


@lru_cache(maxsize=4096)
def _validator(parameters: str) -> Any:
    return jsonschema.Draft202012Validator(json.loads(parameters))


def _invalid(path: str, parameters: Any, value: Any) -> list[Difference]:
    """Where arguments break the schema of their tool."""
    if not parameters:
        return []
    try:
        errors = sorted(_validator(json.dumps(parameters)).iter_errors(value), key=lambda error: error.json_path)
    except Exception as error:  # a schema of a case that says more than this library can follow
        return [Difference(path, f"{path}: its schema cannot be checked: {type(error).__name__}: {error}", got=value)]
    return [
        Difference(
            f"{path}{error.json_path[1:]}",
            f"{path}{error.json_path[1:]}: breaks {literal({error.validator: error.validator_value}, 200)}: "
            f"got {literal(error.instance, 200)}",
            got=error.instance,
        )
        for error in errors
    ]


def _content(
    expect: Mapping[str, Any], request: Mapping[str, Any], declared: Mapping[str, Any], answer: Answer
) -> Judgement:
    calls = answer.calls
    count = expect.get("count", {})
    least, most = (count, count) if isinstance(count, int) else (count.get("min", 0), count.get("max"))
    must_call = "must_call" in expect
    wants_calls = must_call or least or any(key in expect for key in ("calls", "valid", "ids"))
    kinds = expect.get("protocol", ())
    # What the token limit explains, what a model that can do less, and what neither does.
    content: list[Difference] = []
    written: list[Difference] = []
    found = [
        Difference(f"protocol.{problem.kind}", f"protocol: {problem.kind}: {shortened(problem.message, 400)}")
        for problem in answer.problems
        if kinds is True or problem.kind in kinds
    ]
    if not calls and not found and (wants_calls or expect.get("finish") == ["tool_calls"]):
        if answer.finish == "length":
            return Judgement("inconclusive", f"the token limit ended the answer before a call: {_came(answer)}")
        if must_call or answer.finish == "tool_calls":
            missing = Difference("calls", f"calls: expected a call, got {_came(answer)}")
            return Judgement("fail", "", [missing], by_model=answer.finish != "tool_calls")
        return Judgement("inconclusive", f"the model did not call: {_came(answer)}")
    values = [_arguments(call) for call in calls]
    if "calls" in expect:
        content += _expected_calls(expect["calls"], calls, values)
    if "valid" in expect:
        content += _valid_calls(declared, calls, values)
    if not least <= len(calls) <= (len(calls) if most is None else most):
        bounds = str(least) if least == most else f"{least} or more" if most is None else f"{least} to {most}"
        content.append(Difference("calls", f"calls: expected {bounds}, got {_came(answer)}"))
    if "no_calls" in expect and calls:
        names = ", ".join(f"{call.name}({shortened(call.arguments, 120)})" for call in calls)
        written.append(Difference("calls", f"calls: expected none, got {names}"))
    if "ids" in expect:
        found += _ids(calls)
    if "usage" in expect:
        found += _usage_faults(answer)
    for name in ("text", "reasoning"):
        if name in expect:
            more, always = _text(name, expect[name], getattr(answer, name))
            content += more
            written += always
    if "finish" in expect and answer.finish not in expect["finish"]:
        wanted = " or ".join(expect["finish"])
        message = f"finish: expected {wanted}, got {answer.finish or 'none'} beside {_came(answer)}"
        cut = content or _spent(request, answer)
        (content if cut else written).append(Difference("finish", message, wanted, answer.finish))
    if content and not written and not found and answer.finish == "length":
        return Judgement("inconclusive", f"the token limit ended the answer: {_came(answer)}")
    everything = content + written + found
    # Under `length` it said something that is not shown, as a model that reasons in secret does.
    silent = not calls and not answer.text and not answer.reasoning and answer.finish != "length"
    if "answers" in expect and not everything and silent:
        return Judgement("inconclusive", f"the model said nothing: {_came(answer)}")
    return Judgement("fail" if everything else "pass", "", everything, by_model=not found)


def _expected_calls(
    expected: Sequence[Mapping[str, Any]], calls: Sequence[Call], values: Sequence[Any]
) -> list[Difference]:
    found = []
    if len(expected) != len(calls):
        wanted, got = ([call["name"] for call in expected], [call.name for call in calls])
        message = f"calls: expected {len(wanted)} ({', '.join(wanted)}), got {len(got)} ({', '.join(got)})"
        found.append(Difference("calls", message, wanted, got))
    for i, (want, call, value) in enumerate(zip(expected, calls, values, strict=False)):
        found += differences(f"calls[{i}].name", want["name"], call.name)
        if "arguments" not in want:
            continue
        if isinstance(value, ValueError):
            found.append(_unread(i, call, value, want["arguments"]))
        else:
            found += differences(f"calls[{i}].arguments", want["arguments"], value)
    return found


def _valid_calls(declared: Mapping[str, Any], calls: Sequence[Call], values: Sequence[Any]) -> list[Difference]:
    found = []
    for i, (call, value) in enumerate(zip(calls, values, strict=False)):
        if call.name not in declared:
            message = f"calls[{i}].name: {literal(call.name)} is not declared: {', '.join(declared) or 'no tool is'}"
            found.append(Difference(f"calls[{i}].name", message, got=call.name))
        elif isinstance(value, ValueError):
            found.append(_unread(i, call, value))
        elif not isinstance(value, dict):
            message = f"calls[{i}].arguments: expected an object, got {literal(value)}"
            found.append(Difference(f"calls[{i}].arguments", message, got=value))
        else:
            found += _invalid(f"calls[{i}].arguments", declared[call.name], value)
    return found


def _ids(calls: Sequence[Call]) -> list[Difference]:
    found = []
    seen: dict[str, int] = {}
    for i, call in enumerate(calls):
        if not call.id:
            found.append(Difference(f"calls[{i}].id", f"calls[{i}].id: the call {call.name!r} has no id"))
        elif call.id in seen:
            message = f"calls[{i}].id: {literal(call.id)} is the id of calls[{seen[call.id]}] as well"
            found.append(Difference(f"calls[{i}].id", message, got=call.id))
        seen.setdefault(call.id, i)
    return found


def _usage(answer: Answer) -> Any:
    return None if answer.usage is None else dict(vars(answer.usage))


def _usage_faults(answer: Answer) -> list[Difference]:
    usage = answer.usage
    if usage is None:
        return [Difference("usage", "usage: missing")]
    found = [
        Difference(f"usage.{name}", f"usage.{name}: expected more than 0, got {value}", got=value)
        for name, value in (("prompt", usage.prompt), ("completion", usage.completion))
        if value <= 0
    ]
    if usage.total is not None and usage.total != usage.prompt + usage.completion:
        wanted = usage.prompt + usage.completion
        message = f"usage.total: expected {usage.prompt} + {usage.completion} = {wanted}, got {usage.total}"
        found.append(Difference("usage.total", message, wanted, usage.total))
    return found


def _text(name: str, wanted: Mapping[str, Any], got: str) -> tuple[list[Difference], list[Difference]]:
    """What a token limit could explain, and what it could not. Words are the same in capitals."""
    content: list[Difference] = []
    found: list[Difference] = []
    if "equals" in wanted:
        content += differences(name, wanted["equals"], got)
    content += [
        Difference(name, f"{name}: expected it to hold {literal(part)}, got {literal(got)}", got=got)
        for part in wanted.get("contains", ())
        if part.casefold() not in got.casefold()
    ]
    found += [
        Difference(name, f"{name}: {literal(part)} may not stand in it, got {literal(got)}", got=got)
        for part in wanted.get("lacks", ())
        if part.casefold() in got.casefold()
    ]
    if wanted.get("empty") is True and got:
        found.append(Difference(name, f"{name}: expected none, got {literal(got)}", "", got))
    if wanted.get("empty") is False and not got:
        content.append(Difference(name, f"{name}: expected some, got none"))
    return content, found


def _spent(request: Mapping[str, Any], answer: Answer) -> bool | None:
    """Whether the answer took all the tokens it might; None where it does not say."""
    limit = request.get("max_completion_tokens", request.get("max_tokens"))
    return None if answer.usage is None or not isinstance(limit, int) else answer.usage.completion >= limit


def _cut(
    request: Mapping[str, Any],
    declared: Mapping[str, Any],
    answer: Answer,
    reference: Mapping[str, Any] | None,
    rewritten: bool,
) -> Judgement:
    """The token limit falls into a call: the answer has to say so, and may not pass off a part as a whole call."""
    spent = _spent(request, answer)
    values = [_arguments(call) for call in answer.calls]
    wrong: list[Difference] = []
    for i, (call, value) in enumerate(zip(answer.calls, values, strict=True)):
        if isinstance(value, ValueError):
            # Under `length` that is what a cut call looks like.
            wrong += [] if answer.finish == "length" else [_unread(i, call, value)]
        elif answer.finish != "length" and spent is False:
            pass  # the limit was not hit: the model wrote something of its own
        elif not (rewritten and answer.finish == "length"):
            for difference in _invalid(f"calls[{i}].arguments", declared.get(call.name), value):
                message = f"{difference.message}; a call that was cut was closed as if it were whole"
                wrong.append(Difference(difference.path, message, difference.expected, difference.got))
    if answer.finish == "length":
        return Judgement("fail" if wrong else "pass", "", wrong)
    finish = f"finish: expected length, got {answer.finish or 'none'}"
    if answer.calls:
        if not wrong and (not spent or _as_reference(answer.calls, values, reference)):
            return Judgement("inconclusive", f"the token limit was not hit: {_came(answer)}")
        message = f"{finish}: what was cut passes for a whole call: {_came(answer)}"
        return Judgement("fail", "", [Difference("finish", message, "length", answer.finish), *wrong])
    if spent is False or (spent is None and answer.text):
        return Judgement("inconclusive", f"the token limit was not hit: {_came(answer)}")
    message = f"{finish}: the call is gone: {_came(answer)}"
    return Judgement("fail", "", [Difference("finish", message, "length", answer.finish)])


def _as_reference(calls: Sequence[Call], values: Sequence[Any], reference: Mapping[str, Any] | None) -> bool:
    wanted = (reference or {}).get("calls", ())
    return [call["name"] for call in wanted] == [call.name for call in calls] and not any(
        differences("", [call.get("arguments") for call in wanted], list(values))
    )


def _reported(declared: Mapping[str, Any], answer: Answer) -> Judgement:
    """The model calls a tool that is not declared: that may neither reach the caller nor vanish."""
    undeclared = [call.name for call in answer.calls if call.name not in declared]
    if undeclared:
        message = f"calls: {', '.join(map(literal, undeclared))}: not declared: {', '.join(declared) or 'no tool is'}"
        return _failed(message, "calls")
    if answer.calls or answer.text.strip():
        return Judgement("pass")
    if answer.finish == "length":
        return Judgement("inconclusive", f"the token limit ended the answer before a call: {_came(answer)}")
    return _failed(f"the call vanished: {_came(answer)}")
