"""Stored answers on real connections: continued, listed, deleted, kept apart by caller, and switched off."""

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from baton.gateway.core.shared_counters import SharedCounters
from baton.gateway.http.responses.store import StoredResponse
from baton.gateway.http.responses.stored import StoredResponses
from baton.gateway.serving.other_workers import AnswerAbout, SingleWorker
from baton.settings.gateway_config import GatewaySettings
from tests.unit.gateway.http.chat_stream import events
from tests.unit.gateway.http.http_gateway import Answer, HttpGateway, Wire, open_http_gateway, step_token

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)


@pytest.fixture
async def door() -> AsyncIterator[HttpGateway]:
    async with open_http_gateway() as opened:
        yield opened


async def post(door: HttpGateway, **body: Any) -> Answer:
    """The answer to a request that has two tokens of output."""
    headers = body.pop("headers", {})
    wire = await door.connect()
    data = json.dumps({"max_output_tokens": 2, **body}).encode()
    wire.send("POST", "/v1/responses", data, content_type="application/json", **headers)
    key = await door.accept()
    door.decode.send_tokens(step_token(0), key=key)
    door.finish(1, key=key)
    if not body.get("stream"):
        return await wire.answer()
    answer = await wire.head()
    answer.body = await wire.chunks()
    return answer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_stored_and_continued(door: HttpGateway, stream: bool) -> None:
    answer = await post(door, input="Hello", instructions="Be kind.", stream=stream)
    first = events(answer.body)[-1].data["response"] if stream else answer.json
    assert first["store"] is True
    assert (await door.call("GET", f"/v1/responses/{first['id']}")).json == first
    second = (await post(door, input="And now?", previous_response_id=first["id"])).json
    assert second["previous_response_id"] == first["id"]
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    listed = (await door.call("GET", f"/v1/responses/{second['id']}/input_items?order=asc")).json
    texts = [item["content"][0]["text"] for item in listed["data"]]
    assert texts == ["Hello", first["output"][0]["content"][0]["text"], "And now?"]
    assert [ITEM.validate_python(item).type for item in listed["data"]] == ["message"] * 3


async def test_items_are_listed_in_pages_the_last_first(door: HttpGateway) -> None:
    turns = [{"role": "user", "content": str(number)} for number in range(5)]
    path = f"/v1/responses/{(await post(door, input=turns)).json['id']}/input_items"
    page = (await door.call("GET", f"{path}?limit=2")).json
    assert [item["content"][0]["text"] for item in page["data"]] == ["4", "3"]
    assert page["has_more"]
    rest = (await door.call("GET", f"{path}?limit=9&after={page['last_id']}")).json
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "1", "0"]
    assert not rest["has_more"]
    for query, field in (
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("limit=0101", "limit"),
        ("order=up", "order"),
        ("after=no", "after"),
    ):
        answer = await door.call("GET", f"{path}?{query}")
        assert (answer.status, answer.error["param"]) == (400, field)


async def test_an_item_can_be_referred_to_and_stays_when_its_response_goes(door: HttpGateway) -> None:
    first = (await post(door, input="Hello")).json
    item = first["output"][0]
    turns = [{"type": "item_reference", "id": item["id"]}, {"role": "user", "content": "So?"}]
    second = (await post(door, input=turns)).json
    await door.call("DELETE", f"/v1/responses/{first['id']}")
    listed = (await door.call("GET", f"/v1/responses/{second['id']}/input_items?order=asc")).json
    assert listed["data"][0] == item
    answer = await door.call("POST", "/v1/responses", {"input": [{"type": "item_reference", "id": item["id"]}]})
    assert (answer.status, answer.error["param"]) == (400, "input[0].id")


async def test_a_deleted_response_is_gone_and_its_continuations_are_not(door: HttpGateway) -> None:
    first = (await post(door, input="Hello")).json
    second = (await post(door, input="More", previous_response_id=first["id"])).json
    deleted = await door.call("DELETE", f"/v1/responses/{first['id']}")
    assert deleted.json == {"id": first["id"], "object": "response", "deleted": True}
    assert (await door.call("GET", f"/v1/responses/{first['id']}")).status == 404
    assert (await door.call("DELETE", f"/v1/responses/{first['id']}")).status == 404
    third = (await post(door, input="Again", previous_response_id=second["id"])).json
    listed = (await door.call("GET", f"/v1/responses/{third['id']}/input_items?limit=100")).json
    assert len(listed["data"]) == 5


async def test_store_false_stores_nothing(door: HttpGateway) -> None:
    answer = (await post(door, input="Hello", store=False)).json
    assert answer["store"] is False
    assert (await door.call("GET", f"/v1/responses/{answer['id']}")).status == 404


