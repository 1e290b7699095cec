"""Pairs in which only one node has an MTP layer: while nodes restart with another `--speculation`, or where one has no
room for the layer. They serve, and every token is the one that decoding alone gives."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from baton.cli.processes import Process
from baton.core.types import Path as RequestPath
from tests.integration.cluster import Flags, machines, nothing_held, until_status
from tests.integration.generation import generate
from tests.integration.speculating_pair import DRAWN, GREEDY, PROMPTS, VOCABULARY, add_tokenizer
from tests.unit.models.tiny_mtp import save_with_good_layer


class Mixed(NamedTuple):
    """Gateways of the pairs by the nodes that have the layer, and of a node without drafts."""

    pairs: dict[str, Process]
    plain: Process
    nodes: list[Process]


@pytest.fixture(scope="module", params=["deepseek-v3", "qwen3-next"])
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    model: Path = tmp_path_factory.mktemp("mixed")
    save_with_good_layer(model, request.param, changed={"vocab_size": VOCABULARY})
    add_tokenizer(model)
    node: Flags = {"model": model, "num_blocks": 256, "max_batch_tokens": 32}
    other: Flags = {"block_size": 32, "kv_cache_layout": "BLNC"}
    with machines() as start:
        first, first_decode, second, second_decode, alone = nodes = start.nodes(
            ("prefill", {**node, "speculation": "always"}),
            ("decode", {**node, **other, "speculation": "text"}),
            ("prefill", {**node, "speculation": "text"}),
            ("decode", {**node, **other, "speculation": "always"}),
            ("decode", {**node, "speculation": "off"}),
        )
        pairs = {
            "prefill": start.gateway([first], [first_decode], model=model, local_policy="strict"),
            "decode": start.gateway([second], [second_decode], model=model, local_policy="strict"),
        }
        yield Mixed(pairs, start.gateway([], [alone], model=model, local_policy="local"), nodes)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_pair_serves_if_only_one_node_has_the_layer(mixed: Mixed, side: str) -> None:
    for params in (GREEDY, DRAWN):
        expected = await asyncio.gather(*(generate(mixed.plain, prompt, params) for prompt in PROMPTS))
        for _ in range(2):  # the second time with prefixes of the first
            results = await asyncio.gather(*(generate(mixed.pairs[side], prompt, params) for prompt in PROMPTS))
            assert [each.token_ids for each in results] == [each.token_ids for each in expected]
            assert all(each.proof.path is RequestPath.REMOTE for each in results)
    for node in mixed.nodes:
        await until_status(node, nothing_held)


async def test_kv_without_the_layers_part_is_kept_for_nobody(mixed: Mixed) -> None:
    """What such a block has for the layer is what another request left there."""
    for _ in range(2):
        result = await generate(mixed.pairs["decode"], PROMPTS[4], GREEDY, cache_salt="kept")
        assert result.proof.decode_cached_tokens == 0
