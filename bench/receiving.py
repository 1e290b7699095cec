"""The cost of receiving KV for a node that decodes: time of a decode step with and without it, at full speed and at a
limit.

An engine and a KV transfer share a cache in this process, as in a decode node; another process sends without pause.
Stretches with and without receiving take turns. Receiving moves every byte through this side's memory several times.
Its share of the memory's bandwidth, measured by a copy in the same run, is what decoding may lose.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import median

import torch

from baton.core.sampling import ResolvedSampling
from baton.core.types import TokenOutput
from baton.engine.build import BuiltRunner, build_runner
from baton.engine.engine import Engine
from baton.engine.events import StepEvents
from baton.engine.request import EngineLimits, EngineRequest
from baton.settings.config import DEMO_MODELS
from baton.settings.node_config import NodeSettings
from bench.attention.measure import ceilings
from bench.cache_pairs import Case, End, Pair, Place, open_pairs
from bench.table import Row
from bench.transport import memcpy_gigabytes_per_s

MIB = 1 << 20
GIGA = 1e9
LIMIT_GOAL = 1.05
# Share of the allowed slow-down for which the limit is set. The slow-down is not proportional to the rate: with 0.7
# decoding on two cores was 1.07 and 1.08 times as slow.
LIMIT_SHARE = 0.35
# How often receiving reads or writes each byte in this side's memory. The digest reads it, and the scatter reads and
# writes it. A GPU's link writes it once; on a CPU it is copied out of shared memory.
PASSES = {"cpu": 5, "cuda": 4}
# Concurrent transfers: the next one is sent while the last one is scattered.
PARTS = 2
# Requests that only hold the blocks for receiving.
_SEATS_ASIDE = 4
# Steps at the start of a stretch, while earlier work still ends.
_UNTIMED_STEPS = 3
_TIMEOUT_S = 120.0
_LLAMA_8B = Path(__file__).resolve().parent / "engine" / "configs" / "llama-3.1-8b"


@dataclass(frozen=True)
class Setup:
    """What is measured on a kind of machine.

    Attributes:
        context: context length of each decoding request at the start of every stretch.
        tokens: tokens whose KV is received under one lease.
        steps: decode steps of one measurement.
        source: the sending end's device.
    """

    model: str
    directory: Path
    device: str
    source: str
    load_format: str
    requests: int
    context: int
    tokens: int
    segment_mib: int
    rounds: int
    steps: int

    @property
    def room(self) -> int:
        """Largest context that a request may reach in its stretch."""
        return self.context + 1024


def on_cpu() -> Setup:
    return Setup(
        "the demo Llama", DEMO_MODELS / "llama", "cpu", "cpu", "safetensors",
        requests=8, context=1024, tokens=2048, segment_mib=4, rounds=5, steps=100,
    )  # fmt: skip


def on_gpus() -> Setup:
    other = "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"
    return Setup(
        "Llama 8B", _LLAMA_8B, other, "cuda:0", "dummy",
        requests=32, context=1024, tokens=16384, segment_mib=256, rounds=5, steps=120,
    )  # fmt: skip


@dataclass
class Stretches:
    """Milliseconds of a decode step in each stretch, and the rate of receiving."""

    alone_ms: list[float] = field(default_factory=list)
    receiving_ms: list[float] = field(default_factory=list)
    gigabytes_per_s: list[float] = field(default_factory=list)

    @property
    def slow_down(self) -> float:
        pairs = zip(self.receiving_ms, self.alone_ms, strict=True)
        return median(receiving / alone for receiving, alone in pairs)


def run(progress: Callable[[str], None], setup: Setup | None = None) -> list[Row]:
    setup = setup or (on_gpus() if torch.cuda.is_available() else on_cpu())
    torch.set_num_threads(1)
    return asyncio.run(_measure(setup, progress))


async def _measure(setup: Setup, progress: Callable[[str], None]) -> list[Row]:
    built = _build(setup)
    copied = memory_gigabytes_per_s(setup.device)
    async with _Decoding(built, setup) as decoding:
        case = Case(
            built.cache.spec,
            End(built.cache.shape.layout, built.cache.shape.block_size, device=setup.source),
            End(built.cache.shape.layout, built.cache.shape.block_size, device=setup.device),
            setup.tokens,
            setup.segment_mib * MIB,
        )
        place = Place((built.cache,), decoding.set_aside(PARTS * setup.tokens))
        progress("receiving: at full speed")
        free = await _stretches(case, place, decoding)
        limit = limit_gigabytes_per_s(free)
        progress(f"receiving: at most {limit:.3g} GB/s")
        limited = await _stretches(replace(case, receive_bytes_per_s=limit * GIGA), place, decoding)
    return rows_of(setup, free, limited, limit=limit, memory=copied)


def limit_gigabytes_per_s(free: Stretches) -> float:
    """GB/s at which decoding slows down by less than the goal if the slow-down is proportional to the rate."""
    lost = max(free.slow_down - 1, 1e-3)
    return median(free.gigabytes_per_s) * min(1.0, LIMIT_SHARE * (LIMIT_GOAL - 1) / lost)


def rows_of(setup: Setup, free: Stretches, limited: Stretches, *, limit: float, memory: float) -> list[Row]:
    """The rows of this benchmark.

    Args:
        memory: bandwidth of this side's memory, in GB/s read and written.
    """
    work = f"{setup.model}, batch {setup.requests}, context {setup.context}"
    received = median(free.gigabytes_per_s)
    share = min(1.0, received * PASSES[setup.device.partition(":")[0]] / memory)
    bounded = f"{work}, at most {limit:.3g} GB/s"
    # Where receiving takes all of the memory's bandwidth, there is no bound for decoding.
    allowed = 1 / (1 - share) if share < 1 else None
    return [
        Row("decode step", work, median(free.alone_ms), "ms"),
        Row("decode step, receiving", work, median(free.receiving_ms), "ms"),
        Row("received", work, received, "GB/s"),
        Row("memory's bandwidth, by a copy", work, memory, "GB/s"),
        Row("share of it that receiving takes", work, 100 * share, "%"),
        Row("slow-down, receiving", work, free.slow_down, "times", limit=allowed),
        Row("received, limited", bounded, median(limited.gigabytes_per_s), "GB/s", "the limit", limit),
        Row("slow-down, receiving, limited", bounded, limited.slow_down, "times", limit=LIMIT_GOAL),
    ]


def memory_gigabytes_per_s(device: str) -> float:
    """Bytes read and written by a large copy."""
    return ceilings().copy_gigabytes_per_s if device != "cpu" else 2 * memcpy_gigabytes_per_s()


async def _stretches(case: Case, place: Place, decoding: "_Decoding") -> Stretches:
    stretches = Stretches()
    async with open_pairs([case], [place]) as (pair,):
        async with _receiving(pair):
            await asyncio.sleep(0.2)  # every buffer has been used once
        for index in range(decoding.setup.rounds):
            for receives in (False, True) if index % 2 else (True, False):
                await _stretch(stretches, pair, decoding, receives=receives)
    return stretches


async def _stretch(stretches: Stretches, pair: Pair, decoding: "_Decoding", *, receives: bool) -> None:
    """Its requests begin with it, so however long the transfers before took, none of them ends before it does."""
    if not receives:
        async with decoding.requests():
            stretches.alone_ms.append(await decoding.step_ms())
        return
    async with _receiving(pair):
        await _until_more(pair, pair.bytes_received)
        async with decoding.requests():
            before, began_s = pair.bytes_received, time.monotonic()
            stretches.receiving_ms.append(await decoding.step_ms())
            await _until_more(pair, before)  # during a few short steps a busy machine may receive nothing
            took_s = time.monotonic() - began_s
            stretches.gigabytes_per_s.append((pair.bytes_received - before) / took_s / GIGA)


async def _until_more(pair: Pair, before: int) -> None:
    async with asyncio.timeout(_TIMEOUT_S):
        while pair.bytes_received == before:  # noqa: ASYNC110 (nothing signals it)
            await asyncio.sleep(0.001)


@asynccontextmanager
async def _receiving(pair: Pair) -> AsyncIterator[None]:
    """Receives under one lease after the other, several at a time; on exit the open ones finish."""
    over = False

    async def fill(part: int) -> None:
        while not over:
            await pair.seconds(pair.case.tokens, part=part)

    async with asyncio.TaskGroup() as fills:
        for part in range(PARTS):
            fills.create_task(fill(part))
        yield
        over = True


class _Decoding:
    """An engine whose requests decode all the time. The content of their KV does not matter."""

    def __init__(self, built: BuiltRunner, setup: Setup) -> None:
        self.setup = setup
        self._names = count()
        limits = EngineLimits(
            max_batch_tokens=built.limits.max_batch_tokens,
            max_batch_requests=built.limits.max_batch_requests,
            max_waiting=setup.requests,
            prefix_cache=False,
        )
        self._engine = Engine(built.runner, limits, grammars=built.grammars, on_step=self._on_step)
        self._context = self._engine.max_context_tokens
        self._ends_s: list[float] = []
        self._stretch_over = asyncio.Event()
        self._ended = 0

    async def __aenter__(self) -> "_Decoding":
        await self._engine.__aenter__()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._engine.__aexit__(None, None, None)

    def set_aside(self, tokens: int) -> tuple[int, ...]:
        """Holds blocks for this many tokens, in which no request decodes."""
        blocks: tuple[int, ...] = ()
        while tokens > 0:
            part = min(tokens, self._context - 1)
            request = EngineRequest(f"aside-{next(self._names)}", (1,) * part, ResolvedSampling(max_tokens=1))
            blocks += self._engine.reserve(request).block_ids
            tokens -= part
        return blocks

    @asynccontextmanager
    async def requests(self) -> AsyncIterator[None]:
        """The setup's requests decode, from its context on."""
        sampling = ResolvedSampling(temperature=0.0, max_tokens=self.setup.room - self.setup.context, ignore_eos=True)
        names = [f"bench-{next(self._names)}" for _ in range(self.setup.requests)]
        for name in names:
            self._engine.reserve(EngineRequest(name, (1,) * self.setup.context, sampling))
            self._engine.admit(name, TokenOutput(1, 0))
        yield
        for name in names:
            await self._engine.abort(name)

    async def step_ms(self) -> float:
        """The mean step of a stretch. Whether requests ended after an earlier one does not matter."""
        self._ends_s, self._ended = [], 0
        self._stretch_over.clear()
        async with asyncio.timeout(_TIMEOUT_S):
            await self._stretch_over.wait()
        if self._ended:
            raise RuntimeError(f"{self._ended} requests ended before their stretches did")
        began_s, ended_s = self._ends_s[_UNTIMED_STEPS], self._ends_s[_UNTIMED_STEPS + self.setup.steps]
        return 1e3 * (ended_s - began_s) / self.setup.steps

    def _on_step(self, events: StepEvents) -> None:
        self._ends_s.append(time.monotonic())
        self._ended += len(events.failed) + sum(token.finish_reason is not None for token in events.tokens)
        if len(self._ends_s) == _UNTIMED_STEPS + 1 + self.setup.steps:
            self._stretch_over.set()


def _build(setup: Setup) -> BuiltRunner:
    block_size = 16
    tokens = setup.requests * setup.room + PARTS * setup.tokens
    return build_runner(
        NodeSettings(
            model=setup.directory,
            device=setup.device,
            load_format=setup.load_format,
            block_size=block_size,
            num_blocks=2 * (setup.requests + _SEATS_ASIDE) + tokens // block_size,
            max_batch_tokens=2048 if setup.device != "cpu" else None,
            max_batch_requests=setup.requests + _SEATS_ASIDE,
        )
    )
