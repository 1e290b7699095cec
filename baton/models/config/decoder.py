"""The fields of config.json that families share, and their conversion to a `ModelConfig`."""

import math
from typing import Annotated, ClassVar, Self

from baton.models.config.fields import (
    Count,
    Cure,
    Fields,
    Fraction,
    Heads,
    Integers,
    Layers,
    Positive,
    SequenceTokens,
    Size,
    Table,
    Texts,
)
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import GQAConfig, MLAConfig, ModelConfig, MoEConfig, QKNorm
from baton.models.config.quantization.config import read_quantization
from baton.models.config.rope import RopeConfig, read_rope

_LONGEST = "give the model's longest sequence in tokens; some files call it n_positions, seq_length or max_seq_len"


class DecoderFields(Fields):
    """The fields of every family. A family's class declares the fields that only the family has.

    `read_config` fills in `architectures`, `dtype` and `eos_token_id`, which can also be set elsewhere.

    Attributes:
        unsupported: fields that change what a model computes. They must be off unless the family declares them.
        partial_rotary: whether the family turns only the part of each head given by `partial_rotary_factor`.
    """

    partial_rotary: ClassVar[bool] = False

    unsupported: ClassVar[tuple[str, ...]] = (
        "quantization_config",
        "compression_config",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "attention_chunk_size",
        "clip_qkv",
        "index_topk",
        "no_rope_layers",
        "use_mrope",
        "alibi",
    )

    architectures: Texts
    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    head_dim: Size | None = None
    layer_types: Texts = ()
    mlp_bias: bool = False
    rms_norm_eps: Positive = 1e-6
    partial_rotary_factor: Fraction = 1.0
    max_position_embeddings: Annotated[SequenceTokens, Cure(_LONGEST)]
    tie_word_embeddings: bool = False
    dtype: str
    eos_token_id: Integers

    @classmethod
    def read(cls, file: ConfigFile) -> Self:
        """Reads the fields, and refuses features that the family does not compute."""
        for name in cls.unsupported:
            if name not in cls.model_fields and file.raw(name):
                raise file.refuse(name, "null", cure="this feature is not supported; choose another checkpoint")
        if "hidden_act" not in cls.model_fields and file.raw("hidden_act") not in (None, "silu", "swish"):
            raise file.refuse("hidden_act", "silu")
        fields = super().read(file)
        if fields.partial_rotary_factor != 1.0 and not cls.partial_rotary:
            raise fields.refuse("partial_rotary_factor", "1.0")
        return fields

    def model(
        self,
        *,
        attention: GQAConfig | MLAConfig,
        rope: RopeConfig | None,
        intermediate_size: int,
        local_rope: RopeConfig | None = None,
        norm_eps: float | None = None,
        mlp_bias: bool | None = None,
        final_logits_soft_cap: float | None = None,
        moe: MoEConfig | None = None,
        mtp_layers: int = 0,
        switches: object = None,
        intermediate_sizes: tuple[int, ...] = (),
    ) -> ModelConfig:
        """Returns the config of a model with these fields.

        Args:
            intermediate_size: of dense layers.
            norm_eps, mlp_bias: for families without the fields `rms_norm_eps` and `mlp_bias`.
        """
        return ModelConfig(
            architecture=self.architectures[0],
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_hidden_layers,
            intermediate_size=intermediate_size,
            mlp_bias=self.mlp_bias if mlp_bias is None else mlp_bias,
            norm_eps=self.rms_norm_eps if norm_eps is None else norm_eps,
            tie_word_embeddings=self.tie_word_embeddings,
            max_position_embeddings=self.max_position_embeddings,
            dtype=self.dtype,
            eos_token_ids=self.eos_token_id,
            attention=attention,
            rope=rope,
            local_rope=local_rope,
            final_logits_soft_cap=final_logits_soft_cap,
            moe=moe,
            mtp_layers=mtp_layers,
            quantization=read_quantization(self._file),
            switches=switches,
            intermediate_sizes=intermediate_sizes,
        )

    def gqa(
        self,
        *,
        qkv_bias: bool,
        output_bias: bool,
        windows: tuple[int | None, ...] | None = None,
        num_kv_heads: int | None = None,
        qk_norm: bool = False,
        scale: float | None = None,
        attention_chunk_sizes: tuple[int | None, ...] = (),
        logits_soft_cap: float | None = None,
        sinks: bool = False,
        alibi: bool = False,
        qk_norm_of: QKNorm = QKNorm.HEAD,
        rotary_layers: tuple[bool, ...] = (),
    ) -> GQAConfig:
        """Returns the grouped-query attention of these fields.

        Args:
            windows: each layer's window; None: no layer has one.
            num_kv_heads: for families without the field `num_key_value_heads`.
            scale: factor of the scores; None: head size ** -0.5.
        """
        num_heads = self.num_attention_heads
        num_kv_heads = num_kv_heads or self.num_key_value_heads or num_heads
        if num_heads % num_kv_heads:
            raise self.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
        head_dim = self.head_dim
        if head_dim is None:
            head_dim, rest = divmod(self.hidden_size, num_heads)
            if rest:
                raise self.refuse("head_dim", cure="needed, since hidden_size is not a multiple of num_attention_heads")
        return GQAConfig(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            qk_norm=qk_norm,
            sliding_windows=(None,) * self.num_hidden_layers if windows is None else windows,
            scale=head_dim**-0.5 if scale is None else scale,
            attention_chunk_sizes=attention_chunk_sizes,
            logits_soft_cap=logits_soft_cap,
            sinks=sinks,
            alibi_slopes=alibi_slopes(num_heads) if alibi else (),
            qk_norm_of=qk_norm_of,
            rotary_layers=rotary_layers,
        )

    def types_of_layers(self, *allowed: str) -> tuple[str, ...]:
        """Returns `layer_types`, one of `allowed` for each layer; () if the file has none."""
        num_layers, types = self.num_hidden_layers, self.layer_types
        if types and (len(types) != num_layers or not set(types) <= set(allowed)):
            raise self.refuse("layer_types", f"{' or '.join(allowed)} for each of {num_layers} layers")
        return types

    def uniform_windows(self, window: int | None) -> tuple[int | None, ...]:
        """Returns one window for all layers; `layer_types` must not contradict it."""
        expected = "full_attention" if window is None else "sliding_attention"
        if not set(self.layer_types) <= {expected}:
            raise self.refuse("layer_types", f"{expected} for every layer of this architecture")
        return (window,) * self.num_hidden_layers

    def windows_by_type(self, window: int | None, *, every: int) -> tuple[int | None, ...]:
        """Returns windows for the layers that `layer_types` names; without it, for all layers but each `every`-th.

        Args:
            window: the field `sliding_window`.
        """
        types = self.types_of_layers("full_attention", "sliding_attention")
        slides = [kind == "sliding_attention" for kind in types]
        slides = slides or [(index + 1) % every > 0 for index in range(self.num_hidden_layers)]
        if any(slides) and window is None:
            raise self.refuse("sliding_window", "an integer of at least 1")
        return tuple(window if slide else None for slide in slides)


