"""The client for programs without an event loop: whole answers, streams that end early, Ctrl-C, closing."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

import baton
from baton.client.loop_thread import Call, Stream
from baton.client.sync import Client
from baton.core.errors import Cancelled, NoNode
from baton.protos.v1 import common_pb2, generation_pb2_grpc
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.server import GrpcServer

BOUND_S = 60.0


class Endless(generation_pb2_grpc.GenerationServicer):
    """A gateway that answers "short" at once, and anything else with one piece and then nothing."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()  # an endless answer was cancelled

    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
    ) -> None:
        for index in range(max(1, request.n)):
            await context.write(pb.GenerateResponse(text="a piece", index=index))
        try:
            if request.text != "short":
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.ended.set()
            raise
        for index in range(max(1, request.n)):
            end = pb.GenerateResponse(finish_reason=common_pb2.FINISH_REASON_STOP, index=index)
            end.receipt.path = common_pb2.PATH_LOCAL
            await context.write(end)

    async def ListModels(  # noqa: N802
        self,
        request: pb.ListModelsRequest,
        context: grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse],
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.ModelCard(name="llama", revisions=[pb.Revision(revision="abc")])])


@asynccontextmanager
async def endless() -> AsyncIterator[tuple[str, Endless]]:
    service = Endless()  # type: ignore[abstract]  # clients call two methods
    async with GrpcServer("127.0.0.1:0", advertise=None) as server:
        generation_pb2_grpc.add_GenerationServicer_to_server(service, server.grpc)
        await server.start([])
        yield server.address, service


async def test_answers_are_whole_or_streamed() -> None:
    def use(address: str) -> None:
        with Client(address) as client:
            assert client.complete("short").text == "a piece"
            assert [each.index for each in client.complete("short", n=3)] == [0, 1, 2]
            assert "".join(event.text for event in client.generate("short")) == "a piece"
            assert client.list_models() == [
                baton.ModelCard("llama", "", 0, 0, (baton.ModelRevision(revision="abc", name=""),))
            ]

    async with endless() as (address, _):
        await asyncio.to_thread(use, address)


async def test_leaving_a_stream_early_ends_its_request() -> None:
    def use(client: Client) -> None:
        for event in client.generate("endless"):
            assert event.text == "a piece"
            break

    async with endless() as (address, service):
        client = await asyncio.to_thread(Client, address)
        await asyncio.to_thread(use, client)
        await asyncio.wait_for(service.ended.wait(), BOUND_S)
        await asyncio.to_thread(client.close)


async def test_closing_ends_what_another_thread_waits_for() -> None:
    async with endless() as (address, service):
        client = await asyncio.to_thread(Client, address)
        events = client.generate("endless")
        await asyncio.to_thread(next, events)
        waiting = asyncio.create_task(asyncio.to_thread(lambda: next(events)))
        await asyncio.sleep(0)
        await asyncio.to_thread(client.close)
        await asyncio.wait_for(service.ended.wait(), BOUND_S)
        with pytest.raises((Cancelled, RuntimeError), match=r"the client (was|is) closed"):  # began before, or after
            await asyncio.wait_for(waiting, BOUND_S)
        client.close()  # once more
        with pytest.raises(RuntimeError, match="the client is closed"):
            client.complete("short")


def test_errors_are_those_of_the_asynchronous_client_and_no_thread_is_left() -> None:
    with Client("127.0.0.1:9") as client:
        thread = client._loop._thread
        with pytest.raises(NoNode, match="cannot reach"):
            client.complete("short")
        with pytest.raises(TypeError, match="no option 'request'"):
            client.complete("short", request="mine")  # type: ignore[call-overload]
    thread.join(BOUND_S)  # `close` waits for a few seconds only
    assert not thread.is_alive()


