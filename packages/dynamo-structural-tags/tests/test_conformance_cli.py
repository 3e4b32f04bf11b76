# SPDX-License-Identifier: Apache-2.0
"""The command `tool-conformance`, over a socket, against a fake server whose model plays what the cases expect."""

from __future__ import annotations

import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from dynamo_structural_tags.conformance import load_cases, read_run
from dynamo_structural_tags.conformance._cli import _parser, main
from support.faulty_tool_server import Asked, Fault, FaultyToolServer, Reply, Said

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
KEY = "sk-a-secret-of-mine"
CASES = """
area: files
cases:
  entity:
    fault: An entity arrives decoded.
    needs: [forced]
    request:
      messages: [{role: user, content: 'Write the entity.'}]
      tools: &tools
        - type: function
          function:
            name: write
            parameters: {type: object, properties: {text: {type: string, const: a &lt; b}}, required: [text]}
      tool_choice: required
    expect: {must_call: true, calls: [{name: write, arguments: {text: a &lt; b}}]}
  word:
    fault: A word arrives as another.
    needs: [auto]
    apis: [chat]
    request:
      messages: [{role: user, content: Say hello.}]
      tools: *tools
    expect: {text: {contains: [hello]}}
"""


class DecodesEntities(Fault):
    """Decodes `&lt;`."""

    def answer(self, asked: Asked, said: Said) -> Said:
        return said.map_strings(lambda text: text.replace("&lt;", "<"))


class RefusesTheKey(Fault):
    """Lists its models to everyone, and answers nobody."""

    def reply(self, asked: Asked, reply: Reply) -> Reply:
        return Reply(401, {"content-type": "application/json"}, (b'{"error": {"message": "bad key"}}',))


class LeadsElsewhere(Fault):
    """Answers everyone with another URL."""

    def reply(self, asked: Asked, reply: Reply) -> Reply:
        return Reply(307, {"location": "https://elsewhere/v1/chat/completions"}, ())


class Hangs(Fault):
    """Never answers those who ask for words."""

    def reply(self, asked: Asked, reply: Reply) -> Reply:
        return Reply(200, {}, (), "hang") if asked.user == "Say hello." else reply


Serve = Callable[..., list[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "files.yaml").write_text(CASES)
    return tmp_path / "cases"


@pytest.fixture
def serve(folder: Path) -> Iterator[Serve]:
    """Start a fake server; return the flags that lead to it."""
    servers = []

    def start(fault: Fault | None = None, api_key: str | None = None) -> list[str]:
        server = FaultyToolServer(load_cases(folder), fault, api_key=api_key).serve()
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        url = f"http://127.0.0.1:{server.server_port}"
        return ["--base-url", url, "--model", "reference", "--cases", str(folder)]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_server_without_faults_passes(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*serve(), "--profile", "agent"]) == 0
    assert "2 cases: 2 passed, 0 failed, 0 inconclusive" in capsys.readouterr().out


def test_a_fault_is_told_in_the_terminal_and_in_every_report(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {flag: tmp_path / f"out.{flag}" for flag in ("json", "junit", "html")}
    flags = [word for flag, path in names.items() for word in (f"--{flag}", str(path))]
    assert main([*serve(DecodesEntities()), *flags]) == 1
    told = 'plain, stream: calls[0].arguments.text: expected "a &lt; b", got "a < b"'
    assert told in capsys.readouterr().out
    results = {result.case: result for result in read_run(names["json"]).results}
    assert (results["files/entity"].remark, results["files/word"].verdict) == (told, "pass")
    assert len(ET.parse(names["junit"]).findall(".//failure")) == 1
    assert "files/entity" in names["html"].read_text("utf-8")


def test_only_what_is_asked_for_is_asked(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*serve(DecodesEntities()), "--only", "*/word", "nothing/*", "--only", "files/wo*"]) == 2
    assert capsys.readouterr().err == (
        "tool-conformance: --only 'nothing/*': no case has such an id; --list shows them\n"
    )
    assert main([*serve(DecodesEntities()), "--only", "*/word", "--only", "files/wo*"]) == 0
    assert "1 passed" in capsys.readouterr().out


