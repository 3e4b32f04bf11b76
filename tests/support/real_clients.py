# SPDX-License-Identifier: Apache-2.0
"""Real clients in the place of the suite's own: the SDKs of OpenAI and Anthropic, in Python and Node, and an agent.

    python -m support.real_clients FOLDER

installs them into a folder of their own: engines pin other versions of the same libraries.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

from dynamo_structural_tags.conformance import Answer, Case, Profile, Run, run
from dynamo_structural_tags.conformance._apis import read_plain

__all__ = ["KNOWN", "LANGUAGES", "SdkAsker", "agent_loop", "ask_all", "install", "sdk", "usable", "versions"]

HERE = Path(__file__).parent / "clients"
LANGUAGES = ("python", "node")

_NUMBERS = "JavaScript has no integers beyond 2**53"
_SILENT = "the text of an error is lost, as Dynamo puts none inside an object `error` (ai-dynamo/frontend-crates#208)"
_ERRORS = (
    "literals/closing-arg-value",
    "literals/whole-argument",
    "malformed/history-arguments",
    "strict/required-incomplete",
    "truncated/in-arguments",
    "truncated/in-name",
    "truncated/in-second-call",
)
#: Cases that our frontend passes and a library's caller does not see pass, by language and API, and why.
KNOWN: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("node", "chat"): {
        **dict.fromkeys(_ERRORS, _SILENT),
        "types/big-integer": _NUMBERS,
        "reasoning/same-in-a-stream": "its accumulator keeps the last piece alone of a field that OpenAI does not have",
    },
    ("node", "responses"): {**dict.fromkeys(_ERRORS, _SILENT), "types/big-integer": _NUMBERS},
    ("node", "messages"): {"types/big-integer": _NUMBERS},
}


def usable(case: Case) -> bool:
    """Whether a case is asked through an SDK: no malformed request, nothing that an SDK hides."""
    hidden = {"refused", "protocol"} & case.expect.keys()
    return case.body is None and case.cancel is None and not hidden


def install(folder: Path) -> Path:
    """Install the clients into a folder, where they are not there yet; return it.

    Raises:
        RuntimeError: there is no Node, or a package manager failed.
    """
    if shutil.which("npm") is None:
        raise RuntimeError("no npm: install Node 18 or later (Debian: nodejs, npm)")
    wanted = (HERE / "requirements.txt").read_text("utf-8") + (HERE / "package.json").read_text("utf-8")
    done = folder / "installed"
    if done.is_file() and done.read_text("utf-8") == wanted:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "package.json", folder)
    pip = [str(folder / "python/bin/pip"), "install", "-q", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", str(folder / "python")],
        [*pip, "-r", str(HERE / "requirements.txt")],
        ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--silent"],
    ):
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise RuntimeError(f"{' '.join(command)}: {ran.stdout}{ran.stderr}")
    done.write_text(wanted, "utf-8")
    return folder


class SdkAsker:
    """Asks through an SDK in another process; in the place of the suite's `Endpoint`."""

    def __init__(self, process: asyncio.subprocess.Process, base_url: str, api: str, model: str) -> None:
        self.api = api
        self.model = model
        self.base_url = base_url
        self._process = process
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._asked = 0
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            answer = json.loads(line)
            self._waiting.pop(answer["id"]).set_result(answer)
        for one in self._waiting.values():
            one.set_exception(RuntimeError("the client's process ended"))

    async def ask(self, body: Mapping[str, Any] | str, stream: bool, *, cancel_after: int | None = None) -> Answer:
        """Send a request as the SDK's caller would; the answer is what the SDK hands over.

        Raises:
            ValueError: the body is raw text, or the stream is to be left: an SDK has no part in that.
        """
        if isinstance(body, str) or cancel_after is not None:
            raise ValueError("an SDK sends neither raw bodies, nor does the suite see it leave a stream")
        assert self._process.stdin is not None
        self._asked += 1
        waiting = self._waiting[self._asked] = asyncio.get_running_loop().create_future()
        request = {"id": self._asked, "api": self.api, "stream": stream, "body": body}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        await self._process.stdin.drain()
        got = await waiting
        if "error" in got:
            broken = got["error"] if got["status"] == 0 else None
            return Answer(got["status"], error=None if broken else got["error"], broken=broken, raw=got["error"])
        return read_plain(self.api, got["status"], json.dumps(got["body"], ensure_ascii=False))

    async def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reading


@contextlib.asynccontextmanager
async def sdk(
    language: str, clients: Path, base_url: str, api: str, model: str, timeout_s: float
) -> AsyncIterator[SdkAsker]:
    """Start the SDK of an API (`chat` and `responses`: OpenAI's, `messages`: Anthropic's) in `python` or `node`.

    `clients` is the folder of `install`; `base_url` has no `/v1`; `timeout_s` is what an answer may take.
    """
    command = [clients / "python/bin/python", HERE / "ask.py"] if language == "python" else ["node", HERE / "ask.mjs"]
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        base_url,
        f"{timeout_s}",
        cwd=clients,
        env=_environment(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 26,
    )
    asker = SdkAsker(process, base_url, api, model)
    try:
        yield asker
    finally:
        await asker.close()


def versions() -> dict[tuple[str, str], str]:
    """Return what asks, by language and API: the package, its version and the language."""
    pinned = (HERE / "requirements.txt").read_text("utf-8").splitlines()
    python = {name: version.removesuffix(".*") for name, _, version in (line.partition("==") for line in pinned)}
    node = json.loads((HERE / "package.json").read_text("utf-8"))["dependencies"]
    names = {"chat": ("openai", "openai"), "responses": ("openai", "openai")}
    names["messages"] = ("anthropic", "@anthropic-ai/sdk")
    told = {}
    for api, (ours, theirs) in names.items():
        told["python", api] = f"`{ours}` {python[ours]}, Python"
        told["node", api] = f"`{theirs}` {node[theirs]}, Node"
    return told


async def ask_all(
    language: str,
    clients: Path,
    base_url: str,
    api: str,
    model: str,
    cases: Iterable[Case],
    profile: Profile,
    timeout_s: float = 120,
) -> Run:
    """Ask the cases that are `usable` through an SDK, and judge what it hands over."""
    async with sdk(language, clients, base_url, api, model, timeout_s) as asker:
        return await run(asker, [case for case in cases if usable(case)], profile)


def agent_loop(clients: Path, base_url: str, model: str, api: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """Let an agent run to its end (`clients/agent_loop.py`); return its output and the calls that its tools got."""
    ran = subprocess.run(
        [str(clients / "python/bin/python"), str(HERE / "agent_loop.py"), base_url, model, api],
        input=json.dumps(told),
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    result: dict[str, Any] = json.loads(ran.stdout)
    return result


def _environment() -> dict[str, str]:
    """The environment without another project's settings of these SDKs, and without proxies."""
    ours = ("OPENAI_", "ANTHROPIC_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    return {name: value for name, value in os.environ.items() if not name.upper().startswith(ours)}


if __name__ == "__main__":
    install(Path(sys.argv[1]).absolute())
