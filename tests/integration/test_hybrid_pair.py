"""A model with recurrent layers on a prefill node and a decode node: its state travels with the KV."""

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
from tests.unit.models.tiny_hybrid import MODELS

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with the tokenizer of a demo model."""
    path: Path = tmp_path_factory.mktemp("hybrid")
    vocabulary = Tokenizer.from_file(str(LLAMA / "tokenizer.json")).get_vocab_size()
    torch.manual_seed(0)
    config = transformers.Lfm2Config(**{**MODELS["lfm2"][1], "vocab_size": vocabulary})
    transformers.Lfm2ForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(LLAMA / name, path)
    return path


@pytest.mark.parametrize("ranks", [(1, 1), *(pytest.param(pair, marks=pytest.mark.slow) for pair in [(1, 2), (2, 1)])])
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
    for prompt in (first, first[:70] + [5, 9, 4, 8] * 8, first):
        result = await generate(gateway, prompt, GREEDY)
        assert result.proof.path is RequestPath.REMOTE
        assert result.token_ids == reference.greedy(prompt, GREEDY.resolved().max_tokens).token_ids
    for each in (prefill, decode):
        await until_status(each, nothing_held)
