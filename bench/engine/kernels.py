"""A decode step, kernel by kernel, against what the step must read: `python -m bench kernels`."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from baton.engine.build import BuiltRunner
from baton.engine.device.runner import ModelRunner
from bench.attention.measure import Ceilings, ceilings
from bench.engine.roofline import Weights, count_weights, decode_work
from bench.engine.run import Model, build, forget
from bench.engine.steps import decode_ms, decode_steps
from bench.table import Row

MODELS = (
    (Model("llama-3.1-8b"), (1, 32, 128)),
    (Model("deepseek-v2-lite", block_size=64), (1,)),
    (Model("qwen3-next-24-layers"), (1,)),
)
_CONTEXT = 1024
_WARM_STEPS, _STEPS = 4, 10
_NAME_CHARS = 60
# Kernels that take a smaller share of the step are added up.
_LEAST_SHARE = 0.004


@dataclass(frozen=True)
class KernelTime:
    """A kernel's calls in a step, and their time in us."""

    name: str
    calls: float
    us: float


def run(progress: Callable[[str], None], names: tuple[str, ...] = ()) -> Iterator[Row]:
    """The rows of this benchmark; none on a machine without a GPU.

    Args:
        names: names of models; none for all.
    """
    if not torch.cuda.is_available():
        progress("kernels: needs a GPU")
        return
    machine = ceilings()
    for model, batches in MODELS:
        if names and model.name not in names:
            continue
        progress(f"kernels: {model.name}")
        built = build(model)
        weights = count_weights(built.runner.model, tied=built.config.tie_word_embeddings)
        built.runner.prepare()
        for requests in batches:
            yield from _of_step(model, built, weights, machine, requests)
        del built
        forget()


def _of_step(model: Model, built: BuiltRunner, weights: Weights, machine: Ceilings, requests: int) -> Iterator[Row]:
    runner = built.runner
    work = f"{model.name}, batch {requests}, context {_CONTEXT}"
    step_us = 1e3 * decode_ms(runner, requests=requests, context=_CONTEXT)
    times = kernel_times(runner, requests=requests)
    bound = decode_work(built.config, weights, built.cache.spec, requests=requests, context=_CONTEXT)
    roofline_us = 1e3 * bound.milliseconds(machine)
    yield Row("step", work, step_us, "us", "roofline", roofline_us, less_is_better=True)
    yield Row(
        "weights outside of experts, read once", work, weights.dense_bytes / machine.copy_gigabytes_per_s / 1e3, "us"
    )
    small = [each for each in times if each.us < _LEAST_SHARE * step_us]
    for each in times:
        if each not in small:
            yield Row(each.name, f"{work}: {each.calls:g} calls", each.us, "us")
    rest_us = sum(each.us for each in small)
    yield Row("other kernels", f"{work}: {sum(each.calls for each in small):g} calls", rest_us, "us")
    yield Row("all kernels, some at the same time", work, sum(each.us for each in times), "us")


def kernel_times(runner: ModelRunner, *, requests: int) -> list[KernelTime]:
    """The kernels of consecutive decode steps by the profiler's records, the longest first. Kernels that overlap count
    with their whole time."""
    steps = decode_steps(runner, requests=requests, context=_CONTEXT, steps=2 * _WARM_STEPS + _STEPS)
    for _ in range(_WARM_STEPS):
        next(steps)
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(_STEPS):
            next(steps)
    for _ in steps:
        """All steps in flight end before the next measurement."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in record.events():
        if event.device_type.name == "CUDA":
            span = event.time_range
            found[event.name.removeprefix("void ")[:_NAME_CHARS]].append(span.end - span.start)
    times = [KernelTime(name, len(each) / _STEPS, sum(each) / _STEPS) for name, each in found.items()]
    return sorted(times, key=lambda each: -each.us)
