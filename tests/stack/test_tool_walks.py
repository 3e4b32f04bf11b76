# SPDX-License-Identifier: Apache-2.0
"""Walks under the real mask: what the grammar lets through, the parser and a second reading read alike."""

from __future__ import annotations

import pytest

from dynamo_structural_tags.formats import FORMATS
from support.tool_walks import tally

#: Finished calls of each format.
CALLS = 60


@pytest.mark.parametrize("name", FORMATS)
def test_what_the_grammar_lets_through_has_one_valid_meaning(name: str) -> None:
    found = tally(FORMATS[name], 1, CALLS)
    assert not found.examples, "\n".join(found.examples)
    assert found.calls >= CALLS
    assert found.finish_rate >= 0.9
