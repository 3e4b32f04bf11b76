# SPDX-License-Identifier: Apache-2.0
"""The seat in Dynamo: `python -m dynamo.frontend --chat-engine-factory dynamo_structural_tags.dynamo:wrap`.

The flag is our patch's (`dynamo/chat-engine-factory`). Dynamo keeps HTTP, discovery, routing and migration; a chat
request becomes tokens here, and tokens an answer, for `/v1/chat/completions`, `/v1/responses` and `/v1/messages` alike.

Settings, all from the environment of the frontend:

==========================================  ====================================================================
`DYN_STRUCTURAL_TAGS`                       `0` leaves Dynamo's own processing in place
`DYN_STRUCTURAL_TAGS_FORMAT`                a format's name, over the worker's `--dyn-tool-call-parser`
`DYN_STRUCTURAL_TAGS_ON_CALL_ERROR`         `error` (default), `retry_once` or `pass_through_flagged`
`DYN_STRUCTURAL_TAGS_STREAM_ARGUMENTS`      `1` sends arguments before their call is complete and checked
==========================================  ====================================================================

What a caller sees of a fault: of all that Dynamo's HTTP layer is given by a chat engine, only the text of an invalid
argument reaches the client, on all three endpoints. So both kinds of fault are status 400, in a stream an error event
(the stream's status is 200 by then). The message of a refused request begins with its JSON path; that of a broken call
with its kind (`undeclared_tool: ...`), and ends with a JSON object that has `kind`, `tool`, `index` and `path`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from ._compat import check
from ._engine import ChatEngine, EngineError, Model, Settings, choose_format, flag, gone
from ._errors import RequestError, ToolCallError

__all__ = ["wrap"]

logger = logging.getLogger(__name__)

#: `factory(instance_id, model_card, routed_engine)`, as Dynamo calls it when it discovers a model.
ChatEngineFactory = Callable[[Any, Any, Any], Awaitable[Any]]


def wrap(factory: ChatEngineFactory | None = None) -> ChatEngineFactory | None:
    """Return the chat engine factory that serves every model with this package's grammars, checks and parsers.

    `factory` is the one that `--dyn-chat-processor` chose: it has to be None, Dynamo's own processor. A Python
    processor cannot be kept around: its engine (`PythonAsyncEngine`) can be called from Rust only, and its tool parser
    has swallowed a broken call before anything outside it could look.

    Raises:
        ValueError: a setting has a value it cannot have, or `factory` is not None.
        UnsupportedUpstreamError: the installed Dynamo is outside the supported range.
    """
    settings = Settings.from_environment()
    if not settings.enabled:
        return factory
    check()
    if factory is not None:
        raise ValueError(
            f"{__name__}:wrap takes the place of the chat processor, and {getattr(factory, '__module__', factory)} "
            "cannot run inside it: leave --dyn-chat-processor at 'dynamo', or set DYN_STRUCTURAL_TAGS=0"
        )

    async def chat_engine_factory(instance_id: Any, card: Any, routed: Any) -> Any:
        from dynamo.llm import PythonAsyncEngine

        model = await asyncio.to_thread(_model, card, settings)
        if model.refusal:
            told = "%s: requests with tools are refused, and reasoning is what stands between <think> and </think>: %s"
            logger.warning(told, model.name, model.refusal)
        else:
            logger.info("%s: tool calls in the format %s", model.name, model.format.name)
        return PythonAsyncEngine(_Answers(ChatEngine(model, routed, settings)).generate, asyncio.get_running_loop())

    return chat_engine_factory


def _model(card: Any, settings: Settings) -> Model:
    """Read what a model card points to. A model whose format is not known is served without tools.

    Raises:
        ValueError: the model's directory lacks a file. Dynamo logs it, lists the model as absent and tries again.
    """
    from tokenizers import Tokenizer

    config = card.runtime_config()
    config = config if isinstance(config, dict) else {}
    fmt, refusal = None, ""
    try:
        fmt = choose_format(config.get("tool_call_parser"), settings.format)
    except ValueError as error:
        refusal = str(error)
    folder = Path(card.local_dir())
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"{folder}: no tokenizer.json, and no other kind of tokenizer file is read: put one beside it, or set "
            "DYN_STRUCTURAL_TAGS=0 for Dynamo's own processing"
        )
    return Model(card.name(), folder, fmt, config, Tokenizer.from_file(str(folder / "tokenizer.json")), refusal)


class _Answers:
    """A chat engine whose errors are Dynamo's."""

    def __init__(self, engine: ChatEngine) -> None:
        self._engine = engine

    async def generate(self, request: dict[str, Any], context: Any = None) -> AsyncIterator[dict[str, Any]]:
        from dynamo.frontend.utils import backend_invalid_argument_to_http_error
        from dynamo.llm.exceptions import DynamoException, InvalidArgument, Unknown

        try:
            async for chunk in self._engine.generate(request, context):
                yield chunk
        except RequestError as error:
            raise InvalidArgument(str(error)) from None
        except ToolCallError as error:
            raise InvalidArgument(f"{error} {json.dumps(flag(error.error))}") from None
        except DynamoException:
            raise
        except Exception as error:
            if gone(context):
                return
            refused = backend_invalid_argument_to_http_error(error)
            if refused is not None:  # the worker's own refusal, such as of a sampling parameter
                raise (InvalidArgument(refused.message) if refused.code == 400 else refused) from error
            logger.exception("a chat request failed")
            if isinstance(error, EngineError):
                yield {"_dynamo_annotated": True, "event": "error", "comment": [str(error)]}
                return
            raise Unknown(f"{type(error).__name__}: {error}") from error
