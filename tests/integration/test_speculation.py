"""Draft tokens on real processes: the same tokens as without, wherever drafts come from, and receipts of them."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.cli.processes import Process
from baton.core.sampling import SamplingParams
from baton.core.types import Grammar, GrammarKind
from baton.protos.v1 import node_status_pb2
from tests.integration.cluster import (
    DEEPSEEK,
    LLAMA,
    Flags,
    Machines,
    first_of,
    machines,
    nothing_held,
    until_status,
)
from tests.integration.generation import Result, generate
from tests.integration.reference import Reference, References
from tests.integration.test_tokens import GREEDY, LENGTHS, LOGPROB_TOLERANCE, MAX_TOKENS, assert_same

NODE: Flags = {"num_blocks": 512, "max_batch_tokens": 64, "speculation": "off"}
SPECULATING: Flags = {**NODE, "speculation": "always"}
SCHEMA = {
    "type": "object",
    "properties": {
        "destination_city": {"type": "string", "maxLength": 6},
        "weekdays": {"type": "array", "items": {"enum": ["monday", "friday"]}, "minItems": 2, "maxItems": 4},
    },
    "required": ["destination_city", "weekdays"],
    "additionalProperties": False,
}
DRAWN = SamplingParams(max_tokens=40, temperature=0.7, seed=5, ignore_eos=True, logprobs=2)
# Every way to draw a token. Of all of these, the answers must be the same with drafts and without.
SAMPLINGS = {
    "greedy": replace(DRAWN, temperature=0.0),
    "drawn": DRAWN,
    "top_p and top_k": replace(DRAWN, temperature=1.0, top_p=0.6, top_k=8),
    "min_p": replace(DRAWN, temperature=1.2, min_p=0.2),
    "penalties": replace(DRAWN, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3),
    "logit_bias": replace(DRAWN, logit_bias={7: 4.0, 9: 3.0}),
    "ends early": replace(DRAWN, ignore_eos=False, min_tokens=6, stop_token_ids=tuple(range(3, 60)), temperature=1.0),
    "json": SamplingParams(
        max_tokens=90, temperature=1.0, seed=3, grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    ),
}


@pytest.fixture(scope="module", params=[LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
def model(request: pytest.FixtureRequest) -> Path:
    chosen: Path = request.param
    return chosen


@pytest.fixture(scope="module")
def gateways(model: Path) -> Iterator[tuple[Process, Process, Process]]:
    """A gateway of a pair whose decode node drafts, that node, and a gateway of a decode node that does not."""
    with machines() as start:
        prefill, speculating, plain = start.nodes(
            ("prefill", {"model": model, **NODE}),
            ("decode", {"model": model, "block_size": 32, **SPECULATING}),
            ("decode", {"model": model, **NODE}),
        )
        pair = start.gateway([prefill], [speculating], model=model, local_policy="strict")
        yield pair, speculating, start.gateway([], [plain], model=model, local_policy="local")


def repetitive(reference: Reference) -> list[list[int]]:
    """Prompts that say everything twice, so that there is something to draft."""
    return [[*prompt[: len(prompt) // 2], *prompt[: len(prompt) // 2]] for prompt in reference.prompts(LENGTHS)]


@pytest.mark.slow
async def test_twenty_prompts_at_once_equal_transformers(
    gateways: tuple[Process, Process, Process], model: Path, references: References
) -> None:
    pair, speculating, _ = gateways
    reference = references[model]
    prompts = repetitive(reference)
    for _ in range(2):
        results = await asyncio.gather(*(generate(pair, prompt, GREEDY) for prompt in prompts))
        for prompt, result in zip(prompts, results, strict=True):
            assert_same(result, reference.greedy(prompt, MAX_TOKENS), f"prompt of {len(prompt)} tokens")
    drafted = sum(result.proof.drafted_tokens for result in results)
    accepted = sum(result.proof.accepted_tokens for result in results)
    # Nearly all of the second round was answered in the first.
    assert accepted > len(prompts) * MAX_TOKENS // 2
    assert drafted >= accepted
    last = await until_status(speculating, nothing_held)
    assert last.drafted_tokens_total >= drafted
    assert last.accepted_tokens_total >= accepted


@pytest.mark.slow
async def test_every_way_to_draw_gives_the_same_answers_with_drafts_and_without(
    gateways: tuple[Process, Process, Process], model: Path, references: References
) -> None:
    pair, speculating, plain = gateways
    prompts = repetitive(references[model])[:4]
    asked = [(name, prompt, params) for name, params in SAMPLINGS.items() for prompt in prompts]
    expected = await asyncio.gather(*(generate(plain, prompt, params) for _, prompt, params in asked))
    assert not any(each.proof.drafted_tokens for each in expected)
    drafted = dict.fromkeys(SAMPLINGS, 0)
    for _ in range(2):
        results = await asyncio.gather(*(generate(pair, prompt, params) for _, prompt, params in asked))
        for (name, _, _), one, other in zip(asked, results, expected, strict=True):
            drafted[name] += one.proof.drafted_tokens
            assert one.token_ids == other.token_ids, name
            assert (one.text, one.finish_reason) == (other.text, other.finish_reason), name
            assert one.logprobs == pytest.approx(other.logprobs, abs=LOGPROB_TOLERANCE), name
    assert all(drafted.values()), drafted
    await until_status(speculating, nothing_held)


async def test_a_killed_nodes_drafts_change_no_bit_of_what_another_continues(
    start: Machines, reference: Reference
) -> None:
    flags: Flags = {"model": LLAMA, "num_blocks": 256, "batch_invariant": True, "max_batch_requests": 16}
    flags |= {"speculation": "always"}
    prefill, *decodes = start.nodes(("prefill", flags), ("decode", flags), ("decode", flags), paused_engine=["decode"])
    gateway = start.gateway([prefill], decodes, model=LLAMA)
    (half,) = reference.prompts([100])
    params = SamplingParams(max_tokens=40, temperature=0.3, seed=5, ignore_eos=True, logprobs=0)
    result = Result()
    request = asyncio.create_task(generate(gateway, [*half, *half], params, result=result))
    start.allow_steps(6, *decodes)
    await result.until_tokens(7)
    killed = await first_of(lambda node: until_status(node, lambda last: last.requests_running > 0), decodes)
    start.kill(killed)
    start.let_go(*(node for node in decodes if node is not killed))
    await request
    assert result.proof.attempts == 2
    # Drafted from the answer above, and not drafted, as nothing was answered with this salt.
    for salt, is_known in (("", True), ("another", False), ("another", True)):
        again = await generate(gateway, [*half, *half], params, cache_salt=salt)
        assert (again.token_ids, again.logprobs) == (result.token_ids, result.logprobs)
        assert (again.proof.accepted_tokens > 20) == is_known


def paces(status: node_status_pb2.NodeStatus) -> tuple[float, float, float]:
    return status.guessed_step_ratio, status.guessed_step_tokens, status.guessed_prompt_step_ratio


async def test_a_node_reports_what_drafts_make_of_its_steps_while_it_decodes(start: Machines) -> None:
    """The gateway chooses by it, so an idle node reports plain steps, and one without drafts nothing."""
    speculating, plain = start.nodes(
        ("decode", {"model": LLAMA, **SPECULATING}), ("decode", {"model": LLAMA, **NODE}), paused_engine=["decode"]
    )
    gateway = start.gateway([], [speculating], model=LLAMA, local_policy="local")
    params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True, logit_bias={7: 100.0})
    result = Result()
    request = asyncio.create_task(generate(gateway, list(range(3, 60)), params, result=result))
    start.allow_steps(20, speculating)
    await result.until_tokens(60)
    busy = await until_status(speculating, lambda last: last.guessed_step_tokens > 2.0)
    assert busy.decode_rows == 1
    assert min(paces(busy)) > 0.0
    start.let_all_go()
    await request
    assert set(result.token_ids) == {7}
    idle = await until_status(speculating, nothing_held)
    assert paces(idle) == (1.0, 1.0, 1.0)
    off = await until_status(plain, nothing_held)
    assert paces(off) == (0.0, 0.0, 0.0)
