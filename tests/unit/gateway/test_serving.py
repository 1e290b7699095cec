"""The asyncio shell of the gateway between real gRPC connections: nodes are found, requests served, and ended early."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

import baton.gateway.request.connections
from baton.core.errors import Cancelled, ConfigError, DeadlineExceeded, Draining, InvalidRequest, Overloaded
from baton.gateway.fleet.discovery.directory import Directory
from baton.gateway.fleet.discovery.sources import Place
from baton.gateway.request import machine, node_watch
from baton.gateway.request.connections import Connections
from baton.gateway.serving.serving import Serving
from baton.gateway.text.chat.types import ChatRequest
from baton.gateway.text.model import ServedModel, read_served_model
from baton.gateway.text.tokenizer import TextTokenizer
from baton.node import waiting
from baton.protos.internal.v1 import decode_pb2
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.server import ListenAddress
from baton.security import identity
from baton.security.limits import Budget, Limits
from baton.settings.config import DEMO_MODELS
from baton.settings.gateway_config import GatewaySettings
from baton.settings.reader import read_settings
from tests.unit.gateway.fleets import DECODE
from tests.unit.gateway.late import LIMIT_S, PATIENT, let_limit_pass
from tests.unit.gateway.scripted_nodes import ScriptedNode, scripted_nodes
from tests.unit.gateway.served import LENGTH, SCHEDULED, SENT, accepted, first_token, reserved, token

BOUND_S = 60
ENDING = 20  # requests: more than get their turns in one pass of the loop


@pytest.fixture(scope="module")
def model() -> Iterator[ServedModel]:
    read = read_served_model(DEMO_MODELS / "llama", None)
    yield read
    read.close()


def settings_of(*flags: str, **internal: object) -> GatewaySettings:
    given = read_settings(GatewaySettings, "gateway", ["--model", str(DEMO_MODELS / "llama"), *flags])
    return given.model_copy(update={**PATIENT, **internal})


@dataclass
class Running:
    """A gateway without its gRPC service, between a prefill and a decode node."""

    serving: Serving
    connections: Connections
    prefill: ScriptedNode
    decode: ScriptedNode

    def generate(self, client: "Client", *, budget_s: float | None = None) -> "asyncio.Task[None]":
        message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(1, 65)))
        message.sampling.max_tokens = 10
        return asyncio.create_task(self.serving.generate(message, client.write, budget_s=budget_s))

    def answer(self, **message: object) -> None:
        self.decode.answers.put_nowait(decode_pb2.SessionResponse(**message))  # type: ignore[arg-type]


class Client:
    """Reads messages; a slow client reads none."""

    def __init__(self) -> None:
        self.messages: list[pb.GenerateResponse] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.blocked = asyncio.Event()  # a message waits

    async def write(self, message: pb.GenerateResponse) -> None:
        self.blocked.set()
        await self.reads.wait()
        self.messages.append(message)

    @property
    def num_tokens(self) -> list[int]:
        return [len(message.tokens) for message in self.messages]


@pytest.fixture
async def running(model: ServedModel) -> AsyncIterator[Running]:
    async with scripted_nodes(model.identity) as (prefill, decode):
        settings = settings_of(
            "--prefill", prefill.address, "--decode", decode.address, "--max-concurrent-requests", "2"
        )
        async with Connections(settings, model) as connections:
            await asyncio.wait_for(connections.until_serves(), BOUND_S)
            yield Running(Serving(settings, model, connections), connections, prefill, decode)


async def until_idle(running: Running) -> None:
    """Checks that the decode node holds nothing for this gateway."""
    request = await asyncio.wait_for(running.decode.received.get(), BOUND_S)
    assert isinstance(request, decode_pb2.SessionRequest)
    assert request.HasField("cancel")
    assert running.serving.running == 0


async def test_nodes_are_found_paired_and_report(running: Running) -> None:
    assert running.prefill.connected_to == [running.decode.address]
    assert all(report.reachable for report in running.connections.fleet.report())


async def test_a_remote_prefill_is_served(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_RECEIPT_WAIT_S", BOUND_S)  # however late the count of the prefill node comes
    client = Client()
    request = running.generate(client)
    key = (await running.decode.submission()).key
    answer = reserved()
    answer.key = key
    running.answer(reserved=answer)
    await asyncio.wait_for(running.prefill.received.get(), BOUND_S)
    for event in (SCHEDULED, first_token(), SENT, None):
        running.prefill.events.put_nowait(event)
    running.answer(admitted=decode_pb2.Admitted(key=key))
    running.decode.send_tokens(token(1), key=key)
    running.decode.send_tokens(token(2, LENGTH), key=key)
    running.answer(released=decode_pb2.Released(key=key))
    await asyncio.wait_for(request, BOUND_S)
    assert sum(client.num_tokens) == 3
    assert client.messages[-1].finish_reason == LENGTH
    assert client.messages[-1].receipt.bytes_sent == 4096
    assert running.serving.counters.remote == running.serving.counters.finished == 1


async def decoding(running: Running, client: Client, *, budget_s: float | None = None) -> "asyncio.Task[None]":
    """A request that the decode node prefilled itself, with one token given."""
    request = running.generate(client, budget_s=budget_s)
    key = (await running.decode.submission()).key
    answer = accepted()
    answer.key = key
    running.answer(accepted=answer)
    client.blocked.clear()
    running.decode.send_tokens(token(0), key=key)
    await asyncio.wait_for(client.blocked.wait(), BOUND_S)
    return request


async def test_tokens_for_a_slow_client_collect_and_leave_together(running: Running) -> None:
    client = Client()
    client.reads.clear()
    request = await decoding(running, client)
    for index in range(1, 4):
        running.decode.send_tokens(token(index))
    running.decode.send_tokens(token(4, LENGTH))
    running.answer(released=decode_pb2.Released(key=1))
    client_of_node = running.connections.client(DECODE, running.decode.address)
    assert client_of_node is not None
    session = client_of_node.session()
    async with asyncio.timeout(BOUND_S):
        while session.num_unreleased:  # noqa: ASYNC110 (nothing signals it)
            await asyncio.sleep(0.01)
    client.reads.set()
    await asyncio.wait_for(request, BOUND_S)
    assert client.num_tokens == [1, 4, 0]


async def test_of_requests_that_end_together_every_client_has_its_last_message_before_the_first_one_is_over(
    model: ServedModel,
) -> None:
    """To end a request takes longer than a message, for which other clients would wait."""
    happened: list[str] = []

    class Noting(Client):
        async def write(self, message: pb.GenerateResponse) -> None:
            await super().write(message)
            if message.finish_reason:
                happened.append("last message")

    async with scripted_nodes(model.identity) as (prefill, decode):
        flags = ("--prefill", prefill.address, "--decode", decode.address, "--max-concurrent-requests", str(ENDING))
        async with Connections(settings_of(*flags), model) as connections:
            await asyncio.wait_for(connections.until_serves(), BOUND_S)
            running = Running(Serving(settings_of(*flags), model, connections), connections, prefill, decode)
            requests = [await decoding(running, Noting()) for _ in range(ENDING)]
            for request in requests:
                request.add_done_callback(lambda _: happened.append("over"))
            step = decode_pb2.Step()
            for key in range(1, ENDING + 1):
                last = step.tokens.add()
                last.CopyFrom(token(1, LENGTH))
                last.key = key
            running.answer(step=step)
            await asyncio.wait_for(asyncio.gather(*requests), BOUND_S)
    assert happened == ["last message"] * ENDING + ["over"] * ENDING


async def test_a_cancelled_request_is_released(running: Running) -> None:
    request = await decoding(running, Client())
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await until_idle(running)
    assert running.serving.counters.failed == running.serving.counters.finished == 0


@pytest.mark.parametrize("slow", [False, True], ids=["client reads", "client reads nothing"])
async def test_the_deadline_ends_a_request(running: Running, slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    if slow:
        client.reads.clear()
    request = await decoding(running, client, budget_s=LIMIT_S)
    let_limit_pass(monkeypatch)
    with pytest.raises(DeadlineExceeded, match=rf"within its {LIMIT_S:g} s"):
        await asyncio.wait_for(request, BOUND_S)
    await until_idle(running)


class ReadsOnce(Client):
    """Reads one message."""

    async def write(self, message: pb.GenerateResponse) -> None:
        await super().write(message)
        self.reads.clear()


async def test_the_deadline_ends_a_request_whose_last_message_waits(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for the prefill node's count has just used up the timer."""
    client = ReadsOnce()
    request = running.generate(client, budget_s=LIMIT_S)
    key = (await running.decode.submission()).key
    answer = reserved()
    answer.key = key
    running.answer(reserved=answer)
    await asyncio.wait_for(running.prefill.received.get(), BOUND_S)
    running.prefill.events.put_nowait(first_token(finish=LENGTH))
    await asyncio.wait_for(client.blocked.wait(), BOUND_S)
    let_limit_pass(monkeypatch)
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(request, BOUND_S)


