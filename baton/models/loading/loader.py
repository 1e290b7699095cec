"""Builds a model and fills its parameters from safetensors files, or at random for benchmarks and tests.

Maps a checkpoint's tensor names to parameters. Weights are read only after all names, shapes and dtypes are found to
fit.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend
from attention.mla import MLAAttention
from baton.core.errors import ConfigError
from baton.kvcache.cache import TORCH_DTYPES
from baton.kvcache.spec import DTYPE_BYTES, FP8_DTYPES
from baton.models.checkpoint.checkpoint import StoredTensor, read_checkpoint
from baton.models.checkpoint.names import EMBEDDING, HEAD, LANGUAGE_MODEL, SCORE, renamed
from baton.models.checkpoint.share import Share
from baton.models.checkpoint.tensor_reader import read_into
from baton.models.config.expert_places import ExpertPlacement
from baton.models.config.model_config import ModelConfig
from baton.models.config.quantization.packed_config import PackedConfig
from baton.models.families.dense.llama_switches import LlamaSwitches
from baton.models.families.hybrid.delta_parts import DeltaMixer
from baton.models.families.table import family_of
from baton.models.layers.causal_lm import CausalLM, ModelClass
from baton.models.layers.expert_counts import ExpertCounts
from baton.models.layers.linear import FusedLinear, InputsFirstLinear
from baton.models.layers.moe.experts import Experts, RoutedExperts
from baton.models.layers.moe.router import Router
from baton.models.layers.moe.ungated_experts import SquaredReluExperts
from baton.models.layers.norms import NormOfEachHead
from baton.models.layers.parallel import SINGLE, TensorParallel
from baton.models.layers.products import make_batch_invariant, use_decode_products
from baton.models.loading.checkpoint_check import check_tensors, check_tied_head, take_tied_head
from baton.models.loading.dummy import fill_at_random, fill_part_at_random, fill_scales
from baton.models.loading.expert_names import in_our_names
from baton.models.loading.kv_scales import (
    add_scales,
    check_scales,
    refuse_scales_of_another_format,
    scale_views,
    without_scales,
)
from baton.models.loading.local_config import local_config
from baton.models.loading.shares import Shares
from baton.models.quantization.replace import (
    finish_quantized,
    quantize,
    weight_scale_views,
    weights_unallocated,
    without_zero_biases,
)

LOAD_FORMATS = ("safetensors", "dummy")
# Models whose published checkpoints may lack the first prefix that files saved today have.
_FIRST_PREFIXES = MappingProxyType({"transformer.": "transformer.", "model.decoder.": "model.", "model.": "model."})
_OTHER_PARTS = (
    "vision_tower.",
    "vision_model.",
    "visual.",
    "multi_modal_projector.",
    "mm_projector.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
)


def load_model(
    directory: Path,
    config: ModelConfig,
    *,
    backend: AttentionBackend,
    dtype: str,
    device: torch.device | str,
    kv_dtype: str = "",
    load_format: str = "safetensors",
    batch_invariant: bool = False,
    parallel: TensorParallel = SINGLE,
    progress: Callable[[int, int], None] | None = None,
) -> CausalLM:
    """Builds the model of `config` on `device`, ready for inference; weights are in `dtype`, or quantized as in
    `config`.

    With several ranks, it builds one rank's part and reads only that part of the tensors.

    Args:
        config: of the whole model.
        kv_dtype: of the cache; "" means `dtype`. An fp8 cache takes the checkpoint's scales, or 1 where it has none.
        load_format: "safetensors" reads `directory`; "dummy" draws the same weights in every process on the same
            kind of device, and each rank keeps its part of them.
        batch_invariant: a token's results have the same bits in any batch.
        progress: called repeatedly with the bytes read so far and the bytes in all.

    Raises:
        ConfigError: a value is unknown, the model cannot be split so, or the checkpoint is damaged or does not fit
            `config`; names every tensor that is missing, unexpected or misshapen, up to a handful.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format is {load_format!r}", field="load_format", value=load_format, allowed=LOAD_FORMATS
        )
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype is {dtype!r}", field="dtype", value=dtype, allowed=tuple(DTYPE_BYTES))
    parallel = replace(parallel, in_order=batch_invariant)
    if load_format == "dummy" and isinstance(config.quantization, PackedConfig):
        # Without a checkpoint there is no order of inputs.
        config = replace(config, quantization=replace(config.quantization, reordered=False))
    stored = _language_model(read_checkpoint(directory)) if load_format == "safetensors" else {}
    if config.headless:
        stored = {name: tensor for name, tensor in stored.items() if name != HEAD}
    config = _as_stored(config, stored)
    model = _build(
        local_config(config, parallel),
        backend=backend,
        dtype=TORCH_DTYPES[dtype],
        device=device,
        stored=stored,
        parallel=parallel,
    )
    model.join(parallel, vocab_size=config.vocab_size)
    shares = Shares(config, parallel)
    if kv_dtype in FP8_DTYPES:
        with torch.device(device):
            add_scales(model)
    model.requires_grad_(requires_grad=False).eval()

    def checkpoint_name(path: str) -> str:
        return renamed(path, model.prefixes)

    if load_format == "dummy":
        weight_scales = weight_scale_views(model, {}, checkpoint_name)
        if parallel.size == 1:
            fill_at_random(model)
        else:
            whole = _build(config, backend=backend, dtype=TORCH_DTYPES[dtype], device="meta")
            fill_part_at_random(whole, partial(take_shares, model, shares), device)
        fill_scales(weight_scales)
    else:
        views = checkpoint_views(model)
        stored = _with_prefixes_of(views, stored if kv_dtype in FP8_DTYPES else without_scales(stored))
        stored = in_our_names(stored, views)
        stored = without_zero_biases(stored, views)
        head, embedding = checkpoint_name(HEAD), checkpoint_name(EMBEDDING)
        stored, tied_head = take_tied_head(stored, views, head=head, embedding=embedding)
        kv_scales = scale_views(model, stored, checkpoint_name)
        refuse_scales_of_another_format(kv_scales, kv_dtype)
        weight_scales = weight_scale_views(model, stored, checkpoint_name)
        views |= kv_scales | weight_scales
        check_tensors(stored, views, shares, config, directory)
        parts = [part for name, view in views.items() for part in cut(stored[name], view, shares.of(name))]
        read_into(parts, progress)
        check_scales(kv_scales)
        if tied_head is not None:
            check_tied_head(tied_head, model.model.embed_tokens.weight, shares.of(embedding))
    finish_quantized(model, weight_scales)
    for module in model.modules():
        if isinstance(module, MLAAttention | DeltaMixer | Router):
            module.process_weights_after_loading()
    if batch_invariant:
        make_batch_invariant(model)
    elif parallel.size == 1:  # not measured for the narrower weights of several ranks
        use_decode_products(model)
    return model


