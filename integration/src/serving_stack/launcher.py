# SPDX-License-Identifier: Apache-2.0
"""The launcher: starts a run's processes, watches them, brings back what dies, and ends them all.

Runs as `python -m serving_stack.launcher`, leader of a session of its own, and reads its plan from standard input.
Each process leads a process group, so that one component can be ended with all it started. What it watches:

- a process that exits is started again, after 1 s, 2 s, 4 s ... up to 30 s; during the first start an exit is final,
  and its last lines are the reason;
- a worker the frontend no longer lists, though its process lives, is started again. Dynamo's file discovery deletes a
  worker that was starved for its time to live (10 s), and the worker never registers a second time;
- a frontend that stays silent, though its process lives, is started again.

Processes run in the run's own directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import psutil
from pydantic import BaseModel

from .errors import StackError
from .profile import Process
from .state import ComponentState, Run, RunState, boot, end, stat

#: Seconds between two looks at the processes during the start; half as often later.
TICK = 0.5
#: A worker missing from the frontend's list for this many seconds is lost. Longer than the frontend needs to start.
LOST_AFTER = 8.0
#: A frontend that does not answer for this many seconds is lost. Longer than a starved machine keeps it waiting.
SILENT_AFTER = 20.0
#: Seconds a process gets to end by itself.
GRACE = 8.0
#: Within this the launcher has ended every process, seconds: three stages, and what a kill takes.
LONGEST_END = 3 * GRACE + 10
#: Longest pause before a restart, seconds.
LONGEST_PAUSE = 30.0


class Plan(BaseModel):
    """What `serving-stack up` tells the launcher."""

    run_id: str
    profile: str
    model: str
    served_model_name: str
    port: int
    ready_seconds: int
    transfers_kv: bool
    processes: list[Process]
    files: dict[str, str] = {}
    #: Components that `up --no-mooncake` leaves out.
    tier: list[str] = []


def metric(text: str, name: str) -> float:
    """Sum the samples called `name` in a Prometheus text exposition; 0 if there is none."""
    total = 0.0
    for line in text.splitlines():
        if line.startswith(name) and line[len(name) : len(name) + 1] in {"{", " "}:
            total += float(line.rsplit(None, 1)[1])
    return total


class _Child:
    """One process of the plan, over all its lives."""

    def __init__(self, process: Process, state: ComponentState, log: Path) -> None:
        self.process, self.state, self.log = process, state, log
        self.popen: subprocess.Popen[bytes] | None = None
        self.started = 0.0
        self.next_start = 0.0
        self.missing_since: float | None = None
        #: The port its requests come in at, once the frontend lists it.
        self.port: int | None = None

    def start(self) -> None:
        environment = {**os.environ, **self.process.environment}
        own_group: dict[str, Any] = (
            {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": lambda: os.setpgid(0, 0)}
        )
        with self.log.open("ab") as log:
            log.write(f"--- {self.process.name} starts, {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
            log.flush()
            self.popen = subprocess.Popen(
                [sys.executable, "-m", self.process.module, *self.process.args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.log.parent.parent,
                env=environment,
                **own_group,
            )
        self.started = time.monotonic()
        self.missing_since = None
        self.port = None
        self.state.pid = self.popen.pid
        self.state.instance = None
        self.state.state = "starting"

    def group(self) -> list[psutil.Process]:
        """Return the living processes of this component, also when its leader is dead."""
        found = []
        for pid in psutil.pids():
            one = stat(pid)
            if one is not None and one.group == self.state.pid:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.append(psutil.Process(pid))
        return found

    def find(self, listed: dict[int, str]) -> str | None:
        """Return this worker's instance among those listed by port; looks at its sockets until it is found once."""
        if self.port not in listed:
            self.port = None
            for process in self.group():
                with contextlib.suppress(psutil.Error):
                    for one in process.net_connections("tcp"):
                        if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port in listed:
                            self.port = one.laddr.port
        return None if self.port is None else listed[self.port]

    def listens(self) -> bool:
        """Return whether all of this component's ports are open."""
        wanted = set(self.process.ports.values())
        for process in self.group():
            with contextlib.suppress(psutil.Error):
                listening = {
                    one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN
                }
                wanted -= listening
        return not wanted

    def last_lines(self, count: int = 15) -> str:
        """Return the end of the log."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - 8192))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-count:])


class Launcher:
    """Owns one run from its first process to its last."""

    def __init__(self, run: Run, plan: Plan) -> None:
        self.run, self.plan = run, plan
        self.begun = time.monotonic()
        self.stopping = False
        self.warming: threading.Thread | None = None
        self.warmed: str | None = None
        own = stat(os.getpid())
        assert own is not None
        self.state = RunState(
            run_id=plan.run_id,
            session=os.getpid(),
            boot=boot(),
            born=own.born,
            profile=plan.profile,
            model=plan.model,
            served_model_name=plan.served_model_name,
            port=plan.port,
            components={
                process.name: ComponentState(ports=process.ports, worker=process.worker) for process in plan.processes
            },
        )
        self.children = [
            _Child(process, self.state.components[process.name], run.logs / f"{process.name}.log")
            for process in plan.processes
        ]
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{plan.port}", timeout=3.0, trust_env=False)
        self._saved = ""

    def save(self) -> None:
        """Write the state file if it would change."""
        text = self.state.model_dump_json()
        if text != self._saved:
            self.run.write(self.state)
            self._saved = text

    def say(self, text: str) -> None:
        """Write one line to the launcher's log; a full disk does not end the stack."""
        with contextlib.suppress(OSError):
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: end the run at the next look."""
        self.stopping = True

    def instances(self) -> dict[int, str] | None:
        """Return the `generate` instances the frontend lists, request port -> instance id; `None` if it is silent."""
        try:
            answer = self.http.get("/health").json()
            return {
                int(entry["transport"]["tcp"].split("/")[0].rsplit(":", 1)[1]): str(entry["instance_id"])
                for entry in answer.get("instances", [])
                if entry["endpoint"] == "generate"
            }
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError):
            return None

    def look(self) -> None:
        """Look at every process once: note what is ready, start what must be started."""
        now = time.monotonic()
        listed = self.instances()
        for child in self.children:
            state = child.state
            if child.popen is None:
                if now >= child.next_start:
                    self.start(child)
                continue
            status = child.popen.poll()
            if status is not None:
                how = f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"
                self.bring_back(child, f"{how} after {now - child.started:.0f} s")
                continue
            worker = child.process.worker is not None
            if child.process.name == "frontend":
                present = listed is not None
            elif not worker:  # once it has listened, being alive is enough
                present = state.state == "ready" or child.listens()
            elif listed is None:
                continue
            else:
                instance = child.find(listed)
                present = instance is not None
                state.instance = instance or state.instance
            if present:
                child.missing_since = None
                if state.state != "ready":
                    state.state = "ready"
                    state.ready_after = round(now - child.started, 1)
                    self.say(f"{child.process.name}: ready after {state.ready_after} s")
            elif state.state == "ready":
                child.missing_since = child.missing_since or now
                if now - child.missing_since > (LOST_AFTER if worker else SILENT_AFTER):
                    what = "lost its registration" if worker else f"was silent for {SILENT_AFTER:.0f} s"
                    self.bring_back(child, f"{what} though its process lives")
            elif self.state.phase == "ready" and now - child.started > self.plan.ready_seconds:
                self.bring_back(child, f"was not ready within {self.plan.ready_seconds} s")

    def start(self, child: _Child) -> None:
        """Start a component, or note what it waits for."""
        states = {other.process.name: other.state.state for other in self.children}
        late = [name for name in child.process.after if states[name] != "ready"]
        if late and child.state.state == "restarting":
            child.state.reason = f"{child.state.reason}; waits for {', '.join(late)}"
            self.say(f"{child.process.name}: waits for {', '.join(late)}")
        if late:
            child.state.state = "waiting"
            return
        self.say(f"{child.process.name}: starting")
        child.start()

    def bring_back(self, child: _Child, reason: str) -> None:
        """End what is left of a component and plan its next start; during the first start, fail instead."""
        end(child.group(), grace=0.0)
        if child.popen is not None:
            child.popen.wait()
        child.popen = None
        child.state.pid = None
        child.state.reason = reason
        if self.state.phase == "starting":
            child.state.state = "failed"
            raise StackError(f"{child.process.name} {reason}; its last lines:\n{child.last_lines()}")
        pause = min(LONGEST_PAUSE, 2.0**child.state.restarts)
        if time.monotonic() - child.started > 300:  # it had been well: an old failure does not slow this restart
            pause = 1.0
        child.state.restarts += 1
        child.state.state = "restarting"
        child.next_start = time.monotonic() + pause
        self.say(f"{child.process.name}: {reason}; starting it again in {pause:.0f} s")

    def transferred(self) -> tuple[float, float]:
        """Return the descriptors and bytes that went through NIXL so far, as counted by the end that moves them."""
        descriptors = moved = 0.0
        for child in self.children:
            if child.process.worker is not None and "system_port" in child.process.ports:
                address = f"http://127.0.0.1:{child.process.ports['system_port']}/metrics"
                with contextlib.suppress(httpx.HTTPError):
                    text = self.http.get(address).text
                    descriptors += metric(text, "vllm:nixl_num_descriptors_sum")
                    moved += metric(text, "vllm:nixl_bytes_transferred_sum")
        return descriptors, moved

    def warm_up(self) -> None:
        """Send one real request, in a thread of its own; leave in `warmed` how it went, if it went all the way."""
        try:
            self.warmed = self._warm_up()
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            self.say(f"warm-up: {error!r}")

    def _warm_up(self) -> str | None:
        body = {
            "model": self.plan.served_model_name,
            "messages": [{"role": "user", "content": "Write a haiku about KV caches."}],
            "max_tokens": 4,
            "temperature": 0,
            # Behind a router the frontend knows of no engine, and the router names them.
            "nvext": {"extra_fields": ["worker_id", "engine_data"]},
        }
        before = self.transferred()
        began = time.monotonic()
        answer = self.http.post("/v1/chat/completions", json=body, timeout=60.0)
        if answer.status_code != 200:
            self.say(f"warm-up: {answer.status_code} {answer.text[:300]}")
            return None
        seconds = time.monotonic() - began
        told = answer.json().get("nvext", {})
        roles = {child.process.worker for child in self.children}
        said = f"answered in {seconds:.1f} s"
        for role in ("prefill", "decode"):
            if "router" in roles:
                worker = told.get("engine_data", {}).get("router", {}).get(f"{role}_worker")
            else:
                worker = told.get("worker_id", {}).get(f"{role}_worker_id")
            if role in roles and not worker:
                self.say(f"warm-up: the answer names no {role} worker: nvext {json.dumps(told)[:300]}")
                return None
            if role in roles:
                said += f", {role} worker {worker:x}"
        if not self.plan.transfers_kv:
            return said
        deadline = time.monotonic() + 20  # vLLM publishes its counters at intervals
        while time.monotonic() < deadline and not self.stopping:
            descriptors, moved = (after - was for after, was in zip(self.transferred(), before, strict=True))
            if moved > 0:
                return f"{said}, {moved:.0f} bytes in {descriptors:.0f} descriptors through NIXL"
            time.sleep(0.2)
        self.say("warm-up: answered, but no KV went through NIXL")
        return None

    def main(self) -> int:
        """Run until told to stop; return the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.stop)
        self.save()
        try:
            while not self.stopping:
                try:
                    self.look()
                    self.save()
                    if self.state.phase == "starting":
                        self.advance()
                except OSError as error:  # no disk, no memory, no process to be had: try again at the next look
                    self.say(f"launcher: {error}")
                time.sleep(TICK if self.state.phase == "starting" else 2 * TICK)
            self.state.phase = "stopped"
        except Exception as error:
            self.say(str(error) if isinstance(error, StackError) else traceback.format_exc())
            self.state.phase, self.state.reason = "failed", str(error) or repr(error)
        finally:
            self.end_all()
            with contextlib.suppress(OSError):
                self.save()
        return 0 if self.state.phase == "stopped" else 1

    def advance(self) -> None:
        """Warm up once everything is ready; fail when the start takes too long."""
        waited = time.monotonic() - self.begun
        late = [child for child in self.children if child.state.state != "ready"]
        if self.warmed is not None:
            self.state.warm_up = self.warmed
            self.state.ready_after = round(waited, 1)
            self.state.phase = "ready"
            self.say(f"ready after {self.state.ready_after} s; warm-up {self.warmed}")
            return
        if not late and (self.warming is None or not self.warming.is_alive()):
            self.warming = threading.Thread(target=self.warm_up, daemon=True)
            self.warming.start()
        if waited > self.plan.ready_seconds:
            what = ", ".join(child.process.name for child in late) or "the warm-up request"
            tails = "\n".join(f"{child.process.name}, last lines:\n{child.last_lines()}" for child in late)
            raise StackError(f"{what} not ready after {waited:.0f} s\n{tails}".rstrip())

    def end_all(self) -> None:
        """End every process of the run but this one, and say so in the state."""
        for child in self.children:
            child.state.state = child.state.state if child.state.state == "failed" else "stopped"
        own = os.getpid()
        members = [process for process in self.run.members(self.state) if process.pid != own]
        # The frontend first: it drains the requests it holds while the workers still answer. What workers come after
        # goes last: they take their leave of it.
        first = {child.popen.pid for child in self.children if child.popen and child.process.name == "frontend"}
        needed = {name for child in self.children for name in child.process.after}
        last = {child.popen.pid for child in self.children if child.popen and child.process.name in needed}
        end([process for process in members if process.pid in first], grace=GRACE)
        end([process for process in members if process.pid not in first | last], grace=GRACE)
        end([process for process in members if process.pid in last], grace=GRACE)


def main() -> int:
    """Read a plan from standard input and run it."""
    plan = Plan.model_validate(json.load(sys.stdin))
    run = Run()
    try:
        with run.owned():
            for old in run.logs.glob("*.log"):
                if old.name != "launcher.log":
                    old.unlink()
            return Launcher(run, plan).main()
    except StackError as error:
        print(f"launcher: {error}", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
