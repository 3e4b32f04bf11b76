# SPDX-License-Identifier: Apache-2.0
"""The router as a process of its own, between Dynamo's frontend and its workers.

    python -m dynamo_kv_router_ext --endpoint pool.prefill.generate --endpoint pool.backend.generate

It finds the workers of the endpoints, offers their model to the frontends of its own namespace, and places each request
on them. Discovery, planes and the system port are set as for any process of Dynamo's (`DYN_DISCOVERY_BACKEND`, …).

Exit status: 0; 2 where an argument is wrong, the message names it; 1 where Dynamo's version is not supported, its
runtime does not start or is lost, or the workers' model cannot be offered.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import logging
import math
import operator
import os
import signal
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ._carry import Carrier
from ._compat import UnsupportedUpstreamError, check
from ._health import Health, HealthSettings
from ._index import PrefixIndex
from ._metrics import Metrics
from ._placement import Placer, Settings
from ._profile import Profile, ProfileError, load_profile, shipped_profiles
from ._records import Records
from ._replicas import join
from ._router import Router
from ._routes import Routes
from ._store_tier import StoreTier
from .version import __version__

if TYPE_CHECKING:
    from ._pool import Fleet

__all__ = ["Options", "main", "read_options"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: Seconds between two looks at who lives, and between two looks for workers that stand still.
_POLL_S, _TICK_S = 0.25, 0.5
#: Seconds that frontends have after SIGTERM to notice, and streams to end.
_NOTICE_S, _DRAIN_S = 1.0, 30.0
#: The namespace of Dynamo whose frontends list the models of all.
_GLOBAL = "dynamo"
#: Seconds that Dynamo's runtime has to end.
_LEAVE_S = 5.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    #: The workers' endpoints, as NAMESPACE.COMPONENT.ENDPOINT.
    endpoints: tuple[str, ...]
    #: Where the router itself is found, as NAMESPACE.COMPONENT.
    serve: str
    #: Where the estimates start.
    profile: Profile
    settings: Settings
    health: HealthSettings
    #: Workers that one request may be tried at.
    attempts: int
    #: Seconds for which a prompt's blocks count as present in the store; None: no store.
    store_fresh_s: float | None


def _path(text: str, parts: int) -> str:
    path = text.removeprefix("dyn://")
    if path.count(".") != parts - 1 or not all(path.split(".")):
        shape = ".".join(("NAMESPACE", "COMPONENT", "ENDPOINT")[:parts])
        raise argparse.ArgumentTypeError(f"must be {shape}, not {text!r}")
    return path


def _endpoint(text: str) -> str:
    return _path(text, 3)


def _component(text: str) -> str:
    return _path(text, 2)


def _profile(text: str) -> Profile:
    try:
        return load_profile(text)
    except (ProfileError, OSError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _struct(text: str, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(text, type=kind)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def _settings(text: str) -> Settings:
    return _struct(text, Settings)


def _health(text: str) -> HealthSettings:
    return _struct(text, HealthSettings)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0.0):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")
    return value


def read_options(arguments: Sequence[str] | None = None) -> Options:
    """Return what a command line says; SystemExit(2) where it is wrong, with a message that names flag and value."""
    parser = argparse.ArgumentParser(
        prog="python -m dynamo_kv_router_ext",
        description="Place requests on Dynamo's workers by the time they are expected to take.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument(
        "--endpoint",
        dest="endpoints",
        action="append",
        required=True,
        type=_endpoint,
        metavar="NS.COMPONENT.ENDPOINT",
        help="where workers serve; again for each pool. What they do, their cards say",
    )
    parser.add_argument(
        "--serve",
        type=_component,
        default="routed.router",
        metavar="NS.COMPONENT",
        help="where this router is found, in the frontend's namespace; its replicas say the same (%(default)s)",
    )
    parser.add_argument(
        "--profile",
        type=_profile,
        default="mocker",
        metavar="P",
        help=f"where the estimates start: a file, or {', '.join(shipped_profiles())} (%(default)s)",
    )
    parser.add_argument("--settings", type=_settings, default=Settings(), metavar="JSON", help="of `Settings`")
    parser.add_argument("--health", type=_health, default=HealthSettings(), metavar="JSON", help="of `HealthSettings`")
    parser.add_argument("--attempts", type=_count, default=3, metavar="N", help="tries of a request (%(default)s)")
    parser.add_argument(
        "--store-fresh-s",
        type=_seconds,
        metavar="S",
        help="the workers share a store, in which a prompt that was read is taken to stay for S seconds",
    )
    args = parser.parse_args(arguments)
    if args.store_fresh_s is not None and "store" not in args.profile.tiers:
        parser.error(f"argument --store-fresh-s: {args.store_fresh_s:g}: profile {args.profile.name} has no tier store")
    namespaces = {path.split(".")[0] for path in args.endpoints}
    if args.serve.split(".")[0] in namespaces:
        parser.error(f"argument --serve: {args.serve}: its namespace must be another than the workers'")
    if args.serve.split(".")[0] == _GLOBAL:
        parser.error(f"argument --serve: {args.serve}: frontends of namespace {_GLOBAL} see every namespace's workers")
    for path in args.endpoints:
        if args.endpoints.count(path) > 1:
            parser.error(f"argument --endpoint: {path} is given twice")
    return Options(
        endpoints=tuple(args.endpoints),
        serve=args.serve,
        profile=args.profile,
        settings=args.settings,
        health=args.health,
        attempts=args.attempts,
        store_fresh_s=args.store_fresh_s,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the router until it is told to end; returns the exit status."""
    options = read_options(arguments)
    try:
        check()
    except UnsupportedUpstreamError as error:
        print(error, file=sys.stderr)
        return 1
    try:
        import uvloop
        from dynamo.runtime.logging import configure_dynamo_logging
    except ImportError as error:
        print(f"the router needs ai-dynamo, which is not installed: {error}", file=sys.stderr)
        return 1
    configure_dynamo_logging()
    return uvloop.run(_run(options))


