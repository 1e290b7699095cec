"""The features that a layer can ask for, as named settings: each alone, and the combinations that models use.

Legend: H query heads.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attention.backend import AttentionFeature
from attention.blocksparse import BlocksparseParams
from attention.parameters import AttentionType


@dataclass(frozen=True)
class Setting:
    """`features` is what a backend must declare to be asked for this setting; `kv_dtype` "" keeps the model's dtype."""

    name: str
    features: frozenset[AttentionFeature] = field(default_factory=frozenset)
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    logits_soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    attn_type: AttentionType = AttentionType.DECODER
    kv_dtype: str = ""
    blocksparse: bool = False

    @property
    def causal(self) -> bool:
        return self.attn_type is AttentionType.DECODER

    @property
    def reads_cache(self) -> bool:
        """Encoders attend to the keys of the call alone."""
        return self.attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)

    def slopes(self, num_heads: int, device: str) -> Tensor | None:
        return torch.linspace(0.5, 0.01, num_heads, device=device) if self.alibi else None

    def sink_logits(self, num_heads: int, device: str) -> Tensor | None:
        return torch.linspace(-2.0, 3.0, num_heads, device=device) if self.sinks else None

    def pattern(self, num_heads: int, num_kv_heads: int, max_seqlen: int) -> BlocksparseParams | None:
        if not self.blocksparse:
            return None
        return BlocksparseParams(
            max_seqlen=max_seqlen,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            block_size=16,
            local_blocks=2,
            vert_stride=3,
        )


_F = AttentionFeature
SETTINGS = (
    Setting("plain"),
    Setting("window 1", frozenset({_F.SLIDING_WINDOW}), sliding_window=1),
    Setting("window 7", frozenset({_F.SLIDING_WINDOW}), sliding_window=7),
    Setting("window 32", frozenset({_F.SLIDING_WINDOW}), sliding_window=32),
    Setting("window beyond every context", frozenset({_F.SLIDING_WINDOW}), sliding_window=4000),
    Setting("chunks of 128", frozenset({_F.CHUNKED_LOCAL}), attention_chunk_size=128),
    Setting("soft cap", frozenset({_F.SOFT_CAP}), logits_soft_cap=2.0),
    Setting("ALiBi", frozenset({_F.ALIBI}), alibi=True),
    Setting("sinks", frozenset({_F.SINKS}), sinks=True),
    Setting("window and sinks", frozenset({_F.SLIDING_WINDOW, _F.SINKS}), sliding_window=19, sinks=True),
    Setting("window and soft cap", frozenset({_F.SLIDING_WINDOW, _F.SOFT_CAP}), sliding_window=19, logits_soft_cap=2.0),
    Setting("encoder", frozenset({_F.ENCODER}), attn_type=AttentionType.ENCODER),
    Setting("encoder only", frozenset({_F.ENCODER}), attn_type=AttentionType.ENCODER_ONLY),
    Setting("encoder, window 7", frozenset({_F.ENCODER, _F.ENCODER_WINDOW}), sliding_window=7,
            attn_type=AttentionType.ENCODER),
    Setting("encoder only, window 32", frozenset({_F.ENCODER, _F.ENCODER_WINDOW}), sliding_window=32,
            attn_type=AttentionType.ENCODER_ONLY),
    Setting("encoder to decoder", frozenset({_F.ENCODER}), attn_type=AttentionType.ENCODER_DECODER),
    Setting("fp8 e4m3 cache", kv_dtype="float8_e4m3fn"),
    Setting("fp8 e5m2 cache", kv_dtype="float8_e5m2"),
    Setting("fp8 cache, window and soft cap", frozenset({_F.SLIDING_WINDOW, _F.SOFT_CAP}), sliding_window=19,
            logits_soft_cap=2.0, kv_dtype="float8_e4m3fn"),
    Setting("block sparse", frozenset({_F.BLOCK_SPARSE}), blocksparse=True),
)  # fmt: skip
