"""Replaces a model's layers by the quantized ones of its checkpoint, before memory for any weight is allocated.

Also maps the checkpoint's names of scales to the memory that they fill, and finishes the layers after loading.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from attention.mla import MLAAttention
from baton.core.errors import ConfigError
from baton.models.checkpoint.checkpoint import StoredTensor
from baton.models.checkpoint.names import LANGUAGE_MODEL, renamed
from baton.models.checkpoint.tensor_reader import read_tensor
from baton.models.config.model_config import ModelConfig
from baton.models.config.quantization.config import FP8_BLOCK, Fp8Config, Granularity, Quantization
from baton.models.config.quantization.int8_config import Int8Config
from baton.models.config.quantization.packed_config import PackedConfig
from baton.models.families.moe.gpt_oss import Mxfp4Experts
from baton.models.formats import fp8, mxfp4
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.linear import FusedLinear, Linear
from baton.models.layers.moe.experts import Experts
from baton.models.quantization.fp8_linear import Fp8Linear
from baton.models.quantization.int8_linear import Int8Linear
from baton.models.quantization.packed_experts import PackedExperts
from baton.models.quantization.packed_linear import PackedLinear

_WEIGHTS = ("weight", "weight_packed", "qweight")
# Spellings of DeepSeek and transformers, and of AutoFP8 and compressed-tensors.
_WEIGHT_SCALES = ("weight_scale_inv", "weight_scale")
_INPUT_SCALES = ("input_scale", "activation_scale")
_MAX_NAMED = 4

CheckpointName = Callable[[str], str]


@contextmanager
def weights_unallocated() -> Iterator[None]:
    """Models built in this context have no memory for the weights that `quantize` may replace.

    NOTE: torch keeps such hooks per process: build no other model at the same time.
    """
    # torch registers what a hook returns in place of the parameter; its annotation says None.
    handle = register_module_parameter_registration_hook(_without_memory)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def _without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None or not _is_replaceable(module, name):
        return None
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)


def _is_replaceable(module: nn.Module, name: str) -> bool:
    return (isinstance(module, Linear) and name == "weight") or isinstance(module, Experts)


def quantize(
    model: CausalLM,
    config: ModelConfig,
    checkpoint_name: CheckpointName,
    device: torch.device | str,
    stored: Mapping[str, StoredTensor],
) -> None:
    """Replaces the layers that `config.quantization` covers by quantized ones, and allocates the others. Fills nothing.

    Args:
        model: built within `weights_unallocated`.
        checkpoint_name: maps a module's path to its name in checkpoints.
        stored: the checkpoint; empty for random weights.

    Raises:
        ConfigError: the quantization covers only part of a fused layer, or covers experts in an unsupported way.
    """
    quantization = config.quantization
    assert quantization is not None
    replacements: dict[nn.Module, nn.Module] = {}

    def covers(name: str) -> bool:
        is_plain = isinstance(quantization, PackedConfig) and f"{name}.weight" in stored
        return not is_plain and all(quantization.covers(each) for each in _publisher_names(name, stored))

    for path, module in list(model.named_modules()):
        name = checkpoint_name(path)
        if isinstance(module, Experts) and covers(f"{name}.0.gate_proj"):
            if isinstance(quantization, PackedConfig):
                replacements[module] = PackedExperts(module, name, quantization, device=device, stored=stored)
            else:
                _quantize_experts(module, quantization, name, device)
        elif isinstance(module, Linear) and _covers(covers, module, name):
            replacements[module] = _quantized_linear(module, name, quantization, device, stored)
    # A layer can have several parents, such as MLA's projection of latents.
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in replacements:
                setattr(parent, name, replacements[child])
    _allocate(model, device)


def _publisher_names(name: str, stored: Mapping[str, StoredTensor]) -> tuple[str, ...]:
    """Returns the names that a publisher's list of unquantized layers may have for our layer `name`: as in the files,
    and without a multimodal model's prefix. Returns our name if the files have no such layer."""
    for suffix in _WEIGHTS:
        if tensor := stored.get(f"{name}.{suffix}"):
            theirs = tensor.name.removesuffix(f".{suffix}")
            return theirs, renamed(theirs, LANGUAGE_MODEL)
    return (name,)


