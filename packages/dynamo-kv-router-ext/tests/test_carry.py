# SPDX-License-Identifier: Apache-2.0
"""One request through workers that answer, fail, refuse, hang and leave, with the real router and placer beside them.

`FakeFleet` stands for the workers, `FakeContext` and `FakeStream` for Dynamo's: what these do was seen of Dynamo 1.6.1.
"""

from __future__ import annotations

import array
import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from dynamo_kv_router_ext import (
    Health,
    HealthSettings,
    Placer,
    PrefixIndex,
    Role,
    Seat,
    StoreTier,
    Worker,
    _carry,
    hash_blocks,
    load_profile,
)
from dynamo_kv_router_ext._carry import Carrier
from dynamo_kv_router_ext._errors import BadRequest, Refused, SendError, WorkerError, interrupted, sort_out, to_client
from dynamo_kv_router_ext._records import Records
from dynamo_kv_router_ext._router import Router
from dynamo_kv_router_ext._types import Decision, Request

Chunk = dict[str, Any]
Script = Callable[[Chunk, "FakeContext"], AsyncIterator[Chunk]]


class FakeContext:
    """A request's context: stopped by whoever holds it, with contexts of its own for each leg."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stopped = asyncio.get_running_loop().create_future()
        self.legs: list[FakeContext] = []

    def id(self) -> str:
        return self.name

    def detached(self, name: str) -> FakeContext:
        self.legs.append(FakeContext(name))
        return self.legs[-1]

    def is_stopped(self) -> bool:
        return self.stopped.done()

    def stop_generating(self) -> None:
        if not self.stopped.done():
            self.stopped.set_result(True)

    def async_killed_or_stopped(self) -> asyncio.Future[bool]:
        told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.stopped.add_done_callback(lambda _: None if told.done() else told.set_result(True))
        return told


class FakeStream:
    """A worker's stream: it ends without an error as soon as its context is stopped."""

    def __init__(self, chunks: AsyncIterator[Chunk], context: FakeContext) -> None:
        self.chunks = chunks
        self.context = context

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Chunk:
        following: asyncio.Future[Chunk] = asyncio.ensure_future(anext(self.chunks))
        await asyncio.wait([following, self.context.stopped], return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            return following.result()
        following.cancel()
        raise StopAsyncIteration


class FakeFleet:
    """Workers that do as their scripts say. `sent` has each request that came: worker, rank, request, context."""

    block_size = 16

    def __init__(self, **scripts: Script) -> None:
        self.scripts = scripts
        self.split = any(name.startswith("p") for name in scripts) or any(name.startswith("d") for name in scripts)
        self.sent: list[tuple[Any, int, Chunk, FakeContext]] = []
        self.known: dict[Seat, tuple[int, int, int, int]] = {}
        self.asked: list[tuple[Any, str | None, Role]] = []
        self.servers: dict[str, tuple[str, int]] = {}
        self.index_error: Exception | None = None
        #: What `send` waits for, by worker.
        self.slow: dict[str, Awaitable[Any]] = {}

    async def send(self, worker: Any, rank: int, request: Chunk, context: FakeContext) -> AsyncIterator[Chunk]:
        self.sent.append((worker, rank, request, context))
        request.setdefault("routing", {})["dp_rank"] = rank  # as the real one does: it owns the request
        if worker in self.slow:
            await self.slow[worker]
        return FakeStream(self.scripts[worker](request, context), context)

    async def cached(self, tokens: Any, lora: str | None, role: Role) -> dict[Seat, tuple[int, int, int, int]]:
        self.asked.append((tokens, lora, role))
        if self.index_error is not None:
            raise self.index_error
        return {seat: blocks for seat, blocks in self.known.items() if str(seat.worker).startswith(role[0])}

    def bootstrap(self, worker: Any) -> tuple[str, int] | None:
        return self.servers.get(worker)

    def to(self, worker: str) -> list[Chunk]:
        """The requests that came to a worker."""
        return [request for name, _, request, _ in self.sent if name == worker]

    @property
    def order(self) -> list[str]:
        return [name for name, _, _, _ in self.sent]


class LoggingRouter(Router):
    """The router, with what it was told by name."""

    def __init__(self, placer: Placer) -> None:
        self.time = 100.0
        super().__init__(placer, Records(), clock=lambda: self.time)
        self.log: list[tuple[Any, ...]] = []
        self.requests: list[Request] = []
        #: Awaited by each `place`.
        self.asking: Callable[[], Awaitable[None]] | None = None

    async def place(self, request: Request, role: Role) -> Decision:
        self.requests.append(request)
        if self.asking is not None:
            await self.asking()
        decision = await super().place(request, role)
        self.log.append(("place", role, decision.worker))
        return decision

    def prefilled(self, id: str) -> None:
        self.log.append(("prefilled",))
        super().prefilled(id)

    def progress(self, id: str, tokens: int) -> None:
        self.log.append(("progress", tokens))
        super().progress(id, tokens)

    def finished(self, id: str) -> None:
        self.log.append(("finished",))
        super().finished(id)

    def cancelled(self, id: str, role: Role | None = None) -> None:
        self.log.append(("cancelled", role) if role is not None else ("cancelled",))
        super().cancelled(id, role)

    def failed(self, id: str, role: Role, reason: str) -> None:
        self.log.append(("failed", role, reason))
        super().failed(id, role, reason)

    def abort(self, role: Role, reason: str) -> None:
        """As `tick` does for a worker that stands still."""
        for id in list(self._aborts):
            self._abort(id, role, reason)


def setting(fleet: FakeFleet, *, store: StoreTier | None = None, **more: Any) -> tuple[Carrier, LoggingRouter]:
    """A carrier over a fleet, whose workers' names begin with their role's letter."""
    roles: dict[str, Role] = {"p": "prefill", "d": "decode", "b": "both"}
    health = Health(HealthSettings(max_ejected_share=0.0))
    index = PrefixIndex(fleet.block_size, store)
    router = LoggingRouter(Placer(load_profile("gb200-qwen3-32b-tp1"), block_size=16, health=health, index=index))
    for name in fleet.scripts:
        router.add_worker(Worker(name, roles[name[0]]))
    return Carrier(router, fleet, store=store, **more), router


def request(tokens: Any = None, **more: Any) -> Chunk:
    """A request as the frontend sends it."""
    return {
        "model": "m",
        "token_ids": list(range(100)) if tokens is None else tokens,
        "stop_conditions": {"max_tokens": 9, "min_tokens": 4, "stop": None, "ignore_eos": True},
        "sampling_options": {"n": None},
        "routing": {"priority": 2},
        **more,
    }


def reads(params: Any = "kv", cached: int | None = None) -> Script:
    """A prefill worker that reads the prompt."""

    async def script(request: Chunk, context: FakeContext) -> AsyncIterator[Chunk]:
        details = None if cached is None else {"cached_tokens": cached}
        yield {
            "token_ids": [7],
            "disaggregated_params": params,
            "completion_usage": {"prompt_tokens": 100, "prompt_tokens_details": details},
        }

    return script


def says(*chunks: Chunk, error: Exception | None = None, hang: bool = False) -> Script:
    """A worker that yields some chunks and then ends, raises or says no more."""

    async def script(request: Chunk, context: FakeContext) -> AsyncIterator[Chunk]:
        for chunk in chunks:
            yield {**chunk, "token_ids": [*chunk["token_ids"]]} if "token_ids" in chunk else dict(chunk)
            await asyncio.sleep(0)
        if hang:
            await asyncio.sleep(3600)
        if error is not None:
            raise error

    return script


def tokens(*ids: int, **more: Any) -> Chunk:
    return {"token_ids": list(ids), "index": 0, **more}


END = tokens(finish_reason="stop", completion_usage={"completion_tokens": 3})
ANSWER = says(tokens(1), tokens(2), tokens(3), END)
#: As Dynamo's client says them.
BROKE = ValueError("Unavailable: Stream ended before generation completed")
FULL = Exception("CapacityExhausted: Server overloaded: worker at capacity")
WRONG = ValueError('InvalidRequest: {"message":"no such thing","code":400}')


def play(scene: Coroutine[Any, Any, None]) -> None:
    """Run a scene to its end; nothing may be left running."""

    async def whole() -> None:
        await asyncio.wait_for(scene, 20)
        for _ in range(20):
            await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, left

    asyncio.run(whole())


async def collect(carrier: Carrier, what: Chunk | None = None, context: FakeContext | None = None) -> list[Chunk]:
    context = context if context is not None else FakeContext("c")
    return [chunk async for chunk in carrier.generate(what if what is not None else request(), context)]


def flat(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.get("token_ids") or ()]


def clean(carrier: Carrier, router: LoggingRouter) -> None:
    """Nothing is booked any more."""
    assert list(router.placer.requests()) == []
    assert carrier.running == 0
    assert router._aborts == {}


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0)


