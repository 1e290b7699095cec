"""Tensor parallelism: splits a model over ranks and combines their results.

A rank has some query heads with their kv heads, some channels of every MLP and of every expert, and some rows of the
vocabulary; everything else is whole on each rank. Experts are split by channels, so all ranks have equal work for any
choice of experts. With `whole_experts` each rank has some whole experts instead: products are larger and channels have
no limits, but work is unequal. Either way a rank computes its part for all tokens, which every rank has after
attention, and the layer's usual all-reduce adds up the parts, so no tokens are exchanged. With `own_attention`,
attention is whole on each rank, for its own tokens only (`baton.models.layers.token_exchange`).

The library chooses by size in which order it adds the ranks' parts. With `in_order`, for batch-invariant mode, ranks
exchange their parts instead, and each adds them in the order of the ranks. With `peers`, it adds small tensors in that
order too, through the ranks' memory (`baton.models.kernels.peer_sums`).
"""

import hashlib
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch import distributed as dist

from attention.rotation import RowNorm
from baton.core.errors import ConfigError
from baton.core.expert_load import ExpertLoad
from baton.models.config.expert_places import ExpertPlacement, place_experts
from baton.models.config.model_config import ModelConfig
from baton.models.kernels import peer_sums
from baton.models.kernels.moe.expert_dispatch import DispatchMemory
from baton.models.kernels.peer_sums import PeerMemory
from baton.models.kernels.quantized.rows import QuantizedRows, RowFormat
from baton.models.kernels.rank_sums import sum_parts

# Each rank's rows of the vocabulary are a multiple of this, for products on a GPU; the last rank's are padded.
_VOCABULARY_ROWS = 16
# Sums in order that are at least this large are computed in equal shares, one by each rank, if there are more than two.
# Ranks then send less, in one more exchange; with two ranks they send as much either way. Not measured.
_SHARED_SUM_BYTES = 1 << 20
_NO_TEXT = 1 << 62  # above every number that stands for a text