def test_the_key_is_sent_and_stands_nowhere_else(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = serve(api_key=KEY)
    names = {flag: tmp_path / f"out.{flag}" for flag in ("json", "junit", "html")}
    monkeypatch.setenv("TOOL_CONFORMANCE_API_KEY", KEY)
    assert main([*flags, *(word for flag, path in names.items() for word in (f"--{flag}", str(path)))]) == 0
    told = "".join(capsys.readouterr()) + "".join(path.read_text("utf-8") for path in names.values())
    assert KEY not in told
    monkeypatch.delenv("TOOL_CONFORMANCE_API_KEY")
    assert main([*flags, "--api-key", KEY, "--api", "messages"]) == 0
    assert main([*flags, "--api-key", "wrong-key"]) == 2
    assert "the API key is refused" in capsys.readouterr().err


def test_it_cannot_run_without_a_server_or_with_a_model_that_is_not_served(
    serve: Serve, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*serve(), "--model", "other"]) == 2
    assert "the model 'other' is not served" in capsys.readouterr().err
    assert main(["--base-url", "http://127.0.0.1:9", "--model", "m", "--cases", str(folder)]) == 2
    assert "tool-conformance: nobody answers at http://127.0.0.1:9/v1/models" in capsys.readouterr().err


def test_it_cannot_run_where_every_answer_is_that_the_key_is_refused(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*serve(RefusesTheKey()), "--attempts", "1"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        "tool-conformance: no case could be asked: plain, stream: expected an answer, got an error: "
    )
    assert "status 401: bad key" in told


def test_a_refusal_that_is_expected_is_no_reason_not_to_run(serve: Serve, folder: Path) -> None:
    (folder / "model.yaml").write_text(
        "area: model\ncases: {unknown: {fault: F., request: {messages: [{role: user, content: Hi there.}]},"
        " overrides: {chat: {model: nobody}}, expect: {refused: {names: [[nobody]]}}}}"
    )
    assert main([*serve(), "--only", "model/*"]) == 0


def test_an_inconclusive_required_case_has_an_exit_status_of_its_own(serve: Serve) -> None:
    """The fake model cannot say the word within one token."""
    flags = serve()
    small = Path(flags[-1]).parent / "small.yaml"
    small.write_text("{needs: [forced, auto], max_tokens: 1}")
    only = ["--only", "files/word", "--attempts", "1"]
    assert main([*flags, *only, "--profile", str(small)]) == 3
    small.write_text("{needs: [forced], max_tokens: 1}")
    assert main([*flags, *only, "--profile", str(small)]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "m"], "--base-url is missing"),
        (["--base-url", "http://localhost:1"], "--model is missing"),
        (["--base-url", "localhost", "--model", "m"], "'localhost' is no URL"),
        (["--base-url", "http://localhost:1", "--model", "m", "--json", "/none/x"], "cannot write '/none/x'"),
        (["--base-url", "http://localhost:1", "--model", "m", "--html", "/"], "cannot write '/': it is a folder"),
        (["--base-url", "http://localhost:1", "--model", "m", "--api-key", "a b"], "the API key has characters"),
        (["--profile", "nobody"], "no profile 'nobody'"),
        (["--base-url", "http://localhost:1", "--model", "m", "--json", ""], "cannot write ''"),
        (["--base-url", "http://localhost:99999", "--model", "m"], "'http://localhost:99999' is no URL of the form"),
        (["--base-url", "http://localhost:1/v1\n", "--model", "m"], "'http://localhost:1/v1\\n' is no URL"),
        (["--base-url", "http://x/v1/responses/", "--model", "m"], "ends in /responses, which is added to a base URL"),
        (["--base-url", "http://me:a-secret@x y", "--model", "m"], "would stand in every report"),
        (["--cases", "/none"], "/none: no such folder"),
        (["--compare", "/none/a", "/none/b"], "/none/a"),
        (["--attempts", "0"], "'0' is no whole number from 1 to 1000"),
        (["--concurrency", "many"], "'many' is no whole number"),
        (["--timeout-s", "-1"], "'-1' is no time in seconds above 0"),
        (["--api", "completions"], "invalid choice: 'completions'"),
        (["--mod", "m"], "unrecognized arguments: --mod m"),
    ],
)
def test_a_bad_flag_is_named(flags: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["--cases", str(folder), *flags])
    except SystemExit as error:  # argparse's own way
        status = error.code  # type: ignore[assignment]
    assert status == 2
    told = capsys.readouterr()
    assert message in told.err
    assert (told.out, "Traceback" in told.err) == ("", False)


