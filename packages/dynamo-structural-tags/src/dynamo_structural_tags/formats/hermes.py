# SPDX-License-Identifier: Apache-2.0
"""Hermes, of Qwen2.5 and Qwen3: one JSON object per call.

A call::

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}
    </tool_call>

A marker inside a JSON string means nothing. Source: the chat templates in `tokenizer_config.json` of
Qwen/Qwen2.5-7B-Instruct and Qwen/Qwen3-8B, the assistant branch.
"""

from .._format import Format

__all__ = ["FORMAT"]

FORMAT = Format(
    name="hermes",
    models=("Qwen2.5", "Qwen3", "Hermes 2 Pro", "Hermes 3"),
    style="json",
    trigger="<tool_call>",
    section_begin="",
    section_end="",
    call_begin='<tool_call>\n{"name": "',
    name_end='", "arguments": ',
    arg_begin="",
    arg_end="",
    call_end="}\n</tool_call>",
    call_separator="\n",
    content_separator="\n",
    reasoning_separator="\n\n",
    stray=("</tool_call>",),
)