# The way of a request


def test_a_prompt_is_read_and_then_answered() -> None:
    """The prefill worker is asked for one token, the decoder gets its result and the client's own limits."""
    fleet = FakeFleet(p1=reads({"x": 1}, cached=32), d1=ANSWER)
    carrier, router = setting(fleet)
    what = request(agent_context={"session_id": "s"}, extra_args={"a": 1})

    async def scene() -> None:
        got = await collect(carrier, what)
        assert flat(got) == [1, 2, 3]
        assert got[-1] == END

    play(scene())
    before = request(agent_context={"session_id": "s"}, extra_args={"a": 1})
    assert what == before, "the frontend's request is left as it is"
    (read,), (answered,) = fleet.to("p1"), fleet.to("d1")
    assert read == {
        **before,
        "stop_conditions": {"max_tokens": 1, "min_tokens": None, "stop": None, "ignore_eos": True},
        "routing": {"priority": 2, "prefill_worker_id": "p1", "dp_rank": 0},
    }
    assert answered == {
        **before,
        "prefill_result": {"disaggregated_params": {"x": 1}, "prompt_tokens_details": {"cached_tokens": 32}},
        "routing": {"priority": 2, "prefill_worker_id": "p1", "dp_rank": 0},
    }
    assert [leg.name for leg in (fleet.sent[0][3], fleet.sent[1][3])] == ["c", "c"]
    assert [entry[0] for entry in router.log] == ["place", "prefilled", "place", "progress", "progress", "finished"]
    first, second = router.requests
    assert first.session == second.session == "s"
    assert first.output_tokens == 9
    assert first.tokens == 100
    assert (first.prefill_worker, second.prefill_worker) == (None, "p1")
    assert first.blocks == hash_blocks(range(100), 16)
    assert second.avoid == frozenset()
    clean(carrier, router)


def test_a_worker_of_both_roles_does_it_alone() -> None:
    fleet = FakeFleet(b1=ANSWER)
    carrier, router = setting(fleet)

    async def scene() -> None:
        assert flat(await collect(carrier)) == [1, 2, 3]

    play(scene())
    assert fleet.to("b1") == [{**request(), "routing": {"priority": 2, "dp_rank": 0}}]
    assert [entry[0] for entry in router.log] == ["place", "prefilled", "progress", "progress", "finished"]
    clean(carrier, router)


def test_packed_prompts_are_passed_on_as_they_are() -> None:
    fleet = FakeFleet(p1=reads(), d1=ANSWER)
    carrier, router = setting(fleet)
    packed = array.array("i", range(100)).tobytes()

    async def scene() -> None:
        await collect(carrier, request(packed))

    play(scene())
    assert fleet.to("p1")[0]["token_ids"] is fleet.to("d1")[0]["token_ids"] is packed
    assert fleet.asked[0][0] is packed
    assert router.requests[0].tokens == 100
    assert router.requests[0].blocks == hash_blocks(range(100), 16)


def test_adapters_and_salts_share_no_cache() -> None:
    fleet = FakeFleet(b1=ANSWER)
    carrier, router = setting(fleet)

    async def scene() -> None:
        for more in (
            {},
            {"routing": {"lora_name": "a"}},
            {"routing": {"lora_name": "b"}},
            {"extra_args": {"nvext": {"cache_salt": "a"}}},
            {"routing": {"lora_name": "a"}, "token_ids": list(range(100))},
        ):
            await collect(carrier, request(**more))

    play(scene())
    assert [lora for _, lora, _ in fleet.asked] == [None, "a", "b", None, "a"]
    hashes = [tuple(one.blocks) for one in router.requests]
    assert hashes[1] == hashes[4]
    assert len(set(hashes)) == 4


