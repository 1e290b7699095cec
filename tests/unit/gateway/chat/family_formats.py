"""How the newer families' templates and models write tools, calls and results: their true markup, in words of our own.

Each template shows tools, renders the calls and results of a conversation, and opens an answer. `WRITE` has, for each
family, what the model writes for calls.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, str]  # a function's name, and its arguments as JSON

TOOLS = "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}"
GENERATE = "{% if add_generation_prompt %}"


def _loop(call: str, *, before: str = "", between: str = "", after: str = "", result: str = "{{ m.content }}") -> str:
    """A loop over messages, whose assistant turns have calls: `call` writes `f`, which is one call's function."""
    calls = (
        "{% for c in m.tool_calls %}{% set f = c.function %}"
        + call
        + ("{% if not loop.last %}" + between + "{% endif %}" if between else "")
        + "{% endfor %}"
    )
    return (
        "{% for m in messages %}{% if m.role == 'tool' %}"
        + result
        + "{% else %}<{{ m.role }}>{{ m.content or '' }}{% if m.tool_calls %}"
        + before
        + calls
        + after
        + "{% endif %}{% endif %}{% endfor %}"
    )


def _arguments(argument: str) -> str:
    return "{% for k, v in f.arguments.items() %}" + argument + "{% endfor %}"


TEXT = "{{ v if v is string else v | tojson }}"
OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
ESCAPED = "{{ '<escape>' + v + '<escape>' if v is string else v | tojson }}"
QUOTED = "{{ '<|\"|>' + v + '<|\"|>' if v is string else v | tojson }}"

