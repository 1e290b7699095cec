"""Attention data parallelism: each rank computes the attention of its own tokens, and the experts and the vocabulary,
which are split among ranks, see all ranks' tokens.

Before such a layer ranks gather their tokens, after it the ranks' parts are summed and each rank keeps its own tokens.
Shapes: T this rank's token, A token of any rank in the order of ranks, D hidden channel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from baton.models.layers.parallel import ParallelModule, TensorParallel


@dataclass(frozen=True)
class TokenShares:
    """The number of tokens of each rank in a step, at least one, and their places in tensors of all ranks' tokens.

    Attributes:
        width: each rank's tokens are padded to this many, so that collectives take equal parts; 0: they lie one after
            another without padding, and every collective is a sum of tensors that are zero elsewhere.
    """

    counts: tuple[int, ...]
    width: int

    @classmethod
    def of(cls, counts: Sequence[int]) -> "TokenShares":
        """Makes padded shares unless padding costs more than it saves: a sum sends twice as much as a gather or scatter
        of equal parts, and layers that are not experts compute padding too."""
        width = max(counts)
        return cls(tuple(counts), width if width * len(counts) <= 2 * sum(counts) else 0)

    @classmethod
    def equal(cls, count: int, ranks: int) -> "TokenShares":
        return cls((count,) * ranks, count)

    @property
    def num_places(self) -> int:
        """The number of tokens of all ranks, with padding."""
        return self.width * len(self.counts) or sum(self.counts)

    def start(self, rank: int) -> int:
        """Returns the place of the rank's first token."""
        return self.width * rank or sum(self.counts[:rank])


class TokenExchange:
    """Exchanges tokens for one model on one rank. All ranks make the same calls in the same order, with the same
    shares.

    Attributes:
        parallel: the ranks.
        shares: the current step's shares; `CausalLM.compute` and `CausalLM.compute_drafts` set them.
    """

    def __init__(self, parallel: TensorParallel) -> None:
        self.parallel = parallel
        self.shares = TokenShares.equal(1, parallel.size)

    def gather(self, own_TD: Tensor) -> Tensor:
        """Returns all ranks' tokens [A, D], with the same bits on each rank. Padding is undefined."""
        shares, count = self.shares, len(own_TD)
        if not shares.width:
            all_AD = own_TD.new_zeros(shares.num_places, *own_TD.shape[1:])
            start = shares.start(self.parallel.rank)
            all_AD[start : start + count] = own_TD
            return self.parallel.all_reduce(all_AD)
        if count < shares.width:
            padded_TD = own_TD.new_zeros(shares.width, *own_TD.shape[1:])
            padded_TD[:count] = own_TD
            own_TD = padded_TD
        return self.parallel.all_gather(own_TD).flatten(0, 1)

    def own(self, all_AD: Tensor) -> Tensor:
        """Returns this rank's tokens [T, D] of all ranks'; a view."""
        rank = self.parallel.rank
        return all_AD.narrow(0, self.shares.start(rank), self.shares.counts[rank])

    def sum_own(self, part_AD: Tensor) -> Tensor:
        """Returns the sum over ranks for this rank's tokens only, [T, D]. It may overwrite its argument."""
        shares, rank = self.shares, self.parallel.rank
        if shares.width:
            return self.parallel.reduce_scatter(part_AD)[: shares.counts[rank]]
        start = shares.start(rank)
        return self.parallel.all_reduce(part_AD)[start : start + shares.counts[rank]]


class ExchangingModule(ParallelModule):
    """A module whose forward works alike on tokens that all ranks have and on those of each rank.

    Attributes:
        exchange: with attention data parallelism; `CausalLM.join` sets it, as `parallel`.
    """

    exchange: TokenExchange | None = None

    def of_all_ranks(self, own_TD: Tensor) -> Tensor:
        """Returns all ranks' tokens, for a layer that is split among ranks."""
        return own_TD if self.exchange is None else self.exchange.gather(own_TD)

    def sum_of_ranks(self, part_AD: Tensor) -> Tensor:
        """Returns the sum of the ranks' parts, for the tokens that this rank continues with."""
        return self.parallel.all_reduce(part_AD) if self.exchange is None else self.exchange.sum_own(part_AD)
