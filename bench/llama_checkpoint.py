"""Random checkpoints of Llama shapes, in several files as publishers store them."""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_CONFIG = Path(__file__).resolve().parent / "engine" / "configs" / "llama-3.1-8b" / "config.json"
# Where Llama-3.2-1B differs.
_OF_1B = {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64, "tie_word_embeddings": True}
_8B_BYTES_MIN = 8 << 30
_NUMBER_BYTES = 2
_BLOCK_BYTES = 64 << 20
_SEED = 0


@dataclass(frozen=True)
class Written:
    """A checkpoint on disk."""

    name: str
    files: tuple[Path, ...]
    num_bytes: int


def llama_of(num_bytes: int) -> tuple[str, dict[str, Any]]:
    """Name and config.json of Llama-3.2-1B's shape, or from 8 GiB on of Llama-3.1-8B's. The number of layers brings a
    bfloat16 checkpoint closest to `num_bytes`."""
    config, name = json.loads(_CONFIG.read_text()), "Llama-3.1-8B"
    if num_bytes < _8B_BYTES_MIN:
        config, name = config | _OF_1B, "Llama-3.2-1B"
    one, two = (_bytes_of(_shapes(config | {"num_hidden_layers": layers})) for layers in (1, 2))
    layers = max(1, 1 + round((num_bytes - one) / (two - one)))
    return f"{name}, {layers} layers", config | {"num_hidden_layers": layers}


def write_llama(directory: Path, name: str, config: Mapping[str, Any], *, num_files: int) -> Written:
    """Writes a random bfloat16 checkpoint in at most `num_files` files."""
    (directory / "config.json").write_text(json.dumps(config))
    block = _numbers()
    files, weight_map = list[Path](), dict[str, str]()
    parts = _split(_shapes(config), num_files)
    for index, part in enumerate(parts, start=1):
        file = directory / f"model-{index:05d}-of-{len(parts):05d}.safetensors"
        _write(file, part, block)
        files.append(file)
        weight_map |= dict.fromkeys(part, file.name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return Written(name, tuple(files), sum(file.stat().st_size for file in files))


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    of_queries = config["num_attention_heads"] * config["head_dim"]
    of_keys = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    of_layer = {
        "input_layernorm": (hidden,),
        "mlp.down_proj": (hidden, inner),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "post_attention_layernorm": (hidden,),
        "self_attn.k_proj": (of_keys, hidden),
        "self_attn.o_proj": (hidden, of_queries),
        "self_attn.q_proj": (of_queries, hidden),
        "self_attn.v_proj": (of_keys, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _bytes_of(shapes: Mapping[str, Sequence[int]]) -> int:
    return sum(_NUMBER_BYTES * math.prod(shape) for shape in shapes.values())


def _split(shapes: Mapping[str, tuple[int, ...]], num_files: int) -> list[dict[str, tuple[int, ...]]]:
    """Distributes the tensors in order over at most `num_files` files of similar size."""
    total_bytes, done_bytes = _bytes_of(shapes), 0
    parts: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        parts.setdefault(num_files * done_bytes // total_bytes, {})[name] = shape
        done_bytes += _bytes_of({name: shape})
    return list(parts.values())


def _numbers() -> bytes:
    """Bytes of normally distributed weights, which no disk can compress. Files repeat this block."""
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.empty(_BLOCK_BYTES // _NUMBER_BYTES, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)
    return drawn.view(torch.uint8).numpy().tobytes()


def _write(file: Path, shapes: Mapping[str, tuple[int, ...]], block: bytes) -> None:
    header: dict[str, object] = {}
    stop = 0
    for name, shape in shapes.items():
        start, stop = stop, stop + _bytes_of({name: shape})
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, stop]}
    head = json.dumps(header).encode()
    with file.open("wb", buffering=0) as opened:
        opened.write(struct.pack("<Q", len(head)) + head)
        for done in range(0, stop, len(block)):
            opened.write(block[: stop - done])
