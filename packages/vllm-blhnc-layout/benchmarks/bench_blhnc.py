# SPDX-License-Identifier: Apache-2.0
"""Posting a transfer through real NIXL: regions by layer (LBNHC, BLHNC) against block rows, by fragmentation."""

from __future__ import annotations

import multiprocessing
import os
import time
import uuid
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from support.bench import Bench
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
#: Blocks of the pool, and of a transfer.
POOL, MOVED = 512, 128
#: From one block row to the next: the pages, padded to whole rows of the latent.
STRIDE = -(-sum(PAGES) // 576) * 576


def _agent() -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(uuid.uuid4().hex, nixl_agent_config(backends=["UCX"], capture_telemetry=True))


def _registered(agent: Any) -> tuple[npt.NDArray[np.uint8], int]:
    pool = np.zeros(POOL * STRIDE + 4096, dtype=np.uint8)
    base = (pool.ctypes.data + 4095) // 4096 * 4096
    agent.register_memory(agent.get_reg_descs([(base, POOL * STRIDE, 0, "")], "DRAM"), backends=["UCX"])
    return pool, base


def _descriptors(form: str, base: int) -> npt.NDArray[np.uint64]:
    """List what each form registers as its descriptors: (address, length, device), region by region."""
    found = []
    offset = 0
    if form == "rows":
        found = [(base + block * STRIDE, STRIDE, 0) for block in range(POOL)]
    for page in PAGES if form != "rows" else ():
        step = page if form == "LBNHC" else STRIDE
        found += [(base + offset + block * step, page, 0) for block in range(POOL)]
        offset += page * POOL if form == "LBNHC" else page
    return np.array(found, dtype=np.uint64)


def _patterns() -> dict[str, tuple[Ids, Ids]]:
    """Blocks of both sides of a transfer, by how they lie."""
    rng = np.random.default_rng(0)
    quarter = MOVED // 4
    four = np.concatenate([np.arange(start, start + quarter) for start in range(0, POOL, POOL // 4)])
    return {
        "1 run": (np.arange(8, 8 + MOVED), np.arange(40, 40 + MOVED)),
        "4 runs": (four, four + 3),
        "shuffled": (rng.permutation(POOL)[:MOVED], rng.permutation(POOL)[:MOVED]),
        "descending": (np.arange(MOVED, 0, -1), np.arange(MOVED + 40, 40, -1)),
    }


def _runs(local: Ids, remote: Ids) -> int:
    """Count the runs of a set of pairs, from the pairs alone."""
    known = set(zip(local.tolist(), remote.tolist(), strict=True))
    return sum((one - 1, other - 1) not in known for one, other in known)


def _measure(repeats: int, answer: Connection) -> None:
    """Post the same blocks in each form, in turn, and send what was measured of each, in the order of `MEASURED`.

    Runs in a process of its own, which leaves without a farewell: NIXL 1.4.1 crashes when an interpreter with an agent
    ends.
    """
    os.environ.update(
        UCX_TLS="tcp", UCX_NET_DEVICES="lo", NIXL_LOG_LEVEL="ERROR", NIXL_PROGRESS_THREAD_DELAY_US="10000"
    )
    here, there = _agent(), _agent()
    (_ours, base), (_theirs, remote_base) = _registered(here), _registered(there)
    peer = here.add_remote_agent(there.get_agent_metadata())
    sides = {}
    for form in FORMS:
        local = here.get_xfer_descs(_descriptors(form, base), "DRAM")
        remote = here.get_xfer_descs(_descriptors(form, remote_base), "DRAM")
        sides[form] = here.prep_xfer_dlist("NIXL_INIT_AGENT", local), here.prep_xfer_dlist(peer, remote)

    def post(form: str, local: Ids, remote: Ids) -> tuple[float, ...]:
        offsets = (np.arange(1 if form == "rows" else len(PAGES)) * POOL)[:, None]
        ids = [(offsets + blocks[None]).ravel() for blocks in (local, remote)]
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
    for pattern, blocks in _patterns().items():
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
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_measure, args=(3 if bench.quick else 15, sender))
    child.start()
    sender.close()
    samples = receiver.recv()
    child.join()
    for pattern, (local, remote) in _patterns().items():
        rows = samples[pattern]["rows"]
        assert {told[0] for told in rows} == {float(_runs(local, remote))}, "NIXL merged other runs than there are"
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
    bench.note("On a CPU the copy takes most of a whole transfer, so its time says little; it has no aim.")
