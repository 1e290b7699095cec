"""A model's configuration in one spelling for all families. It holds values only, so model code sees no files or
defaults.

`baton.models.families.reader` makes it from a checkpoint's config.json.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from attention.blocksparse import BlocksparseParams
from baton.models.config.quantization.config import Quantization
from baton.models.config.recurrent import RecurrentConfig
from baton.models.config.rope import LongRopeScaling, RopeConfig, YarnScaling


class QKNorm(StrEnum):
    """The numbers that each norm of queries and keys covers.

    HEAD: each head, before it turns; one weight for all heads. TURNED_HEAD: the same, after it turns. ROW: all heads of
    a token together, before they turn. OWN_WEIGHTS: each head, before it turns; weights for each head, and the mean is
    subtracted.
    """

    HEAD = "head"
    TURNED_HEAD = "turned_head"
    ROW = "row"
    OWN_WEIGHTS = "own_weights"


@dataclass(frozen=True)
class GQAConfig:
    """Grouped-query attention; tuples have one entry per layer.

    Attributes:
        qk_norm_of: the numbers that the norms cover, if there is `qk_norm`.
        sliding_windows: number of tokens that each layer sees; None: it sees all.
        scale: factor of the scores.
        attention_chunk_sizes: chunk size of layers that see only their own chunk; () if there are none.
        logits_soft_cap: scores become cap * tanh(score / cap).
        sinks: every head has one extra logit in its softmax.
        alibi_slopes: one per head; () without ALiBi.
        blocksparse: the pattern of layers that do not see all blocks; () if all layers see all.
        rotary_layers: whether each layer's queries and keys turn; () if all turn.
        kv_shared_layers: number of layers at the end without keys and values of their own. Each reads the KV of the
            last layer before them that has the same window, or also has none.
        layer_heads: (kv heads, channels of a head) of each layer, if layers differ; else (). num_kv_heads and head_dim
            are then the largest, and each layer's kv heads divide num_kv_heads.
        output_gate: the query projection also gives each head as many gate channels after the queries; their sigmoids
            are factors of the head's output.
        v_head_dim: channels of a head's values, if fewer than its keys'. Zeros follow them in the cache.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    scale: float
    attention_chunk_sizes: tuple[int | None, ...] = ()
    logits_soft_cap: float | None = None
    sinks: bool = False
    alibi_slopes: tuple[float, ...] = ()
    blocksparse: tuple[BlocksparseParams | None, ...] = ()
    qk_norm_of: QKNorm = QKNorm.HEAD
    rotary_layers: tuple[bool, ...] = ()
    kv_shared_layers: int = 0
    layer_heads: tuple[tuple[int, int], ...] = ()
    output_gate: bool = False
    v_head_dim: int | None = None

    @property
    def value_dim(self) -> int:
        """The channels of a head's values and outputs."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def num_kv_layers(self) -> int:
        """The number of layers with keys and values of their own. They come first."""
        return len(self.sliding_windows) - self.kv_shared_layers

    def kv_source(self, layer_index: int) -> int:
        """Returns the layer whose keys and values this layer reads: itself, unless it shares another's."""
        windows, owned = self.sliding_windows, self.num_kv_layers
        if layer_index < owned:
            return layer_index
        return max(index for index in range(owned) if windows[index] == windows[layer_index])

    def heads_of(self, layer_index: int) -> tuple[int, int]:
        """Returns (kv heads, channels of a head) of this layer."""
        return self.layer_heads[layer_index] if self.layer_heads else (self.num_kv_heads, self.head_dim)


@dataclass(frozen=True)
class IndexConfig:
    """Sparse attention (DeepSeek-V3.2), in which each query attends to the tokens that an indexer selects.

    Attributes:
        num_heads, head_dim: of the indexer's queries; all heads share one key.
        top_k: number of tokens that a query attends to; all, if it sees no more.
        interleaved: the indexer's queries and keys turn in interleaved pairs.
        layers: whether each layer has an indexer. A layer without one uses the selection of the last layer that has
            one.
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool
    layers: tuple[bool, ...]

    def cache_layer(self, layer_index: int) -> int:
        """Returns this layer's index among the layers with an indexer, which is the place of its keys in the cache."""
        return sum(self.layers[:layer_index])


