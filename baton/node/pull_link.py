"""The reader's end of a link to one node that has KV: a Pull stream, from hello to close.

A link lives as long as its stream, and a link that is not used ends. Any failure closes the link: both ends then drop
what they hold for it, and the next pull opens a new one.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc

from baton.core.errors import BatonError, DataLoss, DeadlineExceeded, InternalError, NoNode
from baton.core.kv_entries import EntryKey
from baton.core.tracebacks import drop_tracebacks
from baton.node.pull_messages import check_worker_addresses, wanted_entries, wanted_job
from baton.protos.internal.v1 import node_pb2 as pb
from baton.protos.internal.v1 import node_pb2_grpc
from baton.rpc.channels import connect
from baton.rpc.status import from_rpc_error
from baton.security.tls import Dial
from kvtransfer.flows import Flow, RankPair
from kvtransfer.pull_sender import NUMBER_BITS
from kvtransfer.ranked import RankedTransfer
from kvtransfer.records import PullJob

log = logging.getLogger("baton")

_OPEN_S = 5.0
_IDLE_S = 60.0
# The owner says that it has sent entries when its transport has; they need this long at most to be in their places.
_ARRIVE_S = 1.0

Call = grpc.aio.StreamStreamCall[pb.PullRequest, pb.PullResponse]


class PullLink:
    """The link to one incarnation of one node. Connects at once, and is closed by `close` or after some idle time.

    Args:
        hello: this node's introduction, without addresses.
        number: this node's number for the link.
        links: between the ranks of both nodes, and what each carries of an entry.
    """

    def __init__(
        self,
        transfer: RankedTransfer,
        address: str,
        hello: pb.PullHello,
        *,
        number: int,
        links: Mapping[RankPair, tuple[Flow, ...]],
        keepalive_s: float,
        dial: Dial | None,
    ) -> None:
        self.address = address
        self.incarnation = hello.incarnation
        self._transfer = transfer
        self._hello = hello
        self._number = number
        self._links = links
        self._keepalive_s = keepalive_s
        self._dial = dial
        self._error: BatonError | None = None
        self._outbox: asyncio.Queue[pb.PullRequest | None] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[int]] = {}
        self._settled = asyncio.Event()
        self._was_made = False
        self._running = 0
        self._task = asyncio.create_task(self._live(), name=f"pull-link-{address}")

    @property
    def is_over(self) -> bool:
        """Whether the link has ended, or is about to."""
        return self._error is not None

    @property
    def has_settled(self) -> bool:
        """Whether the link is connected, or cannot be."""
        return self._settled.is_set()

    @property
    def is_ready(self) -> bool:
        """Whether the link is connected."""
        return self._settled.is_set() and not self.is_over

    @property
    def why_not_connected(self) -> BatonError | None:
        """Why the link could not be connected; None if it was, or still may be."""
        return None if self._was_made else self._error

    @property
    def is_used(self) -> bool:
        """Whether a pull waits for the link or runs over it."""
        return self._running > 0

    async def pull(self, keys: tuple[EntryKey, ...], *, owner: int | None) -> int:
        """Brings the first of these entries to host memory. Returns how many leading entries it then has. Cancelling
        the call also closes the link.

        Args:
            owner: the only rank of this node that receives them; None: every rank receives its share.

        Raises:
            BatonError: the link cannot be connected, or has broken.
        """
        async with self._in_use():
            return await self._pull(keys, None, owner)

    async def pull_state(self, keys: tuple[EntryKey, ...], after: EntryKey) -> int:
        """As `pull`, with the recurrent state after an entry, which counts as one more: the last of `keys`, or if there
        are none the one before. Brings nothing if not all of it has room."""
        async with self._in_use():
            return await self._pull(keys, after, None)

    async def search(self, keys: tuple[EntryKey, ...], *, held: int = 0, every: int = 0) -> int:
        """Returns how many of the first of these entries the other node has, without a gap after the `held` ones of
        this node. So a useless pull costs one question, and no entry is evicted to make room for it.

        Args:
            every: stores keep a state after every `every` entries of the sequence. Only entries up to the other node's
                last such state count. 0: no state is wanted.

        Raises:
            BatonError: as for `pull`.
        """
        async with self._in_use():
            number = secrets.randbits(NUMBER_BITS)
            search = pb.EntrySearch(entries=wanted_entries(number, keys, held=held), every=every)
            return min(await self._asked(number, pb.PullRequest(search=search)), len(keys))

    @asynccontextmanager
    async def _in_use(self) -> AsyncIterator[None]:
        """Waits until the link is made, or cannot be. Idle links make room for others, those in use do not."""
        self._running += 1
        try:
            await self._settled.wait()
            self._check()
            yield
        finally:
            self._running -= 1

    async def _pull(self, keys: tuple[EntryKey, ...], after: EntryKey | None, owner: int | None) -> int:
        job = PullJob(secrets.randbits(NUMBER_BITS), keys, after)
        first = 0
        begun = await self._transfer.entries.begin_pull(self._number, job, owner=owner)
        asked: PullJob | None = job
        if begun < len(job):
            asked = replace(job, keys=keys[:begun]) if begun and after is None else None
        try:
            if asked is not None:
                self._check()
                answer = await self._asked(job.number, pb.PullRequest(wanted=wanted_job(asked, owner=owner)))
                first = min(answer, len(asked))
        finally:
            try:
                found = await self._transfer.entries.end_pull(
                    self._number, job.number, first=first, timeout_s=_ARRIVE_S, owner=owner
                )
            except DataLoss as error:
                raise self.close(error) from None
        return found

    async def _asked(self, number: int, request: pb.PullRequest) -> int:
        """Sends a request, and returns the number of entries in its answer."""
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._outbox.put_nowait(request)
            return await answer
        finally:
            del self._answers[number]

    def close(self, error: BatonError) -> BatonError:
        """Ends the link, for this reason unless it has ended for another one. Returns the reason; `wait_closed` waits
        for the end."""
        if self._error is None:
            self._error = error
            self._settled.set()  # a task that is cancelled before it has begun does nothing
            self._task.cancel()
        return self._error

    async def wait_closed(self) -> None:
        """Returns when nothing of the link is left."""
        await asyncio.wait([self._task])

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _live(self) -> None:
        try:
            async with connect(self.address, keepalive_s=self._keepalive_s, dial=self._dial) as channel:
                call = node_pb2_grpc.NodeStub(channel).Pull()
                async with asyncio.timeout(_OPEN_S):
                    await self._open(call)
                self._was_made = True
                self._settled.set()
                await self._exchange(call)
        except* Exception as failed:  # noqa: BLE001  any failure of one link costs that link alone
            self._error = self._described(failed.exceptions[0])
            drop_tracebacks(failed)  # their frames hold the connection
        finally:
            self._error = self._error or NoNode(f"the link to {self.address} has ended")
            self._settled.set()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(self._error)
            await self._transfer.disconnect(self._number)

    async def _open(self, call: Call) -> None:
        addresses = await self._transfer.listen(self._number, self._links, sends=False, on_failed=self._link_failed)
        self._hello.worker_addresses.extend(in_order(addresses))
        await call.write(pb.PullRequest(hello=self._hello))
        response = await call.read()
        if not isinstance(response, pb.PullResponse):  # the end of the stream
            raise NoNode(f"{self.address} has ended the stream", cure="see its log")
        theirs = response.accepted.worker_addresses
        check_worker_addresses(theirs, links=len(self._links))
        await self._transfer.connect(self._number, dict(zip(sorted(self._links), theirs, strict=True)))

    async def _exchange(self, call: Call) -> None:
        """Writes and reads until one of the two nodes ends the stream, or nothing was asked for some time."""
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read(call))
            try:
                while True:
                    async with asyncio.timeout(_IDLE_S):
                        request = await self._outbox.get()
                    if request is None:
                        return
                    await call.write(request)
            except TimeoutError:
                pass
            finally:
                self._error = self._error or NoNode(f"the link to {self.address} has ended")
                reading.cancel()

    async def _read(self, call: Call) -> None:
        # NOTE: not `async for`: a grpc call refuses to mix that with read().
        while isinstance(response := await call.read(), pb.PullResponse):
            said = response.found if response.HasField("found") else response.sent
            answer = self._answers.get(said.number)
            if answer is not None and not answer.done():
                answer.set_result(said.entries)
        self._outbox.put_nowait(None)

    def _link_failed(self, error: BatonError) -> None:
        self.close(error)

    def _described(self, error: Exception) -> BatonError:
        match error:
            case grpc.aio.AioRpcError():
                return from_rpc_error(error)
            case TimeoutError():
                return DeadlineExceeded(f"no link to {self.address} within {_OPEN_S:g} s")
            case BatonError():
                return error
            case asyncio.InvalidStateError():  # raised by a write
                return NoNode(f"{self.address} has ended the stream")
        log.error("the link to %s failed", self.address, exc_info=error)
        return InternalError(f"{type(error).__name__}: {error}")


def in_order(addresses: Mapping[RankPair, bytes]) -> list[bytes]:
    """The addresses of a node's ends of links, in the order in which they travel."""
    return [addresses[link] for link in sorted(addresses)]
