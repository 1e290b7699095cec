"""Tiny random models of every architecture, and the tokens that their references give: transformers' greedy ones.

Most come from `tests.unit.models.tiny`. Of multimodal models that transformers cannot make small, the language model
is made alone and then stored as published files have it, within a table of config.json and under a prefix.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.models.families.table import FAMILIES
from tests.unit.models import tiny
from tests.unit.models.phi3_small_checkpoint import save_phi3_small
from tests.unit.models.test_phi3_small import reference_logits
from tests.unit.models.test_qwen_vl import CASES as QWEN_VL
from tests.unit.models.test_qwen_vl import Case as QwenCase
from tests.unit.models.tiny import TINY, architecture_of, save_tiny

PROMPT_LENGTHS, MAX_TOKENS = (30, 13, 21), 8
_TOKENS = range(3, 57)
_PICTURES = range(57, 61)  # tokens of Qwen's vision models, which would look for a picture
# Of the best logit before the second, so that rounding decides nothing.
_MARGIN, _SEEDS = 5e-4, 200
# Different tokens of an answer that are enough, and clear prompts after which there is no hope for more.
_DIFFERENT, _CLEAR = 4, 4
# Sizes that published models have in multiples of 128, and which are too odd in tiny ones for groups of scales.
_GROWN = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "intermediate_size_mlp",
    "ffn_hidden_size",
    "expert_ffn_hidden_size",
    "kv_lora_rank",
    "q_lora_rank",
    "hidden_size_per_layer_input",
    "laurel_rank",
    "v_head_dim",
)
_MULTIPLE = 32

# The next token's logits [V] after these tokens.
NextLogits = Callable[[Sequence[int]], Tensor]


@dataclass(frozen=True)
class Model:
    """A checkpoint and its reference.

    Args:
        reference: transformers' model; None: transformers has no such model.
        logits: of the reference.
        special: tokens that are not text.
    """

    directory: Path
    reference: Any
    logits: NextLogits
    special: range = range(0)


@dataclass(frozen=True)
class Case:
    """One tiny model.

    Args:
        architecture: as Baton's table has it.
        save: stores it in an empty directory, with these fields of its config changed.
        fields: of the config, by which `grown` chooses.
        published: the published files have another form than those that transformers saves here.
    """

    name: str
    architecture: str
    save: Callable[[Path, Mapping[str, Any]], Any]
    fields: Mapping[str, Any] = field(default_factory=dict)
    published: bool = False

    def make(self, directory: Path, *, grown: bool = False) -> Model:
        """As transformers saves it: `publish` makes the published form of it.

        Args:
            grown: with sizes that groups of scales divide.
        """
        directory.mkdir(parents=True, exist_ok=True)
        return as_model(directory, self.save(directory, _grown(self.fields) if grown else {}))

    def publish(self, directory: Path) -> None:
        """Stores the language model as published files of this architecture have it."""
        if not self.published:
            return
        config = directory / "config.json"
        values = json.loads(config.read_text())
        if not FAMILIES[self.architecture].text_config:
            values["architectures"] = [self.architecture]
        else:
            quantization = values.pop("quantization_config", None)
            values = {"architectures": [self.architecture], "text_config": values, "dtype": "float32"}
            if quantization is not None:
                values["quantization_config"] = quantization
            weights = directory / "model.safetensors"
            tensors = {f"language_model.{name}": each for name, each in load_file(weights).items()}
            save_file(tensors | {"vision_tower.a.weight": torch.zeros(2)}, weights, metadata={"format": "pt"})
        config.write_text(json.dumps(values))


class Answer(NamedTuple):
    """Greedy tokens, and the logarithm of each one's probability."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Prompts:
    """Prompts with their expected tokens.

    Args:
        expected: the reference's, after each prompt.
    """

    prompts: tuple[tuple[int, ...], ...]
    expected: tuple[Answer, ...]


def expected_of(model: Model) -> Prompts:
    """Prompts whose greedy tokens no rounding changes."""
    found = [_clear_prompt(model, length, number * _SEEDS) for number, length in enumerate(PROMPT_LENGTHS)]
    prompts, expected = zip(*found, strict=True)
    return Prompts(prompts, expected)


def reload(model: Model, directory: Path) -> Model:
    """The same model with other weights: those in `directory`."""
    if model.reference is None:
        return as_model(directory, None)
    changed = type(model.reference).from_pretrained(
        directory, attn_implementation=model.reference.config._attn_implementation, dtype=torch.float32
    )
    for ours, theirs in zip(changed.modules(), model.reference.modules(), strict=True):
        if hasattr(theirs, "limit"):  # which transformers does not read from every config
            ours.limit = theirs.limit
    return as_model(directory, changed.eval())


