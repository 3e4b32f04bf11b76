# SPDX-License-Identifier: Apache-2.0
"""What a replica answers at its system port: why a request went where it went, and what others say of a worker.

``POST /engine/route/NAME`` with a JSON object, answered with one; where the question is no good, with
``{"error": "..."}`` that names the value. Fields that are not known are ignored.

``explain``
    ``{"request": ID}``; ``{"replica": ..., "request": {...}}``, or null for a request that this replica did not carry,
    or not lately.
``verdict``
    ``{"worker": ID, "out": true, "ttl_s": S, "reason": "...", "source": "..."}``: somebody else wants a worker out for
    `S` seconds, at most an hour; with ``"out": false`` not any more. Each source speaks for itself, its last word
    counts. It only adds: no worker comes back that is out by its own outcomes, and the bound on how many are out holds.
    ``{"known": true}``, or false for a worker that is not in the fleet. A replica tells its peers.
``state``
    ``{}``; the workers and their health, what is booked, the peers.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from ._records import Records
from ._types import WorkerId

__all__ = ["Routes"]

#: The longest verdict, in seconds: who wants it longer renews it.
_LONGEST_S = 3600.0
#: The most characters of a reason and a source.
_LENGTHS = {"reason": 500, "source": 100}


class RouterLike(Protocol):
    """The router, as far as it is asked here."""

    replica: int
    records: Records

    def verdict(self, worker: WorkerId, out: bool, ttl_s: float, reason: str = "", source: str = "") -> bool:
        """Take in what a source says of a worker; False for an unknown worker."""

    def state(self) -> dict[str, Any]:
        """Return what the router knows, as JSON."""


class Routes:
    """The answers of one replica; used on the router's event loop."""

    def __init__(self, router: RouterLike) -> None:
        self._router = router

    def register(self, runtime: Any) -> None:
        """Answer at the system port of a Dynamo runtime."""
        for name in ("explain", "verdict", "state"):
            runtime.register_engine_route(f"route/{name}", _checked(getattr(self, name)))

    async def explain(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return what is kept of a request. ValueError names what is wrong with the question."""
        request = body.get("request")
        if not isinstance(request, str) or not request:
            raise ValueError(f"request must be the id of a request, not {request!r}")
        return {"replica": self._router.replica, "request": self._router.records.find(request)}

    async def verdict(self, body: dict[str, Any]) -> dict[str, Any]:
        """Take in a verdict. ValueError names what is wrong with it."""
        worker = _worker(body.get("worker"))
        out = body.get("out")
        if not isinstance(out, bool):
            raise ValueError(f"out must be true or false, not {out!r}")
        ttl_s = body.get("ttl_s")
        if out and (
            isinstance(ttl_s, bool)
            or not isinstance(ttl_s, int | float)
            or not (math.isfinite(ttl_s) and 0.0 < ttl_s <= _LONGEST_S)
        ):
            raise ValueError(f"ttl_s must be a number of seconds above 0 and at most {_LONGEST_S:.0f}, not {ttl_s!r}")
        words = {}
        for name, longest in _LENGTHS.items():
            words[name] = word = body.get(name, "")
            if not isinstance(word, str) or len(word) > longest:
                raise ValueError(f"{name} must be text of at most {longest} characters, not {str(word)[:80]!r}")
        return {"known": self._router.verdict(worker, out, float(ttl_s) if out and ttl_s else 0.0, **words)}

    async def state(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return what the router knows."""
        return self._router.state()


def _worker(name: Any) -> WorkerId:
    """Return a worker's id: Dynamo's instance ids are numbers, which some clients can only write as text."""
    if isinstance(name, int) and not isinstance(name, bool):
        return name
    if isinstance(name, str) and name:
        try:
            return int(name, 16 if name.startswith("0x") else 10)
        except ValueError:
            pass
    raise ValueError(f"worker must be an instance id, not {name!r}")


def _checked(
    route: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]],
) -> Callable[[Any], Awaitable[dict[str, Any]]]:
    """Answer a bad question in words: what is raised would be a 500 and a fault in the log."""

    async def answer(body: Any) -> dict[str, Any]:
        if not isinstance(body, dict):
            return {"error": f"a JSON object is wanted, not {str(body)[:80]!r}"}
        try:
            return await route(body)
        except ValueError as error:
            return {"error": str(error)}

    return answer
