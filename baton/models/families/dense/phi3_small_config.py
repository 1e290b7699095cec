"""Reads config.json of Phi-3-small, which has its own field names."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from attention.blocksparse import BlocksparseParams
from baton.models.config.decoder import DecoderFields
from baton.models.config.fields import Count, CountOrZero, Cure, Integers, Positive, Size
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.config.rope import LinearScaling, RopeConfig

# The published checkpoints' vocabulary, and its ids that no text encodes to, which config.json does not list.
_PUBLISHED_VOCAB_SIZE = 100_352
_PUBLISHED_UNUSED_TOKENS = (100_256, 100_264, 100_265, *range(100_267, 100_276), *range(100_277, 100_352))
_UNSUPPORTED = Cure("this feature is not supported; choose another checkpoint")


@dataclass(frozen=True)
class Phi3SmallSwitches:
    """muP's multipliers and other values that only this family has.

    Attributes:
        gegelu_limit: clamp of the MLP's gate and up; None: no clamp.
        unused_tokens: ids that no text encodes to. They are never sampled.
    """

    embedding_multiplier: float
    logits_divisor: float
    gegelu_limit: float | None
    unused_tokens: tuple[int, ...]


class _Phi3SmallFields(DecoderFields):
    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType({"tie_word_embeddings": True, "mlp_bias": True})
    hidden_act: Literal["gegelu"] = "gegelu"
    layer_norm_epsilon: Positive = 1e-5
    ff_intermediate_size: Size = 14_336
    ff_dim_multiplier: Annotated[None, _UNSUPPORTED] = None
    gegelu_limit: Positive | None = 20.0
    rope_scaling: Annotated[None, _UNSUPPORTED] = None
    rope_embedding_base: Positive = 1e6
    rope_position_scale: Positive = 1.0
    # Null and 0 switch a multiplier off.
    mup_embedding_multiplier: Annotated[float, Ge(0)] | None = 10.0
    mup_width_multiplier: Annotated[float, Ge(0)] | None = 8.0
    mup_use_scaling: bool = True
    mup_attn_multiplier: Positive = 1.0
    dense_attention_every_n_layers: CountOrZero | None = 2
    blocksparse_block_size: Count = 64
    blocksparse_num_local_blocks: CountOrZero = 16
    blocksparse_vert_stride: Count = 8
    blocksparse_homo_head_pattern: bool = False
    dummy_token_indices: Integers | None = None

    def scale(self, head_dim: int) -> float:
        return self.mup_attn_multiplier / head_dim if self.mup_use_scaling else float(head_dim**-0.5)

    def rope(self, head_dim: int) -> RopeConfig:
        if head_dim % 2:
            raise self.refuse("num_attention_heads", cure="heads of an odd size cannot be rotated")
        factor = self.rope_position_scale
        scaling = None if factor == 1 else LinearScaling(factor)
        return RopeConfig(head_dim, self.rope_embedding_base, interleaved=False, scaling=scaling)

    def patterns(self, gqa: GQAConfig) -> tuple[BlocksparseParams | None, ...]:
        """Returns each layer's pattern. Every `dense_attention_every_n_layers`-th layer is dense, or none if that is
        null or 0."""
        every = self.dense_attention_every_n_layers
        pattern = BlocksparseParams(
            max_seqlen=self.max_position_embeddings,
            num_heads=gqa.num_heads,
            num_kv_heads=gqa.num_kv_heads,
            block_size=self.blocksparse_block_size,
            local_blocks=self.blocksparse_num_local_blocks,
            vert_stride=self.blocksparse_vert_stride,
            homo_head=self.blocksparse_homo_head_pattern,
        )
        layers = range(self.num_hidden_layers)
        return tuple(None if every and (index + 1) % every == 0 else pattern for index in layers)

    def unused_tokens(self) -> tuple[int, ...]:
        tokens = self.dummy_token_indices
        if tokens is None:
            return _PUBLISHED_UNUSED_TOKENS if self.vocab_size == _PUBLISHED_VOCAB_SIZE else ()
        if tokens and max(tokens) >= self.vocab_size:
            raise self.refuse("dummy_token_indices", f"0 to {self.vocab_size - 1}")
        return tokens


def read_phi3_small(file: ConfigFile) -> ModelConfig:
    fields = _Phi3SmallFields.read(file)
    # Projections have biases even if `attention_bias` is false.
    attention = fields.gqa(windows=fields.uniform_windows(None), qkv_bias=True, output_bias=True)
    attention = replace(attention, scale=fields.scale(attention.head_dim), blocksparse=fields.patterns(attention))
    return fields.model(
        attention=attention,
        rope=fields.rope(attention.head_dim),
        intermediate_size=fields.ff_intermediate_size,
        norm_eps=fields.layer_norm_epsilon,
        switches=Phi3SmallSwitches(
            embedding_multiplier=fields.mup_embedding_multiplier or 1.0,
            logits_divisor=fields.mup_width_multiplier or 1.0,
            gegelu_limit=fields.gegelu_limit,
            unused_tokens=fields.unused_tokens(),
        ),
    )
