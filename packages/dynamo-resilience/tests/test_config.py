# SPDX-License-Identifier: Apache-2.0
"""A configuration is read as written, or refused with a line for each fault: file, key, value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_resilience._config import Config, load, parse_address, without_password
from dynamo_resilience._errors import ConfigError
from dynamo_resilience._units import UNLIMITED, Units

SITE = "sites: {home: {frontends: ['http://127.0.0.1:8000'], models: {tiny: {}}}}\n"
KEY = "0123456789abcdef" * 4


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "gateway.yaml"


def faults(file: Path, text: str) -> list[str]:
    """Return the lines of the refusal, without the file's name that each begins with."""
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigError) as caught:
        load(file)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{file}: ") for line in lines)
    return [line.removeprefix(f"{file}: ") for line in lines]


def site(rest: str = "", models: str = "tiny: {}", frontends: str = "'http://127.0.0.1:8000'") -> str:
    return f"sites: {{home: {{frontends: [{frontends}], models: {{{models}}}}}}}\n{rest}"


def test_the_smallest_file_gets_every_default(file: Path) -> None:
    file.write_text(SITE)
    config = load(file)
    assert config == Config.model_validate(
        {"sites": {"home": {"frontends": ["http://127.0.0.1:8000"], "models": {"tiny": {}}}}}
    )
    assert config.store.url == "memory:"
    assert config.breaker is not None
    assert config.sites["home"].models["tiny"].capacity is None


def test_a_capacity_limits_what_it_names(file: Path) -> None:
    file.write_text(site(models="tiny: {capacity: {sequences: 64}}"))
    capacity = load(file).sites["home"].models["tiny"].capacity
    assert capacity is not None
    assert capacity.units == Units(64, UNLIMITED, UNLIMITED)


def test_null_switches_breakers_off(file: Path) -> None:
    file.write_text(site("breaker: null"))
    assert load(file).breaker is None


def test_merged_mappings_may_repeat_keys(file: Path) -> None:
    file.write_text(
        "sites:\n"
        "  one: &one {frontends: ['http://one:8000'], models: {tiny: {}}}\n"
        "  two: {<<: *one, frontends: ['http://two:8000']}\n"
    )
    assert load(file).sites["two"].frontends == ["http://two:8000"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        pytest.param("", "should be a mapping with the key sites (got nothing)", id="empty"),
        pytest.param("- 1", "should be a mapping with the key sites (got list)", id="list"),
        pytest.param("sites: [", "line ", id="no yaml"),
        pytest.param("sites: \x01", "is no YAML: ", id="control character"),
        pytest.param(
            "listen: 0.0.0.0:1\nlisten: 0.0.0.0:2", "line 2, column 1: the key 'listen' stands twice", id="twice"
        ),
        pytest.param(site("limits: {body_bytes: 1, body_bytes: 2}"), "line 2, column 25: the key", id="twice within"),
        pytest.param(SITE + "---\na: 1", "line 2, column 1: ", id="two documents"),
        pytest.param("listen: 0.0.0.0:80", "sites: is missing", id="no sites"),
        pytest.param(site("lisen: 1"), "lisen: there is no such key (got 1)", id="unknown key"),
        pytest.param(site("limits: {body: 3}"), "limits.body: there is no such key (got 3)", id="unknown key within"),
        pytest.param(
            site("limits: {body_bytes: 1.5}"), "limits.body_bytes: should be a valid integer (got 1.5)", id="fraction"
        ),
        pytest.param(site("limits: {body_bytes: '5'}"), "limits.body_bytes: should be a valid integer (got '5')"),
        pytest.param(site("limits: {body_bytes: yes}"), "limits.body_bytes: should be a valid integer (got True)"),
        pytest.param(
            site("limits: {body_bytes: 0}"), "limits.body_bytes: should be greater than or equal to 1 (got 0)"
        ),
        pytest.param(site("timeouts: {queue_s: .inf}"), "timeouts.queue_s: should be"),
        pytest.param(site("timeouts: {queue_s: .nan}"), "timeouts.queue_s: should be"),
        pytest.param(site("timeouts: {queue_s: -1}"), "timeouts.queue_s: should be greater than 0 (got -1)"),
        pytest.param(site("breaker: 3"), "breaker: should be a mapping (got 3)"),
        pytest.param(site(models="tiny: "), "sites.home.models.tiny: should be a mapping (got null)"),
        pytest.param(site(models="'': {}"), "sites.home.models: the key should have at least 1 character (got '')"),
        pytest.param(site(models="'a b': {}"), "sites.home.models: the key should have no blanks"),
        pytest.param("sites: {}", "sites: should have at least 1 item"),
        pytest.param("sites: {'a b': {frontends: ['http://h:1'], models: {m: {}}}}", "sites: the key should match"),
        pytest.param(
            "sites: {1: {frontends: ['http://h:1'], models: {m: {}}}}", "sites: the key should be a valid str"
        ),
        pytest.param(
            site(models="a/b: {blocks: 0}"),
            "sites.home.models['a/b'].blocks: should be greater than or equal to 1 (got 0)",
            id="odd model name",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_key_and_value(file: Path, text: str, fault: str) -> None:
    (line,) = faults(file, text)
    assert line.startswith(fault)


def test_every_fault_has_its_line(file: Path) -> None:
    text = site("listen: here\nstore: {timeout_s: 0}\nbreaker: {error_rate: 2}\n", frontends="'ftp://x', 'http://ok:1'")
    assert [line.split(":")[0] for line in faults(file, text)] == [
        "listen",
        "store.timeout_s",
        "sites.home.frontends[0]",
        "breaker.error_rate",
    ]


def test_no_file_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory") as caught:
        load(file)
    assert str(file) in str(caught.value)


def test_bytes_that_are_no_text_are_refused(file: Path) -> None:
    file.write_bytes(b"listen: \xff\xfe")
    with pytest.raises(ConfigError, match="is no YAML"):
        load(file)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://host:1",
        "http://",
        "http://:80",
        "http://host:",
        "http://host:0",
        "http://host:65536",
        "http://host:eighty",
        "http://ho st:80",
        "http://[::1:80",
        "http://user:word@host:80",
        "http://host:80/v1",
        "http://host:80/?a=b",
        "http://host:80#c",
    ],
)
def test_a_frontend_that_is_no_base_url_is_refused(file: Path, url: str) -> None:
    (line,) = faults(file, site(frontends=repr(url)))
    assert line.startswith("sites.home.frontends[0]: should ")
    assert "(got '" in line


