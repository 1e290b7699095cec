"""Whole engines on a GPU over models that keep more than KV: captured steps, cut prompts and reused prefixes give the
tokens of the engine on the CPU."""

from pathlib import Path

import pytest
import torch

from baton.core.sampling import ResolvedSampling
from tests.gpu.demo import build_demo, generate
from tests.unit.models.tiny import save_tiny

pytestmark = pytest.mark.gpu

GREEDY = ResolvedSampling(temperature=0.0, max_tokens=24, ignore_eos=True)
SPARSE = "deepseek-v32"  # its steps with prompts are not captured
MODELS = ("lfm2", "qwen3-next", "granite-hybrid", "nemotron-h-experts", "falcon-h1", "kimi-linear", SPARSE)
LENGTHS = (1, 7, 66, 130, 200)


def prompts() -> list[list[int]]:
    """Also one that begins as another does, and one that comes twice."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(3, 60, (length,), generator=generator).tolist() for length in LENGTHS]
    return [*drawn, drawn[-1][:150] + drawn[1], drawn[-1]]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_engine_on_the_cpu(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_tiny(name, tmp_path)
    sizes = {"dtype": "float32", "num_blocks": 256, "block_size": 16, "max_batch_requests": 8, "max_batch_tokens": 96}
    on_cpu = generate(build_demo(tmp_path, device="cpu", **sizes), prompts(), GREEDY)
    expected = [output.token_ids for output in on_cpu]
    for cuda_graphs in (True, False):
        built = build_demo(tmp_path, cuda_graphs=cuda_graphs, **sizes)
        together = [output.token_ids for output in generate(built, prompts(), GREEDY)]
        assert together == expected
        # One after the other, so that later ones begin at snapshots of earlier ones.
        apart = [output.token_ids for output in generate(built, prompts(), GREEDY, max_batch_requests=1)]
        assert apart == expected
        assert (built.runner.launches["decode_graph"] > 0) == cuda_graphs
        assert (built.runner.launches["prompt_graph"] > 0) == (cuda_graphs and name != SPARSE)