def test_a_prompt_without_tokens_is_placed_all_the_same() -> None:
    """Embeddings in place of tokens, or tokens that are none: what to say of it is the engine's."""
    fleet = FakeFleet(b1=ANSWER)
    carrier, router = setting(fleet)

    async def scene() -> None:
        for prompt in ([], None, [-1] * 40, b"12345"):
            what = request(prompt)
            what["token_ids"] = prompt
            assert flat(await collect(carrier, what)) == [1, 2, 3]

    play(scene())
    assert [one.tokens for one in router.requests] == [1, 1, 40, 1]


def test_what_the_index_knows_reaches_the_placer() -> None:
    fleet = FakeFleet(p1=reads(), p2=reads(), d1=ANSWER)
    fleet.known = {Seat("p2", 0): (6, 0, 0, 0), Seat("d1", 0): (2, 0, 0, 0)}
    carrier, router = setting(fleet)

    async def scene() -> None:
        await collect(carrier)
        fleet.index_error = RuntimeError("no answer")
        await collect(carrier)

    play(scene())
    assert router.requests[0].cached == {Seat("p2", 0): (6, 0, 0, 0)}
    assert router.requests[1].cached == {Seat("d1", 0): (2, 0, 0, 0)}
    assert router.requests[2].cached == {}, "an index that fails is no failure of the request"
    assert fleet.order[:2] == ["p2", "d1"]


# Before the first token


@pytest.mark.parametrize(
    "script",
    [
        says(error=BROKE),
        says(error=ValueError("Internal: RuntimeError: engine broke")),
        says(),
        says({"token_ids": [], "finish_reason": "error: out of memory"}),
        says({"token_ids": [], "finish_reason": {"error": "out of memory"}}),
    ],
    ids=["broke", "raises", "ends", "says-so", "says-so-in-json"],
)
@pytest.mark.parametrize("role", ["p", "d", "b"])
def test_another_worker_is_tried(script: Script, role: str) -> None:
    """The client sees nothing of it, and the worker's failure is held against it."""
    good = reads() if role == "p" else ANSWER
    fleet = FakeFleet(**{f"{role}1": script, f"{role}2": script, f"{role}3": good})
    others = {"p": {"d9": ANSWER}, "d": {"p9": reads()}, "b": {}}[role]
    fleet.scripts.update(others)
    fleet.split = role != "b"
    carrier, router = setting(fleet)
    name: Role = {"p": "prefill", "d": "decode", "b": "both"}[role]  # type: ignore[assignment]

    async def scene() -> None:
        assert flat(await collect(carrier)) == [1, 2, 3]

    play(scene())
    tried = [worker for worker in fleet.order if worker.startswith(role)]
    assert tried[-1] == f"{role}3"
    failures = [entry for entry in router.log if entry[0] == "failed"]
    assert len(failures) == len(tried) - 1
    assert all(entry[1] == name for entry in failures)
    assert len(set(tried)) == len(tried), "none is asked twice"
    clean(carrier, router)


def test_the_order_of_retries() -> None:
    """Each attempt avoids all that failed before, in one worker's role a fresh prefill comes with a new decoder."""
    fleet = FakeFleet(p1=reads(), d1=says(error=BROKE), d2=says(error=BROKE), d3=ANSWER)
    carrier, router = setting(fleet)

    async def scene() -> None:
        assert flat(await collect(carrier)) == [1, 2, 3]

    play(scene())
    decoders = [worker for worker in fleet.order if worker.startswith("d")]
    assert fleet.order[::2] == ["p1"] * len(decoders)
    avoided = [one.avoid for one in router.requests if one.prefill_worker is not None]
    assert avoided == [frozenset(decoders[:count]) for count in range(len(decoders))]
    names = [context.name for _, _, _, context in fleet.sent]
    assert names == [
        name for count in range(1, len(decoders) + 1) for name in ["c" if count == 1 else f"c-{count}"] * 2
    ]
    clean(carrier, router)


@pytest.mark.parametrize("server", [None, ("host", 1)], ids=["in turn", "both at once"])
def test_a_prompt_is_read_again_where_the_decoders_of_its_group_have_left(server: tuple[str, int] | None) -> None:
    """As in an upgrade: the last decoder of the old group goes while a prompt is read for it."""
    fleet = FakeFleet(p1=reads(), p2=reads(), d1=ANSWER, d2=ANSWER)
    carrier, router = setting(fleet)
    for name in fleet.scripts:
        router.remove_worker(name)
        role: Role = "prefill" if name[0] == "p" else "decode"
        router.add_worker(Worker(name, role, transfer_group="old" if name[1] == "1" else "new"))
    if server is not None:
        fleet.servers = {"p1": server, "p2": server}
    gone: list[str] = []

    async def leaves() -> None:
        if router.requests[-1].prefill_worker is not None and not gone:
            gone.append("d" + str(router.requests[-1].prefill_worker)[1])
            router.remove_worker(gone[0])

    router.asking = leaves

    async def scene() -> None:
        assert flat(await collect(carrier)) == [1, 2, 3]

    play(scene())
    assert [name for name in fleet.order if name[0] == "d"] == ["d2" if gone == ["d1"] else "d1"]
    assert not any(entry[0] == "failed" for entry in router.log)
    clean(carrier, router)


def test_attempts_are_bounded() -> None:
    pytest.importorskip("dynamo.llm")
    from dynamo.llm.exceptions import HttpError

    fleet = FakeFleet(**{f"b{count}": says(error=BROKE) for count in range(9)})
    carrier, router = setting(fleet, attempts=4)

    async def scene() -> None:
        with pytest.raises(HttpError) as caught:
            await collect(carrier)
        assert caught.value.code == 503

    play(scene())
    assert len(set(fleet.order)) == len(fleet.order) == 4
    clean(carrier, router)
    with pytest.raises(ValueError, match="attempts must be at least 1, not 0"):
        Carrier(router, fleet, attempts=0)


def test_a_full_worker_is_not_blamed() -> None:
    pytest.importorskip("dynamo.llm")
    from dynamo.llm.exceptions import HttpError

    async def full(request: Chunk, context: FakeContext) -> AsyncIterator[Chunk]:
        raise FULL
        yield {}

    fleet = FakeFleet(b1=full, b2=full)
    carrier, router = setting(fleet)

    async def scene() -> None:
        with pytest.raises(HttpError) as caught:
            await collect(carrier)
        assert caught.value.code == 529

    play(scene())
    assert sorted(set(fleet.order)) == ["b1", "b2"]
    assert [entry for entry in router.log if entry[0] == "failed"] == []
    assert ("cancelled", "both") in router.log
    clean(carrier, router)


