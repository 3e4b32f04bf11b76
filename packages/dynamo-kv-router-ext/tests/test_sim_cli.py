# SPDX-License-Identifier: Apache-2.0
"""`kv-router-sim`: what it prints and writes, that it is deterministic, and faults by option and value."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_kv_router_ext import load_profile
from dynamo_kv_router_ext.sim.cli import main
from dynamo_kv_router_ext.sim.scenario import POLICIES, ScenarioError, drifting_speed, read_fleet
from dynamo_kv_router_ext.sim.traces import (
    MooncakeRequest,
    WekaConversation,
    WekaRequest,
    write_mooncake,
    write_weka,
)

FLEET = ["--prefill", "2", "--decode", "1"]
TIMING = ["--timing", "profile:mocker"]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Forty requests in ten families that share two blocks of 512 tokens."""
    file = tmp_path / "trace.jsonl"
    write_mooncake(
        file,
        (
            MooncakeRequest(100.0 * number, 1500, 20, (number % 10, 100 + number % 10, 1000 + number))
            for number in range(40)
        ),
    )
    return str(file)


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """A fleet file with all that it may hold."""
    file = tmp_path / "fleet.json"
    pools = [
        {"role": "prefill", "name": "reader", "count": 2, "capacity_tokens": 20_000, "host_tokens": 40_000},
        {"role": "decode", "ranks": 2, "capacity_tokens": 50_000, "speed": [[0, 1.0], [2, 0.5]]},
    ]
    faults = [{"worker": "reader-1", "kind": "slow", "start_s": 1, "stop_s": 3}]
    transfer = {"latency_s": 0.001, "token_s": 1e-6}
    file.write_text(json.dumps({"pools": pools, "transfer": transfer, "store_tokens": 100_000, "faults": faults}))
    return file


def test_every_policy_is_shown_and_written(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, figures = tmp_path / "report.html", tmp_path / "figures.json"
    given = ["run", "--trace", trace, *FLEET, *TIMING, "--html", str(report), "--json", str(figures)]
    assert main(given) == 0
    shown = capsys.readouterr().out
    written = json.loads(figures.read_text())
    assert list(written["policies"]) == list(POLICIES)
    for policy in POLICIES:
        assert any(line.startswith(policy) for line in shown.splitlines())
        assert policy in report.read_text()
        assert written["policies"][policy]["answered"] == 40
        assert written["policies"][policy]["failed"] == 0
    assert written["policies"]["ours"]["hit_device"] > 0
    assert "trace.jsonl, 40 requests" in shown


def test_the_same_input_gives_the_same_output(trace: str, tmp_path: Path) -> None:
    written = []
    for number in (1, 2):
        files = tmp_path / f"{number}.html", tmp_path / f"{number}.json"
        given = ["run", "--trace", trace, *FLEET, *TIMING, "--speed-spread", "0.3", "--seed", "7"]
        given += ["--html", str(files[0]), "--json", str(files[1])]
        code = f"from dynamo_kv_router_ext.sim.cli import main; main({given!r})"
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)
        written.append([file.read_bytes() for file in files])
    assert written[0] == written[1]


