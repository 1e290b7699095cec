"""Reads config.json of the families with Llama's layers, but with the best experts by a softmax instead of the MLP."""

from dataclasses import replace
from typing import ClassVar, Literal

from baton.models.config.fields import Count, CountOrZero, Heads, Integers, LayersOrZero, Positive, Size
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import GQAConfig, ModelConfig, MoEConfig, QKNorm, Scoring, TopKMethod
from baton.models.families.dense.llama_config import LlamaLikeFields
from baton.models.families.dense.llama_switches import LlamaSwitches


class RoutedFields(LlamaLikeFields):
    """The fields of a config with routed experts.

    Attributes:
        per_token_field: the family's name for the number of experts per token.
    """

    per_token_field: ClassVar[str] = "num_experts_per_tok"

    num_experts: Heads | None = None
    num_local_experts: Heads | None = None  # the spelling of newer files

    def count_of_experts(self) -> int:
        """Returns the number of experts, from either spelling."""
        names = {"num_experts": self.num_experts, "num_local_experts": self.num_local_experts}
        given = {name: count for name, count in names.items() if count is not None}
        if len(set(given.values())) != 1:
            raise self.refuse(next(iter(given), "num_experts"), "one integer of at least 1")
        return next(iter(given.values()))

    def greedy_experts(
        self,
        num_experts: int,
        *,
        per_token: int,
        intermediate_size: int,
        normalize_weights: bool,
        layers: tuple[bool, ...] | None = None,
        shared_intermediate_size: int = 0,
        shared_gate: bool = False,
    ) -> MoEConfig | None:
        """Returns a mixture that chooses the best of all experts by a softmax.

        Args:
            layers: whether each layer has experts; None: all do. If none has, the result is None.
        """
        if per_token > num_experts:
            raise self.refuse(self.per_token_field, f"at most the number of experts, {num_experts}")
        layers = (True,) * self.num_hidden_layers if layers is None else layers
        return (
            None
            if not any(layers)
            else MoEConfig(
                layers=layers,
                num_experts=num_experts,
                experts_per_token=per_token,
                intermediate_size=intermediate_size,
                shared_intermediate_size=shared_intermediate_size,
                scoring=Scoring.SOFTMAX,
                method=TopKMethod.GREEDY,
                num_groups=1,
                groups_per_token=1,
                normalize_weights=normalize_weights,
                weight_scale=1.0,
                shared_gate=shared_gate,
            )
        )

    def with_experts(
        self, attention: GQAConfig, moe: MoEConfig | None, *, switches: LlamaSwitches | None = None
    ) -> ModelConfig:
        return self.model(
            attention=attention,
            rope=self.rope(dim=attention.head_dim),
            intermediate_size=self.intermediate_size,
            moe=moe,
            switches=switches,
        )


class _QwenMoEFields(RoutedFields):
    num_experts_per_tok: Heads
    moe_intermediate_size: Size
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: Integers = ()

    def layers_with_experts(self) -> tuple[bool, ...]:
        return tuple(
            index not in self.mlp_only_layers and (index + 1) % self.decoder_sparse_step == 0
            for index in range(self.num_hidden_layers)
        )


class _Qwen3MoEFields(_QwenMoEFields):
    attention_bias: bool = False
    # NOTE: publishers mean a window from layer max_window_layers on; transformers has one in all layers.
    use_sliding_window: Literal[False] = False


def read_qwen3_moe(file: ConfigFile) -> ModelConfig:
    fields = _Qwen3MoEFields.read(file)
    bias, windows = fields.attention_bias, fields.uniform_windows(None)
    moe = fields.greedy_experts(
        fields.count_of_experts(),
        per_token=fields.num_experts_per_tok,
        intermediate_size=fields.moe_intermediate_size,
        normalize_weights=fields.norm_topk_prob,
        layers=fields.layers_with_experts(),
    )
    attention = fields.gqa(windows=windows, qkv_bias=bias, output_bias=bias, qk_norm=True)
    return fields.with_experts(attention, moe)


class _Qwen3VLMoEFields(_Qwen3MoEFields):
    # The weights of a token's experts always add up to 1.
    norm_topk_prob: Literal[True] = True


def read_qwen3_vl_moe(file: ConfigFile) -> ModelConfig:
    """Reads Qwen3-VL's language model with experts. Raises ConfigError if it is quantized, or as `read_qwen3_moe`
    does."""
    fields = _Qwen3VLMoEFields.read(file)
    if fields.quantization_config is not None:
        cure = "the experts of this family are supported as bfloat16, float16 or float32"
        raise fields.refuse("quantization_config", "null", cure=cure)
    if fields.hidden_size == 2 * fields.moe_intermediate_size:
        cure = "the order of the experts' axes shows in their sizes only"
        raise fields.refuse("moe_intermediate_size", "another number than half of hidden_size", cure=cure)
    config = read_qwen3_moe(file.with_values({"norm_topk_prob": True}))
    return replace(config, switches=LlamaSwitches(stacked_experts=True))


class _MixtralFields(RoutedFields):
    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 1_000_000.0
    num_experts_per_tok: Heads = 2
    sliding_window: Count | None = None


def read_mixtral(file: ConfigFile) -> ModelConfig:
    fields = _MixtralFields.read(file)
    windows = fields.uniform_windows(fields.sliding_window)
    moe = fields.greedy_experts(
        fields.count_of_experts(),
        per_token=fields.num_experts_per_tok,
        intermediate_size=fields.intermediate_size,
        normalize_weights=True,
    )
    return fields.with_experts(fields.gqa(windows=windows, qkv_bias=False, output_bias=False), moe)