@pytest.mark.parametrize("role", ["p", "d", "b"])
def test_a_bad_request_is_told_at_once(role: str) -> None:
    pytest.importorskip("dynamo.llm")
    from dynamo.llm.exceptions import InvalidArgument

    scripts = {"p1": reads(), "p2": reads(), "d1": ANSWER} if role != "b" else {}
    scripts[f"{role}1"] = scripts[f"{role}2"] = says(error=WRONG)
    fleet = FakeFleet(**scripts)
    carrier, router = setting(fleet)

    async def scene() -> None:
        with pytest.raises(InvalidArgument, match=r"^no such thing$"):
            await collect(carrier)

    play(scene())
    assert [worker for worker in fleet.order if worker.startswith(role)] in ([f"{role}1"], [f"{role}2"])
    assert [entry for entry in router.log if entry[0] == "failed"] == []
    clean(carrier, router)


def test_no_worker_at_all() -> None:
    pytest.importorskip("dynamo.llm")
    from dynamo.llm.exceptions import HttpError

    fleet = FakeFleet(p1=reads())
    carrier, router = setting(fleet)

    async def scene() -> None:
        with pytest.raises(HttpError, match="decode") as caught:
            await collect(carrier)
        assert caught.value.code == 503

    play(scene())
    clean(carrier, router)


@pytest.mark.parametrize(
    "failing", [{}, {"p1": says(error=BROKE)}, {"p1": says(error=FULL)}], ids=["none", "bad", "full"]
)
def test_without_a_prefill_worker_the_decoder_reads(failing: dict[str, Script]) -> None:
    """None lives, or the only one has failed the request already."""
    fleet = FakeFleet(**failing, d1=ANSWER)
    carrier, router = setting(fleet)

    async def scene() -> None:
        assert flat(await collect(carrier)) == [1, 2, 3]

    play(scene())
    assert fleet.order == [*failing, "d1"]
    (answered,) = fleet.to("d1")
    assert answered == {**request(), "routing": {"priority": 2, "dp_rank": 0}}
    clean(carrier, router)


@pytest.mark.parametrize("bootstrap", [False, True])
def test_a_prompt_that_no_decoder_can_fetch_any_more_is_read_elsewhere(bootstrap: bool) -> None:
    """As in an upgrade, when the last decoder of the old release leaves while a prompt is read."""
    fleet = FakeFleet(p1=reads(), d1=ANSWER, p2=reads(), d2=ANSWER)
    if bootstrap:
        fleet.servers = {"p1": ("h", 1), "p2": ("h", 1)}
    carrier, router = setting(fleet)
    for name in fleet.scripts:
        router.remove_worker(name)
        router.add_worker(Worker(name, "prefill" if name[0] == "p" else "decode", transfer_group=name[1]))
    asked = itertools.count(1)

    async def leave() -> None:
        if next(asked) == 2:
            router.remove_worker("d" + router.log[0][2][1])

    router.asking = leave
    got: list[Chunk] = []

    async def scene() -> None:
        got.extend(await collect(carrier))

    play(scene())
    assert flat(got) == [1, 2, 3]
    assert {name[1] for name in fleet.order[-2:]} != {router.log[0][2][1]}
    assert not [entry for entry in router.log if entry[0] == "failed"]
    clean(carrier, router)


def test_a_prefill_worker_that_hands_nothing_over() -> None:
    """The decoder is told nothing, and reads the prompt itself."""
    fleet = FakeFleet(p1=reads(None), d1=ANSWER)
    carrier, _ = setting(fleet)

    async def scene() -> None:
        assert flat(await collect(carrier)) == [1, 2, 3]

    play(scene())
    assert "prefill_result" not in fleet.to("d1")[0]


def test_a_worker_that_does_not_take_the_request() -> None:
    """The call itself fails, or hangs until the router gives the worker up."""
    fleet = FakeFleet(b1=ANSWER, b2=ANSWER, b3=ANSWER)
    carrier, router = setting(fleet)

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        refused = loop.create_future()
        refused.set_exception(Exception("Unavailable: TCP connection to 127.0.0.1:1 failed"))
        hanging = loop.create_future()
        turns = iter([refused, hanging])
        order = ["b1", "b2", "b3"]

        class Slow(dict[str, Awaitable[Any]]):
            def __contains__(self, worker: object) -> bool:
                self.turn = next(turns, None)
                return self.turn is not None

            def __getitem__(self, worker: str) -> Awaitable[Any]:
                assert self.turn is not None
                return self.turn

        fleet.slow = Slow()
        task = asyncio.ensure_future(collect(carrier))
        await until(lambda: len(fleet.sent) == 2)
        await asyncio.sleep(0.01)
        router.abort("both", "worker stands still")
        assert flat(await task) == [1, 2, 3]
        assert sorted(fleet.order) == order
        assert hanging.cancelled()

    play(scene())
    assert [entry[2] for entry in router.log if entry[0] == "failed"] == [
        "TCP connection to 127.0.0.1:1 failed",
        "worker stands still",
    ]
    clean(carrier, router)


@pytest.mark.parametrize("role", ["p", "d", "b"])
def test_a_worker_that_stands_still_before_the_first_token(role: str) -> None:
    good = reads() if role == "p" else ANSWER
    once = itertools.count()

    async def first_hangs(request: Chunk, context: FakeContext) -> AsyncIterator[Chunk]:
        if not next(once):
            await asyncio.sleep(3600)
        async for chunk in good(request, context):
            yield chunk

    scripts = {"p": {"d1": ANSWER}, "d": {"p1": reads()}, "b": {}}[role]
    fleet = FakeFleet(**scripts, **{f"{role}{n}": first_hangs for n in (8, 9)})
    carrier, router = setting(fleet)
    name: Role = {"p": "prefill", "d": "decode", "b": "both"}[role]  # type: ignore[assignment]

    async def scene() -> None:
        task = asyncio.ensure_future(collect(carrier))
        await until(lambda: any(worker[0] == role for worker in fleet.order))
        await asyncio.sleep(0.01)
        router.abort(name, "worker stands still")
        assert flat(await task) == [1, 2, 3]

    play(scene())
    tried = [worker for worker in fleet.order if worker[0] == role]
    assert len(set(tried)) == 2
    assert ("failed", name, "worker stands still") in router.log
    assert next(context for worker, _, _, context in fleet.sent if worker == tried[0]).is_stopped()
    clean(carrier, router)


