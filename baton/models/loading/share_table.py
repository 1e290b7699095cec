"""The table of the tensors that are split among ranks, for all families.

Names are as in checkpoints, or paths of our modules for families with other names there. Where ranks' results are
summed, the first rank holds the bias and the others have zeros.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from baton.models.checkpoint.share import Share, as_inputs, by_turns, one_after_another, times, with_gates
from baton.models.config.model_config import GQAConfig, MLAConfig, ModelConfig, MoEConfig, QKNorm
from baton.models.config.quantization.mxfp4_config import MXFP4_BLOCK
from baton.models.families.dense.layer_norm_config import LayerNormSwitches, Projection
from baton.models.families.dense.llama_switches import LlamaSwitches
from baton.models.families.dense.phi3_small_config import Phi3SmallSwitches
from baton.models.families.hybrid.delta_config import DeltaSwitches
from baton.models.families.hybrid.lfm2_config import Lfm2Switches
from baton.models.families.hybrid.mamba_config import MambaSwitches
from baton.models.layers.parallel import (
    TensorParallel,
    channel_block,
    channels,
    experts,
    kv_heads,
    query_heads,
    vocabulary_rows,
)

# Tensors with all of a layer's experts.
_IN_ONE = tuple(
    f"{layer}{suffix}" for layer in ("gate_up_proj", "down_proj") for suffix in ("", "_bias", "_blocks", "_scales")
)


def share_table(config: ModelConfig, parallel: TensorParallel) -> Iterator[tuple[str, Share]]:
    """Yields names without the layer and its number, with `*` for an expert's number. The last share of a name counts.
    A whole name takes precedence, for layers that differ."""
    rows = Share(0, config.vocab_size, (vocabulary_rows(config.vocab_size, parallel),))
    for vocabulary in ("model.embed_tokens", "transformer.word_embeddings", "lm_head"):
        yield f"{vocabulary}.weight", rows
    yield "lm_head.bias", rows
    of_first = Share(0, config.hidden_size, (range(config.hidden_size),) if parallel.rank == 0 else ())
    attention, block = config.attention, channel_block(config)
    if isinstance(attention, GQAConfig):
        yield from _grouped_attention(attention, of_first, parallel)
        for index, (num_kv_heads, head_dim) in enumerate(attention.layer_heads):
            own = replace(attention, num_kv_heads=num_kv_heads, head_dim=head_dim)
            yield from _of_layer(index, _grouped_attention(own, of_first, parallel))
    elif not parallel.own_attention:
        yield from _latent_attention(attention, parallel)

    def part_of(size: int) -> Share:
        return Share(0, size, (channels(size, parallel, block=block),))

    yield from _plain_mlp(part_of(config.intermediate_size), of_first)
    for mlp in ("mlps.0", "mlps.1"):
        yield from _mlp(mlp, part_of(config.intermediate_size), of_first)
    for mlp in ("mlp", "feed_forward"):
        yield from _mlp(mlp, part_of(config.intermediate_size), of_first)
        if config.moe is not None:
            if not parallel.whole_experts:
                yield from _mlp(f"{mlp}.experts.*", part_of(config.moe.intermediate_size), of_first)
            for shared in () if parallel.sends_to_experts else ("shared_experts", "shared_expert"):
                yield from _mlp(f"{mlp}.{shared}", part_of(config.moe.shared_intermediate_size), of_first)
    if config.moe is not None and parallel.whole_experts:
        for index, held in enumerate(experts_by_layer(config.moe, parallel)):
            whole = Share(0, config.moe.num_experts, tuple(_runs(held)))
            paths = ("experts.", "mlp.experts.", "feed_forward.experts.")
            yield from _of_layer(index, ((path + name, whole) for path in paths for name in _IN_ONE))
    elif config.moe is not None:
        part = channels(config.moe.intermediate_size, parallel, block=block)
        yield from _experts_in_one(config.moe, part, of_first)
        if isinstance(config.switches, LlamaSwitches) and config.switches.stacked_experts:
            size = config.moe.intermediate_size
            side_by_side = (part, range(size + part.start, size + part.stop))
            yield "mlp.experts.gate_up_proj", Share(2, 2 * size, side_by_side)
    for index, size in enumerate(config.intermediate_sizes):
        yield from _of_layer(index, _mlp("mlp", part_of(size), of_first))
    if isinstance(config.switches, LayerNormSwitches):
        yield from _layer_norm_decoder(config, config.switches, part_of(config.intermediate_size), parallel)
    if isinstance(config.switches, DeltaSwitches) and config.recurrent is not None:
        for index, keeps in enumerate(config.recurrent.layers):
            if keeps:
                yield from _of_layer(index, _delta_rule(config.switches, config.recurrent.num_heads, parallel))
    if isinstance(config.switches, MambaSwitches):
        yield from _mamba(config, config.switches, part_of(config.intermediate_size), of_first, parallel)
    if isinstance(config.switches, Lfm2Switches) and config.recurrent is not None:
        yield from _gated_convolution(config.hidden_size, config.recurrent.num_heads, of_first, parallel)
    if isinstance(config.switches, Phi3SmallSwitches):
        for parameter in ("weight", "bias"):
            yield f"mlp.up_proj.{parameter}", by_turns(part_of(config.intermediate_size))


def experts_by_layer(moe: MoEConfig, parallel: TensorParallel) -> list[Sequence[int]]:
    """Returns the rank's whole experts of each layer, in the order of its memory; those of an MTP layer come last."""
    placement = parallel.placement
    if placement is None:
        return [experts(moe.num_experts, parallel)] * (len(moe.layers) + 1)
    layers = *placement.layers, placement.mtp
    return [() if layer is None else layer.ranks[parallel.rank] for layer in layers]


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """Yields runs of consecutive numbers, in their order."""
    start = 0
    for stop in range(1, len(numbers) + 1):
        if stop == len(numbers) or numbers[stop] != numbers[stop - 1] + 1:
            yield range(numbers[start], numbers[stop - 1] + 1)
            start = stop


