# SPDX-License-Identifier: Apache-2.0
"""The README says what the code does: every key with its default, every metric, the example and the commands."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
import redis
import yaml
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dynamo_resilience._config import Config, load
from support.processes import Process, free_port
from support.store_server import StoreServer

PACKAGE = Path(__file__).parents[1]
README = (PACKAGE / "README.md").read_text("utf-8")
#: Of `Rejected`.
REASONS = ("queue_full", "deadline", "draining", "no_capacity")
TESTS = PACKAGE.parents[1] / "tests"


def table(head: str) -> list[list[str]]:
    """Return the rows of a table of the README."""
    lines = README[README.index(head) :].splitlines()[2:]
    return [line.strip("| ").split(" | ") for line in lines[: lines.index("")]]


def models(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in an annotation such as `dict[str, Model]` or `Capacity | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in models(part)]


def keys(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield each key that a file may hold, with NAME or MODEL where it has names of the user's."""
    for name, field in model.model_fields.items():
        inner = models(field.annotation)
        if not inner:
            yield f"{path}{name}", field
        elif "dict" in str(field.annotation):
            yield from keys(inner[0], f"{path}{name}.{'MODEL' if name == 'models' else 'NAME'}.")
        else:
            yield from keys(inner[0], f"{path}{name}.")


def shown(default: object) -> str:
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return "none"
    if default == {}:
        return "none"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def test_every_key_is_in_the_table_with_its_default() -> None:
    wanted = {f"`{key}`": shown(field.default) for key, field in keys(Config)}
    found = {row[0]: row[1].replace("no limit", "none") for row in table("| key | default |")}
    assert found == wanted


