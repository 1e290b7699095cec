"""All nodes that this gateway knows of: finds them, keeps in touch, has them paired, and picks among them."""

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Self, TypeVar

from baton.config import GatewaySettings
from baton.errors import ConfigError
from baton.types import LocalPolicy
from gateway.discovery import Directory, parse_addresses
from gateway.model import ServedModel
from gateway.node import DecodeNode, Node, PrefillNode
from gateway.pairs import Pairs
from gateway.router import Wanted, pick_decode, pick_prefill
from protos.baton.v1 import generation_pb2

_PAIR_CHECK_S = 0.2
_SETTLE_TIMEOUT_S = 5.0

AnyNode = TypeVar("AnyNode", bound=Node)


class Cluster:
    """An async context manager: inside it, nodes are found and watched.

    Raises:
        ConfigError: an address is malformed, or there are none of decode nodes.
    """

    def __init__(self, settings: GatewaySettings, model: ServedModel) -> None:
        self.changed = asyncio.Event()  # set, and replaced by a new one, whenever a node comes, goes or speaks
        self._settings = settings
        self._model = model
        prefill = parse_addresses(settings.prefill, field="prefill")
        decode = parse_addresses(settings.decode, field="decode")
        if not decode:
            cure = "give host:port of at least one decode node"
            raise ConfigError("BATON_DECODE (--decode) is empty", field="decode", cure=cure)
        if not prefill and settings.local_policy is LocalPolicy.STRICT:
            cure = "give prefill nodes, or another local policy"
            raise ConfigError("BATON_PREFILL (--prefill) is empty under policy strict", field="prefill", cure=cure)
        self._wants_prefill = bool(prefill) and settings.local_policy is not LocalPolicy.LOCAL
        self._directories = (Directory(prefill), Directory(decode))
        self._prefills: dict[str, PrefillNode] = {}
        self._decodes: dict[str, DecodeNode] = {}
        self._pairs = Pairs(
            lambda: self._prefills.values(), lambda: self._decodes.values(), link_retry_s=settings.link_retry_s
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self._find()
        self._tasks = [
            asyncio.create_task(self._keep_finding(), name="discovery"),
            asyncio.create_task(self._keep_pairing(), name="pairing"),
        ]
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self._pairs.close()
        await asyncio.gather(*(node.close() for node in self._nodes()))

    # ---- choices

    def pick_decode(self, wanted: Wanted) -> DecodeNode | None:
        decodes = [node.view() for node in self._decodes.values()]
        picked = pick_decode(decodes, [node.view() for node in self._prefills.values()], wanted)
        return None if picked is None else self._decodes[picked.address]

    def pick_prefill(self, decode: DecodeNode, wanted: Wanted) -> PrefillNode | None:
        picked = pick_prefill([node.view() for node in self._prefills.values()], decode.view(), wanted)
        return None if picked is None else self._prefills[picked.address]

    # ---- how it stands

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt plus output that some decode node can hold; the model's own limit while none is known."""
        known = [node.view().max_context_tokens for node in self._decodes.values() if not node.detail]
        return min(self._model.max_context_tokens, max(known, default=self._model.max_context_tokens))

    def explain(self) -> str:
        """Why no node may be found for a request, node by node."""
        return "; ".join(_explain(node) for node in self._nodes()) or "no address of a node is known"

    def report(self) -> list[generation_pb2.NodeReport]:
        reports = []
        for node in self._nodes():
            report = generation_pb2.NodeReport(address=node.address, reachable=node.reachable, detail=node.detail)
            report.status.CopyFrom(node.status)
            del report.status.peers[:]
            report.status.peers.extend(node.peers.values())
            reports.append(report)
        return reports

    def serves(self) -> bool:
        """Whether a request would find its nodes now."""
        if not any(node.open for node in self._decodes.values()):
            return False
        return self._settings.local_policy is not LocalPolicy.STRICT or self._pairs.any_ready()

    async def until_serves(self) -> None:
        """Waits for the first nodes; then a little for the others, so that a fresh cluster is used as a whole."""
        while not self.serves():
            await self.changed.wait()
        if not self._wants_prefill:
            return
        try:
            async with asyncio.timeout(_SETTLE_TIMEOUT_S):
                while not self._settled():
                    await self.changed.wait()
        except TimeoutError:
            return

    def _settled(self) -> bool:
        return all(node.reachable for node in self._nodes()) and self._pairs.settled()

    # ---- upkeep

    async def _keep_finding(self) -> None:
        while True:
            await asyncio.sleep(self._settings.resolve_s)
            await self._find()

    async def _find(self) -> None:
        """Takes in who is new; lets go of who is no longer listed, once its requests are done."""
        prefill, decode = await asyncio.gather(*(directory.look_up() for directory in self._directories))
        for address in prefill - self._prefills.keys():
            self._prefills[address] = PrefillNode(address, self._model, on_change=self._notify)
        for address in decode - self._decodes.keys():
            self._decodes[address] = DecodeNode(address, self._model, on_change=self._notify)
        await _let_go(self._prefills, prefill)
        await _let_go(self._decodes, decode)

    async def _keep_pairing(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._pairs.ask(loop.time())
            await asyncio.sleep(_PAIR_CHECK_S)

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def _nodes(self) -> Iterable[Node]:
        return [*self._prefills.values(), *self._decodes.values()]


async def _let_go(nodes: dict[str, AnyNode], listed: frozenset[str]) -> None:
    for address, node in list(nodes.items()):
        node.retired = address not in listed
        if node.retired and not node.busy:
            del nodes[address]
            await node.close()


def _explain(node: Node) -> str:
    if node.detail:
        return f"{node.name} cannot be used ({node.detail})"
    if node.status.draining:
        return f"{node.name} is draining"
    refused = [
        f"{peer.name} refused ({', '.join(item.field for item in peer.mismatches)})"
        for peer in node.peers.values()
        if peer.mismatches
    ]
    return f"{node.name}: {', '.join(refused)}" if refused else f"{node.name} is there"
