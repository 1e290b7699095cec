"""First tokens of hand-overs wait at the gateway for the second ones, and answers stay what they were."""

import asyncio
from collections.abc import Callable

from baton.cli.processes import Process
from baton.core.sampling import SamplingParams
from baton.core.types import Path
from baton.gateway.fleet.second_token import SecondTokenDelay
from tests.integration.cluster import LLAMA, Machines, nothing_held, until_status
from tests.integration.generation import Result, generate
from tests.integration.reference import Reference

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[3 + (7 * token + number) % 400 for token in range(40 + 30 * number)] for number in range(4)]
WAITED = "; the first token waited "


def _learn_a_long_delay() -> None:
    """Makes every first token of a hand-over wait: for the second one, or 50 ms."""
    SecondTokenDelay.at = lambda self, now_s: 0.1  # type: ignore[method-assign]


def _learn_no_delay() -> None:
    SecondTokenDelay.at = lambda self, now_s: 0.0  # type: ignore[method-assign]


def _gateway(start: Machines, prefill: Process, decode: Process, prepare: Callable[[], None]) -> Process:
    """A gateway that has every prompt prefilled on the prefill node, for streams that allow only short gaps."""
    return start.gateway([prefill], [decode], prepare=prepare, model=LLAMA, local_policy="strict", tpot_ms=1)


async def test_answers_are_the_same_with_and_without_a_wait(start: Machines, reference: Reference) -> None:
    prefill, decode = start.nodes(("prefill", {"model": LLAMA}), ("decode", {"model": LLAMA}))
    waiting = _gateway(start, prefill, decode, _learn_a_long_delay)
    plain = _gateway(start, prefill, decode, _learn_no_delay)
    asked = [generate(gateway, prompt, GREEDY) for prompt in PROMPTS for gateway in (waiting, plain)]
    results = await asyncio.gather(*asked)
    for prompt, late, soon in zip(PROMPTS, results[::2], results[1::2], strict=True):
        expected = reference.greedy(prompt, GREEDY.resolved().max_tokens).token_ids
        assert late.token_ids == soon.token_ids == expected
        assert (late.text, late.finish_reason) == (soon.text, soon.finish_reason)
        assert late.proof.path is soon.proof.path is Path.REMOTE
        assert WAITED not in soon.proof.why
    for node in (prefill, decode):
        await until_status(node, nothing_held)


async def test_the_first_token_goes_out_although_the_second_one_does_not_come(
    start: Machines, reference: Reference
) -> None:
    (prefill,) = start.nodes(("prefill", {"model": LLAMA}))
    (decode,) = start.nodes(("decode", {"model": LLAMA}), paused_engine=("decode",))
    gateway = _gateway(start, prefill, decode, _learn_a_long_delay)
    result = Result()
    running = asyncio.create_task(generate(gateway, PROMPTS[0], GREEDY, result=result))
    await result.until_tokens(1)
    assert len(result.token_ids) == 1
    start.let_go(decode)
    await running
    assert result.token_ids == reference.greedy(PROMPTS[0], GREEDY.resolved().max_tokens).token_ids
    assert WAITED in result.proof.why
