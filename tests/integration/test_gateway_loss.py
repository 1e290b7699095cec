"""A client of several gateways loses one in the middle of its answers: each is that of one gateway, no token twice."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, cast
from urllib.request import Request, urlopen

import pytest

from baton.client.client import AsyncClient
from baton.client.outputs import Event, Finished, Notice, collect
from baton.core.errors import NoNode
from baton.core.sampling import SamplingParams
from baton.core.types import TokenOutput
from baton.node.waiting import until
from tests.clients.page import blocks
from tests.integration.cluster import DEADLINE_S, LLAMA, Flags, Machines, in_engine, nothing_held, until_status
from tests.integration.proxy import free_address
from tests.integration.reference import Reference

NODE: Flags = {"model": LLAMA, "prefix_cache": False}
TOKENS, STEPS_BEFORE = 24, 6
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=1)
DRAWN = SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=11, ignore_eos=True, presence_penalty=0.5)
CHAT = [{"role": "user", "content": "What is a lock for?"}]


@dataclass
class Answer:
    """What a client has of one answer."""

    text: str = ""
    tokens: list[TokenOutput] = field(default_factory=list)
    content: str = ""
    finished: Finished | None = None

    async def read(self, events: AsyncGenerator[Event, None]) -> None:
        async for event in events:
            assert self.finished is None
            if isinstance(event, Notice):
                continue
            self.text += event.text
            self.tokens += event.tokens
            self.content += event.chat.content if event.chat is not None else ""
            if isinstance(event, Finished):
                self.finished = event

    def same_as(self, other: "Answer") -> None:
        assert [token.token_id for token in self.tokens] == [token.token_id for token in other.tokens]
        assert [token.index for token in self.tokens] == list(range(len(self.tokens)))
        assert (self.text, self.content) == (other.text, other.content)
        assert self.finished is not None
        assert other.finished is not None
        ours, theirs = self.finished, other.finished
        assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
        assert ours.usage.completion_tokens == theirs.usage.completion_tokens == len(self.tokens)
        assert ours.usage.prompt_tokens == theirs.usage.prompt_tokens
        for token, same in zip(self.tokens, other.tokens, strict=True):
            assert token.logprob == pytest.approx(same.logprob, abs=1e-4)
            assert [each for each, _ in token.top_logprobs] == [each for each, _ in same.top_logprobs]


@pytest.fixture(autouse=True)
def _patient_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers wait for a gateway as long as a slow machine needs to have one."""
    monkeypatch.setattr("baton.client.gateways.SHORT_ATTEMPT_S", DEADLINE_S)
    monkeypatch.setattr("baton.client.answer_stream._RESUME_S", DEADLINE_S)


