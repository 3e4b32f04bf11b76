# SPDX-License-Identifier: Apache-2.0
"""Each kind of fault that `docs/check.py` looks for is found, with its line, and what is right passes."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[2]
SESSIONS = {"docs", "tests", "stack_tests"}


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_check", REPOSITORY / "docs" / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


check = _load()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="serving-stack")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up")
    up.add_argument("--model", metavar="DIR")
    up.add_argument("--port", type=int)
    commands.add_parser("patches").add_argument("verb", choices=["list", "apply"])
    return parser


def _faults(root: Path, text: str, name: str = "README.md") -> list[tuple[int, str]]:
    page = root / name
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    return [(fault.line, fault.text) for fault in check.check(root, _parser(), SESSIONS)]


def _one(root: Path, text: str, name: str = "README.md") -> tuple[int, str]:
    faults = _faults(root, text, name)
    assert len(faults) == 1, faults
    return faults[0]


def _block(script: str, language: str = "bash") -> str:
    return f"# Title\n\n```{language}\n{script}\n```\n"


def test_a_right_page_has_no_fault(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "other.md").write_text("# Run `it`, now\n\n## Twice\n\n## Twice\n", encoding="utf-8")
    text = """\
# Title

[file](docs/other.md), [folder](docs/), [heading](docs/other.md#run-it-now), [second](docs/other.md#twice-1),
[here](#title), [outside](https://example.org/x#y), <mailto:a@example.org>, `serving-stack up [--port P]`, `nox -l`.

```bash
PORT=1 .venv/bin/serving-stack up --model DIR \\
  --port 8000 > log 2>&1 && nox -s docs tests-3.11 -- -k thing
serving-stack patches list | grep "vllm"  # comment; serving-stack nonsense
cat <<'END'
serving-stack nonsense
END
python -m serving_stack up
```

```python
serving-stack nonsense
```
"""
    assert _faults(tmp_path, text) == []


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("docs/absent.md", "no such file"),
        ("#absent", "no such heading"),
        ("README.md#absent", "no such heading"),
        ("../elsewhere.md", "leaves the repository"),
        ("/README.md", "is absolute"),
    ],
)
def test_a_link_that_leads_nowhere(tmp_path: Path, link: str, message: str) -> None:
    line, text = _one(tmp_path, f"# Title\n\nfirst line\nsecond [x]({link})\n")
    assert line == 4
    assert message in text
    assert link in text


def test_an_image_that_is_not_there(tmp_path: Path) -> None:
    assert "no such file" in _one(tmp_path, "![plot](plot.png)\n")[1]


def test_a_link_in_a_table(tmp_path: Path) -> None:
    assert _one(tmp_path, "| a |\n|---|\n| [x](absent.md) |\n")[0] == 3


@pytest.mark.parametrize("language", ["bash", "sh"])
def test_shell_that_does_not_parse(tmp_path: Path, language: str) -> None:
    line, text = _one(tmp_path, _block("echo one\nfor x in a b; done", language))
    assert line == 5
    assert "syntax error" in text


def test_only_the_commands_of_a_console_block_are_shell(tmp_path: Path) -> None:
    assert _faults(tmp_path, _block("$ echo one \\\n> two\n(output that bash -n refuses", "console")) == []
    assert _one(tmp_path, _block("output\n$ serving-stack nonsense", "console"))[0] == 5


def test_a_console_block_without_a_prompt(tmp_path: Path) -> None:
    assert "without a command" in _one(tmp_path, _block("serving-stack up", "console"))[1]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("serving-stack start", "invalid choice: 'start'"),
        ("serving-stack up --prot 8000", "--prot"),
        ("serving-stack up --port many", "invalid int value: 'many'"),
        ("serving-stack patches", "required"),
        ("echo a && X=1 .venv/bin/serving-stack start", "invalid choice: 'start'"),
        ("python3 -m serving_stack start", "invalid choice: 'start'"),
        ("if serving-stack start; then echo; fi", "invalid choice: 'start'"),
    ],
)
def test_a_serving_stack_command_that_its_parser_refuses(tmp_path: Path, command: str, message: str) -> None:
    line, text = _one(tmp_path, _block(f"echo 'over\ntwo lines'\n\n{command}"))
    assert line == 7
    assert message in text


def test_a_sub_command_in_running_text_that_does_not_exist(tmp_path: Path) -> None:
    line, text = _one(tmp_path, "one\n`serving-stack start [DIR]`\n")
    assert line == 2
    assert "invalid choice: 'start'" in text


@pytest.mark.parametrize("text", [_block("nox -s docs test"), "Run\n\nthe\n`nox -s test -- x`.\n"])
def test_a_nox_session_that_does_not_exist(tmp_path: Path, text: str) -> None:
    line, message = _one(tmp_path, text)
    assert line == 4
    assert message == "nox has no session 'test'"


@pytest.mark.parametrize(
    "name", ["CONTRIBUTING.md", "docs/a.md", "packages/a/README.md", "integration/README.md", "patches/LEDGER.md"]
)
def test_every_kind_of_page_is_read(tmp_path: Path, name: str) -> None:
    assert "no such file" in _one(tmp_path, "[x](absent.md)\n", name)[1]


def test_sessions_are_read_from_a_noxfile(tmp_path: Path) -> None:
    noxfile = tmp_path / "noxfile.py"
    noxfile.write_text(
        "import nox\n"
        "@nox.session\ndef plain(session: nox.Session) -> None: ...\n"
        "@nox.session(python=['3.11'], name='named')\ndef other(session: nox.Session) -> None: ...\n"
        "@nox.parametrize('x', [1])\n@nox.session(venv_backend='none')\ndef third(session: nox.Session) -> None: ...\n"
        "def helper() -> None: ...\n",
        encoding="utf-8",
    )
    assert check.nox_sessions(noxfile) == {"plain", "named", "third"}


def test_the_command_prints_file_and_line_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noxfile.py").write_text("", encoding="utf-8")
    cli = ModuleType("serving_stack.cli")
    monkeypatch.setattr(cli, "parser", _parser, raising=False)
    monkeypatch.setitem(sys.modules, "serving_stack", ModuleType("serving_stack"))
    monkeypatch.setitem(sys.modules, "serving_stack.cli", cli)
    (tmp_path / "README.md").write_text("one\n[x](absent.md)\n", encoding="utf-8")
    assert check.main(["--root", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "README.md:2: link 'absent.md': no such file\n"
    (tmp_path / "README.md").write_text("one\n", encoding="utf-8")
    assert check.main(["--root", str(tmp_path)]) == 0