# After it


@pytest.mark.parametrize("error", [BROKE, FULL, RuntimeError("odd")])
def test_after_the_first_token_the_frontend_is_asked_to_carry_on(error: Exception) -> None:
    """What was said is handed on first; nothing is tried here."""
    pytest.importorskip("dynamo.llm")
    from dynamo.llm.exceptions import Disconnected

    fleet = FakeFleet(
        p1=reads(), d1=says(tokens(1), tokens(2), error=error), d2=says(tokens(1), tokens(2), error=error)
    )
    carrier, router = setting(fleet)

    async def scene() -> None:
        got: list[Chunk] = []

        async def slow() -> None:
            async for chunk in carrier.generate(request(), FakeContext("c")):
                got.append(chunk)

        with pytest.raises(Disconnected):
            await slow()
        assert flat(got) == [1, 2]

    play(scene())
    assert len(fleet.order) == 2
    blamed = [entry for entry in router.log if entry[0] == "failed"]
    assert len(blamed) == (0 if error is FULL else 1)
    clean(carrier, router)


def test_a_worker_that_stands_still_after_the_first_token() -> None:
    pytest.importorskip("dynamo.llm")
    from dynamo.llm.exceptions import Disconnected

    fleet = FakeFleet(p1=reads(), d1=says(tokens(1), tokens(2), hang=True))
    carrier, router = setting(fleet)

    async def scene() -> None:
        got: list[Chunk] = []

        async def listen() -> None:
            async for chunk in carrier.generate(request(), FakeContext("c")):
                got.append(chunk)

        task = asyncio.ensure_future(listen())
        await until(lambda: flat(got) == [1, 2])
        router.abort("decode", "worker stands still")
        with pytest.raises(Disconnected, match="stands still"):
            await task

    play(scene())
    assert fleet.sent[1][3].is_stopped()
    assert ("failed", "decode", "worker stands still") in router.log
    clean(carrier, router)


def test_what_a_worker_says_of_a_failure_reaches_the_client() -> None:
    """In the middle of an answer it is passed on as it is, and held against the worker."""
    broken = tokens(finish_reason="error: out of memory")
    fleet = FakeFleet(p1=reads(), d1=says(tokens(1), broken))
    carrier, router = setting(fleet)

    async def scene() -> None:
        got = await collect(carrier)
        assert got[-1] == broken

    play(scene())
    assert ("failed", "decode", "out of memory") in router.log
    assert ("finished",) not in router.log
    clean(carrier, router)


def test_a_bad_request_found_late() -> None:
    pytest.importorskip("dynamo.llm")
    from dynamo.llm.exceptions import InvalidArgument

    fleet = FakeFleet(b1=says(tokens(1), tokens(2), tokens(3), error=WRONG))
    carrier, router = setting(fleet)

    async def scene() -> None:
        with pytest.raises(InvalidArgument, match="no such thing"):
            await collect(carrier)

    play(scene())
    clean(carrier, router)


# The client goes


@pytest.mark.parametrize("step", ["placing", "sending", "reading", "placing again", "waiting", "answering"])
def test_a_client_that_goes(step: str) -> None:
    """At any point: its bookings end at once, the worker is told, and nothing counts against it."""
    wait = says(hang=True)
    fleet = FakeFleet(
        p1=wait if step == "reading" else reads(),
        d1=wait if step == "waiting" else says(tokens(1), tokens(2), hang=True),
    )
    carrier, router = setting(fleet)

    async def scene() -> None:
        context = FakeContext("c")
        open_gate = asyncio.Event()
        places = itertools.count(1)

        async def ask() -> None:
            if next(places) == {"placing": 1, "placing again": 2}.get(step):
                await open_gate.wait()

        router.asking = ask
        if step == "sending":
            fleet.slow["p1"] = asyncio.get_running_loop().create_future()
        got: list[Chunk] = []

        async def listen() -> None:
            async for chunk in carrier.generate(request(), context):
                got.append(chunk)

        task = asyncio.ensure_future(listen())
        sent = {"placing": 0, "sending": 1, "reading": 1, "placing again": 1, "waiting": 2, "answering": 2}[step]
        await until(lambda: len(fleet.sent) == sent)
        await until(lambda: len(router.requests) == (2 if step == "placing again" else max(sent, 1)))
        await asyncio.sleep(0.01)
        assert bool(flat(got)) == (step == "answering")
        context.stop_generating()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert list(router.placer.requests()) == [], "at once"
        assert all(leg.is_stopped() for leg in context.legs[-1:]) or step == "placing again"
        open_gate.set()
        await task

    play(scene())
    assert [entry for entry in router.log if entry[0] in ("failed", "finished")] == []
    assert router.log[-1] == ("cancelled",)
    clean(carrier, router)


def test_a_generator_that_is_closed() -> None:
    """Dynamo closes it at a `yield`, or never."""
    fleet = FakeFleet(b1=says(tokens(1), tokens(2), hang=True))
    carrier, router = setting(fleet)

    async def scene() -> None:
        context = FakeContext("c")
        stream = carrier.generate(request(), context)
        assert flat([await anext(stream)])
        await stream.aclose()  # type: ignore[attr-defined]
        assert context.legs[0].is_stopped()

    play(scene())
    assert router.log[-1] == ("cancelled",)
    clean(carrier, router)


def test_a_stop_sequence_ends_a_request_well() -> None:
    """The frontend finds it and wants no more; its answer counts as one."""
    fleet = FakeFleet(b1=says(tokens(1), tokens(2), hang=True))
    carrier, router = setting(fleet)

    async def scene() -> None:
        context = FakeContext("c")
        what = request(stop_conditions={"max_tokens": 9, "stop": ["."]})
        async for chunk in carrier.generate(what, context):
            if 2 in chunk["token_ids"]:
                context.stop_generating()

    play(scene())
    assert [entry[0] for entry in router.log[-2:]] == ["progress", "finished"]
    assert router.log[-2] == ("progress", 2)
    clean(carrier, router)


