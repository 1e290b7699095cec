"""The drafts of a model's MTP layer, or of an EAGLE-3 head, after steps of any kind, outside of graphs and in the
buffers of graphs, are those of a plain reference that computes the whole sequence at once.

The cache is full of NaN, so a slot that is read before it is written shows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.core.sampling import ResolvedSampling
from baton.engine.build import BuiltRunner, build_runner
from baton.engine.device.graphs import GraphSettings
from baton.engine.device.runner import ModelRunner
from baton.engine.request import int_array
from baton.engine.sampling.row import SampleRow
from baton.engine.sampling.sampler import sample
from baton.settings.node_config import NodeSettings
from tests.unit.engine.driver import Driver, runner_of
from tests.unit.engine.tiny import prompt_of
from tests.unit.models.tiny_eagle import EagleReference, save_with_head
from tests.unit.models.tiny_mtp import MTPReference, save_with_mtp

BLOCK_SIZE = 16  # most steps have room for further drafts in their last block
DRAFTS = 3
GRAPHS = GraphSettings(max_requests=32, max_context_tokens=96, max_tokens=256)
KINDS = pytest.mark.parametrize("graphs", [None, GRAPHS], ids=["eager", "padded"])
DRAWN: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "seed": 7}
PROMPTS = {"a": prompt_of(9), "b": prompt_of(21, seed=1), "c": prompt_of(14, seed=2)}


class Built:
    """A tiny model with an MTP layer or a head, and the reference."""

    def __init__(self, name: str, directory: Path) -> None:
        self.reference: MTPReference | EagleReference
        family, head = name.removeprefix("eagle-"), None
        if name == family:
            self.reference = save_with_mtp(name, directory)
        else:
            head = directory / "head"
            self.reference = save_with_head(family, directory, head)
        settings = NodeSettings(
            model=directory,
            draft_head=head,
            num_blocks=64,
            block_size=BLOCK_SIZE,
            device="cpu",
            speculation="always",
        )
        self.built: BuiltRunner = build_runner(settings)

    def runner(self, graphs: GraphSettings | None) -> ModelRunner:
        runner = runner_of(self.built, graphs=graphs)
        runner.prepare()
        return runner

    def check(self, driver: Driver, name: str) -> None:
        """The last drafts are the reference's, as many as the request's blocks have slots for."""
        tokens = [*PROMPTS[name], *driver.ids(name)]
        room = -(len(tokens) - 1) % BLOCK_SIZE
        # A pass of the layer writes to the slot of each further draft token; a row with drafts may have one more block.
        layer_drafts = driver.layer_drafts[name]
        assert min(DRAFTS, 1 + room) <= len(layer_drafts) <= DRAFTS
        assert list(layer_drafts) == self.reference.drafts(tokens, len(layer_drafts)), name


@pytest.fixture(scope="module", params=["deepseek-v3", "glm4-moe", "mimo", "eagle-llama", "eagle-gpt-oss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(request.param, tmp_path_factory.mktemp("mtp"))


def driver_of(model: Built, graphs: GraphSettings | None, *, ahead: bool = False) -> Driver:
    driver = Driver(model.runner(graphs), num_layer_drafts=DRAFTS, ahead=ahead)
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt)
    return driver


@KINDS
def test_prompts_in_chunks_and_decodes(model: Built, graphs: GraphSettings | None) -> None:
    driver = driver_of(model, graphs)
    driver.step("a")
    model.check(driver, "a")
    for _ in range(3):
        driver.step("a", "b", "c", chunk=8)
    driver.step("a", "b", "c")
    for _ in range(8):
        driver.step("c", "a", "b")
        for name in PROMPTS:
            model.check(driver, name)


@KINDS
def test_steps_that_are_launched_ahead_leave_no_hole(model: Built, graphs: GraphSettings | None) -> None:
    driver = driver_of(model, graphs, ahead=True)
    for _ in range(7):
        driver.step("a", "b", "c")
    for name in PROMPTS:
        model.check(driver, name)


@KINDS
@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_drafts_after_drafts_of_which_some_are_right(model: Built, graphs: GraphSettings | None, right: int) -> None:
    alone = driver_of(model, None)
    for _ in range(24):
        alone.step("a", "b", "c")
    driver = driver_of(model, graphs)
    driver.step("a", "b", "c")
    for _ in range(4):
        drafts: dict[str, Sequence[int]] = {}
        for name, count in (("a", right), ("c", 3 - right)):
            coming = alone.ids(name)[len(driver.ids(name)) :]
            drafts[name] = [*coming[:count], *((token + 1) % 61 for token in coming[count:3])]
        driver.step("a", "b", "c", drafts=drafts)
        for name in PROMPTS:
            model.check(driver, name)
            assert driver.ids(name) == alone.ids(name)[: len(driver.ids(name))]


@KINDS
def test_drawn_tokens_are_drafted_with_the_draws_of_their_places(model: Built, graphs: GraphSettings | None) -> None:
    """If the layer's logits were the model's, every draft token would be right."""
    driver = Driver(model.runner(graphs), num_layer_drafts=DRAFTS)
    driver.add("a", PROMPTS["a"], **DRAWN)
    for _ in range(5):
        driver.step("a")
        tokens = [*PROMPTS["a"], *driver.ids("a")]
        hidden_TD = model.reference.drafted(tokens[1:], model.reference.read(tokens[:-1]))
        params = ResolvedSampling(max_tokens=1000, **DRAWN)
        row = SampleRow(params, len(driver.ids("a")), (), int_array(), 0)
        drawn = sample(model.reference.logits(hidden_TD[-1:]).clone(), [row]).chosen_R.tolist()
        assert driver.layer_drafts["a"][0] == drawn[0]


def test_a_step_that_asks_for_none_drafts_none(model: Built) -> None:
    driver = Driver(model.runner(None))
    driver.add("a", PROMPTS["a"])
    driver.step("a")
    assert driver.layer_drafts == {}
