"""Compares captured steps with prompts, on the GPU that captured them, with the same steps outside of graphs: both must
write about the same KV. Later layers' KV depends on all that earlier layers compute."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from baton.engine.batch import Batch, BatchRow
from baton.engine.request import ModelFacts, int_array
from baton.engine.sampling.row import GREEDY_ROW
from baton.kvcache.cache import PagedKVCache

# The first prompt is computed before the others, and decodes next to them.
_PROMPTS = (9, 5, 14)
# Of the median token, because a token whose experts change differs by much. Captured steps of tests differ by less than
# 2 % in bfloat16 and with an 8-bit cache.
_MOST_ERROR = 0.05


@dataclass(frozen=True)
class CheckedSteps:
    """Two steps over consecutive blocks, of which each half is for one way to compute them.

    Args:
        facts: have room for them, see `fit`.
        rank: the owner whose KV is compared.
    """

    facts: ModelFacts
    rank: int = 0

    @property
    def fit(self) -> bool:
        """Whether cache, slots of states and context have room for the steps."""
        facts = self.facts
        has_slots = facts.state_slots == 0 or facts.state_slots >= len(_PROMPTS)
        return has_slots and 2 * self.num_blocks <= facts.num_blocks and max(_PROMPTS) < facts.max_context_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks of each half."""
        return sum(self._counts)

    @property
    def _counts(self) -> list[int]:
        return [-(-(tokens + 1) // self.facts.block_size) for tokens in _PROMPTS]

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
            for place, (tokens, first, count) in enumerate(zip(_PROMPTS, firsts, self._counts, strict=False))
        ]
        decode = rows[0]._replace(token_ids=int_array([1]), token_start=_PROMPTS[0])
        return [Batch(0, (rows[0],)), Batch(0, (decode, *rows[1:]))]

    def error(self, cache: PagedKVCache) -> float:
        """The relative difference of the median token's KV in the later half of the layers."""
        count, size = self.num_blocks, self.facts.block_size
        ours, theirs = (self._kv(cache, range(first, first + count)) for first in (0, count))
        firsts = accumulate(self._counts, initial=0)
        places = [
            first * size + token
            for place, (tokens, first) in enumerate(zip(_PROMPTS, firsts, strict=False))
            if place % self.facts.num_owners == self.rank
            for token in range(tokens + (place == 0))
        ]
        if not places or not ours.numel():
            return 0.0
        error_T = (ours - theirs).norm(dim=1) / theirs.norm(dim=1).clamp(min=1e-6)
        return float(error_T[places].nan_to_num(torch.inf).median())

    @staticmethod
    def _kv(cache: PagedKVCache, blocks: range) -> Tensor:
        """[tokens, numbers] in float32."""
        later = cache.view[cache.spec.num_layers // 2 :, :, blocks.start : blocks.stop].float()
        return later.permute(2, 3, 0, 1, 4, 5).flatten(0, 1).flatten(1)


def captured_steps_agree(
    captured: Callable[[Batch], object], eager: Callable[[Batch], object], cache: PagedKVCache, steps: CheckedSteps
) -> bool:
    """Whether both ways write about the same KV. Overwrites the first blocks of an empty cache."""
    cache.by_block[:, : 2 * steps.num_blocks].zero_()
    for run, first in ((captured, 0), (eager, steps.num_blocks)):
        for batch in steps.batches(first):
            run(batch)
    return steps.error(cache) <= _MOST_ERROR
