"""Kernels that overlap compute the same bits as kernels that run one after the other."""

import random

import pytest
import torch

from baton.engine.batch import BatchRow
from baton.engine.build import BuiltRunner
from baton.engine.device.graphs import DecodeGraphs, GraphSettings
from baton.engine.request import int_array
from baton.settings.config import DEMO_MODELS
from baton.tritonlib import launch
from tests.gpu.demo import build_demo

pytestmark = pytest.mark.gpu

BLOCKS = 16
SETTINGS = GraphSettings(max_requests=64, max_context_tokens=BLOCKS * 16, largest=16)


def captured(built: BuiltRunner) -> DecodeGraphs:
    graphs = DecodeGraphs(built.runner.model, built.runner.backend, built.cache, SETTINGS)
    graphs.capture()
    return graphs


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("model", ["llama", "deepseek"])
def test_captured_steps_whose_kernels_overlap_give_the_same_bits(
    model: str, batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Loaded outside of inference mode, as an engine's model is.
    built = build_demo(
        DEMO_MODELS / model,
        dtype="bfloat16",
        num_blocks=16 * BLOCKS,
        cuda_graphs=False,
        batch_invariant=batch_invariant,
    )
    dice = random.Random(0)
    tables = [int_array(list(range(row * BLOCKS, (row + 1) * BLOCKS))) for row in range(16)]
    with torch.inference_mode():
        built.cache.view.zero_()
        overlapping = captured(built)
        monkeypatch.setattr(launch, "_can_overlap", lambda device: False)
        one_by_one = captured(built)
        slots = overlapping.new_slots()
        for step in range(100):
            size = dice.choice(overlapping.sizes)
            rows = [
                BatchRow("", int_array([dice.randrange(100)]), dice.randrange(BLOCKS * 16), tables[row], None)
                for row in range(size)
            ]
            logits_RV = overlapping.launch(rows, size, step=step, slot=slots.take()).clone()
            expected_RV = one_by_one.launch(rows, size, step=step, slot=slots.take())
            assert torch.equal(logits_RV, expected_RV), (step, size)


def test_only_small_launches_overlap() -> None:
    device = torch.device("cuda")
    assert launch.overlap(device, rows=launch.MOST_OVERLAPPING_ROWS)["OVERLAP"]
    assert launch.overlap(device, rows=launch.MOST_OVERLAPPING_ROWS + 1) == {"OVERLAP": False}
