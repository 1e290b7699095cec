"""Models with recurrent states on this machine's GPU, with random weights in the shapes of published ones: decode
steps against what they must read, prompts against the matmul rate, by the prompt's length."""

from collections.abc import Callable, Iterator

import torch

from baton.engine.build import BuiltRunner
from bench.attention.measure import Ceilings, ceilings
from bench.engine.roofline import Weights, count_weights, decode_work, prefill_flops, state_bytes
from bench.engine.run import Model, build, forget
from bench.engine.steps import decode_ms, prefill_ms
from bench.table import Row

MODELS = ("granite-4.0-h-small", "nemotron-h-8b", "qwen3-next-24-layers", "kimi-linear-48b")
BATCHES = (1, 32, 128)
CONTEXT = 1024
PROMPTS = (1024, 8192)


def run(progress: Callable[[str], None], names: tuple[str, ...] = MODELS) -> Iterator[Row]:
    """The rows of this benchmark; none on a machine without a GPU."""
    if not torch.cuda.is_available():
        progress("hybrids: needs a GPU")
        return
    machine = ceilings()
    yield Row("copy", "2 GiB", machine.copy_gigabytes_per_s, "GB/s")
    yield Row("matmul", "8192 x 8192 x 8192, bfloat16", machine.matmul_teraflops, "TFLOPS")
    for name in names:
        progress(f"hybrids: {name}")
        built = build(Model(name))
        weights = count_weights(built.runner.model, tied=built.config.tie_word_embeddings)
        built.runner.prepare()
        yield from _decodes(name, built, weights, machine)
        yield from _prefills(name, built, weights, machine)
        del built
        forget()


def _decodes(name: str, built: BuiltRunner, weights: Weights, machine: Ceilings) -> Iterator[Row]:
    for batch in BATCHES:
        took_ms = decode_ms(built.runner, requests=batch, context=CONTEXT)
        work = decode_work(built.config, weights, built.cache.spec, requests=batch, context=CONTEXT)
        states_ms = state_bytes(built.cache.spec, requests=batch) / machine.copy_gigabytes_per_s / 1e6
        least_ms = work.milliseconds(machine) + states_ms
        where = f"{name}, batch {batch}, context {CONTEXT}"
        yield Row("decode step", where, took_ms, "ms", "roofline", least_ms, less_is_better=True)


def _prefills(name: str, built: BuiltRunner, weights: Weights, machine: Ceilings) -> Iterator[Row]:
    """The operations of the recurrence itself are not counted: they are few next to those of the products."""
    for length in PROMPTS:
        took_ms = prefill_ms(built.runner, lengths=[length])
        flops = prefill_flops(built.config, weights, tokens=length)
        where = f"{name}, {length} tokens in one step: {took_ms:.1f} ms"
        yield Row("prefill", where, flops / took_ms / 1e9, "TFLOPS", "matmul", machine.matmul_teraflops)


if __name__ == "__main__":
    import sys

    from bench.table import print_rows

    print_rows("Models with recurrent states", list(run(print, tuple(sys.argv[1:]) or MODELS)))
