"""A decoder-only language model around one family's layers: embedding, layers, last norm, head.

The residual stream is one tensor that is changed in place. A layer returns its update instead of adding it, because
the next norm adds and normalizes in one pass. Shapes: T token of the batch, D hidden channel, R row whose logits are
computed, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend
from attention.metadata import AttentionMetadata
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import ModelConfig
from baton.models.config.mtp import mtp_form
from baton.models.kernels.adapter_rows import AdapterRows
from baton.models.layers.eagle import EagleHead, ReadStates
from baton.models.layers.embedding import Embedding
from baton.models.layers.expert_counts import ExpertCounts
from baton.models.layers.linear import Linear
from baton.models.layers.moe.moe import MoE
from baton.models.layers.mtp import MTPLayer
from baton.models.layers.norms import CenteredNorm, RMSNorm
from baton.models.layers.parallel import DeferredSum, ParallelModule, TensorParallel
from baton.models.layers.rotary import Rotary
from baton.models.layers.step_context import StepContext
from baton.models.layers.token_exchange import ExchangingModule, TokenExchange, TokenShares


class DecoderLayer(ExchangingModule):
    """Llama's layer: attention and an MLP, each after a norm and added to the residual stream. Families make the parts,
    which return a rank's part of a sum. With attention data parallelism, attention returns the whole sum for the rank's
    own tokens.

    Attributes:
        residual_multiplier: factor of the updates of the stream.
    """

    residual_multiplier: float = 1.0
    input_layernorm: RMSNorm
    self_attn: nn.Module
    post_attention_layernorm: RMSNorm
    mlp: nn.Module

    def forward(
        self,
        stream_TD: Tensor,
        update_TD: Tensor | DeferredSum | None,
        rotation: Rotation,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor | DeferredSum:
        """Adds the previous layer's update and this layer's attention to the stream; returns this layer's MLP's
        update."""
        normed = self.input_layernorm.add_and_norm_for(self.self_attn, stream_TD, update_TD)
        attended_TD = self.self_attn(normed, rotation, kv_cache, metadata)
        if self.exchange is None:
            normed = self.post_attention_layernorm.add_and_norm_for(self.mlp, stream_TD, self.update(attended_TD))
            return self.update(self.mlp(normed))
        normed_TD = self.post_attention_layernorm.add_and_norm(stream_TD, self._scaled(attended_TD))
        if self.parallel.sends_to_experts and isinstance(self.mlp, MoE):
            return self._scaled(self.mlp.of_own_tokens(normed_TD))
        return self.update(self.mlp(self.of_all_ranks(normed_TD)))

    def update(self, part_TD: Tensor) -> Tensor | DeferredSum:
        """Returns the update of the stream, given this rank's part of it."""
        if self.exchange is None and self.residual_multiplier == 1.0:
            return self.parallel.all_reduce_later(part_TD)
        return self._scaled(self.sum_of_ranks(part_TD))

    def _scaled(self, whole_TD: Tensor) -> Tensor:
        return whole_TD if self.residual_multiplier == 1.0 else whole_TD * self.residual_multiplier


