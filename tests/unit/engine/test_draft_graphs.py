"""The passes of the layer that drafts in the buffers of graphs: drafts and KV are those of passes outside of graphs,
for rows of any kind and number."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch

from attention.platform import probe_platform
from attention.selection import BACKENDS
from baton.engine.batch import Batch
from baton.engine.build import BuiltRunner, build_runner
from baton.engine.device.capture import Recorder
from baton.engine.device.draft_graphs import DraftGraphs
from baton.engine.device.draft_leads import draft_links, find_leads, no_links
from baton.engine.device.draft_steps import DraftSteps
from baton.engine.device.graphs import GraphSettings
from baton.engine.device.runner import ModelRunner
from baton.engine.device.unfolded import Unfolded
from baton.engine.request import int_array
from baton.kvcache.cache import PagedKVCache
from baton.models.loading.loader import load_model
from baton.models.loading.needs import attention_needs
from baton.settings.node_config import NodeSettings
from tests.unit.engine.driver import Driver, runner_of
from tests.unit.engine.tiny import prompt_of
from tests.unit.models.tiny_eagle import save_with_head
from tests.unit.models.tiny_mtp import save_with_mtp

BLOCK_SIZE = 8  # rows often reach the end of their blocks
DRAFTS = 4
GRAPHS = GraphSettings(max_requests=48, max_context_tokens=96)
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.1, "seed": 5, "top_p": 0.9, "top_k": 20},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {"temperature": 0.8, "seed": 9, "logprobs": 2},
    {"logit_bias": {5: 3.0, 9: -100.0}},
    {"temperature": 1.0, "seed": 2**63 + 1, "min_p": 0.05},
)
PROMPTS = {f"r{seed}": prompt_of(4 + 3 * seed, seed=seed) for seed in range(len(KINDS))}


def built_of(name: str, directory: Path) -> BuiltRunner:
    family, head = name.removeprefix("eagle-"), None
    if name == family:
        save_with_mtp(name, directory)
    else:
        head = directory / "head"
        save_with_head(family, directory, head)
    return build_runner(
        NodeSettings(
            model=directory,
            draft_head=head,
            num_blocks=160,
            block_size=BLOCK_SIZE,
            device="cpu",
            speculation="always",
        )
    )


@pytest.fixture(scope="module", params=["deepseek-v3", "deepseek-v32", "glm4-moe", "eagle-llama"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BuiltRunner:
    return built_of(request.param, tmp_path_factory.mktemp("drafting"))


def new_runner(built: BuiltRunner, *, captured: bool) -> ModelRunner:
    """A runner whose decode steps are padded; its passes too, if `captured`."""
    runner = runner_of(built, graphs=GRAPHS)
    runner.prepare()
    assert runner.drafts is not None
    if not captured:
        runner.drafts._graphs = None
    return runner


def drivers_of(built: BuiltRunner, *, ahead: bool = False) -> tuple[Driver, Driver]:
    """Two drivers of the same requests: with passes in graphs, and outside of them."""
    drivers = [Driver(new_runner(built, captured=each), num_layer_drafts=DRAFTS, ahead=ahead) for each in (True, False)]
    for driver in drivers:
        for (name, prompt), sampling in zip(PROMPTS.items(), KINDS, strict=True):
            driver.add(name, prompt, **sampling)
        driver.step(*PROMPTS)
    ours, theirs = drivers
    return ours, theirs


def check_same(ours: Driver, theirs: Driver) -> None:
    assert ours.layer_drafts == theirs.layer_drafts
    for name in PROMPTS:
        assert ours.ids(name) == theirs.ids(name)
    parts = [cast(PagedKVCache, driver.runner._cache.draft).storage for driver in (ours, theirs)]
    torch.testing.assert_close(*parts, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_drafts_and_kv_are_those_of_passes_outside_of_graphs(built: BuiltRunner) -> None:
    ours, theirs = drivers_of(built)
    names, chosen = list(PROMPTS), Random(1)
    for number in range(14):
        live = chosen.sample(names, chosen.randrange(1, len(names) + 1))
        drafts: dict[str, Sequence[int]] = {}
        if number % 3 != 2:
            for name in live[::2]:
                layer_drafts = ours.layer_drafts.get(name, ())[: chosen.randrange(DRAFTS + 1)]
                drafts[name] = [*layer_drafts, 7][: chosen.randrange(1, DRAFTS + 2)]
        for driver in (ours, theirs):
            driver.step(*live, drafts=drafts)
        check_same(ours, theirs)
    runners = [driver.runner.drafts for driver in (ours, theirs)]
    assert [0 if each is None else each.captured for each in runners] == [14, 0]


def test_steps_that_are_launched_ahead_have_the_same_drafts(built: BuiltRunner) -> None:
    ours, theirs = drivers_of(built, ahead=True)
    for names in (("r0", "r1", "r4"), ("r1", "r0"), ("r1", "r0", "r5", "r3"), tuple(PROMPTS)):
        for driver in (ours, theirs):
            driver.step(*names)
    for driver in (ours, theirs):
        driver.finish()
    check_same(ours, theirs)


def test_a_row_at_the_end_of_its_blocks_drafts_one_token(built: BuiltRunner) -> None:
    driver = Driver(new_runner(built, captured=True), num_layer_drafts=DRAFTS)
    driver.add("a", prompt_of(BLOCK_SIZE - 2))
    found = []
    for _ in range(5):
        driver.step("a")
        found.append(len(driver.layer_drafts["a"]))
    # The prompt, whose passes are outside of graphs, and decodes at the positions 6, 7 (the last slot), 8 and 9.
    assert found == [3, 2, 1, DRAFTS, DRAFTS]


def test_logits_that_are_not_finite_end_the_drafts(built: BuiltRunner) -> None:
    driver = Driver(new_runner(built, captured=True), num_layer_drafts=DRAFTS)
    for name in ("r0", "r1"):
        driver.add(name, PROMPTS[name])
    driver.step("r0", "r1")
    compute, calls = driver.runner.model.compute_draft_logits, 0

    def broken(drafted_RD: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        logits_RV = compute(drafted_RD)
        if calls == 2:
            logits_RV[1] = torch.nan
        return logits_RV

    driver.runner.model.compute_draft_logits = broken  # type: ignore[method-assign]
    try:
        driver.step("r0", "r1")
    finally:
        del driver.runner.model.compute_draft_logits
    assert len(driver.layer_drafts["r0"]) > 1
    assert len(driver.layer_drafts["r1"]) == 1
    assert len(driver.ids("r1")) == 2


def without_layer(batch: Batch) -> Batch:
    return replace(batch, num_layer_drafts=0, writes_draft_kv=False)


@pytest.mark.parametrize("captured", [True, False])
def test_steps_without_the_layer_leave_holes_in_its_kv_and_change_no_token(built: BuiltRunner, captured: bool) -> None:
    """The cache is full of NaN, so drafts after a hole are not tokens."""
    driver = Driver(new_runner(built, captured=captured), num_layer_drafts=DRAFTS)
    alone = Driver(runner_of(built, graphs=None))
    for each in (driver, alone):
        each.add("r2", PROMPTS["r2"])
        each.step("r2")
    layer_drafts, launch = driver.layer_drafts["r2"], driver.launch
    parts = [cast(PagedKVCache, driver.runner._cache.draft).storage]
    before, passes = [part.clone() for part in parts], cast(DraftSteps, driver.runner.drafts).captured
    driver.launch = lambda batch: launch(without_layer(batch))  # type: ignore[method-assign]
    for _ in range(DRAFTS + 2):  # the slots after the first ones have the KV of drafts
        driver.step("r2")
    torch.testing.assert_close(parts, before, rtol=0, atol=0, equal_nan=True)
    assert driver.layer_drafts["r2"] is layer_drafts
    assert cast(DraftSteps, driver.runner.drafts).captured == passes
    driver.launch = launch  # type: ignore[method-assign]
    for drafts in ({}, {"r2": [1, 2]}, {}):
        driver.step("r2", drafts=drafts)
        assert driver.layer_drafts["r2"] == ()
    for _ in range(len(driver.ids("r2"))):
        alone.step("r2")
    assert driver.ids("r2") == alone.ids("r2")[: len(driver.ids("r2"))]


class NoRecorder:
    """Hands captured work back as it is, so that a test runs what a graph would replay."""

    def record_work(self, work: Callable[[], None]) -> Callable[[], None]:
        return work


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend_name"), [("glm4-moe", "TRITON_ATTN"), ("deepseek-v3", "TRITON_MLA")])
def test_captured_passes_depend_on_no_length_that_the_host_knows(name: str, backend_name: str, tmp_path: Path) -> None:
    """Triton's kernels in the interpreter, with the host's lengths of the capture."""
    built = built_of(name, tmp_path)
    theirs = Driver(new_runner(built, captured=False), num_layer_drafts=DRAFTS)
    needs = attention_needs(built.config, dtype="float32", device="cpu", shape=built.cache.shape, max_num_reqs=48)
    (backend_class,) = (each for each in BACKENDS if each.capabilities.name == backend_name)
    backend = backend_class(needs, probe_platform("cpu"), context_workspace_tokens=64)
    built.runner.model = load_model(tmp_path, built.config, backend=backend, dtype="float32", device="cpu")
    built.runner.backend = backend
    ours = Driver(new_runner(built, captured=True), num_layer_drafts=DRAFTS)
    graphs = cast(DraftGraphs, ours.runner.drafts and ours.runner.drafts._graphs)
    assert backend.builder.plans_on_device
    with torch.inference_mode():
        graphs._passes = {size: graphs._captured(size, cast(Recorder, NoRecorder())) for size in (2, 4)}
    graphs.sizes = [2, 4]
    for driver in (ours, theirs):
        for each in ("r0", "r1", "r2"):
            driver.add(each, PROMPTS[each])
        driver.step("r0", "r1", "r2")
        for drafts in ({}, {"r1": [3]}, {"r0": [1, 2]}):
            driver.step("r0", "r1", drafts=drafts)
            driver.step("r2")
    for each in ("r0", "r1", "r2"):
        assert ours.ids(each) == theirs.ids(each)
    assert ours.layer_drafts == theirs.layer_drafts


def groups_of(chosen: Random) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Drafts of some requests, what their rows draw, and the places of these rows: first tokens, then drafts."""
    counts = [chosen.randrange(4) for _ in range(chosen.randrange(1, 6))]
    later = len(counts)
    for first, count in enumerate(counts):
        drafts = [chosen.randrange(2) for _ in range(count)]
        yield drafts, [chosen.randrange(2) for _ in range(count + 1)], [first, *range(later, later + count)]
        later += count


@pytest.mark.parametrize("seed", range(30))
def test_the_last_kept_draw_of_each_request_leads_on(seed: int) -> None:
    groups = list(groups_of(Random(seed)))
    expected: Mapping[int, bool] = {}
    for drafts, draws, places in groups:
        kept = next((place for place, draft in enumerate(drafts) if draws[place] != draft), len(drafts))
        expected |= {place: index == kept for index, place in enumerate(places)}  # type: ignore[operator]
    tokens = {place: token for _, draws, places in groups for place, token in zip(places, draws, strict=True)}
    count = len(tokens)
    unfolded = Unfolded(
        cast(Any, None), [int_array(drafts) for drafts, _, _ in groups], [places for _, _, places in groups]
    )
    links = draft_links(unfolded, {place: place for place in range(count)}, count)
    assert (links is None) == (count == len(groups))
    links_3S = torch.from_numpy(no_links(count) if links is None else links)
    tokens_S = torch.tensor([tokens[place] for place in range(count)], dtype=torch.int32)
    assert find_leads(tokens_S, links_3S).tolist() == [expected[place] for place in range(count)]