@dataclass(frozen=True)
class TensorParallel:
    """One rank. All ranks make the same calls in the same order, on tensors of equal shape.

    Args:
        group: of torch.distributed, with NCCL for tensors on GPUs; None: the process's default group.
        whole_experts: experts are split among ranks instead of by channels (expert parallelism).
        own_attention: attention is whole on each rank, which computes it for its own requests (attention data
            parallelism).
        placement: of whole experts; None: consecutive ones, without copies.
        in_order: sums over ranks add in the order of the ranks, in float32, so that a number's bits do not depend on
            the size of the tensor.
        share_memory: `build_runner` gives the ranks `peers`, or `dispatch` with `own_attention`, if they can map each
            other's memory.
        peers: memory for sums of rows of the model's width.
        dispatch: memory through which tokens go to the ranks of their experts and back; None: ranks gather all tokens.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    whole_experts: bool = False
    own_attention: bool = False
    placement: ExpertPlacement | None = None
    in_order: bool = False
    share_memory: bool = False
    peers: PeerMemory | None = field(default=None, compare=False, repr=False)
    dispatch: DispatchMemory | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            allowed = (f"0 to {self.size - 1}",)
            raise ConfigError(f"rank is {self.rank} of {self.size}", field="rank", value=self.rank, allowed=allowed)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum over ranks, with the same bits on each rank, so that all ranks choose the same experts.

        Args:
            x: contiguous; may be overwritten. On a GPU the sum can be part of a CUDA graph once one was computed
                outside of graphs.
        """
        if self.size == 1:
            return x
        if self.peers is not None and peer_sums.takes(self.peers, x):
            return peer_sums.sum_parts(self.peers, x)
        if not (self.in_order and x.is_floating_point()):  # whole numbers have one sum in any order
            dist.all_reduce(x, group=self.group)
            return x
        if self.size == 2 or x.nbytes < _SHARED_SUM_BYTES or x.numel() % self.size:
            return sum_parts(self.all_gather(x))
        return self.all_gather(self.reduce_scatter(x.view(-1))).view(x.shape)

    def all_reduce_later(self, x: Tensor) -> "Tensor | DeferredSum":
        """Does what `all_reduce` does, or lets the norm that reads the sum compute it in its own launch."""
        if self.peers is not None and peer_sums.takes(self.peers, x):
            return DeferredSum(self.peers, x)
        return self.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """Gathers all ranks' tensors as [rank, *x.shape]."""
        out = x.new_empty(self.size, *x.shape)
        # One function with two names: torch 2.13 warns about the older one.
        gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
        gather(out.flatten(0, 1), x.contiguous(), group=self.group)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sums over ranks and returns this rank's part of the result, which is cut into equal parts along the first
        axis."""
        if self.in_order:
            parts = torch.empty_like(x, memory_format=torch.contiguous_format)
            dist.all_to_all_single(parts, x.contiguous(), group=self.group)
            return sum_parts(parts.unflatten(0, (self.size, -1)))
        out = x.new_empty(len(x) // self.size, *x.shape[1:])
        scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
        scatter(out, x.contiguous(), group=self.group)
        return out

    @property
    def num_owners(self) -> int:
        """The number of ranks with requests of their own; 1: all ranks compute all requests."""
        return self.size if self.own_attention else 1

    @property
    def sends_to_experts(self) -> bool:
        """Whether each rank has the whole shared experts, for its own tokens, so that only routed experts' tokens need
        go to other ranks."""
        return self.own_attention and self.share_memory

    def smallest(self, value: int, device: torch.device) -> int:
        """Returns the smallest of the ranks' values. The host waits.

        Args:
            device: of tensors that the group takes.
        """
        if self.size == 1:
            return value
        smallest = torch.tensor(value, dtype=torch.int64, device=device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self.group)
        return int(smallest.item())

    def agree(self, text: str | None, device: torch.device) -> bool:
        """Whether all ranks have this text. All get the same result. The host waits.

        Args:
            text: None if this rank has no text and agrees with any; at least one rank must have a text.
            device: of tensors that the group takes.
        """
        low = high = _NO_TEXT
        if text is not None:
            low = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
            high = -low
        return self.smallest(low, device) == -self.smallest(high, device)

    def of_first(self, text: str, device: torch.device) -> str:
        """Returns rank 0's text. The host waits.

        Args:
            device: of tensors that the group takes.
        """
        if self.size == 1:
            return text
        texts = [text]
        dist.broadcast_object_list(texts, group=self.group, device=device, group_src=0)
        return texts[0]


@dataclass(frozen=True, eq=False)
class DeferredSum:
    """A sum over ranks [T, D] that is computed when it is read. All ranks read it at the same point."""

    peers: PeerMemory
    part_TD: Tensor

    def now(self) -> Tensor:
        return peer_sums.sum_parts(self.peers, self.part_TD)

    def add_and_norm(
        self, stream_TD: Tensor, norm: RowNorm, *, update_norm: RowNorm | None, row_format: RowFormat | None = None
    ) -> Tensor | QuantizedRows:
        """Adds the sum to the residual stream in place and returns the normalized stream, quantized if there is a
        `row_format`."""
        return peer_sums.add_sum_and_norm(
            self.peers, self.part_TD, stream_TD, norm, update_norm=update_norm, row_format=row_format
        )


def sum_now(update: Tensor | DeferredSum) -> Tensor:
    """Returns an update of the residual stream as a tensor."""
    return update.now() if isinstance(update, DeferredSum) else update


SINGLE = TensorParallel()


def of_layer(parallel: TensorParallel) -> TensorParallel:
    """Returns the rank for a layer without experts, such as an EAGLE-3 head's, whose heads all ranks share."""
    return replace(parallel, whole_experts=False, own_attention=False, placement=None)