@dataclass(frozen=True)
class MLAConfig:
    """Latent attention. Without `q_lora_rank`, queries come from one full projection.

    Attributes:
        index: None if every query attends to all tokens that it sees.
        query_multiplier, latent_multiplier: factors of queries, and of latents after their norm.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index: IndexConfig | None = None
    query_multiplier: float = 1.0
    latent_multiplier: float = 1.0


class TopKMethod(StrEnum):
    """The method that chooses a token's experts.

    GREEDY: the best of all. GROUP_LIMITED_GREEDY: the best within the groups with the best single experts. NOAUX_TC:
    like GROUP_LIMITED_GREEDY, but scores include a learnt correction, and a group ranks by its two best experts.
    SPARSE_MIXER (arXiv 2409.12136): the best of all, each weighted by a softmax over the experts that are near it and
    not yet chosen.
    """

    GREEDY = "greedy"
    GROUP_LIMITED_GREEDY = "group_limited_greedy"
    NOAUX_TC = "noaux_tc"
    SPARSE_MIXER = "sparse_mixer"


class Scoring(StrEnum):
    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts; `layers` says of each layer whether its MLP is one. A size of 0 means that the part does
    not exist.

    Attributes:
        mixer_threshold: for SPARSE_MIXER, how far below the best logit a near expert's may be, relative to the larger
            of the best logit and the expert's own absolute value.
        shared_gate: the shared experts' output is multiplied by the sigmoid of an extra logit per token.
        own: numbers of the experts that this rank holds; None: all. With a plan (`baton.models.config.expert_places`)
            only their count is right until the plan places them in the built model.
        zero_experts: number of extra experts, numbered after the others, that return their input.
    """

    layers: tuple[bool, ...]
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    scoring: Scoring
    method: TopKMethod
    num_groups: int
    groups_per_token: int
    normalize_weights: bool
    weight_scale: float
    router_bias: bool = False
    shared_gate: bool = False
    mixer_threshold: float = 0.0
    own: range | None = None
    zero_experts: int = 0

    @property
    def held(self) -> range:
        """The numbers of the experts in memory."""
        return range(self.num_experts) if self.own is None else self.own

    @property
    def zero_numbers(self) -> range:
        """The numbers of the experts that return their input."""
        return range(self.num_experts, self.num_experts + self.zero_experts)


@dataclass(frozen=True)
class EagleConfig:
    """An EAGLE-3 head (arXiv 2503.01840) and how it fits its model.

    Attributes:
        layer: the head's decoder layer as a Llama model of one layer, with the vocabulary and the context of the model
            that it drafts for.
        draft_vocab_size: number of tokens that it can draft.
        reads: the three layers of the model whose inputs it reads, in ascending order.
        norm_before_residual: the normed state, instead of the state itself, enters the layer's residual stream.
        own_embedding: it has an embedding of its own; without one it uses the model's.
        maps_tokens: it has a table (`d2t`) from its tokens to the model's; without one they have the same numbers.
    """

    layer: "ModelConfig"
    draft_vocab_size: int
    reads: tuple[int, ...]
    norm_before_residual: bool = False
    own_embedding: bool = False
    maps_tokens: bool = True

    @property
    def attention(self) -> GQAConfig:
        assert isinstance(self.layer.attention, GQAConfig), "the layer is Llama's"
        return self.layer.attention


