# SPDX-License-Identifier: Apache-2.0
"""Profiles: the schema refuses what it does not know, and flags pass through as they stand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serving_stack import StackError
from serving_stack import profile as profiles

NAMES = {"port": "8000", "model": "/models/m", "served_model_name": "m", "run_dir": "/run"}

MINIMAL = """\
description: one
engines: cpu
served_model_name: m
components:
  frontend:
    module: dynamo.frontend
"""


def _file(folder: Path, text: str) -> str:
    path = folder / "p.yaml"
    path.write_text(text)
    return str(path)


def _rendered(profile: profiles.Profile) -> profiles.Rendered:
    return profiles.render(profile, NAMES, list(range(9000, 9000 + profiles.port_count(profile))))


def _render(profile: profiles.Profile) -> list[profiles.Process]:
    return _rendered(profile).processes


@pytest.mark.parametrize("name", profiles.shipped())
def test_shipped_profiles_load_and_render(name: str) -> None:
    for profile in (profiles.load(name), profiles.with_mooncake(profiles.load(name))):
        rendered = _rendered(profile)
        assert "frontend" in [process.name for process in rendered.processes]
        assert not [text for text in rendered.files.values() if "${" in text]
        for process in rendered.processes:
            assert not [word for word in process.args if "${" in word]
            assert not [value for value in process.environment.values() if "${" in value]


def test_cpu_profile_without_mooncake_is_prefill_and_decode_over_nixl() -> None:
    processes = {process.name: process for process in _render(profiles.load("cpu"))}
    assert sorted(processes) == ["decode", "frontend", "prefill"]
    assert processes["frontend"].args[processes["frontend"].args.index("--router-mode") + 1] == "kv"
    for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        args = processes[role].args
        transfer = json.loads(args[args.index("--kv-transfer-config") + 1])
        assert transfer == {"kv_connector": "NixlConnector", "kv_role": kv_role, "kv_buffer_device": "cpu"}
    ports = [port for process in processes.values() for port in process.ports.values()]
    assert len(ports) == len(set(ports)) == 6


def test_cpu_profile_with_mooncake_keeps_nixl_and_adds_the_store() -> None:
    rendered = _rendered(profiles.with_mooncake(profiles.load("cpu")))
    processes = {process.name: process for process in rendered.processes}
    assert sorted(processes) == ["decode", "frontend", "mooncake", "prefill"]
    prefill, master = processes["prefill"], processes["mooncake"]
    transfer = json.loads(prefill.args[prefill.args.index("--kv-transfer-config") + 1])
    nixl, store = transfer["kv_connector_extra_config"]["connectors"]
    assert nixl == {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_buffer_device": "cpu"}
    assert (store["kv_connector"], store["kv_connector_module_path"]) == (
        "MooncakeStoreConnector",
        "serving_stack.mooncake_store",
    )
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert prefill.after == ["mooncake"]
    assert prefill.environment["MOONCAKE_CONFIG_PATH"] == "/run/files/mooncake.json"
    assert (
        json.loads(rendered.files["mooncake.json"])["master_server_address"] == f"127.0.0.1:{master.ports['rpc_port']}"
    )
    # What has nothing to do with the tier stays as it is.
    plain = {process.name: process for process in _render(profiles.load("cpu"))}
    assert processes["decode"].args == plain["decode"].args
    assert (
        prefill.args[: prefill.args.index("--kv-transfer-config")]
        == (plain["prefill"].args[: plain["prefill"].args.index("--kv-transfer-config")])
    )


def test_cpu_agg_profile_is_one_worker_that_moves_nothing() -> None:
    frontend, worker = _render(profiles.load("cpu-agg"))
    assert (frontend.name, worker.name, worker.worker) == ("frontend", "worker", "aggregated")
    assert not [word for word in worker.args if "kv-transfer" in word or "disaggregation" in word]


def test_cpu_nvfp4_profile_is_cpu_with_rows_of_352_bytes() -> None:
    profile, plain = profiles.load("cpu-nvfp4"), profiles.load("cpu")
    assert profile.plugins == ["flashinfer-nvfp4-mla"]
    for ours, stock in zip(
        _render(profiles.with_mooncake(profile)), _render(profiles.with_mooncake(plain)), strict=True
    ):
        added = ["--kv-cache-dtype", "nvfp4_ds_mla"] if ours.worker else []
        assert sorted(ours.args) == sorted([*stock.args, *added])
        assert ours.environment == stock.environment


def test_cpu_tools_profile_is_cpu_agg_with_our_chat_engine() -> None:
    profile = profiles.load("cpu-tools")
    assert profile.plugins == ["dynamo-structural-tags"]
    added = {
        "frontend": ["--chat-engine-factory", "dynamo_structural_tags.dynamo:wrap", "--enable-anthropic-api"],
        "worker": ["--dyn-tool-call-parser", "glm45", "--dyn-reasoning-parser", "glm45"],
    }
    for ours, stock in zip(_render(profile), _render(profiles.load("cpu-agg")), strict=True):
        assert ours.args == [*stock.args, *added[ours.name]]
        assert ours.environment == stock.environment


def test_router_profiles_put_the_router_between_frontend_and_workers() -> None:
    for name in ("cpu", "mocker"):
        profile = profiles.load(f"{name}-router")
        assert profile.plugins == ["dynamo-kv-router-ext"]
        ours = {process.name: process for process in _render(profiles.with_counts(profile, {"router": 2}))}
        stock = {process.name: process for process in _render(profiles.load(name))}
        assert sorted(ours) == sorted([*stock, "router-0", "router-1"])
        pools = [f"pool.{component}.generate" for component in ("prefill", "backend")]
        for index, role in enumerate(("prefill", "decode")):
            assert ours[role].args == [*stock[role].args, "--endpoint", f"dyn://{pools[index]}"]
        frontend = ours["frontend"].args
        # No worker is in its namespace, so that it routes to the router alone.
        assert frontend[frontend.index("--namespace") + 1] == "routed"
        routers = [ours["router-0"], ours["router-1"]]
        for router in routers:
            assert (router.worker, router.module) == ("router", "dynamo_kv_router_ext")
            assert router.args[:4] == ["--endpoint", pools[0], "--endpoint", pools[1]]
            assert router.environment["DYN_SYSTEM_PORT"] == str(router.ports["system_port"])
        assert routers[0].ports != routers[1].ports


def test_the_router_of_the_cpu_profile_knows_of_the_store_where_there_is_one() -> None:
    profile = profiles.load("cpu-router")
    for one, knows in ((profile, False), (profiles.with_mooncake(profile), True)):
        rendered = _rendered(one)
        router = next(process for process in rendered.processes if process.name == "router")
        assert ("--store-fresh-s" in router.args) is knows
        assert router.args[router.args.index("--profile") + 1] == "/run/files/router.json"
        assert "store" in json.loads(rendered.files["router.json"])["tiers"]
    # The rest of the tier is that of `cpu`.
    assert profiles.with_mooncake(profile).components["prefill"].after == ["mooncake"]


EXTENDS = """\
extends: cpu-agg
description: other
environment: {OMP_NUM_THREADS: 2, MORE: 1}
components:
  worker: {args: {max-model-len: 16}, ports: [more]}
  store: {module: s}
