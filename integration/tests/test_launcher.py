# SPDX-License-Identifier: Apache-2.0
"""The launcher before real processes: Dynamo's frontend and router, and Dynamo's own mock engines. No torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving_stack.state import free_ports, stat
from support.stack import Stack, until

pytestmark = pytest.mark.mocker


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """A home of its own; whatever the test starts there is ended."""
    one = Stack(tmp_path / "home", free_ports(1, above=22000)[0], "mocker")
    yield one
    one.command("down", check=False)


def _alive(stack: Stack) -> list[int]:
    return [process.pid for process in stack.run.members(stack.state)]


def test_up_serves_and_down_leaves_nothing(stack: Stack) -> None:
    said = stack.up().stdout
    assert f"http://127.0.0.1:{stack.port}/v1" in said
    curl = next(line for line in said.splitlines() if line.startswith("curl "))
    answer = json.loads(subprocess.run(["bash", "-c", curl + " -s"], capture_output=True, text=True, check=True).stdout)
    assert answer["usage"]["completion_tokens"] > 0
    status = stack.command("status").stdout
    for component in ("frontend", "prefill", "decode"):
        assert component in status
    assert json.loads(stack.command("status", "--json").stdout)["phase"] == "ready"
    # The ids shown are the ones the frontend routes to.
    assert {one.instance for one in stack.state.components.values() if one.worker} == stack.listed()
    members = _alive(stack)
    assert len(members) == 4
    assert "ended 4 processes" in stack.command("down").stdout
    assert _alive(stack) == []
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", stack.port)) != 0
    assert stack.command("status", check=False).returncode == 3
    assert stack.command("down").stdout.strip() == "nothing is running"


def test_counts_are_taken_from_the_command_line(stack: Stack) -> None:
    stack.up("--prefill", "2", "--decode", "2")
    state = stack.state
    assert sorted(state.components) == ["decode-0", "decode-1", "frontend", "prefill-0", "prefill-1"]
    assert len(stack.listed()) == 4
    assert len({one.instance for one in state.components.values() if one.worker}) == 4


def test_routers_stand_between_the_frontend_and_the_workers_and_come_back(stack: Stack) -> None:
    stack.profile = "mocker-router"
    stack.up("--prefill", "2", "--router", "2")
    components = stack.state.components
    assert sorted(components) == ["decode", "frontend", "prefill-0", "prefill-1", "router-0", "router-1"]
    assert {one.instance for one in components.values() if one.worker} == stack.listed()
    # The workers that the warm-up went through are named, by the router.
    said = re.search(r"prefill worker ([0-9a-f]+), decode worker ([0-9a-f]+)", stack.state.warm_up or "")
    assert said is not None
    ids = [str(int(found, 16)) for found in said.groups()]
    assert ids[0] in {components[name].instance for name in ("prefill-0", "prefill-1")}
    assert ids[1] == components["decode"].instance
    os.kill(components["router-0"].pid or 0, signal.SIGKILL)
    until(lambda: stack.state.components["router-0"].restarts == 1, 30, "the launcher notices")
    until(stack.ready, 60, "the router is back")
    body = {"model": stack.model, "prompt": "Hello", "max_tokens": 4}
    assert stack.post("/completions", body).status_code == 200


def test_second_up_is_refused_and_changes_nothing(stack: Stack) -> None:
    stack.up()
    before = _alive(stack)
    again = stack.up(check=False)
    assert again.returncode == 1
    assert "already running" in again.stderr
    assert str(stack.port) in again.stderr
    assert _alive(stack) == before
    assert stack.ready()


def test_busy_port_is_named_with_its_holder(stack: Stack) -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", stack.port))
        holder.listen()
        refused = stack.up(check=False)
    assert refused.returncode == 1
    assert f"--port {stack.port}" in refused.stderr
    assert f"process {os.getpid()}" in refused.stderr
    assert stack.run.read() is None


@pytest.mark.parametrize("victim", ["frontend", "prefill", "decode"])
def test_killed_component_comes_back(stack: Stack, victim: str) -> None:
    stack.up()
    pid = stack.state.components[victim].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: stack.state.components[victim].restarts == 1, 30, "the launcher notices")
    until(stack.ready, 60, f"{victim} is back")
    assert stack.state.components[victim].pid not in (None, pid)
    assert "signal 9" in (stack.state.components[victim].reason or "")
    # The dead worker's registration outlives it by Dynamo's time to live (10 s); within that a request may fail.
    body = {"model": stack.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    until(lambda: stack.post("/chat/completions", body).status_code == 200, 30, "a request is answered")


def test_starved_worker_is_registered_again(stack: Stack) -> None:
    stack.up()
    before = stack.state.components["decode"]
    assert before.pid is not None
    os.kill(before.pid, signal.SIGSTOP)
    try:
        until(lambda: before.instance not in stack.listed(), 40, "the frontend drops the starved worker")
    finally:
        os.kill(before.pid, signal.SIGCONT)
    until(lambda: stack.state.components["decode"].restarts == 1, 40, "the launcher notices")
    assert "registration" in (stack.state.components["decode"].reason or "")
    until(stack.ready, 60, "decode is registered again")
    assert stack.state.components["decode"].instance in stack.listed()


def test_frontend_that_stalls_for_a_moment_is_left_alone_and_one_that_hangs_is_replaced(
    stack: Stack, tmp_path: Path
) -> None:
    """Both stalls are longer than one question may take; only the second is longer than a frontend may be silent."""
    shipped = yaml.safe_load((resources.files("serving_stack") / "profiles" / "mocker.yaml").read_text("utf-8"))
    hasty = tmp_path / "hasty.yaml"
    hasty.write_text(yaml.safe_dump({**shipped, "ready_seconds": 8}))
    stack.profile = str(hasty)
    stack.up()
    pid = stack.state.components["frontend"].pid
    assert pid is not None
    time.sleep(8)  # older than the profile's ready_seconds
    os.kill(pid, signal.SIGSTOP)
    time.sleep(5)
    os.kill(pid, signal.SIGCONT)
    time.sleep(2)
    assert stack.state.components["frontend"].restarts == 0
    os.kill(pid, signal.SIGSTOP)
    until(lambda: stack.state.components["frontend"].restarts == 1, 90, "the launcher gives up on it")
    assert "silent" in (stack.state.components["frontend"].reason or "")
    until(stack.ready, 60, "the frontend is back")


def test_down_spares_a_stranger_with_the_same_session_id(stack: Stack) -> None:
    """After a reboot or when process ids wrap, another session can have the id that a dead run left behind."""
    stack.up()
    stack.command("down")
    stranger = subprocess.Popen(["sleep", "300"], start_new_session=True)
    try:
        state = stack.state.model_copy(update={"session": stranger.pid, "phase": "ready"})
        stack.run.write(state)
        assert stack.command("down").stdout.strip() == "nothing is running"
        # Nor one whose leader is dead: it does not carry the run's mark.
        born = stat(stranger.pid)
        assert born is not None
        stack.run.write(state.model_copy(update={"born": born.born}))
        assert stack.command("down").stdout.strip() == "nothing is running"
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_two_ups_at_once_leave_one_stack(stack: Stack) -> None:
    words = [sys.executable, "-m", "serving_stack", "up", "--profile", "mocker", "--port"]
    environment = {**os.environ, "SERVING_STACK_HOME": str(stack.home)}
    both = [
        subprocess.Popen(
            [*words, str(port)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for port in free_ports(2, above=stack.port)
    ]
    said = [one.communicate(timeout=120)[0] for one in both]
    assert sorted(one.returncode for one in both) == [0, 1], said
    loser = next(text for one, text in zip(both, said, strict=True) if one.returncode == 1)
    assert "another `serving-stack up`" in loser or "already running" in loser
    assert stack.ready()


def test_launcher_survives_a_disk_it_cannot_write(stack: Stack) -> None:
    stack.up()
    (stack.run.directory / "state.new").mkdir()
    before = stack.state.components["decode"].pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    until(
        lambda: "decode: starting" in stack.command("logs", "launcher").stdout.partition("signal 9")[2], 30, "restart"
    )
    (stack.run.directory / "state.new").rmdir()
    until(lambda: stack.state.components["decode"].restarts == 1 and stack.ready(), 60, "decode is back")


def test_files_of_the_user_shadow_no_module(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("httpx.py", "dynamo.py"):
        (tmp_path / name).write_text("raise SystemExit('shadowed')\n")
    script = shutil.which("serving-stack", path=str(Path(sys.executable).parent))
    assert script is not None
    done = subprocess.run(
        [script, "up", "--profile", "mocker", "--port", str(stack.port)],
        cwd=tmp_path,
        env={**os.environ, "SERVING_STACK_HOME": str(stack.home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_down_ends_everything_after_the_launcher_was_killed(stack: Stack) -> None:
    stack.up()
    os.kill(stack.state.session, signal.SIGKILL)
    until(lambda: not stack.run.launcher_alive(), 10, "the launcher is dead")
    assert len(_alive(stack)) == 3
    assert "the launcher is dead" in stack.command("status", check=False).stdout
    assert "ended 3 processes" in stack.command("down").stdout
    assert _alive(stack) == []


def test_up_after_a_killed_launcher_clears_what_it_left(stack: Stack) -> None:
    stack.up()
    os.kill(stack.state.session, signal.SIGKILL)
    until(lambda: not stack.run.launcher_alive(), 10, "the launcher is dead")
    left = _alive(stack)
    stack.port = free_ports(1, above=stack.port + 20)[0]
    assert "ended 3 processes that a launcher left behind" in stack.up().stdout
    assert not set(left) & set(_alive(stack))
    assert stack.ready()


def test_interrupt_during_the_start_ends_everything(stack: Stack, tmp_path: Path) -> None:
    profile = tmp_path / "slow.yaml"
    profile.write_text(
        "description: a frontend that is never ready\nengines: mocker\nserved_model_name: none\n"
        "components:\n  frontend:\n    module: http.server\n    args: {bind: 127.0.0.1}\n"
    )
    up = subprocess.Popen(
        [sys.executable, "-m", "serving_stack", "up", "--profile", str(profile), "--port", str(stack.port)],
        env={**os.environ, "SERVING_STACK_HOME": str(stack.home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    until(lambda: (state := stack.run.read()) and state.components["frontend"].state == "starting", 30, "it starts")
    members = _alive(stack)
    assert len(members) == 2
    up.send_signal(signal.SIGINT)
    said, _ = up.communicate(timeout=60)
    assert up.returncode == 130
    assert "interrupted" in said
    assert _alive(stack) == []


def test_component_that_fails_to_start_is_named_with_its_last_lines(stack: Stack, tmp_path: Path) -> None:
    profile = tmp_path / "broken.yaml"
    profile.write_text(
        "description: a frontend with a flag that does not exist\nengines: mocker\nserved_model_name: none\n"
        "components:\n  frontend:\n    module: http.server\n    args: {no-such-flag: 1}\n"
    )
    stack.profile = str(profile)
    refused = stack.up(check=False)
    assert refused.returncode == 1
    assert "frontend exited with status 2" in refused.stderr
    assert "no-such-flag" in refused.stderr
    assert _alive(stack) == []


STORE = """\
import os, socket, time
time.sleep(1.5)
listener = socket.create_server(("127.0.0.1", int(os.environ["STORE_PORT"])))
print("open", flush=True)
time.sleep(3600)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that Python looks for modules in."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def _with_store(stack: Stack, folder: Path, **overlay: Any) -> None:
    """Give the stack a profile whose tier is a process that opens its port after a while, before the prefill worker."""
    (folder / "slow_store.py").write_text(STORE)
    profile = yaml.safe_load((resources.files("serving_stack") / "profiles" / "mocker.yaml").read_text())
    store = {
        "module": "slow_store",
        "ports": ["store_port"],
        "environment": {"STORE_PORT": "${store_port}"},
    }
    profile["mooncake"] = {"components": {"store": store, "prefill": {"after": ["store"]}}, **overlay}
    (folder / "p.yaml").write_text(yaml.safe_dump(profile, sort_keys=False))
    stack.profile = str(folder / "p.yaml")


