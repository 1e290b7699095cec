"""What batch-invariant sums over ranks cost: each sum alone, and steps of a model on several GPUs in both modes.

`python -m bench.invariant_ranks [RANKS] [MODEL ...]` prints the times of rank 0. Models are folders of
bench/engine/configs; their weights are random.
"""

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch import distributed as dist
from torch.multiprocessing.spawn import start_processes

from baton.engine.build import build_runner
from baton.models.kernels.rank_sums import sum_parts
from baton.models.layers.parallel import TensorParallel
from baton.settings.node_config import NodeSettings
from bench.engine.run import CONFIGS
from bench.engine.steps import decode_ms, prefill_ms

HIDDEN = 4096
ROWS = (1, 32, 256, 2048, 8192)
BATCHES = (1, 32, 256)
CONTEXT, PROMPT, BLOCK_SIZE = 1024, 8192, 64
MODELS = ("llama-3.1-8b",)
_SUMS = 20  # in one graph
# Ranks must take equally many steps. `decode_ms` takes more than these only if a step is shorter than 1 ms.
_STEPS = 400


def main(arguments: list[str]) -> None:
    size, models = int(arguments[0]) if arguments else 2, tuple(arguments[1:]) or MODELS
    with TemporaryDirectory() as directory:
        start_processes(_run, (size, f"file://{directory}/store", models), nprocs=size, start_method="spawn")


def _run(rank: int, size: int, store: str, models: tuple[str, ...]) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=size, device_id=device)
    try:
        parallel = TensorParallel(rank, size)
        _time_sums(parallel)
        for name in models:
            for batch_invariant in (False, True):
                time_steps(parallel, CONFIGS / name, batch_invariant=batch_invariant)
    finally:
        dist.destroy_process_group()


def _say(parallel: TensorParallel, text: str) -> None:
    if parallel.rank == 0:
        print(text, flush=True)


# ---- sums alone


@torch.inference_mode()
def _time_sums(parallel: TensorParallel) -> None:
    in_order = replace(parallel, in_order=True)

    def whole(x_TD: Tensor) -> Tensor:
        return sum_parts(in_order.all_gather(x_TD))

    def in_shares(x_TD: Tensor) -> Tensor:
        return in_order.all_gather(in_order.reduce_scatter(x_TD.view(-1))).view(x_TD.shape)

    how: dict[str, Callable[[Tensor], Tensor]] = {
        "library": parallel.all_reduce,
        "parts gathered": whole,
        "in shares": in_shares,
        "the mode's": in_order.all_reduce,
    }
    for rows in ROWS:
        x_TD = torch.randn(rows, HIDDEN, device="cuda").to(torch.bfloat16)
        times = {name: graph_us(function, x_TD) for name, function in how.items()}
        found = ", ".join(f"{name} {time_us:.1f}" for name, time_us in times.items())
        _say(parallel, f"{parallel.size} ranks, sum of {rows} rows of {HIDDEN} in bf16, us: {found}")


def graph_us(function: Callable[[Tensor], Tensor], x_TD: Tensor) -> float:
    """Microseconds of one sum, as part of a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function(x_TD)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(_SUMS):
            function(x_TD)
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(3):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / (3 * _SUMS)


# ---- steps of a model


def time_steps(parallel: TensorParallel, model: Path, *, batch_invariant: bool = False) -> None:
    """Prints the time of decodes and of a prefill."""
    settings = NodeSettings(
        model=model,
        device=f"cuda:{parallel.rank}",
        load_format="dummy",
        block_size=BLOCK_SIZE,
        num_blocks=max(BATCHES) * (CONTEXT + _STEPS) // BLOCK_SIZE,
        max_batch_requests=max(BATCHES),
        max_batch_tokens=PROMPT,
        batch_invariant=batch_invariant,
    )
    built = build_runner(settings, parallel=parallel)
    built.runner.prepare()
    mode = "batch-invariant" if batch_invariant else "peers' memory" if parallel.share_memory else "plain"
    for rows in BATCHES:
        took_ms = decode_ms(built.runner, requests=rows, context=CONTEXT, steps=_STEPS)
        _say(parallel, f"{parallel.size} ranks, {model.name}, {mode}, decode of {rows} rows: {took_ms:.3f} ms")
    took_ms = prefill_ms(built.runner, lengths=[PROMPT])
    _say(parallel, f"{parallel.size} ranks, {model.name}, {mode}, prefill of {PROMPT}: {took_ms:.1f} ms")
    del built
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
