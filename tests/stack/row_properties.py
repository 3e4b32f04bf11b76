# SPDX-License-Identifier: Apache-2.0
"""Properties of transfers by block rows, drawn by Hypothesis: any rows, any lists of blocks, ranks of both ends.

Run as a script: prints one JSON object, and leaves as `support.rows` says. What stands in it: by group of properties,
the examples that were tried and the failure, if any; and how many examples had which trait.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import sys
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from nixl._api import nixl_agent, nixl_agent_config

from support.rows import ENVIRONMENT, Cache, Exchange, Rank, Refused, Stuck, leave, plan

#: Ranks of prefill and of decode that vLLM lets exchange, and those that it does not.
SIZES = (1, 2, 4)
UNEQUAL = ((3, 2), (2, 3), (4, 3), (3, 4))
#: Examples for each mode and pair of sizes, and for each mode and way in which a peer's rows are others.
EXAMPLES, UNLIKE = 5, 3
#: No byte of a page is one of these: padding of prefill and of decode.
SENT, OWN = 0xEE, 0xDD
#: The bits of a page's bytes that are drawn, and one that those of decode have before they are written.
DRAWN, UNWRITTEN = 0x3F, 0x40

Pair = tuple[int, int]
Memory = npt.NDArray[np.uint8]
Ranges = npt.NDArray[np.uint64]


# What an example is made of.


@dataclass(frozen=True)
class Move:
    """A request's blocks at both ends; prefill may have more, which decode has cached."""

    local: tuple[int, ...]
    remote: tuple[int, ...]

    @property
    def pairs(self) -> list[Pair]:
        """Which block of decode gets which of prefill: vLLM moves the last ones."""
        return list(zip(self.local, self.remote[len(self.remote) - len(self.local) :], strict=True))


@dataclass(frozen=True)
class Case:
    """One example."""

    block_size: int
    caches: tuple[Cache, ...]
    prefill: int  #: blocks of a pool
    decode: int
    moves: tuple[Move, ...]
    longest: int | None = None  #: rows of a descriptor
    slack: float = 0.0  #: of a row, that `max_descriptor_bytes` is above that


@st.composite
def rows(draw: st.DrawFn) -> tuple[Cache, ...]:
    """Draw the layers of a model, latents and indexers in any order."""
    width = draw(st.sampled_from((16, 33, 40, 132, 576, 656)))
    steps = (None, 2, width, 32 * width, 48)
    halves = width % 2 == 0 and draw(st.booleans())
    align = draw(st.sampled_from(steps[halves:]))
    found = [
        Cache(f"model.layers.{layer}.self_attn.attn", width, align, halves) for layer in range(draw(st.integers(1, 8)))
    ]
    widths = draw(st.lists(st.sampled_from((1, 7, 33, 68, 132)), max_size=4))
    for layer, keys in enumerate(widths):
        align = draw(st.sampled_from((None, 16)))
        found.append(Cache(f"model.layers.{layer}.self_attn.indexer.k_cache", keys, align, indexer=True))
    return tuple(draw(st.permutations(found)))


@st.composite
def blocks(draw: st.DrawFn, pool: int, count: int) -> list[int]:
    """Draw blocks of a pool as a request may have them: in one run, backwards, torn, mixed; none twice."""
    ids = list(range(pool))
    match draw(st.sampled_from(("run", "torn", "torn", "descending", "mixed"))):
        case "torn":
            cuts = sorted(draw(st.sets(st.integers(1, pool - 1), max_size=4)))
            parts = [ids[start:end] for start, end in itertools.pairwise((0, *cuts, pool))]
            parts = [part[::-1] if draw(st.booleans()) else part for part in draw(st.permutations(parts))]
            ids = list(itertools.chain(*parts))
        case "descending":
            ids.reverse()
        case "mixed":
            ids = draw(st.permutations(ids))
    first = draw(st.integers(0, pool - count))
    return ids[first : first + count]


