"""The client against servers with OpenAI's API that are not Baton, good ones and bad ones."""

import asyncio
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from baton.core.errors import BatonError, InvalidRequest, NoNode
from baton.load.answer import LoadAnswer
from baton.load.metrics import Summary, summarize
from baton.load.probe import probe
from baton.load.records import LoadOutcome, LoadRecord
from baton.load.sse import SseReader, read_chunk
from baton.load.target import Api, Server, Target
from baton.load.worker import LoadDone, LoadJob, LoadSender
from baton.load.workload import PlannedRequest
from baton.node.waiting import until
from tests.unit.load.stand_in import StandIn, Writer, begin, chunk, part, plain, standing_in

LONG_S = 300.0


async def asked(
    stand_in: StandIn, api: Api = Api.COMPLETIONS, *, count: int = 3, end_s: float = LONG_S
) -> list[LoadRecord]:
    """Records of `count` requests at once, after a probe."""
    async with standing_in(stand_in):
        server = await probe(Target.parse(stand_in.url, api=api))
        return await send(server, count=count, end_s=end_s)


async def send(server: Server, *, count: int, end_s: float = LONG_S) -> list[LoadRecord]:
    return sorted_records(await sender(server, count=count, end_s=end_s).run())


def sender(server: Server, *, count: int, timeout_s: float = LONG_S, end_s: float = LONG_S) -> LoadSender:
    planned = [PlannedRequest(index, 0.0, 100, 5) for index in range(count)]
    job = LoadJob(server, planned, time.monotonic(), timeout_s, end_s)
    return LoadSender(job, server.asker(connections=1, slo=None, temperature=None), lambda _: None)


def sorted_records(done: LoadDone) -> list[LoadRecord]:
    return sorted(done.records, key=lambda record: record.index)