"""


def test_a_profile_extends_a_shipped_one(tmp_path: Path) -> None:
    profile, base = profiles.load(_file(tmp_path, EXTENDS)), profiles.load("cpu-agg")
    assert profile.description == "other"
    assert profile.environment == {**base.environment, "OMP_NUM_THREADS": 2, "MORE": 1}
    assert profile.components["worker"].args == {**base.components["worker"].args, "max-model-len": 16}
    assert profile.components["worker"].ports == [*base.components["worker"].ports, "more"]
    assert list(profile.components) == ["frontend", "worker", "store"]


TIER = """\
extends: cpu
mooncake:
  files: {more.json: {}}
  components:
    decode: {args: {with-store: true}}
"""


def test_the_tier_of_a_shipped_profile_is_extended_too(tmp_path: Path) -> None:
    profile, base = profiles.load(_file(tmp_path, TIER)), profiles.load("cpu")
    assert profiles.load("cpu") == base  # nothing was changed in place
    assert profile.mooncake is not None
    assert base.mooncake is not None
    assert profile.mooncake.libraries == base.mooncake.libraries
    assert profile.mooncake.files == {**base.mooncake.files, "more.json": {}}
    added = {"decode": {"args": {"with-store": True}}}
    assert profile.mooncake.components == {**base.mooncake.components, **added}
    without = profiles.load(_file(tmp_path, "extends: cpu\nmooncake: null\n"))
    assert without.mooncake is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("extends: gpu\n", "'gpu'; there are cpu, cpu-agg, cpu-nvfp4, cpu-router, cpu-tools, mocker, mocker-router"),
        ("extends: [cpu]\n", r"extends: no shipped profile called \['cpu'\]"),
        ("extends: cpu\ncomponents: 3\n", "components: Input should be a valid dictionary"),
        ("extends: cpu\ncomponents: {decode: 3}\n", "components.decode: "),
        ("extends: cpu\nenvironment: 3\n", "environment: Input should be a valid dictionary"),
        ("extends: cpu\ncomponents: {decode: {args: 3}}\n", "components.decode.args: "),
        ("extends: cpu\nplugins: [A b]\n", "plugins.0: "),
        ("extends: cpu\nmooncake: 3\n", "mooncake: "),
        ("extends: cpu\nmooncake: {components: 3}\n", "mooncake.components: "),
        ("extends: cpu\nmooncake: {components: {decode: 3}}\n", "mooncake.components.decode: "),
    ],
)
def test_what_cannot_be_extended_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(StackError, match=said):
        profiles.load(_file(tmp_path, text))


OVERLAY = """\
mooncake:
  files: {a.json: {at: "${store-0.rpc}", all: 1}}
  components:
    store: {module: s, count: 2, ports: [rpc]}
    frontend:
      after: [store]
      args: {added: "${store-1.rpc}", kept: 2}
      environment: {E: "1"}
