# SPDX-License-Identifier: Apache-2.0
"""Tool calls that cannot break their schema, parsed byte for byte, undeclared tools reported, a public conformance
suite.

Status: planned. Nothing is registered yet: importing this package changes nothing, and it has no entry point.

It will:

- hold one module per format (GLM, Qwen, Hermes, Kimi, DeepSeek) with grammar, incremental parser and renderer, bound
  by laws that are tested as properties;
- enforce schemas in generation where xgrammar can, check the rest afterwards, and list which is which;
- return undeclared, invalid and truncated calls as a typed error: never a silent stop, never a repaired call;
- plug into Dynamo's frontend and into plain vLLM, or work alone as a small library;
- ship `tool-conformance`, a suite over final API responses that runs against any OpenAI-compatible endpoint.

Until then the package offers its version, the upstream versions it is written for (`SUPPORTED`), and `check()`, which
refuses an installed upstream outside them.
"""

from ._compat import SUPPORTED, UnsupportedUpstreamError, check
from .version import __version__

__all__ = ["SUPPORTED", "UnsupportedUpstreamError", "__version__", "check"]
