"""Time per token of an engine whose model drafts with its own MTP layer, on recorded outputs.

Weights are random, so the layer's drafts are too. They are replaced by the recorded tokens: each is right with
the same chance if the ones before it are. Steps and drafts compute and cost what they always do. On a GPU the
shape is DeepSeek-V3's in fp8. Its 61 layers take turns with the weights of nine, which fit into one GPU, so a step and
a pass of the layer take as long as they do in the whole model.
"""

import asyncio
import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from baton.engine.batch import Batch, LayerDrafts
from baton.engine.build import build_runner
from baton.engine.calibration import calibrate
from baton.engine.device.device_thread import LaunchedWork, StepRunner
from baton.engine.device.layer_marks import OnMark
from baton.engine.events import DraftsChecked
from baton.engine.speculation.speculator import Speculator
from baton.engine.step_meter import StepMeter
from baton.models.layers.causal_lm import CausalLM
from baton.settings.node_config import DecodeSettings
from bench.engine.drafts import Recorded, RecordedRunner, RecordedStep, recorded, token_ms
from bench.engine.run import CONFIGS
from bench.table import Row

BATCHES = (1, 8, 32, 128)
ROUNDS = 3
_CHANCES = (0.85, 0.6)
_GOALS = {(0.85, 1): 1.8, (0.85, 32): 1.5, (0.6, 128): 0.98}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_ON_GPU = {"num_hidden_layers": 9, "quantization_config": _FP8}
_LAYERS, _DENSE = 61, 3
_ON_CPU = {
    "num_hidden_layers": 6,
    "first_k_dense_replace": 1,
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}


class _SpeculatingRunner(RecordedRunner):
    """Also replaces the drafts of the model's own layer.

    Args:
        chance: that a draft token is accepted if the ones before it are.
    """

    def __init__(self, runner: StepRunner, outputs: Mapping[str, Sequence[int]], chance: float) -> None:
        super().__init__(runner, outputs)
        self._chance = chance
        self._random = Random(5)

    def launch(self, batch: Batch, on_mark: OnMark) -> RecordedStep:
        rows = batch.rows
        step = super().launch(batch, on_mark)
        ends: dict[int, tuple[str, int]] = {}
        for place, (row, result) in enumerate(zip(rows, step.results, strict=True)):
            if row.sample is not None:
                count = len(result) if isinstance(result, tuple) else 1
                ends[place] = row.request_id, row.sample.output_index + count
        return _SpeculatingStep(step.step, step.results, lambda layer_drafts: self._replaced(layer_drafts, ends))

    def _replaced(self, layer_drafts: LayerDrafts, ends: Mapping[int, tuple[str, int]]) -> LayerDrafts:
        tokens: dict[int, tuple[int, ...]] = {}
        for place, drawn in layer_drafts.tokens.items():
            name, end = ends[place]
            right = self._outputs[name][end : end + len(drawn)]
            wrong = [self._random.random() >= self._chance for _ in right]
            tokens[place] = tuple(token + each for token, each in zip(right, wrong, strict=True))
        return layer_drafts._replace(tokens=tokens)


class _SpeculatingStep(RecordedStep):
    def __init__(self, step: LaunchedWork, results: list[Any], replace: Callable[[LayerDrafts], LayerDrafts]) -> None:
        super().__init__(step, results)
        self._replace = replace

    @property
    def layer_drafts(self) -> LayerDrafts | None:
        found = self.step.layer_drafts
        return None if found is None else self._replace(found)


def run(progress: Callable[[str], None]) -> Iterator[Row]:
    """The rows of this benchmark."""
    config = json.loads((CONFIGS / "deepseek-v3-4-layers" / "config.json").read_text())
    config |= _ON_GPU if torch.cuda.is_available() else _ON_CPU
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        layers = _LAYERS if torch.cuda.is_available() else None
        yield from rows_of(Path(directory), None, _GOALS, progress, layers=layers)


def rows_of(
    model: Path,
    head: Path | None,
    goals: Mapping[tuple[float, int], float],
    progress: Callable[[str], None],
    *,
    layers: int | None = None,
) -> Iterator[Row]:
    """Measures a model that drafts with its own layer, or with a head.

    Args:
        model, head: directories with a config.json each; all weights are random.
        goals: how many times as fast, by the chance of a draft token and the batch.
        layers: so many layers take turns with the weights of the model's own; None: there are no more than these.
    """
    batches = BATCHES if torch.cuda.is_available() else BATCHES[:2]
    # What no draft token from the text finds, so all drafts are the layer's.
    requests = recorded()["unlike files"]
    off = dict(_measured(model, head, requests, batches, None, progress, layers=layers))
    for chance in _CHANCES:
        for batch, (auto_ms, kept) in _measured(model, head, requests, batches, chance, progress, layers=layers):
            work, goal = f"{chance:.0%} right, batch {batch}", goals.get((chance, batch))
            yield Row("time per token", work, auto_ms, "ms", "off", off[batch][0], goal=goal, less_is_better=True)
            yield Row("draft tokens accepted", work, kept, "%")


def _measured(
    directory: Path,
    head: Path | None,
    requests: Sequence[Recorded],
    batches: Sequence[int],
    chance: float | None,
    progress: Callable[[str], None],
    *,
    layers: int | None,
) -> Iterator[tuple[int, tuple[float, float]]]:
    """Yields for each batch the time per token in ms and the share of drafts that were kept, in %.

    Args:
        chance: as in `_SpeculatingRunner`; None: nothing is drafted, and the layer is not loaded.
    """
    settings = DecodeSettings(
        model=directory,
        load_format="dummy",
        device="cuda" if torch.cuda.is_available() else "cpu",
        speculation="off" if chance is None else "auto",
        draft_head=None if chance is None else head,
        max_context_tokens=4096,
    )
    built = build_runner(settings)
    if layers is not None:
        _repeat_layers(built.runner.model, layers)
    built = calibrate(built, settings)
    load = f"{'MTP layer' if head is None else 'EAGLE-3 head'} {'off' if chance is None else f'{chance:.0%} right'}"
    for batch in batches:
        times, checked = [], list[DraftsChecked]()
        # As on a node, what is learned in one round is known in the next.
        speculator, meter = None if chance is None else Speculator(), StepMeter(built.costs)
        wrap = None if chance is None else _wrapping(chance)
        for number in range(ROUNDS):
            progress(f"{load}: batch {batch}, round {number + 1}")
            asked = [requests[(number * batch + index) % len(requests)] for index in range(batch)]
            times.append(asyncio.run(token_ms(built, asked, speculator, checked, meter=meter, wrap=wrap)))
        drafted, accepted = sum(each.drafted for each in checked), sum(each.accepted for each in checked)
        yield batch, (median(times), 100 * accepted / max(1, drafted))
    del built
    gc.collect()
    torch.cuda.empty_cache()


def _repeat_layers(model: CausalLM, count: int) -> None:
    """Makes the model as deep as this, with its last layers over and over. They are all of one kind, and write the same
    KV again."""
    layers = list(model.model.layers)
    repeated = islice(cycle(layers[_DENSE:]), count - len(layers))
    model.model.layers = nn.ModuleList([*layers, *repeated])


def _wrapping(chance: float) -> Callable[[StepRunner, Mapping[str, Sequence[int]]], RecordedRunner]:
    return lambda runner, outputs: _SpeculatingRunner(runner, outputs, chance)
