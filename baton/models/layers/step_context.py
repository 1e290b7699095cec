"""Everything a model needs to know of the step that it computes, besides tokens, positions and cache."""

from dataclasses import dataclass

from torch import Tensor

from attention.metadata import AttentionMetadata
from baton.models.kernels.adapter_products import AdapterRows
from baton.models.kernels.recurrent.rows import StateRows
from baton.models.layers.token_exchange import TokenShares


@dataclass(frozen=True)
class StepContext:
    """One step, as its model sees it. Contexts of captured steps hold the graphs' own buffers, which never move.

    Attributes:
        metadata: the step's plan, by the attention backend that the model was loaded with.
        slots_T: int64, the KV slot of each of this rank's tokens; below 0 for padding. Experts count the tokens of the
            others. None: tokens are not counted.
        adapters: the adapters of the tokens, by `CausalLM.adapters_of`; None: no token has one.
        states: the recurrent states of the requests; None: the model has none.
        shares: how many tokens each rank has, with attention data parallelism; else None.
    """

    metadata: AttentionMetadata
    slots_T: Tensor | None = None
    adapters: AdapterRows | None = None
    states: StateRows | None = None
    shares: TokenShares | None = None
