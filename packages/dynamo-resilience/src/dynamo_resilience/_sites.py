# SPDX-License-Identifier: Apache-2.0
"""Sites, their frontends and workers as discovery sees them, and the choice among them."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout
from multidict import CIMultiDict

from ._admission import Pool
from ._breakers import Breakers, Target
from ._config import Model, Site
from ._upstream import Upstream

__all__ = ["Fleet", "Frontend", "Part", "Route", "Worker", "choose", "soonest", "take"]

#: How often a frontend is asked what it serves, and how long it may take to say.
_LOOK_S = 2.0
#: How long a failure counts as load: at first, and at most. It doubles with every few failures in a row, so that the
#: breaker hears enough of them, and what fails at once does not take all requests where the breaker may not open.
_FAILED_S = 0.25
_LONGEST_FAILED_S = 5.0
_DOUBLED_AFTER = 8


class _Busy:
    """Something that requests are sent to.

    Attributes:
        outstanding: requests that this replica has there now.
        failing: requests of this replica that failed there a moment ago.
        streak: how many have failed there in a row.
    """

    __slots__ = ("failing", "outstanding", "streak")

    def __init__(self) -> None:
        self.outstanding = 0
        self.failing = 0
        self.streak = 0

    @property
    def load(self) -> int:
        """What counts when the least busy one is chosen: what fails at once must not look idle."""
        return self.outstanding + self.failing

    @property
    def shaky(self) -> bool:
        """Whether it fails again and again, and did a moment ago: chosen only where all do."""
        return self.streak > 1 and self.failing > 0

    def failed(self) -> None:
        """Count a failure as load for a while."""
        seconds = min(_LONGEST_FAILED_S, _FAILED_S * 2.0 ** min(self.streak // _DOUBLED_AFTER, 10))
        self.streak += 1
        self.failing += 1
        asyncio.get_running_loop().call_later(seconds, self._forget)

    def _forget(self) -> None:
        self.failing -= 1


class Worker(_Busy):
    """An instance of a generating endpoint, as a frontend's `/health` names it.

    Attributes:
        id: the instance's number; `header` is the same as text.
        target: its breaker.
    """

    __slots__ = ("header", "id", "target")

    def __init__(self, number: int, target: Target) -> None:
        super().__init__()
        self.id = number
        self.header = str(number)
        self.target = target


class Frontend(_Busy):
    """One Dynamo frontend.

    Attributes:
        site, url: where it belongs; its base URL.
        models: what it lists, id -> its entry in `/v1/models`; None until it has answered once.
        workers: the instances that it knows; kept when it does not answer.
        answered: whether its last answer to discovery came and nobody has been refused a connection since.
        error: why discovery was not answered, else "".
        connections: for requests.
    """

    __slots__ = ("answered", "connections", "error", "models", "site", "url", "workers")

    def __init__(self, site: str, url: str) -> None:
        super().__init__()
        self.site = site
        self.url = url
        self.models: dict[str, dict[str, Any]] | None = None
        self.workers: frozenset[int] = frozenset()
        self.answered = False
        self.error = "not asked yet"
        self.connections = Upstream(url)

    async def look(self, session: ClientSession, headers: CIMultiDict[str]) -> bool:
        """Ask for its models and instances; return whether anything is different now."""
        try:
            listed = await self._get(session, "/v1/models", headers)
            models = {one["id"]: one for one in listed["data"]}
            health = await self._get(session, "/health", headers)
            workers = frozenset(
                one["instance_id"] for one in health.get("instances", ()) if one.get("endpoint") == "generate"
            )
        except (ClientError, OSError, asyncio.TimeoutError) as error:
            self._fail(f"{type(error).__name__}: {error}".rstrip(": "))
            return False
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            self._fail(f"not a frontend's answer: {type(error).__name__}: {error}")
            return False
        changed = self.models is None or models.keys() != self.models.keys() or workers != self.workers
        self.models, self.workers, self.answered, self.error = models, workers, True, ""
        return changed

    async def _get(self, session: ClientSession, path: str, headers: CIMultiDict[str]) -> Any:
        async with session.get(
            self.url.rstrip("/") + path, headers=headers, timeout=ClientTimeout(total=_LOOK_S), allow_redirects=False
        ) as answer:
            body = await answer.read()
            # Without a worker Dynamo's /health may say 503 with the same body.
            if answer.status != 200 and not (path == "/health" and answer.status == 503):
                raise ClientError(f"{path} answered {answer.status}")
            return msgspec.json.decode(body)

    def _fail(self, error: str) -> None:
        self.answered, self.error = False, error

    def snapshot(self) -> dict[str, Any]:
        """Return what `/state` shows of it."""
        return {
            "url": self.url,
            "answered": self.answered,
            "error": self.error,
            "models": None if self.models is None else sorted(self.models),
            "workers": sorted(self.workers),
            "outstanding": self.outstanding,
        }


class Fleet:
    """A site at work: its settings, its frontends, and the workers that any of them knows.

    Args:
        name, settings: of the site.
        key: what its frontends want as an API key; None where they want none.
        previous: the site of that name before a reload, whose frontends are taken over.
    """

    def __init__(self, name: str, settings: Site, key: str | None, previous: Fleet | None = None) -> None:
        self.name = name
        self.settings = settings
        self.key = key
        known: dict[str, Frontend] = {one.url: one for one in previous.frontends} if previous else {}
        self.frontends: tuple[Frontend, ...] = tuple(
            known.get(url) or Frontend(name, url) for url in settings.frontends
        )
        self.model = next(iter(settings.models))
        #: Those that a frontend still knows are taken over: requests that run have their counts in them.
        self.workers: dict[int, Worker] = {}
        if previous is not None and previous.model == self.model:
            self.workers = {one: worker for one, worker in previous.workers.items() if one in self._listed()}
        for number in self._listed():
            self.worker(number, self.model)

    @property
    def answered(self) -> bool:
        """Whether any of its frontends has ever answered."""
        return any(one.models is not None for one in self.frontends)

    @property
    def load(self) -> int:
        """Its frontends' load."""
        return sum(one.load for one in self.frontends)

    def worker(self, number: int, model: str) -> Worker:
        """Return the worker with that id, whether discovery has seen it or an answer named it."""
        found = self.workers.get(number)
        if found is None:
            found = self.workers[number] = Worker(number, Target(self.name, model, f"worker={number}"))
        return found

    def _listed(self) -> frozenset[int]:
        """Return all workers that a frontend knows."""
        return frozenset[int]().union(*(one.workers for one in self.frontends))

    async def watch(self, frontend: Frontend, session: ClientSession, changed: Callable[[], None]) -> None:
        """Ask a frontend every two seconds, for ever, and call back when it tells something new."""
        headers: CIMultiDict[str] = CIMultiDict()
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        while True:
            if await frontend.look(session, headers):
                listed = self._listed()
                for gone in [one for one in self.workers if one not in listed]:
                    # A request that still runs there keeps the object it counts in.
                    del self.workers[gone]
                for number in listed:
                    self.worker(number, self.model)
                changed()
            await asyncio.sleep(_LOOK_S * random.uniform(0.8, 1.2))

    def snapshot(self) -> dict[str, Any]:
        """Return what `/state` shows of it."""
        return {
            "prefer": self.settings.prefer,
            "route": self.settings.route,
            "frontends": [one.snapshot() for one in self.frontends],
            "workers": {one.header: one.outstanding for one in self.workers.values()},
        }


