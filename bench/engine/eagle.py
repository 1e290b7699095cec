"""Time per token of an engine that drafts with an EAGLE-3 head, on recorded outputs.

It is measured as an MTP layer is (`bench.engine.mtp`). On a GPU the shapes are those of Llama-3.1-8B and of its
published head, which drafts 32,000 of the model's tokens.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.engine.mtp import rows_of
from bench.engine.run import CONFIGS
from bench.table import Row

_DRAFTED = 32_000
_ON_CPU: dict[str, Any] = {
    "num_hidden_layers": 8,
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
# What the head has otherwise than the model.
_HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rope_parameters": None,
}


def run(progress: Callable[[str], None]) -> Iterator[Row]:
    """The rows of this benchmark."""
    config = json.loads((CONFIGS / "llama-3.1-8b" / "config.json").read_text())
    drafted = _DRAFTED
    if not torch.cuda.is_available():
        config, drafted = config | _ON_CPU, _ON_CPU["vocab_size"] // 4
    with TemporaryDirectory() as directory:
        model, head = Path(directory), Path(directory) / "head"
        head.mkdir()
        (model / "config.json").write_text(json.dumps(config))
        (head / "config.json").write_text(json.dumps(config | _HEAD | {"draft_vocab_size": drafted}))
        yield from rows_of(model, head, {}, progress)