@dataclass(frozen=True)
class ModelConfig:
    """One checkpoint's architecture.

    Attributes:
        norm_eps: of RMS norms, and of layer norms in the families that have those.
        dtype: dtype of the saved weights; float32 for float64.
        rope: None for models without rotary embedding.
        local_rope: the rotary embedding of layers with a sliding window, if they have their own.
        final_logits_soft_cap: the model's logits become cap * tanh(logit / cap).
        mtp_layers: number of layers for multi-token prediction that checkpoints store after the last layer.
        drafts: the first of these is loaded, to draft tokens.
        eagle: the EAGLE-3 head that drafts tokens instead; None: there is none.
        quantization: None if weights are not quantized.
        intermediate_sizes: of each layer's dense MLP, if they differ; intermediate_size is then the largest.
        switches: values that only this family has, in a frozen dataclass of its own.
        recurrent: None if every layer has KV.
        shortcut_experts: every layer has two attentions and two dense MLPs in turn. Its experts read the first MLP's
            input and are added after the second MLP (arXiv 2404.05019).
        headless: the language model head does not exist or is not used: hidden states are the model's result.
        num_labels: number of outputs of a classification head; 0: there is none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    mlp_bias: bool
    norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    attention: GQAConfig | MLAConfig
    rope: RopeConfig | None
    local_rope: RopeConfig | None = None
    final_logits_soft_cap: float | None = None
    moe: MoEConfig | None = None
    mtp_layers: int = 0
    quantization: Quantization | None = None
    switches: object = None
    intermediate_sizes: tuple[int, ...] = ()
    recurrent: RecurrentConfig | None = None
    shortcut_experts: bool = False
    headless: bool = False
    num_labels: int = 0
    drafts: bool = False
    eagle: EagleConfig | None = None

    def with_head(self, head: EagleConfig) -> Self:
        """Returns this model, drafting with an EAGLE-3 head and not with a layer of its own."""
        return replace(self, eagle=head, drafts=False)

    @property
    def has_draft_layer(self) -> bool:
        """Whether a layer that drafts tokens is loaded, the checkpoint's own or an EAGLE-3 head's."""
        return self.drafts or self.eagle is not None

    @property
    def attentions_per_layer(self) -> int:
        """The number of attentions of a layer; each has its own place in the cache."""
        return 2 if self.shortcut_experts else 1

    def cache_layer(self, layer_index: int) -> int:
        """Returns this layer's index among layers of its kind, which is the place in the cache of its state, or of its
        KV if it has no state."""
        if self.recurrent is None:
            return layer_index
        keeps = self.recurrent.layers
        return sum((keeps if keeps[layer_index] else self.recurrent.kv_layers)[:layer_index])

    def kv_layer(self, layer_index: int) -> int:
        """Returns the place of this layer's KV in the cache, also for a layer with a state."""
        return layer_index if self.recurrent is None else sum(self.recurrent.kv_layers[:layer_index])

    def mlp_size(self, layer_index: int) -> int:
        """Returns the channels of this layer's dense MLP."""
        return self.intermediate_sizes[layer_index] if self.intermediate_sizes else self.intermediate_size

    @property
    def max_context_tokens(self) -> int:
        """The longest prompt plus output. With YaRN it is the stretched context, which not every file repeats as the
        maximum; with LongRoPE's short factors it is the original context."""
        scaling = None if self.rope is None else self.rope.scaling
        if isinstance(scaling, LongRopeScaling) and not scaling.long:
            return min(self.max_position_embeddings, scaling.original_max_position_embeddings)
        if isinstance(scaling, YarnScaling):
            return max(self.max_position_embeddings, int(scaling.factor * scaling.original_max_position_embeddings))
        return self.max_position_embeddings

    def for_context(self, max_context_tokens: int | None) -> Self:
        """Returns this model for sequences of up to `max_context_tokens`; None: up to its own limit.

        LongRoPE uses its long factors if sequences may be longer than its original context; other models are unchanged.
        """
        scaling = None if self.rope is None else self.rope.scaling
        if self.rope is None or not isinstance(scaling, LongRopeScaling) or max_context_tokens is None:
            return self
        if min(max_context_tokens, self.max_position_embeddings) <= scaling.original_max_position_embeddings:
            return self
        return replace(self, rope=replace(self.rope, scaling=replace(scaling, long=True)))

    @property
    def attention_scale(self) -> float:
        """The factor of attention scores. YaRN's stretched context and larger queries enlarge it for latent
        attention."""
        attention = self.attention
        if isinstance(attention, GQAConfig):
            return attention.scale
        scale: float = (attention.qk_nope_head_dim + attention.qk_rope_head_dim) ** -0.5 * attention.query_multiplier
        scaling = None if self.rope is None else self.rope.scaling
        return scale * scaling.softmax_scale if isinstance(scaling, YarnScaling) else scale