class Part(NamedTuple):
    """A frontend for one model, with its breaker."""

    frontend: Frontend
    target: Target

    @property
    def load(self) -> int:
        """The frontend's load."""
        return self.frontend.load

    @property
    def failing(self) -> int:
        """How many requests failed there of late."""
        return self.frontend.failing

    @property
    def shaky(self) -> bool:
        """Whether the frontend is."""
        return self.frontend.shaky

    def rank(self, model: str) -> int:
        """Return 0 where it lists the model and answers, 1 where it lists it or has never answered, else 2."""
        frontend = self.frontend
        if frontend.models is None:
            return 1
        if model not in frontend.models:
            return 2
        return 0 if frontend.answered else 1


class Route(NamedTuple):
    """A model at a site.

    Attributes:
        target: the breaker of all of it.
        parts: its frontends.
    """

    fleet: Fleet
    model: str
    settings: Model
    pool: Pool | None
    target: Target
    parts: tuple[Part, ...]

    @property
    def load(self) -> int:
        """The site's load."""
        return self.fleet.load

    @property
    def failing(self) -> int:
        """How many requests failed at all of its frontends of late."""
        return min(part.frontend.failing for part in self.parts)

    @property
    def shaky(self) -> bool:
        """Whether all of its frontends are."""
        return all(part.frontend.shaky for part in self.parts)

    @property
    def rank(self) -> int:
        """The best rank of its frontends."""
        return min(part.rank(self.model) for part in self.parts)

    def at_hand(self, tried: Collection[Part]) -> list[Part]:
        """Return the frontends worth asking, those not `tried` first of all."""
        parts = [one for one in self.parts if one not in tried] if tried else self.parts
        if len(parts) == 1:
            return [parts[0]]
        ranks = [one.rank(self.model) for one in parts or self.parts]
        best = min(ranks)
        return [one for one, rank in zip(parts or self.parts, ranks, strict=True) if rank == best]

    def workers(self, part: Part, tried: Collection[Worker]) -> list[Worker]:
        """Return the workers that a frontend knows, those not `tried`; all where every one was."""
        known = self.fleet.workers
        workers = [known[one] for one in part.frontend.workers if one in known]
        return [one for one in workers if one not in tried] or workers


