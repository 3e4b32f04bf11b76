# SPDX-License-Identifier: Apache-2.0
"""One replica of the gateway: its listeners, the configuration at work, reload and drain."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import re
import resource
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ._admission import reserved_ranges
from ._breakers import Breakers
from ._config import Config, Model, load, parse_address, without_password
from ._errors import ConfigError
from ._metrics import CONTENT_TYPE, Metrics, View
from ._proxy import Proxy
from ._runtime import Runtime, build
from ._store import Store, open_store, uptime
from .version import __version__

__all__ = ["Gateway", "check"]

_log = logging.getLogger("dynamo_resilience")

#: How often the file is looked at.
_LOOK_S = 1.0
#: How often a drain looks for connections that have become idle.
_DRAIN_LOOK_S = 0.05
#: What the last bytes may take to clients whose requests were cut.
_CUT_S = 1.0
#: What each part may take to stop; giving leases back is one.
_CLOSE_S = 3.0


def _ours(record: logging.LogRecord) -> bool:
    """Return whether a record is about more than what a client sent: that is no fault of ours, and may hold its key."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (HttpProcessingError, web.RequestPayloadError, ConnectionError))


_http_log = logging.getLogger("dynamo_resilience.http")
_http_log.addFilter(_ours)


class Gateway:
    """A replica.

    Args:
        source: the configuration's file, or a configuration, which then never changes.
        name: the first part of this replica's name in the store; the host's name by default. A process adds a random
            part: restarted, it is another replica.
        clock: seconds, never going back; by default the machine's uptime, time in suspension included.

    Attributes:
        replica: its name in the store.
        addresses: where it listens, `listen` and `admin`, once started: host and port.
    """

    def __init__(self, source: Path | Config, *, name: str | None = None, clock: Callable[[], float] = uptime) -> None:
        self._source = source
        self._clock = clock
        host = re.sub(r"[^A-Za-z0-9_.-]", "-", name or socket.gethostname())[:64]
        self.replica = f"{host}.{secrets.token_hex(4)}"
        self.addresses: dict[Literal["listen", "admin"], tuple[str, int]] = {}
        self._started = time.time()
        self._loaded = 0.0
        self._seen: tuple[int, ...] | None = None
        self._fault: dict[str, Any] | None = None
        self._draining = False
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._look = asyncio.Event()
        self._signal = False  # SIGHUP came: read the file even if it looks the same
        self._reloading = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._listeners: dict[str, tuple[asyncio.Server, web.Server]] = {}
        self._config: Config
        self._store: Store
        self._breakers: Breakers
        self._runtime: Runtime
        self._proxy: Proxy
        self.metrics: Metrics

    @property
    def draining(self) -> bool:
        """Whether it takes no more requests."""
        return self._draining

    @property
    def ready(self) -> bool:
        """Whether it should be sent requests: not draining, and some frontend has answered."""
        return not self._draining and self._runtime.ready

    async def start(self) -> None:
        """Load, listen and serve; raise ConfigError, or OSError where it cannot listen, and leave nothing running."""
        config = self._config = self._load()
        with _naming(self._source):
            self._store = open_store(config.store, self._clock)
            self._breakers = Breakers(self._store, config.breaker, self._clock)
            self._runtime = self._build(config, None)
        self._loaded = time.time()
        self.metrics = Metrics(self._view)
        self._proxy = Proxy(lambda: self._runtime, clock=self._clock, observe=self.metrics.observe)
        try:
            await self._store.start()
            await self._breakers.start()
            await self._runtime.start()
            # Probes are answered as soon as clients are.
            await self._listen("admin", config.admin, self._admin)
            await self._listen("listen", config.listen, self._proxy.handle)
        except BaseException:
            await self._close()
            raise
        if isinstance(self._source, Path):
            self._watcher = asyncio.create_task(self._watch(self._source))
        files, wanted = resource.getrlimit(resource.RLIMIT_NOFILE)[0], 2 * config.limits.open_requests
        if files != resource.RLIM_INFINITY and files < wanted:
            _log.warning("%d open files are fewer than the %d that limits.open_requests may take", files, wanted)
        _log.info(
            "%s serves %s on %s, admin on %s",
            self.replica,
            ", ".join(sorted(self._runtime.routes)),
            *(_written(self.addresses[name]) for name in ("listen", "admin")),
        )

    async def run(self) -> None:
        """Start, serve until SIGTERM or SIGINT, and stop; a second one cuts the drain short. SIGHUP reloads."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(signal.SIGHUP, self._reread)
        await self.start()
        await self._stop.wait()
        await self.stop()

    async def stop(self) -> None:
        """Take no more requests, refuse queued ones, give those that run `drain_s`, cut the rest, give leases back."""
        self._draining = True
        if self._watcher is not None:
            self._watcher.cancel()
        self._proxy.drain()
        for pool in self._runtime.pools.values():
            pool.drain()
        server, protocol = self._listeners["listen"]
        server.close()
        drain_s = self._runtime.config.timeouts.drain_s
        _log.info("draining: %d requests run, %g s at most", self._proxy.open, drain_s)
        if not await self._drained(protocol, drain_s, self._hurry):
            _log.warning("cutting %d requests", self._proxy.open)
            self._proxy.cancel()
            await self._drained(protocol, _CUT_S)
        await self._close()
        _log.info("stopped")

    async def reload(self) -> bool:
        """Put the file to work as it is now; return whether that went well. If not, everything stays as it was."""
        async with self._reloading:
            before = self._runtime
            try:
                config = self._load()
                if config != self._config:
                    with _naming(self._source):
                        _refuse_fixed(self._config, config)
                        after = self._build(config, before)
                    await after.start()
                    self._breakers.update(config.breaker)
                    self._runtime, self._config = after, config
                    task = asyncio.create_task(before.retire(after))
                    self._retiring.add(task)
                    task.add_done_callback(self._retired)
            except ConfigError as error:
                faults = str(error).splitlines()
                for fault in faults:
                    _log.error("the configuration stays as it was: %s", fault)
                self._fault = {"at": _moment(time.time()), "faults": faults}
                self.metrics.reloads["refused"] += 1
                return False
            self._fault = None
            self._loaded = time.time()
            self.metrics.reloads["ok"] += 1
            _log.info("configuration %s", "unchanged" if self._runtime is before else "reloaded")
            return True

    def state(self) -> dict[str, Any]:
        """Return what `/state` shows. No API key, no hash of one, no password."""
        store = self._config.store
        return {
            "replica": self.replica,
            "version": __version__,
            "started": _moment(self._started),
            "ready": self.ready,
            "draining": self._draining,
            "open_requests": self._proxy.open,
            "config": {
                "file": str(self._source) if isinstance(self._source, Path) else None,
                "loaded": _moment(self._loaded),
                "refused": self._fault,
            },
            "store": {
                "url": without_password(store.url),
                "prefix": store.prefix,
                "up": self._store.up,
                "last_error": self._store.last_error,
                "epoch": self._store.epoch,
            },
            "tenants": sorted(self._config.tenants),
            "breakers": self._breakers.snapshot(),
            **self._runtime.snapshot(),
        }

    def _view(self) -> View:
        return View(
            runtime=self._runtime,
            proxy=self._proxy,
            store=self._store,
            breakers=self._breakers,
            ready=self.ready,
            draining=self._draining,
            loaded=self._loaded,
            refused=self._fault is not None,
        )

    def _load(self) -> Config:
        if isinstance(self._source, Config):
            return self._source
        self._seen = _identity(self._source)  # before it is read: what changes meanwhile is seen as a change
        return load(self._source)

    def _build(self, config: Config, previous: Runtime | None) -> Runtime:
        return build(
            config, previous, store=self._store, breakers=self._breakers, replica=self.replica, clock=self._clock
        )

    async def _listen(
        self,
        name: Literal["listen", "admin"],
        address: str,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    ) -> None:
        host, port = parse_address(address)
        # Bodies pass as they are, compressed ones too.
        protocol = web.Server(
            handler, access_log=None, handler_cancellation=True, auto_decompress=False, logger=_http_log
        )
        try:
            server = await asyncio.get_running_loop().create_server(protocol, host, port, backlog=4096)
        except OSError as error:
            raise OSError(error.errno, f"cannot listen on {address} ({name}): {error.strerror or error}") from error
        self._listeners[name] = server, protocol
        self.addresses[name] = server.sockets[0].getsockname()[:2]

    async def _admin(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, headers={"Allow": "GET, HEAD"}, text="method not allowed\n")
        match request.path:
            case "/healthz":
                return web.Response(text="ok\n")
            case "/readyz":
                if self.ready:
                    return web.Response(text="ready\n")
                return web.Response(status=503, text="draining\n" if self._draining else "no frontend has answered\n")
            case "/metrics":
                return web.Response(body=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})
            case "/state":
                return web.json_response(self.state(), dumps=lambda state: json.dumps(state, indent=1) + "\n")
        return web.Response(status=404, text="there are /healthz, /readyz, /metrics and /state\n")

    async def _watch(self, path: Path) -> None:
        while True:
            # Not wait_for: before Python 3.12 it now and then swallows the cancellation that is to end this.
            look = asyncio.get_running_loop().call_later(_LOOK_S, self._look.set)
            await self._look.wait()
            look.cancel()
            self._look.clear()
            signalled, self._signal = self._signal, False
            if not signalled and _identity(path) == self._seen:
                continue
            try:
                await self.reload()
            except Exception:
                _log.exception("the configuration stays as it was: reload failed")
                self.metrics.reloads["refused"] += 1

    def _reread(self) -> None:
        self._signal = True
        self._look.set()

    def _signalled(self, number: int) -> None:
        _log.info("%s", signal.Signals(number).name)
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def _retired(self, task: asyncio.Task[None]) -> None:
        self._retiring.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("an old configuration did not end cleanly", exc_info=error)

    async def _drained(self, protocol: web.Server, seconds: float, hurry: asyncio.Event | None = None) -> bool:
        """Wait until the last client has its answer; return whether that came in time, and before anybody hurried."""
        end = self._clock() + seconds
        while True:
            # Server.pre_shutdown would do this with two faults (aiohttp 3.14): an idle connection stays open, deaf, and
            # a body that is still on its way is not read on.
            for connection in protocol.connections:
                waiter = getattr(connection, "_waiter", None)  # there while it waits for a request
                if waiter is not None and not waiter.done():
                    connection.force_close()
            if not protocol.connections:
                return True
            if self._clock() >= end or (hurry is not None and hurry.is_set()):
                return False
            await asyncio.sleep(_DRAIN_LOOK_S)

    async def _close(self) -> None:
        """Stop what runs, each part for itself, in a bounded time."""
        # Clients first: what waits for one that does not read holds capacity.
        parts: list[Callable[[], Awaitable[object]]] = [
            *self._closing("listen"),
            self._retire_all,
            self._breakers.close,
            self._store.close,
            *self._closing("admin"),
        ]
        for part in parts:
            task = asyncio.ensure_future(part())
            try:
                await asyncio.wait((task,), timeout=_CLOSE_S)
            finally:
                task.cancel()
            await asyncio.wait((task,))
            if task.cancelled():
                _log.error("a part did not stop within %g s", _CLOSE_S)
            elif (error := task.exception()) is not None:
                _log.error("a part did not stop cleanly", exc_info=error)

    def _closing(self, name: str) -> list[Callable[[], Awaitable[object]]]:
        if name not in self._listeners:
            return []
        server, protocol = self._listeners.pop(name)
        server.close()
        return [functools.partial(protocol.shutdown, 0.1)]

    async def _retire_all(self) -> None:
        await asyncio.gather(self._runtime.retire(None), *self._retiring)


def _refuse_fixed(old: Config, new: Config) -> None:
    """Raise for what only a restart can change."""
    faults = [
        f"{key}: cannot change while the gateway runs: restart it (is {without_password(before)}, got "
        f"{without_password(after)})"
        for key, before, after in (
            ("listen", old.listen, new.listen),
            ("admin", old.admin, new.admin),
            *((f"store.{name}", str(value), str(getattr(new.store, name))) for name, value in old.store),
        )
        if before != after
    ]
    if faults:
        raise ConfigError("\n".join(faults))


def _identity(path: Path) -> tuple[int, ...] | None:
    """Return what differs when a file was written or replaced, behind symbolic links too; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