def as_model(directory: Path, reference: Any) -> Model:
    """None: Phi-3-small, whose logits come from the weights in `directory`."""
    if reference is not None:
        special = _PICTURES if "VL" in type(reference).__name__ else range(0)
        return Model(directory, reference, partial(_next_logits, reference), special)
    return Model(directory, None, partial(_logits_of_phi3_small, load_file(directory / "model.safetensors")))


def cases() -> dict[str, Case]:
    """By name; at least one for each architecture of the table."""
    found = [_tiny_case(name) for name in TINY]
    found += [_tiny_case(name, architecture) for architecture, name in _PUBLISHED_NAMES.items()]
    found += [_qwen_case(name, case) for name, case in QWEN_VL.items()]
    found.append(Case("phi3-small", "Phi3SmallForCausalLM", _save_phi3_small))
    covered = {case.architecture: case.name for case in reversed(found)}
    for architecture in FAMILIES.keys() - covered.keys():
        text = architecture.replace("ForConditionalGeneration", "ForCausalLM")
        found.append(_tiny_case(_NESTED.get(architecture) or covered[text], architecture))
    order = {architecture: number for number, architecture in enumerate(FAMILIES)}
    assert len({case.name for case in found}) == len(found), "two tiny models have one name"
    return {case.name: case for case in sorted(found, key=lambda case: order[case.architecture])}


# transformers has changed these names.
_PUBLISHED_NAMES: Mapping[str, str] = MappingProxyType(
    {"MPTForCausalLM": "mpt", "PhiMoEForCausalLM": "phimoe", "ExaoneMoEForCausalLM": "exaone-moe"}
)
# The same models by other names, alone or within multimodal models.
_NESTED: Mapping[str, str] = MappingProxyType(
    {
        "Mistral3ForConditionalGeneration": "ministral3",
        "KimiK25ForConditionalGeneration": "kimi-k2",
        "MiMoForCausalLM": "qwen2",
    }
)


def _tiny_case(name: str, architecture: str = "") -> Case:
    family, fields = TINY[name]
    own = f"{name} as {architecture}" if architecture else name
    return Case(
        own, architecture or architecture_of(family), partial(_save_tiny, name), fields, published=bool(architecture)
    )


def _qwen_case(name: str, case: QwenCase) -> Case:
    architecture = f"{case.family}ForConditionalGeneration"
    own = f"{name} as {architecture}" if name in TINY else name
    return Case(own, architecture, partial(_save_qwen, case), case.text)


def _save_tiny(name: str, directory: Path, fields: Mapping[str, Any]) -> Any:
    family, own = TINY[name]
    with patch.object(tiny, "TINY", {**TINY, name: (family, {**own, **fields})}):
        return save_tiny(name, directory)


def _save_qwen(case: QwenCase, directory: Path, fields: Mapping[str, Any]) -> Any:
    changed = replace(case, text={**case.text, **fields})
    return changed.save(directory)


def _save_phi3_small(directory: Path, fields: Mapping[str, Any]) -> None:
    save_phi3_small(directory)


def _grown(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _rounded(fields[name]) for name in _GROWN if fields.get(name)}


def _rounded(size: int | list[int]) -> int | list[int]:
    return [-(-each // _MULTIPLE) * _MULTIPLE for each in size] if isinstance(size, list) else _rounded([size])[0]  # type: ignore[index]


@torch.inference_mode()
def _next_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]
    return logits


def _logits_of_phi3_small(tensors: Mapping[str, Tensor], tokens: Sequence[int]) -> Tensor:
    return reference_logits(tensors, list(tokens))[-1]


def _clear_prompt(model: Model, length: int, first_seed: int) -> tuple[tuple[int, ...], Answer]:
    """The first prompt whose greedy tokens are clear and many, or that with the most."""
    best: tuple[tuple[int, ...], Answer] | None = None
    clear = 0
    for seed in range(first_seed, first_seed + _SEEDS):
        generator = torch.Generator().manual_seed(seed)
        prompt = tuple(torch.randint(_TOKENS.start, _TOKENS.stop, (length,), generator=generator).tolist())
        answer = _clear_answer(model, prompt)
        if answer is None:
            continue
        if best is None or len({*answer.tokens}) > len({*best[1].tokens}):
            best = prompt, answer
        clear += 1
        if clear == _CLEAR or len({*best[1].tokens}) >= _DIFFERENT:
            break
    assert best is not None, f"no prompt of {length} tokens has clear greedy tokens"
    return best


def _clear_answer(model: Model, prompt: tuple[int, ...]) -> Answer | None:
    """None: a token is too near to another one, or not one of text."""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    while len(tokens) < MAX_TOKENS:
        logits = model.logits(prompt + tokens)
        (best, second), (token, _) = (each.tolist() for each in logits.topk(2))
        if best - second < _MARGIN or token in model.special:
            return None
        tokens += (token,)
        logprobs += (float(logits.double().log_softmax(-1)[token]),)
    return Answer(tokens, logprobs)
