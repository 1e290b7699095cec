"""Tokens share a message only where the client or the gateway is behind, and are counted by whom they waited for."""

import asyncio
from collections.abc import Callable

import pytest

from baton.gateway.request.write_scheduler import SLOW_S
from baton.protos.v1 import generation_pb2 as pb
from tests.unit.gateway.http.http_gateway import HttpGateway, open_http_gateway, step_token

BOUND_S = 60.0


class Client:
    """A client that takes its messages one by one; while it is not ready, the next one waits."""

    def __init__(self) -> None:
        self.messages: list[int] = []  # numbers of their tokens
        self.ready = asyncio.Event()
        self.ready.set()
        self._changed = asyncio.Event()

    async def write(self, message: pb.GenerateResponse) -> None:
        if message.tokens:
            self.messages.append(len(message.tokens))
            self._changed.set()
        await self.ready.wait()

    async def until(self, condition: Callable[[list[int]], bool]) -> None:
        async with asyncio.timeout(BOUND_S):
            while not condition(self.messages):
                self._changed.clear()
                await self._changed.wait()


def merged(door: HttpGateway) -> dict[str, int]:
    counters = door.serving.shared_counters
    cells = {
        behind: counters.layout.first("baton_generation_tokens_merged_total", (behind,))
        for behind in ("client", "gateway")
    }
    return {behind: counters.own_cell(cell) for behind, cell in cells.items()}


def generate(door: HttpGateway, client: Client) -> "asyncio.Task[None]":
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(1, 20)))
    request.sampling.max_tokens = 10
    return asyncio.create_task(door.serving.generate(request, client.write, budget_s=None))


async def until_joined(door: HttpGateway, tokens: int) -> None:
    """Waits until so many tokens wait together with an earlier one."""
    async with asyncio.timeout(BOUND_S):
        while sum(driver._joined for running in door.serving._requests for driver in running.drivers) < tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_tokens_of_steps_apart_have_messages_of_their_own() -> None:
    async with open_http_gateway() as door:
        client = Client()
        running = generate(door, client)
        await door.accept()
        for index in range(3):
            door.decode.send_tokens(step_token(index))
            await client.until(lambda messages, count=index + 1: len(messages) == count)  # type: ignore[misc]
        door.finish(3)
        await running
        assert client.messages == [1, 1, 1, 1]
        assert merged(door) == {"client": 0, "gateway": 0}


@pytest.mark.parametrize("num_tokens", [2, 5])
async def test_tokens_that_wait_for_a_client_share_its_next_message(num_tokens: int) -> None:
    async with open_http_gateway() as door:
        client = Client()
        running = generate(door, client)
        await door.accept()
        client.ready.clear()
        door.decode.send_tokens(step_token(0))
        await client.until(lambda messages: len(messages) == 1)
        for index in range(1, num_tokens):
            door.decode.send_tokens(step_token(index))
        door.finish(num_tokens)
        await until_joined(door, num_tokens - 1)
        asyncio.get_running_loop().call_later(2 * SLOW_S, client.ready.set)
        await running
        assert client.messages[0] == 1
        assert sum(client.messages) == num_tokens + 1
        assert merged(door) == {"client": num_tokens - 1, "gateway": 0}


async def test_tokens_that_reach_the_gateway_together_count_as_its_own() -> None:
    async with open_http_gateway() as door:
        client = Client()
        running = generate(door, client)
        await door.accept()
        door.decode.send_tokens(step_token(0))
        await client.until(lambda messages: len(messages) == 1)
        door.decode.send_tokens(step_token(1), step_token(2), step_token(3))
        door.finish(4)
        await running
        assert sum(client.messages) == 5
        assert merged(door)["client"] == 0
        assert merged(door)["gateway"] >= 2
