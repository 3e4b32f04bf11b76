# SPDX-License-Identifier: Apache-2.0
"""`tool-conformance`: does an endpoint hand an agent the tool calls that its model made?

A suite of cases, each of them one fault that an agent would suffer, over the final answers of `/v1/chat/completions`,
`/v1/responses` and `/v1/messages`. It runs against any server, with no engine installed. The command is
`tool-conformance`; the same from Python::

    import asyncio
    from dynamo_structural_tags.conformance import Endpoint, load_cases, load_profile, run

    async def main():
        async with Endpoint("http://localhost:8000", "my-model", api="chat") as endpoint:
            return await run(endpoint, load_cases(), load_profile("agent"))

    results = asyncio.run(main())
    results.write("results.json")
    assert not [result.remark for result in results.results if result.verdict == "fail"]

Anything that has `Asker`'s attributes and method takes the place of the endpoint, such as a client library. The extra
`conformance` brings what this needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._answer import Answer, Call, Problem, Usage
from ._case import APIS, MODES, NEEDS, Cancel, Case, CaseError, Profile, Turn, load_cases, load_profile
from ._results import ABSENT, CaseResult, Difference, Exchange, Run, Target, Verdict, read_run
from ._runner import Asker, Progress, run

if TYPE_CHECKING:
    from ._compare import Comparison, compare
    from ._endpoint import Endpoint

__all__ = [
    "ABSENT",
    "APIS",
    "MODES",
    "NEEDS",
    "Answer",
    "Asker",
    "Call",
    "Cancel",
    "Case",
    "CaseError",
    "CaseResult",
    "Comparison",
    "Difference",
    "Endpoint",
    "Exchange",
    "Problem",
    "Profile",
    "Progress",
    "Run",
    "Target",
    "Turn",
    "Usage",
    "Verdict",
    "compare",
    "load_cases",
    "load_profile",
    "read_run",
    "run",
]


def __getattr__(name: str) -> Any:
    """Import what needs the extra only when it is asked for, so that the command can say what is missing."""
    if name in ("Comparison", "compare"):
        from . import _compare

        return getattr(_compare, name)
    if name == "Endpoint":
        from ._endpoint import Endpoint

        return Endpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