@contextmanager
def nobody_at(stand_in: StandIn) -> Iterator[None]:
    """Keeps the address of a server that has ended from other processes."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", int(stand_in.url.rpartition(":")[2])))
        yield


def outcomes(records: Sequence[LoadRecord]) -> list[tuple[LoadOutcome, str]]:
    return [(record.outcome, record.error) for record in records]


@pytest.mark.parametrize("api", [Api.COMPLETIONS, Api.CHAT])
@pytest.mark.parametrize("running_usage", [True, False])
async def test_a_good_server_gives_whole_records(api: Api, running_usage: bool) -> None:
    stand_in = StandIn(running_usage=running_usage)
    records = await asked(stand_in, api)
    for record in records:
        assert (record.outcome, record.error, record.tokens, record.exact) == (LoadOutcome.OK, "", 5, running_usage)
        assert record.usage == {"prompt": 100, "output": 5}
        assert len(record.times_s) == 5
        assert 0 <= record.late_s <= record.times_s[0] <= record.times_s[-1] <= record.end_s
    asked_for = stand_in.bodies[-1]
    assert (asked_for["model"], asked_for["max_tokens"], asked_for["ignore_eos"]) == ("stand-in", 5, True)
    assert stand_in.headers[-1]["x-request-id"].startswith("bench-")


async def test_prompts_are_token_ids_where_the_server_takes_them_and_else_as_many_words() -> None:
    ids, words = StandIn(), StandIn(refuses=("token_ids",), tokens_per_word=2)
    assert (await asked(ids))[0].usage["prompt"] == 100
    assert len(ids.bodies[-1]["prompt"]) == 100
    assert (await asked(words))[0].usage["prompt"] == 100
    assert len(words.bodies[-1]["prompt"].split()) == 50


async def test_a_chat_of_a_wordy_tokenizer_and_template_has_the_tokens_asked_for() -> None:
    records = await asked(StandIn(tokens_per_word=3, words_of_template=22), Api.CHAT)
    assert [record.usage["prompt"] for record in records] == [100, 100, 100]


@pytest.mark.parametrize(
    ("refuses", "sent", "note"),
    [
        (("continuous_usage_stats",), {"include_usage": True}, "each message counts as one token"),
        (("continuous_usage_stats", "ignore_eos"), {"include_usage": True}, "does not take ignore_eos"),
        (("stream_options", "ignore_eos"), None, "does not take ignore_eos"),
    ],
)
async def test_what_a_server_does_not_take_is_left_out_and_noted(
    refuses: tuple[str, ...], sent: dict[str, bool] | None, note: str
) -> None:
    stand_in = StandIn(refuses=refuses)
    async with standing_in(stand_in):
        server = await probe(Target.parse(stand_in.url))
        records = await send(server, count=1)
    assert records[0].outcome is LoadOutcome.OK
    assert records[0].tokens == 5
    assert stand_in.bodies[-1].get("stream_options") == sent
    assert any(note in line for line in server.notes)


async def test_the_probe_reads_model_and_limit_and_sends_the_key() -> None:
    async with standing_in(StandIn()) as stand_in:
        server = await probe(Target.parse(f"name={stand_in.url}/v1", api_key="secret"))
        assert (server.model, server.tokens_max, server.target.label) == ("stand-in", 2048, "name")
        assert stand_in.headers[-1]["authorization"] == "bearer secret"  # the stand-in's headers are in lower case


async def test_a_server_that_refuses_is_counted_apart_from_errors() -> None:
    async def refuse(number: int, writer: Writer) -> bool:
        if number >= 2:  # after the probe
            error = {"message": "too many", "type": "rate_limit", "code": "rate_limit_exceeded"}
            await plain(writer, 429, {"error": error}, retry_after="1")
        return number >= 2

    records = await asked(StandIn(behave=refuse))
    assert outcomes(records) == [(LoadOutcome.REFUSED, "429 rate_limit_exceeded")] * 3
    assert records[0].detail == "too many"
    summary: Summary = summarize(records)
    assert (summary.refused, summary.failed, summary.refusals) == (3, 0, {"429 rate_limit_exceeded": 3})


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"detail": "oops"}, "500"),
        ({"error": {"type": "server_error", "message": "oops"}}, "500 server_error"),
        ("x", "500"),
    ],
)
async def test_an_error_has_its_status_and_type(body: object, kind: str) -> None:
    async def fail(number: int, writer: Writer) -> bool:
        if number >= 2:
            await plain(writer, 500, body)
        return number >= 2

    assert outcomes(await asked(StandIn(behave=fail), count=1)) == [(LoadOutcome.FAILED, kind)]


def breaking(how: str, started: asyncio.Event | None = None) -> StandIn:
    """Two tokens of each request after the probe, and then no proper end."""

    async def behave(number: int, writer: Writer) -> bool:
        if number < 2:
            return False
        begin(writer)
        for text in ("a", "b"):
            chunk(writer, {"choices": [{"index": 0, "text": text, "finish_reason": None}]})
        if how == "close":
            writer.close()
        elif how == "end":
            part(writer, b"")
        elif how == "error":
            chunk(writer, {"error": {"message": "out of memory", "code": "internal_error"}})
        elif how == "rubbish":
            part(writer, b"data: {broken\n\n")
        elif how == "no http":
            writer.write(b"zzz\r\n")
        if how == "stall":
            assert started is not None
            started.set()
            await never.wait()
        return True

    never = asyncio.Event()  # the stand-in keeps it, or the collector would take the tasks that wait for it
    return StandIn(behave=behave)


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("close", "BrokenStream"),
        ("end", "BrokenStream"),
        ("error", "internal_error"),
        ("rubbish", "BadAnswer"),
        ("no http", "BadAnswer"),
    ],
)
async def test_a_stream_that_breaks_fails_and_keeps_its_tokens(how: str, kind: str) -> None:
    records = await asked(breaking(how))
    assert outcomes(records) == [(LoadOutcome.FAILED, kind)] * 3
    assert [len(record.times_s) for record in records] == [2, 2, 2]


async def test_a_server_that_stalls_fails_by_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_s = LONG_S / 2
    async with standing_in(breaking("stall", asyncio.Event())) as stand_in:
        sending = sender(await probe(Target.parse(stand_in.url)), count=3, timeout_s=limit_s)
        running = asyncio.create_task(sending.run())

        def received() -> bool:
            return [len(answer.times) for _, answer in sending._running.values()] == [2, 2, 2]

        assert await until(received, timeout_s=LONG_S)
        loop = asyncio.get_running_loop()
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + limit_s)
        records = sorted_records(await running)
    assert outcomes(records) == [(LoadOutcome.FAILED, "Timeout")] * 3
    assert records[0].tokens == 2


async def test_requests_that_run_at_the_end_of_the_run_did_not_finish() -> None:
    records = await asked(breaking("stall", asyncio.Event()), end_s=0.3)
    assert outcomes(records) == [(LoadOutcome.UNFINISHED, "Unfinished")] * 3


async def test_connections_are_kept_and_a_stale_one_is_replaced() -> None:
    async with standing_in(StandIn()) as stand_in:
        server = await probe(Target.parse(stand_in.url))
        before = stand_in.connections
        asker = server.asker(connections=1, slo=None, temperature=None)
        for index in range(4):  # one after the other
            answer = LoadAnswer()
            await asker.ask(asker.prepare(PlannedRequest(index, 0.0, 10, 2)), answer)
            assert len(answer.times) == 2
        await asker.close()
        assert stand_in.connections - before < 4

    async def close_after(number: int, writer: Writer) -> bool:
        """Answers, and closes the connection although it said nothing about it."""
        if number >= 2:
            await stale.stream(writer, stale.bodies[number])
            writer.close()
        return number >= 2

    stale = StandIn(behave=close_after)
    assert {record.outcome for record in await asked(stale, count=4)} == {LoadOutcome.OK}


async def test_a_server_that_is_not_there_is_named() -> None:
    async with standing_in(StandIn()) as stand_in:
        server = await probe(Target.parse(stand_in.url))
    with nobody_at(stand_in):
        with pytest.raises(NoNode, match=r"cannot reach 127\.0\.0\.1"):
            await probe(server.target)
        assert outcomes(await send(server, count=1)) == [(LoadOutcome.FAILED, "NoConnection")]


async def test_a_server_that_answers_nothing_is_named_with_its_error() -> None:
    async def refuse(_: int, writer: Writer) -> bool:
        await plain(writer, 401, {"error": {"message": "no key", "code": "unauthorized"}})
        return True

    with pytest.raises(BatonError, match="answers no request: 401 unauthorized: no key"):
        await asked(StandIn(behave=refuse))


@pytest.mark.parametrize("text", ["nowhere", "http://", "ftp://host:1", "a b:7", "http://host:port"])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        Target.parse(text)


def test_an_api_that_the_address_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"allowed: completions, chat"):
        Target.parse("http://host:1", api=Api.GRPC)
    with pytest.raises(InvalidRequest, match=r"allowed: grpc"):
        Target.parse("host:1", api=Api.CHAT)
    assert replace(Target.parse("a=host:1"), label="") == Target("host:1", "", Api.GRPC)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_events_may_be_cut_anywhere(size: int) -> None:
    stream = b'data: {"a": 1}\n\n: comment\n\ndata:{"b": 2}\r\n\r\nevent: x\ndata: [DONE]\n\n'
    reader = SseReader()
    payloads = [each for start in range(0, len(stream), size) for each in reader.feed(stream[start : start + size])]
    assert payloads == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


def test_reasoning_and_tool_calls_are_tokens_and_a_role_is_not() -> None:
    def content(delta: str) -> bool:
        return read_chunk(f'{{"choices": [{{"delta": {delta}, "finish_reason": null}}]}}'.encode()).content

    assert not content('{"role": "assistant", "content": ""}')
    assert content('{"reasoning_content": "a"}')
    assert content('{"tool_calls": [{"index": 0}]}')


@pytest.mark.parametrize("running_usage", [True, False])
async def test_a_stream_goes_on_at_another_gateway(running_usage: bool) -> None:
    async def break_down(number: int, writer: Writer) -> bool:
        if number < probes:
            return False
        begin(writer)
        for index in range(2):
            usage = {"prompt_tokens": 100, "completion_tokens": index + 1}
            choice = {"index": 0, "text": "a", "finish_reason": None, "token_ids": [index]}
            chunk(writer, {"choices": [choice], **({"usage": usage} if running_usage else {})})
        await writer.drain()
        writer.close()
        return True

    probes = 1 << 30
    lost = StandIn(running_usage=running_usage, behave=break_down)
    async with standing_in(lost), standing_in(StandIn(running_usage=running_usage)) as other:
        server = await probe(Target.parse(f"{lost.url},{other.url}"))
        probes = len(lost.bodies)
        records = await send(server, count=4)
        assert [(record.outcome, record.tokens) for record in records] == [(LoadOutcome.OK, 5)] * 4
        assert len(lost.bodies) - probes == 2, "the gateways share the requests"
        again = [body for body in other.bodies if "baton" in body]
        assert [body["baton"]["output_token_ids"] for body in again] == [[0, 1]] * 2
        first = [body for body in lost.bodies if "return_token_ids" in body]
        assert [body["seed"] for body in first] == [body["seed"] for body in again]
    async with standing_in(lost):
        with nobody_at(other):
            records = await send(replace(server, target=Target.parse(f"{lost.url},{other.url}")), count=1)
        assert outcomes(records) == [(LoadOutcome.FAILED, "NoConnection")], "of the last gateway that was asked"