async def test_answers_go_on_at_another_gateway_after_kill_9(start: Machines, reference: Reference) -> None:
    prefill, decode = start.nodes(("prefill", NODE), ("decode", NODE), paused_engine=["decode"])
    first, second = (start.gateway([prefill], [decode], model=LLAMA) for _ in range(2))
    prompt, other = reference.prompts([200, 90])
    known = reference.greedy(prompt, TOKENS).token_ids
    text = reference.tokenizer.decode(known)
    # Ends beyond the tokens that come before the loss, and begins in any token.
    stop = text[len(reference.tokenizer.decode(known[: TOKENS - 6])) - 3 :][:8]
    stopping = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, stop=("never this", stop))
    async with AsyncClient(addresses=[first.address, second.address]) as client, AsyncClient(second.address) as one:
        requests: list[Callable[[AsyncClient], AsyncGenerator[Event, None]]] = [
            lambda of: of.generate(prompt, GREEDY),
            lambda of: of.generate(other, DRAWN),
            lambda of: of.generate(prompt, stopping),
            lambda of: of.stream_chat(CHAT, DRAWN),
        ]
        answers = [Answer() for _ in requests]
        async with asyncio.TaskGroup() as reading:
            for answer, ask in zip(answers, requests, strict=True):
                reading.create_task(answer.read(ask(client)))
            # All are there, with their KV. The chat's prompt is short: the decode node computes it in one step.
            await until_status(decode, lambda last: in_engine(last) == len(requests) and last.blocks_leased == 0)
            start.allow_steps(STEPS_BEFORE + 2, decode)
            assert await until(
                lambda: all(len(answer.tokens) >= STEPS_BEFORE for answer in answers), timeout_s=DEADLINE_S
            )
            assert all(len(answer.tokens) < TOKENS for answer in answers)
            start.kill(first)
            start.let_go(decode)
        for answer, ask in zip(answers, requests, strict=True):
            whole = Answer()
            await whole.read(ask(one))
            answer.same_as(whole)
        assert client.target == second.address
        assert [token.token_id for token in answers[0].tokens] == known
        assert answers[2].finished is not None
        assert answers[2].finished.stop_reason == stop
        assert "continued after" in answers[0].finished.receipt.why  # type: ignore[union-attr]
        # A request that has not begun is sent to the next gateway as well, and so is any other call.
        assert (await collect(client.generate(prompt, GREEDY))).tokens[0].token_id == known[0]
        assert len(await client.tokenize("a lock")) > 0
        await until_status(decode, nothing_held)
        start.kill(second)
        with pytest.raises(NoNode, match="cannot reach"):
            await client.complete(prompt, GREEDY)


def stream_of_the_page(*gateways: str) -> Callable[..., Iterator[Any]]:
    """The function that docs/resuming.md gives to users of OpenAI's client, for these gateways."""
    (block,) = [each.code for each in blocks() if "output_token_ids" in each.code]
    names: dict[str, Any] = {}
    exec(block.partition("\n\n\nfor chunk in")[0], names)
    names["GATEWAYS"][:] = [f"{each}/v1" for each in gateways]
    return cast(Callable[..., Iterator[Any]], names["stream"])