@pytest.mark.parametrize("previous", ["resp_none", "none", "resp_", "resp_../x"])
async def test_an_unknown_response_is_refused_with_the_cure(door: HttpGateway, previous: str) -> None:
    answer = await door.call("POST", "/v1/responses", {"input": "a", "previous_response_id": previous})
    assert (answer.status, answer.error["code"]) == (400, "previous_response_not_found")
    assert answer.error["param"] == "previous_response_id"
    assert "send the whole conversation in `input`" in answer.error["message"]
    assert door.decode.received.empty()


async def test_a_gateway_that_stores_nothing_says_so() -> None:
    async with open_http_gateway("--response-store-mib", "0") as door:
        answer = (await post(door, input="Hello")).json
        assert answer["store"] is False
        for body, field in (
            ({"store": True}, "store"),
            ({"previous_response_id": answer["id"]}, "previous_response_id"),
        ):
            refused = await door.call("POST", "/v1/responses", {"input": "a", **body})
            assert (refused.status, refused.error["param"]) == (400, field)
            assert "--response-store-mib" in refused.error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_that_the_store_cannot_hold_says_so(stream: bool) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "z" * 20_000}
    async with open_http_gateway("--response-store-mib", "0.01") as door:
        answer = await post(door, input=[thought, {"role": "user", "content": "Hello"}], stream=stream)
        response = events(answer.body)[-1].data["response"] if stream else answer.json
        assert response["store"] is False
        assert "--response-store-mib" in answer.headers["x-baton-warning"]


async def test_a_response_in_progress_can_be_cancelled(door: HttpGateway) -> None:
    wire = await door.connect()
    body = {"input": "Hello", "stream": True, "max_output_tokens": 9}
    wire.send("POST", "/v1/responses", json.dumps(body).encode(), x_request_id="r1")
    await door.accept()
    door.decode.send_tokens(step_token(0))
    await wire.head()
    path = f"/v1/responses/{await begun(wire)}/cancel"
    by_request = await door.call("POST", "/v1/responses/resp_r1/cancel", content_type="application/json")
    assert by_request.status == 404
    cancelled = await door.call("POST", path, content_type="application/json")
    assert cancelled.json["status"] == "cancelled"
    assert events(await wire.chunks())[-1].name == "response.failed"
    again = await door.call("POST", path, content_type="application/json")
    assert again.status == 404
    await door.cancelled()
    ended = (await post(door, input="Hello", headers={"x_request_id": "r2"})).json
    refused = await door.call("POST", f"/v1/responses/{ended['id']}/cancel", content_type="application/json")
    assert refused.error["message"] == f"{ended['id']} has ended; allowed: a response in progress"


async def begun(wire: Wire) -> str:
    """The id in the first event of a stream."""
    (created, *_) = events(await wire.chunk())
    assert created.name == "response.created"
    return str(created.data["response"]["id"])


async def test_answers_to_one_request_id_are_kept_and_cancelled_apart(door: HttpGateway) -> None:
    """Clients may send any request id, such as one with a slash, and the same one many times."""
    same = {"x_request_id": "team/one"}
    ended = [(await post(door, input=text, headers=same)) for text in ("Hello", "Bye")]
    assert {answer.headers["x-request-id"] for answer in ended} == {"team/one"}
    assert len({answer.json["id"] for answer in ended}) == 2
    for answer in ended:
        assert (await door.call("GET", f"/v1/responses/{answer.json['id']}")).json == answer.json
    wires, keys = [], []
    for _ in range(2):
        wires.append(await door.connect())
        body = {"input": "Hello", "stream": True, "max_output_tokens": 2}
        wires[-1].send("POST", "/v1/responses", json.dumps(body).encode(), **same)
        keys.append(await door.accept())
        door.decode.send_tokens(step_token(0), key=keys[-1])
        await wires[-1].head()
    first, second = [await begun(wire) for wire in wires]
    assert (await door.call("POST", f"/v1/responses/{first}/cancel", content_type="application/json")).status == 200
    door.finish(1, key=keys[1])
    last = [events(await wire.chunks())[-1] for wire in wires]
    assert [event.name for event in last] == ["response.failed", "response.incomplete"]
    assert [event.data["response"]["id"] for event in last] == [first, second]


async def test_a_stored_response_is_not_streamed(door: HttpGateway) -> None:
    answer = await door.call("GET", "/v1/responses/resp_1?stream=true")
    assert (answer.status, answer.error["param"]) == (400, "stream")


