# SPDX-License-Identifier: Apache-2.0
"""The gateway's configuration: typed YAML.

`load` reads a file; every fault is a `ConfigError` that names the file, the key and the value. Times are in seconds.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import SplitResult, urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from ._errors import ConfigError
from ._units import UNLIMITED, Units

__all__ = [
    "BreakerPolicy",
    "Capacity",
    "Config",
    "LeasePolicy",
    "Limits",
    "Model",
    "Retries",
    "Site",
    "StoreSettings",
    "Tenant",
    "Timeouts",
    "load",
    "parse_address",
    "without_password",
]

_PORT = re.compile(r"[0-9]{1,5}")
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]")
_DEFAULT_PORTS = {"http": 80, "https": 443}


def parse_address(text: str) -> tuple[str, int]:
    """Split `HOST:PORT` (an IPv6 address in brackets, which are taken off); raise ValueError for anything else."""
    host, _, port = text.rpartition(":")
    if not _HOST.fullmatch(host) or not _PORT.fullmatch(port) or int(port) > 65_535:
        raise ValueError("should be HOST:PORT, such as 0.0.0.0:8080")
    return host.strip("[]"), int(port)


def without_password(url: str) -> str:
    """Return a URL that may be shown: its password replaced by ***."""
    return re.sub(r"(://[^/@]*:)[^/]*(@)", r"\1***\2", url)


def _address(text: str) -> str:
    parse_address(text)
    return text


def _base_url(text: str) -> str:
    """Check a frontend's URL, and return it in one spelling: lower case, without the slash at its end."""
    url = _split(text)
    if url is None or url.scheme not in _DEFAULT_PORTS or not url.hostname:
        raise ValueError("should be http://HOST:PORT or https://HOST:PORT")
    if url.username is not None or url.password is not None:
        raise ValueError("should hold no user or password: name the variable that holds a key in api_key_env")
    if url.path not in ("", "/") or url.query or url.fragment:
        raise ValueError("should end after the port: the gateway adds the path")
    return f"{url.scheme}://{url.netloc.lower()}"


def _split(text: str) -> SplitResult | None:
    try:
        url = urlsplit(text)
        if url.netloc.rpartition("@")[2].endswith(":") or url.port == 0:  # `http://HOST:`
            return None
    except ValueError:  # a port that is no number, brackets that do not match
        return None
    return url if _HOST.fullmatch(url.netloc.rpartition("@")[2].removesuffix(f":{url.port}")) else None


def _model_name(text: str) -> str:
    if not text.isprintable() or any(letter.isspace() for letter in text):
        raise ValueError("should have no blanks and no control characters")
    return text


_Address = Annotated[str, AfterValidator(_address)]
_Url = Annotated[str, AfterValidator(_base_url)]
_ModelName = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_model_name)]
_Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)]
_Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, lt=UNLIMITED)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Capacity(_Strict):
    """What a pool can carry at once; what is left out is not limited."""

    sequences: _Count | None = None
    prefill_tokens: _Count | None = None
    kv_tokens: _Count | None = None

    @property
    def units(self) -> Units:
        """The same as `Units`."""
        return Units(
            *(UNLIMITED if one is None else one for one in (self.sequences, self.prefill_tokens, self.kv_tokens))
        )


class Model(_Strict):
    """A model at a site. With a capacity it is a pool: requests are admitted by lease.

    Attributes:
        capacity: what the site can carry of this model; None admits everything.
        blocks: into how many equal parts the capacity is cut; replicas lease whole parts.
        reserved: tenant -> share of the capacity that is its own. The rest is serverless.
        borrow: whether serverless may use what reserved tenants leave idle.
        reclaim: what a reserved tenant may take back at once from borrowers: requests whose client has had no byte yet
            (`unsent`: they are queued again), or any (`any`: streams end with an error the client can retry).
    """

    capacity: Capacity | None = None
    blocks: Annotated[int, Field(ge=1, le=1024)] = 64
    reserved: dict[_Name, Annotated[float, Field(gt=0, le=1)]] = {}
    borrow: bool = True
    reclaim: Literal["unsent", "any"] = "unsent"


