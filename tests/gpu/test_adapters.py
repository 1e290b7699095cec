"""Captured steps with adapters draw the tokens of eager steps, also after an adapter has been replaced."""

from collections.abc import Sequence

import pytest
import torch

from baton.core.sampling import ResolvedSampling
from baton.core.types import TokenOutput
from baton.engine.batch import Batch, BatchRow
from baton.engine.build import BuiltRunner
from baton.engine.device.runner import ModelRunner
from baton.engine.request import IntArray, int_array
from baton.engine.sampling.row import SampleRow
from baton.models.adapters.adapter import Adapter, LayerDelta
from baton.models.adapters.bank import AdapterBank
from baton.settings.config import DEMO_MODELS
from tests.gpu.demo import build_demo

pytestmark = pytest.mark.gpu

RANK = 8
# Of six requests; -1: none.
ADAPTERS = (-1, 0, 1, 2, 0, -1)
LENGTHS = tuple(9 + 7 * place for place in range(len(ADAPTERS)))
GREEDY = ResolvedSampling(temperature=0.0, max_tokens=64, ignore_eos=True)
BLOCKS_EACH = 8


def built(model: str, *, cuda_graphs: bool) -> BuiltRunner:
    made = build_demo(
        DEMO_MODELS / model,
        dtype="float32",
        cuda_graphs=cuda_graphs,
        max_batch_requests=64,
        max_adapters=3,
        max_adapter_rank=RANK,
        adapter_experts=True,
    )
    made.runner.prepare()
    load(made.runner, seeds=(1, 2, 3))
    return made


def load(runner: ModelRunner, *, seeds: Sequence[int]) -> None:
    assert runner.adapters is not None
    for slot, seed in enumerate(seeds):
        runner.load_adapter(slot, random_adapter(runner.adapters, seed))


def random_adapter(bank: AdapterBank, seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    layers: dict[str, LayerDelta] = {}
    for name, shape in bank.layers.items():
        a = torch.randn(RANK, shape.inputs, generator=generator) * 0.1
        layers[name] = LayerDelta(a, torch.randn(shape.outputs, RANK, generator=generator) * 0.1, 1.0)
    return Adapter(f"seed-{seed}", RANK, layers)


def tokens_of(
    runner: ModelRunner, adapters: Sequence[int], *, steps: int = 16, lengths: Sequence[int] = LENGTHS
) -> list[list[int]]:
    """Greedy tokens of requests with these adapters: their prompts in one step, then decodes."""
    block_size = runner.facts.block_size
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(3, 4000, (length,), generator=generator).tolist() for length in lengths]
    outputs: list[list[int]] = [[] for _ in adapters]
    for step in range(steps):
        rows = []
        for place, adapter in enumerate(adapters):
            known, start = tokens[place], 0 if step == 0 else len(tokens[place]) - 1
            blocks = block_ids(place, -(-len(known) // block_size))
            sample = SampleRow(GREEDY, step, (), int_array(), 0)
            rows.append(BatchRow(str(place), int_array(known[start:]), start, blocks, sample, adapter=adapter))
        for place, result in enumerate(runner.run(Batch(step + 1, tuple(rows)))):
            assert isinstance(result, TokenOutput)
            tokens[place].append(result.token_id)
            outputs[place].append(result.token_id)
    return outputs


def block_ids(place: int, count: int) -> IntArray:
    return int_array([place * BLOCKS_EACH + index for index in range(count)])


@pytest.mark.parametrize("model", ["llama", "deepseek"])
def test_captured_steps_with_adapters_draw_the_tokens_of_eager_steps(model: str) -> None:
    captured, eager = built(model, cuda_graphs=True).runner, built(model, cuda_graphs=False).runner
    ours = tokens_of(captured, ADAPTERS)
    assert captured.launches["decode_graph"] >= 15
    assert ours == tokens_of(eager, ADAPTERS)
    assert ours != tokens_of(captured, (-1,) * len(ADAPTERS))
    load(captured, seeds=(4, 5, 6))
    load(eager, seeds=(4, 5, 6))
    replaced = tokens_of(captured, ADAPTERS)
    assert replaced == tokens_of(eager, ADAPTERS)
    assert replaced != ours


def test_a_request_with_an_adapter_is_the_same_alone_and_in_a_batch() -> None:
    runner = built("llama", cuda_graphs=True).runner
    together = tokens_of(runner, ADAPTERS)
    for place, adapter in enumerate(ADAPTERS):
        others = [adapter if index == place else -1 for index in range(len(ADAPTERS))]
        assert tokens_of(runner, others)[place] == together[place]


def test_few_requests_with_adapters_are_the_same_among_many() -> None:
    """In steps of many rows the products of adapters are other launches than in steps of few rows."""
    captured, eager = (built("llama", cuda_graphs=graphs).runner for graphs in (True, False))
    adapters, lengths = ADAPTERS * 8, (5, 3, 4, 2, 6, 5) * 8
    together = tokens_of(captured, adapters, steps=8, lengths=lengths)
    assert captured.launches["decode_graph"] >= 7
    assert together == tokens_of(eager, adapters, steps=8, lengths=lengths)
    few = len(ADAPTERS)
    assert together[:few] == tokens_of(captured, ADAPTERS, steps=8, lengths=lengths[:few])