def test_two_requests_of_one_name() -> None:
    """A client may name its requests: each is booked, and ends by itself."""
    fleet = FakeFleet(b1=says(tokens(1), hang=True))
    carrier, router = setting(fleet)

    async def scene() -> None:
        contexts = [FakeContext("same"), FakeContext("same")]
        streams = [carrier.generate(request(), context) for context in contexts]
        for stream in streams:
            await anext(stream)
        assert len(list(router.placer.requests())) == carrier.running == 2
        contexts[1].stop_generating()
        await asyncio.sleep(0.01)
        assert list(router.placer.requests()) == [router.key("same")]
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]

    play(scene())
    clean(carrier, router)


def test_a_request_that_was_left_takes_nothing_from_the_next_one_of_its_name() -> None:
    """Dynamo may let go of what a client has left much later."""
    pytest.importorskip("dynamo.llm")
    fleet = FakeFleet(b1=says(tokens(1), hang=True))
    carrier, router = setting(fleet)

    async def scene() -> None:
        contexts = [FakeContext("same"), FakeContext("same")]
        streams = [carrier.generate(request(), context) for context in contexts]
        await anext(streams[0])
        contexts[0].stop_generating()
        await until(lambda: not router.placer.requests())
        await anext(streams[1])
        await streams[0].aclose()  # type: ignore[attr-defined]
        assert carrier.running == 1
        router.abort("both", "it stands still")
        with pytest.raises(Exception, match="it stands still"):
            await anext(streams[1])

    play(scene())
    clean(carrier, router)


# Bootstrap: both legs at once


async def _bootstrapped(request: Chunk, context: FakeContext) -> AsyncIterator[Chunk]:
    yield {"token_ids": [], "disaggregated_params": request["bootstrap_info"]}
    await asyncio.sleep(0.01)


def test_bootstrap_sends_both_legs_at_once() -> None:
    gate = asyncio.Event()

    async def answers(request: Chunk, context: FakeContext) -> AsyncIterator[Chunk]:
        await gate.wait()
        async for chunk in ANSWER(request, context):
            yield chunk

    async def reading(request: Chunk, context: FakeContext) -> AsyncIterator[Chunk]:
        yield {"token_ids": [], "disaggregated_params": request["bootstrap_info"]}
        await until(lambda: len(fleet.sent) == 2)
        gate.set()

    fleet = FakeFleet(p1=reading, d1=answers)
    fleet.servers["p1"] = ("host", 77)
    carrier, router = setting(fleet)

    async def scene() -> None:
        assert flat(await collect(carrier)) == [1, 2, 3]

    play(scene())
    (read,), (answered,) = fleet.to("p1"), fleet.to("d1")
    info = read["bootstrap_info"]
    assert info == answered["bootstrap_info"]
    assert (info["bootstrap_host"], info["bootstrap_port"]) == ("host", 77)
    assert 0 <= info["bootstrap_room"] < 2**63
    assert len(info["handoff_id"]) == 16
    assert read["stop_conditions"]["max_tokens"] == 1
    assert answered["stop_conditions"]["max_tokens"] == 9
    assert "prefill_result" not in answered
    assert [entry[:2] for entry in router.log[:3]] == [("place", "prefill"), ("place", "decode"), ("prefilled",)]
    assert router.log.count(("prefilled",)) == 1
    clean(carrier, router)


def test_bootstrap_prefill_fails_while_the_decoder_waits() -> None:
    """The decoder would wait for ever: it is stopped, and not blamed."""
    once = itertools.count()

    async def fails_once(request: Chunk, context: FakeContext) -> AsyncIterator[Chunk]:
        yield {"token_ids": [], "disaggregated_params": request["bootstrap_info"]}
        await asyncio.sleep(0.01)
        if not next(once):
            raise BROKE

    decoding = itertools.count()

    async def waits_once(request: Chunk, context: FakeContext) -> AsyncIterator[Chunk]:
        if not next(decoding):
            await asyncio.sleep(3600)
        async for chunk in ANSWER(request, context):
            yield chunk

    fleet = FakeFleet(p1=fails_once, p2=fails_once, d1=waits_once)
    fleet.servers = {"p1": ("a", 1), "p2": ("b", 2)}
    carrier, router = setting(fleet)

    async def scene() -> None:
        assert flat(await collect(carrier)) == [1, 2, 3]

    play(scene())
    assert fleet.order[1::2] == ["d1", "d1"]
    assert set(fleet.order[::2]) == {"p1", "p2"}
    rooms = [one["bootstrap_info"]["bootstrap_room"] for one in fleet.to("d1")]
    assert rooms[0] != rooms[1]
    assert [entry[1] for entry in router.log if entry[0] == "failed"] == ["prefill"]
    assert ("cancelled", "decode") in router.log
    assert fleet.sent[1][3].is_stopped()
    clean(carrier, router)


def test_bootstrap_decoder_fails_while_the_prompt_is_read() -> None:
    fleet = FakeFleet(p1=says({"token_ids": []}, hang=True), d1=says(error=BROKE), d2=says(error=BROKE))
    fleet.servers = {"p1": ("a", 1)}
    carrier, router = setting(fleet, attempts=2)
    pytest.importorskip("dynamo.llm")
    from dynamo.llm.exceptions import HttpError

    async def scene() -> None:
        with pytest.raises(HttpError):
            await collect(carrier)

    play(scene())
    assert sorted(fleet.order) == ["d1", "d2", "p1", "p1"], "the prefill worker did nothing wrong"
    assert [entry[1] for entry in router.log if entry[0] == "failed"] == ["decode", "decode"]
    assert all(context.is_stopped() for worker, _, _, context in fleet.sent if worker == "p1")
    clean(carrier, router)


def test_bootstrap_both_legs_fail_at_once() -> None:
    """Only the prefill worker is blamed, and the decoder's booking is not forgotten."""

    async def fails(request: Chunk, context: FakeContext) -> AsyncIterator[Chunk]:
        if not gate.is_set():
            await until(lambda: len(fleet.sent) == 2)
            await asyncio.sleep(0.01)
            gate.set()
            raise BROKE
        async for chunk in ANSWER(request, context):
            yield chunk

    async def decoder(request: Chunk, context: FakeContext) -> AsyncIterator[Chunk]:
        if not gate.is_set():
            await gate.wait()
            raise BROKE
        async for chunk in ANSWER(request, context):
            yield chunk

    gate = asyncio.Event()
    fleet = FakeFleet(p1=fails, d1=decoder)
    fleet.servers = {"p1": ("a", 1)}
    carrier, router = setting(fleet)

    async def scene() -> None:
        assert flat(await collect(carrier)) == [1, 2, 3]

    play(scene())
    assert [entry[1] for entry in router.log if entry[0] == "failed"] == ["prefill"]
    clean(carrier, router)


