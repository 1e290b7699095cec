"""The simulation catches every planted fault: it proves only what it can detect."""

import pytest

from tests.simulation.cluster import SeedFailed, run_seed
from tests.simulation.mutants import MUTANTS, Mutant


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    mutant.plant(monkeypatch)
    assert _first_failing_seed(mutant) is not None, f"not caught within {mutant.seeds} seeds: {mutant.breaks}"


def test_a_failing_seed_says_how_to_replay_it_and_shows_its_last_events(monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS["admits_before_filled"]
    mutant.plant(monkeypatch)
    seed = _first_failing_seed(mutant)
    assert seed is not None
    with pytest.raises(SeedFailed) as caught:
        run_seed(seed, mutant.storm)
    report = str(caught.value)
    assert f"make simulate SEED={seed}" in report
    assert "I2" in report
    assert "Admit(" in report


def _first_failing_seed(mutant: Mutant) -> int | None:
    for seed in range(mutant.seeds):
        try:
            run_seed(seed, mutant.storm)
        except SeedFailed:
            return seed
    return None