@pytest.mark.parametrize("slow", [False, True], ids=["client reads", "client reads nothing"])
async def test_a_drain_ends_unfinished_requests_and_refuses_new_ones(running: Running, slow: bool) -> None:
    client = Client()
    if slow:
        client.reads.clear()
    request = await decoding(running, client)
    await running.serving.drain(0.01)
    with pytest.raises(Draining, match="shutting down"):
        await asyncio.wait_for(request, BOUND_S)
    await until_idle(running)
    with pytest.raises(Draining, match="is draining"):
        await running.generate(client)


async def test_too_many_requests_are_refused(running: Running) -> None:
    requests = [running.generate(Client()) for _ in range(2)]
    await running.decode.submission()
    with pytest.raises(Overloaded, match="2 requests are running already"):
        await running.generate(Client())
    for request in requests:
        request.cancel()
    await asyncio.wait(requests)


async def test_a_request_waits_for_its_lost_decode_node_and_continues(running: Running) -> None:
    client = Client()
    request = await decoding(running, client)
    running.decode.answers.put_nowait(None)  # the session ends; the next Watch stream brings the node back
    submission = await running.decode.submission()
    assert [token.token_id for message in client.messages for token in message.tokens] == [100]
    assert list(submission.output_token_ids) == [100]
    answer = accepted()
    answer.key = submission.key
    running.answer(accepted=answer)
    running.decode.send_tokens(token(1, LENGTH), key=submission.key)
    await asyncio.wait_for(request, BOUND_S)
    assert client.num_tokens == [1, 0, 1, 0]
    assert client.messages[1].notice == "the node node-21 was lost; waiting up to 30 s for another one"
    assert "was lost (it ended the session)" in client.messages[-1].receipt.why


