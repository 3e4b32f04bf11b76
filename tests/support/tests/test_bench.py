# SPDX-License-Identifier: Apache-2.0
"""The benchmark harness: discovery, figures, the table, the JSON file, exit statuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from support import bench as harness
from support import machine
from support.bench import Bench, BenchError, discover, main

TESTS = Path(harness.__file__).parents[1]

PACK = '''"""Packing against copying."""


def run(bench):
    bench.row("speed", "GB/s", ours=[4.0, 6.0, 50.0], reference=[2.0, 3.0, 4.0], reference_name="memcpy", aim=">= 2.0")
    bench.row("latency", "us", ours=[30, 10, 20], reference=[10, 10, 10], reference_name="peer 1.2", aim="<= 1")
    bench.row("start", "s", ours=[59.5], aim="<= 60")
    bench.row("copies", "", ours=[101])
    bench.note("one note")
'''


def write_bench(root: Path, path: str, text: str) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_bench(tmp_path, "packages/kv-layout/benchmarks/bench_pack_rows.py", PACK)
    return tmp_path


def test_benches_of_packages_and_integration_are_listed_without_being_imported(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bench(
        root, "integration/benchmarks/bench_start.py", '"""From installed to first answer.\n\nMore."""\n1 / 0\n'
    )
    write_bench(root, "packages/kv-layout/benchmarks/helpers.py", "1 / 0\n")
    write_bench(root, "packages/kv-layout/tests/bench_not_this.py", "1 / 0\n")
    assert main([], root=root) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed == ["pack-rows  Packing against copying.", "start      From installed to first answer."]


def test_two_benches_of_one_name_are_an_error_that_names_both(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bench(root, "integration/benchmarks/bench_pack_rows.py", '"""Again."""\n')
    assert main([], root=root) == 2
    assert main(["pack-rows"], root=root) == 2
    message = capsys.readouterr().err
    assert "packages/kv-layout/benchmarks/bench_pack_rows.py" in message
    assert "integration/benchmarks/bench_pack_rows.py" in message


@pytest.mark.parametrize(("text", "fault"), [("x = 1\n", "no docstring"), ("def run(:\n", "cannot be parsed")])
def test_a_bench_that_cannot_be_described_is_an_error_that_names_it(root: Path, text: str, fault: str) -> None:
    write_bench(root, "integration/benchmarks/bench_bad.py", text)
    with pytest.raises(BenchError, match=rf"integration/benchmarks/bench_bad\.py .*{fault}"):
        discover(root)


def test_an_unknown_name_lists_the_names(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack"], root=root) == 2
    assert "no bench is named pack: there are pack-rows" in capsys.readouterr().err


def test_the_json_file_holds_medians_ratios_and_aims_and_nothing_else(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    file.write_text("an older run")
    assert main(["pack-rows", "--json", str(file)], root=root) == 0
    document = json.loads(file.read_text())
    assert list(document) == ["bench", "machine", "versions", "rows"]
    assert document["bench"] == "pack-rows"
    assert document["rows"] == [
        {
            "metric": "speed",
            "unit": "GB/s",
            "ours": 6.0,
            "reference": 3.0,
            "reference_name": "memcpy",
            "ratio": 2.0,
            "aim": ">= 2.0",
            "met": True,
        },
        {
            "metric": "latency",
            "unit": "us",
            "ours": 20.0,
            "reference": 10.0,
            "reference_name": "peer 1.2",
            "ratio": 2.0,
            "aim": "<= 1",
            "met": False,
        },
        {
            "metric": "start",
            "unit": "s",
            "ours": 59.5,
            "reference": None,
            "reference_name": None,
            "ratio": None,
            "aim": "<= 60",
            "met": True,
        },
        {
            "metric": "copies",
            "unit": "",
            "ours": 101.0,
            "reference": None,
            "reference_name": None,
            "ratio": None,
            "aim": None,
            "met": None,
        },
    ]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_table_shows_spread_samples_and_aims_and_cuts_nothing(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert main(["pack-rows"], root=root) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split("  ")[0]: re.split(r"\s{2,}", line) for line in lines}
    assert cells["speed"] == ["speed", "GB/s", "6 ± 2", "3", "memcpy", "3 ± 1", "3", "2", ">= 2.0", "yes"]
    assert cells["latency"] == ["latency", "us", "20 ± 10", "3", "peer 1.2", "10 ± 0", "3", "2", "<= 1", "NO"]
    assert cells["start"] == ["start", "s", "59.5", "1", "-", "-", "-", "-", "<= 60", "yes"]  # one sample: no spread
    assert cells["copies"][-2:] == ["-", "-"]
    assert "one note" in lines
    assert "aims met: 2 of 3" in lines
    assert any(line.startswith("machine: ") for line in lines)
    assert any(line.startswith("versions: ") for line in lines)


@pytest.mark.parametrize(
    ("aim", "met"),
    [
        (">= 2", True),
        ("> 2", False),
        ("<= 2", True),
        ("< 2", False),
        ("== 2", True),
        (">=2.01", False),
        ("<2.1e0", True),
    ],
)
def test_an_aim_is_applied_to_the_ratio(aim: str, met: bool) -> None:
    row = Bench("x").row("m", "s", ours=[4], reference=[2], reference_name="peer", aim=aim)
    assert row.met is met


def test_an_aim_without_a_reference_is_applied_to_ours() -> None:
    assert Bench("x").row("m", "s", ours=[4, 61, 100], aim="<= 60").met is False


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"ours": []}, "no samples"),
        ({"ours": [1.0, float("nan")]}, "not finite"),
        ({"ours": [None]}, "not a number"),
        ({"ours": [True]}, "not a number"),
        ({"ours": [1], "aim": "fast"}, "aim 'fast'"),
        ({"ours": [1], "aim": ">= 2x"}, "aim '>= 2x'"),
        ({"ours": [1], "reference": [1]}, "go together"),
        ({"ours": [1], "reference_name": "peer"}, "go together"),
        ({"ours": [1], "reference": [0, 0, 1], "reference_name": "peer"}, "no ratio"),
    ],
)
def test_a_figure_that_means_nothing_is_not_recorded(arguments: dict[str, object], fault: str) -> None:
    bench = Bench("x")
    with pytest.raises(ValueError, match=fault):
        bench.row("m", "s", **arguments)  # type: ignore[arg-type]
    assert bench.rows == []


def test_a_bench_that_raises_leaves_an_incomplete_table_and_the_old_json_file(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bench(root, "integration/benchmarks/bench_broken.py", PACK + "    raise RuntimeError('no worker')\n")
    file = tmp_path / "figures.json"
    file.write_text("an older run")
    assert main(["broken", "--json", str(file)], root=root) == 1
    captured = capsys.readouterr()
    assert "bench broken failed: RuntimeError: no worker" in captured.err
    assert captured.out.startswith("bench broken: INCOMPLETE, it failed")
    assert "GB/s" in captured.out
    assert file.read_text() == "an older run"


@pytest.mark.parametrize(
    ("body", "status", "fault"),
    [
        ("def run(bench):\n    pass\n", 1, "recorded no figure"),
        ("import no_such_module\n", 1, "ModuleNotFoundError"),
        ("x = 1\n", 1, "defines no run"),
        ("def run(bench):\n    raise SystemExit(0)\n", 1, "SystemExit"),
        ("def run(bench):\n    raise KeyboardInterrupt\n", 130, "was interrupted"),
        (
            "from support.bench import Unavailable\n\n\ndef run(bench):\n    raise Unavailable('it needs a GPU')\n",
            1,
            "cannot run here: it needs a GPU",
        ),
    ],
)
def test_a_bench_without_figures_never_passes(
    root: Path, capsys: pytest.CaptureFixture[str], body: str, status: int, fault: str
) -> None:
    write_bench(root, "integration/benchmarks/bench_empty.py", f'"""Nothing."""\n{body}')
    assert main(["empty"], root=root) == status
    captured = capsys.readouterr()
    assert "bench empty" in captured.err
    assert fault in captured.err
    assert captured.out == ""


def test_a_json_file_in_no_folder_is_refused_before_the_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack-rows", "--json", str(root / "none" / "f.json")], root=root) == 2
    assert main(["pack-rows", "--json", str(root)], root=root) == 2
    assert capsys.readouterr().out == ""


def test_the_module_runs_a_bench_with_the_types_the_bench_imports(root: Path) -> None:
    write_bench(
        root,
        "integration/benchmarks/bench_typed.py",
        '"""Typed."""\nfrom support.bench import Bench\nimport beside\n\n\ndef run(bench: Bench) -> None:\n'
        '    assert isinstance(bench, Bench)\n    assert bench.quick\n    bench.row("m", "", ours=[beside.VALUE])\n',
    )
    write_bench(root, "integration/benchmarks/beside.py", "VALUE = 3\n")
    command = [sys.executable, "-m", "support.bench", "typed", "--quick", "--json", "out.json"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("bench typed (quick run)\n")
    assert json.loads((root / "out.json").read_text())["rows"][0]["ours"] == 3


def test_compare_takes_both_in_turn_after_a_warm_up_of_each() -> None:
    calls: list[str] = []

    def sample(name: str, value: float) -> float:
        calls.append(name)
        return value + len(calls)

    row = Bench("x").compare(
        "m",
        "GB/s",
        ours=lambda: sample("o", 100),
        reference=lambda: sample("r", 0),
        reference_name="peer",
        repeats=4,
        warmup=1,
    )
    assert "".join(calls) == "ro" + "or" + "ro" + "or" + "ro"
    assert row.ours == (103, 106, 107, 110)
    assert row.reference == (4, 5, 8, 9)


def test_compare_refuses_a_function_that_returns_no_figure() -> None:
    bench = Bench("x")
    with pytest.raises(ValueError, match="ours: None is not a number"):
        bench.compare("m", "s", ours=lambda: None, reference=lambda: 1.0, reference_name="peer")  # type: ignore[arg-type, return-value]


def test_times_are_measured_in_the_unit_and_what_is_returned_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def advance(seconds: float) -> float:
        nonlocal now
        now += seconds
        return 1e9

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    bench = Bench("x")
    row = bench.compare_time(
        "m", "us", ours=lambda: advance(2e-6), reference=lambda: advance(1e-6), reference_name="peer", aim="<= 2.5"
    )
    assert row.ours == pytest.approx([2.0] * 7)
    assert row.ratio == pytest.approx(2.0)
    assert row.met
    assert bench.measure(lambda: advance(0.5), unit="ms", repeats=2) == pytest.approx([500, 500])
    with pytest.raises(ValueError, match="unit 'GB/s' is no time unit"):
        bench.measure(lambda: None, unit="GB/s")


def test_a_quick_run_repeats_less() -> None:
    assert len(Bench("x", quick=True).measure(lambda: None, repeats=50)) == harness.QUICK_REPEATS
    assert len(Bench("x", quick=True).measure(lambda: None, repeats=1)) == 1
    assert len(Bench("x").measure(lambda: None, repeats=50)) == 50
    with pytest.raises(ValueError, match="at least 1"):
        Bench("x").measure(lambda: None, repeats=0)


def test_the_machine_has_no_gpu_without_nvidia_smi_and_an_unknown_one_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ", no GPU, " in machine.describe_machine()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    assert ", GPU unknown (nvidia-smi: CalledProcessError), " in machine.describe_machine()
    tool.write_text("#!/bin/sh\necho 'NVIDIA GB200, 189471 MiB, 580.1'\necho 'NVIDIA GB200, 189471 MiB, 580.1'\n")
    assert ", 2 x NVIDIA GB200 / 189471 MiB / 580.1, " in machine.describe_machine()


def test_versions_are_those_of_installed_distributions_only(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "packages/kv-layout/pyproject.toml").write_text("")
    installed = {"xgrammar": "0.2.8", "kv-layout": "0.1.0", "requests": "2"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    assert machine.installed_versions(root) == {"xgrammar": "0.2.8", "kv-layout": "0.1.0"}


def test_the_cores_and_the_memory_are_what_the_control_group_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text(f"{2**28}\n")
    assert ", 0.5 cores, 0.2 GiB memory, " in machine.describe_machine()
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert ", 0.5 cores, 0.2 GiB memory, " not in machine.describe_machine()
