# SPDX-License-Identifier: Apache-2.0
"""Trace files: round trips, and faults by file, line and field."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_kv_router_ext.sim.traces import (
    MooncakeRequest,
    TraceError,
    WekaConversation,
    WekaRequest,
    WekaSubagent,
    arrivals,
    read_mooncake,
    read_weka,
    write_mooncake,
    write_weka,
)
from support.sessions import MOONCAKE_BLOCK, AgentWorkload

LINE = {"timestamp": 0, "input_length": 1025, "output_length": 3, "hash_ids": [0, 1, 2]}

CONVERSATION = WekaConversation(
    id="trace_0001",
    models=("big", "small"),
    tool_tokens=11_899,
    system_tokens=2_926,
    requests=(
        WekaRequest(t=0.0, type="s", model="big", input_length=130, output_length=9, hash_ids=(1, 2, 3), ttft=0.4),
        WekaSubagent(
            t=3.5,
            agent_id="agent_001",
            subagent_type="Explore",
            models=("small",),
            duration_ms=900,
            total_tokens=70,
            tool_use_count=1,
            requests=(
                WekaRequest(t=3.6, type="n", model="small", input_length=64, output_length=2, hash_ids=(9,)),
                WekaSubagent(t=3.7, agent_id="agent_002", status="async_launched", requests=()),
            ),
        ),
        WekaRequest(
            t=20.25,
            type="n",
            model="big",
            input_length=200,
            output_length=5,
            hash_ids=(1, 2, 3, 4),
            input_types=("tool_result",),
            output_types=("text",),
            stop="end_turn",
            api_time=1.5,
            think_time=0.0,
        ),
    ),
)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_generated_workload_survives_the_mooncake_round_trip(tmp_path: Path, name: str) -> None:
    workload = AgentWorkload(sessions=3, turns=4, cold_per_s=0.1, block_size=MOONCAKE_BLOCK).scaled(1 / 10)
    requests = [request.mooncake() for request in workload.requests()]
    assert write_mooncake(tmp_path / name, requests) == len(requests) > 12
    assert list(read_mooncake(tmp_path / name)) == requests
    if name.endswith(".gz"):  # flags and time, RFC 1952: no file name and no time, so equal traces are equal bytes
        assert (tmp_path / name).read_bytes()[3:8] == bytes(5)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_mooncake_line_is_written_as_the_release_has_it(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    write_mooncake(file, [MooncakeRequest(27_000.0, 513, 52, (46, 47)), MooncakeRequest(0.5, 1, 1, (46,))])
    assert file.read_text() == (
        '{"timestamp": 27000, "input_length": 513, "output_length": 52, "hash_ids": [46, 47]}\n'
        '{"timestamp": 0.5, "input_length": 1, "output_length": 1, "hash_ids": [46]}\n'
    )


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("old")

    def requests() -> Iterator[MooncakeRequest]:
        yield MooncakeRequest(0, 1, 1, (1,))
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_mooncake(file, requests())
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]


def test_a_reader_of_the_old_file_keeps_it(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    write_mooncake(file, [MooncakeRequest(0, 1, 1, (1,)), MooncakeRequest(1, 1, 1, (2,))])
    with file.open() as reader:
        write_mooncake(file, [MooncakeRequest(0, 1, 1, (3,))])
        assert len(reader.readlines()) == 2


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"timestamp": None}, "timestamp: a number was expected, not null"),
        ({"timestamp": -1}, "timestamp: -1 is not"),
        ({"timestamp": float("nan")}, "timestamp: nan is not"),
        ({"input_length": "12"}, "input_length: a whole number was expected, not a string"),
        ({"input_length": 12.5}, "input_length: a whole number was expected, not 12.5"),
        ({"output_length": True}, "output_length: a whole number was expected, not a truth value"),
        ({"output_length": -3}, "output_length: -3 is negative"),
        ({"hash_ids": 5}, "hash_ids: a list was expected, not 5"),
        ({"hash_ids": [0, "x", 2]}, r"hash_ids\[1\]: a whole number was expected, not a string"),
        ({"hash_ids": [0, 1]}, "hash_ids: 2 ids, but input_length 1025 takes 3 of 512 tokens"),
    ],
)
def test_a_mooncake_fault_is_named_by_file_line_and_field(tmp_path: Path, change: dict[str, Any], fault: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{json.dumps(LINE)}\n\n{json.dumps({**LINE, **change})}\n")
    with pytest.raises(TraceError, match=rf"trace\.jsonl:3: {fault}"):
        list(read_mooncake(file))


@pytest.mark.parametrize("field", LINE)
def test_a_missing_mooncake_field_is_named(tmp_path: Path, field: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps({key: value for key, value in LINE.items() if key != field}))
    with pytest.raises(TraceError, match=rf"trace\.jsonl:1: {field}: missing") as raised:
        list(read_mooncake(file))
    assert (raised.value.path, raised.value.line, raised.value.field) == (file, 1, field)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{'a': 1}", "not JSON"),
        ("[1]", "an object was expected, not a list"),
        ("[" * 100_000, "cannot be read"),
        ("1" * 5000, "cannot be read"),
    ],
)
def test_a_line_that_is_no_object_is_named(tmp_path: Path, text: str, fault: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{json.dumps(LINE)}\n{text}\n")
    with pytest.raises(TraceError, match=rf"trace\.jsonl:2: {fault}"):
        list(read_mooncake(file))


@pytest.mark.parametrize("cut", [5, 40])
def test_a_cut_gzip_file_is_a_trace_error(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(gzip.compress(f"{json.dumps(LINE)}\n".encode() * 50)[:-cut])
    with pytest.raises(TraceError, match=r"trace\.jsonl\.gz:\d+: cannot be read"):
        list(read_mooncake(file))


def test_lines_are_read_one_by_one(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{json.dumps(LINE)}\nbroken\n")
    assert next(read_mooncake(file)) == MooncakeRequest(0, 1025, 3, (0, 1, 2))


@pytest.mark.parametrize("name", ["one.json", "one.json.gz", "many.jsonl", "many.jsonl.gz"])
def test_a_weka_conversation_survives_the_round_trip(tmp_path: Path, name: str) -> None:
    conversations = [CONVERSATION]
    if "many" in name:
        conversations += AgentWorkload(sessions=2, turns=3).scaled(1 / 100).conversations()
    assert write_weka(tmp_path / name, conversations) == len(conversations)
    assert list(read_weka(tmp_path / name)) == conversations
    assert list(read_weka(tmp_path)) == conversations


def test_a_weka_file_has_the_names_of_the_schema(tmp_path: Path) -> None:
    write_weka(tmp_path / "one.json", [CONVERSATION])
    document = json.loads((tmp_path / "one.json").read_text())
    assert list(document) == [
        "id",
        "models",
        "block_size",
        "hash_id_scope",
        "tool_tokens",
        "system_tokens",
        "requests",
    ]
    assert [request["type"] for request in document["requests"]] == ["s", "subagent", "n"]
    assert document["requests"][0] == {
        "t": 0.0,
        "type": "s",
        "model": "big",
        "in": 130,
        "out": 9,
        "hash_ids": [1, 2, 3],
        "input_types": [],
        "output_types": [],
        "stop": "",
        "ttft": 0.4,
    }


def test_a_json_file_takes_one_conversation(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds one conversation, not 2"):
        write_weka(tmp_path / "two.json", [CONVERSATION, CONVERSATION])
    with pytest.raises(ValueError, match=r"not a \.json or \.jsonl file"):
        write_weka(tmp_path / "two.txt", [CONVERSATION])


def test_a_folder_without_traces_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("")
    with pytest.raises(FileNotFoundError, match=r"no \.json"):
        list(read_weka(tmp_path))


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (["id"], ..., "id: missing"),
        (["block_size"], 0, "block_size: 0 tokens"),
        (["hash_id_scope"], "mine", "hash_id_scope: 'mine'"),
        (["extra"], 1, "extra: unknown field"),
        (["requests"], ..., "requests: missing"),
        (["requests", 2, "in"], ..., r"requests\[2\]\.in: missing"),
        (["requests", 0, "type"], "x", r"requests\[0\]\.type: 'x'"),
        (["requests", 2, "ttft"], 1.0, r"requests\[2\]\.ttft: unknown field"),
        (["requests", 1], 5, r"requests\[1\]: an object was expected"),
        (["requests", 1, "requests", 0, "out"], -1, r"requests\[1\]\.requests\[0\]\.out: -1 is negative"),
        (["requests", 1, "requests", 0, "hash_ids"], [1.5], r"requests\[1\]\.requests\[0\]\.hash_ids\[0\]: a whole"),
    ],
)
def test_a_weka_fault_is_named_by_file_line_and_field(tmp_path: Path, path: list[Any], value: Any, fault: str) -> None:
    write_weka(tmp_path / "good.json", [CONVERSATION])
    good = (tmp_path / "good.json").read_text()
    bad = json.loads(good)
    *outer, last = path
    target = bad
    for step in outer:
        target = target[step]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    file = tmp_path / "bad.jsonl"
    file.write_text(good + json.dumps(bad))
    with pytest.raises(TraceError, match=rf"bad\.jsonl:2: {fault}"):
        list(read_weka(file))


def test_optional_weka_fields_may_be_left_out_and_totals_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "short.json"
    request = {"t": 0, "type": "n", "model": "m", "in": 5, "out": 1}
    subagent = {"t": 1, "type": "subagent", "agent_id": "a", "requests": [], "duration_ms": None}
    document = {"id": "x", "block_size": 64, "requests": [request, subagent], "totals": {"anything": 1}}
    file.write_text(json.dumps(document, indent=2))
    assert list(read_weka(file)) == [
        WekaConversation(
            id="x",
            requests=(
                WekaRequest(t=0, type="n", model="m", input_length=5, output_length=1),
                WekaSubagent(t=1, agent_id="a", requests=()),
            ),
        )
    ]


def test_a_document_that_is_not_json_is_named_by_its_own_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text('{\n  "id": "x",\n  oops\n}\n')
    with pytest.raises(TraceError, match=r"bad\.json:3: not JSON"):
        list(read_weka(file))


def test_mooncake_requests_arrive_at_their_times_in_blocks_of_the_fleet(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    write_mooncake(
        file,
        [
            MooncakeRequest(0, 1100, 10, (5, 6, 7)),
            MooncakeRequest(3000, 513, 20, (5, 9)),
            MooncakeRequest(4000, 600, 0, (5, 9)),  # says nothing
        ],
    )
    first, second = arrivals(file, block_size=256, speedup=2.0)
    assert (first.at_s, first.tokens, first.output_tokens, first.session, first.after) == (0.0, 1100, 10, None, None)
    assert second.at_s == 1.5
    assert len(first.blocks) == 4
    assert len(set(first.blocks)) == 4
    assert second.blocks == first.blocks[:2]
    assert [one.id for one in arrivals(file, limit=1)] == [first.id]


def test_a_trace_with_times_of_day_begins_at_zero(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    write_mooncake(file, [MooncakeRequest(1.75e12 + late, 513, 1, (1, 2)) for late in (2000, 0, 500)])
    assert [one.at_s for one in arrivals(file)] == [2.0, 0.0, 0.5]


def _turn(t: float, tokens: int, ids: range, **more: Any) -> WekaRequest:
    return WekaRequest(t=t, type="n", model="m", input_length=tokens, output_length=70, hash_ids=tuple(ids), **more)


def test_weka_requests_wait_for_the_answer_before_them(tmp_path: Path) -> None:
    turns = (
        _turn(0.0, 130, range(3), api_time=2.0),
        _turn(5.0, 330, range(6), api_time=1.0),
        _turn(20.0, 400, range(7), think_time=4.0),
    )
    write_weka(tmp_path / "all.jsonl", [WekaConversation(id=name, requests=turns) for name in ("a", "b")])
    found = arrivals(tmp_path / "all.jsonl", "weka", speedup=2.0, every_s=8.0)
    first, second, third = found[:3]
    assert [one.session for one in found] == ["a"] * 3 + ["b"] * 3
    assert [one.after for one in found[:3]] == [None, first.id, second.id]
    # The gap that the record shows, or the think time where it has one; twice as fast.
    assert [one.think_s for one in found[:3]] == [0.0, 1.5, 2.0]
    assert found[3].at_s == 4.0
    # 130 tokens and an answer of 70 fill a third block, which the next prompt begins with.
    assert len(first.blocks) == 2
    assert first.answer == second.blocks[2:3]
    assert third.answer == ()
    # Ids of one conversation mean nothing in another.
    assert not set(first.blocks) & set(found[3].blocks)


def test_a_corpus_with_global_ids_shares_its_blocks(tmp_path: Path) -> None:
    turns = (_turn(0.0, 130, range(3)),)
    conversations = [WekaConversation(id=name, requests=turns, hash_id_scope="global") for name in ("a", "b")]
    write_weka(tmp_path / "all.jsonl", conversations)
    first, second = arrivals(tmp_path / "all.jsonl", "weka")
    assert first.blocks == second.blocks


@pytest.mark.parametrize("status", ["completed", "async_launched"])
def test_a_parent_waits_for_its_subagent_unless_it_was_let_go(tmp_path: Path, status: str) -> None:
    inner = (_turn(3.0, 64, range(10, 11), api_time=1.0), _turn(6.0, 128, range(10, 12), api_time=1.0))
    requests = (
        _turn(0.0, 64, range(1), api_time=2.0),
        WekaSubagent(t=3.0, agent_id="x", requests=inner, status=status),
        _turn(10.0, 128, range(2)),
    )
    write_weka(tmp_path / "one.json", [WekaConversation(id="a", requests=requests)])
    first, begun, ended, last = arrivals(tmp_path / "one.json", "weka")
    assert (begun.after, ended.after) == (first.id, begun.id)
    assert begun.session == ended.session != first.session == last.session
    assert begun.think_s == 1.0
    assert (last.after, last.think_s) == ((ended.id, 3.0) if status == "completed" else (first.id, 8.0))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"format": "csv"}, "format must be one of mooncake, weka, not 'csv'"),
        ({"speedup": 0.0}, "speedup must be above 0, not 0"),
        ({"every_s": -1.0}, "every_s must be at least 0, not -1"),
        ({"limit": 0}, "limit must be at least 1, not 0"),
        ({"block_size": 48}, "48"),
    ],
)
def test_arrivals_that_cannot_be_are_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    file = tmp_path / "trace.jsonl"
    write_mooncake(file, [MooncakeRequest(0, 513, 1, (1, 2))])
    with pytest.raises(ValueError, match=said):
        arrivals(file, **given)
