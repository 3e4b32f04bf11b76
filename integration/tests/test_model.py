# SPDX-License-Identifier: Apache-2.0
"""The tiny model's files: the same bytes every time, a tokenizer that loses nothing, a template that keeps prefixes."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2.sandbox
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from serving_stack import StackError, cli
from serving_stack.model import ADDED_TOKENS, CHAT_TEMPLATE, prompt_tokens, text_tokenizer, write_model

#: What `write_model` writes. tokenizers 0.20.3, 0.21.4, 0.22.2 and 0.23.3 train and write the same tokenizer; should a
#: later version differ, this table tells, and the start places in `model.py` have to be searched again.
DIGESTS = {
    "chat_template.jinja": "612e425d87b5af6f78fe3ada899860dc93271f7997978a0ff3f41dabcc0216f1",
    "config.json": "5f4410214e6596cbc27e262792c5bfd7b509857eaa7515a670066d72b790b934",
    "generation_config.json": "02a75b55ecec34b762b3c9af1c4f974d7fc620bf3cfd010340ddd236ea16e7e0",
    "model.safetensors": "ef48654eafce6d89376608d5475a3f247d4a6d4dfdb2ec21a646baff3cac3b56",
    "tokenizer.json": "a8e880c75b3e29d8836e057a1b485532acf85c5b1aa98bfa4cd9a9c5925a0342",
    "tokenizer_config.json": "1df014309de0daeb778e479f9f17699de2ba175985f951cfd70d6f3723f90fc4",
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read <b>one</b> file, größer & kleiner.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "a" / "b" / "glm-tiny")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def _digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.iterdir()
        if not path.name.startswith(".")
    }


def _tensors(model: Path) -> dict[str, Any]:
    data = (model / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__")
    found = {}
    for name, entry in header.items():
        first, last = (8 + size + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(data[first:last], "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(data[first:last], "<f4")
        found[name] = values.reshape(entry["shape"])
    assert last == len(data)
    return found


def test_files_are_the_committed_bytes(model: Path) -> None:
    assert _digests(model) == DIGESTS


def test_another_process_and_directory_write_the_same_bytes(model: Path, tmp_path: Path) -> None:
    """Another hash seed too: nothing may hang on the order of a set."""
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "serving_stack", "model", "other"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert _digests(tmp_path / "other") == _digests(model)
    assert str(tmp_path / "other") in done.stdout
    assert "model.safetensors" in done.stdout


def test_an_intact_model_is_left_alone_and_a_damaged_one_repaired(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "glm"
    write_model(directory)
    before = (directory / "model.safetensors").stat()
    write_model(directory)
    after = (directory / "model.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    with (directory / "model.safetensors").open("r+b") as stream:
        stream.seek(1_000_000)
        stream.write(b"\xff")
    (directory / "config.json").unlink()
    (directory / "stray").write_text("x")
    write_model(directory)
    assert _digests(directory) == _digests(model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["glm"], "temporary directories stayed behind"


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("ten years of work")
    with pytest.raises(StackError, match="not empty") as caught:
        write_model(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    assert cli.main(["model", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err
    with pytest.raises(StackError, match="not a directory"):
        write_model(tmp_path / "thesis.txt")
    with pytest.raises(StackError, match="cannot write"):
        write_model(tmp_path / "thesis.txt" / "below")


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StackError, match="No space left on device"):
        write_model(tmp_path / "glm")
    assert calls == 3
    assert list(tmp_path.iterdir()) == []


def test_shapes_are_those_of_the_configuration(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    tensors = _tensors(model)
    latent, rope, hidden = config["kv_lora_rank"], config["qk_rope_head_dim"], config["hidden_size"]
    assert (latent, rope) == (512, 64), "the size that every MLA kernel is built for"
    assert config["max_position_embeddings"] >= 8192
    kinds = {"dense": 0, "sparse": 0}
    for layer, kind in enumerate(config["mlp_layer_types"]):
        kinds[kind] += 1
        prefix = f"model.layers.{layer}"
        assert tensors[f"{prefix}.self_attn.kv_a_proj_with_mqa.weight"].shape == (latent + rope, hidden)
        assert (f"{prefix}.mlp.experts.7.up_proj.weight" in tensors) == (kind == "sparse")
        assert (f"{prefix}.mlp.gate_proj.weight" in tensors) == (kind == "dense")
    assert kinds["dense"] == config["first_k_dense_replace"] == 1
    assert kinds["sparse"] >= 3
    assert tensors["lm_head.weight"].shape == tensors["model.embed_tokens.weight"].shape == (2048, hidden)
    assert all(np.isfinite(values).all() for values in tensors.values())


def test_experts_are_chosen_by_what_no_layer_changes(model: Path) -> None:
    """Every router reads only dimensions that nothing writes to, and ranks the experts of each token without ties."""
    tensors = _tensors(model)
    embedding = tensors["model.embed_tokens.weight"]
    chosen: set[int] = set()
    for name, router in tensors.items():
        if not name.endswith("mlp.gate.weight"):
            continue
        read = np.flatnonzero(router.any(axis=0))
        for writer, values in tensors.items():
            if writer.endswith(("o_proj.weight", "down_proj.weight")):
                assert not values[read].any(), writer
        scores = np.sort(embedding @ router.T, axis=1)
        assert np.diff(scores, axis=1).min() >= 1.0
        chosen.update((embedding @ router.T).argmax(axis=1).tolist())
    assert chosen == set(range(8))


def test_only_text_and_the_end_can_win(model: Path, tokenizer: Tokenizer) -> None:
    """Rows of added tokens and of bytes that are no text by themselves are far below those of text."""
    head = _tensors(model)["lm_head.weight"]
    speakable = {token for token in range(2048) if head[token, :-1].any()}
    end = tokenizer.token_to_id("<|endoftext|>")
    assert end in speakable
    for token in speakable - {end}:
        text = tokenizer.decode([token], skip_special_tokens=False)
        assert text.replace("\n", " ").isprintable(), text
        assert text.isascii()
        assert token < 2048 - len(ADDED_TOKENS)
    assert len(speakable) > 1500
    silent = sorted(set(range(2048)) - speakable)
    assert head[silent, -1].max() < 1.9 * head[sorted(speakable), -1].min() < 0


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.text())
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_every_byte_is_in_the_alphabet(tokenizer: Tokenizer) -> None:
    """Characters whose UTF-8 forms together hold every byte that UTF-8 can hold; few of them are in the corpus."""
    text = "".join(map(chr, [*range(0x800), *range(0x800, 0xD800, 0x400), *range(0xE000, 0x110000, 0x1000)]))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert len(set(text.encode())) == 243, "UTF-8 uses 243 of the 256 bytes"


def test_added_tokens_are_single_and_only_roles_vanish(tokenizer: Tokenizer) -> None:
    first = 2048 - len(ADDED_TOKENS)
    for place, (text, special) in enumerate(ADDED_TOKENS):
        assert tokenizer.encode(f"a{text}b").ids[1:-1] == [first + place]
        assert tokenizer.decode([first + place], skip_special_tokens=True) == ("" if special else text)
    kept = "<think>x</think><tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call>"
    written = f"<|assistant|>{kept}<|observation|><|endoftext|>"
    assert tokenizer.decode(tokenizer.encode(written).ids, skip_special_tokens=True) == kept


def test_prompts_share_no_beginning() -> None:
    lengths = [1, 2, 31, 32, 33, 127, 128, 129, 200, 300, 1000, 6000, 20000]
    prompts = [prompt_tokens(length) for length in lengths]
    assert [len(prompt) for prompt in prompts] == lengths
    assert prompts == [prompt_tokens(length) for length in lengths]
    beginnings = {tuple(prompt[:16]) for prompt in prompts if len(prompt) >= 16}
    assert len(beginnings) == sum(length >= 16 for length in lengths)
    assert max(map(max, prompts)) < 2048 - len(ADDED_TOKENS)
    with pytest.raises(ValueError, match="at least one token"):
        prompt_tokens(0)


def _render(messages: list[dict[str, Any]], **variables: Any) -> str:
    """Render as transformers does."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(CHAT_TEMPLATE).render(messages=messages, **variables)