def test_the_whole_example_can_be_used() -> None:
    config = load(PACKAGE / "example.yaml")
    assert set(config.sites) == {"north", "south"}
    text = (PACKAGE / "example.yaml").read_text("utf-8")
    for name, tenant in config.tenants.items():
        hashed = subprocess.run(["sha256sum"], input=f"{name}-key".encode(), capture_output=True, check=True).stdout
        assert tenant.keys_sha256 == [hashed.split()[0].decode()]
        assert f'"{name}-key"' in text


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run the README's first example as it stands, but for the ports; return its metrics, name -> type."""
    folder = tmp_path_factory.mktemp("readme")
    port, listen, admin = (free_port() for _ in range(3))
    (block,) = (one for one in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) if "gateway.yaml" in one)
    for old, new in (
        ("127.0.0.1:8000", f"127.0.0.1:{port}"),
        ("dynamo-gateway", f"{sys.executable} -m dynamo_resilience.cli"),
    ):
        assert old in block
        block = block.replace(old, new)
    install, *write, check, run = block.splitlines()
    assert install == "pip install ./packages/dynamo-resilience"
    subprocess.run(["bash", "-ec", "\n".join(write)], cwd=folder, check=True)
    with (folder / "gateway.yaml").open("a") as file:
        file.write(f"listen: 127.0.0.1:{listen}\nadmin: 127.0.0.1:{admin}\n")
    checked = subprocess.run(shlex.split(check), cwd=folder, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.startswith("gateway.yaml: ok\n")
    assert "model Qwen/Qwen3-0.6B: no capacity: everything is admitted" in checked.stdout
    fake = [sys.executable, "-m", "support.fake_frontend", "--port", str(port), "--model", "Qwen/Qwen3-0.6B"]
    with (
        Process(fake, name="frontend", ready=f"http://127.0.0.1:{port}/health", env={"PYTHONPATH": str(TESTS)}),
        Process(shlex.split(run), name="gateway", cwd=folder, ready=f"http://127.0.0.1:{admin}/readyz"),
        httpx.Client(trust_env=False) as client,
    ):
        body = {"model": "Qwen/Qwen3-0.6B", "messages": [{"role": "user", "content": "hi"}]}
        answer = client.post(f"http://127.0.0.1:{listen}/v1/chat/completions", json=body)
        assert answer.status_code == 200
        text = client.get(f"http://127.0.0.1:{admin}/metrics").text
    return {family.name: family.type for family in text_string_to_metric_families(text)}


def test_the_table_of_metrics_is_that_of_the_gateway(metrics: dict[str, str]) -> None:
    ours = {name: kind for name, kind in metrics.items() if name.startswith("dynamo_gateway_")}
    found = {row[0].strip("`"): row[1] for row in table("| metric | type |")}
    assert found == {name + "_total" * (kind == "counter"): kind for name, kind in ours.items()}


def test_metrics_named_elsewhere_exist(metrics: dict[str, str]) -> None:
    known = {name + "_total" * (kind == "counter") for name, kind in metrics.items()}
    assert set(re.findall(r"dynamo_gateway_[a-z_]+", README)) <= known


def test_every_code_of_an_error_is_in_the_table() -> None:
    source = (PACKAGE / "src" / "dynamo_resilience" / "_proxy.py").read_text("utf-8")
    rows = table("| status | code | when |")
    found = {code for row in rows for code in re.findall(r"`([a-z_]+)`", row[1])}
    assert found == {*re.findall(r'code="([a-z_]+)"', source), *REASONS}


def test_the_rights_that_the_store_needs_are_enough(tmp_path: Path) -> None:
    (rights,) = re.findall(r"`(\+evalsha [^`]*)`", README)
    fake, listen, admin = (free_port() for _ in range(3))
    command = [sys.executable, "-m", "support.fake_frontend", "--port", str(fake), "--model", "m"]
    with (
        StoreServer() as store,
        redis.Redis.from_url(store.url) as client,
        Process(command, name="frontend", ready=f"http://127.0.0.1:{fake}/health", env={"PYTHONPATH": str(TESTS)}),
    ):
        keys = ("~{dynamo-gateway}:*", "&{dynamo-gateway}:events")
        client.execute_command("ACL", "SETUSER", "gateway", "on", ">word", *keys, *rights.split())
        site = {"frontends": [f"http://127.0.0.1:{fake}"], "models": {"m": {"capacity": {"sequences": 64}}}}
        settings = {
            "listen": f"127.0.0.1:{listen}",
            "admin": f"127.0.0.1:{admin}",
            "sites": {"home": site},
            "store": {"url": store.url.replace("://", "://gateway:word@")},
            "lease": {"ttl_s": 0.5},
        }
        file = tmp_path / "gateway.yaml"
        file.write_text(yaml.safe_dump(settings), "utf-8")
        run = [sys.executable, "-m", "dynamo_resilience.cli", "--config", str(file)]
        with Process(run, name="gateway", ready=f"http://127.0.0.1:{admin}/readyz"):
            url = f"http://127.0.0.1:{listen}/v1/chat/completions"
            # Served on a lease, and counted by a breaker.
            answer = httpx.post(url, json={"model": "m", "messages": []}, trust_env=False, timeout=30)
            assert answer.status_code == 200
            seen = httpx.get(f"http://127.0.0.1:{admin}/state", trust_env=False).json()["store"]
        assert (seen["up"], seen["last_error"]) == (True, "")
        denied = {one["object"] for one in client.acl_log()}
        assert denied <= {"client|setinfo"}  # the client library's, which it can do without


def test_the_options_are_those_of_the_command() -> None:
    command = [sys.executable, "-m", "dynamo_resilience.cli", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    options = {row[0].strip("`").split()[0] for row in table("| option | meaning |")}
    assert options == set(re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE))


def test_importing_the_package_loads_none_of_its_parts() -> None:
    code = "import sys, dynamo_resilience; print([m for m in sys.modules if m.split('.')[0] in HEAVY])"
    heavy = {"aiohttp", "redis", "pydantic", "msgspec", "uvloop", "yaml", "prometheus_client", "asyncio"}
    code = code.replace("HEAVY", repr(heavy))
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
