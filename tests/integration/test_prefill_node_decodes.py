"""A prefill node that also decodes: it serves whole requests while it computes prompts for a decode node."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace

import pytest
from tokenizers import Tokenizer

from baton.cli.processes import Process
from baton.core.errors import Draining, InvalidRequest
from baton.core.sampling import SamplingParams
from baton.core.types import Grammar, GrammarKind
from baton.core.types import Path as RequestPath
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.internal.v1 import decode_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.channels import connect
from baton.settings.config import tokenizer_file
from tests.integration.cluster import LLAMA, Flags, Machines, in_engine, machines, nothing_held, status, until_status
from tests.integration.generation import generate
from tests.integration.reference import Reference
from tests.integration.session import Session, session

# Small steps: a prompt takes several, so that decodes of other requests share them.
NODE: Flags = {"model": LLAMA, "max_batch_tokens": 24, "num_blocks": 256}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Cluster:
    start: Machines
    prefill: Process
    decode: Process
    gateway: Process

    async def hold(self) -> None:
        """The prefill node runs no step from now on."""
        self.start.allow_steps(0, self.prefill)
        await status(self.prefill)  # which it answers after it has received that


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The prefill node has two ranks, and steps only as tests allow."""
    with machines() as start:
        prefill, decode = start.nodes(
            ("prefill", {**NODE, "tensor_parallel_size": 2}), ("decode", NODE), paused_engine=["prefill"]
        )
        yield Cluster(start, prefill, decode, start.gateway([prefill], [decode], model=LLAMA, local_policy="strict"))


@pytest.fixture
async def opened(cluster: Cluster) -> AsyncIterator[Session]:
    cluster.start.let_go(cluster.prefill)
    async with session(cluster.prefill) as stream:
        yield stream
    await until_status(cluster.prefill, nothing_held)
    await until_status(cluster.decode, nothing_held)


async def test_whole_requests_and_prompts_for_a_decode_node_get_the_tokens_of_one_process(
    cluster: Cluster, opened: Session, reference: Reference
) -> None:
    prompts = reference.prompts([200, 150, 90, 33, 120, 60])
    await cluster.hold()
    scored = replace(GREEDY, prompt_logprobs=0)
    whole = [opened.submit(prompt, scored if index == 2 else LONG) for index, prompt in enumerate(prompts[:3])]
    calls = [asyncio.create_task(generate(cluster.gateway, prompt, GREEDY)) for prompt in prompts[3:]]
    await until_status(cluster.prefill, lambda last: in_engine(last) == 6)
    cluster.start.let_go(cluster.prefill)
    remote = await asyncio.gather(*calls)
    for request, prompt in zip(whole, prompts, strict=False):
        await request.released()
        assert request.kinds == ["accepted", "released"]
        assert request.finished
        assert request.token_ids == reference.greedy(prompt, len(request.token_ids)).token_ids
    assert [len(request.token_ids) for request in whole] == [60, 60, 12]
    assert [each.token_id for each in whole[2].prompt_logprobs] == prompts[2]
    for result, prompt in zip(remote, prompts[3:], strict=True):
        assert result.token_ids == reference.greedy(prompt, 12).token_ids
        assert result.proof.path is RequestPath.REMOTE


async def test_prefixes_and_grammars_work_for_whole_requests(
    cluster: Cluster, opened: Session, reference: Reference
) -> None:
    (prompt,) = reference.prompts([100])
    remote = await generate(cluster.gateway, prompt, GREEDY)
    whole = opened.submit(prompt, GREEDY)
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"enum": ["monday", "friday"]}))
    constrained = opened.submit(prompt, SamplingParams(max_tokens=40, temperature=1.0, seed=3, grammar=grammar))
    await asyncio.gather(whole.released(), constrained.released())
    assert whole.cached_tokens == 96
    assert whole.token_ids == remote.token_ids
    text = Tokenizer.from_file(str(tokenizer_file(LLAMA))).decode(constrained.token_ids)
    assert json.loads(text) in ("monday", "friday")


async def test_the_status_covers_both_kinds_and_says_that_the_node_also_decodes(
    cluster: Cluster, opened: Session, reference: Reference
) -> None:
    prompts = reference.prompts([40, 300])
    before = await status(cluster.prefill)
    assert before.info.also_decodes
    assert before.info.role == node_status_pb2.ROLE_PREFILL
    assert not (await status(cluster.decode)).info.also_decodes
    await cluster.hold()
    whole = opened.submit(prompts[0], LONG)
    await until_status(cluster.prefill, lambda last: last.requests_running == 1)
    cluster.start.allow_steps(4, cluster.prefill)  # two for the prompt
    await whole.until_tokens(3)  # all four are used
    remote = asyncio.create_task(generate(cluster.gateway, prompts[1], GREEDY))
    both = await until_status(cluster.prefill, lambda last: in_engine(last) == 2)
    assert both.decode_rows == 1
    assert both.tokens_waiting == 300
    cluster.start.let_go(cluster.prefill)
    await asyncio.gather(remote, whole.released())
    after = await status(cluster.prefill)
    assert after.requests_total == before.requests_total + 2


