"""What a model is, in one spelling: `read_config` reads a checkpoint's config.json of any supported family.

Owns every difference between families' and transformers versions' field names and defaults, so that model code sees
none. A feature that is switched on and that we do not compute is an error here. No torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

from attention.spec import DTYPE_BYTES
from models.config_file import ConfigFile
from models.rope_config import RopeConfig, YarnScaling, read_rope


@dataclass(frozen=True)
class GQAConfig:
    """Grouped-query attention; `sliding_windows` has one entry per layer, None for full attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]


@dataclass(frozen=True)
class MLAConfig:
    """Latent attention; without `q_lora_rank` queries come from one full projection."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class TopKMethod(StrEnum):
    """How the experts of a token are chosen.

    GREEDY: the best of all. GROUP_LIMITED_GREEDY: the best within the groups with the best single experts. NOAUX_TC:
    like it, by scores plus a learnt correction, and a group counts by its two best experts.
    """

    GREEDY = "greedy"
    GROUP_LIMITED_GREEDY = "group_limited_greedy"
    NOAUX_TC = "noaux_tc"


class Scoring(StrEnum):
    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts; `layers` says for each layer whether its MLP is one. Sizes of 0 mean that there is none."""

    layers: tuple[bool, ...]
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    scoring: Scoring
    method: TopKMethod
    num_groups: int
    groups_per_token: int
    normalize_weights: bool
    weight_scale: float


@dataclass(frozen=True)
class ModelConfig:
    """One checkpoint's architecture. `dtype` is what it was saved as; `mtp_layers` are stored behind the last layer."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    mlp_bias: bool
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    attention: GQAConfig | MLAConfig
    rope: RopeConfig
    moe: MoEConfig | None = None
    mtp_layers: int = 0

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt plus output: with YaRN its stretched context, which not every file repeats as the maximum."""
        scaling = self.rope.scaling
        if isinstance(scaling, YarnScaling):
            return max(self.max_position_embeddings, int(scaling.factor * scaling.original_max_position_embeddings))
        return self.max_position_embeddings


def read_config(directory: Path) -> ModelConfig:
    """The configuration of the checkpoint in `directory`.

    Raises:
        ConfigError: a file cannot be read, a field is missing or wrong, or the model needs what we do not compute.
    """
    file = ConfigFile.read(directory / "config.json")
    architecture = _architecture(file)
    _refuse_unsupported(file)
    read_family = _FAMILIES[architecture]
    return read_family(file, architecture, _eos_token_ids(directory, file))


def _architecture(file: ConfigFile) -> str:
    names = file.texts("architectures")
    if len(names) != 1 or names[0] not in _FAMILIES:
        raise file.refuse("architectures", *_FAMILIES)
    return names[0]


def _refuse_unsupported(file: ConfigFile) -> None:
    """Refuses fields that change what a model computes and that no family here reads, unless they are off."""
    for name in _UNSUPPORTED:
        if file.raw(name):
            raise file.refuse(name, "null", cure="this feature is not supported; choose another checkpoint")
    if file.number("partial_rotary_factor", 1.0) != 1.0:
        raise file.refuse("partial_rotary_factor", "1.0")
    if file.raw("hidden_act") not in (None, "silu", "swish"):
        raise file.refuse("hidden_act", "silu")


_UNSUPPORTED = (
    "quantization_config",
    "compression_config",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention_chunk_size",
    "clip_qkv",
    "index_topk",
    "no_rope_layers",
    "use_mrope",
)


def _eos_token_ids(directory: Path, file: ConfigFile) -> tuple[int, ...]:
    """From generation_config.json, which publishers keep current, else from config.json; none if neither names any."""
    path = directory / "generation_config.json"
    if path.exists() and (ids := ConfigFile.read(path).integers("eos_token_id")):
        return ids
    return file.integers("eos_token_id")


