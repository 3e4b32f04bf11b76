# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4: the DSML of V3.2 in a section that is named `tool_calls`.

Source: vLLM's `vllm/tokenizers/deepseek_v4_encoding.py`, after the encoding of deepseek-ai/DeepSeek-V4.
"""

from dataclasses import replace

from .._format import Format
from .deepseek_v3_2 import FORMAT as _V3_2

__all__ = ["FORMAT"]

FORMAT: Format = replace(
    _V3_2,
    name="deepseek_v4",
    models=("DeepSeek-V4",),
    trigger="<｜DSML｜tool_calls>",
    section_begin="<｜DSML｜tool_calls>\n",
    section_end="\n</｜DSML｜tool_calls>",
    stray=("<｜DSML｜function_calls>", "<｜DSML｜invoke", "<｜DSML｜parameter", "</｜DSML｜"),
)
