# SPDX-License-Identifier: Apache-2.0
"""The command line: what bad input gets, what it costs, and `chat` against any endpoint."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from serving_stack import StackError, __version__, cli, up
from serving_stack.launcher import metric


def _command(*words: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("OPENAI_")}
    return subprocess.run(
        [sys.executable, "-m", "serving_stack", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**clean, "SERVING_STACK_HOME": str(home), **environment},
    )


class FakeEndpoint(http.server.BaseHTTPRequestHandler):
    """Stands in for a paid service's endpoint; answers what its class was told, and keeps what it was asked."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[tuple[str, str | None, Any]]] = []
    models: ClassVar[list[str]] = ["one"]
    status = 200
    answer: Any = None
    page: bytes | None = None
    chunks: ClassVar[list[Any]] = []

    def log_message(self, *args: Any) -> None:
        """Keep quiet."""

    def _say(self, body: bytes, kind: str) -> None:
        body, kind = (body, kind) if self.page is None else (self.page, "text/html")
        self.send_response(self.status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        """List the models."""
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "x"} for name in self.models]
        self._say(json.dumps({"object": "list", "data": data}).encode(), "application/json")

    def do_POST(self) -> None:
        """Answer a chat completion, plain or streamed."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, self.headers.get("authorization"), body))
        if self.status == 200 and body.get("stream"):
            lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in self.chunks]
            self._say("".join([*lines, "data: [DONE]\n\n"]).encode(), "text/event-stream")
        else:
            self._say(json.dumps(self.answer).encode(), "application/json")


def _chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "one", "choices": [choice]}


@pytest.fixture
def endpoint() -> Iterator[tuple[str, type[FakeEndpoint]]]:
    """An endpoint of its own class for each test: its address and what to tell it."""
    handler = type("Endpoint", (FakeEndpoint,), {"asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1", handler
    server.shutdown()
    server.server_close()


def test_chat_streams_text_and_passes_key_and_model(endpoint: tuple[str, type[FakeEndpoint]], tmp_path: Path) -> None:
    url, handler = endpoint
    handler.chunks = [_chunk(content="Hel"), _chunk(content="lo\n"), _chunk(finish="stop")]
    said = _command("chat", "--base-url", url, "--api-key", "k1", "z-ai/glm", "Hi there", home=tmp_path)
    assert (said.returncode, said.stdout) == (0, "Hello\n\n")
    ((path, key, body),) = handler.asked
    assert (path, key) == ("/v1/chat/completions", "Bearer k1")
    assert body["model"] == "z-ai/glm"
    assert body["messages"] == [{"role": "user", "content": "Hi there"}]


def test_chat_takes_the_only_model_and_the_environment(
    endpoint: tuple[str, type[FakeEndpoint]], tmp_path: Path
) -> None:
    url, handler = endpoint
    handler.chunks = [_chunk(content="x", finish="stop")]
    assert _command("chat", "Hi", home=tmp_path, OPENAI_BASE_URL=url, OPENAI_API_KEY="k2").returncode == 0
    assert handler.asked[0][1] == "Bearer k2"
    assert handler.asked[0][2]["model"] == "one"
    handler.models = ["one", "two"]
    refused = _command("chat", "--base-url", url, "Hi", home=tmp_path)
    assert refused.returncode == 1
    assert "one, two" in refused.stderr


def test_chat_prints_tool_calls_whole(endpoint: tuple[str, type[FakeEndpoint]], tmp_path: Path) -> None:
    url, handler = endpoint
    tools = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    first = {"index": 0, "id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"a": '}}
    rest = {"index": 0, "function": {"arguments": '"<é\\n"}'}}
    handler.chunks = [_chunk(tool_calls=[first]), _chunk(tool_calls=[rest]), _chunk(finish="tool_calls")]
    said = _command("chat", "--base-url", url, "--tools", str(tmp_path / "tools.json"), "one", "Hi", home=tmp_path)
    assert said.returncode == 0
    assert handler.asked[0][2]["tools"] == tools
    assert json.loads(said.stdout) == {"id": "c1", "name": "run", "arguments": '{"a": "<é\\n"}'}


def test_chat_json_is_the_whole_answer(endpoint: tuple[str, type[FakeEndpoint]], tmp_path: Path) -> None:
    url, handler = endpoint
    message = {"role": "assistant", "content": "Hello"}
    handler.answer = {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "one",
        "nvext": {"worker_id": 7},
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }
    said = _command("chat", "--json", "--base-url", url, "one", "Hi", home=tmp_path)
    assert json.loads(said.stdout) == handler.answer


def test_chat_says_what_the_endpoint_refused(endpoint: tuple[str, type[FakeEndpoint]], tmp_path: Path) -> None:
    url, handler = endpoint
    handler.status, handler.answer = 429, {"error": {"message": "slow down", "type": "rate"}}
    refused = _command("chat", "--base-url", url, "one", "Hi", home=tmp_path)
    assert refused.returncode == 1
    assert "429" in refused.stderr
    assert "slow down" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert len(handler.asked) == 1, "a refusal was asked again"


def test_chat_reports_a_stream_that_was_cut(endpoint: tuple[str, type[FakeEndpoint]], tmp_path: Path) -> None:
    url, handler = endpoint
    handler.chunks = [_chunk(content="Hel")]
    cut = _command("chat", "--base-url", url, "one", "Hi", home=tmp_path)
    assert cut.returncode == 1
    assert "not whole" in cut.stderr


@pytest.mark.parametrize("words", [["Hi"], ["--json", "one", "Hi"]])
def test_chat_says_when_the_address_is_no_such_endpoint(
    endpoint: tuple[str, type[FakeEndpoint]], tmp_path: Path, words: list[str]
) -> None:
    url, handler = endpoint
    handler.page = b"<html>Welcome</html>"
    refused = _command("chat", "--base-url", url, *words, home=tmp_path)
    assert refused.returncode == 1
    assert url in refused.stderr
    assert "Traceback" not in refused.stderr


def test_chat_to_this_machine_goes_round_a_proxy(endpoint: tuple[str, type[FakeEndpoint]], tmp_path: Path) -> None:
    url, handler = endpoint
    handler.chunks = [_chunk(content="x", finish="stop")]
    proxy = "http://127.0.0.1:9"
    said = _command("chat", "--base-url", url, "one", "Hi", home=tmp_path, HTTP_PROXY=proxy, http_proxy=proxy)
    assert (said.returncode, said.stdout) == (0, "x\n")


def test_home_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for command in ("status", "up", "doctor"):
        refused = _command(command, home=tmp_path / "file")
        assert refused.returncode == 1
        assert str(tmp_path / "file") in refused.stderr
        assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["chat", "Hi"], "--base-url"),
        (["chat", "--base-url", "http://127.0.0.1:9/v1", "m", "Hi"], "127.0.0.1:9"),
        (["chat", "a", "b", "c"], "3 words"),
        (["chat", "--base-url", "http://127.0.0.1:9/v1", "--tools", "nowhere.json", "m", "Hi"], "nowhere.json"),
        (["up", "--port", "80"], "--port 80"),
        (["up", "--profile", "gpu"], "'gpu'"),
        (["up", "--profile", "mocker", "--prefill", "0"], "--prefill 0"),
        (["up", "--profile", "mocker", "--decode", "5000"], "--decode 5000"),
        (["up", "--profile", "mocker", "--router", "1"], "--router 1: this profile has no component called 'router'"),
        (["up", "--profile", "mocker", "--model", "nowhere"], "--model nowhere"),
        (["doctor", "--port", "70000"], "--port 70000"),
        (["install", "--profile", "nowhere.yaml"], "nowhere.yaml"),
        (["logs"], "serving-stack up"),
    ],
)
def test_bad_input_is_named_without_a_traceback(words: list[str], said: str, tmp_path: Path) -> None:
    refused = _command(*words, home=tmp_path)
    assert refused.returncode == 1
    assert said in refused.stderr
    assert "Traceback" not in refused.stderr


def test_wrong_usage_is_status_2_and_version_is_said(tmp_path: Path) -> None:
    assert _command("fly", home=tmp_path).returncode == 2
    assert _command("--version", home=tmp_path).stdout.strip() == f"serving-stack {__version__}"


def test_every_command_has_help() -> None:
    said = cli.parser().format_help()
    for name in cli.COMMANDS:
        assert name in said


def test_light_commands_import_no_engine(tmp_path: Path) -> None:
    code = (
        "import sys; from serving_stack.cli import parser; parser(); "
        "print([name for name in ('torch', 'vllm', 'dynamo', 'transformers', 'openai') if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_model_directory_must_hold_a_model(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"config\.json"):
        up._model(str(tmp_path))


def test_model_is_named_by_its_folder_however_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "glm" / "inner"
    folder.mkdir(parents=True)
    (tmp_path / "glm" / "config.json").write_text("{}")
    monkeypatch.chdir(folder)
    assert up._model("..").name == "glm"


def test_metric_sums_samples_of_exactly_that_name() -> None:
    text = '# HELP a x\na_total 9\na{w="1"} 2.5\na{w="2"} 1e1\nab 7\n'
    assert metric(text, "a") == 12.5
    assert metric(text, "nothing") == 0
