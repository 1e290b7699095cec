"""config.json of Phi-3-small, whose field names are its own. No torch."""

from dataclasses import replace

from attention.blocksparse import BlocksparseParams
from models.config.fields import read_gqa, read_model, read_uniform_windows
from models.config.file import ConfigFile
from models.config.model_config import GQAConfig, ModelConfig, Phi3SmallSwitches
from models.config.rope import LinearScaling, RopeConfig

# The vocabulary of the published checkpoints, and its ids that no text becomes; config.json does not say so.
_PUBLISHED_VOCAB_SIZE = 100_352
_PUBLISHED_UNUSED_TOKENS = (100_256, 100_264, 100_265, *range(100_267, 100_276), *range(100_277, 100_352))


def read_phi3_small(file: ConfigFile, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    # What a file that leaves them out means. Its linear layers have biases, whatever `attention_bias` says.
    file = file.with_defaults({"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "mlp_bias": True})
    file.choice("hidden_act", {"gegelu": None}, "gegelu")
    for name in ("rope_scaling", "ff_dim_multiplier"):
        if name in file:
            raise file.refuse(name, "null", cure="this feature is not supported; choose another checkpoint")
    attention = read_gqa(file, windows=read_uniform_windows(file, None), qkv_bias=True, output_bias=True)
    attention = replace(attention, scale=_scale(file, attention.head_dim), blocksparse=_patterns(file, attention))
    return read_model(
        file,
        architecture,
        eos,
        attention=attention,
        rope=_rope(file, attention.head_dim),
        norm_eps="layer_norm_epsilon",
        intermediate_size=file.integer("ff_intermediate_size", 14_336),
        switches=Phi3SmallSwitches(
            embedding_multiplier=_multiplier(file, "mup_embedding_multiplier", 10.0),
            logits_divisor=_multiplier(file, "mup_width_multiplier", 8.0),
            gegelu_limit=None if _is_null(file, "gegelu_limit") else file.positive("gegelu_limit", 20.0),
            unused_tokens=_unused_tokens(file),
        ),
    )


def _is_null(file: ConfigFile, name: str) -> bool:
    return file.mentions(name) and name not in file


def _multiplier(file: ConfigFile, name: str, default: float) -> float:
    """Null and 0 switch it off."""
    return 1.0 if _is_null(file, name) or file.number(name, default) == 0 else file.positive(name, default)


def _scale(file: ConfigFile, head_dim: int) -> float:
    if not file.flag("mup_use_scaling", default=True):
        return float(head_dim**-0.5)
    return file.positive("mup_attn_multiplier", 1.0) / head_dim


def _rope(file: ConfigFile, head_dim: int) -> RopeConfig:
    if head_dim % 2:
        raise file.refuse("num_attention_heads", cure="heads of an odd size cannot be rotated")
    factor = file.positive("rope_position_scale", 1.0)
    theta = file.positive("rope_embedding_base", 1e6)
    return RopeConfig(head_dim, theta, interleaved=False, scaling=None if factor == 1 else LinearScaling(factor))


def _patterns(file: ConfigFile, gqa: GQAConfig) -> tuple[BlocksparseParams | None, ...]:
    """Layer by layer; each `dense_attention_every_n_layers`-th is dense, and none where that is null or 0."""
    num_layers, every = file.integer("num_hidden_layers"), 0
    if not _is_null(file, "dense_attention_every_n_layers"):
        every = file.integer("dense_attention_every_n_layers", 2, minimum=0)
    pattern = BlocksparseParams(
        max_seqlen=file.integer("max_position_embeddings"),
        num_heads=gqa.num_heads,
        num_kv_heads=gqa.num_kv_heads,
        block_size=file.integer("blocksparse_block_size", 64),
        local_blocks=file.integer("blocksparse_num_local_blocks", 16, minimum=0),
        vert_stride=file.integer("blocksparse_vert_stride", 8),
        homo_head=file.flag("blocksparse_homo_head_pattern"),
    )
    return tuple(None if every and (index + 1) % every == 0 else pattern for index in range(num_layers))


def _unused_tokens(file: ConfigFile) -> tuple[int, ...]:
    vocab_size = file.integer("vocab_size")
    if "dummy_token_indices" not in file:
        return _PUBLISHED_UNUSED_TOKENS if vocab_size == _PUBLISHED_VOCAB_SIZE else ()
    tokens = file.integers("dummy_token_indices")
    if tokens and max(tokens) >= vocab_size:
        raise file.refuse("dummy_token_indices", f"0 to {vocab_size - 1}")
    return tokens
