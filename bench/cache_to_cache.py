"""KV from one process's cache to another's through KVTransfer: throughput, latency and the cost of waiting.

Two rivals of the throughput, from the same run. What memcpy and ucx_perftest imply: each side moves every byte once
between cache and staging, at memcpy's speed, and once over the link, at ucx_perftest's. And what our own parts allow:
the sending thread gathers, digests and sends, the receiving one takes, digests and scatters; the slower one counts.
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
from attention.cache_ops import digest, gather_to_wire, scatter_from_wire
from attention.layout import KVCacheLayout
from attention.spec import KVCacheShape, KVCacheSpec, KVKind
from bench import nixl_rival
from bench.table import Row
from bench.transport import MIB, memcpy_gigabytes_per_s, perftest_gigabytes_per_s, transport_gigabytes_per_s
from kvtransfer.node import KVTransfer, LeaseFilled, LeaseGrant, SendJob
from kvtransfer.segments import cut

SPEC = KVCacheSpec(KVKind.GQA, num_layers=16, num_kv_heads=8, head_dim=128, dtype="float32")
TOKENS, FEW_TOKENS = 2048, 256
BLOCK_SIZE = 16
SHAPE = KVCacheShape(KVCacheLayout.NHD, BLOCK_SIZE, TOKENS // BLOCK_SIZE)
SEGMENTS_MIB = (1, 4, 16)
STAGING_SLOTS = 4
ROUNDS = 4
SMALL_ROUNDS = 30
IDLE_S = 2.0
INCARNATION = 1
SENDER, PEER = 1, 1
GIGA = 1e9


def run(progress: Callable[[str], None]) -> list[Row]:
    torch.set_num_threads(1)
    rows = []
    memcpy = memcpy_gigabytes_per_s()
    for segment_mib in SEGMENTS_MIB:
        progress(f"cache to cache: segments of {segment_mib} MiB")
        figures = asyncio.run(_measure(segment_mib * MIB))
        limit = _limit(segment_mib * MIB)
        work = f"{TOKENS} tokens, {SPEC.num_layers} layers fp32, {segment_mib} MiB segments"
        copies = 1 / (1 / memcpy + 1 / perftest_gigabytes_per_s(segment_mib * MIB))
        rival = "memcpy and ucx_perftest imply"
        rows.append(Row("cache to cache", work, figures.gigabytes_per_s, "GB/s", rival, copies, goal=0.8))
        rows.append(Row("cache to cache", work, figures.gigabytes_per_s, "GB/s", "its parts allow", limit))
    progress("cache to cache: without digests")
    plain = asyncio.run(_measure(4 * MIB, digests=False))
    work = f"{TOKENS} tokens, {SPEC.num_layers} layers fp32, 4 MiB segments"
    rows.append(Row("cache to cache, digests off", work, plain.gigabytes_per_s, "GB/s"))
    rows += _beside_nixl(plain, progress)
    rows.append(Row("send to filled", "one token, receiver idle", figures.latency_ms, "ms"))
    rows.append(Row("waiting", "open lease, nothing arrives", figures.idle_percent, "% of a core"))
    return rows


def _beside_nixl(plain: "Figures", progress: Callable[[str], None]) -> list[Row]:
    """A block's keys of one layer lie together, and its values: so many bytes, scattered on both sides, NIXL moves."""
    if not nixl_rival.available():
        progress("cache to cache: nixl-cu13 is not installed, its rows are missing")
        return []
    run_bytes = SPEC.bytes_per_token_layer // SPEC.kv_factor * BLOCK_SIZE
    rows = []
    for tokens, ours in ((TOKENS, plain.gigabytes_per_s), (FEW_TOKENS, plain.few_gigabytes_per_s)):
        num_runs = tokens // BLOCK_SIZE * SPEC.num_layers * SPEC.kv_factor
        work = f"{num_runs} blocks of {run_bytes >> 10} KiB, scattered, digests off"
        rival = nixl_rival.read_gigabytes_per_s(num_runs, run_bytes)
        rows.append(Row("cache to cache", work, ours, "GB/s", "NIXL", rival, goal=1.0))
    return rows


@dataclass(frozen=True)
class Figures:
    gigabytes_per_s: float
    few_gigabytes_per_s: float
    latency_ms: float
    idle_percent: float


