"""The context of a step: everything a model needs besides tokens, positions and cache."""

from dataclasses import dataclass

from torch import Tensor

from attention.metadata import AttentionMetadata
from baton.models.kernels.adapter_rows import AdapterRows
from baton.models.kernels.recurrent.state_rows import StateRows
from baton.models.layers.token_exchange import TokenShares


@dataclass(frozen=True)
class StepContext:
    """The context of one step. Contexts of captured steps hold the graphs' own buffers, which never move.

    Attributes:
        metadata: the step's plan, by the attention backend that the model was loaded with.
        slots_T: int64, the KV slot of each of this rank's tokens, below 0 for padding. Experts do not count padding.
            None: no tokens are counted.
        adapters: the adapters of the tokens, by `CausalLM.adapters_of`; None: no token has one.
        states: the recurrent states of the requests; None: the model has none.
        shares: the number of tokens of each rank with attention data parallelism; else None.
    """

    metadata: AttentionMetadata
    slots_T: Tensor | None = None
    adapters: AdapterRows | None = None
    states: StateRows | None = None
    shares: TokenShares | None = None
