"""What an attention backend is: what it can do, and the three calls that the layers make.

`plan` once per batch turns the common metadata into what this backend's kernels want; it may read tensors in CPU
memory and may fill persistent buffers. `forward` once per layer touches only tensors, never their values, so that it
can be captured in a CUDA graph where `capabilities.cudagraph` says so.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from attention.cache_ops import TokenIndex, WriteIndex
from attention.layout import KVCacheLayout
from attention.metadata import CommonAttentionMetadata
from attention.spec import KVKind


class AttentionFeature(StrEnum):
    """What a model asks for beyond causal attention."""

    SLIDING_WINDOW = "sliding_window"


@dataclass(frozen=True)
class BackendCapabilities:
    """None for sizes means any."""

    name: str
    kind: KVKind
    devices: frozenset[str]
    dtypes: frozenset[str]
    head_sizes: frozenset[int] | None
    block_sizes: frozenset[int] | None
    layouts: frozenset[KVCacheLayout]
    features: frozenset[AttentionFeature]
    cudagraph: bool


@dataclass(frozen=True)
class AttentionNeeds:
    """What a model on a node asks of a backend. `head_size` is the cache's channels; for MLA latent plus rotary."""

    kind: KVKind
    device: str
    dtype: str
    head_size: int
    block_size: int
    layout: KVCacheLayout
    features: frozenset[AttentionFeature] = frozenset()


@dataclass(frozen=True)
class AttentionMetadata:
    """What the layers themselves need of a planned batch; each backend adds its own.

    Attributes:
        new_tokens: where the batch's KV goes.
        num_actual_tokens: rows of the query that count; outputs past them are left as they are.
    """

    new_tokens: WriteIndex
    num_actual_tokens: int


class AttentionBackend(Protocol):
    capabilities: ClassVar[BackendCapabilities]

    def plan(self, common: CommonAttentionMetadata) -> AttentionMetadata: ...

    def forward(
        self,
        q_THD: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None,
        out: Tensor,
    ) -> None:
        """Attends to one layer [K, B, N, H, C], in which the batch's own KV is already written; writes into `out`.

        GQA: all tokens of the batch. MLA: the decodes, whose queries are latent, [T, H, C]; the values are the first
        `out.shape[-1]` channels of the latent.
        """
        ...


@dataclass(frozen=True)
class ContextChunk:
    """Some context of some prefills, as much as the workspace holds.

    Attributes:
        tokens: where that context lies in the cache, request after request.
        num_tokens: how many tokens that is.
        query_start, query_stop: the queries of these prefills, counted from the first prefill token.
        query_start_loc, key_start_loc: where each of these prefills' queries and keys start, from 0.
    """

    tokens: TokenIndex
    num_tokens: int
    query_start: int
    query_stop: int
    query_start_loc: tuple[int, ...]
    key_start_loc: tuple[int, ...]


@dataclass(frozen=True)
class MLAMetadata(AttentionMetadata):
    """Attributes:
    num_decode_tokens: the first tokens of the batch; all others are prefill tokens.
    prefill_start_loc: where each prefill's queries start, counted from the first prefill token; () without prefills.
    context_chunks: the prefills' context, in order.
    """

    num_decode_tokens: int
    prefill_start_loc: tuple[int, ...]
    context_chunks: tuple[ContextChunk, ...]


@runtime_checkable
class MLABackend(AttentionBackend, Protocol):
    """A backend for latent caches: besides the decodes, attention over keys and values that are no longer latent.

    Attributes:
        workspace: [tokens, C] memory for one context chunk's latents, shared by all layers.
    """

    workspace: Tensor

    def plan(self, common: CommonAttentionMetadata) -> MLAMetadata: ...

    def attend(
        self,
        q_THD: Tensor,
        k_SHD: Tensor,
        v_SHV: Tensor,
        *,
        query_start_loc: tuple[int, ...],
        key_start_loc: tuple[int, ...],
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Each request's queries over its own keys: output [T, H, V] and log-sum-exp [H, T], both float32.

        Causal: a request's last query sees all of its keys, the one before it all but one, and so on.
        """
        ...
