"""What the gateway's core promises to every door, between real processes."""

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton.cli.processes import Process
from baton.client.client import AsyncClient
from baton.core.errors import NoNode
from baton.core.sampling import SamplingParams
from baton.node.waiting import until
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb
from baton.protos.v1.generation_pb2_grpc import GenerationStub
from baton.rpc.channels import connect
from baton.rpc.status import from_rpc_error
from tests.integration.cluster import DEADLINE_S, LLAMA, Flags, Machines, machines

NODE: Flags = {"model": LLAMA, "num_blocks": 256}
TEXT = "def fibonacci(n):\n    " * 10


@dataclass
class Answer:
    """A request's messages, and its error."""

    messages: list[pb.GenerateResponse] = field(default_factory=list)
    error: Exception | None = None

    def token_ids(self, index: int = 0) -> list[int]:
        mine = [message for message in self.messages if message.index == index]
        return [token.token_id for message in mine for token in message.tokens]

    @property
    def notices(self) -> list[str]:
        return [message.notice for message in self.messages if message.notice]


async def ask(gateway: Process, message: pb.GenerateRequest, answer: Answer | None = None) -> Answer:
    answer = answer or Answer()
    async with connect(gateway.address) as channel:
        call = GenerationStub(channel).Generate(message, timeout=DEADLINE_S)
        try:
            async for response in call:
                answer.messages.append(response)
        except Exception as error:  # noqa: BLE001  its type is what a test asks for
            answer.error = from_rpc_error(error)  # type: ignore[arg-type]
    return answer


def sampled(**values: object) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(max_tokens=12, ignore_eos=True, **values)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def start() -> Iterator[Machines]:
    with machines() as started:
        yield started


@pytest.fixture(scope="module")
def gateway(start: Machines) -> Process:
    prefill, decode = start.nodes(("prefill", NODE), ("decode", NODE))
    return start.gateway([prefill], [decode], model=LLAMA)


async def test_output_i_of_a_seed_is_the_output_of_the_seed_plus_i(gateway: Process) -> None:
    together = await ask(gateway, pb.GenerateRequest(text=TEXT, n=3, sampling=sampled(seed=7)))
    assert together.error is None
    for index in range(3):
        alone = await ask(gateway, pb.GenerateRequest(text=TEXT, sampling=sampled(seed=7 + index)))
        assert together.token_ids(index) == alone.token_ids()
    usage = together.messages[-1].usage
    assert usage.completion_tokens == 36
    receipts = [message.receipt for message in together.messages if message.finish_reason]
    assert len(receipts) == 3


async def test_the_best_output_is_the_one_with_the_highest_mean_logprob(gateway: Process) -> None:
    every = await ask(gateway, pb.GenerateRequest(text=TEXT, n=4, sampling=sampled(seed=3, logprobs=0)))
    best = await ask(gateway, pb.GenerateRequest(text=TEXT, best_of=4, sampling=sampled(seed=3)))
    means = {
        index: sum(token.logprob for message in every.messages if message.index == index for token in message.tokens)
        for index in range(4)
    }
    assert best.token_ids() == every.token_ids(max(means, key=lambda index: means[index]))


async def test_a_chat_is_answered(gateway: Process) -> None:
    chat = pb.Chat(messages_json='[{"role": "user", "content": "Write a function."}]')
    answer = await ask(gateway, pb.GenerateRequest(chat=chat, sampling=sampled(temperature=0)))
    assert answer.error is None
    assert "".join(message.chat.content for message in answer.messages)


async def test_a_chat_with_only_a_seed_draws_as_the_checkpoint_says_and_goes_on_to_the_contexts_end(
    start: Machines, tmp_path: Path
) -> None:
    tuned = tmp_path / LLAMA.name
    shutil.copytree(LLAMA, tuned)
    (tuned / "generation_config.json").write_text('{"temperature": 0.0}')
    prefill, decode = start.nodes(("prefill", NODE), ("decode", {**NODE, "max_context_tokens": 128}))
    async with AsyncClient(start.gateway([prefill], [decode], model=tuned).address) as client:
        hello = [{"role": "user", "content": "Write a function."}]
        of_params = await client.chat(hello, SamplingParams(seed=1, ignore_eos=True))
        of_mapping = await client.chat(hello, {"seed": 2, "ignore_eos": True})
        greedy = await client.chat(hello, SamplingParams(temperature=0.0, ignore_eos=True))
    assert [token.token_id for token in of_params.tokens] == [token.token_id for token in of_mapping.tokens]
    assert [token.token_id for token in of_params.tokens] == [token.token_id for token in greedy.tokens]
    assert of_params.usage.prompt_tokens + of_params.usage.completion_tokens == 128


async def test_a_stream_that_lost_its_only_decode_node_says_so_and_fails_after_a_bounded_wait(start: Machines) -> None:
    prefill, decode = start.nodes(
        ("prefill", {**NODE, "also_decodes": "false"}), ("decode", NODE), paused_engine=["decode"]
    )
    gateway = start.gateway([prefill], [decode], model=LLAMA, failover_wait_s=0.5)
    answer = Answer()
    message = pb.GenerateRequest(text=TEXT, sampling=sampled(temperature=0))
    request = asyncio.create_task(ask(gateway, message, answer))
    start.allow_steps(3, decode)
    assert await until(lambda: len(answer.token_ids()) >= 3, timeout_s=DEADLINE_S)
    start.kill(decode)
    await asyncio.wait_for(request, DEADLINE_S)
    (notice,) = answer.notices
    assert "was lost; waiting up to 0.5 s for another one" in notice
    assert isinstance(answer.error, NoNode)
    assert "was lost" in answer.error.message
    assert "within 0.5 s" in answer.error.message
