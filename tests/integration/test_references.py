"""A wrong reference to KV gives a typed error, never text, and a session that ends keeps no blocks and no leases.

These tests speak the protocol of the nodes, as a gateway does.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import pytest

from baton.cli.processes import Process
from baton.core.errors import BatonError, InvalidRequest, UnknownLease
from baton.protos.internal.v1 import decode_pb2, decode_pb2_grpc, lease_pb2, prefill_pb2, prefill_pb2_grpc
from baton.protos.v1 import common_pb2
from baton.rpc.channels import connect
from baton.rpc.status import from_rpc_error
from tests.integration.cluster import LLAMA, machines, nothing_held, until_status

PROMPT = list(range(100, 180))
GREEDY = common_pb2.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Process, Process]]:
    with machines() as start:
        prefill, decode = start.nodes(
            ("prefill", {"model": LLAMA, "num_blocks": 64}), ("decode", {"model": LLAMA, "num_blocks": 64})
        )
        yield prefill, decode


Session = grpc.aio.StreamStreamCall[decode_pb2.SessionRequest, decode_pb2.SessionResponse]


@asynccontextmanager
async def session(decode: Process) -> AsyncIterator[Session]:
    async with connect(decode.address) as channel:
        yield decode_pb2_grpc.DecodeStub(channel).Session()


async def reserved(call: Session, key: int = 1) -> decode_pb2.Reserved:
    """Submits the prompt under `key` and returns the reservation."""
    submit = decode_pb2.SubmitRequest(
        key=key,
        request_id=f"test-{key}",
        prompt_token_ids=PROMPT,
        sampling=GREEDY,
        policy=decode_pb2.LOCAL_POLICY_STRICT,
        prefill_available=True,
    )
    await call.write(decode_pb2.SessionRequest(submit=submit))
    response = await read(call)
    assert response.WhichOneof("message") == "reserved", response
    return response.reserved


async def prefill(node: Process, ticket: lease_pb2.Ticket) -> list[prefill_pb2.PrefillEvent]:
    request = prefill_pb2.PrefillRequest(request_id="test", prompt_token_ids=PROMPT, sampling=GREEDY, ticket=ticket)
    async with connect(node.address) as channel:
        return [event async for event in prefill_pb2_grpc.PrefillStub(channel).Prefill(request)]


async def failure_of(node: Process, ticket: lease_pb2.Ticket) -> BatonError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await prefill(node, ticket)
    return from_rpc_error(caught.value)


async def read(call: Session) -> decode_pb2.SessionResponse:
    response = await call.read()
    assert isinstance(response, decode_pb2.SessionResponse), "the session ended"
    return response


async def tokens(call: Session) -> list[int]:
    """Token ids that the decode node streams until it releases the request."""
    found: list[int] = []
    while True:
        response = await read(call)
        match response.WhichOneof("message"):
            case "step":
                found += [item.token.token_id for item in response.step.tokens]
            case "released":
                return found
            case "admitted":
                pass
            case other:
                raise AssertionError(f"{other}: {response}")


async def test_nodes_hand_over_without_a_gateway(pair: tuple[Process, Process]) -> None:
    node, decode = pair
    async with session(decode) as call:
        ticket = (await reserved(call)).ticket
        events = await prefill(node, ticket)
        first = next(event.first_token for event in events if event.WhichOneof("event") == "first_token")
        assert first.token.index == 0
        assert events[-1].sent.tokens_sent == len(PROMPT) - ticket.token_start
        assert len(await tokens(call)) == GREEDY.max_tokens - 1
    await until_status(decode, nothing_held)
    await until_status(node, nothing_held)


async def test_a_ticket_of_another_incarnation_is_refused(pair: tuple[Process, Process]) -> None:
    node, decode = pair
    async with session(decode) as call:
        ticket = (await reserved(call)).ticket
        ticket.lease.incarnation ^= 1
        error = await failure_of(node, ticket)
        assert isinstance(error, UnknownLease)
        assert "new ticket" in error.cure
    await until_status(decode, nothing_held)


async def test_a_ticket_for_other_tokens_is_refused(pair: tuple[Process, Process]) -> None:
    node, decode = pair
    async with session(decode) as call:
        ticket = (await reserved(call)).ticket
        ticket.token_stop += 1
        assert isinstance(await failure_of(node, ticket), InvalidRequest)
    await until_status(decode, nothing_held)


async def test_a_ticket_with_a_lease_number_too_large_for_tags_is_refused(
    pair: tuple[Process, Process],
) -> None:
    node, decode = pair
    async with session(decode) as call:
        ticket = (await reserved(call)).ticket
        number = ticket.lease.number
        ticket.lease.number = 1 << 63
        assert isinstance(await failure_of(node, ticket), InvalidRequest)
        ticket.lease.number = number
        await prefill(node, ticket)
        assert len(await tokens(call)) == GREEDY.max_tokens - 1
    await until_status(decode, nothing_held)


async def test_segments_of_a_lease_that_has_ended_are_received_and_dropped(pair: tuple[Process, Process]) -> None:
    node, decode = pair
    async with session(decode) as call:
        ticket = (await reserved(call)).ticket
    before = await until_status(decode, nothing_held)
    await prefill(node, ticket)  # the prefill node does not know that the lease has ended; its sends must not hang
    after = await until_status(decode, lambda last: last.segments_late > before.segments_late)
    assert nothing_held(after)


async def test_segments_under_a_lease_number_that_was_never_given_are_refused(pair: tuple[Process, Process]) -> None:
    node, decode = pair
    async with session(decode) as call:
        ticket = (await reserved(call)).ticket
        before = await until_status(decode, lambda last: last.blocks_leased > 0)
        ticket.lease.number += 1000
        await prefill(node, ticket)
        after = await until_status(decode, lambda last: last.segments_refused > before.segments_refused)
        assert after.blocks_leased == before.blocks_leased
    await until_status(decode, nothing_held)


async def test_a_session_that_breaks_releases_its_leases(pair: tuple[Process, Process]) -> None:
    _, decode = pair
    async with session(decode) as call:
        for key in range(1, 4):
            await reserved(call, key)
        held = await until_status(decode, lambda last: last.blocks_leased > 0)
        assert held.blocks_leased >= 3
    await until_status(decode, nothing_held)


async def test_a_renewed_ticket_has_a_new_lease_and_the_old_one_is_closed(pair: tuple[Process, Process]) -> None:
    node, decode = pair
    async with session(decode) as call:
        old = (await reserved(call)).ticket
        renew = decode_pb2.RenewTicket(key=1, failed_lease=old.lease.number)
        await call.write(decode_pb2.SessionRequest(renew=renew))
        new = (await read(call)).reserved.ticket
        assert new.lease.number != old.lease.number
        before = await until_status(decode, lambda last: last.blocks_leased > 0)
        await prefill(node, old)
        await until_status(decode, lambda last: last.segments_late > before.segments_late)
        await prefill(node, new)
        assert len(await tokens(call)) == GREEDY.max_tokens - 1
    await until_status(decode, nothing_held)


async def test_cancel_is_answered_once_everything_is_free(pair: tuple[Process, Process]) -> None:
    _, decode = pair
    async with session(decode) as call:
        await reserved(call)
        await call.write(decode_pb2.SessionRequest(cancel=decode_pb2.CancelRequest(key=1)))
        response = await read(call)
        assert response.WhichOneof("message") == "released"
        assert nothing_held(await until_status(decode, lambda last: True))


async def test_the_status_of_a_pair_counts_what_was_sent(pair: tuple[Process, Process]) -> None:
    node, decode = pair
    async with session(decode) as call:  # which pairs them, if no test has done so
        await prefill(node, (await reserved(call)).ticket)
        await tokens(call)
    before = (await until_status(decode, nothing_held)).peers[0]
    async with session(decode) as call:
        events = await prefill(node, (await reserved(call, 2)).ticket)
        await tokens(call)
    sent_bytes = events[-1].sent.bytes_sent
    for each in (node, decode):
        last = await until_status(each, lambda last: last.peers[0].bytes_total >= before.bytes_total + sent_bytes)
        assert last.peers[0].segments_total > before.segments_total
        await until_status(each, lambda last: last.peers[0].gigabytes_per_s > 0)
