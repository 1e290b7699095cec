"""Stored responses of the whole gateway: those of this process, and those that another worker process has.

A conversation's next request may reach another worker than the last one did. That worker fetches the conversation once
and then has it too.
"""

import base64
from collections.abc import Mapping
from typing import Any

import orjson

from baton.core.errors import BatonError, InvalidRequest
from baton.gateway.http.errors import HttpRefusal
from baton.gateway.http.responses.answer import response_id
from baton.gateway.http.responses.store import ResponseStore, StoredResponse
from baton.gateway.serving.serving import OtherWorkers
from baton.security import identity
from baton.settings.config import MIB
from baton.settings.gateway_config import GatewaySettings

Json = dict[str, Any]

_SEND_ALL = "send the whole conversation in `input`"
_TOPIC = "stored response"
_MOVED_BYTES_MAX = 8 * MIB  # of one conversation; a message between processes is limited to 16 MiB, in base64
_PREFIX = response_id("")


class StoredResponses:
    """Finds, keeps and deletes the responses of the current caller (`baton.security.identity`).

    Attributes:
        is_on: whether the gateway stores responses.
    """

    def __init__(self, settings: GatewaySettings, other_workers: OtherWorkers) -> None:
        self._store = ResponseStore(int(settings.response_store_mib * MIB / settings.workers))
        self._others = other_workers
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
        self._store.put(_owner(), response)

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
        """Returns the response with this id; None: there is none.

        Raises:
            InvalidRequest: another worker process has it, and it is too large to be fetched.
        """
        if not given.startswith(_PREFIX):
            return None
        owner, key = _owner(), given.removeprefix(_PREFIX)
        found = self._store.get(owner, key)
        return found if found is not None else await self._fetch(owner, key)

    async def delete(self, given: str) -> None:
        """Deletes a response. Raises HttpRefusal (404) if there is none."""
        owner, key = _owner(), given.removeprefix(_PREFIX)
        deleted = given.startswith(_PREFIX) and self._store.delete(owner, key)
        others = await self._ask({"delete": key, "owner": owner}) if given.startswith(_PREFIX) else []
        if not deleted and not any(other.get("deleted") for other in others):
            raise _not_found(given, 404, "not_found")

    async def _fetch(self, owner: str, key: str) -> StoredResponse | None:
        """Copies a response and its conversation from another worker process."""
        sizes = [answer for answer in await self._ask({"find": key, "owner": owner}) if "row" in answer]
        if not sizes:
            return None
        if sizes[0]["bytes"] > _MOVED_BYTES_MAX:
            raise InvalidRequest(
                f"{response_id(key)} belongs to another worker process, and its conversation of "
                f"{sizes[0]['bytes'] / MIB:.0f} MiB is too large to move",
                field="previous_response_id",
                value=response_id(key),
                cure=f"{_SEND_ALL}, or start the gateway with --workers 1",
            )
        answers = await self._ask({"fetch": key, "owner": owner, "row": sizes[0]["row"]})
        moved: list[Json] = next((answer["responses"] for answer in answers if "responses" in answer), [])
        found: StoredResponse | None = None
        for each in moved:
            body, inputs, outputs = (base64.b64decode(each[name]) for name in ("body", "inputs", "outputs"))
            found = StoredResponse(each["key"], body, inputs, outputs, found)
        if found is not None:
            self._store.put(owner, found)
        return found

    async def _ask(self, question: Json) -> list[Json]:
        return await self._others.ask_about(_TOPIC, question)

    def _answer(self, question: Mapping[str, Any], row: int) -> Json:
        """Answers another worker process."""
        owner = question["owner"]
        if "delete" in question:
            return {"deleted": self._store.delete(owner, question["delete"])}
        found = self._store.get(owner, question["find" if "find" in question else "fetch"])
        if found is None:
            return {}
        if "find" in question:
            return {"row": row, "bytes": _moved_bytes(found)}
        if question["row"] != row or _moved_bytes(found) > _MOVED_BYTES_MAX:
            return {}
        return {"responses": [_moved(each, with_body=each is found) for each in found.conversation()]}


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


def _moved_bytes(response: StoredResponse) -> int:
    return response.items_bytes + len(response.body)


def _moved(response: StoredResponse, *, with_body: bool) -> Json:
    """Returns a response as JSON. Earlier ones of its conversation need no object, because nobody finds them there."""
    texts = {"body": response.body if with_body else b"", "inputs": response.inputs, "outputs": response.outputs}
    return {"key": response.key, **{name: base64.b64encode(text).decode() for name, text in texts.items()}}


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
