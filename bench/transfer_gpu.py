"""KV from one GPU's cache to another's through KVTransfer, between two processes, beside a plain peer copy of as many
bytes in the same run: throughput over prompt length and layouts, and the first transfer of a warm pair.

With one GPU both caches are on it, and the rival is a copy within its memory.
"""

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median

import torch

from attention.cache import PagedKVCache
from attention.layout import KVCacheLayout
from attention.spec import KVCacheShape, KVCacheSpec, KVKind
from bench.table import Row
from kvtransfer.node import KVTransfer, LeaseFilled, LeaseGrant, SendJob

MIB = 1 << 20
GIGA = 1e9
LLAMA_8B = KVCacheSpec(KVKind.GQA, num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
DEEPSEEK_V3 = KVCacheSpec(KVKind.MLA, num_layers=61, num_kv_heads=1, head_dim=576, dtype="bfloat16")
TOKENS = (1024, 8192, 32768)
# What of a peer copy is wanted, by tokens of Llama 8B.
GOALS = {1024: 0.6, 8192: 0.92, 32768: 0.92}
SEGMENT_MIB = 256
STAGING_SLOTS = 4
ROUNDS = 10
COPY_BYTES = 1 << 30
INCARNATION = 1
_TIMEOUT_S = 60.0
SENDER, PEER = 1, 1


@dataclass(frozen=True)
class Case:
    """One model's KV, and the layout and block size of both ends."""

    model: str
    spec: KVCacheSpec
    source: tuple[KVCacheLayout, int]
    target: tuple[KVCacheLayout, int]
    segment_mib: int = SEGMENT_MIB
    digests: bool = True

    @property
    def work(self) -> str:
        (one, size_p), (other, size_d) = self.source, self.target
        ends = f"{one.name}/{size_p} to {other.name}/{size_d}, segments of {self.segment_mib} MiB"
        return f"{self.model}, {ends}" if self.digests else f"{self.model}, {ends}, digests off"


NHD, HND, BLHNC = KVCacheLayout.NHD, KVCacheLayout.HND, KVCacheLayout.BLHNC
CASES = (
    Case("Llama 8B", LLAMA_8B, (NHD, 16), (NHD, 16)),
    Case("Llama 8B", LLAMA_8B, (NHD, 16), (HND, 64)),
    Case("Llama 8B", LLAMA_8B, (BLHNC, 32), (NHD, 16)),
    Case("Llama 8B", LLAMA_8B, (NHD, 16), (NHD, 16), digests=False),
    Case("Llama 8B", LLAMA_8B, (NHD, 16), (NHD, 16), segment_mib=64),
    Case("DeepSeek V3", DEEPSEEK_V3, (KVCacheLayout.LBNC, 64), (KVCacheLayout.BLNC, 64)),
)


def run(progress: Callable[[str], None]) -> list[Row]:
    """Nothing on a machine without a GPU."""
    if not torch.cuda.is_available():
        progress("transfer between GPUs: there is no GPU")
        return []
    devices = ("cuda:0", "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0")
    rows = []
    for case in CASES:
        progress(f"transfer between GPUs: {case.work}")
        rows.extend(measure(case, devices, TOKENS, ROUNDS))
    return rows


def measure(case: Case, devices: tuple[str, str], tokens: tuple[int, ...], rounds: int) -> list[Row]:
    """A case's figures, for prefill and decode on those devices."""
    figures = asyncio.run(_measure(case, devices, tokens, rounds))
    rows = [Row("warm-up, as the pair reports it", f"{case.work}: {figures.transport}", figures.link, "GB/s")]
    for number in tokens:
        num_bytes = number * case.spec.bytes_per_token
        first, *later = (num_bytes / seconds / GIGA for seconds in figures.seconds[number])
        copy = copy_gigabytes_per_s(devices, num_bytes)
        work = f"{number} tokens of {case.work}"
        goal = GOALS.get(number) if case.spec == LLAMA_8B else None
        rows.append(Row("cache to cache, best", work, max(later), "GB/s", "plain copy", copy, goal=goal))
        rows.append(Row("cache to cache, median", work, median(later), "GB/s", "plain copy", copy))
        rows.append(Row("cache to cache, first of its size", work, first, "GB/s", "plain copy", copy))
    return rows


def copy_gigabytes_per_s(devices: tuple[str, str], num_bytes: int = COPY_BYTES) -> float:
    """A plain copy of that many bytes from one GPU to the other, or within the one there is."""
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for device in devices)
    if not target.is_cuda:
        start_s = time.perf_counter()
        target.copy_(source)
        return num_bytes / (time.perf_counter() - start_s) / GIGA
    seconds = []
    for _ in range(6):
        for device in devices:
            torch.cuda.synchronize(device)
        start_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start_s)
    return num_bytes / min(seconds) / GIGA