async def test_another_tenant_finds_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    hashes = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("ann", "bob")}
    file.write_text("".join(f'[keys.{name}]\nsha256 = "{digest}"\n' for name, digest in hashes.items()))
    ann, bob = ({"authorization": f"Bearer {name}"} for name in hashes)
    async with open_http_gateway("--api-keys", str(file), asks=True) as door:
        given = (await post(door, input="Secret", headers=ann)).json["id"]
        path = f"/v1/responses/{given}"
        assert (await door.call("GET", path, **ann)).status == 200
        for method, end in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
            assert (await door.call(method, path + end, **bob)).status == 404
        body = {"input": "a", "previous_response_id": given}
        refused = await door.call("POST", "/v1/responses", body, **bob)
        assert refused.error["code"] == "previous_response_not_found"
        assert (await door.call("GET", path)).status == 401


class Colleagues(SingleWorker):
    """The workers of one gateway, in one process."""

    def __init__(self, all_of_them: "list[Colleagues]", fd: int | None = None) -> None:
        self.shared_counters = SharedCounters(2, len(all_of_them), fd)
        self._all = all_of_them
        self._answers: dict[str, AnswerAbout] = {}
        all_of_them.append(self)

    def answer_about(self, topic: str, answer: AnswerAbout) -> None:
        self._answers[topic] = answer

    async def ask_about(self, topic: str, question: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Sends everything as JSON, as processes do."""
        sent = json.loads(json.dumps(question))
        found = [each._answers[topic](sent, each.shared_counters.row) for each in self._all if each is not self]
        return [dict(json.loads(json.dumps(each))) for each in found]


@pytest.fixture
def two_workers() -> Iterator[tuple[StoredResponses, StoredResponses]]:
    """The stores of two workers that share 2 MiB."""
    _, fd = SharedCounters.create(2)
    settings, workers = GatewaySettings(workers=2, response_store_mib=2.0), list[Colleagues]()
    one, other = (StoredResponses(settings, Colleagues(workers, fd)) for _ in range(2))
    yield one, other
    os.close(fd)


async def test_a_conversation_goes_on_at_another_worker() -> None:
    settings, workers = GatewaySettings(workers=2), list[Colleagues]()
    one, other = (StoredResponses(settings, Colleagues(workers)) for _ in range(2))
    first = StoredResponse("a", b'{"output":[]}', b'{"n":1}', b'{"n":2}')
    one.keep(first)
    one.keep(StoredResponse("b", b"whole", b'{"n":3}', b"", first))
    found = await other.find("resp_b")
    assert found is not None
    assert (found.body, [each.inputs for each in found.conversation()]) == (b"whole", [b'{"n":1}', b'{"n":3}'])
    await other.delete("resp_b")
    assert await one.find("resp_b") is None
    assert await one.find("resp_a") is first


@pytest.mark.parametrize("given", ["resp_", "resp_\0", "resp_none"])
async def test_other_workers_are_asked_about_any_id(given: str) -> None:
    settings, workers = GatewaySettings(workers=2), list[Colleagues]()
    one, other = (StoredResponses(settings, Colleagues(workers)) for _ in range(2))
    one.keep(StoredResponse("a", b"whole", b"", b""))
    assert await other.find(given) is None


async def test_a_large_conversation_moves_in_pieces(two_workers: tuple[StoredResponses, StoredResponses]) -> None:
    one, other = two_workers
    texts = [bytes([65 + number]) * (1 << 17) for number in range(6)]
    first = StoredResponse("a", b"dropped", texts[0], texts[1])
    one.keep(StoredResponse("c", texts[2], texts[3], texts[4], StoredResponse("b", b"", b"", texts[5], first)))
    found = await other.find("resp_c")
    assert found is not None
    assert found.body == texts[2]
    moved = [(each.key, each.inputs, each.outputs) for each in found.conversation()]
    assert moved == [("a", texts[0], texts[1]), ("b", b"", texts[5]), ("c", texts[3], texts[4])]


async def test_a_worker_may_use_all_the_room_that_others_leave(
    two_workers: tuple[StoredResponses, StoredResponses],
) -> None:
    one, other = two_workers
    large = StoredResponse("large", b"x" * 1_900_000, b"", b"")
    assert one.has_room_for(b"x" * 1_900_000, None)
    one.keep(large)
    assert await one.find("resp_large") is large
    other.keep(StoredResponse("own", b"y" * 900_000, b"", b""))
    await asyncio.sleep(0)  # `one` is asked to make room
    await asyncio.sleep(0)
    assert await one.find("resp_large") is None
    assert await other.find("resp_own") is not None


async def test_a_worker_keeps_its_share_however_much_another_stores(
    two_workers: tuple[StoredResponses, StoredResponses],
) -> None:
    one, other = two_workers
    other.keep(StoredResponse("own", b"y" * 900_000, b"", b""))
    for number in range(10):
        one.keep(StoredResponse(f"{number}", b"x" * 500_000, b"", b""))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert await other.find("resp_own") is not None
    kept = [number for number in range(10) if await one.find(f"resp_{number}") is not None]
    assert kept == [8, 9]
