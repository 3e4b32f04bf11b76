# SPDX-License-Identifier: Apache-2.0
"""One chat model: a chat completion request in, a request of tokens to the router, chunks of an answer out.

No upstream is imported here. What is given by duck type: a tokenizer of the library `tokenizers`, and a routed engine
whose `generate(request, context=...)` returns responses with `is_error()`, `comments()` and `data()`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from ._errors import CallError, RequestError, StructuralTagsError, ToolCallError
from ._events import Arguments, CallBegin, CallEnd, CallFailed, Content, Event, Reasoning
from ._format import Format, Order, ReasoningMode
from ._history import ChatTemplate, Spellings, read_messages
from ._request import Tool, ToolPolicy, read_request
from .formats import FORMATS, get_format

__all__ = ["ChatEngine", "EngineError", "Model", "Settings", "choose_format"]

logger = logging.getLogger(__name__)

OnCallError = Literal["error", "retry_once", "pass_through_flagged"]

#: Dynamo's names of tool call parsers -> our format.
PARSERS: Mapping[str, str] = {
    **{name: name for name in FORMATS},
    "nemotron_nano": "qwen3_coder",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "kimi_k25": "kimi_k2",
    "deepseek-v4": "deepseek_v4",
    "deepseekv4": "deepseek_v4",
}

_SAMPLING = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
)
_GUIDED = ("json", "regex", "grammar", "choice")
_WORKERS = ("backend_instance_id", "decode_worker_id", "prefill_worker_id", "dp_rank", "prefill_dp_rank")


#: After so long without a word to the caller, one without content: Dynamo takes a silent answer for a dead one
#: (`DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS`) and ends it, and a call is said only when it is whole.
SILENCE_S = 1.0


class EngineError(StructuralTagsError):
    """The engine behind the router failed; the message is its own."""


@dataclass(frozen=True)
class Settings:
    """What the environment says."""

    #: False: Dynamo's own processing stays as it is. `DYN_STRUCTURAL_TAGS=0`
    enabled: bool = True
    #: A format's name, over what the worker's card says. `DYN_STRUCTURAL_TAGS_FORMAT`
    format: str | None = None
    #: What becomes of a broken call. `DYN_STRUCTURAL_TAGS_ON_CALL_ERROR`
    on_call_error: OnCallError = "error"
    #: True: arguments are sent piece by piece, before the call is complete. `DYN_STRUCTURAL_TAGS_STREAM_ARGUMENTS=1`
    stream_arguments: bool = False

    @classmethod
    def from_environment(cls) -> Settings:
        """Read `DYN_STRUCTURAL_TAGS*`.

        Raises:
            ValueError: a value is none of those there are; the message names the variable and the value.
        """

        def read(name: str, values: Sequence[str], default: str) -> str:
            value = os.environ.get(name) or default
            if value not in values:
                raise ValueError(f"{name} must be one of {', '.join(values)}, not {value!r}")
            return value

        name = os.environ.get("DYN_STRUCTURAL_TAGS_FORMAT") or None
        if name is not None:
            try:
                choose_format(None, name)
            except ValueError as error:
                raise ValueError(f"DYN_STRUCTURAL_TAGS_FORMAT: {error}") from error
        policies = ("error", "retry_once", "pass_through_flagged")
        settings = cls(
            enabled=read("DYN_STRUCTURAL_TAGS", ("1", "0"), "1") == "1",
            format=name,
            on_call_error=cast(OnCallError, read("DYN_STRUCTURAL_TAGS_ON_CALL_ERROR", policies, "error")),
            stream_arguments=read("DYN_STRUCTURAL_TAGS_STREAM_ARGUMENTS", ("0", "1"), "0") == "1",
        )
        if settings.stream_arguments and settings.on_call_error != "error":
            raise ValueError(
                "DYN_STRUCTURAL_TAGS_STREAM_ARGUMENTS=1 needs DYN_STRUCTURAL_TAGS_ON_CALL_ERROR=error, not "
                f"{settings.on_call_error!r}: what was sent cannot be taken back"
            )
        return settings


def choose_format(parser: str | None, override: str | None) -> Format:
    """Return the format of a model from its worker's tool call parser, or from a name that overrides it.

    Raises:
        ValueError: none of that name; the message names those there are.
    """
    name = override or parser
    if name is None or name not in PARSERS:
        what = f"no tool-call format for {name!r}" if name else "the worker names no tool call parser"
        raise ValueError(
            f"{what}; known: {', '.join(PARSERS)}. Start the worker with one of them (--dyn-tool-call-parser), or set "
            "DYN_STRUCTURAL_TAGS_FORMAT, or DYN_STRUCTURAL_TAGS=0 for Dynamo's own processing"
        )
    return get_format(PARSERS[name])


def warm_up(fmt: Format) -> None:
    """Import what the first call would import otherwise, while other answers wait."""
    # Not a plain schema: those are checked without what is to be imported.
    policy = ToolPolicy((Tool("f", {"type": "object", "minProperties": 0}),))
    fmt.structural_tag(policy)
    fmt.parser(policy).feed(fmt.render_calls([("f", "{}")]))


def _integers(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, int) and not isinstance(one, bool)]


class Model:
    """What is fixed for a model: its format, tokenizer, chat template and the worker's card."""

    def __init__(
        self,
        name: str,
        folder: Path,
        fmt: Format | None,
        card: Mapping[str, Any],
        tokenizer: Any,
        refusal: str = "no tool-call format is known for this model",
    ) -> None:
        """Read a model directory.

        Args:
            fmt: The model's format. None: it is served without tools, a request that has some is refused.
            refusal: What that request is told.

        Raises:
            ValueError: the directory has no chat template or a malformed file.
        """
        self.name = name
        #: Why a request with tools is refused; None where it is not.
        self.refusal = None if fmt else refusal
        self.template = ChatTemplate.of_model(folder, fmt)
        # It can write the calls of any history; an answer without tools is read the same in every format.
        self.format = fmt = fmt or get_format("hermes")
        # A file may have either for training; a prompt is never cut or filled up.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        #: Of the calls in recent answers.
        self.spellings = Spellings()
        self.ends = self._ends(folder)
        warm_up(fmt)
        markers = "".join(str(part) for part in vars(fmt).values())
        special = {token: str(one) for token, one in self._added(tokenizer).items()}
        #: Special tokens that are no marker of the format: they are not part of an answer's text without tools.
        self.hidden = frozenset(token for token, text in special.items() if text not in markers)
        data = card.get("runtime_data")
        data = data if isinstance(data, Mapping) else {}
        tag = card.get("structural_tag")
        self.thinks = bool(card.get("reasoning_parser"))
        self.tags = isinstance(tag, Mapping) or card.get("structural_tag_mode") == "on"
        tag = tag if isinstance(tag, Mapping) else {}
        self.strict = (tag.get("schema") or card.get("structural_tag_schema")) == "strict"
        self.order: Order = "any" if tag.get("tool_arguments_any_order") else "declared"
        boundary = tag.get("reasoning_boundary", "auto")
        #: The engine holds the grammar back until the reasoning has ended.
        self.waits = boundary == "backend" or data.get("tool_call_structural_tag_excludes_reasoning") is True
        self.hides_tools = card.get("exclude_tools_when_tool_choice_none", True) is not False
        thinking = data.get("default_thinking_mode")
        self.default_thinking = thinking if thinking in ("enabled", "disabled") else None
        length = card.get("context_length")
        self.context_length = length if isinstance(length, int) and length > 0 else None
        if not self.tags and not self.refusal:
            logger.warning(
                "%s: the worker's card has structural tags off: calls are checked, not enforced by a grammar", name
            )

    @staticmethod
    def _added(tokenizer: Any) -> dict[int, str]:
        added = tokenizer.get_added_tokens_decoder()
        return {token: one.content for token, one in added.items() if one.special}

    def _ends(self, folder: Path) -> frozenset[int]:
        """Return the tokens that end an answer, from all files that may name them."""
        found: list[int] = []
        for name in ("generation_config.json", "config.json"):
            if (folder / name).is_file():
                found += _integers(json.loads((folder / name).read_text("utf-8")).get("eos_token_id"))
        text = None
        if (folder / "tokenizer_config.json").is_file():
            text = json.loads((folder / "tokenizer_config.json").read_text("utf-8")).get("eos_token")
        text = text.get("content") if isinstance(text, Mapping) else text
        if isinstance(text, str):
            found += _integers(self.tokenizer.token_to_id(text))
        return frozenset(found)


