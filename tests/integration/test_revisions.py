"""Two revisions of the weights serve at once: every answer is that of one of them, also while one takes over."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file, save_file

from baton.cli.processes import Process
from baton.cli.status_json import to_json
from baton.client.operators import OperatorClient
from baton.client.outputs import Notice
from baton.core.errors import NoNode
from baton.core.sampling import SamplingParams
from baton.node.waiting import until
from tests.integration.cluster import DEADLINE_S, LLAMA, Flags, Machines, in_engine, machines, until_status
from tests.integration.reference import Reference

NODE: Flags = {"num_blocks": 256, "prefix_cache": False}
TOKENS, STEPS_BEFORE = 24, 6
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
CLIENTS = 3


class Pair(NamedTuple):
    prefill: Process
    decode: Process


class Two(NamedTuple):
    start: Machines
    old: Pair
    new: Pair
    new_weights: Path


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    """Nodes of the demo Llama, and of one whose logits have the other sign."""
    other = tmp_path_factory.mktemp("weights") / "llama"
    shutil.copytree(LLAMA, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = -tensors["model.norm.weight"]
    save_file(tensors, other / "model.safetensors")
    old, new = {**NODE, "model": LLAMA, "model_revision": "v1"}, {**NODE, "model": other, "model_revision": "v2"}
    with machines() as start:
        nodes = start.nodes(
            ("prefill", old), ("decode", old), ("prefill", new), ("decode", new), paused_engine=["decode"]
        )
        start.let_go(nodes[3])
        yield Two(start, Pair(*nodes[:2]), Pair(*nodes[2:]), other)


@pytest.fixture(autouse=True)
def _patient_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer goes on at the other gateway, however late a slow machine has it answer."""
    monkeypatch.setattr("baton.client.gateways.SHORT_ATTEMPT_S", DEADLINE_S)
    monkeypatch.setattr("baton.client.answer_stream._RESUME_S", DEADLINE_S)


class Answer:
    """What a client has of one answer."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.error: NoNode | None = None

    async def read(self, client: OperatorClient, prompt: list[int]) -> None:
        try:
            async for event in client.generate(prompt, GREEDY):
                if not isinstance(event, Notice):
                    self.token_ids += [token.token_id for token in event.tokens]
        except NoNode as error:
            self.error = error


async def until_serving(client: OperatorClient, names: list[str]) -> None:
    """Returns when the gateway has nodes of these revisions only."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            (card,) = await client.list_models()
            if [each.name for each in card.revisions] == names:
                return
            await asyncio.sleep(0.02)


async def test_an_answer_goes_on_with_its_weights_at_another_gateway_or_ends_with_an_error(
    two: Two, reference: Reference
) -> None:
    start, old, new = two.start, two.old, two.new
    first = start.gateway([old.prefill], [old.decode], model=LLAMA)
    only_new = start.gateway([new.prefill], [new.decode], model=LLAMA)
    with_both = start.gateway([old.prefill, new.prefill], [old.decode, new.decode], model=LLAMA)
    (prompt,) = reference.prompts([120])
    known = reference.greedy(prompt, TOKENS).token_ids
    ends, goes_on = Answer(), Answer()
    async with (
        OperatorClient(addresses=[first.address, only_new.address]) as to_new,
        OperatorClient(addresses=[first.address, with_both.address]) as to_both,
        asyncio.TaskGroup() as reading,
    ):
        reading.create_task(ends.read(to_new, prompt))
        reading.create_task(goes_on.read(to_both, prompt))
        await until_status(old.decode, lambda last: in_engine(last) == 2 and last.blocks_leased == 0)
        start.allow_steps(STEPS_BEFORE, old.decode)
        both = (ends, goes_on)
        assert await until(lambda: all(len(each.token_ids) >= 2 for each in both), timeout_s=DEADLINE_S)
        start.kill(first)
        start.let_go(old.decode)
    assert goes_on.error is None
    assert goes_on.token_ids == known
    assert ends.error is not None
    assert ends.error.field == "revision"
    assert 2 <= len(ends.token_ids) < TOKENS
    assert ends.token_ids == known[: len(ends.token_ids)]


async def test_new_weights_replace_old_ones_under_load(two: Two, reference: Reference) -> None:
    """Ends the old nodes."""
    start, old, new = two.start, two.old, two.new
    start.let_go(old.decode)
    others = Reference(two.new_weights)
    prompts = reference.prompts([40, 90, 150])
    answers = [
        {tuple(each.greedy(prompt, TOKENS).token_ids): name for each, name in ((reference, "v1"), (others, "v2"))}
        for prompt in prompts
    ]
    gateway = start.gateway([old.prefill, new.prefill], [old.decode, new.decode], model=LLAMA)
    served = after = 0
    replaced, over = asyncio.Event(), asyncio.Event()

    async def ask(client: OperatorClient, number: int) -> None:
        nonlocal served, after
        while not over.is_set():
            number = (number + 1) % len(prompts)
            late = replaced.is_set()
            completion = await client.complete(prompts[number], GREEDY, timeout_s=DEADLINE_S)
            revision = answers[number][tuple(token.token_id for token in completion.tokens)]
            assert completion.receipt.revision_name == revision
            assert not late or revision == "v2"
            served += 1
            after += late

    async def until_served(more: int) -> None:
        wanted = served + more
        assert await until(lambda: served >= wanted, timeout_s=DEADLINE_S)

    async with OperatorClient(gateway.address) as client, asyncio.TaskGroup() as group:
        assert str(to_json(await client.cluster_status())["mixed"]).startswith("mixed revisions of the weights: v")
        for number in range(CLIENTS):
            group.create_task(ask(client, number))
        await until_served(CLIENTS)
        for node in old:
            assert await asyncio.to_thread(start.end, node) == 0
            await until_served(CLIENTS)
        await until_serving(client, ["v2"])
        replaced.set()
        assert await until(lambda: after >= CLIENTS, timeout_s=DEADLINE_S)
        over.set()
