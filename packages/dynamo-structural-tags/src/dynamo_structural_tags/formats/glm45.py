# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5 and GLM-4.6: the tags of GLM-4.7 with a line break after the name, each tag and before each call.

A call::

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Oslo</arg_value>
    </tool_call>

Line breaks inside a value are the value's own. The template writes a line break before the reasoning, before the
content and before every call, whether anything precedes it or not. Source: `chat_template.jinja` of zai-org/GLM-4.5,
the assistant branch.
"""

from .._format import Format

__all__ = ["FORMAT"]

FORMAT = Format(
    name="glm45",
    models=("GLM-4.5", "GLM-4.5-Air", "GLM-4.6"),
    style="raw",
    trigger="<tool_call>",
    section_begin="",
    section_end="",
    call_begin="<tool_call>",
    name_end="\n",
    arg_begin="<arg_key>{key}</arg_key>\n<arg_value>",
    arg_end="</arg_value>\n",
    call_end="</tool_call>",
    value_end="</arg_value>",
    key_end="</arg_key>",
    call_separator="\n",
    content_separator="\n",
    separator_always=True,
    think_lead="\n",
    reasoning_separator="\n",
    stray=("</tool_call>",),
)
