# SPDX-License-Identifier: Apache-2.0
"""The README says what the code does: its examples run, its tables have every setting, option and shipped profile."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import io
import re
import shlex
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path

import msgspec
import pytest

import dynamo_kv_router_ext as package
from dynamo_kv_router_ext import HealthSettings, Placer, Profile, Settings, Worker, shipped_profiles
from dynamo_kv_router_ext._metrics import Metrics
from dynamo_kv_router_ext._service import read_options
from dynamo_kv_router_ext.sim.cli import main, parser
from dynamo_kv_router_ext.sim.scenario import Fleet

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")


def table(head: str, after: str = "") -> list[list[str]]:
    """Return the rows of the table that begins so, the first after a heading, without their code marks."""
    lines = README[README.index(head, README.index(after)) :].splitlines()[2:]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"))
def test_the_python_examples_run(code: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, "README.md", "exec"), {})


def test_the_first_example_does_what_its_comments_say() -> None:
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(blocks("python")[0], "README.md", "exec"), names)
    reader, placer = names["reader"], names["placer"]
    assert isinstance(reader, package.Decision)
    assert isinstance(placer, Placer)
    assert reader.worker == "prefill-1"
    assert reader.terms.device_tokens == 6400
    assert said.getvalue().startswith("prefill-1 Terms(")
    for worker in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        assert placer.load(worker) == package.Load(0, 0.0, 0, 0)


def test_the_commands_of_the_simulator_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = next(block for block in blocks("bash") if "trace.jsonl" in block)
    trace, _, rest = script.partition("<<'END'\n")[2].partition("END\n")
    Path("trace.jsonl").write_text(trace, "utf-8")
    for line in (rest, blocks("console")[0].removeprefix("$ ")):
        words = shlex.split(line)
        assert words.pop(0) == "kv-router-sim"
        assert main(words) == 0
    said = capsys.readouterr().out
    for expected in ("ours", "round-robin", "least-loaded", "dynamo", "request-2, prefill", "request-2, decode"):
        assert expected in said


def test_every_command_is_one_that_the_parser_takes() -> None:
    for block in blocks("bash"):
        for line in block.splitlines():
            if line.startswith("kv-router-sim"):
                parser().parse_args(shlex.split(line)[1:])


def test_the_json_examples_are_a_profile_and_a_fleet() -> None:
    profile, fleet = blocks("json")
    assert msgspec.json.decode(profile, type=Profile).name == "example"
    assert [pool.role for pool in msgspec.json.decode(fleet, type=Fleet).pools] == ["prefill", "decode"]


@pytest.mark.parametrize("settings", [Settings, HealthSettings])
def test_every_setting_stands_with_its_default(settings: type[msgspec.Struct]) -> None:
    shown = {name: default for name, default, _ in table(f"| `{settings.__name__}` |")}
    assert shown == {
        field.name: repr(round(field.default, 4)) if isinstance(field.default, float) else repr(field.default)
        for field in msgspec.structs.fields(settings)
    }


def test_every_field_of_a_worker_stands_with_its_default() -> None:
    shown = {name: default for name, default, _ in table("| `Worker` |")}
    assert shown == {
        field.name: "required" if field.default is MISSING else "none" if field.default is None else repr(field.default)
        for field in fields(Worker)
    }


def test_every_shipped_profile_is_named() -> None:
    assert sorted(name for name, _ in table("| shipped |")) == shipped_profiles()


def test_every_option_of_the_simulator_is_named() -> None:
    shown = {option for cell, _ in table("| option |", "## The simulator") for option in re.findall(r"--[\w-]+", cell)}
    commands = [parser()]
    for action in commands[0]._actions:
        if isinstance(action, argparse._SubParsersAction):
            commands += action.choices.values()
    assert shown == {
        option
        for command in commands
        for action in command._actions
        for option in action.option_strings
        if option.startswith("--") and option != "--help"
    }


def test_every_option_of_the_router_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_options(["--help"])
    there = set(re.findall(r"--[\w-]+", capsys.readouterr().out)) - {"--help"}
    assert {option for cell, _ in table("| option |") for option in re.findall(r"--[\w-]+", cell)} == there


def test_every_metric_is_named() -> None:
    async def names() -> set[str]:
        metrics = Metrics()
        metrics.watch(lambda: {"workers": [], "bookings": {}, "sessions": 0, "peers": []})
        return {family.name.removeprefix("dynamo_router_ext_") for family in metrics.families()}

    shown = {name.removesuffix("_total") for cell, *_ in table("| metric, after") for name in cell.split(", ")}
    assert asyncio.run(names()) == shown


def test_every_call_of_the_placer_is_named_with_its_parameters() -> None:
    shown = dict(
        re.findall(r"`(\w+)\(([^)]*)\)`", README[README.index("| call |") : README.index("A `Request` may carry")])
    )
    calls: dict[str, Callable[..., object]] = {
        name: call for name, call in inspect.getmembers(Placer, inspect.isfunction) if not name.startswith("_")
    }
    assert shown.keys() == calls.keys()
    for name, given in shown.items():
        if given != "…":
            assert len(given.split(", ") if given else ()) == len(inspect.signature(calls[name]).parameters) - 1, name


def test_every_name_that_the_package_exports_exists_and_the_manual_uses_no_other() -> None:
    for name in package.__all__:
        assert hasattr(package, name)
    for code in blocks("python"):
        for names in re.findall(r"from dynamo_kv_router_ext import (.*)", code):
            assert set(names.split(", ")) <= set(package.__all__)
