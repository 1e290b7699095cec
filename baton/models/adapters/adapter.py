"""One adapter on the host: read from a directory as PEFT saves it, and checked against a model's layers.

The adapter's revision is a digest of its numbers and scales. Two nodes with equal revisions compute the same KV,
whatever the names of their directories.
"""

import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from baton.core.errors import ConfigError
from baton.models.adapters.config import AdapterConfig, read_adapter_config
from baton.models.checkpoint.checkpoint import StoredTensor, read_file
from baton.models.checkpoint.names import LANGUAGE_MODEL, renamed
from baton.models.checkpoint.tensor_reader import read_tensor
from baton.models.loading.expert_names import our_name

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_EXPERTS = ".experts"  # in the names of routed experts, not of shared ones
_TENSOR = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")
_DTYPES = ("F32", "F16", "BF16")
_BACKBONE = {"model.": "backbone."}
_REVISION_CHARACTERS = 32


@dataclass(frozen=True)
class LayerShape:
    """The shape of a layer of the whole model, over all ranks."""

    inputs: int
    outputs: int


@dataclass(frozen=True)
class LayerDelta:
    """The matrices that an adapter adds to one layer: (x a^T) b^T * scale.

    Args:
        a: [rank, inputs]; b: [outputs, rank]; both of the whole layer.
    """

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class Adapter:
    """An adapter's matrices, by layer.

    Args:
        layers: by the layer's name in the base's checkpoint, without `.weight`.
    """

    revision: str
    rank: int
    layers: Mapping[str, LayerDelta]

    def to_bytes(self) -> bytes:
        """Serializes the adapter for the other ranks of a node."""
        buffer = io.BytesIO()
        plain = {name: (delta.a, delta.b, delta.scale) for name, delta in self.layers.items()}
        torch.save((self.revision, self.rank, plain), buffer)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Adapter":
        revision, rank, plain = torch.load(io.BytesIO(content), weights_only=True)
        return cls(revision, rank, {name: LayerDelta(*fields) for name, fields in plain.items()})


def read_adapter(directory: Path, layers: Mapping[str, LayerShape], *, max_rank: int) -> Adapter:
    """Reads the whole adapter.

    Args:
        layers: the model's layers that can have adapters, by their names in its checkpoint.

    Raises:
        ConfigError: a file is missing or damaged, the adapter needs an unsupported feature, or it is not for this
            model.
    """
    config, path = read_adapter_config(directory), directory / WEIGHTS_FILE
    if not path.exists():
        raise ConfigError(
            f"{directory} has no {WEIGHTS_FILE}",
            field="adapter",
            value=str(directory),
            cure="save the adapter with safe_serialization=True",
        )
    read: dict[str, LayerDelta] = {}
    rank = 0
    for name, sides in _pairs(path, read_file(path)).items():
        if len(sides) < 2:
            raise _unfit(path, f"has only one of the two matrices of {name}")
        experts = experts_of(name)
        if experts is None:
            own_rank = config.rank_of(name)
            deltas = _of_layer(path, name, sides, layers, config, max_rank=max_rank)
        else:
            own_rank, deltas = _of_experts(path, experts, sides, layers, config, max_rank=max_rank)
        if read.keys() & deltas.keys():
            raise _unfit(path, "has a layer under two names")
        read |= deltas
        rank = max(rank, own_rank)
    return Adapter(_revision(read), rank, read)


def has_experts(directory: Path) -> bool:
    """Whether an adapter changes routed experts. Reads names only; a damaged adapter has none."""
    try:
        return any(_EXPERTS in name for name in read_file(directory / WEIGHTS_FILE))
    except ConfigError:
        return False