class _Qwen2MoEFields(_QwenMoEFields):
    shared_expert_intermediate_size: Size
    qkv_bias: bool = True
    use_sliding_window: bool = False
    sliding_window: CountOrZero | None = None  # 0 in files that newer transformers wrote for models without windows
    max_window_layers: LayersOrZero = 0

    def windows(self) -> tuple[int | None, ...]:
        types = self.types_of_layers("full_attention", "sliding_attention")
        if not self.use_sliding_window:
            if "sliding_attention" in types:
                raise self.refuse("use_sliding_window", "true", cure="layer_types has sliding_attention")
            return (None,) * self.num_hidden_layers
        if not types:  # transformers and the publisher's code read max_window_layers differently
            raise self.refuse("layer_types", "full_attention or sliding_attention for each layer")
        if not self.sliding_window:
            raise self.refuse("sliding_window", "an integer of at least 1")
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in types)


def read_qwen2_moe(file: ConfigFile) -> ModelConfig:
    fields = _Qwen2MoEFields.read(file)
    moe = fields.greedy_experts(
        fields.count_of_experts(),
        per_token=fields.num_experts_per_tok,
        intermediate_size=fields.moe_intermediate_size,
        normalize_weights=fields.norm_topk_prob,
        layers=fields.layers_with_experts(),
        shared_intermediate_size=fields.shared_expert_intermediate_size,
        shared_gate=True,
    )
    return fields.with_experts(fields.gqa(windows=fields.windows(), qkv_bias=fields.qkv_bias, output_bias=False), moe)


class _GraniteMoEFields(RoutedFields):
    num_experts_per_tok: Heads = 2
    attention_bias: bool = False
    embedding_multiplier: Positive = 1.0
    residual_multiplier: Positive = 1.0
    attention_multiplier: Positive = 1.0
    logits_scaling: Positive = 1.0


def read_granite_moe(file: ConfigFile) -> ModelConfig:
    fields = _GraniteMoEFields.read(file)
    bias, windows = fields.attention_bias, fields.uniform_windows(None)
    moe = fields.greedy_experts(
        fields.count_of_experts(),
        per_token=fields.num_experts_per_tok,
        intermediate_size=fields.intermediate_size,
        normalize_weights=True,
    )
    switches = LlamaSwitches(
        embedding_multiplier=fields.embedding_multiplier,
        residual_multiplier=fields.residual_multiplier,
        logits_multiplier=1 / fields.logits_scaling,
    )
    attention = fields.gqa(windows=windows, qkv_bias=bias, output_bias=bias, scale=fields.attention_multiplier)
    return fields.with_experts(attention, moe, switches=switches)


class _OlmoeFields(RoutedFields):
    rms_norm_eps: Positive = 1e-5
    num_experts_per_tok: Heads = 8
    norm_topk_prob: bool = False
    attention_bias: bool = False


def read_olmoe(file: ConfigFile) -> ModelConfig:
    fields = _OlmoeFields.read(file)
    bias, windows = fields.attention_bias, fields.uniform_windows(None)
    attention = fields.gqa(windows=windows, qkv_bias=bias, output_bias=bias, qk_norm=True, qk_norm_of=QKNorm.ROW)
    moe = fields.greedy_experts(
        fields.count_of_experts(),
        per_token=fields.num_experts_per_tok,
        intermediate_size=fields.intermediate_size,
        normalize_weights=fields.norm_topk_prob,
    )
    return fields.with_experts(attention, moe)


class _HunYuanMoEFields(RoutedFields):
    per_token_field: ClassVar[str] = "moe_topk"
    rms_norm_eps: Positive = 1e-5
    attention_bias: bool = False
    moe_topk: Integers = (1,)  # one number, or one for each layer
    moe_intermediate_size: Integers = ()
    num_shared_expert: Integers = (1,)
    moe_layer_num_skipped: Literal[0] = 0
    use_mixed_mlp_moe: Literal[True] = True
    use_qk_norm: Literal[True] = True
    use_cla: Literal[False] = False
    use_mla: Literal[False] = False

    def check_layers_are_alike(self) -> None:
        if len(set(self.moe_topk)) != 1 or self.moe_topk[0] == 0:
            raise self.refuse("moe_topk", "one integer of at least 1 for all layers")
        if not set(self.moe_intermediate_size) <= {self.intermediate_size}:
            raise self.refuse("moe_intermediate_size", f"intermediate_size, {self.intermediate_size}, in all layers")
        if set(self.num_shared_expert) != {1}:
            raise self.refuse("num_shared_expert", "1 in all layers")


def read_hunyuan_moe(file: ConfigFile) -> ModelConfig:
    fields = _HunYuanMoEFields.read(file)
    fields.check_layers_are_alike()
    bias, windows = fields.attention_bias, fields.uniform_windows(None)
    attention = fields.gqa(
        windows=windows, qkv_bias=bias, output_bias=bias, qk_norm=True, qk_norm_of=QKNorm.TURNED_HEAD
    )
    moe = fields.greedy_experts(
        fields.count_of_experts(),
        per_token=fields.moe_topk[0],
        intermediate_size=fields.intermediate_size,
        normalize_weights=True,
        shared_intermediate_size=fields.intermediate_size,
    )
    return fields.with_experts(attention, moe)
