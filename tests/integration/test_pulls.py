"""A node pulls KV from another node's host memory and files instead of computing it, and every token stays the same."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from baton.cli.processes import Process
from baton.core import pull_costs
from baton.core.errors import BatonError
from baton.core.sampling import SamplingParams
from baton.core.types import LoadedTokens
from baton.node import pull_link, pull_owner, pulls
from baton.protos.internal.v1 import node_pb2, node_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.channels import connect
from tests.integration.cluster import (
    DEADLINE_S,
    DEEPSEEK,
    LLAMA,
    Flags,
    Machines,
    in_engine,
    machines,
    nothing_held,
    until_status,
)
from tests.integration.generation import Result, generate
from tests.integration.reference import Reference, References
from tests.integration.test_prefix_routing import until_cache_is_known, until_known
from tests.integration.test_stores import ENTRY_BYTES, store, until_kept

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SAID = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
TOKENS = 255
# Of the first turn; its last token has no KV yet.
WHOLE_ENTRIES = (TOKENS + 79) // 64
KEEPS: Flags = {"num_blocks": 120, "max_batch_tokens": 128, "host_cache_gib": 0.02}


def always_pull() -> None:
    """Pulls whatever is missing, however fast this machine computes, and waits for it without a limit."""
    pull_costs.UNMEASURED_TOKENS = 64
    pull_costs.SHARE = 1e9
    pulls.PULL_S_MIN = pull_costs.PULL_S_MAX = DEADLINE_S
    pull_link._OPEN_S = pull_link._ARRIVE_S = DEADLINE_S
    pull_owner._HELLO_S = pull_owner._SERVE_S = DEADLINE_S


@pytest.fixture
def start() -> Iterator[Machines]:
    with machines() as started:
        yield started


@pytest.fixture
def reference(references: References) -> Reference:
    return references[LLAMA]


class TwoTurns:
    """A conversation whose first turn a node has served that takes no further request, because it drains."""

    def __init__(
        self,
        start: Machines,
        reference: Reference,
        owner: Process,
        *,
        model: Path = LLAMA,
        tokens: int = TOKENS,
        others: int = 0,
    ) -> None:
        self.start = start
        self.owner = owner
        self.model = model
        self.tokens = tokens
        self.others = others  # prompts that the node serves after the first turn
        self._reference = reference
        self._stays: asyncio.Task[Result] | None = None

    async def first(self) -> list[int]:
        """Serves the first turn; returns the prompt of the second one."""
        first, *others = self._reference.prompts([self.tokens, 30, 20, *[self.tokens] * self.others])
        self.start.let_go(self.owner)
        gateway = self.start.gateway([], [self.owner], model=self.model)
        turn = await generate(gateway, first, SAID)
        await until_kept(self.owner, "host", (self.tokens + 79) // 64)
        for prompt in others[2:]:
            await generate(gateway, prompt, GREEDY)
        await until_status(self.owner, nothing_held)  # the last save is over, also that of a state
        self.start.allow_steps(0, self.owner)
        self._stays = asyncio.create_task(generate(gateway, others[0], GREEDY))  # so that the drain does not end
        await until_status(self.owner, lambda last: in_engine(last) > 0)
        async with connect(self.owner.address) as channel:
            await node_pb2_grpc.NodeStub(channel).Drain(node_pb2.DrainRequest(grace_s=DEADLINE_S))
        return [*first, *turn.token_ids, *others[1]]

    async def answer(self, gateway: Process, prompt: list[int]) -> Result:
        """The answer to a prompt; its tokens are those of the reference."""
        await until_cache_is_known(gateway, self.owner)
        result = await generate(gateway, prompt, GREEDY)
        assert result.token_ids == self._reference.greedy(prompt, GREEDY.resolved().max_tokens).token_ids
        return result

    async def close(self) -> None:
        if self._stays is not None:
            self._stays.cancel()
            with suppress(asyncio.CancelledError, BatonError):
                await self._stays


UNLIKE: Flags = {"block_size": 32, "num_blocks": 60, "kv_cache_layout": "BLHNC"}
TWO: Flags = {"tensor_parallel_size": 2}
OWN: Flags = {"tensor_parallel_size": 2, "expert_parallel": True, "attention_data_parallel": True}


@pytest.mark.parametrize(
    ("model", "of_owner", "of_reader"),
    [
        pytest.param(LLAMA, {}, UNLIKE, id="llama"),
        pytest.param(DEEPSEEK, {}, {**UNLIKE, "kv_cache_layout": "BLNC"}, id="deepseek"),
        pytest.param(LLAMA, TWO, UNLIKE, id="llama-2-ranks-to-1"),
        pytest.param(LLAMA, {}, {**TWO, **UNLIKE}, id="llama-1-rank-to-2"),
        pytest.param(DEEPSEEK, OWN, TWO, id="deepseek-own-requests-to-2-ranks", marks=pytest.mark.slow),
        pytest.param(DEEPSEEK, TWO, OWN, id="deepseek-2-ranks-to-own-requests", marks=pytest.mark.slow),
    ],
)
async def test_the_second_turn_on_another_node_computes_only_the_new_text(
    start: Machines, references: References, model: Path, of_owner: Flags, of_reader: Flags
) -> None:
    """The nodes have unlike layouts, block sizes or ranks, and a part of the first turn was decoded."""
    owner, reader = start.nodes(
        ("decode", {"model": model, **KEEPS, **of_owner}),
        ("decode", {"model": model, **KEEPS, **of_reader}),
        paused_engine=["decode"],
        prepare=always_pull,
    )
    start.let_go(reader)
    turns = TwoTurns(start, references[model], owner, model=model)
    second = await turns.first()
    gateway = start.gateway([], [owner, reader], model=model)
    result = await turns.answer(gateway, second)
    assert result.proof.decode_loaded == LoadedTokens(peer=WHOLE_ENTRIES * 64)
    assert result.proof.decode_loaded_tokens == WHOLE_ENTRIES * 64
    ranks = 2 if of_reader.get("tensor_parallel_size") == 2 and "attention_data_parallel" not in of_reader else 1
    status = await until_status(reader, lambda last: store(last, "peer").loaded_total == ranks * WHOLE_ENTRIES)
    assert store(status, "peer").failed_total == store(status, "peer").damaged_total == 0
    await turns.close()


async def test_what_only_the_cache_of_the_owner_has_is_pulled_too(start: Machines, reference: Reference) -> None:
    """The owner's host memory has room for nine entries, and later prompts took the places of the first turn."""
    small: Flags = {**KEEPS, "host_cache_gib": 9 * ENTRY_BYTES / (1 << 30)}
    owner, reader = start.nodes(
        ("decode", {"model": LLAMA, **small}),
        ("decode", {"model": LLAMA, **KEEPS, **UNLIKE}),
        paused_engine=["decode"],
        prepare=always_pull,
    )
    start.let_go(reader)
    turns = TwoTurns(start, reference, owner, others=3)
    second = await turns.first()
    gateway = start.gateway([], [owner, reader], model=LLAMA)
    result = await turns.answer(gateway, second)
    assert result.proof.decode_loaded == LoadedTokens(peer=WHOLE_ENTRIES * 64)
    await turns.close()


