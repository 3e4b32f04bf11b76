# SPDX-License-Identifier: Apache-2.0
"""Ask an endpoint every case, and judge what comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Protocol

from .. import version
from ._answer import BUSY, Answer
from ._case import NEEDS, Case, Profile
from ._judge import Judgement, judge, judge_same
from ._requests import body, follow_up, laid_over
from ._results import CaseResult, Exchange, Run, Target

__all__ = ["Asker", "Progress", "run"]


class Asker(Protocol):
    """Whoever brings a body to a model: `Endpoint` over HTTP, or a client library in its place."""

    api: str
    model: str
    base_url: str

    async def ask(self, body: Mapping[str, Any] | str, stream: bool, *, cancel_after: int | None = None) -> Answer:
        """Send a body of that API, or a string as it stands. A fault of the server is an `Answer`, not an exception."""


class Progress(Protocol):
    """Hears how a run goes on."""

    def started(self, case_id: str) -> None:
        """A case is being asked."""

    def finished(self, result: CaseResult) -> None:
        """It was judged."""


@dataclass
class _Asked:
    """A conversation in one mode, judged: its exchanges, and what is compared with the other mode."""

    judgement: Judgement
    exchanges: list[Exchange]
    request: Mapping[str, Any]
    answer: Answer


async def run(
    asker: Asker,
    cases: Sequence[Case],
    profile: Profile,
    *,
    attempts: int = 3,
    concurrency: int = 4,
    progress: Progress | None = None,
    stop: asyncio.Event | None = None,
) -> Run:
    """Ask all cases that the asker's API has, and judge them.

    Args:
        asker: Whom to ask.
        cases: From `load_cases`.
        profile: Which of them are required, and the token limit of requests that have none.
        attempts: How often a case is asked at most while it stays inconclusive, from the second time on with a seed.
        concurrency: How many cases are asked at once. The copies of one case are sent at once whatever this is.
        progress: Told of each case.
        stop: Ends the run when it is set; what was judged until then is returned.
    """
    started = datetime.now(timezone.utc).replace(microsecond=0, tzinfo=None).isoformat() + "Z"
    begin = time.monotonic()
    waiting = [case for case in cases if asker.api in case.apis]
    results: list[CaseResult | None] = [None] * len(waiting)
    queue = iter(enumerate(waiting))

    async def work() -> None:
        for i, case in queue:
            if progress is not None:
                progress.started(case.id)
            results[i] = result = await _result(asker, case, profile, attempts)
            if progress is not None:
                progress.finished(result)

    tasks = [asyncio.ensure_future(work()) for _ in range(max(1, min(concurrency, len(waiting))))]
    stopper = asyncio.ensure_future(stop.wait()) if stop is not None else None
    try:
        pending = set(tasks)
        while pending and not (stopper is not None and stopper.done()):
            watched = pending if stopper is None else {*pending, stopper}
            done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            pending -= done
            for task in done & set(tasks):
                task.result()
    finally:
        ours = [*tasks, *([stopper] if stopper is not None else [])]
        for task in ours:
            task.cancel()
        await asyncio.gather(*ours, return_exceptions=True)
    return Run(
        version=version.__version__,
        started=started,
        seconds=round(time.monotonic() - begin, 3),
        endpoint=Target(asker.base_url, asker.model, asker.api),
        profile=profile.name,
        results=[result for result in results if result is not None],
        interrupted=None in results,
    )


async def _result(asker: Asker, case: Case, profile: Profile, attempts: int) -> CaseResult:
    begin = time.monotonic()
    result = CaseResult(case.id, case.area, case.fault, profile.requires(case), "inconclusive")
    for attempt in range(max(1, attempts)):
        result.attempts = attempt + 1
        try:
            judged, result.exchanges = await _attempt(asker, case, profile, attempt)
        except Exception as error:  # a case that the suite cannot handle must neither pass nor end the run
            judged = [("suite", Judgement("fail", f"the suite itself failed: {type(error).__name__}: {error}"))]
            result.exchanges = []
        verdicts = {judgement.verdict for _, judgement in judged}
        result.verdict = "fail" if "fail" in verdicts else "inconclusive" if "inconclusive" in verdicts else "pass"
        result.remark = _remark(result.verdict, judged)
        # A busy server was asked again already, with pauses.
        if result.verdict != "inconclusive" or all(exchange.status in BUSY for exchange in result.exchanges):
            break
    result.seconds = round(time.monotonic() - begin, 3)
    return result


async def _attempt(
    asker: Asker, case: Case, profile: Profile, attempt: int
) -> tuple[list[tuple[str, Judgement]], list[Exchange]]:
    copies = [case.numbered(n) for n in range(1, case.copies + 1)]
    labels = [f" of copy {n}" if case.copies > 1 else "" for n in range(1, case.copies + 1)]
    judged: list[tuple[str, Judgement]] = []
    exchanges: list[Exchange] = []
    by_mode: dict[str, list[_Asked]] = {}
    for mode in case.modes:
        conversations = [
            _converse(asker, copy, mode, mode + label, profile.max_tokens, attempt)
            for copy, label in zip(copies, labels, strict=True)
        ]
        by_mode[mode] = await asyncio.gather(*conversations) if case.copies > 1 else [await conversations[0]]
        for label, asked in zip(labels, by_mode[mode], strict=True):
            _excuse(asked.judgement, case, profile)
            judged.append((mode + label, asked.judgement))
            exchanges += asked.exchanges
    if "same" in case.expect:
        for label, plain, stream in zip(labels, by_mode["plain"], by_mode["stream"], strict=True):
            if plain.judgement.verdict == stream.judgement.verdict == "pass":
                judgement = judge_same(case.expect["same"], asker.api, plain.answer, stream.answer)
                if judgement.verdict == "fail":
                    copy = copies[labels.index(label)]
                    again = []
                    for mode in ("plain", "stream"):
                        label_again = f"{mode}{label}, again"
                        asked = await _converse(asker, copy, mode, label_again, profile.max_tokens, attempt)
                        exchanges += asked.exchanges
                        again.append(asked.answer)
                    _confirm(judgement, case.expect["same"], asker.api, plain.answer, *again)
                judged.append((f"stream against plain{label}", judgement))
                stream.exchanges[-1].differences += judgement.differences
    return judged, exchanges


def _confirm(
    judgement: Judgement, fields: Sequence[str], api: str, plain: Answer, plain_again: Answer, stream_again: Answer
) -> None:
    """A stream that differs is at fault where plain answers are the same each time, and it differs each time."""
    if judge_same(fields, api, plain, plain_again).verdict != "pass":
        other = "another plain answer to the same request differs as well"
    elif judge_same(fields, api, plain, stream_again).verdict == "pass":
        other = "another stream of the same request does not"
    else:
        return
    judgement.verdict, judgement.remark = "inconclusive", f"the stream differs, but {other}"


def _excuse(judgement: Judgement, case: Case, profile: Profile) -> None:
    """What a model wrote wrong says nothing where the profile does not ask for what the case needs."""
    beyond = [need for need in NEEDS if need in case.needs - profile.needs]
    if judgement.verdict == "fail" and judgement.by_model and beyond and case.id not in profile.also:
        judgement.verdict = "inconclusive"
        judgement.remark = f"the profile {profile.name} does not ask for {', '.join(beyond)}"


async def _converse(asker: Asker, case: Case, mode: str, label: str, max_tokens: int, attempt: int) -> _Asked:
    """All turns of a case in one mode; the last answer is the one that is judged."""
    request = dict(case.request)
    if "max_tokens" not in request and "max_completion_tokens" not in request:
        request["max_tokens"] = max_tokens
    if attempt:
        request["seed"] = attempt  # of which only chat completions has a field
    stream = mode == "stream"
    exchanges: list[Exchange] = []
    for turn in range(len(case.then) + 1):
        if case.cancel is not None and turn == len(case.then):
            for _ in range(case.cancel.times):
                request, _, _ = await _ask(asker, case, request, True, case.cancel.after_events)
        request, sent, answer = await _ask(asker, case, request, stream)
        exchange = Exchange(
            label=f"{label}, turn {turn + 1}" if case.then else label,
            request=sent,
            status=answer.status,
            response=answer.raw,
            calls=answer.calls,
            text=answer.text,
            finish=answer.finish,
        )
        exchanges.append(exchange)
        reference = case.reference[turn] if turn < len(case.reference) else None
        if turn == len(case.then):
            rewritten = asker.api == "messages" and not stream
            judgement = judge(case.expect, request, answer, reference, rewritten=rewritten)
            exchange.differences = list(judgement.differences)
            break
        following = case.then[turn]
        judgement = judge({"answers": True}, request, answer, reference)
        if judgement.verdict == "pass" and len(answer.calls) != len(following.results):
            came = ", ".join(call.name for call in answer.calls) or "none"
            remark = f"the model was to make {len(following.results)} calls, it made {len(answer.calls)}: {came}"
            judgement = Judgement("inconclusive", remark)
        if judgement.verdict != "pass":
            exchange.differences = list(judgement.differences)
            prefix = f"turn {turn + 1}: "
            judgement = Judgement(judgement.verdict, prefix + "; ".join(judgement.reasons))
            break
        request = follow_up(request, answer, following.results, following.user, following.request)
    return _Asked(judgement, exchanges, request, answer)


async def _ask(
    asker: Asker, case: Case, request: dict[str, Any], stream: bool, cancel_after: int | None = None
) -> tuple[dict[str, Any], Mapping[str, Any] | str, Answer]:
    """Ask once, or again without a field that the model does not have; returns the request, its body and the answer."""
    overrides: Mapping[str, Any] = case.overrides.get(asker.api, {})
    while True:
        sent: Mapping[str, Any] | str
        sent = case.body if case.body is not None else body(asker.api, request, asker.model, stream, overrides)
        answer = await asker.ask(sent, stream, cancel_after=cancel_after)
        without = None if "refused" in case.expect else _without(request, overrides, answer)
        if without is None:
            return request, sent, answer
        request, overrides = without


def _without(
    request: dict[str, Any], overrides: Mapping[str, Any], answer: Answer
) -> tuple[dict[str, Any], Mapping[str, Any]] | None:
    """What is asked of a model that refuses a field, as OpenAI's do; None where none is refused.

    Newer ones have `max_completion_tokens` in the place of `max_tokens`, and no `temperature`; those that do not reason
    have no `reasoning`, nor have organizations that may not see it.
    """
    if not 400 <= answer.status < 500 or answer.status in BUSY:
        return None
    error = (answer.error or "").lower()
    if "max_tokens" in request and "max_completion_tokens" in error:
        changed = {"max_tokens": None, "max_completion_tokens": request["max_tokens"]}
        return laid_over(request, changed), overrides
    if "temperature" in request and "temperature" in error:
        return laid_over(request, {"temperature": None}), overrides
    if "reasoning" in overrides and ("reasoning" in error or "summary" in error):
        return request, laid_over(overrides, {"reasoning": None})
    return None


def _remark(verdict: str, judged: Sequence[tuple[str, Judgement]]) -> str:
    """The reasons for a verdict, each once, with the modes and copies that it holds for."""
    reasons: dict[str, list[str]] = {}
    for label, judgement in judged:
        if judgement.verdict == verdict:
            shown = judgement.reasons[:4]
            if len(judgement.reasons) > 4:
                shown.append(f"{len(judgement.reasons) - 4} more")
            if shown:
                reasons.setdefault("; ".join(shown), []).append(label)
    return "; ".join(f"{_labels(labels)}: {reason}" for reason, labels in reasons.items())


def _labels(labels: Sequence[str]) -> str:
    return ", ".join(labels) if len(labels) <= 4 else f"{', '.join(labels[:3])} and {len(labels) - 3} more"
