# SPDX-License-Identifier: Apache-2.0
"""Two ends agree, or refuse each other by name."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_blhnc_layout._identity import Agreement, IncompatiblePeer, differences

FACTS: dict[str, Any] = {
    "form": "rows",
    "stride": 147456,
    "pages": [["layers.0", 0, 36864], ["layers.1", 36864, 36864]],
    "cache dtype": "torch.bfloat16",
    "weights": None,
}


def same(theirs: str, ours: str) -> bool:
    """Compare as vLLM's handshake does: `theirs != ours`, theirs a plain text from the wire."""
    return not theirs != ours  # noqa: SIM202


def test_equal_ends_agree_whatever_the_order_of_their_facts() -> None:
    ours = Agreement.of("abc", FACTS)
    theirs = str.__str__(Agreement.of("abc", dict(reversed(list(FACTS.items())))))
    assert type(theirs) is str
    assert same(theirs, ours)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stride": 147968}, "stride: ours 147456, theirs 147968"),
        ({"cache dtype": "fp8"}, "cache dtype: ours 'torch.bfloat16', theirs 'fp8'"),
        ({"weights": "release 7"}, "weights: ours None, theirs 'release 7'"),
        (
            {"pages": [["layers.1", 0, 36864], ["layers.0", 36864, 36864]]},
            "pages, from item 0: ours ['layers.0', 0, 36864], theirs ['layers.1', 0, 36864]",
        ),
        ({"pages": FACTS["pages"][:1]}, "pages, from item 1: ours ['layers.1', 36864, 36864], theirs nothing"),
    ],
)
def test_a_difference_is_named(change: dict[str, Any], said: str) -> None:
    ours, theirs = Agreement.of("abc", FACTS), str.__str__(Agreement.of("abc", {**FACTS, **change}))
    with pytest.raises(IncompatiblePeer) as refused:
        same(theirs, ours)
    assert said in str(refused.value)
    assert str(refused.value).count("ours") == 1


def test_a_stock_peer_is_refused_by_what_it_is() -> None:
    with pytest.raises(IncompatiblePeer, match="the peer moves pages of layers"):
        same("abc", Agreement.of("abc", FACTS))
    assert differences("abc", "abc") == []


def test_another_version_of_vllm_is_named() -> None:
    with pytest.raises(IncompatiblePeer, match="vLLM's own hash"):
        same(str.__str__(Agreement.of("abd", FACTS)), Agreement.of("abc", FACTS))
