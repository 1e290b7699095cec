"""What a model weighs, and what one token of it costs, from its configuration alone. Pure."""

from dataclasses import dataclass, replace

from baton.errors import ConfigError
from kvcache.spec import DTYPE_BYTES
from models.config.model_config import MLAConfig, ModelConfig

# Their MLPs have two projections, without a gate.
_UNGATED = ("ArceeForCausalLM", "BloomForCausalLM", "FalconForCausalLM")


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters, and bytes where the name says so.

    Args:
        num_layers: a layer of two attentions counts as two.
        dense: of all linear layers that every token uses, without head and embedding.
        experts: of all routed experts together.
        head: of the projection to the vocabulary.
        embedding: 0 where it is the head.
        linear_bytes, head_bytes: of one parameter.
        expert_share: the part of the experts that one token uses.
        kv_bytes: of one token's KV.
        kv_heads: that ranks can divide; 1 for MLA, whose KV every rank holds.
        pair_flops: operations for each pair of a prompt's token and a key.
        whole: of `dense`, what every rank holds: the projections to latents, and routers.
        latent_whole: of `whole`, the projections to latents.
        latent_attention: of `dense`, the attention of a model with latents; 0: it has none.
        own_requests: each rank holds the KV of its own requests (attention data parallelism).
        copies: of redundant experts, in addition to `experts`.
        ranks_min: ranks over which each expert is at most once on a rank.
        windowed_share: of the layers that see only a window of recent tokens, and the window.
    """

    num_layers: int
    hidden_size: int
    dense: int
    experts: int
    head: int
    embedding: int
    linear_bytes: float
    head_bytes: int
    expert_share: float
    kv_bytes: int
    kv_heads: int
    pair_flops: float
    max_context_tokens: int
    whole: int = 0
    latent_whole: int = 0
    latent_attention: int = 0
    own_requests: bool = False
    copies: int = 0
    ranks_min: int = 1
    windowed_share: float = 0.0
    window: int = 0

    @property
    def weight_bytes(self) -> int:
        linear = round((self.dense + self.experts) * self.linear_bytes)
        return linear + (self.head + self.embedding) * self.head_bytes

    def rank_bytes(self, ranks: int) -> float:
        """Weights of one of several ranks. They share the experts evenly, by channels or whole, with their copies."""
        whole = self.whole * self.linear_bytes
        return (self.weight_bytes + self.copies * self.linear_bytes - whole) / ranks + whole

    def with_own_attention(self) -> "ModelSize":
        """With attention data parallelism: every rank holds all of attention.

        Raises:
            ConfigError: the model has no latents or no experts.
        """
        if not self.latent_attention or not self.experts:
            raise ConfigError(
                "attention data parallelism is for models with latent attention and experts",
                field="attention_data_parallel", value=True, allowed=("false",),
            )  # fmt: skip
        routers = self.whole - self.latent_whole
        return replace(self, whole=self.latent_attention + routers, own_requests=True)

    def rank_read_bytes(self, tokens: int, ranks: int) -> float:
        """`read_bytes` of each of several ranks."""
        whole = self.whole * self.linear_bytes if self.own_requests else 0.0
        return (self.read_bytes(tokens) - whole) / ranks + whole

    def read_bytes(self, tokens: int) -> float:
        """The weights that a step of so many tokens reads, with even routing."""
        experts = self.experts * (1 - (1 - self.expert_share) ** tokens) if self.experts else 0.0
        return (self.dense + experts) * self.linear_bytes + self.head * self.head_bytes

    def dense_flops(self, tokens: int, *, heads: int) -> float:
        """Operations of a step's products, without the experts'; `heads`: tokens that need the head."""
        return 2.0 * tokens * self.dense + 2.0 * heads * self.head

    def expert_flops(self, tokens: int) -> float:
        return 2.0 * tokens * self.expert_share * self.experts


def model_size(config: ModelConfig, *, redundant_experts: int = 0) -> ModelSize:
    """The sizes of a model that runs in its own dtype.

    Args:
        redundant_experts: copies in each layer.

    Raises:
        ConfigError: the model has no experts.
    """
    if redundant_experts and config.moe is None:
        raise ConfigError(
            f"{config.architecture} has no experts to copy",
            field="redundant_experts",
            value=redundant_experts,
            allowed=("0",),
        )
    hidden = config.hidden_size
    attention, layers = config.attention, config.num_layers * config.attentions_per_layer
    if isinstance(attention, MLAConfig):
        heads = attention.num_heads
        query = attention.qk_nope_head_dim + attention.qk_rope_head_dim
        queries = hidden * heads * query
        if attention.q_lora_rank is not None:
            queries = (hidden + heads * query) * attention.q_lora_rank
        latent = attention.kv_lora_rank + attention.qk_rope_head_dim
        per_layer = queries + hidden * latent + heads * attention.v_head_dim * hidden
        per_layer += attention.kv_lora_rank * heads * (attention.qk_nope_head_dim + attention.v_head_dim)
        whole = latent_whole = layers * hidden * (latent + (attention.q_lora_rank or 0))
        latent_attention = layers * per_layer
        kv_numbers, kv_heads = latent, 1
        pair_flops = 2.0 * heads * (query + attention.v_head_dim)
        windows: tuple[int | None, ...] = ()
        kv_layers = layers
    else:
        whole = latent_whole = latent_attention = 0
        per_layer = 2 * hidden * attention.head_dim * (attention.num_heads + attention.num_kv_heads)
        kv_numbers, kv_heads = 2 * attention.num_kv_heads * attention.head_dim, attention.num_kv_heads
        pair_flops = 4.0 * attention.num_heads * attention.head_dim
        windows = attention.sliding_windows
        kv_layers = attention.num_kv_layers
    if config.recurrent is not None:
        kv_layers = sum(config.recurrent.kv_layers)
    projections = 2 if config.architecture in _UNGATED else 3
    moe = config.moe
    moe_layers = 0 if moe is None else sum(moe.layers)
    dense_layers = layers if config.shortcut_experts else layers - moe_layers
    dense = layers * per_layer + dense_layers * projections * hidden * config.intermediate_size
    experts, copies, share = 0, 0, 0.0
    if moe is not None:
        to_choose = moe.num_experts + moe.zero_experts
        whole += moe_layers * hidden * to_choose
        dense += moe_layers * hidden * (projections * moe.shared_intermediate_size + to_choose)
        experts = moe_layers * moe.num_experts * projections * hidden * moe.intermediate_size
        copies = redundant_experts * experts // moe.num_experts
        share = moe.experts_per_token / max(1, to_choose)
    head_bytes = DTYPE_BYTES[config.dtype]
    bounded = [window for window in windows if window]
    return ModelSize(
        num_layers=layers,
        hidden_size=hidden,
        dense=dense,
        experts=experts,
        head=config.vocab_size * hidden,
        embedding=0 if config.tie_word_embeddings else config.vocab_size * hidden,
        linear_bytes=head_bytes if config.quantization is None else config.quantization.weight_bytes,
        head_bytes=head_bytes,
        expert_share=share,
        kv_bytes=kv_layers * kv_numbers * head_bytes,
        kv_heads=kv_heads,
        pair_flops=layers * pair_flops,
        max_context_tokens=config.max_context_tokens,
        whole=whole,
        latent_whole=latent_whole,
        latent_attention=latent_attention,
        copies=copies,
        ranks_min=1 if moe is None else 1 + -(-redundant_experts // moe.num_experts),
        windowed_share=len(bounded) / layers,
        window=max(bounded, default=0),
    )