class Site(_Strict):
    """One or more Dynamo frontends over one fleet.

    Attributes:
        frontends: their base URLs, `http://HOST:PORT`.
        prefer: sites with a lower number are used first.
        route: who picks the worker: the `frontend` (its own router), or the gateway (`worker`), which names one in
            `x-dynamo-worker-instance-id`; for aggregated workers only.
        api_key_env: the variable that holds the key which the site's frontends want.
        models: what it serves.
    """

    frontends: Annotated[list[_Url], Field(min_length=1, max_length=256)]
    prefer: int = 0
    route: Literal["frontend", "worker"] = "frontend"
    api_key_env: _Variable | None = None
    models: Annotated[dict[_ModelName, Model], Field(min_length=1)]


class Tenant(_Strict):
    """Who may call. Once there is one tenant, every request needs a key.

    Attributes:
        keys_sha256: SHA-256 of each of its API keys, in hexadecimal.
        weight: its share of a contended pool, relative to others'.
        priority: the highest that its requests may ask for (`x-dynamo-request-priority`); higher is served first.
    """

    keys_sha256: Annotated[list[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]], Field(min_length=1)]
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    priority: Annotated[int, Field(ge=0, le=9)] = 0


class BreakerPolicy(_Strict):
    """When a breaker opens, and for how long.

    Attributes:
        window_s: how far back outcomes count.
        min_requests: fewer outcomes than this in the window open nothing.
        error_rate, timeout_rate, slow_first_rate, slow_tokens_rate: the share of outcomes of that kind that opens.
        slow_first_token_s, slow_token_s: what counts as slow: time to the first token; mean time between tokens.
        open_s: how long it stays open the first time; doubled by each failed probe up to `max_open_s`.
        probe_s: how long a half-open probe may take before another may be sent.
        max_open_share: at most this share of a group is open at once, and never the last one.
    """

    window_s: _Seconds = 10.0
    min_requests: _Count = 10
    error_rate: Annotated[float, Field(gt=0, le=1)] = 0.5
    timeout_rate: Annotated[float, Field(gt=0, le=1)] = 0.3
    slow_first_rate: Annotated[float, Field(gt=0, le=1)] = 0.7
    slow_tokens_rate: Annotated[float, Field(gt=0, le=1)] = 0.7
    slow_first_token_s: _Seconds = 30.0
    slow_token_s: _Seconds = 1.0
    open_s: _Seconds = 5.0
    max_open_s: _Seconds = 120.0
    probe_s: _Seconds = 30.0
    max_open_share: _Share = 0.5


class LeasePolicy(_Strict):
    """How replicas share a pool. A dead replica's capacity is back after `ttl_s` at the latest."""

    ttl_s: Annotated[float, Field(ge=0.2, le=600)] = 5.0


class StoreSettings(_Strict):
    """Where breakers and leases live.

    Attributes:
        url: `memory:` for one replica; `redis://`, `rediss://`, `unix://`, or
            `redis+sentinel://HOST:PORT,HOST:PORT/MASTER` for several.
        prefix: begins every key and channel name.
        timeout_s: how long one operation may take before the store counts as away.
    """

    url: str = "memory:"
    prefix: Annotated[str, Field(pattern=r"^[\w.:{}-]{1,64}$")] = "{dynamo-gateway}:"
    timeout_s: Annotated[float, Field(ge=0.01, le=10)] = 0.25


class Limits(_Strict):
    """What a client may ask for.

    Attributes:
        body_bytes: the largest request body.
        open_requests: most requests at once, queued ones included; more get 503.
        queued_requests: most requests that wait in one pool.
    """

    body_bytes: _Count = 32 * 2**20
    open_requests: _Count = 20_000
    queued_requests: _Count = 2_000


