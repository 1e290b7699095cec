"""Translates tensors of GGUF files to those of a checkpoint: names, and what llama.cpp changes in the numbers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from baton.core.errors import ConfigError
from baton.models.checkpoint.gguf_header import SUFFIX, GgufHeader, GgufTensor, GgufType, damaged, read_gguf_header

_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")
_OUTSIDE = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
)
_PROJECTIONS = MappingProxyType(
    {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
    }
)
_LLAMA = MappingProxyType({**_PROJECTIONS, "ffn_norm": "post_attention_layernorm"})
_QK_NORMS = MappingProxyType({"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"})
_GEMMA2 = MappingProxyType(
    {
        **_PROJECTIONS,
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
# Factors of the rotary embedding, which the config has.
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class GgufFamily:
    """One value of `general.architecture`.

    Attributes:
        architecture: the architecture of config.json.
        names: of each layer's modules, by those in the file.
        turns_neighbours: each head's queries and keys are stored in the order in which neighbours turn together.
        norm_offset: what a norm's weights have more in the file than in a checkpoint.
    """

    architecture: str
    names: Mapping[str, str]
    turns_neighbours: bool = False
    norm_offset: float = 0.0


GGUF_FAMILIES: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "llama": GgufFamily("LlamaForCausalLM", _LLAMA, turns_neighbours=True),
        "qwen2": GgufFamily("Qwen2ForCausalLM", _LLAMA),
        "qwen3": GgufFamily("Qwen3ForCausalLM", {**_LLAMA, **_QK_NORMS}),
        "gemma": GgufFamily("GemmaForCausalLM", _LLAMA, norm_offset=1.0),
        "gemma2": GgufFamily("Gemma2ForCausalLM", _GEMMA2, norm_offset=1.0),
        "gemma3": GgufFamily("Gemma3ForCausalLM", {**_GEMMA2, **_QK_NORMS}, norm_offset=1.0),
    }
)


@dataclass(frozen=True)
class GgufEncoding:
    """How whole rows of a tensor become a checkpoint's numbers.

    Attributes:
        row_numbers: numbers of a row; 1 for a vector, each of whose numbers is a row.
        columns: the numbers of a row that are read; None: all.
        head_rows: rows of a head whose rows i and i + half lie next to each other; 0: rows have their order.
        offset: is added to each number.
    """

    type: GgufType
    row_numbers: int
    columns: range | None = None
    head_rows: int = 0
    offset: float = 0.0

    @property
    def row_bytes(self) -> int:
        return self.row_numbers // self.type.block_size * self.type.block_bytes


def gguf_files(directory: Path) -> list[Path]:
    """Returns the GGUF files of a directory that `baton.models.loading.gguf` has made, in order; links are resolved, so
    that errors name the users' files."""
    return [path.resolve() for path in sorted(directory.glob(f"*{SUFFIX}"))]


def read_headers(files: Sequence[Path]) -> list[GgufHeader]:
    """Reads the headers of a model's files and checks that they belong together.

    Raises:
        ConfigError: a file cannot be read or is damaged, or files are missing or of different models.
    """
    headers = [read_gguf_header(file) for file in files]
    first = headers[0]
    count = first.metadata.get("split.count", 1)
    for number, header in enumerate(headers):
        own = header.metadata.get("split.count", 1), header.metadata.get("split.no", 0)
        if own != (count, number) or count not in (0, 1, len(headers)):
            raise ConfigError(
                f"{header.path} is part {number + 1} of {len(headers)} by its name, and says that it has split.no "
                f"{own[1]} of {own[0]}",
                field="model",
                value=str(header.path),
                cure="put all parts of one model into one directory, under the names that they were published with",
            )
    return headers


def family_of_gguf(header: GgufHeader) -> GgufFamily:
    """Returns the family that the first file of a model names.

    Raises:
        ConfigError: Baton does not read files of this architecture.
    """
    name = header.metadata.get("general.architecture")
    if header.metadata.get("general.type", "model") != "model":
        raise ConfigError(
            f"{header.path} is not a model, but has general.type {header.metadata['general.type']!r}",
            field="model",
            value=str(header.path),
            allowed=("model",),
        )
    if not isinstance(name, str) or name not in GGUF_FAMILIES:
        raise ConfigError(
            f"{header.path} has the architecture {name!r}",
            field="model",
            value=str(name),
            allowed=tuple(GGUF_FAMILIES),
            cure="give the original checkpoint, by directory or name on the hub: config.json and safetensors",
        )
    return GGUF_FAMILIES[name]


def find_tensors(files: Sequence[Path]) -> dict[str, tuple[Path, GgufTensor, GgufEncoding]]:
    """Returns the tensors of a model's files by their names in a checkpoint, each with its file.

    Raises:
        ConfigError: see `read_headers` and `family_of_gguf`; or a tensor is there twice or has an impossible shape.
    """
    headers = read_headers(files)
    family = family_of_gguf(headers[0])
    found: dict[str, tuple[Path, GgufTensor, GgufEncoding]] = {}
    for header in headers:
        for tensor in header.tensors.values():
            if tensor.name == ROPE_FACTORS:
                continue
            # An unknown name stays: the loader refuses it, with all others that do not fit.
            name = _checkpoint_name(tensor.name, family) or tensor.name
            if name in found:
                raise damaged(header.path, f"has the tensor {tensor.name} of another of the model's files")
            found[name] = header.path, tensor, _encoding(headers[0], header.path, tensor, name, family)
    return found


def _checkpoint_name(name: str, family: GgufFamily) -> str | None:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    of_block = _BLOCK.fullmatch(name)
    if of_block is None:
        return None
    module, _, kind = of_block[2].rpartition(".")
    if module not in family.names or kind not in ("weight", "bias"):
        return None
    return f"model.layers.{int(of_block[1])}.{family.names[module]}.{kind}"


def _encoding(first: GgufHeader, path: Path, tensor: GgufTensor, name: str, family: GgufFamily) -> GgufEncoding:
    is_vector = len(tensor.shape) == 1
    if is_vector and tensor.type.block_size > 1:
        raise damaged(path, f"has the vector {tensor.name} in {tensor.type.name}")
    head_rows = _head_rows(first, path, tensor, name) if family.turns_neighbours else 0
    return GgufEncoding(
        tensor.type,
        1 if is_vector else tensor.shape[-1],
        head_rows=head_rows,
        offset=-family.norm_offset if name.endswith("norm.weight") else 0.0,
    )


def _head_rows(first: GgufHeader, path: Path, tensor: GgufTensor, name: str) -> int:
    """Returns the rows of a head, for queries and keys; 0 for other tensors."""
    module = name.rpartition(".")[0]
    if not module.endswith((".q_proj", ".k_proj")):
        return 0
    prefix = first.metadata["general.architecture"]
    heads = first.metadata.get(f"{prefix}.attention.head_count")
    if module.endswith(".k_proj"):
        heads = first.metadata.get(f"{prefix}.attention.head_count_kv", heads)
    if not isinstance(heads, int) or heads < 1 or tensor.shape[0] % (2 * heads):
        raise damaged(path, f"has {tensor.name} of {tensor.shape[0]} rows for {heads!r} heads")
    return tensor.shape[0] // heads