@st.composite
def moves(draw: st.DrawFn, prefill: int, decode: int, least: int) -> Move:
    """Draw a request's blocks; the two ends may have torn it alike or each in its own way."""
    count = draw(st.sampled_from([*range(1, min(prefill, decode) + 1), least]))
    local = draw(blocks(decode, count))
    low, high = min(local, default=0), max(local, default=0)
    if count and high - low < prefill and draw(st.booleans()):
        first = draw(st.integers(0, prefill - 1 - (high - low)))
        remote = [first + block - low for block in local]
    else:
        remote = draw(blocks(prefill, count))
    if draw(st.booleans()):
        pairs = draw(st.permutations(list(zip(local, remote, strict=True))))
        local, remote = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    free = [block for block in range(prefill) if block not in remote]
    cached = free[: draw(st.integers(0, len(free)))] if count else free[:1]
    return Move(tuple(local), (*cached, *remote))


@st.composite
def cases(draw: st.DrawFn, least: int) -> Case:
    """Draw an example; `least` is how few blocks a request may have."""
    prefill, decode = (draw(st.sampled_from((2, 3, 5, 8, 12, 16))) for _ in range(2))
    return Case(
        draw(st.sampled_from((32, 16, 64))),
        draw(rows()),
        prefill,
        decode,
        tuple(draw(st.lists(moves(prefill, decode, least), min_size=1, max_size=2))),
        draw(st.none() | st.integers(1, 4)),
        draw(st.sampled_from((0.0, 0.5, 0.99))),
    )


