"""Draws random weights for benchmarks and tests, the same in every process on the same kind of device.

Norms are 1; all other numbers are normal with the deviation of these families' initial weights.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from baton.models.formats.fp8 import E4M3, E4M3_MAX

_SEED = 0
_STD = 0.02
_NORMS = ("norm.weight", "ln_f.weight", "ln_attn.weight", "ln_mlp.weight", "layer_scalar")
_STORED_STD = 64.0  # deviation of fp8 numbers: seven of them fit below 448
_INPUT_SCALE = 1 / 16  # inputs up to 28 fit, many times the output of a norm
_NUMBERS_AT_ONCE = 1 << 26
_INTEGERS_SCALES = ("_scales", "_weight_scale")
_PACKED_STD = 6.5  # of the difference of two numbers of 4 bits
_INT8_STD = 18.0  # seven of them fit below 127
_MXFP4_SCALE = 120  # 2 ** -7; the numbers' deviation is 2.9


def fill_at_random(model: nn.Module) -> None:
    """Fills each parameter by one call, because one call per expert would take seconds."""
    generator: torch.Generator | None = None
    for module_path, module in model.named_modules():
        generator = _fill(module_path, module, generator)


def fill_part_at_random(whole: nn.Module, take: Callable[[str, nn.Module], None], device: torch.device | str) -> None:
    """Draws the numbers of `fill_at_random` module by module, so memory is needed for one module at a time.

    Args:
        whole: the whole model, on the meta device before and after.
        take: called with each module's path and the module, whose own parameters are filled during the call.
    """
    generator: torch.Generator | None = None
    for path, module in whole.named_modules():
        own = dict(module.named_parameters(recurse=False))
        for name, parameter in own.items():
            setattr(module, name, nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False))
        generator = _fill(path, module, generator)
        take(path, module)
        for name, parameter in own.items():
            setattr(module, name, parameter)


def fill_scales(weight_scales: Mapping[str, Tensor]) -> None:
    """Fills the scales of fp8 weights and of their inputs, by their names in checkpoints."""
    for name, scale in weight_scales.items():
        is_of_weight = name.rpartition(".")[2].startswith("weight")
        scale.fill_(_STD / _STORED_STD if is_of_weight else _INPUT_SCALE)


def _fill(path: str, module: nn.Module, generator: torch.Generator | None) -> torch.Generator | None:
    """Fills the module's own parameters. Returns the generator, which the first parameter of all creates."""
    for name, parameter in module.named_parameters(recurse=False):
        numbers = parameter.data
        if generator is None:
            generator = torch.Generator(numbers.device).manual_seed(_SEED)
        if name.endswith("_scale_inv"):
            continue
        if f"{path}.{name}".endswith(_NORMS):
            numbers.fill_(1.0)
        elif numbers.dtype == E4M3:
            _fill_fp8(numbers, generator)
        elif not numbers.is_floating_point():
            _fill_integers(name, numbers, generator)
        elif name.endswith(_INTEGERS_SCALES):
            numbers.fill_(_STD / _PACKED_STD)
        else:
            numbers.normal_(std=_STD, generator=generator)
    return generator


def _fill_integers(name: str, numbers: Tensor, generator: torch.Generator) -> None:
    """Fills words and bytes of packed numbers with random bits, and int8 weights with normal numbers."""
    if name.endswith("_scales"):
        numbers.fill_(_MXFP4_SCALE)
    elif numbers.dtype == torch.int8:
        for part in numbers.view(-1).split(_NUMBERS_AT_ONCE):
            drawn = torch.empty(part.shape, dtype=torch.bfloat16, device=part.device)
            part.copy_(drawn.normal_(std=_INT8_STD, generator=generator).clamp_(-127, 127))
    else:
        for part in numbers.view(-1).view(torch.uint8).split(_NUMBERS_AT_ONCE):
            part.random_(0, 256, generator=generator)


def _fill_fp8(numbers: Tensor, generator: torch.Generator) -> None:
    """Fills in pieces, because little memory is free for the numbers before they are rounded."""
    for part in numbers.view(-1).split(_NUMBERS_AT_ONCE):
        drawn = torch.empty(part.shape, dtype=torch.bfloat16, device=part.device)
        drawn.normal_(std=_STORED_STD, generator=generator).clamp_(-E4M3_MAX, E4M3_MAX)
        part.copy_(drawn)