class _Choosable(Protocol):
    @property
    def target(self) -> Target: ...
    @property
    def load(self) -> int: ...
    @property
    def failing(self) -> int: ...
    @property
    def shaky(self) -> bool: ...


_T = TypeVar("_T", bound=_Choosable)
#: Whose turn it is among equals, by group. A request chooses a site, a frontend and a worker: with one count for all of
#: them, one of two would get every request. Replicas begin at different ones.
_turns: defaultdict[str, int] = defaultdict(lambda: random.randrange(1 << 16))


def _load(one: _Choosable) -> tuple[bool, int]:
    return one.shaky, one.load


def _least(options: Sequence[_T], session: bytes | None) -> _T:
    """Return the session's own one, or the least busy, equals in turn."""
    if len(options) == 1:
        return options[0]
    if session is not None:
        # Every replica agrees, and one that comes or goes moves only its own sessions.
        calm = [one for one in options if not one.failing]
        return max(calm or options, key=lambda one: blake2b(session + one.target.key.encode(), digest_size=8).digest())
    group = options[0].target.group
    start = _turns[group] % len(options)
    _turns[group] += 1
    return min((*options[start:], *options[:start]), key=_load)


async def choose(options: Sequence[_T], breakers: Breakers | None, session: bytes | None) -> tuple[_T, int] | None:
    """Return one of `options`, and the number of the probe that this request now is, 0 for none.

    One whose breaker is due for a probe is chosen when the probe is granted; else one whose breaker is closed; None
    where there is none such.
    """
    if breakers is None:
        return _least(options, session), 0
    if len(options) == 1 and breakers.state(options[0].target) == "closed":
        return options[0], 0
    closed: list[_T] = []
    for one in options:
        state = breakers.state(one.target)
        if state == "closed":
            closed.append(one)
        elif state == "due":
            probe = await breakers.claim(one.target)
            if probe:
                return one, probe
    return (_least(closed, session), 0) if closed else None


async def take(options: Sequence[_T], breakers: Breakers | None, session: bytes | None) -> tuple[_T, int]:
    """Return the same as `choose`, or else the one whose time is up soonest: what lives is never refused."""
    return await choose(options, breakers, session) or (soonest(options, breakers), 0)


def soonest(options: Sequence[_T], breakers: Breakers | None) -> _T:
    """Return the one whose breaker is due first."""
    return options[0] if breakers is None else min(options, key=lambda one: breakers.remaining(one.target))
