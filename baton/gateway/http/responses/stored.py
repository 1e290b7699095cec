"""Stored responses of the whole gateway: those of this process, and those that another worker process has.

A conversation's next request may reach another worker than the last one did. That worker fetches the conversation once,
in pieces, and then has it too. All workers share one number of bytes: each may use what the others leave, and at least
an equal share.
"""

import asyncio
import base64
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson

from baton.core.errors import BatonError, InvalidRequest
from baton.gateway.core.shared_counters import Count
from baton.gateway.http.errors import HttpRefusal
from baton.gateway.http.responses.answer import response_id
from baton.gateway.http.responses.store import ResponseStore, StoredResponse
from baton.gateway.serving.other_workers import OtherWorkers
from baton.security import identity
from baton.settings.config import MIB
from baton.settings.gateway_config import GatewaySettings

Json = dict[str, Any]

_SEND_ALL = "send the whole conversation in `input`"
_TOPIC = "stored response"
_PIECE_BYTES = 1 << 18  # of a moved conversation: encoding and decoding one delays streams by under a millisecond
_PREFIX = response_id("")


class StoredResponses:
    """Finds, keeps and deletes the responses of the current caller (`baton.security.identity`).

    Attributes:
        is_on: whether the gateway stores responses.
    """

    def __init__(self, settings: GatewaySettings, other_workers: OtherWorkers) -> None:
        self._store = ResponseStore(int(settings.response_store_mib * MIB))
        self._least_bytes = self._store.bytes_max // settings.processes
        self._others = other_workers
        self._counters = other_workers.shared_counters
        self._asking: set[asyncio.Task[object]] = set()
        other_workers.answer_about(_TOPIC, self._answer)

    @property
    def is_on(self) -> bool:
        return self._store.bytes_max > 0

    def check_on(self, field: str) -> None:
        """Raises InvalidRequest if the gateway stores no responses; `field` needs one."""
        if not self.is_on:
            message = f"{field} needs stored responses, and this gateway stores none (--response-store-mib 0)"
            raise InvalidRequest(message, field=field, cure=f"{_SEND_ALL}, and `store` false")

    def has_room_for(self, inputs: bytes, previous: StoredResponse | None) -> bool:
        """Whether the whole store can hold a response with these items that continues `previous`."""
        before = 0 if previous is None else previous.conversation_bytes
        return before + len(inputs) < self._store.bytes_max

    def keep(self, response: StoredResponse) -> None:
        """Stores a response; older ones make room. One that is larger than the whole store is not kept."""
        self._put(_owner(), response)

    async def previous(self, given: str) -> StoredResponse:
        """Returns the response with this id, which a request continues.

        Raises:
            InvalidRequest: the gateway stores no responses, or not this one (any more).
        """
        self.check_on("previous_response_id")
        found = await self.find(given)
        if found is None:
            raise _not_found(given, 400, "previous_response_not_found", "previous_response_id")
        return found

    async def existing(self, given: str) -> StoredResponse:
        """Returns the response that a path names. Raises HttpRefusal (404) if there is none."""
        found = await self.find(given)
        if found is None:
            raise _not_found(given, 404, "not_found")
        return found

    async def find(self, given: str) -> StoredResponse | None:
        """Returns the response with this id, of whichever worker process; None: there is none."""
        if not given.startswith(_PREFIX):
            return None
        owner, key = _owner(), given.removeprefix(_PREFIX)
        found = self._store.get(owner, key)
        return found if found is not None else await self._fetch(owner, key)

    async def delete(self, given: str) -> None:
        """Deletes a response. Raises HttpRefusal (404) if there is none."""
        owner, key = _owner(), given.removeprefix(_PREFIX)
        deleted = given.startswith(_PREFIX) and self._delete(owner, key)
        others = await self._ask({"delete": key, "owner": owner}) if given.startswith(_PREFIX) else []
        if not deleted and not any(other.get("deleted") for other in others):
            raise _not_found(given, 404, "not_found")

    async def _fetch(self, owner: str, key: str) -> StoredResponse | None:
        """Copies a response and its conversation from another worker process; None: none has it (any more)."""
        offers = [answer for answer in await self._ask({"find": key, "owner": owner}) if "row" in answer]
        if not offers:
            return None
        moved, size_bytes = bytearray(), sum(sum(sizes) for _, *sizes in offers[0]["responses"])
        while len(moved) < size_bytes:
            question = {"fetch": key, "owner": owner, "row": offers[0]["row"], "start": len(moved)}
            pieces = [answer["piece"] for answer in await self._ask(question) if "piece" in answer]
            if not pieces or not (piece := base64.b64decode(pieces[0])):
                return None  # it made room for others meanwhile
            moved += piece
        texts, found = memoryview(moved), None
        for each_key, *sizes in offers[0]["responses"]:
            body, inputs, outputs = _cut(texts, sizes)
            texts = texts[sum(sizes) :]
            found = StoredResponse(each_key, body, inputs, outputs, found)
        if found is not None:
            self._put(owner, found)
        return found

    def _put(self, owner: str, response: StoredResponse) -> None:
        self._store.put(owner, response, room_bytes=self._room_bytes())
        self._counters.set(Count.STORED, self._store.size_bytes)
        if self._counters.total(Count.STORED) > self._store.bytes_max:
            task = asyncio.get_running_loop().create_task(self._ask({"fit": True, "owner": owner}))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    def _delete(self, owner: str, key: str) -> bool:
        deleted = self._store.delete(owner, key)
        self._counters.set(Count.STORED, self._store.size_bytes)
        return deleted

    def _room_bytes(self) -> int:
        """Bytes that this process may store, given what the others have."""
        others = self._counters.total(Count.STORED) - self._store.size_bytes
        return max(self._least_bytes, self._store.bytes_max - others)

    async def _ask(self, question: Json) -> list[Json]:
        return await self._others.ask_about(_TOPIC, question)

    def _answer(self, question: Mapping[str, Any], row: int) -> Json:
        """Answers another worker process."""
        owner = question["owner"]
        if "delete" in question:
            return {"deleted": self._delete(owner, question["delete"])}
        if "fit" in question:
            self._store.fit(self._room_bytes())
            self._counters.set(Count.STORED, self._store.size_bytes)
            return {}
        found = self._store.get(owner, question["find" if "find" in question else "fetch"])
        if found is None:
            return {}
        if "find" in question:
            return {"row": row, "responses": [(each.key, *map(len, texts)) for each, texts in _moved(found)]}
        if question["row"] != row:
            return {}
        texts = [text for _, texts in _moved(found) for text in texts]
        return {"piece": base64.b64encode(_piece(texts, question["start"])).decode()}


