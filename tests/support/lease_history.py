# SPDX-License-Identifier: Apache-2.0
"""The history of the gateway's leases as the store itself saw it, and a check that no block was held twice.

    with Recorder(server) as recorder:
        ... replicas lease blocks ...
    assert check(recorder.lines) == []

The history is the output of `MONITOR`: every operation as it was asked for, and what the script then did with the
records, in the order in which the server did it.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple

from support.store_server import StoreServer

__all__ = ["Recorder", "check"]

_LINE = re.compile(r"\+?[0-9.]+ \[\d+ (\S+)\] (.*)", re.DOTALL)
_ARGUMENT = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-f]{2}|.)", re.DOTALL)
_CONTROL = {"n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b"}
_DEADLINE_S = 10.0


class Recorder:
    """Writes down what a server does, over its restarts; a context manager, whose end waits for the last line.

    After a restart it has to be there before the first operation, and tries every two milliseconds; `check` reports an
    epoch whose beginning is missing.
    """

    def __init__(self, server: StoreServer) -> None:
        #: What was seen so far, a line an entry.
        self.lines: list[str] = []
        self._server = server
        self._stopped = threading.Event()
        self._connected = threading.Event()
        self._thread = threading.Thread(target=self._record, name="MONITOR", daemon=True)

    def __enter__(self) -> Recorder:
        self._thread.start()
        if not self._connected.wait(_DEADLINE_S):
            raise TimeoutError(f"{self._server.url} did not answer MONITOR")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.catch_up()
        self._stopped.set()
        self._thread.join(_DEADLINE_S)

    def catch_up(self) -> None:
        """Return when everything that the server has done so far is in `lines`."""
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline:
            mark = uuid.uuid4().hex
            with self._server.client() as client:
                client.echo(mark)
            until = time.monotonic() + 1  # the recorder may have been away: another mark then
            while time.monotonic() < until:
                if any(mark in line for line in self.lines[-1000:]):
                    return
                time.sleep(0.005)
        raise TimeoutError(f"the history of {self._server.url} ended early: {self.lines[-1:]}")

    def _record(self) -> None:
        while not self._stopped.is_set():
            try:
                with socket.create_connection(("127.0.0.1", self._server.port), timeout=0.1) as connection:
                    if self._server.password is not None:
                        connection.sendall(f"AUTH {self._server.password}\r\n".encode())
                    connection.sendall(b"MONITOR\r\n")
                    self._receive(connection)
            except OSError:
                time.sleep(0.002)

    def _receive(self, connection: socket.socket) -> None:
        rest = b""
        while not self._stopped.is_set():
            try:
                received = connection.recv(65536)
            except TimeoutError:
                continue
            if not received:
                return
            *lines, rest = (rest + received).split(b"\r\n")
            for line in lines:
                if line == b"+OK":
                    self._connected.set()
                else:
                    self.lines.append(line.decode("latin-1"))


class _Record(NamedTuple):
    owner: str
    epoch: int
    counter: int
    expires: int
    extended: bool = False
    released: bool = False


class _Request(NamedTuple):
    owner: str
    ttl_ms: int
    released: frozenset[tuple[int, str]]


def check(lines: Iterable[str], prefix: str = "{dynamo-gateway}:") -> list[str]:
    """Return what is wrong in a history of leases, a sentence each.

    Wrong is: a block that goes to another holder before the lease on it has ended or was given back, in the same epoch
    or over a change of epoch; a block given back by anybody but its holder; tokens or epochs that do not rise; a block
    granted within one TTL of the beginning of an epoch to anybody but its last holder; an epoch whose beginning is not
    there (but the first).

    A lease that was live before a gap of more than half a TTL between two operations of its pool ends no sooner than a
    TTL after the gap, once until it is renewed: the store's clock may have been set forward. Wrong is a store that does
    not write that down, or extends anything else.
    """
    checker = _Checker(prefix)
    for line in lines:
        checker.read(line)
    return checker.faults


class _Checker:
    def __init__(self, prefix: str) -> None:
        self.faults: list[str] = []
        self._prefix = prefix
        self._request: _Request | None = None
        self._births: dict[int, int] = {}
        self._records: dict[tuple[str, int], _Record] = {}
        self._counters: dict[str, tuple[int, int]] = {}
        self._last: dict[tuple[str, int], int] = {}

    def read(self, line: str) -> None:
        match = _LINE.fullmatch(line)
        if match is None:
            return
        source, rest = match.groups()
        if source != "lua":
            self._request = None
            if rest[:5].upper() == '"EVAL':
                self._request = self._asked(_arguments(rest))
            return
        if not rest.startswith(('"HSET"', '"HDEL"')):
            return
        command, key, *arguments = _arguments(rest)
        if key == f"{self._prefix}epoch" and command == "HSET" and "born_ms" in arguments:
            fields = dict(zip(arguments[::2], arguments[1::2], strict=True))
            number = int(fields["number"])
            if self._births and number <= max(self._births):
                self.faults.append(f"epoch {number} follows {max(self._births)}: {line}")
            self._births[number] = int(fields["born_ms"])
        elif key.startswith(f"{self._prefix}lease:"):
            number_text, _, pool = key[len(self._prefix) + len("lease:") :].partition(":")
            if self._request is None:
                self.faults.append(f"a record was changed by no operation: {line}")
            elif command == "HDEL":
                for field in arguments:
                    if field.startswith("b:"):
                        self._given_back(pool, int(field[2:]), line)
            else:
                fields = dict(zip(arguments[::2], arguments[1::2], strict=True))
                written = {int(field[2:]): value for field, value in fields.items() if field[:2] == "b:"}
                extended: set[int] = set()
                if "t" in fields:
                    extended = self._extended(pool, int(number_text), int(fields["t"]))
                for block in sorted(extended - written.keys()):
                    self.faults.append(f"{pool}: block {block} was live before a gap, and not extended: {line}")
                for block, value in sorted(written.items(), key=lambda pair: _counter(pair[1])):
                    self._written(pool, int(number_text), block, value, line, block in extended)

    def _asked(self, arguments: list[str]) -> _Request | None:
        try:
            _, account, holder, ttl_ms, _, _, _, _, release, *_ = json.loads(arguments[4])["lease"]
        except (LookupError, TypeError, ValueError):
            return None
        names = (name.replace("%", "%25").replace("|", "%7C") for name in (holder, account))
        return _Request("|".join(names), ttl_ms, frozenset((block, token) for block, token in release))

    def _given_back(self, pool: str, block: int, line: str) -> None:
        assert self._request is not None
        record = self._records.get((pool, block))
        if record is None:
            if self._births:
                self.faults.append(f"{pool}: block {block} was given back, and nobody held it: {line}")
            return
        token = f"{record.epoch}.{record.counter}"
        if record.owner != self._request.owner or (block, token) not in self._request.released:
            self.faults.append(f"{pool}: block {block} of {record.owner} was freed by {self._request.owner}: {line}")
        self._records[pool, block] = record._replace(released=True)

    def _extended(self, pool: str, epoch: int, now: int) -> set[int]:
        """Extend what has to be after a gap, and return which blocks those are."""
        assert self._request is not None
        last = self._last.get((pool, epoch), now)
        self._last[pool, epoch] = now
        ttl_ms = self._request.ttl_ms
        if 2 * (now - last) <= ttl_ms:
            return set()
        found = {
            (name, block): record
            for (name, block), record in self._records.items()
            if name == pool and record.epoch == epoch and record.expires > last
            if not (record.released or record.extended)
        }
        for key, record in found.items():
            expires = now + max(ttl_ms, record.expires - last)
            self._records[key] = record._replace(expires=expires, extended=True)
        return {block for _, block in found}

    def _written(self, pool: str, epoch: int, block: int, value: str, line: str, extended: bool) -> None:
        assert self._request is not None
        holder, account, token, expires_text, extended_text = value.split("|")
        owner, expires = f"{holder}|{account}", int(expires_text)
        counter = _counter(value)
        now = expires - self._request.ttl_ms
        record = _Record(owner, epoch, counter, expires, extended_text == "1")
        last = self._records.get((pool, block))
        where = f"{pool}: block {block}"
        if record.extended:
            if last is None and not self._births:  # it was granted before the history began
                self._records[pool, block] = record
            elif not extended or record != last:
                self.faults.append(f"{where} was extended to {expires} instead of {last}: {line}")
            return
        self._records[pool, block] = record
        if token.partition(".")[0] != str(epoch):
            self.faults.append(f"{where} has the token {token} in epoch {epoch}: {line}")
        if owner != self._request.owner:
            self.faults.append(f"{where} was given to {owner} by an operation of {self._request.owner}: {line}")
        if last is not None and (last.epoch, last.counter) == (epoch, counter):
            if last.owner != owner or last.released:
                self.faults.append(f"{where} was renewed by {owner}; {last.owner} had it: {line}")
            return
        # From here on it is a grant.
        if last is None and epoch not in self._births and not self._births:
            # It was granted before the history began; its token says nothing of what comes.
            return
        if (epoch, counter) <= self._counters.get(pool, (0, 0)):
            self.faults.append(f"{where} has the token {token} after {self._counters[pool]}: {line}")
        self._counters[pool] = max(self._counters.get(pool, (0, 0)), (epoch, counter))
        if last is not None and last.owner != owner and not last.released and last.expires > now:
            self.faults.append(f"{where} went to {owner} {last.expires - now} ms before {last.owner} had to go: {line}")
        if epoch in self._births:
            age = now - self._births[epoch]
            reclaimed = last is not None and last.owner == owner and not last.released
            if age < self._request.ttl_ms and not reclaimed:
                self.faults.append(f"{where} was granted to {owner} in an epoch that was {age} ms old: {line}")
        elif self._births:
            self._births[epoch] = now
            self.faults.append(f"the beginning of epoch {epoch} is missing: {line}")


def _counter(record: str) -> int:
    return int(record.split("|")[2].partition(".")[2])


def _arguments(text: str) -> list[str]:
    return [
        _ESCAPE.sub(_unescaped, argument).encode("latin-1").decode(errors="replace")
        for argument in _ARGUMENT.findall(text)
    ]


def _unescaped(match: re.Match[str]) -> str:
    what = match.group(1)
    return chr(int(what[1:], 16)) if len(what) == 3 else _CONTROL.get(what, what)
