"""The service that a proxy calls for each request, and its counters."""

from collections.abc import AsyncIterator, Iterator
from time import monotonic
from typing import Any

import grpc

from baton.core.errors import BatonError, Overloaded
from baton.core.logs import dropped_lines
from baton.gateway.picker.choice import GatewayChoice, Picked, PickRequest
from baton.gateway.picker.exchange import Exchange
from baton.metrics.declared import ProcessRole
from baton.metrics.exposition import Exposition, Figure
from baton.metrics.page import join
from baton.metrics.tally import Layout, Tally
from baton.protos.ext_proc import external_processor_pb2 as pb
from baton.protos.ext_proc import external_processor_pb2_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ExternalProcessor"].full_name


class CountedPicks:
    """A choice on this machine's clock, with counters."""

    def __init__(self, choice: GatewayChoice) -> None:
        self._choice = choice
        self._tally = Tally(Layout(ProcessRole.PICKER))
        self._exposition = Exposition(ProcessRole.PICKER, self._tally.layout, "")
        self._outcomes = self._tally.counters("baton_picker_picks_total")
        self._affinities = self._tally.counters("baton_picker_picks_by_affinity_total")
        self._failovers = self._tally.counter("baton_picker_failovers_total")

    def pick(self, wanted: PickRequest) -> Picked:
        try:
            picked = self._choice.pick(wanted, monotonic())
        except BatonError as error:
            self._outcomes["shed" if isinstance(error, Overloaded) else "no_gateway"].add()
            raise
        self._outcomes["picked"].add()
        self._affinities[picked.affinity].add()
        return picked

    def served(self, picked: Picked, address: str) -> None:
        if address != picked.addresses[0]:
            self._failovers.add()
            self._choice.doubt(picked.addresses[0], monotonic())

    async def page(self, names: frozenset[str] = frozenset()) -> bytes:
        """The text for Prometheus."""
        return await join(self._exposition.pages(self._tally.own(), list(self._figures()), names))

    def _figures(self) -> Iterator[Figure]:
        yield Figure("baton_log_lines_dropped_total", dropped_lines())
        for state, number in zip(("ready", "not_ready"), self._choice.count(monotonic()), strict=True):
            yield Figure("baton_picker_gateways", number, (state,))


class ExternalProcessor(external_processor_pb2_grpc.ExternalProcessorServicer):
    """Args:
    sheddable: names of objectives whose requests may be refused.
    """

    def __init__(self, picks: CountedPicks, sheddable: frozenset[str]) -> None:
        self._picks = picks
        self._sheddable = sheddable

    async def Process(
        self, request_iterator: AsyncIterator[pb.ProcessingRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ProcessingResponse]:
        exchange = Exchange(self._picks, self._sheddable)
        async for request in request_iterator:
            for response in exchange.receive(request):
                yield response
            if exchange.ended:
                return
