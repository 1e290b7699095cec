"""I4: output tokens equal the single-process reference, and receipts prove that KV was sent."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.cli.processes import Process
from baton.core.sampling import SamplingParams
from baton.core.types import Path as RequestPath
from tests.integration.cluster import DEEPSEEK, LLAMA, Machines, machines, nothing_held, until_status
from tests.integration.generation import Result, generate
from tests.integration.reference import Expected, References

# Mixed lengths: less than a block, edges of blocks, several chunks of 64 tokens.
LENGTHS = [33, 40, 48, 63, 64, 65, 80, 95, 96, 97, 100, 127, 128, 129, 160, 190, 200, 255, 256, 300]
MAX_TOKENS = 24
# Sums of the same numbers in another order differ by at most this; a wrong KV value changes far more.
LOGPROB_TOLERANCE = 1e-3
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
NODE = {"num_blocks": 512, "max_batch_tokens": 64, "prefix_cache": False}


def bytes_per_token(model: Path) -> int:
    """KV bytes of one token in fp32, from the checkpoint's own config."""
    config = json.loads((model / "config.json").read_text())
    if "kv_lora_rank" in config:
        per_layer = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        per_layer = 2 * config["num_key_value_heads"] * head_dim
    return int(4 * per_layer * config["num_hidden_layers"])


def assert_same(result: Result, expected: Expected, label: str) -> None:
    assert result.token_ids == expected.token_ids, label
    assert result.logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE), label


def assert_moved(result: Result, prompt: list[int], model: Path) -> None:
    receipt = result.proof
    assert receipt.path is RequestPath.REMOTE, receipt
    assert receipt.prompt_tokens_sent == len(prompt) - receipt.decode_cached_tokens
    assert receipt.bytes_sent == receipt.prompt_tokens_sent * bytes_per_token(model)
    assert receipt.segments >= 1
    assert receipt.transport not in ("", "loopback")


@pytest.fixture(scope="module", params=[LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
def model(request: pytest.FixtureRequest) -> Path:
    chosen: Path = request.param
    return chosen


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[tuple[Machines, Process, Process, Process]]:
    """Machines, prefill node, decode node, and a gateway in front of them."""
    with machines() as start:
        prefill, decode = start.nodes(
            ("prefill", {"model": model, **NODE}), ("decode", {"model": model, "block_size": 32, **NODE})
        )
        yield start, prefill, decode, start.gateway([prefill], [decode], model=model)


@pytest.mark.slow
async def test_twenty_prompts_at_once_equal_transformers(
    pair: tuple[Machines, Process, Process, Process], model: Path, references: References
) -> None:
    _, prefill, decode, gateway = pair
    reference = references[model]
    prompts = reference.prompts(LENGTHS)
    results = await asyncio.gather(*(generate(gateway, prompt, GREEDY) for prompt in prompts))
    for prompt, result in zip(prompts, results, strict=True):
        assert_same(result, reference.greedy(prompt, MAX_TOKENS), f"prompt of {len(prompt)} tokens")
        assert_moved(result, prompt, model)
        assert result.finish_reason == "FINISH_REASON_LENGTH"
    await until_status(prefill, nothing_held)
    await until_status(decode, nothing_held)


async def test_sampled_tokens_equal_one_process(
    pair: tuple[Machines, Process, Process, Process], model: Path, references: References
) -> None:
    """The same seeds give the same tokens with a hand-over and with prefill and decode in one process."""
    start, _, decode, gateway = pair
    alone = start.gateway([], [decode], model=model, local_policy="local")
    prompts = references[model].prompts(LENGTHS[:10])
    kinds: list[dict[str, Any]] = [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"repetition_penalty": 1.3}]
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9, seed=seed, ignore_eos=True, **extra)
        for seed, extra in enumerate(kinds * 2)
    ]
    handed = await asyncio.gather(*(generate(gateway, p, s) for p, s in zip(prompts, params, strict=True)))
    single = await asyncio.gather(*(generate(alone, p, s) for p, s in zip(prompts, params, strict=True)))
    for one, other in zip(handed, single, strict=True):
        assert one.token_ids == other.token_ids
        assert one.proof.path is RequestPath.REMOTE
        assert other.proof.path is RequestPath.LOCAL
    assert len({tuple(result.token_ids) for result in handed}) == len(handed)


@pytest.fixture(scope="module")
def many(model: Path) -> Iterator[tuple[Machines, dict[str, Process], dict[str, Process]]]:
    """A prefill and a decode node of every layout, each with another block size."""
    layouts = ["LBNC", "BLNC"] if model == DEEPSEEK else ["NHD", "HND", "BLNHC", "BLHNC"]
    sizes = [8, 16, 64, 32]
    with machines() as start:
        flags = [
            (role, {"model": model, "kv_cache_layout": layout, **NODE, "block_size": size, "num_blocks": 8192 // size})
            for role, order in (("prefill", sizes), ("decode", sizes[::-1]))
            for layout, size in zip(layouts, order, strict=False)
        ]
        started = start.nodes(*flags)
        count = len(layouts)
        yield (
            start,
            dict(zip(layouts, started[:count], strict=True)),
            dict(zip(layouts, started[count:], strict=True)),
        )


@pytest.mark.slow
async def test_every_pair_of_layouts_and_block_sizes_gives_the_same_tokens(
    many: tuple[Machines, dict[str, Process], dict[str, Process]], model: Path, references: References
) -> None:
    start, prefill_nodes, decode_nodes = many
    reference = references[model]
    prompts = reference.prompts([70, 129, 200])
    expected = [reference.greedy(prompt, 8) for prompt in prompts]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)
    for ours, prefill in prefill_nodes.items():
        for theirs, decode in decode_nodes.items():
            gateway = start.gateway([prefill], [decode], model=model, local_policy="strict")
            results = await asyncio.gather(*(generate(gateway, prompt, params) for prompt in prompts))
            for prompt, result, wanted in zip(prompts, results, expected, strict=True):
                assert_same(result, wanted, f"{ours} to {theirs}, {len(prompt)} tokens")
                assert_moved(result, prompt, model)
            start.end(gateway)


async def test_a_prefix_hit_on_the_decode_node_sends_only_the_rest(model: Path, references: References) -> None:
    reference = references[model]
    (long_prompt,) = reference.prompts([200])
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)
    flags = {**NODE, "model": model, "prefix_cache": True}
    with machines() as start:
        prefill, decode = start.nodes(("prefill", {**flags, "block_size": 64}), ("decode", flags))
        gateway = start.gateway([prefill], [decode], model=model)
        await generate(gateway, long_prompt[:100], params)
        result = await generate(gateway, long_prompt, params)
        # Full blocks out of 100 tokens: of 16 on the decode node, of 64 on the prefill node, which computes the rest.
        assert result.proof.decode_cached_tokens == 96
        assert result.cached_tokens == result.proof.prefill_cached_tokens == 64
        assert_same(result, reference.greedy(long_prompt, 8), "after a partial hit")
        assert_moved(result, long_prompt, model)
        salted = await generate(gateway, long_prompt, params, cache_salt="another tenant")
        assert salted.cached_tokens == 0
        assert salted.token_ids == result.token_ids
