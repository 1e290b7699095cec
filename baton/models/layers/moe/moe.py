"""Mixture of experts: the router, the routed experts, and the shared experts, which compute every token.

Shapes: T token, D hidden channel, K chosen expert of a token.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from baton.models.config.model_config import MoEConfig
from baton.models.kernels.activation import multiply_by_sigmoid
from baton.models.kernels.matmul.decode_matmul import DecodeMultiply
from baton.models.kernels.matmul.matmul import multiply_invariant
from baton.models.kernels.moe import expert_dispatch
from baton.models.kernels.moe.grouped_gemm import SharedWeights
from baton.models.kernels.moe.zero_experts import given_back
from baton.models.layers.elementwise import sigmoid
from baton.models.layers.linear import Linear, Multiply
from baton.models.layers.mlp import GatedMLP, silu_and_multiply
from baton.models.layers.moe.experts import Experts
from baton.models.layers.moe.router import Router
from baton.models.layers.token_exchange import ExchangingModule

# Up to this many tokens, the launches of routed experts also compute the shared ones, unless the shared experts' first
# product reads more than the bytes below: such products are as fast in launches of their own. Decode steps of
# DeepSeek-V2-Lite on an H200 take 14 % less time this way at 1 token, 4 % at 8, 5 % at 32, 3 % at 64, 1 % at 96, and 0
# to 1 % less beyond; a layer of DeepSeek-V3's size takes 1.4 % longer at 1 token. In batch-invariant mode any number of
# tokens must be computed alike: a prompt of 8192 tokens takes 2 % longer this way.
_MAX_TOKENS_IN_ONE_LAUNCH = 96
_MAX_BYTES_IN_ONE_LAUNCH = 32 << 20


class MoE(ExchangingModule):
    """Routed experts, plus the shared experts if the model has them, scaled per token if they have a gate."""

    def __init__(self, size: int, moe: MoEConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = Router(size, moe)
        self.experts = Experts(
            moe.num_experts,
            size,
            moe.intermediate_size,
            dtype=dtype,
            held=moe.held,
            zero_experts=moe.zero_experts,
        )
        self.zero_numbers = moe.zero_numbers
        self.shared_experts = (
            GatedMLP(size, moe.shared_intermediate_size, dtype=dtype) if moe.shared_intermediate_size else None
        )
        self.shared_expert_gate = Linear(size, 1, dtype=dtype) if moe.shared_gate else None

    def forward(self, x_TD: Tensor) -> Tensor:
        shared = self.shared_weights(len(x_TD)) if x_TD.is_cuda else None
        if shared is not None and self.shared_expert_gate is not None:
            weights_TK, experts_TK, gates_T = self.gate.with_gate(x_TD, self.shared_expert_gate.weight)
            shared = replace(shared, gates_T=gates_T)
        else:
            weights_TK, experts_TK = self.gate(x_TD)
        plus_TD = self._given_back(x_TD, weights_TK, experts_TK)
        if shared is not None:
            return self.experts.run_grouped(x_TD, weights_TK, experts_TK, shared=shared, plus_TD=plus_TD)
        if (shared_TD := self._shared(x_TD)) is not None:
            plus_TD = shared_TD if plus_TD is None else plus_TD + shared_TD
        out_TD: Tensor = self.experts(x_TD, weights_TK, experts_TK, plus_TD=plus_TD)
        return out_TD

    def of_own_tokens(self, x_TD: Tensor) -> Tensor:
        """Returns the whole sum for this rank's tokens, if it `sends_to_experts`. Steps of too many or too unequal
        tokens gather them."""
        exchange, memory = self.exchange, self.parallel.dispatch
        assert exchange is not None
        assert not self.zero_numbers, "no model that has them takes attention data parallelism"
        width = exchange.shares.width
        if memory is None or not 0 < width <= memory.most_rows:
            all_AD = exchange.gather(x_TD)
            routed_TD, shared_TD = exchange.sum_own(self.experts(all_AD, *self.gate(all_AD))), self._shared(x_TD)
            return routed_TD if shared_TD is None else routed_TD + shared_TD
        weights_TK, experts_TK = self.gate(x_TD)
        ranks, slots_A = self.experts.expert_ranks, self.experts.slots
        slots_T = None if slots_A is None else exchange.own(slots_A)
        asked_T = expert_dispatch.send(memory, x_TD, weights_TK, experts_TK, ranks, width=width, slots_T=slots_T)
        shared_TD = self._shared(x_TD)  # while the tokens travel
        received = expert_dispatch.receive(memory, ranks, width=width, experts_dtype=experts_TK.dtype)
        part_AD = self.experts(received.x_AD, received.weights_AK, received.experts_AK)
        expert_dispatch.send_back(memory, part_AD, received, width=width)
        return expert_dispatch.add_up(memory, asked_T, width=width, plus_TD=shared_TD)

    def _given_back(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor | None:
        """Returns the sum of the experts that return their input. The first rank computes all of it; the others return
        None."""
        if not self.zero_numbers or self.parallel.rank > 0:
            return None
        if x_TD.is_cuda:
            return given_back(x_TD, weights_TK, experts_TK, first=self.zero_numbers.start)
        return given_back_in_torch(x_TD, weights_TK, experts_TK, first=self.zero_numbers.start)

    def _shared(self, x_TD: Tensor) -> Tensor | None:
        if self.shared_experts is None:
            return None
        out_TD: Tensor = self.shared_experts(x_TD)
        if self.shared_expert_gate is None:
            return out_TD
        gate_T1 = self.shared_expert_gate(x_TD)
        if out_TD.is_cuda:
            gate_TD1 = gate_T1.unsqueeze(-1).expand(*out_TD.shape, 1)
            return multiply_by_sigmoid(out_TD.unsqueeze(-1), gate_TD1).squeeze(-1)
        return out_TD * sigmoid(gate_T1.float()).to(x_TD.dtype)

    def shared_weights(self, num_tokens: int) -> SharedWeights | None:
        """Returns the shared experts' weights if the launches of routed experts also compute them, else None.

        They do for few tokens, or batch-invariant ones, if the shared experts are small, are a multiple of a routed
        expert's size (one rank's part may not be), and have no adapters and no bias, scales or activation that routed
        experts lack.
        """
        experts, mlp, gate = self.experts, self.shared_experts, self.shared_expert_gate
        if mlp is None or experts.adapted is not None:
            return None
        if num_tokens > _MAX_TOKENS_IN_ONE_LAUNCH and not experts.batch_invariant:
            return None
        if mlp.activate is not silu_and_multiply or mlp.down_proj.in_features % experts.down_proj.shape[2]:
            return None
        layers = (mlp.gate_up_proj, mlp.down_proj, *(() if gate is None else (gate,)))
        if any(layer.bias is not None or layer.has_adapters or not _is_plain(layer.multiply) for layer in layers):
            return None
        if mlp.gate_up_proj.weight.nbytes > _MAX_BYTES_IN_ONE_LAUNCH:
            return None
        weights = (experts.gate_up_proj, experts.down_proj, *(layer.weight for layer in layers))
        if {weight.dtype for weight in weights} not in ({torch.bfloat16}, {torch.float16}):
            return None
        return SharedWeights(mlp.gate_up_proj.weight, mlp.down_proj.weight)


def given_back_in_torch(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, *, first: int) -> Tensor:
    """Does what `baton.models.kernels.moe.zero_experts.given_back` does."""
    share_T1 = weights_TK.masked_fill(experts_TK < first, 0).sum(dim=-1, keepdim=True)
    return (x_TD.float() * share_T1).to(x_TD.dtype)


def _is_plain(multiply: Multiply) -> bool:
    """Whether the method is a plain product of unquantized numbers."""
    return multiply in (linear, multiply_invariant) or isinstance(multiply, DecodeMultiply)
