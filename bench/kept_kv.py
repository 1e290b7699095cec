"""Time to first token of a prompt that a node has computed before: from its cache, from host memory, from files, and
computed again. One node, so that nothing but the source of the KV differs. Before that, pulls between two nodes.

On a GPU the model has Llama-3.1-8B's shape and random weights; on a CPU it is the demo model's shape.
"""

import asyncio
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from baton.cli.processes import Processes
from baton.client.client import AsyncClient
from baton.core.sampling import SamplingParams
from baton.core.types import Receipt
from bench import pulls
from bench.exposed import on_cpu, on_gpus, write_model
from bench.table import Row

ROUNDS = 5
_TIMEOUT_S = 300.0
# How many times as fast as computing host memory should be, on a GPU, by tokens of the prompt.
_GOALS = {8192: 5.0, 32768: 10.0, 131072 - 64: 15.0}
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def run(progress: Callable[[str], None]) -> list[Row]:
    on_gpu = torch.cuda.is_available()
    setup = on_gpus() if on_gpu else on_cpu()
    lengths = (2048, 8192, 32768, 131072 - 64) if on_gpu else (256, 1024)
    rows = pulls.rows(progress)
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        model = write_model(Path(folder), setup)
        for length in lengths:
            files = Path(folder) / f"kv-{length}"
            flags = _flags(model, length, files, on_gpu=on_gpu)
            prompts = [_prompt(length, number) for number in range(ROUNDS + 1)]
            with _node(flags, progress) as gateway:
                progress(f"kept KV: {length} tokens computed, cached, and read from host memory")
                computed, cached, host = asyncio.run(_from_memory(gateway, prompts))
            with _node(flags, progress) as gateway:
                progress(f"kept KV: {length} tokens read from files")
                file = asyncio.run(_ttfts(gateway, prompts, loaded=True))
            work = f"{length} tokens of {setup.model}"
            rival = _median_ms(computed)
            for name, seconds, goal in (
                ("cached", cached, None),
                ("host memory", host, _GOALS.get(length)),
                ("file", file, None),
            ):
                ours = _median_ms(seconds)
                rows.append(Row(f"TTFT, {name}", work, ours, "ms", "computed", rival, goal, less_is_better=True))
    return rows


def _flags(model: Path, length: int, files: Path, *, on_gpu: bool) -> list[str]:
    # Room for one prompt and a part of the next, so that each prompt displaces the one before.
    mib = math.ceil(1.5 * length * _bytes_per_token(model, 2 if on_gpu else 4) / (1 << 20)) + 1
    device = ["--device", "cuda:0"] if on_gpu else ["--device", "cpu"]
    gib = "100" if on_gpu else "1"
    return [
        *("--model", str(model), "--load-format", "dummy", *device, "--kv-cache-mib", str(mib)),
        *("--host-cache-gib", gib, "--kv-store", f"file://{files}", "--file-cache-gib", gib),
    ]


def _bytes_per_token(model: Path, number_bytes: int) -> int:
    config = json.loads((model / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * number_bytes)


@contextmanager
def _node(flags: list[str], progress: Callable[[str], None]) -> Iterator[str]:
    """The address of a gateway with one decode node."""
    with Processes(progress) as processes:
        node = processes.start("decode_node", flags)
        processes.wait_ready([node])
        gateway = processes.start("gateway", [*flags[:2], "--decode", node.address])
        processes.wait_ready([gateway])
        yield gateway.address


async def _from_memory(gateway: str, prompts: list[list[int]]) -> tuple[list[float], list[float], list[float]]:
    """Seconds to the first token of each prompt: computed, then at once again, then after all others."""
    computed, cached = [], []
    async with AsyncClient(gateway) as client:
        for prompt in prompts:
            computed.append((await _ttft(client, prompt))[0])
            cached.append((await _ttft(client, prompt))[0])
    host = await _ttfts(gateway, prompts, loaded=True)
    return computed[1:], cached[1:], host  # the first prompt warms everything up


async def _ttfts(gateway: str, prompts: list[list[int]], *, loaded: bool) -> list[float]:
    seconds = []
    async with AsyncClient(gateway) as client:
        for prompt in prompts:
            ttft_s, receipt = await _ttft(client, prompt)
            if (receipt.decode_loaded_tokens > 0) is not loaded:
                raise SystemExit(f"bench: {receipt.decode_loaded_tokens} tokens were read back: {receipt.why}")
            seconds.append(ttft_s)
    return seconds[1:]


async def _ttft(client: AsyncClient, prompt: list[int]) -> tuple[float, Receipt]:
    started_s = time.perf_counter()
    completion = await client.complete(prompt, _ONE_TOKEN, timeout_s=_TIMEOUT_S)
    return time.perf_counter() - started_s, completion.receipt


def _median_ms(seconds: list[float]) -> float:
    return 1e3 * float(np.median(seconds))


def _prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(10, 2000, (length,), generator=generator)]