def _of_layer(index: int, shares: Iterator[tuple[str, Share]]) -> Iterator[tuple[str, Share]]:
    for name, share in shares:
        yield f"model.layers.{index}.{name}", share


def _grouped_attention(gqa: GQAConfig, of_first: Share, parallel: TensorParallel) -> Iterator[tuple[str, Share]]:
    heads, sharing = query_heads(gqa.num_heads, parallel), kv_heads(gqa.num_kv_heads, parallel)
    queries = Share(0, gqa.num_heads * gqa.head_dim, (times(heads, gqa.head_dim),))
    keys = Share(0, gqa.num_kv_heads * gqa.head_dim, (times(sharing, gqa.head_dim),))
    values = Share(0, gqa.num_kv_heads * gqa.value_dim, (times(sharing, gqa.value_dim),))
    outputs = Share(0, gqa.num_heads * gqa.value_dim, (times(heads, gqa.value_dim),))
    for parameter in ("weight", "bias"):
        yield f"self_attn.q_proj.{parameter}", with_gates(queries) if gqa.output_gate else queries
        yield f"self_attn.k_proj.{parameter}", keys
        yield f"self_attn.v_proj.{parameter}", values
        yield f"self_attn.qkv_proj.{parameter}", one_after_another(queries, keys, values)
    if gqa.qk_norm and gqa.qk_norm_of is QKNorm.ROW:
        yield "self_attn.q_norm.weight", queries
        yield "self_attn.k_norm.weight", keys
    if gqa.qk_norm and gqa.qk_norm_of is QKNorm.OWN_WEIGHTS:
        yield "self_attn.q_norm.weight", Share(0, gqa.num_heads, (heads,))
        yield "self_attn.k_norm.weight", Share(0, gqa.num_kv_heads, (sharing,))
    yield "self_attn.o_proj.weight", as_inputs(outputs)
    yield "self_attn.o_proj.bias", of_first
    yield "self_attn.sinks", Share(0, gqa.num_heads, (heads,))
    in_one = _queries_keys_values(gqa, parallel)
    for attention in ("self_attn", "self_attention"):
        yield f"{attention}.query_key_value.weight", in_one
        yield f"{attention}.query_key_value.bias", in_one
        yield f"{attention}.dense.weight", as_inputs(queries)
        yield f"{attention}.dense.bias", of_first


def _queries_keys_values(gqa: GQAConfig, parallel: TensorParallel) -> Share:
    """Returns the share of a tensor that has, for each kv head, its queries, its keys and its values."""
    heads, sharing = query_heads(gqa.num_heads, parallel), kv_heads(gqa.num_kv_heads, parallel)
    group = gqa.num_heads // gqa.num_kv_heads + 2
    if len(heads) == len(sharing) * (group - 2):
        parts = [times(sharing, group)]
    else:  # ranks share a kv head: each has some of its queries, and all of its keys and values
        before, stop = 2 * sharing.start, sharing.stop * group
        parts = [range(heads.start + before, heads.stop + before), range(stop - 2, stop)]
    return Share(0, gqa.num_kv_heads * group * gqa.head_dim, tuple(times(part, gqa.head_dim) for part in parts))