class Detokenizer:
    """Tokens in, text out, in linear time; a character that is not complete yet is held back."""

    def __init__(self, tokenizer: Any, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._ids: list[int] = []  # those of the last step, and those that are held back
        self._read = 0  # of these, the text is out

    def _decode(self, count: int) -> str:
        return cast(str, self._tokenizer.decode(self._ids[:count], skip_special_tokens=False))

    def add(self, ids: Sequence[int], last: bool = False) -> str:
        """Return the text that becomes complete with some tokens; `last` gives out what is held back too."""
        self._ids += [token for token in ids if token not in self._hidden]
        end = len(self._ids)
        # Decoded with what precedes: a token's text may depend on it.
        text = self._decode(end)
        if text.endswith("\ufffd") and not last:
            # A character that is not complete has three tokens at most; what ends badly before them stays so.
            for end in range(len(self._ids) - 1, len(self._ids) - 4, -1):
                if end <= self._read:
                    return ""
                text = self._decode(end)
                if not text.endswith("\ufffd"):
                    break
        text = text[len(self._decode(self._read)) :]
        self._ids, self._read = self._ids[self._read :], end - self._read
        return text


class StopStrings:
    """Finds the first of some strings in a text that comes in pieces; what may begin one is held back."""

    def __init__(self, strings: Sequence[str], keep: bool) -> None:
        self._strings = [one for one in strings if one]
        self._keep = keep
        self._held = ""
        #: The string that was found.
        self.found: str | None = None

    def add(self, text: str, last: bool = False) -> str:
        """Return the text that is certain to precede any of the strings."""
        if not self._strings:
            return text
        text = self._held + text
        self._held = ""
        places = [(at, one) for one in self._strings if (at := text.find(one)) >= 0]
        if places:
            at, self.found = min(places)
            return text[: at + len(self.found)] if self._keep else text[:at]
        if last:
            return text
        most = max(len(one) for one in self._strings) - 1
        for at in range(max(0, len(text) - most), len(text)):
            if any(one.startswith(text[at:]) for one in self._strings):
                self._held = text[at:]
                return text[:at]
        return text


@dataclass(frozen=True)
class Prepared:
    """A request, read and ready for the router."""

    request: Mapping[str, Any]
    engine_request: dict[str, Any]
    policy: ToolPolicy | None
    mode: ReasoningMode
    used_ids: frozenset[str]
    stop: tuple[str, ...]
    ends: frozenset[int]

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has."""
        return len(self.engine_request["token_ids"])


def prepare(model: Model, request: Mapping[str, Any]) -> Prepared:
    """Read a chat completion request.

    Raises:
        RequestError: it is malformed, or asks for what is not served.
    """
    number = request.get("n")
    if number not in (None, 1):
        raise RequestError("n", f"must be 1, not {number!r}")
    if request.get("logit_bias"):
        raise RequestError("logit_bias", "is not served")
    if request.get("continue_final_message"):
        raise RequestError("continue_final_message", "is not served")
    policy = read_request(request)
    if policy is not None and model.refusal:
        raise RequestError("tools", model.refusal)
    if policy is not None and model.strict:
        policy = replace(policy, tools=tuple(replace(tool, strict=True) for tool in policy.tools))
    declared = read_request({"tools": request.get("tools")})
    named = {tool.name: tool for tool in declared.tools} if declared else {}
    history = read_messages(request.get("messages"), model.format, named, model.spellings)
    hidden = policy is None or (policy.choice == "none" and model.hides_tools)
    tools = None if hidden else request["tools"]
    prompt = model.template(tools is not None).render(
        history.messages,
        tools,
        **{
            "add_generation_prompt": request.get("add_generation_prompt") is not False,
            **_template_names(model, request),
        },
    )
    # The call for one text would hold Python's lock, and with it every other answer, until it is done.
    tokens = model.tokenizer.encode_batch_fast([prompt], add_special_tokens=False)[0].ids
    limit = model.context_length
    if limit is not None and len(tokens) >= limit:
        raise RequestError("messages", f"the prompt has {len(tokens)} tokens, the model's limit is {limit}")
    mode = reasoning_mode(model, prompt)
    stop, stop_ids = _stop(request)
    guided: dict[str, Any] | None = _guided(request, policy)
    if policy is not None:
        # Built even where it is not sent: it says what is wrong with a schema.
        tag = model.format.structural_tag(
            policy, reasoning="closed" if model.waits else mode, argument_order=model.order
        )
        guided = {"structural_tag": tag} if model.tags else None
    elif guided is not None and not model.waits:
        mode = "closed"  # the engine holds to the grammar from the first token: there is no reasoning
    nvext = request.get("nvext")
    nvext = nvext if isinstance(nvext, Mapping) else {}
    budget = request.get("thinking_token_budget")
    engine_request: dict[str, Any] = {
        "model": request.get("model") or model.name,
        "token_ids": tokens,
        "stop_conditions": {
            "max_tokens": _first(request, "max_completion_tokens", "max_tokens"),
            "stop": list(stop),
            "stop_token_ids": stop_ids,
            "min_tokens": request.get("min_tokens"),
            "ignore_eos": request.get("ignore_eos"),
            "max_thinking_tokens": budget if budget is not None else nvext.get("max_thinking_tokens"),
        },
        # What the request leaves open stays open: the worker knows the model's own defaults.
        "sampling_options": {
            "n": 1,
            **{name: request.get(name) for name in _SAMPLING},
            "guided_decoding": guided,
        },
        "output_options": {
            "logprobs": _logprobs(request),
            "prompt_logprobs": None,
            "skip_special_tokens": False,
            "return_tokens_as_token_ids": request.get("return_tokens_as_token_ids"),
        },
        "eos_token_ids": sorted(model.ends),
        "annotations": [one for one in nvext.get("annotations") or [] if isinstance(one, str)],
        "routing": _routing(request, nvext),
        "require_reasoning": model.waits and mode == "open" and guided is not None,
    }
    nvext_passed = {key: nvext[key] for key in ("metadata_upload", "extra_fields") if key in nvext}
    extra: dict[str, Any] = {"nvext": nvext_passed} if nvext_passed else {}
    if model.waits and guided is not None and mode != "auto":
        # The worker reads it here too; Dynamo's own field does not get through the router.
        extra["reasoning_ended"] = mode == "closed"
    if extra:
        engine_request["extra_args"] = extra
    ends = frozenset(stop_ids) if request.get("ignore_eos") else model.ends | frozenset(stop_ids)
    return Prepared(request, engine_request, policy, mode, history.call_ids, stop, ends)


def reasoning_mode(model: Model, prompt: str) -> ReasoningMode:
    """Say where a generation starts: inside reasoning, after it, or before it may begin."""
    begin, end = model.format.think
    bare = prompt.rstrip()
    if bare.endswith(begin):
        return "open"
    return "closed" if bare.endswith(end) or not model.thinks else "auto"


def _first(request: Mapping[str, Any], *names: str) -> Any:
    return next((request[name] for name in names if request.get(name) is not None), None)


def _template_names(model: Model, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the request gives to the template, with the deployment's default for thinking."""
    names: dict[str, Any] = {}
    for key in ("chat_template_args", "chat_template_kwargs"):
        given = request.get(key)
        if given is not None and not isinstance(given, Mapping):
            raise RequestError(key, f"must be an object, not {given!r}")
        names.update(given or {})
    if request.get("reasoning_effort") is not None:
        names["reasoning_effort"] = request["reasoning_effort"]
    if names.get("reasoning_effort") == "none":  # what /v1/responses can say; templates ask for the others
        names = {"thinking": False, "enable_thinking": False, **names}
    controls = ("thinking", "enable_thinking", "thinking_mode", "reasoning_effort")
    if model.default_thinking and not any(key in names for key in controls):
        enabled = model.default_thinking == "enabled"
        names.update(thinking=enabled, enable_thinking=enabled, thinking_mode=model.default_thinking)
    for key in ("messages", "tools"):
        names.pop(key, None)
    return names


def _stop(request: Mapping[str, Any]) -> tuple[tuple[str, ...], list[int]]:
    stop = request.get("stop")
    stop = [stop] if isinstance(stop, str) else stop or []
    return tuple(one for one in stop if isinstance(one, str)), [
        *_integers(request.get("stop_token_ids")),
        *_integers(stop),
    ]


def _logprobs(request: Mapping[str, Any]) -> int | None:
    """Return how many alternatives each token comes with: 0 for the token alone, None for no log-probabilities."""
    wanted, top = request.get("logprobs"), request.get("top_logprobs")
    if top is not None and (not isinstance(top, int) or isinstance(top, bool) or top < 0):
        raise RequestError("top_logprobs", f"must be an integer >= 0, not {top!r}")
    if top and wanted is not True:
        raise RequestError("top_logprobs", "needs logprobs: true")
    if wanted is True:
        return top or 0
    return wanted if isinstance(wanted, int) and not isinstance(wanted, bool) else None


def _guided(request: Mapping[str, Any], policy: ToolPolicy | None) -> dict[str, Any] | None:
    """Return the grammar that a request names itself, without tools: a response format or one of `guided_*`."""
    given = {name: request[f"guided_{name}"] for name in _GUIDED if request.get(f"guided_{name}") not in (None, [])}
    if policy is not None:
        if given:
            raise RequestError(f"guided_{next(iter(given))}", "cannot stand beside tools; response_format can")
        return None
    response_format = request.get("response_format")
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "json_object":
        given.setdefault("json", {"type": "object"})
    elif kind == "json_schema":
        inner = cast(Mapping[str, Any], response_format).get("json_schema")
        if not isinstance(inner, Mapping) or inner.get("schema") is None:
            raise RequestError("response_format.json_schema.schema", "is missing")
        given.setdefault("json", inner["schema"])
    elif kind == "structural_tag":
        given["structural_tag"] = response_format
    if len(given) > 1:
        raise RequestError(f"guided_{list(given)[1]}", f"cannot stand beside guided_{next(iter(given))}")
    if given and request.get("guided_whitespace_pattern") is not None:
        given["whitespace_pattern"] = request["guided_whitespace_pattern"]
    return given or None


def _routing(request: Mapping[str, Any], nvext: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what the router is told: the agent's hints, then workers by name, then the request's own `routing`."""
    routing: dict[str, Any] = {}
    hints = nvext.get("agent_hints")
    if isinstance(hints, Mapping):

        def integer(name: str, low: int, high: int) -> int | None:
            value = hints.get(name)
            return value if type(value) is int and low <= value <= high else None

        priority = integer("priority", -(2**31), 2**31 - 1)
        latency = hints.get("latency_sensitivity")
        if priority is not None:
            routing.update(priority=priority, priority_jump=float(max(priority, 0)))
        elif isinstance(latency, (int, float)) and not isinstance(latency, bool) and math.isfinite(latency):
            routing["priority_jump"] = float(latency)
        for ours, theirs in (("strict_priority", "strict_priority"), ("expected_output_tokens", "osl")):
            value = integer(theirs, 0, 2**32 - 1)
            if value is not None:
                routing[ours] = value
    routing.update({key: nvext[key] for key in _WORKERS if nvext.get(key) is not None})
    given = request.get("routing")
    if isinstance(given, Mapping):
        routing.update(given)
    return routing or None


class _Answer:
    """One generation: what the engine sends in, chunks of a chat completion out."""

    def __init__(self, model: Model, prepared: Prepared, settings: Settings, identifier: str, spent: int) -> None:
        self._model = model
        self._prepared = prepared
        self._settings = settings
        # Beside tools nothing is hidden: the grammar took such a token for its text, so it is part of the arguments.
        self._text = Detokenizer(model.tokenizer, model.hidden if prepared.policy is None else frozenset())
        keep = prepared.request.get("include_stop_str_in_output") is True
        self._stop = StopStrings(prepared.stop, keep)
        self._parser = model.format.parser(prepared.policy, reasoning=prepared.mode, used_ids=prepared.used_ids)
        self._head = {
            "id": identifier,
            "created": int(time.time()),
            "model": prepared.request.get("model") or model.name,
            "object": "chat.completion.chunk",
        }
        self._begun = False
        self._calls: dict[int, int] = {}  # of the parser's index, the answer's
        self._logprobs: list[dict[str, Any]] = []
        self._usage: dict[str, Any] = {}
        #: Tokens of earlier generations for the same request, and of this one.
        self._spent, self.tokens = spent, 0
        #: Of these, Dynamo's counters have not been told.
        self._untold = spent
        #: The faults so far, as the answer's flag lists them.
        self.flags: list[dict[str, Any]] = []
        #: The fault that ends the answer, under any policy but `pass_through_flagged`.
        self.error: CallError | None = None
        #: The answer is complete, or ended by its fault.
        self.done = False
        #: The engine does not know that it is: what it still writes is not wanted.
        self.cut = False

    def read(self, output: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Take one output of the engine; return the chunks that it gives.

        Raises:
            EngineError: the engine says that it failed.
        """
        self._usage.update(
            {
                key: value
                for key, value in (output.get("completion_usage") or {}).items()
                if key in ("prompt_tokens_details", "completion_tokens_details") and value is not None
            }
        )
        ids = list(output.get("token_ids") or [])
        reason = output.get("finish_reason")
        if isinstance(reason, Mapping):
            reason = next(iter(reason), None)
        # `cancelled`: the worker gave the request up, with no word to us. Not an answer's end.
        if isinstance(reason, str) and reason.startswith(("error", "cancelled", "abort")):
            raise EngineError(f"the engine ended with {reason}")
        self.tokens += len(ids)
        count = len(ids)
        finished = ended = reason is not None
        stopped = ended and reason != "length"
        # A stop token comes with the last output or the one before; text after it there is none.
        while ids and ids[-1] in self._prepared.ends:
            ids.pop()
        self._take_logprobs(ids, output)
        text = self._stop.add(self._text.add(ids, last=ended), last=ended)
        events = self._parser.feed(text)
        if self._stop.found is not None:
            ended, stopped = True, True
        if ended:
            events += self._parser.finish(truncated=not stopped)
        chunks: list[dict[str, Any]] = []
        for event in events:
            self._add(event, chunks)
            if self.error is not None:
                # A call that the token limit cut: the reason stands beside the error.
                ended, stopped = ended and not stopped, False
                break
        if ended:
            finish = "length" if not stopped else "tool_calls" if self._calls else "stop"
            chunks.append(self._chunk({}, finish))
        self.done = ended or self.error is not None
        self.cut = self.done and not finished
        return self._counted(chunks, count, ended)

    def _add(self, event: Event, chunks: list[dict[str, Any]]) -> None:
        if isinstance(event, (Content, Reasoning)):
            key = "content" if isinstance(event, Content) else "reasoning_content"
            last = chunks[-1]["choices"][0]["delta"] if chunks else {}
            if key in last and "nvext" not in chunks[-1]:
                last[key] += event.text
            elif event.text:
                chunks.append(self._chunk({key: event.text}))
        elif isinstance(event, CallBegin) and self._settings.stream_arguments:
            chunks.append(self._call(event, ""))
        elif isinstance(event, Arguments) and self._settings.stream_arguments:
            piece = {"index": self._calls[event.index], "function": {"arguments": event.text}}
            chunks.append(self._chunk({"tool_calls": [piece]}))
        elif isinstance(event, CallEnd):
            self._model.spellings.add(event.name, event.arguments)
            if not self._settings.stream_arguments:
                chunks.append(self._call(event, event.arguments))
        elif isinstance(event, CallFailed):
            self.flags.append(flag(event.error))
            if self._settings.on_call_error == "pass_through_flagged":
                chunks.append(self._chunk({"content": event.raw}))
            else:
                self.error = event.error

    def _call(self, event: CallBegin | CallEnd, arguments: str) -> dict[str, Any]:
        number = self._calls[event.index] = len(self._calls)
        call = {
            "index": number,
            "id": event.call_id or f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": event.name, "arguments": arguments},
        }
        return self._chunk({"tool_calls": [call]})

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        if not self._begun:
            delta = {"role": "assistant", **delta}
            self._begun = True
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish}
        if self._logprobs:
            choice["logprobs"] = {"content": self._logprobs}
            self._logprobs = []
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        nvext: dict[str, Any] = {}
        if self.flags and ("content" in delta or finish):
            nvext["tool_call_errors"] = list(self.flags)
        wanted = (self._prepared.request.get("nvext") or {}).get("extra_fields") or []
        if finish and self._stop.found is not None and "stop_reason" in wanted:
            nvext["stop_reason"] = self._stop.found
        if nvext:
            chunk["nvext"] = nvext
        return chunk

    def alive(self) -> dict[str, Any]:
        """Return a chunk that says nothing but that the answer goes on."""
        choice = {"index": 0, "delta": {}, "finish_reason": None}
        return {"_dynamo_annotated": True, "data": {**self._head, "choices": [choice]}}

    def _take_logprobs(self, ids: Sequence[int], output: Mapping[str, Any]) -> None:
        wanted = self._prepared.engine_request["output_options"]["logprobs"]
        values, tops = output.get("log_probs"), output.get("top_logprobs") or []
        if wanted is None or not values:
            return

        def entry(token: int, value: float) -> dict[str, Any]:
            text = self._model.tokenizer.decode([token], skip_special_tokens=False)
            return {"token": text, "logprob": value, "bytes": list(text.encode())}

        for number, (token, value) in enumerate(zip(ids, values, strict=False)):
            # The engine puts the token itself first, whatever its rank.
            others = sorted(tops[number] if number < len(tops) else [], key=lambda one: -one["logprob"])
            top = [entry(one["token_id"], one["logprob"]) for one in others[:wanted]]
            self._logprobs.append({**entry(token, value), "top_logprobs": top})

    def _counted(self, chunks: list[dict[str, Any]], count: int, ended: bool) -> list[dict[str, Any]]:
        """Add usage where the request asks for it, and Dynamo's own counters."""
        request = self._prepared.request
        # Our own count: a request that went on at another worker counts there what was generated before as well.
        prompt = self._prepared.prompt_tokens
        tokens = self._spent + self.tokens
        usage = {
            **self._usage,
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
        }
        options = request.get("stream_options") or {}
        if not request.get("stream"):
            if ended:
                chunks[-1]["usage"] = usage
        elif options.get("include_usage"):
            if options.get("continuous_usage_stats"):
                for chunk in chunks:
                    chunk["usage"] = usage
            if ended:
                chunks.append({**self._head, "choices": [], "usage": usage})
        metrics: dict[str, Any] = {
            "input_tokens": self._prepared.prompt_tokens,
            "output_tokens": tokens,
            "chunk_tokens": count + self._untold,
        }
        self._untold = 0
        cached = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if isinstance(cached, int):
            metrics["cached_tokens"] = cached
        if not chunks:
            return [{"_dynamo_annotated": True, "event": "llm_metrics", "comment": [json.dumps(metrics)]}]
        chunks[0]["llm_metrics"] = metrics
        return [{"_dynamo_annotated": True, "data": chunk} for chunk in chunks]


def flag(error: CallError) -> dict[str, Any]:
    """Return what a client gets to read of a fault, as a JSON object."""
    return {
        "type": "tool_call_error",
        "kind": error.kind,
        "tool": error.tool,
        "index": error.index,
        "path": error.path,
        "message": error.message,
    }


def gone(context: Any) -> bool:
    """Say whether the client of a request has left; Dynamo has ended its generation then."""
    return context is not None and bool(context.is_killed())


async def _audible(
    answer: _Answer, chunks: AsyncIterator[dict[str, Any]], held: list[dict[str, Any]] | None
) -> AsyncIterator[dict[str, Any]]:
    """Yield an answer's chunks, or put them into `held`; an empty one where the caller heard nothing for a while."""
    heard = time.monotonic()
    async for chunk in chunks:
        if held is None:
            yield chunk
        else:
            held.append(chunk)
        if held is None and "data" in chunk:
            heard = time.monotonic()
        elif time.monotonic() - heard >= SILENCE_S:
            yield answer.alive()
            heard = time.monotonic()


class ChatEngine:
    """A chat model behind a routed engine."""

    def __init__(self, model: Model, routed: Any, settings: Settings) -> None:
        self._model = model
        self._routed = routed
        self._settings = settings

    async def generate(self, request: Mapping[str, Any], context: Any = None) -> AsyncIterator[dict[str, Any]]:
        """Yield the answer to a chat completion request, in Dynamo's envelopes.

        Raises:
            RequestError: the request is refused; nothing was generated.
            ToolCallError: a call broke, and the policy is not `pass_through_flagged`. What preceded it was yielded.
            EngineError: the engine failed. An answer whose client has left ends without a word.
        """
        prepared = await asyncio.to_thread(prepare, self._model, request)
        identifier = f"chatcmpl-{uuid.uuid4().hex}"
        retry = self._settings.on_call_error == "retry_once" and prepared.policy is not None
        answer = _Answer(self._model, prepared, self._settings, identifier, 0)
        held: list[dict[str, Any]] | None = [] if retry else None
        async for chunk in _audible(answer, self._run(answer, prepared.engine_request, context), held):
            yield chunk
        if answer.error is not None and retry and not gone(context):
            logger.warning("%s: %s: generated once more", identifier, answer.error.message)
            held = None
            again = prepared.engine_request
            seed = again["sampling_options"]["seed"]
            if isinstance(seed, int):  # without one, no two generations are alike
                again = {**again, "sampling_options": {**again["sampling_options"], "seed": seed + 1}}
            answer = _Answer(self._model, prepared, self._settings, identifier, answer.tokens)
            async for chunk in _audible(answer, self._run(answer, again, context), None):
                yield chunk
        for chunk in held or ():
            yield chunk
        if answer.error is not None:
            raise ToolCallError(answer.error)

    async def _run(
        self, answer: _Answer, engine_request: Mapping[str, Any], context: Any
    ) -> AsyncIterator[dict[str, Any]]:
        stream = await self._routed.generate(dict(engine_request), context=context)
        async for response in stream:
            if response.is_error():
                raise EngineError("; ".join(response.comments() or []) or "the engine failed without a message")
            output = response.data()
            if output is None:
                continue  # an annotation
            if not isinstance(output, Mapping) or "token_ids" not in output:
                message = output.get("message") if isinstance(output, Mapping) else None
                raise EngineError(str(message or f"no tokens in the engine's output: {output!r}"))
            if answer.done:
                continue  # the engine's last words
            for chunk in answer.read(output):
                yield chunk
            if answer.cut:
                return  # the stream goes out of scope, which cancels what the engine still does
        if not (answer.done or gone(context)):
            raise EngineError("the engine's stream ended without a finish reason")