class Decoder(nn.Module):
    """The part of a model that most checkpoints keep under `model.`."""

    def __init__(
        self, config: ModelConfig, layers: Sequence[nn.Module], *, norm: nn.Module, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(layers)
        self.norm = norm


class CausalLM(ExchangingModule):
    """A whole model. Families whose layers take other arguments override `forward`.

    Module paths equal the tensor names of checkpoints, except in `FusedLinear` and `Experts`, which name their own
    tensors.

    Args:
        norm: the norm after the last layer; None: an RMS norm.
        mtp_layer: the decoder layer within the MTP layer, if the config `drafts`. The other norms of the MTP layer are
            of the same class as `norm`.

    Attributes:
        adapter_rows: the adapters of the current step, for the hooks of `AdapterBank`.
        find_adapters: makes `adapter_rows` from the slots of a step's tokens; None: the model has no slots for
            adapters.
        checkpoint_prefixes: maps prefixes of module paths to checkpoints' prefixes, for
            `baton.models.checkpoint.names`.
        config: this rank's config, if several ranks compute the model together.
        expert_counts: counters of experts' tokens, if ranks hold whole experts.
        vocab_size: of the whole model.
        rotary: None if the config has no rotary embedding.
        shows_stream: the layers take the residual stream and the update of the layer before as their first arguments,
            so an EAGLE-3 head can read them.
        eagle: the EAGLE-3 head that drafts for the model; `use_head` sets it.
    """

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = MappingProxyType({})
    shows_stream: ClassVar[bool] = False

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[nn.Module],
        *,
        dtype: torch.dtype,
        norm: nn.Module | None = None,
        mtp_layer: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        norm = norm or RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.model = Decoder(config, layers, norm=norm, dtype=dtype)
        self.rotary = None if config.rope is None else Rotary(config.rope)
        tied = config.tie_word_embeddings
        self.adapter_rows: AdapterRows | None = None
        self.find_adapters: Callable[[Tensor], AdapterRows] | None = None
        self.expert_counts: ExpertCounts | None = None
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size, dtype=dtype)
        labels = config.num_labels
        self.score = Linear(config.hidden_size, labels, dtype=dtype) if labels else None
        assert config.drafts == (mtp_layer is not None), "the family's class makes the layer"
        self.mtp: MTPLayer | None = None
        if mtp_layer is not None:
            assert isinstance(norm, RMSNorm), "no family with an MTP layer has another norm"
            self.mtp = MTPLayer(config, mtp_layer, norm=type(norm), dtype=dtype)
        self.eagle: EagleHead | None = None
        self._read: ReadStates | None = None
        self._draft_states_TD: Tensor | None = None

    @property
    def prefixes(self) -> Mapping[str, str]:
        """`checkpoint_prefixes` of this model, with those of its MTP layer."""
        own = self.checkpoint_prefixes
        return own if self.mtp is None else mtp_form(self.config).prefixes(self.config.num_layers) | dict(own)

    def adapters_of(self, slots_T: Tensor | None) -> AdapterRows | None:
        """Returns the adapters of a step's tokens, for its context. It may launch kernels; a torch kernel must follow
        before `compute`.

        Args:
            slots_T: int32, the adapter slot of each token, negative for none; None: no token has an adapter.
        """
        find = self.find_adapters
        return None if slots_T is None or find is None else find(slots_T)

    def compute(self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, context: StepContext) -> Tensor:
        """Computes hidden states [T,D] of a step's tokens, and writes their KV into `kv_cache`.

        With attention data parallelism, token ids and hidden states cover all ranks' tokens, in the order of
        `exchange`; everything else covers this rank's own tokens.

        Args:
            positions_T: below `config.max_context_tokens`.
        """
        if self.exchange is not None and context.shares is not None:
            self.exchange.shares = context.shares
        if self.expert_counts is not None:
            slots_T = context.slots_T
            if self.exchange is not None and slots_T is not None:
                # Experts see all ranks' tokens, and a gather leaves 0 in the padding between them.
                slots_T = self.exchange.gather(slots_T + 1) - 1
            self.expert_counts.slots_T = slots_T
        self.adapter_rows = context.adapters
        hidden_TD: Tensor = self(token_ids_T, positions_T, kv_cache, context)
        if self.eagle is not None and self._read is not None:
            self._draft_states_TD = self.eagle.combine(self._read.take())
        return hidden_TD

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, context: StepContext) -> Tensor:
        """Computes a step in the family's own way. Callers use `compute`, which prepares what layers share."""
        assert self.rotary is not None
        rotation = self.rotary(positions_T)
        stream_TD: Tensor = self.model.embed_tokens(token_ids_T)
        update_TD: Tensor | DeferredSum | None = None
        for layer in self.model.layers:
            update_TD = layer(stream_TD, update_TD, rotation, kv_cache, context.metadata)
        assert isinstance(self.model.norm, RMSNorm | CenteredNorm)
        return self.of_all_ranks(self.model.norm.add_and_norm(stream_TD, update_TD))

    def join(self, parallel: TensorParallel, *, vocab_size: int) -> None:
        """Makes this model, built from one rank's config, a part of the model that all ranks compute together.

        Args:
            vocab_size: of the whole model.
        """
        self.vocab_size = vocab_size
        exchange = TokenExchange(parallel) if parallel.num_owners > 1 else None
        for module in self.modules():
            if isinstance(module, ParallelModule):
                module.parallel = parallel
            if isinstance(module, ExchangingModule):
                module.exchange = exchange

    def compute_logits(self, hidden_RD: Tensor) -> Tensor:
        """Returns logits [R,V] in float32 of the rows to sample. Every rank gets the same bits, so each can sample by
        itself."""
        head = self.model.embed_tokens.as_head if self.lm_head is None else self.lm_head
        logits_RV: Tensor = head(hidden_RD)
        logits_RV = self._whole_vocabulary(logits_RV) if self.parallel.size > 1 else logits_RV.float()
        cap = self.config.final_logits_soft_cap
        return logits_RV if cap is None else cap * torch.tanh(logits_RV / cap)

    @property
    def drafts(self) -> bool:
        """Whether the model has a layer that drafts tokens: an MTP layer, or an EAGLE-3 head."""
        return self.mtp is not None or self.eagle is not None

    def use_head(self, head: EagleHead) -> None:
        """Drafts with an EAGLE-3 head from now on. Call it once, after the model is loaded."""
        assert self.mtp is None, "the config drafts with one of them"
        assert self.shows_stream, "the caller has checked it"
        self.eagle = head
        self._read = ReadStates(self.model.layers, head.head.reads)

    def draft_states(self, hidden_TD: Tensor) -> Tensor:
        """Returns the states [T,D] of the step that `compute` has just computed, from which the layer that drafts reads
        them. Those of an EAGLE-3 head can be taken once.

        Args:
            hidden_TD: what `compute` returned.
        """
        if self.mtp is not None:
            assert isinstance(self.model.norm, RMSNorm)
            return self.mtp.read(hidden_TD, self.model.norm)
        states_TD, self._draft_states_TD = self._draft_states_TD, None
        assert states_TD is not None, "the config says whether there is such a layer"
        return states_TD

    def compute_drafts(
        self,
        next_ids_T: Tensor,
        states_TD: Tensor,
        positions_T: Tensor,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        shares: TokenShares | None = None,
    ) -> Tensor:
        """Computes hidden states [T,D] of the layer that drafts, and writes its KV. `compute_draft_logits` turns them
        into logits of the tokens after the next ones.

        With attention data parallelism, the next tokens and the returned states cover all ranks' tokens, as in
        `compute`; everything else covers this rank's own tokens.

        Args:
            next_ids_T: the token after each position.
            states_TD: what `draft_states` returned for the positions, or what this method returned for the positions
                before them.
            kv_cache: the model's.
            shares: number of tokens of each rank; None: all ranks have all of them.
        """
        assert kv_cache.draft is not None
        self.adapter_rows = None  # no adapter has parts for this layer
        drafted_TD: Tensor
        if self.eagle is not None:
            embedded_TD = (self.eagle.embed_tokens or self.model.embed_tokens)(next_ids_T)
            drafted_TD = self.eagle(embedded_TD, states_TD, positions_T, kv_cache.draft, metadata)
            return drafted_TD
        assert self.mtp is not None, "the config says whether there is such a layer"
        assert self.rotary is not None
        if self.exchange is not None and shares is not None:
            self.exchange.shares = shares
        embedded_TD = self.model.embed_tokens(next_ids_T)
        drafted_TD = self.mtp(embedded_TD, states_TD, self.rotary(positions_T), kv_cache.draft, metadata)
        return self.of_all_ranks(drafted_TD)

    def compute_draft_logits(self, drafted_RD: Tensor) -> Tensor:
        """Returns logits [R,V] in float32 of what `compute_drafts` returned."""
        return self.compute_logits(drafted_RD) if self.eagle is None else self.eagle.compute_logits(drafted_RD)

    def classify(self, hidden_RD: Tensor) -> Tensor:
        """Returns the outputs [R,N] of the classification head, which every rank has whole."""
        assert self.score is not None, "the loader gave this model a classification head"
        outputs_RN: Tensor = self.score(hidden_RD)
        return outputs_RN

    def _whole_vocabulary(self, logits_RV: Tensor) -> Tensor:
        """Gathers all ranks' logits in one float32 tensor without padding."""
        out_RV = logits_RV.new_empty(len(logits_RV), self.vocab_size, dtype=torch.float32)
        ranks = self.parallel.all_gather(logits_RV)
        for own_RV, rank_RV in zip(out_RV.split(logits_RV.shape[1], dim=1), ranks, strict=False):
            own_RV.copy_(rank_RV[:, : own_RV.shape[1]])
        return out_RV


class ModelClass(Protocol):
    """The constructor that the loader calls for a model of any family."""

    def __call__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> CausalLM: ...