def _written(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _admission(settings: Model) -> str:
    if settings.capacity is None:
        return "no capacity: everything is admitted"
    ranges = reserved_ranges(settings)
    free = settings.blocks - sum(end - begin for begin, end in ranges.values())
    limits = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in settings.capacity if value is not None)
    shares = [f"{tenant} {end - begin}" for tenant, (begin, end) in ranges.items()]
    return f"{limits} in {settings.blocks} blocks: {', '.join([*shares, f'serverless {free}'])}"


@contextlib.contextmanager
def _naming(source: Path | Config) -> Iterator[None]:
    """Put the file's name before each fault that is found after the file was read."""
    try:
        yield
    except ConfigError as error:
        if isinstance(source, Config):
            raise
        raise ConfigError("\n".join(f"{source}: {fault}" for fault in str(error).splitlines())) from error


async def check(path: Path) -> str:
    """Return, as text, what the file would serve; raise ConfigError as a start with it would."""
    config = load(path)
    with _naming(path):
        store = open_store(config.store, uptime)
        breakers = Breakers(store, config.breaker, uptime)
        build(config, None, store=store, breakers=breakers, replica="check", clock=uptime)
    lines = [
        f"{path}: ok",
        f"listen {config.listen}, admin {config.admin}, store {without_password(config.store.url)}",
        "breakers " + ("off" if config.breaker is None else "on"),
    ]
    for site_name, site in sorted(config.sites.items(), key=lambda one: one[1].prefer):
        lines.append(f"site {site_name}: prefer {site.prefer}, route {site.route}, {', '.join(site.frontends)}")
        lines.extend(f"  model {model}: {_admission(settings)}" for model, settings in site.models.items())
    for name, tenant in config.tenants.items():
        keys = f"{len(tenant.keys_sha256)} key" + "s" * (len(tenant.keys_sha256) > 1)
        lines.append(f"tenant {name}: {keys}, weight {tenant.weight:g}, priority up to {tenant.priority}")
    if not config.tenants:
        lines.append("no tenants: no key is asked for")
    return "\n".join(lines)
