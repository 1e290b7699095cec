"""Steps with prompts, of Llama-3.1-8B's shape on this machine's GPU: served from graphs, as they are by default, and
without graphs."""

from collections.abc import Callable, Iterator

import torch

from bench.engine import mixed
from bench.engine.run import MODELS, build, forget
from bench.table import Row


def run(progress: Callable[[str], None]) -> Iterator[Row]:
    """The rows of this benchmark; none on a machine without a GPU."""
    if not torch.cuda.is_available():
        progress("prompt_steps: needs a GPU")
        return
    model = MODELS[0]
    for prefix, options in (("", {}), ("graphs off: ", {"cuda_graphs": False})):
        progress(f"prompt_steps: {prefix}{model.name}")
        built = build(model, **options)
        built.runner.prepare()
        yield from mixed.run(model.name, built, prefix)
        del built
        forget()
