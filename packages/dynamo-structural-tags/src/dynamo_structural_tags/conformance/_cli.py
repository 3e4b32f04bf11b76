# SPDX-License-Identifier: Apache-2.0
"""The command `tool-conformance`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..version import __version__
from ._case import APIS, NEEDS, Case, CaseError, Profile, load_cases, load_profile
from ._results import Run, read_run
from ._runner import run

__all__ = ["main"]

_KEY_VARIABLE = "TOOL_CONFORMANCE_API_KEY"
#: What answers every case where the suite cannot run: nobody, another URL, a refused key, an unknown model or path.
_NOT_OURS = frozenset({0, 301, 302, 303, 307, 308, 401, 403, 404})
_EXTRA = {"httpx": "httpx", "yaml": "pyyaml", "rich": "rich"}
_EPILOG = f"""\
verdicts: pass, fail, inconclusive (the model did not call, or was cut); inconclusive is asked again, never a pass.
exit status: 0 no case failed and every required one passed; 1 a case failed; 3 none failed, but a required one is
inconclusive; 2 it could not run; 130 interrupted, by Ctrl-C or SIGTERM.
The key may stand in ${_KEY_VARIABLE}, where no list of processes shows it."""


class _UsageError(Exception):
    """The command cannot run: its text goes to stderr, the exit status is 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    try:
        status = _main(_parser().parse_args(argv))
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        message = f'needs {_EXTRA[error.name]}: pip install "dynamo-structural-tags[conformance]"'
    except BrokenPipeError:  # who reads stdout has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at its own flush
        return 128 + signal.SIGPIPE
    except (_UsageError, CaseError, OSError) as error:
        message = str(error)
    except KeyboardInterrupt:
        return 130
    print(f"tool-conformance: {message}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tool-conformance",
        description="Does an endpoint hand an agent the tool calls that its model made? Asks it every case and judges.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tool-conformance {__version__}")
    parser.add_argument("--base-url", metavar="URL", help="where the API is, with or without /v1 at the end")
    parser.add_argument("--model", metavar="M", help="the model's name there")
    parser.add_argument("--api-key", metavar="K", help=f"default: ${_KEY_VARIABLE}")
    parser.add_argument("--api", choices=APIS, default="chat", help="default: chat")
    parser.add_argument(
        "--profile",
        metavar="NAME|FILE",
        default="agent",
        help="what the model must be able to do: forced, agent (default), reasoning, or a file",
    )
    parser.add_argument("--cases", metavar="DIR", help="the case files of this folder instead of those shipped")
    parser.add_argument(
        "--only", metavar="PATTERN", nargs="+", action="extend", help="only cases with such an id: 'literals/*'"
    )
    parser.add_argument("--list", action="store_true", help="print the cases, and ask nothing")
    parser.add_argument("--json", metavar="F", help="write the results, for --compare and other programs")
    parser.add_argument("--junit", metavar="F", help="write them as JUnit XML")
    parser.add_argument("--html", metavar="F", help="write them as one page that needs nothing else")
    parser.add_argument("--concurrency", metavar="N", type=_count, default=4, help="cases at once; default: 4")
    parser.add_argument(
        "--attempts", metavar="N", type=_count, default=3, help="how often an inconclusive case is asked; default: 3"
    )
    parser.add_argument(
        "--timeout-s", metavar="S", type=_seconds, default=120.0, help="seconds an answer may take; default: 120"
    )
    parser.add_argument(
        "--compare", metavar=("A.json", "B.json"), nargs=2, help="what changed from A to B; 1 if anything got worse"
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to 1000")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time in seconds above 0")
    return seconds


def _main(arguments: argparse.Namespace) -> int:
    if arguments.compare:
        return _compare(*arguments.compare)
    cases = load_cases(arguments.cases)
    profile = load_profile(arguments.profile)
    _known(profile, cases, arguments)
    selected = _selected(cases, arguments.only)
    if arguments.list:
        return _list(selected, profile)
    for flag in ("base_url", "model"):
        if not getattr(arguments, flag):
            raise _UsageError(f"--{flag.replace('_', '-')} is missing; --help shows all flags")
    if not any(arguments.api in case.apis for case in selected):
        raise _UsageError(f"none of the {len(selected)} cases is asked of {arguments.api}")
    for name in (arguments.json, arguments.junit, arguments.html):
        if name is not None:
            _writable(name)
    return _ask(arguments, selected, profile)


