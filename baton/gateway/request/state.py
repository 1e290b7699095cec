"""State that the parts of one request's machine share: the request, its output, the time, and the commands. Pure."""

from baton.core.errors import Overloaded
from baton.core.kv_entries import KeptPrefix
from baton.core.types import Slo
from baton.gateway.core.prompt_blocks import PromptBlocks
from baton.gateway.core.request import Request, Rules
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.fleet.fleet_node import FleetNode
from baton.gateway.request.attempt import Attempt
from baton.gateway.request.commands import Command
from baton.gateway.request.node_choice import NodeChoice
from baton.gateway.request.node_messages import Due, NodeMessages
from baton.gateway.request.output import RequestOutput, TokenMeter
from baton.gateway.request.receipt import ReceiptDraft
from baton.gateway.text.reply import Detokenizing

_SOON_S = 1e-3


class GatewayRequestState:
    """The shared state of one request.

    Attributes:
        now_s: time of the events that are being handled.
        commands: commands for these events, so far.
    """

    def __init__(
        self, request: Request, rules: Rules, fleet: Fleet, detokenizer: Detokenizing, meter: TokenMeter
    ) -> None:
        # A prompt with logprobs is computed as a whole, without a prefix cache.
        scored = request.sampling.prompt_logprobs is not None
        prompt = request.blocks or PromptBlocks(request.prompt, cache_salt=request.cache_salt, adapter=request.adapter)
        self.request = request
        self.rules = rules
        self.slo = request.slo.over(rules.slo)
        self.choice = NodeChoice(
            rules,
            fleet,
            prompt=None if scored else prompt,
            session_id=request.session_id,
            revision=request.revision,
            adapter=request.adapter,
        )
        self.messages = NodeMessages(request, rules.local_policy, rules.objective)
        self.output = RequestOutput(request, detokenizer, meter)
        self.receipt = ReceiptDraft(request.request_id)
        self.now_s = request.started_at_s
        self.commands: list[Command] = []

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and output so far."""
        return len(self.request.prompt) + len(self.output.token_ids)

    @property
    def resumed(self) -> bool:
        """Whether the client came with a part of the answer, perhaps an empty one, from another gateway."""
        return bool(self.request.output or self.request.revision)

    def kept_elsewhere(self, node: FleetNode) -> KeptPrefix | None:
        """The node that has much more of the sequence than the one that is to compute it."""
        return self.choice.kept_elsewhere(node, self.num_tokens)

    def respond(self) -> None:
        """Adds a message with the tokens that the client does not have yet."""
        self.commands += self.output.message(self.receipt, self.now_s)

    def learn(self, first_at_s: float | None) -> None:
        """Teaches the gateway what the first token took, which came at that time, if nothing was tried twice."""
        receipt, predicted_s = self.receipt, self.receipt.predicted_steps_s
        if predicted_s is not None and first_at_s is not None and receipt.attempts == 1:
            ttft_s = first_at_s - self.request.started_at_s
            self.choice.learn(receipt.path, predicted_s=predicted_s, ttft_s=ttft_s, now_s=self.now_s)

    # ---- time

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.request.deadline_s - self.now_s)

    @property
    def due(self) -> Due:
        """The remaining part of the SLO, for nodes."""
        ttft_s, tpot_s = self.slo.ttft_s, self.slo.tpot_s
        if self.output.token_ids:
            return Due(None if ttft_s is None else 0.0, tpot_s)
        waited_s = max(0.0, self.now_s - self.request.started_at_s)
        return Due(None if ttft_s is None else max(0.0, ttft_s - waited_s), tpot_s, waited_s)

    @property
    def slo_left(self) -> Slo:
        """The remaining part of the SLO, for the choice of nodes. A late first token is due as soon as possible."""
        due = self.due
        return Slo(None if due.ttft_budget_s is None else max(due.ttft_budget_s, _SOON_S), due.tpot_s)

    def refuses_late(self, attempt: Attempt) -> bool:
        """Whether nodes may refuse the request because its first token would be late.

        They may only before the request has begun: losing tokens is worse than being late.
        """
        return self.rules.refuse_late and not attempt.begun and not self.output.token_ids

    def too_late(self, predicted_s: float | None) -> Overloaded:
        """The error of a request whose first token would come only `predicted_s` from now."""
        assert self.slo.ttft_s is not None, "without a TTFT nothing is late"
        assert predicted_s is not None, "only predictions are late"
        what = f"the first token would take {predicted_s:.3g} s more, and is due {self.slo.ttft_s:.3g} s after arrival"
        return Overloaded(
            what, cure="try again later, or allow more time", retry_after_s=min(60.0, max(0.1, predicted_s))
        )
