"""config.json of Falcon, of all three generations. No torch."""

from collections.abc import Mapping
from types import MappingProxyType

from models.config.fields import read_gqa, read_model, read_model_rope
from models.config.file import ConfigFile
from models.config.model_config import FalconSwitches, ModelConfig

_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "vocab_size": 65_024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 2048,
        "multi_query": True,
        "parallel_attn": True,
        "tie_word_embeddings": True,
    }
)


def read_falcon(file: ConfigFile, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    file = file.with_defaults(_DEFAULTS)
    file.choice("activation", {"gelu": None}, "gelu")
    if file.flag("apply_residual_connection_post_layernorm"):
        raise file.refuse("apply_residual_connection_post_layernorm", "false")
    bias, alibi = file.flag("bias"), file.flag("alibi")
    switches = _switches(file)
    file = file.with_values({"num_key_value_heads": _num_kv_heads(file), "mlp_bias": bias})
    attention = read_gqa(
        file,
        windows=(None,) * file.integer("num_hidden_layers"),
        qkv_bias=bias,
        output_bias=bias,
        alibi=alibi,
    )
    return read_model(
        file,
        architecture,
        eos,
        attention=attention,
        rope=None if alibi else read_model_rope(file, dim=attention.head_dim),
        norm_eps="layer_norm_epsilon",
        intermediate_size=file.integer("ffn_hidden_size", 4 * file.integer("hidden_size")),
        switches=switches,
    )


def _num_kv_heads(file: ConfigFile) -> int:
    """`num_kv_heads` counts only where the other fields leave it open."""
    num_heads = file.integer("num_attention_heads")
    if file.flag("new_decoder_architecture"):
        return file.integer("num_kv_heads", num_heads)
    return 1 if file.flag("multi_query") else num_heads


def _switches(file: ConfigFile) -> FalconSwitches:
    parallel, new = file.flag("parallel_attn"), file.flag("new_decoder_architecture")
    num_norms = file.integer("num_ln_in_parallel_attn", 2 if new else 1)
    if new and not parallel:
        raise file.refuse("parallel_attn", "true", cure="new_decoder_architecture is always parallel")
    if num_norms > (2 if new else 1):
        raise file.refuse("num_ln_in_parallel_attn", "1", "2 with new_decoder_architecture")
    return FalconSwitches(parallel=parallel, num_norms=num_norms)