def events_of_chat(gateways: Sequence[str], path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a response or a message, as docs/resuming.md says that a client goes on."""
    token_ids: list[int] = []
    asked = {"model": "llama", "stream": True, "return_token_ids": True, **body}
    for gateway in gateways:
        events: list[dict[str, Any]] = []  # since the last one that has tokens
        question = Request(
            f"{gateway}{path}",
            json.dumps({**asked, "baton": {"output_token_ids": token_ids}}).encode(),
            {"content-type": "application/json", "x-request-id": f"r-{path}"},
        )
        try:
            with urlopen(question, timeout=DEADLINE_S) as answer:
                for line in answer:
                    if not line.startswith(b"data: "):
                        continue
                    events.append(json.loads(line.removeprefix(b"data: ")))
                    if more := events[-1].get("token_ids"):
                        token_ids += more
                        yield from events
                        events.clear()
        except (OSError, HTTPException):
            continue
        if events and events[-1]["type"] in ("response.incomplete", "message_stop"):
            yield from events
            return


def said(events: Sequence[dict[str, Any]]) -> tuple[object, ...]:
    """What all of these events say together, and the last one that sums up."""
    deltas = [event["delta"] for event in events if "delta" in event]
    text = "".join(delta if isinstance(delta, str) else delta.get("text", "") for delta in deltas)
    last = events[-1] if "response" in events[-1] else events[-2]  # message_delta comes before message_stop
    assert "usage" in last.get("response", last), [event["type"] for event in events]
    kinds = [event["type"] for event in events if not event["type"].endswith("delta")]
    return text, last.get("response", {}).get("output"), last.get("response", last)["usage"]["output_tokens"], kinds


async def test_clients_of_http_go_on_at_another_gateway_after_kill_9(start: Machines, reference: Reference) -> None:
    prefill, decode = start.nodes(("prefill", NODE), ("decode", NODE), paused_engine=["decode"])
    first, second = (start.gateway([prefill], [decode], model=LLAMA) for _ in range(2))
    assert first.http is not None
    assert second.http is not None
    both, one = [first.http, second.http], [second.http]
    (prompt,) = reference.prompts([200])
    drawn = {"temperature": 1.0, "seed": 11, "presence_penalty": 0.5}
    request = {"model": "llama", "prompt": prompt, "max_tokens": TOKENS, **drawn}
    of_chats = {"ignore_eos": True, **drawn}
    chats: list[tuple[str, dict[str, Any]]] = [
        ("/v1/responses", {"input": CHAT[0]["content"], "max_output_tokens": TOKENS, **of_chats}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": TOKENS, **of_chats}),
    ]
    chunks: list[Any] = []
    events: list[list[dict[str, Any]]] = [[] for _ in chats]

    def read(gateways: Sequence[str]) -> None:
        chunks.extend(stream_of_the_page(*gateways)(**request))

    def read_chat(number: int, gateways: Sequence[str]) -> None:
        events[number].extend(events_of_chat(gateways, *chats[number]))

    async with asyncio.TaskGroup() as reading:
        reading.create_task(asyncio.to_thread(read, both))
        for number in range(len(chats)):
            reading.create_task(asyncio.to_thread(read_chat, number, both))
        await until_status(decode, lambda last: in_engine(last) == 3 and last.blocks_leased == 0)
        start.allow_steps(STEPS_BEFORE + 2, decode)
        assert await until(
            lambda: len(token_ids_of(chunks)) >= STEPS_BEFORE and all(map(tokens_in, events)), timeout_s=DEADLINE_S
        )
        assert len(token_ids_of(chunks)) < TOKENS
        assert all(tokens_in(each) < TOKENS for each in events)
        start.kill(first)
        start.let_go(decode)
    went_on, chunks = chunks, []
    chats_went_on, events = events, [[] for _ in chats]
    await asyncio.to_thread(read, one)
    for number in range(len(chats)):
        await asyncio.to_thread(read_chat, number, one)
    assert token_ids_of(went_on) == token_ids_of(chunks)
    assert len(token_ids_of(chunks)) == TOKENS
    for texts in (went_on, chunks):
        assert "".join(chunk.choices[0].text for chunk in texts) == "".join(chunk.choices[0].text for chunk in chunks)
        assert texts[-1].choices[0].finish_reason == "length"
    for again, whole in zip(chats_went_on, events, strict=True):
        assert said(again) == said(whole)
        assert said(whole)[2] == TOKENS
    await until_status(decode, nothing_held)


def tokens_in(events: list[dict[str, Any]]) -> int:
    return sum(len(event.get("token_ids", ())) for event in events)


def token_ids_of(chunks: list[Any]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.choices[0].token_ids]


async def test_an_answer_waits_for_a_gateway_to_come_back(start: Machines, reference: Reference) -> None:
    prefill, decode = start.nodes(("prefill", NODE), ("decode", NODE), paused_engine=["decode"])
    lasting = free_address()
    first, second = (
        start.gateway([prefill], [decode], model=LLAMA, listen=listen) for listen in ("127.0.0.1:0", lasting)
    )
    (prompt,) = reference.prompts([100])
    async with AsyncClient(addresses=[first.address, second.address]) as client:
        answer = Answer()
        async with asyncio.TaskGroup() as reading:
            reading.create_task(answer.read(client.generate(prompt, GREEDY)))
            start.allow_steps(STEPS_BEFORE, decode)
            assert await until(lambda: len(answer.tokens) >= STEPS_BEFORE, timeout_s=DEADLINE_S)
            start.kill(first)
            start.kill(second)
            start.let_go(decode)
            # Beside the event loop, so that the client meanwhile finds no gateway.
            await asyncio.to_thread(start.gateway, [prefill], [decode], model=LLAMA, listen=lasting)
        known = reference.greedy(prompt, TOKENS).token_ids
        assert [token.token_id for token in answer.tokens] == known
        await until_status(decode, nothing_held)