def _as_stored(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> ModelConfig:
    """Returns the config for experts stored outputs first, which is how transformers saves experts published inputs
    first."""
    switches, moe = config.switches, config.moe
    if not isinstance(switches, LlamaSwitches) or not switches.stacked_experts or moe is None:
        return config
    shapes = {tensor.shape for name, tensor in stored.items() if name.endswith(".mlp.experts.gate_up_proj")}
    outputs_first = (moe.num_experts, 2 * moe.intermediate_size, config.hidden_size)
    if shapes != {outputs_first}:
        return config
    return replace(config, switches=replace(switches, stacked_experts=False))


def _build(
    config: ModelConfig,
    *,
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device | str,
    stored: Mapping[str, StoredTensor] = MappingProxyType({}),
    parallel: TensorParallel = SINGLE,
) -> CausalLM:
    """Builds the model with its parameters allocated, each directly in its final dtype.

    Args:
        config: of the rank.
        stored: the checkpoint, which has the dtypes of scales; empty for random weights.
    """
    quantized = config.quantization is not None
    model_class: ModelClass = resolve_name(family_of(config.architecture).model)
    with torch.device(device), weights_unallocated() if quantized else nullcontext():
        model = model_class(config, backend=backend, dtype=dtype)
        if parallel.placement is not None:
            _place(model, parallel.placement, parallel.rank)
    if quantized:
        known = in_our_names(stored, ()) | dict(stored)
        quantize(model, config, lambda path: renamed(path, model.prefixes), device, known)
    return model


def _place(model: CausalLM, placement: ExpertPlacement, rank: int) -> None:
    """Gives each layer's experts their numbers by the plan, and counters for their tokens. It must run before anything
    reads the names of the experts' tensors."""
    indices = [index for index, _ in placement.mixtures]
    places = placement.layer(indices[0]).num_places
    model.expert_counts = ExpertCounts(indices, places, torch.get_default_device())
    for index, layer in enumerate(model.model.layers):
        for module in layer.modules():
            if isinstance(module, RoutedExperts):
                module.place(placement.layer(index), rank)
                module.counts = model.expert_counts.of_layer(index)
    for module in () if model.mtp is None else model.mtp.modules():
        if isinstance(module, RoutedExperts):
            assert placement.mtp is not None, "the plan was made for a model that drafts"
            module.place(placement.mtp, rank)


def checkpoint_views(model: CausalLM) -> dict[str, Tensor]:
    """Returns the memory, a parameter or a part of one, for each tensor name in a checkpoint of `model`."""
    return {renamed(path, model.prefixes): view for path, view in _checkpoint_views(model)}


def _checkpoint_views(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        yield from module_views(path, module)


def module_views(path: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (name in the checkpoint, memory that it fills) for each of the module's own parameters."""
    match module:
        case FusedLinear():
            parent = path.rpartition(".")[0]
            yield from ((f"{parent}.{name}", view) for name, view in module.checkpoint_views())
        case Experts() | SquaredReluExperts() | InputsFirstLinear() | NormOfEachHead():
            yield from ((f"{path}.{name}", view) for name, view in module.checkpoint_views())
        case _:
            for name, parameter in module.named_parameters(recurse=False):
                yield f"{path}.{name}", parameter.data


def cut(stored: StoredTensor, view: Tensor, share: Share | None) -> Iterator[tuple[StoredTensor, Tensor]]:
    """Yields the stored tensor, or the rank's parts of it, each with the memory that it fills."""
    if share is None:
        yield stored, view
        return
    for part, held in _held(view, share):
        yield stored.part(share.dim, part), held


def _held(view: Tensor, share: Share) -> Iterator[tuple[range, Tensor]]:
    """Yields each range of the share with its memory, and fills the rest of the view with zeros."""
    filled = 0
    for part in share.ranges:
        yield part, view.narrow(share.dim, filled, len(part))
        filled += len(part)
    view.narrow(share.dim, filled, view.shape[share.dim] - filled).zero_()


def take_shares(model: nn.Module, shares: Shares, path: str, whole: nn.Module) -> None:
    """Copies to `model` the rank's part of the parameters of `whole`, the whole model's module at `path`."""
    views = dict(module_views(path, model.get_submodule(path)))
    for name, tensor in module_views(path, whole):
        if shares.elsewhere(name):
            continue
        share = shares.of(name)
        if share is None:
            views[name].copy_(tensor)
            continue
        for part, held in _held(views[name], share):
            held.copy_(tensor.narrow(share.dim, part.start, len(part)))


def _language_model(stored: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """Returns the tensors of a multimodal model's language model, by its own names.

    Publishers prefix these tensors with `language_model.`, or prefix only the other models' tensors. Since transformers
    4.52 some files have the prefix after `model.`.
    """
    if not any(name.startswith((*LANGUAGE_MODEL, *_OTHER_PARTS)) for name in stored):
        return stored
    return {
        renamed(name, LANGUAGE_MODEL): tensor
        for name, tensor in stored.items()
        if not name.removeprefix("model.").startswith(_OTHER_PARTS)
    }


def _with_prefixes_of(views: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """Adds the first prefix of names where BLOOM, GPT-2, OPT and models without a head were published without it."""
    for prefix, first in _FIRST_PREFIXES.items():
        prefixed = any(name.startswith(prefix) for name in views)
        if prefixed and not any(name.startswith(first) for name in stored):
            return {name if name in (HEAD, SCORE) else first + name: tensor for name, tensor in stored.items()}
    return stored
