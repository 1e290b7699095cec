"""Gives a model's linear layers, and the heads of latent attention, the product for few rows, where it is faster than
the library's. Knows no family."""

from torch import nn
from torch.nn.functional import linear

from attention.kernels.mla.head_products import HeadProducts
from attention.mla import MLAAttention, library_heads_product
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
        elif isinstance(module, MLAAttention) and module.multiply_heads is library_heads_product:
            heads_product = HeadProducts.for_weight(module.kv_b_proj.weight)
            if heads_product is not None:
                module.multiply_heads = heads_product


def use_library_products(model: nn.Module) -> list[DecodeMultiply]:
    """Undoes `use_decode_products`, to compare. Returns what was in use, which steps captured with it still need."""
    taken = []
    for module in model.modules():
        if isinstance(module, Linear | Embedding) and isinstance(module.multiply, DecodeMultiply):
            taken.append(module.multiply)
            module.multiply = linear
        elif isinstance(module, MLAAttention) and isinstance(module.multiply_heads, HeadProducts):
            module.multiply_heads = library_heads_product  # a heads' product owns no memory
    return taken
