# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V3.2: DSML, with the type of a value in its tag.

A call, after two line breaks that precede it in any case::

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

`string="true"`: the text is the string. `string="false"`: it is JSON. A call without arguments has an empty line in
their place. The bars are U+FF5C. Source: `encoding/encoding_dsv32.py` of deepseek-ai/DeepSeek-V3.2, which vLLM has as
`vllm/tokenizers/deepseek_v32_encoding.py`.
"""

from .._format import Format

__all__ = ["FORMAT"]

FORMAT = Format(
    name="deepseek_v3_2",
    models=("DeepSeek-V3.2",),
    style="dsml",
    trigger="<｜DSML｜function_calls>",
    section_begin="<｜DSML｜function_calls>\n",
    section_end="\n</｜DSML｜function_calls>",
    call_begin='<｜DSML｜invoke name="',
    name_end='">\n',
    arg_begin='<｜DSML｜parameter name="{key}" string="{string}">',
    arg_end="</｜DSML｜parameter>",
    call_end="\n</｜DSML｜invoke>",
    value_end="</｜DSML｜parameter>",
    key_end='"',
    arg_separator="\n",
    call_separator="\n",
    content_separator="\n\n",
    separator_always=True,
    stray=("<｜DSML｜tool_calls>", "<｜DSML｜invoke", "<｜DSML｜parameter", "</｜DSML｜"),
)
