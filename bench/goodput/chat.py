"""Goodput of chat: short prompts, 200 tokens out, TTFT 400 ms."""

from collections.abc import Callable

import torch

from bench.goodput.search import Plan, measure
from bench.table import Row

_GPU = Plan("chat", 0.4, (0.01, 0.02, 0.05), start=60.0, wanted={0.01: 2.6}, duration_s=8.0)
_CPU = Plan("chat", 2.0, (0.05,), start=1.0, wanted={}, duration_s=4.0, runs_max=2)


def run(progress: Callable[[str], None]) -> list[Row]:
    return list(measure(_GPU if torch.cuda.is_available() else _CPU, progress))
