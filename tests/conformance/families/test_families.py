"""A sample of `make test-families`, and the outcomes of its last whole run."""

from pathlib import Path

import pytest

from baton.models.families.table import FAMILIES
from tests.conformance.families import results
from tests.conformance.families.models import Case, cases
from tests.conformance.families.run import COLUMNS, FAILED, PASSED, Outcome, run_case, run_two_ranks

SAMPLE = ("llama", "deepseek-v3", "gemma3 as Gemma3ForConditionalGeneration")
PASSES = Outcome(PASSED)


@pytest.fixture(scope="module")
def known() -> dict[str, Case]:
    return cases()


@pytest.mark.filterwarnings("ignore")  # of transformers and PEFT, about the sizes of tiny models
@pytest.mark.parametrize("name", SAMPLE)
def test_each_form_of_a_model_has_its_reference_s_tokens(name: str, known: dict[str, Case], tmp_path: Path) -> None:
    assert set(run_case(known[name], tmp_path / "case").items()) == {
        (column, PASSES) for column in COLUMNS if column != "tp2"
    }


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_have_the_reference_s_tokens(known: dict[str, Case], tmp_path: Path) -> None:
    assert run_two_ranks([known["llama"]], tmp_path) == {"llama": PASSES}


def test_each_architecture_has_a_tiny_model(known: dict[str, Case]) -> None:
    assert {case.architecture for case in known.values()} == FAMILIES.keys()


def test_a_run_of_some_models_keeps_the_others_outcomes(known: dict[str, Case]) -> None:
    before, after = {"engine": Outcome(FAILED, "why")}, {"engine": PASSES}
    cells = {"LlamaForCausalLM": {"llama": before, "of old": before}, "BloomForCausalLM": {"bloom": before}}
    rerun = {"LlamaForCausalLM": {"llama": after}}
    merged = results.updated(cells, rerun, [known["llama"], known["bloom"]])
    assert merged == {"LlamaForCausalLM": {"llama": after}, "BloomForCausalLM": {"bloom": before}}


def test_the_last_whole_run_had_each_architecture_in_each_column_and_nothing_failed() -> None:
    cells = results.read()
    assert cells.keys() == FAMILIES.keys(), "run make test-families, and commit bench/results/families.json"
    rows = [row for models in cells.values() for row in models.values()]
    assert all(row.keys() == set(COLUMNS) for row in rows)
    assert not [outcome for row in rows for outcome in row.values() if outcome.what == FAILED]
    assert all(any(row["engine"] == PASSES for row in models.values()) for models in cells.values())
