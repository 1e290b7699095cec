"""Computes a model's size and the cost of one token, from its configuration alone. Pure."""

from dataclasses import dataclass, replace

from baton.core.errors import ConfigError
from baton.kvcache.spec import DTYPE_BYTES
from baton.models.config.model_config import GQAConfig, MLAConfig, ModelConfig
from baton.models.config.mtp import mtp_config
from baton.models.config.quantization.config import Quantization
from baton.models.config.quantization.mxfp4_config import MXFP4_BLOCK, Mxfp4Config
from baton.models.config.recurrent import RecurrentConfig
from baton.planner import layer_sizes

_STATE_NUMBER_BYTES = 4  # states are in float32


@dataclass(frozen=True)
class ModelSize:
    """Parameter counts, and bytes where the name says so.

    Args:
        num_layers: a layer of two attentions counts as two.
        dense: all linear layers that every token uses, without head and embedding.
        experts: all routed experts together.
        head: the projection to the vocabulary.
        embedding: the tokens' embedding; 0 where it is the head.
        tables: other embeddings, which every rank holds.
        linear_bytes, expert_bytes, head_bytes: bytes of one parameter.
        expert_share: share of the experts that one token uses.
        kv_bytes: bytes of one token's KV.
        kv_heads: KV heads that ranks can divide; 1 for MLA, whose KV every rank holds.
        state_bytes: bytes of one request's recurrent state; 0: the model has none.
        state_heads: heads of the state that ranks can divide.
        pair_flops: operations for each pair of a prompt's token and a key.
        whole: the part of `dense` that every rank holds: projections to latents, indexers, and routers.
        latent_whole: the part of `whole` without routers.
        latent_attention: the part of `dense` that is the attention of a model with latents; 0: it has none.
        own_requests: whether each rank holds the KV of its own requests (attention data parallelism).
        copies: redundant experts, in addition to `experts`.
        ranks_min: fewest ranks such that a rank holds each expert at most once.
        windowed_share, window: share of layers that see only a window of recent tokens, and its size.
        draft: the layer for multi-token prediction, which takes memory, but no time in steps without draft tokens.
    """

    num_layers: int
    hidden_size: int
    dense: int
    experts: int
    head: int
    embedding: int
    tables: int
    linear_bytes: float
    expert_bytes: float
    head_bytes: int
    expert_share: float
    kv_bytes: int
    kv_heads: int
    state_bytes: int
    state_heads: int
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
    draft: "ModelSize | None" = None

    @property
    def cached_bytes(self) -> int:
        """Bytes of one token in the cache: its KV, also in the layer that drafts."""
        return self.kv_bytes + (0 if self.draft is None else self.draft.kv_bytes)

    @property
    def weight_bytes(self) -> int:
        linear = round(self.dense * self.linear_bytes + self.experts * self.expert_bytes)
        return linear + (self.head + self.embedding + self.tables) * self.head_bytes

    def rank_bytes(self, ranks: int) -> float:
        """Bytes of one rank's weights, with the layer that drafts. Ranks share the experts evenly, by channels or
        whole, with their copies."""
        whole = self.whole * self.linear_bytes + self.tables * self.head_bytes
        draft = 0.0 if self.draft is None else self.draft.rank_bytes(ranks)
        return (self.weight_bytes + self.copies * self.expert_bytes - whole) / ranks + whole + draft

    def with_own_attention(self) -> "ModelSize":
        """The sizes with attention data parallelism, where every rank holds all of attention.

        Raises:
            ConfigError: the model has no latents or no experts.
        """
        if not self.latent_attention or not self.experts:
            raise ConfigError(
                "attention data parallelism is for models with latent attention and experts",
                field="attention_data_parallel", value=True, allowed=("false",),
            )  # fmt: skip
        routers = self.whole - self.latent_whole
        draft = None if self.draft is None else self.draft.with_own_attention()
        return replace(self, whole=self.latent_attention + routers, own_requests=True, draft=draft)

    def rank_read_bytes(self, tokens: int, ranks: int) -> float:
        """`read_bytes` of one of several ranks."""
        whole = self.whole * self.linear_bytes if self.own_requests else 0.0
        return (self.read_bytes(tokens) - whole) / ranks + whole

    def read_bytes(self, tokens: int) -> float:
        """Bytes of the weights that a step of `tokens` tokens reads, with even routing."""
        experts = self.experts * (1 - (1 - self.expert_share) ** tokens) if self.experts else 0.0
        return self.dense * self.linear_bytes + experts * self.expert_bytes + self.head * self.head_bytes

    def dense_flops(self, tokens: int, *, heads: int) -> float:
        """Operations of a step's products, without the experts'; `heads`: tokens that need the head."""
        return 2.0 * tokens * self.dense + 2.0 * heads * self.head

    def expert_flops(self, tokens: int) -> float:
        return 2.0 * tokens * self.expert_share * self.experts