@dataclass(frozen=True)
class Figures:
    transport: str
    link: float
    seconds: dict[int, list[float]]


async def _measure(case: Case, devices: tuple[str, str], tokens: tuple[int, ...], rounds: int) -> Figures:
    cache = _cache(case.spec, case.target, max(tokens), devices[1])
    blocks = _blocks(cache, seed=2)
    filled: asyncio.Queue[LeaseFilled] = asyncio.Queue()
    async with (
        _transfer(case, cache, filled) as decode,
        _prefill_process(case, max(tokens), devices[0]) as connection,
    ):
        connection.send(await decode.listen(SENDER))
        await decode.connect(SENDER, await asyncio.to_thread(connection.recv))
        messages, num_bytes = await asyncio.to_thread(connection.recv)
        warm = await decode.warmed_up(SENDER, messages, num_bytes, timeout_s=60)
        connection.send(warm.speed)
        leases = iter(range(10_000))

        async def seconds(number: int) -> float:
            lease = next(leases)
            decode.open_lease(LeaseGrant(lease, blocks, 0, number))
            connection.send((lease, number))
            async with asyncio.timeout(_TIMEOUT_S):
                await filled.get()
            # Both processes read the same clock.
            end_s = time.monotonic()
            await decode.close_lease(lease)
            return end_s - float(await asyncio.to_thread(connection.recv))

        measured = {number: [await seconds(number) for _ in range(1 + rounds)] for number in tokens}
        connection.send(None)
        return Figures(warm.transport, warm.gigabytes_per_s, measured)


def _cache(spec: KVCacheSpec, end: tuple[KVCacheLayout, int], tokens: int, device: str) -> PagedKVCache:
    """With room for twice as many tokens as are sent, so that blocks lie apart."""
    layout, block_size = end
    return PagedKVCache(spec, KVCacheShape(layout, block_size, 2 * tokens // block_size), device)


def _blocks(cache: PagedKVCache, *, seed: int) -> tuple[int, ...]:
    order = torch.randperm(cache.shape.num_blocks, generator=torch.Generator().manual_seed(seed))
    return tuple(order[: cache.shape.num_blocks // 2].tolist())


@asynccontextmanager
async def _transfer(case: Case, cache: PagedKVCache, filled: "asyncio.Queue[LeaseFilled]") -> AsyncIterator[KVTransfer]:
    async with KVTransfer(
        cache,
        incarnation=INCARNATION,
        segment_bytes=case.segment_mib * MIB,
        staging_slots=STAGING_SLOTS,
        digests=case.digests,
        on_filled=filled.put_nowait,
        on_refused=_fail,
    ) as transfer:
        yield transfer


def _fail(refused: object) -> None:
    raise RuntimeError(f"a benchmark's segment was refused: {refused}")


async def _prefill(connection: Connection, case: Case, tokens: int, device: str) -> None:
    cache = _cache(case.spec, case.source, tokens, device)
    cache.memory.random_()
    if cache.storage.is_cuda:
        torch.cuda.synchronize()
    blocks = _blocks(cache, seed=1)
    async with _transfer(case, cache, asyncio.Queue()) as prefill:
        connection.send(await prefill.listen(PEER))
        await prefill.connect(PEER, await asyncio.to_thread(connection.recv))
        warm = await prefill.warm_up(PEER, SENDER)
        connection.send((warm.messages, warm.bytes))
        await prefill.use_link(PEER, await asyncio.to_thread(connection.recv))
        while (order := await asyncio.to_thread(connection.recv)) is not None:
            lease, number = order
            start_s = time.monotonic()
            await prefill.send(SendJob(PEER, SENDER, lease, INCARNATION, 0, 0, number, number, blocks))
            connection.send(start_s)


def _serve(connection: Connection, case: Case, tokens: int, device: str) -> None:
    torch.set_num_threads(1)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    asyncio.run(_prefill(connection, case, tokens, device))


@asynccontextmanager
async def _prefill_process(case: Case, tokens: int, device: str) -> AsyncIterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, case, tokens, device), daemon=True)
    process.start()
    theirs.close()  # or nobody would hear of the process's end
    try:
        yield ours
        await asyncio.to_thread(process.join, 10.0)
    finally:
        process.kill()
        await asyncio.to_thread(process.join)
