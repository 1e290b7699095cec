"""KV from one process's cache to another's through KVTransfer: throughput over prompt size, layouts, block sizes and
ranks, the first transfer of a pair, latency, and the cost of waiting. All pairs take turns; the best round counts.

The rivals are measured in the same run. "memcpy and ucx_perftest imply" assumes that every byte moves once between
cache and staging at memcpy's speed and once over the link at ucx_perftest's speed. NIXL reads as many scattered blocks.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import median

import torch

from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheSpec, KVKind
from bench import nixl_rival
from bench.cache_pairs import Case, End, Pair, in_turns, open_pairs
from bench.table import Row
from bench.transport import MIB, memcpy_gigabytes_per_s, perftest_gigabytes_per_s

NHD, HND, BLHNC = KVCacheLayout.NHD, KVCacheLayout.HND, KVCacheLayout.BLHNC
# Llama 8B with fewer layers: 64 KiB per token, and 64 KiB for the keys of a block in one layer.
SPEC = KVCacheSpec(KVKind.GQA, num_layers=8, num_kv_heads=8, head_dim=128, dtype="float32")
BLOCK_SIZE = 16
SEGMENT_MIB = 4
IDLE_S = 2.0
GIGA = 1e9
IMPLIED = "memcpy and ucx_perftest imply"
GOAL, UNEQUAL_GOAL, FIRST_GOAL = 0.9, 0.95, 0.95


@dataclass(frozen=True)
class Scale:
    """How much is transferred, and how often. Some pairs also transfer `few_tokens` and `many_tokens`."""

    spec: KVCacheSpec = SPEC
    tokens: int = 2048
    few_tokens: int = 512
    many_tokens: int = 8192
    rounds: int = 11
    many_rounds: int = 5
    small_rounds: int = 30

    @property
    def equal(self) -> Case:
        return Case(self.spec, End(NHD, BLOCK_SIZE), End(NHD, BLOCK_SIZE), self.tokens, SEGMENT_MIB * MIB)

    @property
    def fixed(self) -> list[Case]:
        """Cases whose segments all have the largest size."""
        return [replace(self.equal, segment_bytes=mib * MIB, fixed_segments=True) for mib in (1, 16)]

    @property
    def unequal(self) -> list[Case]:
        same, split = End(NHD, BLOCK_SIZE), End(NHD, BLOCK_SIZE, ranks=2)
        ends = (
            (same, End(HND, BLOCK_SIZE)), (same, End(NHD, 64)), (End(BLHNC, 32), End(HND, 128)),
            (same, split), (split, same),
        )  # fmt: skip
        return [replace(self.equal, source=source, target=target) for source, target in ends]


@dataclass
class _Limits:
    """The best rates of the machine in this run, in GB/s."""

    memcpy: float = 0.0
    perftest: dict[int, float] = field(default_factory=dict)

    def measure(self) -> None:
        self.memcpy = max(self.memcpy, memcpy_gigabytes_per_s())
        for mib in (1, SEGMENT_MIB, 16):
            self.perftest[mib] = max(self.perftest.get(mib, 0.0), perftest_gigabytes_per_s(mib * MIB))

    def implied(self, segment_bytes: int) -> float:
        return 1 / (1 / self.memcpy + 1 / self.perftest[segment_bytes // MIB])


def run(progress: Callable[[str], None], scale: Scale | None = None) -> list[Row]:
    scale = scale or Scale()
    torch.set_num_threads(1)
    limits = _Limits()
    progress("cache to cache: memcpy and ucx_perftest")
    limits.measure()
    rows = asyncio.run(_throughput(scale, limits, progress))
    progress("cache to cache: latency and waiting")
    return rows + asyncio.run(_latency(scale))


async def _throughput(scale: Scale, limits: _Limits, progress: Callable[[str], None]) -> list[Row]:
    equal, plain, long = (
        scale.equal,
        replace(scale.equal, digests=False),
        replace(scale.equal, tokens=scale.many_tokens),
    )
    cases = [equal, plain, *scale.fixed, *scale.unequal]
    progress(f"cache to cache: making {len(cases) + 1} pairs")
    async with open_pairs([*cases, long]) as (*pairs, long_pair):
        progress(f"cache to cache: {scale.tokens} tokens, {scale.rounds} rounds of {len(pairs)} pairs")
        seconds = dict(zip(cases, await in_turns(pairs, scale.tokens, scale.rounds), strict=True))
        progress("cache to cache: other prompt sizes")
        (half,) = await in_turns(pairs[:1], scale.tokens // 2, scale.rounds)
        (many,) = await in_turns([long_pair], scale.many_tokens, scale.many_rounds)
        rivals = await _against_nixl(scale, pairs[:2], progress)
    limits.measure()
    rows = first_rows(f"{scale.tokens} tokens, median of {len(cases)} pairs", list(seconds.values()))
    implied = limits.implied(equal.segment_bytes)
    for tokens, took in ((scale.tokens // 2, half), (scale.tokens, seconds[equal]), (scale.many_tokens, many)):
        rows.append(_row(equal, tokens, took, IMPLIED, implied, GOAL))
    for case in (plain, *scale.fixed):
        rows.append(_row(case, scale.tokens, seconds[case], IMPLIED, limits.implied(case.segment_bytes)))
    best = best_gigabytes_per_s(scale.spec, scale.tokens, seconds[equal])
    for case in scale.unequal:
        rows.append(_row(case, scale.tokens, seconds[case], "equal ends", best, UNEQUAL_GOAL))
    return rows + rivals


async def _against_nixl(scale: Scale, pairs: Sequence[Pair], progress: Callable[[str], None]) -> list[Row]:
    """NIXL moves runs of the same size, scattered on both sides: the keys or values of one block in one layer."""
    if not nixl_rival.available():
        progress("cache to cache: nixl-cu13 is not installed, its rows are missing")
        return []
    progress("cache to cache: against NIXL")
    spec = scale.spec
    run_bytes = spec.bytes_per_token_layer // spec.kv_factor * BLOCK_SIZE
    rows = []
    for tokens in (scale.few_tokens, scale.tokens):
        num_runs = tokens * spec.bytes_per_token // run_bytes
        with ExitStack() as stack:
            read = await asyncio.to_thread(stack.enter_context, nixl_rival.open_reader(num_runs, run_bytes))
            rival, ours = 0.0, list[list[float]]([[] for _ in pairs])
            for _ in range(scale.rounds):
                rival = max(rival, await asyncio.to_thread(read))
                for own, took in zip(ours, await in_turns(pairs, tokens, 1), strict=True):
                    own += took
        for pair, took in zip(pairs, ours, strict=True):
            work = f"{work_of(pair.case, tokens)}, as {num_runs} scattered blocks of {run_bytes >> 10} KiB"
            measured = best_gigabytes_per_s(spec, tokens, took)
            rows.append(Row("cache to cache", work, measured, "GB/s", "NIXL", rival, goal=1.0))
    return rows


async def _latency(scale: Scale) -> list[Row]:
    """Measures one pair alone, so that nothing else waits in its processes."""
    async with open_pairs([replace(scale.equal, tokens=scale.few_tokens)]) as (pair,):
        small = []
        for _ in range(scale.small_rounds):
            await asyncio.sleep(0.02)
            small.append(await pair.seconds(1))
        await pair.open_idle_lease(scale.few_tokens)
        before_s = time.process_time()
        await asyncio.sleep(IDLE_S)
        idle = (time.process_time() - before_s) / IDLE_S
    return [
        Row("send to filled", "one token, receiver idle", median(small) * 1e3, "ms"),
        Row("waiting", "open lease, nothing arrives", idle * 100, "% of a core"),
    ]


def _row(case: Case, tokens: int, seconds: Sequence[float], rival: str, limit: float, goal: float | None = None) -> Row:
    measured = best_gigabytes_per_s(case.spec, tokens, seconds)
    return Row("cache to cache", work_of(case, tokens), measured, "GB/s", rival, limit, goal=goal)


def work_of(case: Case, tokens: int, model: str = "") -> str:
    """What is transferred, in words. The plot parses this text."""
    model = model or f"{case.spec.num_layers} layers {case.spec.dtype}"
    segments = "" if not case.fixed_segments else f", segments of {case.segment_bytes // MIB} MiB"
    digests = "" if case.digests else ", digests off"
    return f"{tokens} tokens of {model}, {case.source} to {case.target}{segments}{digests}"


def best_gigabytes_per_s(spec: KVCacheSpec, tokens: int, seconds: Sequence[float]) -> float:
    return tokens * spec.bytes_per_token / min(seconds) / GIGA


def first_rows(work: str, seconds: Sequence[Sequence[float]]) -> list[Row]:
    """Compares the first transfer of new pairs with their tenth.

    Args:
        seconds: durations of each pair's transfers, starting with its first one.
    """
    first, tenth = (median(own[index] for own in seconds) * 1e3 for index in (0, 9))
    return [Row("first transfer of a pair", work, first, "ms", "the tenth", tenth, FIRST_GOAL, less_is_better=True)]
