"""A model's configuration, in one spelling for all families: values only, so that model code sees no file or default.

`baton.models.families.reader` makes them from a checkpoint's config.json.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from attention.blocksparse import BlocksparseParams
from baton.models.config.quantization.config import Quantization
from baton.models.config.rope import LongRopeScaling, RopeConfig, YarnScaling


class QKNorm(StrEnum):
    """What the norms of queries and keys cover.

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
        qk_norm_of: what the norms cover, with `qk_norm`.
        sliding_windows: number of tokens that each layer sees; None: all.
        scale: factor of the scores.
        attention_chunk_sizes: of layers that see only their own chunk; () when no layer does.
        logits_soft_cap: scores become cap * tanh(score / cap).
        sinks: every head has one more logit in its softmax.
        alibi_slopes: one per head; () without ALiBi.
        blocksparse: the pattern of layers that do not see all blocks; () when all layers do.
        rotary_layers: whether each layer's queries and keys turn; () when all do.
        kv_shared_layers: how many layers at the end have no keys and values: each reads those of the last layer before
            them that has the same window or also has none.
        layer_heads: (kv heads, channels of a head) of each layer, where layers differ; num_kv_heads and head_dim are
            then the largest, of which each number of kv heads is a divisor. () where all layers have these.
        output_gate: the projection of queries also gives each head as many channels after them, whose sigmoids are
            factors of the head's output.
        v_head_dim: channels of a head's values, where they have fewer than its keys. Zeros follow them in the cache.
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
        """Channels of a head's values and outputs."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def num_kv_layers(self) -> int:
        """How many layers have keys and values of their own. They come first."""
        return len(self.sliding_windows) - self.kv_shared_layers

    def kv_source(self, layer_index: int) -> int:
        """The layer whose keys and values this layer reads: itself, unless it shares another's."""
        windows, owned = self.sliding_windows, self.num_kv_layers
        if layer_index < owned:
            return layer_index
        return max(index for index in range(owned) if windows[index] == windows[layer_index])

    def heads_of(self, layer_index: int) -> tuple[int, int]:
        """(kv heads, channels of a head) of this layer."""
        return self.layer_heads[layer_index] if self.layer_heads else (self.num_kv_heads, self.head_dim)


@dataclass(frozen=True)
class IndexConfig:
    """Sparse attention (DeepSeek-V3.2): each query attends to the tokens that an indexer selects for it.

    Attributes:
        num_heads, head_dim: of the indexer's queries; all share one key.
        top_k: how many tokens a query attends to; all, where it sees no more.
        interleaved: how the indexer's queries and keys turn.
        layers: whether each layer has an indexer. Those without attend to what the last layer with one selected.
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool
    layers: tuple[bool, ...]

    def cache_layer(self, layer_index: int) -> int:
        """The number of this layer among those with an indexer: where its keys are in the cache."""
        return sum(self.layers[:layer_index])


@dataclass(frozen=True)
class MLAConfig:
    """Latent attention; without `q_lora_rank` queries come from one full projection.

    Attributes:
        index: None where every query attends to all tokens that it sees.
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