class ParallelModule(nn.Module):
    """A module whose forward combines the ranks' results.

    Attributes:
        parallel: the ranks; `CausalLM.join` sets it on all such modules of a model.
    """

    parallel: TensorParallel = SINGLE


def query_heads(num_heads: int, parallel: TensorParallel) -> range:
    """Returns a rank's query heads. All ranks have equal numbers, except that with a single kv head some may have one
    more."""
    return _equal_part(num_heads, parallel)


def kv_heads(num_kv_heads: int, parallel: TensorParallel) -> range:
    """Returns a rank's kv heads. With fewer heads than ranks, several ranks hold the same head; MLA's latent is on
    every rank."""
    if num_kv_heads >= parallel.size:
        return _equal_part(num_kv_heads, parallel)
    head = parallel.rank * num_kv_heads // parallel.size
    return range(head, head + 1)


def channels(size: int, parallel: TensorParallel, *, block: int | None) -> range:
    """Returns a rank's intermediate channels of an MLP.

    Args:
        block: number of channels that share a scale and stay together; ranks then differ by at most one block.
    """
    if block is None:
        return _equal_part(size, parallel)
    blocks = -(-size // block)
    start, stop = (blocks * rank // parallel.size * block for rank in (parallel.rank, parallel.rank + 1))
    return range(start, min(stop, size))


def experts(num_experts: int, parallel: TensorParallel) -> range:
    """Returns a rank's experts if ranks hold whole experts without a plan; ranks differ by at most one."""
    return _equal_part(num_experts, parallel)


def with_experts_placed(
    parallel: TensorParallel, config: ModelConfig, *, redundant: int, load: ExpertLoad | None
) -> TensorParallel:
    """Returns the rank with a plan of its experts, if ranks hold whole experts.

    Args:
        config: of the whole model, which `local_config` could split.
        redundant: copies in each layer.
        load: the tokens of each expert; None: all get equally many.

    Raises:
        ConfigError: ranks do not hold whole experts, or the plan cannot be made.
    """
    if parallel.size > 1 and parallel.whole_experts and config.moe is not None:
        moe = config.moe
        plan = place_experts(moe.layers, moe.num_experts, ranks=parallel.size, redundant=redundant, load=load)
        if config.drafts:
            alone = place_experts((True,), moe.num_experts, ranks=parallel.size, redundant=redundant)
            plan = replace(plan, mtp=alone.layer(0))
        return replace(parallel, placement=plan)
    if redundant or load is not None:
        why = "each rank holds some channels of all"
        if config.moe is None:
            why = f"{config.architecture} has none"
        elif parallel.size == 1:
            why = "there is one rank"
        raise ConfigError(
            f"experts are placed and copied to balance ranks that hold whole ones; here {why}",
            field="redundant_experts" if redundant else "expert_load",
            value=redundant or (load and load.model),
            allowed=("0",) if redundant else ("none",),
            cure="take a mixture, --expert-parallel, and a --tensor-parallel-size of 2 or more",
        )
    return parallel


def vocabulary_rows(vocab_size: int, parallel: TensorParallel) -> range:
    """Returns the tokens whose rows the rank holds, without padding."""
    rows = padded_rows(vocab_size, parallel)
    return range(min(parallel.rank * rows, vocab_size), min((parallel.rank + 1) * rows, vocab_size))


def padded_rows(vocab_size: int, parallel: TensorParallel) -> int:
    """Returns the number of vocabulary rows in each rank's memory, padding included."""
    if parallel.size == 1:
        return vocab_size
    return -(-vocab_size // (parallel.size * _VOCABULARY_ROWS)) * _VOCABULARY_ROWS


def channel_block(config: ModelConfig) -> int | None:
    """Returns the number of intermediate channels that share a scale and must stay together; None: channels have no
    scales."""
    quantization = config.quantization
    return None if quantization is None else quantization.channel_block


def _equal_part(size: int, parallel: TensorParallel) -> range:
    return range(size * parallel.rank // parallel.size, size * (parallel.rank + 1) // parallel.size)
