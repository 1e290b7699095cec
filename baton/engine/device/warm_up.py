"""Compiles the kernels of a runner's steps before requests come, by steps of every kind over an empty cache."""

from collections.abc import Callable

import numpy as np
import torch

from attention.host_to_device import to_device
from baton.core.sampling import ResolvedSampling
from baton.engine.batch import Batch, BatchRow, ScoreRow
from baton.engine.pooling import PoolRow
from baton.engine.request import ModelFacts, int_array
from baton.engine.sampling.masks import keep_allowed
from baton.engine.sampling.row import GREEDY_ROW, SampleRow

_DRAFTS = 2  # the second one uses other kernels than the first, and all further ones the same


def warm_up(run: Callable[[Batch], object], facts: ModelFacts, device: torch.device, *, drafts: bool) -> None:
    """Runs steps of every kind, and the kernel that applies the masks of grammars.

    Args:
        drafts: whether the model has a layer that drafts tokens.
    """
    for batch in _batches(facts, num_layer_drafts=_DRAFTS if drafts else 0):
        run(batch.of_owners(facts.num_owners))
    logits = torch.zeros(1, facts.vocab_size, device=device)
    masks = np.full((1, -(-facts.vocab_size // 32)), -1, np.int32)
    keep_allowed(logits, *to_device((np.zeros(1, np.int64), masks), device))


def _batches(facts: ModelFacts, *, num_layer_drafts: int) -> list[Batch]:
    """Prompts without and with context, which use different kernels; each alone and after a decode, where the alignment
    of their inputs differs; and two at once, which have larger tiles in recurrent layers. They cover drawn and greedy
    sampling, prompt logprobs and pooling."""
    length = min(2 * facts.block_size, facts.max_context_tokens, facts.num_blocks * facts.block_size) - 1
    blocks = int_array(list(range(-(-(length + 1) // facts.block_size))))
    drawn = ResolvedSampling(temperature=1.0, top_p=0.9, top_k=8, seed=0, logprobs=1)
    decode = BatchRow("", int_array([0]), 0, blocks, GREEDY_ROW)
    prompt = BatchRow("", int_array([0] * length), 0, blocks, SampleRow(drawn, 0, (), int_array(), 0))
    prompts = (prompt, prompt._replace(token_start=1))
    batches = [
        Batch(0, (*decodes, each), num_layer_drafts=num_layer_drafts) for each in prompts for decodes in ((), (decode,))
    ]
    batches += [Batch(0, (*decodes, prompt, prompt)) for decodes in ((), (decode,))]
    scored = Batch(0, (prompt,), scores=((0, ScoreRow(prompt.token_ids, 1)),))
    pooled = Batch(0, (prompt._replace(sample=None),), pools=((0, PoolRow(0, length)),))
    return [*batches, scored, pooled]
