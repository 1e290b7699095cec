"""What sums over ranks cost: NCCL's, torch's in one shot, and ours through peers' memory, alone and with the norm.

`python -m bench.peer_sums [RANKS] [MODEL ...]` prints the times of rank 0, of sums and then of whole steps with NCCL's
sums and with ours. Models are folders of bench/engine/configs; their weights are random.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch import distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.multiprocessing.spawn import start_processes

from baton.engine.peer_memory import with_peer_memory
from baton.models.layers.norms import RMSNorm
from baton.models.layers.parallel import TensorParallel
from baton.settings.environment import disable_nvlink_multicast
from bench.engine.run import CONFIGS
from bench.invariant_ranks import graph_us, time_steps

WIDTHS = (4096, 8192)
ROWS = (1, 8, 32, 128, 512)
NAMES = ("NCCL", "torch, one shot", "ours", "NCCL, then norm", "ours with norm")


def main(arguments: list[str]) -> None:
    size, models = int(arguments[0]) if arguments else 2, arguments[1:]
    with TemporaryDirectory() as directory:
        start_processes(_run, (size, f"file://{directory}/store", models), nprocs=size, start_method="spawn")


def _run(rank: int, size: int, store: str, models: list[str]) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    disable_nvlink_multicast()
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=size, device_id=device)
    try:
        parallel = TensorParallel(rank, size)
        table = Table("channels", "rows", *NAMES, title=f"Sums over {size} ranks in bf16, us")
        for width in WIDTHS:
            joined = with_peer_memory(parallel, width=width, dtype=torch.bfloat16, device=device)
            assert joined.peers is not None, "the log says why"
            for rows in ROWS:
                table.add_row(str(width), str(rows), *(f"{time_us:.1f}" for time_us in _times_us(joined, rows, width)))
        if rank == 0:
            Console().print(table)
        for name in models:
            for share_memory in (False, True):
                time_steps(replace(parallel, share_memory=share_memory), CONFIGS / name)
    finally:
        dist.destroy_process_group()


@torch.inference_mode()
def _times_us(joined: TensorParallel, rows: int, width: int) -> list[float]:
    """Microseconds of each sum of `NAMES`, as part of a CUDA graph."""
    library = replace(joined, peers=None)
    part_TD = torch.randn(rows, width, device="cuda").to(torch.bfloat16)
    stream_TD = torch.zeros_like(part_TD)
    norm = RMSNorm(width, eps=1e-5, dtype=torch.bfloat16).cuda()
    torch.nn.init.ones_(norm.weight)
    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name
    shared = symmetric_memory.empty(rows, width, dtype=torch.bfloat16, device=part_TD.device)
    symmetric_memory.rendezvous(shared, group)

    def of_torch(x_TD: Tensor) -> Tensor:
        total_TD: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, x_TD, "sum", group)
        return total_TD

    ways: tuple[Callable[[Tensor], Tensor], ...] = (
        library.all_reduce,
        of_torch,
        joined.all_reduce,
        lambda x_TD: norm.add_and_norm(stream_TD, library.all_reduce(x_TD)),
        lambda x_TD: norm.add_and_norm(stream_TD, joined.all_reduce_later(x_TD)),
    )
    return [graph_us(way, part_TD) for way in ways]


if __name__ == "__main__":
    main(sys.argv[1:])