def test_a_fleet_file_is_simulated(trace: str, fleet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--trace", trace, "--fleet", str(fleet), *TIMING, "--policy", "ours"]) == 0
    shown = capsys.readouterr().out
    assert "2 prefill, 20000 tokens, 1 decode of 2 ranks, 50000 tokens" in shown


def test_settings_reach_a_policy(trace: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    policies = ["dynamo", "dynamo:overlap_credit=0", "ours:others_weight=0.5,token_weight=0"]
    given = ["run", "--trace", trace, *FLEET, *TIMING, "--json", str(figures)]
    assert main([*given, *(word for policy in policies for word in ("--policy", policy))]) == 0
    found = json.loads(figures.read_text())["policies"]
    assert list(found) == policies
    assert found["dynamo:overlap_credit=0"]["hit_device"] < found["dynamo"]["hit_device"]


def test_conversations_wait_for_their_answers(tmp_path: Path) -> None:
    turns = tuple(
        WekaRequest(
            t=10.0 * turn,
            type="n",
            model="m",
            input_length=640 * (turn + 1),
            output_length=64,
            hash_ids=tuple(range(10 * (turn + 1))),
            think_time=1.0,
        )
        for turn in range(3)
    )
    write_weka(tmp_path / "one.json", [WekaConversation(id="c", requests=turns)])
    figures = tmp_path / "figures.json"
    given = ["run", "--trace", str(tmp_path / "one.json"), "--format", "weka", "--both", "2", *TIMING]
    assert main([*given, "--policy", "ours", "--json", str(figures)]) == 0
    found = json.loads(figures.read_text())["policies"]["ours"]
    assert found["answered"] == 3
    assert found["hit_device"] == pytest.approx((640 + 1280) / (640 + 1280 + 1920), abs=0.05)


def test_explain_shows_each_candidate_and_its_terms(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--trace", trace, *FLEET, *TIMING, "--request", "request-12"]) == 0
    shown = capsys.readouterr().out
    assert "request-12, prefill, at " in shown
    assert "request-12, decode, at " in shown
    assert {"prefill-0", "prefill-1", "decode-0"} <= set(shown.split())
    assert "1024" in shown  # the family's blocks, cached by request-2


def test_a_fitted_profile_can_be_used(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.json"
    assert main(["fit", "--timing", "profile:mocker", "--name", "mine", "--out", str(out)]) == 0
    assert "mine" in capsys.readouterr().out
    fitted, known = load_profile(out), load_profile("mocker")
    assert fitted.name == "mine"
    assert fitted.prefill_s(4096, 0, 8192) == pytest.approx(known.prefill_s(4096, 0, 8192), rel=0.05)
    assert main(["run", "--trace", trace, *FLEET, *TIMING, "--profile", str(out), "--policy", "ours"]) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--trace", "none.jsonl"], "--trace none.jsonl: No such file"),
        (["--timing", "profile:none"], "--timing profile:none: "),
        (["--timing", "sundial"], "--timing sundial: 'sundial' is no timing"),
        (["--timing", "ais:model"], "--timing ais:model: "),
        (["--profile", "none"], "--profile none: "),
        (["--policy", "mine"], "--policy mine: 'mine' is no policy: round-robin, least-loaded, dynamo, ours"),
        (["--policy", "ours:weight=1"], "--policy ours:weight=1: Object contains unknown field `weight`"),
        (["--policy", "ours:others_weight=-1"], "others_weight must be a finite number of at least 0"),
        (["--policy", "dynamo:credit=1"], "unknown setting 'credit'"),
        (["--policy", "dynamo:overlap_credit=NaN"], "NaN: overlap_credit: Expected `float`, got `str`, 'NaN'"),
        (["--policy", "dynamo:temperature=true"], "temperature: Expected `float`, got `bool`, True"),
        (["--policy", "dynamo:block_size=16"], "unknown setting 'block_size'; there are overlap_credit, "),
        (["--policy", "dynamo:"], "NAME=VALUE was expected, not ''"),
        (["--timing", "ais:system=gb200"], "--timing ais:system=gb200: model is missing"),
        (["--policy", "dynamo:overlap_credit"], "NAME=VALUE was expected, not 'overlap_credit'"),
        (["--policy", "round-robin:a=1"], "--policy round-robin:a=1: "),
        (["--policy", "ours", "--policy", "ours"], "--policy ours: given twice"),
        (["--both", "2"], "--prefill 2 --decode 1 --both 2: a fleet has "),
        (["--capacity-tokens", "10"], "--capacity-tokens 10: worker 'prefill-0': 10 tokens hold no block of 64"),
        (
            ["--prefill", "99999"],
            "--prefill 99999 --decode 1: count of the pool 'prefill' must be at least 1, not 99999",
        ),
        (["--fleet", "none.json"], "--fleet none.json: and --prefill: one of the two"),
        (["--block-size", "48"], "--trace "),
        (["--speedup", "1e-300"], "must be at least 0 and at most 1e+09"),
        (["--html", "none/report.html"], "--html none/report.html: "),
        (["--json", "."], "--json .: "),
    ],
)
def test_a_fault_names_the_option_and_the_value(
    trace: str, change: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--trace", trace, *FLEET, *TIMING, *change]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert not shown.out


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--speedup", "0"),
        ("--speed-spread", "1.5"),
        ("--limit", "0"),
        ("--every", "-1"),
        ("--prefill", "x"),
        ("--format", "f"),
    ],
)
def test_a_number_that_cannot_be_is_refused(
    trace: str, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["run", "--trace", trace, *FLEET, *TIMING, option, value])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert option in said
    assert value in said


def test_a_profile_needs_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *TIMING, "--name", " ", "--out", str(tmp_path / "p.json")]) == 2
    assert "--name ' ': a profile needs a name" in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()


