"""Drafts of an MTP layer or an EAGLE-3 head on a GPU, after captured steps and after others, are those on the CPU, in
float32."""

from pathlib import Path

import pytest

from baton.engine.build import build_runner
from baton.engine.device.graphs import GraphSettings
from baton.settings.node_config import NodeSettings
from tests.unit.engine.driver import Driver, runner_of
from tests.unit.engine.tiny import prompt_of
from tests.unit.models.tiny_eagle import save_with_head
from tests.unit.models.tiny_mtp import save_with_mtp

pytestmark = pytest.mark.gpu

GRAPHS = GraphSettings(max_requests=64, max_context_tokens=128, max_tokens=512)
PROMPTS = {f"r{seed}": prompt_of(5 + 3 * seed, seed=seed) for seed in range(16)}
# Of each request its tokens so far, and the drafts after them.
Step = dict[str, tuple[list[int], list[int]]]
# Logits that are nearly equal may be ordered otherwise.
EQUAL_SHARE = 0.95


def steps_of(
    directory: Path, device: str, graphs: GraphSettings | None
) -> list[dict[str, tuple[list[int], list[int]]]]:
    """Runs prompts in chunks, decodes, and decodes with drafts."""
    head = directory / "head"
    settings = NodeSettings(
        draft_head=head if head.exists() else None,
        model=directory,
        num_blocks=256,
        block_size=16,
        device=device,
        dtype="float32",
        speculation="always",
    )
    runner = runner_of(build_runner(settings), graphs=graphs)
    runner.prepare()
    driver, found = Driver(runner, num_layer_drafts=3), []
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt)
    for number in range(7):
        drafts = {name: [*driver.layer_drafts[name][:2], 1] for name in list(PROMPTS)[::2]} if number > 4 else None
        driver.step(*PROMPTS, chunk=24, drafts=drafts)
        found.append({name: (driver.ids(name), list(driver.layer_drafts.get(name, ()))) for name in PROMPTS})
    if graphs is not None:
        assert runner.launches["decode_graph"]
        assert bool(runner.launches["prompt_graph"]) == runner.backend.builder.captures_prompts
        assert runner.drafts is not None
        assert runner.drafts.captured == runner.launches["decode_graph"]
    return found


@pytest.mark.parametrize("graphs", [None, GRAPHS], ids=["eager", "captured"])
@pytest.mark.parametrize(
    "name", ["deepseek-v3", "deepseek-v32", "glm4-moe", "qwen3-next", "mimo", "eagle-llama", "eagle-gpt-oss"]
)
def test_drafts_are_those_on_the_cpu(name: str, graphs: GraphSettings | None, tmp_path: Path) -> None:
    if name.startswith("eagle-"):
        save_with_head(name.removeprefix("eagle-"), tmp_path, tmp_path / "head")
    else:
        save_with_mtp(name, tmp_path)
    ours, expected = steps_of(tmp_path, "cuda", graphs), steps_of(tmp_path, "cpu", None)
    equal = total = 0
    for step, other in zip(ours, expected, strict=True):
        for request, (tokens, drafts) in step.items():
            if tokens == other[request][0]:
                total += 1
                equal += drafts == other[request][1]
    assert total > len(PROMPTS) * len(ours) / 2
    assert equal >= EQUAL_SHARE * total