def test_bootstrap_with_one_prefill_worker_left() -> None:
    """A decoder that waits for a bootstrap cannot read by itself: the only prefill worker is asked again."""
    once = itertools.count()

    async def fails_once(request: Chunk, context: FakeContext) -> AsyncIterator[Chunk]:
        if not next(once):
            raise BROKE
        yield {"token_ids": []}

    fleet = FakeFleet(p1=fails_once, d1=ANSWER)
    fleet.servers = {"p1": ("a", 1)}
    carrier, router = setting(fleet)

    async def scene() -> None:
        await collect(carrier)

    play(scene())
    assert fleet.order[-2:] == ["p1", "d1"]
    clean(carrier, router)


# What the client gets


def test_engine_data_names_the_workers() -> None:
    fleet = FakeFleet(p1=reads(), d1=says(tokens(1, engine_data={"a": 1}), tokens(2), END))
    carrier, _ = setting(fleet)
    asked = request(extra_args={"nvext": {"extra_fields": ["worker_id", "engine_data"]}})

    async def scene() -> None:
        first, *others = await collect(carrier, asked)
        assert first["engine_data"] == {
            "a": 1,
            "router": {"prefill_worker": "p1", "decode_worker": "d1", "replica": 0, "note": ""},
        }
        assert not any("engine_data" in chunk for chunk in others)
        assert "router" not in (await collect(carrier))[0]["engine_data"]

    play(scene())


def test_engine_data_of_the_engine_keeps_the_workers_names() -> None:
    """For an answer that is not streamed the frontend keeps the last `engine_data` alone."""
    end = {**END, "engine_data": {"kv_cache_hit": 3}}
    fleet = FakeFleet(p1=reads(), d1=says(tokens(1), tokens(2), end))
    carrier, _ = setting(fleet)
    asked = request(extra_args={"nvext": {"extra_fields": ["engine_data"]}})

    async def scene() -> None:
        got = await collect(carrier, asked)
        names = got[0]["engine_data"]["router"]
        assert names["decode_worker"] == "d1"
        assert got[-1]["engine_data"] == {"kv_cache_hit": 3, "router": names}
        assert [chunk for chunk in got[1:-1] if "engine_data" in chunk] == []

    play(scene())


def test_a_client_that_reads_slowly_says_nothing_of_its_worker() -> None:
    """The router goes on being told what the worker generates, or the worker seems to stand still."""
    seen: list[int] = []

    async def script(request: Chunk, context: FakeContext) -> AsyncIterator[Chunk]:
        for number in range(20):
            yield tokens(number)
            router.time += 1.0
            await asyncio.sleep(0)
        seen.append(20)
        await asyncio.sleep(3600)

    carrier, router = setting(FakeFleet(b1=script))

    async def scene() -> None:
        stream = carrier.generate(request(), FakeContext("c"))
        await anext(stream)
        await until(lambda: seen)
        assert router.log[-1] == ("progress", 20)
        await stream.aclose()  # type: ignore[attr-defined]

    play(scene())
    clean(carrier, router)


def test_several_answers_to_one_prompt_are_generated_at_a_time() -> None:
    """So what is learnt of a step counts the tokens of one of them."""
    script = says(*({"token_ids": [n], "index": index} for n in range(5) for index in range(3)), END)
    carrier, router = setting(FakeFleet(b1=script))
    play(_all(carrier))
    assert router.log[-2:] == [("progress", 5), ("finished",)]


async def _all(carrier: Carrier) -> None:
    await collect(carrier)


def test_progress_is_told_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_carry, "_PACE_S", 0.0)
    fleet = FakeFleet(b1=says(*(tokens(n) for n in range(40)), END))
    carrier, router = setting(fleet)

    async def scene() -> None:
        async for _ in carrier.generate(request(), FakeContext("c")):
            router.time += 0.26

    play(scene())
    told = [entry[1] for entry in router.log if entry[0] == "progress"]
    assert told[0] == 1
    assert told[-1] == 40
    assert len(told) == 12, told  # at once, after every fourth chunk, and at the end


PLAIN = st.fixed_dictionaries(
    {"token_ids": st.lists(st.integers(0, 9), max_size=3)},
    optional={
        "index": st.sampled_from([0, 1, None]),
        "output_type": st.sampled_from(["text", "text", "other", None]),
        "text": st.none(),
        "finish_reason": st.none(),
    },
)
#: What else a chunk may hold; values that are false count as much as others.
MORE: Chunk = {
    "text": ["", "a"],
    "log_probs": [[], [-0.5]],
    "completion_usage": [{}, {"completion_tokens": 3, "prompt_tokens_details": None}],
    "engine_data": [{}, {"a": 1}],
    "finish_reason": ["", "stop"],
    "unheard_of": [0, 0.0, False, [], "x"],
}
FULLER = st.builds(
    lambda plain, name, pick: {**plain, name: MORE[name][pick % len(MORE[name])]},
    PLAIN,
    st.sampled_from(sorted(MORE)),
    st.integers(0, 4),
)


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    chunks=st.lists(st.one_of(PLAIN, PLAIN, FULLER), min_size=1, max_size=30),
    pauses=st.lists(st.integers(0, 2), min_size=30, max_size=30),
    slowness=st.lists(st.integers(0, 3), min_size=30, max_size=30),
    pace=st.sampled_from([0.0, 0.0, 0.001]),
)
def test_merging_loses_and_reorders_nothing(
    chunks: list[Chunk], pauses: list[int], slowness: list[int], pace: float
) -> None:
    """Whatever the timing: chunks with more than tokens arrive as they are, and the tokens between them too."""
    hypothesis.assume(any(chunk["token_ids"] for chunk in chunks))
    copies = [{**chunk, "token_ids": [*chunk["token_ids"]]} for chunk in chunks]

    async def script(request: Chunk, context: FakeContext) -> AsyncIterator[Chunk]:
        for chunk, pause in zip(copies, pauses, strict=False):
            for _ in range(pause):
                await asyncio.sleep(0)
            yield chunk

    async def scene() -> None:
        carrier, _ = setting(FakeFleet(b1=script))
        got: list[Chunk] = []
        turns = itertools.cycle(slowness)
        async for chunk in carrier.generate(request(), FakeContext("c")):
            got.append({**chunk, "token_ids": [*chunk["token_ids"]]})
            for _ in range(next(turns)):
                await asyncio.sleep(0)
        assert _events(got) == _events(chunks)
        assert len(got) <= len(chunks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_carry, "_PACE_S", pace)
        play(scene())


