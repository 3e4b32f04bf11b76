# SPDX-License-Identifier: Apache-2.0
"""`tool-conformance` against our frontend on the embedded stack: a telling selection in all three APIs.

`nox -s conformance` asks every case, and the peers too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.conformance_columns import ask
from support.three_servers import serve

pytestmark = pytest.mark.engines

#: One per area that a fault of our own would show in; those of the forced profile are answered by random weights.
TELLING = (
    "choice/required-calls",
    "concurrent/tools",
    "enums/with-null",
    "literals/closing-tool-call",
    "literals/html-entity",
    "literals/trailing-newline",
    "malformed/unknown-type",
    "parallel/two-tools",
    "references/recursive",
    "streams/text-before-call",
    "truncated/in-arguments",
    "turns/ids-round-trip",
    "types/big-integer",
    "undeclared/passed-on",
    "unions/digits-of-string",
    "usage/stream-equals-plain",
)


def test_our_frontend_passes_a_telling_selection_in_every_api(tmp_path: Path) -> None:
    with serve("ours", tmp_path, "glm47") as (url, model):
        for api in ("chat", "responses", "messages"):
            found = ask(url, model.name, api, tmp_path / f"{api}.json", only=TELLING)
            assert {one.case for one in found.results} <= set(TELLING)
            assert len(found.results) >= 15
            missed = {one.case: (one.verdict, one.remark) for one in found.results if one.verdict != "pass"}
            assert not missed, api
