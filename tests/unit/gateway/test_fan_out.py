"""Several outputs of one request: seeds, order, indexes, usage, and what ends them all."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.core.errors import NoNode
from baton.core.sampling import ResolvedSampling
from baton.gateway.core.request import Outputs, Request
from baton.gateway.request.driver import Write
from baton.gateway.serving.fan_out import fan_out
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb
from tests.unit.gateway.fleets import request

LENGTH = common_pb2.FINISH_REASON_LENGTH
BOUND_S = 60


class Outcomes:
    """Runs outputs of three tokens each; the logprobs of an output are `logprobs[index]`.

    Attributes:
        started: the requests, in the order of their starts.
        wait: outputs wait for it before their second token.
    """

    def __init__(self, logprobs: Sequence[float] = (), *, fails: int | None = None) -> None:
        self.started: list[Request] = []
        self.cancelled = self.finished = 0
        self.wait = asyncio.Event()
        self.wait.set()
        self._logprobs = logprobs
        self._fails = fails

    async def run(self, number: int, output: Request, write: Write) -> None:
        self.started.append(output)
        try:
            for index in range(3):
                if index == 1:
                    await self.wait.wait()
                    if number == self._fails:
                        raise NoNode("lost")
                token = common_pb2.Token(token_id=10 * number + index, index=index)
                if self._logprobs:
                    token.logprob = self._logprobs[number]
                await write(pb.GenerateResponse(text=f" {token.token_id}", tokens=[token], request_id="r"))
            usage = common_pb2.Usage(prompt_tokens=64, completion_tokens=3, cached_tokens=16 * number)
            await write(pb.GenerateResponse(finish_reason=LENGTH, usage=usage, receipt=common_pb2.Receipt(attempts=1)))
            self.finished += 1
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


class Client:
    def __init__(self) -> None:
        self.messages: list[pb.GenerateResponse] = []
        self.writing = False

    async def write(self, message: pb.GenerateResponse) -> None:
        assert not self.writing, "one message at a time"
        self.writing = True
        await asyncio.sleep(0)
        self.writing = False
        copy = pb.GenerateResponse()
        copy.CopyFrom(message)
        self.messages.append(copy)

    def text(self, index: int) -> str:
        return "".join(message.text for message in self.messages if message.index == index)


def sampled(seed: int = 5, logprobs: int | None = None) -> Request:
    return replace(request(), sampling=ResolvedSampling(seed=seed, logprobs=logprobs, prompt_logprobs=0))


async def draw(outcomes: Outcomes, n: int, best_of: int | None = None, of: Request | None = None) -> Client:
    client = Client()
    outputs = Outputs(best_of or n, n)
    await asyncio.wait_for(fan_out(of or sampled(), outputs, outcomes.run, client.write), BOUND_S)
    return client


async def test_each_output_has_the_next_seed() -> None:
    outcomes = Outcomes()
    await draw(outcomes, 3, of=sampled(seed=2**64 - 2))
    assert [each.sampling.seed for each in outcomes.started] == [2**64 - 2, 2**64 - 1, 0]


async def test_the_first_output_is_the_request_itself() -> None:
    outcomes, given = Outcomes(), sampled()
    await draw(outcomes, 2, of=given)
    assert outcomes.started[0] is given
    assert [each.sampling.prompt_logprobs for each in outcomes.started] == [0, None]


async def test_messages_have_their_output_and_usage_counts_the_prompt_once() -> None:
    client = await draw(Outcomes(), 3)
    assert [client.text(index) for index in range(3)] == [" 0 1 2", " 10 11 12", " 20 21 22"]
    assert sorted(message.index for message in client.messages if message.finish_reason) == [0, 1, 2]
    with_usage = [message for message in client.messages if message.HasField("usage")]
    assert with_usage == [client.messages[-1]]
    assert with_usage[0].usage == common_pb2.Usage(prompt_tokens=64, completion_tokens=9, cached_tokens=0)
    assert all(message.HasField("receipt") for message in client.messages if message.finish_reason)


async def test_the_others_start_when_the_first_one_decodes() -> None:
    outcomes = Outcomes()
    outcomes.wait.clear()
    client = Client()
    task = asyncio.create_task(fan_out(sampled(), Outputs(3, 3), outcomes.run, client.write))
    async with asyncio.timeout(BOUND_S):
        while not client.messages:  # noqa: ASYNC110 (nothing signals it)
            await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(outcomes.started) == 1
    outcomes.wait.set()
    await asyncio.wait_for(task, BOUND_S)
    assert len(outcomes.started) == 3


@pytest.mark.parametrize("which", [0, 1, 2])
async def test_an_output_that_fails_ends_all(which: int) -> None:
    with pytest.raises(NoNode, match="lost"):
        await draw(Outcomes(fails=which), 3)


async def test_cancelling_ends_all() -> None:
    outcomes = Outcomes()
    client = Client()
    task = asyncio.create_task(fan_out(sampled(), Outputs(3, 3), outcomes.run, client.write))
    async with asyncio.timeout(BOUND_S):
        while len(outcomes.started) < 3:  # noqa: ASYNC110 (nothing signals it)
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert outcomes.cancelled == 3 - outcomes.finished > 0


async def test_the_best_outputs_come_in_the_order_of_their_logprobs() -> None:
    client = await draw(Outcomes([-3.0, -1.0, -2.0]), 2, best_of=3)
    assert client.text(0) == " 10 11 12"
    assert client.text(1) == " 20 21 22"
    assert [message.index for message in client.messages] == [0] * 4 + [1] * 4
    assert client.messages[-1].usage.completion_tokens == 9
    assert not any(message.HasField("usage") for message in client.messages[:-1])


async def test_ranking_needs_logprobs_that_the_client_does_not_get() -> None:
    outcomes = Outcomes([-3.0, -1.0])
    client = await draw(outcomes, 1, best_of=2)
    assert [each.sampling.logprobs for each in outcomes.started] == [0, 0]
    assert not any(token.HasField("logprob") for message in client.messages for token in message.tokens)
    client = await draw(Outcomes([-3.0, -1.0]), 1, best_of=2, of=sampled(logprobs=0))
    assert all(token.logprob == -1.0 for message in client.messages for token in message.tokens)


async def test_of_equal_outputs_the_first_wins() -> None:
    client = await draw(Outcomes([-1.0, -1.0]), 1, best_of=2)
    assert client.text(0) == " 0 1 2"


async def test_the_prompts_logprobs_come_with_the_first_tokens_of_the_best_output() -> None:
    class WithPrompt(Outcomes):
        async def run(self, number: int, output: Request, write: Write) -> None:
            async def write_first(message: pb.GenerateResponse) -> None:
                if message.tokens and message.tokens[0].token_id == 0:
                    message.prompt_logprobs.add(token_id=7)
                await write(message)

            await super().run(number, output, write_first)

    client = await draw(WithPrompt([-3.0, -1.0]), 1, best_of=2)
    assert [len(message.prompt_logprobs) for message in client.messages] == [1, 0, 0, 0]


async def test_a_notice_is_passed_on_while_outputs_are_compared() -> None:
    class Waiting(Outcomes):
        async def run(self, number: int, output: Request, write: Write) -> None:
            if not self.started:
                await write(pb.GenerateResponse(notice="waiting"))
            await super().run(number, output, write)

    client = await draw(Waiting([-3.0, -1.0]), 1, best_of=2)
    assert client.messages[0].notice == "waiting"
    assert not any(message.notice for message in client.messages[1:])
