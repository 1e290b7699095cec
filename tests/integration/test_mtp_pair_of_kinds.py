"""Models and ranks of other kinds that draft with an MTP layer, on a prefill node and a decode node.

Their tokens are those without drafts, and the decode node's first step drafts.
"""

import asyncio
from pathlib import Path

import pytest

from baton.core.types import Path as RequestPath
from tests.integration.cluster import Flags, Machines, nothing_held, until_status
from tests.integration.generation import generate
from tests.integration.speculating_pair import DRAWN, GREEDY, PROMPTS, VOCABULARY, add_tokenizer, check_first_step
from tests.unit.models.tiny_mtp import save_with_good_layer

RANKS: Flags = {"tensor_parallel_size": 2}
OWN: Flags = {**RANKS, "expert_parallel": True, "attention_data_parallel": True}


def save_with_tokenizer(directory: Path, kind: str) -> None:
    """Saves a model with a good MTP layer, and the tokenizer of a demo model."""
    save_with_good_layer(directory, kind, changed={"vocab_size": VOCABULARY})
    add_tokenizer(directory)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("qwen3-next", {}),
        pytest.param("qwen3-next", RANKS, marks=pytest.mark.slow),
        ("mimo", {}),
        pytest.param("deepseek-v3", OWN, marks=pytest.mark.slow),
        ("deepseek-v32", {}),
        pytest.param("deepseek-v32", RANKS, marks=pytest.mark.slow),
    ],
)
async def test_tokens_are_those_without_drafts_from_the_first_step_on(
    start: Machines, kind: str, flags: Flags, tmp_path: Path
) -> None:
    save_with_tokenizer(tmp_path, kind)
    node: Flags = {"model": tmp_path, "num_blocks": 256, "max_batch_tokens": 32}
    speculating: Flags = {**node, "speculation": "always"}
    prefill, decode, alone = start.nodes(
        ("prefill", {**speculating, **flags}),
        ("decode", {**speculating, "block_size": 32, "kv_cache_layout": "BLNC", **flags}),
        ("decode", {**node, "speculation": "off"}),
    )
    pair = start.gateway([prefill], [decode], model=tmp_path, local_policy="strict")
    plain = start.gateway([], [alone], model=tmp_path, local_policy="local")
    for params in (GREEDY, DRAWN):
        expected = await asyncio.gather(*(generate(plain, prompt, params) for prompt in PROMPTS))
        results = await asyncio.gather(*(generate(pair, prompt, params) for prompt in PROMPTS))
        assert [each.token_ids for each in results] == [each.token_ids for each in expected]
        assert not any(each.proof.drafted_tokens for each in expected)
        assert all(each.proof.path is RequestPath.REMOTE and each.proof.drafted_tokens for each in results)
        if params is GREEDY:
            drafted, accepted = (
                sum(getattr(each.proof, count) for each in results) for count in ("drafted_tokens", "accepted_tokens")
            )
            assert accepted > 0.6 * drafted, "without the prompt's KV of the layer fewer are right"
    await check_first_step(pair)
    await until_status(decode, nothing_held)
