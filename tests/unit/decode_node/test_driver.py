"""The driver on a real node: the machine's commands reach engine and transfer, and their answers come back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from baton.core.errors import BatonError, DeadlineExceeded, InternalError
from baton.engine.build import BuiltRunner
from baton.node.assembly import Node
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.v1 import common_pb2
from baton.rpc.error_detail import from_detail
from decode_node import driver
from decode_node.driver import DecodeDriver
from tests.unit.decode_node.nodes import decode_node, decode_settings, load_demo
from tests.unit.decode_node.streams import Stream, until


@pytest.fixture(scope="module")
def built() -> BuiltRunner:
    return load_demo()


@dataclass
class Running:
    """A decode node with one open session."""

    node: Node
    driver: DecodeDriver
    stream: Stream[pb.SessionRequest, pb.SessionResponse]
    session: "asyncio.Task[None]"

    async def receive(self, kind: str) -> pb.SessionResponse:
        message = await self.stream.receive()
        assert message.WhichOneof("message") == kind, message
        return message

    async def failed(self) -> BatonError:
        return from_detail((await self.receive("failed")).failed.error)

    def nothing_held(self) -> bool:
        load = self.node.engine.load()
        return not self.driver.machine.busy and load.blocks_free == load.blocks_total


@asynccontextmanager
async def running(built: BuiltRunner, **settings: object) -> AsyncIterator[Running]:
    wanted = decode_settings(**settings)
    node = decode_node(built, wanted)
    driver = DecodeDriver(node, wanted)
    async with node:
        stream = Stream[pb.SessionRequest, pb.SessionResponse]()
        session = asyncio.create_task(driver.sessions.serve("gateway-0", stream.incoming, stream.write))
        try:
            yield Running(node, driver, stream, session)
        finally:
            await driver.close()
            await session


def submission(
    key: int,
    *,
    policy: pb.LocalPolicy.ValueType,
    max_tokens: int = 8,
    budget_s: float | None = None,
    num_tokens: int = 50,
) -> pb.SessionRequest:
    submit = pb.SubmitRequest(
        key=key,
        prompt_token_ids=range(3, 3 + num_tokens),
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        policy=policy,
        prefill_available=True,
        budget_s=budget_s,
    )
    return pb.SessionRequest(submit=submit)


async def test_a_prompt_that_is_prefilled_here_is_decoded_to_its_end(built: BuiltRunner) -> None:
    async with running(built) as node:
        node.stream.send(submission(1, policy=pb.LOCAL_POLICY_LOCAL))
        assert (await node.receive("accepted")).accepted.why == "the policy is local"
        tokens: list[pb.StepToken] = []
        while len(tokens) < 8:
            tokens += (await node.receive("step")).step.tokens
        assert [token.token.index for token in tokens] == list(range(8))
        assert tokens[0].prefill_s > 0
        assert tokens[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert (await node.receive("released")).released.key == 1
        assert node.nothing_held()


async def test_a_lease_is_open_until_the_request_is_cancelled(built: BuiltRunner) -> None:
    async with running(built) as node:
        node.stream.send(submission(1, policy=pb.LOCAL_POLICY_STRICT))
        ticket = (await node.receive("reserved")).reserved.ticket
        assert ticket.token_stop == 50
        assert ticket.lease.number > 1 << 36  # random: nobody guesses it
        assert node.node.engine.load().blocks_leased > 0
        node.stream.send(pb.SessionRequest(cancel=pb.CancelRequest(key=1)))
        await node.receive("released")
        assert node.nothing_held()


async def test_a_renewed_ticket_and_a_prompt_left_to_this_node(built: BuiltRunner) -> None:
    async with running(built) as node:
        node.stream.send(submission(1, policy=pb.LOCAL_POLICY_STRICT, max_tokens=4))
        first = (await node.receive("reserved")).reserved.ticket.lease.number
        node.stream.send(pb.SessionRequest(renew=pb.RenewTicket(key=1, failed_lease=first, output_token_ids=[9])))
        ticket = (await node.receive("reserved")).reserved.ticket
        assert (ticket.lease.number != first, ticket.token_stop) == (True, 51)
        here = pb.PrefillHere(key=1, failed_lease=ticket.lease.number, output_token_ids=[9])
        node.stream.send(pb.SessionRequest(here=here))
        assert (await node.receive("accepted")).accepted.why == "no prefill node could do it"
        indexes: list[int] = []
        while len(indexes) < 3:
            indexes += [token.token.index for token in (await node.receive("step")).step.tokens]
        assert indexes == [1, 2, 3]
        await node.receive("released")


def let_pass(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves the clocks of the driver and of the running loop forward."""
    loop = asyncio.get_running_loop()
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + seconds)
    monkeypatch.setattr(driver, "monotonic", loop.time)


async def test_the_timer_ends_a_request_whose_budget_is_over(
    built: BuiltRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(built) as node:
        node.stream.send(submission(1, policy=pb.LOCAL_POLICY_STRICT, budget_s=20.0))
        await node.receive("reserved")
        let_pass(20.0, monkeypatch)
        assert isinstance(await node.failed(), DeadlineExceeded)
        await node.receive("released")
        assert node.nothing_held()


async def test_the_timer_follows_the_first_deadline(built: BuiltRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(built) as node:
        node.stream.send(submission(1, policy=pb.LOCAL_POLICY_STRICT, budget_s=600.0))
        node.stream.send(submission(2, policy=pb.LOCAL_POLICY_STRICT, budget_s=20.0))
        for _ in range(2):
            await node.receive("reserved")
        let_pass(20.0, monkeypatch)
        assert (await node.receive("failed")).failed.key == 2
        assert (await node.receive("released")).released.key == 2


async def test_a_broken_session_gives_everything_back(built: BuiltRunner) -> None:
    async with running(built) as node:
        node.stream.send(submission(1, policy=pb.LOCAL_POLICY_STRICT))
        node.stream.send(submission(2, policy=pb.LOCAL_POLICY_LOCAL, max_tokens=200))
        kinds = {(await node.stream.receive()).WhichOneof("message") for _ in range(2)}
        assert kinds == {"reserved", "accepted"}
        node.stream.end()
        await until(node.nothing_held)
        await node.session


async def test_closing_releases_every_request_and_ends_the_sessions(built: BuiltRunner) -> None:
    async with running(built) as node:
        node.stream.send(submission(1, policy=pb.LOCAL_POLICY_STRICT))
        await node.receive("reserved")
        await node.driver.close()
        await node.receive("released")
        await node.session
        assert node.nothing_held()


@pytest.mark.parametrize("fails", ["reserve", "open_lease"])
async def test_a_defect_costs_one_request_and_is_reported(
    built: BuiltRunner, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def defect(*_: object, **__: object) -> None:
        raise KeyError("defect")

    async with running(built) as node:
        owner: object = node.node.engine if fails == "reserve" else node.node.transfer.leases
        with monkeypatch.context() as patch:
            patch.setattr(owner, fails, defect)
            node.stream.send(submission(1, policy=pb.LOCAL_POLICY_STRICT))
            error = await node.failed()
            assert isinstance(error, InternalError)
            assert error.message == "KeyError on the decode node"
            await node.receive("released")
        node.stream.send(submission(2, policy=pb.LOCAL_POLICY_STRICT))
        await node.receive("reserved")
