# SPDX-License-Identifier: Apache-2.0
"""The router's command line, and what it makes of a worker's card; no Dynamo is needed."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dynamo_kv_router_ext import HealthSettings, Settings, UnsupportedUpstreamError, Worker, _service
from dynamo_kv_router_ext._pool import Card, read_card
from dynamo_kv_router_ext._service import main, read_options

GOOD = ["--endpoint", "pool.prefill.generate", "--endpoint", "dyn://pool.backend.generate"]


def test_the_least_that_has_to_be_said() -> None:
    options = read_options(GOOD)
    assert options.endpoints == ("pool.prefill.generate", "pool.backend.generate")
    assert options.serve == "routed.router"
    assert (options.profile.name, options.attempts, options.store_fresh_s) == ("mocker", 3, None)
    assert (options.settings, options.health) == (Settings(), HealthSettings())


def test_everything_can_be_said(tmp_path: Path) -> None:
    profile = tmp_path / "mine.json"
    told = json.loads((Path(_service.__file__).parent / "profiles" / "mocker.json").read_text("utf-8"))
    profile.write_text(json.dumps({**told, "name": "mine"}), "utf-8")
    flags = {
        "--serve": "front.router-2",
        "--profile": str(profile),
        "--settings": '{"others_weight": 0.5}',
        "--health": '{"failures_in_row": 5}',
        "--attempts": "7",
        "--store-fresh-s": "600",
    }
    options = read_options([*GOOD, *(word for pair in flags.items() for word in pair)])
    assert dataclasses.replace(options, profile=None) == dataclasses.replace(  # type: ignore[arg-type]
        read_options(GOOD),
        profile=None,  # type: ignore[arg-type]
        serve="front.router-2",
        settings=Settings(others_weight=0.5),
        health=HealthSettings(failures_in_row=5),
        attempts=7,
        store_fresh_s=600.0,
    )
    assert options.profile.name == "mine"


WRONG = {
    "no endpoint": ([], "--endpoint"),
    "an endpoint of two parts": (["--endpoint", "pool.prefill"], "--endpoint: must be NAMESPACE.COMPONENT.ENDPOINT"),
    "an endpoint with an empty part": (["--endpoint", "pool..generate"], "not 'pool..generate'"),
    "an endpoint twice": (["--endpoint", "pool.prefill.generate"], "--endpoint: pool.prefill.generate is given twice"),
    "a component of three parts": (["--serve", "routed.router.generate"], "--serve: must be NAMESPACE.COMPONENT, not"),
    "the workers' own namespace": (["--serve", "pool.router"], "--serve: pool.router: its namespace"),
    "the namespace that sees all": (["--serve", "dynamo.router"], "--serve: dynamo.router: frontends of namespace"),
    "an unknown profile": (["--profile", "nobody"], "--profile: "),
    "settings that are no JSON": (["--settings", "{others"], "--settings: '{others'"),
    "a setting that nobody knows": (["--settings", '{"speed": 1}'], "--settings: '{\"speed\": 1}': "),
    "a setting that cannot be": (["--settings", '{"token_weight": -1}'], "token_weight must be"),
    "a health setting of a wrong kind": (["--health", '{"window_s": "long"}'], "--health: "),
    "no attempts": (["--attempts", "0"], "--attempts: must be a whole number of at least 1, not '0'"),
    "half an attempt": (["--attempts", "1.5"], "not '1.5'"),
    "a store that forgets at once": (["--store-fresh-s", "0"], "--store-fresh-s: must be a number of seconds above 0"),
    "a store that forgets never": (["--store-fresh-s", "nan"], "not 'nan'"),
    "a flag that nobody knows": (["--speed", "1"], "--speed"),
}


@pytest.mark.parametrize(("flags", "said"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_flag_is_named_with_its_value(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*GOOD, *flags] if flags else [])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_store_needs_its_costs_in_the_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads((Path(_service.__file__).parent / "profiles" / "mocker.json").read_text("utf-8"))
    del told["tiers"]["store"]
    profile = tmp_path / "bare.json"
    profile.write_text(json.dumps({**told, "name": "bare"}), "utf-8")
    with pytest.raises(SystemExit) as ended:
        main([*GOOD, "--profile", str(profile), "--store-fresh-s", "60"])
    assert ended.value.code == 2
    assert "--store-fresh-s: 60: profile bare has no tier store" in capsys.readouterr().err


def test_an_unsupported_dynamo_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise UnsupportedUpstreamError("ai-dynamo 9 is installed")

    monkeypatch.setattr(_service, "check", refuse)
    assert main(GOOD) == 1
    assert capsys.readouterr().err == "ai-dynamo 9 is installed\n"


def card(runtime: dict[str, Any] | None = None, **fields: Any) -> Card:
    told = {"display_name": "m", "kv_cache_block_size": 16, "worker_type": "decode", "model_type": "Chat | Completions"}
    return read_card(json.dumps({**told, "runtime_config": runtime or {}, "unknown": [1], **fields}))


def test_a_card_becomes_a_worker() -> None:
    runtime = {"total_kv_blocks": 100, "max_num_seqs": 8, "max_num_batched_tokens": 512, "data_parallel_size": 2}
    assert card(runtime).worker(7) == Worker(7, "decode", 2, capacity_tokens=1600, max_sequences=8, chunk_tokens=512)
    assert card().worker(7) == Worker(7, "decode")
    assert card(dict.fromkeys(runtime, None) | {"data_parallel_size": 1}).worker(7) == Worker(7, "decode")
    assert card(worker_type="aggregated").worker(7).role == "both"


@pytest.mark.parametrize(
    ("told", "group"),
    [
        ({"kv_transfer_domain": "zone", "kv_transfer_enforcement": "required"}, "zone=a"),
        ({"kv_transfer_domain": "rack", "kv_transfer_enforcement": "required"}, "rack="),
        ({"kv_transfer_domain": "zone"}, "zone=a"),
        ({"kv_transfer_domain": "zone", "kv_transfer_enforcement": "preferred"}, None),
        ({}, None),
    ],
)
def test_transfer_groups_are_what_dynamo_enforces(told: dict[str, Any], group: str | None) -> None:
    assert card({"topology_domains": {"zone": "a"}, **told}).worker(7).transfer_group == group


def test_a_card_says_what_clients_may_be_offered() -> None:
    assert card().surface == ("Chat", "Completions")
    assert card(model_type="Completions | Images").surface == ("Completions",)
    assert card(model_type="").surface == ()


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"worker_type": "encode"}, "worker_type 'encode'"),
        ({"kv_cache_block_size": 0}, "kv_cache_block_size is 0"),
        ({"kv_cache_block_size": "16"}, "kv_cache_block_size"),
        ({"runtime_config": {"total_kv_blocks": "many"}}, "total_kv_blocks"),
        ({"runtime_config": {"data_parallel_size": 0}}, "ranks must be"),
    ],
)
def test_a_card_that_cannot_be_is_named(told: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        card(**told).worker(7)


def test_the_package_does_not_load_its_service_or_dynamo() -> None:
    code = (
        "import sys, dynamo_kv_router_ext as p; print([m for m in sys.modules if m in %r or m.startswith('dynamo.')])"
    )
    modules = ("dynamo_kv_router_ext._service", "dynamo_kv_router_ext._pool", "uvloop")
    told = subprocess.run([sys.executable, "-c", code % (modules,)], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"
