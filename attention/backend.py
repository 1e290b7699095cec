"""The interface of attention backends: capabilities, metadata builder, and the calls that layers make.

The builder runs once per batch, may read tensors in CPU memory and fills persistent buffers. `forward` runs once per
layer and never reads a tensor's values on the host, so a CUDA graph can capture it where the capabilities allow.
Legend: T tokens, S keys, H heads, D key channels, V value channels, C latent plus rotary channels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from attention.metadata import AttentionMetadata
from attention.metadata_builder import AttentionMetadataBuilder
from attention.parameters import AttentionParameters
from attention.platform import Platform
from attention.quantized_output import QuantizedOutput
from attention.sparse import SparseQueries
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVKind
from baton.kvcache.tokens import TokenRanges


class AttentionFeature(StrEnum):
    """A feature beyond causal attention that a model can require; `attention.parameters` defines each."""

    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    SOFT_CAP = "soft_cap"
    ALIBI = "alibi"
    SINKS = "sinks"
    BLOCK_SPARSE = "block_sparse"
    UNEQUAL_HEADS = "unequal_heads"  # layers differ in kv heads or head size
    ENCODER = "encoder"  # ENCODER, ENCODER_ONLY and ENCODER_DECODER
    ENCODER_WINDOW = "encoder_window"  # a window on both sides of an encoder's tokens
    SPARSE = "sparse"  # latent attention to the tokens that an indexer selects
    QUANTIZED_QUERY = "quantized_query"  # queries in fp8; offered, never needed
    CASCADE = "cascade"  # a shared prefix is computed once; offered, never needed


@dataclass(frozen=True)
class BackendCapabilities:
    """The capabilities of a backend. A size of None means any size.

    Attributes:
        devices: "cuda"; "cpu" for plain torch; Triton's interpreter counts as "cuda".
        dtypes: of queries and activations.
        kv_dtypes: of the cache.
        cudagraph: a decode step can be captured and replayed with other lengths.
        min_compute_capability: of the GPU.
        package: package that must be installed, by its import name.
        install: command that installs it.
        uniform_layers: all layers must share window, soft cap and scale.
        batch_invariant: on request, a request's result has the same bits alone and in any batch.
        rows_in_order: then a token has the same bits as a decode and in any chunk of a prompt. A batch-invariant node
            takes only backends that have both.
        reasons_against_plans: returns why the package could not plan some batch within a node's limits; None: it always
            can.
    """

    name: str
    kind: KVKind
    devices: frozenset[str]
    dtypes: frozenset[str]
    kv_dtypes: frozenset[str]
    head_sizes: frozenset[int] | None
    block_sizes: frozenset[int] | None
    layouts: frozenset[KVCacheLayout]
    features: frozenset[AttentionFeature]
    cudagraph: bool
    min_compute_capability: tuple[int, int] | None = None
    package: str | None = None
    install: str = ""
    uniform_layers: bool = False
    batch_invariant: bool = False
    rows_in_order: bool = False
    reasons_against_plans: Callable[["AttentionNeeds", Platform], tuple[str, ...]] | None = None


@dataclass(frozen=True)
class MLADims:
    """Head sizes of a model with latent attention.

    Attributes:
        top_k: number of tokens that each query attends to with sparse attention; 0: all that it sees.
    """

    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int
    top_k: int = 0


@dataclass(frozen=True)
class AttentionNeeds:
    """The requirements of one model on one node.

    Attributes:
        device: torch's name, with the index if there is one.
        dtype: of queries and activations.
        head_size: the cache's channels; for MLA latent plus rotary.
        kv_dtype: of the cache; "" means `dtype`.
        num_heads, num_kv_heads: this rank's.
        max_num_reqs, max_model_len, max_num_tokens: most requests, longest sequence and most new tokens of any batch,
            for buffers that are allocated once.
        layers: each attention layer's parameters, by name, without tensors, because none exist yet.
        mla: head sizes of latent attention; None otherwise.
        batch_invariant: a token must have the same bits alone, in any batch, as a decode and in any chunk of a prompt.
    """

    kind: KVKind
    device: str
    dtype: str
    head_size: int
    block_size: int
    layout: KVCacheLayout
    features: frozenset[AttentionFeature] = frozenset()
    kv_dtype: str = ""
    num_heads: int = 1
    num_kv_heads: int = 1
    max_num_reqs: int = 256
    max_model_len: int = 8192
    max_num_tokens: int = 8192
    layers: Mapping[str, AttentionParameters] = field(default_factory=lambda: MappingProxyType({}))
    mla: MLADims | None = None
    batch_invariant: bool = False

    @property
    def cache_dtype(self) -> str:
        return self.kv_dtype or self.dtype


class AttentionBackend(Protocol):
    capabilities: ClassVar[BackendCapabilities]

    @property
    def builder(self) -> AttentionMetadataBuilder[AttentionMetadata]: ...

    def forward(
        self,
        q_THD: Tensor,
        k_THD: Tensor | None,
        v_THV: Tensor | None,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
        *,
        layer: AttentionParameters,
        out: Tensor,
    ) -> None:
        """Attends to one layer [K, B, N, H, C] of the cache, which already holds the batch's own KV; writes into `out`.

        GQA: computes all tokens of the batch. k and v are the batch's own keys and values, which a kernel may read in
        place of the cache's copies. They are None where the layer has no keys of its own (a shared cache, an encoder's
        keys of an earlier step). For ENCODER and ENCODER_ONLY they are all keys and values, and `kv_layer` is not read.
        MLA: computes only the decodes, or one run of `absorbed_prefills`. Their queries are latent, [T, H, C], the
        values are the first `out.shape[-1]` channels of the latent, and k and v are None.
        """
        ...


@runtime_checkable
class QuantizingBackend(AttentionBackend, Protocol):
    """A backend whose kernels can quantize their output for the layer that reads it."""

    def quantizes(self, metadata: AttentionMetadata, *, num_tokens: int, head_size: int) -> bool:
        """Whether `forward_quantized` takes this batch of a layer. `num_tokens` counts padding too."""
        ...

    def forward_quantized(
        self,
        q_THD: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
        *,
        layer: AttentionParameters,
        out: QuantizedOutput,
    ) -> None:
        """Does what `forward` does, and quantizes the result."""
        ...


@dataclass(frozen=True)
class RaggedLens:
    """The start of each request's queries and keys in tensors that hold all requests.

    Attributes:
        query_start_loc, key_start_loc: [R + 1] int32 on the device, each request's first query and key, from 0.
        query_start_loc_cpu, key_start_loc_cpu: the same numbers on the CPU.
    """

    query_start_loc: Tensor
    key_start_loc: Tensor
    query_start_loc_cpu: tuple[int, ...]
    key_start_loc_cpu: tuple[int, ...]

    @property
    def max_query_len(self) -> int:
        starts = self.query_start_loc_cpu
        return max(stop - start for start, stop in pairwise(starts))


@dataclass(frozen=True)
class ContextChunk:
    """A part of some prefills' context that fits the workspace.

    Attributes:
        tokens: the places of the chunk's context in the cache, request after request.
        num_tokens: number of context tokens in the chunk.
        query_start, query_stop: the queries of these prefills, counted from the first prefill token.
        lens: for these prefills' queries and for their keys in this chunk.
    """

    tokens: TokenRanges
    num_tokens: int
    query_start: int
    query_stop: int
    lens: RaggedLens


@dataclass(frozen=True)
class AbsorbedPrefills:
    """A run of prefill tokens that attend to the latents themselves, like decodes.

    Attributes:
        start, stop: the tokens, counted from the first prefill token.
        metadata: what `AttentionBackend.forward` takes for these tokens.
    """

    start: int
    stop: int
    metadata: AttentionMetadata


@dataclass(frozen=True)
class MLAMetadata(AttentionMetadata):
    """The plan of a batch of latent attention.

    Attributes:
        num_decode_tokens: number of decode tokens, which come first in the batch; all others are prefill tokens.
        prefill: the prefills' own tokens as queries and as keys; None without prefills.
        context_chunks: the prefills' context, in order.
        absorbed_prefills: all prefill tokens, where prompts have the order of decodes; () elsewhere. `context_chunks`
            are then empty.
        prefill_base: the token from which `prefill` counts. It may lie among the decode tokens; prefills then overwrite
            what decodes wrote for their tokens. None: the first token after the decodes.
        sparse_decodes, sparse_prefills: the queries that attend to selected tokens; None: they attend to all that they
            see.
    """

    num_decode_tokens: int
    prefill: RaggedLens | None
    context_chunks: tuple[ContextChunk, ...]
    absorbed_prefills: tuple[AbsorbedPrefills, ...] = field(default=(), kw_only=True)
    sparse_decodes: SparseQueries | None = field(default=None, kw_only=True)
    sparse_prefills: SparseQueries | None = field(default=None, kw_only=True)
    prefill_base: int | None = field(default=None, kw_only=True)


@runtime_checkable
class MLABackend(AttentionBackend, Protocol):
    """A backend for latent caches: decodes, and attention over decompressed keys and values.

    Attributes:
        workspace: [tokens, C] memory for one context chunk's latents, shared by all layers.
        pads_v: `attend` needs values as wide as keys; the layer then pads them with zeros and cuts the output.
    """

    workspace: Tensor
    pads_v: ClassVar[bool]

    @property
    def builder(self) -> AttentionMetadataBuilder[MLAMetadata]: ...

    def attend(
        self,
        q_THD: Tensor,
        k_SHD: Tensor,
        v_SHV: Tensor,
        *,
        lens: RaggedLens,
        causal: bool,
        scale: float,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attends with each request's queries to its own keys. Returns the output [T, H, V] in the queries' dtype or
        float32, and the natural log-sum-exp [H, T] in float32. A request without keys has output 0 and log-sum-exp
        -inf.

        Causal: a request's last query sees all of its keys, the one before it all but one, and so on.

        Args:
            out: memory for the returned output, in the queries' dtype with adjacent channels; None: the backend
                allocates it.
        """
        ...


@runtime_checkable
class SparseMLABackend(MLABackend, Protocol):
    """A latent backend for models that select the tokens to which each query attends."""

    def select(self, q_THD: Tensor, weights_TH: Tensor, index_layer: Tensor, queries: SparseQueries) -> Tensor:
        """Returns the slots [T, queries.width] int32 of the tokens with the best scores, in the order of their
        positions. Among equal scores the first token wins. A token's score is the sum over heads of weight * relu(q.k).

        Slots past `queries.counts_T` are undefined.

        Args:
            weights_TH: float32.
            index_layer: [1, B, N, 1, D]; it already holds the batch's own keys.
        """
        ...

    def attend_selected(
        self,
        q_THC: Tensor,
        kv_layer: Tensor,
        slots_TK: Tensor,
        queries: SparseQueries,
        *,
        layer: AttentionParameters,
        out: Tensor,
    ) -> None:
        """Attends with latent queries to the latents in these slots only, and writes into `out`."""
        ...
