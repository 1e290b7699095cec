"""Decode steps on this machine's GPU in which every request has a LoRA adapter of its own, compared with steps without
adapters. The model has Llama-3.1-8B's shape and random weights."""

import gc
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from baton.engine.build import BuiltRunner, build_runner
from baton.models.adapters.adapter import Adapter, LayerDelta
from baton.models.adapters.bank import AdapterBank
from baton.settings.node_config import NodeSettings
from bench.engine.steps import decode_ms
from bench.table import Row

_CONFIG = Path(__file__).resolve().parent / "engine" / "configs" / "llama-3.1-8b" / "config.json"
_SLOTS = 64
_RANKS = (16, 64)
_BATCHES = (1, 8, 64)
_CONTEXT = 1024
# Of a step of 64 requests with 64 adapters over one without.
_LIMIT = 1.15


def run(progress: Callable[[str], None]) -> Iterator[Row]:
    """The rows of this benchmark; none on a machine without a GPU."""
    if not torch.cuda.is_available():
        progress("adapters: needs a GPU")
        return
    progress("adapters: none")
    plain_ms = _without_slots()
    for batch, step_ms in plain_ms.items():
        yield Row("decode step", f"batch {batch}, no slots for adapters", step_ms, "ms", less_is_better=True)
    for rank in _RANKS:
        progress(f"adapters: {_SLOTS} of rank {rank}")
        for built in _built(rank=rank):
            yield from _with_slots(built, rank, plain_ms)
            del built  # before the next one takes the memory


def _without_slots() -> dict[int, float]:
    """Milliseconds of a step by its number of requests."""
    took_ms: dict[int, float] = {}
    for built in _built(rank=0):
        took_ms = {batch: _measure(built, batch, adapters=None) for batch in _BATCHES}
        del built
    return took_ms


def _with_slots(built: BuiltRunner, rank: int, plain_ms: dict[int, float]) -> Iterator[Row]:
    assert built.runner.adapters is not None
    for slot in range(_SLOTS):
        built.runner.load_adapter(slot, _random_adapter(built.runner.adapters, rank, seed=slot))
    for batch in _BATCHES:
        cases = {"no request has an adapter": None, "one adapter": [0] * batch, "all differ": list(range(batch))}
        for which, adapters in cases.items():
            step_ms = _measure(built, batch, adapters=adapters)
            where = f"batch {batch}, {_SLOTS} slots of rank {rank}, {which}"
            limit = _LIMIT if batch == _SLOTS and adapters is not None else None
            yield Row("decode step over that without slots", where, step_ms / plain_ms[batch], "x", limit=limit)


def _measure(built: BuiltRunner, batch: int, *, adapters: list[int] | None) -> float:
    return decode_ms(built.runner, requests=batch, context=_CONTEXT, adapters=adapters)


def _built(*, rank: int) -> Iterator[BuiltRunner]:
    """The one engine, freed when the next one is asked for. `rank` 0: without slots for adapters."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(_CONFIG.read_text())
        settings = NodeSettings(
            model=Path(directory), device="cuda", load_format="dummy", max_batch_requests=128, block_size=16
        )
        if rank:
            settings = settings.model_copy(update={"max_adapters": _SLOTS, "max_adapter_rank": rank})
        built = build_runner(settings)
    built.runner.prepare()
    yield built
    del built
    gc.collect()
    torch.cuda.empty_cache()


def _random_adapter(bank: AdapterBank, rank: int, *, seed: int) -> Adapter:
    """An adapter of every layer that can have one."""
    generator = torch.Generator("cuda").manual_seed(seed)
    deltas: dict[str, LayerDelta] = {}
    for name, shape in bank.layers.items():
        a = torch.randn(rank, shape.inputs, generator=generator, device="cuda") * 0.01
        b = torch.randn(shape.outputs, rank, generator=generator, device="cuda") * 0.01
        deltas[name] = LayerDelta(a, b, 1.0)
    return Adapter(f"random-{seed}", rank, deltas)


if __name__ == "__main__":
    from bench.table import print_rows

    print_rows("Adapters in decode steps on a GPU", list(run(print)))
