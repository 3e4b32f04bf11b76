# SPDX-License-Identifier: Apache-2.0
"""GLM-4.7 and GLM-5: `<arg_key>` and `<arg_value>` tags with nothing between them, strings as they are.

A call, and one without arguments right after it::

    <tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call><tool_call>now</tool_call>

Values that are no strings are JSON; how a text is told from JSON says
`_reading.py`. Source: `chat_template.jinja` of zai-org/GLM-4.7 and the GLM-5 models, the assistant branch.
"""

from .._format import Format

__all__ = ["FORMAT"]

FORMAT = Format(
    name="glm47",
    models=("GLM-4.7", "GLM-4.7-Flash", "GLM-5"),
    style="raw",
    trigger="<tool_call>",
    section_begin="",
    section_end="",
    call_begin="<tool_call>",
    name_end="",
    arg_begin="<arg_key>{key}</arg_key><arg_value>",
    arg_end="</arg_value>",
    call_end="</tool_call>",
    value_end="</arg_value>",
    key_end="</arg_key>",
    stray=("</tool_call>",),
)