@pytest.mark.parametrize("url", ["http://host", "https://a.b-c.example:8443", "http://[::1]:8000", "http://10.0.0.1:1"])
def test_a_base_url_is_kept_as_it_is(file: Path, url: str) -> None:
    file.write_text(site(frontends=f"'{url}'"))
    assert load(file).sites["home"].frontends == [url]


def test_a_base_url_has_one_spelling(file: Path) -> None:
    file.write_text(site(frontends="'HTTP://Host:8000/'"))
    assert load(file).sites["home"].frontends == ["http://host:8000"]


@pytest.mark.parametrize(
    "address", ["8080", ":8080", "host", "host:", "host:x", "host:65536", "http://host:80", "::1:80"]
)
def test_an_address_that_is_none_is_refused(file: Path, address: str) -> None:
    (line,) = faults(file, site(f"listen: '{address}'"))
    assert line == f"listen: should be HOST:PORT, such as 0.0.0.0:8080 (got '{address}')"


def test_an_address_is_split() -> None:
    assert parse_address("0.0.0.0:80") == ("0.0.0.0", 80)
    assert parse_address("[::1]:8080") == ("::1", 8080)
    assert parse_address("localhost:0") == ("localhost", 0)


TENANT = f"tenants: {{a: {{keys_sha256: ['{KEY}']}}}}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (site("admin: 127.0.0.1:8080"), "admin: is the same address as listen (got '127.0.0.1:8080')"),
        (site("breaker: {open_s: 9, max_open_s: 3}"), "breaker.open_s: is above max_open_s, 3 (got 9)"),
        (site("lease: {ttl_s: 0.4}"), "store.timeout_s: is more than half of lease.ttl_s, 0.4: one slow answer"),
        (
            site(frontends="'http://h:1', 'http://H:1/'"),
            "sites.home.frontends[1]: is the same as sites.home.frontends[0] (got 'http://h:1')",
        ),
        (
            "sites: {a: {frontends: ['http://h'], models: {m: {}}}, b: {frontends: ['http://h:80'], models: {m: {}}}}",
            "sites.b.frontends[0]: is the same as sites.a.frontends[0] (got 'http://h:80')",
        ),
        (
            site(f"tenants: {{a: {{keys_sha256: ['{KEY}']}}, b: {{keys_sha256: ['{KEY}']}}}}"),
            "tenants.b.keys_sha256[0]: is the same as tenants.a.keys_sha256[0] (got '01234567...')",
        ),
        (site(TENANT.replace("a:", "serverless:")), "tenants.serverless: the name is taken"),
        (
            site(models="m: {capacity: {sequences: 8}}"),
            "sites.home.models.m.capacity.sequences: cannot be cut into 64 blocks (got 8): set blocks to 8 or less",
        ),
        (site(models="m: {capacity: {}}"), "sites.home.models.m.capacity: limits nothing: set one of sequences, "),
        (site(TENANT, "m: {reserved: {a: 0.5}}"), "sites.home.models.m.reserved: shares of what?"),
        (
            site(TENANT, "m: {capacity: {sequences: 99}, reserved: {b: 0.5}}"),
            "sites.home.models.m.reserved.b: there is no such tenant (known: a)",
        ),
        (
            site(
                f"tenants: {{a: {{keys_sha256: ['{KEY}']}}, b: {{keys_sha256: ['{KEY[::-1]}']}}}}",
                "m: {capacity: {sequences: 99}, reserved: {a: 0.5, b: 0.75}}",
            ),
            "sites.home.models.m.reserved: the shares are more than the whole: 1.25 (got a 0.5, b 0.75)",
        ),
        (
            site(
                f"tenants: {{a: {{keys_sha256: ['{KEY}']}}, b: {{keys_sha256: ['{KEY[::-1]}']}}}}",
                "m: {capacity: {sequences: 99}, blocks: 1, reserved: {a: 0.5, b: 0.5}}",
            ),
            "sites.home.models.m.reserved: ",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(file: Path, text: str, fault: str) -> None:
    (line,) = faults(file, text)
    assert line.startswith(fault)


def test_shares_that_add_up_to_one_are_the_whole(file: Path) -> None:
    keys = [f"{i:064x}" for i in range(10)]
    tenants = ", ".join(f"t{i}: {{keys_sha256: ['{key}']}}" for i, key in enumerate(keys))
    reserved = ", ".join(f"t{i}: 0.1" for i in range(10))
    file.write_text(
        site(f"tenants: {{{tenants}}}", f"m: {{capacity: {{sequences: 100}}, blocks: 10, reserved: {{{reserved}}}}}")
    )
    assert len(load(file).sites["home"].models["m"].reserved) == 10


def test_a_key_that_was_not_hashed_is_not_repeated(file: Path) -> None:
    (line,) = faults(file, site("tenants: {a: {keys_sha256: ['sk-very-secret']}}"))
    assert line.startswith("tenants.a.keys_sha256[0]: should be the SHA-256 of a key")
    assert "secret" not in line


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:word@host:6379/0", "redis://:***@host:6379/0"),
        ("rediss://user:p@ss@host/1", "rediss://user:***@host/1"),
        ("redis://host:6379", "redis://host:6379"),
        ("memory:", "memory:"),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.fixture(scope="module")
def anything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "gateway.yaml"


def loads_or_names_its_file(path: Path) -> None:
    lines = []
    try:
        load(path)
    except ConfigError as error:
        lines = str(error).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)


