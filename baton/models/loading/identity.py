"""Computes a model's identity, as digests that two nodes compare before they share KV."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from baton.core.errors import ConfigError
from baton.models.checkpoint.checkpoint import StoredTensor, read_checkpoint
from baton.models.config.model_config import ModelConfig
from baton.settings.model_source import model_name

_SAMPLE_BYTES = 1024
_SAMPLES = 4
# Fields with a default that the first release hashed, by class. A later field counts only if it differs from its
# default, so a checkpoint that does not use it keeps its digest, and releases with and without the field work together.
_ALWAYS_HASHED = {
    "ModelConfig": {"local_rope", "final_logits_soft_cap", "moe", "mtp_layers", "quantization", "switches"},
    "GQAConfig": {"attention_chunk_sizes", "logits_soft_cap", "sinks", "alibi_slopes", "blocksparse"},
    "MoEConfig": {"router_bias"},
    "Fp8Config": {"power_of_two_inputs", "unquantized"},
    "BlocksparseParams": {"homo_head", "homo_head_group", "tp_rank", "tp_size"},
}

# Fields that say what a node makes of a checkpoint.
_NEVER_HASHED = {"ModelConfig": {"drafts", "eagle"}}


@dataclass(frozen=True)
class ModelIdentity:
    """A model's identity. `name` is for people; nodes compare the other fields.

    Attributes:
        weights_digest: over names, shapes, dtypes and samples; every release has it.
        content_digest: over every byte of the weights; empty until it is known.
        draft_digest: of an EAGLE-3 head that drafts for the model; empty without one.
    """

    name: str
    architecture: str
    config_digest: str
    weights_digest: str
    content_digest: str = ""
    draft_digest: str = ""


def model_identity(directory: Path, config: ModelConfig, *, load_format: str = "safetensors") -> ModelIdentity:
    """Returns the identity of the checkpoint in `directory`, without its content digest
    (`baton.models.loading.content_digest`).

    Reads headers and at most 4 KiB of each tensor. Training changes every part of every tensor, so two trained
    revisions never agree on these bytes; damage and manual edits can go undetected. How tensors are spread over files
    does not matter.

    Raises:
        ConfigError: the weights cannot be read.
    """
    weights = "dummy" if load_format == "dummy" else weights_digest(directory)
    return ModelIdentity(model_name(directory), config.architecture, config_digest(config), weights)


def config_digest(config: ModelConfig) -> str:
    """Returns the SHA-256, in hex, over the fields that we read. It is equal for every spelling of the same model, and
    in every release.

    A new field needs a default that keeps the behaviour of releases without it. Never rename or remove fields.
    """
    return hashlib.sha256(json.dumps(plain_values(config), sort_keys=True).encode()).hexdigest()


def plain_values(value: Any) -> Any:
    """Converts a value to JSON's types."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_values(getattr(value, field.name)) for field in _hashed(value)}
    return [plain_values(each) for each in value] if isinstance(value, tuple) else value


def _hashed(value: Any) -> Iterator[Field[Any]]:
    always = _ALWAYS_HASHED.get(type(value).__name__, set())
    never = _NEVER_HASHED.get(type(value).__name__, set())
    for field in fields(value):
        if field.name in never:
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name in always or default is MISSING or getattr(value, field.name) != default:
            yield field


def weights_digest(directory: Path) -> str:
    """Returns a digest of the checkpoint's tensors, over names, shapes, dtypes and samples."""
    digest = hashlib.sha256()
    for name, tensor in read_checkpoint(directory).items():
        digest.update(json.dumps([name, tensor.dtype, tensor.shape]).encode())
        for sample in _samples(tensor):
            digest.update(sample)
    return digest.hexdigest()


def _samples(tensor: StoredTensor) -> list[bytes]:
    """Reads all bytes of a small tensor, or windows at equal distances from the first byte to the last."""
    size_bytes = tensor.stop - tensor.start
    try:
        with tensor.file.open("rb", buffering=0) as file:
            if size_bytes <= _SAMPLES * _SAMPLE_BYTES:
                file.seek(tensor.start)
                return [file.read(size_bytes)]
            samples = []
            for index in range(_SAMPLES):
                file.seek(tensor.start + (size_bytes - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                samples.append(file.read(_SAMPLE_BYTES))
            return samples
    except OSError as error:
        raise ConfigError(
            f"cannot read {tensor.file}: {error.strerror}",
            field="model",
            value=str(tensor.file),
            cure="download the checkpoint again",
        ) from error
