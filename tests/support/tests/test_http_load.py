# SPDX-License-Identifier: Apache-2.0
"""What is read from `wrk`. The program itself is not in the light environment: a script stands for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.bench import Unavailable
from support.http_load import wrk

URL = "http://127.0.0.1:9/v1/chat/completions"


def fake_wrk(folder: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    program = folder / "wrk"
    program.write_text(f"#!/bin/sh\ncp \"$7\" {folder}/script.lua\necho '{says}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_without_wrk_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Unavailable, match="apt-get install wrk"):
        wrk(URL, {}, connections=1, seconds=1)


def test_errors_do_not_count_as_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = '{"requests":1000,"us":2000000,"p50":150,"p90":200,"p99":1200,"status":200,"socket":3,"timeout":1}'
    fake_wrk(tmp_path, monkeypatch, f"RESULT {said}")
    result = wrk(URL, {"a": 'quote " and \\'}, connections=4, seconds=2, headers={"x-one": "1"})
    assert (result.rate, result.p50_ms, result.p99_ms, result.failed) == (400, 0.15, 1.2, 204)
    sent = "".join(chr(int(code)) for code in (tmp_path / "script.lua").read_text().split('"')[3].split("\\")[1:])
    assert sent == '{"a": "quote \\" and \\\\"}'


def test_no_answer_at_all_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zero = '{"requests":0,"us":2000000,"p50":0,"p90":0,"p99":0,"status":0,"socket":0,"timeout":9}'
    fake_wrk(tmp_path, monkeypatch, f"RESULT {zero}")
    with pytest.raises(RuntimeError, match="not one answer"):
        wrk(URL, {}, connections=4, seconds=2)
