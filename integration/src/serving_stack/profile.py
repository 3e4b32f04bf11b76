# SPDX-License-Identifier: Apache-2.0
"""Profiles: a small declarative file that says which processes make up a stack.

A profile is YAML. Its `components` name Python modules of the upstreams, and `args` are those modules' own flags,
passed through as they stand: `key: value` becomes `--key value`, `key: true` becomes `--key`, a mapping becomes one
JSON argument. Nothing here re-invents an upstream flag.

Values may hold placeholders, written `${name}`:

=====================  ================================================================================
`port`                 the frontend's HTTP port
`model`                the model directory
`served_model_name`    the name clients use
`run_dir`              the run's own directory
`index`                0, 1, ... within the component
each name in `ports`   a free TCP port, chosen when the stack starts and kept over restarts
=====================  ================================================================================
"""

from __future__ import annotations

import json
import re
import string
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
    #: Set for an engine that registers with the frontend: it is watched there, and the warm-up must reach it.
    worker: Literal["prefill", "decode", "aggregated"] | None = None


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
    #: Whether an answer must have moved KV through NIXL before the stack counts as up.
    transfers_kv: bool = False
    #: How long the whole start may take, seconds.
    ready_seconds: Annotated[int, Field(ge=1)] = 300
    #: Environment of every process.
    environment: dict[str, str | int | float | bool] = {}
    #: The processes by name. One must be called `frontend` and listen on `${port}`.
    components: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")], Component]


class Process(BaseModel):
    """One process to start, every placeholder filled in."""

    model_config = ConfigDict(frozen=True)

    name: str
    module: str
    args: list[str]
    environment: dict[str, str]
    ports: dict[str, int]
    worker: str | None


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
        profile = Profile.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise StackError(f"profile {name_or_file} is not YAML: {error}") from error
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(str(part) for part in fault['loc']) or 'the file'}: {fault['msg']}" for fault in error.errors()
        )
        raise StackError(f"profile {name_or_file}: {faults}") from error
    if "frontend" not in profile.components:
        raise StackError(f"profile {name_or_file}: components: one must be called 'frontend'")
    for kind, component in profile.components.items():
        if kind == "launcher" or re.search(r"-\d+$", kind):
            raise StackError(f"profile {name_or_file}: components.{kind}: the launcher gives such names itself")
        taken = PLACEHOLDERS & set(component.ports)
        if taken or len(set(component.ports)) < len(component.ports):
            names = ", ".join(sorted(taken)) or "a name stands twice"
            raise StackError(f"profile {name_or_file}: components.{kind}.ports: not free to take: {names}")
    return profile


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


def _fill(value: Value, names: dict[str, str], where: str) -> str:
    text = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
    try:
        return string.Template(text).substitute(names)
    except KeyError as error:
        known = ", ".join(sorted(names))
        raise StackError(f"{where}: unknown placeholder ${{{error.args[0]}}} (known here: {known})") from error
    except ValueError as error:
        raise StackError(f"{where}: {text!r}: {error}; a literal dollar sign is written $$") from error


def render(profile: Profile, names: dict[str, str], free_ports: list[int]) -> list[Process]:
    """Fill every placeholder and return the processes to start, in the profile's order.

    Args:
        profile: What to start.
        names: Values of `port`, `model`, `served_model_name` and `run_dir`.
        free_ports: At least `port_count(profile)` ports nobody listens on.

    Raises:
        StackError: a value holds an unknown placeholder.
    """
    spare = iter(free_ports)
    processes = []
    for kind, component in profile.components.items():
        for index in range(component.count):
            name = kind if component.count == 1 else f"{kind}-{index}"
            ports = {port: next(spare) for port in component.ports}
            known = {**names, "index": str(index), **{port: str(number) for port, number in ports.items()}}
            args: list[str] = []
            for flag, value in component.args.items():
                if value is False:
                    continue
                args.append(f"--{flag}")
                if value is not True:
                    args.append(_fill(value, known, f"{kind}.args.{flag}"))
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
                    ports=ports,
                    worker=component.worker,
                )
            )
    return processes


def port_count(profile: Profile) -> int:
    """Return how many free ports `render` takes."""
    return sum(component.count * len(component.ports) for component in profile.components.values())
