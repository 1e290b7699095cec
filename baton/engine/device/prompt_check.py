"""Compares captured steps with prompts, on the GPU that captured them, with the same steps outside of graphs: both must
write about the same KV. A layer's KV depends on all that the layers before it compute, so the first layer says nothing.
In the last three quarters of the layers, tokens that went to other experts for their last bits may differ by much.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from baton.engine.batch import Batch, BatchRow
from baton.engine.request import ModelFacts, int_array
from baton.engine.sampling.row import GREEDY_ROW
from baton.kvcache.cache import PagedKVCache

# Tokens of the prompts, in turns. The first prompt is computed before the others, and decodes next to them.
_LENGTHS = (9, 5, 14)
# Of the median token of each prompt, and of the decode, a single token that may go to other experts. Captured steps of
# tests differ by less than 2 % in bfloat16 and with an 8-bit cache.
_MOST_ERROR, _MOST_OF_DECODE = 0.05, 0.15


@dataclass(frozen=True)
class CheckedSteps:
    """Two steps, and blocks to compute them in twice: the first half is for captured steps, the second for others. Each
    owner has a prompt.

    Args:
        facts: have room for them, see `fit`.
        rank: the owner whose KV is compared.
        most_rows, most_tokens: of a step.
    """

    facts: ModelFacts
    rank: int = 0
    most_rows: int = 64
    most_tokens: int = 256

    @property
    def fit(self) -> bool:
        """Whether cache, slots of states, context and steps have room."""
        facts, lengths = self.facts, self._lengths
        has_slots = facts.state_slots == 0 or facts.state_slots >= len(lengths)
        fits_step = len(lengths) <= self.most_rows and 1 + sum(lengths[1:]) <= self.most_tokens
        fits_cache = 2 * self.num_blocks <= facts.num_blocks and max(lengths) < facts.max_context_tokens
        return has_slots and fits_step and fits_cache

    @property
    def num_blocks(self) -> int:
        """Blocks of each half."""
        return sum(self._counts)

    @property
    def _lengths(self) -> list[int]:
        count = max(len(_LENGTHS), self.facts.num_owners)
        return [_LENGTHS[place % len(_LENGTHS)] for place in range(count)]

    @property
    def _counts(self) -> list[int]:
        return [-(-(tokens + 1) // self.facts.block_size) for tokens in self._lengths]

    def batches(self, first_block: int) -> list[Batch]:
        """The steps over the blocks from this one on."""
        firsts = accumulate(self._counts, initial=first_block)
        rows = [
            BatchRow(
                "check",
                int_array([(7 * place + 3 * token + 1) % self.facts.vocab_size for token in range(tokens)]),
                0,
                int_array(list(range(first, first + count))),
                GREEDY_ROW,
                owner=place % self.facts.num_owners,
                state_slot=place if self.facts.state_slots else -1,
            )
            for place, (tokens, first, count) in enumerate(zip(self._lengths, firsts, self._counts, strict=False))
        ]
        decode = rows[0]._replace(token_ids=int_array([1]), token_start=len(rows[0].token_ids))
        return [Batch(0, (rows[0],)), Batch(0, (decode, *rows[1:]))]

    def agree(self, cache: PagedKVCache) -> bool:
        """Whether both halves have about the same KV."""
        count, size = self.num_blocks, self.facts.block_size
        ours, theirs = (_kv(cache, range(first, first + count)) for first in (0, count))
        if not ours.numel():
            return True
        error_T = ((ours - theirs).norm(dim=1) / theirs.norm(dim=1).clamp(min=1e-6)).nan_to_num(torch.inf)
        firsts = accumulate(self._counts, initial=0)
        for place, (tokens, first) in enumerate(zip(self._lengths, firsts, strict=False)):
            if place % self.facts.num_owners != self.rank:
                continue
            if error_T[first * size : first * size + tokens].median() > _MOST_ERROR:
                return False
            if place == 0 and error_T[first * size + tokens] > _MOST_OF_DECODE:
                return False
        return True


def _kv(cache: PagedKVCache, blocks: range) -> Tensor:
    """[tokens, numbers] of the compared layers, in float32."""
    layers = slice(1, max(2, 1 + cache.spec.num_layers // 4))
    compared = cache.view[layers, :, blocks.start : blocks.stop].float()
    return compared.permute(2, 3, 0, 1, 4, 5).flatten(0, 1).flatten(1)


def captured_steps_agree(
    captured: Callable[[Batch], object], eager: Callable[[Batch], object], cache: PagedKVCache, steps: CheckedSteps
) -> bool:
    """Whether both ways write about the same KV. Overwrites the first blocks of an empty cache."""
    cache.by_block[:, : 2 * steps.num_blocks].zero_()
    for run, first in ((captured, 0), (eager, steps.num_blocks)):
        for batch in steps.batches(first):
            run(batch)
    return steps.agree(cache)