def test_component_starts_after_what_it_needs(stack: Stack, modules: Path) -> None:
    _with_store(stack, modules, files={"s.json": {"at": "${store.store_port}"}})
    stack.up()
    port = stack.state.components["store"].ports["store_port"]
    assert json.loads((stack.run.directory / "files" / "s.json").read_text()) == {"at": str(port)}
    said = stack.command("logs", "launcher").stdout.splitlines()
    order = [next(i for i, line in enumerate(said) if mark in line) for mark in ("store: ready", "prefill: starting")]
    assert order == sorted(order)
    # Both die: the worker comes back when its store has.
    victims = [stack.state.components[name].pid for name in ("store", "prefill")]
    for pid in victims:
        os.kill(pid or 0, signal.SIGKILL)
    until(lambda: all(stack.state.components[name].restarts == 1 for name in ("store", "prefill")), 30, "it is noticed")
    until(
        lambda: "waits for store" in (stack.state.components["prefill"].reason or ""), 30, "it says what it waits for"
    )
    until(stack.ready, 60, "both are back")
    said = stack.command("logs", "launcher").stdout.splitlines()
    ready = max(i for i, line in enumerate(said) if "store: ready" in line)
    assert ready < max(i for i, line in enumerate(said) if "prefill: starting" in line)


