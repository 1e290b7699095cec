"""The first layers of a chunk are sent while later layers compute, and every token is that of a single process.

The number of layers in a group is fixed here. `tests/unit/kvtransfer/test_layer_groups.py` tests its choice for a link.
"""

import asyncio
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from baton.cli.processes import Process
from baton.core.sampling import SamplingParams
from prefill_node import driver
from tests.integration.cluster import LLAMA, Flags, Machines, nothing_held, until_status
from tests.integration.generation import generate
from tests.integration.reference import References
from tests.integration.test_tokens import assert_same

LAYERS = 6
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
LAYERS_PER_GROUP = 2
CONFIG = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 512,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}
TOKEN_BYTES = LAYERS * 2 * 4 * 512 * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fat")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(LLAMA / name, directory)
    return directory


def fix_layers_per_group() -> None:
    """Runs in a prefill node and fixes the size of groups, which otherwise depends on the speed of the machine."""
    setattr(driver, "choose_layers_per_group", lambda *_, **__: LAYERS_PER_GROUP)  # noqa: B010


def prompts() -> list[list[int]]:
    """Prompts of one chunk, and of several chunks with a single token in the last one."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(10, 4000, (length,), generator=generator).tolist() for length in (200, 513)]


def cluster(start: Machines, model: Path, **prefill_flags: object) -> tuple[Process, Process, Process]:
    flags: Flags = {"model": model, "num_blocks": 128}
    prefill, decode = start.nodes(
        ("prefill", {**flags, **prefill_flags}), ("decode", {**flags, "block_size": 32}), prepare=fix_layers_per_group
    )
    return prefill, decode, start.gateway([prefill], [decode], model=model, local_policy="strict")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_tokens_are_those_of_one_process(
    start: Machines, model: Path, references: References, ranks: int
) -> None:
    prefill, decode, gateway = cluster(start, model, tensor_parallel_size=ranks)
    reference = references[model]
    for _ in range(2):  # the second time with hits in both prefix caches
        results = await asyncio.gather(*(generate(gateway, prompt, GREEDY) for prompt in prompts()))
        for prompt, result in zip(prompts(), results, strict=True):
            assert_same(result, reference.greedy(prompt, GREEDY.resolved().max_tokens), f"{len(prompt)} tokens")
            receipt = result.proof
            assert receipt.bytes_sent == receipt.prompt_tokens_sent * TOKEN_BYTES
            if not result.cached_tokens:
                assert receipt.layer_groups == LAYERS // LAYERS_PER_GROUP
                assert receipt.segments >= receipt.layer_groups
    for node in (prefill, decode):
        await until_status(node, nothing_held)


async def test_switched_off_a_chunk_is_sent_whole(start: Machines, model: Path) -> None:
    _, _, gateway = cluster(start, model, overlap_layers="off", segment_mib=64)
    receipt = (await generate(gateway, prompts()[0], GREEDY)).proof
    assert receipt.layer_groups == 1
