"""Makes a model and fills its parameters: from safetensors files, or at random for benchmarks and tests.

Owns the way from a checkpoint's tensor names to parameters. Nothing is read before all names, shapes and dtypes are
known to fit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from attention.backend import AttentionBackend
from attention.cache import TORCH_DTYPES
from attention.mla import MLAAttention
from attention.spec import DTYPE_BYTES, FP8_DTYPES
from baton.errors import ConfigError
from models.causal_lm import CausalLM
from models.checkpoint import StoredTensor, read_checkpoint
from models.config import ModelConfig
from models.families import FAMILIES
from models.kv_scales import add_scales, check_scales, scale_views, without_scales
from models.linear import FusedLinear
from models.moe import Experts

LOAD_FORMATS = ("safetensors", "dummy")
_STORED_DTYPES = ("F64", "F32", "F16", "BF16")
_DUMMY_SEED = 0
_NORMS = ("norm.weight", "ln_f.weight", "ln_attn.weight", "ln_mlp.weight")
_MAX_PROBLEMS = 8  # of each kind in one error
_HEAD = "lm_head.weight"
_TRANSFORMER = "transformer."
_LANGUAGE_MODEL = MappingProxyType({"language_model.": "", "model.language_model.": "model."})
_OTHER_PARTS = ("vision_tower.", "vision_model.", "multi_modal_projector.")


def load_model(
    directory: Path,
    config: ModelConfig,
    *,
    backend: AttentionBackend,
    dtype: str,
    device: torch.device | str,
    kv_dtype: str = "",
    load_format: str = "safetensors",
    progress: Callable[[int, int], None] | None = None,
) -> CausalLM:
    """The model of `config` on `device`, its weights converted to `dtype`, ready for inference.

    Args:
        kv_dtype: of the cache; "" means `dtype`. One of fp8 has the checkpoint's scales, or 1 where there are none.
        load_format: "safetensors" reads `directory`; "dummy" draws the same weights in every process on the same
            kind of device.
        progress: called after each tensor with the bytes read so far and the bytes in all.

    Raises:
        ConfigError: a value is unknown, or the checkpoint is damaged or does not fit `config`; names every tensor that
            is missing, unexpected or misshapen, up to a handful.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format is {load_format!r}", field="load_format", value=load_format, allowed=LOAD_FORMATS
        )
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype is {dtype!r}", field="dtype", value=dtype, allowed=tuple(DTYPE_BYTES))
    stored = _language_model(read_checkpoint(directory)) if load_format == "safetensors" else {}
    with torch.device(device):
        model = FAMILIES[config.architecture](config, backend=backend, dtype=TORCH_DTYPES[dtype])
        if kv_dtype in FP8_DTYPES:
            add_scales(model)
    model.requires_grad_(requires_grad=False).eval()
    views = checkpoint_views(model)
    if load_format == "dummy":
        _fill_at_random(views, device)
    else:
        stored = _with_prefixes_of(views, stored if kv_dtype in FP8_DTYPES else without_scales(stored))
        scales = scale_views(model, stored, lambda path: _checkpoint_name(path, model.checkpoint_prefixes))
        views |= scales
        _check(stored, views, config, directory)
        _fill(stored, views, progress or _no_progress)
        check_scales(scales)
        if _HEAD in stored and _HEAD not in views:
            _check_tied_head(stored[_HEAD], model.model.embed_tokens.weight)
    for module in model.modules():
        if isinstance(module, MLAAttention):
            module.process_weights_after_loading()
    return model


def checkpoint_views(model: CausalLM) -> dict[str, Tensor]:
    """For each tensor name in a checkpoint of `model`, the memory that it fills: a parameter or a part of one."""
    return {_checkpoint_name(path, model.checkpoint_prefixes): view for path, view in _checkpoint_views(model)}


def _checkpoint_name(path: str, prefixes: Mapping[str, str]) -> str:
    for ours, theirs in prefixes.items():
        if path.startswith(ours):
            return theirs + path.removeprefix(ours)
    return path