def test_tier_that_fails_at_the_start_names_the_way_round(stack: Stack, modules: Path) -> None:
    _with_store(stack, modules)
    (modules / "slow_store.py").write_text("raise SystemExit('no memory for a store')")
    failed = stack.up(check=False)
    assert failed.returncode == 1
    assert "store exited with status 1" in failed.stderr
    assert "no memory for a store" in failed.stderr
    assert "--no-mooncake" in failed.stderr


def test_no_mooncake_leaves_the_tier_out(stack: Stack, modules: Path) -> None:
    _with_store(stack, modules)
    stack.up("--no-mooncake")
    assert sorted(stack.state.components) == ["decode", "frontend", "prefill"]


def test_up_goes_on_without_a_tier_that_cannot_be(stack: Stack, modules: Path) -> None:
    _with_store(stack, modules, libraries={"libnowhere.so.7": "libnowhere7"})
    said = stack.up().stdout
    assert "no second cache tier (Mooncake): libnowhere.so.7 not found. Cure: apt-get install libnowhere7" in said
    assert sorted(stack.state.components) == ["decode", "frontend", "prefill"]


def test_no_mooncake_where_there_is_none_is_refused(stack: Stack) -> None:
    refused = stack.up("--no-mooncake", check=False)
    assert refused.returncode == 1
    assert "--no-mooncake: profile mocker has no Mooncake tier" in refused.stderr