class Timeouts(_Strict):
    """How long anything may take.

    Attributes:
        body_s: until the request's body is here.
        queue_s: in a pool's queue.
        connect_s: to connect to a frontend.
        first_token_s: from sending to the first byte of the answer's body.
        between_tokens_s: between two pieces of a stream.
        request_s: the whole request, its queueing included; a client may ask for less (`x-request-timeout-ms`).
        drain_s: what running requests get when the gateway stops.
    """

    body_s: _Seconds = 30.0
    queue_s: _Seconds = 30.0
    connect_s: _Seconds = 1.0
    first_token_s: _Seconds = 120.0
    between_tokens_s: _Seconds = 60.0
    request_s: _Seconds = 3600.0
    drain_s: _Seconds = 120.0


class Retries(_Strict):
    """A request of which the client has had no byte is tried again elsewhere.

    Attributes:
        attempts: most tries of one request, the first included.
        budget: retries are at most this share of the requests of the last ten seconds, or ten a second where that is
            more, so that they never multiply an overload.
    """

    attempts: Annotated[int, Field(ge=1, le=10)] = 3
    budget: _Share = 0.2


class Config(_Strict):
    """A whole file.

    Attributes:
        listen: where clients call, `HOST:PORT`.
        admin: where `/healthz`, `/readyz`, `/metrics` and `/state` are; not for the public.
        tenants: name -> who may call; empty lets everybody in as the tenant `default`.
        breaker: None switches breakers off.
    """

    listen: _Address = "127.0.0.1:8080"
    admin: _Address = "127.0.0.1:8081"
    store: StoreSettings = StoreSettings()
    sites: Annotated[dict[_Name, Site], Field(min_length=1)]
    tenants: dict[_Name, Tenant] = {}
    breaker: BreakerPolicy | None = BreakerPolicy()
    lease: LeasePolicy = LeasePolicy()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    retries: Retries = Retries()


