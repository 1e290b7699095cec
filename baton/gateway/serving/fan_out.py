"""Serves several outputs of one request: each as a separate request with its own seed, its messages with its index.

The first output starts alone. The others start once it decodes, because the prompt's KV is in the prefix caches then.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from baton.gateway.core.request import Outputs, Request
from baton.gateway.request.driver import Write
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb

# Arguments: index of the output, its request, and the function that takes its messages.
RunOutput = Callable[[int, Request, Write], Awaitable[None]]

_SEEDS = 2**64


async def fan_out(request: Request, outputs: Outputs, run: RunOutput, write: Write) -> None:
    """Runs all outputs with `run` and writes those that the client gets. The very last message has the usage.

    Raises:
        BatonError: an output failed; the others are cancelled.
    """
    ranked = outputs.drawn > outputs.returned
    requests = [output_of(request, index, ranked=ranked) for index in range(outputs.drawn)]
    writer: _Writer = _BestOutputs(write, request, outputs) if ranked else _AllOutputs(write, outputs.drawn)
    decodes = asyncio.Event()  # set when the first output decodes or is complete

    async def run_output(index: int) -> None:
        async def write_output(message: pb.GenerateResponse) -> None:
            await writer.write(index, message)
            if message.finish_reason or (message.tokens and message.tokens[-1].index > 0):
                decodes.set()

        await run(index, requests[index], write_output)

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run_output(0))
            await decodes.wait()
            for index in range(1, outputs.drawn):
                tasks.create_task(run_output(index))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    await writer.finish()


def output_of(request: Request, index: int, *, ranked: bool) -> Request:
    """The request for one output. The first one of an unranked request is the request itself.

    Args:
        ranked: whether outputs are compared, which needs logprobs.
    """
    sampling = request.sampling
    if ranked and sampling.logprobs is None:
        sampling = replace(sampling, logprobs=0)
    if index:
        sampling = replace(sampling, seed=(sampling.seed + index) % _SEEDS, prompt_logprobs=None)
    return request if sampling is request.sampling else replace(request, sampling=sampling)


class _Writer(Protocol):
    async def write(self, index: int, message: pb.GenerateResponse) -> None: ...

    async def finish(self) -> None: ...


class _Totals:
    """Usage of all outputs together. The prompt counts once, with the cached tokens of the first output."""

    def __init__(self) -> None:
        self.usage = common_pb2.Usage()

    def take(self, index: int, message: pb.GenerateResponse) -> None:
        """Adds the usage of an output's last message and removes it from the message."""
        usage = message.usage
        self.usage.completion_tokens += usage.completion_tokens
        self.usage.reasoning_tokens += usage.reasoning_tokens
        if index == 0:
            self.usage.prompt_tokens = usage.prompt_tokens
            self.usage.cached_tokens = usage.cached_tokens
        message.ClearField("usage")


class _AllOutputs:
    """Writes the messages of all outputs, one at a time."""

    def __init__(self, write: Write, num_outputs: int) -> None:
        self._write = write
        self._running = num_outputs
        self._totals = _Totals()
        self._write_lock = asyncio.Lock()

    async def write(self, index: int, message: pb.GenerateResponse) -> None:
        message.index = index
        async with self._write_lock:
            if message.finish_reason:
                self._totals.take(index, message)
                self._running -= 1
                if not self._running:
                    message.usage.CopyFrom(self._totals.usage)
            await self._write(message)

    async def finish(self) -> None:
        pass


class _BestOutputs:
    """Keeps all outputs; writes the ones with the highest mean logprob at the end, best first."""

    def __init__(self, write: Write, request: Request, outputs: Outputs) -> None:
        self._write = write
        self._wants_logprobs = request.sampling.logprobs is not None
        self._returned = outputs.returned
        self._messages: list[list[pb.GenerateResponse]] = [[] for _ in range(outputs.drawn)]
        self._totals = _Totals()
        self._write_lock = asyncio.Lock()

    async def write(self, index: int, message: pb.GenerateResponse) -> None:
        if message.notice:
            async with self._write_lock:
                await self._write(message)
            return
        if message.finish_reason:
            self._totals.take(index, message)
        self._messages[index].append(message)

    async def finish(self) -> None:
        # The sort is stable: of equal outputs, the one with the lower index comes first.
        best = sorted(self._messages, key=_mean_logprob, reverse=True)[: self._returned]
        best[-1][-1].usage.CopyFrom(self._totals.usage)
        prompt_logprobs = [each for message in self._messages[0] for each in message.prompt_logprobs]
        for index, messages in enumerate(best):
            for message in messages:
                message.index = index
                del message.prompt_logprobs[:]
                if prompt_logprobs and message.tokens:
                    message.prompt_logprobs.extend(prompt_logprobs)
                    prompt_logprobs = []
                if not self._wants_logprobs:
                    for token in message.tokens:
                        token.ClearField("logprob")
                await self._write(message)


def _mean_logprob(messages: list[pb.GenerateResponse]) -> float:
    logprobs = [token.logprob for message in messages for token in message.tokens]
    return sum(logprobs) / len(logprobs)
