# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Coder and Qwen3.5: `<function=...>` and `<parameter=...>` tags, strings as they are.

A call::

    <tool_call>
    <function=write_file>
    <parameter=path>
    a.txt
    </parameter>
    <parameter=text>
    two lines,
    the second without an end
    </parameter>
    </function>
    </tool_call>

The line break after `<parameter=...>` and the one before `</parameter>` are layout; every other one is the value's own,
so that a text which ends with a line break is followed by an empty line. Values that are no strings are JSON; how a
text is told from JSON says `_reading.py`. The models' template writes true, false and null as Python does when it is
given these values, so a history must hand it their JSON text. Source: `chat_template.jinja` of
Qwen/Qwen3-Coder-480B-A35B-Instruct and of the Qwen3.5 models, the assistant branch.
"""

from .._format import Format

__all__ = ["FORMAT"]

FORMAT = Format(
    name="qwen3_coder",
    models=("Qwen3-Coder", "Qwen3-Coder-Next", "Qwen3.5"),
    style="raw",
    trigger="<tool_call>",
    section_begin="",
    section_end="",
    call_begin="<tool_call>\n<function=",
    name_end=">\n",
    arg_begin="<parameter={key}>\n",
    arg_end="\n</parameter>\n",
    call_end="</function>\n</tool_call>",
    value_end="\n</parameter>",
    key_end=">",
    call_separator="\n",
    content_separator="\n\n",
    reasoning_separator="\n\n",
    stray=("</tool_call>", "<function="),
)
