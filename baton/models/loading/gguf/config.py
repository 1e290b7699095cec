"""Makes config.json from the metadata of a GGUF file. The families' readers check its values afterwards."""

from typing import Any, cast

from baton.core.errors import ConfigError
from baton.models.checkpoint.gguf_header import GgufHeader, MetadataValue, read_numbers
from baton.models.checkpoint.gguf_tensors import ROPE_FACTORS, GgufFamily

_ROPE_PAIRS_MAX = 1 << 14
# llama.cpp knows these sizes by their number of layers: the scale of their scores is not a power of the head's size.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_GEMMA2_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
# Names under which chat models end their turn; llama.cpp stops at them too.
_END_OF_TURN = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>"})
_CONTROL = 3


class Metadata:
    """The metadata of a model's first file, with typed access; other types are errors that name key and file."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self.prefix = self.text("general.architecture")

    def raw(self, key: str) -> MetadataValue | None:
        return self._header.metadata.get(key)

    def text(self, key: str) -> str:
        value = self.raw(key)
        if not isinstance(value, str):
            raise self.refuse(key, "a text")
        return value

    def of_model(self, name: str) -> MetadataValue | None:
        """Returns the value of a key of the architecture, such as `llama.context_length`; None if it is absent."""
        return self.raw(f"{self.prefix}.{name}")

    def integer(self, name: str, default: int | None = None) -> int:
        """Returns a number of the architecture. A list, which has a number for each layer, must repeat one number."""
        value = self.of_model(name)
        if isinstance(value, tuple) and value and len(set(value)) == 1:
            value = value[0]
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.refuse(f"{self.prefix}.{name}", "an integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.of_model(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refuse(f"{self.prefix}.{name}", "a number")
        return float(value)

    def token_id(self, name: str) -> int | None:
        """Returns a token's id, such as that of `bos_token_id`; None if the file has none."""
        value = self.raw(f"tokenizer.ggml.{name}")
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self.refuse(f"tokenizer.ggml.{name}", "a token id")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(key, "true", "false")
        return default if value is None else value

    def texts(self, key: str) -> tuple[str, ...]:
        """Returns a list of texts; () if it is absent."""
        value = self.raw(key)
        if value is None:
            return ()
        if not isinstance(value, tuple) or (value and not isinstance(value[0], str)):
            raise self.refuse(key, "a list of texts")
        return cast(tuple[str, ...], value)  # a list in a GGUF file has one type

    def numbers(self, key: str) -> tuple[float, ...]:
        """Returns a list of numbers; () if it is absent."""
        value = self.raw(key)
        if value is None:
            return ()
        if not isinstance(value, tuple) or (value and isinstance(value[0], str)):
            raise self.refuse(key, "a list of numbers")
        return cast(tuple[float, ...], value)

    def refuse(self, key: str, *allowed: str, cure: str = "take another file of the model") -> ConfigError:
        value = self.raw(key)
        shown = "missing" if value is None else repr(value)[:80]
        return ConfigError(
            f"{self._header.path}: {key} is {shown}", field="model", value=shown, allowed=allowed, cure=cure
        )