def _model(
    file: ConfigFile,
    architecture: str,
    eos_token_ids: tuple[int, ...],
    *,
    attention: GQAConfig | MLAConfig,
    rope_interleaved: bool = False,
    moe: MoEConfig | None = None,
    mtp_layers: int = 0,
) -> ModelConfig:
    """The fields that all families share."""
    max_positions = file.integer("max_position_embeddings")
    rope_dim = attention.head_dim if isinstance(attention, GQAConfig) else attention.qk_rope_head_dim
    return ModelConfig(
        architecture=architecture,
        vocab_size=file.integer("vocab_size"),
        hidden_size=file.integer("hidden_size"),
        num_layers=file.integer("num_hidden_layers"),
        intermediate_size=file.integer("intermediate_size"),
        mlp_bias=file.flag("mlp_bias"),
        rms_norm_eps=file.positive("rms_norm_eps", 1e-6),
        tie_word_embeddings=file.flag("tie_word_embeddings"),
        max_position_embeddings=max_positions,
        dtype=_dtype(file),
        eos_token_ids=eos_token_ids,
        attention=attention,
        rope=read_rope(file, dim=rope_dim, interleaved=rope_interleaved, max_position_embeddings=max_positions),
        moe=moe,
        mtp_layers=mtp_layers,
    )


def _dtype(file: ConfigFile) -> str:
    allowed = {name: name for name in DTYPE_BYTES}
    return file.choice("dtype" if "dtype" in file else "torch_dtype", allowed, "float32")


def _gqa(
    file: ConfigFile, *, windows: tuple[int | None, ...], qkv_bias: bool, output_bias: bool, qk_norm: bool = False
) -> GQAConfig:
    num_heads = file.integer("num_attention_heads")
    num_kv_heads = file.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise file.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
    head_dim = file.optional_integer("head_dim")
    if head_dim is None:
        head_dim, rest = divmod(file.integer("hidden_size"), num_heads)
        if rest:
            raise file.refuse("head_dim", cure="needed, since hidden_size is no multiple of num_attention_heads")
    return GQAConfig(num_heads, num_kv_heads, head_dim, qkv_bias, output_bias, qk_norm, windows)