def _queries_then_keys_then_values(gqa: GQAConfig, parallel: TensorParallel) -> Share:
    """Returns the share of a tensor with the queries of all heads, then their keys, then their values."""
    heads, sharing = query_heads(gqa.num_heads, parallel), kv_heads(gqa.num_kv_heads, parallel)
    keys, values = gqa.num_heads, gqa.num_heads + gqa.num_kv_heads
    parts = [heads, *(range(first + sharing.start, first + sharing.stop) for first in (keys, values))]
    size = (gqa.num_heads + 2 * gqa.num_kv_heads) * gqa.head_dim
    return Share(0, size, tuple(times(part, gqa.head_dim) for part in parts))


def _layer_norm_decoder(
    config: ModelConfig, switches: LayerNormSwitches, channels_of_mlp: Share, parallel: TensorParallel
) -> Iterator[tuple[str, Share]]:
    gqa = config.attention
    assert isinstance(gqa, GQAConfig)
    by_head = switches.projection is Projection.BY_HEAD
    in_one = (_queries_keys_values if by_head else _queries_then_keys_then_values)(gqa, parallel)
    yield "self_attn.qkv_proj.bias", in_one
    yield "self_attn.qkv_proj.weight", as_inputs(in_one) if switches.inputs_first else in_one
    if switches.inputs_first:
        heads = times(query_heads(gqa.num_heads, parallel), gqa.head_dim)
        yield "self_attn.o_proj.weight", Share(0, gqa.num_heads * gqa.head_dim, (heads,))
        yield "mlp.up_proj.weight", as_inputs(channels_of_mlp)
        yield "mlp.down_proj.weight", channels_of_mlp


def _delta_rule(switches: DeltaSwitches, num_heads: int, parallel: TensorParallel) -> Iterator[tuple[str, Share]]:
    """Yields the shares of a layer with a delta rule: a rank has some key heads with all their parts."""
    heads = kv_heads(num_heads, parallel)

    def of_heads(channels_per_head: int) -> Share:
        return Share(0, num_heads * channels_per_head, (times(heads, channels_per_head),))

    each = switches.values_per_key
    keys, values, numbers = (of_heads(size) for size in (switches.key_dim, each * switches.value_dim, each))
    qkv = one_after_another(keys, keys, values)
    yield "linear_attn.in_proj_qkvz.weight", of_heads(switches.conv_channels + each * switches.value_dim)
    yield "linear_attn.in_proj_ba.weight", of_heads(2 * each)
    yield "linear_attn.in_proj_qkv.weight", qkv
    yield "linear_attn.in_proj_z.weight", values
    for name in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        yield f"linear_attn.{name}", numbers
    yield "linear_attn.conv1d.weight", qkv
    yield "linear_attn.out_proj.weight", as_inputs(values)
    for name in ("q_proj", "k_proj", "q_conv1d", "k_conv1d", "f_b_proj"):
        yield f"self_attn.{name}.weight", keys
    for name in ("v_proj", "v_conv1d", "g_b_proj"):
        yield f"self_attn.{name}.weight", values
    yield "self_attn.b_proj.weight", numbers
    yield "self_attn.dt_bias", keys
    yield "self_attn.A_log", Share(2, num_heads, (heads,))
    yield "self_attn.o_proj.weight", as_inputs(values)


def _mamba(
    config: ModelConfig,
    switches: MambaSwitches,
    channels_of_mlp: Share,
    of_first: Share,
    parallel: TensorParallel,
) -> Iterator[tuple[str, Share]]:
    """Yields the shares of Mamba-2 layers, and of other parts under the names in such models."""
    if config.moe is None:
        yield from _mlp("mlp.shared_experts", channels_of_mlp, of_first)
    if switches.kinds:
        for name, share in _grouped_attention(_gqa(config), of_first, parallel):
            yield name.replace("self_attn.", "mixer."), share
        for parameter in ("weight", "bias"):
            yield f"mixer.up_proj.{parameter}", channels_of_mlp
        yield "mixer.down_proj.weight", as_inputs(channels_of_mlp)
        yield "mixer.down_proj.bias", of_first
        yield "mixer.fc2_latent_proj.bias", of_first
    if switches.kinds and config.moe is not None:
        moe = config.moe
        split = {"shared_experts": moe.shared_intermediate_size}
        if not parallel.whole_experts:
            split["experts.*"] = moe.intermediate_size
        for experts, size in split.items():
            part = Share(0, size, (channels(size, parallel, block=None),))
            for parameter in ("weight", "bias"):
                yield f"mixer.{experts}.up_proj.{parameter}", part
            yield f"mixer.{experts}.down_proj.weight", as_inputs(part)
            yield f"mixer.{experts}.down_proj.bias", of_first
    if (recurrent := config.recurrent) is None:
        return
    own_heads, own_groups = (kv_heads(count, parallel) for count in (recurrent.num_heads, recurrent.num_groups))
    heads = Share(0, recurrent.num_heads, (own_heads,))
    inner = Share(0, recurrent.num_heads * switches.head_dim, (times(own_heads, switches.head_dim),))
    shared = Share(0, recurrent.num_groups * switches.state_size, (times(own_groups, switches.state_size),))
    for mixer in ("mamba", "mixer"):
        for parameter in ("weight", "bias"):
            yield f"{mixer}.in_proj.{parameter}", one_after_another(inner, inner, shared, shared, heads)
            yield f"{mixer}.conv1d.{parameter}", one_after_another(inner, shared, shared)
        for each in ("A_log", "D", "dt_bias"):
            yield f"{mixer}.{each}", heads
        yield f"{mixer}.norm.weight", inner
        yield f"{mixer}.out_proj.weight", as_inputs(inner)
        yield f"{mixer}.out_proj.bias", of_first


