"""Chooses the method of each matrix product of a loaded model: the library's, the batch-invariant one, or the one for
few rows.

Linear layers, embeddings, routers and experts multiply by their attribute `multiply`, latent attention by
`multiply_heads`; the functions here replace these attributes.
"""

from torch import nn
from torch.nn.functional import linear

from attention.kernels.mla.head_products import HeadProducts
from attention.mla import MLAAttention, library_heads_product
from baton.core.errors import InternalError
from baton.models.kernels.matmul.decode_matmul import DecodeMultiply
from baton.models.kernels.matmul.matmul import multiply_heads_invariant, multiply_invariant
from baton.models.layers.embedding import Embedding
from baton.models.layers.linear import Linear


def make_batch_invariant(model: nn.Module) -> None:
    """Makes a token's results have the same bits in any batch. Call it after weights are loaded and post-processed.

    Replaces every product for which the library chooses its method by the number of rows, and sets the attribute
    `batch_invariant` of modules that have kernels of their own. Norms, activations and rotations work row by row
    already, and attention is the backend's (`AttentionNeeds.batch_invariant`).

    Raises:
        InternalError: a module multiplies by an unknown method.
    """
    for name, module in model.named_modules():
        if hasattr(module, "batch_invariant"):
            module.batch_invariant = True
        if hasattr(module, "multiply"):
            if module.multiply not in (linear, multiply_invariant):
                raise InternalError(
                    f"{name} multiplies by {module.multiply!r}, which may depend on the batch",
                    field="batch_invariant",
                    cure="let its product be replaced, or give the module an attribute batch_invariant and keep it",
                )
            module.multiply = multiply_invariant
        if isinstance(module, MLAAttention):
            module.multiply_heads = multiply_heads_invariant


def use_decode_products(model: nn.Module) -> None:
    """Uses the product for few rows where it is faster than the library's, which is on Hopper GPUs only.

    Call it after weights are loaded and post-processed, and not for a batch-invariant model.
    """
    for module in model.modules():
        if isinstance(module, Linear | Embedding) and module.multiply is linear and module.weight.dim() == 2:
            product = DecodeMultiply.for_weight(module.weight)
            if product is not None:
                module.multiply = product
        elif isinstance(module, MLAAttention) and module.multiply_heads is library_heads_product:
            heads_product = HeadProducts.for_weight(module.kv_b_proj.weight)
            if heads_product is not None:
                module.multiply_heads = heads_product


def use_library_products(model: nn.Module) -> list[DecodeMultiply]:
    """Undoes `use_decode_products`, to compare the two.

    Returns the replaced products. Keep them while steps that were captured with them are replayed.
    """
    replaced = []
    for module in model.modules():
        if isinstance(module, Linear | Embedding) and isinstance(module.multiply, DecodeMultiply):
            replaced.append(module.multiply)
            module.multiply = linear
        elif isinstance(module, MLAAttention) and isinstance(module.multiply_heads, HeadProducts):
            module.multiply_heads = library_heads_product  # a heads' product owns no memory
    return replaced