@dataclass(frozen=True)
class RecurrentConfig:
    """Layers that keep a state in place of KV. What they compute is in the family's `switches`.

    Attributes:
        layers: for each layer, whether it is one.
        num_heads: parts of equal size, by which ranks split the state.
        head_channels: float32 numbers of one part in one layer.
        has_kv: for each layer, whether it has KV, where that is not every layer without a state: there are layers with
            neither (an MLP alone) and layers with both. () otherwise.
        num_groups: groups of neighbouring heads that share some of their inputs; 0: heads share none.
        ranks_per_group: how many ranks have parts of the same group of heads.
    """

    layers: tuple[bool, ...]
    num_heads: int
    head_channels: int
    has_kv: tuple[bool, ...] = ()
    num_groups: int = 0
    ranks_per_group: int = 1

    @property
    def num_layers(self) -> int:
        return sum(self.layers)

    @property
    def kv_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it has KV."""
        return self.has_kv or tuple(not keeps for keeps in self.layers)


class TopKMethod(StrEnum):
    """How the experts of a token are chosen.

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
    """Mixture of experts; `layers` says for each layer whether its MLP is one. Sizes of 0 mean that there is none.

    Attributes:
        mixer_threshold: of SPARSE_MIXER, how far below the best an expert's logit may be to be near it, as a part of
            the larger of the best logit and the expert's own absolute value.
        shared_gate: the shared experts' output is multiplied by the sigmoid of one more logit of each token.
        own: numbers of the experts that this rank holds, or with a plan (`baton.models.config.expert_places`), by which
        the model is
            placed once it is made, of as many experts; None: all.
        zero_experts: how many more experts, numbered after the others, give their input back.
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
        """Numbers of the experts in memory."""
        return range(self.num_experts) if self.own is None else self.own

    @property
    def zero_numbers(self) -> range:
        """Numbers of the experts that give their input back."""
        return range(self.num_experts, self.num_experts + self.zero_experts)


@dataclass(frozen=True)
class ModelConfig:
    """One checkpoint's architecture.

    Attributes:
        norm_eps: of RMS norms, and of layer norms in the families that have those.
        dtype: of the saved weights; float32 for float64.
        rope: None for models without rotary embedding.
        local_rope: of the layers with a sliding window, where they have their own.
        final_logits_soft_cap: the model's logits become cap * tanh(logit / cap).
        mtp_layers: number of layers that checkpoints store after the last, for multi-token prediction.
        quantization: None where weights are not quantized.
        intermediate_sizes: of each layer's dense MLP, where they differ; intermediate_size is then the largest.
        switches: values of this family alone, in a frozen dataclass of its own.
        recurrent: None where every layer has KV.
        shortcut_experts: every layer has two attentions and two dense MLPs by turns, and experts that read what its
            first MLP reads and are added after its second one (arXiv 2404.05019).
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

    @property
    def attentions_per_layer(self) -> int:
        """Each has a place of its own in the cache."""
        return 2 if self.shortcut_experts else 1

    def cache_layer(self, layer_index: int) -> int:
        """The number of this layer among those of its kind: where its state, or its KV if it has no state, is in the
        cache."""
        if self.recurrent is None:
            return layer_index
        keeps = self.recurrent.layers
        return sum((keeps if keeps[layer_index] else self.recurrent.kv_layers)[:layer_index])

    def kv_layer(self, layer_index: int) -> int:
        """Where this layer's KV is in the cache, also if it has a state as well."""
        return layer_index if self.recurrent is None else sum(self.recurrent.kv_layers[:layer_index])

    def mlp_size(self, layer_index: int) -> int:
        """The channels of this layer's dense MLP."""
        return self.intermediate_sizes[layer_index] if self.intermediate_sizes else self.intermediate_size

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt plus output: with YaRN the stretched context, which not every file repeats as the maximum;
        with the short factors of LongRoPE the original one."""
        scaling = None if self.rope is None else self.rope.scaling
        if isinstance(scaling, LongRopeScaling) and not scaling.long:
            return min(self.max_position_embeddings, scaling.original_max_position_embeddings)
        if isinstance(scaling, YarnScaling):
            return max(self.max_position_embeddings, int(scaling.factor * scaling.original_max_position_embeddings))
        return self.max_position_embeddings

    def for_context(self, max_context_tokens: int | None) -> Self:
        """This model, for sequences of up to that many tokens; None: of any number up to its own limit.

        LongRoPE takes its long factors where sequences may be longer than its original context; others stay as they
        are.
        """
        scaling = None if self.rope is None else self.rope.scaling
        if self.rope is None or not isinstance(scaling, LongRopeScaling) or max_context_tokens is None:
            return self
        if min(max_context_tokens, self.max_position_embeddings) <= scaling.original_max_position_embeddings:
            return self
        return replace(self, rope=replace(self.rope, scaling=replace(scaling, long=True)))

    @property
    def attention_scale(self) -> float:
        """Factor of attention scores. YaRN's stretched context and larger queries make that of latent attention
        larger."""
        attention = self.attention
        if isinstance(attention, GQAConfig):
            return attention.scale
        scale: float = (attention.qk_nope_head_dim + attention.qk_rope_head_dim) ** -0.5 * attention.query_multiplier
        scaling = None if self.rope is None else self.rope.scaling
        return scale * scaling.softmax_scale if isinstance(scaling, YarnScaling) else scale