def _llama(file: ConfigFile, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    bias = file.flag("attention_bias")
    if "sliding_window" in file:
        raise file.refuse("sliding_window", "null", cure="this architecture always attends to all tokens")
    attention = _gqa(file, windows=_uniform_windows(file, None), qkv_bias=bias, output_bias=bias)
    return _model(file, architecture, eos, attention=attention)


def _mistral(file: ConfigFile, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    windows = _uniform_windows(file, _window(file))
    return _model(file, architecture, eos, attention=_gqa(file, windows=windows, qkv_bias=False, output_bias=False))


def _qwen2(file: ConfigFile, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    attention = _gqa(file, windows=_qwen_windows(file), qkv_bias=True, output_bias=False)
    return _model(file, architecture, eos, attention=attention)


def _qwen3(file: ConfigFile, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    bias = file.flag("attention_bias")
    attention = _gqa(file, windows=_qwen_windows(file), qkv_bias=bias, output_bias=bias, qk_norm=True)
    return _model(file, architecture, eos, attention=attention)


def _window(file: ConfigFile) -> int | None:
    """Null means full attention; a file without the field means the 4096 that these families began with."""
    return file.optional_integer("sliding_window") if file.mentions("sliding_window") else 4096


def _uniform_windows(file: ConfigFile, window: int | None) -> tuple[int | None, ...]:
    num_layers = file.integer("num_hidden_layers")
    expected = "full_attention" if window is None else "sliding_attention"
    if not set(file.texts("layer_types")) <= {expected}:
        raise file.refuse("layer_types", f"{expected} for every layer of this architecture")
    return (window,) * num_layers


def _qwen_windows(file: ConfigFile) -> tuple[int | None, ...]:
    """Layer by layer as `layer_types` says; without it, sliding from layer `max_window_layers` on."""
    num_layers = file.integer("num_hidden_layers")
    window = _window(file) if file.flag("use_sliding_window") else None
    types = file.texts("layer_types")
    if not types:
        full_layers = file.integer("max_window_layers", 28, minimum=0)
        return tuple(None if index < full_layers else window for index in range(num_layers))
    if len(types) != num_layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise file.refuse("layer_types", f"full_attention or sliding_attention for each of {num_layers} layers")
    if window is None and "sliding_attention" in types:
        raise file.refuse("use_sliding_window", "true", cure="layer_types has sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _mla(file: ConfigFile) -> MLAConfig:
    if file.flag("attention_bias"):
        raise file.refuse("attention_bias", "false")
    return MLAConfig(
        num_heads=file.integer("num_attention_heads"),
        q_lora_rank=file.optional_integer("q_lora_rank"),
        kv_lora_rank=file.integer("kv_lora_rank"),
        qk_nope_head_dim=file.integer("qk_nope_head_dim"),
        qk_rope_head_dim=file.integer("qk_rope_head_dim"),
        v_head_dim=file.integer("v_head_dim"),
    )


def _deepseek_v2(file: ConfigFile, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    methods = {method.value: method for method in (TopKMethod.GREEDY, TopKMethod.GROUP_LIMITED_GREEDY)}
    method = file.choice("topk_method", methods, "greedy")
    scoring = file.choice("scoring_func", {"softmax": Scoring.SOFTMAX}, "softmax")
    # NOTE: the publisher's code normalizes instead of scaling, transformers ignores the field: no right answer exists.
    if file.flag("norm_topk_prob"):
        raise file.refuse("norm_topk_prob", "false")
    moe = _moe(file, scoring=scoring, method=method, normalize_weights=False, weight_scale=1.0)
    return _model(file, architecture, eos, attention=_mla(file), rope_interleaved=True, moe=moe)


def _deepseek_v3(file: ConfigFile, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    method = file.choice("topk_method", {"noaux_tc": TopKMethod.NOAUX_TC}, "noaux_tc")
    scoring = file.choice("scoring_func", {"sigmoid": Scoring.SIGMOID}, "sigmoid")
    normalize = file.flag("norm_topk_prob", default=True)
    return _model(
        file,
        architecture,
        eos,
        attention=_mla(file),
        rope_interleaved=file.flag("rope_interleave", default=True),
        moe=_moe(file, scoring=scoring, method=method, normalize_weights=normalize, weight_scale=2.5),
        mtp_layers=file.integer("num_nextn_predict_layers", 0, minimum=0),
    )


def _moe(
    file: ConfigFile, *, scoring: Scoring, method: TopKMethod, normalize_weights: bool, weight_scale: float
) -> MoEConfig | None:
    """`weight_scale` is the family's default. None for a model whose layers are all dense."""
    if "n_routed_experts" not in file:
        return None
    num_layers = file.integer("num_hidden_layers")
    first = file.integer("first_k_dense_replace", 0, minimum=0)
    every = file.integer("moe_layer_freq", 1)
    num_experts = file.integer("n_routed_experts")
    grouped = method is not TopKMethod.GREEDY
    num_groups = file.integer("n_group") if grouped else 1
    groups_per_token = file.integer("topk_group") if grouped else 1
    per_token = file.integer("num_experts_per_tok")
    smallest_group = 2 if method is TopKMethod.NOAUX_TC else 1
    if num_experts % num_groups or num_experts // num_groups < smallest_group:
        raise file.refuse("n_group", f"a divisor of n_routed_experts, {num_experts}, into {smallest_group} or more")
    if groups_per_token > num_groups:
        raise file.refuse("topk_group", f"1 to n_group, {num_groups}")
    if per_token > groups_per_token * (num_experts // num_groups):
        raise file.refuse("num_experts_per_tok", "at most the experts of topk_group groups")
    intermediate_size = file.integer("moe_intermediate_size")
    return MoEConfig(
        layers=tuple(index >= first and index % every == 0 for index in range(num_layers)),
        num_experts=num_experts,
        experts_per_token=per_token,
        intermediate_size=intermediate_size,
        shared_intermediate_size=intermediate_size * file.integer("n_shared_experts", 0, minimum=0),
        scoring=scoring,
        method=method,
        num_groups=num_groups,
        groups_per_token=groups_per_token,
        normalize_weights=normalize_weights,
        weight_scale=file.positive("routed_scaling_factor", weight_scale),
    )


_ReadFamily = Callable[[ConfigFile, str, tuple[int, ...]], ModelConfig]
_FAMILIES: Mapping[str, _ReadFamily] = MappingProxyType(
    {
        "LlamaForCausalLM": _llama,
        "MistralForCausalLM": _mistral,
        "Qwen2ForCausalLM": _qwen2,
        "Qwen3ForCausalLM": _qwen3,
        "DeepseekV2ForCausalLM": _deepseek_v2,
        "DeepseekV3ForCausalLM": _deepseek_v3,
    }
)
