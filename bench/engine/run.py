"""Engine benchmarks on this machine's GPU, with random weights in the shapes of common models."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.engine.build import BuiltRunner, build_runner
from baton.engine.calibration import calibrate
from baton.models.layers.products import use_library_products
from baton.settings.node_config import NodeSettings
from bench.attention.measure import Ceilings, ceilings
from bench.engine import rivals
from bench.engine.roofline import Weights, count_weights, decode_work, prefill_flops
from bench.engine.steps import HOST_STEPS, decode_ms, host_cost, idle_share, prefill_ms
from bench.table import Row

CONFIGS = Path(__file__).resolve().parent / "configs"
BATCHES = (1, 8, 32, 128, 256)
CONTEXTS = (1024, 8192)
# (batch, context) at which graphs are compared with eager steps, and attention backends with each other.
COMPARED = ((1, 1024), (32, 1024), (256, 1024))
PROMPT = 8192


@dataclass(frozen=True)
class Model:
    """What to measure of a model, and its goals.

    Attributes:
        decode_goals: (largest batch, wanted share of the roofline); larger batches have no goal.
        prefill_goal: wanted share of the matmul rate.
        backends: attention backends to compare with ours, and the block size that each needs.
        whole: whether every batch and context is measured, or only a few.
    """

    name: str
    block_size: int = 16
    decode_goals: tuple[tuple[int, float], ...] = ()
    prefill_goal: float | None = None
    backends: tuple[tuple[str, int], ...] = ()
    whole: bool = False
    batch_invariant: bool = False


MODELS = (
    Model(
        "llama-3.1-8b",
        decode_goals=((128, 0.85), (256, 0.80)),
        prefill_goal=0.60,
        backends=(("FLASHINFER", 16), ("FLASH_ATTN", 256)),
        whole=True,
        batch_invariant=True,
    ),
    Model(
        "deepseek-v2-lite",
        block_size=64,
        decode_goals=((256, 0.65),),
        prefill_goal=0.35,
        backends=(("FLASHINFER_MLA", 64),),
        whole=True,
        batch_invariant=True,
    ),
    Model("qwen3-8b"),
    Model("mistral-7b"),
    Model("llama-3.1-8b-fp8"),
    Model("deepseek-v3-4-layers", block_size=64),
)


def run(progress: Callable[[str], None], names: tuple[str, ...] = ()) -> Iterator[Row]:
    """The rows of this benchmark; none on a machine without a GPU.

    Args:
        names: names of models; none for all.
    """
    if not torch.cuda.is_available():
        progress("engine: needs a GPU")
        return
    machine = ceilings()
    yield Row("copy", "2 GiB", machine.copy_gigabytes_per_s, "GB/s")
    yield Row("matmul", "8192 x 8192 x 8192, bfloat16", machine.matmul_teraflops, "TFLOPS")
    for model in MODELS:
        if not names or model.name in names:
            yield from _of_model(model, machine, progress)
    if not names or "llama-3.1-8b" in names:
        yield from rivals.run(CONFIGS / "llama-3.1-8b" / "config.json", COMPARED, progress)


def _of_model(model: Model, machine: Ceilings, progress: Callable[[str], None]) -> Iterator[Row]:
    progress(f"engine: {model.name}")
    built = build(model)
    weights = count_weights(built.runner.model, tied=built.config.tie_word_embeddings)
    yield from _decodes(model, built, weights, machine, "decode step")
    yield from _prefills(model, built, weights, machine)
    if model.whole:
        yield from _hosts(model, built)
    del built
    forget()
    if model.whole:
        yield from _variant(model, weights, machine, "decode step, graphs off", cuda_graphs=False)
        yield from _variant(model, weights, machine, "decode step, library products", library_products=True)
    if model.batch_invariant:
        yield from _variant(model, weights, machine, "decode step, batch-invariant", batch_invariant=True)
    for backend, block_size in model.backends:
        progress(f"engine: {model.name} with {backend}")
        what = f"decode step, {backend}"
        yield from _variant(model, weights, machine, what, attention_backend=backend, block_size=block_size)


def _hosts(model: Model, built: BuiltRunner) -> Iterator[Row]:
    """The host's time per step, then the GPU's idle time. In this order, because a profiler makes every later launch
    slower."""
    for requests in (32, 256):
        cost = host_cost(built, requests=requests, context=min(1024, _fitting(built, requests)))
        work = f"{model.name}, batch {requests}"
        yield Row("CPU time of a step", work, cost.cpu_ms, "ms", limit=1.0 if requests == 256 else None)
        yield Row("step with the scheduler", work, cost.wall_ms, "ms")
    for requests in (32, 256):
        idle = idle_share(built.runner, requests=requests, context=1024)
        yield Row("GPU idle", f"{model.name}, decode, batch {requests}, context 1024", idle * 100, "%", limit=3.0)


def _variant(
    model: Model, weights: Weights, machine: Ceilings, what: str, *, library_products: bool = False, **options: Any
) -> Iterator[Row]:
    """A few points of the model, built with other options."""
    built = build(model, **options)
    if library_products:
        use_library_products(built.runner.model)
    yield from _decodes(model, built, weights, machine, what, few=True)
    yield from _prefills(model, built, weights, machine, prefix=what.partition(", ")[2] + ", ", few=True)
    del built
    forget()


def build(model: Model, **options: Any) -> BuiltRunner:
    """The model with random weights on this machine's GPU; its steps are not prepared yet."""
    settings = {"block_size": model.block_size, **options}
    return build_runner(
        NodeSettings(model=CONFIGS / model.name, device="cuda", load_format="dummy", max_batch_requests=256, **settings)
    )


