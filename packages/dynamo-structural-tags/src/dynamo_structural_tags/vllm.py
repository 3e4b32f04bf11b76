# SPDX-License-Identifier: Apache-2.0
"""The seat in plain vLLM: one tool parser per format, with the tag that constrains the answer.

    vllm serve MODEL --tool-parser-plugin dynamo_structural_tags.vllm \\
        --enable-auto-tool-choice --tool-call-parser structural_glm47 [--reasoning-parser glm45]

Importing this module registers `structural_NAME` for every format. Give the plugin by its module name, not by a file's
path: vLLM would load the file as a module named `vllm`.

The tag is that of Dynamo's seat: it goes to the engine as `structured_outputs.structural_tag`, for every tool choice.
vLLM holds it back until its reasoning parser has seen the reasoning end, so it covers no reasoning: a model that
reasons needs `--reasoning-parser`. It needs xgrammar, vLLM's default for structured outputs.

A refused request is HTTP 400 with the JSON path. A broken call becomes what `DYN_STRUCTURAL_TAGS_ON_CALL_ERROR` says:
`error` (default) ends the answer with `BrokenCallError`; `pass_through_flagged` gives the call's text back as content,
verbatim, under a line `[tool_call_error {...}]`. `retry_once` is refused: nothing can generate again from here. A call
is sent when it is complete and checked; `DYN_STRUCTURAL_TAGS_STREAM_ARGUMENTS=1` sends arguments as they are written.

vLLM's extension point is a class that sees text and nothing else, and its streams lose what such a class raises in two
of three APIs. Four functions of vLLM are replaced for that; each says why.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.chat_utils import make_tool_call_id
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import VLLMServerError, VLLMValidationError
from vllm.parser import ParserManager
from vllm.parser.abstract_parser import DelegatingParser
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import StructuredOutputsParams
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

from ._engine import Settings, flag, warm_up
from ._errors import RequestError, ToolCallError
from ._events import Arguments, CallBegin, CallEnd, Content, Event, Reasoning
from ._format import Format
from ._request import ToolPolicy, read_request
from .formats import FORMATS

__all__ = ["PREFIX", "BrokenCallError", "RefusedRequestError", "StructuralToolParser"]

#: What precedes a format's name in `--tool-call-parser`: vLLM's own parsers stay reachable beside ours.
PREFIX = "structural_"
#: Where a request keeps its policy once its constraint was replaced by the tag. No field: it is not serialised.
_KEPT = "_structural_tags_policy"


def _settings() -> Settings:
    """Read the settings; refuse what a tool parser cannot do."""
    settings = Settings.from_environment()
    if settings.on_call_error == "retry_once":
        told = "a tool parser of vLLM cannot generate again: error or pass_through_flagged"
        raise ValueError(f"DYN_STRUCTURAL_TAGS_ON_CALL_ERROR=retry_once: {told}")
    return settings


class RefusedRequestError(VLLMValidationError):  # type: ignore[misc]  # no vLLM where types are checked
    """A request that is refused before anything is generated: HTTP 400, `param` is the JSON path."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(str(error), parameter=error.path or None)

    def __str__(self) -> str:
        return str(self.args[0])


class BrokenCallError(ToolCallError, VLLMServerError):  # type: ignore[misc]
    """An answer with a broken call: HTTP 500, or the error of the stream.

    The message begins with the kind and ends with a JSON object that has `kind`, `tool`, `index` and `path`.
    """

    # Not vLLM's `GenerationError`: a stream of the Responses API fails over that one (vLLM 0.31).

    def __str__(self) -> str:
        return f"{super().__str__()} {json.dumps(flag(self.error), ensure_ascii=False)}"


# A request as `read_request` knows it


