"""`fast_build` leaves out the planning that merely makes layers faster, and changes no result."""

import pytest

from attention.backends.triton_attn import TritonAttention
from attention.backends.triton_metadata import TritonAttentionMetadata
from attention.platform import Platform
from tests.conformance.attention.settings import SETTINGS
from tests.device import DEVICE
from tests.unit.attention.paged_batches import (
    BLOCK_SIZE,
    PagedBatch,
    needs_of,
    paged_batch,
    relative_error,
    triton_backend,
)

PLAIN = SETTINGS[0]
PREFIX = 2 * BLOCK_SIZE


def built(backend: TritonAttention, batch: PagedBatch, *, fast: bool, prefix: int = 0) -> TritonAttentionMetadata:
    metadata = backend.builder.build(prefix, batch.common, fast_build=fast)
    assert relative_error(batch.run(backend, metadata), batch.expected()) < 1e-5
    return metadata


@pytest.mark.parametrize("fast", [False, True])
def test_a_shared_prefix_is_attended_once_only_without_it(fast: bool) -> None:
    batch = paged_batch([(1, PREFIX), (1, PREFIX + 11), (9, PREFIX)], PLAIN, prefix_blocks=2)
    metadata = built(triton_backend(PLAIN), batch, fast=fast, prefix=PREFIX)
    assert (metadata.prefix is None) is fast


@pytest.mark.parametrize("fast", [False, True])
def test_work_is_listed_for_many_short_prompts_only_without_it(fast: bool) -> None:
    batch = paged_batch([(3 + number % 4, 0) for number in range(16)], PLAIN)
    platform = Platform(DEVICE, num_sms=4, hopper_kernels=True)
    metadata = TritonAttention(needs_of(PLAIN), platform, context_workspace_tokens=0).builder.build(
        0, batch.common, fast_build=fast
    )
    assert metadata.prefills is not None
    assert (metadata.prefills.work is None) is fast
    built(triton_backend(PLAIN), batch, fast=fast)