class RotaryFields(DecoderFields):
    """The fields of families with a rotary embedding, in both spellings. Newer files have `rope_parameters` with the
    base inside; older files have `rope_theta`, and `rope_scaling` where the frequencies are stretched."""

    rope_theta: Positive = 10_000.0
    rope_parameters: Table | None = None
    rope_scaling: Table | None = None
    original_max_position_embeddings: Count | None = None

    def rope_table(self) -> ConfigFile:
        """Returns the table that the file has, of either spelling."""
        if self.rope_parameters is not None and self.rope_scaling is not None:
            raise self.refuse("rope_scaling", "null", cure="keep either rope_parameters or rope_scaling")
        return self.table("rope_scaling" if self.rope_parameters is None else "rope_parameters")

    def rope(self, *, dim: int, interleaved: bool = False) -> RopeConfig:
        """Returns the rotary embedding of a model with one embedding for all layers.

        Args:
            dim: channels of a head that can turn; with `partial_rotary`, only a part of them turns.
        """
        return read_rope(
            self.rope_table(),
            dim=dim,
            theta=self.rope_theta,
            interleaved=interleaved,
            max_position_embeddings=self.max_position_embeddings,
            original_max_position_embeddings=self.original_max_position_embeddings,
            partial_rotary_factor=self.partial_rotary_factor if self.partial_rotary else None,
        )

    def ropes_by_type(self, *, dim: int) -> tuple[RopeConfig, RopeConfig]:
        """Returns the rotary embeddings of layers without and with a window. Newer files have a table for each; in
        older files `rope_scaling` is for layers without a window."""
        table = self.rope_table()
        local = ConfigFile(table.where, {})
        if self.rope_parameters is not None:
            types = ("full_attention", "sliding_attention")
            given = [name for name, value in table.values.items() if value is not None and name not in types]
            if given:
                raise table.refuse(given[0], "null", cure=f"this family has tables: {', '.join(types)}")
            table, local = (table.table(name) for name in types)
        full, sliding = (
            read_rope(
                each,
                dim=dim,
                theta=self.rope_theta,
                interleaved=False,
                max_position_embeddings=self.max_position_embeddings,
                original_max_position_embeddings=self.original_max_position_embeddings,
            )
            for each in (table, local)
        )
        return full, sliding


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Returns how fast each head's scores fall with distance (ALiBi, arXiv 2108.12409).

    The slopes are a geometric sequence that ends at 1/256. Heads beyond a power of two take every other member of the
    sequence for twice as many heads.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2.0 ** (-8 * (2 * head + 1) / (2 * power)) for head in range(num_heads - power)]
    return tuple(slopes)
