"""Nodes of one GPU change their role and are killed while their captured steps serve many requests: in batch-invariant
mode each request still gets the tokens of a single engine."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from baton.client.operators import OperatorClient
from baton.core.sampling import SamplingParams
from baton.protos.v1.node_status_pb2 import ROLE_DECODE, ROLE_PREFILL
from baton.settings.config import DEMO_MODELS
from tests.gpu.demo import build_demo, generate
from tests.integration.cluster import machines
from tests.integration.generation import Result
from tests.integration.generation import generate as ask
from tests.integration.reference import Reference

pytestmark = pytest.mark.gpu

LENGTHS = [20 + 37 * number % 281 for number in range(48)]
PARAMS = SamplingParams(max_tokens=160, temperature=0.0, ignore_eos=True)
NODE: dict[str, object] = {
    "device": "cuda:0",
    "dtype": "bfloat16",
    "batch_invariant": "on",
    "num_blocks": 4096,
    "max_batch_tokens": 1024,
}


@pytest.mark.parametrize("model", ["llama", "deepseek"])
def test_tokens_are_those_of_one_engine_while_nodes_switch_and_die(model: str) -> None:
    directory = DEMO_MODELS / model
    prompts = Reference(directory).prompts(LENGTHS)
    built = build_demo(directory, dtype="bfloat16", batch_invariant=True, num_blocks=4096, max_batch_tokens=1024)
    expected = [output.token_ids for output in generate(built, prompts, PARAMS.resolved())]
    with machines() as start:
        roles = ("prefill", "prefill", "decode", "decode")
        prefill, switching, dying, decode = start.nodes(*((role, {"model": directory, **NODE}) for role in roles))
        gateway = start.gateway([prefill, switching], [dying, decode], model=directory, local_policy="strict")

        async def meanwhile(act: Callable[[], Awaitable[object]]) -> list[list[int]]:
            """The tokens of all prompts; `act` begins when half of them have some tokens and none has all."""
            results = [Result() for _ in prompts]
            asking = [
                asyncio.create_task(ask(gateway, prompt, PARAMS, result=result))
                for prompt, result in zip(prompts, results, strict=True)
            ]
            await asyncio.gather(*(result.until_tokens(2) for result in results[: len(results) // 2]))
            await act()
            await asyncio.gather(*asking)
            return [result.token_ids for result in results]

        async def run() -> None:
            async with OperatorClient(gateway.address) as client:
                for role in (ROLE_DECODE, ROLE_PREFILL):
                    switch = partial(client.switch_role, switching.address, role, grace_s=0.0)
                    assert await meanwhile(switch) == expected
                assert await meanwhile(partial(asyncio.to_thread, start.kill, dying)) == expected

        asyncio.run(run())
