"""All attention benchmarks of this machine's GPU, or some of their parts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from attention.platform import Platform, probe_platform
from bench.attention import gqa, mla, moves, ragged, selected, shared_prefix, short_chunks, sparse
from bench.attention.measure import Ceilings, ceilings
from bench.table import Row

Progress = Callable[[str], None]

# In the order of the table. Each has the same arguments, so that parts can be measured on several GPUs at once.
PARTS: Mapping[str, Callable[[Platform, Ceilings, Progress], Iterator[Row]]] = MappingProxyType(
    {
        "gqa": gqa.run,
        "ragged": ragged.run,
        "shared_prefix": lambda platform, _, progress: shared_prefix.run(platform, progress),
        "short_chunks": short_chunks.run,
        "mla": mla.run,
        "sparse": lambda platform, _, progress: sparse.run(platform, progress),
        "selected": lambda platform, _, progress: selected.run(platform, progress),
        "moves": lambda _, machine, progress: moves.run(machine, progress),
    }
)


def run(progress: Progress, parts: Sequence[str] = tuple(PARTS)) -> Iterator[Row]:
    """The machine's limits, then the named parts. Without a GPU it yields no rows, and reports that."""
    if not torch.cuda.is_available():
        progress("attention: needs a GPU")
        return
    torch.manual_seed(0)
    platform, machine = probe_platform("cuda"), ceilings()
    yield Row("copy", "2 GiB", machine.copy_gigabytes_per_s, "GB/s")
    yield Row("matmul", "8192 x 8192 x 8192, bfloat16", machine.matmul_teraflops, "TFLOPS")
    for part in parts:
        yield from PARTS[part](platform, machine, progress)
