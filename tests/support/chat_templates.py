# SPDX-License-Identifier: Apache-2.0
"""A chat template per tool-call format, in the layout that the format's models ship; short, and in our own words.

They differ from each other as the models' own do: in what they ask of an argument (`is string`, `is mapping`), by which
filter they write it, and in where the line breaks stand.
"""

from __future__ import annotations

__all__ = ["CHATML", "GLM", "KIMI", "TEMPLATES"]

#: GLM: `{gap}` stands between a key and its value, `{line}` after a name and a value, `{before}` before a call.
GLM = """\
[gMASK]<sop>
{%- if tools %}<|system|>
You may call:
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}{% endif -%}
{% for m in messages -%}
{%- if m.role in ('system', 'developer') -%}<|system|>{{ m.content }}
{%- elif m.role == 'user' -%}<|user|>{{ m.content }}
{%- elif m.role == 'assistant' -%}<|assistant|><think>{{ m.reasoning_content or '' }}</think>{{ m.content }}
{%- for call in m.tool_calls or [] -%}
{{ before }}<tool_call>{{ call.function.name }}{{ line }}
{%- set _args = call.function.arguments -%}
{%- for k, v in _args.items() -%}
<arg_key>{{ k }}</arg_key>{{ line }}<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}
{%- if true %}</arg_value>{{ line }}{% endif -%}
{%- endfor %}</tool_call>
{%- endfor -%}
{%- elif m.role == 'tool' -%}<|observation|><tool_response>{{ m.content }}</tool_response>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|><think>{% if enable_thinking is defined and not enable_thinking %}</think>
{%- endif %}{% endif -%}
"""

#: Qwen: `{{ calls }}` is where the calls of a message are written.
CHATML = """\
{%- if tools %}<|im_start|>system
You may call:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}
{%- if m.reasoning_content %}{{ '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n\\n' }}{% endif -%}
{{ m.content }}
{%- for call in m.tool_calls or [] -%}
CALLS
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- else -%}
{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

_HERMES = r"""
{{ '' if loop.first and not m.content else '\n' }}
{{- '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ (call.function.arguments | tojson) ~ '}' }}
{{- '\n</tool_call>' }}
"""

_QWEN = r"""
{{ ('\n\n' if m.content else '') if loop.first else '\n' }}
{{- '<tool_call>\n<function=' ~ call.function.name ~ '>\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' ~ name ~ '>\n' }}
{%- set text = value | tojson | safe
    if value is mapping or (value is sequence and value is not string) else value | string %}
{{- text ~ '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}
"""

KIMI = """\
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}<|im_assistant|>assistant<|im_middle|>{{ m.content }}
{%- if m.tool_calls -%}
<|tool_calls_section_begin|>
{%- for call in m.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{%- if call.function.arguments is string %}{{ call.function.arguments }}
{%- else %}{{ call.function.arguments | tojson }}{% endif -%}
<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endif -%}
<|im_end|>
{%- elif m.role == 'tool' -%}<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}
{{ m.content }}<|im_end|>
{%- else -%}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif -%}
"""

#: Format -> a template in the style of its models; None where they ship none.
TEMPLATES: dict[str, str | None] = {
    "glm47": "{%- set line = '' -%}{%- set before = '' -%}" + GLM,
    "glm45": "{%- set line = '\\n' -%}{%- set before = '\\n' -%}" + GLM,
    "qwen3_coder": CHATML.replace("CALLS", _QWEN.strip()),
    "hermes": CHATML.replace("CALLS", _HERMES.strip()),
    "kimi_k2": KIMI,
    "deepseek_v3_2": None,
    "deepseek_v4": None,
}
