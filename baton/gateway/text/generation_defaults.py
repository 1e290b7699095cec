"""Reads a checkpoint's default sampling parameters and its beginning-of-text token."""

from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le
from pydantic import create_model

from baton.core.sampling import SAMPLING_FIELDS, SamplingParams
from baton.core.sampling_field import Door, Kind
from baton.models.config.fields import Fields, Integers
from baton.models.config.file import ConfigFile


class _BeginOfText(Fields):
    bos_token_id: Integers = ()


def read_default_sampling(directory: Path) -> SamplingParams:
    """Reads the sampling parameters of generation_config.json; others stay unset. As in vLLM, `do_sample` is ignored.

    Raises:
        ConfigError: a number is wrong; the error names the file.
    """
    path = directory / "generation_config.json"
    if not path.exists():
        return SamplingParams()
    given = _defaults_of_files().read(ConfigFile.read(path)).model_dump(exclude_none=True)
    for name, value in given.items():
        lenient = SAMPLING_FIELDS[name].lenient
        given[name] = value if lenient is None else lenient.read(value)
    return SamplingParams(**given)


def _defaults_of_files() -> type[Fields]:
    """Returns a model of the sampling parameters that the file may contain."""
    taken: dict[str, Any] = {}
    for name, field in SAMPLING_FIELDS.items():
        if Door.GENERATION_CONFIG in field.doors:
            assert field.bounds is not None, "only numbers may have defaults in the file"
            least = field.lenient.low if field.lenient is not None else field.bounds.low
            limits = (Gt(least) if field.bounds.above else Ge(least), Le(field.bounds.high))
            kind = int if field.kind is Kind.INTEGER else float
            taken[name] = (Annotated[kind, *limits] | None, None)
    return create_model("DefaultSampling", __base__=Fields, **taken)


def read_bos_token_id(directory: Path) -> int | None:
    """Reads the id from generation_config.json, else from config.json. Returns None if neither has it.

    Raises:
        ConfigError: the value is not a token id.
    """
    config = ConfigFile.read(directory / "config.json")
    files = [config, config.table("text_config")]
    generation = directory / "generation_config.json"
    if generation.exists():
        files.insert(0, ConfigFile.read(generation))
    return next((ids[0] for file in files if (ids := _BeginOfText.read(file).bos_token_id)), None)
