"""config.json of DeepSeek V2 and V3. No torch."""

from models.config.fields import read_model, read_model_rope
from models.config.file import ConfigFile
from models.config.model_config import MLAConfig, ModelConfig, MoEConfig, Scoring, TopKMethod


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


def read_deepseek_v2(file: ConfigFile, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    methods = {method.value: method for method in (TopKMethod.GREEDY, TopKMethod.GROUP_LIMITED_GREEDY)}
    method = file.choice("topk_method", methods, "greedy")
    scoring = file.choice("scoring_func", {"softmax": Scoring.SOFTMAX}, "softmax")
    # NOTE: the publisher's code normalizes instead of scaling, transformers ignores the field: no right answer exists.
    if file.flag("norm_topk_prob"):
        raise file.refuse("norm_topk_prob", "false")
    moe = _moe(file, scoring=scoring, method=method, normalize_weights=False, weight_scale=1.0)
    attention = _mla(file)
    rope = read_model_rope(file, dim=attention.qk_rope_head_dim, interleaved=True)
    return read_model(file, architecture, eos, attention=attention, rope=rope, moe=moe)


def read_deepseek_v3(file: ConfigFile, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    method = file.choice("topk_method", {"noaux_tc": TopKMethod.NOAUX_TC}, "noaux_tc")
    scoring = file.choice("scoring_func", {"sigmoid": Scoring.SIGMOID}, "sigmoid")
    normalize = file.flag("norm_topk_prob", default=True)
    attention = _mla(file)
    interleaved = file.flag("rope_interleave", default=True)
    return read_model(
        file,
        architecture,
        eos,
        attention=attention,
        rope=read_model_rope(file, dim=attention.qk_rope_head_dim, interleaved=interleaved),
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
