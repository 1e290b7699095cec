"""Reads what a checkpoint says about its own embeddings and scores, in the files of sentence-transformers.

`modules.json` lists the steps after the transformer; a folder of each step has its config. A checkpoint whose steps
pool has no use for a language model's head.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from annotated_types import Ge
from pydantic import BeforeValidator

from baton.core.errors import ConfigError
from baton.models.config.fields import Count, CountOrZero, Fields, Integers, Table, Texts
from baton.models.config.file import ConfigFile, read_regular

MODULES, _SENTENCE = "modules.json", "config_sentence_transformers.json"
_CLASSIFICATION = "ForSequenceClassification"
_MODULES_MAX = 16


class Pooling(StrEnum):
    """Which tokens' hidden states are averaged to one vector."""

    LAST = "lasttoken"
    MEAN = "mean"
    CLS = "cls"


@dataclass(frozen=True)
class EmbeddingConfig:
    """How the checkpoint makes a vector of a text.

    Attributes:
        normalize: vectors have length 1.
        include_prompt: the tokens of a prompt are pooled too; otherwise only those after it.
        max_tokens: of a text; None: the model's limit.
        prompts: texts that go before a text, by name.
        default_prompt: the prompt of a text for which none is named; empty: none.
        matryoshka: the checkpoint says that its vectors may be cut.
        matryoshka_dimensions: to these lengths; empty: to any.
    """

    pooling: Pooling
    normalize: bool = False
    include_prompt: bool = True
    max_tokens: int | None = None
    prompts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    default_prompt: str = ""
    matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()


@dataclass(frozen=True)
class ScoreConfig:
    """How the checkpoint scores a pair of texts.

    Attributes:
        yes, no: the score compares the logits of these tokens after the pair: ids, or texts of single tokens. None: the
            score is the output of the checkpoint's classification head.
        instruct: the pair is written into the template of Qwen3-Reranker.
        sigmoid: scores are the sigmoid of the outputs, so between 0 and 1.
        max_tokens: of a pair; None: the model's limit.
    """

    yes: int | str | None = None
    no: int | str | None = None
    instruct: bool = False
    sigmoid: bool = True
    max_tokens: int | None = None


class _PoolingFile(Fields):
    """`1_Pooling/config.json`, in both spellings."""

    pooling_mode: Annotated[Texts, BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)] = ()
    pooling_mode_cls_token: bool = False
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False
    pooling_mode_lasttoken: bool = False
    include_prompt: bool = True

    @property
    def modes(self) -> tuple[str, ...]:
        if self.pooling_mode:
            return self.pooling_mode
        given = {
            "cls": self.pooling_mode_cls_token,
            "max": self.pooling_mode_max_tokens,
            "mean": self.pooling_mode_mean_tokens,
            "mean_sqrt_len_tokens": self.pooling_mode_mean_sqrt_len_tokens,
            "weightedmean": self.pooling_mode_weightedmean_tokens,
            "lasttoken": self.pooling_mode_lasttoken,
        }
        return tuple(name for name, is_on in given.items() if is_on) or ("mean",)


class _TransformerFile(Fields):
    max_seq_length: Count | None = None


class _SentenceFile(Fields):
    activation_fn: str | None = None
    prompts: Table | None = None
    default_prompt_name: str | None = None


class _LogitScoreFile(Fields):
    true_token_id: CountOrZero
    false_token_id: CountOrZero | None = None


class _ModelFile(Fields):
    architectures: Texts = ()
    is_matryoshka: bool = False
    matryoshka_dimensions: Integers = ()
    classifier_from_token: Texts = ()
    num_labels: Annotated[int, Ge(1)] | None = None
    id2label: Table | None = None


def read_embedding(directory: Path) -> EmbeddingConfig | None:
    """Reads how the checkpoint makes vectors. Returns None if it has no pooling files.

    Raises:
        ConfigError: a file is wrong, or asks for something that is not supported.
    """
    modules = _modules(directory)
    if "Pooling" not in modules:
        return None
    for name in modules:
        if name not in ("Transformer", "Pooling", "Normalize"):
            raise _refuse(directory / MODULES, f"has a step {name}", "Transformer", "Pooling", "Normalize")
    path = directory / modules["Pooling"] / "config.json"
    pooling = _PoolingFile.read(ConfigFile.read(path))
    modes = pooling.modes
    if len(modes) != 1 or modes[0] not in list(Pooling):
        raise _refuse(path, f"pools by {' and '.join(modes)}", *Pooling)
    prompts, default = _prompts(directory / _SENTENCE)
    model = _ModelFile.read(ConfigFile.read(directory / "config.json"))
    return EmbeddingConfig(
        pooling=Pooling(modes[0]),
        normalize="Normalize" in modules,
        include_prompt=pooling.include_prompt,
        max_tokens=_max_tokens(directory),
        prompts=prompts,
        default_prompt=default,
        matryoshka=model.is_matryoshka or bool(model.matryoshka_dimensions),
        matryoshka_dimensions=model.matryoshka_dimensions,
    )


