"""A minimal driver of a model over a paged cache: any mix of requests and chunk lengths in one batch."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from attention.backend import AttentionBackend
from attention.metadata import build_common_metadata
from attention.selection import select_backend
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import parse_layout
from baton.kvcache.spec import KVCacheShape, KVKind
from baton.models.config.model_config import ModelConfig
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.step_context import StepContext
from baton.models.loading.needs import attention_needs, kv_cache_spec
from tests.unit.models.recurrent_steps import state_rows

BLOCK_SIZE = 4
STATE_SLOTS = 8


def cache_shape(config: ModelConfig, *, num_blocks: int = 64) -> KVCacheShape:
    mla = kv_cache_spec(config, "float32").kind is KVKind.MLA
    slots = 0 if config.recurrent is None else STATE_SLOTS
    return KVCacheShape(parse_layout("NHD", mla=mla), BLOCK_SIZE, num_blocks, state_slots=slots)


def backend_for(
    config: ModelConfig, dtype: str = "float32", kv_dtype: str = "", *, device: str = "cpu", num_blocks: int = 64
) -> AttentionBackend:
    shape = cache_shape(config, num_blocks=num_blocks)
    needs = attention_needs(config, dtype=dtype, device=device, shape=shape, kv_dtype=kv_dtype, max_num_reqs=256)
    return select_backend(needs)


class PagedDriver:
    """Keeps each request's blocks, scattered over the cache, and how many of its tokens are computed."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        dtype: str = "float32",
        kv_dtype: str = "",
        *,
        device: str = "cpu",
        num_blocks: int = 64,
    ) -> None:
        self.model, self.backend, self.device = model, backend, device
        shape = cache_shape(model.config, num_blocks=num_blocks)
        self.cache = PagedKVCache(kv_cache_spec(model.config, dtype, kv_dtype), shape, device)
        for part in self.cache.parts:
            part.storage.fill_(torch.nan)  # a slot that is read before it is written shows
        self.free_slots = list(range(shape.state_slots))
        self.slots: dict[str, int] = {}
        generator = torch.Generator().manual_seed(1)
        self.free_blocks = torch.randperm(shape.num_blocks, generator=generator).tolist()
        self.blocks: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.drafted: dict[str, Tensor] = {}
        self._drafted_states: dict[str, Tensor] = {}

    @torch.inference_mode()
    def step(
        self,
        batch: Mapping[str, list[int]],
        adapters: Tensor | None = None,
        *,
        following: Mapping[str, int] | None = None,
    ) -> dict[str, Tensor]:
        """Computes the next tokens of each request; logits [tokens, vocabulary] of each. Decodes come first.

        Args:
            adapters: int32, the slot of each token's adapter.
            following: of each request the token after these, whose drafted logits are in `drafted` then.
        """
        starts = [self.computed.get(request, 0) for request in batch]
        for (request, tokens), start in zip(batch.items(), starts, strict=True):
            self.computed[request] = start + len(tokens)
            blocks = self.blocks.setdefault(request, [])
            while len(blocks) * BLOCK_SIZE < self.computed[request]:
                blocks.append(self.free_blocks.pop())
        lengths = [len(tokens) for tokens in batch.values()]
        common, positions_T = build_common_metadata(
            query_lens=lengths,
            context_lens=starts,
            block_tables=[self.blocks[request] for request in batch],
            block_size=BLOCK_SIZE,
            device=self.device,
        )
        states = None
        if self.cache.state is not None:
            for request in batch.keys() - self.slots.keys():
                self.slots[request] = self.free_slots.pop()
            slots = [self.slots[request] for request in batch]
            states = state_rows(slots, lengths, starts, device=self.device)
        token_ids_T = torch.tensor([token for tokens in batch.values() for token in tokens], device=self.device)
        context = StepContext(
            self.backend.builder.build(0, common),
            slots_T=common.slot_mapping,
            adapters=self.model.adapters_of(adapters),
            states=states,
        )
        hidden_TD = self.model.compute(token_ids_T, positions_T, self.cache, context)
        logits_TV = self.model.compute_logits(hidden_TD)
        if following is not None:
            next_ids = [[*tokens[1:], following[request]] for request, tokens in batch.items()]
            next_ids_T = torch.tensor([token for tokens in next_ids for token in tokens], device=self.device)
            states_TD, eagle = self.model.draft_states(hidden_TD), self.model.eagle
            metadata = context.metadata if eagle is None else eagle.backend.builder.build(0, common)
            drafted_TD = self.model.compute_drafts(next_ids_T, states_TD, positions_T, self.cache, metadata)
            self._keep_drafted(batch, drafted_TD, lengths)
        return dict(zip(batch, torch.split(logits_TV, lengths), strict=True))

    @torch.inference_mode()
    def continue_drafts(self, tokens: Mapping[str, int]) -> None:
        """Computes the layer that drafts at the place after the last one of each request, where nothing else is
        computed yet.

        Args:
            tokens: of each request the token two places after its last one.
        """
        for request in tokens:
            if len(self.blocks[request]) * BLOCK_SIZE == self.computed[request]:
                self.blocks[request].append(self.free_blocks.pop())
        common, positions_T = build_common_metadata(
            query_lens=[1] * len(tokens),
            context_lens=[self.computed[request] for request in tokens],
            block_tables=[self.blocks[request] for request in tokens],
            block_size=BLOCK_SIZE,
            device=self.device,
        )
        next_ids_R = torch.tensor(list(tokens.values()), device=self.device)
        hidden_RD = torch.stack([self._drafted_states[request][-1] for request in tokens])
        backend = self.backend if self.model.eagle is None else self.model.eagle.backend
        metadata = backend.builder.build(0, common)
        drafted_RD = self.model.compute_drafts(next_ids_R, hidden_RD, positions_T, self.cache, metadata)
        self._keep_drafted(tokens, drafted_RD, [1] * len(tokens))

    def _keep_drafted(self, requests: Iterable[str], drafted_TD: Tensor, lengths: list[int]) -> None:
        names = list(requests)
        self._drafted_states = dict(zip(names, torch.split(drafted_TD, lengths), strict=True))
        drafted_TV = self.model.compute_draft_logits(drafted_TD)
        self.drafted = dict(zip(names, torch.split(drafted_TV, lengths), strict=True))
