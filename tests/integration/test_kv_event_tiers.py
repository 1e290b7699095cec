"""Subscribers of KV events see in which tier each block is."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as smg

from baton.client.client import AsyncClient
from baton.core.sampling import SamplingParams
from tests.integration.cluster import DEADLINE_S, LLAMA, Flags, Machines, machines
from tests.integration.reference import References

TOKENS = 300
WHOLE_BLOCKS = (TOKENS - 1) // 64 * 64 // 16  # a store has whole entries of 64 tokens
# A cache for one prompt and host memory for four, so that later prompts take the places of the first one.
HOST_ENTRIES = 20
SMALL: Flags = {
    "num_blocks": TOKENS // 16 + 6,
    "max_batch_tokens": 128,
    "host_cache_gib": HOST_ENTRIES * 97 * 4096 / (1 << 30),
}
GREEDY = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


@pytest.fixture
def start() -> Iterator[Machines]:
    with machines() as started:
        yield started


class Subscriber:
    """Follows the events of a gateway as smg does: a block is in each tier where it was stored and not removed."""

    def __init__(self) -> None:
        self.tiers: dict[tuple[int, ...], set[int]] = {}  # by all tokens up to the block's end
        self._tokens: dict[int, tuple[int, ...]] = {}
        self._changed = asyncio.Condition()

    async def follow(self, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            async for batch in stub.SubscribeKvEvents(smg.SubscribeKvEventsRequest()):
                async with self._changed:
                    for event in batch.events:
                        self._apply(event)
                    self._changed.notify_all()

    async def until_in(self, prompt: list[int], tier: int, *, from_block: int = 0) -> None:
        """Waits until blocks in the whole entries of a prompt are in this tier and in no other."""
        ends = [tuple(prompt[: 16 * (block + 1)]) for block in range(from_block, WHOLE_BLOCKS)]
        async with asyncio.timeout(DEADLINE_S), self._changed:
            await self._changed.wait_for(lambda: all(self.tiers.get(end) == {tier} for end in ends))

    def _apply(self, event: smg.KvCacheEvent) -> None:
        if event.HasField("stored"):
            stored = event.stored
            before = self._tokens[stored.parent_block_hash] if stored.HasField("parent_block_hash") else ()
            for block in stored.blocks:
                before = self._tokens[block.block_hash] = (*before, *block.token_ids)
                assert stored.tier not in self.tiers.setdefault(before, set())
                assert (block.cache_level if block.HasField("cache_level") else 0) == stored.tier - 1
                self.tiers[before].add(stored.tier)
        for block_hash in event.removed.block_hashes:
            self.tiers[self._tokens[block_hash]].remove(event.removed.tier)


async def test_blocks_are_seen_on_the_device_then_in_host_memory_then_in_files(
    start: Machines, references: References, tmp_path: Path
) -> None:
    files: Flags = {"file_cache_dir": tmp_path, "file_cache_gib": 1}
    (decode,) = start.nodes(("decode", {"model": LLAMA, **SMALL, **files}))
    gateway = start.gateway([], [decode], model=LLAMA, kv_events=True)
    first, *others = references[LLAMA].prompts([TOKENS] * 11)
    subscriber = Subscriber()
    async with asyncio.TaskGroup() as tasks, AsyncClient(gateway.address) as client:
        following = tasks.create_task(subscriber.follow(gateway.address))
        await client.complete(first, GREEDY)
        await subscriber.until_in(first, smg.KV_CACHE_TIER_DEVICE)
        for prompt in others[:3]:
            await client.complete(prompt, GREEDY)
        await subscriber.until_in(first, smg.KV_CACHE_TIER_HOST)
        for prompt in others[3:]:
            await client.complete(prompt, GREEDY)
        # Host memory evicts the end of a sequence first.
        await subscriber.until_in(first, smg.KV_CACHE_TIER_DISK, from_block=WHOLE_BLOCKS - 4)
        await client.complete(first, GREEDY)
        await subscriber.until_in(first, smg.KV_CACHE_TIER_DEVICE)
        following.cancel()
