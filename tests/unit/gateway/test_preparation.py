"""A client's message becomes a checked request: prompt tokens, sampling parameters, and a parser for chats."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from threading import Event, Thread
from typing import TypeVar

import psutil
import pytest

from baton.core.errors import DeadlineExceeded, InvalidRequest, UnknownModel
from baton.core.sampling import SamplingParams
from baton.core.types import Grammar, GrammarKind
from baton.gateway.serving.preparation import Prepared, RequestCall, prepare
from baton.gateway.serving.validate import SESSION_KEEP_S
from baton.gateway.text.chat.checkpoint import Checkpoint
from baton.gateway.text.chat.model import ChatModel
from baton.gateway.text.chat.renderer import ChatRenderer
from baton.gateway.text.chat.types import ChatRequest
from baton.gateway.text.model import ServedModel, read_served_model
from baton.gateway.text.text_work import _SMALL_BYTES, TextWork
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb
from baton.security import identity
from baton.security.authorize import ALL_RIGHTS
from baton.settings.config import DEMO_MODELS

BOUND_S = 60.0
CONTEXT_TOKENS = 500
T = TypeVar("T")
HELLO = ChatRequest(messages=[{"role": "user", "content": "hello"}])
HELLO_JSON = '[{"role": "user", "content": "hello"}]'


@pytest.fixture(scope="module")
def model() -> Iterator[ServedModel]:
    read = read_served_model(DEMO_MODELS / "llama", None)
    yield read
    read.close()


async def prepared(
    model: ServedModel, message: pb.GenerateRequest, chat: ChatRequest | None = None, *, timeout_s: float = 1e9
) -> Prepared:
    call = RequestCall(message, chat, "r", started_at_s=0.0, timeout_s=timeout_s)
    return await prepare(call, model, TextWork(), max_context_tokens=CONTEXT_TOKENS)


def sampling(**values: object) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**values)  # type: ignore[arg-type]


async def test_a_text_is_tokenized(model: ServedModel) -> None:
    given = await prepared(model, pb.GenerateRequest(text="def main", priority=-3, cache_salt="s"))
    assert given.request.prompt == model.tokenizer.encode("def main")
    assert (given.request.priority, given.request.cache_salt, given.parser) == (-3, "s", None)
    assert given.request.sampling.max_tokens == 16


async def test_only_the_last_tokens_are_kept_on_request(model: ServedModel) -> None:
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(1, 1000)), truncate_prompt_tokens=4)
    assert list((await prepared(model, message)).request.prompt) == [996, 997, 998, 999]


async def test_special_tokens_in_a_text_are_tokens(model: ServedModel) -> None:
    message = pb.GenerateRequest(text="a<|endoftext|>", add_special_tokens=False)
    assert (await prepared(model, message)).request.prompt[-1] == 4095


async def test_with_the_switch_special_tokens_in_a_text_are_text_and_those_of_the_template_are_tokens() -> None:
    model = read_served_model(DEMO_MODELS / "llama", None, special_in_texts=False)
    with closing(model):
        message = pb.GenerateRequest(text="a<|endoftext|>", add_special_tokens=False)
        assert 4095 not in (await prepared(model, message)).request.prompt
        chat = ChatRequest(messages=[{"role": "user", "content": "hello<|endoftext|>"}])
        prompt = (await prepared(model, pb.GenerateRequest(), chat)).request.prompt
        hello = (await prepared(model, pb.GenerateRequest(), HELLO)).request.prompt
        assert prompt.count(4095) == hello.count(4095)
        assert "hello<|endoftext|>" in model.tokenizer.decode(prompt, skip_special_tokens=False)


async def test_absent_numbers_are_those_of_the_checkpoint(model: ServedModel) -> None:
    tuned = replace(model, default_sampling=SamplingParams(temperature=0.25, top_k=7))
    request = (await prepared(tuned, pb.GenerateRequest(text="a", sampling=sampling(top_k=0)))).request
    assert (request.sampling.temperature, request.sampling.top_k) == (0.25, 0)


async def test_a_chat_may_fill_the_context(model: ServedModel) -> None:
    request = (await prepared(model, pb.GenerateRequest(), HELLO)).request
    assert request.sampling.max_tokens == CONTEXT_TOKENS - len(request.prompt)
    request = (await prepared(model, pb.GenerateRequest(sampling=sampling(max_tokens=3)), HELLO)).request
    assert request.sampling.max_tokens == 3


async def test_a_chat_on_the_wire_is_the_same_chat(model: ServedModel) -> None:
    on_wire = await prepared(model, pb.GenerateRequest(chat=pb.Chat(messages_json=HELLO_JSON)))
    parsed = await prepared(model, pb.GenerateRequest(), HELLO)
    assert on_wire.request.prompt == parsed.request.prompt
    assert on_wire.parser is not None
    assert "hello" in model.tokenizer.decode(on_wire.request.prompt)
    assert model.chat.prepare(HELLO).prompt == model.tokenizer.decode(parsed.request.prompt, skip_special_tokens=False)


async def test_the_ends_of_a_chat_are_ignored_like_the_end_of_text(model: ServedModel) -> None:
    template = "{{ messages[0].content }}{# <|python_tag|> #}"
    ends = {"<|eom_id|>": 7, "<|eot_id|>": 9}
    checkpoint = Checkpoint({"default": template}, variables={}, tokens=ends, special=frozenset(ends), model_type="")
    chatting = replace(model, chat=ChatModel(checkpoint), renderer=ChatRenderer(checkpoint))
    with closing(chatting.renderer):
        message = pb.GenerateRequest(sampling=sampling(stop_token_ids=[9, 8]))
        request = (await prepared(chatting, message, HELLO)).request
        assert request.sampling.stop_token_ids == (9, 8, 7)
        request = (await prepared(chatting, pb.GenerateRequest(sampling=sampling(ignore_eos=True)), HELLO)).request
        assert request.sampling.stop_token_ids == ()


async def test_the_message_s_constraint_holds_for_a_chat(model: ServedModel) -> None:
    wire = common_pb2.Grammar(choice=common_pb2.Choices(texts=["a", "b"]))
    message = pb.GenerateRequest(sampling=sampling(grammar=wire))
    assert (await prepared(model, message, HELLO)).request.sampling.grammar == Grammar(GrammarKind.CHOICE, '["a", "b"]')


@pytest.mark.parametrize("prompt", [{"text": "a"}, {"token_ids": pb.TokenIds(ids=[5])}])
async def test_a_constraint_that_cannot_be_followed_is_refused(model: ServedModel, prompt: dict[str, object]) -> None:
    wire = common_pb2.Grammar(regex="(")
    with pytest.raises(InvalidRequest):
        await prepared(model, pb.GenerateRequest(**prompt, sampling=sampling(grammar=wire)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(text="a", truncate_prompt_tokens=0), "truncate_prompt_tokens"),
        (pb.GenerateRequest(text="a" * 1_000_000), "prompt"),
        (pb.GenerateRequest(text="a b " * 1000), "prompt"),
        (pb.GenerateRequest(chat=pb.Chat(messages_json="{}")), "messages"),
        (pb.GenerateRequest(text="a", sampling=sampling(temperature=-1)), "temperature"),
        (
            pb.GenerateRequest(chat=pb.Chat(messages_json=HELLO_JSON), sampling=sampling(min_tokens=499)),
            "min_tokens",
        ),
    ],
)
async def test_what_is_wrong_is_named(model: ServedModel, message: pb.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await prepared(model, message)
    assert raised.value.field == field


async def test_another_model_is_not_served(model: ServedModel) -> None:
    with pytest.raises(UnknownModel):
        await prepared(model, pb.GenerateRequest(model="gpt", text="a"))


async def test_tokenizing_counts_toward_the_deadline(model: ServedModel) -> None:
    with pytest.raises(DeadlineExceeded):
        await prepared(model, pb.GenerateRequest(text="a"), timeout_s=0.0)


# ---- texts that are far too long

CROWD, LONG_CONTEXT_TOKENS = 12, 16384
LONG = "def main(argument): return the value of the argument. " * 5000  # 270 kB, 65,000 tokens


class SlowWork(TextWork):
    """Large texts take until the test lets them end."""

    def __init__(self) -> None:
        super().__init__(running_bytes=1 << 18)
        self.may_end = Event()

    async def run(self, size_bytes: int, work: Callable[[], T]) -> T:
        def late() -> T:
            assert self.may_end.wait(BOUND_S)
            return work()

        return await super().run(size_bytes, late if size_bytes > _SMALL_BYTES else work)


async def test_a_crowd_of_huge_texts_costs_little_memory_and_delays_no_small_one(model: ServedModel) -> None:
    texts = SlowWork()
    ended: list[int] = []

    async def refused(number: int) -> None:
        call = RequestCall(pb.GenerateRequest(text=f"{number}{LONG}"), None, "r", started_at_s=0.0, timeout_s=1e9)
        with pytest.raises(InvalidRequest, match="your prompt has at least"):
            await prepare(call, model, texts, max_context_tokens=LONG_CONTEXT_TOKENS)
        ended.append(number)

    crowd = [asyncio.create_task(refused(number)) for number in range(CROWD)]
    await asyncio.sleep(0)
    with peak_bytes() as peak:
        call = RequestCall(pb.GenerateRequest(text="a light user's"), None, "r", started_at_s=0.0, timeout_s=1e9)
        await prepare(call, model, texts, max_context_tokens=LONG_CONTEXT_TOKENS)
        assert ended == []
        texts.may_end.set()
        await asyncio.gather(*crowd)
        assert len(ended) == CROWD
    # All at once they would take 100 bytes for each of their 3.2 million bytes.
    assert peak() < 100e6


async def test_a_text_of_long_tokens_that_fits_is_no_long_prompt(model: ServedModel) -> None:
    text = " implementations" * (CONTEXT_TOKENS - 10)
    given = await prepared(model, pb.GenerateRequest(text=text, sampling=sampling(max_tokens=1)))
    assert len(given.request.prompt) == CONTEXT_TOKENS - 10


async def test_the_last_tokens_of_a_long_text_are_kept_on_request(model: ServedModel) -> None:
    text = "a bc " * (14 * CONTEXT_TOKENS // 5)
    given = await prepared(model, pb.GenerateRequest(text=text, truncate_prompt_tokens=7))
    assert given.request.prompt == model.tokenizer.encode(text)[-7:]


@contextmanager
def peak_bytes() -> Iterator[Callable[[], int]]:
    """What this process's memory grows by within the block, at most."""
    process, ends = psutil.Process(), Event()
    before = most = process.memory_info().rss

    def watch() -> None:
        nonlocal most
        while not ends.wait(0.002):
            most = max(most, process.memory_info().rss)

    watching = Thread(target=watch)
    watching.start()
    try:
        yield lambda: most - before
    finally:
        ends.set()
        watching.join()