async def _run(options: Options) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    from dynamo.runtime import DistributedRuntime

    from ._pool import Fleet

    loop = asyncio.get_running_loop()
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    try:
        runtime = DistributedRuntime(
            loop, os.environ.get("DYN_DISCOVERY_BACKEND", "etcd"), os.environ.get("DYN_REQUEST_PLANE", "tcp")
        )
    except Exception as error:  # a DYN_… variable that it cannot use, or a discovery store that does not answer
        print(f"Dynamo's runtime does not start: {error}", file=sys.stderr)
        return 1
    fleet = Fleet(runtime, options.endpoints)
    await fleet.open()
    try:
        while fleet.first is None and not ending.is_set():  # the block size is known from the first worker on
            fleet.poll()
            await asyncio.sleep(_POLL_S)
        return 0 if ending.is_set() else await _serve(options, runtime, fleet, ending)
    finally:
        fleet.close()
        runtime.shutdown()  # again, where `_serve` has done it: nothing happens then


async def _serve(options: Options, runtime: Any, fleet: Fleet, ending: asyncio.Event) -> int:
    """Place requests on the fleet until told to end, and let those end that run; returns the exit status."""
    store = StoreTier(fresh_s=options.store_fresh_s) if options.store_fresh_s is not None else None
    placer = Placer(
        options.profile,
        options.settings,
        block_size=fleet.block_size,
        index=PrefixIndex(fleet.block_size, store),
        health=Health(options.health),
    )
    metrics = Metrics()
    router = Router(placer, Records(metrics))
    replicas = await join(runtime, options.serve, router)
    fleet.attach(router)
    carrier = Carrier(router, fleet, attempts=options.attempts, store=store)
    endpoint = runtime.endpoint(f"{options.serve}.generate")
    metrics.watch(router.state)
    endpoint.metrics.register_prometheus_expfmt_callback(metrics.expfmt)
    Routes(router).register(runtime)

    looking = [asyncio.create_task(_every(_POLL_S, fleet.poll)), asyncio.create_task(_every(_TICK_S, router.tick))]
    offering = asyncio.create_task(_offer(fleet, endpoint))
    told = asyncio.create_task(ending.wait())
    serving = asyncio.ensure_future(endpoint.serve_endpoint(carrier.generate, graceful_shutdown=False))
    try:
        await asyncio.wait([serving, told, offering], return_when=asyncio.FIRST_COMPLETED)
        if offering.done():
            found = fleet.offer()
            path = found[0].source_path if found is not None else ""
            _log.error("the workers' model, %s, cannot be offered to frontends: %r", path, offering.exception())
            return 1
        if serving.done():
            _log.error("Dynamo's runtime has ended, without being told to: its lease may be lost")
            return 1
        offering.cancel()
        try:
            await asyncio.wait_for(endpoint.unregister_endpoint_instance(), _LEAVE_S)
        except Exception as error:  # discovery's store is away, or this router is off its list already
            _log.warning("the router could not be taken off the list: %r", error)
        deadline = asyncio.get_running_loop().time() + _DRAIN_S
        await asyncio.sleep(_NOTICE_S)
        _log.info("ending: %d requests are left", carrier.running)
        while carrier.running and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        return 0
    finally:
        for task in (*looking, offering, told):
            task.cancel()
        await replicas.leave()
        runtime.shutdown()
        await asyncio.wait([serving], timeout=_LEAVE_S)  # Dynamo's threads use the loop until then