def test_a_case_file_that_is_wrong_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "files.yaml").write_text(CASES.replace("[forced]", "[force]"))
    assert main(["--list", "--cases", str(folder)]) == 2
    assert "files.yaml: cases.entity.needs[0]: 'force' is not one of" in capsys.readouterr().err


def test_a_profile_of_ones_own_names_cases_that_there_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.parent / "mine.yaml").write_text("{needs: [], max_tokens: 1, except: {files/entitty: Why.}}")
    assert main(["--list", "--cases", str(folder), "--profile", str(folder.parent / "mine.yaml")]) == 2
    assert "names 'files/entitty': no case has that id" in capsys.readouterr().err


def test_the_list_says_what_is_required(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--cases", str(folder), "--profile", "forced"]) == 0
    entity, word, last = capsys.readouterr().out.splitlines()
    assert entity.split() == ["files/entity", "required", "forced", "An", "entity", "arrives", "decoded."]
    assert word.split()[:2] == ["files/word", "auto"]
    assert last == "2 cases, 1 of them required by the profile forced"


def test_two_runs_are_compared(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = str(tmp_path / "good.json"), str(tmp_path / "bad.json")
    main([*serve(), "--json", good])
    main([*serve(DecodesEntities()), "--json", bad])
    capsys.readouterr()
    assert main(["--compare", good, bad]) == 1
    assert "files/entity: pass -> fail" in capsys.readouterr().out
    assert main(["--compare", bad, good]) == 0
    assert main(["--compare", good, good]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no JSON: Expecting value"),
        ("[" * 100_000, "no results of tool-conformance: maximum recursion depth"),
        ("[]", "no results of tool-conformance"),
        ('{"schema": 2}', "results of schema 2; this version reads schema 1"),
        ('{"schema": 1, "results": []}', "no results of tool-conformance: 'endpoint' is missing"),
        ('{"schema": 1, "results": "x"}', "no results of tool-conformance: "),
        (
            '{"schema": 1, "results": [{"case": "a/b", "exchanges": [], "verdict": "good"}]}',
            "no results of tool-confor",
        ),
    ],
)
def test_a_file_that_cannot_be_compared_is_named(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text(text)
    assert main(["--compare", str(tmp_path / "run.json"), str(tmp_path / "run.json")]) == 2
    told = capsys.readouterr().err
    assert f"run.json: {message}" in told
    assert (told.count("\n"), "Error" in told) == (1, False)


def test_results_of_a_later_version_are_compared(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A field that is added does not make a schema of its own."""
    path = tmp_path / "run.json"
    main([*serve(DecodesEntities()), "--json", str(path)])
    later = json.loads(path.read_text())
    for entry in (later, later["endpoint"], *later["results"], later["results"][0]["exchanges"][0]):
        entry["added"] = 1
    (tmp_path / "later.json").write_text(json.dumps(later))
    assert main(["--compare", str(path), str(tmp_path / "later.json")]) == 0
    assert "2 of 2 cases have the verdict they had" in capsys.readouterr().out


def test_a_report_that_does_not_fit_on_the_disk_is_not_left_there_in_part(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, small = tmp_path / "out.html", tmp_path / "out.xml"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    flags = serve()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        status = main([*flags, "--html", str(path), "--junit", str(small)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (status, path.exists(), small.exists()) == (2, False, True)
    told = capsys.readouterr()
    assert told.err == f"tool-conformance: cannot write {str(path)!r}: File too large\n"
    assert "2 passed" in told.out


@pytest.mark.parametrize("more", [["--list"], []], ids=["list", "run"])
def test_nobody_who_reads_its_output_is_no_traceback(more: list[str], serve: Serve) -> None:
    command = [sys.executable, "-m", "dynamo_structural_tags.conformance", *serve(), *more]
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_api_that_lives_at_another_url_cannot_be_asked(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*serve(LeadsElsewhere()), "--json", str(tmp_path / "out.json")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("tool-conformance: no case could be asked: ")
    assert "it leads elsewhere, to https://elsewhere/v1/chat/completions" in told


def test_without_the_extra_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['httpx', 'yaml', 'rich']))\n"
        "from dynamo_structural_tags.conformance._cli import main\n"
        "sys.exit(main(['--base-url', 'http://127.0.0.1:9', '--model', 'm']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'tool-conformance: needs pyyaml: pip install "dynamo-structural-tags[conformance]"\n'


@pytest.mark.parametrize(("module", "user"), [("httpx", "_endpoint"), ("rich", "_table")])
def test_without_a_part_of_the_extra_it_says_so_too(
    module: str, user: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"dynamo_structural_tags.conformance.{user}", raising=False)
    assert main(["--base-url", "http://127.0.0.1:9", "--model", "m", "--cases", str(folder)]) == 2
    assert capsys.readouterr().err.startswith(f"tool-conformance: needs {module}: pip install ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_a_ci_that_ends_the_job_leave_what_was_judged(
    number: signal.Signals, serve: Serve, tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    command = [sys.executable, "-u", "-m", "dynamo_structural_tags.conformance", *serve(Hangs()), "--json", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})
    assert process.stdout is not None
    assert "pass files/entity" in process.stdout.readline()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "tool-conformance: interrupted after 1 cases\n"
    assert "1 passed" in out
    found = read_run(path)
    assert ([result.case for result in found.results], found.interrupted) == (["files/entity"], True)


# The example of GitHub Actions ------------------------------------------------------------------------------------

EXAMPLE = yaml.safe_load((Path(__file__).parents[1] / "examples/tool-conformance.yaml").read_text("utf-8"))


def step(name: str) -> str:
    """The shell of one of the example's steps, with the matrix filled in."""
    (job,) = EXAMPLE["jobs"].values()
    (found,) = [step["run"] for step in job["steps"] if step.get("name") == name]
    assert "chat" in job["strategy"]["matrix"]["api"]
    return str(found).replace("${{ matrix.api }}", "chat")


def test_every_command_of_the_example_is_one_that_there_is() -> None:
    lines = step("Run it").replace("\\\n", " ").splitlines()
    commands = [line.partition("||")[0] for line in lines if line.strip().startswith("tool-conformance ")]
    asked, compared = (_parser().parse_args(shlex.split(command)[1:]) for command in commands)
    assert (asked.base_url, asked.model, asked.api) == ("$URL", "$MODEL", "chat")
    assert compared.compare == ["$baseline", asked.json]
    assert f'"{step("Install the suite").split()[-1].strip(chr(34))}"' in README


def run_the_example(folder: Path, command: str, url: str) -> int:
    (folder / "bin").mkdir()
    (folder / "bin/tool-conformance").write_text(f"#!/bin/sh\n{command}\n")
    (folder / "bin/tool-conformance").chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "URL": url, "MODEL": "reference", "TOOL_CONFORMANCE_API_KEY": "", "PATH": path}
    shell = ["bash", "-e", "-c", step("Run it")]
    return subprocess.run(shell, cwd=folder, env=environment, capture_output=True, timeout=60).returncode


@pytest.mark.parametrize(
    ("run", "baseline", "compared", "status"),
    [
        (0, False, 9, 0),
        (1, False, 9, 1),
        (3, False, 9, 3),
        (1, True, 0, 0),  # what fails has failed before
        (3, True, 0, 0),
        (1, True, 1, 1),
        (0, True, 1, 1),
        (2, True, 0, 2),  # it could not run: nothing to compare
        (130, True, 0, 130),  # cases that were not asked have no verdict
    ],
)
def test_the_example_fails_for_what_got_worse(
    run: int, baseline: bool, compared: int, status: int, tmp_path: Path
) -> None:
    if baseline:
        (tmp_path / "tool-conformance-baseline-chat.json").touch()
    fake = f'[ "$1" = --compare ] && exit {compared}; exit {run}'
    assert run_the_example(tmp_path, fake, "http://fake") == status


def test_the_example_runs(serve: Serve, tmp_path: Path) -> None:
    main([*serve(), "--json", str(tmp_path / "tool-conformance-baseline-chat.json")])
    _, url, *_, cases = serve(DecodesEntities())
    real = f'[ "$1" = --compare ] || set -- "$@" --cases {cases}\n'
    real += f'exec {sys.executable} -m dynamo_structural_tags.conformance "$@"'
    assert run_the_example(tmp_path, real, url) == 1
    assert [result.verdict for result in read_run(tmp_path / "result.json").results] == ["fail", "pass"]
    assert (tmp_path / "result.xml").is_file()
    assert (tmp_path / "result.html").is_file()