async def test_a_silent_node_is_lost_and_watched_again(running: Running) -> None:
    (node,) = running.connections.fleet.decodes.values()
    lost_at_s = node.last_message_at_s
    running.connections.lose(node.role, node.address, "no sign of life for 1 s")
    assert not running.connections.fleet.serves()
    await asyncio.wait_for(running.connections.until(lambda: node.open), BOUND_S)
    assert node.last_message_at_s > lost_at_s


def listed_addresses(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The addresses of the prefill nodes and of the decode nodes; they may change, as those of a DNS name do."""
    listings: list[set[str]] = []

    class Listing(Directory):
        def __init__(self, places: Sequence[Place], on_change: Callable[[], None]) -> None:
            super().__init__(places, on_change)
            self.listed = {f"{place.host}:{place.port}" for place in places if isinstance(place, ListenAddress)}
            listings.append(self.listed)

        async def look_up(self) -> frozenset[str]:
            return frozenset(self.listed)

    monkeypatch.setattr(baton.gateway.request.connections, "Directory", Listing)
    return listings


async def test_a_prefill_node_that_also_decodes_is_one_node_and_stays_while_it_serves_a_request_alone(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    listings = listed_addresses(monkeypatch)
    async with scripted_nodes(model.identity) as (prefill, _):
        prefill.status.info.also_decodes = True
        settings = settings_of("--prefill", prefill.address, "--decode", "127.0.0.1:1", resolve_s=0.05)
        async with Connections(settings, model) as connections, asyncio.timeout(BOUND_S):
            known = connections.fleet.prefills
            await connections.until(connections.fleet.serves)
            assert [report.address for report in connections.fleet.report()] == [prefill.address, "127.0.0.1:1"]
            running, client = Running(Serving(settings, model, connections), connections, prefill, prefill), Client()
            request = await decoding(running, client)
            listings[0].clear()
            assert await waiting.until(lambda: known[prefill.address].retired, timeout_s=BOUND_S)
            assert prefill.address in known
            prefill.send_tokens(token(1, LENGTH))
            running.answer(released=decode_pb2.Released(key=1))
            await request
            receipt = client.messages[-1].receipt
            assert (receipt.path, receipt.decode_node) == (common_pb2.PATH_LOCAL, "node-11")
            assert await waiting.until(lambda: prefill.address not in known, timeout_s=BOUND_S)
            await asyncio.wait_for(prefill.call_ended.wait(), BOUND_S)
            assert not connections.upkeep.done()


async def test_a_node_that_is_no_longer_listed_is_removed_while_it_reports(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    listings = listed_addresses(monkeypatch)
    async with scripted_nodes(model.identity) as (prefill, decode):
        decode.reports_all_the_time = True
        settings = settings_of("--prefill", prefill.address, "--decode", decode.address, resolve_s=0.05)
        async with Connections(settings, model) as connections, asyncio.timeout(BOUND_S):
            known = connections.fleet.decodes
            for _ in range(20):
                await connections.until(lambda: decode.address in known and known[decode.address].reachable)
                listings[1].remove(decode.address)
                while decode.address in known:
                    assert not connections.upkeep.done()
                    await asyncio.sleep(0)
                listings[1].add(decode.address)
            assert not connections.upkeep.done()
            decode.reports_all_the_time = False


async def test_an_unreachable_node_is_named_once_with_the_reason(
    model: ServedModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_watch, "_FIRST_STATUS_TIMEOUT_S", BOUND_S)  # the refusal comes however late
    attempts = asyncio.Semaphore(0)
    with caplog.at_level(logging.WARNING, logger="baton"):
        async with Connections(settings_of("--decode", "127.0.0.1:1"), model) as connections:
            connections.add_listener(attempts.release)
            async with asyncio.timeout(BOUND_S):
                for _ in range(3):
                    await attempts.acquire()
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == "127.0.0.1:1: unreachable, retrying: Connection refused"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "BATON_DECODE"),
        (("--decode", "a:1", "--local-policy", "strict"), "BATON_PREFILL"),
        (("--decode", "nowhere"), "nowhere"),
    ],
)
def test_settings_without_nodes_are_refused(model: ServedModel, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Connections(settings_of(*flags), model)


# ---- several outputs, ids, aborts, chats


async def serve(running: Running, *, num_tokens: int = 3) -> decode_pb2.SubmitRequest:
    """Serves the next submission on the decode node; its tokens are 100, 101, ..."""
    submission = await running.decode.submission()
    answer = accepted()
    answer.key = submission.key
    running.answer(accepted=answer)
    for index in range(num_tokens):
        last = index == num_tokens - 1
        running.decode.send_tokens(token(index, LENGTH) if last else token(index), key=submission.key)
    running.answer(released=decode_pb2.Released(key=submission.key))
    return submission


def start(
    running: Running, client: "Client", chat: ChatRequest | None = None, **fields: object
) -> "asyncio.Task[None]":
    message = pb.GenerateRequest(**fields)  # type: ignore[arg-type]
    message.sampling.max_tokens = 10
    return asyncio.create_task(running.serving.generate(message, client.write, budget_s=None, chat=chat))


PROMPT = pb.TokenIds(ids=range(1, 65))


async def test_one_prompt_gives_two_outputs(running: Running) -> None:
    client = Client()
    request = start(running, client, token_ids=PROMPT, n=2, sampling=common_pb2.SamplingParams(seed=5), priority=4)
    submissions = [await serve(running), await serve(running)]
    await asyncio.wait_for(request, BOUND_S)
    assert [each.sampling.seed for each in submissions] == [5, 6]
    assert sorted(message.index for message in client.messages if message.finish_reason) == [0, 1]
    assert [message.usage.completion_tokens for message in client.messages if message.HasField("usage")] == [6]
    assert running.serving.counters.finished == 2
    assert running.serving.running == 0


async def test_each_output_counts_toward_the_limit(running: Running) -> None:
    request = running.generate(Client())
    await running.decode.submission()
    with pytest.raises(Overloaded, match="1 requests are running already, of at most 2"):
        await start(running, Client(), token_ids=PROMPT, n=2)
    with pytest.raises(InvalidRequest, match="n is 3") as raised:
        await start(running, Client(), token_ids=PROMPT, n=3, request_id="three")
    assert raised.value.request_id == "three"
    request.cancel()
    await asyncio.wait([request])


async def test_an_abort_ends_all_requests_of_that_id(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    requests = [start(running, Client(), token_ids=PROMPT, request_id="mine") for _ in range(2)]
    for _ in requests:
        await running.decode.submission()
    with caplog.at_level(logging.DEBUG, logger="baton"):
        assert await running.serving.abort(["mine", "other", "mine"]) == ["mine"]
        for request in requests:
            with pytest.raises(Cancelled, match="aborted") as raised:
                await asyncio.wait_for(request, BOUND_S)
            assert raised.value.request_id == "mine"
    lines = [record for record in caplog.records if record.getMessage() == "request failed: the request was aborted"]
    assert [(record.levelname, vars(record)["fields"]["outcome"]) for record in lines] == [("DEBUG", "cancelled")] * 2
    assert await running.serving.abort(["mine"]) == []


async def test_an_abort_ends_all_outputs(running: Running) -> None:
    client = Client()
    request = start(running, client, token_ids=PROMPT, n=2, request_id="mine")
    submission = await running.decode.submission()
    answer = accepted()
    answer.key = submission.key
    running.answer(accepted=answer)
    running.decode.send_tokens(token(0), token(1), key=submission.key)
    await running.decode.submission()  # the other output
    assert await running.serving.abort(["mine"]) == ["mine"]
    with pytest.raises(Cancelled):
        await asyncio.wait_for(request, BOUND_S)
    assert running.serving.running == 0


async def test_a_request_is_aborted_before_it_reaches_a_node(running: Running) -> None:
    request = start(running, Client(), text="some text", request_id="mine")
    await asyncio.sleep(0)
    assert await running.serving.abort(["mine"]) == ["mine"]
    with pytest.raises(Cancelled):
        await asyncio.wait_for(request, BOUND_S)
    assert running.decode.received.empty()


async def test_a_chat_has_its_answer_in_parts(running: Running) -> None:
    client = Client()
    chat = ChatRequest(messages=[{"role": "user", "content": "hi"}])
    request = start(running, client, chat)
    submission = await serve(running)
    await asyncio.wait_for(request, BOUND_S)
    tokenizer = running.serving.model.tokenizer
    assert tokenizer.decode(submission.prompt_token_ids, skip_special_tokens=False).count("hi") >= 1
    content = "".join(message.chat.content for message in client.messages)
    assert content == "".join(message.text for message in client.messages) != ""


async def test_a_client_over_a_limit_gets_no_text_tokenized(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError

    monkeypatch.setattr(TextTokenizer, "encode", encode)
    monkeypatch.setattr(TextTokenizer, "decode", encode)
    budget = Budget(Limits(tokens_per_minute=100), clock=lambda: 0.0)
    identity.enter(identity.Caller("alice", frozenset(), proved=True, budget=budget))
    budget.spend(95)
    message = pb.GenerateRequest(text="zip " * 30)
    with pytest.raises(Overloaded, match="100 tokens per minute"):
        await running.serving.generate(message, Client().write, budget_s=None)
    with pytest.raises(Overloaded, match="100 tokens per minute"):
        await running.serving.encode(message.text)
    with pytest.raises(Overloaded, match="100 tokens per minute"):
        await running.serving.decode([1] * 50)


async def test_outputs_and_questions_for_tokens_count_as_requests(running: Running) -> None:
    message = pb.GenerateRequest(text="zip", n=2)
    for limits, error in (
        (Limits(requests_per_minute=3), Overloaded),
        (Limits(requests_per_minute=9, concurrent=1), InvalidRequest),
    ):
        budget = Budget(limits, clock=lambda: 0.0)
        identity.enter(identity.Caller("alice", frozenset(), proved=True, budget=budget))
        assert await running.serving.encode("zip")  # a part of another request
        assert await running.serving.encode("zip", is_request=True)
        assert await running.serving.decode([1])
        with pytest.raises(error, match="requests"):
            await running.serving.generate(message, Client().write, budget_s=None)


async def test_a_failure_is_one_line_with_its_cause_and_a_mistake_of_the_client_is_none(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="baton"):
        with pytest.raises(InvalidRequest):
            await start(running, Client(), token_ids=PROMPT, n=3, request_id="three")
        request = start(running, Client(), token_ids=PROMPT, request_id="mine")
        await running.decode.submission()
        await running.serving.drain(0.01)
        with pytest.raises(Draining):
            await request
    (line,) = [record for record in caplog.records if record.getMessage().startswith("request failed")]
    assert (line.levelname, line.getMessage()) == (
        "WARNING",
        "request failed: the gateway is shutting down; send the request again",
    )
    assert vars(line)["fields"].keys() == {"outcome", "reason", "total_s"}
    assert vars(line)["fields"]["outcome"] == "failed"
    assert running.serving.counters.failed == 1
    page = (await running.serving.metrics.page()).decode()
    for outcome in ("client_error", "failed"):
        assert f'baton_requests_total{{model_name="llama",outcome="{outcome}",role="gateway"}} 1.0\n' in page


async def test_metrics_say_whether_new_requests_are_served(running: Running) -> None:
    async def ready() -> bytes:
        return (await running.serving.metrics.page(frozenset({"baton_ready"}))).splitlines()[-1]

    assert await ready() == b'baton_ready{model_name="llama",role="gateway"} 1.0'
    await running.serving.drain(0.01)
    assert await ready() == b'baton_ready{model_name="llama",role="gateway"} 0.0'


@pytest.mark.parametrize(("asked", "limit"), [(100, 100), (1 << 20, None)])
def test_the_context_asked_for_limits_prompts_up_to_the_model_s_own(
    model: ServedModel, asked: int, limit: int | None
) -> None:
    read = read_served_model(DEMO_MODELS / "llama", None, max_context_tokens=asked)
    read.close()
    assert read.max_context_tokens == (limit or model.max_context_tokens)
    assert read.identity == model.identity
