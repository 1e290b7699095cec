"""One adapter on the host: read from a directory as PEFT saves it, and checked against a model's layers.

The adapter's revision is a digest of its numbers and scales. Two nodes with one revision compute the same KV, whatever
their directories are called.
"""

import hashlib
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from baton.errors import ConfigError
from models.adapters.config import AdapterConfig, read_adapter_config
from models.weights.checkpoint import StoredTensor, read_file
from models.weights.expert_names import our_name
from models.weights.names import LANGUAGE_MODEL, renamed
from models.weights.tensor_reader import read_tensor

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")
_DTYPES = ("F32", "F16", "BF16")
_BACKBONE = {"model.": "backbone."}
_REVISION_CHARACTERS = 32


@dataclass(frozen=True)
class LayerShape:
    """A layer of the whole model, on all ranks together."""

    inputs: int
    outputs: int


@dataclass(frozen=True)
class LayerDelta:
    """What an adapter adds to one layer: (x a^T) b^T * scale.

    Args:
        a: [rank, inputs]; b: [outputs, rank]; both of the whole layer.
    """

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class Adapter:
    """Args:
    layers: by the layer's name in the base's checkpoint, without `.weight`.
    """

    revision: str
    rank: int
    layers: Mapping[str, LayerDelta]

    def to_bytes(self) -> bytes:
        """For the other ranks of a node."""
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
        layers: those of the model that can have adapters, by their names in its checkpoint.

    Raises:
        ConfigError: a file is missing or damaged, the adapter needs what is not supported, or it is not for this model.
    """
    config, path = read_adapter_config(directory), directory / WEIGHTS_FILE
    if not path.exists():
        raise ConfigError(
            f"{directory} has no {WEIGHTS_FILE}",
            field="adapter",
            value=str(directory),
            cure="save the adapter with safe_serialization=True",
        )
    pairs = _pairs(path, read_file(path))
    own = {name: _own_name(name, layers) for name in pairs}
    for name, sides in pairs.items():
        _check(path, name, sides, layers.get(own[name]), config)
    if len({*own.values()}) < len(own):
        raise _unfit(path, "has a layer under two names")
    rank = max(sides["A"].shape[0] for sides in pairs.values())
    if rank > max_rank:
        raise ConfigError(
            f"{path} has rank {rank}, and this node takes ranks up to {max_rank}",
            field="max_adapter_rank",
            value=rank,
            allowed=(f"at most {max_rank}",),
            cure="give the node a larger --max-adapter-rank",
        )
    read = {
        own[name]: LayerDelta(_read(path, sides["A"]), _read(path, sides["B"]), config.scale_of(name))
        for name, sides in pairs.items()
    }
    return Adapter(_revision(read), rank, read)


def _pairs(path: Path, stored: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in sorted(stored.items()):
        matched = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
        if matched is None:
            raise _unfit(path, f"has {name}, which is no matrix of a linear layer's LoRA")
        if pairs.setdefault(matched["layer"], {}).setdefault(matched["side"], tensor) is not tensor:
            raise _unfit(path, f"has {name} twice, with and without {_PREFIX}")
    if not pairs:
        raise _unfit(path, "has no tensors")
    return pairs


def _own_name(name: str, layers: Mapping[str, LayerShape]) -> str:
    """The model's name of a layer, which PEFT calls as transformers does: within a multimodal model, by the
    publisher's name of a shared expert, or with `model.` where Nemotron-H's files have `backbone.`."""
    inner = renamed(name, LANGUAGE_MODEL)
    spellings = (name, inner, our_name(f"{inner}.").removesuffix("."), renamed(inner, _BACKBONE))
    return next((each for each in spellings if each in layers), name)


def _check(
    path: Path,
    name: str,
    sides: Mapping[str, StoredTensor],
    layer: LayerShape | None,
    config: AdapterConfig,
) -> None:
    if len(sides) < 2:
        raise _unfit(path, f"has only one of the two matrices of {name}")
    if layer is None:
        raise _unfit(path, f"is for {name}, and the model has no such linear layer that can have an adapter")
    a, b, rank = sides["A"], sides["B"], config.rank_of(name)
    for tensor, shape in ((a, (rank, layer.inputs)), (b, (layer.outputs, rank))):
        if tensor.shape != shape:
            raise _unfit(path, f"has {tensor.name} as {list(tensor.shape)}, and model and config need {list(shape)}")
        if tensor.dtype not in _DTYPES:
            raise _unfit(path, f"has {tensor.name} as {tensor.dtype}, known are {', '.join(_DTYPES)}")


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
