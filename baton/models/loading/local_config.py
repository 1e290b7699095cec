"""Makes the config of one rank's model, and explains why a model cannot be split over some numbers of ranks."""

import math
from dataclasses import replace

from attention.blocksparse import BlocksparseParams
from baton.core.errors import ConfigError
from baton.models.config.model_config import GQAConfig, MLAConfig, ModelConfig, MoEConfig, QKNorm
from baton.models.config.recurrent import RecurrentConfig
from baton.models.layers.parallel import (
    TensorParallel,
    channel_block,
    channels,
    experts,
    kv_heads,
    of_layer,
    padded_rows,
    query_heads,
)

_MOST_RANKS = 64  # largest number of ranks that an error proposes


def local_config(config: ModelConfig, parallel: TensorParallel) -> ModelConfig:
    """Returns the config of one rank's model, with the rank's heads, channels and padded vocabulary.

    Raises:
        ConfigError: the model cannot be split over that many ranks; it names the numbers that work.
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
        eagle=None if config.eagle is None else replace(config.eagle, layer=_local_layer(config.eagle.layer, parallel)),
    )


def _local_layer(layer: ModelConfig, parallel: TensorParallel) -> ModelConfig:
    """Returns the rank's part of an EAGLE-3 head's layer, which has no experts."""
    return local_config(layer, of_layer(parallel))


def _check_own_attention(config: ModelConfig, *, whole_experts: bool) -> None:
    """Checks that attention data parallelism suits the model.

    Raises:
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
    # NOTE: a pattern numbers kv heads over all ranks, even if several ranks hold the same head.
    assert not pattern.homo_head_group, "no family has its stripes by kv head"
    return replace(
        pattern,
        num_heads=local.num_heads,
        num_kv_heads=local.num_kv_heads,
        tp_rank=parallel.rank,
        tp_size=parallel.size,
    )


def _local_moe(moe: MoEConfig, parallel: TensorParallel, block: int | None) -> MoEConfig:
    shared = moe.shared_intermediate_size
    if not parallel.sends_to_experts:
        shared = len(channels(shared, parallel, block=block))
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
    """Returns why the model cannot be split over `size` ranks; None if it can."""
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
                return (
                    f"a rank's {count} channels of {name} are not a multiple of {multiple}, which are stored together"
                )
    if whole_experts and config.moe is not None and config.moe.num_experts < size:
        return f"it has {config.moe.num_experts} experts"
    for name, count in _intermediate_sizes(config, whole_experts=whole_experts).items():
        if (count % size if block is None else -(-count // block) < size) and count:
            return f"{name} has {count} channels" + ("" if block is None else f" in blocks of {block}")
    return None


def _splits_heads(attention: GQAConfig | MLAConfig, size: int, blocks: tuple[int, int] | None) -> bool:
    """Whether ranks can share the query heads. Their numbers must be equal, except with a single kv head, which every
    rank has, unless scales, patterns or norms need equal parts. Falcon-7B has 71 heads."""
    if attention.num_heads % size == 0:
        return True
    if not isinstance(attention, GQAConfig) or attention.num_kv_heads > 1 or any(attention.blocksparse):
        return False
    if attention.qk_norm and attention.qk_norm_of is QKNorm.ROW:  # a rank's mean counts as much as any other's
        return False
    return blocks is None and size < attention.num_heads


def _head_channels(attention: GQAConfig | MLAConfig, size: int) -> dict[str, tuple[int, bool]]:
    """Returns one rank's channels of the projections that are split between heads, and whether they are also a
    projection's inputs."""
    num_heads = attention.num_heads // size
    if isinstance(attention, GQAConfig):
        layers = {*attention.layer_heads} or {(attention.num_kv_heads, attention.head_dim)}
        fewest = min(max(1, kv_heads // size) * head_dim for kv_heads, head_dim in layers)
        parts = {"queries": (num_heads * min(head_dim for _, head_dim in layers), True), "keys": (fewest, False)}
        if attention.v_head_dim is not None:
            parts["values"] = (fewest // attention.head_dim * attention.v_head_dim, False)
            parts["outputs"] = (num_heads * attention.v_head_dim, True)
        return parts
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
