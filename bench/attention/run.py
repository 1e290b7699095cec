"""All attention benchmarks of this machine's GPU."""

from collections.abc import Callable, Iterator

import torch

from attention.platform import probe_platform
from bench.attention import gqa, mla, moves, sparse
from bench.attention.measure import ceilings
from bench.table import Row


def run(progress: Callable[[str], None]) -> Iterator[Row]:
    """No rows where there is no GPU; says so."""
    if not torch.cuda.is_available():
        progress("attention: needs a GPU")
        return
    torch.manual_seed(0)
    platform, machine = probe_platform("cuda"), ceilings()
    yield Row("copy", "2 GiB", machine.copy_gigabytes_per_s, "GB/s")
    yield Row("matmul", "8192 x 8192 x 8192, bfloat16", machine.matmul_teraflops, "TFLOPS")
    yield from gqa.run(platform, machine, progress)
    yield from mla.run(platform, machine, progress)
    yield from sparse.run(platform, progress)
    yield from moves.run(machine, progress)
