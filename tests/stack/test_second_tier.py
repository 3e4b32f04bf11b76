# SPDX-License-Identifier: Apache-2.0
"""Mooncake as the second cache tier: what one prefill worker saved, another loads; what is lost is computed.

Two prefill workers with small caches and a small store, so that both overflow within a few prompts. Requests are sent
to one of them by Dynamo's header, because which one has seen a prompt is what these tests are about.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import psutil
import pytest
import yaml

from serving_stack.model import prompt_tokens, write_model
from serving_stack.state import free_ports
from support.stack import Stack, until

pytestmark = pytest.mark.engines

#: Tokens that one worker's own cache holds, and the store of both.
LOCAL, STORED = 288 * 32, 2 * (64 << 20) // (32 * 576 * 2 * 4) * 32


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory, running: list[Stack]) -> Iterator[Stack]:
    """The CPU profile with two prefill workers and small caches; the stack of the tests before is ended first."""
    for other in running:
        other.command("down")
    folder = tmp_path_factory.mktemp("tier")
    profile = yaml.safe_load((resources.files("serving_stack") / "profiles" / "cpu.yaml").read_text())
    prefill = profile["mooncake"]["components"]["prefill"]
    prefill["args"]["num-gpu-blocks-override"] = LOCAL // 32
    # These tests count blocks: a machine that is slow for a moment is no lost master.
    prefill["environment"]["MC_RPC_TIMEOUT_MS"] = 5000
    profile["mooncake"]["files"]["mooncake.json"]["global_segment_size"] = "64MB"
    (folder / "small.yaml").write_text(yaml.safe_dump(profile, sort_keys=False))
    one = Stack(folder, free_ports(1, above=21000)[0], str(folder / "small.yaml"))
    try:
        one.up("--prefill", "2")
        yield one
    finally:
        one.command("down", check=False)


def ask(tier: Stack, worker: str, tokens: list[int]) -> list[int]:
    """Complete a prompt greedily, prefilled by `worker`; return the answer's tokens."""
    found: list[int] = tier.complete(tokens, prefill=worker)["nvext"]["completion_token_ids"]
    return found


def ask_counted(tier: Stack, worker: str, tokens: list[int]) -> tuple[list[int], dict[str, float]]:
    """Ask, and return the answer with where `worker` took the prompt's tokens from."""
    before = tier.sources(worker)
    return ask(tier, worker, tokens), tier.gained(worker, before, len(tokens))


def ask_at_once(tier: Stack, prompts: list[list[int]]) -> None:
    """Send all prompts at the same time, by turns to each worker; every one is answered."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        workers = [f"prefill-{number % 2}" for number in range(len(prompts))]
        assert all(pool.map(lambda worker, prompt: ask(tier, worker, prompt), workers, prompts))


def saved(tier: Stack, keys: float) -> None:
    """Wait until there are so many keys in the store, and no more come."""
    until(lambda: tier.store("master_key_count") >= keys, 20, f"{keys} keys in the store")
    settled(tier)


def settled(tier: Stack) -> float:
    """Wait until the store has held as many keys for a while; return how many."""
    seen = [-1.0] * 4

    def still() -> bool:
        seen.append(tier.store("master_key_count"))
        return len(set(seen[-4:])) == 1

    until(still, 30, "the workers have saved what they had to save")
    return seen[-1]


def test_a_worker_that_never_saw_the_prompt_loads_it(tier: Stack) -> None:
    prompt = prompt_tokens(1000)
    before = settled(tier)
    answer, gained = ask_counted(tier, "prefill-0", prompt)
    assert gained == {"local_compute": 1000, "local_cache_hit": 0, "external_kv_transfer": 0}
    saved(tier, before + 1000 // 32)
    hits = tier.metric("prefill-1", "vllm:external_prefix_cache_hits_total")
    again, gained = ask_counted(tier, "prefill-1", prompt)
    assert gained == {"local_compute": 1000 % 32, "local_cache_hit": 0, "external_kv_transfer": 1000 // 32 * 32}
    assert again == answer
    assert tier.metric("prefill-1", "vllm:external_prefix_cache_hits_total") == hits + 1000 // 32 * 32
    assert tier.store("master_key_count") == before + 1000 // 32


def test_each_worker_has_a_lookup_socket_of_its_own(tier: Stack) -> None:
    """Engines of one host share vLLM's default path, and one that starts takes the other's socket away."""
    sockets = []
    for worker in ("prefill-0", "prefill-1"):
        leader = psutil.Process(tier.state.components[worker].pid)
        for process in leader.children(recursive=True):
            paths = [str(one.laddr) for one in process.net_connections("unix")]
            sockets += [path for path in set(paths) if "lookup_rpc_port" in path]
    assert len(set(sockets)) == 2, sockets


def test_a_prefix_evicted_by_pressure_comes_back(tier: Stack) -> None:
    prompt, fillers = prompt_tokens(1000), [prompt_tokens(6000), prompt_tokens(6001)]
    assert sum(map(len, fillers)) > LOCAL
    expected = ask(tier, "prefill-0", prompt)
    before = settled(tier)
    for filler in fillers:
        ask(tier, "prefill-0", filler)
    full = before + sum(len(filler) // 32 for filler in fillers)
    saved(tier, full)
    answer, gained = ask_counted(tier, "prefill-0", prompt)
    assert gained == {"local_compute": 8, "local_cache_hit": 0, "external_kv_transfer": 992}
    assert answer == expected
    assert tier.store("master_key_count") == full


def test_a_full_store_evicts_and_no_request_notices(tier: Stack) -> None:
    sent = 0
    while tier.store("master_evicted_key_count") == 0:
        assert sent < 2 * STORED, "nothing was evicted"
        tokens = prompt_tokens(6100 + sent // 6000)
        ask(tier, "prefill-1", tokens)
        sent += len(tokens)
    assert tier.store("master_allocated_bytes") <= tier.store("master_total_capacity_bytes")
    # It goes on saving.
    until(lambda: _comes_back(tier, prompt_tokens(1100 + int(time.monotonic()) % 400)), 60, "a new prompt is saved")
    assert tier.ready()


def _comes_back(tier: Stack, prompt: list[int]) -> bool:
    """Return whether what one worker is asked is loaded by the other a moment later."""
    ask(tier, "prefill-0", prompt)
    time.sleep(0.5)
    return ask_counted(tier, "prefill-1", prompt)[1]["external_kv_transfer"] > 0


def test_master_killed_and_restarted(tier: Stack) -> None:
    pid = tier.state.components["mooncake"].pid or 0
    os.kill(pid, signal.SIGKILL)
    ask_at_once(tier, [prompt_tokens(700 + number) for number in range(4)])
    until(lambda: tier.state.components["mooncake"].restarts == 1, 30, "the launcher notices")
    until(tier.ready, 30, "the master is back")
    until(lambda: _comes_back(tier, prompt_tokens(900 + int(time.monotonic()) % 90)), 60, "the tier is back by itself")
    for worker in ("prefill-0", "prefill-1"):
        assert tier.state.components[worker].restarts == 0


def test_master_that_hangs_costs_little(tier: Stack) -> None:
    pid = tier.state.components["mooncake"].pid or 0
    os.kill(pid, signal.SIGSTOP)
    try:
        # More than a client's patience if each waited for the master in turn.
        ask_at_once(tier, [prompt_tokens(100 + number) for number in range(24)])
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: _comes_back(tier, prompt_tokens(800 + int(time.monotonic()) % 90)), 60, "the tier is back by itself")


#: Runs engines one after the other, each in a fork of a process that has imported vLLM: argv[1] lists folders, options.
ENGINES = """
import json, os, sys
from vllm import LLM, SamplingParams
from serving_stack.model import prompt_tokens