def _allocate(model: nn.Module, device: torch.device | str) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                setattr(module, name, nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False))


def _quantized_linear(
    module: Linear,
    name: str,
    quantization: Quantization,
    device: torch.device | str,
    stored: Mapping[str, StoredTensor],
) -> Linear:
    own = name.rpartition(".")[2]
    match quantization:
        case PackedConfig():
            return PackedLinear(module, name, quantization, device=device, stored=stored)
        case Int8Config():
            return Int8Linear(module, own, quantization, device=device)
        case Fp8Config():
            return Fp8Linear(module, own, quantization, device=device)
        case _:
            raise AssertionError(f"{quantization} covers no linear layer")


def _covers(covers: Callable[[str], bool], module: Linear, name: str) -> bool:
    if not isinstance(module, FusedLinear):
        return covers(name)
    parent = name.rpartition(".")[0]
    covered = {f"{parent}.{part}": covers(f"{parent}.{part}") for part, _ in module.parts}
    if len(set(covered.values())) > 1:
        left_out = [name for name, is_covered in covered.items() if not is_covered]
        raise _refuse(
            f"{', '.join(left_out)} is left out of the quantization, but {', '.join(covered.keys() - left_out)} is not",
            allowed="layers that read the same input are quantized together, or left out together",
        )
    return all(covered.values())


def _quantize_experts(experts: Experts, quantization: Quantization, name: str, device: torch.device | str) -> None:
    if not isinstance(quantization, Fp8Config):
        raise _refuse(f"{name} is in int8", allowed="experts in fp8 with blocks of 128 by 128, or in packed integers")
    if quantization.weights is not Granularity.BLOCK:
        raise _refuse(f"{name} has one scale per {quantization.weights}", allowed="experts with blocks of 128 by 128")
    experts.power_of_two_inputs = quantization.power_of_two_inputs
    num_experts, rows, size = experts.gate_up_proj.shape
    blocks, blocks_of_size = -(-rows // 2 // FP8_BLOCK), -(-size // FP8_BLOCK)
    for parameter, scales in (("gate_up_proj", (2 * blocks, blocks_of_size)), ("down_proj", (blocks_of_size, blocks))):
        weight = torch.empty_like(getattr(experts, parameter), dtype=fp8.E4M3, device=device)
        # On the host until all are read, because there are tens of thousands of small tensors.
        scale = torch.empty(num_experts, *scales, dtype=torch.float32, device="cpu")
        setattr(experts, parameter, nn.Parameter(weight, requires_grad=False))
        setattr(experts, f"{parameter}_scale_inv", nn.Parameter(scale, requires_grad=False))


def weight_scale_views(
    model: CausalLM, stored: Mapping[str, StoredTensor], checkpoint_name: CheckpointName
) -> dict[str, Tensor]:
    """Returns the host memory for each scale, by its name in the checkpoint."""
    views: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, Fp8Linear | Int8Linear):
            parent = path.rpartition(".")[0]
            for part, scale, input_scale in module.checkpoint_scales():
                layer = checkpoint_name(f"{parent}.{part}")
                name = _spelled(layer, _WEIGHT_SCALES, stored)
                views[name] = _shaped_as(stored.get(name), scale)
                if input_scale is not None:
                    name = _spelled(layer, _INPUT_SCALES, stored)
                    views[name] = _shaped_as(stored.get(name), input_scale)
        elif isinstance(module, Experts) and module.gate_up_proj_scale_inv is not None:
            for part, scale in _expert_scales(module):
                views[_spelled(f"{checkpoint_name(path)}.{part}", _WEIGHT_SCALES, stored)] = scale
    return views