TEMPLATES: dict[str, str] = {
    "glm": TOOLS
    + _loop(
        "\n<tool_call>{{ f.name }}\n"
        + _arguments("<arg_key>{{ k }}</arg_key>\n<arg_value>" + TEXT + "</arg_value>\n")
        + "</tool_call>",
        result="<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>",
    )
    + GENERATE
    + "<|assistant|>{% if enable_thinking is defined and not enable_thinking %}\n<think></think>{% endif %}{% endif %}",
    "kimi-k2": TOOLS
    + _loop(
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
        result="## Return of {{ m.tool_call_id }}\n{{ m.content }}",
    )
    + GENERATE
    + "<|im_assistant|>assistant<|im_middle|>{% endif %}",
    "minimax-m2": TOOLS
    + _loop(
        '<invoke name="{{ f.name }}">\n'
        + _arguments('<parameter name="{{ k }}">' + TEXT + "</parameter>\n")
        + "</invoke>\n",
        before="\n<minimax:tool_call>\n",
        after="</minimax:tool_call>",
        result="\n<response>{{ m.content }}</response>",
    )
    + "{# </think> #}"
    + GENERATE
    + "]~b]ai\n<think>\n{% endif %}",
    "deepseek-v3.2": "{% set dsml = '｜DSML｜' %}"
    + TOOLS
    + _loop(
        '<{{ dsml }}invoke name="{{ f.name }}">\n'
        + _arguments(
            "<{{ dsml }}parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
            + TEXT
            + "</{{ dsml }}parameter>\n"
        )
        + "</{{ dsml }}invoke>\n",
        before="\n\n<{{ dsml }}function_calls>\n",
        after="</{{ dsml }}function_calls>",
        result="\n<result>{{ m.content }}</result>",
    )
    + GENERATE
    + "<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{% endif %}",
    "granite": TOOLS
    + "{# <|start_of_role|> #}"
    + _loop(OBJECT, before="<|tool_call|>[", between=", ", after="]", result="<tool_response>{{ m.content }}")
    + GENERATE
    + "<assistant>{% endif %}",
    "hunyuan": TOOLS
    + _loop(
        "<tool_call>{{ f.name }}<tool_sep>\n"
        + _arguments("<arg_key>{{ k }}</arg_key>\n<arg_value>" + TEXT + "</arg_value>\n")
        + "</tool_call>\n",
        before="<tool_calls>\n",
        after="</tool_calls>",
        result="<tool_response>{{ m.content }}</tool_response>",
    )
    + GENERATE
    + "<assistant>{% endif %}",
    "hunyuan-a13b": TOOLS
    + "{# <answer> </answer> #}"
    + _loop(
        OBJECT,
        before="<tool_calls>[",
        between=", ",
        after="]</tool_calls>",
        result="<tool_response>{{ m.content }}</tool_response>",
    )
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n{% endif %}",
    "longcat": TOOLS
    + _loop(
        "<longcat_tool_call>\n" + OBJECT + "\n</longcat_tool_call>",
        between="\n",
        result="<longcat_tool_response>{{ m.content }}</longcat_tool_response>",
    )
    + GENERATE
    + "ASSISTANT:{% if enable_thinking %}<longcat_think>\n{% else %}{# </longcat_think> #}{% endif %}{% endif %}",
    "longcat-pairs": TOOLS
    + _loop(
        "<longcat_tool_call>{{ f.name }}\n"
        + _arguments(
            "<longcat_arg_key>{{ k }}</longcat_arg_key>\n<longcat_arg_value>" + TEXT + "</longcat_arg_value>\n"
        )
        + "</longcat_tool_call>",
        between="\n",
        result="<longcat_tool_response>{{ m.content }}</longcat_tool_response>",
    )
    + GENERATE
    + "ASSISTANT:{% endif %}",
    "ernie": TOOLS
    + "{# <response> </response> #}"
    + _loop(
        "\n<tool_call>\n" + OBJECT + "\n</tool_call>\n",
        result="<tool_output>\n{{ m.content }}\n</tool_output>",
    )
    + GENERATE
    + "<assistant>\n<think>\n{% endif %}{# </think> #}",
    "seed-oss": TOOLS
    + _loop(
        "\n<seed:tool_call>\n<function={{ f.name }}>\n"
        + _arguments("<parameter={{ k }}>" + TEXT + "</parameter>\n")
        + "</function>\n</seed:tool_call>",
        result="<tool>{{ m.content }}",
    )
    + "{# <seed:think></seed:think> #}"
    + GENERATE
    + "<seed:bos>assistant\n{% endif %}",
    "xlam": "{% if tools %}{{ tools | tojson }}"
    + '[{"name": "tool_call_name", "arguments": {}}]{% endif %}'
    + _loop(OBJECT, before="[", between=", ", after="]", result="<tool>{{ m.content }}")
    + GENERATE
    + "<assistant>{% endif %}",
    "phi-4": TOOLS
    + _loop(OBJECT, before="<|tool_call|>[", between=", ", after="]<|/tool_call|>", result="<tool>{{ m.content }}")
    + GENERATE
    + "<|assistant|>{% endif %}",
    "phi-4-functools": TOOLS
    + _loop(OBJECT, before="functools[", between=", ", after="]", result="<tool>{{ m.content }}")
    + GENERATE
    + "<|assistant|>{% endif %}",
    "functiongemma": TOOLS
    + _loop(
        "<start_function_call>call:{{ f.name }}{{ '{' }}"
        + _arguments("{{ k }}:" + ESCAPED + "{% if not loop.last %},{% endif %}")
        + "}<end_function_call>",
        result="<start_function_response>response:{{ m.content }}<end_function_response>",
    )
    + GENERATE
    + "<start_of_turn>model\n{% endif %}",
    "gemma-4": TOOLS
    + _loop(
        "<|tool_call>call:{{ f.name }}{{ '{' }}"
        + _arguments("{{ k }}:" + QUOTED + "{% if not loop.last %},{% endif %}")
        + "}<tool_call|>",
        result="<|tool_response>{{ m.content }}<tool_response|>",
    )
    + GENERATE
    + "<|turn>model\n{% endif %}{# <|channel>thought <channel|> #}",
    "tool-code": TOOLS
    + _loop(
        "{{ f.name }}(" + _arguments("{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}") + ")",
        before="```tool_code\n",
        between="\n",
        after="\n```",
        result="```tool_output\n{{ m.content }}\n```",
    )
    + GENERATE
    + "<start_of_turn>model\n{% endif %}",
}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _members(arguments: str) -> list[tuple[str, Any]]:
    return list(json.loads(arguments).items())


def _pairs(calls: Sequence[Call], prefix: str = "", separator: str = "") -> str:
    def call(name: str, arguments: str) -> str:
        pairs = "".join(
            f"<{prefix}arg_key>{key}</{prefix}arg_key>\n<{prefix}arg_value>{_text(value)}</{prefix}arg_value>\n"
            for key, value in _members(arguments)
        )
        return f"<{prefix}tool_call>{name}{separator}\n{pairs}</{prefix}tool_call>"

    return "\n".join(call(*each) for each in calls)


