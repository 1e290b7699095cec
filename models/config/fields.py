"""The fields of config.json that families share, read into values. Knows no family; no torch."""

from kvcache.spec import DTYPE_BYTES
from models.config.alibi import alibi_slopes
from models.config.file import ConfigFile
from models.config.model_config import GQAConfig, MLAConfig, ModelConfig, MoEConfig, Switches
from models.config.rope import RopeConfig, read_rope
from models.quantization.config import read_quantization


def read_model(
    file: ConfigFile,
    architecture: str,
    eos_token_ids: tuple[int, ...],
    *,
    attention: GQAConfig | MLAConfig,
    rope: RopeConfig | None,
    local_rope: RopeConfig | None = None,
    norm_eps: str = "rms_norm_eps",
    intermediate_size: int | None = None,
    final_logits_soft_cap: float | None = None,
    moe: MoEConfig | None = None,
    mtp_layers: int = 0,
    switches: Switches | None = None,
) -> ModelConfig:
    """The model of `file`.

    Args:
        norm_eps: the field's name in this family.
        intermediate_size: of dense layers; None reads the field of that name.
    """
    return ModelConfig(
        architecture=architecture,
        vocab_size=file.integer("vocab_size"),
        hidden_size=file.integer("hidden_size"),
        num_layers=file.integer("num_hidden_layers"),
        intermediate_size=intermediate_size or file.integer("intermediate_size"),
        mlp_bias=file.flag("mlp_bias"),
        norm_eps=file.positive(norm_eps, 1e-6),
        tie_word_embeddings=file.flag("tie_word_embeddings"),
        max_position_embeddings=file.integer("max_position_embeddings"),
        dtype=_dtype(file),
        eos_token_ids=eos_token_ids,
        attention=attention,
        rope=rope,
        local_rope=local_rope,
        final_logits_soft_cap=final_logits_soft_cap,
        moe=moe,
        mtp_layers=mtp_layers,
        quantization=read_quantization(file),
        switches=switches,
    )


def _dtype(file: ConfigFile) -> str:
    allowed = {name: name for name in DTYPE_BYTES}
    return file.choice("dtype" if "dtype" in file else "torch_dtype", allowed, "float32")


def read_gqa(
    file: ConfigFile,
    *,
    windows: tuple[int | None, ...],
    qkv_bias: bool,
    output_bias: bool,
    qk_norm: bool = False,
    scale: float | None = None,
    attention_chunk_sizes: tuple[int | None, ...] = (),
    logits_soft_cap: float | None = None,
    sinks: bool = False,
    alibi: bool = False,
) -> GQAConfig:
    """`scale` is that of the head size if it is None."""
    num_heads = file.integer("num_attention_heads")
    num_kv_heads = file.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise file.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
    head_dim = file.optional_integer("head_dim")
    if head_dim is None:
        head_dim, rest = divmod(file.integer("hidden_size"), num_heads)
        if rest:
            raise file.refuse("head_dim", cure="needed, since hidden_size is no multiple of num_attention_heads")
    return GQAConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        sliding_windows=windows,
        scale=head_dim**-0.5 if scale is None else scale,
        attention_chunk_sizes=attention_chunk_sizes,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes(num_heads) if alibi else (),
    )


def read_model_rope(file: ConfigFile, *, dim: int, interleaved: bool = False) -> RopeConfig:
    """The rotary embedding of a model that has one for all layers."""
    max_positions = file.integer("max_position_embeddings")
    return read_rope(file, dim=dim, interleaved=interleaved, max_position_embeddings=max_positions)


def read_layer_types(file: ConfigFile, *allowed: str) -> tuple[str, ...]:
    """`layer_types`, one of `allowed` for each layer; () when the file has none."""
    num_layers, types = file.integer("num_hidden_layers"), file.texts("layer_types")
    if types and (len(types) != num_layers or not set(types) <= set(allowed)):
        raise file.refuse("layer_types", f"{' or '.join(allowed)} for each of {num_layers} layers")
    return types


def read_uniform_windows(file: ConfigFile, window: int | None) -> tuple[int | None, ...]:
    """One window for all layers, which `layer_types` must not contradict."""
    num_layers = file.integer("num_hidden_layers")
    expected = "full_attention" if window is None else "sliding_attention"
    if not set(file.texts("layer_types")) <= {expected}:
        raise file.refuse("layer_types", f"{expected} for every layer of this architecture")
    return (window,) * num_layers


def read_windows_by_type(file: ConfigFile, *, every: int) -> tuple[int | None, ...]:
    """Layer by layer as `layer_types` says; without it, all layers slide but each `every`-th."""
    num_layers = file.integer("num_hidden_layers")
    types = read_layer_types(file, "full_attention", "sliding_attention")
    slides = [kind == "sliding_attention" for kind in types] or [(index + 1) % every > 0 for index in range(num_layers)]
    window = file.integer("sliding_window") if any(slides) else None
    return tuple(window if slide else None for slide in slides)