"""


def test_overlay_is_merged_key_by_key(tmp_path: Path) -> None:
    text = MINIMAL + "    args: {first: 1, kept: 1}\n    environment: {D: '0'}\n" + OVERLAY
    profile = profiles.load(_file(tmp_path, text))
    assert [process.name for process in _render(profile)] == ["frontend"]
    rendered = _rendered(profiles.with_mooncake(profile))
    frontend = rendered.processes[0]
    assert frontend.args == ["--first", "1", "--kept", "2", "--added", "9001"]
    assert frontend.environment == {"D": "0", "E": "1"}
    assert frontend.after == ["store-0", "store-1"]
    assert json.loads(rendered.files["a.json"]) == {"at": "9000", "all": 1}


def test_what_is_put_into_json_may_hold_any_character(tmp_path: Path) -> None:
    text = MINIMAL + "    args: {x: {at: ['${model}']}}\nfiles: {a.json: {at: '${model}', 'on': true}}\n"
    names = {**NAMES, "model": 'a "b" \\c'}
    rendered = profiles.render(profiles.load(_file(tmp_path, text)), names, [])
    assert json.loads(rendered.processes[0].args[1]) == {"at": ['a "b" \\c']}
    assert json.loads(rendered.files["a.json"]) == {"at": 'a "b" \\c', "on": True}


def test_flags_pass_through(tmp_path: Path) -> None:
    text = MINIMAL + (
        "    args: {switch: true, dropped: false, number: 3, word: 'a b', json: {a: [1, true]}, at: '${port}',\n"
        "      lit: '$$x', again: [1, '${port}', {a: 1}], none: []}\n"
    )
    (process,) = _render(profiles.load(_file(tmp_path, text)))
    assert process.args == [
        *("--switch", "--number", "3", "--word", "a b", "--json", '{"a": [1, true]}'),
        *("--at", "8000", "--lit", "$x"),
        *("--again", "1", "--again", "8000", "--again", '{"a": 1}'),
    ]


def test_counts_number_the_processes_and_give_each_its_ports(tmp_path: Path) -> None:
    text = (
        MINIMAL + "  decode:\n    module: m\n    count: 2\n    ports: [one]\n    args: {i: '${index}', p: '${one}'}\n"
    )
    profile = profiles.with_counts(profiles.load(_file(tmp_path, text)), {"decode": 3, "prefill": None})
    _, *decoders = _render(profile)
    assert [process.name for process in decoders] == ["decode-0", "decode-1", "decode-2"]
    assert [process.args for process in decoders] == [["--i", str(i), "--p", str(9000 + i)] for i in range(3)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MINIMAL + "    flags: {}\n", "components.frontend.flags"),
        (MINIMAL.replace("engines: cpu", "engine: cpu"), "engine"),
        (MINIMAL + "    count: 0\n", "components.frontend.count"),
        (MINIMAL + "    worker: middle\n", "components.frontend.worker"),
        (MINIMAL.replace("frontend:", "front:"), "'frontend'"),
        (MINIMAL + "    ports: [port]\n", "components.frontend.ports"),
        (MINIMAL + "    ports: [one, one]\n", "components.frontend.ports"),
        (MINIMAL + "  decode-0:\n    module: m\n", "components.decode-0"),
        (MINIMAL + "  launcher:\n    module: m\n", "components.launcher"),
        (MINIMAL.replace("module: dynamo.frontend", "module: rm -rf"), "components.frontend.module"),
        ("- a\n- b\n", "the file"),
        (MINIMAL + "    after: [store]\n", "components.frontend.after: no component called 'store'"),
        (MINIMAL + "    after: [frontend]\n", "wait for each other"),
        (MINIMAL + "files: {../a: {}}\n", "files.../a"),
        (
            MINIMAL + "mooncake: {components: {frontend: {after: [store]}}}\n",
            "with mooncake: components.frontend.after",
        ),
        (MINIMAL + "mooncake: {components: {store: {modul: s}}}\n", "with mooncake: components.store.modul"),
        (MINIMAL + "mooncake: {libs: {}}\n", "mooncake.libs"),
        ("a: [\n", "not YAML"),
    ],
)
def test_bad_profile_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    file = _file(tmp_path, text)
    with pytest.raises(StackError) as refused:
        profiles.load(file)
    assert file in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize(("value", "said"), [("${nobody}", "${nobody}"), ("$", "$$")])
def test_bad_placeholder_is_refused_by_its_place(tmp_path: Path, value: str, said: str) -> None:
    profile = profiles.load(_file(tmp_path, MINIMAL + f"    args: {{x: '{value}'}}\n"))
    with pytest.raises(StackError) as refused:
        _render(profile)
    assert "frontend.args.x" in str(refused.value)
    assert said in str(refused.value)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(StackError, match=r"'gpu'.*cpu-nvfp4, cpu-router, cpu-tools, mocker, mocker-router"):
        profiles.load("gpu")


@pytest.mark.parametrize(
    ("counts", "said"),
    [({"prefill": 2}, "'prefill'"), ({"frontend": 0}, "between 1 and 64"), ({"frontend": 65}, "between 1 and 64")],
)
def test_bad_count_is_refused(tmp_path: Path, counts: dict[str, int | None], said: str) -> None:
    profile = profiles.load(_file(tmp_path, MINIMAL))
    with pytest.raises(StackError, match=said):
        profiles.with_counts(profile, counts)
