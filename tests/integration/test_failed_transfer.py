"""A node whose transfer thread cannot go on: its requests continue elsewhere, and its process ends with an error."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from kvtransfer import worker
from kvtransfer.transports.transport import Transport
from tests.integration.cluster import DEADLINE_S, LLAMA, Flags, machines, until_status
from tests.integration.generation import Result, generate
from tests.integration.reference import Reference
from tests.integration.test_faults import LONG, PROMPT_TOKENS, STEP_TOKENS

NODE: Flags = {"model": LLAMA, "max_batch_tokens": STEP_TOKENS, "num_blocks": 256, "prefix_cache": False}
REQUESTS = 4


def fail_transfer_if(trigger: Path) -> None:
    """In a node's process: once that file exists, advancing the transport is an error that nothing catches."""
    opened = worker.open_transport

    def open_failing(name: str, *, on_gpu: bool) -> Transport:
        transport = opened(name, on_gpu=on_gpu)
        progress = transport.progress

        def progress_or_fail() -> bool:
            if trigger.exists():
                raise RuntimeError("an error of the test")
            return progress()

        transport.progress = progress_or_fail  # type: ignore[method-assign]
        return transport

    worker.open_transport = open_failing


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_its_requests_go_on_elsewhere_and_it_ends_with_an_error(
    reference: Reference, tmp_path: Path, role: str
) -> None:
    trigger = tmp_path / "fail"
    prompts = reference.prompts([PROMPT_TOKENS] * REQUESTS)
    with machines() as start:
        (failing,) = start.nodes((role, NODE), held=[role], prepare=partial(fail_transfer_if, trigger))
        prefill, decode = start.nodes(("prefill", NODE), ("decode", NODE))
        pairs = {"prefill": [prefill], "decode": [decode]}
        pairs[role].append(failing)
        gateway = start.gateway(pairs["prefill"], pairs["decode"], model=LLAMA, local_policy="strict")
        requests = [asyncio.create_task(generate(gateway, prompt, LONG)) for prompt in prompts]
        # Steps of a prompt, or of an output.
        start.allow_steps(3, failing)
        await until_status(failing, lambda last: last.requests_running > 0)
        trigger.touch()
        results: list[Result] = await asyncio.gather(*requests)
        expected = [reference.greedy(prompt, 40).token_ids for prompt in prompts]
        assert [result.token_ids for result in results] == expected
        assert max(result.proof.attempts for result in results) > 1 or role == "decode"
        assert await asyncio.to_thread(failing.popen.wait, DEADLINE_S) == 1
