"""config.json of Llama-4's text model. No torch."""

from collections.abc import Mapping
from types import MappingProxyType

from models.config.fields import read_gqa, read_layer_types, read_model, read_model_rope
from models.config.file import ConfigFile
from models.config.model_config import Llama4Switches, ModelConfig, MoEConfig, Scoring, TemperatureTuning, TopKMethod

_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "vocab_size": 202_048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "attention_chunk_size": 8192,
    }
)


def read_llama4(file: ConfigFile, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    file = file.with_defaults(_DEFAULTS)
    rope_layers = _rope_layers(file)
    temperature = TemperatureTuning(file.integer("floor_scale", 8192), file.number("attn_scale", 0.1))
    bias = file.flag("attention_bias")
    attention = read_gqa(
        file,
        windows=(None,) * len(rope_layers),
        qkv_bias=bias,
        output_bias=bias,
        attention_chunk_sizes=_chunk_sizes(file, rope_layers),
    )
    return read_model(
        file,
        architecture,
        eos,
        attention=attention,
        rope=read_model_rope(file, dim=attention.head_dim, interleaved=True),
        intermediate_size=file.integer("intermediate_size_mlp"),
        moe=_moe(file),
        switches=Llama4Switches(
            rope_layers=rope_layers,
            qk_norm=file.flag("use_qk_norm", default=True),
            temperature=temperature if _is_tuned(file) else None,
        ),
    )


def _is_tuned(file: ConfigFile) -> bool:
    """Files of the first release have a 4 here; as they were read then, null and 0 mean off."""
    name = "attn_temperature_tuning"
    if type(file.raw(name)) is int:
        return file.integer(name, minimum=0) > 0
    return file.flag(name, default=not file.mentions(name))


def _rope_layers(file: ConfigFile) -> tuple[bool, ...]:
    """`no_rope_layers` has, against its name, a 1 for each layer with rotary embedding."""
    num_layers, flags = file.integer("num_hidden_layers"), file.integers("no_rope_layers")
    if not flags:
        every = file.integer("no_rope_layer_interval", 4)
        return tuple((index + 1) % every > 0 for index in range(num_layers))
    if len(flags) < num_layers or not set(flags) <= {0, 1}:
        raise file.refuse("no_rope_layers", f"0 or 1 for each of {num_layers} layers")
    return tuple(flag == 1 for flag in flags[:num_layers])


def _chunk_sizes(file: ConfigFile, rope_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
    """As `layer_types` says; without it, the layers with rotary embedding see their own chunk only."""
    size = file.optional_integer("attention_chunk_size")
    types = read_layer_types(file, "full_attention", "chunked_attention")
    if size is None and "chunked_attention" in types:
        raise file.refuse("attention_chunk_size", "an integer of at least 1", cure="layer_types has chunked_attention")
    chunked = [kind == "chunked_attention" for kind in types] or rope_layers
    return tuple(size if in_chunks else None for in_chunks in chunked)


def _moe(file: ConfigFile) -> MoEConfig:
    num_layers = file.integer("num_hidden_layers")
    every = file.integer("interleave_moe_layer_step", 1)
    numbers = file.integers("moe_layers") if "moe_layers" in file else range(every - 1, num_layers, every)
    num_experts, per_token = file.integer("num_local_experts"), file.integer("num_experts_per_tok")
    if per_token > num_experts:
        raise file.refuse("num_experts_per_tok", f"at most num_local_experts, {num_experts}")
    intermediate_size = file.integer("intermediate_size")
    return MoEConfig(
        layers=tuple(index in numbers for index in range(num_layers)),
        num_experts=num_experts,
        experts_per_token=per_token,
        intermediate_size=intermediate_size,
        shared_intermediate_size=intermediate_size,
        scoring=Scoring.SIGMOID,
        method=TopKMethod.GREEDY,
        num_groups=1,
        groups_per_token=1,
        normalize_weights=False,
        weight_scale=1.0,
    )
