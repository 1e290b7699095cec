"""The owner's end of pulls: serves the Pull streams of other nodes and sends them entries.

Limits what other nodes may use here: links, concurrent pulls, and the time of each pull.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from baton.core.errors import BatonError, Draining, InvalidRequest, Overloaded
from baton.core.kv_entries import EntryKey, NodeRanks
from baton.kvcache.spec import KVCacheSpec
from baton.node.pull_link import in_order
from baton.node.pull_messages import check_hello, check_worker_addresses, pull_job, searched_entries
from baton.protos.internal.v1 import node_pb2 as pb
from baton.protos.v1 import node_status_pb2
from baton.rpc.convert_node import ranks_from_proto
from kvtransfer.entry_links import entry_links
from kvtransfer.ranked import RankedTransfer
from kvtransfer.records import PullJob

log = logging.getLogger("baton")

_HELLO_S = 10.0
# Links of readers. Each takes a worker of UCX with a dozen descriptors for every rank.
_LINKS_MAX = 32
# Pulls at a time; further ones get nothing, and their readers compute.
_PULLS_MAX = 8
# A pull that takes longer is given up together with its link: nothing else makes sure that no entry is in flight.
_SERVE_S = 10.0
# Answers that wait until their reader takes them. A reader has fewer pulls at a time, so one with more takes none.
_ANSWERS_MAX = 64

Write = Callable[[pb.PullResponse], Awaitable[None]]
Answer = Coroutine[Any, Any, pb.PullResponse]
SaveAgain = Callable[[tuple[EntryKey, ...], int | None], Awaitable[None]]
NumToSave = Callable[[tuple[EntryKey, ...], int | None], int]


class _Available(NamedTuple):
    """How many leading entries a pull could transfer.

    Attributes:
        total: including those that only the cache has.
        kept: those before the first one that the stores lack.
        owner: the only rank that they come from; None: all ranks keep a share of each.
    """

    total: int
    kept: int
    owner: int | None


@dataclass(eq=False)
class _Reader:
    """One reader's stream. `outbox` has the messages to it; None ends the stream."""

    number: int
    name: str
    outbox: asyncio.Queue[pb.PullResponse | None] = field(default_factory=asyncio.Queue)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    pulls: set[asyncio.Task[None]] = field(default_factory=set)

    def end(self) -> None:
        self.outbox.put_nowait(None)


