# SPDX-License-Identifier: Apache-2.0
"""Replicas of the router: who owns a session, and what each carries, known to all.

Each replica serves two endpoints, `sync` and `decide`, and calls those of its peers, which Dynamo's discovery lists.

`sync` is a stream without end. It starts with a snapshot (what that replica carries, whose KV is where, what was said
of workers from outside), and goes on with batches of events, and a heartbeat. While it lasts, the peer's bookings are
kept here under ids that start with the peer's name. When it breaks or is silent, they go at once; when it is opened
again, its snapshot stands for all that was missed. So nothing is ever replayed, and no store is needed.

`decide` asks a session's owner where a turn shall be generated. The owner books it at once, and drops that again if the
replica that asked does not confirm it by its own event: what the replica that carries a request says is what counts.

A frame is `{"version": 1, "body": TEXT}`, the text a JSON document. What a reader does not know it ignores: a field, an
event. What could not be read so has another version, and a replica of another version is no peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ._candidates import Candidates
from ._types import (
    ROLES,
    Booked,
    Decision,
    NoWorkerError,
    Request,
    Role,
    Seat,
    Terms,
    WorkerId,
)

if TYPE_CHECKING:
    from ._router import Router

__all__ = ["VERSION", "Cancelled", "Client", "Failed", "Finished", "Placed", "Prefilled", "Progress", "Replicas"]
__all__ += ["Verdict", "join", "owner"]

_log = logging.getLogger(__name__)

#: Of the frames; another one is not read.
VERSION = 1
#: The least seconds between two frames of a stream, and the most.
_BATCH_S = 0.02
_HEARTBEAT_S = 0.5
#: A stream that is silent for so long is given up, seconds.
_SILENT_S = 2.5
#: If this replica itself was held up for so long, silence says nothing of its peers.
_GAP_S = 1.5
#: The owner of a session has so long to answer, seconds.
_ASK_S = 0.25
#: What the owner booked for another replica is dropped unless that replica has said so itself within this time.
_CONFIRM_S = 2.5
#: Seconds until a broken stream is opened again: the first, the longest.
_RETRY_S = (0.5, 4.0)
#: A peer that leaves so many bytes of events unread loses its stream.
_UNREAD_BYTES = 8 << 20
#: Session bindings in a snapshot, and in one frame of it.
_SESSIONS = 20_000
_SESSIONS_FRAME = 1_000

_Worker = int | str


class Client(Protocol):
    """What is used of a Dynamo client of an endpoint."""

    def instance_ids(self) -> list[int]:
        """The instances that discovery lists."""
        ...

    def direct(self, request: Any, instance_id: int, *, annotated: bool) -> Awaitable[AsyncIterator[Any]]:
        """Call one of them."""
        ...


# What the replica that carries a request says of it


class Placed(msgspec.Struct, array_like=True, frozen=True, tag="placed"):
    """It is booked. `turn` counts the placements of that replica."""

    booked: Booked
    turn: int


class Prefilled(msgspec.Struct, array_like=True, frozen=True, tag="prefilled"):
    """Its prompt has been read."""

    id: str


class Progress(msgspec.Struct, array_like=True, frozen=True, tag="progress"):
    """So many tokens have been generated."""

    id: str
    tokens: int


class Finished(msgspec.Struct, array_like=True, frozen=True, tag="finished"):
    """It is through."""

    id: str


class Cancelled(msgspec.Struct, array_like=True, frozen=True, tag="cancelled"):
    """It is over, in that role or at all, and says nothing of its workers."""

    id: str
    role: Role | None = None


class Failed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    """The worker failed it in that role."""

    id: str
    role: Role
    worker: _Worker
    reason: str


class Verdict(msgspec.Struct, array_like=True, frozen=True, tag="verdict"):
    """What a source outside says of a worker."""

    worker: _Worker
    source: str
    out: bool
    #: Seconds that it still holds.
    left_s: float
    #: When it was said, seconds since the epoch: of a source's words the last one counts.
    at: float
    reason: str


Event = Placed | Prefilled | Progress | Finished | Cancelled | Failed | Verdict


class _Snapshot(msgspec.Struct):
    """What a replica knows that its peers cannot see by themselves; the sessions come in the frames after it."""

    placed: list[msgspec.Raw]
    verdicts: list[msgspec.Raw]


class _Batch(msgspec.Struct, omit_defaults=True):
    """The body of a frame of `sync`; without anything in it, it is a heartbeat."""

    events: list[msgspec.Raw] = []
    snapshot: _Snapshot | None = None
    #: Session, worker, rank, tokens of its KV there, seconds since it was used.
    sessions: list[tuple[str, _Worker, int, int, float]] = []


class _Ask(msgspec.Struct, omit_defaults=True):
    """The body of a question to `decide`."""

    id: str
    role: Role
    turn: int
    tokens: int
    blocks: list[int] = []
    session: str | None = None
    output_tokens: int | None = None
    prefill_worker: _Worker | None = None
    cached: list[tuple[_Worker, int, int, int, int, int]] | None = None
    avoid: list[_Worker] = []


class _Answer(msgspec.Struct, omit_defaults=True):
    """The body of its answer."""

    booked: Booked
    terms: Terms
    fetch_tokens: int
    note: str
    #: None stands for no other candidate.
    runner_up_s: float | None
    candidates: bytes = b""


_encode = msgspec.json.Encoder().encode
_read_event = msgspec.json.Decoder(Event).decode
_read_batch = msgspec.json.Decoder(_Batch).decode
_read_ask = msgspec.json.Decoder(_Ask).decode
_read_answer = msgspec.json.Decoder(_Answer).decode


class _UnreadableError(ValueError):
    """The other side speaks another version."""


def _frame(body: Any) -> dict[str, Any]:
    return {"version": VERSION, "body": _encode(body).decode()}


def _body(frame: Any) -> str:
    version = frame.get("version") if isinstance(frame, dict) else None
    if version != VERSION:
        raise _UnreadableError(f"its frames have version {version!r}, and {VERSION} is what is understood here")
    body = frame.get("body")
    if not isinstance(body, str):
        raise ValueError(f"it gave no answer: {frame.get('error')!r}")
    return body


def owner(session: str, replicas: Iterable[int]) -> int:
    """Return which of the replicas owns a session: the one with the highest hash of both (rendezvous hashing).

    When a replica goes, only its sessions get another owner, and each of the others gets a part of them.
    """
    name = session.encode(errors="surrogatepass")
    return max(replicas, key=lambda one: (hashlib.blake2b(name + one.to_bytes(8, "big"), digest_size=8).digest(), one))


class _Feed:
    """Events that wait for one peer's next frame."""

    def __init__(self) -> None:
        self.events: list[msgspec.Raw] = []
        self.bytes = 0
        self.wake = asyncio.Event()
        self.closed = False

    def add(self, event: msgspec.Raw, size: int) -> None:
        if self.closed:
            return
        self.events.append(event)
        self.bytes += size
        if self.bytes > _UNREAD_BYTES:
            self.close()
        self.wake.set()

    def take(self) -> list[msgspec.Raw]:
        events, self.events, self.bytes = self.events, [], 0
        self.wake.clear()
        return events

    def close(self) -> None:
        self.closed = True
        self.events.clear()
        self.wake.set()


