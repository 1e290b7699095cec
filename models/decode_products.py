"""Gives a model's linear layers the product for few rows, where it is faster than the library's. Knows no family."""

from torch import nn
from torch.nn.functional import linear

from models.kernels.decode_matmul import DecodeMultiply
from models.layers import Embedding
from models.linear import Linear


def use_decode_products(model: nn.Module) -> None:
    """Call it once the weights are loaded, and what is done to weights after loading is done; not for a model whose
    results must not depend on the batch. Changes nothing but on a Hopper GPU."""
    for module in model.modules():
        if isinstance(module, Linear | Embedding) and module.multiply is linear:
            product = DecodeMultiply.for_weight(module.weight)
            if product is not None:
                module.multiply = product


def use_library_products(model: nn.Module) -> list[DecodeMultiply]:
    """Undoes `use_decode_products`, to compare. Returns what was in use, which steps captured with it still need."""
    taken = []
    for module in model.modules():
        if isinstance(module, Linear | Embedding) and isinstance(module.multiply, DecodeMultiply):
            taken.append(module.multiply)
            module.multiply = linear
    return taken
