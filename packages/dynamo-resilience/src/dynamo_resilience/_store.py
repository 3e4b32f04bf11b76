# SPDX-License-Identifier: Apache-2.0
"""What replicas share: the operations, their arguments and answers; in-process and in Redis with the same semantics.

All times in arguments and answers are durations in milliseconds, so that no replica's wall clock matters: "now" is the
store's own clock (Redis `TIME`; the clock of the machine's uptime in process).

In Redis an operation is one script. Every key and the channel of events begin with the prefix. Messages on the channel
are JSON objects with `"v": 1`: `{"v":1,"k":"b","s":[...BreakerState]}` for a breaker that moved, and
`{"v":1,"k":"l","pool":NAME}` for a `LeaseNotice`; those of another version are passed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from math import inf
from typing import Any, Literal, NamedTuple, Protocol, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from ._config import BreakerPolicy, StoreSettings, without_password
from ._errors import ConfigError, StoreUnavailable

__all__ = [
    "BreakerState",
    "Claim",
    "Event",
    "Held",
    "LeaseNotice",
    "LeaseReply",
    "LeaseRequest",
    "MemoryStore",
    "RedisStore",
    "Report",
    "Store",
    "StoreStatus",
    "open_store",
    "uptime",
    "within",
]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: Operations at once, each on its own connection; more wait for one.
_CONNECTIONS = 8
#: How long the store is taken to be away after an attempt that failed, from when that was begun: the shortest TTL that
#: a lease can have, so that a process which was paused past its lease always asks again.
_AWAY_S = 0.2
#: How often the store is tried while it is away: pauses grow from the first to the last.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 1.0
#: How often the list of breakers is read although nothing seems to have been missed.
_REREAD_S = 1.0
#: A subscription that is silent this long is pinged, and given up after this many pings in a row without an answer.
_PING_S, _PINGS = 1.0, 3
#: Of each connection. An operation that failed is not repeated behind the caller's back: it may have been done.
_OPTIONS: dict[str, Any] = {"retry": Retry(NoBackoff(), 0), "protocol": 2}

_LUA = files(__package__).joinpath("lua")
#: Whether the store does all that is asked of it (it may be full or read-only, or a user's rights may not reach as far
#: as the channel: this message says nothing), and its epoch.
_PROBE = """
local number = epoch_now(KEYS[1], 0)
redis.call('PUBLISH', KEYS[1] .. 'events', '{"v":1,"k":""}')
return cjson.encode(number)
"""


class Report(NamedTuple):
    """Outcomes of one target since the last report of this replica.

    Attributes:
        target: what the breaker guards, an opaque string.
        group: what the target is one of; the guard "never the last" counts within it.
        members: how many targets the group has.
        ok, errors, timeouts, slow_first, slow_tokens: counts; each outcome is counted once.
        probe: the probe's number where this report ends a half-open probe, else 0; `probe_ok` is its result. The
            negative of the number gives the probe back without a verdict.
    """

    target: str
    group: str
    members: int
    ok: int = 0
    errors: int = 0
    timeouts: int = 0
    slow_first: int = 0
    slow_tokens: int = 0
    probe: int = 0
    probe_ok: bool = False


class Claim(NamedTuple):
    """A replica asks for the one half-open probe of a target."""

    target: str
    group: str


class BreakerState(NamedTuple):
    """A breaker as the store has it.

    Attributes:
        state: `closed`, `open` (also when the time is up and a probe is due), `half_open`.
        remaining_ms: until a probe may be claimed (open), or until the running probe counts as lost (half_open).
        opens: how often it has opened in a row.
        reason: why it opened: `errors`, `timeouts`, `slow_first`, `slow_tokens`, `probe`; "" when closed.
        version: grows with every transition of this target; an older one never replaces a newer one.
        probe: the number of the probe that a claim was granted; 0 for everybody else.
    """

    target: str
    group: str
    state: Literal["closed", "open", "half_open"]
    remaining_ms: int
    opens: int
    reason: str
    version: int
    probe: int = 0


class Held(NamedTuple):
    """A block of a pool that a replica holds, with its fencing token `EPOCH.COUNTER` (compared as two integers)."""

    block: int
    token: str


class LeaseRequest(NamedTuple):
    """One account of one replica brings its leases up to date: renew, release, claim again, ask for more.

    Attributes:
        pool: the pool's name; `account` is `serverless` or a reserved tenant's name.
        holder: the replica; a restarted process is another one.
        ttl_ms: how long what is granted or renewed is valid, from the store's "now".
        own: the account's own blocks, first and one past the last.
        lent: blocks of others that it may borrow while they leave them idle, as such pairs (serverless only).
        lender: whether others may borrow from it (its wants recall what they borrowed).
        keep: what it holds and wants to keep. A block with an empty token is renewed where its record is, never
            claimed again where there is none.
        release: what it gives back.
        want: how many blocks it would like to hold in all, `keep` included.
        head: how many it needs in all to admit the request at the head of its queue; 0 without a queue.
        epoch: the last epoch this replica has seen, 0 at first.
    """

    pool: str
    account: str
    holder: str
    ttl_ms: int
    own: tuple[int, int]
    lent: tuple[tuple[int, int], ...]
    lender: bool
    keep: tuple[Held, ...]
    release: tuple[Held, ...]
    want: int
    head: int
    epoch: int


class LeaseReply(NamedTuple):
    """What the account holds after the operation, for `ttl_ms` from when the request was sent.

    Attributes:
        held: all its blocks, with tokens; a kept one that is missing here was lost.
        epoch: the store's epoch.
        grace_ms: while above 0, nothing new is granted: the epoch is younger than a TTL and an eighth.
        surplus: how many blocks it should give back as soon as it can, because others are short.
        recalled: borrowed blocks that their owner wants back at once.
    """

    held: tuple[Held, ...]
    epoch: int
    grace_ms: int
    surplus: int
    recalled: tuple[int, ...]


class LeaseNotice(NamedTuple):
    """Something changed in a pool that may concern other accounts: blocks became free, or are wanted."""

    pool: str


class StoreStatus(NamedTuple):
    """The store went away; or it came back, and the events before this one said what its breakers are now."""

    up: bool


Event = BreakerState | LeaseNotice | StoreStatus


class Store(Protocol):
    """Operations are atomic. Each raises `StoreUnavailable` within the configured time-out where there is no answer."""

    @property
    def up(self) -> bool:
        """Whether the store answers, as far as this replica knows."""

    @property
    def last_error(self) -> str:
        """What went wrong last, for people; "" if nothing ever did."""

    @property
    def epoch(self) -> int:
        """The last epoch of the store that was seen, 0 before the first."""

    def listen(self, callback: Callable[[Event], None]) -> None:
        """Call back, on the event loop, for every event of any replica, this one's included."""

    def unlisten(self, callback: Callable[[Event], None]) -> None:
        """Call back no more; one that is not called back is no error."""

    async def start(self) -> None:
        """Connect; an absent store is no error, it is tried again for ever."""

    async def close(self) -> None:
        """Disconnect."""

    async def report(self, reports: Sequence[Report], policy: BreakerPolicy) -> list[BreakerState]:
        """Count outcomes, move breakers, and return the state of each target that was reported."""

    async def claim(self, claim: Claim, policy: BreakerPolicy) -> BreakerState:
        """Grant the half-open probe if the target is open, its time is up and no live probe runs."""

    async def breakers(self) -> list[BreakerState]:
        """Return every breaker that is not closed."""

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Bring an account's leases up to date."""


