"""KV from one GPU's cache to another's through KVTransfer, between two processes: throughput over prompt length,
layouts and block sizes, and the first transfer of a pair. All pairs take turns.

The rivals of the same run are a plain peer copy of as many bytes, and NIXL. With one GPU both caches are on it, and the
copy stays within its memory.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheSpec, KVKind
from bench import nixl_rival
from bench.cache_pairs import Case, End, in_turns, open_pairs
from bench.cache_to_cache import UNEQUAL_GOAL, best_gigabytes_per_s, first_rows, work_of
from bench.table import Row

MIB = 1 << 20
GIGA = 1e9
# Every pair transfers the first length first.
TOKENS = (8192, 1024, 32768)
# Wanted share of a peer copy by tokens, for Llama 8B between equal ends.
GOALS = {1024: 0.6, 8192: 0.92, 32768: 0.92, 131072: 0.92}
SEGMENT_MIB = 256
ROUNDS = 10
NIXL_TOKENS, NIXL_ROUNDS = (1024, 8192), 5
# A larger copy is not faster.
COPY_BYTES_MOST = 4 << 30

LLAMA_8B = KVCacheSpec(KVKind.GQA, num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
DEEPSEEK_V2_LITE = KVCacheSpec(KVKind.MLA, num_layers=27, num_kv_heads=1, head_dim=576, dtype="bfloat16")
DEEPSEEK_V3 = KVCacheSpec(KVKind.MLA, num_layers=61, num_kv_heads=1, head_dim=576, dtype="bfloat16")
NHD, HND, BLHNC = KVCacheLayout.NHD, KVCacheLayout.HND, KVCacheLayout.BLHNC
LBNC, BLNC = KVCacheLayout.LBNC, KVCacheLayout.BLNC


@dataclass(frozen=True)
class Model:
    """One model's KV between equal ends, and variants to compare with it.

    Attributes:
        long_tokens: a prompt length that is measured between equal ends only; 0: none.
    """

    name: str
    equal: Case
    variants: tuple[Case, ...] = ()
    long_tokens: int = 0

    def on(self, devices: tuple[str, str], tokens: int) -> tuple[Case, ...]:
        """All cases between the two devices; the one with equal ends comes first."""
        return tuple(
            replace(
                case,
                source=replace(case.source, device=devices[0]),
                target=replace(case.target, device=devices[1]),
                tokens=tokens,
            )
            for case in (self.equal, *self.variants)
        )


def _llama() -> Model:
    equal = _between(LLAMA_8B, (NHD, 16), (NHD, 16))
    unequal = [_between(LLAMA_8B, (NHD, 16), target) for target in ((HND, 16), (NHD, 64), (HND, 64))]
    fixed = replace(equal, segment_bytes=64 * MIB, fixed_segments=True)
    from_blocks = _between(LLAMA_8B, (BLHNC, 32), (NHD, 16))
    variants = (*unequal, from_blocks, replace(equal, digests=False), fixed)
    return Model("Llama 8B", equal, variants, long_tokens=131072)


def _between(spec: KVCacheSpec, source: tuple[KVCacheLayout, int], target: tuple[KVCacheLayout, int]) -> Case:
    return Case(spec, End(*source), End(*target), max(TOKENS), SEGMENT_MIB * MIB)


MODELS = (
    _llama(),
    Model(
        "DeepSeek V2 Lite",
        _between(DEEPSEEK_V2_LITE, (LBNC, 64), (LBNC, 64)),
        (_between(DEEPSEEK_V2_LITE, (LBNC, 64), (BLNC, 32)),),
    ),
    Model(
        "DeepSeek V3",
        _between(DEEPSEEK_V3, (LBNC, 64), (LBNC, 64)),
        (_between(DEEPSEEK_V3, (LBNC, 64), (BLNC, 64)),),
    ),
)


def run(progress: Callable[[str], None]) -> Iterator[Row]:
    """The rows of this benchmark; none on a machine without a GPU."""
    if not torch.cuda.is_available():
        progress("transfer between GPUs: there is no GPU")
        return
    devices = ("cuda:0", "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0")
    best: dict[str, float] = {}
    for model in MODELS:
        progress(f"transfer between GPUs: {model.name}")
        rows = measure(model, devices, TOKENS, ROUNDS)
        best.update({row.work: row.measured for row in rows if row.name == "cache to cache"})
        yield from rows
    yield from _against_nixl(devices, best, progress)


def measure(model: Model, devices: tuple[str, str], tokens: Sequence[int], rounds: int) -> list[Row]:
    """A model's rows for transfers between these devices."""
    return asyncio.run(_measure(model, devices, tokens, rounds))