async def test_a_stream_that_the_garbage_collector_finds_in_the_clients_own_thread_ends() -> None:
    def use(client: Client) -> None:
        events = client.generate("endless")
        next(events)
        cycle: list[object] = [events]
        cycle.append(cycle)

    async with endless() as (address, service):
        client = await asyncio.to_thread(Client, address)
        gc.disable()  # until the client's thread collects
        try:
            await asyncio.to_thread(use, client)
            client._loop._loop.call_soon_threadsafe(gc.collect)
            await asyncio.wait_for(service.ended.wait(), BOUND_S)
        finally:
            gc.enable()
        assert (await asyncio.to_thread(client.complete, "short")).text == "a piece"
        await asyncio.to_thread(client.close)


async def test_a_client_that_nothing_refers_to_leaves_no_thread() -> None:
    client = Client("127.0.0.1:9")
    thread = client._loop._thread
    del client
    gc.collect()
    await asyncio.to_thread(thread.join, BOUND_S)
    assert not thread.is_alive()


def test_a_forked_process_is_told_not_to_use_its_parents_client() -> None:
    with Client("127.0.0.1:9") as client:
        child = os.fork()
        if child == 0:  # no assertions here: pytest would go on in two processes
            code = 1
            try:
                client.complete("short")
            except RuntimeError as error:
                code = 0 if "close clients before a fork" in str(error) else 2
            client.close()  # does nothing, and does not wait
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0


async def test_a_stream_ends_whose_next_event_is_still_awaited() -> None:
    """A Ctrl-C between the submission of the read and the wait for it leaves the read running."""

    async def use(client: Client) -> None:
        stream = Stream(client._client.generate("endless"))
        assert await stream.next() is not None
        reading = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        await stream.end()
        assert reading.cancelled()

    async with endless() as (address, service):
        client = await asyncio.to_thread(Client, address)
        await asyncio.to_thread(client._loop.run, lambda: use(client))
        await asyncio.wait_for(service.ended.wait(), BOUND_S)
        await asyncio.to_thread(client.close)


LEAVES_OPEN = """
import sys
from baton import Client
client = Client(sys.argv[1])
events = client.generate("endless")
print(next(events).text, flush=True)
"""


async def test_a_program_ends_that_leaves_a_stream_open() -> None:
    async with endless() as (address, service):
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-c", LEAVES_OPEN, address, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            out, err = await asyncio.wait_for(program.communicate(), BOUND_S)
        finally:
            if program.returncode is None:
                program.kill()
        assert (out, err, program.returncode) == (b"a piece\n", b"", 0)
        await asyncio.wait_for(service.ended.wait(), BOUND_S)


PROGRAM = """
import sys
from baton import Client
client = Client(sys.argv[1])
try:
    for event in client.generate("endless"):
        print(event.text, flush=True)
except KeyboardInterrupt:
    print("stopped", flush=True)
    client.close()
"""


async def test_ctrl_c_ends_a_stream_and_its_request() -> None:
    async with endless() as (address, service):
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, address, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert program.stdout is not None
        try:
            assert await asyncio.wait_for(program.stdout.readline(), BOUND_S) == b"a piece\n"
            program.send_signal(signal.SIGINT)
            out, err = await asyncio.wait_for(program.communicate(), BOUND_S)
        finally:
            if program.returncode is None:
                program.kill()
        assert (out, err, program.returncode) == (b"stopped\n", b"", 0)
        await asyncio.wait_for(service.ended.wait(), BOUND_S)


async def test_a_call_that_is_stopped_before_it_began_ends_at_once() -> None:
    """A Ctrl-C can strike before the call reaches the loop, and right after."""
    begun = []

    async def work() -> None:
        begun.append(work)

    never, early = Call(work), Call(work)
    never.stop()
    assert never.done.get(timeout=BOUND_S) is None
    early.begin()
    early.stop()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    ended = early.done.get(timeout=BOUND_S)
    assert ended is not None
    assert isinstance(ended[1], Cancelled)
    assert not begun
