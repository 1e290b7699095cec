"""config.json of gpt-oss. No torch."""

from collections.abc import Mapping
from types import MappingProxyType

from baton.errors import ConfigError
from models.config.fields import read_gqa, read_model, read_model_rope, read_windows_by_type
from models.config.file import ConfigFile
from models.config.model_config import GptOssSwitches, ModelConfig, MoEConfig, Scoring, TopKMethod

_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
    }
)
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_gpt_oss(file: ConfigFile, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    _refuse_quantized(file)
    has_rope = "rope_parameters" in file or "rope_scaling" in file
    file = file.with_defaults({**_DEFAULTS, **({} if has_rope else {"rope_parameters": _ROPE})})
    bias = file.flag("attention_bias")
    windows = read_windows_by_type(file, every=2)
    attention = read_gqa(file, windows=windows, qkv_bias=bias, output_bias=bias, sinks=True)
    return read_model(
        file,
        architecture,
        eos,
        attention=attention,
        rope=read_model_rope(file, dim=attention.head_dim),
        moe=_moe(file),
        switches=GptOssSwitches(swiglu_limit=file.positive("swiglu_limit"), swiglu_alpha=file.positive("swiglu_alpha")),
    )


def _refuse_quantized(file: ConfigFile) -> None:
    if "quantization_config" not in file:
        return
    method = file.table("quantization_config").raw("quant_method")
    raise ConfigError(
        f"{file.where}: the weights are quantized, quant_method is {method!r}",
        field="quantization_config",
        value=method,
        allowed=("null",),
        cure="convert to bfloat16: load with transformers' Mxfp4Config(dequantize=True), then save_pretrained",
    )


def _moe(file: ConfigFile) -> MoEConfig:
    num_experts, per_token = file.integer("num_local_experts"), file.integer("num_experts_per_tok")
    if per_token > num_experts:
        raise file.refuse("num_experts_per_tok", f"at most num_local_experts, {num_experts}")
    return MoEConfig(
        layers=(True,) * file.integer("num_hidden_layers"),
        num_experts=num_experts,
        experts_per_token=per_token,
        intermediate_size=file.integer("intermediate_size"),
        shared_intermediate_size=0,
        # A softmax over the chosen alone is the softmax over all, normalized over the chosen.
        scoring=Scoring.SOFTMAX,
        method=TopKMethod.GREEDY,
        num_groups=1,
        groups_per_token=1,
        normalize_weights=True,
        weight_scale=1.0,
        router_bias=True,
    )
