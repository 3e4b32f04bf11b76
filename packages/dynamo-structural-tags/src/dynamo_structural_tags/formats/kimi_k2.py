# SPDX-License-Identifier: Apache-2.0
"""Kimi-K2 and K2.5: a section of calls, each with an identifier and a JSON object.

Two calls, the conversation's first (on one line)::

    <|tool_calls_section_begin|>
    <|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>
    <|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>
    <|tool_calls_section_end|>

The identifier is `functions.`, the tool's name and the number of the call in the conversation, which tool results name.
Source: `chat_template.jinja` and `docs/tool_call_guidance.md` of moonshotai/Kimi-K2-Instruct.
"""

from .._format import Format

__all__ = ["FORMAT"]

FORMAT = Format(
    name="kimi_k2",
    models=("Kimi-K2", "Kimi-K2-Thinking", "Kimi-K2.5"),
    style="json",
    trigger="<|tool_calls_section_begin|>",
    section_begin="<|tool_calls_section_begin|>",
    section_end="<|tool_calls_section_end|>",
    call_begin="<|tool_call_begin|>functions.",
    name_end=":{index}<|tool_call_argument_begin|>",
    arg_begin="",
    arg_end="",
    call_end="<|tool_call_end|>",
    stray=(
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
)
