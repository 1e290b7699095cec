"""KV that becomes of another dtype on its way: from what, to what, with which scales. Pure values; no torch.

The sender converts, so that fewer bytes travel and a receiver gets what its own cache would hold. Knows no cache.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import PeerRefused
from kvcache.spec import FP8_DTYPES
from kvtransfer.plan import WirePlan


@dataclass(frozen=True)
class KVConversion:
    """Attributes:
    scales: of a receiver's cache in 8 bits, of each layer those of keys and values, or of latents; a number is divided
        by its scale. Empty for other dtypes.
    """

    source_dtype: str
    target_dtype: str
    scales: tuple[float, ...] = ()


def conversion_of(plan: WirePlan, scales: Sequence[float]) -> KVConversion | None:
    """How a sender converts under a plan; None where it need not.

    Args:
        scales: what the receiver told of its cache.

    Raises:
        PeerRefused: no such cache can have them.
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
            f"the peer told {len(scales)} scales of its cache, {len(wrong)} of them no finite numbers above 0",
            field="kv_scales",
            allowed=(f"{wanted} finite numbers above 0",),
            cure="use the same version on both nodes",
        )
    return KVConversion(plan.converted_from, spec.dtype, tuple(scales))
