"""Time to first token and between tokens at the client, with default settings: a gateway, a prefill and a decode node.

On two GPUs the model has Llama-3.1-8B's shape and random weights; on a CPU it is the demo model.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from baton.cli.processes import Processes
from baton.client.client import AsyncClient
from baton.core.sampling import SamplingParams
from bench.exposed import Setup, on_cpu, on_gpus, write_model
from bench.table import Row

OUTPUT_TOKENS = 64
ROUNDS = 6
CONCURRENT = (1, 32)
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Load:
    """Concurrent requests, and the length of their prompts."""

    requests: int
    tokens: int


@dataclass
class Latencies:
    """Latencies at the clients: one number per request or per gap between tokens."""

    first_token_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)


def run(progress: Callable[[str], None]) -> list[Row]:
    on_gpu = torch.cuda.is_available()
    setup = on_gpus() if on_gpu else on_cpu()
    prompts = (512, 8192) if on_gpu else (64, 512)
    with tempfile.TemporaryDirectory(prefix="baton-") as folder, Processes(progress) as processes:
        model = write_model(Path(folder), setup)
        flags = ["--model", str(model), "--load-format", "dummy"]
        devices = [f"cuda:{index % torch.cuda.device_count()}" for index in range(2)] if on_gpu else ["cpu", "cpu"]
        if on_gpu and torch.cuda.device_count() == 1:
            flags += ["--gpu-memory-fraction", "0.45"]
        prefill = processes.start("prefill_node", [*flags, "--device", devices[0]])
        processes.wait_ready([prefill])  # one profile at a time
        decode = processes.start("decode_node", [*flags, "--device", devices[1]])
        processes.wait_ready([decode])
        ends = ["--model", str(model), "--prefill", prefill.address, "--decode", decode.address]
        gateway = processes.start("gateway", ends)
        processes.wait_ready([gateway])
        loads = [Load(requests, tokens) for tokens in prompts for requests in CONCURRENT]
        measured = asyncio.run(_measure(gateway.address, loads, progress))
    return [row for load, latencies in measured.items() for row in rows_of(setup, load, latencies)]


def rows_of(setup: Setup, load: Load, latencies: Latencies) -> Iterator[Row]:
    at_once = "alone" if load.requests == 1 else f"{load.requests} at once"
    work = f"{load.tokens} tokens of {setup.model}, {OUTPUT_TOKENS} out, {at_once}"
    for name, values in (("TTFT", latencies.first_token_ms), ("inter-token latency", latencies.gap_ms)):
        for percent in (50, 99):
            yield Row(f"{name}, p{percent}", work, float(np.percentile(values, percent)), "ms")


async def _measure(address: str, loads: list[Load], progress: Callable[[str], None]) -> dict[Load, Latencies]:
    measured = {load: Latencies() for load in loads}
    seed = 0
    async with AsyncClient(address) as client:
        for round_number in range(ROUNDS + 1):
            for load, latencies in measured.items():
                progress(f"latency: {load.tokens} tokens, {load.requests} at once, round {round_number} of {ROUNDS}")
                prompts = [_prompt(seed + index, load.tokens) for index in range(load.requests)]
                seed += load.requests
                requests = await asyncio.gather(*(_request(client, prompt) for prompt in prompts))
                if round_number == 0:
                    continue  # warms caches, allocators and links
                for stamps in requests:
                    latencies.first_token_ms.append(1e3 * (stamps[1] - stamps[0]))
                    latencies.gap_ms += [1e3 * (after - before) for before, after in pairwise(stamps[1:])]
    return measured


async def _request(client: AsyncClient, prompt: list[int]) -> list[float]:
    """When the request was sent, and when each token arrived."""
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    stamps = [time.perf_counter()]
    async for event in client.generate(prompt, params, timeout_s=_TIMEOUT_S):
        stamps += [time.perf_counter()] * len(event.tokens)
    return stamps


def _prompt(seed: int, tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(10, 2000, (tokens,), generator=generator)]
