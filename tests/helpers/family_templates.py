"""Chat templates in the forms of several model families, as short as can be.

Each prints its tools as JSON and writes earlier calls as its family does; what a model of the
family would write is therefore what the template renders for an assistant's message.
"""

from __future__ import annotations

BEGIN, END = "[BEGIN assistant]", "[END]"

_CHAT = (
    "{%- macro value(v) -%}{%- if v is string -%}QUOTE{{ v }}QUOTE"
    "{%- elif v is mapping -%}{{ '{' }}{% for k, x in v.items() %}{{ k }}:{{ value(x) }}"
    "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
    "{%- elif v is sequence -%}[{% for x in v %}{{ value(x) }}{{ ',' if not loop.last }}"
    "{% endfor %}]{%- else -%}{{ v | tojson }}{%- endif -%}{%- endmacro -%}"
    "{%- if tools %}{{ tools | tojson }}{% endif -%}"
    "{%- for m in messages -%}[BEGIN {{ m.role }}]"
    "{%- if m.content %}{{ m.content }}{% endif -%}"
    "{%- if m.tool_calls -%}CALLS{%- endif -%}[END]{%- endfor -%}"
    "{%- if add_generation_prompt -%}[BEGIN assistant]{%- endif -%}"
)
_EACH = "{%- for c in m.tool_calls -%}{%- set f = c.function -%}ONE{%- endfor -%}"
_ARGUMENTS = (
    "{% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}"
    "{% endfor %}"
)
_GEMMA = (
    "call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments.items() %}{{ k }}:{{ value(v) }}"
    "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
)
_PARAMETERS = (
    "{{ '<tool_call>\\n<function=' ~ f.name ~ '>\\n' }}{% for k, v in f.arguments.items() %}"
    "{{ '<parameter=' ~ k ~ '>\\n' }}{{ v if v is string else v | tojson }}"
    "{{ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}"
)
_SEP = "<｜tool▁sep｜>"  # noqa: RUF001
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")  # noqa: RUF001
_DEEPSEEK_ONE = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")  # noqa: RUF001


def _chat(each: str, *, around: tuple[str, str] = ("", ""), quote: str = "") -> str:
    calls = around[0] + _EACH.replace("ONE", each) + around[1]
    return _CHAT.replace("CALLS", calls).replace("QUOTE", quote)


_LINE = "{{ '\\n' if not loop.last }}"
_COMMA = "{{ ', ' if not loop.last }}"
_LLAMA = '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
_JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_GLM = (
    "{{ '<tool_call>' ~ f.name }}BREAK{% for k, v in f.arguments.items() %}"
    "{{ '<arg_key>' ~ k }}</arg_key>BREAK<arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>BREAK{% endfor %}</tool_call>"
)
_BAR = "｜DSML｜"  # noqa: RUF001
_DSML = (
    f"{{{{ '<{_BAR}invoke name=\"' ~ f.name ~ '\">\\n' }}}}"
    "{% for k, v in f.arguments.items() %}"
    f"{{{{ '<{_BAR}parameter name=\"' ~ k ~ '\" string=\"' }}}}"
    "{{ 'true' if v is string else 'false' }}{{ '\">' }}{{ v if v is string else v | tojson }}"
    f"{{{{ '</{_BAR}parameter>\\n' }}}}{{% endfor %}}{{{{ '</{_BAR}invoke>\\n' }}}}"
)
_KIMI = (
    "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
    "{{ f.arguments | tojson }}<|tool_call_end|>"
)
_HARMONY = (
    "{{ '<|start|>assistant' if not loop.first }}<|channel|>commentary to=functions.{{ f.name }} "
    "<|constrain|>json<|message|>{{ f.arguments | tojson }}<|call|>"
)

TEMPLATES: dict[str, str] = {
    "hermes": _chat("<tool_call>\n" + _JSON + "\n</tool_call>" + _LINE),
    "qwen3_coder": _chat(_PARAMETERS + _LINE),
    "llama3_json": _chat(_LLAMA + "{{ '; ' if not loop.last }}") + "{# <|python_tag|> #}",
    "pythonic": _chat("{{ f.name }}(" + _ARGUMENTS + ")" + _COMMA, around=("[", "]"))
    + "{# [func_name1(params)] #}",
    "lfm2": _chat(
        "{{ f.name }}(" + _ARGUMENTS + ")" + _COMMA,
        around=("<|tool_call_start|>[", "]<|tool_call_end|>"),
    ),
    "mistral": _chat(_JSON + _COMMA, around=("[TOOL_CALLS][", "]")),
    "mistral, named": _chat("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    "deepseek_v31": _chat(
        f"{_DEEPSEEK_ONE[0]}{{{{ f.name }}}}{_SEP}{{{{ f.arguments | tojson }}}}{_DEEPSEEK_ONE[1]}",
        around=_DEEPSEEK,
    ),
    "deepseek_v3": _chat(
        f"{_DEEPSEEK_ONE[0]}function{_SEP}{{{{ f.name }}}}\n```json\n"
        f"{{{{ f.arguments | tojson }}}}\n```{_DEEPSEEK_ONE[1]}{_LINE}",
        around=_DEEPSEEK,
    ),
    "gemma4": _chat(f"<|tool_call>{_GEMMA}<tool_call|>", quote='<|"|>'),
    "functiongemma": _chat(f"<start_function_call>{_GEMMA}<end_function_call>", quote="<escape>"),
    "openai": _chat(_HARMONY),
    "kimi_k2": _chat(_KIMI, around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")),
    "glm45": _chat(_GLM.replace("BREAK", "{{ '\\n' }}") + _LINE),
    "glm47": _chat(_GLM.replace("BREAK", "")),
    "deepseek_v32": _chat(
        _DSML, around=(f"<{_BAR}function_calls>{{{{ '\\n' }}}}", f"</{_BAR}function_calls>")
    ),
    "granite": _chat(_JSON + _COMMA, around=("<|tool_call|>[", "]")) + "{# <|start_of_role|> #}",
    "phi4_mini_json": _chat(_JSON + _COMMA, around=("functools[", "]")),
    "nemotron_json": _chat(_JSON + _COMMA, around=("<TOOLCALL>[", "]</TOOLCALL>")),
    "xlam": _chat(_JSON + _COMMA, around=("[", "]")) + "{# xLAM: a single JSON array #}",
    "olmo3": _chat(
        "{{ f.name }}(" + _ARGUMENTS + ")" + _LINE,
        around=("<function_calls>", "</function_calls>"),
    ),
}
"""By the parser that must be chosen for it."""

OTHER_SPELLINGS: dict[str, str] = {
    "lfm2, as JSON": _chat(_JSON + _COMMA, around=("<|tool_call_start|>[", "]<|tool_call_end|>")),
}
"""What is read and not forced: forms that a family writes when it is asked to."""
