"""How much of a hand-over's transfer is exposed: the time from sampling the first token to admission by the decode
node, as a share of the prompt's prefill. Real node processes, figures from receipts, medians over prompts in turns.

The receipt's time ends when the decode node has all KV and the prefill node's completion; it does not include that
message's own latency. So the client also measures how much longer the second token takes than the later ones. On a CPU
the demo model's shape is used. For an 8k prompt it computes 5,500 operations per byte of KV, Llama 8B 123,000: less
computation hides less of a transfer.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from shutil import copyfile
from statistics import median

import torch

from baton.cli.processes import Process, Processes
from baton.client.client import AsyncClient
from baton.client.outputs import Finished
from baton.core.sampling import SamplingParams
from baton.core.types import Path as Route
from baton.core.types import Receipt
from baton.settings.config import DEMO_MODELS
from bench.table import Row

GOAL_TOKENS, GOAL_PERCENT = 8192, 5.0
OUTPUT_TOKENS = 12
_LLAMA_8B = Path(__file__).resolve().parent / "engine" / "configs" / "llama-3.1-8b" / "config.json"
_DEMO = DEMO_MODELS / "llama"
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Way:
    """One prefill node: its name in the rows, its flags, and the program that runs it."""

    name: str
    flags: tuple[str, ...]
    program: str = "prefill_node"


@dataclass(frozen=True)
class Setup:
    """What is measured on a kind of machine.

    Attributes:
        config: of the model, whose weights are random.
        positions: longest sequence of the model.
        warm_tokens: length of the first prompt of each way, which is not measured.
    """

    model: str
    config: Path
    positions: int
    prompts: tuple[int, ...]
    warm_tokens: int
    ways: tuple[Way, ...]
    rounds: int
    node_flags: tuple[str, ...]
    prefill_flags: tuple[str, ...]
    decode_flags: tuple[str, ...]


def _way(chunk: int, *, whole: bool = False) -> Way:
    """A prefill node with this chunk size.

    Args:
        whole: a chunk's KV is sent only when all of its layers are computed.
    """
    flags = ("--max-batch-tokens", str(chunk))
    if whole:
        return Way(f"chunks of {chunk}, each sent whole", flags, "bench.whole_chunks")
    return Way(f"chunks of {chunk}", flags)


def on_cpu() -> Setup:
    """The first way has the default chunk size."""
    flags = ("--device", "cpu", "--kv-cache-mib", "60")
    ways = (_way(256), _way(256, whole=True), _way(64))
    return Setup("the demo Llama's shape", _DEMO / "config.json", 16384, (1024, 8192), 1024, ways, 3, flags, (), ())


def on_gpus() -> Setup:
    """The first chunk size is that of a profile on an H200. Given sizes keep nodes from profiling at the same time."""
    other = "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"
    # Enough blocks for more than the longest prompt; few requests, so that few graphs are captured.
    flags = ("--kv-cache-mib", "4608", "--max-batch-requests", "8")
    prefill = ("--device", "cuda:0", "--cuda-graphs", "false")
    decode = ("--device", other, "--max-batch-tokens", "2048")
    prompts = (1024, 8192, 32768)
    ways = (_way(2048), _way(8192), _way(8192, whole=True))
    return Setup("Llama 8B", _LLAMA_8B, 131072, prompts, max(prompts), ways, 4, flags, prefill, decode)


@dataclass
class Seen:
    """Results of one way's prompts of one length."""

    receipts: list[Receipt] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)