class _Link:
    """One stream from a peer; a peer that is found again has another one."""

    def __init__(self, now: float) -> None:
        self.task: asyncio.Task[None] | None = None
        #: When it last said something; when it was opened, at first.
        self.heard_at = now
        #: Its snapshot is there.
        self.synced = False
        #: It owed an answer, and has said nothing since.
        self.mute = False


class _Peer:
    """Another replica, and what is booked here in its name."""

    def __init__(self, replica: int) -> None:
        self.replica = replica
        self.link: _Link | None = None
        self.retry_at = -math.inf
        self.retry_s = _RETRY_S[0]
        self.unreadable = False
        #: Ids that it carries, with the turn of the placement in each role.
        self.held: dict[str, dict[Role, int]] = {}
        #: Those of them whose worker is not known here yet.
        self.waiting: dict[tuple[str, Role], Booked] = {}
        #: What was decided here for it, until when that is kept without its word.
        self.unconfirmed: dict[tuple[str, Role], float] = {}


class Replicas:
    """This replica's peers.

    Parameters:
        replica: this replica's name: its instance id.
        router: the router of this replica.
        sync: a client of all replicas' `sync`.
        decide: the same of `decide`.
    """

    def __init__(self, replica: int, router: Router, sync: Client, decide: Client) -> None:
        self.replica = replica
        self._router = router
        self._sync = sync
        self._decide = decide
        self._peers: dict[int, _Peer] = {}
        self._feeds: dict[int, _Feed] = {}
        self._checked_at = -math.inf
        self._serving: list[asyncio.Future[Any]] = []
        self._endpoints: list[Any] = []

    # What the router asks

    def live(self) -> list[int]:
        """This replica, and the peers whose streams run."""
        return [self.replica, *(p.replica for p in self._peers.values() if p.link is not None and p.link.synced)]

    async def ask(self, request: Request, role: Role, turn: int) -> Decision | None:
        """Have the request's session's owner decide, and book what it says; None: it is for this replica to decide."""
        if request.session is None:
            return None
        name = owner(request.session, self.live())
        peer = self._peers.get(name)
        link = peer.link if peer is not None else None
        if link is None or link.mute:
            return None
        question = _Ask(
            id=request.id,
            role=role,
            turn=turn,
            tokens=request.tokens,
            blocks=list(request.blocks),
            session=request.session,
            output_tokens=request.output_tokens,
            prefill_worker=request.prefill_worker,  # type: ignore[arg-type]  # Dynamo's are numbers
            avoid=list(request.avoid),  # type: ignore[arg-type]
        )
        if request.cached is not None:
            question.cached = [(s.worker, s.rank, *counts) for s, counts in request.cached.items()]  # type: ignore[misc]
        answer: Any = None
        try:
            answer = await asyncio.wait_for(self._answer(name, _frame(question)), _ASK_S)
            told = _read_answer(_body(answer))
        except Exception as error:
            if answer is None:
                # It may be gone, or stand still: nobody else waits for it until it has said something.
                link.mute = True
            _log.debug("replica %x did not decide for %s: %r", name, request.id, error)
            return None
        booked, placer = told.booked, self._router.placer
        if booked.id != request.id or booked.role != role:
            return None
        if not placer.adopt(booked, self._router.now()):
            return None  # it knows a worker that is not known here, or not any more
        return Decision(
            request=request.id,
            role=role,
            worker=booked.worker,
            rank=booked.rank,
            terms=told.terms,
            fetch_tokens=told.fetch_tokens,
            note=told.note,
            runner_up_s=math.inf if told.runner_up_s is None else told.runner_up_s,
            candidates=Candidates.unpack(told.candidates) if told.candidates else (),
        )

    async def _answer(self, replica: int, question: Any) -> Any:
        answer = None
        async for frame in await self._decide.direct(question, replica, annotated=False):
            answer = frame
        return answer

    def tell(self, event: Event) -> None:
        """Tell all peers what this replica did."""
        if self._feeds:
            data = _encode(event)
            for feed in self._feeds.values():
                feed.add(msgspec.Raw(data), len(data))

    def added(self, worker: WorkerId) -> None:
        """A worker came: what peers have there can be booked now."""
        now = self._router.now()
        for peer in self._peers.values():
            for key, booked in [*peer.waiting.items()]:
                if booked.worker == worker and self._router.placer.adopt(booked, now, arrived=False):
                    del peer.waiting[key]

    def check(self) -> None:
        """Look for peers that came, went, or are silent; to be called every 0.5 s in the event loop."""
        now = self._router.now()
        held_up = now - self._checked_at > _GAP_S
        self._checked_at = now
        listed = set(self._sync.instance_ids()) - {self.replica}
        for replica in listed:
            peer = self._peers.setdefault(replica, _Peer(replica))
            if peer.link is None and now >= peer.retry_at and not peer.unreadable:
                peer.link = _Link(now)
                peer.link.task = asyncio.get_running_loop().create_task(self._follow(peer, peer.link))
        for peer in [*self._peers.values()]:
            if peer.link is not None and held_up:
                peer.link.heard_at = now
            elif peer.link is not None and now - peer.link.heard_at > _SILENT_S:
                if peer.replica in self._feeds:
                    self._feeds.pop(peer.replica).close()
                self._lose(peer, f"silent for {now - peer.link.heard_at:.1f} s")
            for key, until in [*peer.unconfirmed.items()]:
                if now > until:
                    self._unbook(peer, *key)
            # One that is not listed any more may still have streams to end: its word is its stream.
            if peer.link is None and peer.replica not in listed and not peer.unconfirmed:
                del self._peers[peer.replica]

    def serve(self, sync: Any, decide: Any) -> None:
        """Answer the peers at these Dynamo endpoints, in the background."""
        self._endpoints = [sync, decide]
        # Streams without end are nothing to wait for at a shutdown.
        self._serving = [
            asyncio.ensure_future(sync.serve_endpoint(self.serve_sync, graceful_shutdown=False)),
            asyncio.ensure_future(decide.serve_endpoint(self.serve_decide, graceful_shutdown=False)),
        ]

    def close(self) -> None:
        """End all streams; the peers drop what this replica had booked."""
        for feed in self._feeds.values():
            feed.close()
        for peer in self._peers.values():
            self._lose(peer, "this replica leaves", logging.DEBUG)

    async def leave(self) -> None:
        """End all streams and stop serving."""
        for endpoint in self._endpoints:
            with contextlib.suppress(Exception):  # the lease may be lost, which is the same
                await endpoint.unregister_endpoint_instance()
        self.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    # What peers ask

    async def serve_sync(self, request: Any, context: Any) -> AsyncIterator[dict[str, Any]]:
        """The endpoint `sync`: a snapshot, and then what happens."""
        replica = request.get("replica") if isinstance(request, dict) else None
        if not isinstance(replica, int):
            raise ValueError(f"replica must be an instance id, not {replica!r}")
        feed = _Feed()
        before = self._feeds.get(replica)
        if before is not None:
            before.close()
        # From here to the first frame nothing may come between: what happens later comes as an event.
        self._feeds[replica] = feed
        try:
            router = self._router
            batch = _Batch(
                snapshot=_Snapshot(
                    [msgspec.Raw(_encode(event)) for event in router.carried()],
                    [msgspec.Raw(_encode(event)) for event in router.verdicts()],
                )
            )
            sessions = router.placer.sessions.bindings(_SESSIONS, router.now())
            sent = 0
            while not feed.closed and not context.is_stopped():
                batch.sessions = [
                    (session, seat.worker, seat.rank, tokens, age_s)  # type: ignore[misc]
                    for session, seat, tokens, age_s in sessions[sent : sent + _SESSIONS_FRAME]
                ]
                sent += _SESSIONS_FRAME
                yield _frame(batch)
                await asyncio.sleep(_BATCH_S)
                if not feed.events and sent >= len(sessions):
                    sessions, sent = [], 0
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(feed.wake.wait(), _HEARTBEAT_S)
                batch = _Batch(events=feed.take())
        finally:
            if self._feeds.get(replica) is feed:
                del self._feeds[replica]

    async def serve_decide(self, request: Any, context: Any) -> AsyncIterator[dict[str, Any]]:
        """The endpoint `decide`: where another replica shall have a request generated."""
        try:
            if context.is_stopped():
                raise ValueError("nobody waits for the answer any more")
            yield _frame(self._decided(_read_ask(_body(request))))
        except (ValueError, NoWorkerError) as error:
            yield {"version": VERSION, "error": str(error)}

    def _decided(self, ask: _Ask) -> _Answer:
        """Decide and book for the replica that asks. ValueError, NoWorkerError: it has to decide itself."""
        router = self._router
        carrier = _carrier(ask.id)
        if carrier is None or carrier == self.replica:
            raise ValueError(f"request {ask.id!r} is not of another replica")
        peer = self._peers.setdefault(carrier, _Peer(carrier))
        if peer.held.get(ask.id, {}).get(ask.role, -1) >= ask.turn:
            raise ValueError(f"request {ask.id!r} has been placed since this was asked")
        reader = ask.prefill_worker
        if reader is not None and all(worker.id != reader for worker in router.placer.workers()):
            raise ValueError(f"prefill worker {reader!r} is not known here, nor is who can pull from it")
        if router.placer.booking(ask.id, ask.role) is not None:
            # It is to be placed once more, and the event that says why has yet to come.
            self._unbook(peer, ask.id, ask.role)
        request = Request(
            id=ask.id,
            tokens=ask.tokens,
            blocks=ask.blocks,
            session=ask.session,
            output_tokens=ask.output_tokens,
            prefill_worker=ask.prefill_worker,
            cached=None if ask.cached is None else {Seat(w, rank): (d, h, k, s) for w, rank, d, h, k, s in ask.cached},
            avoid=frozenset(ask.avoid),
        )
        now = router.now()
        decision = router.placer.place(request, ask.role, now, explain=True)
        peer.held.setdefault(ask.id, {})[ask.role] = ask.turn
        peer.unconfirmed[ask.id, ask.role] = now + _CONFIRM_S
        booked = router.placer.booking(ask.id, ask.role)
        assert booked is not None
        return _Answer(
            booked=booked,
            terms=decision.terms,
            fetch_tokens=decision.fetch_tokens,
            note=decision.note,
            runner_up_s=decision.runner_up_s if math.isfinite(decision.runner_up_s) else None,
            candidates=Candidates.of(decision.candidates).pack(),
        )

    # What peers say

    async def _follow(self, peer: _Peer, link: _Link) -> None:
        """Read a peer's stream until it ends. One that is given up is cancelled: nothing more of it is heard."""
        request = {"version": VERSION, "replica": self.replica}
        try:
            async for frame in await self._sync.direct(request, peer.replica, annotated=False):
                self._heard(peer, link, frame)
            level, why = logging.INFO, "its stream ended"
        except _UnreadableError as error:
            peer.unreadable = True
            level, why = logging.ERROR, str(error)
        except Exception as error:
            level, why = logging.WARNING, str(error) or repr(error)
        self._lose(peer, why, level)

    def _heard(self, peer: _Peer, link: _Link, frame: Any) -> None:
        """Take in one frame."""
        batch = _read_batch(_body(frame))
        now = self._router.now()
        link.heard_at = now
        link.mute = False
        if batch.snapshot is not None:
            self._replace(peer, batch.snapshot, now)
            if not link.synced:
                _log.info("replica %x is in step, with %d requests", peer.replica, len(peer.held))
            link.synced = True
            peer.retry_s = _RETRY_S[0]
        bind = self._router.placer.sessions.bind
        for session, worker, rank, tokens, age_s in batch.sessions:
            if age_s >= 0.0 and tokens >= 0:
                bind(session, Seat(worker, rank), tokens, now, used_at=now - age_s)
        for event in _events(batch.events):
            self._apply(peer, event, now)

    def _replace(self, peer: _Peer, snapshot: _Snapshot, now: float) -> None:
        """What the peer carries is this, and what was decided here for it since its last stream broke."""
        for event in _events(snapshot.placed):
            if isinstance(event, Placed):
                self._placed(peer, event, now, arrived=False)
        for event in _events(snapshot.verdicts):
            if isinstance(event, Verdict):
                self._router.heard_verdict(event)

    def _apply(self, peer: _Peer, event: Event, now: float) -> None:
        """Do to the placer what the peer did to its own."""
        placer = self._router.placer
        if isinstance(event, Verdict):
            self._router.heard_verdict(event)
            return
        if isinstance(event, Placed):
            self._placed(peer, event, now, arrived=True)
            return
        id = event.id
        if _carrier(id) != peer.replica:
            return
        if isinstance(event, Progress):
            placer.progress(id, event.tokens, now)
        elif isinstance(event, Prefilled):
            placer.prefilled(id, now)
            peer.waiting.pop((id, "prefill"), None)
        elif isinstance(event, Failed):
            booked = placer.booking(id, event.role)
            if booked is not None and booked.worker == event.worker:
                placer.failed(id, event.role, now, event.reason)
            else:
                # It has been placed anew here meanwhile, by a question that was faster than this event.
                placer.health.failed(event.worker, now, event.reason)
            if (id, event.role) not in peer.unconfirmed:
                self._forget(peer, id, event.role)
        else:
            if isinstance(event, Finished):
                placer.finished(id, now)
            else:
                placer.cancelled(id, now, event.role)
            for role in ROLES:
                if not isinstance(event, Cancelled) or event.role in (None, role):
                    self._forget(peer, id, role)

    def _placed(self, peer: _Peer, event: Placed, now: float, arrived: bool) -> None:
        """The peer carries this."""
        booked, placer = event.booked, self._router.placer
        if _carrier(booked.id) != peer.replica:
            return
        key = booked.id, booked.role
        peer.unconfirmed.pop(key, None)
        peer.waiting.pop(key, None)
        peer.held.setdefault(booked.id, {})[booked.role] = event.turn
        placer.adopt(booked, now, arrived=arrived)
        here = placer.booking(*key)
        if here is None or (here.worker, here.rank) != (booked.worker, booked.rank):
            if here is not None:
                placer.cancelled(booked.id, now, booked.role)
            peer.waiting[key] = booked

    def _lose(self, peer: _Peer, why: str, level: int = logging.WARNING) -> None:
        """Give up a peer's stream, and drop what it carries."""
        link, peer.link = peer.link, None
        now = self._router.now()
        if link is not None:
            if link.task is not None and link.task is not asyncio.current_task():
                link.task.cancel()
            if link.synced or level == logging.ERROR:
                _log.log(level, "replica %x is lost, and its %d requests: %s", peer.replica, len(peer.held), why)
            peer.retry_at = now + peer.retry_s
            peer.retry_s = min(2 * peer.retry_s, _RETRY_S[1])
        for id in [*peer.held]:
            self._router.placer.cancelled(id, now)
        peer.held.clear()
        peer.waiting.clear()
        peer.unconfirmed.clear()

    def _unbook(self, peer: _Peer, id: str, role: Role) -> None:
        """A booking in a peer's name ends, and says nothing of its worker."""
        self._router.placer.cancelled(id, self._router.now(), role)
        self._forget(peer, id, role)

    def _forget(self, peer: _Peer, id: str, role: Role) -> None:
        peer.waiting.pop((id, role), None)
        peer.unconfirmed.pop((id, role), None)
        roles = peer.held.get(id)
        if roles is not None:
            roles.pop(role, None)
            if not roles:
                del peer.held[id]


