"""Structured output through real processes, from the first token on the prefill node to the last one on a decode node,
even if another decode node has to continue."""

import asyncio
import json

import pytest

from baton.cli.processes import Process
from baton.core.errors import InvalidRequest
from baton.core.sampling import SamplingParams
from baton.core.types import Grammar, GrammarKind
from baton.core.types import Path as RequestPath
from tests.integration.cluster import LLAMA, Flags, Machines, nothing_held, until_status
from tests.integration.generation import Result, generate

NODE: Flags = {"model": LLAMA, "num_blocks": 256, "prefix_cache": False}
PROMPT = list(range(40, 200))
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "array", "items": {"enum": ["monday", "friday"]}, "minItems": 2, "maxItems": 5},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
DECODE_STEPS = 6


def constrained(seed: int, schema: object = SCHEMA) -> SamplingParams:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    return SamplingParams(max_tokens=150, temperature=1.0, seed=seed, grammar=grammar)


def check_follows_schema(result: Result) -> None:
    assert result.finish_reason == "FINISH_REASON_STOP"
    value = json.loads(result.text)
    assert value.keys() == {"city", "days"}
    assert len(value["city"]) <= 12
    assert 2 <= len(value["days"]) <= 5
    assert set(value["days"]) <= {"monday", "friday"}


async def until_released(*nodes: Process) -> None:
    for node in nodes:
        await until_status(node, nothing_held)


async def test_outputs_follow_their_schema_on_either_path(start: Machines) -> None:
    prefill, decode = start.nodes(("prefill", NODE), ("decode", NODE))
    remote = start.gateway([prefill], [decode], model=LLAMA, local_policy="strict")
    local = start.gateway([], [decode], model=LLAMA, local_policy="local")
    requests = [generate(gateway, PROMPT, constrained(seed)) for gateway in (remote, local) for seed in range(3)]
    results = await asyncio.gather(*requests)
    for handed_over, whole in zip(results[:3], results[3:], strict=True):
        assert (handed_over.proof.path, whole.proof.path) == (RequestPath.REMOTE, RequestPath.LOCAL)
        check_follows_schema(handed_over)
        assert handed_over.token_ids == whole.token_ids
    with pytest.raises(InvalidRequest, match='"uniqueItems"') as refused:
        await generate(remote, PROMPT, constrained(0, {"type": "array", "uniqueItems": True}))
    assert refused.value.field == "grammar"
    await until_released(prefill, decode)


async def test_an_output_follows_its_schema_after_its_decode_node_was_killed(start: Machines) -> None:
    prefill, first, second = start.nodes(
        ("prefill", NODE), ("decode", NODE), ("decode", NODE), paused_engine=["decode"]
    )
    gateway = start.gateway([prefill], [first, second], model=LLAMA)
    result = Result()
    request = asyncio.create_task(generate(gateway, PROMPT, constrained(1), result=result))
    start.allow_steps(DECODE_STEPS, first, second)
    await result.until_tokens(1 + DECODE_STEPS)
    killed = first if (await until_status(first, lambda last: True)).requests_running else second
    other = second if killed is first else first
    start.kill(killed)
    start.let_go(other)
    await request
    check_follows_schema(result)
    again = await generate(gateway, PROMPT, constrained(1))
    assert again.token_ids == result.token_ids
    await until_released(prefill, other)


@pytest.mark.slow
async def test_the_ranks_of_a_node_draw_the_same_constrained_tokens(start: Machines) -> None:
    split: Flags = {**NODE, "tensor_parallel_size": 2}
    prefill, decode = start.nodes(("prefill", NODE), ("decode", split))
    gateway = start.gateway([prefill], [decode], model=LLAMA, local_policy="strict")
    for result in await asyncio.gather(*(generate(gateway, PROMPT, constrained(seed)) for seed in range(3))):
        check_follows_schema(result)
    await until_released(prefill, decode)


async def test_a_request_whose_grammar_becomes_too_expensive_ends_typed_and_its_neighbours_go_on(
    start: Machines,
) -> None:
    ambiguous = Grammar(GrammarKind.GBNF, "root ::= s\ns ::= s s | [a-z ]")
    expensive = SamplingParams(max_tokens=90, temperature=1.0, seed=1, grammar=ambiguous, ignore_eos=True)
    prefill, decode = start.nodes(("prefill", NODE), ("decode", NODE))
    remote = start.gateway([prefill], [decode], model=LLAMA, local_policy="strict")
    local = start.gateway([], [decode], model=LLAMA, local_policy="local")
    alone = await generate(remote, PROMPT, constrained(1))
    for gateway in (remote, local):
        result = Result()
        ended, neighbour = await asyncio.gather(
            generate(gateway, PROMPT, expensive, result=result),
            generate(gateway, PROMPT, constrained(1)),
            return_exceptions=True,
        )
        assert isinstance(ended, InvalidRequest)
        assert ended.field == "grammar"
        assert "left recursion" in ended.cure
        assert 0 < len(result.token_ids) < 90
        assert isinstance(neighbour, Result)
        assert neighbour.token_ids == alone.token_ids
    await until_released(prefill, decode)