async def test_a_gateway_counts_on_a_pull_once_a_node_has_measured_its_steps_and_the_receipt_says_so(
    start: Machines, reference: Reference
) -> None:
    long: Flags = {**KEEPS, "num_blocks": 200}
    owner, reader = start.nodes(
        ("decode", {"model": LLAMA, **long}),
        ("decode", {"model": LLAMA, **long, "block_size": 32, "num_blocks": 100}),
        paused_engine=["decode"],
        prepare=always_pull,
    )
    start.let_go(reader)
    tokens = 767
    turns = TwoTurns(start, reference, owner, tokens=tokens)
    second = await turns.first()
    gateway = start.gateway([], [owner, reader], model=LLAMA, local_policy="elastic")
    (other,) = reference.prompts([300])
    await generate(gateway, other[::-1], GREEDY)  # another beginning, and on the reader, because the owner drains
    await until_status(reader, lambda last: last.HasField("step_costs"))
    result = await turns.answer(gateway, second)
    whole = (tokens + 79) // 64 * 64
    assert result.proof.decode_loaded_tokens == whole
    assert f"pulls {whole} tokens from " in result.proof.why
    await turns.close()


async def test_a_prefill_node_pulls_the_decoded_part_of_a_conversation_from_the_decode_node(
    start: Machines, reference: Reference
) -> None:
    """The usual pair: the prompt of the second turn is computed where the first turn's answer never was."""
    long: Flags = {**KEEPS, "num_blocks": 200}
    prefill, decode = start.nodes(
        ("prefill", {"model": LLAMA, **long, "block_size": 32, "num_blocks": 100}),
        ("decode", {"model": LLAMA, **long}),
        prepare=always_pull,
    )
    gateway = start.gateway([prefill], [decode], model=LLAMA, local_policy="strict")
    first, more = reference.prompts([TOKENS, 30])
    said = SamplingParams(max_tokens=260, temperature=0.0, ignore_eos=True)
    turn = await generate(gateway, first, said)
    entries = (TOKENS + 259) // 64
    await until_kept(decode, "host", entries)
    await until_known(gateway, decode)
    second = [*first, *turn.token_ids, *more]
    result = await generate(gateway, second, GREEDY)
    assert result.token_ids == reference.greedy(second, GREEDY.resolved().max_tokens).token_ids
    # Its own cache had the first turn's prompt.
    assert result.proof.prefill_cached_tokens == entries * 64
    assert result.proof.prefill_loaded_tokens == entries * 64 - TOKENS // 64 * 64
    await until_status(prefill, lambda last: store(last, "peer").loaded_total > 0)
    # A switch of roles ends the link, which is still there.
    async with connect(prefill.address) as channel:
        wanted = node_pb2.SwitchRoleRequest(role=node_status_pb2.ROLE_DECODE, grace_s=DEADLINE_S)
        async for progress in node_pb2_grpc.NodeStub(channel).SwitchRole(wanted):
            last_phase = progress.phase
    assert last_phase == node_status_pb2.SWITCH_PHASE_DONE