def _events(raws: list[msgspec.Raw]) -> Iterable[Event]:
    """Those of a newer release's events that are known here."""
    for raw in raws:
        try:
            yield _read_event(raw)
        except msgspec.ValidationError as error:
            _log.debug("an event was ignored: %s", error)


def _carrier(id: str) -> int | None:
    """The replica that carries a request, by its booking's id."""
    try:
        return int(id.partition("/")[0], 16)
    except ValueError:
        return None


async def join(runtime: Any, component: str, router: Router) -> Replicas:
    """Serve `sync` and `decide` of a component (NAMESPACE.COMPONENT) of a Dynamo runtime, and find the other replicas.

    It returns when their snapshots are here, or after 2.5 s: some that are listed may be dead. From then on
    `Router.tick` has to be called every 0.5 s, and `leave` of what is returned at the end, after the last tick.
    """
    sync, decide = runtime.endpoint(f"{component}.sync"), runtime.endpoint(f"{component}.decide")
    client = await sync.client()
    replicas = Replicas(sync.connection_id(), router, client, await decide.client())
    router.attach(replicas)
    replicas.serve(sync, decide)
    await client.wait_for_instances()
    until = router.now() + _SILENT_S
    replicas.check()
    while router.now() < until and not set(client.instance_ids()) <= set(replicas.live()):
        await asyncio.sleep(0.05)
        replicas.check()
    return replicas
