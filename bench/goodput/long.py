"""Goodput of long prompts: 4,096 to 8,192 tokens in, 128 to 256 out, TTFT 2 s."""

from collections.abc import Callable

import torch

from bench.goodput.search import Plan, measure
from bench.table import Row

_GPU = Plan("long", 2.0, (0.01, 0.02, 0.05), start=5.0, wanted={0.01: 2.0}, duration_s=15.0)
_CPU = Plan("long", 30.0, (0.1,), start=0.2, wanted={}, duration_s=10.0, runs_max=1)


def run(progress: Callable[[str], None]) -> list[Row]:
    return list(measure(_GPU if torch.cuda.is_available() else _CPU, progress))
