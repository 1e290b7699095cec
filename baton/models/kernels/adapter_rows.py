"""The adapters of a step's tokens, sorted by adapter, for the kernels of `baton.models.kernels.adapter_products`.

Legend: T token, G group.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.models.kernels.moe.expert_order import sort_assignments

# Up to this many tokens, programs share a token's sum.
MOST_SHARED_TOKENS = 256
# The kernel that sorts by slot supports up to this many; there may be more pairs of experts and adapters.
_MOST_COUNTED_SLOTS = 1024
# Tokens of a program: columns of a product, which come in 8s.
FEW_TOKENS = 8
MANY_TOKENS = 64


@dataclass(frozen=True)
class AdapterRows:
    """The adapters of a step's tokens.

    Attributes:
        slots_T: int32; negative: the token has no adapter.
        order_T, groups_3G: tokens sorted by slot, and the groups of them, as in `ExpertOrder`; None on a CPU.
        group_tokens: largest number of tokens of a group.
    """

    slots_T: Tensor
    order_T: Tensor | None
    groups_3G: Tensor | None
    group_tokens: int

    @property
    def are_few(self) -> bool:
        return self.group_tokens == FEW_TOKENS


def group_by_adapter(slots_T: Tensor, *, num_slots: int, batch_invariant: bool = False) -> AdapterRows:
    """Launches the sorting. The products read its result before they wait for the previous kernel, so a launch that
    does not overlap must come in between.

    Args:
        batch_invariant: a token's bits must not depend on the number of tokens, however many there are.
    """
    few = len(slots_T) <= MOST_SHARED_TOKENS and not batch_invariant
    group_tokens = FEW_TOKENS if few else MANY_TOKENS
    if num_slots > _MOST_COUNTED_SLOTS:
        return _group_by_sorting(slots_T, group_tokens)
    order = sort_assignments(slots_T[:, None], num_experts=num_slots, tile_tokens=group_tokens, partial=True)
    return AdapterRows(slots_T, order.order_P, order.tiles_3L, group_tokens)


def _group_by_sorting(slots_T: Tensor, group_tokens: int) -> AdapterRows:
    """Groups tokens by sorting, for more slots than a program can count. A group may begin at any token, so most groups
    are unused."""
    sorted_T, order_T = slots_T.sort(stable=True)
    places_T = torch.arange(len(slots_T), dtype=torch.int32, device=slots_T.device)
    starts_T = torch.searchsorted(sorted_T, sorted_T, out_int32=True)
    stops_T = torch.searchsorted(sorted_T, sorted_T, out_int32=True, right=True)
    begins_T = (places_T - starts_T) % group_tokens == 0
    groups_3T = torch.stack((torch.where(begins_T, sorted_T, -1), places_T, stops_T))
    return AdapterRows(slots_T, order_T.to(torch.int32), groups_3T, group_tokens)
