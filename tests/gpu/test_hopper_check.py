"""With the Triton that is installed, measured or not, the kernels for Hopper give what the portable kernels give."""

from collections.abc import Callable, Iterable

import pytest
import torch

from attention.kernels.blocksparse import probe as blocksparse
from attention.kernels.mla import probe as mla
from attention.kernels.paged import probe as paged
from baton.models.kernels.quantized import few_tokens
from baton.models.kernels.quantized import packed_probe as packed
from baton.tritonlib.hopper_check import HopperKernels, Pair, check, is_hopper

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize(
    "compare",
    [
        paged.compare_on_hopper,
        mla.compare_on_hopper,
        blocksparse.compare_on_hopper,
        packed.compare_products_on_hopper,
        packed.compare_experts_on_hopper,
        packed.compare_tiled_experts_on_hopper,
        few_tokens.compare_on_hopper,
    ],
    ids=lambda compare: f"{compare.__module__}.{compare.__name__}",
)
def test_every_family_passes_its_comparison(compare: Callable[[torch.device], Iterable[Pair]]) -> None:
    if not is_hopper(DEVICE):
        pytest.skip("these kernels are for Hopper")
    before = torch.cuda.get_rng_state(DEVICE)
    verdict = check(HopperKernels(compare.__module__, compare), DEVICE)
    assert verdict.passed, verdict
    assert torch.equal(torch.cuda.get_rng_state(DEVICE), before)
