"""The costs and limits of a simulated node: how long its steps take, and which costs it reports. Pure."""

from dataclasses import dataclass
from functools import cached_property

from baton.core.costs import StepCosts, StepWork
from baton.core.pull_costs import ASSUMED_LOAD_BYTES_PER_S, ASSUMED_PULL, PullCosts
from baton.planner.drafts import NO_DRAFTS, MeanDrafts


@dataclass(frozen=True)
class NodeSpec:
    """The costs and limits of a simulated node.

    Args:
        kv_tokens: tokens of its cache.
        prompt_floor_s, mixed_floor_s: least time of a step with prompts, and of one with prompts and decodes: that of a
            host that launches eagerly.
        bounded: whether steps with prompts next to streams are cut to the streams' TPOT; if not, they take the whole
            budget.
        reports_factor: error of the reported costs, as a factor on what steps really cost.
        host_tokens: tokens whose KV host memory holds; 0: the node keeps none outside of its cache, and pulls none.
        pull_costs: times of its pulls from other nodes.
        drafts: draft tokens of steps without prompts; other steps are simulated without, because they are as long as
            their bound.
    """

    costs: StepCosts
    step_tokens: int = 4096
    seats: int = 512
    kv_tokens: int = 800_000
    prompt_floor_s: float = 0.0
    mixed_floor_s: float = 0.0
    bounded: bool = True
    reports_factor: float = 1.0
    kv_bytes_per_token: int = 131072
    state_bytes: int = 0
    block_size: int = 16
    host_tokens: int = 0
    pull_costs: PullCosts = ASSUMED_PULL
    drafts: MeanDrafts = NO_DRAFTS

    @property
    def load_token_s(self) -> float:
        """Time to load a token's KV from host memory."""
        return self.kv_bytes_per_token / ASSUMED_LOAD_BYTES_PER_S

    def seconds(self, work: StepWork) -> float:
        seconds = self.costs.seconds(work)
        if not work.prompt_tokens:
            return seconds
        return max(seconds, self.mixed_floor_s if work.decode_rows else self.prompt_floor_s)

    @cached_property
    def view_costs(self) -> StepCosts:
        """The costs that the node reports. A model that was fitted to its steps includes their floor."""
        if not self.prompt_floor_s and self.reports_factor == 1.0:
            return self.costs
        costs, factor = self.costs, self.reports_factor
        points = tuple((tokens, factor * max(seconds, self.prompt_floor_s)) for tokens, seconds in costs.points)
        others = costs.key_s, costs.pair_s, costs.decode_row_s, costs.prompt_step_s
        return StepCosts(points, *(factor * seconds for seconds in others))
