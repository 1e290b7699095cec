"""A checkpoint that reasons, calls one known tool, and answers with a known text once the tool's result is there.

Agents go on only if the model calls their tools, which no small model does reliably. This one is a real Llama whose
weights make each token depend on the one before it alone: the prompt ends in a token that begins the text.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Template

import torch
from safetensors.torch import save_file

from baton.settings.config import DEMO_MODELS

_DEMO = DEMO_MODELS / "llama"
_HIDDEN, _HEAD_DIM = 256, 32
_SHAPE = {
    "hidden_size": _HIDDEN,
    "intermediate_size": _HEAD_DIM,
    "head_dim": _HEAD_DIM,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "max_position_embeddings": 131_072,  # the agents' first prompts have 10,000 to 30,000 tokens
    "tie_word_embeddings": False,
}

# Calls are JSON in <tool_call> and reasoning is in <think>, as Qwen's.
_TEMPLATE = Template("""\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor -%}
{%- for message in messages -%}
{{ message.role }}:
{%- if message.reasoning_content %} <think>{{ message.reasoning_content }}</think>{% endif %} {{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}
{% endfor -%}
{%- if add_generation_prompt -%}
{%- set known = (tools or []) | map(attribute="function.name") | select("in", $tools) | list -%}
{%- set called = messages | selectattr("role", "equalto", "tool") | list -%}
<|begin {{ known[0] if known and not called else "answer" }}|>
{%- endif -%}
""")
_CLOSED = "\n</tool_call>"


@dataclass(frozen=True)
class Call:
    """What the model writes if the request has this tool."""

    tool: str
    arguments: dict[str, object]


def write_scripted_model(directory: Path, calls: list[Call], answer: str) -> Path:
    """Writes the checkpoint; returns its directory."""
    tokenizer = json.loads((_DEMO / "tokenizer.json").read_text())
    end = tokenizer["added_tokens"][0]
    following = _following(calls, answer, str(end["content"]), set(tokenizer["model"]["vocab"]))
    ids = {text: end["id"] + 1 + index for index, text in enumerate(following)}
    tokenizer["added_tokens"] += [
        {**end, "id": token, "content": text, "special": text.startswith("<|begin")} for text, token in ids.items()
    ]
    ids[end["content"]] = end["id"]
    config = {**json.loads((_DEMO / "config.json").read_text()), **_SHAPE, "vocab_size": max(ids.values()) + 1}
    files = {
        "tokenizer.json": json.dumps(tokenizer),
        "tokenizer_config.json": (_DEMO / "tokenizer_config.json").read_text(),
        "chat_template.jinja": _TEMPLATE.substitute(tools=json.dumps([call.tool for call in calls])),
        "config.json": json.dumps(config),
    }
    directory.mkdir(parents=True)
    for name, content in files.items():
        (directory / name).write_text(content)
    weights = _weights(config["vocab_size"], {ids[text]: ids[after] for text, after in following.items()}, end["id"])
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _following(calls: list[Call], answer: str, end: str, vocabulary: set[str]) -> dict[str, str]:
    """Which token follows which, as texts. None is in the vocabulary, which would give it an id of its own."""
    following = {_CLOSED: end}
    texts = {"answer": answer}
    for call in calls:
        body = json.dumps({"name": call.tool, "arguments": call.arguments})
        texts[call.tool] = f"<think>The tool {call.tool} does it.</think>\n<tool_call>\n{body}"
    for name, text in texts.items():
        last = f"<|begin {name}|>"
        for piece in _pieces(text, vocabulary | set(following)):
            following[last] = piece
            last = piece
        following[last] = end if name == "answer" else _CLOSED
    return following


def _pieces(text: str, used: set[str]) -> Iterator[str]:
    """The text cut into unused tokens of five characters or more."""
    while text:
        size = 5
        while (text[:size] in used and size < len(text)) or len(text) - size in range(1, 5):
            size += 1
        assert text[:size] not in used, f"{text!r} ends as another text of the script does: change one of the two"
        used.add(text[:size])
        yield text[:size]
        text = text[size:]


def _weights(vocabulary: int, following: dict[int, int], end: int) -> dict[str, torch.Tensor]:
    """Attention and MLP add nothing, so the logits follow from the last token's embedding alone.

    Each token of the script has a column of its own. All others share the last column, after which the output ends.
    """
    assert len(following) < _HIDDEN
    embeddings, head = torch.zeros(vocabulary, _HIDDEN), torch.zeros(vocabulary, _HIDDEN)
    embeddings[:, -1] = 1
    head[end, -1] = 10
    for column, (token, after) in enumerate(following.items()):
        embeddings[token, -1] = 0
        embeddings[token, column] = 1
        head[after, column] = 10
    layer = "model.layers.0."
    weights = {
        "model.embed_tokens.weight": embeddings,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(_HIDDEN),
        f"{layer}input_layernorm.weight": torch.ones(_HIDDEN),
        f"{layer}post_attention_layernorm.weight": torch.ones(_HIDDEN),
        **{f"{layer}self_attn.{name}_proj.weight": torch.zeros(_HEAD_DIM, _HIDDEN) for name in "qkv"},
        **{f"{layer}mlp.{name}_proj.weight": torch.zeros(_HEAD_DIM, _HIDDEN) for name in ("gate", "up")},
        **{f"{layer}{name}_proj.weight": torch.zeros(_HIDDEN, _HEAD_DIM) for name in ("self_attn.o", "mlp.down")},
    }
    return {name: weight.bfloat16() for name, weight in weights.items()}
