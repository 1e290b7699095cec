"""A model with an EAGLE-3 head, on a prefill node and a decode node.

The head's KV and its first guesses are handed over, so the decode node guesses as well as one process does, from its
first step on. Every right guess needs KV of 20 places before.
"""

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file, save_file

from baton.cli.processes import Process
from baton.core.sampling import SamplingParams
from baton.core.types import Path as RequestPath
from tests.integration.cluster import LLAMA, Flags, Machines, machines, nothing_held, until_status
from tests.integration.generation import generate
from tests.integration.reference import Reference
from tests.integration.test_layer_groups import fix_layers_per_group
from tests.unit.models.tiny_eagle import DISTANCE, save_with_good_head

VOCABULARY = 4096
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.7, seed=5)
PROMPTS = [[3 + (seed + 7) * token * token % 3001 for token in range(40 + 9 * seed)] for seed in range(5)]


class Saved(NamedTuple):
    model: Path
    head: Path

    @property
    def flags(self) -> Flags:
        return {"model": self.model, "num_blocks": 256, "max_batch_tokens": 32}

    @property
    def guessing(self) -> Flags:
        return {**self.flags, "speculation": "always", "draft_head": self.head}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A tiny model with the tokenizer of a demo model, and its head."""
    path = tmp_path_factory.mktemp("eagle")
    assert json.loads((LLAMA / "config.json").read_text())["vocab_size"] == VOCABULARY
    save_with_good_head(path / "model", path / "head", vocab_size=VOCABULARY)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(LLAMA / name, path / "model")
    return Saved(path / "model", path / "head")


@pytest.fixture(scope="module")
def gateways(saved: Saved) -> Iterator[tuple[Process, Process, Process, Process]]:
    """Gateways of a pair that guesses, of a decode node that guesses alone, and of one that does not; and the pair's
    decode node."""
    guessing, model = saved.guessing, saved.model
    with machines() as start:
        prefill, decode, alone, plain = start.nodes(
            ("prefill", guessing),
            ("decode", {**guessing, "block_size": 32, "kv_cache_layout": "BLNHC"}),
            ("decode", guessing),
            ("decode", saved.flags),
            prepare=fix_layers_per_group,
        )
        pair = start.gateway([prefill], [decode], model=model, local_policy="strict")
        guesses = start.gateway([], [alone], model=model, local_policy="local")
        yield pair, guesses, start.gateway([], [plain], model=model, local_policy="local"), decode


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
async def test_tokens_are_those_without_guesses(
    gateways: tuple[Process, Process, Process, Process], saved: Saved, params: SamplingParams
) -> None:
    pair, alone, plain, decode = gateways
    expected = await asyncio.gather(*(generate(plain, prompt, params) for prompt in PROMPTS))
    if params is GREEDY:
        reference = Reference(saved.model)
        for prompt, each in zip(PROMPTS, expected, strict=True):
            assert each.token_ids == reference.greedy(prompt, GREEDY.resolved().max_tokens).token_ids
    for gateway in (pair, alone):
        results = await asyncio.gather(*(generate(gateway, prompt, params) for prompt in PROMPTS))
        assert [each.token_ids for each in results] == [each.token_ids for each in expected]
        assert all(each.proof.drafted_tokens for each in results)
    await until_status(decode, nothing_held)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
async def test_most_guesses_are_right_after_a_hand_over_as_in_one_process(
    gateways: tuple[Process, Process, Process, Process], params: SamplingParams
) -> None:
    """With a salt of its own, no request is guessed from another's answer."""
    pair, alone, _, _ = gateways
    for gateway in (pair, alone):
        for number, prompt in enumerate(PROMPTS):
            result = await generate(gateway, prompt, params, cache_salt=f"{params.temperature} {number}")
            assert result.proof.accepted_tokens > 0.8 * result.proof.drafted_tokens


async def test_the_first_step_of_the_decode_node_guesses(
    gateways: tuple[Process, Process, Process, Process],
) -> None:
    pair, *_ = gateways
    for prompt in PROMPTS:
        result = await generate(pair, prompt, replace(GREEDY, max_tokens=3), cache_salt="first")
        assert result.proof.path is RequestPath.REMOTE
        assert result.proof.drafted_tokens == 1, "no more fits, and none would be known without the hand-over"


async def test_a_prefix_of_another_request_has_the_heads_kv(
    gateways: tuple[Process, Process, Process, Process],
) -> None:
    pair, *_ = gateways
    for tail in ([5, 9, 4, 8], [60, 61, 77]):
        params = replace(GREEDY, max_tokens=DISTANCE - len(tail))
        result = await generate(pair, PROMPTS[4][:64] + tail, params, cache_salt="prefix")
        assert result.proof.accepted_tokens > 0.7 * result.proof.drafted_tokens


async def test_a_prefix_that_comes_back_from_host_memory_has_the_heads_kv(start: Machines, saved: Saved) -> None:
    """Other prompts take all blocks of the cache between two requests with the same prefix."""
    (node,) = start.nodes(("decode", {**saved.guessing, "num_blocks": 12, "host_cache_gib": 0.02}))
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
async def test_ranks_guess_together(
    start: Machines, gateways: tuple[Process, Process, Process, Process], saved: Saved
) -> None:
    prefill, decode = start.nodes(
        ("prefill", saved.guessing), ("decode", {**saved.guessing, "tensor_parallel_size": 2})
    )
    pair = start.gateway([prefill], [decode], model=saved.model, local_policy="strict")
    _, _, plain, _ = gateways
    for prompt in PROMPTS[:2]:
        result, expected = await generate(pair, prompt, GREEDY), await generate(plain, prompt, GREEDY)
        assert result.token_ids == expected.token_ids
        assert result.proof.accepted_tokens > 0.7 * result.proof.drafted_tokens


async def test_a_pair_with_one_head_or_two_is_refused_with_the_cure(
    start: Machines, saved: Saved, tmp_path: Path
) -> None:
    """A decode node with a retrained head, next to prefill nodes without one and with the old one."""
    shutil.copy(saved.head / "config.json", tmp_path)
    tensors = load_file(saved.head / "model.safetensors")
    tensors["lm_head.weight"] *= 2
    save_file(tensors, tmp_path / "model.safetensors")
    plain, old, decode = start.nodes(
        ("prefill", saved.flags), ("prefill", saved.guessing), ("decode", {**saved.guessing, "draft_head": tmp_path})
    )
    gateway = start.gateway([plain, old], [decode], model=saved.model)
    for prefill, field, ours in ((plain, "draft", "none"), (old, "draft_digest", "")):
        last = await until_status(prefill, lambda last: any(peer.mismatches for peer in last.peers))
        (reason,) = last.peers[0].mismatches
        assert reason.field == field
        assert reason.ours == ours or (len(reason.ours) == 64 and reason.ours != reason.theirs)
        assert "--draft-head" in reason.cure
    result = await generate(gateway, PROMPTS[0], GREEDY)
    assert result.proof.path is RequestPath.LOCAL
