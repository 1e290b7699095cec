"""Checks that a checkpoint has exactly the tensors that a model needs, with the right shapes and dtypes. Some extra
tensors of published checkpoints are allowed.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from baton.core.errors import ConfigError
from baton.models.checkpoint.checkpoint import StoredTensor
from baton.models.checkpoint.share import Share
from baton.models.checkpoint.tensor_reader import read_tensor
from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.formats.fp8 import E4M3
from baton.models.loading.shares import Shares

_STORED_DTYPES = ("F64", "F32", "F16", "BF16")
# Quantized numbers are read as they are.
_STORED_AS = MappingProxyType(
    {E4M3: "F8_E4M3", torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8"}
)
_MAX_PROBLEMS = 8  # of each kind in one error
# Masks and angles that older versions of transformers saved; we compute them.
_NO_WEIGHTS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")
_SHARED_KV = re.compile(r"^model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.")


def check_tensors(
    stored: Mapping[str, StoredTensor],
    views: Mapping[str, Tensor],
    shares: Shares,
    config: ModelConfig,
    directory: Path,
) -> None:
    """Checks that a checkpoint has every tensor of the model, with its shape, and no other.

    Args:
        views: the memory that the tensors fill, by name.

    Raises:
        ConfigError: names every tensor that is missing, unexpected or misshapen, up to a handful.
    """
    missing = [name for name in views if name not in stored]
    extra = [
        f"{tensor.name} in {tensor.file.name}"
        for name, tensor in stored.items()
        if name not in views and not _ignorable(name, config) and not shares.elsewhere(name)
    ]
    misfits = []
    for name, view in views.items():
        tensor, share = stored.get(name), shares.of(name)
        expected = tuple(view.shape) if share is None else share.whole_shape(view.shape)
        if tensor is not None and tensor.shape != expected:
            misfits.append(f"{name} in {tensor.file.name} is {list(tensor.shape)}, the config needs {list(expected)}")
        elif tensor is None or (tensor.encoding is not None and view.dtype not in _STORED_AS):
            continue  # a GGUF file's numbers are decoded to any dtype
        elif tensor.dtype not in (allowed := _stored_dtypes(view)):
            misfits.append(f"{name} in {tensor.file.name} is {tensor.dtype}, {_expected_dtypes(allowed)}")
    problems = [
        f"{len(found)} {kind}: {'; '.join(found[:_MAX_PROBLEMS])}{'; ...' if len(found) > _MAX_PROBLEMS else ''}"
        for kind, found in (("missing", missing), ("unexpected", extra), ("unfit", misfits))
        if found
    ]
    if problems:
        raise ConfigError(
            f"the tensors in {directory} are not those of its config.json: {' | '.join(problems)}",
            field="model",
            value=str(directory),
            cure="check that config.json and weights are of one revision",
        )


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Whether published checkpoints hold the tensor although this model does not need it."""
    if name.endswith(_NO_WEIGHTS):
        return True
    if config.mtp_layers and name.startswith(("model.mtp_", "mtp.")):  # ERNIE's and Qwen's multi-token prediction
        return True
    if name.startswith("model.mtp."):  # LongCat's, which no field of its config mentions
        return True
    if config.moe is not None and (expert := _EXPERT.search(name)) and int(expert[1]) in config.moe.zero_numbers:
        return True  # transformers saves weights of experts that use none
    gqa, of_layer = config.attention, _SHARED_KV.match(name)
    owned = gqa.num_kv_layers if isinstance(gqa, GQAConfig) else config.num_layers
    if of_layer and owned <= int(of_layer[1]) < config.num_layers:  # the layer reads another layer's KV
        return True
    return any(  # multi-token prediction, for speculative decoding
        name.startswith(f"model.layers.{config.num_layers + index}.") for index in range(config.mtp_layers)
    )


def _stored_dtypes(view: Tensor) -> tuple[str, ...]:
    return _STORED_DTYPES if view.dtype not in _STORED_AS else (_STORED_AS[view.dtype],)


def _expected_dtypes(allowed: tuple[str, ...]) -> str:
    if allowed != _STORED_DTYPES:
        return f"the quantization_config needs {allowed[0]}"
    return f"known are {', '.join(allowed)}"


def take_tied_head(
    stored: Mapping[str, StoredTensor], views: Mapping[str, Tensor], *, head: str, embedding: str
) -> tuple[Mapping[str, StoredTensor], StoredTensor | None]:
    """Returns (the tensors that fill the model, a second copy of its embedding or None), for a model with a tied head.

    Checkpoints have the one tensor under the embedding's name, the head's, or both.
    """
    if head in views or head not in stored:
        return stored, None
    others = {name: tensor for name, tensor in stored.items() if name != head}
    if embedding in others:
        return others, stored[head]
    return {**others, embedding: stored[head]}, None


def check_tied_head(head: StoredTensor, embedding: Tensor, share: Share | None) -> None:
    part = head if share is None else head.part(share.dim, *share.ranges)
    if torch.equal(read_tensor(part).to(embedding), embedding[: part.shape[0]]):
        return
    raise ConfigError(
        f"{head.name} in {head.file.name} differs from the embedding that config.json ties it to",
        field="tie_word_embeddings",
        value=True,
        allowed=("false",),
    )
