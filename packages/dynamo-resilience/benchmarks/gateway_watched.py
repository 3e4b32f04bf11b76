# SPDX-License-Identifier: Apache-2.0
"""A gateway process that notes when it learns of a breaker's transition; otherwise `dynamo-gateway` as it is.

    python gateway_watched.py --config FILE --replica NAME --events FILE

A line of the events: TIME, TARGET, VERSION and STATE with tabs between them; TIME from `time.monotonic()`, which all
processes of a machine share. Each version is noted once, when the answer or the message is handed to the breakers.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterable
from pathlib import Path

import uvloop

from dynamo_resilience._store import BreakerState, Event
from dynamo_resilience.gateway import Gateway


class WatchedGateway(Gateway):
    """Notes what its store says about breakers."""

    def __init__(self, source: Path, name: str, events: Path) -> None:
        super().__init__(source, name=name)
        self._events = events.open("a", buffering=1, encoding="utf-8")
        self._known: dict[str, int] = {}

    async def start(self) -> None:
        """Start, and listen too."""
        await super().start()
        store = self._store
        report, claim = store.report, store.claim

        async def watched_report(*arguments: object) -> list[BreakerState]:
            states = await report(*arguments)  # type: ignore[arg-type]
            self._note(states)
            return states

        async def watched_claim(*arguments: object) -> BreakerState:
            state = await claim(*arguments)  # type: ignore[arg-type]
            self._note([state])
            return state

        store.report, store.claim = watched_report, watched_claim  # type: ignore[method-assign, assignment]
        store.listen(self._heard)

    def _heard(self, event: Event) -> None:
        if isinstance(event, BreakerState):
            self._note([event])

    def _note(self, states: Iterable[BreakerState]) -> None:
        now = time.monotonic()
        for state in states:
            if state.version > self._known.get(state.target, 0):
                self._known[state.target] = state.version
                self._events.write(f"{now}\t{state.target}\t{state.version}\t{state.state}\n")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--replica", required=True)
    parser.add_argument("--events", type=Path, required=True)
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    uvloop.run(WatchedGateway(options.config, options.replica, options.events).run())


if __name__ == "__main__":
    main()
