"""Draft tokens of models with recurrent states, and of nodes whose ranks share or own requests, on real processes:
answers of a conversation, and what of it is cached, equal those without drafts."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from baton.cli.processes import Process
from baton.core.sampling import SamplingParams
from tests.integration.cluster import DEEPSEEK, LLAMA, Flags, Machines, nothing_held, until_status
from tests.integration.generation import Result, generate
from tests.unit.models import tiny_delta, tiny_hybrid

RANKS: Flags = {"tensor_parallel_size": 2}
OWN: Flags = {**RANKS, "expert_parallel": True, "attention_data_parallel": True}
# The first one repeats a token, so many drafts are accepted; its logprobs show whether the states are.
SAMPLINGS = (
    SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True, logprobs=0, logit_bias={7: 30.0}),
    SamplingParams(max_tokens=40, temperature=0.9, seed=4, ignore_eos=True, logprobs=0),
)
TURNS = 2


def saved(name: str, folder: Path) -> Path:
    """A tiny model, with the tokenizer of a demo model."""
    family, fields = {**tiny_hybrid.MODELS, **tiny_delta.MODELS}[name]
    vocabulary = Tokenizer.from_file(str(LLAMA / "tokenizer.json")).get_vocab_size()
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**fields, "vocab_size": vocabulary})
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(LLAMA / file, folder)
    return folder


MODELS: dict[str, Callable[[Path], Path]] = {
    "lfm2": lambda folder: saved("lfm2", folder),
    "qwen3-next": lambda folder: saved("qwen3-next", folder),
    "deepseek": lambda _: DEEPSEEK,
}


async def conversations(gateway: Process, *, together: bool) -> list[Result]:
    """All turns of some conversations, at once or one after another."""

    async def conversation(number: int, params: SamplingParams) -> list[Result]:
        prompt = [3 + (number + 7 * place) % 40 for place in range(50)] * 2
        turns = []
        for _ in range(TURNS):
            turns.append(await generate(gateway, prompt, params))
            prompt = [*prompt, *turns[-1].token_ids, *prompt[:10]]
        return turns

    asked = [conversation(number, SAMPLINGS[number % 2]) for number in range(4)]
    all_turns = await asyncio.gather(*asked) if together else [await each for each in asked]
    return [turn for turns in all_turns for turn in turns]


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("lfm2", {}),
        pytest.param("qwen3-next", {}, marks=pytest.mark.slow),
        pytest.param("qwen3-next", RANKS, marks=pytest.mark.slow),
        pytest.param("deepseek", OWN, marks=pytest.mark.slow),
    ],
)
async def test_conversations_equal_those_without_drafts(
    start: Machines, model: str, flags: Flags, tmp_path: Path
) -> None:
    node: Flags = {"model": MODELS[model](tmp_path), "num_blocks": 256, "block_size": 16, **flags}
    nodes = start.nodes(("decode", {**node, "speculation": "always"}), ("decode", {**node, "speculation": "off"}))
    results = []
    for each in nodes:
        gateway = start.gateway([], [each], model=node["model"], local_policy="local")
        # Where each rank keeps its own requests, a busy rank leaves a turn to another one, which has none of it.
        results.append(await conversations(gateway, together=flags is not OWN))
        await until_status(each, nothing_held)
    for ours, expected in zip(*results, strict=True):
        assert ours.token_ids == expected.token_ids
        assert ours.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert ours.cached_tokens == expected.cached_tokens
    assert any(each.cached_tokens > 100 for each in results[0]), "what was decoded is not used"
    assert sum(each.proof.accepted_tokens for each in results[0]) > 150
    assert not any(each.proof.drafted_tokens for each in results[1])
