"""Plans the placement of a node's experts from its settings, equally on every rank."""

import torch

from baton.core.errors import ConfigError
from baton.core.expert_load import read_expert_load
from baton.models.config.model_config import ModelConfig
from baton.models.layers.parallel import TensorParallel, with_experts_placed
from baton.settings.node_config import NodeSettings


def plan_experts(parallel: TensorParallel, config: ModelConfig, settings: NodeSettings) -> TensorParallel:
    """The rank with the plan of its experts, if ranks hold whole ones.

    Args:
        config: configuration of the whole model.

    Raises:
        ConfigError: the settings contradict each other, or the load file is of another model.
    """
    if settings.batch_invariant:
        _refuse_other_places(settings)
    load = None if settings.expert_load is None else read_expert_load(settings.expert_load)
    return with_experts_placed(parallel, config, redundant=settings.redundant_experts, load=load)


def check_same_plan(parallel: TensorParallel, device: torch.device) -> None:
    """Checks that all ranks have the same plan, because each host reads its own copy of the load file. All ranks call
    it together and get the same ConfigError.

    Args:
        device: device of tensors that the ranks' group takes.
    """
    if parallel.placement is not None and not parallel.agree(repr(parallel.placement), device):
        raise ConfigError(
            "the ranks would place experts by different loads",
            field="expert_load",
            allowed=("the same file on all hosts",),
            cure="copy one host's file to the others",
        )


def _refuse_other_places(settings: NodeSettings) -> None:
    """Raises ConfigError for experts that are copied or moved. Each rank adds up a token's experts on it; which copy a
    token takes depends on its row in the step, and where experts are may differ between nodes."""
    cure = "leave it out, or take --batch-invariant false"
    if settings.redundant_experts:
        raise ConfigError(
            f"batch_invariant is on, and redundant_experts is {settings.redundant_experts}: which copy of "
            "an expert a token takes depends on the batch",
            field="redundant_experts",
            value=settings.redundant_experts,
            allowed=("0",),
            cure=cure,
        )
    if settings.expert_load is not None:
        raise ConfigError(
            f"batch_invariant is on, and expert_load is {settings.expert_load}: nodes with other loads add up "
            "experts in other orders",
            field="expert_load",
            value=str(settings.expert_load),
            allowed=("none",),
            cure=cure,
        )