def model_size(config: ModelConfig, *, redundant_experts: int = 0) -> ModelSize:
    """The sizes of a model that runs in its own dtype.

    Args:
        redundant_experts: number of copies in each layer.

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
    attention, moe = config.attention, config.moe
    layers, attending = config.num_layers * config.attentions_per_layer, len(layer_sizes.layers_with_kv(config))
    attending *= config.attentions_per_layer
    if isinstance(attention, MLAConfig):
        query = attention.qk_nope_head_dim + attention.qk_rope_head_dim
        kv_numbers, kv_heads = attention.kv_lora_rank + attention.qk_rope_head_dim, 1
        pair_flops = 2.0 * attention.num_heads * (query + attention.v_head_dim)
        windows: tuple[int | None, ...] = ()
        kv_layers = attending
    else:
        kv_numbers, kv_heads = 2 * attention.num_kv_heads * attention.head_dim, attention.num_kv_heads
        pair_flops = 4.0 * attention.num_heads * attention.head_dim
        windows = attention.sliding_windows
        kv_layers = attending - attention.kv_shared_layers
    latents, indexers = layer_sizes.latents(config), layer_sizes.indexers(config)
    attention_numbers = layer_sizes.attention(config) + indexers
    whole = latents + indexers
    dense = attention_numbers + layer_sizes.mixers(config)
    dense += layer_sizes.dense_mlps(config) + layer_sizes.family_extras(config)
    experts, copies, share = 0, 0, 0.0
    if moe is not None:
        projections, to_choose = layer_sizes.projections(config), moe.num_experts + moe.zero_experts
        routers = sum(moe.layers) * config.hidden_size * to_choose
        whole += routers
        shared = projections * config.hidden_size * moe.shared_intermediate_size
        dense += routers + sum(moe.layers) * shared
        experts = sum(moe.layers) * moe.num_experts * projections * moe.intermediate_size
        experts *= layer_sizes.expert_size(config)
        copies = redundant_experts * experts // moe.num_experts
        share = moe.experts_per_token / max(1, to_choose)
    dtype_bytes = DTYPE_BYTES[config.dtype]
    linear_bytes, expert_bytes = _quantized_bytes(config.quantization, dtype_bytes)
    bounded = [window for window in windows if window]
    embedding = config.vocab_size * layer_sizes.embedding_size(config)
    state = config.recurrent or RecurrentConfig((), 1, 0)
    return ModelSize(
        num_layers=layers,
        hidden_size=config.hidden_size,
        dense=dense,
        experts=experts,
        head=embedding,
        embedding=0 if config.tie_word_embeddings else embedding,
        tables=layer_sizes.tables(config),
        linear_bytes=linear_bytes,
        expert_bytes=expert_bytes,
        head_bytes=dtype_bytes,
        expert_share=share,
        kv_bytes=(kv_layers * kv_numbers + _index_key_size(attention)) * dtype_bytes,
        kv_heads=kv_heads,
        state_bytes=_STATE_NUMBER_BYTES * state.num_layers * state.num_heads * state.head_channels,
        state_heads=state.num_heads,
        pair_flops=attending * pair_flops,
        max_context_tokens=config.max_context_tokens,
        whole=whole,
        latent_whole=latents + indexers,
        latent_attention=attention_numbers if isinstance(attention, MLAConfig) else 0,
        copies=copies,
        ranks_min=1 if moe is None else 1 + -(-redundant_experts // moe.num_experts),
        windowed_share=len(bounded) / layers,
        window=max(bounded, default=0),
        draft=_draft_size(config, redundant_experts) if config.drafts else None,
    )


def _draft_size(config: ModelConfig, redundant_experts: int) -> ModelSize:
    """The layer for multi-token prediction. It has the model's embedding and head, and a projection of its own."""
    size = model_size(mtp_config(config), redundant_experts=redundant_experts)
    projection = 2 * config.hidden_size * config.hidden_size
    return replace(size, dense=size.dense + projection, head=0, embedding=0, tables=0)


def _quantized_bytes(quantization: Quantization | None, dtype_bytes: int) -> tuple[float, float]:
    """Bytes of one parameter of linear layers, and of experts, without the scales of packed integers."""
    match quantization:
        case None:
            return dtype_bytes, dtype_bytes
        case Mxfp4Config():
            return dtype_bytes, quantization.weight_bytes + 1 / MXFP4_BLOCK
    return quantization.weight_bytes, quantization.weight_bytes


def _index_key_size(attention: GQAConfig | MLAConfig) -> int:
    """Size of one token's keys by which sparse attention selects it."""
    index = attention.index if isinstance(attention, MLAConfig) else None
    return 0 if index is None else sum(index.layers) * index.head_dim