async def _every(seconds: float, call: Callable[[], object]) -> None:
    """Call something again and again; what it raises is logged."""
    while True:
        try:
            call()
        except Exception:
            _log.exception("%s failed", getattr(call, "__qualname__", call))
        await asyncio.sleep(seconds)


async def _offer(fleet: Fleet, endpoint: Any) -> None:
    """Register the model once the fleet can serve it and a card says what clients may be offered.

    From then on frontends know this router as long as a worker can generate. Without one they ask another replica, or
    answer 503 by themselves, which is a status also for who asked for a stream.
    """
    from dynamo.llm import ModelInput, ModelType, RouterConfig, RouterMode, WorkerType, register_model

    waiting = False
    while (found := fleet.offer()) is None or not fleet.complete:
        if not waiting:
            _log.info("waiting until the workers can serve: one generates, and it or another reads prompts")
        waiting = True
        await asyncio.sleep(_POLL_S)
    card, text = found
    told = json.loads(text)
    kinds = [getattr(ModelType, name) for name in card.surface]
    template = await asyncio.to_thread(_template, told)
    await register_model(
        ModelInput.Tokens,
        functools.reduce(operator.or_, kinds),
        endpoint,
        card.source_path,
        card.display_name,
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=card.kv_cache_block_size,
        # Replicas take turns, whatever the frontend does with other models: a session's turns need not meet the same.
        router_config=RouterConfig(RouterMode.RoundRobin),
        runtime_config=_runtime_config(told["runtime_config"]),
        user_data=told.get("user_data"),
        custom_template_path=template,
        model_aliases=told.get("aliases") or None,
        ignore_weights=True,
    )
    for name in ("media_decoder", "media_fetcher"):
        if told.get(name) is not None:
            _log.warning("%s of the workers' card is not taken over: clients can send no media", name)
    _log.info("model %s is offered: %s", card.display_name, card.model_type)
    listed = True
    while True:
        await asyncio.sleep(_POLL_S)
        wanted = fleet.generates
        if wanted == listed:
            continue
        try:
            await (endpoint.register_endpoint_instance() if wanted else endpoint.unregister_endpoint_instance())
        except Exception as error:  # discovery's store is away; again with the next look
            _log.warning("the router could not be %s: %r", "listed" if wanted else "taken off the list", error)
            continue
        listed = wanted
        _log.warning("workers that generate: %s", "some again" if listed else "none any more, frontends ask elsewhere")


def _template(told: dict[str, Any]) -> str | None:
    """Return the path of the chat template that the workers were given; None where it is the model's own."""
    file = (told.get("chat_template_file") or {}).get("hf_chat_template") or {}
    if not file.get("is_custom"):
        return None
    path = str(file["file"]["path"])
    if "://" not in path:
        return path
    with urllib.request.urlopen(path, timeout=30) as answer, tempfile.NamedTemporaryFile("wb", delete=False) as copy:
        copy.write(answer.read())
    return copy.name


#: What a frontend reads of a worker's card, and has to find in ours.
_COPIED = (
    "context_length",
    "tool_call_parser",
    "reasoning_parser",
    "tokenizer_backend",
    "exclude_tools_when_tool_choice_none",
)


def _runtime_config(told: dict[str, Any]) -> Any:
    """Return what concerns a frontend of the `runtime_config` of a worker's card."""
    from dynamo.llm import ModelRuntimeConfig

    config = ModelRuntimeConfig()
    for name in _COPIED:
        if told.get(name) is not None:
            setattr(config, name, told[name])
    if told.get("structural_tag") is not None:
        config.set_structural_tag(told["structural_tag"])
    for key, value in (told.get("runtime_data") or {}).items():
        config.set_engine_specific(key, json.dumps(value))
    return config
