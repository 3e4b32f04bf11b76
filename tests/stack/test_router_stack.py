# SPDX-License-Identifier: Apache-2.0
"""dynamo-kv-router-ext before real workers and a real store: sessions stay, and what only Mooncake has is fetched.

Two prefill and two decode workers, so that each choice has an alternative. Prompts are those whose greedy answers no
rounding changes, and `test_equality.py` shows that prefill and decode apart answer as one worker does: so an answer
from fetched KV has to equal the first one, from computed KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import yaml

from serving_stack.model import prompt_tokens
from serving_stack.profile import load
from serving_stack.state import free_ports
from support.stack import Stack, until

pytestmark = pytest.mark.engines

PREFILL, DECODE = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
#: What vLLM logs when it has emptied its cache.
RESET = "Successfully reset prefix cache"


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory, running: list[Stack]) -> Iterator[Stack]:
    """The router's profile with two workers of each kind; the stack of the tests before is ended first.

    The router takes KV to move slowly from one worker to another, as it would far apart. So that a session has a reason
    to stay which does not depend on how busy this machine is.
    """
    for other in running:
        other.command("down")
    folder = tmp_path_factory.mktemp("routed")
    costs = {**load("cpu-router").files["router.json"], "transfer": {"latency_s": 0.03, "token_s": 0.001}}
    (folder / "far.yaml").write_text(yaml.safe_dump({"extends": "cpu-router", "files": {"router.json": costs}}))
    one = Stack(folder, free_ports(1, above=21000)[0], str(folder / "far.yaml"))
    try:
        one.up("--prefill", "2", "--decode", "2")
        yield one
    finally:
        one.command("down", check=False)


def _body(routed: Stack, tokens: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": routed.model,
        "prompt": tokens,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "nvext": {"extra_fields": ["completion_token_ids", "engine_data"]},
    }


def _headers(session: str | None) -> dict[str, str]:
    return {} if session is None else {"x-dynamo-session-id": session}


class Answer:
    """An answer, which workers it came from, and how the router chose them."""

    def __init__(self, routed: Stack, tokens: list[int], *, max_tokens: int = 24, session: str | None = None) -> None:
        answer = routed.post("/completions", _body(routed, tokens, max_tokens), headers=_headers(session))
        assert answer.status_code == 200, answer.text
        told = answer.json()
        self.id: str = told["id"]
        self.tokens: list[int] = told["nvext"]["completion_token_ids"]
        names = {one.instance: name for name, one in routed.state.components.items() if one.instance}
        workers = told["nvext"]["engine_data"]["router"]
        self.prefill, self.decode = (names[str(workers[f"{role}_worker"])] for role in ("prefill", "decode"))
        explained = _engine_route(routed, "router", "route/explain", {"request": self.id})
        legs = {leg["role"]: leg for leg in explained["request"]["legs"]}
        #: role -> worker's name -> its terms, of all that were asked.
        self.terms: dict[str, dict[str, dict[str, Any]]] = {
            role: {names[str(one["worker"])]: one["terms"] for one in leg["candidates"]} for role, leg in legs.items()
        }


def _engine_route(routed: Stack, component: str, route: str, body: dict[str, Any]) -> dict[str, Any]:
    port = routed.state.components[component].ports["system_port"]
    answer = httpx.post(f"http://127.0.0.1:{port}/engine/{route}", json=body, timeout=10, trust_env=False)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_a_session_returns_to_its_decoder(routed: Stack) -> None:
    history = prompt_tokens(1002)
    first = Answer(routed, history, max_tokens=8, session="s")
    (other,) = set(DECODE) - {first.decode}
    history += [*first.tokens, *prompt_tokens(40)]
    # Both are idle.
    second = Answer(routed, history, max_tokens=8, session="s")
    assert second.decode == first.decode
    terms = second.terms["decode"]
    assert terms[first.decode]["device_tokens"] >= 1002 // 32 * 32
    assert terms[other]["device_tokens"] == 0
    assert terms[first.decode]["work_s"] < terms[other]["work_s"]  # it pulls only what is new
    # Its own has something to do, the other one has not.
    history += [*second.tokens, *prompt_tokens(41)]
    url = f"{routed.state.base_url}/completions"
    body = {**_body(routed, history, 2000), "stream": True}
    with httpx.stream("POST", url, json=body, headers=_headers("s"), timeout=60, trust_env=False) as beside:
        lines = beside.iter_lines()
        next(lines)
        third = Answer(routed, history, max_tokens=8, session="s")
    terms = third.terms["decode"]
    assert terms[first.decode]["others_s"] > terms[other]["others_s"] == 0
    assert third.decode == first.decode


def test_a_prefix_that_only_the_store_has_is_fetched(routed: Stack) -> None:
    prompt = prompt_tokens(1000)
    keys = routed.store("master_key_count")
    cold = Answer(routed, prompt)
    assert cold.terms["prefill"][cold.prefill]["fetch_tokens"] == {}
    until(lambda: routed.store("master_key_count") >= keys + 1000 // 32, 20, "the prompt is in the store")
    _forget(routed)
    before = {worker: routed.sources(worker) for worker in PREFILL}
    fetched = Answer(routed, prompt)
    for terms in fetched.terms["prefill"].values():
        assert (terms["device_tokens"], terms["fetch_tokens"]) == (0, {"store": 992})
    # Both would fetch it, for that is faster than to read it again.
    chosen, computed = fetched.terms["prefill"][fetched.prefill], cold.terms["prefill"][cold.prefill]
    assert chosen["fetch_s"] > 0
    assert max(chosen["wait_s"], chosen["fetch_s"]) + chosen["work_s"] < computed["work_s"]
    gained = routed.gained(fetched.prefill, before[fetched.prefill], len(prompt))
    assert gained == {"local_compute": 8, "local_cache_hit": 0, "external_kv_transfer": 992}
    assert fetched.tokens == cold.tokens
    said = routed.command("route", "explain", fetched.id).stdout
    assert fetched.prefill in said
    assert "992" in said


def _forget(routed: Stack) -> None:
    """Empty the caches of all four engines, not the store, and wait until the router knows."""
    for worker in (*PREFILL, *DECODE):
        _flush(routed, worker)
    before = {worker: sum(routed.sources(worker).values()) for worker in PREFILL}

    def stepped() -> bool:
        """An engine sends events with its steps. Prompts of less than a block leave nothing in a cache."""
        with ThreadPoolExecutor(4) as pool:  # together, so that they are not all for the faster worker
            list(pool.map(lambda length: Answer(routed, prompt_tokens(length), max_tokens=1), range(20, 24)))
        return all(sum(routed.sources(worker).values()) > before[worker] for worker in PREFILL)

    until(stepped, 30, "each prefill worker has made a step")


def _flush(routed: Stack, worker: str) -> None:
    """Empty an engine's cache; it refuses while a block is in use, to be pulled or saved."""
    log = routed.run.logs / f"{worker}.log"
    seen = log.read_text().count(RESET)

    def done() -> bool:
        _engine_route(routed, worker, "flush_cache", {})
        return log.read_text().count(RESET) > seen

    until(done, 30, f"{worker} has emptied its cache")