@settings(max_examples=200)
@given(
    st.binary(max_size=60)
    | st.text(max_size=60).map(str.encode)
    | st.text("{}[]&*<:-!'|>\n ab0", max_size=30).map(str.encode)
)
def test_bytes_are_a_configuration_or_a_fault(anything: Path, raw: bytes) -> None:
    anything.write_bytes(raw)
    loads_or_names_its_file(anything)


WHOLE: dict[str, Any] = {
    "listen": "127.0.0.1:0",
    "store": {"url": "memory:", "timeout_s": 0.2},
    "sites": {
        "home": {"frontends": ["http://h:1"], "models": {"m": {"capacity": {"sequences": 64}, "reserved": {"a": 0.5}}}}
    },
    "tenants": {"a": {"keys_sha256": [KEY], "weight": 2}},
    "breaker": {"window_s": 3},
    "timeouts": {"queue_s": 1},
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=2),
    max_leaves=3,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, one in inner for found in places(one, (*path, key)))]


def put(whole: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(whole) if isinstance(whole, dict) else list(whole)
    copy[path[0]] = put(whole[path[0]], path[1:], value)
    return copy


@settings(max_examples=300)
@given(st.sampled_from(places(WHOLE)), VALUES)
def test_any_value_anywhere_is_taken_or_a_fault(anything: Path, path: tuple[Any, ...], value: object) -> None:
    anything.write_text(yaml.safe_dump(put(WHOLE, path, value), allow_unicode=True), "utf-8")
    loads_or_names_its_file(anything)