def config_json(headers: list[GgufHeader], family: GgufFamily) -> dict[str, Any]:
    """Returns the content of config.json.

    Args:
        headers: of a model's files; the first has the metadata.

    Raises:
        ConfigError: a value is missing, has another type, or asks for what Baton does not compute.
    """
    metadata = Metadata(headers[0])
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    embedding = tensors.get(_EMBEDDING)
    if embedding is None:
        raise ConfigError(
            f"{headers[0].path} has no {_EMBEDDING}",
            field="model",
            value=str(headers[0].path),
            cure="put all parts of the model into one directory, or download the file again",
        )
    heads, hidden = metadata.integer("attention.head_count"), metadata.integer("embedding_length")
    head_dim = metadata.integer("attention.key_length", hidden // max(heads, 1))
    if metadata.integer("attention.value_length", head_dim) != head_dim:
        raise metadata.refuse(f"{metadata.prefix}.attention.value_length", f"{head_dim}, the key_length")
    if metadata.integer("rope.dimension_count", head_dim) != head_dim:
        raise metadata.refuse(f"{metadata.prefix}.rope.dimension_count", f"{head_dim}, the size of a head")
    if metadata.integer("expert_count", 0):
        raise metadata.refuse(
            f"{metadata.prefix}.expert_count", "0", cure="give the original checkpoint: experts are read from it alone"
        )
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": metadata.prefix,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": metadata.integer("block_count"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.integer("context_length"),
        "rope_theta": metadata.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": _HEAD not in tensors,
        # Quantized numbers have no dtype of their own; bfloat16 has float32's range.
        "dtype": {"F32": "float32", "F16": "float16"}.get(embedding.type.name, "bfloat16"),
        "eos_token_id": _eos_token_ids(metadata),
        "bos_token_id": metadata.token_id("bos_token_id"),
    }
    if (scaling := _rope_scaling(headers, metadata, config)) is not None:
        config["rope_scaling"] = scaling
    if metadata.prefix in ("llama", "qwen3", "gemma"):
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    return config | _of_family(metadata, config)


def _of_family(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that only some families have."""
    window = metadata.of_model("attention.sliding_window")
    match metadata.prefix:
        case "llama" if window:  # Mistral's first release; its later ones are Llama's in all that we read
            return {
                "architectures": ["MistralForCausalLM"],
                "model_type": "mistral",
                "sliding_window": metadata.integer("attention.sliding_window"),
            }
        case "gemma":
            return {"hidden_activation": "gelu_pytorch_tanh"}
        case "gemma2":
            caps = {name: metadata.number(name, cap) for name, cap in _GEMMA2_CAPS.items()}
            return {**caps, **_gemma(metadata, config, window=4096)}
        case "gemma3":
            cap = metadata.number("final_logit_softcapping", 0.0)
            local = metadata.number("rope.freq_base_swa", 10_000.0)
            caps = {"final_logit_softcapping": cap} if cap else {}
            return {**caps, "rope_local_base_freq": local, **_gemma(metadata, config, window=1024)}
        case _:
            return {}


def _gemma(metadata: Metadata, config: dict[str, Any], *, window: int) -> dict[str, Any]:
    big = config["num_hidden_layers"] == _GEMMA_27B_LAYERS[metadata.prefix]
    scalar = config["hidden_size"] // max(config["num_attention_heads"], 1) if big else config["head_dim"]
    return {
        "model_type": "gemma3_text" if metadata.prefix == "gemma3" else metadata.prefix,
        "query_pre_attn_scalar": scalar,
        "sliding_window": metadata.integer("attention.sliding_window", window),
    }


def _rope_scaling(headers: list[GgufHeader], metadata: Metadata, config: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the table of config.json for how frequencies are stretched; None if they are not."""
    found = next((header for header in headers if ROPE_FACTORS in header.tensors), None)
    kind = metadata.of_model("rope.scaling.type")
    context = config["max_position_embeddings"]
    if found is not None:
        # Llama 3's scaling, as a factor for each pair of channels.
        factors = read_numbers(found.tensors[ROPE_FACTORS], found.path, most=_ROPE_PAIRS_MAX)
        return {
            "rope_type": "longrope",
            "short_factor": list(factors),
            "long_factor": list(factors),
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }
    if kind in (None, "none"):
        return None
    factor = metadata.number("rope.scaling.factor", 1.0)
    if kind == "linear":
        return None if factor in (0.0, 1.0) else {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise metadata.refuse(f"{metadata.prefix}.rope.scaling.type", "none", "linear", "yarn")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length", context),
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _eos_token_ids(metadata: Metadata) -> list[int]:
    """Returns the tokens that end an output: those that the file names, and the known ends of a turn."""
    named = (metadata.token_id(f"{name}_token_id") for name in ("eos", "eot", "eom"))
    kinds, tokens = metadata.numbers("tokenizer.ggml.token_type"), metadata.texts("tokenizer.ggml.tokens")
    known = (
        number
        for number, token in enumerate(tokens)
        if token in _END_OF_TURN and number < len(kinds) and kinds[number] == _CONTROL
    )
    return list(dict.fromkeys(each for each in (*named, *known) if each is not None))