def test_template_of_a_plain_chat() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi\n"}]
    assert _render(messages) == "[gMASK]<sop><|system|>Be brief.<|user|> Hi\n"
    asked = _render(messages, add_generation_prompt=True)
    assert asked == "[gMASK]<sop><|system|>Be brief.<|user|> Hi\n<|assistant|><think>"
    assert _render(messages, add_generation_prompt=True, enable_thinking=True) == asked
    assert _render(messages, add_generation_prompt=True, enable_thinking=False) == asked + "</think>"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert _render(parts) == "[gMASK]<sop><|user|>a\nb"
    assert _render([{"role": "assistant", "content": None}]) == "[gMASK]<sop><|assistant|><think></think>"


def test_template_of_tool_calls() -> None:
    arguments = {"path": "a <b>.txt", "lines": [1, None], "note": "größer"}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Read."},
        {
            "role": "assistant",
            "reasoning": "I should.",
            "content": "Now.",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "read_file", "arguments": arguments}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
    ]
    text = _render(messages, tools=TOOLS, add_generation_prompt=True)
    system, rest = text.split("<|user|>")
    assert system.startswith("[gMASK]<sop><|system|>\n# Tools\n")
    listed = system.split("<tools>\n")[1].split("\n</tools>")[0]
    assert json.loads(listed) == TOOLS[0]
    assert "größer" in listed
    assert rest == (
        "Read.<|assistant|><think>I should.</think>Now."
        "<tool_call>read_file\n"
        "<arg_key>path</arg_key>\n<arg_value>a <b>.txt</arg_value>\n"
        "<arg_key>lines</arg_key>\n<arg_value>[1, null]</arg_value>\n"
        "<arg_key>note</arg_key>\n<arg_value>größer</arg_value>\n"
        "</tool_call>"
        "<|observation|><tool_response>one</tool_response><tool_response>two</tool_response><|assistant|><think>"
    )


