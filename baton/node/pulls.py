"""Pulls KV that another node keeps into this node's host memory, if that is faster than computing it.

`pull_link` is one link as its reader sees it, `pull_owner` serves the readers of this node.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable

from baton.core import pull_costs
from baton.core.costs import StepCosts
from baton.core.errors import BatonError, ConfigError, DeadlineExceeded, Draining, PeerRefused
from baton.core.kv_entries import EntryKey, KeptPrefix, NodeRanks
from baton.core.pull_costs import PullCosts, is_worth_pulling
from baton.kvcache.spec import KVCacheSpec
from baton.node.pull_link import PullLink
from baton.node.pull_owner import NumToSave, PullOwner, SaveAgain
from baton.node.pull_speed import PullSample, PullSpeed
from baton.protos.internal.v1 import node_pb2 as pb
from baton.protos.v1 import node_status_pb2
from baton.rpc.server import ListenAddress
from baton.security.roles import NODE
from baton.security.tls import InternalTls
from kvtransfer.entry_links import entry_links
from kvtransfer.ledger import FIRST_PULL_LINK
from kvtransfer.pair_ends import MOST_RANKS
from kvtransfer.ranked import RankedTransfer

log = logging.getLogger("baton")

# A pull gets the time that its tokens would need to be computed, within these limits.
PULL_S_MIN = 0.5
# Pulls at a time; a further prompt is computed.
_PULLS_MAX = 4
# Links to other nodes; one that is idle makes room for another.
_LINKS_MAX = 32
# A node whose pull failed is not asked again for this long, and one that has refused not before it restarts: its kind
# cannot change while it lives.
_BACK_OFF_S = 10.0
# A pull takes room in host memory for all that it may bring. One of more entries asks first how many there are, so that
# few entries leave for a pull that brings nothing. The question takes some milliseconds on a busy machine.
_UNASKED_ENTRIES = 8
# Nodes whose failures are remembered; the latest ones.
_FAILED_MAX = 1024

# Brings something over a link. Returns what its caller wants to know, and the number of bytes that came.
Bring = Callable[[PullLink], Awaitable[tuple[int, int]]]


class Pulls:
    """Both sides of a node's pulls. All methods belong to the event loop.

    Args:
        info: this node's description of itself.
        namespace: of this node's entries.
        entry_bytes: size of an entry, over all ranks that have a share of it.
        spec: of the whole model.
        ranks: of this node.
        costs: costs of this node's steps; None: not known yet.
        save_again: saves the first of some entries of this node that only its cache has, of one rank if each has its
            own requests.
        num_to_save: how many of them that would save.
        step_tokens: largest number of prompt tokens in a step.
        tls: None: nodes talk without it.

    Attributes:
        owner: the side that serves other nodes.
        failures: pulls that were refused, broke or took too long.
    """

    def __init__(
        self,
        transfer: RankedTransfer,
        info: Callable[[], node_status_pb2.NodeInfo],
        *,
        namespace: bytes,
        entry_bytes: int,
        spec: KVCacheSpec,
        ranks: NodeRanks,
        costs: Callable[[], StepCosts | None],
        step_tokens: Callable[[], int],
        save_again: SaveAgain,
        num_to_save: NumToSave,
        keepalive_s: float,
        tls: InternalTls | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        numbers = itertools.count(FIRST_PULL_LINK, MOST_RANKS)
        self.owner = PullOwner(
            transfer,
            info,
            namespace=namespace,
            spec=spec,
            ranks=ranks,
            numbers=numbers,
            save_again=save_again,
            num_to_save=num_to_save,
        )
        self.failures = 0
        self._transfer = transfer
        self._info = info
        self._namespace = namespace
        self._entry_bytes = entry_bytes
        self._spec = spec
        self._ranks = ranks
        self._costs = costs
        self._step_tokens = step_tokens
        self._keepalive_s = keepalive_s
        self._dial = None if tls is None else tls.to(NODE)
        self._clock = clock
        self._numbers = numbers
        self._links: dict[str, PullLink] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._speeds: dict[str, PullSpeed] = {}
        self._of_all = PullSpeed()
        self._not_before_s: dict[tuple[str, int], float] = {}
        self._running = 0
        self._is_open = True

    async def pull(self, keys: tuple[EntryKey, ...], kept: KeptPrefix, *, owner: int | None = None) -> int:
        """Copies entries from the node that has them, unless computing them is faster. Returns how many of the first
        ones host memory has then. It never raises, and ends within a bound.

        Args:
            owner: the only rank of this node that receives them; None: every rank receives its share.
        """
        if not keys or not self._may_ask(kept):
            return 0
        start, stop = keys[0].token_start, keys[-1].token_stop
        num_bytes = len(keys) * self._entry_bytes
        if not self._is_worth(kept, start, stop, num_bytes):
            return 0

        async def bring(link: PullLink) -> tuple[int, int]:
            there = len(keys) if len(keys) <= _UNASKED_ENTRIES else await link.search(keys)
            stop = keys[there - 1].token_stop if there else start
            if not self._is_worth(kept, start, stop, there * self._entry_bytes):
                return 0, 0
            found = await link.pull(keys[:there], owner=owner)
            return found, found * self._entry_bytes

        return await self._bounded(kept, bring, num_bytes=num_bytes, compute_s=self._compute_s(start, stop))

    async def pull_state(
        self, keys: tuple[EntryKey, ...], kept: KeptPrefix, *, held: int, every: int, resumed: int
    ) -> int:
        """As `PrefixSource.pull_state`."""
        stop, state_bytes = keys[-1].token_stop, self._spec.bytes_per_slot
        num_bytes = (len(keys) - held) * self._entry_bytes + state_bytes
        if not self._may_ask(kept) or not self._is_worth(kept, resumed, stop, num_bytes):
            return 0

        async def bring(link: PullLink) -> tuple[int, int]:
            found = await link.search(keys, held=held, every=every)
            coming, stop = keys[held:found], keys[found - 1].token_stop if found else 0
            num_bytes = len(coming) * self._entry_bytes + state_bytes
            if not self._is_worth(kept, resumed, stop, num_bytes):
                return 0, 0
            is_whole = await link.pull_state(coming, keys[found - 1]) > len(coming)
            return (found, num_bytes) if is_whole else (0, 0)

        return await self._bounded(kept, bring, num_bytes=num_bytes, compute_s=self._compute_s(resumed, stop))

    def _is_worth(self, kept: KeptPrefix, start: int, stop: int, num_bytes: int) -> bool:
        """Whether a pull is expected to take less time than computing the tokens [start, stop)."""
        speed = self._speeds.get(kept.address)
        pull_s = None if speed is None else speed.seconds(num_bytes, self._clock())
        return stop > start and is_worth_pulling(stop - start, pull_s, self._compute_s(start, stop))

    async def _bounded(self, kept: KeptPrefix, bring: Bring, *, num_bytes: int, compute_s: float | None) -> int:
        """Runs a pull within its time. Returns what it returns, and 0 if it fails."""
        timeout_s = min(max(PULL_S_MIN, compute_s or PULL_S_MIN), pull_costs.PULL_S_MAX)
        self._running += 1
        try:
            async with asyncio.timeout(timeout_s):
                return await self._pull(kept, bring)
        except TimeoutError:
            link = self._links.get(kept.address)
            if link is not None and not link.has_settled:
                return 0  # it goes on, and the next pull finds it ready
            what = f"{num_bytes} bytes from {kept.address} took more than {timeout_s:g} s"
            self._failed(kept, DeadlineExceeded(what), num_bytes=num_bytes, timeout_s=timeout_s)
        except BatonError as error:
            self._failed(kept, error, num_bytes=num_bytes, timeout_s=timeout_s)
        finally:
            self._running -= 1
        return 0

    @property
    def mean_costs(self) -> PullCosts | None:
        """Mean costs of pulls from any node; None if no pull has been measured yet. A failed pull counts with its time
        limit."""
        return self._of_all.mean_costs(self._clock())

    async def close(self) -> None:
        """Ends every link, on both sides, and returns when nothing of them is left. Nothing is pulled until
        `reopen`."""
        self._is_open = False
        for address in tuple(self._links):
            self._drop(address, Draining("this node ends its links"))
        await self.owner.close()
        while self._ending:
            await asyncio.wait(self._ending)

    def reopen(self) -> None:
        self._is_open = True
        self.owner.reopen()

    async def _pull(self, kept: KeptPrefix, bring: Bring) -> int:
        link = self._link(kept)
        was_ready = link.is_ready
        begun_s = self._clock()
        found, num_bytes = await bring(link)
        if num_bytes and was_ready:  # else the time has that of making the link in it
            self._measured(kept.address, PullSample(self._clock(), num_bytes, self._clock() - begun_s))
        return found

    def _measured(self, address: str, sample: PullSample) -> None:
        if address not in self._speeds:
            valid = {known: speed for known, speed in self._speeds.items() if speed.seconds(1, sample.at_s) is not None}
            self._speeds = valid | {address: PullSpeed()}
        self._speeds[address].add(sample)
        self._of_all.add(sample)

    def _compute_s(self, start: int, stop: int) -> float | None:
        costs = self._costs()
        return None if costs is None else costs.prompt_s(start, stop, step_tokens=self._step_tokens())

    def _may_ask(self, kept: KeptPrefix) -> bool:
        waits = self._clock() < self._not_before_s.get((kept.address, kept.incarnation), 0.0)
        is_own = kept.incarnation == self._info().incarnation
        return self._is_open and not waits and not is_own and self._running < _PULLS_MAX

    def _link(self, kept: KeptPrefix) -> PullLink:
        """The link to that incarnation of the node, which may not be made yet.

        Raises:
            ConfigError: the address is none, or the ranks of the two nodes cannot split the kv heads.
            BatonError: the link could not be made, and took longer than every pull that waited for it.
        """
        link = self._links.pop(kept.address, None)
        if link is not None:
            self._links[kept.address] = link  # as the one that was used last
            if link.incarnation == kept.incarnation and not link.is_over:
                return link
            if link.incarnation == kept.incarnation and link.why_not_connected is not None:
                raise link.why_not_connected
        # gRPC would also connect to names of other forms, such as unix:PATH.
        ListenAddress.parse(kept.address, field="kept_elsewhere.address")
        links = entry_links(self._spec, owner=_checked(kept.ranks), reader=self._ranks)
        if link is not None:
            self._drop(kept.address, Draining(f"{kept.address} has restarted"))
        while len(self._links) >= _LINKS_MAX:
            unused = min(self._links, key=lambda address: self._links[address].is_used)
            self._drop(unused, Draining("this node has links to too many others"))
        hello = pb.PullHello(info=self._info(), incarnation=kept.incarnation, namespace=self._namespace)
        link = self._links[kept.address] = PullLink(
            self._transfer,
            kept.address,
            hello,
            number=next(self._numbers),
            links=links,
            keepalive_s=self._keepalive_s,
            dial=self._dial,
        )
        return link

    def _failed(self, kept: KeptPrefix, error: BatonError, *, num_bytes: int, timeout_s: float) -> None:
        self.failures += 1
        now_s = self._clock()
        self._of_all.add(PullSample(now_s, num_bytes, timeout_s))
        is_refused = isinstance(error, PeerRefused | ConfigError)
        waiting = [
            (node, until_s)
            for node, until_s in self._not_before_s.items()
            if until_s > now_s and node[0] != kept.address
        ]
        self._not_before_s = dict(waiting[-_FAILED_MAX + 1 :])
        self._not_before_s[kept.address, kept.incarnation] = math.inf if is_refused else now_s + _BACK_OFF_S
        after = "; not asked again before it restarts" if is_refused else ""
        log.warning("could not pull from %s: %s%s", kept.address, error, after)
        link = self._links.get(kept.address)
        if link is not None and link.incarnation == kept.incarnation:
            self._drop(kept.address, error)

    def _drop(self, address: str, why: BatonError) -> None:
        link = self._links.pop(address, None)
        if link is None:
            return
        link.close(why)
        ending = asyncio.create_task(link.wait_closed(), name=f"unlink-{address}")
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


def _checked(ranks: NodeRanks) -> NodeRanks:
    """Raises ConfigError for more ranks than any node has."""
    if not 0 < ranks.size <= MOST_RANKS:
        raise ConfigError(
            f"kept_elsewhere names a node of {ranks.size} ranks",
            field="kept_elsewhere.tensor_parallel_size",
            value=ranks.size,
            allowed=(f"1 to {MOST_RANKS}",),
        )
    return ranks
