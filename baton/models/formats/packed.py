"""Packed integers in plain torch: converts a publisher's words to the form that products read, and back to weights.

That form has two numbers of 4 bits in a byte. Of every 32 inputs, the low halves of 16 bytes hold the first 16 and the
high halves the others, so a kernel reads whole runs of activations for each half.

Kernels for Hopper read strips of 16 outputs. Each thread of a warp loads 16 bytes of a strip, which have 64 inputs, and
multiplies just these numbers. A number's place counts pairs of outputs (g), threads with the same pair (t), products of
16 inputs (j), inputs of a pair (p), halves of the 16 inputs (h) and outputs of a pair (r): output 2 g + r of the strip,
input 16 j + 8 h + 2 t + p.

Legend: N output channel, K input channel, G group of inputs, B byte, E expert, S strip.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.models.config.quantization.packed_config import WORD_BITS, PackedConfig, StoredPart, TensorRole

RUN = 16  # inputs in the low halves of adjacent bytes, before those in the high halves
# Outputs of a strip, and the inputs of one warp's load of it.
STRIP, STRIP_INPUTS = 16, 64


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """The weight of one layer, or of all experts with a leading axis [E, ...] in every tensor.

    Attributes:
        stored_NB: uint8, contiguous, inputs padded with zeros to a multiple of 32.
        scales_GN: (number - zero) * scale is the weight.
        zeros_GN: uint8; None: the zero is the middle of the numbers.
        columns: K.
        group_size: inputs that share a scale.
        order_K: the input that each column of `stored_NB` multiplies; None: they are in order.
        groups_K: each column's group; None: groups are runs of `group_size` columns.
        in_strips: the bytes of `stored_NB` lie in strips, in which its rows have no meaning of their own.
    """

    stored_NB: Tensor
    scales_GN: Tensor
    zeros_GN: Tensor | None
    bits: int
    columns: int
    group_size: int
    order_K: Tensor | None = None
    groups_K: Tensor | None = None
    in_strips: bool = False

    def expert(self, index: int) -> "PackedWeight":
        tensors = {name: getattr(self, name) for name in ("stored_NB", "scales_GN", "zeros_GN", "order_K", "groups_K")}
        return replace(self, **{name: each[index] for name, each in tensors.items() if each is not None})

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Returns [N, K] with inputs in their own order, each product rounded once."""
        numbers_NK = unpack_strips(self.stored_NB) if self.in_strips else unpack_halves(self.stored_NB, self.bits)
        numbers_NK, groups_K = numbers_NK[:, : self.columns], self.groups_K
        if groups_K is None:
            groups_K = torch.arange(self.columns, device=numbers_NK.device) // self.group_size
        zeros = 1 << (self.bits - 1) if self.zeros_GN is None else self.zeros_GN.T.float()[:, groups_K]
        weight_NK = ((numbers_NK.float() - zeros) * self.scales_GN.T.float()[:, groups_K]).to(dtype)
        return weight_NK if self.order_K is None else weight_NK[:, self.order_K.argsort()]

    def into_strips(self) -> "PackedWeight":
        """Converts numbers of 4 bits in place, whole strips of them."""
        numbers_NK = unpack_halves(self.stored_NB, self.bits)
        rows, columns = numbers_NK.shape
        # From [S, g, r, 64 inputs, j, h, t, p] to [S, 64 inputs, g, t, j, p, h, r].
        numbers = numbers_NK.view(rows // STRIP, 8, 2, columns // STRIP_INPUTS, 4, 2, 4, 2)
        first, second = numbers.permute(0, 3, 1, 6, 4, 7, 5, 2).unbind(-1)
        self.stored_NB.copy_((first | second << 4).reshape(self.stored_NB.shape))
        return replace(self, in_strips=True)


def numbers_of(tensors: Mapping[TensorRole, Tensor], config: PackedConfig, rows: int, columns: int) -> PackedWeight:
    """Returns the weight in a layer's stored tensors."""
    layout = config.tensors
    numbers_NK = unpack_words(tensors[TensorRole.NUMBERS], layout[TensorRole.NUMBERS], config.bits)[:rows, :columns]
    scales_NG = _outputs_first(tensors[TensorRole.SCALES], layout[TensorRole.SCALES])
    zeros_GN = None
    if TensorRole.ZEROS in tensors:
        zeros_NG = unpack_words(tensors[TensorRole.ZEROS], layout[TensorRole.ZEROS], config.bits)[:rows]
        if config.zeros_are_less_one:
            zeros_NG = (zeros_NG + 1) & ((1 << config.bits) - 1)
        zeros_GN = zeros_NG.T.contiguous()
    group_size = config.group_size or columns
    order_K = groups_K = None
    if TensorRole.GROUPS in tensors:
        runs_K = torch.arange(columns, device=numbers_NK.device) // group_size
        sorted_K, order_K = tensors[TensorRole.GROUPS].long().sort(stable=True)
        if torch.equal(order_K, torch.arange(columns, device=order_K.device)):
            order_K = None
        else:
            numbers_NK = numbers_NK[:, order_K]
        groups_K = None if torch.equal(sorted_K, runs_K) else sorted_K
    stored_NB = pack_halves(numbers_NK, config.bits)
    scales_GN = scales_NG.T.contiguous()
    return PackedWeight(stored_NB, scales_GN, zeros_GN, config.bits, columns, group_size, order_K, groups_K)


def unpack_words(words: Tensor, layout: StoredPart, bits: int) -> Tensor:
    """Unpacks stored words to uint8 [N, K] or [N, G]."""
    assert layout.packed_dim is not None
    places = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    numbers = ((words.unsqueeze(-1) >> places) & ((1 << bits) - 1)).to(torch.uint8)
    if layout.order:
        numbers = numbers[..., torch.tensor(layout.order, device=words.device).argsort()]
    numbers = numbers.movedim(-1, layout.packed_dim + 1).flatten(layout.packed_dim, layout.packed_dim + 1)
    return _outputs_first(numbers, layout)


def _outputs_first(tensor: Tensor, layout: StoredPart) -> Tensor:
    assert layout.outputs is not None
    return tensor if layout.outputs.dim == 0 else tensor.T


def pack_halves(numbers_NK: Tensor, bits: int) -> Tensor:
    """Packs uint8 [N, K] to contiguous [N, B]; the input may be transposed, as from files with inputs first."""
    rows, columns = numbers_NK.shape
    padded_NK = torch.nn.functional.pad(numbers_NK, (0, -columns % (2 * RUN))).contiguous()
    if bits == 8:
        return padded_NK
    low, high = padded_NK.reshape(rows, -1, 2, RUN).unbind(2)
    return (low | high << 4).flatten(1)


def unpack_halves(stored_NB: Tensor, bits: int) -> Tensor:
    """Unpacks [N, B] to uint8 [N, padded K]."""
    if bits == 8:
        return stored_NB
    runs = stored_NB.unflatten(-1, (-1, RUN))
    return torch.stack([runs & 15, runs >> 4], dim=-2).flatten(-3)


def unpack_strips(stored_NB: Tensor) -> Tensor:
    """Unpacks [N, B] in strips to uint8 [N, K]."""
    rows, columns = stored_NB.shape[0], 2 * stored_NB.shape[1]
    pairs = stored_NB.view(rows // STRIP, columns // STRIP_INPUTS, 8, 4, 4, 2, 2)
    numbers = torch.stack([pairs & 15, pairs >> 4], dim=-1)
    return numbers.permute(0, 2, 7, 1, 4, 6, 3, 5).reshape(rows, columns)


def stacked(weights: list[PackedWeight]) -> PackedWeight:
    """Stacks the weights of all experts to one [E, ...]. Either all of them have an order of inputs or none."""
    first, count = weights[0], weights[0].columns
    device = first.stored_NB.device
    zeros = [each.zeros_GN for each in weights if each.zeros_GN is not None]
    order_EK = groups_EK = None
    if any(each.order_K is not None for each in weights):
        own = torch.arange(count, device=device)
        order_EK = torch.stack([own if each.order_K is None else each.order_K for each in weights])
    if any(each.groups_K is not None for each in weights):
        runs = torch.arange(count, device=device) // first.group_size
        groups_EK = torch.stack([runs if each.groups_K is None else each.groups_K for each in weights])
    return replace(
        first,
        stored_NB=torch.stack([each.stored_NB for each in weights]),
        scales_GN=torch.stack([each.scales_GN for each in weights]),
        zeros_GN=torch.stack(zeros) if zeros else None,
        order_K=order_EK,
        groups_K=groups_EK,
    )
