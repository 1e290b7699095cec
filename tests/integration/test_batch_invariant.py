"""Batch-invariant nodes: not a bit of an output depends on where its tokens were computed, even if a node is lost."""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from baton.core.sampling import SamplingParams
from tests.integration.cluster import LLAMA, Flags, Machines, first_of, until_status
from tests.integration.generation import Result, generate
from tests.integration.reference import Reference
from tests.unit.models.tiny_delta import MODELS

NODE: Flags = {"num_blocks": 256, "batch_invariant": True, "max_batch_requests": 8}
DECODE_STEPS = 9
DRAWN = SamplingParams(max_tokens=20, temperature=0.9, seed=5, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize("survivor", ["decode", "prefill"])
async def test_an_output_has_the_same_logprobs_after_its_decode_node_was_killed(
    start: Machines, reference: Reference, survivor: str
) -> None:
    (prompt,) = reference.prompts([200])
    await survives(start, LLAMA, prompt, survivor)


async def test_states_are_computed_again_with_the_prompt_after_a_decode_node_was_killed(
    start: Machines, reference: Reference, tmp_path: Path
) -> None:
    vocabulary = Tokenizer.from_file(str(LLAMA / "tokenizer.json")).get_vocab_size()
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(**{**MODELS["qwen3-next"][1], "vocab_size": vocabulary})
    transformers.Qwen3NextForCausalLM(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(LLAMA / name, tmp_path)
    (prompt,) = reference.prompts([200])
    await survives(start, tmp_path, prompt, "decode")


async def survives(start: Machines, model: Path, prompt: Sequence[int], survivor: str) -> None:
    node: Flags = {**NODE, "model": model}
    roles = ["prefill", "decode", "decode"] if survivor == "decode" else ["prefill", "decode"]
    prefill, *decodes = start.nodes(*((role, node) for role in roles), paused_engine=["decode"])
    gateway = start.gateway([prefill], decodes, model=model)
    result = Result()
    request = asyncio.create_task(generate(gateway, prompt, DRAWN, result=result))
    start.allow_steps(DECODE_STEPS, *decodes)
    await result.until_tokens(1 + DECODE_STEPS)
    killed = await first_of(lambda node: until_status(node, lambda last: last.requests_running > 0), decodes)
    start.kill(killed)
    start.let_go(*(node for node in decodes if node is not killed))
    await request
    assert result.proof.attempts == 2
    whole = await generate(gateway, prompt, DRAWN, cache_salt="another")
    assert (whole.token_ids, whole.logprobs) == (result.token_ids, result.logprobs)
    assert len(whole.logprobs) == DRAWN.max_tokens
