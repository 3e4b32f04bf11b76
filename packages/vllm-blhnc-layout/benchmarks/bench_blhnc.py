# SPDX-License-Identifier: Apache-2.0
"""Posting a transfer through real NIXL: regions by layer (LBNHC, BLHNC) against block rows, by fragmentation."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
import time
import uuid
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from serving_stack.model import prompt_tokens, write_model
from support.bench import Bench
from support.engines import Engine, running
from support.pool import transfers
from support.sessions import AgentWorkload
from vllm_blhnc_layout._pairs import ordered

Ids = npt.NDArray[np.int64]

#: GLM-5's regions: 78 MLA layers, one MTP layer, 22 indexer caches; pages of 4 tokens (FP8), so that the copy, which on
#: a CPU takes most of the time, does not drown what is measured. Posting counts descriptors, not bytes.
PAGES = [4 * 576] * 79 + [4 * 132] * 22
#: What is registered: by stock vLLM under either layout, and by us.
FORMS = ("LBNHC", "BLHNC by layer", "rows")
#: What is measured, its unit, and where it stands in what `post` returns. The calls are all that the caller waits for:
#: putting pairs in order, NIXL's merging, posting.
MEASURED = (("descriptors", "", 0), ("post time", "ms", 1), ("calls", "ms", 2), ("whole transfer", "ms", 3))
AIMED = ("post time", "calls")
#: Blocks of both pools, and of a transfer.
DECODE, PREFILL, MOVED = 512, 1024, 128
#: What both pools serve until their blocks are fragmented, and from how many of the last transfers one is chosen.
#: A prompt has up to `MOVED` blocks; the pools hold about 5 and 10 sessions.
LOAD, REPLAYED = AgentWorkload(sessions=16).scaled(1 / 25), 64
#: Tokens of a prompt between engines, and how many others come before, so that blocks are recycled.
LIVE, LIVE_LOAD = 1500, 30
#: From one block row to the next: the pages, padded to whole rows of the latent.
STRIDE = -(-sum(PAGES) // 576) * 576


def _agent() -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(uuid.uuid4().hex, nixl_agent_config(backends=["UCX"], capture_telemetry=True))


def _registered(agent: Any, blocks: int) -> tuple[npt.NDArray[np.uint8], int]:
    pool = np.zeros(blocks * STRIDE + 4096, dtype=np.uint8)
    base = (pool.ctypes.data + 4095) // 4096 * 4096
    agent.register_memory(agent.get_reg_descs([(base, blocks * STRIDE, 0, "")], "DRAM"), backends=["UCX"])
    return pool, base


def _descriptors(form: str, base: int, blocks: int) -> npt.NDArray[np.uint64]:
    """List what each form registers as its descriptors: (address, length, device), region by region."""
    found = []
    offset = 0
    if form == "rows":
        found = [(base + block * STRIDE, STRIDE, 0) for block in range(blocks)]
    for page in PAGES if form != "rows" else ():
        step = page if form == "LBNHC" else STRIDE
        found += [(base + offset + block * step, page, 0) for block in range(blocks)]
        offset += page * blocks if form == "LBNHC" else page
    return np.array(found, dtype=np.uint64)


def _patterns() -> dict[str, tuple[Ids, Ids]]:
    """Blocks of both sides of a transfer, decode's first, by how they lie."""
    rng = np.random.default_rng(0)
    quarter = MOVED // 4
    four = np.concatenate([np.arange(start, start + quarter) for start in range(0, DECODE, DECODE // 4)])
    return {
        "1 run": (np.arange(8, 8 + MOVED), np.arange(40, 40 + MOVED)),
        "4 runs": (four, four + 3),
        "shuffled": (rng.permutation(DECODE)[:MOVED], rng.permutation(PREFILL)[:MOVED]),
        "descending": (np.arange(MOVED, 0, -1), np.arange(MOVED + 40, 40, -1)),
    }


def _runs(local: Ids, remote: Ids) -> int:
    """Count the runs of a set of pairs, from the pairs alone."""
    known = set(zip(local.tolist(), remote.tolist(), strict=True))
    return sum((one - 1, other - 1) not in known for one, other in known)


def _runs_as_listed(local: Ids, remote: Ids) -> int:
    """Count the runs of a list of pairs, in the order in which they stand."""
    pairs = zip(local.tolist(), remote.tolist(), strict=True)
    return 1 + sum((one + 1, other + 1) != after for (one, other), after in itertools.pairwise(pairs))


def _replay() -> list[tuple[Ids, Ids]]:
    """Return the last transfers of the load, in order of their runs."""
    last = transfers(LOAD, prefill=PREFILL, decode=DECODE)[-REPLAYED:]
    return sorted(((np.array(local), np.array(remote)) for local, remote in last), key=lambda pair: _runs(*pair))


def _measure(patterns: dict[str, tuple[Ids, Ids]], repeats: int, answer: Connection) -> None:
    """Post the same blocks in each form, in turn, and send what was measured of each, in the order of `MEASURED`.

    Runs in a process of its own, which leaves without a farewell: NIXL 1.4.1 crashes when an interpreter with an agent
    ends.
    """
    os.environ.update(
        UCX_TLS="tcp", UCX_NET_DEVICES="lo", NIXL_LOG_LEVEL="ERROR", NIXL_PROGRESS_THREAD_DELAY_US="10000"
    )
    here, there = _agent(), _agent()
    (_ours, base), (_theirs, remote_base) = _registered(here, DECODE), _registered(there, PREFILL)
    peer = here.add_remote_agent(there.get_agent_metadata())
    sides = {}
    for form in FORMS:
        local = here.get_xfer_descs(_descriptors(form, base, DECODE), "DRAM")
        remote = here.get_xfer_descs(_descriptors(form, remote_base, PREFILL), "DRAM")
        sides[form] = here.prep_xfer_dlist("NIXL_INIT_AGENT", local), here.prep_xfer_dlist(peer, remote)

    def post(form: str, local: Ids, remote: Ids) -> tuple[float, ...]:
        regions = np.arange(1 if form == "rows" else len(PAGES))[:, None]
        ids = [(regions * pool + blocks).ravel() for pool, blocks in ((DECODE, local), (PREFILL, remote))]
        begun = time.perf_counter()
        if form == "rows":
            ids = list(ordered(ids[0], ids[1])[:2])
        handle = here.make_prepped_xfer("READ", sides[form][0], ids[0], sides[form][1], ids[1])
        here.transfer(handle)
        called = time.perf_counter() - begun
        while (state := here.check_xfer_state(handle)) != "DONE":
            assert state == "PROC", state
        told = here.get_xfer_telemetry(handle)
        here.release_xfer_handle(handle)
        return float(told.descCount), told.postDuration / 1e3, called * 1e3, told.xferDuration / 1e3

    samples: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    for pattern, blocks in patterns.items():
        samples[pattern] = {form: [] for form in FORMS}
        for repeat in range(repeats + 1):
            for form in FORMS:
                told = post(form, *blocks)
                if repeat:  # the first one connects
                    samples[pattern][form].append(told)
    answer.send(samples)
    os._exit(0)


def run(bench: Bench) -> None:
    """Compare rows with what stock vLLM registers."""
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, fork) as apart:  # what is measured stays free of vLLM
        replayed = apart.submit(_replay).result()
    patterns = _patterns() | {"fragmented": replayed[len(replayed) // 2]}
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = fork.Process(target=_measure, args=(patterns, 3 if bench.quick else 15, sender))
    child.start()
    sender.close()
    samples = receiver.recv()
    child.join()
    for pattern, (local, remote) in patterns.items():
        expected = (len(PAGES) * _runs_as_listed(local, remote), len(PAGES) * local.size, _runs(local, remote))
        for form, descriptors in zip(FORMS, expected, strict=True):
            assert {told[0] for told in samples[pattern][form]} == {descriptors}, f"{pattern}, {form}: {descriptors}"
        rows = samples[pattern]["rows"]
        for form in FORMS[:2]:
            stock = samples[pattern][form]
            for what, unit, item in MEASURED:
                bench.row(
                    f"{pattern}: {what}, rows",
                    unit,
                    ours=[told[item] for told in rows],
                    reference=[told[item] for told in stock],
                    reference_name=f"stock pull, {form}",
                    aim="<= 0.2" if what in AIMED and form == "LBNHC" and pattern != "1 run" else None,
                )
    bench.note(
        f"{MOVED} blocks, {len(PAGES)} regions, {MOVED * STRIDE / 1e6:.0f} MB; both agents in one process, UCX TCP."
    )
    fewest, most = _runs(*replayed[0]), _runs(*replayed[-1])
    bench.note(
        f"fragmented: {patterns['fragmented'][0].size} blocks that vLLM's block managers hand out to {LOAD.sessions} "
        f"agent sessions; of the last {len(replayed)} transfers, with {fewest} to {most} runs, the median one."
    )
    bench.note("On a CPU the copy takes most of a whole transfer of rows, so its time says little; it has no aim.")
    _live(bench)


def _live(bench: Bench) -> None:
    """Between two engines with six layers of two widths, both pools small enough to be in pieces."""
    given: dict[str, dict[str, Any]] = {
        "LBNHC": {"layout": "LBNHC"},
        "BLHNC by layer": {"layout": "BLHNC"},
        "rows": {"layout": "BLHNC", "module": "vllm_blhnc_layout.pull"},
    }
    names = {
        "descriptors": "nixl_num_descriptors_sum",
        "post time": "nixl_post_time_seconds_sum",
        "whole transfer": "nixl_xfer_time_seconds_sum",
    }
    samples: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "glm-tiny")
        for form, options in given.items():
            prefill, decode = (
                Engine(model, Path(folder, f"{role}.log"), role, second_cache=True, blocks=blocks, **options)
                for role, blocks in (("prefill", 160), ("decode", 96))
            )
            samples[form] = {what: [] for what in names}
            with running(prefill, decode):
                for number in range(LIVE_LOAD + (3 if bench.quick else 15)):
                    prompt = prompt_tokens(200 + 311 * number % 600 if number < LIVE_LOAD else LIVE + number)
                    begun = prefill.generate([prompt], 1)
                    before = decode.counters()
                    decode.generate([prompt], 8, [begun[0]["transfer"]])
                    after = decode.counters()
                    if number >= LIVE_LOAD:
                        for what, name in names.items():
                            scale = 1 if what == "descriptors" else 1e3
                            samples[form][what].append(scale * (after[f"vllm:{name}"] - before[f"vllm:{name}"]))
                if form == "rows":
                    counted = decode.counters()
                    assert counted["vllm:nixl_num_descriptors_sum"] == counted["vllm:nixl_runs_total"]
    for form in FORMS[:2]:
        for what in names:
            bench.row(
                f"engines: {what}, rows",
                "" if what == "descriptors" else "ms",
                ours=samples["rows"][what],
                reference=samples[form][what],
                reference_name=f"stock pull, {form}",
            )
    bench.note(f"engines: 6 layers, prompts of {LIVE} tokens and more in blocks of 32, after {LIVE_LOAD} others.")
