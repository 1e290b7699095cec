"""Conversion of KV to the receiver's dtype: source, target and scales. Pure values; no torch.

The sender converts, so that fewer bytes are sent, and they are what the receiver's own cache would hold. Index and
state are never converted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.errors import PeerRefused
from baton.kvcache.spec import FP8_DTYPES
from kvtransfer.plan import WirePlan


@dataclass(frozen=True)
class KVConversion:
    """The conversion of KV on its way into the receiver's cache.

    Attributes:
        scales: the scales of a receiver's 8-bit cache: for each layer one for keys and one for values, or one for
            latents. KV is divided by its scale. Empty for other dtypes.
    """

    source_dtype: str
    target_dtype: str
    scales: tuple[float, ...] = ()


def conversion_of(plan: WirePlan, scales: Sequence[float]) -> KVConversion | None:
    """The conversion that a sender applies under a plan; None if it sends its own dtype.

    Args:
        scales: the scales of the receiver's cache, as the receiver sent them.

    Raises:
        PeerRefused: the number of scales is wrong, or one is not finite and above 0.
    """
    if plan.converted_from is None:
        return None
    spec = plan.spec
    if spec.dtype not in FP8_DTYPES:
        return KVConversion(plan.converted_from, spec.dtype)
    wanted = spec.num_layers * spec.kv_factor
    wrong = [scale for scale in scales if not (math.isfinite(scale) and scale > 0)]
    if wrong or len(scales) != wanted:
        raise PeerRefused(
            f"the peer sent {len(scales)} scales of its cache, {len(wrong)} of them not finite and above 0",
            field="kv_scales",
            allowed=(f"{wanted} finite numbers above 0",),
            cure="use the same version on both nodes",
        )
    return KVConversion(plan.converted_from, spec.dtype, tuple(scales))
