"""A prompt goes to the prefill node that has its beginning in the prefix cache."""

import asyncio
import time
from pathlib import Path

from baton.cli.processes import Process
from baton.client.operators import OperatorClient
from baton.core.sampling import SamplingParams
from baton.protos.internal.v1 import node_pb2, node_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.channels import connect
from tests.integration.cluster import DEADLINE_S, LLAMA, Flags, machines, nothing_held, status, until_status
from tests.integration.generation import Result, generate
from tests.integration.proxy import free_address
from tests.integration.reference import Reference
from tests.integration.test_stores import HOST, SMALL, TOKENS, WHOLE_ENTRIES, answer, until_kept

NODE: Flags = {"model": LLAMA, "block_size": 16, "prefix_cache": True}
DECODE: Flags = {**NODE, "prefix_cache": False}  # it would prefill the short rest of a prompt itself
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


async def until_known(gateway: Process, *nodes: Process) -> None:
    """Waits until the gateway knows that these nodes are idle and ready, and what their caches have."""
    for node in nodes:
        async with connect(node.address) as channel, OperatorClient(gateway.address) as client:
            stream = node_pb2_grpc.NodeStub(channel).WatchCache(node_pb2.WatchCacheRequest())
            newest = await stream.read()
            stream.cancel()
            now = await until_status(node, nothing_held)
            assert isinstance(newest, node_pb2.WatchCacheResponse)
            deadline = time.monotonic() + DEADLINE_S
            while True:
                reports = {report.address: report for report in (await client.cluster_status()).nodes}
                known = reports[node.address]
                current = known.reachable and known.status.info.incarnation == newest.incarnation
                paired = known.status.info.role == node_status_pb2.ROLE_DECODE or any(
                    peer.phase == node_status_pb2.PEER_PHASE_READY for peer in known.status.peers
                )
                idle = nothing_held(known.status) and known.status.requests_total == now.requests_total
                if current and paired and idle and known.cache_sequence >= newest.sequence:
                    break
                assert time.monotonic() < deadline, reports
                await asyncio.sleep(0.005)


async def until_cache_is_known(gateway: Process, node: Process, *, blocks: int = 0) -> None:
    """Waits until the node keeps so many blocks, and until the gateway knows of them. The node may drain."""
    deadline = time.monotonic() + DEADLINE_S
    async with connect(node.address) as channel, OperatorClient(gateway.address) as client:
        while True:
            stream = node_pb2_grpc.NodeStub(channel).WatchCache(node_pb2.WatchCacheRequest())
            newest = await stream.read()
            stream.cancel()
            assert isinstance(newest, node_pb2.WatchCacheResponse)
            if len(newest.stored) >= blocks:
                break
            assert time.monotonic() < deadline, newest
            await asyncio.sleep(0.005)
        while True:
            reports = {report.address: report for report in (await client.cluster_status()).nodes}
            known = reports[node.address]
            is_current = known.status.info.incarnation == newest.incarnation
            if is_current and known.cache_sequence >= newest.sequence:
                return
            assert time.monotonic() < deadline, reports
            await asyncio.sleep(0.005)


class Conversation:
    """Turns that each begin with all of the turn before."""

    def __init__(self, gateway: Process, prompt: list[int]) -> None:
        self._gateway = gateway
        self.tokens = prompt

    async def turn(self, *more: int) -> Result:
        """The next turn adds these tokens, and then its output."""
        self.tokens = [*self.tokens, *more]
        result = await generate(self._gateway, self.tokens, GREEDY)
        self.tokens = [*self.tokens, *result.token_ids]
        return result


async def test_the_next_turn_goes_to_the_node_that_has_the_last_one(reference: Reference) -> None:
    prompts = reference.prompts([100, 100])
    with machines() as start:
        listening = [{**NODE, "listen": free_address()} for _ in range(2)]
        *prefills, decode = start.nodes(*(("prefill", flags) for flags in listening), ("decode", DECODE))
        gateway = start.gateway(prefills, [decode], model=LLAMA, local_policy="strict")
        first, second = (Conversation(gateway, prompt) for prompt in prompts)
        at = {conversation: (await conversation.turn()).proof.prefill_node for conversation in (first, second)}
        assert len(set(at.values())) == 2, "idle nodes take turns"
        for conversation in (second, first, first, second, first):
            await until_known(gateway, *prefills)
            computed = len(conversation.tokens) - GREEDY.resolved().max_tokens
            proof = (await conversation.turn(1, 2, 3)).proof
            assert proof.prefill_node == at[conversation]
            assert proof.prefill_cached_tokens == computed // 16 * 16

        # The first conversation's node comes back without its blocks, so the node chosen longest ago is chosen.
        names = {(await status(node)).info.name: node for node in prefills}
        killed = names[at[first]]
        start.kill(killed)
        (again,) = start.nodes(("prefill", {**NODE, "listen": killed.address}))
        await until_known(gateway, again, decode)
        proof = (await first.turn()).proof
        assert (proof.prefill_node, proof.prefill_cached_tokens) == (at[second], 0)


async def test_prompts_go_to_the_restarted_node_whose_files_have_them(reference: Reference, tmp_path: Path) -> None:
    files: Flags = {**HOST, "file_cache_dir": tmp_path}
    prompts = reference.prompts([TOKENS] * 3)
    with machines() as start:
        prefill, decode = start.nodes(("prefill", {"model": LLAMA, **SMALL, **files}), ("decode", DECODE))
        gateway = start.gateway([prefill], [decode], model=LLAMA, local_policy="strict")
        for prompt in prompts:
            await answer(gateway, reference, prompt)
        await until_kept(prefill, "file", 3 * WHOLE_ENTRIES // 64)
        assert start.end(gateway) == start.end(prefill) == 0

        other, back = start.nodes(
            ("prefill", {"model": LLAMA, **SMALL}),
            ("prefill", {"model": LLAMA, **files, "block_size": 32, "num_blocks": 60}),
        )
        gateway = start.gateway([other, back], [decode], model=LLAMA, local_policy="strict")
        await until_cache_is_known(gateway, back, blocks=3 * WHOLE_ENTRIES // 32)
        await until_known(gateway, other, back, decode)
        for prompt in prompts:
            result = await answer(gateway, reference, prompt)
            assert result.proof.prefill_loaded_tokens == WHOLE_ENTRIES
