"""Entries that wait in a node's cache until their blocks are needed come back from host memory, and every token stays
the same."""

from collections.abc import Iterator

import pytest

from baton.core.sampling import SamplingParams
from baton.engine.scheduling import late_saves
from tests.integration.cluster import LLAMA, Flags, Machines, machines, until_status
from tests.integration.generation import generate
from tests.integration.reference import References
from tests.integration.test_stores import HOST, store, until_kept

TOKENS = 150
WHOLE_ENTRIES = TOKENS // 64
# Sequences up to 320 tokens wait, and are saved from at most 40 blocks that are taken next.
CACHE: Flags = {"num_blocks": 160, "max_batch_tokens": 128}
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture
def start() -> Iterator[Machines]:
    with machines() as started:
        yield started


def small_pools_wait_too() -> None:
    late_saves._POOL_TOKENS_MIN = 0


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_prompt_that_waited_comes_back_after_the_cache_has_lost_it(
    start: Machines, references: References, ranks: int
) -> None:
    reference = references[LLAMA]
    flags: Flags = {"model": LLAMA, **CACHE, **HOST, "tensor_parallel_size": ranks}
    (decode,) = start.nodes(("decode", flags), prepare=small_pools_wait_too)
    gateway = start.gateway([], [decode], model=LLAMA)
    prompts = reference.prompts([TOKENS] * 32)
    for prompt in prompts[:10]:
        await generate(gateway, prompt, GREEDY)
    status = await until_status(decode, lambda last: last.blocks_free == last.blocks_total)
    assert store(status, "host").entries == 0
    for prompt in prompts[10:]:
        await generate(gateway, prompt, GREEDY)
    await until_kept(decode, "host", 3 * WHOLE_ENTRIES)
    for prompt in prompts[:3]:
        again = await generate(gateway, prompt, GREEDY)
        assert again.proof.decode_loaded_tokens == WHOLE_ENTRIES * 64
        assert again.token_ids == reference.greedy(prompt, 4).token_ids