def load(path: Path) -> Config:
    """Read and check a file; raise ConfigError, one line a fault, where it cannot be used."""
    try:
        raw = _read(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {_yaml_fault(error)}") from error
    if not isinstance(raw, dict):
        kind = "nothing" if raw is None else type(raw).__name__
        raise ConfigError(f"{path}: should be a mapping with the key sites (got {kind})")
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        faults = [_fault(one) for one in error.errors()]
    else:
        faults = list(_conflicts(config))
    if faults:
        raise ConfigError("\n".join(f"{path}: {fault}" for fault in faults))
    return config


#: The one in C where PyYAML has it: a file is read on the loop that relays streams.
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _read(path: Path) -> object:
    with path.open("rb") as file:
        loader = _Loader(file)
        try:
            root = loader.get_single_node()
            if root is None:
                return None
            _refuse_twice(root)
            raw: object = loader.construct_document(root)
        finally:
            loader.dispose()
    return raw


def _refuse_twice(root: yaml.Node) -> None:
    """Raise for a key that stands twice in one mapping, of which YAML's loaders keep the last.

    Done before construction, which merges (`<<`) and so repeats keys on purpose.
    """
    nodes, done = [root], set()
    while nodes:
        node = nodes.pop()
        if id(node) in done:  # an alias
            continue
        done.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes.extend(node.value)
        elif isinstance(node, yaml.MappingNode):
            seen = set()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        problem = f"the key {key.value!r} stands twice"
                        raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                    seen.add(key.value)
                nodes.append(value)


def _yaml_fault(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"is no YAML: {' '.join(str(error).split())}"
    problem = " ".join(filter(None, (getattr(error, "context", None), getattr(error, "problem", None))))
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _key(path: tuple[int | str, ...]) -> str:
    """Write a path as a reader would look for it: `sites.home.models['a/b'].blocks`, `frontends[0]`."""
    text = ""
    for part in path:
        if isinstance(part, str) and re.fullmatch(r"[A-Za-z_][\w-]*", part):
            text += f".{part}" if text else part
        else:
            text += f"[{part!r}]"
    return text


def _fault(detail: ErrorDetails) -> str:
    path, given = detail["loc"], detail["input"]
    if detail["type"] == "missing":
        return f"{_key(path)}: is missing"
    if detail["type"] == "extra_forbidden":
        return f"{_key(path)}: there is no such key (got {_shown(given)})"
    about_key = path and path[-1] == "[key]"  # pydantic's mark for a mapping's key
    where = _key(path[:-2] if about_key else path)
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] in ("model_type", "dict_type"):
        message = "should be a mapping"
    if "keys_sha256" in path and isinstance(given, str):
        # It may be the key itself, which belongs in no log.
        return (
            f"{where}: should be the SHA-256 of a key: 64 hexadecimal digits, lower case (got {len(given)} characters)"
        )
    message = re.sub("^(Input|String|Dictionary|List) should", "should", message)
    return f"{where}: {'the key ' if about_key else ''}{message} (got {_shown(given)})"


def _shown(value: object) -> str:
    text = "null" if value is None else without_password(repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."


def _conflicts(config: Config) -> Iterator[str]:
    """Yield what is wrong between values that are fine one by one."""
    if config.listen == config.admin and parse_address(config.listen)[1]:
        yield f"admin: is the same address as listen (got {config.admin!r})"
    if config.breaker is not None and config.breaker.open_s > config.breaker.max_open_s:
        yield f"breaker.open_s: is above max_open_s, {config.breaker.max_open_s:g} (got {config.breaker.open_s:g})"
    if config.store.timeout_s > config.lease.ttl_s / 2:
        yield (
            f"store.timeout_s: is more than half of lease.ttl_s, {config.lease.ttl_s:g}: one slow answer would cost "
            f"the leases (got {config.store.timeout_s:g})"
        )
    yield from _twice(
        (_canonical(url), _key(("sites", name, "frontends", i)), url)
        for name, site in config.sites.items()
        for i, url in enumerate(site.frontends)
    )
    yield from _twice(
        (key, _key(("tenants", name, "keys_sha256", i)), f"{key[:8]}...")
        for name, tenant in config.tenants.items()
        for i, key in enumerate(tenant.keys_sha256)
    )
    if "serverless" in config.tenants:
        yield "tenants.serverless: the name is taken: it is what no tenant has reserved"
    for name, site in config.sites.items():
        for model, settings in site.models.items():
            at = ("sites", name, "models", model)
            yield from _pool_conflicts(at, settings, config.tenants)


def _canonical(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or _DEFAULT_PORTS[parts.scheme]


def _twice(entries: Iterator[tuple[Hashable, str, str]]) -> Iterator[str]:
    first: dict[Hashable, str] = {}
    for what, where, shown in entries:
        if what in first:
            yield f"{where}: is the same as {first[what]} (got {shown!r})"
        else:
            first[what] = where


def _pool_conflicts(at: tuple[str, ...], settings: Model, tenants: dict[str, Tenant]) -> Iterator[str]:
    from ._admission import reserved_ranges  # which needs this module

    if settings.capacity is None:
        if settings.reserved:
            yield f"{_key((*at, 'reserved'))}: shares of what? Without a capacity nothing can be reserved"
        return
    limited = {name: value for name, value in settings.capacity if value is not None}
    if not limited:
        keys = ", ".join(Capacity.model_fields)
        yield f"{_key((*at, 'capacity'))}: limits nothing: set one of {keys}, or leave capacity out"
    for name, value in limited.items():
        if value < settings.blocks:
            yield (
                f"{_key((*at, 'capacity', name))}: cannot be cut into {settings.blocks} blocks (got {value}): "
                f"set blocks to {value} or less"
            )
    for tenant in settings.reserved:
        if tenant not in tenants:
            known = ", ".join(sorted(tenants)) or "none"
            yield f"{_key((*at, 'reserved', tenant))}: there is no such tenant (known: {known})"
    total = sum(settings.reserved.values())
    if total > 1 + 1e-9:
        shares = ", ".join(f"{name} {share:g}" for name, share in settings.reserved.items())
        yield f"{_key((*at, 'reserved'))}: the shares are more than the whole: {total:g} (got {shares})"
    else:
        try:
            reserved_ranges(settings)
        except ConfigError as error:
            yield f"{_key((*at, 'reserved'))}: {error}"
