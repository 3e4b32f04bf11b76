# SPDX-License-Identifier: Apache-2.0
"""The engine that breaks as it is told, without Dynamo around it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, get_args

import pytest

from support.faulty_worker import FakePacedEngine, FaultName


class FakeContext:
    """A request that its client has not called off."""

    def is_stopped(self) -> bool:
        return False


def engine(folder: Path, fault: str = "") -> FakePacedEngine:
    (folder / "fault").write_text(fault, "utf-8")
    made = FakePacedEngine(folder, first_s=0.001, token_s=0.001)
    made.look()
    return made


async def answer(of: FakePacedEngine, prompt: int, tokens: int) -> list[dict[str, Any]]:
    request = {"token_ids": list(range(prompt)), "stop_conditions": {"max_tokens": tokens}}
    return [chunk async for chunk in of.generate(request, FakeContext())]


def test_an_answer_carried_on_after_its_first_tokens_is_the_same(tmp_path: Path) -> None:
    whole = asyncio.run(answer(engine(tmp_path), 30, 25))
    rest = asyncio.run(answer(engine(tmp_path), 34, 21))
    assert [chunk["token_ids"] for chunk in whole[4:]] == [chunk["token_ids"] for chunk in rest]
    assert whole[-1]["completion_usage"] == {"prompt_tokens": 30, "completion_tokens": 25, "total_tokens": 55}
    assert len((tmp_path / "served").read_text("utf-8").splitlines()) == 2


@pytest.mark.parametrize(("fault", "tokens"), [("raise", 0), ("break", 3)])
def test_a_faulty_engine_fails_after_so_many_tokens(tmp_path: Path, fault: str, tokens: int) -> None:
    async def fail() -> None:
        request = {"token_ids": [1], "stop_conditions": {"max_tokens": 9}}
        chunks = engine(tmp_path, fault).generate(request, FakeContext())
        for _ in range(tokens):
            await anext(chunks)
        with pytest.raises(RuntimeError, match=fault):
            await anext(chunks)

    asyncio.run(fail())


def test_a_hanging_engine_goes_on_when_it_is_sound_again(tmp_path: Path) -> None:
    async def hang() -> int:
        one = engine(tmp_path, "hang")
        running = asyncio.create_task(answer(one, 5, 3))
        done, _ = await asyncio.wait([running], timeout=0.1)
        assert not done
        (tmp_path / "fault").unlink()
        one.look()
        return len(await running)

    assert asyncio.run(hang()) == 4


def test_an_unknown_fault_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'explode'.*raise, break, hang, slow, sick"):
        engine(tmp_path, "explode")
    for fault in get_args(FaultName):
        assert engine(tmp_path, fault).fault == fault
