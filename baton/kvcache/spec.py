"""Describes one token's KV (`KVCacheSpec`), and how one node keeps it (`KVCacheShape`). Pure values; no torch.

Some models keep more than KV for a request. Each such part is a cache of its own, next to the KV cache, with its own
spec: `index` holds the keys by which sparse attention selects tokens, `draft` the KV of layers that draft tokens, and
`state` what recurrent layers remember. Code that moves, cuts or digests KV treats all parts alike; their layers are
numbered consecutively (`parts`).
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from types import MappingProxyType

from baton.core.errors import ConfigError
from baton.kvcache.layout import KVCacheLayout

# Dtypes of activations, and of a cache that stores KV as computed.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Dtypes of a cache that stores KV in 8 bits, with one scale per tensor (`baton.kvcache.scales`).
FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
KV_DTYPE_BYTES = {**DTYPE_BYTES, **dict.fromkeys(FP8_DTYPES, 1)}
# Values of --kv-cache-dtype, and the cache dtype that each means; "" is the dtype of the model.
KV_CACHE_DTYPES = MappingProxyType({"auto": "", **dict(zip(("fp8_e4m3", "fp8_e5m2"), FP8_DTYPES, strict=True))})

# A request's tokens are cut at multiples of this. Such cuts fall inside no block of a usual size, which matters because
# a gather copies runs of a block's tokens.
ALIGN_TOKENS = 64


class KVKind(StrEnum):
    """The kind of a cache. GQA: a key and a value per kv head. MLA: one latent plus one rotary part per token, shared
    by all heads. STATE: what a recurrent layer remembers of all tokens so far, split by heads."""

    GQA = "gqa"
    MLA = "mla"
    STATE = "state"


@dataclass(frozen=True)
class KVCacheSpec:
    """One token's KV, the same on every node that serves the model.

    head_dim is the size of the channel axis C: for MLA the latent plus the rotary dimensions, with num_kv_heads 1.

    Attributes:
        windows: for each layer, the number of tokens that a token attends to, itself included; 0: all. Empty: no layer
            has a window.
        index: spec of the keys by which sparse attention selects tokens, of kind MLA; they lie in the same blocks,
            token for token.
        draft: spec of the KV of layers that draft tokens, in the same blocks. It may have an index of its own.
        state: spec of the state of each request, not of each token: num_kv_heads heads of head_dim numbers for each
            recurrent layer. Its `num_layers` counts only recurrent layers, and this spec's does not count them.
    """

    kind: KVKind
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    windows: tuple[int, ...] = ()
    index: "KVCacheSpec | None" = None
    state: "KVCacheSpec | None" = None
    draft: "KVCacheSpec | None" = None

    @property
    def parts(self) -> "tuple[KVCacheSpec, ...]":
        """This spec, then those of its further parts, in the order in which layers are numbered on the wire. Layers
        that draft come last, so that all others have the same numbers on nodes without them."""
        further = (part for part in (self.index, self.state, self.draft) if part is not None)
        return self, *(each for part in further for each in part.parts)

    @property
    def without_draft(self) -> "KVCacheSpec":
        """This spec without layers that draft tokens."""
        return self if self.draft is None else replace(self, draft=None)

    @property
    def part_layers(self) -> tuple[range, ...]:
        """The numbers of each part's layers on the wire, consecutive over all parts."""
        stops = list(accumulate(part.num_layers for part in self.parts))
        return tuple(map(range, [0, *stops], stops))

    @property
    def kv_factor(self) -> int:
        """Size of axis K: 2 where keys and values are apart, 1 for MLA."""
        return 2 if self.kind is KVKind.GQA else 1

    @property
    def itemsize(self) -> int:
        return KV_DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_token_layer(self) -> int:
        return self.kv_factor * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one more token in all parts but the state."""
        further = sum(part.bytes_per_token for part in (self.index, self.draft) if part is not None)
        return self.num_layers * self.bytes_per_token_layer + further

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one state; 0 if the model has none."""
        return 0 if self.state is None else self.state.bytes_per_token

    @property
    def least_segment_bytes(self) -> int:
        """The smallest payload limit with which this part can be sent: a token in one layer, or one head of a state."""
        return self.bytes_per_token_layer // (self.num_kv_heads if self.kind is KVKind.STATE else 1)

    def first_kept(self, token_start: int, token_stop: int) -> int:
        """The first token of a request's range that has a cell of its own. A state has one cell, at its last token."""
        return max(token_start, token_stop - 1) if self.kind is KVKind.STATE else token_start

    def first_read(self, layer: int, token: int) -> int:
        """The first token whose KV in this layer is read to compute the KV of token `token` or a later one."""
        window = self.windows[layer] if self.windows else 0
        return max(0, token - window + 1) if window else 0


@dataclass(frozen=True)
class KVCacheShape:
    """The form in which one node keeps its KV; any two nodes may differ.

    Attributes:
        state_slots: slots for the states of recurrent layers, each of one request or one prefix; 0: the model has none.

    Raises:
        ConfigError: a size below 1.
    """

    layout: KVCacheLayout
    block_size: int
    num_blocks: int
    state_slots: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}", field=name, value=value, allowed=("an integer of at least 1",))

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)