def _events(chunks: list[Chunk]) -> list[Any]:
    """A stream in which merging makes no difference: each token by itself with its index, other chunks whole."""
    events: list[Any] = []
    for chunk in chunks:
        if any(value is not None for name, value in chunk.items() if name not in ("token_ids", "index", "output_type")):
            events.append(chunk)
        else:
            events += [(token, chunk.get("index"), chunk.get("output_type")) for token in chunk["token_ids"]]
    return events


def test_the_first_token_waits_for_none_and_the_others_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes sooner than the pace is handed on together."""
    monkeypatch.setattr(_carry, "_PACE_S", 3600.0)
    gate = asyncio.Event()

    async def script(request: Chunk, context: FakeContext) -> AsyncIterator[Chunk]:
        yield tokens(0)
        await gate.wait()
        for number in range(1, 50):
            yield tokens(number)
        yield END

    carrier, _ = setting(FakeFleet(b1=script))

    async def scene() -> None:
        got: list[Chunk] = []
        async for chunk in carrier.generate(request(), FakeContext("c")):
            got.append(chunk)
            gate.set()
            monkeypatch.setattr(_carry, "_PACE_S", 0.05)
        assert [len(chunk["token_ids"]) for chunk in got] == [1, 49, 0]

    play(scene())


#: A chunk as Dynamo's vLLM workers send it, and one of its mock engines.
VLLM: Chunk = {"index": 0}
MOCKER: Chunk = dict.fromkeys(("tokens", "text", "cum_log_probs", "log_probs", "top_logprobs", "index"))
MOCKER |= {"output_type": "text", "finish_reason": None}


@pytest.mark.parametrize("fields", [VLLM, MOCKER])
def test_chunks_that_wait_are_merged(fields: Chunk) -> None:
    fleet = FakeFleet(b1=says(*({"token_ids": [n], **fields} for n in range(50)), END))
    carrier, _ = setting(fleet)

    async def scene() -> None:
        got: list[Chunk] = []
        async for chunk in carrier.generate(request(), FakeContext("c")):
            got.append(chunk)
            await asyncio.sleep(0.01)
        assert flat(got) == list(range(50))
        assert len(got) < 10

    play(scene())


# The second tier


def test_what_was_read_is_in_the_store() -> None:
    """Of a prompt that one worker has read, another expects all from the store; if it is not there, no more."""
    store = StoreTier(fresh_s=60.0)
    fleet = FakeFleet(p1=reads(), d1=ANSWER)
    fleet.known = {Seat("p1", 0): (1, 0, 0, 0)}
    carrier, router = setting(fleet, store=store)
    prompt = list(range(16_000))
    blocks = hash_blocks(prompt, 16)

    async def scene() -> None:
        await collect(carrier, request(prompt))
        assert router.requests[0].cached == {Seat("p1", 0): (1, 0, 0, 0)}
        await collect(carrier, request(prompt))
        assert router.requests[2].cached == {Seat("p1", 0): (1, 0, 0, 999), Seat("d1", 0): (0, 0, 0, 1000)}
        assert router.requests[3].cached == {}, "a decoder pulls from the prefill worker"
        fleet.scripts["p1"] = reads(cached=4000)
        await collect(carrier, request(prompt))

    play(scene())
    there = store.run(blocks, router.now())
    assert there[:250].all()
    assert not there[250:999].any()


# What errors mean


@pytest.mark.parametrize(
    ("error", "kind", "status", "message"),
    [
        (BROKE, WorkerError, 503, "Stream ended before generation completed"),
        (Exception("Unavailable: TCP connection to h failed"), WorkerError, 503, "TCP connection to h failed"),
        (Exception("DeadlineExceeded: TCP request to h timed out"), WorkerError, 504, "TCP request to h timed out"),
        (ValueError("Internal: RuntimeError: broke"), WorkerError, 500, "RuntimeError: broke"),
        (ValueError("Cancelled: it is"), WorkerError, 500, "it is"),
        (ValueError('Internal: {"message":"m","code":500}'), WorkerError, 500, "m"),
        (ValueError('Internal: {"message":"m"}'), WorkerError, 500, '{"message":"m"}'),
        (RuntimeError("odd"), WorkerError, 500, "odd"),
        (RuntimeError(), WorkerError, 500, "RuntimeError()"),
        (FULL, Refused, 529, "Server overloaded: worker at capacity"),
        (ValueError('RateLimited: {"message":"m","code":429}'), Refused, 429, "m"),
        (ValueError('Unavailable: {"message":"m","code":503}'), Refused, 503, "m"),
        (Exception("Unavailable: instance_id=1 not found for e"), Refused, 503, "instance_id=1 not found for e"),
        (ValueError("InvalidRequest: ValueError: top_p"), BadRequest, 400, "ValueError: top_p"),
        (ValueError('NotFound: {"message":"m","code":404}'), BadRequest, 404, "m"),
        (ValueError('InvalidRequest: {"message":"m","code":422}'), BadRequest, 422, "m"),
        (Refused("r"), Refused, 503, "r"),
    ],
)  # fmt: skip
def test_errors_are_sorted_out(error: Exception, kind: type[SendError], status: int, message: str) -> None:
    found = sort_out(error)
    assert (type(found), found.status, str(found)) == (kind, status, message)


def test_errors_in_dynamos_words() -> None:
    exceptions = pytest.importorskip("dynamo.llm.exceptions")
    assert type(sort_out(exceptions.InvalidArgument("m"))) is BadRequest
    for status in (400, 422):
        wrong = to_client(BadRequest("m", status))
        assert type(wrong) is exceptions.InvalidArgument
        assert str(wrong) == "m"
    for error, code in (
        (BadRequest("m", 404), 404),
        (Refused("m"), 503),
        (Refused("m", 529), 529),
        (WorkerError("m"), 500),
    ):
        told = to_client(error)
        assert type(told) is exceptions.HttpError
        assert getattr(told, "code", None) == code
    assert type(interrupted("m")) is exceptions.Disconnected
