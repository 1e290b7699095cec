"""Draft tokens next to everything else that a request can have, on real processes: outputs and logprobs equal those
of a node that drafts nothing."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from baton.cli.processes import Process
from baton.client.client import AsyncClient
from baton.client.operators import OperatorClient
from baton.client.outputs import Completion
from baton.core.errors import DeadlineExceeded
from baton.core.sampling import SamplingParams
from baton.core.types import Grammar, GrammarKind
from baton.protos.v1 import node_status_pb2
from tests.integration.chatting import TEMPLATE
from tests.integration.cluster import (
    LLAMA,
    Flags,
    Machines,
    in_engine,
    machines,
    nothing_held,
    until_status,
)
from tests.integration.test_tokens import LOGPROB_TOLERANCE
from tests.unit.engine.test_grammar import GRAMMARS
from tests.unit.models.lora import save_adapter

DRAWN = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True, logprobs=2)
GREEDY = replace(DRAWN, temperature=0.0)
SEEK = {
    "type": "function",
    "function": {
        "name": "seek",
        "parameters": {
            "type": "object",
            "properties": {"whence": {"enum": ["start", "end"]}, "offset": {"type": "integer", "maximum": 999}},
            "required": ["whence", "offset"],
            "additionalProperties": False,
        },
    },
}
# What a client asks: from a client and a prompt that says everything twice to the outputs.
Ask = Callable[[AsyncClient, list[int]], Awaitable[list[Completion]]]


def completed(params: SamplingParams, *, n: int = 1, **options: Any) -> Ask:
    return lambda client, prompt: client.complete(prompt, params, n=n, **options)


def tool_called(client: AsyncClient, prompt: list[int]) -> Awaitable[list[Completion]]:
    asked = [{"role": "user", "content": f"Go to the end of file {prompt[0]}, and back to its start."}]
    params = SamplingParams(max_tokens=120, temperature=1.0, seed=3, logprobs=1)
    return client.chat(asked, params, n=1, tools=[SEEK], tool_choice="required", parallel_tool_calls=False)


def constrained(kind: GrammarKind) -> Ask:
    grammar = Grammar(kind, GRAMMARS[kind][0])
    return completed(SamplingParams(max_tokens=60, temperature=1.0, seed=4, logprobs=1, grammar=grammar))


ASKED: dict[str, Ask] = {
    "an adapter": completed(GREEDY, model="one"),
    "another adapter": completed(DRAWN, model="two"),
    "no adapter": completed(GREEDY),
    "several outputs": completed(DRAWN, n=3),
    "several outputs of an adapter": completed(replace(DRAWN, min_p=0.1), n=2, model="one"),
    "biased": completed(replace(GREEDY, logit_bias={7: 5.0, 9: 4.0})),
    "min_p": completed(replace(DRAWN, temperature=1.5, min_p=0.2)),
    "penalties": completed(replace(GREEDY, repetition_penalty=1.1, frequency_penalty=0.2)),
    "prompt logprobs": completed(replace(GREEDY, prompt_logprobs=1)),
    "another tenant": completed(GREEDY, cache_salt="tenant"),
    "a structural tag": constrained(GrammarKind.STRUCTURAL_TAG),
    "a regular expression": constrained(GrammarKind.REGEX),
    "a tool": tool_called,
}


class Cluster(NamedTuple):
    """Gateways of a decode node that drafts and of one that does not, with one prefill node."""

    start: Machines
    prefill: Process
    speculating: Process
    plain: Process
    gateways: dict[bool, Process]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    root = tmp_path_factory.mktemp("cluster")
    names = ("one", "two")
    adapters = ",".join(f"{name}={save_adapter(LLAMA, root / name, seed=n)}" for n, name in enumerate(names))
    template = root / "template.jinja"
    template.write_text(TEMPLATE)
    node: Flags = {"num_blocks": 512, "adapter": adapters, "max_adapters": 2}
    with machines() as start:
        prefill, speculating, plain = start.nodes(
            ("prefill", node),
            ("decode", {**node, "speculation": "always"}),
            ("decode", {**node, "speculation": "off"}),
        )
        gateways = {
            drafts: start.gateway([prefill], [decode], local_policy="strict", chat_template=template)
            for drafts, decode in ((True, speculating), (False, plain))
        }
        yield Cluster(start, prefill, speculating, plain, gateways)


def twice(*lengths: int) -> list[list[int]]:
    """Prompts of twice these lengths that say everything twice."""
    halves = [[3 + (length + 31 * place * place) % 2000 for place in range(length)] for length in lengths]
    return [[*half, *half] for half in halves]


def assert_equal(ours: list[Completion], expected: list[Completion], about: str) -> None:
    assert len(ours) == len(expected), about
    for one, other in zip(ours, expected, strict=True):
        assert [token.token_id for token in one.tokens] == [token.token_id for token in other.tokens], about
        assert (one.raw_text, one.finish_reason, one.stop_reason) == (
            other.raw_text,
            other.finish_reason,
            other.stop_reason,
        ), about
        assert [call.arguments for call in one.tool_calls] == [call.arguments for call in other.tool_calls], about
        for our, their in zip(one.tokens, other.tokens, strict=True):
            assert our.logprob == pytest.approx(their.logprob, abs=LOGPROB_TOLERANCE), about
            assert [token for token, _ in our.top_logprobs] == [token for token, _ in their.top_logprobs], about


def drafted(outputs: list[Completion]) -> int:
    return sum(each.receipt.drafted_tokens for each in outputs)


async def ask_all(gateway: Process, asked: Mapping[str, Ask], prompts: list[list[int]]) -> dict[str, list[Completion]]:
    """All at once."""
    async with AsyncClient(gateway.address) as client:
        answers = await asyncio.gather(*(ask(client, prompt) for ask in asked.values() for prompt in prompts))
    per_kind = len(prompts)
    return {
        name: [each for outputs in answers[number * per_kind :][:per_kind] for each in outputs]
        for number, name in enumerate(asked)
    }


async def test_every_kind_of_request_has_the_outputs_of_a_node_without_drafts(cluster: Cluster) -> None:
    prompts = twice(40)
    expected = await ask_all(cluster.gateways[False], ASKED, prompts)
    assert not any(map(drafted, expected.values()))
    for repeated in (False, True):
        ours = await ask_all(cluster.gateways[True], ASKED, prompts)
        for name, outputs in ours.items():
            assert_equal(outputs, expected[name], name)
            # The second time, all of it was answered before.
            assert drafted(outputs) or not repeated, name
        assert (ours["no adapter"][0].usage.cached_tokens > 0) >= repeated
    await until_status(cluster.speculating, nothing_held)


async def test_texts_that_end_an_output_may_lie_across_drafts(cluster: Cluster) -> None:
    """The stop string begins within a token and ends within another one, and all of them are drafted."""
    (prompt,) = twice(40)
    async with AsyncClient(cluster.gateways[False].address) as plain:
        whole = await plain.complete(prompt, GREEDY)
        half = len(whole.text) // 2
        stops = [
            whole.text[place : place + length] for place, length in ((half, 7), (half + 1, 12), (3 * half // 2, 9))
        ]
        asked = {stop: completed(replace(GREEDY, stop=(stop,))) for stop in stops}
        asked |= {f"{stop}, kept": completed(replace(GREEDY, stop=(stop,), include_stop=True)) for stop in stops}
    expected = await ask_all(cluster.gateways[False], asked, [prompt])
    for _ in range(2):
        ours = await ask_all(cluster.gateways[True], asked, [prompt])
        for name, outputs in ours.items():
            assert_equal(outputs, expected[name], name)
            assert outputs[0].stop_reason
    assert any(map(drafted, ours.values()))
    await until_status(cluster.speculating, nothing_held)


async def test_as_many_drafts_are_accepted_after_a_hand_over_as_in_one_process(cluster: Cluster) -> None:
    """From the first step of the decode node on. Each of two new nodes has answered nothing else, because chances are
    learned from all that a node answers. One process has looked up the first token too, so that its chances differ a
    little, and it takes a few drafts fewer or more."""
    flags: Flags = {"num_blocks": 256, "speculation": "always"}
    after, alone = cluster.start.nodes(("decode", flags), ("decode", flags))
    gateways = (
        cluster.start.gateway([cluster.prefill], [after], local_policy="strict"),
        cluster.start.gateway([], [alone], local_policy="local"),
    )
    asked, kept = {"": completed(replace(GREEDY, max_tokens=400, frequency_penalty=-1.0))}, []
    for gateway in gateways:
        # One after another, so that both nodes know the same answers at each time.
        outputs = [(await ask_all(gateway, asked, [prompt]))[""][0] for prompt in twice(30, 40, 50, 60)]
        kept.append(sum(each.receipt.accepted_tokens for each in outputs))
    assert kept[1] > 1000
    assert kept[0] == pytest.approx(kept[1], rel=0.01)


async def test_cancelled_requests_leave_nothing_and_disturb_nobody(cluster: Cluster) -> None:
    prompts = twice(20, 30, 40)
    expected = await ask_all(cluster.gateways[False], {"": completed(GREEDY)}, prompts)
    endless = replace(GREEDY, max_tokens=3000, logprobs=None)
    async with AsyncClient(cluster.gateways[True].address) as client:

        async def cancelled(prompt: list[int], count: int) -> None:
            seen = 0
            async for _ in client.generate(prompt, endless):
                seen += 1
                if seen >= count:
                    break

        others = [asyncio.create_task(cancelled(prompt, count)) for prompt in prompts for count in (2, 7)]
        for _ in range(2):  # the second time, what was answered before is drafted
            ours = await ask_all(cluster.gateways[True], {"": completed(GREEDY)}, prompts)
        await asyncio.gather(*others)
    assert_equal(ours[""], expected[""], "next to others that end early")
    assert drafted(ours[""])
    await until_status(cluster.speculating, nothing_held)


async def test_requests_that_are_late_or_preempted_leave_nothing_and_go_on_with_drafts(cluster: Cluster) -> None:
    """The cache is too small for all of them."""
    flags: Flags = {"model": LLAMA, "num_blocks": 34, "speculation": "always"}
    (small,) = cluster.start.nodes(("decode", flags), paused_engine=["decode"])
    gateway = cluster.start.gateway([], [small], model=LLAMA, local_policy="local")
    asked, prompts = {"": completed(replace(DRAWN, max_tokens=70))}, twice(*range(30, 42, 2))
    cluster.start.allow_steps(4, small)  # and none after them
    async with AsyncClient(gateway.address) as client:
        with pytest.raises(DeadlineExceeded):
            await client.complete(prompts[0], GREEDY, timeout_s=1.0)
    cluster.start.let_go(small)
    await until_status(small, nothing_held)
    cluster.start.allow_steps(0, small)
    asking = asyncio.create_task(ask_all(gateway, asked, prompts))
    await until_status(small, lambda last: in_engine(last) == len(prompts))  # otherwise one may end before others come
    cluster.start.let_go(small)
    ours = await asking
    assert_equal(ours[""], (await ask_all(cluster.gateways[False], asked, prompts))[""], "preempted")
    assert drafted(ours[""])
    last = await until_status(small, nothing_held)
    assert last.preemptions > 0


async def test_requests_go_on_where_nothing_is_drafted_when_their_node_switches_its_role(cluster: Cluster) -> None:
    """The last test of the cluster: the node that drafts becomes a prefill node, and one that decodes again."""
    gateway = cluster.start.gateway([cluster.prefill], [cluster.speculating, cluster.plain], local_policy="strict")
    prompts = twice(*range(20, 44, 3))
    long = {"": completed(replace(GREEDY, max_tokens=60))}
    expected = (await ask_all(cluster.gateways[False], long, prompts))[""]
    async with OperatorClient(gateway.address) as client:
        for role in (node_status_pb2.ROLE_PREFILL, node_status_pb2.ROLE_DECODE):
            asking = asyncio.create_task(ask_all(gateway, long, prompts))
            await client.switch_role(cluster.speculating.address, role, grace_s=0.0)
            assert_equal((await asking)[""], expected, "a role is switched")
    alone = cluster.start.gateway([cluster.prefill], [cluster.speculating], local_policy="strict")
    again = (await ask_all(alone, long, prompts))[""]
    assert_equal(again, expected, "after both switches")
    assert drafted(again)
    for node in (cluster.prefill, cluster.speculating, cluster.plain):
        await until_status(node, nothing_held)
