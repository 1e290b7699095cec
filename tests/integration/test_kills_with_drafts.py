"""A node that is killed while a request with drafts is in flight changes no token, whether drafts come from texts,
from an MTP layer or from an EAGLE-3 head. `test_speculation` kills a decode node that drafts from texts."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.types import Path as RequestPath
from tests.integration.cluster import LLAMA, Flags, Machines, first_of, nothing_held, until_status
from tests.integration.generation import Result, generate
from tests.integration.reference import Reference
from tests.integration.speculating_pair import GREEDY, PROMPTS, speculating_flags

TOKENS = 40
PARAMS = replace(GREEDY, max_tokens=TOKENS)
PROMPT = [*PROMPTS[0], *PROMPTS[0]]
# Few tokens, drawn at random, which repeat themselves.
FEW = replace(PARAMS, temperature=1.0, seed=5, logit_bias={7: 100.0, 9: 100.0})


@pytest.fixture(params=["mtp", pytest.param("eagle", marks=pytest.mark.slow)])
def flags(request: pytest.FixtureRequest, tmp_path: Path) -> Flags:
    """Of a node that drafts with a layer."""
    return speculating_flags(request.param, tmp_path)


def check(result: Result, flags: Flags) -> None:
    """The tokens are transformers', and some of them were drafted."""
    assert result.token_ids == Reference(Path(str(flags["model"]))).greedy(PROMPT, TOKENS).token_ids
    assert result.proof.drafted_tokens >= result.proof.accepted_tokens > 0


async def test_another_decode_node_continues(start: Machines, flags: Flags) -> None:
    prefill, *decodes = start.nodes(("prefill", flags), ("decode", flags), ("decode", flags), paused_engine=["decode"])
    gateway = start.gateway([prefill], decodes, model=flags["model"])
    result = Result()
    request = asyncio.create_task(generate(gateway, PROMPT, PARAMS, result=result))
    start.allow_steps(4, *decodes)
    await result.until_tokens(5)
    killed = await first_of(lambda node: until_status(node, lambda last: last.requests_running > 0), decodes)
    start.kill(killed)
    (other,) = (node for node in decodes if node is not killed)
    start.let_go(other)
    await request
    assert result.proof.attempts == 2
    check(result, flags)
    await until_status(other, nothing_held)


async def test_another_prefill_node_computes_the_prompt(start: Machines, flags: Flags) -> None:
    *prefills, decode = start.nodes(
        ("prefill", flags), ("prefill", flags), ("decode", flags), paused_engine=["prefill"]
    )
    gateway = start.gateway(prefills, [decode], model=flags["model"], local_policy="strict")
    request = asyncio.create_task(generate(gateway, PROMPT, PARAMS))
    start.allow_steps(1, *prefills)
    killed = await first_of(
        lambda node: until_status(node, lambda last: 0 < last.tokens_waiting < len(PROMPT)), prefills
    )
    start.kill(killed)
    (other,) = (node for node in prefills if node is not killed)
    start.let_go(other)
    result = await request
    assert result.proof.attempts == 2
    assert result.proof.path is RequestPath.REMOTE
    check(result, flags)
    await until_status(decode, nothing_held)


async def test_the_decode_node_goes_on_without_the_prefill_node(start: Machines, flags: Flags) -> None:
    prefill, decode = start.nodes(("prefill", flags), ("decode", flags), paused_engine=["decode"])
    gateway = start.gateway([prefill], [decode], model=flags["model"], local_policy="strict")
    result = Result()
    request = asyncio.create_task(generate(gateway, PROMPT, PARAMS, result=result))
    start.allow_steps(4, decode)
    await result.until_tokens(5)
    start.kill(prefill)
    start.let_go(decode)
    await request
    assert result.proof.attempts == 1
    check(result, flags)
    await until_status(decode, nothing_held)


async def test_the_decode_node_goes_on_drafting_from_texts_without_the_prefill_node(start: Machines) -> None:
    flags: Flags = {"model": LLAMA, "num_blocks": 256, "max_batch_tokens": 32, "speculation": "always"}
    prefill, decode = start.nodes(("prefill", flags), ("decode", flags), paused_engine=["decode"])
    (plain,) = start.nodes(("decode", {**flags, "speculation": "off"}))
    gateway = start.gateway([prefill], [decode], model=LLAMA, local_policy="strict")
    result = Result()
    request = asyncio.create_task(generate(gateway, PROMPT, FEW, result=result))
    start.allow_steps(4, decode)
    await result.until_tokens(5)
    start.kill(prefill)
    start.let_go(decode)
    await request
    expected = await generate(start.gateway([], [plain], model=LLAMA, local_policy="local"), PROMPT, FEW)
    assert result.token_ids == expected.token_ids
    assert len(set(expected.token_ids)) == 2
    assert result.proof.attempts == 1
    assert result.proof.drafted_tokens >= result.proof.accepted_tokens > 0
