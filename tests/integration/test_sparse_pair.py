"""A model that attends to selected tokens, on a prefill node and a decode node: its index keys travel with the KV."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from baton.core.sampling import SamplingParams
from baton.core.types import Path as RequestPath
from tests.integration.cluster import LLAMA, Machines, nothing_held, until_status
from tests.integration.generation import generate
from tests.integration.reference import Reference
from tests.integration.test_layer_groups import LAYERS_PER_GROUP, fix_layers_per_group
from tests.unit.models.tiny_sparse import MODELS

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
NAME = "glm-moe-dsa-shared-selection"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with the tokenizer of a demo model."""
    path: Path = tmp_path_factory.mktemp("sparse")
    vocabulary = Tokenizer.from_file(str(LLAMA / "tokenizer.json")).get_vocab_size()
    torch.manual_seed(0)
    config = transformers.GlmMoeDsaConfig(**{**MODELS[NAME][1], "vocab_size": vocabulary})
    transformers.GlmMoeDsaForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(LLAMA / name, path)
    return path


@pytest.mark.parametrize("ranks", [(1, 1), pytest.param((2, 1), marks=pytest.mark.slow)])
async def test_tokens_are_transformers_also_after_a_prefix_is_reused(
    start: Machines, directory: Path, ranks: tuple[int, int]
) -> None:
    reference = Reference(directory)
    node = {"model": directory, "num_blocks": 64, "max_batch_tokens": 32}
    prefill, decode = start.nodes(
        ("prefill", {**node, "tensor_parallel_size": ranks[0]}),
        ("decode", {**node, "tensor_parallel_size": ranks[1], "kv_cache_layout": "HND", "block_size": 32}),
    )
    gateway = start.gateway([prefill], [decode], model=directory, local_policy="strict")
    first = [3 + token % 40 for token in range(0, 7 * 90, 7)]
    for prompt in (first, first[:70] + [5, 9, 4, 8] * 8):
        result = await generate(gateway, prompt, GREEDY)
        assert result.proof.path is RequestPath.REMOTE
        assert result.token_ids == reference.greedy(prompt, GREEDY.resolved().max_tokens).token_ids
    for each in (prefill, decode):
        await until_status(each, nothing_held)


async def test_its_index_is_sent_with_each_group_of_layers(start: Machines, directory: Path) -> None:
    reference, node = Reference(directory), {"model": directory, "num_blocks": 64}
    prefill, decode = start.nodes(("prefill", node), ("decode", node), prepare=fix_layers_per_group)
    gateway = start.gateway([prefill], [decode], model=directory, local_policy="strict")
    prompt = [3 + token % 40 for token in range(0, 7 * 90, 7)]
    result = await generate(gateway, prompt, GREEDY)
    assert result.proof.layer_groups == -(-MODELS[NAME][1]["num_hidden_layers"] // LAYERS_PER_GROUP)
    assert result.token_ids == reference.greedy(prompt, GREEDY.resolved().max_tokens).token_ids
    for each in (prefill, decode):
        await until_status(each, nothing_held)