async def _measure(segment_bytes: int, *, digests: bool = True) -> Figures:
    cache = PagedKVCache(SPEC, SHAPE)
    filled: asyncio.Queue[LeaseFilled] = asyncio.Queue()
    blocks = tuple(torch.randperm(SHAPE.num_blocks, generator=torch.Generator().manual_seed(2)).tolist())
    async with (
        _transfer(cache, segment_bytes, filled, digests=digests) as decode,
        _prefill_process(segment_bytes, digests=digests) as connection,
    ):
        connection.send(await decode.listen(SENDER))
        await decode.connect(SENDER, await asyncio.to_thread(connection.recv))
        messages, num_bytes = await asyncio.to_thread(connection.recv)
        await decode.warmed_up(SENDER, messages, num_bytes, timeout_s=60)
        leases = iter(range(1000))

        async def seconds(tokens: int) -> float:
            lease = next(leases)
            decode.open_lease(LeaseGrant(lease, blocks, 0, tokens))
            connection.send((lease, tokens))
            await filled.get()
            # Both processes read the same clock.
            end_s = time.monotonic()
            await decode.close_lease(lease)
            return end_s - float(await asyncio.to_thread(connection.recv))

        whole = [await seconds(TOKENS) for _ in range(ROUNDS)]
        few = [await seconds(FEW_TOKENS) for _ in range(2 * ROUNDS)]
        small = []
        for _ in range(SMALL_ROUNDS):
            await asyncio.sleep(0.02)
            small.append(await seconds(1))
        decode.open_lease(LeaseGrant(next(leases), blocks, 0, TOKENS))
        before_s = time.process_time()
        await asyncio.sleep(IDLE_S)
        idle = (time.process_time() - before_s) / IDLE_S
        connection.send(None)
        return Figures(
            TOKENS * SPEC.bytes_per_token / min(whole) / GIGA,
            FEW_TOKENS * SPEC.bytes_per_token / min(few) / GIGA,
            median(small) * 1e3,
            idle * 100,
        )


def _limit(segment_bytes: int) -> float:
    """What the parts allow, in GB/s, when the two threads overlap perfectly."""
    cache = PagedKVCache(SPEC, SHAPE)
    block_ids = torch.randperm(SHAPE.num_blocks)
    layers, start, stop = next(
        cut(
            SPEC,
            segment_bytes=segment_bytes,
            layers=range(SPEC.num_layers),
            heads=SPEC.num_kv_heads,
            token_start=0,
            token_stop=TOKENS,
            resume_at=TOKENS,
        )
    )
    payload = torch.zeros(len(layers) * (stop - start) * SPEC.bytes_per_token_layer, dtype=torch.uint8)
    heads = range(SPEC.num_kv_heads)

    def gather(layer: int) -> None:
        gather_to_wire(
            cache,
            block_ids=block_ids,
            token_start=start,
            token_stop=stop,
            layers=_shift(layers, layer),
            heads=heads,
            out=payload,
        )

    def scatter(layer: int) -> None:
        scatter_from_wire(
            cache,
            block_ids=block_ids,
            token_start=start,
            token_stop=stop,
            layers=_shift(layers, layer),
            heads=heads,
            payload=payload,
        )

    # Over the whole cache, layer after layer, so that it comes from memory as it does in a transfer.
    rounds = range(0, SPEC.num_layers - len(layers) + 1, len(layers))
    ns_per_byte = {
        name: _best_s(action, rounds) / (len(rounds) * payload.numel())
        for name, action in (("gather", gather), ("scatter", scatter), ("digest", lambda _: digest(payload)))
    }
    link = 1 / (transport_gigabytes_per_s(segment_bytes)[0] * GIGA)
    sender = ns_per_byte["gather"] + ns_per_byte["digest"] + link
    receiver = ns_per_byte["scatter"] + ns_per_byte["digest"] + link
    return 1 / max(sender, receiver) / GIGA


def _shift(layers: range, by: int) -> range:
    return range(layers.start + by, layers.stop + by)


def _best_s(action: Callable[[int], object], rounds: range) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for layer in rounds:
            action(layer)
        times.append(time.perf_counter() - start)
    return min(times)


@asynccontextmanager
async def _transfer(
    cache: PagedKVCache, segment_bytes: int, filled: "asyncio.Queue[LeaseFilled]", *, digests: bool
) -> AsyncIterator[KVTransfer]:
    async with KVTransfer(
        cache,
        incarnation=INCARNATION,
        segment_bytes=segment_bytes,
        staging_slots=STAGING_SLOTS,
        digests=digests,
        on_filled=filled.put_nowait,
        on_refused=_fail,
    ) as transfer:
        yield transfer


def _fail(refused: object) -> None:
    raise RuntimeError(f"a benchmark's segment was refused: {refused}")


async def _prefill(connection: Connection, segment_bytes: int, *, digests: bool) -> None:
    cache = PagedKVCache(SPEC, SHAPE)
    cache.view.normal_()
    blocks = tuple(torch.randperm(SHAPE.num_blocks, generator=torch.Generator().manual_seed(1)).tolist())
    async with _transfer(cache, segment_bytes, asyncio.Queue(), digests=digests) as prefill:
        connection.send(await prefill.listen(PEER))
        await prefill.connect(PEER, await asyncio.to_thread(connection.recv))
        warm = await prefill.warm_up(PEER, SENDER)
        connection.send((warm.messages, warm.bytes))
        while (order := await asyncio.to_thread(connection.recv)) is not None:
            lease, tokens = order
            start_s = time.monotonic()
            await prefill.send(SendJob(PEER, SENDER, lease, INCARNATION, 0, 0, tokens, tokens, blocks))
            connection.send(start_s)


def _serve(connection: Connection, segment_bytes: int, digests: bool) -> None:
    torch.set_num_threads(1)
    asyncio.run(_prefill(connection, segment_bytes, digests=digests))


@asynccontextmanager
async def _prefill_process(segment_bytes: int, *, digests: bool) -> AsyncIterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, segment_bytes, digests), daemon=True)
    process.start()
    try:
        yield ours
        await asyncio.to_thread(process.join, 10.0)
    finally:
        process.kill()
        await asyncio.to_thread(process.join)