async def _measure(model: Model, devices: tuple[str, str], tokens: Sequence[int], rounds: int) -> list[Row]:
    cases = model.on(devices, max(tokens))
    long = model.on(devices, model.long_tokens)[:1] if model.long_tokens else ()
    async with open_pairs([*cases, *long]) as pairs:
        measured = {number: await in_turns(pairs[: len(cases)], number, rounds) for number in tokens}
        if long:
            measured[model.long_tokens] = await in_turns(pairs[-1:], model.long_tokens, rounds)
        link = pairs[0].measure
    rows = [Row("a pair's own measurement", f"{model.name}: {link.transport}", link.gigabytes_per_s, "GB/s")]
    rows += first_rows(f"{tokens[0]} tokens of {model.name}, median of {len(cases)} pairs", measured[tokens[0]])
    for number in sorted(measured):
        copy = copy_gigabytes_per_s(devices, number * model.equal.spec.bytes_per_token)
        rows += _rows(model, dict(zip(cases, measured[number], strict=False)), number, copy)
    return rows


def _rows(model: Model, measured: dict[Case, list[float]], tokens: int, copy: float) -> Iterator[Row]:
    (equal, own), *variants = measured.items()
    work = work_of(equal, tokens, model.name)
    best = best_gigabytes_per_s(equal.spec, tokens, own)
    goal = GOALS.get(tokens) if equal.spec == LLAMA_8B else None
    yield Row("cache to cache", work, best, "GB/s", "plain copy", copy, goal)
    typical = best_gigabytes_per_s(equal.spec, tokens, [median(own)])
    yield Row("cache to cache, median", work, typical, "GB/s", "plain copy", copy)
    for case, seconds in variants:
        ends_differ = (case.source.layout, case.source.block_size) != (case.target.layout, case.target.block_size)
        measured_best = best_gigabytes_per_s(case.spec, tokens, seconds)
        wanted = UNEQUAL_GOAL if ends_differ else None
        yield Row(
            "cache to cache", work_of(case, tokens, model.name), measured_best, "GB/s", "equal ends", best, wanted
        )


def _against_nixl(
    devices: tuple[str, str], best: Mapping[str, float], progress: Callable[[str], None]
) -> Iterator[Row]:
    """NIXL between the same GPUs, with blocks as large as the keys of one block of Llama in one layer.

    Args:
        best: our best figures by work.
    """
    if not nixl_rival.available():
        progress("transfer between GPUs: nixl-cu13 is not installed, its rows are missing")
        return
    llama = MODELS[0]
    run_bytes = LLAMA_8B.bytes_per_token_layer // LLAMA_8B.kv_factor * llama.equal.source.block_size
    for tokens in NIXL_TOKENS:
        num_runs = tokens * LLAMA_8B.bytes_per_token // run_bytes
        progress(f"transfer between GPUs: NIXL, {tokens} tokens")
        with nixl_rival.open_reader(num_runs, run_bytes, devices) as read:
            rival = max(read() for _ in range(NIXL_ROUNDS))
        work = work_of(llama.equal, tokens, llama.name)
        blocks = f"as {num_runs} scattered blocks of {run_bytes >> 10} KiB"
        yield Row("cache to cache", f"{work}, {blocks}", best[work], "GB/s", "NIXL", rival, goal=1.0)


def copy_gigabytes_per_s(devices: tuple[str, str], num_bytes: int) -> float:
    """A plain copy of this many bytes from one GPU to the other, or within a single one."""
    num_bytes = min(num_bytes, COPY_BYTES_MOST)
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for device in devices)
    seconds = []
    for _ in range(6):
        _wait_for(devices)
        start_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _wait_for(devices)
        seconds.append(time.perf_counter() - start_s)
    return num_bytes / min(seconds) / GIGA


def _wait_for(devices: tuple[str, str]) -> None:
    for device in devices:
        if device != "cpu":
            torch.cuda.synchronize(device)
