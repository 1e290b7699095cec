"""The token counts of a mixture's experts, as a node reports them and as `--expert-load` reads them from a file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from baton.core.errors import ConfigError
from baton.core.regular_file import read_regular_file

_SIZE_MAX = 1 << 26
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class LayerLoad(BaseModel):
    """The load of one layer.

    Attributes:
        layer: its number in the model.
        tokens: tokens of each expert.
        rank_tokens: tokens of each rank.
    """

    model_config = ConfigDict(frozen=True)

    layer: int = Field(ge=0)
    tokens: tuple[_Count, ...]
    rank_tokens: tuple[_Count, ...] = ()

    @property
    def imbalance(self) -> float:
        """The imbalance of the layer's ranks."""
        return imbalance(self.rank_tokens)


class ExpertLoad(BaseModel):
    """The load of all layers of one node.

    Attributes:
        model: the model's name, for people.
        redundant_experts: redundant experts of the node that counted.
    """

    model_config = ConfigDict(frozen=True)

    model: str = ""
    redundant_experts: int = Field(0, ge=0)
    layers: tuple[LayerLoad, ...]

    @property
    def tokens(self) -> Mapping[int, tuple[int, ...]]:
        """Tokens of each expert, by layer."""
        return {each.layer: each.tokens for each in self.layers}

    @property
    def rank_tokens(self) -> tuple[int, ...]:
        """Tokens of each rank, over all layers."""
        return tuple(map(sum, zip(*(each.rank_tokens for each in self.layers), strict=True)))

    def since(self, before: "ExpertLoad") -> "ExpertLoad":
        """The load since `before`, on the same node."""
        layers = [
            LayerLoad(
                layer=now.layer,
                tokens=_less(now.tokens, then.tokens),
                rank_tokens=_less(now.rank_tokens, then.rank_tokens),
            )
            for now, then in zip(self.layers, before.layers, strict=True)
        ]
        return self.model_copy(update={"layers": tuple(layers)})


def imbalance(rank_tokens: Sequence[int]) -> float:
    """Tokens of the busiest rank divided by those of the mean rank; 1 if all have equally many, or none."""
    total = sum(rank_tokens)
    return max(rank_tokens) * len(rank_tokens) / total if total else 1.0


def read_expert_load(path: Path) -> ExpertLoad:
    """Reads a file that `baton expert-load` has saved.

    Raises:
        ConfigError: the file cannot be read, or has another form.
    """
    cure = "save one by `baton expert-load HOST:PORT --output FILE`"
    try:
        return ExpertLoad.model_validate_json(read_regular_file(path, bytes_max=_SIZE_MAX))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", field="expert_load", value=str(path), cure=cure
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{path} is not an expert load: {where}: {first['msg']}", field="expert_load", value=str(path), cure=cure
        ) from None


def _less(now: Sequence[int], then: Sequence[int]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(now, then, strict=True))
