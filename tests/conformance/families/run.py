"""Runs models through the columns of the table: each cell is the outcome of a real run."""

import asyncio
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from baton.core.errors import ConfigError
from tests.conformance.families.models import MAX_TOKENS, Answer, Case, Model, Prompts, expected_of
from tests.conformance.families.nodes import answers_of_rank, engine_answers, pair_answers
from tests.conformance.families.variants import in_fp8, in_int4, with_adapter
from tests.ranks import run_ranks

PASSED, REFUSED, FAILED = "passed", "refused", "failed"
# Of the logarithms of probabilities, all in float32.
_TOLERANCE = 2e-3
COLUMNS = ("engine", "pair", "tp2", "fp8", "int4", "lora")


@dataclass(frozen=True)
class Outcome:
    """The outcome of one model in one column.

    Args:
        what: passed, refused or failed.
        why: the refusal, or what failed.
    """

    what: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.what} ({self.why})" if self.why else self.what


def run_case(case: Case, directory: Path, columns: Sequence[str] = COLUMNS) -> dict[str, Outcome]:
    """One model in all columns but `tp2`."""
    made: dict[str, Callable[[], tuple[Prompts, list[Answer]]]] = {
        "engine": partial(_plain, case, directory / "engine", pair=False),
        "pair": partial(_plain, case, directory / "pair", pair=True),
        "fp8": partial(_variant, in_fp8, case, directory / "fp8"),
        "int4": partial(_variant, in_int4, case, directory / "int4"),
        "lora": partial(_lora, case, directory / "lora"),
    }
    found = {column: _outcome(made[column]) for column in columns if column in made}
    shutil.rmtree(directory, ignore_errors=True)
    return found


def run_two_ranks(cases: Sequence[Case], directory: Path) -> dict[str, Outcome]:
    """The column `tp2` of all these models, by their names: two processes for all."""
    directories, prompts = {}, {}
    for number, case in enumerate(cases):
        model = case.make(directory / str(number))
        prompts[case.name] = expected_of(model)
        case.publish(model.directory)
        directories[case.name] = model.directory
    (directory / "ranks").mkdir()
    texts = {name: each.prompts for name, each in prompts.items()}
    first, second = run_ranks(answers_of_rank, 2, directory / "ranks", directories, texts, MAX_TOKENS)
    assert first == second, "each rank samples the same tokens"
    return {name: _compared(prompts[name], found) for name, found in first.items()}


def _plain(case: Case, directory: Path, *, pair: bool) -> tuple[Prompts, list[Answer]]:
    model = case.make(directory)
    prompts = expected_of(model)
    case.publish(directory)
    if pair:
        return prompts, asyncio.run(pair_answers(directory, prompts.prompts, MAX_TOKENS))
    return prompts, asyncio.run(engine_answers(directory, prompts.prompts, MAX_TOKENS))


def _variant(make: Callable[[Case, Path], Model], case: Case, directory: Path) -> tuple[Prompts, list[Answer]]:
    model = make(case, directory)
    prompts = expected_of(model)
    return prompts, asyncio.run(engine_answers(model.directory, prompts.prompts, MAX_TOKENS))


def _lora(case: Case, directory: Path) -> tuple[Prompts, list[Answer]]:
    model, adapter = with_adapter(case, directory)
    prompts = expected_of(model)
    return prompts, asyncio.run(engine_answers(model.directory, prompts.prompts, MAX_TOKENS, adapter))


def _outcome(run: Callable[[], tuple[Prompts, list[Answer]]]) -> Outcome:
    try:
        return _compared(*run())
    except ConfigError as error:
        misread = error.field in ("model", "adapter")  # the files are right
        return Outcome(FAILED if misread else REFUSED, _refusal(str(error)))
    except Exception as error:  # noqa: BLE001  whatever it is, it is the cell's outcome
        return Outcome(FAILED, f"{type(error).__name__}: {error}")


def _compared(prompts: Prompts, found: list[Answer] | str) -> Outcome:
    if isinstance(found, str):
        return Outcome(REFUSED, _refusal(found))
    pairs = list(zip(found, prompts.expected, strict=True))
    if wrong := [number for number, (ours, theirs) in enumerate(pairs) if ours.tokens != theirs.tokens]:
        return Outcome(FAILED, f"other tokens than the reference's after prompts {wrong}")
    off = max(abs(a - b) for ours, theirs in pairs for a, b in zip(ours.logprobs, theirs.logprobs, strict=True))
    return Outcome(PASSED) if off < _TOLERANCE else Outcome(FAILED, f"logprobs differ by {off:.2g}")


def _refusal(text: str) -> str:
    """Without folders, and without the values of a whole table."""
    return re.sub(r" is \{.*\};", ":", re.sub(r"/\S*/", "", text))
