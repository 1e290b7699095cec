"""One step on the device: a batch of plain integers in, plain sampled tokens out.

Owns model, cache and backend, and the way from rows to tensors. Knows no queues, and of requests only their rows.

Suffixes: T token of the step, R row that is sampled, D hidden channel, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attention.backend import AttentionBackend
from attention.cache import PagedKVCache
from attention.metadata import build_common_metadata
from baton.types import TokenOutput
from engine.batch import Batch, BatchRow
from engine.request import ModelFacts, int_array
from engine.sampler import sample
from models.causal_lm import CausalLM


class ModelRunner:
    """Not thread-safe: one thread calls `run`."""

    def __init__(self, model: CausalLM, backend: AttentionBackend, cache: PagedKVCache, facts: ModelFacts) -> None:
        self.facts = facts
        self._model = model
        self._backend = backend
        self._cache = cache
        self._device = cache.view.device

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[TokenOutput | None]:
        """Computes the batch's tokens, writing their KV; one entry per row, None where nothing is sampled."""
        rows = batch.rows
        token_ids_T = self._token_ids(rows)
        common, positions_T = build_common_metadata(
            query_lens=[len(row.token_ids) for row in rows],
            context_lens=[row.token_start for row in rows],
            block_tables=[row.block_ids for row in rows],
            block_size=self.facts.block_size,
            device=self._device,
        )
        metadata = self._backend.builder.build(0, common)
        hidden_TD = self._model(token_ids_T, positions_T, self._cache, metadata)
        return self._sample(rows, hidden_TD, common.query_start_loc)

    def _token_ids(self, rows: Sequence[BatchRow]) -> Tensor:
        token_ids = int_array()
        for row in rows:
            token_ids.extend(row.token_ids)
        return torch.from_numpy(np.array(token_ids, np.int64)).to(self._device)

    def _sample(self, rows: Sequence[BatchRow], hidden_TD: Tensor, query_start_loc: Tensor) -> list[TokenOutput | None]:
        """Draws behind the last token of each row that has its whole known sequence computed."""
        results: list[TokenOutput | None] = [None] * len(rows)
        sampled = [index for index, row in enumerate(rows) if row.sample is not None]
        if sampled:
            last_R = query_start_loc[1:][sampled] - 1
            logits_RV = self._model.compute_logits(hidden_TD[last_R])
            tokens = sample(logits_RV, [row.sample for row in rows if row.sample is not None])
            for index, token in zip(sampled, tokens, strict=True):
                results[index] = token
        return results