def _decodes(
    model: Model, built: BuiltRunner, weights: Weights, machine: Ceilings, what: str, *, few: bool = False
) -> Iterator[Row]:
    built.runner.prepare()
    points = [(batch, context) for context in CONTEXTS for batch in BATCHES]
    for batch, context in COMPARED if few or not model.whole else points:
        measured_ms = decode_ms(built.runner, requests=batch, context=context)
        work = decode_work(built.config, weights, built.cache.spec, requests=batch, context=context)
        goal = next((share for most, share in model.decode_goals if batch <= most), None)
        yield Row(
            what,
            f"{model.name}, batch {batch}, context {context}",
            measured_ms,
            "ms",
            "roofline",
            work.milliseconds(machine),
            goal=None if few else goal,
            less_is_better=True,
        )


def _prefills(
    model: Model, built: BuiltRunner, weights: Weights, machine: Ceilings, prefix: str = "", *, few: bool = False
) -> Iterator[Row]:
    chosen = built.limits.max_batch_tokens if few else calibrate(built, NodeSettings()).limits.max_batch_tokens
    cases: list[tuple[str, list[int], int | None]] = [("one step", [PROMPT], None)]
    if not few:
        cases += [(f"steps of {chosen} tokens", [PROMPT], chosen), ("8 prompts in one step", [PROMPT // 8] * 8, None)]
    for how, lengths, chunk in cases:
        took_ms = prefill_ms(built.runner, lengths=lengths, chunk=chunk)
        flops = prefill_flops(built.config, weights, tokens=sum(lengths), prompts=len(lengths))
        yield Row(
            "prefill",
            f"{prefix}{model.name}, {sum(lengths)} tokens, {how}: {took_ms:.1f} ms",
            flops / took_ms / 1e9,
            "TFLOPS",
            "matmul",
            machine.matmul_teraflops,
            goal=model.prefill_goal if len(lengths) == 1 and not few else None,
        )


def _fitting(built: BuiltRunner, requests: int) -> int:
    """Tokens of each request when requests share the cache and have room to decode."""
    return built.cache.shape.num_slots // requests - HOST_STEPS - 2 * built.cache.shape.block_size


def forget() -> None:
    """Gives the memory of models that were deleted back to the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
