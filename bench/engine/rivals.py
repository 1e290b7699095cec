"""Rivals for the same decode step in the same run: transformers, compiled, with a static cache."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.table import Row

_WARM_STEPS, _STEPS = 8, 20


def run(config_json: Path, points: Sequence[tuple[int, int]], progress: Callable[[str], None]) -> Iterator[Row]:
    """One row for each (batch, context); none without transformers."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, StaticCache
    except ImportError:
        progress("engine: transformers is not installed, its rows are missing")
        return
    values = json.loads(config_json.read_text())
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    # NOTE: not dynamic: by default the second batch size compiles the model for any size, which is slower.
    compiled: Any = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True, dynamic=False)
    for batch, context in points:
        progress(f"engine: transformers, batch {batch}")
        cache: Any = StaticCache(config=config, max_cache_len=context + _WARM_STEPS + _STEPS)
        # NOTE: otherwise the first call allocates the cache inside of the CUDA graphs' memory, where it is overwritten.
        cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, torch.bfloat16, "cuda")
        token_ids = torch.ones(batch, 1, dtype=torch.long, device="cuda")
        steps_ms = []
        with torch.inference_mode():
            for step in range(_WARM_STEPS + _STEPS):
                torch.cuda.synchronize()
                start_s = time.perf_counter()
                torch.compiler.cudagraph_mark_step_begin()
                # Attention reads the whole static cache, even if little of it is filled.
                position_ids = torch.full((batch, 1), context - 1 + step, device="cuda")
                logits = compiled(token_ids, past_key_values=cache, position_ids=position_ids, use_cache=True).logits
                token_ids = logits[:, -1].argmax(dim=-1, keepdim=True)
                torch.cuda.synchronize()
                steps_ms.append((time.perf_counter() - start_s) * 1e3)
        work = f"{config_json.parent.name}, batch {batch}, context {context}"
        yield Row("decode step, transformers compiled", work, median(steps_ms[_WARM_STEPS:]), "ms")
        del cache
        torch.cuda.empty_cache()