#: What a peer's rows may have other than ours: of an example and one of its caches, by index. Not all of it counts.
OTHERS: dict[str, Callable[[Case, int], Case]] = {
    "block size": lambda case, at: replace(case, block_size={16: 32, 32: 64, 64: 16}[case.block_size]),
    "block size alone": lambda case, at: _narrower(case, case.block_size // 16),
    "width": lambda case, at: _but(case, at, width=case.caches[at].width + 2, align=2),
    "name": lambda case, at: _but(case, at, name="other"),
    "step": lambda case, at: _but(case, at, align=2 * (case.caches[at].align or 4096)),
    "finer step": lambda case, at: _but(case, at, align=16),
    "one more": lambda case, at: replace(case, caches=(*case.caches, replace(case.caches[at], name="more"))),
    "one less": lambda case, at: replace(case, caches=case.caches[:-1] or (replace(case.caches[0], name="other"),)),
    "order": lambda case, at: replace(case, caches=(*case.caches[:at], *case.caches[at + 1 :], case.caches[at])),
}


def _but(case: Case, at: int, **changes: Any) -> Case:
    caches = list(case.caches)
    caches[at] = replace(caches[at], **changes)
    return replace(case, caches=tuple(caches))


def _narrower(case: Case, times: int) -> Case:
    """Return an example of as many bytes in a page, but fewer tokens, by so many times."""
    caches = tuple(replace(cache, width=times * cache.width) for cache in case.caches)
    return replace(case, block_size=case.block_size // times, caches=caches)


@st.composite
def unlike(draw: st.DrawFn, what: str) -> tuple[Case, Case]:
    """Draw an example, and what its peer has instead."""
    case = draw(cases(1))
    return case, OTHERS[what](case, draw(st.integers(0, len(case.caches) - 1)))


# What is noted while an example runs.


class Witness:
    """A NIXL agent, and what it was handed."""

    #: By name.
    everyone: dict[str, Witness] = {}  # noqa: RUF012

    def __init__(self, name: str) -> None:
        self._agent = nixl_agent(name, nixl_agent_config(num_threads=0, backends=["UCX"], capture_telemetry=True))
        self.name = name
        self.everyone[name] = self
        self.begin()

    def begin(self) -> None:
        """Forget everything; and peers that were never let go, as where a handshake ended halfway."""
        for peer in getattr(self, "_peers", ()):
            self._agent.remove_remote_agent(peer)
        self._peers: set[Any] = set()
        #: Memory that is registered: `[n, (address, length)]`.
        self.registered: list[Ranges] = []
        #: Whose memory a list of descriptors is in, and the list.
        self.prepared: dict[Any, tuple[str, Ranges]] = {}
        #: Transfers: the peer, what is posted here and there, and the handle.
        self.posted: list[tuple[str, Ranges, Ranges, Any]] = []
        #: Transfers that are done -> descriptors that NIXL made.
        self.descriptors: dict[Any, int] = {}
        self._lists: dict[int, tuple[Any, Ranges]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def _listed(self, made: Any, given: Any) -> Any:
        ranges = np.array([tuple(one)[:2] for one in given], dtype=np.uint64)
        self._lists[id(made)] = made, ranges
        return made

    def get_reg_descs(self, descs: Any, mem_type: str) -> Any:
        return self._listed(self._agent.get_reg_descs(descs, mem_type), descs)

    def get_xfer_descs(self, descs: Any, mem_type: str) -> Any:
        return self._listed(self._agent.get_xfer_descs(descs, mem_type), descs)

    def register_memory(self, descs: Any, **kwargs: Any) -> Any:
        self.registered.append(self._lists[id(descs)][1])
        return self._agent.register_memory(descs, **kwargs)

    def prep_xfer_dlist(self, agent_name: str | bytes, descs: Any, *args: Any) -> Any:
        handle = self._agent.prep_xfer_dlist(agent_name, descs, *args)
        owner = agent_name.decode() if isinstance(agent_name, bytes) else agent_name  # a peer's is bytes in NIXL 1.4
        self.prepared[handle] = self.name if owner == "NIXL_INIT_AGENT" else owner, self._lists[id(descs)][1]
        return handle

    def make_prepped_xfer(
        self, operation: str, local_side: Any, local: Any, remote_side: Any, remote: Any, *args: Any, **kwargs: Any
    ) -> Any:
        handle = self._agent.make_prepped_xfer(operation, local_side, local, remote_side, remote, *args, **kwargs)
        (_, here), (peer, there) = self.prepared[local_side], self.prepared[remote_side]
        self.posted.append((peer, here[np.asarray(local)], there[np.asarray(remote)], handle))
        return handle

    def get_xfer_telemetry(self, handle: Any) -> Any:
        told = self._agent.get_xfer_telemetry(handle)
        self.descriptors[handle] = told.descCount
        return told

    def add_remote_agent(self, metadata: bytes) -> Any:
        peer = self._agent.add_remote_agent(metadata)
        self._peers.add(peer)
        return peer

    def remove_remote_agent(self, peer: Any) -> None:
        self._agent.remove_remote_agent(peer)
        self._peers.discard(peer)


class Said(logging.Handler):
    """What vLLM's log gives as causes of failures."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.causes: list[str] = []
        logging.getLogger("vllm").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.causes.append(f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}")


class Ends:
    """The agents of both ends, used again by every example; an agent takes longer to make than a transfer."""

    def __init__(self) -> None:
        self.said = Said()
        self.serial = 0
        self._kept: list[Any] = []  # an agent that is deleted may take the process with it
        self.renew()

    def renew(self) -> None:
        """Take new agents: the old ones may be in the middle of something."""
        self.serial += 1
        self.agents = {end: [Witness(f"{end} {rank} {self.serial}") for rank in range(4)] for end in ("p", "d")}
        self._kept.append(self.agents)

    def ranks(self, end: str, mode: str, case: Case, blocks: int, count: int, **extra: Any) -> list[Rank]:
        """Make an end's ranks."""
        planned = plan(case.caches, case.block_size, blocks)
        if case.longest is not None:
            extra["max_descriptor_bytes"] = case.longest * planned.stride + int(case.slack * planned.stride)
        made = []
        for rank, agent in enumerate(self.agents[end][:count]):
            made.append(Rank(mode, planned, lambda *_, one=agent: one, f"{end} {self.serial}", rank, count, extra))
        return made

    def exchange(
        self, mode: str, ours: Case, theirs: Case, sizes: Pair, check: Callable[[Exchange], None], **extra: Any
    ) -> None:
        """Make both ends of an example and check them."""
        self.serial += 1
        self.said.causes.clear()
        for agent in (*self.agents["p"], *self.agents["d"]):
            agent.begin()
        try:
            prefill = self.ranks("p", mode, theirs, theirs.prefill, sizes[0], **extra)
            decode = self.ranks("d", mode, ours, ours.decode, sizes[1], **extra)
            with Exchange(prefill, decode) as exchange:
                check(exchange)
        except BaseException:
            self.renew()
            raise


# What is to hold.


def disjoint(ranges: Iterable[Ranges]) -> None:
    """Assert that no two ranges have a byte in common."""
    joined = np.concatenate([one.astype(np.int64) for one in ranges])
    joined = joined[np.argsort(joined[:, 0], kind="stable")]
    over = np.flatnonzero(joined[:-1].sum(axis=1) > joined[1:, 0])
    assert not over.size, f"descriptors overlap: {joined[over[0]].tolist()} and {joined[over[0] + 1].tolist()}"


def pieces(pairs: Sequence[Pair], longest: int | None) -> tuple[int, int]:
    """Count the runs of pairs, and the pieces of at most so many pairs that they are cut into."""
    known, runs, cut = set(pairs), 0, 0
    for local, remote in known:
        if (local - 1, remote - 1) not in known:
            length = next(n for n in itertools.count(1) if (local + n, remote + n) not in known)
            runs, cut = runs + 1, cut + (-(-length // longest) if longest else 1)
    return runs, cut


def filled(rank: Rank, bit: int, padding: int, number: int) -> Memory:
    """Fill a pool through its layers' views, padding in between; return a copy of it."""
    draw = np.random.default_rng(number)
    rank.raw.fill(padding)
    for layer in rank.pool:
        shape = rank.read(layer).shape
        rank.write(
            layer,
            np.frombuffer(draw.bytes(shape[0] * shape[1]), np.uint8).reshape(shape) & np.uint8(DRAWN) | np.uint8(bit),
        )
    before: Memory = rank.raw.copy()
    return before


def geometry(rank: Rank) -> list[tuple[int, str, int]]:
    """Return where in a row the pages lie, as the layers' views say, and where the row ends."""
    found = [(view.data_ptr() - rank.address, name, rank.read(name).shape[1]) for name, view in rank.pool.items()]
    (stride,) = {view.stride(0) * view.element_size() for view in rank.pool.values()}
    return [*sorted(found), (stride, "end", rank.worker.block_size)]


def agreed(rank: Rank) -> None:
    """Assert that what a peer is told is one region of rows, and where in a row the pages are."""
    metadata = rank.metadata
    assert metadata.region_members, "rows are not what is registered"
    told = json.loads(metadata.region_members[0][0])
    stride = told["stride"]
    assert metadata.kv_caches_base_addr == [rank.address]
    assert metadata.block_lens == metadata.block_strides == [stride]
    assert len(rank.raw) == metadata.num_blocks * stride, f"{metadata.num_blocks} rows of {stride} are not the pool"
    assert sorted(layer for layer, _, _ in told["pages"]) == sorted(rank.pool)
    for layer, offset, page in told["pages"]:
        there = rank.raw.reshape(-1, stride)[:, offset : offset + page]
        assert np.array_equal(there, rank.read(layer)), f"the page of {layer} is not where a peer is told"


def arrived(move: Move, here: Rank, there: Rank, before: Memory, stride: int) -> None:
    """Assert that decode has prefill's pages, and that all else is as `before`, which is brought up to date."""
    memory, before = here.raw.reshape(-1, stride), before.reshape(-1, stride)
    for layer in here.pool:
        ours, theirs = here.read(layer), there.read(layer)
        for local, remote in move.pairs:
            assert np.array_equal(ours[local], theirs[remote]), (
                f"{layer}: block {local} of decode {here.rank} is not block {remote} of prefill {there.rank}"
            )
        assert ours.max() <= (DRAWN | UNWRITTEN), f"{layer} of decode {here.rank} shows padding"
    for local, _ in move.pairs:
        before[local] = memory[local]  # padding may have come along
    other = np.flatnonzero((memory != before).any(axis=1)).tolist()
    assert not other, f"blocks {other} of decode {here.rank} have changed, unasked"


def posted(ends: Ends, case: Case, exchange: Exchange, stride: int, padding: int) -> None:
    """Assert which transfers were posted: rows, each in one descriptor per run or piece, none over another."""
    push = exchange.decode[0].mode == "push"
    ours, theirs = (exchange.prefill, exchange.decode) if push else (exchange.decode, exchange.prefill)
    disjoint(ranges for end in ends.agents.values() for agent in end for ranges in agent.registered)
    for rank in ours:
        agent = rank.agent
        for owner, ranges in agent.prepared.values():
            disjoint([ranges])
            memory = np.concatenate(Witness.everyone[owner].registered)
            inside = (ranges[:, :1] >= memory[:, 0]) & (ranges.sum(axis=1)[:, None] <= memory.sum(axis=1))
            assert inside.any(axis=1).all(), f"memory of {owner} is prepared that it has not registered"
        # A rank that pulls reads from one; one that pushes writes to all that would read from it, or shares one.
        first = rank.rank * len(theirs) // len(ours)
        peers = range(first, first + max(1, len(theirs) // len(ours) if push else 1))
        wanted = [(theirs[peer], move) for move in case.moves if move.local for peer in peers]
        counts = Counter[str]()
        assert len(agent.posted) == len(wanted)
        for (name, here, there, handle), (peer, move) in zip(agent.posted, wanted, strict=True):
            assert name == peer.agent.name
            disjoint([here])
            disjoint([there])
            pairs = [pair[::-1] for pair in move.pairs] if push else move.pairs
            rows = {(rank.address + one * stride, stride, peer.address + other * stride) for one, other in pairs}
            assert {(*one, other) for one, (other, _) in zip(here.tolist(), there.tolist(), strict=True)} == rows
            assert set(there[:, 1].tolist()) == {stride}
            runs, cut = pieces(pairs, case.longest)
            assert agent.descriptors[handle] == cut, f"{agent.descriptors[handle]} descriptors for {cut} pieces"
            counts.update(
                pairs=len(pairs),
                runs=runs,
                padding_bytes=len(pairs) * padding,
                num_descriptors=cut,
                bytes_transferred=len(pairs) * stride,
            )
        told = rank.worker.get_kv_connector_stats()
        assert {key: sum(told.data[key]) if told else 0 for key in counts} == dict(counts)


def holds(ends: Ends, traits: Counter[str], mode: str, sizes: Pair, case: Case) -> None:
    """Move an example's blocks; assert the properties."""

    def check(exchange: Exchange) -> None:
        prefill, decode = exchange.prefill, exchange.decode
        # Ranks of an engine hold the same. Here each has its own, but where several write to one rank of decode.
        same = mode == "push" and len(prefill) > len(decode)
        sent = [filled(rank, 0, SENT, 0 if same else rank.rank) for rank in prefill]
        kept = [filled(rank, UNWRITTEN, OWN, 8 + rank.rank) for rank in decode]
        stride, _, _ = geometry(decode[0])[-1]
        padding = int((kept[0][:stride] == OWN).sum())
        for rank in (*prefill, *decode):
            agreed(rank)
        for move in case.moves:
            exchange.move(move.local, move.remote)
            for rank, before in zip(decode, kept, strict=True):
                arrived(move, rank, prefill[rank.rank * len(prefill) // len(decode)], before, stride)
        for rank, before in zip(prefill, sent, strict=True):
            assert np.array_equal(rank.raw, before), f"the pool of prefill {rank.rank} has changed"
        posted(ends, case, exchange, stride, padding)
        traits.update(_traits(case, padding))

    ends.exchange(mode, case, case, sizes, check)


def _traits(case: Case, padding: int) -> Iterator[str]:
    for move in case.moves:
        runs, cut = pieces(move.pairs, case.longest)
        yield from ("nothing to move",) if not runs else ()
        yield from ("one run",) if len(move.pairs) > runs == 1 else ()
        yield from ("several runs",) if len(move.pairs) > runs > 1 else ()
        yield from ("no run",) if len(move.pairs) == runs > 1 else ()
        yield from ("runs cut",) if cut > runs else ()
        yield from ("part of it cached",) if move.local and len(move.remote) > len(move.local) else ()
    yield from ("padding",) if padding else ()
    yield from ("larger prefill",) if case.prefill > case.decode else ()
    yield from ("larger decode",) if case.prefill < case.decode else ()
    yield from ("indexers",) if any(cache.indexer for cache in case.caches) else ()
    yield from ("odd widths",) if any(cache.width % 2 for cache in case.caches) else ()
    yield from ("16-bit elements",) if any(cache.halves for cache in case.caches) else ()
    yield f"block size {case.block_size}"


def holds_or_refused(
    ends: Ends, traits: Counter[str], mode: str, sizes: Pair, unlike: tuple[Case, Case], enforced: bool
) -> None:
    """Let decode have an example's rows and prefill others: either they are no others, or nothing moves."""

    def check(exchange: Exchange) -> None:
        prefill, decode = exchange.prefill, exchange.decode
        sent = [filled(rank, 0, SENT, 0) for rank in prefill]
        kept = [filled(rank, UNWRITTEN, OWN, 8) for rank in decode]
        (stride, _, _), move = geometry(decode[0])[-1], unlike[0].moves[0]
        if geometry(prefill[0]) == geometry(decode[0]):
            traits["equal after all"] += 1
            exchange.move(move.local, move.remote)
            for rank, before in zip(decode, kept, strict=True):
                arrived(move, rank, prefill[0], before, stride)
        else:
            traits["refused"] += 1
            refused(ends, exchange, move, r"IncompatiblePeer: this peer's cache cannot be read: \w|is not divisible by")
            for rank, before in zip((*prefill, *decode), (*sent, *kept), strict=True):
                assert np.array_equal(rank.raw, before)

    ends.exchange(mode, *unlike, sizes, check, enforce_handshake_compat=enforced)


def refused(ends: Ends, exchange: Exchange, move: Move, cause: str) -> None:
    """Assert that every rank of decode refuses, with a cause like this one in the log, and nothing is posted."""
    by: list[int] = []
    try:
        exchange.move(move.local, move.remote)
    except Refused as error:
        by = error.args[0]
    assert by == [rank.rank for rank in exchange.decode], f"refused by {by} alone"
    assert ends.said.causes
    for said in ends.said.causes:
        assert re.search(cause, said), said
    assert not any(agent.posted for end in ends.agents.values() for agent in end)


def unequal(ends: Ends, mode: str, sizes: Pair) -> None:
    """Assert that sizes of which none divides the other are refused."""
    case = Case(16, (Cache("layer", 16),), 4, 4, (Move((1, 2), (2, 3)),))
    cause = rf"tensor parallel size {max(sizes)} is not divisible by \w+ tensor parallel size {min(sizes)}"
    ends.exchange(mode, case, case, sizes, lambda exchange: refused(ends, exchange, case.moves[0], cause))


# How it is told.


def main() -> None:
    """Try all properties."""
    logging.getLogger("vllm").setLevel(logging.WARNING)
    ends, traits, told = Ends(), Counter[str](), dict[str, dict[str, Any]]()

    def tell() -> NoReturn:
        print(json.dumps({"groups": told, "traits": traits}))
        leave()

    def try_out(name: str, examples: int, strategy: st.SearchStrategy[Any], prove: Callable[..., None]) -> None:
        told[name] = {"tried": 0, "failed": None}
        known = any(group["failed"] for group in told.values())  # one that is made small is enough

        @seed(zlib.crc32(name.encode()))
        @settings(
            max_examples=examples,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            phases=[Phase.generate, *([] if known else [Phase.shrink])],
        )
        @given(strategy)
        def one(example: tuple[Any, ...]) -> None:
            told[name]["tried"] += 1
            try:
                prove(*example)
            except Stuck as error:  # each further try would wait as long
                told[name]["failed"] = f"{error}: {example!r}; {ends.said.causes}"
                tell()

        try:
            one()
        except Exception as error:
            told[name]["failed"] = "".join(traceback.format_exception(error)) + "\n".join(ends.said.causes)

    for mode in ("pull", "push"):
        # A request that has all its blocks cached is not registered for a push.
        least = 0 if mode == "pull" else 1
        for sizes in itertools.product(SIZES, SIZES):
            prove = partial(holds, ends, traits, mode, sizes)
            try_out(f"{mode}, TP {sizes[0]} to {sizes[1]}", EXAMPLES, st.tuples(cases(least)), prove)
        for what in OTHERS:
            drawn = st.tuples(st.tuples(*[st.sampled_from((1, 2))] * 2), unlike(what), st.booleans())
            try_out(f"{mode}, other {what}", UNLIKE, drawn, partial(holds_or_refused, ends, traits, mode))
        for sizes in UNEQUAL:
            try_out(f"{mode}, TP {sizes[0]} to {sizes[1]}", 1, st.just(()), partial(unequal, ends, mode, sizes))
    tell()


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main()