class PullOwner:
    """All readers of this node.

    Args:
        info: this node's description of itself.
        namespace: of its entries.
        spec: of the whole model.
        ranks: of this node.
        numbers: for links, shared with this node's own pulls.
        save_again: saves the first of some entries that only the cache has, of one rank if each has its own requests.
        num_to_save: how many of them that would save.
    """

    def __init__(
        self,
        transfer: RankedTransfer,
        info: Callable[[], node_status_pb2.NodeInfo],
        *,
        namespace: bytes,
        spec: KVCacheSpec,
        ranks: NodeRanks,
        numbers: "itertools.count[int]",
        save_again: SaveAgain,
        num_to_save: NumToSave,
    ) -> None:
        self._save_again = save_again
        self._num_to_save = num_to_save
        self._transfer = transfer
        self._info = info
        self._namespace = namespace
        self._spec = spec
        self._ranks = ranks
        self._numbers = numbers
        self._readers: set[_Reader] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._pulls = 0
        self._is_open = True

    async def serve(self, incoming: AsyncIterator[pb.PullRequest], write: Write) -> None:
        """Runs one reader's stream.

        Raises:
            PeerRefused: its entries are of another kind, or its introduction is impossible.
            ConfigError: its ranks cannot split the kv heads.
            UnknownLease: it means another incarnation of this node.
            InvalidRequest: a message is impossible.
            Overloaded: there are too many links, or the reader does not read its answers.
            Draining: this node opens no new links.
            BatonError: the link could not be made.
        """
        hello = await self._hello(incoming)
        check_hello(hello, self._info(), self._namespace)
        if not self._is_open:
            raise Draining(f"{self._info().name} makes no new links", cure="compute the prompt")
        if len(self._readers) >= _LINKS_MAX:
            raise Overloaded(f"{_LINKS_MAX} nodes pull from {self._info().name} already", retry_after_s=1.0)
        reader = _Reader(next(self._numbers), hello.info.name)
        self._readers.add(reader)
        try:
            await self._link(reader, hello, write)
            await self._exchange(reader, incoming, write)
        finally:
            # In a separate task, because gRPC may cancel this handler once the stream's end has been read.
            leaving = asyncio.create_task(self._disconnect(reader), name=f"unlink-{reader.number:x}")
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            await asyncio.shield(leaving)

    async def close(self) -> None:
        """Ends every stream, and returns when nothing of them is left. New ones are refused until `reopen`."""
        self._is_open = False
        for reader in tuple(self._readers):
            reader.end()
        for reader in tuple(self._readers):
            await reader.ended.wait()

    def reopen(self) -> None:
        self._is_open = True

    async def _hello(self, incoming: AsyncIterator[pb.PullRequest]) -> pb.PullHello:
        try:
            async with asyncio.timeout(_HELLO_S):
                message = await anext(aiter(incoming), None)
        except TimeoutError:
            message = None
        if message is None or not message.HasField("hello"):
            raise InvalidRequest("the first message is not a hello", field="hello")
        return message.hello

    async def _link(self, reader: _Reader, hello: pb.PullHello, write: Write) -> None:
        links = entry_links(self._spec, owner=self._ranks, reader=ranks_from_proto(hello.info))
        check_worker_addresses(hello.worker_addresses, links=len(links))
        addresses = await self._transfer.listen(
            reader.number, links, sends=True, on_failed=lambda error: self._link_failed(reader, error)
        )
        await self._transfer.connect(reader.number, dict(zip(sorted(links), hello.worker_addresses, strict=True)))
        await write(pb.PullResponse(accepted=pb.PullAccepted(worker_addresses=in_order(addresses))))

    async def _exchange(self, reader: _Reader, incoming: AsyncIterator[pb.PullRequest], write: Write) -> None:
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(self._read(reader, incoming), name=f"reader-{reader.number:x}")
            while (response := await reader.outbox.get()) is not None:
                try:
                    async with asyncio.timeout(_SERVE_S):
                        await write(response)
                except TimeoutError:
                    raise _takes_no_answers(reader) from None
            reading.cancel()

    async def _read(self, reader: _Reader, incoming: AsyncIterator[pb.PullRequest]) -> None:
        try:
            async for message in incoming:
                answer, empty = self._answer_to(reader, message)
                if reader.outbox.qsize() >= _ANSWERS_MAX:
                    answer.close()
                    raise _takes_no_answers(reader)
                if self._pulls >= _PULLS_MAX:
                    answer.close()
                    reader.outbox.put_nowait(empty)
                    continue
                # Not of the TaskGroup: a pull ends when nothing of it is in flight, also if the stream ends before.
                pull = asyncio.create_task(self._answer(reader, answer), name=f"pull-of-{reader.number:x}")
                reader.pulls.add(pull)
                pull.add_done_callback(reader.pulls.discard)
        finally:
            reader.end()

    def _answer_to(self, reader: _Reader, message: pb.PullRequest) -> tuple[Answer, pb.PullResponse]:
        """The coroutine that answers a message, and the answer of a node that is too busy for it."""
        if message.HasField("search"):
            keys, held = searched_entries(message.search)
            number = message.search.entries.number
            return self._search(number, keys, held, message.search.every), _found(number, 0)
        wanted = message.wanted
        there = wanted.owner_rank if wanted.HasField("owner_rank") else None
        return self._pull(reader, pull_job(wanted), there), _sent(wanted.number, 0)

    async def _pull(self, reader: _Reader, job: PullJob, there: int | None) -> pb.PullResponse:
        found = await self._available(job.keys)
        await self._save_again(job.keys[found.kept :], found.owner)
        sent = await self._transfer.entries.serve_pull(reader.number, job, owner=found.owner, owner_there=there)
        return _sent(job.number, sent)

    async def _search(self, number: int, keys: tuple[EntryKey, ...], held: int, every: int) -> pb.PullResponse:
        # Nothing is saved yet: the caller may want less, or nothing.
        there = held + (await self._available(keys[held:])).total
        if not every:
            return _found(number, there)
        after = tuple(key for key in keys[:there] if (key.number + 1) % every == 0)
        found = await self._transfer.entries.find_state(after)
        return _found(number, after[found - 1].number - keys[0].number + 1 if found else 0)

    async def _answer(self, reader: _Reader, answer: Answer) -> None:
        self._pulls += 1
        try:
            async with asyncio.timeout(_SERVE_S):
                reader.outbox.put_nowait(await answer)
        except TimeoutError:
            log.warning("%s has not taken the entries that it asked for within %g s", reader.name, _SERVE_S)
            reader.end()
        except BatonError:  # the link has broken
            reader.end()
        finally:
            self._pulls -= 1

    async def _available(self, keys: tuple[EntryKey, ...]) -> _Available:
        """What a pull could transfer: from the rank with the most entries, if each has its own requests."""
        owners = range(self._ranks.size) if self._ranks.own_requests else (None,)
        found = await asyncio.gather(*(self._available_from(keys, owner) for owner in owners))
        return max(found, key=lambda each: (each.total, each.kept))

    async def _available_from(self, keys: tuple[EntryKey, ...], owner: int | None) -> _Available:
        kept = await self._transfer.entries.find_entries(keys, owner=owner)
        to_save = self._num_to_save(keys[kept:], owner)
        total = kept + to_save
        if to_save:
            total += await self._transfer.entries.find_entries(keys[total:], owner=owner)
        return _Available(total, kept, owner)

    def _link_failed(self, reader: _Reader, error: BatonError) -> None:
        log.info("lost %s, which pulls entries: %s", reader.name, error)
        reader.end()

    async def _disconnect(self, reader: _Reader) -> None:
        try:
            await self._transfer.disconnect(reader.number)
        finally:
            self._readers.discard(reader)
            reader.ended.set()


def _takes_no_answers(reader: _Reader) -> Overloaded:
    return Overloaded(f"{reader.name} takes no answers about its pulls", retry_after_s=1.0)


def _sent(number: int, entries: int) -> pb.PullResponse:
    return pb.PullResponse(sent=pb.EntriesSent(number=number, entries=entries))


def _found(number: int, entries: int) -> pb.PullResponse:
    return pb.PullResponse(found=pb.EntriesFound(number=number, entries=entries))