def _invokes(calls: Sequence[Call], tag: str = "", *, typed: bool = False) -> str:
    def call(name: str, arguments: str) -> str:
        elements = "".join(
            f'<{tag}parameter name="{key}"'
            + (f' string="{str(isinstance(value, str)).lower()}"' if typed else "")
            + f">{_text(value)}</{tag}parameter>\n"
            for key, value in _members(arguments)
        )
        return f'<{tag}invoke name="{name}">\n{elements}</{tag}invoke>\n'

    return "".join(call(*each) for each in calls)


def _seed(calls: Sequence[Call]) -> str:
    def call(name: str, arguments: str) -> str:
        elements = "".join(f"<parameter={key}>{_text(value)}</parameter>\n" for key, value in _members(arguments))
        return f"<seed:tool_call>\n<function={name}>\n{elements}</function>\n</seed:tool_call>"

    return "\n".join(call(*each) for each in calls)


def _kimi(calls: Sequence[Call]) -> str:
    body = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"


def _gemma(calls: Sequence[Call], begin: str, end: str, mark: str) -> str:
    def value(given: object) -> str:
        return f"{mark}{given}{mark}" if isinstance(given, str) else json.dumps(given, ensure_ascii=False)

    return "".join(
        f"{begin}call:{name}{{{','.join(f'{key}:{value(given)}' for key, given in _members(arguments))}}}{end}"
        for name, arguments in calls
    )


def _array(calls: Sequence[Call]) -> str:
    return "[" + ", ".join(f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls) + "]"


def _tagged(calls: Sequence[Call], tag: str) -> str:
    return "\n".join(f'<{tag}>\n{{"name": "{name}", "arguments": {arguments}}}\n</{tag}>' for name, arguments in calls)


def _python(calls: Sequence[Call]) -> str:
    lines = (
        f"{name}({', '.join(f'{key}={json.dumps(value, ensure_ascii=False)}' for key, value in _members(arguments))})"
        for name, arguments in calls
    )
    return "```tool_code\n" + "\n".join(lines) + "\n```"


WRITE: dict[str, Callable[[Sequence[Call]], str]] = {
    "glm": _pairs,
    "kimi-k2": _kimi,
    "minimax-m2": lambda calls: f"Hm.\n</think>\n\n<minimax:tool_call>\n{_invokes(calls)}</minimax:tool_call>",
    "deepseek-v3.2": lambda calls: (
        f"<｜DSML｜function_calls>\n{_invokes(calls, '｜DSML｜', typed=True)}</｜DSML｜function_calls>"
    ),
    "granite": lambda calls: f"<|tool_call|>{_array(calls)}",
    "hunyuan": lambda calls: f"<tool_calls>\n{_pairs(calls, separator='<tool_sep>')}\n</tool_calls>",
    "hunyuan-a13b": lambda calls: f"<tool_calls>{_array(calls)}</tool_calls>",
    "longcat": lambda calls: _tagged(calls, "longcat_tool_call"),
    "longcat-pairs": lambda calls: _pairs(calls, "longcat_"),
    "ernie": lambda calls: "Hm.\n</think>\n\n" + _tagged(calls, "tool_call"),
    "seed-oss": _seed,
    "xlam": _array,
    "phi-4": lambda calls: f"<|tool_call|>{_array(calls)}<|/tool_call|>",
    "phi-4-functools": lambda calls: f"functools{_array(calls)}",
    "functiongemma": lambda calls: _gemma(calls, "<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma-4": lambda calls: _gemma(calls, "<|tool_call>", "<tool_call|>", '<|"|>'),
    "tool-code": _python,
}
NAMES = {name: {"ernie": "hermes"}.get(name, name) for name in WRITE}  # of `ChatFamily`
# Families whose output begins in reasoning, which the prompt opens.
REASONING = frozenset({"minimax-m2", "ernie"})
# Families that write any text between marks, so it is a string whatever it looks like.
UNTYPED = frozenset(
    {"glm", "minimax-m2", "deepseek-v3.2", "hunyuan", "longcat-pairs", "seed-oss", "functiongemma", "gemma-4"}
)
SPECIAL = (
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_end|>", "<|tool_call|>", "<|/tool_call|>", "｜DSML｜", "<start_function_call>",
    "<end_function_call>", "<escape>", "<|tool_call>", "<tool_call|>", '<|"|>', "<seed:tool_call>",
    "</seed:tool_call>",
)  # fmt: skip
ADDED = (
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>",
    "<longcat_tool_call>", "</longcat_tool_call>",
)  # fmt: skip
