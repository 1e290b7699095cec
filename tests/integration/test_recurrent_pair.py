"""A hybrid with recurrent states over real nodes: KV and states move between unequal ranks, and tokens are the same."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from shutil import copy

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

from baton.types import Path as RequestPath
from baton.types import SamplingParams
from tests.integration.cluster import LLAMA, Machines, machines, nothing_held, until_status
from tests.integration.generation import generate
from tests.integration.reference import Reference
from tests.integration.test_tokens import assert_same

MAX_TOKENS = 10
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
NODE = {"num_blocks": 256, "max_batch_tokens": 128}
LENGTHS = [40, 129, 300]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lfm2")
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=96,
        block_auto_adjust_ff_dim=False,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        max_position_embeddings=1024,
        initializer_range=0.2,
        eos_token_id=4095,
    )
    Lfm2ForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copy(LLAMA / name, directory)
    return directory


@pytest.fixture(scope="module")
def start() -> Iterator[Machines]:
    with machines() as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (1, 2), (2, 1)])
async def test_states_move_between_any_ranks(start: Machines, model: Path, senders: int, receivers: int) -> None:
    reference = Reference(model)
    prompts = reference.prompts(LENGTHS)
    prefill, decode = start.nodes(
        ("prefill", {**NODE, "model": model, "tensor_parallel_size": senders}),
        ("decode", {**NODE, "model": model, "tensor_parallel_size": receivers, "block_size": 16 * receivers}),
    )
    gateway = start.gateway([prefill], [decode], model=model, local_policy="strict")
    for _ in range(2):  # the second time the prefill node reuses prefixes
        results = await asyncio.gather(*(generate(gateway, prompt, GREEDY) for prompt in prompts))
        for prompt, result in zip(prompts, results, strict=True):
            assert_same(result, reference.greedy(prompt, MAX_TOKENS), f"{len(prompt)} tokens")
            assert result.proof.path is RequestPath.REMOTE
    for each in (prefill, decode):
        await until_status(each, nothing_held)
    start.end(gateway)
    start.end(prefill)
    start.end(decode)