def _expert_scales(experts: Experts) -> Iterator[tuple[str, Tensor]]:
    assert experts.gate_up_proj_scale_inv is not None
    assert experts.down_proj_scale_inv is not None
    scales = (experts.gate_up_proj_scale_inv.data, experts.down_proj_scale_inv.data)
    for expert, gate_up, down in zip(experts.held, *scales, strict=True):
        gate, up = gate_up.chunk(2)
        yield f"{expert}.gate_proj", gate
        yield f"{expert}.up_proj", up
        yield f"{expert}.down_proj", down


def _spelled(module: str, spellings: tuple[str, ...], stored: Mapping[str, StoredTensor]) -> str:
    """Returns the scale's name in the checkpoint, or its first possible name if the checkpoint has none."""
    names = [f"{module}.{spelling}" for spelling in spellings]
    return next((name for name in names if name in stored), names[0])


def _shaped_as(tensor: StoredTensor | None, scale: Tensor) -> Tensor:
    """A view of `scale` with the tensor's axes: checkpoints keep one number as [] or [1], and one per row of all ranks
    as [rows] or [rows, 1]."""
    if tensor is None or len(tensor.shape) > 2 or (scale.dim() == 2 and scale.shape[1] > 1):
        return scale
    if len(tensor.shape) == 1 and scale.dim() == 2:
        return scale.view(-1)
    return scale.view(tensor.shape) if scale.numel() == math.prod(tensor.shape) else scale


def finish_quantized(model: CausalLM, views: Mapping[str, Tensor]) -> None:
    """Gives the layers their scales after loading, and dequantizes the layers that MLA splits.

    Args:
        views: the filled memory of all scales, by their names in the checkpoint.

    Raises:
        ConfigError: a scale is not a finite number above 0, or is too large for the model's dtype.
    """
    wrong = [name for name, view in views.items() if not bool((view.isfinite() & (view > 0)).all())]
    if wrong:
        raise ConfigError(
            f"scales are not all finite numbers above 0: {', '.join(wrong[:_MAX_NAMED])}"
            f"{', ...' if len(wrong) > _MAX_NAMED else ''}",
            field="model",
            allowed=("finite numbers above 0",),
            cure="download the checkpoint again, or take another",
        )
    for path, module in model.named_modules():
        if isinstance(module, Mxfp4Experts):
            for name, scales in module.scales().items():
                mxfp4.check_scales(f"{path}.{name}", scales, dtype=module.down_proj_bias.dtype)
        if isinstance(module, Fp8Linear | Int8Linear | PackedLinear | PackedExperts | Mxfp4Experts):
            module.finish()
        elif isinstance(module, Experts) and module.gate_up_proj_scale_inv is not None:
            for name in ("gate_up_proj_scale_inv", "down_proj_scale_inv"):
                on_device = getattr(module, name).to(module.gate_up_proj.device)
                setattr(module, name, nn.Parameter(on_device, requires_grad=False))
    for module in model.modules():
        # MLA absorbs parts of this layer into queries and outputs, in the model's dtype.
        if isinstance(module, MLAAttention) and isinstance(module.kv_b_proj, Fp8Linear | Int8Linear | PackedLinear):
            module.kv_b_proj.dequantize_()


def without_zero_biases(stored: Mapping[str, StoredTensor], views: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """Returns the tensors without the zeros that AutoGPTQ saves as biases of layers that have none."""
    return {
        name: tensor
        for name, tensor in stored.items()
        if name in views
        or not name.endswith(".bias")
        or f"{name.removesuffix('.bias')}.qweight" not in views
        or bool(read_tensor(tensor).any())
    }


def _refuse(problem: str, *, allowed: str) -> ConfigError:
    return ConfigError(
        problem,
        field="quantization_config",
        allowed=(allowed,),
        cure="take the checkpoint in bfloat16, or another in fp8",
    )
