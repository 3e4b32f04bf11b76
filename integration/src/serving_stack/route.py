# SPDX-License-Identifier: Apache-2.0
"""`serving-stack route explain`: why a request went where it went, as the router's replicas remember it."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from .errors import StackError
from .state import Run, RunState

#: The terms of a candidate as they are printed: heading, key. Seconds are printed as milliseconds.
_TIMES = (
    *(("cost", "cost_s"), ("wait", "wait_s"), ("fetch", "fetch_s"), ("work", "work_s"), ("first", "first_token_s")),
    *(("token", "token_s"), ("others", "others_s"), ("risk", "risk_s")),
)
_TIERS = ("host", "disk", "store")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    text = "print every candidate of a request, what each would have cost, and what was measured"
    explain = actions.add_parser("explain", help=text, description=text[0].upper() + text[1:] + ".")
    what = "the id of its answer (chatcmpl-..., cmpl-...), or the UUID that was sent with it as x-dynamo-request-id"
    explain.add_argument("request", metavar="REQUEST", help=what)
    explain.add_argument("--json", action="store_true", help="print what the replicas answered")
    explain.add_argument(
        "--router",
        metavar="URL",
        action="append",
        help="a replica's system port, http://HOST:PORT; again for each (default: those of the running stack)",
    )


def run(args: argparse.Namespace) -> int:
    """Ask every replica and print what those say that carried the request."""
    place = Run()
    state = place.read()
    running = state if state is not None and place.members(state) else None
    routers = _given(args.router) if args.router else _running(running)
    found, silent = _ask(routers, args.request)
    if not found:
        asked = ", ".join(routers)
        if len(silent) == len(routers):
            raise StackError(f"no router answers: {'; '.join(silent)}")
        away = f"; no answer from {'; '.join(silent)}" if silent else ""
        raise StackError(f"request {args.request!r}: no replica carried it, or not lately ({asked}){away}")
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    names = {} if running is None else _names(running)
    for one in found:
        print("\n".join(_page(one, names)))
    return 0


def http_url(text: str) -> str:
    """Return the address of a server without a slash at its end; ValueError for what is none."""
    try:
        url, parts = httpx.URL(text), urlsplit(text)
        fine = url.scheme in ("http", "https") and url.host and parts.port != 0 and not any(map(str.isspace, text))
    except (httpx.InvalidURL, ValueError):
        fine = False
    if not fine:
        raise ValueError("http://HOST:PORT is wanted")
    return text.rstrip("/")


def _given(urls: list[str]) -> dict[str, None]:
    found: dict[str, None] = {}
    for url in urls:
        try:
            found[http_url(url)] = None
        except ValueError as error:
            raise StackError(f"--router {url}: {error}") from error
    return found


def _running(state: RunState | None) -> dict[str, None]:
    if state is None:
        raise StackError("no stack is running and no --router is given")
    ports = [
        one.ports["system_port"]
        for one in state.components.values()
        if one.worker == "router" and "system_port" in one.ports
    ]
    if not ports:
        raise StackError(f"the running stack (profile {state.profile}) has no router")
    return dict.fromkeys(f"http://127.0.0.1:{port}" for port in ports)


def _names(state: RunState) -> dict[int, str]:
    """Return the components' names by instance id."""
    return {int(one.instance): name for name, one in state.components.items() if one.instance}


def _ask(routers: Mapping[str, None], request: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what those replicas say that know the request, and who did not answer, with the reason."""
    found, silent = [], []
    with httpx.Client(timeout=5.0, trust_env=False) as http:
        for url in routers:
            try:
                answer = http.post(f"{url}/engine/route/explain", json={"request": request})
                said = answer.json()
                if "error" in said and answer.is_success:
                    raise StackError(f"{url}: {said['error']}")
                if said["request"] is not None:
                    found.append({"router": url, **said})
            except httpx.HTTPError as error:
                silent.append(f"{url} ({str(error) or repr(error)})")
            except (ValueError, LookupError, TypeError):
                silent.append(f"{url} (does not answer as a router: status {answer.status_code})")
    return found, silent


def _page(answer: dict[str, Any], names: Mapping[int, str]) -> Iterator[str]:
    """Yield the lines for one replica's answer."""
    request = answer["request"]
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(request["at"]))
    session = "no session" if request["session"] is None else f"session {request['session']!r}"
    yield f"request {request['request']}: {request['tokens']} tokens, {session}, {at}"
    ended = "still running" if request["ended"] is None else f"{request['ended']} after {request['ended_s']:.3f} s"
    yield f"carried by replica {answer['replica']:x} at {answer['router']}: {ended}"
    for leg in request["legs"]:
        yield ""
        yield from _leg(leg, names)


def _leg(leg: dict[str, Any], names: Mapping[int, str]) -> Iterator[str]:
    """Yield the lines for one decision."""
    note = f" ({leg['note']})" if leg["note"] else ""
    yield f"{leg['role']}: {_worker(leg, names)}, rank {leg['rank']}, {leg['after_s']:.3f} s after the first{note}"
    rows = [("", "worker", "rank", *(name for name, _ in _TIMES), "device", *_TIERS)]
    for one in leg["candidates"]:
        chosen = "*" if (one["worker"], one["rank"]) == (leg["worker"], leg["rank"]) else ""
        row = (chosen, _worker(one, names), str(one["rank"]))
        terms = one["terms"]
        if terms is None:
            rows.append((*row, one["refused"]))
            continue
        fetched = (str(terms["fetch_tokens"].get(tier, 0)) for tier in _TIERS)
        rows.append((*row, *(_ms(terms[key]) for _, key in _TIMES), str(terms["device_tokens"]), *fetched))
    yield "  times in ms; tokens of the prompt on the device, and those to fetch, by tier"
    yield from _aligned(rows)
    expected = f"first token expected after {_ms(leg['terms']['first_token_s'])} ms"
    if leg["first_token_s"] is None:
        yield f"  {expected}, none measured"
    else:
        late = 1000 * (leg["first_token_s"] - leg["terms"]["first_token_s"])
        next_best = (
            "there was no other" if leg["runner_up_s"] is None else f"the next best was {_ms(leg['runner_up_s'])}"
        )
        yield f"  {expected}, measured {_ms(leg['first_token_s'])} ({late:+.1f})"
        yield f"  cost {_ms(leg['terms']['cost_s'])}, {next_best}; regret {_ms(leg['regret_s'])}"
    for what in ("failed", "aborted"):
        if leg[what] is not None:
            yield f"  {what}: {leg[what]}"


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Yield rows as columns; one that is shorter ends with a text of any length."""
    width = len(rows[0])
    sizes = [max(len(row[i]) for row in rows if len(row) == width or i < 3) for i in range(width)]
    for row in rows:
        left = (text.ljust(size) for text, size in zip(row[:2], sizes[:2], strict=True))
        cells = [*left, *(text.rjust(size) for text, size in zip(row[2:], sizes[2:], strict=False))]
        if len(row) < width:
            cells[-1] = f"passed over: {row[-1]}"
        yield f"  {' '.join(cells)}".rstrip()


def _worker(one: dict[str, Any], names: Mapping[int, str]) -> str:
    """Return a worker's component where that is known, and its instance as `serving-stack status` shows it."""
    worker = one["worker"]
    shown = f"{worker:x}" if isinstance(worker, int) else str(worker)
    return f"{names[worker]} {shown}" if worker in names else shown


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"