def run(progress: Callable[[str], None], setup: Setup | None = None) -> list[Row]:
    """The rows of this benchmark; takes about a minute on a CPU."""
    setup = setup or (on_gpus() if torch.cuda.is_available() else on_cpu())
    with tempfile.TemporaryDirectory(prefix="baton-") as folder, Processes(progress) as processes:
        model = write_model(Path(folder), setup)
        common = ["--model", str(model), "--load-format", "dummy", "--prefix-cache", "false", *setup.node_flags]
        prefills = [processes.start(way.program, [*common, *setup.prefill_flags, *way.flags]) for way in setup.ways]
        decode = processes.start("decode_node", [*common, *setup.decode_flags])
        processes.wait_ready([*prefills, decode])
        ends = ["--model", str(model), "--decode", decode.address, "--local-policy", "strict"]
        gateways = [processes.start("gateway", [*ends, "--prefill", prefill.address]) for prefill in prefills]
        processes.wait_ready(gateways)
        seen = asyncio.run(_measure(gateways, setup, progress))
    return [row for (way, tokens), own in seen.items() for row in rows_of(setup, way, tokens, own)]


def rows_of(setup: Setup, way: Way, tokens: int, seen: Seen) -> Iterator[Row]:
    groups = max(receipt.layer_groups for receipt in seen.receipts)
    split = f" in {groups} layer groups" if groups > 1 else ""
    work = f"{tokens} tokens of {setup.model}, {way.name}{split}"
    share = median(receipt.transfer_s / receipt.prefill_s for receipt in seen.receipts)
    limit = GOAL_PERCENT if tokens == GOAL_TOKENS else None
    yield Row("exposed transfer, of the prefill", work, 100 * share, "%", limit=limit)
    yield Row("exposed transfer", work, 1e3 * median(receipt.transfer_s for receipt in seen.receipts), "ms")
    yield Row("prefill", work, 1e3 * median(receipt.prefill_s for receipt in seen.receipts), "ms")
    yield Row("second token, later than the next ones", work, median(seen.late_ms), "ms")


async def _measure(
    gateways: Sequence[Process], setup: Setup, progress: Callable[[str], None]
) -> dict[tuple[Way, int], Seen]:
    seen: dict[tuple[Way, int], Seen] = {(way, tokens): Seen() for tokens in setup.prompts for way in setup.ways}
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(gateway.address)) for gateway in gateways]
        for client in clients:  # warms caches, allocators and compilers
            await _hand_over(client, _prompt(0, setup.warm_tokens))
        for (way, tokens), own in _turns(setup.rounds, seen):
            progress(f"exposed: {tokens} tokens, {way.name}")
            receipt, stamps = await _hand_over(clients[setup.ways.index(way)], _prompt(len(own.receipts) + 1, tokens))
            own.receipts.append(receipt)
            first, *later = (after - before for before, after in pairwise(stamps))
            own.late_ms.append(1e3 * (first - median(later)))
    return seen


def _turns(rounds: int, seen: dict[tuple[Way, int], Seen]) -> Iterator[tuple[tuple[Way, int], Seen]]:
    for _ in range(rounds):
        yield from seen.items()


async def _hand_over(client: AsyncClient, prompt: list[int]) -> tuple[Receipt, list[float]]:
    """One request's receipt, and when each of its tokens arrived.

    Raises:
        RuntimeError: not all of the prompt was handed over.
    """
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    stamps: list[float] = []
    receipt: Receipt | None = None
    async for event in client.generate(prompt, params, timeout_s=_TIMEOUT_S):
        stamps += [time.perf_counter()] * len(event.tokens)
        if isinstance(event, Finished):
            receipt = event.receipt
    if receipt is None or receipt.path is not Route.REMOTE or receipt.prompt_tokens_sent != len(prompt):
        raise RuntimeError(f"not handed over whole: {receipt}")
    return receipt, stamps


def _prompt(seed: int, tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(10, 2000, (tokens,), generator=generator)]


def write_model(folder: Path, setup: Setup) -> Path:
    """Writes a model's directory without weights, with the demo's tokenizer."""
    config = {**json.loads(setup.config.read_text()), "max_position_embeddings": setup.positions}
    (folder / "config.json").write_text(json.dumps(config))
    copyfile(_DEMO / "tokenizer.json", folder / "tokenizer.json")
    return folder
