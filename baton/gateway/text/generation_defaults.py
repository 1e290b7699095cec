"""What a checkpoint says about generating: default sampling numbers and the beginning-of-text token."""

import math
from pathlib import Path
from typing import Annotated, TypeAlias

from annotated_types import Ge, Gt, Le, Lt

from baton.models.config.fields import Fields, Integers
from baton.models.config.file import ConfigFile
from baton.protos.v1 import common_pb2 as pb

_Finite: TypeAlias = Annotated[float, Gt(0), Lt(math.inf)]


class _Defaults(Fields):
    """The numbers of generation_config.json that vLLM takes too; like vLLM, `do_sample` is ignored."""

    temperature: Annotated[float, Ge(0), Le(100)] | None = None
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    top_k: Annotated[int, Ge(-1), Lt(2**31)] | None = None  # -1 and 0: off
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    repetition_penalty: _Finite | None = None


class _BeginOfText(Fields):
    bos_token_id: Integers = ()


def read_default_sampling(directory: Path) -> pb.SamplingParams:
    """The sampling numbers that generation_config.json gives; the others are absent.

    Raises:
        ConfigError: a number is wrong; names the file.
    """
    path = directory / "generation_config.json"
    if not path.exists():
        return pb.SamplingParams()
    given = _Defaults.read(ConfigFile.read(path)).model_dump(exclude_none=True)
    if given.get("top_k") == -1:
        given["top_k"] = 0
    return pb.SamplingParams(**given)


def with_defaults(sampling: pb.SamplingParams, defaults: pb.SamplingParams) -> pb.SamplingParams:
    """A request's parameters, with `defaults` where it gives no number."""
    merged = pb.SamplingParams()
    merged.CopyFrom(defaults)
    merged.MergeFrom(sampling)
    return merged


def read_bos_token_id(directory: Path) -> int | None:
    """The id in generation_config.json, else the one in config.json.

    Raises:
        ConfigError: it is no token id.
    """
    config = ConfigFile.read(directory / "config.json")
    files = [config, config.table("text_config")]
    generation = directory / "generation_config.json"
    if generation.exists():
        files.insert(0, ConfigFile.read(generation))
    return next((ids[0] for file in files if (ids := _BeginOfText.read(file).bos_token_id)), None)