async def test_the_end_of_a_gateway_frees_its_requests_and_no_others(cluster: Cluster, reference: Reference) -> None:
    prompts = reference.prompts([80, 90, 300])
    await cluster.hold()
    async with session(cluster.prefill) as other:
        kept = other.submit(prompts[0], LONG)
        async with session(cluster.prefill) as lost:
            decoding = lost.submit(prompts[1], LONG)
            await until_status(cluster.prefill, lambda last: in_engine(last) == 2)
            cluster.start.allow_steps(40, cluster.prefill)  # enough for both prompts, and for neither output
            await asyncio.gather(decoding.until_tokens(2), kept.until_tokens(2))
            await cluster.hold()
            remote = asyncio.create_task(generate(cluster.gateway, prompts[2], GREEDY))
            waiting = lost.submit(prompts[2], LONG)
            await waiting.until(lambda: waiting.kinds == ["accepted"])
            await until_status(cluster.prefill, lambda last: in_engine(last) == 4)
        await until_status(cluster.prefill, lambda last: in_engine(last) == 2 and last.decode_rows == 1)
        cluster.start.let_go(cluster.prefill)
        await kept.released()
    assert kept.token_ids == reference.greedy(prompts[0], 60).token_ids
    assert (await remote).token_ids == reference.greedy(prompts[2], 12).token_ids
    await until_status(cluster.prefill, nothing_held)


@pytest.mark.parametrize(
    ("placement", "policy"),
    [
        (pb.PLACEMENT_REMOTE, pb.LOCAL_POLICY_PREFER),
        (pb.PLACEMENT_SPLIT, pb.LOCAL_POLICY_PREFER),
        (pb.PLACEMENT_UNSPECIFIED, pb.LOCAL_POLICY_PREFER),
        (pb.PLACEMENT_LOCAL, pb.LOCAL_POLICY_STRICT),
    ],
)
async def test_a_request_that_needs_a_hand_over_is_refused(
    cluster: Cluster, opened: Session, placement: pb.Placement.ValueType, policy: pb.LocalPolicy.ValueType
) -> None:
    name = (await status(cluster.prefill)).info.name
    for knows_role, kind in ((True, InvalidRequest), (False, Draining)):
        refused = opened.submit(range(10, 50), GREEDY, placement=placement, policy=policy, to_prefill_node=knows_role)
        await refused.released()
        assert refused.kinds == ["failed", "released"]
        assert isinstance(refused.error, kind)
        assert f"{name} is a prefill node" in str(refused.error)


async def test_messages_about_leases_change_nothing(cluster: Cluster, opened: Session, reference: Reference) -> None:
    (prompt,) = reference.prompts([50])
    whole = opened.submit(prompt, GREEDY)
    opened.send(pb.SessionRequest(renew=pb.RenewTicket(key=whole.key, failed_lease=1)))
    opened.send(pb.SessionRequest(here=pb.PrefillHere(key=whole.key, failed_lease=1)))
    await whole.released()
    assert whole.token_ids == reference.greedy(prompt, 12).token_ids


async def test_another_prefill_node_cannot_pair_with_it(cluster: Cluster) -> None:
    async with connect(cluster.prefill.address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Pair()
        await call.write(pb.PairRequest(hello=pb.PairHello(info=(await status(cluster.prefill)).info)))
        response = await call.read()
    assert isinstance(response, pb.PairResponse)
    assert [mismatch.field for mismatch in response.refused.mismatches] == ["role"]


async def test_a_draining_node_finishes_both_kinds_and_refuses_more(start: Machines, reference: Reference) -> None:
    prompts = reference.prompts([80, 300])
    prefill, decode = start.nodes(("prefill", NODE), ("decode", NODE), paused_engine=["prefill"])
    gateway = start.gateway([prefill], [decode], model=LLAMA, local_policy="strict")
    async with session(prefill) as opened:
        start.allow_steps(6, prefill)
        whole = opened.submit(prompts[0], GREEDY)
        await whole.until_tokens(1)
        remote = asyncio.create_task(generate(gateway, prompts[1], GREEDY))
        await until_status(prefill, lambda last: last.tokens_waiting > 0)
        ended = asyncio.create_task(asyncio.to_thread(start.end, prefill))
        await until_status(prefill, lambda last: last.draining)
        refused = opened.submit(prompts[1], GREEDY)
        await refused.released()
        assert isinstance(refused.error, Draining)
        start.let_go(prefill)
        await whole.released()
        assert whole.token_ids == reference.greedy(prompts[0], 12).token_ids
        assert (await remote).token_ids == reference.greedy(prompts[1], 12).token_ids
        assert await ended == 0
        await whole.until(lambda: opened.ended)


async def test_a_node_that_only_computes_prompts_has_no_decode_service(start: Machines) -> None:
    (prefill,) = start.nodes(("prefill", {**NODE, "also_decodes": "false"}))
    assert not (await status(prefill)).info.also_decodes
    async with session(prefill) as opened:
        refused = opened.submit(range(10, 50), GREEDY)
        await refused.until(lambda: opened.ended)
    assert refused.kinds == []
