"""What it costs to bring tokens to the experts of other ranks: a gather and a sum by NCCL, against rows sent through
the ranks' memory, alone and in a layer of DeepSeek-V3 in fp8.

`python -m bench.expert_dispatch [RANKS]` prints the times of rank 0, with random weights and with the experts that the
router chooses for random tokens. It has not been run on several GPUs yet.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch import distributed as dist
from torch.multiprocessing.spawn import start_processes

from baton.engine.build import build_runner
from baton.models.kernels.moe import expert_dispatch
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.moe.moe import MoE
from baton.models.layers.parallel import TensorParallel
from baton.models.layers.token_exchange import TokenShares
from baton.settings.environment import disable_nvlink_multicast
from baton.settings.node_config import NodeSettings
from bench.engine.run import CONFIGS
from bench.invariant_ranks import graph_us

ROWS = (8, 32, 128, 512)
NAMES = ("gather", "dispatch", "layer, gather", "layer, dispatch", "layer, experts alone")
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def main(arguments: list[str]) -> None:
    size = int(arguments[0]) if arguments else 2
    with TemporaryDirectory() as directory:
        config = json.loads((CONFIGS / "deepseek-v3-4-layers" / "config.json").read_text())
        (Path(directory) / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
        start_processes(_run, (size, directory), nprocs=size, start_method="spawn")


def _run(rank: int, size: int, directory: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    disable_nvlink_multicast()
    store = f"file://{directory}/store"
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=size, device_id=device)
    try:
        settings = NodeSettings(model=Path(directory), device=str(device), load_format="dummy", num_blocks=64)
        own = TensorParallel(rank, size, whole_experts=True, own_attention=True, share_memory=True)
        model = build_runner(settings, parallel=own).runner.model
        table = Table("rows a rank", *NAMES, title=f"Experts over {size} ranks, us")
        for rows in ROWS:
            table.add_row(str(rows), *(f"{time_us:.1f}" for time_us in times_us(model, rows)))
        if rank == 0:
            Console().print(table)
    finally:
        dist.destroy_process_group()


@torch.inference_mode()
def times_us(model: CausalLM, rows: int) -> list[float]:
    """Microseconds of each of `NAMES`, as part of a CUDA graph."""
    layer, parallel = model.model.layers[-1].mlp, model.parallel
    assert isinstance(layer, MoE)
    assert layer.exchange is not None
    assert layer.shared_experts is not None
    assert model.expert_counts is not None
    memory, ranks, shared = parallel.dispatch, layer.experts.expert_ranks, layer.shared_experts
    assert memory is not None, "the log says why"
    layer.exchange.shares = TokenShares.equal(rows, parallel.size)
    model.expert_counts.slots_T = None
    x_TD = torch.randn(rows, memory.width, device=memory.turns_T.device).to(memory.dtype)
    weights_TK, experts_TK = layer.gate(x_TD)

    def gather(own_TD: Tensor) -> Tensor:
        return parallel.reduce_scatter(parallel.all_gather(own_TD).flatten(0, 1))

    def dispatch(own_TD: Tensor) -> Tensor:
        asked_T = expert_dispatch.send(memory, own_TD, weights_TK, experts_TK, ranks, width=rows)
        received = expert_dispatch.receive(memory, ranks, width=rows, experts_dtype=experts_TK.dtype)
        expert_dispatch.send_back(memory, received.x_AD, received, width=rows)
        return expert_dispatch.add_up(memory, asked_T, width=rows)

    all_AD = parallel.all_gather(x_TD).flatten(0, 1)
    chosen = layer.gate(all_AD)

    def alone(own_TD: Tensor) -> Tensor:
        layer.gate(own_TD)
        layer.experts(all_AD, *chosen)
        out_TD: Tensor = shared(own_TD)
        return out_TD

    def in_layer(joined: TensorParallel) -> Callable[[Tensor], Tensor]:
        def compute(own_TD: Tensor) -> Tensor:
            layer.parallel = joined
            return layer.of_own_tokens(own_TD)

        return compute

    ways = (gather, dispatch, in_layer(replace(parallel, dispatch=None)), in_layer(parallel), alone)
    return [graph_us(way, x_TD) for way in ways]


if __name__ == "__main__":
    main(sys.argv[1:])