def read_score(directory: Path) -> ScoreConfig | None:
    """Reads how the checkpoint scores pairs of texts. Returns None if it does not.

    Raises:
        ConfigError: a file is wrong, or asks for something that is not supported.
    """
    file = ConfigFile.read(directory / "config.json")
    model = _ModelFile.read(file)
    sigmoid, max_tokens = _has_sigmoid(directory, file), _max_tokens(directory)
    if any(name.endswith(_CLASSIFICATION) for name in model.architectures):
        return ScoreConfig(sigmoid=sigmoid, max_tokens=max_tokens) if num_labels(file) == 1 else None
    is_qwen3 = "Qwen3ForCausalLM" in model.architectures
    modules = _modules(directory)
    if "LogitScore" in modules:
        scores = _LogitScoreFile.read(ConfigFile.read(directory / modules["LogitScore"] / "config.json"))
        yes, no = scores.true_token_id, scores.false_token_id
        return ScoreConfig(yes, no, instruct=is_qwen3, sigmoid=sigmoid, max_tokens=max_tokens)
    if len(tokens := model.classifier_from_token) == 2:
        return ScoreConfig(tokens[1], tokens[0], instruct=is_qwen3, sigmoid=sigmoid, max_tokens=max_tokens)
    return None


def _has_sigmoid(directory: Path, file: ConfigFile) -> bool:
    """Whether outputs become scores by a sigmoid, which is sentence-transformers' default for one output."""
    path = directory / _SENTENCE
    given = file.table("sentence_transformers").raw("activation_fn")
    if path.exists():
        given = _SentenceFile.read(ConfigFile.read(path)).activation_fn or given
    if given is None:
        return True
    name = str(given).rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise _refuse(path, f"has activation_fn {name}", "Sigmoid", "Identity")
    return name == "Sigmoid"


def _max_tokens(directory: Path) -> int | None:
    path = directory / "sentence_bert_config.json"
    return _TransformerFile.read(ConfigFile.read(path)).max_seq_length if path.exists() else None


def has_head(directory: Path) -> bool:
    """Whether the checkpoint's language model head is used: it is not where the checkpoint pools hidden states."""
    return "Pooling" not in _modules(directory)


def num_labels(file: ConfigFile) -> int:
    """The number of outputs of a classification head; 0 if the architecture in this config.json has none."""
    model = _ModelFile.read(file)
    if not any(name.endswith(_CLASSIFICATION) for name in model.architectures):
        return 0
    return len(model.id2label) if model.id2label else model.num_labels or 2  # as in transformers


def _modules(directory: Path) -> Mapping[str, str]:
    """The folders of the checkpoint's steps, by the class of each."""
    path = directory / MODULES
    if not path.exists():
        return {}
    try:
        steps = json.loads(read_regular(path))
    except (ValueError, RecursionError) as error:
        raise _refuse(path, f"is not JSON: {error}") from error
    if not isinstance(steps, list) or len(steps) > _MODULES_MAX:
        raise _refuse(path, "is not a list of steps")
    modules: dict[str, str] = {}
    for step in steps:
        kind, folder = (step.get(name) for name in ("type", "path")) if isinstance(step, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(folder, str) or ".." in Path(folder).parts or "/" in folder[:1]:
            raise _refuse(path, "has a step without type, or with a path outside of the checkpoint")
        modules[kind.rpartition(".")[2]] = folder
    return modules


def _prompts(path: Path) -> tuple[Mapping[str, str], str]:
    if not path.exists():
        return MappingProxyType({}), ""
    file = ConfigFile.read(path)
    fields = _SentenceFile.read(file)
    prompts = {name: text for name, text in (fields.prompts or {}).items() if isinstance(text, str)}
    default = fields.default_prompt_name
    if default is not None and default not in prompts:
        raise file.refuse("default_prompt_name", *prompts)
    return MappingProxyType(prompts), "" if default is None else prompts[default]


def _refuse(path: Path, problem: str, *allowed: str) -> ConfigError:
    return ConfigError(
        f"{path} {problem}", field="model", value=str(path), allowed=allowed, cure="choose another checkpoint"
    )
