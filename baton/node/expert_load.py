"""The load of a node's experts, read from the device every few seconds, for status, metrics and operators."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from baton.core.errors import BatonError, InvalidRequest
from baton.core.expert_load import ExpertLoad
from baton.engine.device.device_thread import ExpertCounts
from baton.metrics.exposition import Figure
from baton.models.config.expert_places import ExpertPlacement
from baton.models.layers.expert_counts import expert_load
from baton.protos.internal.v1 import node_pb2 as pb
from baton.protos.v1 import node_status_pb2
from baton.rpc.convert_node import expert_load_to_proto

READ_EVERY_S = 5.0


class ExpertLoads:
    """Reads and keeps the load of experts. Used on the event loop while the engine runs.

    Args:
        placement: of the node's experts; None: the ranks do not hold whole experts, and nothing is counted.
        read: fetches the counts from the device.
        model: the model's name.
    """

    def __init__(
        self,
        placement: ExpertPlacement | None,
        read: Callable[[], Awaitable[ExpertCounts]],
        *,
        model: str,
        ranks: int,
    ) -> None:
        self._placement = placement
        self._read = read
        self._model = model
        self._total: ExpertLoad | None = None  # since the start
        self._recent: ExpertLoad | None = None  # between the last two reads with tokens
        self._rank_tokens = (0,) * ranks

    async def watch(self) -> None:
        """Reads every few seconds until cancelled; returns at once if nothing is counted."""
        while self._placement is not None:
            await asyncio.sleep(READ_EVERY_S)
            try:
                await self.read()
            except BatonError:  # the engine is ending, and reports the reason itself
                return

    async def read(self) -> None:
        """Brings the summary up to date.

        Raises:
            InvalidRequest: nothing is counted here.
        """
        total = await self.load()
        recent = total if self._total is None else total.since(self._total)
        if any(recent.rank_tokens):
            self._total, self._recent, self._rank_tokens = total, recent, total.rank_tokens

    async def load(self) -> ExpertLoad:
        """The load since the start, including all steps launched so far.

        Raises:
            InvalidRequest: nothing is counted here.
        """
        if self._placement is None:
            raise InvalidRequest(
                "this node does not count the tokens of experts",
                field="expert_parallel",
                value=False,
                cure="ask a node with --expert-parallel and a --tensor-parallel-size of 2 or more, and a mixture",
            )
        return expert_load(self._placement, await self._read(), model=self._model)

    async def message(self) -> pb.GetExpertLoadResponse:
        """The load since the start as a message; raises as `load` does."""
        return expert_load_to_proto(await self.load())

    def summary(self) -> node_status_pb2.ExpertBalance | None:
        """The balance for a status. Returns None if nothing is counted."""
        if self._placement is None:
            return None
        imbalances = [layer.imbalance for layer in self._recent.layers] if self._recent is not None else []
        return node_status_pb2.ExpertBalance(
            redundant_experts=self._placement.redundant,
            rank_tokens=self._rank_tokens,
            imbalance_mean=sum(imbalances) / len(imbalances) if imbalances else 0.0,
            imbalance_max=max(imbalances, default=0.0),
        )

    def figures(self) -> Iterator[Figure]:
        """The metrics about experts."""
        balance = self.summary() or node_status_pb2.ExpertBalance()
        yield Figure("baton_expert_imbalance", balance.imbalance_mean, ("mean",))
        yield Figure("baton_expert_imbalance", balance.imbalance_max, ("max",))
        for rank, tokens in enumerate(self._rank_tokens):
            yield Figure("baton_expert_tokens_total", tokens, (str(rank),))
