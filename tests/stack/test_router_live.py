# SPDX-License-Identifier: Apache-2.0
"""The router between Dynamo's real frontend and its mock engines: three models, each with a router of its own.

`tiny` has two prefill and two decode workers, `whole` one worker with two ranks that does both, and `zoned` a prefill
and a decode worker in each of two zones, between which Dynamo forbids that KV moves.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from dynamo_kv_router_ext import TierCost, load_profile
from support.dynamo import environment
from support.live_fleet import MODEL, Launch, LiveFleet, live_model, mocker
from support.stack import until

#: Seconds in which anything here should have happened; nothing is measured.
SOON_S = 30.0


@dataclasses.dataclass
class Got:
    """An answer, plain or put together from a stream."""

    status: int
    id: str = ""
    tokens: int = 0
    cached: int = 0
    #: What the router says of it: the workers' ids.
    prefill: int | None = None
    decode: int | None = None


def read(chunks: list[dict[str, Any]], status: int = 200) -> Got:
    got = Got(status)
    for chunk in chunks:
        got.id = chunk["id"]
        if usage := chunk.get("usage"):
            got.tokens = usage["completion_tokens"]
            got.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        told = ((chunk.get("nvext") or {}).get("engine_data") or {}).get("router")
        if told is not None:
            got.prefill, got.decode = told["prefill_worker"], told["decode_worker"]
    return got


def ask(
    fleet: LiveFleet,
    prompt: Any = "Hello",
    *,
    model: str = MODEL,
    tokens: int = 8,
    stream: bool = False,
    chat: bool = False,
    session: str | None = None,
    seen: Callable[[], object] | None = None,
    **more: Any,
) -> Got:
    """Ask a frontend; `seen` is called when the first chunk of a stream is there."""
    body = {"model": model, "max_tokens": tokens, "ignore_eos": True, "stream": stream, **more}
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body["nvext"] = {"extra_fields": ["engine_data"]}
    if stream:
        body["stream_options"] = {"include_usage": True}
    url = f"{fleet.urls[0]}/v1/{'chat/completions' if chat else 'completions'}"
    headers = {} if session is None else {"x-dynamo-session-id": session}
    chunks: list[dict[str, Any]] = []
    with httpx.stream("POST", url, json=body, headers=headers, timeout=SOON_S, trust_env=False) as answer:
        if answer.status_code != 200:
            return Got(answer.status_code)
        if not stream:
            return read([json.loads(answer.read())])
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunks.append(json.loads(line[6:]))
                if seen is not None and len(chunks) == 1:
                    seen()
    assert not any("error" in chunk for chunk in chunks), chunks[-1]
    return read(chunks)


def answers(fleet: LiveFleet, model: str = MODEL) -> bool:
    return ask(fleet, model=model).status == 200


def at_once(fleet: LiveFleet, seed: int, *, model: str = MODEL, sessions: bool = False) -> list[Got]:
    """Ask 8 times at the same time, with long enough prompts and answers that no worker is to have them all."""
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(
                ask,
                fleet,
                words(2000, seed + number),
                model=model,
                tokens=160,
                session=f"{seed + number}" if sessions else None,
            )
            for number in range(8)
        ]
        return [one.result() for one in asked]


def words(count: int, seed: int) -> list[int]:
    """Return a prompt of so many tokens; each seed has its own."""
    draw = random.Random(seed)
    return [draw.randrange(10, 1900) for _ in range(count)]


def of_role(fleet: LiveFleet, role: str, model: str = MODEL) -> dict[int, str | None]:
    """Return the workers of a role, as the router has them, with their transfer groups."""
    return {one["id"]: one["group"] for one in fleet.state(model=model)["workers"] if one["role"] == role}


def legs(fleet: LiveFleet, got: Got, model: str = MODEL) -> list[dict[str, Any]]:
    """Return what the router keeps of its decisions on an answer, in order."""
    told = fleet.route(fleet.router_urls[model][0], "explain", {"request": got.id})
    found: list[dict[str, Any]] = told["request"]["legs"]
    return found


def end(fleet: LiveFleet, name: str) -> int:
    """End a process as an operator does, and return its exit status."""
    process = fleet.process(name)
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(SOON_S)
    finally:
        process.stop()


def decoder(model: Path, *more: str) -> Launch:
    """Return a decode worker of few slots: a few requests are enough to make it wait."""
    return mocker(model, "decode", more=["--max-num-seqs", "2", *more])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return live_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    home = tmp_path_factory.mktemp("live")
    workers = [mocker(model, "prefill"), mocker(model, "prefill"), decoder(model), decoder(model)]
    workers.append(mocker(model, name="whole", more=["--data-parallel-size", "2"]))
    for zone in ("a", "b"):
        (home / zone).mkdir()
        (home / zone / "zone").write_text(zone, "utf-8")
        env = {
            "DYN_TOPOLOGY_ENABLED": "1",
            "DYN_TOPOLOGY_MOUNT_PATH": str(home / zone),
            "DYN_KV_TRANSFER_DOMAIN": "zone",
        }
        workers.append(dataclasses.replace(mocker(model, "prefill", name="zoned"), env=env))
        workers.append(dataclasses.replace(mocker(model, "decode", name="zoned"), env=env))
    # KV takes longer to move than a busy machine makes two equal decoders differ: else no session had to stay.
    profile = msgspec.structs.replace(load_profile("mocker"), name="slow-links", transfer=TierCost(0.01, 1e-4))
    (home / "profile.json").write_bytes(msgspec.json.encode(profile))
    # A new worker counts as a risk at first: else sparse traffic would all go to the one that has answered.
    options = ["--profile", str(home / "profile.json"), "--health", '{"prior_failures": 0}']
    with LiveFleet(home / "fleet", "ours", workers, router_options=options) as one:
        yield one


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_a_split_fleet_answers_through_the_router(fleet: LiveFleet, stream: bool, chat: bool) -> None:
    got = ask(fleet, stream=stream, chat=chat)
    assert (got.status, got.tokens) == (200, 8)
    assert got.prefill in of_role(fleet, "prefill")
    assert got.decode in of_role(fleet, "decode")


def test_a_worker_that_does_both_answers_from_each_rank(fleet: LiveFleet) -> None:
    got = ask(fleet, model="whole", stream=True)
    assert (got.status, got.tokens, got.prefill) == (200, 8, None)
    assert got.decode in of_role(fleet, "both", "whole")
    ranks = set()
    for got in at_once(fleet, 800, model="whole"):
        assert (got.status, got.tokens) == (200, 160)
        ranks |= {leg["rank"] for leg in legs(fleet, got, "whole")}
    assert ranks == {0, 1}


def test_each_model_has_its_own_router(fleet: LiveFleet) -> None:
    assert fleet.listed() == {MODEL, "whole", "zoned"}
    replicas = {fleet.state(model=name)["replica"] for name in fleet.models}
    assert len(replicas) == 3
    assert ask(fleet, model="nobody").status == 404


def test_a_session_stays_at_its_decoder(fleet: LiveFleet) -> None:
    first = {number: got.decode for number, got in enumerate(at_once(fleet, 77, sessions=True))}
    assert set(first.values()) == set(of_role(fleet, "decode"))
    for number, decode in reversed(first.items()):
        prompt = words(2000, 77 + number) + words(100, number)
        assert ask(fleet, prompt, session=f"{77 + number}").decode == decode


def test_a_prefix_that_returns_goes_where_it_lies(fleet: LiveFleet) -> None:
    prompt = words(4000, 1)
    first = ask(fleet, prompt, tokens=1)

    def cached(got: Got) -> int:
        (leg, _) = legs(fleet, got)
        return int(leg["terms"]["device_tokens"])

    # The worker's event may come a moment after its answer.
    until(lambda: cached(ask(fleet, prompt, tokens=1)) >= 3900, SOON_S, "a prompt that was read before is cached")
    for turn in range(3):
        again = ask(fleet, prompt + words(100 * turn, 300 + turn), tokens=1)
        assert cached(again) >= 3900
        assert again.prefill == first.prefill


def test_what_may_not_exchange_kv_is_never_paired(fleet: LiveFleet) -> None:
    prefill, decode = (of_role(fleet, role, "zoned") for role in ("prefill", "decode"))
    assert sorted(map(str, prefill.values())) == sorted(map(str, decode.values())) == ["zone=a", "zone=b"]
    used = set()
    for got in at_once(fleet, 500, model="zoned", sessions=True):
        assert got.prefill is not None
        assert got.decode is not None
        assert prefill[got.prefill] == decode[got.decode]
        used.add(decode[got.decode])
    assert used == {"zone=a", "zone=b"}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_bad_request_is_the_clients_fault(fleet: LiveFleet, stream: bool) -> None:
    assert ask(fleet, tokens=0, stream=stream).status == 400
    assert ask(fleet).status == 200


def test_a_decision_can_be_explained(fleet: LiveFleet) -> None:
    got = ask(fleet, stream=True, session="explained")
    assert [(leg["role"], leg["worker"]) for leg in legs(fleet, got)] == [
        ("prefill", got.prefill),
        ("decode", got.decode),
    ]
    url = fleet.router_urls[MODEL][0]
    assert fleet.route(url, "explain", {"request": "cmpl-nobody"})["request"] is None
    assert "dynamo_router_ext_decisions_total" in httpx.get(f"{url}/metrics", trust_env=False).text


def test_workers_come_and_go(fleet: LiveFleet, model: Path) -> None:
    before = of_role(fleet, "decode")
    name = fleet.add(decoder(model, "--num-workers", "2"))  # two workers of one process
    until(lambda: len(of_role(fleet, "decode")) == len(before) + 2, SOON_S, "both new workers are known")
    new = set(of_role(fleet, "decode")) - set(before)
    asked: set[int | None] = set()

    def all_new() -> bool:
        asked.update(got.decode for got in at_once(fleet, 600 + 8 * len(asked)))
        return new <= asked

    until(all_new, SOON_S, "both new workers have been asked")
    assert end(fleet, name) == 0
    until(lambda: of_role(fleet, "decode") == before, SOON_S, "they are known to have left")
    assert ask(fleet).decode in before


def test_a_worker_with_other_blocks_is_refused_and_said_once(fleet: LiveFleet, model: Path) -> None:
    before = of_role(fleet, "decode")
    name = fleet.add(decoder(model, "--block-size", "16"))
    said = "is not used: its kv_cache_block_size is 16, the fleet's 64"
    until(lambda: said in fleet.log("router-0"), SOON_S, "the worker is refused")
    time.sleep(0.6)  # two more looks at who lives
    assert fleet.log("router-0").count(said) == 1
    assert of_role(fleet, "decode") == before
    assert {got.decode for got in at_once(fleet, 700)} == set(before)
    end(fleet, name)


def test_a_frontend_that_starts_later_has_every_model(fleet: LiveFleet) -> None:
    fleet.kill("frontend-0")
    fleet.start("frontend-0")
    until(lambda: fleet.listed() == {MODEL, "whole", "zoned"}, SOON_S, "all models are there")
    for name in fleet.models:
        until(functools.partial(answers, fleet, name), SOON_S, f"model {name} answers")


def test_without_workers_there_is_no_service_until_one_comes(fleet: LiveFleet) -> None:
    name = "worker-4"
    assert end(fleet, name) == 0
    until(lambda: not of_role(fleet, "both", "whole"), SOON_S, "the worker has left")
    assert ask(fleet, model="whole").status == 503
    assert ask(fleet, model="whole", stream=True).status == 503
    fleet.start(name)
    until(functools.partial(answers, fleet, "whole"), SOON_S, "a new worker is asked")


def test_a_router_that_is_told_to_end_lets_answers_end(fleet: LiveFleet) -> None:
    router = fleet.process("router-0")
    got = ask(fleet, tokens=200, stream=True, seen=lambda: router.send_signal(signal.SIGTERM))
    assert (got.status, got.tokens) == (200, 200)
    assert router.wait(SOON_S) == 0
    router.stop()
    fleet.start("router-0")
    until(functools.partial(answers, fleet), SOON_S, "the new router answers")


@pytest.mark.parametrize(
    ("variable", "value"),
    [("DYN_DISCOVERY_BACKEND", "nonsense"), ("DYN_REQUEST_PLANE", "nope"), ("DYN_SYSTEM_PORT", "40000")],
)
def test_a_variable_that_dynamo_cannot_use_is_named(tmp_path: Path, variable: str, value: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dynamo_kv_router_ext", "--endpoint", "pool.backend.generate"],
        env={**os.environ, **environment(tmp_path), variable: value},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert value in done.stderr
    assert "Traceback" not in done.stderr
