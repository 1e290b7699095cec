"""config.json of BLOOM. No torch."""

from models.config.fields import read_gqa, read_model
from models.config.file import ConfigFile
from models.config.model_config import BloomSwitches, ModelConfig


def read_bloom(file: ConfigFile, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    file = file.with_defaults(
        {
            "hidden_size": file.raw("n_embed"),
            "num_hidden_layers": file.raw("n_layer"),
            "num_attention_heads": file.raw("n_head"),
            "max_position_embeddings": file.integer("seq_length", 2048),
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        }
    ).with_values({"mlp_bias": True})
    attention = read_gqa(
        file,
        windows=(None,) * file.integer("num_hidden_layers"),
        qkv_bias=True,
        output_bias=True,
        alibi=True,
    )
    return read_model(
        file,
        architecture,
        eos,
        attention=attention,
        rope=None,
        norm_eps="layer_norm_epsilon",
        intermediate_size=file.integer("n_inner", 4 * file.integer("hidden_size")),
        switches=BloomSwitches(residual_after_norm=file.flag("apply_residual_connection_post_layernorm")),
    )