def _checkpoint_views(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        match module:
            case FusedLinear():
                parent = path.rpartition(".")[0]
                yield from ((f"{parent}.{name}", view) for name, view in module.checkpoint_views())
            case Experts():
                yield from ((f"{path}.{name}", view) for name, view in module.checkpoint_views())
            case _:
                for name, parameter in module.named_parameters(recurse=False):
                    yield f"{path}.{name}", parameter.data


def _language_model(stored: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """The language model's part of a model that also sees, by the names that it has when it is alone.

    Publishers put `language_model.` in front of those; since transformers 4.52 some files have it behind `model.`.
    """
    if not any(name.startswith(tuple(_LANGUAGE_MODEL)) for name in stored):
        return stored
    return {
        _checkpoint_name(name, _LANGUAGE_MODEL): tensor
        for name, tensor in stored.items()
        if not name.removeprefix("model.").startswith(_OTHER_PARTS)
    }


def _with_prefixes_of(views: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """BLOOM was published without the `transformer.` that its names begin with when saved today."""
    prefixed = any(name.startswith(_TRANSFORMER) for name in views)
    if not prefixed or any(name.startswith(_TRANSFORMER) for name in stored):
        return stored
    return {name if name == _HEAD else _TRANSFORMER + name: tensor for name, tensor in stored.items()}


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Tensors that published checkpoints hold and that this model does not need."""
    if name.endswith("rotary_emb.inv_freq"):  # saved by transformers before 4.32; computed here
        return True
    if name == _HEAD:  # a second copy of a tied embedding; `_fill` checks that it is one
        return config.tie_word_embeddings
    return any(  # multi-token prediction, for speculative decoding
        name.startswith(f"model.layers.{config.num_layers + index}.") for index in range(config.mtp_layers)
    )


def _check(
    stored: Mapping[str, StoredTensor], views: Mapping[str, Tensor], config: ModelConfig, directory: Path
) -> None:
    missing = [name for name in views if name not in stored]
    extra = [
        f"{tensor.name} in {tensor.file.name}"
        for name, tensor in stored.items()
        if name not in views and not _ignorable(name, config)
    ]
    misfits = []
    for name, view in views.items():
        tensor = stored.get(name)
        if tensor is not None and tensor.shape != tuple(view.shape):
            expected = list(view.shape)
            misfits.append(f"{name} in {tensor.file.name} is {list(tensor.shape)}, the config needs {expected}")
        elif tensor is not None and tensor.dtype not in _STORED_DTYPES:
            misfits.append(f"{name} in {tensor.file.name} is {tensor.dtype}, known are {', '.join(_STORED_DTYPES)}")
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


def _fill(
    stored: Mapping[str, StoredTensor], views: Mapping[str, Tensor], progress: Callable[[int, int], None]
) -> None:
    names = sorted(views, key=lambda name: (stored[name].file, stored[name].start))
    bytes_total = sum(stored[name].stop - stored[name].start for name in names)
    bytes_read = 0
    for file, names_in_file in groupby(names, key=lambda name: stored[name].file):
        for name, tensor in _read(file, names_in_file, stored):
            views[name].copy_(tensor)
            bytes_read += stored[name].stop - stored[name].start
            progress(bytes_read, bytes_total)


def _read(file: Path, names: Iterable[str], stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in names:
                yield name, opened.get_tensor(stored[name].name)
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"cannot read {file}: {error}", field="model", value=str(file), cure="download the checkpoint again"
        ) from error


def _check_tied_head(head: StoredTensor, embedding: Tensor) -> None:
    for _, stored_head in _read(head.file, [_HEAD], {_HEAD: head}):
        if torch.equal(stored_head.to(embedding), embedding):
            return
    raise ConfigError(
        f"{_HEAD} in {head.file.name} differs from the embedding that config.json ties it to",
        field="tie_word_embeddings",
        value=True,
        allowed=("false",),
    )


def _no_progress(bytes_read: int, bytes_total: int) -> None:
    """For callers that do not watch."""


def _fill_at_random(views: Mapping[str, Tensor], device: torch.device | str) -> None:
    """Norms are 1, all else is normal with the spread that models of these families are initialized with."""
    generator = torch.Generator(device).manual_seed(_DUMMY_SEED)
    for name, view in views.items():
        if name.endswith(_NORMS):
            view.fill_(1.0)
        else:
            view.normal_(std=0.02, generator=generator)
