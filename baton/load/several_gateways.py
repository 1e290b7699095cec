"""Requests to several Baton gateways in front of the same nodes, which get them in turn.

A stream whose gateway is lost goes on at the next one: the same tokens, none twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.load.answer import AskError, LoadAnswer
from baton.load.openai_asker import OpenAiAsker
from baton.load.workload import PlannedRequest

# The gateway is gone, or goes.
_LOST = ("NoConnection", "BrokenStream", "503 draining", "draining")


@dataclass
class SeveralGateways:
    """Streams from several gateways, whose `askers` differ in nothing else."""

    askers: Sequence[OpenAiAsker]
    _next: int = 0

    def prepare(self, request: PlannedRequest) -> tuple[dict[str, Any], Mapping[str, str]]:
        body, headers = self.askers[0].question(request)
        # Drawn tokens follow from the seed, so that another gateway's are the same.
        return {"seed": request.index, **body, "return_token_ids": True}, headers

    async def ask(self, prepared: tuple[dict[str, Any], Mapping[str, str]], answer: LoadAnswer) -> None:
        body, headers = prepared
        token_ids: list[int] = []
        place, lost = self._next, 0
        self._next += 1
        while True:
            asker, known = self.askers[place % len(self.askers)], len(token_ids)
            question = asker.encode(_resumed(body, token_ids), headers)
            try:
                return await asker.ask(question, answer, token_ids)
            except AskError as error:
                lost = 1 if len(token_ids) > known else lost + 1
                if error.kind not in _LOST or lost >= len(self.askers):
                    raise
            place += 1

    async def close(self) -> None:
        for asker in self.askers:
            await asker.close()


def _resumed(body: dict[str, Any], token_ids: list[int]) -> dict[str, Any]:
    """The body of a request whose client has these tokens already."""
    return {**body, "baton": {**body.get("baton", {}), "output_token_ids": token_ids}} if token_ids else body
