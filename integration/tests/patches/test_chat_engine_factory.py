# SPDX-License-Identifier: Apache-2.0
"""`dynamo/chat-engine-factory`: needs ai-dynamo."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

PATCH = "dynamo/chat-engine-factory"

#: Dynamo's own main, up to where it would connect or make an engine.
MAIN = """
import asyncio, sys, types
import dynamo.frontend.main as main

def runtime(*args, **kwargs):
    print("connected")
    return object()

class Arguments:
    def __init__(self, engine, **kwargs):
        print("factory", kwargs.get("chat_engine_factory"))
        raise SystemExit

main.DistributedRuntime = runtime
main.EntrypointArgs = Arguments
module = sys.modules["ours"] = types.ModuleType("ours")
module.wrap = lambda factory: f"around {{factory}}"
module.number = 7
sys.argv[1:] = {flags!r}
asyncio.run(main.async_main())
"""


def run(python: Callable[..., subprocess.CompletedProcess[str]], *flags: str) -> subprocess.CompletedProcess[str]:
    return python(MAIN.format(flags=list(flags)))


def test_the_published_frontend_takes_no_factory(
    python: Callable[..., subprocess.CompletedProcess[str]], published: str
) -> None:
    """When this fails, upstream may have such a flag, or an entry point, and the patch can go."""
    done = python(published + "import dynamo.frontend.main as main, sys\nsys.argv[1:] = ['--help']\nmain.parse_args()")
    assert done.returncode == 0, done.stderr
    flags = {word for word in done.stdout.replace(",", " ").split() if word.startswith("--")}
    assert "--dyn-chat-processor" in flags
    assert not {flag for flag in flags if "factory" in flag or "chat-engine" in flag}
    folder = Path(str(metadata.distribution("ai-dynamo").locate_file("dynamo/frontend")))
    text = "".join(file.read_text("utf-8") for file in folder.glob("*.py"))
    assert set(re.findall(r'GROUP = "(.+)"', text)) == {"dynamo.frontend.routes"}


@pytest.mark.installed
def test_the_factory_is_called_with_the_chosen_one(python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run(python, "--chat-engine-factory", "ours:wrap")
    assert done.stdout == "connected\nfactory around None\n", done.stderr
    assert run(python).stdout == "connected\nfactory None\n"


@pytest.mark.installed
def test_the_factory_comes_from_the_environment(python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = python(MAIN.format(flags=[]), {"DYN_CHAT_ENGINE_FACTORY": "ours:wrap"})
    assert done.stdout == "connected\nfactory around None\n", done.stderr


@pytest.mark.installed
@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("ours", "must be MODULE:ATTR"),
        ("ours:number", "7 is not callable"),
        ("ours:nothing", "has no attribute 'nothing'"),
        ("nowhere:wrap", "No module named 'nowhere'"),
        ("not a module:wrap", "invalid format"),
    ],
)
def test_a_malformed_value_ends_the_start_by_name(
    python: Callable[..., subprocess.CompletedProcess[str]], value: str, why: str
) -> None:
    done = run(python, "--chat-engine-factory", value)
    assert done.returncode == 1
    last = done.stderr.rstrip().splitlines()[-1]
    assert f"--chat-engine-factory {value!r}: " in last
    assert why in last
    assert done.stdout == "", "it was connected before the value was looked at"