def test_launcher_that_dies_at_once_is_no_silence(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that cannot even be imported: the reason is printed, though it never read its plan."""
    broken = stack.home.parent / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import sys\nif 'serving_stack.launcher' in sys.orig_argv: sys.exit('no launcher today')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(broken))
    refused = stack.up(check=False)
    assert refused.returncode == 1
    assert "the launcher ended with status 1" in refused.stderr
    assert "no launcher today" in refused.stderr


def test_logs_of_one_component_and_of_all(stack: Stack) -> None:
    stack.up()
    one = stack.command("logs", "decode").stdout
    assert "--- decode starts" in one
    everything = stack.command("logs").stdout
    for component in ("frontend", "prefill", "decode", "launcher"):
        assert any(line.startswith(component) for line in everything.splitlines())
    refused = stack.command("logs", "nobody", check=False)
    assert refused.returncode == 1
    assert "'nobody'" in refused.stderr
    assert "decode" in refused.stderr
    follower = subprocess.Popen(
        [sys.executable, "-m", "serving_stack", "logs", "-f", "launcher"],
        env={**os.environ, "SERVING_STACK_HOME": str(stack.home)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert follower.stdout is not None
    while "ready after" not in follower.stdout.readline():
        pass
    stack.command("down")
    time.sleep(0.5)
    follower.send_signal(signal.SIGINT)
    follower.communicate(timeout=10)
    assert follower.returncode == 130
