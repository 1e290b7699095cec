"""A model with an EAGLE-3 head, on a prefill node and a decode node.

The head's KV and its first drafts are handed over, so the decode node drafts as well as one process does, from its
first step on. Every accepted draft token needs KV of 20 places before.
"""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file, save_file

from baton.core.sampling import SamplingParams
from baton.core.types import Path as RequestPath
from tests.integration.cluster import Flags, Machines, until_status
from tests.integration.generation import generate
from tests.integration.speculating_pair import (
    DRAWN,
    GREEDY,
    PROMPTS,
    VOCABULARY,
    SpeculatingPair,
    add_tokenizer,
    check_first_step,
    check_tokens,
    speculating_gateways,
)
from tests.unit.models.tiny_eagle import DISTANCE, save_with_good_head


class Saved(NamedTuple):
    model: Path
    head: Path

    @property
    def flags(self) -> Flags:
        return {"model": self.model, "num_blocks": 256, "max_batch_tokens": 32}

    @property
    def speculating(self) -> Flags:
        return {**self.flags, "speculation": "always", "draft_head": self.head}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A tiny model with the tokenizer of a demo model, and its head."""
    path = tmp_path_factory.mktemp("eagle")
    save_with_good_head(path / "model", path / "head", vocab_size=VOCABULARY)
    add_tokenizer(path / "model")
    return Saved(path / "model", path / "head")


@pytest.fixture(scope="module")
def gateways(saved: Saved) -> Iterator[SpeculatingPair]:
    yield from speculating_gateways(saved.model, saved.flags, saved.speculating, layout="BLNHC")


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
async def test_tokens_are_those_without_drafts(gateways: SpeculatingPair, saved: Saved, params: SamplingParams) -> None:
    await check_tokens(gateways, saved.model, params)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
async def test_most_drafts_are_accepted_after_a_hand_over_as_in_one_process(
    gateways: SpeculatingPair, params: SamplingParams
) -> None:
    """With a salt of its own, no request is drafted from another's answer."""
    pair, alone, _, _ = gateways
    for gateway in (pair, alone):
        for number, prompt in enumerate(PROMPTS):
            result = await generate(gateway, prompt, params, cache_salt=f"{params.temperature} {number}")
            assert result.proof.accepted_tokens > 0.8 * result.proof.drafted_tokens


async def test_the_first_step_of_the_decode_node_drafts(gateways: SpeculatingPair) -> None:
    await check_first_step(gateways.pair)


async def test_a_prefix_of_another_request_has_the_heads_kv(
    gateways: SpeculatingPair,
) -> None:
    pair, *_ = gateways
    for tail in ([5, 9, 4, 8], [60, 61, 77]):
        params = replace(GREEDY, max_tokens=DISTANCE - len(tail))
        result = await generate(pair, PROMPTS[4][:64] + tail, params, cache_salt="prefix")
        assert result.proof.accepted_tokens > 0.7 * result.proof.drafted_tokens


async def test_a_prefix_that_comes_back_from_host_memory_has_the_heads_kv(start: Machines, saved: Saved) -> None:
    """Other prompts take all blocks of the cache between two requests with the same prefix."""
    (node,) = start.nodes(("decode", {**saved.speculating, "num_blocks": 12, "host_cache_gib": 0.02}))
    gateway = start.gateway([], [node], model=saved.model, local_policy="local")
    params, prefix = replace(GREEDY, max_tokens=DISTANCE - 2), PROMPTS[4][:64]
    await generate(gateway, [*prefix, 5, 9], params)
    await until_status(node, lambda last: bool(last.stores and last.stores[0].entries))
    for number in range(1, 5):
        await generate(gateway, [number + token for token in PROMPTS[4]], params)
    result = await generate(gateway, [*prefix, 60, 61], params)
    assert result.proof.decode_loaded_tokens == 64
    assert result.proof.accepted_tokens > 0.8 * result.proof.drafted_tokens


@pytest.mark.slow
async def test_ranks_draft_together(start: Machines, gateways: SpeculatingPair, saved: Saved) -> None:
    prefill, decode = start.nodes(
        ("prefill", saved.speculating), ("decode", {**saved.speculating, "tensor_parallel_size": 2})
    )
    pair = start.gateway([prefill], [decode], model=saved.model, local_policy="strict")
    _, _, plain, _ = gateways
    for prompt in PROMPTS[:2]:
        result, expected = await generate(pair, prompt, GREEDY), await generate(plain, prompt, GREEDY)
        assert result.token_ids == expected.token_ids
        assert result.proof.accepted_tokens > 0.7 * result.proof.drafted_tokens


async def test_a_pair_with_two_heads_is_refused_with_the_cure_and_one_with_a_head_serves(
    start: Machines, saved: Saved, tmp_path: Path
) -> None:
    """A decode node with a retrained head, next to prefill nodes without one and with the old one."""
    shutil.copy(saved.head / "config.json", tmp_path)
    tensors = load_file(saved.head / "model.safetensors")
    tensors["lm_head.weight"] *= 2
    save_file(tensors, tmp_path / "model.safetensors")
    plain, old, decode = start.nodes(
        ("prefill", saved.flags),
        ("prefill", saved.speculating),
        ("decode", {**saved.speculating, "draft_head": tmp_path}),
    )
    refused = start.gateway([old], [decode], model=saved.model)
    last = await until_status(old, lambda last: any(peer.mismatches for peer in last.peers))
    (reason,) = last.peers[0].mismatches
    assert reason.field == "draft_digest"
    assert len(reason.ours) == 64
    assert reason.ours != reason.theirs
    assert "--draft-head" in reason.cure
    served = start.gateway([plain], [decode], model=saved.model, local_policy="strict")
    results = [await generate(gateway, PROMPTS[0], GREEDY) for gateway in (refused, served)]
    assert [each.proof.path for each in results] == [RequestPath.LOCAL, RequestPath.REMOTE]
    assert results[0].token_ids == results[1].token_ids