def items_of(found: StoredResponse, *, before_answer: bool = False) -> list[Json]:
    """Returns the items of the conversation, each with an id.

    Args:
        before_answer: leave out the last response's own output.
    """
    items = []
    for each in found.conversation():
        inputs: list[Json] = orjson.loads(b"[%b]" % each.inputs)
        items += [{**item, "id": item.get("id") or f"in_{each.key}_{index}"} for index, item in enumerate(inputs)]
        if each is not found or not before_answer:
            items += orjson.loads(b"[%b]" % each.outputs)
    return items


def response_of_item(item_id: str) -> str:
    """Returns the id of the response that has the item with this id; empty: the id is none of ours."""
    key = item_id.partition("_")[2].rpartition("_")[0]
    return response_id(key) if key else ""


def encoded(items: list[Json]) -> bytes:
    """Returns items as JSON without brackets."""
    return orjson.dumps(items)[1:-1]


def _moved(response: StoredResponse) -> list[tuple[StoredResponse, tuple[bytes, bytes, bytes]]]:
    """The texts of each response of the conversation. Earlier ones need no object, because nobody finds them there."""
    return [
        (each, (each.body if each is response else b"", each.inputs, each.outputs)) for each in response.conversation()
    ]


def _piece(texts: Iterable[bytes], start: int) -> bytes:
    """The bytes from `start` of the texts one after another, at most `_PIECE_BYTES`."""
    piece = bytearray()
    for text in texts:
        if start < len(text):
            piece += memoryview(text)[start : start + _PIECE_BYTES - len(piece)]
        start = max(0, start - len(text))
        if len(piece) == _PIECE_BYTES:
            break
    return bytes(piece)


def _cut(texts: memoryview, sizes: Iterable[int]) -> Iterator[bytes]:
    """The parts of these sizes, one after another."""
    start = 0
    for size in sizes:
        yield bytes(texts[start : start + size])
        start += size


def _owner() -> str:
    """Returns the owner of the current caller's responses. Callers without a key or certificate share theirs."""
    caller = identity.current()
    return caller.name if caller.proved else ""


def _not_found(given: str, status: int, code: str, field: str = "response_id") -> BatonError:
    return HttpRefusal(
        status,
        code,
        "there is no such response: it was not stored here, was deleted, or made room for newer ones",
        field=field,
        value=given,
        cure=_SEND_ALL,
    )
