"""Prefill on one GPU and decode on another, in processes started by hand and by `baton up`: the tokens equal those of
one engine on one GPU."""

import asyncio
from pathlib import Path

import psutil
import pytest
import torch

from baton.cli.processes import Process
from baton.core.sampling import SamplingParams
from baton.core.types import Path as RequestPath
from baton.engine.device.profile import profile_runner
from baton.settings.config import DEMO_MODELS
from tests.gpu.demo import build_demo, generate
from tests.integration.cluster import machines
from tests.integration.generation import generate as ask
from tests.integration.reference import Reference
from tests.integration.up import interrupt, start_up

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

MODELS = (DEMO_MODELS / "llama", DEMO_MODELS / "deepseek")
LENGTHS = [33, 64, 65, 128, 200, 300]
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
NODE: dict[str, object] = {"dtype": "bfloat16", "batch_invariant": "on", "num_blocks": 512, "max_batch_tokens": 1024}


def on_one_gpu(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    built = build_demo(model, dtype="bfloat16", batch_invariant=True, max_batch_tokens=1024)
    return [output.token_ids for output in generate(built, prompts, PARAMS.resolved())]


async def handed_over(gateway: Process | str, prompts: list[list[int]]) -> list[list[int]]:
    results = await asyncio.gather(*(ask(gateway, prompt, PARAMS) for prompt in prompts))
    assert all(result.proof.path is RequestPath.REMOTE for result in results)
    return [result.token_ids for result in results]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_tokens_of_two_gpus_are_those_of_one(model: Path) -> None:
    prompts = Reference(model).prompts(LENGTHS)
    expected = on_one_gpu(model, prompts)
    with machines() as start:
        (prefill, decode) = start.nodes(
            ("prefill", {"model": model, "device": "cuda:0", **NODE}),
            ("decode", {"model": model, "device": "cuda:1", **NODE}),
        )
        gateway = start.gateway([prefill], [decode], model=model, local_policy="strict")
        assert asyncio.run(handed_over(gateway, prompts)) == expected


def test_up_gives_each_node_a_gpu_of_its_own() -> None:
    model = MODELS[0]
    prompts = Reference(model).prompts(LENGTHS)
    expected = on_one_gpu(model, prompts)
    settings = {**NODE, "kv_cache_mib": 64}
    del settings["num_blocks"]  # tests set it, users do not
    variables = {f"BATON_{name.upper()}": str(value) for name, value in settings.items()}
    up = start_up("--model", str(model), "--local-policy", "strict", **variables)
    try:
        words = [psutil.Process(pid).cmdline() for pid in up.pids[1:]]
        assert [node[node.index("--device") + 1] for node in words] == ["cuda:0", "cuda:1"]
        assert asyncio.run(handed_over(up.gateway, prompts)) == expected
    finally:
        assert interrupt(up) == 0


def test_a_profile_measures_the_gpu_of_the_model_while_another_one_is_current() -> None:
    runner = build_demo(MODELS[0], device="cuda:1").runner
    with torch.cuda.device(0):
        profile = profile_runner(runner, 256, max_batch_requests=4, device=torch.device("cuda", 1))
    assert profile.step_bytes > 0