def _tools(request: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the function tools of a request of either API as a chat request holds them, each with its own JSON path."""
    for position, tool in enumerate(request.tools or ()):
        path = f"tools[{position}]"
        if isinstance(request, ChatCompletionRequest):
            yield f"{path}.function", tool.model_dump()
        elif tool.type == "function":
            yield path, _function(tool.model_dump())
        elif tool.type == "namespace":
            for place, inner in enumerate(tool.tools):
                if inner.type == "function":
                    # vLLM's name for it, in the prompt and on the way back.
                    entry = {**inner.model_dump(), "name": f"{tool.name}__{inner.name}"}
                    yield f"{path}.tools[{place}]", _function(entry)


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in keys if tool.get(key) is not None}}


def _content_schema(request: Any) -> Mapping[str, Any] | bool | None:
    """Return the schema of the content; refuse constraints that cannot stand beside tools."""
    wanted = request.extract_structured_outputs()
    if wanted is None:
        return None
    if wanted.json_object:
        return {"type": "object"}
    if wanted.json is not None:
        schema: Mapping[str, Any] | bool = json.loads(wanted.json) if isinstance(wanted.json, str) else wanted.json
        return schema
    kinds = ("regex", "choice", "grammar", "structural_tag")
    name = next((kind for kind in kinds if getattr(wanted, kind) is not None), "")
    raise RequestError(
        f"structured_outputs.{name}".rstrip("."), "cannot be combined with tools: json or json_object can"
    )


def _read(request: Any) -> ToolPolicy | None:
    """Return what an answer may hold; None where it is content only and not ours to constrain.

    Raises:
        RequestError: with the path in the caller's own body.
    """
    given = list(_tools(request))
    choice = request.tool_choice
    if choice == "none" and request.extract_structured_outputs() is not None:
        # The caller's own constraint decides what is written.
        return None
    body = {
        "tools": [entry for _, entry in given],
        "tool_choice": choice if choice is None or isinstance(choice, str) else choice.model_dump(exclude_none=True),
        "parallel_tool_calls": request.parallel_tool_calls,
    }
    try:
        policy = read_request(body)
        if policy is None:
            return None
        tools = tuple(dataclasses.replace(tool, path=_placed(tool.path, given)) for tool in policy.tools)
        return dataclasses.replace(policy, tools=tools, content_schema=_content_schema(request))
    except RequestError as error:
        raise RequestError(_placed(error.path, given), error.reason) from None


def _placed(path: str, given: Sequence[tuple[str, Any]]) -> str:
    """Return a path in the body that `read_request` saw as a path in the caller's."""
    found = re.match(r"tools\[(\d+)\](\.function)?", path)
    if found is None:
        return path
    own = given[int(found[1])][0]
    return (own if found[2] else own.removesuffix(".function")) + path[found.end() :]


def _policy(request: Any) -> ToolPolicy | None:
    kept: ToolPolicy | None = request.__dict__[_KEPT] if _KEPT in request.__dict__ else _read(request)
    return kept


def _used_ids(request: Any) -> Iterator[str]:
    """Yield the identifiers of the calls in the conversation."""
    if isinstance(request, ChatCompletionRequest):
        for message in request.messages:
            if isinstance(message, dict) and message.get("tool_calls"):
                # pydantic leaves an iterable that can be read once.
                message["tool_calls"] = calls = list(message["tool_calls"])
                yield from (str(call.get("id")) for call in calls if isinstance(call, Mapping))
    elif not isinstance(request.input, str):
        for item in request.input:
            identifier = item.get("call_id") if isinstance(item, Mapping) else getattr(item, "call_id", None)
            if identifier is not None:
                yield str(identifier)


# An answer as vLLM knows it


class _Answer:
    """One answer as it is read: text goes in, vLLM's deltas come out. A plain answer is read as one piece."""

    def __init__(self, form: Format, policy: ToolPolicy, used_ids: Collection[str], settings: Settings) -> None:
        self._parser = form.parser(policy, used_ids=used_ids)
        self._flagged = settings.on_call_error == "pass_through_flagged"
        self._piecewise = settings.stream_arguments
        self._must_call = policy.choice in ("required", "named")
        #: Number of a call in the answer -> its number among those that the caller sees.
        self._places: dict[int, int] = {}
        self.ended = False

    def feed(self, text: str) -> DeltaMessage | None:
        """Read more of the answer."""
        return self._delta(self._parser.feed(text))

    def finish(self, was_cut: Callable[[], bool]) -> DeltaMessage | None:
        """Read the answer's end. `was_cut` says whether the model would have gone on."""
        self.ended = True
        # Only here it matters, and to find out the model's generation config is read.
        cut = self._must_call and not self._places and was_cut()
        return self._delta(self._parser.finish(truncated=cut))

    def _delta(self, events: Iterable[Event]) -> DeltaMessage | None:
        content: list[str] = []
        calls: list[DeltaToolCall] = []
        pieces: list[list[str]] = []

        def begin(event: CallBegin | CallEnd) -> None:
            place = self._places[event.index] = len(self._places)
            identifier = event.call_id or make_tool_call_id()
            calls.append(DeltaToolCall(id=identifier, type="function", index=place))
            calls[-1].function = DeltaFunctionCall(name=event.name)
            pieces.append([])

        def arguments(index: int, text: str) -> None:
            place = self._places[index]
            if not calls or calls[-1].index != place:
                calls.append(DeltaToolCall(index=place, function=DeltaFunctionCall()))
                pieces.append([])
            pieces[-1].append(text)

        for event in events:
            if isinstance(event, (Content, Reasoning)):
                content.append(event.text)
            elif isinstance(event, CallBegin):
                if self._piecewise:
                    begin(event)
            elif isinstance(event, Arguments):
                if self._piecewise:
                    arguments(event.index, event.text)
            elif isinstance(event, CallEnd):
                if not self._piecewise:
                    begin(event)
                    arguments(event.index, event.arguments)
            elif self._flagged:
                content.append(f"[tool_call_error {json.dumps(flag(event.error), ensure_ascii=False)}]\n{event.raw}")
            else:
                raise BrokenCallError(event.error)
        for call, texts in zip(calls, pieces, strict=True):
            call.function.arguments = "".join(texts)
        if not content and not calls:
            return None
        delta = DeltaMessage(tool_calls=calls)
        if content:
            delta.content = "".join(content)
        return delta


class StructuralToolParser(ToolParser):  # type: ignore[misc]
    """A tool parser of vLLM for one format. vLLM makes one for each answer."""

    #: The format; a subclass for each is registered.
    form: ClassVar[Format]
    settings: ClassVar[Settings] = Settings()

    # vLLM's own reading of forced calls, a JSON array, is not ours.
    supports_required_and_named = False
    # Text comes once, piece by piece, and `finish_streaming` is called at the end.
    engine_based_streaming = True
    #: vLLM sets it where no reasoning parser is configured.
    skip_reasoning_parsing = False

    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        super().__init__(tokenizer, tools)
        self._answer: _Answer | None = None
        #: Set by `_Seat`: the request, and whether the answer was cut off.
        self.request: Any = None
        self.was_cut: Callable[[], bool] = bool

    def adjust_request(self, request: Any) -> Any:
        """Give the request its tag in the place of any other constraint.

        Raises:
            RefusedRequestError: the request cannot be served; vLLM answers 400.
        """
        try:
            policy = _read(request)
            if policy is not None:
                self._constrain(request, policy)
        except RequestError as error:
            raise RefusedRequestError(error) from None
        request.__dict__[_KEPT] = policy
        return request

    def _constrain(self, request: Any, policy: ToolPolicy) -> None:
        if not (self.skip_reasoning_parsing or request.include_reasoning) and isinstance(
            request, ChatCompletionRequest
        ):
            # vLLM then applies the tag from the first token, to the reasoning as well.
            raise RequestError("include_reasoning", "must be true beside tools: drop the answer's reasoning instead")
        tag = json.dumps(self.form.structural_tag(policy), ensure_ascii=False)
        request.structured_outputs = StructuredOutputsParams(structural_tag=tag)
        if isinstance(request, ChatCompletionRequest):
            request.response_format = None
        else:
            request.text = None
        # Markers are special tokens in some vocabularies. Others than the tag's own are never generated under it.
        request.skip_special_tokens = False
        if request.tool_choice is None:
            # Means auto, but vLLM leaves out the calls of a plain answer.
            request.tool_choice = "auto"

    def _begin(self, request: Any) -> _Answer | None:
        policy = _policy(request)
        return None if policy is None else _Answer(self.form, policy, frozenset(_used_ids(request)), self.settings)

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """Read a plain answer, in one piece by the same parser as a streamed one.

        Raises:
            BrokenCallError: under the policy `error`.
        """
        answer = self._begin(request)
        if answer is None:
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        content: list[str] = []
        calls: list[FunctionCall] = []
        for delta in (answer.feed(model_output), answer.finish(self.was_cut)):
            if delta is None:
                continue
            content.append(delta.content or "")
            for call in delta.tool_calls:
                if call.id is not None:
                    calls.append(FunctionCall(id=call.id, name=call.function.name, arguments=""))
                calls[call.index].arguments += call.function.arguments
        found = [ToolCall(id=call.id, function=call) for call in calls]
        return ExtractedToolCallInformation(
            tools_called=bool(found), tool_calls=found, content="".join(content) or None
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        """Read the next piece of a streamed answer: `delta_text`, and nothing that came before.

        Raises:
            BrokenCallError: under the policy `error`.
        """
        if self._answer is None:
            self._answer = self._begin(request)
        if self._answer is None:
            return DeltaMessage(content=delta_text) if delta_text else None
        return self._answer.feed(delta_text) if delta_text else None

    def finish_streaming(self) -> DeltaMessage | None:
        """Read a streamed answer's end.

        Raises:
            BrokenCallError: under the policy `error`.
        """
        if self._answer is None:
            # Everything was reasoning: a call that was required is still missing.
            self._answer = self._begin(self.request)
        if self._answer is None or self._answer.ended:
            return None
        return self._answer.finish(self.was_cut)


class _Seat:
    """What vLLM's parser of an answer does otherwise with ours inside: tools are never read past it.

    Precedes a `DelegatingParser` among the bases.
    """

    _tool_parser: StructuralToolParser

    def __init__(self, tokenizer: Any, tools: Any = None, *args: Any, model_config: Any = None, **kwargs: Any) -> None:
        super().__init__(tokenizer, tools, *args, model_config=model_config, **kwargs)  # type: ignore[call-arg]
        self._model_config = model_config
        self._last: int | None = None

    def _apply_structural_tag(self, request: Any) -> Any:
        """Leave it to `StructuralToolParser.adjust_request`."""
        return request

    def _extract_tool_calls(
        self, content: str | None, request: Any, enable_auto_tools: bool = False
    ) -> tuple[list[FunctionCall], str | None]:
        found = self.extract_tool_calls(content or "", request=request)  # type: ignore[attr-defined]
        return [call.function for call in found.tool_calls], found.content or None

    def _extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
        **_: Any,
    ) -> tuple[DeltaMessage | None, bool]:
        delta = self.extract_tool_calls_streaming(  # type: ignore[attr-defined]
            previous_text,
            current_text,
            delta_text,
            previous_token_ids,
            current_token_ids,
            delta_token_ids,
            request,
        )
        return delta, False

    def parse(
        self,
        model_output: str,
        request: Any,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
    ) -> Any:
        """Read a plain answer."""
        self._expect(request, model_output_token_ids)
        return super().parse(model_output, request, enable_auto_tools, model_output_token_ids)  # type: ignore[misc]

    def parse_with_prompt(
        self,
        model_output: str,
        request: Any,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
        prompt_token_ids: Sequence[int] | None = None,
    ) -> Any:
        """Read a plain answer, in vLLM after 0.31."""
        self._expect(request, model_output_token_ids)
        return super().parse_with_prompt(  # type: ignore[misc]
            model_output, request, enable_auto_tools, model_output_token_ids, prompt_token_ids
        )

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        """Read the next piece of a streamed answer."""
        self._expect(request, delta_token_ids)
        return super().parse_delta(  # type: ignore[misc]
            delta_text, delta_token_ids, request, prompt_token_ids, finished=finished
        )

    def _expect(self, request: Any, tokens: Sequence[int]) -> None:
        if tokens:
            self._last = tokens[-1]
        self._tool_parser.request = request
        self._tool_parser.was_cut = functools.partial(self._was_cut, request)

    def _was_cut(self, request: Any) -> bool:
        """Say whether the answer's last token is none that ends one: vLLM tells a parser no more about it."""
        if self._last is None:
            return False
        ends = {self.model_tokenizer.eos_token_id, *(getattr(request, "stop_token_ids", None) or ())}  # type: ignore[attr-defined]
        configured = self._model_config.try_get_generation_config() if self._model_config is not None else {}
        also = configured.get("eos_token_id")
        ends.update(also if isinstance(also, (list, tuple)) else [also])
        return self._last not in ends


def _ours(parser: Any) -> bool:
    return parser is not None and issubclass(parser.tool_parser_cls or object, StructuralToolParser)


# What vLLM has no extension point for


def _compose(original: Any) -> Any:
    """`ParserManager.get_parser`: a tool parser alone sees no forced call of `allowed_tools` and no answer's end."""

    @functools.wraps(original)
    def get_parser(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if not _ours(made) or issubclass(made, _Seat):
            return made
        if not issubclass(made, DelegatingParser):
            raise TypeError(f"{made.__name__} reads this model's tool calls itself; leave out --tool-call-parser")
        return type(made.__name__, (_Seat, made), {})

    return staticmethod(get_parser)


def _forbid(original: Any) -> Any:
    """`OnlineRenderer.preprocess_chat`: with no reasoning parser, `tool_choice: none` reaches no tool parser."""

    @functools.wraps(original)
    async def preprocess_chat(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        done = await original(self, request, *args, **kwargs)
        parser = self.parser
        if _ours(parser) and parser.reasoning_parser_cls is None and request.tool_choice == "none" and request.tools:
            tokenizer = self.renderer.get_tokenizer()
            parser(tokenizer, request.tools, model_config=self.model_config).adjust_request(request)
        return done

    return preprocess_chat


class _Failed(BaseModel):  # type: ignore[misc, unused-ignore]
    """The event that ends a stream of the Responses API with an error."""

    type: Literal["response.failed"] = "response.failed"
    sequence_number: int
    response: dict[str, Any]


def _report_responses(original: Any) -> Any:
    """`OpenAIServingResponses.responses_stream_generator`: an error breaks off the connection (vLLM 0.31)."""

    @functools.wraps(original)
    async def responses_stream_generator(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        count, response = 0, {}
        try:
            async for event in original(self, *args, **kwargs):
                if count == 0:
                    response = event.model_dump(mode="json", by_alias=True)["response"]
                count += 1
                yield event
        except BrokenCallError as error:
            told = {"code": "server_error", "message": str(error)}
            yield _Failed(sequence_number=count, response={**response, "status": "failed", "error": told})

    return responses_stream_generator


def _report_messages(original: Any) -> Any:
    """`AnthropicServingMessages.message_stream_converter`: an error is told as a validation error (vLLM 0.31)."""

    @functools.wraps(original)
    async def message_stream_converter(self: Any, generator: AsyncIterator[str]) -> AsyncIterator[str]:
        told: dict[str, Any] | None = None

        async def until_error() -> AsyncIterator[str]:
            nonlocal told
            async for item in generator:
                if item.startswith('data: {"error"'):
                    told = json.loads(item.removeprefix("data:"))["error"]
                    return
                yield item

        async for event in original(self, until_error()):
            yield event
        if told is not None:
            error = {"type": "error", "error": {"type": "api_error", "message": told["message"]}}
            yield f"event: error\ndata: {json.dumps(error)}\n\n"

    return message_stream_converter


def _override(owner: type, name: str, make: Callable[[Any], Any]) -> None:
    if not hasattr(owner, name):
        raise ImportError(f"{__name__} is not made for this vLLM: it has no {owner.__name__}.{name}")
    setattr(owner, name, make(getattr(owner, name)))


def _register() -> None:
    settings = _settings()
    warm_up(next(iter(FORMATS.values())))
    for form in FORMATS.values():
        names = {"form": form, "settings": settings, "__module__": __name__, "__doc__": f"The format {form.name}."}
        made = type(f"Structural_{form.name}", (StructuralToolParser,), names)
        ToolParserManager.register_module(PREFIX + form.name, force=True, module=made)
    _override(ParserManager, "get_parser", _compose)
    _override(OnlineRenderer, "preprocess_chat", _forbid)
    _override(OpenAIServingResponses, "responses_stream_generator", _report_responses)
    _override(AnthropicServingMessages, "message_stream_converter", _report_messages)


_register()
