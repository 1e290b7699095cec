"""A cluster that serves conversations over HTTP: the demo Llama with a template that has tools and reasoning."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.cluster import LLAMA, machines

# As Qwen's: calls are JSON in <tool_call>, reasoning is in <think>. The model knows none of it: grammars force calls,
# and reasoning that the prompt has begun never ends.
TEMPLATE = """
{%- if tools %}{{ tools | tojson }} Call them in <tool_call></tool_call>. {% endif -%}
{%- for message in messages %}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think> {% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %} <tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{{- '' if loop.last else ' ' }}
{%- endfor %}
{%- if add_generation_prompt %} <think>{{ '' if enable_thinking else '</think> ' }}{% endif %}
"""


@contextmanager
def chat_gateway(folder: Path) -> Iterator[str]:
    """The base URL of a gateway in front of one prefill and one decode node."""
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    with machines() as started:
        prefill, decode = started.nodes(("prefill", {"model": LLAMA}), ("decode", {"model": LLAMA}))
        gateway = started.gateway([prefill], [decode], model=LLAMA, http_listen="127.0.0.1:0", chat_template=template)
        assert gateway.http is not None
        yield gateway.http
