"""Reads config.json of DeepSeek-V3.2 and GLM-5, which have sparse latent attention."""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BeforeValidator

from baton.models.config.fields import Count, CountOrZero, Heads, LayersOrZero, Positive, Size, Texts
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import IndexConfig, MLAConfig, ModelConfig, Scoring, TopKMethod
from baton.models.families.latent.deepseek_config import DeepseekV3Fields

_MODES = {"F": "full", "S": "shared"}


def _spelled_out(value: object) -> object:
    """Converts a pattern such as "FSSS", or a list of names, to a tuple of names."""
    if isinstance(value, str):
        return tuple(_MODES.get(letter, letter) for letter in value)
    return tuple(value) if isinstance(value, list) else value


class _SparseFields(DeepseekV3Fields):
    q_lora_rank: Size
    rope_interleave: Literal[True] = True
    first_k_dense_replace: LayersOrZero = 3
    mlp_layer_types: Texts = ()
    index_topk: Count = 2048
    index_head_dim: Size = 128
    index_n_heads: Heads = 64

    def sparse_model(self, *, interleaved: bool, layers: tuple[bool, ...]) -> ModelConfig:
        """Returns the model with its indexers.

        Args:
            interleaved: the indexer's queries and keys turn in interleaved pairs.
            layers: whether each layer has an indexer.
        """
        self.types_of_layers("indexed_attention", "deepseek_sparse_attention")  # new and old name of the same kind
        if self.index_head_dim < self.qk_rope_head_dim or self.index_head_dim % 2:
            raise self.refuse("index_head_dim", f"an even number of at least qk_rope_head_dim, {self.qk_rope_head_dim}")
        index = IndexConfig(self.index_n_heads, self.index_head_dim, self.index_topk, interleaved, layers)
        attention: MLAConfig = replace(self.mla(), index=index)
        moe = self.moe(
            scoring=Scoring.SIGMOID,
            method=TopKMethod.NOAUX_TC,
            normalize_weights=self.norm_topk_prob,
            weight_scale=self.routed_scaling_factor,
        )
        if self.mlp_layer_types:
            layers_with_experts = self.layers_by_type(self.mlp_layer_types)
            moe = None if moe is None else replace(moe, layers=layers_with_experts)
        return self.model(
            attention=attention,
            rope=self.rope(dim=attention.qk_rope_head_dim, interleaved=True),
            intermediate_size=self.intermediate_size,
            moe=moe,
            mtp_layers=self.num_nextn_predict_layers,
        )


def read_deepseek_v32(file: ConfigFile) -> ModelConfig:
    fields = _SparseFields.read(file)
    return fields.sparse_model(interleaved=False, layers=(True,) * fields.num_hidden_layers)


class _GlmMoeDsaFields(_SparseFields):
    rms_norm_eps: Positive = 1e-5
    index_n_heads: Heads = 32
    indexer_rope_interleave: Literal[True] = True
    indexer_types: Texts = ()
    index_topk_pattern: Annotated[Texts, BeforeValidator(_spelled_out)] = ()
    index_topk_freq: CountOrZero = 1
    index_skip_topk_offset: CountOrZero = 2

    def layers_with_indexer(self) -> tuple[bool, ...]:
        """Whether each layer has an indexer: as the file lists them, or every so many layers after the first few."""
        num_layers = self.num_hidden_layers
        name = "indexer_types" if self.indexer_types else "index_topk_pattern"
        kinds = self.indexer_types or self.index_topk_pattern
        if not kinds:
            name, every = "index_skip_topk_offset", max(self.index_topk_freq, 1)
            behind = (max(layer - self.index_skip_topk_offset + 1, 0) for layer in range(num_layers))
            kinds = tuple("shared" if layer % every else "full" for layer in behind)
        if len(kinds) != num_layers or not set(kinds) <= {"full", "shared"}:
            raise self.refuse(name, f"full or shared for each of {num_layers} layers")
        if kinds[0] != "full":
            raise self.refuse(name, "full for the first layer, which has none before it to share with")
        return tuple(kind == "full" for kind in kinds)


def read_glm_moe_dsa(file: ConfigFile) -> ModelConfig:
    fields = _GlmMoeDsaFields.read(file)
    return fields.sparse_model(interleaved=True, layers=fields.layers_with_indexer())
