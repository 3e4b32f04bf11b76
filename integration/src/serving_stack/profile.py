# SPDX-License-Identifier: Apache-2.0
"""Profiles: a small declarative file that says which processes make up a stack.

A profile is YAML. Its `components` name Python modules of the upstreams, and `args` are those modules' own flags,
passed through as they stand: `key: value` becomes `--key value`, `key: true` becomes `--key`, a mapping becomes one
JSON argument, a list repeats the flag for each of its values. Nothing here re-invents an upstream flag.

Values may hold placeholders, written `${name}`:

=====================  ================================================================================
`port`                 the frontend's HTTP port
`model`                the model directory
`served_model_name`    the name clients use
`run_dir`              the run's own directory
`index`                0, 1, ... within the component
each name in `ports`   a free TCP port, chosen when the stack starts and kept over restarts
`COMPONENT.PORT`       the port of that name of another component (`NAME-0.PORT` where there are several)
=====================  ================================================================================

A file that a process can only read from disk stands under `files`: JSON, written into `${run_dir}/files` at the start.

What stands under `mooncake`, the second cache tier, is merged over the rest by `with_mooncake`, or left out.

`extends: NAME` takes a shipped profile and merges the rest of the file over it, components as the tier's are, and the
tier likewise.
"""

from __future__ import annotations

import json
import re
import string
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import StackError

#: What a flag or an environment variable may hold in a profile.
Value = bool | int | float | str | dict[str, Any] | list[Any]

#: The most processes of one component.
MOST = 64
#: Placeholders that every profile knows.
PLACEHOLDERS = frozenset({"port", "model", "served_model_name", "run_dir", "index"})

_Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
_File = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Component(_Strict):
    """One kind of process, started `count` times as `NAME` (or `NAME-0`, `NAME-1`, ... when there are several)."""

    #: Python module, run as `python -m MODULE`.
    module: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*$")]
    #: Flags of that module, without the leading dashes.
    args: dict[str, Value] = {}
    #: Added to the profile's environment for this component alone.
    environment: dict[str, str | int | float | bool] = {}
    #: Names of free TCP ports this component needs.
    ports: list[_Name] = []
    #: How many processes of it.
    count: Annotated[int, Field(ge=1, le=MOST)] = 1
    #: Components that must be ready before it starts, at the first start and later.
    after: list[str] = []
    #: Set for an engine, or a router before the engines: it registers in Dynamo, is watched in the frontend's list, and
    #: the warm-up must reach it.
    worker: Literal["prefill", "decode", "aggregated", "router"] | None = None


class Overlay(_Strict):
    """The part of a profile that brings Mooncake, merged over the rest.

    In `components`, `args` and `environment` are merged key by key, `ports` and `after` are added, other keys replace.
    """

    #: Shared libraries that no wheel brings: soname -> the Debian package that does.
    libraries: dict[str, str] = {}
    #: Merged into the profile's files.
    files: dict[_File, dict[str, Any]] = {}
    #: New components, or what changes in one of the profile's.
    components: dict[str, dict[str, Any]]


class Profile(_Strict):
    """A stack: its processes, their environment and what must be true before it counts as up."""

    #: One line for people.
    description: str
    #: Name of the lock that `serving-stack install` brings for it.
    engines: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
    #: The model name clients use unless `--model` brings its own directory name.
    served_model_name: Annotated[str, Field(min_length=1)]
    #: Whether the stack runs only with our patches on the installed upstreams.
    requires_patches: bool = False
    #: Plugins that it runs with, by distribution: `up` refuses to start without them.
    plugins: list[Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]] = []
    #: Whether an answer must have moved KV through NIXL before the stack counts as up.
    transfers_kv: bool = False
    #: How long the whole start may take, seconds.
    ready_seconds: Annotated[int, Field(ge=1)] = 300
    #: Environment of every process.
    environment: dict[str, str | int | float | bool] = {}
    #: The processes by name. One must be called `frontend` and listen on `${port}`.
    components: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")], Component]
    #: File name -> content, written as JSON into `${run_dir}/files` before the first process starts.
    files: dict[_File, dict[str, Any]] = {}
    #: The second cache tier, not yet merged.
    mooncake: Overlay | None = None


class Process(BaseModel):
    """One process to start, every placeholder filled in."""

    model_config = ConfigDict(frozen=True)

    name: str
    module: str
    args: list[str]
    environment: dict[str, str]
    ports: dict[str, int]
    worker: str | None
    #: Names of processes that must be ready before it starts.
    after: list[str] = []


