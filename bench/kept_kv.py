"""Time to first token of a prompt that a node has computed before: from its cache, from host memory, from files, and
computed again. One node, so that nothing but the source of the KV differs. Before that, pulls between two nodes.

On a GPU the model has Llama-3.1-8B's shape and random weights; on a CPU it is the demo model's shape. No row has
files where the disk has too little room for them, or where the node did not read them because computing is faster.
"""

import asyncio
import json
import math
import shutil
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
# With fewer prompts after it, a part of a prompt would still be in the cache.
_LEAST_ROUNDS = 2
_TIMEOUT_S = 300.0
# Most host memory, and most room of files, for all prompts of one length.
_HOST_GIB_MAX, _FILES_GIB_MAX = 48, 16
# A prompt counts as read from files if this share of it was.
_READ_SHARE = 0.7
# How many times as fast as computing host memory should be, on a GPU, by tokens of the prompt.
_GOALS = {8192: 5.0, 32768: 10.0, 131072 - 64: 15.0}
_GIB = 1 << 30
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def run(progress: Callable[[str], None]) -> list[Row]:
    on_gpu = torch.cuda.is_available()
    setup = on_gpus() if on_gpu else on_cpu()
    lengths = (2048, 8192, 32768, 131072 - 64) if on_gpu else (256, 1024)
    rows = pulls.rows(progress)
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        model = write_model(Path(folder), setup)
        for length in lengths:
            size_gib = length * _bytes_per_token(model, 2 if on_gpu else 4) / _GIB
            rounds = max(_LEAST_ROUNDS, min(ROUNDS, int(_HOST_GIB_MAX / size_gib) - 1))
            kept_gib = 1.1 * (rounds + 1) * size_gib + 0.1
            free_gib = shutil.disk_usage(folder).free / _GIB
            files = Path(folder) / f"kv-{length}" if kept_gib <= min(_FILES_GIB_MAX, free_gib / 2) else None
            flags = _flags(model, length, files, on_gpu=on_gpu, gib=kept_gib)
            prompts = [_prompt(length, number) for number in range(rounds + 1)]
            with _node(flags, progress) as gateway:
                progress(f"kept KV: {length} tokens computed, cached, and read from host memory")
                computed, cached, host = asyncio.run(_from_memory(gateway, prompts))
            file: list[float] = []
            if files is not None:
                with _node(flags, progress) as gateway:
                    progress(f"kept KV: {length} tokens read from files")
                    file = asyncio.run(_from_files(gateway, prompts))
                shutil.rmtree(files)
            work = f"{length} tokens of {setup.model}"
            rival = _median_ms(computed)
            for name, seconds, goal in (
                ("cached", cached, None),
                ("host memory", host, _GOALS.get(length)),
                ("file", file, None),
            ):
                if not seconds:
                    progress(f"kept KV: {length} tokens were not read from a {name}")
                    continue
                ours = _median_ms(seconds)
                rows.append(Row(f"TTFT, {name}", work, ours, "ms", "computed", rival, goal, less_is_better=True))
    return rows


def _flags(model: Path, length: int, files: Path | None, *, on_gpu: bool, gib: float = 64) -> list[str]:
    # Room for one prompt and a part of the next, so that each prompt displaces the one before.
    mib = math.ceil(1.5 * length * _bytes_per_token(model, 2 if on_gpu else 4) / (1 << 20)) + 1
    device = ["--device", "cuda:0"] if on_gpu else ["--device", "cpu"]
    return [
        *("--model", str(model), "--load-format", "dummy", *device, "--kv-cache-mib", str(mib)),
        *("--host-cache-gib", f"{gib:.3f}"),
        *(() if files is None else ("--file-cache-dir", str(files), "--file-cache-gib", f"{gib:.3f}")),
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
        host = []
        for prompt in prompts:
            ttft_s, receipt = await _ttft(client, prompt)
            if receipt.decode_loaded_tokens < _READ_SHARE * len(prompt):
                raise SystemExit(
                    f"bench: {receipt.decode_loaded_tokens} of {len(prompt)} tokens were read back: {receipt.why}"
                )
            host.append(ttft_s)
    return computed[1:], cached[1:], host[1:]  # the first prompt warms everything up


async def _from_files(gateway: str, prompts: list[list[int]]) -> list[float]:
    """Seconds to the first token of each prompt but the first that was read from files. A node does not read files that
    were slower than its steps."""
    async with AsyncClient(gateway) as client:
        answers = [(prompt, *await _ttft(client, prompt)) for prompt in prompts]
    return [
        seconds for prompt, seconds, receipt in answers[1:] if receipt.decode_loaded_tokens >= _READ_SHARE * len(prompt)
    ]


async def _ttft(client: AsyncClient, prompt: list[int]) -> tuple[float, Receipt]:
    started_s = time.perf_counter()
    completion = await client.complete(prompt, _ONE_TOKEN, timeout_s=_TIMEOUT_S)
    return time.perf_counter() - started_s, completion.receipt


def _median_ms(seconds: list[float]) -> float:
    return 1e3 * float(np.median(seconds))


def _prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(10, 2000, (length,), generator=generator)]
