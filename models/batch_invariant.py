"""Makes a model's results independent of the batch: a token's have the same bits whatever else runs in its step.

Knows no family: modules offer what can be replaced. Norms, activations and rotations work row by row already, and
attention is the backend's (`AttentionNeeds.batch_invariant`).
"""

from torch import nn
from torch.nn.functional import linear

from attention.mla import MLAAttention
from baton.errors import InternalError
from models.kernels.matmul import multiply_heads_invariant, multiply_invariant


def make_batch_invariant(model: nn.Module) -> None:
    """Replaces every product whose method the libraries choose by the number of rows. Call it once the weights are
    loaded, and what is done to weights after loading is done.

    Modules with an attribute `multiply` get another one; those with an attribute `batch_invariant`, whose kernels are
    their own, are told.

    Raises:
        InternalError: a module multiplies by a method that is not known here.
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