def open_store(settings: StoreSettings, clock: Callable[[], float] | None = None) -> Store:
    """Return the store that the URL names; nothing is connected yet.

    Args:
        settings: which store.
        clock: seconds; by default the machine's uptime, time in suspension included.

    Raises ConfigError for a URL that names none.
    """
    clock = clock or uptime
    url = settings.url
    scheme = url.partition(":")[0]
    if url == "memory:":
        return MemoryStore(clock)
    try:
        if scheme == "redis+sentinel":
            return RedisStore(settings, clock, *_sentinel(settings))
        if scheme in ("redis", "rediss", "unix", "valkey"):
            url = url.replace("valkey:", "redis:", 1) if scheme == "valkey" else url
            return RedisStore(settings, clock, Redis.from_url(url, **_OPTIONS))
        raise ValueError("not memory:, redis://, rediss://, unix:// or redis+sentinel://HOST:PORT,HOST:PORT/MASTER")
    except (ValueError, TypeError, RedisError) as error:
        raise ConfigError(f"store.url {without_password(settings.url)!r}: {error}") from error


class MemoryStore:
    """The store of a single replica: the same tables in this process. Nothing outlives it, so its epoch never ends."""

    def __init__(self, clock: Callable[[], float]) -> None:
        from ._breaker_table import BreakerTable
        from ._lease_table import LeaseTable

        self._clock = clock
        self._breakers = BreakerTable(self._emit)
        self._leases = LeaseTable()
        self._callbacks: tuple[Callable[[Event], None], ...] = ()

    @property
    def up(self) -> bool:
        """Always."""
        return True

    @property
    def last_error(self) -> str:
        """Nothing can go wrong."""
        return ""

    @property
    def epoch(self) -> int:
        """Always 1."""
        return 1

    def listen(self, callback: Callable[[Event], None]) -> None:
        """Call back in the event loop's next turn after every event."""
        self._callbacks = (*self._callbacks, callback)

    def unlisten(self, callback: Callable[[Event], None]) -> None:
        """Call back no more, but for what is under way."""
        self._callbacks = tuple(one for one in self._callbacks if one != callback)

    async def start(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def report(self, reports: Sequence[Report], policy: BreakerPolicy) -> list[BreakerState]:
        """Count outcomes, move breakers, and return the state of each target that was reported."""
        now_ms = self._now_ms()
        return [self._breakers.report(now_ms, report, policy) for report in reports]

    async def claim(self, claim: Claim, policy: BreakerPolicy) -> BreakerState:
        """Grant the half-open probe if the target is open, its time is up and no live probe runs."""
        return self._breakers.claim(self._now_ms(), claim, policy)

    async def breakers(self) -> list[BreakerState]:
        """Return every breaker that is not closed."""
        return self._breakers.states(self._now_ms())

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Bring an account's leases up to date."""
        reply, notify = self._leases.lease(self._now_ms(), request)
        if notify:
            self._emit(LeaseNotice(request.pool))
        return reply

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    def _emit(self, event: Event) -> None:
        for callback in self._callbacks:
            asyncio.get_running_loop().call_soon(callback, event)


class RedisStore:
    """A Redis or Valkey server, or those behind a sentinel.

    While the server is away, operations fail at once and one task tries it; when it is back, the breakers are read
    and delivered as events before `up` turns true. Events come over a subscription; because one can miss some, the
    breakers are also read whenever it was renewed, and every second.

    Args:
        settings: prefix and time-out.
        clock: seconds.
        client: the client; it belongs to the store.
        sentinels: clients that find the server; they belong to the store too.
    """

    def __init__(
        self, settings: StoreSettings, clock: Callable[[], float], client: Redis, sentinels: Sequence[Redis] = ()
    ) -> None:
        # What the URL asks of a connection is only looked at when there is one.
        client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        self._prefix = settings.prefix
        self._channel = f"{settings.prefix}events"
        self._timeout_s = settings.timeout_s
        self._clock = clock
        self._client = client
        self._sentinels = sentinels
        prelude = _LUA.joinpath("epoch.lua").read_text()
        self._breaker_script, self._lease_script, self._probe_script = (
            client.register_script(f"{prelude}\n{text}")
            for text in (_LUA.joinpath("breaker.lua").read_text(), _LUA.joinpath("lease.lua").read_text(), _PROBE)
        )
        self._free = asyncio.Semaphore(_CONNECTIONS)
        self._callbacks: tuple[Callable[[Event], None], ...] = ()
        self._up = False
        self._last_error = ""
        self._epoch = 0
        self._up_at = -inf  # when it came back last
        self._failed_at = -inf  # when the last attempt that failed was begun
        self._wake = asyncio.Event()  # the list of breakers should be read, or an absent store be tried, now
        self._watcher: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._known: dict[str, BreakerState] = {}  # what is not closed, as it was delivered last
        self._meanwhile: set[str] = set()  # targets of which an event came since the list was asked for
        self._policy: tuple[BreakerPolicy, msgspec.Raw] | None = None

    @property
    def up(self) -> bool:
        """Whether the store answers, as far as this replica knows."""
        return self._up

    @property
    def last_error(self) -> str:
        """What went wrong last, for people; "" if nothing ever did."""
        return self._last_error

    @property
    def epoch(self) -> int:
        """The last epoch of the store that was seen, 0 before the first."""
        return self._epoch

    def listen(self, callback: Callable[[Event], None]) -> None:
        """Call back, on the event loop, for every event of any replica, this one's included."""
        self._callbacks = (*self._callbacks, callback)

    def unlisten(self, callback: Callable[[Event], None]) -> None:
        """Call back no more."""
        self._callbacks = tuple(one for one in self._callbacks if one != callback)

    async def start(self) -> None:
        """Try the store once, and from then on watch it; an absent one is no error."""
        await self._revive()
        self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Disconnect."""
        tasks = [task for task in (self._watcher, self._listener) if task is not None]
        self._up = False
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in (self._client, *self._sentinels):
            with contextlib.suppress(RedisError, OSError, asyncio.TimeoutError):
                await within(self._timeout_s, client.aclose())  # over TLS the other side has to agree

    async def report(self, reports: Sequence[Report], policy: BreakerPolicy) -> list[BreakerState]:
        """Count outcomes, move breakers, and return the state of each target that was reported."""
        operation = {"op": "report", "reports": reports, "policy": self._encoded(policy)}
        return await self._call("report", self._breaker_script, operation, list[BreakerState])

    async def claim(self, claim: Claim, policy: BreakerPolicy) -> BreakerState:
        """Grant the half-open probe if the target is open, its time is up and no live probe runs."""
        operation = {"op": "claim", "claim": claim, "policy": self._encoded(policy)}
        return await self._call("claim", self._breaker_script, operation, BreakerState)

    async def breakers(self) -> list[BreakerState]:
        """Return every breaker that is not closed."""
        return await self._call("breakers", self._breaker_script, {"op": "states"}, list[BreakerState])

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Bring an account's leases up to date."""
        reply = await self._call("lease", self._lease_script, {"lease": request}, LeaseReply)
        self._epoch = max(self._epoch, reply.epoch)
        return reply

    def _encoded(self, policy: BreakerPolicy) -> msgspec.Raw:
        """Return the policy as JSON; it is the same one for a long time."""
        if self._policy is None or self._policy[0] is not policy:
            self._policy = (policy, msgspec.Raw(policy.model_dump_json().encode()))
        return self._policy[1]

    async def _call(self, name: str, script: Any, operation: dict[str, Any], answer: type[_T]) -> _T:
        """Try one operation, unless the store was away just now."""
        if not self._up and self._clock() - self._failed_at < _AWAY_S:
            raise StoreUnavailable(f"store: {name} was not tried: {self._last_error}")
        result = await self._try(name, script, operation, answer)
        if not self._up:
            self._wake.set()
        return result

    async def _try(self, name: str, script: Any, operation: dict[str, Any], answer: type[_T]) -> _T:
        began = self._clock()
        payload = msgspec.json.encode(operation)
        try:
            text = await within(self._timeout_s, self._run(script, payload))
            return msgspec.json.decode(text, type=answer)
        except Exception as error:  # whatever a server, or a client library, makes of it: whoever asked goes on without
            fault = f"{name}: {self._fault(error)}"
            self._failed_at = max(self._failed_at, began)
            if not self._up:
                self._last_error = fault
            elif began >= self._up_at:  # else it was overtaken by the store's return
                self._up, self._last_error = False, fault
                _log.warning("the store is away: %s", fault)
                self._emit(StoreStatus(False))
                self._wake.set()
            raise StoreUnavailable(f"store: {fault}") from error

    def _fault(self, error: Exception) -> str:
        if isinstance(error, asyncio.TimeoutError):
            return f"no answer within {self._timeout_s:g} s"
        return f"{type(error).__name__}: {error}"

    async def _run(self, script: Any, payload: bytes) -> Any:
        async with self._free:
            return await script(keys=[self._prefix], args=[payload])

    async def _watch(self) -> None:
        """Try the store while it is away, reread it while it is not; for ever."""
        pause = _FIRST_PAUSE_S
        while True:
            # Spread, so that replicas do not come all at once.
            wait_s = (_REREAD_S if self._up else pause) * random.uniform(0.7, 1.3)
            with contextlib.suppress(asyncio.TimeoutError):
                await within(wait_s, self._wake.wait())
            self._wake.clear()
            lately = self._clock() - self._up_at < _LAST_PAUSE_S
            try:
                if self._up:
                    pause = pause if lately else _FIRST_PAUSE_S
                    await self._reread()
                    continue
                if lately:  # it answers this task and fails others: no storm of returns
                    await asyncio.sleep(pause * random.uniform(0.7, 1.3))
                pause = min(pause * 2, _LAST_PAUSE_S)
                await self._revive()
            except StoreUnavailable:
                pass  # it was said
            except Exception:  # the one task that must not end
                _log.exception("watching the store")

    async def _revive(self) -> None:
        """Try an absent store; if it answers, deliver its breakers and subscribe again."""
        # Names may lead elsewhere by now, and what answered may have become a read-only replica.
        with contextlib.suppress(RedisError, OSError, asyncio.TimeoutError):
            await within(self._timeout_s, self._client.connection_pool.disconnect(inuse_connections=False))
        try:
            epoch = await self._try("connect", self._probe_script, {}, int)
            await self._reread()
        except StoreUnavailable as error:
            _log.debug("%s", error)
            return
        self._epoch = max(self._epoch, epoch)
        self._up = True
        self._up_at = self._clock()
        _log.info("the store is there, epoch %d", epoch)
        self._emit(StoreStatus(True))
        if self._listener is not None:
            self._listener.cancel()
        self._listener = asyncio.create_task(self._subscribe())

    async def _reread(self) -> None:
        """Read the breakers and deliver them; what was known and is not there any more is closed."""
        self._meanwhile.clear()
        states = await self._try("breakers", self._breaker_script, {"op": "states"}, list[BreakerState])
        here = {state.target for state in states}
        for target in self._known.keys() - here - self._meanwhile:
            known = self._known[target]
            self._deliver(known._replace(state="closed", remaining_ms=0, opens=0, reason=""))
        for state in states:
            if state.target not in self._meanwhile:
                self._deliver(state)

    async def _subscribe(self) -> None:
        """Keep a subscription and deliver what comes; for ever."""
        pause = _FIRST_PAUSE_S
        while True:
            pubsub = self._client.pubsub()
            try:
                await within(self._timeout_s, pubsub.subscribe(self._channel))
                pause = _FIRST_PAUSE_S
                await self._receive(pubsub)
            except Exception as error:  # without events it would hear of everything a second late
                if self._up:  # else that says why
                    self._last_error = f"events: {self._fault(error)}"
                _log.debug("the subscription to the store's events ended: %s", self._fault(error))
                await asyncio.sleep(pause * random.uniform(0.7, 1.3))
                pause = min(pause * 2, _LAST_PAUSE_S)
            finally:
                with contextlib.suppress(RedisError, OSError, asyncio.TimeoutError):
                    await within(self._timeout_s, pubsub.aclose())  # type: ignore[no-untyped-call]

    async def _receive(self, pubsub: PubSub) -> None:
        unanswered = 0
        while True:
            message = await pubsub.get_message(timeout=_PING_S)
            if message is None:
                if unanswered == _PINGS:
                    raise OSError(f"no answer to {_PINGS} pings")
                unanswered += 1
                await within(self._timeout_s, pubsub.ping())
                continue
            unanswered = 0
            if message["type"] == "subscribe":
                self._wake.set()  # what was published before is in the list
            elif message["type"] == "message":
                self._heard(message["data"])

    def _heard(self, data: bytes) -> None:
        try:
            message = msgspec.json.decode(data, type=_Message)
        except msgspec.MsgspecError as error:
            _log.debug("an event that cannot be read: %s", error)
            return
        if message.v != 1:
            return
        if message.k == "b" and message.s is not None:
            self._meanwhile.add(message.s.target)
            self._deliver(message.s)
        elif message.k == "l":
            self._emit(LeaseNotice(message.pool))

    def _deliver(self, state: BreakerState) -> None:
        if state.state == "closed":
            self._known.pop(state.target, None)
        else:
            self._known[state.target] = state
        self._emit(state)

    def _emit(self, event: Event) -> None:
        for callback in self._callbacks:
            try:
                callback(event)
            except Exception:  # one listener's fault is not the others'
                _log.exception("%r", event)


class _Message(msgspec.Struct):
    """What is published; other versions may have other fields."""

    v: int
    k: str = ""
    s: BreakerState | None = None
    pool: str = ""


def uptime() -> float:
    """Return the seconds since the host started, those it was suspended for included: a replica's clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def within(seconds: float, work: Awaitable[_T]) -> _T:
    """Do as `asyncio.wait_for`, which before Python 3.12 now and then swallows a cancellation.

    So do libraries that use it, and go on: what does not end is cancelled again.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody asks a cancelled caller's
    try:
        await asyncio.wait((task,), timeout=seconds)
        while not task.done():
            task.cancel()
            await asyncio.wait((task,), timeout=_FIRST_PAUSE_S)
        if task.cancelled():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()
        del task  # its exception holds this frame


def _sentinel(settings: StoreSettings) -> tuple[Redis, Sequence[Redis]]:
    parts = urlsplit(settings.url)
    user, _, hosts = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    master = parts.path.strip("/")
    if not master or "/" in master:
        raise ValueError("no master is named: redis+sentinel://HOST:PORT,HOST:PORT/MASTER")
    options: dict[str, Any] = {}
    for key, value in parse_qsl(parts.query, keep_blank_values=True):
        if key != "db" or not value.isdecimal():
            raise ValueError(f"{key}={value} is not db=NUMBER, the only option there is")
        options["db"] = int(value)
    if password:
        options["password"] = unquote(password)
    if name:
        options["username"] = unquote(name)
    addresses: list[tuple[str, int]] = []
    for host in hosts.split(","):
        one = urlsplit(f"//{host}")
        if not one.hostname:
            raise ValueError(f"{host!r} is no HOST:PORT")
        addresses.append((one.hostname, one.port or 26379))
    # All of them may have to be asked, one after the other, while one operation waits.
    each_s = settings.timeout_s / (len(addresses) + 1)
    asked = {**_OPTIONS, "socket_timeout": each_s, "socket_connect_timeout": each_s}
    sentinel = Sentinel(addresses, sentinel_kwargs=asked)  # type: ignore[no-untyped-call]
    client: Redis = sentinel.master_for(master, **_OPTIONS, **options)
    return client, sentinel.sentinels