async def test_a_session_is_its_clients_own(model: ServedModel) -> None:
    sessions = set()
    for name in ("alice", "bob"):
        identity.enter(identity.Caller(name, frozenset()))
        sessions.add((await prepared(model, pb.GenerateRequest(text="a", session_id="1"))).request.session_id)
    assert len(sessions) == 2
    assert (await prepared(model, pb.GenerateRequest(text="a"))).request.session_id == ""


async def test_a_request_is_kept_as_long_as_it_asks_for_or_as_its_session_pauses(model: ServedModel) -> None:
    async def kept(**fields: object) -> float | None:
        message = pb.GenerateRequest(text="a", **fields)  # type: ignore[arg-type]
        keep = (await prepared(model, message)).request.keep
        return None if keep is None else keep.seconds

    assert await kept() is None
    assert await kept(session_id="s") == SESSION_KEEP_S
    assert await kept(session_id="s", kv_keep_s=7.0) == 7.0
    assert await kept(kv_keep_s=0.0) == 0.0
    for seconds in (-1.0, 1e9, float("nan"), float("inf")):
        with pytest.raises(InvalidRequest) as refused:
            await kept(kv_keep_s=seconds)
        assert refused.value.field == "kv_keep_s"


async def test_each_client_is_a_tenant_whatever_salts_and_sessions_it_invents(model: ServedModel) -> None:
    async def tenant(name: str, salt: str) -> int:
        identity.enter(identity.Caller(name, ALL_RIGHTS, proved=True))
        keep = (await prepared(model, pb.GenerateRequest(text="a", session_id=salt, cache_salt=salt))).request.keep
        assert keep is not None
        return keep.tenant

    try:
        assert await tenant("alice", "1") == await tenant("alice", "2") != await tenant("bob", "1")
    finally:
        identity.enter(identity.EVERYBODY)