_words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(_words, _words, _words, st.none() | _words), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_a_prompt_and_its_answer_begin_the_next_prompt(
    turns: list[tuple[str, str, str, str | None]], thinking: bool, tools: bool
) -> None:
    """Text and tokens alike, with the added tokens at the joint: this is what a prefix cache lives on."""
    tokenizer = text_tokenizer()
    variables: dict[str, Any] = {"enable_thinking": thinking, "add_generation_prompt": True}
    if tools:
        variables["tools"] = TOOLS
    messages: list[dict[str, Any]] = []
    before = ""
    for question, reasoning, answer, result in turns:
        messages.append({"role": "user", "content": question})
        prompt = _render(messages, **variables)
        assert prompt.startswith(before)
        message: dict[str, Any] = {"role": "assistant", "content": answer}
        generated = answer
        if thinking:
            message["reasoning_content"] = reasoning
            generated = f"{reasoning}</think>{answer}"
        if result is not None:
            message["tool_calls"] = [{"function": {"name": "f", "arguments": {"k": answer}}}]
            generated += f"<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>{answer}</arg_value>\n</tool_call>"
        messages.append(message)
        if result is not None:
            messages.append({"role": "tool", "content": result})
        before = prompt + generated
        following = _render([*messages, {"role": "user", "content": "next"}], **variables)
        assert following.startswith(before)
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        assert tokenizer.encode(following, add_special_tokens=False).ids[: len(prompt_ids)] == prompt_ids