def _pairs(path: Path, stored: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in sorted(stored.items()):
        matched = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
        if matched is None:
            raise _unfit(path, f"has {name}, which is not a matrix of a linear layer's LoRA")
        if pairs.setdefault(matched["layer"], {}).setdefault(matched["side"], tensor) is not tensor:
            raise _unfit(path, f"has {name} twice, with and without {_PREFIX}")
    if not pairs:
        raise _unfit(path, "has no tensors")
    return pairs


def _own_name(name: str, layers: Mapping[str, LayerShape]) -> str:
    """Translates PEFT's name of a layer, which is transformers', to the model's. The two differ within multimodal
    models, for shared experts, and where Nemotron-H's files have `backbone.` for `model.`."""
    inner = renamed(name, LANGUAGE_MODEL)
    spellings = (name, inner, our_name(f"{inner}.").removesuffix("."), renamed(inner, _BACKBONE))
    return next((each for each in spellings if each in layers), name)


def _of_layer(
    path: Path,
    name: str,
    sides: Mapping[str, StoredTensor],
    layers: Mapping[str, LayerShape],
    config: AdapterConfig,
    *,
    max_rank: int,
) -> dict[str, LayerDelta]:
    own, rank = _own_name(name, layers), config.rank_of(name)
    layer = layers.get(own)
    if layer is None:
        raise _no_such_layer(path, name)
    _check_rank(path, rank, max_rank)
    _check(path, sides, (rank, layer.inputs), (layer.outputs, rank))
    return {own: LayerDelta(_read(path, sides["A"]), _read(path, sides["B"]), config.scale_of(name))}


def _of_experts(
    path: Path,
    name: str,
    sides: Mapping[str, StoredTensor],
    layers: Mapping[str, LayerShape],
    config: AdapterConfig,
    *,
    max_rank: int,
) -> tuple[int, dict[str, LayerDelta]]:
    """Returns the rank of an adapter that has all experts in one tensor, and its part for each expert's layers."""
    first = _own_name(f"{name}.0.gate_proj", layers)
    module, layer = first.removesuffix(".0.gate_proj"), layers.get(first)
    if layer is None:
        raise _no_such_layer(path, name)
    count = sum(f"{module}.{expert}.gate_proj" in layers for expert in range(len(layers)))
    experts = FusedExperts(count, size=layer.inputs, inner=layer.outputs)
    inputs, outputs = sides["A"].shape[-1:], sides["B"].shape[:1]
    parameter = experts.parameter((*inputs, *outputs))
    if parameter is None:
        raise _unfit(path, f"has matrices of {name} for {[*inputs, *outputs]} channels, and no tensor there has these")
    rank, scale = config.rank_of(f"{name}.{parameter}"), config.scale_of(f"{name}.{parameter}")
    _check_rank(path, rank, max_rank)
    _check(path, sides, (count * rank, *inputs), (*outputs, count * rank))
    parts = experts.split(parameter, _read(path, sides["A"]), _read(path, sides["B"]))
    return rank, {f"{module}.{part}": LayerDelta(a, b, scale) for part, a, b in parts}


def _check_rank(path: Path, rank: int, max_rank: int) -> None:
    if rank > max_rank:
        raise ConfigError(
            f"{path} has rank {rank}, and this node takes ranks up to {max_rank}",
            field="max_adapter_rank",
            value=rank,
            allowed=(f"at most {max_rank}",),
            cure="give the node a larger --max-adapter-rank",
        )


def _check(
    path: Path, sides: Mapping[str, StoredTensor], shape_of_a: tuple[int, ...], shape_of_b: tuple[int, ...]
) -> None:
    for tensor, shape in ((sides["A"], shape_of_a), (sides["B"], shape_of_b)):
        if tensor.shape != shape:
            raise _unfit(path, f"has {tensor.name} as {list(tensor.shape)}, and model and config need {list(shape)}")
        if tensor.dtype not in _DTYPES:
            raise _unfit(path, f"has {tensor.name} as {tensor.dtype}, known are {', '.join(_DTYPES)}")


def _no_such_layer(path: Path, name: str) -> ConfigError:
    if _EXPERTS not in name:
        return _unfit(path, f"is for {name}, and the model has no such linear layer that can have an adapter")
    return ConfigError(
        f"{path} is for {name}, and this node does not serve adapters of routed experts of this model",
        field="adapter",
        value=str(path),
        cure="start the node with it, in --adapter, if its experts are gated by silu and not quantized; else train "
        "linear layers outside of routed experts",
    )


def _read(path: Path, stored: StoredTensor) -> Tensor:
    tensor = read_tensor(stored)
    if not tensor.isfinite().all():
        raise ConfigError(
            f"{path} has NaN or inf in {stored.name}",
            field="adapter",
            value=str(path),
            cure="save the adapter from a step of its training before it diverged",
        )
    return tensor


def _revision(layers: Mapping[str, LayerDelta]) -> str:
    digest = hashlib.sha256()
    for name, delta in sorted(layers.items()):
        heading = [name, delta.scale, *([list(side.shape), str(side.dtype)] for side in (delta.a, delta.b))]
        digest.update(json.dumps(heading).encode())
        for side in (delta.a, delta.b):
            digest.update(side.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:_REVISION_CHARACTERS]


def _unfit(path: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"{path} {problem}", field="adapter", value=str(path), cure="give an adapter that was trained on this model"
    )


_MODULE = re.compile(r"(?P<experts>.+\.experts)(\.base_layer)*")


def experts_of(name: str) -> str | None:
    """Returns the module of experts that contains the adapter's layer of this name; None if no such module does."""
    matched = _MODULE.fullmatch(name)
    return None if matched is None else matched["experts"]


@dataclass(frozen=True)
class FusedExperts:
    """The experts of one layer of the model, whose adapters PEFT may save as two tensors (`target_parameters`).

    PEFT saves one pair of matrices for such a tensor, with the ranks of all experts in one axis: expert by expert in A,
    rank by rank in B. In an adapter of both tensors of a layer, one pair's name is nested in the other's. The shapes
    decide which tensor a pair belongs to. Legend: E expert, R rank, I input, O output.

    Args:
        size, inner: the model's channels, and the channels between an expert's two products.
    """

    count: int
    size: int
    inner: int

    def parameter(self, channels: tuple[int, ...]) -> str | None:
        """Returns the tensor that a pair of matrices with these inputs and outputs belongs to; None if neither fits."""
        known: dict[tuple[int, ...], str] = {
            (self.size, 2 * self.inner): "gate_up_proj",
            (self.inner, self.size): "down_proj",
        }
        return known.get(channels)

    def split(self, parameter: str, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yields (name after the experts' name, A [R, I], B [O, R]) for each expert's layers."""
        a_ERI = a.unflatten(0, (self.count, -1))
        b_ORE = b.unflatten(1, (-1, self.count))
        for expert in range(self.count):
            b_OR = b_ORE[:, :, expert]
            parts: Mapping[str, Tensor] = {"down_proj": b_OR}
            if parameter == "gate_up_proj":
                parts = {"gate_proj": b_OR[: self.inner], "up_proj": b_OR[self.inner :]}
            yield from ((f"{expert}.{name}", a_ERI[expert], part) for name, part in parts.items())
