# SPDX-License-Identifier: Apache-2.0
"""Tool calls that cannot break their schema, read back byte for byte.

A *format* is how a family of models writes tool calls. From one description of each (:data:`FORMATS`) this package
derives the grammar that constrains the model, the incremental parser that reads its answer, and the renderer that
writes calls of earlier turns into the next prompt, so that the three cannot disagree::

    from dynamo_structural_tags import get_format, read_request

    glm = get_format("glm47")
    policy = read_request(body)              # RequestError: HTTP 400, with the JSON path of what is malformed
    tag = glm.structural_tag(policy)         # for the engine: vLLM's `structured_outputs.structural_tag`
    parser = glm.parser(policy)
    for text in answer:
        for event in parser.feed(text):      # Content, CallBegin, Arguments, CallEnd, CallFailed
            ...
    events = parser.finish(truncated=False)

:mod:`dynamo_structural_tags.dynamo` puts this behind Dynamo's own HTTP server, :mod:`dynamo_structural_tags.vllm` into
plain vLLM. Importing this package changes nothing and loads no upstream.
"""

from ._compat import SUPPORTED, UnsupportedUpstreamError, check
from ._errors import CallError, CallErrorKind, RequestError, StructuralTagsError, ToolCallError, UnrepresentableError
from ._events import Arguments, CallBegin, CallEnd, CallFailed, Content, Event, Reasoning
from ._format import Format
from ._parser import Parser, parse
from ._request import Choice, Tool, ToolPolicy, read_request
from .formats import FORMATS, get_format
from .version import __version__

__all__ = [
    "FORMATS",
    "SUPPORTED",
    "Arguments",
    "CallBegin",
    "CallEnd",
    "CallError",
    "CallErrorKind",
    "CallFailed",
    "Choice",
    "Content",
    "Event",
    "Format",
    "Parser",
    "Reasoning",
    "RequestError",
    "StructuralTagsError",
    "Tool",
    "ToolCallError",
    "ToolPolicy",
    "UnrepresentableError",
    "UnsupportedUpstreamError",
    "__version__",
    "check",
    "get_format",
    "parse",
    "read_request",
]