def test_a_file_that_is_read_is_not_written(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path(trace).read_bytes()
    assert main(["run", "--trace", trace, *FLEET, *TIMING, "--json", trace]) == 2
    assert f"--json {trace}: another option's file" in capsys.readouterr().err
    assert Path(trace).read_bytes() == before


def test_without_matplotlib_a_report_is_refused_before_the_run(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    files = ["--html", str(tmp_path / "report.html"), "--json", str(tmp_path / "figures.json")]
    assert main(["run", "--trace", trace, *FLEET, *TIMING, *files]) == 2
    shown = capsys.readouterr()
    assert "--html " in shown.err
    assert "dynamo-kv-router-ext[sim]" in shown.err
    assert not shown.out
    assert not (tmp_path / "figures.json").exists()


def test_why_requests_failed_is_said(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["run", "--trace", trace, *FLEET, *TIMING, "--capacity-tokens", "1000", "--policy", "ours"]
    assert main(given) == 0
    assert "ours: 40 failed, the first because: 1500 + 1 tokens do not fit on prefill-" in capsys.readouterr().out


def test_the_truth_does_not_depend_on_what_the_policy_believes(trace: str, tmp_path: Path) -> None:
    found = []
    for profile in ("mocker", "gb200-qwen3-32b-tp1"):
        figures = tmp_path / f"{profile}.json"
        given = ["run", "--trace", trace, *FLEET, *TIMING, "--profile", profile, "--policy", "round-robin"]
        assert main([*given, "--json", str(figures)]) == 0
        found.append(json.loads(figures.read_text())["policies"])
    assert found[0] == found[1]


def test_an_unknown_request_is_named(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--trace", trace, *FLEET, *TIMING, "--request", "nobody"]) == 2
    assert "--request nobody: not in " in capsys.readouterr().err
    assert main(["explain", "--trace", trace, *FLEET, *TIMING, "--request", "request-1", "--policy", "dynamo"]) == 2
    assert "--policy dynamo: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "fleet.json: "),
        ('{"pools": [], "size": 1}', "size"),
        ('{"pools": [{"role": "reader"}]}', r"\$\.pools\[0\]\.role"),
        ('{"pools": [{"role": "both", "ranks": "two"}]}', r"\$\.pools\[0\]\.ranks"),
        ('{"pools": [{"role": "both"}], "faults": [{"worker": "both-0", "kind": "fire", "start_s": 1}]}', "kind"),
    ],
)
def test_a_fault_in_a_fleet_file_is_named_by_its_field(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "fleet.json"
    file.write_text(text)
    with pytest.raises(ScenarioError, match=said):
        read_fleet(file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pools": [{"role": "both", "count": 0}]}, "count of the pool 'both' must be at least 1, not 0"),
        ({"pools": [{"role": "both", "ranks": 0}]}, "ranks must be"),
        ({"pools": [{"role": "both", "speed": 1e-300}]}, "a speed factor must be from 0.001 to 1000.0, not 1e-300"),
        ({"pools": [{"role": "both"}, {"role": "both"}]}, "two workers are called 'both-0'"),
        ({"pools": [{"role": "both"}], "faults": [{"worker": "x", "kind": "die", "start_s": 1}]}, "worker 'x'"),
        ({"pools": [{"role": "prefill"}]}, "not prefill"),
        ({"pools": [{"role": "both"}], "block_size": 0}, "block_size must be above 0, not 0"),
        ({"pools": [{"role": "both"}], "store_tokens": -1}, "store_tokens must be at least 0, not -1"),
        ({"pools": [{"role": "both"}], "timeout_s": -1}, "timeout_s must be at least 0, not -1.0"),
        ({"pools": [{"role": "both", "host_tokens": -1}]}, "worker 'both-0': host_tokens must be at least 0, not -1"),
        ({"pools": [{"role": "both", "starts_s": -1}]}, "worker 'both-0': starts_s must be at least 0"),
        ({"pools": [{"role": "both", "speed": [[5, 1], [2, 1]]}]}, "worker 'both-0': speed changes must be in order"),
        (
            {"pools": [{"role": "both"}], "faults": [{"worker": "both-0", "kind": "slow", "start_s": 5, "stop_s": 2}]},
            "fault of 'both-0': it lasts from 5.0 to 2.0",
        ),
        (
            {"pools": [{"role": "both"}], "faults": [{"worker": "both-0", "kind": "slow", "start_s": 1, "factor": 0}]},
            "fault of 'both-0': factor must be from 0.001 to 1000.0, not 0.0",
        ),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(
    trace: str, tmp_path: Path, change: object, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fleet.json"
    file.write_text(json.dumps(change))
    assert main(["run", "--trace", trace, "--fleet", str(file), *TIMING]) == 2
    assert f"--fleet {file}: " in (shown := capsys.readouterr().err)
    assert said in shown


def test_speeds_drift_within_their_bounds() -> None:
    walk = drifting_speed("a", 0.3, until_s=3600, every_s=10)
    assert (
        walk == drifting_speed("a", 0.3, until_s=3600, every_s=10) != drifting_speed("b", 0.3, until_s=3600, every_s=10)
    )
    assert [at for at, _ in walk] == [10.0 * number for number in range(360)]
    factors = [factor for _, factor in walk]
    assert 0.7 <= min(factors) < max(factors) <= 1.3
    assert len(set(factors)) == 360
    with pytest.raises(ScenarioError, match=r"not 1\.5"):
        drifting_speed("a", 1.5)


def test_the_package_does_not_load_the_simulator() -> None:
    loaded = "[one for one in sys.modules if one.startswith('dynamo_kv_router_ext.sim')]"
    code = f"import sys, dynamo_kv_router_ext; print(*{loaded})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == ""
