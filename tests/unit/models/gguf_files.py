"""Writes a model of transformers as llama.cpp's converter does, with the `gguf` package, which knows the names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

ARCHS = {
    "Llama": gguf.MODEL_ARCH.LLAMA,
    "Mistral": gguf.MODEL_ARCH.LLAMA,
    "Qwen2": gguf.MODEL_ARCH.QWEN2,
    "Qwen3": gguf.MODEL_ARCH.QWEN3,
    "Gemma": gguf.MODEL_ARCH.GEMMA,
    "Gemma2": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3": gguf.MODEL_ARCH.GEMMA3,
}
Array = NDArray[Any]


def write_gguf(
    path: Path,
    model: Any,
    *,
    type_of: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, float | str] | None = None,
    tokenizer: bool = True,
    split_after: int | None = None,
) -> Path:
    """Writes the model to `path`.

    Args:
        type_of: of matrices; vectors are in F32.
        metadata: further entries.
        split_after: the number of tensors in the first of two files; `path` has the place of the number in braces.
    """
    config, arch = model.config, ARCHS[type(model).__name__.removesuffix("ForCausalLM")]
    name = gguf.MODEL_ARCH_NAMES[arch]
    tensors = dict(converted(model, arch))
    firsts = [tensors] if split_after is None else cut(tensors, split_after)
    for number, part in enumerate(firsts):
        writer = gguf.GGUFWriter(str(path).format(number + 1), name)
        if split_after is not None:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", len(firsts))
        if number == 0:
            describe(writer, config)
            for key, value in (metadata or {}).items():
                writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
            if tokenizer:
                add_tokenizer(writer, config.vocab_size)
        for tensor_name, tensor in part.items():
            kind = type_of if tensor.ndim > 1 else GGMLQuantizationType.F32
            data = tensor if kind is GGMLQuantizationType.F32 else gguf.quantize(tensor, kind)
            writer.add_tensor(tensor_name, data, raw_dtype=None if kind is GGMLQuantizationType.F32 else kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return Path(str(path).format(1))


def cut(tensors: Mapping[str, Array], first: int) -> list[dict[str, Array]]:
    items = list(tensors.items())
    return [dict(items[:first]), dict(items[first:])]


def describe(writer: Any, config: Any) -> None:
    heads = config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def add_tokenizer(writer: Any, size: int) -> None:
    """Tokens of sentencepiece's kind: letters, and their bytes."""
    letters = [chr(ord("a") + number) for number in range(26)]
    tokens = ["<unk>", "<s>", "</s>", "▁", *letters]
    tokens += [f"<0x{number:02X}>" for number in range(size - len(tokens))]
    kinds = [2, 3, 3, *(1 for _ in range(27)), *(6 for _ in range(size - 30))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([float(-number) for number in range(size)])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def converted(model: Any, arch: Any) -> Any:
    """Yields names and numbers as the converter writes them."""
    config = model.config
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for path, tensor in model.state_dict().items():
        if path == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name, _, kind = path.rpartition(".")
        numbers = tensor.numpy()
        if arch is gguf.MODEL_ARCH.LLAMA and name.endswith(("q_proj", "k_proj")):
            is_key = name.endswith("k_proj")
            numbers = permuted(numbers, config.num_key_value_heads if is_key else config.num_attention_heads)
        if gguf.MODEL_ARCH_NAMES[arch].startswith("gemma") and name.endswith("norm"):
            numbers = numbers + 1
        yield f"{names.get_name(name)}.{kind}", np.ascontiguousarray(numbers)
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", llama3_factors(rope, config.hidden_size // config.num_attention_heads)


def permuted(numbers: Array, heads: int) -> Array:
    parts = numbers.reshape(heads, 2, numbers.shape[0] // heads // 2, *numbers.shape[1:])
    return parts.swapaxes(1, 2).reshape(numbers.shape)


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> Array:
    """What the converter writes for Llama 3's scaling."""
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for wavelength in 2 * np.pi / frequencies:
        smooth = (old / wavelength - low) / (high - low)
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(1.0 if wavelength < old / high else rope["factor"] if wavelength > old / low else between)
    return np.array(factors, dtype=np.float32)