def _gqa(config: ModelConfig) -> GQAConfig:
    assert isinstance(config.attention, GQAConfig)
    return config.attention


def _gated_convolution(
    size: int, num_heads: int, of_first: Share, parallel: TensorParallel
) -> Iterator[tuple[str, Share]]:
    """Yields the shares of LFM2's convolutions: a rank has some heads' channels of both gates and of the input."""
    part = Share(0, size, (times(kv_heads(num_heads, parallel), size // num_heads),))
    for parameter in ("weight", "bias"):
        yield f"conv.in_proj.{parameter}", one_after_another(part, part, part)
        yield f"conv.conv.{parameter}", part
    yield "conv.out_proj.weight", as_inputs(part)
    yield "conv.out_proj.bias", of_first


def _latent_attention(mla: MLAConfig, parallel: TensorParallel) -> Iterator[tuple[str, Share]]:
    """Yields the shares of a layer's latent attention, or of both if it has two."""
    heads = query_heads(mla.num_heads, parallel)

    def of_heads(channels_per_head: int) -> Share:
        return Share(0, mla.num_heads * channels_per_head, (times(heads, channels_per_head),))

    queries = of_heads(mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    for attention in ("self_attn", "self_attn.0", "self_attn.1"):
        yield f"{attention}.q_proj.weight", queries
        yield f"{attention}.q_b_proj.weight", queries
        yield f"{attention}.kv_b_proj.weight", of_heads(mla.qk_nope_head_dim + mla.v_head_dim)
        yield f"{attention}.o_proj.weight", as_inputs(of_heads(mla.v_head_dim))


def _mlp(prefix: str, part: Share, of_first: Share) -> Iterator[tuple[str, Share]]:
    for parameter in ("weight", "bias"):
        yield f"{prefix}.gate_proj.{parameter}", part
        yield f"{prefix}.up_proj.{parameter}", part
        yield f"{prefix}.gate_up_proj.{parameter}", one_after_another(part, part)
    yield f"{prefix}.down_proj.weight", as_inputs(part)
    yield f"{prefix}.down_proj.bias", of_first


def _plain_mlp(part: Share, of_first: Share) -> Iterator[tuple[str, Share]]:
    """An MLP of two layers."""
    for parameter in ("weight", "bias"):
        yield f"mlp.dense_h_to_4h.{parameter}", part
    yield "mlp.dense_4h_to_h.weight", as_inputs(part)
    yield "mlp.dense_4h_to_h.bias", of_first


def _experts_in_one(moe: MoEConfig, part: range, of_first: Share) -> Iterator[tuple[str, Share]]:
    """Yields the shares of tensors with all of a layer's experts. gpt-oss alternates gates and ups; Llama-4 and Gemma 4
    have all gates before all ups. Inputs come first, except in Gemma 4."""
    size = moe.intermediate_size
    side_by_side = (part, range(size + part.start, size + part.stop))
    yield "experts.gate_up_proj", Share(1, 2 * size, side_by_side)
    yield "experts.down_proj", Share(2, size, (part,))
    yield "mlp.experts.gate_up_proj", by_turns(Share(2, size, (part,)))
    groups = range(part.start // MXFP4_BLOCK, -(-part.stop // MXFP4_BLOCK))
    for kind in ("blocks", "scales"):
        yield f"mlp.experts.gate_up_proj_{kind}", by_turns(Share(1, size, (part,)))
        yield f"mlp.experts.down_proj_{kind}", Share(2, -(-size // MXFP4_BLOCK), (groups,))
    yield "mlp.experts.gate_up_proj_bias", by_turns(Share(1, size, (part,)))
    yield "mlp.experts.down_proj_bias", Share(1, of_first.size, of_first.ranges)
    yield "feed_forward.experts.gate_up_proj", Share(2, 2 * size, side_by_side)
    for mlp in ("mlp", "feed_forward"):
        yield f"{mlp}.experts.down_proj", Share(1, size, (part,))
