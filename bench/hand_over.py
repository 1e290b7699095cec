"""The cost of disaggregation for a request: time to first token and between tokens, with a hand-over and in one
process.

Three ways to the same tokens take turns on the same machine: prefill node to decode node; the decode node alone with
the same gateway; and an engine inside this process, without gateway and RPC.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import psutil
import torch

from baton.cli.processes import Process, Processes
from baton.client.client import AsyncClient
from baton.client.outputs import Finished
from baton.core.sampling import SamplingParams
from baton.engine.build import build_runner
from baton.engine.engine import Engine
from baton.engine.events import StepEvents
from baton.engine.request import EngineLimits, EngineRequest
from baton.settings.config import DEMO_MODELS
from baton.settings.node_config import NodeSettings
from bench.table import Row

MODEL = DEMO_MODELS / "llama"
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 64
ROUNDS = 25
BATCH_TOKENS = 256
CONCURRENT = 16
IDLE_S = 3.0
HAND_OVER_GOAL_MS = 10.0
GATEWAY_GOAL_MS = 0.2


@dataclass
class Times:
    """One way's measurements, in seconds."""

    ttft_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        return 1e3 * statistics.median(self.ttft_s)

    def later_ms(self, other: "Times") -> float:
        """How much later this way's first token arrives: the median over rounds, each with one prompt for both ways."""
        pairs = zip(self.ttft_s, other.ttft_s, strict=True)
        return 1e3 * statistics.median(ours - theirs for ours, theirs in pairs)

    @property
    def itl_ms(self) -> float:
        return 1e3 * statistics.median(self.between_s)


def run(progress: Callable[[str], None]) -> list[Row]:
    """The rows of this benchmark; takes about a minute."""
    with Processes(progress) as processes:
        flags = ["--model", str(MODEL), "--device", "cpu", "--prefix-cache", "false"]
        flags += ["--max-batch-tokens", str(BATCH_TOKENS)]
        prefill = processes.start("prefill_node", flags)
        decode = processes.start("decode_node", flags)
        processes.wait_ready([prefill, decode])
        common = ["--model", str(MODEL), "--decode", decode.address]
        handed = processes.start("gateway", [*common, "--prefill", prefill.address, "--local-policy", "strict"])
        alone = processes.start("gateway", [*common, "--local-policy", "local"])
        processes.wait_ready([handed, alone])
        return asyncio.run(_measure(handed, alone, progress))


async def _measure(handed: Process, alone: Process, progress: Callable[[str], None]) -> list[Row]:
    ways = {"handed over": Times(), "decode node alone": Times(), "one process": Times()}
    async with AsyncClient(handed.address) as remote, AsyncClient(alone.address) as local, _own_engine() as engine:
        for index in range(ROUNDS + 2):
            prompt = _prompt(index)
            for name, timed in (
                ("handed over", _through(remote, prompt)),
                ("decode node alone", _through(local, prompt)),
                ("one process", engine.time(prompt, index)),
            ):
                stamps = await timed
                if index >= 2:  # the first rounds warm caches and allocators
                    _add(ways[name], stamps)
            if index % 5 == 0:
                progress(f"latency: round {index} of {ROUNDS + 1}")
        per_token_ms = await _gateway_cpu_per_token_ms(remote, handed)
    return _rows(ways, per_token_ms)


def _add(times: Times, stamps: Sequence[float]) -> None:
    times.ttft_s.append(stamps[1] - stamps[0])
    times.between_s += [after - before for before, after in pairwise(stamps[2:])]


def _rows(ways: dict[str, Times], per_token_ms: float) -> list[Row]:
    work = f"{PROMPT_TOKENS}-token prompt, chunks of {BATCH_TOKENS}"
    handed, alone, one = ways["handed over"], ways["decode node alone"], ways["one process"]
    return [
        Row("TTFT, handed over", work, handed.ttft_ms, "ms"),
        Row("TTFT, decode node alone, same gateway", work, alone.ttft_ms, "ms"),
        Row("TTFT, one process, no gateway", work, one.ttft_ms, "ms"),
        Row(
            "hand-over overhead", "TTFT minus one process, pair by pair", handed.later_ms(one), "ms",
            limit=HAND_OVER_GOAL_MS,
        ),
        Row("hand-over overhead", "TTFT minus decode node alone, pair by pair", handed.later_ms(alone), "ms"),
        Row("inter-token latency, handed over", "one request", handed.itl_ms, "ms"),
        Row("inter-token latency, decode node alone", "one request", alone.itl_ms, "ms"),
        Row("inter-token latency, one process", "one request", one.itl_ms, "ms"),
        Row(
            "gateway CPU time per token", f"{CONCURRENT} requests at once", per_token_ms, "ms",
            limit=GATEWAY_GOAL_MS,
        ),
    ]  # fmt: skip


def _prompt(seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(10, 2000, (PROMPT_TOKENS,), generator=generator)]


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


async def _through(client: AsyncClient, prompt: list[int]) -> list[float]:
    """When the request was sent, and when each token arrived."""
    stamps = [time.perf_counter()]
    async for event in client.generate(prompt, _params(OUTPUT_TOKENS)):
        if not isinstance(event, Finished) or event.tokens:
            stamps += [time.perf_counter()] * len(event.tokens)
    return stamps


async def _gateway_cpu_per_token_ms(client: AsyncClient, gateway: Process) -> float:
    """CPU time of the gateway process over many streaming requests, less the time that it takes to watch its nodes
    while idle."""
    process = psutil.Process(gateway.pid)
    idle_share = _cpu_s(process)
    await asyncio.sleep(IDLE_S)
    idle_share = (_cpu_s(process) - idle_share) / IDLE_S
    before_s, began = _cpu_s(process), time.perf_counter()
    requests = [client.complete(_prompt(1000 + index)[:64], _params(200)) for index in range(CONCURRENT)]
    tokens = sum(len(each.tokens) for each in await asyncio.gather(*requests))
    spent_s = _cpu_s(process) - before_s - idle_share * (time.perf_counter() - began)
    return 1e3 * spent_s / tokens


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


class _OwnEngine:
    """An engine in this process."""

    def __init__(self) -> None:
        built = build_runner(NodeSettings(model=MODEL, kv_cache_mib=128, device="cpu"))
        limits = EngineLimits(max_batch_tokens=BATCH_TOKENS, max_batch_requests=64, max_waiting=64, prefix_cache=False)
        self.engine = Engine(built.runner, limits, on_step=self._on_step, grammars=built.grammars)
        self._stamps: list[float] = []
        self._over = asyncio.Event()

    async def time(self, prompt: list[int], index: int) -> list[float]:
        self._stamps = [time.perf_counter()]
        self._over.clear()
        self.engine.submit(EngineRequest(str(index), tuple(prompt), _params(OUTPUT_TOKENS).resolved()))
        await self._over.wait()
        return self._stamps

    def _on_step(self, events: StepEvents) -> None:
        for sampled in events.tokens:
            self._stamps.append(time.perf_counter())
            if sampled.finish_reason is not None:
                self._over.set()


@asynccontextmanager
async def _own_engine() -> AsyncIterator[_OwnEngine]:
    with _one_thread():
        own = _OwnEngine()
        async with own.engine:
            yield own


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
