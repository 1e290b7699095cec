"""Tensor parallelism: which part of a model each rank holds, and how the ranks' results are combined.

A rank has some query heads with their kv heads, some channels of every MLP and of every expert, and some rows of the
vocabulary; everything else is whole on each rank. Experts are split by channels, so all ranks have equal work for any
choice of experts; or, with `whole_experts`, each rank has some of them whole: larger products and no limits on channels
for unequal work. Either way a rank computes its part for all tokens, which every rank has after attention, and the
ranks' sum is the all-reduce that the layer has anyway: no tokens are exchanged. With `own_attention`, attention is
whole on each rank, for its own tokens only (`models.token_exchange`).
"""

import hashlib
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch import distributed as dist

from attention.blocksparse import BlocksparseParams
from baton.errors import ConfigError
from baton.expert_load import ExpertLoad
from models.config.model_config import GQAConfig, MLAConfig, ModelConfig, MoEConfig, QKNorm, RecurrentConfig
from models.expert_places import ExpertPlacement, place_experts

_MOST_RANKS = 64  # largest number of ranks that an error proposes
# Each rank's rows of the vocabulary are a multiple of this, for products on a GPU; the last rank's are padded.
_VOCABULARY_ROWS = 16


@dataclass(frozen=True)
class TensorParallel:
    """One rank. All ranks make the same calls in the same order, on tensors of equal shape.

    Args:
        group: of torch.distributed, with NCCL for tensors on GPUs; None: the process's default group.
        whole_experts: experts are split among ranks instead of by channels (expert parallelism).
        own_attention: attention is whole on each rank, which computes it for its own requests (attention data
            parallelism).
        placement: of whole experts; None: consecutive ones, without copies.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    whole_experts: bool = False
    own_attention: bool = False
    placement: ExpertPlacement | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            allowed = (f"0 to {self.size - 1}",)
            raise ConfigError(f"rank is {self.rank} of {self.size}", field="rank", value=self.rank, allowed=allowed)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place, with the same bits on each rank, so all ranks choose the same experts.

        Args:
            x: contiguous. On a GPU the sum can be part of a CUDA graph once one was computed outside of graphs.
        """
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[rank, *x.shape]."""
        out = x.new_empty(self.size, *x.shape)
        # One function with two names: torch 2.13 warns about the older one.
        gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
        gather(out.flatten(0, 1), x.contiguous(), group=self.group)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's part, of equal parts by rank along the first axis, of the sum over ranks."""
        out = x.new_empty(len(x) // self.size, *x.shape[1:])
        scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
        scatter(out, x.contiguous(), group=self.group)
        return out

    @property
    def num_owners(self) -> int:
        """How many ranks have requests of their own; 1: all ranks have all of them."""
        return self.size if self.own_attention else 1

    def smallest(self, value: int, device: torch.device) -> int:
        """The smallest of the ranks' values. The host waits.

        Args:
            device: of tensors that the group takes.
        """
        if self.size == 1:
            return value
        smallest = torch.tensor(value, dtype=torch.int64, device=device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self.group)
        return int(smallest.item())

    def agree(self, text: str, device: torch.device) -> bool:
        """Whether all ranks have this text. All get the same answer. The host waits.

        Args:
            device: of tensors that the group takes.
        """
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
        return self.smallest(number, device) == -self.smallest(-number, device)


SINGLE = TensorParallel()


class ParallelModule(nn.Module):
    """A module whose forward combines the ranks' results.

    Attributes:
        parallel: the ranks; `CausalLM.join` sets it on all such modules of a model.
    """

    parallel: TensorParallel = SINGLE


def query_heads(num_heads: int, parallel: TensorParallel) -> range:
    """A rank's query heads. All ranks have the same number; only with a single kv head some may have one more."""
    return _equal_part(num_heads, parallel)


def kv_heads(num_kv_heads: int, parallel: TensorParallel) -> range:
    """A rank's kv heads. With fewer heads than ranks, several ranks hold the same one; MLA's one latent is on every
    rank."""
    if num_kv_heads >= parallel.size:
        return _equal_part(num_kv_heads, parallel)
    head = parallel.rank * num_kv_heads // parallel.size
    return range(head, head + 1)


def channels(size: int, parallel: TensorParallel, *, block: int | None) -> range:
    """A rank's intermediate channels of an MLP.

    Args:
        block: number of channels that share a scale and stay together; ranks then differ by at most one block.
    """
    if block is None:
        return _equal_part(size, parallel)
    blocks = -(-size // block)
    start, stop = (blocks * rank // parallel.size * block for rank in (parallel.rank, parallel.rank + 1))
    return range(start, min(stop, size))


def experts(num_experts: int, parallel: TensorParallel) -> range:
    """A rank's experts, where it holds whole ones without a plan; ranks differ by at most one."""
    return _equal_part(num_experts, parallel)


def with_experts_placed(
    parallel: TensorParallel, config: ModelConfig, *, redundant: int, load: ExpertLoad | None
) -> TensorParallel:
    """The rank with the plan of its experts, where ranks hold whole ones.

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
    """The tokens whose rows the rank holds, before its padding."""
    rows = padded_rows(vocab_size, parallel)
    return range(min(parallel.rank * rows, vocab_size), min((parallel.rank + 1) * rows, vocab_size))


def padded_rows(vocab_size: int, parallel: TensorParallel) -> int:
    """Rows of the vocabulary in each rank's memory, padding included."""
    if parallel.size == 1:
        return vocab_size
    return -(-vocab_size // (parallel.size * _VOCABULARY_ROWS)) * _VOCABULARY_ROWS


def local_config(config: ModelConfig, parallel: TensorParallel) -> ModelConfig:
    """The config of one rank's model: with the rank's heads, channels and padded vocabulary.

    Raises:
        ConfigError: the model cannot be split over that many ranks; names the numbers that can.
    """
    if parallel.size == 1:
        return config
    whole = parallel.whole_experts
    if whole and config.moe is None:
        raise ConfigError(
            f"{config.architecture} has no experts to split among ranks",
            field="expert_parallel",
            value=True,
            allowed=("false",),
        )
    own = parallel.own_attention
    if own:
        _check_own_attention(config, whole_experts=whole)
    problem = _problem(config, parallel.size, whole_experts=whole, own_attention=own)
    if problem is not None:
        allowed = tuple(
            str(size)
            for size in range(1, _MOST_RANKS + 1)
            if _problem(config, size, whole_experts=whole, own_attention=own) is None
        )
        raise ConfigError(
            f"{config.architecture} cannot be split over {parallel.size} ranks: {problem}",
            field="tensor_parallel_size",
            value=parallel.size,
            allowed=allowed,
        )
    moe, block = config.moe, channel_block(config)
    return replace(
        config,
        attention=config.attention if own else _local_attention(config.attention, parallel),
        intermediate_size=len(channels(config.intermediate_size, parallel, block=block)),
        intermediate_sizes=tuple(len(channels(size, parallel, block=block)) for size in config.intermediate_sizes),
        moe=None if moe is None else _local_moe(moe, parallel, block),
        recurrent=_local_recurrent(config.recurrent, parallel),
        vocab_size=padded_rows(config.vocab_size, parallel),
    )


def _check_own_attention(config: ModelConfig, *, whole_experts: bool) -> None:
    """Raises:
    ConfigError: attention data parallelism brings this model nothing, or is not made for it.
    """
    cure = "leave out --attention-data-parallel: the ranks then share the heads"
    if not isinstance(config.attention, MLAConfig):
        problem = "has no latent attention, so its ranks hold different kv heads already"
    elif config.recurrent is not None:
        problem = "has recurrent layers, whose states are split over all ranks"
    elif config.shortcut_experts:
        problem = "has layers whose experts span two attentions, for which it is not made"
    elif not whole_experts:
        problem, cure = "would be split by channels", "give --expert-parallel as well"
    else:
        return
    raise ConfigError(
        f"attention_data_parallel is on, and {config.architecture} {problem}",
        field="attention_data_parallel",
        value=True,
        allowed=("false",),
        cure=cure,
    )


def channel_block(config: ModelConfig) -> int | None:
    """Number of intermediate channels that share a scale and must stay together; None: channels have no scales."""
    quantization = config.quantization
    return None if quantization is None else quantization.channel_block


def refuse_batch_invariance(parallel: TensorParallel) -> None:
    """Raises ConfigError for several ranks: the order in which their parts are summed depends on the batch's size."""
    if parallel.size > 1:
        raise ConfigError(
            f"batch_invariant is on, and the model is split over {parallel.size} ranks",
            field="batch_invariant",
            value=True,
            allowed=("false",),
            cure="take --tensor-parallel-size 1 for results that do not depend on the batch",
        )


def _equal_part(size: int, parallel: TensorParallel) -> range:
    return range(size * parallel.rank // parallel.size, size * (parallel.rank + 1) // parallel.size)


def _local_attention(attention: GQAConfig | MLAConfig, parallel: TensorParallel) -> GQAConfig | MLAConfig:
    heads = query_heads(attention.num_heads, parallel)
    if isinstance(attention, MLAConfig):
        return replace(attention, num_heads=len(heads))
    local = replace(
        attention,
        num_heads=len(heads),
        num_kv_heads=len(kv_heads(attention.num_kv_heads, parallel)),
        layer_heads=tuple((len(kv_heads(heads, parallel)), size) for heads, size in attention.layer_heads),
        alibi_slopes=attention.alibi_slopes[heads.start : heads.stop],
    )
    return replace(local, blocksparse=tuple(_local_pattern(each, local, parallel) for each in attention.blocksparse))


def _local_pattern(
    pattern: BlocksparseParams | None, local: GQAConfig, parallel: TensorParallel
) -> BlocksparseParams | None:
    if pattern is None:
        return None
    # NOTE: a pattern numbers kv heads over all ranks, also where several ranks hold the same head.
    assert not pattern.homo_head_group, "no family has its stripes by kv head"
    return replace(
        pattern,
        num_heads=local.num_heads,
        num_kv_heads=local.num_kv_heads,
        tp_rank=parallel.rank,
        tp_size=parallel.size,
    )


def _local_moe(moe: MoEConfig, parallel: TensorParallel, block: int | None) -> MoEConfig:
    shared = len(channels(moe.shared_intermediate_size, parallel, block=block))
    if parallel.whole_experts:
        held = experts(moe.num_experts, parallel)
        if parallel.placement is not None:
            held = range(parallel.placement.num_places(parallel.rank))
        return replace(moe, own=held, shared_intermediate_size=shared)
    own = len(channels(moe.intermediate_size, parallel, block=block))
    return replace(moe, intermediate_size=own, shared_intermediate_size=shared)


def _local_recurrent(recurrent: RecurrentConfig | None, parallel: TensorParallel) -> RecurrentConfig | None:
    if recurrent is None:
        return None
    local = replace(recurrent, num_heads=len(kv_heads(recurrent.num_heads, parallel)))
    groups = recurrent.num_groups
    if groups == 0:
        return local
    ranks_per_group = max(1, parallel.size // groups)
    return replace(local, num_groups=len(kv_heads(groups, parallel)), ranks_per_group=ranks_per_group)


def _problem(config: ModelConfig, size: int, *, whole_experts: bool, own_attention: bool) -> str | None:
    """Why the model cannot be split over `size` ranks; None if it can."""
    if size == 1:
        return None
    attention, block = config.attention, channel_block(config)
    heads = None if config.quantization is None or own_attention else config.quantization.head_blocks
    if not own_attention and not _splits_heads(attention, size, heads):
        return f"it has {attention.num_heads} query heads"
    if isinstance(attention, GQAConfig):
        for num_kv_heads in sorted({attention.num_kv_heads, *(heads for heads, _ in attention.layer_heads)}):
            if num_kv_heads % size and size % num_kv_heads:
                return f"it has {num_kv_heads} kv heads"
    if config.recurrent is not None and config.recurrent.num_heads % size:
        return f"its recurrent layers have {config.recurrent.num_heads} heads"
    if config.recurrent is not None and (groups := config.recurrent.num_groups) and groups % size and size % groups:
        return f"its recurrent layers have {groups} groups of heads"
    if heads is not None and config.recurrent is not None and config.recurrent.num_groups:
        return "its state-space layers would be cut within numbers that are stored together"
    if heads is not None:
        for name, (count, is_input) in _head_channels(attention, size).items():
            if count % (multiple := math.lcm(*heads) if is_input else heads[0]):
                return f"a rank's {count} channels of {name} are no multiple of {multiple}, which are stored together"
    if whole_experts and config.moe is not None and config.moe.num_experts < size:
        return f"it has {config.moe.num_experts} experts"
    for name, count in _intermediate_sizes(config, whole_experts=whole_experts).items():
        if (count % size if block is None else -(-count // block) < size) and count:
            return f"{name} has {count} channels" + ("" if block is None else f" in blocks of {block}")
    return None


def _splits_heads(attention: GQAConfig | MLAConfig, size: int, blocks: tuple[int, int] | None) -> bool:
    """Whether ranks can share the query heads: in equal numbers, or with a single kv head, which every rank has, in
    unequal ones, unless scales, patterns or norms need equal parts. Falcon-7B has 71 heads."""
    if attention.num_heads % size == 0:
        return True
    if not isinstance(attention, GQAConfig) or attention.num_kv_heads > 1 or any(attention.blocksparse):
        return False
    if attention.qk_norm and attention.qk_norm_of is QKNorm.ROW:  # a rank's mean counts as much as any other's
        return False
    return blocks is None and size < attention.num_heads


def _head_channels(attention: GQAConfig | MLAConfig, size: int) -> dict[str, tuple[int, bool]]:
    """One rank's channels of the projections that are split between heads, and whether they are also inputs of one."""
    num_heads = attention.num_heads // size
    if isinstance(attention, GQAConfig):
        layers = {*attention.layer_heads} or {(attention.num_kv_heads, attention.head_dim)}
        fewest = min(max(1, kv_heads // size) * head_dim for kv_heads, head_dim in layers)
        return {"queries": (num_heads * min(head_dim for _, head_dim in layers), True), "keys": (fewest, False)}
    return {
        "queries": (num_heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim), False),
        "keys and values": (num_heads * (attention.qk_nope_head_dim + attention.v_head_dim), False),
        "outputs": (num_heads * attention.v_head_dim, True),
    }


def _intermediate_sizes(config: ModelConfig, *, whole_experts: bool) -> dict[str, int]:
    moe = config.moe
    if moe is None:
        sizes = {f"the MLP of layer {index}": size for index, size in enumerate(config.intermediate_sizes)}
        return sizes or {"its MLP": config.intermediate_size}
    sizes = {"the shared expert": moe.shared_intermediate_size}
    if not whole_experts:
        sizes["an expert"] = moe.intermediate_size
    only_experts = all(moe.layers) and not config.shortcut_experts
    return sizes if only_experts else sizes | {"its MLP": config.intermediate_size}
