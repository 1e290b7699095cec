"""Measures what a built runner's steps cost, and chooses the step size from that for the node's role."""

import logging
from dataclasses import replace

from baton.engine.build import BuiltRunner, StepLimits
from baton.engine.device.out_of_memory import allocating
from baton.engine.device.step_costs import (
    BOTH_RULE,
    DECODE_RULE,
    PREFILL_RULE,
    StepRule,
    choose_step_tokens,
    measure_costs,
    served_steps,
    step_sizes,
)
from baton.settings.node_config import GPU_BATCH_REQUESTS, DecodeSettings, NodeSettings, PrefillSettings

_log = logging.getLogger(__name__)


def calibrate(built: BuiltRunner, settings: NodeSettings) -> BuiltRunner:
    """Prepares the runner, measures the costs of served steps, and chooses the step size if the settings give none. All
    ranks call it together, while the cache is empty.
    """
    device = built.cache.view.device
    runner, largest, parallel = built.runner, built.limits, built.parallel
    limits = largest
    runner.prepare()
    steps = served_steps(
        runner.facts,
        most_tokens=limits.max_batch_tokens,
        most_requests=min(limits.max_batch_requests, GPU_BATCH_REQUESTS),
    )
    with allocating("steps of the largest size"):
        costs = measure_costs(runner.launch, runner.facts, steps, agree=lambda value: parallel.smallest(value, device))
    runner.reset_expert_counts()
    built = built._replace(costs=costs, largest=largest)
    limits = step_limits(built, settings)
    limits = replace(limits, max_batch_tokens=parallel.smallest(limits.max_batch_tokens, device))
    rates = ", ".join(f"{tokens}: {tokens / costs.prompt_tokens_s(tokens):,.0f}" for tokens, _ in costs.points)
    _log.info(
        "%s: steps of up to %d tokens; prompt tokens per second by step size: %s",
        device,
        limits.max_batch_tokens,
        rates,
    )
    return built._replace(limits=limits)


def step_limits(built: BuiltRunner, settings: NodeSettings) -> StepLimits:
    """The step limits for the role in these settings, within those that the runner was prepared for."""
    if built.costs is None or built.largest is None or settings.max_batch_tokens is not None:
        return built.limits
    rule, most = step_rule(settings), built.largest
    sizes = step_sizes(rule, most_tokens=most.max_batch_tokens, max_batch_requests=most.max_batch_requests)
    return replace(most, max_batch_tokens=choose_step_tokens(built.costs, sizes, rule))


def step_rule(settings: NodeSettings) -> StepRule:
    """The rule by which the node's step size is chosen."""
    if isinstance(settings, DecodeSettings):
        return DECODE_RULE
    also_decodes = isinstance(settings, PrefillSettings) and settings.also_decodes
    return BOTH_RULE if also_decodes else PREFILL_RULE
