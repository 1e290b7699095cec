"""Writes docs/models.md from the table of families and transformers' lists of architectures; `make docs` calls it."""

import json
import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto import modeling_auto

from baton.models.families.features import FEATURES, ModelFeatures
from baton.models.families.table import FAMILIES

PAGE = Path(__file__).resolve().parent / "models.md"

OUTCOMES = PAGE.parents[1] / "bench" / "results" / "families.json"

_INTRODUCTION = """# Models

This page lists the architectures that Baton serves, and how each was tested. [Serving a model](serving-models.md) says
what a model's directory must contain, and [Notes on model families](model-notes.md) what is special about some of them.
[Attention backends](attention.md) says which backend can serve which model.

## Served

The first entry of `architectures` in `config.json` decides which file of `baton/models/families/` computes the model.
[EAGLE-3 heads](speculation.md#eagle-3-heads) work with those of `llama.py`, `gpt_oss.py`, `llama4.py` and `mimo.py`.
"""

_NOT_SERVED = "Baton serves {served} of the causal language models of transformers {version}. It does not serve these:"

_PROOF = """`make test-families` ran tiny random models of each architecture on {date}, with Baton {version}, and wrote
the outcomes of this table (transformers {transformers}, PEFT {peft}, torch {torch}, all in float32 on a CPU). A form
passes if all greedy tokens equal those of the reference, and the logarithms of their probabilities differ by less than
0.002.

- **engine**: one node, with prompts in chunks and in one batch, then again from the prefix cache. The reference is
  transformers.
- **pair**: a prefill and a decode node with different block sizes and cache layouts.
- **2 ranks**: `--tensor-parallel-size 2`.
- **fp8**, **int4**: checkpoints in fp8 (by block of 128x128 if the model has experts, otherwise by channel) and in int4
  (compressed-tensors, in groups; gpt-oss in mxfp4). Experts that a checkpoint stores in one tensor are not quantized.
  The reference is transformers with the dequantized weights.
- **LoRA**: an adapter of all linear layers except those of experts. The reference is PEFT, which also saved it.
"""
_COLUMNS = {"engine": "engine", "pair": "pair", "tp2": "2 ranks", "fp8": "fp8", "int4": "int4", "lora": "LoRA"}


def page() -> str:
    """The page's text."""
    names = causal_lm_names()
    served = [name for name in names if name in FAMILIES]
    sentence = _NOT_SERVED.format(version=transformers.__version__, served=len(served))
    others = ", ".join(f"`{name}`" for name in names if name not in FAMILIES)
    sections = [
        _INTRODUCTION,
        *_table(),
        "",
        "## Proof",
        "",
        *_proof(),
        "",
        "## Not served",
        "",
        sentence,
        "",
        others,
    ]
    return "\n".join(sections) + "\n"


def causal_lm_names() -> list[str]:
    """The architectures that transformers makes by `AutoModelForCausalLM`, in alphabetical order."""
    return sorted(set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()), key=str.casefold)


def _table() -> list[str]:
    """A row for each run of architectures with the same file and features."""
    rows = ["| architecture | file | special features | attention features |", "|---|---|---|---|"]
    for (file, features), names in groupby(FAMILIES, _described):
        listed = ", ".join(f"`{name}`" for name in names)
        rows.append(f"| {listed} | `{file}` | {features.special} | {features.attention} |")
    return rows


def _proof() -> list[str]:
    """The outcomes of the last whole run, a row for each architecture, and the refusals below."""
    run = json.loads(OUTCOMES.read_text())
    notes: dict[str, int] = {}
    rows = [f"| architecture | {' | '.join(_COLUMNS.values())} |", f"|---{'|---' * len(_COLUMNS)}|"]
    for architecture in FAMILIES:
        models = run["cells"].get(architecture, {})
        cells = (_cell([row[column] for row in models.values() if column in row], notes) for column in _COLUMNS)
        rows.append(f"| `{architecture}` | {' | '.join(cells)} |")
    refusals = [f"{number}. {text}" for text, number in notes.items()]
    about = _PROOF.format(date=run["date"], version=run["version"], **run["libraries"])
    return [about, *rows, *(("", "Refusals:", "", *refusals) if refusals else ())]


def _cell(outcomes: list[tuple[str, str]], notes: dict[str, int]) -> str:
    """What became of an architecture's models in one form."""
    counts: Mapping[str, Any] = {what: [why for each, why in outcomes if each == what] for what, _ in outcomes}
    parts = []
    for what, reasons in counts.items():
        numbers = sorted({notes.setdefault(_note(why), len(notes) + 1) for why in reasons if why})
        some = f" ({len(reasons)} of {len(outcomes)} models)" if len(counts) > 1 else ""
        parts.append(what + some + "".join(f" [{number}]" for number in numbers))
    return ", ".join(parts) or "not run"


def _note(why: str) -> str:
    """Plain text, in which nothing is a mark of the page."""
    return re.sub(r"([*_|<>`])", r"\\\1", why)


def _described(architecture: str) -> tuple[str, ModelFeatures]:
    module = FAMILIES[architecture].model.partition(":")[0]
    return f"{module.rpartition('.')[2]}.py", FEATURES.get(architecture, ModelFeatures())


if __name__ == "__main__":
    PAGE.write_text(page())