transfer = {
    "kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both",
    "kv_connector_module_path": "serving_stack.mooncake_store",
}
for folder, options in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        llm = LLM(folder, block_size=32, max_model_len=2048, enforce_eager=True, disable_log_stats=False,
                  kv_transfer_config=transfer, num_gpu_blocks_override=160, **options)
        prompt = {"prompt_token_ids": prompt_tokens(1000)}
        answer = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1))[0]
        print("cached", answer.num_cached_tokens, flush=True)
        llm.llm_engine.engine_core.shutdown()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_two_that_differ_never_meet_in_the_store(tier: Stack, tmp_path: Path) -> None:
    """One master; the same folder name, prompt and block hashes; other weights, or another type of cache."""
    model, other, copied = (tmp_path / name / "glm-tiny" for name in ("a", "b", "c"))
    write_model(model)
    write_model(other, seed=1)
    shutil.copytree(model, copied)
    # Lends the store no memory of its own: what it saves stays when it ends.
    guest = json.loads((tier.run.directory / "files" / "mooncake.json").read_text())
    guest.update(mode="standalone-store", global_segment_size=0)
    (tmp_path / "guest.json").write_text(json.dumps(guest))
    environment = {
        **os.environ,
        **{key: str(value) for key, value in yaml.safe_load(Path(tier.profile).read_text())["environment"].items()},
        "MOONCAKE_CONFIG_PATH": str(tmp_path / "guest.json"),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    engines = [(str(model), {}), (str(other), {}), (str(model), {"dtype": "float16"}), (str(copied), {})]
    done = subprocess.run(
        [sys.executable, "-c", ENGINES, json.dumps(engines)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cached = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("cached ")]
    # The last is the first model in another place, and does find what that one saved.
    assert cached == [0, 0, 0, 992]


def test_a_dead_worker_takes_its_part_of_the_store_and_no_request_fails(tier: Stack) -> None:
    prompts = [prompt_tokens(length) for length in (6000, 1001, 1002)]
    expected, *_ = [ask(tier, "prefill-0", prompt) for prompt in prompts]
    settled(tier)
    leader = psutil.Process(tier.state.components["prefill-0"].pid)
    for process in [*leader.children(recursive=True), leader]:
        process.kill()
    # Half of the blocks lay in its memory. The master lists them until the heartbeats have been missing for 10 s.
    log = tier.run.logs / "prefill-1.log"
    seen = log.stat().st_size
    answer, *_ = [ask(tier, "prefill-1", prompt) for prompt in prompts]
    assert answer == expected
    with log.open() as lines:
        lines.seek(seen)
        failed = [line for line in lines if "Recovered from KV load failure" in line]
    assert 1 <= len(failed) <= len(prompts), failed  # each load is tried once, not over and over