def _writable(name: str) -> None:
    """Say before a run, not after it, that its report cannot be written."""
    path = Path(name)
    if path.is_dir():
        why = "it is a folder"
    elif not path.absolute().parent.is_dir():
        why = "no such folder"
    elif not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        why = "no permission"
    else:
        return
    raise _UsageError(f"cannot write {name!r}: {why}")


def _selected(cases: Sequence[Case], patterns: Sequence[str] | None) -> tuple[Case, ...]:
    if not patterns:
        return tuple(cases)
    for pattern in patterns:
        if not any(fnmatchcase(case.id, pattern) for case in cases):
            raise _UsageError(f"--only {pattern!r}: no case has such an id; --list shows them")
    return tuple(case for case in cases if any(fnmatchcase(case.id, pattern) for pattern in patterns))


def _known(profile: Profile, cases: Sequence[Case], arguments: argparse.Namespace) -> None:
    """A profile of one's own names cases that there are; one that is shipped may meet cases of one's own."""
    if arguments.cases is not None and arguments.profile == profile.name:
        return
    unknown = sorted((profile.also | set(profile.excluded)) - {case.id for case in cases})
    if unknown:
        raise _UsageError(f"the profile {arguments.profile!r} names {unknown[0]!r}: no case has that id")


def _list(cases: Sequence[Case], profile: Profile) -> int:
    width = max(len(case.id) for case in cases)
    for case in cases:
        needs = ",".join(need for need in NEEDS if need in case.needs) or "-"
        print(f"{case.id:{width}}  {'required' if profile.requires(case) else '':8}  {needs:16}  {case.fault}")
    required = sum(profile.requires(case) for case in cases)
    print(f"{len(cases)} cases, {required} of them required by the profile {profile.name}")
    return 0


def _compare(before: str, after: str) -> int:
    from ._compare import compare
    from ._table import console

    try:
        comparison = compare(read_run(before), read_run(after))
    except (OSError, ValueError) as error:
        raise _UsageError(str(error)) from None
    comparison.render(console())
    return 1 if comparison.worse else 0


def _ask(arguments: argparse.Namespace, cases: Sequence[Case], profile: Profile) -> int:
    from ._endpoint import Endpoint
    from ._html import html
    from ._junit import junit
    from ._table import Progress, console, table

    key = arguments.api_key or os.environ.get(_KEY_VARIABLE) or None
    screen = console()

    async def ask() -> Run:
        try:
            endpoint = Endpoint(
                arguments.base_url,
                arguments.model,
                api=arguments.api,
                api_key=key,
                timeout_s=arguments.timeout_s,
            )
        except ValueError as error:
            raise _UsageError(str(error)) from None
        async with endpoint:
            problem = await endpoint.check()
            if problem is not None:
                raise _UsageError(problem)
            asked = sum(arguments.api in case.apis for case in cases)
            with Progress(asked, screen) as progress, _Interrupt() as stop:
                return await run(
                    endpoint,
                    cases,
                    profile,
                    attempts=arguments.attempts,
                    concurrency=arguments.concurrency,
                    progress=progress,
                    stop=stop,
                )

    found = asyncio.run(ask())
    statuses = {exchange.status for result in found.results for exchange in result.exchanges}
    if len(statuses) == 1 and statuses <= _NOT_OURS and all(result.verdict != "pass" for result in found.results):
        raise _UsageError(f"no case could be asked: {found.results[0].remark}")
    writers: tuple[tuple[str | None, Callable[[Run], str]], ...] = (
        (arguments.json, Run.text),
        (arguments.junit, junit),
        (arguments.html, html),
    )
    failed = [problem for name, writer in writers if name is not None and (problem := _write(name, writer(found)))]
    table(found, screen)
    if found.interrupted:
        print(f"tool-conformance: interrupted after {len(found.results)} cases", file=sys.stderr)
    if failed:
        raise _UsageError("; ".join(failed))
    return found.exit_code


def _write(name: str, text: str) -> str:
    """Write a report, whole or not at all; return why it could not be written."""
    path = Path(name)
    try:
        with path.open("wb") as file:
            try:
                file.write(text.encode())
                file.flush()
            except BaseException:  # the disk is full, or Ctrl-C: half a report misleads
                if path.is_file():
                    path.unlink()
                raise
    except OSError as error:
        return f"cannot write {name!r}: {error.strerror}"
    return ""


class _Interrupt:
    """An event that the first Ctrl-C sets, or SIGTERM; after it both do what they did before."""

    def __enter__(self) -> asyncio.Event:
        event, loop = asyncio.Event(), asyncio.get_running_loop()

        def interrupt(*_: Any) -> None:
            self.__exit__()
            loop.call_soon_threadsafe(event.set)

        self._before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        return event

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
