# SPDX-License-Identifier: Apache-2.0
"""The process launcher: readiness, messages, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.processes import Process, ProcessError, ProcessExited, ProcessNotReady, free_port, free_ports

#: Starts a grandchild with the given treatment of TERM, prints its id, and sleeps.
FAMILY = """
import os, signal, subprocess, sys, time
leave, ignore = sys.argv[1] == "leave", sys.argv[2] == "ignore"
if ignore:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen(
    [sys.executable, "-c", "import signal, time\\n"
     + ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n" if ignore else "")
     + "print('grandchild ready', flush=True)\\ntime.sleep(600)"],
    start_new_session=leave,
)
print("grandchild", grandchild.pid, flush=True)
time.sleep(600)
"""


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-u", "-c", code, *arguments]


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def grandchild_of(process: Process) -> int:
    found = re.search(r"grandchild (\d+)", process.log_text())
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("session", ["stay", "leave"])
@pytest.mark.parametrize("term", ["obey", "ignore"])
def test_the_whole_family_is_ended(session: str, term: str) -> None:
    family = Process(python(FAMILY, session, term), ready=re.compile("grandchild ready"), grace_s=0.5)
    with family:
        pids = [family.pid, grandchild_of(family)]
        assert all(map(runs, pids))
        assert sorted(family.members()) == sorted(pids)
    assert not any(map(runs, pids))
    assert family.members() == []
    assert family.returncode == (-signal.SIGKILL if term == "ignore" else -signal.SIGTERM)


def test_a_child_without_the_environment_is_ended_by_its_session() -> None:
    code = """
import os, subprocess, sys, time
child = [sys.executable, "-c", "import time; time.sleep(600)"]
print("grandchild", subprocess.Popen(child, env={}, preexec_fn=os.setpgrp).pid, flush=True)
time.sleep(600)
"""
    with Process(python(code), ready=re.compile(r"grandchild \d+\n")) as family:
        grandchild = grandchild_of(family)
        assert os.getpgid(grandchild) != os.getpgid(family.pid)
        assert psutil.Process(grandchild).environ() == {}
        assert runs(grandchild)
    assert not runs(grandchild)


def test_orphans_of_a_killed_program_are_ended() -> None:
    with Process(python(FAMILY, "leave", "obey"), ready=re.compile("grandchild ready")) as family:
        orphan = grandchild_of(family)
        family.send_signal(signal.SIGKILL)
        assert family.wait(10) == -signal.SIGKILL
        assert runs(orphan)
    assert not runs(orphan)


def test_a_failure_in_the_block_shows_the_log_and_ends_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        Process(
            python("print('a clue'); import time; time.sleep(600)"), name="worker", ready=re.compile("clue")
        ) as worker,
    ):
        raise ZeroDivisionError
    assert not runs(worker.pid)
    assert "end of the log of worker (running) ---\na clue" in capfd.readouterr().err


def test_a_program_that_ends_before_it_is_ready_is_reported_at_once() -> None:
    started = time.monotonic()
    worker = Process(python("print('bad flag'); raise SystemExit(3)"), name="worker", ready=re.compile("up"))
    with pytest.raises(ProcessExited, match=r"worker: ended with status 3\n(?s:.*)bad flag") as raised:
        worker.start()
    assert (raised.value.returncode, raised.value.log_tail) == (3, "bad flag")
    assert time.monotonic() - started < 15


def test_the_deadline_ends_the_process_and_names_what_was_waited_for() -> None:
    worker = Process(python("import time; print('half up'); time.sleep(600)"), ready=re.compile("all up"), deadline_s=1)
    with pytest.raises(ProcessNotReady, match=r"not ready within 1 s: 'all up' is not in its log\n(?s:.*)half up"):
        worker.start()
    assert not runs(worker.pid)


def test_readiness_by_url_waits_for_a_good_answer() -> None:
    server = """
import http.server, sys, time
start = time.monotonic()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.monotonic() - start > 0.7 else 503)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
    port = free_port()
    with Process(python(server, str(port)), ready=f"http://127.0.0.1:{port}/health") as process:
        assert '"GET /health HTTP/1.1" 503' in process.log_text()
        assert process.log_text().rstrip().endswith("200 -")


def test_readiness_by_function_takes_an_exception_for_not_yet() -> None:
    calls = 0

    def ready() -> bool:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ConnectionRefusedError("nobody there")
        return calls > 2

    with Process(python("import time; time.sleep(600)"), ready=ready):
        assert calls == 3
    with pytest.raises(ProcessNotReady, match="ConnectionRefusedError: nobody there"):
        Process(python("import time; time.sleep(600)"), ready=_refuse, deadline_s=0.1).start()


def _refuse() -> bool:
    raise ConnectionRefusedError("nobody there")


def test_a_program_that_does_not_exist_is_named() -> None:
    with pytest.raises(ProcessError, match="database: cannot start no-such-program"):
        Process(["no-such-program"], name="database").start()


def test_a_pattern_that_was_not_compiled_is_refused() -> None:
    with pytest.raises(ValueError, match="has to be compiled"):
        Process(["true"], ready="Ready to accept")


def test_environment_folder_and_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "1")
    monkeypatch.setenv("REMOVED", "1")
    code = """
import os, time
print(os.environ.get("INHERITED"), os.environ.get("REMOVED"), os.environ["ADDED"], os.getcwd())
while not os.path.exists("end"):
    time.sleep(0.01)
"""
    log = tmp_path / "logs" / "worker.log"
    log.parent.mkdir()
    log.write_text("an older launch: done\n")
    with Process(python(code), env={"REMOVED": None, "ADDED": "2"}, cwd=tmp_path, log=log) as process:
        (tmp_path / "end").touch()
        assert process.wait(60) == 0
        assert process.log_text() == f"1 None 2 {os.path.realpath(tmp_path)}\n"
        with pytest.raises(ProcessExited, match="ended with status 0"):
            process.check()
    assert log.read_text().startswith("an older launch: done\n1 None 2")


def test_a_temporary_log_is_removed() -> None:
    with Process(python("import time; time.sleep(600)")) as process:
        assert process.log_path.exists()
    assert not process.log_path.exists()


def test_a_launch_within_a_launch_belongs_to_both() -> None:
    # The middle program is killed, so that only the outer launch is left to end the inner program.
    code = """
import sys, time
from support.processes import Process
inner = Process([sys.executable, "-c", "import time; time.sleep(600)"])
inner.start()
print("grandchild", inner.pid, flush=True)
time.sleep(600)
"""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    with Process(python(code), ready=re.compile(r"grandchild \d+\n"), env={"PYTHONPATH": path}) as outer:
        inner = grandchild_of(outer)
        outer.send_signal(signal.SIGKILL)
        outer.wait(10)
        assert runs(inner)
    assert not runs(inner)


def test_free_ports_differ_and_can_be_bound() -> None:
    ports = [*free_ports(20), free_port()]
    assert len(set(ports)) == 21
    for port in ports:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_workers_of_xdist_are_never_given_the_same_port() -> None:
    code = "from support.processes import free_ports; print(*free_ports(1500))"
    given = []
    for number in range(3):
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTEST_XDIST_WORKER": f"gw{number}"}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        given.append({int(port) for port in done.stdout.split()})
    assert len(set.union(*given)) == 3 * 1500
