"""Nodes change their role while clients ask without a pause: nothing is lost, and no weights are loaded again."""

import asyncio

import grpc
import pytest

from baton.cli.processes import Process
from baton.errors import InvalidRequest
from baton.rpc.server import connect
from baton.rpc.status import from_rpc_error
from protos.baton.v1 import common_pb2, node_pb2, node_pb2_grpc
from tests.integration.cluster import LLAMA, Flags, Machines, nothing_held, status, until_status
from tests.integration.reference import Reference
from tests.integration.test_rolling_restart import CLIENTS, GREEDY, Load, until_whole

NODE: Flags = {"model": LLAMA, "num_blocks": 256}
PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE


async def switch(node: Process, role: common_pb2.Role.ValueType, **fields: float) -> list[node_pb2.SwitchRoleResponse]:
    async with connect(node.address) as channel:
        request = node_pb2.SwitchRoleRequest(role=role, **fields)
        try:
            return [each async for each in node_pb2_grpc.NodeStub(channel).SwitchRole(request)]
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None


async def test_a_node_switches_to_the_other_role_and_back_under_load(start: Machines, reference: Reference) -> None:
    prompts = reference.prompts([40, 57, 74])
    answers = [reference.greedy(prompt, GREEDY.max_tokens).token_ids for prompt in prompts]
    nodes = start.nodes(*((role, NODE) for role in ("prefill", "prefill", "decode")))
    gateway = start.gateway(nodes[:2], nodes[2:], model=LLAMA)
    before = await status(nodes[1])
    with pytest.raises(InvalidRequest, match="role gateway"):
        await switch(nodes[1], common_pb2.ROLE_GATEWAY)
    load = Load([gateway.address], prompts, answers)
    async with asyncio.TaskGroup() as group:
        loading = group.create_task(load.run())
        await load.until_served(CLIENTS)
        for role, grace_s in ((DECODE, 60.0), (PREFILL, 0.0)):
            first, second = await asyncio.gather(*(switch(nodes[1], role, grace_s=grace_s) for _ in range(2)))
            assert first[-1].info == second[-1].info
            print("switched in", first[-1].elapsed_s)
            assert first[-1].phase == node_pb2.SWITCH_PHASE_DONE
            assert first[-1].info.role == role
            again = await switch(nodes[1], role)
            assert [each.info.incarnation for each in again] == [first[-1].info.incarnation]
            await until_whole(gateway.address, pairs=2)
            await load.until_served(CLIENTS)
        load.end()
        await loading
    for node in nodes:
        await until_status(node, nothing_held)
    after = await status(nodes[1])
    assert after.role_switches == 2
    assert after.info.incarnation != before.info.incarnation