@dataclass(frozen=True)
class Rendered:
    """What a profile comes to once its placeholders are filled in."""

    processes: list[Process]  #: in the profile's order
    files: dict[str, str]  #: name -> content


def shipped() -> list[str]:
    """Return the names of the profiles that come with the package."""
    folder = resources.files(__package__) / "profiles"
    return sorted(entry.name[: -len(".yaml")] for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load(name_or_file: str) -> Profile:
    """Load a shipped profile by name, or a file.

    Raises:
        StackError: no such profile or file, not YAML, or a key or value the schema refuses (each one is named).
    """
    path = Path(name_or_file)
    if path.suffix in {".yaml", ".yml"} or "/" in name_or_file:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StackError(f"profile {name_or_file}: {error}") from error
    elif name_or_file in shipped():
        text = (resources.files(__package__) / "profiles" / f"{name_or_file}.yaml").read_text(encoding="utf-8")
    else:
        raise StackError(f"no profile called {name_or_file!r}: give a .yaml file or one of {', '.join(shipped())}")
    try:
        return _checked(_extended(yaml.safe_load(text), name_or_file), f"profile {name_or_file}")
    except yaml.YAMLError as error:
        raise StackError(f"profile {name_or_file} is not YAML: {error}") from error


def _extended(content: Any, where: str) -> Any:
    """Return a profile's content merged over that of the shipped one that it extends, if it does."""
    if not isinstance(content, dict) or "extends" not in content:
        return content
    changes = dict(content)
    base = changes.pop("extends")
    if not isinstance(base, str) or base not in shipped() or base == where:
        others = ", ".join(name for name in shipped() if name != where)
        raise StackError(f"profile {where}: extends: no shipped profile called {base!r}; there are {others}")
    return _laid_over(load(base).model_dump(exclude_unset=True), changes)


def _laid_over(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a profile's or an overlay's content with changes; what cannot be merged is for the schema to refuse."""
    merged = dict(base)
    for key, changed in changes.items():
        old = merged.get(key)
        if not (isinstance(old, dict) and isinstance(changed, dict)):
            merged[key] = changed
        elif key == "mooncake":
            merged[key] = _laid_over(old, changed)
        elif key != "components":
            merged[key] = {**old, **changed}
        elif all(isinstance(one, dict) for one in changed.values()):
            _merge(old, changed)
        else:
            merged[key] = changed
    return merged


def _merge(components: dict[str, Any], changes: dict[str, dict[str, Any]]) -> None:
    """Merge changes into components: mappings key by key, lists added, everything else replaced."""
    for kind, changed in changes.items():
        component = components.setdefault(kind, {})
        for key, value in changed.items():
            old = component.get(key)
            if isinstance(old, dict) and isinstance(value, dict):
                component[key] = {**old, **value}
            elif isinstance(old, list) and isinstance(value, list):
                component[key] = [*old, *value]
            else:
                component[key] = value


def _checked(content: Any, where: str) -> Profile:
    try:
        profile = Profile.model_validate(content)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(str(part) for part in fault['loc']) or 'the file'}: {fault['msg']}" for fault in error.errors()
        )
        raise StackError(f"{where}: {faults}") from error
    if "frontend" not in profile.components:
        raise StackError(f"{where}: components: one must be called 'frontend'")
    for kind, component in profile.components.items():
        if kind == "launcher" or re.search(r"-\d+$", kind):
            raise StackError(f"{where}: components.{kind}: the launcher gives such names itself")
        taken = PLACEHOLDERS & set(component.ports)
        if taken or len(set(component.ports)) < len(component.ports):
            names = ", ".join(sorted(taken)) or "a name stands twice"
            raise StackError(f"{where}: components.{kind}.ports: not free to take: {names}")
    _check_order(profile, where)
    if profile.mooncake is not None:
        with_mooncake(profile, where)  # what it merges to must be right, whether or not it is used
    return profile


def _check_order(profile: Profile, where: str) -> None:
    started: set[str] = set()
    waiting = dict(profile.components)
    while waiting:
        ready = [kind for kind, component in waiting.items() if started.issuperset(component.after)]
        if not ready:
            kind, component = next(iter(waiting.items()))
            unknown = ", ".join(repr(name) for name in component.after if name not in profile.components)
            fault = f"no component called {unknown}" if unknown else f"{', '.join(waiting)} wait for each other"
            raise StackError(f"{where}: components.{kind}.after: {fault}")
        started.update(ready)
        for kind in ready:
            del waiting[kind]


def with_mooncake(profile: Profile, where: str = "profile") -> Profile:
    """Return the profile with its Mooncake tier merged in; one that has none is returned as it is.

    Raises:
        StackError: the result is not a valid profile; `where` begins the message.
    """
    if profile.mooncake is None:
        return profile
    content = profile.model_dump(exclude={"mooncake"})
    content["files"].update(profile.mooncake.files)
    _merge(content["components"], profile.mooncake.components)
    return _checked(content, f"{where}: with mooncake")


def with_counts(profile: Profile, counts: dict[str, int | None]) -> Profile:
    """Return the profile with some components' `count` replaced; `None` leaves one as it is.

    Raises:
        StackError: the profile has no such component, or the count is not between 1 and `MOST`.
    """
    components = dict(profile.components)
    for name, count in counts.items():
        if count is None:
            continue
        if name not in components:
            raise StackError(f"--{name} {count}: this profile has no component called {name!r}")
        if not 1 <= count <= MOST:
            raise StackError(f"--{name} {count}: between 1 and {MOST}")
        components[name] = components[name].model_copy(update={"count": count})
    return profile.model_copy(update={"components": components})


class _Template(string.Template):
    braceidpattern = r"[a-z][a-z0-9_-]*(?:\.[a-z][a-z0-9_]*)?"


def _fill(value: Value, names: dict[str, str], where: str) -> str:
    if isinstance(value, (dict, list)):
        return json.dumps(_filled(value, names, where))
    text = str(value)
    try:
        return _Template(text).substitute(names)
    except KeyError as error:
        known = ", ".join(sorted(names))
        raise StackError(f"{where}: unknown placeholder ${{{error.args[0]}}} (known here: {known})") from error
    except ValueError as error:
        raise StackError(f"{where}: {text!r}: {error}; a literal dollar sign is written $$") from error


def _filled(value: Any, names: dict[str, str], where: str) -> Any:
    """Fill the strings within a JSON value: what is put in may hold any character."""
    if isinstance(value, dict):
        return {key: _filled(one, names, where) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, names, where) for one in value]
    return _fill(value, names, where) if isinstance(value, str) else value


def _instances(profile: Profile, kind: str) -> list[str]:
    count = profile.components[kind].count
    return [kind] if count == 1 else [f"{kind}-{index}" for index in range(count)]


def render(profile: Profile, names: dict[str, str], free_ports: list[int]) -> Rendered:
    """Fill every placeholder and return the processes to start and the files they read.

    Args:
        profile: What to start. Its `mooncake` is not looked at: merge it first, or leave it out.
        names: Values of `port`, `model`, `served_model_name` and `run_dir`.
        free_ports: At least `port_count(profile)` ports nobody listens on.

    Raises:
        StackError: a value holds an unknown placeholder.
    """
    spare = iter(free_ports)
    ports = {
        name: {port: next(spare) for port in component.ports}
        for kind, component in profile.components.items()
        for name in _instances(profile, kind)
    }
    everywhere = dict(names)
    for name, own in ports.items():
        everywhere.update({f"{name}.{port}": str(number) for port, number in own.items()})
    processes = []
    for kind, component in profile.components.items():
        for index, name in enumerate(_instances(profile, kind)):
            known = {**everywhere, "index": str(index)}
            known.update({port: str(number) for port, number in ports[name].items()})
            args: list[str] = []
            for flag, value in component.args.items():
                if value is False:
                    continue
                for one in value if isinstance(value, list) else [value]:
                    args.append(f"--{flag}")
                    if one is not True:
                        args.append(_fill(one, known, f"{kind}.args.{flag}"))
            environment = {
                key: _fill(value, known, f"{kind}.environment.{key}")
                for key, value in {**profile.environment, **component.environment}.items()
            }
            processes.append(
                Process(
                    name=name,
                    module=component.module,
                    args=args,
                    environment=environment,
                    ports=ports[name],
                    worker=component.worker,
                    after=[one for other in component.after for one in _instances(profile, other)],
                )
            )
    files = {name: _fill(value, everywhere, f"files.{name}") for name, value in profile.files.items()}
    return Rendered(processes, files)


def port_count(profile: Profile) -> int:
    """Return how many free ports `render` takes."""
    return sum(component.count * len(component.ports) for component in profile.components.values())
