"""A node whose transfer thread cannot go on: its requests continue elsewhere, and its process ends with an error."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from baton.cli.processes import Process
from kvtransfer import worker
from kvtransfer.transports.table import open_transport
from kvtransfer.transports.transport import Transport
from tests.integration.cluster import DEADLINE_S, LLAMA, Flags, first_of, machines, until_status
from tests.integration.generation import Result, generate
from tests.integration.reference import Reference
from tests.integration.test_faults import LONG, PROMPT_TOKENS, STEP_TOKENS

NODE: Flags = {"model": LLAMA, "max_batch_tokens": STEP_TOKENS, "num_blocks": 256, "prefix_cache": False}
REQUESTS = 4


def fail_transfer_if(trigger: Path) -> None:
    """In a node's process: once that file exists, advancing the transport is an error that nothing catches."""

    def open_failing(name: str, *, on_gpu: bool = False) -> Transport:
        transport = open_transport(name, on_gpu=on_gpu)
        progress = transport.progress

        def progress_or_fail() -> bool:
            if trigger.exists():
                raise RuntimeError("an error of the test")
            return progress()

        transport.progress = progress_or_fail  # type: ignore[method-assign]
        return transport

    vars(worker)["open_transport"] = open_failing


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_its_requests_go_on_elsewhere_and_it_ends_with_an_error(
    reference: Reference, tmp_path: Path, role: str
) -> None:
    prompts = reference.prompts([PROMPT_TOKENS] * REQUESTS)
    with machines() as start:
        triggers: dict[Process, Path] = {}
        for name in ("first", "second"):
            fail = partial(fail_transfer_if, tmp_path / name)
            (node,) = start.nodes((role, NODE), paused_engine=[role], prepare=fail)
            triggers[node] = tmp_path / name
        others = start.nodes(("decode" if role == "prefill" else "prefill", NODE))
        pairs = {"prefill": others, "decode": others, role: list(triggers)}
        gateway = start.gateway(pairs["prefill"], pairs["decode"], model=LLAMA, local_policy="strict")
        requests = [asyncio.create_task(generate(gateway, prompt, LONG)) for prompt in prompts]
        # Steps of a prompt, or of an output.
        start.allow_steps(3, *triggers)
        failing = await first_of(lambda node: until_status(node, lambda last: last.requests_running > 0), [*triggers])
        triggers[failing].touch()
        start.let_go(*(node for node in triggers if node is not failing))
        results: list[Result] = await asyncio.gather(*requests)
        expected = [reference.greedy(prompt, 40).token_ids for prompt in prompts]
        assert [result.token_ids for result in results] == expected
        assert max(result.proof.attempts for result in results) > 1 or role == "decode"
        assert await asyncio.to_thread(failing.popen.wait, DEADLINE_S) == 1
